//! `virtfold vnc` and `virtfold port-forward`: local TCP listeners whose connections end in a machine.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use kube::Client;
use tokio::net::TcpListener;

use super::cluster::{Kind, connect, machine};
use super::stream;
use crate::Usage;
use crate::args;

/// Serves a listener: each connection opens `path`. Ends with the process.
async fn serve(listener: TcpListener, client: Client, path: String) {
    loop {
        let Ok((connection, _)) = listener.accept().await else { return };
        let (client, path) = (client.clone(), path.clone());
        tokio::spawn(async move {
            let _ = connection.set_nodelay(true);
            let result = match stream::open(&client, &path, Duration::ZERO).await {
                Ok(socket) => stream::copy(socket, connection).await,
                Err(error) => Err(error),
            };
            if let Err(error) = result {
                eprintln!("virtfold: a connection ended: {error:#}");
            }
        });
    }
}

/// A local door to the screen of a machine, and a viewer if there is one.
pub async fn vnc(options: args::Vnc) -> anyhow::Result<u8> {
    let machine = machine(&options.machine.machine)?;
    let cluster = connect(&options.target).await?;
    let path = format!(
        "/apis/subresources.kubevirt.io/v1/namespaces/{}/{}/{}/vnc",
        cluster.namespace,
        Kind::Vmi.plural(),
        machine.name
    );
    // Said now rather than when a viewer comes.
    drop(stream::open(&cluster.client, &path, Duration::ZERO).await?);
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, options.port));
    let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
    let port = listener.local_addr()?.port();
    let viewer =
        ["remote-viewer", "vncviewer", "xtigervncviewer"].iter().find_map(|v| embedded::procs::find_program(v));
    if options.proxy_only {
        println!("{{\"port\":{port}}}");
        serve(listener, cluster.client, path).await;
        return Ok(0);
    }
    let Some(viewer) = viewer else {
        println!("No viewer found. Point one at 127.0.0.1:{port}; ctrl-C ends.");
        serve(listener, cluster.client, path).await;
        return Ok(0);
    };
    let argument = if viewer.ends_with("remote-viewer") {
        format!("vnc://127.0.0.1:{port}")
    } else {
        format!("127.0.0.1::{port}")
    };
    let mut child = tokio::process::Command::new(&viewer)
        .arg(argument)
        .stdout(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot run {}", viewer.display()))?;
    tokio::select! {
        () = serve(listener, cluster.client, path) => Ok(0),
        status = child.wait() => Ok(u8::from(!status?.success())),
    }
}

/// `LOCAL:REMOTE` or `REMOTE`.
fn ports_of(text: &str) -> anyhow::Result<(u16, u16)> {
    let text = text.strip_prefix("tcp/").unwrap_or(text);
    let (local, remote) = text.split_once(':').unwrap_or((text, text));
    match (local.parse(), remote.parse()) {
        (Ok(local), Ok(remote)) if remote > 0 => Ok((local, remote)),
        _ => bail!(Usage(format!("`{text}` is not [LOCAL:]REMOTE"))),
    }
}

/// Local doors to ports of a machine.
pub async fn ports(options: args::PortForward) -> anyhow::Result<u8> {
    let machine = machine(std::slice::from_ref(&options.machine))?;
    let wanted = options.ports.iter().map(|p| ports_of(p)).collect::<anyhow::Result<Vec<_>>>()?;
    let cluster = connect(&options.target).await?;
    let mut doors = tokio::task::JoinSet::new();
    for (local, remote) in wanted {
        let path = format!(
            "/apis/subresources.kubevirt.io/v1/namespaces/{}/{}/{}/portforward/{remote}/tcp",
            cluster.namespace,
            machine.kind.plural(),
            machine.name
        );
        let address = SocketAddr::from((options.address, local));
        let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
        println!("Forwarding from {} -> {remote}", printable(listener.local_addr()?));
        doors.spawn(serve(listener, cluster.client.clone(), path));
    }
    doors.join_all().await;
    Ok(0)
}

fn printable(address: SocketAddr) -> String {
    match address.ip() {
        IpAddr::V4(ip) => format!("{ip}:{}", address.port()),
        IpAddr::V6(ip) => format!("[{ip}]:{}", address.port()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn ports_are_read_in_pairs_or_alone() {
        assert_eq!(ports_of("8080:80").unwrap(), (8080, 80));
        assert_eq!(ports_of("80").unwrap(), (80, 80));
        assert_eq!(ports_of("0:22").unwrap(), (0, 22));
        for wrong in ["", "a", "1:0", "70000", "1:2:3"] {
            assert!(ports_of(wrong).is_err(), "{wrong}");
        }
    }
}
