//! A cluster of `virtfold up` for tests.

use super::kubectl::finish;
pub use super::kubectl::{condition, items};
use super::{kubectl::Kubectl, leaks, process, wait};
use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use std::{
    fs::{self, File},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

/// From `virtfold up` to an API server with schedulable nodes. A second or two on an idle machine.
const READY: Duration = Duration::from_secs(90);

/// How a cluster is started.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of nodes.
    pub nodes: u32,
    /// Further arguments of `virtfold up`.
    pub arguments: Vec<String>,
    /// Further variables of its environment.
    pub environment: Vec<(String, String)>,
}

impl Default for Options {
    fn default() -> Self {
        Self { nodes: 1, arguments: Vec::new(), environment: Vec::new() }
    }
}

/// A running cluster with a data folder of its own. When it is dropped, or the test program dies, all of it goes away.
pub struct Cluster {
    /// The data folder.
    pub data: PathBuf,
    /// Where the API server listens.
    pub port: u16,
    kubectl: Kubectl,
    /// Whether the API server is somebody else's.
    foreign: bool,
    options: Options,
    up: Mutex<Option<Child>>,
    janitor: Option<Janitor>,
}

/// The folder that holds the built binaries.
pub fn binaries() -> Result<PathBuf> {
    let mut folder = std::env::current_exe().context("find the test program")?;
    folder.pop();
    if folder.ends_with("deps") {
        folder.pop();
    }
    Ok(folder)
}

/// The binary under test.
pub fn virtfold() -> Result<PathBuf> {
    let path = match std::env::var_os("VIRTFOLD") {
        Some(path) => path.into(),
        None => binaries()?.join("virtfold"),
    };
    if !path.exists() {
        bail!("{} is not built: run 'cargo build --workspace --bins'", path.display());
    }
    Ok(path)
}

/// The folder of the guest image.
pub fn guest() -> Result<PathBuf> {
    let folder = crate::rules::root().join("target/guest");
    if !folder.join("oci/index.json").exists() {
        bail!("{} has no guest image: run 'make guest'", folder.display());
    }
    Ok(folder)
}

/// A process that takes a cluster away when this program ends, in whatever way, or drops this.
#[derive(Debug)]
pub struct Janitor(Child, Option<ChildStdin>);

impl Janitor {
    /// For the cluster whose data folder this is.
    pub fn start(data: &Path) -> Result<Self> {
        let program = binaries()?.join("virtfold-chaos");
        let mut child = Command::new(&program)
            .arg("janitor")
            .arg(data)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("start {}", program.display()))?;
        let pipe = child.stdin.take();
        Ok(Self(child, pipe))
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        drop(self.1.take());
        self.0.wait().ok();
    }
}

/// Ports that [`free_ports`] gives: below those that the kernel gives to outgoing connections, one of which would take it before whoever asked
/// for it listens there.
const PORTS: std::ops::Range<u16> = 15_000..32_000;

/// A port of the loopback interface that is free, and that nobody else in this program gets.
pub fn free_port() -> Result<u16> {
    free_ports(1)
}

/// The first of so many ports, one after the other, that are free, and that nobody else in this program gets.
pub fn free_ports(count: u16) -> Result<u16> {
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    let all = u32::from(PORTS.end - PORTS.start - count);
    // Programs that run at the same time begin elsewhere.
    let begin = std::process::id().wrapping_mul(7_919);
    for _ in 0..all {
        let taken = TAKEN.fetch_add(count.into(), Ordering::Relaxed);
        let first = PORTS.start + u16::try_from(begin.wrapping_add(taken) % all)?;
        if (first..first + count).all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok()) {
            return Ok(first);
        }
    }
    bail!("no {count} free ports in {PORTS:?}")
}

impl Cluster {
    /// Starts a cluster and waits until its nodes are ready.
    pub fn start(options: Options) -> Result<Self> {
        let cluster = Self::prepare(options)?;
        cluster.up()?;
        Ok(cluster)
    }

    /// A cluster that is not started yet: its data folder is there, and empty.
    pub fn prepare(options: Options) -> Result<Self> {
        Self::with(options, None)
    }

    /// One more variable of the environment of what will be started.
    pub fn environ(&mut self, name: &str, value: &str) {
        self.options.environment.push((name.into(), value.into()));
    }

    /// The virtual machines of a Kubernetes that somebody else runs: starts `virtfold up` for it and waits for its nodes.
    pub fn join(kubernetes: &Kubectl, options: Options) -> Result<Self> {
        let cluster = Self::with(options, Some(kubernetes.clone()))?;
        cluster.up()?;
        Ok(cluster)
    }

    fn with(options: Options, kubernetes: Option<Kubectl>) -> Result<Self> {
        let data = tempfile::Builder::new().prefix("virtfold-e2e-").tempdir().context("make a data folder")?.keep();
        let janitor = Some(Janitor::start(&data)?);
        let foreign = kubernetes.is_some();
        let own = || Kubectl { config: data.join("kubeconfig"), cache: data.with_extension("kubecache") };
        let kubectl = kubernetes.unwrap_or_else(own);
        Ok(Self { data, port: free_port()?, kubectl, foreign, options, up: Mutex::new(None), janitor })
    }

    /// Starts `virtfold up` on the data folder, and waits until it serves and its nodes are ready.
    pub fn up(&self) -> Result<()> {
        *self.lock() = Some(self.spawn()?);
        self.wait_ready()
    }

    /// Starts `virtfold up` and does not wait.
    pub fn spawn(&self) -> Result<Child> {
        let log = File::options().create(true).append(true).open(self.log()).context("open the log")?;
        let mut command = Command::new(virtfold()?);
        command
            .args(["up", "--listen", &format!("127.0.0.1:{}", self.port), "--nodes", &self.options.nodes.to_string()])
            .arg("--data-dir")
            .arg(&self.data)
            .arg("--image")
            .arg(format!("{}={}", super::manifest::IMAGE, guest()?.join("oci").display()))
            .args(self.foreign.then_some("--kubeconfig"))
            .args(self.foreign.then_some(&self.config))
            .args(&self.options.arguments)
            .envs(self.options.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        command.spawn().context("start virtfold up")
    }

    /// Waits until the API server answers and every node is ready and schedulable.
    pub fn wait_ready(&self) -> Result<()> {
        wait::until("the cluster", READY, || {
            if let Some(status) = self.lock().as_mut().and_then(|child| child.try_wait().ok().flatten()) {
                return Ok(Err(format!("virtfold up ended with {status}:\n{}", self.log_tail())));
            }
            if !self.kubeconfig().exists() {
                return Ok(Err("no kubeconfig yet".into()));
            }
            let nodes = self.json(&["get", "nodes"])?;
            let ready = items(&nodes).iter().filter(|node| {
                condition(node, "Ready").0 == "True" && node["metadata"]["labels"]["kubevirt.io/schedulable"] == "true"
            });
            let ready = ready.count();
            Ok(if ready == self.options.nodes as usize { Ok(()) } else { Err(format!("{ready} nodes ready")) })
        })
        .with_context(|| format!("virtfold up said:\n{}", self.log_tail()))
    }

    /// The id of the `virtfold up` process.
    pub fn up_pid(&self) -> Result<i32> {
        Ok(self.lock().as_ref().context("virtfold up is not running")?.id() as i32)
    }

    /// `kill -9` for `virtfold up`.
    pub fn kill_up(&self) -> Result<()> {
        let mut child = self.lock().take().context("virtfold up is not running")?;
        child.kill().context("kill virtfold up")?;
        child.wait().context("wait for virtfold up")?;
        Ok(())
    }

    /// Asks `virtfold up` to end; returns its exit code.
    pub fn terminate(&self, limit: Duration) -> Result<Option<i32>> {
        let mut child = self.lock().take().context("virtfold up is not running")?;
        process::signal(child.id() as i32, Signal::SIGTERM)?;
        let ended = wait::until("the end of virtfold up", limit, || {
            Ok(child.try_wait()?.map(|status| status.code()).ok_or_else(|| "still running".to_owned()))
        });
        if ended.is_err() {
            child.kill().ok();
            child.wait().ok();
        }
        if matches!(ended, Ok(Some(0))) {
            self.assert_replays()?;
        }
        ended
    }

    /// Fails unless the machines do again all that the journals of this cluster say.
    pub fn assert_replays(&self) -> Result<()> {
        let journals = self.data.join("journal").display().to_string();
        let (code, said, errors) = self.virtfold(&["replay", &journals])?;
        if code != 0 {
            bail!("virtfold replay {journals} ended with {code}:\n{said}{errors}");
        }
        println!("{said}");
        Ok(())
    }

    /// The kubeconfig that `virtfold up` wrote, or was given.
    pub fn kubeconfig(&self) -> PathBuf {
        self.config.clone()
    }

    /// What `virtfold up` says.
    pub fn log(&self) -> PathBuf {
        // Beside the data folder: it must outlive it for a failure's sake, and must not be in the product's way.
        self.data.with_extension("log")
    }

    /// The last lines of what `virtfold up` and the node agents said.
    pub fn log_tail(&self) -> String {
        let mut text = tail(&self.log(), 60);
        for number in 1..=self.options.nodes {
            let log = self.data.join(format!("nodes/node-{number}/agent.log"));
            text += &format!("\n--- {}\n{}", log.display(), tail(&log, 40));
        }
        text
    }

    /// Runs one of the user's commands of the binary: its exit code, standard output and standard error.
    pub fn virtfold(&self, arguments: &[&str]) -> Result<(i32, String, String)> {
        finish(Command::new(virtfold()?).args(arguments).env("KUBECONFIG", self.kubeconfig()).stdin(Stdio::null()))
    }

    /// The names of the nodes.
    pub fn nodes(&self) -> Result<Vec<String>> {
        let nodes = self.json(&["get", "nodes"])?;
        Ok(items(&nodes).iter().filter_map(|node| node["metadata"]["name"].as_str().map(str::to_owned)).collect())
    }

    /// The process id of a node's agent.
    pub fn agent_pid(&self, node: &str) -> Result<i32> {
        process::pid_in(&self.data.join("nodes").join(node).join("agent.pid"))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Child>> {
        self.up.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl std::ops::Deref for Cluster {
    type Target = Kubectl;
    fn deref(&self) -> &Kubectl {
        &self.kubectl
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Some(mut child) = self.lock().take() {
            process::signal(child.id() as i32, Signal::SIGTERM).ok();
            let limit = Duration::from_secs(10);
            if wait::until("the end", limit, || Ok(child.try_wait()?.ok_or_else(String::new))).is_err() {
                child.kill().ok();
                child.wait().ok();
            }
        }
        // Before the log goes: what is taken down may say something.
        drop(self.janitor.take());
        if !self.foreign {
            fs::remove_dir_all(&self.cache).ok();
        }
        if !std::thread::panicking() {
            fs::remove_file(self.log()).ok();
        }
    }
}

/// What is left on the machine of a cluster that was taken down.
pub fn leftovers(data: &Path) -> Vec<String> {
    leaks::of_cluster(data)
}

fn tail(path: &Path, lines: usize) -> String {
    let text = fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
