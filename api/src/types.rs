//! `kubevirt.io/v1` as virtfold reads it. Field meanings are KubeVirt's; quantities stay strings until parsed with
//! [`quantity_bytes`] or [`quantity_milli`].

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

macro_rules! reader {
    ($(#[$m:meta])* $name:ident { $($(#[$fm:meta])* $f:ident : $t:ty),* $(,)? }) => {
        $(#[$m])*
        #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        pub struct $name { $($(#[$fm])* pub $f: $t),* }
    };
}

reader!(
    /// Metadata of an object, as far as virtfold reads it.
    ObjectMeta {
        /// Name.
        name: String,
        /// Namespace; empty for cluster-scoped objects.
        namespace: String,
        /// Unique for ever.
        uid: String,
        /// Comparable (as a decimal number) within one resource only.
        resource_version: String,
        /// Grows with the spec.
        generation: i64,
        /// RFC 3339.
        creation_timestamp: Option<String>,
        /// RFC 3339; set while the object is being deleted.
        deletion_timestamp: Option<String>,
        /// Labels.
        labels: BTreeMap<String, String>,
        /// Annotations.
        annotations: BTreeMap<String, String>,
        /// Finalizers.
        finalizers: Vec<String>,
        /// Owners.
        owner_references: Vec<OwnerReference>,
    }
);
reader!(
    /// An owner of an object.
    OwnerReference {
        /// Group/version.
        api_version: String,
        /// Kind.
        kind: String,
        /// Name.
        name: String,
        /// UID; the only part that identifies.
        uid: String,
        /// Whether it is the managing controller.
        controller: bool,
        /// Whether a deletion of the owner in the foreground waits for this object.
        block_owner_deletion: bool,
    }
);
reader!(
    /// A condition in a status.
    Condition {
        /// Type.
        #[serde(rename = "type")]
        kind: String,
        /// `True`, `False` or `Unknown`.
        status: String,
        /// CamelCase reason.
        reason: String,
        /// For people.
        message: String,
        /// RFC 3339.
        last_transition_time: Option<String>,
    }
);
reader!(
    /// A virtual machine that may or may not run.
    VirtualMachine {
        /// Metadata.
        metadata: ObjectMeta,
        /// Wish.
        spec: VirtualMachineSpec,
        /// Observed.
        status: VirtualMachineStatus,
    }
);
reader!(
    /// Spec of a [`VirtualMachine`].
    VirtualMachineSpec {
        /// Deprecated twin of `run_strategy`.
        running: Option<bool>,
        /// Always, RerunOnFailure, Manual, Halted, Once, WaitAsReceiver.
        run_strategy: Option<String>,
        /// Instance template.
        template: VmiTemplate,
    }
);
reader!(
    /// Template of a VMI.
    VmiTemplate {
        /// Labels and annotations for the VMI.
        metadata: ObjectMeta,
        /// Spec of the VMI.
        spec: VmiSpec,
    }
);
reader!(
    /// Status of a [`VirtualMachine`].
    VirtualMachineStatus {
        /// Whether the VMI exists.
        created: bool,
        /// Copy of the VMI's Ready.
        ready: bool,
        /// The word that people read.
        printable_status: String,
        /// Last observed strategy.
        run_strategy: Option<String>,
        /// Conditions.
        conditions: Vec<Condition>,
        /// Requests of users; only the first is looked at.
        state_change_requests: Vec<StateChangeRequest>,
        /// Crash-loop state.
        start_failure: Option<StartFailure>,
        /// Generation of the VM that the VMI was made from.
        observed_generation: Option<i64>,
        /// Generation of the VM.
        desired_generation: Option<i64>,
    }
);
reader!(
    /// One request in `status.stateChangeRequests`.
    StateChangeRequest {
        /// `Start` or `Stop`.
        action: String,
        /// VMI that a Stop is for.
        uid: Option<String>,
        /// `paused: "true"` with a Start.
        data: BTreeMap<String, String>,
    }
);
reader!(
    /// Crash-loop state of a VM.
    StartFailure {
        /// Failures in a row.
        consecutive_fail_count: i64,
        /// VMI that counted last.
        #[serde(rename = "lastFailedVMIUID")]
        last_failed_vmi_uid: String,
        /// RFC 3339: no start before.
        retry_after_timestamp: Option<String>,
    }
);
reader!(
    /// A running (or ended) instance.
    VirtualMachineInstance {
        /// Metadata.
        metadata: ObjectMeta,
        /// Wish.
        spec: VmiSpec,
        /// Observed.
        status: VmiStatus,
    }
);
reader!(
    /// Spec of a [`VirtualMachineInstance`].
    VmiSpec {
        /// Devices, CPU, memory, firmware.
        domain: DomainSpec,
        /// Networks that interfaces connect to.
        networks: Vec<Network>,
        /// Volumes that disks are backed by.
        volumes: Vec<Volume>,
        /// Seconds from power button to kill.
        termination_grace_period_seconds: Option<i64>,
        /// `Paused` starts with stopped vCPUs.
        start_strategy: Option<String>,
        /// Guest host name.
        hostname: Option<String>,
        /// DNS subdomain.
        subdomain: Option<String>,
        /// What happens on eviction.
        eviction_strategy: Option<String>,
        /// Node labels required.
        node_selector: BTreeMap<String, String>,
        /// Kubernetes affinity, unread.
        affinity: Option<Value>,
        /// Kubernetes tolerations, unread.
        tolerations: Vec<Value>,
        /// Kubernetes topology spread, unread.
        topology_spread_constraints: Vec<Value>,
        /// Priority class.
        priority_class_name: Option<String>,
        /// Scheduler.
        scheduler_name: Option<String>,
        /// DNS policy of the pod.
        dns_policy: Option<String>,
        /// DNS configuration of the pod.
        dns_config: Option<Value>,
        /// Readiness probe, as in Kubernetes plus guestAgentPing.
        readiness_probe: Option<Value>,
        /// Liveness probe.
        liveness_probe: Option<Value>,
        /// Access credentials (unsupported for now).
        access_credentials: Vec<Value>,
        /// `amd64`, `arm64`, `s390x`.
        architecture: Option<String>,
    }
);
reader!(
    /// The virtual hardware.
    DomainSpec {
        /// vCPUs.
        cpu: Cpu,
        /// Guest memory.
        memory: Memory,
        /// Machine type.
        machine: Machine,
        /// Firmware.
        firmware: Firmware,
        /// Resource requests and limits of the launcher.
        resources: Resources,
        /// Devices.
        devices: Devices,
        /// ACPI and others.
        features: Value,
        /// Clock.
        clock: Value,
        /// Chassis SMBIOS strings.
        chassis: Value,
        /// IO threads policy.
        io_threads_policy: Option<String>,
    }
);
reader!(
    /// vCPU topology and model.
    Cpu {
        /// Cores a socket.
        cores: Option<u32>,
        /// Sockets.
        sockets: Option<u32>,
        /// Threads a core.
        threads: Option<u32>,
        /// Hotplug ceiling.
        max_sockets: Option<u32>,
        /// Named model, `host-model` or `host-passthrough`.
        model: Option<String>,
        /// Feature flags.
        features: Vec<CpuFeature>,
        /// Whole cores.
        dedicated_cpu_placement: bool,
    }
);
reader!(
    /// One CPU feature.
    CpuFeature {
        /// QEMU's name.
        name: String,
        /// force, require, optional, disable, forbid.
        policy: Option<String>,
    }
);
reader!(
    /// Guest memory.
    Memory {
        /// Memory that the guest sees.
        guest: Option<String>,
        /// Hotplug ceiling.
        max_guest: Option<String>,
        /// Huge pages.
        hugepages: Option<Value>,
    }
);
reader!(
    /// Machine type.
    Machine {
        /// `q35` and its versions.
        #[serde(rename = "type")]
        kind: String,
    }
);
reader!(
    /// Firmware.
    Firmware {
        /// SMBIOS UUID.
        uuid: Option<String>,
        /// SMBIOS serial.
        serial: Option<String>,
        /// BIOS or EFI.
        bootloader: Option<Bootloader>,
        /// Kernel boot from a container.
        kernel_boot: Option<Value>,
        /// ACPI tables.
        acpi: Option<Value>,
    }
);
reader!(
    /// Bootloader; one of the two.
    Bootloader {
        /// SeaBIOS.
        bios: Option<Value>,
        /// OVMF.
        efi: Option<Efi>,
    }
);
reader!(
    /// EFI settings.
    Efi {
        /// Secure boot, default true.
        secure_boot: Option<bool>,
        /// Keep variables.
        persistent: Option<bool>,
    }
);
reader!(
    /// Requests and limits; quantities as strings or numbers.
    Resources {
        /// Requests.
        requests: BTreeMap<String, Value>,
        /// Limits.
        limits: BTreeMap<String, Value>,
        /// Overcommit the guest's overhead.
        overcommit_guest_overhead: bool,
    }
);
reader!(
    /// Devices.
    Devices {
        /// Disks, CD-ROMs, LUNs.
        disks: Vec<Disk>,
        /// Network interfaces.
        interfaces: Vec<Interface>,
        /// Virtio RNG.
        rng: Option<Value>,
        /// Watchdog.
        watchdog: Option<Value>,
        /// Input devices.
        inputs: Vec<Value>,
        /// GPUs.
        gpus: Vec<Value>,
        /// Host devices.
        host_devices: Vec<Value>,
        /// virtiofs.
        filesystems: Vec<Value>,
        /// TPM.
        tpm: Option<Value>,
        /// Sound.
        sound: Option<Value>,
        /// Block multiqueue.
        block_multi_queue: Option<bool>,
        /// Net multiqueue.
        network_interface_multiqueue: Option<bool>,
        /// Default true.
        autoattach_graphics_device: Option<bool>,
        /// Default true.
        autoattach_serial_console: Option<bool>,
        /// Default true.
        autoattach_pod_interface: Option<bool>,
        /// Default true.
        autoattach_mem_balloon: Option<bool>,
        /// Log the serial console.
        log_serial_console: Option<bool>,
        /// Legacy virtio.
        use_virtio_transitional: Option<bool>,
    }
);
reader!(
    /// A disk; exactly one of `disk`, `cdrom`, `lun` (none means `disk`).
    Disk {
        /// Name, equal to a volume's.
        name: String,
        /// Disk target.
        disk: Option<DiskTarget>,
        /// CD-ROM target.
        cdrom: Option<DiskTarget>,
        /// LUN target.
        lun: Option<DiskTarget>,
        /// 1 is first.
        boot_order: Option<u32>,
        /// Serial number that the guest sees.
        serial: Option<String>,
        /// none, writethrough, writeback.
        cache: Option<String>,
        /// native, threads, io_uring.
        io: Option<String>,
        /// Dedicated IO thread.
        dedicated_io_thread: Option<bool>,
        /// Block sizes.
        block_size: Option<Value>,
        /// Shareable between VMs.
        shareable: Option<bool>,
        /// report, stop, ignore, enospace.
        error_policy: Option<String>,
    }
);
reader!(
    /// Bus and mode of a disk.
    DiskTarget {
        /// virtio, sata, scsi, usb.
        bus: Option<String>,
        /// Read only (CD-ROMs always are unless said otherwise).
        #[serde(rename = "readonly")]
        read_only: Option<bool>,
        /// PCI address.
        pci_address: Option<String>,
        /// Tray state of a CD-ROM.
        tray: Option<String>,
    }
);
reader!(
    /// A network interface; one binding.
    Interface {
        /// Name, equal to a network's.
        name: String,
        /// virtio, e1000e, ...
        model: Option<String>,
        /// MAC address.
        mac_address: Option<String>,
        /// Ports to forward; empty means all.
        ports: Vec<Port>,
        /// NAT behind the pod's address.
        masquerade: Option<Value>,
        /// Pod address handed to the guest.
        bridge: Option<Value>,
        /// SR-IOV.
        sriov: Option<Value>,
        /// Passt.
        passt_binding: Option<Value>,
        /// Plugin.
        binding: Option<Value>,
        /// Boot order.
        boot_order: Option<u32>,
        /// PCI address.
        pci_address: Option<String>,
        /// up, down, absent.
        state: Option<String>,
        /// DHCP options.
        dhcp_options: Option<Value>,
    }
);
reader!(
    /// A forwarded port.
    Port {
        /// Name.
        name: Option<String>,
        /// TCP or UDP.
        protocol: Option<String>,
        /// Number.
        port: u16,
    }
);
reader!(
    /// A network; one of `pod`, `multus`.
    Network {
        /// Name.
        name: String,
        /// The pod network.
        pod: Option<Value>,
        /// Multus.
        multus: Option<Value>,
    }
);
reader!(
    /// A volume; exactly one source.
    Volume {
        /// Name.
        name: String,
        /// PVC with a disk image.
        persistent_volume_claim: Option<ClaimSource>,
        /// DataVolume (its PVC has the same name).
        data_volume: Option<NameSource>,
        /// Image with a disk in `/disk`.
        container_disk: Option<ContainerDiskSource>,
        /// Scratch disk.
        empty_disk: Option<EmptyDiskSource>,
        /// NoCloud.
        cloud_init_no_cloud: Option<CloudInitSource>,
        /// Config drive.
        cloud_init_config_drive: Option<CloudInitSource>,
        /// Overlay over a PVC.
        ephemeral: Option<Value>,
        /// File on the host.
        host_disk: Option<Value>,
        /// ConfigMap as a disk.
        config_map: Option<Value>,
        /// Secret as a disk.
        secret: Option<Value>,
        /// Downward API as a disk.
        #[serde(rename = "downwardAPI")]
        downward_api: Option<Value>,
        /// Service account as a disk.
        service_account: Option<Value>,
        /// Downward metrics.
        downward_metrics: Option<Value>,
        /// Sysprep.
        sysprep: Option<Value>,
        /// Memory dump target.
        memory_dump: Option<Value>,
    }
);
reader!(
    /// PVC volume source.
    ClaimSource {
        /// Claim.
        claim_name: String,
        /// Read only.
        read_only: bool,
        /// Hotpluggable.
        hotpluggable: bool,
    }
);
reader!(
    /// DataVolume volume source.
    NameSource {
        /// Name.
        name: String,
        /// Hotpluggable.
        hotpluggable: bool,
    }
);
reader!(
    /// containerDisk volume source.
    ContainerDiskSource {
        /// Image reference.
        image: String,
        /// Secret with registry credentials.
        image_pull_secret: Option<String>,
        /// Path of the disk in the image.
        path: Option<String>,
        /// Always, IfNotPresent, Never.
        image_pull_policy: Option<String>,
    }
);
reader!(
    /// emptyDisk volume source.
    EmptyDiskSource {
        /// Size.
        capacity: Value,
    }
);
reader!(
    /// cloud-init volume source.
    CloudInitSource {
        /// Secret with `userdata` (or `userData`).
        #[serde(rename = "secretRef")]
        secret_ref: Option<LocalRef>,
        /// User data, base64.
        user_data_base64: Option<String>,
        /// User data.
        user_data: Option<String>,
        /// Secret with `networkdata`.
        network_data_secret_ref: Option<LocalRef>,
        /// Network data, base64.
        network_data_base64: Option<String>,
        /// Network data.
        network_data: Option<String>,
    }
);
reader!(
    /// Reference to an object of the same namespace.
    LocalRef {
        /// Name.
        name: String,
    }
);
reader!(
    /// Status of a [`VirtualMachineInstance`].
    VmiStatus {
        /// Pending, Scheduling, Scheduled, Running, Succeeded, Failed.
        phase: String,
        /// Reason of a failure.
        reason: Option<String>,
        /// Node that runs it.
        node_name: Option<String>,
        /// Pod UID to node: which launchers may run a domain.
        active_pods: BTreeMap<String, String>,
        /// Conditions.
        conditions: Vec<Condition>,
        /// Interfaces.
        interfaces: Vec<InterfaceStatus>,
        /// When each phase began.
        phase_transition_timestamps: Vec<PhaseTransition>,
        /// ControllerRevision of the VM.
        virtual_machine_revision_name: Option<String>,
        /// Guest OS.
        #[serde(rename = "guestOSInfo")]
        guest_os_info: Value,
        /// Being evacuated from this node.
        evacuation_node_name: Option<String>,
    }
);
reader!(
    /// Status of one interface.
    InterfaceStatus {
        /// Name in the spec.
        name: String,
        /// MAC.
        mac: String,
        /// First address.
        ip_address: String,
        /// All addresses.
        ip_addresses: Vec<String>,
        /// Name in the guest.
        interface_name: String,
        /// Where the facts come from.
        info_source: String,
    }
);
reader!(
    /// When a phase began.
    PhaseTransition {
        /// Phase.
        phase: String,
        /// RFC 3339.
        phase_transition_timestamp: String,
    }
);

/// Parses a Kubernetes quantity (a string such as `64Mi`, `1.5G`, `2e3`, or a JSON number) into thousandths, rounded up.
/// `None` where it is no quantity or does not fit.
pub fn quantity_milli(v: &Value) -> Option<i128> {
    let owned;
    let s = match v {
        Value::String(s) => s.as_str(),
        Value::Number(n) => {
            owned = n.to_string();
            owned.as_str()
        }
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => return None,
    };
    let (neg, s) = match s.as_bytes().first()? {
        b'-' => (true, &s[1..]),
        b'+' => (false, &s[1..]),
        _ => (false, s),
    };
    let end = s.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(s.len());
    let (num, suffix) = s.split_at(end);
    let (int, frac) = num.split_once('.').unwrap_or((num, ""));
    if (int.is_empty() && frac.is_empty()) || frac.contains('.') || int.len() > 24 {
        return None;
    }
    // scale = mul / div
    let (mul, exp): (i128, i32) = match suffix {
        "" => (1, 0),
        "n" => (1, -9),
        "u" => (1, -6),
        "m" => (1, -3),
        "k" => (1, 3),
        "M" => (1, 6),
        "G" => (1, 9),
        "T" => (1, 12),
        "P" => (1, 15),
        "E" => (1, 18),
        "Ki" => (1 << 10, 0),
        "Mi" => (1 << 20, 0),
        "Gi" => (1 << 30, 0),
        "Ti" => (1 << 40, 0),
        "Pi" => (1 << 50, 0),
        "Ei" => (1 << 60, 0),
        e if e.starts_with(['e', 'E']) => (1, e[1..].parse::<i32>().ok().filter(|e| (-24..=24).contains(e))?),
        _ => return None,
    };
    let digits: i128 = format!("{int}{frac}").parse().ok()?;
    let exp = exp + 3 - i32::try_from(frac.len()).ok()?;
    let n = digits.checked_mul(mul)?;
    let r = if exp >= 0 {
        n.checked_mul(10_i128.checked_pow(u32::try_from(exp).ok()?)?)?
    } else {
        let d = 10_i128.checked_pow(u32::try_from(-exp).ok()?)?;
        n / d + i128::from(n % d != 0)
    };
    Some(if neg { -r } else { r })
}

/// Parses a Kubernetes quantity into whole units (bytes, CPUs), rounded up.
pub fn quantity_bytes(v: &Value) -> Option<u64> {
    let m = quantity_milli(v)?;
    u64::try_from(m / 1000 + i128::from(m % 1000 > 0)).ok()
}

impl VmiSpec {
    /// vCPUs: sockets x cores x threads, each 1 where unset.
    pub fn vcpus(&self) -> u32 {
        let c = &self.domain.cpu;
        [c.sockets, c.cores, c.threads].iter().map(|n| n.unwrap_or(1).max(1)).product()
    }

    /// Guest memory in bytes: `memory.guest`, else the memory request, else the limit.
    pub fn guest_memory(&self) -> Option<u64> {
        let d = &self.domain;
        let guest = d.memory.guest.clone().map(Value::String);
        guest
            .as_ref()
            .or(d.resources.requests.get("memory"))
            .or(d.resources.limits.get("memory"))
            .and_then(quantity_bytes)
    }

    /// Seconds between power button and kill.
    pub fn grace_seconds(&self) -> i64 {
        self.termination_grace_period_seconds.unwrap_or(crate::names::DEFAULT_GRACE_SECONDS).max(0)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    #[test]
    fn quantities() {
        for (q, want) in [
            ("64Mi", Some(64 << 20)),
            ("1.5Gi", Some(3 << 29)),
            ("1", Some(1)),
            ("1500m", Some(2)),
            ("2e3", Some(2000)),
            ("", None),
            ("1Q", None),
            (".", None),
            ("1.2.3", None),
            ("-1", None),
        ] {
            assert_eq!(quantity_bytes(&json!(q)), want, "{q}");
        }
        assert_eq!(quantity_milli(&json!("100m")), Some(100));
        assert_eq!(quantity_bytes(&json!(0.5)), Some(1));
    }
}
