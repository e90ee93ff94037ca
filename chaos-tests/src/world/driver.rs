//! The driver of the real Vm and Node cells, as `reconcilers/` has it: turns what is heard into events, steps, and hands
//! the commands on. It contains no decision.

use super::{
    Action, World,
    api::{Proc, Said, Then, Verb},
    heard::NodeCell,
    invariants::Waits,
    mutants::Mutant,
    server::{Res, Seen},
    session::Down,
    sets::{SetCell, sight},
    swarm::Fault,
    users::SECRET,
};
use embedded::semantics::write::Part;
use serde_json::json;
use state::{
    Event, Key, Machine, Millis, NodeName, Timestamp, Uid,
    domain::InstructKind,
    node,
    object::{CommandId, Kind, ObjectRef, Refusal, Settled},
    observe::{NodeView, Object},
    set,
    vm::{ClusterConfig, Command, Fact, Input, Interest, Order, Patch, Recipe, Report, Sight, Source, Vm},
};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    rc::Rc,
};

/// Which cell.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum CellId {
    /// A VM or bare VMI.
    Vm(Key),
    /// A set of instances.
    Set(Key),
    /// A node.
    Node(NodeName),
}

/// One thing that the driver hears from the caches.
#[derive(Debug, Clone)]
pub(super) enum Entry {
    Vm(Key, Sight),
    Set(Key, set::Sight),
    Node(Box<NodeView>),
    NodeGone(NodeName, Uid, bool),
}

#[derive(Debug, Clone)]
pub(super) struct VmCell {
    // Maps keep room for many of them.
    machine: Box<Vm>,
    interests: BTreeSet<Interest>,
}

/// The way to a node's agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// Nothing yet, or it waits to dial again.
    Idle,
    /// Hello is on its way.
    Dialing(u64),
    /// A session stands.
    Open(u64),
}

/// What a leader has beyond a standby.
#[derive(Debug, Clone, Default)]
pub(super) struct Driver {
    pub(super) vms: BTreeMap<Key, VmCell>,
    again: BTreeMap<Key, Vm>,
    pub(super) sets: BTreeMap<Key, SetCell>,
    pub(super) nodes: BTreeMap<NodeName, NodeCell>,
    pub(super) interested: BTreeMap<(String, Interest), BTreeSet<Key>>,
    pub(super) deadlines: BTreeSet<(u64, CellId)>,
    armed: BTreeMap<CellId, u64>,
    pub(super) waiting: BTreeMap<(NodeName, String), (Key, CommandId)>,
    pub(super) inputs: VecDeque<(Key, Input)>,
    order: VecDeque<(Res, String)>,
    entries: BTreeMap<(Res, String), Entry>,
    driving: bool,
    pub(super) links: BTreeMap<NodeName, Link>,
    pub(super) retry: BTreeMap<NodeName, u64>,
    pub(super) numbers: u64,
}

/// Classifies an answer, as the executor does.
pub(super) fn settled<O>(said: &Said, write: bool, read: impl Fn(&Seen) -> Option<O>) -> Settled<O> {
    match said {
        Said::Object(o) => Settled::Applied(read(o)),
        Said::List(..) => Settled::Unknown,
        Said::Deleted => Settled::Gone,
        Said::Silence => Settled::Unknown,
        Said::Status(s) => match s.code {
            404 => Settled::Gone,
            409 => Settled::Conflict,
            410 => Settled::Unknown,
            429 | 503 => Settled::Busy { after: Millis(1000) },
            code => {
                let message = if code == 422 { "is invalid".into() } else { s.message.clone() };
                let refusal = Refusal { code, reason: s.reason.to_string(), message };
                // A server that failed may have done it all the same.
                if (400..=499).contains(&code) || !write { Settled::Refused(refusal) } else { Settled::Failed(refusal) }
            }
        },
    }
}

fn object(seen: &Seen) -> Option<Object> {
    seen.object().cloned()
}

fn reference(seen: &Seen) -> Option<ObjectRef> {
    Some(ObjectRef {
        kind: seen.res.kind()?,
        namespace: seen.namespace().into(),
        name: seen.name().into(),
        uid: seen.uid().into(),
    })
}

/// The cell that an object belongs to: that of its name, of a pod that of its owner.
pub(super) fn cell_of(seen: &Seen) -> Key {
    let name = if seen.res == Res::Pod { seen.owner().map_or("", |(_, n, _)| n) } else { seen.name() };
    Key::new(seen.namespace(), name)
}

pub(super) fn present(seen: &Seen) -> Option<Entry> {
    if seen.res == Res::Node {
        return Some(Entry::Node(Box::new(seen.node()?.clone())));
    }
    if seen.res == Res::Set {
        return Some(Entry::Set(cell_of(seen), sight(seen)?));
    }
    Some(Entry::Vm(cell_of(seen), Sight::Present(object(seen)?)))
}

pub(super) fn absent(seen: &Seen, deleted: bool) -> Option<Entry> {
    if seen.res == Res::Node {
        return Some(Entry::NodeGone(seen.name().into(), seen.uid().into(), deleted));
    }
    let r = reference(seen)?;
    if seen.res == Res::Set {
        let sight = if deleted { set::Sight::Gone(r) } else { set::Sight::Vanished(r) };
        return Some(Entry::Set(cell_of(seen), sight));
    }
    Some(Entry::Vm(cell_of(seen), if deleted { Sight::Gone(r) } else { Sight::Vanished(r) }))
}

fn namespace(key: &Key, interest: &Interest) -> String {
    match interest {
        Interest::Claim(_) => key.namespace.clone(),
        Interest::Node(_) => String::new(),
    }
}

impl World {
    /// Puts an entry into the coalescing queue: of one object the newest wins, two objects of one name never meet.
    pub(super) fn enqueue(&mut self, c: usize, seen: &Seen, entry: Option<Entry>) {
        let id = (seen.res, seen.uid().to_owned());
        let me = self.proc_of(c);
        let Some(d) = self.driver(c) else { return };
        let Some(entry) = entry else { return };
        if d.entries.insert(id.clone(), entry).is_none() {
            d.order.push_back(id);
        }
        if !d.driving {
            d.driving = true;
            let pause = self.dice.below(3);
            self.after(pause, Action::Drive(me));
        }
    }

    /// Takes one entry off the queue.
    pub(super) fn drive(&mut self, c: usize) {
        let Some(d) = self.driver(c) else { return };
        d.driving = false;
        let Some(entry) = d.order.pop_front().and_then(|id| d.entries.remove(&id)) else { return };
        let more = !d.order.is_empty();
        d.driving = more;
        if more {
            let pause = self.dice.below(2);
            let me = self.proc_of(c);
            self.after(pause, Action::Drive(me));
        }
        match entry {
            Entry::Vm(key, sight) => {
                let kind = match &sight {
                    Sight::Present(o) => o.reference().kind,
                    Sight::Gone(r) | Sight::Vanished(r) => r.kind,
                };
                if kind == Kind::PersistentVolumeClaim {
                    let interest = (key.namespace.clone(), Interest::Claim(key.name));
                    self.tell(c, &interest, &Input::Observed(sight));
                } else {
                    self.show_sets(c, &key, &sight);
                    self.input(c, key, Input::Observed(sight));
                }
            }
            Entry::Set(key, sight) => self.set_step(c, key, set::Input::Observed(sight)),
            Entry::Node(view) => {
                let name = NodeName(view.meta.name.clone());
                self.node_step(c, &name, node::Input::Observed { node: *view, live: false });
            }
            Entry::NodeGone(name, uid, true) => self.node_step(c, &name, node::Input::Gone(uid)),
            Entry::NodeGone(name, uid, false) => self.node_step(c, &name, node::Input::Vanished(uid)),
        }
        self.drain(c);
    }

    /// Deadlines that have come.
    pub(super) fn elapse(&mut self, c: usize) {
        let now = self.now;
        loop {
            let Some(d) = self.driver(c) else { return };
            let Some((at, cell)) = d.deadlines.first().cloned().filter(|(at, _)| *at <= now) else { break };
            d.deadlines.remove(&(at, cell.clone()));
            d.armed.remove(&cell);
            if self.is(Mutant::WakesLost) {
                continue;
            }
            match cell {
                CellId::Vm(key) => self.input(c, key, Input::Elapsed),
                CellId::Set(key) => self.set_step(c, key, set::Input::Elapsed),
                CellId::Node(name) => self.node_step(c, &name, node::Input::Elapsed),
            }
        }
        self.drain(c);
    }

    pub(super) fn arm(&mut self, c: usize, cell: CellId, at: u64) {
        let me = self.proc_of(c);
        let Some(d) = self.driver(c) else { return };
        d.disarm(&cell);
        d.armed.insert(cell.clone(), at);
        d.deadlines.insert((at, cell));
        let wait = at.saturating_sub(self.now);
        self.after(wait, Action::Wake(me));
    }

    pub(super) fn input(&mut self, c: usize, key: Key, input: Input) {
        if let Some(d) = self.driver(c) {
            d.inputs.push_back((key, input));
        }
    }

    pub(super) fn tell(&mut self, c: usize, interest: &(String, Interest), input: &Input) {
        if let Some(d) = self.driver(c) {
            let keys: Vec<Key> = d.interested.get(interest).into_iter().flatten().cloned().collect();
            d.inputs.extend(keys.into_iter().map(|k| (k, input.clone())));
        }
    }

    pub(super) fn drain(&mut self, c: usize) {
        while let Some((key, input)) = self.driver(c).and_then(|d| d.inputs.pop_front()) {
            self.step(c, &key, input);
        }
    }

    fn step(&mut self, c: usize, key: &Key, input: Input) {
        let at = Timestamp(self.now);
        let input = self.bend(input);
        let Some(d) = self.driver(c) else { return };
        if !d.vms.contains_key(key) {
            match &input {
                Input::Observed(Sight::Present(_)) | Input::Reported(_) => {}
                Input::Observed(Sight::Gone(_) | Sight::Vanished(_))
                | Input::Settled { .. }
                | Input::Elapsed
                | Input::Configured(_) => return,
            }
            let mut cell = VmCell { machine: Box::new(Vm::new(key.clone())), interests: BTreeSet::new() };
            let configured = Event::new(at, Input::Configured(Fact::Cluster(ClusterConfig::default())));
            let commands = cell.machine.step(&configured);
            d.vms.insert(key.clone(), cell);
            d.again.remove(key);
            if self.replay {
                self.take_again(c, key, &configured, &commands);
            }
            self.steps += 1;
            self.carry_out(c, &CellId::Vm(key.clone()), commands);
        }
        self.cover(c, key, &input);
        let Some(cell) = self.driver(c).and_then(|d| d.vms.get_mut(key)) else { return };
        if cell.machine.knows(&input) {
            return;
        }
        let event = Event::new(at, input);
        let commands = cell.machine.step(&event);
        cell.machine.take_steps();
        let interests = cell.machine.interests();
        let empty = cell.machine.is_empty();
        let changed = interests != cell.interests || empty;
        let old = if changed { std::mem::replace(&mut cell.interests, interests.clone()) } else { BTreeSet::new() };
        self.steps += 1;
        if self.replay {
            self.take_again(c, key, &event, &commands);
        }
        self.mark(&[3, c as u64, commands.len() as u64]);
        self.say(|| {
            let out: Vec<String> = commands.iter().map(brief).collect();
            format!("controller {c} {key}: {} => {}", told(&event.input), out.join(" | "))
        });
        if changed {
            self.reinterest(c, key, &old, if empty { BTreeSet::new() } else { interests });
        }
        self.carry_out(c, &CellId::Vm(key.clone()), commands);
        let kept = self.is(Mutant::CellsKept);
        if empty
            && !kept
            && let Some(d) = self.driver(c)
        {
            d.vms.remove(key);
            d.waiting.retain(|_, (waits, _)| waits != key);
            d.disarm(&CellId::Vm(key.clone()));
        }
    }

    fn reinterest(&mut self, c: usize, key: &Key, old: &BTreeSet<Interest>, new: BTreeSet<Interest>) {
        for gone in old.difference(&new) {
            let id = (namespace(key, gone), gone.clone());
            if let Some(d) = self.driver(c)
                && let Some(keys) = d.interested.get_mut(&id)
            {
                keys.remove(key);
                if keys.is_empty() {
                    d.interested.remove(&id);
                }
            }
        }
        for fresh in new.difference(old) {
            let Some(x) = self.controllers.get_mut(c) else { return };
            let Some(d) = &mut x.driver else { return };
            d.interested.entry((namespace(key, fresh), fresh.clone())).or_default().insert(key.clone());
            match fresh {
                Interest::Claim(name) => {
                    let of = |o: &&Rc<Seen>| o.name() == name && o.namespace() == key.namespace;
                    let found = x.caches.get(&Res::Claim).and_then(|k| k.objects.values().find(of));
                    let sight = match found.and_then(|o| object(o)) {
                        Some(o) => Sight::Present(o),
                        None => Sight::Gone(ObjectRef {
                            kind: Kind::PersistentVolumeClaim,
                            namespace: key.namespace.clone(),
                            name: name.clone(),
                            uid: Uid::default(),
                        }),
                    };
                    d.inputs.push_back((key.clone(), Input::Observed(sight)));
                }
                Interest::Node(name) => d.node_levels(key, name),
            }
        }
    }

    /// Whether the cell that it belongs to would not look at this version any more.
    pub(super) fn is_known(&mut self, c: usize, seen: &Seen) -> bool {
        let Some(o) = object(seen) else { return false };
        let cell = self.driver(c).and_then(|d| d.vms.get_mut(&cell_of(seen)));
        cell.is_some_and(|cell| cell.machine.knows(&Input::Observed(Sight::Present(o))))
    }

    /// Carries out what a Vm or Set cell asks for.
    pub(super) fn carry_out(&mut self, c: usize, cell: &CellId, commands: Vec<Command>) {
        for command in commands {
            if self.controllers[c].driver.is_none() {
                return;
            }
            let me = self.proc_of(c);
            let leads = self.controllers[c].leads(self.now);
            let cell = cell.clone();
            match command {
                Command::Wake { at } => self.arm(c, cell, at.0),
                Command::Note(note) => {
                    *self.ghost.notes.entry(note.reason).or_default() += 1;
                }
                Command::Instruct { id, node, order } => match &cell {
                    CellId::Vm(key) => self.instruct(c, key, id, &node, order),
                    CellId::Set(_) | CellId::Node(_) => self.violated("S8", format!("{cell:?} instructs an agent")),
                },
                Command::Create { id, .. }
                | Command::Patch { id, .. }
                | Command::Delete { id, .. }
                | Command::Confirm { id, .. }
                | Command::Survey { id, .. }
                    if !leads && !self.is(Mutant::DeposedWritesStatus) =>
                {
                    let result = Settled::Busy { after: Millis(1000) };
                    self.after(1, Action::Settled(me, cell, id, Box::new(result)));
                }
                Command::Create { id, recipe, source, target } => {
                    if let Some(old) = self.cached(c, &source.object).filter(|_| self.is(Mutant::CreatesFromTheCache)) {
                        let then = Then::Render(cell, id, recipe, source, target);
                        self.after(1, Action::Answer(me, then, Said::Object(old)));
                        continue;
                    }
                    let get = Verb::Get(
                        Res::of(source.object.kind),
                        source.object.namespace.clone(),
                        source.object.name.clone(),
                    );
                    self.call(me, get, Then::Render(cell, id, recipe, source, target));
                }
                Command::Patch { id, patch } => self.patch(c, cell, id, patch),
                Command::Delete { id, target } => {
                    self.observe_delete(&target);
                    let res = Res::of(target.kind);
                    self.bend_deletion(c, &cell, &target);
                    let uid = if self.is(Mutant::DeletesByName) { "" } else { target.uid.as_str() };
                    let verb = Verb::delete(res, &target.namespace, &target.name, uid);
                    self.write(c, &format!("delete {}", target.kind.name()), verb, Then::Settle(cell, id, true));
                }
                Command::Confirm { id, target } => {
                    if let Some(said) = self.bend_confirm(c, &target) {
                        self.after(1, Action::Answer(me, Then::Settle(cell, id, false), said));
                        continue;
                    }
                    let get = Verb::Get(Res::of(target.kind), target.namespace, target.name);
                    self.call(me, get, Then::Settle(cell, id, false));
                }
                Command::Survey { id, kind, namespace, .. } => match &cell {
                    CellId::Set(key) => self.survey(c, key, id, Res::of(kind), namespace),
                    CellId::Vm(_) | CellId::Node(_) => self.violated("S8", format!("{cell:?} surveys")),
                },
            }
        }
    }

    fn survey(&mut self, c: usize, key: &Key, id: CommandId, res: Res, namespace: String) {
        let me = self.proc_of(c);
        let Some(selector) = self.selector_of(c, key) else { return };
        let then = Then::Surveyed(key.clone(), id, selector);
        if self.is(Mutant::SurveyFromTheCache) {
            let all = self.controllers[c].caches.get(&res).into_iter().flat_map(|k| k.objects.values().cloned());
            let said = Said::List(all.filter(|o| o.namespace() == namespace).collect(), u64::MAX);
            return self.after(1, Action::Answer(me, then, said));
        }
        self.call(me, Verb::List(res, namespace), then);
    }

    pub(super) fn patch(&mut self, c: usize, cell: CellId, id: CommandId, mut patch: Patch) {
        let by_force = self.is(Mutant::DeposedWritesStatus) && patch.status;
        if (self.is(Mutant::NoPreconditions) || by_force)
            && let Some(m) = patch.body.get_mut("metadata").and_then(serde_json::Value::as_object_mut)
        {
            m.remove("resourceVersion");
        }
        if self.bend_patch(c, &cell, id, &patch) {
            return;
        }
        let t = &patch.target;
        let part = if patch.status { Part::Status } else { Part::Main };
        let why = format!("{} {}", t.kind.name(), patch.why);
        let verb = Verb::merge(Res::of(t.kind), &t.namespace, &t.name, part, patch.body);
        self.write(c, &format!("patch {why}"), verb, Then::Settle(cell, id, true));
        *self.ghost.whys.entry(why).or_default() += 1;
    }

    /// An effect: a place where a controller may die, before or after.
    pub(super) fn write(&mut self, c: usize, what: &str, verb: Verb, then: Then) {
        let me = self.proc_of(c);
        let fate = self.effect(me, what);
        if fate.happens {
            self.call(me, verb, then);
        }
        if fate.dies {
            self.crash_controller(c, "it was meant to, at this effect");
        }
    }

    fn instruct(&mut self, c: usize, key: &Key, id: CommandId, node: &NodeName, order: Order) {
        let me = self.proc_of(c);
        match order {
            Order::Acknowledge { pod, seq } => {
                if let Some(cell) = self.driver(c).and_then(|d| d.nodes.get_mut(node)) {
                    cell.outcomes.remove(&pod);
                }
                let fate = self.effect(me, "acknowledge");
                let sent = fate.happens && self.send_down(c, node, Down::OutcomeAck { pod, seq });
                let result = if sent { Settled::Applied(None) } else { Settled::Unknown };
                self.after(1, Action::Settled(me, CellId::Vm(key.clone()), id, Box::new(result)));
                if fate.dies {
                    self.crash_controller(c, "it was meant to, at this effect");
                }
            }
            Order::Do(instruction) => {
                let get = Verb::Get(Res::Vmi, key.namespace.clone(), key.name.clone());
                self.call(me, get, Then::Instruct(key.clone(), id, node.clone(), instruction));
            }
        }
    }

    /// A command has ended.
    pub(super) fn settle(&mut self, c: usize, cell: CellId, id: CommandId, mut result: Settled<Object>) {
        if let (Settled::Busy { after }, true) = (&mut result, self.is(Mutant::NoPause)) {
            *after = Millis(0);
        }
        match cell {
            CellId::Vm(key) => self.input(c, key, Input::Settled { id, result }),
            // What a server sent goes the other way.
            CellId::Set(key) => self.set_step(c, key, set::Input::Settled { id, result: result.map(|_| None) }),
            CellId::Node(_) => {}
        }
        self.drain(c);
    }

    /// An answer of the API server that is not about the Lease.
    pub(super) fn controller_answer(&mut self, c: usize, then: Then, said: &Said) {
        if self.driver(c).is_none() {
            return;
        }
        match then {
            Then::Settle(CellId::Vm(key), id, writes) => {
                if let Said::Object(o) = said {
                    self.controllers[c].note(o);
                }
                let result = settled(said, writes, object);
                // Own writes count at once, also for the set that an instance is of.
                if let (Settled::Applied(Some(o)), false) = (&result, self.is(Mutant::OwnWritesUnshown)) {
                    self.show_sets(c, &key, &Sight::Present(o.clone()));
                }
                self.settle(c, CellId::Vm(key), id, result);
            }
            Then::Settle(CellId::Set(key), id, writes) => {
                if let Said::Object(o) = said {
                    self.controllers[c].note(o);
                }
                let result = settled(said, writes, sight);
                self.set_step(c, key, set::Input::Settled { id, result });
                self.drain(c);
            }
            Then::Settle(CellId::Node(name), id, writes) => {
                let result = settled(said, writes, |o| o.node().cloned());
                self.node_step(c, &name, node::Input::Settled { id, result });
                self.drain(c);
            }
            Then::Surveyed(key, id, selector) => self.surveyed(c, key, id, &selector, said),
            Then::Render(cell, id, recipe, source, target) => {
                self.rendered(c, cell, id, &recipe, &source, target, said);
            }
            Then::Instruct(key, id, node, instruction) => {
                let vmi = match said {
                    Said::Object(o) if o.uid() == instruction.vmi.as_str() => Ok(o.clone()),
                    Said::Object(_) => Err(Settled::Gone),
                    other => Err(settled(other, false, object)),
                };
                let me = self.proc_of(c);
                let cell = CellId::Vm(key.clone());
                let vmi = match vmi {
                    Ok(vmi) if self.controllers[c].leads(self.now) => vmi,
                    Ok(_) => return self.settle(c, cell, id, Settled::Unknown),
                    Err(result) => return self.settle(c, cell, id, result),
                };
                let fate = self.effect(me, &format!("instruct {}", instruction.kind.name()));
                let epoch = self.controllers[c].epoch.unwrap_or_default();
                let slot = (node.clone(), instruction.id.to_string());
                if let Some(d) = self.driver(c) {
                    d.waiting.insert(slot.clone(), (key, id));
                }
                // From now on it may begin, whatever becomes of its pod.
                if fate.happens && instruction.kind == InstructKind::Start {
                    self.ghost.told_to_start.insert(instruction.pod.0.clone());
                }
                let down = Down::Instruct { epoch, instruction, vmi };
                if !(fate.happens && self.send_down(c, &node, down)) {
                    if let Some(d) = self.driver(c) {
                        d.waiting.remove(&slot);
                    }
                    self.settle(c, cell, id, Settled::Unknown);
                }
                if fate.dies {
                    self.crash_controller(c, "it was meant to, at this effect");
                }
            }
            Then::LeaseRead(_)
            | Then::LeaseTaken(_)
            | Then::LeaseRenewed(_)
            | Then::LeaseReread
            | Then::Judge(_)
            | Then::Confirm(_)
            | Then::Unpaused(..) => {}
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn rendered(
        &mut self,
        c: usize,
        cell: CellId,
        id: CommandId,
        recipe: &Recipe,
        source: &Source,
        target: ObjectRef,
        said: &Said,
    ) {
        let raw = match said {
            Said::Object(o) if o.uid() == source.object.uid.as_str() && o.revision == source.rv.0 => o,
            Said::Object(_) => return self.settle(c, cell, id, Settled::Conflict),
            other => {
                let result = settled(other, false, object);
                return self.settle(c, cell, id, result);
            }
        };
        if let Recipe::Vmi { vm, .. } = recipe {
            self.observe_creation(vm.as_str(), source.rv.0);
        }
        match state::render::render(recipe, &source.object, &target, &raw.value, &[]) {
            Ok(mut body) => {
                let random = self.is(Mutant::RandomPodName) || self.is(Mutant::LauncherAfterTombstone);
                if random && target.kind == Kind::Pod {
                    let suffix = self.dice.below(1 << 32);
                    body["metadata"]["name"] = json!(format!("{}-{suffix:x}", target.name));
                }
                if self.is(Mutant::RandomMemberName) && matches!(recipe, Recipe::Member { .. }) {
                    let suffix = self.dice.below(1 << 32);
                    body["metadata"]["name"] = json!(format!("{}-{suffix:x}", target.name));
                }
                if self.is(Mutant::PodsOfTheMachine) && target.kind == Kind::Pod {
                    own_by_machine(&mut body, &raw.value);
                }
                let goes = self.is(Mutant::NoFinalizer) || self.is(Mutant::PodsOfTheMachine);
                if goes && target.kind == Kind::VirtualMachineInstance {
                    body["metadata"]["finalizers"] = json!([]);
                }
                let verb = Verb::Create(Res::of(target.kind), target.namespace.clone(), body);
                self.write(c, &format!("create {}", target.kind.name()), verb, Then::Settle(cell, id, true));
            }
            Err(e) => {
                let message = e.to_string();
                let refused = Refusal { code: 500, reason: "Unreadable".into(), message };
                self.settle(c, cell, id, Settled::Refused(refused));
            }
        }
    }

    /// Keys of the leader's Vm and Set cells and what they wait for.
    pub(super) fn waits(&self, c: usize) -> Waits {
        let Some(d) = self.controllers.get(c).and_then(|x| x.driver.as_ref()) else { return BTreeMap::new() };
        let of = |cell: &VmCell| cell.machine.waits().iter().map(|w| (format!("{w:?}"), w.until())).collect();
        let vms = d.vms.iter().map(|(k, cell)| (k.to_string(), of(cell)));
        let of = |cell: &SetCell| cell.machine.waits().iter().map(|w| (format!("{w:?}"), w.until)).collect();
        vms.chain(d.sets.iter().map(|(k, cell)| (format!("{k} (set)"), of(cell)))).collect()
    }

    /// Cells and other things that a controller keeps of what is gone.
    pub(super) fn kept(&self, c: usize) -> Vec<String> {
        let Some(d) = self.controllers.get(c).and_then(|x| x.driver.as_ref()) else { return vec![] };
        let is = |res, k: &Key| self.ghost.find(res, &k.namespace, &k.name).is_some();
        let vms =
            d.vms.keys().filter(|k| !is(Res::Vm, k) && !is(Res::Vmi, k)).map(|k| format!("a cell of {k} is kept"));
        let sets = d.sets.keys().filter(|k| !is(Res::Set, k)).map(|k| format!("a cell of set {k} is kept"));
        let waiting = d.waiting.keys().map(|slot| format!("an instruction is waited for: {slot:?}"));
        vms.chain(sets).chain(waiting).collect()
    }

    /// Takes a step again on a machine that knows what is recorded and nothing else.
    fn take_again(&mut self, c: usize, key: &Key, event: &Event<Input>, commands: &[Command]) {
        if self.is(Mutant::ReportsUnrecorded) && matches!(event.input, Input::Reported(_)) {
            return;
        }
        let mut event = serde_json::to_string(event).unwrap_or_default();
        let commands = serde_json::to_string(commands).unwrap_or_default();
        if self.is(Mutant::ObjectsRecorded)
            && let Some(o) = self.ghost.find(Res::Vm, &key.namespace, &key.name)
        {
            event += &o.value.to_string();
        }
        self.ghost.recorded += (event.len() + commands.len()) as u64;
        if event.contains(SECRET) || commands.contains(SECRET) {
            self.ghost.leaked.push(format!("what is secret in {key} is recorded"));
            self.ghost.dirty = true;
            return;
        }
        let Ok(event) = serde_json::from_str::<Event<Input>>(&event) else { return };
        let Some(d) = self.driver(c) else { return };
        let again = d.again.entry(key.clone()).or_insert_with(|| Vm::new(key.clone())).step(&event);
        let again = serde_json::to_string(&again).unwrap_or_default();
        if again != commands {
            self.ghost.unrepeatable.push(format!("{key}: recorded {commands}, taken again {again}"));
            self.ghost.dirty = true;
        }
    }

    /// Slower than usual, now and then.
    pub(super) fn hiccup(&mut self, who: Proc) -> u64 {
        let usual = self.dice.between(1, 10);
        self.strikes(Fault::Slow, || format!("{who} message")).map_or(usual, |mut d| d.between(1, 3000))
    }
}

impl Driver {
    pub(super) fn disarm(&mut self, cell: &CellId) {
        if let Some(at) = self.armed.remove(cell) {
            self.deadlines.remove(&(at, cell.clone()));
        }
    }
}

/// The machine stands before the instance as the owner of a pod.
fn own_by_machine(pod: &mut serde_json::Value, vmi: &serde_json::Value) {
    if let (Some(machine), Some(owners)) = (
        vmi.pointer("/metadata/ownerReferences/0").cloned(),
        pod.pointer_mut("/metadata/ownerReferences").and_then(serde_json::Value::as_array_mut),
    ) {
        let mut machine = machine;
        machine["controller"] = json!(false);
        owners.insert(0, machine);
    }
}

fn told(input: &Input) -> String {
    match input {
        Input::Observed(Sight::Present(o)) => format!("sees {} at {}", o.reference(), o.rv()),
        Input::Reported(Report::Domain { domain, .. }) => format!("domain {:?} of pod {}", domain.state, domain.pod),
        other => format!("{other:?}").chars().take(300).collect(),
    }
}

pub(super) fn brief(command: &Command) -> String {
    match command {
        Command::Create { target, .. } => format!("create {}", target.kind.name()),
        Command::Patch { patch, .. } => format!("patch {} {} {}", patch.target.kind.name(), patch.why, patch.body),
        Command::Delete { target, .. } => format!("delete {}", target.kind.name()),
        Command::Confirm { target, .. } => format!("confirm {}", target.kind.name()),
        Command::Survey { kind, .. } => format!("survey {}", kind.name()),
        Command::Instruct { order: Order::Do(i), .. } => format!("instruct {}", i.kind.name()),
        Command::Instruct { order: Order::Acknowledge { .. }, .. } => "acknowledge".into(),
        Command::Note(n) => format!("note {}", n.reason),
        Command::Wake { at } => format!("wake {at}"),
    }
}
