//! The model world: the real machines of `state/`, with everything around them as plain data, and one generator for every
//! choice. The same seed is the same run, bit for bit.
//!
//! | what | how it is here |
//! |---|---|
//! | API server | the embedded server's semantics on its own store ([`server`]); calls are lost, late, repeated ([`api`]) |
//! | controllers | two processes with a Lease, each with the real Vm, Set and Node cells ([`controller`], [`driver`], [`sets`]) |
//! | sessions | messages in order, until cut ([`session`]) |
//! | node agents | the real Agent cells and the real admission of sessions; files as a model of a disk ([`agent`]) |
//! | launchers | the real latch; guests that obey or not ([`node`]) |
//! | kubelet, scheduler, collectors | written down as simply as they can be ([`kubelet`], [`cluster`]) |
//! | people | [`users`] |
//! | the same without time or dice: everything that can happen, in every order | [`search`] |
//! | what people and faults did | [`plan`], which can be given, and made smaller ([`shrink`]) |
//! | faults | drawn per seed ([`swarm`]), by the call or by the clock ([`chaos`]) |
//! | truth | [`ghost`], from a store by [`told`], judged by [`invariants`], which are judged by [`mutants`] |
//!
//! A run has two phases: people and faults for a while, then no more of either, and after a bound everything must be as it was
//! asked for ([`run`]). Not modelled: QEMU, storage, networks, admission, clocks that jump, migration.

pub mod agent;
pub mod api;
pub mod bugs;
mod chaos;
mod cluster;
pub mod controller;
pub mod coverage;
pub mod dice;
pub mod driver;
pub mod exhaustive;
pub mod ghost;
mod heard;
pub mod invariants;
pub mod kubelet;
pub mod mutants;
pub mod node;
pub mod plan;
pub mod report;
pub mod run;
pub mod search;
pub mod server;
pub mod session;
pub mod sets;
pub mod shrink;
pub mod swarm;
pub mod told;
pub mod users;

use api::{Call, Proc, Said, Then, Watch};
use controller::Controller;
use dice::Dice;
use driver::CellId;
use ghost::Ghost;
use mutants::Mutant;
use node::{LauncherEvent, LinkMessage, Node, Order};
use plan::Planned;
use server::Server;
use session::{Down, Session, Up};
use state::{
    InstructionId, NodeName, PodUid,
    domain::AckResult,
    object::{CommandId, Settled},
    observe::Object,
};
use std::collections::BTreeMap;
use swarm::{Fault, Swarm};
use users::Deed;

/// When the world begins: 2026-01-01, in milliseconds.
const BEGIN: u64 = 1_767_225_600_000;

/// More at one instant than anything sane makes happen.
const AT_ONCE: u32 = 10_000;

/// Something that will happen.
#[derive(Debug, Clone)]
// One heap of them; most are small, and a box each would cost more than it saves.
#[allow(clippy::large_enum_variant)]
enum Action {
    Arrive(Call),
    Answer(Proc, Then, Said),
    Pump(usize),
    Reopen(usize, bool),
    StartController(usize),
    Resume(usize),
    LeaseTick(Proc),
    Drive(Proc),
    Wake(Proc),
    Settled(Proc, CellId, CommandId, Box<Settled<Object>>),
    Dial(Proc, NodeName),
    HelloTimeout(Proc, u64),
    Down(u64, Down),
    Up(Proc, u64, Up),
    SessionEnds(u64),
    SessionLost(Proc, u64),
    SessionForgotten(u64),
    StartAgent(usize),
    AgentPods(Proc),
    AgentWake(Proc),
    AgentInput(Proc, PodUid, Box<state::agent::Input>),
    LinkTry(Proc, PodUid),
    Linked(Proc, PodUid, String, LinkMessage),
    Execute(Proc, PodUid, Box<Order>),
    Acked(Proc, PodUid, InstructionId, Option<AckResult>),
    AssertNode(usize),
    Launcher(usize, PodUid, String, LauncherEvent),
    Kubelet(usize, u32),
    Container(usize, u32, PodUid),
    KillContainer(usize, u32, PodUid),
    Heartbeat(usize),
    PowerOn(usize),
    Fence(usize),
    Unfence(usize),
    Schedule,
    Collect,
    Lifecycle,
    User,
    Chaos,
    Deed(Box<Deed>),
    Strike(Fault, u64),
}

/// What becomes of an effect.
#[derive(Debug, Clone, Copy)]
struct Fate {
    happens: bool,
    dies: bool,
}

/// Who dies at an effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The controller that has the effect.
    Controller,
    /// The agent that has it.
    Agent,
}

/// Where a process dies: before or after its n-th effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CrashPoint {
    /// Who.
    pub role: Role,
    /// Which effect, from 1.
    pub effect: u64,
    /// After it, else before.
    pub after: bool,
}

/// A check that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Id of the check.
    pub check: &'static str,
    /// In words.
    pub text: String,
    /// Milliseconds since the world began.
    pub at: u64,
}

/// The world.
#[derive(Clone)]
pub struct World {
    now: u64,
    seq: u64,
    agenda: BTreeMap<(u64, u64), Action>,
    /// Everything that is no fault, drawn anew from the seed at each instant: what was left out before changes nothing now.
    dice: Dice,
    seed: u64,
    /// What people and faults are drawn from.
    fates: Dice,
    /// What is done instead of what is drawn.
    given: Option<plan::Waiting>,
    /// What was done.
    planned: Vec<Planned>,
    early: u64,
    /// How often each fault could have struck at the instant when it could last.
    chances: Vec<(u64, u32)>,
    swarm: Swarm,
    server: Server,
    watches: Vec<Watch>,
    controllers: Vec<Controller>,
    nodes: Vec<Node>,
    sessions: BTreeMap<u64, Session>,
    next_session: u64,
    scheduling: bool,
    collecting: bool,
    names: Vec<String>,
    /// Names of sets.
    sets: Vec<String>,
    /// Longest pause of people between two deeds.
    unhurried: u64,
    /// What people have done.
    deeds: u64,
    ghost: Ghost,
    mutant: Option<Mutant>,
    crash: Option<CrashPoint>,
    stale: Option<exhaustive::Stale>,
    /// Until when controllers are told of nothing, and get lists of this version.
    frozen: Option<(u64, u64)>,
    /// Versions of what was written, but for Leases and nodes.
    milestones: Vec<u64>,
    coverage: Option<coverage::Coverage>,
    effects: [u64; 2],
    record: Option<Vec<String>>,
    /// Steps are taken again from what is recorded of them.
    replay: bool,
    /// From the end of all faults until somebody led.
    led_after: Option<u64>,
    /// Which event of the controllers' watches is lost, from 1; 0 for none.
    withheld: u64,
    /// Events of the controllers' watches so far.
    heard: u64,
    hash: u64,
    /// Actions at the present instant.
    at_once: u32,
    steps: u64,
    struck: BTreeMap<Fault, u64>,
    violations: Vec<Violation>,
    /// Whoever drives the world chooses what happens next; there are no delays then.
    search: Option<Box<search::Lab>>,
}

impl World {
    /// A world of this size where nothing has happened yet.
    pub fn new(seed: u64, swarm: Swarm, nodes: usize, controllers: usize) -> Self {
        let mut w = Self {
            now: BEGIN,
            seq: plan::EARLY,
            agenda: BTreeMap::new(),
            dice: Dice::new(seed),
            seed,
            fates: Dice::new(seed ^ 0xfa7e),
            given: None,
            planned: vec![],
            early: 0,
            chances: vec![(0, 0); Fault::ALL.len()],
            swarm,
            server: Server::default(),
            watches: vec![],
            controllers: (0..controllers).map(|_| Controller::new()).collect(),
            nodes: (0..nodes).map(|n| Node::new(&format!("node-{n}"))).collect(),
            sessions: BTreeMap::new(),
            next_session: 0,
            scheduling: false,
            collecting: false,
            names: vec![],
            sets: vec![],
            unhurried: 15_000,
            deeds: 0,
            ghost: Ghost::default(),
            mutant: None,
            crash: None,
            stale: None,
            frozen: None,
            milestones: vec![],
            coverage: None,
            effects: [0, 0],
            record: None,
            replay: false,
            led_after: None,
            withheld: 0,
            heard: 0,
            hash: 0xcbf2_9ce4_8422_2325,
            at_once: 0,
            steps: 0,
            struck: BTreeMap::new(),
            violations: vec![],
            search: None,
        };
        for n in 0..nodes {
            w.after(1, Action::Heartbeat(n));
            w.after(2, Action::StartAgent(n));
        }
        for c in 0..controllers {
            let wait = w.dice.between(5, 500);
            w.after(wait, Action::StartController(c));
        }
        w.after(3, Action::Lifecycle);
        w
    }

    fn after(&mut self, wait: u64, action: Action) {
        self.seq += 1;
        let Some(wait) = self.delay(wait, &action) else { return };
        self.agenda.insert((self.now + wait, self.seq), action);
    }

    /// It is this time now.
    fn turn(&mut self, at: u64) {
        if at > self.now {
            self.now = at;
            let mut mixed = Dice::new(self.seed ^ Dice::new(at).draw());
            self.dice = Dice::new(mixed.draw());
        }
    }

    fn recording(&self) -> bool {
        self.record.is_some()
    }

    /// A line of the log, made only where somebody reads it.
    fn say(&mut self, line: impl FnOnce() -> String) {
        if let Some(lines) = &mut self.record {
            lines.push(format!("{:>9.3} {}", (self.now - BEGIN) as f64 / 1000.0, line()));
        }
    }

    /// Mixes numbers into the hash of the run.
    fn mark(&mut self, numbers: &[u64]) {
        for n in [&[self.now], numbers].concat() {
            self.hash = (self.hash ^ n).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(17);
        }
    }

    /// A process is about to do something that stays.
    fn effect(&mut self, who: Proc, what: &str) -> Fate {
        self.cover_effect(who, what);
        let role = match who {
            Proc::Controller(..) => Role::Controller,
            Proc::Agent(..) => Role::Agent,
        };
        self.effects[role as usize] += 1;
        let n = self.effects[role as usize];
        if let Some(stale) = self.stale.filter(|s| role == Role::Controller && s.effect == n) {
            let back = self.milestones.len().saturating_sub(1 + stale.back);
            let version = self.milestones.get(back).copied().unwrap_or(1);
            self.say(|| format!("from now on the API server shows version {version} to controllers"));
            self.frozen = Some((version, self.now + exhaustive::FROZEN));
            return Fate { happens: true, dies: stale.crash };
        }
        let dies = self.crash.is_some_and(|c| c.role == role && c.effect == n);
        let happens = !dies || self.crash.is_some_and(|c| c.after);
        Fate { happens, dies }
    }

    /// The version that controllers are shown, where that is an old one, and for how long yet.
    fn frozen(&self, who: Proc) -> Option<(u64, u64)> {
        let (version, until) = self.frozen.filter(|(_, until)| *until > self.now)?;
        matches!(who, Proc::Controller(..)).then_some((version, until - self.now))
    }

    /// The controller that leads and steps.
    fn leader(&self) -> Option<usize> {
        let leads = |c: &usize| self.controllers[*c].leads(self.now) && self.controllers[*c].driver.is_some();
        (0..self.controllers.len()).find(leads)
    }

    /// Lives until then.
    fn until(&mut self, end: u64) {
        while let Some((at, seq)) = self.agenda.first_key_value().map(|(k, _)| *k).filter(|(at, _)| *at <= end) {
            let Some(action) = self.agenda.remove(&(at, seq)) else { return };
            self.at_once = if at > self.now { 0 } else { self.at_once + 1 };
            if self.at_once > AT_ONCE {
                self.violated("L5", "time stands still: something follows from itself without end".into());
                self.agenda.clear();
                break;
            }
            self.turn(at);
            self.act(action);
            if self.ghost.dirty {
                self.ghost.dirty = false;
                self.check();
            }
        }
        self.turn(end);
    }

    fn check(&mut self) {
        for (id, check) in invariants::SAFETY {
            if self.violations.iter().all(|v| v.check != *id)
                && let Err(text) = check(&self.ghost)
            {
                self.violated(id, text);
            }
        }
    }

    fn violated(&mut self, check: &'static str, text: String) {
        let at = self.now - BEGIN;
        self.say(|| format!("VIOLATED {check}: {text}"));
        self.violations.push(Violation { check, text, at });
    }

    /// Index of the controller, where this life of it is still there. What comes for one that stands still comes later.
    fn controller(&mut self, p: Proc, action: &Action) -> Option<usize> {
        let Proc::Controller(c, inc) = p else { return None };
        let x = self.controllers.get(c).filter(|x| x.inc == inc && x.alive)?;
        if x.paused > self.now {
            self.controllers[c].held.push(action.clone());
            return None;
        }
        Some(c)
    }

    fn agent_of(&self, p: Proc) -> Option<usize> {
        let Proc::Agent(n, inc) = p else { return None };
        self.nodes.get(n).filter(|x| x.agent.as_ref().is_some_and(|a| a.inc == inc)).map(|_| n)
    }

    fn booted(&self, n: usize, boot: u32) -> bool {
        self.nodes[n].powered && self.nodes[n].boot == boot
    }

    fn act(&mut self, action: Action) {
        let to = match &action {
            Action::Answer(p, ..)
            | Action::LeaseTick(p)
            | Action::Drive(p)
            | Action::Wake(p)
            | Action::Settled(p, ..)
            | Action::Dial(p, _)
            | Action::HelloTimeout(p, _)
            | Action::Up(p, ..)
            | Action::SessionLost(p, _)
            | Action::AgentPods(p)
            | Action::AgentWake(p)
            | Action::AgentInput(p, ..)
            | Action::LinkTry(p, _)
            | Action::Linked(p, ..)
            | Action::Acked(p, ..) => Some(*p),
            Action::Pump(w) | Action::Reopen(w, _) => self.watches.get(*w).map(|w| w.owner),
            _ => None,
        };
        match to {
            Some(p @ Proc::Controller(..)) => {
                if let Some(c) = self.controller(p, &action) {
                    self.act_controller(c, action);
                }
            }
            Some(p @ Proc::Agent(..)) => {
                if let Some(n) = self.agent_of(p) {
                    self.act_agent(n, action);
                }
            }
            None => self.act_world(action),
        }
    }

    fn act_controller(&mut self, c: usize, action: Action) {
        match action {
            Action::Answer(_, then, said) => match &then {
                Then::LeaseRead(_) | Then::LeaseTaken(_) | Then::LeaseRenewed(_) | Then::LeaseReread => {
                    self.lease_answer(c, &then, &said);
                }
                _ => self.controller_answer(c, then, &said),
            },
            Action::LeaseTick(_) => self.lease_tick(c),
            Action::Drive(_) => self.drive(c),
            Action::Wake(_) => self.elapse(c),
            Action::Settled(_, cell, id, result) => self.settle(c, cell, id, *result),
            Action::Dial(_, node) => self.dial(c, &node),
            Action::HelloTimeout(_, id) => self.hello_timeout(c, id),
            Action::Up(_, id, message) => self.up(c, id, message),
            Action::SessionLost(_, id) => self.session_lost(c, id),
            Action::Pump(w) => self.pump(w),
            Action::Reopen(w, list) => self.reopen(w, list),
            _ => {}
        }
    }

    fn act_agent(&mut self, n: usize, action: Action) {
        match action {
            Action::Answer(_, then, said) => self.agent_answer(n, then, &said),
            Action::AgentPods(_) => self.agent_pods(n),
            Action::AgentWake(_) => self.agent_wake(n),
            Action::AgentInput(_, pod, input) => self.agent_step(n, &pod, *input),
            Action::LinkTry(_, pod) => self.link_try(n, &pod),
            Action::Linked(_, pod, instance, message) => self.linked(n, &pod, &instance, message),
            Action::Acked(_, pod, id, result) => self.acked(n, &pod, &id, result),
            Action::Pump(w) => self.pump(w),
            Action::Reopen(w, list) => self.reopen(w, list),
            _ => {}
        }
    }

    fn act_world(&mut self, action: Action) {
        match action {
            Action::Arrive(call) => self.arrive(call),
            Action::StartController(c) => self.start_controller(c),
            Action::Resume(c) => self.resume_controller(c),
            Action::Down(id, message) => self.down(id, message),
            Action::SessionEnds(id) => self.session_ends(id),
            Action::SessionForgotten(id) => drop(self.sessions.remove(&id)),
            Action::StartAgent(n) => self.start_agent(n),
            Action::Execute(me, pod, order) => {
                // A launcher carries out what it was sent, whether or not the sender still lives.
                if let Proc::Agent(n, _) = me {
                    self.execute(me, n, &pod, &order);
                }
            }
            Action::AssertNode(n) => self.assert_node(n),
            Action::Launcher(n, pod, instance, event) => self.launcher_event(n, &pod, &instance, event),
            Action::Kubelet(n, boot) if self.booted(n, boot) => self.kubelet(n),
            Action::Container(n, boot, pod) if self.booted(n, boot) => self.container_starts(n, &pod),
            Action::KillContainer(n, boot, pod) if self.booted(n, boot) => self.kill_launcher(n, &pod),
            Action::Heartbeat(n) => self.heartbeat(n),
            Action::PowerOn(n) => self.power_on(n),
            Action::Fence(n) => self.fence(n),
            Action::Unfence(n) => self.unfence(n),
            Action::Schedule => self.schedule(),
            Action::Collect => self.collect(),
            Action::Lifecycle => self.lifecycle(),
            Action::User => self.user(),
            Action::Chaos => self.chaos(),
            Action::Deed(deed) => self.person(*deed),
            Action::Strike(fault, salt) => self.strike(fault, salt),
            _ => {}
        }
    }

    /// What was recorded.
    pub fn log(&self) -> &[String] {
        self.record.as_deref().unwrap_or_default()
    }
}
