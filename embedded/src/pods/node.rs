//! The node's own object and its kubelet's Lease.
//!
//! The object is written when the runner starts, now and then, and after a silence that may have cost it its conditions; that
//! the node lives is said by the Lease alone, which is cheap. Labels and annotations of others stay.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use super::record::now;

/// Seconds after which the node counts as silent.
const LEASE_SECONDS: i32 = 40;
/// How often the Lease is renewed.
pub(super) const RENEW: Duration = Duration::from_secs(10);
/// A renewal that comes so long after the last may be too late for those who wait for it.
pub(super) const LATE: Duration = Duration::from_secs(25);
/// How often the conditions are written although nothing changed.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(300);
/// Pods that a node takes.
const PODS: u32 = 250;
/// Memory that is kept for the machine itself.
const RESERVED_MEMORY: u64 = 256 << 20;
/// Free bytes of the data folder that are no shortage however large the disk is.
const ENOUGH: u64 = 8 << 30;
/// Namespace of the kubelets' Leases.
const LEASES: &str = "kube-node-lease";

/// What the machine is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Machine {
    /// Logical CPUs.
    pub cpus: usize,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes of the data folder's file system.
    pub storage: u64,
    data: PathBuf,
    arch: &'static str,
    kernel: String,
    os_image: String,
    machine_id: String,
    boot_id: String,
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

impl Machine {
    /// Looks at the machine.
    pub fn look(data: &Path) -> Self {
        let memory = read("/proc/meminfo")
            .lines()
            .find_map(|l| l.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
            .unwrap_or_default()
            * 1024;
        let storage = nix::sys::statvfs::statvfs(data).map_or(0, |s| s.blocks() * s.fragment_size());
        let os_image = read("/etc/os-release")
            .lines()
            .find_map(|l| Some(l.strip_prefix("PRETTY_NAME=")?.trim_matches('"').to_owned()))
            .unwrap_or_else(|| "Linux".into());
        Self {
            cpus: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            memory,
            storage,
            data: data.to_owned(),
            arch: if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
            kernel: read("/proc/sys/kernel/osrelease"),
            os_image,
            machine_id: read("/etc/machine-id"),
            boot_id: read("/proc/sys/kernel/random/boot_id"),
        }
    }

    /// Whether the data folder's file system has less room left than a kubelet wants of its own: a tenth. Of a large disk a tenth is
    /// more than guests need, so [`ENOUGH`] bytes are no shortage anywhere.
    pub fn is_short(&self) -> bool {
        nix::sys::statvfs::statvfs(&self.data).is_ok_and(|s| {
            let free = s.blocks_available().saturating_mul(s.fragment_size());
            free < ENOUGH && s.blocks_available() < s.blocks() / 10
        })
    }

    /// Whether the kernel can keep a tmpfs out of swap (6.4).
    pub fn noswap(&self) -> bool {
        let mut numbers = self.kernel.split(|c: char| !c.is_ascii_digit()).map_while(|n| n.parse::<u32>().ok());
        (numbers.next(), numbers.next()) >= (Some(6), Some(4))
    }
}

/// Who the node is.
#[derive(Debug, Clone)]
pub(super) struct Identity {
    pub name: String,
    pub address: Ipv4Addr,
    pub pod_cidr: String,
    pub kvm: bool,
    pub labels: BTreeMap<String, String>,
    pub machine: Machine,
}

fn conditions(old: Option<&Node>, now: &str, short: bool) -> Value {
    let disk = match short {
        true => ("DiskPressure", "True", "KubeletHasDiskPressure", "kubelet has disk pressure"),
        false => ("DiskPressure", "False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    };
    let all = [
        ("MemoryPressure", "False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
        disk,
        ("PIDPressure", "False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
        ("Ready", "True", "KubeletReady", "the pod runner of virtfold is ready"),
    ];
    let before = old.and_then(|n| n.status.as_ref()).and_then(|s| s.conditions.as_deref()).unwrap_or_default();
    all.map(|(kind, status, reason, message)| {
        let since = before
            .iter()
            .find(|c| c.type_ == kind && c.status == status)
            .and_then(|c| serde_json::to_value(&c.last_transition_time).ok())
            .filter(|t| !t.is_null());
        json!({"type": kind, "status": status, "reason": reason, "message": message,
            "lastHeartbeatTime": now, "lastTransitionTime": since.unwrap_or_else(|| now.into())})
    })
    .to_vec()
    .into()
}

impl Identity {
    fn labels(&self) -> Value {
        let mut labels = json!({
            "kubernetes.io/hostname": self.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": self.machine.arch,
        });
        for (k, v) in &self.labels {
            labels[k] = v.as_str().into();
        }
        labels
    }

    fn status(&self, old: Option<&Node>, now: &str) -> Value {
        let m = &self.machine;
        let resources = |memory: u64| {
            let mut map = json!({
                "cpu": m.cpus.to_string(),
                "memory": format!("{}Ki", memory / 1024),
                "ephemeral-storage": format!("{}Ki", m.storage / 1024),
                "pods": PODS.to_string(),
            });
            // KubeVirt's device plugins; here every launcher gets what it needs without counting.
            for (device, there) in [("tun", true), ("vhost-net", true), ("kvm", self.kvm)] {
                if there {
                    map[format!("devices.kubevirt.io/{device}")] = "1000".into();
                }
            }
            map
        };
        json!({
            "capacity": resources(m.memory),
            "allocatable": resources(m.memory.saturating_sub(RESERVED_MEMORY)),
            "addresses": [
                {"type": "InternalIP", "address": self.address},
                {"type": "Hostname", "address": self.name},
            ],
            "conditions": conditions(old, now, m.is_short()),
            "nodeInfo": {
                "architecture": m.arch,
                "operatingSystem": "linux",
                "kernelVersion": m.kernel,
                "osImage": m.os_image,
                "machineID": m.machine_id,
                "systemUUID": m.machine_id,
                "bootID": m.boot_id,
                "containerRuntimeVersion": "virtfold://runc",
                "kubeletVersion": format!("v1.36.0-virtfold.{}", env!("CARGO_PKG_VERSION")),
                "kubeProxyVersion": "",
            },
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 0}},
        })
    }
}

/// Writes the Node object, or the parts of it that are the runner's.
pub(super) async fn register(client: &Client, me: &Identity) -> Result<Node, kube::Error> {
    let nodes: Api<Node> = Api::all(client.clone());
    let labels = me.labels();
    let node = match nodes.get_opt(&me.name).await? {
        Some(node) => {
            let have = serde_json::to_value(&node.metadata.labels).unwrap_or_default();
            let missing = labels.as_object().is_some_and(|l| l.iter().any(|(k, v)| have.get(k) != Some(v)));
            if missing {
                let patch = json!({"metadata": {"labels": labels}});
                nodes.patch(&me.name, &PatchParams::default(), &Patch::Merge(patch)).await?
            } else {
                node
            }
        }
        None => {
            let object = json!({
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": me.name, "labels": labels},
                "spec": {"podCIDR": me.pod_cidr, "podCIDRs": [me.pod_cidr]},
            });
            let object: Node = serde_json::from_value(object).map_err(kube::Error::SerdeError)?;
            nodes.create(&PostParams::default(), &object).await?
        }
    };
    heartbeat(client, me, Some(&node)).await?;
    Ok(node)
}

/// Writes the node's status.
pub(super) async fn heartbeat(client: &Client, me: &Identity, old: Option<&Node>) -> Result<(), kube::Error> {
    let nodes: Api<Node> = Api::all(client.clone());
    let fetched = match old {
        Some(_) => None,
        None => nodes.get_opt(&me.name).await?,
    };
    let Some(old) = old.or(fetched.as_ref()) else { return Ok(()) };
    let patch = json!({"status": me.status(Some(old), &now())});
    nodes.patch_status(&me.name, &PatchParams::default(), &Patch::Strategic(patch)).await.map(drop)
}

/// Renews the Lease, or makes it.
pub(super) async fn renew(client: &Client, node: &Node) -> Result<(), kube::Error> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), LEASES);
    let name = node.metadata.name.clone().unwrap_or_default();
    let time = jiff::Timestamp::now().strftime("%FT%T%.6fZ").to_string();
    let spec = json!({"holderIdentity": name, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": time});
    match leases.patch(&name, &PatchParams::default(), &Patch::Merge(json!({"spec": spec}))).await {
        Err(kube::Error::Api(status)) if status.code == 404 => {
            let nodes: Api<Node> = Api::all(client.clone());
            if nodes.get_opt(&name).await?.and_then(|n| n.metadata.uid) != node.metadata.uid {
                // Somebody removed the node: it stays away until its runner starts again.
                return Ok(());
            }
            let lease = json!({
                "metadata": {"name": name, "namespace": LEASES, "ownerReferences": [
                    {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node.metadata.uid}]},
                "spec": spec,
            });
            let lease: Lease = serde_json::from_value(lease).map_err(kube::Error::SerdeError)?;
            leases.create(&PostParams::default(), &lease).await.map(drop)
        }
        other => other.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_described_and_labels_are_kept() {
        let machine = Machine::look(std::path::Path::new("/"));
        assert!(machine.memory > 0 && machine.storage > 0 && machine.cpus > 0);
        let me = Identity {
            name: "n".into(),
            address: [10, 244, 1, 1].into(),
            pod_cidr: "10.244.1.0/24".into(),
            kvm: false,
            labels: BTreeMap::from([("a".into(), "b".into())]),
            machine,
        };
        assert_eq!(me.labels()["a"], "b");
        let status = me.status(None, "2026-01-01T00:00:00Z");
        assert_eq!(status["conditions"][3]["type"], "Ready");
        assert!(status["capacity"].get("devices.kubevirt.io/kvm").is_none());
    }
}
