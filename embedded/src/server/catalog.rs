//! Which resources are served: the built-in ones and those of the CustomResourceDefinitions.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, RwLock};

use serde_json::Value;

use super::hub::Event;
use super::{Inner, storage_status};
use crate::kinds;
use crate::semantics::schema::Definitions;
use crate::semantics::value::{deleting, name, resource_version};
use crate::semantics::{Resource, Status};
use crate::storage::{RangeQuery, Revision};

/// Where CustomResourceDefinitions are stored.
pub(super) const CRD_PREFIX: &str = "/registry/apiextensions.k8s.io/customresourcedefinitions/";

type Key = (String, String, String);

/// All served resources by (group, version, plural). A snapshot is never changed, only replaced.
#[derive(Debug, Default, Clone)]
pub(super) struct Served {
    pub resources: BTreeMap<Key, Arc<Resource>>,
    /// Names of definitions and whether each is being deleted.
    pub definitions: BTreeMap<String, bool>,
    /// The newest change of each definition that was taken notice of, also of those that are gone.
    seen: BTreeMap<String, Revision>,
    /// Grows with every change.
    pub serial: u64,
}

impl Served {
    pub fn find(&self, group: &str, version: &str, plural: &str) -> Option<Arc<Resource>> {
        self.resources.get(&(group.to_owned(), version.to_owned(), plural.to_owned())).cloned()
    }
}

/// The served resources, replaced as a whole when a definition changes.
#[derive(Debug)]
pub(super) struct Catalog {
    shared: Definitions,
    served: RwLock<Arc<Served>>,
}

impl Catalog {
    pub fn new() -> Self {
        let (resources, shared) = kinds::builtin();
        let resources = resources
            .into_iter()
            .map(|r| ((r.group.clone(), r.version.clone(), r.plural.clone()), Arc::new(r)))
            .collect();
        let served = Served { resources, definitions: BTreeMap::new(), seen: BTreeMap::new(), serial: 0 };
        Self { shared, served: RwLock::new(Arc::new(served)) }
    }

    pub fn served(&self) -> Arc<Served> {
        self.served.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Serves what a definition says.
    pub fn install(&self, crd: &Value) {
        let revision = resource_version(crd).parse().unwrap_or(0);
        if self.served().seen.get(name(crd)).is_some_and(|seen| *seen >= revision) {
            return;
        }
        let resources = kinds::crd::resources(crd, &self.shared);
        let mut slot = self.served.write().unwrap_or_else(PoisonError::into_inner);
        let mut next = Served::clone(&slot);
        next.seen.insert(name(crd).to_owned(), revision);
        drop_definition(&mut next, name(crd));
        next.definitions.insert(name(crd).to_owned(), deleting(crd));
        for r in resources {
            next.resources.insert((r.group.clone(), r.version.clone(), r.plural.clone()), Arc::new(r));
        }
        next.serial += 1;
        *slot = Arc::new(next);
    }

    /// Serves a definition's resources no longer.
    pub fn remove(&self, definition: &str, revision: Revision) {
        let mut slot = self.served.write().unwrap_or_else(PoisonError::into_inner);
        if slot.seen.get(definition).is_some_and(|seen| *seen >= revision) {
            return;
        }
        let mut next = Served::clone(&slot);
        next.seen.insert(definition.to_owned(), revision);
        drop_definition(&mut next, definition);
        next.definitions.remove(definition);
        next.serial += 1;
        *slot = Arc::new(next);
    }
}

fn drop_definition(served: &mut Served, definition: &str) {
    served.resources.retain(|_, r| !(r.custom && format!("{}.{}", r.plural, r.group) == definition));
}

impl Inner {
    /// Reads all definitions from the store.
    pub(super) async fn load_definitions(&self) -> Result<(), Status> {
        let query = RangeQuery { prefix: CRD_PREFIX.into(), ..RangeQuery::default() };
        let page = self.storage.range(query).await.map_err(storage_status)?;
        for kv in page.items {
            if let Some(crd) = super::hub::decode(&kv.value, kv.revision) {
                self.catalog.install(&crd);
            }
        }
        Ok(())
    }

    /// What the server itself must know of changes, whoever made them.
    pub(super) fn noticed(&self, events: &[Arc<Event>]) {
        for event in events {
            self.forget(&event.key);
            self.room_changed(event);
            if event.key.starts_with("/registry/rbac.authorization.k8s.io/") {
                self.rbac.forget();
                if event.key.starts_with(super::housekeeping::ROLES) {
                    self.roles_changed.store(true, Ordering::Release);
                    self.cleanup.notify_one();
                }
            } else if let Some(namespace) = event.key.strip_prefix("/registry/core/namespaces/") {
                self.forget_namespace(namespace);
            } else if let Some(definition) = event.key.strip_prefix(CRD_PREFIX) {
                match &event.now {
                    Some(crd) => {
                        self.catalog.install(crd);
                        if deleting(crd) {
                            self.cleanup.notify_one();
                        }
                    }
                    None => self.catalog.remove(definition, event.revision),
                }
            }
        }
    }
}
