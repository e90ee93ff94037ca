//! What can happen next in a world that has no clock: every message on its way, everybody who would find something to do, every
//! deadline, and, as long as there is something left of it, what people do and what goes wrong.

use super::super::{
    AT_ONCE, Action, World,
    api::{Call, Proc, Said, Then, Verb, Watch},
    controller::LEASE_NAME,
    driver::Link,
    node::LauncherEvent,
    server::{Res, Wanted},
};
use embedded::semantics::write::Part;
use state::{
    NodeName, PodUid,
    vm::{Interest, Recipe},
};

/// The key of something that is on its way.
type Key = (u64, u64);

/// What happens next.
#[derive(Debug, Clone)]
pub(super) enum Step {
    /// This arrives, or comes to its end.
    Arrives(Key),
    /// A watch delivers all that there is, or the next change alone.
    Hears(usize, bool),
    /// The next deadline of a controller's cells has come.
    ControllerWakes(usize),
    /// The next deadline of an agent's cells has come.
    AgentWakes(usize),
    /// An agent looks at its pods.
    AgentLooks(usize),
    /// A kubelet looks at its pods.
    KubeletLooks(usize),
    /// The scheduler places pods on this node.
    Places(usize),
    /// The collectors look.
    Collects,
    /// A controller dials a node.
    Dials(usize, NodeName),
    /// An agent's process starts.
    AgentStarts(usize),
    /// A deadline comes before what is quicker.
    Early(Box<Step>),
    /// The other controller acquires the Lease; its caches are so many changes behind.
    Leads(usize),
    /// Somebody does something.
    Deed(usize),
    /// The leader is no more.
    LeaderEnds,
    /// An agent dies.
    AgentEnds(usize),
    /// A launcher is killed, and its guest with it.
    LauncherEnds(usize, PodUid),
    /// It never arrives, and whoever waits for the answer gives up.
    Lost(Key),
    /// Whoever waits for the answer gives up, and it arrives all the same.
    GivenUp(Key),
    /// It is on its way twice.
    Twice(Key),
    /// A session breaks.
    Breaks(u64),
    /// A watch ends, and begins with a list.
    Relists(usize),
}

impl Step {
    /// It happens by itself, if nothing else does.
    pub fn is_fair(&self) -> bool {
        match self {
            Self::Arrives(_)
            | Self::Hears(..)
            | Self::ControllerWakes(_)
            | Self::AgentWakes(_)
            | Self::AgentLooks(_)
            | Self::KubeletLooks(_)
            | Self::Places(_)
            | Self::Collects
            | Self::Dials(..)
            | Self::AgentStarts(_)
            | Self::Leads(0) => true,
            Self::Leads(_)
            | Self::Early(_)
            | Self::Deed(_)
            | Self::LeaderEnds
            | Self::AgentEnds(_)
            | Self::LauncherEnds(..)
            | Self::Lost(_)
            | Self::GivenUp(_)
            | Self::Twice(_)
            | Self::Breaks(_)
            | Self::Relists(_) => false,
        }
    }
}

/// It is about the record of a spec, or about a condition that says whether a guest runs: nobody's next step depends on when it is
/// written.
fn is_aside(call: &Call) -> bool {
    match (&call.verb, &call.then) {
        (_, Then::Render(_, _, recipe, ..)) => matches!(recipe, Recipe::Revision { .. }),
        (Verb::Get(res, ..) | Verb::Create(res, ..) | Verb::Delete(res, ..), _) => *res == Res::Revision,
        (_, Then::Unpaused(..)) => true,
        (Verb::List(..) | Verb::Change(..), _) => false,
    }
}

/// What it reads is written from.
fn reads_to_write(call: &Call) -> bool {
    matches!(call.then, Then::Render(..) | Then::Instruct(..))
}

/// Whose clock an action waits for.
fn timer(action: &Action) -> Option<usize> {
    match action {
        Action::Launcher(n, _, _, LauncherEvent::Deadline(_) | LauncherEvent::Exit) => Some(*n),
        Action::KillContainer(n, ..) => Some(*n),
        _ => None,
    }
}

impl World {
    /// How long an action waits; `None` where it follows from what is there, and is not kept.
    pub(in super::super) fn delay(&self, wait: u64, action: &Action) -> Option<u64> {
        if self.search.is_none() {
            return Some(wait);
        }
        match action {
            Action::Pump(_)
            | Action::Wake(_)
            | Action::AgentWake(_)
            | Action::Kubelet(..)
            | Action::AgentPods(_)
            | Action::Schedule
            | Action::Collect
            | Action::Dial(..)
            | Action::StartAgent(_)
            | Action::StartController(_)
            | Action::Resume(_)
            | Action::LeaseTick(_)
            | Action::HelloTimeout(..)
            | Action::SessionForgotten(_)
            | Action::Heartbeat(_)
            | Action::Lifecycle
            | Action::PowerOn(_)
            | Action::Fence(_)
            | Action::Unfence(_)
            | Action::User
            | Action::Chaos => None,
            _ => Some(if timer(action).is_some() { wait } else { 0 }),
        }
    }

    /// Everything that can happen next, in an order that follows from the state.
    pub(super) fn steps(&self) -> Vec<Step> {
        let mut all = vec![];
        let Some(lab) = self.search.as_deref() else { return all };
        let first: Vec<(&Key, &Action)> = self.agenda.iter().filter(|(k, a)| self.is_next(**k, a)).collect();
        let (late, soon): (Vec<_>, Vec<_>) = first.iter().partition(|(_, a)| timer(a).is_some());
        all.extend(soon.iter().map(|(k, _)| Step::Arrives(**k)));
        for (w, watch) in self.watches.iter().enumerate().filter(|(_, w)| w.open && self.lives(w.owner)) {
            let waiting = lab.after(watch.res, watch.position).count();
            if waiting > 0 {
                all.push(Step::Hears(w, true));
            }
            if waiting > 1 && lab.bounds.late {
                all.push(Step::Hears(w, false));
            }
        }
        for (c, x) in self.controllers.iter().enumerate() {
            let Some(d) = &x.driver else { continue };
            let idle = d.links.iter().filter(|(_, link)| **link == Link::Idle).map(|(name, _)| name);
            all.extend(idle.filter(|name| self.is_worth_dialling(c, name)).map(|name| Step::Dials(c, name.clone())));
        }
        for (n, node) in self.nodes.iter().enumerate() {
            match &node.agent {
                Some(a) => {
                    if !a.knows(&node.pod_facts()) {
                        all.push(Step::AgentLooks(n));
                    }
                }
                None => all.push(Step::AgentStarts(n)),
            }
            if self.kubelet_is_due(n).ends {
                all.push(Step::KubeletLooks(n));
            }
        }
        if self.ghost.all(Res::Pod).any(|p| p.text("/spec/nodeName").is_empty() && !p.deleting()) {
            // Nodes are alike until one is used.
            all.extend((0..self.nodes.len().min(lab.used + 1)).map(Step::Places));
        }
        if self.has_litter() {
            all.push(Step::Collects);
        }
        if self.controllers.iter().all(|x| !x.alive) {
            let most = usize::from(lab.left.stale).min(self.milestones.len().saturating_sub(1));
            all.extend((0..=most).map(Step::Leads));
        }
        // Deadlines are long, and everything else is quick; or that was bought.
        let quiet = all.is_empty();
        if quiet || lab.left.slow > 0 {
            let wakes = |c: &usize| self.controllers[*c].driver.as_ref().is_some_and(|d| !d.deadlines.is_empty());
            let due = |n: &usize| self.nodes[*n].agent.as_ref().is_some_and(|a| a.due().is_some());
            let comes = late.iter().map(|(k, _)| Step::Arrives(**k));
            let deadlines = comes
                .chain((0..self.controllers.len()).filter(wakes).map(Step::ControllerWakes))
                .chain((0..self.nodes.len()).filter(due).map(Step::AgentWakes));
            all.extend(deadlines.map(|step| if quiet { step } else { Step::Early(Box::new(step)) }));
        }
        self.troubles(&first, &mut all);
        all
    }

    fn troubles(&self, first: &[(&Key, &Action)], all: &mut Vec<Step>) {
        let Some(lab) = self.search.as_deref() else { return };
        if lab.left.deeds > 0 {
            all.extend((0..lab.bounds.alphabet.len()).map(Step::Deed));
        }
        if (lab.left.handovers > 0 || lab.left.crashes > 0) && self.controllers.iter().any(|x| x.driver.is_some()) {
            all.push(Step::LeaderEnds);
        }
        if lab.left.crashes > 0 {
            for (n, node) in self.nodes.iter().enumerate() {
                if node.agent.as_ref().is_some_and(|a| a.has_pods()) {
                    all.push(Step::AgentEnds(n));
                }
                all.extend(node.launchers.keys().map(|pod| Step::LauncherEnds(n, pod.clone())));
            }
        }
        let writes = |call: &Call| call.verb.writes();
        if lab.left.lost > 0 {
            for (key, action) in first {
                match action {
                    Action::Arrive(call) if call.answered => {
                        all.push(Step::Lost(**key));
                        if writes(call) {
                            all.push(Step::GivenUp(**key));
                        }
                    }
                    Action::Execute(..) | Action::Acked(_, _, _, Some(_)) => all.push(Step::Lost(**key)),
                    _ => {}
                }
            }
            all.extend(self.sessions.iter().filter(|(_, s)| !s.cut).map(|(id, _)| Step::Breaks(*id)));
            let watches = self.watches.iter().enumerate().filter(|(_, w)| w.open && self.lives(w.owner));
            // Only where it loses something.
            let behind = watches.filter(|(_, w)| lab.after(w.res, w.position).next().is_some());
            all.extend(behind.map(|(w, _)| Step::Relists(w)));
        }
        if lab.left.twice > 0 {
            for (key, action) in first {
                match action {
                    Action::Arrive(call) if writes(call) => all.push(Step::Twice(**key)),
                    Action::Execute(..) => all.push(Step::Twice(**key)),
                    _ => {}
                }
            }
        }
    }

    /// Nothing that has to come before it is still on its way.
    fn is_next(&self, key: Key, action: &Action) -> bool {
        let earlier = || self.agenda.range(..key).map(|(_, a)| a);
        match action {
            Action::Down(id, _) => !earlier().any(|a| matches!(a, Action::Down(other, _) if other == id)),
            Action::Up(_, id, _) => !earlier().any(|a| matches!(a, Action::Up(_, other, _) if other == id)),
            _ => match timer(action) {
                Some(n) => !earlier().any(|a| timer(a) == Some(n)),
                None => true,
            },
        }
    }

    /// A session with a node matters to somebody.
    fn is_worth_dialling(&self, c: usize, name: &NodeName) -> bool {
        let Some(node) = self.nodes.iter().find(|n| n.name == *name) else { return false };
        let Some(d) = self.controllers.get(c).and_then(|x| x.driver.as_ref()) else { return false };
        let interested = d.interested.contains_key(&(String::new(), Interest::Node(name.clone())));
        node.agent.as_ref().is_some_and(|a| interested || a.has_pods())
    }

    /// Lets something happen, and all that follows at once. False where it changed nothing.
    pub(super) fn take(&mut self, step: &Step) -> bool {
        let done = self.begin(step);
        if done {
            self.follow_up();
        }
        done
    }

    fn begin(&mut self, step: &Step) -> bool {
        match step {
            Step::Arrives(key) => {
                let Some(action) = self.agenda.remove(key) else { return false };
                if timer(&action).is_some() {
                    self.now = self.now.max(key.0);
                }
                self.act_in_search(action);
            }
            Step::Hears(w, all) => self.hear(*w, *all),
            Step::ControllerWakes(c) => {
                let due = self.driver(*c).and_then(|d| d.deadlines.first().map(|(at, _)| *at));
                self.now = self.now.max(due.unwrap_or(0));
                self.elapse(*c);
            }
            Step::AgentWakes(n) => {
                let due = self.nodes[*n].agent.as_ref().and_then(|a| a.due());
                self.now = self.now.max(due.unwrap_or(0));
                self.agent_wake(*n);
            }
            Step::Early(step) => {
                self.spend(|left| &mut left.slow);
                return self.begin(step);
            }
            Step::AgentLooks(n) => self.agent_pods(*n),
            Step::KubeletLooks(n) => self.kubelet(*n),
            Step::Places(n) => {
                if let Some(lab) = &mut self.search {
                    lab.place = *n;
                    lab.used = lab.used.max(n + 1);
                }
                self.schedule();
            }
            Step::Collects => self.collect(),
            Step::Dials(c, name) => self.dial(*c, name),
            Step::AgentStarts(n) => self.start_agent(*n),
            Step::Leads(back) => self.take_over(*back),
            Step::Deed(i) => {
                let deed = self.search.as_mut().and_then(|lab| {
                    lab.left.deeds -= 1;
                    lab.bounds.alphabet.get(*i).cloned()
                });
                return deed.is_some_and(|d| self.deed(&d));
            }
            Step::LeaderEnds => {
                if let Some(lab) = &mut self.search {
                    let left = if lab.left.handovers > 0 { &mut lab.left.handovers } else { &mut lab.left.crashes };
                    *left -= 1;
                }
                if let Some(c) = self.controllers.iter().position(|x| x.alive) {
                    self.crash_controller(c, "the Lease is another's");
                }
            }
            Step::AgentEnds(n) => {
                self.spend(|left| &mut left.crashes);
                return self.crash_agent(*n);
            }
            Step::LauncherEnds(n, pod) => {
                self.spend(|left| &mut left.crashes);
                self.kill_launcher(*n, pod);
            }
            Step::Lost(key) => {
                self.spend(|left| &mut left.lost);
                let answer = match self.agenda.remove(key) {
                    Some(Action::Arrive(call)) => Action::Answer(call.from, call.then, Said::Silence),
                    Some(Action::Execute(me, pod, order)) => Action::Acked(me, pod, order.instruction.id, None),
                    Some(Action::Acked(me, pod, id, _)) => Action::Acked(me, pod, id, None),
                    _ => return false,
                };
                self.after(0, answer);
            }
            Step::GivenUp(key) => {
                self.spend(|left| &mut left.lost);
                let Some(Action::Arrive(call)) = self.agenda.get_mut(key) else { return false };
                call.answered = false;
                let (from, then) = (call.from, call.then.clone());
                self.after(0, Action::Answer(from, then, Said::Silence));
            }
            Step::Twice(key) => {
                self.spend(|left| &mut left.twice);
                let again = match self.agenda.get(key) {
                    Some(Action::Arrive(call)) => Action::Arrive(Call { answered: false, ..call.clone() }),
                    Some(other) => other.clone(),
                    None => return false,
                };
                self.after(0, again);
            }
            Step::Breaks(id) => {
                self.spend(|left| &mut left.lost);
                self.cut(*id);
            }
            Step::Relists(w) => {
                self.spend(|left| &mut left.lost);
                self.reopen(*w, true);
            }
        }
        true
    }

    fn spend(&mut self, of: impl FnOnce(&mut super::Left) -> &mut u8) {
        if let Some(lab) = &mut self.search {
            *of(&mut lab.left) -= 1;
        }
    }

    /// An action, and what becomes of others of its kind with it.
    fn act_in_search(&mut self, action: Action) {
        let late = self.is_late();
        let at_once = matches!(&action, Action::Arrive(c) if is_aside(c) || (c.verb.writes() && !late));
        match &action {
            // Who knows that a session is over hears nothing more of it.
            Action::SessionEnds(id) => self.agenda.retain(|_, a| !matches!(a, Action::Down(other, _) if other == id)),
            Action::SessionLost(_, id) => {
                self.agenda.retain(|_, a| !matches!(a, Action::Up(_, other, _) if other == id))
            }
            _ => {}
        }
        let before = self.seq;
        self.act(action);
        let answer = self.agenda.iter().find(|((_, seq), a)| *seq > before && matches!(a, Action::Answer(..)));
        if let Some(key) = answer.map(|(k, _)| *k).filter(|_| at_once)
            && let Some(answer) = self.agenda.remove(&key)
        {
            self.act(answer);
        }
    }

    fn is_late(&self) -> bool {
        self.search.as_ref().is_some_and(|lab| lab.bounds.late)
    }

    fn hear(&mut self, w: usize, all: bool) {
        let Some((owner, res, position)) = self.watches.get(w).map(|x| (x.owner, x.res, x.position)) else { return };
        let Ok((mut commits, _)) = self.server.changes(res, position, u64::MAX) else { return };
        if !all {
            commits.truncate(1);
        }
        let Some(last) = commits.last().map(|c| c.now.revision) else { return };
        if let Some(watch) = self.watches.get_mut(w) {
            watch.position = last;
        }
        self.deliver(owner, res, &commits, last);
    }

    fn take_over(&mut self, back: usize) {
        let c = self.search.as_ref().map_or(0, |lab| (lab.led + 1) % self.controllers.len().max(1));
        if back > 0 {
            self.spend(|left| &mut left.stale);
            let version = self.milestones.iter().rev().nth(back).copied().unwrap_or(0);
            self.frozen = Some((version, u64::MAX));
        }
        self.start_controller(c);
        let (ns, name) = LEASE_NAME;
        let old = self.server.get(Res::Lease, ns, name);
        let lease = self.lease_object(c, old.as_ref());
        let change = Verb::Change(Res::Lease, ns.into(), name.into(), Part::Main, Wanted::Whole(lease));
        if let Ok(Some(lease)) = self.serve(change, None) {
            let now = self.now;
            self.acquired(c, now, lease);
        }
        self.controllers[c].until = u64::MAX;
        if let Some(lab) = &mut self.search {
            lab.led = c;
        }
        self.follow_up();
        self.frozen = None;
    }

    /// Everything whose order with anything else shows nowhere.
    fn follow_up(&mut self) {
        for _ in 0..AT_ONCE {
            let next = self.agenda.iter().find(|(_, a)| self.is_urgent(a)).map(|(k, _)| *k);
            match next.and_then(|k| self.agenda.remove(&k)) {
                Some(action) => self.act_in_search(action),
                None if self.passes_by() => {}
                None if self.tells() => {}
                None => {
                    self.clear_away();
                    if std::mem::take(&mut self.ghost.dirty) {
                        self.check();
                    }
                    return;
                }
            }
        }
        self.violated("L5", "time stands still: something follows from itself without end".into());
    }

    /// Steps within one process, and between a launcher and the agent beside it.
    fn is_urgent(&self, action: &Action) -> bool {
        match action {
            Action::Settled(..)
            | Action::AgentInput(..)
            | Action::AssertNode(_)
            | Action::Linked(..)
            | Action::Reopen(..)
            | Action::Drive(_)
            | Action::Container(..)
            | Action::Launcher(_, _, _, LauncherEvent::Running) => true,
            // What is read is written from at once: both are one task, and what is written is on its way as long as one likes.
            Action::Answer(_, Then::Render(..) | Then::Instruct(..), _) => true,
            Action::Arrive(call) => is_aside(call) || (reads_to_write(call) && !self.is_late()),
            Action::LinkTry(Proc::Agent(n, _), pod) => {
                let node = &self.nodes[*n];
                node.launchers.contains_key(pod) || !node.agent.as_ref().is_some_and(|a| a.waits_for_launcher(pod))
            }
            _ => false,
        }
    }

    /// A watch goes past what is no news: of another node, or what a cell knows from its own writes.
    fn passes_by(&mut self) -> bool {
        let Some(lab) = self.search.as_deref() else { return false };
        let behind = |(w, x): (usize, &Watch)| {
            let next = lab.after(x.res, x.position).next().filter(|_| x.open && self.lives(x.owner))?;
            Some((w, x.owner, x.res, next))
        };
        let all: Vec<(usize, Proc, Res, u64)> = self.watches.iter().enumerate().filter_map(behind).collect();
        for (w, owner, res, next) in all {
            let Ok((commits, _)) = self.server.changes(res, next - 1, next) else { continue };
            let news = commits.iter().any(|commit| match owner {
                Proc::Agent(n, _) => {
                    (!commit.gone && self.is_mine(n, &commit.now))
                        || commit.before.as_ref().is_some_and(|b| self.is_mine(n, b))
                }
                Proc::Controller(c, _) => commit.gone || !self.is_known(c, &commit.now),
            });
            if !news {
                self.hear(w, false);
                return true;
            }
        }
        false
    }

    /// A kubelet begins with a pod, or says how its pods are; that one is to end it is told later.
    fn tells(&mut self) -> bool {
        let told = (0..self.nodes.len()).find(|n| {
            let due = self.kubelet_is_due(*n);
            due.begins || (due.tells && !due.ends)
        });
        let before = self.server.revision();
        told.is_some_and(|n| {
            self.kubelet(n);
            self.server.revision() > before || !self.kubelet_is_due(n).begins
        })
    }

    /// What would change nothing any more is on its way no longer.
    fn clear_away(&mut self) {
        let keys: Vec<Key> = self.agenda.iter().filter(|(k, a)| !self.matters(**k, a)).map(|(k, _)| *k).collect();
        for key in keys {
            self.agenda.remove(&key);
        }
        let dead: Vec<Key> = self
            .agenda
            .iter()
            .filter(|(_, a)| matches!(a, Action::Arrive(call) if call.answered && !self.lives(call.from)))
            .map(|(k, _)| *k)
            .collect();
        for key in dead {
            if let Some(Action::Arrive(call)) = self.agenda.get_mut(&key) {
                call.answered = false;
            }
        }
        let pending: Vec<u64> = self
            .agenda
            .values()
            .filter_map(|a| match a {
                Action::SessionEnds(id) | Action::SessionLost(_, id) => Some(*id),
                _ => None,
            })
            .collect();
        self.sessions.retain(|id, s| !s.cut || pending.contains(id));
        self.agenda.retain(|_, a| match a {
            Action::Down(id, _) | Action::Up(_, id, _) => self.sessions.contains_key(id),
            _ => true,
        });
    }

    fn matters(&self, key: Key, action: &Action) -> bool {
        match action {
            Action::Arrive(call) => call.verb.writes() || (call.answered && self.lives(call.from)),
            Action::Answer(p, ..)
            | Action::Settled(p, ..)
            | Action::AgentInput(p, ..)
            | Action::LinkTry(p, _)
            | Action::Linked(p, ..)
            | Action::Acked(p, ..)
            | Action::SessionLost(p, _)
            | Action::Up(p, ..) => self.lives(*p),
            Action::Down(id, _) | Action::SessionEnds(id) => self.sessions.get(id).is_some_and(|s| {
                let here = self.nodes[s.node].agent.as_ref().map(|a| Proc::Agent(s.node, a.inc));
                let hello = matches!(action, Action::Down(..)) && s.agent.is_none();
                here.is_some() && (hello || s.agent == here)
            }),
            Action::Launcher(n, pod, instance, event) => {
                let same = |a: &Action| match a {
                    Action::Launcher(m, p, _, e) => (m, p, e) == (n, pod, event),
                    _ => false,
                };
                self.launcher_awaits(*n, pod, instance, *event) && !self.agenda.range(..key).any(|(_, a)| same(a))
            }
            Action::Container(n, _, pod) => self.nodes[*n].pods.contains_key(pod),
            Action::KillContainer(n, _, pod) => self.nodes[*n].launchers.contains_key(pod),
            _ => true,
        }
    }

    /// What happens, in words.
    pub(super) fn words(&self, step: &Step) -> String {
        let on_its_way = |key: &Key| match self.agenda.get(key) {
            Some(Action::Arrive(call)) => format!("{}'s {}", call.from, call.verb.name()),
            Some(Action::Answer(to, then, said)) => {
                let what = match said {
                    Said::Object(o) => format!("{:?} at {}", o.res, o.revision),
                    Said::List(..) => "a list".into(),
                    Said::Deleted => "deleted".into(),
                    Said::Status(s) => s.code.to_string(),
                    Said::Silence => "nothing".into(),
                };
                let about = match then {
                    Then::Render(..) => "what it makes something from",
                    Then::Instruct(..) => "the instance that it instructs about",
                    _ => "its call",
                };
                format!("the answer to {to} about {about}: {what}")
            }
            Some(other) => format!("{other:?}").chars().take(150).collect(),
            None => "nothing".into(),
        };
        match step {
            Step::Arrives(key) => format!("there comes {}", on_its_way(key)),
            Step::Lost(key) => format!("LOST: {}", on_its_way(key)),
            Step::GivenUp(key) => format!("GIVEN UP, and still on its way: {}", on_its_way(key)),
            Step::Twice(key) => format!("TWICE on its way: {}", on_its_way(key)),
            Step::Hears(w, all) => self.watches.get(*w).map_or_else(String::new, |w| {
                format!("{} hears of {:?}{}", w.owner, w.res, if *all { "" } else { ", the next change alone" })
            }),
            Step::Relists(w) => self
                .watches
                .get(*w)
                .map_or_else(String::new, |w| format!("A WATCH BREAKS: {} lists {:?} anew", w.owner, w.res)),
            Step::Early(step) => format!("EVERYTHING ELSE IS SLOW: {}", self.words(step)),
            Step::ControllerWakes(c) => format!("a deadline of controller {c} has come"),
            Step::AgentWakes(n) => format!("a deadline of agent {n} has come"),
            Step::AgentLooks(n) => format!("agent {n} looks at its pods"),
            Step::KubeletLooks(n) => format!("the kubelet of node {n} looks at its pods"),
            Step::Places(n) => format!("the scheduler places pods on node {n}"),
            Step::Collects => "the collectors look".into(),
            Step::Dials(c, name) => format!("controller {c} dials {name}"),
            Step::AgentStarts(n) => format!("agent {n} starts"),
            Step::Leads(0) => "the other controller leads".into(),
            Step::Leads(back) => format!("the other controller leads, {back} changes BEHIND"),
            Step::Deed(i) => {
                let deed = self.search.as_deref().and_then(|lab| lab.bounds.alphabet.get(*i));
                format!("SOMEBODY: {}", deed.map_or_else(String::new, |d| d.words()))
            }
            Step::LeaderEnds => "THE LEADER ENDS".into(),
            Step::AgentEnds(n) => format!("AGENT {n} DIES"),
            Step::LauncherEnds(n, pod) => format!("THE LAUNCHER of {pod} on node {n} IS KILLED"),
            Step::Breaks(_) => "A SESSION BREAKS".into(),
        }
    }
}
