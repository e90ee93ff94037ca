//! Owners and what they own.
//!
//! [`Graph`] holds the metadata of every object that is served (Events excepted), by watches that come and go with the
//! definitions of custom resources. [`Collector`] looks at those that name owners:
//!
//! * an owner is *solid* (there, with the same UID), *waiting* (being deleted in the foreground) or *gone*;
//! * with a solid owner, references to others are taken off;
//! * otherwise, an object all of whose owners are waiting or gone is deleted, with a UID precondition.
//!
//! *Gone* is never believed of the graph: the server is asked for the owner by name, and it is gone when there is none or one with
//! another UID. The finalizer `foregroundDeletion` comes off when no dependent blocks any more, `orphan` when no dependent names
//! the object any more.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, Preconditions, PropagationPolicy};
use kube::core::PartialObjectMeta;
use kube::discovery::{Discovery, Scope, verbs};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::Controller;
use super::cache::Key;

const FOREGROUND: &str = "foregroundDeletion";
const ORPHAN: &str = "orphan";
/// Owners that were found gone and are remembered.
const GONE_MAX: usize = 50_000;
/// A kind that could not be found is looked for again after this.
const UNKNOWN_KIND: Duration = Duration::from_secs(30);

/// What the collector knows of an object.
#[derive(Debug, Clone)]
pub struct Item {
    /// Which resource it is of.
    pub resource: Arc<Served>,
    /// Namespace, "" for none.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
    version: String,
    owners: Vec<OwnerReference>,
    finalizers: Vec<String>,
    /// Whether it is being deleted.
    pub deleting: bool,
}

/// A resource that is served.
#[derive(Debug, Clone)]
pub struct Served {
    /// How it is addressed.
    pub resource: ApiResource,
    /// Whether it lives in namespaces.
    pub namespaced: bool,
}

impl Served {
    fn id(&self) -> String {
        format!("{}/{}", self.resource.group, self.resource.plural)
    }

    /// The API for objects of one namespace, or of none.
    #[must_use]
    pub fn api(&self, client: &Client, namespace: &str) -> Api<DynamicObject> {
        if self.namespaced {
            Api::namespaced_with(client.clone(), namespace, &self.resource)
        } else {
            Api::all_with(client.clone(), &self.resource)
        }
    }
}

struct Watched {
    served: Arc<Served>,
    stop: CancellationToken,
}

#[derive(Default)]
struct Inner {
    items: BTreeMap<String, BTreeMap<Key, Arc<Item>>>,
    ready: BTreeSet<String>,
    watched: BTreeMap<String, Watched>,
    wakes: Vec<Arc<Notify>>,
}

/// The metadata of every object.
#[derive(Clone)]
pub struct Graph {
    client: Client,
    inner: Arc<Mutex<Inner>>,
    definitions: Arc<Notify>,
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Graph")
    }
}

impl Graph {
    /// An empty graph; [`Graph::feed`] fills it.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client, inner: Arc::default(), definitions: Arc::new(Notify::new()) }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whoever waits on `wake` is woken at each change.
    pub fn wakes(&self, wake: Arc<Notify>) {
        self.lock().wakes.push(wake);
    }

    /// Whether every resource has been listed once.
    #[must_use]
    pub fn ready(&self) -> bool {
        let inner = self.lock();
        !inner.watched.is_empty() && inner.watched.keys().all(|id| inner.ready.contains(id))
    }

    /// All resources that live in namespaces.
    #[must_use]
    pub fn namespaced(&self) -> Vec<Arc<Served>> {
        self.lock().watched.values().map(|w| w.served.clone()).filter(|s| s.namespaced).collect()
    }

    /// All objects in a namespace.
    #[must_use]
    pub fn in_namespace(&self, namespace: &str) -> Vec<Arc<Item>> {
        let inner = self.lock();
        inner.items.values().flat_map(|m| m.values()).filter(|i| i.namespace == namespace).cloned().collect()
    }

    fn all(&self) -> Vec<Arc<Item>> {
        self.lock().items.values().flat_map(|m| m.values().cloned()).collect()
    }

    fn find(&self, api_version: &str, kind: &str) -> Option<Arc<Served>> {
        let group = api_version.split_once('/').map_or("", |(group, _)| group);
        let inner = self.lock();
        inner
            .watched
            .values()
            .map(|w| &w.served)
            .find(|s| s.resource.group == group && s.resource.kind == kind)
            .cloned()
    }

    /// Watches everything until `stop`; what is served is asked again when definitions change.
    pub async fn feed(self, stop: CancellationToken) {
        loop {
            let wait = match self.discover(&stop).await {
                Ok(()) => None,
                Err(error) => {
                    tracing::warn!(%error, "the served resources are not known");
                    Some(Duration::from_secs(1))
                }
            };
            let deadline = async {
                match wait {
                    Some(wait) => tokio::time::sleep(wait).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.definitions.notified() => {}
                () = deadline => {}
            }
        }
    }

    async fn discover(&self, stop: &CancellationToken) -> Result<(), kube::Error> {
        let found = Discovery::new(self.client.clone()).exclude(&[api::names::SUBRESOURCE_GROUP]).run().await?;
        let mut served = BTreeMap::new();
        for group in found.groups() {
            for (resource, capabilities) in group.recommended_resources() {
                if resource.kind == "Event" || !capabilities.supports_operation(verbs::WATCH) {
                    continue;
                }
                let namespaced = capabilities.scope == Scope::Namespaced;
                let one = Served { resource, namespaced };
                served.insert(one.id(), Arc::new(one));
            }
        }
        let mut inner = self.lock();
        let gone: Vec<String> = inner.watched.keys().filter(|id| !served.contains_key(*id)).cloned().collect();
        for id in gone {
            if let Some(watched) = inner.watched.remove(&id) {
                watched.stop.cancel();
            }
            inner.items.remove(&id);
            inner.ready.remove(&id);
        }
        for (id, served) in served {
            inner.watched.entry(id.clone()).or_insert_with(|| {
                let stop = stop.child_token();
                tokio::spawn(self.clone().watch(id, served.clone(), stop.clone()));
                Watched { served, stop }
            });
        }
        Ok(())
    }

    async fn watch(self, id: String, served: Arc<Served>, stop: CancellationToken) {
        let api: Api<PartialObjectMeta<DynamicObject>> = Api::all_with(self.client.clone(), &served.resource);
        let mut events = watcher::watcher(api, watcher::Config::default().timeout(290)).default_backoff().boxed();
        let definitions = served.resource.kind == "CustomResourceDefinition";
        let mut fresh = BTreeMap::new();
        loop {
            let event = tokio::select! {
                () = stop.cancelled() => return,
                event = events.next() => event,
            };
            let mut inner = match event {
                None => return,
                Some(Err(error)) => {
                    tracing::debug!(resource = id, %error, "a watch broke off");
                    continue;
                }
                Some(Ok(Event::Init)) => {
                    fresh.clear();
                    continue;
                }
                Some(Ok(Event::InitApply(object))) => {
                    let (key, item) = item(&served, object);
                    fresh.insert(key, Arc::new(item));
                    continue;
                }
                Some(Ok(Event::InitDone)) => {
                    let mut inner = self.lock();
                    inner.items.insert(id.clone(), std::mem::take(&mut fresh));
                    inner.ready.insert(id.clone());
                    inner
                }
                Some(Ok(Event::Apply(object))) => {
                    let (key, item) = item(&served, object);
                    let mut inner = self.lock();
                    inner.items.entry(id.clone()).or_default().insert(key, Arc::new(item));
                    inner
                }
                Some(Ok(Event::Delete(object))) => {
                    let (key, _) = item(&served, object);
                    let mut inner = self.lock();
                    inner.items.entry(id.clone()).or_default().remove(&key);
                    inner
                }
            };
            if stop.is_cancelled() {
                // The definition went while we were writing.
                inner.items.remove(&id);
                return;
            }
            for wake in &inner.wakes {
                wake.notify_one();
            }
            drop(inner);
            if definitions {
                self.definitions.notify_one();
            }
        }
    }
}

fn item(served: &Arc<Served>, object: PartialObjectMeta<DynamicObject>) -> (Key, Item) {
    let meta = object.metadata;
    let item = Item {
        resource: served.clone(),
        namespace: meta.namespace.unwrap_or_default(),
        name: meta.name.unwrap_or_default(),
        uid: meta.uid.unwrap_or_default(),
        version: meta.resource_version.unwrap_or_default(),
        owners: meta.owner_references.unwrap_or_default(),
        finalizers: meta.finalizers.unwrap_or_default(),
        deleting: meta.deletion_timestamp.is_some(),
    };
    ((item.namespace.clone(), item.name.clone()), item)
}

impl Item {
    fn has(&self, finalizer: &str) -> bool {
        self.finalizers.iter().any(|f| f == finalizer)
    }

    fn waits_for_dependents(&self) -> bool {
        self.deleting && self.has(FOREGROUND)
    }
}

/// What to do with an object that names owners.
#[derive(Debug, Clone, PartialEq)]
enum Verdict {
    Keep,
    /// References to take off.
    Release(BTreeSet<String>),
    Delete(PropagationPolicy),
}

/// How an owner is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Solid,
    Waiting,
    Gone,
    /// Its kind is not served, or the reference crosses namespaces: nothing is done because of it.
    Unknown,
}

fn judge(item: &Item, owners: &[(String, Owner)], has_dependents: bool) -> Verdict {
    let of =
        |what: Owner| owners.iter().filter(|(_, o)| *o == what).map(|(uid, _)| uid.clone()).collect::<BTreeSet<_>>();
    if owners.iter().any(|(_, o)| *o == Owner::Unknown) || (item.deleting && !item.waits_for_dependents()) {
        return Verdict::Keep;
    }
    let (waiting, mut off) = (of(Owner::Waiting), of(Owner::Gone));
    if owners.iter().any(|(_, o)| *o == Owner::Solid) {
        off.extend(waiting);
        return if off.is_empty() { Verdict::Keep } else { Verdict::Release(off) };
    }
    if item.deleting {
        return Verdict::Keep;
    }
    if !waiting.is_empty() && has_dependents {
        return Verdict::Delete(PropagationPolicy::Foreground);
    }
    Verdict::Delete(if item.has(ORPHAN) {
        PropagationPolicy::Orphan
    } else if item.has(FOREGROUND) {
        PropagationPolicy::Foreground
    } else {
        PropagationPolicy::Background
    })
}

/// The controller.
pub struct Collector {
    client: Client,
    graph: Graph,
    /// UIDs that the server said are no more. UIDs never come back.
    gone: BTreeSet<String>,
}

impl Collector {
    /// A collector over a graph.
    #[must_use]
    pub fn new(client: Client, graph: Graph) -> Self {
        Self { client, graph, gone: BTreeSet::new() }
    }

    async fn owner(
        &mut self,
        item: &Item,
        reference: &OwnerReference,
        known: &BTreeMap<&str, &Arc<Item>>,
    ) -> Result<Owner, kube::Error> {
        if let Some(owner) = known.get(reference.uid.as_str()) {
            let same_place = owner.namespace.is_empty() || owner.namespace == item.namespace;
            return Ok(match (same_place, owner.waits_for_dependents()) {
                (false, _) => Owner::Unknown,
                (true, true) => Owner::Waiting,
                (true, false) => Owner::Solid,
            });
        }
        if self.gone.contains(&reference.uid) {
            return Ok(Owner::Gone);
        }
        let Some(served) = self.graph.find(&reference.api_version, &reference.kind) else { return Ok(Owner::Unknown) };
        if served.namespaced && item.namespace.is_empty() {
            return Ok(Owner::Unknown);
        }
        let live = served.api(&self.client, &item.namespace).get_opt(&reference.name).await?;
        Ok(match live {
            Some(owner) if owner.metadata.uid.as_deref() == Some(&reference.uid) => Owner::Solid,
            _ => {
                if self.gone.len() >= GONE_MAX {
                    self.gone.clear();
                }
                self.gone.insert(reference.uid.clone());
                Owner::Gone
            }
        })
    }

    async fn patch(&self, item: &Item, patch: serde_json::Value) -> Result<(), kube::Error> {
        let api = item.resource.api(&self.client, &item.namespace);
        match api.patch(&item.name, &PatchParams::default(), &Patch::Merge(patch)).await {
            // It changed or went meanwhile: the graph will say so.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            other => other.map(drop),
        }
    }

    async fn release(&self, item: &Item, off: &BTreeSet<String>) -> Result<(), kube::Error> {
        let owners: Vec<_> = item.owners.iter().filter(|o| !off.contains(&o.uid)).collect();
        let owners = if owners.is_empty() { serde_json::Value::Null } else { json!(owners) };
        let patch = json!({"metadata": {"uid": item.uid, "resourceVersion": item.version, "ownerReferences": owners}});
        self.patch(item, patch).await
    }

    async fn finish(&self, item: &Item, finalizer: &str) -> Result<(), kube::Error> {
        let left: Vec<_> = item.finalizers.iter().filter(|f| *f != finalizer).collect();
        let patch = json!({"metadata": {"uid": item.uid, "resourceVersion": item.version, "finalizers": left}});
        self.patch(item, patch).await
    }

    async fn delete(&self, item: &Item, policy: PropagationPolicy) -> Result<(), kube::Error> {
        tracing::info!(
            kind = item.resource.resource.kind,
            namespace = item.namespace,
            name = item.name,
            ?policy,
            "deleting what has no owner any more"
        );
        let params = DeleteParams {
            propagation_policy: Some(policy),
            // Also the version: an owner may have been added meanwhile.
            preconditions: Some(Preconditions {
                uid: Some(item.uid.clone()),
                resource_version: Some(item.version.clone()),
            }),
            ..DeleteParams::default()
        };
        match item.resource.api(&self.client, &item.namespace).delete(&item.name, &params).await {
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            other => other.map(drop),
        }
    }
}

impl Controller for Collector {
    const NAME: &'static str = "gc";

    async fn pass(&mut self) -> Result<Option<Duration>, kube::Error> {
        if !self.graph.ready() {
            return Ok(None);
        }
        let items = self.graph.all();
        let known: BTreeMap<&str, &Arc<Item>> = items.iter().map(|i| (i.uid.as_str(), i)).collect();
        let mut dependents: BTreeMap<&str, Vec<(&Arc<Item>, &OwnerReference)>> = BTreeMap::new();
        for item in items.iter().filter(|i| !i.owners.is_empty()) {
            for owner in &item.owners {
                dependents.entry(owner.uid.as_str()).or_default().push((item, owner));
            }
        }
        for item in items.iter().filter(|i| i.deleting && i.has(ORPHAN)) {
            let mine = dependents.get(item.uid.as_str()).cloned().unwrap_or_default();
            for (dependent, _) in &mine {
                self.release(dependent, &BTreeSet::from([item.uid.clone()])).await?;
            }
            if mine.is_empty() {
                self.finish(item, ORPHAN).await?;
            }
        }
        for item in items.iter().filter(|i| i.waits_for_dependents()) {
            let mine = dependents.get(item.uid.as_str());
            let blocked = mine.is_some_and(|m| m.iter().any(|(_, o)| o.block_owner_deletion == Some(true)));
            if !blocked {
                self.finish(item, FOREGROUND).await?;
            }
        }
        let mut again = None;
        for item in items.iter().filter(|i| !i.owners.is_empty()) {
            if item.owners.iter().any(|o| known.get(o.uid.as_str()).is_some_and(|o| o.deleting && o.has(ORPHAN))) {
                continue;
            }
            let mut owners = Vec::with_capacity(item.owners.len());
            for reference in &item.owners {
                owners.push((reference.uid.clone(), self.owner(item, reference, &known).await?));
            }
            if owners.iter().any(|(_, o)| *o == Owner::Unknown) {
                again = Some(UNKNOWN_KIND);
            }
            match judge(item, &owners, dependents.contains_key(item.uid.as_str())) {
                Verdict::Keep => {}
                Verdict::Release(off) => self.release(item, &off).await?,
                Verdict::Delete(policy) => self.delete(item, policy).await?,
            }
        }
        Ok(again)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(finalizers: &[&str], deleting: bool) -> Item {
        Item {
            resource: Arc::new(Served {
                resource: ApiResource::erase::<k8s_openapi::api::core::v1::Pod>(&()),
                namespaced: true,
            }),
            namespace: "default".into(),
            name: "a".into(),
            uid: "1".into(),
            version: "1".into(),
            owners: Vec::new(),
            finalizers: finalizers.iter().map(|f| (*f).to_owned()).collect(),
            deleting,
        }
    }

    #[test]
    fn an_object_goes_with_its_last_owner() {
        let owners = |list: &[Owner]| list.iter().enumerate().map(|(i, o)| (i.to_string(), *o)).collect::<Vec<_>>();
        let free = item(&[], false);
        assert_eq!(judge(&free, &owners(&[Owner::Solid]), false), Verdict::Keep);
        assert_eq!(
            judge(&free, &owners(&[Owner::Solid, Owner::Gone, Owner::Waiting]), false),
            Verdict::Release(BTreeSet::from(["1".into(), "2".into()]))
        );
        assert_eq!(judge(&free, &owners(&[Owner::Gone]), false), Verdict::Delete(PropagationPolicy::Background));
        assert_eq!(judge(&free, &owners(&[Owner::Gone, Owner::Unknown]), false), Verdict::Keep);
        assert_eq!(judge(&free, &owners(&[Owner::Waiting]), true), Verdict::Delete(PropagationPolicy::Foreground));
        assert_eq!(judge(&free, &owners(&[Owner::Waiting]), false), Verdict::Delete(PropagationPolicy::Background));
        assert_eq!(judge(&item(&[], true), &owners(&[Owner::Gone]), false), Verdict::Keep);
        assert_eq!(
            judge(&item(&[ORPHAN], false), &owners(&[Owner::Gone]), false),
            Verdict::Delete(PropagationPolicy::Orphan)
        );
    }
}
