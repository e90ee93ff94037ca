//! A pod's network, made for real.

use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::Command;
use std::time::Duration;

use nix::sched::{CloneFlags, setns};
use proto::agent::*;
use serde_json::{Value, json};

use crate::support::*;

/// A pod's namespace with `eth0`, and a machine beyond it.
struct Net {
    pod: String,
    beyond: String,
    guest: String,
}

fn ip(arguments: &[&str]) {
    let output = Command::new("ip").args(arguments).output().unwrap();
    assert!(output.status.success(), "ip {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

impl Net {
    fn new(test: &str) -> Self {
        let name = |part: &str| format!("vfna-{}-{test}-{part}", std::process::id());
        let net = Self { pod: name("pod"), beyond: name("beyond"), guest: name("guest") };
        for ns in [&net.pod, &net.beyond, &net.guest] {
            ip(&["netns", "add", ns]);
            ip(&["-n", ns, "link", "set", "lo", "up"]);
        }
        ip(&[
            "-n",
            &net.pod,
            "link",
            "add",
            "eth0",
            "mtu",
            "1450",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            &net.beyond,
        ]);
        ip(&["-n", &net.pod, "addr", "add", "10.244.1.7/24", "dev", "eth0"]);
        ip(&["-n", &net.beyond, "addr", "add", "10.244.1.1/24", "dev", "eth0"]);
        for ns in [&net.pod, &net.beyond] {
            ip(&["-n", ns, "link", "set", "eth0", "up"]);
        }
        ip(&["-n", &net.pod, "route", "add", "default", "via", "10.244.1.1"]);
        net
    }

    /// A stand-in for the guest, on the bridge beside the tap device.
    fn plug_guest(&self) {
        ip(&["-n", &self.guest, "link", "add", "eth0", "type", "veth", "peer", "name", "guest0", "netns", &self.pod]);
        ip(&["-n", &self.pod, "link", "set", "guest0", "master", "k6t-eth0", "up"]);
        ip(&["-n", &self.guest, "addr", "add", "10.0.2.2/24", "dev", "eth0"]);
        ip(&["-n", &self.guest, "link", "set", "eth0", "up"]);
        ip(&["-n", &self.guest, "route", "add", "default", "via", "10.0.2.1"]);
    }

    fn has_tap(&self) -> bool {
        Command::new("ip").args(["-n", &self.pod, "link", "show", "tap0"]).output().unwrap().status.success()
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for ns in [&self.pod, &self.beyond, &self.guest] {
            let _ = Command::new("ip").args(["netns", "del", ns]).status();
        }
    }
}

/// Runs `f` on a thread in the namespace.
fn inside<T: Send + 'static>(ns: &str, f: impl FnOnce() -> T + Send + 'static) -> T {
    let file = std::fs::File::open(format!("/run/netns/{ns}")).unwrap();
    std::thread::spawn(move || {
        setns(file.as_fd(), CloneFlags::CLONE_NEWNET).unwrap();
        f()
    })
    .join()
    .unwrap()
}

/// Who a server in `server` sees when somebody in `client` connects to `address`; `None` where nobody comes through.
fn connects(client: &str, address: &'static str, server: &str, port: u16) -> Option<String> {
    let listener = inside(server, move || TcpListener::bind(("0.0.0.0", port)).unwrap());
    let stream =
        inside(client, move || TcpStream::connect_timeout(&address.parse().unwrap(), Duration::from_millis(1500)));
    stream.ok().map(|_stream| listener.accept().unwrap().1.ip().to_string())
}

async fn world(net: &Net) -> (World, crate::support::launcher::Launcher) {
    let mut world = World::new().await;
    let mut facts = world.pod_facts().await;
    facts.netns = format!("/run/netns/{}", net.pod).into();
    let launcher = crate::support::launcher::Launcher::start(&facts.share_dir, &world.vmi_uid, POD).await;
    world.pods.set(|p| p.push(facts));
    world.vmi(scheduled()).await;
    world.start().await;
    (world, launcher)
}

async fn with_interface(world: &World, interface: Value) -> Value {
    let spec =
        json!({"networks": [{"name": "default", "pod": {}}], "domain": {"devices": {"interfaces": [interface]}}});
    world.patch(VMI_PATH, json!({"spec": spec})).await
}

#[tokio::test]
async fn a_guest_behind_masquerade_is_reached_and_reaches() {
    let net = Net::new("nat");
    let (mut world, launcher) = world(&net).await;
    let vmi = with_interface(&world, json!({"name": "default", "masquerade": {}})).await;
    let (mut session, _) = world.lead().await;
    session.instruct(InstructKind::Start, "s", &vmi).await;
    assert!(matches!(session.ack("s").await, ack::Result::Accepted(_)));
    assert_eq!(launcher.received(), ["tap0", "dhcp0"]);
    let facts = launcher.orders()[0].facts.clone().unwrap();
    let nic = &facts.nics[0];
    assert_eq!((nic.network.as_str(), nic.fd_name.as_str(), nic.dhcp_fd_name.as_str()), ("default", "tap0", "dhcp0"));
    assert_eq!((nic.guest_ip.as_str(), nic.prefix, nic.gateway.as_str(), nic.mtu), ("10.0.2.2", 24, "10.0.2.1", 1450));
    assert_eq!(
        (nic.dns.as_slice(), nic.domain.as_str()),
        (["10.96.0.10".to_owned()].as_slice(), "ns.svc.cluster.local")
    );
    assert!(nic.mac.starts_with("02:00:00:"), "{}", nic.mac);

    // The agent's death leaves the guest's network alone.
    world.stop().await;
    assert!(net.has_tap());
    net.plug_guest();
    let pod = net.pod.clone();
    assert_eq!(connects(&net.beyond, "10.244.1.7:80", &net.guest, 80).as_deref(), Some("10.244.1.1"), "arrives");
    assert_eq!(connects(&pod, "10.244.1.7:81", &net.guest, 81).as_deref(), Some("10.244.1.7"), "the pod's own address");
    assert_eq!(connects(&pod, "127.0.0.1:82", &net.guest, 82).as_deref(), Some("10.0.2.1"), "the pod's localhost");
    assert_eq!(
        connects(&net.guest, "10.244.1.1:83", &net.beyond, 83).as_deref(),
        Some("10.244.1.7"),
        "leaves masqueraded"
    );
    // DHCP: a broadcast of somebody without an address.
    let server: OwnedFd = launcher.fd("dhcp0");
    let server = UdpSocket::from(server);
    server.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    inside(&net.guest, || {
        let client = UdpSocket::bind("0.0.0.0:68").unwrap();
        client.set_broadcast(true).unwrap();
        client.send_to(b"discover", "255.255.255.255:67").unwrap();
    });
    let mut packet = [0; 16];
    let (n, _) = server.recv_from(&mut packet).unwrap();
    assert_eq!(&packet[..n], b"discover");
    // With the launcher the tap goes.
    drop(launcher.fd("tap0"));
    drop(launcher);
    eventually("the tap is gone", async || !net.has_tap()).await;
}

#[tokio::test]
async fn an_agent_that_begins_again_before_the_start_makes_it_anew() {
    let net = Net::new("again");
    let (mut world, launcher) = world(&net).await;
    let vmi = with_interface(
        &world,
        json!({"name": "default", "masquerade": {}, "ports": [{"port": 80}],
                                            "macAddress": "de:ad:00:00:be:ef"}),
    )
    .await;
    // An earlier agent died between handing over and starting: the launcher holds its descriptors.
    let earlier = {
        let (tap, dhcp) = inside(&net.pod, || {
            ip(&["link", "add", "k6t-eth0", "type", "bridge"]);
            ip(&["addr", "add", "10.0.2.1/24", "dev", "k6t-eth0"]);
            ip(&["link", "set", "k6t-eth0", "up"]);
            let dhcp = socket();
            (tap(), dhcp)
        });
        (tap, dhcp)
    };
    for n in 1..=2 {
        let epoch = 100 + n;
        let mut session = world.hello(epoch, "A").await.unwrap();
        session.complete_inventory().await;
        if n == 1 {
            session.instruct(InstructKind::Start, "s", &vmi).await;
            assert!(matches!(session.ack("s").await, ack::Result::Accepted(_)));
            world.stop().await;
            world.start().await;
        } else {
            session.instruct(InstructKind::Start, "s2", &vmi).await;
            assert_eq!(refused(&session.ack("s2").await).reason, "already-started");
        }
    }
    drop(earlier);
    assert_eq!(launcher.received(), ["tap0", "dhcp0"], "once");
    assert_eq!(launcher.orders()[0].facts.as_ref().unwrap().nics[0].mac, "de:ad:00:00:be:ef");
    assert!(net.has_tap(), "the one that the launcher holds");
    net.plug_guest();
    assert!(connects(&net.beyond, "10.244.1.7:80", &net.guest, 80).is_some());
    assert!(connects(&net.beyond, "10.244.1.7:81", &net.guest, 81).is_none(), "not a listed port");
}

nix::ioctl_write_int!(tun_set_iff, b'T', 202);

#[allow(unsafe_code)]
fn tap() -> OwnedFd {
    let file = std::fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun").unwrap();
    let mut request = [0u8; 40];
    request[..4].copy_from_slice(b"tap0");
    request[16..18].copy_from_slice(&0x5002u16.to_ne_bytes());
    // SAFETY: the request outlives the call.
    unsafe { tun_set_iff(file.as_raw_fd(), request.as_mut_ptr() as u64) }.unwrap();
    file.into()
}

fn socket() -> OwnedFd {
    use nix::sys::socket::*;
    let fd = nix::sys::socket::socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None).unwrap();
    setsockopt(&fd, sockopt::ReuseAddr, &true).unwrap();
    setsockopt(&fd, sockopt::BindToDevice, &"k6t-eth0".into()).unwrap();
    bind(fd.as_raw_fd(), &SockaddrIn::new(0, 0, 0, 0, 67)).unwrap();
    fd
}
