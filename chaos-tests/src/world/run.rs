//! Runs: seeds, and the exhaustive crash points of canonical scenarios.

use super::{
    Action, BEGIN, CrashPoint, Violation, World,
    dice::Dice,
    mutants::Mutant,
    swarm::{Fault, Swarm},
    users::{Deed, STRATEGIES},
};
use std::collections::BTreeMap;

/// From the end of all faults until everything has to be right: the longest back-off of a machine, and a generous rest.
const CONVERGE: u64 = 520_000;
/// Quiet for so long is at rest, where nothing is planned.
const QUIET: u64 = 61_000;
/// How long people and faults are at work.
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
    /// The log, where it was asked for.
    pub log: Vec<String>,
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
}

/// Runs a seed: trouble, then none, then everything has to be right.
pub fn seed(seed: u64, options: &Options) -> Outcome {
    let mut dice = Dice::new(seed ^ 0x5eed);
    let drawn = Swarm::draw(&mut dice);
    let swarm = options.swarm.clone().or(options.mutant.and_then(Mutant::swarm)).unwrap_or(drawn);
    let nodes = usize::try_from(dice.between(1, 3)).unwrap_or(1);
    let mut w = World::new(seed, swarm.clone(), nodes, 2);
    w.mutant = options.mutant;
    w.record = options.record.then(Vec::new);
    w.replay = options.replay || options.mutant.is_some_and(Mutant::needs_replay);
    let machines = dice.between(1, 3);
    w.say(|| format!("seed {seed}: {nodes} nodes, {machines} machines, faults: {swarm}"));
    w.names = (0..machines).map(|i| format!("vm-{i}")).collect();
    // One seed in four has a set, drawn apart.
    let mut apart = Dice::new(seed ^ 0x5e75);
    let replicas = apart.below(4);
    if apart.chance(250) || options.mutant.is_some_and(Mutant::needs_sets) {
        w.sets = vec!["set-0".into()];
    }
    w.until(BEGIN + 3000);
    for name in w.sets.clone() {
        w.deed(&Deed::CreateSet(name, replicas));
    }
    for name in w.names.clone() {
        let strategy = dice.pick(&STRATEGIES).copied().unwrap_or("Always");
        w.deed(&Deed::Create(name, strategy));
        let pause = dice.between(1, 3000);
        let now = w.now;
        w.until(now + pause);
    }
    w.after(2000, Action::User);
    w.after(1000, Action::Chaos);
    let end = w.now + TROUBLE;
    while w.now < end && (options.steps == 0 || w.steps < options.steps) {
        let next = (w.now + 1000).min(end);
        w.until(next);
    }
    finish(w, seed, swarm)
}

/// Faults and people stop; what is there has to become what was asked for.
fn finish(mut w: World, seed: u64, swarm: Swarm) -> Outcome {
    w.heal();
    let keep: Vec<(u64, u64)> =
        w.agenda.iter().filter(|(_, a)| matches!(a, Action::User | Action::Chaos)).map(|(k, _)| *k).collect();
    for k in keep {
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

/// A canonical scenario: what is done to one machine, and after how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scenario {
    /// A machine is made and runs.
    Start,
    /// It is stopped.
    Stop,
    /// It is restarted.
    Restart,
    /// It is deleted.
    Delete,
    /// Its guest powers itself off; it is to be run again on failures alone.
    PowerOff,
    /// Its hypervisor crashes; it is to be run again on failures alone.
    Crash,
    /// A set of two instances shall have three.
    ScaleUp,
    /// It shall have one.
    ScaleDown,
    /// The hypervisor of one of its instances crashes.
    MemberCrash,
}

impl Scenario {
    /// All of them.
    pub const ALL: [Scenario; 9] = [
        Self::Start,
        Self::Stop,
        Self::Restart,
        Self::Delete,
        Self::PowerOff,
        Self::Crash,
        Self::ScaleUp,
        Self::ScaleDown,
        Self::MemberCrash,
    ];

    /// What is there before something happens.
    pub fn prepare(self) -> Deed {
        let machine = |strategy| Deed::Create("vm-0".into(), strategy);
        match self {
            Self::Start | Self::Stop | Self::Restart | Self::Delete => machine("Always"),
            Self::PowerOff | Self::Crash => machine("RerunOnFailure"),
            Self::ScaleUp | Self::ScaleDown | Self::MemberCrash => Deed::CreateSet("set-0".into(), 2),
        }
    }

    /// What somebody does then; `None` where nobody does anything, but perhaps a guest ([`Scenario::guest_ends`]).
    pub fn deed(self) -> Option<Deed> {
        let name = || "vm-0".to_owned();
        match self {
            Self::Start | Self::PowerOff | Self::Crash | Self::MemberCrash => None,
            Self::Stop => Some(Deed::Stop(name(), None)),
            Self::Restart => Some(Deed::Restart(name())),
            Self::Delete => Some(Deed::Delete(name(), true)),
            Self::ScaleUp => Some(Deed::Scale("set-0".into(), 3)),
            Self::ScaleDown => Some(Deed::Scale("set-0".into(), 1)),
        }
    }

    /// A guest ends by itself: powers itself off (`true`), or crashes.
    pub fn guest_ends(self) -> Option<bool> {
        match self {
            Self::PowerOff => Some(true),
            Self::Crash | Self::MemberCrash => Some(false),
            Self::Start | Self::Stop | Self::Restart | Self::Delete | Self::ScaleUp | Self::ScaleDown => None,
        }
    }

    /// Domains that begin, whatever dies on the way.
    fn starts(self) -> u32 {
        match self {
            Self::Start | Self::Stop | Self::Delete | Self::PowerOff => 1,
            Self::Restart | Self::Crash | Self::ScaleDown => 2,
            Self::ScaleUp | Self::MemberCrash => 3,
        }
    }
}

/// Runs a scenario with a crash at one point, or with none.
pub fn scenario(which: Scenario, crash: Option<CrashPoint>, record: bool) -> (Outcome, [u64; 2]) {
    let (outcome, effects, _) = scenario_with(which, crash, record, None, 0);
    (outcome, effects)
}

/// The same, with a mechanism that is broken, and with one event of the controllers' watches lost (from 1, 0 for none); and how many
/// events there were.
pub fn scenario_with(
    which: Scenario,
    crash: Option<CrashPoint>,
    record: bool,
    mutant: Option<Mutant>,
    withheld: u64,
) -> (Outcome, [u64; 2], u64) {
    let mut w = World::new(7, Swarm::none(), 1, 2);
    w.record = record.then(Vec::new);
    w.mutant = mutant;
    match which.prepare() {
        Deed::CreateSet(name, _) => w.sets = vec![name],
        _ => w.names = vec!["vm-0".into()],
    }
    w.until(BEGIN + 3000);
    if which == Scenario::Start {
        w.crash = crash;
        w.effects = [0, 0];
    }
    w.deed(&which.prepare());
    let settled = w.now + 20_000;
    w.until(settled);
    if which != Scenario::Start {
        w.crash = crash;
        w.effects = [0, 0];
    }
    if which != Scenario::Start {
        w.heard = 0;
    }
    w.withheld = withheld;
    if let Some(deed) = which.deed() {
        w.deed(&deed);
    }
    if let Some(off) = which.guest_ends() {
        let event = if off { super::node::LauncherEvent::PoweredOff } else { super::node::LauncherEvent::Crashed };
        for (pod, _) in w.guests(0).into_iter().take(1) {
            w.end_guest(0, &pod, event);
        }
    }
    let settled = w.now + 60_000;
    w.until(settled);
    let (effects, heard) = (w.effects, w.heard);
    if which == Scenario::Start
        && crash.is_none()
        && let Err(text) = super::invariants::check_q1(&w.ghost)
    {
        w.violated("Q1", text);
    }
    let mut outcome = finish(w, 7, Swarm::none());
    if outcome.starts != which.starts() {
        let text = format!("{} domains began, not {}", outcome.starts, which.starts());
        outcome.violations.push(Violation { check: "writes", text, at: 0 });
    }
    (outcome, effects, heard)
}

/// Every event of the controllers' watches lost once, in each run another one. Each run has to end as the one in which none is.
pub fn withheld(which: Scenario, mut each: impl FnMut(u64, Outcome)) {
    let (reference, _, heard) = scenario_with(which, None, false, None, 0);
    for n in 1..=heard {
        let (mut outcome, ..) = scenario_with(which, None, false, None, n);
        let (want, got) = (lasting(&reference.writes), lasting(&outcome.writes));
        if want != got {
            let text = format!("creations and deletions {got:?}, where nothing is lost {want:?}");
            outcome.violations.push(Violation { check: "writes", text, at: 0 });
        }
        each(n, outcome);
    }
}

/// All pairs of operations on one machine that runs, both at the same moment [O2].
pub fn pairs(strategy: &'static str, mut each: impl FnMut(&Deed, &Deed, Outcome)) {
    let name = || "vm-0".to_owned();
    let deeds = [
        Deed::Start(name()),
        Deed::Stop(name(), None),
        Deed::Stop(name(), Some(0)),
        Deed::Restart(name()),
        Deed::Strategy(name(), "Manual"),
        Deed::Strategy(name(), "Halted"),
        Deed::Delete(name(), true),
        Deed::Delete(name(), false),
        Deed::Create(name(), "Always"),
        Deed::DeleteInstance(name()),
        Deed::DeletePod(name(), false),
    ];
    for first in &deeds {
        for second in &deeds {
            let mut w = World::new(7, Swarm::none(), 2, 2);
            w.names = vec![name()];
            w.until(BEGIN + 3000);
            w.deed(&Deed::Create(name(), strategy));
            w.until(BEGIN + 23_000);
            w.deed(first);
            w.deed(second);
            each(first, second, finish(w, 7, Swarm::none()));
        }
    }
}

/// One crash point and what became of it.
#[derive(Debug, Clone)]
pub struct Crashed {
    /// Scenario.
    pub scenario: Scenario,
    /// Where.
    pub point: CrashPoint,
    /// What became of it.
    pub outcome: Outcome,
}

/// Every crash point of a scenario: each effect of controllers and agents, before and after. Each run has to end as the one
/// without a crash, with the same creations and deletions that took effect.
pub fn crash_points(which: Scenario, mut each: impl FnMut(Crashed)) {
    let (reference, effects) = scenario(which, None, false);
    for role in [super::Role::Controller, super::Role::Agent] {
        for effect in 1..=effects[role as usize] {
            for after in [false, true] {
                let point = CrashPoint { role, effect, after };
                let (mut outcome, _) = scenario(which, Some(point), false);
                let (want, got) = (lasting(&reference.writes), lasting(&outcome.writes));
                if want != got {
                    let text = format!("creations and deletions {got:?}, without a crash {want:?}");
                    outcome.violations.push(Violation { check: "writes", text, at: 0 });
                }
                each(Crashed { scenario: which, point, outcome });
            }
        }
    }
}

/// Creations, and deletions of what is not deleted yet: what a crash may neither add nor take away.
pub fn lasting(writes: &BTreeMap<String, u32>) -> BTreeMap<String, u32> {
    writes
        .iter()
        .filter(|(k, _)| !k.starts_with("change") && !k.ends_with("Lease"))
        .map(|(k, n)| (k.clone(), *n))
        .collect()
}
