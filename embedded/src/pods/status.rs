//! The status that a kubelet would write for a pod. Pure: from the pod, the record and what is being waited for to the patch,
//! or nothing when the pod says all of it already.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Map, Value, json};

use super::record::{Record, Stage};

/// What the container waits for while it does not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Waiting {
    /// `ContainerCreating`, `ErrImagePull`, `ImagePullBackOff`, `CreateContainerConfigError`, `CreateContainerError`.
    pub reason: String,
    /// For people.
    pub message: String,
}

/// All that the status is made from.
#[derive(Debug, Clone, Copy)]
pub(super) struct View<'a> {
    /// The record.
    pub record: &'a Record,
    /// While preparing.
    pub waiting: Option<&'a Waiting>,
    /// What the readiness probe says; true where there is none.
    pub ready: bool,
    /// Address of the node.
    pub host_ip: &'a str,
    /// The present time.
    pub now: &'a str,
}

struct Wanted {
    kind: &'static str,
    status: bool,
    reason: Option<String>,
    message: Option<String>,
}

fn wanted(kind: &'static str, status: bool) -> Wanted {
    Wanted { kind, status, reason: None, message: None }
}

/// The first readiness gate that is not open, as a message.
fn closed_gate(pod: &Pod) -> Option<String> {
    let conditions = pod.status.as_ref().and_then(|s| s.conditions.as_ref());
    pod.spec.iter().flat_map(|s| s.readiness_gates.iter().flatten()).find_map(|gate| {
        let kind = &gate.condition_type;
        match conditions.into_iter().flatten().find(|c| &c.type_ == kind) {
            None => Some(format!("corresponding condition of pod readiness gate {kind:?} does not exist.")),
            Some(c) if c.status != "True" => {
                Some(format!("the status of pod readiness gate {kind:?} is not \"True\", but {}", c.status))
            }
            Some(_) => None,
        }
    })
}

fn conditions(pod: &Pod, view: View<'_>) -> Vec<Wanted> {
    let names: Vec<&str> = pod.spec.iter().flat_map(|s| s.containers.iter()).map(|c| c.name.as_str()).collect();
    let running = matches!(view.record.stage, Stage::Running { .. });
    let sandbox =
        view.record.address.is_some() && !matches!(view.record.stage, Stage::Exited(_) | Stage::Refused { .. });
    let mut containers = wanted("ContainersReady", running && view.ready);
    let mut ready = wanted("Ready", running && view.ready);
    match &view.record.stage {
        Stage::Running { .. } if !view.ready => {
            let message = format!("containers with unready status: [{}]", names.join(" "));
            for condition in [&mut containers, &mut ready] {
                condition.reason = Some("ContainersNotReady".into());
                condition.message = Some(message.clone());
            }
        }
        Stage::Running { .. } => {
            if let Some(message) = closed_gate(pod) {
                ready = Wanted {
                    status: false,
                    reason: Some("ReadinessGatesNotReady".into()),
                    message: Some(message),
                    ..ready
                };
            }
        }
        Stage::Preparing | Stage::Starting => {
            let message = format!("containers with unready status: [{}]", names.join(" "));
            for condition in [&mut containers, &mut ready] {
                condition.reason = Some("ContainersNotReady".into());
                condition.message = Some(message.clone());
            }
        }
        Stage::Exited(_) | Stage::Refused { .. } => {
            let done = matches!(&view.record.stage, Stage::Exited(exit) if exit.code == 0);
            for condition in [&mut containers, &mut ready] {
                condition.reason = Some(if done { "PodCompleted" } else { "PodFailed" }.into());
            }
        }
    }
    vec![
        wanted("PodScheduled", true),
        wanted("PodReadyToStartContainers", sandbox),
        wanted("Initialized", true),
        containers,
        ready,
    ]
}

fn container_status(pod: &Pod, view: View<'_>) -> Option<Value> {
    let container = pod.spec.as_ref()?.containers.first()?;
    let id = view.record.container.as_ref().map(|c| format!("virtfold://{c}"));
    let mut state = Map::new();
    let mut running = false;
    match &view.record.stage {
        Stage::Preparing | Stage::Starting => {
            let mut waiting = json!({"reason": view.waiting.map_or("ContainerCreating", |w| w.reason.as_str())});
            if let Some(message) = view.waiting.map(|w| w.message.as_str()).filter(|m| !m.is_empty()) {
                waiting["message"] = message.into();
            }
            state.insert("waiting".into(), waiting);
        }
        Stage::Running { started_at, .. } => {
            running = true;
            state.insert("running".into(), json!({"startedAt": started_at}));
        }
        Stage::Exited(exit) => {
            let mut ended = json!({
                "exitCode": exit.code,
                "reason": exit.reason,
                "startedAt": exit.started_at,
                "finishedAt": exit.finished_at,
                "containerID": id,
            });
            if let Some(signal) = exit.signal {
                ended["signal"] = signal.into();
            }
            if !exit.message.is_empty() {
                ended["message"] = exit.message.as_str().into();
            }
            state.insert("terminated".into(), without_nulls(ended));
        }
        Stage::Refused { .. } => return None,
    }
    Some(without_nulls(json!({
        "name": container.name,
        "image": container.image.as_deref().unwrap_or_default(),
        "imageID": "",
        "containerID": id,
        "ready": running && view.ready,
        "started": running,
        "restartCount": 0,
        "state": state,
        "lastState": {},
    })))
}

fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(map) => Value::Object(map.into_iter().filter(|(_, v)| !v.is_null()).collect()),
        other => other,
    }
}

/// Whether the API says that the pod is over. Nothing follows on that.
pub(super) fn is_final(pod: &Pod) -> bool {
    matches!(pod.status.as_ref().and_then(|s| s.phase.as_deref()), Some("Succeeded" | "Failed"))
}

/// The strategic merge patch of the pod's status; none when there is nothing to say. Conditions are merged by type, so
/// that the gates, which others write, stay as they are.
pub(super) fn patch(pod: &Pod, view: View<'_>) -> Option<Value> {
    let record = view.record;
    let mut status = Map::new();
    let phase = match &record.stage {
        Stage::Preparing | Stage::Starting => "Pending",
        Stage::Running { .. } => "Running",
        Stage::Exited(exit) if exit.code == 0 => "Succeeded",
        Stage::Exited(_) => "Failed",
        Stage::Refused { reason, message } => {
            status.insert("reason".into(), reason.as_str().into());
            status.insert("message".into(), message.as_str().into());
            "Failed"
        }
    };
    if is_final(pod) {
        // What it says stays; that the container is over may be missing.
        if !matches!(record.stage, Stage::Exited(_)) {
            return None;
        }
        status.clear();
    } else {
        status.insert("phase".into(), phase.into());
    }
    status.insert("startTime".into(), record.seen_at.as_str().into());
    status.insert("hostIP".into(), view.host_ip.into());
    status.insert("hostIPs".into(), json!([{"ip": view.host_ip}]));
    if let Some(address) = record.address {
        status.insert("podIP".into(), address.to_string().into());
        status.insert("podIPs".into(), json!([{"ip": address}]));
    }
    if let Some(container) = container_status(pod, view) {
        status.insert("containerStatuses".into(), json!([container]));
    }
    let old = serde_json::to_value(&pod.status).unwrap_or_default();
    let old_conditions = pod.status.as_ref().and_then(|s| s.conditions.as_deref()).unwrap_or_default();
    let mut changed = Vec::new();
    for condition in conditions(pod, view) {
        let text = if condition.status { "True" } else { "False" };
        let before = old_conditions.iter().find(|c| c.type_ == condition.kind);
        if condition.kind == "PodScheduled" && before.is_some() {
            continue;
        }
        if before.is_some_and(|b| b.status == text && b.reason == condition.reason && b.message == condition.message) {
            continue;
        }
        let since =
            before.filter(|b| b.status == text).and_then(|b| serde_json::to_value(&b.last_transition_time).ok());
        changed.push(json!({
            "type": condition.kind,
            "status": text,
            "reason": condition.reason,
            "message": condition.message,
            "lastProbeTime": null,
            "lastTransitionTime": since.filter(|t| !t.is_null()).unwrap_or_else(|| view.now.into()),
        }));
    }
    let same = |key: &str, value: &Value| old.get(key).is_some_and(|o| covers(o, value));
    if changed.is_empty() && status.iter().all(|(key, value)| same(key, value)) {
        return None;
    }
    if !changed.is_empty() {
        status.insert("conditions".into(), changed.into());
    }
    Some(json!({"metadata": {"uid": record.uid}, "status": status}))
}

/// Whether `old` says all that `new` says. Empty objects and absent ones are the same.
fn covers(old: &Value, new: &Value) -> bool {
    match (old, new) {
        (Value::Object(o), Value::Object(n)) => {
            n.iter().all(|(k, v)| match o.get(k) {
                Some(before) => covers(before, v),
                None => v.as_object().is_some_and(Map::is_empty) || v.as_str() == Some(""),
            }) && o
                .keys()
                .filter(|k| matches!(k.as_str(), "waiting" | "running" | "terminated"))
                .all(|k| n.contains_key(k))
        }
        (Value::Array(o), Value::Array(n)) => o.len() == n.len() && o.iter().zip(n).all(|(o, n)| covers(o, n)),
        (o, n) => o == n,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::record::Exit;
    use super::*;
    use crate::procs::ProcessId;

    fn pod(status: &Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {
                "readinessGates": [{"conditionType": "kubevirt.io/virtual-machine-unpaused"}],
                "containers": [{"name": "compute", "image": "virtfold/launcher:1"}]},
            "status": status,
        }))
        .unwrap()
    }

    fn record(stage: Stage) -> Record {
        Record {
            uid: "u".into(),
            namespace: "n".into(),
            name: "p".into(),
            vmi_uid: "v".into(),
            vmi_name: "n".into(),
            seen_at: "2026-01-01T00:00:00Z".into(),
            stage,
            address: Some([10, 244, 1, 2].into()),
            stopping: None,
            container: Some("vf-x-u".into()),
            message_from_log: false,
        }
    }

    fn running() -> Stage {
        Stage::Running {
            process: ProcessId { pid: 1, started: 1, boot: "b".into() },
            started_at: "2026-01-01T00:00:01Z".into(),
        }
    }

    fn apply(pod: &Pod, patch: &Value) -> Pod {
        let mut status = serde_json::to_value(&pod.status).unwrap();
        let mut list = status["conditions"].as_array().cloned().unwrap_or_default();
        for new in patch["status"]["conditions"].as_array().into_iter().flatten() {
            list.retain(|c| c["type"] != new["type"]);
            list.push(new.clone());
        }
        for (k, v) in patch["status"].as_object().unwrap() {
            status[k] = v.clone();
        }
        status["conditions"] = list.into();
        self::pod(&status)
    }

    fn condition<'a>(pod: &'a Pod, kind: &str) -> &'a k8s_openapi::api::core::v1::PodCondition {
        pod.status.as_ref().unwrap().conditions.as_ref().unwrap().iter().find(|c| c.type_ == kind).unwrap()
    }

    #[test]
    fn each_level_is_written_once() {
        let waiting = Waiting { reason: "ErrImagePull".into(), message: "no".into() };
        let exit = Exit {
            code: 7,
            signal: None,
            reason: "Error".into(),
            message: "bye".into(),
            started_at: Some("2026-01-01T00:00:01Z".into()),
            finished_at: "2026-01-01T00:00:09Z".into(),
        };
        let mut now = pod(&json!({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]}));
        for (stage, waiting, phase) in [
            (Stage::Preparing, Some(&waiting), "Pending"),
            (running(), None, "Running"),
            (Stage::Exited(exit), None, "Failed"),
        ] {
            let record = record(stage);
            let view =
                View { record: &record, waiting, ready: true, host_ip: "10.244.1.1", now: "2026-01-01T00:00:00Z" };
            let first = patch(&now, view).unwrap();
            assert_eq!(first["metadata"]["uid"], "u");
            assert_eq!(first["status"]["phase"], phase);
            now = apply(&now, &first);
            assert_eq!(patch(&now, view), None, "{phase} is written once");
        }
        let ended =
            &now.status.as_ref().unwrap().container_statuses.as_ref().unwrap()[0].state.as_ref().unwrap().terminated;
        assert_eq!(ended.as_ref().unwrap().message.as_deref(), Some("bye"));
        let again = record(running());
        let view =
            View { record: &again, waiting: None, ready: true, host_ip: "10.244.1.1", now: "2026-01-01T00:00:00Z" };
        assert_eq!(patch(&now, view), None, "a final phase stays");
        let never = record(Stage::Refused { reason: "NeverStarted".into(), message: String::new() });
        assert_eq!(patch(&now, View { record: &never, ..view }), None, "a final phase stays");
    }

    #[test]
    fn the_gate_is_others_and_decides_on_ready() {
        let record = record(running());
        let view =
            View { record: &record, waiting: None, ready: true, host_ip: "10.244.1.1", now: "2026-01-01T00:00:00Z" };
        let now = pod(&json!({}));
        let now = apply(&now, &patch(&now, view).unwrap());
        assert_eq!(condition(&now, "ContainersReady").status, "True");
        assert_eq!(condition(&now, "Ready").status, "False");
        assert_eq!(condition(&now, "Ready").reason.as_deref(), Some("ReadinessGatesNotReady"));
        let mut status = serde_json::to_value(&now.status).unwrap();
        status["conditions"]
            .as_array_mut()
            .unwrap()
            .push(json!({"type": "kubevirt.io/virtual-machine-unpaused", "status": "True"}));
        let open = pod(&status);
        let write = patch(&open, view).unwrap();
        assert_eq!(write["status"]["conditions"].as_array().unwrap().len(), 1, "only Ready is written");
        let open = apply(&open, &write);
        assert_eq!(condition(&open, "Ready").status, "True");
        let unready = apply(&open, &patch(&open, View { ready: false, ..view }).unwrap());
        assert_eq!(
            (condition(&unready, "Ready").status.as_str(), condition(&unready, "ContainersReady").status.as_str()),
            ("False", "False")
        );
        assert_eq!(patch(&open, view), None);
    }
}
