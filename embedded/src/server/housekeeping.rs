//! What the server does by itself: built-in objects at the start, the end of definitions, old events, compaction.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

use super::request::{Call, Query, Target};
use super::{Inner, convert, moment, now, storage_status};
use crate::auth::{User, bootstrap, rbac};
use crate::kinds::crd::{self, CLEANUP_FINALIZER};
use crate::semantics::selector::Selector;
use crate::semantics::value::{deleting, finalizers, meta, name, namespace, put, text};
use crate::semantics::write::{self, DeleteOptions};
use crate::semantics::{Resource, Status, seconds};
use crate::storage::{RangeQuery, Revision, StorageError};

/// The key prefix of cluster roles.
pub(super) const ROLES: &str = "/registry/rbac.authorization.k8s.io/clusterroles/";
/// How long events are kept.
const EVENT_SECONDS: i64 = 3600;
/// How often old events are looked for.
const EVENT_SWEEP: Duration = Duration::from_secs(300);
/// How often the store is told to forget, and so how much history there is at least.
const COMPACT_EVERY: Duration = Duration::from_secs(300);
/// How often a definition's end is looked at again while instances hold it.
const CLEANUP_AGAIN: Duration = Duration::from_millis(250);

/// Runs until the server stops.
pub(super) async fn run(inner: Weak<Inner>, stop: tokio_util::sync::CancellationToken) {
    let mut compact = tokio::time::interval_at(Instant::now() + COMPACT_EVERY, COMPACT_EVERY);
    let mut sweep = tokio::time::interval_at(Instant::now() + EVENT_SWEEP, EVENT_SWEEP);
    let mut last: Revision = 0;
    let mut again = true;
    loop {
        let wait = async {
            if again {
                tokio::time::sleep(CLEANUP_AGAIN).await;
            } else if let Some(strong) = inner.upgrade() {
                // The future must not keep the server alive, so it is asked for in turns.
                let _ = tokio::time::timeout(Duration::from_secs(1), strong.cleanup.notified()).await;
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            _ = compact.tick() => {
                let Some(inner) = inner.upgrade() else { return };
                last = inner.compact(last).await;
            }
            _ = sweep.tick() => {
                let Some(inner) = inner.upgrade() else { return };
                if let Err(status) = inner.sweep_events().await {
                    tracing::warn!(%status, "old events stay for now");
                }
            }
            () = wait => {
                let Some(inner) = inner.upgrade() else { return };
                again = inner.end_definitions().await;
                if inner.roles_changed.swap(false, Ordering::AcqRel)
                    && let Err(status) = inner.gather_roles().await
                {
                    tracing::warn!(%status, "roles that gather others wait");
                    inner.roles_changed.store(true, Ordering::Release);
                }
            }
        }
    }
}

/// A request that the server makes to itself.
fn own_call(resource: &Resource) -> Call {
    Call {
        target: Target { group: resource.group.clone(), plural: resource.plural.clone(), ..Target::default() },
        query: Query::default(),
        headers: http::HeaderMap::new(),
        user: User::system("system:apiserver"),
        verb: "delete",
    }
}

impl Inner {
    /// Writes what every cluster has, where it is missing.
    pub(super) async fn bootstrap(self: &Arc<Self>) -> Result<(), Status> {
        let mut objects: Vec<Value> = ["default", "kube-system", "kube-public", "kube-node-lease"]
            .iter()
            .map(|n| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": n}}))
            .collect();
        objects.extend(bootstrap::objects());
        for (n, v) in [("system-cluster-critical", 2_000_000_000_i64), ("system-node-critical", 2_000_001_000)] {
            objects.push(json!({
                "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": n}, "value": v,
            }));
        }
        let served = self.catalog.served();
        for object in objects {
            let Some(resource) = served
                .resources
                .values()
                .find(|r| r.kind == text(&object, "/kind") && r.api_version() == text(&object, "/apiVersion"))
            else {
                continue;
            };
            let key = resource.key("", name(&object));
            if self.storage.get(&key, 0).await.map_err(storage_status)?.0.is_some() {
                continue;
            }
            let object = write::create(resource, "", "", object, &moment())?;
            match self.store_new(resource, object, false).await {
                Err(s) if s.reason != "AlreadyExists" => return Err(s),
                _ => {}
            }
        }
        Ok(())
    }

    /// Writes the rules of roles that gather others, where they are not what they should be.
    async fn gather_roles(self: &Arc<Self>) -> Result<(), Status> {
        let Some(resource) = self.catalog.served().find("rbac.authorization.k8s.io", "v1", "clusterroles") else {
            return Ok(());
        };
        let listing = self.collect(&resource, "", &Selector::default(), 0, None, 0).await?;
        for (role, rules) in rbac::gathered(&listing.objects) {
            let kv = self.find(&resource, "", &role).await?;
            let old = convert::read(&resource, &kv.value, kv.revision)?;
            let mut new = old.clone();
            crate::semantics::value::object(&mut new).insert("rules".into(), rules);
            if self.store_over(&resource, &kv, &old, new).await?.is_none() {
                self.roles_changed.store(true, Ordering::Release);
            }
        }
        Ok(())
    }

    /// Forgets the history up to where the store was at the last call; returns where it is now.
    async fn compact(&self, last: Revision) -> Revision {
        let newest = match self.storage.revision().await {
            Ok(newest) => newest,
            Err(error) => {
                tracing::warn!(%error, "the store's history is not shortened for now");
                return last;
            }
        };
        if last > 0 && last < newest {
            match self.storage.compact(last).await {
                Ok(()) | Err(StorageError::Compacted { .. }) => {}
                Err(error) => tracing::warn!(%error, "the store's history is not shortened for now"),
            }
        }
        if let Err(error) = self.storage.maintain().await {
            tracing::warn!(%error, "the store was not maintained");
        }
        newest
    }

    async fn sweep_events(self: &Arc<Self>) -> Result<(), Status> {
        let Some(events) = self.catalog.served().find("", "v1", "events") else { return Ok(()) };
        let listing = self.collect(&events, "", &Selector::default(), 0, None, 0).await?;
        let call = own_call(&events);
        for e in listing.objects {
            let times = ["/lastTimestamp", "/series/lastObservedTime", "/eventTime", "/metadata/creationTimestamp"];
            let newest = times.iter().filter_map(|p| seconds(text(&e, p))).max().unwrap_or(i64::MAX);
            if now() - newest > EVENT_SECONDS {
                match self.delete_one(&events, &call, namespace(&e), name(&e), &DeleteOptions::default(), "ttl").await {
                    Err(s) if s.code != 404 => return Err(s),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Removes the instances of definitions that are being deleted, then lets the definitions go. True when something
    /// still holds one.
    async fn end_definitions(self: &Arc<Self>) -> bool {
        let served = self.catalog.served();
        let ending: Vec<String> =
            served.definitions.iter().filter(|(_, deleting)| **deleting).map(|(n, _)| n.clone()).collect();
        let mut again = false;
        for definition in ending {
            match self.end_definition(&definition).await {
                Ok(gone) => again |= !gone,
                Err(status) => {
                    tracing::warn!(%status, definition, "the end of a definition waits");
                    again = true;
                }
            }
        }
        again
    }

    async fn end_definition(self: &Arc<Self>, definition: &str) -> Result<bool, Status> {
        let served = self.catalog.served();
        let Some(definitions) = served.find("apiextensions.k8s.io", "v1", "customresourcedefinitions") else {
            return Ok(true);
        };
        let kv = match self.find(&definitions, "", definition).await {
            Ok(kv) => kv,
            Err(s) if s.code == 404 => return Ok(true),
            Err(s) => return Err(s),
        };
        let old = convert::read(&definitions, &kv.value, kv.revision)?;
        if !deleting(&old) || !finalizers(&old).iter().any(|f| f == CLEANUP_FINALIZER) {
            return Ok(!deleting(&old));
        }
        // Also versions that are not served have instances: the prefix is the same for all.
        let mut all = old.clone();
        if let Some(Value::Array(versions)) = all.pointer_mut("/spec/versions") {
            versions.iter_mut().for_each(|v| v["served"] = true.into());
        }
        let shared = crate::semantics::schema::Definitions::default();
        if let Some(resource) = crd::resources(&all, &shared).into_iter().next() {
            let call = own_call(&resource);
            let listing = self.collect(&resource, "", &Selector::default(), 0, None, 0).await?;
            let mut held = false;
            for o in &listing.objects {
                if deleting(o) && !finalizers(o).is_empty() {
                    held = true;
                    continue;
                }
                let options = DeleteOptions::default();
                match self.delete_one(&resource, &call, namespace(o), name(o), &options, "cleanup").await {
                    Ok(deleted) => held |= !deleted.gone,
                    Err(s) if s.code == 404 => {}
                    Err(s) => return Err(s),
                }
            }
            let query = RangeQuery { prefix: resource.prefix(), limit: 1, ..RangeQuery::default() };
            if held || !self.storage.range(query).await.map_err(storage_status)?.items.is_empty() {
                return Ok(false);
            }
        }
        let mut new = old.clone();
        let rest: Vec<String> = finalizers(&old).into_iter().filter(|f| f != CLEANUP_FINALIZER).collect();
        let list = (!rest.is_empty()).then(|| Value::from(rest.clone()));
        put(meta(&mut new), "finalizers", list);
        Ok(self.store_over(&definitions, &kv, &old, new).await?.is_some() && rest.is_empty())
    }
}
