//! Tables of what happens when.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use super::model::{World, vm};
use super::{ClusterConfig, Fact, Input, Sight};
use crate::{
    Timestamp,
    domain::Cause,
    object::Kind,
    observe,
    trace::{Awaited, Finished, Reign, Relation},
};
use serde_json::{Value, json};

mod deletion;
mod instances;
mod machines;
mod nodes;
mod patterns;
mod properties;
mod protocol;
mod revisions;
mod status;
mod strategies;

fn running(strategy: &str) -> World {
    let mut w = World::with(vm(strategy));
    w.settle(10_000);
    assert_eq!(w.phase(), "Running", "{:?}", w.writes);
    w
}

fn vmi(w: &World) -> Value {
    w.get(Kind::VirtualMachineInstance).cloned().unwrap_or_default()
}

fn vmobj(w: &World) -> Value {
    w.get(Kind::VirtualMachine).cloned().unwrap()
}

fn condition(o: &Value, kind: &str) -> Option<(String, String)> {
    let c = o["status"]["conditions"].as_array()?.iter().find(|c| c["type"] == kind)?.clone();
    Some((c["status"].as_str()?.into(), c["reason"].as_str().unwrap_or("").into()))
}

fn message(o: &Value, kind: &str) -> String {
    let all = o["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let found = all.iter().find(|c| c["type"] == kind).and_then(|c| c["message"].as_str());
    found.unwrap_or_default().to_owned()
}

fn pod_uid(w: &World) -> String {
    w.get(Kind::Pod).unwrap()["metadata"]["uid"].as_str().unwrap().to_owned()
}

#[test]
fn a_start_costs_six_writes_and_a_revision() {
    let w = running("Always");
    assert_eq!(
        w.writes,
        [
            "create VirtualMachineInstance",
            "create ControllerRevision",
            "create Pod",
            "patch VirtualMachineInstance Scheduled",
            "patch VirtualMachineInstance Running",
            "patch VirtualMachine Running",
        ]
    );
    assert_eq!(w.refused, 0);
    let v = vmi(&w);
    assert_eq!(v["status"]["nodeName"], "n1");
    assert_eq!(v["metadata"]["labels"]["kubevirt.io/nodeName"], "n1");
    assert_eq!(v["status"]["activePods"][pod_uid(&w)], "n1");
    let phases: Vec<_> = v["status"]["phaseTransitionTimestamps"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t["phase"].as_str().unwrap())
        .collect();
    assert_eq!(phases, ["Pending", "Scheduling", "Scheduled", "Running"]);
    assert_eq!(condition(&v, "Ready").unwrap().0, "True");
    let m = vmobj(&w);
    assert_eq!(m["status"]["ready"], true);
    assert_eq!(m["status"]["created"], true);
    assert_eq!(m["status"]["printableStatus"], "Running");
    assert_eq!(m["status"]["runStrategy"], "Always");
    assert_eq!(w.notes, ["SuccessfulCreate", "Started"]);
}

#[test]
fn nothing_is_written_when_nothing_changes() {
    let mut w = running("Always");
    let n = w.writes.len();
    w.restart();
    w.settle(600_000);
    assert_eq!(w.writes[n..], [] as [&str; 0], "after a restart of the controller too");
}

#[test]
fn how_a_guest_ends_decides_what_follows() {
    use Cause::*;
    for (strategy, cause, phase, printable) in [
        ("Always", GuestShutdown, "Running", "Running"),
        ("Always", Crashed, "Running", "Running"),
        ("RerunOnFailure", GuestShutdown, "", "Stopped"),
        ("RerunOnFailure", Crashed, "Running", "Running"),
        ("RerunOnFailure", OutcomeUnknown, "Running", "Running"),
        ("Once", GuestShutdown, "Succeeded", "Stopped"),
        ("Once", Panicked, "Failed", "Stopped"),
    ] {
        let mut w = running(strategy);
        let first = vmi(&w)["metadata"]["uid"].clone();
        let pod = pod_uid(&w);
        w.end(&pod, cause);
        w.settle(60_000);
        assert_eq!(
            (w.phase().as_str(), w.printable().as_str()),
            (phase, printable),
            "{strategy} {cause:?}: {:?}",
            w.writes
        );
        if phase == "Running" {
            assert_ne!(vmi(&w)["metadata"]["uid"], first, "{strategy} {cause:?}");
        }
        assert!(vmobj(&w)["status"].get("stateChangeRequests").is_none(), "{strategy} {cause:?}");
        assert!(w.launchers[&pod].acknowledged, "{strategy} {cause:?}: the outcome is acknowledged");
        w.check();
    }
}

#[test]
fn manual_starts_stops_and_restarts_on_request() {
    let mut w = World::with(vm("Manual"));
    w.settle(5_000);
    assert_eq!((w.phase().as_str(), w.printable().as_str()), ("", "Stopped"));
    w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": [{"action": "Start"}]}}));
    w.settle(5_000);
    assert_eq!(w.phase(), "Running");
    assert!(vmobj(&w)["status"].get("stateChangeRequests").is_none());
    let uid = vmi(&w)["metadata"]["uid"].clone();
    let restart = json!([{"action": "Stop", "uid": uid}, {"action": "Start"}]);
    w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": restart}}));
    w.settle(30_000);
    assert_eq!(w.phase(), "Running", "{:?}", w.writes);
    let second = vmi(&w)["metadata"]["uid"].clone();
    assert_ne!(second, uid);
    w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": [{"action": "Stop", "uid": second}]}}));
    w.settle(30_000);
    assert_eq!((w.phase().as_str(), w.printable().as_str()), ("", "Stopped"));
    assert!(vmobj(&w)["status"].get("stateChangeRequests").is_none());
    assert!(w.get(Kind::Pod).is_none());
}

#[test]
fn a_paused_start_is_rendered_and_a_halted_vm_is_unhalted() {
    let mut w = World::with(vm("Halted"));
    w.settle(5_000);
    assert_eq!(w.printable(), "Stopped");
    let start = json!([{"action": "Start", "data": {"paused": "true"}}]);
    w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": start}}));
    w.settle(5_000);
    assert_eq!(vmobj(&w)["spec"]["runStrategy"], "Always");
    assert_eq!(vmi(&w)["spec"]["startStrategy"], "Paused");
    w.edit(Kind::VirtualMachine, json!({"spec": {"runStrategy": "Halted"}}));
    w.settle(60_000);
    assert_eq!((w.phase().as_str(), w.printable().as_str()), ("", "Stopped"), "{:?}", w.writes);
}

#[test]
fn rule_2_4_a_missing_claim_is_said_and_waited_for_before_there_is_a_pod() {
    let mut m = vm("Always");
    m["spec"]["template"]["spec"]["volumes"] = json!([{"name": "d", "persistentVolumeClaim": {"claimName": "c1"}}]);
    let mut w = World::with(m);
    w.settle(5_000);
    assert_eq!(w.printable(), "ErrorPvcNotFound");
    assert_eq!(condition(&vmi(&w), "Synchronized").unwrap().1, "FailedPvcNotFound");
    assert!(w.get(Kind::Pod).is_none());
    assert!(w.cell.waits()[0].message().contains("c1"));
    w.put(
        Kind::PersistentVolumeClaim,
        json!({"metadata": {"name": "c1", "namespace": "ns", "uid": "c"}, "status": {"phase": "Bound"}}),
    );
    w.settle(5_000);
    assert_eq!((w.phase().as_str(), w.printable().as_str()), ("Running", "Running"));
    assert_eq!(condition(&vmi(&w), "Synchronized"), None);
    assert_eq!(condition(&vmobj(&w), "Synchronized"), None, "and the VM's copy goes too");
}

#[test]
fn rule_2_5_what_the_pod_waits_for_is_shown() {
    for (pod, printable, kind, reason) in [
        (
            json!({"status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}]}}),
            "ErrorUnschedulable",
            "PodScheduled",
            "Unschedulable",
        ),
        (
            json!({"status": {"phase": "Pending", "containerStatuses": [{"name": "compute", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such"}}}]}}),
            "ErrImagePull",
            "Synchronized",
            "ErrImagePull",
        ),
        (
            json!({"status": {"phase": "Pending", "containerStatuses": [{"name": "compute", "state": {"waiting": {"reason": "ImagePullBackOff"}}}]}}),
            "ImagePullBackOff",
            "Synchronized",
            "ImagePullBackOff",
        ),
    ] {
        let mut w = World::with(vm("Always"));
        w.kubelet = false;
        w.settle(2_000);
        w.edit(Kind::Pod, pod);
        w.settle(5_000);
        assert_eq!(w.printable(), printable);
        assert_eq!(condition(&vmi(&w), kind).unwrap(), ("False".into(), reason.into()));
        assert_eq!(w.phase(), "Scheduling");
    }
}

#[test]
fn starts_that_fail_back_off_as_kubevirt_does() {
    let mut w = World::with(vm("Always"));
    w.kubelet = false;
    w.settle(500);
    w.edit(
        Kind::Pod,
        json!({"status": {"phase": "Failed", "containerStatuses": [
        {"name": "compute", "state": {"terminated": {"exitCode": 2, "reason": "Error"}}}]}}),
    );
    w.kubelet = true;
    w.settle(3_000);
    let failure = vmobj(&w)["status"]["startFailure"].clone();
    assert_eq!(failure["consecutiveFailCount"], 1);
    assert_eq!((w.phase().as_str(), w.printable().as_str()), ("", "CrashLoopBackOff"));
    w.settle(20_000);
    assert_eq!((w.phase().as_str(), w.printable().as_str()), ("Running", "Running"));
    assert_eq!(vmobj(&w)["status"].get("startFailure"), None, "cleared once it ran");
    for (n, low, high) in [(1_u64, 10_000, 15_000), (2, 40_000, 60_000), (5, 250_000, 300_000), (9, 300_000, 300_000)] {
        let pause = super::strategy::start_backoff(&"u".into(), n).0;
        assert!((low..=high).contains(&pause), "{n}: {pause}");
    }
}

#[test]
fn a_stop_powers_off_and_one_that_is_ignored_kills() {
    for (obeys, note) in [(true, "The virtual machine was shut down"), (false, "KilledAfterGrace")] {
        let mut w = running("Always");
        w.guest_obeys = obeys;
        w.edit(Kind::VirtualMachine, json!({"spec": {"runStrategy": "Halted"}}));
        w.settle(30_000);
        assert_eq!((w.phase().as_str(), w.printable().as_str()), ("", "Stopped"), "{note}");
        assert!(w.get(Kind::Pod).is_none());
        assert!(
            w.writes.iter().any(|x| x
                == if obeys {
                    "patch VirtualMachineInstance Succeeded"
                } else {
                    "patch VirtualMachineInstance Failed"
                }),
            "{:?}",
            w.writes
        );
    }
}

#[test]
fn a_launcher_that_is_killed_fails_the_vmi_and_always_starts_another() {
    let mut w = running("Once");
    w.edit(
        Kind::Pod,
        json!({"status": {"phase": "Failed", "containerStatuses": [
        {"name": "compute", "state": {"terminated": {"exitCode": 137, "reason": "Error"}}}]}}),
    );
    w.settle(4_000);
    assert_eq!(w.phase(), "Running", "the agent may still say how it ended");
    w.settle(2_000);
    assert_eq!(w.phase(), "Failed");
    assert_eq!(vmi(&w)["status"]["reason"], "OutcomeUnknown");

    let mut w = running("Once");
    let pod = pod_uid(&w);
    w.edit(
        Kind::Pod,
        json!({"status": {"phase": "Succeeded", "containerStatuses": [
        {"name": "compute", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}]}}),
    );
    w.settle(1_000);
    w.end(&pod, Cause::GuestShutdown);
    w.settle(1_000);
    assert_eq!(w.phase(), "Succeeded", "and it did");
}

#[test]
fn a_bare_vmi_runs_and_is_torn_down() {
    let mut w = World::with_bare();
    w.settle(5_000);
    assert_eq!(w.phase(), "Running");
    w.edit(Kind::VirtualMachineInstance, json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z"}}));
    w.settle(30_000);
    assert!(w.objects.is_empty(), "{:?}", w.writes);
    assert!(w.cell.is_empty());
}

#[test]
fn a_vmi_whose_vm_is_gone_is_let_go() {
    let mut w = running("Always");
    w.objects.remove(&(Kind::VirtualMachine, "web".into()));
    w.edit(Kind::VirtualMachineInstance, json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z"}}));
    w.restart();
    w.settle(60_000);
    assert!(w.objects.keys().all(|(k, _)| *k == Kind::ControllerRevision), "{:?}", w.objects.keys());
}

#[test]
fn a_silent_agent_changes_ready_after_a_minute_and_nothing_else() {
    use super::{Fact, Input, NodeFact};
    use crate::Timestamp;
    let mut w = running("Always");
    let n = w.writes.len();
    w.agent_up = false;
    let since = Timestamp(w.now);
    let fact = |session, silent_since, ready| {
        Input::Configured(Fact::Node(NodeFact {
            node: "n1".into(),
            ready,
            session,
            silent_since,
            fenced: None,
            gone: false,
        }))
    };
    w.feed(fact(None, Some(since), true));
    w.settle(59_000);
    assert_eq!(w.writes.len(), n, "session loss writes nothing");
    w.settle(5_000);
    assert_eq!(condition(&vmi(&w), "Ready").unwrap(), ("False".into(), "NodeUnreachable".into()));
    assert_eq!((w.phase().as_str(), w.printable().as_str()), ("Running", "Unknown"));
    w.settle(3_600_000);
    assert_eq!(w.phase(), "Running", "silence is no evidence");
    w.agent_up = true;
    w.session += 1;
    w.feed(fact(Some(w.session), None, true));
    w.settle(5_000);
    assert_eq!(condition(&vmi(&w), "Ready").unwrap().0, "True");
    assert_eq!(w.printable(), "Running");
    // And a node that Kubernetes calls not ready, at once.
    w.feed(fact(Some(w.session), None, false));
    w.settle(2_000);
    assert_eq!(w.printable(), "Unknown");
}

#[test]
fn a_start_that_the_node_refuses_fails_the_vmi() {
    let mut w = World::with(vm("Once"));
    for _ in 0..6 {
        w.settle(0);
        w.launchers.clear();
    }
    // The agent has no launcher for the pod: it refuses as failed.
    w.settle(20_000);
    if w.phase() != "Running" {
        assert_eq!(w.phase(), "Failed");
        assert_eq!(vmi(&w)["status"]["reason"], "StartFailed");
    }
}

#[test]
fn an_orphaned_vmi_is_adopted_by_a_vm_of_its_name() {
    let mut w = running("Always");
    w.edit(Kind::VirtualMachine, json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z", "finalizers": [api::names::FINALIZER_VM, "orphan"]}}));
    // The collector lets the dependents go before it takes its finalizer off.
    w.edit(Kind::VirtualMachineInstance, json!({"metadata": {"ownerReferences": null}}));
    w.settle(2_000);
    w.edit(Kind::VirtualMachine, json!({"metadata": {"finalizers": null}}));
    w.settle(10_000);
    assert!(w.get(Kind::VirtualMachine).is_none());
    assert_eq!(w.phase(), "Running");
    let mut again = vm("Always");
    again["metadata"]["uid"] = json!("vm-2");
    w.put(Kind::VirtualMachine, again);
    w.settle(10_000);
    assert_eq!(vmi(&w)["metadata"]["ownerReferences"][0]["uid"], "vm-2");
    assert_eq!((w.phase().as_str(), w.printable().as_str()), ("Running", "Running"));
    w.check();
}

#[test]
fn the_steps_of_a_start_become_spans() {
    let mut w = World::with(vm("Always"));
    w.settle(10_000);
    let names: Vec<_> = w.cell.take_steps().iter().map(|s| s.step.name()).collect();
    assert_eq!(names, ["create-vmi", "place-pod", "prepare-pod", "authorise", "boot", "publish"]);
    // A bare instance has the same steps, and each instance of a machine has its own.
    let mut w = World::with_bare();
    w.settle(10_000);
    let steps: Vec<_> = w.cell.known().steps.iter().map(|(s, ..)| s.name()).collect();
    assert_eq!(steps, names);
    let mut w = World::with(vm("Always"));
    w.settle(10_000);
    let first = w.cell.take_steps();
    let pod = pod_uid(&w);
    w.end(&pod, Cause::Crashed);
    w.settle(60_000);
    let later = w.cell.take_steps();
    let of = |all: &[crate::trace::Finished]| all.iter().map(|s| (s.instance.clone(), s.step)).collect::<Vec<_>>();
    assert!(!later.is_empty() && of(&later).iter().all(|s| !of(&first).contains(s)), "{later:?}");
}

/// Names of steps, and whether a process that has ended began them.
fn steps(w: &mut World) -> Vec<(&'static str, bool)> {
    w.cell.take_steps().iter().map(|s| (s.step.name(), s.resumed)).collect()
}

/// Another controller leads: it knows until when the one before it lived, and sees what there is.
fn succeed(w: &mut World, before: u64) {
    let reign = Reign { since: Timestamp(w.now), before: Some(Timestamp(before)) };
    let all: Vec<_> = w.objects.clone().into_iter().rev().collect();
    w.restart_with(vec![]);
    w.feed(Input::Configured(Fact::Cluster(ClusterConfig { reign, ..ClusterConfig::default() })));
    for ((kind, _), o) in all {
        if kind != Kind::ControllerRevision {
            w.feed(Input::Observed(Sight::Present(observe::object(kind, &o).unwrap())));
        }
    }
}

/// The pod gets its node, and its container runs.
fn prepared(w: &mut World) {
    let at = Timestamp(w.now).to_string();
    w.edit(
        Kind::Pod,
        json!({"spec": {"nodeName": "n1"}, "status": {"phase": "Running",
            "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": at}],
            "containerStatuses": [{"name": "compute", "state": {"running": {"startedAt": at}}}]}}),
    );
}

#[test]
fn a_successor_tells_what_ended_while_nobody_led() {
    let start = || {
        let mut w = World::with(vm("Always"));
        w.kubelet = false;
        w.settle(1_000);
        assert_eq!(steps(&mut w), [("create-vmi", false)]);
        w
    };
    // The pod was prepared while nobody led.
    let mut w = start();
    let before = w.now + 2_000;
    w.now += 60_000;
    prepared(&mut w);
    w.now += 60_000;
    succeed(&mut w, before);
    let all: Vec<Finished> = w.cell.take_steps();
    let told: Vec<_> = all.iter().map(|s| (s.step.name(), s.resumed)).collect();
    assert_eq!(told, [("place-pod", true), ("prepare-pod", true)]);
    let waited: Vec<_> = all[0].waits.iter().map(|w| (w.what, w.from.0)).collect();
    assert_eq!(waited, [(Awaited::Leader, before)]);
    assert!(all[0].end.0 < w.now, "when it happened, not when it was seen");
    // Whenever the predecessor dies, in the middle of a start or of a stop: what it has told is not told again.
    let mut whole = 0;
    for end in 1..60 {
        let mut w = World::with(vm("Always"));
        // Later than when the world says that something was deleted.
        w.now += 700_000;
        let mut told = vec![];
        for n in 0..400 {
            if n == 25 {
                w.edit(Kind::VirtualMachine, json!({"spec": {"runStrategy": "Halted"}}));
            }
            if n == end {
                let before = w.now + 2_000;
                w.now += 60_000;
                succeed(&mut w, before);
            }
            if !w.settle_one() {
                w.settle(2_000);
            }
            told.extend(w.cell.take_steps().into_iter().map(|s| (s.step.name(), s.instance)));
        }
        let mut once = told.clone();
        once.sort();
        once.dedup();
        assert_eq!(once.len(), told.len(), "after {end}, told twice: {told:?}");
        whole += usize::from(told.iter().any(|(name, _)| *name == "teardown"));
    }
    // Of an instance that is gone by then, nothing tells that it was there.
    assert!(whole > 50, "{whole} stops were told to their end");
}

#[test]
fn the_first_word_of_a_guest_is_told_once_whoever_leads_then() {
    // When the guest's agent answers first: at these times after the leader's last sign of life, who takes over a minute later.
    for (answers, told) in [
        (None, &[][..]),
        (Some(-10_000_i64), &[("guest-agent", false)][..]),
        (Some(30_000), &[("guest-agent", true)]),
        (Some(90_000), &[("guest-agent", true)]),
    ] {
        let mut w = running("Always");
        let pod = pod_uid(&w);
        assert_eq!(steps(&mut w).last(), Some(&("publish", false)));
        w.now += 100_000;
        let before = w.now;
        let at = answers.map(|after| Timestamp(before.saturating_add_signed(after)));
        let answer = |w: &mut World| {
            w.say(&pod, |l| {
                l.guest.agent_connected = true;
                l.guest.agent_first = at;
            });
        };
        let mut all = vec![];
        let take = |w: &mut World, all: &mut Vec<_>| {
            w.settle(2_000);
            all.extend(steps(w));
        };
        if at.is_some_and(|at| at.0 < before) {
            answer(&mut w);
            take(&mut w, &mut all);
        }
        if at.is_some_and(|at| (before..before + 60_000).contains(&at.0)) {
            answer(&mut w);
        }
        w.now = before + 60_000;
        succeed(&mut w, before);
        w.connect();
        take(&mut w, &mut all);
        if at.is_some_and(|at| at.0 > w.now) {
            w.now = before + 90_000;
            answer(&mut w);
            take(&mut w, &mut all);
        }
        // It goes and comes again, and another one takes over: nobody tells it anew.
        for connected in [false, true] {
            w.say(&pod, |l| l.guest.agent_connected = connected && at.is_some());
            take(&mut w, &mut all);
        }
        let before = w.now;
        w.now += 60_000;
        succeed(&mut w, before);
        w.connect();
        take(&mut w, &mut all);
        assert_eq!(all, told, "{answers:?}");
    }
}

#[test]
fn a_wait_is_a_span_of_the_step_that_waited() {
    let mut w = World::with(vm("Always"));
    w.kubelet = false;
    w.settle(1_000);
    w.now += 5_000;
    w.kubelet = true;
    // As the driver does: what ended is taken after each step.
    let mut all = vec![];
    while w.settle_one() {
        all.extend(w.cell.take_steps());
    }
    let place = all.iter().find(|s| s.step.name() == "place-pod").unwrap();
    let waited: Vec<_> = place.waits.iter().map(|w| w.what).collect();
    assert_eq!(waited, [Awaited::Scheduler]);
    assert!(place.waits[0].from >= place.start && place.waits[0].to <= place.end, "{place:?}");
    assert!(place.waits[0].to.since(place.waits[0].from).0 >= 5_000, "{place:?}");
}

#[test]
fn a_start_after_a_crash_is_linked_to_the_life_before() {
    let mut w = running("Always");
    let first = vmi(&w)["metadata"]["uid"].as_str().unwrap().to_owned();
    assert!(w.cell.take_steps().iter().all(|s| s.cause.is_none()));
    let pod = pod_uid(&w);
    w.end(&pod, Cause::Crashed);
    w.settle(60_000);
    let causes: Vec<_> = w.cell.take_steps().into_iter().filter_map(|s| s.cause).collect();
    assert_eq!(causes.len(), 1, "{causes:?}");
    assert_eq!((causes[0].relation, causes[0].instance.as_str()), (Relation::Failure, first.as_str()));
    assert!(!causes[0].traceparent.is_empty());
}

#[test]
fn a_second_domain_or_pod_of_an_instance_is_seen_to_be_one_too_many() {
    let mut w = running("Always");
    assert_eq!(w.cell.violated().count(), 0);
    let (session, domain) = w.cell.domains.values().next().unwrap().clone();
    let mut other = (*domain).clone();
    other.pod = "other".into();
    w.cell.domains.insert(other.pod.clone(), (session, other.clone().into()));
    assert_eq!(w.cell.violated().collect::<Vec<_>>(), ["one-domain"]);
    // What has stopped, or is of another instance, does not count.
    other.state = crate::domain::DomainState::Stopped;
    w.cell.domains.insert(other.pod.clone(), (session, other.into()));
    assert_eq!(w.cell.violated().count(), 0);
    let mut pod = (**w.cell.pods.values().next().unwrap()).clone();
    pod.meta.uid = "other".into();
    w.cell.pods.insert(pod.pod_uid(), pod.into());
    assert_eq!(w.cell.violated().collect::<Vec<_>>(), ["one-pod"]);
}
