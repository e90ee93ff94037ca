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
use crate::semantics::owners::{self, Writer};
use crate::semantics::patch;
use crate::semantics::value::{self, deleting, meta, name, resource_version};
use crate::semantics::write::{self, FieldValidation, Part};
use crate::semantics::{FieldError, Resource, Status};
use crate::storage::{Expect, Kv, Outcome};

/// How often a write that states no resourceVersion is tried against others.
pub(super) const ATTEMPTS: usize = 10;
/// The longest name of a field manager.
const MANAGER_MAX: usize = 128;
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
    /// Who the fields belong to that are written.
    pub manager: String,
    /// Of an apply: take what others own.
    pub force: bool,
}

/// The name of who writes: as he says, or the first part of his user agent.
fn manager(call: &Call) -> String {
    let agent = || call.headers.get(header::USER_AGENT).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let name = match call.query.text("fieldManager") {
        "" => agent().split('/').next().unwrap_or_default(),
        said => said,
    };
    if name.is_empty() { "unknown".into() } else { name.into() }
}

impl<'a> Writing<'a> {
    pub fn new(resource: &'a Resource, call: &'a Call, part: Part) -> Result<Self, Status> {
        Ok(Self {
            resource,
            call,
            part,
            dry_run: call.query.dry_run(call.options())?,
            mode: FieldValidation::parse(call.query.text("fieldValidation"), call.options())?,
            warnings: Vec::new(),
            manager: manager(call),
            force: call.query.flag("force"),
        })
    }

    /// Checks what a PATCH says beside its body.
    fn patch_options(&self, kind: patch::Kind) -> Result<(), Status> {
        let said = self.call.query.text("fieldManager");
        let force = self.call.query.text("force");
        let mut errors = Vec::new();
        if kind == patch::Kind::Apply && said.is_empty() {
            errors.push(FieldError::required("fieldManager", "is required for apply patch"));
        }
        if kind != patch::Kind::Apply && !force.is_empty() {
            errors.push(FieldError::forbidden("force", "may not be specified for non-apply patch"));
        }
        if said.len() > MANAGER_MAX {
            errors.push(FieldError::too_long("fieldManager", MANAGER_MAX as u64));
        }
        if errors.is_empty() { Ok(()) } else { Err(Status::invalid("meta.k8s.io", "PatchOptions", "", &errors)) }
    }

    pub(super) fn writer(&self) -> Writer {
        let subresource = match self.call.target.subresource.as_str() {
            s @ ("status" | "scale" | "token") => s.to_owned(),
            _ => String::new(),
        };
        Writer {
            manager: self.manager.clone(),
            subresource,
            reset: owners::reset(self.resource, self.part),
            now: moment().rfc3339(0),
        }
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
    Apply(&'a Value),
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
        let object = self.create_shaped(&mut writing, shaped, None).await?;
        let mut response = self.show(resource, call, form, object, 201);
        respond::warn(&mut response, &writing.warnings);
        Ok(response)
    }

    /// Creates an object; `owned` is the list of its owners, where that is known already.
    async fn create_shaped(
        self: &Arc<Self>,
        writing: &mut Writing<'_>,
        mut shaped: Value,
        owned: Option<Value>,
    ) -> Result<Value, Status> {
        let (resource, call) = (writing.resource, writing.call);
        let generated = name(&shaped).is_empty();
        if owned.is_some() {
            // Of an apply, which finds nothing.
            meta(&mut shaped).remove("resourceVersion");
        }
        let owned = owned.or_else(|| {
            // Whoever creates owns what he says and what stands for what he leaves out, not what the server adds.
            let mut said = shaped.clone();
            write::fill(resource, &mut said);
            owners::track(resource, None, owners::of(&shaped), &mut said, &writing.writer());
            meta(&mut said).remove("managedFields")
        });
        let namespace = if resource.namespaced { call.target.namespace.as_str() } else { "" };
        for attempt in 1.. {
            let mut object = write::create(resource, namespace, "", shaped.clone(), &moment())?;
            value::put(meta(&mut object), "managedFields", owned.clone().filter(|o| !o.is_null()));
            let request = admission_request(writing, Operation::Create, object, Value::Null);
            let (mut object, warnings) = self.admit(resource, request).await?;
            writing.warnings.extend(warnings);
            write::fill(resource, &mut object);
            self.no_escalation(resource, call, &object, None).await?;
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
        writing.patch_options(kind)?;
        let bytes = respond::body(body).await?;
        if kind == patch::Kind::Apply {
            let config = respond::apply_body(&bytes)?;
            let (object, code) = self.apply(&mut writing, &config).await?;
            let mut response = self.show(resource, call, form, object, code);
            respond::warn(&mut response, &writing.warnings);
            return Ok(response);
        }
        let duplicates = match kind {
            patch::Kind::Json => Vec::new(),
            _ => crate::semantics::strict::decode(&bytes).map(|(_, d)| d).unwrap_or_default(),
        };
        let object = self.change(&mut writing, &Wanted::Patch(kind, &bytes, &duplicates)).await?;
        let mut response = self.show(resource, call, form, object, 200);
        respond::warn(&mut response, &writing.warnings);
        Ok(response)
    }

    /// Server-side apply: of an object that is there, or of a new one. The object, and the code of the answer.
    async fn apply(self: &Arc<Self>, writing: &mut Writing<'_>, config: &Value) -> Result<(Value, u16), Status> {
        let (resource, call) = (writing.resource, writing.call);
        let (group, version) = match value::text(config, "/apiVersion").split_once('/') {
            Some((group, version)) => (group, version),
            None => ("", value::text(config, "/apiVersion")),
        };
        let kind = value::text(config, "/kind");
        if (group, version, kind) != (&resource.group, &resource.version, &resource.kind) {
            return Err(Status::bad_request(format!("invalid object type: {group}/{version}, Kind={kind}")));
        }
        for _ in 0..ATTEMPTS {
            match self.change(writing, &Wanted::Apply(config)).await {
                Err(s) if s.code == 404 && s.reason == "NotFound" && writing.part == Part::Main => {}
                other => return other.map(|object| (object, 200)),
            }
            let create = crate::auth::Attributes {
                verb: "create".into(),
                group: resource.group.clone(),
                resource: resource.plural.clone(),
                namespace: call.target.namespace.clone(),
                name: call.target.name.clone(),
                ..Default::default()
            };
            self.authorize(&call.user, &create).await?;
            let mut made = owners::apply(resource, None, config, &writing.writer(), writing.force)?;
            let owned = meta(&mut made).remove("managedFields");
            if !value::uid(config).is_empty() {
                let why = format!(
                    "uid mismatch: the provided object specified uid {}, and no existing object was found",
                    value::uid(config)
                );
                return Err(Status::conflict(&resource.group, &resource.plural, &call.target.name, &why));
            }
            right_name(call, &made)?;
            let shaped = self.shaped_patch(writing, made, &Value::to_string, &[])?;
            match self.create_shaped(writing, shaped, Some(owned.unwrap_or_default())).await {
                Err(s) if s.reason == "AlreadyExists" => {}
                other => return other.map(|object| (object, 201)),
            }
        }
        Err(Status::modified(&resource.group, &resource.plural, &call.target.name))
    }

    /// Shapes a patched object; `shown` is what a refusal shows of it.
    fn shaped_patch(
        &self,
        writing: &mut Writing<'_>,
        patched: Value,
        shown: &dyn Fn(&Value) -> String,
        duplicates: &[String],
    ) -> Result<Value, Status> {
        let before = patched.clone();
        let refused = |text: &str| {
            let error = FieldError::invalid("patch", &shown(&before).into(), text);
            Status::invalid("", "", "", &[error])
        };
        writing.shape(patched, duplicates).map_err(|e| match e {
            ShapeError::Refused(s) => match s.message.split_once(" cannot be handled as a ") {
                Some((_, why)) => refused(why.split_once(": ").map_or(why, |(_, why)| why)),
                None => s,
            },
            ShapeError::Strict(text) => refused(&text),
        })
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
                    let shown = |patched: &Value| match kind {
                        patch::Kind::Strategic => {
                            serde_json::from_slice(bytes).map(|v| patch::go_print(&v)).unwrap_or_default()
                        }
                        _ => patched.to_string(),
                    };
                    (self.shaped_patch(writing, patched, &shown, duplicates)?, false)
                }
                Wanted::Apply(config) => {
                    let merged = owners::apply(resource, Some(&old), config, &writing.writer(), writing.force)?;
                    (self.shaped_patch(writing, merged, &Value::to_string, &[])?, false)
                }
            };
            right_name(call, &new)?;
            let stated = !resource_version(&new).is_empty() && matches!(wanted, Wanted::Whole(_));
            let sent = owners::of(&new).cloned();
            let mut new = write::update(resource, writing.part, &old, new, must)?;
            match wanted {
                Wanted::Apply(_) => value::put(meta(&mut new), "managedFields", sent),
                _ => owners::track(resource, Some(&old), sent.as_ref(), &mut new, &writing.writer()),
            }
            let request = admission_request(writing, Operation::Update, new, old.clone());
            let (mut new, warnings) = self.admit(resource, request).await?;
            for w in warnings {
                if !writing.warnings.contains(&w) {
                    writing.warnings.push(w);
                }
            }
            self.no_escalation(resource, call, &new, Some(&old)).await?;
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
                if goes {
                    // What is gone has the version that it had last.
                    let last = resource_version(old).to_owned();
                    meta(&mut new).insert("resourceVersion".into(), last.into());
                }
                Ok(Some(new))
            }
            Outcome::Conflict(None) => Err(Status::not_found(&resource.group, &resource.plural, name(old))),
            Outcome::Conflict(Some(_)) => Ok(None),
        }
    }
}

/// The object must say which it is.
fn right_name(call: &Call, object: &Value) -> Result<(), Status> {
    if !name(object).is_empty() {
        return Ok(());
    }
    let why =
        format!("the name of the object ({} based on URL) was undeterminable: name must be provided", call.target.name);
    Err(Status::bad_request(why))
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
