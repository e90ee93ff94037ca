//! The guest agent: a client that asks at its own pace and never makes anybody else wait.
//!
//! What comes from a guest is not trusted: replies are bounded, garbage is skipped, and after any doubt the
//! conversation is synchronised again by a random number. Nothing is sent while the guest has not opened the port.

use std::time::Duration;

use base64::Engine as _;
use proto::agent::OsInfo;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::limits;

/// What the agent said last. Only changes are passed on.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct AgentLevel {
    pub connected: bool,
    pub version: String,
    pub os: Option<OsInfo>,
    pub hostname: String,
    pub nics: Vec<GuestNic>,
    pub fs_freeze_status: String,
    /// Of [`USED`], those that the agent does not have.
    pub lacks: Vec<String>,
}

/// Commands that are used here: an agent without them leaves something unknown or undone.
const USED: [&str; 8] = [
    "guest-shutdown",
    "guest-network-get-interfaces",
    "guest-get-osinfo",
    "guest-get-host-name",
    "guest-get-users",
    "guest-get-fsinfo",
    "guest-get-timezone",
    "guest-fsfreeze-status",
];

/// Those of [`USED`] that an agent does not have, or was told to refuse. One that gives no list is believed to have all.
fn lacks(info: &Value) -> Vec<String> {
    let Some(list) = info.get("supported_commands").and_then(Value::as_array) else { return Vec::new() };
    let has = |name: &str| {
        list.iter().any(|c| {
            c.get("name").and_then(Value::as_str) == Some(name)
                && c.get("enabled").and_then(Value::as_bool).unwrap_or(false)
        })
    };
    USED.into_iter().filter(|name| !has(name)).map(str::to_owned).collect()
}

/// A network interface as the guest sees it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct GuestNic {
    pub name: String,
    pub mac: String,
    pub ips: Vec<String>,
}

/// Why a command had no result.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum AgentError {
    #[error("the guest agent is not connected")]
    NotConnected,
    #[error("the guest agent did not answer {0}")]
    Silent(String),
    #[error("the guest agent refused {0}: {1}")]
    Refused(String, String),
    #[error("{0} did not end within {1:?}")]
    Late(String, Duration),
}

struct Call {
    command: &'static str,
    arguments: Value,
    limit: Duration,
    /// Success has no reply; silence for a moment is success.
    silent: bool,
    reply: oneshot::Sender<Result<Value, AgentError>>,
}

/// A handle: clones speak to the same agent, one command after another.
#[derive(Clone)]
pub(crate) struct Agent {
    calls: mpsc::Sender<Call>,
}

impl Agent {
    /// Speaks over `stream` whenever `open` says that the guest listens.
    pub fn spawn(stream: UnixStream, open: watch::Receiver<bool>) -> (Self, watch::Receiver<AgentLevel>) {
        let (calls, asked) = mpsc::channel(limits::ASKS);
        let (level, seen) = watch::channel(AgentLevel::default());
        let line = Line { stream, pending: Vec::new(), synced: false };
        tokio::spawn(Poller { line, open, level, due: Due::default(), opened: Instant::now() }.run(asked));
        (Self { calls }, seen)
    }

    pub async fn call(&self, command: &'static str, arguments: Value) -> Result<Value, AgentError> {
        self.send(command, arguments, limits::AGENT_TIMEOUT, false).await
    }

    pub async fn call_within(&self, command: &'static str, limit: Duration) -> Result<Value, AgentError> {
        self.send(command, Value::Null, limit, false).await
    }

    pub async fn call_silent(&self, command: &'static str, arguments: Value) -> Result<Value, AgentError> {
        self.send(command, arguments, Duration::from_secs(1), true).await
    }

    /// Runs a program inside of the guest until it ends: its exit code, and what it wrote, cut.
    pub async fn run(&self, program: &str, arguments: &[String]) -> Result<(i32, String), AgentError> {
        let asked = json!({"path": program, "arg": arguments, "capture-output": true});
        let begun = self.call("guest-exec", asked).await?;
        let Some(pid) = begun.get("pid").and_then(Value::as_i64) else {
            return Err(AgentError::Refused("guest-exec".into(), "it gave no process id".into()));
        };
        loop {
            let status = self.call("guest-exec-status", json!({"pid": pid})).await?;
            if status.get("exited").and_then(Value::as_bool) == Some(true) {
                return Ok(ended(&status));
            }
            tokio::time::sleep(RUNS).await;
        }
    }

    async fn send(
        &self,
        command: &'static str,
        arguments: Value,
        limit: Duration,
        silent: bool,
    ) -> Result<Value, AgentError> {
        let (reply, answer) = oneshot::channel();
        let call = Call { command, arguments, limit, silent, reply };
        self.calls.send(call).await.map_err(|_| AgentError::NotConnected)?;
        answer.await.map_err(|_| AgentError::NotConnected)?
    }
}

/// The byte stream with its doubts.
struct Line {
    stream: UnixStream,
    pending: Vec<u8>,
    synced: bool,
}

impl Line {
    /// Bytes up to `end`, which is taken off. More than the bound is thrown away.
    async fn until(&mut self, end: u8) -> std::io::Result<Vec<u8>> {
        loop {
            if let Some(at) = self.pending.iter().position(|b| *b == end) {
                let rest = self.pending.split_off(at + 1);
                let mut line = std::mem::replace(&mut self.pending, rest);
                line.pop();
                return Ok(line);
            }
            if self.pending.len() > limits::AGENT_REPLY {
                self.pending.clear();
            }
            let mut buffer = [0; 4096];
            match self.stream.read(&mut buffer).await? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                n => self.pending.extend_from_slice(buffer.get(..n).unwrap_or_default()),
            }
        }
    }

    /// Both sides forget what was half said.
    async fn sync(&mut self) -> std::io::Result<()> {
        let number = uuid::Uuid::new_v4().as_u128() as u32 >> 1;
        let mut request = vec![0xff];
        request
            .extend(json!({"execute": "guest-sync-delimited", "arguments": {"id": number}}).to_string().into_bytes());
        request.push(b'\n');
        self.pending.clear();
        self.stream.write_all(&request).await?;
        self.until(0xff).await?;
        loop {
            let line = self.until(b'\n').await?;
            let text = line.rsplit(|b| *b == 0xff).next().unwrap_or_default();
            let value: Option<Value> = serde_json::from_slice(text).ok();
            if value.is_some_and(|v| v.get("return").and_then(Value::as_u64) == Some(u64::from(number))) {
                self.synced = true;
                return Ok(());
            }
        }
    }

    async fn exchange(&mut self, command: &str, arguments: Value) -> std::io::Result<Result<Value, String>> {
        if !self.synced {
            self.sync().await?;
        }
        // A future that is dropped half way leaves the conversation in doubt.
        self.synced = false;
        let mut request = json!({"execute": command});
        if !arguments.is_null() {
            request["arguments"] = arguments;
        }
        self.stream.write_all(format!("{request}\n").as_bytes()).await?;
        loop {
            let line = self.until(b'\n').await?;
            let Ok(mut value) = serde_json::from_slice::<Value>(&line) else { continue };
            if let Some(result) = value.get_mut("return") {
                self.synced = true;
                return Ok(Ok(result.take()));
            }
            if let Some(error) = value.get("error") {
                self.synced = true;
                let desc = error.get("desc").and_then(Value::as_str).unwrap_or("no reason given");
                return Ok(Err(text(desc)));
            }
        }
    }

    async fn command(&mut self, command: &str, arguments: Value, limit: Duration) -> Result<Value, AgentError> {
        match tokio::time::timeout(limit, self.exchange(command, arguments)).await {
            Ok(Ok(Ok(value))) => Ok(value),
            Ok(Ok(Err(problem))) => Err(AgentError::Refused(command.into(), problem)),
            Ok(Err(_)) | Err(_) => Err(AgentError::Silent(command.into())),
        }
    }
}

/// When each question was last asked.
#[derive(Default)]
struct Due {
    system: Option<Instant>,
    nics: Option<Instant>,
    freeze: Option<Instant>,
}

/// Exit code and words of a program that has ended. One that a signal ended has the code that a shell gives it.
fn ended(status: &Value) -> (i32, String) {
    let number = |key: &str| status.get(key).and_then(Value::as_i64).and_then(|n| i32::try_from(n).ok());
    let exit = number("exitcode").or_else(|| number("signal").map(|s| s.saturating_add(128))).unwrap_or(-1);
    let wrote = |key: &str| {
        let raw = base64::engine::general_purpose::STANDARD.decode(status.get(key)?.as_str()?).ok()?;
        Some(text(&String::from_utf8_lossy(&raw))).filter(|t| !t.is_empty())
    };
    (exit, wrote("err-data").or_else(|| wrote("out-data")).unwrap_or_default())
}

/// How often a program that was started in the guest is looked at.
const RUNS: Duration = Duration::from_millis(100);
/// Pace of the poller.
const TICK: Duration = Duration::from_secs(1);
/// OS, version: they change with an upgrade of the guest.
const SYSTEM: Duration = Duration::from_secs(120);
/// Interfaces and host name.
const NICS: Duration = Duration::from_secs(10);
/// Interfaces in the first half minute, while DHCP is at work.
const NICS_EARLY: Duration = Duration::from_secs(1);
const EARLY: Duration = Duration::from_secs(30);
/// File system freeze, as KubeVirt.
const FREEZE: Duration = Duration::from_secs(5);

fn due(last: &mut Option<Instant>, period: Duration) -> bool {
    let now = last.is_none_or(|t| t.elapsed() >= period);
    if now {
        *last = Some(Instant::now());
    }
    now
}

struct Poller {
    line: Line,
    open: watch::Receiver<bool>,
    level: watch::Sender<AgentLevel>,
    due: Due,
    opened: Instant,
}

impl Poller {
    async fn run(mut self, mut asked: mpsc::Receiver<Call>) {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let open = *self.open.borrow_and_update();
            if !open && self.level.borrow().connected {
                self.lost();
            }
            tokio::select! {
                call = asked.recv() => match call {
                    Some(call) => self.serve(call).await,
                    None => return,
                },
                changed = self.open.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.line.synced = false;
                    self.due = Due::default();
                    self.opened = Instant::now();
                    tick.reset_immediately();
                }
                _ = tick.tick(), if open => self.poll().await,
            }
        }
    }

    fn lost(&mut self) {
        self.line.synced = false;
        self.due = Due::default();
        self.level.send_if_modified(|l| std::mem::replace(&mut l.connected, false));
    }

    async fn serve(&mut self, call: Call) {
        if !*self.open.borrow() {
            let _ = call.reply.send(Err(AgentError::NotConnected));
            return;
        }
        let mut result = self.line.command(call.command, call.arguments, call.limit).await;
        if call.silent && matches!(result, Err(AgentError::Silent(_))) {
            result = Ok(Value::Null);
        }
        // What the command changed is seen with the next tick.
        self.due.freeze = None;
        let _ = call.reply.send(result);
    }

    async fn poll(&mut self) {
        let mut next = self.level.borrow().clone();
        if !next.connected {
            match self.line.command("guest-info", Value::Null, limits::AGENT_TIMEOUT).await {
                Ok(info) => {
                    next.version = field(&info, "version");
                    next.lacks = lacks(&info);
                }
                Err(AgentError::Silent(_)) => return,
                Err(_) => {}
            }
            next.connected = true;
        }
        let mut answers = Vec::new();
        if due(&mut self.due.system, SYSTEM) {
            answers.push(("guest-get-osinfo", self.ask("guest-get-osinfo").await));
        }
        let pace = if self.opened.elapsed() < EARLY { NICS_EARLY } else { NICS };
        if due(&mut self.due.nics, pace) {
            answers.push(("guest-network-get-interfaces", self.ask("guest-network-get-interfaces").await));
            answers.push(("guest-get-host-name", self.ask("guest-get-host-name").await));
        }
        if due(&mut self.due.freeze, FREEZE) {
            answers.push(("guest-fsfreeze-status", self.ask("guest-fsfreeze-status").await));
        }
        for (command, answer) in answers {
            match (command, answer) {
                (_, Err(AgentError::Silent(_))) => {
                    self.lost();
                    return;
                }
                // While file systems are frozen the agent refuses most commands: what was known stays.
                (_, Err(_)) => {}
                ("guest-get-osinfo", Ok(v)) => next.os = Some(os(&v)),
                ("guest-get-host-name", Ok(v)) => next.hostname = field(&v, "host-name"),
                ("guest-fsfreeze-status", Ok(v)) => next.fs_freeze_status = v.as_str().map(text).unwrap_or_default(),
                (_, Ok(v)) => next.nics = nics(&v),
            }
        }
        self.level.send_if_modified(|l| {
            let changed = *l != next;
            *l = next;
            changed
        });
    }

    async fn ask(&mut self, command: &str) -> Result<Value, AgentError> {
        self.line.command(command, Value::Null, limits::AGENT_TIMEOUT).await
    }
}

/// A text of the guest's: bounded, printable.
fn text(s: &str) -> String {
    s.chars().filter(|c| !c.is_control()).take(256).collect()
}

fn field(value: &Value, key: &str) -> String {
    value.get(key).and_then(Value::as_str).map(text).unwrap_or_default()
}

fn os(v: &Value) -> OsInfo {
    OsInfo {
        name: field(v, "name"),
        kernel_release: field(v, "kernel-release"),
        version: field(v, "version"),
        pretty_name: field(v, "pretty-name"),
        version_id: field(v, "version-id"),
        kernel_version: field(v, "kernel-version"),
        machine: field(v, "machine"),
        id: field(v, "id"),
    }
}

fn nics(v: &Value) -> Vec<GuestNic> {
    let list = v.as_array().map(Vec::as_slice).unwrap_or_default();
    let mut nics: Vec<GuestNic> = list
        .iter()
        .take(64)
        .map(|n| GuestNic {
            name: field(n, "name"),
            mac: field(n, "hardware-address").to_ascii_lowercase(),
            ips: n
                .get("ip-addresses")
                .and_then(Value::as_array)
                .map(|a| {
                    a.iter()
                        .take(32)
                        .map(|ip| field(ip, "ip-address"))
                        .filter(|ip| ip.parse::<std::net::IpAddr>().is_ok())
                        .collect()
                })
                .unwrap_or_default(),
        })
        .filter(|n| n.name != "lo" && n.mac != "00:00:00:00:00:00" && !n.mac.is_empty())
        .collect();
    nics.sort_by(|a, b| a.name.cmp(&b.name));
    nics
}

/// The bodies of KubeVirt's subresources about the guest.
pub(crate) mod views {
    use super::{Agent, AgentError, Value, field, json, os};

    const API: &str = "subresources.kubevirt.io/v1";

    /// VirtualMachineInstanceGuestAgentInfo.
    pub async fn guest_os_info(agent: &Agent, freeze: &str) -> Result<Value, AgentError> {
        let info = agent.call("guest-info", Value::Null).await?;
        let o = os(&agent.call("guest-get-osinfo", Value::Null).await.unwrap_or_default());
        let hostname = agent.call("guest-get-host-name", Value::Null).await.unwrap_or_default();
        let zone = agent.call("guest-get-timezone", Value::Null).await.unwrap_or_default();
        let users = agent.call("guest-get-users", Value::Null).await.unwrap_or_default();
        let disks = agent.call("guest-get-fsinfo", Value::Null).await.unwrap_or_default();
        let commands: Vec<Value> = info
            .get("supported_commands")
            .and_then(Value::as_array)
            .map(|a| a.iter().take(256).map(|c| json!({"name": field(c, "name"), "enabled": c.get("enabled").and_then(Value::as_bool).unwrap_or(false)})).collect())
            .unwrap_or_default();
        let mut out = json!({
            "kind": "VirtualMachineInstanceGuestAgentInfo", "apiVersion": API, "metadata": {},
            "guestAgentVersion": field(&info, "version"),
            "supportedCommands": commands,
            "hostname": field(&hostname, "host-name"),
            "os": {"name": o.name, "kernelRelease": o.kernel_release, "version": o.version, "prettyName": o.pretty_name,
                   "versionId": o.version_id, "kernelVersion": o.kernel_version, "machine": o.machine, "id": o.id},
            "timezone": timezone(&zone),
            "userList": user_items(&users),
            "fsInfo": {"disks": disk_items(&disks)},
        });
        if freeze == "frozen" {
            out["fsFreezeStatus"] = json!(freeze);
        }
        Ok(out)
    }

    /// VirtualMachineInstanceGuestOSUserList.
    pub async fn user_list(agent: &Agent) -> Result<Value, AgentError> {
        let users = agent.call("guest-get-users", Value::Null).await?;
        Ok(
            json!({"kind": "VirtualMachineInstanceGuestOSUserList", "apiVersion": API, "metadata": {}, "items": user_items(&users)}),
        )
    }

    /// VirtualMachineInstanceFileSystemList.
    pub async fn filesystem_list(agent: &Agent) -> Result<Value, AgentError> {
        let disks = agent.call("guest-get-fsinfo", Value::Null).await?;
        Ok(
            json!({"kind": "VirtualMachineInstanceFileSystemList", "apiVersion": API, "metadata": {}, "items": disk_items(&disks)}),
        )
    }

    fn timezone(v: &Value) -> String {
        match v.get("offset").and_then(Value::as_i64) {
            Some(offset) => format!("{}, {offset}", field(v, "zone")),
            None => String::new(),
        }
    }

    fn user_items(v: &Value) -> Vec<Value> {
        let list = v.as_array().map(Vec::as_slice).unwrap_or_default();
        list.iter()
            .take(256)
            .map(|u| {
                json!({"userName": field(u, "user"), "domain": field(u, "domain"),
                       "loginTime": u.get("login-time").and_then(Value::as_f64).unwrap_or_default()})
            })
            .collect()
    }

    fn disk_items(v: &Value) -> Vec<Value> {
        let list = v.as_array().map(Vec::as_slice).unwrap_or_default();
        list.iter()
            .take(256)
            .map(|d| {
                let number = |key: &str| d.get(key).and_then(Value::as_u64).unwrap_or_default();
                let below: Vec<Value> = d
                    .get("disk")
                    .and_then(Value::as_array)
                    .map(|a| a.iter().take(64).map(|x| json!({"serial": field(x, "serial"), "busType": field(x, "bus-type")})).collect())
                    .unwrap_or_default();
                json!({"diskName": field(d, "name"), "mountPoint": field(d, "mountpoint"), "fileSystemType": field(d, "type"),
                       "usedBytes": number("used-bytes"), "totalBytes": number("total-bytes"), "disk": below})
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// An agent that answers what a table says, after some noise.
    async fn fake(mut stream: UnixStream, frozen: bool) {
        let mut pending = Vec::new();
        loop {
            let mut b = [0; 512];
            let Ok(n @ 1..) = stream.read(&mut b).await else { return };
            pending.extend_from_slice(&b[..n]);
            while let Some(at) = pending.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = pending.drain(..=at).collect();
                let start = line.iter().position(|b| *b == b'{').unwrap();
                let request: Value = serde_json::from_slice(&line[start..]).unwrap();
                let reply = match request["execute"].as_str().unwrap() {
                    "guest-sync-delimited" => {
                        stream.write_all(b"{\"return\":\"old\"}\nnoise\xff").await.unwrap();
                        json!({"return": request["arguments"]["id"]})
                    }
                    "guest-info" => json!({"return": {"version": "7.2.0"}}),
                    _ if frozen => json!({"error": {"desc": "disabled"}}),
                    "guest-get-osinfo" => json!({"return": {"id": "debian", "pretty-name": "Debian\u{1b}[2J"}}),
                    "guest-get-host-name" => json!({"return": {"host-name": "web"}}),
                    "guest-fsfreeze-status" => json!({"return": "thawed"}),
                    "guest-exec" if request["arguments"]["path"] == "/bin/none" => {
                        json!({"error": {"desc": "No such file"}})
                    }
                    "guest-exec" => json!({"return": {"pid": request["arguments"]["arg"].as_array().unwrap().len()}}),
                    "guest-exec-status" => match request["arguments"]["pid"].as_i64().unwrap() {
                        0 => json!({"return": {"exited": false}}),
                        1 => {
                            json!({"return": {"exited": true, "exitcode": 3, "out-data": "b3V0", "err-data": "ZXJyCg=="}})
                        }
                        _ => json!({"return": {"exited": true, "signal": 9}}),
                    },
                    "guest-network-get-interfaces" => json!({"return": [
                        {"name": "lo", "hardware-address": "00:00:00:00:00:00"},
                        {"name": "eth0", "hardware-address": "02:00:00:00:00:AA", "ip-addresses": [{"ip-address": "10.0.2.2"}, {"ip-address": "x"}]}]}),
                    other => json!({"error": {"desc": format!("unknown {other}")}}),
                };
                stream.write_all(format!("garbage\n{reply}\n").as_bytes()).await.unwrap();
            }
        }
    }

    #[tokio::test]
    async fn levels_come_through_noise_and_survive_a_freeze() {
        for frozen in [false, true] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            tokio::spawn(fake(theirs, frozen));
            let (open, opened) = watch::channel(false);
            let (agent, mut level) = Agent::spawn(ours, opened);
            assert_eq!(agent.call("guest-ping", Value::Null).await, Err(AgentError::NotConnected));
            open.send(true).unwrap();
            let connected = tokio::time::timeout(Duration::from_secs(20), level.wait_for(|l| l.connected)).await;
            let l = connected.unwrap().unwrap().clone();
            assert_eq!(l.version, "7.2.0");
            if !frozen {
                assert_eq!((l.hostname.as_str(), l.fs_freeze_status.as_str()), ("web", "thawed"));
                assert_eq!(l.os.unwrap().pretty_name, "Debian[2J");
                assert_eq!(
                    l.nics,
                    [GuestNic { name: "eth0".into(), mac: "02:00:00:00:00:aa".into(), ips: vec!["10.0.2.2".into()] }]
                );
                assert_eq!(agent.run("/bin/test", &["a".into()]).await, Ok((3, "err".into())));
                assert_eq!(agent.run("/bin/test", &["a".into(), "b".into()]).await, Ok((137, String::new())));
                let refused = agent.run("/bin/none", &[]).await.unwrap_err().to_string();
                assert_eq!(refused, "the guest agent refused guest-exec: No such file");
                let endless = tokio::time::timeout(Duration::from_millis(300), agent.run("/bin/sleep", &[])).await;
                assert!(endless.is_err(), "it runs as long as it runs");
                let e = agent.call("guest-x", Value::Null).await.unwrap_err();
                assert_eq!(e.to_string(), "the guest agent refused guest-x: unknown guest-x");
            }
            open.send(false).unwrap();
            level.wait_for(|l| !l.connected).await.unwrap();
        }
    }

    #[test]
    fn what_an_agent_does_not_have_is_named() {
        assert_eq!(lacks(&json!({"version": "0.12"})), [] as [&str; 0]);
        let all: Vec<Value> = USED.iter().map(|name| json!({"name": name, "enabled": true})).collect();
        assert_eq!(lacks(&json!({"supported_commands": all})), [] as [&str; 0]);
        let mut some = all;
        some[0]["enabled"] = json!(false);
        some.pop();
        assert_eq!(lacks(&json!({"supported_commands": some})), ["guest-shutdown", "guest-fsfreeze-status"]);
    }

    #[tokio::test]
    async fn a_silent_guest_is_not_connected_and_blocks_nobody() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (_open, opened) = watch::channel(true);
        let (agent, level) = Agent::spawn(ours, opened);
        assert_eq!(agent.call("guest-ping", Value::Null).await, Err(AgentError::Silent("guest-ping".into())));
        assert!(!level.borrow().connected);
        drop(theirs);
    }
}
