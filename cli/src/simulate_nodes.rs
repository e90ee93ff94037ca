//! `virtfold simulate-nodes`: real node agents over modelled launchers and guests, many in one process.

use std::path::{Path, PathBuf};

use anyhow::Context;
use embedded::pki::Pki;
use node_agent::simulation::{self, Capacity, Delays};
use proto::transport::Tls;
use tokio_util::sync::CancellationToken;

use crate::args::SimulateNodes;
use crate::component::{self, client, until_asked};

/// Runs until it is asked to end.
pub fn run(options: SimulateNodes) -> anyhow::Result<u8> {
    // Many nodes: whatever the machine has.
    component::run(std::thread::available_parallelism()?.get(), serve(options))
}

/// A folder that goes away with the process, in memory where there is such a place.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> anyhow::Result<Self> {
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let folder = parent.join(format!("virtfold-simulation-{}", std::process::id()));
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(Self(folder))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

async fn serve(options: SimulateNodes) -> anyhow::Result<()> {
    let telemetry = telemetry::init(&telemetry::Options {
        service: "virtfold-simulation",
        otlp_endpoint: options.otlp_endpoint.clone(),
        speaks_for: Some("virtfold-launcher"),
        log_filter: options.log.clone(),
        ..telemetry::Options::default()
    })?;
    let pki = Pki::open(&options.pki)?;
    let identity = move |node: &str| {
        let identity = pki.node(node)?;
        Ok(Tls { ca: pki.ca().to_owned(), cert: identity.cert, key: identity.key })
    };
    let scratch = if options.state_dir.is_none() { Some(Scratch::new()?) } else { None };
    let state_dir = options.state_dir.or_else(|| scratch.as_ref().map(|s| s.0.clone())).unwrap_or_default();
    let stop = CancellationToken::new();
    until_asked(&stop)?;
    let lease = reconcilers::LeaseConfig::default();
    let result = simulation::run(simulation::Config {
        client: client(&options.kubeconfig, "virtfold-simulate-nodes", &Default::default()).await?,
        count: options.count,
        prefix: options.prefix,
        address: options.address,
        identity: Box::new(identity),
        state_dir,
        capacity: Capacity { cpu: options.cpu, memory: options.memory, pods: options.pods },
        delays: Delays {
            start: options.start_delay,
            boot: options.boot_delay,
            guest_agent: options.guest_agent,
            shutdown: options.shutdown_delay,
        },
        kubelet: options.kubelet,
        scheduler: options.scheduler,
        lease: (lease.namespace, lease.name),
        keep_nodes: options.keep_nodes,
        stop,
    })
    .await;
    telemetry.shutdown().await;
    drop(scratch);
    Ok(result?)
}
