//! A cluster for tests: the embedded API server on memory, its scheduler and collector, a modelled kubelet, and a node agent
//! that speaks the real protocol over real mutual TLS and models its launchers.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use embedded::{
    auth::User,
    cluster,
    pki::Pki,
    server::{ApiServer, Config},
    storage::Memory,
};
use futures::Stream;
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
    core::ApiResource,
};
use proto::{
    agent::{
        self, AgentMessage, ControllerMessage, agent_message, controller_message,
        node_agent_server::{NodeAgent, NodeAgentServer},
    },
    transport::{self, Tls},
};
use reconcilers::LeaseConfig;
use serde_json::{Value, json};
use state::object::Kind;
use tokio::sync::{broadcast, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

#[path = "../../../embedded/tests/eventually.rs"]
mod until;
pub use until::eventually;

pub const NODE: &str = "node-1";

#[derive(Debug, Clone, Default)]
pub struct Launcher {
    pub namespace: String,
    pub name: String,
    pub vmi: String,
    pub starts: u32,
    pub seq: u64,
    pub state: i32,
    pub outcome: Option<agent::Outcome>,
}

/// What the modelled node knows; agent and kubelet share it.
#[derive(Debug, Default)]
pub struct Launchers {
    pub all: BTreeMap<String, Launcher>,
    pub highest: u64,
    pub refuse: Option<String>,
    /// Causes of ends that a SHUTDOWN leads to.
    pub ignores_power_button: bool,
}

#[derive(Clone)]
pub struct Agent {
    pub launchers: Arc<Mutex<Launchers>>,
    up: broadcast::Sender<AgentMessage>,
    pub sessions: Arc<AtomicU64>,
}

fn message(kind: agent_message::Kind) -> AgentMessage {
    AgentMessage { kind: Some(kind) }
}

impl Agent {
    fn new() -> Self {
        Self { launchers: Arc::default(), up: broadcast::channel(1024).0, sessions: Arc::default() }
    }

    fn domain(pod: &str, l: &Launcher) -> agent::Domain {
        agent::Domain {
            vmi_uid: l.vmi.clone(),
            pod_uid: pod.to_owned(),
            launcher_instance: format!("launcher-of-{pod}"),
            seq: l.seq,
            state: l.state,
            guest: Some(agent::GuestFacts {
                interfaces: vec![agent::Interface {
                    name: "default".into(),
                    mac: "02:00:00:00:00:01".into(),
                    ip: "10.244.1.7".into(),
                    ips: vec!["10.244.1.7".into()],
                    info_source: "domain".into(),
                    ..Default::default()
                }],
                ..Default::default()
            }),
            accelerator: "tcg".into(),
            namespace: l.namespace.clone(),
            name: l.name.clone(),
            ..Default::default()
        }
    }

    /// Changes a launcher and reports it.
    pub fn report(&self, pod: &str, state: agent::DomainState) {
        let mut all = self.launchers.lock().unwrap();
        let Some(l) = all.all.get_mut(pod) else { return };
        l.seq += 1;
        l.state = state.into();
        let domain = Some(Self::domain(pod, l));
        let _ = self.up.send(message(agent_message::Kind::Report(agent::Report { domain })));
    }

    /// The domain ends.
    pub fn end(&self, pod: &str, cause: agent::Cause) {
        {
            let mut all = self.launchers.lock().unwrap();
            let Some(l) = all.all.get_mut(pod).filter(|l| l.starts > 0 && l.outcome.is_none()) else { return };
            l.seq += 1;
            let outcome = agent::Outcome {
                vmi_uid: l.vmi.clone(),
                pod_uid: pod.to_owned(),
                cause: cause.into(),
                seq: l.seq,
                namespace: l.namespace.clone(),
                name: l.name.clone(),
                ..Default::default()
            };
            l.outcome = Some(outcome.clone());
            let _ = self.up.send(message(agent_message::Kind::Outcome(outcome)));
        }
        self.report(pod, agent::DomainState::Stopped);
    }

    /// The only launcher that has a domain now.
    pub fn running(&self) -> Vec<String> {
        let all = self.launchers.lock().unwrap();
        all.all.iter().filter(|(_, l)| l.starts > 0 && l.outcome.is_none()).map(|(p, _)| p.clone()).collect()
    }

    fn instruct(&self, i: &agent::Instruct) -> agent::ack::Result {
        let refused = |reason: &str, message: &str| {
            agent::ack::Result::Refused(agent::Refused {
                reason: reason.into(),
                message: message.into(),
                rv_seen: String::new(),
            })
        };
        let vmi: Value = serde_json::from_slice(&i.vmi).unwrap();
        let authorised = vmi["metadata"]["uid"] == i.vmi_uid.as_str()
            && vmi["metadata"].get("deletionTimestamp").is_none()
            && vmi["status"]["activePods"][&i.pod_uid] == NODE;
        match agent::InstructKind::try_from(i.kind).unwrap() {
            agent::InstructKind::Start => {
                let mut all = self.launchers.lock().unwrap();
                if let Some(why) = all.refuse.clone() {
                    return refused("failed", &why);
                }
                if !authorised {
                    return refused("superseded", "the VMI says something else");
                }
                let Some(l) = all.all.get_mut(&i.pod_uid) else { return refused("failed", "no such launcher") };
                if l.starts == 0 {
                    l.starts += 1;
                    drop(all);
                    let (agent, pod) = (self.clone(), i.pod_uid.clone());
                    tokio::spawn(async move {
                        agent.report(&pod, agent::DomainState::Starting);
                        agent.report(&pod, agent::DomainState::Running);
                    });
                }
            }
            agent::InstructKind::Shutdown => {
                let cause = if self.launchers.lock().unwrap().ignores_power_button {
                    agent::Cause::KilledAfterGrace
                } else {
                    agent::Cause::GuestShutdown
                };
                self.end(&i.pod_uid, cause);
            }
            agent::InstructKind::Kill => self.end(&i.pod_uid, agent::Cause::Destroyed),
            other => return refused("unsupported", other.as_str_name()),
        }
        agent::ack::Result::Accepted(agent::Accepted {})
    }
}

type Up<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl NodeAgent for Agent {
    type SessionStream = Up<AgentMessage>;
    type StreamStream = Up<agent::StreamChunk>;

    async fn steps(&self, _: Request<agent::StepsRequest>) -> Result<Response<agent::StepsReply>, Status> {
        Err(Status::unimplemented("gateways ask for it"))
    }

    async fn session(
        &self,
        request: Request<Streaming<ControllerMessage>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let mut down = request.into_inner();
        let (tx, rx) = mpsc::channel(1024);
        let agent = self.clone();
        tokio::spawn(async move {
            let Ok(Some(ControllerMessage { kind: Some(controller_message::Kind::Hello(hello)) })) =
                down.message().await
            else {
                return;
            };
            let mut events = agent.up.subscribe();
            let (accepted, inventory, highest) = {
                let mut all = agent.launchers.lock().unwrap();
                let accepted = hello.epoch >= all.highest;
                all.highest = all.highest.max(hello.epoch);
                let inventory = agent::Inventory {
                    node: NODE.into(),
                    complete: true,
                    domains: all.all.iter().map(|(p, l)| Self::domain(p, l)).collect(),
                    outcomes: all.all.values().filter_map(|l| l.outcome.clone()).collect(),
                    ..Default::default()
                };
                (accepted, inventory, all.highest)
            };
            let reply = agent::HelloReply { accepted, highest_epoch: highest, proto: 1, ..Default::default() };
            let _ = tx.send(Ok(message(agent_message::Kind::Hello(reply)))).await;
            if !accepted {
                return;
            }
            agent.sessions.fetch_add(1, Ordering::SeqCst);
            let _ = tx.send(Ok(message(agent_message::Kind::Inventory(inventory)))).await;
            loop {
                tokio::select! {
                    said = down.message() => match said {
                        Ok(Some(ControllerMessage { kind: Some(controller_message::Kind::Instruct(i)) })) => {
                            let result = Some(agent.instruct(&i));
                            let ack = agent::Ack { id: i.id, vmi_uid: i.vmi_uid, result };
                            let _ = tx.send(Ok(message(agent_message::Kind::Ack(ack)))).await;
                        }
                        Ok(Some(ControllerMessage { kind: Some(controller_message::Kind::OutcomeAck(a)) })) => {
                            // Forgotten: what is not, is told again by the next inventory.
                            agent.launchers.lock().unwrap().all.retain(|p, _| *p != a.pod_uid);
                        }
                        Ok(Some(_)) => {}
                        Ok(None) | Err(_) => return,
                    },
                    event = events.recv() => match event {
                        Ok(m) => if tx.send(Ok(m)).await.is_err() { return },
                        Err(_) => return,
                    },
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(rx))))
    }

    async fn verb(&self, _: Request<agent::VerbRequest>) -> Result<Response<agent::VerbReply>, Status> {
        Err(Status::unimplemented("not modelled"))
    }

    async fn usage(&self, _: Request<agent::UsageRequest>) -> Result<Response<agent::UsageReply>, Status> {
        Err(Status::unimplemented("not modelled"))
    }

    async fn stream(&self, _: Request<Streaming<agent::StreamChunk>>) -> Result<Response<Self::StreamStream>, Status> {
        Err(Status::unimplemented("not modelled"))
    }
}

/// The cluster.
pub struct World {
    pub server: ApiServer,
    pub client: Client,
    pub agent: Agent,
    pub tls: Tls,
    /// Writes by the controller: method, path without names, code.
    pub writes: Arc<Mutex<Vec<String>>>,
    /// Asks whichever controller leads.
    pub explainer: reconcilers::Explainer,
    pub folder: tempfile::TempDir,
    stop: CancellationToken,
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl World {
    pub async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let server = ApiServer::new(
            Arc::new(Memory::new()),
            Config { token_key: b"a key for tests".to_vec(), ..Config::default() },
        )
        .await
        .unwrap();
        let client = server.client(User::system("admin"));
        cluster::bootstrap::run(&client).await.unwrap();
        let stop = CancellationToken::new();
        let options =
            cluster::Options { volumes: folder.path().join("volumes"), imports: folder.path().join("imports") };
        tokio::spawn(cluster::run(client.clone(), options, stop.clone()));

        let pki = Pki::open(&folder.path().join("pki")).unwrap();
        let tls = |i: embedded::pki::Identity| Tls { ca: pki.ca().to_owned(), cert: i.cert, key: i.key };
        let agent = Agent::new();
        let address = serve(&agent, &tls(pki.node(NODE).unwrap()), stop.clone()).await;
        node(&client, address).await;
        tokio::spawn(kubelet(client.clone(), agent.clone(), stop.clone()));
        let tls = tls(pki.client("virtfold-controller", None).unwrap());
        let explainer = reconcilers::Explainer::default();
        Self { server, client, agent, tls, writes: Arc::default(), explainer, folder, stop }
    }

    /// Starts one of several controllers: nothing proves that there is no other. Its requests hang while the gate is closed.
    pub fn rival(
        &self,
        gate: tokio::sync::watch::Receiver<bool>,
    ) -> (CancellationToken, tokio::task::JoinHandle<Result<(), reconcilers::Error>>) {
        self.run(gate, false)
    }

    /// Starts a controller; cancel the token and await the handle to end it. Aborting the handle is a kill.
    pub fn controller(&self) -> (CancellationToken, tokio::task::JoinHandle<Result<(), reconcilers::Error>>) {
        self.run(tokio::sync::watch::channel(true).1, true)
    }

    fn run(
        &self,
        gate: tokio::sync::watch::Receiver<bool>,
        exclusive: bool,
    ) -> (CancellationToken, tokio::task::JoinHandle<Result<(), reconcilers::Error>>) {
        let stop = CancellationToken::new();
        let config = reconcilers::Config {
            metrics: Default::default(),
            readiness: Default::default(),
            client: self.counting_client(gate),
            dial: transport::direct(),
            tls: self.tls.clone(),
            lease: LeaseConfig {
                duration: Duration::from_secs(3),
                renew_every: Duration::from_millis(500),
                exclusive,
                ..LeaseConfig::default()
            },
            journal: Some(telemetry::journal::Config::new(self.folder.path().join("journal"), "controller", "test")),
            explainer: self.explainer.clone(),
            cluster: state::vm::ClusterConfig::default(),
            stop: stop.clone(),
        };
        (stop, tokio::spawn(reconcilers::run(config)))
    }

    /// Replays what all controllers so far have recorded; they have ended, or were killed.
    pub fn assert_replays(&self) {
        let (report, damaged) = telemetry::journal::replay(&self.folder.path().join("journal")).unwrap();
        let wrong = (report.differing, report.gaps, report.missing_blocks, report.dropped, report.unreadable);
        assert_eq!((wrong, damaged), ((0, 0, 0, 0, 0), 0), "{report:#?}");
        assert!(report.compared > 20 && report.compared == report.records, "{report:#?}");
        println!("{} steps of {} cells, {} commands replayed", report.compared, report.cells, report.commands);
    }

    /// A client whose writes are counted.
    fn counting_client(&self, gate: tokio::sync::watch::Receiver<bool>) -> Client {
        let (service, writes) = (self.server.service(User::system("controller")), self.writes.clone());
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let (mut service, writes, mut gate) = (service.clone(), writes.clone(), gate.clone());
            let label = format!("{} {}", request.method(), plural(request.uri().path()));
            let counts = request.method() != http::Method::GET;
            async move {
                // An error means that nobody can close it any more.
                let _ = gate.wait_for(|open| *open).await;
                let response = tower::Service::call(&mut service, request).await?;
                if counts && !label.contains("leases") {
                    writes.lock().unwrap().push(format!("{label} {}", response.status().as_u16()));
                }
                Ok::<_, std::convert::Infallible>(response)
            }
        });
        Client::new(service, "default")
    }

    pub fn api(&self, kind: Kind) -> Api<DynamicObject> {
        Api::default_namespaced_with(self.client.clone(), &reconcilers::hub::resource(kind))
    }

    pub async fn get(&self, kind: Kind, name: &str) -> Option<Value> {
        let found = self.api(kind).get_opt(name).await.unwrap();
        found.map(|o| serde_json::to_value(o).unwrap())
    }

    /// Of a core kind that the controller has nothing to do with.
    pub async fn create_core(&self, kind: &str, plural: &str, object: Value) {
        let r = ApiResource {
            group: String::new(),
            version: "v1".into(),
            api_version: "v1".into(),
            kind: kind.into(),
            plural: plural.into(),
        };
        let api: Api<DynamicObject> = Api::default_namespaced_with(self.client.clone(), &r);
        api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
    }

    pub async fn create(&self, kind: Kind, object: Value) {
        let object = serde_json::from_value(object).unwrap();
        self.api(kind).create(&PostParams::default(), &object).await.unwrap();
    }

    pub async fn patch(&self, kind: Kind, name: &str, body: Value) {
        self.api(kind).patch(name, &PatchParams::default(), &Patch::Merge(body)).await.unwrap();
    }

    pub async fn delete(&self, kind: Kind, name: &str) {
        self.api(kind).delete(name, &DeleteParams::default()).await.unwrap();
    }

    /// Waits until the VM's printable status is this.
    pub async fn status(&self, name: &str, want: &str) {
        let last = Mutex::new(String::new());
        let start = Instant::now();
        loop {
            let vm = self.get(Kind::VirtualMachine, name).await.unwrap_or_default();
            let now = vm["status"]["printableStatus"].as_str().unwrap_or_default().to_owned();
            if now == want {
                return;
            }
            *last.lock().unwrap() = now;
            if start.elapsed() > Duration::from_secs(30) {
                let vmi = self.get(Kind::VirtualMachineInstance, name).await.unwrap_or_default();
                panic!("{name} is {last:?}, not {want}; VM {vm:#} VMI {:#}", vmi["status"]);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub async fn pods(&self) -> Vec<DynamicObject> {
        self.api(Kind::Pod).list(&ListParams::default()).await.unwrap().items
    }

    pub async fn events(&self) -> Vec<String> {
        self.events_as("reason").await
    }

    /// A field of the controller's Events.
    pub async fn events_as(&self, field: &str) -> Vec<String> {
        let r = ApiResource::erase::<k8s_openapi::api::core::v1::Event>(&());
        let api: Api<DynamicObject> = Api::default_namespaced_with(self.client.clone(), &r);
        let all = api.list(&ListParams::default()).await.unwrap();
        let ours = all.items.into_iter().filter(|e| e.data["source"]["component"] == "virtfold-controller");
        ours.map(|e| e.data[field].as_str().unwrap_or_default().to_owned()).collect()
    }
}

/// `virtualmachines`, `pods`, ... and the subresource of a path.
fn plural(path: &str) -> String {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let after = parts.iter().position(|p| *p == "namespaces").map_or(parts.len().saturating_sub(2), |i| i + 2);
    let rest = parts.get(after..).unwrap_or_default();
    match rest {
        [kind, _, sub, ..] => format!("{kind}/{sub}"),
        [kind, ..] => (*kind).to_owned(),
        [] => path.to_owned(),
    }
}

async fn serve(agent: &Agent, tls: &Tls, stop: CancellationToken) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = transport::server(tls).unwrap().add_service(NodeAgentServer::new(agent.clone()));
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    tokio::spawn(server.serve_with_incoming_shutdown(incoming, async move { stop.cancelled().await }));
    address
}

async fn node(client: &Client, address: SocketAddr) {
    let nodes: Api<Node> = Api::all(client.clone());
    let node = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": NODE,
            "labels": {"kubevirt.io/schedulable": "true", "kubernetes.io/arch": "amd64"},
            "annotations": {"virtfold.io/agent-address": address.to_string()}},
    });
    nodes.create(&PostParams::default(), &serde_json::from_value(node).unwrap()).await.unwrap();
    let size = json!({"cpu": "64", "memory": "256Gi", "pods": "500", "ephemeral-storage": "1Ti"});
    let status = json!({"status": {
        "capacity": size, "allocatable": size,
        "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady",
            "lastHeartbeatTime": jiff::Timestamp::now().to_string(), "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
    nodes.patch_status(NODE, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
}

/// Containers come up, readiness follows the gate, a deletion is a SIGTERM. It looks around often instead of watching.
async fn kubelet(client: Client, agent: Agent, stop: CancellationToken) {
    let pods: Api<DynamicObject> = Api::default_namespaced_with(client, &reconcilers::hub::resource(Kind::Pod));
    while !stop.is_cancelled() {
        for pod in pods.list(&ListParams::default()).await.map(|l| l.items).unwrap_or_default() {
            let name = pod.metadata.name.clone().unwrap();
            let uid = pod.metadata.uid.clone().unwrap();
            let _ = look_after(&pods, &agent, &pod, &name, &uid).await;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn look_after(
    pods: &Api<DynamicObject>,
    agent: &Agent,
    pod: &DynamicObject,
    name: &str,
    uid: &str,
) -> kube::Result<()> {
    let write = |status: Value| async move {
        let body = json!({"metadata": {"uid": uid}, "status": status});
        pods.patch_status(name, &PatchParams::default(), &Patch::Merge(body)).await.map(drop)
    };
    let container = |state: Value| json!([{"name": "compute", "image": "i", "imageID": "", "ready": true, "restartCount": 0, "state": state}]);
    let phase = pod.data["status"]["phase"].as_str().unwrap_or_default().to_owned();
    let launcher = agent.launchers.lock().unwrap().all.get(uid).cloned();
    if pod.metadata.deletion_timestamp.is_some() {
        let cause = if agent.launchers.lock().unwrap().ignores_power_button {
            agent::Cause::KilledAfterGrace
        } else {
            agent::Cause::GuestShutdown
        };
        agent.end(uid, cause);
        return pods.delete(name, &DeleteParams::default().grace_period(0)).await.map(drop);
    }
    if pod.data["spec"]["nodeName"].is_null() {
        return Ok(());
    }
    if phase == "Pending" {
        let owner = pod.metadata.owner_references.as_ref().and_then(|o| o.first()).cloned().unwrap();
        agent.launchers.lock().unwrap().all.entry(uid.to_owned()).or_insert(Launcher {
            namespace: "default".into(),
            name: owner.name,
            vmi: owner.uid,
            state: agent::DomainState::Absent.into(),
            ..Launcher::default()
        });
        let ready = json!([{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]);
        return write(
            json!({"phase": "Running", "conditions": ready, "containerStatuses": container(json!({"running": {}}))}),
        )
        .await;
    }
    if phase == "Running" && launcher.is_some_and(|l| l.outcome.is_some()) {
        let ended = json!({"terminated": {"exitCode": 0, "reason": "Completed"}});
        return write(json!({"phase": "Succeeded", "containerStatuses": container(ended)})).await;
    }
    Ok(())
}

/// A VM as admission leaves it.
pub fn vm(name: &str, strategy: &str) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
        "metadata": {"name": name, "namespace": "default", "finalizers": [api::names::FINALIZER_VM],
            "annotations": {"virtfold.io/traceparent": telemetry::TraceContext::random().to_string()}},
        "spec": {"runStrategy": strategy, "template": {"spec": {
            "terminationGracePeriodSeconds": 5,
            "domain": {"memory": {"guest": "64Mi"}, "devices": {}},
            "networks": [{"name": "default", "pod": {}}]}}},
    })
}

/// A set as admission leaves it; its instances have the label `app` with its name.
pub fn set(name: &str, replicas: u32) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceReplicaSet",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": {
            "metadata": {"labels": {"app": name}},
            "spec": {
                "terminationGracePeriodSeconds": 5,
                "domain": {"memory": {"guest": "64Mi"}, "devices": {}},
                "networks": [{"name": "default", "pod": {}}]}}},
    })
}
