//! Run strategies, requests, start, stop and restart: sections 1.1, 1.2 and 1.8 of the behaviour that clients know.

use super::*;
use crate::{
    Event, Key, Machine, Timestamp,
    observe::{self, Phase, Request, Strategy, VmView},
    vm::{Input, Sight, Vm, model::Dice, strategy::Wish},
};

pub(super) const STRATEGIES: [&str; 5] = ["Always", "RerunOnFailure", "Manual", "Halted", "Once"];

pub(super) const PHASES: [Phase; 8] = [
    Phase::Unset,
    Phase::Pending,
    Phase::Scheduling,
    Phase::Scheduled,
    Phase::Running,
    Phase::Succeeded,
    Phase::Failed,
    Phase::Unknown,
];

/// A cell that has seen a VM with this spec and status, and its VMI in this phase (or knows that there is none).
pub(super) fn seen(spec: &Value, status: &Value, vmi: Option<&Value>) -> (Vm, VmView) {
    let mut cell = Vm::new(Key::new("ns", "web"));
    let mut m = vm("Always");
    m["metadata"]["resourceVersion"] = json!("5");
    m["spec"].as_object_mut().unwrap().remove("runStrategy");
    for (k, v) in spec.as_object().unwrap() {
        m["spec"][k] = v.clone();
    }
    m["status"] = status.clone();
    let mut see = |kind, o: Option<&Value>| {
        let sight = match o {
            Some(o) => Sight::Present(observe::object(kind, o).unwrap()),
            None => Sight::Gone(crate::object::ObjectRef {
                kind,
                namespace: "ns".into(),
                name: "web".into(),
                uid: Default::default(),
            }),
        };
        cell.step(&Event::new(Timestamp(1_000_000), Input::Observed(sight)));
    };
    see(Kind::VirtualMachineInstance, vmi);
    see(Kind::VirtualMachine, Some(&m));
    let view = cell.vm.get().unwrap().clone();
    (cell, view)
}

/// A VMI of the VM in a phase; it ran before it ended.
pub(super) fn vmi_in(phase: Phase) -> Value {
    json!({
        "metadata": {"name": "web", "namespace": "ns", "uid": "vmi-1", "resourceVersion": "7",
            "finalizers": [api::names::FINALIZER_VM, api::names::FINALIZER_VMI],
            "annotations": {"kubevirt.io/vm-generation": "1"},
            "ownerReferences": [{"kind": "VirtualMachine", "name": "web", "uid": "vm-1", "controller": true}]},
        "spec": {"domain": {}},
        "status": {"phase": phase.name(), "phaseTransitionTimestamps": if phase.is_final() {
            json!([{"phase": "Running", "phaseTransitionTimestamp": "1970-01-01T00:00:01Z"}])
        } else { json!([]) }},
    })
}

#[test]
fn rule_1_1_each_strategy_with_and_without_an_instance_cell_by_cell() {
    let stop_other = json!([{"action": "Stop", "uid": "another"}]);
    let heads = [
        ("nothing", json!([])),
        ("Start", json!([{"action": "Start"}])),
        ("Start paused", json!([{"action": "Start", "data": {"paused": "true"}}])),
        ("Stop", json!([{"action": "Stop", "uid": "vmi-1"}])),
        ("Stop of another", stop_other),
    ];
    for strategy in STRATEGIES {
        for vmi in std::iter::once(None).chain(PHASES.map(Some)) {
            for (head, requests) in &heads {
                for was in ["", "Always", "RerunOnFailure", "Halted"] {
                    let spec = json!({"runStrategy": strategy});
                    let status = json!({"runStrategy": was, "stateChangeRequests": requests});
                    let (cell, view) = seen(&spec, &status, vmi.map(vmi_in).as_ref());
                    let run = Wish::Run { paused: *head == "Start paused" };
                    let (start, stop) = (head.starts_with("Start"), *head == "Stop");
                    let want = match (strategy, vmi) {
                        ("Always", None) => run,
                        // It takes no requests.
                        ("Once", None) => Wish::Run { paused: false },
                        ("RerunOnFailure", None) if start || was != "RerunOnFailure" => run,
                        ("Manual", None) if start => run,
                        // A start that was asked for before the machine was halted is overridden, and so is one that a
                        // halted machine cannot have been asked for.
                        ("Halted", None) if *head == "Start paused" && ["", "Halted"].contains(&was) => Wish::Unhalt,
                        ("Halted", Some(_)) => Wish::Stop,
                        ("Always" | "RerunOnFailure", Some(p)) if stop || p.is_final() => Wish::Stop,
                        ("Manual", Some(_)) if stop => Wish::Stop,
                        _ => Wish::Stay,
                    };
                    assert_eq!(cell.wish(&view), want, "{strategy} {vmi:?} {head} was {was}");
                }
            }
            // One that is being deleted is waited for, whatever the strategy.
            if let Some(phase) = vmi {
                let mut going = vmi_in(phase);
                going["metadata"]["deletionTimestamp"] = json!("1970-01-01T00:10:00Z");
                let (cell, view) = seen(&json!({"runStrategy": strategy}), &json!({}), Some(&going));
                assert_eq!(cell.wish(&view), Wish::Stay, "{strategy} {phase:?} deleting");
            }
        }
    }
}

#[test]
fn rule_1_1_running_is_always_or_halted_and_both_are_an_error() {
    for (spec, strategy) in [
        (json!({"running": true}), Strategy::Always),
        (json!({"running": false}), Strategy::Halted),
        (json!({}), Strategy::Halted),
        (json!({"running": true, "runStrategy": "Manual"}), Strategy::Invalid),
        (json!({"runStrategy": "Sometimes"}), Strategy::Invalid),
    ] {
        let (cell, view) = seen(&spec, &json!({}), None);
        assert_eq!(view.strategy, strategy, "{spec}");
        assert_eq!(matches!(cell.wish(&view), Wish::Bad(_)), strategy == Strategy::Invalid, "{spec}");
    }
    // And a start of a halted one uses the word that the VM uses.
    for uses in ["running", "runStrategy"] {
        let mut m = vm("Halted");
        if uses == "running" {
            m["spec"].as_object_mut().unwrap().remove("runStrategy");
            m["spec"]["running"] = json!(false);
        }
        let mut w = World::with(m);
        w.settle(2_000);
        let start = json!([{"action": "Start", "data": {"paused": "true"}}]);
        w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": start}}));
        w.settle(5_000);
        assert_eq!(w.phase(), "Running", "{uses}");
        let spec = vmobj(&w)["spec"].clone();
        if uses == "running" {
            assert_eq!((spec["running"].clone(), spec.get("runStrategy")), (json!(true), None));
        } else {
            assert_eq!((spec["runStrategy"].clone(), spec.get("running")), (json!("Always"), None));
        }
        assert!(vmobj(&w)["status"].get("stateChangeRequests").is_none());
        assert_eq!(condition(&vmobj(&w), "Failure"), None, "it is no error");
    }
}

#[test]
fn rule_1_1_a_strategy_that_cannot_be_carried_out_is_named_and_forgotten_when_it_is_corrected() {
    for (strategy, word) in [("WaitAsReceiver", "WaitAsReceiver"), ("Sometimes", "strategy")] {
        let mut w = World::with(vm(strategy));
        w.settle(5_000);
        assert!(w.get(Kind::VirtualMachineInstance).is_none(), "{strategy}");
        assert_eq!(w.printable(), "Stopped");
        assert_eq!(condition(&vmobj(&w), "Failure").unwrap(), ("True".into(), "UnsupportedSyncError".into()));
        assert!(message(&vmobj(&w), "Failure").contains(word), "{}", message(&vmobj(&w), "Failure"));
        w.edit_spec(json!({"runStrategy": "Always"}));
        w.settle(10_000);
        assert_eq!(w.phase(), "Running");
        assert_eq!(condition(&vmobj(&w), "Failure"), None);
        // It also may not stop what runs.
        w.edit_spec(json!({"runStrategy": strategy}));
        w.settle(10_000);
        assert_eq!((w.phase().as_str(), w.printable().as_str()), ("Running", "Running"));
        assert_eq!(condition(&vmobj(&w), "Failure").unwrap().1, "UnsupportedSyncError");
    }
}

#[test]
fn rule_1_1_switching_the_strategy_at_any_moment_leads_to_what_the_new_one_says() {
    for from in STRATEGIES {
        for to in STRATEGIES {
            for moment in (0..60).step_by(4) {
                let mut w = World::with(vm(from));
                let mut d = Dice(moment * 2 + 11);
                for _ in 0..moment {
                    w.chaos(&mut d, false);
                }
                w.edit_spec(json!({"runStrategy": to}));
                for _ in 0..moment {
                    w.chaos(&mut d, true);
                }
                w.settle(120_000);
                let got = (w.phase(), w.printable());
                let runs = ("Running".to_owned(), "Running".to_owned());
                let off = (String::new(), "Stopped".to_owned());
                let fine = match to {
                    "Always" | "Once" => got == runs,
                    "Halted" => got == off,
                    "RerunOnFailure" if from != to => got == runs,
                    _ => got == runs || got == off,
                };
                assert!(fine, "{from} -> {to} at {moment}: {got:?} {:?}", w.writes);
                w.check();
            }
        }
    }
}

#[test]
fn rule_1_2_only_the_head_of_the_requests_counts_and_it_goes_when_it_is_done() {
    let q = |items: &[(&str, &str)]| -> Vec<Request> {
        items
            .iter()
            .map(|(action, uid)| Request {
                action: (*action).into(),
                uid: Some((*uid).to_owned()).filter(|u| !u.is_empty()),
                ..Request::default()
            })
            .collect()
    };
    const STOP: (&str, &str) = ("Stop", "vmi-1");
    const OLD: (&str, &str) = ("Stop", "gone");
    const START: (&str, &str) = ("Start", "");
    let running = vmi_in(Phase::Running);
    let mut going = running.clone();
    going["metadata"]["deletionTimestamp"] = json!("1970-01-01T00:10:00Z");
    type Queue = &'static [(&'static str, &'static str)];
    let table: &[(Option<&Value>, Queue, Queue)] = &[
        // A Stop stays while the VMI that it names is there, ...
        (Some(&running), &[STOP, START], &[STOP, START]),
        (Some(&going), &[STOP, START], &[STOP, START]),
        // ... and goes with it. That another one is seen may be an old sight: that is asked first.
        (None, &[STOP, START], &[START]),
        (Some(&running), &[OLD], &[OLD]),
        (Some(&running), &[("Stop", "")], &[]),
        (None, &[("Stop", "")], &[]),
        // A Start stays until there is a VMI that is not on its way out.
        (None, &[START], &[START]),
        (Some(&running), &[START], &[]),
        (Some(&going), &[START], &[START]),
        // What nobody knows does not block the rest.
        (None, &[("Dance", ""), START], &[START]),
        (Some(&running), &[START, STOP], &[STOP]),
    ];
    for (vmi, before, after) in table {
        let status = json!({"stateChangeRequests": q(before)});
        let (cell, view) = seen(&json!({"runStrategy": "Manual"}), &status, *vmi);
        assert_eq!(cell.requests(&view), q(after), "{before:?} with {:?}", vmi.map(|v| v["metadata"].clone()));
    }
}

#[test]
fn a_stop_is_not_dropped_because_of_an_old_sight() {
    // A leader that has just begun knows the instance before the one that is to be stopped.
    for (names, left) in [("vmi-1", "vmi-1"), ("older", "")] {
        let mut w = running("RerunOnFailure");
        let uid = vmi(&w)["metadata"]["uid"].as_str().unwrap().to_owned();
        let stop = if names == "vmi-1" { uid.clone() } else { names.to_owned() };
        w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": [{"action": "Stop", "uid": stop}]}}));
        let mut old = vmi(&w);
        if names == "vmi-1" {
            (old["metadata"]["uid"], old["metadata"]["resourceVersion"]) = (json!("before"), json!("1"));
        }
        let asked = w.confirms;
        let mut all: Vec<_> = w.objects.clone().into_iter().rev().collect();
        all.iter_mut()
            .filter(|((kind, _), _)| *kind == Kind::VirtualMachineInstance)
            .for_each(|(_, o)| *o = old.clone());
        w.restart_with(all);
        w.settle(60_000);
        assert!(w.confirms > asked, "it is looked at");
        assert!(vmobj(&w)["status"].get("stateChangeRequests").is_none(), "{names}");
        let now = vmi(&w)["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
        assert_eq!(now == uid, left.is_empty(), "{names}: the one that was to be stopped is, no other: {:?}", w.writes);
    }
}

#[test]
fn rule_1_2_a_paused_start_makes_a_paused_instance() {
    for strategy in ["Manual", "Halted", "RerunOnFailure"] {
        let mut m = vm(strategy);
        m["status"] = json!({"runStrategy": strategy});
        let mut w = World::with(m);
        w.settle(2_000);
        assert_eq!(w.printable(), "Stopped", "{strategy}");
        let start = json!([{"action": "Start", "data": {"paused": "true"}}]);
        w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": start}}));
        w.settle(5_000);
        assert_eq!(vmi(&w)["spec"]["startStrategy"], "Paused", "{strategy}");
        let second = w.restart_request();
        w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": second}}));
        w.settle(30_000);
        assert_eq!(vmi(&w)["spec"].get("startStrategy"), None, "{strategy}: paused once, not for ever");
    }
}

#[test]
fn rule_1_2_a_restart_is_carried_out_once_under_each_strategy_that_allows_it() {
    for strategy in ["Always", "RerunOnFailure", "Manual"] {
        let mut w = World::with(vm("Always"));
        w.settle(5_000);
        w.edit_spec(json!({"runStrategy": strategy}));
        w.settle(2_000);
        for n in 2..4 {
            let request = w.restart_request();
            w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": request}}));
            w.settle(30_000);
            assert_eq!((w.phase().as_str(), w.printable().as_str()), ("Running", "Running"), "{strategy}");
            assert_eq!(w.pods_ever.len(), n, "{strategy}");
            assert!(vmobj(&w)["status"].get("stateChangeRequests").is_none(), "{strategy}");
        }
    }
}

#[test]
fn rule_1_2_requests_that_meet_one_another_under_way() {
    // (strategy, what is asked first, what comes on top of it, running in the end)
    let table: &[(&str, &str, &str, bool)] = &[
        ("Manual", "restart", "stop", false),
        ("Always", "restart", "halt", false),
        ("RerunOnFailure", "restart", "halt", false),
        ("Manual", "restart", "delete the instance", true),
        ("Always", "restart", "restart", true),
        ("Manual", "stop", "restart", true),
        ("Always", "halt", "always", true),
        ("Manual", "stop", "start", true),
    ];
    for (strategy, first, second, runs) in table {
        for moment in 0..40 {
            let mut w = World::with(vm("Always"));
            w.settle(5_000);
            w.edit_spec(json!({"runStrategy": strategy}));
            w.settle(2_000);
            let uid = vmi(&w)["metadata"]["uid"].clone();
            let ask = |w: &mut World, what: &str| {
                let stop = json!({"action": "Stop", "uid": uid});
                let start = json!({"action": "Start"});
                let requests = match what {
                    "restart" => json!([stop, start]),
                    "stop" => json!([stop]),
                    // As the gateway does it: a final or vanishing instance first.
                    "start" => json!([stop, start]),
                    "halt" => return w.edit_spec(json!({"runStrategy": "Halted"})),
                    "always" => return w.edit_spec(json!({"runStrategy": "Always"})),
                    _ => {
                        if w.get(Kind::VirtualMachineInstance).is_some_and(|v| v["metadata"]["uid"] == uid) {
                            let gone = json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z"}});
                            w.edit(Kind::VirtualMachineInstance, gone);
                        }
                        return;
                    }
                };
                w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": requests}}));
            };
            ask(&mut w, first);
            let mut d = Dice(moment * 2 + 5);
            let mut overtaken = true;
            for _ in 0..moment {
                w.chaos(&mut d, false);
                let started_again = w.get(Kind::VirtualMachineInstance).is_some_and(|v| v["metadata"]["uid"] != uid);
                // What the request was about is over: the second one is a request of its own.
                overtaken &= !started_again && w.get(Kind::VirtualMachineInstance).is_some();
            }
            ask(&mut w, second);
            w.settle(120_000);
            let running = w.phase() == "Running";
            if overtaken {
                assert_eq!(running, *runs, "{strategy}: {first}, then {second} at {moment}: {:?}", w.writes);
            }
            assert!(vmobj(&w)["status"].get("stateChangeRequests").is_none(), "{strategy}: {first}, {second}");
            w.check();
        }
    }
}

#[test]
fn rule_1_2_a_stop_or_restart_with_a_grace_period_shortens_the_shutdown_under_way() {
    let mut w = running("Always");
    w.guest_obeys = false;
    w.agent_up = true;
    w.edit_spec(json!({"runStrategy": "Halted"}));
    // As far as the instruction, and no further.
    for _ in 0..4 {
        if let Some(s) = (!w.sights.is_empty()).then(|| w.sights.remove(0)) {
            w.feed(Input::Observed(s));
        }
        if let Some(c) = (!w.flying.is_empty()).then(|| w.flying.remove(0)) {
            let r = w.carry_out(c);
            w.settled.extend(r);
        }
        if let Some((id, result)) = (!w.settled.is_empty()).then(|| w.settled.remove(0)) {
            w.feed(Input::Settled { id, result });
        }
    }
    assert!(vmi(&w)["metadata"].get("deletionTimestamp").is_some());
    let told = |w: &World| {
        w.flying
            .iter()
            .filter_map(|c| {
                let crate::vm::Command::Instruct { order: crate::vm::Order::Do(i), .. } = c else { return None };
                Some((i.kind, i.deadline.0))
            })
            .collect::<Vec<_>>()
    };
    let first = told(&w);
    w.edit(Kind::VirtualMachineInstance, json!({"spec": {"terminationGracePeriodSeconds": 1}}));
    while !w.sights.is_empty() {
        let s = w.sights.remove(0);
        w.feed(Input::Observed(s));
    }
    let all = told(&w);
    assert!(all.len() > first.len(), "{all:?}");
    assert_eq!(all.last().unwrap().1, 1_000, "the shorter grace is told at once");
    w.settle(30_000);
    assert_eq!((w.phase().as_str(), w.printable().as_str()), ("", "Stopped"));
}

/// Lets the current launcher fail before the domain ran.
fn fail_start(w: &mut World) {
    w.kubelet = false;
    w.settle(500);
    assert!(w.get(Kind::Pod).is_some(), "{:?} {}", w.writes, w.printable());
    w.edit(
        Kind::Pod,
        json!({"status": {"phase": "Failed", "containerStatuses": [
            {"name": "compute", "state": {"terminated": {"exitCode": 2, "reason": "Error"}}}]}}),
    );
    w.settle(300);
    w.kubelet = true;
    w.settle(700);
}

#[test]
fn rule_1_8_each_failed_start_counts_once_and_the_pause_grows_over_restarts_of_the_controller() {
    for strategy in ["Always", "RerunOnFailure"] {
        let mut w = World::with(vm(strategy));
        let mut last = String::new();
        for n in 1..=4_u64 {
            fail_start(&mut w);
            let s = vmobj(&w)["status"].clone();
            assert_eq!(s["startFailure"]["consecutiveFailCount"], n, "{strategy}: {:?}", w.writes);
            assert_eq!(s["printableStatus"], "CrashLoopBackOff", "{strategy}");
            let uid = s["startFailure"]["lastFailedVMIUID"].as_str().unwrap().to_owned();
            assert_ne!(uid, last, "{strategy}: once per instance");
            last = uid;
            let at = Timestamp::parse(s["startFailure"]["retryAfterTimestamp"].as_str().unwrap()).unwrap();
            let pause = at.since(Timestamp(w.now)).0;
            let low = (10 * n * n).min(300) * 1000;
            assert!((low.saturating_sub(3_000)..=low * 3 / 2).contains(&pause), "{strategy} {n}: {pause}");
            w.restart();
            w.settle(pause - 2_000);
            assert!(w.get(Kind::VirtualMachineInstance).is_none(), "{strategy} {n}: not before its time");
            w.restart();
            w.settle(1_500);
            assert!(w.get(Kind::VirtualMachineInstance).is_none(), "{strategy} {n}: not before its time");
            w.kubelet = false;
            w.settle(2_000);
            assert!(
                w.get(Kind::VirtualMachineInstance).is_some(),
                "{strategy} {n}: but then {:?}",
                vmobj(&w)["status"]
            );
        }
        w.kubelet = true;
        w.settle(10_000);
        assert_eq!(w.phase(), "Running", "{strategy}");
        assert_eq!(vmobj(&w)["status"].get("startFailure"), None, "{strategy}: cleared once it ran");
    }
}

#[test]
fn rule_1_8_manual_does_not_count_and_once_counts_without_waiting() {
    let mut w = World::with(vm("Manual"));
    w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": [{"action": "Start"}]}}));
    fail_start(&mut w);
    assert_eq!(vmobj(&w)["status"].get("startFailure"), None);
    assert_eq!((w.phase().as_str(), w.printable().as_str()), ("Failed", "Stopped"));
    let mut w = World::with(vm("Once"));
    fail_start(&mut w);
    assert_eq!(vmobj(&w)["status"]["startFailure"]["consecutiveFailCount"], 1);
    assert_eq!((w.phase().as_str(), w.printable().as_str()), ("Failed", "CrashLoopBackOff"));
    // The failed one removed by hand: Once starts, whatever the count.
    w.edit(Kind::VirtualMachineInstance, json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z"}}));
    w.settle(5_000);
    assert_eq!(w.phase(), "Running");
    assert_eq!(vmobj(&w)["status"].get("startFailure"), None);
}

#[test]
fn rule_1_8_another_strategy_clears_the_count() {
    for to in ["Manual", "Halted"] {
        let mut w = World::with(vm("Always"));
        fail_start(&mut w);
        assert_eq!(w.printable(), "CrashLoopBackOff");
        w.edit_spec(json!({"runStrategy": to}));
        w.settle(2_000);
        assert_eq!(vmobj(&w)["status"].get("startFailure"), None, "{to}");
        assert_eq!(w.printable(), "Stopped", "{to}");
    }
}

#[test]
fn rule_1_8_a_user_who_starts_it_does_not_wait() {
    // The start subresource takes the count away together with its request.
    let mut w = World::with(vm("RerunOnFailure"));
    fail_start(&mut w);
    assert_eq!(w.printable(), "CrashLoopBackOff");
    w.edit(
        Kind::VirtualMachine,
        json!({"status": {"startFailure": null, "stateChangeRequests": [{"action": "Start"}]}}),
    );
    w.settle(5_000);
    assert_eq!((w.phase().as_str(), w.printable().as_str()), ("Running", "Running"));
}

#[test]
fn a_start_that_was_recalled_is_not_a_failed_start() {
    // Restarted while it waited for an image: nothing failed, so the next start does not wait.
    let mut w = World::with(vm("Always"));
    w.kubelet = false;
    w.settle(2_000);
    assert_eq!(w.phase(), "Scheduling");
    let request = w.restart_request();
    w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": request}}));
    w.kubelet = true;
    w.settle(5_000);
    assert_eq!((w.phase().as_str(), w.printable().as_str()), ("Running", "Running"), "{:?}", w.writes);
    assert_eq!(vmobj(&w)["status"].get("startFailure"), None);
}

#[test]
fn a_failed_start_is_in_the_status_before_its_instance_goes() {
    for seed in 0..200_u64 {
        let mut w = World::with(vm("Always"));
        w.kubelet = false;
        w.settle(500);
        w.edit(
            Kind::Pod,
            json!({"status": {"phase": "Failed", "containerStatuses": [
                {"name": "compute", "state": {"terminated": {"exitCode": 2, "reason": "Error"}}}]}}),
        );
        let mut d = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        for _ in 0..300 {
            w.chaos(&mut d, true);
            if vmi(&w)["metadata"].get("deletionTimestamp").is_some() {
                assert_eq!(vmobj(&w)["status"]["startFailure"]["consecutiveFailCount"], 1, "seed {seed}");
                break;
            }
        }
    }
}

#[test]
fn a_stop_that_overtakes_a_restart_is_not_undone_by_it() {
    let mut w = running("Always");
    let request = w.restart_request();
    w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": request}}));
    w.edit_spec(json!({"runStrategy": "Halted"}));
    w.settle(60_000);
    assert_eq!((w.phase().as_str(), w.printable().as_str()), ("", "Stopped"), "{:?}", w.writes);
    assert_eq!(vmobj(&w)["spec"]["runStrategy"], "Halted");
    assert!(vmobj(&w)["status"].get("stateChangeRequests").is_none());
}

#[test]
fn a_rerun_is_remembered_by_the_instance_that_it_makes_up_for() {
    let mut w = running("RerunOnFailure");
    let first = vmi(&w)["metadata"]["uid"].as_str().unwrap().to_owned();
    let pod = pod_uid(&w);
    w.end(&pod, Cause::Crashed);
    w.settle(60_000);
    assert_ne!(vmi(&w)["metadata"]["uid"], first.as_str());
    // A failed instance that shows up again, late, does not take the request of its own rerun away, nor make another.
    let failed = json!([{"action": "Start", "data": {"virtfold.io/rerun-of": "vmi-1"}}]);
    let status = json!({"runStrategy": "RerunOnFailure", "stateChangeRequests": failed});
    let (cell, view) = seen(&json!({"runStrategy": "RerunOnFailure"}), &status, Some(&vmi_in(Phase::Failed)));
    assert_eq!(cell.requests(&view), view.status.state_change_requests);
}

#[test]
fn rule_1_2_a_halted_machine_drops_every_start_that_is_older_than_a_stop_or_than_the_halt() {
    let stop = |uid: &str| json!({"action": "Stop", "uid": uid});
    let (start, paused) = (json!({"action": "Start"}), json!({"action": "Start", "data": {"paused": "true"}}));
    // (last strategy seen, the instance, what waits, what is left of it)
    let live = vmi_in(Phase::Running);
    type Row<'a> = (&'a str, Option<&'a Value>, Value, Value);
    let table: [Row<'_>; 9] = [
        ("Halted", None, json!([paused]), json!([paused])),
        ("Halted", None, json!([start]), json!([])),
        ("Always", None, json!([paused]), json!([])),
        ("Halted", Some(&live), json!([stop("vmi-1"), paused]), json!([stop("vmi-1")])),
        ("Halted", None, json!([stop("gone"), paused]), json!([])),
        ("Halted", Some(&live), json!([{"action": "Dance"}, stop("vmi-1"), paused]), json!([stop("vmi-1")])),
        ("Halted", Some(&live), json!([stop("gone"), stop("vmi-1"), paused]), json!([stop("gone"), stop("vmi-1")])),
        ("Halted", None, json!([paused, stop("gone"), paused]), json!([paused, stop("gone")])),
        ("Always", Some(&live), json!([stop("vmi-1"), start]), json!([stop("vmi-1")])),
    ];
    for (was, vmi, before, after) in table {
        let status = json!({"runStrategy": was, "stateChangeRequests": before});
        let (cell, view) = seen(&json!({"runStrategy": "Halted"}), &status, vmi);
        let left = serde_json::to_value(cell.requests(&view)).unwrap();
        let plain = |v: &Value| -> Vec<(Value, Value)> {
            let all = v.as_array().unwrap().iter();
            all.map(|r| (r["action"].clone(), r["data"]["paused"].clone())).collect()
        };
        assert_eq!(plain(&left), plain(&after), "{was}: {before}");
    }
}

#[test]
fn rule_1_1_a_rerun_is_dropped_by_a_strategy_that_does_not_rerun() {
    let requests = json!([{"action": "Start", "data": {"virtfold.io/rerun-of": "vmi-1"}}]);
    let status = json!({"runStrategy": "RerunOnFailure", "stateChangeRequests": requests});
    for strategy in STRATEGIES {
        for vmi in [Some(vmi_in(Phase::Failed)), None] {
            let (cell, view) = seen(&json!({"runStrategy": strategy}), &status, vmi.as_ref());
            let kept = usize::from(strategy == "RerunOnFailure");
            assert_eq!(cell.requests(&view).len(), kept, "{strategy}: {:?}", vmi.is_some());
        }
    }
}
