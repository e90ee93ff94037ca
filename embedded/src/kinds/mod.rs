//! The kinds that the API server serves by itself.
//!
//! One table says what there is; schemas come from the generated Kubernetes types, so that unknown fields, wrong types and
//! `kubectl explain` follow the published API; what a kind does beyond that is its [`Behaviour`](crate::semantics::resource::Behaviour)
//! in the modules below.

pub mod core;
pub mod crd;
pub mod event;
pub mod limits;
mod lists;
pub mod pod;
pub mod quota;
pub mod rbac;

use std::sync::Arc;

use k8s_openapi::api;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1 as extensions;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1 as registration;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value};

use crate::semantics::resource::{Behaviour, Plain, Resource};
use crate::semantics::schema::{Definitions, Node, Schema, compile_definitions};

struct Line {
    group: &'static str,
    version: &'static str,
    plural: &'static str,
    kind: &'static str,
    short: &'static [&'static str],
    flags: &'static str,
    subresources: &'static [&'static str],
    schema: fn(&mut SchemaGenerator) -> schemars::Schema,
    behaviour: fn() -> Arc<dyn Behaviour>,
}

fn plain() -> Arc<dyn Behaviour> {
    Arc::new(Plain)
}

fn schema<T: JsonSchema>(generator: &mut SchemaGenerator) -> schemars::Schema {
    generator.subschema_for::<T>()
}

macro_rules! line {
    ($group:literal $version:literal $plural:literal $kind:literal $short:expr, $flags:literal, $subs:expr, $type:ty, $behaviour:expr) => {
        Line {
            group: $group,
            version: $version,
            plural: $plural,
            kind: $kind,
            short: &$short,
            flags: $flags,
            subresources: &$subs,
            schema: schema::<$type>,
            behaviour: $behaviour,
        }
    };
}

/// Flags: `n` namespaced, `s` status subresource, `g` generation, `v` virtual (create only), `a` in category `all`.
const LINES: &[Line] = &[
    line!("" "v1" "namespaces" "Namespace" ["ns"], "s", ["finalize"], api::core::v1::Namespace, || Arc::new(core::Namespace)),
    line!("" "v1" "nodes" "Node" ["no"], "s", [], api::core::v1::Node, || Arc::new(core::Node)),
    line!("" "v1" "pods" "Pod" ["po"], "nsga", ["binding", "eviction", "log"], api::core::v1::Pod, || Arc::new(pod::Pod)),
    line!("" "v1" "secrets" "Secret" [], "n", [], api::core::v1::Secret, || Arc::new(core::Secret)),
    line!("" "v1" "configmaps" "ConfigMap" ["cm"], "n", [], api::core::v1::ConfigMap, || Arc::new(core::ConfigMap)),
    line!("" "v1" "serviceaccounts" "ServiceAccount" ["sa"], "n", ["token"], api::core::v1::ServiceAccount, plain),
    line!("" "v1" "persistentvolumes" "PersistentVolume" ["pv"], "s", [], api::core::v1::PersistentVolume, || Arc::new(core::Volume)),
    line!("" "v1" "persistentvolumeclaims" "PersistentVolumeClaim" ["pvc"], "ns", [], api::core::v1::PersistentVolumeClaim, || Arc::new(core::Claim)),
    line!("" "v1" "events" "Event" ["ev"], "n", [], api::core::v1::Event, || Arc::new(event::Core)),
    line!("" "v1" "resourcequotas" "ResourceQuota" ["quota"], "ns", [], api::core::v1::ResourceQuota, || Arc::new(quota::ResourceQuota)),
    line!("" "v1" "limitranges" "LimitRange" ["limits"], "n", [], api::core::v1::LimitRange, || Arc::new(limits::LimitRange)),
    line!("events.k8s.io" "v1" "events" "Event" ["ev"], "n", [], api::events::v1::Event, || Arc::new(event::Grouped)),
    line!("coordination.k8s.io" "v1" "leases" "Lease" [], "n", [], api::coordination::v1::Lease, || Arc::new(core::Lease)),
    line!("apps" "v1" "controllerrevisions" "ControllerRevision" [], "n", [], api::apps::v1::ControllerRevision, || Arc::new(core::ControllerRevision)),
    line!("scheduling.k8s.io" "v1" "priorityclasses" "PriorityClass" ["pc"], "g", [], api::scheduling::v1::PriorityClass, || Arc::new(core::PriorityClass)),
    line!("storage.k8s.io" "v1" "storageclasses" "StorageClass" ["sc"], "", [], api::storage::v1::StorageClass, || Arc::new(core::StorageClass)),
    line!("rbac.authorization.k8s.io" "v1" "roles" "Role" [], "n", [], api::rbac::v1::Role, || Arc::new(rbac::Role)),
    line!("rbac.authorization.k8s.io" "v1" "clusterroles" "ClusterRole" [], "", [], api::rbac::v1::ClusterRole, || Arc::new(rbac::Role)),
    line!("rbac.authorization.k8s.io" "v1" "rolebindings" "RoleBinding" [], "n", [], api::rbac::v1::RoleBinding, || Arc::new(rbac::Binding)),
    line!("rbac.authorization.k8s.io" "v1" "clusterrolebindings" "ClusterRoleBinding" [], "", [], api::rbac::v1::ClusterRoleBinding, || Arc::new(rbac::Binding)),
    line!("apiextensions.k8s.io" "v1" "customresourcedefinitions" "CustomResourceDefinition" ["crd", "crds"], "sg", [], extensions::CustomResourceDefinition, || Arc::new(crd::Definition)),
    line!("apiregistration.k8s.io" "v1" "apiservices" "APIService" [], "s", [], registration::APIService, plain),
    line!("authentication.k8s.io" "v1" "tokenreviews" "TokenReview" [], "v", [], api::authentication::v1::TokenReview, plain),
    line!("authentication.k8s.io" "v1" "selfsubjectreviews" "SelfSubjectReview" [], "v", [], api::authentication::v1::SelfSubjectReview, plain),
    line!("authorization.k8s.io" "v1" "subjectaccessreviews" "SubjectAccessReview" [], "v", [], api::authorization::v1::SubjectAccessReview, plain),
    line!("authorization.k8s.io" "v1" "selfsubjectaccessreviews" "SelfSubjectAccessReview" [], "v", [], api::authorization::v1::SelfSubjectAccessReview, plain),
    line!("authorization.k8s.io" "v1" "localsubjectaccessreviews" "LocalSubjectAccessReview" [], "nv", [], api::authorization::v1::LocalSubjectAccessReview, plain),
    line!("authorization.k8s.io" "v1" "selfsubjectrulesreviews" "SelfSubjectRulesReview" [], "v", [], api::authorization::v1::SelfSubjectRulesReview, plain),
];

/// The JSON form of all definitions of built-in kinds, as OpenAPI publishes them.
#[must_use]
pub fn definitions() -> Map<String, Value> {
    let mut generator = SchemaGenerator::default();
    for line in LINES {
        let _ = (line.schema)(&mut generator);
    }
    let _ = schema::<api::policy::v1::Eviction>(&mut generator);
    let _ = schema::<api::core::v1::Binding>(&mut generator);
    let _ = schema::<api::authentication::v1::TokenRequest>(&mut generator);
    let _ = schema::<api::autoscaling::v1::Scale>(&mut generator);
    let _ = schema::<k8s_openapi::apimachinery::pkg::apis::meta::v1::DeleteOptions>(&mut generator);
    let _ = schema::<k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta>(&mut generator);
    let _ = schema::<k8s_openapi::apimachinery::pkg::apis::meta::v1::Status>(&mut generator);
    let mut definitions = generator.take_definitions(true);
    lists::annotate(&mut definitions);
    definitions
}

/// All built-in resources, and the definitions that their schemas share.
#[must_use]
pub fn builtin() -> (Vec<Resource>, Definitions) {
    let mut nodes = compile_definitions(&definitions());
    widen(&mut nodes);
    let shared: Definitions = Arc::new(nodes);
    let mut names = SchemaGenerator::default();
    let resources = LINES
        .iter()
        .map(|line| {
            let reference = (line.schema)(&mut names);
            let reference = reference.as_value().get("$ref").and_then(Value::as_str).unwrap_or_default();
            let reference = reference.rsplit('/').next().unwrap_or_default().to_owned();
            let event = line.kind == "Event";
            let api_version =
                if line.group.is_empty() { line.version.into() } else { format!("{}/{}", line.group, line.version) };
            Resource {
                group: line.group.into(),
                version: line.version.into(),
                plural: line.plural.into(),
                singular: line.kind.to_lowercase(),
                kind: line.kind.into(),
                list_kind: format!("{}List", line.kind),
                short_names: line.short.iter().map(|s| (*s).to_owned()).collect(),
                categories: match line.kind {
                    _ if line.flags.contains('a') => vec!["all".into()],
                    "CustomResourceDefinition" | "APIService" => vec!["api-extensions".into()],
                    _ => Vec::new(),
                },
                namespaced: line.flags.contains('n'),
                status: line.flags.contains('s'),
                generation: line.flags.contains('g'),
                virtual_only: line.flags.contains('v'),
                subresources: line.subresources.to_vec(),
                schema: Some(Arc::new(Schema {
                    root: Node { reference: Some(reference), ..Node::default() },
                    definitions: shared.clone(),
                })),
                stored_as: (if event { String::new() } else { line.group.into() }, line.plural.into()),
                stored_version: if event { "v1".into() } else { api_version },
                blank: Arc::new(lists::blank(line.kind)),
                behaviour: (line.behaviour)(),
                ..Resource::default()
            }
        })
        .collect();
    (resources, shared)
}

/// Where the generated schemas are narrower than the API: fields that are required by the generated types alone, or
/// that take more than their type says.
fn widen(nodes: &mut std::collections::BTreeMap<String, Node>) {
    for node in nodes.values_mut() {
        // Go's zero values stand in for what is left out; what must be said, the kinds check themselves.
        node.required.clear();
    }
    for name in ["JSON", "JSONSchemaPropsOrArray", "JSONSchemaPropsOrBool", "JSONSchemaPropsOrStringArray"] {
        let full = format!("io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.{name}");
        nodes.insert(full, Node { preserve: true, ..Node::default() });
    }
    if let Some(rules) = nodes.get_mut("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta") {
        let text = Node { kind: Some(crate::semantics::schema::Type::String), ..Node::default() };
        rules.properties.insert("selfLink".into(), Box::new(text));
    }
}
