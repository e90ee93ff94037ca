//! Whether an object has the shape that its schema says.

use serde_json::Value;

use super::{Additional, ListType, Node, Schema, Type, formats, join};
use crate::semantics::FieldError;

/// Everything that is wrong with an object.
#[must_use]
pub fn validate(schema: &Schema, value: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    check(schema, &schema.root, value, "", &mut errors);
    errors
}

fn word(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(n) if whole(n) => "integer",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn whole(n: &serde_json::Number) -> bool {
    n.is_i64() || n.is_u64() || n.as_f64().is_some_and(|f| f.fract() == 0.0)
}

fn fits(kind: Type, value: &Value) -> bool {
    match (kind, value) {
        (Type::Object, Value::Object(_))
        | (Type::Array, Value::Array(_))
        | (Type::String, Value::String(_))
        | (Type::Number, Value::Number(_))
        | (Type::Boolean, Value::Bool(_)) => true,
        (Type::Integer, Value::Number(n)) => whole(n),
        _ => false,
    }
}

fn in_body(path: &str, rest: &str) -> String {
    if path.is_empty() { format!("<root> in body {rest}") } else { format!("{path} in body {rest}") }
}

fn wrong_type(path: &str, want: &str, value: &Value) -> FieldError {
    let got = word(value);
    let detail = in_body(path, &format!("must be of type {want}: {got:?}"));
    FieldError::type_invalid(path, &got.into(), &detail)
}

fn check(schema: &Schema, node: &Node, value: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let node = schema.resolve(node);
    if value.is_null() {
        // A schema without any type says nothing about null either.
        if !node.nullable && (node.kind.is_some() || node.int_or_string) {
            errors.push(wrong_type(path, node.kind.map_or("integer,string", Type::word), value));
        }
        return;
    }
    if node.int_or_string && !matches!(value, Value::String(_)) && !fits(Type::Integer, value) {
        errors.push(wrong_type(path, "integer,string", value));
        return;
    }
    if let Some(kind) = node.kind
        && !fits(kind, value)
    {
        errors.push(wrong_type(path, kind.word(), value));
        return;
    }
    if !node.values.is_empty() && !node.values.contains(value) {
        let supported: Vec<String> =
            node.values.iter().map(|v| v.as_str().map_or_else(|| v.to_string(), str::to_owned)).collect();
        errors.push(FieldError::unsupported(path, value, &supported));
    }
    match value {
        Value::String(text) => check_text(node, text, value, path, errors),
        Value::Number(n) => check_number(node, n, value, path, errors),
        Value::Array(list) => check_list(schema, node, list, value, path, errors),
        Value::Object(map) => {
            if let Some(least) = node.least.2.filter(|l| (map.len() as u64) < *l) {
                let text = in_body(path, &format!("should have at least {least} properties"));
                errors.push(FieldError::invalid(path, value, &text));
            }
            if let Some(most) = node.most.2.filter(|m| map.len() as u64 > *m) {
                errors.push(FieldError::too_many(path, map.len(), most));
            }
            for field in node.required.iter().filter(|f| !map.contains_key(*f)) {
                errors.push(FieldError::required(join(path, field), ""));
            }
            for (key, v) in map {
                if let Some(known) = node.properties.get(key) {
                    check(schema, known, v, &join(path, key), errors);
                } else if let Additional::Shaped(shape) = &node.additional {
                    check(schema, shape, v, &join(path, key), errors);
                }
            }
            if node.embedded {
                for field in ["apiVersion", "kind"].iter().filter(|f| !map.contains_key(**f)) {
                    errors.push(FieldError::required(join(path, field), "must not be empty"));
                }
            }
        }
        _ => {}
    }
    check_combined(schema, node, value, path, errors);
}

fn check_text(node: &Node, text: &str, value: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let chars = text.chars().count() as u64;
    // The first of these is said.
    if let Some(most) = node.most.0.filter(|m| chars > *m) {
        errors.push(FieldError::too_long(path, most));
    } else if let Some(least) = node.least.0.filter(|l| chars < *l) {
        let text = in_body(path, &format!("should be at least {least} chars long"));
        errors.push(FieldError::invalid(path, value, &text));
    } else if let Some(pattern) = node.pattern.as_ref().filter(|p| !p.matches(text)) {
        let text = in_body(path, &format!("should match '{}'", pattern.text));
        errors.push(FieldError::invalid(path, value, &text));
    }
    if !node.format.is_empty() && !formats::holds(&node.format, text) {
        let text = in_body(path, &format!("must be of type {}: {text:?}", node.format));
        errors.push(FieldError::type_invalid(path, value, &text));
    }
}

fn check_number(node: &Node, n: &serde_json::Number, value: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let Some(f) = n.as_f64() else { return };
    let mut wrong = |text: String| errors.push(FieldError::invalid(path, value, &in_body(path, &text)));
    if let Some((min, excluded)) = node.minimum
        && (f < min || (excluded && f <= min))
    {
        wrong(if excluded {
            format!("should be greater than {min}")
        } else {
            format!("should be greater than or equal to {min}")
        });
    }
    if let Some((max, excluded)) = node.maximum
        && (f > max || (excluded && f >= max))
    {
        wrong(if excluded {
            format!("should be less than {max}")
        } else {
            format!("should be less than or equal to {max}")
        });
    }
    if let Some(step) = node.multiple_of
        && step > 0.0
        && (f / step).fract() != 0.0
    {
        wrong(format!("should be a multiple of {step}"));
    }
    let range = match node.format.as_str() {
        "int32" => Some((f64::from(i32::MIN), f64::from(i32::MAX))),
        "uint32" => Some((0.0, f64::from(u32::MAX))),
        _ => None,
    };
    if let Some((min, max)) = range
        && (f < min || f > max)
    {
        wrong(format!("must be of type {}: {:?}", node.format, n.to_string()));
    }
}

fn check_list(schema: &Schema, node: &Node, list: &[Value], value: &Value, path: &str, errors: &mut Vec<FieldError>) {
    if let Some(least) = node.least.1.filter(|l| (list.len() as u64) < *l) {
        let text = in_body(path, &format!("should have at least {least} items"));
        errors.push(FieldError::invalid(path, value, &text));
    }
    if let Some(most) = node.most.1.filter(|m| list.len() as u64 > *m) {
        errors.push(FieldError::too_many(path, list.len(), most));
    }
    if let Some(items) = &node.items {
        for (i, v) in list.iter().enumerate() {
            check(schema, items, v, &format!("{path}[{i}]"), errors);
        }
    }
    let keys = |v: &Value| -> Value {
        match node.list_type {
            ListType::Map => {
                let items = node.items.as_ref().map(|n| schema.resolve(n));
                node.list_keys
                    .iter()
                    .filter_map(|k| {
                        let fallback = || items.and_then(|n| n.properties.get(k)).and_then(|p| p.default.clone());
                        v.get(k).cloned().or_else(fallback).map(|x| (k.clone(), x))
                    })
                    .collect::<serde_json::Map<_, _>>()
                    .into()
            }
            _ => v.clone(),
        }
    };
    if node.unique {
        let mut seen = std::collections::BTreeSet::new();
        for (i, v) in list.iter().enumerate() {
            let key = keys(v);
            if !seen.insert(key.to_string()) {
                errors.push(FieldError::duplicate(format!("{path}[{i}]"), &key));
            }
        }
    }
}

fn check_combined(schema: &Schema, node: &Node, value: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let holds = |n: &Node| {
        let mut found = Vec::new();
        check(schema, n, value, path, &mut found);
        found
    };
    for n in &node.all_of {
        errors.extend(holds(n));
    }
    let mut wrong = |text: &str| errors.push(FieldError::invalid(path, value, &in_body(path, text)));
    if !node.any_of.is_empty() && !node.any_of.iter().any(|n| holds(n).is_empty()) {
        wrong("must validate at least one schema (anyOf)");
    }
    if !node.one_of.is_empty() {
        let count = node.one_of.iter().filter(|n| holds(n).is_empty()).count();
        if count != 1 {
            wrong(if count == 0 {
                "must validate one and only one schema (oneOf). Found none valid"
            } else {
                "must validate one and only one schema (oneOf). Found 2 valid alternatives"
            });
        }
    }
    if node.not.as_ref().is_some_and(|n| holds(n).is_empty()) {
        wrong("must not validate the schema (not)");
    }
}

/// The first value of a built-in object that Go's decoder would not take, in its words.
#[must_use]
pub fn go_type(schema: &Schema, value: &Value, kind: &str) -> Option<String> {
    go(schema, &schema.root, value, kind, "")
}

fn go(schema: &Schema, node: &Node, value: &Value, holder: &str, path: &str) -> Option<String> {
    let named = node.reference.as_deref().map(|r| r.rsplit('.').next().unwrap_or(r));
    let node = schema.resolve(node);
    if value.is_null() {
        return None;
    }
    if node.int_or_string {
        return match value {
            Value::String(text) if named == Some("Quantity") => {
                crate::semantics::quantity::Quantity::parse(text).is_none().then(|| {
                    "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'".into()
                })
            }
            Value::String(_) | Value::Number(_) => None,
            _ => Some(mismatch(value, holder, path, named.unwrap_or("intstr.IntOrString"))),
        };
    }
    let kind = node.kind?;
    if !fits(kind, value) {
        let want = match (kind, node.format.as_str()) {
            (Type::Boolean, _) => "bool".to_owned(),
            (Type::Integer, "") => "int64".to_owned(),
            (Type::Integer, format) => format.to_owned(),
            (Type::Number, _) => "float64".to_owned(),
            (Type::String, _) => "string".to_owned(),
            (Type::Array, _) => format!(
                "[]{}",
                node.items.as_ref().and_then(|i| i.reference.as_deref()).map_or("string".into(), go_name)
            ),
            (Type::Object, _) => named.map_or_else(|| "map[string]string".to_owned(), |n| format!("v1.{n}")),
        };
        return Some(mismatch(value, holder, path, &want));
    }
    match value {
        Value::Object(map) => map.iter().find_map(|(key, v)| {
            // The keys of a map are no fields.
            match (node.properties.get(key), &node.additional) {
                (Some(next), _) => go(schema, next, v, named.unwrap_or(holder), &join(path, key)),
                (None, Additional::Shaped(shape)) => go(schema, shape, v, named.unwrap_or(holder), path),
                _ => None,
            }
        }),
        Value::Array(list) => {
            let items = node.items.as_ref()?;
            list.iter().find_map(|v| go(schema, items, v, holder, path))
        }
        Value::String(text) if !text.is_empty() && node.format == "date-time" && !formats::holds("date-time", text) => {
            Some(format!("parsing time {text:?} as \"2006-01-02T15:04:05Z07:00\": cannot parse {text:?} as \"2006\""))
        }
        Value::String(text) if node.format == "byte" && !formats::holds("byte", text) => {
            Some("illegal base64 data at input byte 0".to_owned())
        }
        _ => None,
    }
}

fn go_name(reference: &str) -> String {
    let mut parts = reference.rsplit('.');
    let (name, version) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    format!("{version}.{name}")
}

fn mismatch(value: &Value, holder: &str, path: &str, want: &str) -> String {
    let got = match value {
        Value::Bool(_) => "bool".to_owned(),
        Value::Number(n) if want.starts_with("int") => format!("number {n}"),
        Value::Number(_) => "number".to_owned(),
        other => word(other).to_owned(),
    };
    format!("json: cannot unmarshal {got} into Go struct field {holder}.{path} of type {want}")
}
