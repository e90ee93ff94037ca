//! Volumes: what the disks are backed by.

use super::{Problems, duplicates, get, is_subdomain, items, set, text};
use base64::Engine as _;
use serde_json::Value;

/// Everything that a volume may come from.
const SOURCES: &[&str] = &[
    "cloudInitConfigDrive",
    "cloudInitNoCloud",
    "configMap",
    "containerDisk",
    "containerPath",
    "dataVolume",
    "downwardAPI",
    "downwardMetrics",
    "emptyDisk",
    "ephemeral",
    "hostDisk",
    "memoryDump",
    "persistentVolumeClaim",
    "secret",
    "serviceAccount",
    "sysprep",
];
/// The most bytes of cloud-init data in the object itself, decoded or not.
pub(crate) const CLOUD_INIT_MAX: usize = 2048;

pub(super) fn check(spec: &Value, base: &str, p: &mut Problems) {
    let volumes = items(spec, &["volumes"]);
    for (i, _, first) in duplicates(volumes) {
        p.invalid(
            format!("{base}.volumes[{i}].name"),
            format!("{base}.volumes[{first}] and {base}.volumes[{i}] must not have the same Name."),
        );
    }
    for (i, volume) in volumes.iter().enumerate() {
        let field = format!("{base}.volumes[{i}]");
        let [source] = set(volume, SOURCES)[..] else {
            p.invalid(&field, format!("{field} must have exactly one source type set"));
            continue;
        };
        let at = format!("{field}.{source}");
        let data = get(volume, &[source]);
        let named = |key: &str, p: &mut Problems| {
            let name = text(data, &[key]);
            if name.is_empty() {
                p.invalid(format!("{at}.{key}"), format!("{at}.{key} is required"));
            } else if !is_subdomain(name) {
                p.invalid(format!("{at}.{key}"), format!("{at}.{key} is not a valid name: {name:?}"));
            }
        };
        match source {
            "persistentVolumeClaim" => named("claimName", p),
            "dataVolume" => named("name", p),
            "cloudInitNoCloud" | "cloudInitConfigDrive" => cloud_init(data, &at, p),
            "containerDisk" => container_disk(data, &at, p),
            "emptyDisk" if api::quantity_milli(get(data, &["capacity"])).is_none_or(|m| m <= 0) => {
                p.invalid(format!("{at}.capacity"), format!("{at}.capacity must be greater than 0"));
            }
            "ephemeral" if text(data, &["persistentVolumeClaim", "claimName"]).is_empty() => {
                p.invalid(
                    format!("{at}.persistentVolumeClaim.claimName"),
                    format!("{at}.persistentVolumeClaim.claimName is required"),
                );
            }
            _ => {}
        }
    }
    let disks = items(spec, &["domain", "devices", "disks"]);
    for (i, volume) in volumes.iter().enumerate() {
        // Defaults give every volume a disk; a volume without a name cannot have one.
        let name = text(volume, &["name"]);
        if !disks.iter().any(|d| text(d, &["name"]) == name) && volume.get("memoryDump").is_none() {
            p.invalid(format!("{base}.volumes[{i}].name"), format!("{base}.volumes[{i}].name '{name}' not found."));
        }
    }
}

fn container_disk(data: &Value, at: &str, p: &mut Problems) {
    let image = text(data, &["image"]);
    if image.is_empty() || image.contains(char::is_whitespace) {
        p.invalid(format!("{at}.image"), format!("{at}.image is not the name of an image: {image:?}"));
    }
    p.one_of(
        crate::status::CauseType::Invalid,
        &format!("{at}.imagePullPolicy"),
        get(data, &["imagePullPolicy"]),
        &["Always", "IfNotPresent", "Never"],
    );
    let path = text(data, &["path"]);
    if !path.is_empty() && (!path.starts_with('/') || path == "/" || path.split('/').any(|part| part == "..")) {
        p.invalid(
            format!("{at}.path"),
            format!("{at}.path must be an absolute path to a file without relative elements"),
        );
    }
}

fn cloud_init(data: &Value, at: &str, p: &mut Problems) {
    let mut any = false;
    for (what, plain, encoded, reference) in [
        ("userdata", "userData", "userDataBase64", "secretRef"),
        ("networkdata", "networkData", "networkDataBase64", "networkDataSecretRef"),
    ] {
        let (inline, base64) = (text(data, &[plain]), text(data, &[encoded]));
        let secret = data.get(reference).is_some_and(Value::is_object);
        let given = [!inline.is_empty(), !base64.is_empty(), secret].iter().filter(|g| **g).count();
        any |= given > 0;
        if given > 1 {
            p.invalid(at, format!("{at} must have only one {what} source set."));
        }
        if secret && text(data, &[reference, "name"]).is_empty() {
            p.invalid(format!("{at}.{reference}.name"), format!("{at}.{reference}.name is required"));
        }
        if inline.len() > CLOUD_INIT_MAX {
            p.invalid(
                format!("{at}.{plain}"),
                format!("{at}.{plain} exceeds {CLOUD_INIT_MAX} byte limit. Should use {reference} for larger data."),
            );
        }
        if !base64.is_empty() {
            match base64::engine::general_purpose::STANDARD.decode(base64.trim()) {
                Err(_) => p.invalid(format!("{at}.{encoded}"), format!("{at}.{encoded} is not a valid base64 value.")),
                Ok(d) if d.len() > CLOUD_INIT_MAX => {
                    p.invalid(format!("{at}.{encoded}"), format!("{at}.{encoded} exceeds {CLOUD_INIT_MAX} byte limit. Should use {reference} for larger data."));
                }
                Ok(_) => {}
            }
        }
    }
    if !any {
        p.invalid(at, format!("{at} must have at least one userdatasource or one networkdatasource set."));
    }
}
