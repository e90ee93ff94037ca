//! What a VM's status says: sections 1.4 (what a VMI is made of), 1.5, 1.9 and 1.10.

use super::{
    strategies::{STRATEGIES, seen, vmi_in},
    *,
};
use crate::{
    Timestamp,
    object::{Refusal, Settled},
    observe::Phase,
    vm::{Command, Input, printable::rules},
};

/// The word that a VM would get.
fn word(spec: &Value, status: &Value, vmi: Option<&Value>) -> String {
    let (cell, view) = seen(spec, status, vmi);
    cell.printable_facts(&view, &view.status).word().name().into()
}

fn with(mut vmi: Value, patch: Value) -> Value {
    for (k, v) in patch.as_object().unwrap() {
        for (name, field) in v.as_object().unwrap() {
            vmi[k][name] = field.clone();
        }
    }
    vmi
}

#[test]
fn rule_1_9_the_first_rule_that_holds_gives_the_word() {
    let always = json!({"runStrategy": "Always"});
    let claim = json!({"runStrategy": "Always"});
    let deleting = json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z"}});
    let conditions = |list: Value| json!({"status": {"conditions": list}});
    let sync = |reason: &str| json!({"type": "Synchronized", "status": "False", "reason": reason});
    let unscheduled = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
    let ready = |reason: &str| json!({"type": "Ready", "status": "False", "reason": reason});
    let paused = json!({"type": "Paused", "status": "True"});
    let failed = json!({"startFailure": {"consecutiveFailCount": 1, "lastFailedVMIUID": "old",
        "retryAfterTimestamp": "1970-01-01T01:00:00Z"}});
    let none = json!({});
    let v = |phase, patch: Value| Some(with(vmi_in(phase), patch));
    let table: Vec<(&str, &Value, &Value, Option<Value>)> = vec![
        ("Stopping", &always, &none, v(Phase::Running, deleting.clone())),
        ("Stopping", &always, &none, v(Phase::Pending, deleting.clone())),
        // A final one that is being removed has stopped.
        ("Stopped", &always, &none, v(Phase::Succeeded, deleting.clone())),
        ("Unknown", &always, &none, v(Phase::Running, conditions(json!([ready("NodeUnreachable"), paused])))),
        ("Unknown", &always, &none, v(Phase::Running, conditions(json!([ready("NodeUnresponsive")])))),
        ("Paused", &always, &none, v(Phase::Running, conditions(json!([paused])))),
        ("Running", &always, &none, v(Phase::Running, conditions(json!([ready("GuestNotRunning")])))),
        // What runs has no trouble with claims or images, whatever an old condition says.
        ("Running", &always, &none, v(Phase::Running, conditions(json!([sync("FailedPvcNotFound"), unscheduled])))),
        (
            "ErrorPvcNotFound",
            &claim,
            &none,
            v(Phase::Pending, conditions(json!([sync("FailedPvcNotFound"), unscheduled]))),
        ),
        (
            "ErrorUnschedulable",
            &always,
            &none,
            v(Phase::Scheduling, conditions(json!([sync("ErrImagePull"), unscheduled]))),
        ),
        ("ErrImagePull", &always, &none, v(Phase::Scheduling, conditions(json!([sync("ErrImagePull")])))),
        ("ImagePullBackOff", &always, &none, v(Phase::Scheduling, conditions(json!([sync("ImagePullBackOff")])))),
        ("Starting", &always, &none, v(Phase::Unset, none.clone())),
        ("Starting", &always, &none, v(Phase::Scheduled, conditions(json!([sync("FailedCreate")])))),
        ("CrashLoopBackOff", &always, &failed, None),
        ("CrashLoopBackOff", &always, &failed, v(Phase::Failed, none.clone())),
        ("Starting", &always, &failed, v(Phase::Pending, none.clone())),
        ("Unknown", &always, &none, v(Phase::Unknown, none.clone())),
    ];
    for (want, spec, status, vmi) in table {
        assert_eq!(word(spec, status, vmi.as_ref()), want, "{vmi:?}");
    }
    for (strategy, want) in [("Manual", "Stopped"), ("Halted", "Stopped"), ("Once", "CrashLoopBackOff")] {
        assert_eq!(word(&json!({"runStrategy": strategy}), &failed, v(Phase::Failed, json!({})).as_ref()), want);
    }
    // Deletion of the VM comes before everything.
    let mut w = running("Always");
    w.edit(Kind::VirtualMachine, json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z"}}));
    w.kubelet = false;
    w.settle(3_000);
    assert_eq!(w.printable(), "Terminating");
    let listed: Vec<_> = rules().map(|(word, _)| word).collect();
    assert_eq!(listed.first(), Some(&"Terminating"));
    assert_eq!(listed.last(), Some(&"Unknown"));
}

#[test]
fn rule_1_9_starting_and_stopping_are_shown_while_our_own_request_is_on_its_way() {
    let mut w = World::with(vm("Always"));
    let s = w.sights.remove(0);
    w.feed(Input::Observed(s));
    let shown = |w: &World| {
        let view = w.cell.vm.get().unwrap().clone();
        w.cell.printable_facts(&view, &view.status).word().name()
    };
    assert_eq!(shown(&w), "Starting");
    w.settle(10_000);
    w.edit_spec(json!({"runStrategy": "Halted"}));
    let s = w.sights.remove(0);
    w.feed(Input::Observed(s));
    assert!(vmi(&w)["metadata"].get("deletionTimestamp").is_none());
    assert_eq!(shown(&w), "Stopping");
}

#[test]
fn rule_1_9_waiting_for_volume_binding_while_it_is_set_to_start_and_a_claim_is_not_bound() {
    for strategy in STRATEGIES {
        for phase in [None, Some(Phase::Pending), Some(Phase::Running), Some(Phase::Succeeded), Some(Phase::Failed)] {
            for request in ["", "Start", "Stop"] {
                let spec = json!({"runStrategy": strategy, "template": {"spec": {
                    "domain": {}, "volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "c1"}}]}}});
                let requests = match request {
                    "" => json!([]),
                    "Stop" => json!([{"action": "Stop", "uid": "vmi-1"}]),
                    _ => json!([{"action": "Start"}]),
                };
                let status = json!({"runStrategy": strategy, "stateChangeRequests": requests});
                let (mut cell, view) = seen(&spec, &status, phase.map(vmi_in).as_ref());
                let claim = |bound: &str| {
                    crate::observe::object(
                        Kind::PersistentVolumeClaim,
                        json!({"metadata": {"name": "c1", "uid": "c", "resourceVersion": if bound == "Bound" {"9"} else {"8"}},
                            "status": {"phase": bound}}),
                    )
                };
                let mut see = |bound| {
                    let sight = crate::vm::Sight::Present(claim(bound).unwrap());
                    crate::Machine::step(&mut cell, &crate::Event::new(Timestamp(2_000_000), Input::Observed(sight)));
                    cell.printable_facts(&view, &view.status).unbound
                };
                let set_to_start = match (strategy, phase) {
                    ("Always", _) | ("Once", None) => true,
                    ("Manual", Some(_)) => request != "Stop",
                    ("Manual", None) | ("RerunOnFailure", None) => request == "Start",
                    ("RerunOnFailure", Some(p)) => p != Phase::Succeeded,
                    _ => false,
                };
                assert_eq!(see("Pending"), set_to_start, "{strategy} {phase:?} {request}");
                assert!(!see("Bound"));
            }
        }
    }
    // And seen from outside, from the start until it runs.
    let mut m = vm("Always");
    m["spec"]["template"]["spec"]["volumes"] = json!([{"name": "d", "persistentVolumeClaim": {"claimName": "c1"}}]);
    let mut w = World::with(m);
    let claim = json!({"metadata": {"name": "c1", "namespace": "ns", "uid": "c"}, "status": {"phase": "Pending"}});
    w.put(Kind::PersistentVolumeClaim, claim);
    w.kubelet = false;
    w.settle(5_000);
    assert_eq!((w.phase().as_str(), w.printable().as_str()), ("Scheduling", "WaitingForVolumeBinding"));
    w.edit(Kind::PersistentVolumeClaim, json!({"status": {"phase": "Bound"}}));
    w.settle(5_000);
    assert_eq!(w.printable(), "Starting");
    w.kubelet = true;
    w.settle(5_000);
    assert_eq!(w.printable(), "Running");
}

#[test]
fn rule_1_4_the_instance_is_what_its_template_says_and_carries_what_others_look_for() {
    let mut m = vm("Always");
    m["spec"]["template"]["metadata"] = json!({"labels": {"app": "web"}, "annotations": {"note": "x"}});
    let mut w = World::with(m);
    w.settle(200);
    let v = vmi(&w);
    assert_eq!((&v["metadata"]["name"], &v["metadata"]["namespace"]), (&json!("web"), &json!("ns")));
    assert_eq!(v["metadata"]["labels"]["app"], "web");
    assert_eq!(v["metadata"]["annotations"]["note"], "x");
    assert_eq!(v["metadata"]["annotations"]["kubevirt.io/vm-generation"], "1");
    let owner = &v["metadata"]["ownerReferences"][0];
    assert_eq!(
        owner,
        &json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "web", "uid": "vm-1",
            "controller": true, "blockOwnerDeletion": true})
    );
    assert_eq!(v["metadata"]["finalizers"], json!([api::names::FINALIZER_VM, api::names::FINALIZER_VMI]));
    assert_eq!(v["status"]["virtualMachineRevisionName"], "revision-start-vm-vm-1-1");
    assert_eq!(v["spec"]["domain"]["firmware"]["uuid"].as_str().map(str::len), Some(36));
    w.settle(10_000);
    assert_eq!(w.notes.iter().filter(|n| *n == "SuccessfulCreate").count(), 1);
    w.edit_spec(json!({"runStrategy": "Halted"}));
    w.settle(20_000);
    assert_eq!(w.notes.iter().filter(|n| *n == "SuccessfulDelete").count(), 1);
}

#[test]
fn rule_1_5_created_ready_and_run_strategy() {
    let mut w = World::with(vm("Halted"));
    w.settle(5_000);
    let shown = |w: &World| {
        let s = &vmobj(w)["status"];
        let yes = |k: &str| s[k].as_bool().unwrap_or(false);
        (yes("created"), yes("ready"), s["runStrategy"].as_str().unwrap_or("").to_owned())
    };
    assert_eq!(shown(&w), (false, false, "".into()));
    w.edit_spec(json!({"runStrategy": "Manual"}));
    w.settle(5_000);
    assert_eq!(shown(&w), (false, false, "".into()), "first written when there was an instance");
    w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": [{"action": "Start"}]}}));
    w.settle(5_000);
    assert_eq!(shown(&w), (true, true, "Manual".into()));
    w.edit_spec(json!({"runStrategy": "Halted"}));
    w.settle(30_000);
    assert_eq!(shown(&w), (false, false, "Halted".into()));
}

#[test]
fn rule_1_10_ready_is_the_instances_or_says_why_there_is_none() {
    let mut w = World::with(vm("Manual"));
    w.settle(5_000);
    assert_eq!(condition(&vmobj(&w), "Ready").unwrap(), ("False".into(), "VMINotExists".into()));
    w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": [{"action": "Start"}]}}));
    w.kubelet = false;
    w.settle(5_000);
    let both = |w: &World| (condition(&vmobj(w), "Ready"), condition(&vmi(w), "Ready"));
    let (on_vm, on_vmi) = both(&w);
    assert_eq!(on_vm, on_vmi);
    assert!(on_vm.is_some_and(|c| c.0 == "False" && c.1 != "VMINotExists"));
    w.kubelet = true;
    w.settle(5_000);
    let (on_vm, on_vmi) = both(&w);
    assert_eq!(on_vm, on_vmi);
    assert_eq!(on_vm.unwrap().0, "True");
    let (cell, view) = seen(&json!({"runStrategy": "Always"}), &json!({}), Some(&vmi_in(Phase::Pending)));
    let status = cell.desired_vm(&view);
    assert_eq!(crate::condition::find(&status.conditions, "Ready").unwrap().reason, "VMIConditionMissing");
}

#[test]
fn rule_1_10_what_the_instance_says_is_mirrored_and_goes_with_it() {
    let mut w = running("Always");
    let at = |w: &World, kind| condition(&vmobj(w), kind);
    assert_eq!(at(&w, "LiveMigratable"), condition(&vmi(&w), "LiveMigratable"));
    let mut all = vmi(&w)["status"]["conditions"].as_array().unwrap().clone();
    all.push(json!({"type": "AccessCredentialsSynchronized", "status": "True", "message": "done"}));
    w.edit(Kind::VirtualMachineInstance, json!({"status": {"conditions": all}}));
    w.settle(5_000);
    assert_eq!(at(&w, "AccessCredentialsSynchronized").unwrap().0, "True");
    all.pop();
    w.edit(Kind::VirtualMachineInstance, json!({"status": {"conditions": all}}));
    w.settle(5_000);
    assert_eq!(at(&w, "AccessCredentialsSynchronized"), None);
}

#[test]
fn conditions_of_an_instance_that_is_gone_do_not_stay_on_the_vm() {
    let mut w = running("Always");
    assert!(condition(&vmobj(&w), "LiveMigratable").is_some());
    w.edit_spec(json!({"runStrategy": "Halted"}));
    w.settle(30_000);
    let kinds: Vec<_> = vmobj(&w)["status"]["conditions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["type"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(kinds, ["Ready"]);
}

/// Feeds all that is there, and answers the next command of this kind with a refusal.
fn refuse_next(w: &mut World, what: fn(&Command) -> bool, message: &str) {
    for _ in 0..200 {
        if let Some(i) = w.flying.iter().position(what) {
            let c = w.flying.remove(i);
            let refusal = Refusal { code: 403, reason: "Forbidden".into(), message: message.into() };
            w.feed(Input::Settled { id: c.id().unwrap(), result: Settled::Refused(refusal) });
            return;
        }
        if !w.sights.is_empty() {
            let s = w.sights.remove(0);
            w.feed(Input::Observed(s));
        } else if !w.settled.is_empty() {
            let (id, result) = w.settled.remove(0);
            w.feed(Input::Settled { id, result });
        } else if let Some(t) = w.wake.take() {
            w.now = w.now.max(t);
            w.feed(Input::Elapsed);
        } else if !w.flying.is_empty() {
            let c = w.flying.remove(0);
            let r = w.carry_out(c);
            w.settled.extend(r);
        }
    }
    panic!("it was not asked for: {:?}", w.writes);
}

fn creates_vmi(c: &Command) -> bool {
    matches!(c, Command::Create { target, .. } if target.kind == Kind::VirtualMachineInstance)
}

fn deletes_vmi(c: &Command) -> bool {
    matches!(c, Command::Delete { target, .. } if target.kind == Kind::VirtualMachineInstance)
}

#[test]
fn rule_1_10_failure_stands_while_the_last_try_failed_and_goes_when_it_worked() {
    let mut w = World::with(vm("Always"));
    refuse_next(&mut w, creates_vmi, "exceeded quota");
    // Shown before the next try.
    let wake = w.wake.take();
    w.settle(0);
    assert_eq!(condition(&vmobj(&w), "Failure").unwrap(), ("True".into(), "FailedCreate".into()));
    assert!(message(&vmobj(&w), "Failure").contains("exceeded quota"));
    assert!(w.notes.contains(&"FailedCreate".to_owned()));
    w.wake = w.wake.or(wake);
    w.settle(10_000);
    assert_eq!(w.phase(), "Running");
    assert_eq!(condition(&vmobj(&w), "Failure"), None);

    w.edit_spec(json!({"runStrategy": "Halted"}));
    refuse_next(&mut w, deletes_vmi, "no right");
    let wake = w.wake.take();
    w.settle(0);
    assert_eq!(condition(&vmobj(&w), "Failure").unwrap(), ("True".into(), "FailedDelete".into()));
    w.wake = w.wake.or(wake);
    w.settle(60_000);
    assert_eq!((w.phase().as_str(), condition(&vmobj(&w), "Failure")), ("", None));

    // A creation that nobody wants any more has not failed.
    let mut w = World::with(vm("Always"));
    refuse_next(&mut w, creates_vmi, "exceeded quota");
    w.edit_spec(json!({"runStrategy": "Halted"}));
    w.settle(60_000);
    assert_eq!((w.phase().as_str(), condition(&vmobj(&w), "Failure")), ("", None));
}

#[test]
fn a_failure_that_changes_its_words_is_told_in_the_new_ones() {
    let mut w = World::with(vm("Always"));
    refuse_next(&mut w, creates_vmi, "exceeded quota");
    let wake = w.wake.take();
    w.settle(0);
    assert!(message(&vmobj(&w), "Failure").contains("exceeded quota"));
    w.wake = w.wake.or(wake);
    refuse_next(&mut w, creates_vmi, "exceeded quota");
    refuse_next(&mut w, creates_vmi, "webhook away");
    // Before the next try.
    w.settle(1_200);
    assert!(w.get(Kind::VirtualMachineInstance).is_none());
    assert!(message(&vmobj(&w), "Failure").contains("webhook away"), "{}", message(&vmobj(&w), "Failure"));
}

#[test]
fn rule_1_10_an_instance_of_the_name_that_is_somebody_elses_is_a_failure_and_left_alone() {
    let mut w = World::default();
    let mut other = crate::vm::model::bare();
    other["metadata"]["ownerReferences"] =
        json!([{"kind": "VirtualMachineInstanceReplicaSet", "name": "set", "uid": "s", "controller": true}]);
    w.put(Kind::VirtualMachineInstance, other);
    w.put(Kind::VirtualMachine, vm("Always"));
    w.settle(10_000);
    assert_eq!(condition(&vmobj(&w), "Failure").unwrap(), ("True".into(), "FailedCreate".into()));
    assert_eq!(w.printable(), "Stopped");
    assert_eq!(vmi(&w)["metadata"]["ownerReferences"][0]["uid"], "s");
    w.edit(Kind::VirtualMachine, json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z"}}));
    w.settle(10_000);
    assert!(w.get(Kind::VirtualMachine).is_none());
    assert_eq!(w.phase(), "Running", "not ours to stop");
}

#[test]
fn a_restart_of_the_controller_does_not_change_the_word() {
    for strategy in STRATEGIES {
        let mut w = World::with(vm(strategy));
        w.settle(10_000);
        let (before, n) = (w.printable(), w.writes.len());
        w.restart();
        w.settle(60_000);
        assert_eq!((w.printable(), &w.writes[n..]), (before, &[] as &[String]), "{strategy}");
    }
}
