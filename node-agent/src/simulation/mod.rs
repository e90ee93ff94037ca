//! Many nodes in one process, to size a cluster: real agents with real sessions, over launchers and guests that are models.
//!
//! Each node has a Node object, an agent that serves gRPC with a certificate of its own, and the pods that are bound to it. The
//! agents are those of real nodes, so what a controller sends and hears, and what the API server is asked, is what as many
//! real nodes would cost; only what happens inside of a pod is a model with [`Delays`].
//!
//! A simulation of the network has the parts one by one: a [`Place`] is a node's pods with their machines, [`run_pods`] is the
//! kubelet of places, and whoever implements [`Observe`] hears what really happens.
//!
//! Somebody has to be the kubelet: this process ([`Config::kubelet`]), or whoever else writes the pods' status; then a launcher
//! runs here once its pod is said to.

mod kubelet;
mod machine;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use proto::transport::Tls;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::launchers::{Launcher, Launchers, Names, Prepared};
use crate::{Accelerator, Offers, PodFacts, PodSource};
use machine::Machine;
pub use machine::Observe;

/// How the modelled guests are run.
const ACCELERATOR: &str = "kvm";
/// CPU models that guests of a modelled node can name.
const CPU_MODELS: [&str; 8] = [
    "Nehalem",
    "SandyBridge",
    "Haswell",
    "Broadwell",
    "Skylake-Client",
    "Skylake-Server",
    "Cascadelake-Server",
    "EPYC",
];
/// More room for containers than anybody asks for.
const EPHEMERAL: &str = "1Ti";
/// Nodes that are written at the same time.
const AT_ONCE: usize = 16;

/// What a modelled node has for guests.
pub fn accelerator() -> Accelerator {
    let strings = |all: &[&str]| all.iter().map(|s| (*s).to_owned()).collect();
    let offers = Offers { cpu_models: strings(&CPU_MODELS), machine_types: strings(&["q35"]), ..Offers::default() };
    Accelerator { name: ACCELERATOR.into(), cpu_model: CPU_MODELS[0].into(), offers }
}

/// How long the modelled parts take.
#[derive(Debug, Clone)]
pub struct Delays {
    /// From a pod's binding until its container runs (kubelet).
    pub start: Duration,
    /// From the instruction to start until vCPUs run.
    pub boot: Duration,
    /// From then until the guest agent answers; `None`: guests have none.
    pub guest_agent: Option<Duration>,
    /// From the power button until the guest is off.
    pub shutdown: Duration,
}

impl Default for Delays {
    fn default() -> Self {
        let none = Duration::ZERO;
        Self { start: none, boot: none, guest_agent: None, shutdown: none }
    }
}

/// What each node says it has.
#[derive(Debug, Clone)]
pub struct Capacity {
    /// CPUs, a Kubernetes quantity.
    pub cpu: String,
    /// Memory, a Kubernetes quantity.
    pub memory: String,
    /// Pods.
    pub pods: u32,
}

/// The identity of the node of that name.
pub type Identify = Box<dyn Fn(&str) -> Result<Tls, BoxError> + Send + Sync>;

/// Who hears of the node of that name.
pub type Listen = Box<dyn Fn(&str) -> Arc<dyn Observe> + Send + Sync>;

/// What a simulation is told.
pub struct Config {
    /// The API server. The rights of all nodes, and of the scheduler where that is played.
    pub client: kube::Client,
    /// Number of nodes.
    pub count: u32,
    /// Their names are this and a number.
    pub prefix: String,
    /// Where their agents listen, each at a port of its own.
    pub address: IpAddr,
    /// The identity of a node.
    pub identity: Identify,
    /// Memory of the agents, a folder each.
    pub state_dir: PathBuf,
    /// What the nodes say they have.
    pub capacity: Capacity,
    /// Delays of pods and guests.
    pub delays: Delays,
    /// Play the kubelet: run, end and remove the launcher pods, renew the nodes' Leases.
    pub kubelet: bool,
    /// Play the scheduler for launcher pods: bind them to the nodes in turn.
    pub scheduler: bool,
    /// Namespace and name of the controller's Lease.
    pub lease: (String, String),
    /// Who hears what really happens in the launchers of a node.
    pub observe: Option<Listen>,
    /// Leave the Node objects behind at the end.
    pub keep_nodes: bool,
    /// Ends the simulation.
    pub stop: CancellationToken,
}

/// The simulation could not start or go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No identity for a node.
    #[error("no certificate for node {node}")]
    Identity {
        /// Which.
        node: String,
        /// Why.
        #[source]
        source: BoxError,
    },
    /// No port for an agent.
    #[error("the agent of node {node} cannot listen on {address}")]
    Listen {
        /// Which.
        node: String,
        /// Where.
        address: IpAddr,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The API server does not take a Node.
    #[error("writing node {node}")]
    Node {
        /// Which.
        node: String,
        /// Why.
        #[source]
        source: kube::Error,
    },
    /// An agent ended.
    #[error("the agent of node {node}")]
    Agent {
        /// Which.
        node: String,
        /// Why.
        #[source]
        source: crate::Error,
    },
}

/// What the kubelet and the scheduler of simulated nodes need.
#[derive(Clone)]
pub struct Pods {
    /// The API server, with the rights of the nodes.
    pub client: kube::Client,
    /// Delays of pods and guests.
    pub delays: Delays,
    /// As [`Config::kubelet`].
    pub kubelet: bool,
    /// As [`Config::scheduler`].
    pub scheduler: bool,
    /// Address of the nodes.
    pub address: IpAddr,
    /// What each node says it has.
    pub capacity: Capacity,
    /// Ends it.
    pub stop: CancellationToken,
}

/// Any error.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A pod on a node, and the machine in it.
#[derive(Debug, Clone)]
struct Resident {
    facts: PodFacts,
    machine: Machine,
    /// Somebody wants the pod gone.
    deleted: CancellationToken,
}

/// The pods of one node.
pub struct Place {
    name: String,
    pods: Mutex<BTreeMap<String, Resident>>,
    changed: watch::Sender<u64>,
    observe: Option<Arc<dyn Observe>>,
}

/// How a modelled guest ends by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It powers itself off.
    PowerOff,
    /// Its hypervisor crashes.
    Crash,
}

impl Place {
    /// A node without pods.
    #[must_use]
    pub fn new(name: String, observe: Option<Arc<dyn Observe>>) -> Self {
        // Everything was enumerated: there is nothing.
        Self { name, pods: Mutex::default(), changed: watch::Sender::new(1), observe }
    }

    /// The node's pods as its agent sees them, and the launchers in them.
    #[must_use]
    pub fn view(self: &Arc<Self>) -> (Arc<dyn PodSource>, Arc<dyn Launchers>) {
        let view = Arc::new(View(self.clone()));
        (view.clone(), view)
    }

    /// The node.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// UIDs of its pods.
    #[must_use]
    pub fn pods(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    /// The guest in this pod ends. Whether it ran.
    pub fn end_guest(&self, pod: &str, ending: Ending) -> bool {
        self.find(pod).is_some_and(|resident| resident.machine.end_by_itself(ending))
    }

    /// The power goes: whatever ran here runs no more, and nobody says so.
    pub fn power_off(&self) {
        let pods = std::mem::take(&mut *self.lock());
        for resident in pods.into_values() {
            resident.machine.vanish();
        }
        self.changed.send_modify(|n| *n += 1);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Resident>> {
        // Nothing inside can panic half-way through a change.
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A pod is here; the same one where it is known.
    fn admit(&self, facts: PodFacts, delays: &Delays) -> Resident {
        let resident = {
            let mut pods = self.lock();
            let known = pods.entry(facts.pod_uid.clone()).or_insert_with(|| {
                let machine = Machine::new(&facts, delays.clone(), self.observe.clone());
                Resident { facts, machine, deleted: CancellationToken::new() }
            });
            known.clone()
        };
        self.changed.send_modify(|n| *n += 1);
        resident
    }

    /// Its container runs, or has ended.
    fn set_running(&self, pod: &str, running: bool) {
        if let Some(resident) = self.lock().get_mut(pod) {
            resident.facts.running = running;
        }
        self.changed.send_modify(|n| *n += 1);
    }

    /// It is completely gone.
    fn remove(&self, pod: &str) {
        self.lock().remove(pod);
        self.changed.send_modify(|n| *n += 1);
    }

    fn find(&self, pod: &str) -> Option<Resident> {
        self.lock().get(pod).cloned()
    }
}

/// A node's pods as its agent sees them.
struct View(Arc<Place>);

impl PodSource for View {
    fn pods(&self) -> Vec<PodFacts> {
        self.0.lock().values().map(|r| r.facts.clone()).collect()
    }

    fn changed(&self) -> watch::Receiver<u64> {
        self.0.changed.subscribe()
    }
}

impl Launchers for View {
    fn connect(&self, pod: &PodFacts) -> BoxFuture<'static, Result<Arc<dyn Launcher>, String>> {
        let found = self.0.find(&pod.pod_uid).map(|r| Arc::new(r.machine) as Arc<dyn Launcher>);
        std::future::ready(found.ok_or_else(|| "the pod is gone".to_owned())).boxed()
    }

    fn network(&self, _: PodFacts, _: Bytes, _: Names) -> BoxFuture<'static, Prepared> {
        std::future::ready(Ok(None)).boxed()
    }
}

/// Runs the nodes until the simulation is stopped.
///
/// # Errors
/// When a node cannot be made or an agent fails.
pub async fn run(config: Config) -> Result<(), Error> {
    let names: Vec<String> = (0..config.count).map(|n| format!("{}{n}", config.prefix)).collect();
    let pods = Arc::new(Pods::of(&config));
    let results: Vec<Result<(), Error>> =
        futures::stream::iter(&names).map(|name| write_node(&pods, name)).buffer_unordered(AT_ONCE).collect().await;
    results.into_iter().collect::<Result<(), Error>>()?;

    let mut places = BTreeMap::new();
    let mut agents = JoinSet::new();
    for name in &names {
        let place = Arc::new(Place::new(name.clone(), config.observe.as_ref().map(|listen| listen(name))));
        places.insert(name.clone(), place.clone());
        agents.spawn(agent(&config, name, place).await?);
    }
    tracing::info!(nodes = names.len(), "the simulated nodes run");
    let pods = kubelet::run(pods, places);
    let result = tokio::select! {
        () = config.stop.cancelled() => Ok(()),
        ended = agents.join_next() => match ended {
            Some(Ok(result)) => result,
            Some(Err(_)) | None => Ok(()),
        },
        () = pods => Ok(()),
    };
    config.stop.cancel();
    while agents.join_next().await.is_some() {}
    if !config.keep_nodes {
        let nodes: Api<Node> = Api::all(config.client.clone());
        let removed = futures::stream::iter(&names).map(|name| {
            let nodes = nodes.clone();
            async move { nodes.delete(name, &DeleteParams::default()).await.map(drop) }
        });
        for result in removed.buffer_unordered(AT_ONCE).collect::<Vec<_>>().await {
            if let Err(error) = result {
                tracing::warn!(%error, "removing a simulated node");
            }
        }
    }
    result
}

impl Pods {
    fn of(config: &Config) -> Self {
        Self {
            client: config.client.clone(),
            delays: config.delays.clone(),
            kubelet: config.kubelet,
            scheduler: config.scheduler,
            address: config.address,
            capacity: config.capacity.clone(),
            stop: config.stop.clone(),
        }
    }
}

/// Writes the node and runs its pods, until the API server's watch ends for good.
///
/// # Errors
/// The API server does not take the node.
pub async fn run_pods(pods: Pods, place: Arc<Place>) -> Result<(), Error> {
    write_node(&pods, &place.name).await?;
    kubelet::run(Arc::new(pods), BTreeMap::from([(place.name.clone(), place)])).await;
    Ok(())
}

/// A node's agent, ready to run.
async fn agent(
    config: &Config,
    name: &str,
    place: Arc<Place>,
) -> Result<impl Future<Output = Result<(), Error>> + use<>, Error> {
    let listen = |source| Error::Listen { node: name.to_owned(), address: config.address, source };
    let listener = TcpListener::bind((config.address, 0)).await.map_err(listen)?;
    let address = listener.local_addr().map_err(listen)?.to_string();
    let tls = (config.identity)(name).map_err(|source| Error::Identity { node: name.to_owned(), source })?;
    let view = Arc::new(View(place));
    let found = accelerator();
    let agent = crate::Config {
        node_name: name.to_owned(),
        client: config.client.clone(),
        incoming: proto::transport::incoming(listener),
        address,
        tls,
        state_dir: config.state_dir.join(name),
        disk: crate::Disk::Threads,
        boot_id: crate::boot_id().map_err(|source| Error::Agent { node: name.to_owned(), source })?,
        pods: view.clone(),
        probe: Box::new(move || std::future::ready(found.clone()).boxed()),
        lease: config.lease.clone(),
        dns: Vec::new(),
        cluster_domain: String::new(),
        journal: None,
        usage: None,
        shutdown: config.stop.clone(),
    };
    let node = name.to_owned();
    Ok(async move { crate::run_with(agent, view).await.map_err(|source| Error::Agent { node, source }) })
}

/// Makes a Node object, or brings the one that is there up to date.
async fn write_node(config: &Pods, name: &str) -> Result<(), Error> {
    let failed = |source| Error::Node { node: name.to_owned(), source };
    let nodes: Api<Node> = Api::all(config.client.clone());
    let node = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": {
            "kubernetes.io/hostname": name, "kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux",
            "virtfold.io/simulated": "true",
        }},
    });
    let node: Node = serde_json::from_value(node).map_err(|e| failed(kube::Error::SerdeError(e)))?;
    match nodes.create(&PostParams::default(), &node).await {
        Err(kube::Error::Api(status)) if status.code == 409 => {}
        other => drop(other.map_err(failed)?),
    }
    let amounts = json!({
        "cpu": config.capacity.cpu, "memory": config.capacity.memory, "pods": config.capacity.pods.to_string(),
        crate::node::KVM: crate::node::KVM_COUNT, "ephemeral-storage": EPHEMERAL,
    });
    let status = json!({
        "capacity": amounts, "allocatable": amounts,
        "addresses": [{"type": "InternalIP", "address": config.address}, {"type": "Hostname", "address": name}],
        "conditions": [{"type": "Ready", "status": "True", "reason": "Simulated", "message": "this node is a model",
                        "lastHeartbeatTime": kubelet::time(), "lastTransitionTime": kubelet::time()}],
        "nodeInfo": {"architecture": "amd64", "operatingSystem": "linux", "kubeletVersion": "simulated",
                     "bootID": "", "containerRuntimeVersion": "model://1", "kernelVersion": "", "kubeProxyVersion": "",
                     "machineID": "", "osImage": "", "systemUUID": ""},
    });
    let patch = Patch::Merge(json!({"status": status}));
    nodes.patch_status(name, &PatchParams::default(), &patch).await.map_err(failed).map(drop)
}
