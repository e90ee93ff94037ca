//! The patches: from the old object and what was sent to the object that is wanted.

use serde_json::{Map, Value};

use super::schema::{Additional, Node, Schema};
use super::{FieldError, Resource, Status};

/// The kinds of patch that are understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// RFC 6902.
    Json,
    /// RFC 7386.
    Merge,
    /// Kubernetes' own, for built-in kinds.
    Strategic,
}

impl Kind {
    /// By media type.
    ///
    /// # Errors
    /// 415, also for what kube-apiserver would take and this server does not (server-side apply).
    pub fn of(media_type: &str, resource: &Resource) -> Result<Self, Status> {
        let bare = media_type.split(';').next().unwrap_or_default().trim();
        match bare {
            "application/json-patch+json" => Ok(Self::Json),
            "application/merge-patch+json" => Ok(Self::Merge),
            "application/strategic-merge-patch+json" if !resource.custom => Ok(Self::Strategic),
            _ => {
                let mut known = vec!["application/json-patch+json", "application/merge-patch+json"];
                if !resource.custom {
                    known.push("application/strategic-merge-patch+json");
                }
                Err(Status::unsupported_media_type(format!(
                    "the body of the request was in an unknown format - accepted media types include: {}",
                    known.join(", ")
                )))
            }
        }
    }
}

/// Operations that one JSON patch may have.
const OPERATIONS_MAX: usize = 10_000;

/// Applies a patch.
///
/// # Errors
/// 400 for what is no patch, 422 where it does not fit the object.
pub fn apply(kind: Kind, resource: &Resource, old: &Value, patch: &[u8]) -> Result<Value, Status> {
    let parsed: Value =
        serde_json::from_slice(patch).map_err(|e| Status::bad_request(format!("error decoding patch: {e}")))?;
    match kind {
        Kind::Json => {
            let operations: json_patch::Patch = serde_json::from_value(parsed)
                .map_err(|e| Status::bad_request(format!("error decoding patch: {e}")))?;
            if operations.0.len() > OPERATIONS_MAX {
                return Err(Status::new(
                    413,
                    "RequestEntityTooLarge",
                    format!(
                        "The allowed maximum operations in a JSON patch is {OPERATIONS_MAX}, got {}",
                        operations.0.len()
                    ),
                ));
            }
            let mut new = old.clone();
            json_patch::patch(&mut new, &operations).map_err(|e| {
                let kind = match e.kind {
                    json_patch::PatchErrorKind::TestFailed => format!("testing path {} failed", e.path),
                    other => format!("{other}: {}", e.path),
                };
                let mut status = Status::invalid("", "", "", &[]);
                status.message = format!("the server rejected our request due to an error in our request: {kind}");
                status.details = Value::Object(Map::new());
                status
            })?;
            Ok(new)
        }
        Kind::Merge => {
            if !parsed.is_object() {
                return Err(Status::bad_request("error decoding patch: a merge patch must be an object"));
            }
            let mut new = old.clone();
            json_patch::merge(&mut new, &parsed);
            Ok(new)
        }
        Kind::Strategic => {
            let Value::Object(changes) = parsed else {
                return Err(Status::bad_request("error decoding patch: a strategic merge patch must be an object"));
            };
            let mut new = old.clone();
            let root = resource.schema.as_deref().map(|s| (s, &s.root));
            merge_map(super::value::object(&mut new), changes, root).map_err(|why| {
                let name = super::value::name(old);
                let error = FieldError::invalid("patch", &String::from_utf8_lossy(patch).as_ref().into(), &why);
                Status::invalid(&resource.group, &resource.kind, name, &[error])
            })?;
            Ok(new)
        }
    }
}

type Place<'a> = Option<(&'a Schema, &'a Node)>;

/// How the items of a list are told apart in a strategic merge.
enum Merge {
    Replace,
    Values,
    By(&'static str),
}

/// Lists that merge, by the type that holds them. What is not here is replaced.
fn merge_rule(holder: &str, field: &str) -> Merge {
    match (holder, field) {
        ("ObjectMeta", "finalizers") | ("NodeSpec", "podCIDRs") => Merge::Values,
        ("ObjectMeta", "ownerReferences") => Merge::By("uid"),
        (
            "PodSpec",
            "containers" | "initContainers" | "ephemeralContainers" | "volumes" | "imagePullSecrets" | "resourceClaims",
        )
        | ("Container" | "EphemeralContainer", "env")
        | ("ServiceAccount", "secrets" | "imagePullSecrets") => Merge::By("name"),
        ("PodSpec", "hostAliases") | ("PodStatus", "podIPs") => Merge::By("ip"),
        ("PodSpec", "topologySpreadConstraints") => Merge::By("topologyKey"),
        ("Container" | "EphemeralContainer", "ports") => Merge::By("containerPort"),
        ("Container" | "EphemeralContainer", "volumeMounts") => Merge::By("mountPath"),
        ("Container" | "EphemeralContainer", "volumeDevices") => Merge::By("devicePath"),
        (_, "conditions") | ("NodeStatus", "addresses") => Merge::By("type"),
        _ => Merge::Replace,
    }
}

fn place<'a>(at: Place<'a>, key: &str) -> Place<'a> {
    let (schema, node) = at?;
    let node = schema.resolve(node);
    let next = node.properties.get(key).or(match &node.additional {
        Additional::Shaped(shape) => Some(shape),
        _ => None,
    })?;
    Some((schema, &**next))
}

fn holder(at: Place<'_>) -> &str {
    at.and_then(|(_, n)| n.reference.as_deref()).and_then(|r| r.rsplit('.').next()).unwrap_or_default()
}

fn merge_map(old: &mut Map<String, Value>, mut patch: Map<String, Value>, at: Place<'_>) -> Result<(), String> {
    match patch.remove("$patch").as_ref().and_then(Value::as_str) {
        Some("replace") => {
            *old = patch;
            return Ok(());
        }
        Some("delete") => {
            old.clear();
            return Ok(());
        }
        Some("merge") | None => {}
        Some(other) => return Err(format!("unknown patch directive {other:?}")),
    }
    if let Some(Value::Array(keep)) = patch.remove("$retainKeys") {
        old.retain(|k, _| keep.iter().any(|x| x.as_str() == Some(k)));
    }
    let mut orders = Vec::new();
    for (key, value) in patch {
        if let Some(list) = key.strip_prefix("$deleteFromPrimitiveList/") {
            if let (Some(Value::Array(old)), Value::Array(gone)) = (old.get_mut(list), value) {
                old.retain(|v| !gone.contains(v));
            }
            continue;
        }
        if let Some(list) = key.strip_prefix("$setElementOrder/") {
            orders.push((list.to_owned(), value));
            continue;
        }
        let below = place(at, &key);
        match (old.get_mut(&key), value) {
            (_, Value::Null) => {
                old.remove(&key);
            }
            (Some(Value::Object(there)), Value::Object(change)) => merge_map(there, change, below)?,
            (Some(Value::Array(there)), Value::Array(change)) => {
                merge_list(there, change, merge_rule(holder(at), &key), below)?;
            }
            (_, Value::Object(change)) => {
                let mut fresh = Map::new();
                merge_map(&mut fresh, change, below)?;
                old.insert(key, Value::Object(fresh));
            }
            (_, Value::Array(change)) => {
                let mut fresh = Vec::new();
                merge_list(&mut fresh, change, merge_rule(holder(at), &key), below)?;
                old.insert(key, Value::Array(fresh));
            }
            (_, plain) => {
                old.insert(key, plain);
            }
        }
    }
    for (key, order) in orders {
        if let (Some(Value::Array(list)), Value::Array(order)) = (old.get_mut(&key), order) {
            let rule = merge_rule(holder(at), &key);
            let rank = |v: &Value| {
                order.iter().position(|o| match rule {
                    Merge::By(k) => o.get(k).is_some() && o.get(k) == v.get(k),
                    _ => o == v,
                })
            };
            // Stable: what the order does not name keeps its place behind what it does.
            list.sort_by_key(|v| rank(v).unwrap_or(usize::MAX));
        }
    }
    Ok(())
}

fn merge_list(old: &mut Vec<Value>, change: Vec<Value>, rule: Merge, at: Place<'_>) -> Result<(), String> {
    let items: Place<'_> = at.and_then(|(s, n)| s.resolve(n).items.as_deref().map(|i| (s, i)));
    match rule {
        Merge::Replace => {
            *old = change.into_iter().filter(|v| v.get("$patch").is_none()).collect();
        }
        Merge::Values => {
            for v in change {
                if !old.contains(&v) {
                    old.push(v);
                }
            }
        }
        Merge::By(key) => {
            if change.iter().any(|v| v.get("$patch").and_then(Value::as_str) == Some("replace")) {
                *old = change.into_iter().filter(|v| v.get("$patch").is_none()).collect();
                return Ok(());
            }
            for v in change {
                let Value::Object(mut map) = v else { return Err("expected a list of objects".into()) };
                let Some(id) = map.get(key).cloned() else {
                    return Err(format!("map: {} does not contain declared merge key: {key}", Value::Object(map)));
                };
                let place = old.iter().position(|o| o.get(key) == Some(&id));
                if map.get("$patch").and_then(Value::as_str) == Some("delete") {
                    if let Some(i) = place {
                        old.remove(i);
                    }
                    continue;
                }
                match place.and_then(|i| old.get_mut(i)) {
                    Some(Value::Object(there)) => merge_map(there, map, items)?,
                    _ => {
                        map.remove("$patch");
                        let mut fresh = Map::new();
                        merge_map(&mut fresh, map, items)?;
                        old.push(Value::Object(fresh));
                    }
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn pods() -> Resource {
        crate::kinds::builtin().0.into_iter().find(|r| r.plural == "pods").unwrap()
    }

    fn merged(old: &Value, patch: &Value) -> Value {
        apply(Kind::Strategic, &pods(), old, patch.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn lists_with_keys_merge_and_others_are_replaced() {
        let old = json!({
            "metadata": {"labels": {"a": "1", "b": "2"}, "finalizers": ["x/y"]},
            "spec": {
                "containers": [
                    {"name": "a", "image": "i", "args": ["1", "2"], "env": [{"name": "E", "value": "1"}]},
                    {"name": "b", "image": "j"},
                ],
                "tolerations": [{"key": "t"}],
            },
            "status": {"conditions": [{"type": "Ready", "status": "False"}]},
        });
        let new = merged(
            &old,
            &json!({
                "metadata": {"labels": {"a": null, "c": "3"}, "finalizers": ["z/w"]},
                "spec": {
                    "containers": [
                        {"name": "a", "args": ["3"], "env": [{"name": "F", "value": "2"}]},
                        {"name": "b", "$patch": "delete"},
                        {"name": "c", "image": "k"},
                    ],
                    "tolerations": [{"key": "u"}],
                },
                "status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "New", "status": "True"}]},
            }),
        );
        assert_eq!(
            new,
            json!({
                "metadata": {"labels": {"b": "2", "c": "3"}, "finalizers": ["x/y", "z/w"]},
                "spec": {
                    "containers": [
                        {"name": "a", "image": "i", "args": ["3"],
                         "env": [{"name": "E", "value": "1"}, {"name": "F", "value": "2"}]},
                        {"name": "c", "image": "k"},
                    ],
                    "tolerations": [{"key": "u"}],
                },
                "status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "New", "status": "True"}]},
            })
        );
    }

    #[test]
    fn directives_are_carried_out() {
        let old = json!({
            "metadata": {"finalizers": ["a/a", "b/b"], "labels": {"x": "1"}},
            "spec": {"volumes": [{"name": "v", "emptyDir": {}}], "containers": [{"name": "a"}, {"name": "b"}]},
        });
        let new = merged(
            &old,
            &json!({
                "metadata": {"$deleteFromPrimitiveList/finalizers": ["a/a"], "labels": {"$patch": "replace", "y": "2"}},
                "spec": {
                    "volumes": [{"name": "v", "$retainKeys": ["name", "secret"], "secret": {"secretName": "s"}}],
                    "$setElementOrder/containers": [{"name": "b"}, {"name": "a"}],
                },
            }),
        );
        assert_eq!(
            new,
            json!({
                "metadata": {"finalizers": ["b/b"], "labels": {"y": "2"}},
                "spec": {"volumes": [{"name": "v", "secret": {"secretName": "s"}}], "containers": [{"name": "b"}, {"name": "a"}]},
            })
        );
        let e = apply(Kind::Strategic, &pods(), &old, br#"{"spec":{"containers":[{"image":"x"}]}}"#).unwrap_err();
        assert_eq!(e.code, 422);
        assert!(e.message.contains("does not contain declared merge key: name"), "{e}");
    }

    #[test]
    fn only_known_kinds_of_patch_are_taken() {
        let custom = Resource { custom: true, ..Resource::default() };
        assert_eq!(Kind::of("application/merge-patch+json", &custom), Ok(Kind::Merge));
        assert_eq!(Kind::of("application/strategic-merge-patch+json", &custom).unwrap_err().code, 415);
        assert_eq!(Kind::of("application/apply-patch+yaml", &pods()).unwrap_err().code, 415);
    }
}
