//! The controllers on a real API server over memory.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::*;
use crate::auth::User;
use crate::server::{ApiServer, Config};
use crate::storage::Memory;

struct World {
    client: Client,
    folder: tempfile::TempDir,
    stop: CancellationToken,
    _server: ApiServer,
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn world() -> World {
    let config = Config { token_key: vec![7; 32], issuer: "test".into(), ..Config::default() };
    let server = ApiServer::new(Arc::new(Memory::new()), config).await.unwrap();
    let client = server.client(User::system("test"));
    bootstrap::run(&client).await.unwrap();
    bootstrap::run(&client).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let options = Options { volumes: folder.path().join("volumes"), imports: folder.path().join("import") };
    let stop = CancellationToken::new();
    tokio::spawn(run(client.clone(), options, stop.clone()));
    World { client, folder, stop, _server: server }
}

impl World {
    async fn send(&self, method: &str, path: &str, body: Value) -> Result<Value, kube::Error> {
        let kind = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
        let request = http::Request::builder().method(method).uri(path).header("content-type", kind);
        let body = if body.is_null() { Vec::new() } else { serde_json::to_vec(&body).unwrap() };
        self.client.request(request.body(body).unwrap()).await
    }

    async fn create(&self, path: &str, body: Value) -> Value {
        self.send("POST", path, body).await.unwrap()
    }

    /// The object as soon as it is so; null when it is gone.
    async fn until(&self, path: &str, what: &str, so: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let found = match self.send("GET", path, Value::Null).await {
                Ok(found) => found,
                Err(kube::Error::Api(s)) if s.code == 404 => Value::Null,
                Err(e) => panic!("{path}: {e}"),
            };
            if so(&found) {
                return found;
            }
            assert!(Instant::now() < end, "{path} never {what}: {found:#}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn node(&self, name: &str) {
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}});
        self.create("/api/v1/nodes", node).await;
        let status = json!({"status": {
            "allocatable": {"cpu": "2", "memory": "4Gi", "pods": "110"}, "capacity": {"cpu": "2", "memory": "4Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}]}});
        self.send("PATCH", &format!("/api/v1/nodes/{name}/status"), status).await.unwrap();
    }
}

fn pod(name: &str, spec: Value) -> Value {
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {
        "containers": [{"name": "c", "image": "i", "resources": {"requests": {"memory": "1Gi"}}}]}});
    for (key, value) in spec.as_object().unwrap() {
        pod["spec"][key] = value.clone();
    }
    pod
}

fn claim(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": {
        "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}})
}

const PODS: &str = "/api/v1/namespaces/default/pods";
const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims";
const MAPS: &str = "/api/v1/namespaces/default/configmaps";

#[tokio::test]
async fn a_pod_waits_with_a_reason_until_a_node_and_its_volume_are_there() {
    let world = world().await;
    world
        .create(PODS, pod("a", json!({"volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "data"}}]})))
        .await;
    let message = |text: &'static str| {
        move |p: &Value| {
            p["status"]["conditions"].as_array().is_some_and(|c| {
                c.iter()
                    .any(|c| c["type"] == "PodScheduled" && c["message"].as_str().unwrap_or_default().contains(text))
            })
        }
    };
    let one = format!("{PODS}/a");
    world.until(&one, "unschedulable", message("no nodes available")).await;
    world.node("n1").await;
    world.until(&one, "without a claim", message("persistentvolumeclaim \"data\" not found")).await;
    let made = world.create(CLAIMS, claim("data")).await;
    world.until(&one, "bound", |p| p["spec"]["nodeName"] == "n1").await;
    let bound = world.until(&format!("{CLAIMS}/data"), "bound", |c| c["status"]["phase"] == "Bound").await;
    let volume = format!("pvc-{}", made["metadata"]["uid"].as_str().unwrap());
    assert_eq!(bound["spec"]["volumeName"], volume.as_str());
    let file = world.folder.path().join("volumes/default/data/disk.img");
    assert_eq!(std::fs::metadata(&file).unwrap().len(), 1 << 20);

    // In use: the claim stays until the pod is gone, then the volume and its files go.
    world.send("DELETE", &format!("{CLAIMS}/data"), Value::Null).await.unwrap();
    world.until(&format!("{CLAIMS}/data"), "deleting", |c| !c["metadata"]["deletionTimestamp"].is_null()).await;
    assert!(file.exists());
    world.send("DELETE", &one, json!({"gracePeriodSeconds": 0})).await.unwrap();
    world.until(&format!("{CLAIMS}/data"), "gone", Value::is_null).await;
    world.until(&format!("/api/v1/persistentvolumes/{volume}"), "gone", Value::is_null).await;
    assert!(!file.exists());
}

#[tokio::test]
async fn dependents_go_with_their_owner_in_the_way_that_was_asked_for() {
    let world = world().await;
    let map = |name: &str, owner: &Value| {
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "ownerReferences": [{
            "apiVersion": "v1", "kind": "ConfigMap", "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"],
            "blockOwnerDeletion": true}]}})
    };
    let plain = |name: &str| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}});
    for (policy, name) in [("Background", "b"), ("Foreground", "f"), ("Orphan", "o")] {
        let owner = world.create(MAPS, plain(name)).await;
        world.create(MAPS, map(&format!("{name}-child"), &owner)).await;
        world.send("DELETE", &format!("{MAPS}/{name}"), json!({"propagationPolicy": policy})).await.unwrap();
        world.until(&format!("{MAPS}/{name}"), "gone", Value::is_null).await;
        let child = format!("{MAPS}/{name}-child");
        if policy == "Orphan" {
            world.until(&child, "free", |c| !c.is_null() && c["metadata"]["ownerReferences"].is_null()).await;
        } else {
            world.until(&child, "gone", Value::is_null).await;
        }
    }
    // An owner that never was, and one of the same name with another UID.
    let other = world.create(MAPS, plain("x")).await;
    let mut liar = other.clone();
    liar["metadata"]["uid"] = "00000000-0000-0000-0000-000000000000".into();
    world.create(MAPS, map("liar", &liar)).await;
    world.until(&format!("{MAPS}/liar"), "gone", Value::is_null).await;
    world.until(&format!("{MAPS}/x"), "there", |c| !c.is_null()).await;
}

#[tokio::test]
async fn a_namespace_goes_with_its_content_and_custom_resources() {
    let world = world().await;
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}});
    world.create("/api/v1/namespaces", namespace).await;
    world.until("/api/v1/namespaces/team/serviceaccounts/default", "made", |a| !a.is_null()).await;
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m"}});
    world.create("/api/v1/namespaces/team/configmaps", map).await;
    let vm = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "v"}, "spec": {
        "runStrategy": "Halted", "template": {"spec": {"domain": {"devices": {}}}}}});
    world.create("/apis/kubevirt.io/v1/namespaces/team/virtualmachines", vm).await;
    let event = json!({"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e"}, "reason": "Told", "type": "Normal",
        "involvedObject": {"apiVersion": "v1", "kind": "ConfigMap", "name": "m", "namespace": "team"}});
    world.create("/api/v1/namespaces/team/events", event).await;
    world.send("DELETE", "/api/v1/namespaces/team", Value::Null).await.unwrap();
    world.until("/api/v1/namespaces/team", "gone", Value::is_null).await;
    let left = world.send("GET", "/api/v1/namespaces/team/events", Value::Null).await.unwrap();
    assert_eq!(left["items"], json!([]), "a namespace of that name later has no past");
}

#[tokio::test]
async fn cordons_become_taints_and_pods_without_a_node_go_at_once() {
    let world = world().await;
    world.node("n1").await;
    world.send("PATCH", "/api/v1/nodes/n1", json!({"spec": {"unschedulable": true}})).await.unwrap();
    let tainted = |n: &Value| n["spec"]["taints"].as_array().is_some_and(|t| !t.is_empty());
    world.until("/api/v1/nodes/n1", "tainted", tainted).await;
    world.create(PODS, pod("a", json!({}))).await;
    world.until(&format!("{PODS}/a"), "refused", |p| !p["status"]["conditions"].is_null()).await;
    world.send("DELETE", &format!("{PODS}/a"), Value::Null).await.unwrap();
    world.until(&format!("{PODS}/a"), "gone", Value::is_null).await;
    world.send("PATCH", "/api/v1/nodes/n1", json!({"spec": {"unschedulable": null}})).await.unwrap();
    world.until("/api/v1/nodes/n1", "clean", |n| !tainted(n)).await;
}
