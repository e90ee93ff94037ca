//! What others plug into the server: admission, aggregated APIs, logs. And what happens to watches when history goes.

use std::sync::Arc;

use axum::body::Body;
use embedded::auth::User;
use embedded::semantics::Status;
use embedded::server::{
    Admission, AdmissionRequest, AdmissionResponse, Aggregated, LogOptions, Operation, PodLogs, Response,
};
use embedded::storage::{Memory, Storage};
use futures::future::BoxFuture;
use futures::{FutureExt, SinkExt, StreamExt};
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::support::{admin, ask, ask_with, listening, over, server};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

struct Plugin;

impl Admission for Plugin {
    fn admit<'a>(&'a self, r: &'a AdmissionRequest) -> BoxFuture<'a, Result<AdmissionResponse, Status>> {
        async move {
            if r.resource != "configmaps" {
                return Ok(AdmissionResponse::default());
            }
            if r.operation == Operation::Delete && r.old_object["data"]["keep"] == "yes" {
                return Err(Status::new(403, "Forbidden", "admission webhook \"test\" denied the request: it is kept"));
            }
            let mut object = r.object.clone();
            if r.operation == Operation::Create {
                object["data"]["by"] = r.user.name.clone().into();
            }
            Ok(AdmissionResponse { object: Some(object), warnings: vec!["looked at".into()] })
        }
        .boxed()
    }
}

#[tokio::test]
async fn plugins_change_and_refuse() {
    let server = server().await;
    server.add_admission(Arc::new(Plugin));
    let body = json!({"metadata": {"name": "a"}, "data": {"keep": "yes"}});
    let (code, made) = ask(&server, &admin(), "POST", MAPS, Some(body)).await;
    assert_eq!((code, &made["data"]["by"]), (201, &json!("admin")));
    let (code, status) = ask(&server, &admin(), "DELETE", &format!("{MAPS}/a"), None).await;
    assert_eq!(code, 403, "{status}");
    let patch = json!({"data": {"keep": "no"}}).to_string();
    let path = format!("{MAPS}/a");
    let (code, o) = ask_with(&server, &admin(), "PATCH", &path, "application/strategic-merge-patch+json", patch).await;
    assert_eq!((code, &o["data"]), (200, &json!({"keep": "no", "by": "admin"})));
    assert_eq!(ask(&server, &admin(), "DELETE", &path, None).await.0, 200);
}

struct Foreign(axum::Router);

impl Aggregated for Foreign {
    fn call(&self, request: http::Request<Body>, user: User) -> BoxFuture<'static, Response> {
        let router = self.0.clone();
        async move {
            let mut request = request;
            request.extensions_mut().insert(user);
            match router.oneshot(request).await {
                Ok(response) => response,
                Err(never) => match never {},
            }
        }
        .boxed()
    }
}

fn foreign() -> Foreign {
    use axum::extract::ws::{Message, WebSocketUpgrade};
    use axum::routing::{get, put};
    let list = json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "sub.example.com/v1", "resources": [
        {"name": "things/start", "singularName": "", "namespaced": true, "kind": "Thing", "verbs": ["update"]}]});
    Foreign(
        axum::Router::new()
            .route("/apis/sub.example.com/v1", get(move || async move { axum::Json(list) }))
            .route(
                "/apis/sub.example.com/v1/namespaces/{ns}/things/{name}/start",
                put(|axum::Extension(user): axum::Extension<User>| async move { user.name }),
            )
            .route(
                "/apis/sub.example.com/v1/namespaces/{ns}/things/{name}/console",
                get(|ws: WebSocketUpgrade| async move {
                    ws.protocols(["v5.channel.k8s.io", "v4.channel.k8s.io"]).on_upgrade(|mut socket| async move {
                        while let Some(Ok(Message::Binary(b))) = socket.next().await {
                            socket.send(Message::Binary(b)).await.unwrap();
                        }
                    })
                }),
            ),
    )
}

#[tokio::test]
async fn an_aggregated_api_is_discovered_authorised_and_upgraded() {
    let dir = tempfile::tempdir().unwrap();
    let server = server().await;
    server.add_aggregated("sub.example.com", "v1", Arc::new(foreign()));
    let start = "/apis/sub.example.com/v1/namespaces/default/things/a/start";
    assert_eq!(ask(&server, &admin(), "PUT", start, None).await, (200, "admin".into()));
    let (code, status) = ask(&server, &User::new("joe", &[]), "PUT", start, None).await;
    assert_eq!(code, 403);
    assert_eq!(
        status["message"],
        "things.sub.example.com \"a\" is forbidden: User \"joe\" cannot update resource \"things/start\" in API group \"sub.example.com\" in the namespace \"default\""
    );
    let (_, groups) = ask(&server, &admin(), "GET", "/apis", None).await;
    assert!(groups["groups"].as_array().unwrap().iter().any(|g| g["name"] == "sub.example.com"));
    // A websocket through TLS.
    let up = listening(&server, dir.path()).await;
    let config = kube::config::Kubeconfig::read_from(&up.kubeconfig).unwrap();
    let options = kube::config::KubeConfigOptions::default();
    let client = kube::Client::try_from(kube::Config::from_custom_kubeconfig(config, &options).await.unwrap()).unwrap();
    let request =
        http::Request::get("/apis/sub.example.com/v1/namespaces/default/things/a/console").body(Vec::new()).unwrap();
    let mut socket = client.connect(request).await.unwrap().into_stream();
    socket.send(message(b"hi")).await.unwrap();
    assert_eq!(socket.next().await.unwrap().unwrap().into_data(), "hi");
}

fn message(bytes: &'static [u8]) -> tokio_tungstenite::tungstenite::Message {
    tokio_tungstenite::tungstenite::Message::Binary(bytes.into())
}

struct Logs;

impl PodLogs for Logs {
    fn logs(&self, pod: Value, options: LogOptions) -> BoxFuture<'static, Result<Body, Status>> {
        let text = format!("{} {} {:?}", pod["metadata"]["name"], options.container, options.tail_lines);
        async move { Ok(Body::from(text)) }.boxed()
    }
}

#[tokio::test]
async fn logs_come_from_whoever_has_them() {
    let server = server().await;
    server.set_logs(Arc::new(Logs));
    let pod =
        json!({"metadata": {"name": "p"}, "spec": {"nodeName": "n", "containers": [{"name": "c", "image": "i"}]}});
    assert_eq!(ask(&server, &admin(), "POST", "/api/v1/namespaces/default/pods", Some(pod)).await.0, 201);
    let path = "/api/v1/namespaces/default/pods/p/log?tailLines=3";
    assert_eq!(ask(&server, &admin(), "GET", path, None).await, (200, "\"p\" c Some(3)".into()));
    let (code, status) = ask(&server, &admin(), "GET", &format!("{path}&container=x"), None).await;
    assert_eq!((code, &status["message"]), (400, &json!("container x is not valid for pod p")));
}

#[tokio::test]
async fn a_watch_from_a_forgotten_revision_is_told_so() {
    let store = Memory::new();
    let server = over(Arc::new(store.clone())).await;
    let (_, list) = ask(&server, &admin(), "GET", MAPS, None).await;
    let old = list["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
    for i in 0..1200 {
        let body = json!({"metadata": {"name": format!("m{i}")}});
        assert_eq!(ask(&server, &admin(), "POST", MAPS, Some(body)).await.0, 201);
    }
    // Longer ago than is kept in memory, but the store still knows.
    let request = http::Request::get(format!("{MAPS}?watch=1&resourceVersion={old}")).body(Body::empty()).unwrap();
    let mut body = server.handle(request, Some(admin())).await.into_body().into_data_stream();
    let mut text = String::new();
    while text.matches("\"type\":\"ADDED\"").count() < 1200 {
        text.push_str(std::str::from_utf8(&body.next().await.unwrap().unwrap()).unwrap());
    }
    assert!(text.contains("\"name\":\"m0\"") && text.contains("\"name\":\"m1199\""));
    // And now it does not.
    let newest = store.revision().await.unwrap();
    store.compact(newest).await.unwrap();
    let (code, event) = ask(&server, &admin(), "GET", &format!("{MAPS}?watch=1&resourceVersion={old}"), None).await;
    assert_eq!((code, &event["type"], &event["object"]["code"]), (200, &json!("ERROR"), &json!(410)));
    assert_eq!(event["object"]["reason"], "Expired");
    let exact = format!("{MAPS}?resourceVersion={old}&resourceVersionMatch=Exact");
    assert_eq!(ask(&server, &admin(), "GET", &exact, None).await.0, 410);
}
