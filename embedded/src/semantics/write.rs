//! Creation, update and deletion of one object.
//!
//! Nobody but these functions sets uid, creationTimestamp, generation, deletionTimestamp and grace. A status is changed
//! only through the status subresource where there is one, everything else only outside of it. An object goes from the
//! store when it is being deleted, has no grace left and nothing holds it.

use serde_json::{Map, Value, json};

use super::schema;
use super::value::{self, child, deleting, finalizers, meta, name, text};
use super::{FieldError, Moment, Resource, Status, names, seconds};

/// Holds an object until its dependents are orphaned.
pub const ORPHAN_FINALIZER: &str = "orphan";
/// Holds an object until its dependents are gone.
pub const FOREGROUND_FINALIZER: &str = "foregroundDeletion";

/// Which part of the object an update is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Everything but the status (or everything, where there is no status subresource).
    Main,
    /// The status alone.
    Status,
}

/// What kube-apiserver does with unknown and duplicate fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldValidation {
    /// Drops them.
    Ignore,
    /// Drops them and warns.
    Warn,
    /// Refuses them.
    Strict,
}

impl FieldValidation {
    /// Reads the query parameter, one of `options` (`CreateOptions`, ...).
    ///
    /// # Errors
    /// 422 as kube-apiserver does.
    pub fn parse(text: &str, options: &str) -> Result<Self, Status> {
        match text {
            "Ignore" => Ok(Self::Ignore),
            "" | "Warn" => Ok(Self::Warn),
            "Strict" => Ok(Self::Strict),
            other => {
                let known = ["", "Ignore", "Strict", "Warn"].map(str::to_owned);
                let error = FieldError::unsupported("fieldValidation", &other.into(), &known);
                Err(Status::invalid("meta.k8s.io", options, "", &[error]))
            }
        }
    }
}

/// A decoded object and what is to be said about it.
#[derive(Debug, Clone)]
pub struct Decoded {
    /// The object, with nothing in it that its kind does not know.
    pub object: Value,
    /// `unknown field "spec.x"`, `duplicate field "spec.y"`.
    pub strict: Vec<String>,
}

/// Brings what was sent into the shape of its kind: types (of built-in kinds), unknown fields, nulls.
///
/// # Errors
/// 400 when it is of another kind or has values of wrong types.
pub fn shape(resource: &Resource, mut object: Value, duplicates: &[String]) -> Result<Decoded, Status> {
    let api_version = resource.api_version();
    if !object.is_object() {
        return Err(Status::bad_request(
            "the object provided is unrecognized: couldn't get version/kind; json parse error",
        ));
    }
    let (said_version, said_kind) = (text(&object, "/apiVersion").to_owned(), text(&object, "/kind").to_owned());
    if resource.custom && said_kind.is_empty() {
        let text = object.to_string();
        let start: String = text.chars().take(30).collect();
        let start = if start.len() < text.len() { format!("{start} ...") } else { start };
        return Err(Status::bad_request(format!(
            "the object provided is unrecognized (must be of type {}): Object 'Kind' is missing in '{text}' ({start})",
            resource.kind
        )));
    }
    if resource.custom && said_kind != resource.kind && said_version == api_version {
        let error = FieldError::invalid("kind", &said_kind.as_str().into(), &format!("must be {}", resource.kind));
        return Err(Status::invalid(&resource.group, &said_kind, name(&object), &[error]));
    }
    if (!said_kind.is_empty() && said_kind != resource.kind)
        || (!said_version.is_empty() && said_version != api_version)
    {
        return Err(Status::bad_request(if said_version.is_empty() || said_version == api_version {
            format!(
                "{said_kind} in version {:?} cannot be handled as a {}: no kind {said_kind:?} is registered for version {api_version:?}",
                resource.version, resource.kind,
            )
        } else if resource.custom {
            format!(
                "the API version in the data ({said_version}) does not match the expected API version ({api_version})"
            )
        } else {
            let version = said_version.rsplit('/').next().unwrap_or_default();
            format!(
                "{said_kind} in version {version:?} cannot be handled as a {}: no kind {said_kind:?} is registered for version {said_version:?} in scheme \"pkg/runtime/scheme.go:111\"",
                resource.kind,
            )
        }));
    }
    let map = value::object(&mut object);
    map.insert("apiVersion".into(), api_version.clone().into());
    map.insert("kind".into(), resource.kind.clone().into());
    let mut strict: Vec<String> = duplicates.iter().map(|p| format!("duplicate field {p:?}")).collect();
    if let Some(schema) = &resource.schema {
        let wrong = if resource.custom {
            // Of a custom resource only the metadata has Go types.
            object.get("metadata").and_then(|m| metadata_type(schema, m))
        } else {
            schema::go_type(schema, &object, &resource.kind)
        };
        if let Some(wrong) = wrong {
            return Err(cannot_be_handled(resource, &wrong));
        }
        let gone = schema::prune(schema, &mut object);
        strict.extend(gone.iter().map(|p| format!("unknown field {p:?}")));
        if !resource.custom {
            schema::drop_nulls(schema, &mut object);
        } else {
            schema::drop_wrong_nulls(schema, &mut object);
            if let Some(m) = object.get_mut("metadata").and_then(Value::as_object_mut) {
                m.retain(|_, v| !v.is_null());
            }
        }
    }
    let m = meta(&mut object);
    m.remove("selfLink");
    for key in ["labels", "annotations", "finalizers", "ownerReferences"] {
        let empty = |v: &Value| v.as_array().is_some_and(Vec::is_empty) || v.as_object().is_some_and(Map::is_empty);
        if m.get(key).is_some_and(empty) {
            m.remove(key);
        }
    }
    Ok(Decoded { object, strict })
}

fn metadata_type(schema: &schema::Schema, metadata: &Value) -> Option<String> {
    let root = schema::Node { reference: Some(schema::OBJECT_META.into()), ..schema::Node::default() };
    let of = schema::Schema { root, definitions: schema.definitions.clone() };
    schema::go_type(&of, metadata, "ObjectMeta")
}

/// 400: the object is of this kind by name but not by its values.
#[must_use]
pub fn cannot_be_handled(resource: &Resource, why: &str) -> Status {
    Status::bad_request(format!(
        "{} in version {:?} cannot be handled as a {}: {why}",
        resource.kind, resource.version, resource.kind
    ))
}

/// What unknown fields lead to: warnings, or the text of the refusal.
///
/// # Errors
/// The text of a strict decoding error.
pub fn strictness(mode: FieldValidation, found: &[String]) -> Result<Vec<String>, String> {
    match mode {
        _ if found.is_empty() => Ok(Vec::new()),
        FieldValidation::Ignore => Ok(Vec::new()),
        FieldValidation::Warn => Ok(found.to_vec()),
        FieldValidation::Strict => Err(format!("strict decoding error: {}", found.join(", "))),
    }
}

/// Prepares a shaped object for creation, as far as the server sets things: names, identity, times. Validation comes
/// after admission, in [`check`].
///
/// # Errors
/// 400, 422 and 500 about names and namespaces.
pub fn create(
    resource: &Resource,
    namespace: &str,
    wanted_name: &str,
    mut object: Value,
    moment: &Moment,
) -> Result<Value, Status> {
    if !value::resource_version(&object).is_empty() {
        return Err(Status::new(500, "", "resourceVersion should not be set on objects to be created"));
    }
    place(resource, namespace, &mut object)?;
    let given = name(&object).to_owned();
    if !wanted_name.is_empty() {
        if given.is_empty() {
            meta(&mut object).insert("name".into(), wanted_name.into());
        } else if given != wanted_name {
            return Err(wrong_name(&given, wanted_name));
        }
    } else if given.is_empty() {
        let prefix: String = text(&object, "/metadata/generateName").chars().take(58).collect();
        if prefix.is_empty() {
            let error = FieldError::required("metadata.name", "name or generateName is required");
            return Err(Status::invalid(&resource.group, &resource.kind, "", &[error]));
        }
        meta(&mut object).insert("name".into(), format!("{prefix}{}", moment.suffix).into());
    }
    let m = meta(&mut object);
    for key in ["deletionTimestamp", "deletionGracePeriodSeconds", "generation"] {
        m.remove(key);
    }
    m.insert("uid".into(), moment.uid.clone().into());
    m.insert("creationTimestamp".into(), moment.rfc3339(0).into());
    if resource.generation {
        m.insert("generation".into(), 1.into());
    }
    if resource.custom && resource.status {
        value::object(&mut object).remove("status");
    }
    resource.behaviour.prepare_create(&mut object);
    fill(resource, &mut object);
    Ok(object)
}

/// Fills in the defaults of schema and kind.
pub fn fill(resource: &Resource, object: &mut Value) {
    if resource.custom
        && let Some(schema) = &resource.schema
    {
        schema::default(schema, object);
    }
    resource.behaviour.default(object);
}

fn wrong_name(body: &str, url: &str) -> Status {
    Status::bad_request(format!("the name of the object ({body}) does not match the name on the URL ({url})"))
}

fn place(resource: &Resource, namespace: &str, object: &mut Value) -> Result<(), Status> {
    let said = value::namespace(object).to_owned();
    if !resource.namespaced {
        meta(object).remove("namespace");
    } else if said.is_empty() {
        meta(object).insert("namespace".into(), namespace.into());
    } else if said != namespace {
        return Err(Status::bad_request(
            "the namespace of the provided object does not match the namespace sent on the request",
        ));
    }
    Ok(())
}

/// Everything that is wrong with an object that is about to be stored.
///
/// # Errors
/// 422 with all causes.
pub fn check(resource: &Resource, old: Option<&Value>, object: &Value) -> Result<(), Status> {
    let mut errors = Vec::new();
    within_levels(resource, object)?;
    check_metadata(resource, old, object, &mut errors);
    if let Some(schema) = &resource.schema {
        // Metadata is checked above, in its own words.
        errors.extend(schema::validate(schema, object).into_iter().filter(|e| !e.field.starts_with("metadata")));
    }
    if errors.is_empty() {
        resource.behaviour.validate(object, &mut errors);
        if let Some(old) = old {
            resource.behaviour.validate_update(old, object, &mut errors);
        }
    }
    if errors.is_empty() {
        Ok(())
    } else {
        Err(Status::invalid(&resource.group, &resource.kind, name(object), &errors))
    }
}

/// Fails for an object that would be too deep to be read again.
///
/// # Errors
/// 422 that names the field.
pub fn within_levels(resource: &Resource, object: &Value) -> Result<(), Status> {
    let Some(field) = value::too_deep(object) else { return Ok(()) };
    let why = format!("too deep: an object has at most {} levels", value::LEVELS_MAX);
    let error = FieldError::forbidden(field, &why);
    Err(Status::invalid(&resource.group, &resource.kind, name(object), &[error]))
}

fn check_metadata(resource: &Resource, old: Option<&Value>, object: &Value, errors: &mut Vec<FieldError>) {
    let n = name(object);
    if old.is_none()
        && let Some(why) = names::check_name(resource.behaviour.name_rule(), n)
    {
        errors.push(FieldError::invalid("metadata.name", &n.into(), &why));
    }
    if let Some(labels) = object.pointer("/metadata/labels").and_then(Value::as_object) {
        names::check_labels(labels, "metadata.labels", errors);
    }
    if let Some(annotations) = object.pointer("/metadata/annotations").and_then(Value::as_object) {
        names::check_annotations(annotations, "metadata.annotations", errors);
    }
    for (i, f) in finalizers(object).into_iter().enumerate() {
        let field = format!("metadata.finalizers[{i}]");
        if let Some(why) = names::check_qualified(&f) {
            errors.push(FieldError::invalid(field, &f.as_str().into(), &why));
        } else if !f.contains('/')
            && ![ORPHAN_FINALIZER, FOREGROUND_FINALIZER, "kubernetes"].contains(&f.as_str())
            && !resource.custom
            && resource.group != "apiextensions.k8s.io"
        {
            let why = "name is neither a standard finalizer name nor is it fully qualified";
            let error = FieldError::invalid(field, &f.as_str().into(), why);
            if old.is_some() {
                // Found twice there: as metadata and as a change of it.
                errors.push(error.clone());
            }
            errors.push(error);
        }
    }
    let mut controlling = Vec::new();
    for owner in value::items(object, "/metadata/ownerReferences") {
        for key in ["apiVersion", "kind", "name", "uid"] {
            if text(owner, &format!("/{key}")).is_empty() {
                let field = format!("metadata.ownerReferences.{key}");
                errors.push(FieldError::invalid(field, &"".into(), "must not be empty"));
            }
        }
        if owner.get("controller").and_then(Value::as_bool) == Some(true) {
            controlling.push(format!("{}/{}", text(owner, "/kind"), text(owner, "/name")));
        }
    }
    if let [first, second, ..] = controlling.as_slice() {
        let list = object.pointer("/metadata/ownerReferences").cloned().unwrap_or_default();
        let why = format!(
            "Only one reference can have Controller set to true. Found \"true\" in references for {first} and {second}"
        );
        errors.push(FieldError::invalid("metadata.ownerReferences", &list, &why));
    }
    if let Some(old) = old
        && deleting(old)
    {
        let before = finalizers(old);
        let added: Vec<String> = finalizers(object).into_iter().filter(|f| !before.contains(f)).collect();
        if !added.is_empty() {
            let list: Vec<String> = added.iter().map(|f| format!("{f:?}")).collect();
            let why = format!(
                "no new finalizers can be added if the object is being deleted, found new finalizers []string{{{}}}",
                list.join(", ")
            );
            let error = FieldError::forbidden("metadata.finalizers", &why);
            errors.extend([error.clone(), error]);
        }
    }
}

/// Prepares an update: `new` is the whole object as the user wants it, already shaped. Validation comes after admission.
///
/// # Errors
/// 400 about name and namespace, 409 about uid and resourceVersion, 422 where a resourceVersion must be given.
pub fn update(
    resource: &Resource,
    part: Part,
    old: &Value,
    mut new: Value,
    must_have_version: bool,
) -> Result<Value, Status> {
    let n = name(old);
    let said = name(&new).to_owned();
    if !said.is_empty() && said != n {
        return Err(wrong_name(&said, n));
    }
    place(resource, value::namespace(old), &mut new)?;
    let (old_uid, new_uid) = (value::uid(old), value::uid(&new));
    if !new_uid.is_empty() && new_uid != old_uid {
        let group = if resource.custom { format!("{}/", resource.group) } else { String::new() };
        let space = value::namespace(old);
        let space = if space.is_empty() { String::new() } else { format!("{space}/") };
        let why = format!(
            "StorageError: invalid object, Code: 4, Key: /registry/{group}{}/{space}{n}, ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: UID in precondition: {new_uid}, UID in object meta: {old_uid}",
            resource.plural
        );
        return Err(Status::conflict(&resource.group, &resource.plural, n, &why));
    }
    let version = value::resource_version(&new);
    if version.is_empty() || version == "0" {
        if must_have_version {
            let error = FieldError::invalid("metadata.resourceVersion", &0.into(), "must be specified for an update");
            return Err(Status::invalid(&resource.group, &resource.plural, n, &[error]));
        }
    } else if version != value::resource_version(old) {
        return Err(Status::modified(&resource.group, &resource.plural, n));
    }
    let old_meta = old.get("metadata").and_then(Value::as_object).cloned().unwrap_or_default();
    if part == Part::Status {
        let status = new.get("status").cloned();
        if resource.custom {
            new = old.clone();
        } else {
            // The status of a built-in kind may bring labels and annotations along.
            let mut kept = old.clone();
            for key in ["labels", "annotations", "finalizers"] {
                let wanted = new.pointer(&format!("/metadata/{key}")).cloned();
                value::put(meta(&mut kept), key, wanted);
            }
            new = kept;
        }
        value::put(value::object(&mut new), "status", status);
    } else if resource.status {
        let status = old.get("status").cloned();
        value::put(value::object(&mut new), "status", status);
    }
    let m = meta(&mut new);
    for key in [
        "name",
        "namespace",
        "generateName",
        "uid",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generation",
        "resourceVersion",
    ] {
        value::put(m, key, old_meta.get(key).cloned());
    }
    if part == Part::Main {
        resource.behaviour.prepare_update(old, &mut new);
    }
    fill(resource, &mut new);
    Ok(new)
}

/// Raises the generation if something that counts has changed; last step before storing, after admission.
pub fn settle_generation(resource: &Resource, old: &Value, new: &mut Value) {
    if resource.generation && resource.spec_differs(old, new) {
        let g = old.pointer("/metadata/generation").and_then(Value::as_i64).unwrap_or(0) + 1;
        meta(new).insert("generation".into(), g.into());
    }
}

/// Whether an updated object, which was being deleted, now goes.
#[must_use]
pub fn goes(resource: &Resource, old: &Value, new: &Value) -> bool {
    deleting(old)
        && finalizers(new).is_empty()
        && !resource.behaviour.held(new)
        && old.pointer("/metadata/deletionGracePeriodSeconds").and_then(Value::as_i64).unwrap_or(0) == 0
}

/// What happens to dependents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Propagation {
    /// They stay and lose their owner.
    Orphan,
    /// They go afterwards.
    Background,
    /// They go before.
    Foreground,
}

/// The options of a deletion.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeleteOptions {
    /// Seconds of grace.
    pub grace: Option<i64>,
    /// The UID that the object must have.
    pub uid: Option<String>,
    /// The resourceVersion that the object must have.
    pub resource_version: Option<String>,
    /// What happens to dependents.
    pub propagation: Option<Propagation>,
    /// Nothing is stored.
    pub dry_run: bool,
}

impl DeleteOptions {
    /// Reads body and query of a DELETE.
    ///
    /// # Errors
    /// 400 and 422 for options that do not exist or exclude each other.
    pub fn parse(body: &Value, query: &dyn Fn(&str) -> Option<String>) -> Result<Self, Status> {
        let number = |v: &Value| v.as_i64();
        let grace = match body.get("gracePeriodSeconds").and_then(number) {
            Some(n) => Some(n),
            None => match query("gracePeriodSeconds") {
                Some(t) => Some(
                    t.parse()
                        .map_err(|_| Status::bad_request(format!("strconv.ParseInt: parsing {t:?}: invalid syntax")))?,
                ),
                None => None,
            },
        };
        let policy = match text(body, "/propagationPolicy") {
            "" => query("propagationPolicy").unwrap_or_default(),
            p => p.to_owned(),
        };
        let orphan = body
            .get("orphanDependents")
            .and_then(Value::as_bool)
            .or_else(|| query("orphanDependents").and_then(|t| t.parse().ok()));
        let propagation = match (policy.as_str(), orphan) {
            ("", None) => None,
            ("", Some(true)) | ("Orphan", None) => Some(Propagation::Orphan),
            ("", Some(false)) | ("Background", None) => Some(Propagation::Background),
            ("Foreground", None) => Some(Propagation::Foreground),
            (_, Some(_)) => {
                let why = "orphanDependents and deletionPropagation cannot be both set";
                let error = FieldError::invalid("propagationPolicy", &policy.as_str().into(), why);
                return Err(Status::invalid("meta.k8s.io", "DeleteOptions", "", &[error]));
            }
            (other, None) => {
                let known = ["Foreground", "Background", "Orphan", "nil"].map(str::to_owned);
                let error = FieldError::unsupported("propagationPolicy", &other.into(), &known);
                return Err(Status::invalid("meta.k8s.io", "DeleteOptions", "", &[error]));
            }
        };
        let dry_run = !value::items(body, "/dryRun").is_empty() || query("dryRun").is_some_and(|d| !d.is_empty());
        let condition =
            |key: &str| body.pointer(&format!("/preconditions/{key}")).and_then(Value::as_str).map(str::to_owned);
        Ok(Self { grace, uid: condition("uid"), resource_version: condition("resourceVersion"), propagation, dry_run })
    }
}

/// What a deletion does to the stored object.
#[derive(Debug, Clone, PartialEq)]
pub enum Deletion {
    /// It goes now; the object as it was last.
    Remove(Value),
    /// It stays, being deleted.
    Mark(Value),
    /// Nothing changes: it is being deleted already.
    Pending(Value),
}

/// Decides a deletion.
///
/// # Errors
/// 409 when a precondition does not hold.
pub fn delete(resource: &Resource, old: &Value, options: &DeleteOptions, moment: &Moment) -> Result<Deletion, Status> {
    for (what, wanted, is, hint) in [
        ("UID", &options.uid, value::uid(old), "deleted and then recreated"),
        ("ResourceVersion", &options.resource_version, value::resource_version(old), "modified"),
    ] {
        if let Some(wanted) = wanted
            && wanted != is
        {
            let why = format!(
                "the {what} in the precondition ({wanted}) does not match the {what} in record ({is}). The object might have been {hint}"
            );
            return Err(Status::conflict(&resource.group, &resource.kind, name(old), &why));
        }
    }
    let mut new = old.clone();
    let mut held = finalizers(old);
    let fresh = !deleting(old);
    match options.propagation {
        Some(Propagation::Orphan) => swap(&mut held, ORPHAN_FINALIZER, FOREGROUND_FINALIZER),
        Some(Propagation::Foreground) => swap(&mut held, FOREGROUND_FINALIZER, ORPHAN_FINALIZER),
        Some(Propagation::Background) => {
            held.retain(|f| f != ORPHAN_FINALIZER && f != FOREGROUND_FINALIZER);
        }
        None => {}
    }
    let changed = held != finalizers(old);
    if changed {
        let list = (!held.is_empty()).then(|| Value::from(held.clone()));
        value::put(meta(&mut new), "finalizers", list);
    }
    let grace = resource.behaviour.grace(old, options.grace.map(|g| if g < 0 { 1 } else { g }));
    let before = old.pointer("/metadata/deletionGracePeriodSeconds").and_then(Value::as_i64);
    let left = match (grace, fresh) {
        (None, _) => 0,
        (Some(g), true) => g,
        // Later deletions may only shorten what is left, and only when they say so.
        (Some(g), false) => options.grace.map_or_else(|| before.unwrap_or(0), |_| g.min(before.unwrap_or(0))),
    };
    if left == 0 && held.is_empty() && !resource.behaviour.held(&new) {
        if grace.is_some() || !fresh {
            mark(&mut new, resource, fresh, 0, moment, before);
        }
        return Ok(Deletion::Remove(new));
    }
    if !fresh && !changed && before == Some(left) {
        return Ok(Deletion::Pending(new));
    }
    mark(&mut new, resource, fresh, left, moment, before);
    Ok(Deletion::Mark(new))
}

fn swap(held: &mut Vec<String>, add: &str, remove: &str) {
    held.retain(|f| f != remove);
    if !held.iter().any(|f| f == add) {
        held.push(add.to_owned());
    }
}

fn mark(new: &mut Value, resource: &Resource, fresh: bool, grace: i64, moment: &Moment, before: Option<i64>) {
    let when = if fresh {
        moment.rfc3339(grace)
    } else {
        let old = seconds(text(new, "/metadata/deletionTimestamp")).unwrap_or(moment.seconds);
        super::rfc3339(old - before.unwrap_or(0) + grace)
    };
    let m = meta(new);
    m.insert("deletionTimestamp".into(), when.into());
    // These two have deletions of their own.
    let own = !resource.custom && ["Namespace", "CustomResourceDefinition"].contains(&resource.kind.as_str());
    if !own {
        m.insert("deletionGracePeriodSeconds".into(), grace.into());
    }
    if fresh && resource.generation && !own {
        let g = m.get("generation").and_then(Value::as_i64).unwrap_or(0) + 1;
        m.insert("generation".into(), g.into());
    }
    if resource.kind == "Namespace" && resource.group.is_empty() {
        child(new, "status").insert("phase".into(), "Terminating".into());
    }
}

/// The scale of an object, as its subresource shows it.
#[must_use]
pub fn scale_of(resource: &Resource, object: &Value) -> Option<Value> {
    let scale = resource.scale.as_ref()?;
    let pointer = |path: &str| path.replace('.', "/");
    let number = |path: &str| object.pointer(&pointer(path)).and_then(Value::as_i64).unwrap_or(0);
    let m = object.get("metadata")?;
    let mut metadata = Map::new();
    for key in ["name", "namespace", "uid", "resourceVersion", "creationTimestamp"] {
        value::put(&mut metadata, key, m.get(key).cloned());
    }
    let mut status = json!({"replicas": number(&scale.status_path)});
    if let Some(s) = scale.selector_path.as_ref().and_then(|p| object.pointer(&pointer(p))).and_then(Value::as_str) {
        status["selector"] = s.into();
    }
    Some(json!({
        "apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": metadata,
        "spec": {"replicas": number(&scale.spec_path)}, "status": status,
    }))
}

/// The object with the number of a scale.
///
/// # Errors
/// 400 and 422 when the scale is none.
pub fn with_scale(resource: &Resource, old: &Value, scale: &Value) -> Result<Value, Status> {
    let Some(paths) = &resource.scale else { return Err(Status::no_such_path()) };
    let wanted = scale.pointer("/spec/replicas").and_then(Value::as_i64).unwrap_or(0);
    if wanted < 0 {
        let error = FieldError::invalid(&paths.spec_path, &wanted.into(), "should be a non-negative integer");
        return Err(Status::invalid(&resource.group, &resource.kind, name(old), &[error]));
    }
    let mut new = old.clone();
    let version = value::resource_version(scale);
    if !version.is_empty() {
        meta(&mut new).insert("resourceVersion".into(), version.into());
    }
    let keys: Vec<&str> = paths.spec_path.split('.').filter(|k| !k.is_empty()).collect();
    let mut at = &mut new;
    for key in &keys {
        at = value::object(at).entry((*key).to_owned()).or_insert(Value::Null);
    }
    *at = wanted.into();
    Ok(new)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn moment() -> Moment {
        Moment { seconds: 1_000_000, uid: "u".into(), suffix: "abcde".into() }
    }

    fn resource(plural: &str) -> Resource {
        crate::kinds::builtin().0.into_iter().find(|r| r.plural == plural).unwrap()
    }

    #[test]
    fn creation_sets_what_only_the_server_may_set() {
        let r = resource("configmaps");
        let sent = json!({"metadata": {"generateName": "x-", "uid": "forged", "creationTimestamp": "2000-01-01T00:00:00Z",
            "deletionTimestamp": "2000-01-01T00:00:00Z"}});
        let o = create(&r, "ns", "", sent, &moment()).unwrap();
        assert_eq!(
            o["metadata"],
            json!({"generateName": "x-", "name": "x-abcde", "namespace": "ns", "uid": "u",
                   "creationTimestamp": "1970-01-12T13:46:40Z"})
        );
        let none = create(&r, "ns", "", json!({"metadata": {}}), &moment()).unwrap_err();
        assert_eq!(none.code, 422);
        let other = create(&r, "ns", "", json!({"metadata": {"name": "a", "namespace": "b"}}), &moment()).unwrap_err();
        assert_eq!(other.code, 400);
    }

    #[test]
    fn deletion_is_decided_by_grace_finalizers_and_preconditions() {
        let r = resource("pods");
        let pod =
            |meta: Value| json!({"metadata": meta, "spec": {"nodeName": "n", "terminationGracePeriodSeconds": 7}});
        let plain = pod(json!({"name": "p", "uid": "1", "resourceVersion": "5"}));
        let Deletion::Mark(marked) = delete(&r, &plain, &DeleteOptions::default(), &moment()).unwrap() else {
            panic!()
        };
        assert_eq!(marked["metadata"]["deletionGracePeriodSeconds"], 7);
        assert_eq!(marked["metadata"]["deletionTimestamp"], "1970-01-12T13:46:47Z");
        let again = delete(&r, &marked, &DeleteOptions::default(), &moment()).unwrap();
        assert!(matches!(again, Deletion::Pending(_)));
        let sooner = DeleteOptions { grace: Some(2), ..DeleteOptions::default() };
        let Deletion::Mark(s) = delete(&r, &marked, &sooner, &moment()).unwrap() else { panic!() };
        assert_eq!(s["metadata"]["deletionTimestamp"], "1970-01-12T13:46:42Z");
        let now = DeleteOptions { grace: Some(0), ..DeleteOptions::default() };
        assert!(matches!(delete(&r, &marked, &now, &moment()).unwrap(), Deletion::Remove(_)));
        let held = pod(json!({"name": "p", "finalizers": ["a/b"]}));
        assert!(matches!(delete(&r, &held, &now, &moment()).unwrap(), Deletion::Mark(_)));
        let wrong = DeleteOptions { uid: Some("2".into()), ..DeleteOptions::default() };
        assert!(delete(&r, &plain, &wrong, &moment()).unwrap_err().is_conflict());
        let foreground = DeleteOptions { propagation: Some(Propagation::Foreground), ..now.clone() };
        let Deletion::Mark(f) = delete(&r, &plain, &foreground, &moment()).unwrap() else { panic!() };
        assert_eq!(finalizers(&f), [FOREGROUND_FINALIZER]);
        let Deletion::Remove(_) =
            delete(&r, &f, &DeleteOptions { propagation: Some(Propagation::Background), ..now }, &moment()).unwrap()
        else {
            panic!()
        };
    }

    #[test]
    fn an_object_goes_when_its_last_finalizer_does_but_a_pod_not_before_its_grace() {
        let r = resource("pods");
        let old = |grace: i64| {
            json!({"metadata": {"name": "p", "finalizers": ["a/b"], "deletionGracePeriodSeconds": grace,
            "deletionTimestamp": "2000-01-01T00:00:00Z"}})
        };
        let new = json!({"metadata": {"name": "p"}});
        assert!(goes(&r, &old(0), &new));
        assert!(!goes(&r, &old(30), &new));
        assert!(!goes(&r, &old(0), &old(0)));
        assert!(!goes(&r, &new, &new));
    }

    #[test]
    fn an_update_cannot_touch_identity_and_must_not_be_stale() {
        let r = resource("configmaps");
        let old = json!({"metadata": {"name": "a", "namespace": "n", "uid": "1", "resourceVersion": "5",
            "creationTimestamp": "2000-01-01T00:00:00Z"}, "data": {"x": "1"}});
        let new =
            update(&r, Part::Main, &old, json!({"metadata": {"name": "a", "creationTimestamp": "x"}}), false).unwrap();
        assert_eq!(new["metadata"], old["metadata"]);
        assert!(new.get("data").is_none());
        for (sent, code) in [
            (json!({"metadata": {"name": "b"}}), 400),
            (json!({"metadata": {"name": "a", "uid": "2"}}), 409),
            (json!({"metadata": {"name": "a", "resourceVersion": "4"}}), 409),
            (json!({"metadata": {"name": "a", "namespace": "m"}}), 400),
        ] {
            assert_eq!(update(&r, Part::Main, &old, sent.clone(), false).unwrap_err().code, code, "{sent}");
        }
        assert_eq!(update(&r, Part::Main, &old, json!({"metadata": {}}), true).unwrap_err().code, 422);
    }
}
