//! Launcher pods.

use super::{Meta, Project};
use crate::{NodeName, PodUid, Timestamp, VmiUid, condition::Cond, object::Kind};
use api::{ObjectMeta, names};
use litemap::LiteMap;
use serde::{Deserialize, Serialize};

/// Phase of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PodPhase {
    /// Not all containers run.
    Pending,
    /// Containers run.
    Running,
    /// Ended, or nobody knows (which proves nothing): told apart by `compute`.
    Unknown,
    /// All ended well.
    Succeeded,
    /// One ended badly.
    Failed,
}

/// State of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ContainerState {
    /// Not started.
    Waiting {
        /// `ErrImagePull`, `ContainerCreating`, ...
        reason: String,
        /// For people.
        message: String,
    },
    /// Runs.
    Running,
    /// Ended.
    Terminated {
        /// Exit code.
        exit: i32,
        /// `Completed`, `Error`, `OOMKilled`, ...
        reason: String,
        /// Termination message.
        message: String,
    },
}

/// A launcher pod.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PodView {
    /// Metadata.
    pub meta: Meta,
    /// VMI that owns it.
    pub vmi: VmiUid,
    /// Annotations that follow the template ([`names::ANN_FOLLOWING`]).
    #[serde(default, skip_serializing_if = "LiteMap::is_empty")]
    pub following: LiteMap<String, String>,
    /// Where it was bound to.
    pub node: Option<NodeName>,
    /// Phase.
    pub phase: PodPhase,
    /// The pod's own reason (`Evicted`, `NodeLost`, ...).
    pub reason: String,
    /// Container `compute`.
    pub compute: Option<ContainerState>,
    /// What other containers wait for, where it is an error of an image: (reason, message).
    pub image_error: Option<(String, String)>,
    /// Condition Ready.
    pub ready: Option<Cond>,
    /// Condition PodScheduled where it is not True.
    pub unscheduled: Option<Cond>,
    /// QoS class.
    pub qos_class: Option<String>,
    /// Image of `compute`.
    pub image: Option<String>,
    /// A container beside `compute` that is not ready (`istio-proxy`: that does not run).
    pub lacks: Option<String>,
    /// Bytes of memory that the launcher needs beside its guest's.
    pub memory_overhead: Option<String>,
    /// Who is to place it, where that is not Kubernetes' own scheduler, and as long as it is not placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduler: Option<Box<str>>,
    /// When it got its node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placed: Option<Timestamp>,
    /// When `compute` began to run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started: Option<Timestamp>,
}

impl PodView {
    /// UID.
    pub fn pod_uid(&self) -> PodUid {
        PodUid(self.meta.uid.0.clone())
    }

    /// `compute` runs on a node, so that the agent can start a domain in it.
    pub fn can_start(&self) -> bool {
        self.phase == PodPhase::Running
            && self.node.is_some()
            && self.meta.deleting.is_none()
            && matches!(self.compute, Some(ContainerState::Running))
            && self.lacks.is_none()
    }

    /// Proven to have ended: `compute` terminated, or the pod itself ended without ever having had containers.
    pub fn ended(&self) -> bool {
        match (&self.compute, self.phase) {
            (Some(ContainerState::Terminated { .. }), _) => true,
            (_, PodPhase::Succeeded) => true,
            // Evicted before it ran, or refused by the node: there is no container that could run a domain.
            (None | Some(ContainerState::Waiting { .. }), PodPhase::Failed) => true,
            // Written by somebody other than the node while the node was away.
            (Some(ContainerState::Running), PodPhase::Failed) => false,
            (
                None | Some(ContainerState::Running | ContainerState::Waiting { .. }),
                PodPhase::Pending | PodPhase::Running | PodPhase::Unknown,
            ) => false,
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RawPodSpec {
    node_name: Option<String>,
    scheduler_name: Option<Box<str>>,
    containers: Vec<RawContainer>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawContainer {
    name: String,
    image: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RawPodStatus {
    phase: String,
    reason: String,
    qos_class: Option<String>,
    conditions: Vec<Cond>,
    container_statuses: Vec<RawContainerStatus>,
    init_container_statuses: Vec<RawContainerStatus>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawContainerStatus {
    name: String,
    ready: bool,
    state: RawContainerState,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawContainerState {
    waiting: Option<RawReason>,
    running: Option<RawRunning>,
    terminated: Option<RawReason>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RawRunning {
    started_at: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RawReason {
    reason: String,
    message: String,
    exit_code: i32,
}

/// Typed reader of a Pod.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct RawPod {
    metadata: ObjectMeta,
    spec: RawPodSpec,
    status: RawPodStatus,
}

/// Reasons for which a container waits that mean "the image cannot be had", as they are shown on VM and VMI.
fn image_reason(reason: &str) -> Option<&'static str> {
    match reason {
        "ErrImagePull" | "ErrImageNeverPull" | "InvalidImageName" | "ImageInspectError" | "RegistryUnavailable" => {
            Some("ErrImagePull")
        }
        "ImagePullBackOff" => Some("ImagePullBackOff"),
        _ => None,
    }
}

impl Project for PodView {
    type Raw = RawPod;
    fn metadata(raw: &RawPod) -> &ObjectMeta {
        &raw.metadata
    }
    fn project(raw: RawPod) -> Self {
        let st = raw.status;
        let state = |s: &RawContainerState| match (&s.terminated, &s.running, &s.waiting) {
            (Some(t), _, _) => Some(ContainerState::Terminated {
                exit: t.exit_code,
                reason: t.reason.clone(),
                message: t.message.clone(),
            }),
            (None, Some(_), _) => Some(ContainerState::Running),
            (None, None, Some(w)) => {
                Some(ContainerState::Waiting { reason: w.reason.clone(), message: w.message.clone() })
            }
            (None, None, None) => None,
        };
        let waiting =
            st.init_container_statuses.iter().chain(&st.container_statuses).filter_map(|c| c.state.waiting.as_ref());
        let owner = raw.metadata.owner_references.iter().find(|o| o.controller);
        let mut following = super::following(|k| raw.metadata.annotations.get(k).cloned());
        let evicting = raw.metadata.annotations.get(names::ANN_EVICTING);
        following.extend(evicting.map(|v| (names::ANN_EVICTING.to_owned(), v.clone())));
        let good = |c: &&RawContainerStatus| match c.name.as_str() {
            "compute" => true,
            "istio-proxy" => c.state.running.is_some(),
            _ => c.ready,
        };
        let compute = st.container_statuses.iter().find(|c| c.name == "compute");
        let began = compute.and_then(|c| c.state.running.as_ref()?.started_at.as_deref());
        let placed = crate::condition::find(&st.conditions, "PodScheduled").filter(|c| c.is_true());
        Self {
            scheduler: raw
                .spec
                .scheduler_name
                .filter(|s| !["", "default-scheduler"].contains(&s.as_ref()))
                .filter(|_| raw.spec.node_name.as_ref().is_none_or(String::is_empty)),
            started: began.and_then(Timestamp::parse),
            placed: placed.and_then(|c| Timestamp::parse(c.last_transition_time.as_deref()?)),
            lacks: st.container_statuses.iter().find(|c| !good(c)).map(|c| c.name.clone()),
            memory_overhead: raw.metadata.annotations.get(names::ANN_MEMORY_OVERHEAD).cloned(),
            meta: Meta::of(&raw.metadata),
            following,
            vmi: owner
                .filter(|o| o.kind == Kind::VirtualMachineInstance.name())
                .map(|o| VmiUid(o.uid.clone()))
                .unwrap_or_default(),
            node: raw.spec.node_name.filter(|n| !n.is_empty()).map(NodeName),
            phase: match st.phase.as_str() {
                "" | "Pending" => PodPhase::Pending,
                "Running" => PodPhase::Running,
                "Succeeded" => PodPhase::Succeeded,
                "Failed" => PodPhase::Failed,
                _ => PodPhase::Unknown,
            },
            reason: st.reason,
            compute: compute.and_then(|c| state(&c.state)),
            image_error: waiting
                .filter_map(|w| image_reason(&w.reason).map(|r| (r.to_owned(), w.message.clone())))
                .next(),
            ready: crate::condition::find(&st.conditions, "Ready").cloned(),
            unscheduled: crate::condition::find(&st.conditions, "PodScheduled").filter(|c| !c.is_true()).cloned(),
            qos_class: st.qos_class,
            image: raw.spec.containers.into_iter().find(|c| c.name == "compute").and_then(|c| c.image),
        }
    }
}
