//! The one word about a VM that people read: a table of rules, of which the first that holds decides.
//!
//! The words of data volumes, migrations and receivers (`DataVolumeError`, `Provisioning`, `Migrating`,
//! `WaitingForReceiver`) are not in the table, because there is nothing yet that they could be said about.

use super::{
    cell::{At, Vm, What},
    strategy::Wish,
};
use crate::{
    condition,
    observe::{Phase, Strategy, VmStatus, VmView},
};

/// The words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Printable {
    /// The VM is being deleted.
    Terminating,
    /// Its VMI is being deleted.
    Stopping,
    /// Its node cannot be asked, or nobody knows what its VMI's phase means.
    Unknown,
    /// vCPUs are stopped.
    Paused,
    /// It runs.
    Running,
    /// A claim does not exist.
    ErrorPvcNotFound,
    /// No node takes it.
    ErrorUnschedulable,
    /// A claim has no volume.
    WaitingForVolumeBinding,
    /// An image cannot be had.
    ErrImagePull,
    /// The same, and the node waits before it tries again.
    ImagePullBackOff,
    /// It is on its way.
    Starting,
    /// Starts failed.
    CrashLoopBackOff,
    /// It does not run.
    Stopped,
}

impl Printable {
    /// The word in `status.printableStatus`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Terminating => "Terminating",
            Self::Stopping => "Stopping",
            Self::Unknown => "Unknown",
            Self::Paused => "Paused",
            Self::Running => "Running",
            Self::ErrorPvcNotFound => "ErrorPvcNotFound",
            Self::ErrorUnschedulable => "ErrorUnschedulable",
            Self::WaitingForVolumeBinding => "WaitingForVolumeBinding",
            Self::ErrImagePull => "ErrImagePull",
            Self::ImagePullBackOff => "ImagePullBackOff",
            Self::Starting => "Starting",
            Self::CrashLoopBackOff => "CrashLoopBackOff",
            Self::Stopped => "Stopped",
        }
    }
}

/// Why the VMI cannot go on, as its condition Synchronized has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Held {
    /// It can.
    No,
    /// `FailedPvcNotFound`.
    Claim,
    /// `ErrImagePull`.
    Image,
    /// `ImagePullBackOff`.
    ImageBackOff,
}

/// Everything that the word depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Facts {
    /// The VM is being deleted.
    pub deleting: bool,
    /// Phase of its VMI, where there is one.
    pub vmi: Option<Phase>,
    /// The VMI is being deleted, or we have asked for it.
    pub vmi_deleting: bool,
    /// The VMI is being created.
    pub creating: bool,
    pub paused: bool,
    /// The node or the hypervisor does not answer.
    pub unreachable: bool,
    pub held: Held,
    pub unschedulable: bool,
    /// The VM is set to start and has a claim without a volume.
    pub unbound: bool,
    /// Starts have failed, and the strategy counts them.
    pub crash_looping: bool,
}

/// One rule.
struct Rule {
    word: Printable,
    /// In words.
    when: &'static str,
    holds: fn(&Facts) -> bool,
}

/// The rules in KubeVirt's order.
const RULES: [Rule; 14] = [
    Rule { word: Printable::Terminating, when: "the VM is being deleted", holds: |f| f.deleting },
    Rule {
        word: Printable::Stopping,
        when: "the VMI is not final and is being deleted",
        holds: |f| f.vmi_deleting && f.vmi.is_some_and(|p| !p.is_final()),
    },
    Rule {
        word: Printable::Unknown,
        when: "the VMI is Running, and its node or its hypervisor does not answer",
        holds: |f| f.vmi == Some(Phase::Running) && f.unreachable,
    },
    Rule {
        word: Printable::Paused,
        when: "the VMI is Running and has the condition Paused",
        holds: |f| f.vmi == Some(Phase::Running) && f.paused,
    },
    Rule { word: Printable::Running, when: "the VMI is Running", holds: |f| f.vmi == Some(Phase::Running) },
    Rule {
        word: Printable::ErrorPvcNotFound,
        when: "the VMI is not synchronized: FailedPvcNotFound",
        holds: |f| f.held == Held::Claim,
    },
    Rule {
        word: Printable::ErrorUnschedulable,
        when: "the VMI's pod is not scheduled: Unschedulable",
        holds: |f| f.unschedulable,
    },
    Rule {
        word: Printable::WaitingForVolumeBinding,
        when: "the VM is set to start, and one of its claims exists and is not bound",
        holds: |f| f.unbound,
    },
    Rule {
        word: Printable::ErrImagePull,
        when: "the VMI is not synchronized: ErrImagePull",
        holds: |f| f.held == Held::Image,
    },
    Rule {
        word: Printable::ImagePullBackOff,
        when: "the VMI is not synchronized: ImagePullBackOff",
        holds: |f| f.held == Held::ImageBackOff,
    },
    Rule {
        word: Printable::Starting,
        when: "the VMI is being created, or has no phase yet, or is Pending, Scheduling or Scheduled",
        holds: |f| match f.vmi {
            None => f.creating,
            Some(Phase::Unset | Phase::Pending | Phase::Scheduling | Phase::Scheduled) => true,
            Some(Phase::Running | Phase::Succeeded | Phase::Failed | Phase::Unknown) => false,
        },
    },
    Rule {
        word: Printable::CrashLoopBackOff,
        when: "there is no VMI or a final one, and starts have failed under a strategy that counts them",
        holds: |f| f.crash_looping && f.vmi.is_none_or(Phase::is_final),
    },
    Rule {
        word: Printable::Stopped,
        when: "there is no VMI or a final one",
        holds: |f| f.vmi.is_none_or(Phase::is_final),
    },
    Rule { word: Printable::Unknown, when: "nothing of the above", holds: |_| true },
];

/// The rules in order, as word and condition, for documentation.
pub fn rules() -> impl Iterator<Item = (&'static str, &'static str)> {
    RULES.iter().map(|r| (r.word.name(), r.when))
}

impl Facts {
    /// The word: that of the first rule that holds.
    pub(super) fn word(&self) -> Printable {
        RULES.iter().find(|r| (r.holds)(self)).map_or(Printable::Unknown, |r| r.word)
    }
}

impl Vm {
    pub(super) fn printable_facts(&self, vm: &VmView, s: &VmStatus) -> Facts {
        let own = self.own_vmi();
        let said = |kind| own.and_then(|v| condition::find(&v.status.conditions, kind));
        let no = |kind| said(kind).filter(|c| c.status == "False").map_or("", |c| &*c.reason);
        let failures = s.start_failure.as_ref().map_or(0, |f| f.consecutive_fail_count);
        Facts {
            deleting: vm.meta.deleting.is_some(),
            vmi: own.map(|v| v.phase),
            vmi_deleting: own.is_some_and(|v| v.meta.deleting.is_some())
                || self.flights.values().any(|(at, w)| (at, w) == (&At::Vmi, &What::Delete)),
            creating: self.flights.values().any(|(_, w)| *w == What::CreateVmi),
            paused: said("Paused").is_some_and(condition::Cond::is_true),
            unreachable: said("Ready").is_some_and(|c| c.reason == "NodeUnreachable" || c.reason == "NodeUnresponsive"),
            held: match no("Synchronized") {
                "FailedPvcNotFound" => Held::Claim,
                "ErrImagePull" => Held::Image,
                "ImagePullBackOff" => Held::ImageBackOff,
                _ => Held::No,
            },
            unschedulable: no("PodScheduled") == "Unschedulable",
            unbound: self.is_set_to_start(vm)
                && vm.claims.iter().any(|c| self.claims.get(c).is_some_and(|k| k.as_ref().is_some_and(|k| !k.bound))),
            crash_looping: vm.strategy.backs_off() && failures > 0,
        }
    }

    /// The strategy and the requests mean that it shall run.
    fn is_set_to_start(&self, vm: &VmView) -> bool {
        let phase = self.own_vmi().map(|v| v.phase);
        let requests = self.requests(vm);
        let head = requests.first().map_or("", |r| r.action.as_str());
        match vm.strategy {
            Strategy::Always => true,
            Strategy::Halted | Strategy::WaitAsReceiver | Strategy::Invalid => false,
            Strategy::Manual => head == "Start" || (phase.is_some() && head != "Stop"),
            Strategy::RerunOnFailure => match phase {
                Some(p) => p != Phase::Succeeded,
                None => match self.wish(vm) {
                    Wish::Run { .. } | Wish::NotBefore(_) => true,
                    Wish::Stay | Wish::Stop | Wish::Unhalt | Wish::Bad(_) => false,
                },
            },
            Strategy::Once => phase.is_none(),
        }
    }
}
