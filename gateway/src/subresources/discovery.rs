//! What the API says about itself.

use api::names::SUBRESOURCE_GROUP;
use serde_json::{Value, json};

const INSTANCE: &[&str] = &[
    "vnc",
    "vnc/screenshot",
    "console",
    "portforward",
    "backup",
    "redefine-checkpoint",
    "pause",
    "unpause",
    "freeze",
    "unfreeze",
    "reset",
    "softreboot",
    "guestosinfo",
    "userlist",
    "filesystemlist",
    "addvolume",
    "removevolume",
    "objectgraph",
    "sev/fetchcertchain",
    "sev/querylaunchmeasurement",
    "sev/setupsession",
    "sev/injectlaunchsecret",
    "evacuate/cancel",
    "explain",
];
const MACHINE: &[&str] =
    &["start", "stop", "restart", "migrate", "expand-spec", "objectgraph", "evacuate/cancel", "portforward", "explain"];

/// APIGroup.
pub(super) fn group(versions: &[&str]) -> Value {
    let list: Vec<Value> =
        versions.iter().map(|v| json!({"groupVersion": format!("{SUBRESOURCE_GROUP}/{v}"), "version": v})).collect();
    json!({"kind": "APIGroup", "apiVersion": "v1", "name": SUBRESOURCE_GROUP, "versions": list, "preferredVersion": list[0]})
}

/// APIResourceList of a version.
pub(super) fn resources(version: &str) -> Value {
    let entry = |name: String, namespaced: bool| json!({"name": name, "singularName": "", "namespaced": namespaced, "kind": "", "verbs": []});
    let mut list = vec![entry("expand-vm-spec".into(), true)];
    list.push(entry("usage".into(), true));
    list.push(entry("nodes/explain".into(), false));
    for (resource, all) in [
        ("virtualmachineinstancereplicasets", &["explain"][..]),
        ("virtualmachineinstances", INSTANCE),
        ("virtualmachines", MACHINE),
    ] {
        list.extend(all.iter().map(|sub| entry(format!("{resource}/{sub}"), true)));
    }
    json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": format!("{SUBRESOURCE_GROUP}/{version}"), "resources": list})
}

/// Build information.
pub(super) fn version() -> Value {
    json!({
        "gitVersion": concat!("v", env!("CARGO_PKG_VERSION")),
        "gitCommit": option_env!("VIRTFOLD_COMMIT").unwrap_or(""),
        "gitTreeState": "",
        "buildDate": option_env!("VIRTFOLD_BUILD_DATE").unwrap_or("1970-01-01T00:00:00Z"),
        "goVersion": "",
        "compiler": "rustc",
        "platform": concat!("linux/", "amd64"),
    })
}
