//! The network of a pod: a namespace of its own, joined to its node's bridge.

use std::net::Ipv4Addr;

use crate::netns::{Netns, NetnsError};

/// The node's side of the pods' network.
#[derive(Debug, Clone)]
pub struct Network {
    /// Name of the node's network namespace.
    pub node_netns: String,
    /// Its bridge.
    pub bridge: String,
    /// The node's address on it.
    pub node_address: Ipv4Addr,
    /// The node's range for pods: any address of it.
    pub base: Ipv4Addr,
    /// Prefix length of that range.
    pub prefix: u8,
    /// Prefix length of the cluster's network.
    pub cluster_prefix: u8,
    /// Default route of the pods.
    pub gateway: Ipv4Addr,
}

/// The port of a pod on the bridge; a name of an interface has 15 bytes at most.
pub(super) fn port(pod_uid: &str) -> String {
    let id: String = pod_uid.chars().filter(char::is_ascii_alphanumeric).take(12).collect();
    format!("v{id}")
}

/// Makes the namespace with its address, again if need be.
pub(super) async fn create(
    name: &str,
    pod_uid: &str,
    address: Ipv4Addr,
    network: &Network,
) -> Result<Netns, NetnsError> {
    let pod = Netns::create(name).await?;
    let node = Netns::named(&network.node_netns);
    node.plug(&network.bridge, &port(pod_uid), &pod, "eth0").await?;
    pod.address("eth0", &format!("{address}/{}", network.cluster_prefix)).await?;
    ip(&["-n", name, "route", "replace", "default", "via", &network.gateway.to_string()]).await?;
    Ok(pod)
}

/// Takes it away. The pair of interfaces goes first: whoever still holds a socket in there keeps the namespace, not the address.
pub(super) async fn remove(name: &str, pod_uid: &str, network: &Network) -> Result<(), NetnsError> {
    if Netns::named(&network.node_netns).exists() {
        match ip(&["-n", &network.node_netns, "link", "del", &port(pod_uid)]).await {
            Err(NetnsError::Ip { message, .. }) if message.contains("Cannot find device") => {}
            other => other?,
        }
    }
    Netns::named(name).remove().await
}

async fn ip(arguments: &[&str]) -> Result<(), NetnsError> {
    let output = tokio::process::Command::new("ip")
        .args(arguments)
        .stdin(std::process::Stdio::null())
        .output()
        .await
        .map_err(NetnsError::NoIp)?;
    if output.status.success() {
        return Ok(());
    }
    Err(NetnsError::Ip {
        command: arguments.join(" "),
        message: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}
