//! The cluster's network: a bridge in a namespace, and one namespace with a bridge per node.

use embedded::netns::{Netns, NetnsError};

use super::layout::{API, BRIDGE, Layout, Node, PREFIX};

/// Makes the cluster's namespace.
pub async fn cluster(layout: &Layout) -> Result<Netns, NetnsError> {
    let netns = Netns::create(layout.cluster_netns().name()).await?;
    netns.bridge(BRIDGE, &format!("{}/{PREFIX}", API.ip())).await?;
    Ok(netns)
}

/// Makes a node's namespace and joins it to the cluster's.
pub async fn node(cluster: &Netns, node: &Node) -> Result<Netns, NetnsError> {
    let netns = Netns::create(&node.netns).await?;
    netns.bridge(BRIDGE, &format!("{}/{PREFIX}", node.address())).await?;
    cluster.plug(BRIDGE, &format!("node{}", node.number), &netns, "eth0").await?;
    netns.enslave("eth0", BRIDGE).await?;
    Ok(netns)
}
