//! The controller process: shared watch caches, the driver that runs the cells of `state/`, the executor that carries out
//! their commands, the Lease, the sessions with node agents.
//!
//! ```text
//!   watches -> Hub (store, one a kind) -> Queue -+
//!   sessions with node agents -> Heard ----------+-> Driver: cell.step(event) -> commands
//!   outcomes of commands -> Answer --------------+        |            |
//!                                                       journal   Executor, Sessions, Events
//! ```
//!
//! Standbys keep their caches warm and do not step. Losing the Lease ends [`run`], and so does a store that was restored
//! from a backup: the process starts cold.

mod driver;
mod events;
mod executor;
mod explain;
pub mod hub;
pub mod lease;
mod metrics;
pub mod server;
mod session;
mod sessions;

pub use driver::DriverError;
pub use explain::{ExplainError, Explainer, Subject, find as find_in_journal, journal as read_journal};
pub use lease::{LeaseConfig, LeaseError};
pub use session::SessionError;

use hub::{Hub, Queue};
use kube::Client;
use proto::transport::{Dial, Tls};
use state::{
    LeaderInstance,
    observe::{ClaimView, NodeView, PodView, VmView, VmiView},
    set::SetView,
    vm::ClusterConfig,
};
use std::sync::Arc;
use telemetry::{Readiness, journal::Journal};
use tokio::sync::mpsc;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

/// What a controller lacks before it has seen everything.
const CACHES: &str = "caches";
/// Messages of agents that may wait for the driver; beyond it the sessions wait.
const HEARD: usize = 1024;

/// What the controller needs.
#[derive(Clone)]
pub struct Config {
    /// The API server. Must have a timeout for response headers.
    pub client: Client,
    /// How node agents are reached.
    pub dial: Dial,
    /// Who we are to node agents.
    pub tls: Tls,
    /// The Lease.
    pub lease: LeaseConfig,
    /// Where the journal goes, and how much of it is kept; `None` for no journal.
    pub journal: Option<telemetry::journal::Config>,
    /// Answers questions about the cells while this process leads.
    pub explainer: Explainer,
    /// Where it counts, and tells what its caches have.
    pub metrics: telemetry::metrics::Registry,
    /// Says what it lacks: its caches, or an answer about the Lease.
    pub readiness: Readiness,
    /// What rendering needs.
    pub cluster: ClusterConfig,
    /// Ends [`run`], giving the Lease up.
    pub stop: CancellationToken,
}

/// Why the controller ended without having been asked to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Leadership ended.
    #[error("this controller does not lead any more")]
    Lease(#[from] LeaseError),
    /// The store was restored from a backup: what is known of it means nothing any more.
    #[error("what this controller knows is of no use")]
    WentBack(#[from] hub::WentBack),
    /// The driver stopped.
    #[error("the cells were stopped")]
    Driver(#[from] DriverError),
}

/// Runs the controller until it is stopped (`Ok`) or must start anew (`Err`).
pub async fn run(config: Config) -> Result<(), Error> {
    // Before the first object is read: all digests of a process have one key.
    let mut key = [0; 32];
    key[..16].copy_from_slice(uuid::Uuid::new_v4().as_bytes());
    key[16..].copy_from_slice(uuid::Uuid::new_v4().as_bytes());
    state::template::set_key(key);
    let client = &config.client;
    let launchers = format!("{}={}", api::names::LABEL_APP, api::names::APP_LAUNCHER);
    let vms = Arc::new(Hub::<VmView>::start(client.clone(), ""));
    let vmis = Arc::new(Hub::<VmiView>::start(client.clone(), ""));
    let sets = Arc::new(Hub::<SetView>::start(client.clone(), ""));
    let pods = Arc::new(Hub::<PodView>::start(client.clone(), &launchers));
    let claims = Arc::new(Hub::<ClaimView>::start(client.clone(), ""));
    let nodes = Arc::new(Hub::<NodeView>::start(client.clone(), ""));
    config.readiness.lacks(CACHES, "not all objects are known yet");
    let synced = {
        let (vms, vmis, sets, pods, claims, nodes) =
            (vms.clone(), vmis.clone(), sets.clone(), pods.clone(), claims.clone(), nodes.clone());
        let readiness = config.readiness.clone();
        AbortOnDropHandle::new(tokio::spawn(async move {
            tokio::join!(vms.synced(), vmis.synced(), sets.synced(), pods.synced(), claims.synced(), nodes.synced());
            readiness.has(CACHES);
        }))
    };

    metrics::stands_by(&config.metrics);
    let instance = LeaderInstance(uuid::Uuid::new_v4().to_string());
    let leadership = tokio::select! {
        () = config.stop.cancelled() => return Ok(()),
        l = lease::acquire(client, config.lease.clone(), instance.clone(), &config.readiness) => l?,
    };
    let journal = Journal::open(config.journal.clone(), instance.as_str(), Some(leadership.epoch));
    let asked =
        config.explainer.leads(client.clone(), journal.flusher(), config.journal.as_ref().map(|j| j.dir.clone()));
    let (epoch, until) = (leadership.epoch, leadership.until.subscribe());
    tokio::select! {
        () = config.stop.cancelled() => {
            leadership.release().await;
            return Ok(());
        }
        _ = synced => {}
    }

    let (heard_by, heard) = mpsc::channel(HEARD);
    let sessions = sessions::Sessions::new(config.dial.clone(), config.tls.clone(), epoch, instance, heard_by);
    let queue = Arc::new(Queue::default());
    // Nodes first: cells ask for the facts of theirs. Then from the leaves up, so that a cell that is told of its VM knows
    // what there is of it already: else every take-over would begin with creations that are refused as doubles.
    nodes.subscribe(queue.clone());
    claims.subscribe(queue.clone());
    pods.subscribe(queue.clone());
    vmis.subscribe(queue.clone());
    vms.subscribe(queue.clone());
    sets.subscribe(queue.clone());
    let doubts = (claims.clone(), vmis.clone());
    let caches = metrics::Caches {
        vms: vms.clone(),
        vmis: vmis.clone(),
        sessions: sessions.clone(),
        queue: queue.clone(),
        journal: journal.flusher(),
        epoch,
    };
    metrics::leads(&config.metrics, caches);
    let parts = driver::Parts {
        metrics: metrics::Metrics::new(&config.metrics, driver::wall()),
        vms: vms.clone(),
        vmis,
        pods: pods.clone(),
        claims,
        queue,
        executor: executor::Executor::new(client.clone(), until),
        sessions: sessions.clone(),
        events: events::Events::new(client.clone()),
        config: ClusterConfig { reign: leadership.reign, ..config.cluster.clone() },
        epoch,
        journal,
    };
    let result = tokio::select! {
        () = config.stop.cancelled() => Ok(()),
        lost = leadership.keep() => Err(lost.into()),
        error = driver::Driver::run(parts, heard, asked) => Err(error.into()),
        found = vms.went_back() => Err(found.into()),
        found = doubts.1.went_back() => Err(found.into()),
        found = sets.went_back() => Err(found.into()),
        found = pods.went_back() => Err(found.into()),
        found = nodes.went_back() => Err(found.into()),
        found = doubts.0.went_back() => Err(found.into()),
    };
    sessions.close();
    metrics::stands_by(&config.metrics);
    if result.is_ok() {
        leadership.release().await;
    }
    result
}
