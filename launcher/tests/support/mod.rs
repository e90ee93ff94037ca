//! A launcher under test: this test binary, run again as a launcher.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use proto::agent::{Ack, Cause, Domain, DomainState, Instruct, InstructKind, Outcome, VerbReply, VerbRequest, ack};
use proto::launcher::launcher_client::LauncherClient;
use proto::launcher::{InfoRequest, NodeFacts, Order, WatchRequest, update};
use serde_json::{Value, json};
use tonic::transport::{Channel, Endpoint, Uri};

pub const VMI: &str = "6f2c0a51-8a61-4f5c-9f6f-6d3a4f1f3f10";
pub const POD: &str = "0b9f5a31-2a55-4f6c-8f43-0f5f5a0b7c11";
/// Generous: emulation on a busy machine is slow.
pub const LONG: Duration = Duration::from_secs(90);

/// Guests boot one at a time: two emulated ones on two cores disturb each other's timings.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(|p| p.into_inner())
}

/// The folder with the built guest.
pub fn guest() -> PathBuf {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let folder = top.join("target/guest");
    if !folder.join("disk.qcow2").exists() {
        assert!(Command::new(top.join("guest/build")).status().unwrap().success(), "guest/build failed");
    }
    folder
}

/// What the test binary does when it is started as a launcher.
#[test]
fn launcher_process() {
    let Some(dir) = std::env::var_os("VIRTFOLD_TEST_LAUNCHER").map(PathBuf::from) else { return };
    let mut config = launcher::Config::new("ns", "guest", VMI, POD);
    config.share_dir = dir.join("share");
    config.termination_log = Some(dir.join("termination-log"));
    config.paths = launcher::Paths {
        private: dir.join("private"),
        images: dir.join("images"),
        ephemeral: dir.join("ephemeral"),
        devices: dir.join("dev"),
    };
    config.grace = Duration::from_millis(std::env::var("VIRTFOLD_TEST_GRACE_MS").unwrap().parse().unwrap());
    config.extra_args = serde_json::from_str(&std::env::var("VIRTFOLD_TEST_ARGS").unwrap()).unwrap();
    let code = launcher::run_blocking(config).unwrap();
    std::process::exit(code);
}

/// A client of the launcher behind a socket.
pub async fn connect(socket: PathBuf) -> Result<LauncherClient<Channel>, tonic::transport::Error> {
    let connector = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { tokio::net::UnixStream::connect(socket).await.map(hyper_util::rt::TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://launcher").connect_with_connector(connector).await?;
    Ok(LauncherClient::new(channel))
}

pub struct Launcher {
    pub dir: tempfile::TempDir,
    child: Child,
    runtime: tokio::runtime::Runtime,
    client: LauncherClient<Channel>,
}

#[derive(Default)]
pub struct Options {
    pub grace: Option<Duration>,
    pub args: Vec<String>,
    /// Run as a pod runs it: uid 107, no capabilities, none to be had.
    pub unprivileged: bool,
}

impl Launcher {
    pub fn new() -> Self {
        Self::with(Options::default())
    }

    pub fn with(options: Options) -> Self {
        let dir = tempfile::Builder::new().prefix("vfl").tempdir().unwrap();
        for name in ["share", "private", "images", "ephemeral", "dev"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let exe = std::env::current_exe().unwrap();
        let mut command = if options.unprivileged {
            let mut names = vec![dir.path().to_owned()];
            names.extend(["share", "private", "images", "ephemeral", "dev"].map(|n| dir.path().join(n)));
            for name in names {
                std::os::unix::fs::chown(name, Some(107), Some(107)).unwrap();
            }
            let mut c = Command::new("setpriv");
            c.args(["--reuid=107", "--regid=107", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]);
            c.arg("--no-new-privs").arg(exe);
            c
        } else {
            Command::new(exe)
        };
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        let child = command
            .args(["--exact", "support::launcher_process", "--nocapture", "--test-threads=1"])
            .env("VIRTFOLD_TEST_LAUNCHER", dir.path())
            .env("VIRTFOLD_TEST_GRACE_MS", options.grace.unwrap_or(Duration::from_secs(30)).as_millis().to_string())
            .env("VIRTFOLD_TEST_ARGS", serde_json::to_string(&options.args).unwrap())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let socket = dir.path().join("share/launcher.sock");
        // The name is there a moment before anybody listens.
        let mut client = None;
        wait("launcher.sock", || {
            client = runtime.block_on(connect(socket.clone())).ok();
            client.is_some()
        });
        let client = client.unwrap();
        Self { dir, child, runtime, client }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// A PVC with this image.
    pub fn claim(&self, volume: &str, image: &Path) {
        let folder = self.path("private/vmi-disks").join(volume);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::copy(image, folder.join("disk.img")).unwrap();
    }

    /// An image volume for spec.volumes[index] with this file.
    pub fn image(&self, index: usize, image: &Path) {
        let folder = self.path("images").join(format!("disk_{index}/disk"));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::copy(image, folder.join("disk.qcow2")).unwrap();
    }

    pub fn execute(&mut self, instruct: Instruct, facts: NodeFacts) -> Ack {
        let order = Order { instruct: Some(instruct), facts: Some(facts) };
        self.runtime.block_on(self.client.execute(order)).unwrap().into_inner()
    }

    pub fn start(&mut self, vmi: &Value) -> Ack {
        self.execute(instruct(InstructKind::Start, "start", vmi), facts())
    }

    pub fn tell(&mut self, kind: InstructKind, id: &str, deadline: Duration) -> Ack {
        let i = Instruct { deadline_ms: deadline.as_millis().try_into().unwrap(), ..instruct(kind, id, &Value::Null) };
        self.execute(i, NodeFacts::default())
    }

    /// As a pod's probe asks.
    pub fn probe(&self, command: &[&str], limit: Duration) -> Result<(i32, String), String> {
        let command = command.iter().map(|a| (*a).to_owned()).collect();
        self.runtime.block_on(launcher::probe::ask(&self.path("share"), command, limit))
    }

    pub fn verb(&mut self, verb: &str, id: &str, body: &str) -> VerbReply {
        let request = VerbRequest {
            id: id.into(),
            vmi_uid: VMI.into(),
            pod_uid: POD.into(),
            verb: verb.into(),
            body: body.as_bytes().to_vec().into(),
            ttl_ms: 20_000,
            traceparent: TRACE.into(),
        };
        self.runtime.block_on(self.client.verb(request)).unwrap().into_inner()
    }

    pub fn hypervisor_pid(&mut self) -> i32 {
        self.runtime.block_on(self.client.info(InfoRequest {})).unwrap().into_inner().hypervisor_pid
    }

    pub fn domain(&mut self) -> Domain {
        self.runtime.block_on(self.client.info(InfoRequest {})).unwrap().into_inner().domain.unwrap()
    }

    /// Watches until the domain is as wished; panics with the outcome if it ends before.
    pub fn until(&mut self, what: &str, mut wished: impl FnMut(&Domain) -> bool) -> Domain {
        let log = self.path("log");
        let console = self.path("share/console.log");
        self.runtime.block_on(async {
            let mut stream = self.client.watch(WatchRequest::default()).await.unwrap().into_inner();
            let mut last = None;
            let found = tokio::time::timeout(LONG, async {
                loop {
                    match stream.message().await.unwrap().expect("the stream ended").kind.unwrap() {
                        update::Kind::Domain(d) if wished(&d) => return d,
                        update::Kind::Domain(d) => last = Some(d),
                        update::Kind::Outcome(o) => {
                            panic!("{what}: ended: {o:?}\n{}", std::fs::read_to_string(&log).unwrap())
                        }
                    }
                }
            })
            .await;
            found.unwrap_or_else(|_| {
                panic!(
                    "{what}: not within {LONG:?}: {last:#?}\n{}\n{}",
                    std::fs::read_to_string(&log).unwrap(),
                    String::from_utf8_lossy(&std::fs::read(&console).unwrap_or_default())
                )
            })
        })
    }

    /// Waits until it has run so many hypervisors, one after the other.
    pub fn until_tried(&self, times: usize) {
        let mut seen = std::collections::BTreeSet::new();
        wait("another try", || {
            for task in std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap().flatten() {
                let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
                let is_hypervisor = |pid: &&str| {
                    std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c.starts_with("qemu-system"))
                };
                seen.extend(children.split_whitespace().filter(is_hypervisor).map(str::to_owned));
            }
            seen.len() >= times
        });
    }

    /// What it did and nobody has told yet: once with the level, or at its end.
    pub fn steps(&mut self) -> Vec<proto::launcher::Step> {
        self.runtime.block_on(async {
            let mut stream = self.client.watch(WatchRequest { steps: true }).await.unwrap().into_inner();
            stream.message().await.unwrap().unwrap().steps
        })
    }

    pub fn told(&mut self, seq: u64) {
        self.runtime.block_on(self.client.told(proto::launcher::ToldRequest { seq })).unwrap();
    }

    pub fn until_state(&mut self, state: DomainState) -> Domain {
        self.until(&format!("{state:?}"), |d| d.state() == state)
    }

    /// Watches to the outcome, which is then the same as the termination message.
    pub fn outcome(&mut self) -> Outcome {
        let outcome = self.runtime.block_on(async {
            let mut stream = self.client.watch(WatchRequest::default()).await.unwrap().into_inner();
            tokio::time::timeout(LONG, async {
                loop {
                    if let update::Kind::Outcome(o) =
                        stream.message().await.unwrap().expect("the stream ended").kind.unwrap()
                    {
                        // The stream ends with it.
                        assert!(stream.message().await.unwrap().is_none());
                        return o;
                    }
                }
            })
            .await
            .expect("an outcome")
        });
        let message: launcher::outcome::TerminationMessage =
            serde_json::from_slice(&std::fs::read(self.path("termination-log")).unwrap()).unwrap();
        assert_eq!(message.cause, launcher::outcome::cause_word(outcome.cause()));
        assert_eq!((message.seq, message.pod_uid.as_str(), message.exit), (outcome.seq, POD, outcome.exit));
        outcome
    }

    /// The exit of the process, which must be near.
    pub fn exit(&mut self) -> ExitStatus {
        let deadline = Instant::now() + Duration::from_secs(25);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "the launcher does not exit");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Everything of the end: cause and exit code.
    pub fn ends(&mut self, cause: Cause) -> Outcome {
        let outcome = self.outcome();
        assert_eq!(outcome.cause(), cause, "{outcome:?}\n{}", std::fs::read_to_string(self.path("log")).unwrap());
        assert_eq!(self.exit().code(), Some(launcher::outcome::exit_code(cause)));
        for name in ["launcher.sock", "fd.sock", "console.sock", "vnc.sock", "qmp.sock"] {
            assert!(!self.path("share").join(name).exists(), "{name} is left");
        }
        outcome
    }

    pub fn console(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.path("share/console.log")).unwrap_or_default()).into_owned()
    }

    pub fn until_console(&self, text: &str) {
        let deadline = Instant::now() + LONG;
        while !self.console().contains(text) {
            assert!(Instant::now() < deadline, "{text:?} is not on the console:\n{}", self.console());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn terminate(&self) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.pid()), nix::sys::signal::Signal::SIGTERM).unwrap();
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        // The hypervisor dies with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn wait(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not within 30 s");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub fn alive(pid: i32) -> bool {
    // A zombie is not alive.
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| !s.contains(") Z "))
}

pub fn rss(pid: i32) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let lines: Vec<&str> = status.lines().filter(|l| l.starts_with("Rss") || l.starts_with("Threads")).collect();
    lines.join(" ").replace('\t', " ")
}

pub fn rss_mib(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

pub fn facts() -> NodeFacts {
    NodeFacts { accelerator: "tcg".into(), cpu_model: "Nehalem".into(), pod_ip: "10.244.1.7".into(), nics: Vec::new() }
}

pub fn instruct(kind: InstructKind, id: &str, vmi: &Value) -> Instruct {
    Instruct {
        epoch: 5,
        id: id.into(),
        kind: kind as i32,
        vmi_uid: VMI.into(),
        pod_uid: POD.into(),
        vmi_rv: "10".into(),
        vmi: vmi.to_string().into_bytes().into(),
        traceparent: TRACE.into(),
        ..Instruct::default()
    }
}

/// The trace that all is asked for in.
pub const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// A VMI that authorises its start in this pod.
pub fn vmi(devices: Value, volumes: Value) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "guest", "namespace": "ns", "uid": VMI, "resourceVersion": "10"},
        "spec": {"domain": {"memory": {"guest": "128Mi"}, "devices": devices}, "volumes": volumes},
        "status": {"phase": "Scheduled", "nodeName": "node", "activePods": {POD: "node"}}
    })
}

/// The usual one: the guest as a container disk.
pub fn usual() -> Value {
    vmi(
        json!({"disks": [{"name": "root", "disk": {"bus": "virtio"}}]}),
        json!([{"name": "root", "containerDisk": {"image": "guest"}}]),
    )
}

pub fn usual_launcher() -> Launcher {
    let l = Launcher::new();
    l.image(0, &guest().join("disk.qcow2"));
    l
}

pub fn refusal(a: &Ack) -> &str {
    match a.result.as_ref().unwrap() {
        ack::Result::Refused(r) => &r.reason,
        ack::Result::Accepted(_) => "accepted",
        ack::Result::Done(_) => "done",
    }
}
