//! How a domain ended: the three copies (termination message, session, exit code) are made from one value.

use std::path::Path;

use proto::agent::{Cause, Outcome};
use serde::{Deserialize, Serialize};

use crate::limits;

/// Exit code of a launcher whose domain ended as somebody wanted: by the guest, at the end of its grace, or destroyed.
pub const EXIT_OK: i32 = 0;
/// Exit code of a launcher that could not do its own work (bind its sockets).
pub const EXIT_BROKEN: i32 = 1;
/// Exit code after [`Cause::StartFailed`].
pub const EXIT_START_FAILED: i32 = 10;
/// Exit code after [`Cause::Crashed`].
pub const EXIT_CRASHED: i32 = 11;
/// Exit code after [`Cause::Panicked`].
pub const EXIT_PANICKED: i32 = 12;

/// The termination message of the `compute` container: an [`Outcome`] as JSON, below Kubernetes' 4096 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TerminationMessage {
    /// UID of the VMI.
    pub vmi_uid: String,
    /// UID of the pod.
    pub pod_uid: String,
    /// GuestShutdown, Crashed, Panicked, KilledAfterGrace, Destroyed, StartFailed, OutcomeUnknown.
    pub cause: String,
    /// Exit code of the hypervisor, 128 + signal, or 0 where there was none.
    pub exit: i32,
    /// The launcher's sequence number: with the pod's UID it identifies the outcome.
    pub seq: u64,
    /// For people.
    pub message: String,
    /// Milliseconds since 1970.
    pub at_unix_ms: u64,
}

/// The word for a cause, as it stands in messages and conditions.
pub fn cause_word(cause: Cause) -> &'static str {
    match cause {
        Cause::GuestShutdown => "GuestShutdown",
        Cause::Crashed => "Crashed",
        Cause::Panicked => "Panicked",
        Cause::KilledAfterGrace => "KilledAfterGrace",
        Cause::Destroyed => "Destroyed",
        Cause::StartFailed => "StartFailed",
        Cause::OutcomeUnknown | Cause::Unspecified => "OutcomeUnknown",
    }
}

/// The launcher's exit code for a cause.
pub fn exit_code(cause: Cause) -> i32 {
    match cause {
        Cause::GuestShutdown | Cause::KilledAfterGrace | Cause::Destroyed => EXIT_OK,
        Cause::StartFailed => EXIT_START_FAILED,
        Cause::Panicked => EXIT_PANICKED,
        Cause::Crashed | Cause::OutcomeUnknown | Cause::Unspecified => EXIT_CRASHED,
    }
}

/// Cuts a message at a character boundary.
pub(crate) fn bounded(message: &str) -> String {
    let mut end = message.len().min(limits::OUTCOME_MESSAGE);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    message.get(..end).unwrap_or_default().trim().to_owned()
}

/// Writes the termination message. The file exists (the kubelet made it) or its folder does.
pub(crate) fn write(path: &Path, outcome: &Outcome) -> std::io::Result<()> {
    let message = TerminationMessage {
        vmi_uid: outcome.vmi_uid.clone(),
        pod_uid: outcome.pod_uid.clone(),
        cause: cause_word(outcome.cause()).into(),
        exit: outcome.exit,
        seq: outcome.seq,
        message: outcome.message.clone(),
        at_unix_ms: outcome.at_unix_ms,
    };
    std::fs::write(path, serde_json::to_vec(&message)?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_termination_message_fits_and_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let outcome = Outcome {
            vmi_uid: "v".repeat(36),
            pod_uid: "p".repeat(36),
            cause: Cause::Crashed as i32,
            exit: 137,
            seq: 7,
            message: bounded(&"ü".repeat(5000)),
            at_unix_ms: 1,
            ..Outcome::default()
        };
        write(&path, &outcome).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert!(bytes.len() < 4096);
        let read: TerminationMessage = serde_json::from_slice(&bytes).unwrap();
        assert_eq!((read.cause.as_str(), read.exit, read.seq), ("Crashed", 137, 7));
    }
}
