//! What a preference fills in.

use super::{at, get, is_open, list, number};
use serde_json::{Value, json};

/// Threads of a core where CPUs are spread over all three.
pub(super) const THREADS_A_CORE: u64 = 2;

/// How the CPUs of an instancetype become sockets, cores and threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Topology {
    Sockets,
    Cores,
    Threads,
    Any,
    Spread { ratio: u64, across: Across },
}

/// Over what CPUs are spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Across {
    SocketsCores,
    CoresThreads,
    SocketsCoresThreads,
}

impl Across {
    /// The word in manifests.
    pub fn name(self) -> &'static str {
        match self {
            Self::SocketsCores => "SocketsCores",
            Self::CoresThreads => "CoresThreads",
            Self::SocketsCoresThreads => "SocketsCoresThreads",
        }
    }

    /// What a word means.
    pub fn parse(word: &str) -> Option<Self> {
        [Self::SocketsCores, Self::CoresThreads, Self::SocketsCoresThreads].into_iter().find(|a| a.name() == word)
    }
}

/// The topology that a preference (null for none) asks for.
pub(super) fn topology(preferred: &Value) -> Topology {
    match get(preferred, "cpu.preferredCPUTopology").as_str() {
        Some("cores" | "preferCores") => Topology::Cores,
        Some("threads" | "preferThreads") => Topology::Threads,
        Some("any" | "preferAny") => Topology::Any,
        Some("spread" | "preferSpread") => {
            let ratios = ["cpu.spreadOptions.ratio", "preferSpreadSocketToCoreRatio"];
            let ratio = ratios.into_iter().map(|p| number(get(preferred, p))).find(|r| *r > 0).unwrap_or(2);
            let across = get(preferred, "cpu.spreadOptions.across").as_str().and_then(Across::parse);
            Topology::Spread { ratio, across: across.unwrap_or(Across::SocketsCores) }
        }
        Some(_) | None => Topology::Sockets,
    }
}

/// Where a preference says what a field shall be that is open: its path, and the path of the field.
const FILLS: [(&str, &str); 15] = [
    ("devices.preferredUseVirtioTransitional", "domain.devices.useVirtioTransitional"),
    ("devices.preferredBlockMultiQueue", "domain.devices.blockMultiQueue"),
    ("devices.preferredNetworkInterfaceMultiQueue", "domain.devices.networkInterfaceMultiqueue"),
    ("devices.preferredRng", "domain.devices.rng"),
    ("devices.preferredTPM", "domain.devices.tpm"),
    ("devices.preferredVideoType", "domain.devices.video.type"),
    ("features.preferredApic", "domain.features.apic"),
    ("features.preferredKvm", "domain.features.kvm"),
    ("features.preferredPvspinlock", "domain.features.pvspinlock"),
    ("features.preferredSmm", "domain.features.smm"),
    ("machine.preferredMachineType", "domain.machine.type"),
    ("clock.preferredTimer", "domain.clock.timer"),
    ("preferredSubdomain", "subdomain"),
    ("preferredTerminationGracePeriodSeconds", "terminationGracePeriodSeconds"),
    ("preferredLaunchSecurity", "domain.launchSecurity"),
];

/// The same, for what is attached by itself.
const ATTACHES: [(&str, &str); 5] = [
    ("devices.preferredAutoattachGraphicsDevice", "domain.devices.autoattachGraphicsDevice"),
    ("devices.preferredAutoattachMemBalloon", "domain.devices.autoattachMemBalloon"),
    ("devices.preferredAutoattachPodInterface", "domain.devices.autoattachPodInterface"),
    ("devices.preferredAutoattachSerialConsole", "domain.devices.autoattachSerialConsole"),
    ("devices.preferredAutoattachInputDevice", "domain.devices.autoattachInputDevice"),
];

/// The same, for the fields of each item of a list.
const FILLS_DEVICES: [(&str, &str, &str); 4] = [
    ("devices.preferredInputBus", "inputs", "bus"),
    ("devices.preferredInputType", "inputs", "type"),
    ("devices.preferredInterfaceModel", "interfaces", "model"),
    ("devices.preferredPanicDeviceModel", "panicDevices", "model"),
];

fn fill(preferred: &Value, of: &str, target: &mut Value, path: &str) {
    let value = get(preferred, of);
    if !is_open(value) && is_open(get(target, path)) {
        *at(target, path) = value.clone();
    }
}

/// Devices that a machine gets without naming them, so that they are filled in like others: what the preference says of them,
/// a disk for each volume that nothing shows, a network interface, an input device.
pub(super) fn attach(preferred: &Value, spec: &mut Value) {
    for (of, path) in ATTACHES {
        fill(preferred, of, spec, path);
    }
    crate::attach::disks(spec);
    crate::attach::network(spec);
    crate::attach::input(spec);
}

/// Fills in what is open.
pub(super) fn apply(preferred: &Value, spec: &mut Value) {
    if preferred.is_null() {
        return;
    }
    cpu_features(preferred, spec);
    for (of, path) in FILLS {
        fill(preferred, of, spec, path);
    }
    if let Some(features) = get(preferred, "features.preferredHyperv").as_object() {
        for name in features.keys() {
            let path = format!("features.preferredHyperv.{name}");
            fill(preferred, &path, spec, &format!("domain.features.hyperv.{name}"));
        }
    }
    // In Go neither of these can be unset, so what is preferred prevails.
    for (of, path) in [
        ("features.preferredAcpi", "domain.features.acpi"),
        ("devices.preferredDisableHotplug", "domain.devices.disableHotplug"),
    ] {
        let value = get(preferred, of);
        if !value.is_null() {
            *at(spec, path) = value.clone();
        }
    }
    devices(preferred, spec);
    firmware(preferred, spec);
    let offset = get(preferred, "clock.preferredClockOffset");
    if get(spec, "domain.clock.utc").is_null() && get(spec, "domain.clock.timezone").is_null() {
        for (key, value) in offset.as_object().into_iter().flatten() {
            *at(spec, &format!("domain.clock.{key}")) = value.clone();
        }
    }
    fill(preferred, "preferredArchitecture", spec, "architecture");
}

fn cpu_features(preferred: &Value, spec: &mut Value) {
    let wanted = get(preferred, "cpu.preferredCPUFeatures").as_array().map(Vec::as_slice).unwrap_or_default();
    let had = get(spec, "domain.cpu.features").as_array().cloned().unwrap_or_default();
    let new: Vec<Value> =
        wanted.iter().filter(|w| !had.iter().any(|h| h.get("name") == w.get("name"))).cloned().collect();
    if !new.is_empty() {
        *at(spec, "domain.cpu.features") = had.into_iter().chain(new).collect();
    }
}

fn devices(preferred: &Value, spec: &mut Value) {
    if !get(spec, "domain.devices.sound").is_null() {
        fill(preferred, "devices.preferredSoundModel", spec, "domain.devices.sound.model");
    }
    let none = get(spec, "domain.devices.panicDevices").as_array().is_none_or(Vec::is_empty);
    if none && !get(preferred, "devices.preferredPanicDeviceModel").is_null() {
        *at(spec, "domain.devices.panicDevices") = json!([{}]);
    }
    for (of, kind, field) in FILLS_DEVICES {
        for device in list(spec, &format!("domain.devices.{kind}")) {
            fill(preferred, of, device, field);
        }
    }
    let masquerade = get(preferred, "devices.preferredInterfaceMasquerade");
    let networks = get(spec, "networks").as_array().cloned().unwrap_or_default();
    for interface in list(spec, "domain.devices.interfaces").filter(|_| !masquerade.is_null()) {
        let bound = crate::attach::BINDINGS.iter().any(|b| !get(interface, b).is_null());
        let name = interface.get("name").cloned();
        let on_pod_network =
            networks.iter().any(|n| n.get("name") == name.as_ref() && n.get("pod").is_some_and(Value::is_object));
        if !bound && on_pod_network {
            interface["masquerade"] = masquerade.clone();
        }
    }
    for disk in list(spec, "domain.devices.disks") {
        fill_disk(preferred, disk);
    }
}

fn fill_disk(preferred: &Value, disk: &mut Value) {
    let target = ["disk", "cdrom", "lun"].into_iter().find(|t| disk.get(t).is_some_and(Value::is_object));
    match target {
        Some("cdrom") => return fill(preferred, "devices.preferredCdromBus", disk, "cdrom.bus"),
        Some("lun") => return fill(preferred, "devices.preferredLunBus", disk, "lun.bus"),
        Some(_) => {}
        None => *at(disk, "disk") = json!({}),
    }
    fill(preferred, "devices.preferredDiskBus", disk, "disk.bus");
    fill(preferred, "devices.preferredDiskBlockSize", disk, "blockSize");
    fill(preferred, "devices.preferredDiskCache", disk, "cache");
    fill(preferred, "devices.preferredDiskIO", disk, "io");
    if get(disk, "disk.bus") == "virtio" {
        fill(preferred, "devices.preferredDiskDedicatedIoThread", disk, "dedicatedIOThread");
    }
}

fn firmware(preferred: &Value, spec: &mut Value) {
    const BOOT: &str = "domain.firmware.bootloader";
    let said = |what: &str| get(preferred, &format!("firmware.{what}")).clone();
    let has = |spec: &Value, what: &str| !get(spec, &format!("{BOOT}.{what}")).is_null();
    if said("preferredUseBios") == true && !has(spec, "bios") && !has(spec, "efi") {
        *at(spec, &format!("{BOOT}.bios")) = json!({});
    }
    if has(spec, "bios") {
        return fill(preferred, "firmware.preferredUseBiosSerial", spec, &format!("{BOOT}.bios.useSerial"));
    }
    let efi = said("preferredEfi");
    if !has(spec, "efi") && !efi.is_null() {
        *at(spec, &format!("{BOOT}.efi")) = efi;
        return;
    }
    if said("preferredUseEfi") == true && !has(spec, "efi") {
        *at(spec, &format!("{BOOT}.efi")) = json!({});
    }
    if has(spec, "efi") {
        fill(preferred, "firmware.preferredUseSecureBoot", spec, &format!("{BOOT}.efi.secureBoot"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(preferred: Value, spec: Value) -> Value {
        let mut spec = spec;
        attach(&preferred, &mut spec);
        apply(&preferred, &mut spec);
        let once = spec.clone();
        attach(&preferred, &mut spec);
        apply(&preferred, &mut spec);
        assert_eq!(spec, once, "twice is once");
        spec
    }

    /// Nothing is attached by itself.
    fn bare(devices: Value) -> Value {
        let mut devices = devices;
        devices["autoattachPodInterface"] = false.into();
        json!({"domain": {"devices": devices}})
    }

    #[test]
    fn each_field_is_filled_in_where_it_is_open_and_left_alone_where_it_is_not() {
        for (path, preferred, field, own) in [
            (
                "devices.preferredUseVirtioTransitional",
                json!(true),
                "domain.devices.useVirtioTransitional",
                json!(false),
            ),
            ("devices.preferredBlockMultiQueue", json!(true), "domain.devices.blockMultiQueue", json!(false)),
            (
                "devices.preferredNetworkInterfaceMultiQueue",
                json!(true),
                "domain.devices.networkInterfaceMultiqueue",
                json!(false),
            ),
            ("devices.preferredRng", json!({}), "domain.devices.rng", json!({})),
            ("devices.preferredTPM", json!({"persistent": true}), "domain.devices.tpm", json!({})),
            ("devices.preferredVideoType", json!("virtio"), "domain.devices.video.type", json!("vga")),
            (
                "devices.preferredAutoattachGraphicsDevice",
                json!(false),
                "domain.devices.autoattachGraphicsDevice",
                json!(true),
            ),
            ("devices.preferredAutoattachMemBalloon", json!(false), "domain.devices.autoattachMemBalloon", json!(true)),
            (
                "devices.preferredAutoattachSerialConsole",
                json!(false),
                "domain.devices.autoattachSerialConsole",
                json!(true),
            ),
            (
                "devices.preferredAutoattachInputDevice",
                json!(false),
                "domain.devices.autoattachInputDevice",
                json!(true),
            ),
            ("features.preferredApic", json!({"enabled": true}), "domain.features.apic", json!({})),
            ("features.preferredKvm", json!({"hidden": true}), "domain.features.kvm", json!({})),
            ("features.preferredPvspinlock", json!({}), "domain.features.pvspinlock", json!({"enabled": false})),
            ("features.preferredSmm", json!({"enabled": true}), "domain.features.smm", json!({"enabled": false})),
            (
                "features.preferredHyperv.spinlocks",
                json!({"spinlocks": 8191}),
                "domain.features.hyperv.spinlocks",
                json!({}),
            ),
            ("features.preferredHyperv.vapic", json!({}), "domain.features.hyperv.vapic", json!({"enabled": false})),
            ("machine.preferredMachineType", json!("pc-q35-9.2"), "domain.machine.type", json!("q35")),
            ("clock.preferredTimer", json!({"hpet": {"present": false}}), "domain.clock.timer", json!({"kvm": {}})),
            ("clock.preferredClockOffset.timezone", json!("UTC"), "domain.clock.timezone", json!("Europe/Berlin")),
            ("preferredSubdomain", json!("s"), "subdomain", json!("own")),
            ("preferredTerminationGracePeriodSeconds", json!(0), "terminationGracePeriodSeconds", json!(5)),
            ("preferredArchitecture", json!("amd64"), "architecture", json!("arm64")),
            ("preferredLaunchSecurity", json!({"sev": {}}), "domain.launchSecurity", json!({"tdx": {}})),
        ] {
            let mut preference = json!({});
            *at(&mut preference, path) = preferred.clone();
            assert_eq!(get(&filled(preference.clone(), bare(json!({}))), field), &preferred, "{path}");
            let mut spec = bare(json!({}));
            *at(&mut spec, field) = own.clone();
            assert_eq!(get(&filled(preference, spec), field), &own, "{path}");
        }
    }

    #[test]
    fn what_cannot_be_unset_gives_way() {
        let preference =
            json!({"features": {"preferredAcpi": {"enabled": true}}, "devices": {"preferredDisableHotplug": false}});
        let spec = filled(
            preference,
            json!({"domain": {"features": {"acpi": {"enabled": false}}, "devices": {"disableHotplug": true}}}),
        );
        assert_eq!(get(&spec, "domain.features.acpi.enabled"), true);
        assert_eq!(get(&spec, "domain.devices.disableHotplug"), false);
    }

    #[test]
    fn disks_are_filled_in_by_what_they_are() {
        let preference = json!({"devices": {
            "preferredDiskBus": "virtio", "preferredCdromBus": "sata", "preferredLunBus": "scsi", "preferredDiskCache": "none",
            "preferredDiskIO": "native", "preferredDiskDedicatedIoThread": true, "preferredDiskBlockSize": {"matchVolume": {}}}});
        let spec = json!({
            "domain": {"devices": {"autoattachPodInterface": false, "disks": [
                {"name": "a"}, {"name": "b", "cdrom": {}}, {"name": "c", "lun": {}}, {"name": "d", "disk": {"bus": "usb"}, "cache": "writeback"}]}},
            "volumes": [{"name": "a"}, {"name": "e"}]});
        let all = json!({"bus": "virtio"});
        assert_eq!(
            filled(preference, spec)["domain"]["devices"]["disks"],
            json!([
                {"name": "a", "disk": all, "cache": "none", "io": "native", "dedicatedIOThread": true, "blockSize": {"matchVolume": {}}},
                {"name": "b", "cdrom": {"bus": "sata"}},
                {"name": "c", "lun": {"bus": "scsi"}},
                {"name": "d", "disk": {"bus": "usb"}, "cache": "writeback", "io": "native", "blockSize": {"matchVolume": {}}},
                // Nothing showed this volume.
                {"name": "e", "disk": all, "cache": "none", "io": "native", "dedicatedIOThread": true, "blockSize": {"matchVolume": {}}},
            ])
        );
    }

    #[test]
    fn interfaces_inputs_panic_devices_and_sound() {
        let preference = json!({"devices": {
            "preferredInterfaceModel": "e1000", "preferredInterfaceMasquerade": {}, "preferredInputBus": "virtio",
            "preferredInputType": "tablet", "preferredPanicDeviceModel": "pvpanic", "preferredSoundModel": "ich9",
            "preferredAutoattachInputDevice": true}});
        let spec = filled(preference.clone(), json!({}));
        assert_eq!(
            get(&spec, "domain.devices.interfaces"),
            &json!([{"name": "default", "masquerade": {}, "model": "e1000"}])
        );
        assert_eq!(
            get(&spec, "domain.devices.inputs"),
            &json!([{"name": "default-0", "bus": "virtio", "type": "tablet"}])
        );
        assert_eq!(get(&spec, "domain.devices.panicDevices"), &json!([{"model": "pvpanic"}]));
        assert_eq!(get(&spec, "domain.devices.sound"), &Value::Null, "no sound where there was none");
        let spec = filled(
            preference,
            json!({"networks": [{"name": "a", "pod": {}}, {"name": "b", "multus": {"networkName": "x"}}, {"name": "c", "pod": {}}],
                "domain": {"devices": {"sound": {"name": "s"}, "panicDevices": [{}, {"model": "isa"}], "inputs": [{"name": "i", "bus": "usb"}],
                "interfaces": [{"name": "a"}, {"name": "b"}, {"name": "c", "bridge": {}, "model": "virtio"}]}}}),
        );
        assert_eq!(
            get(&spec, "domain.devices.interfaces"),
            &json!([{"name": "a", "model": "e1000", "masquerade": {}}, {"name": "b", "model": "e1000"}, {"name": "c", "bridge": {}, "model": "virtio"}])
        );
        assert_eq!(get(&spec, "domain.devices.inputs"), &json!([{"name": "i", "bus": "usb", "type": "tablet"}]));
        assert_eq!(get(&spec, "domain.devices.panicDevices"), &json!([{"model": "pvpanic"}, {"model": "isa"}]));
        assert_eq!(get(&spec, "domain.devices.sound.model"), "ich9");
    }

    #[test]
    fn boot_loaders() {
        let boot = |preferred: Value, own: Value| {
            let spec =
                json!({"domain": {"firmware": {"bootloader": own}, "devices": {"autoattachPodInterface": false}}});
            get(&filled(json!({"firmware": preferred}), spec), "domain.firmware.bootloader").clone()
        };
        let none = Value::Null;
        for (preferred, own, want) in [
            (
                json!({"preferredUseBios": true, "preferredUseBiosSerial": true}),
                none.clone(),
                json!({"bios": {"useSerial": true}}),
            ),
            (json!({"preferredUseBios": true}), json!({"efi": {}}), json!({"efi": {}})),
            (json!({"preferredEfi": {"secureBoot": false}}), none.clone(), json!({"efi": {"secureBoot": false}})),
            (json!({"preferredEfi": {"secureBoot": false}}), json!({"bios": {}}), json!({"bios": {}})),
            (
                json!({"preferredUseEfi": true, "preferredUseSecureBoot": true}),
                none.clone(),
                json!({"efi": {"secureBoot": true}}),
            ),
            (
                json!({"preferredUseSecureBoot": true}),
                json!({"efi": {"secureBoot": false}}),
                json!({"efi": {"secureBoot": false}}),
            ),
            (json!({"preferredUseSecureBoot": true}), none.clone(), none.clone()),
        ] {
            assert_eq!(boot(preferred.clone(), own.clone()), want, "{preferred} {own}");
        }
    }

    #[test]
    fn processor_features_are_added_once() {
        let preference = json!({"cpu": {"preferredCPUFeatures": [{"name": "a", "policy": "require"}, {"name": "b"}]}});
        let spec = filled(preference, json!({"domain": {"cpu": {"features": [{"name": "a", "policy": "disable"}]}}}));
        assert_eq!(get(&spec, "domain.cpu.features"), &json!([{"name": "a", "policy": "disable"}, {"name": "b"}]));
    }
}
