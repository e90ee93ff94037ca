//! What a launcher needs from a hypervisor, and the drivers that give it.
//!
//! A driver carries out; it decides nothing. What happens to the guest comes back as [`Event`]s, and the last of them
//! is always [`Event::Exited`].

pub mod qemu;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use futures::future::BoxFuture;
use tokio::net::UnixStream;
use tokio::sync::mpsc;

use crate::machine::Machine;

/// Why vCPUs do not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paused {
    /// Somebody asked for it.
    ByUser,
    /// A disk reported an error (no space, most often).
    IoError,
}

/// What happened to a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// vCPUs run.
    Running,
    /// They do not.
    Paused(Paused),
    /// The guest was reset. One reset may bring many of these.
    Reset,
    /// The guest powered itself off; the hypervisor waits for [`Domain::quit`] or [`Domain::reset`].
    PoweredOff,
    /// The guest's kernel says that it panicked.
    Panicked,
    /// The hypervisor cannot go on with the guest.
    Broken(String),
    /// The hypervisor does not answer. What it answers next says what is so then.
    Silent,
    /// The guest opened or closed the agent's port.
    AgentPort(bool),
    /// The hypervisor process is gone.
    Exited {
        /// Its exit code; `None`: ended by a signal.
        code: Option<i32>,
        /// The signal that ended it.
        signal: Option<i32>,
        /// The end of what it wrote to standard error.
        stderr: String,
    },
}

/// A request to a hypervisor that failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The monitor is gone or does not answer.
    #[error("the hypervisor does not answer: {0}")]
    Deaf(String),
    /// What it left behind cannot be used.
    #[error("{0}")]
    Unusable(String),
    /// The monitor says no.
    #[error("the hypervisor refused {command}: {message}")]
    Refused {
        /// What was asked for.
        command: String,
        /// Its words.
        message: String,
    },
}

/// A domain that did not start.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct StartError(pub String);

/// What a hypervisor says of what its guest uses.
#[derive(Debug, Default)]
pub struct Figures {
    /// Bytes of memory that the guest was given.
    pub memory: u64,
    /// What the balloon leaves it.
    pub balloon: Option<u64>,
    /// As the guest's balloon driver says.
    pub guest: Option<proto::launcher::GuestMemory>,
    /// Threads of the virtual processors, in their order.
    pub threads: Vec<u64>,
    /// Disks.
    pub disks: Vec<proto::launcher::DiskStats>,
}

/// A running domain. All requests may be made at any time, in any order, and concurrently.
pub trait Domain: Send + Sync {
    /// Process id of the hypervisor.
    fn pid(&self) -> i32;
    /// The machine type that came out of the wished one.
    fn machine_type(&self) -> String;
    /// Presses the power button.
    fn power_button(&self) -> BoxFuture<'_, Result<(), Error>>;
    /// Ends the hypervisor in order; its images are flushed and closed. Falls back to [`Domain::kill`] after a moment.
    fn quit(&self) -> BoxFuture<'_, ()>;
    /// Ends the hypervisor at once.
    fn kill(&self);
    /// Halts the vCPUs.
    fn pause(&self) -> BoxFuture<'_, Result<(), Error>>;
    /// Lets them go on.
    fn resume(&self) -> BoxFuture<'_, Result<(), Error>>;
    /// What the guest uses.
    fn figures(&self) -> BoxFuture<'_, Result<Figures, Error>>;
    /// What the screen shows, as PNG.
    fn screenshot(&self) -> BoxFuture<'_, Result<Vec<u8>, Error>>;
    /// Presses the reset button; also starts a guest again that has powered itself off.
    fn reset(&self) -> BoxFuture<'_, Result<(), Error>>;
}

/// A domain that has just been started, with what belongs to it.
pub struct Started {
    /// The handle.
    pub domain: Arc<dyn Domain>,
    /// What happens to it.
    pub events: mpsc::Receiver<Event>,
    /// The serial console, if the machine has one.
    pub console: Option<UnixStream>,
    /// The guest agent's channel.
    pub agent: UnixStream,
}

/// A start that is over.
pub struct Start {
    /// What came of it.
    pub result: Result<Started, StartError>,
    /// From when until when it waited for an image that somebody else had locked, in microseconds since 1970.
    pub locked: Option<(u64, u64)>,
}

/// A kind of hypervisor.
pub trait Driver: Send + Sync {
    /// Prepares the disks of `machine` and starts it. Descriptors are named as in [`crate::machine::Nic::fd_name`].
    fn start(&self, machine: Machine, fds: BTreeMap<String, OwnedFd>) -> BoxFuture<'_, Start>;
}
