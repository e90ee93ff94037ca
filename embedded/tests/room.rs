//! What a server adds to what is created, and has room for: accounts, limit ranges, quotas, with kube-apiserver's words.

use std::time::{Duration, Instant};

use embedded::server::ApiServer;
use serde_json::{Value, json};

use crate::support::{admin, ask, ask_with, server};

const NS: &str = "/api/v1/namespaces/default";

async fn until(server: &ApiServer, path: &str, what: &str, so: impl Fn(&Value) -> bool) -> Value {
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        let (_, o) = ask(server, &admin(), "GET", path, None).await;
        if so(&o) {
            return o;
        }
        assert!(Instant::now() < end, "{path} never {what}: {o:#}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn pod(name: &str, resources: &Value) -> Value {
    json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "compute", "image": "i", "resources": resources}]}})
}

async fn used(server: &ApiServer, what: &Value) {
    until(server, &format!("{NS}/resourcequotas/q"), &format!("used {what}"), |o| &o["status"]["used"] == what).await;
}

#[tokio::test]
async fn a_quota_is_charged_refuses_and_gets_back() {
    let server = server().await;
    let pods = format!("{NS}/pods");
    let small = json!({"requests": {"memory": "1Gi", "cpu": "250m"}});
    assert_eq!(ask(&server, &admin(), "POST", &pods, Some(pod("before", &small))).await.0, 201);
    let quota = json!({"metadata": {"name": "q"}, "spec": {"hard": {
        "requests.memory": "2Gi", "requests.cpu": "1", "pods": "3", "count/configmaps": "1"}}});
    assert_eq!(ask(&server, &admin(), "POST", &format!("{NS}/resourcequotas"), Some(quota)).await.0, 201);
    // What was there before is counted.
    used(&server, &json!({"requests.memory": "1Gi", "requests.cpu": "250m", "pods": "1", "count/configmaps": "0"}))
        .await;
    assert_eq!(ask(&server, &admin(), "POST", &pods, Some(pod("second", &small))).await.0, 201);
    let (code, status) = ask(&server, &admin(), "POST", &pods, Some(pod("third", &small))).await;
    assert_eq!((code, &status["reason"]), (403, &json!("Forbidden")));
    assert_eq!(
        status["message"],
        "pods \"third\" is forbidden: exceeded quota: q, requested: requests.memory=1Gi, used: requests.memory=2Gi, limited: requests.memory=2Gi"
    );
    let (code, status) = ask(&server, &admin(), "POST", &pods, Some(pod("fourth", &json!({})))).await;
    assert_eq!(code, 403);
    assert_eq!(
        status["message"],
        "pods \"fourth\" is forbidden: failed quota: q: must specify requests.cpu for: compute; requests.memory for: compute"
    );
    // Refused for another reason: what was charged is given back.
    let maps = format!("{NS}/configmaps");
    let map = |n: &str| Some(json!({"metadata": {"name": n}}));
    assert_eq!(ask(&server, &admin(), "POST", &maps, map("a")).await.0, 201);
    let (code, status) = ask(&server, &admin(), "POST", &maps, map("b")).await;
    assert_eq!(code, 403);
    assert_eq!(
        status["message"],
        "configmaps \"b\" is forbidden: exceeded quota: q, requested: count/configmaps=1, used: count/configmaps=1, limited: count/configmaps=1"
    );
    assert_eq!(ask(&server, &admin(), "DELETE", &format!("{maps}/a"), None).await.0, 200);
    used(&server, &json!({"requests.memory": "2Gi", "requests.cpu": "500m", "pods": "2", "count/configmaps": "0"}))
        .await;
    // A pod that has ended and one that is deleted give their room back.
    let over = json!({"status": {"phase": "Succeeded"}}).to_string();
    let path = format!("{pods}/before/status");
    assert_eq!(ask_with(&server, &admin(), "PATCH", &path, "application/merge-patch+json", over).await.0, 200);
    used(&server, &json!({"requests.memory": "1Gi", "requests.cpu": "250m", "pods": "1", "count/configmaps": "0"}))
        .await;
    assert_eq!(ask(&server, &admin(), "DELETE", &format!("{pods}/second"), None).await.0, 200);
    used(&server, &json!({"requests.memory": "0", "requests.cpu": "0", "pods": "0", "count/configmaps": "0"})).await;
    let twice = [pod("again", &small), pod("again", &small)];
    let mut codes = Vec::new();
    for body in twice {
        codes.push(ask(&server, &admin(), "POST", &pods, Some(body)).await.0);
    }
    assert_eq!(codes, [201, 409]);
    used(&server, &json!({"requests.memory": "1Gi", "requests.cpu": "250m", "pods": "1", "count/configmaps": "0"}))
        .await;
    // Another limit is counted at once.
    let more = json!({"spec": {"hard": {"count/pods": "5"}}}).to_string();
    let path = format!("{NS}/resourcequotas/q");
    assert_eq!(ask_with(&server, &admin(), "PATCH", &path, "application/merge-patch+json", more).await.0, 200);
    let o = until(&server, &path, "counts the new limit", |o| o["status"]["hard"]["count/pods"] == "5").await;
    assert_eq!(o["status"]["used"]["count/pods"], "2");
}

#[tokio::test]
async fn a_quota_holds_against_many_at_once() {
    let server = server().await;
    let quota = json!({"metadata": {"name": "q"}, "spec": {"hard": {"configmaps": "7"}}});
    assert_eq!(ask(&server, &admin(), "POST", &format!("{NS}/resourcequotas"), Some(quota)).await.0, 201);
    used(&server, &json!({"configmaps": "0"})).await;
    let tries = (0..30).map(|i| {
        let server = server.clone();
        tokio::spawn(async move {
            let body = json!({"metadata": {"name": format!("m-{i}")}});
            ask(&server, &admin(), "POST", &format!("{NS}/configmaps"), Some(body)).await.0
        })
    });
    let mut made = 0;
    for code in futures::future::join_all(tries).await {
        let code = code.unwrap();
        assert!(code == 201 || code == 403, "{code}");
        made += usize::from(code == 201);
    }
    assert_eq!(made, 7);
    used(&server, &json!({"configmaps": "7"})).await;
}

#[tokio::test]
async fn a_pod_has_the_pull_secrets_of_its_account_unless_it_names_others() {
    let server = server().await;
    let account = json!({"imagePullSecrets": [{"name": "ours"}]}).to_string();
    let path = format!("{NS}/serviceaccounts/default");
    let merge = "application/merge-patch+json";
    assert_eq!(ask_with(&server, &admin(), "PATCH", &path, merge, account).await.0, 200);
    let mut body = pod("a", &json!({}));
    let (code, o) = ask(&server, &admin(), "POST", &format!("{NS}/pods"), Some(body.clone())).await;
    assert_eq!((code, &o["spec"]["imagePullSecrets"]), (201, &json!([{"name": "ours"}])));
    body["metadata"]["name"] = "b".into();
    body["spec"]["imagePullSecrets"] = json!([{"name": "own"}]);
    let (code, o) = ask(&server, &admin(), "POST", &format!("{NS}/pods"), Some(body)).await;
    assert_eq!((code, &o["spec"]["imagePullSecrets"]), (201, &json!([{"name": "own"}])));
}

#[tokio::test]
async fn a_limit_range_completes_and_refuses() {
    let server = server().await;
    let range = json!({"metadata": {"name": "l"}, "spec": {"limits": [
        {"type": "Container", "default": {"memory": "512Mi"}, "defaultRequest": {"memory": "256Mi"}, "max": {"memory": "1Gi"}},
        {"type": "PersistentVolumeClaim", "min": {"storage": "1Gi"}}]}});
    assert_eq!(ask(&server, &admin(), "POST", &format!("{NS}/limitranges"), Some(range)).await.0, 201);
    let pods = format!("{NS}/pods");
    let (code, o) = ask(&server, &admin(), "POST", &pods, Some(pod("a", &json!({})))).await;
    assert_eq!(code, 201, "{o}");
    assert_eq!(
        o["spec"]["containers"][0]["resources"],
        json!({"limits": {"memory": "512Mi"}, "requests": {"memory": "256Mi"}})
    );
    assert_eq!(o["status"]["qosClass"], "Burstable");
    assert_eq!(
        o["metadata"]["annotations"]["kubernetes.io/limit-ranger"],
        "LimitRanger plugin set: memory request for container compute; memory limit for container compute"
    );
    let big = json!({"limits": {"memory": "2Gi"}, "requests": {"memory": "2Gi"}});
    let (code, status) = ask(&server, &admin(), "POST", &pods, Some(pod("b", &big))).await;
    assert_eq!(code, 403);
    assert_eq!(
        status["message"],
        "pods \"b\" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi"
    );
    let claim = json!({"metadata": {"name": "c"}, "spec": {"accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Mi"}}}});
    let (code, status) = ask(&server, &admin(), "POST", &format!("{NS}/persistentvolumeclaims"), Some(claim)).await;
    assert_eq!(code, 403);
    assert_eq!(
        status["message"],
        "persistentvolumeclaims \"c\" is forbidden: minimum storage usage per PersistentVolumeClaim is 1Gi, but request is 1Mi"
    );
    // Another namespace has no limits.
    let ns = json!({"metadata": {"name": "free"}});
    assert_eq!(ask(&server, &admin(), "POST", "/api/v1/namespaces", Some(ns)).await.0, 201);
    let (code, o) = ask(&server, &admin(), "POST", "/api/v1/namespaces/free/pods", Some(pod("b", &big))).await;
    assert_eq!(code, 201, "{o}");
    assert_eq!(ask(&server, &admin(), "DELETE", &format!("{NS}/limitranges/l"), None).await.0, 200);
    let (code, o) = ask(&server, &admin(), "POST", &pods, Some(pod("b", &big))).await;
    assert_eq!(code, 201, "{o}");
}
