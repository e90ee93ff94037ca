//! Roles and bindings.

use serde_json::Value;

use crate::semantics::FieldError;
use crate::semantics::names::NameRule;
use crate::semantics::resource::Behaviour;
use crate::semantics::value::{default, items, object, text};

const GROUP: &str = "rbac.authorization.k8s.io";

/// Roles and cluster roles.
#[derive(Debug)]
pub struct Role;

impl Behaviour for Role {
    fn default(&self, o: &mut Value) {
        if o.get("rules").is_none() {
            object(o).insert("rules".into(), Value::Null);
        }
    }
    fn validate(&self, o: &Value, errors: &mut Vec<FieldError>) {
        if o.get("aggregationRule").is_some_and(Value::is_object)
            && items(o, "/aggregationRule/clusterRoleSelectors").is_empty()
        {
            let why = "at least one clusterRoleSelector required if aggregationRule is non-nil";
            errors.push(FieldError::required("aggregationRule.clusterRoleSelectors", why));
        }
        for (i, rule) in items(o, "/rules").iter().enumerate() {
            let path = format!("rules[{i}]");
            let empty = |key: &str| items(rule, key).is_empty();
            if empty("/verbs") {
                errors.push(FieldError::required(format!("{path}.verbs"), "verbs must contain at least one value"));
            }
            if !empty("/nonResourceURLs") && text(o, "/kind") == "Role" {
                let said = rule.get("nonResourceURLs").cloned().unwrap_or_default();
                let why = "namespaced rules cannot apply to non-resource URLs";
                errors.push(FieldError::invalid(format!("{path}.nonResourceURLs"), &said, why));
            } else if empty("/nonResourceURLs") {
                if empty("/apiGroups") {
                    let why = "resource rules must supply at least one api group";
                    errors.push(FieldError::required(format!("{path}.apiGroups"), why));
                }
                if empty("/resources") {
                    let why = "resource rules must supply at least one resource";
                    errors.push(FieldError::required(format!("{path}.resources"), why));
                }
            }
        }
    }
    fn name_rule(&self) -> NameRule {
        NameRule::PathSegment
    }
}

/// Role bindings and cluster role bindings.
#[derive(Debug)]
pub struct Binding;

impl Behaviour for Binding {
    fn default(&self, o: &mut Value) {
        default(o, &["roleRef", "apiGroup"], GROUP);
        if let Some(Value::Array(subjects)) = o.get_mut("subjects") {
            for s in subjects {
                if matches!(text(s, "/kind"), "User" | "Group") {
                    default(s, &["apiGroup"], GROUP);
                }
            }
        }
    }
    fn validate(&self, o: &Value, errors: &mut Vec<FieldError>) {
        let group = text(o, "/roleRef/apiGroup");
        if group != GROUP {
            errors.push(FieldError::unsupported("roleRef.apiGroup", &group.into(), &[GROUP.to_owned()]));
        }
        let kinds = ["Role", "ClusterRole"].map(str::to_owned);
        let kind = text(o, "/roleRef/kind");
        if !kinds.iter().any(|k| k == kind) {
            errors.push(FieldError::unsupported("roleRef.kind", &kind.into(), &kinds));
        }
        if text(o, "/roleRef/name").is_empty() {
            errors.push(FieldError::required("roleRef.name", ""));
        }
        for (i, s) in items(o, "/subjects").iter().enumerate() {
            let path = format!("subjects[{i}]");
            if text(s, "/name").is_empty() {
                errors.push(FieldError::required(format!("{path}.name"), ""));
            }
            match text(s, "/kind") {
                "ServiceAccount" if text(s, "/namespace").is_empty() => {
                    errors.push(FieldError::required(format!("{path}.namespace"), ""));
                }
                "ServiceAccount" | "User" | "Group" => {}
                other => {
                    let kinds = ["ServiceAccount", "User", "Group"].map(str::to_owned);
                    errors.push(FieldError::unsupported(format!("{path}.kind"), &other.into(), &kinds));
                }
            }
        }
    }
    fn validate_update(&self, old: &Value, new: &Value, errors: &mut Vec<FieldError>) {
        if old.get("roleRef") != new.get("roleRef") {
            let part = |key: &str| text(new, &format!("/roleRef/{key}")).to_owned();
            let said = serde_json::json!({"APIGroup": part("apiGroup"), "Kind": part("kind"), "Name": part("name")});
            errors.push(FieldError::invalid("roleRef", &said, "cannot change roleRef"));
        }
    }
    fn name_rule(&self) -> NameRule {
        NameRule::PathSegment
    }
}
