//! What else a cluster does, as plain data: the scheduler, garbage collection, the node lifecycle and pod garbage collection.
//! They look at what is there, after a while, and write.

use super::{
    Action, World,
    api::Verb,
    mutants::Mutant,
    server::{Commit, Res, Seen},
};
use embedded::semantics::{
    value::{child, finalizers, items, meta},
    write::{DeleteOptions, Part, Propagation},
};
use serde_json::{Value, json};
use state::Timestamp;
use std::{collections::BTreeSet, rc::Rc};

/// A node that was silent for so long is not known to live.
const SILENCE: u64 = 40_000;
/// Pods stay so long on a node that is not known to live.
const TOLERATED: u64 = 300_000;

impl World {
    /// Something was written: whoever looks after such things will look.
    pub(super) fn notice(&mut self, commit: &Commit) {
        let o = &commit.now;
        match o.res {
            Res::Pod => {
                let node = o.text("/spec/nodeName").to_owned();
                if node.is_empty() && !commit.gone {
                    self.soon(Action::Schedule);
                }
                if let Some(n) = self.nodes.iter().position(|x| x.name.as_str() == node) {
                    self.kubelet_soon(n);
                }
                if commit.before.is_none() || commit.gone || o.deleting() {
                    self.soon(Action::Collect);
                }
            }
            Res::Node => {
                self.soon(Action::Schedule);
                self.soon(Action::Collect);
            }
            Res::Vm | Res::Vmi | Res::Set | Res::Revision => {
                if commit.before.is_none() || commit.gone || o.deleting() {
                    self.soon(Action::Collect);
                }
            }
            Res::Claim | Res::Lease | Res::Pattern(_) => {}
        }
    }

    /// Once, within a second.
    fn soon(&mut self, action: Action) {
        let slot = match action {
            Action::Schedule => &mut self.scheduling,
            _ => &mut self.collecting,
        };
        if !*slot {
            *slot = true;
            let lag =
                if matches!(action, Action::Schedule) { self.dice.between(1, 30) } else { self.dice.between(20, 800) };
            self.after(lag, action);
        }
    }

    pub(super) fn schedule(&mut self) {
        self.scheduling = false;
        let fits = |n: &Rc<Seen>| {
            n.node().is_some_and(|v| v.ready == Some(true) && v.schedulable == Some(true) && !v.out_of_service)
        };
        let nodes: Vec<String> =
            self.server.all(Res::Node).iter().filter(|n| fits(n)).map(|n| n.name().to_owned()).collect();
        for pod in self.server.all(Res::Pod) {
            if !pod.text("/spec/nodeName").is_empty() || pod.deleting() {
                continue;
            }
            let time = Timestamp(self.now).to_string();
            let place = self.search.as_ref().map(|lab| lab.place);
            let chosen = place.map_or_else(|| self.dice.pick(&nodes), |n| nodes.get(n)).cloned();
            match chosen {
                Some(node) => {
                    let bound = self.server.change_by(Res::Pod, pod.namespace(), pod.name(), |old| {
                        let mut new = old.clone();
                        child(&mut new, "spec").insert("nodeName".into(), node.into());
                        let list = json!([{"type": "PodScheduled", "status": "True", "lastTransitionTime": time}]);
                        child(&mut new, "status").insert("conditions".into(), list);
                        Ok(new)
                    });
                    drop(bound);
                    self.publish(None);
                }
                None if items(&pod.value, "/status/conditions").is_empty() => {
                    let list = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                        "message": "no node fits", "lastTransitionTime": time}]);
                    let body = json!({"metadata": {"uid": pod.uid()}, "status": {"conditions": list}});
                    let _ = self.serve(Verb::merge(Res::Pod, pod.namespace(), pod.name(), Part::Status, body), None);
                }
                None => {}
            }
        }
    }

    /// Whether there is anything that a collector removes or sets free.
    pub(super) fn has_litter(&self) -> bool {
        let orphaned = |o: &Seen| {
            let owner = items(&o.value, "/metadata/ownerReferences").first();
            owner.is_some_and(|o| !self.ghost.present.contains_key(o["uid"].as_str().unwrap_or_default()))
        };
        self.ghost.present.values().any(|o| match o.res {
            Res::Node | Res::Lease | Res::Claim | Res::Pattern(_) => false,
            Res::Pod if o.deleting() => self.is_abandoned(o),
            _ if o.deleting() => finalizers(&o.value).iter().any(|f| f == "orphan"),
            Res::Set | Res::Vm | Res::Vmi | Res::Pod | Res::Revision => orphaned(o),
        })
    }

    /// A pod that is to go, and nobody is there who would end it.
    fn is_abandoned(&self, pod: &Seen) -> bool {
        let name = pod.text("/spec/nodeName");
        let node = self.ghost.all(Res::Node).find(|n| n.name() == name);
        let fenced = node.and_then(|n| n.node()).is_some_and(|v| v.out_of_service && v.ready != Some(true));
        pod.deleting() && (name.is_empty() || fenced)
    }

    /// Garbage collection: dependents whose owner is gone go, those of an owner that is orphaning stay.
    pub(super) fn collect(&mut self) {
        self.collecting = false;
        if self.is(Mutant::CollectorSleeps) || !self.has_litter() {
            return;
        }
        let kinds = [Res::Set, Res::Vm, Res::Vmi, Res::Pod, Res::Revision];
        let all: Vec<Rc<Seen>> = kinds.into_iter().flat_map(|r| self.server.all(r)).collect();
        let there: BTreeSet<&str> = all.iter().map(|o| o.uid()).collect();
        let owner = |o: &'_ Seen| {
            let owners = items(&o.value, "/metadata/ownerReferences");
            owners.first().map(|o| o["uid"].as_str().unwrap_or_default().to_owned())
        };
        let orphaning: Vec<&Rc<Seen>> =
            all.iter().filter(|o| o.deleting() && finalizers(&o.value).contains(&"orphan".into())).collect();
        for o in &all {
            let Some(uid) = owner(o) else { continue };
            if orphaning.iter().any(|x| x.uid() == uid) {
                let body = json!({"metadata": {"uid": o.uid(), "ownerReferences": null}});
                let _ = self.serve(Verb::merge(o.res, o.namespace(), o.name(), Part::Main, body), None);
            } else if !there.contains(uid.as_str()) && !o.deleting() {
                let _ = self.serve(Verb::delete(o.res, o.namespace(), o.name(), o.uid()), None);
            }
        }
        for o in orphaning {
            let rest: Vec<String> = finalizers(&o.value).into_iter().filter(|f| f != "orphan").collect();
            let body = json!({"metadata": {"uid": o.uid(), "finalizers": rest}});
            let _ = self.serve(Verb::merge(o.res, o.namespace(), o.name(), Part::Main, body), None);
        }
        self.collect_pods();
    }

    /// Pods whose node is gone or out of service, and that nobody will remove.
    fn collect_pods(&mut self) {
        for pod in self.server.all(Res::Pod) {
            if self.is_abandoned(&pod) {
                self.remove_by_force(&pod);
            }
        }
    }

    /// Removes a pod object, whatever runs.
    pub(super) fn remove_by_force(&mut self, pod: &Seen) {
        let options = DeleteOptions {
            grace: Some(0),
            uid: Some(pod.uid().to_owned()),
            propagation: Some(Propagation::Background),
            ..DeleteOptions::default()
        };
        let _ = self.serve(Verb::Delete(Res::Pod, pod.namespace().into(), pod.name().into(), options), None);
    }

    /// Which nodes live, as far as the control plane can tell.
    pub(super) fn lifecycle(&mut self) {
        self.after(10_000, Action::Lifecycle);
        for n in 0..self.nodes.len() {
            let name = self.nodes[n].name.clone();
            let silent = self.now.saturating_sub(self.nodes[n].beat);
            let Some(node) = self.server.get(Res::Node, "", name.as_str()) else { continue };
            if silent > SILENCE && node.node().and_then(|v| v.ready) == Some(true) {
                let conditions = json!([{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown",
                    "lastTransitionTime": Timestamp(self.now).to_string()}]);
                let body = json!({"status": {"conditions": conditions}});
                let _ = self.serve(Verb::merge(Res::Node, "", name.as_str(), Part::Status, body), None);
            }
            if silent > TOLERATED {
                for pod in self.server.all(Res::Pod) {
                    if pod.text("/spec/nodeName") == name.as_str() && !pod.deleting() {
                        let _ = self.serve(Verb::delete(Res::Pod, pod.namespace(), pod.name(), pod.uid()), None);
                    }
                }
            }
        }
        self.collect_pods();
    }

    /// Takes a node out of service, or gives it back.
    pub(super) fn taint(&mut self, n: usize, out: bool) {
        let name = self.nodes[n].name.clone();
        let Some(node) = self.server.get(Res::Node, "", name.as_str()) else { return };
        let taints = if out {
            json!([{"key": api::names::TAINT_OUT_OF_SERVICE, "effect": "NoExecute", "value": "nodeshutdown"}])
        } else {
            Value::Null
        };
        let mut body = json!({"spec": {"taints": taints}});
        meta(&mut body).insert("uid".into(), json!(node.uid()));
        self.say(|| format!("somebody says that node {n} is out of service: {out}"));
        let _ = self.serve(Verb::merge(Res::Node, "", name.as_str(), Part::Main, body), None);
    }
}
