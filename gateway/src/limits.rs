//! Every bound of the gateway, with its reason.

use std::time::Duration;

/// Bodies of subresource requests are options of a few fields.
pub const BODY: usize = 1 << 20;
/// Rounds in which an answer may ask for further objects; the longest chain is a volume's over its DataVolume and DataSource.
pub const LOOKUPS: usize = 8;
/// How often a change is decided anew because the object changed meanwhile; the controller writes a VM a few times a second.
pub const CONFLICTS: u32 = 8;
/// Reaching an agent: a node that does not answer in this time is told as such.
pub const CONNECT: Duration = Duration::from_secs(5);
/// How long whoever asks waits for an agent that is being started again, or that has not found its launchers yet. A second
/// or two is usual; a busy machine takes longer, and a person would rather wait than ask again.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// Pause between two tries.
pub const AGAIN: Duration = Duration::from_millis(100);
/// A verb's time at the agent, as KubeVirt's client has; freezing a guest's file systems may take most of it.
pub const VERB: Duration = Duration::from_secs(10);
/// Dialling a port of a guest.
pub const PORT: Duration = Duration::from_secs(10);
/// Bytes in a websocket frame, as KubeVirt's bridge sends them.
pub const FRAME: usize = 10240;
/// The largest datagram.
pub const DATAGRAM: usize = 1 << 16;
/// The largest frame taken from a client. A terminal sends a few bytes, a port forward what its buffer holds.
pub const INCOMING: usize = 1 << 20;
/// Chunks in flight between a client and an agent, in each direction: flow control does the rest.
pub const CHUNKS: usize = 8;
/// A port forward's keep-alive.
pub const PING: Duration = Duration::from_secs(1);
/// How long one side of a stream may take to end after the other.
pub const FAREWELL: Duration = Duration::from_secs(2);
/// A client that was silent for this long, pongs included, is gone.
pub const SILENCE: Duration = Duration::from_secs(60);
/// The API server's answer.
pub const API: Duration = Duration::from_secs(15);
/// The body of an AdmissionReview: two objects, of which etcd takes 1.5 MiB each, and what is written around them.
pub const REVIEW: usize = 8 << 20;
/// How often is read who the aggregation layer is; its authority changes once in years.
pub const FRONT: Duration = Duration::from_secs(60);
/// How often the registration is looked at, which somebody may have written over.
pub const REGISTERED: Duration = Duration::from_secs(30);
/// An explanation is some text for each thing that happened to a machine.
pub const EXPLANATION: usize = 32 << 20;
/// The leader reads journals and Events before it answers.
pub const EXPLAIN: Duration = Duration::from_secs(30);
/// What the machines of a node use: the agent gives each launcher five seconds.
pub const USAGE: Duration = Duration::from_secs(6);
/// Nodes that are asked for it at once.
pub const USAGE_AT_ONCE: usize = 64;
