//! The ControllerRevision that records the spec a VMI was made from.

use super::{owner, text};
use crate::instancetype::{Matcher, Role};
use serde_json::{Value, json};

pub(super) fn render(vm: &Value, name: &str, generation: i64) -> Value {
    let (vm_name, uid) =
        (text(vm, "/metadata/name").unwrap_or_default(), text(vm, "/metadata/uid").unwrap_or_default());
    let mut spec = vm.get("spec").cloned().unwrap_or_default();
    for matcher in Role::ALL.into_iter().filter_map(|role| Matcher::of(role, vm)) {
        if let Some(revision) = matcher.revision {
            spec[matcher.role.field()]["revisionName"] = json!(revision);
        }
    }
    json!({
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {
            "name": name,
            "namespace": text(vm, "/metadata/namespace").unwrap_or_default(),
            "ownerReferences": [owner("kubevirt.io/v1", "VirtualMachine", vm_name, uid)],
        },
        "revision": generation,
        "data": {"spec": spec},
    })
}
