//! The columns of built-in kinds.

use serde_json::Value;

use super::cells::{age, modes, node_address, node_roles, node_status, or_none, or_unset, pod_reason, span};
use crate::semantics::Resource;
use crate::semantics::seconds;
use crate::semantics::value::{deleting, items, name, text};

/// A column and how its cell is made.
pub(super) struct Column {
    pub name: &'static str,
    pub kind: &'static str,
    pub priority: i64,
    pub cell: fn(&Value, i64) -> Value,
}

const fn col(name: &'static str, kind: &'static str, priority: i64, cell: fn(&Value, i64) -> Value) -> Column {
    Column { name, kind, priority, cell }
}

const fn string(name: &'static str, cell: fn(&Value, i64) -> Value) -> Column {
    col(name, "string", 0, cell)
}

const fn wide(name: &'static str, cell: fn(&Value, i64) -> Value) -> Column {
    col(name, "string", 1, cell)
}

fn created(o: &Value, at: i64) -> Value {
    age(text(o, "/metadata/creationTimestamp"), at).into()
}

const AGE: Column = string("Age", created);

/// A text at a path as it is.
macro_rules! plain {
    ($path:literal) => {
        |o, _| text(o, $path).into()
    };
}

fn count(o: &Value, pointer: &str) -> Value {
    match o.pointer(pointer) {
        Some(Value::Object(m)) => m.len().into(),
        Some(Value::Array(a)) => a.len().into(),
        _ => 0.into(),
    }
}

static PODS: [Column; 8] = [
    string("Ready", |o, _| {
        let ready = items(o, "/status/containerStatuses")
            .iter()
            .filter(|c| c.get("ready").and_then(Value::as_bool) == Some(true) && c.pointer("/state/running").is_some())
            .count();
        format!("{ready}/{}", items(o, "/spec/containers").len()).into()
    }),
    string("Status", |o, _| pod_reason(o).into()),
    string("Restarts", |o, at| {
        let mut total = 0;
        let mut last = None;
        for c in items(o, "/status/containerStatuses") {
            total += c.get("restartCount").and_then(Value::as_i64).unwrap_or(0);
            last = last.max(seconds(text(c, "/lastState/terminated/finishedAt")));
        }
        match last {
            Some(t) if total > 0 => format!("{total} ({} ago)", span(at - t)).into(),
            _ => total.to_string().into(),
        }
    }),
    AGE,
    wide("IP", |o, _| or_none(text(o, "/status/podIP"))),
    wide("Node", |o, _| or_none(text(o, "/spec/nodeName"))),
    wide("Nominated Node", |o, _| or_none(text(o, "/status/nominatedNodeName"))),
    wide("Readiness Gates", |o, _| {
        let gates = items(o, "/spec/readinessGates");
        if gates.is_empty() {
            return "<none>".into();
        }
        let met = gates
            .iter()
            .filter(|g| {
                items(o, "/status/conditions")
                    .iter()
                    .any(|c| text(c, "/type") == text(g, "/conditionType") && text(c, "/status") == "True")
            })
            .count();
        format!("{met}/{}", gates.len()).into()
    }),
];

static NODES: [Column; 9] = [
    string("Status", |o, _| node_status(o).into()),
    string("Roles", |o, _| node_roles(o)),
    AGE,
    string("Version", plain!("/status/nodeInfo/kubeletVersion")),
    wide("Internal-IP", |o, _| node_address(o, "InternalIP")),
    wide("External-IP", |o, _| node_address(o, "ExternalIP")),
    wide("OS-Image", |o, _| text(o, "/status/nodeInfo/osImage").into()),
    wide("Kernel-Version", |o, _| text(o, "/status/nodeInfo/kernelVersion").into()),
    wide("Container-Runtime", |o, _| text(o, "/status/nodeInfo/containerRuntimeVersion").into()),
];

static NAMESPACES: [Column; 2] = [string("Status", plain!("/status/phase")), AGE];

static SECRETS: [Column; 3] = [string("Type", plain!("/type")), string("Data", |o, _| count(o, "/data")), AGE];

static CONFIG_MAPS: [Column; 2] = [
    string("Data", |o, _| {
        (count(o, "/data").as_i64().unwrap_or(0) + count(o, "/binaryData").as_i64().unwrap_or(0)).into()
    }),
    AGE,
];

static ACCOUNTS: [Column; 1] = [AGE];

static CLAIMS: [Column; 8] = [
    string("Status", |o, _| if deleting(o) { "Terminating".into() } else { text(o, "/status/phase").into() }),
    string("Volume", plain!("/spec/volumeName")),
    string("Capacity", |o, _| {
        if text(o, "/spec/volumeName").is_empty() { "".into() } else { text(o, "/status/capacity/storage").into() }
    }),
    string("Access Modes", |o, _| {
        if text(o, "/spec/volumeName").is_empty() { "".into() } else { modes(o, "/status/accessModes").into() }
    }),
    string("StorageClass", plain!("/spec/storageClassName")),
    string("VolumeAttributesClass", |o, _| or_unset(text(o, "/spec/volumeAttributesClassName"))),
    AGE,
    wide("VolumeMode", plain!("/spec/volumeMode")),
];

static VOLUMES: [Column; 10] = [
    string("Capacity", plain!("/spec/capacity/storage")),
    string("Access Modes", |o, _| modes(o, "/spec/accessModes").into()),
    string("Reclaim Policy", plain!("/spec/persistentVolumeReclaimPolicy")),
    string("Status", |o, _| if deleting(o) { "Terminating".into() } else { text(o, "/status/phase").into() }),
    string("Claim", |o, _| {
        let (ns, n) = (text(o, "/spec/claimRef/namespace"), text(o, "/spec/claimRef/name"));
        if n.is_empty() { "".into() } else { format!("{ns}/{n}").into() }
    }),
    string("StorageClass", plain!("/spec/storageClassName")),
    string("VolumeAttributesClass", |o, _| or_unset(text(o, "/spec/volumeAttributesClassName"))),
    string("Reason", plain!("/status/reason")),
    AGE,
    wide("VolumeMode", plain!("/spec/volumeMode")),
];

fn event_time(o: &Value, at: i64) -> Value {
    let times =
        ["/series/lastObservedTime", "/lastTimestamp", "/deprecatedLastTimestamp", "/eventTime", "/firstTimestamp"];
    times.iter().find_map(|p| seconds(text(o, p))).map_or_else(|| "<unknown>".into(), |t| span(at - t).into())
}

fn event_about(o: &Value) -> Value {
    let about = if o.get("regarding").is_some() { "/regarding" } else { "/involvedObject" };
    let (kind, n) = (text(o, &format!("{about}/kind")).to_lowercase(), text(o, &format!("{about}/name")));
    if n.is_empty() { kind.into() } else { format!("{kind}/{n}").into() }
}

static EVENTS: [Column; 10] = [
    string("Last Seen", event_time),
    string("Type", plain!("/type")),
    string("Reason", plain!("/reason")),
    string("Object", |o, _| event_about(o)),
    wide("Subobject", |o, _| {
        let own = text(o, "/involvedObject/fieldPath");
        if own.is_empty() { text(o, "/regarding/fieldPath") } else { own }.into()
    }),
    wide("Source", |o, _| {
        let source = if o.get("deprecatedSource").is_some() { "/deprecatedSource" } else { "/source" };
        let mut who = text(o, &format!("{source}/component")).to_owned();
        if who.is_empty() {
            who = [text(o, "/reportingComponent"), text(o, "/reportingController")].concat();
        }
        let host = text(o, &format!("{source}/host"));
        if host.is_empty() { who.into() } else { format!("{who}, {host}").into() }
    }),
    string("Message", |o, _| [text(o, "/message"), text(o, "/note")].concat().trim().into()),
    wide("First Seen", |o, at| {
        let times = ["/firstTimestamp", "/deprecatedFirstTimestamp", "/eventTime"];
        times.iter().find_map(|p| seconds(text(o, p))).map_or_else(|| "<unknown>".into(), |t| span(at - t).into())
    }),
    wide("Count", |o, _| {
        ["/series/count", "/count", "/deprecatedCount"]
            .iter()
            .find_map(|p| o.pointer(p).and_then(Value::as_i64))
            .unwrap_or(1)
            .to_string()
            .into()
    }),
    wide("Name", |o, _| name(o).into()),
];

static LEASES: [Column; 2] = [string("Holder", plain!("/spec/holderIdentity")), AGE];

static REVISIONS: [Column; 3] = [
    string("Controller", |o, _| {
        let owner = items(o, "/metadata/ownerReferences")
            .iter()
            .find(|r| r.get("controller").and_then(Value::as_bool) == Some(true));
        owner.map_or_else(
            || "<none>".into(),
            |r| {
                let group = text(r, "/apiVersion").split_once('/').map_or("", |(g, _)| g);
                let dot = if group.is_empty() { "" } else { "." };
                format!("{}{dot}{group}/{}", text(r, "/kind").to_lowercase(), text(r, "/name")).into()
            },
        )
    }),
    string("Revision", |o, _| o.get("revision").and_then(Value::as_i64).unwrap_or(0).into()),
    AGE,
];

static PRIORITIES: [Column; 4] = [
    string("Value", |o, _| o.get("value").and_then(Value::as_i64).unwrap_or(0).into()),
    string("Global-Default", |o, _| o.get("globalDefault").and_then(Value::as_bool).unwrap_or(false).into()),
    AGE,
    string("PreemptionPolicy", plain!("/preemptionPolicy")),
];

static CLASSES: [Column; 5] = [
    string("Provisioner", plain!("/provisioner")),
    string("ReclaimPolicy", plain!("/reclaimPolicy")),
    string("VolumeBindingMode", plain!("/volumeBindingMode")),
    string("AllowVolumeExpansion", |o, _| {
        o.get("allowVolumeExpansion").and_then(Value::as_bool).unwrap_or(false).into()
    }),
    AGE,
];

static ROLES: [Column; 1] = [col("Created At", "date", 0, |o, _| text(o, "/metadata/creationTimestamp").into())];

fn subjects(o: &Value, kind: &str) -> Value {
    items(o, "/subjects")
        .iter()
        .filter(|s| text(s, "/kind") == kind)
        .map(|s| match text(s, "/namespace") {
            "" => text(s, "/name").to_owned(),
            ns => format!("{ns}/{}", text(s, "/name")),
        })
        .collect::<Vec<_>>()
        .join(", ")
        .into()
}

static BINDINGS: [Column; 5] = [
    string("Role", |o, _| format!("{}/{}", text(o, "/roleRef/kind"), text(o, "/roleRef/name")).into()),
    AGE,
    wide("Users", |o, _| subjects(o, "User")),
    wide("Groups", |o, _| subjects(o, "Group")),
    wide("ServiceAccounts", |o, _| subjects(o, "ServiceAccount")),
];

static DEFINITIONS: [Column; 1] = [col("Created At", "date", 0, |o, _| text(o, "/metadata/creationTimestamp").into())];

static API_SERVICES: [Column; 3] = [
    string("Service", |o, _| match text(o, "/spec/service/name") {
        "" => "Local".into(),
        n => format!("{}/{n}", text(o, "/spec/service/namespace")).into(),
    }),
    string("Available", |o, _| {
        items(o, "/status/conditions")
            .iter()
            .find(|c| text(c, "/type") == "Available")
            .map_or("Unknown", |c| text(c, "/status"))
            .into()
    }),
    AGE,
];

static QUOTAS: [Column; 3] = [string("Request", |o, _| used(o, false)), string("Limit", |o, _| used(o, true)), AGE];

fn used(o: &Value, limits: bool) -> Value {
    let hard = o.pointer("/status/hard").and_then(Value::as_object);
    hard.into_iter()
        .flatten()
        .filter(|(k, _)| k.starts_with("limits.") == limits)
        .map(|(k, v)| {
            let now = o.pointer("/status/used").and_then(|u| u.get(k)).and_then(Value::as_str).unwrap_or("0");
            format!("{k}: {now}/{}", v.as_str().unwrap_or_default())
        })
        .collect::<Vec<_>>()
        .join(", ")
        .into()
}

/// The columns behind the name, where kube-apiserver has own ones for the kind.
pub(super) fn of(resource: &Resource) -> Option<&'static [Column]> {
    Some(match resource.kind.as_str() {
        "Pod" => &PODS,
        "Node" => &NODES,
        "Namespace" => &NAMESPACES,
        "Secret" => &SECRETS,
        "ConfigMap" => &CONFIG_MAPS,
        "ServiceAccount" => &ACCOUNTS,
        "PersistentVolumeClaim" => &CLAIMS,
        "PersistentVolume" => &VOLUMES,
        "Event" => &EVENTS,
        "Lease" => &LEASES,
        "ControllerRevision" => &REVISIONS,
        "PriorityClass" => &PRIORITIES,
        "StorageClass" => &CLASSES,
        "Role" | "ClusterRole" => &ROLES,
        "RoleBinding" | "ClusterRoleBinding" => &BINDINGS,
        "CustomResourceDefinition" => &DEFINITIONS,
        "APIService" => &API_SERVICES,
        "ResourceQuota" => &QUOTAS,
        _ => return None,
    })
}
