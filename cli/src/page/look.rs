//! What the page shows of the cluster: watched while somebody looks, and forgotten a while after, so that a page that nobody
//! has open costs nothing.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ApiResource, DynamicObject};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, ResourceExt};
use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::machines::{self, Key, Load, Machine, Meter, Node};

/// How often machines and nodes are asked what they use.
const ASKED: Duration = Duration::from_secs(2);
/// How long what was seen is kept when nobody looks any more.
const LINGER: Duration = Duration::from_secs(30);
/// How long a first look waits for all objects.
const PATIENCE: Duration = Duration::from_secs(10);
/// Looks that are remembered of what a processor did.
const LOOKS: usize = 60;
/// Statuses that are remembered of a machine.
const STATUSES: usize = 100;

/// The kinds that are watched.
const VMS: usize = 0;
const VMIS: usize = 1;
const NODES: usize = 2;

/// What something was called, since when (milliseconds since 1970).
pub type Called = (i64, String);

/// Now, in milliseconds since 1970.
pub fn now() -> i64 {
    Timestamp::now().as_millisecond()
}

/// A machine, as it is shown.
#[derive(Debug, Clone, Default)]
pub struct MachineSeen {
    /// What its objects say.
    pub machine: Machine,
    /// What it uses.
    pub load: Option<Load>,
    /// Its processors in the last looks, newest last.
    pub cpu: Vec<f64>,
    /// What it was called, newest last.
    pub called: Vec<Called>,
    /// The trace of the last change of its spec.
    pub trace: String,
}

/// A node, as it is shown.
#[derive(Debug, Clone, Default)]
pub struct NodeSeen {
    /// What its object says.
    pub node: Node,
    /// What it uses.
    pub load: Option<Load>,
    /// Its processors in the last looks, newest last.
    pub cpu: Vec<f64>,
}

/// All of it at one time.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// Machines, by namespace and name.
    pub machines: Vec<MachineSeen>,
    /// Nodes, by name.
    pub nodes: Vec<NodeSeen>,
    /// What is not known, and why.
    pub gaps: Vec<String>,
    /// The time.
    pub now: i64,
}

#[derive(Default)]
struct Seen {
    objects: [BTreeMap<Key, Value>; 3],
    synced: [bool; 3],
    /// Why a watch does not go on.
    troubles: [Option<String>; 3],
    unmeasured: Option<String>,
    meter: Meter,
    cpu: BTreeMap<Key, VecDeque<f64>>,
    called: BTreeMap<Key, Vec<Called>>,
}

/// Objects that are watched, as long as this is held.
pub struct Watching {
    seen: Arc<Mutex<Seen>>,
    changed: watch::Sender<u64>,
    _tasks: Vec<AbortOnDropHandle<()>>,
}

/// What is watched, and when somebody looked last.
type Used = (Arc<Watching>, Instant);

/// The way to what is watched.
#[derive(Clone)]
pub struct Look {
    client: Client,
    current: Arc<Mutex<Option<Used>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Look {
    /// Of the cluster that the client reaches.
    pub fn new(client: Client) -> Self {
        Self { client, current: Arc::default() }
    }

    /// What is watched; begins with it where nobody looked.
    pub async fn watching(&self) -> Arc<Watching> {
        let watching = {
            let mut current = lock(&self.current);
            let watching = match current.take() {
                Some((watching, _)) => watching,
                None => Arc::new(Watching::start(&self.client)),
            };
            *current = Some((watching.clone(), Instant::now()));
            watching
        };
        let mut changed = watching.changed.subscribe();
        let synced = changed.wait_for(|_| lock(&watching.seen).synced.iter().all(|s| *s));
        // What is missing then is said on the page.
        let _ = tokio::time::timeout(PATIENCE, synced).await.map(|waited| waited.map(drop));
        watching
    }

    /// Forgets what nobody has looked at for a while, again and again.
    pub async fn forget(self, stop: CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(LINGER / 3)).await.is_some() {
            self.forget_idle(LINGER);
        }
    }

    /// Forgets what nobody has looked at for so long.
    pub(super) fn forget_idle(&self, idle: Duration) {
        let mut current = lock(&self.current);
        if current.as_ref().is_some_and(|(w, used)| Arc::strong_count(w) == 1 && used.elapsed() >= idle) {
            *current = None;
        }
    }
}

impl Watching {
    fn start(client: &Client) -> Self {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let changed = watch::Sender::new(0);
        let kind = |group: &str, version: &str, kind: &str, plural: &str| ApiResource {
            group: group.into(),
            version: version.into(),
            api_version: [group, version].into_iter().filter(|p| !p.is_empty()).collect::<Vec<_>>().join("/"),
            kind: kind.into(),
            plural: plural.into(),
        };
        let kinds = [
            kind("kubevirt.io", "v1", "VirtualMachine", "virtualmachines"),
            kind("kubevirt.io", "v1", "VirtualMachineInstance", "virtualmachineinstances"),
            kind("", "v1", "Node", "nodes"),
        ];
        let spawn = |task| AbortOnDropHandle::new(tokio::spawn(task));
        let mut tasks: Vec<AbortOnDropHandle<()>> = Vec::new();
        for (index, kind) in kinds.into_iter().enumerate() {
            tasks.push(AbortOnDropHandle::new(tokio::spawn(follow(
                client.clone(),
                kind,
                index,
                seen.clone(),
                changed.clone(),
            ))));
        }
        tasks.push(spawn(measure(client.clone(), seen.clone(), changed.clone())));
        Self { seen, changed, _tasks: tasks }
    }

    /// Tells of each change.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// All that is seen now.
    pub fn snapshot(&self) -> Snapshot {
        lock(&self.seen).snapshot()
    }
}

async fn follow(client: Client, kind: ApiResource, index: usize, seen: Arc<Mutex<Seen>>, changed: watch::Sender<u64>) {
    let api = Api::<DynamicObject>::all_with(client, &kind);
    let mut events = watcher(api, watcher::Config::default()).default_backoff().boxed();
    let mut fresh = BTreeMap::new();
    while let Some(event) = events.next().await {
        let mut seen = lock(&seen);
        if event.is_ok() {
            seen.troubles[index] = None;
        }
        match event {
            Ok(watcher::Event::Init) => fresh = BTreeMap::new(),
            Ok(watcher::Event::InitApply(object)) => {
                let (key, value) = trimmed(object);
                fresh.insert(key, value);
                continue;
            }
            Ok(watcher::Event::InitDone) => {
                seen.objects[index] = std::mem::take(&mut fresh);
                seen.synced[index] = true;
            }
            Ok(watcher::Event::Apply(object)) => {
                let (key, value) = trimmed(object);
                seen.objects[index].insert(key, value);
            }
            Ok(watcher::Event::Delete(object)) => {
                seen.objects[index].remove(&trimmed(object).0);
            }
            Err(error) => seen.troubles[index] = Some(format!("{} cannot be read: {error}", kind.plural)),
        }
        seen.call(now());
        drop(seen);
        changed.send_modify(|n| *n += 1);
    }
}

/// The part of an object that is shown.
fn trimmed(object: DynamicObject) -> (Key, Value) {
    let key = (object.namespace().unwrap_or_default(), object.name_any());
    let meta = &object.metadata;
    let trace = meta.annotations.as_ref().and_then(|a| a.get(api::names::ANN_TRACEPARENT)).cloned();
    let status = object.data.get("status").cloned().unwrap_or_default();
    let value = serde_json::json!({
        "metadata": {
            "namespace": meta.namespace, "name": meta.name, "uid": meta.uid, "labels": meta.labels,
            "creationTimestamp": meta.creation_timestamp, "trace": trace,
        },
        "spec": {"unschedulable": object.data.pointer("/spec/unschedulable")},
        "status": status,
    });
    (key, value)
}

async fn measure(client: Client, seen: Arc<Mutex<Seen>>, changed: watch::Sender<u64>) {
    let mut ticks = tokio::time::interval(ASKED);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let said = machines::usage(&client, None).await;
        {
            let mut seen = lock(&seen);
            match said {
                Ok(usage) => {
                    seen.meter.take(&usage);
                    seen.unmeasured = None;
                }
                Err(error) => {
                    seen.meter = Meter::default();
                    seen.unmeasured = Some(format!("what machines use is not known: {error:#}"));
                }
            }
            seen.remember();
        }
        changed.send_modify(|n| *n += 1);
    }
}

impl Seen {
    fn machines(&self) -> Vec<Machine> {
        let all = |index: usize| self.objects[index].values().cloned().collect::<Vec<_>>();
        machines::machines(&all(VMS), &all(VMIS))
    }

    /// Remembers what machines are called, where that has changed.
    fn call(&mut self, now: i64) {
        // Before all is there, a machine may seem to have no instance.
        if !self.synced.iter().all(|s| *s) {
            return;
        }
        let machines = self.machines();
        self.called.retain(|key, _| self.objects[VMS].contains_key(key) || self.objects[VMIS].contains_key(key));
        for machine in machines {
            let key = machine.key();
            let passed = self.objects[VMIS].get(&key).map(passed).unwrap_or_default();
            let called = self.called.entry(key).or_insert(passed);
            if called.last().is_none_or(|(_, status)| *status != machine.status) {
                // Until somebody looked, it was called so since its instance entered the phase.
                let since = match called.pop_if(|(_, status)| *status == machine.phase && status != "Running") {
                    Some((since, _)) => since,
                    None => now,
                };
                called.push((since, machine.status));
            }
            if called.len() > STATUSES {
                called.remove(0);
            }
        }
    }

    /// Remembers what processors did.
    fn remember(&mut self) {
        let machines = self.meter.machines.iter().map(|(key, load)| (key.clone(), load.cpu));
        let nodes = self.meter.nodes.iter().map(|(name, load)| ((String::new(), name.clone()), load.cpu));
        let now: BTreeMap<Key, Option<f64>> = machines.chain(nodes).collect();
        self.cpu.retain(|key, _| now.contains_key(key));
        for (key, cpu) in now {
            let (looks, Some(cpu)) = (self.cpu.entry(key).or_default(), cpu) else { continue };
            looks.push_back(cpu);
            if looks.len() > LOOKS {
                looks.pop_front();
            }
        }
    }

    fn snapshot(&self) -> Snapshot {
        let machines = self.machines();
        let looks = |key: &Key| self.cpu.get(key).map(|l| l.iter().copied().collect()).unwrap_or_default();
        let node_objects: Vec<Value> = self.objects[NODES].values().cloned().collect();
        let nodes = machines::nodes(&node_objects, &machines).into_iter().map(|node| NodeSeen {
            load: self.meter.nodes.get(&node.name).cloned(),
            cpu: looks(&(String::new(), node.name.clone())),
            node,
        });
        let nodes = nodes.collect();
        let machines = machines.into_iter().map(|machine| {
            let key = machine.key();
            let trace = [VMS, VMIS].into_iter().filter_map(|i| self.objects[i].get(&key));
            let trace = trace.map(|o| machines::text(o, "/metadata/trace")).find(|t| !t.is_empty());
            MachineSeen {
                load: self.meter.machines.get(&key).cloned(),
                cpu: looks(&key),
                called: self.called.get(&key).cloned().unwrap_or_default(),
                trace: trace.and_then(telemetry::TraceContext::parse).map(|t| t.trace()).unwrap_or_default(),
                machine,
            }
        });
        let troubles = self.troubles.iter().flatten().chain(&self.unmeasured).cloned();
        Snapshot {
            machines: machines.collect(),
            nodes,
            gaps: troubles.chain(self.meter.gaps.clone()).collect(),
            now: now(),
        }
    }
}

/// The phases that an instance has passed, as it says itself.
fn passed(vmi: &Value) -> Vec<Called> {
    let all = vmi.pointer("/status/phaseTransitionTimestamps").and_then(Value::as_array);
    let mut all: Vec<Called> = all
        .into_iter()
        .flatten()
        .filter_map(|t| {
            let since = machines::text(t, "/phaseTransitionTimestamp").parse::<Timestamp>().ok()?;
            Some((since.as_millisecond(), machines::text(t, "/phase").to_owned()))
        })
        .collect();
    // Phases of one second are in the order in which they are passed.
    all.sort_by_key(|(since, _)| *since);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_a_machine_was_called_is_remembered_from_before_and_from_now_on() {
        let key: Key = ("d".into(), "a".into());
        let vm =
            |status: &str| json!({"metadata": {"namespace": "d", "name": "a"}, "status": {"printableStatus": status}});
        let vmi = |phase: &str| {
            json!({"metadata": {"namespace": "d", "name": "a"}, "status": {"phase": phase, "phaseTransitionTimestamps": [
                {"phase": "Pending", "phaseTransitionTimestamp": "1970-01-01T00:00:01Z"},
                {"phase": "Running", "phaseTransitionTimestamp": "1970-01-01T00:00:03Z"},
            ]}})
        };
        let mut seen = Seen { synced: [true; 3], ..Seen::default() };
        seen.objects[VMS].insert(key.clone(), vm("Running"));
        seen.objects[VMIS].insert(key.clone(), vmi("Running"));
        seen.call(9_000);
        let of = |seen: &Seen| seen.called[&key].clone();
        assert_eq!(of(&seen), [(1_000, "Pending".to_owned()), (3_000, "Running".to_owned())]);
        seen.objects[VMS].insert(key.clone(), vm("Stopping"));
        seen.call(10_000);
        seen.call(11_000);
        assert_eq!(of(&seen)[2..], [(10_000, "Stopping".to_owned())]);
        seen.objects[VMIS].clear();
        seen.objects[VMS].insert(key.clone(), vm("Stopped"));
        seen.call(12_000);
        assert_eq!(of(&seen)[3..], [(12_000, "Stopped".to_owned())]);
        for n in 0..500 {
            seen.objects[VMS].insert(key.clone(), vm(if n % 2 == 0 { "Starting" } else { "Stopping" }));
            seen.call(13_000 + n);
        }
        assert_eq!(of(&seen).len(), STATUSES);
        seen.objects[VMS].clear();
        seen.call(20_000);
        assert!(seen.called.is_empty());
    }
}
