//! Evictions of pods (`pods/eviction`): a drain asks, and the strategy of the machine in the pod answers.
//!
//! A refusal is a 429: `kubectl drain` asks again later. Where somebody is to move the machine first, the refusal leaves a
//! mark in its status that says from which node it has to go.

use super::{get, items, text};
use crate::kubernetes::{self, POD, Patched, VMI};
use crate::limits;
use crate::status::Status;
use serde_json::{Value, json};

/// Name in the Eviction of who moves pods about for balance, and not for a drain.
const DESCHEDULER: &str = "sigs.k8s.io/descheduler";
const REQUESTER: &str = "requested-by";
const SOURCE: &str = "kubevirt.io/eviction-source";

/// What an eviction comes to.
#[derive(Debug, PartialEq)]
enum Verdict {
    Allowed,
    Refused(String),
    /// Refused, and somebody has to move the machine away from this node.
    Marked(String, String),
}

/// Whether a pod may be evicted that carries a machine.
fn judge(pod: &Value, vmi: &Value) -> Verdict {
    let (namespace, name) = (text(vmi, &["metadata", "namespace"]), text(vmi, &["metadata", "name"]));
    let migratable = items(vmi, &["status", "conditions"])
        .iter()
        .any(|c| text(c, &["type"]) == "LiveMigratable" && text(c, &["status"]) == "True");
    match (text(vmi, &["spec", "evictionStrategy"]), migratable) {
        ("LiveMigrate", false) => {
            return Verdict::Refused(format!(
                "VMI {name} is configured with an eviction strategy but is not live-migratable; it cannot be evicted"
            ));
        }
        ("LiveMigrate" | "LiveMigrateIfPossible", true) | ("External", _) => {}
        _ => return Verdict::Allowed,
    }
    let triggered = format!("Eviction triggered evacuation of VMI \"{namespace}/{name}\"");
    let node = text(pod, &["spec", "nodeName"]);
    if node != text(vmi, &["status", "nodeName"]) {
        Verdict::Refused("Eviction request for target Pod".into())
    } else if !text(vmi, &["status", "evacuationNodeName"]).is_empty() {
        Verdict::Refused(format!("Evacuation in progress: {triggered}"))
    } else {
        Verdict::Marked(node.into(), triggered)
    }
}

/// The machine in a pod that still runs, as name and UID.
fn machine(pod: &Value) -> Option<(&str, &str)> {
    let ended = matches!(text(pod, &["status", "phase"]), "Succeeded" | "Failed");
    let launcher = text(pod, &["metadata", "labels", api::names::LABEL_APP]) == api::names::APP_LAUNCHER;
    let owner = items(pod, &["metadata", "ownerReferences"])
        .iter()
        .find(|o| text(o, &["kind"]) == "VirtualMachineInstance" && get(o, &["controller"]) == true)?;
    (launcher && !ended).then(|| (text(owner, &["name"]), text(owner, &["uid"])))
}

/// Judges an eviction, and leaves the mark.
pub(crate) async fn admit(
    client: &kube::Client,
    namespace: &str,
    name: &str,
    pod: Option<Value>,
    eviction: &Value,
    dry_run: bool,
) -> Result<(), Status> {
    let too_many = |why: String| Status::new(429, "TooManyRequests", why);
    let pod = match pod {
        Some(pod) => pod,
        // A pod that is gone, or that nobody can read, is not protected.
        None => match kubernetes::get(client, POD, namespace, name).await {
            Ok(Some(pod)) => pod,
            Ok(None) | Err(_) => return Ok(()),
        },
    };
    let Some((owner, uid)) = machine(&pod) else { return Ok(()) };
    for _ in 0..limits::CONFLICTS {
        let vmi = kubernetes::get(client, VMI, namespace, owner).await;
        let vmi = vmi.map_err(|e| too_many(format!("the VMI of pod {name:?} cannot be read: {}", e.message)))?;
        // The machine of this pod is gone, and the pod goes, too.
        let Some(vmi) = vmi.filter(|v| text(v, &["metadata", "uid"]) == uid) else { return Ok(()) };
        let (node, message) = match judge(&pod, &vmi) {
            Verdict::Allowed => return Ok(()),
            Verdict::Refused(why) => return Err(too_many(why)),
            Verdict::Marked(node, message) => (node, message),
        };
        let mut operations = vec![json!({"op": "add", "path": "/status/evacuationNodeName", "value": node})];
        if text(eviction, &["metadata", "annotations", REQUESTER]) == DESCHEDULER {
            let mut annotations = get(&vmi, &["metadata", "annotations"]).clone();
            *super::at(&mut annotations, &[SOURCE]) = json!("descheduler");
            operations.push(json!({"op": "add", "path": "/metadata/annotations", "value": annotations}));
        }
        match kubernetes::patch(client, VMI, &vmi, "", operations, dry_run).await {
            Ok(Patched::Done(_)) => return Err(too_many(message)),
            Ok(Patched::Changed) => {}
            Err(e) => return Err(too_many(format!("the VMI of pod {name:?} cannot be marked: {}", e.message))),
        }
    }
    Err(too_many(format!("the VMI of pod {name:?} changes too often to be marked; ask again")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_eviction_is_answered_by_the_strategy() {
        let pod = json!({"spec": {"nodeName": "n"}});
        let vmi = |strategy: &str, migratable: &str, marked: &str| {
            json!({"metadata": {"namespace": "ns", "name": "a"}, "spec": {"evictionStrategy": strategy},
                "status": {"nodeName": "n", "evacuationNodeName": marked, "conditions": [{"type": "LiveMigratable", "status": migratable}]}})
        };
        let triggered = "Eviction triggered evacuation of VMI \"ns/a\"";
        let mark = || Verdict::Marked("n".into(), triggered.into());
        for (strategy, migratable, want) in [
            ("", "True", Verdict::Allowed),
            ("None", "True", Verdict::Allowed),
            ("LiveMigrate", "True", mark()),
            ("LiveMigrateIfPossible", "True", mark()),
            ("LiveMigrateIfPossible", "False", Verdict::Allowed),
            ("External", "False", mark()),
        ] {
            assert_eq!(judge(&pod, &vmi(strategy, migratable, "")), want, "{strategy} {migratable}");
        }
        let Verdict::Refused(why) = judge(&pod, &vmi("LiveMigrate", "False", "")) else { panic!() };
        assert!(why.contains("not live-migratable"), "{why}");
        let marked = judge(&pod, &vmi("External", "False", "n"));
        assert_eq!(marked, Verdict::Refused(format!("Evacuation in progress: {triggered}")));
        let target = json!({"spec": {"nodeName": "other"}});
        let verdict = judge(&target, &vmi("External", "False", ""));
        assert_eq!(verdict, Verdict::Refused("Eviction request for target Pod".into()));
    }

    #[test]
    fn only_a_running_launcher_has_a_machine() {
        let owner = json!([{"kind": "VirtualMachineInstance", "name": "a", "uid": "u", "controller": true}]);
        let mut pod = json!({"metadata": {"labels": {"kubevirt.io": "virt-launcher"}, "ownerReferences": owner}, "status": {"phase": "Running"}});
        assert_eq!(machine(&pod), Some(("a", "u")));
        pod["status"]["phase"] = json!("Failed");
        assert_eq!(machine(&pod), None);
        pod["status"]["phase"] = json!("Running");
        pod["metadata"]["labels"] = json!({});
        assert_eq!(machine(&pod), None);
    }
}
