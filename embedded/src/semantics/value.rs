//! Short ways into JSON objects.

use serde_json::{Map, Value};

/// Levels that an object may have. Readers of JSON give up at 128, and lists, watches and the record of owners are put around an
/// object: one that is deeper could be stored and never be read again, by anybody who lists its kind.
pub const LEVELS_MAX: usize = 100;

/// How many levels a value has; a plain one has none.
#[must_use]
pub fn levels(v: &Value) -> usize {
    match v {
        Value::Array(list) => 1 + list.iter().map(levels).max().unwrap_or_default(),
        Value::Object(map) => 1 + map.values().map(levels).max().unwrap_or_default(),
        _ => 0,
    }
}

/// The top-level field below which an object has too many levels.
#[must_use]
pub fn too_deep(object: &Value) -> Option<&str> {
    let fields = object.as_object()?;
    // The record of owners repeats the fields of the object, some levels further down.
    let below = |k: &str, v: &Value| if k == "managedFields" { levels(v).saturating_sub(10) } else { levels(v) };
    let of = |k: &str, v: &Value| match (k, v) {
        ("metadata", Value::Object(m)) => 1 + m.iter().map(|(k, v)| below(k, v)).max().unwrap_or_default(),
        _ => levels(v),
    };
    let mut deep = fields.iter().filter(|(k, v)| 1 + of(k, v) > LEVELS_MAX).map(|(k, _)| k.as_str());
    // The record of owners is deep because something else is.
    deep.clone().find(|k| *k != "metadata").or_else(|| deep.next())
}

/// What stands at a JSON pointer. As [`Value::pointer`], which makes a string of each step: most of them need none.
#[must_use]
pub fn at<'a>(v: &'a Value, pointer: &str) -> Option<&'a Value> {
    if pointer.contains('~') || !pointer.starts_with('/') {
        return v.pointer(pointer);
    }
    pointer.split('/').skip(1).try_fold(v, |v, step| match v {
        Value::Object(map) => map.get(step),
        // Indices as the pointer has them: no sign, no leading zero.
        Value::Array(list) if step == "0" || !step.starts_with(['0', '+']) => list.get(step.parse::<usize>().ok()?),
        _ => None,
    })
}

/// The string at a JSON pointer, "" when there is none.
#[must_use]
pub fn text<'a>(v: &'a Value, pointer: &str) -> &'a str {
    at(v, pointer).and_then(Value::as_str).unwrap_or_default()
}

/// The name of an object.
#[must_use]
pub fn name(v: &Value) -> &str {
    text(v, "/metadata/name")
}

/// The namespace of an object, "" when it has none.
#[must_use]
pub fn namespace(v: &Value) -> &str {
    text(v, "/metadata/namespace")
}

/// The UID of an object.
#[must_use]
pub fn uid(v: &Value) -> &str {
    text(v, "/metadata/uid")
}

/// The resourceVersion of an object.
#[must_use]
pub fn resource_version(v: &Value) -> &str {
    text(v, "/metadata/resourceVersion")
}

/// Whether deletion has been asked for.
#[must_use]
pub fn deleting(v: &Value) -> bool {
    !text(v, "/metadata/deletionTimestamp").is_empty()
}

/// The metadata map, made where it is missing.
pub fn meta(v: &mut Value) -> &mut Map<String, Value> {
    child(v, "metadata")
}

/// A map under `key`, made where it is missing.
pub fn child<'a>(v: &'a mut Value, key: &str) -> &'a mut Map<String, Value> {
    let slot = object(v).entry(key.to_owned()).or_insert_with(|| Value::Object(Map::new()));
    object(slot)
}

/// The value as a map; whatever else it was is replaced by an empty one.
pub fn object(v: &mut Value) -> &mut Map<String, Value> {
    if !v.is_object() {
        *v = Value::Object(Map::new());
    }
    match v {
        Value::Object(map) => map,
        _ => unreachable_map(),
    }
}

#[cold]
fn unreachable_map() -> ! {
    // Just replaced by a map above.
    std::process::abort()
}

/// The strings of a list at a pointer.
#[must_use]
pub fn strings(v: &Value, pointer: &str) -> Vec<String> {
    at(v, pointer)
        .and_then(Value::as_array)
        .map(|a| a.iter().filter_map(Value::as_str).map(str::to_owned).collect())
        .unwrap_or_default()
}

/// The items of a list at a pointer.
#[must_use]
pub fn items<'a>(v: &'a Value, pointer: &str) -> &'a [Value] {
    at(v, pointer).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// The finalizers of an object.
#[must_use]
pub fn finalizers(v: &Value) -> Vec<String> {
    strings(v, "/metadata/finalizers")
}

/// A value at a path of keys, set unless something is there already.
pub fn default(v: &mut Value, path: &[&str], value: impl Into<Value>) {
    let mut at = v;
    let Some((last, parents)) = path.split_last() else { return };
    for key in parents {
        at = object(at).entry((*key).to_owned()).or_insert_with(|| Value::Object(Map::new()));
    }
    let map = object(at);
    if map.get(*last).is_none_or(Value::is_null) {
        map.insert((*last).to_owned(), value.into());
    }
}

/// Sets or removes a key.
pub fn put(map: &mut Map<String, Value>, key: &str, value: Option<Value>) {
    match value {
        Some(v) => {
            map.insert(key.to_owned(), v);
        }
        None => {
            map.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pointer_leads_where_it_always_leads() {
        let v = serde_json::json!({"a": {"b": [1, {"c": "x"}], "": 2, "0": 3, "d/e": 4}, "": {"": 5}});
        let all = [
            "", "/", "//", "/a", "/a/b", "/a/b/0", "/a/b/1/c", "/a/b/2", "/a/b/01", "/a/b/+1", "/a/b/-1", "/a/b/x",
            "/a/", "/a/0",
        ];
        for pointer in all.into_iter().chain(["/a/d~1e", "a", "/a/b/1/c/d", "/n", "/a/b/", "/a/b/00"]) {
            assert_eq!(at(&v, pointer), v.pointer(pointer), "{pointer:?}");
        }
    }
}
