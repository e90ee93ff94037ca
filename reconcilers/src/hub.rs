//! Watch caches and their fan-out: one watch and one store a kind, however many listen.
//!
//! *What it guarantees a subscriber:* it hears of every object that the store has when it subscribes, of each later version or a
//! newer one, of every deletion, and of whatever a new list does not have any more (as [`Sight::Vanished`]: a reason to
//! ask, not evidence). Entries of one object (by UID) coalesce, newest wins; two objects of one name never do. A slow
//! subscriber costs memory bounded by the number of objects and blocks nobody.
//!
//! *When the store went back* (restored from a backup) every object looks older than what is known, and the watch may wait
//! for a revision that lies far ahead. So each new list and each failed watch makes the hub ask, by a quorum list, how far
//! the store is; below what was seen, it hears nothing more and says so ([`Hub::went_back`]).

use futures::{Stream, StreamExt, future::BoxFuture};
use kube::{Api, Client, Resource, api::ListParams, core::ApiResource, runtime::watcher};
use serde::{Deserialize, Deserializer};
use state::{
    Key, NodeName, ResourceVersion, Uid,
    object::{Kind, ObjectRef, Pattern},
    observe::{Meta, NodeView, Object, Project},
    set::{self, SetView},
    vm::Sight,
};
use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap, VecDeque, hash_map},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

/// What is kept of an object.
#[derive(Debug)]
pub struct Kept<P> {
    /// Name of the controlling owner, which is the cell of a pod.
    pub owner: Option<Box<str>>,
    /// What the machines keep.
    pub view: Arc<P>,
}

impl<P> Clone for Kept<P> {
    fn clone(&self) -> Self {
        Self { owner: self.owner.clone(), view: self.view.clone() }
    }
}

impl<P: Watched> Kept<P> {
    /// Namespace and name.
    pub fn key(&self) -> Key {
        let m = self.view.meta();
        Key::new(m.namespace.clone(), m.name.clone())
    }

    fn reference(&self) -> ObjectRef {
        let Key { namespace, name } = self.key();
        ObjectRef { kind: P::KIND, namespace, name, uid: self.view.uid().clone() }
    }
}

/// An object as a watch brings it: with what kube's watcher needs to know of it.
#[derive(Debug, Clone)]
pub struct Seen<P> {
    meta: kube::api::ObjectMeta,
    kept: Kept<P>,
}

impl<'de, P: Project> Deserialize<'de> for Seen<P> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        // In one go, so that nothing of what nobody keeps is ever in memory.
        let raw = P::Raw::deserialize(d)?;
        let m = P::metadata(&raw);
        let owner = m.owner_references.iter().find(|o| o.controller).map(|o| o.name.as_str().into());
        let meta = kube::api::ObjectMeta {
            name: Some(m.name.clone()),
            namespace: Some(m.namespace.clone()).filter(|n| !n.is_empty()),
            uid: Some(m.uid.clone()),
            resource_version: Some(m.resource_version.clone()),
            ..Default::default()
        };
        Ok(Self { meta, kept: Kept { owner, view: Arc::new(P::project(raw)) } })
    }
}

impl<P> Resource for Seen<P> {
    type DynamicType = ApiResource;
    type Scope = kube::core::DynamicResourceScope;
    fn kind(t: &ApiResource) -> Cow<'_, str> {
        Cow::Borrowed(&t.kind)
    }
    fn group(t: &ApiResource) -> Cow<'_, str> {
        Cow::Borrowed(&t.group)
    }
    fn version(t: &ApiResource) -> Cow<'_, str> {
        Cow::Borrowed(&t.version)
    }
    fn api_version(t: &ApiResource) -> Cow<'_, str> {
        Cow::Borrowed(&t.api_version)
    }
    fn plural(t: &ApiResource) -> Cow<'_, str> {
        Cow::Borrowed(&t.plural)
    }
    fn meta(&self) -> &kube::api::ObjectMeta {
        &self.meta
    }
    fn meta_mut(&mut self) -> &mut kube::api::ObjectMeta {
        &mut self.meta
    }
}

/// One thing that a subscriber hears.
#[derive(Debug, Clone)]
pub enum Entry {
    /// For the Vm cell of this key.
    Vm(Key, Sight),
    /// For the Set cell of this key.
    Set(Key, set::Sight),
    /// A Node is there.
    Node(Box<NodeView>),
    /// A Node object was deleted (`true`), which proves nothing about what runs there, or is missing in a new list.
    NodeGone(NodeName, Uid, bool),
}

/// A kind of object that cells are told of.
pub trait Watched: Project + Clone + std::fmt::Debug + Send + Sync + 'static {
    /// The kind.
    const KIND: Kind;
    /// Its metadata.
    fn meta(&self) -> &Meta;
    /// What a subscriber hears when the object is there.
    fn present(kept: &Kept<Self>) -> Entry;
    /// What it hears when it was deleted (`true`), or is missing in a new list.
    fn absent(kept: &Kept<Self>, deleted: bool) -> Entry;
}

macro_rules! watched {
    ($($view:ident $kind:ident $object:ident $cell:expr;)*) => { $(
        impl Watched for state::observe::$view {
            const KIND: Kind = Kind::$kind;
            fn meta(&self) -> &Meta {
                &self.meta
            }
            fn present(kept: &Kept<Self>) -> Entry {
                let cell: fn(&Kept<Self>) -> Key = $cell;
                Entry::Vm(cell(kept), Sight::Present(Object::$object(kept.view.clone())))
            }
            fn absent(kept: &Kept<Self>, deleted: bool) -> Entry {
                let cell: fn(&Kept<Self>) -> Key = $cell;
                let r = kept.reference();
                Entry::Vm(cell(kept), if deleted { Sight::Gone(r) } else { Sight::Vanished(r) })
            }
        }
    )* };
}
watched! {
    VmView VirtualMachine Vm Kept::key;
    VmiView VirtualMachineInstance Vmi Kept::key;
    PodView Pod Pod |k| Key { name: k.owner.as_deref().unwrap_or_default().into(), ..k.key() };
    // The driver turns the claim's name into the cells that asked for it.
    ClaimView PersistentVolumeClaim Claim Kept::key;
}

impl Watched for SetView {
    const KIND: Kind = Kind::VirtualMachineInstanceReplicaSet;
    fn meta(&self) -> &Meta {
        &self.meta
    }
    fn present(kept: &Kept<Self>) -> Entry {
        Entry::Set(kept.key(), set::Sight::Set(Box::new(kept.view.as_ref().clone())))
    }
    fn absent(kept: &Kept<Self>, deleted: bool) -> Entry {
        let r = kept.reference();
        Entry::Set(kept.key(), if deleted { set::Sight::Gone(r) } else { set::Sight::Vanished(r) })
    }
}

impl Watched for NodeView {
    const KIND: Kind = Kind::Node;
    fn meta(&self) -> &Meta {
        &self.meta
    }
    fn present(kept: &Kept<Self>) -> Entry {
        Entry::Node(Box::new(kept.view.as_ref().clone()))
    }
    fn absent(kept: &Kept<Self>, deleted: bool) -> Entry {
        let m = &kept.view.meta;
        Entry::NodeGone(m.name.as_str().into(), m.uid.clone(), deleted)
    }
}

/// What the kind is called at the API.
pub fn resource(kind: Kind) -> ApiResource {
    let (group, version, plural) = match kind {
        Kind::VirtualMachine => (api::names::GROUP, "v1", "virtualmachines"),
        Kind::VirtualMachineInstance => (api::names::GROUP, "v1", "virtualmachineinstances"),
        Kind::VirtualMachineInstanceReplicaSet => (api::names::GROUP, "v1", "virtualmachineinstancereplicasets"),
        Kind::Pod => ("", "v1", "pods"),
        Kind::ControllerRevision => ("apps", "v1", "controllerrevisions"),
        Kind::PersistentVolumeClaim => ("", "v1", "persistentvolumeclaims"),
        Kind::Node => ("", "v1", "nodes"),
        Kind::Pattern(p) => (Pattern::GROUP, Pattern::VERSION, p.plural()),
    };
    ApiResource {
        group: group.into(),
        version: version.into(),
        api_version: if group.is_empty() { version.into() } else { format!("{group}/{version}") },
        kind: kind.name().into(),
        plural: plural.into(),
    }
}

/// A coalescing queue: what one subscriber has not taken yet.
#[derive(Debug, Default)]
pub struct Queue {
    inner: Mutex<Waiting>,
    some: Notify,
    adds: AtomicU64,
}

#[derive(Debug, Default)]
struct Waiting {
    order: VecDeque<(Kind, Uid)>,
    /// With the time since when the object waits.
    entries: HashMap<(Kind, Uid), (Entry, Instant)>,
}

impl Queue {
    fn push(&self, id: (Kind, Uid), entry: Entry) {
        self.adds.fetch_add(1, Ordering::Relaxed);
        let mut q = lock(&self.inner);
        match q.entries.entry(id.clone()) {
            hash_map::Entry::Occupied(mut waiting) => waiting.get_mut().0 = entry,
            hash_map::Entry::Vacant(place) => {
                place.insert((entry, Instant::now()));
                q.order.push_back(id);
            }
        }
        drop(q);
        self.some.notify_one();
    }

    /// How many entries came so far, and how many wait.
    pub fn counts(&self) -> (u64, usize) {
        (self.adds.load(Ordering::Relaxed), lock(&self.inner).order.len())
    }

    /// The next entry, oldest object first, and since when it has waited.
    pub async fn next(&self) -> (Entry, Instant) {
        loop {
            {
                let mut q = lock(&self.inner);
                if let Some(entry) = q.order.pop_front().and_then(|id| q.entries.remove(&id)) {
                    if !q.order.is_empty() {
                        self.some.notify_one();
                    }
                    return entry;
                }
            }
            self.some.notified().await;
        }
    }
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing inside can panic half-way through a change.
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Cache<P> {
    objects: BTreeMap<Uid, Kept<P>>,
    /// Known by somebody's own write, and not by the watch yet.
    noted: BTreeMap<Uid, Kept<P>>,
    subscribers: Vec<Arc<Queue>>,
}

/// How far the store is, by a quorum list of a kind; `None` where it does not say.
pub type Quorum = Box<dyn Fn() -> BoxFuture<'static, Option<ResourceVersion>> + Send + Sync>;

/// A store that is not as far any more as it was.
#[derive(Debug, Clone, thiserror::Error)]
#[error("the API server's store went back in time: {kind} had come to version {seen}, and it is at {newest} now")]
pub struct WentBack {
    /// What was listed.
    pub kind: &'static str,
    /// The highest version that was seen.
    pub seen: ResourceVersion,
    /// Where the store is.
    pub newest: ResourceVersion,
}

/// The cache of one kind.
pub struct Hub<P> {
    cache: Arc<Mutex<Cache<P>>>,
    synced: watch::Receiver<bool>,
    went_back: watch::Receiver<Option<WentBack>>,
}

impl<P: Watched> Hub<P> {
    /// Starts watching; the task ends with the runtime. `selector` is a label selector, empty for all.
    pub fn start(client: Client, selector: &str) -> Self {
        let api: Api<Seen<P>> = Api::all_with(client, &resource(P::KIND));
        let asked = api.clone();
        let quorum: Quorum = Box::new(move || {
            let api = asked.clone();
            Box::pin(async move {
                let list = api.list_metadata(&ListParams::default().limit(1)).await.ok()?;
                list.metadata.resource_version?.parse().ok().map(ResourceVersion)
            })
        });
        let config = watcher::Config::default().labels(selector);
        use kube::runtime::WatchStreamExt;
        Self::over(watcher(api, config).default_backoff(), quorum)
    }

    /// A hub over any stream of watch events.
    pub fn over(
        events: impl Stream<Item = watcher::Result<watcher::Event<Seen<P>>>> + Send + 'static,
        quorum: Quorum,
    ) -> Self {
        let cache =
            Arc::new(Mutex::new(Cache { objects: BTreeMap::new(), noted: BTreeMap::new(), subscribers: vec![] }));
        let (ready, synced) = watch::channel(false);
        let (back, went_back) = watch::channel(None);
        let hub = Self { cache: cache.clone(), synced, went_back };
        tokio::spawn(async move {
            let mut events = events.boxed();
            let mut listed: BTreeMap<Uid, Kept<P>> = BTreeMap::new();
            let mut seen = ResourceVersion(0);
            while let Some(event) = events.next().await {
                let doubtful = matches!(event, Err(_) | Ok(watcher::Event::InitDone)) && *ready.borrow();
                if doubtful && let Some(newest) = quorum().await.filter(|newest| *newest < seen) {
                    back.send_replace(Some(WentBack { kind: P::KIND.name(), seen, newest }));
                    return;
                }
                if let Ok(watcher::Event::Apply(o) | watcher::Event::Delete(o) | watcher::Event::InitApply(o)) = &event
                {
                    let rv = o.meta.resource_version.as_deref().and_then(|v| v.parse().ok());
                    seen = seen.max(rv.map_or(seen, ResourceVersion));
                }
                match event {
                    Ok(watcher::Event::Apply(o)) => lock(&cache).apply(o.kept),
                    Ok(watcher::Event::Delete(o)) => lock(&cache).remove(&o.kept),
                    Ok(watcher::Event::Init) => listed.clear(),
                    Ok(watcher::Event::InitApply(o)) => {
                        listed.insert(o.kept.view.uid().clone(), o.kept);
                    }
                    Ok(watcher::Event::InitDone) => {
                        lock(&cache).replace(std::mem::take(&mut listed));
                        ready.send_replace(true);
                    }
                    Err(error) => tracing::warn!(kind = P::KIND.name(), %error, "watch"),
                }
            }
        });
        hub
    }

    /// Waits until the store is found to have gone back; for ever where it does not.
    pub async fn went_back(&self) -> WentBack {
        let mut went_back = self.went_back.clone();
        match went_back.wait_for(Option::is_some).await.ok().and_then(|found| found.clone()) {
            Some(found) => found,
            // The watch task is gone, with the runtime.
            None => std::future::pending().await,
        }
    }

    /// Sends all that is there, and from now on all that changes, to the queue. Snapshot and registration are one step.
    pub fn subscribe(&self, queue: Arc<Queue>) {
        let mut cache = lock(&self.cache);
        for o in cache.objects.values() {
            queue.push((P::KIND, o.view.uid().clone()), P::present(o));
        }
        cache.subscribers.push(queue);
    }

    /// Waits until the first list is in.
    pub async fn synced(&self) {
        let mut synced = self.synced.clone();
        // An error means that the watch task is gone, with the runtime.
        let _ = synced.wait_for(|s| *s).await;
    }

    /// All objects.
    pub fn all(&self) -> Vec<Kept<P>> {
        lock(&self.cache).objects.values().cloned().collect()
    }

    /// All objects of a namespace.
    pub fn of_namespace(&self, namespace: &str) -> Vec<Kept<P>> {
        let of = |o: &&Kept<P>| o.view.meta().namespace == namespace;
        lock(&self.cache).objects.values().filter(of).cloned().collect()
    }

    /// Remembers what did not come by the watch yet (what a write returned), so that a list without it is noticed. Nobody is
    /// told: who wrote knows, and everybody else hears of it by the watch.
    pub fn note(&self, view: &Arc<P>, r: &ObjectRef, owner: Option<&str>) {
        let mut cache = lock(&self.cache);
        if cache.objects.contains_key(&r.uid) {
            return;
        }
        let kept = Kept { owner: owner.map(Into::into), view: view.clone() };
        cache.noted.insert(r.uid.clone(), kept);
    }

    /// An object by namespace and name.
    pub fn find(&self, namespace: &str, name: &str) -> Option<Kept<P>> {
        let of = |o: &&Kept<P>| o.view.meta().name == name && o.view.meta().namespace == namespace;
        lock(&self.cache).objects.values().find(of).cloned()
    }
}

impl<P: Watched> Cache<P> {
    fn tell(&self, uid: &Uid, entry: &Entry) {
        for q in &self.subscribers {
            q.push((P::KIND, uid.clone()), entry.clone());
        }
    }

    fn apply(&mut self, o: Kept<P>) {
        let uid = o.view.uid().clone();
        // A restarted watch may be behind.
        if self.objects.get(&uid).is_some_and(|k| k.view.rv() >= o.view.rv()) {
            return;
        }
        self.tell(&uid, &P::present(&o));
        self.noted.remove(&uid);
        self.objects.insert(uid, o);
    }

    fn remove(&mut self, o: &Kept<P>) {
        let uid = o.view.uid().clone();
        self.tell(&uid, &P::absent(o, true));
        self.noted.remove(&uid);
        self.objects.remove(&uid);
    }

    fn replace(&mut self, listed: BTreeMap<Uid, Kept<P>>) {
        let known = self.objects.keys().chain(self.noted.keys());
        let vanished: Vec<_> = known.filter(|uid| !listed.contains_key(*uid)).cloned().collect();
        let mut noted = std::mem::take(&mut self.noted);
        for uid in vanished {
            if let Some(o) = self.objects.remove(&uid).or_else(|| noted.remove(&uid)) {
                self.tell(&uid, &P::absent(&o, false));
            }
        }
        for o in listed.into_values() {
            self.apply(o);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;
    use state::observe::VmiView;

    fn vmi(name: &str, uid: &str, rv: u64) -> Seen<VmiView> {
        serde_json::from_value(
            json!({"metadata": {"namespace": "ns", "name": name, "uid": uid, "resourceVersion": rv.to_string()}}),
        )
        .unwrap()
    }

    fn text(e: Entry) -> String {
        match e {
            Entry::Vm(_, Sight::Present(o)) => format!("{}@{}", o.reference().uid, o.rv()),
            Entry::Vm(_, Sight::Gone(r)) => format!("{} gone", r.uid),
            Entry::Vm(_, Sight::Vanished(r)) => format!("{} vanished", r.uid),
            Entry::Set(key, _) => key.name,
            Entry::Node(n) => n.meta.name,
            Entry::NodeGone(n, ..) => n.0,
        }
    }

    async fn drain(q: &Queue) -> Vec<String> {
        let mut out = vec![];
        while let Some(e) = futures::FutureExt::now_or_never(q.next()) {
            out.push(text(e.0));
        }
        out
    }

    #[tokio::test]
    async fn deletions_relists_and_late_subscribers() {
        use watcher::Event::{Apply, Delete, Init, InitApply, InitDone};
        let (tx, rx) = tokio::sync::mpsc::unbounded_channel();
        let far: Quorum = Box::new(|| Box::pin(async { Some(ResourceVersion(11)) }));
        let hub = Hub::over(tokio_stream::wrappers::UnboundedReceiverStream::new(rx), far);
        let q = Arc::new(Queue::default());
        hub.subscribe(q.clone());
        for e in [Init, InitApply(vmi("a", "1", 5)), InitApply(vmi("b", "2", 6)), InitDone] {
            tx.send(Ok(e)).unwrap();
        }
        hub.synced().await;
        assert_eq!(drain(&q).await, ["1@5", "2@6"]);
        // Newest wins, an older version is ignored, a deletion and a new object of that name are two entries.
        for e in [Apply(vmi("a", "1", 9)), Apply(vmi("a", "1", 7)), Delete(vmi("a", "1", 10)), Apply(vmi("a", "3", 11))]
        {
            tx.send(Ok(e)).unwrap();
        }
        tokio::task::yield_now().await;
        assert_eq!(drain(&q).await, ["1 gone", "3@11"]);
        // A relist: b vanished, the rest is silent.
        for e in [Init, InitApply(vmi("a", "3", 11)), InitDone] {
            tx.send(Ok(e)).unwrap();
        }
        tokio::task::yield_now().await;
        assert_eq!(drain(&q).await, ["2 vanished"]);
        let late = Arc::new(Queue::default());
        hub.subscribe(late.clone());
        assert_eq!(drain(&late).await, ["3@11"]);
        // What a write returned, and what the watch never showed: a list without it tells, too.
        let written = vmi("c", "4", 12);
        hub.note(&written.kept.view, &written.kept.reference(), None);
        for e in [Init, InitApply(vmi("a", "3", 11)), InitDone] {
            tx.send(Ok(e)).unwrap();
        }
        tokio::task::yield_now().await;
        assert_eq!(drain(&late).await, ["4 vanished"]);
    }

    #[tokio::test]
    async fn a_store_that_went_back_is_noticed_and_nothing_of_it_is_heard() {
        use watcher::Event::{Apply, Init, InitApply, InitDone};
        let (tx, rx) = tokio::sync::mpsc::unbounded_channel();
        let (at, newest) = watch::channel(20);
        let quorum: Quorum = Box::new(move || {
            let newest = *newest.borrow();
            Box::pin(async move { Some(ResourceVersion(newest)) })
        });
        let hub = Hub::over(tokio_stream::wrappers::UnboundedReceiverStream::new(rx), quorum);
        let q = Arc::new(Queue::default());
        hub.subscribe(q.clone());
        let list = |rv| [Init, InitApply(vmi("a", "1", rv)), InitDone];
        for e in list(5).into_iter().chain([Apply(vmi("a", "1", 9))]).chain(list(9)) {
            tx.send(Ok(e)).unwrap();
        }
        tx.send(Err(watcher::Error::NoResourceVersion)).unwrap();
        tx.send(Ok(Apply(vmi("b", "2", 12)))).unwrap();
        hub.synced().await;
        tokio::task::yield_now().await;
        assert_eq!(drain(&q).await, ["1@9", "2@12"]);
        assert!(futures::FutureExt::now_or_never(hub.went_back()).is_none());
        // As far as the store knows, b never was.
        at.send_replace(10);
        for e in list(9) {
            tx.send(Ok(e)).unwrap();
        }
        let found = hub.went_back().await;
        assert_eq!(
            (found.kind, found.seen, found.newest),
            ("VirtualMachineInstance", ResourceVersion(12), ResourceVersion(10))
        );
        assert_eq!(drain(&q).await, Vec::<String>::new());
    }
}
