//! Resource quotas: what an object takes, which quotas count it, and whether there is room. The words are those of
//! kube-apiserver's quota plugin.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::pod;
use crate::semantics::amounts::Amounts;
use crate::semantics::quantity::Quantity;
use crate::semantics::resource::Behaviour;
use crate::semantics::value::{items, text};
use crate::semantics::{FieldError, Resource, seconds};

/// Resource quotas.
#[derive(Debug)]
pub struct ResourceQuota;

/// What a pod's containers must name where a quota is about it.
const NAMED: [&str; 6] = ["cpu", "limits.cpu", "limits.memory", "memory", "requests.cpu", "requests.memory"];
/// Names that quotas may use without a domain.
const STANDARD: [&str; 15] = [
    "cpu",
    "memory",
    "ephemeral-storage",
    "requests.cpu",
    "requests.memory",
    "requests.storage",
    "requests.ephemeral-storage",
    "limits.cpu",
    "limits.memory",
    "limits.ephemeral-storage",
    "pods",
    "resourcequotas",
    "secrets",
    "configmaps",
    "persistentvolumeclaims",
];
/// Kinds whose number has a name of its own beside `count/...`.
const COUNTED: [&str; 4] = ["resourcequotas", "secrets", "configmaps", "persistentvolumeclaims"];
const SCOPES: [&str; 6] =
    ["Terminating", "NotTerminating", "BestEffort", "NotBestEffort", "PriorityClass", "CrossNamespacePodAffinity"];
const CLASS: &str = ".storageclass.storage.k8s.io/";
const ONE: Quantity = Quantity(1000);

impl Behaviour for ResourceQuota {
    fn prepare_create(&self, o: &mut Value) {
        o["status"] = json!({});
    }

    fn validate(&self, o: &Value, errors: &mut Vec<FieldError>) {
        for (key, v) in o.pointer("/spec/hard").and_then(Value::as_object).into_iter().flatten() {
            let field = format!("spec.hard[{key}]");
            if !key.contains('/') && !STANDARD.contains(&key.as_str()) && !key.contains("hugepages-") {
                errors.push(FieldError::invalid(
                    field.clone(),
                    &key.as_str().into(),
                    "must be a standard resource for quota",
                ));
            }
            let Some(q) = Quantity::of(v) else { continue };
            if q.0 < 0 {
                errors.push(FieldError::invalid(field, v, "must be greater than or equal to 0"));
            } else if q.0 % 1000 != 0 && !key.ends_with("cpu") {
                errors.push(FieldError::invalid(field, v, "must be an integer"));
            }
        }
        for (i, scope) in items(o, "/spec/scopes").iter().enumerate() {
            if !SCOPES.contains(&scope.as_str().unwrap_or_default()) {
                errors.push(FieldError::invalid(format!("spec.scopes[{i}]"), scope, "unsupported scope"));
            }
        }
        for (i, e) in items(o, "/spec/scopeSelector/matchExpressions").iter().enumerate() {
            let path = format!("spec.scopeSelector.matchExpressions[{i}]");
            let scope = text(e, "/scopeName");
            if !SCOPES.contains(&scope) {
                errors.push(FieldError::invalid(format!("{path}.scopeName"), &scope.into(), "unsupported scope"));
            }
            let operators = ["In", "NotIn", "Exists", "DoesNotExist"];
            let operator = text(e, "/operator");
            if !operators.contains(&operator) {
                errors.push(FieldError::invalid(
                    format!("{path}.operator"),
                    &operator.into(),
                    "not a valid selector operator",
                ));
            } else if operator.ends_with("In") == items(e, "/values").is_empty() {
                let why = if operator.ends_with("In") {
                    "must be at least one value when `operator` is 'In' or 'NotIn' for scope selector"
                } else {
                    "must be no value when `operator` is 'Exists' or 'DoesNotExist' for scope selector"
                };
                errors.push(FieldError::required(format!("{path}.values"), why));
            }
        }
    }

    fn validate_update(&self, old: &Value, new: &Value, errors: &mut Vec<FieldError>) {
        super::core::immutable(old, new, "/spec/scopes", super::core::IMMUTABLE, errors);
        super::core::immutable(old, new, "/spec/scopeSelector", super::core::IMMUTABLE, errors);
    }
}

/// What an object takes, by the names that quotas use. `now` is in seconds since 1970.
#[must_use]
pub fn usage(resource: &Resource, o: &Value, now: i64) -> Amounts {
    let mut all = BTreeMap::new();
    let count = if resource.group.is_empty() {
        format!("count/{}", resource.plural)
    } else {
        format!("count/{}.{}", resource.plural, resource.group)
    };
    all.insert(count, ONE);
    if !resource.group.is_empty() {
        return Amounts(all);
    }
    if COUNTED.contains(&resource.plural.as_str()) {
        all.insert(resource.plural.clone(), ONE);
    }
    match resource.kind.as_str() {
        "Pod" if lives(o, now) => {
            all.insert("pods".into(), ONE);
            for (name, q) in pod::amounts(o, "requests").0 {
                let standard = matches!(name.as_str(), "cpu" | "memory" | "ephemeral-storage");
                all.insert(format!("requests.{name}"), q);
                if standard || name.starts_with("hugepages-") {
                    all.insert(name, q);
                }
            }
            for (name, q) in pod::amounts(o, "limits").0 {
                if matches!(name.as_str(), "cpu" | "memory" | "ephemeral-storage") {
                    all.insert(format!("limits.{name}"), q);
                }
            }
        }
        "PersistentVolumeClaim" => {
            let class = text(o, "/spec/storageClassName");
            let size = o.pointer("/spec/resources/requests/storage").and_then(Quantity::of);
            let given = o.pointer("/status/allocatedResources/storage").and_then(Quantity::of);
            if let Some(size) = size.max(given) {
                all.insert("requests.storage".into(), size);
                if !class.is_empty() {
                    all.insert(format!("{class}{CLASS}requests.storage"), size);
                }
            }
            if !class.is_empty() {
                all.insert(format!("{class}{CLASS}persistentvolumeclaims"), ONE);
            }
        }
        _ => {}
    }
    Amounts(all)
}

/// Whether a pod still counts: it has not ended, and is not stuck on its way out.
fn lives(pod: &Value, now: i64) -> bool {
    let grace = pod.pointer("/metadata/deletionGracePeriodSeconds").and_then(Value::as_i64);
    let stuck =
        seconds(text(pod, "/metadata/deletionTimestamp")).zip(grace).is_some_and(|(at, grace)| now > at + grace);
    !stuck && !matches!(text(pod, "/status/phase"), "Failed" | "Succeeded")
}

/// Whether changes of an object, not its creation alone, are charged.
#[must_use]
pub fn grows(resource: &Resource) -> bool {
    resource.group.is_empty() && resource.kind == "PersistentVolumeClaim"
}

/// Whether an amount of this name can come from objects of a kind.
#[must_use]
pub fn may_count(name: &str, resource: &Resource) -> bool {
    if let Some(counted) = name.strip_prefix("count/") {
        return match counted.split_once('.') {
            Some((plural, group)) => plural == resource.plural && group == resource.group,
            None => counted == resource.plural && resource.group.is_empty(),
        };
    }
    resource.group.is_empty()
        && match resource.kind.as_str() {
            "PersistentVolumeClaim" => {
                name == "persistentvolumeclaims" || name == "requests.storage" || name.contains(CLASS)
            }
            "Pod" => name != "requests.storage" && !name.contains(CLASS) && !COUNTED.contains(&name),
            _ => COUNTED.contains(&name) && name == resource.plural,
        }
}

/// Whether a quota's scopes take an object in. Only pods have scopes.
#[must_use]
pub fn covers(quota: &Value, resource: &Resource, o: &Value) -> bool {
    let plain = items(quota, "/spec/scopes").iter().filter_map(Value::as_str).map(|s| (s, "Exists", &[][..]));
    let chosen = items(quota, "/spec/scopeSelector/matchExpressions")
        .iter()
        .map(|e| (text(e, "/scopeName"), text(e, "/operator"), items(e, "/values")));
    let mut scopes = plain.chain(chosen).peekable();
    if scopes.peek().is_none() {
        return true;
    }
    if !resource.group.is_empty() || resource.kind != "Pod" {
        return false;
    }
    let bounded = o.pointer("/spec/activeDeadlineSeconds").and_then(Value::as_i64).is_some_and(|s| s >= 0);
    let best_effort = pod::qos(o) == "BestEffort";
    scopes.all(|(scope, operator, values)| match scope {
        "Terminating" => bounded,
        "NotTerminating" => !bounded,
        "BestEffort" => best_effort,
        "NotBestEffort" => !best_effort,
        "PriorityClass" => {
            let class = text(o, "/spec/priorityClassName");
            let among = values.iter().any(|v| v.as_str() == Some(class));
            match operator {
                "In" => !class.is_empty() && among,
                "NotIn" => !among,
                "Exists" => !class.is_empty(),
                _ => class.is_empty(),
            }
        }
        "CrossNamespacePodAffinity" => crosses(o),
        _ => false,
    })
}

/// Whether a pod's affinity looks into other namespaces.
fn crosses(pod: &Value) -> bool {
    let elsewhere = |term: &Value| !items(term, "/namespaces").is_empty() || term.get("namespaceSelector").is_some();
    ["podAffinity", "podAntiAffinity"].iter().any(|kind| {
        let list = |when: &str| items(pod, &format!("/spec/affinity/{kind}/{when}"));
        list("requiredDuringSchedulingIgnoredDuringExecution").iter().any(elsewhere)
            || list("preferredDuringSchedulingIgnoredDuringExecution").iter().any(|w| elsewhere(&w["podAffinityTerm"]))
    })
}

/// What a quota's status says is used after an object came (`old` is none) or changed; none when the quota does not
/// count it.
///
/// # Errors
/// The reason why there is no room.
pub fn charge(
    quota: &Value,
    resource: &Resource,
    o: &Value,
    old: Option<&Value>,
    now: i64,
) -> Result<Option<Amounts>, String> {
    let name = text(quota, "/metadata/name");
    let hard = Amounts::read(quota.pointer("/status/hard"));
    let taken = usage(resource, o, now);
    let counted = |key: &str| hard.find(key).is_some();
    if !covers(quota, resource, o) {
        return Ok(None);
    }
    if resource.group.is_empty() && resource.kind == "Pod" {
        unnamed(name, &hard, o)?;
    }
    let mut delta = taken.only(counted);
    if let Some(old) = old {
        let before = usage(resource, old, now);
        for (key, q) in &mut delta.0 {
            *q = *q - before.get(key);
        }
    }
    delta.0.retain(|_, q| q.0 != 0);
    if delta.0.is_empty() {
        return Ok(None);
    }
    let used = Amounts::read(quota.pointer("/status/used"));
    let mut new = used.clone();
    new.add(&delta);
    let exceeded = |key: &str| delta.find(key).is_some_and(|d| d.0 > 0) && new.get(key) > hard.get(key);
    let over = delta.only(exceeded);
    if over.0.is_empty() {
        return Ok(Some(new));
    }
    let (was, may) =
        (Amounts(over.0.keys().map(|k| (k.clone(), used.get(k))).collect()), hard.only(|key| over.find(key).is_some()));
    Err(format!(
        "exceeded quota: {name}, requested: {}, used: {}, limited: {}",
        over.listed(),
        was.listed(),
        may.listed()
    ))
}

/// Refuses a pod that leaves open what the quota is about.
fn unnamed(quota: &str, hard: &Amounts, pod: &Value) -> Result<(), String> {
    let mut missing: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for c in ["containers", "initContainers"].iter().flat_map(|list| items(pod, &format!("/spec/{list}"))) {
        for key in NAMED.iter().filter(|key| hard.find(key).is_some()) {
            let (which, resource) = match key.split_once('.') {
                Some(pair) => pair,
                None => ("requests", *key),
            };
            if c.pointer(&format!("/resources/{which}/{resource}")).is_none() {
                missing.entry(key).or_default().push(text(c, "/name"));
            }
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    let list: Vec<String> = missing
        .into_iter()
        .map(|(key, mut names)| {
            names.sort_unstable();
            names.dedup();
            format!("{key} for: {}", names.join(","))
        })
        .collect();
    Err(format!("failed quota: {quota}: must specify {}", list.join("; ")))
}

/// The quota with a status that says what it allows and what is used.
#[must_use]
pub fn with_status(quota: &Value, used: &Amounts) -> Value {
    let mut new = quota.clone();
    let hard = quota.pointer("/spec/hard").cloned().unwrap_or_else(|| json!({}));
    let names = Amounts::read(Some(&hard));
    let used = Amounts(names.0.keys().map(|k| (k.clone(), used.get(k))).collect());
    new["status"] = json!({"hard": hard, "used": used.to_value()});
    new
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn resource(plural: &str) -> Resource {
        super::super::builtin().0.into_iter().find(|r| r.plural == plural).unwrap()
    }

    fn quota(hard: &Value, used: &Value) -> Value {
        json!({"metadata": {"name": "q"}, "spec": {"hard": hard}, "status": {"hard": hard, "used": used}})
    }

    fn pod(requests: &Value) -> Value {
        json!({"spec": {"containers": [{"name": "c", "resources": {"requests": requests}}]}})
    }

    #[test]
    fn a_pod_takes_what_it_asks_for_until_it_has_ended() {
        let pods = resource("pods");
        let mut one = pod(&json!({"cpu": "500m", "memory": "1Gi", "example.com/gpu": 1}));
        let taken = usage(&pods, &one, 0);
        assert_eq!(
            taken.listed(),
            "count/pods=1,cpu=500m,memory=1Gi,pods=1,requests.cpu=500m,requests.example.com/gpu=1,requests.memory=1Gi"
        );
        one["status"]["phase"] = "Succeeded".into();
        assert_eq!(usage(&pods, &one, 0).listed(), "count/pods=1");
        one["status"]["phase"] = "Running".into();
        one["metadata"] = json!({"deletionTimestamp": "1970-01-01T00:01:00Z", "deletionGracePeriodSeconds": 30});
        assert!(usage(&pods, &one, 90).find("pods").is_some());
        assert!(usage(&pods, &one, 91).find("pods").is_none());
    }

    #[test]
    fn what_exceeds_is_named_with_what_is_used_and_allowed() {
        let pods = resource("pods");
        let q =
            quota(&json!({"requests.memory": "2Gi", "pods": "3"}), &json!({"requests.memory": "1536Mi", "pods": "1"}));
        let fits = charge(&q, &pods, &pod(&json!({"memory": "512Mi"})), None, 0).unwrap().unwrap();
        assert_eq!(fits.listed(), "pods=2,requests.memory=2Gi");
        let why = charge(&q, &pods, &pod(&json!({"memory": "1Gi"})), None, 0).unwrap_err();
        assert_eq!(
            why,
            "exceeded quota: q, requested: requests.memory=1Gi, used: requests.memory=1536Mi, limited: requests.memory=2Gi"
        );
        let why = charge(&q, &pods, &pod(&json!({"cpu": "1"})), None, 0).unwrap_err();
        assert_eq!(why, "failed quota: q: must specify requests.memory for: c");
        // A quota without a status counts nothing yet.
        let fresh = json!({"metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}}, "status": {}});
        assert_eq!(charge(&fresh, &pods, &pod(&json!({})), None, 0), Ok(None));
    }

    #[test]
    fn a_claim_that_grows_is_charged_for_the_difference() {
        let claims = resource("persistentvolumeclaims");
        let claim =
            |size: &str| json!({"spec": {"storageClassName": "fast", "resources": {"requests": {"storage": size}}}});
        let q = quota(
            &json!({"requests.storage": "3Gi", "fast.storageclass.storage.k8s.io/persistentvolumeclaims": "1"}),
            &json!({"requests.storage": "1Gi", "fast.storageclass.storage.k8s.io/persistentvolumeclaims": "1"}),
        );
        let grown = charge(&q, &claims, &claim("3Gi"), Some(&claim("1Gi")), 0).unwrap().unwrap();
        assert_eq!(grown.get("requests.storage"), Quantity::parse("3Gi").unwrap());
        assert_eq!(charge(&q, &claims, &claim("1Gi"), Some(&claim("1Gi")), 0), Ok(None));
        let why = charge(&q, &claims, &claim("1Gi"), None, 0).unwrap_err();
        assert!(
            why.starts_with("exceeded quota: q, requested: fast.storageclass.storage.k8s.io/persistentvolumeclaims=1,"),
            "{why}"
        );
    }

    #[test]
    fn scopes_choose_pods() {
        let pods = resource("pods");
        let scoped = |scope: &str| json!({"spec": {"scopes": [scope]}});
        let (best, not) = (pod(&json!({})), pod(&json!({"cpu": "1"})));
        assert!(covers(&scoped("BestEffort"), &pods, &best) && !covers(&scoped("BestEffort"), &pods, &not));
        assert!(covers(&scoped("NotTerminating"), &pods, &best) && !covers(&scoped("Terminating"), &pods, &best));
        assert!(!covers(&scoped("BestEffort"), &resource("configmaps"), &json!({})));
        let class = json!({"spec": {"scopeSelector": {"matchExpressions": [
            {"scopeName": "PriorityClass", "operator": "In", "values": ["high"]}]}}});
        let mut high = best.clone();
        high["spec"]["priorityClassName"] = "high".into();
        assert!(covers(&class, &pods, &high) && !covers(&class, &pods, &best));
    }
}
