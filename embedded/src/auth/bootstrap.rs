//! The roles and bindings that every cluster has.

use serde_json::{Value, json};

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

/// A role that, beside its own rules, has those of all roles labelled for it.
fn open_role(name: &str, rules: &Value, into: Option<&str>) -> Value {
    let mut role = role(name, rules);
    let label = format!("rbac.authorization.k8s.io/aggregate-to-{name}");
    role["aggregationRule"] = json!({"clusterRoleSelectors": [{"matchLabels": {label: "true"}}]});
    if let Some(into) = into {
        role["metadata"]["labels"][format!("rbac.authorization.k8s.io/aggregate-to-{into}")] = "true".into();
    }
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
    let join = |parts: &[&Value]| -> Value {
        parts.iter().flat_map(|p| p.as_array().cloned().unwrap_or_default()).collect::<Vec<_>>().into()
    };
    let mut admin_role = open_role("admin", &join(&[&view, &edit, &admin]), None);
    for also in ["aggregate-to-edit", "aggregate-to-view"] {
        if let Some(list) =
            admin_role.pointer_mut("/aggregationRule/clusterRoleSelectors").and_then(Value::as_array_mut)
        {
            list.push(json!({"matchLabels": {format!("rbac.authorization.k8s.io/{also}"): "true"}}));
        }
    }
    let mut edit_role = open_role("edit", &join(&[&view, &edit]), Some("admin"));
    if let Some(list) = edit_role.pointer_mut("/aggregationRule/clusterRoleSelectors").and_then(Value::as_array_mut) {
        list.push(json!({"matchLabels": {"rbac.authorization.k8s.io/aggregate-to-view": "true"}}));
    }
    vec![
        role(
            "cluster-admin",
            &json!([
                {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]},
                {"verbs": ["*"], "nonResourceURLs": ["*"]},
            ]),
        ),
        admin_role,
        edit_role,
        open_role("view", &view, Some("edit")),
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
    ]
}
