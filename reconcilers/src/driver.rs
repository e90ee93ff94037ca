//! Runs the cells: turns what is heard into events, steps, and hands the commands on. It contains no decision.
//!
//! One task owns every cell, so that order per cell needs no lock; a step takes about a microsecond. What can wait (writes,
//! reads, instructions) runs in tasks of its own, and its outcome comes back as an event.

use crate::{
    events::Events,
    executor::{Answer as Read, Executor, Told},
    explain::{Cell, Question, Subject},
    hub::{Entry, Hub, Queue},
    metrics::{self, Metrics},
    sessions::{Heard, Sessions},
};
use dashmap::DashMap;
use proto::agent::{self, agent_message, controller_message};
use state::{
    Epoch, Event, Key, NodeName, PodUid, ResourceVersion, Timestamp,
    domain::{AckResult, Domain, Outcome},
    journal::CellKind,
    node,
    object::{CommandId, Kind, ObjectRef, Settled},
    observe::{ClaimView, NodeView, Object, PodView, VmView, VmiView},
    set,
    trace::Finished,
    vm::{ClusterConfig, Command, Fact, Input, Interest, NodeFact, Order, Report, Sight, Vm},
};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};
use telemetry::journal::Journal;
use tokio::{sync::mpsc, time::Instant};
use tracing::Instrument;

/// Answers that may wait for the driver.
const ANSWERS: usize = 1024;

/// Which cell.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum CellId {
    Vm(Key),
    Set(Key),
    Node(NodeName),
}

/// An outcome on its way back to its cell.
enum Answer {
    Vm(Key, CommandId, Settled<Object>),
    Set(Key, CommandId, Settled<Told>),
    Node(NodeName, CommandId, Settled<NodeView>),
}

struct VmCell {
    machine: Vm,
    interests: BTreeSet<Interest>,
}

struct SetCell {
    machine: set::Set,
    choice: Option<set::Choice>,
}

/// A Node cell and the levels that its agent told last.
struct NodeCell {
    machine: node::Node,
    told: Option<NodeFact>,
    inventory: Option<(u64, bool, ResourceVersion, String)>,
    domains: BTreeMap<PodUid, (Key, Arc<Domain>)>,
    outcomes: BTreeMap<PodUid, (Key, Outcome)>,
}

/// Instructions that were sent and not answered: by node and instruction id.
type Waiting = DashMap<(NodeName, String), (Key, CommandId)>;

/// Why the driver stopped.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// An agent has seen a newer leader, or the store went back.
    #[error("node {node} knows epoch {highest}, ours is {ours}: this leader is not the last one")]
    Outranked {
        /// The node.
        node: NodeName,
        /// What it knows.
        highest: Epoch,
        /// Ours.
        ours: Epoch,
    },
    /// The hubs' or the sessions' tasks are gone.
    #[error("the process is shutting down")]
    Closing,
}

/// What the driver works with.
pub struct Parts {
    /// Machines.
    pub vms: Arc<Hub<VmView>>,
    /// Instances, also for sets that begin to look at them.
    pub vmis: Arc<Hub<VmiView>>,
    /// Launcher pods.
    pub pods: Arc<Hub<PodView>>,
    /// Claims, for cells that ask for one.
    pub claims: Arc<Hub<ClaimView>>,
    /// What the hubs have.
    pub queue: Arc<Queue>,
    /// Carries out writes and reads.
    pub executor: Executor,
    /// Sends instructions.
    pub sessions: Arc<Sessions>,
    /// Events for people.
    pub events: Events,
    /// Configuration for rendering.
    pub config: ClusterConfig,
    /// Our epoch.
    pub epoch: Epoch,
    /// Where steps are recorded.
    pub journal: Journal,
    /// What is counted.
    pub(crate) metrics: Metrics,
}

/// The driver of all cells.
pub struct Driver {
    parts: Parts,
    vms: BTreeMap<Key, VmCell>,
    sets: BTreeMap<Key, SetCell>,
    nodes: BTreeMap<NodeName, NodeCell>,
    interested: BTreeMap<(String, Interest), BTreeSet<Key>>,
    deadlines: BTreeSet<(Timestamp, CellId)>,
    armed: BTreeMap<CellId, Timestamp>,
    waiting: Arc<Waiting>,
    answers: mpsc::Sender<Answer>,
    inputs: VecDeque<(Key, Input)>,
    last: Timestamp,
}

impl Driver {
    /// Runs until the leader has to stop.
    pub async fn run(
        parts: Parts,
        mut heard: mpsc::Receiver<Heard>,
        mut asked: mpsc::Receiver<Question>,
    ) -> DriverError {
        let (answers, mut answered) = mpsc::channel(ANSWERS);
        let mut d = Self {
            parts,
            vms: BTreeMap::new(),
            sets: BTreeMap::new(),
            nodes: BTreeMap::new(),
            interested: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            armed: BTreeMap::new(),
            waiting: Arc::default(),
            answers,
            inputs: VecDeque::new(),
            last: Timestamp::default(),
        };
        let queue = d.parts.queue.clone();
        loop {
            let deadline = d.deadlines.first().map(|(t, _)| *t);
            tokio::select! {
                biased;
                answer = answered.recv() => match answer {
                    Some(Answer::Vm(key, id, result)) => {
                        if let Settled::Applied(Some(object)) = &result {
                            d.note(&key, object);
                            // Own writes count at once, also for the set that an instance is of.
                            d.show_sets(&key, &Sight::Present(object.clone()));
                        }
                        d.input(key, Input::Settled { id, result });
                    }
                    Some(Answer::Set(key, id, result)) => {
                        if let Settled::Applied(Some(told)) = &result {
                            told.instances.iter().for_each(|o| d.note(&key, o));
                        }
                        d.set(key, set::Input::Settled { id, result: result.map(|told| Some(told.sight)) });
                    }
                    Some(Answer::Node(name, id, result)) => d.node(name, node::Input::Settled { id, result }),
                    None => return DriverError::Closing,
                },
                said = heard.recv() => match said {
                    Some(said) => {
                        if let Some(error) = d.hear(said) {
                            return error;
                        }
                    }
                    None => return DriverError::Closing,
                },
                () = d.until(deadline) => d.elapse(),
                Some(question) = asked.recv() => d.answer(question),
                (entry, since) = queue.next() => {
                    let taken = Instant::now();
                    d.entry(entry);
                    d.drain();
                    d.parts.metrics.entry(taken - since, taken.elapsed());
                }
            }
            d.drain();
        }
    }

    /// A copy of a cell, for whoever asks.
    fn answer(&self, question: Question) {
        let cell = match &question.subject {
            Subject::Machine(key) => self.vms.get(key).map(|c| Cell::Machine(Box::new(c.machine.clone()))),
            Subject::Set(key) => self.sets.get(key).map(|c| Cell::Set(Box::new(c.machine.clone()))),
            Subject::Node(name) => self.nodes.get(name).map(|c| Cell::Node(Box::new(c.machine.clone()))),
        };
        // Who asked may have lost patience.
        let _ = question.answer.send(cell);
    }

    /// What a cell learns from its own writes and reads, the caches have to know, or a list that lacks it would not be noticed.
    fn note(&self, key: &Key, object: &Object) {
        let r = object.reference();
        match object {
            Object::Vm(o) => self.parts.vms.note(o, &r, None),
            Object::Vmi(o) => self.parts.vmis.note(o, &r, None),
            Object::Pod(o) => self.parts.pods.note(o, &r, Some(&key.name)),
            Object::Claim(_) | Object::Revision(_) | Object::Pattern(_) => {}
        }
    }

    /// The clock, which never goes back.
    fn now(&mut self) -> Timestamp {
        self.last = self.last.max(wall());
        self.last
    }

    fn until(&mut self, deadline: Option<Timestamp>) -> impl Future<Output = ()> + use<> {
        let wait = deadline.map(|t| Instant::now() + Duration::from_millis(t.since(self.now()).0));
        async move {
            match wait {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        }
    }

    fn elapse(&mut self) {
        let now = self.now();
        while let Some((at, cell)) = self.deadlines.first().cloned() {
            if at > now {
                return;
            }
            self.deadlines.remove(&(at, cell.clone()));
            self.armed.remove(&cell);
            match cell {
                CellId::Vm(key) => self.input(key, Input::Elapsed),
                CellId::Set(key) => self.set(key, set::Input::Elapsed),
                CellId::Node(name) => self.node(name, node::Input::Elapsed),
            }
        }
    }

    fn arm(&mut self, cell: CellId, at: Timestamp) {
        self.disarm(&cell);
        self.armed.insert(cell.clone(), at);
        self.deadlines.insert((at, cell));
    }

    fn disarm(&mut self, cell: &CellId) {
        if let Some(at) = self.armed.remove(cell) {
            self.deadlines.remove(&(at, cell.clone()));
        }
    }

    fn entry(&mut self, entry: Entry) {
        match entry {
            Entry::Vm(key, sight) => {
                if about(&sight) == Kind::PersistentVolumeClaim {
                    let interest = (key.namespace.clone(), Interest::Claim(key.name));
                    self.tell(&interest, &Input::Observed(sight));
                } else {
                    match &sight {
                        Sight::Present(Object::Vmi(vmi)) => self.parts.metrics.saw(vmi),
                        Sight::Gone(r) | Sight::Vanished(r) => self.parts.metrics.gone(&r.uid),
                        Sight::Present(_) => {}
                    }
                    self.show_sets(&key, &sight);
                    self.input(key, Input::Observed(sight));
                }
            }
            Entry::Set(key, sight) => self.set(key, set::Input::Observed(sight)),
            Entry::Node(view) => {
                let name = NodeName(view.meta.name.clone());
                self.node(name, node::Input::Observed { node: *view, live: false });
            }
            Entry::NodeGone(name, uid, true) => self.node(name, node::Input::Gone(uid)),
            Entry::NodeGone(name, uid, false) => self.node(name, node::Input::Vanished(uid)),
        }
    }

    fn tell(&mut self, interest: &(String, Interest), input: &Input) {
        for key in self.interested.get(interest).into_iter().flatten() {
            self.inputs.push_back((key.clone(), input.clone()));
        }
    }

    fn input(&mut self, key: Key, input: Input) {
        self.inputs.push_back((key, input));
    }

    fn drain(&mut self) {
        while let Some((key, input)) = self.inputs.pop_front() {
            self.step(key, input);
        }
    }

    // --- Vm cells ---

    fn step(&mut self, key: Key, input: Input) {
        let at = self.now();
        if !self.vms.contains_key(&key) {
            // Only what is there can begin a cell.
            match &input {
                Input::Observed(Sight::Present(_)) | Input::Reported(_) => {}
                Input::Observed(Sight::Gone(_) | Sight::Vanished(_))
                | Input::Settled { .. }
                | Input::Elapsed
                | Input::Configured(_) => return,
            }
            let mut cell = VmCell { machine: Vm::new(key.clone()), interests: BTreeSet::new() };
            let configured = Event::new(at, Input::Configured(Fact::Cluster(self.parts.config.clone())));
            let commands = self.parts.journal.step(&key.to_string(), None, &mut cell.machine, &configured);
            self.vms.insert(key.clone(), cell);
            self.parts.metrics.cells(metrics::Cell::Vm, self.vms.len());
            self.carry_out(&key, commands);
        }
        let Some(cell) = self.vms.get_mut(&key) else { return };
        let event = Event::new(at, input);
        let broken: Vec<&str> = cell.machine.violated().collect();
        let (began, before) = (Instant::now(), cell.machine.phase());
        let commands = self.parts.journal.step(&key.to_string(), None, &mut cell.machine, &event);
        self.parts.metrics.step(metrics::Cell::Vm, began.elapsed());
        for invariant in cell.machine.violated().filter(|i| !broken.contains(i)) {
            tracing::error!(%key, invariant, "this must not be");
            self.parts.metrics.violated(invariant);
        }
        let ended = cell.machine.take_steps();
        // Whoever slept longer than the Lease lasts leaves it to the successor.
        if !ended.is_empty() && self.parts.executor.leads() {
            let transition = format!("{} -> {} ({})", before.name(), cell.machine.phase().name(), event.input.name());
            for step in ended {
                self.parts.metrics.finished(&step);
                emit(&key, &step, &transition);
            }
        }
        let interests = cell.machine.interests();
        let empty = cell.machine.is_empty();
        if interests != cell.interests || empty {
            let old = std::mem::replace(&mut cell.interests, interests.clone());
            self.reinterest(&key, &old, if empty { BTreeSet::new() } else { interests });
        }
        self.carry_out(&key, commands);
        if empty {
            self.vms.remove(&key);
            self.parts.metrics.cells(metrics::Cell::Vm, self.vms.len());
            self.parts.journal.forget(CellKind::Vm, &key.to_string());
            // Nobody waits for an answer to it any more, least of all the next cell of its name.
            self.waiting.retain(|_, (waits, _)| *waits != key);
            self.disarm(&CellId::Vm(key));
        }
    }

    /// A cell wants to hear of other things than before: feeds the present levels of what is new.
    fn reinterest(&mut self, key: &Key, old: &BTreeSet<Interest>, new: BTreeSet<Interest>) {
        for gone in old.difference(&new) {
            let id = (namespace(key, gone), gone.clone());
            if let Some(keys) = self.interested.get_mut(&id) {
                keys.remove(key);
                if keys.is_empty() {
                    self.interested.remove(&id);
                }
            }
        }
        for fresh in new.difference(old) {
            self.interested.entry((namespace(key, fresh), fresh.clone())).or_default().insert(key.clone());
            match fresh {
                Interest::Claim(name) => {
                    let sight = match self.parts.claims.find(&key.namespace, name) {
                        Some(claim) => Sight::Present(Object::Claim(claim.view.clone())),
                        None => Sight::Gone(ObjectRef {
                            kind: Kind::PersistentVolumeClaim,
                            namespace: key.namespace.clone(),
                            name: name.clone(),
                            uid: Default::default(),
                        }),
                    };
                    self.input(key.clone(), Input::Observed(sight));
                }
                Interest::Node(name) => self.node_levels(key, name),
            }
        }
    }

    fn node_levels(&mut self, key: &Key, name: &NodeName) {
        let Some(cell) = self.nodes.get(name) else { return };
        let mut inputs = vec![Input::Configured(Fact::Node(cell.machine.fact()))];
        let of = |k: &Key| k == key;
        inputs.extend(
            cell.domains
                .values()
                .filter(|(k, _)| of(k))
                .map(|(_, d)| Input::Reported(Report::Domain { node: name.clone(), domain: d.clone() })),
        );
        inputs.extend(
            cell.outcomes
                .values()
                .filter(|(k, _)| of(k))
                .map(|(_, o)| Input::Reported(Report::Outcome { node: name.clone(), outcome: o.clone() })),
        );
        inputs.extend(cell.inventory.clone().map(|(session, complete, reflector_rv, boot_id)| {
            Input::Reported(Report::Inventory { node: name.clone(), session, complete, reflector_rv, boot_id })
        }));
        self.inputs.extend(inputs.into_iter().map(|i| (key.clone(), i)));
    }

    fn carry_out(&mut self, key: &Key, commands: Vec<Command>) {
        for command in commands {
            match command {
                Command::Wake { at } => self.arm(CellId::Vm(key.clone()), at),
                Command::Note(note) => {
                    self.parts.metrics.settled("note", "written");
                    self.parts.events.write(&note);
                }
                Command::Instruct { id, node, order } => self.instruct(key.clone(), id, node, order),
                command @ (Command::Create { .. }
                | Command::Patch { .. }
                | Command::Delete { .. }
                | Command::Confirm { .. }) => {
                    let (key, said) = (key.clone(), about_cell(key, Some(self.traceparent(key))));
                    self.execute(command, said, move |id, result| Answer::Vm(key, id, result));
                }
                Command::Survey { .. } => tracing::error!(%key, "a Vm cell asked for what no Vm cell may"),
            }
        }
    }

    /// Trace context of what a machine does.
    fn traceparent(&self, key: &Key) -> &str {
        self.vms.get(key).and_then(|cell| cell.machine.traceparent()).unwrap_or_default()
    }

    fn instruct(&mut self, key: Key, id: CommandId, node: NodeName, order: Order) {
        let (executor, answers, sessions) =
            (self.parts.executor.clone(), self.answers.clone(), self.parts.sessions.clone());
        let (waiting, epoch, counter) = (self.waiting.clone(), self.parts.epoch, self.parts.metrics.commands());
        let traceparent = self.traceparent(&key).to_owned();
        let said = about_cell(&key, Some(&traceparent));
        if let Order::Acknowledge { pod, .. } = &order
            && let Some(cell) = self.nodes.get_mut(&node)
        {
            cell.outcomes.remove(pod);
        }
        tokio::spawn(
            async move {
                let settled = match order {
                    Order::Acknowledge { pod, seq } => {
                        let ack = agent::OutcomeAck { pod_uid: pod.to_string(), seq };
                        match sessions.send(&node, controller_message::Kind::OutcomeAck(ack)) {
                            Some(_) => Settled::Applied(None),
                            None => Settled::Unknown,
                        }
                    }
                    Order::Do(instruction) => match executor.vmi_bytes(&key, &instruction.vmi).await {
                        Err(settled) => settled,
                        Ok(_) if !executor.leads() => Settled::Unknown,
                        Ok(vmi) => {
                            let slot = (node.clone(), instruction.id.to_string());
                            waiting.insert(slot.clone(), (key.clone(), id));
                            let message = proto::convert::instruct(&instruction, epoch, vmi, traceparent);
                            if sessions.send(&node, controller_message::Kind::Instruct(message)).is_some() {
                                // The answer, or the end of the session, settles it.
                                return;
                            }
                            waiting.remove(&slot);
                            Settled::Unknown
                        }
                    },
                };
                counter.add(&["instruct", metrics::outcome(&settled)]);
                let _ = answers.send(Answer::Vm(key, id, settled)).await;
            }
            .instrument(said),
        );
    }

    /// Carries out a write or a live read beside the driver; how it settled comes back as the answer.
    fn execute<O: Read + Send>(
        &self,
        command: Command,
        said: tracing::Span,
        answer: impl FnOnce(CommandId, Settled<O>) -> Answer + Send + 'static,
    ) {
        let Some(id) = command.id() else { return };
        let (executor, answers) = (self.parts.executor.clone(), self.answers.clone());
        let counter = self.parts.metrics.commands();
        tokio::spawn(
            async move {
                let result = write(&executor, &command).await;
                counter.add(&[metrics::command(&command), metrics::outcome(&result)]);
                let _ = answers.send(answer(id, result)).await;
            }
            .instrument(said),
        );
    }

    // --- Set cells ---

    /// An instance was seen: for the sets of its namespace that want to know.
    fn show_sets(&mut self, instance: &Key, sight: &Sight) {
        let shown = match sight {
            Sight::Present(Object::Vmi(v)) => set::Sight::Member(Box::new(v.as_ref().into())),
            Sight::Gone(r) if r.kind == Kind::VirtualMachineInstance => set::Sight::Gone(r.clone()),
            Sight::Vanished(r) if r.kind == Kind::VirtualMachineInstance => set::Sight::Vanished(r.clone()),
            Sight::Present(_) | Sight::Gone(_) | Sight::Vanished(_) => return,
        };
        let first = Key::new(instance.namespace.clone(), "");
        let told: Vec<Key> = self
            .sets
            .range(first..)
            .take_while(|(k, _)| k.namespace == instance.namespace)
            .filter(|(_, cell)| match &shown {
                set::Sight::Member(m) => cell.machine.wants(m),
                set::Sight::Set(_) | set::Sight::All { .. } | set::Sight::Gone(_) | set::Sight::Vanished(_) => {
                    cell.machine.knows(&instance.name)
                }
            })
            .map(|(k, _)| k.clone())
            .collect();
        for key in told {
            self.set(key, set::Input::Observed(shown.clone()));
        }
    }

    fn set(&mut self, key: Key, input: set::Input) {
        let at = self.now();
        if !self.sets.contains_key(&key) {
            // Only what is there can begin a cell.
            let set::Input::Observed(set::Sight::Set(_)) = &input else { return };
            let cell = SetCell { machine: set::Set::new(key.clone()), choice: None };
            self.sets.insert(key.clone(), cell);
            self.parts.metrics.cells(metrics::Cell::Set, self.sets.len());
        }
        let Some(cell) = self.sets.get_mut(&key) else { return };
        let event = Event::new(at, input);
        let began = Instant::now();
        let commands = self.parts.journal.step(&key.to_string(), None, &mut cell.machine, &event);
        self.parts.metrics.step(metrics::Cell::Set, began.elapsed());
        let choice = cell.machine.choice();
        let listed = (choice != cell.choice).then(|| choice.clone()).flatten();
        cell.choice = choice;
        let empty = cell.machine.is_empty();
        for command in commands {
            match command {
                Command::Wake { at } => self.arm(CellId::Set(key.clone()), at),
                Command::Note(note) => self.parts.events.write(&note),
                command @ (Command::Create { .. }
                | Command::Patch { .. }
                | Command::Delete { .. }
                | Command::Confirm { .. }) => {
                    let (key, said) = (key.clone(), about_cell(&key, None));
                    self.execute(command, said, move |id, result| Answer::Set(key, id, result));
                }
                Command::Survey { id, kind, namespace, selector } => self.survey(&key, id, kind, namespace, selector),
                Command::Instruct { .. } => tracing::error!(%key, "a Set cell asked for what no Set cell may"),
            }
        }
        if empty {
            self.sets.remove(&key);
            self.parts.metrics.cells(metrics::Cell::Set, self.sets.len());
            self.parts.journal.forget(CellKind::Set, &key.to_string());
            self.disarm(&CellId::Set(key));
        } else if let Some(choice) = listed {
            let all = self.parts.vmis.of_namespace(&key.namespace);
            let members =
                all.iter().map(|v| set::Member::from(v.view.as_ref())).filter(|m| choice.chooses(m)).collect();
            self.set(key, set::Input::Listed(members));
        }
    }

    /// Reads all instances of a set live, beside the driver.
    fn survey(&self, key: &Key, id: CommandId, kind: Kind, namespace: String, selector: String) {
        let (executor, answers, key) = (self.parts.executor.clone(), self.answers.clone(), key.clone());
        tokio::spawn(async move {
            let result = executor.survey(kind, namespace, &selector).await;
            let _ = answers.send(Answer::Set(key, id, result)).await;
        });
    }

    // --- Node cells and what agents say ---

    fn node(&mut self, name: NodeName, input: node::Input) {
        let at = self.now();
        let cell = self.nodes.entry(name.clone()).or_insert_with(|| NodeCell {
            machine: node::Node::new(name.clone()),
            told: None,
            inventory: None,
            domains: BTreeMap::new(),
            outcomes: BTreeMap::new(),
        });
        let event = Event::new(at, input);
        let began = Instant::now();
        let commands = self.parts.journal.step(name.as_str(), None, &mut cell.machine, &event);
        self.parts.metrics.step(metrics::Cell::Node, began.elapsed());
        let fact = cell.machine.fact();
        let changed = cell.told.as_ref() != Some(&fact);
        cell.told = Some(fact.clone());
        let address = cell.machine.agent_address().and_then(|a| a.parse().ok());
        self.parts.sessions.node(name.clone(), address);
        if changed {
            self.tell(&(String::new(), Interest::Node(name.clone())), &Input::Configured(Fact::Node(fact)));
        }
        for command in commands {
            match command {
                Command::Wake { at } => self.arm(CellId::Node(name.clone()), at),
                Command::Note(note) => self.parts.events.write(&note),
                command @ (Command::Patch { .. } | Command::Confirm { .. }) => {
                    let (name, said) = (name.clone(), about_cell(&name, None));
                    self.execute(command, said, move |id, result| Answer::Node(name, id, result));
                }
                Command::Create { .. } | Command::Delete { .. } | Command::Survey { .. } | Command::Instruct { .. } => {
                    tracing::error!(%name, "a Node cell asked for what no Node cell may");
                }
            }
        }
    }

    fn hear(&mut self, heard: Heard) -> Option<DriverError> {
        match heard {
            Heard::Outranked { node, highest } => {
                return Some(DriverError::Outranked { node, highest, ours: self.parts.epoch });
            }
            Heard::Opened { node, session, inventory } => {
                self.node(node.clone(), node::Input::Session(Some(session)));
                if let Some(cell) = self.nodes.get_mut(&node) {
                    cell.domains.clear();
                }
                self.inventory(&node, session, inventory);
            }
            Heard::Closed { node, session } => {
                let ours = self.nodes.get(&node).is_some_and(|c| c.machine.fact().session == Some(session));
                if ours {
                    self.node(node.clone(), node::Input::Session(None));
                }
                let broken: Vec<_> =
                    self.waiting.iter().filter(|e| e.key().0 == node).map(|e| e.key().clone()).collect();
                for slot in broken {
                    if let Some((_, (key, id))) = self.waiting.remove(&slot) {
                        self.parts.metrics.settled("instruct", "unknown");
                        self.input(key, Input::Settled { id, result: Settled::Unknown });
                    }
                }
            }
            Heard::Said { node, session, message } => match message {
                agent_message::Kind::Inventory(i) => self.inventory(&node, session, i),
                agent_message::Kind::Report(r) => {
                    if let Some(d) = r.domain {
                        self.domain(&node, d);
                    }
                }
                agent_message::Kind::Outcome(o) => self.outcome(&node, o),
                agent_message::Kind::Ack(ack) => {
                    if let Some((_, (key, id))) = self.waiting.remove(&(node, ack.id.clone())) {
                        self.parts.metrics.settled("instruct", "acked");
                        self.input(key, Input::Settled { id, result: Settled::Acked(AckResult::from(ack)) });
                    }
                }
                agent_message::Kind::Hello(_) => tracing::warn!(%node, session, "Hello out of place"),
            },
        }
        None
    }

    fn inventory(&mut self, node: &NodeName, session: u64, inventory: agent::Inventory) {
        let reflector_rv = ResourceVersion::parse(&inventory.reflector_rv);
        let (complete, boot_id) = (inventory.complete, inventory.boot_id);
        if let Some(cell) = self.nodes.get_mut(node)
            && cell.inventory.as_ref().is_some_and(|(.., boot)| *boot != boot_id)
        {
            // Levels of domains that ended with the boot before.
            cell.domains.clear();
        }
        for d in inventory.domains {
            self.domain(node, d);
        }
        for o in inventory.outcomes {
            self.outcome(node, o);
        }
        if let Some(cell) = self.nodes.get_mut(node) {
            cell.inventory = Some((session, complete, reflector_rv, boot_id.clone()));
        }
        let report = Report::Inventory { node: node.clone(), session, complete, reflector_rv, boot_id };
        self.tell(&(String::new(), Interest::Node(node.clone())), &Input::Reported(report));
    }

    fn domain(&mut self, node: &NodeName, d: agent::Domain) {
        let key = Key::new(d.namespace.clone(), d.name.clone());
        let domain = Arc::new(Domain::from(d));
        if let Some(cell) = self.nodes.get_mut(node) {
            cell.domains.insert(domain.pod.clone(), (key.clone(), domain.clone()));
        }
        self.input(key, Input::Reported(Report::Domain { node: node.clone(), domain }));
    }

    fn outcome(&mut self, node: &NodeName, o: agent::Outcome) {
        let key = Key::new(o.namespace.clone(), o.name.clone());
        let outcome = Outcome::from(o);
        if let Some(cell) = self.nodes.get_mut(node) {
            cell.outcomes.insert(outcome.pod.clone(), (key.clone(), outcome.clone()));
        }
        self.input(key, Input::Reported(Report::Outcome { node: node.clone(), outcome }));
    }
}

/// The time of day.
pub fn wall() -> Timestamp {
    Timestamp(telemetry::clock::now())
}

async fn write<O: Read>(executor: &Executor, command: &Command) -> Settled<O> {
    match command {
        Command::Create { recipe, source, target, .. } => executor.create(recipe, source, target).await,
        Command::Patch { patch, .. } => executor.patch(patch).await,
        Command::Delete { target, .. } => executor.delete(target).await,
        Command::Confirm { target, .. } => executor.confirm(target).await,
        Command::Survey { .. } | Command::Instruct { .. } | Command::Note(_) | Command::Wake { .. } => Settled::Unknown,
    }
}

fn about(sight: &Sight) -> Kind {
    match sight {
        Sight::Present(o) => o.reference().kind,
        Sight::Gone(r) | Sight::Vanished(r) => r.kind,
    }
}

/// What is logged while something is done for a cell names it, and its trace.
fn about_cell(cell: &impl std::fmt::Display, traceparent: Option<&str>) -> tracing::Span {
    let trace = traceparent.and_then(|t| t.split('-').nth(1));
    tracing::info_span!("cell", %cell, trace)
}

/// Nodes have no namespace.
fn namespace(key: &Key, interest: &Interest) -> String {
    match interest {
        Interest::Claim(_) => key.namespace.clone(),
        Interest::Node(_) => String::new(),
    }
}

/// Sends the span of a finished step and those of its waits, and with the last one that of the whole operation.
fn emit(key: &Key, f: &Finished, transition: &str) {
    let Some(context) = telemetry::TraceContext::parse(&f.traceparent) else { return };
    let time = |t: Timestamp| UNIX_EPOCH + Duration::from_millis(t.0);
    let operation = f.step.operation();
    let attributes = |more: Option<(&'static str, String)>| {
        let mut all = vec![("k8s.namespace.name", key.namespace.clone()), ("kubevirt.vm.name", key.name.clone())];
        all.extend(more);
        all
    };
    let base = telemetry::Step::of(context, f.instance.as_str(), operation, time(f.start));
    for wait in &f.waits {
        telemetry::emit(telemetry::Step {
            step: Some(wait.what.name()),
            parent: Some(f.step.name()),
            start: time(wait.from),
            end: time(wait.to),
            attributes: attributes(Some(("virtfold.waits_for", wait.what.name().to_owned()))),
            ..base.clone()
        });
    }
    let error = f.error.clone().map(telemetry::Failure::new);
    telemetry::emit(telemetry::Step {
        step: Some(f.step.name()),
        end: time(f.end),
        attributes: {
            let mut all = attributes(Some(("virtfold.transition", transition.to_owned())));
            all.extend(f.resumed.then(|| ("virtfold.interrupted", "true".to_owned())));
            all
        },
        error: error.clone(),
        ..base.clone()
    });
    if let Some(began) = f.closes {
        let links = f.cause.iter().filter_map(|cause| {
            let of = telemetry::TraceContext::parse(&cause.traceparent)?;
            let context =
                if cause.instance.as_str().is_empty() { of } else { of.operation(cause.instance.as_str(), "start") };
            Some(telemetry::Cause { context, relation: cause.relation.name() })
        });
        telemetry::emit(telemetry::Step {
            start: time(began),
            end: time(f.end),
            attributes: attributes(None),
            error,
            links: links.collect(),
            ..base
        });
    }
}
