//! The patches: from the old object and what was sent to the object that is wanted.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::schema::{Additional, Node, Schema};
use super::{Resource, Status};

/// The kinds of patch that are understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// RFC 6902.
    Json,
    /// RFC 7386.
    Merge,
    /// Kubernetes' own, for built-in kinds.
    Strategic,
    /// Server-side apply ([`owners::apply`](super::owners::apply)).
    Apply,
}

impl Kind {
    /// The media types that a resource takes.
    #[must_use]
    pub fn media_types(resource: &Resource) -> Vec<&'static str> {
        let mut known = vec!["application/json-patch+json", "application/merge-patch+json"];
        if !resource.custom {
            known.push("application/strategic-merge-patch+json");
        }
        known.push(APPLY);
        known
    }

    /// By media type.
    ///
    /// # Errors
    /// 415.
    pub fn of(media_type: &str, resource: &Resource) -> Result<Self, Status> {
        let bare = media_type.split(';').next().unwrap_or_default().trim();
        match bare {
            "application/json-patch+json" => Ok(Self::Json),
            "application/merge-patch+json" => Ok(Self::Merge),
            "application/strategic-merge-patch+json" if !resource.custom => Ok(Self::Strategic),
            APPLY => Ok(Self::Apply),
            _ if resource.custom => Err(Status::unsupported_media_type(format!(
                "the body of the request was in an unknown format - accepted media types include: {}",
                Self::media_types(resource).join(", ")
            ))),
            _ => Err(Status {
                details: Value::Object(Map::new()),
                ..Status::unsupported_media_type("415: Unsupported Media Type")
            }),
        }
    }
}

/// The media type of server-side apply.
const APPLY: &str = "application/apply-patch+yaml";

/// Operations that one JSON patch may have.
const OPERATIONS_MAX: usize = 10_000;

/// Applies a patch that does not depend on who owns what.
///
/// # Errors
/// 400 for what is no patch (an apply is none of these), 422 where it does not fit the object.
pub fn apply(kind: Kind, resource: &Resource, old: &Value, patch: &[u8]) -> Result<Value, Status> {
    let head = if kind == Kind::Strategic { "" } else { "error decoding patch: " };
    let refuse = |why: &str| Status::bad_request(format!("{head}{why}"));
    let parsed: Value = serde_json::from_slice(patch).map_err(|e| refuse(&go_words(&e, patch)))?;
    match kind {
        Kind::Json => {
            if !parsed.is_array() {
                return Err(refuse(&not_a(&parsed, "[]handlers.jsonPatchOp")));
            }
            let Ok(operations) = serde_json::from_value::<json_patch::Patch>(parsed) else { return Err(unfit()) };
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
            let mut growth = Growth { levels: super::value::levels(old), copied: 0 };
            for operation in operations.0 {
                growth.allows(&new, &operation)?;
                // A replacement of what is not there adds it.
                let operation = match operation {
                    json_patch::PatchOperation::Replace(r) if r.path.resolve(&new).is_err() => {
                        json_patch::PatchOperation::Add(json_patch::AddOperation { path: r.path, value: r.value })
                    }
                    other => other,
                };
                json_patch::patch(&mut new, &[operation]).map_err(|_| unfit())?;
            }
            Ok(new)
        }
        Kind::Merge => {
            if !parsed.is_object() {
                return Err(refuse(&not_a(&parsed, "map[string]interface {}")));
            }
            let mut new = old.clone();
            json_patch::merge(&mut new, &parsed);
            Ok(new)
        }
        Kind::Apply => Err(Status::bad_request("an apply is decided by the owners of the fields")),
        Kind::Strategic => {
            let Value::Object(changes) = parsed else {
                return Err(refuse(&not_a(&parsed, "map[string]interface {}")));
            };
            let mut new = old.clone();
            let root = resource.schema.as_deref().map(|s| (s, &s.root));
            merge_map(super::value::object(&mut new), changes, root).map_err(|why| Status::new(500, "", why))?;
            Ok(new)
        }
    }
}

/// Bytes that the copies of one JSON patch may make, as kube-apiserver's.
const COPIED_MAX: usize = 3 << 20;
/// Levels that an object may have while it is patched: what walks through it needs a stack for them.
const BETWEEN_MAX: usize = 300;

/// What a JSON patch has made of an object so far. Each copy may double it, in size and in depth.
struct Growth {
    /// At least as many as the object has.
    levels: usize,
    copied: usize,
}

impl Growth {
    /// Fails before an operation makes too much.
    fn allows(&mut self, object: &Value, operation: &json_patch::PatchOperation) -> Result<(), Status> {
        use json_patch::PatchOperation::{Add, Copy, Move, Remove, Replace, Test};
        let depth = |p: &json_patch::jsonptr::Pointer| p.tokens().count();
        let made = match operation {
            Add(o) => depth(&o.path) + super::value::levels(&o.value),
            Replace(o) => depth(&o.path) + super::value::levels(&o.value),
            Move(o) => depth(&o.path) + self.levels.saturating_sub(depth(&o.from)),
            Copy(o) => {
                let mut size = Counted(0);
                if let Ok(value) = o.from.resolve(object) {
                    serde_json::to_writer(&mut size, value).map_err(Status::internal)?;
                }
                self.copied += size.0;
                depth(&o.path) + self.levels.saturating_sub(depth(&o.from))
            }
            Remove(_) | Test(_) => 0,
        };
        if self.copied > COPIED_MAX {
            let why = format!(
                "Unable to complete the copy, the accumulated size increase of copy is {}, exceeding the limit {COPIED_MAX}",
                self.copied
            );
            return Err(Status::new(413, "RequestEntityTooLarge", why));
        }
        self.levels = self.levels.max(made);
        if self.levels > BETWEEN_MAX { Err(unfit()) } else { Ok(()) }
    }
}

/// Counts what is written.
struct Counted(usize);

impl std::io::Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A patch that does not fit the object.
fn unfit() -> Status {
    let why = "the server rejected our request due to an error in our request";
    Status { details: Value::Object(Map::new()), ..Status::new(422, "Invalid", why) }
}

/// What Go says of JSON that it cannot read.
fn go_words(error: &serde_json::Error, bytes: &[u8]) -> String {
    let at = error.column().checked_sub(1).and_then(|i| bytes.get(i));
    match at {
        Some(b) if !error.is_eof() => format!("invalid character {:?} looking for beginning of value", char::from(*b)),
        _ => "unexpected end of JSON input".into(),
    }
}

/// What Go says of JSON of another type than is wanted.
fn not_a(value: &Value, wanted: &str) -> String {
    let is = match value {
        Value::Object(_) => "object",
        Value::Array(_) => "array",
        Value::String(_) => "string",
        Value::Number(_) => "number",
        Value::Bool(_) => "bool",
        Value::Null => "null",
    };
    format!("json: cannot unmarshal {is} into Go value of type {wanted}")
}

/// A value as Go prints it.
#[must_use]
pub fn go_print(value: &Value) -> String {
    match value {
        Value::Null => "<nil>".into(),
        Value::String(s) => s.clone(),
        Value::Array(list) => format!("[{}]", list.iter().map(go_print).collect::<Vec<_>>().join(" ")),
        Value::Object(map) => {
            let mut pairs: Vec<String> = map.iter().map(|(k, v)| format!("{k}:{}", go_print(v))).collect();
            pairs.sort();
            format!("map[{}]", pairs.join(" "))
        }
        plain => plain.to_string(),
    }
}

type Place<'a> = Option<(&'a Schema, &'a Node)>;

/// The key by which the items of a list under `key` are told, "" where they are values; none where the list is replaced.
fn merge_key<'a>(at: Place<'a>, key: &str) -> Option<&'a str> {
    let (schema, node) = at?;
    schema.resolve(node).properties.get(key)?.merge_key.as_deref()
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
    // The order that the patch wants, and that of before, of the lists that it names.
    let mut wanted: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    let mut before: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for (key, value) in patch {
        if let Some(list) = key.strip_prefix("$deleteFromPrimitiveList/") {
            if let (Some(Value::Array(old)), Value::Array(gone)) = (old.get_mut(list), value) {
                old.retain(|v| !gone.contains(v));
            }
            continue;
        }
        if let Some(list) = key.strip_prefix("$setElementOrder/") {
            if let (Some(Value::Array(there)), Value::Array(order)) = (old.get(list), value) {
                before.entry(list.to_owned()).or_insert_with(|| there.clone());
                wanted.insert(list.to_owned(), order);
            }
            continue;
        }
        let below = place(at, &key);
        match (old.get_mut(&key), value) {
            (_, Value::Null) => {
                old.remove(&key);
            }
            (Some(Value::Object(there)), Value::Object(change)) => merge_map(there, change, below)?,
            (Some(Value::Array(there)), Value::Array(change)) => {
                let by = merge_key(at, &key);
                if by.is_some() {
                    before.entry(key.clone()).or_insert_with(|| there.clone());
                    wanted.entry(key.clone()).or_insert_with(|| change.clone());
                }
                merge_list(there, change, by, below)?;
            }
            (_, Value::Object(mut change)) => {
                // Where there is nothing, there is nothing to replace or to delete.
                change.remove("$patch");
                let mut fresh = Map::new();
                merge_map(&mut fresh, change, below)?;
                old.insert(key, Value::Object(fresh));
            }
            (_, Value::Array(change)) => {
                let mut fresh = Vec::new();
                merge_list(&mut fresh, change, merge_key(at, &key), below)?;
                old.insert(key, Value::Array(fresh));
            }
            (_, plain) => {
                old.insert(key, plain);
            }
        }
    }
    for (key, order) in wanted {
        let by = merge_key(at, &key).unwrap_or_default().to_owned();
        if let (Some(Value::Array(list)), Some(before)) = (old.get_mut(&key), before.get(&key)) {
            *list = in_order(std::mem::take(list), &order, before, &by);
        }
    }
    Ok(())
}

/// The place of an item in a list, by a key or, without one, by its value.
fn rank(list: &[Value], item: &Value, key: &str) -> Option<usize> {
    list.iter()
        .position(|o| if key.is_empty() { o == item } else { o.get(key).is_some() && o.get(key) == item.get(key) })
}

/// A merged list: what the patch names in its order, and between it what it does not name, in the order of before. Where that
/// does not say which is first, the patch's is.
fn in_order(merged: Vec<Value>, wanted: &[Value], before: &[Value], key: &str) -> Vec<Value> {
    let (mut named, mut others): (Vec<Value>, Vec<Value>) =
        merged.into_iter().partition(|v| rank(wanted, v, key).is_some());
    named.sort_by_key(|v| rank(wanted, v, key));
    others.sort_by_key(|v| rank(before, v, key));
    let mut out = Vec::with_capacity(named.len() + others.len());
    let mut others = others.into_iter().peekable();
    for item in named {
        let place = rank(before, &item, key);
        while let Some(other) = others.next_if(|o| match (rank(before, o, key), place) {
            (Some(o), Some(p)) => o < p,
            _ => false,
        }) {
            out.push(other);
        }
        out.push(item);
    }
    out.extend(others);
    out
}

fn merge_list(old: &mut Vec<Value>, change: Vec<Value>, key: Option<&str>, at: Place<'_>) -> Result<(), String> {
    let items: Place<'_> = at.and_then(|(s, n)| s.resolve(n).items.as_deref().map(|i| (s, i)));
    match key {
        None => {
            *old = change.into_iter().filter(|v| v.get("$patch").is_none()).collect();
        }
        Some("") => {
            for v in change {
                if !old.contains(&v) {
                    old.push(v);
                }
            }
        }
        Some(key) => {
            if change.iter().any(|v| v.get("$patch").and_then(Value::as_str) == Some("replace")) {
                *old = change.into_iter().filter(|v| v.get("$patch").is_none()).collect();
                return Ok(());
            }
            for v in change {
                let Value::Object(mut map) = v else { return Err("expected a list of objects".into()) };
                let Some(id) = map.get(key).cloned() else {
                    let map = go_print(&Value::Object(map));
                    return Err(format!("map: {map} does not contain declared merge key: {key}"));
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
                "metadata": {"labels": {"b": "2", "c": "3"}, "finalizers": ["z/w", "x/y"]},
                "spec": {
                    "containers": [
                        {"name": "a", "image": "i", "args": ["3"],
                         "env": [{"name": "F", "value": "2"}, {"name": "E", "value": "1"}]},
                        {"name": "c", "image": "k"},
                    ],
                    "tolerations": [{"key": "u"}],
                },
                "status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "New", "status": "True"}]},
            })
        );
    }

    fn patched(operations: &Value) -> Result<Value, Status> {
        let old = json!({"data": {"a": "x".repeat(1000)}, "list": [1, 2]});
        apply(Kind::Json, &Resource::default(), &old, operations.to_string().as_bytes())
    }

    #[test]
    fn copies_do_not_grow_without_end() {
        // Each doubles what is there.
        let doubling = |n: usize| {
            let copies = (0..n).map(|i| json!({"op": "copy", "from": "/data", "path": format!("/data/c{i}")}));
            Value::Array(copies.collect())
        };
        assert!(patched(&doubling(10)).is_ok());
        let refused = patched(&doubling(40)).unwrap_err();
        assert_eq!(refused.code, 413);
        assert!(refused.message.contains("exceeding the limit 3145728"), "{}", refused.message);
    }

    #[test]
    fn copies_and_moves_do_not_nest_without_end() {
        let mut operations = vec![json!({"op": "add", "path": "/x", "value": {"x": {}}})];
        let mut depth = 1;
        for _ in 0..16 {
            operations.push(json!({"op": "copy", "from": "/x", "path": format!("/x{}", "/x".repeat(depth + 1))}));
            depth = 2 * depth + 1;
        }
        assert!(patched(&json!(operations[..5])).is_ok());
        // Made whole, this would be 131,071 levels deep, and nobody's stack.
        assert_eq!(patched(&json!(operations)).unwrap_err().code, 422);
        let mut moves = vec![json!({"op": "add", "path": "/x", "value": {}})];
        for _ in 0..5_000 {
            moves.push(json!({"op": "move", "from": "/x", "path": "/y"}));
            moves.push(json!({"op": "add", "path": "/x", "value": {}}));
            moves.push(json!({"op": "move", "from": "/y", "path": "/x/y"}));
        }
        moves.truncate(OPERATIONS_MAX);
        assert_eq!(patched(&json!(moves)).unwrap_err().code, 422);
        // To and fro nothing grows.
        let there = json!({"op": "move", "from": "/list", "path": "/tsil"});
        let back = json!({"op": "move", "from": "/tsil", "path": "/list"});
        assert!(patched(&Value::Array(std::iter::repeat_n([there, back], 1_000).flatten().collect())).is_ok());
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
        assert_eq!(e.code, 500);
        assert!(e.message.contains("does not contain declared merge key: name"), "{e}");
    }

    #[test]
    fn only_known_kinds_of_patch_are_taken() {
        let custom = Resource { custom: true, ..Resource::default() };
        assert_eq!(Kind::of("application/merge-patch+json", &custom), Ok(Kind::Merge));
        assert_eq!(Kind::of("application/strategic-merge-patch+json", &custom).unwrap_err().code, 415);
        assert_eq!(Kind::of("application/apply-patch+yaml", &pods()), Ok(Kind::Apply));
    }
}
