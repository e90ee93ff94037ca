//! Namespaces, nodes, configuration, volumes, leases, classes.

use serde_json::{Value, json};

use crate::semantics::FieldError;
use crate::semantics::names::{self, NameRule};
use crate::semantics::quantity::Quantity;
use crate::semantics::resource::Behaviour;
use crate::semantics::value::{self, child, default, items, meta, name, object, text};

/// What cannot be changed.
pub(super) fn immutable(old: &Value, new: &Value, pointer: &str, why: &str, errors: &mut Vec<FieldError>) {
    let (a, b) = (old.pointer(pointer), new.pointer(pointer));
    if a.unwrap_or(&Value::Null) != b.unwrap_or(&Value::Null) {
        let field = pointer.trim_start_matches('/').replace('/', ".");
        errors.push(FieldError::invalid(field, b.unwrap_or(&Value::Null), why));
    }
}

/// What the server says of a field that cannot be changed.
pub(super) const IMMUTABLE: &str = "field is immutable";

/// Namespaces: they know their name as a label, are active, and are held by their content.
#[derive(Debug)]
pub struct Namespace;

impl Behaviour for Namespace {
    fn default(&self, o: &mut Value) {
        let n = name(o).to_owned();
        let labels = meta(o).entry("labels").or_insert_with(|| json!({}));
        object(labels).insert("kubernetes.io/metadata.name".into(), n.into());
        default(o, &["status", "phase"], "Active");
    }
    fn prepare_create(&self, o: &mut Value) {
        o["spec"] = json!({"finalizers": ["kubernetes"]});
        o["status"] = json!({"phase": "Active"});
    }
    fn prepare_update(&self, old: &Value, new: &mut Value) {
        value::put(object(new), "spec", old.get("spec").cloned());
    }
    fn held(&self, o: &Value) -> bool {
        !items(o, "/spec/finalizers").is_empty()
    }
    fn name_rule(&self) -> NameRule {
        NameRule::Label
    }
    fn selectable(&self) -> &'static [&'static str] {
        &["status.phase"]
    }
}

/// Nodes.
#[derive(Debug)]
pub struct Node;

impl Behaviour for Node {
    fn default(&self, o: &mut Value) {
        let capacity = o.pointer("/status/capacity").cloned();
        if let Some(capacity) = capacity {
            default(o, &["status", "allocatable"], capacity);
        }
    }
    fn selectable(&self) -> &'static [&'static str] {
        &["spec.unschedulable"]
    }
    fn field(&self, o: &Value, path: &str) -> Option<String> {
        (path == "spec.unschedulable")
            .then(|| o.pointer("/spec/unschedulable").and_then(Value::as_bool).unwrap_or(false).to_string())
    }
}

fn check_keys(o: &Value, map: &str, errors: &mut Vec<FieldError>) {
    for (key, _) in o.get(map).and_then(Value::as_object).into_iter().flatten() {
        let good = !key.is_empty()
            && key.len() <= 253
            && key != "."
            && !key.starts_with("..")
            && key.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
        if !good {
            let why = "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')";
            errors.push(FieldError::invalid(format!("{map}[{key}]"), &key.as_str().into(), why));
        }
    }
}

/// The most that the data of one Secret or ConfigMap may weigh.
const DATA_BYTES_MAX: usize = 1 << 20;

fn check_size(o: &Value, field: &'static str, errors: &mut Vec<FieldError>) {
    let total: usize = ["data", "binaryData"]
        .iter()
        .filter_map(|k| o.get(k).and_then(Value::as_object))
        .flat_map(|m| m.values())
        .filter_map(Value::as_str)
        .map(str::len)
        .sum();
    if total > DATA_BYTES_MAX * 4 / 3 {
        errors.push(FieldError::too_long(field, DATA_BYTES_MAX as u64));
    }
}

fn frozen(old: &Value, new: &Value, fields: &[&str], errors: &mut Vec<FieldError>) {
    if old.get("immutable").and_then(Value::as_bool) == Some(true) {
        for f in fields {
            if old.get(f).unwrap_or(&Value::Null) != new.get(f).unwrap_or(&Value::Null) {
                errors.push(FieldError::forbidden(*f, "field is immutable when `immutable` is set"));
            }
        }
    }
}

/// Secrets: `stringData` is folded into `data`.
#[derive(Debug)]
pub struct Secret;

impl Behaviour for Secret {
    fn default(&self, o: &mut Value) {
        use base64::Engine;
        default(o, &["type"], "Opaque");
        if let Some(Value::Object(plain)) = object(o).remove("stringData") {
            let data = child(o, "data");
            for (k, v) in plain {
                let v = base64::engine::general_purpose::STANDARD.encode(v.as_str().unwrap_or_default());
                data.insert(k, v.into());
            }
        }
    }
    fn validate(&self, o: &Value, errors: &mut Vec<FieldError>) {
        check_keys(o, "data", errors);
        check_size(o, "data", errors);
        let needs: &[&str] = match text(o, "/type") {
            "kubernetes.io/dockerconfigjson" => &[".dockerconfigjson"],
            "kubernetes.io/dockercfg" => &[".dockercfg"],
            "kubernetes.io/tls" => &["tls.crt", "tls.key"],
            "kubernetes.io/ssh-auth" => &["ssh-privatekey"],
            _ => &[],
        };
        for key in needs {
            if o.get("data").and_then(|d| d.get(key)).is_none() {
                errors.push(FieldError::required(format!("data[{key}]"), ""));
            }
        }
    }
    fn validate_update(&self, old: &Value, new: &Value, errors: &mut Vec<FieldError>) {
        immutable(old, new, "/type", IMMUTABLE, errors);
        frozen(old, new, &["data", "immutable"], errors);
    }
    fn selectable(&self) -> &'static [&'static str] {
        &["type"]
    }
}

/// Config maps.
#[derive(Debug)]
pub struct ConfigMap;

impl Behaviour for ConfigMap {
    fn validate(&self, o: &Value, errors: &mut Vec<FieldError>) {
        check_keys(o, "data", errors);
        check_keys(o, "binaryData", errors);
        check_size(o, "", errors);
    }
    fn validate_update(&self, old: &Value, new: &Value, errors: &mut Vec<FieldError>) {
        frozen(old, new, &["data", "binaryData", "immutable"], errors);
    }
}

const MODES: [&str; 4] = ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"];

fn check_modes(o: &Value, errors: &mut Vec<FieldError>) {
    let modes = items(o, "/spec/accessModes");
    if modes.is_empty() {
        errors.push(FieldError::required("spec.accessModes", "at least 1 access mode is required"));
    }
    for m in modes.iter().filter(|m| !MODES.contains(&m.as_str().unwrap_or_default())) {
        errors.push(FieldError::unsupported("spec.accessModes", m, &MODES.map(str::to_owned)));
    }
}

fn quantity(o: &Value, pointer: &str) -> Option<Quantity> {
    o.pointer(pointer).and_then(Quantity::of)
}

/// Persistent volumes.
#[derive(Debug)]
pub struct Volume;

impl Behaviour for Volume {
    fn default(&self, o: &mut Value) {
        default(o, &["spec", "persistentVolumeReclaimPolicy"], "Retain");
        if o.pointer("/spec/hostPath").is_some() {
            default(o, &["spec", "hostPath", "type"], "");
        }
        default(o, &["spec", "volumeMode"], "Filesystem");
        default(o, &["status", "phase"], "Pending");
    }
    fn prepare_create(&self, o: &mut Value) {
        o["status"] = json!({"phase": "Pending"});
    }
    fn validate(&self, o: &Value, errors: &mut Vec<FieldError>) {
        check_modes(o, errors);
        if o.pointer("/spec/capacity/storage").is_none() {
            errors.push(FieldError::required("spec.capacity", ""));
        }
    }
}

/// Claims on volumes.
#[derive(Debug)]
pub struct Claim;

impl Behaviour for Claim {
    fn default(&self, o: &mut Value) {
        default(o, &["spec", "volumeMode"], "Filesystem");
        default(o, &["status", "phase"], "Pending");
    }
    fn prepare_create(&self, o: &mut Value) {
        o["status"] = json!({"phase": "Pending"});
    }
    fn validate(&self, o: &Value, errors: &mut Vec<FieldError>) {
        check_modes(o, errors);
        match (o.pointer("/spec/resources/requests/storage"), quantity(o, "/spec/resources/requests/storage")) {
            (None, _) => errors.push(FieldError::required("spec.resources[storage]", "")),
            (Some(v), Some(q)) if q.0 <= 0 => {
                errors.push(FieldError::invalid("spec.resources[storage]", v, "must be greater than zero"));
            }
            _ => {}
        }
        let class = text(o, "/spec/storageClassName");
        if !class.is_empty()
            && let Some(why) = names::check_name(NameRule::Subdomain, class)
        {
            errors.push(FieldError::invalid("spec.storageClassName", &class.into(), &why));
        }
    }
    fn validate_update(&self, old: &Value, new: &Value, errors: &mut Vec<FieldError>) {
        let strip = |v: &Value| {
            let mut spec = v.get("spec").cloned().unwrap_or_default();
            let map = object(&mut spec);
            map.remove("resources");
            map.remove("volumeAttributesClassName");
            if text(old, "/spec/volumeName").is_empty() {
                map.remove("volumeName");
            }
            spec
        };
        if strip(old) != strip(new) {
            let why = "spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims";
            errors.push(FieldError::forbidden("spec", why));
        }
        let path = "/spec/resources/requests/storage";
        if let (Some(a), Some(b)) = (quantity(old, path), quantity(new, path))
            && b < a
        {
            let why = "field can not be less than status.capacity";
            errors.push(FieldError::forbidden("spec.resources.requests.storage", why));
        }
    }
}

/// Leases.
#[derive(Debug)]
pub struct Lease;

impl Behaviour for Lease {
    fn validate(&self, o: &Value, errors: &mut Vec<FieldError>) {
        for (field, least) in [("leaseDurationSeconds", 1), ("leaseTransitions", 0)] {
            if let Some(v) = o.pointer(&format!("/spec/{field}"))
                && v.as_i64().is_some_and(|n| n < least)
            {
                let why = if least == 1 { "must be greater than 0" } else { "must be greater than or equal to 0" };
                errors.push(FieldError::invalid(format!("spec.{field}"), v, why));
            }
        }
    }
}

/// Controller revisions: data never changes.
#[derive(Debug)]
pub struct ControllerRevision;

impl Behaviour for ControllerRevision {
    fn validate(&self, o: &Value, errors: &mut Vec<FieldError>) {
        if o.get("data").is_none_or(Value::is_null) {
            errors.push(FieldError::required("data", "data is mandatory"));
        }
    }
    fn validate_update(&self, old: &Value, new: &Value, errors: &mut Vec<FieldError>) {
        immutable(old, new, "/data", IMMUTABLE, errors);
    }
}

/// The highest priority that users may give.
const PRIORITY_MAX: i64 = 1_000_000_000;

/// Priority classes.
#[derive(Debug)]
pub struct PriorityClass;

impl Behaviour for PriorityClass {
    fn default(&self, o: &mut Value) {
        default(o, &["preemptionPolicy"], "PreemptLowerPriority");
        default(o, &["value"], 0);
    }
    fn validate(&self, o: &Value, errors: &mut Vec<FieldError>) {
        let system = name(o).starts_with("system-");
        if o.get("value").and_then(Value::as_i64).unwrap_or(0) > PRIORITY_MAX && !system {
            let why = format!("maximum allowed value of a user defined priority is {PRIORITY_MAX}");
            errors.push(FieldError::forbidden("value", &why));
        }
    }
    fn validate_update(&self, old: &Value, new: &Value, errors: &mut Vec<FieldError>) {
        immutable(old, new, "/value", "may not be changed in an update.", errors);
        immutable(old, new, "/preemptionPolicy", IMMUTABLE, errors);
    }
}

/// Storage classes.
#[derive(Debug)]
pub struct StorageClass;

impl Behaviour for StorageClass {
    fn default(&self, o: &mut Value) {
        default(o, &["reclaimPolicy"], "Delete");
        default(o, &["volumeBindingMode"], "Immediate");
    }
    fn validate(&self, o: &Value, errors: &mut Vec<FieldError>) {
        if text(o, "/provisioner").is_empty() {
            errors.push(FieldError::required("provisioner", ""));
        }
    }
    fn validate_update(&self, old: &Value, new: &Value, errors: &mut Vec<FieldError>) {
        for (field, why) in [
            ("parameters", "updates to parameters are forbidden."),
            ("provisioner", "updates to provisioner are forbidden."),
            ("reclaimPolicy", "updates to reclaimPolicy are forbidden."),
            ("volumeBindingMode", IMMUTABLE),
        ] {
            if old.get(field).unwrap_or(&Value::Null) != new.get(field).unwrap_or(&Value::Null) {
                errors.push(FieldError::forbidden(field, why));
            }
        }
    }
}
