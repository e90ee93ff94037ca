//! What runs on the hosts of the simulated network.
//!
//! | host | what |
//! |---|---|
//! | `api` | the embedded API server with its controllers and scheduler, on a store that outlives it |
//! | `controller-N` | a controller process |
//! | `node-N` | a node agent |
//! | `pods-N` | the kubelet of that node, its launchers and guests, as models |
//! | `people` | who makes, starts, stops, restarts and deletes machines |
//!
//! A process that ends is started anew, as a supervisor would: the host is crashed and bounced, so that nothing of it is left.

use super::{identity::Identities, net, store::Witnessed, truth};
use embedded::{
    auth::User,
    cluster,
    server::{ApiServer, Config},
};
use node_agent::{
    Disk,
    simulation::{Capacity, Delays, Place, Pods, run_pods},
};
use reconcilers::LeaseConfig;
use std::{
    cell::Cell,
    path::{Path, PathBuf},
    rc::Rc,
    sync::Arc,
};
use telemetry::journal;
use tokio_util::sync::CancellationToken;

/// What hosts share: files, certificates, what outlives a process.
pub struct Site {
    /// Files of the run, a folder each host.
    pub folder: PathBuf,
    /// Certificates.
    pub identities: Identities,
    /// The API server's store.
    pub store: Witnessed,
    /// Pods and guests of the nodes.
    pub places: Vec<Arc<Place>>,
    /// How often each node was switched on.
    pub boots: Vec<Cell<u32>>,
    /// Of pods and guests.
    pub delays: Delays,
}

impl Site {
    fn journal(&self, host: &str, component: &'static str) -> Option<journal::Config> {
        let dir = self.folder.join("journal").join(host);
        Some(journal::Config { thread: false, ..journal::Config::new(dir, component, "simulation") })
    }

    /// Where the agent of a node keeps its memory.
    pub fn state_dir(&self, node: &str) -> PathBuf {
        self.folder.join("state").join(node)
    }
}

/// A process ended by itself, and will be started again.
async fn ended(host: &str, how: String) -> turmoil::Result {
    truth::say(|| format!("{host} ended: {how}"));
    truth::with(|t| t.exited.push(host.to_owned()));
    std::future::pending().await
}

/// The API server and what belongs to it.
pub async fn api(site: Rc<Site>) -> turmoil::Result {
    let config = Config { token_key: b"a key of a simulation".to_vec(), ..Config::default() };
    let server = match ApiServer::new(Arc::new(site.store.clone()), config).await {
        Ok(server) => server,
        Err(status) => return ended("api", status.to_string()).await,
    };
    let system = server.client(User::system("system:virtfold:cluster"));
    if let Err(error) = cluster::bootstrap::run(&system).await {
        return ended("api", error.to_string()).await;
    }
    let options = cluster::Options { volumes: site.folder.join("volumes"), imports: site.folder.join("imports") };
    let stop = CancellationToken::new();
    tokio::spawn(cluster::run(system, options, stop));
    let failed = net::serve(server).await;
    ended("api", format!("{failed:?}")).await
}

/// A controller process.
pub async fn controller(site: Rc<Site>, host: String) -> turmoil::Result {
    let config = reconcilers::Config {
        metrics: Default::default(),
        readiness: Default::default(),
        client: net::client(&host)?,
        dial: net::dial(),
        tls: site.identities.controller(),
        lease: LeaseConfig::default(),
        journal: site.journal(&host, "controller"),
        explainer: reconcilers::Explainer::default(),
        cluster: state::vm::ClusterConfig::default(),
        stop: CancellationToken::new(),
    };
    let how = match reconcilers::run(config).await {
        Ok(()) => "it was asked to".to_owned(),
        Err(error) => format!("{error:?}"),
    };
    ended(&host, how).await
}

/// The agent of a node.
pub async fn agent(site: Rc<Site>, n: usize) -> turmoil::Result {
    let host = format!("node-{n}");
    let (incoming, address) = net::incoming(&host).await?;
    let (Some(place), Some(boot)) = (site.places.get(n), site.boots.get(n)) else { return Ok(()) };
    let (pods, launchers) = place.view();
    let found = node_agent::simulation::accelerator();
    let lease = LeaseConfig::default();
    let config = node_agent::Config {
        node_name: host.clone(),
        client: net::client(&host)?,
        incoming,
        address: address.to_string(),
        tls: site.identities.node(&host),
        state_dir: site.state_dir(&host),
        disk: Disk::InPlace,
        boot_id: format!("{host}-boot-{}", boot.get()),
        pods,
        probe: Box::new(move || Box::pin(std::future::ready(found.clone()))),
        lease: (lease.namespace, lease.name),
        dns: Vec::new(),
        cluster_domain: String::new(),
        journal: site.journal(&host, "node-agent"),
        usage: None,
        shutdown: CancellationToken::new(),
    };
    let how = format!("{:?}", node_agent::run_with(config, launchers).await);
    ended(&host, how).await
}

/// The kubelet of a node, with its pods.
pub async fn pods(site: Rc<Site>, n: usize) -> turmoil::Result {
    let Some(place) = site.places.get(n) else { return Ok(()) };
    let pods = Pods {
        client: net::client(place.name())?,
        delays: site.delays.clone(),
        kubelet: true,
        scheduler: false,
        address: turmoil::lookup(format!("node-{n}")),
        capacity: Capacity { cpu: "64".into(), memory: "256Gi".into(), pods: 110 },
        stop: CancellationToken::new(),
    };
    let how = format!("{:?}", run_pods(pods, place.clone()).await);
    ended(&format!("pods-{n}"), how).await
}

/// Hashes what the journals have.
pub fn hash_journals(folder: &Path) -> std::io::Result<Vec<u8>> {
    use sha2::{Digest, Sha256};
    let dir = folder.join("journal");
    let mut sum = Sha256::new();
    if dir.exists() {
        for segment in journal::segments(&dir)? {
            sum.update(segment.strip_prefix(folder).unwrap_or(&segment).as_os_str().as_encoded_bytes());
            sum.update(std::fs::read(&segment)?);
        }
    }
    Ok(sum.finalize().to_vec())
}
