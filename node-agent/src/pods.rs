//! What the agent needs to know from whoever runs pods on its node.

use std::net::IpAddr;
use std::path::PathBuf;

/// A launcher pod on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodFacts {
    /// UID of the pod.
    pub pod_uid: String,
    /// UID of the VMI that it was made for.
    pub vmi_uid: String,
    /// Namespace of both.
    pub namespace: String,
    /// Name of the pod.
    pub pod_name: String,
    /// Name of the VMI.
    pub vmi_name: String,
    /// The folder shared with the launcher, as seen from here.
    pub share_dir: PathBuf,
    /// The pod's network namespace (a file for `setns`).
    pub netns: PathBuf,
    /// The pod's addresses.
    pub ips: Vec<IpAddr>,
    /// The launcher's container runs. False only where that is proven: it has not been started yet, or has ended.
    pub running: bool,
}

/// Whoever runs pods on this node.
pub trait PodSource: Send + Sync + 'static {
    /// All launcher pods that are not completely gone.
    fn pods(&self) -> Vec<PodFacts>;

    /// Changes whenever [`PodSource::pods`] does. Zero until everything was enumerated once: an inventory is complete only
    /// after that.
    fn changed(&self) -> tokio::sync::watch::Receiver<u64>;
}
