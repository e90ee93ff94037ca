//! The JSON paths of printer columns: fields, indexes, `[*]` and `[?(@.key=="value")]`.

use serde_json::Value;

/// One step of a path.
enum Step {
    Field(String),
    Index(i64),
    All,
    Where(Vec<String>, String, bool),
}

fn steps(path: &str) -> Option<Vec<Step>> {
    let mut out = Vec::new();
    let mut rest = path.trim();
    rest = rest.strip_prefix('{').and_then(|r| r.strip_suffix('}')).unwrap_or(rest);
    rest = rest.strip_prefix('$').unwrap_or(rest);
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix('[') {
            let end = closing(after)?;
            let (inner, next) = (after.get(..end)?, after.get(end + 1..)?);
            rest = next;
            if inner == "*" {
                out.push(Step::All);
            } else if let Some(filter) = inner.strip_prefix("?(").and_then(|f| f.strip_suffix(')')) {
                let (left, right, equal) = filter
                    .split_once("==")
                    .map(|(l, r)| (l, r, true))
                    .or_else(|| filter.split_once("!=").map(|(l, r)| (l, r, false)))?;
                let keys = left.trim().strip_prefix("@.")?.split('.').map(str::to_owned).collect();
                let value = right.trim().trim_matches(['"', '\'']).to_owned();
                out.push(Step::Where(keys, value, equal));
            } else if let Some(key) = inner.strip_prefix(['\'', '"']) {
                out.push(Step::Field(key.trim_end_matches(['\'', '"']).to_owned()));
            } else {
                out.push(Step::Index(inner.parse().ok()?));
            }
            continue;
        }
        let after = rest.strip_prefix('.').unwrap_or(rest);
        let mut key = String::new();
        let mut chars = after.char_indices();
        let mut used = after.len();
        while let Some((i, c)) = chars.next() {
            match c {
                '\\' => {
                    if let Some((_, c)) = chars.next() {
                        key.push(c);
                    }
                }
                '.' | '[' => {
                    used = i;
                    break;
                }
                c => key.push(c),
            }
        }
        if key == "*" {
            out.push(Step::All);
        } else if !key.is_empty() {
            out.push(Step::Field(key));
        } else if used == 0 && !after.starts_with('[') {
            return None;
        }
        rest = after.get(used..)?;
    }
    Some(out)
}

fn closing(text: &str) -> Option<usize> {
    let mut quote = None;
    for (i, c) in text.char_indices() {
        match (quote, c) {
            (None, ']') => return Some(i),
            (None, '"' | '\'') => quote = Some(c),
            (Some(q), c) if q == c => quote = None,
            _ => {}
        }
    }
    None
}

/// All values at a path.
pub(super) fn find<'a>(root: &'a Value, path: &str) -> Vec<&'a Value> {
    let Some(steps) = steps(path) else { return Vec::new() };
    let mut at = vec![root];
    for step in steps {
        let mut next = Vec::new();
        for v in at {
            match &step {
                Step::Field(key) => next.extend(v.get(key)),
                Step::Index(i) => {
                    if let Value::Array(list) = v {
                        let index = if *i < 0 { i64::try_from(list.len()).unwrap_or(0) + i } else { *i };
                        next.extend(usize::try_from(index).ok().and_then(|i| list.get(i)));
                    }
                }
                Step::All => match v {
                    Value::Array(list) => next.extend(list),
                    Value::Object(map) => next.extend(map.values()),
                    _ => {}
                },
                Step::Where(keys, value, equal) => {
                    for item in v.as_array().into_iter().flatten() {
                        let found = keys.iter().try_fold(item, |v, k| v.get(k));
                        let same = found.is_some_and(|f| match f.as_str() {
                            Some(s) => s == value,
                            None => *value == *f.to_string(),
                        });
                        if same == *equal {
                            next.push(item);
                        }
                    }
                }
            }
        }
        at = next;
    }
    at
}

/// The cell of a printer column.
pub(super) fn cell(object: &Value, path: &str, kind: &str, at: i64) -> Value {
    let found = find(object, path);
    let Some(first) = found.first().filter(|v| !v.is_null()) else { return Value::Null };
    match kind {
        "integer" => first.as_i64().map_or(Value::Null, Value::from),
        "number" => first.as_f64().map_or(Value::Null, Value::from),
        "boolean" => first.as_bool().map_or(Value::Null, Value::from),
        "date" => first.as_str().map_or(Value::Null, |t| super::age(t, at).into()),
        _ if found.len() > 1 => found
            .iter()
            .map(|v| v.as_str().map_or_else(|| v.to_string(), str::to_owned))
            .collect::<Vec<_>>()
            .join(",")
            .into(),
        _ => first.as_str().map_or_else(|| first.to_string(), str::to_owned).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_paths_of_kubevirts_columns_are_understood() {
        let o = json!({"status": {"phase": "Running", "conditions": [
            {"type": "Ready", "status": "True"}, {"type": "Paused", "status": "False"}],
            "interfaces": [{"ipAddress": "10.0.0.1"}]}, "metadata": {"labels": {"a.b/c": "x"}}});
        for (path, want) in [
            (".status.phase", json!("Running")),
            (".status.conditions[?(@.type=='Ready')].status", json!("True")),
            (".status.conditions[?(@.type==\"Paused\")].status", json!("False")),
            (".status.interfaces[0].ipAddress", json!("10.0.0.1")),
            (".status.conditions[*].type", json!("Ready,Paused")),
            (".metadata.labels.a\\.b/c", json!("x")),
            (".metadata.labels['a.b/c']", json!("x")),
            (".status.nothing", Value::Null),
        ] {
            assert_eq!(cell(&o, path, "string", 0), want, "{path}");
        }
    }
}
