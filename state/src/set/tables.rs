//! The Set machine as tables, made by running it; part of the page about the machines.
#![allow(clippy::unwrap_used)]

use super::model::{World, set};
use crate::vm::model::merge;
use serde_json::{Value, json};
use std::fmt::Write;

/// An instance `x` in a state of its own, which the set controls or not.
fn instance(controller: Option<&str>, label: &str, more: Value) -> Value {
    let owner = controller.map(|uid| json!({"kind": "K", "name": "o", "uid": uid, "controller": true}));
    let owners = owner.map_or(json!([]), |o| json!([o]));
    let mut o = json!({"metadata": {"labels": {"app": label}, "ownerReferences": owners}});
    merge(&mut o, &more);
    o
}

fn state(phase: &str, ready: &str, reason: &str) -> Value {
    json!({"status": {"phase": phase, "nodeName": "n1", "conditions": [{"type": "Ready", "status": ready, "reason": reason}],
        "phaseTransitionTimestamps": if phase == "Scheduling" { json!([]) } else { json!([{"phase": "Running"}]) }}})
}

fn deleting() -> Value {
    json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z"}, "status": {"phase": "Running"}})
}

/// Everything that an instance of the namespace can be to a set.
fn instances() -> Vec<(&'static str, Value)> {
    let own = |more| instance(Some("set-1"), "web", more);
    let stranger = |more| instance(None, "web", more);
    let runs = || state("Running", "True", "");
    vec![
        ("its own, not running yet", own(state("Scheduling", "False", "GuestNotRunning"))),
        ("its own, running", own(runs())),
        ("its own, on a node that is silent", own(state("Running", "False", "NodeUnreachable"))),
        ("its own, whose pod was deleted", own(state("Running", "False", "PodTerminating"))),
        ("its own, `Succeeded`", own(state("Succeeded", "False", ""))),
        ("its own, `Failed`", own(state("Failed", "False", ""))),
        ("its own, being deleted", own(deleting())),
        ("its own, whose labels do not match any more", instance(Some("set-1"), "other", runs())),
        ("nobody's, that matches", stranger(runs())),
        ("nobody's, that matches and has ended", stranger(state("Failed", "False", ""))),
        ("nobody's, that matches and is being deleted", stranger(deleting())),
        ("nobody's, that does not match", instance(None, "other", runs())),
        ("another's, that matches", instance(Some("set-2"), "web", runs())),
    ]
}

/// What a set does: with `x`, and by making others.
fn deeds(set: Value, members: &[(String, Value)]) -> Vec<String> {
    let mut w = World::new(set);
    w.nodes = false;
    for (name, extra) in members {
        w.vmi(name, extra.clone());
    }
    w.settle(60_000);
    let of = |what: &str| match what.split_once(' ') {
        Some(("adopt", _)) => Some("takes it on"),
        Some(("release", _)) => Some("lets it go"),
        Some(("delete", _)) => Some("deletes it"),
        Some(("create", _)) => Some("makes one"),
        Some(_) | None => None,
    };
    w.writes.iter().filter_map(|what| of(what)).map(str::to_owned).collect()
}

/// Sets in which an instance can find itself.
fn sets() -> [(&'static str, Value); 3] {
    let with = |patch| {
        let mut s = set(1);
        merge(&mut s, &patch);
        s
    };
    let going =
        json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z", "finalizers": ["foregroundDeletion"]}});
    [("one is wanted", set(1)), ("paused", with(json!({"spec": {"paused": true}}))), ("being deleted", with(going))]
}

/// Instances in the order in which they are given up.
fn order() -> Vec<String> {
    let own = |more: Value| instance(Some("set-1"), "web", more);
    let at = |mut v: Value, time: &str| {
        v["metadata"]["creationTimestamp"] = json!(time);
        v
    };
    let (old, new) = ("1970-01-01T00:00:00Z", "1970-01-01T00:00:09Z");
    let mut placed_nowhere = own(state("Scheduling", "False", ""));
    placed_nowhere["status"]["nodeName"] = json!("");
    let mut left = vec![
        ("ready, old", at(own(state("Running", "True", "")), old)),
        ("ready, new", at(own(state("Running", "True", "")), new)),
        ("running, not ready", at(own(state("Running", "False", "")), old)),
        ("on a node, not running", at(own(state("Scheduling", "False", "")), old)),
        ("without a node", at(placed_nowhere, old)),
    ];
    let mut order = vec![];
    while !left.is_empty() {
        let mut w = World::new(set(u32::try_from(left.len() - 1).unwrap()));
        w.nodes = false;
        for (i, (_, extra)) in left.iter().enumerate() {
            w.vmi(&format!("x{i}"), extra.clone());
        }
        w.settle(60_000);
        let alive = w.alive();
        let gone = (0..left.len()).find(|i| !alive.contains(&format!("x{i}"))).unwrap();
        assert_eq!(alive.len(), left.len() - 1, "{:?}", w.writes);
        order.push(left.remove(gone).0.to_owned());
    }
    order
}

/// The part of the page.
pub(crate) fn page(out: &mut String) {
    out.push_str("\n## VirtualMachineInstanceReplicaSet: what becomes of an instance\n\nWhat a set of one replica does about an instance of its namespace that is in its view.\n\n| instance |");
    for (head, _) in sets() {
        let _ = write!(out, " {head} |");
    }
    out.push_str("\n|---|---|---|---|\n");
    for (what, extra) in instances() {
        let _ = write!(out, "| {what} |");
        for (_, set) in sets() {
            let done = deeds(set, &[("x".into(), extra.clone())]).join(", ");
            let _ = write!(out, " {} |", if done.is_empty() { "-" } else { &done });
        }
        out.push('\n');
    }
    out.push_str("\n## VirtualMachineInstanceReplicaSet: the number\n\nWhat is done where so many run and so many are wanted.\n\n| there | 0 wanted | 1 wanted | 2 wanted | 3 wanted |\n|---|---|---|---|---|\n");
    for there in 0..4 {
        let _ = write!(out, "| {there} |");
        for wanted in 0..4 {
            let own = instance(Some("set-1"), "web", state("Running", "True", ""));
            let members: Vec<_> = (0..there).map(|i| (format!("x{i}"), own.clone())).collect();
            let done = deeds(set(wanted), &members);
            let all = |what: &str| done.iter().filter(|d| *d == what).count();
            let _ = match (all("makes one"), all("deletes it")) {
                (0, 0) => write!(out, " - |"),
                (n, 0) => write!(out, " makes {n} |"),
                (0, n) => write!(out, " deletes {n} |"),
                both => panic!("{both:?}"),
            };
        }
        out.push('\n');
    }
    let _ = writeln!(out, "\nOf too many these go first: {}.", order().join("; "));
}

#[test]
fn what_is_nobodys_business_is_left_alone() {
    for (what, extra) in instances() {
        let done = deeds(set(1), &[("x".into(), extra.clone())]);
        let foreign = what.starts_with("another's") || what.contains("does not match") && !what.contains("labels");
        assert!(!foreign || done == ["makes one"], "{what}: {done:?}");
        // Silence is no end, and a set that is paused or going makes nothing.
        assert!(!what.contains("silent") || done.is_empty(), "{done:?}");
        for (_, set) in &sets()[1..] {
            let done = deeds(set.clone(), &[("x".into(), extra.clone())]);
            assert!(!done.iter().any(|d| d == "makes one" || d == "deletes it"), "{what}: {done:?}");
        }
    }
}
