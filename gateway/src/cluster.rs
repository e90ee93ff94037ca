//! What every admission asks of the cluster: its KubeVirt object, which is its configuration and is acknowledged in its status, and
//! the presets of instances. Both are followed, so that no admission waits for them to be read.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use futures::stream::{self, BoxStream, StreamExt};
use kube::api::{Api, ApiResource, DynamicObject};
use kube::runtime::{WatchStreamExt, watcher};
use serde_json::{Value, json};
use telemetry::Readiness;

use crate::admission::{Objects, PRESET, Settings, Wanted};
use crate::kubernetes::{self, Patched, Resource};

/// What a gateway lacks that does not know the KubeVirt object, or the presets.
const SETTINGS: &str = "settings";
const PRESETS: &str = "presets";

/// The cluster as it is now.
#[derive(Debug)]
pub(crate) struct Cluster {
    own: Settings,
    settings: RwLock<Arc<Settings>>,
    /// The list of presets, once it is known.
    presets: RwLock<Option<Value>>,
}

/// Objects by their UID.
type Known = BTreeMap<String, DynamicObject>;

impl Cluster {
    /// A cluster of which nothing is known, so that it counts as one without a configuration.
    pub(crate) fn new(own: Settings, readiness: &Readiness) -> Self {
        for what in [SETTINGS, PRESETS] {
            readiness.lacks(what, "they are not known yet");
        }
        Self { settings: RwLock::new(Arc::new(own.clone())), presets: RwLock::new(None), own }
    }

    pub(crate) fn settings(&self) -> Arc<Settings> {
        self.settings.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What an admission need not read.
    pub(crate) fn objects(&self) -> Objects {
        let mut objects = Objects::default();
        if let Some(presets) = self.presets.read().unwrap_or_else(PoisonError::into_inner).clone() {
            objects.insert(Wanted { kind: PRESET, namespace: String::new(), name: String::new() }, Some(presets));
        }
        objects
    }

    /// Keeps what is known as it is in the cluster. Never ends.
    pub(crate) async fn follow(&self, client: &kube::Client, readiness: &Readiness) {
        tokio::join!(self.follow_settings(client, readiness), self.follow_presets(client, readiness));
    }

    async fn follow_presets(&self, client: &kube::Client, readiness: &Readiness) {
        let mut seen = follow(client, kubernetes::PRESETS, readiness, PRESETS);
        while let Some(known) = seen.next().await {
            let items: Vec<Value> = known.values().filter_map(|o| serde_json::to_value(o).ok()).collect();
            *self.presets.write().unwrap_or_else(PoisonError::into_inner) = Some(json!({"items": items}));
        }
    }

    /// Of several objects the oldest counts.
    async fn follow_settings(&self, client: &kube::Client, readiness: &Readiness) {
        let mut seen = follow(client, kubernetes::CLUSTER, readiness, SETTINGS);
        // Two gateways of different versions do not correct each other for ever: each says once which it is.
        let mut introduced = false;
        while let Some(known) = seen.next().await {
            let age = |(uid, o): &(&String, &DynamicObject)| {
                (o.metadata.creation_timestamp.clone().map(|t| t.0), (*uid).clone())
            };
            let first = known.iter().min_by_key(age).and_then(|(_, o)| serde_json::to_value(o).ok());
            let settings = first.as_ref().map_or_else(|| self.own.clone(), |o| self.own.configured_by(o));
            *self.settings.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(settings);
            let Some(object) = first else { continue };
            if acknowledged(&object, introduced) {
                introduced = true;
                continue;
            }
            let operation = json!({"op": "add", "path": "/status", "value": status(&object)});
            match kubernetes::patch(client, kubernetes::CLUSTER, &object, "status", vec![operation], false).await {
                Ok(Patched::Done(_)) => introduced = true,
                // A change in between is an event of its own.
                Ok(Patched::Changed) => {}
                Err(refusal) => tracing::warn!(%refusal, "the configuration of the cluster is not acknowledged"),
            }
        }
    }
}

/// All objects of a kind, whenever something changes. While that is not known, so much is lacking.
fn follow(
    client: &kube::Client,
    resource: Resource,
    readiness: &Readiness,
    what: &'static str,
) -> BoxStream<'static, Known> {
    let readiness = readiness.clone();
    let resource = ApiResource {
        group: api::names::GROUP.into(),
        version: "v1".into(),
        api_version: format!("{}/v1", api::names::GROUP),
        kind: resource.what.into(),
        plural: resource.plural().into(),
    };
    let objects: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let mut listed = Known::new();
    let mut known = Known::new();
    // A watch that goes on where it broke off tells nobody that it does: after an error all is read anew.
    let begin = move || watcher(objects.clone(), watcher::Config::default()).boxed();
    let events = stream::unfold((begin(), begin), |(mut events, begin)| async move {
        let event = events.next().await?;
        if event.is_err() {
            events = begin();
        }
        Some((event, (events, begin)))
    });
    let all = events.boxed().default_backoff().filter_map(move |event| {
        let id = |o: &DynamicObject| o.metadata.uid.clone().unwrap_or_default();
        let changed = match event {
            Ok(watcher::Event::Init) => {
                listed.clear();
                false
            }
            Ok(watcher::Event::InitApply(o)) => {
                listed.insert(id(&o), o);
                false
            }
            Ok(watcher::Event::InitDone) => {
                readiness.has(what);
                known = std::mem::take(&mut listed);
                true
            }
            Ok(watcher::Event::Apply(o)) => {
                known.insert(id(&o), o);
                true
            }
            Ok(watcher::Event::Delete(o)) => known.remove(&id(&o)).is_some(),
            Err(error) => {
                readiness.lacks(what, &error);
                tracing::debug!(%error, kind = resource.kind, "the cluster cannot be followed");
                false
            }
        };
        std::future::ready(changed.then(|| known.clone()))
    });
    all.boxed()
}

/// The version, as KubeVirt's tools look for it.
fn version() -> String {
    format!("v{}", env!("CARGO_PKG_VERSION"))
}

/// Whether this version of the object was acknowledged, and by this version of the gateway unless that has been said.
fn acknowledged(object: &Value, introduced: bool) -> bool {
    let s = &object["status"];
    s["phase"] == "Deployed"
        && s["observedGeneration"] == object["metadata"]["generation"]
        && (introduced || s["observedKubeVirtVersion"] == version())
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
