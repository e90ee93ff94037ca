//! A history, made by comparing what was known before and after each step.

use super::{Actor, Called, Entry};
use crate::{
    Event, Key, Machine, NodeName, Timestamp,
    domain::{Cause, DomainState},
    observe::{Phase, Request},
    trace::Step,
    vm::{
        Input, Vm,
        facts::{Facts, PodFacts, VmFacts, VmiFacts},
        strategy::RERUN_OF,
        waits::{Wait, Weight},
    },
};
use api::names;

/// Entries that are kept; the oldest go first.
const ENTRIES: usize = 300;
/// Statuses that are kept; the oldest go first.
const STATUSES: usize = 200;
/// An object that was seen later than this after it was made was there before anybody looked.
const FRESH: crate::Millis = crate::Millis::secs(3);

/// The story of one cell.
#[derive(Debug)]
pub struct Story {
    cell: Vm,
    /// What is known, over the lives of several controllers.
    facts: Facts,
    entries: Vec<Entry>,
    statuses: Vec<Called>,
    waits: Vec<(Wait, Timestamp)>,
    steps: Vec<(Step, Timestamp, Timestamp)>,
    operation: Option<(Timestamp, bool)>,
    latest: Timestamp,
    /// When the VM was seen first.
    seen: Option<Timestamp>,
    steps_seen: u64,
}

impl Story {
    /// An empty story.
    pub fn new(key: Key) -> Self {
        Self {
            cell: Vm::new(key),
            facts: Facts::default(),
            entries: vec![],
            statuses: vec![],
            waits: vec![],
            steps: vec![],
            operation: None,
            latest: Timestamp::default(),
            seen: None,
            steps_seen: 0,
        }
    }

    /// One recorded step: the cell before it, where the record has it; whether it is the first of a process.
    pub fn step(&mut self, state: Option<&Vm>, first: bool, event: &Event<Input>) {
        if let Some(cell) = state {
            self.cell = cell.clone();
        } else if first {
            self.cell = Vm::new(self.cell.key().clone());
        }
        if first && self.steps_seen > 0 {
            self.tell(event.at, Actor::Controller, "started anew, or another took over");
        }
        self.steps_seen += 1;
        let _ = self.cell.step(event);
        let facts = self.cell.known();
        self.look(event.at, facts);
    }

    /// How many steps it is made from.
    pub fn len(&self) -> u64 {
        self.steps_seen
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.steps_seen == 0
    }

    /// Time of the newest step.
    pub fn latest(&self) -> Timestamp {
        self.latest
    }

    pub(super) fn facts(&self) -> &Facts {
        &self.facts
    }

    pub(super) fn steps(&self) -> &[(Step, Timestamp, Timestamp)] {
        &self.steps
    }

    /// What it was called, newest last.
    pub(super) fn statuses(&self) -> &[Called] {
        &self.statuses
    }

    /// When the last start or stop began, and whether it is a stop.
    pub(super) fn operation(&self) -> Option<(Timestamp, bool)> {
        self.operation
    }

    /// Since when the cell waits for this.
    pub(super) fn since(&self, wait: &Wait) -> Option<Timestamp> {
        self.waits.iter().find(|(w, _)| same(w, wait)).map(|(_, since)| *since)
    }

    pub(super) fn into_entries(mut self) -> Vec<Entry> {
        self.entries.sort_by_key(|e| e.time);
        self.entries
    }

    fn tell(&mut self, at: Timestamp, actor: Actor, message: impl Into<String>) {
        self.push(at, actor, message.into(), false);
    }

    fn push(&mut self, time: Timestamp, actor: Actor, message: String, problem: bool) {
        if let Some(e) = self.entries.iter_mut().rev().take(2).find(|e| e.actor == actor && e.message == message) {
            e.count += 1;
            e.last = time;
            return;
        }
        self.entries.push(Entry { time, actor, message, problem, count: 1, last: time });
        if self.entries.len() > ENTRIES {
            self.entries.remove(0);
        }
    }

    /// Compares with what is known and tells what is new.
    pub fn look(&mut self, at: Timestamp, new: Facts) {
        self.latest = self.latest.max(at);
        let old = std::mem::take(&mut self.facts);
        self.vm(at, old.vm.as_ref(), &new);
        self.vmi(at, &old, &new);
        self.pod(at, &old, &new);
        self.domain(at, &old, &new);
        self.end(at, &old, &new);
        self.waits(at, &old, &new);
        if let Some(began) = new.began {
            // A controller that takes over may think for a moment that it begins what is done already.
            let from_the_start =
                new.steps.first().map(|(s, ..)| matches!(s, Step::Create | Step::Shutdown | Step::Teardown));
            if from_the_start != Some(false) {
                self.operation = Some((began, new.stopping));
            }
            if from_the_start == Some(true) || (from_the_start == Some(false) && self.steps.is_empty()) {
                self.steps.clone_from(&new.steps);
            }
            // An object's own time has whole seconds; it was made when it was seen, within them.
            if let (Some((Step::Create, start, _)), Some(seen)) = (self.steps.first_mut(), self.seen)
                && seen.since(*start) <= crate::Millis::secs(1)
            {
                *start = seen.max(*start);
            }
        }
        // What is not seen yet by a controller that has just begun is not gone.
        let another = matches!((&old.vmi, &new.vmi), (Some(a), Some(b)) if a.uid != b.uid) || new.no_vmi;
        self.facts = Facts {
            vm: new.vm.or_else(|| old.vm.filter(|_| !new.no_vm)),
            vmi: new.vmi.or_else(|| old.vmi.filter(|_| !new.no_vmi)),
            pod: new.pod.or_else(|| old.pod.filter(|_| !new.no_pod && !another)),
            domain: new.domain.or_else(|| old.domain.filter(|_| !another)),
            ended: new.ended.or_else(|| old.ended.filter(|_| !another)),
            agent_connected: new.agent_connected,
            no_vm: new.no_vm,
            no_vmi: new.no_vmi,
            no_pod: new.no_pod,
            fenced: new.fenced,
            began: new.began,
            steps: vec![],
            stopping: new.stopping,
            waits: new.waits,
        };
        self.called(at);
    }

    /// Remembers what it is called, where that has changed.
    fn called(&mut self, at: Timestamp) {
        let (vm, vmi) = (self.facts.vm.as_ref(), self.facts.vmi.as_ref());
        let printable = vm.map(|v| v.printable.as_str()).filter(|p| !p.is_empty());
        let status = printable.or(vmi.map(|v| v.phase.name())).unwrap_or_default();
        if self.statuses.last().map_or("", |last| &last.status) == status {
            return;
        }
        // What was so before anybody looked was so since it was written.
        let written = || vmi.and_then(|v| v.phases.iter().find(|(p, _)| *p == v.phase)).map(|(_, since)| *since);
        let since = if self.statuses.is_empty() { made(written(), at) } else { at };
        self.statuses.push(Called { since, status: status.to_owned() });
        if self.statuses.len() > STATUSES {
            self.statuses.remove(0);
        }
    }

    fn vm(&mut self, at: Timestamp, old: Option<&VmFacts>, new: &Facts) {
        let Some(vm) = &new.vm else {
            if new.no_vm && old.is_some() {
                self.tell(at, Actor::Controller, "let the virtual machine go: it is gone");
            }
            return;
        };
        let by = || Actor::User(vm.by.clone());
        match old.filter(|o| o.uid == vm.uid) {
            None => {
                self.seen = Some(at);
                let by = if vm.generation <= 1 { by() } else { Actor::User(None) };
                let text = format!("created the virtual machine (run strategy {})", vm.strategy.name());
                self.tell(made(vm.created, at), by, text);
                if vm.generation > 1 {
                    let text = format!("has changed its spec since (generation {})", vm.generation);
                    self.tell(at, Actor::User(vm.by.clone()), text);
                }
                self.requests(at, &[], &vm.requests);
                if let Some(since) = vm.deleting {
                    self.tell(since, Actor::User(None), "deleted the virtual machine");
                }
            }
            Some(o) => {
                if o.strategy != vm.strategy {
                    let text = format!("changed the run strategy from {} to {}", o.strategy.name(), vm.strategy.name());
                    self.tell(at, by(), text);
                } else if o.generation < vm.generation && o.deleting == vm.deleting {
                    // A deletion counts as a generation, too.
                    self.tell(at, by(), format!("changed its spec (generation {})", vm.generation));
                }
                self.requests(at, &o.requests, &vm.requests);
                if o.deleting.is_none() && vm.deleting.is_some() {
                    self.tell(at, Actor::User(None), "deleted the virtual machine");
                }
            }
        }
    }

    fn requests(&mut self, at: Timestamp, old: &[Request], new: &[Request]) {
        for r in new.iter().filter(|r| !old.contains(r)) {
            let actor = Actor::User(r.data.get(names::REQUESTED_BY).cloned());
            match (r.action.as_str(), r.data.contains_key(RERUN_OF)) {
                ("Start", true) => self.tell(at, Actor::Controller, "will start it again, because it failed"),
                ("Start", false) => self.tell(at, actor, "asked for a start"),
                ("Stop", _) => self.tell(at, actor, "asked for a stop"),
                (other, _) => self.tell(at, actor, format!("asked for {other}, which nobody knows")),
            }
        }
    }

    fn vmi(&mut self, at: Timestamp, old: &Facts, new: &Facts) {
        let before = old.vmi.as_ref();
        let Some(vmi) = &new.vmi else {
            if new.no_vmi && before.is_some() {
                self.tell(at, Actor::Controller, "let the instance go: it is gone");
            }
            return;
        };
        let Some(o) = before.filter(|o| o.uid == vmi.uid) else {
            return self.first_vmi(at, vmi);
        };
        if o.deleting.is_none() && vmi.deleting.is_some() {
            if old.vm.as_ref().is_some_and(|v| v.stops) {
                self.tell(at, Actor::Controller, "deleted the instance, to stop it");
            } else {
                self.tell(at, Actor::User(None), "deleted the instance");
            }
        }
        let late = |p: Phase| p >= Phase::Scheduled && p <= Phase::Running;
        if o.phase < Phase::Scheduled
            && late(vmi.phase)
            && let Some(node) = &vmi.node
        {
            self.tell(at, Actor::Controller, format!("allowed node {node} to start the guest"));
        }
    }

    /// An instance that was not known: made just now, or long before anybody looked.
    fn first_vmi(&mut self, at: Timestamp, vmi: &VmiFacts) {
        let actor = if vmi.owned { Actor::Controller } else { Actor::User(vmi.by.clone()) };
        self.tell(made(vmi.created, at), actor, "created the instance");
        // Of an instance that stands for longer, its own record tells the rest.
        for (phase, since) in vmi.phases.iter().filter(|(p, _)| *p > Phase::Pending) {
            match (phase, &vmi.node) {
                (Phase::Scheduled, Some(node)) => {
                    self.tell(*since, Actor::Controller, format!("allowed node {node} to start the guest"));
                }
                (Phase::Running, Some(node)) => self.tell(*since, Actor::Agent(node.clone()), "runs the guest"),
                (Phase::Failed, _) => {
                    self.push(*since, Actor::Controller, format!("saw it end: {}", vmi.words), true);
                }
                (Phase::Succeeded, _) => self.tell(*since, Actor::Guest, "shut down"),
                (
                    Phase::Unset
                    | Phase::Pending
                    | Phase::Scheduling
                    | Phase::Scheduled
                    | Phase::Running
                    | Phase::Unknown,
                    _,
                ) => {}
            }
        }
        if let Some(since) = vmi.deleting {
            self.tell(since, Actor::User(None), "deleted the instance");
        }
    }

    fn pod(&mut self, at: Timestamp, old: &Facts, new: &Facts) {
        let before = old.pod.as_ref();
        let Some(pod) = &new.pod else {
            if let Some(p) = before.filter(|_| new.no_pod || new.no_vmi) {
                let actor = p.node.clone().map_or(Actor::ApiServer, Actor::Kubelet);
                self.tell(at, actor, "removed the launcher pod");
            }
            return;
        };
        let o = before.filter(|o| o.uid == pod.uid);
        // A controller that finds a machine running need not tell how it came to that.
        let found = before.is_none() && new.vmi.as_ref().is_some_and(|v| v.phase >= Phase::Scheduled);
        if o.is_none() && !found {
            self.tell(at, Actor::Controller, format!("created the launcher pod {}", pod.name));
        }
        let was = |f: &dyn Fn(&PodFacts) -> bool| found || o.is_some_and(f);
        if let Some(node) = &pod.node {
            if !was(&|o| o.node.is_some()) {
                self.tell(at, Actor::Scheduler, format!("placed the launcher pod on node {node}"));
            }
            if pod.runs && !was(&|o| o.runs) {
                self.tell(at, Actor::Kubelet(node.clone()), "started the launcher");
            }
            if let Some((reason, exit)) = pod.ended.as_ref().filter(|_| !was(&|o| o.ended.is_some())) {
                let text = format!("saw the launcher end ({reason}, exit code {exit})");
                self.push(at, Actor::Kubelet(node.clone()), text, *exit != 0);
            }
        }
        let alone = new.vmi.as_ref().is_some_and(|v| v.deleting.is_none()) && pod.ended.is_none();
        if pod.deleting && !was(&|o| o.deleting) && alone {
            match &new.fenced {
                // Whoever tainted the node did it, by way of the collector.
                Some(node) => {
                    let text = format!("deleted the launcher pod, because node {node} is tainted out-of-service");
                    self.push(at, Actor::ApiServer, text, true);
                }
                None => self.push(at, Actor::User(None), "deleted the launcher pod".into(), true),
            }
        }
    }

    fn domain(&mut self, at: Timestamp, old: &Facts, new: &Facts) {
        let (Some(vmi), Some((state, why, accelerator))) = (&new.vmi, &new.domain) else { return };
        let node = vmi.node.clone().unwrap_or_else(|| NodeName("?".into()));
        let same = old.vmi.as_ref().is_some_and(|o| o.uid == vmi.uid);
        let before = old.domain.as_ref().filter(|_| same).map(|d| d.0);
        let agent = || Actor::Agent(node.clone());
        // First sight of a machine that has been running, of which the instance's phases told already.
        let found = old.vmi.is_none() && vmi.phase == Phase::Running;
        match (before, *state) {
            (b, s) if b == Some(s) => {}
            (Some(DomainState::Paused), DomainState::Running) => {
                self.tell(at, Actor::User(None), "unpaused the guest");
            }
            (b, DomainState::Running) if b != Some(DomainState::Deaf) && !found => {
                let with = if accelerator.is_empty() { String::new() } else { format!(" ({accelerator})") };
                self.tell(at, agent(), format!("runs the guest{with}"));
            }
            (_, DomainState::Starting) => self.tell(at, agent(), "starts the hypervisor"),
            (_, DomainState::Paused) => match why.as_str() {
                "PausedIOError" => {
                    let text = "stopped the guest's processors: an error of its disks' storage";
                    self.push(at, agent(), text.into(), true);
                }
                "" | "PausedByUser" => self.tell(at, Actor::User(None), "paused the guest"),
                other => self.tell(at, agent(), format!("paused the guest ({other})")),
            },
            (_, DomainState::ShuttingDown)
                if vmi.deleting.is_some() || new.pod.as_ref().is_some_and(|p| p.deleting) =>
            {
                self.tell(at, agent(), "pressed the guest's power button");
            }
            // It goes down by itself, which is told with how it ended.
            (_, DomainState::ShuttingDown) => {}
            // Told with how it ended, or with the wait that it is.
            (_, DomainState::Absent | DomainState::Deaf | DomainState::Stopped | DomainState::Running) => {}
        }
        if new.agent_connected && !old.agent_connected && !found {
            self.tell(at, Actor::Guest, "its guest agent answers");
        }
        if old.agent_connected && same && !new.agent_connected && *state == DomainState::Running {
            self.tell(at, Actor::Guest, "its guest agent does not answer any more");
        }
    }

    /// The instance ended.
    fn end(&mut self, at: Timestamp, old: &Facts, new: &Facts) {
        let Some(vmi) = new.vmi.as_ref().filter(|v| v.phase.is_final()) else { return };
        let known = old.vmi.as_ref().filter(|o| o.uid == vmi.uid);
        if known.is_none_or(|o| o.phase.is_final()) {
            return;
        }
        let agent = vmi.node.clone().map_or(Actor::Controller, Actor::Agent);
        let ended = new.ended.as_ref().or(old.ended.as_ref());
        let said =
            ended.filter(|(cause, _)| vmi.phase == Phase::Succeeded || vmi.reason.as_deref() == Some(cause.name()));
        let Some((cause, message)) = said else {
            // What ends because it was to go away is no problem.
            let problem = vmi.phase == Phase::Failed && vmi.deleting.is_none();
            return self.push(at, Actor::Controller, format!("saw it end: {}", vmi.words), problem);
        };
        let more = if message.is_empty() { String::new() } else { format!(": {message}") };
        let asked = vmi.deleting.is_some();
        match cause {
            Cause::GuestShutdown if asked => self.tell(at, Actor::Guest, "shut down, as it was asked to"),
            Cause::GuestShutdown => self.tell(at, Actor::Guest, "powered itself off"),
            Cause::Panicked => self.push(at, Actor::Guest, format!("panicked{more}"), true),
            Cause::Crashed => self.push(at, agent, format!("saw the hypervisor crash{more}"), true),
            Cause::KilledAfterGrace => {
                self.push(at, agent, format!("killed the guest, which did not shut down in time{more}"), true);
            }
            Cause::Destroyed => self.tell(at, agent, format!("killed the guest, as somebody asked{more}")),
            Cause::StartFailed => self.push(at, agent, format!("could not start the guest{more}"), true),
            Cause::OutcomeUnknown => {
                self.push(at, Actor::Controller, format!("does not know how the guest ended{more}"), true);
            }
        }
    }

    fn waits(&mut self, at: Timestamp, old: &Facts, new: &Facts) {
        let kept = std::mem::take(&mut self.waits);
        let since = |w: &Wait| kept.iter().find(|(k, _)| same(k, w)).map_or(at, |(_, t)| *t);
        self.waits = new.waits.iter().map(|w| (w.clone(), since(w))).collect();
        let told = |w: &Wait| old.waits.iter().any(|o| says_the_same(o, w));
        for w in new.waits.iter().filter(|w| w.weight() == Weight::Problem && !told(w)) {
            let node = new.vmi.as_ref().and_then(|v| v.node.clone());
            let on_node = |to: fn(NodeName) -> Actor| node.clone().map_or(Actor::Controller, to);
            let (actor, text) = match w {
                Wait::Unschedulable { message, .. } => (Actor::Scheduler, format!("found no node: {message}")),
                Wait::Image { reason, message } => (on_node(Actor::Kubelet), format!("{reason}: {message}")),
                Wait::Container { reason, message, .. } => (on_node(Actor::Kubelet), format!("{reason}: {message}")),
                Wait::Refused { what, message, .. } => {
                    (Actor::ApiServer, format!("refused the write of its {what}: {message}"))
                }
                Wait::StartRefused(m) => (on_node(Actor::Agent), format!("refused to start the guest: {m}")),
                // Told as what happened.
                Wait::Ended { .. } | Wait::Paused { .. } => continue,
                // The count and the time differ, the cause does not.
                Wait::CrashLoop { .. } => (Actor::Controller, format!("waits for {}", w.what())),
                Wait::MissingClaim { .. }
                | Wait::MissingPattern { .. }
                | Wait::NoAnswer(_)
                | Wait::Unreachable { .. }
                | Wait::ForeignInstance(_)
                | Wait::Unsupported(_)
                | Wait::Finalizers { .. }
                | Wait::Instance
                | Wait::Pod
                | Wait::Placement(_)
                | Wait::Preparation { .. }
                | Wait::Acceptance(_)
                | Wait::Session(_)
                | Wait::Hypervisor(_)
                | Wait::Readiness { .. }
                | Wait::Shutdown(_)
                | Wait::PodRemoval(_)
                | Wait::InstanceRemoval
                | Wait::RestartRequired(_)
                | Wait::Off(_) => (Actor::Controller, format!("waits for {}: {}", w.what(), w.message())),
            };
            self.push(at, actor, text, true);
        }
        for w in old.waits.iter().filter(|w| new.waits.iter().all(|n| !same(w, n))) {
            if let (Wait::MissingClaim { claim, .. }, Some(_)) = (w, &new.vmi) {
                self.tell(at, Actor::ApiServer, format!("has PersistentVolumeClaim {claim} now"));
            }
            // Of an instance that is over by now nobody waits for an answer.
            let asked =
                new.vmi.as_ref().filter(|v| !v.phase.is_final() && old.vmi.as_ref().is_some_and(|o| o.uid == v.uid));
            if let (Wait::Unreachable { .. }, Some(node)) = (w, asked.and_then(|v| v.node.clone())) {
                self.tell(at, Actor::Agent(node), "answers again");
            }
        }
    }
}

/// The same wait, whatever its words are by now.
fn same(a: &Wait, b: &Wait) -> bool {
    std::mem::discriminant(a) == std::mem::discriminant(b)
}

/// The same in the same words. Which claims have no volume is told where it matters, in the wait itself.
fn says_the_same(a: &Wait, b: &Wait) -> bool {
    match (a, b) {
        (Wait::Unschedulable { message: a, .. }, Wait::Unschedulable { message: b, .. }) => a == b,
        (a, b) => a == b,
    }
}

/// When something was made: its own timestamp has whole seconds, so what was seen at once is told with the time of that.
fn made(created: Option<Timestamp>, at: Timestamp) -> Timestamp {
    created.filter(|t| at.since(*t) > FRESH).unwrap_or(at)
}
