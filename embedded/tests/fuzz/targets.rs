//! What is asked of the patches and of server-side apply, with bytes that may be anything.

use embedded::kinds;
use embedded::semantics::owners::{self, Writer};
use embedded::semantics::{Resource, fields::Fields, patch, schema::Definitions};
use serde_json::{Value, json};
use std::sync::LazyLock;

static KINDS: LazyLock<Vec<Resource>> = LazyLock::new(|| {
    let (builtin, definitions) = kinds::builtin();
    let mut out: Vec<Resource> =
        builtin.into_iter().filter(|r| ["pods", "configmaps", "nodes"].contains(&r.plural.as_str())).collect();
    out.extend(kinds::crd::resources(&widgets(), &Definitions::clone(&definitions)));
    out
});

/// A kind with every sort of list and map.
fn widgets() -> Value {
    let text = json!({"type": "string"});
    json!({"metadata": {"name": "widgets.example.com"}, "spec": {"group": "example.com", "scope": "Namespaced",
    "names": {"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList"},
    "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object",
        "properties": {"spec": {"type": "object", "properties": {
            "size": {"type": "integer"},
            "tags": {"type": "array", "x-kubernetes-list-type": "set", "items": text},
            "parts": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["id", "port"],
                "items": {"type": "object", "properties": {"id": text, "port": {"type": "integer", "default": 1},
                    "inner": {"type": "object", "additionalProperties": text}}}},
            "free": {"type": "array", "items": text},
            "whole": {"type": "object", "x-kubernetes-map-type": "atomic", "properties": {"a": text, "b": text}},
            "any": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
        }}}}}}]}})
}

fn kind(seed: Option<&Value>) -> &'static Resource {
    let wanted = seed.and_then(Value::as_str).unwrap_or_default();
    KINDS.iter().find(|r| r.plural == wanted).unwrap_or(&KINDS[0])
}

fn object(value: Option<&Value>) -> Value {
    let mut value = value.filter(|v| v.is_object()).cloned().unwrap_or_else(|| json!({}));
    if !value["metadata"].is_object() {
        value["metadata"] = json!({});
    }
    value["metadata"]["uid"] = json!("1");
    value
}

/// `{"kind": PLURAL, "type": "json" | "merge" | "strategic", "old": OBJECT, "patch": ANYTHING}`
pub fn patch(bytes: &[u8]) {
    // Bytes that are no case are a patch themselves.
    let case: Value = serde_json::from_slice(bytes).unwrap_or_default();
    let old = object(case.get("old"));
    let change = case.get("patch").map(|p| p.to_string().into_bytes()).unwrap_or_else(|| bytes.to_vec());
    let r = kind(case.get("kind"));
    for kind in [patch::Kind::Json, patch::Kind::Merge, patch::Kind::Strategic] {
        match patch::apply(kind, r, &old, &change) {
            // A merge is over after one round.
            Ok(new) if kind == patch::Kind::Merge => {
                assert_eq!(patch::apply(kind, r, &new, &change).ok().as_ref(), Some(&new), "{case}");
            }
            Ok(_) => {}
            Err(status) => assert!(status.code >= 400, "{status}"),
        }
    }
}

/// `[PLURAL, {"by": MANAGER, "force": BOOL, "apply": CONFIG} or {"by": MANAGER, "update": OBJECT}, ...]`
pub fn apply(bytes: &[u8]) {
    let Ok(Value::Array(steps)) = serde_json::from_slice(bytes) else { return };
    let r = kind(steps.first());
    let mut live: Option<Value> = None;
    for (i, step) in steps.iter().skip(1).take(16).enumerate() {
        let writer = Writer {
            manager: step.get("by").and_then(Value::as_str).unwrap_or("x").to_owned(),
            subresource: String::new(),
            reset: &[],
            now: format!("2026-01-01T00:00:{i:02}Z"),
        };
        let force = step.get("force").and_then(Value::as_bool).unwrap_or(false);
        if let Some(config) = step.get("apply").filter(|c| c.is_object()) {
            match owners::apply(r, live.as_ref(), config, &writer, force) {
                Ok(mut new) => {
                    new["metadata"]["uid"] = json!("1");
                    check(&new);
                    // Again is never a conflict, and soon nothing new: what held only something empty goes with what was
                    // applied last, and comes back with what is applied now.
                    let again = |live: &Value| {
                        let mut again = owners::apply(r, Some(live), config, &writer, false)
                            .unwrap_or_else(|e| panic!("{e}: {steps:?}"));
                        again["metadata"]["uid"] = json!("1");
                        again
                    };
                    let second = again(&new);
                    // Where nobody owns anything any more, as after an apply of nothing but something empty, the next apply
                    // finds an object of before the first apply: kube-apiserver begins anew there, too.
                    if owners::of(&second).is_some() {
                        assert_eq!(again(&second), second, "{steps:?}");
                    }
                    live = Some(new);
                }
                Err(status) => assert!(!(force && status.code == 409), "{status}: {steps:?}"),
            }
        } else if let Some(update) = step.get("update").filter(|c| c.is_object()) {
            let mut new = object(Some(update));
            let sent = owners::of(&new).cloned();
            owners::track(r, live.as_ref(), sent.as_ref(), &mut new, &writer);
            check(&new);
            live = Some(new);
        }
    }
}

/// Owners are written so that they can be read.
fn check(object: &Value) {
    for entry in owners::of(object).and_then(Value::as_array).into_iter().flatten() {
        let fields = Fields::decode(&entry["fieldsV1"]).unwrap_or_else(|| panic!("{entry}"));
        assert!(!fields.is_empty(), "{entry}");
        assert_eq!(fields.encode(), entry["fieldsV1"], "{entry}");
    }
}
