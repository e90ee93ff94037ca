//! `kube` clients in the server's process.

use std::sync::Arc;

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Pod, Secret};
use kube::api::{
    Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, PropagationPolicy, WatchEvent, WatchParams,
};
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use serde_json::json;

use crate::support::{admin, etcd_in, eventually, over, server};

fn map(name: &str, value: &str) -> ConfigMap {
    serde_json::from_value(json!({"metadata": {"name": name}, "data": {"k": value}})).unwrap()
}

fn pod(name: &str) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }))
    .unwrap()
}

fn code(e: &kube::Error) -> (u16, String) {
    match e {
        kube::Error::Api(s) => (s.code, s.reason.clone()),
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn objects_live_through_their_whole_life() {
    let server = server().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client(admin()));
    let made = maps.create(&PostParams::default(), &map("a", "1")).await.unwrap();
    assert!(made.metadata.uid.is_some() && made.metadata.creation_timestamp.is_some());
    let e = maps.create(&PostParams::default(), &map("a", "1")).await.unwrap_err();
    assert_eq!(code(&e), (409, "AlreadyExists".into()));
    // A stale replace conflicts; nothing is written by a replace that changes nothing.
    let mut next = made.clone();
    next.data.as_mut().unwrap().insert("k".into(), "2".into());
    let second = maps.replace("a", &PostParams::default(), &next).await.unwrap();
    assert_eq!(code(&maps.replace("a", &PostParams::default(), &next).await.unwrap_err()), (409, "Conflict".into()));
    let same = maps.replace("a", &PostParams::default(), &second).await.unwrap();
    assert_eq!(same.metadata.resource_version, second.metadata.resource_version);
    let patched =
        maps.patch("a", &PatchParams::default(), &Patch::Merge(json!({"data": {"k": null, "l": "3"}}))).await.unwrap();
    assert_eq!(patched.data.unwrap().into_iter().collect::<Vec<_>>(), [("l".to_owned(), "3".to_owned())]);
    let json: json_patch::Patch =
        serde_json::from_value(json!([{"op": "test", "path": "/data/l", "value": "nope"}])).unwrap();
    let e = maps.patch("a", &PatchParams::default(), &Patch::<ConfigMap>::Json(json)).await.unwrap_err();
    assert_eq!(code(&e).0, 422);
    // Deleting with the wrong UID is refused.
    let wrong = DeleteParams::default()
        .preconditions(kube::api::Preconditions { uid: Some("other".into()), resource_version: None });
    assert_eq!(code(&maps.delete("a", &wrong).await.unwrap_err()), (409, "Conflict".into()));
    maps.delete("a", &DeleteParams::default()).await.unwrap();
    assert_eq!(code(&maps.get("a").await.unwrap_err()), (404, "NotFound".into()));
}

#[tokio::test]
async fn finalizers_and_propagation_hold_objects() {
    let server = server().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client(admin()));
    let mut held = map("h", "1");
    held.metadata.finalizers = Some(vec!["example.com/held".into()]);
    maps.create(&PostParams::default(), &held).await.unwrap();
    let foreground =
        DeleteParams { propagation_policy: Some(PropagationPolicy::Foreground), ..DeleteParams::default() };
    maps.delete("h", &foreground).await.unwrap();
    let there = maps.get("h").await.unwrap();
    assert!(there.metadata.deletion_timestamp.is_some());
    assert_eq!(there.metadata.finalizers.unwrap(), ["example.com/held", "foregroundDeletion"]);
    let more = json!({"metadata": {"finalizers": ["example.com/held", "example.com/new"]}});
    let e = maps.patch("h", &PatchParams::default(), &Patch::Merge(more)).await.unwrap_err();
    assert_eq!(code(&e), (422, "Invalid".into()));
    let none = json!({"metadata": {"finalizers": null}});
    maps.patch("h", &PatchParams::default(), &Patch::Merge(none)).await.unwrap();
    assert_eq!(code(&maps.get("h").await.unwrap_err()).0, 404);
}

#[tokio::test]
async fn pods_go_with_grace_once_they_are_bound() {
    let server = server().await;
    let client = server.client(admin());
    let nodes: Api<Node> = Api::all(client.clone());
    let node: Node = serde_json::from_value(json!({"metadata": {"name": "n"}})).unwrap();
    nodes.create(&PostParams::default(), &node).await.unwrap();
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    pods.create(&PostParams::default(), &pod("unbound")).await.unwrap();
    pods.delete("unbound", &DeleteParams::default()).await.unwrap();
    assert_eq!(code(&pods.get("unbound").await.unwrap_err()).0, 404);
    let made = pods.create(&PostParams::default(), &pod("p")).await.unwrap();
    let spec = made.spec.unwrap();
    assert_eq!(spec.restart_policy.as_deref(), Some("Always"));
    assert_eq!(spec.service_account_name.as_deref(), Some("default"));
    assert_eq!(spec.tolerations.unwrap().len(), 2);
    assert_eq!(made.status.unwrap().phase.as_deref(), Some("Pending"));
    let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "p"},
        "target": {"apiVersion": "v1", "kind": "Node", "name": "n"}});
    let bind = || {
        http::Request::post("/api/v1/namespaces/default/pods/p/binding")
            .header("content-type", "application/json")
            .body(serde_json::to_vec(&binding).unwrap())
            .unwrap()
    };
    client.request::<serde_json::Value>(bind()).await.unwrap();
    assert_eq!(code(&client.request::<serde_json::Value>(bind()).await.unwrap_err()), (409, "Conflict".into()));
    let on_node = ListParams::default().fields("spec.nodeName=n");
    assert_eq!(pods.list(&on_node).await.unwrap().items.len(), 1);
    pods.delete("p", &DeleteParams::default()).await.unwrap();
    let going = pods.get("p").await.unwrap();
    assert_eq!(going.metadata.deletion_grace_period_seconds, Some(30));
    // A status that is written meanwhile keeps what deletion has set.
    let status = json!({"status": {"phase": "Running"}});
    let running = pods.patch_status("p", &PatchParams::default(), &Patch::Strategic(status)).await.unwrap();
    assert_eq!(running.metadata.deletion_grace_period_seconds, Some(30));
    pods.delete("p", &DeleteParams::default().grace_period(5)).await.unwrap();
    assert_eq!(pods.get("p").await.unwrap().metadata.deletion_grace_period_seconds, Some(5));
    pods.delete("p", &DeleteParams::default().grace_period(60)).await.unwrap();
    assert_eq!(pods.get("p").await.unwrap().metadata.deletion_grace_period_seconds, Some(5));
    pods.delete("p", &DeleteParams::default().grace_period(0)).await.unwrap();
    assert_eq!(code(&pods.get("p").await.unwrap_err()).0, 404);
}

async fn watched(server: &embedded::server::ApiServer) {
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client(admin()));
    maps.create(&PostParams::default(), &map("w0", "0")).await.unwrap();
    let config = watcher::Config::default().streaming_lists();
    for config in [watcher::Config::default(), config] {
        let mut stream = Box::pin(watcher::watcher(maps.clone(), config).default_backoff());
        let mut seen = Vec::new();
        while let Some(event) = stream.try_next().await.unwrap() {
            match event {
                Event::InitApply(o) => seen.push(o.metadata.name.unwrap()),
                Event::InitDone => break,
                _ => {}
            }
        }
        assert!(seen.contains(&"w0".to_owned()));
        maps.create(&PostParams::default(), &map("w1", "1")).await.unwrap();
        maps.patch("w1", &PatchParams::default(), &Patch::Merge(json!({"data": {"k": "2"}}))).await.unwrap();
        maps.delete("w1", &DeleteParams::default()).await.unwrap();
        let mut got = Vec::new();
        while got.len() < 3 {
            match stream.try_next().await.unwrap().unwrap() {
                Event::Apply(o) => got.push(format!("+{}", o.data.unwrap()["k"])),
                Event::Delete(o) => got.push(format!("-{}", o.data.unwrap()["k"])),
                _ => {}
            }
        }
        assert_eq!(got, ["+1", "+2", "-2"]);
    }
}

#[tokio::test]
async fn watchers_see_every_change_over_memory() {
    watched(&server().await).await;
}

/// The etcd that works in a folder.
fn etcd_process(folder: &std::path::Path) -> i32 {
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|e| e.ok()?.file_name().to_str()?.parse::<i32>().ok())
        .find(|pid| std::fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|c| c == folder))
        .unwrap()
}

#[tokio::test]
async fn watchers_see_every_change_over_etcd_and_after_its_restart() {
    let dir = tempfile::tempdir().unwrap();
    let (process, store) = etcd_in(dir.path()).await;
    let server = over(Arc::new(store)).await;
    watched(&server).await;
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client(admin()));
    let mut stream = Box::pin(watcher::watcher(maps.clone(), watcher::Config::default()).default_backoff());
    while !matches!(stream.next().await, Some(Ok(Event::InitDone))) {}
    // etcd dies and is restarted by whoever runs it: the same stream goes on, nothing is lost.
    let sockets = dir.path().join("r");
    let pid = etcd_process(&sockets);
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
    eventually("a write after etcd's restart", || async {
        matches!(maps.create(&PostParams::default(), &map("late", "1")).await, Ok(_) | Err(kube::Error::Api(_)))
            && maps.get("late").await.is_ok()
    })
    .await;
    loop {
        match stream.next().await.unwrap() {
            Ok(Event::Apply(o)) if o.metadata.name.as_deref() == Some("late") => break,
            Ok(_) | Err(_) => {}
        }
    }
    process.stop().await;
}

#[tokio::test]
async fn a_selector_sees_objects_come_and_go() {
    let server = server().await;
    let pods: Api<Pod> = Api::default_namespaced(server.client(admin()));
    let list = pods.list(&ListParams::default()).await.unwrap();
    let params = WatchParams::default().labels("app=x");
    let mut stream = Box::pin(pods.watch(&params, &list.metadata.resource_version.unwrap()).await.unwrap());
    pods.create(&PostParams::default(), &pod("y")).await.unwrap();
    for app in ["x", "y"] {
        let p = json!({"metadata": {"labels": {"app": app}}});
        pods.patch("y", &PatchParams::default(), &Patch::Merge(p)).await.unwrap();
    }
    assert!(matches!(stream.try_next().await.unwrap().unwrap(), WatchEvent::Added(_)));
    assert!(matches!(stream.try_next().await.unwrap().unwrap(), WatchEvent::Deleted(_)));
}

#[tokio::test]
async fn metadata_alone_can_be_watched() {
    let server = server().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client(admin()));
    maps.create(&PostParams::default(), &map("m", "1")).await.unwrap();
    let metadata: Api<PartialObjectMeta<ConfigMap>> = Api::default_namespaced(server.client(admin()));
    let mut stream = Box::pin(watcher::watcher(metadata, watcher::Config::default()).applied_objects());
    let first = stream.try_next().await.unwrap().unwrap();
    assert_eq!(first.metadata.name.as_deref(), Some("m"));
}

#[tokio::test]
async fn lists_come_in_chunks_of_one_snapshot() {
    let server = server().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client(admin()));
    for i in 0..7 {
        maps.create(&PostParams::default(), &map(&format!("c{i}"), "1")).await.unwrap();
    }
    let mut params = ListParams::default().limit(3);
    let mut names = Vec::new();
    loop {
        let page = maps.list(&params).await.unwrap();
        names.extend(page.items.iter().map(|o| o.metadata.name.clone().unwrap()));
        if names.len() == 3 {
            assert_eq!(page.metadata.remaining_item_count, Some(4));
            maps.delete("c6", &DeleteParams::default()).await.unwrap();
        }
        match page.metadata.continue_.filter(|c| !c.is_empty()) {
            Some(next) => params = params.continue_token(&next),
            None => break,
        }
    }
    assert_eq!(names, (0..7).map(|i| format!("c{i}")).collect::<Vec<_>>());
}

#[tokio::test]
async fn an_eviction_is_a_deletion() {
    let server = server().await;
    let pods: Api<Pod> = Api::default_namespaced(server.client(admin()));
    pods.create(&PostParams::default(), &pod("e")).await.unwrap();
    pods.evict("e", &kube::api::EvictParams::default()).await.unwrap();
    assert_eq!(code(&pods.get("e").await.unwrap_err()).0, 404);
}

#[tokio::test]
async fn writers_without_a_resource_version_do_not_lose_each_others_changes() {
    let server = server().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client(admin()));
    maps.create(&PostParams::default(), &map("m", "1")).await.unwrap();
    let writes = (0..8).map(|i| {
        let maps = maps.clone();
        async move {
            for j in 0..10 {
                let p = json!({"data": {format!("k{i}-{j}"): "x"}});
                maps.patch("m", &PatchParams::default(), &Patch::Merge(p)).await.unwrap();
            }
        }
    });
    futures::future::join_all(writes).await;
    assert_eq!(maps.get("m").await.unwrap().data.unwrap().len(), 81);
}

#[tokio::test]
async fn secrets_and_generated_names() {
    let server = server().await;
    let secrets: Api<Secret> = Api::default_namespaced(server.client(admin()));
    let s: Secret =
        serde_json::from_value(json!({"metadata": {"generateName": "s-"}, "stringData": {"a": "b"}})).unwrap();
    let made = secrets.create(&PostParams::default(), &s).await.unwrap();
    let name = made.metadata.name.unwrap();
    assert!(name.starts_with("s-") && name.len() == 7, "{name}");
    assert_eq!(made.data.unwrap()["a"].0, b"b");
    assert!(made.string_data.is_none());
}

#[tokio::test]
async fn a_terminating_namespace_takes_nothing_new() {
    let server = server().await;
    let client = server.client(admin());
    let spaces: Api<Namespace> = Api::all(client.clone());
    let ns: Namespace = serde_json::from_value(json!({"metadata": {"name": "t"}})).unwrap();
    spaces.create(&PostParams::default(), &ns).await.unwrap();
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "t");
    maps.create(&PostParams::default(), &map("a", "1")).await.unwrap();
    spaces.delete("t", &DeleteParams::default()).await.unwrap();
    let e = maps.create(&PostParams::default(), &map("b", "1")).await.unwrap_err();
    assert_eq!(code(&e), (403, "Forbidden".into()));
    let e = Api::<ConfigMap>::namespaced(client.clone(), "none").create(&PostParams::default(), &map("b", "1")).await;
    assert_eq!(code(&e.unwrap_err()), (404, "NotFound".into()));
    let mut there = serde_json::to_value(spaces.get("t").await.unwrap()).unwrap();
    assert_eq!(there["status"]["phase"], "Terminating");
    there["spec"]["finalizers"] = json!([]);
    let request = http::Request::put("/api/v1/namespaces/t/finalize")
        .header("content-type", "application/json")
        .body(serde_json::to_vec(&there).unwrap())
        .unwrap();
    client.request::<serde_json::Value>(request).await.unwrap();
    assert_eq!(code(&spaces.get("t").await.unwrap_err()).0, 404);
}
