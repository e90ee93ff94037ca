//! `virtfold simulate-nodes`: real node agents over modelled launchers and guests, many in one process.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use embedded::pki::Pki;
use node_agent::PodFacts;
use node_agent::simulation::{self, Capacity, Delays, Observe};
use proto::launcher::Order;
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

/// Writes down what really happens on a node.
struct Teller {
    node: String,
    file: Arc<Mutex<File>>,
}

impl Teller {
    fn tell(&self, what: &str, pod: &PodFacts, more: serde_json::Value) {
        let mut line = serde_json::json!({
            "what": what, "node": self.node, "pod": pod.pod_uid, "vmi": pod.vmi_uid,
            "namespace": pod.namespace, "machine": pod.vmi_name, "more": more,
        })
        .to_string();
        line.push('\n');
        // One write a line: whoever reads sees whole ones.
        let written = self.file.lock().unwrap_or_else(PoisonError::into_inner).write_all(line.as_bytes());
        if let Err(error) = written {
            tracing::error!(%error, "what happens cannot be told");
        }
    }
}

impl Observe for Teller {
    fn begins(&self, pod: &PodFacts, launcher: &str, order: &Order) {
        let Some(i) = &order.instruct else { return };
        let kind = proto::convert::instruct_kind(i.kind).map(|kind| format!("{kind:?}"));
        let more = serde_json::json!({
            "launcher": launcher, "kind": kind, "id": i.id, "version": i.vmi_rv, "epoch": i.epoch,
        });
        self.tell("begins", pod, more);
    }

    fn executes(&self, pod: &PodFacts) {
        self.tell("executes", pod, serde_json::Value::Null);
    }

    fn ended(&self, pod: &PodFacts) {
        self.tell("ended", pod, serde_json::Value::Null);
    }
}

fn teller(path: &Path) -> anyhow::Result<simulation::Listen> {
    let file = File::options().create(true).append(true).open(path);
    let file = Arc::new(Mutex::new(file.with_context(|| format!("cannot write {}", path.display()))?));
    Ok(Box::new(move |node| Arc::new(Teller { node: node.to_owned(), file: file.clone() })))
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
        observe: options.tell.as_deref().map(teller).transpose()?,
        keep_nodes: options.keep_nodes,
        stop,
    })
    .await;
    telemetry.shutdown().await;
    drop(scratch);
    Ok(result?)
}
