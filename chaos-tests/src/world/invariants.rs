//! What must hold, one function each, named after the catalogue's ids; judged by what really happened.

use super::{World, ghost::Ghost, server::Res, users::NS};
use state::{Timestamp, agent::vmi::Stage, observe::Phase};
use std::collections::{BTreeMap, BTreeSet};

/// A check: what is wrong, in words.
pub type Check = fn(&Ghost) -> Result<(), String>;

/// Checks that hold at any time, by their id.
pub const SAFETY: &[(&str, Check)] = &[
    ("S1", check_s1),
    ("S4", check_s4),
    ("S5", check_s5),
    ("S6", check_s6),
    ("S7", check_s7),
    ("S8", check_s8),
    ("S10", check_s10),
    ("S11", check_s11),
    ("S12", check_s12),
    ("S13", check_s13),
    ("S14", check_s14),
    ("S15", check_s15),
    ("S16", check_s16),
    ("S17", check_s17),
    ("S19", check_s19),
    ("S23", check_s23),
    ("S25", check_s25),
    ("S9", check_s9),
    ("Q3", check_q3),
];

/// A check of a world that was left alone.
pub type Rest = fn(&Quiet<'_>) -> Result<(), String>;

/// Checks that hold once faults have stopped and wishes stand still, by their id.
pub const REST: &[(&str, Rest)] = &[
    ("L6", check_l6),
    ("Q2", check_q2),
    ("L2", check_l2),
    ("L3", check_l3),
    ("S22", check_s22),
    ("Q4", check_q4),
    ("L1", check_l1),
];

/// Checks of the catalogue that the model world does not make, and why.
pub const LEFT_OUT: &[(&str, &str)] = &[
    ("S2", "it has no disks; that image locks stay on is tested on real guests"),
    ("S3", "launchers are pods of their own, so that S1, S6 and S12 say it: nothing is kept by name"),
    ("S18", "freezing is a verb that no machine decides; the launcher's tests have its timer"),
    ("S20", "there is no migration yet"),
    ("S21", "networks and volumes are made and undone by the node agent; its tests undo what was never done"),
    ("S24", "it has no admission; the tests of the gateway on a real kube-apiserver have it"),
    ("L4", "calls run side by side without bound here; the executor's pools are tested where they are"),
    ("L5", "L1 and Q2 say it: nothing is written any more; a loop within one instant ends a run"),
    ("Q5", "the journal's size is measured on a real kube-apiserver"),
    ("Q6", "it emits no spans; the tests with a real Jaeger have them"),
];

/// Instance, pod, two of the instance's status and two of the machine's; and a revision.
const START_WRITES: u32 = 7;
/// The Lease, its renewal, and a call that nobody answered.
const LED_WITHIN: u64 = 45_000;

fn none(offences: &[String]) -> Result<(), String> {
    offences.first().map_or(Ok(()), |o| Err(o.clone()))
}

/// S1: at most one executing domain per VMI, over all nodes; and a VMI's domain begins once in its life.
pub fn check_s1(w: &Ghost) -> Result<(), String> {
    let two = w.executing.iter().find(|(_, all)| all.len() > 1);
    if let Some((vmi, all)) = two {
        return Err(format!("instance {vmi} runs {} times: {all:?}", all.len()));
    }
    let again = w.starts.iter().find(|(_, n)| **n > 1);
    again.map_or(Ok(()), |(vmi, n)| Err(format!("instance {vmi} began {n} times")))
}

/// S4: at most one launcher pod per VMI at a time, and one that it ever authorises. (A creation that lands after the VMI is
/// gone makes a pod that nothing can authorise and that garbage collection removes.)
pub fn check_s4(w: &Ghost) -> Result<(), String> {
    let two = |all: &BTreeMap<String, BTreeSet<String>>, what: &str| {
        let two = all.iter().find(|(vmi, pods)| !vmi.is_empty() && pods.len() > 1);
        two.map_or(Ok(()), |(vmi, pods)| Err(format!("instance {vmi} {what} {pods:?}")))
    };
    two(&w.standing, "has pods")?;
    two(&w.authorised, "authorised pods")
}

/// S5: no second instance of a machine runs while the first does, unless somebody declared that one dead.
pub fn check_s5(w: &Ghost) -> Result<(), String> {
    for e in w.executing.values().flatten() {
        let all: Vec<_> =
            w.of_machine(&e.machine).filter(|(_, e)| !w.declared.contains(&e.pod)).map(|(v, _)| v).collect();
        if all.iter().any(|v| *v != all[0]) {
            return Err(format!("machine {} runs as {all:?} at once", e.machine));
        }
    }
    Ok(())
}

/// S6: no instruction is executed twice.
pub fn check_s6(w: &Ghost) -> Result<(), String> {
    let twice = w.begun.iter().find(|(_, n)| **n > 1);
    twice.map_or(Ok(()), |((launcher, id), n)| Err(format!("launcher {launcher} carried out {id} {n} times")))
}

/// S7: epochs grow, one leads at a time, and who was deposed is not obeyed.
pub fn check_s7(w: &Ghost) -> Result<(), String> {
    if let Some(pair) = w.epochs.windows(2).find(|p| p[1] <= p[0]) {
        return Err(format!("epoch {} was acquired after epoch {}", pair[1], pair[0]));
    }
    none(&w.rivals)?;
    none(&w.disobeyed)
}

/// S8: a domain begins only where the VMI says so, at the version that came with the instruction.
pub fn check_s8(w: &Ghost) -> Result<(), String> {
    none(&w.unauthorised)
}

/// S10: what is destroyed is destroyed for a reason that stands; absence from a cache is none.
pub fn check_s10(w: &Ghost) -> Result<(), String> {
    none(&w.unfounded)
}

/// S11: phases move along the declared edges, and what has ended stays ended.
pub fn check_s11(w: &Ghost) -> Result<(), String> {
    for (vmi, phases) in &w.phases {
        if let Some(pair) = phases.windows(2).find(|p| !is_edge(p[0], p[1])) {
            return Err(format!("instance {vmi} went from {:?} to {:?}: {phases:?}", pair[0], pair[1]));
        }
    }
    Ok(())
}

fn is_edge(from: Phase, to: Phase) -> bool {
    match from {
        Phase::Unset => matches!(to, Phase::Pending | Phase::Scheduling | Phase::Scheduled | Phase::Failed),
        Phase::Pending => matches!(to, Phase::Scheduling | Phase::Scheduled | Phase::Failed),
        Phase::Scheduling => matches!(to, Phase::Scheduled | Phase::Failed),
        Phase::Scheduled => matches!(to, Phase::Running | Phase::Succeeded | Phase::Failed),
        Phase::Running => matches!(to, Phase::Succeeded | Phase::Failed),
        Phase::Succeeded | Phase::Failed | Phase::Unknown => false,
    }
}

/// S12: Failed and Succeeded mean: known not to run, or declared so.
pub fn check_s12(w: &Ghost) -> Result<(), String> {
    none(&w.alive)
}

/// S15: a user's stop is never counted as a failure and never followed by a start that nobody asked for.
pub fn check_s15(w: &Ghost) -> Result<(), String> {
    none(&w.overridden)
}

/// S9: what was recorded is taken the same way again.
pub fn check_s9(w: &Ghost) -> Result<(), String> {
    none(&w.unrepeatable)
}

/// S13: nobody writes a field that is another's.
pub fn check_s13(w: &Ghost) -> Result<(), String> {
    none(&w.trespasses)
}

/// S14: generations and the record of phases do not go back. (Epochs are S7's.)
pub fn check_s14(w: &Ghost) -> Result<(), String> {
    none(&w.backwards)
}

/// S16: no controller changes a spec, save in carrying out what somebody asked for.
pub fn check_s16(w: &Ghost) -> Result<(), String> {
    none(&w.respecified)
}

/// S19: no guest is killed before its grace is over.
pub fn check_s19(w: &Ghost) -> Result<(), String> {
    none(&w.hurried)
}

/// S25: what is secret in an object is in no record.
pub fn check_s25(w: &Ghost) -> Result<(), String> {
    none(&w.leaked)
}

/// Q3: no object is asked for again and again.
pub fn check_q3(w: &Ghost) -> Result<(), String> {
    none(&w.pestered)
}

/// Q1: writes of a start without faults (see `run::scenario`): six, and a revision.
pub fn check_q1(w: &Ghost) -> Result<(), String> {
    let all: u32 = w.writes.values().sum();
    if all > START_WRITES || w.conflicts > 0 {
        return Err(format!("a start took {all} writes and {} conflicts: {:?}", w.conflicts, w.writes));
    }
    Ok(())
}

/// S17: no guest is stopped by the death of a component other than its own launcher.
pub fn check_s17(w: &Ghost) -> Result<(), String> {
    none(&w.killed)
}

/// What cells wait for in words and until when, by their key.
pub type Waits = BTreeMap<String, Vec<(String, Option<Timestamp>)>>;

/// A world that was left alone for a while.
pub struct Quiet<'a> {
    /// What really happened.
    pub ghost: &'a Ghost,
    /// Milliseconds.
    pub now: u64,
    /// Machines that somebody asked for.
    pub names: &'a [String],
    /// Somebody leads.
    pub led: bool,
    /// From the end of all faults until somebody led, in milliseconds, where that is known.
    pub led_after: Option<u64>,
    /// What the leader's cells wait for and until when, by machine; none where nobody can be asked.
    pub waits: Option<Waits>,
    /// Objects of which the leader keeps something and which are gone.
    pub kept: Vec<String>,
}

/// S23: a set never makes more instances than it was ever told to have.
pub fn check_s23(w: &Ghost) -> Result<(), String> {
    none(&w.surplus)
}

/// L1: once faults have stopped and wishes stand still, what is there is what was asked for, and nothing moves any more.
pub fn check_l1(q: &Quiet<'_>) -> Result<(), String> {
    if !q.led {
        return Err("nobody leads".into());
    }
    for name in q.names {
        machine_is_right(q.ghost, name).map_err(|e| format!("machine {name}: {e}"))?;
    }
    for set in q.ghost.all(Res::Set) {
        q.ghost.set_is_right(set).map_err(|e| format!("set {}: {e}", set.name()))?;
    }
    let vmis: BTreeSet<&str> = q.ghost.all(Res::Vmi).map(|v| v.uid()).collect();
    for (vmi, all) in &q.ghost.executing {
        if !vmis.contains(vmi.as_str()) {
            return Err(format!("instance {vmi} is gone and runs: {all:?}"));
        }
    }
    Ok(())
}

/// Q2: where nothing changes, nothing is written and nobody is asked.
pub fn check_q2(q: &Quiet<'_>) -> Result<(), String> {
    let quiet = q.now.saturating_sub(q.ghost.last_write);
    if quiet < 60_000 {
        return Err(format!("something was written {quiet} ms ago"));
    }
    let idle = q.now.saturating_sub(q.ghost.last_call);
    if idle < 60_000 {
        return Err(format!("nothing changes, and the API server was asked {idle} ms ago"));
    }
    Ok(())
}

/// L6: who led and is stuck is replaced once its Lease is over.
pub fn check_l6(q: &Quiet<'_>) -> Result<(), String> {
    match q.led_after {
        Some(ms) if ms > LED_WITHIN => Err(format!("nobody led for {ms} ms after the last fault")),
        Some(_) => Ok(()),
        None if q.led => Ok(()),
        None => Err("nobody leads any more".into()),
    }
}

/// L2: a machine that is to run does, or says what it waits for, and no deadline that it waits for has passed unheard.
pub fn check_l2(q: &Quiet<'_>) -> Result<(), String> {
    let Some(waits) = &q.waits else { return Ok(()) };
    for vm in q.ghost.all(Res::Vm).filter(|v| v.text("/spec/runStrategy") == "Always" && !v.deleting()) {
        let key = format!("{NS}/{}", vm.name());
        let runs = q.ghost.find(Res::Vmi, NS, vm.name()).is_some_and(|v| v.text("/status/phase") == "Running");
        let said = waits.get(&key).map(Vec::as_slice).unwrap_or_default();
        if !runs && said.is_empty() {
            return Err(format!("machine {key} does not run, and nobody says why"));
        }
        if let Some(late) = said.iter().find(|(_, until)| until.is_some_and(|t| t.0 + 2000 < q.now)) {
            return Err(format!("machine {key} waits for what should have come: {late:?}"));
        }
    }
    Ok(())
}

/// L3: every deletion comes to its end.
pub fn check_l3(q: &Quiet<'_>) -> Result<(), String> {
    let stuck = q.ghost.present.values().find(|o| o.deleting() && o.res != Res::Node);
    stuck.map_or(Ok(()), |o| Err(format!("{:?} {} is being deleted for ever", o.res, o.name())))
}

/// Q4: what is gone is kept by nobody.
pub fn check_q4(q: &Quiet<'_>) -> Result<(), String> {
    none(&q.kept)
}

/// S22: nothing is left behind by an owner that is gone.
pub fn check_s22(q: &Quiet<'_>) -> Result<(), String> {
    let vmis: BTreeSet<&str> = q.ghost.all(Res::Vmi).map(|v| v.uid()).collect();
    for pod in q.ghost.all(Res::Pod) {
        let owner = pod.owner().map_or("", |(_, _, u)| u);
        if !vmis.contains(owner) {
            return Err(format!("pod {} is left behind", pod.name()));
        }
    }
    for vmi in q.ghost.all(Res::Vmi) {
        if vmi.owner().is_some_and(|(_, _, uid)| !q.ghost.present.contains_key(uid)) {
            return Err(format!("instance {} is left behind", vmi.name()));
        }
    }
    let vms: Vec<&str> = q.ghost.all(Res::Vm).map(|v| v.uid()).collect();
    for revision in q.ghost.all(Res::Revision) {
        // Those of a machine that was deleted with its instance left behind stay, too.
        let owned = !embedded::semantics::value::items(&revision.value, "/metadata/ownerReferences").is_empty();
        if owned && !vms.iter().any(|uid| revision.name().contains(uid)) {
            return Err(format!("revision {} is left behind", revision.name()));
        }
    }
    Ok(())
}

/// All that is wrong with a world that was left alone, by id of the check.
pub fn unrest(q: &Quiet<'_>) -> Vec<(&'static str, String)> {
    REST.iter().filter_map(|(id, check)| check(q).err().map(|text| (*id, text))).collect()
}

impl World {
    /// [`REST`], and that no agent keeps what is over.
    pub(super) fn check_quiet(&self) -> Vec<(&'static str, String)> {
        let leader = self.leader();
        let waits = leader.map(|l| self.waits(l));
        let kept = leader.map(|l| self.kept(l)).unwrap_or_default();
        let quiet = Quiet {
            ghost: &self.ghost,
            now: self.now,
            names: &self.names,
            led: leader.is_some(),
            led_after: self.led_after,
            waits: waits.clone(),
            kept,
        };
        let mut wrong = unrest(&quiet);
        if let Some((_, text)) = wrong.iter_mut().find(|(id, _)| *id == "L1") {
            *text += &format!("; {:?}", waits.unwrap_or_default());
        }
        if let Err(text) = self.check_agents() {
            wrong.push(("L1", text));
        }
        wrong
    }

    fn check_agents(&self) -> Result<(), String> {
        for (n, node) in self.nodes.iter().enumerate() {
            if let Some((pod, _)) = node.disk.records.iter().find(|(_, r)| r.outcome.is_some()) {
                return Err(format!("node {n} keeps an outcome of pod {pod} that nobody acknowledged"));
            }
            if node.agent.as_ref().is_some_and(|a| !a.is_idle()) {
                return Err(format!("the agent of node {n} keeps what is gone"));
            }
        }
        Ok(())
    }
}

fn machine_is_right(ghost: &Ghost, name: &str) -> Result<(), String> {
    let (vm, vmi) = (ghost.find(Res::Vm, NS, name), ghost.find(Res::Vmi, NS, name));
    let key = format!("{NS}/{name}");
    let phase = vmi.as_ref().map(|v| Phase::parse(v.text("/status/phase")));
    let runs: Vec<String> = ghost.of_machine(&key).map(|(v, _)| v.clone()).collect();
    if let Some(v) = &vmi {
        if v.deleting() {
            return Err("its instance is being deleted for ever".into());
        }
        let active = v.facts().is_some_and(|f| f.stage == Stage::Granted);
        match phase {
            Some(Phase::Running) if !runs.iter().any(|r| r == v.uid()) => {
                return Err("its instance is Running and nothing runs".into());
            }
            Some(Phase::Succeeded | Phase::Failed) if !runs.is_empty() => {
                return Err("its instance has ended and runs".into());
            }
            Some(Phase::Running | Phase::Succeeded | Phase::Failed) => {}
            other => return Err(format!("its instance is {other:?} (granted: {active})")),
        }
    }
    let Some(vm) = vm else {
        // An orphaned or bare instance may stay.
        return Ok(());
    };
    if vm.deleting() {
        return Err("it is being deleted for ever".into());
    }
    let printable = vm.text("/status/printableStatus");
    let strategy = vm.text("/spec/runStrategy");
    let stranger = vmi.as_ref().is_some_and(|v| v.owner().is_none_or(|(_, _, uid)| uid != vm.uid()));
    if stranger {
        // An orphan is adopted by a machine that wants one and that it can serve; else the machine says why there is none.
        let alive = phase.is_some_and(|p| !p.is_final());
        return if strategy == "Halted" || !alive { Ok(()) } else { Err("an orphan was not adopted".into()) };
    }
    let requests = vm.value.pointer("/status/stateChangeRequests").is_some();
    if requests {
        return Err(format!("a request is not carried out: {:?}", vm.value.pointer("/status/stateChangeRequests")));
    }
    let failing = vm.value.pointer("/status/startFailure").is_some();
    let ok = match (strategy, phase) {
        ("Always", Some(Phase::Running)) => printable == "Running" && !failing,
        ("Halted", None) => printable == "Stopped",
        ("Manual", None) => printable == "Stopped",
        ("RerunOnFailure", None) => printable == "Stopped" || printable == "CrashLoopBackOff",
        ("Manual" | "RerunOnFailure" | "Once", Some(Phase::Running)) => printable == "Running",
        ("Manual" | "Once", Some(Phase::Succeeded | Phase::Failed)) => {
            printable == "Stopped" || printable == "CrashLoopBackOff"
        }
        _ => false,
    };
    if !ok {
        return Err(format!("{strategy}, its instance is {phase:?}, and it says {printable}"));
    }
    // Nothing of it is left that runs where it is down.
    if phase.is_none() && !runs.is_empty() {
        return Err(format!("it is down and {runs:?} runs"));
    }
    Ok(())
}
