//! A cluster of `virtfold up` for tests.

use super::{leaks, process, wait};
use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::{
    fs::{self, File},
    io::Write,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::Mutex,
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
    options: Options,
    up: Mutex<Option<Child>>,
    janitor: Option<(Child, ChildStdin)>,
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

/// A port of the loopback interface that was free a moment ago.
pub fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
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
        let data = tempfile::Builder::new().prefix("virtfold-e2e-").tempdir().context("make a data folder")?.keep();
        let janitor = binaries()?.join("virtfold-chaos");
        let mut janitor = Command::new(&janitor)
            .arg("janitor")
            .arg(&data)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("start {}", janitor.display()))?;
        let pipe = janitor.stdin.take().context("the janitor has no standard input")?;
        Ok(Self { data, port: free_port()?, options, up: Mutex::new(None), janitor: Some((janitor, pipe)) })
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
        ended
    }

    /// The kubeconfig that `virtfold up` wrote.
    pub fn kubeconfig(&self) -> PathBuf {
        self.data.join("kubeconfig")
    }

    fn log(&self) -> PathBuf {
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

    /// A `kubectl` with the cluster's kubeconfig.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(crate::rules::root().join("target/venv/bin/kubectl"));
        command
            .args(arguments)
            .env("KUBECONFIG", self.kubeconfig())
            .env("KUBECACHEDIR", self.data.with_extension("kubecache"))
            .stdin(Stdio::null());
        command
    }

    /// Runs `kubectl`: its exit code, standard output and standard error.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<(i32, String, String)> {
        finish(&mut self.command(arguments))
    }

    /// Runs `kubectl`, which must succeed; returns its standard output.
    pub fn ok(&self, arguments: &[&str]) -> Result<String> {
        let (code, out, error) = self.kubectl(arguments)?;
        if code != 0 {
            bail!("kubectl {} ended with {code}: {out}{error}", arguments.join(" "));
        }
        Ok(out)
    }

    /// Runs `kubectl`, which must refuse; returns its standard error.
    pub fn refused(&self, arguments: &[&str]) -> Result<String> {
        let (code, out, error) = self.kubectl(arguments)?;
        if code == 0 {
            bail!("kubectl {} should have been refused: {out}", arguments.join(" "));
        }
        Ok(error)
    }

    /// Runs `kubectl ... -o json`.
    pub fn json(&self, arguments: &[&str]) -> Result<Value> {
        let mut arguments = arguments.to_vec();
        arguments.extend(["-o", "json"]);
        serde_json::from_str(&self.ok(&arguments)?).context("read kubectl's JSON")
    }

    /// Feeds `kubectl` a manifest: `verb` is `apply`, `create` and the like.
    pub fn feed(&self, verb: &[&str], manifest: &str) -> Result<(i32, String, String)> {
        let mut arguments = verb.to_vec();
        arguments.extend(["-f", "-"]);
        let mut child =
            self.command(&arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        if let Some(mut input) = child.stdin.take() {
            input.write_all(manifest.as_bytes())?;
        }
        let done = child.wait_with_output()?;
        Ok((
            done.status.code().unwrap_or(-1),
            String::from_utf8_lossy(&done.stdout).into_owned(),
            String::from_utf8_lossy(&done.stderr).into_owned(),
        ))
    }

    /// `kubectl apply`, which must succeed.
    pub fn apply(&self, manifest: &str) -> Result<String> {
        let (code, out, error) = self.feed(&["apply"], manifest)?;
        if code != 0 {
            bail!("kubectl apply ended with {code}: {error}");
        }
        Ok(out)
    }

    /// `kubectl apply`, which must be refused; returns what it said.
    pub fn apply_refused(&self, manifest: &str) -> Result<String> {
        let (code, out, error) = self.feed(&["apply"], manifest)?;
        if code == 0 {
            bail!("should have been refused: {out}\n{manifest}");
        }
        Ok(error)
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
        if let Some((mut janitor, pipe)) = self.janitor.take() {
            drop(pipe);
            janitor.wait().ok();
        }
        fs::remove_dir_all(self.data.with_extension("kubecache")).ok();
        if !std::thread::panicking() {
            fs::remove_file(self.log()).ok();
        }
    }
}

/// What is left on the machine of a cluster that was taken down.
pub fn leftovers(data: &Path) -> Vec<String> {
    leaks::of_cluster(data)
}

fn finish(command: &mut Command) -> Result<(i32, String, String)> {
    let done = command.output().with_context(|| format!("start {:?}", command.get_program()))?;
    Ok((
        done.status.code().unwrap_or(-1),
        String::from_utf8_lossy(&done.stdout).into_owned(),
        String::from_utf8_lossy(&done.stderr).into_owned(),
    ))
}

fn tail(path: &Path, lines: usize) -> String {
    let text = fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// The items of a list.
pub fn items(list: &Value) -> &[Value] {
    list["items"].as_array().map(Vec::as_slice).unwrap_or_default()
}

/// Status and reason of a condition; empty where there is none.
pub fn condition<'a>(object: &'a Value, kind: &str) -> (&'a str, &'a str) {
    let conditions = object["status"]["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
    match conditions.iter().find(|condition| condition["type"] == kind) {
        Some(found) => (found["status"].as_str().unwrap_or_default(), found["reason"].as_str().unwrap_or_default()),
        None => ("", ""),
    }
}
