//! CustomResourceDefinitions: their own checks, and the resources that they define.

use std::sync::Arc;

use serde_json::{Value, json};

use super::core::{IMMUTABLE, immutable};
use crate::semantics::FieldError;
use crate::semantics::resource::{Behaviour, Column, Resource, Scale};
use crate::semantics::schema::{Definitions, Node, Schema, problems};
use crate::semantics::value::{default, items, name, strings, text};

/// Held by the API server until all instances are gone.
pub const CLEANUP_FINALIZER: &str = "customresourcecleanup.apiextensions.k8s.io";

/// CustomResourceDefinitions.
#[derive(Debug)]
pub struct Definition;

impl Behaviour for Definition {
    fn default(&self, o: &mut Value) {
        let kind = text(o, "/spec/names/kind").to_owned();
        default(o, &["spec", "names", "singular"], kind.to_lowercase());
        default(o, &["spec", "names", "listKind"], format!("{kind}List"));
        default(o, &["spec", "conversion", "strategy"], "None");
    }
    fn prepare_create(&self, o: &mut Value) {
        crate::semantics::value::object(o).remove("status");
        let held = crate::semantics::value::meta(o).entry("finalizers").or_insert_with(|| json!([]));
        if let Value::Array(list) = held
            && !list.iter().any(|f| f == CLEANUP_FINALIZER)
        {
            list.push(CLEANUP_FINALIZER.into());
        }
    }
    fn validate(&self, o: &Value, errors: &mut Vec<FieldError>) {
        let (group, plural) = (text(o, "/spec/group"), text(o, "/spec/names/plural"));
        for (field, v) in
            [("spec.group", group), ("spec.names.plural", plural), ("spec.names.kind", text(o, "/spec/names/kind"))]
        {
            if v.is_empty() {
                errors.push(FieldError::required(field, ""));
            }
        }
        let scopes = ["Cluster", "Namespaced"].map(str::to_owned);
        let scope = text(o, "/spec/scope");
        if scope.is_empty() {
            errors.push(FieldError::required("spec.scope", ""));
        } else if !scopes.iter().any(|s| s == scope) {
            errors.push(FieldError::unsupported("spec.scope", &scope.into(), &scopes));
        }
        if name(o) != format!("{plural}.{group}") {
            let why = "must be spec.names.plural+\".\"+spec.group";
            errors.push(FieldError::invalid("metadata.name", &name(o).into(), why));
        }
        let versions = items(o, "/spec/versions");
        let stored = versions.iter().filter(|v| v.get("storage") == Some(&Value::Bool(true))).count();
        if stored != 1 {
            let list = o.pointer("/spec/versions").cloned().unwrap_or_default();
            let why = "must have exactly one version marked as storage version";
            errors.push(FieldError::invalid("spec.versions", &list, why));
        }
        for (i, v) in versions.iter().enumerate() {
            let path = format!("spec.versions[{i}].schema.openAPIV3Schema");
            match v.pointer("/schema/openAPIV3Schema") {
                None => errors.push(FieldError::required(path, "schemas are required")),
                Some(schema) => {
                    for (field, body) in problems(schema, &path) {
                        let reason =
                            if body.starts_with("Required") { "FieldValueRequired" } else { "FieldValueInvalid" };
                        errors.push(FieldError { reason, field, body });
                    }
                }
            }
        }
        if text(o, "/spec/conversion/strategy") == "Webhook" {
            let why = "webhook conversion is not served here";
            errors.push(FieldError::forbidden("spec.conversion.strategy", why));
        }
    }
    fn validate_update(&self, old: &Value, new: &Value, errors: &mut Vec<FieldError>) {
        immutable(old, new, "/spec/group", IMMUTABLE, errors);
        immutable(old, new, "/spec/names/plural", IMMUTABLE, errors);
        immutable(old, new, "/spec/scope", IMMUTABLE, errors);
        immutable(old, new, "/spec/names/kind", IMMUTABLE, errors);
    }
}

/// What a custom resource does beyond its schema: nothing.
#[derive(Debug)]
struct Custom;
impl Behaviour for Custom {}

/// The resources that a CustomResourceDefinition defines: one for each served version.
#[must_use]
pub fn resources(crd: &Value, shared: &Definitions) -> Vec<Resource> {
    let group = text(crd, "/spec/group");
    let versions = items(crd, "/spec/versions");
    let stored = versions
        .iter()
        .find(|v| v.get("storage") == Some(&Value::Bool(true)))
        .map(|v| text(v, "/name"))
        .unwrap_or_default();
    // Versions mostly have the same schema, and a large one costs a megabyte.
    let mut last: Option<(Arc<Value>, Arc<Schema>)> = None;
    versions
        .iter()
        .filter(|v| v.get("served") == Some(&Value::Bool(true)))
        .map(|v| {
            let own = v.pointer("/schema/openAPIV3Schema").unwrap_or(&Value::Null);
            let (published, schema) = last.take().filter(|(p, _)| **p == *own).unwrap_or_else(|| {
                let schema = Schema { root: Node::custom_root(own), definitions: shared.clone() };
                (Arc::new(own.clone()), Arc::new(schema))
            });
            last = Some((published.clone(), schema.clone()));
            let names = |key: &str| text(crd, &format!("/spec/names/{key}")).to_owned();
            Resource {
                group: group.into(),
                version: text(v, "/name").into(),
                plural: names("plural"),
                singular: names("singular"),
                kind: names("kind"),
                list_kind: names("listKind"),
                short_names: strings(crd, "/spec/names/shortNames"),
                categories: strings(crd, "/spec/names/categories"),
                namespaced: text(crd, "/spec/scope") == "Namespaced",
                status: v.pointer("/subresources/status").is_some(),
                scale: v.pointer("/subresources/scale").map(|s| Scale {
                    spec_path: text(s, "/specReplicasPath").into(),
                    status_path: text(s, "/statusReplicasPath").into(),
                    selector_path: Some(text(s, "/labelSelectorPath").to_owned()).filter(|p| !p.is_empty()),
                }),
                custom: true,
                generation: true,
                schema: Some(schema),
                published,
                columns: items(v, "/additionalPrinterColumns")
                    .iter()
                    .map(|c| Column {
                        name: text(c, "/name").into(),
                        kind: text(c, "/type").into(),
                        format: text(c, "/format").into(),
                        description: text(c, "/description").into(),
                        priority: c.get("priority").and_then(Value::as_i64).unwrap_or(0),
                        path: text(c, "/jsonPath").into(),
                    })
                    .collect(),
                selectable_fields: items(v, "/selectableFields")
                    .iter()
                    .map(|f| text(f, "/jsonPath").trim_start_matches('.').to_owned())
                    .collect(),
                stored_as: (group.into(), names("plural")),
                stored_version: format!("{group}/{stored}"),
                behaviour: Arc::new(Custom),
                deprecation: if v.get("deprecated") == Some(&Value::Bool(true)) {
                    let own = text(v, "/deprecationWarning");
                    if own.is_empty() {
                        format!("{group}/{} {} is deprecated", text(v, "/name"), names("kind"))
                    } else {
                        own.to_owned()
                    }
                } else {
                    String::new()
                },
                ..Resource::default()
            }
        })
        .collect()
}

/// Writes the status of an accepted definition: names, conditions, stored versions.
pub fn establish(crd: &mut Value, now: &str) {
    let names = crd.pointer("/spec/names").cloned().unwrap_or_default();
    let stored: Vec<String> = items(crd, "/spec/versions")
        .iter()
        .filter(|v| v.get("storage") == Some(&Value::Bool(true)))
        .map(|v| text(v, "/name").to_owned())
        .collect();
    let condition = |kind: &str, reason: &str, message: &str| {
        let since = items(crd, "/status/conditions")
            .iter()
            .find(|c| text(c, "/type") == kind && text(c, "/status") == "True")
            .map_or(now, |c| text(c, "/lastTransitionTime"));
        json!({"type": kind, "status": "True", "lastTransitionTime": since, "reason": reason, "message": message})
    };
    let mut versions = strings(crd, "/status/storedVersions");
    for v in stored {
        if !versions.contains(&v) {
            versions.push(v);
        }
    }
    let status = json!({
        "acceptedNames": names,
        "conditions": [
            condition("NamesAccepted", "NoConflicts", "no conflicts found"),
            condition("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        ],
        "storedVersions": versions,
    });
    crate::semantics::value::object(crd).insert("status".into(), status);
}
