//! A process beside the test: its log, what it costs, its end.

use super::tail;
use crate::e2e::{process, wait};
use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use std::{
    ffi::{OsStr, OsString},
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// Time to end when asked.
const END: Duration = Duration::from_secs(20);

/// A child that ends with its owner.
pub struct Process {
    name: String,
    folder: PathBuf,
    log: PathBuf,
    program: OsString,
    arguments: Vec<OsString>,
    variables: Vec<(OsString, Option<OsString>)>,
    child: Mutex<Child>,
}

impl Process {
    /// Starts it; what it says goes to `NAME.log` in `folder`.
    pub fn start(folder: &Path, name: &str, command: &mut Command) -> Result<Self> {
        let log = folder.join(format!("{name}.log"));
        let child = spawn(folder, &log, command).with_context(|| format!("start {name}"))?;
        Ok(Self {
            name: name.into(),
            folder: folder.to_owned(),
            log,
            program: command.get_program().to_owned(),
            arguments: command.get_args().map(OsStr::to_owned).collect(),
            variables: command.get_envs().map(|(k, v)| (k.to_owned(), v.map(OsStr::to_owned))).collect(),
            child: Mutex::new(child),
        })
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.child.lock().unwrap_or_else(PoisonError::into_inner).id() as i32
    }

    /// Starts it again in the same way, where it has ended.
    pub fn revive(&self) -> Result<()> {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        if child.try_wait()?.is_none() {
            return Ok(());
        }
        let mut command = Command::new(&self.program);
        command.args(&self.arguments);
        for (name, value) in &self.variables {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        *child = spawn(&self.folder, &self.log, &mut command).with_context(|| format!("start {} again", self.name))?;
        Ok(())
    }

    /// An error, with its last words, where it has ended.
    pub fn check(&self) -> Result<()> {
        let ended = self.child.lock().unwrap_or_else(PoisonError::into_inner).try_wait()?;
        match ended {
            Some(status) => bail!("{} ended with {status}:\n{}", self.name, self.log_tail()),
            None => Ok(()),
        }
    }

    /// Waits until it is as wanted; a process that has ended is not waited for.
    pub fn ready(
        &self,
        what: &str,
        limit: Duration,
        mut look: impl FnMut() -> Result<Result<(), String>>,
    ) -> Result<()> {
        wait::until(what, limit, || match self.check() {
            Ok(()) => look().map(|seen| seen.map(Ok)),
            Err(ended) => Ok(Ok(Err(ended))),
        })?
    }

    /// Its last words.
    pub fn log_tail(&self) -> String {
        tail(&self.log, 40)
    }

    /// CPU seconds that it has used, of all its threads.
    pub fn cpu(&self) -> Result<f64> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).context("read the CPU time")?;
        let rest = stat.rsplit_once(')').map(|(_, rest)| rest).unwrap_or_default();
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let ticks = |n: usize| fields.get(n).and_then(|f| f.parse::<f64>().ok()).unwrap_or(0.0);
        let second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.unwrap_or(100);
        Ok((ticks(11) + ticks(12)) / second as f64)
    }

    /// KiB of memory: resident now, and the most that ever was.
    pub fn memory(&self) -> Result<(u64, u64)> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).context("read the memory")?;
        let of = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            line.and_then(|l| l.split_whitespace().next()?.parse().ok()).unwrap_or(0)
        };
        Ok((of("VmRSS:"), of("VmHWM:")))
    }

    /// Asks it to end, and kills it where it does not.
    pub fn end(&self) {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(child.try_wait(), Ok(Some(_))) {
            return;
        }
        process::signal(child.id() as i32, Signal::SIGTERM).ok();
        if wait::until("the end", END, || Ok(child.try_wait()?.ok_or_else(String::new))).is_err() {
            child.kill().ok();
            child.wait().ok();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

fn spawn(folder: &Path, log: &Path, command: &mut Command) -> Result<Child> {
    let out = File::options().create(true).append(true).open(log).context("open a log")?;
    command.current_dir(folder).stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
    Ok(command.spawn()?)
}
