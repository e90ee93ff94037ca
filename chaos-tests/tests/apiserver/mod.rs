//! The embedded API server is held against kube-apiserver: the scripts in `scripts/` run against both, and what they answer
//! is compared, but for what cannot be equal (UIDs, times, tokens). What else differs is a line of `differences.txt`, with its reason.
//!
//! A script is a text file, a call a line, in a namespace of the script's name:
//!
//! ```text
//! first: POST /api/v1/namespaces/$ns/configmaps {metadata: {name: a}, data: {x: "1"}}
//! PUT /api/v1/namespaces/$ns/configmaps/a {metadata: {name: a, resourceVersion: "${first/metadata/resourceVersion}"}}
//! APPLY /api/v1/namespaces/$ns/configmaps/a?fieldManager=m {apiVersion: v1, kind: ConfigMap, data: {x: "2"}}
//! ```
//!
//! * The words: the HTTP methods; `JSON`, `MERGE`, `STRATEGIC`, `APPLY` for the patches; `TABLE`, `META`, `METALIST`, `AGG` for GET in another form;
//!   `WATCH:N` reads N events; `AWAIT:CODE` asks again until that is the answer, which is not compared.
//! * Bodies are YAML in flow style, sent as JSON; `'...'` is sent as it is.
//! * `@user=NAME` impersonates, `@agent=NAME` is the user agent, `@type=T` the content type.
//! * `@pick=NAME` compares one entry of a list alone.
//! * `${NAME/POINTER}` is from an earlier answer.

mod compare;
mod script;

use chaos_tests::kubernetes::{self, Kubernetes};
use compare::{Answer, Names};
use embedded::{
    auth::User,
    cluster,
    server::{ApiServer, Config},
    storage::Memory,
};
use script::Step;
use std::{collections::BTreeMap, fmt::Write as _, sync::Arc};

/// The folder of the scripts.
const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/apiserver/scripts");
/// What differs, and why.
const DIFFERENCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/apiserver/differences.txt");

/// All scripts: name and steps.
fn scripts() -> Vec<(String, Vec<Step>)> {
    let only = std::env::var("VIRTFOLD_SCRIPT").unwrap_or_default();
    let mut all: Vec<_> = std::fs::read_dir(SCRIPTS)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "txt"))
        .map(|path| {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let text = std::fs::read_to_string(&path).unwrap();
            let steps = script::parse(&text).unwrap_or_else(|why| panic!("{name}: {why}"));
            (name, steps)
        })
        .filter(|(name, _)| only.is_empty() || *name == only)
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// Runs a script: the answers, made comparable.
async fn run(client: &kube::Client, name: &str, steps: &[Step]) -> Vec<Answer> {
    let mut names = Names::default();
    let mut known = BTreeMap::new();
    let mut out = Vec::new();
    let namespace = Step::parse(&format!("POST /api/v1/namespaces {{metadata: {{name: {name}}}}}")).unwrap();
    let made = namespace.ask(client, name, &known).await;
    assert_eq!(made.code, 201, "the namespace {name}: {}", made.body);
    let account = Step::parse("AWAIT:200 /api/v1/namespaces/$ns/serviceaccounts/default").unwrap();
    account.ask(client, name, &known).await;
    for step in steps {
        let answer = step.ask(client, name, &known).await;
        if !step.name.is_empty() {
            known.insert(step.name.clone(), answer.body.clone());
        }
        out.push(names.plain(answer));
    }
    names.order(&mut out);
    out
}

async fn ours() -> (ApiServer, kube::Client, tokio_util::sync::DropGuard, tempfile::TempDir) {
    let server = ApiServer::new(
        Arc::new(Memory::new()),
        Config {
            token_key: b"a key".to_vec(),
            issuer: "https://kubernetes.default.svc.cluster.local".into(),
            ..Config::default()
        },
    )
    .await
    .unwrap();
    let client = server.client(User::new("admin", &["system:masters"]));
    let stop = tokio_util::sync::CancellationToken::new();
    let folder = tempfile::tempdir().unwrap();
    let options = cluster::Options { volumes: folder.path().join("v"), imports: folder.path().join("i") };
    tokio::spawn(cluster::run(server.client(User::system("system:controller")), options, stop.clone()));
    (server, client, stop.drop_guard(), folder)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_embedded_server_answers_as_kube_apiserver_does() {
    if let Err(why) = kubernetes::programs() {
        println!("SKIPPED: {why}");
        return;
    }
    let kubernetes = tokio::task::spawn_blocking(Kubernetes::start).await.unwrap().unwrap();
    let config = kube::config::Kubeconfig::read_from(kubernetes.data.join("kubeconfig")).unwrap();
    let mut config =
        kube::Config::from_custom_kubeconfig(config, &kube::config::KubeConfigOptions::default()).await.unwrap();
    // Refusals are answers here.
    config.default_retry = false;
    let theirs = kube::Client::try_from(config).unwrap();
    let (_server, ours, _stop, _folder) = ours().await;

    let mut known = compare::differences(&std::fs::read_to_string(DIFFERENCES).unwrap()).unwrap();
    let mut report = String::new();
    let mut calls = 0;
    for (name, steps) in scripts() {
        let (a, b) = tokio::join!(run(&theirs, &name, &steps), run(&ours, &name, &steps));
        for ((step, a), b) in steps.iter().zip(&a).zip(&b).filter(|((step, _), _)| !step.waits()) {
            calls += 1;
            if std::env::var("VIRTFOLD_SCRIPT").is_ok() {
                println!("{name}:{} {}\n  {} {}\n  {} {}", step.line, step.text, a.code, a.body, b.code, b.body);
            }
            let found: Vec<String> = compare::difference(a, b)
                .into_iter()
                .filter(|(pointer, _)| !known.iter_mut().any(|k| k.covers(&name, step, pointer)))
                .map(|(pointer, text)| format!("      {pointer}: {text}\n"))
                .collect();
            if !found.is_empty() {
                let _ = write!(report, "{name}:{} {}\n{}", step.line, step.text, found.concat());
            }
        }
    }
    println!("{calls} calls");
    if std::env::var("VIRTFOLD_SCRIPT").is_err() {
        for k in known.iter().filter(|k| !k.used) {
            let _ = writeln!(report, "differences.txt: nothing differs any more: {}", k.text);
        }
    }
    assert!(report.is_empty(), "kube-apiserver (first) and the embedded server (second) differ:\n{report}");
    tokio::task::spawn_blocking(|| drop(kubernetes)).await.unwrap();
}
