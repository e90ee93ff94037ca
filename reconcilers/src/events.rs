//! Events for people: few, on nobody's path, dropped under pressure.

use k8s_openapi::api::core::v1::Event;
use kube::{
    Api, Client,
    api::{DynamicObject, PostParams},
    core::ApiResource,
};
use serde_json::json;
use state::{object::Kind, vm::Note};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use tokio::sync::Semaphore;

/// Events under way at once; what comes while that many are is dropped and counted.
const AT_ONCE: usize = 16;

/// Writes Events.
#[derive(Clone)]
pub struct Events {
    client: Client,
    turn: Arc<Semaphore>,
    dropped: Arc<AtomicU64>,
}

impl Events {
    /// A writer.
    pub fn new(client: Client) -> Self {
        Self { client, turn: Arc::new(Semaphore::new(AT_ONCE)), dropped: Arc::default() }
    }

    /// Writes the note in the background.
    pub fn write(&self, note: &Note) {
        let Ok(turn) = self.turn.clone().try_acquire_owned() else {
            let n = self.dropped.fetch_add(1, Ordering::Relaxed) + 1;
            if n.is_power_of_two() {
                tracing::warn!(dropped = n, "events are dropped: too many at once");
            }
            return;
        };
        let (client, note) = (self.client.clone(), note.clone());
        tokio::spawn(async move {
            let _turn = turn;
            if let Err(error) = create(client, &note).await {
                tracing::info!(about = %note.about, reason = note.reason, %error, "event not written");
            }
        });
    }
}

/// The Events of a namespace.
pub(crate) fn api(client: Client, namespace: &str) -> Api<DynamicObject> {
    Api::namespaced_with(client, namespace, &ApiResource::erase::<Event>(&()))
}

async fn create(client: Client, note: &Note) -> kube::Result<()> {
    let about = &note.about;
    let namespace = if about.namespace.is_empty() { "default" } else { &about.namespace };
    let now = jiff::Timestamp::now();
    let seconds = jiff::Timestamp::from_second(now.as_second()).unwrap_or(now).to_string();
    let api_version = crate::hub::resource(about.kind).api_version;
    let mut involved = json!({
        "kind": about.kind.name(), "name": about.name, "uid": about.uid, "apiVersion": api_version,
    });
    if about.kind != Kind::Node {
        involved["namespace"] = json!(about.namespace);
    }
    let event: DynamicObject = serde_json::from_value(json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": namespace, "name": format!("{}.{:x}", about.name, now.as_nanosecond())},
        "involvedObject": involved,
        "reason": note.reason,
        "message": note.message,
        "type": if note.warning { "Warning" } else { "Normal" },
        "source": {"component": "virtfold-controller"},
        "firstTimestamp": seconds,
        "lastTimestamp": seconds,
        "count": 1,
    }))
    .map_err(kube::Error::SerdeError)?;
    api(client, namespace).create(&PostParams::default(), &event).await?;
    Ok(())
}
