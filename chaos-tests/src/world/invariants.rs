//! What must hold, one function each, named after the catalogue's ids; judged by what really happened.

use super::{World, ghost::Ghost, server::Res, users::NS};
use state::{agent::vmi::Stage, observe::Phase};
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
    ("S15", check_s15),
    ("S17", check_s17),
    ("S23", check_s23),
];

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

/// S17: no guest is stopped by the death of a component other than its own launcher.
pub fn check_s17(w: &Ghost) -> Result<(), String> {
    none(&w.killed)
}

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
    let quiet = q.now.saturating_sub(q.ghost.last_write);
    if quiet < 60_000 {
        return Err(format!("something was written {quiet} ms ago"));
    }
    let idle = q.now.saturating_sub(q.ghost.last_call);
    if idle < 60_000 {
        return Err(format!("nothing changes, and the API server was asked {idle} ms ago"));
    }
    for name in q.names {
        machine_is_right(q.ghost, name).map_err(|e| format!("machine {name}: {e}"))?;
    }
    for set in q.ghost.all(Res::Set) {
        q.ghost.set_is_right(set).map_err(|e| format!("set {}: {e}", set.name()))?;
    }
    let vmis: BTreeSet<&str> = q.ghost.all(Res::Vmi).map(|v| v.uid()).collect();
    for pod in q.ghost.all(Res::Pod) {
        let owner = pod.owner().map_or("", |(_, _, u)| u);
        if !vmis.contains(owner) {
            return Err(format!("pod {} is left behind", pod.name()));
        }
        if pod.deleting() {
            return Err(format!("pod {} is being deleted for ever", pod.name()));
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
    for (vmi, all) in &q.ghost.executing {
        if !vmis.contains(vmi.as_str()) {
            return Err(format!("instance {vmi} is gone and runs: {all:?}"));
        }
    }
    Ok(())
}

impl World {
    /// [`check_l1`], and that no agent keeps what is over.
    pub(super) fn check_quiet(&self) -> Result<(), String> {
        let leader = self.leader();
        check_l1(&Quiet { ghost: &self.ghost, now: self.now, names: &self.names, led: leader.is_some() })
            .map_err(|e| format!("{e}; {:?}", leader.map(|l| self.waits(l)).unwrap_or_default()))?;
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
