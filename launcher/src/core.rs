//! The one task that owns the domain: it folds what is asked and what happens into the level that watchers see.
//!
//! Nothing in its loop waits for QEMU or the guest: requests to them run as tasks of their own and come back as
//! [`Back`]. So a hypervisor or an agent that hangs never keeps anybody from asking, and never delays a kill.

mod ending;
mod steps;
mod verbs;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use proto::agent::{
    Accepted, Ack, Domain, DomainState, Done, GuestFacts, InstructKind, Interface, Outcome, Refused, VerbReply,
    VerbRequest, ack,
};
use proto::launcher::{InfoReply, NodeFacts, Order, ProbeReply, ProbeRequest, StatsReply};
use tokio::sync::{mpsc, oneshot, watch};

use crate::config::Config;
use crate::fds::Descriptors;
use crate::guest::{Agent, AgentError, AgentLevel};
use crate::hypervisor::{self, Driver, Event, Paused, Start, Started};
use crate::latch::{Answer, Asked, Decision, Kind, Latch, Reason, VmiFacts};
use crate::time::{Boottime, unix_ms, unix_us};
use crate::{limits, stats};
use ending::{Ending, Wish};

/// What watchers see.
#[derive(Clone, Debug, Default)]
pub(crate) struct Level {
    pub domain: Domain,
    pub outcome: Option<Outcome>,
    /// Steps that nobody has told yet, the oldest first.
    pub steps: std::collections::VecDeque<proto::launcher::Step>,
}

/// What is asked of the domain.
pub(crate) enum Ask {
    Execute(Box<Order>, oneshot::Sender<Ack>),
    Verb(VerbRequest, oneshot::Sender<VerbReply>),
    Info(oneshot::Sender<InfoReply>),
    Probe(ProbeRequest, oneshot::Sender<Result<ProbeReply, AgentError>>),
    Stats(oneshot::Sender<StatsReply>),
    /// Steps up to this one were told.
    Told(u64),
    /// The pod is being ended: a graceful shutdown within the pod's own grace.
    Terminate,
}

/// What tasks of ours bring back.
enum Back {
    Started(Box<Start>),
    Settled {
        id: String,
        answer: Answer,
        reply: oneshot::Sender<Ack>,
    },
    Verb {
        id: String,
        verb: verbs::Verb,
        /// Its name.
        word: String,
        result: Result<Vec<u8>, verbs::Problem>,
        reply_to: oneshot::Sender<VerbReply>,
        operation: steps::Operation,
        /// Microseconds since 1970.
        since: u64,
    },
    /// File systems are thawed, as was due before this time.
    Thawed(Boottime),
    PowerPressed(Result<(), hypervisor::Error>),
}

enum Life {
    /// Nothing was started.
    Empty,
    /// The driver is at work.
    Starting { start_id: String },
    /// There is a hypervisor process.
    Alive(Box<Alive>),
    /// There is none any more.
    Over,
}

struct Alive {
    domain: Arc<dyn hypervisor::Domain>,
    events: mpsc::Receiver<Event>,
    agent: Agent,
    agent_level: watch::Receiver<AgentLevel>,
    agent_open: watch::Sender<bool>,
    /// When file systems thaw by themselves.
    thaw: Option<Boottime>,
    /// Until then the guest's next power-off is the first half of a reboot.
    rebooting: Option<Boottime>,
    disk: DiskRetry,
}

/// When a guest that a disk error has stopped is let go on.
#[derive(Debug, Default)]
struct DiskRetry {
    /// The next try.
    at: Option<Boottime>,
    /// Before the try that comes next.
    pause: Duration,
    /// From then on an error is a new one.
    forgiven: Option<Boottime>,
}

impl DiskRetry {
    fn stopped(&mut self) {
        if self.at.is_some() {
            return;
        }
        if self.forgiven.is_none_or(|t| Boottime::now() >= t) {
            self.pause = limits::DISK_RETRY;
        }
        self.at = Some(Boottime::after(self.pause));
    }

    /// Until it is seen running there will be another try: the next error may be there before anybody has looked.
    fn tried(&mut self) {
        self.pause = (self.pause * 2).min(limits::DISK_RETRY_MAX);
        self.at = Some(Boottime::after(self.pause));
        self.forgiven = Some(Boottime::after(limits::DISK_RETRY_MAX));
    }

    fn runs(&mut self) {
        self.at = None;
    }
}

pub(crate) struct Core {
    config: Config,
    driver: Arc<dyn Driver>,
    descriptors: Descriptors,
    latch: Latch,
    level: watch::Sender<Level>,
    life: Life,
    ending: Ending,
    /// Facts and the VMI of the start, for the levels about interfaces.
    nics: Vec<NicLevel>,
    /// Of the VMI.
    labels: BTreeMap<String, String>,
    verbs: verbs::Table,
    steps: steps::Steps,
    back: mpsc::Sender<Back>,
    heard: mpsc::Receiver<Back>,
}

/// What is known of an interface without the guest's help.
#[derive(Clone)]
struct NicLevel {
    name: String,
    mac: String,
    /// The address by which others reach the guest, where it is not the guest's own.
    pod_ip: Option<String>,
    link_up: bool,
}

impl Core {
    pub fn new(config: Config, driver: Arc<dyn Driver>, descriptors: Descriptors) -> (Self, watch::Receiver<Level>) {
        let domain = Domain {
            vmi_uid: config.vmi_uid.clone(),
            pod_uid: config.pod_uid.clone(),
            launcher_instance: uuid::Uuid::new_v4().to_string(),
            seq: 1,
            state: DomainState::Absent as i32,
            since_unix_ms: unix_ms(),
            namespace: config.namespace.clone(),
            name: config.name.clone(),
            ..Domain::default()
        };
        let (level, seen) = watch::channel(Level { domain, ..Level::default() });
        let (back, heard) = mpsc::channel(limits::ASKS);
        let core = Self {
            latch: Latch::new(&config.vmi_uid, &config.pod_uid),
            config,
            driver,
            descriptors,
            level,
            life: Life::Empty,
            ending: Ending::default(),
            nics: Vec::new(),
            labels: BTreeMap::new(),
            verbs: verbs::Table::default(),
            steps: steps::Steps::default(),
            back,
            heard,
        };
        (core, seen)
    }

    /// Runs until nobody can ask any more.
    pub async fn run(mut self, mut asks: mpsc::Receiver<Ask>) {
        enum Next {
            Ask(Option<Ask>),
            Back(Back),
            Event(Option<Event>),
            Agent,
            Deadline,
            Press,
            Thaw,
            Unpause,
        }
        loop {
            let (deadline, press) = (self.ending.deadline, self.ending.next_press);
            let next = {
                let (events, agent, thaw, unpause) = match &mut self.life {
                    Life::Alive(a) => (Some(&mut a.events), Some(&mut a.agent_level), a.thaw, a.disk.at),
                    Life::Empty | Life::Starting { .. } | Life::Over => (None, None, None, None),
                };
                tokio::select! {
                    // Events before everything: an answer never speaks of a state that is already past.
                    biased;
                    event = or_never(events, |e| Box::pin(e.recv())) => Next::Event(event),
                    Some(back) = self.heard.recv() => Next::Back(back),
                    ask = asks.recv() => Next::Ask(ask),
                    Ok(()) = or_never(agent, |a| Box::pin(a.changed())) => Next::Agent,
                    () = at(deadline) => Next::Deadline,
                    () = at(press) => Next::Press,
                    () = at(thaw) => Next::Thaw,
                    () = at(unpause) => Next::Unpause,
                }
            };
            match next {
                Next::Ask(None) => return,
                Next::Ask(Some(ask)) => self.ask(ask),
                Next::Back(back) => self.back(back),
                Next::Event(Some(event)) => self.event(event),
                Next::Event(None) => self.event(Event::Exited { code: None, signal: None, stderr: String::new() }),
                Next::Agent => self.publish_guest(),
                Next::Deadline => self.deadline(),
                Next::Press => self.press(),
                Next::Thaw => self.thaw(),
                Next::Unpause => self.unpause(),
            }
        }
    }

    fn state(&self) -> DomainState {
        self.level.borrow().domain.state()
    }

    /// Changes the level, if it changes.
    fn publish(&self, change: impl FnOnce(&mut Domain)) {
        self.level.send_if_modified(|level| {
            let before = level.domain.clone();
            change(&mut level.domain);
            if level.domain == before {
                return false;
            }
            if level.domain.state != before.state {
                level.domain.since_unix_ms = unix_ms();
            }
            level.domain.seq += 1;
            true
        });
    }

    fn set_state(&self, state: DomainState, reason: &str) {
        self.publish(|d| {
            d.state = state as i32;
            d.paused_reason = reason.into();
        });
    }

    fn ask(&mut self, ask: Ask) {
        match ask {
            Ask::Execute(order, reply) => self.execute(*order, reply),
            Ask::Verb(request, reply) => self.verb(request, reply),
            Ask::Probe(request, reply) => self.probe(request, reply),
            Ask::Stats(reply) => self.stats(reply),
            Ask::Told(seq) => self.level.send_modify(|level| level.told(seq)),
            Ask::Info(reply) => {
                let pid = match &self.life {
                    Life::Alive(a) => a.domain.pid(),
                    Life::Empty | Life::Starting { .. } | Life::Over => 0,
                };
                let domain = self.level.borrow().domain.clone();
                let _ = reply.send(InfoReply {
                    launcher_instance: domain.launcher_instance.clone(),
                    vmi_uid: self.config.vmi_uid.clone(),
                    pod_uid: self.config.pod_uid.clone(),
                    namespace: self.config.namespace.clone(),
                    name: self.config.name.clone(),
                    epoch: self.latch.epoch(),
                    domain: Some(domain),
                    hypervisor_pid: pid,
                });
            }
            Ask::Terminate => {
                tracing::info!(grace = ?self.config.grace, "the pod is being ended");
                if self.latch.close() {
                    self.wish(Wish::Shutdown(self.config.grace));
                } else if matches!(self.life, Life::Empty) {
                    self.never_started();
                }
            }
        }
    }

    /// A guest whose processors are stopped cannot answer, and nobody may end it for that: its probes hold as they did.
    fn probe(&self, request: ProbeRequest, reply: oneshot::Sender<Result<ProbeReply, AgentError>>) {
        let paused = self.state() == DomainState::Paused;
        let agent = match &self.life {
            Life::Alive(_) if paused => return drop(reply.send(Ok(ProbeReply::default()))),
            Life::Alive(alive) if alive.agent_level.borrow().connected => alive.agent.clone(),
            Life::Alive(_) | Life::Empty | Life::Starting { .. } | Life::Over => {
                return drop(reply.send(Err(AgentError::NotConnected)));
            }
        };
        tokio::spawn(async move {
            let limit = Duration::from_millis(request.limit_ms).min(limits::VERB_TTL);
            let answer = match request.command.split_first() {
                None => agent.call_within("guest-ping", limit).await.map(|_| ProbeReply::default()),
                Some((program, arguments)) => match tokio::time::timeout(limit, agent.run(program, arguments)).await {
                    Ok(done) => done.map(|(exit, message)| ProbeReply { exit, message }),
                    Err(_) => Err(AgentError::Late(program.clone(), limit)),
                },
            };
            let _ = reply.send(answer);
        });
    }

    /// What the machine uses. It is asked beside everything else.
    fn stats(&self, reply: oneshot::Sender<StatsReply>) {
        let Life::Alive(alive) = &self.life else { return drop(reply.send(StatsReply::default())) };
        // A guest whose processors are stopped does not answer, and its agent's line would have to be cleaned up afterwards.
        let answers = self.state() == DomainState::Running && alive.agent_level.borrow().connected;
        let (domain, agent) = (alive.domain.clone(), answers.then(|| alive.agent.clone()));
        let nics = self.nics.iter().map(|nic| nic.name.clone()).collect();
        let known = stats::Known { nics, labels: self.labels.clone(), paused: self.state() == DomainState::Paused };
        tokio::spawn(async move {
            let _ = reply.send(stats::collect(domain.as_ref(), agent, known).await);
        });
    }

    fn execute(&mut self, order: Order, reply: oneshot::Sender<Ack>) {
        let Some(instruct) = order.instruct else {
            let _ = reply
                .send(self.ack("", Answer::Refused(Reason::Unsupported, "an order without an instruction".into())));
            return;
        };
        let kind = match instruct.kind() {
            InstructKind::Start => Kind::Start,
            InstructKind::Shutdown => Kind::Shutdown,
            InstructKind::Kill => Kind::Kill,
            InstructKind::Pause => Kind::Pause,
            InstructKind::Resume => Kind::Resume,
            InstructKind::InstructUnspecified => {
                let problem = format!("unknown kind of instruction {}", instruct.kind);
                let _ = reply.send(self.ack(&instruct.id, Answer::Refused(Reason::Unsupported, problem)));
                return;
            }
        };
        let vmi: Option<serde_json::Value> = serde_json::from_slice(&instruct.vmi).ok();
        let facts = vmi.as_ref().map(|v| VmiFacts::read(v, &self.config.pod_uid));
        let decision = self.latch.decide(&Asked {
            epoch: instruct.epoch,
            id: &instruct.id,
            kind,
            vmi_uid: &instruct.vmi_uid,
            pod_uid: &instruct.pod_uid,
            vmi_rv: &instruct.vmi_rv,
            vmi: facts.as_ref(),
        });
        tracing::info!(id = %instruct.id, ?kind, epoch = instruct.epoch, ?decision, traceparent = %instruct.traceparent, "instruction");
        match decision {
            Decision::Answer(answer) => drop(reply.send(self.ack(&instruct.id, answer))),
            Decision::Close => {
                let _ = reply.send(self.ack(&instruct.id, Answer::Done("nothing was started".into())));
                self.never_started();
            }
            Decision::Begin(Kind::Start) => {
                let _ = reply.send(self.ack(&instruct.id, Answer::Accepted));
                let start = self.operation(instruct.traceparent, "start");
                self.steps.begin(&start, "launch", "boot", true);
                self.steps.begin(&start, "start-hypervisor", "launch", false);
                self.steps.begin(&start, "guest-boot", "", false);
                self.start(instruct.id, &vmi.unwrap_or_default(), &order.facts.unwrap_or_default());
            }
            Decision::Begin(Kind::Shutdown) => {
                let _ = reply.send(self.ack(&instruct.id, Answer::Accepted));
                let stop = self.operation(instruct.traceparent, "stop");
                self.steps.begin(&stop, "power-down", "", true);
                self.wish(Wish::Shutdown(Duration::from_millis(instruct.deadline_ms)));
            }
            Decision::Begin(Kind::Kill) => {
                let _ = reply.send(self.ack(&instruct.id, Answer::Accepted));
                let stop = self.operation(instruct.traceparent, "stop");
                self.steps.begin(&stop, "kill", "", true);
                self.wish(Wish::Destroy);
            }
            Decision::Begin(kind @ (Kind::Pause | Kind::Resume)) => self.run_or_halt(instruct.id, kind, reply),
        }
    }

    fn operation(&self, traceparent: String, name: &'static str) -> steps::Operation {
        steps::Operation { traceparent, cell: self.config.vmi_uid.clone(), name }
    }

    fn ack(&self, id: &str, answer: Answer) -> Ack {
        let result = match answer {
            Answer::Accepted => ack::Result::Accepted(Accepted {}),
            Answer::Done(detail) => ack::Result::Done(Done { detail }),
            Answer::Refused(reason, message) => ack::Result::Refused(Refused {
                reason: reason.code().into(),
                message,
                rv_seen: self.latch.vmi_rv().into(),
            }),
        };
        Ack { id: id.into(), vmi_uid: self.config.vmi_uid.clone(), result: Some(result) }
    }

    fn start(&mut self, id: String, vmi: &serde_json::Value, facts: &NodeFacts) {
        self.life = Life::Starting { start_id: id };
        self.publish(|d| {
            d.state = DomainState::Starting as i32;
            d.accelerator = facts.accelerator.clone();
        });
        let machine = match crate::spec::machine(vmi, facts, &self.config.paths) {
            Ok(m) => m,
            Err(e) => return self.start_failed(Reason::Unsupported, e.to_string()),
        };
        let mut fds = self.descriptors.take();
        let hostname = vmi
            .pointer("/spec/hostname")
            .and_then(|h| h.as_str())
            .filter(|h| !h.is_empty())
            .unwrap_or(&self.config.name);
        for nic in &facts.nics {
            if nic.dhcp_fd_name.is_empty() {
                continue;
            }
            let mut with_mac = nic.clone();
            if let Some(m) = machine.nics.iter().find(|m| m.name == nic.network) {
                with_mac.mac = m.mac.clone();
            }
            let served = match (fds.remove(&nic.dhcp_fd_name), crate::dhcp::Lease::new(&with_mac, hostname)) {
                (None, _) => Err(format!("descriptor {:?} was not handed over", nic.dhcp_fd_name)),
                (_, None) => Err("the node gave no address to hand out".into()),
                (Some(fd), Some(lease)) => crate::dhcp::serve(fd, lease).map_err(|e| e.to_string()),
            };
            if let Err(problem) = served {
                return self.start_failed(Reason::Failed, format!("DHCP of network {:?}: {problem}", nic.network));
            }
        }
        self.nics = nic_levels(vmi, facts, &machine);
        let labels = vmi.pointer("/metadata/labels").and_then(serde_json::Value::as_object);
        let labels = labels.into_iter().flatten().filter_map(|(k, v)| Some((k.clone(), v.as_str()?.to_owned())));
        self.labels = labels.collect();
        let (driver, back) = (self.driver.clone(), self.back.clone());
        tokio::spawn(async move {
            let _ = back.send(Back::Started(Box::new(driver.start(machine, fds).await))).await;
        });
    }

    fn started(&mut self, started: Started) {
        let Life::Starting { start_id } = std::mem::replace(&mut self.life, Life::Over) else { return };
        if let Some(serial) = started.console {
            let share = &self.config.share_dir;
            if let Err(error) = crate::console::serve(serial, &share.join("console.sock"), share.join("console.log")) {
                tracing::error!(%error, "the console cannot be offered");
            }
        }
        let (agent_open, opened) = watch::channel(false);
        let (agent, agent_level) = Agent::spawn(started.agent, opened);
        let machine_type = started.domain.machine_type();
        let alive = Alive {
            domain: started.domain,
            events: started.events,
            agent,
            agent_level,
            agent_open,
            thaw: None,
            rebooting: None,
            disk: DiskRetry::default(),
        };
        self.life = Life::Alive(Box::new(alive));
        self.latch.settled(&start_id, Answer::Done("started".into()));
        self.step_ends("start-hypervisor", None);
        self.publish(|d| d.guest.get_or_insert_default().machine_type = machine_type);
        self.publish_guest();
        // What was wished for while the driver was at work.
        if let Some(wish) = self.ending.postponed.take() {
            self.wish(wish);
        }
    }

    fn run_or_halt(&mut self, id: String, kind: Kind, reply: oneshot::Sender<Ack>) {
        let Life::Alive(alive) = &self.life else {
            let answer = Answer::Refused(Reason::Failed, "the domain does not run yet".into());
            self.latch.settled(&id, answer.clone());
            let _ = reply.send(self.ack(&id, answer));
            return;
        };
        let (domain, back) = (alive.domain.clone(), self.back.clone());
        tokio::spawn(async move {
            let done = if kind == Kind::Pause { domain.pause().await } else { domain.resume().await };
            let answer = match done {
                Ok(()) => Answer::Done(String::new()),
                Err(e) => Answer::Refused(Reason::Failed, e.to_string()),
            };
            let _ = back.send(Back::Settled { id, answer, reply }).await;
        });
    }

    fn back(&mut self, back: Back) {
        match back {
            Back::Started(start) => {
                if let Some((since, until)) = start.locked {
                    self.step_waited("start-hypervisor", "wait-for-lock", since, until);
                }
                match start.result {
                    Ok(started) => self.started(started),
                    Err(e) => self.start_failed(Reason::Failed, e.to_string()),
                }
            }
            Back::Settled { id, answer, reply } => {
                self.latch.settled(&id, answer.clone());
                let _ = reply.send(self.ack(&id, answer));
            }
            Back::Verb { id, verb, word, result, reply_to, operation, since } => {
                let failed = result.as_ref().err().map(|p| (p.reason, p.message.clone()));
                self.tell(
                    operation,
                    &word,
                    "",
                    (since, unix_us()),
                    failed.as_ref().map(|(r, m)| (*r, m.as_str())),
                    true,
                );
                self.verb_done(&id, verb, result, reply_to);
            }
            Back::Thawed(again) => self.thawed(again),
            Back::PowerPressed(result) => {
                if let Err(error) = result {
                    tracing::warn!(%error, "pressing the power button");
                }
            }
        }
    }

    fn event(&mut self, event: Event) {
        tracing::debug!(?event, "hypervisor");
        let Life::Alive(alive) = &mut self.life else { return };
        match event {
            Event::AgentPort(open) => drop(alive.agent_open.send_replace(open)),
            Event::Reset => {}
            Event::PoweredOff
                if !self.ending.begun() && alive.rebooting.take().is_some_and(|until| Boottime::now() < until) =>
            {
                let domain = alive.domain.clone();
                tokio::spawn(async move {
                    if let Err(error) = domain.reset().await {
                        tracing::warn!(%error, "starting the guest again after a soft reboot");
                        domain.quit().await;
                    }
                });
            }
            Event::PoweredOff => self.finish(proto::agent::Cause::GuestShutdown, "the guest powered itself off"),
            Event::Panicked => self.finish(proto::agent::Cause::Panicked, "the guest's kernel panicked"),
            Event::Broken(problem) => self.finish(proto::agent::Cause::Crashed, &problem),
            Event::Running if !self.ending.begun() => {
                alive.disk.runs();
                self.step_ends("launch", None);
                self.set_state(DomainState::Running, "");
            }
            Event::Paused(why) if !self.ending.begun() => {
                let reason = match why {
                    Paused::ByUser => "PausedByUser",
                    Paused::IoError => "PausedIOError",
                };
                if why == Paused::IoError {
                    alive.disk.stopped();
                }
                self.set_state(DomainState::Paused, reason);
            }
            Event::Silent if !self.ending.begun() => self.set_state(DomainState::Deaf, ""),
            Event::Running | Event::Paused(_) | Event::Silent => {}
            Event::Exited { code, signal, stderr } => self.exited(code, signal, &stderr),
        }
    }

    /// A disk error has stopped the guest for long enough: perhaps there is room again. If not, the next error says so.
    fn unpause(&mut self) {
        let Life::Alive(alive) = &mut self.life else { return };
        if self.ending.begun() || self.level.borrow().domain.paused_reason != "PausedIOError" {
            return alive.disk.runs();
        }
        tracing::info!(after = ?alive.disk.pause, "letting the guest go on after a disk error");
        alive.disk.tried();
        let domain = alive.domain.clone();
        tokio::spawn(async move {
            if let Err(error) = domain.resume().await {
                tracing::warn!(%error, "letting the guest go on");
            }
        });
    }

    /// Folds the agent's words and the node's facts into the level.
    fn publish_guest(&mut self) {
        let Life::Alive(alive) = &mut self.life else { return };
        let agent = alive.agent_level.borrow_and_update().clone();
        let interfaces = interfaces(&self.nics, &agent);
        if agent.connected {
            self.step_ends("guest-boot", None);
        }
        self.publish(|d| {
            let known = d.guest.take().unwrap_or_default();
            let first =
                if agent.connected && known.agent_first_unix_ms == 0 { unix_ms() } else { known.agent_first_unix_ms };
            d.guest = Some(GuestFacts {
                agent_connected: agent.connected,
                agent_version: agent.version,
                os: agent.os,
                hostname: agent.hostname,
                interfaces,
                machine_type: known.machine_type,
                fs_freeze_status: agent.fs_freeze_status,
                agent_lacks: agent.lacks,
                agent_first_unix_ms: first,
            });
        });
    }
}

fn nic_levels(vmi: &serde_json::Value, facts: &NodeFacts, machine: &crate::machine::Machine) -> Vec<NicLevel> {
    let list = vmi
        .pointer("/spec/domain/devices/interfaces")
        .and_then(|i| i.as_array())
        .map(Vec::as_slice)
        .unwrap_or_default();
    machine
        .nics
        .iter()
        .map(|nic| {
            let wished = list.iter().find(|i| i.get("name").and_then(|n| n.as_str()) == Some(&nic.name));
            let bridged = wished.is_some_and(|i| i.get("bridge").is_some());
            NicLevel {
                name: nic.name.clone(),
                mac: nic.mac.clone(),
                pod_ip: (!bridged && !facts.pod_ip.is_empty()).then(|| facts.pod_ip.clone()),
                link_up: !nic.link_down,
            }
        })
        .collect()
}

/// One list of what the node and the guest know, joined by hardware address, as in KubeVirt's status.
fn interfaces(nics: &[NicLevel], agent: &AgentLevel) -> Vec<Interface> {
    let told = if agent.connected { agent.nics.as_slice() } else { &[] };
    let mut all: Vec<Interface> = nics
        .iter()
        .enumerate()
        .map(|(n, nic)| {
            let guest = told.iter().find(|g| g.mac == nic.mac);
            let ips = match (&nic.pod_ip, guest) {
                (Some(ip), _) => vec![ip.clone()],
                (None, Some(guest)) => guest.ips.clone(),
                (None, None) => Vec::new(),
            };
            Interface {
                name: nic.name.clone(),
                mac: nic.mac.clone(),
                ip: ips.first().cloned().unwrap_or_default(),
                ips,
                interface_name: guest.map(|g| g.name.clone()).unwrap_or_default(),
                info_source: if guest.is_some() { "domain, guest-agent" } else { "domain" }.into(),
                queue_count: 1,
                pod_interface_name: if n == 0 { "eth0".into() } else { String::new() },
                link_state: if nic.link_up { "up" } else { "down" }.into(),
            }
        })
        .collect();
    all.extend(told.iter().filter(|g| !nics.iter().any(|n| n.mac == g.mac)).map(|g| Interface {
        mac: g.mac.clone(),
        ip: g.ips.first().cloned().unwrap_or_default(),
        ips: g.ips.clone(),
        interface_name: g.name.clone(),
        info_source: "guest-agent".into(),
        ..Interface::default()
    }));
    all
}

async fn at(time: Option<Boottime>) {
    match time {
        Some(t) => t.reached().await,
        None => std::future::pending().await,
    }
}

/// What `f` makes of the thing, or nothing for ever where there is none.
async fn or_never<'a, T, O>(
    thing: Option<&'a mut T>,
    f: impl FnOnce(&'a mut T) -> std::pin::Pin<Box<dyn Future<Output = O> + Send + 'a>>,
) -> O {
    match thing {
        Some(t) => f(t).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_a_disk_error_stops_again_waits_longer() {
        let mut d = DiskRetry::default();
        for pause in [10, 20, 40, 80, 160, 180, 180] {
            d.stopped();
            assert_eq!((d.pause.as_secs(), d.at.is_some()), (pause, true));
            d.stopped();
            assert_eq!(d.pause.as_secs(), pause, "the same error");
            d.tried();
            assert!(d.at.is_some(), "nobody has seen it run");
            d.runs();
            assert_eq!(d.at, None);
        }
        d.forgiven = Some(Boottime::now());
        d.stopped();
        assert_eq!(d.pause.as_secs(), 10, "it had run for long");
    }
}
