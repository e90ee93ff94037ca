//! Runs of seeds and of plans: trouble for a while, then none, then everything has to be right.

pub use super::exhaustive::*;
use super::{
    Action, BEGIN, Violation, World,
    coverage::Coverage,
    dice::Dice,
    mutants::Mutant,
    plan::Plan,
    swarm::{Fault, Swarm},
    users::{Deed, STRATEGIES},
};
use std::collections::BTreeMap;

/// From the end of all faults until everything has to be right: the longest back-off of a machine, and a generous rest.
const CONVERGE: u64 = 520_000;
/// Longest pause of people between two deeds where there is much to do.
const BUSY: u64 = 1500;
/// Quiet for so long is at rest, where nothing is planned.
const QUIET: u64 = 61_000;
/// How long people and faults are at work, where nobody says how much is done.
const TROUBLE: u64 = 150_000;

/// What became of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
    /// Checks that failed, in order.
    pub violations: Vec<Violation>,
    /// Of everything that happened.
    pub hash: u64,
    /// Steps of the machines.
    pub steps: u64,
    /// Domains that began.
    pub starts: u32,
    /// Phases of each instance.
    pub lives: Vec<String>,
    /// Writes of controllers by verb and kind.
    pub writes: BTreeMap<String, u32>,
    /// Faults that struck.
    pub struck: BTreeMap<Fault, u64>,
    /// The faults that the seed drew.
    pub swarm: Swarm,
    /// Milliseconds from when faults stop until nothing is written any more.
    pub converged: u64,
    /// What was done, where it was done by a seed or a plan.
    pub plan: Plan,
    /// Simulated milliseconds.
    pub elapsed: u64,
    /// What was passed through, where it was asked for.
    pub coverage: Coverage,
    /// The log, where it was asked for.
    pub log: Vec<String>,
}

/// How big a world is, and how much is done in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Nodes.
    pub nodes: usize,
    /// Machines.
    pub machines: u64,
    /// What people do.
    pub deeds: u64,
}

/// How to run a seed.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// A mechanism that is broken.
    pub mutant: Option<Mutant>,
    /// Keep a log.
    pub record: bool,
    /// These faults instead of those that the seed draws.
    pub swarm: Option<Swarm>,
    /// Not more steps of the machines than this, zero for no bound.
    pub steps: u64,
    /// Take every step again from what is recorded of it.
    pub replay: bool,
    /// Note in which state which events come, and what effects there are.
    pub cover: bool,
    /// So big instead of as the seed draws it.
    pub size: Option<Size>,
}

/// Runs a seed: trouble, then none, then everything has to be right.
pub fn seed(seed: u64, options: &Options) -> Outcome {
    let mut dice = Dice::new(seed ^ 0x5eed);
    let drawn = Swarm::draw(&mut dice);
    let swarm = options.swarm.clone().or(options.mutant.and_then(Mutant::swarm)).unwrap_or(drawn);
    let (nodes, machines) = (usize::try_from(dice.between(1, 3)).unwrap_or(1), dice.between(1, 3));
    let (nodes, machines) = options.size.map_or((nodes, machines), |s| (s.nodes, s.machines));
    // One seed in four has a set, drawn apart.
    let mut apart = Dice::new(seed ^ 0x5e75);
    let replicas = apart.below(4);
    let set = apart.chance(250) || options.mutant.is_some_and(Mutant::needs_sets);
    let mut plan = Plan {
        mutant: options.mutant,
        seed,
        nodes,
        controllers: 2,
        machines: (0..machines).map(|i| format!("vm-{i}")).collect(),
        sets: set.then(|| "set-0".into()).into_iter().collect(),
        ..Plan::default()
    };
    let mut w = plan.world(swarm.clone(), options);
    w.say(|| format!("seed {seed}: {nodes} nodes, {machines} machines, faults: {swarm}"));
    let mut at = 3000;
    for name in plan.sets.clone() {
        w.early(at, Action::Deed(Box::new(Deed::CreateSet(name, replicas))));
    }
    for name in plan.machines.clone() {
        let strategy = dice.pick(&STRATEGIES).copied().unwrap_or("Always");
        w.early(at, Action::Deed(Box::new(Deed::Create(name, strategy))));
        at += dice.between(1, 3000);
    }
    w.early(at + 2000, Action::User);
    w.early(at + 1000, Action::Chaos);
    if options.size.is_some() {
        // Many are at it.
        w.unhurried = BUSY;
    }
    let end = options.size.map_or(BEGIN + at + TROUBLE, |_| u64::MAX);
    let done = |w: &World| options.size.is_some_and(|s| w.deeds >= s.deeds);
    while w.now < end && !done(&w) && (options.steps == 0 || w.steps < options.steps) {
        let next = (w.now + 1000).min(end);
        w.until(next);
    }
    plan.until = w.now - BEGIN;
    plan.events.clone_from(&w.planned);
    Outcome { plan, ..finish(w, seed, swarm) }
}

/// Runs a plan: what it says is done, and nothing else.
pub fn plan(plan: &Plan, options: &Options) -> Outcome {
    let mut w = plan.world(Swarm::none(), options);
    w.follow(plan);
    w.until(BEGIN + plan.until);
    let done = Plan { events: w.planned.clone(), ..plan.clone() };
    Outcome { plan: done, ..finish(w, plan.seed, Swarm::none()) }
}

impl Plan {
    fn world(&self, swarm: Swarm, options: &Options) -> World {
        let mut w = World::new(self.seed, swarm, self.nodes, self.controllers);
        w.mutant = options.mutant;
        w.record = options.record.then(Vec::new);
        w.coverage = options.cover.then(Coverage::default);
        w.replay = options.replay || options.mutant.is_some_and(Mutant::needs_replay);
        w.names.clone_from(&self.machines);
        w.sets.clone_from(&self.sets);
        w
    }
}

/// Faults and people stop; what is there has to become what was asked for.
pub(super) fn finish(mut w: World, seed: u64, swarm: Swarm) -> Outcome {
    w.heal();
    let planned: Vec<(u64, u64)> =
        w.agenda.keys().filter(|(_, number)| *number < super::plan::EARLY).copied().collect();
    for k in planned {
        w.agenda.remove(&k);
    }
    let end = w.now + CONVERGE;
    let healed = w.now;
    while w.now < end && !w.rests(end) {
        let next = (w.now + 1000).min(end);
        w.until(next);
        if w.led_after.is_none() && w.leader().is_some() {
            w.led_after = Some(w.now - healed);
        }
    }
    for (id, text) in w.check_quiet() {
        w.violated(id, text);
    }
    Outcome {
        seed,
        hash: w.hash,
        steps: w.steps,
        starts: w.ghost.starts.values().sum(),
        lives: w.ghost.lives(),
        writes: std::mem::take(&mut w.ghost.writes),
        struck: std::mem::take(&mut w.struck),
        converged: w.ghost.last_write.saturating_sub(healed),
        plan: Plan::default(),
        elapsed: w.now - BEGIN,
        coverage: w.coverage.take().unwrap_or_default(),
        violations: std::mem::take(&mut w.violations),
        log: w.record.take().unwrap_or_default(),
        swarm,
    }
}

impl World {
    /// Nothing has happened for a while but what happens periodically, and nothing else will until `end`: time changes nothing
    /// any more.
    fn rests(&self, end: u64) -> bool {
        let periodic = |a: &Action| match a {
            Action::LeaseTick(_) | Action::Heartbeat(_) | Action::Lifecycle => true,
            Action::Arrive(call) => call.then.is_of_the_lease(),
            Action::Answer(_, then, _) => then.is_of_the_lease(),
            _ => false,
        };
        self.now.saturating_sub(self.ghost.last_write.max(self.ghost.last_call)) > QUIET
            && self.agenda.range(..=(end, u64::MAX)).all(|(_, a)| periodic(a))
    }
}
