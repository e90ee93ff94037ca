//! Node agents: one mTLS channel each, made when first needed. Verbs are carried out at most once, so nothing is retried.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

use proto::agent::node_agent_client::NodeAgentClient;
use proto::agent::{StreamChunk, StreamOpen, VerbReply, VerbRequest};
use serde_json::Value;
use tokio::sync::mpsc;
use tonic::transport::Channel;

use crate::admission::text;
use crate::{Dial, Tls, kubernetes, limits, status::Status};

/// Where a running instance is, as its VMI and its node say.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub vmi_uid: String,
    pub pod_uid: String,
    pub node: String,
    pub address: String,
}

/// Channels to agents by (node, address).
pub(crate) struct Agents {
    dial: Dial,
    tls: Tls,
    channels: Mutex<BTreeMap<(String, String), Channel>>,
}

impl std::fmt::Debug for Agents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agents").finish_non_exhaustive()
    }
}

impl Agents {
    pub fn new(dial: Dial, tls: Tls) -> Self {
        Self { dial, tls, channels: Mutex::default() }
    }

    /// Finds the node agent and the pod of an instance.
    pub async fn place(&self, client: &kube::Client, vmi: &Value) -> Result<Place, Status> {
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

    async fn channel(&self, place: &Place) -> Result<NodeAgentClient<Channel>, Status> {
        let key = (place.node.clone(), place.address.clone());
        if let Some(c) = self.channels.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(NodeAgentClient::new(c.clone()));
        }
        let Ok(address) = place.address.parse::<SocketAddr>() else {
            return Err(Status::internal(format_args!(
                "node {:?} has an agent at {:?}, which is not an address",
                place.node, place.address
            )));
        };
        let channel =
            proto::transport::channel(self.dial.clone(), &self.tls, &place.node, address).await.map_err(|e| {
                Status::internal(format_args!("node agent of {:?} at {address}: {}", place.node, chain(&e)))
            })?;
        let mut all = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        // An address that the node had before is of no use.
        all.retain(|(node, _), _| *node != key.0);
        all.insert(key, channel.clone());
        Ok(NodeAgentClient::new(channel))
    }

    /// Sends a verb and waits for its result.
    pub async fn verb(
        &self,
        place: &Place,
        verb: &str,
        body: Vec<u8>,
        traceparent: String,
    ) -> Result<VerbReply, Status> {
        let request = VerbRequest {
            id: uuid::Uuid::new_v4().to_string(),
            vmi_uid: place.vmi_uid.clone(),
            pod_uid: place.pod_uid.clone(),
            verb: verb.into(),
            body: body.into(),
            ttl_ms: u64::try_from(limits::VERB.as_millis()).unwrap_or(u64::MAX),
            traceparent,
        };
        let mut client = self.channel(place).await?;
        let answer = tokio::time::timeout(limits::VERB + limits::CONNECT, client.verb(request)).await;
        match answer {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(s)) => Err(Status::internal(format_args!("node agent of {:?}: {}", place.node, s.message()))),
            Err(_) => Err(Status::new(
                504,
                "Timeout",
                format!("node agent of {:?} gave no answer; whether {verb} was done is not known", place.node),
            )),
        }
    }

    /// Opens a byte stream to the console or VNC server: what to send into, and what comes.
    pub async fn stream(
        &self,
        place: &Place,
        device: &str,
        preserve_session: bool,
    ) -> Result<(mpsc::Sender<StreamChunk>, tonic::Streaming<StreamChunk>), Status> {
        let (send, chunks) = mpsc::channel(limits::CHUNKS);
        let open = StreamOpen {
            vmi_uid: place.vmi_uid.clone(),
            pod_uid: place.pod_uid.clone(),
            device: device.into(),
            preserve_session,
        };
        let first = StreamChunk { open: Some(open), data: bytes::Bytes::new() };
        send.try_send(first).map_err(Status::internal)?;
        let up = futures::stream::unfold(chunks, |mut c| async move { c.recv().await.map(|chunk| (chunk, c)) });
        let mut client = self.channel(place).await?;
        let answer = tokio::time::timeout(limits::CONNECT, client.stream(up)).await;
        match answer {
            Ok(Ok(down)) => Ok((send, down.into_inner())),
            Ok(Err(s)) if s.code() == tonic::Code::InvalidArgument || s.code() == tonic::Code::FailedPrecondition => {
                Err(Status::bad_request(s.message()))
            }
            Ok(Err(s)) => {
                Err(Status::internal(format_args!("opening {device} on node {:?}: {}", place.node, s.message())))
            }
            Err(_) => Err(Status::internal(format_args!("opening {device} on node {:?}: no answer", place.node))),
        }
    }
}

/// An error with everything that caused it.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(e) = next {
        text = format!("{text}: {e}");
        next = e.source();
    }
    text
}
