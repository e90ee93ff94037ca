//! Where objects live: a revisioned key-value store behind a small trait.
//!
//! What every implementation guarantees, checked by one conformance suite that runs on all of them:
//!
//! * every write that changes something gets the next revision, and revisions are totally ordered over all keys;
//! * [`Storage::write`] is a compare-and-swap on one key: it happens wholly or not at all, and a conflict returns what is there;
//! * [`Storage::range`] is a consistent snapshot at one revision, linearizable when no revision is asked for;
//! * [`Storage::watch`] delivers every change after a revision once, in order, or says that the history is gone;
//! * after [`Storage::compact`] older revisions are refused with [`StorageError::Compacted`], never answered wrongly.
//!
//! [`memory`] keeps everything in a plain data structure ([`memory::Mvcc`] is synchronous and has no clock, so that a
//! simulator can hold it); [`etcd`] speaks etcd v3 with the few messages that are needed.

pub mod etcd;
mod etcd_wire;
pub mod memory;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::BoxStream;

pub use etcd::Etcd;
pub use memory::Memory;

/// A position in the store's history. 0 means "the newest" where a revision is asked for.
pub type Revision = i64;

/// One stored value and the revision of the write that made it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kv {
    /// The key, `/registry/...`.
    pub key: String,
    /// The stored bytes.
    pub value: Bytes,
    /// Revision of the last write of this key.
    pub revision: Revision,
}

/// What must be true of the key for a write to happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// There is no such key.
    Absent,
    /// The key's last write has this revision.
    At(Revision),
}

/// How a compare-and-swap ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Done, at this revision.
    Done(Revision),
    /// The expectation did not hold; what is there instead.
    Conflict(Option<Kv>),
}

/// What to read of a range.
#[derive(Debug, Clone, Default)]
pub struct RangeQuery {
    /// Keys that begin with this.
    pub prefix: String,
    /// Only keys after this one (a continue token).
    pub after: Option<String>,
    /// At most so many; 0 is no limit.
    pub limit: usize,
    /// The snapshot to read; 0 is the newest.
    pub revision: Revision,
}

/// An ordered part of a range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// In key order.
    pub items: Vec<Kv>,
    /// The store's revision that the items belong to (the asked one, or the newest).
    pub revision: Revision,
    /// Whether there are more behind the last item.
    pub more: bool,
    /// How many keys of the range there are from `after` on.
    pub count: usize,
}

/// One change of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The key that changed.
    pub key: String,
    /// The new value, none when it was deleted.
    pub value: Option<Bytes>,
    /// The value before, where there was one and it is still known.
    pub previous: Option<Kv>,
    /// The revision of the change.
    pub revision: Revision,
}

/// What a watch delivers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WatchItem {
    /// Changes in order.
    Changes(Vec<Change>),
    /// Nothing is missing up to this revision.
    Progress(Revision),
}

/// Why the store did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// The revision is older than the history that is kept.
    #[error("required revision has been compacted (oldest is {oldest})")]
    Compacted {
        /// The oldest revision that can still be read, 0 when unknown.
        oldest: Revision,
    },
    /// The revision has not happened yet.
    #[error("required revision {asked} is in the future")]
    Future {
        /// What was asked for.
        asked: Revision,
    },
    /// The store refused for want of space.
    #[error("the store is out of space")]
    NoSpace,
    /// Not reached or no answer; whether a write happened is not known.
    #[error("the store cannot be reached: {0}")]
    Unavailable(String),
    /// The store answered something that cannot be.
    #[error("the store answered nonsense: {0}")]
    Broken(String),
}

/// A result of the store.
pub type StorageResult<T> = Result<T, StorageError>;

/// A revisioned key-value store. See the module for what it guarantees.
pub trait Storage: Send + Sync + 'static {
    /// Reads one key at `revision` (0: the newest, linearizable); also the store's revision at that moment.
    fn get<'a>(&'a self, key: &'a str, revision: Revision) -> BoxFuture<'a, StorageResult<(Option<Kv>, Revision)>>;
    /// Writes (`Some`) or deletes (`None`) one key if the expectation holds.
    fn write<'a>(&'a self, key: &'a str, expect: Expect, value: Option<Bytes>)
    -> BoxFuture<'a, StorageResult<Outcome>>;
    /// Reads a range.
    fn range(&self, query: RangeQuery) -> BoxFuture<'_, StorageResult<Page>>;
    /// Every change of the prefix after revision `after`. The stream ends after an error.
    fn watch(&self, prefix: &str, after: Revision) -> BoxStream<'static, StorageResult<WatchItem>>;
    /// Forgets the history before `revision`.
    fn compact(&self, revision: Revision) -> BoxFuture<'_, StorageResult<()>>;
    /// The store's newest revision (linearizable).
    fn revision(&self) -> BoxFuture<'_, StorageResult<Revision>>;
    /// Whatever the store wants done from time to time (defragmentation, alarms). Cheap when nothing is due.
    fn maintain(&self) -> BoxFuture<'_, StorageResult<()>>;
}

/// The first key after all that begin with `prefix`.
#[must_use]
pub fn prefix_end(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    while let Some(last) = end.last_mut() {
        if *last < 0xff {
            *last += 1;
            return end;
        }
        end.pop();
    }
    vec![0]
}
