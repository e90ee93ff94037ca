//! The one task that owns the cells of this node: it turns what happens into events, and carries out what the cells ask
//! for, in order per cell. It decides nothing; [`state::agent`] does.

mod carry;
mod clock;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use proto::agent::{AgentMessage, ControllerMessage, Inventory, VerbReply, agent_message, controller_message};
use proto::convert;
use proto::launcher::{NicFacts, update};
use state::agent::{Agent, Command, Confirmed, Input, VmiFacts};
use state::{Epoch, Event, NodeName, PodUid, ResourceVersion, Timestamp, VmiUid};
use telemetry::journal::Journal;
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::Shared;
use crate::api::{Vmi, WatchNews};
use crate::limits;
use crate::link::{self, Client, LinkEvent};
use crate::pods::PodFacts;
use crate::store::Record;
use clock::Clock;

/// A session that was admitted.
#[derive(Debug)]
pub(crate) struct Opened {
    pub session: u64,
    pub epoch: Epoch,
    pub out: mpsc::Sender<AgentMessage>,
    /// Ends the session.
    pub stop: CancellationToken,
}

/// What a verb or a stream needs of a pod.
pub(crate) struct Route {
    pub client: Option<Client>,
    pub share: std::path::PathBuf,
    /// Whose it is, as spans say it.
    pub identity: [(&'static str, String); 4],
}

/// Where a verb or a stream goes, or why it cannot.
pub(crate) type Routed = Result<Route, VerbReply>;

/// What the hub is told.
#[expect(clippy::large_enum_variant, reason = "moved once through a queue")]
pub(crate) enum Msg {
    Opened(Opened, oneshot::Sender<()>),
    Down(u64, ControllerMessage),
    Closed(u64),
    Route {
        vmi: VmiUid,
        pod: PodUid,
        reply: oneshot::Sender<Routed>,
    },
    /// Something that a cell asked for ended.
    Back(PodUid, Input),
    /// The pod's network, with the input that says so.
    Network(PodUid, Result<Option<NicFacts>, (state::domain::RefusalReason, String)>),
    /// A live read.
    Confirmed(PodUid, Confirmed, Option<Vmi>),
}

struct Slot {
    cell: Agent,
    pod: Option<PodFacts>,
    running: Arc<AtomicBool>,
    link: Option<AbortHandle>,
    client: Option<Client>,
    /// The VMI that the cell decides on.
    raw: Option<(ResourceVersion, Bytes)>,
    /// Namespace and name of the VMI, from whoever knows.
    namespace: String,
    name: String,
    nics: Vec<NicFacts>,
    traceparent: String,
    record: Record,
    wake: Option<Timestamp>,
}

impl Slot {
    /// A step of the cell, which goes into the journal.
    fn step(&mut self, journal: &mut Journal, pod: &PodUid, event: &Event<Input>) -> Vec<Command> {
        let traceparent = Some(self.traceparent.as_str()).filter(|t| !t.is_empty());
        journal.step(pod.as_str(), traceparent, &mut self.cell, event)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(link) = &self.link {
            link.abort();
        }
    }
}

pub(crate) struct Hub {
    shared: Arc<Shared>,
    journal: Journal,
    clock: Clock,
    slots: BTreeMap<PodUid, Slot>,
    /// What the watch shows.
    vmis: HashMap<VmiUid, Vmi>,
    reached: Option<ResourceVersion>,
    enumerated: bool,
    session: Option<Opened>,
    /// The session was sent a complete inventory.
    complete_sent: bool,
    back: mpsc::Sender<Msg>,
    links: mpsc::Sender<(PodUid, LinkEvent)>,
    linked: mpsc::Receiver<(PodUid, LinkEvent)>,
}

impl Hub {
    pub fn new(shared: Arc<Shared>, journal: Journal, back: mpsc::Sender<Msg>) -> Self {
        let (links, linked) = mpsc::channel(limits::HUB);
        let mut hub = Self {
            shared,
            journal,
            clock: Clock::start(),
            slots: BTreeMap::new(),
            vmis: HashMap::new(),
            reached: None,
            enumerated: false,
            session: None,
            complete_sent: false,
            back,
            links,
            linked,
        };
        for (pod, record) in hub.shared.store.records() {
            let pod = PodUid(pod);
            let slot = hub.slot(&pod);
            slot.namespace.clone_from(&record.namespace);
            slot.name.clone_from(&record.name);
            slot.record = record.clone();
            if let Some(outcome) = record.outcome {
                hub.step_later(&pod, Input::OutcomeRestored(outcome));
            }
            if let Some(unpaused) = record.unpaused {
                hub.step_later(&pod, Input::UnpausedRestored(unpaused));
            }
        }
        hub
    }

    /// Folds without carrying out: before there is anybody to talk to, nothing follows but a deadline or the end.
    fn step_later(&mut self, pod: &PodUid, input: Input) {
        let at = self.clock.now();
        if let Some(slot) = self.slots.get_mut(pod) {
            let commands = slot.step(&mut self.journal, pod, &Event::new(at, input));
            for c in commands {
                if let Command::Wake { at } = c {
                    slot.wake = Some(at);
                }
            }
        }
    }

    /// Runs until everybody who could tell something is gone, or the agent ends.
    pub async fn run(mut self, mut msgs: mpsc::Receiver<Msg>, mut news: mpsc::Receiver<WatchNews>) {
        let mut pods = self.shared.pods.changed();
        self.pods().await;
        // Cells of records whose pods are gone by now.
        for pod in self.orphans() {
            self.step(&pod, Input::PodGone).await;
        }
        let stop = self.shared.stop.clone();
        loop {
            let wake = self.slots.values().filter_map(|s| s.wake).min();
            let sleep = async {
                match wake {
                    Some(at) => tokio::time::sleep(self.clock.until(at)).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                Some(msg) = msgs.recv() => self.msg(msg).await,
                Some((pod, event)) = self.linked.recv() => self.link_event(pod, event).await,
                Some(news) = news.recv() => self.watch_news(news).await,
                Ok(()) = pods.changed() => self.pods().await,
                () = sleep => self.elapsed().await,
            }
            self.complete().await;
        }
    }

    /// Cells whose pod the runtime does not have, once it has told all that it has.
    fn orphans(&self) -> Vec<PodUid> {
        if !self.enumerated {
            return Vec::new();
        }
        self.slots.iter().filter(|(_, s)| s.pod.is_none()).map(|(p, _)| p.clone()).collect()
    }

    fn slot(&mut self, pod: &PodUid) -> &mut Slot {
        let node = NodeName(self.shared.node.clone());
        self.slots.entry(pod.clone()).or_insert_with(|| {
            tracing::debug!(%pod, "a cell begins");
            Slot {
                cell: Agent::new(node, pod.clone()),
                pod: None,
                running: Arc::new(AtomicBool::new(false)),
                link: None,
                client: None,
                raw: None,
                namespace: String::new(),
                name: String::new(),
                nics: Vec::new(),
                traceparent: String::new(),
                record: Record::default(),
                wake: None,
            }
        })
    }

    async fn step(&mut self, pod: &PodUid, input: Input) {
        let at = self.clock.now();
        let Some(slot) = self.slots.get_mut(pod) else { return };
        let quiet = matches!(input, Input::Elapsed);
        tracing::trace!(%pod, ?input, "event");
        let commands = slot.step(&mut self.journal, pod, &Event::new(at, input));
        if !commands.is_empty() && !quiet {
            tracing::debug!(%pod, commands = ?commands.iter().map(name_of).collect::<Vec<_>>(), "decided");
        }
        for command in commands {
            self.carry_out(pod, command).await;
        }
    }

    /// Folds a VMI, and keeps its JSON where the cell took it.
    async fn step_vmi(&mut self, pod: &PodUid, vmi: &Vmi, input: Input) {
        let at = self.clock.now();
        let Some(slot) = self.slots.get_mut(pod) else { return };
        let commands = slot.step(&mut self.journal, pod, &Event::new(at, input));
        keep_raw(slot, vmi);
        for command in commands {
            self.carry_out(pod, command).await;
        }
    }

    async fn elapsed(&mut self) {
        let now = self.clock.now();
        let due: Vec<PodUid> =
            self.slots.iter().filter(|(_, s)| s.wake.is_some_and(|w| w <= now)).map(|(p, _)| p.clone()).collect();
        for pod in due {
            if let Some(slot) = self.slots.get_mut(&pod) {
                slot.wake = None;
            }
            self.step(&pod, Input::Elapsed).await;
        }
    }

    async fn pods(&mut self) {
        let first = !self.enumerated;
        self.enumerated = *self.shared.pods.changed().borrow() > 0;
        let pods = self.shared.pods.pods();
        let there: std::collections::BTreeSet<PodUid> = pods.iter().map(|p| PodUid(p.pod_uid.clone())).collect();
        for facts in pods {
            let pod = PodUid(facts.pod_uid.clone());
            let slot = self.slot(&pod);
            let known = slot.pod.as_ref() == Some(&facts);
            let new = slot.pod.is_none();
            slot.namespace.clone_from(&facts.namespace);
            slot.name.clone_from(&facts.vmi_name);
            slot.running.store(facts.running, Ordering::Relaxed);
            slot.pod = Some(facts.clone());
            if new {
                // Else what becomes of a launcher that is never instructed would be told in the next session only.
                self.introduce(&pod);
            }
            if !known {
                let vmi = VmiUid(facts.vmi_uid.clone());
                self.step(&pod, Input::PodObserved { vmi: vmi.clone(), running: facts.running }).await;
                if new {
                    match self.vmis.get(&vmi).cloned() {
                        Some(vmi) => self.step_vmi(&pod, &vmi, Input::VmiObserved(vmi.facts.clone())).await,
                        None if self.reached.is_some() => self.step(&pod, Input::VmiVanished).await,
                        None => {}
                    }
                }
            }
            self.ensure_link(&pod);
        }
        let gone: Vec<PodUid> = self
            .slots
            .iter()
            .filter(|(p, s)| (s.pod.is_some() || (first && self.enumerated)) && !there.contains(*p))
            .map(|(p, _)| p.clone())
            .collect();
        for pod in gone {
            if let Some(slot) = self.slots.get_mut(&pod) {
                slot.pod = None;
                slot.client = None;
                if let Some(link) = slot.link.take() {
                    link.abort();
                }
            }
            self.step(&pod, Input::PodGone).await;
        }
    }

    fn ensure_link(&mut self, pod: &PodUid) {
        let links = self.links.clone();
        let Some(slot) = self.slots.get_mut(pod) else { return };
        let Some(facts) = &slot.pod else { return };
        if !facts.running || slot.link.as_ref().is_some_and(|l| !l.is_finished()) {
            return;
        }
        let (facts, running, uid) = (facts.clone(), slot.running.clone(), pod.clone());
        let launchers = self.shared.launchers.clone();
        let (events, mut heard) = mpsc::channel(16);
        let task = tokio::spawn(async move {
            let _follow = AbortOnDropHandle::new(tokio::spawn(link::follow(launchers, facts, running, events)));
            while let Some(event) = heard.recv().await {
                if links.send((uid.clone(), event)).await.is_err() {
                    return;
                }
            }
        });
        slot.link = Some(task.abort_handle());
    }

    async fn link_event(&mut self, pod: PodUid, event: LinkEvent) {
        let Some(slot) = self.slots.get_mut(&pod) else { return };
        let Some(facts) = &slot.pod else { return };
        let input = match event {
            LinkEvent::Connected { client, info } => {
                if info.pod_uid != facts.pod_uid || info.vmi_uid != facts.vmi_uid {
                    tracing::warn!(%pod, claims = %info.pod_uid, "the launcher of this pod says that it is another's");
                    return;
                }
                slot.client = Some(client);
                let connected =
                    Input::LauncherConnected { launcher: info.launcher_instance.into(), epoch: Epoch(info.epoch) };
                self.step(&pod, connected).await;
                match info.domain.and_then(convert::news) {
                    Some(domain) => Input::LauncherReported(domain),
                    None => return,
                }
            }
            // Of a launcher that was not believed.
            LinkEvent::Updated(_) if slot.client.is_none() => return,
            LinkEvent::Updated(update) => match update.kind {
                Some(update::Kind::Domain(d)) => match convert::news(d) {
                    Some(domain) => Input::LauncherReported(domain),
                    None => return,
                },
                Some(update::Kind::Outcome(o)) => Input::LauncherEnded(o.into()),
                None => return,
            },
            LinkEvent::Lost => {
                slot.client = None;
                Input::LauncherLost
            }
        };
        self.step(&pod, input).await;
    }

    fn cells_of(&self, vmi: &VmiUid) -> Vec<PodUid> {
        let is = |s: &Slot| s.pod.as_ref().is_some_and(|p| p.vmi_uid == vmi.0);
        self.slots.iter().filter(|(_, s)| is(s)).map(|(p, _)| p.clone()).collect()
    }

    async fn watch_news(&mut self, news: WatchNews) {
        match news {
            WatchNews::Seen(vmi) => {
                for pod in self.cells_of(&vmi.facts.uid) {
                    self.step_vmi(&pod, &vmi, Input::VmiObserved(vmi.facts.clone())).await;
                }
                self.vmis.insert(vmi.facts.uid.clone(), vmi);
            }
            WatchNews::Vanished(uid) => {
                self.vmis.remove(&uid);
                for pod in self.cells_of(&uid) {
                    self.step(&pod, Input::VmiVanished).await;
                }
            }
            WatchNews::Reached(rv) => {
                let first = self.reached.is_none();
                self.reached = Some(rv);
                if first {
                    let missing: Vec<PodUid> = self
                        .slots
                        .iter()
                        .filter(|(_, s)| {
                            s.pod.as_ref().is_some_and(|p| !self.vmis.contains_key(&VmiUid(p.vmi_uid.clone())))
                        })
                        .map(|(p, _)| p.clone())
                        .collect();
                    for pod in missing {
                        self.step(&pod, Input::VmiVanished).await;
                    }
                }
            }
            WatchNews::Restored => {
                self.vmis.clear();
                self.reached = None;
                for pod in self.slots.keys().cloned().collect::<Vec<_>>() {
                    if let Some(slot) = self.slots.get_mut(&pod) {
                        slot.raw = None;
                    }
                    self.step(&pod, Input::StoreRestored).await;
                }
            }
        }
    }

    async fn msg(&mut self, msg: Msg) {
        match msg {
            Msg::Opened(opened, ready) => self.opened(opened, ready).await,
            Msg::Closed(session) => {
                if self.session.as_ref().is_some_and(|s| s.session == session) {
                    self.session = None;
                }
                for pod in self.slots.keys().cloned().collect::<Vec<_>>() {
                    self.step(&pod, Input::SessionClosed { session }).await;
                }
            }
            Msg::Down(session, message) => self.down(session, message).await,
            Msg::Route { vmi, pod, reply } => {
                let _ = reply.send(self.route(&vmi, &pod));
            }
            Msg::Back(pod, input) => {
                if let (Input::UnpausedWritten { unpaused, done: true }, Some(slot)) =
                    (&input, self.slots.get_mut(&pod))
                {
                    slot.record.unpaused = Some(*unpaused);
                    self.save(&pod).await;
                }
                self.step(&pod, input).await;
            }
            Msg::Network(pod, result) => {
                let result = result.map(|nic| {
                    if let Some(slot) = self.slots.get_mut(&pod) {
                        slot.nics = nic.into_iter().collect();
                    }
                });
                self.step(&pod, Input::NetworkPrepared(result)).await;
            }
            Msg::Confirmed(pod, confirmed, vmi) => match vmi {
                Some(vmi) => self.step_vmi(&pod, &vmi, Input::VmiConfirmed(confirmed)).await,
                None => self.step(&pod, Input::VmiConfirmed(confirmed)).await,
            },
        }
    }

    fn route(&self, vmi: &VmiUid, pod: &PodUid) -> Routed {
        let refuse = |reason: &str, message| VerbReply { reason: reason.into(), message, ..VerbReply::default() };
        let unknown = || refuse("not-found", format!("pod {pod} is not on node {}", self.shared.node));
        let Some(slot) = self.slots.get(pod) else {
            // Until the runtime has told all that it has, a pod that is not known may well be here.
            return Err(match self.enumerated {
                true => unknown(),
                false => refuse("not-ready", format!("node {} has not found its pods yet", self.shared.node)),
            });
        };
        slot.cell.admit_verb(vmi).map_err(|(reason, message)| refuse(reason, message))?;
        let facts = slot.pod.as_ref().ok_or_else(unknown)?;
        Ok(Route { client: slot.client.clone(), share: facts.share_dir.clone(), identity: link::identity(facts) })
    }

    async fn opened(&mut self, opened: Opened, ready: oneshot::Sender<()>) {
        let (session, epoch) = (opened.session, opened.epoch);
        if let Some(old) = self.session.replace(opened) {
            tracing::info!(old = old.session, new = session, "a newer session replaces the old one");
            old.stop.cancel();
        }
        self.complete_sent = false;
        let at = self.clock.now();
        let mut commands = Vec::new();
        for (pod, slot) in &mut self.slots {
            let event = Event::new(at, Input::SessionOpened { session, epoch });
            let follow = slot.step(&mut self.journal, pod, &event);
            commands.extend(follow.into_iter().map(|c| (pod.clone(), c)));
        }
        // What the cells believe to have been told is in here, so this goes first.
        self.send_inventory();
        let _ = ready.send(());
        for (pod, command) in commands {
            self.carry_out(&pod, command).await;
        }
    }

    fn is_complete(&self) -> bool {
        self.enumerated && !self.slots.values().any(|s| s.cell.is_unsettled())
    }

    fn send_inventory(&mut self) {
        let complete = self.is_complete();
        let known: Vec<_> = self.slots.values().map(|s| (s, s.cell.view(), s.cell.outcome().cloned())).collect();
        let inventory = Inventory {
            node: self.shared.node.clone(),
            node_uid: self.shared.node_uid.borrow().clone(),
            boot_id: self.shared.boot_id.clone(),
            agent_instance: self.shared.instance.clone(),
            capabilities: self.shared.capabilities(),
            reflector_rv: self.reached.map(|r| r.to_string()).unwrap_or_default(),
            complete,
            domains: known
                .iter()
                .filter_map(|(s, view, _)| view.as_ref().map(|d| convert::domain(d, &s.namespace, &s.name)))
                .collect(),
            outcomes: known
                .iter()
                .filter_map(|(s, _, o)| o.as_ref().map(|o| convert::outcome(o, &s.namespace, &s.name)))
                .collect(),
        };
        drop(known);
        self.complete_sent = complete;
        self.tell(agent_message::Kind::Inventory(inventory));
    }

    /// An inventory that was told too early is told again.
    async fn complete(&mut self) {
        if self.session.is_some() && !self.complete_sent && self.is_complete() {
            self.send_inventory();
        }
    }

    /// Sends to the controller; one that does not read loses its session.
    fn tell(&mut self, kind: agent_message::Kind) {
        let Some(session) = &self.session else { return };
        if session.out.try_send(AgentMessage { kind: Some(kind) }).is_err() {
            tracing::warn!(session = session.session, "the controller does not read; its session ends");
            session.stop.cancel();
        }
    }

    async fn down(&mut self, session: u64, message: ControllerMessage) {
        match message.kind {
            Some(controller_message::Kind::Instruct(i)) => {
                let Some(instruction) = convert::instruction(&i) else {
                    let unsupported = state::domain::AckResult::Refused {
                        reason: state::domain::RefusalReason::Unsupported,
                        message: format!("unknown kind of instruction {}", i.kind),
                        rv_seen: ResourceVersion::default(),
                    };
                    self.tell(agent_message::Kind::Ack(convert::ack(&i.id, &i.vmi_uid, unsupported)));
                    return;
                };
                tracing::info!(id = i.id, kind = ?instruction.kind, pod = i.pod_uid, vmi = i.vmi_uid, epoch = i.epoch,
                    traceparent = i.traceparent, "instructed");
                let vmi = Vmi::read(i.vmi.clone());
                let pod = instruction.pod.clone();
                let slot = self.slot(&pod);
                if slot.name.is_empty()
                    && let Some(v) = &vmi
                {
                    slot.namespace.clone_from(&v.facts.namespace);
                    slot.name.clone_from(&v.facts.name);
                }
                slot.traceparent = i.traceparent;
                let facts: Option<VmiFacts> = vmi.as_ref().map(|v| v.facts.clone());
                let input = Input::Instructed { session, epoch: Epoch(i.epoch), instruction, vmi: facts };
                self.introduce(&pod);
                match &vmi {
                    Some(vmi) => self.step_vmi(&pod, vmi, input).await,
                    None => self.step(&pod, input).await,
                }
            }
            Some(controller_message::Kind::OutcomeAck(ack)) => {
                self.step(&PodUid(ack.pod_uid), Input::OutcomeAcked { seq: ack.seq }).await;
            }
            Some(controller_message::Kind::Hello(_)) => {
                tracing::warn!(session, "a second Hello in one session");
                if let Some(s) = self.session.as_ref().filter(|s| s.session == session) {
                    s.stop.cancel();
                }
            }
            None => {}
        }
    }

    /// A cell that was made after the session opened learns of it.
    fn introduce(&mut self, pod: &PodUid) {
        let Some((session, epoch)) = self.session.as_ref().map(|s| (s.session, s.epoch)) else { return };
        if self.slots.get(pod).is_some_and(|s| s.cell.session() != Some(session)) {
            // Nothing follows from it: the cell has nothing to tell yet, and what it is for comes next.
            self.step_later(pod, Input::SessionOpened { session, epoch });
        }
    }
}

fn keep_raw(slot: &mut Slot, vmi: &Vmi) {
    if slot.cell.vmi_rv() == Some(vmi.facts.rv) {
        slot.raw = Some((vmi.facts.rv, vmi.raw.clone()));
    }
}

fn name_of(command: &Command) -> String {
    match command {
        Command::Execute { instruction, .. } => format!("execute {}", instruction.kind.name()),
        Command::PrepareNetwork => "prepare network".into(),
        Command::Answer { .. } => "answer".into(),
        Command::Report(d) => format!("report {:?}", d.state),
        Command::KeepOutcome(o) => format!("keep outcome {}", o.cause.name()),
        Command::TellOutcome(_) => "tell outcome".into(),
        Command::DropOutcome => "drop outcome".into(),
        Command::Confirm => "confirm".into(),
        Command::WriteUnpaused(v) => format!("write unpaused {v}"),
        Command::Forget => "forget".into(),
        Command::Wake { .. } => "wake".into(),
    }
}
