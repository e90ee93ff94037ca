//! What an Agent cell knows, and how it learns.

use super::{
    event::{Command, Confirmed, Input},
    vmi::VmiFacts,
};
use crate::{
    Epoch, Event, InstructionId, LauncherInstance, Machine, Millis, NodeName, PodUid, ResourceVersion, Timestamp,
    VmiUid,
    domain::{AckResult, Domain, DomainState, GuestFacts, InstructKind, Instruction, Outcome, RefusalReason},
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// A launcher that is silent for this long is deaf. Longer than its start and any restart of the agent take.
pub const DEAF_AFTER: Millis = Millis::secs(10);
/// Pause after an instruction that the launcher did not answer.
const RETRY_AFTER: Millis = Millis::secs(1);
/// Instructions that wait at the same time; an honest controller has two.
const PENDING_MAX: usize = 16;

/// The pod, as the node's runtime knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Pod {
    /// Not seen yet.
    Unseen,
    /// The launcher's container runs.
    Running,
    /// It has ended, or has not begun.
    Idle,
    /// Removed.
    Gone,
}

/// The way to the launcher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Link {
    /// It answers.
    Up { launcher: LauncherInstance, epoch: Epoch },
    /// It does not, since then.
    Down { since: Timestamp },
}

/// The pod's network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Network {
    Unprepared,
    Preparing,
    Ready,
    Failed(RefusalReason, String),
}

/// An instruction that is not answered yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Pending {
    pub session: u64,
    pub epoch: Epoch,
    pub instruction: Instruction,
    pub since: Timestamp,
    /// It is on its way to the launcher.
    pub in_flight: bool,
    /// It may have reached the launcher: it is sent again rather than refused.
    pub sent: bool,
}

/// The outcome, until it is acknowledged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Kept {
    pub outcome: Outcome,
    pub stored: bool,
    /// Told in the session that stands.
    pub told: bool,
    pub since: Timestamp,
}

/// The pod's condition.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Unpaused {
    pub written: Option<bool>,
    pub in_flight: Option<bool>,
    pub fails: u32,
    pub not_before: Timestamp,
}

/// One launcher pod on one node.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Agent {
    pub(super) node: NodeName,
    pub(super) uid: PodUid,
    pub(super) now: Timestamp,
    pub(super) pod: Pod,
    /// VMI that the pod was made for.
    pub(super) owner: Option<VmiUid>,
    pub(super) link: Link,
    /// The launcher's newest word.
    pub(super) domain: Option<Domain>,
    /// What the controller of this session was told last.
    pub(super) told: Option<Domain>,
    /// The newest VMI seen anywhere.
    pub(super) vmi: Option<VmiFacts>,
    /// Version of the VMI that was last read live, and whether it disowned this pod.
    pub(super) live: Option<(ResourceVersion, bool)>,
    /// Something says that this domain may be a stray: ask.
    pub(super) doubt: bool,
    pub(super) asking: bool,
    pub(super) ask_fails: u32,
    pub(super) ask_not_before: Timestamp,
    pub(super) session: Option<(u64, Epoch)>,
    /// Highest epoch that this node accepted.
    pub(super) epoch: Epoch,
    pub(super) pending: Vec<Pending>,
    /// An answer of the launcher was lost: nothing is sent again before.
    pub(super) retry_at: Timestamp,
    /// Stops of our own that were sent and are not known to be lost.
    pub(super) own: BTreeSet<InstructionId>,
    pub(super) outcome: Option<Kept>,
    /// Outcomes up to this one are recorded.
    pub(super) acked_seq: Option<u64>,
    pub(super) network: Network,
    /// The start that was refused for good. Who asked may hear of it late, when it has asked again: that gets the same answer.
    #[serde(default)]
    pub(super) refused: Option<(InstructionId, AckResult)>,
    pub(super) unpaused: Unpaused,
    wake: Option<Timestamp>,
    next_wake: Option<Timestamp>,
}

impl Agent {
    /// A cell of `pod` on `node` that knows nothing yet.
    pub fn new(node: NodeName, pod: PodUid) -> Self {
        Self {
            node,
            uid: pod,
            now: Timestamp::default(),
            pod: Pod::Unseen,
            owner: None,
            link: Link::Down { since: Timestamp::default() },
            domain: None,
            told: None,
            vmi: None,
            live: None,
            doubt: false,
            asking: false,
            ask_fails: 0,
            ask_not_before: Timestamp::default(),
            session: None,
            epoch: Epoch::default(),
            pending: Vec::new(),
            retry_at: Timestamp::default(),
            own: BTreeSet::new(),
            outcome: None,
            acked_seq: None,
            network: Network::Unprepared,
            refused: None,
            unpaused: Unpaused::default(),
            wake: None,
            next_wake: None,
        }
    }

    /// The domain as a controller should see it; `None` where the pod is not here, or it is too early to say. A launcher that
    /// has just stopped answering is what it was, for a while.
    pub fn view(&self) -> Option<Domain> {
        match self.pod {
            Pod::Unseen | Pod::Gone => None,
            // Who answers, lives, whatever the runtime says.
            Pod::Idle | Pod::Running if matches!(self.link, Link::Up { .. }) || self.is_over() => self.domain.clone(),
            Pod::Idle => Some(self.seen_as(DomainState::Absent)),
            Pod::Running => match self.link {
                Link::Up { .. } => self.domain.clone(),
                Link::Down { since } if self.now >= since.after(DEAF_AFTER) => Some(self.seen_as(DomainState::Deaf)),
                Link::Down { .. } => self.domain.clone(),
            },
        }
    }

    /// Whether this cell's part of an inventory is not evidence yet.
    pub fn is_unsettled(&self) -> bool {
        matches!(self.pod, Pod::Running | Pod::Idle) && self.view().is_none()
    }

    /// Number of the session that stands.
    pub fn session(&self) -> Option<u64> {
        self.session.map(|(n, _)| n)
    }

    /// The outcome that waits to be acknowledged.
    pub fn outcome(&self) -> Option<&Outcome> {
        self.outcome.as_ref().map(|k| &k.outcome)
    }

    /// Version of the VMI that decisions are made on.
    pub fn vmi_rv(&self) -> Option<ResourceVersion> {
        self.vmi.as_ref().map(|v| v.rv)
    }

    /// Why a verb for this VMI and pod cannot be passed on to the launcher: a reason code and words.
    pub fn admit_verb(&self, vmi: &VmiUid) -> Result<(), (&'static str, String)> {
        if self.pod == Pod::Unseen {
            return Err(("not-ready", format!("pod {} has not been seen on node {} yet", self.uid, self.node)));
        }
        if self.pod == Pod::Gone || self.owner.as_ref() != Some(vmi) {
            return Err(("not-found", format!("pod {} of VMI {vmi} is not on node {}", self.uid, self.node)));
        }
        match (&self.link, self.pod) {
            (Link::Up { .. }, _) => Ok(()),
            (Link::Down { .. }, Pod::Running) if !self.is_over() => {
                Err(("not-ready", "the launcher does not answer".into()))
            }
            (Link::Down { .. }, Pod::Running | Pod::Idle | Pod::Unseen | Pod::Gone) => {
                Err(("not-running", "the machine is not running".into()))
            }
        }
    }

    /// The launcher has told the end.
    pub(super) fn is_over(&self) -> bool {
        self.domain.as_ref().is_some_and(|d| d.state == DomainState::Stopped)
    }

    /// State of a domain that has a process, as far as known.
    pub(super) fn alive(&self) -> Option<DomainState> {
        let state = self.view()?.state;
        match state {
            DomainState::Starting
            | DomainState::Running
            | DomainState::Paused
            | DomainState::ShuttingDown
            | DomainState::Deaf => Some(state),
            DomainState::Absent | DomainState::Stopped => None,
        }
    }

    /// A level that the node saw, in the launcher's place: same process and sequence, other state.
    fn seen_as(&self, state: DomainState) -> Domain {
        let since = match self.link {
            Link::Down { since } => since,
            Link::Up { .. } => self.now,
        };
        match &self.domain {
            Some(d) => Domain { state, since: if d.state == state { d.since } else { since }, ..d.clone() },
            None => Domain {
                vmi: self.owner.clone().unwrap_or_default(),
                pod: self.uid.clone(),
                launcher: LauncherInstance::default(),
                seq: 0,
                state,
                since,
                guest: GuestFacts::default(),
                paused_reason: String::new(),
                accelerator: String::new(),
            },
        }
    }

    pub(super) fn want_wake(&mut self, at: Timestamp) {
        if at > self.now && self.next_wake.is_none_or(|w| at < w) {
            self.next_wake = Some(at);
        }
    }

    fn fold(&mut self, input: &Input, out: &mut Vec<Command>) {
        match input {
            Input::PodObserved { vmi, running } => {
                self.owner.get_or_insert_with(|| vmi.clone());
                let before = self.pod;
                self.pod = if *running { Pod::Running } else { Pod::Idle };
                if before != self.pod && matches!(self.link, Link::Down { .. }) {
                    self.link = Link::Down { since: self.now };
                }
            }
            Input::PodGone => {
                self.pod = Pod::Gone;
                self.lost();
            }
            Input::LauncherConnected { launcher, epoch } => {
                self.link = Link::Up { launcher: launcher.clone(), epoch: *epoch };
                self.epoch = self.epoch.max(*epoch);
            }
            Input::LauncherLost => self.lost(),
            Input::LauncherReported(d) => self.reported(d),
            Input::LauncherEnded(o) => self.ended(o),
            Input::VmiObserved(v) => self.saw(v),
            Input::VmiVanished => self.doubt = true,
            Input::VmiConfirmed(c) => self.confirmed(c),
            Input::StoreRestored => {
                self.vmi = None;
                self.live = None;
            }
            Input::SessionOpened { session, epoch } => {
                self.pending.clear();
                self.session = Some((*session, *epoch));
                // The Lease may have decided for a lower one; what launchers heard stays a floor for them alone.
                self.epoch = *epoch;
                self.told = self.view();
                if let Some(k) = &mut self.outcome {
                    k.told = true;
                }
            }
            Input::SessionClosed { session } => {
                self.pending.retain(|p| p.session != *session);
                if self.session.is_some_and(|(s, _)| s == *session) {
                    self.session = None;
                    self.told = None;
                }
            }
            Input::Instructed { session, epoch, instruction, vmi } => {
                self.instructed(*session, *epoch, instruction, vmi.as_ref(), out);
            }
            Input::NetworkPrepared(result) => {
                self.network = match result {
                    Ok(()) => Network::Ready,
                    Err((reason, message)) => Network::Failed(*reason, message.clone()),
                };
            }
            Input::LauncherAcked { id, result } => self.acked(id, result.as_ref(), out),
            Input::OutcomeRestored(o) => {
                self.outcome = Some(Kept { outcome: o.clone(), stored: true, told: false, since: self.now });
            }
            Input::OutcomeAcked { seq } => {
                self.acked_seq = self.acked_seq.max(Some(*seq));
                if self.outcome.as_ref().is_some_and(|k| k.outcome.seq <= *seq) {
                    self.outcome = None;
                    out.push(Command::DropOutcome);
                }
            }
            Input::UnpausedWritten { unpaused, done } => {
                self.unpaused.in_flight = None;
                if *done {
                    self.unpaused.written = Some(*unpaused);
                    self.unpaused.fails = 0;
                } else {
                    self.unpaused.not_before = self.now.after(back_off(self.unpaused.fails));
                    self.unpaused.fails = self.unpaused.fails.saturating_add(1);
                }
            }
            Input::UnpausedRestored(unpaused) => self.unpaused.written = Some(*unpaused),
            Input::Elapsed => self.wake = None,
        }
    }

    fn lost(&mut self) {
        if matches!(self.link, Link::Up { .. }) {
            self.link = Link::Down { since: self.now };
        }
    }

    fn is_ours(&self, vmi: &VmiUid, pod: &PodUid) -> bool {
        *pod == self.uid && self.owner.as_ref().is_none_or(|o| o == vmi)
    }

    fn reported(&mut self, d: &Domain) {
        // The word of a launcher about somebody else's machine is no word.
        if !self.is_ours(&d.vmi, &d.pod) {
            return;
        }
        // A launcher starts one domain in its life: after the end it says nothing new.
        let newer = self.domain.as_ref().is_none_or(|k| {
            k.launcher != d.launcher || (d.seq > k.seq && (k.state != DomainState::Stopped || d.state == k.state))
        });
        if newer {
            self.domain = Some(d.clone());
        }
    }

    fn ended(&mut self, o: &Outcome) {
        if !self.is_ours(&o.vmi, &o.pod) || self.acked_seq.is_some_and(|s| o.seq <= s) {
            return;
        }
        if self.outcome.as_ref().is_none_or(|k| o.seq > k.outcome.seq) {
            self.outcome = Some(Kept { outcome: o.clone(), stored: false, told: false, since: self.now });
        }
        if let Some(d) = &mut self.domain {
            d.state = DomainState::Stopped;
            d.seq = d.seq.max(o.seq);
        }
    }

    /// The newest VMI known counts; one with another UID is another machine.
    fn saw(&mut self, v: &VmiFacts) {
        if self.owner.as_ref().is_some_and(|o| *o != v.uid) {
            return;
        }
        if self.vmi.as_ref().is_none_or(|k| v.rv > k.rv) {
            self.vmi = Some(v.clone());
            self.doubt = false;
        }
    }

    fn confirmed(&mut self, c: &Confirmed) {
        self.asking = false;
        match c {
            Confirmed::Found(v) if self.owner.as_ref() == Some(&v.uid) => {
                self.doubt = false;
                self.ask_fails = 0;
                self.live = Some((v.rv, v.disowns(&self.uid)));
                self.saw(v);
            }
            // Garbage collection removes the pod, which ends the domain in order. What was known of a VMI that is no more is
            // not asked for again: nothing else will ever be said of it.
            Confirmed::Found(_) | Confirmed::Gone => {
                self.doubt = false;
                self.ask_fails = 0;
                self.live = Some((self.vmi_rv().unwrap_or_default(), false));
            }
            Confirmed::Unanswered => {
                self.ask_not_before = self.now.after(back_off(self.ask_fails));
                self.ask_fails = self.ask_fails.saturating_add(1);
            }
        }
    }

    fn instructed(
        &mut self,
        session: u64,
        epoch: Epoch,
        instruction: &Instruction,
        vmi: Option<&VmiFacts>,
        out: &mut Vec<Command>,
    ) {
        let refuse = |reason, message: String, rv_seen| Command::Answer {
            session,
            id: instruction.id.clone(),
            result: AckResult::Refused { reason, message, rv_seen },
        };
        let rv = self.vmi_rv().unwrap_or_default();
        if self.session != Some((session, epoch)) {
            let known = self.session.map_or(self.epoch, |(_, e)| e);
            out.push(refuse(RefusalReason::LowerEpoch, format!("epoch {epoch} came, epoch {known} leads"), rv));
            return;
        }
        if !self.is_ours(&instruction.vmi, &instruction.pod) {
            let message = format!("pod {} is not one of VMI {}", instruction.pod, instruction.vmi);
            out.push(refuse(RefusalReason::Superseded, message, rv));
            return;
        }
        if let Some(v) = vmi
            && v.uid == instruction.vmi
        {
            self.saw(v);
        }
        match instruction.kind {
            InstructKind::Shutdown | InstructKind::Kill => {
                // What has not begun will not begin.
                let (void, rest) = std::mem::take(&mut self.pending)
                    .into_iter()
                    .partition(|p| p.instruction.kind == InstructKind::Start && !p.sent);
                self.pending = rest;
                let void: Vec<Pending> = void;
                out.extend(void.into_iter().map(|p| Command::Answer {
                    session: p.session,
                    id: p.instruction.id,
                    result: AckResult::Refused {
                        reason: RefusalReason::Superseded,
                        message: "it was told to stop".into(),
                        rv_seen: self.vmi_rv().unwrap_or_default(),
                    },
                }));
            }
            InstructKind::Start | InstructKind::Pause | InstructKind::Resume => {}
        }
        if let Some(p) = self.pending.iter_mut().find(|p| p.instruction.id == instruction.id) {
            p.instruction = instruction.clone();
            return;
        }
        if self.pending.len() >= PENDING_MAX {
            out.push(refuse(RefusalReason::Failed, "too many instructions wait".into(), rv));
            return;
        }
        self.pending.push(Pending {
            session,
            epoch,
            instruction: instruction.clone(),
            since: self.now,
            in_flight: false,
            sent: false,
        });
    }

    fn acked(&mut self, id: &InstructionId, result: Option<&AckResult>, out: &mut Vec<Command>) {
        if result.is_none() {
            // Lost: a stop of our own is due again; an instruction is sent again when the launcher answers.
            self.own.remove(id);
            self.retry_at = self.now.after(RETRY_AFTER);
        }
        let Some(n) = self.pending.iter().position(|p| p.instruction.id == *id && p.in_flight) else { return };
        match result {
            None => {
                if let Some(p) = self.pending.get_mut(n) {
                    p.in_flight = false;
                }
            }
            Some(result) => {
                let p = self.pending.remove(n);
                out.push(Command::Answer { session: p.session, id: p.instruction.id, result: result.clone() });
            }
        }
    }
}

/// Pause after this many failures.
pub(super) fn back_off(fails: u32) -> Millis {
    Millis((500 << fails.min(7)).min(60_000))
}

impl Machine for Agent {
    type Input = Input;
    type Command = Command;

    fn step(&mut self, event: &Event<Input>) -> Vec<Command> {
        self.now = self.now.max(event.at);
        let mut out = Vec::new();
        self.next_wake = None;
        self.fold(&event.input, &mut out);
        self.plan(&mut out);
        if self.next_wake != self.wake
            && let Some(at) = self.next_wake
        {
            out.push(Command::Wake { at });
        }
        self.wake = self.next_wake;
        out
    }
}
