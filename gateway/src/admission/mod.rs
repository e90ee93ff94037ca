//! Admission: what a VirtualMachine or a VirtualMachineInstance becomes before it is stored, and what is refused.
//!
//! Pure functions from an object, the stored object and who asks, to an object and warnings or to a refusal. They are
//! called in the embedded API server's own process, or behind a webhook; they must give the same answer when asked
//! again about their own answer (the controller's updates pass here, too).
//!
//! * [`defaults`] fills in what the user left open; a VM keeps only what must not change between two of its starts.
//! * [`fields`] is the table of what each field does here: done, refused, or a hint. Nothing is ignored in silence.
//! * [`patterns`] is about the instancetype and the preference that a VM names.
//! * [`rules`] are KubeVirt's rules about the spec of an instance, [`vm`], [`vmi`] and [`set`] those about the objects around it,
//!   `eviction` is about pods that have to go, `cluster` about the settings of all of them, `preset` about parts that many instances share.

mod cluster;
pub mod defaults;
pub(crate) mod eviction;
pub mod fields;
mod patterns;
mod preset;
mod rules;
mod set;
mod vm;
mod vmi;

use crate::status::{Cause, CauseType, Status};
use serde_json::{Value, json};
use state::instancetype::Role;

pub use cluster::ReferencePolicy;
pub use patterns::{Objects, Wanted};
pub(crate) use {
    cluster::KIND as KUBEVIRT, patterns::expand, preset::KIND as PRESET, rules::Problems, vmi::RESERVED_LABELS,
};

/// What is done to the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// A new object.
    Create,
    /// A change of the object or of its status.
    Update,
    /// Its end; refused for the settings of a cluster alone, where they say so.
    Delete,
}

/// Somebody who asks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct User {
    /// Name.
    pub name: String,
    /// Groups.
    pub groups: Vec<String>,
}

/// A write that wants to be admitted.
#[derive(Debug, Clone)]
pub struct AdmissionInput {
    /// What is done.
    pub operation: Operation,
    /// `VirtualMachine`, `VirtualMachineInstance`, ...
    pub kind: String,
    /// `status`, `scale`, or empty.
    pub subresource: String,
    /// Namespace.
    pub namespace: String,
    /// Name; empty with generateName.
    pub name: String,
    /// Who asks.
    pub user: User,
    /// The object to be stored.
    pub object: Value,
    /// The object that is stored.
    pub old_object: Option<Value>,
    /// W3C trace context of the request.
    pub traceparent: Option<String>,
}

/// An admitted write.
#[derive(Debug, Clone, PartialEq)]
pub struct AdmissionOutput {
    /// The object to be stored.
    pub object: Value,
    /// `Warning` headers.
    pub warnings: Vec<String>,
}

/// What a cluster decides for its machines.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Users that are parts of the control plane, beside those whose name begins with `system:virtfold:`.
    pub trusted: Vec<String>,
    /// CPU model of an instance that names none.
    pub cpu_model: String,
    /// Eviction strategy of an instance that names none.
    pub eviction_strategy: String,
    /// Machine type of an instance that names none.
    pub machine_type: String,
    /// What becomes of the instancetype and the preference that a machine names.
    pub reference_policy: ReferencePolicy,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            trusted: Vec::new(),
            cpu_model: "host-model".into(),
            eviction_strategy: "None".into(),
            machine_type: "q35".into(),
            reference_policy: ReferencePolicy::default(),
        }
    }
}

impl Settings {
    /// Whether somebody is a part of the control plane (KubeVirt: one of its service accounts).
    pub fn is_trusted(&self, user: &User) -> bool {
        user.name.starts_with("system:virtfold:") || self.trusted.contains(&user.name)
    }
}

/// What is not in the request and would make the functions impure: the time and fresh identities.
pub struct Context<'a> {
    /// Settings of the cluster.
    pub settings: &'a Settings,
    /// RFC 3339, seconds.
    pub now: &'a str,
    /// A fresh random UUID.
    pub uuid: &'a dyn Fn() -> String,
    /// A fresh trace context.
    pub trace: &'a dyn Fn() -> String,
    /// Objects on which the answer depends.
    pub objects: &'a Objects,
}

/// Admits a write, or says why not. The answer counts where nothing is [`Objects::missing`] then.
///
/// # Errors
/// 422 with causes for wrong fields; 400 for an object that is none.
pub fn admit(mut input: AdmissionInput, context: &Context<'_>) -> Result<AdmissionOutput, Status> {
    let unchanged = |object| Ok(AdmissionOutput { object, warnings: Vec::new() });
    if input.operation == Operation::Delete && input.kind == cluster::KIND && input.subresource.is_empty() {
        return cluster::admit_end(input, context);
    }
    if input.operation == Operation::Delete
        || !input.object.get("metadata").and_then(|m| m.get("deletionTimestamp")).unwrap_or(&Value::Null).is_null()
    {
        return unchanged(input.object);
    }
    if input.operation == Operation::Update && input.old_object.is_none() {
        return Err(Status::new(500, "InternalError", "the stored object is missing from an update"));
    }
    if !input.object.is_object() {
        return Err(Status::bad_request("the object is not a JSON object"));
    }
    if input.name.is_empty() {
        input.name = text(&input.object, &["metadata", "name"]).to_owned();
    }
    if input.operation == Operation::Create
        && input.subresource.is_empty()
        && let Some(why) = api::crd::missing(&input.kind)
    {
        let message = format!("{} is not supported yet: {why}", input.kind);
        let cause = Cause { kind: CauseType::NotSupported, field: "kind".into(), message };
        return Err(Status::invalid(&input.kind, &input.name, &[cause]));
    }
    match (input.kind.as_str(), input.subresource.as_str()) {
        ("VirtualMachine", "") => vm::admit(input, context),
        ("VirtualMachine", "status") => vm::admit_status(input, context),
        ("VirtualMachineInstance", "" | "status") => vmi::admit(input, context),
        ("VirtualMachineInstanceReplicaSet", "") => set::admit(input, context),
        ("VirtualMachineInstancetype" | "VirtualMachineClusterInstancetype", "") => {
            patterns::admit(Role::Instancetype, input)
        }
        ("VirtualMachinePreference" | "VirtualMachineClusterPreference", "") => {
            patterns::admit(Role::Preference, input)
        }
        (cluster::KIND, "") => cluster::admit(input, context),
        (preset::KIND, "") => preset::admit(input),
        _ => unchanged(input.object),
    }
}

/// The object with the name of who changed its spec. Parts of the control plane that act for somebody say for whom.
fn author(input: &mut AdmissionInput, context: &Context<'_>) {
    let same = input.old_object.as_ref().is_some_and(|o| o.get("spec") == input.object.get("spec"));
    if same || input.user.name.is_empty() || context.settings.is_trusted(&input.user) {
        return;
    }
    *at(&mut input.object, &["metadata", "annotations", api::names::ANN_CHANGED_BY]) = json!(input.user.name);
}

/// The object with traceparent set, where its spec is new: the request's context, or the writer's own, or a fresh one.
fn trace(input: &mut AdmissionInput, context: &Context<'_>) {
    let path = ["metadata", "annotations", api::names::ANN_TRACEPARENT];
    let old = input.old_object.as_ref();
    if old.is_some_and(|o| o.get("spec") == input.object.get("spec")) {
        return;
    }
    let valid = |t: &&str| telemetry::TraceContext::parse(t).is_some();
    let given = text(&input.object, &path);
    let was = old.map_or("", |o| text(o, &path));
    let value = match input.traceparent.as_deref().filter(valid) {
        Some(t) => t.to_owned(),
        None if given != was && valid(&given) => return,
        None => (context.trace)(),
    };
    *at(&mut input.object, &path) = json!(value);
}

/// The value at a path, or null.
pub(crate) fn get<'v>(value: &'v Value, path: &[&str]) -> &'v Value {
    path.iter().fold(value, |v, key| v.get(key).unwrap_or(&Value::Null))
}

/// The text at a path, or "".
pub(crate) fn text<'v>(value: &'v Value, path: &[&str]) -> &'v str {
    get(value, path).as_str().unwrap_or_default()
}

/// The list at a path, or an empty one.
pub(crate) fn items<'v>(value: &'v Value, path: &[&str]) -> &'v [Value] {
    get(value, path).as_array().map(Vec::as_slice).unwrap_or_default()
}

/// The place at a path; objects on the way are made where there is nothing (or something else).
pub(crate) fn at<'v>(value: &'v mut Value, path: &[&str]) -> &'v mut Value {
    path.iter().fold(value, |v, key| {
        if !v.is_object() {
            *v = json!({});
        }
        &mut v[*key]
    })
}

/// Sets a place that is empty: missing, null or "".
pub(crate) fn default(value: &mut Value, path: &[&str], to: impl Into<Value>) {
    let now = get(value, path);
    if now.is_null() || now == "" {
        *at(value, path) = to.into();
    }
}
