//! Where a pod fits beside the pods that are there: affinity, anti-affinity and topology spread, as kube-scheduler has them. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Affinity, Namespace, Node, Pod, PodAffinityTerm, TopologySpreadConstraint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::ResourceExt;
use kube::core::{Selector, SelectorExt};

use super::fit::{NodeView, selected};

/// Finds a namespace.
pub type Namespaces<'a> = &'a (dyn Fn(&str) -> Option<Arc<Namespace>> + Sync);

type Labels = BTreeMap<String, String>;

/// A selector of labels; none selects nothing, and so does one that cannot be read.
struct Choice<'a> {
    selector: Option<Selector>,
    /// Labels of the pod's own that it takes along: each is to be the same, or not.
    along: Vec<(&'a str, &'a str, bool)>,
}

impl<'a> Choice<'a> {
    fn of(selector: Option<&LabelSelector>, along: Vec<(&'a str, &'a str, bool)>) -> Self {
        Self { selector: selector.and_then(|s| Selector::try_from(s.clone()).ok()), along }
    }

    fn takes(&self, labels: &Labels) -> bool {
        let own =
            |(key, value, same): &(&str, &str, bool)| (labels.get(*key).map(String::as_str) == Some(*value)) == *same;
        self.selector.as_ref().is_some_and(|s| s.matches(labels)) && self.along.iter().all(own)
    }
}

fn namespace(pod: &Pod) -> &str {
    pod.metadata.namespace.as_deref().unwrap_or_default()
}

/// Values of the incoming pod's own labels that a term takes along.
fn along<'a>(pod: &'a Pod, keys: Option<&'a [String]>, same: bool) -> impl Iterator<Item = (&'a str, &'a str, bool)> {
    let of = move |key: &'a String| Some((key.as_str(), pod.labels().get(key)?.as_str(), same));
    keys.unwrap_or_default().iter().filter_map(of)
}

/// A term of a pod, read.
struct Term<'a> {
    term: &'a PodAffinityTerm,
    pods: Choice<'a>,
    /// Of their namespaces, where it does not mean its own pod's.
    namespaces: Option<Choice<'a>>,
    home: &'a str,
}

impl<'a> Term<'a> {
    fn of(pod: &'a Pod, term: &'a PodAffinityTerm) -> Self {
        let same = along(pod, term.match_label_keys.as_deref(), true);
        let taken = same.chain(along(pod, term.mismatch_label_keys.as_deref(), false)).collect();
        let named = term.namespaces.as_ref().is_some_and(|n| !n.is_empty());
        let selector = term.namespace_selector.as_ref();
        Self {
            term,
            pods: Choice::of(term.label_selector.as_ref(), taken),
            namespaces: (named || selector.is_some()).then(|| Choice::of(selector, vec![])),
            home: namespace(pod),
        }
    }

    /// Whether it means this pod.
    fn means(&self, other: &Pod, namespaces: Namespaces<'_>) -> bool {
        let theirs = namespace(other);
        let there = match &self.namespaces {
            None => theirs == self.home,
            Some(choice) => {
                self.term.namespaces.iter().flatten().any(|n| n == theirs)
                    || choice.takes(namespaces(theirs).map(|n| n.labels().clone()).as_ref().unwrap_or(&Labels::new()))
            }
        };
        there && self.pods.takes(other.labels())
    }
}

type Part = fn(&Affinity) -> Option<&Vec<PodAffinityTerm>>;

const NEAR: Part = |a| a.pod_affinity.as_ref()?.required_during_scheduling_ignored_during_execution.as_ref();
const FAR: Part = |a| a.pod_anti_affinity.as_ref()?.required_during_scheduling_ignored_during_execution.as_ref();

fn terms(pod: &Pod, part: Part) -> Vec<Term<'_>> {
    let affinity = pod.spec.as_ref().and_then(|s| s.affinity.as_ref());
    affinity.and_then(part).into_iter().flatten().map(|t| Term::of(pod, t)).collect()
}

fn domain<'a>(node: &'a Node, key: &str) -> Option<&'a str> {
    node.labels().get(key).map(String::as_str)
}

/// Pods for each value of a topology label.
type Counts<'a> = BTreeMap<&'a str, usize>;

fn count<'a>(there: &'a [NodeView], key: &str, meant: impl Fn(&Pod) -> bool) -> Counts<'a> {
    let mut counts = Counts::new();
    for view in there {
        let Some(domain) = domain(&view.node, key) else { continue };
        let found = view.pods.iter().filter(|p| meant(p)).count();
        if found > 0 {
            *counts.entry(domain).or_default() += found;
        }
    }
    counts
}

/// What a pod asks of its neighbours and they of it, counted once for all nodes.
pub struct Neighbours<'a> {
    pod: &'a Pod,
    near: Vec<(&'a str, Counts<'a>)>,
    /// No pod is there that it wants to be near, and it is one that it would want to be near: the first of its kind.
    first: bool,
    far: Vec<(&'a str, Counts<'a>)>,
    /// Topology of pods that are there and do not want it near.
    unwanted: Vec<(&'a str, &'a str)>,
    /// A constraint, its pods by domain, the fewest in one, whether the pod itself counts.
    spread: Vec<(&'a TopologySpreadConstraint, Counts<'a>, usize, bool)>,
    preferred: Vec<(i128, &'a str, Counts<'a>)>,
}

impl<'a> Neighbours<'a> {
    /// Counts.
    #[must_use]
    pub fn of(pod: &'a Pod, there: &'a [NodeView], namespaces: Namespaces<'_>) -> Self {
        let counted = |terms: Vec<Term<'a>>| -> Vec<_> {
            let of = |t: &Term<'a>| {
                (t.term.topology_key.as_str(), count(there, &t.term.topology_key, |p| t.means(p, namespaces)))
            };
            terms.iter().map(of).collect()
        };
        let near = terms(pod, NEAR);
        let itself = near.iter().all(|t| t.means(pod, namespaces));
        let near = counted(near);
        let mut unwanted = vec![];
        for view in there {
            for theirs in view.pods.iter().flat_map(|p| terms(p, FAR)) {
                if let Some(domain) =
                    domain(&view.node, &theirs.term.topology_key).filter(|_| theirs.means(pod, namespaces))
                {
                    unwanted.push((theirs.term.topology_key.as_str(), domain));
                }
            }
        }
        let first = itself && near.iter().all(|(_, counts)| counts.is_empty());
        let mut it =
            Self { pod, near, first, far: counted(terms(pod, FAR)), unwanted, spread: vec![], preferred: vec![] };
        it.count_spread(there);
        it.count_preferred(there, namespaces);
        it
    }

    fn count_spread(&mut self, there: &'a [NodeView]) {
        let spec = self.pod.spec.as_ref();
        let all = spec.and_then(|s| s.topology_spread_constraints.as_deref()).unwrap_or_default();
        let hard: Vec<_> = all.iter().filter(|c| c.when_unsatisfiable == "DoNotSchedule").collect();
        let home = namespace(self.pod);
        for constraint in &hard {
            let taken = along(self.pod, constraint.match_label_keys.as_deref(), true).collect();
            let choice = Choice::of(constraint.label_selector.as_ref(), taken);
            let meant =
                |p: &Pod| namespace(p) == home && p.metadata.deletion_timestamp.is_none() && choice.takes(p.labels());
            let honors = constraint.node_affinity_policy.as_deref() != Some("Ignore");
            let eligible = |node: &Node| {
                hard.iter().all(|c| domain(node, &c.topology_key).is_some()) && (!honors || selected(self.pod, node))
            };
            let mut counts = Counts::new();
            for view in there.iter().filter(|v| eligible(&v.node)) {
                if let Some(domain) = domain(&view.node, &constraint.topology_key) {
                    *counts.entry(domain).or_default() += view.pods.iter().filter(|p| meant(p)).count();
                }
            }
            let wanted = usize::try_from(constraint.min_domains.unwrap_or(1)).unwrap_or(1);
            let fewest = if counts.len() < wanted { 0 } else { counts.values().copied().min().unwrap_or(0) };
            let itself = choice.takes(self.pod.labels());
            self.spread.push((constraint, counts, fewest, itself));
        }
    }

    fn count_preferred(&mut self, there: &'a [NodeView], namespaces: Namespaces<'_>) {
        let Some(affinity) = self.pod.spec.as_ref().and_then(|s| s.affinity.as_ref()) else { return };
        let near = affinity.pod_affinity.as_ref();
        let near = near.and_then(|a| a.preferred_during_scheduling_ignored_during_execution.as_ref());
        let far = affinity.pod_anti_affinity.as_ref();
        let far = far.and_then(|a| a.preferred_during_scheduling_ignored_during_execution.as_ref());
        let weighted = near.into_iter().flatten().map(|w| (1, w)).chain(far.into_iter().flatten().map(|w| (-1, w)));
        for (sign, weighted) in weighted {
            let term = Term::of(self.pod, &weighted.pod_affinity_term);
            let key = term.term.topology_key.as_str();
            let counts = count(there, key, |p| term.means(p, namespaces));
            self.preferred.push((sign * i128::from(weighted.weight), key, counts));
        }
    }

    /// Why the pod cannot be on a node, in kube-scheduler's words.
    #[must_use]
    pub fn refusal(&self, node: &Node) -> Option<&'static str> {
        let has = |(key, counts): &(&str, Counts<'_>)| domain(node, key).is_some_and(|d| counts.contains_key(d));
        for (constraint, counts, fewest, itself) in &self.spread {
            let Some(domain) = domain(node, &constraint.topology_key) else {
                return Some("node(s) didn't match pod topology spread constraints (missing required label)");
            };
            let would_be = counts.get(domain).copied().unwrap_or(0) + usize::from(*itself);
            let skew = i64::try_from(would_be).unwrap_or(i64::MAX) - i64::try_from(*fewest).unwrap_or(0);
            if skew > i64::from(constraint.max_skew) {
                return Some("node(s) didn't match pod topology spread constraints");
            }
        }
        if self.unwanted.iter().any(|(key, unwanted)| domain(node, key) == Some(unwanted)) {
            return Some("node(s) didn't satisfy existing pods anti-affinity rules");
        }
        if self.far.iter().any(has) {
            return Some("node(s) didn't match pod anti-affinity rules");
        }
        let labelled = self.near.iter().all(|(key, _)| domain(node, key).is_some());
        if !(self.near.iter().all(has) || (self.first && labelled)) {
            return Some("node(s) didn't match pod affinity rules");
        }
        None
    }

    /// How much the pod would like to be on a node, or not to be.
    #[must_use]
    pub fn score(&self, node: &Node) -> i128 {
        let of = |(weight, key, counts): &(i128, &str, Counts<'_>)| {
            let found = domain(node, key).and_then(|d| counts.get(d)).copied().unwrap_or(0);
            weight * i128::try_from(found).unwrap_or(0)
        };
        self.preferred.iter().map(of).sum()
    }
}
