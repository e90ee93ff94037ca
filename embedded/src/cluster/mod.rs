//! What kube-controller-manager and kube-scheduler do in a big cluster, as far as the kinds served here need it.
//!
//! Each controller is level-driven: it is woken when anything that it looks at has changed (or at a deadline that it asked
//! for), looks at all of it, and writes where the world differs from what it should be. Wakes coalesce, so a burst of a
//! thousand changes costs a few passes. Nothing polls. A pass that fails is done again after a wait.
//!
//! | module | owns |
//! |---|---|
//! | [`gc`] | deletion of what has no owner any more, the finalizers `foregroundDeletion` and `orphan` |
//! | [`namespaces`] | emptying of namespaces, the service account `default` |
//! | [`nodes`] | Node conditions when the kubelet is silent, taints, eviction by taint |
//! | [`podgc`] | pods of nodes that are gone |
//! | [`claims`] | binding, provisioning and reclaiming of volumes |
//! | [`scheduler`] | `spec.nodeName` of pods, condition PodScheduled |
//! | [`bootstrap`] | objects that every cluster has |

pub mod bootstrap;
pub mod cache;
pub mod claims;
pub mod gc;
pub mod namespaces;
pub mod nodes;
pub mod notes;
pub mod podgc;
pub mod scheduler;

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod, ServiceAccount};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::{Api, Client};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use cache::Cache;

/// Wait after a pass that failed; doubles up to [`RETRY_MAX`].
const RETRY_MIN: Duration = Duration::from_millis(100);
/// Longest wait after a pass that failed.
const RETRY_MAX: Duration = Duration::from_secs(15);

/// What the controllers are told.
#[derive(Debug, Clone)]
pub struct Options {
    /// Folder of the volumes' files.
    pub volumes: PathBuf,
    /// Folder from which volumes may be filled (`virtfold.io/import`).
    pub imports: PathBuf,
}

/// One controller.
pub trait Controller: Send + 'static {
    /// Its name in the log.
    const NAME: &'static str;
    /// Looks at everything once; when to look again although nothing has changed.
    fn pass(&mut self) -> impl Future<Output = Result<Option<Duration>, kube::Error>> + Send;
}

/// Runs a controller until `stop`: a pass at each wake or deadline.
pub async fn drive<C: Controller>(mut controller: C, wake: Arc<Notify>, stop: CancellationToken) {
    let mut retry = RETRY_MIN;
    loop {
        let next = match controller.pass().await {
            Ok(next) => {
                retry = RETRY_MIN;
                next
            }
            // Somebody was quicker; the cache will say what there is now.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {
                retry = (retry * 2).min(RETRY_MAX);
                Some(retry)
            }
            Err(error) => {
                tracing::warn!(controller = C::NAME, %error, "a pass failed; again in {retry:?}");
                retry = (retry * 2).min(RETRY_MAX);
                Some(retry)
            }
        };
        let deadline = async {
            match next {
                Some(wait) => tokio::time::sleep(wait).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = wake.notified() => {}
            () = deadline => {}
        }
    }
}

/// The watch caches that the controllers share.
#[derive(Debug, Clone)]
pub struct Caches {
    pods: Cache<Pod>,
    nodes: Cache<Node>,
    claims: Cache<PersistentVolumeClaim>,
    volumes: Cache<PersistentVolume>,
    classes: Cache<StorageClass>,
    namespaces: Cache<Namespace>,
    accounts: Cache<ServiceAccount>,
    leases: Cache<Lease>,
}

/// Runs the scheduler alone until `stop`, for a control plane of somebody else that has none.
pub async fn schedule(client: Client, stop: CancellationToken) {
    let (caches, tasks) = (Caches::new(), TaskTracker::new());
    caches.fill_scheduler(&client, &tasks, &stop);
    tokio::join!(caches.pods.ready(), caches.nodes.ready(), caches.claims.ready(), caches.namespaces.ready());
    let wake = caches.wake(&[Input::Pods, Input::Nodes, Input::Claims, Input::Namespaces]);
    let notes = notes::Notes::new(client.clone());
    tasks.spawn(drive(scheduler::Scheduler::new(client, caches, notes), wake, stop));
    tasks.close();
    tasks.wait().await;
}

/// Runs all controllers until `stop`. Returns when all of them have ended.
pub async fn run(client: Client, options: Options, stop: CancellationToken) {
    let (caches, tasks) = (Caches::new(), TaskTracker::new());
    let all = |client: &Client| client.clone();
    caches.fill_scheduler(&client, &tasks, &stop);
    tasks.spawn(caches.volumes.clone().fill(Api::all(all(&client)), |_| {}, stop.clone()));
    tasks.spawn(caches.classes.clone().fill(Api::all(all(&client)), |_| {}, stop.clone()));
    tasks.spawn(caches.accounts.clone().fill(Api::all(all(&client)), |_| {}, stop.clone()));
    tasks.spawn(caches.leases.clone().fill(Api::namespaced(all(&client), nodes::LEASES), |_| {}, stop.clone()));
    caches.ready().await;

    let notes = notes::Notes::new(client.clone());
    let wake = caches.wake(&[Input::Pods, Input::Nodes, Input::Claims, Input::Namespaces]);
    tasks.spawn(drive(scheduler::Scheduler::new(client.clone(), caches.clone(), notes.clone()), wake, stop.clone()));
    let wake = caches.wake(&[Input::Pods, Input::Claims, Input::Volumes, Input::Classes]);
    let claims = claims::Claims::new(client.clone(), caches.clone(), notes.clone(), options);
    tasks.spawn(drive(claims, wake, stop.clone()));
    let wake = caches.wake(&[Input::Pods, Input::Nodes]);
    tasks.spawn(drive(podgc::PodGc::new(client.clone(), caches.clone()), wake, stop.clone()));
    let wake = caches.wake(&[Input::Pods, Input::Nodes, Input::Leases]);
    tasks.spawn(drive(nodes::Nodes::new(client.clone(), caches.clone(), notes), wake, stop.clone()));

    let graph = gc::Graph::new(client.clone());
    let wake = caches.wake(&[Input::Namespaces, Input::Accounts]);
    graph.wakes(wake.clone());
    let namespaces = namespaces::Namespaces::new(client.clone(), caches.clone(), graph.clone());
    tasks.spawn(drive(namespaces, wake, stop.clone()));
    let wake = Arc::new(Notify::new());
    graph.wakes(wake.clone());
    tasks.spawn(graph.clone().feed(stop.clone()));
    tasks.spawn(drive(gc::Collector::new(client, graph), wake, stop.clone()));
    tasks.close();
    tasks.wait().await;
}

/// What can wake a controller.
#[derive(Debug, Clone, Copy)]
enum Input {
    Pods,
    Nodes,
    Claims,
    Volumes,
    Classes,
    Namespaces,
    Accounts,
    Leases,
}

impl Caches {
    fn new() -> Self {
        Self {
            pods: Cache::new(),
            nodes: Cache::new(),
            claims: Cache::new(),
            volumes: Cache::new(),
            classes: Cache::new(),
            namespaces: Cache::new(),
            accounts: Cache::new(),
            leases: Cache::new(),
        }
    }

    /// Fills what the scheduler looks at.
    fn fill_scheduler(&self, client: &Client, tasks: &TaskTracker, stop: &CancellationToken) {
        let all = || client.clone();
        tasks.spawn(self.pods.clone().fill(Api::all(all()), cache::slim_pod, stop.clone()));
        tasks.spawn(self.nodes.clone().fill(Api::all(all()), cache::slim_node, stop.clone()));
        tasks.spawn(self.claims.clone().fill(Api::all(all()), |_| {}, stop.clone()));
        tasks.spawn(self.namespaces.clone().fill(Api::all(all()), |_| {}, stop.clone()));
    }

    async fn ready(&self) {
        self.pods.ready().await;
        self.nodes.ready().await;
        self.claims.ready().await;
        self.volumes.ready().await;
        self.classes.ready().await;
        self.namespaces.ready().await;
        self.accounts.ready().await;
        self.leases.ready().await;
    }

    fn wake(&self, inputs: &[Input]) -> Arc<Notify> {
        let wake = Arc::new(Notify::new());
        for input in inputs {
            let wake = wake.clone();
            match input {
                Input::Pods => self.pods.wakes(wake),
                Input::Nodes => self.nodes.wakes(wake),
                Input::Claims => self.claims.wakes(wake),
                Input::Volumes => self.volumes.wakes(wake),
                Input::Classes => self.classes.wakes(wake),
                Input::Namespaces => self.namespaces.wakes(wake),
                Input::Accounts => self.accounts.wakes(wake),
                Input::Leases => self.leases.wakes(wake),
            }
        }
        wake
    }
}

#[cfg(test)]
mod tests;
