//! The launcher pods of the simulated nodes: one watch for all of them, and, where wished for, scheduler and kubelet.

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::{WatchStreamExt, watcher};
use serde_json::{Value, json};

use super::{Place, Pods, Resident};
use crate::{PodFacts, limits};

/// A kubelet renews its Lease this often.
const LEASE: Duration = Duration::from_secs(10);
/// Namespace of the kubelets' Leases.
const LEASES: &str = "kube-node-lease";

type Places = BTreeMap<String, Arc<Place>>;

/// The present time, as the API writes it.
pub(super) fn time() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Follows the launcher pods, for ever.
pub(super) async fn run(config: Arc<Pods>, places: Places) {
    if config.kubelet {
        for place in places.values() {
            tokio::spawn(renew(config.clone(), place.name.clone()));
        }
    }
    let api: Api<Pod> = Api::all(config.client.clone());
    let launchers = format!("{}={}", api::names::LABEL_APP, api::names::APP_LAUNCHER);
    let pods = watcher(api, watcher::Config::default().labels(&launchers)).default_backoff();
    let mut cluster = Cluster { config, places, next: 0, bound: HashSet::new(), listed: None };
    let mut pods = pods.inspect_err(|error| tracing::warn!(%error, "watching pods")).boxed();
    while let Some(event) = pods.next().await {
        match event {
            Ok(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod)) => cluster.seen(&pod),
            Ok(watcher::Event::Delete(pod)) => cluster.gone(&uid(&pod)),
            Ok(watcher::Event::Init) => cluster.listed = Some(HashSet::new()),
            Ok(watcher::Event::InitDone) => cluster.compare(),
            Err(_) => {}
        }
    }
}

async fn renew(config: Arc<Pods>, node: String) {
    // The node was silent, and may have been called so.
    let mut silent = false;
    let leases: Api<Lease> = Api::namespaced(config.client.clone(), LEASES);
    loop {
        let now = jiff::Timestamp::now().strftime("%FT%T%.6fZ").to_string();
        let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": node},
            "spec": {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": now}});
        let patch = Patch::Merge(json!({"spec": lease["spec"]}));
        let written = match leases.patch(&node, &PatchParams::default(), &patch).await {
            Err(kube::Error::Api(status)) if status.code == 404 => match serde_json::from_value(lease) {
                Ok(lease) => leases.create(&PostParams::default(), &lease).await,
                Err(error) => Err(kube::Error::SerdeError(error)),
            },
            other => other,
        };
        match written {
            Err(error) => {
                silent = true;
                tracing::debug!(%error, node, "renewing a Lease");
            }
            Ok(_) if silent => silent = super::write_node(&config, &node).await.is_err(),
            Ok(_) => {}
        }
        tokio::select! {
            () = config.stop.cancelled() => return,
            () = tokio::time::sleep(LEASE) => {}
        }
    }
}

struct Cluster {
    config: Arc<Pods>,
    places: Places,
    /// Which node is next.
    next: usize,
    /// Pods that are being bound.
    bound: HashSet<String>,
    /// What a new list has had until now.
    listed: Option<HashSet<String>>,
}

fn uid(pod: &Pod) -> String {
    pod.metadata.uid.clone().unwrap_or_default()
}

fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|s| s.phase.as_deref()).unwrap_or_default()
}

impl Cluster {
    fn seen(&mut self, pod: &Pod) {
        if let Some(listed) = &mut self.listed {
            listed.insert(uid(pod));
        }
        let node = pod.spec.as_ref().and_then(|s| s.node_name.clone());
        let Some(node) = node else {
            if self.config.scheduler && pod.metadata.deletion_timestamp.is_none() && self.bound.insert(uid(pod)) {
                self.bind(pod);
            }
            return;
        };
        self.bound.remove(&uid(pod));
        let Some(place) = self.places.get(&node).cloned() else { return };
        if !self.config.kubelet {
            match phase(pod) {
                "Running" => drop(place.admit(facts(pod), &self.config.delays)),
                "Succeeded" | "Failed" => place.set_running(&uid(pod), false),
                _ => {}
            }
            return;
        }
        let known = place.find(&uid(pod));
        match (known, pod.metadata.deletion_timestamp.is_some()) {
            (None, false) if phase(pod) == "Pending" => {
                let resident = place.admit(PodFacts { running: false, ..facts(pod) }, &self.config.delays);
                tokio::spawn(keep(self.config.clone(), place, pod.clone(), resident));
            }
            // Ran before this process did: a node that was reset.
            (None, false) if phase(pod) == "Running" => {
                let (config, pod) = (self.config.clone(), pod.clone());
                tokio::spawn(async move { ended(&config, &pod, 137, "").await });
            }
            (None, false) => {}
            (None, true) => {
                let (config, pod) = (self.config.clone(), pod.clone());
                tokio::spawn(async move { remove(&config, &pod).await });
            }
            (Some(resident), true) => {
                resident.deleted.cancel();
                let grace = pod.metadata.deletion_grace_period_seconds.unwrap_or(0);
                resident.machine.shut_down(Duration::from_secs(u64::try_from(grace).unwrap_or(0)));
            }
            (Some(_), false) => {}
        }
    }

    fn gone(&mut self, uid: &str) {
        self.bound.remove(uid);
        for place in self.places.values() {
            if let Some(resident) = place.find(uid) {
                resident.deleted.cancel();
                resident.machine.shut_down(Duration::ZERO);
                place.remove(uid);
            }
        }
    }

    /// What a new list does not have is gone.
    fn compare(&mut self) {
        let Some(listed) = self.listed.take() else { return };
        let known: Vec<String> =
            self.places.values().flat_map(|p| p.lock().keys().cloned().collect::<Vec<_>>()).collect();
        for uid in known {
            if !listed.contains(&uid) {
                self.gone(&uid);
            }
        }
    }

    fn bind(&mut self, pod: &Pod) {
        let Some(node) = self.places.keys().nth(self.next % self.places.len().max(1)).cloned() else { return };
        self.next += 1;
        let (client, pod) = (self.config.client.clone(), pod.clone());
        tokio::spawn(async move {
            let (namespace, name) = key(&pod);
            let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name, "uid": uid(&pod)},
                "target": {"apiVersion": "v1", "kind": "Node", "name": node}});
            let pods: Api<Pod> = Api::namespaced(client, &namespace);
            let bound: Result<Value, _> =
                pods.create_subresource("binding", &name, &PostParams::default(), &binding).await;
            if let Err(error) = bound {
                tracing::warn!(%error, namespace, name, node, "binding a pod");
            }
        });
    }
}

fn key(pod: &Pod) -> (String, String) {
    (pod.metadata.namespace.clone().unwrap_or_default(), pod.metadata.name.clone().unwrap_or_default())
}

/// An address that is the same for a pod whenever it is asked for.
fn address(pod: &Pod) -> IpAddr {
    let sum = uid(pod).bytes().fold(0u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(byte)));
    let [_, a, b, c] = sum.to_be_bytes();
    IpAddr::from([10, a, b, c.max(1)])
}

fn facts(pod: &Pod) -> PodFacts {
    let (namespace, pod_name) = key(pod);
    let owner = pod.metadata.owner_references.iter().flatten().find(|o| o.controller == Some(true));
    PodFacts {
        pod_uid: uid(pod),
        vmi_uid: owner.map(|o| o.uid.clone()).unwrap_or_default(),
        namespace,
        pod_name,
        vmi_name: owner.map(|o| o.name.clone()).unwrap_or_default(),
        share_dir: Default::default(),
        netns: Default::default(),
        ips: vec![address(pod)],
        running: true,
    }
}

/// The life of one pod, as a kubelet goes through it.
async fn keep(config: Arc<Pods>, place: Arc<Place>, pod: Pod, resident: Resident) {
    let Resident { machine, deleted, .. } = resident;
    tokio::select! {
        () = tokio::time::sleep(config.delays.start) => {
            place.set_running(&uid(&pod), true);
            let running = json!({"running": {"startedAt": time()}});
            write(&config, &pod, "Running", &running, true).await;
        }
        // Deleted before it ran.
        _ = machine.ended() => {}
    }
    let (exit, message) = machine.ended().await;
    place.set_running(&uid(&pod), false);
    ended(&config, &pod, exit, &message).await;
    // A pod that ended stays until somebody deletes it.
    deleted.cancelled().await;
    remove(&config, &pod).await;
    place.remove(&uid(&pod));
}

async fn ended(config: &Pods, pod: &Pod, exit: i32, message: &str) {
    let (phase, reason) = if exit == 0 { ("Succeeded", "Completed") } else { ("Failed", "Error") };
    let state = json!({"terminated": {"exitCode": exit, "reason": reason, "message": message, "finishedAt": time()}});
    write(config, pod, phase, &state, false).await;
}

async fn remove(config: &Pods, pod: &Pod) {
    let (namespace, name) = key(pod);
    let pods: Api<Pod> = Api::namespaced(config.client.clone(), &namespace);
    let at_once = DeleteParams {
        grace_period_seconds: Some(0),
        preconditions: Some(Preconditions { uid: pod.metadata.uid.clone(), resource_version: None }),
        ..DeleteParams::default()
    };
    settle(|| pods.delete(&name, &at_once), "removing a pod").await;
}

async fn write(config: &Pods, pod: &Pod, phase: &str, state: &Value, ready: bool) {
    let (namespace, name) = key(pod);
    let pods: Api<Pod> = Api::namespaced(config.client.clone(), &namespace);
    let containers = pod.spec.iter().flat_map(|s| &s.containers);
    let statuses: Vec<Value> = containers
        .map(|c| {
            json!({"name": c.name, "ready": ready, "started": ready, "image": c.image, "imageID": "model",
                   "restartCount": 0, "state": state})
        })
        .collect();
    let now = time();
    let word = |yes: bool| if yes { "True" } else { "False" };
    let conditions: Vec<Value> =
        [("PodScheduled", true), ("Initialized", true), ("ContainersReady", ready), ("Ready", ready)]
            .map(|(kind, status)| json!({"type": kind, "status": word(status), "lastTransitionTime": now}))
            .to_vec();
    let status = json!({
        "phase": phase, "podIP": address(pod), "podIPs": [{"ip": address(pod)}], "hostIP": config.address,
        "startTime": now, "containerStatuses": statuses, "conditions": conditions,
    });
    let patch = Patch::Strategic(json!({"metadata": {"uid": uid(pod)}, "status": status}));
    let params = PatchParams::default();
    settle(|| pods.patch_status(&name, &params, &patch), "writing a pod's status").await;
}

/// Tries until the API server has taken it, or the pod is not what it was.
async fn settle<T, F: Future<Output = Result<T, kube::Error>>>(call: impl Fn() -> F, what: &str) {
    let mut pause = limits::RETRY_FIRST;
    loop {
        match call().await {
            Ok(_) => return,
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409 | 422) => {
                tracing::debug!(%status, what);
                return;
            }
            Err(error) => tracing::warn!(%error, what),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(limits::API_RETRY);
    }
}
