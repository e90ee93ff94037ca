//! The launcher: one process per virtual machine, beside its hypervisor, in its pod.
//!
//! It owns the hypervisor process and everything that must live exactly as long as the machine: the latch that allows
//! one start, the answers to finished instructions, the serial console, the guest agent's channel, the DHCP server,
//! and how it ended. It decides about authority in [`latch`] alone; what else it does follows from what it is asked.
//!
//! Who else writes: nobody. The node agent asks over `launcher.sock` and hands descriptors over `fd.sock`; it may die
//! and come back at any time, and the guest does not notice. Requests may be lost, repeated or late: the latch and the
//! verbs' table make twice once. What happens is told as a level with a sequence number; a watcher that missed some
//! gets the newest. How the domain ended is written as the termination message before it is told to anybody.
//!
//! | file in the share folder | what |
//! |---|---|
//! | `launcher.sock` | gRPC |
//! | `fd.sock` | descriptors (tap, dhcp) by SCM_RIGHTS |
//! | `console.sock` | the serial console for one client, the newest; shows the backlog first |
//! | `console.log`, `console.log.1` | what the guest wrote to it, bounded |
//! | `vnc.sock` | QEMU's VNC server |
//! | `qmp.sock` | QEMU's monitor, for people |
//!
//! Exit codes of the process: see [`outcome`].

pub mod accelerator;
mod cloudinit;
mod config;
mod console;
mod core;
pub mod dhcp;
mod fds;
mod guest;
pub mod hypervisor;
pub mod latch;
mod limits;
pub mod machine;
pub mod offers;
pub mod outcome;
pub mod probe;
mod server;
pub mod spec;
mod stats;
mod sys;
mod time;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use proto::launcher::launcher_server::LauncherServer;
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnixListenerStream;

pub use config::{Config, Paths};
pub use sys::send_descriptor;

/// The launcher could not do its own work.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A socket in the share folder could not be made.
    #[error("binding {path}")]
    Bind {
        /// Which one.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The runtime or a signal handler could not be set up.
    #[error("setting up the process")]
    Setup(#[source] std::io::Error),
}

/// Runs a launcher on a runtime of its own with one thread, and gives back the exit code of the process.
///
/// One thread is enough for one machine, keeps the memory small, and is what the hypervisor's parent-death signal
/// relies on.
pub fn run_blocking(config: Config) -> Result<i32, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::Setup)?;
    let code = runtime.block_on(run(config));
    // A task that reads from somewhere must not keep the process.
    runtime.shutdown_background();
    code
}

/// Serves until the domain is over and its outcome was taken (or nobody came for it), and gives back the exit code.
/// To be run on a runtime with one thread: see [`run_blocking`].
pub async fn run(config: Config) -> Result<i32, Error> {
    let path = config.share_dir.join("launcher.sock");
    let fd_path = config.share_dir.join("fd.sock");
    let descriptors = fds::serve(&fd_path).map_err(|source| Error::Bind { path: fd_path.clone(), source })?;
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).map_err(|source| Error::Bind { path: path.clone(), source })?;
    let mut terminate = signal(SignalKind::terminate()).map_err(Error::Setup)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Error::Setup)?;

    let driver = Arc::new(hypervisor::qemu::Qemu::new(&config));
    let share = config.share_dir.clone();
    let (core, mut level) = core::Core::new(config, driver, descriptors);
    let (asks, asked) = mpsc::channel(limits::ASKS);
    let (delivered, mut taken) = watch::channel(false);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let service = server::Service { asks: asks.clone(), level: level.clone(), delivered };
    let server = tokio::spawn(
        tonic::transport::Server::builder().add_service(LauncherServer::new(service)).serve_with_incoming_shutdown(
            // The pod's own probes come as its user; what they may ask is the service's matter.
            UnixListenerStream::new(listener)
                .filter(|peer| peer.as_ref().map_or(true, |p| is_from(p, |uid| is_agent(uid) || uid == own_uid()))),
            async {
                let _ = stopped.await;
            },
        ),
    );
    tokio::spawn(core.run(asked));
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if asks.send(core::Ask::Terminate).await.is_err() {
                return;
            }
        }
    });

    let cause = match level.wait_for(|l| l.outcome.is_some()).await {
        Ok(level) => level.outcome.as_ref().map(|o| o.cause()).unwrap_or_default(),
        Err(_) => proto::agent::Cause::OutcomeUnknown,
    };
    if tokio::time::timeout(limits::OUTCOME_DELIVERY, taken.wait_for(|t| *t)).await.is_err() {
        tracing::warn!("nobody came for the outcome");
    }
    let _ = stop.send(());
    let _ = tokio::time::timeout(limits::SERVER_FLUSH, server).await;
    clean(&share);
    Ok(outcome::exit_code(cause))
}

/// Whether a user is the node agent: root. Where a person runs a launcher, it is that person, too; but never the user of
/// launchers in pods, as whom QEMU runs, which a guest may have taken over.
fn is_agent(uid: u32) -> bool {
    uid == 0 || (uid == own_uid() && uid != api::names::LAUNCHER_UID)
}

fn own_uid() -> u32 {
    nix::unistd::getuid().as_raw()
}

/// Whether the other end of a socket is one of those.
fn is_from(peer: &UnixStream, wanted: impl Fn(u32) -> bool) -> bool {
    match peer.peer_cred() {
        Ok(who) if wanted(who.uid()) => true,
        Ok(who) => {
            tracing::warn!(uid = who.uid(), pid = who.pid(), "somebody who is not the node agent is turned away");
            false
        }
        Err(error) => {
            tracing::warn!(%error, "somebody of whom nothing is known is turned away");
            false
        }
    }
}

fn clean(share: &Path) {
    for name in ["launcher.sock", "fd.sock", "console.sock", "vnc.sock", "qmp.sock"] {
        let _ = std::fs::remove_file(share.join(name));
    }
}
