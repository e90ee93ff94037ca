//! One VM of a test.

use super::{
    cluster::{Cluster, condition, items},
    console::Console,
    leaks,
    manifest::VmManifest,
    process, wait,
};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::time::{Duration, Instant};

/// From `kubectl apply` to a running guest; a few seconds on an idle machine, guests that boot beside it slow it down.
pub const START: Duration = Duration::from_secs(90);
/// For objects and processes to go away once the guest is off.
const REMOVAL: Duration = Duration::from_secs(40);

/// A VM that goes away with its test.
pub struct Vm<'a> {
    /// Where it lives.
    pub cluster: &'a Cluster,
    /// Its name, in the namespace `default`.
    pub name: String,
    /// When it was applied.
    pub applied: Instant,
}

/// The parts of a running VM, by their ids.
#[derive(Clone, Debug)]
pub struct Parts {
    /// UID of the VMI.
    pub vmi_uid: String,
    /// Name of the launcher pod.
    pub pod: String,
    /// UID of the launcher pod.
    pub pod_uid: String,
    /// The node.
    pub node: String,
    /// The pod's address.
    pub ip: String,
    /// Process id of the launcher.
    pub launcher: i32,
    /// Process id of QEMU.
    pub qemu: i32,
}

impl<'a> Vm<'a> {
    /// Applies a manifest.
    pub fn apply(cluster: &'a Cluster, manifest: &VmManifest) -> Result<Self> {
        let name = manifest.object["metadata"]["name"].as_str().context("the manifest has no name")?.to_owned();
        cluster.apply(&manifest.text())?;
        Ok(Self { cluster, name, applied: Instant::now() })
    }

    /// Applies a manifest and waits until the guest runs.
    pub fn running(cluster: &'a Cluster, manifest: &VmManifest) -> Result<Self> {
        let vm = Self::apply(cluster, manifest)?;
        vm.wait_phase("Running", START)?;
        Ok(vm)
    }

    /// The VirtualMachine.
    pub fn vm(&self) -> Result<Value> {
        self.cluster.json(&["get", "vm", &self.name])
    }

    /// The VirtualMachineInstance; an error where there is none.
    pub fn vmi(&self) -> Result<Value> {
        self.cluster.json(&["get", "vmi", &self.name])
    }

    /// Waits until the VMI is as wanted.
    pub fn wait_vmi<T>(&self, what: &str, limit: Duration, look: impl Fn(&Value) -> Option<T>) -> Result<T> {
        wait::until(&format!("{what} of {}", self.name), limit, || {
            let vmi = self.vmi()?;
            Ok(look(&vmi).ok_or_else(|| format!("phase {}, status {}", vmi["status"]["phase"], vmi["status"])))
        })
        .map_err(|error| error.context(self.story()))
    }

    /// Waits for a phase of the VMI.
    pub fn wait_phase(&self, phase: &str, limit: Duration) -> Result<()> {
        self.wait_vmi(&format!("phase {phase}"), limit, |vmi| (vmi["status"]["phase"] == phase).then_some(()))
    }

    /// Waits until the VM shows a status to people.
    pub fn wait_printable(&self, status: &str, limit: Duration) -> Result<()> {
        wait::until(&format!("status {status} of {}", self.name), limit, || {
            let vm = self.vm()?;
            let seen = vm["status"]["printableStatus"].as_str().unwrap_or_default().to_owned();
            Ok(if seen == status { Ok(()) } else { Err(format!("{seen}, {}", vm["status"])) })
        })
        .map_err(|error| error.context(self.story()))
    }

    /// Waits for a condition of the VMI.
    pub fn wait_condition(&self, kind: &str, status: &str, limit: Duration) -> Result<()> {
        self.wait_vmi(&format!("{kind}={status}"), limit, |vmi| (condition(vmi, kind).0 == status).then_some(()))
    }

    /// Waits for the pod's address in the VMI's status.
    pub fn ip(&self) -> Result<String> {
        self.wait_vmi("an address", START, |vmi| {
            vmi["status"]["interfaces"][0]["ipAddress"].as_str().filter(|ip| !ip.is_empty()).map(str::to_owned)
        })
    }

    /// Attaches to the console.
    pub fn console(&self) -> Result<Console> {
        Console::attach(self.cluster, &self.name)
    }

    /// Attaches to the console and logs in.
    pub fn shell(&self) -> Result<Console> {
        let mut console = self.console()?;
        console.login().map_err(|error| error.context(self.story()))?;
        Ok(console)
    }

    /// The parts that it consists of now.
    pub fn parts(&self) -> Result<Parts> {
        let vmi = self.vmi()?;
        let vmi_uid = vmi["metadata"]["uid"].as_str().context("the VMI has no UID")?.to_owned();
        let pods = self.cluster.json(&["get", "pods", "-l", &format!("kubevirt.io/created-by={vmi_uid}")])?;
        let [pod] = items(&pods) else { bail!("{} pods for {}", items(&pods).len(), self.name) };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let (launcher, qemu) = process::of_vmi(&vmi_uid);
        Ok(Parts {
            pod: text(&pod["metadata"]["name"]),
            pod_uid: text(&pod["metadata"]["uid"]),
            node: text(&vmi["status"]["nodeName"]),
            ip: text(&pod["status"]["podIP"]),
            launcher: launcher.with_context(|| format!("{} has no launcher process", self.name))?.pid,
            qemu: qemu.with_context(|| format!("{} has no QEMU", self.name))?.pid,
            vmi_uid,
        })
    }

    /// Deletes the VM and waits until nothing of it is left: objects, processes, namespaces, interfaces, mounts, sockets, files. Returns the time
    /// it took.
    pub fn delete(self) -> Result<Duration> {
        let parts = self.parts();
        let began = Instant::now();
        self.cluster.ok(&["delete", "vm", &self.name, "--wait=false"])?;
        let limit = REMOVAL + Duration::from_secs(self.grace());
        for kind in ["vm", "vmi"] {
            wait::until(&format!("the end of {kind} {}", self.name), limit, || {
                let (code, out, error) = self.cluster.kubectl(&["get", kind, &self.name, "-o", "json"])?;
                Ok(if code != 0 && error.contains("NotFound") { Ok(()) } else { Err(format!("{out}{error}")) })
            })
            .map_err(|error| error.context(self.story()))?;
        }
        if let Ok(parts) = parts {
            self.nothing_left(&parts)?;
        }
        Ok(began.elapsed())
    }

    /// Waits until nothing of these parts is left on the machine.
    pub fn nothing_left(&self, parts: &Parts) -> Result<()> {
        wait::until(&format!("the end of all that {} left", self.name), REMOVAL, || {
            let pod = self.cluster.kubectl(&["get", "pod", &parts.pod])?;
            if pod.0 == 0 {
                return Ok(Err(format!("pod {}", parts.pod)));
            }
            let left = leaks::holding(&self.cluster.data, &[&parts.pod_uid, &parts.vmi_uid]);
            Ok(if left.is_empty() { Ok(()) } else { Err(left.join("\n")) })
        })
    }

    fn grace(&self) -> u64 {
        self.vmi().ok().and_then(|vmi| vmi["spec"]["terminationGracePeriodSeconds"].as_u64()).unwrap_or(180)
    }

    /// What a person would look at when something went wrong.
    pub fn story(&self) -> String {
        let mut text = format!("--- {} after {:.1} s\n", self.name, self.applied.elapsed().as_secs_f32());
        for arguments in [
            &["get", "vm,vmi,pod", "-o", "wide"][..],
            &["describe", "vmi", &self.name],
            &["get", "events", "--sort-by=.metadata.creationTimestamp"],
        ] {
            let (_, out, error) =
                self.cluster.kubectl(arguments).unwrap_or_else(|error| (1, String::new(), error.to_string()));
            text += &format!("$ kubectl {}\n{out}{error}\n", arguments.join(" "));
        }
        text + "--- virtfold up\n" + &self.cluster.log_tail()
    }
}

impl Drop for Vm<'_> {
    fn drop(&mut self) {
        // After a failure nobody waits for it; the janitor takes what is left.
        let arguments = ["delete", "vm", &self.name, "--wait=false", "--ignore-not-found"];
        self.cluster.kubectl(&arguments).ok();
    }
}
