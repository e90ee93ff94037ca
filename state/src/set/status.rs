//! What is written into the set's status.

use super::{
    cell::{Set, Trouble, What},
    view::{SetStatus, SetView},
};
use crate::{
    condition::{self, Cond},
    object::Class,
    vm::{Command, Note, Patch, plan::LAZY},
};
use serde_json::{Map, Value, json};

pub(super) const PAUSED: &str = "ReplicaPaused";
pub(super) const FAILURE: &str = "ReplicaFailure";

impl Set {
    /// Why the set is not what it should be, where that is not only a matter of time.
    pub(super) fn trouble(&self) -> Option<Trouble> {
        let set = self.set.get()?;
        if let Some(problem) = &set.problem {
            return Some(Trouble { reason: "InvalidSpec".into(), message: problem.clone() });
        }
        if set.paused || set.meta.deleting.is_some() {
            return None;
        }
        let crash = self.crashed.as_ref().filter(|(_, until)| *until > self.now).map(|(name, until)| Trouble {
            reason: "CrashLoopBackOff".into(),
            message: format!("instance {name} failed before it ran; the next one is not made before {until}"),
        });
        self.create_failed.clone().or_else(|| self.delete_failed.clone()).or(crash)
    }

    pub(super) fn plan_status(&mut self, set: &SetView, out: &mut Vec<Command>) {
        if let Some(until) = self.crashed.as_ref().map(|(_, t)| *t) {
            self.want_wake(until);
        }
        if let Some(at) = self.set.free_at(self.now) {
            self.want_wake(at);
        }
        // Creations are rendered from the version that we know.
        if !self.set.is_free(self.now) || self.flights.values().any(|w| matches!(w, What::Create(_))) {
            return;
        }
        let want = self.desired(set);
        let status = diff(set.status.as_ref(), &want);
        if status.is_empty() {
            self.lazy = None;
            return;
        }
        let was = |kind| set.status.as_ref().is_some_and(|s| condition::is_true(&s.conditions, kind));
        let paused = was(PAUSED) != condition::is_true(&want.conditions, PAUSED);
        let urgent = paused || was(FAILURE) != condition::is_true(&want.conditions, FAILURE);
        let due = self.lazy.get_or_insert(self.now).after(LAZY);
        if !urgent && self.now < due {
            self.want_wake(due);
            return;
        }
        let body = json!({
            "metadata": {"uid": set.meta.uid, "resourceVersion": set.meta.rv.to_string()},
            "status": status,
        });
        if !self.set.writes(&json!([set.meta.uid, status]), self.now) {
            if let Some(at) = self.set.free_at(self.now) {
                self.want_wake(at);
            }
            return;
        }
        self.lazy = None;
        let target = self.set_ref();
        let class = if urgent { Class::Urgent } else { Class::Lazy };
        let id = self.issue(What::Status);
        out.push(Command::Patch { id, patch: Patch { target, status: true, class, why: "status".into(), body } });
        if paused {
            let (reason, text) = match set.paused {
                true => ("SuccessfulPaused", "Paused"),
                false => ("SuccessfulResumed", "Resumed"),
            };
            let about = self.set_ref();
            out.push(Command::Note(Note { about, warning: false, reason: reason.into(), message: text.into() }));
        }
    }

    fn desired(&self, set: &SetView) -> SetStatus {
        let mut s = set.status.clone().unwrap_or_default();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        s.replicas = count(self.counting().count());
        s.ready_replicas = count(self.counting().filter(|m| m.ready).count());
        if set.problem.is_none() {
            s.label_selector = set.selector.to_string();
        }
        match set.paused {
            true => {
                condition::set(&mut s.conditions, Cond::new(PAUSED, true, "Paused", "Controller got paused"), self.now)
            }
            false => condition::remove(&mut s.conditions, PAUSED),
        }
        match self.trouble() {
            Some(t) => condition::set(&mut s.conditions, Cond::new(FAILURE, true, &t.reason, t.message), self.now),
            None => condition::remove(&mut s.conditions, FAILURE),
        }
        s
    }
}

/// The fields of a status that differ, as a merge patch.
fn diff(old: Option<&SetStatus>, new: &SetStatus) -> Map<String, Value> {
    if old == Some(new) {
        return Map::new();
    }
    let (Ok(a), Ok(Value::Object(b))) = (serde_json::to_value(old), serde_json::to_value(new)) else {
        return Map::new();
    };
    b.into_iter().filter(|(k, v)| a.get(k) != Some(v)).collect()
}
