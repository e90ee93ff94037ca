//! What the launcher did, as steps of traces. A launcher has no network but its guest's, so the node agent tells them in its name; until
//! it says that it has, they are kept. An agent that dies takes nothing along, and the next one does not tell them twice.

use std::collections::BTreeMap;

use proto::launcher::Step;

use super::{Core, Level};
use crate::limits;
use crate::time::unix_us;

/// Where the steps of an operation belong.
#[derive(Clone, Debug, Default)]
pub(super) struct Operation {
    pub traceparent: String,
    pub cell: String,
    pub name: &'static str,
}

/// A step under way.
struct Open {
    operation: Operation,
    parent: &'static str,
    since: u64,
    asked: bool,
}

/// Steps under way, by name.
#[derive(Default)]
pub(super) struct Steps {
    open: BTreeMap<&'static str, Open>,
    seq: u64,
}

impl Steps {
    /// A step begins. One without a trace is none.
    pub fn begin(&mut self, operation: &Operation, name: &'static str, parent: &'static str, asked: bool) {
        if !operation.traceparent.is_empty() && !self.open.contains_key(name) {
            self.open.insert(name, Open { operation: operation.clone(), parent, since: unix_us(), asked });
        }
    }

    /// It is not known how a step ended, or whether it did.
    pub fn forget(&mut self, name: &str) {
        self.open.remove(name);
    }
}

impl Core {
    /// A step ends, and failed for that reason where there is one.
    pub(super) fn step_ends(&mut self, name: &'static str, failed: Option<(&str, &str)>) {
        let Some(open) = self.steps.open.remove(name) else { return };
        self.tell(open.operation, name, open.parent, (open.since, unix_us()), failed, open.asked);
    }

    /// A step under way waited for something else than its own work.
    pub(super) fn step_waited(&mut self, name: &'static str, wait: &str, since: u64, until: u64) {
        let Some(operation) = self.steps.open.get(name).map(|open| open.operation.clone()) else { return };
        self.tell(operation, wait, name, (since, until), None, false);
    }

    /// Something else has come to an end: so have these.
    pub(super) fn steps_end(&mut self, failed: Option<(&str, &str)>) {
        for name in self.steps.open.keys().copied().collect::<Vec<_>>() {
            self.step_ends(name, failed);
        }
    }

    /// A finished step, for whoever watches.
    pub(super) fn tell(
        &mut self,
        operation: Operation,
        name: &str,
        parent: &str,
        (since, until): (u64, u64),
        failed: Option<(&str, &str)>,
        asked: bool,
    ) {
        if operation.traceparent.is_empty() {
            return;
        }
        self.steps.seq += 1;
        let (reason, message) = failed.unwrap_or_default();
        let step = Step {
            seq: self.steps.seq,
            traceparent: operation.traceparent,
            cell: operation.cell,
            operation: operation.name.into(),
            name: name.into(),
            parent: parent.into(),
            start_unix_us: since,
            end_unix_us: until,
            reason: reason.into(),
            message: message.chars().take(limits::STEP_MESSAGE).collect(),
            asked,
        };
        self.level.send_modify(|level| {
            if level.steps.len() >= limits::STEPS {
                level.steps.pop_front();
            }
            level.steps.push_back(step);
        });
    }
}

impl Level {
    /// Those up to this one were told.
    pub fn told(&mut self, seq: u64) {
        self.steps.retain(|step| step.seq > seq);
    }
}
