//! QEMU's command line for a machine: pure, so that it can be read in a test.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::machine::{Accelerator, Bus, Cache, Disk, Firmware, Input, Machine, Panic, Video};

/// Spare root ports: each takes one card that is plugged in later.
const SPARE_PORTS: usize = 4;
/// Functions of one PCI slot; root ports share slots.
const PORTS_PER_SLOT: usize = 8;

/// MiB of translated code that an emulated guest keeps; what does not fit is translated again. A Linux boot makes 70. Without
/// a bound QEMU takes an eighth of the machine's memory, of which no pod's request knows.
const TRANSLATED: u32 = 128;

/// The format of an image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Bytes as they are.
    Raw,
    /// QEMU's own.
    Qcow2,
}

impl Format {
    /// QEMU's name for it.
    pub fn word(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
        }
    }
}

/// A file or device behind a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Where it is.
    pub path: PathBuf,
    /// How to read it. QEMU never guesses.
    pub format: Format,
    /// A block device.
    pub device: bool,
    /// What lies below an overlay.
    pub base: Option<Box<Image>>,
}

/// Descriptors that the process inherits, by number.
pub struct Descriptors {
    /// The monitor.
    pub monitor: i32,
    /// The serial console.
    pub console: i32,
    /// The guest agent's channel.
    pub agent: i32,
    /// One per network card.
    pub taps: Vec<i32>,
}

/// Folders and files beside the disks.
pub struct Places {
    /// The second monitor, for people.
    pub qmp: PathBuf,
    /// The VNC server.
    pub vnc: PathBuf,
    /// Firmware code and this pod's copy of its variables, for EFI.
    pub efi: Option<(PathBuf, PathBuf)>,
}

/// The arguments; `images` goes with `machine.disks`.
pub fn arguments(machine: &Machine, images: &[Option<Image>], fds: &Descriptors, places: &Places) -> Vec<String> {
    let mut a = Args(Vec::new());
    a.two("-name", format!("guest={},debug-threads=on", escape(&machine.name)));
    a.0.extend(["-nodefaults", "-no-user-config", "-display", "none"].map(String::from));
    a.two("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny".into());
    base(machine, &mut a);
    firmware(machine, places, &mut a);

    a.two("-chardev", format!("socket,id=monitor,fd={}", fds.monitor));
    a.two("-mon", "chardev=monitor,mode=control".into());
    a.two("-qmp", format!("unix:{},server=on,wait=off", escape(&places.qmp.to_string_lossy())));

    if let Some(video) = machine.video {
        a.two("-vnc", format!("unix:{},power-control=off", escape(&places.vnc.to_string_lossy())));
        a.two(
            "-device",
            match video {
                Video::Vga => "VGA,id=video0,bus=pcie.0,addr=0x1".into(),
                Video::Cirrus => "cirrus-vga,id=video0,bus=pcie.0,addr=0x1".into(),
                Video::Virtio => "virtio-vga,id=video0,bus=pcie.0,addr=0x1".into(),
                Video::Bochs => "bochs-display,id=video0,bus=pcie.0,addr=0x1".to_owned(),
            },
        );
    }
    nics(machine, fds, &mut a);
    if machine.serial {
        a.two("-chardev", format!("socket,id=console,fd={}", fds.console));
        a.two("-device", "isa-serial,chardev=console,id=serial0,index=0".into());
    }
    a.two("-device", "virtio-serial-pci,id=channels,bus=pcie.0".into());
    a.two("-chardev", format!("socket,id=agent,fd={}", fds.agent));
    a.two("-device", "virtserialport,bus=channels.0,chardev=agent,id=agent0,name=org.qemu.guest_agent.0".into());
    a.two("-object", "rng-random,id=random,filename=/dev/urandom".into());
    a.two("-device", "virtio-rng-pci,rng=random,id=rng0,bus=pcie.0".into());
    if machine.balloon {
        a.two("-device", "virtio-balloon-pci,id=balloon0,bus=pcie.0,free-page-reporting=on".into());
    }
    for (n, device) in machine.panic.iter().enumerate() {
        a.two(
            "-device",
            match device {
                Panic::Isa => format!("pvpanic,id=panic{n}"),
                Panic::Pci => format!("pvpanic-pci,id=panic{n},bus=pcie.0"),
            },
        );
    }
    if let Some(action) = &machine.watchdog {
        a.two("-device", "i6300esb,id=watchdog0".into());
        a.two("-action", format!("watchdog={action}"));
    }
    let usb = machine.disks.iter().any(|d| d.bus == Bus::Usb)
        || machine.inputs.iter().any(|i| matches!(i, Input::UsbTablet | Input::UsbKeyboard));
    if usb {
        a.two("-device", "qemu-xhci,id=usb,bus=pcie.0".into());
    }
    for (n, input) in machine.inputs.iter().enumerate() {
        a.two(
            "-device",
            match input {
                Input::UsbTablet => format!("usb-tablet,id=input{n},bus=usb.0"),
                Input::UsbKeyboard => format!("usb-kbd,id=input{n},bus=usb.0"),
                Input::VirtioTablet => format!("virtio-tablet-pci,id=input{n},bus=pcie.0"),
                Input::VirtioKeyboard => format!("virtio-keyboard-pci,id=input{n},bus=pcie.0"),
            },
        );
    }
    disks(machine, images, &mut a);
    a.0
}

fn base(machine: &Machine, a: &mut Args) {
    let switch = |on: bool| if on { "on" } else { "off" };
    let secure = machine.firmware == Firmware::Efi { secure_boot: true };
    a.two(
        "-machine",
        format!(
            "{},usb=off,vmport=off,hpet={},acpi={},smm={},dump-guest-core=off",
            machine.machine_type,
            switch(machine.hpet),
            switch(machine.acpi),
            switch(machine.smm || secure),
        ),
    );
    a.two(
        "-accel",
        match machine.accelerator {
            Accelerator::Kvm => "kvm".into(),
            Accelerator::Tcg => format!("tcg,thread=multi,tb-size={TRANSLATED}"),
        },
    );
    let mut cpu = machine.cpu.model.clone();
    for (name, on) in &machine.cpu.features {
        cpu.push_str(&format!(",{name}={}", switch(*on)));
    }
    for property in &machine.cpu.properties {
        cpu.push_str(&format!(",{property}"));
    }
    a.two("-cpu", cpu);
    let c = &machine.cpu;
    let total = c.sockets * c.cores * c.threads;
    a.two("-smp", format!("{total},sockets={},cores={},threads={},maxcpus={total}", c.sockets, c.cores, c.threads));
    a.two("-m", format!("size={}k", machine.memory.div_ceil(1024)));
    a.two("-overcommit", "mem-lock=off".into());
    a.two("-uuid", machine.uuid.clone());
    let smbios = |kind: u8, fields: &[(&str, String)]| {
        fields.iter().fold(format!("type={kind}"), |s, (k, v)| format!("{s},{k}={}", escape(v)))
    };
    a.two("-smbios", format!("{},uuid={}", smbios(1, &machine.smbios_system), machine.uuid));
    if !machine.smbios_chassis.is_empty() {
        a.two("-smbios", smbios(3, &machine.smbios_chassis));
    }
    let clock = match machine.clock_offset {
        0 => "utc".to_owned(),
        offset => {
            let now = jiff::Timestamp::now().as_second().saturating_add(offset);
            jiff::Timestamp::from_second(now).map_or("utc".into(), |t| t.strftime("%Y-%m-%dT%H:%M:%S").to_string())
        }
    };
    a.two("-rtc", format!("base={clock},driftfix=slew"));
    a.two("-boot", "menu=off,strict=on".into());
    // The process stays after power-off and panic, so that why it ended is known before it does.
    a.two("-action", "reboot=reset,shutdown=pause,panic=pause".into());
    if machine.paused {
        a.0.push("-S".into());
    }
}

fn firmware(machine: &Machine, places: &Places, a: &mut Args) {
    let Some((code, vars)) = &places.efi else { return };
    if machine.firmware == (Firmware::Efi { secure_boot: true }) {
        a.two("-global", "driver=cfi.pflash01,property=secure,value=on".into());
    }
    a.two("-drive", format!("if=pflash,unit=0,format=raw,readonly=on,file={}", escape(&code.to_string_lossy())));
    a.two("-drive", format!("if=pflash,unit=1,format=raw,file={}", escape(&vars.to_string_lossy())));
}

/// Cards sit behind root ports, the first one on bus 1: guests call it `enp1s0`, as they do under libvirt.
fn nics(machine: &Machine, fds: &Descriptors, a: &mut Args) {
    for n in 0..machine.nics.len() + SPARE_PORTS {
        let (slot, function) = (2 + n / PORTS_PER_SLOT, n % PORTS_PER_SLOT);
        let multi = if function == 0 { ",multifunction=on" } else { "" };
        a.two(
            "-device",
            format!("pcie-root-port,id=port{n},bus=pcie.0,chassis={},port={n},addr={slot:#x}.{function}{multi}", n + 1),
        );
    }
    for ((n, nic), fd) in machine.nics.iter().enumerate().zip(&fds.taps) {
        a.two("-netdev", format!("tap,id=net{n},fd={fd}"));
        let mut device = format!("{},netdev=net{n},id=nic{n},mac={},bus=port{n}", nic.device, nic.mac);
        match nic.boot_index {
            Some(index) => device.push_str(&format!(",bootindex={index}")),
            None => device.push_str(",romfile="),
        }
        if let Some(index) = nic.acpi_index {
            device.push_str(&format!(",acpi-index={index}"));
        }
        if nic.device == "virtio-net-pci"
            && let Some(mtu) = nic.mtu
        {
            device.push_str(&format!(",host_mtu={mtu}"));
        }
        a.two("-device", device);
    }
}

fn disks(machine: &Machine, images: &[Option<Image>], a: &mut Args) {
    if machine.disks.iter().any(|d| d.bus == Bus::Scsi) {
        a.two("-device", "virtio-scsi-pci,id=scsi,bus=pcie.0".into());
    }
    let mut sata = 0;
    for (n, (disk, image)) in machine.disks.iter().zip(images).enumerate() {
        let node = image.as_ref().map(|image| {
            let mut node = blockdev(image, disk, disk.read_only);
            node["node-name"] = json!(format!("disk{n}"));
            a.two("-blockdev", node.to_string());
            format!(",drive=disk{n}")
        });
        let kind = if disk.cdrom { "cd" } else { "hd" };
        let mut device = match disk.bus {
            Bus::Virtio => "virtio-blk-pci,bus=pcie.0".to_owned(),
            Bus::Scsi => format!("scsi-{kind},bus=scsi.0"),
            Bus::Sata => {
                sata += 1;
                format!("ide-{kind},bus=ide.{}", sata - 1)
            }
            Bus::Usb => "usb-storage,bus=usb.0".into(),
        };
        device.push_str(&format!(",id=ua-{}{}", disk.name, node.as_deref().unwrap_or_default()));
        if let Some(index) = disk.boot_index {
            device.push_str(&format!(",bootindex={index}"));
        }
        if let Some(serial) = &disk.serial {
            device.push_str(&format!(",serial={}", escape(serial)));
        }
        if disk.shareable {
            device.push_str(",share-rw=on");
        }
        if let Some((logical, physical)) = disk.block_size {
            device.push_str(&format!(",logical_block_size={logical},physical_block_size={physical}"));
        }
        if !disk.cdrom && disk.bus != Bus::Usb {
            // Reading has no "enospc" policy.
            let reading = if disk.on_error == "enospc" { "report" } else { disk.on_error };
            device.push_str(&format!(",werror={},rerror={reading}", disk.on_error));
            device.push_str(&format!(",write-cache={}", if disk.cache == Cache::Writethrough { "off" } else { "on" }));
        }
        if disk.io_thread && disk.bus == Bus::Virtio {
            a.two("-object", format!("iothread,id=thread{n}"));
            device.push_str(&format!(",iothread=thread{n}"));
        }
        a.two("-device", device);
    }
}

/// The node for an image: formats are spelled out down the whole chain, so that nothing in a file can name another file.
fn blockdev(image: &Image, disk: &Disk, read_only: bool) -> Value {
    let mut file = json!({
        "driver": if image.device { "host_device" } else { "file" },
        "filename": image.path.to_string_lossy(),
        "aio": if disk.native_io { "native" } else { "threads" },
        "read-only": read_only,
        "cache": {"direct": disk.cache == Cache::None, "no-flush": false},
        "discard": "unmap",
    });
    if !image.device {
        file["locking"] = json!("on");
    }
    let mut node = json!({
        "driver": image.format.word(),
        "file": file,
        "read-only": read_only,
        "cache": {"direct": disk.cache == Cache::None, "no-flush": false},
        "discard": "unmap",
    });
    if image.format == Format::Qcow2 {
        node["backing"] = image.base.as_ref().map_or(Value::Null, |base| blockdev(base, disk, true));
    }
    node
}

struct Args(Vec<String>);

impl Args {
    fn two(&mut self, key: &str, value: String) {
        self.0.push(key.into());
        self.0.push(value);
    }
}

/// QEMU separates options by commas; two of them are one.
fn escape(text: &str) -> String {
    text.replace(',', ",,")
}
