//! What holds for all histories, not for chosen ones.

use super::{machines::legal_phases, strategies::STRATEGIES, *};
use crate::{
    observe::Phase,
    vm::{model::Dice, printable::rules},
};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::LazyLock;

static LEGAL: LazyLock<BTreeSet<(Phase, Phase)>> = LazyLock::new(legal_phases);

/// What users and guests do to a machine.
#[derive(Debug, Clone)]
enum Deed {
    Strategy(usize),
    Request(&'static str),
    Template(u8),
    DeleteInstance,
    GuestEnds(Cause),
    KubeletAway(bool),
    /// Nothing, while the world goes on.
    Time(usize),
}

fn deeds() -> impl proptest::strategy::Strategy<Value = Vec<Deed>> {
    let deed = prop_oneof![
        (0..STRATEGIES.len()).prop_map(Deed::Strategy),
        prop_oneof![Just("start"), Just("paused"), Just("stop"), Just("restart")].prop_map(Deed::Request),
        (0..3_u8).prop_map(Deed::Template),
        Just(Deed::DeleteInstance),
        prop_oneof![Just(Cause::GuestShutdown), Just(Cause::Crashed), Just(Cause::Panicked)].prop_map(Deed::GuestEnds),
        any::<bool>().prop_map(Deed::KubeletAway),
        (0..60_usize).prop_map(Deed::Time),
    ];
    prop::collection::vec(deed, 0..14)
}

fn carry_out(w: &mut World, deed: &Deed, d: &mut Dice, crashes: bool) {
    let there = w.get(Kind::VirtualMachineInstance).cloned();
    match deed {
        Deed::Strategy(n) => w.edit_spec(json!({"runStrategy": STRATEGIES[*n]})),
        Deed::Request(what) => {
            let stop = there.map(|v| json!({"action": "Stop", "uid": v["metadata"]["uid"]}));
            let requests = match (*what, stop) {
                ("stop", Some(stop)) => json!([stop]),
                ("restart", Some(stop)) => json!([stop, {"action": "Start"}]),
                ("paused", _) => json!([{"action": "Start", "data": {"paused": "true"}}]),
                _ => json!([{"action": "Start"}]),
            };
            w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": requests}}));
        }
        Deed::Template(n) => w.edit_spec(json!({"template": {"spec": {"hostname": format!("h{n}")}}})),
        Deed::DeleteInstance => {
            if there.is_some_and(|v| v["metadata"].get("deletionTimestamp").is_none()) {
                let gone = json!({"metadata": {"deletionTimestamp": "1970-01-01T00:10:00Z"}});
                w.edit(Kind::VirtualMachineInstance, gone);
            }
        }
        Deed::GuestEnds(cause) => {
            if let Some(pod) =
                w.launchers.iter().find(|(_, l)| l.starts > 0 && l.outcome.is_none()).map(|(p, _)| p.clone())
            {
                w.end(&pod, *cause);
            }
        }
        Deed::KubeletAway(away) => w.kubelet = !away,
        Deed::Time(n) => {
            for _ in 0..*n {
                w.chaos(d, crashes);
            }
        }
    }
}

/// What users and guests do to an instance that no machine made.
fn bare_deeds() -> impl proptest::strategy::Strategy<Value = Vec<Deed>> {
    let deed = prop_oneof![
        1 => Just(Deed::DeleteInstance),
        2 => prop_oneof![Just(Cause::GuestShutdown), Just(Cause::Crashed), Just(Cause::KilledAfterGrace)].prop_map(Deed::GuestEnds),
        2 => any::<bool>().prop_map(Deed::KubeletAway),
        6 => (0..60_usize).prop_map(Deed::Time),
    ];
    prop::collection::vec(deed, 0..8)
}

/// The objects without what time and counting put into them.
fn essence(w: &World) -> Vec<Value> {
    fn strip(v: &mut Value) {
        match v {
            Value::Object(m) => {
                for k in ["resourceVersion", "lastTransitionTime", "phaseTransitionTimestamp", "generation"] {
                    m.remove(k);
                }
                m.values_mut().for_each(strip);
            }
            Value::Array(a) => a.iter_mut().for_each(strip),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
    let kinds = [Kind::VirtualMachine, Kind::VirtualMachineInstance, Kind::Pod];
    let mut all: Vec<_> = w.objects.iter().filter(|((k, _), _)| kinds.contains(k)).map(|(_, o)| o.clone()).collect();
    all.iter_mut().for_each(strip);
    all
}

/// What there is at rest, and what there is after a controller started anew and was told of the objects in any order.
fn around_a_new_start(w: &mut World, d: &mut Dice) -> (Vec<Value>, Vec<Value>) {
    let before = essence(w);
    let mut order: Vec<_> = w.objects.clone().into_iter().collect();
    for i in (1..order.len()).rev() {
        let j = d.roll(i + 1);
        order.swap(i, j);
    }
    w.restart_with(order);
    w.settle(60_000);
    (before, essence(w))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    /// No illegal transition, terminal phases absorb, planning twice without news plans nothing, and in the end the machine is
    /// where its strategy wants it.
    #[test]
    fn whatever_is_done_to_a_machine(first in 0..STRATEGIES.len(), all in deeds(), seed in any::<u64>(), crashes in any::<bool>()) {
        let mut w = World::with(vm(STRATEGIES[first]));
        w.plan_twice = true;
        let mut d = Dice(seed | 1);
        for deed in &all {
            carry_out(&mut w, deed, &mut d, crashes);
            carry_out(&mut w, &Deed::Time(8), &mut d, crashes);
        }
        w.kubelet = true;
        // Longer than the longest pause after failed starts.
        w.settle(400_000);
        for step in &w.moves {
            prop_assert!(LEGAL.contains(step), "{step:?}");
        }
        let words: BTreeSet<_> = rules().map(|(word, _)| word).collect();
        prop_assert!(words.contains(w.printable().as_str()), "{}", w.printable());
        let v = vmobj(&w);
        let queue = v["status"]["stateChangeRequests"].clone();
        let (strategy, phase) = (v["spec"]["runStrategy"].as_str().unwrap_or(""), w.phase());
        // A Once machine is not to be stopped by a request, so that one stays as long as what it names.
        let kept = strategy == "Once" && queue[0]["action"] == "Stop";
        prop_assert!(queue.is_null() || queue == json!([]) || kept, "{queue} under {strategy} in {phase}");
        match strategy {
            "Always" => prop_assert_eq!(&phase, "Running", "{:?}", w.writes),
            "Halted" => prop_assert_eq!(&phase, "", "{:?}", w.writes),
            _ => prop_assert!(!["", "Pending", "Scheduling", "Scheduled"].contains(&phase.as_str()) || phase.is_empty(), "{phase}"),
        }
        let shown = w.printable();
        let fits = match phase.as_str() {
            "Running" => shown == "Running" || shown == "Paused",
            _ => shown == "Stopped" || shown == "CrashLoopBackOff",
        };
        prop_assert!(fits, "{shown} in {phase}");
        w.check();
        let (before, after) = around_a_new_start(&mut w, &mut d);
        prop_assert_eq!(before, after);
    }

    /// The same for an instance that no machine made: it runs until it ends or somebody deletes it, stays as it ended, and leaves
    /// nothing behind.
    #[test]
    fn whatever_is_done_to_a_bare_instance(all in bare_deeds(), seed in any::<u64>(), crashes in any::<bool>()) {
        let mut w = World::with_bare();
        w.plan_twice = true;
        let mut d = Dice(seed | 1);
        let mut ended = None;
        for deed in &all {
            carry_out(&mut w, deed, &mut d, crashes);
            carry_out(&mut w, &Deed::Time(8), &mut d, crashes);
            let phase = w.phase();
            if let Some(before) = ended.as_ref().filter(|_| !phase.is_empty()) {
                prop_assert_eq!(&phase, before, "an end is an end");
            }
            if Phase::parse(&phase).is_final() {
                ended = Some(phase);
            }
        }
        w.kubelet = true;
        w.settle(400_000);
        for step in &w.moves {
            prop_assert!(LEGAL.contains(step), "{step:?}");
        }
        let deleted = all.iter().any(|deed| matches!(deed, Deed::DeleteInstance));
        match (deleted, ended) {
            (true, _) => prop_assert!(w.objects.is_empty() && w.cell.is_empty(), "{:?}: {:?}", w.objects.keys(), w.writes),
            (false, Some(end)) => prop_assert_eq!(w.phase(), end),
            (false, None) => prop_assert!(["Running", "Succeeded", "Failed"].contains(&w.phase().as_str()), "{}", w.phase()),
        }
        w.check();
        let (before, after) = around_a_new_start(&mut w, &mut d);
        prop_assert_eq!(before, after);
    }
}
