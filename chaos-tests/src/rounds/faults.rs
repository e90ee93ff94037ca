//! What is done to the processes of a cluster, by the ids of the fault catalogue.

use super::{
    net::{self, Way},
    people::random_guest,
    proxy::Mode,
    site::{LEASE, Plane, Site},
    witness::{Running, Witness},
};
use crate::e2e::{console::Console, process, wait};
use crate::world::dice::Dice;
use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use std::{
    fs::{self, File},
    io::Write,
    path::Path,
    process::Command,
    thread::sleep,
    time::Duration,
};

/// A guest that was told to turn itself off is off within this.
const OFF: Duration = Duration::from_secs(90);

macro_rules! faults {
    ($($name:ident $word:literal $ids:literal $about:literal),* $(,)?) => {
        /// Something that is done to a cluster.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Fault { $(#[doc = $about] $name),* }

        impl Fault {
            /// All of them.
            pub const ALL: &'static [Fault] = &[$(Fault::$name),*];

            /// Its name on the command line.
            pub fn word(self) -> &'static str {
                match self { $(Self::$name => $word),* }
            }

            /// Ids in the catalogue.
            pub fn ids(self) -> &'static str {
                match self { $(Self::$name => $ids),* }
            }

            /// What it does.
            pub fn about(self) -> &'static str {
                match self { $(Self::$name => $about),* }
            }
        }
    };
}

faults! {
    KillLeader "kill-leader" "C1 C5" "SIGKILL to the controller that leads",
    KillControllers "kill-controllers" "C1" "SIGKILL to all controllers at once",
    PauseLeader "pause-leader" "C3 C4" "SIGSTOP to the controller that leads for longer than its Lease, then SIGCONT",
    PauseControllers "pause-controllers" "C3" "SIGSTOP to all controllers for longer than the Lease, then SIGCONT",
    KillAgent "kill-agent" "N1" "SIGKILL to a node's agent",
    WipeAgent "wipe-agent" "N1" "SIGKILL to a node's agent, and what it kept is gone when it comes back",
    PauseAgent "pause-agent" "N1 G2" "SIGSTOP to a node's agent for longer than the Lease: its connections stay open and say nothing",
    KillServer "kill-server" "A1 A7" "SIGKILL to the API server and gateway, which are started again",
    EndServer "end-server" "A1 A7" "the API server and gateway are stopped and started again as on an upgrade; etcd, too",
    PauseServer "pause-server" "A7 A10" "SIGSTOP to the API server and gateway: requests and watches hang",
    KillEtcd "kill-etcd" "A7 A10" "SIGKILL to etcd",
    PauseEtcd "pause-etcd" "A11" "SIGSTOP to etcd: writes and reads take seconds",
    KillLauncher "kill-launcher" "N2" "SIGKILL to a launcher, which takes its guest along",
    PauseLauncher "pause-launcher" "N2" "SIGSTOP to a launcher: alive and deaf",
    KillHypervisor "kill-qemu" "N4 N5" "SIGKILL to a guest's QEMU",
    PauseHypervisor "pause-qemu" "N4" "SIGSTOP to a guest's QEMU, which answers nobody",
    PowerOff "power-off" "N4" "a guest turns itself off",
    KillPlane "kill-plane" "C1 N1 A1" "SIGKILL to API server, etcd, controllers and node agents at once",
    SlowNet "slow-net" "G1" "everything between controllers, node agents and API server arrives later by 0.2 to 1.5 s",
    ResetNet "reset-net" "A1 G3" "every connection between them is cut, and none is let through for a while",
    DeafNet "deaf-net" "G2" "connections between them stay open, and nothing passes",
    LostReplies "lost-replies" "A8 G3" "requests between them arrive, and answers are lost",
    LateRequests "late-requests" "A9 G1" "requests between them arrive after whoever sent them has given up",
    TornMessages "torn-messages" "G3" "messages between them arrive in small pieces",
    CutIn "cut-in" "G6 N8" "nothing of the control plane arrives at a node",
    CutOut "cut-out" "G6 N8" "nothing of a node arrives at the control plane",
    CutBoth "cut-both" "N8" "a node and the control plane cannot reach each other",
    FillDisk "fill-disk" "N10 C6" "the disk with etcd, journals and the agents' memory is full",
    JumpController "jump-controller" "C8" "the clock of the controller that leads jumps by up to ten minutes, and back",
    JumpAgents "jump-agents" "N13 C8" "the agents' clocks are off by ten minutes, which they find at their start; then they are right again",
    ExpireCertificates "expire-certificates" "G5" "the controllers' certificates end while an agent has to be dialled anew; then there are new ones",
    Descriptors "no-descriptors" "C9" "the leading controller, or an agent, can open nothing any more for a while",
    KillGateway "kill-gateway" "A12" "SIGKILL to the gateway of a kube-apiserver (--kubernetes): no webhook answers",
    PauseGateway "pause-gateway" "A12" "SIGSTOP to that gateway: webhooks and verbs hang",
    PowerCut "power-cut" "O5 N7" "SIGKILL to everything, launchers and guests too; then it is started again",
}

/// Faults of the catalogue that are not among them, and why.
pub const LEFT_OUT: &[(&str, &str)] = &[
    ("A2", "layers 1 and 2 forget history; etcd here keeps ten minutes"),
    ("A3", "there is one API server: nothing that is behind could answer"),
    ("A4 A5 A14 A15", "what one request or one event meets is drawn in layers 1 and 2"),
    ("A6 A13", "refusals of single verbs are drawn in layers 1 and 2"),
    ("C2", "replay is a program of its own; what a journal has lost is counted by its readers' tests"),
    ("C7", "there is one version yet"),
    ("C10", "no early time-outs or small queues are built into the binary"),
    ("G4", "an old agent cannot stay: its port and its pid file are the new one's"),
    ("N3", "there is no libvirt here"),
    ("N6", "the pod runner is part of the agent, which is killed; a kubelet of its own is not there"),
    ("N9", "fencing is a person's taint; layers 1 and 2 lie about it"),
    ("N11", "eviction and taints are in the end-to-end tests on two nodes"),
    ("N12", "images and claims that fail are in the end-to-end tests"),
    ("O1", "bursts are measured on simulated nodes"),
    ("O6", "a year does not pass here"),
];

/// What a fault strikes.
pub struct Scene<'a> {
    /// The cluster.
    pub site: &'a Site,
    /// What is seen.
    pub witness: &'a Witness,
    /// Chooses.
    pub dice: &'a mut Dice,
}

impl Scene<'_> {
    fn seconds(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_millis(self.dice.between(low * 1000, high * 1000))
    }

    /// The controller that leads.
    fn leader(&self) -> Result<(usize, i32)> {
        let place = self.witness.with(|t| t.leader.clone())?;
        let n = self.site.at(&place).with_context(|| format!("nobody leads at {place:?}"))?;
        Ok((n, self.site.controller(n)?))
    }

    fn controllers(&self) -> Vec<i32> {
        (0..self.site.controllers()).filter_map(|n| self.site.controller(n).ok()).collect()
    }

    fn node(&mut self) -> Result<String> {
        let nodes = self.site.nodes();
        self.dice.pick(&nodes).cloned().context("there are no nodes")
    }

    fn agent(&mut self) -> Result<(String, i32)> {
        let node = self.node()?;
        let pid = self.site.own()?.agent_pid(&node)?;
        Ok((node, pid))
    }

    /// A guest whose own hypervisor or launcher will be hurt: it may end.
    fn victim(&mut self) -> Result<Running> {
        let guest = random_guest(self.witness, self.dice)?;
        let vmi = guest.vmi.clone();
        self.witness.with(move |t| t.excused.insert(vmi))?;
        Ok(guest)
    }

    fn paused(&self, pids: &[i32], time: Duration) -> Result<()> {
        let all = |signal| pids.iter().try_for_each(|pid| process::signal(*pid, signal));
        let stopped = all(Signal::SIGSTOP);
        sleep(time);
        // One that ended meanwhile is no reason to leave the others asleep.
        all(Signal::SIGCONT).and(stopped)
    }

    /// Strikes; when it returns, what was hurt is whole again, or is being made so by whoever looks after it. What was done, in words.
    pub fn strike(&mut self, fault: Fault) -> Result<String> {
        let longer = LEASE * 2;
        Ok(match fault {
            Fault::KillLeader => {
                let (n, pid) = self.leader()?;
                process::signal(pid, Signal::SIGKILL)?;
                format!("controller {n}")
            }
            Fault::KillControllers => {
                let all = self.controllers();
                all.iter().try_for_each(|pid| process::signal(*pid, Signal::SIGKILL))?;
                format!("{} controllers", all.len())
            }
            Fault::PauseLeader => {
                let (n, pid) = self.leader()?;
                let time = longer + self.seconds(0, 3);
                self.paused(&[pid], time)?;
                format!("controller {n} for {:.1} s", time.as_secs_f64())
            }
            Fault::PauseControllers => {
                let time = longer + self.seconds(0, 3);
                self.paused(&self.controllers(), time)?;
                format!("for {:.1} s", time.as_secs_f64())
            }
            Fault::KillAgent => {
                let (node, pid) = self.agent()?;
                process::signal(pid, Signal::SIGKILL)?;
                node
            }
            Fault::WipeAgent => {
                let (node, pid) = self.agent()?;
                process::destroy(pid)?;
                fs::remove_dir_all(self.site.data().join("nodes").join(&node).join("state")).context("wipe")?;
                node
            }
            Fault::PauseAgent => {
                let (node, pid) = match &self.site.plane {
                    Plane::Own(_) => self.agent()?,
                    Plane::Foreign(f) => ("all nodes".into(), f.nodes.pid()),
                };
                let time = longer + self.seconds(0, 6);
                self.paused(&[pid], time)?;
                format!("{node} for {:.1} s", time.as_secs_f64())
            }
            Fault::KillServer => {
                if let Plane::Foreign(f) = &self.site.plane {
                    process::signal(f.k.server.pid(), Signal::SIGKILL)?;
                    return Ok("kube-apiserver".into());
                }
                self.site.own()?.kill_up()?;
                sleep(self.seconds(0, 3));
                self.site.own()?.up()?;
                String::new()
            }
            Fault::EndServer => {
                let code = self.site.own()?.terminate(Duration::from_secs(60))?;
                anyhow::ensure!(code == Some(0), "virtfold up ended with {code:?}");
                self.site.own()?.up()?;
                String::new()
            }
            Fault::PauseServer => {
                let time = longer + self.seconds(0, 5);
                let pid = match &self.site.plane {
                    Plane::Own(cluster) => cluster.up_pid()?,
                    Plane::Foreign(f) => f.k.server.pid(),
                };
                self.paused(&[pid], time)?;
                format!("for {:.1} s", time.as_secs_f64())
            }
            Fault::KillEtcd => {
                process::signal(self.site.etcd()?, Signal::SIGKILL)?;
                String::new()
            }
            Fault::PauseEtcd => {
                let time = self.seconds(1, 9);
                self.paused(&[self.site.etcd()?], time)?;
                format!("for {:.1} s", time.as_secs_f64())
            }
            Fault::KillLauncher => {
                let guest = self.victim()?;
                process::signal(guest.launcher, Signal::SIGKILL)?;
                guest.machine
            }
            Fault::PauseLauncher => {
                let (guest, time) = (random_guest(self.witness, self.dice)?, longer + self.seconds(0, 6));
                self.paused(&[guest.launcher], time)?;
                format!("{} for {:.1} s", guest.machine, time.as_secs_f64())
            }
            Fault::KillHypervisor => {
                let guest = self.victim()?;
                process::signal(guest.pid, Signal::SIGKILL)?;
                guest.machine
            }
            Fault::PauseHypervisor => {
                let (guest, time) = (random_guest(self.witness, self.dice)?, longer + self.seconds(0, 6));
                self.paused(&[guest.pid], time)?;
                format!("{} for {:.1} s", guest.machine, time.as_secs_f64())
            }
            Fault::PowerOff => {
                let guest = self.victim()?;
                let mut console = Console::attach(self.site.own()?, &guest.machine)?;
                console.login()?;
                console.send("poweroff\r")?;
                wait::until("the end of the guest", OFF, || {
                    Ok(if process::alive(guest.pid) { Err("it runs".into()) } else { Ok(()) })
                })?;
                guest.machine
            }
            Fault::KillPlane => {
                let mut all = self.controllers();
                all.extend(self.site.nodes().iter().filter_map(|n| self.site.own().ok()?.agent_pid(n).ok()));
                all.push(self.site.etcd()?);
                // The API server first: it would start the others again.
                self.site.own()?.kill_up()?;
                all.iter().try_for_each(|pid| process::signal(*pid, Signal::SIGKILL))?;
                sleep(self.seconds(0, 3));
                self.site.own()?.up()?;
                String::new()
            }
            Fault::SlowNet
            | Fault::ResetNet
            | Fault::DeafNet
            | Fault::LostReplies
            | Fault::LateRequests
            | Fault::TornMessages => {
                let proxy = self.site.proxy.as_ref().context("there is no proxy")?;
                let mode = match fault.through_proxy() {
                    Some(Mode::Delay(_)) => Mode::Delay(self.dice.between(200, 1500)),
                    Some(mode) => mode,
                    None => Mode::Pass,
                };
                let time = self.seconds(2, 10);
                proxy.set(mode)?;
                sleep(time);
                proxy.set(Mode::Pass)?;
                format!("{mode} for {:.1} s", time.as_secs_f64())
            }
            Fault::CutIn | Fault::CutOut | Fault::CutBoth => {
                let (node, time) = (self.node()?, self.seconds(3, 12));
                let netns = self.site.netns(&node);
                let way = match fault {
                    Fault::CutIn => Way::In,
                    Fault::CutOut => Way::Out,
                    _ => Way::Both,
                };
                net::cut(&netns, way)?;
                sleep(time);
                net::join(&netns)?;
                format!("{node} for {:.1} s", time.as_secs_f64())
            }
            Fault::FillDisk => {
                let (ballast, time) = (self.site.data().join("ballast"), self.seconds(3, 10));
                let written = fill(&ballast);
                sleep(time);
                fs::remove_file(&ballast).context("remove the ballast")?;
                format!("{} MiB for {:.1} s", written? >> 20, time.as_secs_f64())
            }
            Fault::JumpController => {
                let (n, _) = self.leader()?;
                let (far, time) = (self.dice.between(60, 600) as i64, self.seconds(2, 6));
                let seconds = if self.dice.chance(500) { far } else { -far };
                // What it writes of time is not the machine's any more.
                self.witness.with(|t| t.skewed = true)?;
                fs::write(self.site.clock_of(n), (seconds * 1000).to_string())?;
                sleep(time);
                fs::write(self.site.clock_of(n), "0")?;
                format!("controller {n} by {seconds} s for {:.1} s", time.as_secs_f64())
            }
            Fault::JumpAgents => {
                let seconds: i64 = if self.dice.chance(500) { 600 } else { -600 };
                let agents = |scene: &Self| -> Result<()> {
                    let nodes = scene.site.nodes();
                    let pids = nodes.iter().filter_map(|n| scene.site.own().ok()?.agent_pid(n).ok());
                    pids.into_iter().try_for_each(process::destroy)
                };
                fs::write(self.site.clock_of_agents(), (seconds * 1000).to_string())?;
                agents(self)?;
                sleep(self.seconds(5, 10));
                fs::write(self.site.clock_of_agents(), "0")?;
                agents(self)?;
                format!("by {seconds} s")
            }
            Fault::ExpireCertificates => {
                let life = Duration::from_secs(8);
                self.site.certify(Some(life))?;
                let again = |scene: &Self| scene.controllers().into_iter().try_for_each(process::destroy);
                let killed = again(self);
                sleep(life + Duration::from_secs(1));
                let agent = self.agent();
                let dialled = agent.and_then(|(node, pid)| process::destroy(pid).map(|()| node));
                sleep(self.seconds(2, 5));
                self.site.certify(None)?;
                again(self).and(killed)?;
                format!("and the agent of {} was killed", dialled?)
            }
            Fault::Descriptors => {
                let (who, pid) = if self.dice.chance(500) {
                    let (n, pid) = self.leader()?;
                    (format!("controller {n}"), pid)
                } else {
                    self.agent()?
                };
                let time = self.seconds(3, 8);
                let open = fs::read_dir(format!("/proc/{pid}/fd")).map(Iterator::count).context("count descriptors")?;
                let text = fs::read_to_string(format!("/proc/{pid}/limits")).context("read the limits")?;
                let line = text.lines().find_map(|l| l.strip_prefix("Max open files")).context("no limit of files")?;
                let before = line.split_whitespace().next().context("no limit of files")?;
                limit(pid, &open.to_string())?;
                sleep(time);
                if process::alive(pid) {
                    limit(pid, before)?;
                }
                format!("{who} for {:.1} s", time.as_secs_f64())
            }
            Fault::KillGateway | Fault::PauseGateway => {
                let Plane::Foreign(f) = &self.site.plane else {
                    anyhow::bail!("this gateway is no process of its own")
                };
                if fault == Fault::KillGateway {
                    process::signal(f.gateway.pid(), Signal::SIGKILL)?;
                    return Ok(String::new());
                }
                let time = self.seconds(3, 12);
                self.paused(&[f.gateway.pid()], time)?;
                format!("for {:.1} s", time.as_secs_f64())
            }
            Fault::PowerCut => {
                let guests: Vec<Running> = self.witness.with(|t| {
                    t.look();
                    let guests: Vec<Running> = t.running.values().cloned().collect();
                    let launchers: Vec<String> = t.launchers.values().cloned().collect();
                    t.excused.extend(launchers);
                    guests
                })?;
                self.site.own()?.kill_up()?;
                let mut all = self.controllers();
                all.extend(self.site.nodes().iter().filter_map(|n| self.site.own().ok()?.agent_pid(n).ok()));
                all.push(self.site.etcd()?);
                all.extend(guests.iter().flat_map(|g| [g.launcher, g.pid]));
                all.iter().try_for_each(|pid| process::signal(*pid, Signal::SIGKILL))?;
                sleep(self.seconds(0, 3));
                self.site.own()?.up()?;
                format!("{} guests", guests.len())
            }
        })
    }
}

/// Takes all room that is left on the disk of a file; how much that was.
fn fill(ballast: &Path) -> Result<u64> {
    let mut file = File::create(ballast).context("make the ballast")?;
    let block = vec![0; 1 << 20];
    let mut all = 0;
    for size in [1 << 20, 1 << 12, 1] {
        while let Ok(n @ 1..) = file.write(&block[..size]) {
            all += n as u64;
        }
    }
    Ok(all)
}

/// Sets how many descriptors a process may have; how many it could allow itself stays.
fn limit(pid: i32, most: &str) -> Result<()> {
    let done = Command::new("prlimit").args(["--pid", &pid.to_string(), &format!("--nofile={most}:")]).output()?;
    anyhow::ensure!(done.status.success(), "prlimit: {}", String::from_utf8_lossy(&done.stderr));
    Ok(())
}

impl Fault {
    /// It can be done to a kube-apiserver with modelled nodes.
    pub fn foreign(self) -> bool {
        matches!(
            self,
            Self::KillLeader
                | Self::KillControllers
                | Self::PauseLeader
                | Self::PauseControllers
                | Self::PauseAgent
                | Self::KillServer
                | Self::PauseServer
                | Self::KillEtcd
                | Self::PauseEtcd
                | Self::JumpController
                | Self::KillGateway
                | Self::PauseGateway
        )
    }

    /// It can be done to a cluster of our own with guests under QEMU.
    pub fn own(self) -> bool {
        !matches!(self, Self::KillGateway | Self::PauseGateway)
    }

    /// What the proxy does for it.
    pub fn through_proxy(self) -> Option<Mode> {
        Some(match self {
            Self::SlowNet => Mode::Delay(0),
            Self::ResetNet => Mode::Cut,
            Self::DeafNet => Mode::Hang,
            Self::LostReplies => Mode::Swallow,
            Self::LateRequests => Mode::Late,
            Self::TornMessages => Mode::Dribble,
            _ => return None,
        })
    }
}
