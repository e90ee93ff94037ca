//! The policy that keeps the control plane's fields for the control plane, whether a gateway answers or not: the API server
//! itself carries it out.
//!
//! Whoever could write an instance's status could start it twice (`status.activePods` is what authorises a start), so only the
//! control plane may; the same holds for the labels and the annotation that say where an instance is. Where the gateway answers
//! it has undone such a change before this is asked, as KubeVirt does; here it is refused.

use serde_json::{Value, json};

use crate::admission::RESERVED_LABELS;

/// Name of the policy and of its binding.
const NAME: &str = "virtfold-instances";

/// The objects. `trusted` are the users of the control plane.
pub fn objects(trusted: &[String]) -> Vec<Value> {
    let of = |object: &str, part: &str| format!("has({object}.metadata.{part}) ? {object}.metadata.{part} : {{}}");
    let before = |part: &str| format!("oldObject == null ? {{}} : ({})", of("oldObject", part));
    let same = |key: &str, part: &str| {
        format!(
            "(({key} in variables.{part}) == ({key} in variables.old_{part}) && \
             (!({key} in variables.{part}) || variables.{part}[{key}] == variables.old_{part}[{key}]))"
        )
    };
    let kept = |field: &str| {
        format!(
            "request.operation == 'CREATE' || (has(object.{field}) == has(oldObject.{field}) && \
             (!has(object.{field}) || object.{field} == oldObject.{field}))"
        )
    };
    let labels = json!(RESERVED_LABELS);
    let boot = json!(api::names::ANN_BOOT_ID);
    let validation = |expression: String, message: &str| json!({"expression": expression, "message": message});
    vec![
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": NAME},
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": [{
                    "apiGroups": [api::names::GROUP], "apiVersions": ["*"], "operations": ["CREATE", "UPDATE"],
                    "resources": ["virtualmachineinstances", "virtualmachineinstances/status"]}]},
                "matchConditions": [{"name": "not-the-control-plane",
                    "expression": format!("!(request.userInfo.username in {})", json!(trusted))}],
                "variables": [
                    {"name": "labels", "expression": of("object", "labels")},
                    {"name": "old_labels", "expression": before("labels")},
                    {"name": "annotations", "expression": of("object", "annotations")},
                    {"name": "old_annotations", "expression": before("annotations")},
                ],
                "validations": [
                    validation(kept("spec"), "update of VMI object is restricted"),
                    validation(kept("status"), "the status of a VMI is the control plane's"),
                    validation(
                        "request.operation != 'CREATE' || !has(object.status) || \
                         !(has(object.status.activePods) || has(object.status.nodeName))".into(),
                        "a new VMI has no place yet",
                    ),
                    validation(
                        format!("{labels}.all(l, {})", same("l", "labels")),
                        "modification of the following reserved kubevirt.io/ labels on a VMI object is prohibited",
                    ),
                    validation(
                        same(&boot.to_string(), "annotations"),
                        "the boot in which an instance was started is the control plane's word",
                    ),
                ],
            },
        }),
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": NAME},
            "spec": {"policyName": NAME, "validationActions": ["Deny"]},
        }),
    ]
}
