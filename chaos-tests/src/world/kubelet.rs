//! The kubelet of a node: runs the containers of pods that are bound to it and writes their status. Level-based and in one go:
//! its own bugs are not what is looked for here.

use super::{
    Action, World,
    agent::PodFacts,
    api::Verb,
    server::{Res, Seen},
    swarm::Fault,
};
use embedded::semantics::write::{DeleteOptions, Part};
use serde_json::{Value, json};
use state::{PodUid, Timestamp};
use std::rc::Rc;

/// How far a pod has come on its node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stage {
    /// Its container is being made.
    Preparing,
    /// It runs.
    Running,
    /// It has ended: code and termination message.
    Ended(i32, String),
}

/// A pod on its node.
#[derive(Debug, Clone)]
pub struct LocalPod {
    /// Namespace.
    pub namespace: String,
    name: String,
    /// VMI.
    pub vmi: String,
    /// Name of the VMI.
    pub vmi_name: String,
    /// Milliseconds from SIGTERM to SIGKILL.
    pub grace: u64,
    /// Stage.
    pub stage: Stage,
    stopping: bool,
}

/// What a kubelet would do.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Due {
    /// Begin with a pod.
    pub begins: bool,
    /// End one, or remove it.
    pub ends: bool,
    /// Say how one is.
    pub tells: bool,
}

impl LocalPod {
    fn of(seen: &Seen) -> Self {
        let (_, vmi_name, vmi) = seen.owner().unwrap_or_default();
        let grace = seen.value.pointer("/spec/terminationGracePeriodSeconds").and_then(Value::as_u64).unwrap_or(30);
        Self {
            namespace: seen.namespace().into(),
            name: seen.name().into(),
            vmi: vmi.into(),
            vmi_name: vmi_name.into(),
            grace: grace * 1000,
            stage: Stage::Preparing,
            stopping: false,
        }
    }

    /// As the agent is told of it.
    pub fn facts(&self) -> PodFacts {
        PodFacts {
            vmi: self.vmi.clone(),
            namespace: self.namespace.clone(),
            name: self.name.clone(),
            vmi_name: self.vmi_name.clone(),
            running: self.stage == Stage::Running,
        }
    }

    /// The node lost power.
    pub fn lose(&mut self) {
        if self.stage == Stage::Running {
            self.stage = Stage::Ended(137, String::new());
        }
    }
}

impl World {
    /// The kubelet will look, after a while.
    pub(super) fn kubelet_soon(&mut self, n: usize) {
        if self.nodes[n].kubelet_due {
            return;
        }
        self.nodes[n].kubelet_due = true;
        let usual = self.dice.between(1, 30);
        let slow = self.strikes(Fault::KubeletSlow, || format!("node {n}"));
        let lag = slow.map_or(usual, |mut d| d.between(1, 8000));
        let boot = self.nodes[n].boot;
        self.after(lag, Action::Kubelet(n, boot));
    }

    /// The agent will be told of the node's pods.
    fn pods_changed(&mut self, n: usize) {
        if let Some(inc) = self.nodes[n].agent.as_ref().map(|a| a.inc) {
            let lag = self.dice.between(1, 10);
            self.after(lag, Action::AgentPods(super::api::Proc::Agent(n, inc)));
        }
    }

    pub(super) fn kubelet(&mut self, n: usize) {
        self.nodes[n].kubelet_due = false;
        if !self.nodes[n].reaches_api(self.now) {
            if self.nodes[n].powered {
                self.nodes[n].kubelet_due = true;
                let boot = self.nodes[n].boot;
                self.after(2000, Action::Kubelet(n, boot));
            }
            return;
        }
        let mut bound: Vec<Rc<Seen>> = self.bound_to(n).cloned().collect();
        bound.sort_by(|a, b| (a.namespace(), a.name()).cmp(&(b.namespace(), b.name())));
        for pod in &bound {
            self.kubelet_pod(n, pod);
        }
        // Pods whose objects somebody removed: their containers end in order all the same.
        let there: Vec<&str> = bound.iter().map(|p| p.uid()).collect();
        let orphans: Vec<PodUid> =
            self.nodes[n].pods.keys().filter(|uid| !there.contains(&uid.as_str())).cloned().collect();
        for uid in orphans {
            let Some(local) = self.nodes[n].pods.get(&uid) else { continue };
            if local.stage == Stage::Running {
                self.kubelet_stop(n, &uid);
            } else {
                self.nodes[n].pods.remove(&uid);
                self.pods_changed(n);
            }
        }
    }

    fn kubelet_pod(&mut self, n: usize, pod: &Rc<Seen>) {
        let uid = PodUid(pod.uid().into());
        let over = matches!(pod.text("/status/phase"), "Succeeded" | "Failed");
        let boot = self.nodes[n].boot;
        if !self.nodes[n].pods.contains_key(&uid) {
            if over {
                return;
            }
            if pod.deleting() {
                return self.kubelet_remove(pod);
            }
            self.nodes[n].pods.insert(uid.clone(), LocalPod::of(pod));
            self.pods_changed(n);
            let wait = self.dice.between(5, 300);
            return self.after(wait, Action::Container(n, boot, uid));
        }
        let Some(local) = self.nodes[n].pods.get(&uid).cloned() else { return };
        match &local.stage {
            Stage::Preparing if pod.deleting() => {
                self.nodes[n].pods.remove(&uid);
                self.pods_changed(n);
                self.kubelet_remove(pod);
            }
            Stage::Preparing => {}
            Stage::Running => {
                if !over {
                    self.kubelet_status(pod, &local.stage);
                }
                if pod.deleting() {
                    self.kubelet_stop(n, &uid);
                }
            }
            Stage::Ended(..) => {
                self.kubelet_status(pod, &local.stage);
                if pod.deleting() {
                    self.nodes[n].pods.remove(&uid);
                    self.pods_changed(n);
                    self.kubelet_remove(pod);
                }
            }
        }
    }

    fn kubelet_stop(&mut self, n: usize, uid: &PodUid) {
        let boot = self.nodes[n].boot;
        let Some(local) = self.nodes[n].pods.get_mut(uid).filter(|l| !l.stopping) else { return };
        local.stopping = true;
        let grace = local.grace;
        self.terminate_launcher(n, uid);
        self.after(grace + 2000, Action::KillContainer(n, boot, uid.clone()));
    }

    fn kubelet_remove(&mut self, pod: &Seen) {
        let options = DeleteOptions { grace: Some(0), uid: Some(pod.uid().to_owned()), ..DeleteOptions::default() };
        // Somebody else may have been quicker.
        let _ = self.serve(Verb::Delete(Res::Pod, pod.namespace().into(), pod.name().into(), options), None);
    }

    /// The pods that were placed on a node.
    fn bound_to(&self, n: usize) -> impl Iterator<Item = &Rc<Seen>> {
        let name = self.nodes[n].name.as_str();
        self.ghost.all(Res::Pod).filter(move |p| p.text("/spec/nodeName") == name)
    }

    /// What a look at its pods would make it do.
    pub(super) fn kubelet_is_due(&self, n: usize) -> Due {
        let node = &self.nodes[n];
        let bound: Vec<&Rc<Seen>> = self.bound_to(n).collect();
        let gone = |uid: &PodUid| bound.iter().all(|p| p.uid() != uid.as_str());
        let left = node.pods.iter().any(|(uid, local)| gone(uid) && !(local.stage == Stage::Running && local.stopping));
        let mut due = Due { ends: left, ..Due::default() };
        for pod in bound {
            let over = matches!(pod.text("/status/phase"), "Succeeded" | "Failed");
            let Some(local) = node.pods.get(pod.uid()) else {
                due.begins |= !over && !pod.deleting();
                due.ends |= !over && pod.deleting();
                continue;
            };
            due.ends |= pod.deleting() && !(local.stage == Stage::Running && local.stopping);
            due.tells |= !(over && local.stage == Stage::Running) && status_of(pod, &local.stage, self.now).is_some();
        }
        due
    }

    fn kubelet_status(&mut self, pod: &Seen, stage: &Stage) {
        if let Some(body) = status_of(pod, stage, self.now) {
            let _ = self.serve(Verb::merge(Res::Pod, pod.namespace(), pod.name(), Part::Status, body), None);
        }
    }

    /// The container of a pod is there.
    pub(super) fn container_starts(&mut self, n: usize, uid: &PodUid) {
        let Some(local) = self.nodes[n].pods.get_mut(uid).filter(|l| l.stage == Stage::Preparing) else { return };
        local.stage = Stage::Running;
        self.start_launcher(n, uid);
        self.pods_changed(n);
        self.kubelet_soon(n);
    }

    pub(super) fn container_ended(&mut self, n: usize, uid: &PodUid, code: i32, message: &str) {
        if let Some(local) = self.nodes[n].pods.get_mut(uid) {
            local.stage = Stage::Ended(code, message.to_owned());
        }
        self.pods_changed(n);
        self.kubelet_soon(n);
    }

    /// The kubelet tells that the node lives, and makes the Node object where there is none.
    pub(super) fn heartbeat(&mut self, n: usize) {
        self.after(10_000, Action::Heartbeat(n));
        if !self.nodes[n].reaches_api(self.now) {
            return;
        }
        self.nodes[n].beat = self.now;
        let name = self.nodes[n].name.clone();
        let ready = json!([{"type": "Ready", "status": "True", "reason": "KubeletReady",
            "lastTransitionTime": Timestamp(self.now).to_string()}]);
        match self.server.get(Res::Node, "", name.as_str()) {
            None => {
                let node = json!({"metadata": {"name": name.as_str(),
                    "annotations": {api::names::ANN_AGENT_ADDRESS: "192.0.2.1:1"},
                    "labels": {api::names::LABEL_SCHEDULABLE: "true"}}});
                let _ = self.serve(Verb::Create(Res::Node, String::new(), node), None);
                let body = json!({"status": {"conditions": ready}});
                let _ = self.serve(Verb::merge(Res::Node, "", name.as_str(), Part::Status, body), None);
                self.kubelet_soon(n);
            }
            Some(node) if node.node().and_then(|v| v.ready) != Some(true) => {
                let body = json!({"status": {"conditions": ready}});
                let _ = self.serve(Verb::merge(Res::Node, "", name.as_str(), Part::Status, body), None);
            }
            Some(_) => {}
        }
    }

    /// The agent says that launchers may be placed on its node.
    pub(super) fn assert_node(&mut self, n: usize) {
        let name = self.nodes[n].name.clone();
        if self.nodes[n].agent.is_none() {
            return;
        }
        let reached = self.nodes[n].reaches_api(self.now);
        let Some(node) = self.server.get(Res::Node, "", name.as_str()).filter(|_| reached) else {
            return self.after(2000, Action::AssertNode(n));
        };
        if node.node().and_then(|v| v.schedulable) != Some(true) {
            let body = json!({"metadata": {"labels": {api::names::LABEL_SCHEDULABLE: "true"}}});
            let _ = self.serve(Verb::merge(Res::Node, "", name.as_str(), Part::Main, body), None);
        }
    }
}

/// What the status of a pod is to become; `None` where it is that already.
fn status_of(pod: &Seen, stage: &Stage, now: u64) -> Option<Value> {
    let conditions = embedded::semantics::value::items(&pod.value, "/status/conditions");
    let gate = conditions.iter().find(|c| c["type"] == api::names::GATE_UNPAUSED);
    let open = gate.is_some_and(|g| g["status"] == "True");
    let (phase, state, ready, reason) = match stage {
        Stage::Preparing => return None,
        Stage::Running if open => ("Running", json!({"running": {}}), "True", ""),
        Stage::Running => ("Running", json!({"running": {}}), "False", "ReadinessGatesNotReady"),
        Stage::Ended(code, message) => {
            let mut ended = json!({"exitCode": code, "reason": if *code == 0 { "Completed" } else { "Error" }});
            if !message.is_empty() {
                ended["message"] = json!(message);
            }
            let phase = if *code == 0 { "Succeeded" } else { "Failed" };
            (phase, json!({"terminated": ended}), "False", "PodCompleted")
        }
    };
    let mut list: Vec<Value> = conditions.iter().filter(|c| c["type"] != "Ready").cloned().collect();
    let old = conditions.iter().find(|c| c["type"] == "Ready");
    let same = old.is_some_and(|o| o["status"] == ready && o["reason"].as_str().unwrap_or("") == reason);
    if same && pod.text("/status/phase") == phase {
        return None;
    }
    let mut condition = json!({"type": "Ready", "status": ready, "lastTransitionTime": Timestamp(now).to_string()});
    if !reason.is_empty() {
        condition["reason"] = json!(reason);
    }
    list.push(condition);
    // What a pod that is over says of its phase stays.
    let phase = match pod.text("/status/phase") {
        over @ ("Succeeded" | "Failed") => over.to_owned(),
        _ => phase.to_owned(),
    };
    let image = pod.text("/spec/containers/0/image");
    let container = json!({"name": "compute", "image": image, "imageID": "", "ready": ready == "True", "restartCount": 0, "state": state});
    Some(json!({"metadata": {"uid": pod.uid()}, "status": {
        "phase": phase, "conditions": list, "containerStatuses": [container]}}))
}
