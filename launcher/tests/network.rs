//! A guest on a tap in a network namespace: descriptors over fd.sock, DHCP, HTTP.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use proto::agent::{Cause, InstructKind};
use proto::launcher::{NicFacts, NodeFacts};
use serde_json::json;

use crate::support::*;

nix::ioctl_write_int!(tun_set_iff, b'T', 202);

struct Netns(String);

impl Netns {
    fn new() -> Self {
        let name = format!("vf-test-launcher-{}", std::process::id());
        ip(&["netns", "add", &name]);
        Self(name)
    }

    /// Runs `f` on a thread that is in the namespace.
    fn inside<T: Send + 'static>(&self, f: impl FnOnce() -> T + Send + 'static) -> T {
        let file = std::fs::File::open(format!("/run/netns/{}", self.0)).unwrap();
        std::thread::spawn(move || {
            nix::sched::setns(file.as_fd(), nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            f()
        })
        .join()
        .unwrap()
    }

    fn ip(&self, arguments: &[&str]) {
        ip(&[&["-n", &self.0], arguments].concat());
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

fn ip(arguments: &[&str]) {
    assert!(Command::new("ip").args(arguments).status().unwrap().success(), "ip {arguments:?}");
}

fn tap(name: &str) -> OwnedFd {
    let file = std::fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun").unwrap();
    let mut request = [0u8; 40];
    request[..name.len()].copy_from_slice(name.as_bytes());
    // IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
    request[16..18].copy_from_slice(&0x5002u16.to_ne_bytes());
    // SAFETY: the request outlives the call, which reads and writes no more than struct ifreq.
    unsafe { tun_set_iff(file.as_raw_fd(), request.as_mut_ptr() as u64) }.unwrap();
    file.into()
}

fn dhcp(device: &'static str) -> OwnedFd {
    let socket = std::net::UdpSocket::bind("0.0.0.0:67").unwrap();
    nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::BindToDevice, &device.into()).unwrap();
    socket.into()
}

#[test]
fn a_guest_gets_its_address_and_answers() {
    let _turn = turn();
    let ns = Netns::new();
    ns.ip(&["link", "add", "br0", "type", "bridge"]);
    ns.ip(&["addr", "add", "10.0.2.1/24", "dev", "br0"]);
    let tap = ns.inside(|| tap("tap0"));
    ns.ip(&["link", "set", "tap0", "master", "br0", "up"]);
    ns.ip(&["link", "set", "br0", "up"]);
    let dhcp = ns.inside(|| dhcp("br0"));

    let mut l = usual_launcher();
    let sender = UnixStream::connect(l.path("share/fd.sock")).unwrap();
    for (name, fd) in [("tap-default", &tap), ("dhcp-default", &dhcp)] {
        launcher::send_descriptor(&sender, name, fd).unwrap();
        let mut answer = [0];
        std::io::Read::read_exact(&mut &sender, &mut answer).unwrap();
        assert_eq!(&answer, b"k");
    }
    drop((tap, dhcp));
    let mut manifest = usual();
    manifest["spec"]["domain"]["devices"]["interfaces"] = json!([{"name": "default", "masquerade": {}}]);
    manifest["spec"]["networks"] = json!([{"name": "default", "pod": {}}]);
    let facts = NodeFacts {
        nics: vec![NicFacts {
            network: "default".into(),
            mac: "02:00:00:00:00:0a".into(),
            fd_name: "tap-default".into(),
            dhcp_fd_name: "dhcp-default".into(),
            guest_ip: "10.0.2.2".into(),
            prefix: 24,
            gateway: "10.0.2.1".into(),
            dns: vec!["10.96.0.10".into()],
            mtu: 1450,
            domain: "ns.svc.cluster.local".into(),
        }],
        ..facts()
    };
    l.execute(instruct(InstructKind::Start, "start", &manifest), facts);
    let domain = l.until("the guest's own word about its interface", |d| {
        d.guest.as_ref().is_some_and(|g| g.interfaces.first().is_some_and(|i| i.info_source.contains("guest-agent")))
    });
    let nic = &domain.guest.unwrap().interfaces[0];
    assert_eq!((nic.name.as_str(), nic.mac.as_str(), nic.ip.as_str()), ("default", "02:00:00:00:00:0a", "10.244.1.7"));
    assert_eq!((nic.interface_name.as_str(), nic.info_source.as_str()), ("eth0", "domain, guest-agent"));
    l.until_console("login:");
    let page = ns.inside(|| {
        let mut stream =
            std::net::TcpStream::connect_timeout(&"10.0.2.2:80".parse().unwrap(), Duration::from_secs(20)).unwrap();
        std::io::Write::write_all(&mut stream, b"GET / HTTP/1.0\r\n\r\n").unwrap();
        let mut page = String::new();
        std::io::Read::read_to_string(&mut stream, &mut page).unwrap();
        page
    });
    assert!(page.contains("eth0 10.0.2.2/24"), "{page}");
    l.tell(InstructKind::Shutdown, "s", LONG);
    l.ends(Cause::GuestShutdown);
}

#[test]
fn a_card_without_its_descriptor_does_not_start() {
    let mut l = usual_launcher();
    let mut manifest = usual();
    manifest["spec"]["domain"]["devices"]["interfaces"] = json!([{"name": "default", "masquerade": {}}]);
    let mut f = facts();
    f.nics = vec![NicFacts {
        network: "default".into(),
        mac: "02:00:00:00:00:0a".into(),
        fd_name: "tap".into(),
        ..NicFacts::default()
    }];
    l.execute(instruct(InstructKind::Start, "start", &manifest), f);
    let outcome = l.ends(Cause::StartFailed);
    assert!(
        outcome.message.contains("spec.domain.devices.interfaces[0]") && outcome.message.contains("tap"),
        "{outcome:?}"
    );
}
