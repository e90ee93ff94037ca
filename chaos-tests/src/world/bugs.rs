//! Known bugs: failures that control planes of this kind really had, put into ours one at a time. Which check finds each, and after
//! how many seeds, is in RUNS.md, as `virtfold-chaos bugs` prints it.
//!
//! A bug is a [`Mutant`]: the mechanism that keeps it away is broken. What is told of here is where it was seen.

use super::{
    World,
    api::{Said, Then, Verb},
    driver::{CellId, cell_of},
    mutants::Mutant,
    run::{self, Options},
    server::{Res, Seen},
};
use embedded::semantics::{Status, write::Part};
use serde_json::json;
use state::object::{Kind, ObjectRef};
use std::{collections::BTreeMap, rc::Rc};

/// A failure that somebody had.
#[derive(Debug, Clone, Copy)]
pub struct Bug {
    /// What is broken.
    pub mutant: Mutant,
    /// What people saw.
    pub story: &'static str,
    /// Where it was seen; threads on GitHub, or a seed of our own.
    pub seen: &'static str,
}

const fn bug(mutant: Mutant, story: &'static str, seen: &'static str) -> Bug {
    Bug { mutant, story, seen }
}

/// All of them.
pub const KNOWN: &[Bug] = &[
    bug(
        Mutant::LauncherAfterTombstone,
        "a second launcher, because a new list lacked what was still there",
        "kubevirt/kubevirt#18475",
    ),
    bug(
        Mutant::DeposedActs,
        "two lead after a hand-over: who lost the Lease goes on",
        "kubernetes/kubernetes#23731, cilium/cilium#42920",
    ),
    bug(
        Mutant::DeposedWritesStatus,
        "status is written by a deposed leader, over what its successor wrote",
        "cilium/cilium#42920",
    ),
    bug(
        Mutant::LevelsOnce,
        "stuck in Scheduled, though the guest runs: it was said once, and that was not heard",
        "kubevirt/kubevirt#2672, #3886",
    ),
    bug(
        Mutant::AbsenceIgnored,
        "a deletion that never ends: the pod went while nobody watched",
        "kubevirt/kubevirt#4359, #18177",
    ),
    bug(Mutant::DeletionsUnheard, "an instance is Running for ever, and its pod is gone", "kubevirt/kubevirt#6685"),
    bug(
        Mutant::FinalizersKept,
        "an instance cannot be deleted: the write that lets it go never works",
        "kubevirt/kubevirt#2138, #4280",
    ),
    bug(
        Mutant::StopOnlyDeletes,
        "a stop is followed by a start",
        "kubevirt/user-guide#226 (why there are run strategies)",
    ),
    bug(Mutant::PodsOfTheMachine, "launchers are left behind", "kubevirt/kubevirt#876"),
    bug(
        Mutant::CreatesFromTheCache,
        "made from an old view: what was stopped is started",
        "instaclustr/cassandra-operator#404 (Sieve)",
    ),
    bug(
        Mutant::ConfirmsFromTheCache,
        "destroyed by an old view",
        "instaclustr/cassandra-operator#402, #407, pravega/zookeeper-operator#314 (Sieve)",
    ),
    bug(
        Mutant::DeletesByName,
        "deleted by name: the next one of that name is hit",
        "k8ssandra/cass-operator#118 (Sieve)",
    ),
    bug(
        Mutant::RandomMemberName,
        "own creations are not seen, and one too many is made",
        "kubernetes/kubernetes#129795",
    ),
    bug(
        Mutant::SurveyFromTheCache,
        "a set that is made smaller deletes what it should keep",
        "kubernetes/kubernetes#138818, pravega/zookeeper-operator#314 (Sieve)",
    ),
    bug(
        Mutant::ReleasedEarly,
        "an instance is let go while its guest runs, and the next one meets it",
        "kubevirt/kubevirt#18857",
    ),
    bug(
        Mutant::SilenceIsFence,
        "silence is taken for death: a second instance runs beside the first",
        "kubevirt/kubevirt#3595",
    ),
    bug(Mutant::WatchFromNow, "what happened between two watches is never heard", "kubernetes/kubernetes#141529"),
    bug(Mutant::FailuresForgotten, "no back-off: a guest that cannot start is started again and again", "own"),
    bug(Mutant::AgentIsBoot, "another agent process is taken for another boot of its node", "own seed 3825"),
    bug(Mutant::LeaseFromAnswer, "a Lease is counted from its answer", "own seed 1253"),
    bug(
        Mutant::OwnWritesUnshown,
        "what a controller wrote itself is known to its set only when the watch tells",
        "own seed 434",
    ),
];

/// After how many seeds a bug is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The check that finds it most often, of those that fail first.
    pub check: &'static str,
    /// Seeds in which that one fails, in order.
    pub seeds: Vec<u64>,
    /// Seeds in which any check fails.
    pub any: u64,
    /// Seeds that were tried.
    pub tried: u64,
}

impl Found {
    /// How many seeds it takes: the median over all places where one may begin.
    pub fn median(&self) -> Option<u64> {
        let last = *self.seeds.last()?;
        let mut waits: Vec<u64> =
            (0..=last).filter_map(|from| Some(self.seeds.iter().find(|s| **s >= from)? - from + 1)).collect();
        waits.sort_unstable();
        waits.get(waits.len() / 2).copied()
    }
}

/// Looks for a bug in the first so many seeds.
pub fn look(bug: &Bug, seeds: u64) -> Found {
    let options = Options { mutant: Some(bug.mutant), ..Options::default() };
    let violated: Vec<(u64, Vec<&'static str>)> = (0..seeds)
        .map(|seed| (seed, run::seed(seed, &options).violations.iter().map(|v| v.check).collect()))
        .filter(|(_, checks): &(u64, Vec<_>)| !checks.is_empty())
        .collect();
    let mut first: BTreeMap<&'static str, u64> = BTreeMap::new();
    for check in violated.iter().filter_map(|(_, checks)| checks.first()) {
        *first.entry(check).or_default() += 1;
    }
    let check = first.into_iter().max_by_key(|(_, n)| *n).map_or("-", |(check, _)| check);
    Found {
        check,
        seeds: violated.iter().filter(|(_, checks)| checks.contains(&check)).map(|(seed, _)| *seed).collect(),
        any: violated.len() as u64,
        tried: seeds,
    }
}

impl World {
    /// A cache whose deletions come from lists forgets what it knew, with the cell that knew it.
    pub(super) fn forgets(&mut self, c: usize, gone: &Rc<Seen>) -> bool {
        let forgets = self.is(Mutant::LauncherAfterTombstone) && matches!(gone.res, Res::Vmi | Res::Pod);
        if forgets && let Some(d) = self.driver(c) {
            let key = cell_of(gone);
            d.vms.remove(&key);
            d.disarm(&CellId::Vm(key));
        }
        forgets
    }

    /// What a mutant answers instead of the API server.
    pub(super) fn bend_confirm(&self, c: usize, target: &ObjectRef) -> Option<Said> {
        let cached = self.cached(c, target);
        match target.kind {
            Kind::VirtualMachineInstanceReplicaSet if self.is(Mutant::SetsFromTheCache) => cached.map(Said::Object),
            Kind::VirtualMachine | Kind::VirtualMachineInstance | Kind::Pod
                if self.is(Mutant::ConfirmsFromTheCache) =>
            {
                let none = || Said::Status(Status::not_found("", target.kind.name(), &target.name));
                Some(cached.map_or_else(none, Said::Object))
            }
            _ => None,
        }
    }

    /// What a mutant does beside a deletion.
    pub(super) fn bend_deletion(&mut self, c: usize, cell: &CellId, target: &ObjectRef) {
        let CellId::Vm(key) = cell else { return };
        if self.is(Mutant::ReleasedEarly) && target.kind == Kind::Pod {
            let body = json!({"metadata": {"finalizers": []}});
            let nobody = Then::Settle(cell.clone(), state::object::CommandId(u64::MAX), true);
            self.write(c, "a mutant's", Verb::merge(Res::Vmi, &key.namespace, &key.name, Part::Main, body), nobody);
        }
    }

    /// Which life of a node's agent it is, as if that were a boot.
    pub(super) fn life_of(&self, n: usize) -> String {
        format!("life-{}", self.nodes.get(n).map_or(0, |x| x.agent_inc))
    }
}
