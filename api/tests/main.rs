//! Holds the CustomResourceDefinitions against the published facts about KubeVirt's: every field path, type, enum, default,
//! list-map key, printer column, short name, category and subresource.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use serde_json::{Map, Value, json};
use std::{collections::BTreeMap, path::PathBuf};

/// Deliberate differences: (definition, path, why). Empty: there are none.
const DELIBERATE: &[(&str, &str, &str)] = &[];

fn shared() -> PathBuf {
    std::env::var_os("SHARED")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared"), PathBuf::from)
}

#[test]
fn definitions_equal_kubevirts() {
    let mut differences = Vec::new();
    let mut all = shared().join("compat").read_dir().map_or(0, Iterator::count);
    for crd in api::crd::all() {
        let name = crd["metadata"]["name"].as_str().unwrap().to_owned();
        let file = shared().join("compat").join(format!("{name}.json"));
        let Ok(text) = std::fs::read(&file) else {
            println!("SKIPPED: no {}", file.display());
            continue;
        };
        all -= 1;
        let want: Value = serde_json::from_slice(&text).unwrap();
        let spec = &crd["spec"];
        let mut diff = |path: &str, ours: &Value, theirs: &Value| {
            if ours != theirs && !DELIBERATE.iter().any(|(n, p, _)| *n == name && *p == path) {
                differences.push(format!("{name} {path}: ours {ours}, KubeVirt's {theirs}"));
            }
        };
        diff("group", &spec["group"], &want["group"]);
        diff("scope", &spec["scope"], &want["scope"]);
        for key in ["categories", "kind", "plural", "shortNames", "singular"] {
            diff(key, &spec["names"][key], &want["names"][key]);
        }
        let theirs = want["versions"].as_array().unwrap();
        let ours = spec["versions"].as_array().unwrap();
        assert_eq!(ours.len(), theirs.len(), "{name}: versions");
        // Later versions may be told as "same as" the first one.
        let (first, fields) = (format!("same as {}", theirs[0]["name"].as_str().unwrap()), &theirs[0]["fields"]);
        for (o, t) in ours.iter().zip(theirs) {
            let version = t["name"].as_str().unwrap();
            for key in ["name", "served", "storage"] {
                diff(&format!("{version} {key}"), &o[key], &t[key]);
            }
            diff(&format!("{version} deprecated"), &json!(o["deprecated"] == true), &t["deprecated"]);
            diff(&format!("{version} subresources"), o.get("subresources").unwrap_or(&json!({})), &t["subresources"]);
            diff(&format!("{version} columns"), o.get("additionalPrinterColumns").unwrap_or(&json!([])), &t["columns"]);
            let want = if t["fields"] == first { fields } else { &t["fields"] };
            let want = want.as_object().unwrap();
            let mut have = BTreeMap::new();
            flatten(&o["schema"]["openAPIV3Schema"], "", &mut have);
            for path in want.keys().chain(have.keys().filter(|k| !want.contains_key(*k))) {
                diff(
                    &format!("{version} {path}"),
                    have.get(path).unwrap_or(&Value::Null),
                    want.get(path).unwrap_or(&Value::Null),
                );
            }
        }
    }
    assert_eq!(all, 0, "definitions of KubeVirt's that are not ours");
    assert!(differences.is_empty(), "{} differences:\n{}", differences.len(), differences.join("\n"));
}

/// One line a field, in the form of the facts: a type, or a type with attributes.
fn flatten(schema: &Value, path: &str, out: &mut BTreeMap<String, Value>) {
    let join = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
    if let Some(fields) = schema["properties"].as_object() {
        for (name, field) in fields {
            let required = schema["required"].as_array().is_some_and(|r| r.contains(&json!(name)));
            out.insert(join(name), facts(field, required));
            flatten(field, &join(name), out);
        }
    }
    for (key, suffix) in [("items", "[]"), ("additionalProperties", "{}")] {
        if schema[key].is_object() {
            let path = format!("{path}{suffix}");
            out.insert(path.clone(), facts(&schema[key], false));
            flatten(&schema[key], &path, out);
        }
    }
}

fn facts(field: &Value, required: bool) -> Value {
    let mut out = Map::new();
    if required {
        out.insert("required".into(), json!(true));
    }
    let int_or_string = field["x-kubernetes-int-or-string"] == true;
    out.insert("type".into(), if int_or_string { json!("int-or-string") } else { field["type"].clone() });
    if int_or_string {
        out.insert("int-or-string".into(), json!(true));
    }
    for (key, name) in [
        ("x-kubernetes-list-type", "list-type"),
        ("x-kubernetes-list-map-keys", "list-map-keys"),
        ("x-kubernetes-map-type", "map-type"),
        ("x-kubernetes-preserve-unknown-fields", "preserve-unknown-fields"),
    ] {
        if let Some(v) = field.get(key) {
            out.insert(name.into(), v.clone());
        }
    }
    for key in [
        "nullable",
        "enum",
        "default",
        "format",
        "pattern",
        "minimum",
        "maximum",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
    ] {
        if let Some(v) = field.get(key) {
            out.insert(key.into(), v.clone());
        }
    }
    if let Some(rules) = field["x-kubernetes-validations"].as_array() {
        out.insert("cel".into(), rules.iter().map(|r| r["rule"].clone()).collect());
    }
    match out.len() {
        1 => out.remove("type").unwrap(),
        _ => Value::Object(out),
    }
}
