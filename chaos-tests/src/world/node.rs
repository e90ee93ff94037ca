//! A node: power, its agent's disk, and the launchers with their guests. A launcher's authority is the real latch; around it
//! stands what `launcher/` does, and a guest that obeys or not.

use super::{
    Action, World,
    agent::{AgentProcess, Disk, PodFacts},
    api::Proc,
    kubelet::{LocalPod, Stage},
    mutants::Mutant,
    server::Seen,
    swarm::Fault,
};
use launcher::latch::{Answer, Asked, Decision, Kind, Latch, Reason, VmiFacts};
use state::{
    Epoch, NodeName, PodUid, ResourceVersion, Timestamp,
    domain::{AckResult, Cause, Domain, DomainState, GuestFacts, InstructKind, Instruction, Outcome, RefusalReason},
};
use std::{collections::BTreeMap, rc::Rc};

/// What a launcher tells who follows it.
#[derive(Debug, Clone)]
// One at a time, never kept in bulk.
#[allow(clippy::large_enum_variant)]
pub enum LinkMessage {
    /// Its level.
    Level(Domain, Option<Outcome>),
    /// It does not answer any more.
    Lost,
}

/// What an agent sends to a launcher.
#[derive(Debug, Clone)]
pub struct Order {
    /// The process that it is for.
    pub instance: String,
    /// Epoch.
    pub epoch: Epoch,
    /// What.
    pub instruction: Instruction,
    /// Version of the VMI that goes with it.
    pub vmi_rv: ResourceVersion,
    /// That VMI.
    pub raw: Option<Rc<Seen>>,
}

/// What happens to a launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LauncherEvent {
    /// The hypervisor has started, or could not.
    Started(bool),
    /// vCPUs run.
    Running,
    /// The guest powered itself off.
    PoweredOff,
    /// Its kernel panicked.
    Panicked,
    /// The hypervisor died.
    Crashed,
    /// The hypervisor has ended as it was told.
    Exited,
    /// The grace period is over.
    Deadline(u64),
    /// The process ends by itself.
    Exit,
}

/// Who wants a domain to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wish {
    Shutdown(u64),
    Destroy,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Life {
    Empty,
    Starting(String),
    Alive,
    Over,
}

/// A launcher process.
#[derive(Debug, Clone)]
pub struct Launcher {
    /// Random per process.
    pub instance: String,
    vmi: String,
    namespace: String,
    vmi_name: String,
    pod_grace: u64,
    latch: Latch,
    life: Life,
    domain: Domain,
    outcome: Option<Outcome>,
    cause: Option<Cause>,
    stopping: bool,
    deadline: Option<u64>,
    postponed: Option<Wish>,
    deaf: u64,
    taken: bool,
    /// The guest hears the power button from then on.
    pub listens: Option<u64>,
}

impl Launcher {
    fn new(instance: String, pod: &PodUid, facts: &LocalPod, now: u64) -> Self {
        let domain = Domain {
            vmi: facts.vmi.as_str().into(),
            pod: pod.clone(),
            launcher: instance.as_str().into(),
            seq: 1,
            state: DomainState::Absent,
            since: Timestamp(now),
            guest: GuestFacts::default(),
            paused_reason: String::new(),
            accelerator: String::new(),
        };
        Self {
            latch: Latch::new(&facts.vmi, pod.as_str()),
            instance,
            vmi: facts.vmi.clone(),
            namespace: facts.namespace.clone(),
            vmi_name: facts.vmi_name.clone(),
            pod_grace: facts.grace,
            life: Life::Empty,
            domain,
            outcome: None,
            cause: None,
            stopping: false,
            deadline: None,
            postponed: None,
            deaf: 0,
            taken: false,
            listens: None,
        }
    }

    /// It takes calls.
    pub fn answers(&self, now: u64) -> bool {
        now >= self.deaf
    }

    /// Who it is and what it has.
    pub fn level(&self) -> (String, Epoch, Domain, Option<Outcome>) {
        (self.instance.clone(), Epoch(self.latch.epoch()), self.domain.clone(), self.outcome.clone())
    }

    fn set(&mut self, state: DomainState, now: u64) {
        if self.domain.state != state {
            self.domain.state = state;
            self.domain.since = Timestamp(now);
            self.domain.seq += 1;
        }
    }
}

/// A node.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub name: NodeName,
    pub powered: bool,
    /// Counts its boots.
    pub boot: u32,
    pub agent: Option<AgentProcess>,
    pub agent_inc: u32,
    pub disk: Disk,
    pub launchers: BTreeMap<PodUid, Box<Launcher>>,
    pub pods: BTreeMap<PodUid, LocalPod>,
    pub kubelet_due: bool,
    /// Its agent and kubelet do not reach the API server until then.
    pub api_cut: u64,
    /// Its agent and the controllers do not reach each other until then.
    pub session_cut: u64,
    /// When its kubelet last told that it lives.
    pub beat: u64,
}

impl Node {
    pub fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            powered: true,
            boot: 1,
            agent: None,
            agent_inc: 0,
            disk: Disk::default(),
            launchers: BTreeMap::new(),
            pods: BTreeMap::new(),
            kubelet_due: false,
            api_cut: 0,
            session_cut: 0,
            beat: 0,
        }
    }

    pub fn reaches_api(&self, now: u64) -> bool {
        self.powered && now >= self.api_cut
    }

    pub fn hears_controllers(&self, now: u64) -> bool {
        self.powered && now >= self.session_cut
    }

    /// The pods as the runtime tells them to the agent.
    pub fn pod_facts(&self) -> BTreeMap<PodUid, PodFacts> {
        self.pods.iter().map(|(uid, p)| (uid.clone(), p.facts())).collect()
    }
}

impl World {
    /// The container of a pod begins.
    pub(super) fn start_launcher(&mut self, n: usize, pod: &PodUid) {
        let instance = self.fresh_id("launcher");
        let now = self.now;
        let node = &mut self.nodes[n];
        let Some(local) = node.pods.get(pod) else { return };
        let launcher = Launcher::new(instance, pod, local, now);
        node.launchers.insert(pod.clone(), Box::new(launcher));
    }

    fn launcher(&mut self, n: usize, pod: &PodUid) -> Option<&mut Launcher> {
        self.nodes[n].launchers.get_mut(pod).map(Box::as_mut)
    }

    pub(super) fn launcher_taken(&mut self, n: usize, pod: &PodUid) {
        let Some(l) = self.launcher(n, pod) else { return };
        if !l.taken {
            l.taken = true;
            let instance = l.instance.clone();
            let pause = self.dice.between(5, 1500);
            self.after(pause, Action::Launcher(n, pod.clone(), instance, LauncherEvent::Exit));
        }
    }

    fn publish_level(&mut self, n: usize, pod: &PodUid) {
        let Some(l) = self.launcher(n, pod) else { return };
        let (instance, _, domain, outcome) = l.level();
        self.link_send(n, pod, &instance, LinkMessage::Level(domain, outcome));
    }

    /// An order of the agent has come.
    pub(super) fn execute(&mut self, me: Proc, n: usize, pod: &PodUid, order: &Order) {
        let now = self.now;
        let id = order.instruction.id.clone();
        let reply = |result| Action::Acked(me, pod.clone(), id.clone(), result);
        let Some(l) = self.nodes[n].launchers.get(pod).filter(|l| l.instance == order.instance) else {
            return self.after(5, reply(None));
        };
        if !l.answers(now) {
            return self.after(30_000, reply(None));
        }
        let answer = self.decide(n, pod, order);
        let lag = self.dice.between(1, 20);
        self.after(lag, reply(Some(answer)));
    }

    fn decide(&mut self, n: usize, pod: &PodUid, order: &Order) -> AckResult {
        let kind = match order.instruction.kind {
            InstructKind::Start => Kind::Start,
            InstructKind::Shutdown => Kind::Shutdown,
            InstructKind::Kill => Kind::Kill,
            InstructKind::Pause => Kind::Pause,
            InstructKind::Resume => Kind::Resume,
        };
        let mut facts = order.raw.as_ref().map(|r| VmiFacts::read(&r.value, pod.as_str()));
        if self.is(Mutant::NoAuthority)
            && let Some(f) = &mut facts
        {
            (f.deleting, f.phase, f.names_this_pod) = (false, "Scheduled".into(), true);
        }
        let i = &order.instruction;
        let rv = order.vmi_rv.to_string();
        let (forgets, open) = (self.is(Mutant::LauncherForgets), self.is(Mutant::LatchOff));
        let Some(l) = self.launcher(n, pod) else {
            return AckResult::Refused {
                reason: RefusalReason::Failed,
                message: "no launcher".into(),
                rv_seen: order.vmi_rv,
            };
        };
        if forgets || (open && kind == Kind::Start) {
            l.latch = Latch::new(&l.vmi, pod.as_str());
            if l.life == Life::Alive && kind != Kind::Start {
                // It forgets what it answered, not that there is a domain.
                let start = Asked {
                    epoch: 0,
                    id: "",
                    kind: Kind::Start,
                    vmi_uid: &l.vmi.clone(),
                    pod_uid: pod.as_str(),
                    vmi_rv: "0",
                    vmi: Some(&VmiFacts {
                        uid: l.vmi.clone(),
                        resource_version: "0".into(),
                        deleting: false,
                        phase: "Running".into(),
                        names_this_pod: true,
                    }),
                };
                l.latch.decide(&start);
            }
        }
        let asked = Asked {
            epoch: order.epoch.0,
            id: i.id.as_str(),
            kind,
            vmi_uid: i.vmi.as_str(),
            pod_uid: i.pod.as_str(),
            vmi_rv: &rv,
            vmi: facts.as_ref(),
        };
        let decision = l.latch.decide(&asked);
        let instance = l.instance.clone();
        self.say(|| format!("launcher of {pod}: {:?} epoch {} -> {decision:?}", i.kind, order.epoch));
        match decision {
            Decision::Answer(answer) => ack(answer, order.vmi_rv),
            Decision::Close => {
                self.over(n, pod, Cause::Destroyed);
                AckResult::Done { detail: "nothing was started".into() }
            }
            Decision::Begin(what) => {
                self.observe_begin(n, pod, &instance, order);
                match what {
                    Kind::Start => self.launcher_start(n, pod, i.id.as_str()),
                    Kind::Shutdown => self.wish(n, pod, Wish::Shutdown(i.deadline.0)),
                    Kind::Kill => self.wish(n, pod, Wish::Destroy),
                    Kind::Pause | Kind::Resume => {}
                }
                AckResult::Accepted
            }
        }
    }

    fn launcher_later(&mut self, n: usize, pod: &PodUid, wait: u64, event: LauncherEvent) {
        if let Some(instance) = self.launcher(n, pod).map(|l| l.instance.clone()) {
            self.after(wait, Action::Launcher(n, pod.clone(), instance, event));
        }
    }

    fn launcher_start(&mut self, n: usize, pod: &PodUid, id: &str) {
        let now = self.now;
        let ok = self.strikes(Fault::StartFails, || format!("node {n} guest")).is_none();
        let wait = self.dice.between(20, 400);
        if let Some(l) = self.launcher(n, pod) {
            if l.life != Life::Alive {
                l.life = Life::Starting(id.into());
            }
            l.set(DomainState::Starting, now);
        }
        self.publish_level(n, pod);
        self.launcher_later(n, pod, wait, LauncherEvent::Started(ok));
    }

    /// Something happens to a launcher.
    pub(super) fn launcher_event(&mut self, n: usize, pod: &PodUid, instance: &str, event: LauncherEvent) {
        let now = self.now;
        let twice = self.is(Mutant::LatchOff) || self.is(Mutant::LauncherForgets);
        let Some(l) = self.nodes[n].launchers.get_mut(pod).filter(|l| l.instance == instance) else { return };
        match event {
            LauncherEvent::Started(ok) => {
                let id = match &l.life {
                    Life::Starting(id) => id.clone(),
                    Life::Alive if twice => String::new(),
                    Life::Empty | Life::Alive | Life::Over => return,
                };
                if !ok {
                    let refused = Answer::Refused(Reason::Failed, "the hypervisor did not start".into());
                    l.latch.settled(&id, refused);
                    return self.over(n, pod, Cause::StartFailed);
                }
                l.latch.settled(&id, Answer::Done("started".into()));
                l.life = Life::Alive;
                let postponed = l.postponed.take();
                self.observe_executing(n, pod);
                let deaf = self.strikes(Fault::GuestDeaf, || format!("node {n}")).is_some();
                let boot = self.dice.between(10, 3000);
                if let Some(l) = self.launcher(n, pod) {
                    l.listens = (!deaf).then_some(now + boot);
                }
                let wait = self.dice.between(1, 20);
                self.launcher_later(n, pod, wait, LauncherEvent::Running);
                if let Some(w) = postponed {
                    self.wish(n, pod, w);
                }
            }
            LauncherEvent::Running if l.life == Life::Alive && !l.stopping && l.cause.is_none() => {
                l.set(DomainState::Running, now);
                self.publish_level(n, pod);
            }
            LauncherEvent::PoweredOff => self.finish(n, pod, Cause::GuestShutdown),
            LauncherEvent::Panicked => self.finish(n, pod, Cause::Panicked),
            LauncherEvent::Deadline(at) if l.deadline == Some(at) => {
                l.deadline = None;
                if l.life == Life::Alive && l.cause.is_none() {
                    let vmi = l.vmi.clone();
                    self.ghost.grace_is_over(&vmi, pod.as_str(), now);
                }
                self.finish(n, pod, Cause::KilledAfterGrace);
            }
            LauncherEvent::Crashed if l.life == Life::Alive => {
                let cause = l.cause.unwrap_or(Cause::Crashed);
                self.over(n, pod, cause);
            }
            LauncherEvent::Exited if l.life == Life::Alive => {
                let cause = l.cause.unwrap_or(Cause::Destroyed);
                self.over(n, pod, cause);
            }
            LauncherEvent::Exit => self.launcher_exits(n, pod),
            LauncherEvent::Running | LauncherEvent::Deadline(_) | LauncherEvent::Crashed | LauncherEvent::Exited => {}
        }
    }

    /// Whether an event would still change a launcher.
    pub(super) fn launcher_awaits(&self, n: usize, pod: &PodUid, instance: &str, event: LauncherEvent) -> bool {
        let Some(l) = self.nodes[n].launchers.get(pod).filter(|l| l.instance == instance) else { return false };
        let alive = l.life == Life::Alive;
        match event {
            LauncherEvent::Started(_) => matches!(l.life, Life::Starting(_)),
            LauncherEvent::Running => alive && !l.stopping && l.cause.is_none(),
            LauncherEvent::PoweredOff | LauncherEvent::Panicked => alive && l.cause.is_none(),
            LauncherEvent::Crashed | LauncherEvent::Exited => alive,
            LauncherEvent::Deadline(at) => l.deadline == Some(at),
            LauncherEvent::Exit => true,
        }
    }

    fn wish(&mut self, n: usize, pod: &PodUid, wish: Wish) {
        let (now, hurries) = (self.now, self.is(Mutant::GraceHalved));
        let Some(l) = self.launcher(n, pod) else { return };
        match l.life {
            Life::Empty | Life::Over => {}
            Life::Starting(_) => {
                if l.postponed != Some(Wish::Destroy) {
                    l.postponed = Some(wish);
                }
            }
            Life::Alive => match wish {
                Wish::Destroy => self.finish(n, pod, Cause::Destroyed),
                Wish::Shutdown(grace) => {
                    let at = now + if hurries { grace / 2 } else { grace };
                    let at = l.deadline.map_or(at, |d| d.min(at));
                    l.deadline = Some(at);
                    let first = !l.stopping;
                    l.stopping = true;
                    l.set(DomainState::ShuttingDown, now);
                    let listens = l.listens.filter(|_| first);
                    self.launcher_later(n, pod, at - now, LauncherEvent::Deadline(at));
                    if let Some(t) = listens {
                        let wait = t.saturating_sub(now) + self.dice.between(20, 1500);
                        self.launcher_later(n, pod, wait, LauncherEvent::PoweredOff);
                    }
                    self.publish_level(n, pod);
                }
            },
        }
    }

    /// Notes why, and ends the hypervisor in order.
    fn finish(&mut self, n: usize, pod: &PodUid, cause: Cause) {
        let now = self.now;
        let Some(l) = self.launcher(n, pod) else { return };
        if l.life != Life::Alive || l.cause.is_some() {
            return;
        }
        l.cause = Some(cause);
        l.set(DomainState::ShuttingDown, now);
        self.publish_level(n, pod);
        let wait = self.dice.between(1, 300);
        self.launcher_later(n, pod, wait, LauncherEvent::Exited);
    }

    /// The end: level, outcome and termination message.
    fn over(&mut self, n: usize, pod: &PodUid, cause: Cause) {
        let now = self.now;
        let Some(l) = self.launcher(n, pod) else { return };
        if l.life == Life::Over {
            return;
        }
        l.life = Life::Over;
        l.latch.ended();
        l.set(DomainState::Stopped, now);
        l.domain.seq += 1;
        l.outcome = Some(Outcome {
            vmi: l.vmi.as_str().into(),
            pod: pod.clone(),
            cause,
            exit: 0,
            seq: l.domain.seq,
            message: String::new(),
            at: Timestamp(now),
        });
        self.say(|| format!("the domain of {pod} is over: {cause:?}"));
        self.observe_ended(n, pod);
        self.publish_level(n, pod);
        self.launcher_later(n, pod, 15_000, LauncherEvent::Exit);
    }

    /// SIGTERM of the runtime.
    pub(super) fn terminate_launcher(&mut self, n: usize, pod: &PodUid) {
        let Some(l) = self.launcher(n, pod) else { return };
        let grace = l.pod_grace;
        if l.latch.close() {
            self.observe_terminated(pod);
            self.wish(n, pod, Wish::Shutdown(grace));
        } else if l.life == Life::Empty {
            self.over(n, pod, Cause::Destroyed);
        }
    }

    /// The process has ended by itself: code and termination message follow from how the domain ended.
    fn launcher_exits(&mut self, n: usize, pod: &PodUid) {
        let Some(l) = self.nodes[n].launchers.remove(pod) else { return };
        let cause = l.outcome.as_ref().map_or(Cause::OutcomeUnknown, |o| o.cause);
        let code = match cause {
            Cause::GuestShutdown | Cause::KilledAfterGrace | Cause::Destroyed => launcher::outcome::EXIT_OK,
            Cause::StartFailed => launcher::outcome::EXIT_START_FAILED,
            Cause::Panicked => launcher::outcome::EXIT_PANICKED,
            Cause::Crashed | Cause::OutcomeUnknown => launcher::outcome::EXIT_CRASHED,
        };
        let message = serde_json::json!({"vmiUid": l.vmi, "podUid": pod.as_str(), "cause": cause.name(), "exit": 0,
            "seq": l.domain.seq, "message": "", "atUnixMs": self.now});
        self.link_send(n, pod, &l.instance, LinkMessage::Lost);
        self.container_ended(n, pod, code, &message.to_string());
    }

    /// SIGKILL: the guest goes with it, and nobody can tell how it would have ended.
    pub(super) fn kill_launcher(&mut self, n: usize, pod: &PodUid) {
        let Some(l) = self.nodes[n].launchers.remove(pod) else { return };
        self.say(|| format!("the launcher of {pod} is killed"));
        self.observe_ended(n, pod);
        self.link_send(n, pod, &l.instance, LinkMessage::Lost);
        self.container_ended(n, pod, 137, "");
    }

    /// A launcher stands still for a while; who talks to it hears nothing.
    pub(super) fn deafen_launcher(&mut self, n: usize, pod: &PodUid, how_long: u64) {
        let until = self.now + how_long;
        let Some(l) = self.launcher(n, pod) else { return };
        l.deaf = l.deaf.max(until);
        let instance = l.instance.clone();
        self.link_send(n, pod, &instance, LinkMessage::Lost);
    }

    /// A guest ends by itself.
    pub(super) fn end_guest(&mut self, n: usize, pod: &PodUid, event: LauncherEvent) {
        let alive = self.launcher(n, pod).is_some_and(|l| l.life == Life::Alive);
        if alive {
            self.say(|| format!("the guest of {pod}: {event:?}"));
            self.launcher_later(n, pod, 0, event);
        }
    }

    /// Pods whose guests run on a node, with the namespace and name of the VMI.
    pub(super) fn guests(&self, n: usize) -> Vec<(PodUid, String)> {
        let alive = self.nodes[n].launchers.iter().filter(|(_, l)| l.life == Life::Alive);
        alive.map(|(p, l)| (p.clone(), format!("{}/{}", l.namespace, l.vmi_name))).collect()
    }

    /// The power is gone: every process of the node, and what was not on disk.
    pub(super) fn power_off(&mut self, n: usize) {
        if !self.nodes[n].powered {
            return;
        }
        self.say(|| format!("node {n} loses power"));
        self.crash_agent(n);
        let pods: Vec<PodUid> = self.nodes[n].launchers.keys().cloned().collect();
        for pod in pods {
            self.observe_ended(n, &pod);
        }
        let node = &mut self.nodes[n];
        node.powered = false;
        node.boot += 1;
        node.launchers.clear();
        // What had no container yet begins anew.
        node.pods.retain(|_, p| p.stage != Stage::Preparing);
        for p in node.pods.values_mut() {
            p.lose();
        }
    }

    pub(super) fn power_on(&mut self, n: usize) {
        if self.nodes[n].powered {
            return;
        }
        self.say(|| format!("node {n} has power again"));
        self.nodes[n].powered = true;
        self.nodes[n].kubelet_due = false;
        self.kubelet_soon(n);
        let pause = self.dice.between(100, 5000);
        self.after(pause, Action::StartAgent(n));
    }
}

fn ack(answer: Answer, rv_seen: ResourceVersion) -> AckResult {
    match answer {
        Answer::Accepted => AckResult::Accepted,
        Answer::Done(detail) => AckResult::Done { detail },
        Answer::Refused(reason, message) => {
            AckResult::Refused { reason: RefusalReason::parse(reason.code()), message, rv_seen }
        }
    }
}
