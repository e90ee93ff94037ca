//! VirtualMachineInstanceReplicaSets.

use super::{
    AdmissionInput, AdmissionOutput, Context, Operation, Problems, default, defaults, fields, get, rules, vm, vmi,
};
use crate::status::{CauseType, Status};
use serde_json::Value;
use state::{selector::RawSelector, set::usable_selector};
use std::collections::BTreeMap;

/// Where the spec of its instances stands.
const BASE: &str = "spec.template.spec";

/// Fills in the number, so that it can be scaled, and holds the whole against the rules.
pub(super) fn admit(mut input: AdmissionInput, context: &Context<'_>) -> Result<AdmissionOutput, Status> {
    default(&mut input.object, &["spec", "replicas"], 1);
    let same = |o: &Value| get(o, &["spec"]) == get(&input.object, &["spec"]);
    if input.operation == Operation::Update && input.old_object.as_ref().is_some_and(same) {
        // Labels, owners, finalizers: rules that became stricter since do not hold them up.
        return Ok(AdmissionOutput { object: input.object, warnings: Vec::new() });
    }
    let mut problems = Problems::default();
    check(&input.object, context.settings.is_trusted(&input.user), context, &mut problems);
    vm::name(&input.name, &mut problems);
    if problems.causes.is_empty() {
        super::trace(&mut input, context);
        return Ok(AdmissionOutput { object: input.object, warnings: problems.warnings });
    }
    Err(Status::invalid(&input.kind, &input.name, &problems.causes))
}

fn check(set: &Value, trusted: bool, context: &Context<'_>, p: &mut Problems) {
    let spec = get(set, &["spec"]);
    if let Some(n) = get(spec, &["replicas"]).as_i64().filter(|n| *n < 0) {
        p.invalid("spec.replicas", format!("spec.replicas is {n}: it must not be negative"));
    }
    let template = get(spec, &["template"]);
    if !template.is_object() {
        return p.add(CauseType::Required, "spec.template", "missing virtual machine template.");
    }
    selector(spec, p);
    vmi::metadata(get(template, &["metadata"]), "spec.template.metadata", trusted, p);
    let wish = get(template, &["spec"]);
    if !wish.is_object() {
        return p.add(CauseType::Required, BASE, "missing virtual machine instance spec.");
    }
    fields::check(fields::INSTANCE, wish, BASE, "", p);
    defaults::tell(wish, BASE, p);
    let mut whole = wish.clone();
    defaults::spec(&mut whole, context.settings, &|| uuid::Uuid::nil().to_string());
    rules::spec(&whole, BASE, p);
    if get(&whole, &["domain", "memory", "guest"]).is_null() {
        p.add(CauseType::Required, format!("{BASE}.domain.memory.guest"), "no memory requested");
    }
}

/// The same answer as the machine gives that has to work with it.
fn selector(spec: &Value, p: &mut Problems) {
    let labels = get(spec, &["template", "metadata", "labels"]).as_object();
    let labels: BTreeMap<String, String> =
        labels.into_iter().flatten().filter_map(|(k, v)| v.as_str().map(|v| (k.clone(), v.to_owned()))).collect();
    let found = get(spec, &["selector"]);
    let usable = match serde_json::from_value::<Option<RawSelector>>(found.clone()) {
        Ok(raw) => usable_selector(raw.as_ref(), &labels),
        Err(error) => Err(error.to_string()),
    };
    if let Err(problem) = usable {
        p.invalid("spec.selector", problem);
    }
}
