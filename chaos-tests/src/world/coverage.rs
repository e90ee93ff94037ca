//! What runs have passed through: in which state of an instance which event came, and what effects there were.

use super::{World, api::Proc, server::Res};
use state::{
    Key,
    domain::AckResult,
    object::Settled,
    observe::Phase,
    vm::{Fact, Input, Report, Sight},
};
use std::collections::{BTreeMap, BTreeSet};

/// States of an instance, as its controller's cache has them; each also on its way out.
pub const STATES: [&str; 9] =
    ["none", "Unset", "Pending", "Scheduling", "Scheduled", "Running", "Succeeded", "Failed", "Unknown"];

/// What was passed through.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Coverage {
    /// How often an event came to a machine's cell in a state.
    pub cells: BTreeMap<(String, String), u64>,
    /// Kinds of effects: whose, and what.
    pub effects: BTreeSet<String>,
}

impl Coverage {
    /// Takes in another one.
    pub fn add(&mut self, other: &Self) {
        for (cell, n) in &other.cells {
            *self.cells.entry(cell.clone()).or_default() += n;
        }
        self.effects.extend(other.effects.iter().cloned());
    }

    /// States that were there.
    pub fn states(&self) -> BTreeSet<&str> {
        self.cells.keys().map(|(s, _)| s.as_str()).collect()
    }

    /// Events that came.
    pub fn events(&self) -> BTreeSet<&str> {
        self.cells.keys().map(|(_, e)| e.as_str()).collect()
    }
}

impl World {
    /// An event has come to a machine's cell.
    pub(super) fn cover(&mut self, c: usize, key: &Key, input: &Input) {
        if self.coverage.is_none() {
            return;
        }
        let cached = self.controllers[c].caches.get(&Res::Vmi);
        let of = |o: &&std::rc::Rc<super::server::Seen>| o.name() == key.name && o.namespace() == key.namespace;
        let state = match cached.and_then(|k| k.objects.values().find(of)) {
            None => "none".to_owned(),
            Some(o) => {
                let phase = match Phase::parse(o.text("/status/phase")) {
                    Phase::Unset => "Unset",
                    phase => phase.name(),
                };
                if o.deleting() { format!("{phase}, going") } else { phase.to_owned() }
            }
        };
        let event = event(input);
        if let Some(coverage) = &mut self.coverage {
            *coverage.cells.entry((state, event)).or_default() += 1;
        }
    }

    /// An effect is about to happen.
    pub(super) fn cover_effect(&mut self, who: Proc, what: &str) {
        if let Some(coverage) = &mut self.coverage {
            let who = match who {
                Proc::Controller(..) => "controller",
                Proc::Agent(..) => "agent",
            };
            coverage.effects.insert(format!("{who}: {what}"));
        }
    }
}

/// The kind of an event.
fn event(input: &Input) -> String {
    match input {
        Input::Observed(Sight::Present(o)) => format!("sees {}", o.reference().kind.name()),
        Input::Observed(Sight::Gone(r)) => format!("{} is gone", r.kind.name()),
        Input::Observed(Sight::Vanished(r)) => format!("{} is not listed", r.kind.name()),
        Input::Reported(Report::Domain { domain, .. }) => format!("domain {:?}", domain.state),
        Input::Reported(Report::Outcome { outcome, .. }) => format!("outcome {:?}", outcome.cause),
        Input::Reported(Report::Inventory { complete: true, .. }) => "inventory".into(),
        Input::Reported(Report::Inventory { complete: false, .. }) => "inventory, in part".into(),
        Input::Elapsed => "time passes".into(),
        Input::Configured(Fact::Cluster(_)) => "settings".into(),
        Input::Configured(Fact::Node(n)) if n.gone => "node is gone".into(),
        Input::Configured(Fact::Node(n)) if n.fenced.is_some() => "node is fenced".into(),
        Input::Configured(Fact::Node(n)) if n.session.is_none() => "node is silent".into(),
        Input::Configured(Fact::Node(_)) => "node is heard".into(),
        Input::Settled { result, .. } => match result {
            Settled::Applied(Some(_)) => "answer: done, and shown".into(),
            Settled::Applied(None) => "answer: done".into(),
            Settled::Gone => "answer: gone".into(),
            Settled::Conflict => "answer: conflict".into(),
            Settled::Busy { .. } => "answer: not now".into(),
            Settled::Refused(_) => "answer: refused".into(),
            Settled::Failed(_) => "answer: failed".into(),
            Settled::Unknown => "answer: none".into(),
            Settled::Acked(AckResult::Accepted) => "agent: accepted".into(),
            Settled::Acked(AckResult::Done { .. }) => "agent: done".into(),
            Settled::Acked(AckResult::Refused { .. }) => "agent: refused".into(),
        },
    }
}
