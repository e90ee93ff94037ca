//! The VMI of a VM.

use super::{Error, owner, text};
use crate::{
    Timestamp,
    instancetype::{self, Matcher, Role},
    observe::Phase,
};
use api::names;
use serde_json::{Map, Value, json};
use sha1::{Digest, Sha1};

/// The `spec` of the instancetype and of the preference that count; null for none.
#[derive(Debug, Default)]
pub(super) struct Patterns {
    pub instancetype: Value,
    pub preference: Value,
}

pub(super) fn render(
    vm: &Value,
    revision: &str,
    paused: bool,
    at: Timestamp,
    patterns: &Patterns,
) -> Result<Value, Error> {
    let name = text(vm, "/metadata/name").unwrap_or_default();
    let uid = text(vm, "/metadata/uid").unwrap_or_default();
    let generation = vm.pointer("/metadata/generation").and_then(Value::as_i64).unwrap_or_default();
    let (mut metadata, mut spec) = (json!({}), Value::Null);
    if let Some(template) = vm.pointer("/spec/template") {
        metadata["annotations"] = template.pointer("/metadata/annotations").cloned().unwrap_or_default();
        spec = template.get("spec").cloned().unwrap_or_default();
    }
    if spec.is_object() {
        let Patterns { instancetype, preference } = patterns;
        instancetype::apply(instancetype, preference, &mut spec, &mut metadata, "spec").map_err(|conflicts| {
            Error::Conflict(conflicts.into_iter().map(|c| c.field).collect::<Vec<_>>().join(", "))
        })?;
    }
    let mut spec = match spec {
        Value::Object(s) => s,
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            return Err(Error::Unusable { field: "spec.template.spec".into(), problem: "it is missing".into() });
        }
    };
    if paused {
        spec.insert("startStrategy".into(), json!("Paused"));
    }
    firmware_uuid(&mut spec, name);
    let map = |value: Option<&Value>| value.and_then(Value::as_object).cloned().unwrap_or_default();
    let labels = map(vm.pointer("/spec/template/metadata/labels"));
    let mut annotations = map(metadata.get("annotations"));
    for matcher in Role::ALL.into_iter().filter_map(|role| Matcher::of(role, vm)) {
        if let Some(pattern) = matcher.pattern() {
            annotations.insert(matcher.role.annotation(pattern), json!(matcher.name));
        }
    }
    annotations.insert(names::ANN_VM_GENERATION.into(), json!(generation.to_string()));
    // A template may not pretend to be another trace or another user, nor to have been started before.
    annotations.remove(names::ANN_TRACEPARENT);
    annotations.remove(names::ANN_BEGAN);
    annotations.remove(names::ANN_CHANGED_BY);
    annotations.remove(names::ANN_BOOT_ID);
    if let Some(t) = vm.pointer("/metadata/annotations").and_then(|a| a.get(names::ANN_TRACEPARENT)) {
        annotations.insert(names::ANN_TRACEPARENT.into(), t.clone());
    }
    let phase = Phase::Pending.name();
    Ok(json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {
            "name": name,
            "namespace": text(vm, "/metadata/namespace").unwrap_or_default(),
            "labels": labels,
            "annotations": annotations,
            "finalizers": [names::FINALIZER_VM, names::FINALIZER_VMI],
            "ownerReferences": [owner("kubevirt.io/v1", "VirtualMachine", name, uid)],
        },
        "spec": spec,
        "status": {
            "phase": phase,
            "virtualMachineRevisionName": revision,
            "phaseTransitionTimestamps": [{"phase": phase, "phaseTransitionTimestamp": at.to_string()}],
        },
    }))
}

/// The firmware UUID is the template's, else derived from the VM's name, so that a guest keeps its identity.
fn firmware_uuid(spec: &mut Map<String, Value>, name: &str) {
    let domain = spec.entry("domain").or_insert_with(|| json!({}));
    let Some(domain) = domain.as_object_mut() else { return };
    let firmware = domain.entry("firmware").or_insert_with(|| json!({}));
    let Some(firmware) = firmware.as_object_mut() else { return };
    if firmware.get("uuid").and_then(Value::as_str).is_none_or(str::is_empty) {
        firmware.insert("uuid".into(), json!(uuid_v5(names::FIRMWARE_UUID_NAMESPACE, name)));
    }
}

/// UUID version 5 (SHA-1 of a namespace UUID and a name).
pub fn uuid_v5(namespace: &str, name: &str) -> String {
    let hex: String = namespace.chars().filter(|c| *c != '-').collect();
    let mut h = Sha1::new();
    for i in (0..hex.len()).step_by(2) {
        h.update([hex.get(i..i + 2).and_then(|b| u8::from_str_radix(b, 16).ok()).unwrap_or(0)]);
    }
    h.update(name.as_bytes());
    let mut b = [0_u8; 16];
    for (to, from) in b.iter_mut().zip(h.finalize()) {
        *to = from;
    }
    b[6] = (b[6] & 0x0f) | 0x50;
    b[8] = (b[8] & 0x3f) | 0x80;
    let hex: String = b.iter().map(|x| format!("{x:02x}")).collect();
    let part = |a: usize, z: usize| hex.get(a..z).unwrap_or_default().to_owned();
    [part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32)].join("-")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn uuid_v5_is_that_of_the_standard() {
        assert_eq!(
            uuid_v5("6ba7b810-9dad-11d1-80b4-00c04fd430c8", "python.org"),
            "886313e1-3b8a-5372-9b90-0c9aee199e5d"
        );
    }

    #[test]
    fn the_template_becomes_the_vmi_and_unknown_fields_stay() {
        let vm = json!({
            "metadata": {"name": "web", "namespace": "ns", "uid": "u", "generation": 3,
                "annotations": {"virtfold.io/traceparent": "00-a-b-01", "other": "x"}},
            "spec": {"runStrategy": "Always", "template": {
                "metadata": {"labels": {"a": "b"}, "annotations": {"virtfold.io/traceparent": "fake", "k": "v"}},
                "spec": {"domain": {"devices": {"weird": [1]}}, "somethingNew": {"x": 1}},
            }},
        });
        let vmi = render(&vm, "rev", true, Timestamp(0), &Patterns::default()).unwrap();
        assert_eq!(vmi["spec"]["somethingNew"]["x"], 1);
        assert_eq!(vmi["spec"]["domain"]["devices"]["weird"][0], 1);
        assert_eq!(vmi["spec"]["startStrategy"], "Paused");
        assert_eq!(vmi["spec"]["domain"]["firmware"]["uuid"], uuid_v5(names::FIRMWARE_UUID_NAMESPACE, "web"));
        assert_eq!(vmi["metadata"]["annotations"]["virtfold.io/traceparent"], "00-a-b-01");
        assert_eq!(vmi["metadata"]["annotations"]["kubevirt.io/vm-generation"], "3");
        assert_eq!(vmi["metadata"]["annotations"].get("other"), None);
        assert_eq!(vmi["status"]["phase"], "Pending");
        assert_eq!(vmi["metadata"]["ownerReferences"][0]["uid"], "u");
        let own = json!({"metadata": {"name": "web"}, "spec": {"template": {"spec": {"domain": {"firmware": {"uuid": "mine"}}}}}});
        assert_eq!(
            render(&own, "r", false, Timestamp(0), &Patterns::default()).unwrap()["spec"]["domain"]["firmware"]["uuid"],
            "mine"
        );
        assert!(
            render(&json!({"metadata": {"name": "x"}, "spec": {}}), "r", false, Timestamp(0), &Patterns::default())
                .is_err()
        );
    }
}
