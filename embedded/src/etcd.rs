//! etcd as a child process: started, watched, restarted, stopped.
//!
//! It speaks over a Unix socket in a folder that only root may enter, so no port is taken and nobody else on the machine can
//! read the cluster's Secrets. When the supervisor is killed, etcd stays behind; the next start ends it by pid and start
//! time (or, where the supervisor was killed before it could write them down, by its `--data-dir`) and begins anew: its data
//! are safe at every moment, and a child that is our own can be waited for.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::process::{Child, Command};
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

use crate::procs::{ProcessId, find_program};
use crate::storage::{self, Storage};

/// etcd answers within this time after its start, or something is wrong.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long it gets to stop.
const STOP_GRACE: Duration = Duration::from_secs(10);
/// Size at which etcd refuses writes.
const QUOTA_BYTES: u64 = 4 << 30;
/// History that is kept, for watches and lists that go on from a revision.
const HISTORY: &str = "10m";
/// A log above this size is put aside at the next start.
const LOG_BYTES: u64 = 8 << 20;
/// Longest wait between two restarts.
const RESTART_WAIT_MAX: Duration = Duration::from_secs(10);

/// Why there is no etcd.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// No such program.
    #[error("etcd not found in PATH; on Debian: apt-get install etcd-server")]
    Missing,
    /// It ended instead of serving.
    #[error(
        "etcd cannot start from {data} ({status}): {words}; if its data are damaged, put back a copy of that folder, or \
         move it away to begin with an empty cluster (the disks in the folder volumes stay). Its log: {log}",
        data = .data.display(), log = .log.display()
    )]
    Ended {
        /// The data folder.
        data: PathBuf,
        /// How it ended.
        status: ExitStatus,
        /// Its last words.
        words: String,
        /// The log file.
        log: PathBuf,
    },
    /// It runs but does not answer.
    #[error("etcd does not answer after {} s; its log: {log}", START_LIMIT.as_secs(), log = .log.display())]
    Deaf {
        /// The log file.
        log: PathBuf,
    },
    /// A file or process could not be made.
    #[error("cannot {what}")]
    Io {
        /// What was attempted, on what.
        what: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The client does not take the address.
    #[error("etcd's address")]
    Address(#[source] storage::StorageError),
}

/// Where etcd keeps what.
#[derive(Debug, Clone)]
pub struct Config {
    /// `--data-dir`.
    pub data: PathBuf,
    /// Folder of its sockets; short, as the paths of sockets are limited.
    pub run: PathBuf,
    /// Its log.
    pub log: PathBuf,
    /// The program; found in PATH when none.
    pub program: Option<PathBuf>,
}

/// A running etcd.
#[derive(Debug)]
pub struct Etcd {
    config: Config,
    program: PathBuf,
    child: Mutex<Option<Child>>,
    stopping: CancellationToken,
}

impl Etcd {
    /// Starts etcd and waits until it answers. It is restarted when it dies, until [`Etcd::stop`].
    ///
    /// # Errors
    /// See [`EtcdError`].
    pub async fn start(config: Config) -> Result<Arc<Self>, EtcdError> {
        let program = match &config.program {
            Some(program) => Some(program.clone()),
            None => find_program("etcd"),
        };
        let program = program.ok_or(EtcdError::Missing)?;
        for folder in [&config.data, &config.run] {
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(folder)
                .map_err(|source| EtcdError::Io { what: format!("make {}", folder.display()), source })?;
        }
        end_orphan(&config).await;
        if std::fs::metadata(&config.log).is_ok_and(|m| m.len() > LOG_BYTES) {
            let _ = std::fs::rename(&config.log, config.log.with_extension("log.1"));
        }
        let etcd = Arc::new(Self { config, program, child: Mutex::new(None), stopping: CancellationToken::new() });
        let mut child = etcd.spawn()?;
        if let Err(error) = etcd.wait_until_it_answers(&mut child).await {
            let _ = child.kill().await;
            let _ = std::fs::remove_file(etcd.pid_file());
            return Err(error);
        }
        *etcd.child.lock().await = Some(child);
        tokio::spawn(Arc::clone(&etcd).supervise());
        Ok(etcd)
    }

    /// The address for [`storage::Etcd::new`].
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.config.run.join("client:0").display())
    }

    /// Its pid, while it runs.
    pub async fn pid(&self) -> Option<u32> {
        self.child.lock().await.as_ref().and_then(Child::id)
    }

    fn pid_file(&self) -> PathBuf {
        pid_file(&self.config)
    }

    fn spawn(&self) -> Result<Child, EtcdError> {
        let io = |what: String| move |source| EtcdError::Io { what, source };
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.config.log)
            .map_err(io(format!("open {}", self.config.log.display())))?;
        let log_too = log.try_clone().map_err(io(format!("open {}", self.config.log.display())))?;
        // etcd does not clear away the sockets of one that was killed, and none runs now.
        for socket in ["client:0", "peer:0"] {
            let _ = std::fs::remove_file(self.config.run.join(socket));
        }
        // The name of a socket is the whole host part of the address, relative to the working folder.
        let child = Command::new(&self.program)
            .current_dir(&self.config.run)
            .arg("--name=virtfold")
            .arg(data_argument(&self.config))
            .args(["--listen-client-urls=unix://client:0", "--advertise-client-urls=unix://client:0"])
            .args(["--listen-peer-urls=unix://peer:0", "--initial-advertise-peer-urls=unix://peer:0"])
            .args(["--initial-cluster=virtfold=unix://peer:0", "--logger=zap", "--log-level=warn"])
            .args(["--auto-compaction-mode=periodic", &format!("--auto-compaction-retention={HISTORY}")])
            .arg(format!("--quota-backend-bytes={QUOTA_BYTES}"))
            .arg("--max-request-bytes=3145728")
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(log_too)
            // Ctrl-C at the terminal is for the supervisor, which stops etcd last.
            .process_group(0)
            .spawn()
            .map_err(io(format!("run {}", self.program.display())))?;
        if let Some(id) = child.id().and_then(|pid| ProcessId::of(pid.cast_signed())) {
            id.save(&self.pid_file()).map_err(io(format!("write {}", self.pid_file().display())))?;
        }
        Ok(child)
    }

    async fn wait_until_it_answers(&self, child: &mut Child) -> Result<(), EtcdError> {
        let client = storage::Etcd::new(&self.endpoint()).map_err(EtcdError::Address)?;
        let end = Instant::now() + START_LIMIT;
        loop {
            if let Ok(Some(status)) = child.try_wait() {
                let words = last_words(&self.config.log);
                return Err(EtcdError::Ended {
                    data: self.config.data.clone(),
                    status,
                    words,
                    log: self.config.log.clone(),
                });
            }
            if self.config.run.join("client:0").exists()
                && matches!(tokio::time::timeout(Duration::from_secs(2), client.revision()).await, Ok(Ok(_)))
            {
                return Ok(());
            }
            if Instant::now() > end {
                return Err(EtcdError::Deaf { log: self.config.log.clone() });
            }
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    }

    async fn supervise(self: Arc<Self>) {
        let mut wait = Duration::from_millis(100);
        loop {
            let Some(mut child) = self.child.lock().await.take() else { return };
            let since = Instant::now();
            let status = tokio::select! {
                status = child.wait() => status,
                () = self.stopping.cancelled() => {
                    *self.child.lock().await = Some(child);
                    return;
                }
            };
            wait = if since.elapsed() > Duration::from_secs(60) {
                Duration::from_millis(100)
            } else {
                (wait * 2).min(RESTART_WAIT_MAX)
            };
            let status = status.map_or_else(|e| e.to_string(), |s| s.to_string());
            tracing::error!(%status, words = %last_words(&self.config.log), "etcd ended; starting it again in {wait:?}");
            loop {
                tokio::select! {
                    () = tokio::time::sleep(wait) => {}
                    () = self.stopping.cancelled() => return,
                }
                match self.spawn() {
                    Ok(child) => {
                        *self.child.lock().await = Some(child);
                        break;
                    }
                    Err(error) => {
                        tracing::error!(%error, "etcd does not start");
                        wait = (wait * 2).min(RESTART_WAIT_MAX);
                    }
                }
            }
        }
    }

    /// Stops etcd and waits for its end.
    pub async fn stop(&self) {
        self.stopping.cancel();
        // By pid file: the child may be in the hands of the task that watches it.
        if let Some(id) = ProcessId::load(&self.pid_file()) {
            id.end(STOP_GRACE).await;
        }
        if let Some(mut child) = self.child.lock().await.take() {
            let _ = child.wait().await;
        }
        let _ = std::fs::remove_file(self.pid_file());
    }
}

fn pid_file(config: &Config) -> PathBuf {
    config.run.join("etcd.pid")
}

fn data_argument(config: &Config) -> String {
    format!("--data-dir={}", config.data.display())
}

/// Ends the etcd of a supervisor that was killed.
///
/// Also useful on its own, to take a cluster down whose supervisor is gone.
pub async fn end_orphan(config: &Config) {
    let mut orphans: Vec<ProcessId> = ProcessId::load(&pid_file(config)).into_iter().collect();
    orphans.extend(processes_with_argument(&data_argument(config)));
    for orphan in orphans {
        if orphan.alive() {
            tracing::info!(pid = orphan.pid, "ending the etcd that an earlier start left behind");
            orphan.end(STOP_GRACE).await;
        }
    }
}

fn processes_with_argument(argument: &str) -> Vec<ProcessId> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| {
            std::fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| line.split(|b| *b == 0).any(|word| word == argument.as_bytes()))
        })
        .filter_map(ProcessId::of)
        .collect()
}

/// The last lines of a log that say what went wrong.
fn last_words(log: &Path) -> String {
    let text = std::fs::read(log).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let wrong =
        |line: &&&str| line.contains("\"level\":\"fatal\"") || line.contains("panic:") || line.contains("[FATAL]");
    let line = lines.iter().rev().take(200).find(wrong).or(lines.last()).copied().unwrap_or("it said nothing");
    if let Ok(record) = serde_json::from_str::<serde_json::Value>(line) {
        let field = |name: &str| record[name].as_str().unwrap_or_default().to_owned();
        return [field("msg"), field("error")].join(": ").trim_end_matches(": ").to_owned();
    }
    line.chars().take(300).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use nix::sys::signal::Signal;

    fn config(root: &Path) -> Config {
        Config { data: root.join("data"), run: root.join("run"), log: root.join("etcd.log"), program: None }
    }

    async fn revision(etcd: &Etcd) -> i64 {
        let client = storage::Etcd::new(&etcd.endpoint()).unwrap();
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            match client.revision().await {
                Ok(revision) => return revision,
                Err(e) => assert!(Instant::now() < end, "{e}"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    #[tokio::test]
    async fn it_survives_a_kill_of_itself_and_of_its_supervisor_and_ends_when_told() {
        let root = tempfile::tempdir().unwrap();
        let etcd = Etcd::start(config(root.path())).await.unwrap();
        let client = storage::Etcd::new(&etcd.endpoint()).unwrap();
        client.write("/a", storage::Expect::Absent, Some("1".into())).await.unwrap();
        let before = revision(&etcd).await;
        ProcessId::load(&etcd.pid_file()).unwrap().signal(Signal::SIGKILL);
        assert_eq!(revision(&etcd).await, before);

        // A supervisor that is gone without a word: nobody waits for the child or knows its pid.
        etcd.stopping.cancel();
        let first = ProcessId::load(&etcd.pid_file()).unwrap();
        std::fs::remove_file(etcd.pid_file()).unwrap();
        let next = Etcd::start(config(root.path())).await.unwrap();
        assert!(!first.alive());
        assert_eq!(revision(&next).await, before);
        let last = ProcessId::load(&next.pid_file()).unwrap();
        next.stop().await;
        assert!(!last.alive());
    }

    #[tokio::test]
    async fn a_missing_program_and_damaged_data_are_told_apart() {
        let root = tempfile::tempdir().unwrap();
        let etcd = Etcd::start(config(root.path())).await.unwrap();
        etcd.stop().await;
        let wal = root.path().join("data/member/wal");
        for file in std::fs::read_dir(&wal).unwrap().flatten() {
            if file.path().extension().is_some_and(|e| e == "wal") {
                std::fs::write(file.path(), vec![0x5a; 4096]).unwrap();
            }
        }
        let text = Etcd::start(config(root.path())).await.unwrap_err().to_string();
        assert!(text.contains("damaged") && text.contains("etcd.log"), "{text}");
        let none = Config { program: Some("/nowhere/etcd".into()), ..config(root.path()) };
        let error = Etcd::start(none).await.unwrap_err();
        assert!(matches!(error, EtcdError::Io { .. }), "{error}");
    }
}
