//! Calls of the API server: what is asked, what may happen to question and answer, and who hears of a change when.

use super::{
    Action, World,
    driver::CellId,
    mutants::Mutant,
    server::{Commit, Res, Seen, Wanted},
    swarm::Fault,
};
use embedded::semantics::{
    Moment, Status, patch,
    write::{DeleteOptions, Part, Propagation},
};
use serde_json::Value;
use state::{
    Key, NodeName, PodUid,
    domain::Instruction,
    object::{CommandId, ObjectRef},
    selector::Selector,
    vm::{Recipe, Source},
};
use std::{fmt, rc::Rc};

/// After so long a client gives up.
pub const TIMEOUT: u64 = 10_000;

/// Calls about one object within a minute that are too many, whatever goes wrong.
const PESTERED: u32 = 240;

/// A process, and which of its lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Proc {
    /// A controller.
    Controller(usize, u32),
    /// The agent of a node.
    Agent(usize, u32),
}

impl fmt::Display for Proc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Controller(c, _) => write!(f, "controller {c}"),
            Self::Agent(n, _) => write!(f, "agent {n}"),
        }
    }
}

/// What is asked of the API server.
#[derive(Debug, Clone)]
pub enum Verb {
    /// A quorum read.
    Get(Res, String, String),
    /// A quorum read of all of a namespace.
    List(Res, String),
    /// POST.
    Create(Res, String, Value),
    /// PUT or PATCH.
    Change(Res, String, String, Part, Wanted),
    /// DELETE.
    Delete(Res, String, String, DeleteOptions),
}

impl Verb {
    /// A merge patch.
    pub fn merge(res: Res, ns: &str, name: &str, part: Part, body: Value) -> Self {
        Self::Change(res, ns.into(), name.into(), part, Wanted::Patch(patch::Kind::Merge, body))
    }

    /// The background deletion of one UID, or of whatever has the name.
    pub fn delete(res: Res, ns: &str, name: &str, uid: &str) -> Self {
        let uid = Some(uid.to_owned()).filter(|u| !u.is_empty());
        let options = DeleteOptions { uid, propagation: Some(Propagation::Background), ..DeleteOptions::default() };
        Self::Delete(res, ns.into(), name.into(), options)
    }

    /// The object that it is about.
    fn object(&self) -> Option<String> {
        match self {
            Self::Get(r, ns, n) | Self::Change(r, ns, n, ..) | Self::Delete(r, ns, n, _) => {
                Some(format!("{r:?} {ns}/{n}"))
            }
            Self::Create(r, ns, o) => {
                Some(format!("{r:?} {ns}/{}", o["metadata"]["name"].as_str().unwrap_or_default()))
            }
            Self::List(..) => None,
        }
    }

    pub(super) fn writes(&self) -> bool {
        match self {
            Self::Get(..) | Self::List(..) => false,
            Self::Create(..) | Self::Change(..) | Self::Delete(..) => true,
        }
    }

    /// For the log and the sums: verb and kind.
    pub fn name(&self) -> String {
        match self {
            Self::Get(r, ..) => format!("get {r:?}"),
            Self::List(r, ..) => format!("list {r:?}"),
            Self::Create(r, ..) => format!("create {r:?}"),
            Self::Change(r, ..) => format!("change {r:?}"),
            Self::Delete(r, ..) => format!("delete {r:?}"),
        }
    }
}

/// The answer to a call.
#[derive(Debug, Clone)]
pub enum Said {
    /// The object.
    Object(Rc<Seen>),
    /// The objects, and the version of the list.
    List(Vec<Rc<Seen>>, u64),
    /// Deleted and gone.
    Deleted,
    /// An error.
    Status(Status),
    /// None came.
    Silence,
}

/// What goes on with the answer.
#[derive(Debug, Clone)]
pub enum Then {
    /// A command of a cell has ended; whether it was a write.
    Settle(CellId, CommandId, bool),
    /// The instances of a set were read that this selector chooses.
    Surveyed(Key, CommandId, Selector),
    /// The source of a creation was read.
    Render(CellId, CommandId, Recipe, Source, ObjectRef),
    /// The VMI that goes with an instruction was read.
    Instruct(Key, CommandId, NodeName, Instruction),
    /// The Lease was read, at this time asked for.
    LeaseRead(u64),
    /// The Lease was written to acquire it.
    LeaseTaken(u64),
    /// The Lease was renewed.
    LeaseRenewed(u64),
    /// The Lease was read after a renewal that failed.
    LeaseReread,
    /// An agent asks who leads, about this session.
    Judge(u64),
    /// An agent asks about its VMI.
    Confirm(PodUid),
    /// An agent wrote the pod's condition.
    Unpaused(PodUid, bool),
}

impl Then {
    pub(super) fn is_of_the_lease(&self) -> bool {
        match self {
            Self::LeaseRead(_) | Self::LeaseTaken(_) | Self::LeaseRenewed(_) | Self::LeaseReread => true,
            Self::Settle(..)
            | Self::Surveyed(..)
            | Self::Render(..)
            | Self::Instruct(..)
            | Self::Judge(_)
            | Self::Confirm(_)
            | Self::Unpaused(..) => false,
        }
    }
}

/// A call on its way.
#[derive(Debug, Clone)]
pub struct Call {
    /// Who asks.
    pub from: Proc,
    /// What.
    pub verb: Verb,
    /// What for.
    pub then: Then,
    /// Whether the answer arrives.
    pub(super) answered: bool,
}

/// A watch that feeds a cache.
#[derive(Debug, Clone)]
pub struct Watch {
    /// Whose.
    pub owner: Proc,
    /// Of what.
    pub res: Res,
    /// Everything up to here was delivered.
    pub position: u64,
    pending: bool,
    pub(super) open: bool,
}

impl World {
    pub(super) fn moment(&mut self, kind: &str) -> Moment {
        let seconds = i64::try_from(self.now / 1000).unwrap_or(0);
        Moment { seconds, uid: self.fresh_id(kind), suffix: "abcde".into() }
    }

    fn latency(&mut self, who: Proc) -> u64 {
        let usual = self.dice.between(1, 15);
        self.strikes(Fault::Slow, || format!("{who} call")).map_or(usual, |mut d| d.between(1, 4000))
    }

    /// Sends a call. Agents may be cut off from the API server; everybody's calls and answers may be lost.
    pub(super) fn call(&mut self, from: Proc, verb: Verb, then: Then) {
        let writes = verb.writes();
        if !verb.name().ends_with("Lease") {
            self.ghost.last_call = self.now;
            if let (Proc::Controller(..), Some(object)) = (from, verb.object()) {
                self.ghost.asks(&object, self.now, PESTERED);
            }
        }
        let (there, back) = (self.latency(from), self.latency(from));
        let name = verb.name();
        let on = || format!("{from} {name}");
        let cut = matches!(from, Proc::Agent(n, _) if self.nodes.get(n).is_some_and(|n| !n.reaches_api(self.now)));
        let answer = |said| Action::Answer(from, then.clone(), said);
        if cut || self.strikes(Fault::LostRequest, on).is_some() {
            self.after(TIMEOUT, answer(Said::Silence));
        } else if self.strikes(Fault::Busy, on).is_some() {
            self.after(there + back, answer(Said::Status(Status::too_many_requests("not now", 1))));
        } else if let Some(mut dice) = writes.then(|| self.strikes(Fault::LateWrite, on)).flatten() {
            let late = dice.between(1, 20_000);
            self.after(TIMEOUT, answer(Said::Silence));
            self.after(TIMEOUT + late, Action::Arrive(Call { from, verb, then, answered: false }));
        } else if writes && self.strikes(Fault::LostReply, on).is_some() {
            self.after(TIMEOUT, answer(Said::Silence));
            self.after(there, Action::Arrive(Call { from, verb, then, answered: false }));
        } else if let Some(mut dice) = self.strikes(Fault::ServerError, on) {
            // It may or may not have been done.
            if writes && dice.chance(500) {
                self.after(there, Action::Arrive(Call { from, verb, then: then.clone(), answered: false }));
            }
            self.after(there + back, answer(Said::Status(Status::internal("etcdserver: leader changed"))));
        } else if writes
            && !matches!(then, Then::LeaseTaken(_) | Then::LeaseRenewed(_))
            && self.strikes(Fault::Refused, on).is_some()
        {
            let refused = Status::forbidden("", "objects", "", "exceeded quota");
            self.after(there + back, answer(Said::Status(refused)));
        } else {
            self.after(there, Action::Arrive(Call { from, verb, then, answered: true }));
        }
    }

    /// A call has arrived.
    pub(super) fn arrive(&mut self, call: Call) {
        let name = call.verb.name();
        let who = call.from;
        let said = if let Verb::List(res, ns) = &call.verb {
            self.listed(*res, ns)
        } else {
            match self.serve(call.verb, Some(who)) {
                Ok(Some(seen)) => Said::Object(seen),
                Ok(None) => Said::Deleted,
                Err(status) => Said::Status(status),
            }
        };
        if let Said::Status(s) = &said
            && call.answered
        {
            let ours = matches!(who, Proc::Controller(..)) && !name.ends_with("Lease");
            self.ghost.conflicts += u64::from(ours && matches!(s.code, 409 | 422));
            self.ghost.refused += u64::from(name != "get" && s.code >= 400);
        }
        self.say(|| match &said {
            Said::Object(o) => format!("{who:?} {name} {} -> {}", o.name(), o.revision),
            Said::List(all, at) => format!("{who:?} {name} -> {} at {at}", all.len()),
            Said::Deleted => format!("{who:?} {name} -> gone"),
            Said::Status(s) => format!("{who:?} {name} -> {} {}", s.code, s.message),
            Said::Silence => String::new(),
        });
        if call.answered {
            let back = self.latency(who);
            self.after(back, Action::Answer(call.from, call.then, said));
        }
    }

    /// A live list; what is given up because of it is judged by it.
    fn listed(&mut self, res: Res, ns: &str) -> Said {
        match self.server.list(res, 0) {
            Ok((items, at)) => {
                self.ghost.surveyed = at;
                Said::List(items.into_iter().filter(|o| o.namespace() == ns).collect(), at)
            }
            Err(status) => Said::Status(status),
        }
    }

    /// Carries out a call at once. `None`: what was to be deleted is gone.
    pub(super) fn serve(&mut self, verb: Verb, by: Option<Proc>) -> Result<Option<Rc<Seen>>, Status> {
        let name = verb.name();
        let writes = verb.writes();
        let result = match verb {
            Verb::Get(res, ns, n) => {
                let r = res.resource();
                self.server.get(res, &ns, &n).map(Some).ok_or_else(|| Status::not_found(&r.group, &r.plural, &n))
            }
            Verb::List(res, _) => Err(Status::internal(format!("{res:?} is listed elsewhere"))),
            Verb::Create(res, ns, object) => {
                let moment = self.moment(&res.resource().singular);
                self.server.create(res, &ns, object, &moment).map(Some)
            }
            Verb::Change(res, ns, n, part, wanted) => self.server.change(res, &ns, &n, part, &wanted).map(Some),
            Verb::Delete(res, ns, n, options) => {
                let moment = self.moment("");
                let done = self.server.delete(res, &ns, &n, &options, &moment);
                done.map(|(seen, gone)| if gone { None } else { Some(seen) })
            }
        };
        // What is deleted already is not deleted again.
        let counts = !name.starts_with("delete") || !self.server.commits.is_empty();
        if writes && counts && result.is_ok() && matches!(by, Some(Proc::Controller(..))) && !name.ends_with("Lease") {
            *self.ghost.writes.entry(name).or_default() += 1;
        }
        self.publish(by);
        result
    }

    /// Tells whoever watches of what was just written.
    pub(super) fn publish(&mut self, by: Option<Proc>) {
        for commit in std::mem::take(&mut self.server.commits) {
            self.mark(&[2, commit.now.revision, u64::from(commit.gone)]);
            self.say(|| {
                let (o, what) = (&commit.now, if commit.gone { "removed" } else { "is" });
                format!("  {:?} {}/{} {what} at {} {}", o.res, o.namespace(), o.name(), o.revision, summary(o))
            });
            let res = commit.now.res;
            if !matches!(res, Res::Lease | Res::Node) {
                self.milestones.push(commit.now.revision);
            }
            if let Some(lab) = &mut self.search {
                lab.written(res, commit.now.revision);
            }
            self.observe_commit(&commit, by);
            for w in 0..self.watches.len() {
                if self.watches.get(w).is_some_and(|x| x.res == res) {
                    self.schedule_pump(w);
                }
            }
            self.notice(&commit);
        }
    }

    fn schedule_pump(&mut self, w: usize) {
        let Some((owner, res)) = self.watches.get(w).filter(|x| x.open && !x.pending).map(|x| (x.owner, x.res)) else {
            return;
        };
        let usual = self.dice.between(1, 20);
        let slow = self.strikes(Fault::Slow, || format!("{owner} watch {res:?}"));
        let lag = slow.map_or(usual, |mut d| d.between(1, 5000));
        if let Some(watch) = self.watches.get_mut(w) {
            watch.pending = true;
            self.after(lag, Action::Pump(w));
        }
    }

    /// Begins a watch with a list.
    pub(super) fn watch(&mut self, owner: Proc, res: Res) -> usize {
        self.watches.push(Watch { owner, res, position: 0, pending: false, open: false });
        let w = self.watches.len() - 1;
        let lag = self.latency(owner);
        self.after(lag, Action::Reopen(w, true));
        w
    }

    /// The watches of a process that is gone.
    pub(super) fn unwatch(&mut self, owner: Proc) {
        for w in &mut self.watches {
            if w.owner == owner {
                w.open = false;
                w.pending = true;
            }
        }
    }

    pub(super) fn lives(&self, p: Proc) -> bool {
        match p {
            Proc::Controller(c, inc) => self.controllers.get(c).is_some_and(|x| x.inc == inc && x.alive),
            Proc::Agent(n, inc) => self.nodes.get(n).is_some_and(|x| x.agent.as_ref().is_some_and(|a| a.inc == inc)),
        }
    }

    /// Delivers what a watch has not delivered yet.
    pub(super) fn pump(&mut self, w: usize) {
        let Some((owner, res, position)) = self.watches.get(w).map(|x| (x.owner, x.res, x.position)) else { return };
        if !self.lives(owner) {
            return;
        }
        if matches!(owner, Proc::Agent(n, _) if self.nodes.get(n).is_some_and(|n| !n.reaches_api(self.now))) {
            // The connection stalls; what it missed comes when it works again.
            return self.after(1000, Action::Pump(w));
        }
        if let Some((_, wait)) = self.frozen(owner) {
            return self.after(wait, Action::Pump(w));
        }
        if let Some(watch) = self.watches.get_mut(w) {
            watch.pending = false;
        }
        if let Some(mut dice) = self.strikes(Fault::WatchDropped, || format!("{owner} watch {res:?}")) {
            if let Some(watch) = self.watches.get_mut(w) {
                watch.open = false;
            }
            let silence = dice.between(10, 60_000);
            let list = dice.chance(500);
            return self.after(silence, Action::Reopen(w, list));
        }
        match self.server.changes(res, position, u64::MAX) {
            Ok((commits, upto)) => {
                if let Some(watch) = self.watches.get_mut(w) {
                    watch.position = upto;
                }
                self.deliver(owner, res, &commits, upto);
            }
            Err(_) => {
                if let Some(watch) = self.watches.get_mut(w) {
                    watch.open = false;
                }
                let lag = self.latency(owner);
                self.after(lag, Action::Reopen(w, true));
            }
        }
    }

    /// Opens a watch again: from where it was, or with a list.
    pub(super) fn reopen(&mut self, w: usize, list: bool) {
        let Some((owner, res, position)) = self.watches.get(w).map(|x| (x.owner, x.res, x.position)) else { return };
        if !self.lives(owner) {
            return;
        }
        if matches!(owner, Proc::Agent(n, _) if self.nodes.get(n).is_some_and(|n| !n.reaches_api(self.now))) {
            return self.after(1000, Action::Reopen(w, list));
        }
        let from_now = self.is(Mutant::WatchFromNow) && matches!(owner, Proc::Controller(..));
        let position = if from_now && position > 0 { self.server.revision() } else { position };
        let upto = if list && !(from_now && position > 0) {
            // A controller's caches may be filled by a server that is behind; an agent's list is a quorum read.
            let fills = matches!(owner, Proc::Controller(..));
            let stale = fills.then(|| self.strikes(Fault::StaleServer, || format!("{owner} list {res:?}"))).flatten();
            let newest = self.server.revision();
            let back = stale.map_or(0, |mut d| d.below(60));
            let at = self.frozen(owner).map_or(newest.saturating_sub(back), |(version, _)| version).max(2);
            let listed = self.server.list(res, at).or_else(|_| self.server.list(res, 0));
            let Ok((items, upto)) = listed else { return };
            self.relisted(owner, res, &items, upto);
            upto
        } else {
            position
        };
        if let Some(watch) = self.watches.get_mut(w) {
            watch.open = true;
            watch.pending = false;
            watch.position = upto;
        }
        self.schedule_pump(w);
    }

    pub(super) fn deliver(&mut self, owner: Proc, res: Res, commits: &[Commit], upto: u64) {
        match owner {
            Proc::Controller(c, _) => self.hub_changes(c, res, commits),
            Proc::Agent(n, _) => self.agent_changes(n, commits, upto),
        }
    }

    fn relisted(&mut self, owner: Proc, res: Res, items: &[Rc<Seen>], upto: u64) {
        self.say(|| format!("{owner:?} lists {res:?} at {upto}: {} objects", items.len()));
        match owner {
            Proc::Controller(c, _) => self.hub_list(c, res, items),
            Proc::Agent(n, _) => self.agent_list(n, items, upto),
        }
    }
}

fn summary(o: &Seen) -> String {
    let mut words = vec![];
    for (word, pointer) in [
        ("", "/status/phase"),
        ("", "/status/printableStatus"),
        ("", "/spec/runStrategy"),
        ("node ", "/spec/nodeName"),
        ("reason ", "/status/reason"),
        ("holder ", "/spec/holderIdentity"),
    ] {
        let text = o.text(pointer);
        if !text.is_empty() {
            words.push(format!("{word}{text}"));
        }
    }
    if let Some(n) = o.node().filter(|_| o.res == Res::Node) {
        words
            .push(format!("ready {:?}, schedulable {:?}, out of service {}", n.ready, n.schedulable, n.out_of_service));
    }
    if o.deleting() {
        words.push("deleting".into());
    }
    if let Some(q) = o.value.pointer("/status/stateChangeRequests") {
        words.push(q.to_string());
    }
    words.push(format!("uid {}", o.uid()));
    words.join(", ")
}
