//! Launchers as their agent talks to them, and the pods' networks: on a node, sockets and `ip`; in a simulation, models.

use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use hyper_util::rt::TokioIo;
use proto::agent::{Ack, VerbReply, VerbRequest};
use proto::launcher::launcher_client::LauncherClient;
use proto::launcher::{
    InfoReply, InfoRequest, NicFacts, Order, StatsReply, StatsRequest, ToldRequest, Update, WatchRequest,
};
use state::domain::RefusalReason;
use tonic::Status;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::network::{self, Place};
use crate::{PodFacts, limits};

/// An answer of a launcher.
pub type Answer<T> = BoxFuture<'static, Result<T, Status>>;
/// What a launcher tells: its domain first, then each change.
pub type Updates = BoxStream<'static, Result<Update, Status>>;
/// What became of a pod's network.
pub type Prepared = Result<Option<NicFacts>, (RefusalReason, String)>;

/// One launcher. The messages and their rules are those of its gRPC service.
pub trait Launcher: Send + Sync {
    /// Who it is.
    fn info(&self) -> Answer<InfoReply>;
    /// Carries out an instruction.
    fn execute(&self, order: Order) -> Answer<Ack>;
    /// A verb.
    fn verb(&self, verb: VerbRequest) -> Answer<VerbReply>;
    /// What its machine uses.
    fn stats(&self) -> Answer<StatsReply>;
    /// Its level, and then each change; with what it did, where somebody can tell it.
    fn watch(&self, steps: bool) -> Answer<Updates>;
    /// Steps up to this one were told.
    fn told(&self, seq: u64) -> Answer<()>;
}

/// What a guest is told of names.
#[derive(Clone, Debug, Default)]
pub struct Names {
    /// Name servers.
    pub servers: Vec<String>,
    /// Search domain.
    pub search: String,
}

/// The launchers of a node.
pub trait Launchers: Send + Sync + 'static {
    /// Reaches the launcher of a pod; the error says why there is none.
    fn connect(&self, pod: &PodFacts) -> BoxFuture<'static, Result<Arc<dyn Launcher>, String>>;

    /// Makes the network of a pod whose launcher has not started its domain yet.
    fn network(&self, pod: PodFacts, vmi: Bytes, names: Names) -> BoxFuture<'static, Prepared>;
}

/// The real ones: gRPC on a Unix socket in the share folder, networks in the kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sockets;

impl Launchers for Sockets {
    fn connect(&self, pod: &PodFacts) -> BoxFuture<'static, Result<Arc<dyn Launcher>, String>> {
        let share = pod.share_dir.clone();
        Box::pin(async move {
            let connector = tower::service_fn(move |_: Uri| {
                let share = share.clone();
                async move { crate::sock::connect(&share, "launcher.sock").await.map(TokioIo::new) }
            });
            let channel = Endpoint::from_static("http://launcher")
                .connect_timeout(limits::LAUNCHER)
                .http2_keep_alive_interval(limits::KEEPALIVE)
                .keep_alive_timeout(limits::KEEPALIVE)
                .keep_alive_while_idle(true)
                .connect_with_connector(connector)
                .await
                .map_err(|e| e.to_string())?;
            Ok(Arc::new(Wire(LauncherClient::new(channel))) as Arc<dyn Launcher>)
        })
    }

    fn network(&self, pod: PodFacts, vmi: Bytes, names: Names) -> BoxFuture<'static, Prepared> {
        Box::pin(async move {
            let Some(card) = network::card(&vmi).map_err(|e| (e.reason(), e.to_string()))? else { return Ok(None) };
            let Names { servers: dns, search } = names;
            let place = Place { netns: pod.netns, share: pod.share_dir, ips: pod.ips, dns, search };
            match tokio::time::timeout(limits::NETWORK, network::prepare(card, place)).await {
                Ok(made) => made.map(Some).map_err(|e| (e.reason(), with_sources(&e))),
                Err(_) => Err((
                    RefusalReason::Failed,
                    format!("the pod's network was not ready within {:?}", limits::NETWORK),
                )),
            }
        })
    }
}

struct Wire(LauncherClient<Channel>);

impl Launcher for Wire {
    fn info(&self) -> Answer<InfoReply> {
        let mut client = self.0.clone();
        async move { client.info(InfoRequest {}).await.map(tonic::Response::into_inner) }.boxed()
    }

    fn execute(&self, order: Order) -> Answer<Ack> {
        let mut client = self.0.clone();
        async move { client.execute(order).await.map(tonic::Response::into_inner) }.boxed()
    }

    fn verb(&self, verb: VerbRequest) -> Answer<VerbReply> {
        let mut client = self.0.clone();
        async move { client.verb(verb).await.map(tonic::Response::into_inner) }.boxed()
    }

    fn stats(&self) -> Answer<StatsReply> {
        let mut client = self.0.clone();
        async move { client.stats(StatsRequest {}).await.map(tonic::Response::into_inner) }.boxed()
    }

    fn told(&self, seq: u64) -> Answer<()> {
        let mut client = self.0.clone();
        async move { client.told(ToldRequest { seq }).await.map(|_| ()) }.boxed()
    }

    fn watch(&self, steps: bool) -> Answer<Updates> {
        let mut client = self.0.clone();
        async move { client.watch(WatchRequest { steps }).await.map(|r| r.into_inner().boxed()) }.boxed()
    }
}

fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(s) = source {
        text += &format!(": {s}");
        source = s.source();
    }
    text
}
