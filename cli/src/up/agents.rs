//! Node agents: processes of their own that outlive the supervisor.
//!
//! An agent is known by pid and start time (`agent.pid`) and by what it was told (`agent.json`, which also says which build
//! of the program it is). A start finds the agents of the one before: same build and same words, it is adopted; otherwise it is
//! replaced, which no guest notices. An agent that dies is started again.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::Context;
use embedded::procs::ProcessId;
use serde::{Deserialize, Serialize};
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;

use super::layout::{Layout, Node};

/// How long an agent gets to stop.
const STOP_GRACE: Duration = Duration::from_secs(10);
/// How often an agent that is not our child is looked at.
const LOOK: Duration = Duration::from_millis(500);
/// Longest wait between two starts.
const RESTART_MAX: Duration = Duration::from_secs(10);
/// A log above this size is put aside when an agent starts.
const LOG_BYTES: u64 = 16 << 20;

/// What a node agent is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentConfig {
    /// Which build of the program this is for.
    pub build: String,
    /// The program.
    pub binary: PathBuf,
    /// The cluster.
    pub layout: Layout,
    /// The node.
    pub node: Node,
    /// Certificate authority, certificate and key, PEM files.
    pub ca: PathBuf,
    /// Its certificate.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// Fingerprint of authority and certificate: an agent with others is replaced.
    #[serde(default)]
    pub credentials: String,
    /// How it reaches an API server that its certificate is nothing to.
    #[serde(default)]
    pub kubeconfig: Option<PathBuf>,
    /// Images that come from local OCI layouts.
    pub images: Vec<(String, PathBuf)>,
    /// Registries that are asked instead of others.
    pub mirrors: Vec<(String, String)>,
    /// Certificates, in PEM, that may vouch for registries.
    #[serde(default)]
    pub authorities: Vec<String>,
    /// Collector of traces.
    pub otlp_endpoint: Option<String>,
    /// Where it is reached.
    #[serde(default)]
    pub otlp_via: Option<std::net::SocketAddr>,
    /// Whether it keeps the newest steps, for a page that shows them.
    #[serde(default)]
    pub keep_steps: bool,
    /// Fingerprint of what else the environment says of telemetry: an agent with another one is replaced.
    #[serde(default)]
    pub environment: String,
    /// How much of its journal is kept.
    pub journal: crate::journal::Bounds,
    /// Never use KVM.
    pub use_emulation: bool,
    /// Filter of its log.
    pub log_filter: String,
}

/// Fingerprint of the variables that say where telemetry goes; they are inherited, and some are secrets.
pub fn environment() -> String {
    use sha2::{Digest, Sha256};
    let mut all: Vec<_> = std::env::vars_os()
        .filter(|(name, _)| name.to_str().is_some_and(|n| n.starts_with("OTEL_") || n == telemetry::logs::FORMAT))
        .collect();
    all.sort();
    let hash = Sha256::digest(format!("{all:?}"));
    hash.iter().take(8).map(|b| format!("{b:02x}")).collect()
}

/// Which build of the program runs: version, size and time of the file.
pub fn build(binary: &Path) -> String {
    use std::os::unix::fs::MetadataExt;
    let file =
        std::fs::metadata(binary).map(|m| format!("{}-{}-{}", m.len(), m.mtime(), m.mtime_nsec())).unwrap_or_default();
    format!("{}-{file}", env!("CARGO_PKG_VERSION"))
}

/// Keeps one agent running until `stop`; it goes on when this returns.
pub async fn keep(config: AgentConfig, stop: CancellationToken) {
    let node = config.node.clone();
    let mut wait = Duration::from_millis(100);
    let mut child: Option<Child> = None;
    loop {
        let since = Instant::now();
        let running = match ensure(&config, &mut child).await {
            Ok(running) => running,
            Err(error) => {
                tracing::error!(node = node.name, error = format!("{error:#}"), "the node agent does not start");
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(wait) => {}
                }
                wait = (wait * 2).min(RESTART_MAX);
                continue;
            }
        };
        let ended = async {
            match &mut child {
                Some(child) => child.wait().await.map_or_else(|e| e.to_string(), |s| s.to_string()),
                None => {
                    while running.alive() {
                        tokio::time::sleep(LOOK).await;
                    }
                    "nobody collected its status".to_owned()
                }
            }
        };
        let status = tokio::select! {
            // A child is not killed when its handle goes.
            () = stop.cancelled() => return,
            status = ended => status,
        };
        child = None;
        wait = if since.elapsed() > Duration::from_secs(30) {
            Duration::from_millis(100)
        } else {
            (wait * 2).min(RESTART_MAX)
        };
        tracing::warn!(node = node.name, %status, "the node agent ended; starting it again in {wait:?}");
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// Adopts the agent that runs, if it is the right one, or starts it.
async fn ensure(config: &AgentConfig, child: &mut Option<Child>) -> anyhow::Result<ProcessId> {
    let node = &config.node;
    std::fs::create_dir_all(&node.data).with_context(|| format!("cannot make {}", node.data.display()))?;
    std::fs::create_dir_all(&node.run).with_context(|| format!("cannot make {}", node.run.display()))?;
    if let Some(running) = ProcessId::load(&node.pid_file()).filter(ProcessId::alive) {
        let told = std::fs::read(node.config_file()).ok();
        if told.and_then(|bytes| serde_json::from_slice(&bytes).ok()).as_ref() == Some(config) {
            tracing::info!(node = node.name, pid = running.pid, "the node agent of an earlier start is adopted");
            return Ok(running);
        }
        tracing::info!(
            node = node.name,
            pid = running.pid,
            "the node agent is replaced: program or configuration changed"
        );
        running.end(STOP_GRACE).await;
    }
    let text = serde_json::to_vec_pretty(config)?;
    embedded::pki::write_private(&node.config_file(), &text)?;
    if std::fs::metadata(node.log()).is_ok_and(|m| m.len() > LOG_BYTES) {
        let _ = std::fs::rename(node.log(), node.log().with_extension("log.1"));
    }
    let log = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(node.log())
        .with_context(|| format!("cannot open {}", node.log().display()))?;
    let started = Command::new(&config.binary)
        .arg("node-agent")
        .arg("--config")
        .arg(node.config_file())
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("cannot run {}", config.binary.display()))?;
    let id = started.id().and_then(|pid| ProcessId::of(pid.cast_signed())).context("the node agent ended at once")?;
    id.save(&node.pid_file()).with_context(|| format!("cannot write {}", node.pid_file().display()))?;
    tracing::info!(node = node.name, pid = id.pid, "node agent started");
    *child = Some(started);
    Ok(id)
}

/// Stops the agent of a node, if one runs.
pub async fn stop(node: &Node) {
    if let Some(running) = ProcessId::load(&node.pid_file()) {
        running.end(STOP_GRACE).await;
    }
    let _ = std::fs::remove_file(node.pid_file());
}
