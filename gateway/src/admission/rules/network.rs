//! Networks and the interfaces that are connected to them.

use super::{Problems, duplicates, get, items, set, text};
use crate::status::CauseType::{Duplicate, NotSupported, Required};
use serde_json::Value;

/// Every way of connecting an interface that KubeVirt knows or knew.
const BINDINGS: &[&str] = &["bridge", "masquerade", "sriov", "binding", "passtBinding", "passt", "slirp", "macvtap"];
const MODELS: &[&str] = &["e1000", "e1000e", "igb", "ne2k_pci", "pcnet", "rtl8139", "virtio", "virtio-net-pci"];
/// MAC address of the bridge in the pod.
const RESERVED_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0];

pub(super) fn check(spec: &Value, base: &str, p: &mut Problems) {
    let networks = items(spec, &["networks"]);
    let interfaces = items(spec, &["domain", "devices", "interfaces"]);
    let pods = networks.iter().filter(|n| n.get("pod").is_some_and(Value::is_object)).count();
    if pods > 1 {
        let field = format!("{base}.interfaces");
        p.add(Duplicate, &field, format!("more than one interface is connected to a pod network in {field}"));
    }
    for (i, name, _) in duplicates(networks) {
        let field = format!("{base}.networks[{i}].name");
        p.add(
            Duplicate,
            &field,
            format!("Network with name {name:?} already exists, every network must have a unique name"),
        );
    }
    for (i, network) in networks.iter().enumerate() {
        let field = format!("{base}.networks[{i}]");
        match set(network, &["pod", "multus", "resourceClaim"]).len() {
            0 => p.add(Required, &field, "should have a network type"),
            1 => {}
            _ => p.add(Required, &field, "should have only one network type"),
        }
        let name = text(network, &["name"]);
        if !interfaces.iter().any(|n| text(n, &["name"]) == name) {
            p.add(Required, format!("{field}.name"), format!("{field}.name '{name}' not found."));
        }
        let cidr = text(network, &["pod", "vmNetworkCIDR"]);
        let good = cidr
            .split_once('/')
            .is_some_and(|(a, n)| a.parse::<std::net::Ipv4Addr>().is_ok() && n.parse::<u8>().is_ok_and(|n| n <= 30));
        if !cidr.is_empty() && !good {
            p.invalid(
                format!("{field}.pod.vmNetworkCIDR"),
                format!("{field}.pod.vmNetworkCIDR is not an IPv4 range: {cidr}"),
            );
        }
    }
    for (i, name, _) in duplicates(interfaces) {
        let field = format!("{base}.domain.devices.interfaces[{i}].name");
        p.add(Duplicate, &field, format!("Only one interface can be connected to one specific network: {name:?}"));
    }
    let mut macs = Vec::new();
    for (i, interface) in interfaces.iter().enumerate() {
        let network = networks.iter().find(|n| text(n, &["name"]) == text(interface, &["name"]));
        one(interface, network, &format!("{base}.domain.devices.interfaces[{i}]"), &mut macs, p);
    }
}

fn one(interface: &Value, network: Option<&Value>, field: &str, macs: &mut Vec<[u8; 6]>, p: &mut Problems) {
    let name = text(interface, &["name"]);
    if network.is_none() {
        p.invalid(format!("{field}.name"), format!("{field}.name '{name}' not found."));
    }
    if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b)) {
        p.invalid(
            format!("{field}.name"),
            "Network interface name can only contain alphabetical characters, numbers, dashes (-) or underscores (_)",
        );
    }
    if set(interface, BINDINGS).len() != 1 {
        p.invalid(
            format!("{field}.name"),
            format!("logical {field} {name} must have exactly one interface binding method"),
        );
    }
    let masquerade = interface.get("masquerade").is_some_and(Value::is_object);
    if masquerade && network.is_some_and(|n| !n.get("pod").is_some_and(Value::is_object)) {
        p.invalid(format!("{field}.name"), "Masquerade interface only implemented with pod network");
    }
    p.one_of(
        crate::status::CauseType::Invalid,
        &format!("{field}.state"),
        get(interface, &["state"]),
        &["up", "down", "absent"],
    );
    let model = text(interface, &["model"]);
    if !model.is_empty() && !MODELS.contains(&model) {
        p.add(
            NotSupported,
            format!("{field}.model"),
            format!("interface {field}.name uses model {model} that is not supported."),
        );
    }
    let given = text(interface, &["macAddress"]);
    if !given.is_empty() {
        match mac(given) {
            Err(why) => {
                p.invalid(format!("{field}.macAddress"), format!("interface {field}.name has {why} ({given})."))
            }
            Ok(RESERVED_MAC) if masquerade => {
                p.invalid(
                    format!("{field}.macAddress"),
                    "The requested MAC address is reserved for the in-pod bridge. Please choose another one.",
                );
            }
            Ok(m) if m[0] & 1 == 1 => p.invalid(
                format!("{field}.macAddress"),
                format!("interface {field}.name has a multicast MAC address ({given})."),
            ),
            Ok(m) if macs.contains(&m) => p.invalid(
                format!("{field}.macAddress"),
                format!("interface {field}.name repeats the MAC address {given}."),
            ),
            Ok(m) => macs.push(m),
        }
    }
    ports(interface, field, p);
}

fn mac(text: &str) -> Result<[u8; 6], &'static str> {
    let parts: Vec<&str> = text.split([':', '-']).collect();
    if parts.iter().any(|p| p.len() != 2 || u8::from_str_radix(p, 16).is_err() || p.starts_with('+'))
        || text.contains(':') && text.contains('-')
    {
        return Err("malformed MAC address");
    }
    let bytes: Vec<u8> = parts.iter().filter_map(|p| u8::from_str_radix(p, 16).ok()).collect();
    <[u8; 6]>::try_from(bytes)
        .map_err(|b| if b.len() > 6 { "MAC address that is too long" } else { "MAC address that is too short" })
}

fn ports(interface: &Value, field: &str, p: &mut Problems) {
    let ports = items(interface, &["ports"]);
    for (j, port) in ports.iter().enumerate() {
        let field = format!("{field}.ports[{j}]");
        match get(port, &["port"]).as_i64() {
            None => p.add(Required, &field, "the port field is mandatory."),
            Some(1..=65535) => {}
            Some(_) => p.invalid(&field, "Port field must be in range 0 < x < 65536."),
        }
        let protocol = text(port, &["protocol"]);
        if !["", "TCP", "UDP"].contains(&protocol) {
            p.invalid(format!("{field}.protocol"), format!("Unknown protocol {protocol:?}, only TCP or UDP allowed"));
        }
        let name = text(port, &["name"]);
        if name.is_empty() {
            continue;
        }
        if ports.iter().take(j).any(|q| text(q, &["name"]) == name) {
            p.add(Duplicate, format!("{field}.name"), format!("Duplicate name of the port: {name}"));
        }
        let letter = name.bytes().any(|b| b.is_ascii_lowercase());
        if !letter || name.len() > 15 || name.contains("--") || !super::is_label(name) {
            p.invalid(format!("{field}.name"), format!("Invalid name of the port: {name}"));
        }
    }
}
