//! What follows from what an Agent cell knows.

use super::{
    cell::{Agent, DEAF_AFTER, Link, Network, Pending, Pod},
    event::Command,
};
use crate::{
    Epoch, Millis, ResourceVersion,
    domain::{AckResult, DomainState, InstructKind, Instruction, RefusalReason},
    instruction_id,
};

/// A pod that a controller names is known to the node by then, unless it is not there.
pub const POD_PATIENCE: Millis = Millis::secs(10);
/// From the pod's start until its launcher answers, on a busy machine.
pub const LAUNCHER_PATIENCE: Millis = Millis::secs(60);
/// An outcome whose pod is gone and that nobody acknowledged for so long will never be.
pub const OUTCOME_AGE: Millis = Millis::secs(7 * 24 * 3600);

/// What is to be done about an instruction now.
enum Next {
    /// It waits for something, at most until.
    Wait(Option<crate::Timestamp>),
    /// The network comes first.
    Prepare,
    /// Send it.
    Send,
    /// Answer it.
    Answer(AckResult),
}

impl Agent {
    pub(super) fn plan(&mut self, out: &mut Vec<Command>) {
        self.plan_outcome(out);
        self.plan_pending(out);
        self.plan_stop(out);
        self.plan_stray(out);
        self.plan_report(out);
        self.plan_unpaused(out);
        self.plan_end(out);
    }

    /// On disk first, then told, then kept until it is acknowledged.
    fn plan_outcome(&mut self, out: &mut Vec<Command>) {
        let tell = self.session.is_some();
        let Some(k) = &mut self.outcome else { return };
        if !k.stored {
            k.stored = true;
            out.push(Command::KeepOutcome(k.outcome.clone()));
        }
        if tell && !k.told {
            k.told = true;
            out.push(Command::TellOutcome(k.outcome.clone()));
        } else if !tell {
            k.told = false;
        }
    }

    fn refused(&self, reason: RefusalReason, message: impl Into<String>) -> Next {
        let rv_seen = self.vmi_rv().unwrap_or_default();
        Next::Answer(AckResult::Refused { reason, message: message.into(), rv_seen })
    }

    fn plan_pending(&mut self, out: &mut Vec<Command>) {
        let mut rest = Vec::new();
        for mut p in std::mem::take(&mut self.pending) {
            if p.in_flight {
                rest.push(p);
                continue;
            }
            let next = match p.instruction.kind {
                InstructKind::Start => self.next_of_start(&p),
                InstructKind::Shutdown | InstructKind::Kill => self.next_of_stop(&p),
                InstructKind::Pause | InstructKind::Resume => self.next_of_pause(&p),
            };
            match next {
                Next::Answer(result) => {
                    if p.instruction.kind == InstructKind::Start && is_for_good(&result) {
                        self.refused = Some((p.instruction.id.clone(), result.clone()));
                    }
                    out.push(Command::Answer { session: p.session, id: p.instruction.id, result });
                    continue;
                }
                Next::Wait(until) => {
                    if let Some(at) = until {
                        self.want_wake(at);
                    }
                }
                Next::Prepare => {
                    self.network = Network::Preparing;
                    out.push(Command::PrepareNetwork);
                }
                Next::Send if self.now < self.retry_at => self.want_wake(self.retry_at),
                Next::Send => {
                    p.in_flight = true;
                    p.sent = true;
                    out.push(self.execute(p.instruction.clone(), p.epoch));
                }
            }
            rest.push(p);
        }
        self.pending = rest;
    }

    /// What the node accepted outweighs what a launcher remembers: the Lease may have decided for a lower epoch.
    fn execute(&self, instruction: Instruction, epoch: Epoch) -> Command {
        let heard = match &self.link {
            Link::Up { epoch, .. } => *epoch,
            Link::Down { .. } => Epoch::default(),
        };
        let vmi_rv = self.vmi_rv().unwrap_or_default();
        Command::Execute { epoch: epoch.max(heard), instruction, vmi_rv }
    }

    fn next_of_start(&self, p: &Pending) -> Next {
        if p.sent {
            // It may have started: only the launcher can answer.
            return match (&self.link, self.pod) {
                (Link::Up { .. }, _) => Next::Send,
                (Link::Down { .. }, Pod::Running | Pod::Unseen) => Next::Wait(None),
                (Link::Down { .. }, Pod::Idle | Pod::Gone) => {
                    Next::Answer(AckResult::Done { detail: "the launcher has ended".into() })
                }
            };
        }
        if let Some((_, answer)) = self.refused.as_ref().filter(|(id, _)| *id == p.instruction.id) {
            return Next::Answer(answer.clone());
        }
        let Some(vmi) = &self.vmi else {
            return self.refused(RefusalReason::Unsupported, "the instruction carries no VMI that can be read");
        };
        if vmi.uid != p.instruction.vmi {
            return self.refused(RefusalReason::Superseded, format!("the VMI that came with it has UID {}", vmi.uid));
        }
        if vmi.rv < p.instruction.vmi_rv {
            let message = format!("the VMI is known at {}, {} is asked for", vmi.rv, p.instruction.vmi_rv);
            return self.refused(RefusalReason::OlderVmi, message);
        }
        if let Err(why) = vmi.authorises(&self.uid, &self.node) {
            return self.refused(RefusalReason::Superseded, why);
        }
        let (pod_by, launcher_by) = (p.since.after(POD_PATIENCE), p.since.after(LAUNCHER_PATIENCE));
        match self.pod {
            Pod::Gone => return self.refused(RefusalReason::Failed, format!("pod {} is gone", self.uid)),
            Pod::Unseen | Pod::Idle if self.now < pod_by => return Next::Wait(Some(pod_by)),
            Pod::Unseen => {
                let message = format!("pod {} is not on node {}", self.uid, self.node);
                return self.refused(RefusalReason::Failed, message);
            }
            Pod::Idle => {
                return self.refused(RefusalReason::Failed, format!("the launcher of pod {} does not run", self.uid));
            }
            Pod::Running => {}
        }
        if !matches!(self.link, Link::Up { .. }) || self.domain.is_none() {
            if self.now < launcher_by {
                return Next::Wait(Some(launcher_by));
            }
            let message = format!("the launcher of pod {} does not answer", self.uid);
            return self.refused(RefusalReason::Failed, message);
        }
        if self.domain.as_ref().is_some_and(|d| d.state != DomainState::Absent) {
            // Its latch knows what to say.
            return Next::Send;
        }
        match &self.network {
            Network::Unprepared => Next::Prepare,
            Network::Preparing => Next::Wait(None),
            Network::Ready => Next::Send,
            Network::Failed(reason, message) => self.refused(*reason, message.clone()),
        }
    }

    fn next_of_stop(&self, p: &Pending) -> Next {
        match (self.pod, &self.link) {
            (_, Link::Up { .. }) => Next::Send,
            (Pod::Gone | Pod::Idle, Link::Down { .. }) => {
                Next::Answer(AckResult::Done { detail: "nothing runs".into() })
            }
            (Pod::Running, Link::Down { .. }) if self.is_over() => {
                Next::Answer(AckResult::Done { detail: "the domain is over".into() })
            }
            // Deaf: it is told as soon as it listens.
            (Pod::Running, Link::Down { .. }) => Next::Wait(None),
            (Pod::Unseen, Link::Down { .. }) => {
                let by = p.since.after(POD_PATIENCE);
                if self.now < by {
                    return Next::Wait(Some(by));
                }
                self.refused(RefusalReason::Failed, format!("pod {} is not on node {}", self.uid, self.node))
            }
        }
    }

    fn next_of_pause(&self, p: &Pending) -> Next {
        let by = p.since.after(DEAF_AFTER);
        match &self.link {
            Link::Up { .. } => Next::Send,
            Link::Down { .. } if !p.sent && (self.now >= by || self.pod == Pod::Gone || self.is_over()) => {
                self.refused(RefusalReason::Failed, "the launcher does not answer")
            }
            Link::Down { .. } => Next::Wait(Some(by)),
        }
    }

    /// A VMI that is seen being deleted is shut down within its grace, with or without a controller.
    fn plan_stop(&mut self, out: &mut Vec<Command>) {
        let Some(vmi) = self.vmi.clone().filter(|v| v.deleting && self.owner.as_ref() == Some(&v.uid)) else { return };
        let kind = if vmi.grace == Millis(0) { InstructKind::Kill } else { InstructKind::Shutdown };
        // The same ids as the controller's, so that both together are one.
        let level = match kind {
            InstructKind::Shutdown => vmi.grace.0.to_string(),
            InstructKind::Start | InstructKind::Kill | InstructKind::Pause | InstructKind::Resume => String::new(),
        };
        self.stop(kind, &level, vmi.grace, vmi.rv, out);
    }

    /// A domain whose VMI may have disowned it: ask, and only then destroy.
    fn plan_stray(&mut self, out: &mut Vec<Command>) {
        if self.alive().is_none() {
            return;
        }
        let disowned = self.vmi.as_ref().is_some_and(|v| v.disowns(&self.uid));
        let newest = self.vmi_rv().unwrap_or_default();
        match self.live {
            Some((rv, true)) if rv >= newest => {
                self.stop(InstructKind::Kill, "", Millis(0), rv, out);
                return;
            }
            Some((rv, false)) if rv >= newest && !self.doubt => return,
            Some(_) | None => {}
        }
        if (disowned || self.doubt) && !self.asking {
            if self.now < self.ask_not_before {
                return self.want_wake(self.ask_not_before);
            }
            self.asking = true;
            out.push(Command::Confirm);
        }
    }

    fn stop(
        &mut self,
        kind: InstructKind,
        level: &str,
        deadline: Millis,
        vmi_rv: ResourceVersion,
        out: &mut Vec<Command>,
    ) {
        if self.alive().is_none() || !matches!(self.link, Link::Up { .. }) {
            return;
        }
        if self.now < self.retry_at {
            return self.want_wake(self.retry_at);
        }
        let Some(vmi) = self.owner.clone() else { return };
        let id = instruction_id(&vmi, &self.uid, kind.name(), level);
        if !self.own.insert(id.clone()) || self.pending.iter().any(|p| p.instruction.id == id && p.sent) {
            return;
        }
        let instruction = Instruction { id, kind, vmi, pod: self.uid.clone(), vmi_rv, deadline };
        out.push(self.execute(instruction, self.epoch));
    }

    fn plan_report(&mut self, out: &mut Vec<Command>) {
        let view = self.view();
        if let (Pod::Running, Link::Down { since }) = (self.pod, &self.link)
            && !self.is_over()
        {
            self.want_wake(since.after(DEAF_AFTER));
        }
        if self.session.is_none() || self.told == view {
            return;
        }
        if let Some(d) = view {
            self.told = Some(d.clone());
            out.push(Command::Report(d));
        }
    }

    /// True as soon as the VMI grants the pod its machine, False while that is paused.
    fn plan_unpaused(&mut self, out: &mut Vec<Command>) {
        let wanted = match self.view().map(|d| d.state) {
            Some(DomainState::Paused) => false,
            Some(DomainState::Starting | DomainState::Running | DomainState::ShuttingDown) => true,
            Some(DomainState::Absent) | None if self.pod == Pod::Running => {
                match self.vmi.as_ref().map(|v| v.authorises(&self.uid, &self.node)) {
                    Some(Ok(())) => true,
                    Some(Err(_)) | None => return,
                }
            }
            Some(DomainState::Absent | DomainState::Deaf | DomainState::Stopped) | None => return,
        };
        let u = &mut self.unpaused;
        if u.written == Some(wanted) || u.in_flight.is_some() {
            return;
        }
        if self.now < u.not_before {
            let at = u.not_before;
            return self.want_wake(at);
        }
        u.in_flight = Some(wanted);
        out.push(Command::WriteUnpaused(wanted));
    }

    fn plan_end(&mut self, out: &mut Vec<Command>) {
        let here = match self.pod {
            Pod::Running | Pod::Idle => true,
            Pod::Unseen | Pod::Gone => false,
        };
        if here || !self.pending.is_empty() {
            return;
        }
        if let Some(k) = &self.outcome {
            let until = k.since.after(OUTCOME_AGE);
            if self.now < until {
                return self.want_wake(until);
            }
            self.outcome = None;
            out.push(Command::DropOutcome);
        }
        out.push(Command::Forget);
    }
}

/// The controller calls a start failed that was refused like this.
fn is_for_good(answer: &AckResult) -> bool {
    match answer {
        AckResult::Refused { reason, .. } => match reason {
            RefusalReason::Failed | RefusalReason::Unsupported => true,
            RefusalReason::LowerEpoch
            | RefusalReason::OlderVmi
            | RefusalReason::Superseded
            | RefusalReason::AlreadyStarted => false,
        },
        AckResult::Accepted | AckResult::Done { .. } => false,
    }
}
