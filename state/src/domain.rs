//! What a node says about a hypervisor domain: the vocabulary between launcher, node agent and controller.
//! The wire form is `proto/agent.proto`; these are the same facts inside the machines and the journal.

use crate::{InstructionId, LauncherInstance, Millis, PodUid, ResourceVersion, Timestamp, VmiUid};
use serde::{Deserialize, Serialize};

/// State of a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum DomainState {
    /// The pod was enumerated and has no hypervisor process.
    Absent,
    /// A process is there and does not answer.
    Deaf,
    /// The hypervisor starts.
    Starting,
    /// vCPUs run.
    Running,
    /// vCPUs are stopped.
    Paused,
    /// The power button was pressed.
    ShuttingDown,
    /// Ended; an [`Outcome`] says how.
    Stopped,
}

/// How a domain ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Cause {
    /// The guest powered itself off (also as an answer to the power button).
    GuestShutdown,
    /// The hypervisor died.
    Crashed,
    /// The guest's kernel panicked.
    Panicked,
    /// The guest did not answer the power button in time.
    KilledAfterGrace,
    /// Killed on request.
    Destroyed,
    /// It never ran.
    StartFailed,
    /// Nobody knows any more.
    OutcomeUnknown,
}

impl Cause {
    /// The name that stands in `VMI.status.reason`, in the journal and in the termination message.
    pub fn name(self) -> &'static str {
        match self {
            Self::GuestShutdown => "GuestShutdown",
            Self::Crashed => "Crashed",
            Self::Panicked => "Panicked",
            Self::KilledAfterGrace => "KilledAfterGrace",
            Self::Destroyed => "Destroyed",
            Self::StartFailed => "StartFailed",
            Self::OutcomeUnknown => "OutcomeUnknown",
        }
    }

    /// Whether the VMI ends as Succeeded. A domain that was killed counts as a failure where a shutdown in order was promised:
    /// with a grace period, to a guest that can hear the power button.
    pub fn succeeded(self, promised: bool) -> bool {
        match self {
            Self::GuestShutdown => true,
            Self::Destroyed | Self::KilledAfterGrace => !promised,
            Self::Crashed | Self::Panicked | Self::StartFailed | Self::OutcomeUnknown => false,
        }
    }
}

/// Levels about the guest that end in status. Statistics never come this way.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestFacts {
    /// The guest agent answers.
    pub agent_connected: bool,
    /// Version of the guest agent.
    pub agent_version: String,
    /// Operating system.
    pub os: OsInfo,
    /// Host name inside.
    pub hostname: String,
    /// Interfaces.
    pub interfaces: Vec<InterfaceFacts>,
    /// Machine type that the hypervisor chose.
    pub machine_type: String,
    /// `thawed`, `frozen`, or empty.
    pub fs_freeze_status: String,
    /// Commands that are used here and that the guest's agent does not have.
    pub agent_lacks: Vec<String>,
    /// When the agent answered for the first time in the life of the domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_first: Option<Timestamp>,
}

/// Operating system of the guest, as `guest-get-osinfo` tells.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct OsInfo {
    /// Name.
    pub name: String,
    /// Kernel release.
    pub kernel_release: String,
    /// Version.
    pub version: String,
    /// Pretty name.
    pub pretty_name: String,
    /// Version id.
    pub version_id: String,
    /// Kernel version.
    pub kernel_version: String,
    /// Machine.
    pub machine: String,
    /// Id.
    pub id: String,
}

/// One network interface.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InterfaceFacts {
    /// Name in `spec.networks`; empty where only the guest knows it.
    pub name: String,
    /// MAC address.
    pub mac: String,
    /// Address by which others reach it.
    pub ip: String,
    /// All addresses.
    pub ips: Vec<String>,
    /// Name inside the guest.
    pub interface_name: String,
    /// `domain`, `guest-agent`, or both.
    pub info_source: String,
    /// Queues.
    pub queue_count: u32,
    /// Name in the pod.
    pub pod_interface_name: String,
    /// `up` or `down`.
    pub link_state: String,
}

/// A domain as its launcher (or, for `Absent` and `Deaf`, the agent) sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Domain {
    /// VMI.
    pub vmi: VmiUid,
    /// Launcher pod.
    pub pod: PodUid,
    /// Launcher process.
    pub launcher: LauncherInstance,
    /// The launcher's own sequence: of one launcher, an older one is ignored.
    pub seq: u64,
    /// State.
    pub state: DomainState,
    /// Since when, by the node's clock.
    pub since: Timestamp,
    /// The guest.
    pub guest: GuestFacts,
    /// `PausedByUser`, `PausedIOError`, or empty.
    pub paused_reason: String,
    /// `kvm` or `tcg`.
    pub accelerator: String,
}

impl Domain {
    /// There is a process that is not known to have ended.
    pub fn has_process(&self) -> bool {
        match self.state {
            DomainState::Deaf
            | DomainState::Starting
            | DomainState::Running
            | DomainState::Paused
            | DomainState::ShuttingDown => true,
            DomainState::Absent | DomainState::Stopped => false,
        }
    }

    /// A launcher has spoken for it, not the agent alone.
    pub fn is_of_a_launcher(&self) -> bool {
        !self.launcher.as_str().is_empty()
    }
}

/// How a domain ended, kept until a controller has acknowledged it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// VMI.
    pub vmi: VmiUid,
    /// Launcher pod.
    pub pod: PodUid,
    /// How.
    pub cause: Cause,
    /// Exit code of the hypervisor.
    pub exit: i32,
    /// The launcher's sequence.
    pub seq: u64,
    /// For people.
    pub message: String,
    /// When, by the node's clock.
    pub at: Timestamp,
}

/// What an instruction asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum InstructKind {
    /// Start the domain.
    Start,
    /// Power button, then kill at the deadline.
    Shutdown,
    /// Kill at once.
    Kill,
    /// Stop the vCPUs.
    Pause,
    /// Let the vCPUs run.
    Resume,
}

impl InstructKind {
    /// The word in ids and in the journal.
    pub fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Shutdown => "shutdown",
            Self::Kill => "kill",
            Self::Pause => "pause",
            Self::Resume => "resume",
        }
    }
}

/// An instruction of a controller to a node agent. The driver adds the epoch and the VMI's bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instruction {
    /// Derived from what is asked.
    pub id: InstructionId,
    /// What.
    pub kind: InstructKind,
    /// VMI.
    pub vmi: VmiUid,
    /// Launcher pod.
    pub pod: PodUid,
    /// The VMI's resourceVersion that authorises it: do not act on anything older.
    pub vmi_rv: ResourceVersion,
    /// Grace of a shutdown, counted from receipt.
    pub deadline: Millis,
}

/// Why an instruction was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum RefusalReason {
    /// The VMI is deleting, final or names another pod.
    Superseded,
    /// Another leader has been here.
    LowerEpoch,
    /// The agent knows a newer VMI than the instruction names, and cannot tell more.
    OlderVmi,
    /// The launcher's latch is used up.
    AlreadyStarted,
    /// It was tried and did not work.
    Failed,
    /// This node cannot do that.
    Unsupported,
}

impl RefusalReason {
    /// The word on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Superseded => "superseded",
            Self::LowerEpoch => "lower-epoch",
            Self::OlderVmi => "older-vmi",
            Self::AlreadyStarted => "already-started",
            Self::Failed => "failed",
            Self::Unsupported => "unsupported",
        }
    }

    /// Reads the word on the wire; an unknown word is [`Self::Failed`], the one that promises nothing.
    pub fn parse(word: &str) -> Self {
        [Self::Superseded, Self::LowerEpoch, Self::OlderVmi, Self::AlreadyStarted, Self::Failed, Self::Unsupported]
            .into_iter()
            .find(|r| r.name() == word)
            .unwrap_or(Self::Failed)
    }
}

/// The answer to an [`Instruction`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum AckResult {
    /// Taken on; a report will tell the rest.
    Accepted,
    /// Done, now or earlier.
    Done {
        /// In words.
        detail: String,
    },
    /// Not done.
    Refused {
        /// Class.
        reason: RefusalReason,
        /// For people.
        message: String,
        /// The VMI's resourceVersion that the agent knows.
        rv_seen: ResourceVersion,
    },
}
