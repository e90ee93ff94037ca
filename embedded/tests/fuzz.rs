//! The patches and server-side apply under what nobody would send: the cases of `corpus/` and what comes of them by changing them
//! at random. `FUZZ_ROUNDS` says how many changes of each; what fails is printed, and becomes a file of the corpus.

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
fn patch(bytes: &[u8]) {
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
fn apply(bytes: &[u8]) {
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

/// Random numbers that are the same every time.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % n.max(1) as u64).unwrap()
    }
}

fn places(value: &Value, at: &str, out: &mut Vec<String>) {
    out.push(at.to_owned());
    match value {
        Value::Object(map) => {
            for (key, v) in map {
                places(v, &format!("{at}/{}", key.replace('~', "~0").replace('/', "~1")), out);
            }
        }
        Value::Array(list) => list.iter().enumerate().for_each(|(i, v)| places(v, &format!("{at}/{i}"), out)),
        _ => {}
    }
}

/// Changes one place of a case: what stands there goes, becomes something else, or what stands elsewhere, or is there twice.
fn change(case: &mut Value, dice: &mut Dice) {
    let mut all = Vec::new();
    places(case, "", &mut all);
    let (to, from) = (all[dice.below(all.len())].clone(), all[dice.below(all.len())].clone());
    let other = case.pointer(&from).cloned().unwrap_or_default();
    let plain = [
        json!(null),
        json!({}),
        json!([]),
        json!(""),
        json!("x"),
        json!(0),
        json!(-1.5),
        json!(true),
        json!([[]]),
        json!({"$patch": "delete"}),
    ];
    let Some(there) = case.pointer_mut(&to) else { return };
    match (dice.below(5), there) {
        (0, Value::Object(map)) => {
            let key = map.keys().nth(dice.below(map.len())).cloned().unwrap_or_default();
            map.remove(&key);
        }
        (0, Value::Array(list)) if !list.is_empty() => drop(list.remove(dice.below(list.len()))),
        (1, Value::Array(list)) => list.push(other),
        (1, Value::Object(map)) => {
            let key = ["name", "$patch", "$retainKeys", "$setElementOrder/tags", "managedFields", "any", "k:x", "~/"]
                [dice.below(8)];
            map.insert(key.into(), other);
        }
        (2, there) => *there = other,
        (_, there) => *there = plain[dice.below(plain.len())].clone(),
    }
}

fn each(target: &str, run: fn(&[u8])) {
    let folder = format!("{}/tests/corpus/{target}", env!("CARGO_MANIFEST_DIR"));
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 3, "{folder}");
    let rounds = std::env::var("FUZZ_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(200);
    let mut dice = Dice(0x9E37_79B9_7F4A_7C15);
    for file in files {
        let bytes = std::fs::read(&file).unwrap();
        run(&bytes);
        let seed: Value = serde_json::from_slice(&bytes).unwrap();
        for _ in 0..rounds {
            let mut case = seed.clone();
            for _ in 0..=dice.below(6) {
                change(&mut case, &mut dice);
            }
            let text = case.to_string();
            if let Err(panic) = std::panic::catch_unwind(|| run(text.as_bytes())) {
                println!("{}: {text}", file.display());
                std::panic::resume_unwind(panic);
            }
        }
    }
}

#[test]
fn patches_hold_whatever_is_sent() {
    each("patch", patch);
}

#[test]
fn applies_hold_whatever_is_sent() {
    each("apply", apply);
}
