//! What can happen to an Agent cell and what it can ask for.

use super::vmi::VmiFacts;
use crate::{
    Epoch, InstructionId, LauncherInstance, ResourceVersion, Timestamp, VmiUid,
    domain::{AckResult, Domain, Instruction, Outcome, RefusalReason},
};
use serde::{Deserialize, Serialize};

/// Answer of a live read of the VMI.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Confirmed {
    /// It is there (or another one of its name: the UID tells).
    Found(VmiFacts),
    /// There is none of that name.
    Gone,
    /// No answer.
    Unanswered,
}

/// What can happen to an Agent cell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::large_enum_variant, reason = "one at a time, never kept in bulk")]
pub enum Input {
    /// The pod is on this node.
    PodObserved {
        /// VMI that it was made for.
        vmi: VmiUid,
        /// Its launcher's container runs.
        running: bool,
    },
    /// The pod is no longer on this node: nothing of it is left.
    PodGone,
    /// The launcher answers.
    LauncherConnected {
        /// Its process.
        launcher: LauncherInstance,
        /// The highest epoch that it was spoken to with.
        epoch: Epoch,
    },
    /// The launcher does not answer any more, or not yet.
    LauncherLost,
    /// The launcher's level.
    LauncherReported(Domain),
    /// The launcher's domain ended.
    LauncherEnded(Outcome),
    /// The VMI was seen in the watch.
    VmiObserved(VmiFacts),
    /// The VMI is not in the watch (any more), for whatever reason.
    VmiVanished,
    /// A live read of it was answered.
    VmiConfirmed(Confirmed),
    /// The API server's store went back in time: versions known from before compare no more.
    StoreRestored,
    /// A controller's session stands; an inventory with this cell's level goes ahead of everything else.
    SessionOpened {
        /// Number of the session.
        session: u64,
        /// Its epoch.
        epoch: Epoch,
    },
    /// It ended.
    SessionClosed {
        /// Which.
        session: u64,
    },
    /// An instruction came.
    Instructed {
        /// By this session.
        session: u64,
        /// With this epoch.
        epoch: Epoch,
        /// What.
        instruction: Instruction,
        /// The VMI that came with it, where it could be read.
        vmi: Option<VmiFacts>,
    },
    /// The pod's network is ready for a guest, or cannot be made so.
    NetworkPrepared(Result<(), (RefusalReason, String)>),
    /// The launcher answered an instruction, or the answer was lost.
    LauncherAcked {
        /// Which.
        id: InstructionId,
        /// Its answer.
        result: Option<AckResult>,
    },
    /// The outcome is on disk from an earlier life of the agent.
    OutcomeRestored(Outcome),
    /// A controller has recorded the outcome.
    OutcomeAcked {
        /// Sequence of it.
        seq: u64,
    },
    /// The pod's condition was written, or not.
    UnpausedWritten {
        /// As what.
        unpaused: bool,
        /// It was.
        done: bool,
    },
    /// The condition as an earlier life of the agent wrote it.
    UnpausedRestored(bool),
    /// A deadline that the cell asked for has come.
    Elapsed,
}

/// What an Agent cell can ask for. Carried out in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::large_enum_variant, reason = "one at a time, never kept in bulk")]
pub enum Command {
    /// Make the pod's network and hand it to the launcher; answered by [`Input::NetworkPrepared`].
    PrepareNetwork,
    /// Send it to the launcher; answered by [`Input::LauncherAcked`].
    Execute {
        /// Epoch to send it with.
        epoch: Epoch,
        /// What.
        instruction: Instruction,
        /// Version of the VMI that was decided upon, which goes with it.
        vmi_rv: ResourceVersion,
    },
    /// Answer a controller's instruction.
    Answer {
        /// By this session.
        session: u64,
        /// Which instruction.
        id: InstructionId,
        /// How.
        result: AckResult,
    },
    /// Tell the controller a changed level.
    Report(Domain),
    /// Put the outcome on disk.
    KeepOutcome(Outcome),
    /// Tell the controller the outcome.
    TellOutcome(Outcome),
    /// Take the outcome off the disk.
    DropOutcome,
    /// Read the VMI live; answered by [`Input::VmiConfirmed`].
    Confirm,
    /// Write the pod's condition; answered by [`Input::UnpausedWritten`].
    WriteUnpaused(bool),
    /// There is nothing left to know: remove cell and files.
    Forget,
    /// Send [`Input::Elapsed`] at this time. Replaces the earlier one.
    Wake {
        /// When.
        at: Timestamp,
    },
}
