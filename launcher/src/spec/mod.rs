//! From a VMI and the facts of a node to a [`Machine`]: pure, and strict. A field under `spec.domain` or
//! `spec.volumes` that asks for something and is not served here fails the start by its path; fields that are the
//! scheduler's, the agent's or the controller's trade are named as such.

mod devices;
mod reader;
mod volumes;

pub use reader::SpecError;

use proto::launcher::NodeFacts;
use serde_json::Value;

use crate::config::Paths;
use crate::machine::{Accelerator, Cpu, Firmware, Machine};
use reader::{Cursor, Seen};

/// The largest number of vCPUs: q35 without an interrupt remapper.
const MAX_VCPUS: u32 = 255;
/// SeaBIOS and a kernel do not start below this.
const MIN_MEMORY: u64 = 1 << 20;

/// Reads a machine out of `vmi`.
pub fn machine(vmi: &Value, facts: &NodeFacts, paths: &Paths) -> Result<Machine, SpecError> {
    let seen = Seen::default();
    let root = Cursor::root(vmi, "vmi", &seen);
    let text = |c: Cursor<'_>| c.text().map(|t| t.unwrap_or_default().to_owned());
    let name = text(root.get("metadata").get("name"))?;
    let namespace = text(root.get("metadata").get("namespace"))?;
    let uid = text(root.get("metadata").get("uid"))?;
    let spec = Cursor::root(vmi.get("spec").unwrap_or(&Value::Null), "spec", &seen);
    let domain = spec.get("domain");
    if !domain.exists() {
        return Err(domain.error("is missing"));
    }
    let accelerator = match facts.accelerator.as_str() {
        "kvm" => Accelerator::Kvm,
        "tcg" | "" => Accelerator::Tcg,
        other => return Err(SpecError { path: "node".into(), problem: format!("unknown accelerator {other:?}") }),
    };

    let hostname = match spec.get("hostname").text()? {
        Some(h) => h.to_owned(),
        None => name.split('.').next().unwrap_or_default().chars().take(63).collect(),
    };
    let firmware = domain.get("firmware");
    let uuid = match firmware.get("uuid").text()? {
        Some(u) => uuid::Uuid::parse_str(u).map_err(|_| firmware.get("uuid").error("is not a UUID"))?.to_string(),
        None => uuid::Uuid::parse_str(&uid).unwrap_or_default().to_string(),
    };
    let mut smbios_system = vec![
        ("manufacturer", "KubeVirt".to_owned()),
        ("product", "None".to_owned()),
        ("family", "KubeVirt".to_owned()),
    ];
    if let Some(serial) = firmware.get("serial").text()? {
        smbios_system.push(("serial", serial.into()));
    }
    let mut smbios_chassis = Vec::new();
    for (key, field) in [
        ("manufacturer", "manufacturer"),
        ("version", "version"),
        ("serial", "serial"),
        ("asset", "asset"),
        ("sku", "sku"),
    ] {
        if let Some(value) = domain.get("chassis").get(key).text()? {
            smbios_chassis.push((field, value.to_owned()));
        }
    }

    let volumes = volumes::volumes(
        &spec,
        paths,
        &volumes::Instance { name: &name, namespace: &namespace, hostname: &hostname, uuid: &uuid },
    )?;
    let devices = domain.get("devices");
    let disks = volumes::disks(&devices, volumes)?;
    let features = domain.get("features");
    let machine = Machine {
        name: format!("{namespace}_{name}"),
        machine_type: machine_type(&domain)?,
        accelerator,
        cpu: cpu(&domain, facts, accelerator)?,
        memory: memory(&domain)?,
        firmware: boot_firmware(&firmware)?,
        smbios_system,
        smbios_chassis,
        acpi: features.get("acpi").get("enabled").flag()?.unwrap_or(true),
        hpet: domain.get("clock").get("timer").get("hpet").get("present").flag()?.unwrap_or(false),
        smm: features.get("smm").exists() && features.get("smm").get("enabled").flag()?.unwrap_or(true),
        clock_offset: clock(&domain)?,
        disks,
        nics: devices::nics(&devices, facts)?,
        inputs: devices::inputs(&devices)?,
        video: devices::video(&devices)?,
        serial: devices.get("autoattachSerialConsole").flag()?.unwrap_or(true),
        balloon: devices.get("autoattachMemBalloon").flag()?.unwrap_or(true),
        watchdog: devices::watchdog(&devices)?,
        panic: devices::panic(&devices)?,
        paused: spec.get("startStrategy").text()? == Some("Paused"),
        uuid,
    };
    devices::rest(&devices);
    if machine.smm && !machine.acpi {
        return Err(features.get("smm").error("needs ACPI"));
    }

    // The agent's (interfaces), the scheduler's and the kubelet's trade, or without a meaning for a hypervisor.
    features.skip(&["apic", "pvspinlock"]);
    domain.skip(&["resources"]);
    domain.get("clock").get("timer").skip(&["rtc", "pit", "kvm", "hyperv"]);
    domain.get("clock").get("timer").get("hpet").skip(&["tickPolicy"]);
    spec.get("accessCredentials");
    for (cursor, what) in [(&domain, "spec.domain"), (&spec.get("volumes"), "spec.volumes")] {
        if let Some(path) = cursor.unread() {
            let problem = format!("is not supported by the qemu driver (nothing under {what} is ignored in silence)");
            return Err(SpecError { path, problem });
        }
    }
    if !spec.get("accessCredentials").items()?.is_empty() {
        return Err(spec.get("accessCredentials").error("is not supported by the qemu driver"));
    }
    Ok(machine)
}

/// Whether a machine type is one that is started here: q35 and its versions.
pub(crate) fn is_machine_type(name: &str) -> bool {
    let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || b".-_".contains(&b));
    (name == "q35" || name.starts_with("pc-q35-")) && plain
}

fn machine_type(domain: &Cursor<'_>) -> Result<String, SpecError> {
    let field = domain.get("machine").get("type");
    let name = field.text()?.unwrap_or("q35");
    if is_machine_type(name) {
        return Ok(name.into());
    }
    Err(field.error(format!("only q35 is supported, not {name:?}")))
}

fn cpu(domain: &Cursor<'_>, facts: &NodeFacts, accelerator: Accelerator) -> Result<Cpu, SpecError> {
    let field = domain.get("cpu");
    let node_model = if facts.cpu_model.is_empty() { "Nehalem" } else { &facts.cpu_model };
    let model = match (field.get("model").text()?, accelerator) {
        (None | Some("host-model"), _) => node_model.to_owned(),
        (Some("host-passthrough"), Accelerator::Kvm) => "host".into(),
        (Some("host-passthrough"), Accelerator::Tcg) => "max".into(),
        (Some(named), _) => {
            if !named.bytes().all(|b| b.is_ascii_alphanumeric() || b".-_".contains(&b)) {
                return Err(field.get("model").error(format!("is not the name of a CPU model: {named:?}")));
            }
            named.to_owned()
        }
    };
    let mut features = Vec::new();
    for item in field.get("features").items()? {
        let name = item.get("name").text()?.ok_or_else(|| item.get("name").error("is missing"))?;
        if !name.bytes().all(|b| b.is_ascii_alphanumeric() || b".-_".contains(&b)) {
            return Err(item.get("name").error(format!("is not the name of a CPU feature: {name:?}")));
        }
        match item.get("policy").text()?.unwrap_or("require") {
            "force" | "require" | "optional" => features.push((name.to_owned(), true)),
            "disable" | "forbid" => features.push((name.to_owned(), false)),
            other => return Err(item.get("policy").error(format!("unknown policy {other:?}"))),
        }
    }
    field.skip(&["maxSockets"]);

    let part = |key: &str| -> Result<Option<u32>, SpecError> {
        let c = field.get(key);
        Ok(c.number()?.filter(|n| *n > 0))
    };
    let (sockets, cores, threads) = (part("sockets")?, part("cores")?, part("threads")?);
    let resources = domain.get("resources");
    let wished = if sockets.or(cores).or(threads).is_none() {
        let milli = match resources.get("limits").get("cpu").milli()? {
            Some(m) => Some(m),
            None => resources.get("requests").get("cpu").milli()?,
        };
        milli.map(|m| u32::try_from(m.div_ceil(1000)).unwrap_or(u32::MAX))
    } else {
        None
    };
    let (sockets, cores, threads) = (sockets.or(wished).unwrap_or(1).max(1), cores.unwrap_or(1), threads.unwrap_or(1));
    let total = sockets.checked_mul(cores).and_then(|n| n.checked_mul(threads)).unwrap_or(u32::MAX);
    if total > MAX_VCPUS {
        return Err(field
            .error(format!("{sockets} sockets x {cores} cores x {threads} threads is more than {MAX_VCPUS} vCPUs")));
    }
    let properties = hyperv(&domain.get("features"), accelerator)?;
    Ok(Cpu { model, features, properties, sockets, cores, threads })
}

/// Hyper-V enlightenments and KVM's own features as CPU properties. Emulation has neither; a guest that was promised
/// them runs without, as under KubeVirt's emulation.
fn hyperv(features: &Cursor<'_>, accelerator: Accelerator) -> Result<Vec<String>, SpecError> {
    let mut properties = Vec::new();
    let field = features.get("hyperv");
    let on = |key: &str| -> Result<bool, SpecError> {
        let c = field.get(key);
        Ok(c.exists() && c.get("enabled").flag()?.unwrap_or(true))
    };
    for (key, property) in [
        ("relaxed", "hv-relaxed"),
        ("vapic", "hv-vapic"),
        ("vpindex", "hv-vpindex"),
        ("runtime", "hv-runtime"),
        ("synic", "hv-synic"),
        ("reset", "hv-reset"),
        ("frequencies", "hv-frequencies"),
        ("reenlightenment", "hv-reenlightenment"),
        ("ipi", "hv-ipi"),
        ("evmcs", "hv-evmcs"),
        ("synictimer", "hv-stimer"),
        ("tlbflush", "hv-tlbflush"),
    ] {
        if on(key)? {
            properties.push(property.to_owned());
        }
    }
    if on("synictimer")? && field.get("synictimer").get("direct").exists() {
        properties.push("hv-stimer-direct".into());
        field.get("synictimer").skip(&["direct"]);
    }
    if on("spinlocks")? {
        let retries = field.get("spinlocks").get("spinlocks").number()?.unwrap_or(4096);
        properties.push(format!("hv-spinlocks={retries}"));
    }
    if on("vendorid")?
        && let Some(id) = field.get("vendorid").get("vendorid").text()?
    {
        if id.len() > 12 || id.contains(',') {
            return Err(field.get("vendorid").error("is at most 12 characters without a comma"));
        }
        properties.push(format!("hv-vendor-id={id}"));
    }
    if features.get("kvm").get("hidden").flag()? == Some(true) {
        properties.push("kvm=off".into());
    }
    if accelerator == Accelerator::Tcg {
        properties.clear();
    }
    Ok(properties)
}

fn memory(domain: &Cursor<'_>) -> Result<u64, SpecError> {
    let resources = domain.get("resources");
    let guest = domain.get("memory").get("guest");
    domain.get("memory").skip(&["maxGuest"]);
    let (bytes, from) = if let Some(b) = guest.quantity()? {
        (b, guest)
    } else if let Some(b) = resources.get("limits").get("memory").quantity()? {
        (b, resources.get("limits").get("memory"))
    } else if let Some(b) = resources.get("requests").get("memory").quantity()? {
        (b, resources.get("requests").get("memory"))
    } else {
        return Err(guest.error("is missing, and resources names no memory"));
    };
    if bytes < MIN_MEMORY {
        return Err(from.error(format!("is less than 1 MiB: {bytes} bytes")));
    }
    Ok(bytes)
}

fn boot_firmware(firmware: &Cursor<'_>) -> Result<Firmware, SpecError> {
    let boot = firmware.get("bootloader");
    let (bios, efi) = (boot.get("bios"), boot.get("efi"));
    if firmware.get("kernelBoot").exists() {
        return Err(firmware.get("kernelBoot").error("is not supported by the qemu driver"));
    }
    if bios.exists() && efi.exists() {
        return Err(boot.error("bios and efi exclude one another"));
    }
    bios.skip(&["useSerial"]);
    if efi.exists() {
        if efi.get("persistent").flag()? == Some(true) {
            return Err(efi.get("persistent").error("is not supported by the qemu driver"));
        }
        return Ok(Firmware::Efi { secure_boot: efi.get("secureBoot").flag()?.unwrap_or(true) });
    }
    Ok(Firmware::Bios)
}

fn clock(domain: &Cursor<'_>) -> Result<i64, SpecError> {
    let clock = domain.get("clock");
    if let Some(zone) = clock.get("timezone").text()?
        && zone != "UTC"
    {
        return Err(clock.get("timezone").error("only UTC is supported"));
    }
    Ok(clock.get("utc").get("offsetSeconds").int()?.unwrap_or(0))
}

#[cfg(test)]
mod tests;
