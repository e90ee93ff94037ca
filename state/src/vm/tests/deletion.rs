//! Ownership and endings: claiming, orphaning, finalizers, deletion in every state (sections 1.3 and 1.4).

use super::{
    strategies::{PHASES, STRATEGIES},
    *,
};
use crate::{
    observe::Phase,
    vm::{Command, Input, Sight, model::Dice},
};

fn delete_vm(w: &mut World) {
    w.edit(Kind::VirtualMachine, json!({"metadata": {"deletionTimestamp": "1970-01-01T00:20:00Z"}}));
}

/// A world in which a VM with this strategy has an instance in this phase; `None` where that does not come to be.
fn at(strategy: &str, phase: Option<Phase>) -> Option<World> {
    let name = phase.map_or("", Phase::name);
    let mut w = World::with(vm("Always"));
    if phase.is_none() {
        w = World::with(vm("Halted"));
        w.settle(2_000);
    } else {
        let mut d = Dice(77);
        for _ in 0..2_000 {
            let there = w.get(Kind::VirtualMachineInstance).is_some();
            if there && w.phase() == name {
                break;
            }
            if w.phase() == "Running" && phase.is_some_and(Phase::is_final) {
                // One that stays when it has ended.
                w.edit_spec(json!({"runStrategy": "Once"}));
                let pod = pod_uid(&w);
                w.end(&pod, if name == "Failed" { Cause::Crashed } else { Cause::GuestShutdown });
            }
            w.chaos(&mut d, false);
        }
        if w.phase() != name {
            return None;
        }
    }
    w.edit_spec(json!({"runStrategy": strategy}));
    Some(w)
}

#[test]
fn rule_1_3_a_vm_that_is_deleted_in_any_state_under_any_strategy_leaves_nothing() {
    let mut seen = 0;
    for strategy in STRATEGIES.into_iter().chain(["WaitAsReceiver"]) {
        for phase in std::iter::once(None).chain(PHASES.map(Some)) {
            for obeys in [true, false] {
                let Some(mut w) = at(strategy, phase) else { continue };
                seen += 1;
                w.guest_obeys = obeys;
                delete_vm(&mut w);
                let mut d = Dice(seen);
                for _ in 0..100 {
                    w.chaos(&mut d, true);
                }
                w.settle(120_000);
                assert!(w.objects.is_empty(), "{strategy} {phase:?}: {:?} {:?}", w.objects.keys(), w.writes);
                assert!(w.cell.is_empty(), "{strategy} {phase:?}");
                w.check();
            }
        }
    }
    assert!(seen >= 6 * 2 * 6, "most states were reached: {seen}");
}

#[test]
fn rule_1_3_the_finalizer_of_a_vm_is_repaired_and_comes_off_last() {
    let mut m = vm("Always");
    m["metadata"]["finalizers"] = json!(["somebody/elses"]);
    let mut w = World::with(m);
    w.settle(10_000);
    assert_eq!(vmobj(&w)["metadata"]["finalizers"], json!(["somebody/elses", api::names::FINALIZER_VM]));
    assert_eq!(w.phase(), "Running");
    delete_vm(&mut w);
    let mut d = Dice(3);
    for _ in 0..400 {
        if w.get(Kind::VirtualMachineInstance).is_some() {
            assert!(vmobj(&w)["metadata"]["finalizers"].to_string().contains(api::names::FINALIZER_VM));
        }
        w.chaos(&mut d, false);
    }
    w.settle(30_000);
    assert_eq!(vmobj(&w)["metadata"]["finalizers"], json!(["somebody/elses"]), "and others' stay");
    assert_eq!(w.printable(), "Terminating");
}

#[test]
fn rule_1_3_an_orphaned_vm_goes_and_its_instance_stays() {
    for phase in ["Scheduling", "Running"] {
        let mut w = World::with(vm("Always"));
        w.kubelet = phase == "Running";
        w.settle(5_000);
        assert_eq!(w.phase(), phase);
        let orphan = json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z", "finalizers": [api::names::FINALIZER_VM, "orphan"]}});
        w.edit(Kind::VirtualMachine, orphan);
        w.settle(5_000);
        assert_eq!(vmobj(&w)["metadata"]["finalizers"], json!(["orphan"]), "the collector's own is the collector's");
        w.edit(Kind::VirtualMachineInstance, json!({"metadata": {"ownerReferences": null}}));
        w.edit(Kind::VirtualMachine, json!({"metadata": {"finalizers": null}}));
        w.kubelet = true;
        w.settle(10_000);
        assert_eq!((w.get(Kind::VirtualMachine), w.phase().as_str()), (None, "Running"));
        assert!(!w.writes.iter().any(|x| x.starts_with("delete")), "{:?}", w.writes);
    }
}

#[test]
fn rule_1_3_an_instance_without_a_controller_is_adopted_after_a_live_read_of_the_vm() {
    for (strategy, phase, printable) in [
        ("Always", "Running", "Running"),
        ("Manual", "Running", "Running"),
        ("RerunOnFailure", "Running", "Running"),
        ("Once", "Running", "Running"),
        ("Halted", "", "Stopped"),
    ] {
        let mut w = World::with_bare();
        w.settle(10_000);
        w.put(Kind::VirtualMachine, vm(strategy));
        let s = w.sights.remove(0);
        w.feed(Input::Observed(s));
        let asks = |c: &Command| matches!(c, Command::Confirm { target, .. } if target.kind == Kind::VirtualMachine);
        assert!(w.flying.iter().any(asks), "{strategy}: {:?}", w.flying);
        assert!(!w.flying.iter().any(|c| matches!(c, Command::Patch { patch, .. } if patch.why == "adopt")));
        w.settle(30_000);
        assert!(w.writes.contains(&"patch VirtualMachineInstance adopt".to_owned()), "{strategy}: {:?}", w.writes);
        assert_eq!((w.phase().as_str(), w.printable().as_str()), (phase, printable), "{strategy}");
        if phase == "Running" {
            let v = vmi(&w);
            assert_eq!(v["metadata"]["ownerReferences"][0]["uid"], "vm-1");
            assert_eq!(v["metadata"]["uid"], "v1");
            assert!(v["metadata"]["finalizers"].to_string().contains(api::names::FINALIZER_VM));
        }
        assert_eq!(condition(&vmobj(&w), "Failure"), None);
    }
}

#[test]
fn rule_1_3_a_vm_that_the_live_read_shows_deleting_adopts_nothing() {
    let mut w = World::with_bare();
    w.settle(10_000);
    w.put(Kind::VirtualMachine, vm("Always"));
    let s = w.sights.remove(0);
    // The watch is behind: the VM has been deleted since.
    delete_vm(&mut w);
    w.sights.clear();
    w.feed(Input::Observed(s));
    w.settle(30_000);
    assert!(!w.writes.iter().any(|x| x.ends_with("adopt")), "{:?}", w.writes);
    assert!(w.get(Kind::VirtualMachine).is_none());
    assert_eq!(vmi(&w)["metadata"].get("ownerReferences"), None);
    assert_eq!(w.phase(), "Running");
}

#[test]
fn rule_1_4_the_finalizer_of_an_ended_instance_waits_for_the_status_of_its_vm() {
    // Whoever dies when: an ended instance is let go only after the VM knows what follows from it.
    for seed in 0..300_u64 {
        let mut w = World::with(vm("RerunOnFailure"));
        w.settle(5_000);
        let uid = vmi(&w)["metadata"]["uid"].as_str().unwrap().to_owned();
        let pod = pod_uid(&w);
        w.end(&pod, Cause::Crashed);
        let mut d = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        for _ in 0..400 {
            w.chaos(&mut d, true);
            let v = vmi(&w);
            if v["metadata"]["uid"] != uid.as_str() {
                break;
            }
            if !v["metadata"]["finalizers"].to_string().contains(api::names::FINALIZER_VM) {
                let asked = &vmobj(&w)["status"]["stateChangeRequests"];
                assert_eq!(asked[0]["data"]["virtfold.io/rerun-of"], uid.as_str(), "seed {seed}: {:?}", w.writes);
            }
        }
    }
}

#[test]
fn a_deletion_ends_although_a_late_pod_took_the_name_of_one_that_went_unheard() {
    let unheard = |w: &mut World| w.sights.retain(|s| !matches!(s, Sight::Gone(r) if r.kind == Kind::Pod));
    let mut w = World::with_bare();
    w.settle(5_000);
    let mut late = w.get(Kind::Pod).unwrap().clone();
    w.edit(Kind::VirtualMachineInstance, json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z"}}));
    while w.get(Kind::Pod).is_some() {
        assert!(w.settle_one(), "{:?}", w.writes);
        unheard(&mut w);
    }
    // A creation that was given up long ago arrives, before anybody hears of the end of the pod that had its name.
    let meta = late["metadata"].as_object_mut().unwrap();
    meta.insert("uid".into(), json!("late"));
    late["status"] = json!({});
    w.put(Kind::Pod, late);
    w.settle(120_000);
    assert!(w.objects.is_empty() && w.cell.is_empty(), "{:?} {:?}", w.objects, w.writes);
}
