//! Processes that outlive the one that started them, found again without ever touching a stranger.
//!
//! A pid alone is not an identity: it is given away again. A pid and the start time that the kernel keeps for it are, until
//! the next boot; and a file that does not survive a boot is not needed, because a start time of an earlier boot together
//! with the same pid would have to match to the hundredth of a second (the boot id is compared as well).

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// Who a process is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// Its pid.
    pub pid: i32,
    /// Field 22 of `/proc/PID/stat`: ticks between boot and its start.
    pub started: u64,
    /// `/proc/sys/kernel/random/boot_id` of the boot that it lives in.
    pub boot: String,
}

fn start_time(pid: i32) -> Option<(u64, char)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the command in parentheses and may hold anything.
    let rest = stat.rsplit_once(") ")?.1;
    let mut fields = rest.split(' ');
    let state = fields.next()?.chars().next()?;
    Some((fields.nth(18)?.parse().ok()?, state))
}

fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

impl ProcessId {
    /// The identity of a living process.
    #[must_use]
    pub fn of(pid: i32) -> Option<Self> {
        let (started, _) = start_time(pid)?;
        Some(Self { pid, started, boot: boot_id() })
    }

    /// Reads what [`ProcessId::save`] wrote; none when there is no such file or it is torn.
    #[must_use]
    pub fn load(path: &Path) -> Option<Self> {
        let text = std::fs::read_to_string(path).ok()?;
        let mut words = text.split_whitespace();
        let id =
            Self { pid: words.next()?.parse().ok()?, started: words.next()?.parse().ok()?, boot: words.next()?.into() };
        Some(id)
    }

    /// Writes the identity to a file (`PID STARTED BOOT`), whole or not at all.
    ///
    /// # Errors
    /// What the file system says.
    pub fn save(&self, path: &Path) -> std::io::Result<()> {
        let tmp: PathBuf = path.with_extension("tmp");
        std::fs::write(&tmp, format!("{} {} {}\n", self.pid, self.started, self.boot))?;
        std::fs::rename(&tmp, path)
    }

    /// Whether this very process still runs (a zombie does not).
    #[must_use]
    pub fn alive(&self) -> bool {
        start_time(self.pid).is_some_and(|(started, state)| started == self.started && !matches!(state, 'Z' | 'X'))
            && self.boot == boot_id()
    }

    /// Sends a signal if it is still the same process.
    pub fn signal(&self, signal: Signal) {
        if self.alive() {
            let _ = kill(Pid::from_raw(self.pid), signal);
        }
    }

    /// Waits until it is gone; false when it still lives after `limit`.
    pub async fn gone_within(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        while self.alive() {
            if Instant::now() >= end {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        true
    }

    /// SIGTERM, then SIGKILL after `grace`.
    pub async fn end(&self, grace: Duration) {
        self.signal(Signal::SIGTERM);
        if !self.gone_within(grace).await {
            self.signal(Signal::SIGKILL);
            self.gone_within(Duration::from_secs(5)).await;
        }
    }
}

/// Looks for a program in PATH.
#[must_use]
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[tokio::test]
    async fn a_process_is_known_again_and_a_stranger_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let id = ProcessId::of(i32::try_from(child.id()).unwrap()).unwrap();
        let file = dir.path().join("pid");
        id.save(&file).unwrap();
        let again = ProcessId::load(&file).unwrap();
        assert_eq!(again, id);
        assert!(again.alive());
        let stranger = ProcessId { started: id.started + 1, ..id.clone() };
        assert!(!stranger.alive());
        stranger.signal(Signal::SIGKILL);
        assert!(id.alive());
        id.end(Duration::from_secs(5)).await;
        assert!(!id.alive());
        child.wait().unwrap();
        std::fs::write(&file, b"12").unwrap();
        assert!(ProcessId::load(&file).is_none());
    }
}
