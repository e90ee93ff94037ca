//! The sessions of a leader with all node agents: one task a node dials, listens, and dials again.
//!
//! What it hears goes to the driver as [`Heard`]. An instruction whose session breaks settles as unknown; the machine asks
//! again from level.

use crate::session::{Session, SessionError};
use dashmap::DashMap;
use proto::{
    agent::{ControllerMessage, Inventory, agent_message, controller_message},
    transport::{Dial, Tls},
};
use state::{Epoch, LeaderInstance, NodeName};
use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{sync::mpsc, task::JoinHandle};

/// Wait after a session that could not be had; doubles up to [`RETRY_MAX`].
const RETRY: Duration = Duration::from_millis(200);
/// Longest wait between two attempts.
const RETRY_MAX: Duration = Duration::from_secs(5);

/// What a session tells the driver.
// Moved once into a step; a box would cost an allocation for nothing.
#[allow(clippy::large_enum_variant)]
#[derive(Debug)]
pub enum Heard {
    /// A session opened.
    Opened {
        /// With this node.
        node: NodeName,
        /// Its number, unique in this process.
        session: u64,
        /// What the agent has.
        inventory: Inventory,
    },
    /// A message came.
    Said {
        /// From this node.
        node: NodeName,
        /// By this session.
        session: u64,
        /// What.
        message: agent_message::Kind,
    },
    /// The session ended.
    Closed {
        /// With this node.
        node: NodeName,
        /// Its number.
        session: u64,
    },
    /// An agent knows a higher epoch than ours: read the Lease again.
    Outranked {
        /// The node.
        node: NodeName,
        /// The epoch that it knows.
        highest: Epoch,
    },
}

struct Open {
    number: u64,
    down: mpsc::Sender<ControllerMessage>,
}

/// All sessions of this leader.
pub struct Sessions {
    dial: Dial,
    tls: Tls,
    epoch: Epoch,
    instance: LeaderInstance,
    heard: mpsc::Sender<Heard>,
    open: DashMap<NodeName, Open>,
    tasks: std::sync::Mutex<BTreeMap<NodeName, (SocketAddr, JoinHandle<()>)>>,
    numbers: AtomicU64,
    lost: AtomicU64,
}

impl Sessions {
    /// How many are open, were opened, and ended though they were wanted.
    pub fn counts(&self) -> (usize, u64, u64) {
        (self.open.len(), self.numbers.load(Ordering::Relaxed), self.lost.load(Ordering::Relaxed))
    }

    /// No session yet; [`Sessions::node`] starts them.
    pub fn new(dial: Dial, tls: Tls, epoch: Epoch, instance: LeaderInstance, heard: mpsc::Sender<Heard>) -> Arc<Self> {
        Arc::new(Self {
            dial,
            tls,
            epoch,
            instance,
            heard,
            open: DashMap::new(),
            tasks: Default::default(),
            numbers: AtomicU64::new(0),
            lost: AtomicU64::new(0),
        })
    }

    /// A node says where its agent listens (`None`: nowhere any more).
    pub fn node(self: &Arc<Self>, node: NodeName, address: Option<SocketAddr>) {
        let mut tasks = self.tasks.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match address {
            Some(a) if tasks.get(&node).is_some_and(|(known, t)| *known == a && !t.is_finished()) => {}
            Some(a) => {
                let task = tokio::spawn(self.clone().serve(node.clone(), a));
                if let Some((_, old)) = tasks.insert(node, (a, task)) {
                    old.abort();
                }
            }
            None => {
                if let Some((_, old)) = tasks.remove(&node) {
                    old.abort();
                    if let Some((_, open)) = self.open.remove(&node) {
                        let heard = self.heard.clone();
                        // The queue may be full; the node is gone all the same.
                        tokio::spawn(async move { heard.send(Heard::Closed { node, session: open.number }).await });
                    }
                }
            }
        }
    }

    /// Sends a message by the current session; the number of that session, or `None` where there is none (or its agent does not
    /// take messages any more).
    pub fn send(&self, node: &NodeName, message: controller_message::Kind) -> Option<u64> {
        let open = self.open.get(node)?;
        open.down.try_send(ControllerMessage { kind: Some(message) }).ok()?;
        Some(open.number)
    }

    /// Ends all sessions.
    pub fn close(&self) {
        let tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        for (_, task) in tasks.into_values() {
            task.abort();
        }
        self.open.clear();
    }

    async fn serve(self: Arc<Self>, node: NodeName, address: SocketAddr) {
        let mut wait = RETRY;
        loop {
            let opened =
                Session::open(self.dial.clone(), &self.tls, node.as_str(), address, self.epoch, &self.instance).await;
            match opened {
                Ok(session) => {
                    wait = RETRY;
                    self.listen(&node, session).await;
                }
                Err(error) => {
                    tracing::info!(error = %chain(&error), retry_ms = wait.as_millis(), "no session");
                    if let SessionError::Refused { highest, .. } = error
                        && highest > self.epoch
                    {
                        let _ = self.heard.send(Heard::Outranked { node: node.clone(), highest }).await;
                    }
                }
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(RETRY_MAX);
        }
    }

    async fn listen(&self, node: &NodeName, mut session: Session) {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed) + 1;
        self.open.insert(node.clone(), Open { number, down: session.down.clone() });
        tracing::info!(%node, session = number, "session open");
        let inventory = std::mem::take(&mut session.inventory);
        let mut told = self.heard.send(Heard::Opened { node: node.clone(), session: number, inventory }).await;
        while told.is_ok() {
            match session.next().await {
                Ok(Some(message)) => {
                    told = self.heard.send(Heard::Said { node: node.clone(), session: number, message }).await;
                }
                Ok(None) => break,
                Err(error) => {
                    tracing::info!(error = %chain(&error), "session lost");
                    break;
                }
            }
        }
        self.lost.fetch_add(1, Ordering::Relaxed);
        self.open.remove_if(node, |_, o| o.number == number);
        let _ = self.heard.send(Heard::Closed { node: node.clone(), session: number }).await;
    }
}

/// An error with its causes.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(e) = next {
        text = format!("{text}: {e}");
        next = e.source();
    }
    text
}
