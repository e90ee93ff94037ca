//! The roles and bindings that every cluster has.

use serde_json::{Value, json};

use super::rbac::gathered;

const READ: [&str; 3] = ["get", "list", "watch"];
const WRITE: [&str; 5] = ["create", "delete", "deletecollection", "patch", "update"];
/// The label of kube-apiserver's own roles.
const LABEL: &str = "kubernetes.io/bootstrapping";

fn role(name: &str, rules: &Value) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": name, "labels": {LABEL: "rbac-defaults"},
                     "annotations": {"rbac.authorization.kubernetes.io/autoupdate": "true"}},
        "rules": rules,
    })
}

/// A role that has the rules of all roles labelled for it, and is itself labelled for another.
fn open_role(name: &str, into: Option<&str>) -> Value {
    let mut role = role(name, &Value::Null);
    let label = format!("rbac.authorization.k8s.io/aggregate-to-{name}");
    role["aggregationRule"] = json!({"clusterRoleSelectors": [{"matchLabels": {label: "true"}}]});
    if let Some(into) = into {
        role["metadata"]["labels"][format!("rbac.authorization.k8s.io/aggregate-to-{into}")] = "true".into();
    }
    role
}

/// The rules that Kubernetes itself brings for such a role.
fn part(into: &str, rules: &Value) -> Value {
    let mut role = role(&format!("system:aggregate-to-{into}"), rules);
    role["metadata"]["labels"][format!("rbac.authorization.k8s.io/aggregate-to-{into}")] = "true".into();
    role
}

fn binding(name: &str, role: &str, groups: &[&str]) -> Value {
    let subjects: Vec<Value> =
        groups.iter().map(|g| json!({"kind": "Group", "name": g, "apiGroup": "rbac.authorization.k8s.io"})).collect();
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": {"name": name, "labels": {LABEL: "rbac-defaults"}},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": subjects,
    })
}

/// All of them: cluster roles first, then their bindings.
#[must_use]
pub fn objects() -> Vec<Value> {
    let core_read = [
        "configmaps",
        "events",
        "limitranges",
        "namespaces",
        "namespaces/status",
        "persistentvolumeclaims",
        "persistentvolumeclaims/status",
        "pods",
        "pods/log",
        "pods/status",
        "resourcequotas",
        "resourcequotas/status",
        "serviceaccounts",
    ];
    let core_write =
        ["configmaps", "events", "persistentvolumeclaims", "pods", "pods/eviction", "secrets", "serviceaccounts"];
    let all: Vec<&str> = [READ.as_slice(), &WRITE].concat();
    let view = json!([
        {"verbs": READ, "apiGroups": [""], "resources": core_read},
        {"verbs": READ, "apiGroups": ["apps"], "resources": ["controllerrevisions"]},
        {"verbs": READ, "apiGroups": ["events.k8s.io"], "resources": ["events"]},
    ]);
    let edit = json!([
        {"verbs": WRITE, "apiGroups": [""], "resources": core_write},
        {"verbs": READ, "apiGroups": [""], "resources": ["secrets"]},
        {"verbs": ["create"], "apiGroups": [""], "resources": ["serviceaccounts/token"]},
        {"verbs": ["impersonate"], "apiGroups": [""], "resources": ["serviceaccounts"]},
        {"verbs": all, "apiGroups": ["coordination.k8s.io"], "resources": ["leases"]},
    ]);
    let admin = json!([
        {"verbs": ["create"], "apiGroups": ["authorization.k8s.io"], "resources": ["localsubjectaccessreviews"]},
        {"verbs": all, "apiGroups": ["rbac.authorization.k8s.io"],
         "resources": ["rolebindings", "roles"]},
    ]);
    let mut objects = vec![
        role(
            "cluster-admin",
            &json!([
                {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]},
                {"verbs": ["*"], "nonResourceURLs": ["*"]},
            ]),
        ),
        open_role("admin", None),
        open_role("edit", Some("admin")),
        open_role("view", Some("edit")),
        part("admin", &admin),
        part("edit", &edit),
        part("view", &view),
        role(
            "system:discovery",
            &json!([{"verbs": ["get"], "nonResourceURLs": [
                "/api", "/api/*", "/apis", "/apis/*", "/healthz", "/livez", "/openapi", "/openapi/*", "/readyz",
                "/version", "/version/",
            ]}]),
        ),
        role(
            "system:public-info-viewer",
            &json!([{"verbs": ["get"], "nonResourceURLs": ["/healthz", "/livez", "/readyz", "/version", "/version/"]}]),
        ),
        role(
            "system:basic-user",
            &json!([
                {"verbs": ["create"], "apiGroups": ["authorization.k8s.io"],
                 "resources": ["selfsubjectaccessreviews", "selfsubjectrulesreviews"]},
                {"verbs": ["create"], "apiGroups": ["authentication.k8s.io"], "resources": ["selfsubjectreviews"]},
            ]),
        ),
        binding("cluster-admin", "cluster-admin", &["system:masters"]),
        binding("system:discovery", "system:discovery", &["system:authenticated"]),
        binding("system:basic-user", "system:basic-user", &["system:authenticated"]),
        binding(
            "system:public-info-viewer",
            "system:public-info-viewer",
            &["system:authenticated", "system:unauthenticated"],
        ),
    ];
    // Until nothing more comes: they gather one another.
    loop {
        let missing = gathered(&objects);
        if missing.is_empty() {
            return objects;
        }
        for (name, rules) in missing {
            if let Some(role) = objects.iter_mut().find(|o| o["metadata"]["name"] == name.as_str()) {
                role["rules"] = rules;
            }
        }
    }
}
