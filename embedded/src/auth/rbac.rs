//! Roles and bindings, evaluated.
//!
//! The stored objects are read once and kept until one of them changes, whoever changed it. A role with an
//! `aggregationRule` has, beside its own rules, those of all cluster roles that the rule selects.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use serde_json::{Value, json};

use super::{Attributes, User};
use crate::semantics::selector::Selector;
use crate::semantics::value::{items, name, namespace, strings, text};
use crate::storage::{RangeQuery, Storage, StorageResult};

/// The key prefix of all RBAC objects.
const PREFIX: &str = "/registry/rbac.authorization.k8s.io/";

/// One rule of a role.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rule {
    verbs: Vec<String>,
    groups: Vec<String>,
    resources: Vec<String>,
    names: Vec<String>,
    paths: Vec<String>,
}

impl Rule {
    fn of(v: &Value) -> Self {
        Self {
            verbs: strings(v, "/verbs"),
            groups: strings(v, "/apiGroups"),
            resources: strings(v, "/resources"),
            names: strings(v, "/resourceNames"),
            paths: strings(v, "/nonResourceURLs"),
        }
    }

    fn allows(&self, a: &Attributes) -> bool {
        let has = |list: &[String], v: &str| list.iter().any(|x| x == "*" || x == v);
        if !has(&self.verbs, &a.verb) {
            return false;
        }
        if a.resource.is_empty() {
            return self.paths.iter().any(|p| {
                p == "*" || *p == a.path || p.strip_suffix('*').is_some_and(|start| a.path.starts_with(start))
            });
        }
        let resource = self.resources.iter().any(|r| {
            r == "*"
                || if a.subresource.is_empty() {
                    *r == a.resource
                } else {
                    *r == format!("{}/{}", a.resource, a.subresource) || *r == format!("*/{}", a.subresource)
                }
        });
        resource && has(&self.groups, &a.group) && (self.names.is_empty() || self.names.contains(&a.name))
    }

    /// The rule as `SelfSubjectRulesReview` shows it: whether it is about resources, and its JSON.
    #[must_use]
    pub fn review(&self) -> (bool, Value) {
        if self.paths.is_empty() {
            let mut v = json!({"verbs": self.verbs, "apiGroups": self.groups, "resources": self.resources});
            if !self.names.is_empty() {
                v["resourceNames"] = self.names.clone().into();
            }
            (true, v)
        } else {
            (false, json!({"verbs": self.verbs, "nonResourceURLs": self.paths}))
        }
    }
}

#[derive(Debug, Clone)]
struct Grant {
    /// "" for everywhere.
    namespace: String,
    subjects: Vec<(String, String, String)>,
    rules: Arc<Vec<Rule>>,
    /// What allows, for people.
    reason: String,
}

impl Grant {
    fn concerns(&self, user: &User) -> bool {
        self.subjects.iter().any(|(kind, there, name)| match kind.as_str() {
            "User" => *name == user.name,
            "Group" => user.groups.contains(name),
            "ServiceAccount" => user.name == format!("system:serviceaccount:{there}:{name}"),
            _ => false,
        })
    }
}

/// Everything that is granted.
#[derive(Debug, Clone, Default)]
pub struct Grants(Vec<Grant>);

impl Grants {
    /// Evaluates stored roles and bindings.
    #[must_use]
    pub fn of(objects: &[Value]) -> Self {
        let kind = |k: &'static str| objects.iter().filter(move |o| text(o, "/kind") == k);
        let own = |role: &Value| items(role, "/rules").iter().map(Rule::of).collect::<Vec<_>>();
        let mut roles: BTreeMap<(String, String), Arc<Vec<Rule>>> = BTreeMap::new();
        for role in kind("Role") {
            roles.insert((namespace(role).into(), name(role).into()), Arc::new(own(role)));
        }
        for role in kind("ClusterRole") {
            let mut rules = own(role);
            for selector in items(role, "/aggregationRule/clusterRoleSelectors") {
                let selector = Selector::of_object(selector);
                for other in kind("ClusterRole").filter(|o| name(o) != name(role)) {
                    if selector.matches_labels(other.pointer("/metadata/labels")) {
                        rules.extend(own(other));
                    }
                }
            }
            roles.insert((String::new(), name(role).into()), Arc::new(rules));
        }
        let mut grants = Vec::new();
        for binding in kind("RoleBinding").chain(kind("ClusterRoleBinding")) {
            let there = namespace(binding);
            let role = (
                if text(binding, "/roleRef/kind") == "Role" { there.to_owned() } else { String::new() },
                text(binding, "/roleRef/name").to_owned(),
            );
            let Some(rules) = roles.get(&role) else { continue };
            let subjects = items(binding, "/subjects")
                .iter()
                .map(|s| (text(s, "/kind").into(), text(s, "/namespace").into(), text(s, "/name").into()))
                .collect();
            let reason = format!(
                "RBAC: allowed by {} {:?} of {} {:?}",
                text(binding, "/kind"),
                name(binding),
                text(binding, "/roleRef/kind"),
                role.1
            );
            grants.push(Grant { namespace: there.into(), subjects, rules: rules.clone(), reason });
        }
        Self(grants)
    }

    /// Why somebody may do something; none when they may not.
    #[must_use]
    pub fn allows(&self, user: &User, wanted: &Attributes) -> Option<&str> {
        self.0
            .iter()
            .filter(|g| g.namespace.is_empty() || (g.namespace == wanted.namespace && !wanted.resource.is_empty()))
            .filter(|g| g.concerns(user))
            .find(|g| g.rules.iter().any(|r| r.allows(wanted)))
            .map(|g| g.reason.as_str())
    }

    /// All rules that somebody has in a namespace.
    #[must_use]
    pub fn rules(&self, user: &User, namespace: &str) -> Vec<Rule> {
        self.0
            .iter()
            .filter(|g| (g.namespace.is_empty() || g.namespace == namespace) && g.concerns(user))
            .flat_map(|g| g.rules.iter().cloned())
            .collect()
    }
}

/// The evaluated roles and bindings of a store.
#[derive(Debug, Default)]
pub struct Rbac {
    known: RwLock<(u64, Option<Arc<Grants>>)>,
}

impl Rbac {
    /// Something has changed.
    pub fn forget(&self) {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        known.0 += 1;
        known.1 = None;
    }

    /// What is granted now.
    ///
    /// # Errors
    /// When the store does not answer.
    pub async fn grants(&self, storage: &dyn Storage) -> StorageResult<Arc<Grants>> {
        let generation = {
            let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(grants) = &known.1 {
                return Ok(grants.clone());
            }
            known.0
        };
        let page = storage.range(RangeQuery { prefix: PREFIX.into(), ..RangeQuery::default() }).await?;
        let objects: Vec<Value> = page.items.iter().filter_map(|kv| serde_json::from_slice(&kv.value).ok()).collect();
        let grants = Arc::new(Grants::of(&objects));
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if known.0 == generation {
            known.1 = Some(grants.clone());
        }
        Ok(grants)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grants_follow_bindings_scopes_and_aggregation() {
        let grants = Grants::of(&[
            json!({"kind": "ClusterRole", "metadata": {"name": "view"},
                   "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {"v": "1"}}]}}),
            json!({"kind": "ClusterRole", "metadata": {"name": "vm", "labels": {"v": "1"}},
                   "rules": [{"verbs": ["get"], "apiGroups": ["kubevirt.io"], "resources": ["virtualmachines", "*/status"]}]}),
            json!({"kind": "RoleBinding", "metadata": {"name": "b", "namespace": "a"},
                   "roleRef": {"kind": "ClusterRole", "name": "view"},
                   "subjects": [{"kind": "User", "name": "joe"}]}),
        ]);
        let want = |ns: &str, sub: &str| Attributes {
            verb: "get".into(),
            group: "kubevirt.io".into(),
            resource: "virtualmachines".into(),
            subresource: sub.into(),
            namespace: ns.into(),
            ..Attributes::default()
        };
        let joe = User::new("joe", &[]);
        assert!(grants.allows(&joe, &want("a", "")).is_some());
        assert!(grants.allows(&joe, &want("a", "status")).is_some());
        assert!(grants.allows(&joe, &want("a", "scale")).is_none());
        assert!(grants.allows(&joe, &want("b", "")).is_none());
        assert!(grants.allows(&joe, &want("", "")).is_none());
        assert!(grants.allows(&User::new("ann", &[]), &want("a", "")).is_none());
    }
}
