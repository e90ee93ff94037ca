//! Is a node alive? Its kubelet renews a Lease; when that stops, the node's conditions become Unknown and it is tainted, and
//! pods that do not tolerate the taint are deleted when their time is up.
//!
//! A Lease's own times are only compared with themselves: what counts is when *this* process saw it change, by its own clock.
//! A start of the control plane therefore gives every node the full time again.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Node, NodeCondition, Pod, Taint, Toleration};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client, ResourceExt};
use serde_json::json;

use super::notes::{By, Notes};
use super::{Caches, Controller};

/// Namespace of the kubelets' Leases.
pub const LEASES: &str = "kube-node-lease";
/// A node whose Lease was not renewed for this long is not known to live.
const SILENCE: Duration = Duration::from_secs(40);

/// Node is not ready.
pub const NOT_READY: &str = "node.kubernetes.io/not-ready";
/// Node does not answer.
pub const UNREACHABLE: &str = "node.kubernetes.io/unreachable";
/// Node was cordoned.
pub const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";

/// Whether the node says that it is ready.
#[must_use]
pub fn is_ready(node: &Node) -> bool {
    ready_status(node) == "True"
}

fn ready_status(node: &Node) -> &str {
    node.status
        .as_ref()
        .and_then(|s| s.conditions.as_ref())
        .and_then(|c| c.iter().find(|c| c.type_ == "Ready"))
        .map_or("Unknown", |c| c.status.as_str())
}

/// The controller.
pub struct Nodes {
    client: Client,
    caches: Caches,
    notes: Notes,
    /// The last renewal seen of each node, and when it was seen.
    heard: BTreeMap<String, (String, Instant)>,
    /// When a pod was first seen on a node with a taint that it does not tolerate for ever.
    tainted: BTreeMap<(String, String), Instant>,
}

impl Nodes {
    /// A controller over shared caches.
    #[must_use]
    pub fn new(client: Client, caches: Caches, notes: Notes) -> Self {
        Self { client, caches, notes, heard: BTreeMap::new(), tainted: BTreeMap::new() }
    }

    /// How long the node has been silent.
    fn silence(&mut self, node: &Node) -> Duration {
        let name = node.name_any();
        let renewal = self
            .caches
            .leases
            .get(LEASES, &name)
            .and_then(|lease| lease.spec.as_ref()?.renew_time.as_ref().map(|t| t.0.to_string()))
            .unwrap_or_default();
        // A kubelet that writes its status lives, too, and may be seen to do so before its Lease is.
        let beat = node
            .status
            .as_ref()
            .and_then(|s| s.conditions.as_ref())
            .and_then(|c| c.iter().find(|c| c.type_ == "Ready"))
            .and_then(|c| c.last_heartbeat_time.as_ref())
            .map(|t| t.0.to_string())
            .unwrap_or_default();
        let seen = format!("{renewal} {beat}");
        let entry = self.heard.entry(name).or_insert_with(|| (seen.clone(), Instant::now()));
        if entry.0 != seen {
            *entry = (seen, Instant::now());
        }
        entry.1.elapsed()
    }

    async fn mark_unknown(&self, node: &Node) -> Result<(), kube::Error> {
        let now = Time(jiff::Timestamp::now());
        let mut conditions = node.status.as_ref().and_then(|s| s.conditions.clone()).unwrap_or_default();
        if !conditions.iter().any(|c| c.type_ == "Ready") {
            conditions.push(NodeCondition { type_: "Ready".into(), status: String::new(), ..NodeCondition::default() });
        }
        for condition in &mut conditions {
            if matches!(condition.type_.as_str(), "Ready" | "MemoryPressure" | "DiskPressure" | "PIDPressure")
                && condition.status != "Unknown"
            {
                condition.status = "Unknown".into();
                condition.reason = Some("NodeStatusUnknown".into());
                condition.message = Some("Kubelet stopped posting node status.".into());
                condition.last_transition_time = Some(now.clone());
            }
        }
        let patch = json!({
            "metadata": {"uid": node.uid(), "resourceVersion": node.resource_version()},
            "status": {"conditions": conditions},
        });
        let api: Api<Node> = Api::all(self.client.clone());
        api.patch_status(&node.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await?;
        self.notes.say(
            By::Controllers,
            node,
            false,
            "NodeNotReady",
            "NodeNotReady",
            format!("Node {} status is now: NodeNotReady", node.name_any()),
        );
        Ok(())
    }

    async fn set_taints(&self, node: &Node) -> Result<(), kube::Error> {
        let have = node.spec.as_ref().and_then(|s| s.taints.clone()).unwrap_or_default();
        let want = wanted_taints(node, &have);
        if want == have {
            return Ok(());
        }
        let patch = json!({
            "metadata": {"uid": node.uid(), "resourceVersion": node.resource_version()},
            "spec": {"taints": want},
        });
        let api: Api<Node> = Api::all(self.client.clone());
        api.patch(&node.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await.map(drop)
    }

    /// Deletes pods whose time under a NoExecute taint is up; when the next one is due.
    async fn evict(&mut self) -> Result<Option<Duration>, kube::Error> {
        let mut next: Option<Duration> = None;
        let mut seen = std::collections::BTreeSet::new();
        for pod in self.caches.pods.all() {
            let Some(node) = pod.spec.as_ref().and_then(|s| s.node_name.as_ref()) else { continue };
            let Some(node) = self.caches.nodes.get("", node) else { continue };
            if pod.metadata.deletion_timestamp.is_some() {
                continue;
            }
            let tolerations = pod.spec.as_ref().and_then(|s| s.tolerations.clone()).unwrap_or_default();
            for taint in node.spec.as_ref().and_then(|s| s.taints.as_ref()).into_iter().flatten() {
                let Some(allowed) = allowed_seconds(taint, &tolerations) else { continue };
                let key = (pod.uid().unwrap_or_default(), taint.key.clone());
                let since = *self.tainted.entry(key.clone()).or_insert_with(Instant::now);
                seen.insert(key);
                let left = Duration::from_secs(allowed).saturating_sub(since.elapsed());
                if left.is_zero() {
                    self.notes.say(
                        By::Controllers,
                        &*pod,
                        false,
                        "TaintManagerEviction",
                        "Evicting",
                        format!("Marking for deletion Pod {}/{}", pod.namespace().unwrap_or_default(), pod.name_any()),
                    );
                    let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace().unwrap_or_default());
                    let params = DeleteParams {
                        preconditions: Some(Preconditions { uid: pod.uid(), resource_version: None }),
                        ..DeleteParams::default()
                    };
                    match api.delete(&pod.name_any(), &params).await {
                        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
                        other => drop(other?),
                    }
                    break;
                }
                next = Some(next.map_or(left, |n| n.min(left)));
            }
        }
        self.tainted.retain(|key, _| seen.contains(key));
        Ok(next)
    }
}

/// Seconds that a pod may stay under a taint; none for ever.
fn allowed_seconds(taint: &Taint, tolerations: &[Toleration]) -> Option<u64> {
    if taint.effect != "NoExecute" {
        return None;
    }
    let matching: Vec<_> = tolerations.iter().filter(|t| tolerates(t, taint)).collect();
    if matching.is_empty() {
        return Some(0);
    }
    matching.iter().filter_map(|t| t.toleration_seconds).min().map(|s| u64::try_from(s).unwrap_or(0))
}

/// Whether a toleration covers a taint.
#[must_use]
pub fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let matches_text = |have: &Option<String>, want: &str| have.as_deref().is_none_or(|h| h.is_empty() || h == want);
    let key = toleration.key.as_deref().unwrap_or_default();
    if !matches_text(&toleration.effect, &taint.effect) || !(key.is_empty() || key == taint.key) {
        return false;
    }
    match toleration.operator.as_deref() {
        Some("Exists") => true,
        _ => {
            !key.is_empty()
                && toleration.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default()
        }
    }
}

fn wanted_taints(node: &Node, have: &[Taint]) -> Vec<Taint> {
    let mut want: Vec<(&str, &str)> = Vec::new();
    match ready_status(node) {
        "True" => {}
        "False" => want.extend([(NOT_READY, "NoSchedule"), (NOT_READY, "NoExecute")]),
        _ => want.extend([(UNREACHABLE, "NoSchedule"), (UNREACHABLE, "NoExecute")]),
    }
    if node.spec.as_ref().and_then(|s| s.unschedulable) == Some(true) {
        want.push((UNSCHEDULABLE, "NoSchedule"));
    }
    let ours = [NOT_READY, UNREACHABLE, UNSCHEDULABLE];
    let mut taints: Vec<Taint> = have
        .iter()
        .filter(|t| !ours.contains(&t.key.as_str()) || want.contains(&(t.key.as_str(), t.effect.as_str())))
        .cloned()
        .collect();
    for (key, effect) in want {
        if !taints.iter().any(|t| t.key == key && t.effect == effect) {
            let since = (effect == "NoExecute").then(|| Time(jiff::Timestamp::now()));
            taints.push(Taint { key: key.into(), value: None, effect: effect.into(), time_added: since });
        }
    }
    taints
}

impl Controller for Nodes {
    const NAME: &'static str = "nodes";

    async fn pass(&mut self) -> Result<Option<Duration>, kube::Error> {
        let mut next: Option<Duration> = None;
        let mut names = std::collections::BTreeSet::new();
        for node in self.caches.nodes.all() {
            names.insert(node.name_any());
            let silence = self.silence(&node);
            if silence < SILENCE {
                let left = SILENCE.saturating_sub(silence);
                next = Some(next.map_or(left, |n| n.min(left)));
            } else if ready_status(&node) != "Unknown" || node.status.as_ref().is_none_or(|s| s.conditions.is_none()) {
                self.mark_unknown(&node).await?;
                continue;
            }
            self.set_taints(&node).await?;
        }
        self.heard.retain(|name, _| names.contains(name));
        let due = self.evict().await?;
        Ok(match (next, due) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::{NodeSpec, NodeStatus};

    fn node(ready: &str, cordoned: bool) -> Node {
        let condition = NodeCondition { type_: "Ready".into(), status: ready.into(), ..NodeCondition::default() };
        Node {
            spec: Some(NodeSpec { unschedulable: Some(cordoned), ..NodeSpec::default() }),
            status: Some(NodeStatus { conditions: Some(vec![condition]), ..NodeStatus::default() }),
            ..Node::default()
        }
    }

    #[test]
    fn taints_follow_the_conditions_and_leave_those_of_others() {
        let other = Taint { key: "mine".into(), effect: "NoSchedule".into(), ..Taint::default() };
        let unknown = wanted_taints(&node("Unknown", true), std::slice::from_ref(&other));
        let names: Vec<_> = unknown.iter().map(|t| format!("{}:{}", t.key, t.effect)).collect();
        assert_eq!(
            names,
            [
                "mine:NoSchedule",
                "node.kubernetes.io/unreachable:NoSchedule",
                "node.kubernetes.io/unreachable:NoExecute",
                "node.kubernetes.io/unschedulable:NoSchedule"
            ]
        );
        assert_eq!(wanted_taints(&node("Unknown", true), &unknown), unknown, "a second look changes nothing");
        assert_eq!(wanted_taints(&node("True", false), &unknown), [other]);
    }

    #[test]
    fn time_under_a_taint_is_what_tolerations_say() {
        let taint = Taint { key: UNREACHABLE.into(), effect: "NoExecute".into(), ..Taint::default() };
        let toleration = |seconds| Toleration {
            key: Some(UNREACHABLE.into()),
            operator: Some("Exists".into()),
            effect: Some("NoExecute".into()),
            toleration_seconds: seconds,
            ..Toleration::default()
        };
        assert_eq!(allowed_seconds(&taint, &[]), Some(0));
        assert_eq!(allowed_seconds(&taint, &[toleration(Some(300))]), Some(300));
        assert_eq!(allowed_seconds(&taint, &[toleration(None)]), None);
        let soft = Taint { effect: "NoSchedule".into(), ..taint };
        assert_eq!(allowed_seconds(&soft, &[]), None);
    }
}
