//! The ControllerRevision that records an instancetype or preference for a VM.

use super::{owner, text};
use crate::object::Pattern;
use serde_json::{Value, json};

pub(super) fn render(object: &Value, vm: &str, vm_uid: &str, namespace: &str, name: &str, pattern: Pattern) -> Value {
    let of = |pointer: &str| text(object, pointer).unwrap_or_default();
    let generation = object.pointer("/metadata/generation").and_then(Value::as_i64).unwrap_or_default();
    let mut metadata = object.get("metadata").cloned().unwrap_or_default();
    if let Some(fields) = metadata.as_object_mut() {
        for key in ["labels", "annotations", "finalizers", "ownerReferences", "managedFields"] {
            fields.remove(key);
        }
    }
    let label = |what: &str| format!("instancetype.kubevirt.io/object-{what}");
    json!({
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "ownerReferences": [owner(super::API_VERSION, "VirtualMachine", vm, vm_uid)],
            "labels": {
                label("generation"): generation.to_string(),
                label("kind"): pattern.name(),
                label("name"): of("/metadata/name"),
                label("uid"): of("/metadata/uid"),
                label("version"): Pattern::VERSION,
            },
        },
        "revision": 0,
        "data": {
            "apiVersion": format!("{}/{}", Pattern::GROUP, Pattern::VERSION),
            "kind": pattern.name(),
            "metadata": metadata,
            "spec": object.get("spec").cloned().unwrap_or_default(),
        },
    })
}
