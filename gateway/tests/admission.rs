//! Tables of good and bad objects.

use gateway::admission::{Context, Objects, admit};
use gateway::{AdmissionInput, AdmissionOutput, Operation, Settings, Status, User};
use serde_json::{Value, json};

const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const FRESH: &str = "00-11111111111111111111111111111111-2222222222222222-01";

pub fn input(kind: &str, object: Value) -> AdmissionInput {
    AdmissionInput {
        operation: Operation::Create,
        kind: kind.into(),
        subresource: String::new(),
        namespace: "default".into(),
        name: String::new(),
        user: User { name: "somebody".into(), groups: vec!["system:masters".into()] },
        object,
        old_object: None,
        traceparent: None,
    }
}

pub fn ask(input: AdmissionInput) -> Result<AdmissionOutput, Status> {
    ask_with(input, &Objects::default())
}

/// The same, among these objects.
pub fn ask_with(input: AdmissionInput, objects: &Objects) -> Result<AdmissionOutput, Status> {
    let settings = Settings::default();
    admit(
        input,
        &Context {
            settings: &settings,
            now: "2026-01-02T03:04:05Z",
            uuid: &|| "5d307ca9-b3ef-428c-8861-06e72d69f223".into(),
            trace: &|| FRESH.into(),
            objects,
        },
    )
}

pub fn update(kind: &str, old: Value, new: Value) -> AdmissionInput {
    AdmissionInput { operation: Operation::Update, old_object: Some(old), ..input(kind, new) }
}

pub fn spec() -> Value {
    json!({
        "domain": {"devices": {"disks": [{"name": "root", "disk": {"bus": "virtio"}}]}, "memory": {"guest": "128Mi"}},
        "volumes": [{"name": "root", "containerDisk": {"image": "registry/image:1"}}],
    })
}

pub fn vmi(spec: Value) -> Value {
    json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "a"}, "spec": spec})
}

pub fn vm(spec: Value) -> Value {
    json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "a"}, "spec": {"runStrategy": "Always", "template": {"spec": spec}}})
}

pub fn merge(into: &mut Value, patch: &Value) {
    match (into, patch) {
        (Value::Object(o), Value::Object(p)) => {
            for (k, v) in p {
                if v.is_null() {
                    o.remove(k);
                } else {
                    merge(o.entry(k).or_insert(Value::Null), v);
                }
            }
        }
        (o, p) => *o = p.clone(),
    }
}

pub fn spec_with(patch: &Value) -> Value {
    let mut s = spec();
    merge(&mut s, patch);
    s
}

#[test]
fn an_instance_gets_its_defaults() {
    let out = ask(input("VirtualMachineInstance", vmi(spec()))).unwrap();
    let o = out.object;
    assert_eq!(o["metadata"]["finalizers"], json!(["kubevirt.io/foregroundDeleteVirtualMachine"]));
    assert_eq!(o["metadata"]["annotations"]["virtfold.io/traceparent"], FRESH);
    assert_eq!(
        o["status"],
        json!({
            "phase": "Pending",
            "phaseTransitionTimestamps": [{"phase": "Pending", "phaseTransitionTimestamp": "2026-01-02T03:04:05Z"}],
            "memory": {"guestAtBoot": "128Mi", "guestCurrent": "128Mi", "guestRequested": "128Mi"},
            "currentCPUTopology": {"cores": 1, "sockets": 1, "threads": 1},
            "runtimeUser": 107,
        })
    );
    assert_eq!(o["spec"]["domain"]["machine"]["type"], "q35");
    assert_eq!(o["spec"]["domain"]["devices"]["interfaces"], json!([{"name": "default", "masquerade": {}}]));
    assert_eq!(o["spec"]["volumes"][0]["containerDisk"]["imagePullPolicy"], "IfNotPresent");
    assert!(out.warnings.is_empty(), "{:?}", out.warnings);
    let again = ask(input("VirtualMachineInstance", o.clone())).unwrap();
    // Who is not of the control plane brings no status along.
    assert_eq!(again.object["spec"], o["spec"]);
    assert_eq!(again.object["metadata"], o["metadata"]);
}

#[test]
fn a_machine_keeps_only_what_must_not_change() {
    let out = ask(AdmissionInput { traceparent: Some(TRACE.into()), ..input("VirtualMachine", vm(spec())) }).unwrap();
    let mut want = vm(spec());
    merge(
        &mut want,
        &json!({
            "metadata": {"annotations": {"virtfold.io/changed-by": "somebody", "virtfold.io/traceparent": TRACE}, "finalizers": ["kubevirt.io/virtualMachineControllerFinalize"]},
            "spec": {"template": {"spec": {"architecture": "amd64", "domain": {"machine": {"type": "q35"},
                "firmware": {"uuid": "5d307ca9-b3ef-428c-8861-06e72d69f223", "serial": "5d307ca9-b3ef-428c-8861-06e72d69f223"}}}}},
        }),
    );
    assert_eq!(out.object, want);
    // A change of a label is no new operation; one of the spec is.
    let old = out.object;
    let mut new = old.clone();
    new["metadata"]["labels"] = json!({"a": "b"});
    assert_eq!(
        ask(update("VirtualMachine", old.clone(), new.clone())).unwrap().object["metadata"]["annotations"]["virtfold.io/traceparent"],
        TRACE
    );
    new["spec"]["runStrategy"] = json!("Halted");
    let stopped = ask(update("VirtualMachine", old.clone(), new.clone())).unwrap().object;
    assert_eq!(stopped["metadata"]["annotations"]["virtfold.io/traceparent"], FRESH);
    assert_eq!(stopped["spec"]["template"], old["spec"]["template"]);
    // One that is being deleted passes as it is: its finalizers have to come off.
    new["metadata"]["deletionTimestamp"] = json!("2026-01-02T03:04:05Z");
    new["metadata"]["finalizers"] = json!([]);
    new["spec"] = json!({});
    assert_eq!(ask(update("VirtualMachine", old, new.clone())).unwrap().object, new);
}

#[test]
fn the_shell_of_a_machine() {
    for (what, patch, want) in [
        ("both", json!({"running": true}), Err("spec.running")),
        ("neither", json!({"runStrategy": null}), Err("spec.running")),
        ("unknown", json!({"runStrategy": "Sometimes"}), Err("spec.runStrategy")),
        ("receiver", json!({"runStrategy": "WaitAsReceiver"}), Err("spec.runStrategy")),
        ("no template", json!({"template": null}), Err("spec.template")),
        ("instance type that is not there", json!({"instancetype": {"name": "x"}}), Ok(1)),
        ("DataVolumes", json!({"dataVolumeTemplates": [{"metadata": {"name": "x"}}]}), Err("spec.dataVolumeTemplates")),
        (
            "a label that is the control plane's",
            json!({"template": {"metadata": {"labels": {"kubevirt.io/nodeName": "n"}}}}),
            Err("spec.template.metadata.labels"),
        ),
        (
            "a label that is none",
            json!({"template": {"metadata": {"labels": {"a": "-b"}}}}),
            Err("spec.template.metadata.labels"),
        ),
        (
            "ignition",
            json!({"template": {"metadata": {"annotations": {"kubevirt.io/ignitiondata": "{}"}}}}),
            Err("spec.template.metadata.annotations[kubevirt.io/ignitiondata]"),
        ),
        (
            "sidecar",
            json!({"template": {"metadata": {"annotations": {"hooks.kubevirt.io/hookSidecars": "[]"}}}}),
            Err("spec.template.metadata.annotations"),
        ),
        ("running alone", json!({"running": true, "runStrategy": null}), Ok(1)),
        ("once", json!({"runStrategy": "Once"}), Ok(0)),
        ("no memory", json!({"template": {"spec": {"domain": {"memory": null}}}}), Ok(1)),
    ] {
        let mut object = vm(spec());
        merge(&mut object["spec"], &patch);
        match (ask(input("VirtualMachine", object)), want) {
            (Ok(out), Ok(n)) => assert_eq!(out.warnings.len(), n, "{what}: {:?}", out.warnings),
            (Err(s), Err(field)) => {
                assert_eq!(s.causes().first().map(|c| c.1.clone()).as_deref(), Some(field), "{what}")
            }
            (got, want) => panic!("{what}: {got:?}, wanted {want:?}"),
        }
    }
}

#[test]
fn an_instance_without_memory_is_refused() {
    let status =
        ask(input("VirtualMachineInstance", vmi(spec_with(&json!({"domain": {"memory": null}}))))).unwrap_err();
    assert_eq!(status.causes(), [("FieldValueRequired".to_owned(), String::new(), "no memory requested".to_owned())]);
}

#[test]
fn at_most_ten_causes() {
    let disks: Vec<Value> = (0..20).map(|i| json!({"name": format!("d{i}")})).collect();
    let status =
        ask(input("VirtualMachineInstance", vmi(spec_with(&json!({"domain": {"devices": {"disks": disks}}})))))
            .unwrap_err();
    assert_eq!(status.causes().len(), 10);
    assert!(status.message.ends_with("more validation errors"), "{status}");
}

#[test]
fn instances_belong_to_the_control_plane() {
    let old = ask(input("VirtualMachineInstance", vmi(spec()))).unwrap().object;
    let controller = User { name: "system:virtfold:controller".into(), groups: vec![] };
    let changed = |f: fn(&mut Value)| {
        let mut new = old.clone();
        f(&mut new);
        update("VirtualMachineInstance", old.clone(), new)
    };
    // Spec: refused for users.
    let spec_change = changed(|o| o["spec"]["terminationGracePeriodSeconds"] = json!(1));
    let status = ask(spec_change.clone()).unwrap_err();
    assert_eq!(
        (status.code, status.message.as_str(), status.causes()[0].0.as_str()),
        (422, "update of VMI object is restricted", "FieldValueNotSupported")
    );
    assert!(ask(AdmissionInput { user: controller.clone(), ..spec_change }).is_ok());
    // Status: put back without a word.
    let status_change = changed(|o| o["status"]["phase"] = json!("Running"));
    assert_eq!(ask(status_change.clone()).unwrap().object, old);
    assert_eq!(
        ask(AdmissionInput { user: controller.clone(), ..status_change }).unwrap().object["status"]["phase"],
        "Running"
    );
    // Labels: the reserved ones are refused, others are free.
    let label = changed(|o| o["metadata"]["labels"] = json!({"kubevirt.io/nodeName": "n"}));
    assert_eq!(ask(label.clone()).unwrap_err().causes()[0].1, "metadata.labels");
    assert!(ask(AdmissionInput { user: controller.clone(), ..label }).is_ok());
    assert!(ask(changed(|o| o["metadata"]["labels"] = json!({"mine": "n"}))).is_ok());
    let mut forged = vmi(spec());
    forged["metadata"]["labels"] = json!({"kubevirt.io/created-by": "me"});
    assert_eq!(ask(input("VirtualMachineInstance", forged)).unwrap_err().causes()[0].1, "metadata.labels");
    // Nor may anybody say that a machine is of another boot of its node: it would count as over.
    let boot = changed(|o| o["metadata"]["annotations"] = json!({"virtfold.io/boot-id": "another"}));
    assert_eq!(ask(boot.clone()).unwrap_err().causes()[0].1, "metadata.annotations[virtfold.io/boot-id]");
    assert!(ask(AdmissionInput { user: controller.clone(), ..boot }).is_ok());
    // What the controller promised does not change either.
    let max = changed(|o| o["spec"]["domain"]["cpu"]["maxSockets"] = json!(9));
    assert_eq!(
        ask(AdmissionInput { user: controller.clone(), ..max }).unwrap_err().causes()[0].1,
        "spec.domain.cpu.maxSockets"
    );
    let fewer = changed(|o| o["spec"]["volumes"] = json!([]));
    let other = changed(|o| o["spec"]["domain"]["devices"]["disks"][0]["disk"]["bus"] = json!("scsi"));
    for (change, field) in [(fewer, "spec.volumes"), (other, "spec.domain.devices.disks")] {
        let causes = ask(AdmissionInput { user: controller.clone(), ..change }).unwrap_err().causes();
        assert_eq!(causes.iter().map(|c| c.1.as_str()).collect::<Vec<_>>(), [field]);
    }
}

#[test]
fn a_running_snapshot_guards_the_machine() {
    let mut old = ask(input("VirtualMachine", vm(spec()))).unwrap().object;
    old["status"] = json!({"snapshotInProgress": "s"});
    let mut new = old.clone();
    new["spec"]["runStrategy"] = json!("Halted");
    let causes = ask(update("VirtualMachine", old.clone(), new)).unwrap_err().causes();
    assert_eq!((causes.len(), causes[0].0.as_str(), causes[0].1.as_str()), (1, "FieldValueNotSupported", "spec"));
    let mut more = old.clone();
    more["spec"]["template"]["spec"]["volumes"]
        .as_array_mut()
        .unwrap()
        .push(json!({"name": "x", "emptyDisk": {"capacity": "1Gi"}}));
    let causes = ask(update("VirtualMachine", old.clone(), more)).unwrap_err().causes();
    assert!(causes[0].0 == "FieldValueNotSupported" && causes[0].2.contains("disks or volumes"), "{causes:?}");
    let mut labelled = old.clone();
    labelled["metadata"]["labels"] = json!({"a": "b"});
    assert!(ask(update("VirtualMachine", old, labelled)).is_ok());
}

#[test]
fn a_machine_that_is_being_restored_is_not_started() {
    let mut halted = vm(spec());
    halted["spec"]["runStrategy"] = json!("Halted");
    let mut old = ask(input("VirtualMachine", halted)).unwrap().object;
    old["status"] = json!({"restoreInProgress": "r"});
    for (strategy, refused) in [("Always", true), ("Manual", true), ("Halted", false)] {
        let mut new = old.clone();
        new["spec"]["runStrategy"] = json!(strategy);
        new["spec"]["template"]["metadata"] = json!({"labels": {"a": "b"}});
        let answer = ask(update("VirtualMachine", old.clone(), new)).map_err(|s| s.causes());
        match answer {
            Ok(_) => assert!(!refused, "{strategy}"),
            Err(causes) => {
                assert!(refused && (causes[0].0.as_str(), causes[0].1.as_str()) == ("FieldValueNotSupported", "spec"));
            }
        }
    }
}

#[test]
fn a_machine_from_before_a_rule_keeps_its_labels_and_finalizers() {
    let old = vm(json!({"domain": {"devices": {"tpm": {}}}}));
    let mut new = old.clone();
    new["metadata"]["finalizers"] = json!(["a/b"]);
    assert_eq!(ask(update("VirtualMachine", old.clone(), new.clone())).unwrap().object, new);
    new["spec"]["runStrategy"] = json!("Halted");
    assert!(ask(update("VirtualMachine", old, new)).is_err());
}

#[test]
fn requests_that_nobody_carries_out_are_refused() {
    let old = vm(spec());
    let mut new = old.clone();
    new["status"] = json!({"volumeRequests": [{"removeVolumeOptions": {"name": "x"}}]});
    let ask_status =
        |o: Value, n: Value| ask(AdmissionInput { subresource: "status".into(), ..update("VirtualMachine", o, n) });
    assert_eq!(ask_status(old.clone(), new).unwrap_err().causes()[0].1, "status.volumeRequests");
    let mut fine = old.clone();
    fine["status"] = json!({"stateChangeRequests": [{"action": "Start", "data": {"virtfold.io/requested-by": "ann"}}]});
    let taken = ask_status(old, fine.clone()).unwrap().object;
    fine["status"]["stateChangeRequests"][0]["data"]["virtfold.io/requested-by"] = json!("somebody");
    assert_eq!(taken, fine, "a request has the name of whoever makes it, whatever it says");
}

#[test]
fn a_set_is_held_against_the_rules_of_its_instances() {
    const KIND: &str = "VirtualMachineInstanceReplicaSet";
    let set = |patch: &Value| {
        let mut s = json!({"apiVersion": "kubevirt.io/v1", "kind": KIND, "metadata": {"name": "a"}, "spec": {
            "selector": {"matchLabels": {"app": "a"}},
            "template": {"metadata": {"labels": {"app": "a"}}, "spec": spec()}}});
        merge(&mut s, patch);
        s
    };
    let good = ask(input(KIND, set(&json!({})))).unwrap();
    assert_eq!(good.object["spec"]["replicas"], 1, "a set without a number could not be scaled");
    assert_eq!(good.object["spec"]["template"]["spec"], spec(), "defaults come with each instance");
    assert_eq!(ask(input(KIND, set(&json!({"spec": {"replicas": 0}})))).unwrap().object["spec"]["replicas"], 0);
    for (patch, field, text) in [
        (json!({"spec": {"template": null}}), "spec.template", "missing virtual machine template"),
        (json!({"spec": {"template": {"spec": null}}}), "spec.template.spec", "missing virtual machine instance spec"),
        (json!({"spec": {"selector": null}}), "spec.selector", "there is no selector"),
        (json!({"spec": {"selector": {"matchLabels": null}}}), "spec.selector", "the selector is empty"),
        (
            json!({"spec": {"selector": {"matchLabels": {"app": "b"}}}}),
            "spec.selector",
            "selector does not match labels",
        ),
        (
            json!({"spec": {"selector": {"matchExpressions": [{"key": "app", "operator": "Is"}]}}}),
            "spec.selector",
            "\"Is\" is not an operator",
        ),
        (json!({"spec": {"replicas": -2}}), "spec.replicas", "must not be negative"),
        (
            json!({"spec": {"template": {"spec": {"domain": {"devices": {"tpm": {}}}}}}}),
            "spec.template.spec.domain.devices.tpm",
            "not supported",
        ),
        (
            json!({"spec": {"template": {"spec": {"domain": {"memory": null}}}}}),
            "spec.template.spec.domain.memory.guest",
            "no memory requested",
        ),
        (
            json!({"spec": {"template": {"spec": {"volumes": []}}}}),
            "spec.template.spec.domain.devices.disks[0].name",
            "",
        ),
    ] {
        let refusal = ask(input(KIND, set(&patch))).unwrap_err();
        let causes = refusal.details["causes"].as_array().unwrap().clone();
        let found = causes.iter().find(|c| c["field"] == field);
        let message = found.unwrap_or_else(|| panic!("{field}: {causes:?}"))["message"].as_str().unwrap();
        assert!(message.contains(text), "{field}: {message}");
    }
    // What is stored already may be labelled, and is judged when its spec changes.
    let old = set(&json!({"spec": {"replicas": 1, "selector": {"matchLabels": {"app": "b"}}}}));
    let mut labelled = old.clone();
    labelled["metadata"]["labels"] = json!({"x": "y"});
    assert!(ask(update(KIND, old.clone(), labelled)).is_ok());
    let mut scaled = old.clone();
    scaled["spec"]["replicas"] = json!(2);
    assert_eq!(ask(update(KIND, old, scaled)).unwrap_err().code, 422);
}

#[test]
fn kinds_that_nothing_acts_on_are_refused_by_name_when_made_and_left_alone_afterwards() {
    for kind in ["VirtualMachineSnapshot", "VirtualMachinePool", "MigrationPolicy", "DataVolume"] {
        let object = json!({"metadata": {"name": "a"}, "spec": {}});
        let refused = ask(input(kind, object.clone())).unwrap_err();
        assert_eq!(refused.code, 422);
        assert_eq!(refused.causes()[0].1, "kind");
        assert!(refused.message.contains(&format!("{kind} is not supported yet: ")), "{}", refused.message);
        assert_eq!(ask(update(kind, object.clone(), object.clone())).unwrap().object, object);
    }
    for kind in ["VirtualMachineInstancetype", "VirtualMachineClusterPreference"] {
        ask(input(kind, json!({"metadata": {"name": "a"}, "spec": {}}))).unwrap();
    }
}
