//! The notation of the `*.schema` files and its translation into OpenAPI v3 as a CustomResourceDefinition carries it.
//!
//! One line declares one or more fields; deeper lines are fields of the object above (also of the items of a list or map):
//!
//! ```text
//! Name:                            a named type (no indentation)
//!   ... Other                      all fields of another type
//!   a, b!: TYPE attributes -- doc  fields `a` and `b`; `!` means required
//!     @ rule -- message            a CEL rule for the field above (for its items, where they are objects)
//! ```
//!
//! TYPE is `str bool int i32 i64 num time qty ios obj` (the default), the name of a type, `[TYPE]` or `{TYPE}` (map).
//! Attributes: `nullable`, `open` (unknown fields stay), `atomic`, `set`, `keys=a,b`, `min=N` and `max=N` (items), `minimum=N`,
//! `maximum=N`, `maxLength=N`, `minLength=N`, `pattern=P`, `enum=a|b`, `default=JSON`.
//!
//! The files are part of the program, so a mistake in one is a mistake of ours: it panics with file and line, and the
//! tests build every definition.

use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Pattern of a Kubernetes quantity.
const QUANTITY: &str = r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$";

/// One line of a file with the lines below it.
struct Line<'a> {
    at: String,
    names: Vec<&'a str>,
    kind: &'a str,
    attributes: Vec<&'a str>,
    doc: &'a str,
    children: Vec<Line<'a>>,
}

impl Line<'_> {
    fn is_field(&self) -> bool {
        !matches!(self.kind, "@" | "...")
    }
}

/// Named types of all files.
pub(super) struct Library<'a> {
    types: BTreeMap<&'a str, Line<'a>>,
}

impl<'a> Library<'a> {
    /// Reads files given as (name, text).
    pub(super) fn parse(files: &[(&str, &'a str)]) -> Self {
        let mut types = BTreeMap::new();
        for (file, text) in files {
            let mut rows = Vec::new();
            for (n, raw) in text.lines().enumerate() {
                let line = raw.trim_start();
                if line.is_empty() || line.starts_with('#') {
                    continue;
                }
                rows.push((format!("{file}:{}", n + 1), (raw.len() - line.len()) / 2, line));
            }
            let mut rest = rows.as_slice();
            while let Some(line) = take(&mut rest, 0) {
                let [name] = line.names[..] else { panic!("{}: one name expected", line.at) };
                assert!(types.insert(name, line).is_none(), "{file}: {name} is declared twice");
            }
            assert!(rest.is_empty(), "{}: indentation", rest[0].0);
        }
        Self { types }
    }

    /// The schema of a named type.
    pub(super) fn schema(&self, name: &str) -> Value {
        let line = self.types.get(name).unwrap_or_else(|| panic!("no type {name}"));
        self.build(line)
    }

    fn build(&self, line: &Line) -> Value {
        let mut out = self.kind(line, line.kind);
        for attribute in &line.attributes {
            apply(&mut out, attribute, line);
        }
        if !line.doc.is_empty() {
            out.insert("description".into(), json!(line.doc));
        }
        Value::Object(out)
    }

    /// The schema of a type expression; the fields below `line` belong to its innermost object.
    fn kind(&self, line: &Line, kind: &str) -> Map<String, Value> {
        if let Some(item) = kind.strip_prefix('[').and_then(|k| k.strip_suffix(']')) {
            let mut items = self.kind(line, item);
            // A rule about plain items is one about all of them.
            let rules = items.remove("x-kubernetes-validations").filter(|_| !line.children.iter().any(Line::is_field));
            let mut out = object(json!({"type": "array", "items": items}));
            out.extend(rules.map(|rules| ("x-kubernetes-validations".into(), rules)));
            return out;
        }
        if let Some(item) = kind.strip_prefix('{').and_then(|k| k.strip_suffix('}')) {
            return object(json!({"type": "object", "additionalProperties": self.kind(line, item)}));
        }
        let integer = |format: &str| json!({"type": "integer", "format": format});
        let mut out = object(match kind {
            "str" => json!({"type": "string"}),
            "bool" => json!({"type": "boolean"}),
            "int" => json!({"type": "integer"}),
            "i32" => integer("int32"),
            "i64" => integer("int64"),
            "num" => json!({"type": "number"}),
            "time" => json!({"type": "string", "format": "date-time"}),
            "ios" => json!({"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": true}),
            "qty" => {
                json!({"anyOf": [{"type": "integer"}, {"type": "string"}], "pattern": QUANTITY, "x-kubernetes-int-or-string": true})
            }
            "obj" => json!({"type": "object"}),
            name if name.starts_with(|c: char| c.is_ascii_uppercase()) => match self.types.get(name) {
                Some(line) => self.build(line),
                None => panic!("{}: no type {name}", line.at),
            },
            other => panic!("{}: no type {other}", line.at),
        });
        for child in &line.children {
            match child.kind {
                "@" => {
                    let rule = json!({"rule": child.attributes.join(" "), "message": child.doc});
                    list(&mut out, "x-kubernetes-validations").push(rule);
                }
                "..." => {
                    let [base] = child.attributes[..] else { panic!("{}: one type expected", child.at) };
                    self.fields(self.schema(base), &mut out);
                }
                _ => {
                    let schema = self.build(child);
                    for name in &child.names {
                        let (name, required) = name.strip_suffix('!').map_or((*name, false), |n| (n, true));
                        if required {
                            list(&mut out, "required").push(json!(name));
                        }
                        let fields = out.entry("properties").or_insert_with(|| json!({}));
                        if let Some(fields) = fields.as_object_mut() {
                            assert!(
                                fields.insert(name.into(), schema.clone()).is_none(),
                                "{}: {name} is declared twice",
                                child.at
                            );
                        }
                    }
                }
            }
        }
        if let Some(Value::Array(required)) = out.get_mut("required") {
            required.sort_by(|a, b| a.as_str().cmp(&b.as_str()));
        }
        out
    }

    /// Copies the fields of one object schema into another.
    fn fields(&self, from: Value, to: &mut Map<String, Value>) {
        let Value::Object(mut from) = from else { return };
        if let Some(Value::Array(required)) = from.remove("required") {
            list(to, "required").extend(required);
        }
        if let (Some(Value::Object(new)), Some(old)) =
            (from.remove("properties"), to.entry("properties").or_insert_with(|| json!({})).as_object_mut())
        {
            old.extend(new);
        }
    }
}

/// Takes one line of the given depth and everything below it.
fn take<'a>(rows: &mut &[(String, usize, &'a str)], depth: usize) -> Option<Line<'a>> {
    let ((at, d, text), rest) = rows.split_first()?;
    if *d != depth {
        return None;
    }
    let at = at.clone();
    *rows = rest;
    let (head, doc) = text.split_once(" -- ").unwrap_or((text, ""));
    let (names, kind, attributes) = if let Some(rest) =
        head.strip_prefix("... ").map(|r| ("...", r)).or(head.strip_prefix("@ ").map(|r| ("@", r)))
    {
        (Vec::new(), rest.0, rest.1.split(' ').collect())
    } else {
        let Some((names, rest)) = head.split_once(':') else { panic!("{at}: no colon") };
        let mut tokens = rest.split_whitespace();
        (names.split(", ").collect(), tokens.next().unwrap_or("obj"), tokens.collect())
    };
    let mut children = Vec::new();
    while let Some(child) = take(rows, depth + 1) {
        children.push(child);
    }
    Some(Line { at, names, kind, attributes, doc, children })
}

fn apply(out: &mut Map<String, Value>, attribute: &str, line: &Line) {
    let (key, value) = attribute.split_once('=').unwrap_or((attribute, ""));
    let parsed = || serde_json::from_str::<Value>(value).unwrap_or_else(|e| panic!("{}: {attribute}: {e}", line.at));
    let is_list = out.get("type") == Some(&json!("array"));
    let (key, value) = match key {
        "nullable" => ("nullable", json!(true)),
        "open" => ("x-kubernetes-preserve-unknown-fields", json!(true)),
        "atomic" if is_list => ("x-kubernetes-list-type", json!("atomic")),
        "atomic" => ("x-kubernetes-map-type", json!("atomic")),
        "set" => ("x-kubernetes-list-type", json!("set")),
        "keys" => {
            out.insert("x-kubernetes-list-map-keys".into(), json!(value.split(',').collect::<Vec<_>>()));
            ("x-kubernetes-list-type", json!("map"))
        }
        "min" => ("minItems", parsed()),
        "max" => ("maxItems", parsed()),
        "minimum" | "maximum" | "maxLength" | "minLength" | "default" => (key, parsed()),
        "pattern" => ("pattern", json!(value)),
        "enum" => ("enum", json!(value.split('|').collect::<Vec<_>>())),
        _ => panic!("{}: no attribute {attribute}", line.at),
    };
    out.insert(key.into(), value);
}

fn object(v: Value) -> Map<String, Value> {
    match v {
        Value::Object(m) => m,
        _ => Map::new(),
    }
}

fn list<'m>(out: &'m mut Map<String, Value>, key: &str) -> &'m mut Vec<Value> {
    match out.entry(key).or_insert_with(|| json!([])) {
        Value::Array(a) => a,
        _ => unreachable!("{key} is a list in every schema that this module makes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notation() {
        let l = Library::parse(&[(
            "t",
            "A:\n  x!, y: str enum=a|b -- Doc.\n  l: [obj] keys=n max=3\n    n!: qty\n  m: {B}\n  p: [str]\n    @ self.size() > 0 -- too few\nB: obj nullable\n  ... C\n  c: int default=1\n    @ self == 1 -- must be one\nC:\n  d!: time\n",
        )]);
        assert_eq!(
            l.schema("A"),
            json!({"type": "object", "required": ["x"], "properties": {
                "x": {"type": "string", "enum": ["a", "b"], "description": "Doc."},
                "y": {"type": "string", "enum": ["a", "b"], "description": "Doc."},
                "l": {"type": "array", "maxItems": 3, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["n"], "items": {
                    "type": "object", "required": ["n"], "properties": {
                        "n": {"anyOf": [{"type": "integer"}, {"type": "string"}], "pattern": QUANTITY, "x-kubernetes-int-or-string": true}}}},
                "p": {"type": "array", "items": {"type": "string"}, "x-kubernetes-validations": [{"rule": "self.size() > 0", "message": "too few"}]},
                "m": {"type": "object", "additionalProperties": {"type": "object", "nullable": true, "required": ["d"], "properties": {
                    "d": {"type": "string", "format": "date-time"},
                    "c": {"type": "integer", "default": 1, "x-kubernetes-validations": [{"rule": "self == 1", "message": "must be one"}]}}}},
            }})
        );
    }
}
