//! Exhaustive runs: canonical scenarios in which one thing goes wrong, in each run another one. A process dies before or after
//! each of its effects; the view is old at each decision; each event is lost once; each pair of operations meets.

use super::{
    BEGIN, CrashPoint, Role, Violation, World,
    coverage::Coverage,
    mutants::Mutant,
    node::LauncherEvent,
    run::{Outcome, finish},
    swarm::Swarm,
    users::Deed,
};
use std::collections::BTreeMap;

/// An old view stays old for so long: longer than a Lease, so that who was killed leads again with it.
pub(super) const FROZEN: u64 = 40_000;
/// So many versions back.
const BACK: usize = 12;

/// A view that is old when a controller decides: from its n-th effect on nobody is told of anything for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stale {
    /// Which effect, from 1.
    pub effect: u64,
    /// Whoever lists gets what there was so many changes before.
    pub back: usize,
    /// The controller dies after that effect, and lists.
    pub crash: bool,
}

/// What goes wrong in a scenario.
#[derive(Debug, Clone, Default)]
pub struct Twist {
    /// Who dies, and where.
    pub crash: Option<CrashPoint>,
    /// The view that is old.
    pub stale: Option<Stale>,
    /// Which event of the controllers' watches is lost, from 1; 0 for none.
    pub withheld: u64,
    /// What is broken.
    pub mutant: Option<Mutant>,
    /// Keep a log.
    pub record: bool,
}

/// What became of it.
#[derive(Debug, Clone)]
pub struct Ran {
    /// As of a seed.
    pub outcome: Outcome,
    /// Effects of controllers and of agents.
    pub effects: [u64; 2],
    /// Events of the controllers' watches.
    pub heard: u64,
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
    /// It is deleted, and made again with no gap.
    Recreate,
    /// Its node loses power for good, and somebody takes that out of service.
    NodeLoss,
    /// It is stopped while the controller dies that leads.
    LeaderChange,
    /// It is restarted while controller and agent die, and its guest runs on.
    TakeOver,
}

impl Scenario {
    /// All of them.
    pub const EVERY: [Scenario; 13] = [
        Self::Start,
        Self::Stop,
        Self::Restart,
        Self::Delete,
        Self::Recreate,
        Self::PowerOff,
        Self::Crash,
        Self::ScaleUp,
        Self::ScaleDown,
        Self::MemberCrash,
        Self::NodeLoss,
        Self::LeaderChange,
        Self::TakeOver,
    ];

    /// Those in which nothing happens but to machines and guests: the simulated network does them, too.
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
            Self::Start
            | Self::Stop
            | Self::Restart
            | Self::Delete
            | Self::Recreate
            | Self::NodeLoss
            | Self::LeaderChange
            | Self::TakeOver => machine("Always"),
            Self::PowerOff | Self::Crash => machine("RerunOnFailure"),
            Self::ScaleUp | Self::ScaleDown | Self::MemberCrash => Deed::CreateSet("set-0".into(), 2),
        }
    }

    /// What somebody does then; `None` where nobody does anything, but perhaps a guest ([`Scenario::guest_ends`]).
    pub fn deed(self) -> Option<Deed> {
        let name = || "vm-0".to_owned();
        match self {
            Self::Start | Self::PowerOff | Self::Crash | Self::MemberCrash | Self::NodeLoss => None,
            Self::Stop | Self::LeaderChange => Some(Deed::Stop(name(), None)),
            Self::Restart | Self::TakeOver => Some(Deed::Restart(name())),
            Self::Delete | Self::Recreate => Some(Deed::Delete(name(), true)),
            Self::ScaleUp => Some(Deed::Scale("set-0".into(), 3)),
            Self::ScaleDown => Some(Deed::Scale("set-0".into(), 1)),
        }
    }

    /// A guest ends by itself: powers itself off (`true`), or crashes.
    pub fn guest_ends(self) -> Option<bool> {
        match self {
            Self::PowerOff => Some(true),
            Self::Crash | Self::MemberCrash => Some(false),
            Self::Start
            | Self::Stop
            | Self::Restart
            | Self::Delete
            | Self::ScaleUp
            | Self::ScaleDown
            | Self::Recreate
            | Self::NodeLoss
            | Self::LeaderChange
            | Self::TakeOver => None,
        }
    }

    /// Domains that begin, whatever dies on the way.
    fn starts(self) -> u32 {
        match self {
            Self::Start | Self::Stop | Self::Delete | Self::PowerOff | Self::LeaderChange => 1,
            Self::Restart | Self::Crash | Self::ScaleDown | Self::Recreate | Self::NodeLoss | Self::TakeOver => 2,
            Self::ScaleUp | Self::MemberCrash => 3,
        }
    }
}

/// Runs a scenario with a crash at one point, or with none; and how many effects of controllers and agents there were.
pub fn scenario(which: Scenario, crash: Option<CrashPoint>, record: bool) -> (Outcome, [u64; 2]) {
    let ran = scenario_with(which, &Twist { crash, record, ..Twist::default() });
    (ran.outcome, ran.effects)
}

/// Runs a scenario in which something goes wrong.
pub fn scenario_with(which: Scenario, twist: &Twist) -> Ran {
    // Nobody else leads with a view that is not as old.
    let controllers = if twist.stale.is_some_and(|s| s.crash) { 1 } else { 2 };
    let nodes = if which == Scenario::NodeLoss { 2 } else { 1 };
    let mut w = World::new(7, Swarm::none(), nodes, controllers);
    w.record = twist.record.then(Vec::new);
    w.mutant = twist.mutant;
    match which.prepare() {
        Deed::CreateSet(name, _) => w.sets = vec![name],
        _ => w.names = vec!["vm-0".into()],
    }
    w.until(BEGIN + 3000);
    let from_the_start = which == Scenario::Start;
    if from_the_start {
        w.goes_wrong(twist);
    }
    w.deed(&which.prepare());
    w.pass(20_000);
    if !from_the_start {
        w.goes_wrong(twist);
    }
    w.withheld = twist.withheld;
    w.happens(which);
    w.pass(60_000);
    let (effects, heard) = (w.effects, w.heard);
    let untwisted = twist.crash.is_none() && twist.stale.is_none() && twist.withheld == 0;
    if from_the_start
        && untwisted
        && let Err(text) = super::invariants::check_q1(&w.ghost)
    {
        w.violated("Q1", text);
    }
    let mut outcome = finish(w, 7, Swarm::none());
    if outcome.starts != which.starts() {
        let text = format!("{} domains began, not {}", outcome.starts, which.starts());
        outcome.violations.push(Violation { check: "writes", text, at: 0 });
    }
    Ran { outcome, effects, heard }
}

impl World {
    fn pass(&mut self, ms: u64) {
        let end = self.now + ms;
        self.until(end);
    }

    /// From here on effects count, and something goes wrong at one of them.
    fn goes_wrong(&mut self, twist: &Twist) {
        (self.crash, self.stale) = (twist.crash, twist.stale);
        self.effects = [0, 0];
        self.heard = 0;
        self.coverage = Some(Coverage::default());
    }

    /// What a scenario is about.
    fn happens(&mut self, which: Scenario) {
        if let Some(deed) = which.deed() {
            self.deed(&deed);
        }
        if let Some(off) = which.guest_ends() {
            let event = if off { LauncherEvent::PoweredOff } else { LauncherEvent::Crashed };
            for (pod, _) in self.guests(0).into_iter().take(1) {
                self.end_guest(0, &pod, event);
            }
        }
        match which {
            Scenario::Recreate => {
                // As often as it is refused because the old one is still there.
                let end = self.now + 60_000;
                while self.now < end && !self.deed(&which.prepare()) {
                    self.pass(100);
                }
            }
            Scenario::NodeLoss => {
                let lost = (0..self.nodes.len()).find(|n| !self.guests(*n).is_empty()).unwrap_or(0);
                self.power_off(lost);
                self.pass(60_000);
                self.fence(lost);
                self.pass(60_000);
            }
            Scenario::LeaderChange | Scenario::TakeOver => {
                if let Some(leader) = self.leader() {
                    self.crash_controller(leader, "killed");
                }
                if which == Scenario::TakeOver {
                    self.crash_agent(0);
                }
            }
            _ => {}
        }
    }
}

fn compared(reference: &Outcome, mut outcome: Outcome, what: &str) -> Outcome {
    let (want, got) = (lasting(&reference.writes), lasting(&outcome.writes));
    if want != got {
        let text = format!("creations and deletions {got:?}, {what} {want:?}");
        outcome.violations.push(Violation { check: "writes", text, at: 0 });
    }
    outcome
}

/// Every event of the controllers' watches lost once, in each run another one. Each run has to end as the one in which none is.
pub fn withheld(which: Scenario, mut each: impl FnMut(u64, Outcome)) {
    let reference = scenario_with(which, &Twist::default());
    for n in 1..=reference.heard {
        let ran = scenario_with(which, &Twist { withheld: n, ..Twist::default() });
        each(n, compared(&reference.outcome, ran.outcome, "where nothing is lost"));
    }
}

/// An old view at every decision that has an effect: the watches stop there; or the controller dies and comes back to a server that
/// is so many changes behind. Each run has to end as the one in which every view is fresh.
pub fn stale_views(which: Scenario, mut each: impl FnMut(Stale, Outcome)) {
    let reference = scenario_with(which, &Twist::default());
    for effect in 1..=reference.effects[Role::Controller as usize] {
        let dead = (0..=BACK).map(|back| Stale { effect, back, crash: true });
        for stale in [Stale { effect, back: 0, crash: false }].into_iter().chain(dead) {
            let ran = scenario_with(which, &Twist { stale: Some(stale), ..Twist::default() });
            each(stale, compared(&reference.outcome, ran.outcome, "with a fresh view"));
        }
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
    let reference = scenario_with(which, &Twist::default());
    for role in [Role::Controller, Role::Agent] {
        for effect in 1..=reference.effects[role as usize] {
            for after in [false, true] {
                let point = CrashPoint { role, effect, after };
                let ran = scenario_with(which, &Twist { crash: Some(point), ..Twist::default() });
                let outcome = compared(&reference.outcome, ran.outcome, "without a crash");
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
