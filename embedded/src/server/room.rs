//! Whether a namespace has room: limit ranges and resource quotas.
//!
//! What is used is kept in the quotas' status. A write that takes room raises it first, by compare-and-swap, and is stored
//! afterwards; whatever gives room back (a deletion, a pod that ends, a write that failed after all) has the status counted
//! anew from what is stored. Both happen under one lock, so that a count never misses a write between the two.
//!
//! Few namespaces have any of these objects, and each write asks for them: what is stored under a prefix is remembered until
//! something under it changes.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::{Notify, OwnedMutexGuard};

use super::hub::{Event, decode};
use super::{Inner, convert, now, storage_status};
use crate::kinds::{limits, quota};
use crate::semantics::amounts::Amounts;
use crate::semantics::value::{name, namespace, object, text};
use crate::semantics::{Resource, Status};
use crate::storage::RangeQuery;

const LIMITS: &str = "/registry/core/limitranges/";
const QUOTAS: &str = "/registry/core/resourcequotas/";
const PODS: &str = "/registry/core/pods/";
/// How often everything is counted anew although nothing has happened: pods can stop counting by time alone.
const COUNT_ANEW: Duration = Duration::from_secs(300);
/// How often a quota that others write to at the same time is tried.
const TRIES: usize = 10;

/// Small collections that most writes look at.
#[derive(Debug, Default)]
pub(super) struct Remembered(HashMap<&'static str, List>);

#[derive(Debug, Default)]
struct List {
    /// Rises with each change.
    epoch: u64,
    objects: Option<Arc<Vec<Value>>>,
}

/// The quotas' bookkeeping.
#[derive(Debug, Default)]
pub(super) struct Room {
    lock: Arc<tokio::sync::Mutex<()>>,
    /// Namespaces to be counted.
    stale: Mutex<BTreeSet<String>>,
    wake: Notify,
}

/// Held from the moment when a write was charged until it is stored.
#[derive(Debug)]
pub(super) struct Charge {
    _guard: OwnedMutexGuard<()>,
}

impl Room {
    /// Has a namespace counted.
    pub fn count(&self, namespace: &str) {
        self.stale.lock().unwrap_or_else(PoisonError::into_inner).insert(namespace.to_owned());
        self.wake.notify_one();
    }
}

impl Inner {
    /// Everything under a prefix, as it was after its last change that this server knows of.
    pub(super) async fn remembered(&self, prefix: &'static str) -> Result<Arc<Vec<Value>>, Status> {
        let epoch = {
            let mut known = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
            let list = known.0.entry(prefix).or_default();
            if let Some(objects) = &list.objects {
                return Ok(objects.clone());
            }
            list.epoch
        };
        let page = self.storage.range(RangeQuery { prefix: prefix.into(), ..RangeQuery::default() }).await;
        let page = page.map_err(storage_status)?;
        let objects: Vec<Value> = page.items.iter().filter_map(|kv| decode(&kv.value, kv.revision)).collect();
        let objects = Arc::new(objects);
        let mut known = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        let list = known.0.entry(prefix).or_default();
        // Something that changed since may not be in the list.
        if list.epoch == epoch {
            list.objects = Some(objects.clone());
        }
        Ok(objects)
    }

    /// Forgets what was remembered of whatever has this key.
    pub(super) fn forget(&self, key: &str) {
        let mut known = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, list) in known.0.iter_mut().filter(|(prefix, _)| key.starts_with(**prefix)) {
            list.epoch += 1;
            list.objects = None;
        }
    }

    /// The limit ranges of a namespace.
    async fn ranges(&self, there: &str) -> Result<Vec<Value>, Status> {
        let all = self.remembered(LIMITS).await?;
        Ok(all.iter().filter(|o| namespace(o) == there).cloned().collect())
    }

    /// Gives a pod what the limit ranges of its namespace give it.
    pub(super) async fn complete_by_limits(&self, pod: &mut Value) -> Result<(), Status> {
        for range in self.ranges(namespace(pod)).await? {
            limits::complete(&range, pod);
        }
        Ok(())
    }

    /// Refuses what limit ranges or quotas have no room for, and charges the quotas for the rest. `old` is none when the
    /// object is new. The object must be stored while the charge is held, and [`Room::count`] called when it was not.
    pub(super) async fn charge(
        self: &Arc<Self>,
        resource: &Resource,
        o: &Value,
        old: Option<&Value>,
        dry_run: bool,
    ) -> Result<Option<Charge>, Status> {
        if !resource.namespaced || (old.is_some() && !quota::grows(resource)) {
            return Ok(None);
        }
        let there = namespace(o);
        let refused = |why: &str| Status::forbidden(&resource.group, &resource.plural, name(o), why);
        if resource.group.is_empty() && matches!(resource.kind.as_str(), "Pod" | "PersistentVolumeClaim") {
            let ranges = self.ranges(there).await?;
            let wrong: Vec<String> = ranges.iter().flat_map(|r| limits::violations(r, &resource.kind, o)).collect();
            if !wrong.is_empty() {
                return Err(refused(&limits::joined(wrong)));
            }
        }
        if !self.remembered(QUOTAS).await?.iter().any(|q| namespace(q) == there) {
            return Ok(None);
        }
        let Some(quotas) = self.catalog.served().find("", "v1", "resourcequotas") else { return Ok(None) };
        let guard = self.room.lock.clone().lock_owned().await;
        let mut charged = false;
        'tries: for _ in 0..TRIES {
            let query = RangeQuery { prefix: quotas.prefix_in(there), ..RangeQuery::default() };
            let mut new = Vec::new();
            // All of them must have room before any is charged.
            for kv in self.storage.range(query).await.map_err(storage_status)?.items {
                let q = convert::read(&quotas, &kv.value, kv.revision)?;
                match quota::charge(&q, resource, o, old, now()) {
                    Ok(Some(used)) => new.push((kv, q, used)),
                    Ok(None) => {}
                    Err(why) => {
                        if charged {
                            self.room.count(there);
                        }
                        return Err(refused(&why));
                    }
                }
            }
            if dry_run {
                return Ok(None);
            }
            for (kv, q, used) in new {
                let mut next = q.clone();
                object(&mut next["status"]).insert("used".into(), used.to_value());
                if self.store_over(&quotas, &kv, &q, next).await?.is_none() {
                    if charged {
                        // Some were charged already: the count says what is true.
                        self.count_namespace(&quotas, there).await?;
                    }
                    continue 'tries;
                }
                charged = true;
            }
            return Ok(Some(Charge { _guard: guard }));
        }
        self.room.count(there);
        Err(Status::modified("", "resourcequotas", there))
    }

    /// Counts a namespace's quotas anew. The caller holds the lock.
    async fn count_namespace(self: &Arc<Self>, quotas: &Resource, there: &str) -> Result<(), Status> {
        for _ in 0..TRIES {
            let query = RangeQuery { prefix: quotas.prefix_in(there), ..RangeQuery::default() };
            let stored = self.storage.range(query).await.map_err(storage_status)?.items;
            let mut done = true;
            for kv in stored {
                let q = convert::read(quotas, &kv.value, kv.revision)?;
                let used = self.used(&q, there).await?;
                let next = quota::with_status(&q, &used);
                done &= self.store_over(quotas, &kv, &q, next).await?.is_some();
            }
            if done {
                return Ok(());
            }
        }
        Err(Status::modified("", "resourcequotas", there))
    }

    /// What all objects that a quota counts take.
    async fn used(&self, q: &Value, there: &str) -> Result<Amounts, Status> {
        let served = self.catalog.served();
        let names: Vec<String> = Amounts::read(q.pointer("/spec/hard")).0.into_keys().collect();
        let mut used = Amounts::default();
        let mut seen = BTreeSet::new();
        for resource in served.resources.values().filter(|r| r.namespaced && !r.virtual_only) {
            if !names.iter().any(|n| quota::may_count(n, resource)) || !seen.insert(resource.prefix()) {
                continue;
            }
            let query = RangeQuery { prefix: resource.prefix_in(there), ..RangeQuery::default() };
            for kv in self.storage.range(query).await.map_err(storage_status)?.items {
                let Some(o) = decode(&kv.value, kv.revision) else { continue };
                if quota::covers(q, resource, &o) {
                    used.add(&quota::usage(resource, &o, now()));
                }
            }
        }
        Ok(used)
    }

    /// Notes what changes of stored objects mean for quotas.
    pub(super) fn room_changed(&self, event: &Event) {
        let Some(o) = event.now.as_ref().or_else(|| event.before()) else { return };
        let there = namespace(o);
        if there.is_empty() {
            return;
        }
        let ended = || {
            let over = |o: &Value| matches!(text(o, "/status/phase"), "Succeeded" | "Failed");
            event.key.starts_with(PODS) && over(o) && !event.before().is_some_and(|b| over(b))
        };
        let unknown = || event.key.starts_with(QUOTAS) && o.pointer("/spec/hard") != o.pointer("/status/hard");
        let lowered = || {
            event.key.starts_with("/registry/core/persistentvolumeclaims/")
                && event.before().is_some_and(|b| b.get("status") != o.get("status"))
        };
        if event.now.is_none() || ended() || unknown() || lowered() {
            self.room.count(there);
        }
    }
}

/// Counts namespaces anew for as long as the server lives.
pub(super) async fn run(inner: Weak<Inner>, stop: tokio_util::sync::CancellationToken) {
    let mut all = tokio::time::interval(COUNT_ANEW);
    loop {
        let Some(strong) = inner.upgrade() else { return };
        let Some(quotas) = strong.catalog.served().find("", "v1", "resourcequotas") else { return };
        let stale = std::mem::take(&mut *strong.room.stale.lock().unwrap_or_else(PoisonError::into_inner));
        for there in stale {
            let counted = match strong.remembered(QUOTAS).await {
                Ok(known) if !known.iter().any(|q| namespace(q) == there) => Ok(()),
                Ok(_) => {
                    let _guard = strong.room.lock.lock().await;
                    strong.count_namespace(&quotas, &there).await
                }
                Err(status) => Err(status),
            };
            if let Err(status) = counted {
                tracing::warn!(%status, namespace = there, "the quotas are not counted for now");
            }
        }
        let wait = async {
            // The future must not keep the server alive, so it is asked for in turns.
            let _ = tokio::time::timeout(Duration::from_secs(1), strong.room.wake.notified()).await;
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = wait => {}
            _ = all.tick() => {
                for q in strong.remembered(QUOTAS).await.iter().flat_map(|l| l.iter()) {
                    strong.room.count(namespace(q));
                }
            }
        }
    }
}
