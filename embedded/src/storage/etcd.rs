//! The store as an etcd v3 server. A key's revision is etcd's `mod_revision`.

use std::time::Duration;

use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt};
use futures::stream::{BoxStream, StreamExt};
use http::uri::PathAndQuery;
use prost::Message;
use tokio_stream::wrappers::ReceiverStream;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

use super::etcd_wire as wire;
use super::{
    Change, Expect, Kv, Outcome, Page, RangeQuery, Revision, Storage, StorageError, StorageResult, WatchItem,
    prefix_end,
};

/// An answer that takes longer than this is no answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Free space inside the database file that is worth a defragmentation.
const DEFRAGMENT_FROM_BYTES: i64 = 64 << 20;

/// A connection to etcd.
#[derive(Debug, Clone)]
pub struct Etcd {
    channel: Channel,
}

impl Etcd {
    /// Connects lazily to one endpoint (`http://127.0.0.1:2379`).
    ///
    /// # Errors
    /// [`StorageError::Broken`] when the address is none.
    pub fn new(endpoint: &str) -> StorageResult<Self> {
        let endpoint = Endpoint::from_shared(endpoint.to_owned())
            .map_err(|e| StorageError::Broken(format!("etcd address {endpoint:?}: {e}")))?
            .connect_timeout(Duration::from_secs(3))
            .tcp_nodelay(true)
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(Duration::from_secs(10))
            .initial_stream_window_size(8 << 20)
            .initial_connection_window_size(16 << 20);
        Ok(Self { channel: endpoint.connect_lazy() })
    }

    async fn call<Q, A>(&self, path: &'static str, request: Q, timeout: Duration) -> StorageResult<A>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(usize::MAX);
        let work = async {
            grpc.ready().await.map_err(|e| StorageError::Unavailable(e.to_string()))?;
            grpc.unary(tonic::Request::new(request), PathAndQuery::from_static(path), ProstCodec::<Q, A>::default())
                .await
                .map_err(|s| classify(&s))
        };
        match tokio::time::timeout(timeout, work).await {
            Ok(answer) => answer.map(tonic::Response::into_inner),
            Err(_) => Err(StorageError::Unavailable(format!("no answer to {path} within {timeout:?}"))),
        }
    }

    async fn read(&self, request: wire::RangeRequest) -> StorageResult<wire::RangeResponse> {
        self.call("/etcdserverpb.KV/Range", request, ANSWER_TIMEOUT).await
    }
}

fn classify(status: &tonic::Status) -> StorageError {
    let text = status.message();
    if text.contains("has been compacted") {
        StorageError::Compacted { oldest: 0 }
    } else if text.contains("is a future revision") {
        StorageError::Future { asked: 0 }
    } else if text.contains("database space exceeded") {
        StorageError::NoSpace
    } else {
        StorageError::Unavailable(format!("{}: {text}", status.code()))
    }
}

fn kv(raw: wire::KeyValue) -> StorageResult<Kv> {
    let key = String::from_utf8(raw.key).map_err(|_| StorageError::Broken("a key is not UTF-8".into()))?;
    Ok(Kv { key, value: raw.value, revision: raw.mod_revision })
}

fn header(header: Option<wire::Header>) -> StorageResult<Revision> {
    header.map(|h| h.revision).ok_or_else(|| StorageError::Broken("an answer without header".into()))
}

impl Storage for Etcd {
    fn get<'a>(&'a self, key: &'a str, revision: Revision) -> BoxFuture<'a, StorageResult<(Option<Kv>, Revision)>> {
        async move {
            let mut answer = self.read(wire::RangeRequest { key: key.into(), revision, ..Default::default() }).await?;
            Ok((answer.kvs.pop().map(kv).transpose()?, header(answer.header)?))
        }
        .boxed()
    }

    fn write<'a>(
        &'a self,
        key: &'a str,
        expect: Expect,
        value: Option<Bytes>,
    ) -> BoxFuture<'a, StorageResult<Outcome>> {
        async move {
            let op = match value {
                Some(value) => wire::Op::Put(wire::PutRequest { key: key.into(), value }),
                None => wire::Op::Delete(wire::DeleteRequest { key: key.into() }),
            };
            let revision = match expect {
                Expect::Absent => 0,
                Expect::At(r) => r,
            };
            let read = wire::RangeRequest { key: key.into(), ..Default::default() };
            let txn = wire::TxnRequest {
                compare: vec![wire::Compare {
                    result: 0,
                    target: 2,
                    key: key.into(),
                    of: Some(wire::Target::ModRevision(revision)),
                }],
                success: vec![wire::RequestOp { op: Some(op) }],
                failure: vec![wire::RequestOp { op: Some(wire::Op::Range(read)) }],
            };
            let answer: wire::TxnResponse = self.call("/etcdserverpb.KV/Txn", txn, ANSWER_TIMEOUT).await?;
            if answer.succeeded {
                return Ok(Outcome::Done(header(answer.header)?));
            }
            let there = answer.responses.into_iter().next().and_then(|r| r.range).and_then(|mut r| r.kvs.pop());
            Ok(Outcome::Conflict(there.map(kv).transpose()?))
        }
        .boxed()
    }

    fn range(&self, query: RangeQuery) -> BoxFuture<'_, StorageResult<Page>> {
        async move {
            let key = match query.after {
                Some(after) if after >= query.prefix => {
                    let mut key = after.into_bytes();
                    key.push(0);
                    key
                }
                _ => query.prefix.clone().into_bytes(),
            };
            let answer = self
                .read(wire::RangeRequest {
                    key,
                    range_end: prefix_end(&query.prefix),
                    limit: i64::try_from(query.limit).unwrap_or(0),
                    revision: query.revision,
                    count_only: false,
                })
                .await?;
            let newest = header(answer.header)?;
            let items = answer.kvs.into_iter().map(kv).collect::<StorageResult<Vec<_>>>()?;
            let revision = if query.revision == 0 { newest } else { query.revision };
            Ok(Page { items, revision, more: answer.more, count: usize::try_from(answer.count).unwrap_or(0) })
        }
        .boxed()
    }

    fn watch(&self, prefix: &str, after: Revision) -> BoxStream<'static, StorageResult<WatchItem>> {
        let this = self.clone();
        let prefix = prefix.to_owned();
        let (sender, receiver) = tokio::sync::mpsc::channel(64);
        tokio::spawn(async move {
            if let Err(e) = this.watch_into(&prefix, after, &sender).await {
                let _ = sender.send(Err(e)).await;
            }
        });
        ReceiverStream::new(receiver).boxed()
    }

    fn compact(&self, revision: Revision) -> BoxFuture<'_, StorageResult<()>> {
        async move {
            let request = wire::CompactRequest { revision };
            let _: wire::HeaderResponse = self.call("/etcdserverpb.KV/Compact", request, ANSWER_TIMEOUT).await?;
            Ok(())
        }
        .boxed()
    }

    fn revision(&self) -> BoxFuture<'_, StorageResult<Revision>> {
        async move {
            let request = wire::RangeRequest { key: b"/registry".to_vec(), count_only: true, ..Default::default() };
            header(self.read(request).await?.header)
        }
        .boxed()
    }

    fn maintain(&self) -> BoxFuture<'_, StorageResult<()>> {
        async move {
            let status: wire::StatusResponse =
                self.call("/etcdserverpb.Maintenance/Status", wire::Nothing {}, ANSWER_TIMEOUT).await?;
            if status.db_size - status.db_size_in_use > DEFRAGMENT_FROM_BYTES
                && status.db_size > 2 * status.db_size_in_use
            {
                tracing::info!(bytes = status.db_size, used = status.db_size_in_use, "defragmenting etcd");
                let _: wire::HeaderResponse = self
                    .call("/etcdserverpb.Maintenance/Defragment", wire::Nothing {}, Duration::from_secs(60))
                    .await?;
            }
            let ask = wire::AlarmRequest::default();
            let alarms: wire::AlarmResponse = self.call("/etcdserverpb.Maintenance/Alarm", ask, ANSWER_TIMEOUT).await?;
            for alarm in alarms.alarms.into_iter().filter(|a| a.alarm == 1) {
                tracing::warn!("etcd is out of space; clearing the alarm after compaction");
                let clear = wire::AlarmRequest { action: 2, member: alarm.member, alarm: 1 };
                let _: wire::AlarmResponse =
                    self.call("/etcdserverpb.Maintenance/Alarm", clear, ANSWER_TIMEOUT).await?;
            }
            Ok(())
        }
        .boxed()
    }
}

impl Etcd {
    /// Runs one watch until the receiver goes, the stream breaks, or the history is gone.
    ///
    /// Progress is never asked for: etcd before 3.4.25 answers such a request ahead of events that it still has to
    /// send, and whoever believes it loses them. What is delivered is the only progress.
    async fn watch_into(
        &self,
        prefix: &str,
        after: Revision,
        out: &tokio::sync::mpsc::Sender<StorageResult<WatchItem>>,
    ) -> StorageResult<()> {
        let gone = |e: &dyn std::fmt::Display| StorageError::Unavailable(e.to_string());
        let (ask, asks) = tokio::sync::mpsc::channel::<wire::WatchRequest>(4);
        let create = wire::WatchCreate {
            key: prefix.into(),
            range_end: prefix_end(prefix),
            start_revision: if after == 0 { 0 } else { after + 1 },
            prev_kv: true,
        };
        let _ = ask.send(wire::WatchRequest { op: Some(wire::WatchOp::Create(create)) }).await;
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(usize::MAX);
        grpc.ready().await.map_err(|e| gone(&e))?;
        let mut stream = grpc
            .streaming(
                tonic::Request::new(ReceiverStream::new(asks)),
                PathAndQuery::from_static("/etcdserverpb.Watch/Watch"),
                ProstCodec::<wire::WatchRequest, wire::WatchResponse>::default(),
            )
            .await
            .map_err(|s| classify(&s))?
            .into_inner();
        loop {
            let answer = tokio::select! {
                () = out.closed() => return Ok(()),
                answer = stream.message() => answer.map_err(|s| classify(&s))?,
            };
            let Some(answer) = answer else { return Err(StorageError::Unavailable("etcd closed the watch".into())) };
            if answer.compact_revision > 0 {
                return Err(StorageError::Compacted { oldest: answer.compact_revision });
            }
            if answer.canceled {
                return Err(StorageError::Unavailable(format!("etcd cancelled the watch: {}", answer.cancel_reason)));
            }
            let item = if answer.events.is_empty() {
                continue;
            } else {
                let mut changes = Vec::with_capacity(answer.events.len());
                for event in answer.events {
                    let Some(now) = event.kv else { continue };
                    let revision = now.mod_revision;
                    let now = kv(now)?;
                    changes.push(Change {
                        key: now.key,
                        value: (event.kind == 0).then_some(now.value),
                        previous: event.prev_kv.map(kv).transpose()?,
                        revision,
                    });
                }
                WatchItem::Changes(changes)
            };
            if out.send(Ok(item)).await.is_err() {
                return Ok(());
            }
        }
    }
}
