//! Bounded exhaustive search: everything that can happen to one machine, in every order, until nothing new is found.
//!
//! The world is the same as everywhere here (the real cells, latch, API server and store; the same ghost and invariants), but it has
//! neither clock nor dice. In each state everything that can happen next is tried, each in a copy of it ([`steps`]). What people do
//! and what goes wrong is drawn from a budget, so that all that grows has a bound; two worlds that differ only in numbers
//! that are compared and nothing else are one state ([`canon`]). A search that ends has seen every state that there is within
//! its bounds: a fixpoint.
//!
//! Besides the invariants of every state, the states in which nothing can happen any more have to be as their user asked, and from
//! every state one of those has to be reached by what happens by itself.
//!
//! Simplifications: a leader is deposed at once (what it has sent is on its way still, as long as one likes), and the other's caches
//! may be behind; launcher and agent of a node hear of each other at once; deadlines may come late, and of one process they
//! come in order; how far apart two times are is forgotten, once they are over or still to come. What the ghost remembers of
//! the past takes part in a state only where it is about what runs, and about stops.

mod canon;
mod steps;

pub(super) use canon::{Piece, pieces};

use super::{
    BEGIN, World,
    controller::Controller,
    mutants::Mutant,
    server::{Pool, Res},
    swarm::Swarm,
    users::{Deed, STRATEGIES},
};
use clap::{Args, builder::RangedU64ValueParser};
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    rc::Rc,
    time::{Duration, Instant},
};

/// The machine that all of it is about.
pub const MACHINE: &str = "vm-0";
/// Seconds that its guests have to end.
pub(super) const GRACE: u64 = 3;
/// So many worlds are kept whose steps were not taken yet; beyond them the search goes into the depth.
const WIDE: usize = 30_000;
/// Between two words about how far it has come.
const TELL: Duration = Duration::from_secs(10);

/// How much may happen.
#[derive(Debug, Clone, Args)]
pub struct Bounds {
    /// Nodes.
    #[arg(long, default_value_t = 2, value_parser = RangedU64ValueParser::<usize>::new().range(1..=3))]
    pub nodes: usize,
    /// Strategy of the machine, which is made before the search begins.
    #[arg(long, default_value = "Always", value_parser = strategy)]
    pub strategy: &'static str,
    /// What somebody may do: comma-separated, as plans have it without the machine (`stop`, `start`, `restart`, `delete`, `orphan`,
    /// `create Always`, `set Manual`, `stop 0`, `delete-instance`, `delete-pod`, `remove-pod`, ...).
    #[arg(long, value_name = "WORDS", value_delimiter = ',', value_parser = deed,
        default_value = "stop,start,restart,delete,create Always")]
    pub alphabet: Vec<Deed>,
    /// How often somebody does something.
    #[arg(long, default_value_t = 1)]
    pub deeds: u8,
    /// Deaths of an agent, a launcher or a leader.
    #[arg(long, default_value_t = 0)]
    pub crashes: u8,
    /// Changes of the leader.
    #[arg(long, default_value_t = 0)]
    pub handovers: u8,
    /// Requests, answers and orders that are lost, sessions and watches that break.
    #[arg(long, default_value_t = 0)]
    pub lost: u8,
    /// Requests and orders that arrive twice.
    #[arg(long, default_value_t = 0)]
    pub twice: u8,
    /// A new leader's caches may be so many changes behind, once.
    #[arg(long, default_value_t = 0)]
    pub stale: u8,
    /// Deadlines that come before what is quicker, such as messages.
    #[arg(long, default_value_t = 0)]
    pub slow: u8,
    /// Also answers to writes come late (else only those to reads do, and those of writes are lost or there at once), watches deliver
    /// only the next of several changes, and between a read and what is written from it there may be anything: many more states.
    #[arg(long)]
    pub late: bool,
    /// What is broken.
    #[arg(skip)]
    pub mutant: Option<Mutant>,
    /// Give up after so many states; 0 for never.
    #[arg(long, default_value_t = 0)]
    pub states: usize,
    /// Give up at so many MiB of memory; 0 for never.
    #[arg(long, default_value_t = 6000)]
    pub memory: u64,
}

fn strategy(text: &str) -> Result<&'static str, String> {
    STRATEGIES.into_iter().find(|s| *s == text).ok_or_else(|| format!("unknown; there are {STRATEGIES:?}"))
}

/// A deed without the name of the machine that it is about.
fn deed(text: &str) -> Result<Deed, String> {
    let (verb, rest) = text.split_once(' ').map_or((text, String::new()), |(verb, rest)| (verb, format!(" {rest}")));
    Deed::parse(&format!("{verb} {MACHINE}{rest}")).ok_or_else(|| format!("nobody can do {text:?}"))
}

impl Default for Bounds {
    fn default() -> Self {
        let name = || MACHINE.to_owned();
        Self {
            nodes: 2,
            strategy: "Always",
            alphabet: vec![
                Deed::Stop(name(), None),
                Deed::Start(name()),
                Deed::Restart(name()),
                Deed::Delete(name(), true),
                Deed::Create(name(), "Always"),
            ],
            deeds: 1,
            crashes: 0,
            handovers: 0,
            lost: 0,
            twice: 0,
            stale: 0,
            slow: 0,
            late: false,
            mutant: None,
            states: 0,
            memory: 0,
        }
    }
}

/// What may still happen.
#[derive(Debug, Clone, Copy)]
pub(super) struct Left {
    deeds: u8,
    crashes: u8,
    handovers: u8,
    lost: u8,
    twice: u8,
    stale: u8,
    slow: u8,
}

/// What a world has that is searched.
#[derive(Debug, Clone)]
pub(super) struct Lab {
    bounds: Rc<Bounds>,
    left: Left,
    /// Where pods are placed.
    pub place: usize,
    /// Nodes that were ever used, from the first on.
    used: usize,
    /// Who led last.
    led: usize,
    ids: u64,
    /// Versions of the store, by what was written.
    versions: BTreeMap<u64, Res>,
}

impl Lab {
    /// Something was written.
    pub fn written(&mut self, res: Res, version: u64) {
        self.versions.insert(version, res);
    }

    fn kind(&self, version: u64) -> Option<Res> {
        self.versions.get(&version).copied()
    }

    /// Versions of a kind after this one.
    fn after(&self, res: Res, version: u64) -> impl Iterator<Item = u64> {
        self.versions.range(version + 1..).filter(move |(_, r)| **r == res).map(|(v, _)| *v)
    }

    /// The last version of a kind up to this one.
    fn before(&self, res: Res, version: u64) -> u64 {
        self.versions.range(..=version).rev().find(|(_, r)| **r == res).map_or(0, |(v, _)| *v)
    }
}

/// Something that must not be.
#[derive(Debug, Clone)]
pub struct Trouble {
    /// Id of the check.
    pub check: String,
    /// In words.
    pub text: String,
    /// How it came to it, step by step.
    pub story: Vec<String>,
    /// Steps.
    pub steps: usize,
}

/// What a search has found so far.
#[derive(Debug, Clone, Default)]
pub struct Found {
    /// States.
    pub states: usize,
    /// Steps from one to another, or to the same.
    pub steps: u64,
    /// The most steps that the way to a state had by which it was found.
    pub depth: usize,
    /// States in which nothing happens by itself any more.
    pub rests: usize,
    /// States that are known and whose steps were not taken yet.
    pub open: usize,
    /// Bytes of the process, as the kernel has them.
    pub memory: u64,
    /// There was no room to go on breadth first: ways are not the shortest.
    pub deep: bool,
    /// Seconds.
    pub seconds: f64,
    /// Why it was given up; that is no fixpoint.
    pub stopped: Option<String>,
    /// What must not be.
    pub trouble: Option<Trouble>,
}

impl Found {
    /// There is no state that it has not seen.
    pub fn is_fixpoint(&self) -> bool {
        self.stopped.is_none() && self.trouble.is_none()
    }
}

/// The way to each state: from which, by which of its steps.
struct Ways {
    from: Vec<(u32, u16)>,
    known: HashMap<u128, u32>,
    /// Steps that happen by themselves.
    fair: Vec<(u32, u32)>,
    /// States that are as they should be for ever.
    right: Vec<u32>,
}

impl Ways {
    /// The steps to a state.
    fn to(&self, mut state: u32) -> Vec<u16> {
        let mut way = vec![];
        while let Some((from, step)) = self.from.get(state as usize).copied().filter(|_| state > 0) {
            way.push(step);
            state = from;
        }
        way.reverse();
        way
    }

    /// A state from which nothing that is right is ever reached by itself.
    fn stuck(&self) -> Option<u32> {
        let mut back: Vec<(u32, u32)> = self.fair.iter().map(|(a, b)| (*b, *a)).collect();
        back.sort_unstable();
        let mut good = vec![false; self.from.len()];
        let mut queue: VecDeque<u32> = self.right.iter().copied().collect();
        while let Some(state) = queue.pop_front() {
            if std::mem::replace(&mut good[state as usize], true) {
                continue;
            }
            let first = back.partition_point(|(b, _)| *b < state);
            queue.extend(back[first..].iter().take_while(|(b, _)| *b == state).map(|(_, a)| *a));
        }
        good.iter().position(|g| !g).and_then(|n| u32::try_from(n).ok())
    }
}

/// Searches, breadth first, and says every now and then how far it has come.
pub fn run(bounds: &Bounds, told: &mut dyn FnMut(&Found)) -> Found {
    let began = Instant::now();
    let root = World::to_search(bounds);
    let mut found = Found { states: 1, ..Found::default() };
    let mut ways =
        Ways { from: vec![(0, 0)], known: HashMap::from([(root.fingerprint(), 0)]), fair: vec![], right: vec![] };
    let mut open = VecDeque::from([(0u32, 0usize, root)]);
    let mut last = Instant::now();
    loop {
        // Breadth first as long as there is room: then what is found is found by the shortest way.
        found.deep |= open.len() > WIDE;
        let next = if open.len() > WIDE { open.pop_back() } else { open.pop_front() };
        let Some((id, depth, world)) = next else { break };
        found.depth = found.depth.max(depth);
        found.open = open.len();
        let mut rests = true;
        for (n, step) in world.steps().iter().enumerate() {
            let mut next = world.clone();
            if !next.take(step) {
                continue;
            }
            found.steps += 1;
            let n = u16::try_from(n).unwrap_or(u16::MAX);
            if let Some(v) = next.violations.first() {
                let mut way = ways.to(id);
                way.push(n);
                found.trouble = Some(trouble(bounds, &way, v.check, &v.text));
                break;
            }
            let fresh = u32::try_from(ways.from.len()).unwrap_or(u32::MAX);
            let to = *ways.known.entry(next.fingerprint()).or_insert(fresh);
            if step.is_fair() && to != id {
                rests = false;
                ways.fair.push((id, to));
            }
            if to == fresh {
                ways.from.push((id, n));
                open.push_back((to, depth + 1, next));
            }
        }
        found.states = ways.from.len();
        if rests && found.trouble.is_none() {
            found.rests += 1;
            match world.is_at_rest() {
                None => ways.right.push(id),
                Some((check, text)) => found.trouble = Some(trouble(bounds, &ways.to(id), check, &text)),
            }
        }
        if bounds.states > 0 && found.states >= bounds.states && !open.is_empty() {
            found.stopped = Some(format!("there are more than {} states", bounds.states));
        }
        if last.elapsed() > TELL || found.states.is_multiple_of(1000) {
            found.memory = memory();
            if bounds.memory > 0 && found.memory > bounds.memory << 20 {
                found.stopped = Some(format!("it takes {} MiB", found.memory >> 20));
            }
        }
        if last.elapsed() > TELL {
            found.seconds = began.elapsed().as_secs_f64();
            told(&found);
            last = Instant::now();
        }
        if found.stopped.is_some() || found.trouble.is_some() {
            break;
        }
    }
    found.open = open.len();
    if found.is_fixpoint()
        && let Some(state) = ways.stuck()
    {
        let text = "by itself nothing that is right is ever reached from here";
        found.trouble = Some(trouble(bounds, &ways.to(state), "L1", text));
    }
    (found.memory, found.seconds) = (memory(), began.elapsed().as_secs_f64());
    found
}

/// Goes a way again and tells it.
fn trouble(bounds: &Bounds, way: &[u16], check: &str, text: &str) -> Trouble {
    let mut w = World::to_search(bounds);
    w.record = Some(vec![]);
    let mut story = vec![];
    for (n, step) in way.iter().enumerate() {
        let Some(step) = w.steps().get(usize::from(*step)).cloned() else { break };
        story.push(format!("{:>3}. {}", n + 1, w.words(&step)));
        w.take(&step);
        let lines = w.record.replace(vec![]).unwrap_or_default();
        story.extend(super::shrink::story(&lines).iter().map(|l| format!("       {}", l.get(10..).unwrap_or(l))));
    }
    Trouble { check: check.into(), text: text.into(), story, steps: way.len() }
}

/// Bytes that the process has in memory.
fn memory() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
    pages * 4096
}

impl World {
    /// A world in which somebody has just made the machine, and everybody else is at rest.
    fn to_search(bounds: &Bounds) -> Self {
        let mut w = Self::new(7, Swarm::none(), bounds.nodes, 1);
        w.names = vec![MACHINE.into()];
        // All deadlines are over then.
        w.until(BEGIN + 120_000);
        w.agenda.clear();
        w.controllers.push(Controller::new());
        for x in &mut w.controllers {
            x.until = u64::MAX;
        }
        w.mutant = bounds.mutant;
        w.server.pool = Some(Pool::default());
        let newest = w.server.revision();
        w.watches.iter_mut().for_each(|watch| watch.position = newest);
        w.server.compact(newest);
        let left = Left {
            deeds: bounds.deeds,
            crashes: bounds.crashes,
            handovers: bounds.handovers,
            lost: bounds.lost,
            twice: bounds.twice,
            stale: bounds.stale,
            slow: bounds.slow,
        };
        let versions = w.ghost.present.values().map(|o| (o.revision, o.res)).collect();
        w.search =
            Some(Box::new(Lab { bounds: Rc::new(bounds.clone()), left, place: 0, used: 0, led: 0, ids: 0, versions }));
        w.deed(&Deed::Create(MACHINE.into(), bounds.strategy));
        w
    }

    /// A name that nobody has yet; those of a search come in order.
    pub(super) fn fresh_id(&mut self, kind: &str) -> String {
        match &mut self.search {
            Some(lab) => {
                lab.ids += 1;
                format!("{kind}-a{:011}", lab.ids)
            }
            None => self.dice.id(kind),
        }
    }

    /// What is wrong with a world in which nothing happens by itself any more.
    fn is_at_rest(&self) -> Option<(&'static str, String)> {
        let mut w = self.clone();
        // Long ago: what should have come by then is late.
        w.now += 600_000;
        w.check_quiet().into_iter().next()
    }
}
