//! Addresses of a node's pods: a range, a table on disk, and no address given twice.
//!
//! The table is written before an address is used and read again after a restart. The next free address after the last one
//! is taken, so that a freed address rests as long as possible: neighbours still remember whose it was.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::record::write_whole;

/// Why there is no address.
#[derive(Debug, thiserror::Error)]
pub enum IpamError {
    /// All are taken.
    #[error("the node's range {base}/{prefix} has no free address")]
    Exhausted {
        /// First address of the range.
        base: Ipv4Addr,
        /// Its prefix length.
        prefix: u8,
    },
    /// The table cannot be used.
    #[error("the table of pod addresses {path}", path = .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Table {
    last: Option<Ipv4Addr>,
    leases: BTreeMap<String, Ipv4Addr>,
}

/// The addresses of one node.
#[derive(Debug)]
pub(super) struct Ipam {
    path: PathBuf,
    base: Ipv4Addr,
    prefix: u8,
    table: Mutex<Table>,
}

impl Ipam {
    /// Opens the table of a range such as 10.244.1.0/24. The network's address, the first one (the node's) and the last one are
    /// never given away.
    ///
    /// # Errors
    /// When the table is there and cannot be read: guessing would give an address twice.
    pub fn open(path: &Path, base: Ipv4Addr, prefix: u8) -> Result<Self, IpamError> {
        let io = |source| IpamError::Io { path: path.to_owned(), source };
        let table = match std::fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|e| io(e.into()))?,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Table::default(),
            Err(e) => return Err(io(e)),
        };
        Ok(Self { path: path.to_owned(), base, prefix, table: Mutex::new(table) })
    }

    /// The pod's address, the one that it has already if there is one.
    ///
    /// # Errors
    /// When none is free, or the table cannot be written.
    pub fn take(&self, pod: &str) -> Result<Ipv4Addr, IpamError> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(address) = table.leases.get(pod) {
            return Ok(*address);
        }
        let exhausted = IpamError::Exhausted { base: self.base, prefix: self.prefix };
        let base = u32::from(self.base);
        let size = 1u32.checked_shl(32u32.saturating_sub(self.prefix.into())).unwrap_or(u32::MAX);
        let taken: std::collections::BTreeSet<u32> = table.leases.values().map(|a| u32::from(*a) - base).collect();
        let after = table.last.map_or(1, |a| u32::from(a).wrapping_sub(base)).clamp(1, size);
        let mut candidates = (after + 1..size - 1).chain(2..(after + 1).min(size - 1));
        let address = candidates.find(|n| !taken.contains(n)).map(|n| Ipv4Addr::from(base + n)).ok_or(exhausted)?;
        table.leases.insert(pod.to_owned(), address);
        table.last = Some(address);
        if let Err(e) = self.save(&table) {
            table.leases.remove(pod);
            return Err(e);
        }
        Ok(address)
    }

    /// Gives the pod's address back. The network namespace that used it must be gone.
    ///
    /// # Errors
    /// When the table cannot be written; the address stays taken then.
    pub fn free(&self, pod: &str) -> Result<(), IpamError> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(address) = table.leases.remove(pod) else { return Ok(()) };
        self.save(&table).inspect_err(|_| {
            table.leases.insert(pod.to_owned(), address);
        })
    }

    /// Who has addresses.
    pub fn holders(&self) -> Vec<String> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).leases.keys().cloned().collect()
    }

    fn save(&self, table: &Table) -> Result<(), IpamError> {
        serde_json::to_vec(table)
            .map_err(Into::into)
            .and_then(|bytes| write_whole(&self.path, &bytes))
            .map_err(|source| IpamError::Io { path: self.path.clone(), source })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn addresses_are_given_once_survive_a_restart_and_rest_after_use() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ipam.json");
        let open = || Ipam::open(&path, Ipv4Addr::new(10, 244, 3, 0), 29).unwrap();
        let ipam = open();
        assert_eq!(ipam.take("a").unwrap().to_string(), "10.244.3.2");
        assert_eq!(ipam.take("b").unwrap().to_string(), "10.244.3.3");
        assert_eq!(ipam.take("a").unwrap().to_string(), "10.244.3.2");
        ipam.free("a").unwrap();
        let ipam = open();
        assert_eq!(ipam.holders(), ["b"]);
        for (pod, last) in [("c", 4), ("d", 5), ("e", 6), ("f", 2)] {
            assert_eq!(ipam.take(pod).unwrap(), Ipv4Addr::new(10, 244, 3, last));
        }
        assert!(matches!(ipam.take("g"), Err(IpamError::Exhausted { .. })));
        ipam.free("b").unwrap();
        assert_eq!(ipam.take("g").unwrap(), Ipv4Addr::new(10, 244, 3, 3));
        std::fs::write(&path, b"{").unwrap();
        assert!(matches!(Ipam::open(&path, Ipv4Addr::new(10, 244, 3, 0), 29), Err(IpamError::Io { .. })));
    }
}
