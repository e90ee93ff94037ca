//! VirtualMachines.

use super::{
    AdmissionInput, AdmissionOutput, Context, Operation, Problems, ReferencePolicy, at, default, defaults, fields, get,
    patterns, rules, text, vmi,
};
use crate::status::{CauseType, Status};
use serde_json::{Value, json};
use state::instancetype::Role;

const STRATEGIES: &[&str] = &["Halted", "Manual", "Always", "RerunOnFailure", "Once"];

/// Fills in what must not change from one start to the next, and holds the whole against the rules.
pub(super) fn admit(mut input: AdmissionInput, context: &Context<'_>) -> Result<AdmissionOutput, Status> {
    let same = |o: &Value| get(o, &["spec"]) == get(&input.object, &["spec"]);
    if input.operation == Operation::Update && input.old_object.as_ref().is_some_and(same) {
        // Labels, owners, finalizers: rules that became stricter since do not hold them up.
        return Ok(AdmissionOutput { object: input.object, warnings: Vec::new() });
    }
    let mut problems = Problems::default();
    patterns::settle(&mut input, context)?;
    let found = patterns::find(&input.namespace, &input.object, context, &mut problems);
    let has_template = get(&input.object, &["spec", "template"]).is_object();
    if has_template {
        patterns::fill(&mut input.object, &found);
        mutate(&mut input.object, input.operation, context);
    }
    super::trace(&mut input, context);
    super::author(&mut input, context);
    check(&input, &found, context, &mut problems);
    guards(&input, &mut problems);
    if problems.causes.is_empty() && !found.is_empty() && expands(&input.object, context.settings.reference_policy) {
        // What is not to be found yet stays named.
        match patterns::expand(&input.object, &input.namespace, context.settings, context.objects) {
            Ok(whole) => input.object = whole,
            Err(why) => problems.warn(format!("spec is not expanded: {why}")),
        }
    }
    if problems.causes.is_empty() {
        return Ok(AdmissionOutput { object: input.object, warnings: problems.warnings });
    }
    Err(Status::invalid(&input.kind, &input.name, &problems.causes))
}

/// Whether a machine is stored with what its instancetype and preference bring, instead of their names.
fn expands(vm: &Value, policy: ReferencePolicy) -> bool {
    let recorded = |role: Role| {
        let given = text(vm, &["spec", role.field(), "revisionName"]);
        let found = text(vm, &["status", role.status_field(), "controllerRevisionRef", "name"]);
        !given.is_empty() || !found.is_empty()
    };
    match policy {
        ReferencePolicy::Reference => false,
        ReferencePolicy::Expand => !Role::ALL.into_iter().any(recorded),
        ReferencePolicy::ExpandAll => true,
    }
}

fn mutate(vm: &mut Value, operation: Operation, context: &Context<'_>) {
    let domain = ["spec", "template", "spec", "domain"];
    let below = |tail: &[&'static str]| [&domain[..], tail].concat();
    if operation == Operation::Create {
        for id in ["uuid", "serial"] {
            default(vm, &below(&["firmware", id]), (context.uuid)());
        }
        let finalizers = at(vm, &["metadata", "finalizers"]);
        add_once(finalizers, api::names::FINALIZER_VM);
    }
    default(vm, &["spec", "template", "spec", "architecture"], "amd64");
    default(vm, &below(&["machine", "type"]), context.settings.machine_type.as_str());
}

/// Appends to a list of strings (or makes one) what is not in it yet.
pub(super) fn add_once(list: &mut Value, item: &str) {
    match list {
        Value::Array(all) if all.iter().any(|f| f == item) => {}
        Value::Array(all) => all.push(json!(item)),
        place => *place = json!([item]),
    }
}

fn check(input: &AdmissionInput, found: &patterns::Found, context: &Context<'_>, p: &mut Problems) {
    let spec = get(&input.object, &["spec"]);
    let running = !get(spec, &["running"]).is_null();
    let strategy = get(spec, &["runStrategy"]);
    match (running, strategy.as_str().filter(|s| !s.is_empty())) {
        (true, Some(_)) => p.invalid("spec.running", "Running and RunStrategy are mutually exclusive. Note that Running is deprecated, please use RunStrategy instead"),
        (false, None) => p.invalid("spec.running", "One of Running or RunStrategy must be specified"),
        (false, Some("WaitAsReceiver")) => p.invalid("spec.runStrategy", "Invalid RunStrategy (WaitAsReceiver): DecentralizedLiveMigration feature gate is not enabled"),
        (false, Some(s)) if !STRATEGIES.contains(&s) => p.invalid("spec.runStrategy", format!("Invalid RunStrategy ({s})")),
        (true, None) => p.warn("spec.running is deprecated, please use spec.runStrategy instead."),
        (false, Some(_)) => {}
    }
    fields::check(fields::VM, spec, "spec", "template.spec", p);
    let template = get(spec, &["template"]);
    if !template.is_object() {
        return p.add(CauseType::Required, "spec.template", "missing virtual machine template.");
    }
    vmi::metadata(get(template, &["metadata"]), "spec.template.metadata", context.settings.is_trusted(&input.user), p);
    let base = "spec.template.spec";
    let wish = get(template, &["spec"]);
    if !wish.is_object() {
        return p.add(CauseType::Required, base, "missing virtual machine instance spec.");
    }
    let Some(mut whole) = patterns::applied(wish, get(template, &["metadata"]), found, base, p) else { return };
    fields::check(fields::INSTANCE, if found.is_empty() { wish } else { &whole }, base, "", p);
    defaults::tell(wish, base, p);
    defaults::spec(&mut whole, context.settings, &|| uuid::Uuid::nil().to_string());
    patterns::require(found, &whole, p);
    rules::spec(&whole, base, p);
    if get(&whole, &["domain", "memory", "guest"]).is_null() {
        p.warn("no memory is requested: instances of this virtual machine will be refused");
    }
    name(&input.name, p);
}

/// The instance, and labels on its pod, carry the name of the machine.
pub(super) fn name(name: &str, p: &mut Problems) {
    if !name.is_empty() && !rules::is_subdomain(name) {
        let may = "at most 253 lower case letters, digits, '-' and '.', the first and the last a letter or a digit";
        p.invalid("metadata.name", format!("metadata.name is not a valid name: {name:?}; a name is {may}"));
    }
}

/// While a snapshot or a restore runs, it owns a part of the spec.
fn guards(input: &AdmissionInput, p: &mut Problems) {
    let Some(old) = &input.old_object else { return };
    let strategy = |o: &Value| (get(o, &["spec", "running"]).clone(), get(o, &["spec", "runStrategy"]).clone());
    let volumes = |o: &Value| {
        let spec = get(o, &["spec", "template", "spec"]);
        (get(spec, &["volumes"]).clone(), get(spec, &["domain", "devices", "disks"]).clone())
    };
    let snapshot = text(&input.object, &["status", "snapshotInProgress"]);
    if !snapshot.is_empty() {
        if volumes(old) != volumes(&input.object) {
            p.add(
                CauseType::NotSupported,
                "spec",
                format!("Cannot update VM disks or volumes until snapshot {snapshot:?} completes"),
            );
        }
        if strategy(old) != strategy(&input.object) {
            p.add(
                CauseType::NotSupported,
                "spec",
                format!("Cannot update VM running state until snapshot {snapshot:?} completes"),
            );
        }
    }
    let restore = text(&input.object, &["status", "restoreInProgress"]);
    if !restore.is_empty()
        && strategy(old) != strategy(&input.object)
        && get(&input.object, &["spec", "runStrategy"]) != "Halted"
    {
        p.add(CauseType::NotSupported, "spec", format!("Cannot start VM until restore {restore:?} completes"));
    }
}

/// A write of the status: requests that nobody carries out yet are refused, the rest is the controller's.
pub(super) fn admit_status(mut input: AdmissionInput, context: &Context<'_>) -> Result<AdmissionOutput, Status> {
    let mut p = Problems::default();
    let fresh = |path: &[&str]| {
        let now = get(&input.object, path);
        let empty = now.is_null() || now.as_array().is_some_and(Vec::is_empty);
        !empty && input.old_object.as_ref().is_none_or(|o| get(o, path) != now)
    };
    for (path, what) in [
        ("volumeRequests", "nothing can be plugged into a running machine"),
        ("memoryDumpRequest", "there are no memory dumps"),
    ] {
        if fresh(&["status", path]) {
            let field = format!("status.{path}");
            p.add(CauseType::NotSupported, &field, format!("{field} is not supported yet: {what}"));
        }
    }
    if !context.settings.is_trusted(&input.user) && !input.user.name.is_empty() {
        let old = input.old_object.as_ref().map_or(&[][..], |o| super::items(o, &["status", "stateChangeRequests"]));
        if let Some(Value::Array(all)) = input.object.pointer_mut("/status/stateChangeRequests") {
            for request in all.iter_mut().filter(|r| !old.contains(r) && r.is_object()) {
                *at(request, &["data", api::names::REQUESTED_BY]) = json!(input.user.name);
            }
        }
    }
    if p.causes.is_empty() {
        Ok(AdmissionOutput { object: input.object, warnings: p.warnings })
    } else {
        Err(Status::invalid(&input.kind, &input.name, &p.causes))
    }
}
