//! `virtfold node-agent`: one per node, in the node's network namespace; beside the agent it runs the node's pods.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use embedded::images::{ImageStore, Options as ImageOptions};
use embedded::netns::Netns;
use embedded::pki::Identity;
use embedded::pods::{self, Network};
use embedded::procs::ProcessId;
use kube::Client;
use kube::config::Kubeconfig;
use launcher::machine::Accelerator;
use serde::{Deserialize, Serialize};
use telemetry::metrics::{Registry, catalogue as c};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::component;
use crate::observed::{self, Observed};
use crate::up::agents::AgentConfig;
use crate::up::layout::{AGENT_PORT, API, BRIDGE, METRICS_PORT, Node, PREFIX};

/// CPU model of guests that name none: old enough for every machine, so that a guest can move.
const CPU_MODEL: &str = "Nehalem";

/// Runs until SIGTERM. Launchers go on.
pub fn run(file: &Path) -> anyhow::Result<u8> {
    let text = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let config: AgentConfig =
        serde_json::from_slice(&text).with_context(|| format!("{} is damaged", file.display()))?;
    // The terminal that started the cluster, and its ctrl-C, are not ours. (A leader of a group is on its own already.)
    let _ = nix::unistd::setsid();
    let outside = File::open("/proc/self/ns/net").context("cannot open the machine's network namespace")?;
    // Before there are threads: each has a namespace of its own.
    Netns::named(&config.node.netns).enter()?;
    if let Some(id) = ProcessId::of(std::process::id().cast_signed()) {
        id.save(&config.node.pid_file())?;
    }
    component::run(component::THREADS, serve(config, outside))
}

/// The API server, with the rights of the node.
async fn client(config: &AgentConfig, tls: &Identity, ca: &str, metrics: &Registry) -> anyhow::Result<Client> {
    if let Some(file) = &config.kubeconfig {
        return component::client(file, "virtfold-node-agent", metrics).await;
    }
    let text = embedded::pki::kubeconfig(&format!("https://{API}"), ca, tls);
    component::connect(Kubeconfig::from_yaml(&text)?, "virtfold-node-agent", metrics)
        .await
        .with_context(|| format!("{} or {} is damaged", config.cert.display(), config.key.display()))
}

/// The registries of the mirrors that were named with a scheme.
fn schemed(mirrors: &[(String, String)], scheme: &str) -> Vec<String> {
    let registry = |to: &String| Some(to.strip_prefix(scheme)?.split('/').next()?.to_owned());
    mirrors.iter().filter_map(|(_, to)| registry(to)).collect()
}

async fn serve(config: AgentConfig, outside: File) -> anyhow::Result<()> {
    let telemetry = telemetry::init(&telemetry::Options {
        service: "virtfold-node-agent",
        otlp_endpoint: config.otlp_endpoint.clone(),
        otlp_via: config.otlp_via,
        // A launcher's network is its guest's.
        speaks_for: Some("virtfold-launcher"),
        node: Some(config.node.name.clone()),
        // Standard output and standard error are the agent's log already.
        log_file: None,
        log_filter: config.log_filter.clone(),
        keep: config.keep_steps,
        json: false,
    })?;
    let read = |path: &Path| std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()));
    let (ca, identity) = (read(&config.ca)?, Identity { cert: read(&config.cert)?, key: read(&config.key)? });
    let metrics = Registry::default();
    let client = client(&config, &identity, &ca, &metrics).await?;
    let (layout, node) = (&config.layout, &config.node);

    let images = ImageStore::new(ImageOptions {
        root: layout.data("images"),
        local: config.images.clone(),
        mirrors: config.mirrors.clone(),
        // The scheme that a mirror was named with says whether it has TLS.
        insecure: schemed(&config.mirrors, "http://"),
        secure: schemed(&config.mirrors, "https://"),
        authorities: config.authorities.clone(),
        netns: Some(Arc::new(outside)),
    })
    .context("the image store cannot be used")?;
    let accelerator = accelerator(&config).await;
    tracing::info!(accelerator = accelerator.name, reason = accelerator.reason, "how guests are run");
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
        kvm: accelerator.name == "kvm",
        runc: embedded::procs::find_program("runc").context("runc not found in PATH")?,
        labels: std::collections::BTreeMap::new(),
        // Launchers write their logs as everybody else does.
        environment: std::env::var(telemetry::logs::FORMAT)
            .into_iter()
            .map(|format| (telemetry::logs::FORMAT.to_owned(), format))
            .collect(),
    })?;
    let stop = CancellationToken::new();
    component::until_asked(&stop)?;
    let address = SocketAddr::from((node.address(), AGENT_PORT));
    let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
    let state_dir = node.data.join("state");
    // What the agent remembers of an earlier answer is ours to give: `--use-emulation` may have come or gone.
    let _ = std::fs::remove_file(state_dir.join("accelerator.json"));
    let found =
        node_agent::Accelerator { name: accelerator.name, cpu_model: CPU_MODEL.into(), offers: accelerator.offers };
    let lease = reconcilers::LeaseConfig::default();
    let pods: Arc<dyn node_agent::PodSource> = Arc::new(Source(runner.handle()));
    let tls = proto::transport::Tls { ca, cert: identity.cert, key: identity.key };
    let usage = observe(&metrics, node, &client, pods.clone(), &tls, &stop).await?;
    let agent = node_agent::run(node_agent::Config {
        node_name: node.name.clone(),
        client,
        incoming: proto::transport::incoming(listener),
        address: address.to_string(),
        tls,
        state_dir,
        disk: node_agent::Disk::Threads,
        boot_id: node_agent::boot_id()?,
        pods,
        probe: Box::new(move || {
            let found = found.clone();
            Box::pin(async move { found })
        }),
        lease: (lease.namespace, lease.name),
        dns: name_servers(),
        cluster_domain: String::new(),
        journal: Some(config.journal.config(layout.data("journal").join(&node.name), "node-agent")),
        usage: Some(usage),
        shutdown: stop.clone(),
    });
    tracing::info!(node = node.name, pid = std::process::id(), "node agent runs");
    // Neither is of use without the other: when one ends, so does the process, and the supervisor starts both anew.
    let (ran, served) = tokio::join!(
        async {
            let ran = runner.run(stop.clone()).await;
            stop.cancel();
            ran
        },
        async {
            let served = agent.await;
            stop.cancel();
            served
        }
    );
    telemetry.shutdown().await;
    ran?;
    served?;
    Ok(())
}

/// Serves what the node's machines use, on the node's own address.
async fn observe(
    registry: &Registry,
    node: &Node,
    client: &Client,
    pods: Arc<dyn node_agent::PodSource>,
    tls: &proto::transport::Tls,
    stop: &CancellationToken,
) -> anyhow::Result<node_agent::Metrics> {
    let seen = pods.changed();
    let usage = node_agent::Metrics::new(registry, node.name.clone(), pods);
    let machines = usage.clone();
    let ready: observed::Ready = Arc::new(move || match *seen.borrow() {
        0 => Err("not all pods of the node are known yet".into()),
        _ => Ok(()),
    });
    let what = Observed {
        registry: registry.clone(),
        client: client.clone(),
        before: Some(Arc::new(move || {
            let machines = machines.clone();
            Box::pin(async move { machines.collect().await })
        })),
        ready: vec![(&c::HANDLER_READY, ready)],
    };
    observed::spawn(what, SocketAddr::from((node.address(), METRICS_PORT)), observed::tls(tls), stop.clone()).await?;
    Ok(usage)
}

/// The pod runner as the node agent sees it.
struct Source(pods::Pods);

impl node_agent::PodSource for Source {
    fn pods(&self) -> Vec<node_agent::PodFacts> {
        let facts = |pod: pods::PodInfo| node_agent::PodFacts {
            pod_uid: pod.pod_uid,
            vmi_uid: pod.vmi_uid,
            namespace: pod.namespace,
            pod_name: pod.name,
            vmi_name: pod.vmi_name,
            share_dir: pod.share_dir,
            netns: pod.netns,
            ips: pod.ips,
            running: pod.running,
        };
        self.0.pods().into_iter().map(facts).collect()
    }

    fn changed(&self) -> tokio::sync::watch::Receiver<u64> {
        self.0.changed()
    }
}

/// How guests are run on this machine, and why.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Found {
    boot: String,
    name: String,
    reason: String,
    /// What guests can have under it.
    offers: node_agent::Offers,
}

/// Asked once per boot for the whole machine: the first agent looks, the others wait for its answer.
async fn accelerator(config: &AgentConfig) -> Found {
    let boot = ProcessId::of(std::process::id().cast_signed()).map(|id| id.boot).unwrap_or_default();
    let file = config.layout.data(if config.use_emulation { "emulation.json" } else { "accelerator.json" });
    let lock = config.layout.data("accelerator.lock");
    let locked = tokio::task::spawn_blocking(move || {
        let file = File::create(lock).ok()?;
        nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusive).ok()
    })
    .await;
    let known: Option<Found> = std::fs::read(&file).ok().and_then(|text| serde_json::from_slice(&text).ok());
    if let Some(known) = known.filter(|k| k.boot == boot) {
        return known;
    }
    let qemu = Path::new("qemu-system-x86_64");
    let (accelerator, reason) = match config.use_emulation {
        true => (Accelerator::Tcg, "--use-emulation".into()),
        false => {
            let verdict = launcher::accelerator::probe(qemu, CPU_MODEL).await;
            (verdict.accelerator, verdict.reason)
        }
    };
    let asked = launcher::offers::offers(qemu, accelerator).await;
    let known = asked.is_ok();
    let offers = asked.unwrap_or_else(|error| {
        tracing::warn!(error, "the hypervisor does not say what guests can have; the node gets no labels for it");
        launcher::offers::Offers::default()
    });
    let offers = node_agent::Offers {
        cpu_models: offers.cpu_models,
        cpu_features: offers.cpu_features,
        cpu_vendor: offers.cpu_vendor,
        machine_types: offers.machine_types,
    };
    let found = Found { boot, name: accelerator.word().into(), reason, offers };
    if !known {
        return found;
    }
    if let Ok(text) = serde_json::to_vec_pretty(&found) {
        let _ = embedded::pki::write_private(&file, &text);
    }
    drop(locked);
    found
}

/// The machine's name servers that are not its own loopback.
fn name_servers() -> Vec<Ipv4Addr> {
    let text = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    text.lines()
        .filter_map(|line| line.strip_prefix("nameserver")?.trim().parse::<Ipv4Addr>().ok())
        .filter(|address| !address.is_loopback())
        .take(3)
        .collect()
}
