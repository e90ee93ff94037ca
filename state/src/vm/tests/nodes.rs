//! What proves that a machine on a node that is gone has stopped, and what does not.

use crate::vm::{
    Fact, Input, NodeFact, Sight,
    model::{World, vm},
};
use crate::{ResourceVersion, Timestamp, domain::Cause, object::Kind, observe};
use serde_json::{Value, json};

const VM: Kind = Kind::VirtualMachine;
const VMI: Kind = Kind::VirtualMachineInstance;

/// A machine that runs on a node of which nothing is heard any more.
fn lost() -> World {
    let mut w = World::with(vm("Always"));
    w.settle(10_000);
    assert_eq!(w.phase(), "Running", "{:?}", w.writes);
    w.agent_up = false;
    w.kubelet = false;
    tell(&mut w, |f| f.ready = false);
    w.settle(5_000);
    w
}

/// The Node cell tells of a node without a session.
fn tell(w: &mut World, change: impl Fn(&mut NodeFact)) {
    let mut fact = NodeFact {
        node: "n1".into(),
        ready: true,
        session: None,
        silent_since: Some(Timestamp(w.now)),
        fenced: None,
        gone: false,
    };
    change(&mut fact);
    w.feed(Input::Configured(Fact::Node(fact)));
}

fn fence(w: &mut World) {
    tell(w, |f| (f.ready, f.fenced) = (false, Some(ResourceVersion(77))));
}

/// Somebody removes the pod's object by force.
fn remove_pod(w: &mut World) {
    let pod = w.get(Kind::Pod).unwrap().clone();
    w.objects.retain(|(kind, _), _| *kind != Kind::Pod);
    w.sights.push(Sight::Gone(observe::object(Kind::Pod, &pod).unwrap().reference()));
}

fn uid(w: &World) -> Value {
    w.get(VMI).map(|v| v["metadata"]["uid"].clone()).unwrap_or_default()
}

fn witness(w: &World, kind: Kind) -> Option<Value> {
    let text = w.get(kind)?["metadata"]["annotations"]["virtfold.io/fenced"].as_str()?;
    serde_json::from_str(text).unwrap()
}

#[test]
fn what_is_no_evidence_starts_nothing_elsewhere() {
    type Happening = fn(&mut World);
    let nothing: [(&str, Happening); 5] = [
        ("a lost session", |w| tell(w, |_| {})),
        ("an old heartbeat", |w| tell(w, |f| f.ready = false)),
        ("the Node object was deleted", |w| tell(w, |f| f.gone = true)),
        ("a 404 from a cache", |w| {
            let pod = w.get(Kind::Pod).unwrap().clone();
            w.feed(Input::Observed(Sight::Vanished(observe::object(Kind::Pod, &pod).unwrap().reference())));
        }),
        ("the pod is being deleted", |w| {
            w.edit(Kind::Pod, json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z"}}));
        }),
    ];
    for (what, happens) in nothing {
        let mut w = lost();
        let before = uid(&w);
        happens(&mut w);
        w.settle(24 * 3_600_000);
        assert_eq!((w.phase().as_str(), w.printable().as_str()), ("Running", "Unknown"), "{what}");
        assert_eq!((uid(&w), w.pods_ever.len()), (before, 1), "{what}: {:?}", w.writes);
        assert_eq!(witness(&w, VM), None, "{what}");
        // And a controller that has just started thinks the same.
        w.restart();
        tell(&mut w, |f| f.ready = false);
        w.settle(24 * 3_600_000);
        assert_eq!((w.phase().as_str(), w.pods_ever.len()), ("Running", 1), "{what}");
    }
}

#[test]
fn each_fact_lets_it_run_elsewhere() {
    type Happening = fn(&mut World);
    let facts: [(&str, Happening); 3] = [
        ("compute has terminated", |w| {
            let ended = json!({"terminated": {"exitCode": 1, "reason": "Error", "message": "{\"cause\":\"Crashed\"}"}});
            w.edit(
                Kind::Pod,
                json!({"status": {"phase": "Failed", "containerStatuses": [{"name": "compute", "state": ended}]}}),
            );
        }),
        ("an outcome", |w| {
            let pod = w.launchers.keys().next().unwrap().clone();
            w.end(&pod, Cause::Crashed);
            w.connect();
        }),
        ("the node is fenced", fence),
    ];
    for (what, happens) in facts {
        let mut w = lost();
        let before = uid(&w);
        happens(&mut w);
        w.settle(100);
        assert_eq!(w.phase(), "Failed", "{what}, at once: {:?}", w.writes);
        // The collector of pods, or the kubelet, removes what is left.
        if w.get(Kind::Pod).is_some() {
            remove_pod(&mut w);
        }
        w.kubelet = true;
        w.connect();
        w.settle(60_000);
        assert_eq!(w.phase(), "Running", "{what}: {:?}", w.writes);
        assert_ne!(uid(&w), before, "{what}");
        assert_eq!(w.pods_ever.len(), 2, "{what}");
    }
}

#[test]
fn a_fence_is_recorded_in_the_vm_before_anything_follows_from_it() {
    let mut w = lost();
    let (before, n) = (uid(&w), w.writes.len());
    fence(&mut w);
    w.settle(100);
    let record =
        json!({"vmi": before, "node": "n1", "resourceVersion": "77", "taint": "node.kubernetes.io/out-of-service"});
    assert_eq!(witness(&w, VM), Some(record));
    let first: Vec<_> = w.writes[n..].iter().take(2).collect();
    assert_eq!(first, ["patch VirtualMachine witness", "patch VirtualMachineInstance Failed"]);
    assert_eq!(w.get(VMI).unwrap()["status"]["reason"], "NodeFenced");
    // It is still there when the next one runs.
    remove_pod(&mut w);
    w.kubelet = true;
    w.connect();
    w.settle(60_000);
    assert_eq!(w.phase(), "Running");
    assert_eq!(witness(&w, VM).unwrap()["vmi"], before);
    // Its trace leads to the life that the fence has ended.
    let causes: Vec<_> = w.cell.take_steps().into_iter().filter_map(|s| s.cause).collect();
    let causes: Vec<_> = causes.iter().map(|c| (c.relation, c.instance.as_str())).collect();
    assert_eq!(causes, [(crate::trace::Relation::Failure, before.as_str().unwrap())]);
}

#[test]
fn a_controller_that_dies_between_the_record_and_its_consequence_goes_on() {
    for steps in 0..12 {
        let mut w = lost();
        fence(&mut w);
        for _ in 0..steps {
            w.settle_one();
        }
        w.restart();
        fence(&mut w);
        w.settle(100);
        assert!(witness(&w, VM).is_some(), "{steps}");
        remove_pod(&mut w);
        w.kubelet = true;
        w.connect();
        w.settle(60_000);
        assert_eq!((w.phase().as_str(), w.pods_ever.len()), ("Running", 2), "{steps}: {:?}", w.writes);
    }
}

#[test]
fn a_fence_that_was_lifted_in_time_ends_nothing() {
    let mut w = lost();
    fence(&mut w);
    // The record was not written yet, and the node is back with its guest.
    w.flying.clear();
    w.restart();
    w.kubelet = true;
    w.connect();
    w.settle(60_000);
    assert_eq!((w.phase().as_str(), w.pods_ever.len()), ("Running", 1));
    assert_eq!(witness(&w, VM), None);
}

#[test]
fn a_bare_instance_keeps_the_proof_itself() {
    let mut w = World::default();
    w.put(VMI, json!({"metadata": {"name": "web", "namespace": "ns", "uid": "bare", "finalizers": [api::names::FINALIZER_VMI],
        "creationTimestamp": "1970-01-01T00:00:00Z"}, "spec": {"domain": {"memory": {"guest": "64Mi"}, "devices": {}}}}));
    w.settle(10_000);
    assert_eq!(w.phase(), "Running", "{:?}", w.writes);
    w.agent_up = false;
    w.kubelet = false;
    fence(&mut w);
    w.settle(100);
    assert_eq!(w.phase(), "Failed");
    assert_eq!(witness(&w, VMI).unwrap()["vmi"], "bare");
}

#[test]
fn who_removes_a_pod_by_force_answers_for_it_and_is_named() {
    for (gone, who) in [(true, "PodGC (node deleted)"), (false, "whoever removed it")] {
        let mut w = lost();
        let before = uid(&w);
        tell(&mut w, |f| (f.ready, f.gone) = (false, gone));
        remove_pod(&mut w);
        w.settle(59_000);
        assert_eq!((w.phase().as_str(), &uid(&w)), ("Running", &before), "its end may still be told");
        w.settle(5_000);
        assert_ne!(uid(&w), before, "{who}: {:?}", w.writes);
        let text = format!("The launcher pod was removed: {who} declared the virtual machine stopped");
        assert!(w.texts.iter().any(|t| t.contains(&text)), "{who}: {:?}", w.texts);
    }
}
