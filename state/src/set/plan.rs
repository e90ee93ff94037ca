//! The order of decisions of one step: look again where in doubt, take on and let go, delete, make, tell.

use super::{
    cell::{BURST, Set, What},
    status::{FAILURE, PAUSED},
    view::{Member, SetView, member_name},
};
use crate::{
    NodeName, Timestamp,
    explain::{WaitKind, Waiting},
    object::{Class, CommandId, Kind, Versioned},
    observe::Phase,
    vm::{Command, Note, Patch, Recipe, Source, waits::refused},
};
use api::OwnerReference;
use serde_json::{Value, json};
use std::{cmp::Reverse, collections::BTreeSet};

/// Instances that are named where not all of them are.
const TOLD: usize = 3;

impl Set {
    pub(super) fn plan(&mut self) -> Vec<Command> {
        let mut out = vec![];
        let before = self.armed.take().filter(|t| *t > self.now);
        for (warning, reason, message) in std::mem::take(&mut self.tell) {
            let about = self.set_ref();
            if !about.uid.is_empty() {
                out.push(Command::Note(Note { about, warning, reason, message }));
            }
        }
        self.plan_doubts(&mut out);
        if let Some(set) = self.set.get().cloned().filter(|_| !self.set.is_doubted()) {
            let acts = set.meta.deleting.is_none() && set.problem.is_none() && self.listed.is_some();
            if acts {
                self.plan_owners(&set, &mut out);
            }
            if acts && !set.paused {
                self.plan_deletions(&set, &mut out);
                self.plan_creations(&set, &mut out);
            }
            if self.listed.is_some() || set.problem.is_some() {
                self.plan_status(&set, &mut out);
            }
        }
        if self.armed != before
            && let Some(at) = self.armed
        {
            out.push(Command::Wake { at });
        }
        out
    }

    pub(super) fn want_wake(&mut self, at: Timestamp) {
        if at > self.now {
            self.armed = Some(self.armed.map_or(at, |t| t.min(at)));
        }
    }

    pub(super) fn issue(&mut self, what: What) -> CommandId {
        self.next_id += 1;
        let id = CommandId(self.next_id);
        match what.member() {
            Some(name) => self.members.entry(name.clone()).or_default().depart(id),
            None if what == What::Survey => self.survey.depart(id),
            None => self.set.depart(id),
        }
        self.flights.insert(id, what);
        id
    }

    /// Whether a command for the instance may be sent now; else its deadline is taken into account.
    fn is_free(&mut self, name: &str) -> bool {
        let Some(slot) = self.members.get(name) else { return true };
        let (free, at) = (slot.is_free(self.now), slot.free_at(self.now));
        if let Some(at) = at {
            self.want_wake(at);
        }
        free
    }

    fn set_is_free(&mut self) -> bool {
        if let Some(at) = self.set.free_at(self.now) {
            self.want_wake(at);
        }
        self.set.is_free(self.now)
    }

    fn plan_doubts(&mut self, out: &mut Vec<Command>) {
        if self.set.is_doubted() {
            self.confirm_set(out);
        }
        let doubted: Vec<String> =
            self.members.iter().filter(|(_, s)| s.is_doubted()).map(|(n, _)| n.clone()).collect();
        for name in doubted {
            if self.is_free(&name) {
                let target = self.member_ref(&name);
                let id = self.issue(What::Confirm(name));
                out.push(Command::Confirm { id, target });
            }
        }
    }

    fn confirm_set(&mut self, out: &mut Vec<Command>) {
        if self.set_is_free() {
            let target = self.set_ref();
            let id = self.issue(What::ConfirmSet);
            out.push(Command::Confirm { id, target });
        }
    }

    /// What is about to be done cannot be undone: is the set still as we know it? Asks where that is open.
    fn is_confirmed(&mut self, out: &mut Vec<Command>) -> bool {
        let live = self.set.rv() <= self.live;
        if !live {
            self.confirm_set(out);
        }
        live
    }

    /// The same of the instances: are there really too many? What ended unheard is not made up for by one that runs.
    fn is_surveyed(&mut self, set: &SetView, out: &mut Vec<Command>) -> bool {
        if self.surveyed {
            return true;
        }
        if let Some(at) = self.survey.free_at(self.now) {
            self.want_wake(at);
        }
        if self.survey.is_free(self.now) {
            let id = self.issue(What::Survey);
            let (namespace, selector) = (self.key.namespace.clone(), set.selector.to_string());
            out.push(Command::Survey { id, kind: Kind::VirtualMachineInstance, namespace, selector });
        }
        false
    }

    /// Remembers what is about to be written to an instance; not so where a conflict was claimed and nobody had been faster.
    fn writes(&mut self, name: &str, body: &Value) -> bool {
        let now = self.now;
        let Some(slot) = self.members.get_mut(name) else { return true };
        let writes = slot.writes(body, now);
        if let Some(at) = slot.free_at(now) {
            self.want_wake(at);
        }
        writes
    }

    // --- owner references ---

    /// Strangers that match are taken on, own instances that do not match any more are let go.
    fn plan_owners(&mut self, set: &SetView, out: &mut Vec<Command>) {
        let change = |m: &&Member| match m.controller() {
            Some(uid) => uid == set.meta.uid.as_str() && !set.selector.matches(&m.labels),
            None => is_adoptable(set, m),
        };
        let changes: Vec<Member> =
            self.members.values().filter(|s| !s.is_doubted()).filter_map(|s| s.get()).filter(change).cloned().collect();
        for m in changes {
            if !self.is_free(&m.meta.name) || !self.is_confirmed(out) {
                continue;
            }
            let own = set.meta.uid.as_str();
            let mut owners: Vec<OwnerReference> = m.owners.iter().filter(|o| o.uid != own).cloned().collect();
            let adopt = m.controller().is_none();
            if adopt {
                owners.push(OwnerReference {
                    api_version: crate::render::API_VERSION.into(),
                    kind: Kind::VirtualMachineInstanceReplicaSet.name().into(),
                    name: set.meta.name.clone(),
                    uid: own.to_owned(),
                    controller: true,
                    block_owner_deletion: true,
                });
            }
            let target = self.member_ref(&m.meta.name);
            let body = json!({"metadata": {
                "uid": m.meta.uid, "resourceVersion": m.meta.rv.to_string(), "ownerReferences": owners,
            }});
            let name = m.meta.name;
            if !self.writes(&name, &body) {
                continue;
            }
            let (what, why) = if adopt { (What::Adopt(name), "adopt") } else { (What::Release(name), "release") };
            let id = self.issue(what);
            let patch = Patch { target, status: false, class: Class::Urgent, why: why.into(), body };
            out.push(Command::Patch { id, patch });
        }
    }

    // --- numbers ---

    /// Names of those of which a delete is on its way.
    fn leaving(&self) -> BTreeSet<&str> {
        let deletes = self.flights.values().filter(|w| matches!(w, What::Delete(_)));
        deletes.filter_map(What::member).map(String::as_str).collect()
    }

    /// Own instances that count: neither ended nor on their way out.
    pub(super) fn counting(&self) -> impl Iterator<Item = &Member> {
        self.members.values().filter_map(|s| s.get()).filter(|m| {
            self.is_own(m) && self.matches(m) && m.meta.deleting.is_none() && !m.phase.is_final() && !m.doomed
        })
    }

    /// Creations of which nobody knows yet that they failed.
    fn coming(&self) -> usize {
        self.members.values().filter(|s| s.get().is_none()).count()
    }

    /// Strangers that are, or are about to be, taken on; not those of which that was refused.
    fn joining(&self, set: &SetView) -> usize {
        let willing = self.members.values().filter(|s| !s.is_doubted() && s.error().is_none()).filter_map(|s| s.get());
        willing.filter(|m| is_adoptable(set, m)).count()
    }

    /// Ended instances go at once; of those that count, as many as are too many.
    fn plan_deletions(&mut self, set: &SetView, out: &mut Vec<Command>) {
        let gone = self.leaving();
        let mut leaving = gone.len();
        let own = |m: &&Member| self.is_own(m) && self.matches(m) && m.meta.deleting.is_none();
        let known = || self.members.values().filter(|s| !s.is_doubted()).filter_map(|s| s.get()).filter(own);
        let ended: Vec<String> = known().filter(|m| m.phase.is_final()).map(|m| m.meta.name.clone()).collect();
        let doomed: Vec<String> =
            known().filter(|m| !m.phase.is_final() && m.doomed).map(|m| m.meta.name.clone()).collect();
        let wanted = usize::try_from(set.replicas).unwrap_or(usize::MAX);
        let counts = |m: &&Member| !m.phase.is_final() && !m.doomed && !gone.contains(m.meta.name.as_str());
        let mut counting: Vec<&Member> = known().filter(counts).collect();
        let surplus = counting.len().saturating_sub(wanted);
        counting.sort_by_key(|m| dispensable(m));
        let surplus: Vec<String> = counting.into_iter().take(surplus).map(|m| m.meta.name.clone()).collect();

        for name in ended {
            if leaving < BURST && self.is_free(&name) {
                leaving += usize::from(self.delete(name, out));
            }
        }
        for name in doomed {
            if leaving < BURST && self.is_free(&name) && self.is_confirmed(out) {
                leaving += usize::from(self.delete(name, out));
            }
        }
        for name in surplus {
            if leaving < BURST && self.is_free(&name) && self.is_confirmed(out) && self.is_surveyed(set, out) {
                leaving += usize::from(self.delete(name, out));
            }
        }
    }

    fn delete(&mut self, name: String, out: &mut Vec<Command>) -> bool {
        let target = self.member_ref(&name);
        let writes = self.writes(&name, &json!({"delete": target.uid}));
        if writes {
            let id = self.issue(What::Delete(name));
            out.push(Command::Delete { id, target });
        }
        writes
    }

    /// What is missing is made in places, of which there are as many as are wanted: whoever knows too little, and whatever arrives
    /// late, collides. So it waits where one that is over or going has not left its place yet. A place that somebody else's
    /// instance takes is made up for by a further one.
    fn plan_creations(&mut self, set: &SetView, out: &mut Vec<Command>) {
        let leaving = self.leaving();
        let counting = self.counting().filter(|m| !leaving.contains(m.meta.name.as_str())).count();
        let there = counting + self.coming() + self.joining(set);
        let wanted = usize::try_from(set.replicas).unwrap_or(usize::MAX);
        let mut missing = wanted.saturating_sub(there);
        if missing == 0 {
            return;
        }
        let pauses = [self.making.free_at(self.now), self.crashed.as_ref().map(|(_, until)| *until)];
        if let Some(until) = pauses.into_iter().flatten().filter(|t| *t > self.now).max() {
            self.want_wake(until);
            return;
        }
        // Rendered from the set at the version that we know: our own write of its status must not come between.
        if self.set.in_flight() {
            return;
        }
        let under_way = self.flights.values().filter(|w| matches!(w, What::Create(_))).count();
        missing = missing.min(self.window.saturating_sub(under_way));
        let (mut next, mut places) = (0, wanted);
        while missing > 0 && next < places {
            let name = self.name_of(next);
            next += 1;
            if let Some(slot) = self.members.get(&name) {
                let foreign = slot.get().is_some_and(|m| !self.is_own(m));
                places = places.saturating_add(usize::from(foreign));
                continue;
            }
            if !self.making.writes(&json!([name, set.meta.rv]), self.now) {
                if let Some(at) = self.making.free_at(self.now) {
                    self.want_wake(at);
                }
                return;
            }
            missing -= 1;
            let source = Source { object: self.set_ref(), rv: set.meta.rv };
            let recipe = Recipe::Member { set: set.meta.uid.clone() };
            let id = self.issue(What::Create(name.clone()));
            out.push(Command::Create { id, recipe, source, target: self.member_ref(&name) });
        }
    }

    fn name_of(&mut self, place: usize) -> String {
        let (uid, base) = self.set.get().map(|s| (s.uid().clone(), s.base.clone())).unwrap_or_default();
        if (&self.names.0, &self.names.1) != (&uid, &base) {
            self.names = (uid, base, vec![]);
        }
        let (uid, base, names) = &mut self.names;
        while names.len() <= place {
            names.push(member_name(base, uid, names.len()));
        }
        names.get(place).cloned().unwrap_or_default()
    }

    /// What has this name stands in the way of an instance that may have to be made.
    pub(super) fn takes_a_name(&mut self, name: &str) -> bool {
        (0..=self.members.len()).any(|place| self.name_of(place) == name)
    }

    /// How many are ready of how many that are wanted.
    pub fn word(&self) -> String {
        let wanted = self.set.get().map_or(0, |s| s.replicas);
        format!("{} of {wanted} ready", self.counting().filter(|m| m.ready).count())
    }

    /// What the cell waits for now, most specific first; empty where it is where it should be.
    pub fn waits(&self) -> Vec<Waiting> {
        let mut w = vec![];
        let Some(set) = self.set.get() else { return w };
        let mut wait = |kind, waits_for: String, name: (&str, &str), message: String, unblock: String| {
            w.push(Waiting {
                kind,
                waits_for,
                condition: name.0.into(),
                reason: name.1.into(),
                message,
                evidence: vec![],
                unblock,
                since: None,
                until: None,
            });
        };
        let why = |m: &Member| format!("'virtfold explain vmi/{}' says why", m.meta.name);
        if let Some(t) = self.trouble() {
            let (what, unblock) = match t.reason.as_str() {
                "InvalidSpec" => ("a spec that makes sense", "correct the set".to_owned()),
                "CrashLoopBackOff" => ("the next instance, after one that failed", "it is made by itself then".into()),
                "FailedDelete" => ("the API server to delete an instance", refused(&t.message)),
                _ => ("the API server to make an instance", refused(&t.message)),
            };
            wait(WaitKind::Problem, what.into(), (FAILURE, t.reason.as_str()), t.message, unblock);
        }
        if set.meta.deleting.is_some() {
            let text = "the set is being deleted, and its instances with it, unless they are to stay as orphans";
            wait(WaitKind::Progress, "its instances to go".into(), ("", ""), text.into(), "comes by itself".into());
            return w;
        }
        if set.paused {
            let unblock =
                format!("kubectl patch vmirs {} --type=merge -p '{{\"spec\":{{\"paused\":false}}}}'", set.meta.name);
            let text = "it makes and deletes nothing while spec.paused is set".into();
            wait(WaitKind::Person, "somebody to resume it".into(), (PAUSED, "Paused"), text, unblock);
        }
        let (there, wanted) = (self.counting().count(), usize::try_from(set.replicas).unwrap_or(usize::MAX));
        let itself = || if set.paused { "resume it".to_owned() } else { "comes by itself".into() };
        if there < wanted {
            let own = self.members.values().filter_map(|s| s.get()).filter(|m| self.is_own(m));
            let over = own.filter(|m| m.meta.deleting.is_some() || m.phase.is_final() || m.doomed);
            let over: Vec<&str> = over.map(|m| m.meta.name.as_str()).take(TOLD).collect();
            let after =
                if over.is_empty() { String::new() } else { format!("; to be gone first: {}", over.join(", ")) };
            let text = format!("{there} of {wanted} are there{after}");
            wait(WaitKind::Progress, format!("{} instances to be made", wanted - there), ("", ""), text, itself());
        }
        if there > wanted {
            let text = format!("{there} are there, {wanted} are wanted");
            wait(WaitKind::Progress, format!("{} instances to be deleted", there - wanted), ("", ""), text, itself());
        }
        let unready: Vec<&Member> = self.counting().filter(|m| !m.ready).collect();
        if let Some(first) = unready.first() {
            let names: Vec<&str> = unready.iter().take(TOLD).map(|m| m.meta.name.as_str()).collect();
            let more = if unready.len() > TOLD { ", ..." } else { "" };
            let text = format!("not ready: {}{more}", names.join(", "));
            wait(WaitKind::Progress, format!("{} instances to be ready", unready.len()), ("", ""), text, why(first));
        }
        w
    }
}

/// Nobody controls it, and it is as the set's own are. One that has ended would be taken on only to be deleted.
pub(super) fn is_adoptable(set: &SetView, m: &Member) -> bool {
    m.controller().is_none() && set.selector.matches(&m.labels) && m.meta.deleting.is_none() && !m.phase.is_final()
}

/// Which instance goes first when there are too many: the one with no node, then one that does not run, then one that is not
/// ready, then the newest.
fn dispensable(m: &Member) -> (bool, bool, bool, Reverse<Option<Timestamp>>, Reverse<u64>) {
    let placed = m.node.as_ref().is_some_and(|n| *n != NodeName::default());
    (placed, m.phase == Phase::Running, m.ready, Reverse(m.meta.created), Reverse(m.meta.rv.0))
}
