//! Ways to be stuck or to fail: the answer names the true cause, and conditions and Events say the same.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use super::{Explanation, Story, WaitKind, Warning};
use crate::{
    Event, Key, Machine, Timestamp,
    domain::{Cause, DomainState},
    object::{Kind, Refusal, Settled},
    vm::{
        Fact, Input, NodeFact,
        model::{World, bare, vm},
    },
};
use serde_json::{Value, json};

fn explain(w: &World) -> Explanation {
    let mut story = Story::new(Key::new("ns", "web"));
    for (first, event) in &w.tape {
        story.step(None, *first, event);
    }
    Explanation::new(&Key::new("ns", "web"), story, Some(&w.cell), Timestamp(w.now))
}

fn lines(e: &Explanation) -> Vec<String> {
    e.history.iter().map(|h| format!("{} {}", h.actor.words(), h.message)).collect()
}

#[test]
fn a_life_is_told_in_order_and_once() {
    let mut w = World::with(vm("Always"));
    w.settle(10_000);
    let e = explain(&w);
    assert_eq!(
        lines(&e),
        [
            "a user created the virtual machine (run strategy Always)",
            "the controller created the instance",
            "the controller created the launcher pod virt-launcher-web-ae732c4e07",
            "the scheduler placed the launcher pod on node n1",
            "kubelet of n1 started the launcher",
            "the controller allowed node n1 to start the guest",
            "agent of n1 runs the guest (tcg)",
        ]
    );
    assert_eq!(e.waits, []);
    assert_eq!(e.summary, "web is Running on node n1, as it should be.");
    let steps: Vec<_> = e.steps.iter().map(|s| s.step.as_str()).collect();
    assert_eq!(steps, ["create-vmi", "place-pod", "prepare-pod", "authorise", "boot", "publish"]);
    let called = |e: &Explanation| e.statuses.iter().map(|c| c.status.clone()).collect::<Vec<_>>();
    assert_eq!(called(&e), ["Pending", "Scheduled", "Running"]);
    assert!(e.statuses.is_sorted_by_key(|c| c.since));
    // A controller that finds it running has nothing to tell but that it is there.
    let n = e.history.len();
    w.restart();
    w.settle(10_000);
    let e = explain(&w);
    assert_eq!(called(&e), ["Pending", "Scheduled", "Running"], "and it is called as before");
    assert_eq!(lines(&e)[n..], ["the controller started anew, or another took over"]);
    assert_eq!(e.steps.len(), 6, "and the steps of the start are still known");
    let text = serde_json::to_string(&e).unwrap();
    assert_eq!(serde_json::from_str::<Explanation>(&text).unwrap(), e);
    let v: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(v["history"][0]["actor"], serde_json::json!({"kind": "user", "name": null}));
    assert_eq!(v["history"][0]["time"], "1970-01-01T00:00:01.000Z");
}

#[test]
fn without_a_recording_the_objects_tell_what_they_keep() {
    let mut w = World::with(vm("Always"));
    w.settle(10_000);
    let e =
        Explanation::new(&Key::new("ns", "web"), Story::new(Key::new("ns", "web")), Some(&w.cell), Timestamp(w.now));
    assert_eq!(
        lines(&e),
        [
            "a user created the virtual machine (run strategy Always)",
            "the controller allowed node n1 to start the guest",
            "agent of n1 runs the guest",
            "the controller created the instance",
        ]
    );
    assert_eq!(e.statuses.len(), 1);
    assert_eq!(e.statuses[0].status, "Running");
    assert!(e.statuses[0].since < Timestamp(w.now - 5_000), "since it was written, not since somebody looked");
    let mut w = World::with(vm("Halted"));
    w.settle(5_000);
    let e = explain(&w);
    assert_eq!(e.waits[0].kind, WaitKind::Person);
    assert_eq!(e.waits[0].unblock, "'virtfold start web'");
    w.edit(
        Kind::VirtualMachine,
        serde_json::json!({"metadata": {"finalizers": null, "deletionTimestamp": "1970-01-01T00:00:05Z"}}),
    );
    w.settle(5_000);
    assert_eq!(explain(&w).summary, "web does not exist any more.");
}

// --- the ways to be stuck or to fail ---

/// The answer has this wait, with these words in its cause and in its remedy; the condition that it names says the same,
/// and, where `told`, an Event does.
#[track_caller]
fn cause(w: &World, reason: &str, words: &[&str], remedy: &str, told: bool) {
    let e = explain(w);
    let wait = e.waits.iter().find(|x| x.reason == reason).unwrap_or_else(|| panic!("no {reason} in {:#?}", e.waits));
    for word in words {
        assert!(wait.message.contains(word), "{word}: {wait:?}");
    }
    assert!(wait.unblock.contains(remedy), "{remedy}: {wait:?}");
    assert_eq!(wait.waits_for, e.waits[0].waits_for, "the most specific first: {:#?}", e.waits);
    assert!(e.summary.contains(wait.message.trim_end_matches('.')), "{}", e.summary);
    if !wait.condition.is_empty() {
        let of = |kind| {
            let conditions =
                w.get(kind).and_then(|o| o["status"]["conditions"].as_array()).cloned().unwrap_or_default();
            conditions
                .into_iter()
                .any(|c| c["type"] == wait.condition.as_str() && c["message"] == wait.message.as_str())
        };
        let any = of(Kind::VirtualMachine) || of(Kind::VirtualMachineInstance);
        let all = [Kind::VirtualMachine, Kind::VirtualMachineInstance].map(|k| w.get(k).map(|o| o["status"].clone()));
        assert!(any, "no condition {} says {:?}: {all:#?}", wait.condition, wait.message);
    }
    if told {
        let said = format!("{reason}: {}", wait.message);
        assert!(w.said.iter().any(|s| s.ends_with(&said)), "no Event says {said}: {:#?}", w.said);
    }
}

/// The history has a line with these words.
#[track_caller]
fn told(w: &World, who: &str, words: &str) {
    let all = lines(&explain(w));
    assert!(all.iter().any(|l| l.starts_with(who) && l.contains(words)), "{who} {words}: {all:#?}");
}

/// A world whose pod stays as the test wants it.
fn stuck(manifest: Value, pod: Value) -> World {
    let mut w = World::with(manifest);
    w.kubelet = false;
    w.settle(2_000);
    w.edit(Kind::Pod, pod);
    w.settle(5_000);
    w
}

fn unscheduled(message: &str) -> Value {
    json!({"status": {"conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]}})
}

fn waiting(reason: &str, message: &str) -> Value {
    json!({"spec": {"nodeName": "n1"}, "status": {"phase": "Pending", "containerStatuses": [
        {"name": "compute", "state": {"waiting": {"reason": reason, "message": message}}}]}})
}

fn running(strategy: &str) -> World {
    let mut w = World::with(vm(strategy));
    w.settle(10_000);
    assert_eq!(w.phase(), "Running", "{:?}", w.writes);
    w
}

fn pod_of(w: &World) -> String {
    w.get(Kind::Pod).unwrap()["metadata"]["uid"].as_str().unwrap().to_owned()
}

fn refusal(code: u16, reason: &str, message: &str) -> Refusal {
    Refusal { code, reason: reason.into(), message: message.into() }
}

#[test]
fn no_node_fits() {
    for (message, remedy) in [
        ("0/3 nodes are available: 3 Insufficient memory.", "add a node, or ask for less"),
        ("0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.", "label a node"),
        ("0/1 nodes are available: 1 Insufficient devices.kubevirt.io/kvm.", "KVM that works"),
        ("0/1 nodes are available: 1 node(s) had untolerated taint {a: b}.", "take the taint off"),
        ("0/1 nodes are available: 1 node(s) were unschedulable.", "uncordon"),
    ] {
        let w = stuck(vm("Always"), unscheduled(message));
        cause(&w, "Unschedulable", &[message], remedy, true);
        told(&w, "the scheduler", message);
        assert_eq!(w.printable(), "ErrorUnschedulable");
    }
}

#[test]
fn nobody_is_there_who_could_place_it() {
    let w = stuck(vm("Always"), json!({"spec": {"schedulerName": "mine"}}));
    cause(&w, "Scheduling", &[], "where a scheduler of the name mine runs", false);
    assert!(explain(&w).summary.contains("waits for scheduler mine to place"), "{}", explain(&w).summary);
}

#[test]
fn an_image_cannot_be_had() {
    for (reason, message) in [
        ("ErrImagePull", "failed to pull image \"registry.example/none:1\": manifest unknown"),
        ("ImagePullBackOff", "Back-off pulling image: connection closed before the layer was complete"),
    ] {
        let w = stuck(vm("Always"), waiting(reason, message));
        cause(&w, reason, &[message], "make the registry reachable", true);
        told(&w, "kubelet of n1", message);
    }
}

#[test]
fn a_claim_is_missing_or_has_no_volume() {
    let mut m = vm("Always");
    m["spec"]["template"]["spec"]["volumes"] = json!([{"name": "d", "persistentVolumeClaim": {"claimName": "c1"}}]);
    let mut w = World::with(m);
    w.kubelet = false;
    w.settle(5_000);
    cause(&w, "FailedPvcNotFound", &["PVC ns/c1 does not exist"], "create PersistentVolumeClaim c1", true);
    w.put(
        Kind::PersistentVolumeClaim,
        json!({"metadata": {"name": "c1", "namespace": "ns", "uid": "c"}, "status": {"phase": "Pending"}}),
    );
    w.settle(2_000);
    told(&w, "the API server", "has PersistentVolumeClaim c1 now");
    w.edit(Kind::Pod, unscheduled("0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."));
    w.settle(5_000);
    cause(
        &w,
        "Unschedulable",
        &["unbound", "without a volume: PersistentVolumeClaim c1"],
        "kubectl describe pvc c1",
        true,
    );
    assert_eq!(explain(&w).asks, [("PersistentVolumeClaim", "c1".to_owned())]);
}

#[test]
fn the_api_server_refuses_the_pod() {
    for (answer, words, remedy) in [
        (
            Settled::Refused(refusal(
                403,
                "Forbidden",
                "pods \"virt-launcher-web\" is forbidden: exceeded quota: small, requested: pods=1, used: pods=2, limited: pods=2",
            )),
            "exceeded quota: small",
            "raise the ResourceQuota",
        ),
        (
            Settled::Failed(refusal(
                500,
                "InternalError",
                "Internal error occurred: failed calling webhook \"guard.example.com\": failed to call webhook: Post \
                 \"https://guard.default.svc:443/\": dial tcp 10.0.0.1:443: connect: connection refused",
            )),
            "failed calling webhook \"guard.example.com\"",
            "repair or remove the admission webhook",
        ),
    ] {
        let mut w = World::with(vm("Always"));
        w.answers.insert(Kind::Pod, answer);
        w.settle(20_000);
        cause(&w, "FailedCreate", &[words], remedy, true);
        told(&w, "the API server", words);
        let n = w.tape.len();
        w.settle(300_000);
        assert!(w.tape.len() - n < 100, "it is tried again less and less often");
        w.answers.clear();
        w.settle(60_000);
        assert_eq!((w.phase().as_str(), w.printable().as_str()), ("Running", "Running"), "and goes on by itself");
        assert_eq!(explain(&w).waits, []);
    }
}

#[test]
fn the_controller_lacks_a_right_or_gets_no_answer() {
    let mut w = World::with(vm("Always"));
    let message = "virtualmachineinstances.kubevirt.io is forbidden: User \"c\" cannot create resource";
    w.answers.insert(Kind::VirtualMachineInstance, Settled::Refused(refusal(403, "Forbidden", message)));
    w.settle(20_000);
    cause(&w, "FailedCreate", &[message], "give the controller the right", true);
    let mut w = World::with(vm("Always"));
    w.answers.insert(Kind::VirtualMachineInstance, Settled::Unknown);
    w.settle(20_000);
    let e = explain(&w);
    assert_eq!((e.waits[0].reason.as_str(), e.waits[0].kind), ("NoAnswer", WaitKind::Problem));
    w.answers.clear();
    w.settle(60_000);
    assert_eq!(w.phase(), "Running");
}

#[test]
fn the_node_cannot_prepare_the_pod() {
    for (reason, message, shown, remedy) in [
        ("ContainerCreating", "secret \"web-data\" not found", "FailedMount", "create the Secret"),
        ("ContainerCreating", "references non-existent secret key: userdata", "FailedMount", "with the key"),
        ("CreateContainerError", "write /run/x: no space left on device", "CreateContainerError", "make room"),
        ("CreateContainerConfigError", "configmap \"c\" not found", "CreateContainerConfigError", "ConfigMap"),
    ] {
        let w = stuck(vm("Always"), waiting(reason, message));
        cause(&w, shown, &[message], remedy, true);
        told(&w, "kubelet of n1", message);
    }
    let w = stuck(vm("Always"), waiting("ContainerCreating", ""));
    assert_eq!(explain(&w).waits[0].kind, WaitKind::Progress, "which takes as long as it takes");
}

#[test]
fn the_launcher_crashes_before_the_guest_runs_again_and_again() {
    let mut w = World::with(vm("Always"));
    w.kubelet = false;
    for n in 1..=2_u64 {
        for _ in 0..100 {
            if w.get(Kind::Pod).is_some() && w.get(Kind::VirtualMachineInstance).is_some() {
                break;
            }
            w.settle(1_000);
        }
        w.edit(
            Kind::Pod,
            json!({"spec": {"nodeName": "n1"}, "status": {"phase": "Failed", "containerStatuses": [
                {"name": "compute", "state": {"terminated": {"exitCode": 2, "reason": "Error"}}}]}}),
        );
        w.kubelet = true;
        w.settle(3_000);
        w.kubelet = false;
        cause(&w, "CrashLoopBackOff", &["LauncherFailed", "exit code 2"], "remove the cause", true);
        let e = explain(&w);
        let count = if n == 1 { "after one that failed".into() } else { format!("after {n} that failed in a row") };
        assert!(e.waits[0].waits_for.contains(&count) && e.waits[0].until.is_some(), "{:?}", e.waits);
        assert_eq!(w.printable(), "CrashLoopBackOff");
        w.restart();
        w.settle(100);
        cause(&w, "CrashLoopBackOff", &["LauncherFailed", "exit code 2"], "remove the cause", true);
    }
    told(&w, "kubelet of n1", "saw the launcher end (Error, exit code 2)");
}

#[test]
fn the_guest_or_its_hypervisor_ends_badly() {
    for (how, message, who, words) in [
        (Cause::Panicked, "", "the guest", "panicked"),
        (Cause::Crashed, "signal 11", "agent of n1", "saw the hypervisor crash: signal 11"),
        (Cause::KilledAfterGrace, "", "agent of n1", "did not shut down in time"),
    ] {
        let mut w = running("Once");
        let pod = pod_of(&w);
        w.end_with(&pod, how, message);
        w.settle(10_000);
        assert_eq!(w.phase(), "Failed");
        cause(&w, "GuestNotRunning", &[how.name(), message], "kubectl delete vmi web", false);
        let said = format!("Stopped: {}", explain(&w).waits[0].message);
        assert!(w.said.iter().any(|s| s.ends_with(&said)), "{said}: {:#?}", w.said);
        told(&w, who, words);
        // What is known of it outlives the controller.
        w.restart();
        w.settle(5_000);
        cause(&w, "GuestNotRunning", &[how.name(), message], "kubectl delete vmi web", false);
    }
    // A launcher that was killed tells nothing, and that is what is said.
    let mut w = running("Once");
    w.edit(
        Kind::Pod,
        json!({"status": {"phase": "Failed", "containerStatuses": [
            {"name": "compute", "state": {"terminated": {"exitCode": 137, "reason": "Error"}}}]}}),
    );
    w.settle(10_000);
    cause(&w, "GuestNotRunning", &["OutcomeUnknown", "exit code 137"], "kubectl delete vmi web", false);
    // One that powered itself off is no problem, and nobody pressed a button while its hypervisor went down.
    let mut w = running("Once");
    let pod = pod_of(&w);
    w.say(&pod, |l| l.state = Some(DomainState::ShuttingDown));
    w.settle(1_000);
    w.end_with(&pod, Cause::GuestShutdown, "the guest powered itself off");
    w.settle(10_000);
    told(&w, "the guest", "powered itself off");
    cause(&w, "GuestNotRunning", &["the guest powered itself off"], "kubectl delete vmi web", false);
    assert!(!lines(&explain(&w)).iter().any(|l| l.contains("power button")), "{:#?}", lines(&explain(&w)));
    assert_eq!(explain(&w).waits[0].kind, WaitKind::Person);
}

#[test]
fn a_damaged_image_keeps_the_guest_from_starting() {
    let mut w = running("Once");
    let pod = pod_of(&w);
    w.end_with(&pod, Cause::StartFailed, "disk root: the qcow2 image is damaged or truncated");
    w.settle(10_000);
    cause(&w, "GuestNotRunning", &["StartFailed", "qcow2 image is damaged"], "kubectl delete vmi web", false);
    told(&w, "agent of n1", "could not start the guest: disk root: the qcow2 image is damaged");
}

#[test]
fn a_stop_that_the_guest_ignores_ends_in_a_kill() {
    let mut w = running("Always");
    w.guest_obeys = false;
    w.edit(
        Kind::VirtualMachine,
        json!({"spec": {"runStrategy": "Halted"}, "metadata": {"generation": 2,
               "annotations": {"virtfold.io/changed-by": "alice"}}}),
    );
    w.settle(30_000);
    told(&w, "user alice", "changed the run strategy from Always to Halted");
    told(&w, "the controller", "deleted the instance, to stop it");
    told(&w, "agent of n1", "killed the guest, which did not shut down in time");
    assert!(w.said.iter().any(|s| s.contains("KilledAfterGrace")), "{:#?}", w.said);
    // And now it is off, because somebody wanted that.
    let e = explain(&w);
    assert_eq!((e.waits[0].kind, e.waits[0].waits_for.as_str()), (WaitKind::Person, "somebody to start it"));
    assert!(e.waits[0].message.contains("Halted") && e.waits[0].unblock.contains("virtfold start web"));
}

#[test]
fn the_node_is_gone_or_its_agent_is_silent() {
    let fact = |w: &mut World, ready, since: Option<Timestamp>| {
        let session = since.is_none().then_some(w.session);
        let fact = NodeFact { node: "n1".into(), ready, session, silent_since: since, fenced: None, gone: false };
        w.feed(Input::Configured(Fact::Node(fact)));
    };
    let mut w = running("Always");
    fact(&mut w, false, None);
    w.settle(5_000);
    cause(&w, "NodeUnreachable", &["node n1 is not ready"], "nothing is started elsewhere", true);
    assert_eq!(w.printable(), "Unknown");
    fact(&mut w, true, None);
    w.settle(5_000);
    told(&w, "agent of n1", "answers again");

    let mut w = running("Always");
    w.agent_up = false;
    let since = Timestamp(w.now);
    fact(&mut w, true, Some(since));
    w.settle(65_000);
    cause(&w, "NodeUnreachable", &["the agent of node n1 does not answer"], "out-of-service", true);

    // Whoever taints a node out-of-service has its pods removed; its agent says nothing before it is back.
    let mut w = running("Always");
    w.agent_up = false;
    let since = Some(Timestamp(w.now));
    fact(&mut w, false, since);
    let lost = NodeFact {
        node: "n1".into(),
        ready: false,
        session: None,
        silent_since: since,
        fenced: Some(crate::ResourceVersion(7)),
        gone: false,
    };
    w.feed(Input::Configured(Fact::Node(lost)));
    w.edit(Kind::Pod, json!({"metadata": {"deletionTimestamp": "1970-01-01T00:00:30Z"}}));
    w.settle(5_000);
    told(&w, "the API server", "deleted the launcher pod, because node n1 is tainted out-of-service");
    let all = lines(&explain(&w));
    assert!(
        !all.iter().any(|l| l.contains("answers again") || l.starts_with("a user deleted the launcher")),
        "{all:#?}"
    );

    // One that never came: the guest is not started.
    let mut w = World::with(vm("Always"));
    w.agent_up = false;
    w.settle(5_000);
    assert_eq!((w.phase().as_str(), explain(&w).waits[0].reason.as_str()), ("Scheduled", "AgentNotConnected"));
    w.settle(65_000);
    cause(&w, "NodeUnreachable", &["the agent of node n1 does not answer"], "its agent is back", true);
}

#[test]
fn the_processors_are_stopped() {
    for (why, kind, remedy) in
        [("PausedByUser", WaitKind::Person, "virtfold unpause web"), ("PausedIOError", WaitKind::Problem, "room")]
    {
        let mut w = running("Always");
        let pod = pod_of(&w);
        w.say(&pod, |l| {
            l.state = Some(DomainState::Paused);
            l.paused_reason = why.into();
        });
        w.settle(5_000);
        cause(&w, why, &["VMI was paused"], remedy, kind == WaitKind::Problem);
        assert_eq!(explain(&w).waits[0].kind, kind);
        assert_eq!(w.printable(), "Paused");
    }
}

#[test]
fn the_name_belongs_to_another_instance() {
    let mut w = World::default();
    let mut other = bare();
    other["metadata"]["ownerReferences"] =
        json!([{"apiVersion": "v1", "kind": "Other", "name": "o", "uid": "o", "controller": true}]);
    w.put(Kind::VirtualMachineInstance, other);
    w.put(Kind::VirtualMachine, vm("Always"));
    w.settle(10_000);
    cause(&w, "FailedCreate", &["ns/web exists that this VirtualMachine does not own"], "delete or rename", true);
}

#[test]
fn a_deletion_waits_for_a_finalizer_of_somebody_else() {
    let mut m = vm("Always");
    m["metadata"]["finalizers"] = json!([api::names::FINALIZER_VM, "example.com/hold"]);
    let mut w = World::with(m);
    w.settle(10_000);
    w.edit(Kind::VirtualMachine, json!({"metadata": {"deletionTimestamp": "1970-01-01T00:00:11Z"}}));
    w.settle(60_000);
    cause(&w, "WaitingForFinalizers", &["example.com/hold"], "example.com/hold", true);
    w.edit(Kind::VirtualMachine, json!({"metadata": {"finalizers": null}}));
    w.settle(5_000);
    assert_eq!(explain(&w).summary, "web does not exist any more.");
}

#[test]
fn a_changed_spec_waits_for_a_restart() {
    let mut w = running("Always");
    let memory = json!({"template": {"spec": {"domain": {"memory": {"guest": "128Mi"}}}}});
    w.edit(
        Kind::VirtualMachine,
        json!({"metadata": {"generation": 2, "annotations": {"virtfold.io/changed-by": "alice"}}, "spec": memory}),
    );
    w.settle(10_000);
    cause(&w, "", &["spec.template.spec.domain.memory"], "virtfold restart web", false);
    told(&w, "user alice", "changed its spec (generation 2)");
}

#[test]
fn requests_name_who_made_them() {
    let mut w = World::with(vm("Manual"));
    w.settle(2_000);
    let start = json!([{"action": "Start", "data": {"virtfold.io/requested-by": "bob"}}]);
    w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": start}}));
    w.settle(10_000);
    told(&w, "user bob", "asked for a start");
    assert_eq!(w.phase(), "Running");
}

#[test]
fn what_others_say_of_pod_and_claims_is_evidence() {
    let said = |kind: &str, name: &str, message: &str, last| Warning {
        kind: kind.into(),
        name: name.into(),
        reason: "Failed".into(),
        message: message.into(),
        last: Timestamp(last),
    };
    let w = stuck(vm("Always"), waiting("ContainerCreating", ""));
    let mut e = explain(&w);
    let pod = w.get(Kind::Pod).unwrap()["metadata"]["name"].as_str().unwrap();
    assert_eq!(e.asks, [("Pod", pod.to_owned())]);
    e.hear(vec![said("Pod", pod, "older", 1), said("Pod", pod, "MountVolume.SetUp failed: secret \"s\" not found", 2)]);
    assert_eq!(e.waits[0].kind, WaitKind::Problem);
    assert!(e.waits[0].unblock.contains("create the Secret") && e.waits[0].evidence[0].contains("MountVolume"));
    assert!(e.summary.contains("secret \"s\" not found") && !e.summary.contains("older"), "{}", e.summary);
    // A guest whose probe fails is no problem of the node, but people want to know what the probe said.
    let mut w = running("Always");
    w.kubelet = false;
    let unready = json!([{"type": "Ready", "status": "False", "reason": "ContainersNotReady", "message": "[compute]"}]);
    w.edit(Kind::Pod, json!({"status": {"conditions": unready}}));
    w.settle(5_000);
    let mut e = explain(&w);
    assert_eq!((e.waits[0].reason.as_str(), e.asks.len()), ("ContainersNotReady", 1));
    let pod = e.asks[0].1.clone();
    e.hear(vec![said("Pod", &pod, "Readiness probe failed: no file", 1)]);
    assert_eq!((e.waits[0].kind, e.waits[0].evidence.len()), (WaitKind::Progress, 1));
    assert!(e.summary.contains("Readiness probe failed: no file"), "{}", e.summary);
}

#[test]
fn secrets_are_in_no_words() {
    // What the API server quotes of an invalid object never gets here: the executor names fields alone. What a projection
    // holds is no secret; that user data is in none is held to where projections are made.
    let mut m = vm("Always");
    m["spec"]["template"]["spec"]["volumes"] =
        json!([{"name": "c", "cloudInitNoCloud": {"userData": "#!/bin/sh\necho hunter2"}}]);
    let mut w = World::with(m);
    w.settle(10_000);
    assert!(!serde_json::to_string(&explain(&w)).unwrap().contains("hunter2"));
}

#[test]
fn a_set_says_what_it_waits_for() {
    use crate::set::{Input as In, Set, Sight};
    let raw = |spec: Value| {
        let mut o = json!({"metadata": {"name": "web", "namespace": "ns", "uid": "s", "resourceVersion": "5"},
            "spec": {"replicas": 2, "selector": {"matchLabels": {"a": "b"}},
                "template": {"metadata": {"labels": {"a": "b"}}, "spec": {}}}});
        crate::vm::model::merge(&mut o, &json!({"spec": spec}));
        o
    };
    let member = |name: &str, ready: bool| {
        let status = if ready { "True" } else { "False" };
        json!({"metadata": {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "6", "labels": {"a": "b"},
                "ownerReferences": [{"uid": "s", "controller": true, "kind": "K", "name": "web"}]},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": status}]}})
    };
    let explained = |set: &Value, members: &[Value]| {
        let mut cell = Set::new(Key::new("ns", "web"));
        let read = |kind, o: &Value| Sight::read(kind, o).unwrap();
        let mut at = |input| drop(cell.step(&Event::new(Timestamp(1000), input)));
        at(In::Observed(read(Kind::VirtualMachineInstanceReplicaSet, set)));
        at(In::Listed(vec![]));
        for m in members {
            at(In::Observed(read(Kind::VirtualMachineInstance, m)));
        }
        super::groups::set(&cell, Timestamp(2000))
    };
    let e = explained(&raw(json!({})), &[member("x", true), member("y", true)]);
    assert_eq!((e.summary.as_str(), e.status.as_str()), ("web is 2 of 2 ready, as it should be.", "2 of 2 ready"));
    let e = explained(&raw(json!({})), &[member("x", false)]);
    let said: Vec<_> = e.waits.iter().map(|w| (w.waits_for.as_str(), w.message.as_str(), w.unblock.as_str())).collect();
    assert_eq!(
        said,
        [
            ("1 instances to be made", "1 of 2 are there", "comes by itself"),
            ("1 instances to be ready", "not ready: x", "'virtfold explain vmi/x' says why"),
        ]
    );
    let e = explained(&raw(json!({"paused": true})), &[]);
    assert_eq!((e.waits[0].kind, e.waits[0].condition.as_str()), (WaitKind::Person, "ReplicaPaused"));
    let e = explained(&raw(json!({"selector": {"matchLabels": {"a": "c"}}})), &[]);
    assert_eq!((e.waits[0].kind, e.waits[0].reason.as_str()), (WaitKind::Problem, "InvalidSpec"));
    assert!(e.summary.contains("selector does not match labels of the template"), "{}", e.summary);
}

#[test]
fn a_node_says_what_it_waits_for() {
    use crate::{
        node::{Input as In, Node},
        observe::{Meta, NodeView},
    };
    let view = |ready, tainted| NodeView {
        meta: Meta { uid: "n".into(), rv: crate::ResourceVersion(7), name: "n1".into(), ..Meta::default() },
        ready: Some(ready),
        out_of_service: tainted,
        schedulable: Some(true),
        agent_address: None,
    };
    let explained = |inputs: Vec<In>, now: u64| {
        let mut cell = Node::new("n1".into());
        for input in inputs {
            cell.step(&Event::new(Timestamp(1000), input));
        }
        let e = super::groups::node(&cell, Timestamp(now));
        let waits: Vec<_> = e.waits.iter().map(|w| (w.kind, w.waits_for.clone())).collect();
        (e.status, waits)
    };
    let seen = |ready, tainted, live| In::Observed { node: view(ready, tainted), live };
    let agent = "its agent to connect".to_owned();
    assert_eq!(explained(vec![seen(true, false, false), In::Session(Some(1))], 2000), ("Ready".into(), vec![]));
    let silent = |ready| vec![seen(ready, false, false)];
    assert_eq!(explained(silent(true), 2000), ("Ready".into(), vec![(WaitKind::Progress, agent.clone())]));
    assert_eq!(explained(silent(true), 90_000), ("Ready".into(), vec![(WaitKind::Problem, agent.clone())]));
    let both = vec![(WaitKind::Problem, "the node to be ready".into()), (WaitKind::Problem, agent.clone())];
    assert_eq!(explained(silent(false), 90_000), ("NotReady".into(), both));
    let taint = "somebody to take the out-of-service taint off".to_owned();
    let fenced = explained(vec![seen(false, true, true)], 2000);
    assert_eq!(fenced, ("Fenced".into(), vec![(WaitKind::Person, taint), (WaitKind::Progress, agent)]));
    let gone = explained(vec![seen(true, false, false), In::Gone("n".into())], 2000);
    assert_eq!((gone.0.as_str(), gone.1.len()), ("Gone", 1));
}
