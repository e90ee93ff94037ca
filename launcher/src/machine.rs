//! A virtual machine as a hypervisor driver is asked for it: what the VMI wishes and what the node adds, in one
//! place, without anybody's syntax.

use std::path::PathBuf;

/// What runs the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// The kernel's virtualisation.
    Kvm,
    /// Emulation.
    Tcg,
}

impl Accelerator {
    /// The word on the wire and on QEMU's command line.
    pub fn word(self) -> &'static str {
        match self {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg",
        }
    }
}

/// A whole machine.
#[derive(Clone, Debug)]
pub struct Machine {
    /// `<namespace>_<name>`, for process lists.
    pub name: String,
    /// SMBIOS UUID.
    pub uuid: String,
    /// Machine type as QEMU names it.
    pub machine_type: String,
    /// Who executes.
    pub accelerator: Accelerator,
    /// Processors.
    pub cpu: Cpu,
    /// Bytes of memory.
    pub memory: u64,
    /// What runs before the boot loader.
    pub firmware: Firmware,
    /// SMBIOS system information beyond the UUID: (field, value).
    pub smbios_system: Vec<(&'static str, String)>,
    /// SMBIOS chassis: (field, value).
    pub smbios_chassis: Vec<(&'static str, String)>,
    /// ACPI tables are there.
    pub acpi: bool,
    /// The HPET is there.
    pub hpet: bool,
    /// System management mode was asked for.
    pub smm: bool,
    /// Start of the real-time clock, as QEMU's `-rtc base=` takes it, offset in seconds from UTC.
    pub clock_offset: i64,
    /// Disks in the order of the VMI.
    pub disks: Vec<Disk>,
    /// Network cards in the order of the VMI.
    pub nics: Vec<Nic>,
    /// Pointing devices and keyboards.
    pub inputs: Vec<Input>,
    /// The graphics adapter and VNC; `None`: headless.
    pub video: Option<Video>,
    /// The serial console is there.
    pub serial: bool,
    /// The memory balloon is there.
    pub balloon: bool,
    /// Watchdog device with its action.
    pub watchdog: Option<String>,
    /// Devices by which the guest's kernel tells that it panicked.
    pub panic: Vec<Panic>,
    /// The machine starts with halted vCPUs.
    pub paused: bool,
}

/// Processors of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// A model that QEMU knows.
    pub model: String,
    /// Features added (true) or taken away (false).
    pub features: Vec<(String, bool)>,
    /// Hyper-V enlightenments and the like: properties of the CPU, verbatim.
    pub properties: Vec<String>,
    /// Sockets.
    pub sockets: u32,
    /// Cores in each.
    pub cores: u32,
    /// Threads of each.
    pub threads: u32,
}

/// What runs before the boot loader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Firmware {
    /// SeaBIOS.
    Bios,
    /// OVMF.
    Efi {
        /// With secure boot, which brings system management mode.
        secure_boot: bool,
    },
}

/// To what a disk is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bus {
    /// virtio-blk.
    Virtio,
    /// AHCI.
    Sata,
    /// virtio-scsi.
    Scsi,
    /// USB storage.
    Usb,
}

/// One disk or CD-ROM.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Name of disk and volume.
    pub name: String,
    /// Where it stands in the VMI, for messages.
    pub path: String,
    /// What is on it; `None`: an empty CD-ROM drive.
    pub source: Option<Source>,
    /// To what it is attached.
    pub bus: Bus,
    /// A CD-ROM drive.
    pub cdrom: bool,
    /// The guest cannot write.
    pub read_only: bool,
    /// Order among what the firmware boots from.
    pub boot_index: Option<u32>,
    /// Serial number that the guest sees.
    pub serial: Option<String>,
    /// `none`, `writethrough` or `writeback`.
    pub cache: Cache,
    /// Asynchronous I/O by the kernel instead of threads.
    pub native_io: bool,
    /// Several machines may write at once.
    pub shareable: bool,
    /// Logical and physical block size.
    pub block_size: Option<(u32, u32)>,
    /// An I/O thread of its own.
    pub io_thread: bool,
    /// What happens at an I/O error.
    pub on_error: &'static str,
}

/// How the host's page cache is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// Past it.
    None,
    /// Through it, each write flushed.
    Writethrough,
    /// Through it, flushed when the guest says so.
    Writeback,
}

/// What is on a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A PVC: a folder with an image file in it, or a block device.
    Claim {
        /// The mounted folder.
        folder: PathBuf,
        /// The device where the claim is a block one.
        device: PathBuf,
    },
    /// A read-only image of a container disk, under an overlay of this pod.
    Image {
        /// The folder of the image volume.
        folder: PathBuf,
        /// The file in it; `None`: the only one.
        file: Option<PathBuf>,
    },
    /// A PVC under an overlay of this pod.
    Ephemeral {
        /// The mounted folder.
        folder: PathBuf,
    },
    /// Empty, of this many bytes.
    Scratch(u64),
    /// A generated cloud-init data source.
    CloudInit(CloudInit),
}

/// A cloud-init data source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloudInit {
    /// Which of the two layouts.
    pub kind: CloudInitKind,
    /// User data.
    pub user: Option<Data>,
    /// Network data.
    pub network: Option<Data>,
    /// Identity of the instance: cloud-init runs once for each.
    pub instance_id: String,
    /// Host name.
    pub hostname: String,
    /// SMBIOS UUID, which the configuration drive repeats.
    pub uuid: String,
}

/// The layout of a cloud-init data source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloudInitKind {
    /// Label `cidata`, files `meta-data`, `user-data`, `network-config`.
    NoCloud,
    /// Label `config-2`, files under `openstack/latest`.
    ConfigDrive,
}

/// A text of the user's, perhaps secret.
#[derive(Clone, PartialEq, Eq)]
pub enum Data {
    /// In the VMI.
    Inline(Vec<u8>),
    /// In the first of these files that is there: a mounted Secret.
    Secret(Vec<PathBuf>),
}

impl std::fmt::Debug for Data {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Data::Inline(bytes) => write!(f, "Inline({} bytes)", bytes.len()),
            Data::Secret(paths) => f.debug_tuple("Secret").field(paths).finish(),
        }
    }
}

/// One network card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Name of the network.
    pub name: String,
    /// Where it stands in the VMI, for messages.
    pub path: String,
    /// QEMU's device.
    pub device: &'static str,
    /// Its address.
    pub mac: String,
    /// Name of the tap's descriptor.
    pub fd_name: String,
    /// Order among what the firmware boots from.
    pub boot_index: Option<u32>,
    /// The link is down from the beginning.
    pub link_down: bool,
    /// ACPI index, which names the interface in the guest.
    pub acpi_index: Option<u32>,
    /// The largest packet, where it is not Ethernet's.
    pub mtu: Option<u32>,
}

/// A device by which the guest's kernel tells that it panicked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Panic {
    /// An I/O port, found through ACPI.
    Isa,
    /// A PCI card.
    Pci,
}

/// A pointing device or keyboard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// Absolute pointer over USB.
    UsbTablet,
    /// Absolute pointer over virtio.
    VirtioTablet,
    /// Keyboard over USB.
    UsbKeyboard,
    /// Keyboard over virtio.
    VirtioKeyboard,
}

/// The graphics adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Video {
    /// Standard VGA.
    Vga,
    /// Cirrus.
    Cirrus,
    /// virtio-vga.
    Virtio,
    /// Bochs display, without VGA compatibility.
    Bochs,
}
