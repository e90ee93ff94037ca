//! A control plane of our own: etcd as a child, the API server and the cluster's controllers in this process.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use anyhow::Context;
use embedded::auth::User;
use embedded::cluster::bootstrap::CONTROLLER;
use embedded::etcd::Etcd;
use embedded::server::https::{self, Tls};
use embedded::server::{ApiServer, Config as ServerConfig};
use embedded::{cluster, pki, storage};
use tokio::net::TcpListener;
use tower::Layer;

use super::{Plane, Site, gate};
use crate::observed::Counting;

/// Starts it, on a socket of the machine and one of the cluster's network.
pub(super) async fn start(site: &Site<'_>, listener: TcpListener, inside: TcpListener) -> anyhow::Result<Plane> {
    let etcd = Etcd::start(site.layout.etcd()).await?;
    site.story.say("etcd answers");
    match serve(site, listener, inside, &etcd).await {
        Ok(plane) => Ok(plane),
        Err(error) => {
            etcd.stop().await;
            Err(error)
        }
    }
}

async fn serve(site: &Site<'_>, listener: TcpListener, inside: TcpListener, etcd: &Arc<Etcd>) -> anyhow::Result<Plane> {
    let (options, layout, pki) = (site.options, site.layout, &site.pki);
    let outside = options.listen.ip();
    let extra: Vec<String> =
        (!outside.is_loopback() && !outside.is_unspecified()).then(|| outside.to_string()).into_iter().collect();
    let identity = pki.api_server(&extra)?;
    let config = ServerConfig {
        token_key: pki.secret("service-accounts")?,
        issuer: "https://kubernetes.default.svc.cluster.local".into(),
        ..ServerConfig::default()
    };
    let store = storage::Etcd::new(&etcd.endpoint())?;
    let server = ApiServer::new(Arc::new(store), config).await.context("the API server cannot start")?;
    server.set_logs(Arc::new(embedded::pods::NodeLogs::new(&layout.data("nodes"))));
    let system = server.client(User::system("system:virtfold:cluster"));
    cluster::bootstrap::run(&system).await.context("the cluster's first objects cannot be written")?;
    gate::install(site, &server)?;

    let url = url(listener.local_addr()?);
    let acceptor = https::acceptor(&Tls {
        certificate_pem: identity.cert.clone().into_bytes(),
        key_pem: identity.key.clone().into_bytes(),
        client_ca_pem: pki.ca().as_bytes().to_vec(),
    })?;
    for socket in [listener, inside] {
        site.tasks.spawn(server.clone().serve(socket, acceptor.clone(), site.serving.clone()));
    }
    site.story.say(&format!("the API server listens on {}", options.listen));

    let folders = cluster::Options { volumes: layout.data("volumes"), imports: layout.data("import") };
    site.controller_tasks.spawn(cluster::run(system.clone(), folders, site.controllers.clone()));
    let kubeconfig = layout.data("kubeconfig");
    let admin = pki.client("admin", Some("system:masters"))?;
    pki::write_private(&kubeconfig, pki::kubeconfig(&url, pki.ca(), &admin).as_bytes())?;
    site.story.say(&format!("kubeconfig written to {}", kubeconfig.display()));
    Ok(Plane {
        url,
        kubeconfig,
        system,
        controller: {
            let counting = Counting::new(&site.metrics, "in-process");
            kube::Client::new(counting.layer(server.service(User::new(CONTROLLER, &[]))), "default")
        },
        agents: None,
        etcd: Some(etcd.clone()),
        server: Some(server),
    })
}

fn url(address: SocketAddr) -> String {
    let ip = match address.ip() {
        ip if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        ip => ip,
    };
    format!("https://{}", SocketAddr::new(ip, address.port()))
}
