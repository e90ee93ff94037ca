//! Tables of what happens when, and properties.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use super::model::{World, set};
use crate::{
    Event, Machine, Timestamp, Uid,
    object::{Kind, Refusal, Settled},
    set::{Input, Sight, member_name},
    vm::{Command, model::Dice},
};
use serde_json::{Value, json};

const VMI: Kind = Kind::VirtualMachineInstance;

fn running(replicas: u32) -> World {
    let mut w = World::new(set(replicas));
    w.settle(10_000);
    assert_eq!(w.alive().len(), replicas as usize, "{:?}", w.writes);
    w
}

fn names(n: usize) -> Vec<String> {
    let mut all: Vec<_> = (0..n).map(|i| member_name("web", &Uid::from("set-1"), i)).collect();
    all.sort();
    all
}

#[test]
fn replicas_are_made_under_derived_names_and_shown() {
    let w = running(3);
    assert_eq!(w.alive(), names(3));
    let s = w.the_set();
    assert_eq!(s["status"]["replicas"], 3);
    assert_eq!(s["status"]["readyReplicas"], 3);
    assert_eq!(s["status"]["labelSelector"], "app=web");
    assert_eq!(w.refused, 0);
    assert_eq!(w.notes, ["SuccessfulCreate"; 3]);
    assert!(w.cell.waits().is_empty(), "{:?}", w.cell.waits());
}

#[test]
fn without_a_number_there_is_one_and_the_templates_name_is_the_base() {
    for (name, base) in [(json!({}), "web"), (json!({"name": "a"}), "a"), (json!({"generateName": "g-"}), "g-")] {
        let mut o = set(1);
        o["spec"].as_object_mut().unwrap().remove("replicas");
        crate::vm::model::merge(&mut o["spec"]["template"]["metadata"], &name);
        let mut w = World::new(o);
        w.settle(5_000);
        assert_eq!(w.alive(), [member_name(base, &Uid::from("set-1"), 0)]);
    }
}

#[test]
fn creations_grow_with_success_up_to_the_burst_and_shrink_with_failure() {
    let mut w = World::new(set(300));
    w.cell.window = super::BURST - 10;
    w.settle(60_000);
    assert_eq!(w.alive().len(), 300);
    assert_eq!(w.burst, super::BURST);
    // One is tried at first, and one again after a refusal.
    let mut w = World::new(set(100));
    let quota = Refusal { code: 403, reason: "Forbidden".into(), message: "exceeded quota".into() };
    w.refuse = Some(quota);
    w.settle(60_000);
    assert_eq!(w.burst, 1);
    assert_eq!(w.condition("ReplicaFailure").as_deref(), Some("FailedCreate"));
    assert_eq!(w.notes, ["FailedCreate"], "once, however often it is tried");
    assert_eq!(w.the_set()["status"]["replicas"], 0);
    w.refuse = None;
    w.settle(60_000);
    assert_eq!(w.alive().len(), 100);
    assert_eq!(w.condition("ReplicaFailure"), None);
}

#[test]
fn failing_creations_back_off() {
    let mut w = World::new(set(1));
    w.refuse = Some(Refusal { code: 403, reason: "Forbidden".into(), message: "no".into() });
    let mut times = vec![];
    let end = w.now + 100_000;
    while w.now < end {
        if let Some(i) = w.flying.iter().position(|c| matches!(c, Command::Create { .. })) {
            times.push(w.now);
            let c = w.flying.remove(i);
            let (id, result) = w.carry_out(c).unwrap();
            w.feed(Input::Settled { id, result });
        } else if !w.flying.is_empty() {
            let c = w.flying.remove(0);
            let (id, result) = w.carry_out(c).unwrap();
            w.feed(Input::Settled { id, result });
        } else if !w.sights.is_empty() {
            let s = w.sights.remove(0);
            w.feed(Input::Observed(s));
        } else if let Some(t) = w.wake.take() {
            w.now = w.now.max(t);
            w.feed(Input::Elapsed);
        } else {
            break;
        }
    }
    let pauses: Vec<u64> = times.windows(2).map(|p| p[1] - p[0]).take(7).collect();
    assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 16000, 30000]);
}

#[test]
fn of_too_many_the_ones_that_are_missed_least_go_first() {
    // RE-36: no node, then not running, then not ready, then the newest.
    let ready = |s: &str| json!([{"type": "Ready", "status": s}]);
    let own = json!([{"uid": "set-1", "controller": true, "kind": "VirtualMachineInstanceReplicaSet", "name": "web"}]);
    let table = [
        ("old", "Running", Some("n1"), "True", "1970-01-01T00:00:01Z"),
        ("new", "Running", Some("n1"), "True", "1970-01-01T00:00:09Z"),
        ("unready", "Running", Some("n1"), "False", "1970-01-01T00:00:01Z"),
        ("starting", "Scheduled", Some("n1"), "False", "1970-01-01T00:00:01Z"),
        ("unplaced", "Scheduling", None, "False", "1970-01-01T00:00:01Z"),
    ];
    let order = ["unplaced", "starting", "unready", "new", "old"];
    for left in (0..=table.len()).rev() {
        let mut w = World::new(set(left as u32));
        w.nodes = false;
        for (name, phase, node, ready_is, created) in table {
            w.vmi(
                name,
                json!({"metadata": {"ownerReferences": own, "creationTimestamp": created},
                    "status": {"phase": phase, "nodeName": node, "conditions": ready(ready_is)}}),
            );
        }
        w.settle(10_000);
        let mut want = order[order.len() - left..].to_vec();
        want.sort_unstable();
        assert_eq!(w.alive(), want, "{left} left");
        let deleted: Vec<_> = w.writes.iter().filter(|x| x.starts_with("delete")).collect();
        assert_eq!(deleted.len(), table.len() - left);
    }
}

#[test]
fn scaling_follows_the_number_and_says_so() {
    let mut w = running(3);
    w.notes.clear();
    w.edit_set(json!({"spec": {"replicas": 1}}));
    w.settle(10_000);
    assert_eq!((w.alive().len(), w.vmis().len()), (1, 1));
    assert_eq!(w.notes, ["SuccessfulDelete"; 2]);
    w.edit_set(json!({"spec": {"replicas": 0}}));
    w.settle(10_000);
    assert_eq!((w.vmis().len(), w.the_set()["status"]["replicas"].clone()), (0, json!(0)));
    w.edit_set(json!({"spec": {"replicas": 2}}));
    w.settle(10_000);
    assert_eq!(w.alive(), names(2), "numbers are used again");
    assert_eq!(w.refused, 0);
}

#[test]
fn instances_that_end_are_deleted_and_replaced() {
    for phase in ["Succeeded", "Failed"] {
        let mut w = running(2);
        let uid = |w: &World, name: &str| w.objects[&(VMI, name.to_owned())]["metadata"]["uid"].clone();
        let name = w.alive()[0].clone();
        let old = uid(&w, &name);
        w.end(&name, phase);
        w.settle(10_000);
        assert_eq!(w.alive().len(), 2, "{phase}: {:?}", w.writes);
        assert!(w.vmis().iter().all(|v| v["metadata"]["uid"] != old), "{phase}");
        assert_eq!(w.refused, 0);
    }
}

#[test]
fn an_instance_whose_pod_was_deleted_is_replaced_too() {
    let mut w = running(1);
    let name = w.alive()[0].clone();
    let old = w.objects[&(VMI, name.clone())]["metadata"]["uid"].clone();
    let terminating = json!([{"type": "Ready", "status": "False", "reason": "PodTerminating"}]);
    w.edit(VMI, &name, json!({"status": {"conditions": terminating}}));
    w.settle(10_000);
    assert_eq!(w.alive().len(), 1);
    assert!(w.vmis().iter().all(|v| v["metadata"]["uid"] != old));
}

#[test]
fn silence_starts_no_replacement() {
    let mut w = running(2);
    let n = w.writes.len();
    let name = w.alive()[0].clone();
    w.silence(&name);
    w.settle(3_600_000);
    assert_eq!(w.writes[n..], ["status web"], "{:?}", w.writes);
    let s = w.the_set();
    assert_eq!((&s["status"]["replicas"], &s["status"]["readyReplicas"]), (&json!(2), &json!(1)));
    // With a fact (the Vm cell says Failed) it is replaced at once.
    w.end(&name, "Failed");
    w.settle(10_000);
    assert_eq!(w.alive().len(), 2);
}

#[test]
fn instances_that_never_run_are_not_made_one_after_another() {
    let mut w = World::new(set(2));
    w.nodes = false;
    let mut made = 0;
    let end = w.now + 600_000;
    while w.now < end {
        w.settle(1000);
        for name in w.alive() {
            made += 1;
            w.end(&name, "Failed");
        }
    }
    assert!((4..20).contains(&made), "{made} instances in ten minutes");
    assert_eq!(w.condition("ReplicaFailure").as_deref(), Some("CrashLoopBackOff"));
    assert!(w.cell.waits().iter().any(|x| x.reason == "CrashLoopBackOff"), "{:?}", w.cell.waits());
    w.nodes = true;
    w.settle(600_000);
    assert_eq!(w.alive().len(), 2);
    assert_eq!(w.condition("ReplicaFailure"), None);
}

#[test]
fn paused_means_left_alone() {
    let mut w = running(2);
    let n = w.writes.len();
    w.notes.clear();
    w.edit_set(json!({"spec": {"paused": true, "replicas": 5}}));
    w.settle(5_000);
    assert_eq!(w.condition("ReplicaPaused").as_deref(), Some("Paused"));
    let name = w.alive()[0].clone();
    w.end(&name, "Failed");
    w.settle(5_000);
    assert!(w.writes[n..].iter().all(|x| x == "status web"), "{:?}", w.writes);
    assert_eq!(w.notes, ["SuccessfulPaused"]);
    assert_eq!(w.the_set()["status"]["replicas"], 1);
    w.edit_set(json!({"spec": {"paused": false}}));
    w.settle(10_000);
    assert_eq!(w.alive().len(), 5);
    assert_eq!(w.condition("ReplicaPaused"), None);
    assert!(w.notes.contains(&"SuccessfulResumed".to_owned()));
}

#[test]
fn strangers_that_match_are_adopted_and_members_that_do_not_are_released() {
    let owner = |uid: &str| json!({"metadata": {"ownerReferences": [{"uid": uid, "controller": true, "kind": "X", "name": "x"}]}});
    let mut w = World::new(set(3));
    w.vmi(
        "orphan",
        json!({"metadata": {"ownerReferences": [{"uid": "u", "kind": "X", "name": "x", "apiVersion": "v1"}]}}),
    );
    w.vmi("other", json!({"metadata": {"labels": {"app": "db"}}}));
    w.vmi("foreign", owner("somebody"));
    w.vmi("over", json!({"status": {"phase": "Succeeded"}}));
    w.vmi("going", json!({"metadata": {"deletionTimestamp": "1970-01-01T00:00:00Z"}}));
    w.settle(10_000);
    let alive = w.alive();
    assert_eq!(alive.len(), 2, "and the orphan, which has another owner, too: {alive:?}");
    let orphan = w.objects[&(VMI, "orphan".to_owned())].clone();
    let owners = orphan["metadata"]["ownerReferences"].as_array().unwrap();
    assert_eq!(owners.iter().map(|o| o["uid"].as_str().unwrap()).collect::<Vec<_>>(), ["u", "set-1"]);
    assert_eq!(owners[1]["controller"], true);
    for left in ["other", "foreign", "over"] {
        let o = &w.objects[&(VMI, left.to_owned())];
        assert_ne!(o["metadata"]["ownerReferences"][0]["uid"], "set-1", "{left}");
    }
    assert!(w.writes.iter().any(|x| x == "adopt orphan"));

    // Another label: it is let go and replaced.
    w.edit(VMI, "orphan", json!({"metadata": {"labels": {"app": "db"}}}));
    w.settle(10_000);
    let orphan = &w.objects[&(VMI, "orphan".to_owned())];
    assert_eq!(orphan["metadata"]["ownerReferences"].as_array().unwrap().len(), 1);
    assert_eq!(w.alive().len(), 3);
    assert!(w.writes.iter().any(|x| x == "release orphan"));
    assert_eq!(w.refused, 0);
}

#[test]
fn adoption_and_destruction_need_a_live_read_of_the_set() {
    // The cell knows an old version from a stale cache: three are wanted, the truth is one, or that the set is going.
    for truth in [
        json!({"spec": {"replicas": 3}}),
        json!({"metadata": {"deletionTimestamp": "1970-01-01T00:00:00Z", "finalizers": ["foregroundDeletion"]}}),
    ] {
        let mut w = running(3);
        w.edit_set(json!({"spec": {"replicas": 1}}));
        let stale = w.sights.pop().unwrap();
        w.vmi("orphan", json!({}));
        w.edit_set(truth.clone());
        w.sights.clear();
        let n = w.writes.len();
        // A controller that has just started sees the old version first.
        w.cell = super::Set::new(crate::Key::new("ns", "web"));
        w.choice = None;
        w.feed(Input::Observed(stale));
        w.settle(10_000);
        let wrong: Vec<_> = w.writes[n..].iter().filter(|x| x.starts_with("delete") && !x.contains("orphan")).collect();
        let expected = usize::from(truth["spec"]["replicas"] == 3);
        // With the orphan adopted there are four where three are wanted.
        assert!(wrong.len() <= expected, "{truth}: {:?}", &w.writes[n..]);
        let adopted = w.writes[n..].iter().any(|x| x.starts_with("adopt"));
        assert_eq!(adopted, expected == 1, "{truth}: {:?}", &w.writes[n..]);
    }
}

#[test]
fn a_set_that_leaves_its_instances_behind_does_not_take_them_back() {
    let mut w = running(2);
    // Read live and not changed since, as far as anybody was told.
    w.edit_set(json!({"metadata": {"labels": {"read": "live"}}}));
    w.settle(10_000);
    let n = w.writes.len();
    // Deleted and gone; its instances are let go, which is heard of first.
    for name in &w.alive() {
        w.edit(VMI, name, json!({"metadata": {"ownerReferences": null}}));
    }
    let released = std::mem::take(&mut w.sights);
    w.edit_set(json!({"metadata": {"deletionTimestamp": "1970-01-01T00:00:00Z", "finalizers": ["orphan"]}}));
    w.sights.clear();
    for sight in released {
        w.feed(Input::Observed(sight));
    }
    w.settle(10_000);
    let adopted = w.writes[n..].iter().filter(|x| x.starts_with("adopt")).count();
    assert_eq!(adopted, 0, "{:?}", &w.writes[n..]);
}

#[test]
fn what_has_a_derived_name_and_belongs_to_somebody_else_is_gone_round() {
    let mut w = World::new(set(2));
    let name = member_name("web", &Uid::from("set-1"), 0);
    w.vmi(&name, json!({"metadata": {"labels": {"app": "db"}}}));
    w.settle(10_000);
    let alive = w.alive();
    assert_eq!(alive.len(), 2);
    assert!(!alive.contains(&name));
    assert_eq!(w.refused, 1, "it is tried once");
    w.edit_set(json!({"spec": {"replicas": 3}}));
    w.settle(10_000);
    assert_eq!((w.alive().len(), w.refused), (3, 1));
}

#[test]
fn nothing_is_written_when_nothing_changes() {
    let mut w = running(3);
    let n = w.writes.len();
    w.restart();
    w.settle(3_600_000);
    assert_eq!(w.writes[n..], [] as [&str; 0], "after a restart of the controller too");
    assert_eq!(w.refused, 0);
}

#[test]
fn a_set_that_makes_no_sense_is_told_so_and_does_nothing() {
    let bad = [
        json!({"spec": {"selector": {"matchLabels": {"app": "other"}}}}),
        json!({"spec": {"selector": {"matchLabels": null}}}),
        json!({"spec": {"selector": {"matchExpressions": [{"key": "a", "operator": "Is"}]}}}),
        json!({"spec": {"replicas": -1}}),
        json!({"spec": {"template": {"metadata": null}}}),
    ];
    for patch in bad {
        let mut w = running(1);
        let n = w.writes.len();
        w.edit_set(patch.clone());
        w.settle(10_000);
        assert_eq!(w.condition("ReplicaFailure").as_deref(), Some("InvalidSpec"), "{patch}");
        assert!(w.writes[n..].iter().all(|x| x == "status web"), "{patch}: {:?}", &w.writes[n..]);
        assert_eq!(w.vmis().len(), 1, "{patch}");
    }
}

#[test]
fn a_set_that_is_deleted_makes_nothing_and_deletes_nothing() {
    let mut w = running(2);
    let n = w.writes.len();
    w.edit_set(
        json!({"metadata": {"deletionTimestamp": "1970-01-01T00:00:00Z", "finalizers": ["foregroundDeletion"]}}),
    );
    // The collector deletes its instances.
    for v in w.vmis() {
        let name = v["metadata"]["name"].as_str().unwrap().to_owned();
        w.edit(VMI, &name, json!({"metadata": {"deletionTimestamp": "1970-01-01T00:00:00Z"}}));
    }
    w.settle(10_000);
    assert!(w.writes[n..].iter().all(|x| x == "status web"), "{:?}", &w.writes[n..]);
    assert_eq!(w.vmis().len(), 0);
    w.edit_set(json!({"metadata": {"finalizers": []}}));
    w.settle(10_000);
    assert!(w.cell.is_empty());
    // Another one of that name is another one.
    let mut again = set(1);
    again["metadata"]["uid"] = json!("set-2");
    w.put(Kind::VirtualMachineInstanceReplicaSet, again);
    w.settle(10_000);
    assert_eq!(w.vmis().len(), 1);
    assert_eq!(w.vmis()[0]["metadata"]["ownerReferences"][0]["uid"], "set-2");
}

#[test]
fn a_selector_that_changes_is_listed_anew_before_anything_is_made() {
    let mut w = running(2);
    for v in w.vmis() {
        let name = v["metadata"]["name"].as_str().unwrap().to_owned();
        w.edit(VMI, &name, json!({"metadata": {"labels": {"tier": "x"}}}));
    }
    w.settle(10_000);
    let n = w.writes.len();
    w.edit_set(json!({"spec": {"selector": {"matchLabels": {"app": null, "tier": "x"}},
        "template": {"metadata": {"labels": {"tier": "x"}}}}}));
    w.settle(10_000);
    assert_eq!(w.alive(), names(2));
    assert!(w.writes[n..].iter().all(|x| x == "status web"), "{:?}", &w.writes[n..]);
}

#[test]
fn whatever_is_lost_doubled_or_dies_there_are_as_many_as_asked_for() {
    for seed in 0..200_u64 {
        let mut d = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut w = World::new(set(3));
        let mut most = 3;
        for i in 0..400 {
            w.chaos(&mut d, true);
            if i % 100 == 99 {
                let replicas = d.roll(6);
                most = most.max(replicas);
                w.edit_set(json!({"spec": {"replicas": replicas}}));
            }
            // Also when a creation arrives that a controller sent that is dead.
            assert!(w.alive().len() <= most, "seed {seed}, {i}: {:?}", w.writes);
        }
        let wanted = w.the_set()["spec"]["replicas"].as_u64().unwrap();
        w.settle(900_000);
        assert_eq!(w.alive().len() as u64, wanted, "seed {seed}: {:?}", w.writes);
        assert_eq!(w.vmis().len() as u64, wanted, "seed {seed}");
        assert_eq!(w.the_set()["status"]["replicas"], wanted, "seed {seed}");
        // Looking again without news plans nothing.
        let out = w.cell.step(&Event::new(Timestamp(w.now), Input::Elapsed));
        let acts = out.iter().filter(|c| !matches!(c, Command::Wake { .. })).count();
        assert_eq!(acts, 0, "seed {seed}: {out:?}");
    }
}

#[test]
fn without_crashes_and_lost_answers_there_are_never_too_many() {
    for seed in 0..100_u64 {
        let mut d = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut w = World::new(set(4));
        for _ in 0..300 {
            w.chaos(&mut d, false);
            assert!(w.alive().len() <= 4, "seed {seed}: {:?}", w.writes);
        }
    }
}

#[test]
fn any_order_of_the_same_sights_ends_in_the_same_plan() {
    let w = running(3);
    let sights: Vec<Sight> = w.objects.iter().map(|((kind, _), o)| Sight::read(*kind, o).unwrap()).collect();
    let mut orders: Vec<Vec<usize>> = vec![vec![]];
    for i in 0..sights.len() {
        orders =
            orders.into_iter().flat_map(|o| (0..=o.len()).map(move |at| [&o[..at], &[i], &o[at..]].concat())).collect();
    }
    assert_eq!(orders.len(), 24);
    for order in orders {
        let mut cell = super::Set::new(crate::Key::new("ns", "web"));
        let mut out = vec![];
        for i in &order {
            out.extend(cell.step(&Event::new(Timestamp(1000), Input::Observed(sights[*i].clone()))));
        }
        let members = sights.iter().filter_map(|s| match s {
            Sight::Member(m) => Some((**m).clone()),
            Sight::Set(_) | Sight::All { .. } | Sight::Gone(_) | Sight::Vanished(_) => None,
        });
        out.extend(cell.step(&Event::new(Timestamp(1000), Input::Listed(members.collect()))));
        assert_eq!(out, [], "{order:?}");
        assert!(cell.waits().is_empty(), "{order:?}: {:?}", cell.waits());
    }
}

#[test]
fn an_outcome_of_another_life_is_only_a_sight() {
    let mut w = running(1);
    let settled = Settled::Applied(Sight::read(VMI, &w.vmis()[0]));
    let out = w
        .cell
        .step(&Event::new(Timestamp(w.now), Input::Settled { id: crate::object::CommandId(4711), result: settled }));
    assert_eq!(out, []);
    let written: Value = serde_json::to_value(&w.cell).unwrap();
    let read: super::Set = serde_json::from_value(written.clone()).unwrap();
    assert_eq!(serde_json::to_value(&read).unwrap(), written, "the cell can be written down whole");
}

#[test]
fn a_stranger_that_is_about_to_be_taken_on_counts() {
    let mut w = World::new(set(2));
    w.vmi(
        "x",
        json!({"status": {"phase": "Running", "nodeName": "n1", "conditions": [{"type": "Ready", "status": "True"}]}}),
    );
    w.settle(60_000);
    let count = |what: &str| w.writes.iter().filter(|x| x.starts_with(what)).count();
    assert_eq!((count("adopt"), count("create"), count("delete")), (1, 1, 0), "{:?}", w.writes);
    assert_eq!(w.alive().len(), 2);
}

#[test]
fn an_answer_that_is_older_than_an_instance_does_not_bury_it() {
    let mut w = running(1);
    let (_, o) = w.objects.iter().find(|((k, _), _)| *k == VMI).map(|(k, o)| (k.clone(), o.clone())).unwrap();
    let seen = |uid: &str, rv: &str| {
        let mut o = o.clone();
        o["metadata"]["uid"] = json!(uid);
        o["metadata"]["resourceVersion"] = json!(rv);
        Sight::read(VMI, &o).unwrap()
    };
    let uid = Uid::from(o["metadata"]["uid"].as_str().unwrap());
    let at = Timestamp(w.now + 1);
    let step = |w: &mut World, input: Input| w.cell.step(&Event::new(at, input));
    let gone = Sight::read(VMI, &o).map(|_| w.cell.member_ref(o["metadata"]["name"].as_str().unwrap())).unwrap();
    let asked = step(&mut w, Input::Observed(Sight::Vanished(gone)));
    let [Command::Confirm { id, .. }, ..] = &asked[..] else { panic!("{asked:?}") };
    // It is made again before the answer, which is about the one before, arrives.
    step(&mut w, Input::Observed(seen("younger", "9999")));
    let again = step(&mut w, Input::Settled { id: *id, result: Settled::Gone });
    assert!(matches!(&again[..], [Command::Confirm { .. }, ..]), "it is asked again: {again:?}");
    let [Command::Confirm { id, .. }, ..] = &again[..] else { panic!("{again:?}") };
    let out = step(&mut w, Input::Settled { id: *id, result: Settled::Applied(Some(seen("younger", "9999"))) });
    assert!(!out.iter().any(|c| matches!(c, Command::Confirm { .. })), "{out:?}");
    assert!(w.cell.gone.contains(&uid) && !w.cell.gone.contains(&Uid::from("younger")));
}

/// A cell of a controller that has just begun, which knows of these instances.
fn beginner(w: &mut World, knows: &[&str]) {
    w.cell = super::Set::new(crate::Key::new("ns", "web"));
    w.choice = w.cell.choice();
    w.sights.clear();
    let set = Sight::read(Kind::VirtualMachineInstanceReplicaSet, w.the_set()).unwrap();
    let at = Timestamp(w.now);
    w.cell.step(&Event::new(at, Input::Observed(set)));
    w.choice = w.cell.choice();
    let members = w.vmis().into_iter().filter_map(|o| match Sight::read(VMI, &o) {
        Some(Sight::Member(m)) if knows.contains(&m.meta.name.as_str()) => Some(*m),
        _ => None,
    });
    w.feed(Input::Listed(members.collect()));
}

#[test]
fn who_knows_of_too_few_makes_none_too_many() {
    let all = names(3);
    for unknown in 0..3 {
        let mut w = running(3);
        let n = w.writes.len();
        let known: Vec<&str> = all.iter().enumerate().filter(|(i, _)| *i != unknown).map(|(_, s)| s.as_str()).collect();
        beginner(&mut w, &known);
        w.settle(10_000);
        assert_eq!(w.alive(), all);
        assert!(w.writes[n..].iter().all(|x| x == "status web"), "{:?}", &w.writes[n..]);
        assert_eq!(w.refused, 1, "it collides once, and knows then");
    }
}

#[test]
fn an_instance_that_goes_holds_its_place_until_it_is_gone() {
    let mut w = running(2);
    let name = w.alive()[0].clone();
    w.nodes = false;
    let n = w.writes.len();
    w.edit(VMI, &name, json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z"}}));
    // Nothing takes its finalizer off.
    let finalizers = w.objects[&(VMI, name.clone())]["metadata"]["finalizers"].clone();
    w.edit(VMI, &name, json!({"metadata": {"finalizers": ["kept"]}}));
    while let Some(s) = (!w.sights.is_empty()).then(|| w.sights.remove(0)) {
        w.feed(Input::Observed(s));
    }
    assert!(w.flying.iter().all(|c| !matches!(c, Command::Create { .. })), "{:?}", w.flying);
    assert!(w.cell.waits().iter().any(|x| x.message.contains(&name)), "{:?}", w.cell.waits());
    w.edit(VMI, &name, json!({"metadata": {"finalizers": finalizers}}));
    w.nodes = true;
    w.settle(10_000);
    assert_eq!(w.alive(), names(2));
    assert_eq!(w.writes[n..].iter().filter(|x| x.starts_with("create")).count(), 1);
}

#[test]
fn what_ended_unheard_is_not_made_up_for_by_one_that_runs() {
    let mut w = running(3);
    // Two have ended, and the watch did not tell. The set shall have two.
    for name in &w.alive()[..2] {
        w.end(&name.clone(), "Failed");
    }
    let runs = w.alive();
    let uid = w.objects[&(VMI, runs[0].clone())]["metadata"]["uid"].clone();
    w.edit_set(json!({"spec": {"replicas": 2}}));
    let told = w.sights.pop().unwrap();
    w.sights.clear();
    w.feed(Input::Observed(told));
    w.settle(10_000);
    assert_eq!(w.alive().len(), 2, "{:?}", w.writes);
    assert_eq!(w.objects[&(VMI, runs[0].clone())]["metadata"]["uid"], uid, "the one that ran still runs");
}

#[test]
fn one_look_is_enough_for_many_that_go() {
    let mut w = running(40);
    w.cell.window = super::BURST;
    let n = w.calls;
    w.edit_set(json!({"spec": {"replicas": 2}}));
    w.settle(10_000);
    assert_eq!(w.vmis().len(), 2);
    // The set and its instances are looked at, 38 are deleted, the status is written.
    assert!(w.calls - n <= 38 + 4, "{} calls", w.calls - n);
}

#[test]
fn a_conflict_where_nobody_was_faster_is_not_tried_again_at_once() {
    let adopted = |w: &mut World| w.vmi("orphan", json!({}));
    let deleted = |w: &mut World| w.edit_set(json!({"spec": {"replicas": 0}}));
    let made = |w: &mut World| w.edit_set(json!({"spec": {"replicas": 2}}));
    for deed in [&adopted as &dyn Fn(&mut World), &deleted, &made] {
        let mut w = running(1);
        w.contest = true;
        deed(&mut w);
        let n = w.calls;
        w.settle(60_000);
        assert!((2..60).contains(&(w.calls - n)), "{} calls in a minute", w.calls - n);
        w.contest = false;
        w.settle(120_000);
        assert_eq!(w.alive().len() as u64, w.the_set()["spec"]["replicas"].as_u64().unwrap(), "{:?}", w.writes);
    }
}

#[test]
fn a_question_about_a_set_that_is_over_does_not_block_the_next_one() {
    let mut w = running(1);
    let set = |w: &World| Sight::read(Kind::VirtualMachineInstanceReplicaSet, w.the_set()).unwrap();
    // A list does not have it; another one of its name is seen before the answer comes.
    let gone = crate::object::ObjectRef {
        kind: Kind::VirtualMachineInstanceReplicaSet,
        namespace: "ns".into(),
        name: "web".into(),
        uid: "set-1".into(),
    };
    w.feed(Input::Observed(Sight::Vanished(gone)));
    let asked = w.flying.pop().unwrap();
    assert!(matches!(asked, Command::Confirm { .. }), "{asked:?}");
    let mut other = super::model::set(2);
    other["metadata"]["uid"] = json!("set-2");
    w.put(Kind::VirtualMachineInstanceReplicaSet, other);
    w.sights.clear();
    let now = set(&w);
    w.feed(Input::Observed(now));
    let (id, result) = w.carry_out(asked).unwrap();
    w.feed(Input::Settled { id, result });
    w.settle(10_000);
    let own = w.vmis().into_iter().filter(|v| v["metadata"]["ownerReferences"][0]["uid"] == "set-2");
    assert_eq!(own.count(), 2, "{:?}", w.writes);
}
