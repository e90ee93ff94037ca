//! The way to one launcher: finds it, asks who it is, follows its level, and begins again when it breaks.
//!
//! The launcher may be slow, stopped, or no launcher at all: every wait has an end, and what is not gRPC is a failure like
//! any other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::StreamExt;
use proto::launcher::{InfoReply, Update};
use tokio::sync::mpsc;

use crate::launchers::{Launcher, Launchers};
use crate::{PodFacts, limits};

/// A launcher that was reached.
pub(crate) type Client = Arc<dyn Launcher>;

/// What a link tells.
pub(crate) enum LinkEvent {
    Connected { client: Client, info: Box<InfoReply> },
    Updated(Box<Update>),
    Lost,
}

/// Follows the launcher of `pod` until the task is aborted, or the container has ended and the launcher is silent.
pub(crate) async fn follow(
    launchers: Arc<dyn Launchers>,
    pod: PodFacts,
    running: Arc<AtomicBool>,
    events: mpsc::Sender<LinkEvent>,
) {
    let mut pause = limits::RETRY_FIRST;
    loop {
        match session(&*launchers, &pod, &events).await {
            Ok(()) => pause = limits::RETRY_FIRST,
            Err(Broken::NobodyListens) => return,
            Err(Broken::Early(error)) => {
                tracing::debug!(%error, pod = pod.pod_uid, "no launcher yet");
            }
            Err(Broken::Late(error)) => {
                tracing::info!(%error, pod = pod.pod_uid, "the launcher stopped answering");
                pause = limits::RETRY_FIRST;
                if events.send(LinkEvent::Lost).await.is_err() {
                    return;
                }
            }
        }
        if !running.load(Ordering::Relaxed) {
            return;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(limits::LAUNCHER_RETRY);
    }
}

enum Broken {
    /// Before it was connected.
    Early(String),
    /// After.
    Late(String),
    /// The hub is gone.
    NobodyListens,
}

async fn session(launchers: &dyn Launchers, pod: &PodFacts, events: &mpsc::Sender<LinkEvent>) -> Result<(), Broken> {
    let early = |e: tonic::Status| Broken::Early(e.to_string());
    let client = launchers.connect(pod).await.map_err(Broken::Early)?;
    let info = bounded(client.info()).await.map_err(early)?;
    let mut watch = bounded(client.watch()).await.map_err(early)?;
    let connected = LinkEvent::Connected { client, info: Box::new(info) };
    events.send(connected).await.map_err(|_| Broken::NobodyListens)?;
    loop {
        match watch.next().await {
            Some(Ok(update)) => {
                events.send(LinkEvent::Updated(Box::new(update))).await.map_err(|_| Broken::NobodyListens)?;
            }
            None => return Err(Broken::Late("the stream ended".into())),
            Some(Err(status)) => return Err(Broken::Late(status.to_string())),
        }
    }
}

async fn bounded<T>(call: impl Future<Output = Result<T, tonic::Status>>) -> Result<T, tonic::Status> {
    within(limits::LAUNCHER, call).await
}

/// The answer, or a failure after that time.
pub(crate) async fn within<T>(
    time: Duration,
    call: impl Future<Output = Result<T, tonic::Status>>,
) -> Result<T, tonic::Status> {
    tokio::time::timeout(time, call)
        .await
        .unwrap_or_else(|_| Err(tonic::Status::deadline_exceeded(format!("no answer within {time:?}"))))
}
