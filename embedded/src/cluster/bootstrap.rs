//! What every virtfold cluster has beside what the API server brings: definitions, the namespace of the product, the default
//! storage class, the roles of its parts, the registered APIs.
//!
//! An object that this version would write differently is replaced; a digest in an annotation tells, so that a start that
//! changes nothing writes nothing, and a user's own labels on these objects stay.

use std::time::Duration;

use kube::Client;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::claims::{CLASS, PROVISIONER};

/// The namespace of virtfold's own objects (the controller's Lease).
pub const NAMESPACE: &str = "virtfold";
/// The controller: user of its certificate, and its service account.
pub const CONTROLLER: &str = "virtfold-controller";
/// The gateway, likewise.
pub const GATEWAY: &str = "virtfold-gateway";
/// Service account of the nodes that are not members of `system:nodes`.
pub const NODE: &str = "virtfold-node";
/// Annotation: digest of the object as it was written last.
const DIGEST: &str = "virtfold.io/digest";
/// A definition that was written is served within this time.
const ESTABLISHED: Duration = Duration::from_secs(10);

const READ: [&str; 3] = ["get", "list", "watch"];

fn rule(groups: &[&str], resources: &[&str], verbs: &[&str]) -> Value {
    json!({"apiGroups": groups, "resources": resources, "verbs": verbs})
}

fn cluster_role(name: &str, rules: &[Value]) -> Value {
    json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules})
}

/// Binds a role to whom a certificate names and to the service account that stands for the same part.
fn cluster_binding(name: &str, kind: &str, subject: &str, account: &str) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": subjects(kind, subject, account),
    })
}

/// The binding of a role to all who are logged in.
fn everybody(name: &str) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:authenticated"}],
    })
}

fn subjects(kind: &str, subject: &str, account: &str) -> Value {
    json!([
        {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": subject},
        {"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE},
    ])
}

/// Every part, by certificate and by account.
fn reviewers() -> Vec<Value> {
    let all = [("User", CONTROLLER, CONTROLLER), ("User", GATEWAY, GATEWAY), ("Group", "system:nodes", NODE)];
    let each = all.into_iter().map(|(kind, subject, account)| subjects(kind, subject, account));
    each.filter_map(|both| both.as_array().cloned()).flatten().collect()
}

/// A role for KubeVirt's kinds that the built-in role `into` has, too.
fn user_role(into: &str, verbs: &[&str], subresources: &[&str], subresource_verbs: &[&str]) -> Value {
    let mut role = cluster_role(
        &format!("kubevirt.io:{into}"),
        &[
            rule(
                &[
                    "kubevirt.io",
                    "instancetype.kubevirt.io",
                    "snapshot.kubevirt.io",
                    "clone.kubevirt.io",
                    "pool.kubevirt.io",
                    "export.kubevirt.io",
                ],
                &["*"],
                verbs,
            ),
            rule(&["subresources.kubevirt.io"], subresources, subresource_verbs),
            rule(&["subresources.kubevirt.io"], &["expand-vm-spec"], &["update"]),
        ],
    );
    role["metadata"]["labels"] = json!({format!("rbac.authorization.k8s.io/aggregate-to-{into}"): "true"});
    role
}

fn api_service(group: &str, version: &str) -> Value {
    json!({
        "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": format!("{version}.{group}")},
        "spec": {"group": group, "version": version,
                 "groupPriorityMinimum": 1000, "versionPriority": 15},
        "status": {"conditions": [{"type": "Available", "status": "True", "reason": "Local",
                   "message": "Local APIServices are always available"}]},
    })
}

/// All objects but the definitions, in the order in which they are written.
#[must_use]
pub fn objects() -> Vec<Value> {
    let write = ["create", "delete", "deletecollection", "patch", "update"];
    let all: Vec<&str> = READ.iter().chain(&write).copied().collect();
    let views = [
        "virtualmachines/expand-spec",
        "virtualmachineinstances/guestosinfo",
        "virtualmachineinstances/filesystemlist",
        "virtualmachineinstances/userlist",
        "virtualmachineinstances/objectgraph",
        "virtualmachines/objectgraph",
        "virtualmachines/explain",
        "virtualmachineinstances/explain",
        "virtualmachineinstancereplicasets/explain",
        "nodes/explain",
    ];
    let edits = [
        "virtualmachineinstances/pause",
        "virtualmachineinstances/unpause",
        "virtualmachineinstances/addvolume",
        "virtualmachineinstances/removevolume",
        "virtualmachineinstances/freeze",
        "virtualmachineinstances/unfreeze",
        "virtualmachineinstances/softreboot",
        "virtualmachineinstances/reset",
        "virtualmachines/start",
        "virtualmachines/stop",
        "virtualmachines/restart",
        "virtualmachines/addvolume",
        "virtualmachines/removevolume",
        "virtualmachines/memorydump",
        "virtualmachines/removememorydump",
        // The API server asks for the first word after the name alone, the gateway for all of them.
        "virtualmachines/evacuate",
        "virtualmachines/evacuate/cancel",
        "virtualmachineinstances/evacuate",
        "virtualmachineinstances/evacuate/cancel",
        "virtualmachineinstances/sev/setupsession",
        "virtualmachineinstances/sev/injectlaunchsecret",
        "virtualmachines/portforward",
        "virtualmachineinstances/portforward",
    ];
    let streams = [
        "virtualmachineinstances/console",
        "virtualmachineinstances/vnc",
        "virtualmachineinstances/vnc/screenshot",
        "virtualmachineinstances/usbredir",
        "virtualmachineinstances/sev/fetchcertchain",
        "virtualmachineinstances/sev/querylaunchmeasurement",
    ];
    let usage = rule(&["subresources.kubevirt.io"], &["usage"], &["list"]);
    let mut view_role = user_role("view", &READ, &views, &["get"]);
    if let Some(rules) = view_role["rules"].as_array_mut() {
        rules.push(usage.clone());
    }
    let mut edit_role = user_role("edit", &all, &edits, &["get", "update"]);
    if let Some(rules) = edit_role["rules"].as_array_mut() {
        rules.push(rule(&["subresources.kubevirt.io"], &streams, &["get"]));
        rules.push(rule(&["subresources.kubevirt.io"], &views, &["get", "update"]));
        rules.push(usage);
    }
    let mut admin_role = edit_role.clone();
    admin_role["metadata"] = json!({"name": "kubevirt.io:admin",
        "labels": {"rbac.authorization.k8s.io/aggregate-to-admin": "true"}});
    let mut objects = vec![
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}),
        json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
            "metadata": {"name": CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
            "provisioner": PROVISIONER, "reclaimPolicy": "Delete", "volumeBindingMode": "Immediate",
            "allowVolumeExpansion": false,
        }),
        view_role,
        edit_role,
        admin_role,
        // The controller: cells and what they make. It reads no Secrets.
        cluster_role(
            "virtfold:controller",
            &[
                rule(&["kubevirt.io"], &["*"], &all),
                rule(&["instancetype.kubevirt.io", "migrations.kubevirt.io"], &["*"], &READ),
                rule(&[""], &["pods"], &["get", "list", "watch", "create", "patch", "delete"]),
                rule(&[""], &["nodes"], &["get", "list", "watch", "patch"]),
                rule(&[""], &["persistentvolumeclaims", "persistentvolumes", "namespaces"], &READ),
                rule(&["storage.k8s.io"], &["storageclasses"], &READ),
                rule(&["apps"], &["controllerrevisions"], &["get", "list", "watch", "create", "delete", "patch"]),
                rule(&["coordination.k8s.io"], &["leases"], &["get", "list", "watch", "create", "update", "patch"]),
                rule(&["events.k8s.io", ""], &["events"], &["get", "list", "create", "patch", "update"]),
            ],
        ),
        cluster_binding("virtfold:controller", "User", CONTROLLER, CONTROLLER),
        // Every part asks who may see its metrics.
        cluster_role(
            "virtfold:reviewer",
            &[
                rule(&["authentication.k8s.io"], &["tokenreviews"], &["create"]),
                rule(&["authorization.k8s.io"], &["subjectaccessreviews"], &["create"]),
            ],
        ),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "virtfold:reviewer"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "virtfold:reviewer"},
            "subjects": reviewers(),
        }),
        // For whoever scrapes them.
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "virtfold:metrics"},
            "rules": [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}],
        }),
        // The gateway: admission and subresources; it asks on behalf of others what they may do.
        cluster_role(
            "virtfold:gateway",
            &[
                rule(
                    &["kubevirt.io"],
                    &["virtualmachines", "virtualmachineinstances"],
                    &["get", "list", "watch", "patch"],
                ),
                rule(
                    &["kubevirt.io"],
                    &["virtualmachines/status", "virtualmachineinstances/status", "kubevirts/status"],
                    &["patch", "update"],
                ),
                rule(&["kubevirt.io", "instancetype.kubevirt.io", "cdi.kubevirt.io"], &["*"], &READ),
                rule(&["apps"], &["controllerrevisions"], &READ),
                rule(&["snapshot.storage.k8s.io"], &["volumesnapshots"], &READ),
                rule(&[""], &["pods", "nodes", "namespaces", "persistentvolumeclaims"], &READ),
                rule(&["authorization.k8s.io"], &["subjectaccessreviews"], &["create"]),
                rule(&["events.k8s.io", ""], &["events"], &["create", "patch"]),
                // Who leads says why.
                rule(&["coordination.k8s.io"], &["leases"], &["get"]),
            ],
        ),
        cluster_binding("virtfold:gateway", "User", GATEWAY, GATEWAY),
        // Whoever may log in may choose a size.
        cluster_role(
            "instancetype.kubevirt.io:view",
            &[rule(
                &["instancetype.kubevirt.io"],
                &["virtualmachineclusterinstancetypes", "virtualmachineclusterpreferences"],
                &READ,
            )],
        ),
        everybody("instancetype.kubevirt.io:view"),
        // A node: kubelet and node agent. It writes no VirtualMachineInstance.
        cluster_role(
            "virtfold:node",
            &[
                rule(&[""], &["nodes"], &["get", "list", "watch", "create", "patch", "update"]),
                rule(&[""], &["nodes/status"], &["patch", "update"]),
                rule(&[""], &["pods"], &["get", "list", "watch", "delete"]),
                rule(&[""], &["pods/status"], &["get", "patch", "update"]),
                rule(&[""], &["pods/eviction"], &["create"]),
                rule(&[""], &["secrets", "configmaps"], &READ),
                rule(&[""], &["persistentvolumeclaims", "persistentvolumes", "namespaces"], &READ),
                rule(&[""], &["serviceaccounts", "serviceaccounts/token"], &["get", "create"]),
                rule(&["kubevirt.io"], &["virtualmachineinstances"], &READ),
                rule(&["coordination.k8s.io"], &["leases"], &["get", "list", "watch", "create", "patch", "update"]),
                rule(&["events.k8s.io", ""], &["events"], &["create", "patch", "update"]),
            ],
        ),
        cluster_binding("virtfold:node", "Group", "system:nodes", NODE),
    ];
    for (group, version) in [
        ("apiextensions.k8s.io", "v1"),
        ("apiregistration.k8s.io", "v1"),
        ("apps", "v1"),
        ("authentication.k8s.io", "v1"),
        ("authorization.k8s.io", "v1"),
        ("coordination.k8s.io", "v1"),
        ("events.k8s.io", "v1"),
        ("rbac.authorization.k8s.io", "v1"),
        ("scheduling.k8s.io", "v1"),
        ("storage.k8s.io", "v1"),
        (api::names::SUBRESOURCE_GROUP, "v1"),
    ]
    .into_iter()
    .chain(api::crd::versions())
    {
        objects.push(api_service(group, version));
    }
    objects
}

/// What a Kubernetes that is somewhere else needs beside the definitions: the namespace and the roles of the parts.
#[must_use]
pub fn roles() -> Vec<Value> {
    // Its API services and storage classes are its own.
    let mut objects = objects();
    objects.retain(|o| !matches!(o["kind"].as_str(), Some("APIService" | "StorageClass")));
    let own = |resources: &[&str], names: &[&str]| {
        let group =
            if resources[0] == "apiservices" { "apiregistration.k8s.io" } else { "admissionregistration.k8s.io" };
        let mut rule = rule(&[group], resources, &["get", "patch"]);
        rule["resourceNames"] = json!(names);
        rule
    };
    // A gateway on a socket of its own keeps its certificates known, and asks who speaks for the aggregation layer.
    objects.extend([
        cluster_role(
            "virtfold:registration",
            &[
                own(&["apiservices"], &["v1.subresources.kubevirt.io", "v1alpha3.subresources.kubevirt.io"]),
                own(&["mutatingwebhookconfigurations", "validatingwebhookconfigurations"], &[GATEWAY]),
            ],
        ),
        cluster_binding("virtfold:registration", "User", GATEWAY, GATEWAY),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
            "metadata": {"name": "virtfold:aggregation", "namespace": "kube-system"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role",
                "name": "extension-apiserver-authentication-reader"},
            "subjects": subjects("User", GATEWAY, GATEWAY),
        }),
    ]);
    objects.extend([CONTROLLER, GATEWAY, NODE].map(|name| {
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": NAMESPACE},
            "automountServiceAccountToken": false})
    }));
    objects
}

/// The path of an object. Only kinds that are written here.
fn path(object: &Value) -> String {
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let version = text("/apiVersion");
    let root = if version.contains('/') { "apis" } else { "api" };
    let kind = text("/kind").to_lowercase();
    let plural = match kind.strip_suffix('y') {
        Some(stem) => format!("{stem}ies"),
        None if kind.ends_with("ss") => format!("{kind}es"),
        None => format!("{kind}s"),
    };
    match text("/metadata/namespace") {
        "" => format!("/{root}/{version}/{plural}"),
        namespace => format!("/{root}/{version}/namespaces/{namespace}/{plural}"),
    }
}

async fn send(client: &Client, method: &str, path: &str, body: Option<&Value>) -> Result<Value, kube::Error> {
    let body = body.map(serde_json::to_vec).transpose().map_err(kube::Error::SerdeError)?.unwrap_or_default();
    let request = http::Request::builder()
        .method(method)
        .uri(path)
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(body)
        .map_err(|e| kube::Error::Service(Box::new(e)))?;
    client.request(request).await
}

async fn ensure(client: &Client, mut object: Value) -> Result<(), kube::Error> {
    let digest: String = Sha256::digest(object.to_string()).iter().take(8).map(|b| format!("{b:02x}")).collect();
    object["metadata"]["annotations"][DIGEST] = digest.clone().into();
    let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let collection = path(&object);
    let one = format!("{collection}/{name}");
    let found = match send(client, "GET", &one, None).await {
        Ok(found) => found,
        Err(kube::Error::Api(status)) if status.code == 404 => {
            send(client, "POST", &collection, Some(&object)).await?;
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    if found["metadata"]["annotations"][DIGEST].as_str() == Some(&digest) {
        return Ok(());
    }
    let mut next = found.clone();
    for (key, value) in object.as_object().into_iter().flatten() {
        if key != "metadata" && key != "status" {
            next[key] = value.clone();
        }
    }
    for part in ["labels", "annotations"] {
        for (key, value) in object["metadata"][part].as_object().into_iter().flatten() {
            next["metadata"][part][key] = value.clone();
        }
    }
    send(client, "PUT", &one, Some(&next)).await.map(drop)
}

/// Whether a definition of KubeVirt's importer of disks is there that somebody else brought: that one is kept.
async fn foreign(client: &Client, definition: &Value) -> Result<bool, kube::Error> {
    if definition["spec"]["group"] != "cdi.kubevirt.io" {
        return Ok(false);
    }
    let name = definition["metadata"]["name"].as_str().unwrap_or_default();
    match send(client, "GET", &format!("{}/{name}", path(definition)), None).await {
        Ok(found) => Ok(found["metadata"]["annotations"][DIGEST].is_null()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
        Err(error) => Err(error),
    }
}

/// Writes the definitions and waits until they are served, then everything else that the embedded cluster has.
///
/// # Errors
/// What the API server says of the object that it does not take.
pub async fn run(client: &Client) -> Result<(), kube::Error> {
    install(client, objects()).await
}

/// Writes the definitions and waits until they are served, then `objects`.
///
/// # Errors
/// What the API server says of the object that it does not take.
pub async fn install(client: &Client, objects: Vec<Value>) -> Result<(), kube::Error> {
    let definitions = api::crd::all();
    for definition in &definitions {
        if !foreign(client, definition).await? {
            ensure(client, definition.clone()).await?;
        }
    }
    for definition in &definitions {
        let one = format!("{}/{}", path(definition), definition["metadata"]["name"].as_str().unwrap_or_default());
        let end = tokio::time::Instant::now() + ESTABLISHED;
        loop {
            let found = send(client, "GET", &one, None).await?;
            let conditions = found["status"]["conditions"].as_array().cloned().unwrap_or_default();
            if conditions.iter().any(|c| c["type"] == "Established" && c["status"] == "True")
                || tokio::time::Instant::now() > end
            {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    for object in objects {
        ensure(client, object).await?;
    }
    Ok(())
}
