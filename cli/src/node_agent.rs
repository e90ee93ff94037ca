//! `virtfold node-agent`: one per node, in the node's network namespace; beside the agent it runs the node's pods.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use embedded::images::{ImageStore, Options as ImageOptions};
use embedded::netns::Netns;
use embedded::pki::Identity;
use embedded::pods::{self, Network};
use embedded::procs::ProcessId;
use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tower::timeout::TimeoutLayer;

use crate::up::agents::AgentConfig;
use crate::up::layout::{API, BRIDGE, PREFIX};

/// Time for a connection to the API server.
const CONNECT: Duration = Duration::from_secs(5);
/// Time for the beginning of its answer.
const ANSWER: Duration = Duration::from_secs(30);

/// Runs until SIGTERM. Launchers go on.
pub fn run(file: &Path) -> anyhow::Result<u8> {
    let text = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let config: AgentConfig = serde_json::from_slice(&text).with_context(|| format!("{} is damaged", file.display()))?;
    // The terminal that started the cluster, and its ctrl-C, are not ours. (A leader of a group is on its own already.)
    let _ = nix::unistd::setsid();
    let outside = File::open("/proc/self/ns/net").context("cannot open the machine's network namespace")?;
    // Before there are threads: each has a namespace of its own.
    Netns::named(&config.node.netns).enter()?;
    if let Some(id) = ProcessId::of(std::process::id().cast_signed()) {
        id.save(&config.node.pid_file())?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let result = runtime.block_on(serve(config, outside));
    runtime.shutdown_timeout(Duration::from_secs(2));
    result.map(|()| 0)
}

/// The API server, with the rights of the node. A request that is not answered within 30 s has failed; watches go on.
async fn client(config: &AgentConfig, tls: &Identity, ca: &str) -> anyhow::Result<Client> {
    let text = embedded::pki::kubeconfig(&format!("https://{API}"), ca, tls);
    let options = KubeConfigOptions::default();
    let mut kube = Config::from_custom_kubeconfig(Kubeconfig::from_yaml(&text)?, &options)
        .await
        .with_context(|| format!("{} or {} is damaged", config.cert.display(), config.key.display()))?;
    kube.default_retry = false;
    kube.connect_timeout = Some(CONNECT);
    let client = ClientBuilder::try_from(kube).context("the client of the API server cannot be made")?;
    Ok(client.with_layer(&TimeoutLayer::new(ANSWER)).build())
}

async fn serve(config: AgentConfig, outside: File) -> anyhow::Result<()> {
    let telemetry = telemetry::init(&telemetry::Options {
        service: "virtfold-node-agent",
        otlp_endpoint: config.otlp_endpoint.clone(),
        // Standard output and standard error are the agent's log already.
        log_file: None,
        log_filter: config.log_filter.clone(),
        json: false,
    })?;
    let read = |path: &Path| std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()));
    let (ca, identity) = (read(&config.ca)?, Identity { cert: read(&config.cert)?, key: read(&config.key)? });
    let client = client(&config, &identity, &ca).await?;
    let (layout, node) = (&config.layout, &config.node);

    let images = ImageStore::new(ImageOptions {
        root: layout.data("images"),
        local: config.images.clone(),
        mirrors: config.mirrors.clone(),
        // A mirror that was named with http:// is one without TLS.
        insecure: config.mirrors.iter().filter_map(|(_, to)| Some(to.strip_prefix("http://")?.split('/').next()?.to_owned())).collect(),
        netns: Some(Arc::new(outside)),
    })
    .context("the image store cannot be used")?;
    let runner = pods::Runner::new(pods::Config {
        node_name: node.name.clone(),
        cluster_id: layout.id.clone(),
        client: client.clone(),
        data_dir: node.data.clone(),
        run_dir: node.run.clone(),
        volumes_root: layout.data("volumes"),
        images: Arc::new(images),
        network: Some(Network {
            node_netns: node.netns.clone(),
            bridge: BRIDGE.into(),
            node_address: node.address(),
            base: node.address(),
            prefix: 24,
            cluster_prefix: PREFIX,
            gateway: node.address(),
        }),
        binary: config.binary.clone(),
        private: vec![layout.data.clone(), layout.run.clone()],
        kvm: false,
        runc: embedded::procs::find_program("runc").context("runc not found in PATH")?,
        labels: std::collections::BTreeMap::new(),
    })?;
    let stop = CancellationToken::new();
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let asked = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        asked.cancel();
    });
    tracing::info!(node = node.name, pid = std::process::id(), "node agent runs");
    runner.run(stop).await?;
    telemetry.shutdown().await;
    Ok(())
}
