//! Answers "why": the cell as it is now, asked of the driver, and its history from the journal.
//!
//! The driver is asked by a message and answers with a copy of the cell; what is read and compared for the answer is done
//! by whoever asks, so that no question holds up a machine.

use crate::events;
use kube::{Client, api::ListParams};
use state::{
    Key, NodeName, Timestamp,
    explain::{self, Explanation, Story, Warning},
    journal::{CellKind, Entry, Piece, pieces},
    node::Node,
    set::Set,
    vm::Vm,
};
use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use telemetry::journal::{Flusher, segments};
use tokio::sync::{mpsc, oneshot};

/// Questions that may wait for the driver.
const QUESTIONS: usize = 64;
/// Objects whose Events are read for one answer.
const ASKS: usize = 8;
/// Events of one object that are read.
const EVENTS: u32 = 50;
/// The driver answers between two steps, which take microseconds.
const PATIENCE: Duration = Duration::from_secs(5);

/// What is asked about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// A VirtualMachine, or an instance that no machine made.
    Machine(Key),
    /// A VirtualMachineInstanceReplicaSet.
    Set(Key),
    /// A Node.
    Node(NodeName),
}

impl Subject {
    /// The object of that resource (the plural in its API path).
    pub fn of(resource: &str, namespace: &str, name: &str) -> Self {
        match resource {
            "nodes" => Self::Node(name.into()),
            "virtualmachineinstancereplicasets" => Self::Set(Key::new(namespace, name)),
            _ => Self::Machine(Key::new(namespace, name)),
        }
    }
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Machine(key) => key.fmt(f),
            Self::Set(key) => write!(f, "set {key}"),
            Self::Node(name) => write!(f, "node {name}"),
        }
    }
}

/// A copy of the cell that was asked about.
pub(crate) enum Cell {
    Machine(Box<Vm>),
    Set(Box<Set>),
    Node(Box<Node>),
}

/// A question to the driver.
pub(crate) struct Question {
    pub subject: Subject,
    pub answer: oneshot::Sender<Option<Cell>>,
}

/// Why there is no explanation.
#[derive(Debug, thiserror::Error)]
pub enum ExplainError {
    /// This process does not lead, so it knows no cell.
    #[error("the controller does not lead at the moment, so nobody knows what {0} waits for; it starts anew by itself")]
    NotLeading(Subject),
    /// Neither a cell nor a record.
    #[error("the controller has not seen {0} yet")]
    Unknown(Subject),
    /// The journal cannot be read.
    #[error("cannot read the journal")]
    Journal(#[from] io::Error),
}

#[derive(Clone)]
struct Leader {
    client: Client,
    ask: mpsc::Sender<Question>,
    flusher: Flusher,
    journal: Option<PathBuf>,
}

/// Asks the controller of this process. Cheap to clone; may be made before the controller runs, and outlives it.
#[derive(Clone, Default)]
pub struct Explainer(Arc<Mutex<Option<Leader>>>);

impl Explainer {
    /// The driver begins: where its questions come from.
    pub(crate) fn leads(&self, client: Client, flusher: Flusher, journal: Option<PathBuf>) -> mpsc::Receiver<Question> {
        let (ask, asked) = mpsc::channel(QUESTIONS);
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Leader { client, ask, flusher, journal });
        asked
    }

    /// The explanation of a machine, a set or a node.
    ///
    /// # Errors
    /// [`ExplainError`].
    pub async fn explain(&self, subject: &Subject) -> Result<Explanation, ExplainError> {
        let leader = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let not_leading = || ExplainError::NotLeading(subject.clone());
        let leader = leader.ok_or_else(not_leading)?;
        let (answer, answered) = oneshot::channel();
        let asked = async {
            leader.ask.send(Question { subject: subject.clone(), answer }).await.ok()?;
            answered.await.ok()
        };
        // A driver that has ended drops what it was asked.
        let cell = tokio::time::timeout(PATIENCE, asked).await.ok().flatten().ok_or_else(not_leading)?;
        let now = Timestamp(telemetry::clock::now());
        let (key, cell) = match (subject, cell) {
            (_, Some(Cell::Set(cell))) => return Ok(explain::groups::set(&cell, now)),
            (_, Some(Cell::Node(cell))) => return Ok(explain::groups::node(&cell, now)),
            (Subject::Machine(key), Some(Cell::Machine(cell))) => (key, Some(cell)),
            (Subject::Machine(key), None) => (key, None),
            (Subject::Set(_) | Subject::Node(_), _) => return Err(ExplainError::Unknown(subject.clone())),
        };
        let (story, gaps) = match leader.journal {
            Some(dir) => {
                let (key, flusher) = (key.clone(), leader.flusher);
                let read = tokio::task::spawn_blocking(move || {
                    flusher.flush();
                    journal(&dir, &key)
                });
                read.await.map_err(io::Error::other)??
            }
            None => (Story::new(key.clone()), vec!["there is no journal: only what the objects keep is told".into()]),
        };
        if cell.is_none() && story.is_empty() {
            return Err(ExplainError::Unknown(subject.clone()));
        }
        let mut explanation = Explanation::new(key, story, cell.as_deref(), now);
        explanation.gaps.extend(gaps);
        let mut warnings = vec![];
        for (kind, name) in explanation.asks.iter().take(ASKS) {
            match tokio::time::timeout(PATIENCE, warned(&leader.client, &key.namespace, kind, name)).await {
                Ok(Ok(said)) => warnings.extend(said),
                Ok(Err(error)) => {
                    tracing::info!(%key, kind, name, %error, "the Events cannot be read");
                    explanation.gaps.push(format!("the Events of {kind} {name} could not be read"));
                }
                Err(_) => explanation.gaps.push(format!("the Events of {kind} {name} were not answered in time")),
            }
        }
        explanation.hear(warnings);
        Ok(explanation)
    }
}

/// The Warnings about an object.
async fn warned(client: &Client, namespace: &str, kind: &str, name: &str) -> kube::Result<Vec<Warning>> {
    let fields = format!("involvedObject.kind={kind},involvedObject.name={name}");
    let found =
        events::api(client.clone(), namespace).list(&ListParams::default().fields(&fields).limit(EVENTS)).await?;
    let warnings = found.items.into_iter().map(|e| e.data).filter(|e| e["type"] == "Warning").map(|e| {
        let text = |key: &str| e[key].as_str().unwrap_or_default().to_owned();
        let last = ["lastTimestamp", "eventTime", "firstTimestamp"].iter().find_map(|k| Timestamp::parse(&text(k)));
        Warning {
            kind: kind.into(),
            name: name.into(),
            reason: text("reason"),
            message: text("message"),
            last: last.unwrap_or_default(),
        }
    });
    Ok(warnings.collect())
}

/// How the lines of a cell's records begin: others are not read any further.
fn beginning(cell: &str) -> Vec<u8> {
    let cell = serde_json::Value::from(cell);
    format!("{{\"{}\":{{\"cell\":{cell},", CellKind::Vm.name()).into_bytes()
}

/// The story of a cell from the journals below a folder, and what it may be missing.
///
/// # Errors
/// The folder cannot be read.
pub fn journal(dir: &Path, key: &Key) -> io::Result<(Story, Vec<String>)> {
    let (mut story, mut gaps) = (Story::new(key.clone()), vec![]);
    let begins = beginning(&key.to_string());
    let mut process = String::new();
    for path in segments(dir)? {
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            // Old segments are removed at any time.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e),
        };
        let place = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        for piece in pieces(&bytes) {
            let block = match piece {
                Piece::Block(block) => block,
                Piece::Damage { bytes, .. } => {
                    gaps.push(format!("{bytes} bytes of the journal ({place}) are damaged"));
                    continue;
                }
            };
            if block.head.lost > 0 {
                gaps.push(format!("{} records of the journal were dropped before {place}", block.head.lost));
            }
            for line in block.raw().filter(|l| l.starts_with(&begins)) {
                match serde_json::from_slice(line) {
                    Ok(Entry::Vm(record)) => {
                        let first = block.head.process != process;
                        process.clone_from(&block.head.process);
                        story.step(record.state.as_ref(), first, &record.event);
                    }
                    Ok(Entry::Node(_) | Entry::Agent(_) | Entry::Set(_)) => {}
                    Err(_) => gaps.push(format!("a record in {place} was written by another version and is not told")),
                }
            }
        }
    }
    gaps.dedup();
    Ok((story, gaps))
}

/// The machine that a launcher pod belongs to, by the journals below a folder.
///
/// # Errors
/// The folder cannot be read.
pub fn find(dir: &Path, namespace: &str, pod: &str) -> io::Result<Option<Key>> {
    let begins = format!("{{\"{}\":{{\"cell\":\"{namespace}/", CellKind::Vm.name()).into_bytes();
    let name = format!("\"name\":{}", serde_json::Value::from(pod)).into_bytes();
    for path in segments(dir)? {
        let bytes = std::fs::read(&path)?;
        for piece in pieces(&bytes) {
            let Piece::Block(block) = piece else { continue };
            for line in block.raw().filter(|l| l.starts_with(&begins)) {
                if line.windows(name.len()).any(|w| w == name)
                    && let Ok(Entry::Vm(record)) = serde_json::from_slice(line)
                    && let Some((namespace, name)) = record.cell.split_once('/')
                {
                    return Ok(Some(Key::new(namespace, name)));
                }
            }
        }
    }
    Ok(None)
}
