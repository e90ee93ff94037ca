//! The configuration of the cluster, which is its KubeVirt object: followed, and acknowledged in its status.

use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};

use futures::StreamExt;
use kube::api::{Api, ApiResource, DynamicObject};
use kube::runtime::{WatchStreamExt, watcher};
use serde_json::{Value, json};

use crate::admission::{KUBEVIRT, Settings};
use crate::kubernetes::{self, Patched};

/// The settings as they are now.
#[derive(Debug)]
pub(crate) struct Cluster {
    own: Settings,
    now: RwLock<Arc<Settings>>,
}

impl Cluster {
    /// The settings of a cluster that has no configuration.
    pub(crate) fn new(own: Settings) -> Self {
        Self { now: RwLock::new(Arc::new(own.clone())), own }
    }

    pub(crate) fn settings(&self) -> Arc<Settings> {
        self.now.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    /// Keeps the settings as the object says; of several the oldest counts. Never ends.
    pub(crate) async fn follow(&self, client: &kube::Client) {
        let resource = ApiResource {
            group: api::names::GROUP.into(),
            version: "v1".into(),
            api_version: format!("{}/v1", api::names::GROUP),
            kind: KUBEVIRT.into(),
            plural: kubernetes::CLUSTER.plural().into(),
        };
        let objects: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
        let mut events = std::pin::pin!(watcher(objects, watcher::Config::default()).default_backoff());
        let (mut known, mut listed) = (BTreeMap::new(), BTreeMap::new());
        while let Some(event) = events.next().await {
            let id = |o: &DynamicObject| o.metadata.uid.clone().unwrap_or_default();
            match event {
                Ok(watcher::Event::Init) => listed.clear(),
                Ok(watcher::Event::InitApply(o)) => {
                    listed.insert(id(&o), o);
                    continue;
                }
                Ok(watcher::Event::InitDone) => known = std::mem::take(&mut listed),
                Ok(watcher::Event::Apply(o)) => drop(known.insert(id(&o), o)),
                Ok(watcher::Event::Delete(o)) => drop(known.remove(&id(&o))),
                Err(error) => {
                    tracing::debug!(%error, "the configuration of the cluster cannot be followed");
                    continue;
                }
            }
            let age = |o: &&DynamicObject| (o.metadata.creation_timestamp.clone().map(|t| t.0), id(o));
            let first = known.values().min_by_key(age).and_then(|o| serde_json::to_value(o).ok());
            let settings = first.as_ref().map_or_else(|| self.own.clone(), |o| self.own.configured_by(o));
            *self.now.write().unwrap_or_else(std::sync::PoisonError::into_inner) = Arc::new(settings);
            if let Some(object) = first.filter(|o| !acknowledged(o)) {
                let operation = json!({"op": "add", "path": "/status", "value": status(&object)});
                match kubernetes::patch(client, kubernetes::CLUSTER, &object, "status", vec![operation], false).await {
                    // A change in between is an event of its own.
                    Ok(Patched::Done(_) | Patched::Changed) => {}
                    Err(refusal) => tracing::warn!(%refusal, "the configuration of the cluster is not acknowledged"),
                }
            }
        }
    }
}

/// The version, as KubeVirt's tools look for it.
fn version() -> String {
    format!("v{}", env!("CARGO_PKG_VERSION"))
}

/// Whether this version of the object was acknowledged by this version of the gateway.
fn acknowledged(object: &Value) -> bool {
    let s = &object["status"];
    s["phase"] == "Deployed"
        && s["observedGeneration"] == object["metadata"]["generation"]
        && s["observedKubeVirtVersion"] == version()
}

/// What is said of an object that was read: nothing is left to be deployed.
fn status(object: &Value) -> Value {
    let condition = |kind: &str, status: &str, reason: &str, message: &str| json!({"type": kind, "status": status, "reason": reason, "message": message});
    let mut whole = object["status"].as_object().cloned().unwrap_or_default();
    let v = version();
    for (key, value) in [
        ("phase", json!("Deployed")),
        ("observedGeneration", object["metadata"]["generation"].clone()),
        ("observedKubeVirtVersion", json!(v)),
        ("targetKubeVirtVersion", json!(v)),
        ("operatorVersion", json!(v)),
        ("defaultArchitecture", json!("amd64")),
        (
            "conditions",
            json!([
                condition("Available", "True", "AllComponentsReady", "the configuration is in effect"),
                condition("Progressing", "False", "AllComponentsReady", "the configuration is in effect"),
                condition("Degraded", "False", "AllComponentsReady", "the configuration is in effect"),
            ]),
        ),
    ] {
        whole.insert(key.into(), value);
    }
    whole.into()
}
