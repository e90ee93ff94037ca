//! What is done to the network of a cluster: the proxy in its midst, and rules in the namespaces of its nodes.

use super::proxy::{self, Mode};
use crate::e2e::{cluster::binaries, wait};
use anyhow::{Context, Result, bail};
use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// Tells the kernel rules for the packets of one network namespace.
pub fn nft(netns: &str, script: &str) -> Result<()> {
    let mut child = Command::new("ip")
        .args(["netns", "exec", netns, "nft", "-f", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("start nft")?;
    child.stdin.take().context("nft has no input")?.write_all(script.as_bytes())?;
    let done = child.wait_with_output()?;
    if !done.status.success() {
        bail!("nft in {netns}: {}", String::from_utf8_lossy(&done.stderr));
    }
    Ok(())
}

/// Which way nothing passes between a node and the control plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// What is sent to the node.
    In,
    /// What the node sends.
    Out,
    /// Both.
    Both,
}

/// Cuts a node off.
pub fn cut(netns: &str, way: Way) -> Result<()> {
    let mut script = "table ip chaoscut {\n".to_owned();
    if way != Way::Out {
        script += "chain in { type filter hook input priority 0; ip saddr 10.244.0.1 drop; }\n";
    }
    if way != Way::In {
        script += "chain out { type filter hook output priority 0; ip daddr 10.244.0.1 drop; }\n";
    }
    nft(netns, &(script + "}\n"))
}

/// Joins it again.
pub fn join(netns: &str) -> Result<()> {
    nft(netns, "delete table ip chaoscut\n")
}

/// The proxy's process.
pub struct Proxy {
    child: Child,
    pipe: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
}

impl Proxy {
    /// Starts it in a cluster's network, and sends everything there. The data folder is on its command line, so that it is
    /// found by whoever takes the cluster away.
    pub fn start(netns: &str, data: &Path) -> Result<Self> {
        let mut child = Command::new("ip")
            .args(["netns", "exec", netns])
            .arg(binaries()?.join("virtfold-chaos"))
            .arg("proxy")
            .arg(data)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start the proxy")?;
        let input = child.stdin.take().context("no input")?;
        let mut output = BufReader::new(child.stdout.take().context("no output")?);
        let mut line = String::new();
        output.read_line(&mut line)?;
        if line.trim() != "ready" {
            bail!("the proxy does not start: {line:?}");
        }
        nft(netns, &proxy::rules())?;
        Ok(Self { child, pipe: Mutex::new((input, output)) })
    }

    /// From now on it does that.
    pub fn set(&self, mode: Mode) -> Result<()> {
        let mut pipe = self.pipe.lock().unwrap_or_else(PoisonError::into_inner);
        let (input, output) = &mut *pipe;
        writeln!(input, "{mode}").context("the proxy has ended")?;
        let mut line = String::new();
        output.read_line(&mut line)?;
        if line.trim() != mode.to_string() {
            bail!("the proxy says {line:?} to {mode}");
        }
        Ok(())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.child.kill().ok();
        let gone = wait::until("the end of the proxy", Duration::from_secs(5), || {
            Ok(self.child.try_wait()?.ok_or_else(|| "still there".to_owned()))
        });
        drop(gone);
    }
}
