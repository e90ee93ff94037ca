//! What a VM, or a whole cluster, left behind on the machine; and the broom.

use super::process;
use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use sha2::{Digest, Sha256};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// The id of a cluster: what its namespaces and its folder under `/run` are named after.
pub fn id_of(data: &Path) -> String {
    let data = fs::canonicalize(data).unwrap_or_else(|_| data.to_owned());
    let digest = Sha256::digest(data.as_os_str().as_encoded_bytes());
    digest.iter().take(4).map(|byte| format!("{byte:02x}")).collect()
}

/// The folder of a cluster's sockets.
pub fn run_of(data: &Path) -> PathBuf {
    Path::new("/run/virtfold").join(id_of(data))
}

/// Everything on the machine whose name holds one of the words: processes, network namespaces, interfaces, mounts, sockets, control groups,
/// files under the cluster's folders.
pub fn holding(data: &Path, words: &[&str]) -> Vec<String> {
    let has = |text: &str| words.iter().any(|word| text.contains(word));
    let mut found = Vec::new();
    let me = std::process::id() as i32;
    for process in process::all() {
        let line = process.arguments.join(" ");
        if has(&line) && process.pid != me && !line.contains("janitor") && process.name != "kubectl" {
            found.push(format!("process {} ({line})", process.pid));
        }
    }
    for name in names_in(Path::new("/run/netns")) {
        if has(&name) {
            found.push(format!("network namespace {name}"));
        }
    }
    for line in fs::read_to_string("/proc/self/mounts").unwrap_or_default().lines() {
        if has(line) {
            found.push(format!("mount {line}"));
        }
    }
    for line in fs::read_to_string("/proc/net/unix").unwrap_or_default().lines() {
        if has(line) {
            found.push(format!("socket {line}"));
        }
    }
    let mut folders = vec![run_of(data)];
    // PVCs, the image cache and the journal are meant to stay.
    folders.extend(["nodes", "run"].map(|name| data.join(name)));
    folders
        .extend(names_in(Path::new("/sys/fs/cgroup")).into_iter().map(|name| Path::new("/sys/fs/cgroup").join(name)));
    folders.push("/run/runc".into());
    for folder in folders {
        walk(&folder, 0, &mut |path| {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            if has(&name) {
                found.push(format!("file {}", path.display()));
            }
        });
    }
    found.sort();
    found.dedup();
    found
}

/// The interfaces in each network namespace of the cluster, as `namespace/interface`.
pub fn interfaces(data: &Path) -> Vec<String> {
    let start = format!("vf-{}-", id_of(data));
    let mut found = Vec::new();
    for namespace in names_in(Path::new("/run/netns")).into_iter().filter(|name| name.starts_with(&start)) {
        let listed = Command::new("ip").args(["-n", &namespace, "-o", "link"]).output();
        for line in listed.map(|done| String::from_utf8_lossy(&done.stdout).into_owned()).unwrap_or_default().lines() {
            if let Some(name) = line.split(": ").nth(1) {
                found.push(format!("{namespace}/{}", name.split('@').next().unwrap_or(name)));
            }
        }
    }
    found.sort();
    found
}

/// What is left of a whole cluster outside of its data folder.
pub fn of_cluster(data: &Path) -> Vec<String> {
    let canonical = fs::canonicalize(data).unwrap_or_else(|_| data.to_owned());
    let run = run_of(data);
    let mut found =
        holding(data, &[&format!("vf-{}", id_of(data)), &run.to_string_lossy(), &canonical.to_string_lossy()]);
    found.retain(|line| !line.starts_with("file "));
    if run.exists() && !names_in(&run).is_empty() {
        found.push(format!("files in {}", run.display()));
    }
    found
}

/// Ends every process of a cluster and removes its namespaces, mounts and folders, its data folder too. For tests: a user's way
/// to take a cluster down is the program's own.
pub fn sweep(data: &Path) -> Result<()> {
    let Ok(canonical) = fs::canonicalize(data) else { return Ok(()) };
    let id = id_of(&canonical);
    let run = run_of(&canonical);
    let of_cluster = |process: &process::Process| {
        let line = process.arguments.join(" ");
        let ours = line.contains(&*canonical.to_string_lossy()) || line.contains(&*run.to_string_lossy());
        (ours || in_namespace(process.pid, &id))
            && !line.contains("janitor")
            && process.pid != std::process::id() as i32
    };
    for (signal, limit) in [(Signal::SIGTERM, 10), (Signal::SIGKILL, 10)] {
        let processes: Vec<_> = process::all().into_iter().filter(of_cluster).collect();
        for process in &processes {
            process::signal(process.pid, signal)?;
        }
        let gone = super::wait::until("the end of the cluster", Duration::from_secs(limit), || {
            let left = processes.iter().filter(|process| process::alive(process.pid)).count();
            Ok(if left == 0 { Ok(()) } else { Err(format!("{left} processes")) })
        });
        if gone.is_ok() && signal == Signal::SIGKILL {
            break;
        }
    }
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mut points: Vec<&str> = mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(1))
        .filter(|point| point.starts_with(&*run.to_string_lossy()) || point.starts_with(&*canonical.to_string_lossy()))
        .collect();
    points.sort_by_key(|point| std::cmp::Reverse(point.len()));
    for point in points {
        Command::new("umount").args(["-l", point]).output().context("start umount")?;
    }
    for name in names_in(Path::new("/run/netns")).into_iter().filter(|name| name.starts_with(&format!("vf-{id}-"))) {
        Command::new("ip").args(["netns", "delete", &name]).output().context("start ip")?;
    }
    for folder in [&run, &canonical] {
        if folder.exists() {
            fs::remove_dir_all(folder).with_context(|| format!("remove {}", folder.display()))?;
        }
    }
    Ok(())
}

/// Whether a process lives in one of a cluster's network namespaces.
fn in_namespace(pid: i32, id: &str) -> bool {
    use std::os::unix::fs::MetadataExt;
    let Ok(own) = fs::metadata(format!("/proc/{pid}/ns/net")) else { return false };
    names_in(Path::new("/run/netns"))
        .into_iter()
        .filter(|name| name.starts_with(&format!("vf-{id}-")))
        .filter_map(|name| fs::metadata(Path::new("/run/netns").join(name)).ok())
        .any(|namespace| namespace.ino() == own.ino())
}

fn names_in(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn walk(folder: &Path, depth: usize, visit: &mut dyn FnMut(&Path)) {
    // Deeper than anything of ours lies; a container's root file system is not searched to its end.
    if depth > 6 {
        return;
    }
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        visit(&entry.path());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            walk(&entry.path(), depth + 1, visit);
        }
    }
}
