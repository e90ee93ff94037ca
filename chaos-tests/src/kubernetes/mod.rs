//! A real control plane of Kubernetes for tests and benches: etcd, kube-apiserver, kube-controller-manager, on loopback, with
//! certificates of their own, and the parts of virtfold as processes beside them.
//!
//! kube-controller-manager runs the controllers without which nothing works (garbage collection, namespaces, service accounts,
//! quotas) and no others unless a test asks for them: nodes and pods belong to whoever plays them.

pub mod calls;
pub mod load;
mod process;

pub use process::Process;

use crate::e2e::{
    cluster::{Janitor, free_port, virtfold},
    kubectl::Kubectl,
};
use anyhow::{Context, Result, bail};
use embedded::pki::{Identity, Pki, kubeconfig, write_private};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// From the start of kube-apiserver to its readiness; it takes ten seconds where other things run.
const READY: Duration = Duration::from_secs(120);
/// Controllers of kube-controller-manager that run.
const CONTROLLERS: &str =
    "garbage-collector-controller,namespace-controller,serviceaccount-controller,resourcequota-controller";
/// Those that run besides where users have roles: our part of `view` and `edit` gets into them.
pub const FOR_ROLES: &str = "clusterrole-aggregation-controller";
/// Those that run besides where nodes are real.
pub const FOR_NODES: &str = "node-lifecycle-controller,pod-garbage-collector-controller";
/// User of the controller, as its certificate says.
pub const CONTROLLER: &str = "virtfold-controller";
/// User of the gateway.
pub const GATEWAY: &str = "virtfold-gateway";
/// User of the simulated nodes.
pub const NODES: &str = "virtfold-nodes";

/// What is written down of the calls: of our controller every call, its writes with their bodies; of the simulated nodes the writes.
const AUDIT: &str = r#"{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
"omitManagedFields": true, "rules": [
    {"level": "Request", "users": ["virtfold-controller"], "verbs": ["create", "update", "patch", "delete"],
     "resources": [{"group": "kubevirt.io"}, {"group": ""}, {"group": "apps"}]},
    {"level": "Metadata", "users": ["virtfold-controller"]},
    {"level": "Metadata", "users": ["virtfold-nodes"], "verbs": ["create", "update", "patch", "delete"]},
    {"level": "None"}
]}"#;

/// The same of the controller's calls, without bodies.
const LEAN: &str = r#"{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": [
    {"level": "Metadata", "users": ["virtfold-controller"]}, {"level": "None"}]}"#;

/// The folder of the built programs, or why there is none.
pub fn programs() -> std::result::Result<PathBuf, String> {
    let folder = crate::rules::root().join("target/go/bin");
    if ["kube-apiserver", "kube-controller-manager"].iter().all(|program| folder.join(program).exists()) {
        Ok(folder)
    } else {
        Err("there is no kube-apiserver in target/go/bin; scripts/go-tools builds it, and needs Go".into())
    }
}

/// A running control plane. When it is dropped, or this program dies, all of it goes away.
pub struct Kubernetes {
    /// Certificates, kubeconfigs, etcd's data, logs.
    pub data: PathBuf,
    /// Where kube-apiserver listens.
    pub port: u16,
    /// Administrator's token, for clients that take no certificate.
    pub token: String,
    pki: Pki,
    kubectl: Kubectl,
    /// Where its store is.
    pub store: String,
    // In the order in which they end.
    /// kube-controller-manager.
    pub manager: Process,
    /// kube-apiserver.
    pub server: Process,
    /// Its store.
    pub etcd: Process,
    _janitor: Janitor,
}

impl std::ops::Deref for Kubernetes {
    type Target = Kubectl;
    fn deref(&self) -> &Kubectl {
        &self.kubectl
    }
}

impl Kubernetes {
    /// Starts it and waits until it is ready.
    pub fn start() -> Result<Self> {
        Self::begin("", AUDIT, &[])
    }

    /// Starts it with further controllers of kube-controller-manager, and waits until it is ready.
    pub fn start_with(controllers: &str) -> Result<Self> {
        Self::begin(controllers, AUDIT, &[])
    }

    /// Starts one whose store can be read by others: built-in kinds, too, are JSON there.
    pub fn start_readable(controllers: &str) -> Result<Self> {
        Self::begin(controllers, LEAN, &["--storage-media-type=application/json"])
    }

    /// Starts it, and bodies of calls are not written down.
    pub fn start_lean() -> Result<Self> {
        Self::begin("", LEAN, &[])
    }

    fn begin(controllers: &str, policy: &str, more: &[&str]) -> Result<Self> {
        let programs = programs().map_err(anyhow::Error::msg)?;
        let data = tempfile::Builder::new().prefix("virtfold-kubernetes-").tempdir()?.keep();
        let janitor = Janitor::start(&data)?;
        let pki = Pki::open(&data.join("pki"))?;
        let (client_port, peer_port, port) = (free_port()?, free_port()?, free_port()?);
        let etcd = Process::start(
            &data,
            "etcd",
            Command::new(embedded::procs::find_program("etcd").context("etcd is not in PATH")?)
                .arg(format!("--data-dir={}", data.join("etcd").display()))
                .arg(format!("--listen-client-urls=http://127.0.0.1:{client_port}"))
                .arg(format!("--advertise-client-urls=http://127.0.0.1:{client_port}"))
                .arg(format!("--listen-peer-urls=http://127.0.0.1:{peer_port}"))
                .arg(format!("--initial-advertise-peer-urls=http://127.0.0.1:{peer_port}"))
                .arg(format!("--initial-cluster=default=http://127.0.0.1:{peer_port}"))
                .args(["--quota-backend-bytes=4294967296", "--logger=zap", "--log-level=warn"]),
        )?;

        pki.api_server(&[])?;
        let admin = pki.client("admin", Some("system:masters"))?;
        pki.client("service-accounts", None)?;
        pki.client("front-proxy", None)?;
        let token = uuid::Uuid::new_v4().simple().to_string();
        write_private(&data.join("tokens.csv"), format!("{token},admin-by-token,1,system:masters\n").as_bytes())?;
        fs::write(data.join("audit.json"), policy).context("write the audit policy")?;
        let file = |flag: &str, name: &str| format!("--{flag}={}", data.join(name).display());
        let server = Process::start(
            &data,
            "kube-apiserver",
            Command::new(programs.join("kube-apiserver"))
                .arg(format!("--etcd-servers=http://127.0.0.1:{client_port}"))
                .arg(format!("--secure-port={port}"))
                .args(["--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none"])
                .args(["--authorization-mode=RBAC", "--allow-privileged=true", "--profiling=false"])
                .args(["--service-cluster-ip-range=10.96.0.0/16", "--event-ttl=1h"])
                .arg("--service-account-issuer=https://kubernetes.default.svc.cluster.local")
                .args([file("service-account-key-file", "pki/client-service-accounts.crt")])
                .args([file("service-account-signing-key-file", "pki/client-service-accounts.key")])
                .args([file("tls-cert-file", "pki/api-server.crt"), file("tls-private-key-file", "pki/api-server.key")])
                .args([file("client-ca-file", "pki/ca.crt"), file("token-auth-file", "tokens.csv")])
                .args([file("requestheader-client-ca-file", "pki/ca.crt")])
                .args(["--requestheader-allowed-names=front-proxy", "--requestheader-username-headers=X-Remote-User"])
                .args(["--requestheader-group-headers=X-Remote-Group"])
                .args(["--requestheader-extra-headers-prefix=X-Remote-Extra-"])
                .args([file("proxy-client-cert-file", "pki/client-front-proxy.crt")])
                .args([file("proxy-client-key-file", "pki/client-front-proxy.key")])
                .args(more)
                .args([file("audit-policy-file", "audit.json"), file("audit-log-path", "audit.log")]),
        )?;
        let url = format!("https://127.0.0.1:{port}");
        write_private(&data.join("kubeconfig"), kubeconfig(&url, pki.ca(), &admin).as_bytes())?;
        let kubectl = Kubectl { config: data.join("kubeconfig"), cache: data.join("kubecache") };
        server.ready("kube-apiserver", READY, || {
            let (code, out, error) = kubectl.kubectl(&["get", "--raw", "/readyz"])?;
            Ok(if code == 0 { Ok(()) } else { Err(format!("{out}{error}")) })
        })?;
        let manager = Process::start(
            &data,
            "kube-controller-manager",
            Command::new(programs.join("kube-controller-manager"))
                .args([
                    file("kubeconfig", "kubeconfig"),
                    format!("--controllers={CONTROLLERS},{controllers}").trim_end_matches(',').to_owned(),
                ])
                .args(["--leader-elect=false", "--secure-port=0", "--profiling=false"])
                // The default, 20 requests a second, would be what we measure.
                .args(["--kube-api-qps=2000", "--kube-api-burst=2000", "--concurrent-gc-syncs=20"]),
        )?;
        let store = format!("http://127.0.0.1:{client_port}");
        Ok(Self { data, port, token, pki, kubectl, store, manager, server, etcd, _janitor: janitor })
    }

    /// Brings our definitions and roles, and waits until they are served.
    pub fn install(&self) -> Result<()> {
        self.install_with(&[])
    }

    /// The same, with further arguments for what prints them.
    pub fn install_with(&self, arguments: &[&str]) -> Result<()> {
        let printed = Command::new(virtfold()?).args(["crds", "--roles", "-o", "json"]).args(arguments).output()?;
        if !printed.status.success() {
            bail!("virtfold crds: {}", String::from_utf8_lossy(&printed.stderr));
        }
        let (code, out, error) = self.feed(&["create"], &String::from_utf8_lossy(&printed.stdout))?;
        if code != 0 {
            bail!("the API server does not take what 'virtfold crds --roles' prints: {out}{error}");
        }
        self.ok(&["wait", "--for=condition=Established", "--timeout=120s", "crd", "--all"])?;
        Ok(())
    }

    /// Where clients go.
    pub fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// The kubeconfig of a user.
    pub fn kubeconfig_of(&self, user: &str, group: Option<&str>) -> Result<PathBuf> {
        let path = self.data.join(format!("{user}.kubeconfig"));
        let identity = self.pki.client(user, group)?;
        write_private(&path, kubeconfig(&self.url(), self.pki.ca(), &identity).as_bytes())?;
        Ok(path)
    }

    /// The authority that all parts trust.
    pub fn authority(&self) -> &Pki {
        &self.pki
    }

    /// A file of the authority's folder.
    pub fn pki_file(&self, name: &str) -> PathBuf {
        self.data.join("pki").join(name)
    }

    /// Starts the controller.
    pub fn controller(&self, name: &str) -> Result<Process> {
        self.controller_with(name, &[])
    }

    /// Starts the controller with further arguments.
    pub fn controller_with(&self, name: &str, arguments: &[&str]) -> Result<Process> {
        let mut command = self.part("controller", CONTROLLER)?;
        command.args(["--journal".as_ref(), self.data.join(name).join("journal").as_os_str()]).args(arguments);
        Process::start(&self.data, name, &mut command)
    }

    /// Starts a gateway with further arguments. Its certificates are kept from one to the next.
    pub fn gateway(&self, name: &str, arguments: &[&str]) -> Result<Process> {
        let mut command = self.part("gateway", GATEWAY)?;
        command.args(["--certificates".as_ref(), self.data.join("gateway").as_os_str()]).args(arguments);
        Process::start(&self.data, name, &mut command)
    }

    /// A part that is a process of its own, as who it is.
    pub fn part(&self, subcommand: &str, user: &str) -> Result<Command> {
        let kubeconfig = self.kubeconfig_of(user, None)?;
        self.pki.component(user)?;
        let file = |ending: &str| self.pki_file(&format!("component-{user}.{ending}"));
        let mut command = Command::new(virtfold()?);
        command
            .args([subcommand.as_ref(), "--kubeconfig".as_ref(), kubeconfig.as_os_str()])
            .args(["--ca".as_ref(), self.pki_file("ca.crt").as_os_str()])
            .args(["--cert".as_ref(), file("crt").as_os_str(), "--key".as_ref(), file("key").as_os_str()]);
        Ok(command)
    }

    /// Starts simulated nodes, with further arguments, and waits until controllers can reach them.
    pub fn nodes(&self, count: u32, arguments: &[&str]) -> Result<Process> {
        let kubeconfig = self.kubeconfig_of(NODES, Some("system:masters"))?;
        let process = Process::start(
            &self.data,
            "simulate-nodes",
            Command::new(virtfold()?)
                .args(["simulate-nodes".as_ref(), "--kubeconfig".as_ref(), kubeconfig.as_os_str()])
                .args(["--pki".as_ref(), self.data.join("pki").as_os_str()])
                .args(["--count", &count.to_string()])
                .args(arguments),
        )?;
        process.ready("the simulated nodes", READY, || {
            let nodes = self.ok(&["get", "nodes", "-l", "kubevirt.io/schedulable=true", "-o", "name"])?;
            let seen = nodes.lines().count();
            Ok(if seen >= count as usize { Ok(()) } else { Err(format!("{seen} nodes")) })
        })?;
        Ok(process)
    }

    /// The calls that were written down, oldest first.
    pub fn calls(&self) -> Result<Vec<calls::Call>> {
        self.server.check()?;
        calls::read(&self.data.join("audit.log"))
    }

    /// A client's identity.
    pub fn identity(&self, user: &str, group: Option<&str>) -> Result<Identity> {
        Ok(self.pki.client(user, group)?)
    }
}

/// The last lines of a file.
pub(crate) fn tail(path: &Path, lines: usize) -> String {
    let text = fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
