//! The agent's memory on disk: the leader it accepted, outcomes that nobody acknowledged, what it wrote into pods.
//!
//! A file is written whole or not at all, and is on the disk when the call returns. A file that cannot be read is as good as
//! none: a leader is then judged by the Lease, and an outcome has two more copies.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use state::agent::Memory;
use state::domain::Outcome;

/// What is kept of one pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Record {
    pub outcome: Option<Outcome>,
    /// Namespace and name of the VMI, for the outcome's report.
    pub namespace: String,
    pub name: String,
    pub unpaused: Option<bool>,
}

/// How files are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disk {
    /// By threads of their own, so that nobody but the writer waits for a slow disk.
    Threads,
    /// In place: a simulation has one thread.
    InPlace,
}

#[derive(Clone, Debug)]
pub(crate) struct Store {
    folder: PathBuf,
    disk: Disk,
}

impl Store {
    /// Opens the folder, made at the first time.
    pub fn open(folder: &Path, disk: Disk) -> io::Result<Self> {
        fs::create_dir_all(folder.join("pods"))?;
        Ok(Self { folder: folder.to_owned(), disk })
    }

    /// Writes, and waits until it is on the disk.
    pub async fn put(&self, write: impl FnOnce(&Self) -> io::Result<()> + Send + 'static) -> io::Result<()> {
        match self.disk {
            Disk::Threads => {
                let store = self.clone();
                tokio::task::spawn_blocking(move || write(&store)).await.map_err(io::Error::other)?
            }
            Disk::InPlace => write(self),
        }
    }

    pub fn memory(&self) -> Option<Memory> {
        self.read("leader.json")
    }

    pub fn set_memory(&self, memory: &Memory) -> io::Result<()> {
        self.write("leader.json", memory)
    }

    pub fn records(&self) -> Vec<(String, Record)> {
        let entries = fs::read_dir(self.folder.join("pods")).into_iter().flatten().flatten();
        let names = entries.filter_map(|e| e.file_name().into_string().ok());
        let pods = names.filter_map(|n| n.strip_suffix(".json").map(str::to_owned));
        pods.filter_map(|p| Some((p.clone(), self.read(&format!("pods/{p}.json"))?))).collect()
    }

    pub fn set_record(&self, pod: &str, record: &Record) -> io::Result<()> {
        if *record == Record::default() {
            return self.forget(pod);
        }
        self.write(&format!("pods/{}.json", file_name(pod)?), record)
    }

    pub fn forget(&self, pod: &str) -> io::Result<()> {
        match fs::remove_file(self.folder.join(format!("pods/{}.json", file_name(pod)?))) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    pub fn read<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        let path = self.folder.join(name);
        let bytes = match fs::read(&path) {
            Ok(b) => b,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::error!(%error, path = %path.display(), "reading the agent's memory");
                return None;
            }
        };
        serde_json::from_slice(&bytes)
            .map_err(|error| tracing::error!(%error, path = %path.display(), "the agent's memory is damaged"))
            .ok()
    }

    pub fn write<T: Serialize>(&self, name: &str, value: &T) -> io::Result<()> {
        let path = self.folder.join(name);
        let new = path.with_extension("new");
        let mut file = File::create(&new)?;
        file.write_all(&serde_json::to_vec(value)?)?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
        match path.parent() {
            Some(folder) => File::open(folder)?.sync_all(),
            None => Ok(()),
        }
    }
}

/// A pod's UID as part of a file's name; it comes from the API, and from there come no slashes.
fn file_name(pod: &str) -> io::Result<&str> {
    let good = !pod.is_empty() && pod.len() <= 128 && pod.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    if good { Ok(pod) } else { Err(io::Error::from(io::ErrorKind::InvalidInput)) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use state::Epoch;

    #[test]
    fn what_was_written_is_read_and_damage_is_as_good_as_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("state"), Disk::Threads).unwrap();
        assert_eq!(store.memory(), None);
        let memory = Memory { epoch: Epoch(7), leader: "a".into() };
        store.set_memory(&memory).unwrap();
        assert_eq!(Store::open(&dir.path().join("state"), Disk::Threads).unwrap().memory(), Some(memory));
        fs::write(dir.path().join("state/leader.json"), b"{").unwrap();
        assert_eq!(store.memory(), None);
        let record = Record { unpaused: Some(true), ..Record::default() };
        store.set_record("p-1", &record).unwrap();
        assert_eq!(store.records(), [("p-1".to_owned(), record)]);
        assert!(store.set_record("../p", &Record { unpaused: Some(true), ..Record::default() }).is_err());
        store.forget("p-1").unwrap();
        store.forget("p-1").unwrap();
        assert!(store.records().is_empty());
    }
}
