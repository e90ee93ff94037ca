//! Probes that a kubelet carries out: `tcpSocket` and `httpGet` of the container, from the node's network, and `exec` in it.
//!
//! A readiness probe decides on the container's `ready`, a liveness probe on its life. What cannot be asked here (grpc, HTTPS) is
//! refused with the pod, so that no answer is made up.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod, Probe};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::bundle::{BINARY, BINARY_IN_POD};
use super::runc::Runc;

/// What of an HTTP answer is read: the status line.
const ANSWER: usize = 256;

/// What is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Ask {
    Connection {
        /// None: the pod's own address.
        host: Option<String>,
        port: u16,
        /// Request of an HTTP probe.
        request: Option<String>,
    },
    Command(Vec<String>),
}

/// A probe that can be carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Plan {
    ask: Ask,
    delay: Duration,
    period: Duration,
    limit: Duration,
    successes: u32,
    failures: u32,
}

fn port(container: &Container, port: &IntOrString) -> Option<u16> {
    match port {
        IntOrString::Int(number) => u16::try_from(*number).ok(),
        IntOrString::String(name) => container
            .ports
            .iter()
            .flatten()
            .find(|p| p.name.as_ref() == Some(name))
            .and_then(|p| u16::try_from(p.container_port).ok())
            .or_else(|| name.parse().ok()),
    }
}

fn plan(container: &Container, probe: &Probe) -> Result<Plan, String> {
    let number =
        |n: Option<i32>, default: u32| n.and_then(|n| u32::try_from(n).ok()).filter(|n| *n > 0).unwrap_or(default);
    let seconds = |n: Option<i32>, default: u32| Duration::from_secs(number(n, default).into());
    let no_port = || "a probe names a port that the container does not have".to_owned();
    let ask = if let Some(tcp) = &probe.tcp_socket {
        let port = port(container, &tcp.port).ok_or_else(no_port)?;
        Ask::Connection { host: tcp.host.clone(), port, request: None }
    } else if let Some(http) = &probe.http_get {
        if http.scheme.as_deref().is_some_and(|s| !s.eq_ignore_ascii_case("http")) {
            return Err("a probe over HTTPS is not supported".into());
        }
        let number = port(container, &http.port).ok_or_else(no_port)?;
        let path = http.path.as_deref().filter(|p| p.starts_with('/')).unwrap_or("/");
        let mut head = format!("GET {path} HTTP/1.1\r\n");
        let own = http.http_headers.iter().flatten();
        let named = own.clone().any(|h| h.name.eq_ignore_ascii_case("host"));
        for header in own {
            head.push_str(&format!("{}: {}\r\n", header.name, header.value));
        }
        if !named {
            head.push_str(&format!("Host: {}\r\n", http.host.as_deref().unwrap_or("pod")));
        }
        head.push_str("User-Agent: kube-probe/virtfold\r\nAccept: */*\r\nConnection: close\r\n\r\n");
        Ask::Connection { host: http.host.clone(), port: number, request: Some(head) }
    } else if let Some(command) = probe.exec.as_ref().and_then(|e| e.command.clone()).filter(|c| !c.is_empty()) {
        Ask::Command(command.into_iter().map(|a| if a == BINARY_IN_POD { BINARY.to_owned() } else { a }).collect())
    } else {
        return Err("a probe of a kind that is not supported (tcpSocket, httpGet and exec are)".into());
    };
    Ok(Plan {
        ask,
        delay: Duration::from_secs(probe.initial_delay_seconds.and_then(|n| u64::try_from(n).ok()).unwrap_or(0)),
        period: seconds(probe.period_seconds, 10),
        limit: seconds(probe.timeout_seconds, 1),
        successes: number(probe.success_threshold, 1),
        failures: number(probe.failure_threshold, 3),
    })
}

/// Why the container's probes cannot be carried out, if they cannot.
pub(super) fn refusal(container: &Container) -> Option<String> {
    let probes = [&container.readiness_probe, &container.liveness_probe, &container.startup_probe];
    if container.startup_probe.is_some() {
        return Some("a startup probe is not supported".into());
    }
    probes.into_iter().flatten().find_map(|p| plan(container, p).err())
}

/// Counts answers: a level changes after so many that say otherwise.
#[derive(Debug)]
struct Level {
    now: bool,
    against: u32,
}

impl Level {
    fn count(&mut self, good: bool, plan: &Plan) -> bool {
        self.against = if good == self.now { 0 } else { self.against + 1 };
        let needed = if good { plan.successes } else { plan.failures };
        if self.against >= needed {
            *self = Self { now: good, against: 0 };
        }
        self.now
    }
}

/// Where probes are sent to and from.
#[derive(Debug, Clone)]
pub(super) struct From {
    /// The pod; none where it has no network.
    pub pod: Option<IpAddr>,
    /// File of the network namespace to ask from; none for the process's own.
    pub netns: Option<PathBuf>,
    /// The container.
    pub container: (Runc, String),
}

async fn connect(from: &From, host: Option<&String>, port: u16) -> std::io::Result<TcpStream> {
    let host = match host {
        Some(host) => host.parse().map_err(std::io::Error::other)?,
        None => from.pod.ok_or_else(|| std::io::Error::other("the pod has no address"))?,
    };
    let address = SocketAddr::new(host, port);
    match &from.netns {
        Some(netns) => crate::netns::dial(netns.clone(), address).await,
        None => TcpStream::connect(address).await,
    }
}

/// The error says in what way the answer is bad.
async fn ask(from: &From, ask: &Ask) -> Result<(), String> {
    match ask {
        Ask::Connection { host, port, request } => {
            let answer = exchange(from, host.as_ref(), *port, request.as_deref()).await.map_err(|e| e.to_string())?;
            let code = answer.split(' ').nth(1).and_then(|c| c.parse::<u16>().ok());
            match code {
                _ if request.is_none() => Ok(()),
                Some(200..400) if answer.starts_with("HTTP/") => Ok(()),
                Some(code) if answer.starts_with("HTTP/") => Err(format!("HTTP probe failed with statuscode: {code}")),
                Some(_) | None => Err("the answer is no HTTP".into()),
            }
        }
        Ask::Command(command) => {
            let (runc, id) = &from.container;
            match runc.exec(id, command).await {
                Ok((0, _)) => Ok(()),
                Ok((code, said)) if said.is_empty() => Err(format!("the command ended with {code}")),
                Ok((_, said)) => Err(said),
                Err(e) => Err(e.to_string()),
            }
        }
    }
}

async fn exchange(from: &From, host: Option<&String>, port: u16, request: Option<&str>) -> std::io::Result<String> {
    let mut stream = connect(from, host, port).await?;
    let Some(request) = request else { return Ok(String::new()) };
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.take(ANSWER as u64).read_to_end(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// What a probe has found out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Health {
    /// It holds.
    pub holds: bool,
    /// What the last answer lacked; empty where it lacked nothing.
    pub trouble: String,
}

async fn probe(plan: Plan, from: From, level: watch::Sender<Health>) {
    let mut count = Level { now: level.borrow().holds, against: 0 };
    sleep(plan.delay).await;
    loop {
        let trouble = match timeout(plan.limit, ask(&from, &plan.ask)).await {
            Ok(answer) => answer.err().unwrap_or_default(),
            Err(_) => format!("no answer within {:?}", plan.limit),
        };
        let now = Health { holds: count.count(trouble.is_empty(), &plan), trouble };
        level.send_if_modified(|level| {
            let changed = *level != now;
            *level = now;
            changed
        });
        sleep(plan.period).await;
    }
}

/// The probes of a running container. They end when this is dropped.
pub(super) struct Probes {
    /// Whether the container is ready.
    pub ready: watch::Receiver<Health>,
    /// Whether it lives.
    pub alive: watch::Receiver<Health>,
    _tasks: JoinSet<()>,
    _senders: Vec<watch::Sender<Health>>,
}

/// Starts the probes of a pod's container. `was_ready` is what the pod says already: a runner that starts again takes no readiness
/// away.
pub(super) fn start(pod: Option<&Pod>, from: &From, was_ready: bool) -> Probes {
    let container = pod.and_then(|p| p.spec.as_ref()?.containers.first());
    let plan_of = |probe: Option<&Probe>| container.zip(probe).and_then(|(c, p)| plan(c, p).ok());
    let readiness = plan_of(container.and_then(|c| c.readiness_probe.as_ref()));
    let liveness = plan_of(container.and_then(|c| c.liveness_probe.as_ref()));
    let level = |holds| watch::channel(Health { holds, trouble: String::new() });
    let (ready_sender, ready) = level(readiness.is_none() || was_ready);
    let (alive_sender, alive) = level(true);
    let mut tasks = JoinSet::new();
    let mut kept = Vec::new();
    for (work, sender) in [(readiness, ready_sender), (liveness, alive_sender)] {
        match work {
            Some(plan) => drop(tasks.spawn(probe(plan, from.clone(), sender))),
            // A level that nobody changes.
            None => kept.push(sender),
        }
    }
    Probes { ready, alive, _tasks: tasks, _senders: kept }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn container(probe: serde_json::Value) -> Container {
        serde_json::from_value(
            json!({"name": "c", "ports": [{"name": "web", "containerPort": 80}], "readinessProbe": probe}),
        )
        .unwrap()
    }

    #[test]
    fn probes_are_read_and_what_cannot_be_asked_is_refused() {
        let c = container(json!({"httpGet": {"port": "web", "path": "/h"}, "periodSeconds": 2, "failureThreshold": 5}));
        let plan = plan(&c, c.readiness_probe.as_ref().unwrap()).unwrap();
        assert_eq!((plan.period, plan.failures, plan.successes), (Duration::from_secs(2), 5, 1));
        let Ask::Connection { port: 80, request: Some(request), .. } = plan.ask else { panic!("{:?}", plan.ask) };
        assert!(request.starts_with("GET /h HTTP/1.1\r\nHost: pod\r\n"));
        let c = container(json!({"exec": {"command": [BINARY_IN_POD, "guest-probe"]}}));
        let found = super::plan(&c, c.readiness_probe.as_ref().unwrap()).unwrap().ask;
        assert_eq!(found, Ask::Command(vec![BINARY.into(), "guest-probe".into()]));
        let c = container(json!({"httpGet": {"port": "web"}}));
        assert_eq!(refusal(&c), None);
        for probe in [
            json!({"grpc": {"port": 1}}),
            json!({"exec": {"command": []}}),
            json!({"tcpSocket": {"port": "no"}}),
            json!({"httpGet": {"port": 1, "scheme": "HTTPS"}}),
        ] {
            assert!(refusal(&container(probe.clone())).is_some(), "{probe}");
        }
    }

    #[test]
    fn a_level_needs_its_number_of_answers() {
        let c = container(json!({"tcpSocket": {"port": 1}, "failureThreshold": 2}));
        let plan = plan(&c, c.readiness_probe.as_ref().unwrap()).unwrap();
        let mut level = Level { now: true, against: 0 };
        let answers = [false, true, false, false, true];
        let levels: Vec<bool> = answers.iter().map(|a| level.count(*a, &plan)).collect();
        assert_eq!(levels, [true, true, true, false, true]);
    }

    #[tokio::test]
    async fn an_http_answer_decides() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            for status in ["204 No Content", "503 Service Unavailable"] {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = [0; 18];
                stream.read_exact(&mut request).await.unwrap();
                stream.write_all(format!("HTTP/1.1 {status}\r\n\r\n").as_bytes()).await.unwrap();
            }
        });
        let runc = Runc { program: "/bin/true".into(), root: "/".into() };
        let from = From { pod: "127.0.0.1".parse().ok(), netns: None, container: (runc, "c".into()) };
        let http = Ask::Connection { host: None, port, request: Some("GET / HTTP/1.1\r\n\r\n".into()) };
        assert_eq!(ask(&from, &http).await, Ok(()));
        assert_eq!(ask(&from, &http).await, Err("HTTP probe failed with statuscode: 503".into()));
    }
}
