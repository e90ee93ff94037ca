//! The way to one launcher: finds its socket, asks who it is, follows its level, and begins again when it breaks.
//!
//! The launcher may be slow, stopped, or no launcher at all: every wait has an end, and what is not gRPC is a failure like
//! any other.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use proto::launcher::launcher_client::LauncherClient;
use proto::launcher::{InfoReply, InfoRequest, Update, WatchRequest};
use tokio::sync::mpsc;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::limits;

/// A client of one launcher.
pub(crate) type Client = LauncherClient<Channel>;

/// What a link tells.
#[derive(Debug)]
pub(crate) enum LinkEvent {
    Connected { client: Client, info: Box<InfoReply> },
    Updated(Box<Update>),
    Lost,
}

/// Follows the launcher in `share` until the task is aborted, or the container has ended and the launcher is silent.
pub(crate) async fn follow(share: PathBuf, running: Arc<AtomicBool>, events: mpsc::Sender<LinkEvent>) {
    let mut pause = limits::RETRY_FIRST;
    loop {
        match session(&share, &events).await {
            Ok(()) => pause = limits::RETRY_FIRST,
            Err(Broken::NobodyListens) => return,
            Err(Broken::Early(error)) => {
                tracing::debug!(%error, share = %share.display(), "no launcher yet");
            }
            Err(Broken::Late(error)) => {
                tracing::info!(%error, share = %share.display(), "the launcher stopped answering");
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

async fn session(share: &std::path::Path, events: &mpsc::Sender<LinkEvent>) -> Result<(), Broken> {
    let early = |e: &dyn std::fmt::Display| Broken::Early(e.to_string());
    let channel = connect(share).await.map_err(|e| early(&e))?;
    let mut client = LauncherClient::new(channel);
    let info = bounded(client.info(InfoRequest {})).await.map_err(|e| early(&e))?.into_inner();
    let mut watch = bounded(client.watch(WatchRequest {})).await.map_err(|e| early(&e))?.into_inner();
    let connected = LinkEvent::Connected { client, info: Box::new(info) };
    events.send(connected).await.map_err(|_| Broken::NobodyListens)?;
    loop {
        match watch.message().await {
            Ok(Some(update)) => {
                events.send(LinkEvent::Updated(Box::new(update))).await.map_err(|_| Broken::NobodyListens)?;
            }
            Ok(None) => return Err(Broken::Late("the stream ended".into())),
            Err(status) => return Err(Broken::Late(status.to_string())),
        }
    }
}

async fn connect(share: &std::path::Path) -> Result<Channel, tonic::transport::Error> {
    let share = share.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let share = share.clone();
        async move { crate::sock::connect(&share, "launcher.sock").await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://launcher")
        .connect_timeout(limits::LAUNCHER)
        .http2_keep_alive_interval(limits::KEEPALIVE)
        .keep_alive_timeout(limits::KEEPALIVE)
        .keep_alive_while_idle(true)
        .connect_with_connector(connector)
        .await
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
