//! Identity, scheduling, CPU, memory, machine and firmware.

use super::{Problems, get, is_label, is_subdomain, items, set, text};
use crate::status::CauseType::{NotFound, NotSupported};
use serde_json::Value;

/// SeaBIOS and a kernel do not start in less.
const MIN_GUEST_MEMORY: i128 = 1 << 20;
/// The most vCPUs of a q35 machine without interrupt remapping.
const MAX_VCPUS: u64 = 255;

pub(super) fn check(spec: &Value, base: &str, p: &mut Problems) {
    identity(spec, base, p);
    let domain = get(spec, &["domain"]);
    let base = &format!("{base}.domain");
    cpu(domain, base, p);
    memory(domain, base, p);
    let kind = text(domain, &["machine", "type"]);
    let plain = kind.bytes().all(|b| b.is_ascii_alphanumeric() || b".-_".contains(&b));
    if !((kind.starts_with("q35") || kind.starts_with("pc-q35")) && plain) {
        p.invalid(
            format!("{base}.machine.type"),
            format!("{base}.machine.type is not supported: {kind} (allowed values: [q35* pc-q35*])"),
        );
    }
    firmware(domain, base, p);
    devices(domain, base, p);
    p.one_of(
        crate::status::CauseType::Invalid,
        &format!("{base}.ioThreadsPolicy"),
        get(domain, &["ioThreadsPolicy"]),
        &["shared", "auto", "supplementalPool"],
    );
}

fn identity(spec: &Value, base: &str, p: &mut Problems) {
    let hostname = text(spec, &["hostname"]);
    if hostname.len() > 63 {
        p.invalid(format!("{base}.hostname"), format!("{base}.hostname: DNS label must be no more than 63 characters"));
    } else if !hostname.is_empty() && !is_label(hostname) {
        p.invalid(
            format!("{base}.hostname"),
            format!("{base}.hostname does not conform to the kubernetes DNS_LABEL rules: {hostname:?}"),
        );
    }
    let subdomain = text(spec, &["subdomain"]);
    if !subdomain.is_empty() && !is_subdomain(subdomain) {
        p.invalid(
            format!("{base}.subdomain"),
            format!("{base}.subdomain does not conform to the kubernetes DNS_SUBDOMAIN rules: {subdomain:?}"),
        );
    }
    let invalid = crate::status::CauseType::Invalid;
    p.one_of(invalid, &format!("{base}.startStrategy"), get(spec, &["startStrategy"]), &["Paused"]);
    p.one_of(
        invalid,
        &format!("{base}.evictionStrategy"),
        get(spec, &["evictionStrategy"]),
        &["None", "LiveMigrate", "LiveMigrateIfPossible", "External"],
    );
    if get(spec, &["terminationGracePeriodSeconds"]).as_i64().is_some_and(|s| s < 0) {
        p.invalid(
            format!("{base}.terminationGracePeriodSeconds"),
            format!("{base}.terminationGracePeriodSeconds must not be negative"),
        );
    }
    p.one_of(invalid, &format!("{base}.architecture"), get(spec, &["architecture"]), &["amd64", "arm64", "s390x"]);
}

fn cpu(domain: &Value, base: &str, p: &mut Problems) {
    let milli = |side: &str| api::quantity_milli(get(domain, &["resources", side, "cpu"]));
    let (request, limit) = (milli("requests"), milli("limits"));
    for (side, value) in [("requests", request), ("limits", limit)] {
        if value.is_some_and(|v| v < 0) {
            let field = format!("{base}.resources.{side}.cpu");
            p.invalid(&field, format!("{field} must be greater than or equal to 0."));
        }
    }
    if let (Some(r), Some(l)) = (request, limit)
        && r > l
    {
        p.invalid(
            format!("{base}.resources.requests.cpu"),
            format!("{base}.resources.requests.cpu is greater than {base}.resources.limits.cpu"),
        );
    }
    let part = |name: &str| get(domain, &["cpu", name]).as_i64();
    for name in ["sockets", "cores", "threads", "maxSockets"] {
        if part(name).is_some_and(|n| n < 0) {
            p.invalid(format!("{base}.cpu.{name}"), format!("{base}.cpu.{name} must not be negative"));
        }
    }
    let (sockets, max) = (part("sockets").unwrap_or(0), part("maxSockets").unwrap_or(0));
    if max > 0 && sockets > max {
        p.invalid(format!("{base}.cpu.sockets"), format!("Number of sockets in CPU topology ({sockets}) is greater than the maximum number of sockets allowed ({max})"));
    }
    let one = |name: &str| part(name).and_then(|n| u64::try_from(n).ok()).unwrap_or(1).max(1);
    let total = one("sockets").saturating_mul(one("cores")).saturating_mul(one("threads"));
    if total > MAX_VCPUS {
        p.invalid(
            format!("{base}.cpu"),
            format!("{base}.cpu: {total} virtual CPUs are more than the {MAX_VCPUS} of this machine type"),
        );
    }
    let word = |s: &str| s.bytes().all(|b| b.is_ascii_alphanumeric() || b".-_".contains(&b));
    let model = text(domain, &["cpu", "model"]);
    if !word(model) {
        p.invalid(format!("{base}.cpu.model"), format!("{base}.cpu.model is not the name of a CPU model: {model:?}"));
    }
    for (i, feature) in items(domain, &["cpu", "features"]).iter().enumerate() {
        let field = format!("{base}.cpu.features[{i}]");
        p.one_of(
            NotSupported,
            &format!("{field}.policy"),
            get(feature, &["policy"]),
            &["force", "require", "optional", "disable", "forbid"],
        );
        let name = text(feature, &["name"]);
        if name.is_empty() || !word(name) {
            p.invalid(format!("{field}.name"), format!("{field}.name is not the name of a CPU feature: {name:?}"));
        }
    }
}

fn memory(domain: &Value, base: &str, p: &mut Problems) {
    let field = |side: &str| format!("{base}.resources.{side}.memory");
    let raw = |side: &str| get(domain, &["resources", side, "memory"]);
    let milli = |v: &Value| api::quantity_milli(v);
    let (request, limit) = (milli(raw("requests")), milli(raw("limits")));
    if let Some(r) = request {
        if r < 0 {
            p.invalid(
                field("requests"),
                format!("{} '{}': must be greater than or equal to 0.", field("requests"), shown(raw("requests"))),
            );
        } else if r > 0 && r < 1_000_000_000 {
            p.invalid(
                field("requests"),
                format!("{} '{}': must be greater than or equal to 1M.", field("requests"), shown(raw("requests"))),
            );
        }
    }
    if limit.is_some_and(|l| l < 0) {
        p.invalid(
            field("limits"),
            format!("{} '{}': must be greater than or equal to 0.", field("limits"), shown(raw("limits"))),
        );
    }
    if let (Some(r), Some(l)) = (request, limit)
        && l > 0
        && r > l
    {
        p.invalid(
            field("requests"),
            format!(
                "{} '{}' is greater than {} '{}'",
                field("requests"),
                shown(raw("requests")),
                field("limits"),
                shown(raw("limits"))
            ),
        );
    }
    let guest = get(domain, &["memory", "guest"]);
    let field = format!("{base}.memory.guest");
    if !guest.is_null() {
        match milli(guest) {
            None => p.invalid(&field, format!("{field} is not a quantity: {}", shown(guest))),
            Some(m) if m < MIN_GUEST_MEMORY * 1000 => {
                p.invalid(&field, format!("{field} '{}': must be at least 1Mi.", shown(guest)))
            }
            Some(m) => {
                let limits = format!("{base}.resources.limits.memory");
                let maximum = format!("{base}.memory.maxGuest");
                for (most, name) in [(limit, limits), (milli(get(domain, &["memory", "maxGuest"])), maximum)] {
                    if most.is_some_and(|most| most > 0 && m > most) {
                        p.invalid(&field, format!("{field} '{}' is greater than {name}", shown(guest)));
                    }
                }
            }
        }
    }
}

fn shown(v: &Value) -> String {
    v.as_str().map_or_else(|| v.to_string(), str::to_owned)
}

fn firmware(domain: &Value, base: &str, p: &mut Problems) {
    let boot = get(domain, &["firmware", "bootloader"]);
    if set(boot, &["bios", "efi"]).len() == 2 {
        p.invalid(
            format!("{base}.firmware.bootloader"),
            format!("{base}.firmware.bootloader has both EFI and BIOS configured, but they are mutually exclusive."),
        );
    }
    let efi = get(boot, &["efi"]);
    let smm = get(domain, &["features", "smm"]);
    if efi.is_object() && get(efi, &["secureBoot"]) != false && (!smm.is_object() || get(smm, &["enabled"]) == false) {
        let field = format!("{base}.firmware.bootloader.efi.secureBoot");
        p.invalid(
            base,
            format!("{field} has EFI SecureBoot enabled. SecureBoot requires SMM, which is currently disabled."),
        );
    }
    let uuid = text(domain, &["firmware", "uuid"]);
    if !uuid.is_empty() && uuid::Uuid::parse_str(uuid).is_err() {
        p.invalid(format!("{base}.firmware.uuid"), format!("{base}.firmware.uuid is not a UUID: {uuid:?}"));
    }
    if get(domain, &["features", "acpi", "enabled"]) == false && smm.is_object() && get(smm, &["enabled"]) != false {
        p.invalid(format!("{base}.features.smm"), format!("{base}.features.smm needs ACPI, which is disabled."));
    }
    let vendor = text(domain, &["features", "hyperv", "vendorid", "vendorid"]);
    if vendor.len() > 12 || vendor.contains(',') {
        let field = format!("{base}.features.hyperv.vendorid.vendorid");
        p.invalid(&field, format!("{field} has at most 12 characters and no comma"));
    }
    hyperv(domain, base, p);
}

fn hyperv(domain: &Value, base: &str, p: &mut Problems) {
    let features = get(domain, &["features", "hyperv"]);
    let on = |name: &str| features.get(name).is_some_and(|f| f.is_object() && get(f, &["enabled"]) != false);
    for (needs, needed) in
        [("evmcs", "vapic"), ("ipi", "vpindex"), ("tlbflush", "vpindex"), ("synictimer", "synic"), ("synic", "vpindex")]
    {
        if on(needs) && !on(needed) {
            let field = format!("{base}.features.hyperv.{needs}");
            p.invalid(&field, format!("{field} requires {base}.features.hyperv.{needed}, which is disabled"));
        }
    }
}

fn devices(domain: &Value, base: &str, p: &mut Problems) {
    for (i, input) in items(domain, &["devices", "inputs"]).iter().enumerate() {
        let field = format!("{base}.devices.inputs[{i}]");
        if !["", "usb", "virtio"].contains(&text(input, &["bus"])) {
            p.invalid(format!("{field}.bus"), "Input device can have only virtio or usb bus.");
        }
        if text(input, &["type"]) != "tablet" {
            p.invalid(format!("{field}.type"), "Input device can have only tablet type.");
        }
    }
    let devices = get(domain, &["devices"]);
    let base = format!("{base}.devices");
    p.one_of(
        NotSupported,
        &format!("{base}.video.type"),
        get(devices, &["video", "type"]),
        &["vga", "cirrus", "virtio", "ramfb", "bochs"],
    );
    if devices.get("video").is_some_and(Value::is_object) && get(devices, &["autoattachGraphicsDevice"]) == false {
        p.invalid(
            format!("{base}.video"),
            format!("{base}.video is not allowed when autoattachGraphicsDevice is set to false"),
        );
    }
    let dog = get(devices, &["watchdog"]);
    if dog.is_object() {
        if !dog.get("i6300esb").is_some_and(Value::is_object) {
            p.add(
                NotFound,
                format!("{base}.watchdog"),
                format!("{base}.watchdog must have the i6300esb device on this architecture"),
            );
        }
        let field = format!("{base}.watchdog.i6300esb.action");
        p.one_of(NotSupported, &field, get(dog, &["i6300esb", "action"]), &["reset", "poweroff", "shutdown"]);
    }
    for (i, device) in items(devices, &["panicDevices"]).iter().enumerate() {
        let field = format!("{base}.panicDevices[{i}].model");
        p.one_of(crate::status::CauseType::Invalid, &field, get(device, &["model"]), &["hyperv", "isa", "pvpanic"]);
    }
}
