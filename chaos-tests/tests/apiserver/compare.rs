//! Answers made comparable, and compared.

use super::script::Step;
use regex::Regex;
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

/// What a server said.
#[derive(Debug, Clone)]
pub struct Answer {
    /// HTTP status code.
    pub code: u16,
    /// `Warning` headers.
    pub warnings: Vec<String>,
    /// `Content-Type`.
    pub kind: String,
    /// The body; of a watch the list of its events.
    pub body: Value,
}

static TIME: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z").unwrap());
static UID: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}").unwrap());
static JWT: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"eyJ[\w-]+\.[\w-]+\.[\w-]+").unwrap());
static DRAWN: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\bdrawn-[a-z0-9]{5}\b").unwrap());
static RECORD: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"(ResourceVersion in record \(|current: |ResourceVersion: )\d+").unwrap());
static AGE: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"^\d+(s|ms)$").unwrap());

/// What stands for UIDs and versions, by the order in which they appear.
#[derive(Default)]
pub struct Names {
    uids: BTreeMap<String, String>,
}

impl Names {
    /// An answer with names in the place of what cannot be equal.
    pub fn plain(&mut self, mut answer: Answer) -> Answer {
        self.walk(&mut answer.body, "");
        answer.warnings.iter_mut().for_each(|w| *w = self.text(w));
        answer
    }

    fn text(&mut self, text: &str) -> String {
        let text = sorted(text);
        let text = TIME.replace_all(&text, "TIME");
        let text = JWT.replace_all(&text, "TOKEN");
        let text = DRAWN.replace_all(&text, "drawn-NAME");
        let text = AGE.replace_all(&text, "AGE");
        let text = RECORD.replace_all(&text, "${1}VERSION");
        UID.replace_all(&text, |found: &regex::Captures<'_>| {
            self.uids.get(&found[0]).cloned().unwrap_or_else(|| "UID".into())
        })
        .into_owned()
    }

    fn walk(&mut self, value: &mut Value, key: &str) {
        match value {
            Value::String(s) if key == "continue" && !s.is_empty() => *s = "TOKEN".into(),
            Value::String(s) if key == "storageVersionHash" => *s = "HASH".into(),
            Value::String(s) if key == "uid" => {
                let n = self.uids.len();
                *s = self.uids.entry(s.clone()).or_insert_with(|| format!("uid-{n}")).clone();
            }
            Value::String(s) => *s = self.text(s),
            Value::Array(list) => list.iter_mut().for_each(|v| self.walk(v, "")),
            Value::Object(map) => {
                // Fields that are wrong are named in any order.
                if let Some(Value::Array(causes)) = map.get_mut("details").and_then(|d| d.get_mut("causes")) {
                    causes.sort_by_key(Value::to_string);
                    let many = causes.len() > 1;
                    if let Some(Value::String(message)) = map.get_mut("message").filter(|_| many)
                        && let Some((start, _)) = message.split_once(" is invalid: [")
                    {
                        *message = format!("{start} is invalid: ...");
                    }
                }
                // The version of a list is that of the whole store.
                let list = map.contains_key("items")
                    || map.contains_key("rows")
                    || map.get("type") == Some(&json!("BOOKMARK"));
                if list
                    && let Some(Value::String(rv)) = map.get_mut("metadata").and_then(|m| m.get_mut("resourceVersion"))
                {
                    *rv = "VERSION".into();
                }
                if map.get("type") == Some(&json!("BOOKMARK"))
                    && let Some(Value::String(rv)) =
                        map.get_mut("object").and_then(|o| o.pointer_mut("/metadata/resourceVersion"))
                {
                    *rv = "VERSION".into();
                }
                // Owners stand in the order of their seconds, and whether one passes between two calls is chance.
                if let Some(Value::Array(owners)) = map.get_mut("managedFields") {
                    owners.sort_by_key(|o| ["manager", "operation", "subresource"].map(|k| o[k].to_string()));
                }
                for key in ["resourceRules", "nonResourceRules"] {
                    if let Some(Value::Array(rules)) = map.get_mut(key) {
                        rules.sort_by_key(Value::to_string);
                    }
                }
                // UIDs first: others may name them.
                if let Some(v) = map.get_mut("metadata") {
                    self.walk(v, "metadata");
                }
                if let Some(v) = map.get_mut("uid") {
                    self.walk(v, "uid");
                }
                *map = std::mem::take(map)
                    .into_iter()
                    .map(|(k, mut v)| {
                        if k != "metadata" && k != "uid" {
                            self.walk(&mut v, &k);
                        }
                        (self.text(&k), v)
                    })
                    .collect();
            }
            _ => {}
        }
    }

    /// Replaces resourceVersions by their rank among those of the same object.
    pub fn order(&self, answers: &mut [Answer]) {
        let mut seen = BTreeMap::<String, BTreeSet<u64>>::new();
        let number = |rv: &str| rv.parse::<u64>().unwrap_or(0);
        for a in answers.iter_mut() {
            versions(&mut a.body, &mut |uid, rv| {
                seen.entry(uid.to_owned()).or_default().insert(number(rv));
            });
        }
        for a in answers.iter_mut() {
            versions(&mut a.body, &mut |uid, rv| {
                let rank = seen[uid].iter().position(|v| *v == number(rv)).unwrap_or_default();
                *rv = format!("version {rank}");
            });
        }
    }
}

/// JSON objects that are quoted in a text, with their fields in order.
fn sorted(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(start) = rest.find("\"{") {
        let (before, quoted) = rest.split_at(start);
        out.push_str(before);
        let mut parser = serde_json::Deserializer::from_str(quoted).into_iter::<String>();
        let inner = parser.next().and_then(Result::ok);
        match inner.and_then(|s| serde_json::from_str::<Value>(&s).ok()) {
            Some(mut object) => {
                versions(&mut object, &mut |_, rv| *rv = "VERSION".into());
                out.push_str(&Value::String(object.to_string()).to_string());
                rest = &quoted[parser.byte_offset()..];
            }
            None => {
                out.push('"');
                rest = &quoted[1..];
            }
        }
    }
    out.push_str(rest);
    out
}

/// Every version of an object, with the UID beside it.
fn versions(value: &mut Value, act: &mut dyn FnMut(&str, &mut String)) {
    match value {
        Value::Array(list) => list.iter_mut().for_each(|v| versions(v, act)),
        Value::Object(map) => {
            let uid = map.get("uid").and_then(Value::as_str).unwrap_or_default().to_owned();
            for (key, v) in map.iter_mut() {
                match v {
                    Value::String(rv)
                        if key == "resourceVersion" && rv.bytes().all(|b| b.is_ascii_digit()) && !rv.is_empty() =>
                    {
                        act(&uid, rv);
                    }
                    other => versions(other, act),
                }
            }
        }
        _ => {}
    }
}

/// Where two answers differ: pointer, and both sides.
pub fn difference(a: &Answer, b: &Answer) -> Vec<(String, String)> {
    let mut out = Vec::new();
    let whole = |a: &Answer| json!({"code": a.code, "warnings": a.warnings, "type": a.kind, "body": a.body});
    values(&whole(a), &whole(b), "", &mut out);
    out
}

fn values(a: &Value, b: &Value, at: &str, out: &mut Vec<(String, String)>) {
    match (a, b) {
        (Value::Object(x), Value::Object(y)) => {
            let keys: BTreeSet<&String> = x.keys().chain(y.keys()).collect();
            for key in keys {
                let pointer = format!("{at}/{}", key.replace('~', "~0").replace('/', "~1"));
                match (x.get(key), y.get(key)) {
                    (Some(a), Some(b)) => values(a, b, &pointer, out),
                    (a, b) => out.push((pointer, shown(a, b))),
                }
            }
        }
        (Value::Array(x), Value::Array(y)) if x.len() == y.len() => {
            for (i, (a, b)) in x.iter().zip(y).enumerate() {
                values(a, b, &format!("{at}/{i}"), out);
            }
        }
        _ if a == b => {}
        _ => out.push((at.to_owned(), shown(Some(a), Some(b)))),
    }
}

fn shown(a: Option<&Value>, b: Option<&Value>) -> String {
    let side = |v: Option<&Value>| v.map_or_else(|| "nothing".to_owned(), Value::to_string);
    format!("{} | {}", side(a), side(b))
}

/// A difference that is known: a line of the list.
#[derive(Debug)]
pub struct Known {
    script: String,
    step: String,
    pointer: Regex,
    /// The line.
    pub text: String,
    /// It was met.
    pub used: bool,
}

impl Known {
    /// Whether it is this one.
    pub fn covers(&mut self, script: &str, step: &Step, pointer: &str) -> bool {
        let here = (self.script == "*" || self.script == script)
            && (self.step == "*" || step.name == self.step || step.text.contains(&self.step))
            && self.pointer.is_match(pointer);
        self.used |= here;
        here
    }
}

/// Reads the list: script, step (its name or a part of its line), pattern of the pointer, reason; separated by `|`.
pub fn differences(text: &str) -> Result<Vec<Known>, String> {
    text.lines()
        .filter(|l| !l.trim().is_empty() && !l.starts_with('#'))
        .map(|line| {
            let parts: Vec<&str> = line.splitn(4, " | ").map(str::trim).collect();
            let [script, step, pointer, reason] = parts.as_slice() else {
                return Err(format!("{line:?} has no four parts"));
            };
            if reason.is_empty() {
                return Err(format!("{line:?} gives no reason"));
            }
            let pointer = Regex::new(&format!("^{pointer}")).map_err(|e| e.to_string())?;
            Ok(Known { script: (*script).into(), step: (*step).into(), pointer, text: line.into(), used: false })
        })
        .collect()
}
