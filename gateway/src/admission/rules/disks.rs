//! Disks and the volumes of the same names.

use super::{Problems, duplicates, get, is_label, items, set, text};
use crate::status::CauseType::{self, NotSupported};
use serde_json::Value;

const TARGETS: &[&str] = &["disk", "cdrom", "lun"];
const BUSES: &[&str] = &["virtio", "scsi", "sata", "usb"];

pub(super) fn check(spec: &Value, base: &str, p: &mut Problems) {
    let disks = items(spec, &["domain", "devices", "disks"]);
    let volumes = items(spec, &["volumes"]);
    let base = format!("{base}.domain.devices.disks");
    for (i, _, first) in duplicates(disks) {
        p.invalid(format!("{base}[{i}].name"), format!("{base}[{first}] and {base}[{i}] must not have the same Name."));
    }
    for (i, disk) in disks.iter().enumerate() {
        let field = format!("{base}[{i}]");
        let name = text(disk, &["name"]);
        if !is_label(name) {
            p.invalid(
                format!("{field}.name"),
                format!("{field}.name does not conform to the kubernetes DNS_LABEL rules: {name:?}"),
            );
        }
        if !volumes.iter().any(|v| text(v, &["name"]) == name) {
            p.invalid(format!("{field}.name"), format!("{field}.Name '{name}' not found."));
        }
        let targets = set(disk, TARGETS);
        if targets.len() > 1 {
            p.invalid(&field, format!("{field} can only have a single target type defined"));
        }
        if let [target] = targets[..] {
            bus(disk, target, &field, p);
        }
        options(disk, &field, p);
    }
}

fn bus(disk: &Value, target: &str, field: &str, p: &mut Problems) {
    let bus = text(disk, &[target, "bus"]);
    let at = format!("{field}.{target}.bus");
    match bus {
        "" => {}
        "ide" => p.invalid(&at, "IDE bus is not supported"),
        "virtio" if target == "cdrom" => p.invalid(&at, "Bus type virtio is invalid for CD-ROM device"),
        b if !BUSES.contains(&b) => {
            p.invalid(&at, format!("{field} is set with an unrecognized bus {b}, must be one of: {BUSES:?}"))
        }
        "sata" if target == "disk" && get(disk, &["disk", "readonly"]) == true => {
            p.invalid(&at, format!("{field}: sata hard-disks do not support read-only."));
        }
        _ => {}
    }
    if target == "cdrom" && get(disk, &["cdrom", "readonly"]) == false {
        p.invalid(format!("{field}.cdrom.readonly"), format!("{field}: a CD-ROM cannot be written"));
    }
    p.one_of(CauseType::Invalid, &format!("{field}.cdrom.tray"), get(disk, &["cdrom", "tray"]), &["open", "closed"]);
    if get(disk, &["dedicatedIOThread"]) == true && bus != "virtio" {
        let at = format!("{field}.dedicatedIOThread");
        p.add(NotSupported, &at, format!("{at}: IOThreads are not supported for disks on a {bus} bus"));
    }
}

fn options(disk: &Value, field: &str, p: &mut Problems) {
    let serial = text(disk, &["serial"]);
    if serial.len() > 256 {
        p.invalid(
            format!("{field}.serial"),
            format!("{field}.serial must be less than or equal to 256 in length, if specified"),
        );
    }
    if !serial.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.+-".contains(&b)) {
        p.invalid(
            format!("{field}.serial"),
            format!("{field}.serial must be made up of the following characters [A-Za-z0-9_.+-], if specified"),
        );
    }
    p.one_of(
        CauseType::Invalid,
        &format!("{field}.cache"),
        get(disk, &["cache"]),
        &["none", "writethrough", "writeback"],
    );
    p.one_of(NotSupported, &format!("{field}.io"), get(disk, &["io"]), &["native", "threads"]);
    if text(disk, &["io"]) == "native" && text(disk, &["cache"]) != "none" {
        p.invalid(format!("{field}.io"), format!("{field}.io native needs {field}.cache none"));
    }
    p.one_of(
        NotSupported,
        &format!("{field}.errorPolicy"),
        get(disk, &["errorPolicy"]),
        &["stop", "ignore", "report", "enospace"],
    );
    let block = get(disk, &["blockSize"]);
    let custom = get(block, &["custom"]);
    if !custom.is_object() {
        return;
    }
    if block.get("matchVolume").is_some_and(Value::is_object) {
        p.invalid(format!("{field}.blockSize"), "Block size matching can't be enabled together with a custom value.");
    }
    let size = |name: &str| get(custom, &[name]).as_u64().unwrap_or(0);
    let (logical, physical) = (size("logical"), size("physical"));
    for (name, n) in [("logical", logical), ("physical", physical)] {
        if !n.is_power_of_two() || !(512..=2 << 20).contains(&n) {
            let at = format!("{field}.blockSize.custom.{name}");
            p.invalid(
                &at,
                format!("Provided size of {n} is not supported: {name} is a power of two from 512 to 2097152."),
            );
        }
    }
    if logical > physical {
        p.invalid(
            format!("{field}.blockSize.custom.logical"),
            format!("Logical size {logical} must be the same or less than the physical size of {physical}."),
        );
    }
    if text(disk, &["disk", "bus"]) == "sata" && logical != 512 {
        p.invalid(
            format!("{field}.blockSize.custom.logical"),
            "Only a logical block size of 512 is supported on the sata bus.",
        );
    }
}
