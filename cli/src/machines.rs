//! Machines and nodes as people look at them: what `status`, `top` and the page show of them is made here once.

use std::collections::BTreeMap;

use anyhow::bail;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::user::plain;

/// Where KubeVirt's objects are.
const KUBEVIRT: &str = "/apis/kubevirt.io/v1";

/// Reads an object; `None` where there is none.
pub async fn get(client: &Client, path: &str) -> anyhow::Result<Option<Value>> {
    let request = http::Request::get(path).body(Vec::new())?;
    match client.request::<Value>(request).await {
        Ok(value) => Ok(Some(value)),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        Err(error) => Err(plain(error)),
    }
}

/// Reads the objects of a kind of KubeVirt's.
pub async fn list(client: &Client, namespace: Option<&str>, plural: &str) -> anyhow::Result<Vec<Value>> {
    let place = namespace.map_or_else(String::new, |n| format!("namespaces/{n}/"));
    let found = get(client, &format!("{KUBEVIRT}/{place}{plural}")).await?;
    let Some(mut found) = found else { bail!("the cluster does not serve {plural}.kubevirt.io") };
    Ok(match found["items"].take() {
        Value::Array(items) => items,
        _ => Vec::new(),
    })
}

/// The text at a place of an object; empty where there is none.
pub fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

/// A condition of an object.
pub fn condition<'a>(value: &'a Value, kind: &str) -> Option<&'a Value> {
    value["status"]["conditions"].as_array()?.iter().find(|c| c["type"] == kind)
}

/// What a machine waits for, in a line; empty when it is where it should be. The most telling condition first.
pub fn waits_for(vm: Option<&Value>, vmi: Option<&Value>) -> String {
    const TELLING: [(&str, &str); 8] = [
        ("Failure", "True"),
        ("Synchronized", "False"),
        ("PodScheduled", "False"),
        ("DataVolumesReady", "False"),
        ("Provisioning", "True"),
        ("Paused", "True"),
        ("Ready", "False"),
        ("RestartRequired", "True"),
    ];
    // A machine that is to be stopped waits for nothing.
    let stopped = vmi.is_none() && vm.is_some_and(|v| text(v, "/status/printableStatus") == "Stopped");
    let objects = [vmi, vm];
    let mut found = TELLING.iter().filter(|_| !stopped).flat_map(|(kind, bad)| {
        objects.iter().flatten().filter_map(move |o| condition(o, kind).filter(|c| text(c, "/status") == *bad))
    });
    let line = |c: &Value| {
        // This one has no reason.
        let kind = if text(c, "/type") == "RestartRequired" { "RestartRequired" } else { text(c, "/reason") };
        [kind, text(c, "/message")].iter().filter(|s| !s.is_empty()).copied().collect::<Vec<_>>().join(": ")
    };
    found.find_map(|c| Some(line(c)).filter(|l| !l.is_empty())).unwrap_or_default()
}

/// When an object was made, in seconds since 1970.
fn created(value: &Value) -> Option<i64> {
    text(value, "/metadata/creationTimestamp").parse::<Timestamp>().ok().map(Timestamp::as_second)
}

/// A number of seconds as `kubectl` writes an age.
pub fn age(seconds: i64) -> String {
    match seconds {
        ..120 => format!("{}s", seconds.max(0)),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// A duration as people say it.
pub fn duration(ms: u64) -> String {
    match ms {
        ..10_000 => format!("{}.{:03} s", ms / 1000, ms % 1000),
        10_000..120_000 => format!("{}.{} s", ms / 1000, ms % 1000 / 100),
        120_000..7_200_000 => format!("{} min {} s", ms / 60_000, ms / 1000 % 60),
        _ => format!("{} h {} min", ms / 3_600_000, ms / 60_000 % 60),
    }
}

/// How a status is to be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    /// It runs.
    Good,
    /// It is on its way.
    Busy,
    /// It is at rest, as somebody wants it.
    Off,
    /// It needs somebody.
    Bad,
}

/// How the status or the phase of a machine, or the status of a node, is to be taken.
pub fn tone(status: &str) -> Tone {
    match status {
        "Running" | "Ready" | "True" => Tone::Good,
        "Stopped" | "Succeeded" | "Paused" | "" => Tone::Off,
        "Starting"
        | "Stopping"
        | "Terminating"
        | "Migrating"
        | "Provisioning"
        | "WaitingForVolumeBinding"
        | "WaitingForReceiver"
        | "Pending"
        | "Scheduling"
        | "Scheduled"
        | "Ready,SchedulingDisabled" => Tone::Busy,
        _ => Tone::Bad,
    }
}

/// What is in use of a memory, in a few characters.
pub fn memory(load: &Load) -> String {
    let used = load.memory_bytes.map_or("?".to_owned(), |used| bytes(used as f64));
    format!("{used} of {}", bytes(load.memory_total_bytes as f64))
}

/// Bytes in a few characters.
pub fn bytes(count: f64) -> String {
    let mut value = count.max(0.0);
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1000.0 {
            let digits = usize::from(value < 9.95 && unit != "B");
            return format!("{value:.digits$} {unit}");
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}

/// Namespace and name.
pub type Key = (String, String);

fn key(object: &Value) -> Key {
    (text(object, "/metadata/namespace").to_owned(), text(object, "/metadata/name").to_owned())
}

/// A VirtualMachine, its instance, or both.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Machine {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// The word that people read: that of the VM, or the phase of a bare instance.
    pub status: String,
    /// Whether it is ready.
    pub ready: bool,
    /// Node of the instance.
    pub node: String,
    /// First address of the instance.
    pub address: String,
    /// What it waits for, in a line.
    pub waits_for: String,
    /// Phase of the instance.
    pub phase: String,
    /// The guest's system, as its agent says.
    #[serde(skip)]
    pub system: String,
    /// When it was made, in seconds since 1970.
    #[serde(skip)]
    pub created: Option<i64>,
    /// UID of the instance.
    #[serde(skip)]
    pub uid: String,
    /// An instance that no VM made.
    #[serde(skip)]
    pub bare: bool,
}

impl Machine {
    /// As its objects say.
    pub fn of(vm: Option<&Value>, vmi: Option<&Value>) -> Self {
        let none = Value::Null;
        let (object, instance) = (vm.or(vmi).unwrap_or(&none), vmi.unwrap_or(&none));
        let (namespace, name) = key(object);
        let printable = vm.map(|v| text(v, "/status/printableStatus")).filter(|s| !s.is_empty());
        Self {
            namespace,
            name,
            status: printable.unwrap_or_else(|| text(instance, "/status/phase")).to_owned(),
            ready: condition(object, "Ready").is_some_and(|c| text(c, "/status") == "True"),
            node: text(instance, "/status/nodeName").to_owned(),
            address: text(instance, "/status/interfaces/0/ipAddress").to_owned(),
            waits_for: waits_for(vm, vmi),
            phase: text(instance, "/status/phase").to_owned(),
            system: text(instance, "/status/guestOSInfo/prettyName").to_owned(),
            created: created(object),
            uid: text(instance, "/metadata/uid").to_owned(),
            bare: vm.is_none(),
        }
    }

    /// Namespace and name.
    pub fn key(&self) -> Key {
        (self.namespace.clone(), self.name.clone())
    }
}

/// All machines of these objects, by namespace and name.
pub fn machines(vms: &[Value], vmis: &[Value]) -> Vec<Machine> {
    let mut all: BTreeMap<Key, (Option<&Value>, Option<&Value>)> = BTreeMap::new();
    for vm in vms {
        all.entry(key(vm)).or_default().0 = Some(vm);
    }
    for vmi in vmis {
        all.entry(key(vmi)).or_default().1 = Some(vmi);
    }
    all.into_values().map(|(vm, vmi)| Machine::of(vm, vmi)).collect()
}

/// A node.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Node {
    /// Its name.
    pub name: String,
    /// `Ready`, `NotReady`, `Ready,SchedulingDisabled`, as `kubectl` says it.
    pub status: String,
    /// Whether machines may be placed on it.
    pub schedulable: bool,
    /// Machines on it that have not ended.
    pub machines: usize,
    /// Processors that pods may ask for, in thousandths.
    #[serde(skip)]
    pub allocatable_cpu: String,
    /// Memory that pods may ask for.
    #[serde(skip)]
    pub allocatable_memory: String,
    /// How guests are run there: `kvm` where their processors are real.
    pub kvm: bool,
    /// When it was made, in seconds since 1970.
    #[serde(skip)]
    pub created: Option<i64>,
}

/// The nodes of these objects, with the machines on them.
pub fn nodes(nodes: &[Value], machines: &[Machine]) -> Vec<Node> {
    let mut all: Vec<Node> = nodes
        .iter()
        .map(|node| {
            let name = text(node, "/metadata/name").to_owned();
            let ready = condition(node, "Ready").is_some_and(|c| text(c, "/status") == "True");
            let cordoned = node.pointer("/spec/unschedulable").and_then(Value::as_bool).unwrap_or_default();
            let label = |name: &str| node["metadata"]["labels"][name] == "true";
            let kvm = text(node, "/status/allocatable/devices.kubevirt.io~1kvm");
            Node {
                status: [if ready { "Ready" } else { "NotReady" }, if cordoned { ",SchedulingDisabled" } else { "" }]
                    .concat(),
                schedulable: !cordoned && label(api::names::LABEL_SCHEDULABLE),
                machines: machines.iter().filter(|m| m.node == name && !ended(&m.phase)).count(),
                allocatable_cpu: text(node, "/status/allocatable/cpu").to_owned(),
                allocatable_memory: text(node, "/status/allocatable/memory").to_owned(),
                kvm: !matches!(kvm, "" | "0"),
                created: created(node),
                name,
            }
        })
        .collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

fn ended(phase: &str) -> bool {
    matches!(phase, "Succeeded" | "Failed")
}

/// What the gateway says that machines and nodes use: counters, at a time.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Usage {
    /// Of each node; none where one namespace was asked for.
    pub nodes: Vec<NodeUsage>,
    /// Of each machine that has a hypervisor process.
    pub machines: Vec<MachineUsage>,
    /// Nodes that did not say.
    pub gaps: Vec<String>,
}

/// Of a node.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeUsage {
    name: String,
    at_milliseconds: i64,
    cpu_seconds: f64,
    cpus: u32,
    memory_bytes: u64,
    available_bytes: u64,
    load: Vec<f64>,
}

/// Of a machine.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineUsage {
    namespace: String,
    name: String,
    uid: String,
    node: String,
    at_milliseconds: i64,
    cpu_seconds: f64,
    cpus: u32,
    memory_bytes: u64,
    resident_bytes: u64,
    guest_used_bytes: Option<u64>,
    read_bytes: u64,
    write_bytes: u64,
    receive_bytes: u64,
    transmit_bytes: u64,
}

/// Asks what the machines of a namespace, or all of them and the nodes, use.
pub async fn usage(client: &Client, namespace: Option<&str>) -> anyhow::Result<Usage> {
    let place = namespace.map_or_else(String::new, |n| format!("namespaces/{n}/"));
    let path = format!("/apis/{}/v1/{place}usage", api::names::SUBRESOURCE_GROUP);
    match get(client, &path).await? {
        Some(found) => Ok(serde_json::from_value(found)?),
        None => bail!("the gateway of this cluster is too old to say what machines use"),
    }
}

/// Bytes a second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Flow {
    /// Read, or received.
    pub bytes_in: f64,
    /// Written, or sent.
    pub bytes_out: f64,
}

/// What a machine uses now.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Load {
    /// Processors in use (1.5 is one and a half); missing until it was asked twice.
    pub cpu: Option<f64>,
    /// Processors that it has.
    pub cpus: u32,
    /// Memory in use, of a machine as its guest says; missing where it says nothing.
    pub memory_bytes: Option<u64>,
    /// Memory that it has.
    pub memory_total_bytes: u64,
    /// Memory of the hypervisor process; for a node that of all hypervisor processes on it.
    pub resident_bytes: u64,
    /// Bytes of its disks a second.
    pub disk: Option<Flow>,
    /// Bytes of its networks a second.
    pub network: Option<Flow>,
    /// Load over one, five and fifteen minutes; of nodes alone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub load: Vec<f64>,
}

/// Turns counters into what is used now, by comparing them with those of the time before.
#[derive(Debug, Default)]
pub struct Meter {
    last: BTreeMap<(String, String), (i64, Vec<f64>)>,
    /// Loads of machines, by namespace and name.
    pub machines: BTreeMap<Key, Load>,
    /// Loads of nodes.
    pub nodes: BTreeMap<String, Load>,
    /// Nodes that did not say.
    pub gaps: Vec<String>,
}

impl Meter {
    /// Takes what was said now. What nothing was said of has no load any more.
    pub fn take(&mut self, usage: &Usage) {
        let before = std::mem::take(&mut self.last);
        let mut rates = |id: (String, String), at: i64, counters: Vec<f64>| -> Option<Vec<f64>> {
            let rates = before.get(&id).and_then(|(then, old)| {
                let seconds = (at - then) as f64 / 1000.0;
                (seconds > 0.0)
                    .then(|| counters.iter().zip(old).map(|(now, old)| (now - old).max(0.0) / seconds).collect())
            });
            self.last.insert(id, (at, counters));
            rates
        };
        let mut resident: BTreeMap<&str, u64> = BTreeMap::new();
        self.machines = BTreeMap::new();
        for m in &usage.machines {
            *resident.entry(&m.node).or_default() += m.resident_bytes;
            let counters = [m.read_bytes, m.write_bytes, m.receive_bytes, m.transmit_bytes].map(|n| n as f64);
            // Another instance of the same name counts from the beginning.
            let id = (m.uid.clone(), m.name.clone());
            let rates = rates(id, m.at_milliseconds, [&[m.cpu_seconds], &counters[..]].concat());
            let flow = |into: usize, out: usize| {
                rates.as_ref().and_then(|r| Some(Flow { bytes_in: *r.get(into)?, bytes_out: *r.get(out)? }))
            };
            let load = Load {
                cpu: rates.as_ref().and_then(|r| r.first().copied()),
                cpus: m.cpus,
                memory_bytes: m.guest_used_bytes,
                memory_total_bytes: m.memory_bytes,
                resident_bytes: m.resident_bytes,
                disk: flow(1, 2),
                network: flow(3, 4),
                load: vec![],
            };
            self.machines.insert((m.namespace.clone(), m.name.clone()), load);
        }
        self.nodes = BTreeMap::new();
        for n in &usage.nodes {
            let rates = rates((String::new(), n.name.clone()), n.at_milliseconds, vec![n.cpu_seconds]);
            let load = Load {
                cpu: rates.and_then(|r| r.first().copied()),
                cpus: n.cpus,
                memory_bytes: Some(n.memory_bytes.saturating_sub(n.available_bytes)),
                memory_total_bytes: n.memory_bytes,
                resident_bytes: resident.get(n.name.as_str()).copied().unwrap_or_default(),
                load: n.load.clone(),
                ..Load::default()
            };
            self.nodes.insert(n.name.clone(), load);
        }
        self.gaps.clone_from(&usage.gaps);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    #[test]
    fn rates_come_from_two_answers_about_the_same_instance() {
        let answer = |uid: &str, at: i64, cpu: f64, sent: u64| -> Usage {
            serde_json::from_value(json!({
                "gaps": [],
                "nodes": [{"name": "n", "atMilliseconds": at, "cpuSeconds": cpu * 2.0, "cpus": 4, "memoryBytes": 100,
                           "availableBytes": 40, "load": [1.0, 2.0, 3.0]}],
                "machines": [{"namespace": "d", "name": "a", "uid": uid, "node": "n", "atMilliseconds": at,
                    "cpuSeconds": cpu, "cpus": 2, "memoryBytes": 64, "residentBytes": 80, "guestUsedBytes": null,
                    "readBytes": 0, "writeBytes": 0, "receiveBytes": 0, "transmitBytes": sent}],
            }))
            .unwrap()
        };
        let mut meter = Meter::default();
        let of = |m: &Meter| m.machines[&("d".to_owned(), "a".to_owned())].clone();
        meter.take(&answer("u1", 1000, 5.0, 0));
        assert_eq!((of(&meter).cpu, of(&meter).network, of(&meter).memory_bytes), (None, None, None));
        meter.take(&answer("u1", 3000, 6.0, 4096));
        assert_eq!((of(&meter).cpu, of(&meter).network), (Some(0.5), Some(Flow { bytes_in: 0.0, bytes_out: 2048.0 })));
        let node = &meter.nodes["n"];
        assert_eq!((node.cpu, node.memory_bytes, node.resident_bytes), (Some(1.0), Some(60), 80));
        // Started anew: its counters are others.
        meter.take(&answer("u2", 5000, 0.5, 0));
        assert_eq!(of(&meter).cpu, None);
        meter.take(&Usage::default());
        assert!(meter.machines.is_empty() && meter.nodes.is_empty());
    }

    #[test]
    fn bytes_and_ages_are_short() {
        for (count, said) in [
            (0.0, "0 B"),
            (999.0, "999 B"),
            (1024.0, "1.0 KiB"),
            (134_217_728.0, "128 MiB"),
            (1.5 * 1_073_741_824.0, "1.5 GiB"),
            (5e13, "45.5 TiB"),
        ] {
            assert_eq!(bytes(count), said);
        }
        assert_eq!([-3, 119, 120, 7200, 172_800].map(age), ["0s", "119s", "2m", "2h", "2d"]);
    }

    #[test]
    fn a_machine_is_its_vm_its_instance_or_both() {
        let vm = json!({"metadata": {"namespace": "d", "name": "a", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "status": {"printableStatus": "Starting", "conditions": [{"type": "Ready", "status": "False"}]}});
        let vmi = json!({"metadata": {"namespace": "d", "name": "a", "uid": "u"},
            "status": {"phase": "Scheduling", "nodeName": "n", "conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}]}});
        let bare =
            json!({"metadata": {"namespace": "d", "name": "b"}, "status": {"phase": "Running", "nodeName": "n"}});
        let all = machines(std::slice::from_ref(&vm), &[vmi, bare]);
        assert_eq!(all.len(), 2);
        assert_eq!((all[0].status.as_str(), all[0].waits_for.as_str()), ("Starting", "Unschedulable: no room"));
        assert_eq!((all[1].status.as_str(), all[1].bare, all[1].ready), ("Running", true, false));
        let node = json!({"metadata": {"name": "n", "labels": {"kubevirt.io/schedulable": "true"}},
            "spec": {"unschedulable": true}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}});
        let node = &nodes(&[node], &all)[0];
        assert_eq!((node.status.as_str(), node.schedulable, node.machines), ("Ready,SchedulingDisabled", false, 2));
    }
}
