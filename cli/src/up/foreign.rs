//! Somebody else's control plane: this machine runs the virtual machines of the Kubernetes that a kubeconfig names.
//!
//! The kubeconfig's user must be an administrator: definitions and roles are written, and the parts get tokens of their own
//! service accounts, which are kept fresh in `DATA/tokens`. Node agents live in networks of their own; their way to the API
//! server is a relay at the address that our own would have, with the server's certificate checked from end to end.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use embedded::cluster;
use embedded::cluster::bootstrap::{self, CONTROLLER, GATEWAY, NAMESPACE, NODE};
use embedded::pki::write_private;
use futures::future::BoxFuture;
use gateway::{Explain, Leader};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Node, ServiceAccount};
use kube::api::PostParams;
use kube::config::{AuthInfo, Cluster, Context as Named, Kubeconfig, NamedAuthInfo, NamedCluster, NamedContext};
use kube::{Api, Client};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::gate::Why;
use super::layout::API;
use super::{Plane, Site, network};
use crate::component;
use crate::gateway::Apart;

/// How long a token is asked for; an API server may give less.
const TOKEN_SECONDS: i64 = 24 * 3600;
/// A token that cannot be had is asked for again after this.
const AGAIN: Duration = Duration::from_secs(10);

/// Prepares the cluster for us, and us for it.
pub(super) async fn start(
    site: &Site<'_>,
    file: &Path,
    listener: TcpListener,
    inside: TcpListener,
) -> anyhow::Result<Plane> {
    let file = std::path::absolute(file)?;
    let cluster = named(&file)?;
    let url = cluster.server.clone().unwrap_or_default();
    let system = component::client(&file, "virtfold-up", &Default::default()).await?;
    let version = system.apiserver_version().await.with_context(|| format!("the API server {url} does not answer"))?;
    site.story.say(&format!("the API server {url} is Kubernetes {}", version.git_version));
    no_other(&system).await?;
    free(site, &system).await?;
    let mut objects = bootstrap::roles();
    objects.extend(gateway::policy::objects(&crate::gateway::trusted()));
    objects.extend(crate::gateway::registered(&reached(site, &listener)?));
    bootstrap::install(&system, objects)
        .await
        .with_context(|| format!("definitions and roles cannot be written with the rights of {}", file.display()))?;
    site.story.say("definitions and roles are there");

    let target: http::Uri = url.parse().with_context(|| format!("{}: {url} is no URL", file.display()))?;
    let host = target.host().with_context(|| format!("{}: {url} names no host", file.display()))?;
    site.tasks.spawn(network::forward(
        inside,
        format!("{host}:{}", target.port_u16().unwrap_or(443)),
        site.serving.clone(),
    ));
    let within = Cluster {
        server: Some(format!("https://{API}{}", target.path().trim_end_matches('/'))),
        tls_server_name: cluster.tls_server_name.clone().or_else(|| Some(host.trim_matches(['[', ']']).to_owned())),
        ..cluster.clone()
    };
    let controller = account(site, &system, CONTROLLER, &cluster).await?;
    let gateway = account(site, &system, GATEWAY, &cluster).await?;
    let (client, tls) = (component::client(&gateway, GATEWAY, &site.metrics).await?, site.component(GATEWAY)?);
    let lease = reconcilers::LeaseConfig::default();
    let leader = Leader::new(client.clone(), proto::transport::direct(), tls.clone(), (lease.namespace, lease.name));
    site.tasks.spawn(serve(Apart {
        client,
        dial: site.dial.clone(),
        datagrams: site.datagrams.clone(),
        tls,
        explain: Arc::new(Asks { own: Why(site.explainer.clone()), leader }),
        listener,
        certificates: site.layout.data("pki").join("gateway.json"),
        life: Duration::from_secs(site.options.certificate_life),
        metrics: site.metrics.clone(),
        readiness: site.gateway.clone(),
        stop: site.serving.clone(),
    }));
    let agents = account(site, &system, NODE, &within).await?;
    if site.options.scheduler {
        site.controller_tasks.spawn(cluster::schedule(system.clone(), site.controllers.clone()));
    }
    Ok(Plane {
        controller: component::client(&controller, CONTROLLER, &site.metrics).await?,
        url,
        kubeconfig: file,
        system,
        agents: Some(agents),
        etcd: None,
        server: None,
    })
}

/// Where the API server reaches the gateway.
fn reached(site: &Site<'_>, listener: &TcpListener) -> anyhow::Result<(String, u16)> {
    let address = listener.local_addr()?;
    match &site.options.gateway {
        Some(place) => Ok(place.clone()),
        None if address.ip().is_unspecified() || address.is_ipv6() => {
            bail!("--listen {address}: say by --gateway HOST:PORT where the API server reaches it")
        }
        None => Ok((address.ip().to_string(), address.port())),
    }
}

/// The controller of this process explains, and where it does not lead, the one that does.
struct Asks {
    own: Why,
    leader: Arc<Leader>,
}

impl Explain for Asks {
    fn explain(
        &self,
        resource: &str,
        namespace: &str,
        name: &str,
    ) -> BoxFuture<'static, Result<serde_json::Value, gateway::Status>> {
        let (own, leader) =
            (self.own.explain(resource, namespace, name), self.leader.explain(resource, namespace, name));
        Box::pin(async move {
            match own.await {
                Err(why) if why.code == 503 => leader.await.map_err(|_| why),
                answer => answer,
            }
        })
    }
}

async fn serve(gateway: Apart) {
    if let Err(error) = gateway.serve().await {
        tracing::error!(error = format!("{error:#}"), "the gateway ended");
    }
}

/// The cluster of a kubeconfig's current context.
fn named(file: &Path) -> anyhow::Result<Cluster> {
    let all = Kubeconfig::read_from(file).with_context(|| format!("cannot read {}", file.display()))?;
    let context = all.contexts.iter().find(|c| Some(&c.name) == all.current_context.as_ref());
    let name = context.and_then(|c| c.context.as_ref()).map(|c| &c.cluster);
    let cluster = all.clusters.iter().find(|c| Some(&c.name) == name).and_then(|c| c.cluster.clone());
    let cluster = cluster.with_context(|| format!("{}: the current context names no cluster", file.display()))?;
    ensure!(
        cluster.server.as_deref().is_some_and(|s| s.starts_with("https://")),
        "{}: clusters[].cluster.server: only https:// is supported",
        file.display()
    );
    ensure!(
        cluster.proxy_url.as_deref().unwrap_or_default().is_empty(),
        "{}: clusters[].cluster.proxy-url is not supported",
        file.display()
    );
    Ok(cluster)
}

/// Fails where somebody else already answers for KubeVirt's API: two of them would fight for every object.
async fn no_other(system: &Client) -> anyhow::Result<()> {
    let path = format!("/apis/apiregistration.k8s.io/v1/apiservices/v1.{}", api::names::SUBRESOURCE_GROUP);
    let found = match system.request::<serde_json::Value>(http::Request::get(path).body(Vec::new())?).await {
        Ok(found) => found,
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    match found["spec"]["service"]["name"].as_str() {
        None | Some(gateway::registration::NAME) => Ok(()),
        Some(other) => bail!(
            "the cluster has KubeVirt already: {} is served by {}/{other}",
            api::names::SUBRESOURCE_GROUP,
            found["spec"]["service"]["namespace"].as_str().unwrap_or_default()
        ),
    }
}

/// Fails where a node of somebody else, or of another machine, has the name of one of ours.
async fn free(site: &Site<'_>, system: &Client) -> anyhow::Result<()> {
    let nodes: Api<Node> = Api::all(system.clone());
    let own = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    for number in 1..=site.options.nodes {
        let name = site.layout.node(number).name;
        let info = nodes.get_opt(&name).await?.and_then(|n| n.status).and_then(|s| s.node_info);
        let ours = |machine: &str, runtime: &str| machine == own.trim() && runtime.starts_with("virtfold://");
        if let Some(info) = info.filter(|i| !ours(&i.machine_id, &i.container_runtime_version)) {
            bail!(
                "the cluster has a node {name} that is not this machine's (it runs {})",
                info.container_runtime_version
            );
        }
    }
    Ok(())
}

/// Gets a token of a service account, keeps it fresh, and writes the kubeconfig that goes with it.
async fn account(site: &Site<'_>, system: &Client, name: &'static str, cluster: &Cluster) -> anyhow::Result<PathBuf> {
    let folder = site.layout.data("tokens");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let token = folder.join(name);
    let life = renew(system, name, &token).await?;
    site.tasks.spawn(keep(system.clone(), name, token.clone(), life, site.serving.clone()));
    let words = |text: &str| text.to_owned();
    let config = Kubeconfig {
        kind: Some(words("Config")),
        api_version: Some(words("v1")),
        current_context: Some(words(name)),
        clusters: vec![NamedCluster { name: words(name), cluster: Some(cluster.clone()), ..NamedCluster::default() }],
        auth_infos: vec![NamedAuthInfo {
            name: words(name),
            auth_info: Some(AuthInfo { token_file: Some(token.display().to_string()), ..AuthInfo::default() }),
            ..NamedAuthInfo::default()
        }],
        contexts: vec![NamedContext {
            name: words(name),
            context: Some(Named { cluster: words(name), user: Some(words(name)), ..Named::default() }),
            ..NamedContext::default()
        }],
        ..Kubeconfig::default()
    };
    let file = folder.join(format!("{name}.kubeconfig"));
    write_private(&file, &serde_json::to_vec_pretty(&config)?)?;
    Ok(file)
}

/// Writes a new token; how long it lives.
async fn renew(system: &Client, name: &str, file: &Path) -> anyhow::Result<Duration> {
    let accounts: Api<ServiceAccount> = Api::namespaced(system.clone(), NAMESPACE);
    let spec = TokenRequestSpec { expiration_seconds: Some(TOKEN_SECONDS), ..TokenRequestSpec::default() };
    let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
    let answer = accounts
        .create_token_request(name, &PostParams::default(), &request)
        .await
        .with_context(|| format!("no token of service account {NAMESPACE}/{name}"))?;
    let status = answer.status.unwrap_or_default();
    let (Some(token), Some(end)) = (status.token, status.expiration_timestamp) else {
        bail!("an empty token of service account {NAMESPACE}/{name}");
    };
    write_private(file, token.as_bytes())?;
    Ok(Duration::try_from(end.0.duration_since(jiff::Timestamp::now())).unwrap_or_default())
}

/// Renews a token at half of its life.
async fn keep(system: Client, name: &'static str, file: PathBuf, mut life: Duration, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep((life / 2).max(AGAIN)) => {}
        }
        match renew(&system, name, &file).await {
            Ok(next) => life = next,
            Err(error) => {
                tracing::warn!(name, error = format!("{error:#}"), "a token is not renewed");
                life = Duration::ZERO;
            }
        }
    }
}
