//! DELETE of one object and of many.

use std::sync::Arc;

use axum::body::Body;
use serde_json::{Value, json};

use super::admission::{AdmissionRequest, Operation};
use super::read::revision;
use super::request::Call;
use super::respond;
use super::{Inner, Response, convert, moment, storage_status};
use crate::semantics::selector::Selector;
use crate::semantics::value::{meta, name, namespace, uid};
use crate::semantics::write::{self, DeleteOptions, Deletion};
use crate::semantics::{Resource, Status};
use crate::storage::{Expect, Outcome};

/// Kinds whose deletion is answered with the object.
const ANSWERED_WITH_OBJECT: [&str; 6] =
    ["Pod", "ServiceAccount", "PersistentVolume", "PersistentVolumeClaim", "ResourceQuota", "StorageClass"];

/// What became of an object.
pub(super) struct Deleted {
    pub object: Value,
    pub gone: bool,
}

pub(super) async fn options(call: &Call, body: Body) -> Result<DeleteOptions, Status> {
    let bytes = respond::body(body).await?;
    let sent = if bytes.is_empty() { Value::Null } else { respond::decode(&call.headers, &bytes)?.0 };
    let query = call.query.clone();
    DeleteOptions::parse(&sent, &|key| query.get(key).map(str::to_owned))
}

impl Inner {
    pub(super) async fn delete(
        self: &Arc<Self>,
        resource: &Arc<Resource>,
        call: &Call,
        body: Body,
    ) -> Result<Response, Status> {
        let form = respond::form(&call.headers)?;
        let options = options(call, body).await?;
        let place = if resource.namespaced { call.target.namespace.as_str() } else { "" };
        let deleted = self.delete_one(resource, call, place, &call.target.name, &options, "").await?;
        let with_object = !deleted.gone || (!resource.custom && ANSWERED_WITH_OBJECT.contains(&&*resource.kind));
        if with_object {
            return Ok(self.show(resource, call, form, deleted.object, 200));
        }
        let mut status = Status::new(200, "", "");
        status.details = json!({"name": name(&deleted.object), "kind": resource.plural, "uid": uid(&deleted.object)});
        if !resource.group.is_empty() {
            status.details["group"] = resource.group.clone().into();
        }
        let mut answer = status.to_value();
        crate::semantics::value::object(&mut answer).remove("code");
        Ok(respond::json(200, &answer))
    }

    pub(super) async fn delete_one(
        self: &Arc<Self>,
        resource: &Resource,
        call: &Call,
        place: &str,
        n: &str,
        options: &DeleteOptions,
        subresource: &str,
    ) -> Result<Deleted, Status> {
        for _ in 0..super::write::ATTEMPTS {
            let kv = self.find(resource, place, n).await?;
            let old = convert::read(resource, &kv.value, kv.revision)?;
            let decision = write::delete(resource, &old, options, &moment())?;
            if subresource.is_empty() {
                let mut request = AdmissionRequest::new(resource, call, Operation::Delete, Value::Null, old.clone());
                request.dry_run = options.dry_run;
                self.admit(resource, request).await?;
            }
            let (mut object, bytes) = match decision {
                Deletion::Pending(object) => return Ok(Deleted { object, gone: false }),
                Deletion::Remove(object) => (object, None),
                Deletion::Mark(object) => {
                    let bytes = convert::encode(resource, object.clone())?;
                    (object, Some(bytes))
                }
            };
            let gone = bytes.is_none();
            if options.dry_run {
                return Ok(Deleted { object, gone });
            }
            match self.storage.write(&kv.key, Expect::At(kv.revision), bytes).await.map_err(storage_status)? {
                Outcome::Done(revision) => {
                    meta(&mut object).insert("resourceVersion".into(), revision.to_string().into());
                    self.wrote(resource, &object, gone).await;
                    return Ok(Deleted { object, gone });
                }
                Outcome::Conflict(None) => return Err(Status::not_found(&resource.group, &resource.plural, n)),
                Outcome::Conflict(Some(_)) if options.resource_version.is_some() => {}
                Outcome::Conflict(Some(_)) => {}
            }
        }
        Err(Status::modified(&resource.group, &resource.plural, n))
    }

    pub(super) async fn delete_collection(
        self: &Arc<Self>,
        resource: &Arc<Resource>,
        call: &Call,
        body: Body,
    ) -> Result<Response, Status> {
        let q = &call.query;
        let selector = Selector::parse(q.text("labelSelector"), q.text("fieldSelector"), resource)?;
        let mut options = options(call, body).await?;
        let at = revision(q.text("resourceVersion"))?;
        let listing = self.collect(resource, &call.target.namespace, &selector, at, None, 0).await?;
        // Preconditions are about one object.
        options.uid = None;
        options.resource_version = None;
        let mut items = Vec::new();
        for object in listing.objects {
            match self.delete_one(resource, call, namespace(&object), name(&object), &options, "").await {
                // As they were.
                Ok(_) => items.push(object),
                Err(s) if s.code == 404 => {}
                Err(s) => return Err(s),
            }
        }
        let metadata = json!({"resourceVersion": listing.revision.to_string()});
        Ok(respond::json(200, &respond::list(resource, metadata, items)))
    }
}
