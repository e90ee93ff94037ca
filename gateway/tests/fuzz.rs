//! Admission and the websocket bridge under what nobody would send. Begins with `corpus/`, changes it at random; a failure is made
//! small and kept in `proptest-regressions/`. `PROPTEST_CASES` says for how long.

use crate::admission::{ask, input};
use crate::support::{World, eventually, world};
use gateway::{AdmissionInput, Operation};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use serde_json::{Value, json};
use std::path::PathBuf;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/corpus")
}

fn corpus() -> Vec<Value> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder()).unwrap().map(|e| e.unwrap().path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "json"));
    files.sort();
    files.iter().map(|f| serde_json::from_str(&std::fs::read_to_string(f).unwrap()).unwrap()).collect()
}

/// A change of one place of an object.
#[derive(Debug, Clone)]
enum Change {
    Remove,
    Put(Value),
    /// What stands somewhere else.
    Copy(usize),
    /// Once more, in a list or under another name.
    Twice,
}

fn values() -> impl Strategy<Value = Value> {
    let words = prop::sample::select(vec![
        "",
        "virtio",
        "sata",
        "-1",
        "0",
        "1Gi",
        "1e9Ei",
        "99999999999999999999",
        "Always",
        "a b",
        "é\u{0}\n",
        "../x",
        "::1",
        "q35",
    ]);
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-2i64..70000).prop_map(Value::from),
        any::<f64>().prop_map(|f| json!(f)),
        words.prop_map(Value::from),
        ".{0,40}".prop_map(Value::from),
        Just(json!({})),
        Just(json!([])),
        Just(json!([null, 1, "a", {}, []])),
        Just(json!("a".repeat(5000))),
    ]
}

fn changes() -> impl Strategy<Value = Change> {
    prop_oneof![
        Just(Change::Remove),
        values().prop_map(Change::Put),
        any::<usize>().prop_map(Change::Copy),
        Just(Change::Twice)
    ]
}

/// Pointers to all places of an object, in order.
fn places(value: &Value, at: &str, out: &mut Vec<String>) {
    out.push(at.to_owned());
    match value {
        Value::Object(o) => {
            o.iter().for_each(|(k, v)| places(v, &format!("{at}/{}", k.replace('~', "~0").replace('/', "~1")), out));
        }
        Value::Array(a) => a.iter().enumerate().for_each(|(i, v)| places(v, &format!("{at}/{i}"), out)),
        _ => {}
    }
}

fn apply(object: &mut Value, place: usize, change: &Change) {
    let mut all = Vec::new();
    places(object, "", &mut all);
    // The kind stays: it decides who is asked.
    all.retain(|p| !p.is_empty() && p != "/kind");
    let Some(pointer) = all.get(place % all.len().max(1)) else { return };
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let copy = |n: usize, o: &Value| o.pointer(&all[n % all.len()]).cloned().unwrap_or(Value::Null);
    let new = match change {
        Change::Remove => None,
        Change::Put(v) => Some(v.clone()),
        Change::Copy(n) => Some(copy(*n, object)),
        Change::Twice => object.pointer(pointer).cloned(),
    };
    match object.pointer_mut(parent) {
        Some(Value::Object(o)) => match (new, change) {
            (None, _) => drop(o.remove(key)),
            (Some(v), Change::Twice) => drop(o.insert(format!("{key}Again"), v)),
            (Some(v), _) => drop(o.insert(key.into(), v)),
        },
        Some(Value::Array(a)) => {
            let i: usize = key.parse().unwrap();
            match (new, change) {
                (None, _) => drop(a.remove(i)),
                (Some(v), Change::Twice) => a.push(v),
                (Some(v), _) => a[i] = v,
            }
        }
        _ => {}
    }
}

/// Places of `given` that `stored` does not have as they were: what a user set and does not get back. What asks for nothing may be
/// filled in.
fn lost(given: &Value, stored: &Value, at: &str, out: &mut Vec<String>) {
    match (given, stored) {
        (Value::Object(g), Value::Object(s)) => {
            g.iter().for_each(|(k, v)| lost(v, s.get(k).unwrap_or(&Value::Null), &format!("{at}.{k}"), out));
        }
        (Value::Array(g), Value::Array(s)) => {
            g.iter()
                .enumerate()
                .for_each(|(i, v)| lost(v, s.get(i).unwrap_or(&Value::Null), &format!("{at}[{i}]"), out));
        }
        (Value::Null, _) => {}
        (Value::String(s), _) if s.is_empty() => {}
        (Value::Number(n), _) if n.as_i64() == Some(0) => {}
        // No value of this type comes here: the schema has refused it before.
        (g, Value::Object(_)) if !g.is_object() => {}
        (g, Value::Array(_)) if !g.is_array() => {}
        (g, s) if g == s => {}
        _ => out.push(format!("{at}: {given} became {stored}")),
    }
}

fn hold(object: &Value) -> Result<(), TestCaseError> {
    let kind = object["kind"].as_str().unwrap().to_owned();
    match ask(input(&kind, object.clone())) {
        Err(status) => {
            prop_assert!(status.code == 422 || status.code == 400, "{status}");
            let causes = status.causes();
            prop_assert!(causes.len() <= 10 && (status.code == 400 || !causes.is_empty()), "{causes:?}");
            prop_assert!(causes.iter().all(|(_, field, message)| field.len() < 20_000 && !message.is_empty()));
        }
        Ok(out) => {
            let mut gone = Vec::new();
            lost(&object["spec"], &out.object["spec"], "spec", &mut gone);
            prop_assert!(gone.is_empty(), "{gone:?}");
            // The same again changes nothing, nor does who only puts a label on it.
            let again = ask(input(&kind, out.object.clone())).map_err(|e| TestCaseError::fail(e.to_string()))?;
            prop_assert_eq!(&again.object["spec"], &out.object["spec"]);
            let mut labelled = out.object.clone();
            if let Some(metadata) = labelled["metadata"].as_object_mut() {
                metadata.insert("labels".into(), json!({"note": "x"}));
            }
            let update = AdmissionInput {
                operation: Operation::Update,
                old_object: Some(out.object.clone()),
                ..input(&kind, labelled.clone())
            };
            let updated = ask(update).map_err(|e| TestCaseError::fail(e.to_string()))?;
            prop_assert_eq!(updated.object, labelled);
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn admission_neither_panics_nor_loses_anything(
        seed in any::<prop::sample::Index>(),
        all in prop::collection::vec((any::<usize>(), changes()), 0..6),
    ) {
        let corpus = corpus();
        let mut object = corpus[seed.index(corpus.len())].clone();
        for (place, change) in &all {
            apply(&mut object, *place, change);
        }
        hold(&object)?;
    }
}

#[test]
fn the_corpus_itself() {
    let refused: Vec<String> = corpus()
        .iter()
        .filter_map(|o| {
            hold(o).unwrap();
            ask(input(o["kind"].as_str().unwrap(), o.clone()))
                .err()
                .map(|_| o["metadata"]["name"].as_str().unwrap().to_owned())
        })
        .collect();
    assert_eq!(refused, ["odd"], "what is right in the corpus is accepted");
}

fn frames() -> Vec<(String, Vec<u8>)> {
    let text = std::fs::read_to_string(folder().join("frames.txt")).unwrap();
    let bytes =
        |hex: &str| (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect();
    text.lines().map(|l| l.split_once(' ').unwrap()).map(|(name, hex)| (name.to_owned(), bytes(hex))).collect()
}

/// Opens a console by hand, says something that may be no websocket at all, and reads until the other side has had enough or nothing
/// comes.
async fn say(world: &World, bytes: &[u8]) {
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    let hello = "GET /apis/subresources.kubevirt.io/v1/namespaces/default/virtualmachineinstances/a/console HTTP/1.1\r\nHost: a\r\n\
                 Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    stream.write_all(hello.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    assert!(head.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&head));
    let _ = stream.write_all(bytes).await;
    let _ = stream.shutdown().await;
    let mut rest = Vec::new();
    let mut bounded = stream.take(1 << 22);
    let read = tokio::time::timeout(std::time::Duration::from_secs(20), bounded.read_to_end(&mut rest));
    assert!(read.await.is_ok(), "the bridge does not end with its client");
}

#[tokio::test]
async fn the_bridge_survives_every_frame() {
    let world = world().await;
    world.make_vmi(json!({})).await;
    let corpus = frames();
    for (_, bytes) in &corpus {
        say(&world, bytes).await;
    }
    let pieces = prop_oneof![
        any::<prop::sample::Index>().prop_map(move |i| corpus[i.index(corpus.len())].1.clone()),
        prop::collection::vec(any::<u8>(), 0..40),
    ];
    let streams = prop::collection::vec(pieces, 0..8).prop_map(|p| p.concat());
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let cases = runner.config().cases;
    for _ in 0..cases {
        let bytes = streams.new_tree(&mut runner).unwrap().current();
        say(&world, &bytes).await;
    }
    let seen = world.seen.clone();
    eventually("all streams of the agent are closed", || *seen.open.lock().unwrap() == 0).await;
    // And who behaves is served as before.
    let (code, _) = world.verb("GET", "vmi/console", None).await;
    assert_eq!(code, 400, "a request without a websocket");
}
