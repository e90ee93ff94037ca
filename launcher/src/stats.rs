//! What the machine uses: asked of the hypervisor, of the kernel and of the guest's agent at the moment when somebody wants to know.
//!
//! Nothing is collected in between, but for the guest's own figures about its memory: its balloon driver gives them every ten seconds from
//! the first question on.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use proto::launcher::{DiskStats, FileSystemStats, GuestMemory, NicStats, StatsReply, VcpuStats};
use serde_json::{Value, json};

use crate::guest::Agent;
use crate::hypervisor::{Domain, Figures};

/// The agent gets this to answer one of our questions: others wait behind it.
const AGENT: Duration = Duration::from_secs(2);
/// Of each list that a guest has a say in.
const MANY: usize = 64;
/// Bytes of a name that a guest says.
const NAME: usize = 128;

/// What is known without asking.
#[derive(Clone, Debug, Default)]
pub(crate) struct Known {
    /// Names of the interfaces, in their order.
    pub nics: Vec<String>,
    /// Of the VMI.
    pub labels: BTreeMap<String, String>,
    /// The processors are stopped.
    pub paused: bool,
}

/// Asks them all. Who does not answer is left out.
pub(crate) async fn collect(domain: &dyn Domain, agent: Option<Agent>, known: Known) -> StatsReply {
    let pid = domain.pid();
    let (figures, (file_systems, load)) = tokio::join!(domain.figures(), of_agent(agent));
    let figures = figures.unwrap_or_else(|error| {
        tracing::debug!(%error, "the hypervisor gives no figures");
        Figures::default()
    });
    let process = PathBuf::from(format!("/proc/{pid}"));
    let (user_seconds, system_seconds, resident_bytes) = cpu_and_memory(&process.join("stat")).unwrap_or_default();
    let vcpus = figures.threads.iter().enumerate().filter_map(|(id, thread)| {
        let task = process.join("task").join(thread.to_string());
        let (user, system, _) = cpu_and_memory(&task.join("stat"))?;
        let delay_seconds = delay(&task.join("schedstat")).unwrap_or_default();
        Some(VcpuStats { id: u32::try_from(id).ok()?, seconds: user + system, delay_seconds })
    });
    StatsReply {
        alive: true,
        user_seconds,
        system_seconds,
        resident_bytes,
        memory_bytes: figures.memory,
        balloon_bytes: figures.balloon,
        guest_memory: figures.guest,
        vcpus: vcpus.collect(),
        disks: figures.disks,
        nics: nics(&std::fs::read_to_string("/proc/net/dev").unwrap_or_default(), &known.nics),
        file_systems,
        load,
        labels: known.labels.into_iter().collect(),
        paused: known.paused,
    }
}

/// Seconds in user mode and in the kernel, and bytes in memory, of a `stat` file of proc(5).
fn cpu_and_memory(file: &Path) -> Option<(f64, f64, u64)> {
    let text = std::fs::read_to_string(file).ok()?;
    // The name stands in brackets and may contain anything.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let number = |n: usize| fields.get(n)?.parse::<u64>().ok();
    let of = |variable| nix::unistd::sysconf(variable).ok().flatten().and_then(|v| u64::try_from(v).ok());
    let ticks = of(nix::unistd::SysconfVar::CLK_TCK)? as f64;
    let page = of(nix::unistd::SysconfVar::PAGE_SIZE)?;
    Some((number(11)? as f64 / ticks, number(12)? as f64 / ticks, number(21)? * page))
}

/// Seconds that a thread was ready and did not run, of its `schedstat`.
fn delay(file: &Path) -> Option<f64> {
    let text = std::fs::read_to_string(file).ok()?;
    Some(Duration::from_nanos(text.split_whitespace().nth(1)?.parse().ok()?).as_secs_f64())
}

/// The taps of `/proc/net/dev`, from the guest's side: what the kernel receives, the guest has sent.
fn nics(text: &str, names: &[String]) -> Vec<NicStats> {
    let devices: BTreeMap<&str, Vec<u64>> = text
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(name, numbers)| (name.trim(), numbers.split_whitespace().filter_map(|n| n.parse().ok()).collect()))
        .collect();
    let of_tap = |(n, name): (usize, &String)| {
        let [tb, tp, te, td, _, _, _, _, rb, rp, re, rd, ..] = devices.get(format!("tap{n}").as_str())?[..] else {
            return None;
        };
        Some(NicStats {
            name: name.clone(),
            receive_bytes: rb,
            receive_packets: rp,
            receive_errors: re,
            receive_dropped: rd,
            transmit_bytes: tb,
            transmit_packets: tp,
            transmit_errors: te,
            transmit_dropped: td,
        })
    };
    names.iter().enumerate().filter_map(of_tap).collect()
}

/// File systems and load, as far as the agent tells.
async fn of_agent(agent: Option<Agent>) -> (Vec<FileSystemStats>, Vec<f64>) {
    let Some(agent) = agent else { return Default::default() };
    let mounted = agent.call_within("guest-get-fsinfo", AGENT).await.unwrap_or_default();
    // Agents older than version 10 do not know it.
    let load = agent.call_within("guest-get-load", AGENT).await.unwrap_or_default();
    (file_systems(&mounted), loads(&load))
}

fn text(value: &Value, key: &str) -> String {
    value.get(key).and_then(Value::as_str).unwrap_or_default().chars().take(NAME).collect()
}

fn file_systems(answer: &Value) -> Vec<FileSystemStats> {
    let all = answer.as_array().into_iter().flatten();
    let known = all.filter_map(|f| {
        let number = |key| f.get(key).and_then(Value::as_u64);
        Some(FileSystemStats {
            disk: text(f, "name"),
            mount_point: text(f, "mountpoint"),
            kind: text(f, "type"),
            total_bytes: number("total-bytes")?,
            used_bytes: number("used-bytes")?,
        })
    });
    known.take(MANY).collect()
}

fn loads(answer: &Value) -> Vec<f64> {
    let all = ["load1m", "load5m", "load15m"].map(|key| answer.get(key).and_then(Value::as_f64));
    all.into_iter().collect::<Option<Vec<f64>>>().unwrap_or_default()
}

/// What QEMU says of its disks.
pub(crate) fn disks(answer: &Value) -> Vec<DiskStats> {
    let all = answer.as_array().into_iter().flatten();
    let known = all.filter_map(|d| {
        let name = d.get("qdev")?.as_str()?.split('/').find_map(|part| part.strip_prefix("ua-"))?;
        let number = |key: &str| d.pointer(&format!("/stats/{key}")).and_then(Value::as_u64).unwrap_or_default();
        Some(DiskStats {
            name: name.to_owned(),
            reads: number("rd_operations"),
            writes: number("wr_operations"),
            read_bytes: number("rd_bytes"),
            write_bytes: number("wr_bytes"),
            read_ns: number("rd_total_time_ns"),
            write_ns: number("wr_total_time_ns"),
            flushes: number("flush_operations"),
            flush_ns: number("flush_total_time_ns"),
        })
    });
    known.take(MANY).collect()
}

/// What QEMU says of the guest's memory, as the balloon driver told it last; nothing where it never has.
pub(crate) fn guest_memory(answer: &Value) -> Option<GuestMemory> {
    if answer.get("last-update").and_then(Value::as_u64).unwrap_or_default() == 0 {
        return None;
    }
    // All ones: the driver does not tell.
    let number =
        |key: &str| answer.pointer(&format!("/stats/{key}")).and_then(Value::as_u64).filter(|v| *v != u64::MAX);
    Some(GuestMemory {
        total_bytes: number("stat-total-memory"),
        free_bytes: number("stat-free-memory"),
        available_bytes: number("stat-available-memory"),
        cache_bytes: number("stat-disk-caches"),
        major_faults: number("stat-major-faults"),
        minor_faults: number("stat-minor-faults"),
        swap_in_bytes: number("stat-swap-in"),
        swap_out_bytes: number("stat-swap-out"),
    })
}

/// The threads of the virtual processors, in their order.
pub(crate) fn threads(answer: &Value) -> Vec<u64> {
    let mut all: Vec<(u64, u64)> = answer
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|c| Some((c.get("cpu-index")?.as_u64()?, c.get("thread-id")?.as_u64()?)))
        .collect();
    all.sort_unstable();
    all.into_iter().map(|(_, thread)| thread).collect()
}

/// The question that makes the balloon driver tell every ten seconds.
pub(crate) fn polling() -> Value {
    json!({"path": BALLOON, "property": "guest-stats-polling-interval", "value": 10})
}

/// Where QEMU keeps the balloon.
pub(crate) const BALLOON: &str = "/machine/peripheral/balloon0";

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_the_kernel_says_of_a_tap_is_turned_round() {
        let text = "Inter-|   Receive                                                |  Transmit\n \
            face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n\
            \x20   lo:    1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n  tap0: 100 2 3 4 0 0 0 0 500 6 7 8 0 0 0 0\n";
        let all = nics(text, &["default".into(), "other".into()]);
        assert_eq!(all.len(), 1);
        let n = &all[0];
        assert_eq!((n.name.as_str(), n.transmit_bytes, n.transmit_packets), ("default", 100, 2));
        assert_eq!((n.receive_bytes, n.receive_packets, n.receive_errors, n.receive_dropped), (500, 6, 7, 8));
    }

    #[test]
    fn what_a_guest_says_is_cut() {
        let many: Vec<Value> = (0..1_000_000)
            .map(|n| {
                json!({"name": "vda1", "mountpoint": format!("/{n}{}", "x".repeat(if n < 99 { 5_000 } else { 0 })),
                "type": "ext4", "total-bytes": 5, "used-bytes": 1})
            })
            .collect();
        let all = file_systems(&Value::Array(many));
        assert_eq!(all.len(), MANY);
        assert!(all.iter().all(|f| f.mount_point.len() <= NAME));
        assert!(file_systems(&json!({"not": "a list"})).is_empty());
        // Without sizes (pseudo file systems) there is nothing to tell.
        assert!(file_systems(&json!([{"name": "proc", "mountpoint": "/proc", "type": "proc"}])).is_empty());
        assert_eq!(loads(&json!({"load1m": 0.5, "load5m": 1.0, "load15m": 2.0})), [0.5, 1.0, 2.0]);
        assert!(loads(&json!({"load1m": 0.5})).is_empty());
    }

    #[test]
    fn what_qemu_says_is_read() {
        let answer = json!([{"device": "", "qdev": "/machine/peripheral/ua-system/virtio-backend",
            "stats": {"rd_operations": 3, "rd_bytes": 1024, "wr_total_time_ns": 7}}, {"device": "floppy"}]);
        let all = disks(&answer);
        assert_eq!((all.len(), all[0].name.as_str(), all[0].reads, all[0].read_bytes), (1, "system", 3, 1024));
        assert_eq!(threads(&json!([{"cpu-index": 1, "thread-id": 8}, {"cpu-index": 0, "thread-id": 7}])), [7, 8]);
        let memory = json!({"last-update": 5, "stats": {"stat-total-memory": 9, "stat-swap-in": u64::MAX}});
        let told = guest_memory(&memory).unwrap();
        assert_eq!((told.total_bytes, told.swap_in_bytes, told.free_bytes), (Some(9), None, None));
        assert!(guest_memory(&json!({"last-update": 0, "stats": {"stat-total-memory": 9}})).is_none());
    }

    #[test]
    fn a_process_has_used_cpu_and_memory() {
        let (user, system, resident) = cpu_and_memory(Path::new("/proc/self/stat")).unwrap();
        assert!(user + system >= 0.0 && resident > 1 << 20);
        assert!(delay(Path::new("/proc/self/schedstat")).is_some());
    }
}
