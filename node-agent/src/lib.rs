//! The node agent: one process per node, between the controller and the launchers of the node.
//!
//! *What it owns:* nothing in the API but a Node's annotations and label, and one condition of launcher pods. On the node:
//! the memory of the leader that it accepted, outcomes that nobody has acknowledged, and the making of pods' networks.
//! Machines belong to their launchers: an agent may die at any moment, and no guest notices.
//!
//! *Who else writes:* launchers tell what happens to their machine, controllers what should, gateways what is wished for
//! once. None of them is believed beyond its trade: a launcher speaks for its own pod, a controller by its epoch and by
//! the VMI that it shows, a gateway by its certificate.
//!
//! *What may be lost or come twice:* everything. A session that begins is told the whole level, then changes. What a
//! controller must not miss, the outcome, is told until it is acknowledged.
//!
//! What happens when is decided by [`state::agent`]; here it is carried out. [`hub`] owns the cells; `server` admits callers;
//! `link` follows one launcher; `api` speaks with the API server; `network` makes a pod's network; `store` is the memory.

mod api;
mod hub;
mod launchers;
mod limits;
mod link;
mod metrics;
mod network;
mod node;
mod pods;
mod server;
pub mod simulation;
mod sock;
mod store;
mod stream;
mod sys;

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;

use futures::future::BoxFuture;
use proto::agent::node_agent_server::NodeAgentServer;
use proto::transport::{Incoming, Tls};
use telemetry::journal::Journal;
use tokio::sync::{Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

pub use launchers::{Answer, Launcher, Launchers, Names, Prepared, Updates};
pub use metrics::Metrics;
pub use node::{Accelerator, Offers};
pub use pods::{PodFacts, PodSource};
pub use server::{CONTROLLER, GATEWAY};
pub use store::Disk;

/// Finds out how guests are run on this machine. Asked once per boot.
pub type Probe = Box<dyn Fn() -> BoxFuture<'static, Accelerator> + Send + Sync>;

/// What an agent is told when it starts.
pub struct Config {
    /// Name of the Node.
    pub node_name: String,
    /// Client of the API server, with the node's rights.
    pub client: kube::Client,
    /// Where controllers and gateways are served.
    pub incoming: Incoming,
    /// How they find it: `host:port`, written into an annotation of the Node.
    pub address: String,
    /// The server's certificate, which names the node, its key, and the authority of all components.
    pub tls: Tls,
    /// The agent's memory. Of one agent at a time.
    pub state_dir: PathBuf,
    /// How its files are written.
    pub disk: Disk,
    /// This boot of the machine ([`boot_id`]): domains of another one are over.
    pub boot_id: String,
    /// Whoever runs pods here.
    pub pods: Arc<dyn PodSource>,
    /// Finds out how guests are run.
    pub probe: Probe,
    /// Namespace and name of the controller's Lease.
    pub lease: (String, String),
    /// Name servers that guests are told.
    pub dns: Vec<Ipv4Addr>,
    /// The cluster's domain (`cluster.local`), where names are resolved in one; else empty.
    pub cluster_domain: String,
    /// Where the journal goes, and how much of it is kept; `None` for no journal.
    pub journal: Option<telemetry::journal::Config>,
    /// Who asks the launchers what their machines use; without it gateways are told of no machine.
    pub usage: Option<Metrics>,
    /// Ends the agent. Guests go on.
    pub shutdown: CancellationToken,
}

/// The agent could not start or go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The memory's folder cannot be used.
    #[error("opening {path}")]
    State {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The kernel does not tell its boot id.
    #[error("reading the boot id")]
    BootId(#[source] std::io::Error),
    /// The server.
    #[error("serving gRPC")]
    Serve(#[source] tonic::transport::Error),
}

/// What all parts of an agent share.
pub(crate) struct Shared {
    node: String,
    node_uid: watch::Sender<String>,
    boot_id: String,
    /// Random per process start.
    instance: String,
    address: String,
    client: kube::Client,
    store: store::Store,
    pods: Arc<dyn PodSource>,
    accelerator: node::Accelerator,
    launchers: Arc<dyn Launchers>,
    lease: (String, String),
    dns: Vec<String>,
    cluster_domain: String,
    usage: Option<Metrics>,
    /// The Node's facts should be looked at.
    assert_node: Notify,
    stop: CancellationToken,
}

impl Shared {
    fn accelerator(&self) -> node::Accelerator {
        self.accelerator.clone()
    }

    fn capabilities(&self) -> Vec<String> {
        vec![self.accelerator.name.clone(), "masquerade".into()]
    }

    fn search_domain(&self, namespace: &str) -> String {
        if self.cluster_domain.is_empty() { String::new() } else { format!("{namespace}.svc.{}", self.cluster_domain) }
    }
}

/// What the kernel calls this boot of the machine.
///
/// # Errors
/// The kernel does not tell.
pub fn boot_id() -> Result<String, Error> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(Error::BootId)?;
    Ok(id.trim().to_owned())
}

/// Runs the agent of one node until it is shut down.
///
/// # Errors
/// When its memory cannot be opened, or the server fails. Whatever else is missing is waited for.
pub async fn run(config: Config) -> Result<(), Error> {
    run_with(config, Arc::new(launchers::Sockets)).await
}

/// The same with other launchers than those in the pods' share folders.
///
/// # Errors
/// As [`run`].
pub async fn run_with(config: Config, launchers: Arc<dyn Launchers>) -> Result<(), Error> {
    let open = |source| Error::State { path: config.state_dir.clone(), source };
    let store = store::Store::open(&config.state_dir, config.disk).map_err(open)?;
    let accelerator = node::accelerator(&store, &config.boot_id, &config.probe).await;
    let stop = config.shutdown.child_token();
    let shared = Arc::new(Shared {
        node: config.node_name.clone(),
        node_uid: watch::Sender::default(),
        boot_id: config.boot_id,
        instance: uuid::Uuid::new_v4().to_string(),
        address: config.address,
        client: config.client.clone(),
        store,
        pods: config.pods,
        accelerator,
        launchers,
        lease: config.lease,
        dns: config.dns.iter().map(ToString::to_string).collect(),
        cluster_domain: config.cluster_domain,
        usage: config.usage,
        assert_node: Notify::new(),
        stop: stop.clone(),
    });
    let (to_hub, msgs) = mpsc::channel(limits::HUB);
    let (to_news, news) = mpsc::channel(limits::HUB);
    let journal = Journal::open(config.journal, &shared.instance, None);
    let hub = hub::Hub::new(shared.clone(), journal, to_hub.clone());
    let _tasks = [
        AbortOnDropHandle::new(tokio::spawn(hub.run(msgs, news))),
        AbortOnDropHandle::new(tokio::spawn(api::follow(config.client, config.node_name.clone(), to_news))),
        AbortOnDropHandle::new(tokio::spawn(node::keep(shared.clone()))),
    ];
    let service = server::Service::new(shared, to_hub);
    tracing::info!(node = config.node_name, "the node agent serves");
    let server = proto::transport::server(&config.tls)
        .map_err(Error::Serve)?
        .http2_keepalive_interval(Some(limits::KEEPALIVE))
        .http2_keepalive_timeout(Some(limits::KEEPALIVE))
        .add_service(NodeAgentServer::new(service))
        .serve_with_incoming_shutdown(config.incoming, stop.clone().cancelled_owned());
    let served = server.await.map_err(Error::Serve);
    stop.cancel();
    served
}
