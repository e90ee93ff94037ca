//! The launcher pod, and what its node agent is told.

use super::{
    cell::{At, Told, Vm, What},
    command::{Command, Order, Recipe, Source},
};
use crate::{
    InstructionId, Millis, PodUid, VmiUid,
    domain::{DomainState, InstructKind, Instruction, RefusalReason},
    instruction_id,
    observe::{Phase, VmiView},
};

/// Pause before an instruction is repeated that was refused because somebody's view was old.
const REPEAT_AFTER: Millis = Millis::secs(1);

/// Id of the one START that a launcher can get.
pub(super) fn start_id(vmi: &VmiUid, pod: &PodUid) -> InstructionId {
    instruction_id(vmi, pod, InstructKind::Start.name(), "running")
}

impl Vm {
    /// Creates, confirms or deletes the pod.
    pub(super) fn plan_pod(&mut self, out: &mut Vec<Command>) {
        let Some(vmi) = self.vmi.shared() else { return };
        if !self.pod.is_free(self.now) {
            if let Some(at) = self.pod.free_at(self.now) {
                self.want_wake(at);
            }
            return;
        }
        if self.pod.is_doubted() {
            return self.confirm(At::Pod, out);
        }
        let deleting = vmi.meta.deleting.is_some();
        if let Some(pod) = self.shared_pod() {
            if deleting && pod.meta.deleting.is_none() {
                let target = self.pod_ref();
                let id = self.issue(At::Pod, What::Delete);
                out.push(Command::Delete { id, target });
            }
            return;
        }
        let gone = self.pod_is_gone();
        match vmi.phase {
            Phase::Unset | Phase::Pending
                if !deleting && !self.pod.had_one() && !self.vmi.in_flight() && self.claims_are_there(&vmi) =>
            {
                let source = Source { object: self.vmi_ref(), rv: vmi.meta.rv };
                let recipe = Recipe::Pod { vmi: vmi.vmi_uid(), image: self.config.launcher_image.clone() };
                let target = self.pod_ref();
                let id = self.issue(At::Pod, What::CreatePod);
                out.push(Command::Create { id, recipe, source, target });
            }
            Phase::Unset | Phase::Pending if !deleting => {}
            // "There is none" decides something: the phase, or the finalizer.
            Phase::Unset | Phase::Pending | Phase::Scheduling | Phase::Scheduled | Phase::Running if !gone => {
                self.confirm(At::Pod, out);
            }
            Phase::Succeeded | Phase::Failed if deleting && !gone => self.confirm(At::Pod, out),
            Phase::Unset
            | Phase::Pending
            | Phase::Scheduling
            | Phase::Scheduled
            | Phase::Running
            | Phase::Succeeded
            | Phase::Failed
            | Phase::Unknown => {}
        }
    }

    /// Whether all claims of the VMI are known to exist.
    pub(super) fn claims_are_there(&self, vmi: &VmiView) -> bool {
        vmi.claims.iter().all(|c| self.claims.get(c).is_some_and(Option::is_some))
    }

    /// The first claim that is known to be missing.
    pub(super) fn missing_claim(&self, vmi: &VmiView) -> Option<String> {
        vmi.claims.iter().find(|c| matches!(self.claims.get(*c), Some(None))).cloned()
    }

    /// Session by which the START was sent.
    pub(super) fn start_session(&self) -> Option<u64> {
        self.start_entry().map(|(session, _)| *session)
    }

    /// Starts, shuts down or kills the domain.
    pub(super) fn plan_instructions(&mut self, out: &mut Vec<Command>) {
        let Some(vmi) = self.vmi.shared() else { return };
        let Some(session) = self.node_fact().and_then(|n| n.session) else { return };
        let Some(pod) = vmi.active_pod() else { return };
        let state = self.domain().map(|d| d.state);
        let kind = match vmi.phase {
            Phase::Scheduled | Phase::Running if vmi.meta.deleting.is_some() => match state {
                Some(DomainState::Stopped | DomainState::Absent) => return,
                None
                | Some(
                    DomainState::Deaf
                    | DomainState::Starting
                    | DomainState::Running
                    | DomainState::Paused
                    | DomainState::ShuttingDown,
                ) if vmi.grace == Millis(0) => InstructKind::Kill,
                None
                | Some(
                    DomainState::Deaf
                    | DomainState::Starting
                    | DomainState::Running
                    | DomainState::Paused
                    | DomainState::ShuttingDown,
                ) => InstructKind::Shutdown,
            },
            Phase::Scheduled => match state {
                // Whoever removed the pod object has declared it stopped: nothing may begin in it.
                None | Some(DomainState::Absent) if self.current_pod().is_none_or(|p| p.meta.deleting.is_some()) => {
                    return;
                }
                // A write that says that it is over may be on its way: it would be true no more.
                None | Some(DomainState::Absent) if self.verdict(&vmi).is_some() => return,
                None | Some(DomainState::Absent) => InstructKind::Start,
                Some(
                    DomainState::Deaf
                    | DomainState::Starting
                    | DomainState::Running
                    | DomainState::Paused
                    | DomainState::ShuttingDown
                    | DomainState::Stopped,
                ) => return,
            },
            Phase::Unset
            | Phase::Pending
            | Phase::Scheduling
            | Phase::Running
            | Phase::Succeeded
            | Phase::Failed
            | Phase::Unknown => return,
        };
        let uid = vmi.vmi_uid();
        let id = match kind {
            InstructKind::Start => start_id(&uid, &pod),
            // A shorter grace is another level.
            InstructKind::Shutdown => instruction_id(&uid, &pod, kind.name(), &vmi.grace.0.to_string()),
            InstructKind::Kill | InstructKind::Pause | InstructKind::Resume => {
                instruction_id(&uid, &pod, kind.name(), "")
            }
        };
        match self.told.get(&id) {
            Some((s, _)) if *s != session => {}
            None => {}
            Some((_, Told::Refused(RefusalReason::Superseded | RefusalReason::OlderVmi, _, at) | Told::Lost(at))) => {
                let again = at.after(REPEAT_AFTER);
                if self.now < again {
                    return self.want_wake(again);
                }
                // The answer to the live read is what wakes it.
                if self.vmi.is_doubted() {
                    return;
                }
            }
            Some((_, Told::Sent | Told::Taken | Told::Refused(..))) => return,
        }
        let Some(node) = self.node_name() else { return };
        self.told.insert(id.clone(), (session, Told::Sent));
        let instruction = Instruction { id: id.clone(), kind, vmi: uid, pod, vmi_rv: vmi.meta.rv, deadline: vmi.grace };
        let id = self.issue(At::Agent, What::Instruct(id));
        out.push(Command::Instruct { id, node, order: Order::Do(instruction) });
    }

    /// Acknowledges outcomes that are recorded, or whose VMI is gone.
    pub(super) fn plan_acknowledgements(&mut self, out: &mut Vec<Command>) {
        if self.outcomes.is_empty() {
            return;
        }
        let current = self.vmi.get().map(|v| (v.vmi_uid(), v.phase.is_final()));
        let authorised = self.vmi.get().and_then(VmiView::active_pod);
        let due: Vec<_> = self
            .outcomes
            .iter()
            .filter(|(pod, (_, o))| !self.acked.contains(&((*pod).clone(), o.seq)))
            .filter(|(pod, (_, o))| match &current {
                // Of a pod that was never authorised, while another one is: it decides nothing.
                Some((uid, is_final)) if *uid == o.vmi => *is_final || authorised.as_ref().is_some_and(|a| a != *pod),
                // Another VMI stands under the name, so that one is gone; or it is known to be gone.
                Some(_) => true,
                None => self.vmi.is_absent(),
            })
            .map(|(pod, (node, o))| (node.clone(), pod.clone(), o.seq))
            .collect();
        if current.is_none() && !self.vmi.is_absent() && self.vmi.is_free(self.now) {
            self.confirm(At::Vmi, out);
        }
        for (node, pod, seq) in due {
            if self.node.get(&node).is_some_and(|n| n.session.is_none()) {
                continue;
            }
            self.acked.insert((pod.clone(), seq));
            let id = self.issue(At::Agent, What::Acknowledge(pod.clone(), seq));
            out.push(Command::Instruct { id, node, order: Order::Acknowledge { pod, seq } });
        }
    }
}
