//! Limit ranges: what containers, pods and claims of a namespace get when they do not say, and what they may not exceed.
//! The words are LimitRanger's.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::pod;
use crate::semantics::FieldError;
use crate::semantics::amounts::Amounts;
use crate::semantics::quantity::Quantity;
use crate::semantics::resource::Behaviour;
use crate::semantics::value::{child, default, items, meta, object, text};

/// Where a pod says what it was given.
const ANNOTATION: &str = "kubernetes.io/limit-ranger";

/// Limit ranges.
#[derive(Debug)]
pub struct LimitRange;

fn read(limit: &Value, which: &str) -> Amounts {
    Amounts::read(limit.get(which))
}

impl Behaviour for LimitRange {
    fn default(&self, o: &mut Value) {
        let Some(Value::Array(limits)) = o.pointer_mut("/spec/limits") else { return };
        for limit in limits.iter_mut().filter(|l| text(l, "/type") == "Container") {
            for (to, from) in [("default", "max"), ("defaultRequest", "default"), ("defaultRequest", "min")] {
                for (key, v) in limit.get(from).and_then(Value::as_object).cloned().into_iter().flatten() {
                    default(limit, &[to, &key], v);
                }
            }
        }
    }

    fn validate(&self, o: &Value, errors: &mut Vec<FieldError>) {
        let limits = items(o, "/spec/limits");
        let mut seen: Vec<&str> = Vec::new();
        for (i, limit) in limits.iter().enumerate() {
            let path = format!("spec.limits[{i}]");
            let kind = text(limit, "/type");
            if kind.is_empty() {
                errors.push(FieldError::required(format!("{path}.type"), ""));
            }
            if seen.contains(&kind) {
                errors.push(FieldError::duplicate(format!("{path}.type"), &kind.into()));
            }
            seen.push(kind);
            if kind == "Pod" {
                for field in ["default", "defaultRequest"] {
                    if limit.get(field).is_some_and(|v| v.as_object().is_some_and(|m| !m.is_empty())) {
                        errors.push(FieldError::forbidden(
                            format!("{path}.{field}"),
                            "may not be specified when `type` is Pod",
                        ));
                    }
                }
            }
            let [min, max] = ["min", "max"].map(|w| read(limit, w));
            if kind == "PersistentVolumeClaim" && min.find("storage").is_none() && max.find("storage").is_none() {
                let why = "either minimum or maximum storage value is required, but neither was provided";
                errors.push(FieldError::required(format!("{path}.limits"), why));
            }
            // Each pair in order, and what is said when the first is more than the second.
            for (low, lower, high, higher, blamed) in [
                ("min", "min", "max", "max", "min"),
                ("min", "min", "defaultRequest", "default request", "defaultRequest"),
                ("defaultRequest", "default request", "max", "max", "defaultRequest"),
                ("defaultRequest", "default request", "default", "default limit", "defaultRequest"),
                ("min", "min", "default", "default", "default"),
                ("default", "default", "max", "max", "default"),
            ] {
                let (a, b) = (read(limit, low), read(limit, high));
                for (key, least) in &a.0 {
                    if let Some(most) = b.find(key).filter(|most| least > most) {
                        let said = if blamed == low { *least } else { most };
                        let why = format!(
                            "{lower} value {} is greater than {higher} value {}",
                            least.of_resource(key),
                            most.of_resource(key)
                        );
                        let field = format!("{path}.{blamed}[{key}]");
                        errors.push(FieldError::invalid(field, &said.of_resource(key).into(), &why));
                    }
                }
            }
        }
    }
}

/// Gives a pod's containers what they do not say, as one limit range has it.
pub fn complete(range: &Value, pod: &mut Value) {
    let (mut limits, mut requests) = (BTreeMap::new(), BTreeMap::new());
    for limit in items(range, "/spec/limits").iter().filter(|l| text(l, "/type") == "Container") {
        for (field, all) in [("default", &mut limits), ("defaultRequest", &mut requests)] {
            all.extend(limit.get(field).and_then(Value::as_object).cloned().into_iter().flatten());
        }
    }
    let mut given = Vec::new();
    for (list, what) in [("containers", "container"), ("initContainers", "init container")] {
        let Some(Value::Array(containers)) = pod.pointer_mut(&format!("/spec/{list}")) else { continue };
        for c in containers {
            for (field, all, word) in [("requests", &requests, "request"), ("limits", &limits, "limit")] {
                let said = c.pointer(&format!("/resources/{field}")).and_then(Value::as_object);
                let new: Vec<(&String, &Value)> =
                    all.iter().filter(|(key, _)| !said.is_some_and(|m| m.contains_key(*key))).collect();
                if new.is_empty() {
                    continue;
                }
                let keys: Vec<&str> = new.iter().map(|(k, _)| k.as_str()).collect();
                given.push(format!("{} {word} for {what} {}", keys.join(", "), name_of(c)));
                let resources = child(c, "resources").entry(field).or_insert_with(|| json!({}));
                object(resources).extend(new.into_iter().map(|(k, v)| (k.clone(), v.clone())));
            }
        }
    }
    if !given.is_empty() {
        let all = meta(pod).entry("annotations").or_insert_with(|| json!({}));
        object(all).insert(ANNOTATION.into(), format!("LimitRanger plugin set: {}", given.join("; ")).into());
    }
}

fn name_of(container: &Value) -> &str {
    text(container, "/name")
}

/// One bound of a limit range on one resource.
struct Bound<'a> {
    kind: &'a str,
    resource: &'a str,
    value: Quantity,
    request: Option<Quantity>,
    limit: Option<Quantity>,
}

impl Bound<'_> {
    fn show(&self, q: Quantity) -> String {
        q.of_resource(self.resource)
    }

    fn min(&self) -> Option<String> {
        let head = format!("minimum {} usage per {} is {}", self.resource, self.kind, self.show(self.value));
        match (self.request, self.limit) {
            (None, _) => Some(format!("{head}.  No request is specified")),
            (Some(r), _) if r < self.value => Some(format!("{head}, but request is {}", self.show(r))),
            (_, Some(l)) if l < self.value => Some(format!("{head}, but limit is {}", self.show(l))),
            _ => None,
        }
    }

    fn max(&self) -> Option<String> {
        let head = format!("maximum {} usage per {} is {}", self.resource, self.kind, self.show(self.value));
        let claim = self.kind == "PersistentVolumeClaim";
        match (self.request, self.limit) {
            (None, _) if claim => Some(format!("{head}.  No request is specified")),
            (_, None) if !claim => Some(format!("{head}.  No limit is specified")),
            (_, Some(l)) if l > self.value => Some(format!("{head}, but limit is {}", self.show(l))),
            (Some(r), _) if r > self.value => Some(format!("{head}, but request is {}", self.show(r))),
            _ => None,
        }
    }

    fn ratio(&self) -> Option<String> {
        let head =
            format!("{} max limit to request ratio per {} is {}", self.resource, self.kind, self.show(self.value));
        let Some(request) = self.request.filter(|q| q.0 != 0) else {
            return Some(format!("{head}, but no request is specified or request is 0"));
        };
        let Some(limit) = self.limit.filter(|q| q.0 != 0) else {
            return Some(format!("{head}, but no limit is specified or limit is 0"));
        };
        if limit.0 * 1000 <= self.value.0 * request.0 {
            return None;
        }
        let millionths = (limit.0 * 1_000_000 + request.0 / 2) / request.0;
        Some(format!("{head}, but provided ratio is {}.{:06}", millionths / 1_000_000, millionths % 1_000_000))
    }
}

/// What about a pod or a claim is outside of a limit range.
#[must_use]
pub fn violations(range: &Value, kind: &str, o: &Value) -> Vec<String> {
    let mut wrong = Vec::new();
    for limit in items(range, "/spec/limits") {
        let bounds = text(limit, "/type");
        let measured: Vec<(Amounts, Amounts)> = match (bounds, kind) {
            ("Container", "Pod") => ["containers", "initContainers"]
                .iter()
                .flat_map(|list| items(o, &format!("/spec/{list}")))
                .map(|c| (read(&c["resources"], "requests"), read(&c["resources"], "limits")))
                .collect(),
            ("Pod", "Pod") => vec![(pod::amounts(o, "requests"), pod::amounts(o, "limits"))],
            ("PersistentVolumeClaim", "PersistentVolumeClaim") => {
                vec![(Amounts::read(o.pointer("/spec/resources/requests")), Amounts::default())]
            }
            _ => continue,
        };
        for (requests, limits) in &measured {
            for (which, check) in [
                ("min", (|b| b.min()) as fn(&Bound<'_>) -> Option<String>),
                ("max", |b| b.max()),
                ("maxLimitRequestRatio", |b| b.ratio()),
            ] {
                for (resource, value) in read(limit, which).0 {
                    let (request, limit) = (requests.find(&resource), limits.find(&resource));
                    wrong.extend(check(&Bound { kind: bounds, resource: &resource, value, request, limit }));
                }
            }
        }
    }
    wrong
}

/// Several reasons as one text, as the API server joins them.
#[must_use]
pub fn joined(mut reasons: Vec<String>) -> String {
    match reasons.len() {
        1 => reasons.remove(0),
        _ => format!("[{}]", reasons.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(limits: Value) -> Value {
        let mut o = json!({"metadata": {"name": "l"}, "spec": {"limits": limits}});
        LimitRange.default(&mut o);
        o
    }

    #[test]
    fn containers_get_what_they_do_not_say() {
        let range = range(json!([{"type": "Container", "max": {"cpu": "2"}, "default": {"memory": "1Gi"},
            "min": {"cpu": "100m"}, "defaultRequest": {"memory": "512Mi"}}]));
        assert_eq!(range["spec"]["limits"][0]["default"], json!({"cpu": "2", "memory": "1Gi"}));
        assert_eq!(range["spec"]["limits"][0]["defaultRequest"], json!({"cpu": "2", "memory": "512Mi"}));
        let mut pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [
            {"name": "a"}, {"name": "b", "resources": {"limits": {"memory": "2Gi", "cpu": "1"}, "requests": {"cpu": "1"}}}]}});
        complete(&range, &mut pod);
        assert_eq!(
            pod.pointer("/spec/containers/0/resources"),
            Some(&json!({"limits": {"cpu": "2", "memory": "1Gi"}, "requests": {"cpu": "2", "memory": "512Mi"}}))
        );
        assert_eq!(
            text(&pod, "/metadata/annotations/kubernetes.io~1limit-ranger"),
            "LimitRanger plugin set: cpu, memory request for container a; cpu, memory limit for container a; \
             memory request for container b"
        );
        assert_eq!(violations(&range, "Pod", &pod), Vec::<String>::new());
    }

    #[test]
    fn what_is_outside_is_named() {
        let range = range(json!([
            {"type": "Container", "max": {"cpu": "1"}, "min": {"memory": "64Mi"}, "maxLimitRequestRatio": {"cpu": "2"}},
            {"type": "Pod", "max": {"memory": "1Gi"}},
            {"type": "PersistentVolumeClaim", "max": {"storage": "1Gi"}},
        ]));
        let pod = json!({"spec": {"containers": [{"name": "a", "resources": {
            "requests": {"cpu": "600m", "memory": "32Mi"}, "limits": {"cpu": "1500m", "memory": "2Gi"}}}]}});
        assert_eq!(
            violations(&range, "Pod", &pod),
            [
                "minimum memory usage per Container is 64Mi, but request is 32Mi",
                "maximum cpu usage per Container is 1, but limit is 1500m",
                "cpu max limit to request ratio per Container is 2, but provided ratio is 2.500000",
                "maximum memory usage per Pod is 1Gi, but limit is 2Gi",
            ]
        );
        let bare = json!({"spec": {"containers": [{"name": "a"}]}});
        assert_eq!(
            violations(&range, "Pod", &bare),
            [
                "minimum memory usage per Container is 64Mi.  No request is specified",
                "maximum cpu usage per Container is 1.  No limit is specified",
                "cpu max limit to request ratio per Container is 2, but no request is specified or request is 0",
                "maximum memory usage per Pod is 1Gi.  No limit is specified",
            ]
        );
        let claim = json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}});
        assert_eq!(
            violations(&range, "PersistentVolumeClaim", &claim),
            ["maximum storage usage per PersistentVolumeClaim is 1Gi, but request is 2Gi"]
        );
    }

    #[test]
    fn bounds_that_contradict_each_other_are_refused() {
        let mut errors = Vec::new();
        let o = json!({"spec": {"limits": [
            {"type": "Container", "min": {"cpu": "2"}, "max": {"cpu": "1"}},
            {"type": "Container"}, {"type": "Pod", "default": {"cpu": "1"}}, {"type": "PersistentVolumeClaim"}]}});
        LimitRange.validate(&o, &mut errors);
        let texts: Vec<String> = errors.iter().map(FieldError::message).collect();
        assert_eq!(
            texts,
            [
                "spec.limits[0].min[cpu]: Invalid value: \"2\": min value 2 is greater than max value 1",
                "spec.limits[1].type: Duplicate value: \"Container\"",
                "spec.limits[2].default: Forbidden: may not be specified when `type` is Pod",
                "spec.limits[3].limits: Required value: either minimum or maximum storage value is required, but neither was provided",
            ]
        );
    }
}
