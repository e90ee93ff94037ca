//! The agent's gRPC server: who may call, sessions, verbs.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures::Stream;
use proto::agent::node_agent_server::NodeAgent;
use proto::agent::{
    AgentMessage, ControllerMessage, HelloReply, StepsReply, StepsRequest, StreamChunk, UsageReply, UsageRequest,
    VerbReply, VerbRequest, agent_message, controller_message,
};
use proto::transport::caller;
use state::agent::session::{admit, admit_by_lease};
use state::agent::{Admission, Hello, Memory};
use state::{Epoch, PodUid, VmiUid};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::hub::{Msg, Opened, Routed};
use crate::stream::Streams;
use crate::{Shared, api, limits, link};

/// Common name of the certificate that controllers come with.
pub const CONTROLLER: &str = "virtfold-controller";
/// Common name of the certificate that gateways come with.
pub const GATEWAY: &str = "virtfold-gateway";

pub(crate) struct Service {
    shared: Arc<Shared>,
    hub: mpsc::Sender<Msg>,
    /// One Hello is judged at a time; holds what is remembered.
    gate: Arc<tokio::sync::Mutex<Option<Memory>>>,
    sessions: Arc<AtomicU64>,
    requests: Arc<Semaphore>,
    streams: Streams,
}

type Outgoing<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Service {
    pub fn new(shared: Arc<Shared>, hub: mpsc::Sender<Msg>) -> Self {
        let memory = shared.store.memory();
        Self {
            shared,
            hub,
            gate: Arc::new(tokio::sync::Mutex::new(memory)),
            sessions: Arc::default(),
            requests: Arc::new(Semaphore::new(limits::REQUESTS)),
            streams: Streams::default(),
        }
    }

    /// Judges a Hello, and has what was accepted on disk before anybody acts on it.
    async fn judge(&self, memory: &mut Option<Memory>, hello: &Hello) -> Admission {
        let mut admission = admit(memory.as_ref(), hello, proto::PROTOCOL);
        if admission == Admission::AskLease {
            let (namespace, name) = &self.shared.lease;
            let lease = api::lease(&self.shared.client, namespace, name).await;
            tracing::info!(?lease, epoch = %hello.epoch, leader = %hello.leader, "the Lease decides about a controller");
            admission = admit_by_lease(memory.as_ref(), hello, &lease, proto::PROTOCOL);
        }
        if let Admission::Accept { .. } = admission {
            let new = Memory { epoch: hello.epoch, leader: hello.leader.clone() };
            if memory.as_ref() != Some(&new) {
                let written = new.clone();
                match self.shared.store.put(move |s| s.set_memory(&written)).await {
                    Ok(()) => *memory = Some(new),
                    Err(e) => return Admission::Refuse(format!("the epoch cannot be put on disk: {e}")),
                }
            }
        }
        admission
    }

    async fn route(&self, vmi: &str, pod: &str) -> Result<Routed, Status> {
        let (reply, routed) = oneshot::channel();
        let gone = || Status::unavailable("the node agent is ending");
        let ask = Msg::Route { vmi: VmiUid(vmi.into()), pod: PodUid(pod.into()), reply };
        self.hub.send(ask).await.map_err(|_| gone())?;
        routed.await.map_err(|_| gone())
    }
}

#[tonic::async_trait]
impl NodeAgent for Service {
    type SessionStream = Outgoing<AgentMessage>;

    async fn session(
        &self,
        request: Request<Streaming<ControllerMessage>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        caller(&request, CONTROLLER)?;
        let mut incoming = request.into_inner();
        let first = tokio::time::timeout(limits::HELLO, incoming.message())
            .await
            .map_err(|_| Status::deadline_exceeded("no Hello"))??;
        let Some(ControllerMessage { kind: Some(controller_message::Kind::Hello(hello)) }) = first else {
            return Err(Status::invalid_argument("a session begins with a Hello"));
        };
        let hello = Hello {
            epoch: Epoch(hello.epoch),
            leader: hello.leader_instance.into(),
            proto_min: hello.proto_min,
            proto_max: hello.proto_max,
        };
        // Held until the hub has replaced the older session: whoever comes next is judged after that.
        let mut memory = self.gate.lock().await;
        let admission = self.judge(&mut memory, &hello).await;
        let highest_epoch = memory.as_ref().map(|m| m.epoch.0).unwrap_or_default();
        let proto = match admission {
            Admission::Accept { proto } => proto,
            Admission::AskLease => return Err(Status::internal("the Lease decided nothing")),
            Admission::Refuse(refused) => {
                tracing::warn!(epoch = %hello.epoch, leader = %hello.leader, refused, "a controller is refused");
                let reply = HelloReply { accepted: false, refused, highest_epoch, proto: 0 };
                let reply = AgentMessage { kind: Some(agent_message::Kind::Hello(reply)) };
                return Ok(Response::new(Box::pin(tokio_stream::once(Ok(reply)))));
            }
        };
        let session = self.sessions.fetch_add(1, Ordering::Relaxed) + 1;
        tracing::info!(session, epoch = %hello.epoch, leader = %hello.leader, "a controller's session begins");
        let (out, outgoing) = mpsc::channel(limits::SESSION);
        let reply = HelloReply { accepted: true, refused: String::new(), highest_epoch, proto };
        let _ = out.send(AgentMessage { kind: Some(agent_message::Kind::Hello(reply)) }).await;
        let stop = self.shared.stop.child_token();
        let (ready, is_ready) = oneshot::channel();
        let opened = Opened { session, epoch: hello.epoch, out, stop: stop.clone() };
        let gone = || Status::unavailable("the node agent is ending");
        self.hub.send(Msg::Opened(opened, ready)).await.map_err(|_| gone())?;
        is_ready.await.map_err(|_| gone())?;
        drop(memory);
        self.shared.assert_node.notify_one();
        let (hub, ended) = (self.hub.clone(), stop.clone());
        tokio::spawn(async move {
            loop {
                let message = tokio::select! {
                    () = ended.cancelled() => break,
                    message = incoming.message() => message,
                };
                match message {
                    Ok(Some(message)) => {
                        if hub.send(Msg::Down(session, message)).await.is_err() {
                            break;
                        }
                    }
                    Ok(None) | Err(_) => break,
                }
            }
            ended.cancel();
            tracing::info!(session, "a controller's session ended");
            let _ = hub.send(Msg::Closed(session)).await;
        });
        // The end of the stream is the end of the session, for the controller too.
        let outgoing =
            futures::StreamExt::take_until(ReceiverStream::new(outgoing).map(Ok), stop.clone().cancelled_owned());
        let guard = EndsWithStream(stop);
        Ok(Response::new(Box::pin(outgoing.map(move |m| {
            let _ = &guard;
            m
        }))))
    }

    async fn verb(&self, request: Request<VerbRequest>) -> Result<Response<VerbReply>, Status> {
        let received = Instant::now();
        caller(&request, GATEWAY)?;
        let _permit = self.requests.try_acquire().map_err(|_| Status::resource_exhausted("too many requests"))?;
        let mut verb = request.into_inner();
        let refuse = |reason: &str, message: String| {
            Ok(Response::new(VerbReply { ok: false, reason: reason.into(), message, body: Default::default() }))
        };
        let (client, identity) = match self.route(&verb.vmi_uid, &verb.pod_uid).await? {
            Ok(route) => match route.client {
                Some(client) => (client, route.identity),
                None => return refuse("not-ready", "the launcher does not answer".into()),
            },
            Err(refused) => return Ok(Response::new(refused)),
        };
        let ttl = if verb.ttl_ms == 0 { limits::VERB } else { Duration::from_millis(verb.ttl_ms) };
        let left = ttl.saturating_sub(received.elapsed());
        if left.is_zero() {
            return refuse("expired", "its time to live has passed".into());
        }
        verb.ttl_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        tracing::info!(verb = verb.verb, id = verb.id, pod = verb.pod_uid, traceparent = verb.traceparent, "verb");
        // At most once is the launcher's: it remembers the id. Not answered is not done, as far as anybody knows.
        let asked =
            Asked { traceparent: verb.traceparent.clone(), id: verb.id.clone(), verb: verb.verb.clone(), identity };
        let began = std::time::SystemTime::now();
        let answer = link::within(left, client.verb(verb)).await;
        asked.emit(&self.shared.node, began, &answer);
        match answer {
            Ok(reply) => Ok(Response::new(reply)),
            // The way to it broke: it is found again, or found to be over, in a moment.
            Err(status) if status.code() == tonic::Code::Unavailable => {
                refuse("not-ready", format!("the launcher did not answer: {}", status.message()))
            }
            Err(status) => refuse("failed", format!("the launcher did not answer: {}", status.message())),
        }
    }

    type StreamStream = Outgoing<StreamChunk>;

    async fn stream(&self, request: Request<Streaming<StreamChunk>>) -> Result<Response<Self::StreamStream>, Status> {
        caller(&request, GATEWAY)?;
        let permit =
            self.requests.clone().try_acquire_owned().map_err(|_| Status::resource_exhausted("too many streams"))?;
        let mut incoming = request.into_inner();
        let first = tokio::time::timeout(limits::HELLO, incoming.message())
            .await
            .map_err(|_| Status::deadline_exceeded("no open"))??;
        let Some(open) = first.and_then(|c| c.open) else {
            return Err(Status::invalid_argument("a stream begins with `open`"));
        };
        let share = match self.route(&open.vmi_uid, &open.pod_uid).await? {
            Ok(route) => route.share,
            Err(refused) if refused.reason == "not-found" => return Err(Status::not_found(refused.message)),
            Err(refused) if refused.reason == "not-ready" => return Err(Status::unavailable(refused.message)),
            Err(refused) => return Err(Status::failed_precondition(refused.message)),
        };
        let stream = self.streams.open(&share, &open, incoming, permit, &self.shared.stop).await?;
        Ok(Response::new(Box::pin(stream)))
    }

    async fn usage(&self, request: Request<UsageRequest>) -> Result<Response<UsageReply>, Status> {
        caller(&request, GATEWAY)?;
        let _permit = self.requests.try_acquire().map_err(|_| Status::resource_exhausted("too many requests"))?;
        Ok(Response::new(match &self.shared.usage {
            Some(usage) => usage.usage(&request.get_ref().namespace).await,
            None => UsageReply::default(),
        }))
    }

    async fn steps(&self, request: Request<StepsRequest>) -> Result<Response<StepsReply>, Status> {
        caller(&request, GATEWAY)?;
        let StepsRequest { namespace, name } = request.into_inner();
        let steps = serde_json::to_vec(&telemetry::kept::of(&namespace, &name));
        Ok(Response::new(StepsReply { steps: steps.map_err(|e| Status::internal(e.to_string()))?.into() }))
    }
}

/// A verb, as a step of the request that it came with.
struct Asked {
    traceparent: String,
    id: String,
    verb: String,
    identity: [(&'static str, String); 4],
}

impl Asked {
    /// Whoever is told that the launcher is not ready asks again with the same id, and it is one step all the same.
    fn emit(&self, node: &str, began: std::time::SystemTime, answer: &Result<VerbReply, Status>) {
        let Some(context) = telemetry::TraceContext::parse(&self.traceparent) else { return };
        let error = match answer {
            Ok(reply) if reply.ok => None,
            Ok(reply) => Some(telemetry::Failure { reason: reply.reason.clone(), message: reply.message.clone() }),
            Err(status) if status.code() == tonic::Code::Unavailable => return,
            Err(status) => {
                Some(telemetry::Failure { reason: status.code().to_string(), message: status.message().to_owned() })
            }
        };
        if error.as_ref().is_some_and(|e| e.reason == "not-ready") {
            return;
        }
        let code = answer.as_ref().err().map_or(0, |status| status.code() as i32);
        let mut attributes = vec![
            ("k8s.node.name", node.to_owned()),
            ("virtfold.verb", self.verb.clone()),
            ("rpc.grpc.status_code", code.to_string()),
        ];
        attributes.extend(self.identity.clone());
        attributes.extend(link::rpc("virtfold.agent.v1.NodeAgent", "Verb"));
        telemetry::emit(telemetry::Step {
            attributes,
            error,
            kind: telemetry::Kind::Server,
            ..telemetry::Step::of(context, &self.id, link::VERB, began)
        });
    }
}

/// A controller that stops reading ends its session.
struct EndsWithStream(CancellationToken);

impl Drop for EndsWithStream {
    fn drop(&mut self) {
        self.0.cancel();
    }
}
