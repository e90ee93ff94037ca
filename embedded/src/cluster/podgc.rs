//! Pods that nobody will finish: their node does not exist, or they were deleted before they had one.
//!
//! That a Node is gone is asked of the server, not of the cache. Removing the pod is a declaration that it does not run: the
//! machines of a virtual machine treat it as such, and an agent that comes back destroys what it still has.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client, ResourceExt};
use serde_json::json;

use super::{Caches, Controller};

/// How long a node must be gone before its pods are removed, as in kube-controller-manager.
const QUARANTINE: Duration = Duration::from_secs(40);

/// The controller.
pub struct PodGc {
    client: Client,
    caches: Caches,
    /// Nodes that pods name and that are not there, since when.
    missing: std::collections::BTreeMap<String, Instant>,
}

impl PodGc {
    /// A collector over shared caches.
    #[must_use]
    pub fn new(client: Client, caches: Caches) -> Self {
        Self { client, caches, missing: std::collections::BTreeMap::new() }
    }

    async fn remove(&self, pod: &Pod, why: Option<&str>) -> Result<(), kube::Error> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace().unwrap_or_default());
        let final_phase = matches!(pod.status.as_ref().and_then(|s| s.phase.as_deref()), Some("Succeeded" | "Failed"));
        if let (Some(why), false) = (why, final_phase) {
            let condition = json!({
                "type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC", "message": why,
                "lastTransitionTime": jiff::Timestamp::now().strftime("%FT%TZ").to_string(),
            });
            let mut conditions: Vec<_> = pod
                .status
                .as_ref()
                .and_then(|s| s.conditions.clone())
                .unwrap_or_default()
                .into_iter()
                .filter(|c| c.type_ != "DisruptionTarget")
                .filter_map(|c| serde_json::to_value(c).ok())
                .collect();
            conditions.push(condition);
            let patch = json!({
                "metadata": {"uid": pod.uid(), "resourceVersion": pod.resource_version()},
                "status": {"phase": "Failed", "conditions": conditions},
            });
            api.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await?;
        }
        let params = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(Preconditions { uid: pod.uid(), resource_version: None }),
            ..DeleteParams::default()
        };
        match api.delete(&pod.name_any(), &params).await {
            Ok(_) => {
                tracing::info!(pod = %pod.name_any(), namespace = ?pod.namespace(), why = why.unwrap_or("deleted before it had a node"), "pod removed");
                Ok(())
            }
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

fn out_of_service(node: &Node) -> bool {
    let taints = node.spec.as_ref().and_then(|s| s.taints.as_ref());
    taints.is_some_and(|t| t.iter().any(|t| t.key == api::names::TAINT_OUT_OF_SERVICE)) && !super::nodes::is_ready(node)
}

impl Controller for PodGc {
    const NAME: &'static str = "podgc";

    async fn pass(&mut self) -> Result<Option<Duration>, kube::Error> {
        let pods = self.caches.pods.all();
        let mut named = BTreeSet::new();
        let mut again = None;
        let mut wanted: Vec<(Arc<Pod>, &'static str)> = Vec::new();
        for pod in pods {
            let deleting = pod.metadata.deletion_timestamp.is_some();
            let Some(name) = pod.spec.as_ref().and_then(|s| s.node_name.clone()).filter(|n| !n.is_empty()) else {
                if deleting {
                    self.remove(&pod, None).await?;
                }
                continue;
            };
            match self.caches.nodes.get("", &name) {
                Some(node) => {
                    if deleting && out_of_service(&node) {
                        wanted.push((pod, "PodGC: node is out of service"));
                    }
                }
                None => {
                    let since = *self.missing.entry(name.clone()).or_insert_with(Instant::now);
                    named.insert(name);
                    let left = QUARANTINE.saturating_sub(since.elapsed());
                    if left.is_zero() {
                        wanted.push((pod, "PodGC: node no longer exists"));
                    } else {
                        again = Some(again.map_or(left, |a: Duration| a.min(left)));
                    }
                }
            }
        }
        self.missing.retain(|name, _| named.contains(name));
        let nodes: Api<Node> = Api::all(self.client.clone());
        for (pod, why) in wanted {
            let name = pod.spec.as_ref().and_then(|s| s.node_name.clone()).unwrap_or_default();
            let live = nodes.get_opt(&name).await?;
            if live.is_none_or(|node| out_of_service(&node)) {
                self.remove(&pod, Some(why)).await?;
            }
        }
        Ok(again)
    }
}
