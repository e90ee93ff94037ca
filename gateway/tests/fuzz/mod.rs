//! Admission and the websocket bridge under what nobody would send. Begins with `fuzz/corpus/`, changes it at random; a failure is made
//! small and kept in `proptest-regressions/`. `PROPTEST_CASES` says for how long. `fuzz/` asks the same with the coverage as its guide.

mod targets;

use crate::admission::{ask, input};
use crate::support::{eventually, world};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use serde_json::{Value, json};
use std::path::PathBuf;
use targets::{admission, say};

/// The files of a corpus: those that somebody wrote have names, those that were found have hashes.
fn files(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    files.into_iter().map(|f| (f.clone(), std::fs::read(f).unwrap())).collect()
}

fn corpus() -> Vec<Value> {
    let mut files = files("admission");
    files.retain(|(f, _)| f.extension().is_some_and(|e| e == "json"));
    files.iter().map(|(_, bytes)| serde_json::from_slice(bytes).unwrap()).collect()
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
        admission(object.to_string().as_bytes());
    }
}

#[test]
fn the_corpus_itself() {
    for (file, bytes) in files("admission") {
        println!("{}", file.display());
        admission(&bytes);
    }
    let refused: Vec<String> = corpus()
        .iter()
        .filter_map(|o| {
            ask(input(o["kind"].as_str().unwrap(), o.clone()))
                .err()
                .map(|_| o["metadata"]["name"].as_str().unwrap().to_owned())
        })
        .collect();
    assert_eq!(refused, ["odd"], "what is right in the corpus is accepted");
}

#[tokio::test]
async fn the_bridge_survives_every_frame() {
    let world = world().await;
    world.make_vmi(json!({})).await;
    let corpus = files("bridge");
    for (file, bytes) in &corpus {
        println!("{}", file.display());
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
