//! The KubeVirt object: the settings of a cluster, and who may make and end it.

use crate::admission::{ask, input, spec, spec_with, update, vm, vmi};
use crate::support::world;
use gateway::admission::{Context, Objects, Wanted, admit};
use gateway::{AdmissionInput, AdmissionOutput, Operation, ReferencePolicy, Settings, Status};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const KIND: &str = "KubeVirt";

fn kubevirt(spec: Value) -> Value {
    json!({"apiVersion": "kubevirt.io/v1", "kind": KIND, "metadata": {"name": "kubevirt", "uid": "u"}, "spec": spec})
}

fn ask_under(settings: &Settings, objects: &Objects, input: AdmissionInput) -> Result<AdmissionOutput, Status> {
    let uuid = || "5d307ca9-b3ef-428c-8861-06e72d69f223".to_owned();
    let trace = || "00-11111111111111111111111111111111-2222222222222222-01".to_owned();
    admit(input, &Context { settings, now: "2026-01-02T03:04:05Z", uuid: &uuid, trace: &trace, objects })
}

/// Lists of whole kinds.
fn lists(all: &[(&'static str, Value)]) -> Objects {
    let mut known = Objects::default();
    for (kind, items) in all {
        known.insert(Wanted { kind, namespace: String::new(), name: String::new() }, Some(json!({"items": items})));
    }
    known
}

#[test]
fn what_it_says_is_held_against_its_rules() {
    // As KubeVirt's own example is.
    let usual = json!({"certificateRotateStrategy": {}, "configuration": {"developerConfiguration": {"featureGates": []}},
        "customizeComponents": {}, "imagePullPolicy": "IfNotPresent", "workloadUpdateStrategy": {}});
    let out =
        ask_under(&Settings::default(), &lists(&[(KIND, json!([]))]), input(KIND, kubevirt(usual.clone()))).unwrap();
    assert_eq!(out.object["spec"], usual);
    assert_eq!(out.warnings.len(), 1, "{:?}", out.warnings);
    let configuration = |c: Value| json!({"configuration": c});
    let gates = json!({"featureGates": ["A", "B"], "disabledFeatureGates": ["B"]});
    for (spec, cause) in [
        (configuration(json!({"evictionStrategy": "Pray"})), "FieldValueInvalid spec.configuration.evictionStrategy"),
        (configuration(json!({"machineType": "pc"})), "FieldValueInvalid spec.configuration.machineType"),
        (
            configuration(json!({"architectureConfiguration": {"amd64": {"machineType": "pc"}}})),
            "FieldValueInvalid spec.configuration.architectureConfiguration.amd64.machineType",
        ),
        (
            configuration(json!({"developerConfiguration": gates})),
            "FieldValueForbidden spec.configuration.developerConfiguration.featureGates",
        ),
        (configuration(json!({"smbios": {"sku": "x"}})), "FieldValueNotSupported spec.configuration.smbios"),
        (
            configuration(json!({"network": {"defaultNetworkInterface": "bridge"}})),
            "FieldValueNotSupported spec.configuration.network.defaultNetworkInterface",
        ),
        (json!({"infra": {"replicas": 0}}), "FieldValueInvalid spec.infra.replicas"),
        (json!({"uninstallStrategy": "Never"}), "FieldValueInvalid spec.uninstallStrategy"),
    ] {
        let (old, new) = (kubevirt(json!({})), kubevirt(spec));
        let causes = ask(update(KIND, old, new)).unwrap_err().causes();
        let got: Vec<String> = causes.iter().map(|c| format!("{} {}", c.0, c.1)).collect();
        assert_eq!(got, [cause]);
    }
}

#[test]
fn there_is_one_and_machines_may_hold_it() {
    let there = lists(&[(KIND, json!([{"metadata": {"uid": "other"}}]))]);
    let refused = ask_under(&Settings::default(), &there, input(KIND, kubevirt(json!({})))).unwrap_err();
    assert_eq!((refused.code, refused.message.as_str()), (400, "KubeVirt is already created"));
    let none = || json!([]);
    let some = || json!([{"metadata": {"name": "a"}}]);
    for (strategy, phase, machines, instances, held) in [
        ("BlockUninstallIfWorkloadsExist", "Deployed", some(), none(), true),
        ("BlockUninstallIfWorkloadsExist", "Deployed", none(), some(), true),
        ("BlockUninstallIfWorkloadsExist", "Deployed", none(), none(), false),
        ("BlockUninstallIfWorkloadsExist", "", some(), none(), false),
        ("RemoveWorkloads", "Deployed", some(), some(), false),
        ("", "Deployed", some(), some(), false),
    ] {
        let objects = lists(&[
            ("VirtualMachine", machines),
            ("VirtualMachineInstance", instances),
            ("VirtualMachineInstanceReplicaSet", none()),
        ]);
        let mut object = kubevirt(json!({"uninstallStrategy": strategy}));
        object["status"] = json!({"phase": phase});
        let end = AdmissionInput { operation: Operation::Delete, old_object: Some(object), ..input(KIND, Value::Null) };
        let code = ask_under(&Settings::default(), &objects, end).err().map(|s| s.code);
        assert_eq!(code, held.then_some(400), "{strategy} {phase}");
    }
}

#[test]
fn what_is_left_open_is_filled_in_as_the_cluster_says() {
    let configuration = json!({"cpuModel": "Haswell", "evictionStrategy": "External", "machineType": "q35",
        "architectureConfiguration": {"amd64": {"machineType": "pc-q35-9.0"}}, "instancetype": {"referencePolicy": "expandAll"}});
    let own = Settings { trusted: vec!["me".into()], ..Settings::default() };
    let settings = own.configured_by(&kubevirt(json!({"configuration": configuration})));
    assert_eq!((settings.trusted.len(), settings.reference_policy), (1, ReferencePolicy::ExpandAll));
    let made = ask_under(&settings, &Objects::default(), input("VirtualMachineInstance", vmi(spec()))).unwrap().object;
    assert_eq!(made["spec"]["evictionStrategy"], "External");
    assert_eq!(made["spec"]["domain"]["cpu"]["model"], "Haswell");
    assert_eq!(made["spec"]["domain"]["machine"]["type"], "pc-q35-9.0");
    let said = spec_with(&json!({"evictionStrategy": "None", "domain": {"cpu": {"model": "host-model"}}}));
    let made = ask_under(&settings, &Objects::default(), input("VirtualMachineInstance", vmi(said))).unwrap().object;
    assert_eq!(
        (&made["spec"]["evictionStrategy"], &made["spec"]["domain"]["cpu"]["model"]),
        (&json!("None"), &json!("host-model"))
    );
    let nothing = own.configured_by(&kubevirt(json!({})));
    assert_eq!((nothing.machine_type.as_str(), nothing.reference_policy), ("q35", ReferencePolicy::Reference));
}

#[test]
fn a_machine_is_stored_with_what_it_names_where_the_cluster_says_so() {
    let mut objects = Objects::default();
    let size = json!({"spec": {"cpu": {"guest": 2}, "memory": {"guest": "64Mi"}}});
    let of =
        |name: &str| Wanted { kind: "VirtualMachineClusterInstancetype", namespace: String::new(), name: name.into() };
    objects.insert(of("s"), Some(size.clone()));
    objects.insert(of("none"), None);
    let record = Wanted { kind: "ControllerRevision", namespace: "default".into(), name: "r".into() };
    let data = json!({"apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": "VirtualMachineClusterInstancetype", "spec": size["spec"]});
    objects.insert(record, Some(json!({"data": data})));
    let machine = |name: &str, revision: &str| {
        let mut o = vm(spec_with(&json!({"domain": {"memory": null}})));
        o["spec"]["instancetype"] = json!({"name": name});
        if !revision.is_empty() {
            o["status"] = json!({"instancetypeRef": {"name": name, "controllerRevisionRef": {"name": revision}}});
        }
        o
    };
    use ReferencePolicy::{Expand, ExpandAll, Reference};
    for (policy, name, revision, expanded) in [
        (Reference, "s", "", false),
        (Expand, "s", "", true),
        (Expand, "s", "r", false),
        (ExpandAll, "s", "r", true),
        // It may come later, and stays named until then.
        (ExpandAll, "none", "", false),
    ] {
        let settings = Settings { reference_policy: policy, ..Settings::default() };
        let old = vm(spec());
        let asked = update("VirtualMachine", old, machine(name, revision));
        let out = ask_under(&settings, &objects, asked).unwrap_or_else(|e| panic!("{policy:?}: {e}: {:?}", e.causes()));
        let stored = &out.object["spec"];
        assert_eq!(stored.get("instancetype").is_none(), expanded, "{policy:?} {name} {revision}: {stored}");
        let memory = &stored["template"]["spec"]["domain"]["memory"]["guest"];
        assert_eq!(memory.as_str(), expanded.then_some("64Mi"));
        // What is stored is not expanded again.
        let again = update("VirtualMachine", vm(spec()), out.object.clone());
        let again = ask_under(&settings, &objects, again).unwrap().object;
        assert_eq!(again["spec"], out.object["spec"]);
    }
}

#[tokio::test]
async fn the_gateway_follows_it_and_says_so() {
    let world = world().await;
    let gateway = world.gateway.clone();
    let follower = tokio::spawn(async move { gateway.follow().await });
    let path = "/apis/kubevirt.io/v1/namespaces/default/kubevirts";
    let made = kubevirt(json!({"uninstallStrategy": "BlockUninstallIfWorkloadsExist",
        "configuration": {"evictionStrategy": "External"}}));
    let (code, said) = world.ask("POST", path, Some(made.clone())).await;
    assert_eq!(code, 201, "{said}");
    let one = format!("{path}/kubevirt");
    let begun = Instant::now();
    let acknowledged = |generation: i64| {
        let (world, one) = (&world, &one);
        async move {
            loop {
                let now = world.ask("GET", one, None).await.1;
                if now["status"]["observedGeneration"] == generation && now["status"]["phase"] == "Deployed" {
                    return now;
                }
                assert!(begun.elapsed() < Duration::from_secs(60), "{now}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    };
    let now = acknowledged(1).await;
    assert_eq!(now["status"]["conditions"][0]["type"], "Available");
    let vmi = world.make_vmi(json!({})).await;
    assert_eq!(vmi["spec"]["evictionStrategy"], "External");
    let mut second = made.clone();
    second["metadata"]["name"] = json!("another");
    let (code, said) = world.ask("POST", path, Some(second)).await;
    assert_eq!((code, &said["message"]), (400, &json!("KubeVirt is already created")));
    let (code, said) = world.ask("DELETE", &one, None).await;
    assert!(code == 400 && said["message"].as_str().unwrap().contains("VirtualMachineInstance"), "{said}");
    let other = json!({"spec": {"uninstallStrategy": "RemoveWorkloads", "configuration": {"evictionStrategy": null}}});
    assert_eq!(world.ask("PATCH", &one, Some(other)).await.0, 200);
    acknowledged(2).await;
    let spec = json!({"domain": {"devices": {}, "memory": {"guest": "64Mi"}}});
    let mut bare = crate::admission::vmi(spec);
    bare["metadata"]["name"] = json!("second");
    let path = "/apis/kubevirt.io/v1/namespaces/default/virtualmachineinstances";
    let (code, made) = world.ask("POST", path, Some(bare)).await;
    assert_eq!((code, &made["spec"]["evictionStrategy"]), (201, &json!("None")));
    assert_eq!(world.ask("DELETE", &one, None).await.0, 200);
    follower.abort();
}

#[tokio::test]
async fn a_gateway_is_ready_as_long_as_it_can_follow_what_it_depends_on() {
    let world = world().await;
    let (open, opened) = tokio::sync::watch::channel(false);
    let readiness = telemetry::Readiness::default();
    let gateway = world.behind(opened, readiness.clone());
    assert!(readiness.check().unwrap_err().ends_with("they are not known yet"), "before anybody has looked");
    let follower = tokio::spawn(async move { gateway.follow().await });
    let until = async |ready: bool| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while readiness.check().is_ok() != ready {
            assert!(Instant::now() < deadline, "{:?}, and {ready} is waited for", readiness.check());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        readiness.check()
    };
    for _ in 0..2 {
        let why = until(false).await.unwrap_err();
        assert!(why.starts_with("presets: ") || why.starts_with("settings: "), "{why}");
        open.send(true).unwrap();
        // A watch that is taken up again brings nothing that is new, and is as good as ever.
        until(true).await.unwrap();
        open.send(false).unwrap();
    }
    until(false).await.unwrap_err();
    follower.abort();
}
