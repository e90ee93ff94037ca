//! What a VMI says about the authority to run it.

use crate::{Millis, NodeName, PodUid, ResourceVersion, VmiUid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How far a VMI has come, as far as a node needs to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// Not handed over to a node yet, or a phase that this version does not know.
    Before,
    /// Scheduled or Running: the pods that it names may run it.
    Granted,
    /// Succeeded or Failed.
    Final,
}

/// A VMI, as far as a node needs to know it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmiFacts {
    /// UID.
    pub uid: VmiUid,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Version that says all this.
    pub rv: ResourceVersion,
    /// It is being deleted.
    pub deleting: bool,
    /// From power button to kill.
    pub grace: Millis,
    /// How far it has come.
    pub stage: Stage,
    /// Pods that may run it, and where.
    pub active_pods: BTreeMap<PodUid, NodeName>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Raw {
    metadata: api::ObjectMeta,
    spec: RawSpec,
    status: RawStatus,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RawSpec {
    termination_grace_period_seconds: Option<i64>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RawStatus {
    phase: String,
    active_pods: BTreeMap<String, String>,
}

impl VmiFacts {
    /// Reads them out of a VMI in JSON; `None` where it is none.
    pub fn read(json: &[u8]) -> Option<Self> {
        let raw: Raw = serde_json::from_slice(json).ok()?;
        if raw.metadata.uid.is_empty() {
            return None;
        }
        Some(Self {
            uid: raw.metadata.uid.as_str().into(),
            rv: ResourceVersion::parse(&raw.metadata.resource_version),
            deleting: raw.metadata.deletion_timestamp.is_some(),
            grace: Millis::secs(
                raw.spec
                    .termination_grace_period_seconds
                    .unwrap_or(api::names::DEFAULT_GRACE_SECONDS)
                    .try_into()
                    .unwrap_or(0),
            ),
            stage: match raw.status.phase.as_str() {
                "Scheduled" | "Running" => Stage::Granted,
                "Succeeded" | "Failed" => Stage::Final,
                _ => Stage::Before,
            },
            active_pods: raw.status.active_pods.into_iter().map(|(p, n)| (PodUid(p), NodeName(n))).collect(),
            namespace: raw.metadata.namespace,
            name: raw.metadata.name,
        })
    }

    /// Why this pod may not start it on this node; `Ok` where it may.
    pub fn authorises(&self, pod: &PodUid, node: &NodeName) -> Result<(), String> {
        if self.deleting {
            return Err(format!("the VMI is being deleted (version {})", self.rv));
        }
        match self.stage {
            Stage::Granted => {}
            Stage::Before => return Err(format!("the VMI is neither Scheduled nor Running (version {})", self.rv)),
            Stage::Final => return Err(format!("the VMI has ended (version {})", self.rv)),
        }
        match self.active_pods.get(pod) {
            Some(n) if n == node => Ok(()),
            Some(other) => Err(format!("the VMI's activePods puts this pod on node {other} (version {})", self.rv)),
            None => Err(format!("the VMI's activePods does not name this pod (version {})", self.rv)),
        }
    }

    /// Whether a domain in this pod is somebody's mistake: the VMI has ended, or names other pods and not this one. An empty
    /// `activePods` was restored or edited and accuses nobody.
    pub fn disowns(&self, pod: &PodUid) -> bool {
        match self.stage {
            Stage::Final => true,
            Stage::Before | Stage::Granted => !self.active_pods.is_empty() && !self.active_pods.contains_key(pod),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn read(change: impl FnOnce(&mut serde_json::Value)) -> VmiFacts {
        let mut v = json!({
            "metadata": {"uid": "u", "name": "n", "namespace": "ns", "resourceVersion": "7"},
            "spec": {"terminationGracePeriodSeconds": 5},
            "status": {"phase": "Scheduled", "activePods": {"p": "node"}},
        });
        change(&mut v);
        VmiFacts::read(v.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn only_a_living_vmi_that_names_this_pod_on_this_node_authorises() {
        let ok = |f: &VmiFacts| f.authorises(&"p".into(), &"node".into()).is_ok();
        let stray = |f: &VmiFacts| f.disowns(&"p".into());
        let usual = read(|_| {});
        assert_eq!((usual.rv, usual.grace), (ResourceVersion(7), Millis(5000)));
        for (change, authorises, disowns) in [
            (json!({}), true, false),
            (json!({"status": {"phase": "Running", "activePods": {"p": "node", "q": "other"}}}), true, false),
            (json!({"status": {"phase": "Scheduling", "activePods": {"p": "node"}}}), false, false),
            (json!({"status": {"phase": "Later", "activePods": {"p": "node"}}}), false, false),
            (json!({"status": {"phase": "Scheduled", "activePods": {}}}), false, false),
            (json!({"status": {"phase": "Scheduled"}}), false, false),
            (json!({"status": {"phase": "Scheduled", "activePods": {"p": "other"}}}), false, false),
            (json!({"status": {"phase": "Running", "activePods": {"q": "node"}}}), false, true),
            (json!({"status": {"phase": "Succeeded", "activePods": {"p": "node"}}}), false, true),
            (json!({"status": {"phase": "Failed"}}), false, true),
        ] {
            let f = read(|v| change.as_object().unwrap().iter().for_each(|(k, x)| v[k] = x.clone()));
            assert_eq!((ok(&f), stray(&f)), (authorises, disowns), "{change}");
        }
        let deleting = read(|v| v["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into());
        assert!(!ok(&deleting) && !stray(&deleting), "it is shut down within its grace, not destroyed");
        assert_eq!(VmiFacts::read(b"{}"), None);
        assert_eq!(VmiFacts::read(b"\xff"), None);
        assert_eq!(VmiFacts::read(b"[1]"), None);
    }
}
