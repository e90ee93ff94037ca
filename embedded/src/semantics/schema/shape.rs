//! What a schema changes in an object: unknown fields go, defaults come, nulls that mean nothing go.

use serde_json::Value;

use super::{Additional, Node, Schema, Type, join};

/// Drops what the schema does not know; returns the paths of what was dropped.
pub fn prune(schema: &Schema, value: &mut Value) -> Vec<String> {
    let mut gone = Vec::new();
    prune_at(schema, &schema.root, value, "", &mut gone);
    gone
}

fn prune_at(schema: &Schema, node: &Node, value: &mut Value, path: &str, gone: &mut Vec<String>) {
    let node = schema.resolve(node);
    match value {
        Value::Object(map) => {
            let mut drop = Vec::new();
            for (key, v) in map.iter_mut() {
                let at = join(path, key);
                if let Some(known) = node.properties.get(key) {
                    prune_at(schema, known, v, &at, gone);
                } else if let Additional::Shaped(shape) = &node.additional {
                    prune_at(schema, shape, v, &at, gone);
                } else if !node.preserve && matches!(node.additional, Additional::Unsaid) {
                    drop.push(key.clone());
                    gone.push(at);
                }
            }
            for key in drop {
                map.remove(&key);
            }
        }
        Value::Array(list) => {
            if let Some(items) = &node.items {
                for (i, v) in list.iter_mut().enumerate() {
                    prune_at(schema, items, v, &format!("{path}[{i}]"), gone);
                }
            }
        }
        _ => {}
    }
}

/// Fills in defaults; a null where null is no value counts as left out where there is a default.
pub fn default(schema: &Schema, value: &mut Value) {
    if schema.root.defaults_below {
        default_at(&schema.root, value);
    }
}

fn default_at(node: &Node, value: &mut Value) {
    if !node.defaults_below || node.reference.is_some() {
        return;
    }
    match value {
        Value::Object(map) => {
            for (key, shape) in node.properties.iter().filter(|(_, n)| n.defaults_below) {
                if let Some(d) = &shape.default {
                    let missing = map.get(key).is_none_or(|v| v.is_null() && !shape.nullable);
                    if missing {
                        map.insert(key.clone(), d.clone());
                    }
                }
                if let Some(v) = map.get_mut(key) {
                    default_at(shape, v);
                }
            }
            if let Additional::Shaped(shape) = &node.additional {
                for (_, v) in map.iter_mut().filter(|(k, _)| !node.properties.contains_key(*k)) {
                    default_at(shape, v);
                }
            }
        }
        Value::Array(list) => {
            if let Some(items) = &node.items {
                list.iter_mut().for_each(|v| default_at(items, v));
            }
        }
        _ => {}
    }
}

/// Drops nulls from fields of a custom resource where null is no value; what the schema does not know keeps its own.
pub fn drop_wrong_nulls(schema: &Schema, value: &mut Value) {
    wrong_nulls(schema, &schema.root, value);
}

fn wrong_nulls(schema: &Schema, node: &Node, value: &mut Value) {
    let node = schema.resolve(node);
    match value {
        Value::Object(map) => map.retain(|key, v| {
            let Some(known) = node.properties.get(key) else { return true };
            wrong_nulls(schema, known, v);
            !v.is_null() || known.nullable || known.kind.is_none()
        }),
        Value::Array(list) => {
            if let Some(items) = &node.items {
                list.iter_mut().for_each(|v| wrong_nulls(schema, items, v));
            }
        }
        _ => {}
    }
}

/// Drops nulls from fields of a built-in kind, where they mean "left out"; what is free-form keeps its own.
pub fn drop_nulls(schema: &Schema, value: &mut Value) {
    drop_at(schema, &schema.root, value);
}

fn drop_at(schema: &Schema, node: &Node, value: &mut Value) {
    let node = schema.resolve(node);
    match value {
        Value::Object(map) => {
            map.retain(|key, v| {
                let known = node.properties.get(key).or(match &node.additional {
                    Additional::Shaped(shape) => Some(shape),
                    _ => None,
                });
                let Some(known) = known else { return true };
                drop_at(schema, known, v);
                let shape = schema.resolve(known);
                let free = shape.properties.is_empty() && matches!(shape.additional, Additional::Shaped(_));
                if free && v.as_object().is_some_and(serde_json::Map::is_empty) {
                    return false;
                }
                // A map of plain texts reads null as the empty text.
                !v.is_null() || schema.resolve(known).kind == Some(Type::String) && !node.properties.contains_key(key)
            });
        }
        Value::Array(list) => {
            if let Some(items) = &node.items {
                list.iter_mut().for_each(|v| drop_at(schema, items, v));
            }
        }
        _ => {}
    }
}
