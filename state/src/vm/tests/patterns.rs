//! Instancetypes and preferences that a VM names: section 1.11.

use super::{super::model::Dice, *};
use crate::object::Pattern;

const SIZE: Kind = Kind::Pattern(Pattern::ClusterInstancetype);
const HABIT: Kind = Kind::Pattern(Pattern::Preference);

fn size(generation: i64, cpus: u32) -> Value {
    json!({
        "apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": "VirtualMachineClusterInstancetype",
        "metadata": {"name": "small", "uid": "size-1", "generation": generation, "labels": {"a": "b"}},
        "spec": {"cpu": {"guest": cpus}, "memory": {"guest": "64Mi"}, "annotations": {"note": "small"}},
    })
}

fn habit() -> Value {
    json!({
        "metadata": {"name": "linux", "namespace": "ns", "uid": "habit-1", "generation": 1},
        "spec": {"cpu": {"preferredCPUTopology": "cores"}, "devices": {"preferredDiskBus": "virtio"}},
    })
}

/// A VM that names both and says nothing of CPUs and memory.
fn named(strategy: &str) -> Value {
    let mut o = vm(strategy);
    o["spec"]["template"]["spec"] = json!({"domain": {"devices": {"disks": [{"name": "a"}]}}, "volumes": [{"name": "a", "emptyDisk": {"capacity": "1Mi"}}]});
    o["spec"]["instancetype"] = json!({"name": "small"});
    o["spec"]["preference"] = json!({"name": "linux", "kind": "VirtualMachinePreference"});
    o
}

/// A world with the VM, and with what it names.
fn world(strategy: &str) -> World {
    let mut w = World::default();
    w.put(SIZE, size(1, 2));
    w.put(HABIT, habit());
    w.put(Kind::VirtualMachine, named(strategy));
    w
}

fn record(w: &World, status: &str) -> Value {
    let name = vmobj(w)["status"][status]["controllerRevisionRef"]["name"].as_str().unwrap_or_default().to_owned();
    w.objects.get(&(Kind::ControllerRevision, name)).cloned().unwrap_or_default()
}

fn cores(w: &World) -> Value {
    vmi(w)["spec"]["domain"]["cpu"]["cores"].clone()
}

fn restart(w: &mut World) {
    let request = w.restart_request();
    w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": request}}));
    w.settle(20_000);
}

#[test]
fn rule_1_11_what_is_named_is_recorded_before_an_instance_is_made_of_it() {
    let mut w = world("Always");
    w.settle(10_000);
    assert_eq!(
        w.writes,
        [
            "create ControllerRevision",
            "create ControllerRevision",
            "patch VirtualMachine Stopped",
            "create VirtualMachineInstance",
            "create ControllerRevision",
            "create Pod",
            "patch VirtualMachineInstance Scheduled",
            "patch VirtualMachineInstance Running",
            "patch VirtualMachine Running",
        ]
    );
    let status = vmobj(&w)["status"].clone();
    assert_eq!(
        status["instancetypeRef"],
        json!({"name": "small", "controllerRevisionRef": {"name": "web-small-v1beta1-size-1-1"}})
    );
    assert_eq!(
        status["preferenceRef"],
        json!({"name": "linux", "kind": "VirtualMachinePreference",
            "controllerRevisionRef": {"name": "web-linux-v1beta1-habit-1-1"}})
    );
    let record = record(&w, "instancetypeRef");
    assert_eq!(record["data"]["kind"], "VirtualMachineClusterInstancetype");
    assert_eq!(record["data"]["apiVersion"], "instancetype.kubevirt.io/v1beta1");
    assert_eq!(record["data"]["spec"], size(1, 2)["spec"]);
    assert_eq!(record["data"]["metadata"].get("labels"), None);
    assert_eq!(record["metadata"]["ownerReferences"][0]["uid"], "vm-1");
    let label = |what: &str| record["metadata"]["labels"][format!("instancetype.kubevirt.io/object-{what}")].clone();
    assert_eq!(
        ["generation", "kind", "name", "uid", "version"].map(label),
        ["1", "VirtualMachineClusterInstancetype", "small", "size-1", "v1beta1"].map(|s| json!(s))
    );
    let made = vmi(&w);
    let domain = &made["spec"]["domain"];
    assert_eq!(domain["cpu"], json!({"sockets": 1, "cores": 2, "threads": 1}));
    assert_eq!(domain["memory"]["guest"], "64Mi");
    assert_eq!(domain["devices"]["disks"][0]["disk"]["bus"], "virtio");
    let annotation = |key: &str| made["metadata"]["annotations"][key].clone();
    assert_eq!(annotation("kubevirt.io/cluster-instancetype-name"), "small");
    assert_eq!(annotation("kubevirt.io/preference-name"), "linux");
    assert_eq!(annotation("note"), "small");
    // What the instance was made from says so, too.
    let made_from = w.objects.get(&(Kind::ControllerRevision, "revision-start-vm-vm-1-1".into())).unwrap();
    assert_eq!(made_from["data"]["spec"]["instancetype"]["revisionName"], "web-small-v1beta1-size-1-1");
    assert_eq!(condition(&vmobj(&w), "RestartRequired"), None);
    // The object changes: the record counts.
    w.put(SIZE, size(2, 4));
    restart(&mut w);
    assert_eq!((w.phase().as_str(), cores(&w)), ("Running", json!(2)));
    assert_eq!(w.objects.keys().filter(|(k, _)| *k == Kind::ControllerRevision).count(), 3);
}

#[test]
fn rule_1_11_a_record_that_the_spec_names_is_what_counts() {
    let mut w = world("Always");
    w.settle(10_000);
    w.put(SIZE, size(2, 4));
    let again = json!({"instancetype": {"revisionName": "web-small-v1beta1-size-1-2"}});
    let body = json!({"metadata": {"name": "web-small-v1beta1-size-1-2", "uid": "r"},
        "data": {"kind": "VirtualMachineClusterInstancetype", "spec": size(2, 4)["spec"]}});
    w.put(Kind::ControllerRevision, body);
    w.edit_spec(again);
    w.settle(5_000);
    assert_eq!(condition(&vmobj(&w), "RestartRequired"), Some(("True".into(), String::new())));
    assert!(
        message(&vmobj(&w), "RestartRequired").ends_with(": spec.instancetype"),
        "{}",
        message(&vmobj(&w), "RestartRequired")
    );
    restart(&mut w);
    assert_eq!(cores(&w), 4);
    assert_eq!(vmobj(&w)["status"]["instancetypeRef"]["controllerRevisionRef"]["name"], "web-small-v1beta1-size-1-2");
    assert_eq!(condition(&vmobj(&w), "RestartRequired"), None);
}

#[test]
fn rule_1_11_what_is_missing_is_said_and_looked_for_again() {
    for strategy in ["Always", "Halted"] {
        let mut w = World::default();
        w.put(HABIT, habit());
        w.put(Kind::VirtualMachine, named(strategy));
        w.settle(10_000);
        assert_eq!(
            condition(&vmobj(&w), "Failure"),
            Some(("True".into(), "FailedFindInstancetype".into())),
            "{strategy}"
        );
        let text = "VirtualMachineClusterInstancetype small does not exist";
        assert_eq!(message(&vmobj(&w), "Failure"), text);
        assert_eq!(w.pods_ever.len(), 0);
        // Nothing is written while it is looked for.
        let n = w.writes.len();
        w.settle(60_000);
        assert_eq!(w.writes[n..], [] as [&str; 0]);
        w.put(SIZE, size(1, 2));
        w.settle(60_000);
        assert_eq!(condition(&vmobj(&w), "Failure"), None);
        assert_eq!(w.phase(), if strategy == "Always" { "Running" } else { "" });
    }
    let mut w = World::default();
    w.put(SIZE, size(1, 2));
    w.put(Kind::VirtualMachine, named("Always"));
    w.settle(10_000);
    assert_eq!(condition(&vmobj(&w), "Failure"), Some(("True".into(), "FailedFindPreference".into())));
    assert_eq!(message(&vmobj(&w), "Failure"), "VirtualMachinePreference ns/linux does not exist");
}

#[test]
fn rule_1_11_another_name_is_another_record_and_none_is_none() {
    let mut w = world("Always");
    w.settle(10_000);
    let mut large = size(1, 8);
    large["metadata"]["name"] = json!("large");
    large["metadata"]["uid"] = json!("size-2");
    w.put(SIZE, large);
    w.edit_spec(json!({"instancetype": {"name": "large"}}));
    w.settle(10_000);
    let name = &vmobj(&w)["status"]["instancetypeRef"]["controllerRevisionRef"]["name"];
    assert_eq!(name, "web-large-v1beta1-size-2-1");
    assert!(condition(&vmobj(&w), "RestartRequired").is_some());
    assert_eq!(cores(&w), 2, "the one that runs stays");
    restart(&mut w);
    assert_eq!(cores(&w), 8);
    let own = json!({"instancetype": null, "template": {"spec": {"domain": {"memory": {"guest": "64Mi"}}}}});
    w.edit_spec(own);
    w.settle(10_000);
    assert_eq!(vmobj(&w)["status"].get("instancetypeRef"), None);
    restart(&mut w);
    assert_eq!(w.phase(), "Running");
    assert_eq!(vmi(&w)["spec"]["domain"].get("cpu"), None);
}

#[test]
fn whatever_dies_and_changes_an_instance_is_made_of_what_the_status_names() {
    for seed in 0..300_u64 {
        let mut w = world("Always");
        let mut d = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut generation = 1;
        for _ in 0..d.roll(150) {
            w.chaos(&mut d, true);
            if d.chance(5) {
                generation += 1;
                w.put(SIZE, size(generation, u32::try_from(generation).unwrap() + 1));
            }
        }
        for _ in 0..200 {
            w.chaos(&mut d, true);
        }
        w.settle(120_000);
        assert_eq!((w.phase().as_str(), w.printable().as_str()), ("Running", "Running"), "seed {seed}: {:?}", w.writes);
        let made_of = record(&w, "instancetypeRef")["data"]["spec"]["cpu"]["guest"].clone();
        assert_eq!(cores(&w), made_of, "seed {seed}");
    }
}
