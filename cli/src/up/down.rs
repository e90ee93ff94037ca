//! Taking a cluster down: guests, node agents, etcd, networks. Disks, images, objects and journals stay.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use anyhow::bail;
use embedded::lock::{Lock, LockError};
use embedded::netns::Netns;
use embedded::procs::ProcessId;
use nix::sys::signal::Signal;

use super::agents;
use super::layout::{Layout, Node, is_data_folder};
use crate::args;

/// What is killed is gone after this.
const KILL_LIMIT: Duration = Duration::from_secs(10);

/// `virtfold down`.
pub fn run(options: &args::Down) -> anyhow::Result<u8> {
    super::require_root()?;
    let layout = Layout::find(&options.data_dir)?;
    if !is_data_folder(&layout.data) {
        bail!("{} is no data folder of virtfold", layout.data.display());
    }
    let _lock = match Lock::take(&layout.data) {
        Ok(lock) => lock,
        Err(LockError::Held { folder, holder }) => {
            bail!("{} is in use by {holder}: stop `virtfold up` first (ctrl-C, or SIGTERM to it)", folder.display())
        }
        Err(error) => return Err(error.into()),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let guests = end_guests(&layout, Duration::from_secs(options.grace)).await;
        end_rest(&layout).await?;
        println!(
            "virtfold: took down {guests} guest{}, node agents and networks of {}",
            if guests == 1 { "" } else { "s" },
            layout.data.display()
        );
        Ok(0)
    })
}

/// The nodes that the cluster ever had.
fn nodes(layout: &Layout) -> Vec<Node> {
    let entries = std::fs::read_dir(layout.data("nodes")).into_iter().flatten().flatten();
    let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.strip_prefix("node-")?.parse().ok();
    entries.filter_map(number).map(|n| layout.node(n)).collect()
}

/// Processes in the given network namespaces, with their command lines.
fn processes_in(namespaces: &[Netns]) -> Vec<(ProcessId, String)> {
    let inodes: BTreeSet<u64> =
        namespaces.iter().filter_map(|n| std::fs::metadata(n.path()).ok()).map(|m| m.ino()).collect();
    let own = std::process::id().cast_signed();
    std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| *pid != own)
        .filter(|pid| std::fs::metadata(format!("/proc/{pid}/ns/net")).is_ok_and(|m| inodes.contains(&m.ino())))
        .filter_map(|pid| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            Some((ProcessId::of(pid)?, String::from_utf8_lossy(&line).replace('\0', " ")))
        })
        .collect()
}

/// The namespaces of pods.
fn pods(layout: &Layout) -> Vec<Netns> {
    let own: BTreeSet<String> = nodes(layout).into_iter().map(|n| n.netns).collect();
    Netns::all(&layout.netns_prefix())
        .into_iter()
        .filter(|n| *n != layout.cluster_netns() && !own.contains(n.name()))
        .collect()
}

/// Asks every launcher to shut its guest down, and kills what is left after `grace`. How many guests there were.
pub async fn end_guests(layout: &Layout, grace: Duration) -> usize {
    let launchers: Vec<_> = processes_in(&pods(layout))
        .into_iter()
        .filter(|(_, line)| line.split(' ').nth(1) == Some("launcher"))
        .map(|(id, _)| id)
        .collect();
    for launcher in &launchers {
        launcher.signal(Signal::SIGTERM);
    }
    let end = std::time::Instant::now() + grace;
    for launcher in &launchers {
        launcher.gone_within(end.saturating_duration_since(std::time::Instant::now())).await;
    }
    for (process, _) in processes_in(&pods(layout)) {
        process.signal(Signal::SIGKILL);
    }
    for (process, _) in processes_in(&pods(layout)) {
        process.gone_within(KILL_LIMIT).await;
    }
    launchers.len()
}

/// Ends everything else and removes namespaces and the run folder.
pub async fn end_rest(layout: &Layout) -> anyhow::Result<()> {
    let ends = nodes(layout).into_iter().map(|node| async move { agents::stop(&node).await });
    futures::future::join_all(ends).await;
    embedded::etcd::end_orphan(&layout.etcd()).await;
    let namespaces = Netns::all(&layout.netns_prefix());
    for (process, line) in processes_in(&namespaces) {
        tracing::warn!(pid = process.pid, line, "a process is left in the cluster's network; ending it");
        process.end(Duration::from_secs(2)).await;
    }
    for node in nodes(layout) {
        remove_containers(&node.run.join(".runc")).await;
    }
    unmount_below(&layout.run).await;
    for namespace in namespaces {
        namespace.remove().await?;
    }
    match std::fs::remove_dir_all(&layout.run) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            bail!("cannot remove {}: {error}", layout.run.display())
        }
        _ => Ok(()),
    }
}

async fn remove_containers(root: &Path) {
    for entry in std::fs::read_dir(root).into_iter().flatten().flatten() {
        let _ = tokio::process::Command::new("runc")
            .arg("--root")
            .arg(root)
            .args(["delete", "--force"])
            .arg(entry.file_name())
            .output()
            .await;
    }
}

async fn unmount_below(folder: &Path) {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mut points: Vec<&str> =
        mounts.lines().filter_map(|l| l.split(' ').nth(1)).filter(|p| Path::new(p).starts_with(folder)).collect();
    points.sort_unstable_by_key(|p| std::cmp::Reverse(p.len()));
    for point in points {
        let _ = tokio::process::Command::new("umount").args(["-l", point]).output().await;
    }
}
