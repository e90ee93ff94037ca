//! Writes the journal of the controller's cells: a recording for replay and explanation, never an input.
//!
//! Records go to a thread that appends them to `controller.journal`; at half the budget the file becomes
//! `controller.journal.1` and the older half is dropped. Nobody waits for the disk: where the queue or the disk is full,
//! records are dropped and counted, and the log says so.

use serde::Serialize;
use state::{
    Event, Key, NodeName,
    journal::{CellKind, Record, encode},
};
use std::{
    collections::HashMap,
    fs::{File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
};

/// Bytes kept, both files together.
const BUDGET: u64 = 64 << 20;
/// Records that may wait for the disk.
const QUEUE: usize = 4096;

/// The writer's end.
pub struct Journal {
    queue: Option<mpsc::SyncSender<Vec<u8>>>,
    dropped: Arc<AtomicU64>,
    seqs: HashMap<(CellKind, String), u64>,
}

impl Journal {
    /// Appends to the journal in `dir`; `None` records nothing. The folder is made.
    pub fn open(dir: Option<&Path>) -> Self {
        let dropped = Arc::new(AtomicU64::new(0));
        let queue = dir.map(|dir| {
            let (tx, rx) = mpsc::sync_channel::<Vec<u8>>(QUEUE);
            let mut file = Segment::new(dir);
            let lost = dropped.clone();
            std::thread::spawn(move || {
                for record in rx {
                    if let Err(error) = file.append(&record) {
                        let n = lost.fetch_add(1, Ordering::Relaxed);
                        // At 1, 2, 4, 8, ...: a full disk must not fill the log, too.
                        if (n + 1).is_power_of_two() {
                            tracing::warn!(%error, path = %file.path.display(), dropped = n + 1, "journal not written");
                        }
                    }
                }
            });
            tx
        });
        Self { queue, dropped, seqs: HashMap::new() }
    }

    /// Records a step of a Vm cell.
    pub fn vm<I: Serialize + Clone, C: Serialize + Clone>(&mut self, key: &Key, event: &Event<I>, commands: &[C]) {
        self.record(CellKind::Vm, key.to_string(), event, commands);
    }

    /// Records a step of a Node cell.
    pub fn node<I: Serialize + Clone, C: Serialize + Clone>(
        &mut self,
        name: &NodeName,
        event: &Event<I>,
        commands: &[C],
    ) {
        self.record(CellKind::Node, name.to_string(), event, commands);
    }

    fn record<I: Serialize + Clone, C: Serialize + Clone>(
        &mut self,
        kind: CellKind,
        cell: String,
        event: &Event<I>,
        commands: &[C],
    ) {
        let Some(queue) = &self.queue else { return };
        let seq = self.seqs.entry((kind, cell.clone())).or_insert(0);
        *seq += 1;
        let record = Record { kind, cell, seq: *seq, event: event.clone(), commands: commands.to_vec(), trace: None };
        let sent =
            encode(&record).map_err(|e| e.to_string()).and_then(|b| queue.try_send(b).map_err(|e| e.to_string()));
        if let Err(error) = sent {
            let n = self.dropped.fetch_add(1, Ordering::Relaxed);
            if (n + 1).is_power_of_two() {
                tracing::warn!(error, dropped = n + 1, "journal record dropped");
            }
        }
    }
}

struct Segment {
    path: PathBuf,
    file: Option<(File, u64)>,
}

impl Segment {
    fn new(dir: &Path) -> Self {
        Self { path: dir.join("controller.journal"), file: None }
    }

    fn append(&mut self, record: &[u8]) -> io::Result<()> {
        if self.file.is_none() {
            if let Some(dir) = self.path.parent() {
                std::fs::create_dir_all(dir)?;
            }
            let file = OpenOptions::new().create(true).append(true).open(&self.path)?;
            let len = file.metadata()?.len();
            self.file = Some((file, len));
        }
        let Some((file, len)) = &mut self.file else { return Ok(()) };
        // One write: a record that does not fit on the disk is torn at the tail, and the reader skips it.
        if let Err(e) = file.write_all(record) {
            self.file = None;
            return Err(e);
        }
        *len += record.len() as u64;
        if *len >= BUDGET / 2 {
            self.file = None;
            std::fs::rename(&self.path, self.path.with_extension("journal.1"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use state::{
        Timestamp,
        vm::{Command, Input},
    };

    #[test]
    fn what_is_recorded_can_be_read_and_a_full_disk_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        let key = Key::new("ns", "web");
        let mut j = Journal::open(Some(dir.path()));
        for i in 0..3 {
            j.vm(&key, &Event::new(Timestamp(i), Input::Elapsed), &[Command::Wake { at: Timestamp(i) }]);
        }
        let path = dir.path().join("controller.journal");
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
        let records = loop {
            let bytes = std::fs::read(&path).unwrap_or_default();
            let c = state::journal::decode::<Record<Input, Command>>(&bytes);
            if c.records.len() == 3 {
                break c.records;
            }
            assert!(std::time::Instant::now() < deadline, "{} records", c.records.len());
            std::thread::yield_now();
        };
        assert_eq!(records.iter().map(|r| r.seq).collect::<Vec<_>>(), [1, 2, 3]);

        let mut full = Segment { path: "/dev/full".into(), file: None };
        assert!(full.append(b"x").is_err());
        assert!(full.append(b"x").is_err(), "and it tries again");
    }
}
