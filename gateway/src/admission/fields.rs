//! What each field of a VirtualMachine's or VirtualMachineInstance's spec does here: done, refused, or a hint that is
//! accepted with a warning. A field that is not in the table is refused, so that nothing is ignored in silence; a test
//! walks the custom resource definitions and finds a line for every field.

use super::rules::Problems;
use crate::status::CauseType;
use serde_json::Value;

/// What a field does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum State {
    /// It works; perhaps with a remark.
    Done(&'static str),
    /// It works for some of the values that KubeVirt knows.
    Only(&'static [&'static str]),
    /// It is refused: the reason completes "... is not supported yet: ".
    Refused(&'static str),
    /// It is accepted with a warning, because the machine runs without it, too.
    Hint(&'static str),
    /// A hint, except for values that ask for what happens anyway.
    HintUnless(&'static [&'static str], &'static str),
}

use State::{Done, Hint, HintUnless, Only, Refused};

/// One line of the table: a path and everything below it, unless a longer path says otherwise.
pub type Field = (&'static str, State);

const HOTPLUG: &str = "nothing can be plugged into a running machine";
const DEVICES: &str = "the host's devices are not passed through";
const VOLUME: &str = "only claims, container disks, empty disks and cloud-init are";
const BINDING: &str = "only masquerade on the pod network is";
const TIMER: &str = "the hypervisor keeps its own defaults for this timer";
const PROBE: &str = "of the pod: the kubelet asks the guest over the pod network, or inside of it by its agent";
const TUNING: &str = "the driver does not set it";
const DEPLOYED: &str = "nothing is deployed by this object";
const ROTATION: &str = "each part renews its certificates at half of their life";
const GATES: &str = "what is built works without a gate";
const ARCHITECTURE: &str = "machines are amd64";
const LABELS: &str = "a node's labels say what its QEMU can do";
const OVERHEAD: &str = "a pod asks for what its machine has and the launcher needs";

/// `spec` of a VirtualMachine, beside its template's spec.
pub const VM: &[Field] = &[
    ("dataVolumeTemplates", Refused("there are no DataVolumes; make a PersistentVolumeClaim")),
    ("instancetype", Done("")),
    ("preference", Done("")),
    ("runStrategy", Done("")),
    ("running", Done("deprecated, use runStrategy")),
    ("template.metadata", Done("")),
    ("updateVolumesStrategy", Only(&["Replacement"])),
];

/// `spec` of a VirtualMachineInstance, and `spec.template.spec` of a VirtualMachine.
pub const INSTANCE: &[Field] = &[
    ("accessCredentials", Refused("use cloud-init")),
    ("affinity", Done("of the pod")),
    ("architecture", Only(&["amd64"])),
    ("dnsConfig", Done("of the pod")),
    ("dnsPolicy", Done("of the pod")),
    (
        "evictionStrategy",
        HintUnless(
            &["None", "External"],
            "there is no live migration yet: with LiveMigrate an eviction is refused, with LiveMigrateIfPossible the guest is shut down",
        ),
    ),
    ("hostname", Done("")),
    ("livenessProbe", Done(PROBE)),
    ("networks[].multus", Refused(BINDING)),
    ("networks[].name", Done("")),
    ("networks[].pod", Done("")),
    ("networks[].pod.vmIPv6NetworkCIDR", Refused("masquerade is IPv4 only")),
    ("networks[].pod.vmNetworkCIDR", Only(&["10.0.2.0/24"])),
    ("networks[].resourceClaim", Refused(DEVICES)),
    ("nodeSelector", Done("of the pod")),
    ("priorityClassName", Done("of the pod")),
    ("readinessProbe", Done(PROBE)),
    ("resourceClaims", Refused(DEVICES)),
    ("schedulerName", Done("of the pod")),
    ("serviceAccountName", Refused("the launcher has no service account")),
    ("startStrategy", Done("")),
    ("subdomain", Done("of the pod")),
    ("terminationGracePeriodSeconds", Done("")),
    ("tolerations", Done("of the pod")),
    ("topologySpreadConstraints", Done("of the pod")),
    ("utilityVolumes", Refused(HOTPLUG)),
    // the hardware
    ("domain.chassis", Done("")),
    ("domain.clock.timer.hpet.present", Done("")),
    ("domain.clock.timer.hpet.tickPolicy", Hint(TIMER)),
    ("domain.clock.timer.hyperv", Hint(TIMER)),
    ("domain.clock.timer.kvm", Hint(TIMER)),
    ("domain.clock.timer.pit", Hint(TIMER)),
    ("domain.clock.timer.rtc", Hint(TIMER)),
    ("domain.clock.timezone", Only(&["UTC"])),
    ("domain.clock.utc", Done("")),
    ("domain.cpu.cores", Done("")),
    ("domain.cpu.dedicatedCpuPlacement", Refused("CPUs are shared")),
    ("domain.cpu.features", Done("")),
    ("domain.cpu.isolateEmulatorThread", Refused("CPUs are shared")),
    ("domain.cpu.maxSockets", Hint(HOTPLUG)),
    ("domain.cpu.model", Done("")),
    ("domain.cpu.numa", Refused("CPUs are shared")),
    ("domain.cpu.realtime", Refused("CPUs are shared")),
    ("domain.cpu.sockets", Done("")),
    ("domain.cpu.threads", Done("")),
    ("domain.features.acpi", Done("")),
    ("domain.features.apic", Done("always there")),
    ("domain.features.apic.endOfInterrupt", Hint(TUNING)),
    ("domain.features.hyperv", Done("has an effect under KVM")),
    ("domain.features.hyperv.tlbflush.direct", Refused(TUNING)),
    ("domain.features.hyperv.tlbflush.extended", Refused(TUNING)),
    ("domain.features.hypervPassthrough", Refused(TUNING)),
    ("domain.features.kvm", Done("")),
    ("domain.features.pvspinlock", Hint(TUNING)),
    ("domain.features.smm", Done("")),
    ("domain.firmware.acpi", Refused("tables of one's own are not")),
    ("domain.firmware.bootloader.bios", Done("")),
    ("domain.firmware.bootloader.bios.useSerial", Hint(TUNING)),
    ("domain.firmware.bootloader.efi", Done("")),
    ("domain.firmware.bootloader.efi.persistent", Refused("EFI variables live as long as the instance")),
    ("domain.firmware.kernelBoot", Refused("the boot loader on the disk is what boots")),
    ("domain.firmware.serial", Done("")),
    ("domain.firmware.uuid", Done("")),
    ("domain.ioThreads", Refused(TUNING)),
    ("domain.ioThreadsPolicy", Refused(TUNING)),
    ("domain.launchSecurity", Refused("guest memory is not encrypted")),
    ("domain.machine.type", Done("")),
    ("domain.memory.guest", Done("")),
    ("domain.memory.hugepages", Refused("guest memory is of ordinary pages")),
    ("domain.memory.maxGuest", Hint(HOTPLUG)),
    ("domain.memory.reservedOverhead", Refused(TUNING)),
    ("domain.rebootPolicy", Only(&["Reboot"])),
    ("domain.resources", Done("of the pod")),
    // devices
    ("domain.devices.autoattachGraphicsDevice", Done("")),
    ("domain.devices.autoattachInputDevice", Done("")),
    ("domain.devices.autoattachMemBalloon", Done("")),
    ("domain.devices.autoattachPodInterface", Done("")),
    ("domain.devices.autoattachSerialConsole", Done("")),
    ("domain.devices.autoattachVSOCK", Refused("there is no vsock")),
    ("domain.devices.blockMultiQueue", Refused(TUNING)),
    ("domain.devices.clientPassthrough", Refused("there is no USB redirection")),
    ("domain.devices.disableHotplug", Done("nothing can be plugged in")),
    ("domain.devices.disks[].blockSize.custom", Done("")),
    ("domain.devices.disks[].blockSize.custom.discardGranularity", Refused(TUNING)),
    ("domain.devices.disks[].blockSize.matchVolume", Refused(TUNING)),
    ("domain.devices.disks[].bootOrder", Done("")),
    ("domain.devices.disks[].cache", Done("")),
    ("domain.devices.disks[].cdrom", Done("")),
    ("domain.devices.disks[].cdrom.tray", Only(&["closed"])),
    ("domain.devices.disks[].changedBlockTracking", Refused("there are no backups")),
    ("domain.devices.disks[].dedicatedIOThread", Done("")),
    ("domain.devices.disks[].disk", Done("")),
    ("domain.devices.disks[].disk.pciAddress", Refused(TUNING)),
    ("domain.devices.disks[].errorPolicy", Done("")),
    ("domain.devices.disks[].io", Done("")),
    ("domain.devices.disks[].lun", Refused(DEVICES)),
    ("domain.devices.disks[].name", Done("")),
    ("domain.devices.disks[].serial", Done("")),
    ("domain.devices.disks[].shareable", Done("")),
    ("domain.devices.disks[].tag", Hint("cloud-init's metadata carries no tags")),
    ("domain.devices.downwardMetrics", Refused("there are no metrics for the guest")),
    ("domain.devices.filesystems", Refused("file systems are not shared with the host")),
    ("domain.devices.gpus", Refused(DEVICES)),
    ("domain.devices.hostDevices", Refused(DEVICES)),
    ("domain.devices.inputs", Done("")),
    ("domain.devices.interfaces[].acpiIndex", Done("")),
    ("domain.devices.interfaces[].binding", Refused(BINDING)),
    ("domain.devices.interfaces[].bootOrder", Done("")),
    ("domain.devices.interfaces[].bridge", Refused(BINDING)),
    ("domain.devices.interfaces[].dhcpOptions", Refused("the guest gets address, gateway and name servers alone")),
    ("domain.devices.interfaces[].macAddress", Done("")),
    ("domain.devices.interfaces[].macvtap", Refused(BINDING)),
    ("domain.devices.interfaces[].masquerade", Done("")),
    (
        "domain.devices.interfaces[].model",
        Only(&["virtio", "virtio-net-pci", "e1000", "e1000e", "rtl8139", "ne2k_pci", "pcnet"]),
    ),
    ("domain.devices.interfaces[].name", Done("")),
    ("domain.devices.interfaces[].passt", Refused(BINDING)),
    ("domain.devices.interfaces[].passtBinding", Refused(BINDING)),
    ("domain.devices.interfaces[].pciAddress", Refused(TUNING)),
    ("domain.devices.interfaces[].portRanges", Refused("name single ports")),
    ("domain.devices.interfaces[].ports", Done("")),
    ("domain.devices.interfaces[].slirp", Refused(BINDING)),
    ("domain.devices.interfaces[].sriov", Refused(BINDING)),
    ("domain.devices.interfaces[].state", Only(&["up", "down"])),
    ("domain.devices.interfaces[].tag", Hint("cloud-init's metadata carries no tags")),
    ("domain.devices.logSerialConsole", Hint("the serial console is logged on the node, not by a container")),
    ("domain.devices.networkInterfaceMultiqueue", Refused(TUNING)),
    ("domain.devices.panicDevices[].model", Only(&["isa", "pvpanic"])),
    ("domain.devices.rng", Done("always there")),
    ("domain.devices.sound", Refused("there is no sound")),
    ("domain.devices.tpm", Refused("there is no TPM")),
    ("domain.devices.useVirtioTransitional", Refused(TUNING)),
    ("domain.devices.video.type", Only(&["vga", "cirrus", "virtio", "bochs"])),
    ("domain.devices.watchdog.diag288", Refused("it is s390x's")),
    ("domain.devices.watchdog.i6300esb", Done("")),
    ("domain.devices.watchdog.name", Done("")),
    // volumes
    ("volumes[].cloudInitConfigDrive", Done("")),
    ("volumes[].cloudInitNoCloud", Done("")),
    ("volumes[].configMap", Refused(VOLUME)),
    ("volumes[].containerDisk", Done("")),
    ("volumes[].containerPath", Refused(VOLUME)),
    ("volumes[].dataVolume", Done("the claim of that name")),
    ("volumes[].dataVolume.hotpluggable", Hint(HOTPLUG)),
    ("volumes[].downwardAPI", Refused(VOLUME)),
    ("volumes[].downwardMetrics", Refused(VOLUME)),
    ("volumes[].emptyDisk", Done("")),
    ("volumes[].ephemeral", Done("")),
    ("volumes[].hostDisk", Refused(VOLUME)),
    ("volumes[].memoryDump", Refused(VOLUME)),
    ("volumes[].name", Done("")),
    ("volumes[].persistentVolumeClaim", Done("")),
    ("volumes[].persistentVolumeClaim.hotpluggable", Hint(HOTPLUG)),
    ("volumes[].secret", Refused(VOLUME)),
    ("volumes[].serviceAccount", Refused(VOLUME)),
    ("volumes[].sysprep", Refused(VOLUME)),
];

/// `spec` of a VirtualMachineInstancetype or VirtualMachineClusterInstancetype.
pub const INSTANCETYPE: &[Field] = &[
    ("annotations", Done("")),
    ("cpu.dedicatedCPUPlacement", Refused("CPUs are shared")),
    ("cpu.guest", Done("")),
    ("cpu.isolateEmulatorThread", Refused("CPUs are shared")),
    ("cpu.maxSockets", Hint(HOTPLUG)),
    ("cpu.model", Done("")),
    ("cpu.numa", Refused("CPUs are shared")),
    ("cpu.realtime", Refused("CPUs are shared")),
    ("gpus", Refused(DEVICES)),
    ("hostDevices", Refused(DEVICES)),
    ("ioThreads", Refused(TUNING)),
    ("ioThreadsPolicy", Refused(TUNING)),
    ("launchSecurity", Refused("guest memory is not encrypted")),
    ("memory.guest", Done("")),
    ("memory.hugepages", Refused("guest memory is of ordinary pages")),
    ("memory.maxGuest", Hint(HOTPLUG)),
    ("memory.overcommitPercent", Done("")),
    ("nodeSelector", Done("")),
    ("schedulerName", Done("")),
];

/// `spec` of a VirtualMachinePreference or VirtualMachineClusterPreference. What it fills in is held against [`INSTANCE`], too.
pub const PREFERENCE: &[Field] = &[
    ("annotations", Done("")),
    ("clock.preferredClockOffset.timezone", Only(&["UTC"])),
    ("clock.preferredClockOffset.utc", Done("")),
    ("clock.preferredTimer.hpet.present", Done("")),
    ("clock.preferredTimer.hpet.tickPolicy", Hint(TIMER)),
    ("clock.preferredTimer.hyperv", Hint(TIMER)),
    ("clock.preferredTimer.kvm", Hint(TIMER)),
    ("clock.preferredTimer.pit", Hint(TIMER)),
    ("clock.preferredTimer.rtc", Hint(TIMER)),
    ("cpu", Done("")),
    ("devices.preferredAutoattachGraphicsDevice", Done("")),
    ("devices.preferredAutoattachInputDevice", Done("")),
    ("devices.preferredAutoattachMemBalloon", Done("")),
    ("devices.preferredAutoattachPodInterface", Done("")),
    ("devices.preferredAutoattachSerialConsole", Done("")),
    ("devices.preferredBlockMultiQueue", Refused(TUNING)),
    ("devices.preferredCdromBus", Done("")),
    ("devices.preferredDisableHotplug", Done("nothing can be plugged in")),
    ("devices.preferredDiskBlockSize.custom", Done("")),
    ("devices.preferredDiskBlockSize.custom.discardGranularity", Refused(TUNING)),
    ("devices.preferredDiskBlockSize.matchVolume", Refused(TUNING)),
    ("devices.preferredDiskBus", Done("")),
    ("devices.preferredDiskCache", Done("")),
    ("devices.preferredDiskDedicatedIoThread", Done("")),
    ("devices.preferredDiskIO", Done("")),
    ("devices.preferredInputBus", Done("")),
    ("devices.preferredInputType", Done("")),
    ("devices.preferredInterfaceMasquerade", Done("")),
    ("devices.preferredInterfaceModel", Done("")),
    ("devices.preferredLunBus", Done("LUNs themselves are refused")),
    ("devices.preferredNetworkInterfaceMultiQueue", Refused(TUNING)),
    ("devices.preferredPanicDeviceModel", Only(&["isa", "pvpanic"])),
    ("devices.preferredRng", Done("")),
    ("devices.preferredSoundModel", Done("sound itself is refused")),
    ("devices.preferredTPM", Refused("there is no TPM")),
    ("devices.preferredUseVirtioTransitional", Refused(TUNING)),
    ("devices.preferredVideoType", Only(&["vga", "cirrus", "virtio", "bochs"])),
    ("devices.preferredVirtualGPUOptions", Refused(DEVICES)),
    ("features.preferredAcpi", Done("")),
    ("features.preferredApic", Done("always there")),
    ("features.preferredApic.endOfInterrupt", Hint(TUNING)),
    ("features.preferredHyperv", Done("has an effect under KVM")),
    ("features.preferredHyperv.tlbflush.direct", Refused(TUNING)),
    ("features.preferredHyperv.tlbflush.extended", Refused(TUNING)),
    ("features.preferredKvm", Done("")),
    ("features.preferredPvspinlock", Hint(TUNING)),
    ("features.preferredSmm", Done("")),
    ("firmware.preferredEfi", Done("")),
    ("firmware.preferredEfi.persistent", Refused("EFI variables live as long as the instance")),
    ("firmware.preferredUseBios", Done("")),
    ("firmware.preferredUseBiosSerial", Hint(TUNING)),
    ("firmware.preferredUseEfi", Done("deprecated, use preferredEfi")),
    ("firmware.preferredUseSecureBoot", Done("deprecated, use preferredEfi")),
    ("machine.preferredMachineType", Done("")),
    ("preferSpreadSocketToCoreRatio", Done("deprecated, use cpu.spreadOptions.ratio")),
    ("preferredArchitecture", Only(&["amd64"])),
    ("preferredLaunchSecurity", Refused("guest memory is not encrypted")),
    ("preferredSubdomain", Done("")),
    ("preferredTerminationGracePeriodSeconds", Done("")),
    ("requirements", Done("")),
    ("volumes.preferredStorageClassName", Hint("there are no DataVolumes")),
];

/// `spec` of the KubeVirt object.
pub const CLUSTER: &[Field] = &[
    ("certificateRotateStrategy.selfSigned", Hint(ROTATION)),
    ("configuration.additionalGuestMemoryOverheadRatio", Refused(OVERHEAD)),
    ("configuration.apiConfiguration", Hint(DEPLOYED)),
    ("configuration.architectureConfiguration.amd64.emulatedMachines", Refused("q35* and pc-q35* are")),
    ("configuration.architectureConfiguration.amd64.machineType", Done("")),
    ("configuration.architectureConfiguration.amd64.ovmfPath", Refused("the firmware is the node's")),
    ("configuration.architectureConfiguration.arm64", Hint(ARCHITECTURE)),
    ("configuration.architectureConfiguration.defaultArchitecture", Only(&["amd64"])),
    ("configuration.architectureConfiguration.ppc64le", Hint(ARCHITECTURE)),
    ("configuration.architectureConfiguration.s390x", Hint(ARCHITECTURE)),
    ("configuration.autoCPULimitNamespaceLabelSelector", Refused(OVERHEAD)),
    ("configuration.changedBlockTrackingLabelSelectors", Refused("there are no backups")),
    ("configuration.commonInstancetypesDeployment.enabled", Hint("there are none that are brought along")),
    ("configuration.confidentialCompute", Refused("guest memory is not encrypted")),
    ("configuration.controllerConfiguration", Hint(DEPLOYED)),
    ("configuration.cpuModel", Done("")),
    ("configuration.cpuRequest", Refused(OVERHEAD)),
    ("configuration.defaultRuntimeClass", Refused("launchers run under the default runtime class")),
    ("configuration.developerConfiguration.clusterProfiler", Refused("there is no profiler")),
    ("configuration.developerConfiguration.cpuAllocationRatio", Refused(OVERHEAD)),
    ("configuration.developerConfiguration.disabledFeatureGates", Hint(GATES)),
    ("configuration.developerConfiguration.diskVerification", Refused(TUNING)),
    ("configuration.developerConfiguration.featureGates", Hint(GATES)),
    ("configuration.developerConfiguration.logVerbosity", Hint(DEPLOYED)),
    ("configuration.developerConfiguration.memoryOvercommit", Refused(OVERHEAD)),
    ("configuration.developerConfiguration.minimumClusterTSCFrequency", Refused(TUNING)),
    ("configuration.developerConfiguration.minimumReservePVCBytes", Refused(TUNING)),
    ("configuration.developerConfiguration.nodeSelectors", Refused("a machine names its nodes itself")),
    ("configuration.developerConfiguration.pvcTolerateLessSpaceUpToPercent", Refused(TUNING)),
    ("configuration.developerConfiguration.useEmulation", Hint("a node without KVM emulates")),
    ("configuration.emulatedMachines", Refused("q35* and pc-q35* are")),
    ("configuration.evictionStrategy", Done("")),
    ("configuration.handlerConfiguration", Hint(DEPLOYED)),
    ("configuration.hypervisors", Refused("there is one")),
    ("configuration.imagePullPolicy", Hint(DEPLOYED)),
    ("configuration.instancetype.referencePolicy", Done("a machine is expanded when it is written")),
    ("configuration.ksmConfiguration", Refused(TUNING)),
    ("configuration.liveUpdateConfiguration", Hint(HOTPLUG)),
    ("configuration.machineType", Done("deprecated, use architectureConfiguration")),
    ("configuration.mediatedDevicesConfiguration", Refused(DEVICES)),
    ("configuration.memBalloonStatsPeriod", Refused(TUNING)),
    ("configuration.migrations", Hint("there is no live migration")),
    ("configuration.minCPUModel", Hint(LABELS)),
    ("configuration.network.binding", Refused(BINDING)),
    ("configuration.network.defaultNetworkInterface", Only(&["masquerade"])),
    ("configuration.network.permitBridgeInterfaceOnPodNetwork", Hint(BINDING)),
    ("configuration.network.permitSlirpInterface", Hint(BINDING)),
    ("configuration.obsoleteCPUModels", Hint(LABELS)),
    ("configuration.ovmfPath", Refused("the firmware is the node's")),
    ("configuration.permittedHostDevices", Refused(DEVICES)),
    ("configuration.persistentReservationConfiguration", Refused(DEVICES)),
    ("configuration.roleAggregationStrategy", Only(&["AggregateToDefault"])),
    ("configuration.seccompConfiguration", Refused("launchers have a profile of their own")),
    ("configuration.selinuxLauncherType", Refused("launchers have no SELinux type of their own")),
    ("configuration.smbios", Refused(TUNING)),
    ("configuration.supportContainerResources", Hint("there are no containers beside the launcher")),
    ("configuration.supportedGuestAgentVersions", Hint("deprecated; an agent is judged by what it can do")),
    ("configuration.tlsConfiguration", Refused("all parts speak TLS 1.2 and 1.3")),
    ("configuration.virtTemplateDeployment.enabled", Hint("there are no templates")),
    ("configuration.virtualMachineInstancesPerNode", Refused("a node takes what fits")),
    ("configuration.virtualMachineOptions.disableFreePageReporting", Hint(TUNING)),
    ("configuration.virtualMachineOptions.disableSerialConsoleLog", Hint("no container logs the serial console")),
    (
        "configuration.vmRolloutStrategy",
        HintUnless(&["Stage"], "a change of a running machine takes effect with its next start"),
    ),
    ("configuration.vmStateStorageClass", Refused("no state outlives an instance")),
    ("configuration.webhookConfiguration", Hint(DEPLOYED)),
    ("customizeComponents.flags", Hint(DEPLOYED)),
    ("customizeComponents.patches", Hint(DEPLOYED)),
    ("imagePullPolicy", Hint(DEPLOYED)),
    ("imagePullSecrets", Hint(DEPLOYED)),
    ("imageRegistry", Hint(DEPLOYED)),
    ("imageTag", Hint(DEPLOYED)),
    ("infra", Hint(DEPLOYED)),
    ("monitorAccount", Hint(DEPLOYED)),
    ("monitorNamespace", Hint(DEPLOYED)),
    ("productComponent", Hint(DEPLOYED)),
    ("productName", Hint(DEPLOYED)),
    ("productVersion", Hint(DEPLOYED)),
    ("serviceMonitorNamespace", Hint(DEPLOYED)),
    ("synchronizationPort", Hint(DEPLOYED)),
    ("uninstallStrategy", Done("")),
    ("workloadUpdateStrategy.batchEvictionInterval", Hint(DEPLOYED)),
    ("workloadUpdateStrategy.batchEvictionSize", Hint(DEPLOYED)),
    ("workloadUpdateStrategy.workloadUpdateMethods", Hint(DEPLOYED)),
    ("workloads", Hint(DEPLOYED)),
];

/// Holds an object against a table; `base` is the path of the object. `skip` is a field that another table is about.
pub(super) fn check(table: &[Field], value: &Value, base: &str, skip: &str, problems: &mut Problems) {
    walk(&Walk { table, skip }, value, base, "", false, problems);
}

struct Walk<'a> {
    table: &'a [Field],
    skip: &'a str,
}

/// `shown` is the path for people (`a[3].b`), `path` the one of the table (`a[].b`).
fn walk(w: &Walk<'_>, value: &Value, shown: &str, path: &str, inherited: bool, problems: &mut Problems) {
    if asks_nothing(value) || (!path.is_empty() && path == w.skip) {
        return;
    }
    let line = w.table.iter().find(|(p, _)| *p == path).map(|(_, s)| *s);
    let refuse = |problems: &mut Problems, message: String| problems.add(CauseType::NotSupported, shown, message);
    match line {
        Some(Refused(why)) => return refuse(problems, format!("{shown} is not supported yet: {why}")),
        Some(Only(values)) if !value.as_str().is_some_and(|v| values.contains(&v)) => {
            return refuse(
                problems,
                format!("{shown} is not supported yet with the value {value}, only with {}", values.join(", ")),
            );
        }
        Some(HintUnless(values, _)) if value.as_str().is_some_and(|v| values.contains(&v)) => {}
        Some(Hint(why) | HintUnless(_, why)) => problems.warn(format!("{shown} has no effect yet: {why}")),
        Some(Done(_) | Only(_)) | None => {}
    }
    let inherited = inherited || line.is_some();
    let below = format!("{path}.");
    let deeper = inherited
        || w.table.iter().any(|(p, _)| p.starts_with(&below) || p.starts_with(&format!("{path}[]")) || path.is_empty());
    if !deeper && w.skip != path && !w.skip.starts_with(&below) {
        return refuse(problems, format!("{shown} is not a known field"));
    }
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                let shown = format!("{shown}.{name}");
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                walk(w, field, &shown, &path, inherited, problems);
            }
        }
        Value::Array(list) => {
            for (i, item) in list.iter().enumerate() {
                walk(w, item, &format!("{shown}[{i}]"), &format!("{path}[]"), inherited, problems);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn asks_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(s) => s.is_empty(),
        Value::Number(n) => n.as_i64() == Some(0),
        Value::Array(a) => a.is_empty(),
        Value::Bool(true) | Value::Object(_) => false,
    }
}

/// All tables for the documentation.
pub fn markdown() -> String {
    let mut out = String::from(
        "# What each field does\n\nGenerated from `gateway/src/admission/fields.rs`. A line is about everything below its path, too, unless a longer path says otherwise.\n",
    );
    for (title, table) in [
        ("VirtualMachine `spec`", VM),
        ("VirtualMachineInstance `spec` (VirtualMachine `spec.template.spec`)", INSTANCE),
        ("VirtualMachineInstancetype `spec`, also of the cluster", INSTANCETYPE),
        ("VirtualMachinePreference `spec`, also of the cluster", PREFERENCE),
        ("KubeVirt `spec`", CLUSTER),
    ] {
        out.push_str(&format!("\n## {title}\n\n| field | state | remark |\n|---|---|---|\n"));
        for (path, state) in table {
            let (word, remark) = match state {
                Done(note) => ("done", (*note).to_owned()),
                Only(values) => ("done", format!("only {}", values.join(", "))),
                Refused(why) => ("refused", (*why).to_owned()),
                Hint(why) => ("hint", (*why).to_owned()),
                HintUnless(values, why) => ("hint", format!("unless {}: {why}", values.join(", "))),
            };
            out.push_str(&format!("| `{path}` | {word} | {remark} |\n"));
        }
    }
    out.push_str("\n## Whole kinds that are refused\n\n| kind | remark |\n|---|---|\n");
    for (kind, why) in api::crd::all_missing() {
        out.push_str(&format!("| {kind} | {why} |\n"));
    }
    out
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    /// Every field of a schema, in the paths of the table, that no line of the table is about.
    fn missing(schema: &Value, path: &str, table: &[Field], skip: &str, out: &mut Vec<String>) {
        if path == skip && !skip.is_empty() || table.iter().any(|(p, _)| *p == path) {
            return;
        }
        if let Some(fields) = schema["properties"].as_object() {
            for (name, field) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                missing(field, &path, table, skip, out);
            }
        } else if schema["items"].is_object() {
            missing(&schema["items"], &format!("{path}[]"), table, skip, out);
        } else {
            out.push(path.to_owned());
        }
    }

    fn known(schema: &Value, path: &str) -> bool {
        path.split('.')
            .try_fold(schema, |s, part| {
                let (name, list) = part.strip_suffix("[]").map_or((part, false), |n| (n, true));
                let s = s["properties"].get(name)?;
                Some(if list { &s["items"] } else { s })
            })
            .is_some()
    }

    #[test]
    fn every_field_has_a_line_and_every_line_a_field() {
        let crds = api::crd::all();
        let spec = |kind: &str| {
            let crd = crds.iter().find(|c| c["spec"]["names"]["kind"] == kind).unwrap();
            crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"].clone()
        };
        for (table, schema, skip) in [
            (VM, spec("VirtualMachine"), "template.spec"),
            (INSTANCE, spec("VirtualMachineInstance"), ""),
            (INSTANCETYPE, spec("VirtualMachineInstancetype"), ""),
            (PREFERENCE, spec("VirtualMachinePreference"), ""),
            (CLUSTER, spec("KubeVirt"), ""),
        ] {
            let mut out = Vec::new();
            missing(&schema, "", table, skip, &mut out);
            assert_eq!(out, Vec::<String>::new(), "fields without a line");
            let unknown: Vec<_> = table.iter().filter(|(p, _)| !known(&schema, p)).collect();
            assert!(unknown.is_empty(), "lines without a field: {unknown:?}");
            let mut paths: Vec<_> = table.iter().map(|(p, _)| p).collect();
            paths.sort();
            paths.dedup();
            assert_eq!(paths.len(), table.len(), "a path is there twice");
        }
    }

    #[test]
    fn states() {
        let run = |v: Value| {
            let mut p = Problems::default();
            check(INSTANCE, &v, "spec", "", &mut p);
            (p.causes.into_iter().map(|c| c.field).collect::<Vec<_>>(), p.warnings.len())
        };
        assert_eq!(
            run(json!({"domain": {"devices": {"tpm": {}, "disks": [{"name": "a"}, {"name": "b", "lun": {}}]}}})),
            (vec!["spec.domain.devices.disks[1].lun".to_owned(), "spec.domain.devices.tpm".into()], 0)
        );
        assert_eq!(run(json!({"domain": {"devices": {"gpus": [], "autoattachVSOCK": false, "interfaces": [{"state": "absent"}]}}})).0, ["spec.domain.devices.interfaces[0].state"]);
        assert_eq!(run(json!({"evictionStrategy": "LiveMigrate"})), (vec![], 1));
        assert_eq!(run(json!({"evictionStrategy": "None", "nodeSelector": {"a.b/c": "x"}})), (vec![], 0));
        assert_eq!(run(json!({"domain": {"clock": {"nonsense": {"x": 1}}}})).0, ["spec.domain.clock.nonsense"]);
    }

    #[test]
    fn documentation_is_fresh() {
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fields.md");
        if std::env::var_os("UPDATE").is_some() {
            std::fs::write(&file, markdown()).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&file).unwrap(), markdown(), "run the test with UPDATE=1");
    }
}
