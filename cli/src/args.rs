//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Where the cluster lives unless said otherwise.
pub const DATA: &str = "/var/lib/virtfold";

/// Virtual machines as declarative objects: the kubevirt.io API with a control plane that can say why.
#[derive(Debug, Parser)]
#[command(name = "virtfold", version, propagate_version = true, arg_required_else_help = true, after_help = EXIT_CODES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_CODES: &str = "Exit codes: 0 done, 1 it failed, 2 the command line is wrong.";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a whole cluster on this machine until ctrl-C; guests go on
    Up(Up),
    /// Take the cluster of a data folder down: guests, node agents, networks; disks and objects stay
    Down(Down),
    /// Show virtual machines and what they wait for
    Status(Status),
    /// Watch what virtual machines, or nodes, use and wait for, in a terminal
    Top(Top),
    /// Say what happened to a virtual machine, what it waits for and what would help
    Explain(Explain),
    /// Attach to the serial console of a virtual machine; ctrl-] leaves
    Console(Console),
    /// Open the screen of a virtual machine
    Vnc(Vnc),
    /// Forward local TCP ports to a virtual machine
    PortForward(PortForward),
    /// Start a virtual machine
    Start(Start),
    /// Stop a virtual machine
    Stop(Stop),
    /// Stop a virtual machine and start it again
    Restart(Stop),
    /// Halt the processors of a virtual machine; its memory stays
    Pause(Verb),
    /// Let a paused virtual machine go on
    Unpause(Verb),
    /// Press the reset button of a virtual machine: what its guest has not written to disk is lost
    Reset(Verb),
    /// Ask the guest of a virtual machine to reboot: through its agent, or else by the power button
    SoftReboot(Verb),
    /// Run journals through the machines of this build and compare what follows
    Replay(crate::replay::Options),
    /// Print the CustomResourceDefinitions
    Crds(Crds),
    /// Print the version
    Version(Version),
    /// Print a completion script for a shell
    Completion {
        /// The shell.
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
    /// Run a controller for a cluster whose API server is somewhere else (one leads, the others stand by)
    Controller(Controller),
    /// Run a gateway for a cluster whose API server is somewhere else: admission webhooks and the verbs on machines
    Gateway(Gateway),
    /// Run many simulated nodes in one process, to size a cluster
    SimulateNodes(SimulateNodes),
    /// Run a node's agent (started by `up`)
    #[command(hide = true)]
    NodeAgent {
        /// Its configuration.
        #[arg(long)]
        config: PathBuf,
    },
    /// Run a launcher (started in a pod)
    #[command(hide = true)]
    Launcher(Launcher),
    /// Ask the guest of the launcher in the same container (a pod's probe)
    #[command(hide = true)]
    GuestProbe(GuestProbe),
}

/// `virtfold up`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
    With --kubeconfig there is no API server of its own: this machine becomes nodes of the Kubernetes that the file \
    names, controller and gateway of virtual machines included. Definitions and roles are written there, so the file's \
    user must be an administrator. The nodes (node-1, node-2, ...) run launcher pods and nothing else, in a network of their \
    own on this machine; two machines at one Kubernetes are not supported.")]
pub struct Up {
    /// Where everything is kept
    #[arg(long, value_name = "DIR", default_value = DATA, env = "VIRTFOLD_DATA_DIR")]
    pub data_dir: PathBuf,
    /// Run the virtual machines of the Kubernetes that this kubeconfig names, instead of a cluster of its own
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// With --kubeconfig: bind pods to nodes, too, for a Kubernetes without kube-scheduler
    #[arg(long, requires = "kubeconfig")]
    pub scheduler: bool,
    /// With --kubeconfig: where its API server reaches the gateway, if not by the address of --listen
    #[arg(long, value_name = "HOST:PORT", requires = "kubeconfig", value_parser = place)]
    pub gateway: Option<(String, u16)>,
    /// With --kubeconfig: how long the certificates live that the gateway shows to the API server (`36h`, `90d`)
    #[arg(long, value_name = "TIME", requires = "kubeconfig", default_value = "90d", value_parser = crate::journal::seconds)]
    pub certificate_life: u64,
    /// Address and port of the API server, or with --kubeconfig of the gateway
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:6443")]
    pub listen: SocketAddr,
    /// Number of nodes, each with an agent and a network of its own
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub nodes: u8,
    /// Take an image from a local OCI layout instead of a registry (may be given again)
    #[arg(long = "image", value_name = "REF=LAYOUT", value_parser = pair)]
    pub images: Vec<(String, String)>,
    /// Ask another registry, `docker.io=http://127.0.0.1:5000` (may be given again)
    #[arg(long = "registry-mirror", value_name = "FROM=TO", value_parser = pair)]
    pub mirrors: Vec<(String, String)>,
    /// Trust registries whose certificate was signed by one in this PEM file (may be given again)
    #[arg(long = "registry-ca", value_name = "FILE")]
    pub authorities: Vec<PathBuf>,
    /// Send traces to this OTLP collector; further OTEL_EXPORTER_OTLP_* and OTEL_TRACES_SAMPLER variables count, too
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<String>,
    /// Serve `/metrics` (HTTPS, for those who may get that path), `/healthz` and `/readyz` of the control plane there, and those of
    /// the n-th node's agent n ports further up
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics: Option<SocketAddr>,
    /// Where the page is shown that browsers on this machine can open; an address of the loopback interface. By default at port 9430,
    /// or at any that is free where that one is taken
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = loopback)]
    pub page: Option<SocketAddr>,
    /// Where people look at traces in Jaeger, such as `http://127.0.0.1:16686`; the page's traces lead there
    #[arg(long, value_name = "URL", value_parser = web)]
    pub jaeger: Option<String>,
    /// Show no page
    #[arg(long, conflicts_with = "page")]
    pub no_page: bool,
    /// At the end, stop the guests and take everything down as `down` does
    #[arg(long)]
    pub stop_guests: bool,
    /// Run no controller: a `virtfold controller` beside it does, in the cluster's network
    #[arg(long, hide = true, conflicts_with = "kubeconfig")]
    pub no_controller: bool,
    /// Emulate the processors of guests even where hardware could run them
    #[arg(long)]
    pub use_emulation: bool,
    /// How much of the journals is kept
    #[command(flatten)]
    pub journal: crate::journal::Bounds,
}

/// A host and a port.
fn place(text: &str) -> Result<(String, u16), String> {
    let parts = text.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    match parts {
        Some((host, port)) if !host.is_empty() && !host.contains(':') => Ok((host.to_owned(), port)),
        _ => Err("a host name or an IPv4 address, and a port are expected".to_owned()),
    }
}

/// An address that nobody else reaches.
fn loopback(text: &str) -> Result<SocketAddr, String> {
    let address: SocketAddr = text.parse().map_err(|_| "an IP address and a port are expected".to_owned())?;
    match address.ip().is_loopback() {
        true => Ok(address),
        false => Err(
            "an address of the loopback interface is expected, since the page has no TLS; from elsewhere use 'ssh -L'"
                .into(),
        ),
    }
}

/// An address for browsers, without the slash at its end.
fn web(text: &str) -> Result<String, String> {
    match text.parse::<http::Uri>() {
        Ok(uri)
            if matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some() && uri.query().is_none() =>
        {
            Ok(text.trim_end_matches('/').to_owned())
        }
        _ => Err("an address that begins with http:// or https:// is expected".into()),
    }
}

fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((from, to)) if !from.is_empty() && !to.is_empty() => Ok((from.to_owned(), to.to_owned())),
        _ => Err("two values with = between them are expected".to_owned()),
    }
}

/// `virtfold down`.
#[derive(Debug, Clone, Args)]
pub struct Down {
    /// The data folder of the cluster
    #[arg(long, value_name = "DIR", default_value = DATA, env = "VIRTFOLD_DATA_DIR")]
    pub data_dir: PathBuf,
    /// Seconds that guests get to shut down before they are killed
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub grace: u64,
}

/// Which cluster, and where in it.
#[derive(Debug, Clone, Default, Args)]
pub struct Target {
    /// The kubeconfig file
    #[arg(long, value_name = "FILE", global = true)]
    pub kubeconfig: Option<PathBuf>,
    /// The context in it
    #[arg(long, value_name = "NAME", global = true)]
    pub context: Option<String>,
    /// The namespace
    #[arg(short, long, value_name = "NAME", global = true)]
    pub namespace: Option<String>,
}

/// A virtual machine: `NAME`, `vm/NAME`, `vmi/NAME`, or the kind and the name apart.
#[derive(Debug, Clone, Args)]
pub struct Machine {
    /// The machine: NAME, vm/NAME, vmi/NAME (or `vm NAME`)
    #[arg(value_name = "VM", required = true, num_args = 1..=2)]
    pub machine: Vec<String>,
}

/// `virtfold status`.
#[derive(Debug, Clone, Args)]
pub struct Status {
    /// Only this machine, with its conditions
    #[arg(value_name = "VM", num_args = 0..=2)]
    pub machine: Vec<String>,
    /// Of all namespaces
    #[arg(short = 'A', long)]
    pub all_namespaces: bool,
    /// How to print
    #[arg(short, long, value_enum)]
    pub output: Option<Output>,
    /// Which cluster
    #[command(flatten)]
    pub target: Target,
}

/// `virtfold top`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
    In a terminal: q quits, arrows and page keys scroll, n s c m a sort by name, status, CPU, memory and age, r turns the order around, \
    o shows the others (nodes or machines), w shows more columns, space stops and goes on. What it needs is the right to list \
    virtualmachines, virtualmachineinstances and `usage` in subresources.kubevirt.io, which the role `view` has. CPU is in processors; \
    memory is what the guest says that it uses.")]
pub struct Top {
    /// Of what
    #[arg(value_enum, default_value = "vms")]
    pub what: Tops,
    /// Of all namespaces
    #[arg(short = 'A', long)]
    pub all_namespaces: bool,
    /// Print one table and end, which is what happens where the output is no terminal
    #[arg(long)]
    pub once: bool,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub interval: u64,
    /// By what the rows are sorted; the greatest CPU, memory and age come first
    #[arg(long, value_enum, default_value = "name")]
    pub sort: Sort,
    /// The other way around
    #[arg(long)]
    pub reverse: bool,
    /// How to print; with json and yaml once
    #[arg(short, long, value_enum)]
    pub output: Option<Output>,
    /// Which cluster
    #[command(flatten)]
    pub target: Target,
}

/// What `virtfold top` shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Tops {
    /// Virtual machines
    #[value(alias = "vm", alias = "vmi", alias = "vmis")]
    Vms,
    /// Nodes, and the machines on them
    #[value(alias = "node", alias = "no")]
    Nodes,
}

/// By what `virtfold top` sorts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Sort {
    /// Namespace and name
    Name,
    /// Status
    Status,
    /// Processors in use
    Cpu,
    /// Memory in use
    Memory,
    /// Age
    Age,
}

/// `virtfold explain`.
#[derive(Debug, Clone, Args)]
#[command(
    after_help = "The answer comes from the controller that leads and from its journal; it needs the right to get \
    virtualmachines/explain (virtualmachineinstances/explain, virtualmachineinstancereplicasets/explain, nodes/explain) in \
    subresources.kubevirt.io, which the role `view` has. \
    With --journal it comes from the files alone, without a cluster. docs/explain.md describes the JSON."
)]
pub struct Explain {
    /// The machine: NAME, vm/NAME, vmi/NAME, or its launcher pod: pod/NAME. A set: vmirs/NAME. A node: node/NAME
    #[arg(value_name = "VM", required = true, num_args = 1..=2)]
    pub machine: Vec<String>,
    /// Read a controller's journal in this folder instead of asking the cluster
    #[arg(long, value_name = "DIR")]
    pub journal: Option<PathBuf>,
    /// How to print
    #[arg(short, long, value_enum)]
    pub output: Option<Output>,
    /// Which cluster
    #[command(flatten)]
    pub target: Target,
}

/// How to print.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// JSON
    Json,
    /// YAML
    Yaml,
    /// A table with more columns
    Wide,
}

/// `virtfold console`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "When the input is no terminal, what is read from it is typed; at its end, the output is \
    printed until nothing has come for a second.")]
pub struct Console {
    /// The machine.
    #[command(flatten)]
    pub machine: Machine,
    /// Wait this long for the machine to run (seconds)
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    pub timeout: u64,
    /// Which cluster
    #[command(flatten)]
    pub target: Target,
}

/// `virtfold vnc`.
#[derive(Debug, Clone, Args)]
pub struct Vnc {
    /// The machine.
    #[command(flatten)]
    pub machine: Machine,
    /// Only listen, start no viewer; the port is printed as JSON
    #[arg(long)]
    pub proxy_only: bool,
    /// Local port; 0 for any
    #[arg(long, default_value_t = 0)]
    pub port: u16,
    /// Which cluster
    #[command(flatten)]
    pub target: Target,
}

/// `virtfold port-forward`.
#[derive(Debug, Clone, Args)]
pub struct PortForward {
    /// The machine: NAME, vm/NAME, vmi/NAME
    #[arg(value_name = "VM")]
    pub machine: String,
    /// Ports: REMOTE or LOCAL:REMOTE; LOCAL 0 for any
    #[arg(value_name = "[LOCAL:]REMOTE", required = true)]
    pub ports: Vec<String>,
    /// Local address
    #[arg(long, default_value = "127.0.0.1")]
    pub address: std::net::IpAddr,
    /// Which cluster
    #[command(flatten)]
    pub target: Target,
}

/// `virtfold start`.
#[derive(Debug, Clone, Args)]
pub struct Start {
    /// The machine.
    #[command(flatten)]
    pub machine: Machine,
    /// Start it paused
    #[arg(long)]
    pub paused: bool,
    /// Which cluster
    #[command(flatten)]
    pub target: Target,
}

/// `virtfold stop` and `restart`.
#[derive(Debug, Clone, Args)]
pub struct Stop {
    /// The machine.
    #[command(flatten)]
    pub machine: Machine,
    /// Seconds that the guest gets to shut down
    #[arg(long, value_name = "SECONDS")]
    pub grace_period: Option<i64>,
    /// Do not ask the guest; with a grace period of 0
    #[arg(long)]
    pub force: bool,
    /// Which cluster
    #[command(flatten)]
    pub target: Target,
}

/// `virtfold pause`, `unpause`, `reset` and `soft-reboot`.
#[derive(Debug, Clone, Args)]
pub struct Verb {
    /// The machine.
    #[command(flatten)]
    pub machine: Machine,
    /// Which cluster
    #[command(flatten)]
    pub target: Target,
}

/// `virtfold crds`.
#[derive(Debug, Clone, Args)]
pub struct Crds {
    /// Print the namespace and the roles of virtfold's parts, too, and the policy that keeps status to them
    #[arg(long)]
    pub roles: bool,
    /// Print the webhooks and the aggregated API, too, of a gateway that the API server reaches at this place
    #[arg(long, value_name = "HOST:PORT", value_parser = place)]
    pub gateway: Option<(String, u16)>,
    /// How to print
    #[arg(short, long, value_enum, default_value = "yaml")]
    pub output: Output,
}

/// `virtfold version`.
#[derive(Debug, Clone, Args)]
pub struct Version {
    /// Do not ask the cluster
    #[arg(long)]
    pub client: bool,
    /// How to print
    #[arg(short, long, value_enum)]
    pub output: Option<Output>,
    /// Which cluster
    #[command(flatten)]
    pub target: Target,
}

/// Who a component is to the other components.
#[derive(Debug, Clone, Args)]
pub struct AgentTls {
    /// Certificate of the authority that all components trust
    #[arg(long, value_name = "FILE")]
    pub ca: PathBuf,
    /// This component's certificate; its common name says what it may do
    #[arg(long, value_name = "FILE")]
    pub cert: PathBuf,
    /// The key of the certificate
    #[arg(long, value_name = "FILE")]
    pub key: PathBuf,
}

/// `virtfold controller`.
#[derive(Debug, Clone, Args)]
#[command(
    after_help = "The certificate's common name must be virtfold-controller, and with --listen its DNS name, too. A controller that \
    does not lead any more ends with exit code 1; start it again."
)]
pub struct Controller {
    /// The kubeconfig file of the API server
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    pub kubeconfig: PathBuf,
    /// Its identity to node agents
    #[command(flatten)]
    pub tls: AgentTls,
    /// Where it answers gateways that ask why (`virtfold explain`); the address is written into the Lease. Without it only a
    /// gateway in the same process can ask
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,
    /// Namespace of the Lease by which one controller leads
    #[arg(long, value_name = "NAME", default_value = embedded::cluster::bootstrap::NAMESPACE)]
    pub namespace: String,
    /// A leader that has been silent for so long is replaced; all controllers of a cluster have the same (2s, 15s, 1m)
    #[arg(long, value_name = "TIME", default_value = "15s", value_parser = lease)]
    pub lease_duration: std::time::Duration,
    /// Serve `/metrics` (HTTPS, for those who may get that path), `/healthz` and `/readyz` there
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics: Option<SocketAddr>,
    /// Folder of the journal; without it nothing is recorded
    #[arg(long, value_name = "DIR")]
    pub journal: Option<PathBuf>,
    /// How much of it is kept
    #[command(flatten)]
    pub bounds: crate::journal::Bounds,
    /// Send traces to this OTLP collector; further OTEL_EXPORTER_OTLP_* and OTEL_TRACES_SAMPLER variables count, too
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<String>,
    /// What is logged, to standard error
    #[arg(long, value_name = "FILTER", default_value = "info")]
    pub log: String,
}

/// `virtfold gateway`.
#[derive(Debug, Clone, Args)]
#[command(
    after_help = "The certificate's common name must be virtfold-gateway. The API server finds the gateway by what `virtfold crds \
    --gateway HOST:PORT` prints, and trusts it by certificates that the gateway makes, replaces at half of their life, and \
    writes there itself. While no gateway answers nothing can be created and no spec changed; everything else goes on."
)]
pub struct Gateway {
    /// The kubeconfig file of the API server
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    pub kubeconfig: PathBuf,
    /// Its identity to node agents and controllers
    #[command(flatten)]
    pub tls: AgentTls,
    /// Address and port for the API server
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:9443")]
    pub listen: SocketAddr,
    /// Folder for the certificates that it shows to the API server
    #[arg(long, value_name = "DIR")]
    pub certificates: PathBuf,
    /// How long these live (`36h`, `90d`)
    #[arg(long, value_name = "TIME", default_value = "90d", value_parser = crate::journal::seconds)]
    pub certificate_life: u64,
    /// Serve `/metrics` (HTTPS, for those who may get that path), `/healthz` and `/readyz` there
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics: Option<SocketAddr>,
    /// Namespace of the Lease by which one controller leads
    #[arg(long, value_name = "NAME", default_value = embedded::cluster::bootstrap::NAMESPACE)]
    pub namespace: String,
    /// Send traces to this OTLP collector; further OTEL_EXPORTER_OTLP_* and OTEL_TRACES_SAMPLER variables count, too
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<String>,
    /// What is logged, to standard error
    #[arg(long, value_name = "FILTER", default_value = "info")]
    pub log: String,
}

/// `virtfold simulate-nodes`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
    Each node has a Node object and a real node agent with a session, a certificate and a watch of its own; launchers \
    and guests are models. So the API server, etcd and the controller work as hard as with that many machines, and \
    nothing else does. Without --kubelet somebody else must run the pods: a simulated launcher begins when its pod's \
    status says Running.\n\n\
    To see how a cluster with 500 nodes would do:\n  \
    virtfold simulate-nodes --kubeconfig admin.conf --pki /etc/virtfold/pki --count 500 --kubelet --scheduler \\\n    \
    --start-delay 800ms --boot-delay 2s\n\
    then create VirtualMachines and watch 'kubectl get vm'. Ctrl-C ends the nodes and removes their Node objects.")]
pub struct SimulateNodes {
    /// The kubeconfig file of the API server; a user with the rights of nodes, and with --scheduler of a scheduler
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    pub kubeconfig: PathBuf,
    /// Folder with ca.crt and ca.key of the authority that all components trust; the nodes' certificates are issued there
    #[arg(long, value_name = "DIR")]
    pub pki: PathBuf,
    /// Number of nodes
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=5000))]
    pub count: u32,
    /// What the nodes' names begin with
    #[arg(long, default_value = "sim-")]
    pub prefix: String,
    /// Where the agents listen, each at a port of its own; the controller must reach it
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub address: std::net::IpAddr,
    /// Play the kubelet: run, end and remove launcher pods, renew the nodes' Leases
    #[arg(long)]
    pub kubelet: bool,
    /// Play the scheduler: bind launcher pods to the nodes in turn
    #[arg(long)]
    pub scheduler: bool,
    /// From a pod's binding until its container runs, with --kubelet (200ms, 2s)
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = duration)]
    pub start_delay: std::time::Duration,
    /// From the instruction to start until the guest's processors run
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = duration)]
    pub boot_delay: std::time::Duration,
    /// From then until the guest agent answers; without it guests have none
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub guest_agent: Option<std::time::Duration>,
    /// From the power button until the guest is off
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = duration)]
    pub shutdown_delay: std::time::Duration,
    /// CPUs of each node
    #[arg(long, value_name = "QUANTITY", default_value = "64")]
    pub cpu: String,
    /// Memory of each node
    #[arg(long, value_name = "QUANTITY", default_value = "256Gi")]
    pub memory: String,
    /// Pods that each node takes
    #[arg(long, default_value_t = 500)]
    pub pods: u32,
    /// Where the agents keep what they must remember; without it a folder in memory that goes away
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Send traces to this OTLP collector; further OTEL_EXPORTER_OTLP_* and OTEL_TRACES_SAMPLER variables count, too
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<String>,
    /// Write down what really happens in the launchers, as lines of JSON
    #[arg(long, value_name = "FILE", hide = true)]
    pub tell: Option<PathBuf>,
    /// Leave the Node objects at the end
    #[arg(long)]
    pub keep_nodes: bool,
    /// What is logged, to standard error
    #[arg(long, value_name = "FILTER", default_value = "warn")]
    pub log: String,
}

fn duration(text: &str) -> Result<std::time::Duration, String> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let scale = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        _ => return Err("a number and a unit (ms, s, m) are expected".to_owned()),
    };
    let number: u64 = number.parse().map_err(|_| "a number and a unit (ms, s, m) are expected".to_owned())?;
    let millis = number.checked_mul(scale).filter(|m| *m <= 3_600_000).ok_or("at most an hour")?;
    Ok(std::time::Duration::from_millis(millis))
}

/// The Lease counts whole seconds.
fn lease(text: &str) -> Result<std::time::Duration, String> {
    let time = duration(text)?;
    if time.as_secs() < 1 || time.subsec_nanos() != 0 {
        return Err("whole seconds are expected, at least one".to_owned());
    }
    Ok(time)
}

/// A launcher's command line on its own: a launcher lives as long as its machine, and does not build up the commands of people.
#[derive(Debug, Parser)]
#[command(name = "virtfold launcher")]
pub struct Alone {
    /// All of it.
    #[command(flatten)]
    pub launcher: Launcher,
}

/// `virtfold launcher`, as a launcher pod calls it.
#[derive(Debug, Clone, Args)]
pub struct Launcher {
    /// Name of the VirtualMachineInstance.
    #[arg(long)]
    pub name: String,
    /// Its namespace.
    #[arg(long)]
    pub namespace: String,
    /// Its UID.
    #[arg(long)]
    pub vmi_uid: String,
    /// The folder shared with the node agent.
    #[arg(long, default_value = "/run/virtfold")]
    pub share_dir: PathBuf,
    /// Seconds of grace.
    #[arg(long, default_value_t = 30)]
    pub grace_period_seconds: u64,
    /// UID of the pod.
    #[arg(long, env = "POD_UID")]
    pub pod_uid: String,
}

/// `virtfold guest-probe`, as a launcher pod's probes call it.
#[derive(Debug, Clone, Args)]
pub struct GuestProbe {
    /// The folder of the launcher's socket.
    #[arg(long, default_value = "/run/virtfold")]
    pub share_dir: PathBuf,
    /// Seconds until there has to be an answer.
    #[arg(long, default_value_t = 1)]
    pub timeout_seconds: u64,
    /// What to run in the guest; nothing: ask whether its agent answers.
    #[arg(last = true)]
    pub command: Vec<String>,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn durations_have_units_and_bounds() {
        assert_eq!(duration("250ms").unwrap().as_millis(), 250);
        assert_eq!(duration("2m").unwrap().as_secs(), 120);
        for bad in ["", "5", "ms", "-1s", "1.5s", "2h", "99999999999999999999s", "61m"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn wrong_command_lines_are_usage_errors() {
        for line in [
            "virtfold up --image x",
            "virtfold up --nodes 0",
            "virtfold top pods",
            "virtfold top --interval 0",
            "virtfold console",
            "virtfold port-forward vm/a",
        ] {
            let error = Cli::try_parse_from(line.split(' ')).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{line}");
        }
    }
}
