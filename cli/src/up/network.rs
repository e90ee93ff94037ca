//! The cluster's network: a bridge in a namespace, and one namespace with a bridge per node.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::Context;
use embedded::netns::{Netns, NetnsError};
use proto::transport::Dial;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

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

/// Where node agents reach the collector of traces inside of the cluster, at the port that it has outside.
const COLLECTOR: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 244, 0, 1));

/// Lets node agents, whose network is not the machine's, reach the collector, a host and a port: connections to the returned address
/// go on to it for as long as this process lives.
pub async fn relay(netns: &Netns, (host, port): (String, u16)) -> anyhow::Result<SocketAddr> {
    let address = SocketAddr::new(COLLECTOR, port);
    let listener =
        netns.listen(address).await.with_context(|| format!("cannot listen on {address} inside of the cluster"))?;
    tokio::spawn(forward(listener, format!("{host}:{port}"), CancellationToken::new()));
    Ok(address)
}

/// Connections to `listener` go on to `target`, a host and a port, until `stop`; those that are open then, go on.
pub async fn forward(listener: TcpListener, target: String, stop: CancellationToken) {
    let name = target.clone();
    pass_on(listener, name, stop, move || {
        let target = target.clone();
        async move {
            let far = TcpStream::connect(&target).await?;
            far.set_nodelay(true)?;
            Ok(far)
        }
    })
    .await;
}

/// The same to an address inside of the cluster.
pub async fn forward_by(listener: TcpListener, target: SocketAddr, dial: Dial, stop: CancellationToken) {
    pass_on(listener, target.to_string(), stop, move || dial(target)).await;
}

async fn pass_on<C, F>(listener: TcpListener, target: String, stop: CancellationToken, connect: impl Fn() -> F)
where
    C: AsyncRead + AsyncWrite + Unpin + Send,
    F: Future<Output = std::io::Result<C>> + Send + 'static,
{
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let mut near = match accepted {
            Ok((near, _)) => near,
            Err(error) => {
                tracing::warn!(%error, target, "a connection could not be accepted");
                // Out of descriptors: give the others time to close theirs.
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let (target, far) = (target.clone(), connect());
        tokio::spawn(async move {
            let _ = near.set_nodelay(true);
            match far.await {
                // How it ends is the business of both ends, which try again.
                Ok(mut far) => {
                    let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
                }
                Err(error) => tracing::debug!(%error, target, "nobody is there"),
            }
        });
    }
}
