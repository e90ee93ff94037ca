//! `spec.domain.devices` without its disks.

use proto::launcher::NodeFacts;

use super::reader::{Cursor, SpecError};
use crate::machine::{Input, Nic, Panic, Video};

pub(super) fn nics(devices: &Cursor<'_>, facts: &NodeFacts) -> Result<Vec<Nic>, SpecError> {
    let mut nics = Vec::new();
    for item in devices.get("interfaces").items()? {
        // Binding, ports and DHCP options are the agent's trade.
        item.skip(&["masquerade", "bridge", "binding", "ports", "dhcpOptions", "tag", "passt", "slirp"]);
        let name = item.get("name").text()?.ok_or_else(|| item.get("name").error("is missing"))?;
        let link_down = match item.get("state").text()? {
            None | Some("up") => false,
            Some("down") => true,
            Some("absent") => continue,
            Some(other) => return Err(item.get("state").error(format!("unknown state {other:?}"))),
        };
        let device = device(item.get("model").text()?.unwrap_or("virtio"))
            .ok_or_else(|| item.get("model").error("is not supported"))?;
        let fact = facts.nics.iter().find(|n| n.network == name && !n.fd_name.is_empty());
        let Some(fact) = fact else {
            return Err(item.error(format!("the node set up no network {name:?}")));
        };
        let mac = match item.get("macAddress").text()? {
            Some(m) => {
                normal_mac(m).ok_or_else(|| item.get("macAddress").error(format!("is not a MAC address: {m:?}")))?
            }
            None => normal_mac(&fact.mac)
                .ok_or_else(|| item.error(format!("the node gave no MAC address: {:?}", fact.mac)))?,
        };
        let mtu = (fact.mtu >= 68 && fact.mtu != 1500 && fact.mtu <= 65535).then_some(fact.mtu);
        nics.push(Nic {
            name: name.into(),
            path: item.path().into(),
            device,
            mac,
            fd_name: fact.fd_name.clone(),
            boot_index: item.get("bootOrder").number()?,
            link_down,
            acpi_index: item.get("acpiIndex").number()?.filter(|n| *n > 0),
            mtu,
        });
    }
    Ok(nics)
}

fn device(model: &str) -> Option<&'static str> {
    Some(match model {
        "virtio" | "virtio-net-pci" => "virtio-net-pci",
        "e1000" => "e1000",
        "e1000e" => "e1000e",
        "rtl8139" => "rtl8139",
        "ne2k_pci" => "ne2k_pci",
        "pcnet" => "pcnet",
        _ => return None,
    })
}

fn normal_mac(text: &str) -> Option<String> {
    let parts: Vec<&str> = text.split([':', '-']).collect();
    let good = parts.len() == 6 && parts.iter().all(|p| p.len() == 2 && p.bytes().all(|b| b.is_ascii_hexdigit()));
    good.then(|| parts.join(":").to_ascii_lowercase())
}

pub(super) fn inputs(devices: &Cursor<'_>) -> Result<Vec<Input>, SpecError> {
    let mut inputs = Vec::new();
    for item in devices.get("inputs").items()? {
        item.skip(&["name"]);
        inputs.push(match (item.get("type").text()?, item.get("bus").text()?) {
            (Some("tablet"), None | Some("usb")) => Input::UsbTablet,
            (Some("tablet"), Some("virtio")) => Input::VirtioTablet,
            (Some("keyboard"), None | Some("usb")) => Input::UsbKeyboard,
            (Some("keyboard"), Some("virtio")) => Input::VirtioKeyboard,
            (kind, bus) => return Err(item.error(format!("is not supported: type {kind:?}, bus {bus:?}"))),
        });
    }
    if inputs.is_empty() && devices.get("autoattachInputDevice").flag()? == Some(true) {
        inputs.push(Input::UsbTablet);
    }
    Ok(inputs)
}

pub(super) fn video(devices: &Cursor<'_>) -> Result<Option<Video>, SpecError> {
    let kind = devices.get("video").get("type");
    let video = match kind.text()? {
        None | Some("vga") => Video::Vga,
        Some("cirrus") => Video::Cirrus,
        Some("virtio") => Video::Virtio,
        Some("bochs") => Video::Bochs,
        Some(other) => return Err(kind.error(format!("is not supported: {other:?}"))),
    };
    Ok(devices.get("autoattachGraphicsDevice").flag()?.unwrap_or(true).then_some(video))
}

pub(super) fn watchdog(devices: &Cursor<'_>) -> Result<Option<String>, SpecError> {
    let field = devices.get("watchdog");
    if !field.exists() {
        return Ok(None);
    }
    field.skip(&["name"]);
    let model = field.get("i6300esb");
    if !model.exists() {
        return Err(field.error("only i6300esb is supported"));
    }
    match model.get("action").text()?.unwrap_or("reset") {
        action @ ("reset" | "poweroff" | "shutdown") => Ok(Some(action.into())),
        other => Err(model.get("action").error(format!("unknown action {other:?}"))),
    }
}

/// Those that are asked for, and no others: without one, a guest that panics does what its kernel is told to (hang, reboot,
/// dump), as under KubeVirt. Two of one model would be one.
pub(super) fn panic(devices: &Cursor<'_>) -> Result<Vec<Panic>, SpecError> {
    let mut all = Vec::new();
    for item in devices.get("panicDevices").items()? {
        let device = match item.get("model").text()? {
            None | Some("isa") => Panic::Isa,
            Some("pvpanic") => Panic::Pci,
            Some(other) => return Err(item.get("model").error(format!("is not supported: {other:?}"))),
        };
        if !all.contains(&device) {
            all.push(device);
        }
    }
    Ok(all)
}

/// Fields that are served by what is always there (a virtio-rng), or by others.
pub(super) fn rest(devices: &Cursor<'_>) {
    devices.skip(&["rng", "autoattachPodInterface", "logSerialConsole", "disableHotplug"]);
}
