//! The OCI runtime's command line.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;

/// How long one call of the runtime may take.
const LIMIT: Duration = Duration::from_secs(60);
/// What is kept of a process's words.
const ANSWER: usize = 1024;

/// Why the runtime did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum RuncError {
    /// It cannot be run.
    #[error("cannot run {program}", program = .program.display())]
    Spawn {
        /// The program.
        program: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It said no.
    #[error("`runc {command}` failed: {message}")]
    Failed {
        /// Its subcommand.
        command: String,
        /// The last line that it wrote.
        message: String,
    },
    /// It did not answer.
    #[error("`runc {command}` took longer than {} s", LIMIT.as_secs())]
    Late {
        /// Its subcommand.
        command: String,
    },
}

/// Where the runtime is and where it keeps its state.
#[derive(Debug, Clone)]
pub(super) struct Runc {
    /// The program.
    pub program: PathBuf,
    /// Its `--root`.
    pub root: PathBuf,
}

/// What the runtime says of a container.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct State {
    /// Process 1, 0 when there is none.
    #[serde(default)]
    pub pid: i32,
    /// `created`, `running`, `paused` or `stopped`.
    pub status: String,
}

impl Runc {
    async fn call(&self, arguments: &[&str], output: Option<&Path>) -> Result<Vec<u8>, RuncError> {
        let spawn = |source| RuncError::Spawn { program: self.program.clone(), source };
        let command = (*arguments.first().unwrap_or(&"")).to_owned();
        let errors = self.root.join(format!("{}.log", uuid::Uuid::new_v4()));
        let mut call = tokio::process::Command::new(&self.program);
        call.arg("--root").arg(&self.root).arg("--log").arg(&errors).args(arguments).stdin(Stdio::null());
        match output {
            // The container inherits these descriptors: a file outlives its reader, a pipe does not.
            Some(log) => {
                let log = File::options().create(true).append(true).open(log).map_err(spawn)?;
                call.stderr(log.try_clone().map_err(spawn)?).stdout(log);
            }
            None => {
                call.stdout(Stdio::piped()).stderr(Stdio::piped());
            }
        }
        let child = call.spawn().map_err(spawn)?;
        let done = tokio::time::timeout(LIMIT, child.wait_with_output()).await;
        let said = std::fs::read_to_string(&errors).unwrap_or_default();
        let _ = std::fs::remove_file(&errors);
        let done = done.map_err(|_| RuncError::Late { command: command.clone() })?.map_err(spawn)?;
        if done.status.success() {
            return Ok(done.stdout);
        }
        let message = said
            .lines()
            .rev()
            .find(|line| line.contains("level=error"))
            .map_or_else(|| String::from_utf8_lossy(&done.stderr).trim().to_owned(), message_of);
        Err(RuncError::Failed { command, message })
    }

    /// Makes the container; its process waits for [`Runc::start`]. Its output goes to `log`.
    pub async fn create(&self, id: &str, bundle: &Path, log: &Path) -> Result<(), RuncError> {
        let bundle = bundle.to_string_lossy();
        self.call(&["create", "--bundle", &bundle, id], Some(log)).await.map(drop)
    }

    /// Lets the container's process go.
    pub async fn start(&self, id: &str) -> Result<(), RuncError> {
        self.call(&["start", id], None).await.map(drop)
    }

    /// Runs one more process in the container: its exit code, and what it wrote. It is the caller's to give up waiting; the process
    /// then goes on.
    pub async fn exec(&self, id: &str, command: &[String]) -> Result<(i32, String), RuncError> {
        let spawn = |source| RuncError::Spawn { program: self.program.clone(), source };
        let mut call = tokio::process::Command::new(&self.program);
        call.arg("--root").arg(&self.root).args(["exec", id]).args(command).stdin(Stdio::null()).kill_on_drop(true);
        let done = call.output().await.map_err(spawn)?;
        let said = if done.stdout.is_empty() { &done.stderr } else { &done.stdout };
        let said = String::from_utf8_lossy(said.get(..ANSWER).unwrap_or(said)).trim().to_owned();
        Ok((done.status.code().unwrap_or(-1), said))
    }

    /// What there is; none when the runtime knows no such container.
    pub async fn state(&self, id: &str) -> Result<Option<State>, RuncError> {
        match self.call(&["state", id], None).await {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map(Some)
                .map_err(|e| RuncError::Failed { command: "state".into(), message: e.to_string() }),
            Err(RuncError::Failed { message, .. }) if message.contains("does not exist") => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Kills whatever is left of the container and removes it with its cgroup. Nothing happens when there is none.
    pub async fn delete(&self, id: &str) -> Result<(), RuncError> {
        self.call(&["delete", "--force", id], None).await.map(drop)
    }

    /// The containers that it knows.
    pub fn known(&self) -> Vec<String> {
        std::fs::read_dir(&self.root)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.path().is_dir())
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect()
    }
}

/// The words of a line `time="..." level=error msg="..."`.
fn message_of(line: &str) -> String {
    match line.split_once("msg=") {
        Some((_, quoted)) => {
            serde_json::from_str::<String>(quoted.trim()).unwrap_or_else(|_| quoted.trim_matches('"').to_owned())
        }
        None => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runtimes_words_are_taken_out_of_its_log() {
        assert_eq!(
            message_of(r#"time="x" level=error msg="runc create failed: no \"a\"""#),
            "runc create failed: no \"a\""
        );
        assert_eq!(message_of("something else"), "something else");
    }
}
