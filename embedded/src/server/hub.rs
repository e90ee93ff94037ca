//! One watch on the store for all watches of clients.
//!
//! The newest changes of every resource are kept decoded in a ring. A watcher holds a revision: everything up to it has
//! been delivered. It takes from the ring what is newer; when the ring does not reach back that far, it reads the
//! store's own history instead. So nothing is lost and nothing is queued per watcher.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use serde_json::Value;
use tokio::sync::watch;

use super::Inner;
use crate::storage::{Change, Kv, Revision, Storage, StorageError, WatchItem};

/// Changes that are kept for each resource.
const RING_EVENTS: usize = 1024;
/// Bytes of stored JSON that the changes of one resource may hold on to.
const RING_BYTES: usize = 4 << 20;

/// One change of one object, decoded once for all who look at it.
#[derive(Debug)]
pub(super) struct Event {
    pub revision: Revision,
    pub key: String,
    /// The object after the change, with its resourceVersion; none when it was deleted.
    pub now: Option<Arc<Value>>,
    previous: Option<Kv>,
    before: OnceLock<Option<Arc<Value>>>,
    /// The whole line of a plain watch, by type (ADDED, MODIFIED, DELETED).
    pub lines: [OnceLock<Bytes>; 3],
    weight: usize,
}

/// An object as it is stored, with its resourceVersion put in.
pub(super) fn decode(value: &[u8], revision: Revision) -> Option<Value> {
    let mut object: Value = serde_json::from_slice(value).ok()?;
    crate::semantics::value::meta(&mut object).insert("resourceVersion".into(), revision.to_string().into());
    Some(object)
}

impl Event {
    pub fn of(change: Change) -> Self {
        let weight =
            change.value.as_ref().map_or(0, Bytes::len) + change.previous.as_ref().map_or(0, |p| p.value.len());
        Self {
            revision: change.revision,
            now: change.value.and_then(|v| decode(&v, change.revision)).map(Arc::new),
            key: change.key,
            previous: change.previous,
            before: OnceLock::new(),
            lines: Default::default(),
            weight: weight + 256,
        }
    }

    /// Whether there was an object before.
    pub fn had_previous(&self) -> bool {
        self.previous.is_some()
    }

    /// The object before the change; of a deletion with the deletion's resourceVersion.
    pub fn before(&self) -> Option<&Arc<Value>> {
        self.before
            .get_or_init(|| {
                let previous = self.previous.as_ref()?;
                let revision = if self.now.is_none() { self.revision } else { previous.revision };
                decode(&previous.value, revision).map(Arc::new)
            })
            .as_ref()
    }
}

#[derive(Debug, Default)]
struct Ring {
    events: VecDeque<Arc<Event>>,
    bytes: usize,
    /// Every later change is in the ring.
    from: Revision,
    signal: watch::Sender<Revision>,
}

/// The rings of all resources, by their key prefix.
#[derive(Debug)]
pub(super) struct Hub {
    rings: Mutex<HashMap<String, Ring>>,
    /// Everything up to here has been put into the rings.
    head: watch::Sender<Revision>,
    start: Revision,
}

/// What the hub has for a watcher.
pub(super) enum Taken {
    /// Newer changes, and the revision up to which nothing is missing.
    Events(Vec<Arc<Event>>, Revision),
    /// The ring does not reach back that far.
    TooOld,
}

/// `/registry/<group>/<resource>/` of a key.
fn prefix_of(key: &str) -> &str {
    let end = key.match_indices('/').nth(3).map_or(key.len(), |(i, _)| i + 1);
    &key[..end]
}

impl Hub {
    pub fn new(start: Revision) -> Self {
        Self { rings: Mutex::default(), head: watch::Sender::new(start), start }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Ring>> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The newest revision that was seen.
    pub fn head(&self) -> Revision {
        *self.head.borrow()
    }

    /// A signal that fires when there may be something new under a prefix.
    pub fn subscribe(&self, prefix: &str) -> watch::Receiver<Revision> {
        let mut rings = self.lock();
        let ring = rings.entry(prefix.to_owned()).or_insert_with(|| Ring { from: self.start, ..Ring::default() });
        ring.signal.subscribe()
    }

    /// What is newer than `after` under a prefix.
    pub fn take(&self, prefix: &str, after: Revision) -> Taken {
        let head = self.head();
        let rings = self.lock();
        let Some(ring) = rings.get(prefix) else {
            return if after >= self.start { Taken::Events(Vec::new(), head.max(after)) } else { Taken::TooOld };
        };
        if after < ring.from {
            return Taken::TooOld;
        }
        let first = ring.events.partition_point(|e| e.revision <= after);
        let events: Vec<_> = ring.events.range(first..).cloned().collect();
        let upto = events.last().map_or(after, |e| e.revision).max(head);
        Taken::Events(events, upto)
    }

    fn push(&self, changes: Vec<Change>) -> Vec<Arc<Event>> {
        let events: Vec<Arc<Event>> = changes.into_iter().map(|c| Arc::new(Event::of(c))).collect();
        let mut rings = self.lock();
        for event in &events {
            let ring = rings
                .entry(prefix_of(&event.key).to_owned())
                .or_insert_with(|| Ring { from: self.start, ..Ring::default() });
            ring.bytes += event.weight;
            ring.events.push_back(event.clone());
            while ring.events.len() > RING_EVENTS || (ring.bytes > RING_BYTES && ring.events.len() > 1) {
                if let Some(old) = ring.events.pop_front() {
                    ring.bytes -= old.weight;
                    ring.from = old.revision;
                }
            }
        }
        if let Some(last) = events.last() {
            self.head.send_if_modified(|h| {
                let newer = last.revision > *h;
                *h = last.revision.max(*h);
                newer
            });
        }
        for event in &events {
            if let Some(ring) = rings.get(prefix_of(&event.key)) {
                ring.signal.send_replace(event.revision);
            }
        }
        events
    }

    /// The history was lost: nobody can be served from memory any more before `from`.
    fn reset(&self, from: Revision) {
        for ring in self.lock().values_mut() {
            ring.events.clear();
            ring.bytes = 0;
            ring.from = from;
            ring.signal.send_replace(from);
        }
        self.head.send_replace(from);
    }
}

/// Feeds the hub from the store for as long as the server lives.
pub(super) async fn feed(inner: Weak<Inner>, storage: Arc<dyn Storage>, stop: tokio_util::sync::CancellationToken) {
    let mut pause = Duration::from_millis(50);
    loop {
        let Some(after) = inner.upgrade().map(|i| i.hub.head()) else { return };
        let mut stream = storage.watch("/registry/", after);
        loop {
            let item = tokio::select! {
                () = stop.cancelled() => return,
                item = stream.next() => item,
            };
            let Some(inner) = inner.upgrade() else { return };
            match item {
                Some(Ok(WatchItem::Changes(changes))) => {
                    pause = Duration::from_millis(50);
                    let events = inner.hub.push(changes);
                    inner.noticed(&events);
                }
                Some(Ok(WatchItem::Progress(_))) => {}
                Some(Err(StorageError::Compacted { .. })) => {
                    tracing::warn!(after, "the store has compacted what was not yet seen; all watches start again");
                    if let Ok(newest) = storage.revision().await {
                        inner.hub.reset(newest);
                    }
                    break;
                }
                Some(Err(error)) => {
                    tracing::warn!(%error, "the watch on the store broke");
                    break;
                }
                None => break,
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        pause = (pause * 2).min(Duration::from_secs(2));
    }
}
