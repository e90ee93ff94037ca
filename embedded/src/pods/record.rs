//! What the runner remembers of a pod, on disk, so that its own death changes nothing.
//!
//! A container is never started twice: [`Stage::Starting`] is written before the runtime is told to start, and whoever finds it
//! after a restart asks the runtime whether the start happened.

use std::fs::File;
use std::io::Write;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::procs::ProcessId;

/// Exit code of a container whose end nobody saw.
pub(super) const UNKNOWN_EXIT: i32 = 137;

/// Writes a file whole or not at all, and on the disk when this returns.
pub(super) fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let tmp = path.with_extension("tmp");
    let mut file = File::create(&tmp)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&tmp, path)?;
    if let Some(folder) = path.parent() {
        File::open(folder)?.sync_all()?;
    }
    Ok(())
}

/// How far a pod has come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "stage")]
pub(super) enum Stage {
    /// Volumes, images, network, bundle. Nothing has run.
    Preparing,
    /// The container exists; its start is being asked for and may have happened.
    Starting,
    /// The container runs, or ran when the runner last looked.
    Running {
        /// Process 1 of the container.
        process: ProcessId,
        /// Since when.
        started_at: String,
    },
    /// The container ended.
    Exited(Exit),
    /// The pod will never run here.
    Refused {
        /// Reason code of the pod's status.
        reason: String,
        /// For people.
        message: String,
    },
}

/// The end of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Exit {
    /// Exit code; 128 + signal when a signal ended it.
    pub code: i32,
    /// The signal, if one did.
    pub signal: Option<i32>,
    /// `Completed`, `Error`, `OOMKilled`, `ContainerStatusUnknown`.
    pub reason: String,
    /// Termination message.
    pub message: String,
    /// When it began; none when it never did.
    pub started_at: Option<String>,
    /// When it was seen to have ended.
    pub finished_at: String,
}

/// The pod's SIGTERM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stopping {
    /// Boot that `since` counts from.
    pub boot: String,
    /// Seconds of CLOCK_BOOTTIME when the signal was sent.
    pub since: i64,
}

/// The durable record of one pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Record {
    /// UID of the pod.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// UID of the VMI that it belongs to.
    pub vmi_uid: String,
    /// Name of that VMI.
    #[serde(default)]
    pub vmi_name: String,
    /// When the runner first saw it.
    pub seen_at: String,
    /// How far it has come.
    #[serde(flatten)]
    pub stage: Stage,
    /// Its address, while it has a network.
    pub address: Option<Ipv4Addr>,
    /// Set when it was told to end.
    pub stopping: Option<Stopping>,
    /// Container-runtime identity (`virtfold://<this>`), once it was created.
    pub container: Option<String>,
    /// Take the message from the log when the file is empty.
    #[serde(default)]
    pub message_from_log: bool,
}

/// Folder and files of a pod below the node's data folder.
#[derive(Debug, Clone)]
pub(super) struct Places {
    /// `DATA/nodes/<node>/pods/<uid>`.
    pub folder: PathBuf,
}

impl Places {
    /// The places of a pod.
    pub fn of(node_data: &Path, uid: &str) -> Self {
        Self { folder: node_data.join("pods").join(uid) }
    }
    /// The record.
    pub fn record(&self) -> PathBuf {
        self.folder.join("record.json")
    }
    /// The container's output.
    pub fn log(&self) -> PathBuf {
        self.folder.join("compute.log")
    }
    /// Its output before that file was turned over.
    pub fn old_log(&self) -> PathBuf {
        self.folder.join("compute.log.1")
    }
    /// The termination message.
    pub fn message(&self) -> PathBuf {
        self.folder.join("termination-message")
    }
    /// OCI bundle.
    pub fn bundle(&self) -> PathBuf {
        self.folder.join("bundle")
    }
    /// emptyDir volumes.
    pub fn volumes(&self) -> PathBuf {
        self.folder.join("volumes")
    }
}

impl Record {
    /// Reads the record of a pod's folder; none when there is none or it is not one.
    pub fn load(places: &Places) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(places.record()).ok()?).ok()
    }

    /// Writes it durably.
    pub fn save(&self, places: &Places) -> std::io::Result<()> {
        write_whole(&places.record(), &serde_json::to_vec_pretty(self)?)
    }

    /// Whether it runs, as far as the record knows.
    pub fn process(&self) -> Option<&ProcessId> {
        match &self.stage {
            Stage::Running { process, .. } => Some(process),
            _ => None,
        }
    }
}

/// The present time as Kubernetes writes it.
pub(super) fn now() -> String {
    jiff::Timestamp::now().strftime("%FT%TZ").to_string()
}
