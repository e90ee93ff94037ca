//! A guest's network in its pod's network namespace (masquerade binding).
//!
//! ```text
//!   eth0 (pod address) --- NAT (nft table "virtfold") --- k6t-eth0 10.0.2.1/24 --- tap0 --- guest 10.0.2.2
//! ```
//!
//! Everything is done on one thread that has entered the namespace and then ends; `ip` and `nft` inherit it. The tap device
//! and the DHCP socket go to the launcher as descriptors and are not kept here: an agent's restart does not touch them, and
//! they end with the launcher. Done twice is done once: a bridge that is there stays, rules are replaced as a whole, and a tap
//! that an earlier agent handed to a launcher which has not started is replaced (the machine asks only for such launchers).

use std::io::{self, Write};
use std::net::{IpAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, setsockopt, socket, sockopt};
use proto::launcher::NicFacts;
use serde::Deserialize;
use state::domain::RefusalReason;

/// The pod's uplink.
const UPLINK: &str = "eth0";
/// The bridge between the pod's network and the guest, as KubeVirt calls it.
const BRIDGE: &str = "k6t-eth0";
const TAP: &str = "tap0";
/// Network of the guest; `.1` is the gateway, `.2` the guest.
const SUBNET: &str = "10.0.2";
const PREFIX: u32 = 24;
/// nft's table.
const TABLE: &str = "virtfold";
/// DHCP's server port.
const DHCP: u16 = 67;
/// Names of the descriptors on `fd.sock`.
const TAP_FD: &str = "tap0";
const DHCP_FD: &str = "dhcp0";

/// Why a network cannot be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The manifest asks for what this node cannot do.
    #[error("{path}: {why}")]
    Unsupported { path: String, why: &'static str },
    /// A tool said no.
    #[error("`{command}` failed: {message}")]
    Tool { command: String, message: String },
    /// A system call said no.
    #[error("{what}")]
    Io {
        what: String,
        #[source]
        source: io::Error,
    },
}

impl Error {
    pub fn reason(&self) -> RefusalReason {
        match self {
            Self::Unsupported { .. } => RefusalReason::Unsupported,
            Self::Tool { .. } | Self::Io { .. } => RefusalReason::Failed,
        }
    }
}

fn io_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    let what = what.into();
    move |source| Error::Io { what, source }
}

/// The one card that a guest can have: on the pod network, by masquerade.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Card {
    /// Name in `spec.networks`.
    network: String,
    mac: String,
    /// Only these arrive at the guest; all where there are none. (protocol, port)
    ports: Vec<(&'static str, u16)>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Vmi {
    metadata: api::ObjectMeta,
    spec: Spec,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Spec {
    domain: DomainSpec,
    networks: Vec<api::Network>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct DomainSpec {
    devices: Devices,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Devices {
    interfaces: Vec<serde_json::Value>,
}

/// Reads the card out of a VMI; `None` for a guest without a network.
pub(crate) fn card(vmi: &[u8]) -> Result<Option<Card>, Error> {
    let unsupported = |path: String, why| Error::Unsupported { path, why };
    let vmi: Vmi = serde_json::from_slice(vmi).map_err(|_| unsupported("spec".into(), "cannot be read"))?;
    let mut card = None;
    for (n, i) in vmi.spec.domain.devices.interfaces.iter().enumerate() {
        let path = format!("spec.domain.devices.interfaces[{n}]");
        let text = |key: &str| i.get(key).and_then(serde_json::Value::as_str);
        let name = text("name").ok_or_else(|| unsupported(format!("{path}.name"), "is missing"))?;
        if text("state") == Some("absent") {
            continue;
        }
        if i.get("masquerade").is_none() {
            return Err(unsupported(path, "only the masquerade binding is supported"));
        }
        let network = vmi.spec.networks.iter().find(|w| w.name == name);
        if network.is_none_or(|w| w.pod.is_none()) {
            return Err(unsupported(path, "only the pod network is supported"));
        }
        if card.is_some() {
            return Err(unsupported(path, "only one interface is supported"));
        }
        let mut ports = Vec::new();
        for p in i.get("ports").and_then(serde_json::Value::as_array).into_iter().flatten() {
            let bad = || unsupported(format!("{path}.ports"), "a port is a number from 1 to 65535, for TCP or UDP");
            let protocol = match p.get("protocol").and_then(serde_json::Value::as_str).unwrap_or("TCP") {
                x if x.eq_ignore_ascii_case("tcp") => "tcp",
                x if x.eq_ignore_ascii_case("udp") => "udp",
                _ => return Err(bad()),
            };
            let port = p.get("port").and_then(serde_json::Value::as_u64).and_then(|p| u16::try_from(p).ok());
            ports.push((protocol, port.filter(|p| *p > 0).ok_or_else(bad)?));
        }
        let mac = text("macAddress").map_or_else(|| derived_mac(&vmi.metadata.uid, name), str::to_owned);
        card = Some(Card { network: name.into(), mac, ports });
    }
    Ok(card)
}

/// A local address that the same machine has at every start of the same VMI.
fn derived_mac(vmi_uid: &str, network: &str) -> String {
    let hash = state::hash_hex(&["mac", vmi_uid, network], 3);
    let bytes: Vec<&str> = (0..3).filter_map(|n| hash.get(2 * n..2 * n + 2)).collect();
    format!("02:00:00:{}", bytes.join(":"))
}

/// Where and for whom.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub netns: PathBuf,
    pub share: PathBuf,
    pub ips: Vec<IpAddr>,
    pub dns: Vec<String>,
    pub search: String,
}

/// Makes the network, hands the descriptors to the launcher, and tells what the launcher needs to know.
pub(crate) async fn prepare(card: Card, place: Place) -> Result<NicFacts, Error> {
    let (netns, pod) = (place.netns.clone(), place.ips.iter().copied().find(IpAddr::is_ipv4));
    let rules = rules(&card.ports, pod);
    let made = inside(netns, move || make(&rules)).await?;
    hand_over(&place.share, &[(TAP_FD, made.tap), (DHCP_FD, made.dhcp)]).await?;
    Ok(NicFacts {
        network: card.network,
        mac: card.mac,
        fd_name: TAP_FD.into(),
        dhcp_fd_name: DHCP_FD.into(),
        guest_ip: format!("{SUBNET}.2"),
        prefix: PREFIX,
        gateway: format!("{SUBNET}.1"),
        dns: place.dns,
        mtu: made.mtu,
        domain: place.search,
    })
}

struct Made {
    tap: OwnedFd,
    dhcp: OwnedFd,
    mtu: u32,
}

/// Runs `make` on a thread of its own inside the namespace.
async fn inside<T: Send + 'static>(
    path: PathBuf,
    make: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let (done, result) = tokio::sync::oneshot::channel();
    let spawned = std::thread::Builder::new().name("pod-network".into()).spawn(move || {
        let what = || format!("entering the network namespace {}", path.display());
        let entered = std::fs::File::open(&path)
            .and_then(|f| setns(f.as_fd(), CloneFlags::CLONE_NEWNET).map_err(io::Error::from))
            .map_err(io_error(what()));
        let _ = done.send(entered.and_then(|()| make()));
    });
    spawned.map_err(io_error("starting a thread"))?;
    let ended = |_| io_error("making a pod's network")(io::Error::other("the thread ended without an answer"));
    result.await.map_err(ended)?
}

fn make(rules: &str) -> Result<Made, Error> {
    let mtu = mtu()?;
    if ip(&["link", "show", "dev", BRIDGE]).is_err() {
        ip(&["link", "add", BRIDGE, "type", "bridge"])?;
    }
    let mtu_text = mtu.to_string();
    ip(&["link", "set", BRIDGE, "mtu", &mtu_text])?;
    ip(&["addr", "replace", &format!("{SUBNET}.1/{PREFIX}"), "dev", BRIDGE])?;
    let tap = match crate::sys::tap(TAP) {
        Err(e) if e.raw_os_error() == Some(nix::libc::EBUSY) => {
            // An earlier agent made it, and its launcher has not started.
            ip(&["link", "del", TAP])?;
            crate::sys::tap(TAP)
        }
        other => other,
    }
    .map_err(io_error(format!("making {TAP}")))?;
    ip(&["link", "set", TAP, "mtu", &mtu_text, "master", BRIDGE, "up"])?;
    ip(&["link", "set", BRIDGE, "up"])?;
    // What a guest on the bridge sends to 127.0.0.1 stays here: only what the pod itself sends there is meant.
    for (key, value) in
        [("net/ipv4/ip_forward", "1".to_owned()), (&format!("net/ipv4/conf/{BRIDGE}/route_localnet"), "1".to_owned())]
    {
        let path = format!("/proc/sys/{key}");
        std::fs::write(&path, value).map_err(io_error(format!("writing {path}")))?;
    }
    tool("nft", &["-f", "-"], Some(rules))?;
    let dhcp = dhcp().map_err(io_error(format!("opening port {DHCP} on {BRIDGE}")))?;
    Ok(Made { tap, dhcp, mtu })
}

/// The rules, replacing those that are there. `pod`: the pod's own address.
fn rules(ports: &[(&'static str, u16)], pod: Option<IpAddr>) -> String {
    let guest = format!("{SUBNET}.2");
    let dnat = |from: &str| -> String {
        if ports.is_empty() {
            return format!("    {from} dnat to {guest}\n");
        }
        ports.iter().map(|(protocol, port)| format!("    {from} {protocol} dport {port} dnat to {guest}\n")).collect()
    };
    let mut own = dnat("ip daddr 127.0.0.1");
    if let Some(pod) = pod {
        own += &dnat(&format!("ip daddr {pod}"));
    }
    format!(
        "table ip {TABLE} {{}}\ndelete table ip {TABLE}\ntable ip {TABLE} {{\n  \
         chain prerouting {{\n    type nat hook prerouting priority dstnat;\n{arriving}  }}\n  \
         chain output {{\n    type nat hook output priority -100;\n{own}  }}\n  \
         chain postrouting {{\n    type nat hook postrouting priority srcnat;\n    \
         oifname \"{BRIDGE}\" ip saddr 127.0.0.1 snat to {SUBNET}.1\n    \
         oifname \"{UPLINK}\" ip saddr {guest} masquerade\n  }}\n}}\n",
        arriving = dnat(&format!("iifname \"{UPLINK}\"")),
    )
}

/// The uplink's MTU. `/sys` belongs to the namespace that mounted it, so `ip` is asked.
fn mtu() -> Result<u32, Error> {
    #[derive(Deserialize)]
    struct Link {
        mtu: u32,
    }
    let text = ip(&["-j", "link", "show", "dev", UPLINK])?;
    let links: Vec<Link> = serde_json::from_str(&text).map_err(|e| io_error("reading `ip -j link`")(e.into()))?;
    links.first().map(|l| l.mtu).ok_or_else(|| io_error("reading `ip -j link`")(io::ErrorKind::NotFound.into()))
}

/// The server's socket. The address may be taken by the socket that an earlier agent handed over.
fn dhcp() -> io::Result<OwnedFd> {
    let fd = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    setsockopt(&fd, sockopt::Broadcast, &true)?;
    setsockopt(&fd, sockopt::BindToDevice, &BRIDGE.into())?;
    bind(std::os::fd::AsRawFd::as_raw_fd(&fd), &SockaddrIn::new(0, 0, 0, 0, DHCP))?;
    Ok(UdpSocket::from(fd).into())
}

fn ip(arguments: &[&str]) -> Result<String, Error> {
    tool("ip", arguments, None)
}

fn tool(program: &str, arguments: &[&str], input: Option<&str>) -> Result<String, Error> {
    let command = || format!("{program} {}", arguments.join(" "));
    let run = || -> io::Result<std::process::Output> {
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        if let (Some(text), Some(mut stdin)) = (input, child.stdin.take()) {
            stdin.write_all(text.as_bytes())?;
        }
        child.wait_with_output()
    };
    let output = run().map_err(io_error(format!("running `{}`", command())))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(Error::Tool { command: command(), message: String::from_utf8_lossy(&output.stderr).trim().to_owned() })
}

/// One descriptor a message, each answered by one byte.
async fn hand_over(share: &Path, descriptors: &[(&str, OwnedFd)]) -> Result<(), Error> {
    use tokio::io::{AsyncReadExt, Interest};
    let send = async {
        let mut stream = crate::sock::connect(share, "fd.sock").await?;
        for (name, fd) in descriptors {
            stream.async_io(Interest::WRITABLE, || crate::sys::send_descriptor(&stream, name, fd)).await?;
            let answer = stream.read_u8().await?;
            if answer != b'k' {
                return Err(io::Error::other("the launcher refused a descriptor"));
            }
        }
        Ok(())
    };
    match tokio::time::timeout(crate::limits::LAUNCHER, send).await {
        Ok(sent) => sent,
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    }
    .map_err(io_error("handing descriptors to the launcher over fd.sock"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn of(interfaces: serde_json::Value, networks: serde_json::Value) -> Result<Option<Card>, String> {
        let vmi = json!({
            "metadata": {"uid": "u"},
            "spec": {"domain": {"devices": {"interfaces": interfaces}}, "networks": networks},
        });
        card(vmi.to_string().as_bytes()).map_err(|e| e.to_string())
    }

    #[test]
    fn cards() {
        let pod = json!([{"name": "default", "pod": {}}]);
        assert_eq!(of(json!([]), json!([])), Ok(None));
        let usual = of(json!([{"name": "default", "masquerade": {}}]), pod.clone()).unwrap().unwrap();
        assert_eq!((usual.network.as_str(), usual.mac.as_str()), ("default", "02:00:00:be:b5:5e"), "frozen");
        let ports = json!([{"name": "default", "masquerade": {}, "macAddress": "de:ad:00:00:be:ef",
                            "ports": [{"port": 80}, {"port": 53, "protocol": "UDP"}]}]);
        let card = of(ports, pod.clone()).unwrap().unwrap();
        assert_eq!((card.mac.as_str(), card.ports), ("de:ad:00:00:be:ef", vec![("tcp", 80), ("udp", 53)]));
        for (interfaces, networks, path) in [
            (json!([{"name": "default", "bridge": {}}]), pod.clone(), "interfaces[0]: only the masquerade"),
            (json!([{"name": "x", "masquerade": {}}]), pod.clone(), "interfaces[0]: only the pod network"),
            (json!([{"name": "m", "masquerade": {}}]), json!([{"name": "m", "multus": {}}]), "only the pod network"),
            (json!([{"name": "default", "masquerade": {}, "ports": [{"port": 0}]}]), pod.clone(), "ports"),
            (
                json!([{"name": "default", "masquerade": {}, "ports": [{"port": 1, "protocol": "SCTP"}]}]),
                pod.clone(),
                "ports",
            ),
            (json!([{"masquerade": {}}]), pod.clone(), "name: is missing"),
            (
                json!([{"name": "default", "masquerade": {}}, {"name": "default", "masquerade": {}}]),
                pod,
                "interfaces[1]: only one",
            ),
        ] {
            let e = of(interfaces, networks).unwrap_err();
            assert!(e.contains(path), "{e}");
        }
    }

    #[test]
    fn rules_are_replaced_as_a_whole_and_name_the_ports() {
        let all = rules(&[], Some("10.244.1.7".parse().unwrap()));
        assert!(all.starts_with("table ip virtfold {}\ndelete table ip virtfold\n"));
        assert!(all.contains("iifname \"eth0\" dnat to 10.0.2.2\n"), "{all}");
        assert!(all.contains("ip daddr 10.244.1.7 dnat to 10.0.2.2\n"), "{all}");
        let some = rules(&[("tcp", 80), ("udp", 53)], None);
        assert!(some.contains("iifname \"eth0\" tcp dport 80 dnat to 10.0.2.2\n"), "{some}");
        assert!(some.contains("ip daddr 127.0.0.1 udp dport 53 dnat to 10.0.2.2\n"), "{some}");
        assert!(!some.contains("iifname \"eth0\" dnat"));
    }
}
