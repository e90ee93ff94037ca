//! Devices that a machine gets without naming them, as in KubeVirt: where they are open to be chosen, what is filled in later
//! (by a preference, by admission's defaults) fills them in, too.

use serde_json::{Value, json};

/// Ways to connect an interface to its network.
pub const BINDINGS: [&str; 8] =
    ["binding", "bridge", "macvtap", "masquerade", "passt", "passtBinding", "slirp", "sriov"];

fn items<'v>(spec: &'v Value, path: &str) -> &'v [Value] {
    spec.pointer(path).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

fn devices(spec: &mut Value) -> &mut Value {
    ["domain", "devices"].into_iter().fold(spec, |place, key| {
        if !place.get(key).is_some_and(Value::is_object) {
            place[key] = json!({});
        }
        &mut place[key]
    })
}

/// Index and name of each volume that nothing in the machine shows.
pub fn volumes_without_disk(spec: &Value) -> Vec<(usize, &str)> {
    let shown = ["/domain/devices/disks", "/domain/devices/filesystems"].into_iter().flat_map(|kind| items(spec, kind));
    let taken: Vec<&Value> = shown.filter_map(|d| d.get("name")).collect();
    items(spec, "/volumes")
        .iter()
        .enumerate()
        .filter(|(_, v)| v.get("memoryDump").is_none())
        .map(|(i, v)| (i, v.get("name").and_then(Value::as_str).unwrap_or_default()))
        .filter(|(_, n)| !n.is_empty() && !taken.iter().any(|t| *t == n))
        .collect()
}

/// A disk for each volume that nothing shows.
pub fn disks(spec: &mut Value) {
    let missing: Vec<Value> =
        volumes_without_disk(spec).into_iter().map(|(_, n)| json!({"name": n, "disk": {}})).collect();
    if missing.is_empty() {
        return;
    }
    match devices(spec).get_mut("disks") {
        Some(Value::Array(all)) => all.extend(missing),
        Some(_) | None => devices(spec)["disks"] = Value::Array(missing),
    }
}

/// An interface on the pod network, where there is none and nobody said that there shall be none.
pub fn network(spec: &mut Value) {
    let none = items(spec, "/domain/devices/interfaces").is_empty() && items(spec, "/networks").is_empty();
    if none && spec.pointer("/domain/devices/autoattachPodInterface") != Some(&json!(false)) {
        devices(spec)["interfaces"] = json!([{"name": "default", "masquerade": {}}]);
        spec["networks"] = json!([{"name": "default", "pod": {}}]);
    }
}

/// An input device, where it is asked for without being described.
pub fn input(spec: &mut Value) {
    let asked = spec.pointer("/domain/devices/autoattachInputDevice") == Some(&json!(true));
    if asked && items(spec, "/domain/devices/inputs").is_empty() {
        devices(spec)["inputs"] = json!([{"name": "default-0"}]);
    }
}
