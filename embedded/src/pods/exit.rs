//! How a container's first process ends, for our own children and for those that an earlier runner started.

use std::path::{Path, PathBuf};

use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::record::{Exit, Places, UNKNOWN_EXIT, now};
use crate::procs::ProcessId;

/// Longest termination message.
const MESSAGE: usize = 4096;
/// What of the log stands for a missing message.
const TAIL: (usize, u64) = (80, 2048);

/// Waits until the process is gone, without taking its exit code.
pub(super) async fn gone(process: &ProcessId) {
    let Some(pid) = rustix::process::Pid::from_raw(process.pid) else { return };
    let Ok(pidfd) = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) else {
        return;
    };
    // Between the record and the opening the pid may have gone to somebody else.
    if !process.alive() {
        return;
    }
    // The new form is unsafe for types that may change their descriptor; an `OwnedFd` does not.
    #[allow(deprecated)]
    let fd = AsyncFd::with_interest(pidfd, Interest::READABLE);
    match fd {
        Ok(fd) => drop(fd.readable().await),
        Err(_) => while !process.gone_within(std::time::Duration::from_secs(60)).await {},
    }
}

/// Takes the exit code of a process that is gone: `(code, signal)`; none when it was not our child, so that nobody knows.
fn code(process: &ProcessId) -> Option<(i32, Option<i32>)> {
    match waitpid(Pid::from_raw(process.pid), Some(WaitPidFlag::WNOHANG)) {
        Ok(WaitStatus::Exited(_, code)) => Some((code, None)),
        Ok(WaitStatus::Signaled(_, signal, _)) => Some((128 + signal as i32, Some(signal as i32))),
        _ => None,
    }
}

/// The file in which the kernel counts the out-of-memory kills of a process's cgroup.
pub(super) fn oom_counter(pid: i32) -> Option<PathBuf> {
    let cgroups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let mut unified = None;
    for line in cgroups.lines() {
        let mut parts = line.splitn(3, ':');
        let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?.trim_start_matches('/'));
        if controllers.split(',').any(|c| c == "memory") {
            return Some(Path::new("/sys/fs/cgroup/memory").join(path).join("memory.oom_control"));
        }
        if number == "0" {
            unified = Some(Path::new("/sys/fs/cgroup").join(path).join("memory.events"));
        }
    }
    unified
}

fn oom_killed(counter: Option<&Path>) -> bool {
    let text = counter.and_then(|c| std::fs::read_to_string(c).ok()).unwrap_or_default();
    text.lines().any(|l| l.strip_prefix("oom_kill ").is_some_and(|n| n.trim() != "0"))
}

fn message(places: &Places) -> String {
    use std::io::Read;
    let mut bytes = Vec::new();
    if let Ok(file) = std::fs::File::open(places.message()) {
        let _ = file.take(MESSAGE as u64).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The end of a container that ran.
pub(super) fn collect(
    process: Option<&ProcessId>,
    places: &Places,
    started_at: Option<String>,
    from_log: bool,
    counter: Option<&Path>,
) -> Exit {
    let known = process.and_then(code);
    let (code, signal) = known.unwrap_or((UNKNOWN_EXIT, None));
    let reason = match known {
        None => "ContainerStatusUnknown",
        Some((0, None)) => "Completed",
        Some((_, Some(9))) if oom_killed(counter) => "OOMKilled",
        Some(_) => "Error",
    };
    let mut message = message(places);
    if message.is_empty() && code != 0 && from_log {
        message = super::logs::tail(places, TAIL.0, TAIL.1);
    }
    Exit { code, signal, reason: reason.to_owned(), message, started_at, finished_at: now() }
}
