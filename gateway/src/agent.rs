//! Node agents: one mTLS channel each, made when first needed.
//!
//! An agent that is just being started again cannot be reached for a moment, and then has to find its launchers. Whoever asks
//! in that moment waits for it, up to a bound. A verb keeps its id meanwhile: the launcher carries an id out once.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use proto::agent::node_agent_client::NodeAgentClient;
use proto::agent::{StepsRequest, StreamChunk, StreamOpen, UsageReply, UsageRequest, VerbReply, VerbRequest};
use serde_json::Value;
use telemetry::kept::Kept;
use tokio::sync::mpsc;
use tonic::transport::Channel;

use crate::admission::text;
use crate::{Dial, Tls, kubernetes, limits, status::Status};

/// Where a running instance is, as its VMI and its node say.
#[derive(Debug, Clone)]
struct Place {
    pub vmi_uid: String,
    pub pod_uid: String,
    pub node: String,
    pub address: String,
}

/// Channels to agents by (node, address).
pub(crate) struct Agents {
    dial: Dial,
    tls: Tls,
    patience: Duration,
    channels: Mutex<BTreeMap<(String, String), Channel>>,
}

impl std::fmt::Debug for Agents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agents").finish_non_exhaustive()
    }
}

impl Agents {
    pub fn new(dial: Dial, tls: Tls, patience: Duration) -> Self {
        Self { dial, tls, patience, channels: Mutex::default() }
    }

    /// Finds the node agent and the pod of an instance.
    async fn place(&self, client: &kube::Client, vmi: &Value) -> Result<Place, Status> {
        let name = text(vmi, &["metadata", "name"]);
        let node = text(vmi, &["status", "nodeName"]);
        let pods = vmi["status"]["activePods"].as_object();
        let pod = pods.and_then(|p| p.iter().find(|(_, n)| *n == node)).map(|(uid, _)| uid.clone());
        let Some(pod_uid) = pod.filter(|_| !node.is_empty()) else {
            return Err(Status::bad_request(format!("VMI {name:?} has no active pod on a node")));
        };
        let object = kubernetes::node(client, node).await?;
        let address = object
            .as_ref()
            .map(|n| text(n, &["metadata", "annotations", api::names::ANN_AGENT_ADDRESS]))
            .unwrap_or_default();
        if address.is_empty() {
            return Err(Status::bad_request(format!("node {node:?} of VMI {name:?} has no node agent")));
        }
        Ok(Place {
            vmi_uid: text(vmi, &["metadata", "uid"]).into(),
            pod_uid,
            node: node.into(),
            address: address.into(),
        })
    }

    /// What the machines of a namespace (of all, where it is empty) use on a node; else why it does not say.
    pub async fn usage(&self, node: &str, address: &str, namespace: &str) -> Result<UsageReply, String> {
        let request = UsageRequest { namespace: namespace.to_owned() };
        self.once(node, address, async |mut agent| agent.usage(request).await).await
    }

    /// The newest finished steps about a machine that the agent of a node keeps; else why it does not say.
    pub async fn steps(&self, node: &str, address: &str, namespace: &str, name: &str) -> Result<Vec<Kept>, String> {
        let request = StepsRequest { namespace: namespace.to_owned(), name: name.to_owned() };
        let reply = self.once(node, address, async |mut agent| agent.steps(request).await).await?;
        serde_json::from_slice(&reply.steps).map_err(|e| e.to_string())
    }

    /// Asks an agent once, for who wants to know asks again anyway; else why there is no answer.
    async fn once<T>(
        &self,
        node: &str,
        address: &str,
        call: impl AsyncFnOnce(NodeAgentClient<Channel>) -> Result<tonic::Response<T>, tonic::Status>,
    ) -> Result<T, String> {
        let asked = async {
            let agent = self.channel(node, address).await.map_err(|trouble| match trouble {
                Trouble::NotYet(why) => why,
                Trouble::Final(status) => status.message,
            })?;
            call(agent).await.map(tonic::Response::into_inner).map_err(|s| s.message().to_owned())
        };
        tokio::time::timeout(limits::USAGE, asked).await.map_err(|_| "no answer in time".to_owned())?
    }

    async fn channel(&self, node: &str, address: &str) -> Result<NodeAgentClient<Channel>, Trouble> {
        let key = (node.to_owned(), address.to_owned());
        if let Some(c) = self.channels.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(NodeAgentClient::new(c.clone()));
        }
        let Ok(address) = address.parse::<SocketAddr>() else {
            return Err(Trouble::Final(Status::internal(format_args!(
                "node {node:?} has an agent at {address:?}, which is not an address"
            ))));
        };
        let channel = proto::transport::channel(self.dial.clone(), &self.tls, node, address)
            .await
            .map_err(|e| Trouble::NotYet(format!("it cannot be reached at {address}: {}", chain(&e))))?;
        let mut all = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        // An address that the node had before is of no use.
        all.retain(|(node, _), _| *node != key.0);
        all.insert(key, channel.clone());
        Ok(NodeAgentClient::new(channel))
    }

    /// After an attempt that failed: an error where that is final, or where it went on for too long.
    async fn wait(&self, begun: Instant, trouble: Trouble, vmi: &Value, what: &str) -> Result<(), Status> {
        let why = match trouble {
            Trouble::Final(status) => return Err(status),
            Trouble::NotYet(why) => why,
        };
        if begun.elapsed() + limits::AGAIN >= self.patience {
            let (name, node) = (text(vmi, &["metadata", "name"]), text(vmi, &["status", "nodeName"]));
            tracing::warn!(node, vmi = name, what, why, "the node agent is not ready");
            return Err(Status::new(
                503,
                "ServiceUnavailable",
                format!("{what} of VMI {name:?}: the node agent of {node:?} is not ready: {why}"),
            ));
        }
        tokio::time::sleep(limits::AGAIN).await;
        Ok(())
    }

    /// Has a verb carried out and waits for its result.
    pub async fn verb(
        &self,
        client: &kube::Client,
        vmi: &Value,
        verb: &str,
        body: Vec<u8>,
        traceparent: String,
    ) -> Result<VerbReply, Status> {
        let begun = Instant::now();
        let mut request = VerbRequest {
            id: uuid::Uuid::new_v4().to_string(),
            verb: verb.into(),
            body: body.into(),
            ttl_ms: u64::try_from(limits::VERB.as_millis()).unwrap_or(u64::MAX),
            traceparent,
            ..VerbRequest::default()
        };
        loop {
            // Anew each time: an agent may come back at another address.
            let place = self.place(client, vmi).await?;
            request.vmi_uid.clone_from(&place.vmi_uid);
            request.pod_uid.clone_from(&place.pod_uid);
            match self.verb_once(&place, request.clone()).await {
                Ok(reply) => return Ok(reply),
                Err(trouble) => self.wait(begun, trouble, vmi, verb).await?,
            }
        }
    }

    async fn verb_once(&self, place: &Place, request: VerbRequest) -> Result<VerbReply, Trouble> {
        let verb = request.verb.clone();
        let mut client = self.channel(&place.node, &place.address).await?;
        match tokio::time::timeout(limits::VERB + limits::CONNECT, client.verb(request)).await {
            Ok(Ok(reply)) if reply.get_ref().reason == "not-ready" => Err(Trouble::NotYet(reply.into_inner().message)),
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(s)) => Err(Trouble::of(&s, format_args!("node agent of {:?}", place.node))),
            Err(_) => Err(Trouble::Final(Status::new(
                504,
                "Timeout",
                format!("node agent of {:?} gave no answer; whether {verb} was done is not known", place.node),
            ))),
        }
    }

    /// Opens a byte stream to the console or VNC server: what to send into, and what comes.
    pub async fn stream(
        &self,
        client: &kube::Client,
        vmi: &Value,
        device: &str,
        preserve_session: bool,
    ) -> Result<Stream, Status> {
        let begun = Instant::now();
        loop {
            let place = self.place(client, vmi).await?;
            match self.stream_once(&place, device, preserve_session).await {
                Ok(stream) => return Ok(stream),
                Err(trouble) => self.wait(begun, trouble, vmi, device).await?,
            }
        }
    }

    async fn stream_once(&self, place: &Place, device: &str, preserve_session: bool) -> Result<Stream, Trouble> {
        let (send, chunks) = mpsc::channel(limits::CHUNKS);
        let open = StreamOpen {
            vmi_uid: place.vmi_uid.clone(),
            pod_uid: place.pod_uid.clone(),
            device: device.into(),
            preserve_session,
        };
        let first = StreamChunk { open: Some(open), data: bytes::Bytes::new() };
        send.try_send(first).map_err(|e| Trouble::Final(Status::internal(e)))?;
        let up = futures::stream::unfold(chunks, |mut c| async move { c.recv().await.map(|chunk| (chunk, c)) });
        let mut client = self.channel(&place.node, &place.address).await?;
        match tokio::time::timeout(limits::CONNECT, client.stream(up)).await {
            Ok(Ok(down)) => Ok((send, down.into_inner())),
            Ok(Err(s)) if s.code() == tonic::Code::InvalidArgument || s.code() == tonic::Code::FailedPrecondition => {
                Err(Trouble::Final(Status::bad_request(s.message())))
            }
            Ok(Err(s)) => Err(Trouble::of(&s, format_args!("opening {device} on node {:?}", place.node))),
            Err(_) => Err(Trouble::NotYet("no answer".into())),
        }
    }
}

/// Both directions of a byte stream.
type Stream = (mpsc::Sender<StreamChunk>, tonic::Streaming<StreamChunk>);

/// Why something came to nothing.
enum Trouble {
    /// It may work in a moment.
    NotYet(String),
    /// It will not.
    Final(Status),
}

impl Trouble {
    /// What a failed call means: an agent that ends, begins or has not found its launchers is worth waiting for.
    fn of(status: &tonic::Status, doing: std::fmt::Arguments<'_>) -> Self {
        match status.code() {
            tonic::Code::Unavailable => Self::NotYet(status.message().to_owned()),
            // Not the agent's word: the connection failed. Each call has an id, and is done once.
            _ if std::error::Error::source(status).is_some() => Self::NotYet(status.message().to_owned()),
            _ => Self::Final(Status::internal(format_args!("{doing}: {}", status.message()))),
        }
    }
}

/// An error with everything that caused it.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(e) = next {
        text = format!("{text}: {e}");
        next = e.source();
    }
    text
}
