//! What the machines of the node use, asked of their launchers when somebody wants to know, and told as KubeVirt tells it.
//!
//! A launcher that does not answer in time costs its own machine's figures, nothing else. Each scrape asks anew; nobody is asked in between.

use crate::{Launcher, Launchers, PodFacts, PodSource, launchers::Sockets, limits};
use futures::{StreamExt, stream};
use proto::agent::{MachineUsage, NodeUsage, UsageReply};
use proto::launcher::StatsReply;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use telemetry::metrics::{
    Counter, Def, Registry, Sheet,
    catalogue::{self as c, MORE},
};

/// Figures that are older are not told.
const FRESH: Duration = Duration::from_secs(12);
/// A scrape that comes so soon after another one gets the same figures.
const SOON: Duration = Duration::from_millis(500);

/// The figures of one machine, and whose they are.
struct Figures {
    pod: PodFacts,
    stats: StatsReply,
}

#[derive(Default)]
struct Last {
    all: Arc<Vec<Figures>>,
    at: Option<Instant>,
}

/// Asks the launchers of a node.
#[derive(Clone)]
pub struct Metrics(Arc<Inner>);

struct Inner {
    pods: Arc<dyn PodSource>,
    last: Mutex<Last>,
    /// Connections to launchers, by the UID of their pod.
    known: Mutex<HashMap<String, Arc<dyn Launcher>>>,
    /// One scrape asks at a time.
    turn: tokio::sync::Mutex<()>,
    silent: Counter,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Metrics {
    /// For the pods of this node; what they use is told by the registry from now on.
    pub fn new(registry: &Registry, node: String, pods: Arc<dyn PodSource>) -> Self {
        let inner = Arc::new(Inner {
            pods,
            last: Mutex::default(),
            known: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
            silent: registry.counter(&c::AGENT_SILENT),
        });
        let told = inner.clone();
        registry.source("machines", move |sheet| {
            let all = {
                let last = lock(&told.last);
                last.at.filter(|at| at.elapsed() < FRESH).map(|_| last.all.clone()).unwrap_or_default()
            };
            tell_node(sheet, &node, &self::node());
            let alive = all.iter().filter(|f| f.stats.alive).count();
            sheet.tell(&c::AGENT_DOMAINS, &[&node, "alive"], alive);
            sheet.tell(&c::AGENT_DOMAINS, &[&node, "absent"], all.len() - alive);
            for figures in all.iter().filter(|f| f.stats.alive) {
                Told { sheet, node: &node, figures, more: labels(&figures.stats) }.all();
            }
        });
        Self(inner)
    }

    /// Asks all launchers; returns when each has answered, or has had its time.
    pub async fn collect(&self) {
        let _turn = self.0.turn.lock().await;
        if lock(&self.0.last).at.is_some_and(|at| at.elapsed() < SOON) {
            return;
        }
        let pods = self.0.pods.pods();
        lock(&self.0.known).retain(|uid, _| pods.iter().any(|pod| pod.pod_uid == *uid));
        let asked = pods.into_iter().filter(|pod| pod.running).map(|pod| self.0.clone().ask(pod));
        let all: Vec<Figures> =
            stream::iter(asked).buffer_unordered(limits::STATS_AT_ONCE).filter_map(|f| async { f }).collect().await;
        *lock(&self.0.last) = Last { all: Arc::new(all), at: Some(Instant::now()) };
    }

    /// What the machines of a namespace (of all, where it is empty) use now, and the node.
    pub(crate) async fn usage(&self, namespace: &str) -> UsageReply {
        self.collect().await;
        let all = lock(&self.0.last).all.clone();
        let wanted = |f: &&Figures| f.stats.alive && (namespace.is_empty() || f.pod.namespace == namespace);
        UsageReply { node: Some(node()), machines: all.iter().filter(wanted).map(usage).collect() }
    }
}

/// What one machine uses.
fn usage(figures: &Figures) -> MachineUsage {
    let (pod, s) = (&figures.pod, &figures.stats);
    let memory = s.guest_memory.as_ref();
    MachineUsage {
        namespace: pod.namespace.clone(),
        name: pod.vmi_name.clone(),
        vmi_uid: pod.vmi_uid.clone(),
        cpu_seconds: s.user_seconds + s.system_seconds,
        cpus: u32::try_from(s.vcpus.len()).unwrap_or(u32::MAX),
        memory_bytes: s.memory_bytes,
        resident_bytes: s.resident_bytes,
        guest_used_bytes: memory.and_then(|m| m.total_bytes?.checked_sub(m.available_bytes?)),
        read_bytes: s.disks.iter().map(|d| d.read_bytes).sum(),
        write_bytes: s.disks.iter().map(|d| d.write_bytes).sum(),
        receive_bytes: s.nics.iter().map(|n| n.receive_bytes).sum(),
        transmit_bytes: s.nics.iter().map(|n| n.transmit_bytes).sum(),
    }
}

/// What the whole machine of the agent uses, as its kernel says.
fn node() -> NodeUsage {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{name}")).unwrap_or_default();
    node_of(&read("stat"), &read("meminfo"), &read("loadavg"))
}

fn tell_node(sheet: &mut Sheet, name: &str, usage: &NodeUsage) {
    sheet.tell(&c::NODE_CPU, &[name], usage.cpu_seconds);
    sheet.tell(&c::NODE_CPUS, &[name], u64::from(usage.cpus));
    sheet.tell(&c::NODE_MEMORY, &[name], usage.memory_bytes);
    sheet.tell(&c::NODE_AVAILABLE, &[name], usage.available_bytes);
    if let Some(one) = usage.load.first() {
        sheet.tell(&c::NODE_LOAD, &[name], *one);
    }
}

/// The kernel counts processor time in hundredths of a second, whatever its own clock.
const TICKS: f64 = 100.0;

fn node_of(stat: &str, meminfo: &str, loadavg: &str) -> NodeUsage {
    // user nice system idle iowait irq softirq steal: all but waiting is use. What guests take is in user already.
    let used = |line: &str| -> u64 {
        let all: Vec<u64> = line.split_ascii_whitespace().skip(1).filter_map(|n| n.parse().ok()).take(8).collect();
        all.iter().enumerate().filter(|(i, _)| !matches!(i, 3 | 4)).map(|(_, n)| n).sum()
    };
    let is_one =
        |line: &&str| line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    let memory = |key: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        let kib = line.and_then(|l| l.split_ascii_whitespace().next()?.parse::<u64>().ok());
        kib.unwrap_or_default().saturating_mul(1024)
    };
    NodeUsage {
        cpu_seconds: stat.lines().next().map_or(0, used) as f64 / TICKS,
        cpus: u32::try_from(stat.lines().filter(is_one).count()).unwrap_or(u32::MAX),
        memory_bytes: memory("MemTotal"),
        available_bytes: memory("MemAvailable"),
        load: loadavg.split_ascii_whitespace().take(3).filter_map(|n| n.parse().ok()).collect(),
    }
}

impl Inner {
    async fn ask(self: Arc<Self>, pod: PodFacts) -> Option<Figures> {
        let known = lock(&self.known).get(&pod.pod_uid).cloned();
        let asked = async {
            let launcher = match known {
                Some(launcher) => launcher,
                None => Sockets.connect(&pod).await.ok()?,
            };
            let stats = launcher.stats().await.ok()?;
            lock(&self.known).insert(pod.pod_uid.clone(), launcher);
            Some(stats)
        };
        match tokio::time::timeout(limits::STATS, asked).await.ok().flatten() {
            Some(stats) => Some(Figures { pod, stats }),
            None => {
                lock(&self.known).remove(&pod.pod_uid);
                self.silent.add(&[]);
                None
            }
        }
    }
}

/// The labels of a machine as Prometheus takes them; KubeVirt's way to spell them.
fn labels(stats: &StatsReply) -> Vec<(String, String)> {
    let mut all: Vec<_> = stats.labels.iter().collect();
    all.sort();
    let spelled = |name: &str| -> String {
        name.chars().map(|ch| if ch.is_ascii_alphanumeric() || ch == '_' { ch } else { '_' }).collect()
    };
    let mut out: Vec<(String, String)> = vec![];
    for (name, value) in all {
        let name = format!("kubernetes_vmi_label_{}", spelled(name));
        // Two labels that are spelled alike would be one label twice, which no scraper takes.
        if out.len() < MORE && out.iter().all(|(known, _)| *known != name) {
            out.push((name, value.clone()));
        }
    }
    out
}

/// The figures of one machine on their way to the sheet.
struct Told<'a> {
    sheet: &'a mut Sheet,
    node: &'a str,
    figures: &'a Figures,
    more: Vec<(String, String)>,
}

impl Told<'_> {
    fn tell(&mut self, def: &'static Def, labels: &[&str], value: impl Into<telemetry::metrics::Value>) {
        let pod = &self.figures.pod;
        let all = [&[self.node, pod.namespace.as_str(), pod.vmi_name.as_str()], labels].concat();
        self.sheet.tell_more(def, &all, &self.more, value);
    }

    fn some(&mut self, def: &'static Def, value: Option<u64>) {
        if let Some(value) = value {
            self.tell(def, &[], value);
        }
    }

    fn all(mut self) {
        let s = &self.figures.stats;
        self.tell(&c::CPU, &[], s.user_seconds + s.system_seconds);
        self.tell(&c::CPU_USER, &[], s.user_seconds);
        self.tell(&c::CPU_SYSTEM, &[], s.system_seconds);
        for v in &s.vcpus {
            let id = v.id.to_string();
            self.tell(&c::VCPU, &[&id, if s.paused { "offline" } else { "running" }], v.seconds);
            self.tell(&c::VCPU_DELAY, &[&id], v.delay_seconds);
        }
        self.tell(&c::MEMORY_DOMAIN, &[], s.memory_bytes);
        self.tell(&c::MEMORY_RESIDENT, &[], s.resident_bytes);
        self.some(&c::MEMORY_BALLOON, s.balloon_bytes);
        if let Some(m) = &s.guest_memory {
            self.some(&c::MEMORY_AVAILABLE, m.total_bytes);
            self.some(&c::MEMORY_UNUSED, m.free_bytes);
            self.some(&c::MEMORY_USABLE, m.available_bytes);
            self.some(&c::MEMORY_CACHED, m.cache_bytes);
            self.some(&c::FAULTS_MAJOR, m.major_faults);
            self.some(&c::FAULTS_MINOR, m.minor_faults);
            self.some(&c::SWAP_IN, m.swap_in_bytes);
            self.some(&c::SWAP_OUT, m.swap_out_bytes);
        }
        let seconds = |ns: u64| Duration::from_nanos(ns).as_secs_f64();
        for d in &s.disks {
            let drive = [d.name.as_str()];
            self.tell(&c::DISK_READS, &drive, d.reads);
            self.tell(&c::DISK_WRITES, &drive, d.writes);
            self.tell(&c::DISK_READ_BYTES, &drive, d.read_bytes);
            self.tell(&c::DISK_WRITE_BYTES, &drive, d.write_bytes);
            self.tell(&c::DISK_READ_TIME, &drive, seconds(d.read_ns));
            self.tell(&c::DISK_WRITE_TIME, &drive, seconds(d.write_ns));
            self.tell(&c::DISK_FLUSHES, &drive, d.flushes);
            self.tell(&c::DISK_FLUSH_TIME, &drive, seconds(d.flush_ns));
        }
        for n in &s.nics {
            let nic = [n.name.as_str()];
            self.tell(&c::NET_RX_BYTES, &nic, n.receive_bytes);
            self.tell(&c::NET_TX_BYTES, &nic, n.transmit_bytes);
            self.tell(&c::NET_RX_PACKETS, &nic, n.receive_packets);
            self.tell(&c::NET_TX_PACKETS, &nic, n.transmit_packets);
            self.tell(&c::NET_RX_ERRORS, &nic, n.receive_errors);
            self.tell(&c::NET_TX_ERRORS, &nic, n.transmit_errors);
            self.tell(&c::NET_RX_DROPPED, &nic, n.receive_dropped);
            self.tell(&c::NET_TX_DROPPED, &nic, n.transmit_dropped);
            self.tell(&c::NET_TRAFFIC, &[&n.name, "rx"], n.receive_bytes);
            self.tell(&c::NET_TRAFFIC, &[&n.name, "tx"], n.transmit_bytes);
        }
        let mut told = std::collections::BTreeSet::new();
        for f in &s.file_systems {
            // A guest may say what it likes; a series may be told once.
            if told.insert((&f.disk, &f.mount_point, &f.kind)) {
                let place = [f.disk.as_str(), f.mount_point.as_str(), f.kind.as_str()];
                self.tell(&c::FS_CAPACITY, &place, f.total_bytes);
                self.tell(&c::FS_USED, &place, f.used_bytes);
            }
        }
        if let [one, five, fifteen] = s.load[..] {
            self.tell(&c::LOAD_1, &[], one);
            self.tell(&c::LOAD_5, &[], five);
            self.tell(&c::LOAD_15, &[], fifteen);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_read_from_its_kernel() {
        let stat = "cpu  100 20 30 4000 50 6 7 8 90 10\ncpu0 50 0 0 0\ncpu1 50 0 0 0\nintr 1 2\n";
        let usage = node_of(stat, "MemTotal:  2048 kB\nMemFree: 1 kB\nMemAvailable:  1024 kB\n", "0.5 1.25 2 1/2 3\n");
        let expected = NodeUsage {
            cpu_seconds: 1.71,
            cpus: 2,
            memory_bytes: 2 << 20,
            available_bytes: 1 << 20,
            load: vec![0.5, 1.25, 2.0],
        };
        assert_eq!(usage, expected);
        assert_eq!(node_of("", "MemTotal: x", ""), NodeUsage::default());
        assert!(node().memory_bytes > node().available_bytes, "the real one");
    }

    #[test]
    fn labels_are_spelled_once_and_bounded() {
        let mut stats = StatsReply::default();
        for (name, value) in [("app.kubernetes.io/name", "a"), ("app_kubernetes_io_name", "b"), ("x", "y")] {
            stats.labels.insert(name.into(), value.into());
        }
        let told = labels(&stats);
        assert_eq!(told.len(), 2);
        assert_eq!(told[0], ("kubernetes_vmi_label_app_kubernetes_io_name".to_owned(), "a".to_owned()));
        for n in 0..10_000 {
            stats.labels.insert(format!("l{n}"), "v".into());
        }
        assert_eq!(labels(&stats).len(), MORE);
    }
}
