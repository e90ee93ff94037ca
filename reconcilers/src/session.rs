//! One session with one node agent: Hello, then instructions down, reports up.
//!
//! Losing a session loses nothing: both sides start again from level (`Inventory` up, instructions planned anew down).

use proto::{
    agent::{
        AgentMessage, ControllerMessage, Hello, Inventory, agent_message, controller_message,
        node_agent_client::NodeAgentClient,
    },
    transport::{Dial, Tls, channel},
};
use state::{Epoch, LeaderInstance};
use std::{net::SocketAddr, time::Duration};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

/// Messages that may wait for a slow agent before the session counts as dead.
const QUEUE: usize = 1024;
/// Time for the agent to answer Hello and to enumerate its launchers.
const HELLO: Duration = Duration::from_secs(10);

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// Not reached, or it is not the node that its certificate should name.
    #[error("cannot reach the agent of node {node} at {address}")]
    Unreachable {
        /// The node.
        node: String,
        /// Where it said it is.
        address: SocketAddr,
        /// Why.
        #[source]
        source: tonic::transport::Error,
    },
    /// The stream broke.
    #[error("session with node {node} ended")]
    Ended {
        /// The node.
        node: String,
        /// Why.
        #[source]
        source: Box<tonic::Status>,
    },
    /// The agent knows a newer leader, or speaks another protocol.
    #[error("agent of node {node} refuses epoch {epoch}: {why} (it knows {highest})")]
    Refused {
        /// The node.
        node: String,
        /// Ours.
        epoch: Epoch,
        /// The highest that the agent accepted.
        highest: Epoch,
        /// In the agent's words.
        why: String,
    },
    /// The agent broke the protocol or did not answer in time.
    #[error("agent of node {node}: {what}")]
    Protocol {
        /// The node.
        node: String,
        /// What happened.
        what: &'static str,
    },
}

/// An open session.
#[derive(Debug)]
pub struct Session {
    /// Node that it is with.
    pub node: String,
    /// What the agent had when the session opened.
    pub inventory: Inventory,
    /// Towards the agent.
    pub down: mpsc::Sender<ControllerMessage>,
    up: Streaming<AgentMessage>,
}

impl Session {
    /// Dials, says Hello, and waits for the complete inventory.
    pub async fn open(
        dial: Dial,
        tls: &Tls,
        node: &str,
        address: SocketAddr,
        epoch: Epoch,
        instance: &LeaderInstance,
    ) -> Result<Self, SessionError> {
        let channel = channel(dial, tls, node, address).await.map_err(|source| SessionError::Unreachable {
            node: node.to_owned(),
            address,
            source,
        })?;
        let protocol = |what| SessionError::Protocol { node: node.to_owned(), what };
        let ended = |s: tonic::Status| SessionError::Ended { node: node.to_owned(), source: Box::new(s) };

        let (down, messages) = mpsc::channel(QUEUE);
        let hello = Hello {
            epoch: epoch.0,
            leader_instance: instance.to_string(),
            proto_min: proto::PROTOCOL.0,
            proto_max: proto::PROTOCOL.1,
            config_digest: String::new(),
        };
        let first = ControllerMessage { kind: Some(controller_message::Kind::Hello(hello)) };
        down.send(first).await.map_err(|_| protocol("session closed before Hello"))?;
        let opening = async {
            let mut up =
                NodeAgentClient::new(channel).session(ReceiverStream::new(messages)).await.map_err(ended)?.into_inner();
            let Some(agent_message::Kind::Hello(reply)) = up.message().await.map_err(ended)?.and_then(|m| m.kind)
            else {
                return Err(protocol("answered Hello with something else"));
            };
            if !reply.accepted {
                return Err(SessionError::Refused {
                    node: node.to_owned(),
                    epoch,
                    highest: Epoch(reply.highest_epoch),
                    why: reply.refused,
                });
            }
            let Some(agent_message::Kind::Inventory(inventory)) =
                up.message().await.map_err(ended)?.and_then(|m| m.kind)
            else {
                return Err(protocol("sent no inventory"));
            };
            Ok((up, inventory))
        };
        let (up, inventory) =
            tokio::time::timeout(HELLO, opening).await.map_err(|_| protocol("did not answer Hello in time"))??;
        if inventory.node != node {
            return Err(protocol("its inventory is of another node"));
        }
        Ok(Self { node: node.to_owned(), inventory, down, up })
    }

    /// The next message; `None` when the agent closed the session.
    pub async fn next(&mut self) -> Result<Option<agent_message::Kind>, SessionError> {
        loop {
            match self.up.message().await {
                // A kind that a newer agent has and we do not know.
                Ok(Some(AgentMessage { kind: None })) => {}
                Ok(Some(AgentMessage { kind })) => return Ok(kind),
                Ok(None) => return Ok(None),
                Err(source) => {
                    return Err(SessionError::Ended { node: self.node.clone(), source: Box::new(source) });
                }
            }
        }
    }
}
