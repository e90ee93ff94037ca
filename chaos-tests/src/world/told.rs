//! What real writes mean to the ghost, where they are seen in a store: who leads, and what people wish.

use super::{
    ghost::Ghost,
    server::{Res, Seen},
};
use embedded::semantics::value::items;
use serde_json::Value;
use state::Epoch;

/// The controllers' Lease.
pub const LEASE: &str = "virtfold-controller";

/// Who leads, as the Lease says.
#[derive(Debug, Default)]
pub struct Office {
    /// Holder, when it was written last, and for how long that counts, in milliseconds.
    held: Option<(String, u64, u64)>,
}

impl Office {
    /// The Lease was written, at this time (milliseconds).
    pub fn written(&mut self, ghost: &mut Ghost, now: &Seen, at: u64) {
        let holder = now.text("/spec/holderIdentity").to_owned();
        let seconds = now.value.pointer("/spec/leaseDurationSeconds").and_then(Value::as_u64).unwrap_or(0);
        match &self.held {
            Some((before, ..)) if *before == holder => {}
            Some((before, renewed, duration)) if !holder.is_empty() && at < renewed + duration => {
                let text = format!(
                    "{holder} took the Lease at {at} ms, and {before} may believe to lead until {}",
                    renewed + duration
                );
                ghost.rivals.push(text);
                ghost.acquired(Epoch(now.revision));
            }
            _ if !holder.is_empty() => ghost.acquired(Epoch(now.revision)),
            _ => {}
        }
        self.held = Some((holder, at, seconds * 1000)).filter(|(holder, ..)| !holder.is_empty());
    }

    /// Somebody leads: holds the Lease and renewed it within its time.
    pub fn led(&self, at: u64) -> bool {
        self.held.as_ref().is_some_and(|(_, renewed, duration)| at < renewed + duration)
    }
}

impl Ghost {
    /// A person changed a machine: what that is to the invariants.
    pub fn wished(&mut self, before: &Seen, now: &Seen) {
        let vmi = self.find(Res::Vmi, now.namespace(), now.name());
        let vmi = vmi.filter(|v| !matches!(v.text("/status/phase"), "Succeeded" | "Failed")).cloned();
        let (strategy, requests) = (now.text("/spec/runStrategy"), items(&now.value, "/status/stateChangeRequests"));
        let started = requests.iter().any(|r| r["action"] == "Start");
        if strategy != before.text("/spec/runStrategy") {
            match strategy {
                "Halted" => self.stopped(now.uid(), now.revision, vmi.as_ref().map(|v| v.uid())),
                _ => self.started(now.uid()),
            }
        } else if requests != items(&before.value, "/status/stateChangeRequests") && !requests.is_empty() {
            if started {
                self.started(now.uid());
            } else if let Some(vmi) = vmi {
                self.stopped(now.uid(), now.revision, Some(vmi.uid()));
            }
        }
    }
}
