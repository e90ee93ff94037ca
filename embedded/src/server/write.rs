//! POST, PUT and PATCH.

use std::sync::Arc;

use axum::body::Body;
use http::header;
use serde_json::{Value, json};

use super::admission::{AdmissionRequest, Operation};
use super::request::Call;
use super::respond;
use super::{Inner, Response, convert, moment, storage_status};
use crate::kinds::crd;
use crate::semantics::patch;
use crate::semantics::value::{self, deleting, meta, name, resource_version};
use crate::semantics::write::{self, FieldValidation, Part};
use crate::semantics::{FieldError, Resource, Status};
use crate::storage::{Expect, Kv, Outcome};

/// How often a write that states no resourceVersion is tried against others.
pub(super) const ATTEMPTS: usize = 10;
/// How often a generated name is drawn.
const NAMES: usize = 8;

/// What a write is about, beside the object.
pub(super) struct Writing<'a> {
    pub resource: &'a Resource,
    pub call: &'a Call,
    pub part: Part,
    pub dry_run: bool,
    pub mode: FieldValidation,
    pub warnings: Vec<String>,
}

impl<'a> Writing<'a> {
    pub fn new(resource: &'a Resource, call: &'a Call, part: Part) -> Result<Self, Status> {
        Ok(Self {
            resource,
            call,
            part,
            dry_run: call.query.dry_run()?,
            mode: FieldValidation::parse(call.query.text("fieldValidation"))?,
            warnings: Vec::new(),
        })
    }

    /// Shapes what was sent; unknown fields end up as warnings or in the text of a refusal.
    fn shape(&mut self, object: Value, duplicates: &[String]) -> Result<Value, ShapeError> {
        let decoded = write::shape(self.resource, object, duplicates).map_err(ShapeError::Refused)?;
        match write::strictness(self.mode, &decoded.strict) {
            Ok(warnings) => {
                for w in warnings {
                    if !self.warnings.contains(&w) {
                        self.warnings.push(w);
                    }
                }
                Ok(decoded.object)
            }
            Err(text) => Err(ShapeError::Strict(text)),
        }
    }
}

enum ShapeError {
    Refused(Status),
    Strict(String),
}

/// Where the wanted object comes from.
enum Wanted<'a> {
    Whole(&'a Value),
    Patch(patch::Kind, &'a [u8], &'a [String]),
    Made(&'a (dyn Fn(&Value) -> Result<Value, Status> + Send + Sync)),
}

impl Inner {
    pub(super) async fn create(
        self: &Arc<Self>,
        resource: &Arc<Resource>,
        call: &Call,
        body: Body,
    ) -> Result<Response, Status> {
        let form = respond::form(&call.headers)?;
        let mut writing = Writing::new(resource, call, Part::Main)?;
        let bytes = respond::body(body).await?;
        let (object, duplicates) = respond::decode(&call.headers, &bytes)?;
        let shaped = writing.shape(object, &duplicates).map_err(|e| match e {
            ShapeError::Refused(s) => s,
            ShapeError::Strict(text) => write::cannot_be_handled(resource, &text),
        })?;
        let object = self.create_shaped(&mut writing, shaped).await?;
        let mut response = self.show(resource, call, form, object, 201);
        respond::warn(&mut response, &writing.warnings);
        Ok(response)
    }

    async fn create_shaped(self: &Arc<Self>, writing: &mut Writing<'_>, shaped: Value) -> Result<Value, Status> {
        let (resource, call) = (writing.resource, writing.call);
        let generated = name(&shaped).is_empty();
        let namespace = if resource.namespaced { call.target.namespace.as_str() } else { "" };
        for attempt in 1.. {
            let object = write::create(resource, namespace, "", shaped.clone(), &moment())?;
            let request = admission_request(writing, Operation::Create, object, Value::Null);
            let (mut object, warnings) = self.admit(resource, request).await?;
            writing.warnings.extend(warnings);
            write::fill(resource, &mut object);
            write::check(resource, None, &object)?;
            self.before_storing(resource, &mut object);
            let charge = self.charge(resource, &object, None, writing.dry_run).await?;
            let stored = self.store_new(resource, object, writing.dry_run).await;
            if charge.is_some() && stored.is_err() {
                self.room.count(namespace);
            }
            match stored {
                Err(s) if generated && s.reason == "AlreadyExists" && attempt < NAMES => {}
                other => return other,
            }
        }
        Err(Status::internal("no name was found"))
    }

    /// Stores a new object as it is; the object with its resourceVersion.
    pub(super) async fn store_new(
        self: &Arc<Self>,
        resource: &Resource,
        mut object: Value,
        dry_run: bool,
    ) -> Result<Value, Status> {
        let key = resource.key(value::namespace(&object), name(&object));
        let exists = || Status::already_exists(&resource.group, &resource.plural, name(&object));
        if dry_run {
            let (there, _) = self.storage.get(&key, 0).await.map_err(storage_status)?;
            return if there.is_some() { Err(exists()) } else { Ok(object) };
        }
        let bytes = convert::encode(resource, object.clone())?;
        match self.storage.write(&key, Expect::Absent, Some(bytes)).await.map_err(storage_status)? {
            Outcome::Done(revision) => {
                meta(&mut object).insert("resourceVersion".into(), revision.to_string().into());
                self.wrote(resource, &object, false).await;
                Ok(object)
            }
            Outcome::Conflict(_) => Err(exists()),
        }
    }

    fn before_storing(&self, resource: &Resource, object: &mut Value) {
        if resource.kind == "CustomResourceDefinition" && !resource.custom {
            crd::establish(object, &moment().rfc3339(0));
        }
    }

    /// What the server must do itself once something was written, before the answer goes out.
    pub(super) async fn wrote(self: &Arc<Self>, resource: &Resource, object: &Value, gone: bool) {
        self.forget(&resource.prefix());
        match (resource.group.as_str(), resource.kind.as_str()) {
            ("rbac.authorization.k8s.io", _) => self.rbac.forget(),
            ("apiextensions.k8s.io", "CustomResourceDefinition") if gone => {
                let revision = resource_version(object).parse().unwrap_or(i64::MAX);
                self.catalog.remove(name(object), revision);
            }
            ("apiextensions.k8s.io", "CustomResourceDefinition") => {
                self.catalog.install(object);
                if deleting(object) {
                    self.cleanup.notify_one();
                }
            }
            ("", "Namespace") => {
                self.forget_namespace(name(object));
                if !gone && !deleting(object) {
                    self.default_account(name(object)).await;
                }
            }
            _ => {}
        }
    }

    /// Every namespace has a service account `default`.
    async fn default_account(self: &Arc<Self>, namespace: &str) {
        let Some(accounts) = self.catalog.served().find("", "v1", "serviceaccounts") else { return };
        let object = json!({
            "apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": namespace},
        });
        let key = accounts.key(namespace, "default");
        let there = self.storage.get(&key, 0).await.is_ok_and(|(kv, _)| kv.is_some());
        if there {
            return;
        }
        if let Ok(object) = write::create(&accounts, namespace, "", object, &moment())
            && let Ok(bytes) = convert::encode(&accounts, object)
            && let Err(error) = self.storage.write(&key, Expect::Absent, Some(bytes)).await
        {
            tracing::warn!(%error, namespace, "the default service account was not created");
        }
    }

    pub(super) async fn update(
        self: &Arc<Self>,
        resource: &Arc<Resource>,
        call: &Call,
        body: Body,
    ) -> Result<Response, Status> {
        self.update_part(resource, call, body, Part::Main).await
    }

    pub(super) async fn update_part(
        self: &Arc<Self>,
        resource: &Arc<Resource>,
        call: &Call,
        body: Body,
        part: Part,
    ) -> Result<Response, Status> {
        let form = respond::form(&call.headers)?;
        let mut writing = Writing::new(resource, call, part)?;
        let bytes = respond::body(body).await?;
        let (object, duplicates) = respond::decode(&call.headers, &bytes)?;
        let shaped = writing.shape(object, &duplicates).map_err(|e| match e {
            ShapeError::Refused(s) => s,
            ShapeError::Strict(text) => write::cannot_be_handled(resource, &text),
        })?;
        let object = self.change(&mut writing, &Wanted::Whole(&shaped)).await?;
        let mut response = self.show(resource, call, form, object, 200);
        respond::warn(&mut response, &writing.warnings);
        Ok(response)
    }

    pub(super) async fn patch(
        self: &Arc<Self>,
        resource: &Arc<Resource>,
        call: &Call,
        body: Body,
    ) -> Result<Response, Status> {
        self.patch_part(resource, call, body, Part::Main).await
    }

    pub(super) async fn patch_part(
        self: &Arc<Self>,
        resource: &Arc<Resource>,
        call: &Call,
        body: Body,
        part: Part,
    ) -> Result<Response, Status> {
        let form = respond::form(&call.headers)?;
        let mut writing = Writing::new(resource, call, part)?;
        let kind = patch_kind(call, resource)?;
        let bytes = respond::body(body).await?;
        let duplicates = match kind {
            patch::Kind::Json => Vec::new(),
            _ => crate::semantics::strict::decode(&bytes).map(|(_, d)| d).unwrap_or_default(),
        };
        let object = self.change(&mut writing, &Wanted::Patch(kind, &bytes, &duplicates)).await?;
        let mut response = self.show(resource, call, form, object, 200);
        respond::warn(&mut response, &writing.warnings);
        Ok(response)
    }

    /// Changes an object by a function of what is stored.
    pub(super) async fn change_by(
        self: &Arc<Self>,
        writing: &mut Writing<'_>,
        make: &(dyn Fn(&Value) -> Result<Value, Status> + Send + Sync),
    ) -> Result<Value, Status> {
        self.change(writing, &Wanted::Made(make)).await
    }

    async fn change(self: &Arc<Self>, writing: &mut Writing<'_>, wanted: &Wanted<'_>) -> Result<Value, Status> {
        let (resource, call) = (writing.resource, writing.call);
        let (namespace, n) = (&call.target.namespace, &call.target.name);
        for _ in 0..ATTEMPTS {
            let kv = self.find(resource, namespace, n).await?;
            let old = convert::read(resource, &kv.value, kv.revision)?;
            let (new, must) = match wanted {
                Wanted::Whole(object) => {
                    (Value::clone(object), resource.custom || resource.kind == "CustomResourceDefinition")
                }
                Wanted::Made(make) => (make(&old)?, false),
                Wanted::Patch(kind, bytes, duplicates) => {
                    let patched = patch::apply(*kind, resource, &old, bytes)?;
                    let shaped = writing.shape(patched, duplicates).map_err(|e| match e {
                        ShapeError::Refused(s) => s,
                        ShapeError::Strict(text) => {
                            let body = String::from_utf8_lossy(bytes);
                            let error = FieldError::invalid("patch", &body.as_ref().into(), &text);
                            Status::invalid("", "", n, &[error])
                        }
                    })?;
                    (shaped, false)
                }
            };
            let stated = !resource_version(&new).is_empty() && matches!(wanted, Wanted::Whole(_));
            let new = write::update(resource, writing.part, &old, new, must)?;
            let request = admission_request(writing, Operation::Update, new, old.clone());
            let (mut new, warnings) = self.admit(resource, request).await?;
            for w in warnings {
                if !writing.warnings.contains(&w) {
                    writing.warnings.push(w);
                }
            }
            write::check(resource, Some(&old), &new)?;
            if writing.part == Part::Main {
                write::settle_generation(resource, &old, &mut new);
                self.before_storing(resource, &mut new);
            }
            let charge = match writing.part {
                Part::Main => self.charge(resource, &new, Some(&old), writing.dry_run).await?,
                _ => None,
            };
            if writing.dry_run {
                return Ok(new);
            }
            let stored = self.store_over(resource, &kv, &old, new).await;
            if charge.is_some() && !matches!(stored, Ok(Some(_))) {
                self.room.count(namespace);
            }
            if let Some(object) = stored? {
                return Ok(object);
            }
            if stated {
                return Err(Status::modified(&resource.group, &resource.plural, n));
            }
        }
        Err(Status::modified(&resource.group, &resource.plural, n))
    }

    /// Stores a changed object over what was read; none when somebody was faster.
    pub(super) async fn store_over(
        self: &Arc<Self>,
        resource: &Resource,
        kv: &Kv,
        old: &Value,
        mut new: Value,
    ) -> Result<Option<Value>, Status> {
        let goes = write::goes(resource, old, &new);
        if !goes && new == *old {
            return Ok(Some(new));
        }
        let bytes = if goes { None } else { Some(convert::encode(resource, new.clone())?) };
        match self.storage.write(&kv.key, Expect::At(kv.revision), bytes).await.map_err(storage_status)? {
            Outcome::Done(revision) => {
                meta(&mut new).insert("resourceVersion".into(), revision.to_string().into());
                self.wrote(resource, &new, goes).await;
                Ok(Some(new))
            }
            Outcome::Conflict(None) => Err(Status::not_found(&resource.group, &resource.plural, name(old))),
            Outcome::Conflict(Some(_)) => Ok(None),
        }
    }
}

/// The kind of patch that a request says it is.
pub(super) fn patch_kind(call: &Call, resource: &Resource) -> Result<patch::Kind, Status> {
    let kind = call.headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    patch::Kind::of(kind, resource)
}

/// The question that admission is asked about a write.
pub(super) fn admission_request(
    writing: &Writing<'_>,
    operation: Operation,
    object: Value,
    old: Value,
) -> AdmissionRequest {
    let request = AdmissionRequest::new(writing.resource, writing.call, operation, object, old);
    AdmissionRequest { dry_run: writing.dry_run, ..request }
}
