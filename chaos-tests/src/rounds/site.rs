//! The cluster that is hurt: `virtfold up` without a controller, and controllers beside it that lead by a Lease of two seconds and
//! are started again when they end, as a Deployment would.

use super::{net::Proxy, witness::Store};
use crate::e2e::{
    cluster::{Cluster, Options, free_port, virtfold},
    kubectl::{Kubectl, finish},
    leaks, process, wait,
};
use crate::kubernetes::{FOR_ROLES, Kubernetes, Process};
use anyhow::{Context, Result, bail};
use embedded::pki::{Pki, kubeconfig, write_private};
use nix::sys::signal::Signal;
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

/// Who leads is silent for so long, and is replaced.
pub const LEASE: Duration = Duration::from_secs(2);
/// The variable that names the file with what is added to a clock.
const CLOCK: &str = "VIRTFOLD_CLOCK";
/// User of the controllers.
const CONTROLLER: &str = "virtfold-controller";
/// The cluster's own address, inside of its network.
const INSIDE: &str = "10.244.0.1";
/// A controller that ended is started again after this.
const AGAIN: Duration = Duration::from_millis(200);
/// A part that is asked to end does within this.
const END: Duration = Duration::from_secs(30);

/// How big it is.
#[derive(Debug, Clone)]
pub struct Size {
    /// Nodes.
    pub nodes: u32,
    /// Controllers.
    pub controllers: usize,
    /// MiB of the small disk in memory that holds the data folder; 0: an ordinary folder.
    pub disk: u64,
    /// With a proxy between all parts.
    pub proxy: bool,
    /// On a real kube-apiserver, with modelled nodes.
    pub kubernetes: bool,
}

/// One controller.
struct Seat {
    /// Where it answers.
    address: String,
    command: Box<dyn Fn() -> Result<Command> + Send>,
    child: Option<Child>,
}

/// A real kube-apiserver, and what is ours beside it. Nodes are modelled.
pub struct Foreign {
    /// Whoever serves may not go before those who ask.
    pub gateway: Process,
    /// The nodes.
    pub nodes: Process,
    /// The control plane.
    pub k: Kubernetes,
    told: PathBuf,
}

impl Foreign {
    fn start(nodes: u32) -> Result<Self> {
        let k = Kubernetes::start_readable(FOR_ROLES)?;
        let listen = format!("127.0.0.1:{}", free_port()?);
        k.install_with(&["--gateway", &listen])?;
        let gateway = k.gateway("gateway", &["--listen", &listen])?;
        let told = k.data.join("told.jsonl");
        File::create(&told).context("make a file")?;
        let delays = ["--start-delay", "300ms", "--boot-delay", "1s", "--shutdown-delay", "1s", "--guest-agent", "1s"];
        let mut arguments = vec!["--kubelet", "--scheduler", "--tell", told.to_str().context("a strange path")?];
        arguments.extend(delays);
        let nodes = k.nodes(nodes, &arguments)?;
        Ok(Self { gateway, nodes, k, told })
    }

    fn revive(&self) {
        for process in [&self.k.etcd, &self.k.server, &self.k.manager, &self.gateway] {
            // What cannot be started is tried again in a moment; that nothing gets quiet then is said.
            process.revive().ok();
        }
    }
}

/// Whose API server it is.
pub enum Plane {
    /// `virtfold up`.
    Own(Box<Cluster>),
    /// A kube-apiserver.
    Foreign(Arc<Foreign>),
}

/// A cluster.
pub struct Site {
    /// Its API server, etcd, gateway, nodes.
    pub plane: Plane,
    /// What stands between all parts, where something does.
    pub proxy: Option<Proxy>,
    nodes: u32,
    seats: Arc<Mutex<Vec<Seat>>>,
    over: Arc<AtomicBool>,
    keeper: Option<JoinHandle<()>>,
}

fn lock(seats: &Mutex<Vec<Seat>>) -> MutexGuard<'_, Vec<Seat>> {
    seats.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Site {
    /// Starts it and waits until nodes are ready and somebody can lead.
    pub fn start(size: &Size) -> Result<Self> {
        let plane = if size.kubernetes {
            Plane::Foreign(Arc::new(Foreign::start(size.nodes)?))
        } else {
            Plane::Own(Box::new(own(size)?))
        };
        let mut site =
            Self { plane, proxy: None, nodes: size.nodes, seats: Arc::default(), over: Arc::default(), keeper: None };
        if size.proxy {
            site.proxy = Some(Proxy::start(&site.netns("cluster"), site.data())?);
            // What is connected already stays so; agents that are started again go through the proxy.
            for node in site.nodes() {
                process::destroy(site.own()?.agent_pid(&node)?)?;
            }
            site.own()?.wait_ready()?;
        }
        site.certify(None)?;
        for n in 0..size.controllers {
            let seat = site.seat(n)?;
            lock(&site.seats).push(seat);
        }
        Ok(site.keep())
    }

    /// The cluster, where it is our own.
    pub fn own(&self) -> Result<&Cluster> {
        match &self.plane {
            Plane::Own(cluster) => Ok(cluster),
            Plane::Foreign(_) => bail!("this needs an API server of our own"),
        }
    }

    /// The way in for people.
    pub fn kubectl(&self) -> &Kubectl {
        match &self.plane {
            Plane::Own(cluster) => cluster,
            Plane::Foreign(f) => &f.k,
        }
    }

    /// One of the user's commands: its exit code, standard output and standard error.
    pub fn virtfold(&self, arguments: &[&str]) -> Result<(i32, String, String)> {
        finish(Command::new(virtfold()?).args(arguments).env("KUBECONFIG", &self.kubectl().config).stdin(Stdio::null()))
    }

    /// Where it keeps what.
    pub fn data(&self) -> &Path {
        match &self.plane {
            Plane::Own(cluster) => &cluster.data,
            Plane::Foreign(f) => &f.k.data,
        }
    }

    fn seat(&self, n: usize) -> Result<Seat> {
        let data = self.data();
        let pki = Pki::open(&data.join("pki"))?;
        let user = pki.client(CONTROLLER, None)?;
        let config = data.join(format!("controller-{n}.kubeconfig"));
        let (url, address, netns) = match &self.plane {
            Plane::Own(_) => {
                (format!("https://{INSIDE}:6443"), format!("{INSIDE}:{}", 9100 + n), Some(self.netns("cluster")))
            }
            Plane::Foreign(f) => (f.k.url(), format!("127.0.0.1:{}", free_port()?), None),
        };
        write_private(&config, kubeconfig(&url, pki.ca(), &user).as_bytes())?;
        let (ca, (cert, key)) = (data.join("pki/ca.crt"), self.certificate());
        let journal = data.join("journal").join(format!("controller-{n}"));
        let (log, clock, listen) = (self.log_of(n), self.clock_of(n), address.clone());
        let command = move || {
            let out = File::options().create(true).append(true).open(&log).context("open a controller's log")?;
            let mut command = match &netns {
                Some(netns) => {
                    let mut command = Command::new("ip");
                    command.args(["netns", "exec", netns]).arg(virtfold()?);
                    command
                }
                None => Command::new(virtfold()?),
            };
            command
                .args(["controller".as_ref(), "--kubeconfig".as_ref(), config.as_os_str()])
                .args(["--ca".as_ref(), ca.as_os_str(), "--cert".as_ref(), cert.as_os_str()])
                .args(["--key".as_ref(), key.as_os_str(), "--journal".as_ref(), journal.as_os_str()])
                .args(["--listen", &listen, "--lease-duration", &format!("{}s", LEASE.as_secs())])
                .env(CLOCK, &clock)
                .stdin(Stdio::null())
                .stdout(out.try_clone()?)
                .stderr(out);
            Ok(command)
        };
        Ok(Seat { address, command: Box::new(command), child: None })
    }

    fn certificate(&self) -> (PathBuf, PathBuf) {
        let file = |ending: &str| self.data().join(format!("controllers.{ending}"));
        (file("crt"), file("key"))
    }

    /// Gives the controllers another certificate, that they read when they are started: one that ends after so long, or a good one.
    pub fn certify(&self, life: Option<Duration>) -> Result<()> {
        let pki = Pki::open(&self.data().join("pki"))?;
        let identity = match life {
            Some(life) => pki.brief(CONTROLLER, life)?,
            None => pki.component(CONTROLLER)?,
        };
        let (cert, key) = self.certificate();
        write_private(&key, identity.key.as_bytes())?;
        write_private(&cert, identity.cert.as_bytes())?;
        Ok(())
    }

    /// What is added to the clock of a controller is in this file.
    pub fn clock_of(&self, n: usize) -> PathBuf {
        self.data().with_extension(format!("controller-{n}.clock"))
    }

    /// The same of node agents, which read it when they are started.
    pub fn clock_of_agents(&self) -> PathBuf {
        self.data().with_extension("agents.clock")
    }

    /// Starts controllers that are not there, again and again.
    fn keep(mut self) -> Self {
        let (seats, over) = (self.seats.clone(), self.over.clone());
        let foreign = match &self.plane {
            Plane::Own(_) => None,
            Plane::Foreign(f) => Some(f.clone()),
        };
        self.keeper = Some(std::thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                if let Some(foreign) = &foreign {
                    foreign.revive();
                }
                for seat in lock(&seats).iter_mut() {
                    if seat.child.as_mut().is_none_or(|c| !matches!(c.try_wait(), Ok(None))) {
                        seat.child = (seat.command)().and_then(|mut c| Ok(c.spawn()?)).ok();
                    }
                }
                std::thread::sleep(AGAIN);
            }
        }));
        self
    }

    /// What a controller says, outside of the data folder, which may be full.
    pub fn log_of(&self, n: usize) -> PathBuf {
        self.data().with_extension(format!("controller-{n}.log"))
    }

    /// Where its store is.
    pub fn store(&self) -> Store {
        match &self.plane {
            Plane::Own(cluster) => {
                let socket = leaks::run_of(&cluster.data).join("etcd/client:0");
                Store { endpoint: format!("unix://{}", socket.display()), foreign: false, told: None }
            }
            Plane::Foreign(f) => Store { endpoint: f.k.store.clone(), foreign: true, told: Some(f.told.clone()) },
        }
    }

    /// How many controllers there are.
    pub fn controllers(&self) -> usize {
        lock(&self.seats).len()
    }

    /// The process of a controller.
    pub fn controller(&self, n: usize) -> Result<i32> {
        let seats = lock(&self.seats);
        let child = seats.get(n).and_then(|s| s.child.as_ref()).context("that controller does not run")?;
        Ok(child.id() as i32)
    }

    /// Which controller answers at that address.
    pub fn at(&self, place: &str) -> Option<usize> {
        lock(&self.seats).iter().position(|s| s.address == place)
    }

    /// The process of etcd.
    pub fn etcd(&self) -> Result<i32> {
        if let Plane::Foreign(f) = &self.plane {
            return Ok(f.k.etcd.pid());
        }
        let argument = format!("--data-dir={}", self.data().join("etcd").display());
        let all = process::all();
        let etcd = all.iter().find(|p| p.name == "etcd" && p.arguments.contains(&argument));
        Ok(etcd.context("etcd does not run")?.pid)
    }

    /// Names of the nodes.
    pub fn nodes(&self) -> Vec<String> {
        let name = |n: u32| match &self.plane {
            Plane::Own(_) => format!("node-{}", n + 1),
            Plane::Foreign(_) => format!("sim-{n}"),
        };
        (0..self.nodes).map(name).collect()
    }

    /// A network namespace of the cluster: `cluster`, or a node's name.
    pub fn netns(&self, part: &str) -> String {
        format!("vf-{}-{part}", leaks::id_of(self.data()))
    }

    /// The console of a guest.
    pub fn console(&self, node: &str, pod: &str) -> PathBuf {
        leaks::run_of(self.data()).join(node).join(pod).join("console.log")
    }

    /// Ends the controllers, as one that goes home.
    fn dismiss(&mut self) -> Result<()> {
        self.over.store(true, Ordering::Relaxed);
        if let Some(keeper) = self.keeper.take() {
            keeper.join().ok();
        }
        for seat in lock(&self.seats).iter_mut() {
            let Some(mut child) = seat.child.take() else { continue };
            process::signal(child.id() as i32, Signal::SIGCONT)?;
            process::signal(child.id() as i32, Signal::SIGTERM)?;
            let gone = wait::until("the end of a controller", END, || {
                Ok(child.try_wait()?.map(drop).ok_or_else(|| "still there".to_owned()))
            });
            if gone.is_err() {
                child.kill()?;
                child.wait()?;
            }
            gone?;
        }
        Ok(())
    }

    /// Ends controllers and, where it is our own, the API server; guests go on.
    pub fn end(&mut self) -> Result<()> {
        self.dismiss()?;
        let Plane::Own(cluster) = &self.plane else { return Ok(()) };
        let code = cluster.terminate(END * 2)?;
        if code != Some(0) {
            bail!("virtfold up ended with {code:?}:\n{}", cluster.log_tail());
        }
        Ok(())
    }

    /// The files that tell what happened: logs and journals.
    pub fn evidence(&self) -> Vec<PathBuf> {
        let data = self.data();
        let mut all: Vec<PathBuf> = (0..self.controllers()).map(|n| self.log_of(n)).collect();
        all.push(data.join("journal"));
        match &self.plane {
            Plane::Own(cluster) => {
                all.extend([cluster.log(), data.join("virtfold.log"), data.join("etcd.log")]);
                let nodes = fs::read_dir(data.join("nodes")).into_iter().flatten().flatten();
                all.extend(nodes.map(|e| e.path().join("agent.log")));
            }
            Plane::Foreign(f) => {
                let logs = [
                    "kube-apiserver.log",
                    "kube-controller-manager.log",
                    "gateway.log",
                    "simulate-nodes.log",
                    "etcd.log",
                ];
                all.extend(logs.map(|name| data.join(name)));
                all.push(f.told.clone());
            }
        }
        all
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.dismiss().ok();
        fs::remove_file(self.clock_of_agents()).ok();
        for n in 0..self.controllers() {
            fs::remove_file(self.log_of(n)).ok();
            fs::remove_file(self.clock_of(n)).ok();
        }
    }
}

/// A cluster of our own without a controller.
fn own(size: &Size) -> Result<Cluster> {
    let options = Options { nodes: size.nodes, arguments: vec!["--no-controller".into()], ..Options::default() };
    let mut cluster = Cluster::prepare(options)?;
    cluster.environ(CLOCK, &cluster.data.with_extension("agents.clock").display().to_string());
    if size.disk > 0 {
        let size = format!("size={}m,mode=0700", size.disk);
        let made = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "virtfold"]).arg(&cluster.data).output()?;
        if !made.status.success() {
            bail!("no disk in memory: {}", String::from_utf8_lossy(&made.stderr));
        }
    }
    cluster.up()?;
    Ok(cluster)
}
