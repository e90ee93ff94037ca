//! Where the VMI stands, given everything that is observed.

use super::{cell::Vm, verdict::Evidence};
use crate::{
    Millis, Timestamp,
    domain::{Cause, DomainState},
    object::Class,
    observe::{ContainerState, Phase, PodView, VmiView},
};

/// How long the Running write waits for the pod's Ready, so that both go in one write.
const READY_HOLD: Millis = Millis(300);

/// How long an ended pod without a word about the cause waits for the agent's word.
const OUTCOME_HOLD: Millis = Millis::secs(5);
/// The same where the agent cannot be asked at the moment.
const OUTCOME_HOLD_SILENT: Millis = Millis::secs(60);

/// The phase that a VMI should have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Next {
    pub phase: Phase,
    /// `status.reason` of an ended VMI.
    pub reason: Option<String>,
    pub message: String,
    pub class: Class,
    pub evidence: Option<Evidence>,
}

impl Next {
    fn stay(vmi: &VmiView) -> Self {
        Self {
            phase: vmi.phase,
            reason: vmi.status.reason.clone(),
            message: String::new(),
            class: Class::Lazy,
            evidence: None,
        }
    }

    fn to(vmi: &VmiView, phase: Phase, class: Class) -> Self {
        Self { phase, class, ..Self::stay(vmi) }
    }

    /// Why it failed, in words.
    pub(super) fn failure_words(&self) -> String {
        super::waits::failure_words(self.reason.as_deref().unwrap_or_default(), &self.message)
    }

    fn failed(reason: &str, message: impl Into<String>) -> Self {
        Self {
            phase: Phase::Failed,
            reason: Some(reason.into()),
            message: message.into(),
            class: Class::Urgent,
            evidence: None,
        }
    }
}

impl Vm {
    /// The phase that the VMI should have now.
    pub(super) fn next_phase(&mut self, vmi: &VmiView) -> Next {
        match vmi.phase {
            Phase::Succeeded | Phase::Failed | Phase::Unknown => Next::stay(vmi),
            Phase::Unset | Phase::Pending | Phase::Scheduling => self.before_scheduled(vmi),
            Phase::Scheduled | Phase::Running => self.after_scheduled(vmi),
        }
    }

    /// Nothing was authorised yet, so nothing can run: whatever befalls the pod ends the VMI.
    fn before_scheduled(&self, vmi: &VmiView) -> Next {
        let Some(pod) = self.current_pod() else {
            if self.pod_is_gone() && vmi.meta.deleting.is_some() {
                return Next::failed("Deleted", "deleted before it was started");
            }
            if self.pod_is_gone() && (vmi.phase == Phase::Scheduling || self.pod.had_one()) {
                return Next::failed("PodRemoved", "the launcher pod was removed before the machine was started");
            }
            return match vmi.phase {
                Phase::Unset => Next::to(vmi, Phase::Pending, Class::Lazy),
                Phase::Pending
                | Phase::Scheduling
                | Phase::Scheduled
                | Phase::Running
                | Phase::Succeeded
                | Phase::Failed
                | Phase::Unknown => Next::stay(vmi),
            };
        };
        if pod.ended() {
            return Next::failed("LauncherFailed", launcher_failure(pod));
        }
        if pod.meta.deleting.is_some() {
            return Next::failed("PodTerminating", "the launcher pod was deleted before the machine was started");
        }
        if pod.can_start() && vmi.meta.deleting.is_none() {
            return Next::to(vmi, Phase::Scheduled, Class::Urgent);
        }
        Next::to(vmi, Phase::Scheduling, Class::Lazy)
    }

    fn after_scheduled(&mut self, vmi: &VmiView) -> Next {
        if let Some(v) = self.verdict(vmi) {
            if let Some(until) = self.outcome_may_come(vmi, v.cause, v.evidence) {
                self.want_wake(until);
                return Next::stay(vmi);
            }
            if v.evidence == Evidence::Fenced && self.missing_witness().is_some() {
                return Next::stay(vmi);
            }
            let phase = Self::final_phase(v.cause, vmi);
            let reason = match (v.evidence, v.cause) {
                (Evidence::PodRemoved, _) => "PodRemoved",
                (Evidence::Fenced, _) => "NodeFenced",
                (Evidence::Rebooted, _) => "NodeRebooted",
                (
                    Evidence::Outcome | Evidence::PodEnded | Evidence::Absent | Evidence::StartRefused,
                    Cause::GuestShutdown
                    | Cause::Crashed
                    | Cause::Panicked
                    | Cause::KilledAfterGrace
                    | Cause::Destroyed
                    | Cause::StartFailed
                    | Cause::OutcomeUnknown,
                ) => v.cause.name(),
            };
            // KubeVirt shows no reason on a machine that simply powered off.
            let reason = (phase == Phase::Failed).then(|| reason.to_owned());
            return Next { phase, reason, message: v.message, class: Class::Urgent, evidence: Some(v.evidence) };
        }
        let runs = self.domain().is_some_and(|d| match d.state {
            DomainState::Running | DomainState::Paused | DomainState::ShuttingDown => true,
            DomainState::Absent | DomainState::Deaf | DomainState::Starting | DomainState::Stopped => false,
        });
        if vmi.phase == Phase::Scheduled && runs {
            let ready = self.current_pod().and_then(|p| p.ready.as_ref()).is_some_and(|c| c.is_true());
            let until = *self.hold_running.get_or_insert(self.now.after(READY_HOLD));
            let paused = self.domain().is_some_and(|d| d.state == DomainState::Paused);
            if ready || paused || self.now >= until || vmi.meta.deleting.is_some() {
                return Next::to(vmi, Phase::Running, Class::Urgent);
            }
            self.want_wake(until);
        }
        Next::stay(vmi)
    }

    /// The pod is over and nobody said how. The outcome is written three times; the agent may still tell it, and whether the
    /// machine runs again depends on it. Until when to wait, where that is later than now.
    fn outcome_may_come(&mut self, vmi: &VmiView, cause: Cause, evidence: Evidence) -> Option<Timestamp> {
        let unsaid = match evidence {
            Evidence::PodEnded | Evidence::PodRemoved => cause == Cause::OutcomeUnknown,
            Evidence::Outcome | Evidence::Absent | Evidence::StartRefused | Evidence::Fenced | Evidence::Rebooted => {
                false
            }
        };
        let asked = self.node_fact().is_some_and(|n| n.session.is_some());
        // A machine that is being deleted does not run again, however it ended.
        if !unsaid || (vmi.meta.deleting.is_some() && !asked) {
            return None;
        }
        let since = *self.unsaid_since.get_or_insert(self.now);
        let until = since.after(if asked { OUTCOME_HOLD } else { OUTCOME_HOLD_SILENT });
        (until > self.now).then_some(until)
    }
}

fn launcher_failure(pod: &PodView) -> String {
    match &pod.compute {
        Some(ContainerState::Terminated { exit, reason, .. }) => {
            format!("the launcher ended before the machine was started ({reason}, exit code {exit})")
        }
        Some(ContainerState::Running | ContainerState::Waiting { .. }) | None => {
            format!("the launcher pod ended before the machine was started ({})", pod.reason)
        }
    }
}
