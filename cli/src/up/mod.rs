//! `virtfold up`: the supervisor, which is the control plane in one process, etcd as a child, and node agents beside it.
//!
//! What is started first is what can say no at once: the lock of the data folder, the programs that are needed, the port. Then
//! certificates, networks, etcd, API server, controllers, gateway, agents. It ends in the reverse order. Agents and guests go
//! on unless `--stop-guests` says otherwise; the next start, also after a `kill -9`, finds them again.

pub mod agents;
pub mod down;
mod gate;
pub mod layout;
mod network;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use embedded::auth::User;
use embedded::etcd::Etcd;
use embedded::lock::Lock;
use embedded::netns::Netns;
use embedded::pki::{self, Identity, Pki};
use embedded::server::https::{self, HttpsError, Tls};
use embedded::server::{ApiServer, Config as ServerConfig};
use embedded::{cluster, storage};
use kube::Client;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::args;
use agents::AgentConfig;
use layout::{API, Layout};

/// Programs that are needed, and the Debian packages that bring them.
const PROGRAMS: [(&str, &str); 6] = [
    ("etcd", "etcd-server"),
    ("ip", "iproute2"),
    ("nft", "nftables"),
    ("runc", "runc"),
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("qemu-img", "qemu-utils"),
];
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
    let missing: Vec<_> =
        PROGRAMS.iter().filter(|(program, _)| embedded::procs::find_program(program).is_none()).collect();
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
struct Story(Instant);

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
        json: false,
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
    let address = listener.local_addr()?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut running = tokio::select! {
        started = start(&options, &layout, listener, &story) => started?,
        _ = terminate.recv() => bail!("ended before it had started"),
        _ = interrupt.recv() => bail!("ended before it had started"),
    };
    let server = server_url(address);
    pki::write_private(
        &layout.data("kubeconfig"),
        pki::kubeconfig(&server, running.pki.ca(), &running.admin).as_bytes(),
    )?;
    story.say(&format!("kubeconfig written to {}", layout.data("kubeconfig").display()));

    let ready = async {
        let all = nodes_ready(&running.client, options.nodes).await;
        story.say(if all {
            "all nodes are ready"
        } else {
            "not all nodes are ready; their logs are in DATA/nodes/*/agent.log"
        });
        println!("{}", next_steps(&layout));
        println!(
            "READY api={server} kubeconfig={} nodes={} all-ready={all}",
            layout.data("kubeconfig").display(),
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
    running.etcd.stop().await;
    running.server.take();
    if options.stop_guests {
        down::end_rest(&layout).await?;
    }
    story.say("stopped");
    telemetry.shutdown().await;
    Ok(())
}

fn server_url(address: SocketAddr) -> String {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        ip => ip,
    };
    format!("https://{}", SocketAddr::new(ip, address.port()))
}

fn next_steps(layout: &Layout) -> String {
    let program = std::env::args().next().unwrap_or_else(|| "virtfold".into());
    format!(
        "\nTry next, in another terminal:\n  export KUBECONFIG={}\n  kubectl get nodes\n  kubectl apply -f docs/demo/vm.yaml\n  \
         {program} status\nctrl-C stops the control plane; guests go on until `{program} down --data-dir {}`.\n",
        layout.data("kubeconfig").display(),
        layout.data.display(),
    )
}

/// What a start has made.
struct Running {
    pki: Pki,
    admin: Identity,
    etcd: Arc<Etcd>,
    server: Option<ApiServer>,
    client: Client,
    tasks: TaskTracker,
    serving: CancellationToken,
    controller_tasks: TaskTracker,
    controllers: CancellationToken,
    agents: CancellationToken,
}

async fn start(
    options: &args::Up,
    layout: &Layout,
    listener: tokio::net::TcpListener,
    story: &Story,
) -> anyhow::Result<Running> {
    let pki = Pki::open(&layout.data("pki"))?;
    let extra: Vec<String> = (!options.listen.ip().is_loopback() && !options.listen.ip().is_unspecified())
        .then(|| options.listen.ip().to_string())
        .into_iter()
        .collect();
    let serving_identity = pki.api_server(&extra)?;
    let admin = pki.client("admin", Some("system:masters"))?;
    let token_key = pki.secret("service-accounts")?;
    let netns = network::cluster(layout).await?;
    let inner_listener =
        netns.listen(API).await.with_context(|| format!("cannot listen on {API} inside of the cluster"))?;
    story.say(&format!("certificates and network are there (namespaces vf-{}-*)", layout.id));

    let etcd = Etcd::start(layout.etcd()).await?;
    story.say("etcd answers");
    // From here on, a failure must not leave etcd behind.
    match start_on(options, layout, listener, inner_listener, story, &pki, &serving_identity, token_key, &netns, &etcd)
        .await
    {
        Ok((server, client, rest)) => {
            let (tasks, serving, controller_tasks, controllers, agents) = rest;
            Ok(Running {
                pki,
                admin,
                etcd,
                server: Some(server),
                client,
                tasks,
                serving,
                controller_tasks,
                controllers,
                agents,
            })
        }
        Err(error) => {
            etcd.stop().await;
            Err(error)
        }
    }
}

type Rest = (TaskTracker, CancellationToken, TaskTracker, CancellationToken, CancellationToken);

#[expect(clippy::too_many_arguments, reason = "one caller, which has made all of them")]
async fn start_on(
    options: &args::Up,
    layout: &Layout,
    listener: tokio::net::TcpListener,
    inner_listener: tokio::net::TcpListener,
    story: &Story,
    pki: &Pki,
    serving_identity: &Identity,
    token_key: Vec<u8>,
    netns: &Netns,
    etcd: &Etcd,
) -> anyhow::Result<(ApiServer, Client, Rest)> {
    let store = storage::Etcd::new(&etcd.endpoint())?;
    let config = ServerConfig {
        token_key,
        issuer: "https://kubernetes.default.svc.cluster.local".into(),
        ..ServerConfig::default()
    };
    let server = ApiServer::new(Arc::new(store), config).await.context("the API server cannot start")?;
    server.set_logs(Arc::new(embedded::pods::NodeLogs::new(&layout.data("nodes"))));
    let system = server.client(User::system("system:virtfold:cluster"));
    cluster::bootstrap::run(&system).await.context("the cluster's first objects cannot be written")?;

    let dial = {
        let netns = netns.clone();
        let dial: proto::transport::Dial = Arc::new(move |address| {
            let netns = netns.clone();
            Box::pin(async move { netns.dial(address).await })
        });
        dial
    };
    let component = |name: &str| -> anyhow::Result<proto::transport::Tls> {
        let identity = pki.client(name, None)?;
        Ok(proto::transport::Tls { ca: pki.ca().to_owned(), cert: identity.cert, key: identity.key })
    };
    let explainer = reconcilers::Explainer::default();
    gate::install(&server, &dial, component("virtfold-gateway")?, explainer.clone());

    let (tasks, serving) = (TaskTracker::new(), CancellationToken::new());
    let acceptor = https::acceptor(&Tls {
        certificate_pem: serving_identity.cert.clone().into_bytes(),
        key_pem: serving_identity.key.clone().into_bytes(),
        client_ca_pem: pki.ca().as_bytes().to_vec(),
    })?;
    for socket in [listener, inner_listener] {
        tasks.spawn(server.clone().serve(socket, acceptor.clone(), serving.clone()));
    }
    story.say(&format!("the API server listens on {}", options.listen));

    let (controller_tasks, controllers) = (TaskTracker::new(), CancellationToken::new());
    let folders = cluster::Options { volumes: layout.data("volumes"), imports: layout.data("import") };
    controller_tasks.spawn(cluster::run(system.clone(), folders, controllers.clone()));
    let controller = reconcilers::Config {
        client: server.client(User::new(gate::CONTROLLER, &[])),
        dial,
        tls: component(gate::CONTROLLER)?,
        // The lock of the data folder proves that there is no other.
        lease: reconcilers::lease::LeaseConfig { exclusive: true, ..Default::default() },
        journal: Some(options.journal.config(layout.data("journal").join("controller"), "controller")),
        explainer,
        cluster: state::vm::ClusterConfig::default(),
        stop: controllers.clone(),
    };
    controller_tasks.spawn(lead(controller));

    let collector = match &options.otlp_endpoint {
        Some(endpoint) => Some(network::relay(netns, endpoint).await?),
        None => None,
    };
    let agents = CancellationToken::new();
    let binary = std::env::current_exe().context("the program does not know where it is")?;
    for number in 1..=options.nodes {
        let node = layout.node(number);
        network::node(netns, &node).await?;
        let identity = pki.node(&node.name)?;
        let file = |ending: &str| layout.data("pki").join(format!("node-{}.{ending}", node.name));
        let config = AgentConfig {
            build: agents::build(&binary),
            binary: binary.clone(),
            layout: layout.clone(),
            ca: layout.data("pki").join("ca.crt"),
            cert: file("crt"),
            key: file("key"),
            credentials: pki.fingerprint(&identity),
            images: options.images.iter().map(|(reference, folder)| (reference.clone(), absolute(folder))).collect(),
            mirrors: options.mirrors.clone(),
            authorities: options
                .authorities
                .iter()
                .map(|file| embedded::images::authorities(file))
                .collect::<Result<_, _>>()
                .context("--registry-ca")?,
            otlp_endpoint: collector.clone(),
            use_emulation: options.use_emulation,
            journal: options.journal.clone(),
            // What a client says of a server that is away is said by who asked.
            log_filter: std::env::var("VIRTFOLD_LOG")
                .unwrap_or_else(|_| "info,kube_client::client::builder=off".into()),
            node,
        };
        tasks.spawn(agents::keep(config, agents.clone()));
    }
    for surplus in (u16::from(options.nodes) + 1..=100).filter_map(|n| u8::try_from(n).ok()) {
        let node = layout.node(surplus);
        if node.pid_file().exists() {
            story
                .say(&format!("{} is not among the {} nodes any more; its agent is stopped", node.name, options.nodes));
            agents::stop(&node).await;
        }
    }
    story.say(&format!("{} node agent(s) started or found again", options.nodes));
    Ok((server, system, (tasks, serving, controller_tasks, controllers, agents)))
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
