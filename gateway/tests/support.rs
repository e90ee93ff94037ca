//! A cluster in this process: the embedded API server on a memory store with the definitions, the gateway behind it as
//! admission and aggregated API, and a node agent whose guest echoes.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::body::Body;
use embedded::auth::User as Who;
use embedded::pki::Pki;
use embedded::semantics::Status as ServerStatus;
use embedded::server::{self, Admission, AdmissionRequest, AdmissionResponse, Aggregated, ApiServer};
use embedded::storage::Memory;
use futures::future::BoxFuture;
use futures::{Stream, StreamExt};
use gateway::{AdmissionInput, Authorization, Config, Gateway, Operation, Settings, User};
use http::{Request, Response};
use proto::agent::node_agent_server::{NodeAgent, NodeAgentServer};
use proto::agent::{
    AgentMessage, ControllerMessage, MachineUsage, NodeUsage, StepsReply, StepsRequest, StreamChunk, UsageReply,
    UsageRequest, VerbReply, VerbRequest,
};
use proto::transport::{self, Tls, direct, direct_datagrams};
use serde_json::{Value, json};
use tower::ServiceExt;

/// A controller that explains everything in the same way.
struct Why;

impl gateway::Explain for Why {
    fn explain(&self, _: &str, namespace: &str, name: &str) -> BoxFuture<'static, Result<Value, gateway::Status>> {
        let explained = json!({"kind": "Explanation", "namespace": namespace, "name": name});
        Box::pin(async move { Ok(explained) })
    }
}

const GATEWAY: &str = "virtfold-gateway";
pub const NODE: &str = "node-1";
/// How long the gateway of a test waits for an agent.
pub const PATIENCE: Duration = Duration::from_secs(1);
pub const POD: &str = "aaaaaaaa-0000-0000-0000-000000000001";

/// What the glue in the product does, too: the seams of the API server, filled by a gateway.
struct Glue {
    gateway: Gateway,
}

fn refusal(s: gateway::Status) -> ServerStatus {
    let mut status = ServerStatus::new(s.code, &s.reason, s.message);
    status.details = s.details;
    status
}

impl Admission for Glue {
    fn admit<'a>(&'a self, request: &'a AdmissionRequest) -> BoxFuture<'a, Result<AdmissionResponse, ServerStatus>> {
        Box::pin(async move {
            if request.resource == "pods" && request.subresource == "eviction" {
                let pod = Some(request.old_object.clone());
                let (namespace, name) = (&request.namespace, &request.name);
                let judged = self.gateway.admit_eviction(namespace, name, pod, &request.object, request.dry_run).await;
                return judged.map(|()| AdmissionResponse::default()).map_err(refusal);
            }
            if request.group != "kubevirt.io" {
                return Ok(AdmissionResponse::default());
            }
            let input = AdmissionInput {
                operation: match request.operation {
                    server::Operation::Create => Operation::Create,
                    server::Operation::Update => Operation::Update,
                    server::Operation::Delete => Operation::Delete,
                },
                kind: request.kind.clone(),
                subresource: request.subresource.clone(),
                namespace: request.namespace.clone(),
                name: request.name.clone(),
                user: User { name: request.user.name.clone(), groups: request.user.groups.clone() },
                object: request.object.clone(),
                old_object: Some(request.old_object.clone()).filter(|o| !o.is_null()),
                traceparent: request.traceparent.clone(),
            };
            match self.gateway.admit(input).await {
                Ok(out) => Ok(AdmissionResponse { object: Some(out.object), warnings: out.warnings }),
                Err(s) => Err(refusal(s)),
            }
        })
    }
}

impl Aggregated for Glue {
    fn call(&self, mut request: Request<Body>, user: Who) -> BoxFuture<'static, Response<Body>> {
        request.extensions_mut().insert(User { name: user.name, groups: user.groups });
        let router = self.gateway.router();
        Box::pin(async move { router.oneshot(request).await.unwrap() })
    }
}

#[derive(Default)]
pub struct Seen {
    /// Verbs with their bodies, in order.
    pub verbs: Mutex<Vec<(String, Value)>>,
    /// The trace that the last verb belongs to.
    pub trace: Mutex<Option<telemetry::TraceContext>>,
    /// Reply to the next verbs, by verb.
    pub replies: Mutex<BTreeMap<String, VerbReply>>,
    /// So many calls find an agent that has not found its launchers.
    pub unready: Mutex<u32>,
    /// Ids of verbs, in order.
    pub ids: Mutex<Vec<String>>,
    /// Streams that were opened and not yet closed by the other side.
    pub open: Mutex<i32>,
}

struct FakeAgent {
    seen: Arc<Seen>,
}

impl FakeAgent {
    fn ready(&self) -> Result<(), tonic::Status> {
        let mut left = self.seen.unready.lock().unwrap();
        if *left == 0 {
            return Ok(());
        }
        *left -= 1;
        Err(tonic::Status::unavailable("the launcher does not answer"))
    }
}

type Down<T> = Pin<Box<dyn Stream<Item = Result<T, tonic::Status>> + Send>>;

#[tonic::async_trait]
impl NodeAgent for FakeAgent {
    type SessionStream = Down<AgentMessage>;
    type StreamStream = Down<StreamChunk>;

    async fn session(
        &self,
        _: tonic::Request<tonic::Streaming<ControllerMessage>>,
    ) -> Result<tonic::Response<Self::SessionStream>, tonic::Status> {
        Err(tonic::Status::unimplemented("no session here"))
    }

    async fn verb(&self, request: tonic::Request<VerbRequest>) -> Result<tonic::Response<VerbReply>, tonic::Status> {
        let r = request.into_inner();
        assert_eq!(r.pod_uid, POD);
        assert!(!r.id.is_empty() && !r.vmi_uid.is_empty() && r.ttl_ms > 0);
        let trace = telemetry::TraceContext::parse(&r.traceparent);
        assert!(trace.is_some(), "{}", r.traceparent);
        *self.seen.trace.lock().unwrap() = trace;
        self.seen.ids.lock().unwrap().push(r.id.clone());
        if self.ready().is_err() {
            let message = "the launcher does not answer".into();
            return Ok(tonic::Response::new(VerbReply { reason: "not-ready".into(), message, ..VerbReply::default() }));
        }
        self.seen.verbs.lock().unwrap().push((r.verb.clone(), serde_json::from_slice(&r.body).unwrap_or_default()));
        let reply = self.seen.replies.lock().unwrap().get(&r.verb).cloned();
        Ok(tonic::Response::new(reply.unwrap_or(VerbReply { ok: true, ..VerbReply::default() })))
    }

    async fn steps(&self, request: tonic::Request<StepsRequest>) -> Result<tonic::Response<StepsReply>, tonic::Status> {
        let StepsRequest { namespace, name } = request.into_inner();
        let told = |span: &str, start| json!({"trace": "t", "span": span, "name": format!("{namespace}/{name}"), "start": start});
        // One of them a second time, as after a crash.
        let steps = json!([told("b", 2), told("a", 1), told("b", 2)]).to_string();
        Ok(tonic::Response::new(StepsReply { steps: steps.into_bytes().into() }))
    }

    async fn usage(&self, request: tonic::Request<UsageRequest>) -> Result<tonic::Response<UsageReply>, tonic::Status> {
        let wanted = request.into_inner().namespace;
        let machine = |namespace: &str, name: &str| MachineUsage {
            namespace: namespace.into(),
            name: name.into(),
            cpu_seconds: 1.5,
            cpus: 2,
            guest_used_bytes: Some(7),
            ..MachineUsage::default()
        };
        let mut machines = vec![machine("default", "a"), machine("other", "b")];
        machines.retain(|m| wanted.is_empty() || m.namespace == wanted);
        let node = NodeUsage { cpus: 4, load: vec![0.5, 1.0, 2.0], ..NodeUsage::default() };
        Ok(tonic::Response::new(UsageReply { node: Some(node), machines }))
    }

    async fn stream(
        &self,
        request: tonic::Request<tonic::Streaming<StreamChunk>>,
    ) -> Result<tonic::Response<Self::StreamStream>, tonic::Status> {
        self.ready()?;
        let mut up = request.into_inner();
        let open =
            up.message().await?.and_then(|c| c.open).ok_or_else(|| tonic::Status::invalid_argument("no open"))?;
        if open.preserve_session {
            return Err(tonic::Status::failed_precondition("active VNC connection, request denied"));
        }
        *self.seen.open.lock().unwrap() += 1;
        let greeting = format!("{}:", open.device);
        let (send, receive) = tokio::sync::mpsc::channel(4);
        let seen = self.seen.clone();
        tokio::spawn(async move {
            let _ = send.send(Ok(StreamChunk { open: None, data: greeting.into() })).await;
            while let Ok(Some(chunk)) = up.message().await {
                // As a guest that prints and prints.
                if &chunk.data[..] == b"flood" {
                    let send = send.clone();
                    tokio::spawn(async move {
                        let data = bytes::Bytes::from(vec![b'x'; 4096]);
                        while send.send(Ok(StreamChunk { open: None, data: data.clone() })).await.is_ok() {}
                    });
                    continue;
                }
                // As an agent that loses its launcher.
                if &chunk.data[..] == b"fail" {
                    let _ = send.send(Err(tonic::Status::unavailable("the launcher is lost"))).await;
                    break;
                }
                // As a guest whose console is closed.
                if &chunk.data[..] == b"exit" {
                    break;
                }
                if send.send(Ok(StreamChunk { open: None, data: chunk.data })).await.is_err() {
                    break;
                }
            }
            *seen.open.lock().unwrap() -= 1;
        });
        Ok(tonic::Response::new(Box::pin(tokio_stream(receive))))
    }
}

fn tokio_stream<T: Send + 'static>(receive: tokio::sync::mpsc::Receiver<T>) -> impl Stream<Item = T> + Send {
    futures::stream::unfold(receive, |mut r| async move { r.recv().await.map(|v| (v, r)) }).boxed()
}

pub struct World {
    pub server: ApiServer,
    pub gateway: Gateway,
    pki: Pki,
    pub seen: Arc<Seen>,
    /// Plain HTTP to the API server, as its administrator (`X-Test-User` for somebody else).
    pub address: SocketAddr,
    _folder: tempfile::TempDir,
}

pub async fn world() -> World {
    world_with(Authorization::Forwarded).await
}

fn tls(pki: &Pki, identity: embedded::pki::Identity) -> Tls {
    Tls { ca: pki.ca().to_owned(), cert: identity.cert, key: identity.key }
}

fn config(pki: &Pki, client: kube::Client, authorization: Authorization) -> Config {
    Config {
        client,
        dial: direct(),
        datagrams: direct_datagrams(),
        tls: tls(pki, pki.client(GATEWAY, None).unwrap()),
        settings: Settings { trusted: vec![GATEWAY.into()], ..Settings::default() },
        authorization,
        explain: Some(Arc::new(Why)),
        patience: PATIENCE,
        metrics: Default::default(),
        readiness: Default::default(),
    }
}

pub async fn world_with(authorization: Authorization) -> World {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::open(&folder.path().join("pki")).unwrap();
    let server = ApiServer::new(
        Arc::new(Memory::new()),
        server::Config { token_key: b"a key for tests".to_vec(), ..server::Config::default() },
    )
    .await
    .unwrap();
    // With the rights that the cluster gives it, and no more.
    let gateway = Gateway::new(config(&pki, server.client(Who::new(GATEWAY, &[])), authorization));
    server.add_admission(Arc::new(Glue { gateway: gateway.clone() }));
    for version in ["v1", "v1alpha3"] {
        server.add_aggregated("subresources.kubevirt.io", version, Arc::new(Glue { gateway: gateway.clone() }));
    }

    let seen = Arc::new(Seen::default());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let agent_address = listener.local_addr().unwrap();
    let incoming = futures::stream::unfold(listener, |l| async move { Some((l.accept().await.map(|(s, _)| s), l)) });
    let agent = transport::server(&tls(&pki, pki.node(NODE).unwrap()))
        .unwrap()
        .add_service(NodeAgentServer::new(FakeAgent { seen: seen.clone() }))
        .serve_with_incoming(incoming);
    tokio::spawn(agent);

    let plain = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = plain.local_addr().unwrap();
    let handler = server.clone();
    let app = axum::Router::new().fallback(move |request: Request<Body>| {
        let server = handler.clone();
        async move {
            let somebody = request.headers().get("x-test-user").map(|v| Who::new(v.to_str().unwrap(), &[]));
            server.handle(request, Some(somebody.unwrap_or_else(|| Who::system("admin")))).await
        }
    });
    tokio::spawn(async move { axum::serve(plain, app).await });

    let world = World { server, gateway, pki, seen, address, _folder: folder };
    for crd in api::crd::all() {
        let (code, made) =
            world.ask("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", Some(crd)).await;
        assert_eq!(code, 201, "{made}");
    }
    for object in embedded::cluster::bootstrap::objects() {
        let plural = match object["kind"].as_str() {
            Some("ClusterRole") => "clusterroles",
            Some("ClusterRoleBinding") => "clusterrolebindings",
            _ => continue,
        };
        // "view" and "edit" are there from the beginning.
        let code = world.ask("POST", &format!("/apis/rbac.authorization.k8s.io/v1/{plural}"), Some(object)).await.0;
        assert!(code == 201 || code == 409, "{code}");
    }
    let node =
        json!({"metadata": {"name": NODE, "annotations": {"virtfold.io/agent-address": agent_address.to_string()}}});
    assert_eq!(world.ask("POST", "/api/v1/nodes", Some(node)).await.0, 201);
    world
}

impl World {
    /// Another gateway, which reaches the API server as long as `open` says so; what has begun ends with that.
    pub fn behind(&self, open: tokio::sync::watch::Receiver<bool>, readiness: telemetry::Readiness) -> Gateway {
        let server = self.server.clone();
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let (server, mut open) = (server.clone(), open.clone());
            async move {
                if !*open.borrow_and_update() {
                    return Err(std::io::Error::other("nobody answers"));
                }
                let (head, body) =
                    server.handle(request.map(Body::new), Some(Who::new(GATEWAY, &[]))).await.into_parts();
                let closed = async move { open.wait_for(|open| !open).await.map(drop) };
                let body = body.into_data_stream().take_until(Box::pin(closed));
                Ok(Response::from_parts(head, Body::from_stream(body)))
            }
        });
        let client = kube::Client::new(service, "default");
        Gateway::new(Config { readiness, ..config(&self.pki, client, Authorization::Forwarded) })
    }

    pub async fn ask(&self, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
        self.ask_as(&Who::system("admin"), method, path, body).await
    }

    pub async fn ask_as(&self, user: &Who, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
        self.ask_in(user, "", method, path, body).await
    }

    /// A request with a `traceparent`, where one is given.
    pub async fn ask_in(&self, user: &Who, trace: &str, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
        let kind = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
        let body = Body::from(body.map(|b| b.to_string()).unwrap_or_default());
        let mut request = Request::builder().method(method).uri(path).header("content-type", kind);
        if !trace.is_empty() {
            request = request.header("traceparent", trace);
        }
        let response = self.server.handle(request.body(body).unwrap(), Some(user.clone())).await;
        let code = response.status().as_u16();
        let bytes = axum::body::to_bytes(response.into_body(), 16 << 20).await.unwrap();
        (code, serde_json::from_slice(&bytes).unwrap_or_else(|_| String::from_utf8_lossy(&bytes).into_owned().into()))
    }

    /// A subresource of a machine or an instance named `a`.
    pub async fn verb(&self, method: &str, what: &str, body: Option<Value>) -> (u16, Value) {
        let (resource, verb) = what.split_once('/').unwrap();
        let resource = if resource == "vm" { "virtualmachines" } else { "virtualmachineinstances" };
        self.ask(method, &format!("/apis/subresources.kubevirt.io/v1/namespaces/default/{resource}/a/{verb}"), body)
            .await
    }

    pub async fn vm(&self) -> Value {
        self.ask("GET", "/apis/kubevirt.io/v1/namespaces/default/virtualmachines/a", None).await.1
    }

    /// A machine named `a`.
    pub async fn make_vm(&self, strategy: &str) -> Value {
        let spec = json!({"domain": {"devices": {}, "memory": {"guest": "64Mi"}}});
        let vm = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "a"}, "spec": {"runStrategy": strategy, "template": {"spec": spec}}});
        let (code, made) = self.ask("POST", "/apis/kubevirt.io/v1/namespaces/default/virtualmachines", Some(vm)).await;
        assert_eq!(code, 201, "{made}");
        made
    }

    /// An instance named `a` as the controller would have made it, with a status.
    pub async fn make_vmi(&self, status: Value) -> Value {
        let mut whole = json!({"phase": "Running", "nodeName": NODE, "activePods": {(POD): NODE}});
        whole.as_object_mut().unwrap().extend(status.as_object().unwrap().clone());
        let vmi = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "a"},
            "spec": {"domain": {"devices": {}, "memory": {"guest": "64Mi"}}}, "status": whole});
        let controller = Who::system("system:virtfold:controller");
        let (code, made) = self
            .ask_as(&controller, "POST", "/apis/kubevirt.io/v1/namespaces/default/virtualmachineinstances", Some(vmi))
            .await;
        assert_eq!(code, 201, "{made}");
        made
    }

    /// Changes the instance as the controller would.
    pub async fn patch_vmi(&self, patch: Value) -> Value {
        let controller = Who::system("system:virtfold:controller");
        let (code, now) = self
            .ask_as(
                &controller,
                "PATCH",
                "/apis/kubevirt.io/v1/namespaces/default/virtualmachineinstances/a",
                Some(patch),
            )
            .await;
        assert_eq!(code, 200, "{now}");
        now
    }

    pub async fn patch_vm_status(&self, patch: Value) {
        let (code, now) = self
            .ask(
                "PATCH",
                "/apis/kubevirt.io/v1/namespaces/default/virtualmachines/a/status",
                Some(json!({"status": patch})),
            )
            .await;
        assert_eq!(code, 200, "{now}");
    }
}

/// Polls until something holds.
pub async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "not within 20 s: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
