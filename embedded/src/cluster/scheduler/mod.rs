//! Gives pods their node.
//!
//! A pass takes the pods that wait, the most important and then the oldest first, and places each on the feasible node with
//! the most room. [`fit`] says what is feasible and why not. A pod that was just bound counts on its node although the cache
//! does not show it yet. A pod that fits nowhere says so (condition PodScheduled, Event) and is looked at again when anything
//! changes. Nobody is preempted.

pub mod fit;
mod neighbours;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;

use super::notes::{By, Notes};
use super::{Caches, Controller};
use fit::{NodeView, Volumes};
use neighbours::Namespaces;

/// The scheduler's name in `spec.schedulerName`.
pub const NAME: &str = "default-scheduler";
/// A binding that the cache does not show after this time is forgotten.
const ASSUMED: Duration = Duration::from_secs(30);

/// The scheduler.
pub struct Scheduler {
    client: Client,
    caches: Caches,
    notes: Notes,
    /// Pods bound by us that the cache may not show yet: node, pod, since.
    assumed: BTreeMap<String, (String, Arc<Pod>, Instant)>,
}

fn waits(pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else { return false };
    spec.node_name.as_deref().unwrap_or_default().is_empty()
        && pod.metadata.deletion_timestamp.is_none()
        && spec.scheduler_name.as_deref().is_none_or(|n| n.is_empty() || n == NAME)
        && !matches!(pod.status.as_ref().and_then(|s| s.phase.as_deref()), Some("Succeeded" | "Failed"))
}

impl Scheduler {
    /// A scheduler over shared caches.
    #[must_use]
    pub fn new(client: Client, caches: Caches, notes: Notes) -> Self {
        Self { client, caches, notes, assumed: BTreeMap::new() }
    }

    /// The nodes with what their pods take.
    fn views(&mut self) -> Vec<NodeView> {
        let mut views: BTreeMap<String, NodeView> =
            self.caches.nodes.all().into_iter().map(|node| (node.name_any(), NodeView::new(node))).collect();
        let mut shown = std::collections::BTreeSet::new();
        for pod in self.caches.pods.all() {
            let uid = pod.uid().unwrap_or_default();
            if let Some(node) = pod.spec.as_ref().and_then(|s| s.node_name.as_ref()).filter(|n| !n.is_empty()) {
                shown.insert(uid);
                if let Some(view) = views.get_mut(node) {
                    view.take(pod.clone());
                }
            }
        }
        self.assumed.retain(|uid, (_, _, since)| !shown.contains(uid) && since.elapsed() < ASSUMED);
        for (node, pod, _) in self.assumed.values() {
            if let Some(view) = views.get_mut(node) {
                view.take(pod.clone());
            }
        }
        views.into_values().collect()
    }

    async fn bind(&self, pod: &Pod, node: &str) -> Result<(), kube::Error> {
        let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
        let body = json!({
            "apiVersion": "v1", "kind": "Binding",
            "metadata": {"name": name, "namespace": namespace, "uid": pod.uid()},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        });
        let request = http::Request::post(format!("/api/v1/namespaces/{namespace}/pods/{name}/binding"))
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(serde_json::to_vec(&body).map_err(kube::Error::SerdeError)?)
            .map_err(|e| kube::Error::Service(Box::new(e)))?;
        self.client.request::<serde_json::Value>(request).await?;
        let text = format!("Successfully assigned {namespace}/{name} to {node}");
        self.notes.say(By::Scheduler, pod, false, "Scheduled", "Binding", text);
        Ok(())
    }

    async fn refuse(&self, pod: &Pod, reason: &str, message: &str) -> Result<(), kube::Error> {
        let conditions = pod.status.as_ref().and_then(|s| s.conditions.clone()).unwrap_or_default();
        let old = conditions.iter().find(|c| c.type_ == "PodScheduled");
        if old.is_some_and(|c| {
            c.status == "False" && c.reason.as_deref() == Some(reason) && c.message.as_deref() == Some(message)
        }) {
            return Ok(());
        }
        let since = old
            .filter(|c| c.status == "False")
            .and_then(|c| c.last_transition_time.clone())
            .map_or_else(jiff::Timestamp::now, |t| t.0);
        let mut all: Vec<_> = conditions
            .iter()
            .filter(|c| c.type_ != "PodScheduled")
            .filter_map(|c| serde_json::to_value(c).ok())
            .collect();
        all.push(json!({
            "type": "PodScheduled", "status": "False", "reason": reason, "message": message,
            "lastTransitionTime": since.strftime("%FT%TZ").to_string(),
        }));
        let patch = json!({
            "metadata": {"uid": pod.uid(), "resourceVersion": pod.resource_version()},
            "status": {"phase": "Pending", "conditions": all},
        });
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace().unwrap_or_default());
        api.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await?;
        if reason == "Unschedulable" {
            self.notes.say(By::Scheduler, pod, true, "FailedScheduling", "Scheduling", message.to_owned());
        }
        Ok(())
    }
}

impl Controller for Scheduler {
    const NAME: &'static str = "scheduler";

    async fn pass(&mut self) -> Result<Option<Duration>, kube::Error> {
        let mut pods: Vec<_> = self.caches.pods.all().into_iter().filter(|p| waits(p)).collect();
        pods.retain(|p| !self.assumed.contains_key(&p.uid().unwrap_or_default()));
        if pods.is_empty() {
            return Ok(None);
        }
        pods.sort_by_key(|p| {
            let priority = p.spec.as_ref().and_then(|s| s.priority).unwrap_or(0);
            (std::cmp::Reverse(priority), p.metadata.creation_timestamp.as_ref().map(|t| t.0))
        });
        let mut views = self.views();
        let claims = self.caches.claims.clone();
        let volumes: Volumes<'_> = &|namespace, claim| claims.get(namespace, claim);
        let namespaces = self.caches.namespaces.clone();
        let namespaces: Namespaces<'_> = &|name| namespaces.get("", name);
        let mut failed = None;
        for pod in pods {
            let result =
                if pod.spec.as_ref().is_some_and(|s| s.scheduling_gates.as_ref().is_some_and(|g| !g.is_empty())) {
                    self.refuse(&pod, "SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates")
                        .await
                } else {
                    match fit::choose(&pod, &views, volumes, namespaces) {
                        Ok(node) => {
                            let bound = self.bind(&pod, &node).await;
                            if bound.is_ok() {
                                if let Some(view) = views.iter_mut().find(|v| v.name() == node) {
                                    view.take(pod.clone());
                                }
                                self.assumed.insert(pod.uid().unwrap_or_default(), (node, pod.clone(), Instant::now()));
                            }
                            bound
                        }
                        Err(message) => self.refuse(&pod, "Unschedulable", &message).await,
                    }
                };
            match result {
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
                Err(error) => failed = Some(error),
                Ok(()) => {}
            }
        }
        failed.map_or(Ok(None), Err)
    }
}
