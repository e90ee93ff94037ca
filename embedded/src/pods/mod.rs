//! The pod runner: what the kubelet is to a launcher pod.
//!
//! It owns the node's object and Lease, and of the pods that are bound to its node the containers, their networks, addresses,
//! folders and logs, and the pods' status but for the readiness gates. It runs launcher pods and nothing else. Each pod has a task
//! ([`worker`]) and a durable record ([`record`]); the container is runc's ([`bundle`] says what is in it).
//!
//! **What may be lost or come twice.** The runner may die at any line. Containers outlive it: their output is a file, their
//! processes belong to nobody else. A new runner reads the records, finds each container again by pid and start time, and
//! goes on; a container is never started a second time, because "starting" is on disk before the start and what is found
//! in doubt counts as ended. An exit code that nobody collected is 137 with the reason `ContainerStatusUnknown`; the
//! termination message is in a file and survives.
//!
//! **Absence is not evidence.** A pod that vanishes from the watch is taken down only when a live read says that it is gone.
//!
//! Places: `DATA/nodes/<node>/pods/<uid>/` has record, log, bundle and emptyDirs, `RUN/<node>/<uid>/` is the folder that agent and
//! launcher share, `RUN/<node>/.runc/` is the runtime's. There are no mounts on the machine: all of them live in the
//! containers' namespaces. Secrets are written into a tmpfs of the container between its creation and its start.

mod bundle;
mod exit;
mod fields;
mod follow;
pub mod ipam;
mod logs;
mod node;
mod probes;
mod record;
mod runc;
mod sandbox;
mod seccomp;
mod status;
mod volumes;
mod worker;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

pub use ipam::IpamError;
pub use logs::NodeLogs;
pub use runc::RuncError;
pub use sandbox::Network;
pub(crate) use worker::telling;

use crate::images::ImageStore;
use crate::lock::{Lock, LockError};
use crate::netns::{Netns, NetnsError};
use ipam::Ipam;
use record::{Places, Record, Stage};
use runc::Runc;
use worker::{Seen, Worker};

/// How long a live read may take.
const REQUEST: Duration = Duration::from_secs(10);
/// Waits between attempts to reach the API server.
const AGAIN: Duration = Duration::from_secs(2);

/// What a runner needs to know.
#[derive(Clone)]
pub struct Config {
    /// Name of the node.
    pub node_name: String,
    /// ID of the cluster (first 8 hex digits of the hash of its data folder); names containers and network namespaces.
    pub cluster_id: String,
    /// The API, with the rights of a node.
    pub client: Client,
    /// `DATA/nodes/<node>`.
    pub data_dir: PathBuf,
    /// `RUN/<node>`.
    pub run_dir: PathBuf,
    /// `DATA/volumes`.
    pub volumes_root: PathBuf,
    /// Images, shared by all nodes of the machine.
    pub images: Arc<ImageStore>,
    /// The pods' network; none for tests without one: a pod then has a namespace with a loopback interface.
    pub network: Option<Network>,
    /// The program that is mounted into launchers' containers.
    pub binary: PathBuf,
    /// Folders that no launcher may see even where a system folder has them (DATA, RUN).
    pub private: Vec<PathBuf>,
    /// Give launchers `/dev/kvm`: the node's accelerator is kvm.
    pub kvm: bool,
    /// runc.
    pub runc: PathBuf,
    /// Labels of the node beside the usual ones.
    pub labels: BTreeMap<String, String>,
    /// Variables that containers get which have none of that name.
    pub environment: BTreeMap<String, String>,
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Config")
            .field("node_name", &self.node_name)
            .field("data_dir", &self.data_dir)
            .finish_non_exhaustive()
    }
}

/// Why the runner cannot run.
#[derive(Debug, thiserror::Error)]
pub enum PodsError {
    /// Another runner has the node.
    #[error("the node is taken")]
    Lock(#[from] LockError),
    /// The addresses.
    #[error(transparent)]
    Ipam(#[from] IpamError),
    /// A folder cannot be made or read.
    #[error("the folder {path} of the node", path = .path.display())]
    Folder {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The kernel does not give orphans to this process.
    #[error("cannot become the parent of orphaned containers")]
    Subreaper(#[source] nix::Error),
    /// The remains of a pod cannot be removed.
    #[error(transparent)]
    Runtime(#[from] RuncError),
    /// The network.
    #[error(transparent)]
    Network(#[from] NetnsError),
}

/// What the node agent needs to know of a launcher pod on its node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodInfo {
    /// UID of the pod.
    pub pod_uid: String,
    /// UID of the VMI: label `kubevirt.io/created-by`.
    pub vmi_uid: String,
    /// Name of the VMI: annotation `kubevirt.io/domain`.
    pub vmi_name: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// Folder with the launcher's sockets, on the machine.
    pub share_dir: PathBuf,
    /// File of the pod's network namespace.
    pub netns: PathBuf,
    /// Its addresses.
    pub ips: Vec<IpAddr>,
    /// Whether its container runs.
    pub running: bool,
    /// Process 1 of the container, as the machine numbers it.
    pub main_pid: Option<i32>,
}

pub(crate) struct Shared {
    config: Config,
    runc: Runc,
    ipam: Ipam,
    machine: node::Machine,
    pods: Mutex<BTreeMap<String, PodInfo>>,
    changed: watch::Sender<u64>,
}

impl Shared {
    fn container_id(&self, uid: &str) -> String {
        format!("vf-{}-{uid}", self.config.cluster_id)
    }

    fn node_address(&self) -> Ipv4Addr {
        self.config.network.as_ref().map_or(Ipv4Addr::LOCALHOST, |n| n.node_address)
    }

    fn host_ip(&self) -> String {
        self.node_address().to_string()
    }

    fn publish(&self, info: PodInfo) {
        let mut pods = self.pods.lock().unwrap_or_else(PoisonError::into_inner);
        if pods.get(&info.pod_uid) != Some(&info) {
            pods.insert(info.pod_uid.clone(), info);
            self.changed.send_modify(|n| *n += 1);
        }
    }

    fn forget(&self, uid: &str) {
        if self.pods.lock().unwrap_or_else(PoisonError::into_inner).remove(uid).is_some() {
            self.changed.send_modify(|n| *n += 1);
        }
    }
}

/// The pod runner of one node.
pub struct Runner {
    shared: Arc<Shared>,
    records: Vec<Record>,
    _lock: Lock,
}

impl std::fmt::Debug for Runner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Runner").field("config", &self.shared.config).finish_non_exhaustive()
    }
}

/// A view of a runner's pods that outlives the borrow of the runner: what the node agent holds.
#[derive(Clone)]
pub struct Pods {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Pods {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pods").field("node", &self.shared.config.node_name).finish_non_exhaustive()
    }
}

impl Pods {
    /// The launcher pods on this node, from before the runner's start on.
    #[must_use]
    pub fn pods(&self) -> Vec<PodInfo> {
        self.shared.pods.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Changes when the pods do.
    #[must_use]
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.shared.changed.subscribe()
    }
}

impl Runner {
    /// Takes the node: its lock, its addresses, the records of its pods. When this returns [`Pods::pods`] is complete: it has every
    /// pod that an earlier runner left running. Makes this process the parent of orphaned containers.
    ///
    /// # Errors
    /// When another runner has the node, or its folders cannot be used.
    pub fn new(mut config: Config) -> Result<Self, PodsError> {
        if let Some(network) = &mut config.network {
            // Any address of the range names it.
            let mask = u32::MAX.checked_shl(32u32.saturating_sub(network.prefix.into())).unwrap_or(0);
            network.base = Ipv4Addr::from(u32::from(network.base) & mask);
        }
        let pods_dir = config.data_dir.join("pods");
        let runc_root = config.run_dir.join(".runc");
        for path in [&pods_dir, &runc_root] {
            std::fs::create_dir_all(path).map_err(|source| PodsError::Folder { path: path.clone(), source })?;
        }
        for path in [&config.run_dir, &runc_root] {
            // The share folders below belong to uid 107, which the machine may have given to somebody else.
            std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o700))
                .map_err(|source| PodsError::Folder { path: path.clone(), source })?;
        }
        let lock = Lock::take(&pods_dir)?;
        nix::sys::prctl::set_child_subreaper(true).map_err(PodsError::Subreaper)?;
        let (base, prefix) = config.network.as_ref().map_or((Ipv4Addr::new(127, 1, 0, 0), 24), |n| (n.base, n.prefix));
        let ipam = Ipam::open(&config.data_dir.join("ipam.json"), base, prefix)?;
        let machine = node::Machine::look(&config.data_dir);
        let runc = Runc { program: config.runc.clone(), root: runc_root };
        let (changed, _) = watch::channel(0);
        let mut records = Vec::new();
        let entries =
            std::fs::read_dir(&pods_dir).map_err(|source| PodsError::Folder { path: pods_dir.clone(), source })?;
        for entry in entries.flatten().filter(|e| e.path().is_dir()) {
            let places = Places { folder: entry.path() };
            match Record::load(&places) {
                Some(record) => records.push(record),
                // The record is the first thing that is written.
                None => drop(std::fs::remove_dir_all(&places.folder)),
            }
        }
        let shared = Arc::new(Shared { config, runc, ipam, machine, pods: Mutex::default(), changed });
        for record in &records {
            let (sender, receiver) = watch::channel(Seen::Unknown);
            drop(sender);
            Worker::new(shared.clone(), record.clone(), receiver).publish();
        }
        Ok(Self { shared, records, _lock: lock })
    }

    /// What the node agent holds.
    #[must_use]
    pub fn handle(&self) -> Pods {
        Pods { shared: self.shared.clone() }
    }

    /// The launcher pods on this node.
    #[must_use]
    pub fn pods(&self) -> Vec<PodInfo> {
        self.handle().pods()
    }

    /// Changes when the pods do.
    #[must_use]
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.handle().changed()
    }

    /// Runs until `stop`. Containers go on when it returns.
    ///
    /// # Errors
    /// When remains of an earlier time cannot be removed.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), PodsError> {
        self.sweep().await?;
        let mut tasks = JoinSet::new();
        tasks.spawn(keep_node(self.shared.clone()));
        let mut board = Board { shared: self.shared.clone(), workers: BTreeMap::new(), tasks: JoinSet::new() };
        for record in std::mem::take(&mut self.records) {
            board.start(record, Seen::Unknown);
        }
        let (gone, mut confirmed) = tokio::sync::mpsc::channel::<String>(64);
        let api: Api<Pod> = Api::all(self.shared.config.client.clone());
        let selector = watcher::Config::default().fields(&format!("spec.nodeName={}", self.shared.config.node_name));
        let begin = move || watcher(api.clone(), selector.clone()).default_backoff().boxed();
        let mut events = follow::follow(begin).boxed();
        let mut listed: Option<std::collections::BTreeSet<String>> = None;
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                event = events.next() => match event {
                    Some(Ok(watcher::Event::Init)) => listed = Some(std::collections::BTreeSet::new()),
                    Some(Ok(watcher::Event::InitApply(pod) | watcher::Event::Apply(pod))) => {
                        if let (Some(listed), Some(uid)) = (&mut listed, &pod.metadata.uid) {
                            listed.insert(uid.clone());
                        }
                        board.apply(pod);
                    }
                    Some(Ok(watcher::Event::InitDone)) => {
                        let listed = listed.take().unwrap_or_default();
                        board.absent(|uid| !listed.contains(uid), &gone, &mut tasks);
                    }
                    Some(Ok(watcher::Event::Delete(pod))) => {
                        let uid = pod.metadata.uid.clone().unwrap_or_default();
                        board.absent(|other| other == uid, &gone, &mut tasks);
                    }
                    Some(Err(e)) => warn!(error = %telling(&e), "the watch of pods"),
                    None => sleep(AGAIN).await,
                },
                Some(uid) = confirmed.recv() => board.gone(&uid),
                Some(_) = tasks.join_next(), if !tasks.is_empty() => {}
                Some(done) = board.tasks.join_next(), if !board.tasks.is_empty() => {
                    if let Ok(uid) = done {
                        board.workers.remove(&uid);
                    }
                }
            }
        }
        info!(node = %self.shared.config.node_name, "the pod runner stops; launchers go on");
        Ok(())
    }

    /// Removes what belongs to no record: containers, addresses with their network, share folders.
    async fn sweep(&self) -> Result<(), PodsError> {
        let known = |uid: &str| self.records.iter().any(|r| r.uid == uid);
        let prefix = self.shared.container_id("");
        for id in self.shared.runc.known() {
            if id.strip_prefix(&prefix).is_some_and(|uid| !known(uid)) {
                warn!(container = %id, "removing a container that belongs to no pod");
                self.shared.runc.delete(&id).await?;
            }
        }
        for uid in self.shared.ipam.holders() {
            if !known(&uid) {
                match &self.shared.config.network {
                    Some(network) => sandbox::remove(&self.shared.container_id(&uid), &uid, network).await?,
                    None => Netns::named(&self.shared.container_id(&uid)).remove().await?,
                }
                self.shared.ipam.free(&uid)?;
            }
        }
        for entry in std::fs::read_dir(&self.shared.config.run_dir).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if uuid::Uuid::parse_str(&name).is_ok() && !known(&name) {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
        Ok(())
    }
}

/// The workers by pod UID. Dropping it stops the tasks, not the containers.
struct Board {
    shared: Arc<Shared>,
    workers: BTreeMap<String, (watch::Sender<Seen>, String, String)>,
    tasks: JoinSet<String>,
}

impl Board {
    fn start(&mut self, record: Record, seen: Seen) {
        let uid = record.uid.clone();
        let (sender, receiver) = watch::channel(seen);
        self.workers.insert(uid.clone(), (sender, record.namespace.clone(), record.name.clone()));
        let worker = Worker::new(self.shared.clone(), record, receiver);
        self.tasks.spawn(async move {
            Box::pin(worker.run()).await;
            uid
        });
    }

    fn apply(&mut self, pod: Pod) {
        let Some(uid) = pod.metadata.uid.clone().filter(|uid| uuid::Uuid::parse_str(uid).is_ok()) else { return };
        if let Some((sender, ..)) = self.workers.get(&uid) {
            let _ = sender.send(Seen::Here(Arc::new(pod)));
            return;
        }
        let label = |name: &str| pod.metadata.labels.as_ref().and_then(|l| l.get(name)).cloned().unwrap_or_default();
        let record = Record {
            uid: uid.clone(),
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            name: pod.metadata.name.clone().unwrap_or_default(),
            vmi_uid: label(api::names::LABEL_CREATED_BY),
            vmi_name: pod
                .metadata
                .annotations
                .as_ref()
                .and_then(|a| a.get(api::names::ANN_DOMAIN))
                .cloned()
                .unwrap_or_default(),
            seen_at: record::now(),
            stage: Stage::Preparing,
            address: None,
            stopping: None,
            container: None,
            message_from_log: false,
        };
        if let Err(e) = std::fs::create_dir_all(Places::of(&self.shared.config.data_dir, &uid).folder) {
            warn!(pod = %record.name, error = %e, "cannot make the folder of a pod");
        }
        self.start(record, Seen::Here(Arc::new(pod)));
    }

    /// Asks for those that are not in the list any more, one by one, until the API answers.
    fn absent(&self, which: impl Fn(&str) -> bool, gone: &tokio::sync::mpsc::Sender<String>, tasks: &mut JoinSet<()>) {
        for (uid, (_, namespace, name)) in self.workers.iter().filter(|(uid, _)| which(uid)) {
            let api: Api<Pod> = Api::namespaced(self.shared.config.client.clone(), namespace);
            let (uid, name, gone) = (uid.clone(), name.clone(), gone.clone());
            tasks.spawn(async move {
                loop {
                    match timeout(REQUEST, api.get_opt(&name)).await {
                        Ok(Ok(Some(pod))) if pod.metadata.uid.as_deref() == Some(&uid) => return,
                        Ok(Ok(_)) => {
                            let _ = gone.send(uid).await;
                            return;
                        }
                        Ok(Err(e)) => warn!(pod = %name, error = %e, "cannot read a pod that vanished"),
                        Err(_) => {}
                    }
                    sleep(AGAIN).await;
                }
            });
        }
    }

    fn gone(&self, uid: &str) {
        if let Some((sender, ..)) = self.workers.get(uid) {
            let _ = sender.send(Seen::Gone);
        }
    }
}

/// Registers the node and renews its Lease.
async fn keep_node(shared: Arc<Shared>) {
    let network = shared.config.network.as_ref();
    let me = node::Identity {
        name: shared.config.node_name.clone(),
        address: shared.node_address(),
        pod_cidr: network.map_or_else(String::new, |n| format!("{}/{}", n.base, n.prefix)),
        kvm: shared.config.kvm,
        labels: shared.config.labels.clone(),
        machine: shared.machine.clone(),
    };
    let client = &shared.config.client;
    let node = loop {
        match timeout(REQUEST, node::register(client, &me)).await {
            Ok(Ok(node)) => break node,
            Ok(Err(e)) => warn!(node = %me.name, error = %telling(&e), "cannot register the node"),
            Err(_) => {}
        }
        sleep(AGAIN).await;
    };
    let mut heartbeat = tokio::time::interval(node::HEARTBEAT);
    heartbeat.reset();
    let mut renew = tokio::time::interval(node::RENEW);
    let mut heard = tokio::time::Instant::now();
    let mut short = None;
    loop {
        let live = async {
            node::renew(client, &node).await?;
            let now_short = Some(me.machine.is_short());
            // Who was silent for so long may have been given up, and only the node's status takes that back.
            if heard.elapsed() > node::LATE || short != now_short {
                node::heartbeat(client, &me, None).await?;
            }
            short = now_short;
            heard = tokio::time::Instant::now();
            Ok(())
        };
        let done = tokio::select! {
            _ = renew.tick() => timeout(REQUEST, live).await,
            _ = heartbeat.tick() => timeout(REQUEST, node::heartbeat(client, &me, None)).await,
        };
        if let Ok(Err(e)) = done {
            warn!(node = %me.name, error = %telling(&e), "cannot say that the node lives");
        }
    }
}
