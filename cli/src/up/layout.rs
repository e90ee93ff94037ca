//! Where a cluster keeps what, and what its parts are called.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use embedded::netns::Netns;
use serde::{Deserialize, Serialize};

/// Prefix length of the cluster's network.
pub const PREFIX: u8 = 16;
/// Where the API server is inside of the cluster's network.
pub const API: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(10, 244, 0, 1)), 6443);
/// The bridge of the cluster and of each node.
pub const BRIDGE: &str = "br0";
/// Port of a node agent's gRPC server.
pub const AGENT_PORT: u16 = 8443;

/// Port of metrics, of the control plane inside of the cluster and of each node's agent.
pub const METRICS_PORT: u16 = 8444;

/// The places of one cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// The data folder, canonical.
    pub data: PathBuf,
    /// First 8 hex digits of the hash of `data`.
    pub id: String,
    /// Sockets and pid files; gone after a boot.
    pub run: PathBuf,
}

fn make(path: &Path, mode: u32) -> anyhow::Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path)
        .with_context(|| format!("cannot make {}", path.display()))
}

/// What is in a data folder for root alone.
const FOLDERS: [&str; 4] = ["nodes", "images", "journal", "import"];

/// It was made by [`Layout::make`].
pub fn is_data_folder(path: &Path) -> bool {
    path.join("nodes").is_dir()
}

/// It is somebody else's: taken over, it would be shut to everybody else. Disks may be mounted where our folders will be.
fn is_strange(path: &Path) -> bool {
    let ours = |name: &std::ffi::OsStr| FOLDERS.iter().chain(&["volumes", "lost+found"]).any(|ours| name == *ours);
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    !is_data_folder(path) && entries.into_iter().any(|e| !ours(&e.file_name()))
}

impl Layout {
    /// Of a data folder that exists.
    pub fn find(data: &Path) -> anyhow::Result<Self> {
        let data = data.canonicalize().with_context(|| format!("there is no data folder {}", data.display()))?;
        let id = short_hash(data.as_os_str().as_encoded_bytes());
        let run = Path::new("/run/virtfold").join(&id);
        Ok(Self { data, id, run })
    }

    /// Of a data folder, made if need be; for root alone.
    pub fn make(data: &Path) -> anyhow::Result<Self> {
        use std::os::unix::fs::PermissionsExt;
        make(data, 0o700)?;
        if is_strange(data) {
            bail!(
                "{} is neither empty nor a data folder of virtfold: name a new folder, or an empty one",
                data.display()
            );
        }
        std::fs::set_permissions(data, std::fs::Permissions::from_mode(0o700))
            .with_context(|| format!("cannot protect {}", data.display()))?;
        let layout = Self::find(data)?;
        make(Path::new("/run/virtfold"), 0o755)?;
        // Launchers, who are nobody special, reach their own folder below it.
        make(&layout.run, 0o711)?;
        for folder in FOLDERS {
            make(&layout.data.join(folder), 0o700)?;
        }
        make(&layout.data.join("volumes"), 0o711)?;
        Ok(layout)
    }

    /// Something in the data folder.
    pub fn data(&self, name: &str) -> PathBuf {
        self.data.join(name)
    }

    /// What the names of all network namespaces of the cluster begin with.
    pub fn netns_prefix(&self) -> String {
        format!("vf-{}-", self.id)
    }

    /// The cluster's network namespace.
    pub fn cluster_netns(&self) -> Netns {
        Netns::named(&format!("{}cluster", self.netns_prefix()))
    }

    /// Where etcd keeps what.
    pub fn etcd(&self) -> embedded::etcd::Config {
        embedded::etcd::Config {
            data: self.data("etcd"),
            run: self.run.join("etcd"),
            log: self.data("etcd.log"),
            program: None,
        }
    }

    /// A node of the cluster, counted from 1.
    pub fn node(&self, number: u8) -> Node {
        let name = format!("node-{number}");
        Node {
            number,
            netns: format!("{}{name}", self.netns_prefix()),
            data: self.data("nodes").join(&name),
            run: self.run.join(&name),
            name,
        }
    }
}

/// A node of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Counted from 1.
    pub number: u8,
    /// Its name.
    pub name: String,
    /// Its network namespace.
    pub netns: String,
    /// `DATA/nodes/<node>`.
    pub data: PathBuf,
    /// `RUN/<node>`.
    pub run: PathBuf,
}

impl Node {
    /// Its address in the cluster's network.
    pub const fn address(&self) -> Ipv4Addr {
        Ipv4Addr::new(10, 244, self.number, 1)
    }

    /// Its pid file.
    pub fn pid_file(&self) -> PathBuf {
        self.data.join("agent.pid")
    }

    /// Its agent's configuration.
    pub fn config_file(&self) -> PathBuf {
        self.data.join("agent.json")
    }

    /// Its agent's log.
    pub fn log(&self) -> PathBuf {
        self.data.join("agent.log")
    }
}

fn short_hash(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(bytes).iter().take(4).map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_folder_of_somebody_else_is_not_taken_over() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!is_strange(folder.path()) && !is_strange(&folder.path().join("none")));
        std::fs::create_dir(folder.path().join("lost+found")).unwrap();
        std::fs::create_dir(folder.path().join("volumes")).unwrap();
        assert!(!is_strange(folder.path()), "an empty file system, with another one in it for disks");
        std::fs::write(folder.path().join("letter"), "dear").unwrap();
        assert!(is_strange(folder.path()));
        std::fs::create_dir(folder.path().join("nodes")).unwrap();
        assert!(!is_strange(folder.path()) && is_data_folder(folder.path()));
    }

    #[test]
    fn names_derive_from_the_canonical_folder() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(folder.path(), &link).unwrap();
        let layout = Layout::find(folder.path()).unwrap();
        assert_eq!(Layout::find(&link).unwrap(), layout);
        assert_eq!(layout.id.len(), 8);
        assert_eq!(layout.node(3).address().to_string(), "10.244.3.1");
        assert_eq!(layout.node(3).netns, format!("vf-{}-node-3", layout.id));
    }
}
