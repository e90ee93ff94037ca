//! What can happen to a Vm cell and what it can ask for.

use crate::{
    NodeName, PodUid, ResourceVersion, Timestamp, Uid, VmUid, VmiUid,
    domain::{Domain, Instruction, Outcome},
    instancetype::Role,
    object::{Class, CommandId, Kind, ObjectRef, Settled},
    observe::Object,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::Arc;

/// What can happen to a Vm cell.
// Moved once into a step; a box would cost an allocation for nothing.
#[allow(clippy::large_enum_variant)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Input {
    /// An object was seen.
    Observed(Sight),
    /// A node agent's word.
    Reported(Report),
    /// A command of ours ended.
    Settled {
        /// Which.
        id: CommandId,
        /// How.
        result: Settled<Object>,
    },
    /// A deadline that we asked for has come.
    Elapsed,
    /// Configuration, or a fact of another cell, changed.
    Configured(Fact),
}

impl Input {
    /// What happened, in a word or two: `Pod observed`.
    pub fn name(&self) -> String {
        match self {
            Self::Observed(Sight::Present(o)) => format!("{} observed", o.reference().kind.name()),
            Self::Observed(Sight::Gone(r)) => format!("{} gone", r.kind.name()),
            Self::Observed(Sight::Vanished(r)) => format!("{} vanished", r.kind.name()),
            Self::Reported(Report::Domain { domain, .. }) => format!("domain {:?}", domain.state),
            Self::Reported(Report::Outcome { outcome, .. }) => format!("outcome {}", outcome.cause.name()),
            Self::Reported(Report::Inventory { .. }) => "inventory told".into(),
            Self::Settled { .. } => "command settled".into(),
            Self::Elapsed => "deadline elapsed".into(),
            Self::Configured(Fact::Cluster(_)) => "cluster configured".into(),
            Self::Configured(Fact::Node(_)) => "node fact changed".into(),
        }
    }
}

/// An object as a watch, a list or a live read showed it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Sight {
    /// It is there.
    Present(Object),
    /// The watch said that this UID was deleted; for a claim also: it is not in the cache.
    Gone(ObjectRef),
    /// A new list does not have it. Lists may be stale, so this is a reason to ask, not evidence.
    Vanished(ObjectRef),
}

/// A node agent's word about this cell's domain.
// Moved once into a step; a box would cost an allocation for nothing.
#[allow(clippy::large_enum_variant)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Report {
    /// A domain's state.
    Domain {
        /// Node that says so.
        node: NodeName,
        /// The domain.
        domain: Arc<Domain>,
    },
    /// How a domain ended.
    Outcome {
        /// Node that says so.
        node: NodeName,
        /// The outcome.
        outcome: Outcome,
    },
    /// The agent has told all domains that it has (`complete`) or is still looking.
    Inventory {
        /// Node.
        node: NodeName,
        /// Number of the session that it came by.
        session: u64,
        /// Everything was enumerated.
        complete: bool,
        /// How far the agent's own watch of VMIs had come.
        reflector_rv: ResourceVersion,
        /// The node's boot: nothing of an earlier one is left.
        boot_id: String,
    },
}

/// Configuration of the cluster, as far as rendering needs it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterConfig {
    /// Image of the launcher.
    pub launcher_image: String,
    /// Since when this process leads.
    #[serde(default)]
    pub reign: crate::trace::Reign,
}

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            launcher_image: concat!("virtfold/launcher:", env!("CARGO_PKG_VERSION")).into(),
            reign: Default::default(),
        }
    }
}

/// What a Node cell tells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeFact {
    /// Node.
    pub node: NodeName,
    /// Kubernetes thinks that it is ready.
    pub ready: bool,
    /// Number of the session with its agent, where there is one.
    pub session: Option<u64>,
    /// Since when there is no session.
    pub silent_since: Option<Timestamp>,
    /// Version of the Node object that proves it fenced: not ready and tainted out-of-service.
    pub fenced: Option<ResourceVersion>,
    /// The Node object was deleted, which proves nothing about what runs there.
    #[serde(default)]
    pub gone: bool,
}

/// Configuration, or a fact of another cell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fact {
    /// The cluster's configuration.
    Cluster(ClusterConfig),
    /// A node.
    Node(NodeFact),
}

/// What a cell wants to be told of beside its own objects.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Interest {
    /// A claim of the cell's namespace: whether it is there.
    Claim(String),
    /// A node's fact.
    Node(NodeName),
}

/// The object that something is rendered from; another version of it is a conflict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Which.
    pub object: ObjectRef,
    /// At what version.
    pub rv: ResourceVersion,
}

/// What to make of the source ([`crate::render`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Recipe {
    /// A VMI from a VM.
    Vmi {
        /// Trace context of the request that asks for it; else it is that of the VM's spec.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cause: Option<Box<str>>,
        /// When the start began.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        began: Option<Timestamp>,
        /// VM.
        vm: VmUid,
        /// Name of the revision that records the VM's spec.
        revision: String,
        /// vCPUs stay stopped.
        paused: bool,
        /// Of the phase.
        at: Timestamp,
        /// Name of the record of its instancetype.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        instancetype: Option<String>,
        /// Name of the record of its preference.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        preference: Option<String>,
    },
    /// A launcher pod from a VMI.
    Pod {
        /// VMI.
        vmi: VmiUid,
        /// Image.
        image: String,
    },
    /// An instance of a set.
    Member {
        /// Set.
        set: Uid,
    },
    /// A ControllerRevision from a VM.
    Revision {
        /// VM.
        vm: VmUid,
        /// Generation.
        generation: i64,
    },
    /// A ControllerRevision of a VM from an instancetype or a preference.
    Pattern {
        /// VM.
        vm: VmUid,
        /// The VM's name.
        name: String,
    },
}

impl Recipe {
    /// The ControllerRevisions that are needed beside the source, in the order in which rendering wants them.
    pub fn inputs(&self) -> Vec<(Role, &str)> {
        match self {
            Self::Vmi { instancetype, preference, .. } => {
                let both = [(Role::Instancetype, instancetype), (Role::Preference, preference)];
                both.into_iter().filter_map(|(role, name)| Some((role, name.as_deref()?))).collect()
            }
            Self::Pod { .. } | Self::Member { .. } | Self::Revision { .. } | Self::Pattern { .. } => vec![],
        }
    }
}

/// A merge patch. The body names the UID, and the resourceVersion where it replaces what was read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Patch {
    /// What.
    pub target: ObjectRef,
    /// Of the status subresource.
    pub status: bool,
    /// How urgent.
    pub class: Class,
    /// In a word, for journal and spans.
    pub why: String,
    /// The patch.
    pub body: Value,
}

/// What is sent to a node agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// An instruction.
    Do(Instruction),
    /// The outcome is recorded; forget it.
    Acknowledge {
        /// Launcher pod.
        pod: PodUid,
        /// The outcome's sequence.
        seq: u64,
    },
}

/// A Kubernetes Event for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// About what.
    pub about: ObjectRef,
    /// `Warning` instead of `Normal`.
    pub warning: bool,
    /// CamelCase.
    pub reason: String,
    /// In words.
    pub message: String,
}

/// What a Vm cell can ask for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Create what the recipe makes of the source.
    Create {
        /// Id.
        id: CommandId,
        /// How.
        recipe: Recipe,
        /// From what.
        source: Source,
        /// The name that it will have.
        target: ObjectRef,
    },
    /// Patch.
    Patch {
        /// Id.
        id: CommandId,
        /// How.
        patch: Patch,
    },
    /// Delete, with the UID as precondition.
    Delete {
        /// Id.
        id: CommandId,
        /// What. An empty UID is allowed for names that are derived.
        target: ObjectRef,
    },
    /// Read it live (quorum), whatever UID has that name.
    Confirm {
        /// Id.
        id: CommandId,
        /// What.
        target: ObjectRef,
    },
    /// Read all objects of a kind that a selector chooses, live (quorum). Set cells alone ask for it, and get
    /// [`crate::set::Sight::All`].
    Survey {
        /// Id.
        id: CommandId,
        /// Kind.
        kind: Kind,
        /// Namespace.
        namespace: String,
        /// The selector as text.
        selector: String,
    },
    /// Tell a node agent.
    Instruct {
        /// Id.
        id: CommandId,
        /// Which node.
        node: NodeName,
        /// What.
        order: Order,
    },
    /// Write an Event.
    Note(Note),
    /// Send [`Input::Elapsed`] at this time. Replaces the earlier one.
    Wake {
        /// When.
        at: Timestamp,
    },
}

impl Command {
    /// Its id, where an answer is expected.
    pub fn id(&self) -> Option<CommandId> {
        match self {
            Self::Create { id, .. }
            | Self::Patch { id, .. }
            | Self::Delete { id, .. }
            | Self::Confirm { id, .. }
            | Self::Survey { id, .. }
            | Self::Instruct { id, .. } => Some(*id),
            Self::Note(_) | Self::Wake { .. } => None,
        }
    }
}

/// UID of the VM or VMI that a note is about, for the bucket.
pub fn note_key(n: &Note) -> (&Uid, &str) {
    (&n.about.uid, &n.reason)
}
