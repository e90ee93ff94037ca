//! `kubectl` for one API server, whichever that is.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::{
    io::Write,
    path::PathBuf,
    process::{Command, Stdio},
};

/// The real `kubectl`, with a kubeconfig and a cache folder of its own.
#[derive(Clone, Debug)]
pub struct Kubectl {
    /// The kubeconfig.
    pub config: PathBuf,
    /// What it keeps of an API server's discovery.
    pub cache: PathBuf,
}

impl Kubectl {
    /// The command, not started yet.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(crate::rules::root().join("target/venv/bin/kubectl"));
        command.args(arguments).env("KUBECONFIG", &self.config).env("KUBECACHEDIR", &self.cache).stdin(Stdio::null());
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
}

/// Runs a command to its end: its exit code, standard output and standard error.
pub fn finish(command: &mut Command) -> Result<(i32, String, String)> {
    let done = command.output().with_context(|| format!("start {:?}", command.get_program()))?;
    Ok((
        done.status.code().unwrap_or(-1),
        String::from_utf8_lossy(&done.stdout).into_owned(),
        String::from_utf8_lossy(&done.stderr).into_owned(),
    ))
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
