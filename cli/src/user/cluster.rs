//! Which cluster, which machine.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::Usage;
use crate::args::{DATA, Target};

/// A client and the namespace that is meant.
pub struct Cluster {
    /// The client.
    pub client: Client,
    /// The namespace.
    pub namespace: String,
}

/// Connects as the flags, KUBECONFIG, `~/.kube/config` or the local cluster's kubeconfig say, in that order.
pub async fn connect(target: &Target) -> anyhow::Result<Cluster> {
    let options = KubeConfigOptions { context: target.context.clone(), ..KubeConfigOptions::default() };
    let kubeconfig = match &target.kubeconfig {
        Some(file) => read(file)?,
        None if std::env::var_os("KUBECONFIG").is_some_and(|v| !v.is_empty()) => Kubeconfig::from_env()
            .context("cannot read KUBECONFIG")?
            .ok_or_else(|| anyhow!("KUBECONFIG names no file"))?,
        None => {
            let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default().join(".kube/config");
            let local = PathBuf::from(DATA).join("kubeconfig");
            let file = [home.clone(), local].into_iter().find(|f| f.exists()).ok_or_else(|| {
                anyhow!(
                    "no cluster: set KUBECONFIG or --kubeconfig (neither {} nor {DATA}/kubeconfig exists)",
                    home.display()
                )
            })?;
            read(&file)?
        }
    };
    let mut config =
        Config::from_custom_kubeconfig(kubeconfig, &options).await.context("the kubeconfig is not usable")?;
    config.connect_timeout = Some(std::time::Duration::from_secs(5));
    config.default_retry = false;
    let namespace = target.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
    let client = Client::try_from(config).context("the kubeconfig is not usable")?;
    Ok(Cluster { client, namespace })
}

/// Reads a kubeconfig. The library's own words have the system's twice.
fn read(file: &Path) -> anyhow::Result<Kubeconfig> {
    Kubeconfig::read_from(file).map_err(|e| anyhow!("cannot read {}: {}", file.display(), deepest(&e)))
}

/// What kind of object a machine was named as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// VirtualMachine.
    Vm,
    /// VirtualMachineInstance.
    Vmi,
}

impl Kind {
    /// The resource in paths.
    pub const fn plural(self) -> &'static str {
        match self {
            Self::Vm => "virtualmachines",
            Self::Vmi => "virtualmachineinstances",
        }
    }
}

/// A machine that the user named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Kind.
    pub kind: Kind,
    /// Name.
    pub name: String,
}

/// Reads `NAME`, `vm/NAME`, `vmi/NAME`, or kind and name apart.
pub fn machine(words: &[String]) -> anyhow::Result<Machine> {
    let (kind, name) = match words {
        [one] => one.split_once('/').unwrap_or(("vm", one)),
        [kind, name] => (kind.as_str(), name.as_str()),
        _ => bail!(Usage("name one machine".into())),
    };
    let kind = match kind {
        "vm" | "vms" | "virtualmachine" | "virtualmachines" => Kind::Vm,
        "vmi" | "vmis" | "virtualmachineinstance" | "virtualmachineinstances" => Kind::Vmi,
        other => bail!(Usage(format!("`{other}` is neither vm nor vmi"))),
    };
    if name.is_empty() || name.contains('/') {
        bail!(Usage(format!("`{}` names no machine", words.join(" "))));
    }
    Ok(Machine { kind, name: name.to_owned() })
}

/// An error of the API server in its own words.
pub fn plain(error: kube::Error) -> anyhow::Error {
    match error {
        kube::Error::Api(status) => anyhow!("{}", status.message),
        kube::Error::Service(source) => anyhow!("the API server cannot be reached: {}", deepest(&*source)),
        kube::Error::HyperError(source) => anyhow!("the API server cannot be reached: {}", deepest(&source)),
        other => anyhow!(other),
    }
}

fn deepest(error: &(dyn std::error::Error + 'static)) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_machine_is_named_in_four_ways() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        for text in ["a", "vm/a", "vm a", "virtualmachine/a"] {
            assert_eq!(machine(&words(text)).unwrap(), Machine { kind: Kind::Vm, name: "a".into() }, "{text}");
        }
        assert_eq!(machine(&words("vmi a")).unwrap().kind, Kind::Vmi);
        for text in ["pod/a", "vm/", "vm/a/b"] {
            assert!(machine(&words(text)).unwrap_err().is::<Usage>(), "{text}");
        }
    }
}
