//! VirtualMachineInstances: made by users or by the controller, and afterwards the controller's alone.

use super::{
    AdmissionInput, AdmissionOutput, Context, Operation, Problems, User, at, default, defaults, fields, get, items,
    preset, rules, vm,
};
use crate::status::{CauseType, Status};
use serde_json::{Value, json};
use state::selector::is_value;

/// Labels that say where an instance is; only the control plane may.
pub const RESERVED_LABELS: &[&str] = &[
    "kubevirt.io/created-by",
    "kubevirt.io/migrationJobUID",
    "kubevirt.io/nodeName",
    "kubevirt.io/migrationTargetNodeName",
    "kubevirt.io/schedulable",
    "kubevirt.io/install-strategy",
];

pub(super) fn admit(input: AdmissionInput, context: &Context<'_>) -> Result<AdmissionOutput, Status> {
    let mut problems = Problems::default();
    let (object, kind, name) = match input.operation {
        Operation::Create => create(input, context, &mut problems),
        Operation::Update | Operation::Delete => update(input, context, &mut problems),
    };
    if problems.causes.is_empty() {
        return Ok(AdmissionOutput { object, warnings: problems.warnings });
    }
    Err(Status::invalid(&kind, &name, &problems.causes))
}

fn create(mut input: AdmissionInput, context: &Context<'_>, p: &mut Problems) -> (Value, String, String) {
    let trusted = context.settings.is_trusted(&input.user);
    if get(&input.object, &["spec"]).is_object() {
        preset::apply(&mut input.object, &input.namespace, context, p);
    }
    fields::check(fields::INSTANCE, get(&input.object, &["spec"]), "spec", "", p);
    metadata(get(&input.object, &["metadata"]), "metadata", trusted, p);
    if get(&input.object, &["spec"]).is_object() {
        defaults::tell(get(&input.object, &["spec"]), "spec", p);
        mutate(&mut input.object, &input.user, context);
        rules::spec(get(&input.object, &["spec"]), "spec", p);
        if get(&input.object, &["spec", "domain", "memory", "guest"]).is_null() {
            p.add(CauseType::Required, "", "no memory requested");
        }
    } else {
        p.add(CauseType::Required, "spec", "missing virtual machine instance spec.");
    }
    vm::name(&input.name, p);
    super::trace(&mut input, context);
    super::author(&mut input, context);
    (input.object, input.kind, input.name)
}

fn mutate(vmi: &mut Value, user: &User, context: &Context<'_>) {
    let trusted = context.settings.is_trusted(user);
    if !trusted {
        // A status that somebody brings along is not what is.
        *at(vmi, &["status"]) = json!({});
    }
    defaults::spec(at(vmi, &["spec"]), context.settings, context.uuid);
    let domain = get(vmi, &["spec", "domain"]).clone();
    let guest = get(&domain, &["memory", "guest"]);
    if !guest.is_null() {
        for key in ["guestAtBoot", "guestCurrent", "guestRequested"] {
            default(vmi, &["status", "memory", key], guest.clone());
        }
    }
    for key in ["cores", "sockets", "threads"] {
        default(vmi, &["status", "currentCPUTopology", key], get(&domain, &["cpu", key]).clone());
    }
    default(vmi, &["status", "runtimeUser"], api::names::LAUNCHER_UID);
    vm::add_once(at(vmi, &["metadata", "finalizers"]), api::names::FINALIZER_VMI);
    if get(vmi, &["status", "phase"]).as_str().unwrap_or_default().is_empty() {
        *at(vmi, &["status", "phase"]) = json!("Pending");
        let entry = json!({"phase": "Pending", "phaseTransitionTimestamp": context.now});
        match at(vmi, &["status", "phaseTransitionTimestamps"]) {
            Value::Array(all) => all.push(entry),
            place => *place = json!([entry]),
        }
    }
}

fn update(mut input: AdmissionInput, context: &Context<'_>, p: &mut Problems) -> (Value, String, String) {
    let old = input.old_object.take().unwrap_or(Value::Null);
    if context.settings.is_trusted(&input.user) {
        hotplug_limits(&input.object, &old, p);
        return (input.object, input.kind, input.name);
    }
    // Owners and finalizers are collected by parts of Kubernetes; spec, status and placement are the controller's.
    if get(&input.object, &["spec"]) != get(&old, &["spec"]) {
        p.add(CauseType::NotSupported, "", "update of VMI object is restricted");
    }
    let label = |o: &Value, l: &str| get(o, &["metadata", "labels", l]).clone();
    if RESERVED_LABELS.iter().any(|l| label(&input.object, l) != label(&old, l)) {
        p.add(
            CauseType::NotSupported,
            "metadata.labels",
            "modification of the following reserved kubevirt.io/ labels on a VMI object is prohibited",
        );
    }
    // In which boot of its node it was started decides whether it is over.
    let boot = ["metadata", "annotations", api::names::ANN_BOOT_ID];
    if get(&input.object, &boot) != get(&old, &boot) {
        let field = format!("metadata.annotations[{}]", api::names::ANN_BOOT_ID);
        p.add(CauseType::NotSupported, &field, format!("{field} is the control plane's"));
    }
    // A status edit is undone without a word, as KubeVirt does.
    let status = get(&old, &["status"]).clone();
    if status.is_null() {
        if let Some(o) = input.object.as_object_mut() {
            o.remove("status");
        }
    } else {
        *at(&mut input.object, &["status"]) = status;
    }
    (input.object, input.kind, input.name)
}

/// What a running guest was promised does not change, and what it has stays: nothing can be plugged in or out.
fn hotplug_limits(object: &Value, old: &Value, p: &mut Problems) {
    for (path, what) in [
        (["spec", "domain", "cpu", "maxSockets"], "CPU topology maxSockets"),
        (["spec", "domain", "memory", "maxGuest"], "Memory maxGuest"),
    ] {
        if get(object, &path) != get(old, &path) {
            p.invalid(path.join("."), format!("{what} changed"));
        }
    }
    for (path, what) in [(&["spec", "volumes"][..], "volume"), (&["spec", "domain", "devices", "disks"][..], "disk")] {
        let (now, before) = (items(object, path), items(old, path));
        if now.len() != before.len() {
            p.invalid(
                path.join("."),
                format!("the number of permanent {what}s changed from {} to {}", before.len(), now.len()),
            );
        } else if now != before {
            p.invalid(path.join("."), format!("a permanent {what} changed"));
        }
    }
}

/// Labels and annotations of an instance, or of a template that becomes one: those that are the control plane's, and those
/// that ask for what is not there.
pub(super) fn metadata(metadata: &Value, base: &str, trusted: bool, p: &mut Problems) {
    let labels = get(metadata, &["labels"]);
    if !trusted && RESERVED_LABELS.iter().any(|l| !get(labels, &[l]).is_null()) {
        p.add(
            CauseType::NotSupported,
            format!("{base}.labels"),
            "creation of the following reserved kubevirt.io/ labels on a VMI object is prohibited",
        );
    }
    let annotations = get(metadata, &["annotations"]);
    for (name, gate) in
        [("hooks.kubevirt.io/hookSidecars", "Sidecar"), ("kubevirt.io/ignitiondata", "ExperimentalIgnitionSupport")]
    {
        if !get(annotations, &[name]).is_null() {
            let field =
                if gate == "Sidecar" { format!("{base}.annotations") } else { format!("{base}.annotations[{name}]") };
            p.invalid(
                field,
                format!(
                    "invalid entry {base}.annotations[{name}]: {gate} feature gate is not enabled in kubevirt-config"
                ),
            );
        }
    }
    for (key, value) in labels.as_object().into_iter().flatten() {
        if !value.as_str().is_some_and(is_value) {
            p.invalid(format!("{base}.labels"), format!("{base}.labels[{key}] is not a valid label value: {value}"));
        }
    }
}
