//! A watch cache: the objects of one kind as the API server has them, a moment ago.
//!
//! Absence in a cache is no evidence that an object does not exist; who deletes because of it asks the server first.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, PoisonError, RwLock};

use futures::StreamExt;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

/// Namespace ("" for none) and name.
pub type Key = (String, String);

#[derive(Debug)]
struct Inner<K> {
    objects: RwLock<BTreeMap<Key, Arc<K>>>,
    wakes: RwLock<Vec<Arc<Notify>>>,
    ready: watch::Sender<bool>,
}

/// The objects of one kind.
#[derive(Debug)]
pub struct Cache<K>(Arc<Inner<K>>);

impl<K> Clone for Cache<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<K> Default for Cache<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K> Cache<K> {
    /// An empty cache; [`Cache::fill`] fills it.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(Inner { objects: RwLock::default(), wakes: RwLock::default(), ready: watch::Sender::new(false) }))
    }

    /// Whoever waits on `wake` is woken at each change.
    pub fn wakes(&self, wake: Arc<Notify>) {
        self.0.wakes.write().unwrap_or_else(PoisonError::into_inner).push(wake);
    }

    /// Waits for the first complete list.
    pub async fn ready(&self) {
        let _ = self.0.ready.subscribe().wait_for(|ready| *ready).await;
    }

    /// All objects, in the order of their keys.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<K>> {
        self.0.objects.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// One object.
    #[must_use]
    pub fn get(&self, namespace: &str, name: &str) -> Option<Arc<K>> {
        let key = (namespace.to_owned(), name.to_owned());
        self.0.objects.read().unwrap_or_else(PoisonError::into_inner).get(&key).cloned()
    }

    fn wake(&self) {
        for wake in self.0.wakes.read().unwrap_or_else(PoisonError::into_inner).iter() {
            wake.notify_one();
        }
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<Key, Arc<K>>)) {
        change(&mut self.0.objects.write().unwrap_or_else(PoisonError::into_inner));
    }
}

impl<K> Cache<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    /// Lists and watches until `stop`. `slim` takes away what nobody reads.
    pub async fn fill(self, api: Api<K>, slim: fn(&mut K), stop: CancellationToken) {
        // All objects in one answer: the server is in this process.
        let config = watcher::Config::default().timeout(290);
        let mut events = watcher::watcher(api, config).default_backoff().boxed();
        let mut fresh: BTreeMap<Key, Arc<K>> = BTreeMap::new();
        loop {
            let event = tokio::select! {
                () = stop.cancelled() => return,
                event = events.next() => event,
            };
            match event {
                None => return,
                Some(Err(error)) => {
                    tracing::debug!(%error, "a watch broke off");
                    continue;
                }
                Some(Ok(Event::Init)) => fresh.clear(),
                Some(Ok(Event::InitApply(mut object))) => {
                    trim(&mut object, slim);
                    fresh.insert(key(&object), Arc::new(object));
                    continue;
                }
                Some(Ok(Event::InitDone)) => {
                    let list = std::mem::take(&mut fresh);
                    self.change(|objects| *objects = list);
                    self.0.ready.send_replace(true);
                }
                Some(Ok(Event::Apply(mut object))) => {
                    trim(&mut object, slim);
                    self.change(|objects| {
                        objects.insert(key(&object), Arc::new(object));
                    });
                }
                Some(Ok(Event::Delete(object))) => self.change(|objects| {
                    objects.remove(&key(&object));
                }),
            }
            self.wake();
        }
    }
}

fn key<K: Resource>(object: &K) -> Key {
    let meta = object.meta();
    (meta.namespace.clone().unwrap_or_default(), meta.name.clone().unwrap_or_default())
}

fn trim<K: Resource>(object: &mut K, slim: fn(&mut K)) {
    object.meta_mut().managed_fields = None;
    if let Some(annotations) = &mut object.meta_mut().annotations {
        annotations.remove("kubectl.kubernetes.io/last-applied-configuration");
    }
    slim(object);
}

/// Takes from a pod what no controller reads.
pub fn slim_pod(pod: &mut Pod) {
    if let Some(spec) = &mut pod.spec {
        for container in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
            container.env = None;
            container.args = None;
            container.command = None;
            container.volume_mounts = None;
            container.volume_devices = None;
            container.security_context = None;
        }
    }
    if let Some(status) = &mut pod.status {
        status.init_container_statuses = None;
    }
}

/// Takes from a node what no controller reads.
pub fn slim_node(node: &mut Node) {
    if let Some(status) = &mut node.status {
        status.images = None;
    }
}
