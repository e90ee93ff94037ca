//! The watch of a node's pods, which survives a store that went back in time (restored from a backup): a watch that has come
//! further than the store is would wait until the store catches up, and miss what is not there any more. It begins anew,
//! with a list.

use futures::stream::{BoxStream, Stream, StreamExt};
use kube::runtime::watcher;

/// Whether a watch cannot go on because the store is not as far as it was.
fn too_far(error: &watcher::Error) -> bool {
    let status = match error {
        watcher::Error::WatchStartFailed(kube::Error::Api(status)) | watcher::Error::WatchError(status) => status,
        _ => return false,
    };
    let causes = status.details.iter().flat_map(|d| &d.causes);
    status.message.starts_with("Too large resource version")
        || causes.into_iter().any(|cause| cause.reason == "ResourceVersionTooLarge")
}

/// The events of the watches that `begin` makes, one after the other.
pub(super) fn follow<K: Send + 'static>(
    begin: impl Fn() -> BoxStream<'static, watcher::Result<watcher::Event<K>>> + Send,
) -> impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send {
    let first = begin();
    futures::stream::unfold((first, begin), |(mut events, begin)| async move {
        let event = events.next().await?;
        if event.as_ref().is_err_and(too_far) {
            events = begin();
        }
        Some((event, (events, begin)))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicUsize, Ordering};

    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn a_watch_begins_anew_when_the_store_went_back_and_at_no_other_error() {
        let status = |message: &str| {
            let status = json!({"kind": "Status", "status": "Failure", "code": 504, "message": message});
            watcher::Error::WatchStartFailed(kube::Error::Api(serde_json::from_value(status).unwrap()))
        };
        let begun = AtomicUsize::new(0);
        let begin = || {
            let number = begun.fetch_add(1, Ordering::SeqCst);
            let events: Vec<watcher::Result<watcher::Event<usize>>> = match number {
                0 => vec![
                    Ok(watcher::Event::Apply(1)),
                    Err(status("the store did not answer")),
                    Ok(watcher::Event::Apply(2)),
                    Err(status("Too large resource version: 2544: Timeout")),
                    Ok(watcher::Event::Apply(3)),
                ],
                _ => vec![Ok(watcher::Event::Init), Ok(watcher::Event::InitDone)],
            };
            futures::stream::iter(events).boxed()
        };
        let told: Vec<String> = follow(begin)
            .map(|event| match event {
                Ok(watcher::Event::Apply(n)) => n.to_string(),
                Ok(watcher::Event::InitDone) => "listed".into(),
                Ok(_) => "list".into(),
                Err(_) => "error".into(),
            })
            .collect()
            .await;
        assert_eq!(told, ["1", "error", "2", "error", "list", "listed"]);
        assert_eq!(begun.load(Ordering::SeqCst), 2);
    }
}
