//! What the components that are processes of their own have in common: client, identity, end.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use proto::transport::Tls;
use telemetry::metrics::Registry;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tower::timeout::TimeoutLayer;

use crate::args::AgentTls;
use crate::observed::Counting;

/// Time for a connection to the API server.
const CONNECT: Duration = Duration::from_secs(5);
/// Time for the beginning of its answer.
const ANSWER: Duration = Duration::from_secs(30);

/// A component's client of the API server. A request that is not answered within 30 s has failed; watches go on. `agent` is
/// what the API server's records call us.
pub async fn client(kubeconfig: &Path, agent: &str, metrics: &Registry) -> anyhow::Result<Client> {
    let read = Kubeconfig::read_from(kubeconfig).with_context(|| format!("cannot read {}", kubeconfig.display()))?;
    connect(read, agent, metrics).await.with_context(|| format!("{} is not usable", kubeconfig.display()))
}

/// The same, of a kubeconfig that is in memory.
pub async fn connect(kubeconfig: Kubeconfig, agent: &str, metrics: &Registry) -> anyhow::Result<Client> {
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    config.default_retry = false;
    config.connect_timeout = Some(CONNECT);
    let agent = format!("{agent}/{}", env!("CARGO_PKG_VERSION"));
    config.headers.push((http::header::USER_AGENT, http::HeaderValue::try_from(agent)?));
    let host = config.cluster_url.authority().map(ToString::to_string).unwrap_or_default();
    let builder = ClientBuilder::try_from(config)?.with_layer(&TimeoutLayer::new(ANSWER));
    Ok(builder.with_layer(&Counting::new(metrics, host)).build())
}

/// Threads of a component: it waits more than it computes.
pub const THREADS: usize = 2;

/// Runs a component until it ends. What it has left behind gets two seconds.
pub fn run(threads: usize, serve: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<u8> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
    let result = runtime.block_on(serve);
    runtime.shutdown_timeout(Duration::from_secs(2));
    result.map(|()| 0)
}

/// Reads a component's identity.
pub fn identity(tls: &AgentTls) -> anyhow::Result<Tls> {
    let read = |path: &Path| std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()));
    Ok(Tls { ca: read(&tls.ca)?, cert: read(&tls.cert)?, key: read(&tls.key)? })
}

/// Ends the token at SIGTERM and SIGINT.
pub fn until_asked(stop: &CancellationToken) -> anyhow::Result<()> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let stop = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        stop.cancel();
    });
    Ok(())
}
