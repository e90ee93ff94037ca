//! What people keep secret is in no journal, no log and no object where it does not belong.

use crate::support::{World, eventually, vm};
use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Value, json};
use state::{
    journal::{Piece, pieces},
    object::Kind,
};
use std::sync::atomic::Ordering;

/// All that must not be seen, in the forms in which it is written.
fn planted() -> Vec<String> {
    let mut all: Vec<String> =
        ["user-data", "network-data", "by-secret", "key"].iter().map(|w| format!("hush.{w}.7c1e")).collect();
    // The three ways in which base64 shows a text, by what stands before it.
    for before in ["", "x", "xx"] {
        let text = STANDARD.encode(format!("{before}hush.in-base64.7c1e"));
        all.push(text[4..text.len() - 4].to_owned());
    }
    // A label that the API server does not take, and quotes.
    all.push("hush refused 7c1e".into());
    all.push("hush.in-base64.7c1e".into());
    all
}

fn assert_hushed(what: &str, bytes: &[u8]) {
    for secret in planted() {
        let found = bytes.windows(secret.len()).position(|w| w == secret.as_bytes());
        assert!(found.is_none(), "{what} shows {secret:?} at {found:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn secrets_are_in_no_journal_no_log_no_event_and_no_pod() {
    let logs = tempfile::NamedTempFile::new().unwrap();
    telemetry::init(&telemetry::Options {
        service: "test",
        log_file: Some(logs.path().into()),
        log_filter: "trace".into(),
        ..Default::default()
    })
    .unwrap();
    let w = World::new().await;
    let (stop, running) = w.controller();
    eventually("a session", || async { w.agent.sessions.load(Ordering::SeqCst) > 0 }).await;
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "cloud", "namespace": "default"},
        "stringData": {"userdata": "password: hush.by-secret.7c1e"},
    });
    w.create_core("Secret", "secrets", secret).await;

    let disks = |names: &[&str]| json!(names.iter().map(|n| json!({"name": n, "disk": {}})).collect::<Vec<_>>());
    let with_secrets = |name: &str| {
        let mut m = vm(name, "Always");
        let spec = &mut m["spec"]["template"]["spec"];
        spec["domain"]["devices"]["disks"] = disks(&["inline", "encoded", "referenced"]);
        spec["volumes"] = json!([
            {"name": "inline", "cloudInitNoCloud": {
                "userData": "#!/bin/sh\necho root:hush.user-data.7c1e | chpasswd",
                "networkData": "wifi: hush.network-data.7c1e"}},
            {"name": "encoded", "cloudInitConfigDrive": {"userDataBase64": STANDARD.encode("hush.in-base64.7c1e")}},
            {"name": "referenced", "cloudInitNoCloud": {"secretRef": {"name": "cloud"}}},
        ]);
        m["metadata"]["annotations"]["kubectl.kubernetes.io/last-applied-configuration"] = json!(m.to_string());
        m["metadata"]["annotations"]["example.org/key"] = json!("hush.key.7c1e");
        m["spec"]["template"]["metadata"]["annotations"]["example.org/other"] = json!("plain");
        m
    };
    w.create(Kind::VirtualMachine, with_secrets("web")).await;
    w.status("web", "Running").await;
    // The template changes, and its digests with it.
    let other = json!([{"name": "inline", "cloudInitNoCloud": {"userData": "hush.user-data.7c1e, again"}}]);
    w.patch(Kind::VirtualMachine, "web", json!({"spec": {"template": {"spec": {"volumes": other}}}})).await;
    // The API server says what it does not like, with the value.
    let mut refused = with_secrets("refused");
    refused["spec"]["template"]["metadata"]["labels"] = json!({"example.org/x": "hush refused 7c1e"});
    w.create(Kind::VirtualMachine, refused).await;
    let refusal = |vm: &Value| {
        let conditions = vm["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().find(|c| c["type"] == "Failure").map(|c| c["message"].to_string())
    };
    eventually("a refusal", || async {
        refusal(&w.get(Kind::VirtualMachine, "refused").await.unwrap_or_default()).is_some()
    })
    .await;
    let vm = w.get(Kind::VirtualMachine, "refused").await.unwrap();
    assert!(refusal(&vm).unwrap().contains("labels"), "which field it is, is told: {}", vm["status"]);
    for name in ["web", "refused"] {
        let vm = w.get(Kind::VirtualMachine, name).await.unwrap();
        assert_hushed("the status", vm["status"].to_string().as_bytes());
    }
    for pod in w.pods().await {
        assert_hushed("the pod", serde_json::to_string(&pod).unwrap().as_bytes());
    }
    for text in w.events_as("message").await {
        assert_hushed("an event", text.as_bytes());
    }
    stop.cancel();
    running.await.unwrap().unwrap();
    w.assert_replays();

    let mut lines = 0;
    for path in telemetry::journal::segments(&w.folder.path().join("journal")).unwrap() {
        let bytes = std::fs::read(path).unwrap();
        assert_hushed("the journal, as it is,", &bytes);
        for piece in pieces(&bytes) {
            let Piece::Block(block) = piece else { panic!("{piece:?}") };
            for line in block.raw() {
                assert_hushed("the journal", line);
                lines += 1;
            }
        }
    }
    assert!(lines > 20, "{lines}");
    let log = std::fs::read(logs.path()).unwrap();
    assert!(log.len() > 1000, "something is logged");
    assert_hushed("the log", &log);
}
