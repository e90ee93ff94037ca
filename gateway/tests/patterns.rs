//! Instancetypes and preferences: matchers, inference, conflicts, requirements, expansion.

use crate::admission::{ask, ask_with, input, update};
use crate::support::world;
use gateway::Status;
use gateway::admission::{Objects, Wanted};
use serde_json::{Value, json};

fn vm(spec: Value) -> Value {
    let template = json!({"domain": {"devices": {"disks": [{"name": "root"}]}},
        "volumes": [{"name": "root", "persistentVolumeClaim": {"claimName": "c"}}, {"name": "data", "dataVolume": {"name": "d"}},
            {"name": "empty", "emptyDisk": {"capacity": "1Mi"}}]});
    let mut o = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "a"},
        "spec": {"runStrategy": "Halted", "template": {"spec": template}}});
    for (key, value) in spec.as_object().unwrap() {
        o["spec"][key] = value.clone();
    }
    o
}

/// Objects by kind and `namespace/name`.
fn objects(all: &[(&'static str, &str, Value)]) -> Objects {
    let mut known = Objects::default();
    for (kind, place, object) in all {
        let (namespace, name) = place.split_once('/').unwrap();
        known.insert(Wanted { kind, namespace: namespace.into(), name: name.into() }, Some(object.clone()));
    }
    known
}

fn fields(answer: Result<gateway::AdmissionOutput, Status>) -> Vec<String> {
    answer.err().map(|s| s.causes().into_iter().map(|c| format!("{} {}", c.0, c.1)).collect()).unwrap_or_default()
}

const SIZE: &str = "VirtualMachineClusterInstancetype";
const HABIT: &str = "VirtualMachineClusterPreference";

fn size(more: Value) -> Value {
    let mut spec = json!({"cpu": {"guest": 2}, "memory": {"guest": "1Gi"}});
    for (key, value) in more.as_object().unwrap() {
        spec[key] = value.clone();
    }
    json!({"spec": spec})
}

#[test]
fn matchers_that_are_none_are_refused() {
    for (spec, want) in [
        (json!({"instancetype": {}}), "FieldValueNotFound spec.instancetype"),
        (json!({"preference": {"kind": "VirtualMachinePreference"}}), "FieldValueNotFound spec.preference"),
        (
            json!({"instancetype": {"name": "a", "inferFromVolume": "root"}}),
            "FieldValueNotSupported spec.instancetype.name",
        ),
        (
            json!({"preference": {"kind": "VirtualMachinePreference", "inferFromVolume": "root"}}),
            "FieldValueNotSupported spec.preference.kind",
        ),
        (
            json!({"instancetype": {"name": "a", "inferFromVolumeFailurePolicy": "Shrug"}}),
            "FieldValueInvalid spec.instancetype.inferFromVolumeFailurePolicy",
        ),
        (
            json!({"instancetype": {"name": "a", "kind": "VirtualMachinePreference"}}),
            "FieldValueInvalid spec.instancetype.kind",
        ),
    ] {
        assert_eq!(fields(ask(input("VirtualMachine", vm(spec.clone())))), [want], "{spec}");
    }
    let elsewhere = "../../namespaces/other/secrets/a";
    for (key, field) in [("name", "name"), ("revisionName", "revisionName")] {
        let mut spec = json!({"instancetype": {"name": "a"}});
        spec["instancetype"][key] = elsewhere.into();
        assert_eq!(
            fields(ask(input("VirtualMachine", vm(spec)))),
            [format!("FieldValueInvalid spec.instancetype.{field}")]
        );
    }
    let named = |name: &str, revision: &str| vm(json!({"instancetype": {"name": name, "revisionName": revision}}));
    let changed = fields(ask(update("VirtualMachine", named("a", "r"), named("b", "r"))));
    assert_eq!(changed, ["FieldValueInvalid spec.instancetype.revisionName"]);
    for (old, new) in
        [(named("a", ""), named("b", "")), (named("a", "r"), named("b", "s")), (named("a", "r"), named("b", ""))]
    {
        assert_eq!(fields(ask(update("VirtualMachine", old, new))), [] as [&str; 0]);
    }
}

#[test]
fn names_are_inferred_from_what_a_volume_is_made_of() {
    const LABEL: &str = "instancetype.kubevirt.io/default-instancetype";
    let labelled = json!({"metadata": {"labels": {LABEL: "small"}}});
    let kinded = json!({"metadata": {"labels": {LABEL: "small", "instancetype.kubevirt.io/default-instancetype-kind": "VirtualMachineInstancetype"}}});
    let plain = json!({"metadata": {}});
    let copy = |source: Value| json!({"metadata": {}, "spec": {"source": source}});
    let refer = |to: Value| json!({"metadata": {}, "spec": {"sourceRef": to}});
    let (claim, data, source, snapshot) = ("PersistentVolumeClaim", "DataVolume", "DataSource", "VolumeSnapshot");
    let (pvc, snap) =
        (json!({"pvc": {"name": "x", "namespace": "o"}}), json!({"snapshot": {"name": "x", "namespace": "o"}}));
    let small = Ok(json!({"name": "small"}));
    let why = |text: &str| Err(text.to_owned());
    for (volume, known, want) in [
        ("root", vec![(claim, "default/c", labelled.clone())], small.clone()),
        (
            "root",
            vec![(claim, "default/c", kinded)],
            Ok(json!({"name": "small", "kind": "VirtualMachineInstancetype"})),
        ),
        ("root", vec![(claim, "default/c", plain.clone())], why("unable to find required")),
        ("root", vec![], why("PersistentVolumeClaim default/c not found")),
        ("none", vec![], why("unable to find volume none")),
        ("empty", vec![], why("type is not supported")),
        ("data", vec![(data, "default/d", labelled.clone())], small.clone()),
        ("data", vec![(claim, "default/d", labelled.clone())], small.clone()),
        ("data", vec![(data, "default/d", copy(pvc.clone())), (claim, "o/x", labelled.clone())], small.clone()),
        ("data", vec![(data, "default/d", copy(snap.clone())), (snapshot, "o/x", labelled.clone())], small.clone()),
        ("data", vec![(data, "default/d", copy(json!({"blank": {}})))], why("DataVolumeSource is not supported")),
        (
            "data",
            vec![(data, "default/d", refer(json!({"kind": "Other", "name": "x"})))],
            why("Kind Other is not supported"),
        ),
        (
            "data",
            vec![
                (data, "default/d", refer(json!({"kind": "DataSource", "name": "s"}))),
                (source, "default/s", labelled.clone()),
            ],
            small.clone(),
        ),
        (
            "data",
            vec![
                (data, "default/d", refer(json!({"kind": "DataSource", "name": "s", "namespace": "n"}))),
                (source, "n/s", json!({"spec": {"source": pvc}})),
                (claim, "o/x", labelled.clone()),
            ],
            small.clone(),
        ),
        (
            "data",
            vec![
                (data, "default/d", refer(json!({"kind": "DataSource", "name": "s"}))),
                (source, "default/s", json!({"spec": {"source": snap}})),
                (snapshot, "o/x", labelled.clone()),
            ],
            small.clone(),
        ),
        (
            "data",
            vec![
                (data, "default/d", refer(json!({"kind": "DataSource", "name": "s"}))),
                (source, "default/s", json!({"spec": {"source": {}}})),
            ],
            why("doesn't provide DataVolumeSourcePVC"),
        ),
    ] {
        let asked = input("VirtualMachine", vm(json!({"instancetype": {"inferFromVolume": volume}})));
        let answer = ask_with(asked, &objects(&known));
        match (answer, want) {
            (Ok(out), Ok(want)) => assert_eq!(out.object["spec"]["instancetype"], want, "{known:?}"),
            (Err(status), Err(text)) => assert!(status.code == 400 && status.message.contains(&text), "{status}"),
            (answer, want) => panic!("{known:?}: {answer:?} instead of {want:?}"),
        }
    }
}

#[test]
fn an_inference_that_may_fail_clears_the_matcher() {
    let asked = |volume: &str, guest: Value| {
        let mut o = vm(json!({"preference": {"inferFromVolume": volume, "inferFromVolumeFailurePolicy": "Ignore"},
            "instancetype": {"inferFromVolume": volume, "inferFromVolumeFailurePolicy": "Ignore"}}));
        o["spec"]["template"]["spec"]["domain"]["memory"] = json!({"guest": guest});
        input("VirtualMachine", o)
    };
    let out = ask(asked("empty", json!("64Mi"))).unwrap();
    assert_eq!((out.object["spec"].get("instancetype"), out.object["spec"].get("preference")), (None, None));
    assert_eq!(out.object["spec"]["template"]["spec"]["domain"]["memory"]["guest"], "64Mi");
    // What cannot be ignored: there is no such volume, no such claim.
    assert_eq!(ask(asked("none", json!("64Mi"))).unwrap_err().code, 400);
    assert_eq!(ask(asked("root", json!("64Mi"))).unwrap_err().code, 400);
    // Where it works, the memory that stood there for the other case goes.
    let labels = json!({"metadata": {"labels": {"instancetype.kubevirt.io/default-instancetype": "s", "instancetype.kubevirt.io/default-preference": "p"}}});
    let out =
        ask_with(asked("root", json!("64Mi")), &objects(&[("PersistentVolumeClaim", "default/c", labels)])).unwrap();
    assert_eq!(out.object["spec"]["instancetype"], json!({"name": "s"}));
    assert_eq!(out.object["spec"]["preference"], json!({"name": "p"}));
    assert_eq!(out.object["spec"]["template"]["spec"]["domain"].get("memory"), None);
}

#[test]
fn what_is_named_is_held_against_the_machine() {
    let both = json!({"instancetype": {"name": "s"}, "preference": {"name": "p"}});
    let ask_both = |spec: Value, it: Value, preference: Value, own: Value| {
        let mut o = vm(spec);
        let template = &mut o["spec"]["template"]["spec"];
        for (key, value) in own.as_object().unwrap() {
            template["domain"][key] = value.clone();
        }
        ask_with(
            input("VirtualMachine", o),
            &objects(&[(SIZE, "/s", size(it)), (HABIT, "/p", json!({"spec": preference}))]),
        )
    };
    let none = json!({});
    let out =
        ask_both(both.clone(), none.clone(), json!({"machine": {"preferredMachineType": "pc-q35-9.2"}}), none.clone())
            .unwrap();
    assert!(!out.warnings.iter().any(|w| w.contains("found")), "{:?}", out.warnings);
    let spec = &out.object["spec"]["template"]["spec"];
    assert_eq!(spec["domain"]["machine"]["type"], "pc-q35-9.2", "it must not change at the next start");
    assert_eq!(spec["domain"].get("memory"), None, "the machine itself stays as it was written");
    let base = "spec.template.spec.domain";
    for (it, preference, own, want) in [
        (
            none.clone(),
            none.clone(),
            json!({"memory": {"guest": "1Gi"}, "cpu": {"cores": 1}}),
            vec![format!("FieldValueInvalid {base}.cpu.cores"), format!("FieldValueInvalid {base}.memory.guest")],
        ),
        (
            json!({"cpu": {"guest": 3}}),
            json!({"cpu": {"preferredCPUTopology": "spread"}}),
            none.clone(),
            vec!["FieldValueInvalid instancetype.spec.cpu.guest".into()],
        ),
        (
            none.clone(),
            json!({"requirements": {"cpu": {"guest": 4}}}),
            none.clone(),
            vec!["FieldValueNotFound spec.instancetype".into()],
        ),
        (
            none.clone(),
            json!({"requirements": {"architecture": "arm64"}}),
            none.clone(),
            vec!["FieldValueNotFound spec.template.spec.architecture".into()],
        ),
        // What they bring and is not built is refused as if the machine had it.
        (
            json!({"memory": {"guest": "1Gi", "hugepages": {"pageSize": "2Mi"}}}),
            none.clone(),
            none.clone(),
            vec![format!("FieldValueNotSupported {base}.memory.hugepages")],
        ),
        (
            none.clone(),
            json!({"devices": {"preferredTPM": {}}}),
            none.clone(),
            vec![format!("FieldValueNotSupported {base}.devices.tpm")],
        ),
    ] {
        assert_eq!(
            fields(ask_both(both.clone(), it.clone(), preference.clone(), own.clone())),
            want,
            "{it} {preference} {own}"
        );
    }
    // What is not there is a matter for a warning, and so is a record.
    let out = ask(input("VirtualMachine", vm(both))).unwrap();
    let named = out.warnings.iter().filter(|w| w.contains("could not be found")).count();
    assert_eq!(named, 2, "{:?}", out.warnings);
    let record = "a-two-processors-v1beta1-5d307ca9-b3ef-428c-8861-06e72d69f223-1";
    let pinned = vm(json!({"instancetype": {"name": "s", "revisionName": record}}));
    assert!(ask(input("VirtualMachine", pinned.clone())).unwrap().warnings[0].contains(record));
    let body = json!({"data": {"kind": SIZE, "spec": {"cpu": {"guest": 1}, "memory": {"guest": "1Gi"}}}});
    let out = ask_with(
        input("VirtualMachine", pinned),
        &objects(&[("ControllerRevision", &format!("default/{record}"), body)]),
    )
    .unwrap();
    assert!(!out.warnings.iter().any(|w| w.contains("found")), "{:?}", out.warnings);
}

#[test]
fn the_objects_themselves_are_checked() {
    let out = ask(input("VirtualMachineInstancetype", size(json!({"gpus": [{"name": "g"}]})))).unwrap();
    assert!(
        out.warnings[0].contains("spec.gpus is not supported yet") && out.warnings[0].contains("refused"),
        "{:?}",
        out.warnings
    );
    let over = size(json!({"memory": {"guest": "1Gi", "overcommitPercent": 20, "hugepages": {"pageSize": "2Mi"}}}));
    assert_eq!(fields(ask(input(SIZE, over))), ["FieldValueInvalid spec.memory.overcommitPercent"]);
    let bad = json!({"spec": {"cpu": {"preferredCPUTopology": "round"}}});
    assert_eq!(fields(ask(input(HABIT, bad))), ["FieldValueInvalid spec.cpu.preferredCPUTopology"]);
    let old = json!({"spec": {"cpu": {"preferredCPUTopology": "preferCores"}}});
    assert!(ask(input("VirtualMachinePreference", old)).unwrap().warnings[0].contains("deprecated"));
}

#[tokio::test]
async fn a_machine_is_shown_with_what_it_names() {
    let world = world().await;
    let base = "/apis/instancetype.kubevirt.io/v1beta1";
    let one = |kind: &str, name: &str, spec: Value| json!({"apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": kind, "metadata": {"name": name}, "spec": spec});
    let spec = json!({"cpu": {"guest": 4}, "memory": {"guest": "64Mi"}});
    let made =
        world.ask("POST", &format!("{base}/virtualmachineclusterinstancetypes"), Some(one(SIZE, "s", spec))).await;
    assert_eq!(made.0, 201, "{}", made.1);
    let spec = json!({"cpu": {"preferredCPUTopology": "cores"}, "devices": {"preferredDiskBus": "virtio"}});
    let habit = one("VirtualMachinePreference", "p", spec);
    let made = world.ask("POST", &format!("{base}/namespaces/default/virtualmachinepreferences"), Some(habit)).await;
    assert_eq!(made.0, 201, "{}", made.1);

    let mut vm =
        vm(json!({"instancetype": {"name": "s"}, "preference": {"name": "p", "kind": "VirtualMachinePreference"}}));
    let vms = "/apis/kubevirt.io/v1/namespaces/default/virtualmachines";
    let made = world.ask("POST", vms, Some(vm.clone())).await;
    assert_eq!(made.0, 201, "{}", made.1);
    let (code, shown) = world.verb("GET", "vm/expand-spec", None).await;
    assert_eq!(code, 200, "{shown}");
    let expect = |shown: &Value| {
        let domain = &shown["spec"]["template"]["spec"]["domain"];
        assert_eq!(domain["cpu"], json!({"sockets": 1, "cores": 4, "threads": 1, "model": "host-model"}));
        assert_eq!(domain["memory"]["guest"], "64Mi");
        assert_eq!(domain["devices"]["disks"][0]["disk"]["bus"], "virtio");
        assert_eq!((shown["spec"].get("instancetype"), shown["spec"].get("preference")), (None, None));
    };
    expect(&shown);
    assert_eq!(world.vm().await["spec"]["instancetype"]["name"], "s", "shown, not changed");

    let put = "/apis/subresources.kubevirt.io/v1/namespaces/default/expand-vm-spec";
    let (code, shown) = world.ask("PUT", put, Some(vm.clone())).await;
    assert_eq!(code, 200, "{shown}");
    expect(&shown);
    assert_eq!(shown["metadata"]["namespace"], "default");
    assert_eq!(shown["spec"]["template"]["spec"]["domain"]["firmware"].get("uuid"), None);
    let refused = |body: Option<Value>| world.ask("PUT", put, body);
    vm["metadata"]["namespace"] = "other".into();
    assert_eq!(refused(Some(vm.clone())).await.1["message"], "VM namespace must be empty or default");
    vm["metadata"]["namespace"] = "default".into();
    vm["spec"]["instancetype"]["name"] = "none".into();
    let (code, status) = refused(Some(vm.clone())).await;
    assert_eq!((code, &status["message"]), (400, &json!("VirtualMachineClusterInstancetype \"none\" not found")));
    vm["spec"]["instancetype"]["name"] = "s".into();
    vm["spec"]["template"]["spec"]["domain"]["memory"] = json!({"guest": "1Gi"});
    let (code, status) = refused(Some(vm)).await;
    let field = "spec.template.spec.domain.memory.guest";
    assert!(code == 400 && status["message"].as_str().unwrap().contains(field), "{status}");
    assert_eq!(refused(None).await.1["message"], "empty request body");
    assert_eq!(refused(Some(json!({"kind": "Pod"}))).await.0, 400);
    assert_eq!(world.ask("GET", put, None).await.0, 405);
}
