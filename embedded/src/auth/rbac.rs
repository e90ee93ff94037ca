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
    /// The rules of a role.
    #[must_use]
    pub fn of_role(role: &Value) -> Vec<Self> {
        if role.get("aggregationRule").is_some_and(|a| !a.is_null()) {
            // Whoever says what a role gathers may gather everything.
            let all = || vec!["*".to_owned()];
            return vec![
                Self { verbs: all(), groups: all(), resources: all(), ..Self::default() },
                Self { verbs: all(), paths: all(), ..Self::default() },
            ];
        }
        items(role, "/rules").iter().map(Self::of).collect()
    }

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

    /// Whether everything that another rule allows is allowed by this one. The other one allows a single thing.
    fn covers(&self, one: &Self) -> bool {
        let all = |mine: &[String], theirs: &[String]| {
            mine.iter().any(|x| x == "*") || theirs.iter().all(|x| mine.contains(x))
        };
        if !all(&self.verbs, &one.verbs) {
            return false;
        }
        if !one.paths.is_empty() {
            return one.paths.iter().all(|path| {
                self.paths
                    .iter()
                    .any(|p| p == "*" || p == path || p.strip_suffix('*').is_some_and(|start| path.starts_with(start)))
            });
        }
        let resource = |r: &String| {
            self.resources
                .iter()
                .any(|x| x == "*" || x == r || r.split_once('/').is_some_and(|(_, sub)| *x == format!("*/{sub}")))
        };
        let names =
            self.names.is_empty() || (!one.names.is_empty() && one.names.iter().all(|n| self.names.contains(n)));
        all(&self.groups, &one.groups) && one.resources.iter().all(resource) && names
    }

    /// Rules that allow a single thing each.
    fn singles(&self) -> Vec<Self> {
        let mut out = Vec::new();
        for group in &self.groups {
            for resource in &self.resources {
                for verb in &self.verbs {
                    let rule = Self {
                        verbs: vec![verb.clone()],
                        groups: vec![group.clone()],
                        resources: vec![resource.clone()],
                        ..Self::default()
                    };
                    if self.names.is_empty() {
                        out.push(rule.clone());
                    }
                    out.extend(self.names.iter().map(|n| Self { names: vec![n.clone()], ..rule.clone() }));
                }
            }
        }
        for path in &self.paths {
            for verb in &self.verbs {
                out.push(Self { verbs: vec![verb.clone()], paths: vec![path.clone()], ..Self::default() });
            }
        }
        out
    }

    /// The rule for people.
    fn words(&self) -> String {
        let part = |what: &str, list: &[String]| {
            let list: Vec<String> = list.iter().map(|v| format!("{v:?}")).collect();
            (!list.is_empty()).then(|| format!("{what}:[{}]", list.join(" ")))
        };
        let parts = [
            part("APIGroups", &self.groups),
            part("Resources", &self.resources),
            part("NonResourceURLs", &self.paths),
            part("ResourceNames", &self.names),
            part("Verbs", &self.verbs),
        ];
        format!("{{{}}}", parts.into_iter().flatten().collect::<Vec<_>>().join(", "))
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
    /// The subject, if any, that is this user; for people.
    fn concerns(&self, user: &User) -> Option<String> {
        let found = self.subjects.iter().find(|(kind, there, name)| match kind.as_str() {
            "User" => *name == user.name,
            "Group" => user.groups.contains(name),
            "ServiceAccount" => user.name == format!("system:serviceaccount:{there}:{name}"),
            _ => false,
        });
        found.map(|(kind, there, name)| {
            if kind == "ServiceAccount" {
                format!("{kind} {:?}", format!("{name}/{there}"))
            } else {
                format!("{kind} {name:?}")
            }
        })
    }
}

/// Everything that is granted, and the roles that there are.
#[derive(Debug, Clone, Default)]
pub struct Grants {
    grants: Vec<Grant>,
    roles: BTreeMap<(String, String), Arc<Vec<Rule>>>,
}

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
            let who = if there.is_empty() { name(binding).to_owned() } else { format!("{}/{there}", name(binding)) };
            let reason = format!(
                "RBAC: allowed by {} {who:?} of {} {:?} to ",
                text(binding, "/kind"),
                text(binding, "/roleRef/kind"),
                role.1
            );
            grants.push(Grant { namespace: there.into(), subjects, rules: rules.clone(), reason });
        }
        Self { grants, roles }
    }

    /// Why somebody may do something; none when they may not.
    #[must_use]
    pub fn allows(&self, user: &User, wanted: &Attributes) -> Option<String> {
        self.grants
            .iter()
            .filter(|g| g.namespace.is_empty() || (g.namespace == wanted.namespace && !wanted.resource.is_empty()))
            .filter_map(|g| g.concerns(user).map(|subject| (g, subject)))
            .find(|(g, _)| g.rules.iter().any(|r| r.allows(wanted)))
            .map(|(g, subject)| format!("{}{subject}", g.reason))
    }

    /// The rules of a role that a binding refers to; none when there is no such role.
    #[must_use]
    pub fn role(&self, kind: &str, namespace: &str, name: &str) -> Option<Vec<Rule>> {
        let namespace = if kind == "Role" { namespace } else { "" };
        self.roles.get(&(namespace.to_owned(), name.to_owned())).map(|rules| Vec::clone(rules))
    }

    /// What rules allow that a user may not do himself, for people; none when there is nothing.
    #[must_use]
    pub fn beyond(&self, user: &User, namespace: &str, rules: &[Rule]) -> Option<String> {
        let own = self.rules(user, namespace);
        let mut missing: Vec<Rule> = Vec::new();
        for single in rules.iter().flat_map(Rule::singles).filter(|s| !own.iter().any(|r| r.covers(s))) {
            let same = |r: &&mut Rule| {
                r.groups == single.groups
                    && r.resources == single.resources
                    && r.names == single.names
                    && r.paths.is_empty()
            };
            match missing.iter_mut().find(same).filter(|_| single.paths.is_empty()) {
                Some(there) => there.verbs.extend(single.verbs),
                None => missing.push(single),
            }
        }
        if missing.is_empty() {
            return None;
        }
        let mut lines: Vec<String> = missing.iter().map(Rule::words).collect();
        lines.sort();
        let groups: Vec<String> = user.groups.iter().map(|g| format!("{g:?}")).collect();
        Some(format!(
            "user {:?} (groups=[{}]) is attempting to grant RBAC permissions not currently held:\n{}",
            user.name,
            groups.join(" "),
            lines.join("\n")
        ))
    }

    /// All rules that somebody has in a namespace.
    #[must_use]
    pub fn rules(&self, user: &User, namespace: &str) -> Vec<Rule> {
        self.grants
            .iter()
            .filter(|g| (g.namespace.is_empty() || g.namespace == namespace) && g.concerns(user).is_some())
            .flat_map(|g| g.rules.iter().cloned())
            .collect()
    }
}

/// What roles that gather others should contain: their names, and their rules where these are not so yet.
#[must_use]
pub fn gathered(roles: &[Value]) -> Vec<(String, Value)> {
    let mut by_name: Vec<&Value> = roles.iter().filter(|r| text(r, "/kind") == "ClusterRole").collect();
    by_name.sort_by(|a, b| name(a).cmp(name(b)));
    let mut out = Vec::new();
    for role in by_name.iter().filter(|r| r.pointer("/aggregationRule/clusterRoleSelectors").is_some()) {
        let mut rules: Vec<Value> = Vec::new();
        for selector in items(role, "/aggregationRule/clusterRoleSelectors").iter().map(Selector::of_object) {
            let chosen = by_name.iter().filter(|o| name(o) != name(role));
            for other in chosen.filter(|o| selector.matches_labels(o.pointer("/metadata/labels"))) {
                for rule in items(other, "/rules") {
                    if !rules.contains(rule) {
                        rules.push(rule.clone());
                    }
                }
            }
        }
        if items(role, "/rules") != rules {
            out.push((name(role).to_owned(), rules.into()));
        }
    }
    out
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
        // Nobody can grant what he has not.
        let rule = |verbs: Value| {
            let rules = json!([{"verbs": verbs, "apiGroups": ["kubevirt.io"], "resources": ["virtualmachines"]}]);
            Rule::of_role(&json!({ "rules": rules }))
        };
        assert_eq!(grants.beyond(&joe, "a", &rule(json!(["get"]))), None);
        let beyond = grants.beyond(&joe, "a", &rule(json!(["get", "list", "watch"]))).unwrap_or_default();
        assert!(
            beyond.ends_with(r#"{APIGroups:["kubevirt.io"], Resources:["virtualmachines"], Verbs:["list" "watch"]}"#),
            "{beyond}"
        );
        assert!(grants.beyond(&joe, "b", &rule(json!(["get"]))).is_some());
    }
}
