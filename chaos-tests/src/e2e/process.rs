//! Processes of the machine, read from `/proc`; a test kills them by id.

use anyhow::{Context, Result, bail};
use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{fs, path::Path, time::Duration};

/// One process.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its id on the machine.
    pub pid: i32,
    /// Its parent's id.
    pub parent: i32,
    /// Its short name.
    pub name: String,
    /// Its arguments.
    pub arguments: Vec<String>,
}

/// All processes that are not zombies.
pub fn all() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|entry| read(entry.file_name().to_str()?.parse().ok()?)).collect()
}

fn read(pid: i32) -> Option<Process> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (start, end) = (stat.find('(')?, stat.rfind(')')?);
    let mut rest = stat[end + 2..].split(' ');
    if rest.next()? == "Z" {
        return None;
    }
    let parent = rest.next()?.parse().ok()?;
    let arguments = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let arguments = arguments.split(|byte| *byte == 0).map(|part| String::from_utf8_lossy(part).into_owned());
    Some(Process {
        pid,
        parent,
        name: stat[start + 1..end].to_owned(),
        arguments: arguments.filter(|argument| !argument.is_empty()).collect(),
    })
}

/// Whether a process is there and not a zombie.
pub fn alive(pid: i32) -> bool {
    read(pid).is_some()
}

/// The launcher of a VMI, and its QEMU if it has started one.
pub fn of_vmi(vmi_uid: &str) -> (Option<Process>, Option<Process>) {
    let all = all();
    let launcher = all.iter().find(|process| {
        process.arguments.iter().any(|argument| argument == "launcher")
            && process.arguments.iter().any(|argument| argument.contains(vmi_uid))
            && !process.name.starts_with("runc")
    });
    let qemu = launcher.and_then(|launcher| {
        all.iter().find(|process| process.name.starts_with("qemu-system") && descends(&all, process, launcher.pid))
    });
    (launcher.cloned(), qemu.cloned())
}

fn descends(all: &[Process], process: &Process, ancestor: i32) -> bool {
    let mut parent = process.parent;
    // Deeper than any tree of ours; the walk ends even if the list is inconsistent.
    for _ in 0..64 {
        if parent == ancestor {
            return true;
        }
        match all.iter().find(|candidate| candidate.pid == parent) {
            Some(next) => parent = next.parent,
            None => return false,
        }
    }
    false
}

/// Sends a signal; a process that is gone already is fine.
pub fn signal(pid: i32, signal: Signal) -> Result<()> {
    if pid <= 1 {
        bail!("will not signal process {pid}");
    }
    match kill(Pid::from_raw(pid), signal) {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("signal process {pid}")),
    }
}

/// `kill -9`, and waits until it is gone.
pub fn destroy(pid: i32) -> Result<()> {
    signal(pid, Signal::SIGKILL)?;
    super::wait::until(&format!("the end of process {pid}"), Duration::from_secs(10), || {
        Ok(if alive(pid) { Err("still there".into()) } else { Ok(()) })
    })
}

/// The id in a pid file.
pub fn pid_in(file: &Path) -> Result<i32> {
    let text = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
    text.split_whitespace()
        .next()
        .and_then(|word| word.parse().ok())
        .with_context(|| format!("{} holds no process id: {text:?}", file.display()))
}

/// Memory that a process has resident, in KiB.
pub fn resident_kib(pid: i32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next()?.parse().ok())
}
