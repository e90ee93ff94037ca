//! Labels, annotations, finalizers and reasons, byte for byte as KubeVirt's clients know them, and virtfold's own.

/// API group of VirtualMachine and its siblings.
pub const GROUP: &str = "kubevirt.io";
/// Served and stored version.
pub const VERSION: &str = "v1";
/// Group of the aggregated API.
pub const SUBRESOURCE_GROUP: &str = "subresources.kubevirt.io";

/// VM (and VMI) finalizer of the VM controller.
pub const FINALIZER_VM: &str = "kubevirt.io/virtualMachineControllerFinalize";
/// VMI finalizer that stays until the guest is gone.
pub const FINALIZER_VMI: &str = "kubevirt.io/foregroundDeleteVirtualMachine";

/// Label on a VMI and its pod: the node that runs it.
pub const LABEL_NODE_NAME: &str = "kubevirt.io/nodeName";
/// Label on a launcher pod: the VMI's UID.
pub const LABEL_CREATED_BY: &str = "kubevirt.io/created-by";
/// Label on a launcher pod; its value is [`APP_LAUNCHER`].
pub const LABEL_APP: &str = "kubevirt.io";
/// Value of [`LABEL_APP`] on launcher pods.
pub const APP_LAUNCHER: &str = "virt-launcher";
/// Deprecated label on a launcher pod: the guest's host name.
pub const LABEL_VM_NAME: &str = "vm.kubevirt.io/name";
/// Label on a launcher pod: the VMI's name, shortened where needed.
pub const LABEL_VMI_ID: &str = "vmi.kubevirt.io/id";
/// Node label: launchers may be placed here.
pub const LABEL_SCHEDULABLE: &str = "kubevirt.io/schedulable";
/// VMI label: its launcher is of another image than the controller would take today.
pub const LABEL_OUTDATED: &str = "kubevirt.io/outdatedLauncherImage";
/// Beginnings of labels of a node that say what guests can have there; followed by the name of a CPU model, of a CPU feature, of
/// a machine type, and so on.
pub mod node {
    /// CPU models.
    pub const CPU_MODEL: &str = "cpu-model.node.kubevirt.io/";
    /// CPU features.
    pub const CPU_FEATURE: &str = "cpu-feature.node.kubevirt.io/";
    /// Vendor of the CPU.
    pub const CPU_VENDOR: &str = "cpu-vendor.node.kubevirt.io/";
    /// The CPU model of guests that ask for `host-model`.
    pub const HOST_MODEL: &str = "host-model-cpu.node.kubevirt.io/";
    /// Machine types.
    pub const MACHINE_TYPE: &str = "machine-type.node.kubevirt.io/";
}

/// Annotation on a launcher pod: the VMI's name.
pub const ANN_DOMAIN: &str = "kubevirt.io/domain";
/// Annotation on a VMI: generation of the VM it was made from.
pub const ANN_VM_GENERATION: &str = "kubevirt.io/vm-generation";
/// Annotation on a launcher pod: bytes of memory overhead.
pub const ANN_MEMORY_OVERHEAD: &str = "kubevirt.io/memory-overhead-bytes";
/// On an instance of a set: the trace context of the set's last write.
pub const ANN_MADE_BY: &str = "virtfold.io/made-by";
/// W3C trace context of the write that changed the spec.
pub const ANN_TRACEPARENT: &str = "virtfold.io/traceparent";
/// When the start that made a VMI began, in milliseconds since 1970: timestamps of objects have whole seconds.
pub const ANN_BEGAN: &str = "virtfold.io/began";
/// Name of the user who changed the spec last, written by admission.
pub const ANN_CHANGED_BY: &str = "virtfold.io/changed-by";
/// Key in the data of a state change request: the name of the user who asked.
pub const REQUESTED_BY: &str = "virtfold.io/requested-by";
/// Node annotation: `host:port` of the node agent's gRPC server.
pub const ANN_AGENT_ADDRESS: &str = "virtfold.io/agent-address";
/// Annotation of the controllers' Lease: `host:port` at which the one that leads answers gateways.
pub const ANN_CONTROLLER_ADDRESS: &str = "virtfold.io/controller-address";
/// Node annotation: `kvm` or `tcg`.
pub const ANN_ACCELERATOR: &str = "virtfold.io/accelerator";
/// Node annotation: boot id of the kernel.
pub const ANN_BOOT_ID: &str = "virtfold.io/boot-id";

/// Annotation on a VM (a bare VMI carries its own): which fact about its node proved that its machine had stopped there.
pub const ANN_FENCED: &str = "virtfold.io/fenced";

/// Annotations of a template that follow it into a running instance and its pod: what a descheduler may do.
pub const ANN_FOLLOWING: [&str; 2] =
    ["descheduler.alpha.kubernetes.io/evict", "descheduler.alpha.kubernetes.io/prefer-no-eviction"];
/// Annotations of a template, and of an instance, that tell people and metrics what kind of guest it is.
pub const ANN_DESCRIBING: [&str; 7] = [
    "vm.kubevirt.io/os",
    "vm.kubevirt.io/workload",
    "vm.kubevirt.io/flavor",
    "kubevirt.io/instancetype-name",
    "kubevirt.io/cluster-instancetype-name",
    "kubevirt.io/preference-name",
    "kubevirt.io/cluster-preference-name",
];
/// Annotation of a launcher pod: its machine is asked to leave the node, and who evicts for balance need not ask again.
pub const ANN_EVICTING: &str = "descheduler.alpha.kubernetes.io/eviction-in-progress";
/// Readiness gate of the launcher pod, written by the node agent.
pub const GATE_UNPAUSED: &str = "kubevirt.io/virtual-machine-unpaused";
/// Out-of-service taint, the fact that fences a node.
pub const TAINT_OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// Taint of a node from which machines are to be moved away.
pub const TAINT_DRAIN: &str = "kubevirt.io/drain";
/// uid and gid of launchers and of everything that they own.
pub const LAUNCHER_UID: u32 = 107;
/// Grace period in seconds where a VMI names none.
pub const DEFAULT_GRACE_SECONDS: i64 = 30;
/// Namespace UUID from which a firmware UUID is derived (UUIDv5 of the VM's name), as KubeVirt does.
pub const FIRMWARE_UUID_NAMESPACE: &str = "6a1a24a1-4061-4607-8bf4-a3963d0c5895";

/// Places inside the launcher's container.
pub mod paths {
    /// Share folder with the agent: sockets, serial log.
    pub const SHARE: &str = "/run/virtfold";
    /// PVC disks: `<this>/<volume>/disk.img`.
    pub const PVC: &str = "/var/run/kubevirt-private/vmi-disks";
    /// Secrets: `<this>/<volume>` or `<volume>-udata`, `<volume>-ndata`.
    pub const SECRETS: &str = "/var/run/kubevirt-private/secret";
    /// Image volumes: `<this>/disk_<index of the volume>/disk/<one file>`.
    pub const IMAGES: &str = "/var/run/kubevirt-image-volume";
    /// Overlays, emptyDisks, cloud-init images.
    pub const EPHEMERAL: &str = "/var/run/kubevirt-ephemeral-disks";
}
