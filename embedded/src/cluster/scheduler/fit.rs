//! Where a pod fits, and in which words it is said that it fits nowhere. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Node, NodeSelectorTerm, PersistentVolumeClaim, Pod, Taint, Toleration};
use kube::ResourceExt;

use super::neighbours::{Namespaces, Neighbours};
use crate::cluster::nodes::{UNSCHEDULABLE, tolerates};
use crate::semantics::amounts::Amounts;
use crate::semantics::quantity::Quantity;

/// Finds a claim by namespace and name.
pub type Volumes<'a> = &'a (dyn Fn(&str, &str) -> Option<Arc<PersistentVolumeClaim>> + Sync);

type Quantities = BTreeMap<String, k8s_openapi::apimachinery::pkg::api::resource::Quantity>;

fn read(list: Option<&Quantities>) -> Amounts {
    Amounts(list.into_iter().flatten().filter_map(|(name, q)| Some((name.clone(), Quantity::parse(&q.0)?))).collect())
}

/// What a pod asks for, its overhead with it; and one pod.
#[must_use]
pub fn requested(pod: &Pod) -> Amounts {
    let Some(spec) = &pod.spec else { return Amounts::default() };
    let asked = |c: &Container| read(c.resources.as_ref().and_then(|r| r.requests.as_ref()));
    let init = spec.init_containers.iter().flatten();
    let init = init.map(|c| (asked(c), c.restart_policy.as_deref() == Some("Always")));
    let mut sum = Amounts::of_pod(spec.containers.iter().map(asked), init);
    sum.add(&read(spec.overhead.as_ref()));
    sum.0.insert("pods".into(), Quantity(1000));
    sum
}

/// A node and what is taken of it.
#[derive(Debug, Clone)]
pub struct NodeView {
    pub(super) node: Arc<Node>,
    /// Those on it that have not ended.
    pub(super) pods: Vec<Arc<Pod>>,
    has: Amounts,
    taken: Amounts,
}

impl NodeView {
    /// A node with no pods.
    #[must_use]
    pub fn new(node: Arc<Node>) -> Self {
        let has = read(node.status.as_ref().and_then(|s| s.allocatable.as_ref()));
        Self { node, pods: Vec::new(), has, taken: Amounts::default() }
    }

    /// The node's name.
    #[must_use]
    pub fn name(&self) -> String {
        self.node.name_any()
    }

    /// Counts a pod that is on the node, unless it has ended.
    pub fn take(&mut self, pod: Arc<Pod>) {
        if !matches!(pod.status.as_ref().and_then(|s| s.phase.as_deref()), Some("Succeeded" | "Failed")) {
            self.taken.add(&requested(&pod));
            self.pods.push(pod);
        }
    }

    /// Why the pod cannot be here; empty when it can.
    fn refusals(&self, pod: &Pod, request: &Amounts, neighbours: &Neighbours<'_>) -> Vec<String> {
        let Some(spec) = &pod.spec else { return vec!["no spec".into()] };
        let node_spec = self.node.spec.as_ref();
        let tolerations = spec.tolerations.as_deref().unwrap_or_default();
        if node_spec.and_then(|s| s.unschedulable) == Some(true) {
            let cordon = Taint { key: UNSCHEDULABLE.into(), effect: "NoSchedule".into(), ..Taint::default() };
            if !tolerations.iter().any(|t| tolerates(t, &cordon)) {
                return vec!["node(s) were unschedulable".into()];
            }
        }
        if let Some(taint) = untolerated(node_spec.and_then(|s| s.taints.as_deref()).unwrap_or_default(), tolerations) {
            let value = taint.value.as_deref().unwrap_or_default();
            return vec![format!("node(s) had untolerated taint {{{}: {value}}}", taint.key)];
        }
        if !selected(pod, &self.node) {
            return vec!["node(s) didn't match Pod's node affinity/selector".into()];
        }
        if let Some(why) = neighbours.refusal(&self.node) {
            return vec![why.into()];
        }
        let mut why = Vec::new();
        for (name, amount) in &request.0 {
            if amount.0 > 0 && self.taken.get(name) + *amount > self.has.get(name) {
                why.push(if name == "pods" { "Too many pods".into() } else { format!("Insufficient {name}") });
            }
        }
        why
    }

    /// The share of the node that is free after the pod, in thousandths, plus what the pod prefers.
    fn score(&self, pod: &Pod, request: &Amounts, neighbours: &Neighbours<'_>) -> i128 {
        let free: i128 = ["cpu", "memory"]
            .iter()
            .map(|name| {
                let has = self.has.get(name).0.max(1);
                (has - self.taken.get(name).0 - request.get(name).0) * 1000 / has
            })
            .sum();
        let prefers = pod
            .spec
            .as_ref()
            .and_then(|s| {
                s.affinity
                    .as_ref()?
                    .node_affinity
                    .as_ref()?
                    .preferred_during_scheduling_ignored_during_execution
                    .as_ref()
            })
            .into_iter()
            .flatten()
            .filter(|p| term(&p.preference, &self.node))
            .map(|p| i128::from(p.weight) * 20)
            .sum::<i128>();
        free + prefers + neighbours.score(&self.node) * 20
    }
}

/// The first taint that keeps new pods away and is not tolerated.
fn untolerated<'a>(taints: &'a [Taint], tolerations: &[Toleration]) -> Option<&'a Taint> {
    taints
        .iter()
        .filter(|t| matches!(t.effect.as_str(), "NoSchedule" | "NoExecute"))
        .find(|t| !tolerations.iter().any(|toleration| tolerates(toleration, t)))
}

/// Whether the pod's own selectors of nodes take this one.
pub(super) fn selected(pod: &Pod, node: &Node) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let labels = node.labels();
    let by_labels = spec.node_selector.iter().flatten().all(|(k, v)| labels.get(k) == Some(v));
    let required = spec
        .affinity
        .as_ref()
        .and_then(|a| a.node_affinity.as_ref())
        .and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
    by_labels && required.is_none_or(|r| r.node_selector_terms.iter().any(|t| term(t, node)))
}

/// Whether a node satisfies a term. An empty term matches nothing.
fn term(term: &NodeSelectorTerm, node: &Node) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    if expressions.is_empty() && fields.is_empty() {
        return false;
    }
    let name = node.name_any();
    let holds = |operator: &str, have: Option<&String>, values: &[String]| match operator {
        "In" => have.is_some_and(|h| values.contains(h)),
        "NotIn" => have.is_none_or(|h| !values.contains(h)),
        "Exists" => have.is_some(),
        "DoesNotExist" => have.is_none(),
        "Gt" | "Lt" => {
            let number = |s: Option<&String>| s.and_then(|s| s.parse::<i64>().ok());
            match (number(have), number(values.first())) {
                (Some(have), Some(want)) => {
                    if operator == "Gt" {
                        have > want
                    } else {
                        have < want
                    }
                }
                _ => false,
            }
        }
        _ => false,
    };
    expressions.iter().all(|e| holds(&e.operator, node.labels().get(&e.key), e.values.as_deref().unwrap_or_default()))
        && fields.iter().all(|e| {
            e.key == "metadata.name" && holds(&e.operator, Some(&name), e.values.as_deref().unwrap_or_default())
        })
}

/// What of the pod's claims keeps it from running anywhere.
fn claims(pod: &Pod, volumes: Volumes<'_>) -> Result<(), String> {
    let namespace = pod.namespace().unwrap_or_default();
    let mut unbound = false;
    for volume in pod.spec.as_ref().and_then(|s| s.volumes.as_ref()).into_iter().flatten() {
        let Some(source) = &volume.persistent_volume_claim else { continue };
        let name = &source.claim_name;
        let Some(claim) = volumes(&namespace, name) else {
            return Err(format!("persistentvolumeclaim \"{name}\" not found"));
        };
        if claim.metadata.deletion_timestamp.is_some() {
            return Err(format!("persistentvolumeclaim \"{name}\" is being deleted"));
        }
        unbound |= claim.status.as_ref().and_then(|s| s.phase.as_deref()) != Some("Bound");
    }
    if unbound { Err("pod has unbound immediate PersistentVolumeClaims".into()) } else { Ok(()) }
}

/// The node for a pod, or why there is none, in kube-scheduler's words.
///
/// # Errors
/// The message of condition PodScheduled.
pub fn choose(
    pod: &Pod,
    nodes: &[NodeView],
    volumes: Volumes<'_>,
    namespaces: Namespaces<'_>,
) -> Result<String, String> {
    let total = nodes.len();
    if total == 0 {
        return Err("no nodes available to schedule pods".into());
    }
    if let Err(why) = claims(pod, volumes) {
        return Err(format!(
            "0/{total} nodes are available: {why}. preemption: 0/{total} nodes are available: {total} Preemption is not helpful for scheduling."
        ));
    }
    let request = requested(pod);
    let neighbours = Neighbours::of(pod, nodes, namespaces);
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    let mut hopeless = 0;
    let mut best: Option<(i128, String)> = None;
    for view in nodes {
        let why = view.refusals(pod, &request, &neighbours);
        if why.is_empty() {
            let score = view.score(pod, &request, &neighbours);
            if best.as_ref().is_none_or(|(s, _)| score > *s) {
                best = Some((score, view.name()));
            }
            continue;
        }
        hopeless += usize::from(!why.iter().any(|w| w.starts_with("Insufficient") || w.starts_with("Too many")));
        for reason in why {
            *reasons.entry(reason).or_insert(0) += 1;
        }
    }
    if let Some((_, name)) = best {
        return Ok(name);
    }
    let list = reasons.iter().map(|(why, n)| format!("{n} {why}")).collect::<Vec<_>>().join(", ");
    let mut preemption = Vec::new();
    if total > hopeless {
        preemption.push(format!("{} No preemption victims found for incoming pod", total - hopeless));
    }
    if hopeless > 0 {
        preemption.push(format!("{hopeless} Preemption is not helpful for scheduling"));
    }
    let preemption = preemption.join(", ");
    Err(format!("0/{total} nodes are available: {list}. preemption: 0/{total} nodes are available: {preemption}."))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use k8s_openapi::api::core::v1::Namespace;
    use serde_json::{Value, json};

    fn pod(spec: Value) -> Pod {
        let mut all =
            json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}}}]});
        for (key, value) in spec.as_object().unwrap() {
            all[key] = value.clone();
        }
        serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "default"}, "spec": all})).unwrap()
    }

    fn node(name: &str, cpu: &str, memory: &str, spec: Value) -> NodeView {
        NodeView::new(Arc::new(
            serde_json::from_value(json!({
                "metadata": {"name": name, "labels": {"zone": name, "size": "4"}}, "spec": spec,
                "status": {"allocatable": {"cpu": cpu, "memory": memory, "pods": "110"}},
            }))
            .unwrap(),
        ))
    }

    fn none(_: &str, _: &str) -> Option<Arc<PersistentVolumeClaim>> {
        None
    }

    fn nowhere(_: &str) -> Option<Arc<Namespace>> {
        None
    }

    /// A pod with labels, that asks for little.
    fn labelled(label: &str, spec: Value) -> Arc<Pod> {
        let mut p = pod(spec);
        p.metadata.labels = Some([("app".to_owned(), label.to_owned())].into());
        for c in &mut p.spec.as_mut().unwrap().containers {
            c.resources = None;
        }
        Arc::new(p)
    }

    fn beside(kind: &str, label: &str) -> Value {
        json!({"affinity": {kind: {"requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": label}}}]}}})
    }

    #[test]
    fn pods_are_near_or_far_from_each_other_as_they_ask() {
        let mut nodes = vec![node("a", "2", "4Gi", json!({})), node("b", "2", "4Gi", json!({}))];
        let place = |nodes: &[NodeView], p: &Pod| choose(p, nodes, &none, &nowhere);
        // Near somebody who is not there; near its own kind, of which it is the first.
        let lonely = labelled("web", beside("podAffinity", "db-1"));
        let text = place(&nodes, &lonely).unwrap_err();
        assert!(text.contains("2 node(s) didn't match pod affinity rules"), "{text}");
        assert_eq!(place(&nodes, &labelled("web", beside("podAffinity", "web"))).unwrap(), "a");
        nodes[1].take(labelled("db-1", json!({})));
        assert_eq!(place(&nodes, &lonely).unwrap(), "b");
        // Far from it.
        assert_eq!(place(&nodes, &labelled("web", beside("podAntiAffinity", "db-1"))).unwrap(), "a");
        // Who is there does not want it near, either.
        nodes[0].take(labelled("loud", beside("podAntiAffinity", "web")));
        let text = place(&nodes, &labelled("web", beside("podAntiAffinity", "db-1"))).unwrap_err();
        assert!(text.contains("1 node(s) didn't match pod anti-affinity rules"), "{text}");
        assert!(text.contains("1 node(s) didn't satisfy existing pods anti-affinity rules"), "{text}");
        // A term is of its pod's namespace, or of those that it names or selects.
        let mut elsewhere = (*labelled("web", beside("podAntiAffinity", "db-1"))).clone();
        elsewhere.metadata.namespace = Some("other".into());
        assert_eq!(place(&nodes, &elsewhere).unwrap(), "a");
        let of = |e: &mut Pod, part: Value| {
            let mut spec = beside("podAntiAffinity", "db-1");
            let term = &mut spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0];
            let both = term.as_object_mut().unwrap();
            both.extend(part.as_object().unwrap().clone());
            e.spec = labelled("web", spec).spec.clone();
        };
        let mut b_alone = vec![nodes[1].clone()];
        assert!(place(&b_alone, &elsewhere).is_ok());
        of(&mut elsewhere, json!({"namespaces": ["default"]}));
        assert!(place(&b_alone, &elsewhere).is_err());
        of(&mut elsewhere, json!({"namespaceSelector": {}}));
        assert!(place(&b_alone, &elsewhere).is_err());
        // A pod that has ended is nobody's neighbour.
        let mut ended = (*labelled("db-1", json!({}))).clone();
        ended.status = Some(serde_json::from_value(json!({"phase": "Succeeded"})).unwrap());
        b_alone[0].pods.clear();
        b_alone[0].take(Arc::new(ended));
        assert!(place(&b_alone, &elsewhere).is_ok());
    }

    #[test]
    fn pods_spread_over_domains_as_they_ask() {
        let spread = json!({"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone",
            "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": "web"}}}]});
        let mut nodes = vec![node("a", "2", "4Gi", json!({})), node("b", "1", "1Gi", json!({}))];
        let web = labelled("web", spread);
        assert_eq!(choose(&web, &nodes, &none, &nowhere).unwrap(), "a");
        nodes[0].take(web.clone());
        assert_eq!(choose(&web, &nodes, &none, &nowhere).unwrap(), "b", "the smaller one has fewer");
        let mut there = (*web).clone();
        there.spec.as_mut().unwrap().node_selector = Some([("zone".to_owned(), "a".to_owned())].into());
        assert_eq!(choose(&there, &nodes, &none, &nowhere).unwrap(), "a", "a node that it cannot have is no domain");
        there.spec.as_mut().unwrap().topology_spread_constraints.as_mut().unwrap()[0].node_affinity_policy =
            Some("Ignore".into());
        let text = choose(&there, &nodes, &none, &nowhere).unwrap_err();
        assert!(text.contains("1 node(s) didn't match pod topology spread constraints"), "{text}");
    }

    #[test]
    fn the_emptiest_feasible_node_is_taken_and_counted() {
        let mut nodes = vec![node("a", "2", "4Gi", json!({})), node("b", "2", "4Gi", json!({}))];
        assert_eq!(choose(&pod(json!({})), &nodes, &none, &nowhere).unwrap(), "a");
        nodes[0].take(Arc::new(pod(json!({}))));
        assert_eq!(choose(&pod(json!({})), &nodes, &none, &nowhere).unwrap(), "b");
        assert_eq!(choose(&pod(json!({"nodeSelector": {"zone": "a"}})), &nodes, &none, &nowhere).unwrap(), "a");
        let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "size", "operator": "Gt", "values": ["3"]}, {"key": "zone", "operator": "NotIn", "values": ["b"]}]}]}}});
        assert_eq!(choose(&pod(json!({"affinity": affinity})), &nodes, &none, &nowhere).unwrap(), "a");
        for _ in 0..3 {
            nodes[0].take(Arc::new(pod(json!({}))));
        }
        let full = choose(&pod(json!({"nodeSelector": {"zone": "a"}})), &nodes, &none, &nowhere).unwrap_err();
        assert_eq!(
            full,
            "0/2 nodes are available: 1 Insufficient cpu, 1 Insufficient memory, 1 node(s) didn't match Pod's node \
             affinity/selector. preemption: 0/2 nodes are available: 1 No preemption victims found for incoming pod, 1 \
             Preemption is not helpful for scheduling."
        );
    }

    #[test]
    fn taints_cordons_and_claims_keep_a_pod_waiting() {
        let taints = json!({"taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]});
        let nodes = vec![node("a", "2", "4Gi", taints), node("b", "2", "4Gi", json!({"unschedulable": true}))];
        let text = choose(&pod(json!({})), &nodes, &none, &nowhere).unwrap_err();
        assert!(text.contains("1 node(s) had untolerated taint {k: v}, 1 node(s) were unschedulable"), "{text}");
        let tolerant = json!({"tolerations": [{"key": "k", "operator": "Exists"}]});
        assert_eq!(choose(&pod(tolerant), &nodes, &none, &nowhere).unwrap(), "a");
        let claim = json!({"volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "data"}}]});
        let text = choose(&pod(claim.clone()), &nodes, &none, &nowhere).unwrap_err();
        assert!(text.contains("persistentvolumeclaim \"data\" not found"), "{text}");
        let pending = |_: &str, _: &str| Some(Arc::new(PersistentVolumeClaim::default()));
        let text = choose(&pod(claim), &nodes, &pending, &nowhere).unwrap_err();
        assert!(text.contains("pod has unbound immediate PersistentVolumeClaims"), "{text}");
        assert_eq!(choose(&pod(json!({})), &[], &none, &nowhere).unwrap_err(), "no nodes available to schedule pods");
    }

    #[test]
    fn init_containers_count_as_the_largest_and_sidecars_always() {
        let spec = json!({"initContainers": [
            {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}},
            {"name": "i", "resources": {"requests": {"cpu": "3", "memory": "1Mi"}}}], "overhead": {"memory": "1Mi"}});
        let amounts = requested(&pod(spec));
        assert_eq!(amounts.get("cpu"), Quantity(4000));
        assert_eq!(amounts.get("memory"), Quantity(((1 << 30) + (1 << 20)) * 1000));
    }
}
