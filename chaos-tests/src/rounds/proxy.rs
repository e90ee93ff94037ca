//! A proxy that stands between all parts of a cluster and forgets, delays and tears what passes. What is TLS stays TLS: it knows bytes, not
//! requests, so that it cannot say one of them twice. It learns from the kernel where a connection was meant to go, and what it does
//! from its standard input, a word a line.

use anyhow::{Context, Result};
use nix::sys::socket::{getsockopt, setsockopt, sockopt};
use std::{
    fmt,
    net::{Ipv4Addr, SocketAddr},
    str::FromStr,
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::watch,
};

/// Its port in the cluster's network.
pub const PORT: u16 = 7001;
/// What it sends itself is marked with this, and not sent to it again.
pub const MARK: u32 = 0x7f;
/// Most bytes at once of a message that is torn.
const PIECE: usize = 97;

/// What it does with what passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Nothing.
    Pass,
    /// It comes later, by milliseconds.
    Delay(u64),
    /// Every connection is cut, and none is let through.
    Cut,
    /// Connections stay open, and nothing passes.
    Hang,
    /// Requests arrive, answers are lost; then the connection is cut.
    Swallow,
    /// Requests are held back, and arrive after who sent them has given up.
    Late,
    /// Messages arrive in small pieces.
    Dribble,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pass => f.write_str("pass"),
            Self::Delay(ms) => write!(f, "delay {ms}"),
            Self::Cut => f.write_str("cut"),
            Self::Hang => f.write_str("hang"),
            Self::Swallow => f.write_str("swallow"),
            Self::Late => f.write_str("late"),
            Self::Dribble => f.write_str("dribble"),
        }
    }
}

impl FromStr for Mode {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.split_whitespace();
        Ok(match (words.next(), words.next().map(str::parse)) {
            (Some("pass"), None) => Self::Pass,
            (Some("delay"), Some(Ok(ms))) => Self::Delay(ms),
            (Some("cut"), None) => Self::Cut,
            (Some("hang"), None) => Self::Hang,
            (Some("swallow"), None) => Self::Swallow,
            (Some("late"), None) => Self::Late,
            (Some("dribble"), None) => Self::Dribble,
            _ => return Err(format!("{text:?} is no mode of the proxy")),
        })
    }
}

/// What has to be told to the kernel so that all that is said to API server and agents comes here.
pub fn rules() -> String {
    format!(
        "table ip chaos {{\n\
         chain out {{ type nat hook output priority -100; meta mark {MARK} return; ip daddr 10.244.0.0/16 tcp dport {{ 6443, 8443 }} redirect to :{PORT}; }}\n\
         chain in {{ type nat hook prerouting priority -100; ip daddr 10.244.0.1 tcp dport 6443 redirect to :{PORT}; }}\n}}\n"
    )
}

/// Runs until its standard input ends.
///
/// # Errors
/// The port is taken.
pub fn run() -> Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).await.context("listen")?;
        println!("ready");
        let (set, mode) = watch::channel(Mode::Pass);
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                tokio::spawn(pass(near, mode.clone()));
            }
        });
        let mut lines = BufReader::new(tokio::io::stdin()).lines();
        while let Some(line) = lines.next_line().await? {
            set.send_replace(line.parse().map_err(anyhow::Error::msg)?);
            // Who waits for this line knows that the mode is set.
            println!("{line}");
        }
        Ok(())
    })
}

async fn pass(near: TcpStream, mut mode: watch::Receiver<Mode>) -> Option<()> {
    let meant = getsockopt(&near, sockopt::OriginalDst).ok()?;
    let address = Ipv4Addr::from(u32::from_be(meant.sin_addr.s_addr));
    let target = SocketAddr::from((address, u16::from_be(meant.sin_port)));
    if *mode.borrow() == Mode::Cut {
        return reset(near);
    }
    let socket = TcpSocket::new_v4().ok()?;
    setsockopt(&socket, sockopt::Mark, &MARK).ok()?;
    let far = socket.connect(target).await.ok()?;
    near.set_nodelay(true).ok()?;
    far.set_nodelay(true).ok()?;
    let (mut near_read, mut near_write) = near.into_split();
    let (mut far_read, mut far_write) = far.into_split();
    let (up, down) = (mode.clone(), mode.clone());
    let over = async {
        // Who lost answers knows nothing of the state that the other side is in.
        let lost = mode.wait_for(|m| matches!(m, Mode::Cut | Mode::Swallow)).await.map(|m| *m);
        if lost.is_ok_and(|m| m == Mode::Swallow) {
            let _ = mode.wait_for(|m| *m != Mode::Swallow).await;
        }
    };
    let work = async {
        tokio::join!(pump(&mut near_read, &mut far_write, up, true), pump(&mut far_read, &mut near_write, down, false))
    };
    tokio::select! {
        _ = work => {}
        () = over => {}
    }
    Some(())
}

/// An end that the other side cannot take for an orderly one.
fn reset(near: TcpStream) -> Option<()> {
    near.set_zero_linger().ok()
}

async fn pump(
    from: &mut (impl AsyncReadExt + Unpin),
    to: &mut (impl AsyncWriteExt + Unpin),
    mut mode: watch::Receiver<Mode>,
    up: bool,
) -> Option<()> {
    let mut buffer = vec![0; 16 << 10];
    loop {
        let n = from.read(&mut buffer).await.ok()?;
        if n == 0 {
            return to.shutdown().await.ok();
        }
        let part = buffer.get(..n)?;
        let now = *mode.borrow();
        match now {
            Mode::Hang => drop(mode.wait_for(|m| *m != Mode::Hang).await.ok()?),
            Mode::Late if up => drop(mode.wait_for(|m| *m != Mode::Late).await.ok()?),
            Mode::Swallow if !up => continue,
            Mode::Delay(ms) => tokio::time::sleep(Duration::from_millis(ms)).await,
            Mode::Dribble => {
                for piece in part.chunks(PIECE) {
                    to.write_all(piece).await.ok()?;
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                continue;
            }
            Mode::Pass | Mode::Cut | Mode::Late | Mode::Swallow => {}
        }
        to.write_all(part).await.ok()?;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn modes_are_read_as_they_are_written() {
        for mode in [Mode::Pass, Mode::Delay(250), Mode::Cut, Mode::Hang, Mode::Swallow, Mode::Late, Mode::Dribble] {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        for bad in ["", "delay", "delay x", "cut 1", "stop"] {
            assert!(bad.parse::<Mode>().is_err(), "{bad}");
        }
    }

    #[tokio::test]
    async fn answers_are_lost_held_back_and_torn() {
        let (set, mode) = watch::channel(Mode::Swallow);
        let (mut client, mut near) = tokio::io::duplex(1 << 16);
        let (mut far, mut server) = tokio::io::duplex(1 << 16);
        client.write_all(b"lost").await.unwrap();
        let down = mode.clone();
        let pumped = tokio::spawn(async move { pump(&mut near, &mut far, down, false).await });
        tokio::task::yield_now().await;
        set.send_replace(Mode::Dribble);
        client.write_all(&[7; 1000]).await.unwrap();
        drop(client);
        let mut all = Vec::new();
        server.read_to_end(&mut all).await.unwrap();
        pumped.await.unwrap();
        assert_eq!(all, vec![7; 1000]);
    }
}
