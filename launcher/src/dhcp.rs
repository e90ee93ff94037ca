//! A DHCP server for one guest: it knows one hardware address and hands out one lease that never ends.
//!
//! The socket comes from the node agent, bound to port 67 in the pod's network. Packets are a guest's: whatever is not
//! a well-formed request of the expected card is dropped without a word.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;

use proto::launcher::NicFacts;

/// Fixed part of a BOOTP packet and the magic cookie.
const HEADER: usize = 240;
const COOKIE: [u8; 4] = [99, 130, 83, 99];
/// Smallest packet that every client accepts.
const SMALLEST: usize = 300;
/// A lease without end.
const FOREVER: u32 = u32::MAX;
const CLIENT_PORT: u16 = 68;

/// What one guest is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The card that is answered.
    pub mac: [u8; 6],
    /// Its address.
    pub address: Ipv4Addr,
    /// Prefix length of its network.
    pub prefix: u8,
    /// Router, and the server's own identity.
    pub gateway: Ipv4Addr,
    /// Name servers.
    pub dns: Vec<Ipv4Addr>,
    /// Largest packet.
    pub mtu: Option<u16>,
    /// Host name.
    pub hostname: String,
    /// Search domain.
    pub domain: String,
}

impl Lease {
    /// From the facts of a card; `None` where they give no address to hand out.
    pub fn new(facts: &NicFacts, hostname: &str) -> Option<Self> {
        let mut mac = [0; 6];
        let mut parts = facts.mac.split(':');
        for byte in &mut mac {
            *byte = u8::from_str_radix(parts.next()?, 16).ok()?;
        }
        Some(Self {
            mac,
            address: facts.guest_ip.parse().ok()?,
            prefix: u8::try_from(facts.prefix).ok().filter(|p| *p <= 32)?,
            gateway: facts.gateway.parse().ok()?,
            dns: facts.dns.iter().filter_map(|d| d.parse().ok()).take(8).collect(),
            mtu: u16::try_from(facts.mtu).ok().filter(|m| *m >= 68),
            hostname: hostname.into(),
            domain: facts.domain.clone(),
        })
    }
}

/// Answers on `socket` for as long as the runtime lives.
pub(crate) fn serve(socket: OwnedFd, lease: Lease) -> std::io::Result<()> {
    let socket = std::net::UdpSocket::from(socket);
    socket.set_nonblocking(true)?;
    socket.set_broadcast(true)?;
    let socket = tokio::net::UdpSocket::from_std(socket)?;
    tokio::spawn(async move {
        let mut packet = [0; 1500];
        loop {
            let received = socket.recv_from(&mut packet).await;
            let length = match received {
                Ok((n, _)) => n,
                Err(error) => {
                    tracing::warn!(%error, "receiving a DHCP packet");
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                    continue;
                }
            };
            let Some(reply) = packet.get(..length).and_then(|p| answer(p, &lease)) else { continue };
            if let Err(error) = socket.send_to(&reply.packet, reply.to).await {
                tracing::warn!(%error, to = %reply.to, "sending a DHCP packet");
            }
        }
    });
    Ok(())
}

/// A packet to be sent.
#[derive(Debug, PartialEq, Eq)]
pub struct Reply {
    /// Where it goes.
    pub to: SocketAddr,
    /// Its bytes.
    pub packet: Vec<u8>,
}

/// The answer to `packet`, if it deserves one.
pub fn answer(packet: &[u8], lease: &Lease) -> Option<Reply> {
    let header: &[u8; HEADER] = packet.get(..HEADER)?.try_into().ok()?;
    // BOOTREQUEST, Ethernet, six bytes of address.
    if header[..3] != [1, 1, 6] || header[28..34] != lease.mac || header[236..240] != COOKIE {
        return None;
    }
    let options = packet.get(HEADER..)?;
    let address = |bytes: &[u8]| <[u8; 4]>::try_from(bytes).ok().map(Ipv4Addr::from);
    let client = address(&header[12..16])?;
    let server = option(options, 54).and_then(address);
    if server.is_some_and(|s| s != lease.gateway) {
        // The client took another server's offer.
        return None;
    }
    let kind = match option(options, 53)? {
        [1] => 2, // DISCOVER -> OFFER
        [3] => {
            // REQUEST: what it wants stands in the option, or in ciaddr when it renews.
            let wanted = option(options, 50).and_then(address).unwrap_or(client);
            if wanted == lease.address { 5 } else { 6 }
        }
        [8] => 5, // INFORM -> ACK, without an address
        _ => return None,
    };
    let inform = option(options, 53) == Some(&[8]);

    let mut out = vec![0; HEADER];
    out[0] = 2;
    out[1..3].copy_from_slice(&[1, 6]);
    out[4..8].copy_from_slice(&header[4..8]);
    out[10..12].copy_from_slice(&header[10..12]);
    if kind == 5 {
        out[12..16].copy_from_slice(&header[12..16]);
    }
    if kind != 6 && !inform {
        out[16..20].copy_from_slice(&lease.address.octets());
    }
    out[28..44].copy_from_slice(&header[28..44]);
    out[236..240].copy_from_slice(&COOKIE);
    let mut put = |code: u8, bytes: &[u8]| {
        if !bytes.is_empty() && bytes.len() <= 255 {
            out.extend([code, bytes.len() as u8]);
            out.extend(bytes);
        }
    };
    put(53, &[kind]);
    put(54, &lease.gateway.octets());
    if kind != 6 {
        if !inform {
            put(51, &FOREVER.to_be_bytes());
        }
        let mask = u32::MAX.checked_shl(32 - u32::from(lease.prefix)).unwrap_or(0);
        put(1, &mask.to_be_bytes());
        put(3, &lease.gateway.octets());
        put(6, &lease.dns.iter().flat_map(|d| d.octets()).collect::<Vec<u8>>());
        put(12, lease.hostname.as_bytes());
        put(15, lease.domain.as_bytes());
        if let Some(mtu) = lease.mtu {
            put(26, &mtu.to_be_bytes());
        }
    }
    out.push(255);
    if out.len() < SMALLEST {
        out.resize(SMALLEST, 0);
    }
    // A client with an address hears unicast; one without hears only broadcast, since nobody answers ARP for it yet.
    let to = if client.is_unspecified() || kind == 6 { Ipv4Addr::BROADCAST } else { client };
    Some(Reply { to: SocketAddr::from((to, CLIENT_PORT)), packet: out })
}

/// The value of an option; `None` where it is missing or the list is malformed before it.
fn option(mut list: &[u8], wanted: u8) -> Option<&[u8]> {
    loop {
        let (code, rest) = list.split_first()?;
        match *code {
            0 => list = rest,
            255 => return None,
            code => {
                let (length, rest) = rest.split_first()?;
                let value = rest.get(..usize::from(*length))?;
                if code == wanted {
                    return Some(value);
                }
                list = rest.get(usize::from(*length)..)?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn lease() -> Lease {
        Lease::new(
            &NicFacts {
                mac: "02:00:00:00:00:01".into(),
                guest_ip: "10.0.2.2".into(),
                prefix: 24,
                gateway: "10.0.2.1".into(),
                dns: vec!["10.96.0.10".into(), "fe80::1".into()],
                mtu: 1450,
                domain: "ns.svc.cluster.local".into(),
                ..NicFacts::default()
            },
            "web",
        )
        .unwrap()
    }

    fn request(options: &[u8]) -> Vec<u8> {
        let mut p = vec![0; HEADER];
        p[..3].copy_from_slice(&[1, 1, 6]);
        p[4..8].copy_from_slice(&[0xde, 0xad, 0xbe, 0xef]);
        p[28..34].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
        p[236..240].copy_from_slice(&COOKIE);
        p.extend(options);
        p
    }

    fn opt(reply: &Reply, code: u8) -> Option<&[u8]> {
        option(&reply.packet[HEADER..], code)
    }

    #[test]
    fn discover_offer_request_ack() {
        let offer = answer(&request(&[53, 1, 1, 255]), &lease()).unwrap();
        assert_eq!(offer.to, "255.255.255.255:68".parse().unwrap());
        assert_eq!(&offer.packet[16..20], &[10, 0, 2, 2]);
        assert_eq!(&offer.packet[4..8], &[0xde, 0xad, 0xbe, 0xef]);
        assert_eq!(opt(&offer, 53), Some(&[2u8][..]));
        let ack = answer(&request(&[53, 1, 3, 50, 4, 10, 0, 2, 2, 54, 4, 10, 0, 2, 1, 255]), &lease()).unwrap();
        assert_eq!(opt(&ack, 53), Some(&[5u8][..]));
        assert_eq!(opt(&ack, 1), Some(&[255u8, 255, 255, 0][..]));
        assert_eq!(opt(&ack, 3), Some(&[10u8, 0, 2, 1][..]));
        assert_eq!(opt(&ack, 6), Some(&[10u8, 96, 0, 10][..]));
        assert_eq!(opt(&ack, 12), Some(&b"web"[..]));
        assert_eq!(opt(&ack, 15), Some(&b"ns.svc.cluster.local"[..]));
        assert_eq!(opt(&ack, 26), Some(&1450u16.to_be_bytes()[..]));
        assert_eq!(opt(&ack, 51), Some(&[255u8; 4][..]));
    }

    #[test]
    fn a_renewal_is_answered_to_the_clients_address() {
        let mut p = request(&[53, 1, 3, 255]);
        p[12..16].copy_from_slice(&[10, 0, 2, 2]);
        let ack = answer(&p, &lease()).unwrap();
        assert_eq!((ack.to, opt(&ack, 53)), ("10.0.2.2:68".parse().unwrap(), Some(&[5u8][..])));
    }

    #[test]
    fn another_address_is_refused_and_another_servers_offer_ignored() {
        let nak = answer(&request(&[53, 1, 3, 50, 4, 192, 168, 0, 9, 255]), &lease()).unwrap();
        assert_eq!(
            (nak.to, opt(&nak, 53), opt(&nak, 1)),
            ("255.255.255.255:68".parse().unwrap(), Some(&[6u8][..]), None)
        );
        assert_eq!(&nak.packet[16..20], &[0; 4]);
        assert_eq!(answer(&request(&[53, 1, 3, 54, 4, 1, 2, 3, 4, 50, 4, 10, 0, 2, 2, 255]), &lease()), None);
    }

    #[test]
    fn release_decline_and_strangers_get_nothing() {
        for kind in [2, 4, 5, 6, 7, 9] {
            assert_eq!(answer(&request(&[53, 1, kind, 255]), &lease()), None, "{kind}");
        }
        let mut stranger = request(&[53, 1, 1, 255]);
        stranger[33] = 9;
        assert_eq!(answer(&stranger, &lease()), None);
    }

    #[test]
    fn inform_gets_options_without_an_address() {
        let mut p = request(&[53, 1, 8, 255]);
        p[12..16].copy_from_slice(&[10, 0, 2, 2]);
        let ack = answer(&p, &lease()).unwrap();
        assert_eq!((&ack.packet[16..20], opt(&ack, 51)), (&[0u8; 4][..], None));
        assert!(opt(&ack, 3).is_some());
    }

    #[test]
    fn garbage_of_every_length_is_dropped() {
        let good = request(&[53, 1, 1, 255]);
        for length in 0..good.len() - 1 {
            assert_eq!(answer(&good[..length], &lease()), None, "{length}");
        }
        for options in [&[53][..], &[53, 9, 1], &[53, 0], &[12, 255], &[0, 0, 0], &[255, 53, 1, 1], &[53, 2, 1, 1]] {
            assert_eq!(answer(&request(options), &lease()), None, "{options:?}");
        }
        let mut seed = 1u32;
        for _ in 0..20_000 {
            let mut p = request(&[]);
            for _ in 0..seed % 64 {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                p.push((seed >> 24) as u8);
            }
            seed = seed.wrapping_add(1);
            let _ = answer(&p, &lease());
        }
    }

    #[test]
    fn facts_without_an_address_make_no_lease() {
        assert_eq!(Lease::new(&NicFacts { mac: "02:00:00:00:00:01".into(), ..NicFacts::default() }, "h"), None);
        assert_eq!(Lease::new(&NicFacts { mac: "zz".into(), ..NicFacts::default() }, "h"), None);
    }
}
