//! Evidence that a domain has stopped. Silence, a lost session, a deleted Node object and a 404 from a cache are none.

use super::cell::{Told, Vm};
use crate::{
    NodeName,
    domain::{Cause, DomainState, RefusalReason},
    observe::{ContainerState, Phase, VmiView, Witness},
};
use api::names;
use serde::Deserialize;

/// How the domain of a VMI ended, and how that is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// How.
    pub cause: Cause,
    /// For people.
    pub message: String,
    /// What proves it.
    pub evidence: Evidence,
}

/// What proves that a domain has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Evidence {
    /// The node agent told the outcome.
    Outcome,
    /// `compute` of the pod has terminated.
    PodEnded,
    /// A complete inventory has the pod and no process in it.
    Absent,
    /// The agent could not start it, and never will.
    StartRefused,
    /// Somebody removed the pod object.
    PodRemoved,
    /// The node is fenced.
    Fenced,
    /// The node was booted again.
    Rebooted,
}

/// A witness as it stands in an annotation.
pub(super) fn text(w: &Witness) -> String {
    serde_json::to_string(w).unwrap_or_default()
}

/// The launcher's termination message: the durable copy of the outcome.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Termination {
    cause: String,
    message: String,
}

/// Reads a termination message; what is not one proves that the domain is over, but not how.
fn termination(text: &str) -> (Cause, String) {
    let causes = [
        Cause::GuestShutdown,
        Cause::Crashed,
        Cause::Panicked,
        Cause::KilledAfterGrace,
        Cause::Destroyed,
        Cause::StartFailed,
    ];
    match serde_json::from_str::<Termination>(text) {
        Ok(t) => (causes.into_iter().find(|c| c.name() == t.cause).unwrap_or(Cause::OutcomeUnknown), t.message),
        Err(_) => (Cause::OutcomeUnknown, String::new()),
    }
}

impl Vm {
    /// How the domain of a VMI that is Scheduled or Running ended; `None` where nothing proves that it did.
    pub(super) fn verdict(&self, vmi: &VmiView) -> Option<Verdict> {
        if let Some((_, o)) = self.launcher().and_then(|p| self.outcomes.get(p)) {
            return Some(Verdict { cause: o.cause, message: o.message.clone(), evidence: Evidence::Outcome });
        }
        if let Some(pod) = self.current_pod().filter(|p| p.ended()) {
            let (cause, message) = match &pod.compute {
                Some(ContainerState::Terminated { exit, reason, message }) => match termination(message) {
                    (Cause::OutcomeUnknown, _) => {
                        (Cause::OutcomeUnknown, format!("the launcher ended ({reason}, exit code {exit})"))
                    }
                    known => known,
                },
                Some(ContainerState::Running | ContainerState::Waiting { .. }) | None => {
                    (Cause::OutcomeUnknown, format!("the launcher pod ended ({})", pod.reason))
                }
            };
            return Some(Verdict { cause, message, evidence: Evidence::PodEnded });
        }
        if let Some(node) = self.rebooted(vmi) {
            let message = format!("node {node} was booted again, which ended all that ran there");
            return Some(Verdict { cause: Cause::OutcomeUnknown, message, evidence: Evidence::Rebooted });
        }
        if self.absent_is_proven(vmi) {
            return Some(Verdict {
                cause: Cause::OutcomeUnknown,
                message: "the node agent finds no process of this machine".into(),
                evidence: Evidence::Absent,
            });
        }
        if self.told.values().any(|(_, t)| matches!(t, Told::Refused(..)))
            && let Some(Told::Refused(RefusalReason::Failed | RefusalReason::Unsupported, message, _)) =
                self.start_told()
            && !self.domain_lives()
        {
            let message = message.clone();
            return Some(Verdict { cause: Cause::StartFailed, message, evidence: Evidence::StartRefused });
        }
        if let Some(rv) = self.node_fact().and_then(|n| n.fenced) {
            return Some(Verdict {
                cause: Cause::OutcomeUnknown,
                message: format!("the node was taken out of service (version {rv} of the Node)"),
                evidence: Evidence::Fenced,
            });
        }
        if self.pod_is_gone() {
            return Some(Verdict {
                cause: Cause::OutcomeUnknown,
                message: format!("the launcher pod was removed: {} declared it stopped", self.declared_by()),
                evidence: Evidence::PodRemoved,
            });
        }
        None
    }

    /// Who answers for a pod that was removed before its launcher had ended.
    pub(super) fn declared_by(&self) -> &'static str {
        match self.node_fact() {
            Some(n) if n.gone => "PodGC (node deleted)",
            Some(_) | None => "whoever removed it",
        }
    }

    /// What has to be recorded before anything follows from the fence of the node.
    pub(super) fn witness(&self) -> Option<Witness> {
        let vmi = self.vmi.get()?;
        let open = match vmi.phase {
            Phase::Scheduled | Phase::Running => true,
            Phase::Unset | Phase::Pending | Phase::Scheduling | Phase::Succeeded | Phase::Failed | Phase::Unknown => {
                false
            }
        };
        let fenced = open && self.verdict(vmi).is_some_and(|v| v.evidence == Evidence::Fenced);
        let fact = self.node_fact().filter(|_| fenced)?;
        Some(Witness {
            vmi: vmi.meta.uid.0.clone(),
            node: fact.node.0.clone(),
            resource_version: fact.fenced?.to_string(),
            taint: names::TAINT_OUT_OF_SERVICE.into(),
        })
    }

    /// The witness that the VM does not have yet. The VMI does not end before it does, and nothing is created before the VMI has
    /// ended.
    pub(super) fn missing_witness(&self) -> Option<Witness> {
        self.own_vmi()?;
        let recorded = self.vm.get()?.fenced.as_ref().map(|w| (&w.vmi, &w.node));
        self.witness().filter(|w| recorded != Some((&w.vmi, &w.node)))
    }

    /// The node was booted since this launcher was heard on it: nothing of before is left. A launcher that speaks in this very
    /// session speaks against what stands in the VMI, and is believed.
    fn rebooted(&self, vmi: &VmiView) -> Option<NodeName> {
        let (inventory, word) = self.heard_now().filter(|(i, _)| i.complete)?;
        let then = vmi.boot_id.as_ref().filter(|b| !b.is_empty() && !inventory.boot_id.is_empty())?;
        let lives = word.is_some_and(|d| d.has_process() || d.is_of_a_launcher());
        (*then != inventory.boot_id && !lives).then(|| self.node_name()).flatten()
    }

    /// The boot of the node by which the current launcher was heard. A launcher lives once, so this is the boot that it is of.
    pub(super) fn boot_of_launcher(&self) -> Option<&String> {
        let (inventory, word) = self.heard_now()?;
        word.filter(|d| d.is_of_a_launcher()).map(|_| &inventory.boot_id).filter(|b| !b.is_empty())
    }

    /// `Absent` proves that there is no domain only if the inventory is complete, of the session that stands, and the agent
    /// has either taken on the START or has seen the VMI that authorises it.
    fn absent_is_proven(&self, vmi: &VmiView) -> bool {
        let absent = self.domain().is_some_and(|d| d.state == DomainState::Absent);
        let Some(node) = self.node_name().filter(|_| absent) else { return false };
        let session = self.node.get(&node).and_then(|n| n.session);
        let Some(inv) = self.inventory.get(&node).filter(|i| i.complete && Some(i.session) == session) else {
            return false;
        };
        match vmi.phase {
            // It ran, and the agent knows the pod: the START was before.
            Phase::Running => true,
            // A Scheduled VMI whose domain is absent has, as a rule, not been started yet.
            Phase::Scheduled => {
                let used_up = matches!(self.start_told(), Some(Told::Refused(RefusalReason::AlreadyStarted, ..)));
                used_up || (self.start_was_taken() && self.start_session() != Some(inv.session))
            }
            Phase::Unset | Phase::Pending | Phase::Scheduling | Phase::Succeeded | Phase::Failed | Phase::Unknown => {
                false
            }
        }
    }

    /// The phase that an ended domain leads to.
    pub(super) fn final_phase(cause: Cause, vmi: &VmiView) -> Phase {
        if cause.succeeded(vmi.is_promised_a_shutdown()) { Phase::Succeeded } else { Phase::Failed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_termination_message_that_cannot_be_read_says_nothing_about_the_cause() {
        assert_eq!(
            termination(r#"{"cause":"GuestShutdown","exit":0,"message":"bye"}"#),
            (Cause::GuestShutdown, "bye".into())
        );
        assert_eq!(termination(r#"{"cause":"Later"}"#).0, Cause::OutcomeUnknown);
        assert_eq!(termination("panicked at main.rs").0, Cause::OutcomeUnknown);
        assert_eq!(termination("").0, Cause::OutcomeUnknown);
    }
}
