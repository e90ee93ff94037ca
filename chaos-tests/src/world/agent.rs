//! A node agent: the real Agent cells and the real admission of sessions, with what `node-agent/` does around them, and the
//! few files that it keeps as a model of a disk.

use super::{
    Action, World,
    api::{Proc, Said, Then, Verb},
    controller::LEASE_NAME,
    mutants::Mutant,
    node::LinkMessage,
    server::{Commit, Res, Seen, Wanted},
    session::Up,
    swarm::Fault,
};
use embedded::semantics::{patch, write::Part};
use serde_json::json;
use state::{
    Epoch, Event, Key, LeaderInstance, Machine, NodeName, PodUid, ResourceVersion, Timestamp, VmiUid,
    agent::{
        self, Admission, Command, Confirmed, Hello, Input, LeaseSeen, Memory,
        session::{admit, admit_by_lease},
        vmi::Stage,
    },
    domain::{AckResult, Instruction, Outcome, RefusalReason},
};
use std::{
    collections::{BTreeMap, VecDeque},
    rc::Rc,
};

/// Versions of the protocol.
const OURS: (u32, u32) = (1, 1);

/// A pod as the node's runtime tells the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodFacts {
    /// VMI.
    pub vmi: String,
    /// Namespace.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// Name of the VMI.
    pub vmi_name: String,
    /// The launcher's container is not known to have ended.
    pub running: bool,
}

/// What stands on disk about a pod.
#[derive(Debug, Clone, Default)]
pub struct Record {
    /// How its domain ended.
    pub outcome: Option<Outcome>,
    unpaused: Option<bool>,
    namespace: String,
    name: String,
}

/// The agent's disk.
#[derive(Debug, Clone, Default)]
pub struct Disk {
    /// The leader that was accepted last.
    pub memory: Option<Memory>,
    /// Pods.
    pub records: BTreeMap<PodUid, Record>,
}

#[derive(Debug, Clone)]
struct Slot {
    cell: Box<agent::Agent>,
    pod: Option<PodFacts>,
    linked: Option<String>,
    linking: bool,
    link_at: u64,
    raw: Option<Rc<Seen>>,
    namespace: String,
    name: String,
    wake: Option<u64>,
}

/// The process.
#[derive(Debug, Clone)]
pub(super) struct AgentProcess {
    /// Which of its lives.
    pub inc: u32,
    slots: BTreeMap<PodUid, Slot>,
    vmis: BTreeMap<VmiUid, Rc<Seen>>,
    known: BTreeMap<VmiUid, u64>,
    reached: Option<u64>,
    enumerated: bool,
    session: Option<u64>,
    complete_sent: bool,
    judging: Option<(u64, Hello)>,
    hellos: VecDeque<(u64, Hello)>,
}

impl AgentProcess {
    /// When a deadline of a cell comes next.
    pub fn due(&self) -> Option<u64> {
        self.slots.values().filter_map(|s| s.wake).min()
    }

    /// It has something to do with a pod.
    pub fn has_pods(&self) -> bool {
        !self.slots.is_empty()
    }

    /// It knows these pods of the runtime, and no others.
    pub fn knows(&self, pods: &BTreeMap<PodUid, PodFacts>) -> bool {
        let known =
            |(uid, facts): (&PodUid, &PodFacts)| self.slots.get(uid).and_then(|s| s.pod.as_ref()) == Some(facts);
        let gone = |(uid, s): (&PodUid, &Slot)| s.pod.is_some() && !pods.contains_key(uid);
        self.enumerated && pods.iter().all(known) && !self.slots.iter().any(gone)
    }

    /// It would try in vain to reach this launcher that does not answer.
    pub fn waits_for_launcher(&self, pod: &PodUid) -> bool {
        self.slots.get(pod).is_some_and(|s| s.pod.as_ref().is_some_and(|p| p.running))
    }

    /// Nothing is left that waits for anybody.
    pub fn is_idle(&self) -> bool {
        self.slots.values().all(|s| s.pod.is_some() && s.cell.outcome().is_none())
    }
}

impl World {
    fn agent_proc(&self, n: usize) -> Option<Proc> {
        self.nodes[n].agent.as_ref().map(|a| Proc::Agent(n, a.inc))
    }

    fn agent(&mut self, n: usize) -> Option<&mut AgentProcess> {
        self.nodes[n].agent.as_mut()
    }

    pub(super) fn start_agent(&mut self, n: usize) {
        let node = &mut self.nodes[n];
        if node.agent.is_some() || !node.powered {
            return;
        }
        node.agent_inc += 1;
        let me = Proc::Agent(n, node.agent_inc);
        node.agent = Some(AgentProcess {
            inc: node.agent_inc,
            slots: BTreeMap::new(),
            vmis: BTreeMap::new(),
            known: BTreeMap::new(),
            reached: None,
            enumerated: false,
            session: None,
            complete_sent: false,
            judging: None,
            hellos: VecDeque::new(),
        });
        let records = node.disk.records.clone();
        for (pod, record) in records {
            if let Some(slot) = self.agent_slot(n, &pod) {
                slot.namespace.clone_from(&record.namespace);
                slot.name.clone_from(&record.name);
            }
            if let Some(outcome) = record.outcome {
                self.agent_step_later(n, &pod, Input::OutcomeRestored(outcome));
            }
            if let Some(unpaused) = record.unpaused {
                self.agent_step_later(n, &pod, Input::UnpausedRestored(unpaused));
            }
        }
        self.say(|| format!("{me:?} starts"));
        self.watch(me, Res::Vmi);
        let pause = self.dice.between(1, 200);
        self.after(pause, Action::AgentPods(me));
    }

    /// The agent's process ends, where there is one; guests and launchers stay.
    pub(super) fn crash_agent(&mut self, n: usize) -> bool {
        let Some(me) = self.agent_proc(n) else { return false };
        self.say(|| format!("{me:?} ends"));
        self.nodes[n].agent = None;
        self.unwatch(me);
        let open: Vec<u64> = self.sessions.iter().filter(|(_, s)| s.agent == Some(me)).map(|(id, _)| *id).collect();
        for id in open {
            self.cut(id);
        }
        let pause = self.dice.between(200, 5000);
        self.after(pause, Action::StartAgent(n));
        true
    }

    fn agent_slot(&mut self, n: usize, pod: &PodUid) -> Option<&mut Slot> {
        let name = self.nodes[n].name.clone();
        let a = self.nodes[n].agent.as_mut()?;
        Some(a.slots.entry(pod.clone()).or_insert_with(|| Slot {
            cell: Box::new(agent::Agent::new(name, pod.clone())),
            pod: None,
            linked: None,
            linking: false,
            link_at: 0,
            raw: None,
            namespace: String::new(),
            name: String::new(),
            wake: None,
        }))
    }

    /// Folds without carrying out: nothing follows but a deadline or the end.
    fn agent_step_later(&mut self, n: usize, pod: &PodUid, input: Input) {
        let at = Timestamp(self.now);
        let Some(me) = self.agent_proc(n) else { return };
        let Some(slot) = self.agent(n).and_then(|a| a.slots.get_mut(pod)) else { return };
        for c in slot.cell.step(&Event::new(at, input)) {
            if let Command::Wake { at } = c {
                slot.wake = Some(at.0);
                let wait = at.0.saturating_sub(self.now);
                return self.after(wait, Action::AgentWake(me));
            }
        }
    }

    pub(super) fn agent_step(&mut self, n: usize, pod: &PodUid, input: Input) {
        self.agent_step_with(n, pod, input, None);
    }

    /// Steps a cell, and keeps the VMI where the cell took it.
    fn agent_step_with(&mut self, n: usize, pod: &PodUid, input: Input, vmi: Option<&Rc<Seen>>) {
        let at = Timestamp(self.now);
        let input = self.bend_agent(n, pod, input);
        let recording = self.recording();
        let Some(slot) = self.agent(n).and_then(|a| a.slots.get_mut(pod)) else { return };
        let text = if recording { format!("{input:?}").chars().take(240).collect() } else { String::new() };
        let commands = slot.cell.step(&Event::new(at, input));
        if let Some(v) = vmi
            && slot.cell.vmi_rv() == Some(ResourceVersion(v.revision))
        {
            slot.raw = Some(v.clone());
        }
        self.steps += 1;
        self.mark(&[5, n as u64, commands.len() as u64]);
        self.say(|| format!("agent {n} {pod}: {text} => {commands:?}"));
        for c in commands {
            self.agent_carry_out(n, pod, c);
        }
        self.agent_complete(n);
    }

    pub(super) fn agent_wake(&mut self, n: usize) {
        let now = self.now;
        let Some(a) = self.agent(n) else { return };
        let due: Vec<PodUid> =
            a.slots.iter().filter(|(_, s)| s.wake.is_some_and(|w| w <= now)).map(|(p, _)| p.clone()).collect();
        for pod in due {
            if let Some(slot) = self.agent(n).and_then(|a| a.slots.get_mut(&pod)) {
                slot.wake = None;
            }
            self.agent_step(n, &pod, Input::Elapsed);
        }
    }

    /// The runtime's pods, as they are now.
    pub(super) fn agent_pods(&mut self, n: usize) {
        let pods: BTreeMap<PodUid, PodFacts> = self.nodes[n].pod_facts();
        let Some(a) = self.agent(n) else { return };
        let first = !a.enumerated;
        a.enumerated = true;
        for (pod, facts) in &pods {
            let Some(slot) = self.agent_slot(n, pod) else { return };
            let known = slot.pod.as_ref() == Some(facts);
            let new = slot.pod.is_none();
            slot.namespace.clone_from(&facts.namespace);
            slot.name.clone_from(&facts.vmi_name);
            slot.pod = Some(facts.clone());
            let knows = self.agent(n).and_then(|a| a.slots.get(pod)?.cell.session());
            let open = self.agent(n).and_then(|a| a.session).filter(|s| Some(*s) != knows);
            if let Some(session) = open.filter(|_| new) {
                let epoch = self.nodes[n].disk.memory.as_ref().map(|m| m.epoch).unwrap_or_default();
                self.agent_step_later(n, pod, Input::SessionOpened { session, epoch });
            }
            if !known {
                let vmi = VmiUid(facts.vmi.clone());
                self.agent_step(n, pod, Input::PodObserved { vmi: vmi.clone(), running: facts.running });
                if let Some(a) = self.agent(n).filter(|_| new) {
                    let (seen, reached) = (a.vmis.get(&vmi).cloned(), a.reached.is_some());
                    match seen.as_ref().and_then(|s| s.facts().map(|f| (s, f.clone()))) {
                        Some((s, f)) => self.agent_step_with(n, pod, Input::VmiObserved(f), Some(s)),
                        None if reached => self.agent_step(n, pod, Input::VmiVanished),
                        None => {}
                    }
                }
            }
            self.ensure_link(n, pod);
        }
        let Some(a) = self.agent(n) else { return };
        let gone: Vec<PodUid> = a
            .slots
            .iter()
            .filter(|(p, s)| (s.pod.is_some() || first) && !pods.contains_key(*p))
            .map(|(p, _)| p.clone())
            .collect();
        for pod in gone {
            if let Some(slot) = self.agent(n).and_then(|a| a.slots.get_mut(&pod)) {
                slot.pod = None;
                slot.linked = None;
                slot.linking = false;
            }
            self.agent_step(n, &pod, Input::PodGone);
        }
        self.agent_complete(n);
    }

    // --- launchers ---

    fn ensure_link(&mut self, n: usize, pod: &PodUid) {
        let Some(me) = self.agent_proc(n) else { return };
        let Some(slot) = self.agent(n).and_then(|a| a.slots.get_mut(pod)) else { return };
        if slot.linking || !slot.pod.as_ref().is_some_and(|p| p.running) {
            return;
        }
        slot.linking = true;
        let pause = self.dice.between(1, 50);
        self.after(pause, Action::LinkTry(me, pod.clone()));
    }

    /// Tries to reach a launcher.
    pub(super) fn link_try(&mut self, n: usize, pod: &PodUid) {
        let Some(me) = self.agent_proc(n) else { return };
        let now = self.now;
        let found = self.nodes[n].launchers.get(pod).filter(|l| l.answers(now)).map(|l| l.level());
        let Some(slot) = self.agent(n).and_then(|a| a.slots.get_mut(pod)).filter(|s| s.linking) else { return };
        match found {
            Some((instance, epoch, domain, outcome)) => {
                slot.linked = Some(instance.clone());
                slot.link_at = now;
                let connected = Input::LauncherConnected { launcher: instance.as_str().into(), epoch };
                self.agent_step(n, pod, connected);
                self.agent_step(n, pod, Input::LauncherReported(domain));
                if let Some(o) = outcome {
                    self.launcher_taken(n, pod);
                    self.agent_step(n, pod, Input::LauncherEnded(o));
                }
            }
            None if slot.pod.as_ref().is_some_and(|p| p.running) => {
                let pause = self.dice.between(50, 1000);
                self.after(pause, Action::LinkTry(me, pod.clone()));
            }
            None => slot.linking = false,
        }
    }

    /// A launcher has something to tell to whoever follows it.
    pub(super) fn link_send(&mut self, n: usize, pod: &PodUid, instance: &str, message: LinkMessage) {
        let Some(me) = self.agent_proc(n) else { return };
        let lag = self.dice.between(1, 10);
        let now = self.now;
        let Some(slot) = self.agent(n).and_then(|a| a.slots.get_mut(pod)) else { return };
        if slot.linked.as_deref() != Some(instance) {
            return;
        }
        slot.link_at = slot.link_at.max(now + lag);
        let wait = slot.link_at - now;
        if matches!(message, LinkMessage::Level(_, Some(_))) {
            self.launcher_taken(n, pod);
        }
        self.after(wait, Action::Linked(me, pod.clone(), instance.to_owned(), message));
    }

    pub(super) fn linked(&mut self, n: usize, pod: &PodUid, instance: &str, message: LinkMessage) {
        let Some(me) = self.agent_proc(n) else { return };
        let Some(slot) = self.agent(n).and_then(|a| a.slots.get_mut(pod)) else { return };
        if slot.linked.as_deref() != Some(instance) {
            return;
        }
        match message {
            LinkMessage::Level(domain, outcome) => {
                self.agent_step(n, pod, Input::LauncherReported(domain));
                if let Some(o) = outcome {
                    self.agent_step(n, pod, Input::LauncherEnded(o));
                }
            }
            LinkMessage::Lost => {
                slot.linked = None;
                slot.linking = slot.pod.as_ref().is_some_and(|p| p.running);
                if slot.linking {
                    self.after(50, Action::LinkTry(me, pod.clone()));
                }
                self.agent_step(n, pod, Input::LauncherLost);
            }
        }
    }

    // --- the watch ---

    fn agent_cells_of(&mut self, n: usize, vmi: &str) -> Vec<PodUid> {
        let is = |s: &Slot| s.pod.as_ref().is_some_and(|p| p.vmi == vmi);
        self.agent(n).map_or_else(Vec::new, |a| a.slots.iter().filter(|(_, s)| is(s)).map(|(p, _)| p.clone()).collect())
    }

    fn agent_seen(&mut self, n: usize, vmi: &Rc<Seen>) {
        let Some(facts) = vmi.facts().cloned() else { return };
        for pod in self.agent_cells_of(n, vmi.uid()) {
            self.agent_step_with(n, &pod, Input::VmiObserved(facts.clone()), Some(vmi));
        }
        if let Some(a) = self.agent(n) {
            a.vmis.insert(facts.uid, vmi.clone());
        }
    }

    fn agent_vanished(&mut self, n: usize, uid: &VmiUid) {
        if let Some(a) = self.agent(n) {
            a.vmis.remove(uid);
        }
        for pod in self.agent_cells_of(n, uid.as_str()) {
            self.agent_step(n, &pod, Input::VmiVanished);
        }
    }

    fn agent_reached(&mut self, n: usize, rv: u64) {
        let Some(a) = self.agent(n) else { return };
        let first = a.reached.is_none();
        a.reached = a.reached.max(Some(rv));
        if first {
            let vmis = &a.vmis;
            let unseen = |p: &PodFacts| !vmis.contains_key(&VmiUid(p.vmi.clone()));
            let missing: Vec<PodUid> =
                a.slots.iter().filter(|(_, s)| s.pod.as_ref().is_some_and(unseen)).map(|(p, _)| p.clone()).collect();
            for pod in missing {
                self.agent_step(n, &pod, Input::VmiVanished);
            }
        }
    }

    pub(super) fn is_mine(&self, n: usize, seen: &Seen) -> bool {
        let label = seen.value.pointer("/metadata/labels").and_then(|l| l.get(api::names::LABEL_NODE_NAME));
        label.and_then(|v| v.as_str()) == Some(self.nodes[n].name.as_str())
    }

    pub(super) fn agent_changes(&mut self, n: usize, commits: &[Commit], upto: u64) {
        for commit in commits {
            let mine = !commit.gone && self.is_mine(n, &commit.now);
            let was = commit.before.as_ref().filter(|b| self.is_mine(n, b)).cloned();
            let uid = VmiUid(commit.now.uid().into());
            if mine {
                if let Some(a) = self.agent(n) {
                    a.known.insert(uid, commit.now.revision);
                }
                self.agent_seen(n, &commit.now);
            } else if let Some(was) = was {
                // As it was when it last carried the label, at the version of the change.
                let last = was.at(commit.now.revision);
                if let Some(a) = self.agent(n) {
                    a.known.remove(&uid);
                }
                self.agent_seen(n, &last);
                self.agent_vanished(n, &uid);
            }
        }
        self.agent_reached(n, upto);
    }

    pub(super) fn agent_list(&mut self, n: usize, items: &[Rc<Seen>], rv: u64) {
        let mine: Vec<Rc<Seen>> = items.iter().filter(|o| self.is_mine(n, o)).cloned().collect();
        let there: BTreeMap<VmiUid, u64> = mine.iter().map(|o| (VmiUid(o.uid().into()), o.revision)).collect();
        for o in &mine {
            self.agent_seen(n, o);
        }
        let Some(a) = self.agent(n) else { return };
        let before = std::mem::replace(&mut a.known, there.clone());
        for (uid, seen) in before {
            if !there.contains_key(&uid) && seen <= rv {
                self.agent_vanished(n, &uid);
            }
        }
        self.agent_reached(n, rv);
    }

    // --- sessions ---

    pub(super) fn agent_hello(&mut self, n: usize, id: u64, epoch: Epoch, leader: LeaderInstance) {
        let hello = Hello { epoch, leader, proto_min: OURS.0, proto_max: OURS.1 };
        let Some(a) = self.agent(n) else { return };
        if a.judging.is_some() {
            a.hellos.push_back((id, hello));
            return;
        }
        self.judge(n, id, hello);
    }

    fn judge(&mut self, n: usize, id: u64, hello: Hello) {
        let mut admission = admit(self.nodes[n].disk.memory.as_ref(), &hello, OURS);
        if self.is(Mutant::EveryHello) {
            admission = Admission::Accept { proto: OURS.0 };
        }
        match admission {
            Admission::AskLease => {
                let Some(me) = self.agent_proc(n) else { return };
                if let Some(a) = self.agent(n) {
                    a.judging = Some((id, hello));
                }
                self.call(me, Verb::Get(Res::Lease, LEASE_NAME.0.into(), LEASE_NAME.1.into()), Then::Judge(id));
            }
            decided => self.judged(n, id, &hello, &decided),
        }
    }

    fn lease_decides(&mut self, n: usize, said: &Said) {
        let Some((id, hello)) = self.agent(n).and_then(|a| a.judging.take()) else { return };
        let lease = match said {
            Said::Object(o) if !o.text("/spec/holderIdentity").is_empty() => {
                LeaseSeen::HeldBy(o.text("/spec/holderIdentity").into())
            }
            Said::Object(_) => LeaseSeen::Nobody,
            Said::Status(s) if s.code == 404 => LeaseSeen::Nobody,
            Said::Status(s) => LeaseSeen::Unreadable(s.message.clone()),
            Said::Silence | Said::Deleted | Said::List(..) => LeaseSeen::Unreadable("no answer".into()),
        };
        let decided = admit_by_lease(self.nodes[n].disk.memory.as_ref(), &hello, &lease, OURS);
        self.judged(n, id, &hello, &decided);
        if let Some((id, hello)) = self.agent(n).and_then(|a| a.hellos.pop_front()) {
            self.judge(n, id, hello);
        }
    }

    fn judged(&mut self, n: usize, id: u64, hello: &Hello, decided: &Admission) {
        self.say(|| format!("agent {n}: epoch {} of {}: {decided:?}", hello.epoch, hello.leader));
        match decided {
            Admission::Accept { .. } => {
                self.observe_admission(n, hello);
                self.nodes[n].disk.memory = Some(Memory { epoch: hello.epoch, leader: hello.leader.clone() });
                self.agent_opened(n, id, hello.epoch);
            }
            Admission::Refuse(_) | Admission::AskLease => {
                let highest = self.nodes[n].disk.memory.as_ref().map(|m| m.epoch).unwrap_or_default();
                self.post_up(id, Up::Refused(highest));
            }
        }
    }

    fn agent_opened(&mut self, n: usize, id: u64, epoch: Epoch) {
        let at = Timestamp(self.now);
        let Some(a) = self.agent(n) else { return };
        let old = a.session.replace(id);
        a.complete_sent = false;
        let mut commands = vec![];
        for (pod, slot) in &mut a.slots {
            let follow = slot.cell.step(&Event::new(at, Input::SessionOpened { session: id, epoch }));
            commands.extend(follow.into_iter().map(|c| (pod.clone(), c)));
        }
        if let Some(old) = old.filter(|o| *o != id) {
            self.cut(old);
        }
        self.send_inventory(n);
        for (pod, command) in commands {
            self.agent_carry_out(n, &pod, command);
        }
        self.after(5, Action::AssertNode(n));
    }

    fn send_inventory(&mut self, n: usize) {
        let boot_id = format!("boot-{}", self.nodes[n].boot);
        let Some(a) = self.agent(n) else { return };
        let Some(id) = a.session else { return };
        let complete = a.is_complete();
        let key = |s: &Slot| Key::new(s.namespace.clone(), s.name.clone());
        let domains = a.slots.values().filter_map(|s| Some((key(s), s.cell.view()?))).collect();
        let outcomes = a.slots.values().filter_map(|s| Some((key(s), s.cell.outcome()?.clone()))).collect();
        let reflector_rv = a.reached.unwrap_or(0);
        a.complete_sent = complete;
        self.post_up(id, Up::Inventory { complete, boot_id, reflector_rv, domains, outcomes });
    }

    fn agent_complete(&mut self, n: usize) {
        if self.agent(n).is_some_and(|a| a.session.is_some() && !a.complete_sent && a.is_complete()) {
            self.send_inventory(n);
        }
    }

    pub(super) fn agent_closed(&mut self, n: usize, id: u64) {
        let Some(a) = self.agent(n) else { return };
        if a.session == Some(id) {
            a.session = None;
        }
        for pod in a.slots.keys().cloned().collect::<Vec<_>>() {
            self.agent_step(n, &pod, Input::SessionClosed { session: id });
        }
    }

    pub(super) fn agent_instructed(
        &mut self,
        n: usize,
        id: u64,
        epoch: Epoch,
        instruction: Instruction,
        vmi: &Rc<Seen>,
    ) {
        let pod = instruction.pod.clone();
        let Some(slot) = self.agent_slot(n, &pod) else { return };
        if slot.name.is_empty() {
            slot.namespace = vmi.namespace().into();
            slot.name = vmi.name().into();
        }
        // A cell that was made after the session opened; not one that a session speaks to that is over.
        let knows = slot.cell.session();
        let open = self.agent(n).and_then(|a| a.session);
        if let Some(session) = open.filter(|s| Some(*s) != knows) {
            let of = self.nodes[n].disk.memory.as_ref().map(|m| m.epoch).unwrap_or_default();
            self.agent_step_later(n, &pod, Input::SessionOpened { session, epoch: of });
        }
        let input = Input::Instructed { session: id, epoch, instruction, vmi: vmi.facts().cloned() };
        self.agent_step_with(n, &pod, input, Some(vmi));
    }

    fn tell_controller(&mut self, n: usize, up: Up) {
        if let Some(id) = self.agent(n).and_then(|a| a.session) {
            self.post_up(id, up);
        }
    }

    // --- what cells ask for ---

    /// An effect of an agent: a place where it may die, before or after.
    fn agent_effect(&mut self, n: usize, what: &str, act: impl FnOnce(&mut Self)) {
        let Some(me) = self.agent_proc(n) else { return };
        let fate = self.effect(me, what);
        if fate.happens {
            act(self);
        }
        if fate.dies {
            self.crash_agent(n);
        }
    }

    fn agent_carry_out(&mut self, n: usize, pod: &PodUid, command: Command) {
        let Some(me) = self.agent_proc(n) else { return };
        let back = |input: Input| Action::AgentInput(me, pod.clone(), Box::new(input));
        let Some(slot) = self.agent(n).and_then(|a| a.slots.get_mut(pod)) else { return };
        let key = Key::new(slot.namespace.clone(), slot.name.clone());
        match command {
            Command::PrepareNetwork => {
                let there = slot.pod.is_some() && slot.raw.is_some();
                let fails = !there || self.strikes(Fault::StartFails, || format!("agent {n} network")).is_some();
                let result = if fails { Err((RefusalReason::Failed, "no network".to_owned())) } else { Ok(()) };
                let pause = self.dice.between(1, 50);
                self.after(pause, back(Input::NetworkPrepared(result)));
            }
            Command::Execute { epoch, instruction, vmi_rv } => {
                let raw = slot.raw.clone().filter(|r| r.revision == vmi_rv.0);
                let Some(instance) = slot.linked.clone() else {
                    return self.after(1, back(Input::LauncherAcked { id: instruction.id, result: None }));
                };
                let pod = pod.clone();
                let lag = self.hiccup(me);
                let what = format!("execute {}", instruction.kind.name());
                self.agent_effect(n, &what, |w| {
                    let order = super::node::Order { instance, epoch, instruction, vmi_rv, raw };
                    w.after(lag, Action::Execute(me, pod, Box::new(order)));
                });
            }
            Command::Answer { session, id, result } => {
                if self.agent(n).is_some_and(|a| a.session == Some(session)) {
                    self.tell_controller(n, Up::Ack(id.0, result));
                }
            }
            Command::Report(domain) => self.tell_controller(n, Up::Report(key, domain)),
            Command::TellOutcome(outcome) => self.tell_controller(n, Up::Outcome(key, outcome)),
            Command::KeepOutcome(outcome) => {
                let pod = pod.clone();
                self.agent_effect(n, "keep an outcome", |w| w.record(n, &pod, key, |r| r.outcome = Some(outcome)));
            }
            Command::DropOutcome => {
                let pod = pod.clone();
                self.agent_effect(n, "drop an outcome", |w| w.record(n, &pod, key, |r| r.outcome = None));
            }
            Command::Confirm => {
                if key.name.is_empty() {
                    return self.after(1, back(Input::VmiConfirmed(Confirmed::Unanswered)));
                }
                self.call(me, Verb::Get(Res::Vmi, key.namespace, key.name), Then::Confirm(pod.clone()));
            }
            Command::WriteUnpaused(unpaused) => {
                let Some(facts) = slot.pod.clone() else { return };
                let status = if unpaused { "True" } else { "False" };
                let condition = json!({"type": api::names::GATE_UNPAUSED, "status": status,
                    "lastTransitionTime": Timestamp(self.now).to_string()});
                let body = json!({"metadata": {"uid": pod.as_str()}, "status": {"conditions": [condition]}});
                let wanted = Wanted::Patch(patch::Kind::Strategic, body);
                let verb = Verb::Change(Res::Pod, facts.namespace, facts.name, Part::Status, wanted);
                if self.is(Mutant::AgentWritesPhase) {
                    let body = json!({"status": {"phase": "Running"}});
                    let wrong = Verb::merge(Res::Vmi, &key.namespace, &key.name, Part::Main, body);
                    self.call(me, wrong, Then::Unpaused(pod.clone(), unpaused));
                }
                let pod = pod.clone();
                self.agent_effect(n, "patch a pod's condition", |w| w.call(me, verb, Then::Unpaused(pod, unpaused)));
            }
            Command::Forget => {
                if let Some(a) = self.agent(n) {
                    a.slots.remove(pod);
                }
                self.nodes[n].disk.records.remove(pod);
            }
            Command::Wake { at } => {
                slot.wake = Some(at.0);
                let wait = at.0.saturating_sub(self.now);
                self.after(wait, Action::AgentWake(me));
            }
        }
    }

    fn record(&mut self, n: usize, pod: &PodUid, key: Key, change: impl FnOnce(&mut Record)) {
        let r = self.nodes[n].disk.records.entry(pod.clone()).or_default();
        (r.namespace, r.name) = (key.namespace, key.name);
        change(r);
        if r.outcome.is_none() && r.unpaused.is_none() {
            self.nodes[n].disk.records.remove(pod);
        }
    }

    pub(super) fn agent_answer(&mut self, n: usize, then: Then, said: &Said) {
        match then {
            Then::Judge(_) => self.lease_decides(n, said),
            Then::Confirm(pod) => match said {
                Said::Object(o) => {
                    let confirmed = o.facts().map_or(Confirmed::Unanswered, |f| Confirmed::Found(f.clone()));
                    self.agent_step_with(n, &pod, Input::VmiConfirmed(confirmed), Some(o));
                }
                Said::Status(s) if s.code == 404 => self.agent_step(n, &pod, Input::VmiConfirmed(Confirmed::Gone)),
                Said::Status(_) | Said::Silence | Said::Deleted | Said::List(..) => {
                    self.agent_step(n, &pod, Input::VmiConfirmed(Confirmed::Unanswered));
                }
            },
            Then::Unpaused(pod, unpaused) => {
                let done = matches!(said, Said::Object(_));
                let key = self.agent(n).and_then(|a| a.slots.get(&pod)).map(|s| Key::new(&*s.namespace, &*s.name));
                if let Some(key) = key.filter(|_| done) {
                    self.record(n, &pod, key, |r| r.unpaused = Some(unpaused));
                }
                self.agent_step(n, &pod, Input::UnpausedWritten { unpaused, done });
            }
            Then::Settle(..)
            | Then::Surveyed(..)
            | Then::Render(..)
            | Then::Instruct(..)
            | Then::LeaseRead(_)
            | Then::LeaseTaken(_)
            | Then::LeaseRenewed(_)
            | Then::LeaseReread => {}
        }
    }

    /// An answer of a launcher, or none.
    pub(super) fn acked(&mut self, n: usize, pod: &PodUid, id: &state::InstructionId, result: Option<AckResult>) {
        self.agent_step(n, pod, Input::LauncherAcked { id: id.clone(), result });
    }

    /// What a mutant makes of what an agent hears.
    fn bend_agent(&mut self, n: usize, pod: &PodUid, input: Input) -> Input {
        if self.is(Mutant::NoAuthority) {
            let me: NodeName = self.nodes[n].name.clone();
            let grant = |f: &mut agent::VmiFacts| {
                f.deleting = false;
                f.stage = Stage::Granted;
                f.active_pods = [(pod.clone(), me.clone())].into();
            };
            return match input {
                Input::VmiObserved(mut f) => {
                    grant(&mut f);
                    Input::VmiObserved(f)
                }
                Input::Instructed { session, epoch, instruction, vmi: Some(mut f) } => {
                    grant(&mut f);
                    Input::Instructed { session, epoch, instruction, vmi: Some(f) }
                }
                other => other,
            };
        }
        if self.is(Mutant::AbsenceIsStray) && input == Input::VmiVanished {
            let slot = self.agent(n).and_then(|a| a.slots.get(pod));
            if let Some(raw) = slot.and_then(|s| s.raw.clone())
                && let Some(mut f) = raw.facts().cloned()
            {
                f.stage = Stage::Final;
                f.rv = ResourceVersion(f.rv.0 + 1);
                return Input::VmiConfirmed(Confirmed::Found(f));
            }
        }
        input
    }
}

impl AgentProcess {
    fn is_complete(&self) -> bool {
        self.enumerated && !self.slots.values().any(|s| s.cell.is_unsettled())
    }
}
