//! One suite for all stores.

use std::sync::Arc;
use std::time::Duration;

use embedded::storage::{Change, Expect, Memory, Outcome, RangeQuery, Storage, StorageError, WatchItem};
use futures::StreamExt;

use crate::support::etcd_in;

fn done(o: Outcome) -> i64 {
    match o {
        Outcome::Done(r) => r,
        Outcome::Conflict(there) => panic!("conflict: {there:?}"),
    }
}

async fn put(s: &dyn Storage, key: &str, value: &str, expect: Expect) -> Outcome {
    s.write(key, expect, Some(value.to_owned().into())).await.unwrap()
}

async fn next_change(
    stream: &mut futures::stream::BoxStream<'static, Result<WatchItem, StorageError>>,
    queue: &mut std::collections::VecDeque<Change>,
) -> Change {
    loop {
        if let Some(c) = queue.pop_front() {
            return c;
        }
        match tokio::time::timeout(Duration::from_secs(10), stream.next()).await.expect("a change").unwrap().unwrap() {
            WatchItem::Changes(c) => queue.extend(c),
            WatchItem::Progress(_) => {}
        }
    }
}

async fn suite(s: Arc<dyn Storage>) {
    let s = s.as_ref();
    // Compare and swap.
    let a1 = done(put(s, "/registry/t/a", "1", Expect::Absent).await);
    assert!(a1 > 1);
    let Outcome::Conflict(Some(there)) = put(s, "/registry/t/a", "x", Expect::Absent).await else { panic!() };
    assert_eq!((there.revision, &there.value[..]), (a1, &b"1"[..]));
    let a2 = done(put(s, "/registry/t/a", "2", Expect::At(a1)).await);
    assert!(a2 > a1);
    assert!(matches!(put(s, "/registry/t/a", "x", Expect::At(a1)).await, Outcome::Conflict(Some(_))));
    assert_eq!(put(s, "/registry/t/none", "x", Expect::At(a1)).await, Outcome::Conflict(None));
    assert_eq!(s.write("/registry/t/none", Expect::At(a1), None).await.unwrap(), Outcome::Conflict(None));
    // Reading now and then.
    let (now, revision) = s.get("/registry/t/a", 0).await.unwrap();
    assert_eq!((now.unwrap().revision, revision), (a2, a2));
    assert_eq!(s.get("/registry/t/a", a1).await.unwrap().0.unwrap().value, "1");
    assert!(matches!(s.get("/registry/t/a", a2 + 100).await, Err(StorageError::Future { .. })));
    // Ranges: prefix, order, pages, snapshots.
    for k in ["b", "c", "d"] {
        done(put(s, &format!("/registry/t/{k}"), k, Expect::Absent).await);
    }
    done(put(s, "/registry/tt/other", "o", Expect::Absent).await);
    let query = |after: Option<&str>, limit, revision| RangeQuery {
        prefix: "/registry/t/".into(),
        after: after.map(str::to_owned),
        limit,
        revision,
    };
    let keys = |p: &embedded::storage::Page| p.items.iter().map(|k| k.key.clone()).collect::<Vec<_>>();
    let first = s.range(query(None, 3, 0)).await.unwrap();
    assert_eq!(keys(&first), ["/registry/t/a", "/registry/t/b", "/registry/t/c"]);
    assert!(first.more && first.count == 4);
    let snapshot = first.revision;
    let d = s.get("/registry/t/d", 0).await.unwrap().0.unwrap();
    let gone = done(s.write("/registry/t/d", Expect::At(d.revision), None).await.unwrap());
    let second = s.range(query(Some("/registry/t/c"), 3, snapshot)).await.unwrap();
    assert_eq!((keys(&second), second.more, second.revision), (vec!["/registry/t/d".to_owned()], false, snapshot));
    assert_eq!(s.range(query(Some("/registry/t/c"), 3, 0)).await.unwrap().items.len(), 0);
    // Watching from the past, through the present, into the future.
    let mut queue = std::collections::VecDeque::new();
    let mut watch = s.watch("/registry/t/", a1);
    let c = next_change(&mut watch, &mut queue).await;
    assert_eq!((c.revision, c.value.as_deref(), c.previous.unwrap().revision), (a2, Some(&b"2"[..]), a1));
    for k in ["b", "c", "d"] {
        let c = next_change(&mut watch, &mut queue).await;
        assert_eq!((c.key, c.previous), (format!("/registry/t/{k}"), None));
    }
    let c = next_change(&mut watch, &mut queue).await;
    assert_eq!((c.revision, c.value, c.previous.unwrap().revision), (gone, None, d.revision));
    let again = done(put(s, "/registry/t/d", "again", Expect::Absent).await);
    let c = next_change(&mut watch, &mut queue).await;
    assert_eq!((c.revision, c.previous), (again, None));
    // Compaction: the past is refused, the present is not.
    s.compact(again).await.unwrap();
    assert!(matches!(s.get("/registry/t/a", a1).await, Err(StorageError::Compacted { .. })));
    assert!(matches!(s.range(query(None, 0, a2)).await, Err(StorageError::Compacted { .. })));
    assert!(matches!(s.compact(a2).await, Err(StorageError::Compacted { .. })));
    let mut late = s.watch("/registry/t/", a1);
    let end = tokio::time::timeout(Duration::from_secs(10), late.next()).await.unwrap().unwrap();
    assert!(matches!(end, Err(StorageError::Compacted { .. })), "{end:?}");
    assert!(late.next().await.is_none());
    assert_eq!(s.range(query(None, 0, 0)).await.unwrap().items.len(), 4);
    let more = done(put(s, "/registry/t/e", "e", Expect::Absent).await);
    assert_eq!(next_change(&mut watch, &mut queue).await.revision, more);
    s.maintain().await.unwrap();
    assert_eq!(s.revision().await.unwrap(), more);
}

#[tokio::test]
async fn the_memory_store_keeps_its_promises() {
    suite(Arc::new(Memory::new())).await;
}

#[tokio::test]
async fn etcd_keeps_the_same_promises() {
    let dir = tempfile::tempdir().unwrap();
    let (process, store) = etcd_in(dir.path()).await;
    suite(Arc::new(store)).await;
    process.stop().await;
}
