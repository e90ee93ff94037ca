//! Objects as the machines name them, and how a command on one of them can end.

use crate::{Millis, ResourceVersion, Uid, instancetype::Role};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Kinds that the machines write or read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// `kubevirt.io/v1` VirtualMachine.
    VirtualMachine,
    /// `kubevirt.io/v1` VirtualMachineInstance.
    VirtualMachineInstance,
    /// `kubevirt.io/v1` VirtualMachineInstanceReplicaSet.
    VirtualMachineInstanceReplicaSet,
    /// `v1` Pod.
    Pod,
    /// `apps/v1` ControllerRevision.
    ControllerRevision,
    /// `v1` PersistentVolumeClaim.
    PersistentVolumeClaim,
    /// `v1` Node.
    Node,
    /// `instancetype.kubevirt.io/v1beta1`, one of four.
    Pattern(Pattern),
}

/// Kinds of `instancetype.kubevirt.io`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Pattern {
    /// VirtualMachineInstancetype.
    Instancetype,
    /// VirtualMachineClusterInstancetype.
    ClusterInstancetype,
    /// VirtualMachinePreference.
    Preference,
    /// VirtualMachineClusterPreference.
    ClusterPreference,
}

impl Pattern {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::Instancetype, Self::ClusterInstancetype, Self::Preference, Self::ClusterPreference];
    /// Their group.
    pub const GROUP: &str = "instancetype.kubevirt.io";
    /// Their version.
    pub const VERSION: &str = "v1beta1";

    /// The kind's name in manifests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Instancetype => "VirtualMachineInstancetype",
            Self::ClusterInstancetype => "VirtualMachineClusterInstancetype",
            Self::Preference => "VirtualMachinePreference",
            Self::ClusterPreference => "VirtualMachineClusterPreference",
        }
    }

    /// The kind's name in paths.
    pub const fn plural(self) -> &'static str {
        match self {
            Self::Instancetype => "virtualmachineinstancetypes",
            Self::ClusterInstancetype => "virtualmachineclusterinstancetypes",
            Self::Preference => "virtualmachinepreferences",
            Self::ClusterPreference => "virtualmachineclusterpreferences",
        }
    }

    /// It lives in a namespace.
    pub fn namespaced(self) -> bool {
        match self {
            Self::Instancetype | Self::Preference => true,
            Self::ClusterInstancetype | Self::ClusterPreference => false,
        }
    }

    /// What it is to a machine.
    pub fn role(self) -> Role {
        match self {
            Self::Instancetype | Self::ClusterInstancetype => Role::Instancetype,
            Self::Preference | Self::ClusterPreference => Role::Preference,
        }
    }
}

impl Kind {
    /// The kind's name in manifests.
    pub fn name(self) -> &'static str {
        match self {
            Self::VirtualMachine => "VirtualMachine",
            Self::VirtualMachineInstance => "VirtualMachineInstance",
            Self::VirtualMachineInstanceReplicaSet => "VirtualMachineInstanceReplicaSet",
            Self::Pod => "Pod",
            Self::ControllerRevision => "ControllerRevision",
            Self::PersistentVolumeClaim => "PersistentVolumeClaim",
            Self::Node => "Node",
            Self::Pattern(p) => p.name(),
        }
    }
}

/// Names one object; with an empty UID, whatever has that name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ObjectRef {
    /// Kind.
    pub kind: Kind,
    /// Namespace; empty for cluster-scoped objects.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: Uid,
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.kind.name(), self.namespace, self.name)
    }
}

/// Numbers a cell's commands, so that an outcome finds its command.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CommandId(pub u64);

/// How urgent a write is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Class {
    /// On somebody's critical path.
    Urgent,
    /// Has waited a second already and may wait for all urgent ones.
    Lazy,
}

/// A write that the API server did not like.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// HTTP code.
    pub code: u16,
    /// The Status's reason.
    pub reason: String,
    /// For people; never a text that may quote the object (422).
    pub message: String,
}

/// How a command ended. `O` is an object's projection.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Settled<O> {
    /// Done (or, for a read: answered); the object as it is now, where the server sent it.
    Applied(Option<O>),
    /// A precondition did not hold, or the name is taken.
    Conflict,
    /// Not there.
    Gone,
    /// Will not be done as it stands.
    Refused(Refusal),
    /// Not now.
    Busy {
        /// Ask again after.
        after: Millis,
    },
    /// It may or may not have been done.
    Unknown,
    /// The same, and the server said that it failed (5xx), and why.
    Failed(Refusal),
    /// A node agent's answer to an instruction.
    Acked(crate::domain::AckResult),
}

impl<O> Settled<O> {
    /// The same with another projection of the object.
    pub fn map<P>(self, project: impl FnOnce(O) -> Option<P>) -> Settled<P> {
        match self {
            Self::Applied(o) => Settled::Applied(o.and_then(project)),
            Self::Conflict => Settled::Conflict,
            Self::Gone => Settled::Gone,
            Self::Refused(r) => Settled::Refused(r),
            Self::Busy { after } => Settled::Busy { after },
            Self::Unknown => Settled::Unknown,
            Self::Failed(r) => Settled::Failed(r),
            Self::Acked(a) => Settled::Acked(a),
        }
    }
}

/// What a slot needs to know of a projection.
pub trait Versioned {
    /// UID.
    fn uid(&self) -> &Uid;
    /// resourceVersion.
    fn rv(&self) -> ResourceVersion;
}
