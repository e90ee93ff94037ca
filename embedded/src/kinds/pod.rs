//! Pods: defaults, what may change, how long they take to go.

use serde_json::{Value, json};

use crate::semantics::FieldError;
use crate::semantics::amounts::Amounts;
use crate::semantics::names::is_label;
use crate::semantics::quantity::Quantity;
use crate::semantics::resource::Behaviour;
use crate::semantics::value::{self, default, items, object, text};

/// Seconds that a pod has when nothing is said.
const GRACE_DEFAULT: i64 = 30;

/// Pods.
#[derive(Debug)]
pub struct Pod;

const LISTS: [&str; 3] = ["containers", "initContainers", "ephemeralContainers"];

fn requests(container: &Value, which: &str, resource: &str) -> Option<Quantity> {
    container.pointer(&format!("/resources/{which}")).and_then(|m| m.get(resource)).and_then(Quantity::of)
}

/// What a pod's containers ask for (`requests`) or are limited to (`limits`) altogether.
#[must_use]
pub fn amounts(pod: &Value, which: &str) -> Amounts {
    let path = format!("/resources/{which}");
    let read = |c: &Value| Amounts::read(c.pointer(&path));
    let containers = items(pod, "/spec/containers").iter().map(read);
    let init = items(pod, "/spec/initContainers").iter().map(|c| (read(c), text(c, "/restartPolicy") == "Always"));
    let mut sum = Amounts::of_pod(containers, init);
    let overhead = Amounts::read(pod.pointer("/spec/overhead"));
    // Overhead does not make a limit where there is none.
    sum.add(&overhead.only(|name| which == "requests" || sum.find(name).is_some()));
    sum
}

/// The quality of service class that follows from requests and limits.
#[must_use]
pub fn qos(pod: &Value) -> &'static str {
    let (mut any, mut all) = (false, true);
    let mut seen = false;
    for c in items(pod, "/spec/containers").iter().chain(items(pod, "/spec/initContainers")) {
        for r in ["cpu", "memory"] {
            seen = true;
            let (request, limit) = (requests(c, "requests", r), requests(c, "limits", r));
            any |= request.or(limit).is_some_and(|q| q.0 > 0);
            all &= limit.is_some_and(|l| l.0 > 0 && request.is_none_or(|q| q == l));
        }
    }
    match (seen && all, any) {
        (true, _) => "Guaranteed",
        (_, true) => "Burstable",
        _ => "BestEffort",
    }
}

impl Behaviour for Pod {
    fn default(&self, o: &mut Value) {
        for (key, v) in [
            ("restartPolicy", json!("Always")),
            ("dnsPolicy", json!("ClusterFirst")),
            ("schedulerName", json!("default-scheduler")),
            ("terminationGracePeriodSeconds", json!(GRACE_DEFAULT)),
            ("securityContext", json!({})),
            ("enableServiceLinks", json!(true)),
        ] {
            default(o, &["spec", key], v);
        }
        let account = text(o, "/spec/serviceAccountName").to_owned();
        if !account.is_empty() {
            default(o, &["spec", "serviceAccount"], account);
        }
        for list in LISTS {
            let Some(Value::Array(containers)) = o.pointer_mut(&format!("/spec/{list}")) else { continue };
            for c in containers {
                let image = text(c, "/image");
                let last = image.rsplit('/').next().unwrap_or_default();
                let newest = !image.contains('@') && (!last.contains(':') || last.ends_with(":latest"));
                default(c, &["imagePullPolicy"], if newest { "Always" } else { "IfNotPresent" });
                default(c, &["terminationMessagePath"], "/dev/termination-log");
                default(c, &["terminationMessagePolicy"], "File");
                default(c, &["resources"], json!({}));
                if let Some(limits) = c.pointer("/resources/limits").and_then(Value::as_object).cloned() {
                    for (k, v) in limits {
                        default(c, &["resources", "requests", &k], v);
                    }
                }
                if let Some(Value::Array(ports)) = c.get_mut("ports") {
                    ports.iter_mut().for_each(|p| default(p, &["protocol"], "TCP"));
                }
                for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
                    if let Some(p) = c.get_mut(probe) {
                        for (k, n) in [
                            ("timeoutSeconds", 1),
                            ("periodSeconds", 10),
                            ("successThreshold", 1),
                            ("failureThreshold", 3),
                        ] {
                            default(p, &[k], n);
                        }
                    }
                }
                if let Some(Value::Array(env)) = c.get_mut("env") {
                    for e in env.iter_mut().filter(|e| e.pointer("/valueFrom/fieldRef").is_some()) {
                        default(e, &["valueFrom", "fieldRef", "apiVersion"], "v1");
                    }
                }
            }
        }
        if let Some(Value::Array(volumes)) = o.pointer_mut("/spec/volumes") {
            for v in volumes {
                for source in ["secret", "configMap", "downwardAPI", "projected"] {
                    if v.get(source).is_some() {
                        default(v, &[source, "defaultMode"], 420);
                    }
                }
                if v.get("hostPath").is_some() {
                    default(v, &["hostPath", "type"], "");
                }
            }
        }
        default(o, &["status", "phase"], "Pending");
    }

    fn prepare_create(&self, o: &mut Value) {
        let class = qos(o);
        o["status"] = json!({"phase": "Pending", "qosClass": class});
    }

    fn validate(&self, o: &Value, errors: &mut Vec<FieldError>) {
        if items(o, "/spec/containers").is_empty() {
            errors.push(FieldError::required("spec.containers", ""));
        }
        let volumes: Vec<&str> = items(o, "/spec/volumes").iter().map(|v| text(v, "/name")).collect();
        for (i, v) in volumes.iter().enumerate() {
            let field = format!("spec.volumes[{i}].name");
            if v.is_empty() {
                errors.push(FieldError::required(field, ""));
            } else if !is_label(v) {
                errors.push(FieldError::invalid(field, &(*v).into(), "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"));
            } else if volumes[..i].contains(v) {
                errors.push(FieldError::duplicate(field, &(*v).into()));
            }
        }
        let mut seen: Vec<&str> = Vec::new();
        for list in LISTS {
            for (i, c) in items(o, &format!("/spec/{list}")).iter().enumerate() {
                let path = format!("spec.{list}[{i}]");
                let name = text(c, "/name");
                if name.is_empty() {
                    errors.push(FieldError::required(format!("{path}.name"), ""));
                } else if !is_label(name) {
                    errors.push(FieldError::invalid(format!("{path}.name"), &name.into(), "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"));
                } else if seen.contains(&name) {
                    errors.push(FieldError::duplicate(format!("{path}.name"), &name.into()));
                }
                seen.push(name);
                if text(c, "/image").is_empty() {
                    errors.push(FieldError::required(format!("{path}.image"), ""));
                }
                for (j, m) in items(c, "/volumeMounts").iter().enumerate() {
                    let v = text(m, "/name");
                    if !volumes.contains(&v) {
                        errors.push(FieldError::not_found(format!("{path}.volumeMounts[{j}].name"), &v.into()));
                    }
                    if text(m, "/mountPath").is_empty() {
                        errors.push(FieldError::required(format!("{path}.volumeMounts[{j}].mountPath"), ""));
                    }
                }
                for (r, _) in c.pointer("/resources/limits").and_then(Value::as_object).into_iter().flatten() {
                    if let (Some(q), Some(l)) = (requests(c, "requests", r), requests(c, "limits", r))
                        && q > l
                    {
                        let why = format!("must be less than or equal to {r} limit of {l}");
                        errors.push(FieldError::invalid(
                            format!("{path}.resources.requests"),
                            &q.to_string().into(),
                            &why,
                        ));
                    }
                }
            }
        }
        let policies = ["Always", "OnFailure", "Never"];
        let policy = text(o, "/spec/restartPolicy");
        if !policies.contains(&policy) {
            errors.push(FieldError::unsupported("spec.restartPolicy", &policy.into(), &policies.map(str::to_owned)));
        }
    }

    fn validate_update(&self, old: &Value, new: &Value, errors: &mut Vec<FieldError>) {
        let strip = |v: &Value| {
            let mut spec = v.get("spec").cloned().unwrap_or_default();
            for list in LISTS {
                if let Some(Value::Array(cs)) = spec.get_mut(list) {
                    for c in cs {
                        object(c).remove("image");
                    }
                }
            }
            let map = object(&mut spec);
            for free in ["activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds", "ephemeralContainers"]
            {
                map.remove(free);
            }
            if !items(old, "/spec/schedulingGates").is_empty() {
                for free in ["schedulingGates", "nodeSelector", "affinity"] {
                    map.remove(free);
                }
            }
            spec
        };
        if strip(old) != strip(new) {
            errors.push(FieldError::forbidden(
                "spec",
                "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)",
            ));
        }
    }

    fn prepare_update(&self, old: &Value, new: &mut Value) {
        // Which node a pod runs on is said by a binding alone.
        let node = old.pointer("/spec/nodeName").cloned();
        if let Some(node) = node.filter(|_| text(new, "/spec/nodeName").is_empty()) {
            value::child(new, "spec").insert("nodeName".into(), node);
        }
    }

    fn grace(&self, o: &Value, asked: Option<i64>) -> Option<i64> {
        let unbound = text(o, "/spec/nodeName").is_empty();
        let over = matches!(text(o, "/status/phase"), "Succeeded" | "Failed");
        if unbound || over {
            return Some(0);
        }
        let own = o.pointer("/spec/terminationGracePeriodSeconds").and_then(Value::as_i64);
        Some(asked.or(own).unwrap_or(GRACE_DEFAULT).max(0))
    }

    fn selectable(&self) -> &'static [&'static str] {
        &[
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "spec.hostNetwork",
            "status.phase",
            "status.podIP",
            "status.podIPs",
            "status.nominatedNodeName",
        ]
    }

    fn field(&self, o: &Value, path: &str) -> Option<String> {
        (path == "spec.hostNetwork")
            .then(|| o.pointer("/spec/hostNetwork").and_then(Value::as_bool).unwrap_or(false).to_string())
    }
}
