//! What a launcher is told by the pod that it runs in.

use std::path::PathBuf;
use std::time::Duration;

/// Where the pod's volumes are mounted.
#[derive(Clone, Debug)]
pub struct Paths {
    /// PVCs (`vmi-disks/<volume>/`), secrets (`secret/<volume>/`).
    pub private: PathBuf,
    /// Image volumes: `disk_<index in spec.volumes>/disk/<file>`.
    pub images: PathBuf,
    /// Scratch space of this pod: overlays, empty disks, cloud-init images.
    pub ephemeral: PathBuf,
    /// Block PVCs: `<volume>`.
    pub devices: PathBuf,
}

impl Default for Paths {
    fn default() -> Self {
        Self {
            private: "/var/run/kubevirt-private".into(),
            images: "/var/run/kubevirt-image-volume".into(),
            ephemeral: "/var/run/kubevirt-ephemeral-disks".into(),
            devices: "/dev".into(),
        }
    }
}

/// Everything that a launcher is told before anybody speaks to it.
#[derive(Clone, Debug)]
pub struct Config {
    /// Name of the VirtualMachineInstance.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its UID: the launcher serves no other.
    pub vmi_uid: String,
    /// UID of the pod that the launcher runs in (env `POD_UID`): identity of this launcher.
    pub pod_uid: String,
    /// The folder shared with the node agent; `launcher.sock`, `fd.sock`, `console.sock`, `vnc.sock`, `qmp.sock` appear in it.
    pub share_dir: PathBuf,
    /// How long the guest gets after SIGTERM until it is killed.
    pub grace: Duration,
    /// Where the outcome is written as the container's termination message; `None`: nowhere.
    pub termination_log: Option<PathBuf>,
    /// The pod's mounts.
    pub paths: Paths,
    /// The hypervisor's binary, found in PATH.
    pub qemu: PathBuf,
    /// The image tool's binary, found in PATH.
    pub qemu_img: PathBuf,
    /// Further arguments of the hypervisor. For tests, which boot a kernel without a disk; production leaves it empty.
    pub extra_args: Vec<String>,
}

impl Config {
    /// The configuration of a launcher in its pod, with the paths of a production container.
    pub fn new(namespace: &str, name: &str, vmi_uid: &str, pod_uid: &str) -> Self {
        Self {
            name: name.into(),
            namespace: namespace.into(),
            vmi_uid: vmi_uid.into(),
            pod_uid: pod_uid.into(),
            share_dir: "/run/virtfold".into(),
            grace: Duration::from_secs(30),
            termination_log: Some("/dev/termination-log".into()),
            paths: Paths::default(),
            qemu: "qemu-system-x86_64".into(),
            qemu_img: "qemu-img".into(),
            extra_args: Vec::new(),
        }
    }
}
