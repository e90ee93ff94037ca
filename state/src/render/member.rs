//! An instance of a set.

use super::{API_VERSION, Error, owner, text};
use crate::object::Kind;
use api::names;
use serde_json::{Map, Value, json};

/// The template as it stands, under the derived name, controlled by the set. Each instance is a trace of its own, and names that of
/// the set's last write.
pub(super) fn render(set: &Value, name: &str) -> Result<Value, Error> {
    let spec = match set.pointer("/spec/template/spec") {
        Some(Value::Object(s)) => s.clone(),
        Some(_) | None => {
            return Err(Error::Unusable { field: "spec.template.spec".into(), problem: "it is missing".into() });
        }
    };
    let map = |pointer: &str| match set.pointer(pointer) {
        Some(Value::Object(m)) => m.clone(),
        Some(_) | None => Map::new(),
    };
    let mut annotations = map("/spec/template/metadata/annotations");
    annotations.remove(names::ANN_TRACEPARENT);
    annotations.remove(names::ANN_MADE_BY);
    let written = set.pointer("/metadata/annotations").and_then(|a| a.get(names::ANN_TRACEPARENT));
    annotations.extend(written.map(|trace| (names::ANN_MADE_BY.to_owned(), trace.clone())));
    let (set_name, uid) =
        (text(set, "/metadata/name").unwrap_or_default(), text(set, "/metadata/uid").unwrap_or_default());
    let kind = Kind::VirtualMachineInstanceReplicaSet.name();
    Ok(json!({
        "apiVersion": API_VERSION,
        "kind": Kind::VirtualMachineInstance.name(),
        "metadata": {
            "name": name,
            "namespace": text(set, "/metadata/namespace").unwrap_or_default(),
            "labels": map("/spec/template/metadata/labels"),
            "annotations": annotations,
            "finalizers": [names::FINALIZER_VMI],
            "ownerReferences": [owner(API_VERSION, kind, set_name, uid)],
        },
        "spec": spec,
    }))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_template_becomes_an_instance_that_the_set_controls() {
        let set = json!({
            "metadata": {"name": "web", "namespace": "ns", "uid": "u",
                "annotations": {"virtfold.io/traceparent": "00-a-b-01", "other": "x"}},
            "spec": {"template": {
                "metadata": {"name": "other", "labels": {"a": "b"},
                    "annotations": {"virtfold.io/traceparent": "fake", "k": "v"}},
                "spec": {"domain": {"devices": {"weird": [1]}}, "somethingNew": {"x": 1}},
            }},
        });
        let vmi = render(&set, "web-1").unwrap();
        assert_eq!(
            vmi["metadata"],
            json!({
                "name": "web-1", "namespace": "ns", "labels": {"a": "b"}, "annotations": {"k": "v", "virtfold.io/made-by": "00-a-b-01"},
                "finalizers": ["kubevirt.io/foregroundDeleteVirtualMachine"],
                "ownerReferences": [{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceReplicaSet",
                    "name": "web", "uid": "u", "controller": true, "blockOwnerDeletion": true}],
            })
        );
        assert_eq!(vmi["spec"], set["spec"]["template"]["spec"], "unknown fields stay");
        assert!(render(&json!({"metadata": {"name": "x"}, "spec": {}}), "x-1").is_err());
    }
}
