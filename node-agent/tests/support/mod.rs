//! A node for tests: API server on a memory store, certificates, pods, modelled launchers, a controller.

pub mod launcher;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use embedded::auth::User;
use embedded::pki::{Identity, Pki};
use embedded::server::ApiServer;
use embedded::storage::Memory;
use kube::Client;
use node_agent::{Accelerator, Config, Offers, PodFacts, PodSource};
use proto::agent::node_agent_client::NodeAgentClient;
use proto::agent::*;
use proto::transport::{Tls, channel, direct};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tower::Service;

pub const NODE: &str = "node-1";
pub const POD: &str = "0b9f5a31-2a55-4f6c-8f43-0f5f5a0b7c11";
/// Generous: the machine may be busy.
pub const LONG: Duration = Duration::from_secs(30);

pub async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !holds().await {
        assert!(start.elapsed() < LONG, "not within {LONG:?}: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Whoever runs pods: the test.
pub struct Pods {
    list: Mutex<Vec<PodFacts>>,
    changed: watch::Sender<u64>,
}

impl Pods {
    pub fn set(&self, change: impl FnOnce(&mut Vec<PodFacts>)) {
        change(&mut self.list.lock().unwrap());
        self.changed.send_modify(|n| *n += 1);
    }
}

impl PodSource for Pods {
    fn pods(&self) -> Vec<PodFacts> {
        self.list.lock().unwrap().clone()
    }

    fn changed(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }
}

pub struct World {
    /// UID of the VMI that every world has.
    pub vmi_uid: String,
    /// Removed when the agent has ended, too: its journal's last block would make the folder again.
    pub dir: Arc<tempfile::TempDir>,
    pub api: ApiServer,
    /// With all rights.
    pub admin: Client,
    pub pki: Pki,
    pub pods: Arc<Pods>,
    /// The API server answers the agent.
    pub reachable: Arc<AtomicBool>,
    pub probes: Arc<AtomicUsize>,
    /// Live reads of the VMI by the agent.
    pub reads: Arc<AtomicUsize>,
    /// Requests of the agent that were not answered.
    pub lost: Arc<AtomicUsize>,
    agent: Option<Agent>,
}

struct Agent {
    address: std::net::SocketAddr,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<Result<(), node_agent::Error>>,
}

impl World {
    /// Without an agent yet; the Lease is held by `A`.
    pub async fn new() -> Self {
        // VIRTFOLD_LOG=debug shows what the agents do.
        static LOG: std::sync::Once = std::sync::Once::new();
        LOG.call_once(|| {
            let options = telemetry::Options { log_filter: "off".into(), ..log_options() };
            telemetry::init(&options).unwrap();
        });
        let dir = Arc::new(tempfile::Builder::new().prefix("vfa").tempdir().unwrap());
        let api = ApiServer::new(Arc::new(Memory::new()), embedded::server::Config::default()).await.unwrap();
        let admin = api.client(User::new("admin", &["system:masters"]));
        embedded::cluster::bootstrap::run(&admin).await.unwrap();
        let pki = Pki::open(&dir.path().join("pki")).unwrap();
        let pods = Pods { list: Mutex::default(), changed: watch::Sender::new(1) };
        let mut world = Self {
            vmi_uid: String::new(),
            dir,
            api,
            admin,
            pki,
            pods: Arc::new(pods),
            reachable: Arc::new(AtomicBool::new(true)),
            probes: Arc::default(),
            reads: Arc::default(),
            lost: Arc::default(),
            agent: None,
        };
        world
            .create("/api/v1/namespaces", json!({"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": "ns"}}))
            .await;
        world.create("/api/v1/nodes", json!({"kind": "Node", "apiVersion": "v1", "metadata": {"name": NODE}})).await;
        world.set_lease("A").await;
        let vmi = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": "guest", "namespace": "ns", "labels": {"kubevirt.io/nodeName": NODE},
                         "finalizers": ["kubevirt.io/foregroundDeleteVirtualMachine"]},
            "spec": {"terminationGracePeriodSeconds": 7, "domain": {"devices": {}}},
        });
        let made = world.create("/apis/kubevirt.io/v1/namespaces/ns/virtualmachineinstances", vmi).await;
        world.vmi_uid = made["metadata"]["uid"].as_str().unwrap().into();
        world
    }

    pub async fn request(&self, method: &str, path: &str, kind: &str, body: &Value) -> Result<Value, kube::Error> {
        let request = http::Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", kind)
            .body(if body.is_null() { Vec::new() } else { serde_json::to_vec(body).unwrap() })
            .unwrap();
        self.admin.request(request).await
    }

    pub async fn create(&self, collection: &str, object: Value) -> Value {
        self.request("POST", collection, "application/json", &object).await.unwrap()
    }

    pub async fn get(&self, path: &str) -> Value {
        self.request("GET", path, "application/json", &Value::Null).await.unwrap()
    }

    pub async fn patch(&self, path: &str, patch: Value) -> Value {
        self.request("PATCH", path, "application/merge-patch+json", &patch).await.unwrap()
    }

    pub async fn set_lease(&self, holder: &str) {
        let namespace = json!({"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": "virtfold"}});
        let _ = self.request("POST", "/api/v1/namespaces", "application/json", &namespace).await;
        let collection = "/apis/coordination.k8s.io/v1/namespaces/virtfold/leases";
        let one = format!("{collection}/virtfold-controller");
        let _ = self.request("DELETE", &one, "application/json", &Value::Null).await;
        let lease = json!({"kind": "Lease", "apiVersion": "coordination.k8s.io/v1", "metadata": {"name": "virtfold-controller"},
                           "spec": {"holderIdentity": holder}});
        self.create(collection, lease).await;
    }

    /// Whoever runs pods has just begun.
    pub fn unenumerated(&self) {
        self.pods.changed.send_replace(0);
    }

    pub fn state_dir(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    pub async fn start(&mut self) {
        assert!(self.agent.is_none());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let probes = self.probes.clone();
        let config = Config {
            node_name: NODE.into(),
            client: self.client(),
            incoming: proto::transport::incoming(listener),
            address: address.to_string(),
            tls: self.tls(self.pki.node(NODE).unwrap()),
            state_dir: self.state_dir(),
            disk: node_agent::Disk::Threads,
            boot_id: node_agent::boot_id().unwrap(),
            pods: self.pods.clone(),
            probe: Box::new(move || {
                probes.fetch_add(1, Ordering::Relaxed);
                let offers = Offers {
                    cpu_models: vec!["Nehalem".into(), "Penryn".into()],
                    cpu_features: vec!["sse4.2".into()],
                    cpu_vendor: "AuthenticAMD".into(),
                    machine_types: vec!["q35".into()],
                };
                Box::pin(async { Accelerator { name: "tcg".into(), cpu_model: "Nehalem".into(), offers } })
            }),
            lease: ("virtfold".into(), "virtfold-controller".into()),
            dns: vec!["10.96.0.10".parse().unwrap()],
            cluster_domain: "cluster.local".into(),
            journal: Some(telemetry::journal::Config::new(self.dir.path().join("journal"), "node-agent", "test")),
            usage: None,
            shutdown: stop.clone(),
        };
        let dir = self.dir.clone();
        let task = tokio::spawn(async move {
            let ended = node_agent::run(config).await;
            drop(dir);
            ended
        });
        self.agent = Some(Agent { address, stop, task });
    }

    /// As a kill would end it, but for the sockets.
    pub async fn stop(&mut self) {
        let agent = self.agent.take().unwrap();
        agent.stop.cancel();
        agent.task.await.unwrap().unwrap();
        self.assert_replays();
    }

    /// Replays what agents that have ended have recorded.
    fn assert_replays(&self) {
        let journal = self.dir.path().join("journal");
        if !journal.exists() {
            // There was no pod.
            return;
        }
        let (report, damaged) = telemetry::journal::replay(&journal).unwrap();
        let wrong = (report.differing, report.gaps, report.missing_blocks, report.dropped, report.unreadable);
        assert_eq!((wrong, damaged), ((0, 0, 0, 0, 0), 0), "{report:#?}");
        assert_eq!(report.compared, report.records, "{report:#?}");
    }

    /// The node's client, which can be cut off.
    fn client(&self) -> Client {
        let server = self.api.service(User::new("system:node:node-1", &["system:nodes"]));
        let (reachable, reads, lost) = (self.reachable.clone(), self.reads.clone(), self.lost.clone());
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let mut server = server.clone();
            let answered = reachable.load(Ordering::Relaxed);
            if !answered {
                lost.fetch_add(1, Ordering::Relaxed);
            } else if request.method() == "GET" && request.uri().path() == VMI_PATH {
                reads.fetch_add(1, Ordering::Relaxed);
            }
            async move {
                if !answered {
                    return Err(std::io::Error::from(std::io::ErrorKind::ConnectionRefused));
                }
                Ok(server.call(request).await.unwrap())
            }
        });
        Client::new(service, "default")
    }

    fn tls(&self, identity: Identity) -> Tls {
        Tls { ca: self.pki.ca().into(), cert: identity.cert, key: identity.key }
    }

    pub async fn dial(
        &self,
        common_name: &str,
        node: &str,
    ) -> Result<NodeAgentClient<tonic::transport::Channel>, String> {
        let address = self.agent.as_ref().unwrap().address;
        let tls = self.tls(self.pki.client(common_name, None).unwrap());
        channel(direct(), &tls, node, address).await.map(NodeAgentClient::new).map_err(|e| e.to_string())
    }

    pub fn address(&self) -> std::net::SocketAddr {
        self.agent.as_ref().unwrap().address
    }

    pub async fn gateway(&self) -> NodeAgentClient<tonic::transport::Channel> {
        self.dial("virtfold-gateway", NODE).await.unwrap()
    }

    /// A session that says Hello.
    pub async fn hello(&self, epoch: u64, instance: &str) -> Result<Session, HelloReply> {
        let mut client = self.dial("virtfold-controller", NODE).await.unwrap();
        let (down, outgoing) = mpsc::channel(64);
        let hello = Hello { epoch, leader_instance: instance.into(), proto_min: 1, proto_max: 1, ..Hello::default() };
        down.send(ControllerMessage { kind: Some(controller_message::Kind::Hello(hello)) }).await.unwrap();
        let stream = tokio_stream::wrappers::ReceiverStream::new(outgoing);
        let mut up = client.session(stream).await.unwrap().into_inner();
        let Some(agent_message::Kind::Hello(reply)) = up.message().await.unwrap().unwrap().kind else {
            panic!("no reply")
        };
        if !reply.accepted {
            assert!(up.message().await.unwrap().is_none());
            return Err(reply);
        }
        Ok(Session { epoch, down, up, passed: Vec::new(), reply })
    }

    /// A session of the leader, after its complete inventory.
    pub async fn lead(&self) -> (Session, Inventory) {
        let mut session = self.hello(100, "A").await.unwrap();
        let inventory = session.complete_inventory().await;
        (session, inventory)
    }

    /// A pod of the VMI, here and in the API, with a launcher in it.
    pub async fn pod(&self) -> launcher::Launcher {
        let facts = self.pod_facts().await;
        let launcher = launcher::Launcher::start(&facts.share_dir, &self.vmi_uid, POD).await;
        self.pods.set(|p| p.push(facts));
        launcher
    }

    pub async fn pod_facts(&self) -> PodFacts {
        let share_dir = self.dir.path().join("share");
        std::fs::create_dir_all(&share_dir).unwrap();
        PodFacts {
            pod_uid: POD.into(),
            vmi_uid: self.vmi_uid.clone(),
            namespace: "ns".into(),
            pod_name: "virt-launcher-guest".into(),
            vmi_name: "guest".into(),
            share_dir,
            netns: "/proc/self/ns/net".into(),
            ips: vec!["10.244.1.7".parse().unwrap()],
            running: true,
        }
    }

    /// The VMI with this status.
    pub async fn vmi(&self, status: Value) -> Value {
        self.patch(VMI_PATH, json!({"status": status})).await
    }
}

fn log_options() -> telemetry::Options {
    telemetry::Options { service: "test", ..telemetry::Options::default() }
}

pub const VMI_PATH: &str = "/apis/kubevirt.io/v1/namespaces/ns/virtualmachineinstances/guest";

pub fn scheduled() -> Value {
    json!({"phase": "Scheduled", "nodeName": NODE, "activePods": {POD: NODE}})
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(agent) = &self.agent {
            agent.stop.cancel();
        }
    }
}

/// One end of a session: the controller's.
pub struct Session {
    pub epoch: u64,
    down: mpsc::Sender<ControllerMessage>,
    up: tonic::Streaming<AgentMessage>,
    passed: Vec<agent_message::Kind>,
    pub reply: HelloReply,
}

impl Session {
    /// `None` where the session has ended.
    pub async fn next(&mut self) -> Option<agent_message::Kind> {
        let next = tokio::time::timeout(LONG, self.up.message()).await.expect("nothing came");
        next.ok().flatten().and_then(|m| m.kind)
    }

    pub async fn ended(&mut self) {
        while let Some(kind) = self.next().await {
            tracing::debug!(?kind, "before the end");
        }
    }

    /// The oldest message that passes `pick` and was not picked before.
    pub async fn until<T>(&mut self, what: &str, mut pick: impl FnMut(&agent_message::Kind) -> Option<T>) -> T {
        if let Some((n, found)) = self.passed.iter().enumerate().find_map(|(n, k)| Some((n, pick(k)?))) {
            self.passed.remove(n);
            return found;
        }
        let deadline = tokio::time::Instant::now() + LONG;
        loop {
            let next = tokio::time::timeout_at(deadline, self.up.message()).await;
            let message = next.unwrap_or_else(|_| panic!("{what}: not within {LONG:?}; there came {:#?}", self.passed));
            let kind =
                message.ok().flatten().and_then(|m| m.kind).unwrap_or_else(|| panic!("{what}: the session ended"));
            match pick(&kind) {
                Some(found) => return found,
                None => self.passed.push(kind),
            }
        }
    }

    pub async fn complete_inventory(&mut self) -> Inventory {
        self.until("a complete inventory", |k| match k {
            agent_message::Kind::Inventory(i) if i.complete => Some(i.clone()),
            _ => None,
        })
        .await
    }

    pub async fn report(&mut self, state: DomainState) -> Domain {
        self.until(&format!("a report of {state:?}"), |k| match k {
            agent_message::Kind::Report(r) => r.domain.clone().filter(|d| d.state() == state),
            _ => None,
        })
        .await
    }

    pub async fn ack(&mut self, id: &str) -> ack::Result {
        self.until(&format!("an answer to {id}"), |k| match k {
            agent_message::Kind::Ack(a) if a.id == id => a.result.clone(),
            _ => None,
        })
        .await
    }

    pub async fn outcome(&mut self) -> Outcome {
        self.until("an outcome", |k| match k {
            agent_message::Kind::Outcome(o) => Some(o.clone()),
            _ => None,
        })
        .await
    }

    pub async fn send(&self, kind: controller_message::Kind) {
        self.down.send(ControllerMessage { kind: Some(kind) }).await.unwrap();
    }

    pub async fn instruct(&self, kind: InstructKind, id: &str, vmi: &Value) {
        self.send(controller_message::Kind::Instruct(self.instruction(kind, id, vmi))).await;
    }

    pub fn instruction(&self, kind: InstructKind, id: &str, vmi: &Value) -> Instruct {
        Instruct {
            epoch: self.epoch,
            id: id.into(),
            kind: kind as i32,
            vmi_uid: vmi["metadata"]["uid"].as_str().unwrap().into(),
            pod_uid: POD.into(),
            vmi_rv: vmi["metadata"]["resourceVersion"].as_str().unwrap().into(),
            vmi: vmi.to_string().into_bytes().into(),
            deadline_ms: 3000,
            ..Instruct::default()
        }
    }
}

pub fn refused(result: &ack::Result) -> &Refused {
    match result {
        ack::Result::Refused(r) => r,
        other => panic!("{other:?}"),
    }
}
