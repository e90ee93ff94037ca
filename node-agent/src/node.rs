//! What the agent says about its Node: how to reach it, what it can do, and that launchers may be placed here.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use api::names;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, Patch, PatchParams};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::store::Store;
use crate::{Shared, limits};

/// Resource that pods ask for to get `/dev/kvm`.
pub(crate) const KVM: &str = "devices.kubevirt.io/kvm";
/// As many machines as anybody could place here.
pub(crate) const KVM_COUNT: &str = "1k";

/// How guests of this node are run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accelerator {
    /// `kvm` or `tcg`.
    pub name: String,
    /// CPU model that guests get which name none.
    pub cpu_model: String,
    /// What guests can have.
    pub offers: Offers,
}

/// What guests can have on a node, by the names of QEMU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offers {
    /// CPU models.
    pub cpu_models: Vec<String>,
    /// CPU features.
    pub cpu_features: Vec<String>,
    /// Vendor of the CPU, as CPUID says it.
    pub cpu_vendor: String,
    /// Machine types.
    pub machine_types: Vec<String>,
}

impl Accelerator {
    /// Labels of the node by which guests find a place where they can have what they ask for.
    fn labels(&self) -> BTreeMap<String, Value> {
        let o = &self.offers;
        let vendor = match o.cpu_vendor.as_str() {
            "GenuineIntel" => Some("Intel"),
            "AuthenticAMD" => Some("AMD"),
            "HygonGenuine" => Some("Hygon"),
            _ => None,
        };
        let host_model = o.cpu_models.iter().filter(|m| **m == self.cpu_model);
        let named = |prefix: &str, all: &[String]| all.iter().map(|n| format!("{prefix}{n}")).collect();
        let all: [Vec<String>; 5] = [
            named(names::node::CPU_MODEL, &o.cpu_models),
            named(names::node::CPU_FEATURE, &o.cpu_features),
            named(names::node::MACHINE_TYPE, &o.machine_types),
            host_model.map(|m| format!("{}{m}", names::node::HOST_MODEL)).collect(),
            vendor.map(|v| format!("{}{v}", names::node::CPU_VENDOR)).into_iter().collect(),
        ];
        all.into_iter().flatten().map(|label| (label, json!("true"))).collect()
    }
}

/// Beginnings of the labels that are the agent's: what is not so any more goes.
const OWN: [&str; 5] = [
    names::node::CPU_MODEL,
    names::node::CPU_FEATURE,
    names::node::CPU_VENDOR,
    names::node::HOST_MODEL,
    names::node::MACHINE_TYPE,
];
/// A node with this annotation is labelled by somebody else.
const SKIP: &str = "node-labeller.kubevirt.io/skip-node";

#[derive(Serialize, Deserialize)]
struct Probed {
    boot_id: String,
    accelerator: Accelerator,
}

const PROBED: &str = "accelerator.json";

/// The accelerator as it was found at this boot; it is looked for once.
pub(crate) async fn accelerator(store: &Store, boot_id: &str, probe: &crate::Probe) -> Accelerator {
    if let Some(known) = store.read::<Probed>(PROBED).filter(|p| p.boot_id == boot_id) {
        return known.accelerator;
    }
    let accelerator = probe().await;
    tracing::info!(?accelerator, "probed");
    let probed = Probed { boot_id: boot_id.into(), accelerator: accelerator.clone() };
    if let Err(error) = store.put(move |s| s.write(PROBED, &probed)).await {
        tracing::warn!(%error, "remembering the accelerator");
    }
    accelerator
}

/// Keeps the Node's facts right: at the start, and whenever a controller's session begins, because a controller takes the
/// label away while it has none.
pub(crate) async fn keep(shared: Arc<Shared>) {
    loop {
        let mut pause = limits::RETRY_FIRST;
        while let Err(error) = assert(&shared).await {
            tracing::debug!(%error, node = shared.node, "writing the Node's facts");
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(limits::API_RETRY);
        }
        shared.assert_node.notified().await;
    }
}

async fn within<T>(call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, crate::api::Error> {
    match tokio::time::timeout(limits::API, call).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(crate::api::Error::Slow(Duration::from_secs(limits::API.as_secs()))),
    }
}

async fn assert(shared: &Shared) -> Result<(), crate::api::Error> {
    let nodes: Api<Node> = Api::all(shared.client.clone());
    let node = within(nodes.get(&shared.node)).await?;
    shared.node_uid.send_replace(node.metadata.uid.clone().unwrap_or_default());
    let accelerator = shared.accelerator();
    let annotated = |key: &str| node.metadata.annotations.as_ref().is_some_and(|a| a.contains_key(key));
    let mut labels = BTreeMap::from([(names::LABEL_SCHEDULABLE.to_owned(), json!("true"))]);
    if !annotated(SKIP) {
        let there = node.metadata.labels.iter().flatten().map(|(k, _)| k);
        let old = there.filter(|k| OWN.iter().any(|prefix| k.starts_with(prefix)));
        labels.extend(old.map(|k| (k.clone(), Value::Null)));
        labels.extend(accelerator.labels());
    }
    let wanted = json!({
        "annotations": {
            names::ANN_ACCELERATOR: accelerator.name, names::ANN_BOOT_ID: shared.boot_id,
            names::ANN_AGENT_ADDRESS: shared.address,
        },
        "labels": labels,
    });
    let have = |kind: &str, key: &str| {
        let map = if kind == "labels" { &node.metadata.labels } else { &node.metadata.annotations };
        map.as_ref().and_then(|m| m.get(key)).map(String::as_str)
    };
    let differs = ["annotations", "labels"].into_iter().any(|kind| {
        let map = wanted.get(kind).and_then(Value::as_object);
        map.into_iter().flatten().any(|(k, v)| v.as_str() != have(kind, k))
    });
    let kvm = node.status.as_ref().and_then(|s| s.allocatable.as_ref()).is_some_and(|a| a.contains_key(KVM));
    if accelerator.name == "kvm" && !kvm {
        let amounts = json!({KVM: KVM_COUNT});
        let patch = json!({"status": {"capacity": amounts, "allocatable": amounts}});
        within(nodes.patch_status(&shared.node, &PatchParams::default(), &Patch::Merge(patch))).await?;
    }
    if differs {
        let patch = json!({"metadata": wanted});
        within(nodes.patch(&shared.node, &PatchParams::default(), &Patch::Merge(patch))).await?;
    }
    Ok(())
}
