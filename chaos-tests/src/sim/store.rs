//! The embedded API server's store in memory, which outlives the server, and tells the truth what is written.

use super::truth;
use bytes::Bytes;
use embedded::storage::{Expect, Kv, Memory, Outcome, Page, RangeQuery, Revision, Storage, StorageResult, WatchItem};
use futures::{FutureExt, future::BoxFuture, stream::BoxStream};

/// The store of a run.
#[derive(Clone, Default)]
pub struct Witnessed(Memory);

impl Witnessed {
    /// Forgets all but the newest versions.
    pub fn forget(&self, keep: Revision) {
        let forgotten = async {
            let newest = self.0.revision().await?;
            self.0.compact(newest - keep).await
        };
        // Memory answers at once; a history that is shorter already is none to shorten.
        let _ = forgotten.now_or_never();
    }
}

impl Storage for Witnessed {
    fn get<'a>(&'a self, key: &'a str, revision: Revision) -> BoxFuture<'a, StorageResult<(Option<Kv>, Revision)>> {
        self.0.get(key, revision)
    }

    fn write<'a>(
        &'a self,
        key: &'a str,
        expect: Expect,
        value: Option<Bytes>,
    ) -> BoxFuture<'a, StorageResult<Outcome>> {
        Box::pin(async move {
            // Nothing comes between: memory answers at once, and there is one thread.
            let before = self.0.get(key, 0).await?.0;
            let outcome = self.0.write(key, expect, value.clone()).await?;
            if let Outcome::Done(revision) = outcome {
                let before = before.as_ref().map(|kv| (kv.revision, kv.value.as_ref()));
                truth::committed(key, before, value.as_deref(), revision);
            }
            Ok(outcome)
        })
    }

    fn range(&self, query: RangeQuery) -> BoxFuture<'_, StorageResult<Page>> {
        self.0.range(query)
    }

    fn watch(&self, prefix: &str, after: Revision) -> BoxStream<'static, StorageResult<WatchItem>> {
        self.0.watch(prefix, after)
    }

    fn compact(&self, revision: Revision) -> BoxFuture<'_, StorageResult<()>> {
        self.0.compact(revision)
    }

    fn revision(&self) -> BoxFuture<'_, StorageResult<Revision>> {
        self.0.revision()
    }

    fn maintain(&self) -> BoxFuture<'_, StorageResult<()>> {
        self.0.maintain()
    }
}
