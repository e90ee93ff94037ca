//! How lists and maps of built-in kinds merge: facts of the published API that the generated schemas do not carry. They are put
//! into the schemas, where strategic merge patch, server-side apply and clients read them.

use serde_json::{Map, Value, json};

/// Lists: the types that hold them, their fields, what tells the items in an apply (keys, `=` their values, "" nothing: the list is
/// one value), and in a strategic merge patch (a key, `=` their values, "" nothing: the list is replaced).
const LISTS: &[(&str, &str, &str, &str)] = &[
    ("ObjectMeta", "finalizers", "=", "="),
    ("ObjectMeta", "ownerReferences", "uid", "uid"),
    (
        "PodSpec",
        "containers initContainers ephemeralContainers volumes imagePullSecrets resourceClaims schedulingGates",
        "name",
        "name",
    ),
    ("PodSpec", "hostAliases", "ip", "ip"),
    ("PodSpec", "topologySpreadConstraints", "topologyKey whenUnsatisfiable", "topologyKey"),
    ("PodStatus", "hostIPs", "", "ip"),
    ("PodStatus", "podIPs", "ip", "ip"),
    ("PodStatus", "resourceClaimStatuses", "name", "name"),
    ("Container EphemeralContainer", "env", "name", "name"),
    ("Container EphemeralContainer", "ports", "containerPort protocol", "containerPort"),
    ("Container EphemeralContainer", "volumeMounts", "mountPath", "mountPath"),
    ("Container EphemeralContainer", "volumeDevices", "devicePath", "devicePath"),
    ("ContainerStatus", "volumeMounts", "mountPath", "mountPath"),
    ("ContainerStatus", "allocatedResourcesStatus", "name", "name"),
    ("ContainerRestartRuleOnExitCodes", "values", "=", ""),
    ("ResourceRequirements", "claims", "name", ""),
    ("ResourceStatus", "resources", "resourceID", ""),
    ("NodeSpec", "podCIDRs", "=", "="),
    ("NodeStatus", "addresses", "type", "type"),
    ("NodeStatus NamespaceStatus PodStatus PersistentVolumeClaimStatus APIServiceStatus", "conditions", "type", "type"),
    ("CustomResourceDefinitionStatus", "conditions", "type", ""),
    ("JSONSchemaProps", "x-kubernetes-validations", "rule", "rule"),
    ("ServiceAccount", "secrets", "name", "name"),
];

/// Lists of which a patch says with `$retainKeys` which fields of an item stay.
const RETAIN: &[(&str, &str)] =
    &[("PodSpec", "volumes"), ("PodSpec", "resourceClaims"), ("PodStatus", "resourceClaimStatuses")];

/// Types that are one value.
const WHOLE: &[&str] = &[
    "ConfigMapKeySelector",
    "CrossVersionObjectReference",
    "FileKeySelector",
    "LabelSelector",
    "LocalObjectReference",
    "NodeSelector",
    "NodeSelectorTerm",
    "ObjectFieldSelector",
    "ObjectReference",
    "OwnerReference",
    "ResourceFieldSelector",
    "RoleRef",
    "ScopeSelector",
    "SecretKeySelector",
    "SecretReference",
    "Subject",
    "TopologySelectorTerm",
    "TypedLocalObjectReference",
];

/// Fields whose map is one value, or is not although its type is.
const MAPS: &[(&str, &str, &str)] = &[
    ("PodSpec", "nodeSelector", "atomic"),
    ("PersistentVolumeSpec", "claimRef", "granular"),
    ("PersistentVolumeClaimStatus", "allocatedResourceStatuses", "granular"),
];

fn each(definitions: &mut Map<String, Value>, holders: &str, mut act: impl FnMut(&mut Value)) {
    for (name, definition) in definitions.iter_mut() {
        let name = name.rsplit('.').next().unwrap_or_default();
        if holders.split(' ').any(|h| h == name) {
            act(definition);
        }
    }
}

/// Puts the facts into the definitions.
pub(super) fn annotate(definitions: &mut Map<String, Value>) {
    for (holders, fields, keys, merge) in LISTS {
        each(definitions, holders, |definition| {
            for field in fields.split(' ') {
                let Some(property) = definition.pointer_mut(&format!("/properties/{field}")) else { continue };
                let kind = match *keys {
                    "" => "atomic",
                    "=" => "set",
                    _ => "map",
                };
                property["x-kubernetes-list-type"] = kind.into();
                if kind == "map" {
                    property["x-kubernetes-list-map-keys"] = keys.split(' ').collect::<Vec<_>>().into();
                }
                if !merge.is_empty() {
                    property["x-kubernetes-patch-strategy"] = "merge".into();
                }
                if !matches!(*merge, "" | "=") {
                    property["x-kubernetes-patch-merge-key"] = (*merge).into();
                }
            }
        });
    }
    for (holder, field) in RETAIN {
        each(definitions, holder, |definition| {
            if let Some(property) = definition.pointer_mut(&format!("/properties/{field}")) {
                property["x-kubernetes-patch-strategy"] = "merge,retainKeys".into();
            }
        });
    }
    for (holder, field, kind) in MAPS {
        each(definitions, holder, |definition| {
            if let Some(property) = definition.pointer_mut(&format!("/properties/{field}")) {
                property["x-kubernetes-map-type"] = (*kind).into();
            }
        });
    }
    for name in WHOLE {
        each(definitions, name, |definition| definition["x-kubernetes-map-type"] = "atomic".into());
    }
    // What is left out of a key is nothing.
    let mut items: Vec<(String, &str)> = Vec::new();
    for (holders, fields, keys, _) in LISTS.iter().filter(|l| !matches!(l.2, "" | "=")) {
        each(definitions, holders, |definition| {
            for field in fields.split(' ') {
                let reference = definition.pointer(&format!("/properties/{field}/items/$ref")).and_then(Value::as_str);
                items.extend(reference.and_then(|r| r.rsplit('.').next()).map(|r| (r.to_owned(), *keys)));
            }
        });
    }
    for (holder, keys) in items {
        each(definitions, &holder, |definition| {
            for key in keys.split(' ') {
                let Some(property) = definition.pointer_mut(&format!("/properties/{key}")) else { continue };
                property["default"] = if property["type"] == "integer" { 0.into() } else { "".into() };
            }
        });
    }
    // The key of a port that says no protocol.
    each(definitions, "ContainerPort", |definition| {
        if let Some(property) = definition.pointer_mut("/properties/protocol") {
            property["default"] = "TCP".into();
        }
    });
}

/// An object of which nothing has been said: the fields that Go types have anyway.
pub(super) fn blank(kind: &str) -> Value {
    let own = match kind {
        "Namespace" | "PersistentVolume" | "ResourceQuota" | "APIService" => json!({"spec": {}, "status": {}}),
        "Node" => json!({"spec": {}, "status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 0}}, "nodeInfo": {
            "machineID": "", "systemUUID": "", "bootID": "", "kernelVersion": "", "osImage": "",
            "containerRuntimeVersion": "", "kubeletVersion": "", "kubeProxyVersion": "", "operatingSystem": "",
            "architecture": "",
        }}}),
        "Pod" => json!({"spec": {"containers": null}, "status": {}}),
        "PersistentVolumeClaim" => json!({"spec": {"resources": {}}, "status": {}}),
        "LimitRange" => json!({"spec": {"limits": null}}),
        "Lease" => json!({"spec": {}}),
        "Event" => json!({"involvedObject": {}, "source": {}, "firstTimestamp": null, "lastTimestamp": null,
            "eventTime": null, "reportingComponent": "", "reportingInstance": ""}),
        "ControllerRevision" => json!({"data": null, "revision": 0}),
        "PriorityClass" => json!({"value": 0}),
        "StorageClass" => json!({"provisioner": ""}),
        "Role" | "ClusterRole" => json!({"rules": null}),
        "RoleBinding" | "ClusterRoleBinding" => json!({"roleRef": {"apiGroup": "", "kind": "", "name": ""}}),
        "CustomResourceDefinition" => json!({
            "spec": {"group": "", "names": {"plural": "", "kind": ""}, "scope": "", "versions": null},
            "status": {"conditions": null, "acceptedNames": {"plural": "", "kind": ""}, "storedVersions": null},
        }),
        kind if kind.ends_with("Review") => json!({"spec": {}, "status": {"allowed": false, "user": {}}}),
        _ => json!({}),
    };
    let mut blank = own;
    blank["metadata"] = json!({});
    blank
}
