//! Ways to be stuck or to fail: the answer names the true cause, and conditions and Events say the same.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use super::{Explanation, Story, WaitKind};
use crate::{
    Key, Timestamp,
    object::Kind,
    vm::model::{World, vm},
};
use serde_json::Value;

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
    // A controller that finds it running has nothing to tell but that it is there.
    let n = e.history.len();
    w.restart();
    w.settle(10_000);
    let e = explain(&w);
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
