//! From the JSON form of a schema to [`Node`].

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Additional, ListType, Node, OBJECT_META, Pattern, Type};

fn list(v: &Value, key: &str, custom: bool) -> Vec<Node> {
    v.get(key).and_then(Value::as_array).map(|a| a.iter().map(|n| compile(n, custom)).collect()).unwrap_or_default()
}

fn flag(v: &Value, key: &str) -> bool {
    v.get(key).and_then(Value::as_bool).unwrap_or(false)
}

fn word<'a>(v: &'a Value, key: &str) -> &'a str {
    v.get(key).and_then(Value::as_str).unwrap_or_default()
}

/// Reads a schema. `custom`: it is a CustomResourceDefinition's, where an object without properties has no fields;
/// elsewhere such an object is free-form.
#[must_use]
pub fn compile(v: &Value, custom: bool) -> Node {
    let mut node = Node {
        reference: v.get("$ref").and_then(Value::as_str).and_then(|r| r.rsplit('/').next()).map(str::to_owned),
        kind: match word(v, "type") {
            "object" => Some(Type::Object),
            "array" => Some(Type::Array),
            "string" => Some(Type::String),
            "integer" => Some(Type::Integer),
            "number" => Some(Type::Number),
            "boolean" => Some(Type::Boolean),
            _ => None,
        },
        // Go's null is what was left out.
        nullable: flag(v, "nullable") || !custom,
        items: v.get("items").filter(|i| i.is_object()).map(|i| Box::new(compile(i, custom))),
        required: super::super::value::strings(v, "/required"),
        values: v.get("enum").and_then(Value::as_array).cloned().unwrap_or_default(),
        pattern: v.get("pattern").and_then(Value::as_str).map(Pattern::new),
        format: word(v, "format").to_owned(),
        minimum: v.get("minimum").and_then(Value::as_f64).map(|n| (n, flag(v, "exclusiveMinimum"))),
        maximum: v.get("maximum").and_then(Value::as_f64).map(|n| (n, flag(v, "exclusiveMaximum"))),
        multiple_of: v.get("multipleOf").and_then(Value::as_f64),
        least: (number(v, "minLength"), number(v, "minItems"), number(v, "minProperties")),
        most: (number(v, "maxLength"), number(v, "maxItems"), number(v, "maxProperties")),
        // Of built-in kinds the keys only say what merges; the kinds check themselves.
        unique: flag(v, "uniqueItems") || (custom && matches!(word(v, "x-kubernetes-list-type"), "set" | "map")),
        preserve: flag(v, "x-kubernetes-preserve-unknown-fields"),
        int_or_string: flag(v, "x-kubernetes-int-or-string"),
        embedded: flag(v, "x-kubernetes-embedded-resource"),
        list_type: match word(v, "x-kubernetes-list-type") {
            "set" => ListType::Set,
            "map" => ListType::Map,
            _ => ListType::Atomic,
        },
        list_keys: super::super::value::strings(v, "/x-kubernetes-list-map-keys"),
        map_atomic: word(v, "x-kubernetes-map-type") == "atomic",
        map_granular: word(v, "x-kubernetes-map-type") == "granular",
        merge_key: word(v, "x-kubernetes-patch-strategy")
            .split(',')
            .any(|s| s == "merge")
            .then(|| word(v, "x-kubernetes-patch-merge-key").to_owned()),
        retain_keys: word(v, "x-kubernetes-patch-strategy").split(',').any(|s| s == "retainKeys"),
        default: v.get("default").cloned(),
        all_of: list(v, "allOf", custom),
        any_of: list(v, "anyOf", custom),
        one_of: list(v, "oneOf", custom),
        not: v.get("not").filter(|n| n.is_object()).map(|n| Box::new(compile(n, custom))),
        ..Node::default()
    };
    if let Some(properties) = v.get("properties").and_then(Value::as_object) {
        node.properties = properties.iter().map(|(k, p)| (k.clone(), Box::new(compile(p, custom)))).collect();
    }
    node.additional = match v.get("additionalProperties") {
        Some(Value::Bool(true)) => Additional::Any,
        Some(shape @ Value::Object(_)) => Additional::Shaped(Box::new(compile(shape, custom))),
        _ => Additional::Unsaid,
    };
    if node.embedded && custom {
        complete(&mut node);
    }
    if !custom
        && node.reference.is_none()
        && node.properties.is_empty()
        && matches!(node.kind, None | Some(Type::Object))
        && matches!(node.additional, Additional::Unsaid)
    {
        node.preserve = true;
        node.map_atomic = true;
    }
    node.defaults_below = node.default.is_some()
        || node.properties.values().any(|n| n.defaults_below)
        || node.items.as_ref().is_some_and(|n| n.defaults_below)
        || matches!(&node.additional, Additional::Shaped(n) if n.defaults_below);
    node
}

/// Gives the root of a custom resource (or an embedded one) the fields that every object has.
pub(super) fn complete(node: &mut Node) {
    for key in ["apiVersion", "kind"] {
        node.properties.insert(key.into(), Box::new(Node { kind: Some(Type::String), ..Node::default() }));
    }
    let metadata = Node { reference: Some(OBJECT_META.into()), ..Node::default() };
    node.properties.insert("metadata".into(), Box::new(metadata));
}

/// Reads definitions by name (`$defs`).
#[must_use]
pub fn compile_definitions(defs: &serde_json::Map<String, Value>) -> BTreeMap<String, Node> {
    defs.iter().map(|(name, v)| (name.clone(), compile(v, false))).collect()
}

fn number(v: &Value, key: &str) -> Option<u64> {
    v.get(key).and_then(Value::as_u64)
}

impl Node {
    /// The schema of a CustomResourceDefinition's version, completed as the root of an object.
    #[must_use]
    pub fn custom_root(v: &Value) -> Self {
        let mut node = compile(v, true);
        complete(&mut node);
        node
    }
}

/// What makes a schema not structural: the path and what is wrong.
#[must_use]
pub fn problems(v: &Value, path: &str) -> Vec<(String, String)> {
    let mut out = Vec::new();
    walk(v, path, true, &mut out);
    out
}

fn walk(v: &Value, path: &str, root: bool, out: &mut Vec<(String, String)>) {
    let Some(map) = v.as_object() else { return };
    let kind = word(v, "type");
    let free = flag(v, "x-kubernetes-int-or-string") || flag(v, "x-kubernetes-preserve-unknown-fields");
    if kind.is_empty() && !free {
        let why = if root { "must not be empty at the root" } else { "must not be empty for specified object fields" };
        out.push((format!("{path}.type"), format!("Required value: {why}")));
    }
    if root && !kind.is_empty() && kind != "object" {
        out.push((format!("{path}.type"), format!("Invalid value: {kind:?}: must be object at the root")));
    }
    if !kind.is_empty() && !["object", "array", "string", "integer", "number", "boolean"].contains(&kind) {
        out.push((
            format!("{path}.type"),
            format!(
                "Unsupported value: {kind:?}: supported values: \"array\", \"boolean\", \"integer\", \"number\", \"object\", \"string\""
            ),
        ));
    }
    if map.contains_key("$ref") {
        out.push((format!("{path}.$ref"), "Forbidden: $ref is not supported".into()));
    }
    if let Some(pattern) = v.get("pattern").and_then(Value::as_str)
        && let Err(e) = regex::Regex::new(pattern)
    {
        out.push((
            format!("{path}.pattern"),
            format!("Invalid value: {pattern:?}: must be a valid regular expression: {e}"),
        ));
    }
    if let Some(properties) = v.get("properties").and_then(Value::as_object) {
        for (key, p) in properties {
            walk(p, &format!("{path}.properties[{key}]"), false, out);
        }
    }
    if let Some(items) = v.get("items") {
        if items.is_array() {
            out.push((format!("{path}.items"), "Forbidden: items must be a schema object and not an array".into()));
        }
        walk(items, &format!("{path}.items"), false, out);
    }
    if let Some(more) = v.get("additionalProperties").filter(|a| a.is_object()) {
        walk(more, &format!("{path}.additionalProperties"), false, out);
    }
}
