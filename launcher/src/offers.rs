//! What guests can have on a machine: the CPU models, CPU features and machine types that its hypervisor has under the accelerator
//! which is really in use. QEMU is asked itself, without a guest.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};

use crate::hypervisor::qemu::qmp::Qmp;
use crate::machine::Accelerator;
use crate::spec;

/// QEMU needs a tenth of a second for all answers.
const LIMIT: Duration = Duration::from_secs(10);

/// What guests can have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offers {
    /// Models of which nothing is missing.
    pub cpu_models: Vec<String>,
    /// Features that a guest can be given.
    pub cpu_features: Vec<String>,
    /// Vendor, as CPUID says it.
    pub cpu_vendor: String,
    /// Machine types that a launcher starts.
    pub machine_types: Vec<String>,
}

/// Asks the QEMU binary `qemu`. The error says at what it failed.
pub async fn offers(qemu: &Path, accelerator: Accelerator) -> Result<Offers, String> {
    let begun = begin(qemu, accelerator);
    let (mut child, stream) = begun.map_err(|e| format!("running {}: {e}", qemu.display()))?;
    let (qmp, _events) = Qmp::connect(stream);
    let answers = async {
        qmp.execute("qmp_capabilities", Value::Null).await?;
        let expand = |kind: &str| json!({"type": kind, "model": {"name": "max"}});
        let models = qmp.execute("query-cpu-definitions", Value::Null).await?;
        let machines = qmp.execute("query-machines", Value::Null).await?;
        let own = qmp.execute("query-cpu-model-expansion", expand("static")).await?;
        let all = qmp.execute("query-cpu-model-expansion", expand("full")).await?;
        Ok::<_, crate::hypervisor::Error>(read(&models, &machines, &own, &all))
    };
    let offers = match tokio::time::timeout(LIMIT, answers).await {
        Ok(answers) => answers.map_err(|e| e.to_string()),
        Err(_) => Err(format!("no answer within {LIMIT:?}")),
    };
    let _ = child.kill().await;
    offers
}

/// A QEMU without a machine, and the way to its monitor.
fn begin(qemu: &Path, accelerator: Accelerator) -> std::io::Result<(Child, UnixStream)> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let (input, output) = (OwnedFd::from(theirs.try_clone()?), OwnedFd::from(theirs));
    let child = Command::new(qemu)
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-qmp", "stdio", "-machine"])
        .arg(format!("none,accel={}", accelerator.word()))
        .stdin(Stdio::from(input))
        .stdout(Stdio::from(output))
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    Ok((child, UnixStream::from_std(ours)?))
}

fn list(v: &Value) -> impl Iterator<Item = &Value> {
    v.as_array().into_iter().flatten()
}

fn sorted(names: impl Iterator<Item = String>) -> Vec<String> {
    names.collect::<BTreeSet<_>>().into_iter().collect()
}

/// `own` names each CPU feature once; `all` has other spellings, and much that is no feature.
fn read(models: &Value, machines: &Value, own: &Value, all: &Value) -> Offers {
    let word = |v: &Value, key: &str| v.get(key).and_then(Value::as_str).map(str::to_owned);
    let props = |v: &Value| v.pointer("/model/props").and_then(Value::as_object).cloned().unwrap_or_default();
    let on = |v: &Value| -> BTreeSet<String> {
        props(v).into_iter().filter(|(_, v)| *v == Value::Bool(true)).map(|(k, _)| k).collect()
    };
    let features = on(own);
    let spelled = on(all).into_iter().filter(|f| features.contains(&f.replace('_', "-")));
    Offers {
        // What these are differs from machine to machine.
        cpu_models: sorted(
            list(models)
                .filter(|m| m.get("unavailable-features").and_then(Value::as_array).is_some_and(Vec::is_empty))
                .filter_map(|m| word(m, "name"))
                .filter(|name| !["base", "host", "max"].contains(&name.as_str())),
        ),
        cpu_vendor: props(own).get("vendor").and_then(Value::as_str).unwrap_or_default().to_owned(),
        machine_types: sorted(
            list(machines)
                .flat_map(|m| [word(m, "name"), word(m, "alias")])
                .flatten()
                .filter(|name| spec::is_machine_type(name)),
        ),
        cpu_features: sorted(spelled.chain(features.iter().cloned())),
    }
}
