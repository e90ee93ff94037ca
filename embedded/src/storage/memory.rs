//! The store as a plain data structure: every key with its history, and a log of which key changed when.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt};
use futures::stream::{BoxStream, StreamExt};
use tokio::sync::watch;

use super::{Change, Expect, Kv, Outcome, Page, RangeQuery, Revision, Storage, StorageError, StorageResult, WatchItem};

/// The multi-version store itself: synchronous, without clock or channel.
#[derive(Debug, Clone)]
pub struct Mvcc {
    revision: Revision,
    compacted: Revision,
    keys: BTreeMap<String, Vec<(Revision, Option<Bytes>)>>,
    log: VecDeque<(Revision, String)>,
}

impl Default for Mvcc {
    fn default() -> Self {
        // As in etcd, the empty store is at revision 1, so that no revision of an object is 0 or 1.
        Self { revision: 1, compacted: 0, keys: BTreeMap::new(), log: VecDeque::new() }
    }
}

impl Mvcc {
    /// The newest revision.
    #[must_use]
    pub fn revision(&self) -> Revision {
        self.revision
    }

    fn check(&self, revision: Revision) -> StorageResult<Revision> {
        match revision {
            0 => Ok(self.revision),
            r if r > self.revision => Err(StorageError::Future { asked: r }),
            r if r < self.compacted => Err(StorageError::Compacted { oldest: self.compacted }),
            r => Ok(r),
        }
    }

    fn at(key: &str, history: &[(Revision, Option<Bytes>)], revision: Revision) -> Option<Kv> {
        let (rev, value) = history.iter().rev().find(|(r, _)| *r <= revision)?;
        value.as_ref().map(|v| Kv { key: key.to_owned(), value: v.clone(), revision: *rev })
    }

    /// Reads one key.
    ///
    /// # Errors
    /// [`StorageError::Compacted`] and [`StorageError::Future`].
    pub fn get(&self, key: &str, revision: Revision) -> StorageResult<(Option<Kv>, Revision)> {
        let at = self.check(revision)?;
        Ok((self.keys.get(key).and_then(|h| Self::at(key, h, at)), self.revision))
    }

    /// Compare-and-swap of one key.
    pub fn write(&mut self, key: &str, expect: Expect, value: Option<Bytes>) -> Outcome {
        let now = self.keys.get(key).and_then(|h| Self::at(key, h, self.revision));
        let holds = match expect {
            Expect::Absent => now.is_none(),
            Expect::At(r) => now.as_ref().is_some_and(|kv| kv.revision == r),
        };
        if !holds || (value.is_none() && now.is_none()) {
            return Outcome::Conflict(now);
        }
        self.revision += 1;
        self.keys.entry(key.to_owned()).or_default().push((self.revision, value));
        self.log.push_back((self.revision, key.to_owned()));
        Outcome::Done(self.revision)
    }

    /// Reads a range.
    ///
    /// # Errors
    /// [`StorageError::Compacted`] and [`StorageError::Future`].
    pub fn range(&self, query: &RangeQuery) -> StorageResult<Page> {
        let at = self.check(query.revision)?;
        let from = match &query.after {
            Some(after) if after.as_str() >= query.prefix.as_str() => Bound::Excluded(after.clone()),
            _ => Bound::Included(query.prefix.clone()),
        };
        let mut page = Page { items: Vec::new(), revision: at, more: false, count: 0 };
        for (key, history) in self.keys.range((from, Bound::Unbounded)) {
            if !key.starts_with(&query.prefix) {
                break;
            }
            let Some(kv) = Self::at(key, history, at) else { continue };
            page.count += 1;
            if query.limit == 0 || page.items.len() < query.limit {
                page.items.push(kv);
            } else {
                page.more = true;
            }
        }
        Ok(page)
    }

    /// The changes of a prefix after a revision, at most `limit`; the revision up to which nothing is missing.
    ///
    /// # Errors
    /// [`StorageError::Compacted`].
    pub fn changes(&self, prefix: &str, after: Revision, limit: usize) -> StorageResult<(Vec<Change>, Revision)> {
        // What was deleted by the compacted revision itself has left no trace, so that one has to have been seen.
        if after < self.compacted {
            return Err(StorageError::Compacted { oldest: self.compacted });
        }
        let start = self.log.partition_point(|(r, _)| *r <= after);
        let mut out = Vec::new();
        let mut upto = self.revision.max(after);
        for (revision, key) in self.log.range(start..) {
            if !key.starts_with(prefix) {
                continue;
            }
            if out.len() >= limit {
                upto = revision - 1;
                break;
            }
            let Some(history) = self.keys.get(key) else { continue };
            let previous = Self::at(key, history, revision - 1);
            let value = history.iter().find(|(r, _)| r == revision).and_then(|(_, v)| v.clone());
            out.push(Change { key: key.clone(), value, previous, revision: *revision });
        }
        Ok((out, upto))
    }

    /// Forgets the history before `revision`.
    ///
    /// # Errors
    /// [`StorageError::Compacted`] when that was done already, [`StorageError::Future`].
    pub fn compact(&mut self, revision: Revision) -> StorageResult<()> {
        if revision <= self.compacted {
            return Err(StorageError::Compacted { oldest: self.compacted });
        }
        self.check(revision)?;
        self.compacted = revision;
        self.keys.retain(|_, history| {
            let keep = history.partition_point(|(r, _)| *r <= revision).saturating_sub(1);
            history.drain(..keep);
            !(history.len() == 1 && history.first().is_some_and(|(r, v)| v.is_none() && *r <= revision))
        });
        let gone = self.log.partition_point(|(r, _)| *r < revision);
        self.log.drain(..gone);
        Ok(())
    }
}

/// The store in memory, for tests and for clusters that need not survive their process.
#[derive(Debug, Clone)]
pub struct Memory {
    inner: Arc<Mutex<Mvcc>>,
    newest: Arc<watch::Sender<Revision>>,
}

impl Default for Memory {
    fn default() -> Self {
        let inner = Mvcc::default();
        let newest = watch::Sender::new(inner.revision());
        Self { inner: Arc::new(Mutex::new(inner)), newest: Arc::new(newest) }
    }
}

impl Memory {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, Mvcc> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Changes that one poll of a watch takes at most.
const WATCH_BATCH: usize = 256;

impl Storage for Memory {
    fn get<'a>(&'a self, key: &'a str, revision: Revision) -> BoxFuture<'a, StorageResult<(Option<Kv>, Revision)>> {
        std::future::ready(self.lock().get(key, revision)).boxed()
    }

    fn write<'a>(
        &'a self,
        key: &'a str,
        expect: Expect,
        value: Option<Bytes>,
    ) -> BoxFuture<'a, StorageResult<Outcome>> {
        let outcome = self.lock().write(key, expect, value);
        if let Outcome::Done(revision) = outcome {
            self.newest.send_if_modified(|r| {
                let higher = revision > *r;
                *r = revision.max(*r);
                higher
            });
        }
        std::future::ready(Ok(outcome)).boxed()
    }

    fn range(&self, query: RangeQuery) -> BoxFuture<'_, StorageResult<Page>> {
        std::future::ready(self.lock().range(&query)).boxed()
    }

    fn watch(&self, prefix: &str, after: Revision) -> BoxStream<'static, StorageResult<WatchItem>> {
        struct Seat {
            store: Memory,
            newest: watch::Receiver<Revision>,
            prefix: String,
            after: Revision,
            done: bool,
        }
        let seat = Seat {
            newest: self.newest.subscribe(),
            store: self.clone(),
            prefix: prefix.to_owned(),
            after: if after == 0 { self.lock().revision() } else { after },
            done: false,
        };
        futures::stream::unfold(seat, |mut seat| async move {
            if seat.done {
                return None;
            }
            loop {
                seat.newest.mark_unchanged();
                let read = seat.store.lock().changes(&seat.prefix, seat.after, WATCH_BATCH);
                match read {
                    Err(e) => {
                        seat.done = true;
                        return Some((Err(e), seat));
                    }
                    Ok((changes, upto)) if !changes.is_empty() => {
                        seat.after = upto;
                        return Some((Ok(WatchItem::Changes(changes)), seat));
                    }
                    Ok((_, upto)) if upto > seat.after => {
                        seat.after = upto;
                        return Some((Ok(WatchItem::Progress(upto)), seat));
                    }
                    Ok(_) => {}
                }
                if seat.newest.changed().await.is_err() {
                    return None;
                }
            }
        })
        .boxed()
    }

    fn compact(&self, revision: Revision) -> BoxFuture<'_, StorageResult<()>> {
        std::future::ready(self.lock().compact(revision)).boxed()
    }

    fn revision(&self) -> BoxFuture<'_, StorageResult<Revision>> {
        std::future::ready(Ok(self.lock().revision())).boxed()
    }

    fn maintain(&self) -> BoxFuture<'_, StorageResult<()>> {
        std::future::ready(Ok(())).boxed()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_deletion_is_told_or_said_to_be_forgotten() {
        let mut m = Mvcc::default();
        let Outcome::Done(made) = m.write("/r/a", Expect::Absent, Some("1".into())) else { panic!() };
        let Outcome::Done(gone) = m.write("/r/a", Expect::At(made), None) else { panic!() };
        m.compact(gone).unwrap();
        assert!(matches!(m.changes("/r/", gone - 1, 9), Err(StorageError::Compacted { .. })));
        assert_eq!(m.changes("/r/", gone, 9).unwrap(), (vec![], gone));
    }
}
