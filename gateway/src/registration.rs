//! What a Kubernetes must know of a gateway that is no part of it: a Service as its name, the aggregated API, the webhooks.
//!
//! The objects are written once, by whoever installs (`virtfold crds --gateway`); the gateway itself keeps the certificates of
//! its authorities in them, and may change nothing else that is not named here. Who the webhooks are not asked about is
//! decided here:
//!
//! * Creations, and updates of a spec, are refused while no gateway answers.
//! * Everything else goes on: labels, owners and finalizers are not asked about at all, nor is what is being deleted, nor
//!   what the controller and the collectors of Kubernetes write; status that others write is asked about, and passes
//!   while nobody answers. The policy in `embedded` keeps the control plane's fields for the control plane then.

use base64::Engine;
use kube::Client;
use serde_json::{Value, json};
use state::object::Pattern;

use crate::kubernetes::call;
use crate::{Status, VERSIONS, webhook};

/// Name of the Service, of the webhook configurations, and of what is granted for them.
pub const NAME: &str = "virtfold-gateway";
/// Port of the Service.
pub const PORT: u16 = 443;
/// The group of KubeVirt's importer of disks, which a cluster may have without us.
const IMPORTER: &str = "cdi.kubevirt.io";
/// A call that takes longer is as if nobody had answered.
const PATIENCE: u8 = 10;

/// Name in the gateway's certificate.
pub fn server_name(namespace: &str) -> String {
    format!("{NAME}.{namespace}.svc")
}

/// The objects, for a gateway that the API server reaches at a host and a port. `unasked` are users whose updates no webhook is
/// asked about: the controller and the collectors of Kubernetes.
pub fn objects(namespace: &str, host: &str, port: u16, unasked: &[String]) -> Vec<Value> {
    let mut objects = vec![json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME, "namespace": namespace},
        "spec": {"type": "ExternalName", "externalName": host, "ports": [{"name": "https", "port": port}]},
    })];
    let service = json!({"namespace": namespace, "name": NAME, "port": port});
    objects.extend(VERSIONS.iter().zip([15, 10]).map(|(version, priority)| {
        json!({
            "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
            "metadata": {"name": format!("{version}.{}", api::names::SUBRESOURCE_GROUP)},
            "spec": {"group": api::names::SUBRESOURCE_GROUP, "version": version, "service": service,
                "groupPriorityMinimum": 1000, "versionPriority": priority},
        })
    }));
    for (kind, path) in
        [("MutatingWebhookConfiguration", webhook::MUTATE), ("ValidatingWebhookConfiguration", webhook::VALIDATE)]
    {
        objects.push(json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": NAME},
            "webhooks": webhooks(&service, path, unasked),
        }));
    }
    objects
}

fn webhooks(service: &Value, path: &str, unasked: &[String]) -> Value {
    let mut client = json!({"service": service});
    client["service"]["path"] = path.into();
    let users = json!(unasked);
    let asked = json!({"name": "asked-users", "expression": format!("!(request.userInfo.username in {users})")});
    let alive = json!({"name": "alive", "expression": "!has(object.metadata.deletionTimestamp)"});
    // Of another spec than before, or where there is none on one side.
    let other = "has(object.spec) != has(oldObject.spec) || (has(object.spec) && object.spec != oldObject.spec)";
    let spec = json!({"name": "spec-changed", "expression": other});
    let hook = |name: &str, operation: &str, groups: &[&str], resources: &[&str], conditions: Value, policy: &str| {
        json!({
            "name": format!("{name}.virtfold.io"), "clientConfig": client, "admissionReviewVersions": ["v1"],
            "sideEffects": "None", "timeoutSeconds": PATIENCE, "failurePolicy": policy, "matchPolicy": "Equivalent",
            "matchConditions": conditions,
            "rules": [{"apiGroups": groups, "apiVersions": ["*"], "operations": [operation],
                "resources": resources, "scope": "*"}],
        })
    };
    // Whole kinds that nothing acts on are refused by name; those of an importer of disks are that importer's.
    let mut groups: Vec<&str> = api::crd::versions().into_iter().map(|(group, _)| group).collect();
    groups.retain(|group| *group != IMPORTER);
    groups.dedup();
    let own = [api::names::GROUP];
    let mut kept =
        vec!["virtualmachines", "virtualmachineinstancereplicasets", "virtualmachineinstancepresets", "kubevirts"];
    kept.extend(Pattern::ALL.map(Pattern::plural));
    let written = ["virtualmachineinstances", "virtualmachineinstances/status", "virtualmachines/status"];
    let mut all = vec![
        hook("create", "CREATE", &groups, &["*"], json!([]), "Fail"),
        hook("change", "UPDATE", &[api::names::GROUP, Pattern::GROUP], &kept, json!([asked, alive, spec]), "Fail"),
        hook("status", "UPDATE", &own, &written, json!([asked, alive]), "Ignore"),
    ];
    if path == webhook::VALIDATE {
        // A machine that is to be moved away is not shut down because nobody could be asked: a drain waits.
        let launcher = format!("request.name.startsWith('{}-')", api::names::APP_LAUNCHER);
        let conditions = json!([{"name": "launcher", "expression": launcher}]);
        let mut evict = hook("evict", "CREATE", &[""], &["pods/eviction"], conditions, "Fail");
        evict["sideEffects"] = "NoneOnDryRun".into();
        all.push(evict);
        // Nothing is lost with the settings of a cluster: where nobody answers they go.
        all.push(hook("end", "DELETE", &own, &["kubevirts"], json!([]), "Ignore"));
    }
    all.into()
}

/// The authorities to be trusted where `known` (base64 of PEM) are: ours, and those of other gateways that have not ended.
fn bundle(ours: &str, known: &Value, now: i64) -> Value {
    let base64 = &base64::engine::general_purpose::STANDARD;
    let known = known.as_str().and_then(|text| base64.decode(text).ok()).unwrap_or_default();
    let mut all: Vec<&str> = certificates(ours);
    let text = String::from_utf8_lossy(&known).into_owned();
    let mut others: Vec<&str> = certificates(&text);
    others.retain(|pem| {
        let parsed = x509_parser::pem::parse_x509_pem(pem.as_bytes()).ok();
        let until = parsed.and_then(|(_, pem)| Some(pem.parse_x509().ok()?.validity().not_after.timestamp()));
        !all.contains(pem) && until.is_some_and(|until| until > now)
    });
    all.append(&mut others);
    // In one order, so that two gateways agree.
    all.sort_unstable();
    base64.encode(all.join("")).into()
}

/// The certificates of a PEM text, each with its line end.
fn certificates(pem: &str) -> Vec<&str> {
    pem.split_inclusive("-----END CERTIFICATE-----\n").map(str::trim_start).filter(|part| !part.is_empty()).collect()
}

/// Writes the authorities, PEM, into the objects that are there, where they miss; those of other gateways stay until they end.
/// False: some object is missing.
///
/// # Errors
/// What the API server says.
pub async fn trust(client: &Client, authorities: &str, now: jiff::Timestamp) -> Result<bool, Status> {
    let mut complete = true;
    let api = VERSIONS.map(|version| {
        format!("/apis/apiregistration.k8s.io/v1/apiservices/{version}.{}", api::names::SUBRESOURCE_GROUP)
    });
    let hooks = ["mutating", "validating"]
        .map(|kind| format!("/apis/admissionregistration.k8s.io/v1/{kind}webhookconfigurations/{NAME}"));
    for path in api.iter().chain(&hooks) {
        let object = match call(client, "GET", path, "", Vec::new()).await {
            Ok(object) => object,
            Err(status) if status.code == 404 => {
                complete = false;
                continue;
            }
            Err(status) => return Err(status),
        };
        let places: Vec<String> = match object["webhooks"].as_array() {
            Some(all) => (0..all.len()).map(|n| format!("/webhooks/{n}/clientConfig/caBundle")).collect(),
            None => vec!["/spec/caBundle".into()],
        };
        let missing: Vec<Value> = places
            .into_iter()
            .filter_map(|place| {
                let known = object.pointer(&place).unwrap_or(&Value::Null);
                let wanted = bundle(authorities, known, now.as_second());
                (*known != wanted).then(|| json!({"op": "add", "path": place, "value": wanted}))
            })
            .collect();
        if missing.is_empty() {
            continue;
        }
        let version = json!({"op": "test", "path": "/metadata/resourceVersion",
            "value": object["metadata"]["resourceVersion"]});
        let patch: Vec<Value> = std::iter::once(version).chain(missing).collect();
        let body = serde_json::to_vec(&patch).map_err(Status::internal)?;
        call(client, "PATCH", path, "application/json-patch+json", body).await?;
    }
    Ok(complete)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn gateways_leave_each_other_their_authorities() {
        let dir = tempfile::tempdir().unwrap();
        let ca = |name: &str| embedded::pki::Pki::open(&dir.path().join(name)).unwrap().ca().to_owned();
        let (one, two) = (ca("one"), ca("two"));
        let first = bundle(&one, &Value::Null, 0);
        let both = bundle(&two, &first, 0);
        assert_eq!(bundle(&one, &both, 0), both, "nothing is left to write");
        assert_eq!(bundle(&two, &both, 0), both);
        let known = base64::engine::general_purpose::STANDARD.decode(both.as_str().unwrap()).unwrap();
        let known = String::from_utf8(known).unwrap();
        assert!(known.contains(&one) && known.contains(&two));
        assert_eq!(bundle(&one, &both, i64::MAX), first, "what has ended is forgotten");
        assert_eq!(bundle(&one, &Value::from("nonsense"), 0), first);
    }

    #[test]
    fn nothing_but_specs_depends_on_a_gateway_that_answers() {
        let all = objects("virtfold", "127.0.0.1", 9443, &["virtfold-controller".into()]);
        assert_eq!(all.len(), 5);
        for configuration in all.iter().filter(|o| o["webhooks"].is_array()) {
            for hook in configuration["webhooks"].as_array().into_iter().flatten() {
                let conditions = hook["matchConditions"].to_string();
                match (hook["failurePolicy"].as_str(), hook["rules"][0]["operations"][0].as_str()) {
                    (Some("Fail"), Some("CREATE")) => {}
                    (Some("Fail"), Some("UPDATE")) => assert!(
                        conditions.contains("object.spec != oldObject.spec")
                            && conditions.contains("virtfold-controller")
                            && conditions.contains("deletionTimestamp"),
                        "{hook}"
                    ),
                    (policy, operation) => {
                        assert!(policy == Some("Ignore") && matches!(operation, Some("UPDATE" | "DELETE")), "{hook}");
                    }
                }
            }
        }
    }
}
