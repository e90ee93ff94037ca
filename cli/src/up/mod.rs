//! `virtfold up`: the supervisor, which is the control plane in one process, etcd as a child, and node agents beside it. With
//! `--kubeconfig` the API server, its storage and its controllers are somebody else's ([`foreign`] instead of [`own`]), the rest is
//! the same.
//!
//! What is started first is what can say no at once: the lock of the data folder, the programs that are needed, the port. Then
//! certificates, networks, etcd, API server, controllers, gateway, agents. It ends in the reverse order. Agents and guests go
//! on unless `--stop-guests` says otherwise; the next start, also after a `kill -9`, finds them again.

pub mod agents;
pub mod down;
mod foreign;
mod gate;
pub mod layout;
mod network;
mod own;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use embedded::cluster;
use embedded::cluster::bootstrap::CONTROLLER;
use embedded::etcd::Etcd;
use embedded::lock::Lock;
use embedded::netns::Netns;
use embedded::pki::Pki;
use embedded::server::ApiServer;
use embedded::server::https::{self, HttpsError};
use kube::Client;
use telemetry::metrics::catalogue as c;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::args;
use crate::observed::{self, Observed};
use crate::page;
use agents::AgentConfig;
use layout::{API, Layout, METRICS_PORT};

/// Programs that are needed, and the Debian packages that bring them.
const PROGRAMS: [(&str, &str); 6] = [
    ("etcd", "etcd-server"),
    ("ip", "iproute2"),
    ("nft", "nftables"),
    ("runc", "runc"),
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("qemu-img", "qemu-utils"),
];
/// Where the page is, unless that is taken or another place is asked for.
const PAGE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 9430);
/// Nodes are ready within this, or the start says that they are not.
const NODES_READY: Duration = Duration::from_secs(60);
/// Guests get this at the end, with `--stop-guests`.
const GUESTS_GRACE: Duration = Duration::from_secs(60);
/// Wait before a controller that lost its Lease starts anew.
const CONTROLLER_AGAIN: Duration = Duration::from_secs(1);

/// Fails for anybody but root.
pub fn require_root() -> anyhow::Result<()> {
    if nix::unistd::geteuid().is_root() {
        return Ok(());
    }
    bail!("this needs root: network namespaces, containers and disks are made")
}

/// `virtfold up`.
pub fn run(options: args::Up) -> anyhow::Result<u8> {
    require_root()?;
    let needed = PROGRAMS.iter().filter(|(program, _)| *program != "etcd" || options.kubeconfig.is_none());
    let missing: Vec<_> = needed.filter(|(program, _)| embedded::procs::find_program(program).is_none()).collect();
    if !missing.is_empty() {
        let names: Vec<_> = missing.iter().map(|(program, _)| *program).collect();
        let packages: Vec<_> = missing.iter().map(|(_, package)| *package).collect();
        bail!("{} not found in PATH; on Debian: apt-get install {}", names.join(", "), packages.join(" "));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(up(options));
    runtime.shutdown_timeout(Duration::from_secs(2));
    result.map(|()| 0)
}

/// Says what was done, and when.
pub(crate) struct Story(Instant);

impl Story {
    fn say(&self, text: &str) {
        tracing::info!("{text}");
        println!("virtfold: [{:6.2} s] {text}", self.0.elapsed().as_secs_f64());
    }
}

async fn up(options: args::Up) -> anyhow::Result<()> {
    let story = Story(Instant::now());
    for file in &options.authorities {
        embedded::images::authorities(file).with_context(|| format!("--registry-ca {}", file.display()))?;
    }
    for (reference, folder) in &options.images {
        let index = std::path::Path::new(folder).join("index.json");
        std::fs::metadata(&index)
            .with_context(|| format!("--image {reference}={folder}: no OCI layout, {} is missing", index.display()))?;
    }
    let layout = Layout::make(&options.data_dir)?;
    let _lock = Lock::take(&layout.data)?;
    let telemetry = telemetry::init(&telemetry::Options {
        service: "virtfold-controller",
        otlp_endpoint: options.otlp_endpoint.clone(),
        log_file: Some(layout.data("virtfold.log")),
        log_filter: "info".into(),
        keep: !options.no_page,
        ..telemetry::Options::default()
    })?;
    let listener = https::listen(options.listen).await.map_err(|error| match error {
        HttpsError::PortTaken(address) => {
            anyhow::anyhow!(
                "cannot listen on {address}: port {} is in use; choose another with --listen",
                address.port()
            )
        }
        other => other.into(),
    })?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let running = tokio::select! {
        started = start(&options, &layout, listener, &story) => started?,
        _ = terminate.recv() => bail!("ended before it had started"),
        _ = interrupt.recv() => bail!("ended before it had started"),
    };
    let ready = async {
        let all = nodes_ready(&running.plane.system, options.nodes).await;
        story.say(if all {
            "all nodes are ready"
        } else {
            "not all nodes are ready; their logs are in DATA/nodes/*/agent.log"
        });
        println!("{}", next_steps(&layout, &running));
        println!(
            "READY api={} kubeconfig={} nodes={} all-ready={all}",
            running.plane.url,
            running.plane.kubeconfig.display(),
            options.nodes
        );
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = ready => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    story.say(if options.stop_guests { "stopping everything" } else { "stopping; guests go on" });
    // Who is in a hurry presses twice.
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        std::process::exit(1);
    });
    running.controllers.cancel();
    running.controller_tasks.close();
    let _ = tokio::time::timeout(Duration::from_secs(5), running.controller_tasks.wait()).await;
    running.agents.cancel();
    if options.stop_guests {
        let guests = down::end_guests(&layout, GUESTS_GRACE).await;
        story.say(&format!("{guests} guest(s) stopped"));
    }
    running.serving.cancel();
    running.tasks.close();
    let _ = tokio::time::timeout(Duration::from_secs(5), running.tasks.wait()).await;
    running.plane.end().await;
    if options.stop_guests {
        down::end_rest(&layout).await?;
    }
    story.say("stopped");
    telemetry.shutdown().await;
    Ok(())
}

fn next_steps(layout: &Layout, running: &Running) -> String {
    let plane = &running.plane;
    // Printed and not logged: whoever has it may see everything and type into consoles.
    let page = running
        .page
        .as_ref()
        .map_or(String::new(), |door| format!("In a browser on this machine:\n  {}\n", door.url()));
    let program = std::env::args().next().unwrap_or_else(|| "virtfold".into());
    format!(
        "\nTry next, in another terminal:\n  export KUBECONFIG={}\n  kubectl get nodes\n  kubectl apply -f docs/demo/vm.yaml\n  \
         {program} status\n  {program} top\n{page}ctrl-C stops the control plane; guests go on until `{program} down --data-dir {}`.\n",
        plane.kubeconfig.display(),
        layout.data.display(),
    )
}

/// What a start has made.
struct Running {
    plane: Plane,
    page: Option<page::Door>,
    tasks: TaskTracker,
    serving: CancellationToken,
    controller_tasks: TaskTracker,
    controllers: CancellationToken,
    agents: CancellationToken,
}

/// What the other parts talk to: the API server of this process, or somebody else's.
pub(crate) struct Plane {
    /// Where clients reach it.
    url: String,
    /// With the rights of an administrator, for people.
    kubeconfig: PathBuf,
    /// With the rights of an administrator.
    system: Client,
    /// With the rights of the controller.
    controller: Client,
    /// A kubeconfig for node agents, where their certificates are nothing to the API server.
    agents: Option<PathBuf>,
    /// The storage of our own.
    etcd: Option<Arc<Etcd>>,
    /// The server of our own.
    server: Option<ApiServer>,
}

impl Plane {
    async fn end(mut self) {
        if let Some(etcd) = &self.etcd {
            etcd.stop().await;
        }
        self.server.take();
    }
}

/// What a start works with.
pub(crate) struct Site<'a> {
    options: &'a args::Up,
    layout: &'a Layout,
    story: &'a Story,
    pki: Pki,
    netns: Netns,
    dial: proto::transport::Dial,
    datagrams: proto::transport::Datagrams,
    explainer: reconcilers::Explainer,
    metrics: telemetry::metrics::Registry,
    /// What the controller lacks.
    controller: telemetry::Readiness,
    /// What the gateway lacks.
    gateway: telemetry::Readiness,
    tasks: TaskTracker,
    serving: CancellationToken,
    controller_tasks: TaskTracker,
    controllers: CancellationToken,
}

impl Site<'_> {
    /// Who a part is to the other parts.
    fn component(&self, name: &str) -> anyhow::Result<proto::transport::Tls> {
        let identity = self.pki.client(name, None)?;
        Ok(proto::transport::Tls { ca: self.pki.ca().to_owned(), cert: identity.cert, key: identity.key })
    }
}

async fn start(
    options: &args::Up,
    layout: &Layout,
    listener: tokio::net::TcpListener,
    story: &Story,
) -> anyhow::Result<Running> {
    let pki = Pki::open(&layout.data("pki"))?;
    let netns = network::cluster(layout).await?;
    let inner_listener =
        netns.listen(API).await.with_context(|| format!("cannot listen on {API} inside of the cluster"))?;
    story.say(&format!("certificates and network are there (namespaces vf-{}-*)", layout.id));
    let dial: proto::transport::Dial = {
        let netns = netns.clone();
        Arc::new(move |address| {
            let netns = netns.clone();
            Box::pin(async move { netns.dial(address).await.map(proto::transport::Connection::tcp) })
        })
    };
    let datagrams: proto::transport::Datagrams = {
        let netns = netns.clone();
        Arc::new(move |address| {
            let netns = netns.clone();
            Box::pin(async move { netns.datagrams(address).await })
        })
    };
    let site = Site {
        options,
        layout,
        story,
        pki,
        netns,
        dial,
        datagrams,
        explainer: reconcilers::Explainer::default(),
        metrics: telemetry::metrics::Registry::default(),
        controller: telemetry::Readiness::default(),
        gateway: telemetry::Readiness::default(),
        tasks: TaskTracker::new(),
        serving: CancellationToken::new(),
        controller_tasks: TaskTracker::new(),
        controllers: CancellationToken::new(),
    };
    let plane = match &options.kubeconfig {
        Some(file) => foreign::start(&site, file, listener, inner_listener).await?,
        None => own::start(&site, listener, inner_listener).await?,
    };
    // From here on, a failure must not leave etcd behind.
    let parts = async { anyhow::Ok((parts(&site, &plane).await?, show(&site, &plane).await?)) };
    let (agents, page) = match parts.await {
        Ok(parts) => parts,
        Err(error) => {
            plane.end().await;
            return Err(error);
        }
    };
    let Site { tasks, serving, controller_tasks, controllers, .. } = site;
    Ok(Running { plane, page, tasks, serving, controller_tasks, controllers, agents })
}

/// Starts controller and node agents; what ends the supervision of the latter.
async fn parts(site: &Site<'_>, plane: &Plane) -> anyhow::Result<CancellationToken> {
    let (options, layout, netns) = (site.options, site.layout, &site.netns);
    let controller = reconcilers::Config {
        metrics: site.metrics.clone(),
        readiness: site.controller.clone(),
        client: plane.controller.clone(),
        dial: site.dial.clone(),
        tls: site.component(CONTROLLER)?,
        // The lock of the data folder proves that nobody else leads in a cluster of our own.
        lease: reconcilers::LeaseConfig { exclusive: plane.server.is_some(), ..Default::default() },
        journal: Some(options.journal.config(layout.data("journal").join("controller"), "controller")),
        explainer: site.explainer.clone(),
        cluster: state::vm::ClusterConfig::default(),
        stop: site.controllers.clone(),
    };
    if !options.no_controller {
        site.controller_tasks.spawn(lead(controller));
    }

    observe(site, plane).await?;
    let collector = match telemetry::collector(options.otlp_endpoint.as_deref())? {
        Some(collector) => Some(network::relay(netns, collector).await?),
        None => None,
    };
    let agents = CancellationToken::new();
    let binary = std::env::current_exe().context("the program does not know where it is")?;
    for number in 1..=options.nodes {
        let node = layout.node(number);
        network::node(netns, &node).await?;
        let identity = site.pki.node(&node.name)?;
        let file = |ending: &str| layout.data("pki").join(format!("node-{}.{ending}", node.name));
        let config = AgentConfig {
            build: agents::build(&binary),
            binary: binary.clone(),
            layout: layout.clone(),
            ca: layout.data("pki").join("ca.crt"),
            cert: file("crt"),
            key: file("key"),
            credentials: site.pki.fingerprint(&identity),
            kubeconfig: plane.agents.clone(),
            images: options.images.iter().map(|(reference, folder)| (reference.clone(), absolute(folder))).collect(),
            mirrors: options.mirrors.clone(),
            authorities: options
                .authorities
                .iter()
                .map(|file| embedded::images::authorities(file))
                .collect::<Result<_, _>>()
                .context("--registry-ca")?,
            otlp_endpoint: options.otlp_endpoint.clone(),
            otlp_via: collector,
            keep_steps: !options.no_page,
            environment: agents::environment(),
            use_emulation: options.use_emulation,
            journal: options.journal.clone(),
            // What a client says of a server that is away is said by who asked.
            log_filter: std::env::var("VIRTFOLD_LOG")
                .unwrap_or_else(|_| "info,kube_client::client::builder=off".into()),
            node,
        };
        site.tasks.spawn(agents::keep(config, agents.clone()));
    }
    for surplus in (u16::from(options.nodes) + 1..=100).filter_map(|n| u8::try_from(n).ok()) {
        let node = layout.node(surplus);
        if node.pid_file().exists() {
            site.story
                .say(&format!("{} is not among the {} nodes any more; its agent is stopped", node.name, options.nodes));
            agents::stop(&node).await;
        }
    }
    site.story.say(&format!("{} node agent(s) started or found again", options.nodes));
    Ok(agents)
}

/// Shows the page to browsers on this machine, and writes down for root where.
async fn show(site: &Site<'_>, plane: &Plane) -> anyhow::Result<Option<page::Door>> {
    let file = site.layout.data("page.url");
    if site.options.no_page {
        let _ = std::fs::remove_file(&file);
        return Ok(None);
    }
    let wanted = site.options.page.unwrap_or(PAGE);
    let listener = match https::listen(wanted).await {
        // Another cluster has it, most likely.
        Err(HttpsError::PortTaken(_)) if site.options.page.is_none() => {
            https::listen(SocketAddr::new(PAGE.ip(), 0)).await
        }
        listened => listened,
    };
    let listener = listener.with_context(|| format!("--page {wanted}: cannot listen there"))?;
    let target = args::Target { kubeconfig: Some(plane.kubeconfig.clone()), ..args::Target::default() };
    let client = crate::user::connect(&target).await?.client;
    let config = page::Config {
        listener,
        client,
        name: site.layout.id.clone(),
        traces: site.options.jaeger.clone(),
        stop: site.serving.clone(),
    };
    let (door, serving) = page::serve(config)?;
    embedded::pki::write_private(&file, format!("{}\n", door.url()).as_bytes())?;
    site.tasks.spawn(serving);
    Ok(Some(door))
}

/// Serves what the control plane tells, inside of the cluster and, where asked for, on the machine, and what the node agents tell.
async fn observe(site: &Site<'_>, plane: &Plane) -> anyhow::Result<()> {
    let outside = site.options.metrics;
    let extra: Vec<String> = outside.iter().map(|a| a.ip().to_string()).collect();
    let identity = site.pki.api_server(&extra)?;
    let tls = https::Tls {
        certificate_pem: identity.cert.into_bytes(),
        key_pem: identity.key.into_bytes(),
        client_ca_pem: site.pki.ca().as_bytes().to_vec(),
    };
    let observed = || Observed {
        registry: site.metrics.clone(),
        client: plane.system.clone(),
        before: None,
        ready: vec![
            (&c::CONTROLLER_READY, observed::ready(&site.controller)),
            (&c::API_READY, observed::ready(&site.gateway)),
        ],
    };
    let inside = SocketAddr::new(API.ip(), METRICS_PORT);
    let listener =
        site.netns.listen(inside).await.with_context(|| format!("cannot listen on {inside} inside of the cluster"))?;
    site.tasks.spawn(logged(observed::serve(observed(), listener, tls.clone(), site.serving.clone())));
    let Some(outside) = outside else { return Ok(()) };
    let wrong = |address: SocketAddr| format!("--metrics {outside}: cannot listen on {address}");
    let listener = https::listen(outside).await.with_context(|| wrong(outside))?;
    site.tasks.spawn(logged(observed::serve(observed(), listener, tls, site.serving.clone())));
    for number in 1..=site.options.nodes {
        let port = outside.port().checked_add(number.into());
        let port = port.with_context(|| format!("--metrics {outside}: there are not so many ports above it"))?;
        let address = SocketAddr::new(outside.ip(), port);
        let listener = https::listen(address).await.with_context(|| wrong(address))?;
        let target = SocketAddr::from((site.layout.node(number).address(), METRICS_PORT));
        let dial = site.dial.clone();
        site.tasks.spawn(network::forward_by(listener, target, dial, site.serving.clone()));
    }
    Ok(())
}

async fn logged(served: impl Future<Output = anyhow::Result<()>>) {
    if let Err(error) = served.await {
        tracing::error!(error = format!("{error:#}"), "metrics are not served");
    }
}

fn absolute(path: &str) -> std::path::PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.into())
}

/// Runs the controller; one that lost its Lease starts anew, with nothing remembered.
async fn lead(config: reconcilers::Config) {
    loop {
        match reconcilers::run(config.clone()).await {
            Ok(()) => return,
            Err(error) => {
                tracing::error!(error = format!("{:#}", anyhow::Error::from(error)), "the controller starts anew");
            }
        }
        tokio::select! {
            () = config.stop.cancelled() => return,
            () = tokio::time::sleep(CONTROLLER_AGAIN) => {}
        }
    }
}

/// Waits until the nodes are ready and schedulable.
async fn nodes_ready(client: &Client, wanted: u8) -> bool {
    use futures::StreamExt;
    use k8s_openapi::api::core::v1::Node;
    use kube::ResourceExt;
    use kube::runtime::{WatchStreamExt, watcher};
    let end = tokio::time::sleep(NODES_READY);
    tokio::pin!(end);
    let api = kube::Api::<Node>::all(client.clone());
    let mut nodes = watcher(api, watcher::Config::default()).default_backoff().applied_objects().boxed();
    let mut ready = std::collections::BTreeSet::new();
    while ready.len() < usize::from(wanted) {
        let node = tokio::select! {
            () = &mut end => return false,
            node = nodes.next() => node,
        };
        let Some(Ok(node)) = node else { continue };
        let schedulable = node.labels().get(api::names::LABEL_SCHEDULABLE).is_some_and(|v| v == "true");
        if cluster::nodes::is_ready(&node) && schedulable {
            ready.insert(node.name_any());
        } else {
            ready.remove(&node.name_any());
        }
    }
    true
}
