//! Network namespaces by name (`ip netns`), what joins them, and sockets made inside of them.
//!
//! The cluster's network is a tree of bridges in namespaces of its own; the machine's own namespace gets nothing. A process
//! that lives outside reaches in because a socket belongs to the namespace of the thread that made it, for ever: [`Netns::listen`]
//! and [`Netns::dial`] make it on a thread that has entered the namespace and then ends.
//!
//! Everything here can be done again: what is there already and right stays, what is half there (a process was killed in
//! between) is made anew.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use nix::sched::{CloneFlags, setns};
use nix::sys::statfs::{FsType, statfs};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};
use tokio::sync::oneshot;

/// Where `ip netns` keeps its names.
const FOLDER: &str = "/run/netns";
/// Magic number of the file system that a namespace's file belongs to.
const NSFS: FsType = FsType(0x6e73_6673);
/// Pending connections of a listener.
const BACKLOG: u32 = 1024;

/// Why the network could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum NetnsError {
    /// `ip` said no.
    #[error("`ip {command}` failed: {message}")]
    Ip {
        /// Its arguments.
        command: String,
        /// Its standard error.
        message: String,
    },
    /// `ip` could not be run.
    #[error("cannot run `ip`; is the package iproute2 installed?")]
    NoIp(#[source] io::Error),
    /// The namespace's file cannot be used.
    #[error("network namespace {name}")]
    Namespace {
        /// Its name.
        name: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A network namespace that has a name. Dropping this does nothing to the namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Netns {
    name: String,
}

async fn ip(arguments: &[&str]) -> Result<String, NetnsError> {
    let output = tokio::process::Command::new("ip")
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .await
        .map_err(NetnsError::NoIp)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(NetnsError::Ip {
        command: arguments.join(" "),
        message: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

/// Runs `ip`; that the thing is there already is no failure.
async fn ip_ensure(arguments: &[&str]) -> Result<(), NetnsError> {
    match ip(arguments).await {
        Err(NetnsError::Ip { message, .. }) if message.contains("File exists") => Ok(()),
        other => other.map(drop),
    }
}

impl Netns {
    /// The namespace of that name, whether it exists or not.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self { name: name.to_owned() }
    }

    /// Makes the namespace unless it is there, with its loopback up.
    ///
    /// # Errors
    /// What `ip` says.
    pub async fn create(name: &str) -> Result<Self, NetnsError> {
        let netns = Self::named(name);
        if !netns.exists() {
            if netns.path().exists() {
                // The file is there but no namespace is mounted on it: somebody was killed between the two.
                let _ = std::fs::remove_file(netns.path());
            }
            ip_ensure(&["netns", "add", name]).await?;
        }
        netns.up("lo").await?;
        Ok(netns)
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its file, for `setns` and for a container's configuration.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        Path::new(FOLDER).join(&self.name)
    }

    /// Whether it exists.
    #[must_use]
    pub fn exists(&self) -> bool {
        statfs(&self.path()).is_ok_and(|fs| fs.filesystem_type() == NSFS)
    }

    /// Removes the name; the namespace goes with its last process and socket. Nothing happens when there is none.
    ///
    /// # Errors
    /// What `ip` says.
    pub async fn remove(&self) -> Result<(), NetnsError> {
        if self.exists() {
            match ip(&["netns", "del", &self.name]).await {
                Err(NetnsError::Ip { message, .. }) if message.contains("No such file") => {}
                other => drop(other?),
            }
        } else if self.path().exists() {
            let _ = std::fs::remove_file(self.path());
        }
        Ok(())
    }

    /// The namespaces whose name begins with `prefix`.
    #[must_use]
    pub fn all(prefix: &str) -> Vec<Self> {
        let mut found: Vec<_> = std::fs::read_dir(FOLDER)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| name.starts_with(prefix))
            .map(|name| Self { name })
            .collect();
        found.sort_by(|a, b| a.name.cmp(&b.name));
        found
    }

    async fn up(&self, interface: &str) -> Result<(), NetnsError> {
        ip(&["-n", &self.name, "link", "set", interface, "up"]).await.map(drop)
    }

    /// Whether there is an interface of that name in it.
    pub async fn has(&self, interface: &str) -> bool {
        ip(&["-n", &self.name, "link", "show", "dev", interface]).await.is_ok()
    }

    /// Makes a bridge, up, with an address (`10.244.0.1/16`).
    ///
    /// # Errors
    /// What `ip` says.
    pub async fn bridge(&self, bridge: &str, address: &str) -> Result<(), NetnsError> {
        ip_ensure(&["-n", &self.name, "link", "add", bridge, "type", "bridge"]).await?;
        self.address(bridge, address).await?;
        self.up(bridge).await
    }

    /// Gives an interface an address with prefix length.
    ///
    /// # Errors
    /// What `ip` says.
    pub async fn address(&self, interface: &str, address: &str) -> Result<(), NetnsError> {
        ip(&["-n", &self.name, "addr", "replace", address, "dev", interface]).await.map(drop)
    }

    /// Joins this namespace's bridge with `peer` by a veth pair: `port` here, `peer_interface` there, both up.
    ///
    /// # Errors
    /// What `ip` says.
    pub async fn plug(&self, bridge: &str, port: &str, peer: &Self, peer_interface: &str) -> Result<(), NetnsError> {
        if !peer.has(peer_interface).await {
            // A port without its other end belonged to a namespace that is being taken down.
            let _ = ip(&["-n", &self.name, "link", "del", port]).await;
            ip(&[
                "-n",
                &self.name,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                peer_interface,
                "netns",
                &peer.name,
            ])
            .await?;
        }
        ip(&["-n", &self.name, "link", "set", port, "master", bridge, "up"]).await?;
        peer.up(peer_interface).await
    }

    /// Makes an interface a port of a bridge, both of this namespace.
    ///
    /// # Errors
    /// What `ip` says.
    pub async fn enslave(&self, interface: &str, bridge: &str) -> Result<(), NetnsError> {
        ip(&["-n", &self.name, "link", "set", interface, "master", bridge, "up"]).await.map(drop)
    }

    /// Moves the calling thread into the namespace. For a thread that ends soon, or for a process before it has others.
    ///
    /// # Errors
    /// [`NetnsError::Namespace`] when there is none, or the rights are missing.
    pub fn enter(&self) -> Result<(), NetnsError> {
        enter(&self.path()).map_err(|source| NetnsError::Namespace { name: self.name.clone(), source })
    }

    /// A listener inside the namespace.
    ///
    /// # Errors
    /// As `bind` does; also when the namespace is gone.
    pub async fn listen(&self, address: SocketAddr) -> io::Result<TcpListener> {
        let socket = inside(self.path(), move || {
            let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
            socket.set_reuseaddr(true)?;
            socket.bind(address)?;
            Ok(socket)
        })
        .await?;
        socket.listen(BACKLOG)
    }

    /// A connection from inside the namespace.
    ///
    /// # Errors
    /// As `connect` does; also when the namespace is gone.
    pub async fn dial(&self, address: SocketAddr) -> io::Result<TcpStream> {
        dial(self.path(), address).await
    }

    /// A UDP socket that is connected to `address`, from inside.
    ///
    /// # Errors
    /// As [`datagrams`].
    pub async fn datagrams(&self, address: SocketAddr) -> io::Result<UdpSocket> {
        datagrams(self.path(), address).await
    }
}

fn enter(path: &Path) -> io::Result<()> {
    let file = std::fs::File::open(path)?;
    setns(&file, CloneFlags::CLONE_NEWNET).map_err(io::Error::from)
}

/// Runs `make` on a thread of its own inside the namespace.
async fn inside<T: Send + 'static>(
    path: PathBuf,
    make: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (done, result) = oneshot::channel();
    std::thread::Builder::new().name("netns".into()).spawn(move || {
        let _ = done.send(enter(&path).and_then(|()| make()));
    })?;
    result.await.map_err(|_| io::Error::other("the thread inside the network namespace ended without an answer"))?
}

/// A connection to `address` from inside the namespace whose file is `path`.
///
/// # Errors
/// As `connect` does; also when the namespace is gone.
pub async fn dial(path: PathBuf, address: SocketAddr) -> io::Result<TcpStream> {
    let socket = inside(path, move || match address.ip() {
        IpAddr::V4(_) => TcpSocket::new_v4(),
        IpAddr::V6(_) => TcpSocket::new_v6(),
    })
    .await?;
    let stream = socket.connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// A UDP socket that is connected to `address`, from inside the namespace whose file is `path`.
///
/// # Errors
/// As `bind` and `connect` do; also when the namespace is gone.
pub async fn datagrams(path: PathBuf, address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = inside(path, move || {
        let socket = std::net::UdpSocket::bind(if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
        socket.connect(address)?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    })
    .await?;
    UdpSocket::from_std(socket)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn a_tree_of_namespaces_carries_a_connection_and_goes_away() {
        let id = format!("vt{}", std::process::id());
        let cluster = Netns::create(&format!("{id}-cluster")).await.unwrap();
        // A file without a namespace, as a kill in the middle leaves it.
        std::fs::write(format!("{FOLDER}/{id}-n1"), b"").unwrap();
        for _ in 0..2 {
            cluster.bridge("br0", "10.244.0.1/16").await.unwrap();
            let node = Netns::create(&format!("{id}-n1")).await.unwrap();
            node.bridge("br0", "10.244.1.1/16").await.unwrap();
            cluster.plug("br0", "port1", &node, "eth0").await.unwrap();
            node.enslave("eth0", "br0").await.unwrap();
        }
        let node = Netns::named(&format!("{id}-n1"));
        let address: SocketAddr = "10.244.1.1:7000".parse().unwrap();
        let listener = node.listen(address).await.unwrap();
        assert!(TcpListener::bind(address).await.is_err(), "the host has no such address");
        let (dialed, accepted) = tokio::join!(cluster.dial(address), listener.accept());
        let (mut there, from) = accepted.unwrap();
        assert_eq!(from.ip().to_string(), "10.244.0.1");
        dialed.unwrap().write_all(b"hello").await.unwrap();
        let mut text = String::new();
        there.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "hello");
        assert_eq!(Netns::all(&id), [cluster.clone(), node.clone()]);
        for netns in [&node, &cluster, &node] {
            netns.remove().await.unwrap();
        }
        assert!(Netns::all(&id).is_empty());
        assert!(cluster.dial(address).await.is_err());
    }
}
