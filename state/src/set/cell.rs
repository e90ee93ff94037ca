//! State of a Set cell, and folding.

use super::view::{Member, SetView, Sight};
use crate::{
    Event, Key, Machine, ResourceVersion, Timestamp, Uid,
    object::{CommandId, Kind, ObjectRef, Refusal, Settled, Versioned},
    selector::Selector,
    slot::{Folded, Slot},
    vm::Command,
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Instances that are made, or deleted, at once.
pub const BURST: usize = 250;

/// UIDs of instances that are remembered as gone: a watch that starts anew may show them again.
const TOMBSTONES: usize = 2 * BURST;

/// What can happen to a Set cell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Input {
    /// The set or an instance was seen.
    Observed(Sight),
    /// All instances that [`Choice`] chooses, as the cache has them. Nothing is planned before.
    Listed(Vec<Member>),
    /// A command of ours ended.
    Settled {
        /// Which.
        id: CommandId,
        /// How.
        result: Settled<Sight>,
    },
    /// A deadline that we asked for has come.
    Elapsed,
}

/// Which instances the cell has to be told of beside those that it knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    /// Those that this set controls.
    pub set: Uid,
    /// Those that nobody controls and that match.
    pub selector: Selector,
}

impl Choice {
    /// Whether the instance is among them.
    pub fn chooses(&self, m: &Member) -> bool {
        match m.controller() {
            Some(uid) => uid == self.set.as_str(),
            None => self.selector.matches(&m.labels),
        }
    }
}

/// What a command was for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum What {
    Status,
    ConfirmSet,
    Survey,
    Create(String),
    Adopt(String),
    Release(String),
    Delete(String),
    Confirm(String),
}

impl What {
    pub(super) fn member(&self) -> Option<&String> {
        match self {
            Self::Status | Self::ConfirmSet | Self::Survey => None,
            Self::Create(n) | Self::Adopt(n) | Self::Release(n) | Self::Delete(n) | Self::Confirm(n) => Some(n),
        }
    }
}

/// A failure that people should know of until it is over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Trouble {
    pub reason: String,
    pub message: String,
}

/// One set.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Set {
    pub(super) key: Key,
    pub(super) now: Timestamp,
    pub(super) set: Slot<SetView>,
    /// Version of the set that a live read or an own write has shown, which were asked for after every stranger that matches was seen:
    /// it may be one because the set was deleted and leaves its instances behind.
    pub(super) live: ResourceVersion,
    /// What is asked for of the set was asked for before that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) overtaken: bool,
    /// The choice for which the instances were listed.
    pub(super) listed: Option<Choice>,
    /// By name: own instances, strangers that match, what stands in the way of a name, and what is being made.
    pub(super) members: BTreeMap<String, Slot<Member>>,
    pub(super) gone: VecDeque<Uid>,
    pub(super) flights: BTreeMap<CommandId, What>,
    /// Commands of a set that is over that are not answered yet: their answers must not come to the next cell of its name.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(super) owed: BTreeSet<CommandId>,
    pub(super) next_id: u64,
    /// How many may be made at once: one at first, more with each that succeeds, one again after a failure.
    pub(super) window: usize,
    /// Failed creations in a row, by way of a slot that holds no object.
    pub(super) making: Slot<Member>,
    /// Live looks at all instances, by way of a slot that holds no object.
    #[serde(default)]
    pub(super) survey: Slot<Member>,
    /// This step brought such a look.
    #[serde(default)]
    pub(super) surveyed: bool,
    pub(super) create_failed: Option<Trouble>,
    pub(super) delete_failed: Option<Trouble>,
    /// Instances in a row that ended before they ran, and when the next may be made.
    pub(super) crashes: u64,
    pub(super) crashed: Option<(String, Timestamp)>,
    pub(super) lazy: Option<Timestamp>,
    /// Derived names, as far as they were needed: (UID, base, names). Saves hashing.
    #[serde(skip)]
    pub(super) names: (Uid, String, Vec<String>),
    /// To be told to people with the next plan.
    pub(super) tell: Vec<(bool, String, String)>,
    pub(super) armed: Option<Timestamp>,
}

impl Set {
    /// An empty cell.
    pub fn new(key: Key) -> Self {
        Self {
            key,
            now: Timestamp::default(),
            set: Slot::default(),
            live: ResourceVersion::default(),
            overtaken: false,
            listed: None,
            members: BTreeMap::new(),
            gone: VecDeque::new(),
            flights: BTreeMap::new(),
            owed: BTreeSet::new(),
            next_id: 0,
            window: 1,
            making: Slot::default(),
            survey: Slot::default(),
            surveyed: false,
            create_failed: None,
            delete_failed: None,
            crashes: 0,
            crashed: None,
            lazy: None,
            names: Default::default(),
            tell: vec![],
            armed: None,
        }
    }

    /// Its key.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Nothing is left of it. The driver may drop it.
    pub fn is_empty(&self) -> bool {
        self.set.get().is_none() && self.flights.is_empty() && self.owed.is_empty()
    }

    /// Which instances it has to be told of; where that changes, by [`Input::Listed`].
    pub fn choice(&self) -> Option<Choice> {
        let s = self.set.get().filter(|s| s.problem.is_none())?;
        Some(Choice { set: s.uid().clone(), selector: s.selector.clone() })
    }

    /// Whether this sight of an instance is news: it is chosen or known, and says something else than before.
    pub fn wants(&self, m: &Member) -> bool {
        let known = self.members.get(&m.meta.name);
        match known.and_then(Slot::get) {
            // Its version matters only where we may write it: an owner reference is taken on or off.
            Some(k) if self.is_own(k) && self.matches(k) => !k.says_the_same(m),
            Some(_) => true,
            None => known.is_some() || self.choice().is_some_and(|c| c.chooses(m)),
        }
    }

    /// Whether it knows an instance of that name.
    pub fn knows(&self, name: &str) -> bool {
        self.members.contains_key(name)
    }

    /// The set controls it.
    pub(super) fn is_own(&self, m: &Member) -> bool {
        m.controller().is_some_and(|c| c == self.set.uid().as_str())
    }

    pub(super) fn matches(&self, m: &Member) -> bool {
        self.set.get().is_some_and(|s| s.problem.is_none() && s.selector.matches(&m.labels))
    }

    pub(super) fn set_ref(&self) -> ObjectRef {
        ObjectRef {
            kind: Kind::VirtualMachineInstanceReplicaSet,
            namespace: self.key.namespace.clone(),
            name: self.key.name.clone(),
            uid: self.set.uid(),
        }
    }

    pub(super) fn member_ref(&self, name: &str) -> ObjectRef {
        ObjectRef {
            kind: Kind::VirtualMachineInstance,
            namespace: self.key.namespace.clone(),
            name: name.to_owned(),
            uid: self.members.get(name).map(Slot::uid).unwrap_or_default(),
        }
    }

    // --- folding ---

    fn fold(&mut self, input: &Input) {
        match input {
            Input::Observed(sight) => self.saw(sight, false),
            Input::Listed(members) => {
                self.listed = self.choice();
                for m in members {
                    self.saw_member(m, false);
                }
            }
            Input::Settled { id, result } => self.settled(*id, result),
            Input::Elapsed => self.armed = None,
        }
    }

    fn saw(&mut self, sight: &Sight, live: bool) {
        match sight {
            Sight::Set(s) => self.saw_set(s, live),
            Sight::Member(m) => self.saw_member(m, live),
            Sight::All { members, .. } => members.iter().for_each(|m| self.saw_member(m, false)),
            Sight::Gone(r) if r.kind == self.set_ref().kind => self.lost_set(&r.uid),
            Sight::Gone(r) => self.lost_member(&r.name, &r.uid),
            Sight::Vanished(r) if r.kind == self.set_ref().kind => {
                if self.set.uid() == r.uid {
                    self.set.doubt();
                }
            }
            Sight::Vanished(r) => {
                if let Some(slot) = self.members.get_mut(&r.name).filter(|s| s.uid() == r.uid) {
                    slot.doubt();
                }
            }
        }
    }

    fn saw_set(&mut self, s: &SetView, live: bool) {
        let before = self.choice();
        let folded = self.set.fold(s.clone(), live);
        if live && self.set.uid() == s.meta.uid {
            self.live = self.live.max(s.meta.rv);
        }
        if folded == Folded::Replaced {
            self.start_over();
        }
        if self.choice() != before {
            self.listed = None;
        }
    }

    fn lost_set(&mut self, uid: &Uid) {
        if self.set.gone(uid) {
            self.start_over();
        }
    }

    /// Another set, or none: what belonged to the old one is of no use.
    fn start_over(&mut self) {
        self.members.clear();
        self.owed.extend(std::mem::take(&mut self.flights).into_keys());
        self.listed = None;
        self.live = self.set.rv();
        (self.making, self.survey) = (Slot::default(), Slot::default());
        (self.window, self.crashes, self.crashed) = (1, 0, None);
        (self.create_failed, self.delete_failed, self.lazy) = (None, None, None);
        self.tell.clear();
    }

    fn saw_member(&mut self, m: &Member, live: bool) {
        if self.gone.contains(&m.meta.uid) {
            return;
        }
        let name = &m.meta.name;
        let slot = self.members.entry(name.clone()).or_default();
        let before = slot.get().cloned();
        if slot.fold(m.clone(), live) == Folded::Ignored {
            return;
        }
        let replaced = before.as_ref().filter(|b| b.meta.uid != m.meta.uid).map(|b| b.meta.uid.clone());
        if let Some(dead) = replaced {
            self.bury(dead);
        }
        if self.set.get().is_some_and(|s| super::plan::is_adoptable(s, m)) {
            self.live = ResourceVersion::default();
            self.overtaken = self.flights.values().any(|w| matches!(w, What::ConfirmSet | What::Status));
        }
        let first = before.as_ref().is_none_or(|b| b.meta.uid != m.meta.uid || !b.phase.is_final());
        if self.is_own(m) {
            self.judge_end(m, first);
        }
        self.forget(name);
    }

    /// Instances that never get to run are not made one after another.
    fn judge_end(&mut self, m: &Member, news: bool) {
        if m.ran {
            (self.crashes, self.crashed) = (0, None);
        } else if m.phase == crate::observe::Phase::Failed && news && m.meta.deleting.is_none() {
            let waits = self.crashed.as_ref().is_some_and(|(_, until)| *until > self.now);
            if !waits {
                self.crashes += 1;
                let pause = crate::vm::strategy::start_backoff(&m.meta.uid, self.crashes);
                self.crashed = Some((m.meta.name.clone(), self.now.after(pause)));
            }
        }
    }

    fn lost_member(&mut self, name: &str, uid: &Uid) {
        if !uid.is_empty() {
            self.bury(uid.clone());
        }
        let Some(slot) = self.members.get_mut(name) else { return };
        let known = slot.uid();
        if slot.gone(uid) {
            self.bury(known);
        }
        self.forget(name);
    }

    /// The answer to a question says that there is none of that name; one that was seen since the question is not meant.
    fn not_found(&mut self, name: &str) {
        let Some(slot) = self.members.get_mut(name) else { return };
        let known = slot.uid();
        if slot.not_found() {
            self.bury(known);
        }
        self.forget(name);
    }

    fn bury(&mut self, uid: Uid) {
        if !self.gone.contains(&uid) {
            self.gone.push_back(uid);
            if self.gone.len() > TOMBSTONES {
                self.gone.pop_front();
            }
        }
    }

    /// Drops what is nobody's business here: names that are free, and strangers that do not match and stand in no way.
    pub(super) fn forget(&mut self, name: &str) {
        let Some(slot) = self.members.get(name).filter(|s| !s.in_flight() && !s.is_doubted()) else { return };
        let chosen = slot.get().map(|m| self.choice().is_some_and(|c| c.chooses(m)));
        let useless = match chosen {
            None => true,
            Some(chosen) => !chosen && !self.takes_a_name(name),
        };
        if useless {
            self.members.remove(name);
        }
    }

    // --- how commands ended ---

    /// All instances were read live, or that failed. One that is missing there may have gone, or has other labels now: it is asked
    /// for by itself.
    fn survey_settled(&mut self, result: &Settled<Sight>) {
        match result {
            Settled::Applied(Some(Sight::All { members, rv })) => {
                self.survey.succeeded();
                self.surveyed = true;
                members.iter().for_each(|m| self.saw_member(m, false));
                let there: BTreeSet<&str> = members.iter().map(|m| m.meta.name.as_str()).collect();
                for (_, slot) in self.members.iter_mut().filter(|(name, _)| !there.contains(name.as_str())) {
                    if slot.get().is_some_and(|m| m.meta.rv <= *rv) {
                        slot.doubt();
                    }
                }
            }
            Settled::Busy { after } => self.survey.hold(self.now.after(*after)),
            Settled::Applied(_)
            | Settled::Conflict
            | Settled::Gone
            | Settled::Refused(_)
            | Settled::Unknown
            | Settled::Failed(_)
            | Settled::Acked(_) => self.survey.failed(self.now, None),
        }
    }

    fn settled(&mut self, id: CommandId, result: &Settled<Sight>) {
        let Some(what) = self.flights.remove(&id) else {
            // Of a set that is over; what was read is still a sight, and the way is free again.
            self.owed.remove(&id);
            self.set.land(id);
            if let Settled::Applied(Some(s)) = result {
                self.saw(s, true);
            }
            return;
        };
        match what.member().cloned() {
            None if what == What::Survey => {
                self.survey.land(id);
                self.survey_settled(result);
            }
            None => {
                self.set.land(id);
                self.set_settled(&what, result);
            }
            Some(name) => {
                if let Some(slot) = self.members.get_mut(&name) {
                    slot.land(id);
                }
                self.member_settled(&name, &what, result);
                self.forget(&name);
            }
        }
    }

    fn set_settled(&mut self, what: &What, result: &Settled<Sight>) {
        self.set_answered(what, result);
        if std::mem::take(&mut self.overtaken) {
            self.live = ResourceVersion::default();
        }
    }

    fn set_answered(&mut self, what: &What, result: &Settled<Sight>) {
        let now = self.now;
        match result {
            Settled::Applied(Some(s)) => {
                // A read of what is as it was does not make up for a write that did not work.
                if *what != What::ConfirmSet || !self.is_as_known(s) {
                    self.set.succeeded();
                }
                self.saw(s, true);
            }
            Settled::Applied(None) | Settled::Unknown => {
                self.set.failed(now, None);
                self.set.doubt();
            }
            Settled::Gone if *what == What::ConfirmSet => {
                if self.set.not_found() {
                    self.start_over();
                }
            }
            Settled::Gone => self.set.doubt(),
            Settled::Conflict => self.set.conflict(),
            Settled::Refused(r) => self.set.failed(now, Some(r.clone())),
            Settled::Failed(r) => {
                self.set.failed(now, Some(r.clone()));
                self.set.doubt();
            }
            Settled::Busy { after } => self.set.hold(now.after(*after)),
            Settled::Acked(_) => {}
        }
    }

    fn member_settled(&mut self, name: &str, what: &What, result: &Settled<Sight>) {
        let now = self.now;
        match result {
            Settled::Applied(sight) => {
                self.done(name, what);
                let read = matches!(what, What::Confirm(_)) && sight.as_ref().is_some_and(|s| self.is_as_known(s));
                if let Some(slot) = self.members.get_mut(name) {
                    if !read {
                        slot.succeeded();
                    }
                    if sight.is_none() {
                        slot.doubt();
                    }
                }
                if let Some(s) = sight {
                    self.saw(s, true);
                }
                // Told of an object that is known to be gone: no server that is up to date says so.
                if let Some(slot) = self.members.get_mut(name).filter(|s| s.is_doubted()) {
                    slot.failed(now, None);
                }
            }
            Settled::Gone => match what {
                // The source vanished, or the namespace is going.
                What::Create(_) => {
                    self.set.doubt();
                    self.making.failed(now, None);
                    self.window = 1;
                }
                What::Delete(_) => {
                    self.done(name, what);
                    self.not_found(name);
                }
                What::Confirm(_) => self.not_found(name),
                What::Adopt(_) | What::Release(_) | What::Status | What::ConfirmSet | What::Survey => self.doubt(name),
            },
            Settled::Conflict => {
                if matches!(what, What::Create(_)) {
                    // The name may be taken, or the set may be another than we know.
                    self.set.doubt();
                    self.making.conflict();
                    self.window = 1;
                }
                if let Some(slot) = self.members.get_mut(name) {
                    slot.conflict();
                }
            }
            Settled::Refused(r) => self.refused(name, what, r),
            Settled::Failed(r) => {
                self.refused(name, what, r);
                // It may have been done all the same: nothing was said against it.
                if let (What::Adopt(_), Some(slot)) = (what, self.members.get_mut(name)) {
                    slot.forgive();
                }
                self.doubt(name);
            }
            Settled::Busy { after } => match (what, self.members.get_mut(name)) {
                (What::Create(_), _) | (_, None) => self.making.hold(now.after(*after)),
                (_, Some(slot)) => slot.hold(now.after(*after)),
            },
            Settled::Unknown => {
                if matches!(what, What::Create(_)) {
                    self.making.doubt();
                }
                if let Some(slot) = self.members.get_mut(name) {
                    slot.failed(now, None);
                }
                self.doubt(name);
            }
            Settled::Acked(_) => {}
        }
    }

    /// It shows the version that we know.
    fn is_as_known(&self, sight: &Sight) -> bool {
        match sight {
            Sight::Set(s) => s.meta.uid == self.set.uid() && s.meta.rv == self.set.rv(),
            Sight::Member(m) => {
                self.members.get(&m.meta.name).is_some_and(|k| k.uid() == m.meta.uid && k.rv() == m.meta.rv)
            }
            Sight::All { .. } | Sight::Gone(_) | Sight::Vanished(_) => false,
        }
    }

    fn doubt(&mut self, name: &str) {
        if let Some(slot) = self.members.get_mut(name) {
            slot.doubt();
        }
    }

    fn done(&mut self, name: &str, what: &What) {
        match what {
            What::Create(_) => {
                self.making = Slot::default();
                self.create_failed = None;
                self.window = (self.window + 1).min(BURST);
                let text = format!("Started the virtual machine by creating the new virtual machine instance {name}");
                self.tell.push((false, "SuccessfulCreate".into(), text));
            }
            What::Delete(_) => {
                self.delete_failed = None;
                let over = self.members.get(name).and_then(Slot::get).is_some_and(|m| m.phase.is_final());
                let text = if over {
                    format!("Deleted finished virtual machine: {name}")
                } else {
                    format!("Stopped the virtual machine by deleting the virtual machine instance {name}")
                };
                self.tell.push((false, "SuccessfulDelete".into(), text));
            }
            What::Adopt(_) | What::Release(_) | What::Confirm(_) | What::Status | What::ConfirmSet | What::Survey => {}
        }
    }

    fn refused(&mut self, name: &str, what: &What, r: &Refusal) {
        let now = self.now;
        let text = format!("{}: {}", r.reason, r.message);
        match what {
            What::Create(_) => {
                self.window = 1;
                self.making.failed(now, None);
                let message = format!("Error creating virtual machine instance: {text}");
                self.fail(Trouble { reason: "FailedCreate".into(), message });
            }
            What::Delete(_) => {
                if let Some(slot) = self.members.get_mut(name) {
                    slot.failed(now, Some(r.clone()));
                }
                let message = format!("Error deleting virtual machine instance {name}: {text}");
                self.fail(Trouble { reason: "FailedDelete".into(), message });
            }
            What::Adopt(_) | What::Release(_) | What::Confirm(_) | What::Status | What::ConfirmSet | What::Survey => {
                if let Some(slot) = self.members.get_mut(name) {
                    slot.failed(now, Some(r.clone()));
                }
            }
        }
    }

    /// People hear of a failure once, however often it repeats itself.
    fn fail(&mut self, trouble: Trouble) {
        let place = if trouble.reason == "FailedCreate" { &mut self.create_failed } else { &mut self.delete_failed };
        if place.as_ref() != Some(&trouble) {
            self.tell.push((true, trouble.reason.clone(), trouble.message.clone()));
            *place = Some(trouble);
        }
    }
}

impl Machine for Set {
    type Input = Input;
    type Command = Command;

    fn step(&mut self, event: &Event<Input>) -> Vec<Command> {
        self.now = self.now.max(event.at);
        self.fold(&event.input);
        let out = self.plan();
        // What is decided on it is decided at once.
        self.surveyed = false;
        out
    }
}
