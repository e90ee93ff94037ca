//! What really happens in a real cluster, told to the ghost of the model world: by the store, whose changes have one order, and by
//! the machine's processes. It sees what the control plane cannot know, and asks the control plane nothing.

use crate::e2e::process::{self, Process};
use crate::world::{
    Violation,
    ghost::{Author, Begun, Executing, Ghost},
    invariants::{Quiet, SAFETY, unrest},
    server::{Commit, Res, Seen},
    told::{LEASE, Office},
    users::NS,
};
use anyhow::{Context, Result};
use embedded::procs::ProcessId;
use embedded::storage::{Change, Etcd, Kv, RangeQuery, Revision, Storage, WatchItem};
use futures::StreamExt;
use serde::Deserialize;
use serde_json::Value;
use state::{Epoch, NodeName, PodUid, domain::InstructKind};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::Read,
    path::PathBuf,
    rc::Rc,
    sync::mpsc::sync_channel,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Between two looks at the processes of the machine.
const LOOK: Duration = Duration::from_millis(150);
/// A store that does not answer is asked again after this.
const AGAIN: Duration = Duration::from_millis(100);
/// Lines of the story that are kept.
const LINES: usize = 20_000;

/// Milliseconds since 1970.
pub fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// Where the store is, and how it names what it keeps.
#[derive(Debug, Clone)]
pub struct Store {
    /// etcd.
    pub endpoint: String,
    /// Of a kube-apiserver: its keys differ from ours.
    pub foreign: bool,
    /// Where it is written down what happens in modelled launchers, which are no processes.
    pub told: Option<PathBuf>,
}

impl Store {
    fn res(&self, key: &str) -> Option<Res> {
        if !self.foreign {
            return Res::of_key(key);
        }
        let found = [
            ("/registry/pods/", Res::Pod),
            ("/registry/minions/", Res::Node),
            ("/registry/leases/", Res::Lease),
            ("/registry/controllerrevisions/", Res::Revision),
            ("/registry/kubevirt.io/virtualmachines/", Res::Vm),
            ("/registry/kubevirt.io/virtualmachineinstances/", Res::Vmi),
        ];
        found.into_iter().find(|(prefix, _)| key.starts_with(prefix)).map(|(_, res)| res)
    }
}

/// A process that runs a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Running {
    /// Its id.
    pub pid: i32,
    /// The launcher's id.
    pub launcher: i32,
    /// UID of the instance.
    pub vmi: String,
    /// UID of the pod.
    pub pod: String,
    /// Name of the machine.
    pub machine: String,
    /// Name of the node.
    pub node: String,
}

/// A line of what happens in modelled launchers.
#[derive(Debug, Clone, Deserialize)]
struct Told {
    what: String,
    node: String,
    pod: String,
    vmi: String,
    namespace: String,
    machine: String,
    more: Option<Begin>,
}

#[derive(Debug, Clone, Deserialize)]
struct Begin {
    launcher: String,
    kind: Option<String>,
    id: String,
    version: String,
    epoch: u64,
}

/// What is known of a cluster.
#[derive(Default)]
pub struct Truth {
    /// What really happened.
    pub ghost: Ghost,
    /// Checks that failed.
    pub violations: Vec<Violation>,
    /// The guests that run, by process id and start time.
    pub running: BTreeMap<(i32, u64), Running>,
    /// Launchers that are there, by process id: the instance.
    pub launchers: BTreeMap<i32, String>,
    /// Instances whose own hypervisor or launcher is hurt, or whose guest ends by itself: they may end.
    pub excused: BTreeSet<String>,
    /// The machine whose instance somebody deletes: of a deletion no field says whose it was.
    pub meddled: String,
    /// Who holds the Lease: the address that it wrote.
    pub leader: String,
    /// The clocks of controllers are not the machine's: what they write of time is not compared.
    pub skewed: bool,
    /// Somebody else's collector works here.
    foreign: bool,
    /// Newest version that was seen.
    pub revision: Revision,
    office: Office,
    known: BTreeMap<String, Rc<Seen>>,
    ended: Vec<Running>,
    /// What is said of modelled launchers, and a line of it that is not whole yet.
    told: Option<(File, String)>,
    /// Instructions that began, until the store's version is seen that they name.
    began: Vec<Told>,
    modelled: u64,
    story: Vec<String>,
}

type Job = Box<dyn FnOnce(&mut Truth) + Send>;

/// A thread that watches.
pub struct Witness(UnboundedSender<Job>);

impl Witness {
    /// Begins; the store answers.
    pub fn start(store: Store) -> Result<Self> {
        let (jobs, todo) = unbounded_channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        std::thread::Builder::new().name("witness".into()).spawn(move || runtime.block_on(watch(store, todo)))?;
        Ok(Self(jobs))
    }

    /// Asks, or tells, what is known.
    pub fn with<T: Send + 'static>(&self, f: impl FnOnce(&mut Truth) -> T + Send + 'static) -> Result<T> {
        let (send, answer) = sync_channel(1);
        let job: Job = Box::new(move |t| drop(send.send(f(t))));
        self.0.send(job).ok().context("the witness has ended")?;
        answer.recv().context("the witness has ended")
    }
}

async fn watch(store: Store, mut todo: UnboundedReceiver<Job>) {
    let mut truth = Truth { foreign: store.foreign, ..Truth::default() };
    if let Some(path) = &store.told {
        // It is there before anybody is told to write to it.
        truth.told = File::open(path).ok().map(|file| (file, String::new()));
    }
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut began = false;
    loop {
        let Ok(etcd) = Etcd::new(&store.endpoint) else { return };
        if !began {
            match begin(&store, &etcd, &mut truth).await {
                Ok(()) => began = true,
                Err(_) => tokio::time::sleep(AGAIN).await,
            }
        }
        let mut changes = etcd.watch("/registry/", truth.revision);
        loop {
            if !began {
                break;
            }
            tokio::select! {
                biased;
                job = todo.recv() => match job {
                    Some(job) => job(&mut truth),
                    None => return,
                },
                _ = look.tick() => {
                    truth.look();
                    truth.judge();
                }
                item = changes.next() => match item {
                    Some(Ok(WatchItem::Changes(all))) => {
                        // What has ended by now has ended before anybody says so.
                        truth.look();
                        for change in all {
                            truth.changed(&store, change);
                            truth.judge();
                        }
                    }
                    Some(Ok(WatchItem::Progress(revision))) => truth.revision = truth.revision.max(revision),
                    Some(Err(error)) => {
                        truth.say(|| format!("the store does not answer: {error}"));
                        break;
                    }
                    None => break,
                },
            }
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// What is there already.
async fn begin(store: &Store, etcd: &Etcd, truth: &mut Truth) -> Result<()> {
    let query = RangeQuery { prefix: "/registry/".into(), after: None, limit: 0, revision: 0 };
    let page = etcd.range(query).await?;
    for Kv { key, value, revision } in page.items {
        truth.changed(store, Change { key, value: Some(value), previous: None, revision });
    }
    truth.revision = page.revision;
    Ok(())
}

/// Who wrote a version, as its field managers say.
fn author(before: Option<&Seen>, now: &Seen) -> Author {
    let entries = |o: &Seen| {
        let fields = o.value.pointer("/metadata/managedFields").and_then(Value::as_array).cloned();
        fields.unwrap_or_default()
    };
    let known = before.map(entries).unwrap_or_default();
    let all = entries(now);
    let own = matches!(now.res, Res::Vm | Res::Vmi | Res::Set | Res::Revision | Res::Claim);
    // Who writes the same fields twice within a second leaves the same entry: then it was whoever may.
    let same = own && all.iter().all(|e| known.contains(e));
    // The spec of a machine is its users': they stop and start it within a second, too.
    let spec = |o: &Seen| o.value.get("spec").cloned();
    if same && now.res == Res::Vm && before.is_some_and(|b| spec(b) != spec(now)) {
        return Author::Other;
    }
    let wrote = |name: &str| all.iter().any(|e| e["manager"] == name && (same || !known.contains(e)));
    match () {
        () if wrote("virtfold-controller") => Author::Controller,
        // The pod runner is part of the agent's process and owns the pods' status.
        () if own && (wrote("virtfold-node-agent") || wrote("virtfold-simulate-nodes")) => Author::Agent,
        () => Author::Other,
    }
}

impl Truth {
    /// A line of the story.
    pub fn say(&mut self, line: impl FnOnce() -> String) {
        if self.story.len() < LINES {
            self.story.push(format!("{} {}", jiff::Timestamp::now().strftime("%T%.3f"), line()));
        }
    }

    /// All that was said.
    pub fn story(&self) -> String {
        self.story.join("\n")
    }

    /// Something is wrong.
    pub fn violated(&mut self, check: &'static str, text: String) {
        if self.violations.iter().any(|v| v.check == check) {
            return;
        }
        self.say(|| format!("VIOLATED {check}: {text}"));
        self.violations.push(Violation { check, text, at: now() });
    }

    fn judge(&mut self) {
        if !std::mem::take(&mut self.ghost.dirty) {
            return;
        }
        for (id, check) in SAFETY {
            if let Err(text) = check(&self.ghost) {
                self.violated(id, text);
            }
        }
    }

    fn changed(&mut self, store: &Store, change: Change) {
        self.revision = self.revision.max(change.revision);
        let Some(res) = store.res(&change.key) else { return };
        let before = self.known.get(&change.key).cloned();
        let gone = change.value.is_none();
        let read = change.value.and_then(|bytes| Seen::read(res, change.revision, &bytes));
        let removed = || before.as_ref().map(|b| b.at(u64::try_from(change.revision).unwrap_or(0)));
        let Some(now) = read.or_else(removed) else { return };
        if gone {
            self.known.remove(&change.key);
        } else {
            self.known.insert(change.key, now.clone());
        }
        if res == Res::Lease {
            if now.name() == LEASE {
                self.led(&now, gone);
            }
            return;
        }
        let begins = now.deleting() && before.as_ref().is_some_and(|b| !b.deleting());
        let by = match author(before.as_deref(), &now) {
            Author::Controller if begins && res == Res::Vmi && self.meddled == now.name() => Author::Other,
            by => by,
        };
        if !matches!(res, Res::Node) {
            self.say(|| {
                let what = if gone { "is removed" } else { "is written" };
                let (phase, strategy) = (now.text("/status/phase"), now.text("/spec/runStrategy"));
                format!("{res:?} {} {what} at {} by {by:?} {phase}{strategy}", now.name(), now.revision)
            });
        }
        if let (Res::Vm, Some(before), false) = (res, &before, by == Author::Controller || gone) {
            self.ghost.wished(before, &now);
        }
        let before_at = self.ghost.last_write;
        self.ghost.committed(&Commit { now, before, gone }, self::now(), by);
        // Nodes are written by their heartbeats, too.
        if res == Res::Node {
            self.ghost.last_write = before_at;
        }
    }

    fn led(&mut self, lease: &Seen, gone: bool) {
        if gone {
            self.office = Office::default();
            return;
        }
        // As the holder says when it sent it, by the clock of this machine; the write itself may have been late.
        let said = lease.text("/spec/renewTime").parse::<jiff::Timestamp>().ok().filter(|_| !self.skewed);
        let at = said.map_or_else(now, |t| u64::try_from(t.as_millisecond()).unwrap_or(0));
        let address =
            lease.value.pointer("/metadata/annotations").and_then(|a| a.get(api::names::ANN_CONTROLLER_ADDRESS));
        let address = address.and_then(Value::as_str).unwrap_or_default().to_owned();
        if address != self.leader {
            self.say(|| format!("{} leads at {address}", lease.text("/spec/holderIdentity")));
            self.leader = address;
        }
        self.office.written(&mut self.ghost, lease, at);
    }

    /// Looks which guests run.
    pub fn look(&mut self) {
        if self.told.is_some() {
            return self.listen();
        }
        let all = process::all();
        let of: BTreeMap<i32, &Process> = all.iter().map(|p| (p.pid, p)).collect();
        let launcher = |p: &Process| {
            let named = p.arguments.iter().any(|a| a == "launcher") && !p.name.starts_with("runc");
            let at = p.arguments.iter().position(|a| a == "--vmi-uid")?;
            let vmi = p.arguments.get(at + 1).filter(|_| named)?;
            self.ghost.history.contains_key(vmi).then(|| vmi.clone())
        };
        let launchers: BTreeMap<i32, String> = all.iter().filter_map(|p| Some((p.pid, launcher(p)?))).collect();
        let mut running = BTreeMap::new();
        for qemu in all.iter().filter(|p| p.name.starts_with("qemu-system")) {
            let mut at = qemu.parent;
            // Deeper than any tree of ours.
            for _ in 0..16 {
                if let Some(vmi) = launchers.get(&at) {
                    if let Some(id) = ProcessId::of(qemu.pid) {
                        running.insert((qemu.pid, id.started), (at, vmi.clone()));
                    }
                    break;
                }
                let Some(parent) = of.get(&at) else { break };
                at = parent.parent;
            }
        }
        self.launchers = launchers;
        let over: Vec<_> = self.running.keys().filter(|k| !running.contains_key(k)).copied().collect();
        for key in over {
            let Some(guest) = self.running.remove(&key) else { continue };
            self.say(|| format!("the guest of {} ends, process {}", guest.machine, guest.pid));
            self.ghost.ended(&guest.node, &guest.pod);
            self.ended.push(guest);
        }
        for (key, (launcher, vmi)) in running {
            if !self.running.contains_key(&key) {
                self.began(key, launcher, vmi);
            }
        }
    }

    /// Reads on in what is said of modelled launchers.
    fn listen(&mut self) {
        let Some((file, rest)) = &mut self.told else { return };
        if let Err(error) = file.read_to_string(rest) {
            let text = format!("what happens in launchers cannot be read: {error}");
            return self.violated("S1", text);
        }
        let whole = rest.rfind('\n').map_or(0, |n| n + 1);
        let lines: String = rest.drain(..whole).collect();
        for line in lines.lines() {
            match serde_json::from_str::<Told>(line) {
                Ok(told) => self.hear(told),
                Err(error) => self.violated("S1", format!("what happens in launchers cannot be read: {error}: {line}")),
            }
        }
        // An instruction is judged by the version that it names, once that is seen.
        let seen = u64::try_from(self.revision).unwrap_or(0);
        let named = |t: &Told| t.more.as_ref().and_then(|m| m.version.parse::<u64>().ok()).unwrap_or(0);
        let (ripe, rest) = std::mem::take(&mut self.began).into_iter().partition(|t| named(t) <= seen);
        self.began = rest;
        for told in Vec::<Told>::into_iter(ripe) {
            let version = named(&told);
            let Some(more) = &told.more else { continue };
            let kind = match more.kind.as_deref() {
                Some("Start") => InstructKind::Start,
                Some("Shutdown") => InstructKind::Shutdown,
                Some("Kill") => InstructKind::Kill,
                Some("Pause") => InstructKind::Pause,
                _ => InstructKind::Resume,
            };
            let begun = Begun { id: &more.id, kind, vmi: &told.vmi, version };
            let (node, pod) = (NodeName::from(told.node.as_str()), PodUid(told.pod.clone()));
            self.ghost.begins(&node, &pod, &more.launcher, &begun);
            self.ghost.admitted(&told.node, Epoch(more.epoch), false);
        }
    }

    fn hear(&mut self, told: Told) {
        match told.what.as_str() {
            "executes" => {
                self.modelled += 1;
                let (node, pod, machine) = (told.node.clone(), told.pod.clone(), told.machine.clone());
                let guest = Running { pid: 0, launcher: 0, vmi: told.vmi.clone(), pod, machine, node };
                self.say(|| format!("a guest of {} runs in pod {} on {}", guest.machine, guest.pod, guest.node));
                self.running.insert((0, self.modelled), guest);
                let machine = format!("{}/{}", told.namespace, told.machine);
                self.ghost.executes(&told.vmi, Executing { node: told.node, pod: told.pod, machine });
            }
            "ended" => {
                self.say(|| format!("the guest of {} in pod {} ends", told.machine, told.pod));
                self.ghost.ended(&told.node, &told.pod);
                let key = self.running.iter().find(|(_, g)| g.pod == told.pod).map(|(k, _)| *k);
                self.ended.extend(key.and_then(|k| self.running.remove(&k)));
            }
            _ => self.began.push(told),
        }
    }

    fn began(&mut self, key: (i32, u64), launcher: i32, vmi: String) {
        let Some(seen) = self.ghost.history.get(&vmi).and_then(|h| h.last()) else { return };
        let (machine, node) = (seen.name().to_owned(), seen.text("/status/nodeName").to_owned());
        let Some(pod) = variable(launcher, "POD_UID").filter(|_| !node.is_empty()) else { return };
        let guest = Running {
            pid: key.0,
            launcher,
            vmi: vmi.clone(),
            pod: pod.clone(),
            machine: machine.clone(),
            node: node.clone(),
        };
        self.say(|| format!("a guest of {machine} runs as process {} in pod {pod} on {node}", key.0));
        self.running.insert(key, guest);
        self.ghost.told_to_start.insert(pod.clone());
        self.ghost.executes(&vmi, Executing { node, pod, machine: format!("{NS}/{machine}") });
    }

    /// Guests that ended although nobody wished it, nothing hurt their own hypervisor, and they did not end by themselves (S17).
    fn stopped_by_nobody(&mut self) {
        for guest in std::mem::take(&mut self.ended) {
            let versions = self.ghost.history.get(&guest.vmi).map(Vec::as_slice).unwrap_or_default();
            let wished = versions.iter().any(|v| v.deleting());
            let pod = self.ghost.leaving.contains_key(&guest.pod);
            if !wished && !pod && !self.excused.contains(&guest.vmi) {
                let text =
                    format!("the guest of {} (process {}) was stopped, and nobody wished it", guest.machine, guest.pid);
                self.ghost.killed.push(text);
                self.ghost.dirty = true;
            }
        }
        self.judge();
    }

    /// What is not yet as it was asked for; nothing where all is quiet. What must not have happened is judged, too.
    pub fn unrest(&mut self) -> Vec<(&'static str, String)> {
        self.look();
        self.judge();
        let names: Vec<String> = self.ghost.all(Res::Vm).map(|v| v.name().to_owned()).collect();
        let led = self.office.led(now());
        let ghost = &self.ghost;
        let quiet = Quiet { ghost, now: now(), names: &names, led, led_after: None, waits: None, kept: vec![] };
        // A minute without writes is waited for once, at the end of a run.
        let mut wrong = unrest(&quiet);
        wrong.retain(|(id, _)| *id != "Q2");
        // kube-controller-manager never misses an owner that was deleted and made again under its name while it did not watch: what that owner
        // left stays. It is not ours to hide where our own collector works.
        wrong.retain(|(id, text)| !(self.foreign && *id == "S22" && text.starts_with("revision")));
        let present = |vmi: &String| ghost.present.contains_key(vmi);
        for (pid, vmi) in self.launchers.iter().filter(|(_, vmi)| !present(vmi)) {
            wrong.push(("S22", format!("launcher {pid} of instance {vmi}, which is gone")));
        }
        for node in ghost.all(Res::Node) {
            let ready = node.node().is_some_and(|n| n.ready == Some(true));
            if !ready {
                wrong.push(("L1", format!("node {} is not ready", node.name())));
            }
        }
        for vmi in ghost.all(Res::Vmi).filter(|v| v.text("/status/phase") == "Running") {
            // Modelled launchers are no processes.
            let count =
                if self.told.is_some() { 1 } else { self.launchers.values().filter(|l| *l == vmi.uid()).count() };
            if count != 1 {
                wrong.push(("S4", format!("instance {} has {count} launcher processes", vmi.name())));
            }
            let ready = embedded::semantics::value::items(&vmi.value, "/status/conditions");
            if !ready.iter().any(|c| c["type"] == "Ready" && c["status"] == "True") {
                wrong.push(("L1", format!("instance {} is Running and not Ready", vmi.name())));
            }
        }
        if wrong.is_empty() {
            self.stopped_by_nobody();
        }
        wrong
    }

    /// Nothing was written for so long.
    pub fn still_for(&self) -> Duration {
        Duration::from_millis(now().saturating_sub(self.ghost.last_write))
    }
}

/// A variable of a process's environment.
fn variable(pid: i32, name: &str) -> Option<String> {
    let text = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let start = format!("{name}=");
    text.split(|b| *b == 0).map(String::from_utf8_lossy).find_map(|v| v.strip_prefix(&start).map(str::to_owned))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn seen(res: Res, fields: &Value) -> Rc<Seen> {
        let object = json!({"metadata": {"name": "a", "managedFields": fields}});
        Seen::read(res, 1, object.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn who_wrote_is_read_from_the_fields_managers() {
        let by = |manager: &str, time: u32| json!({"manager": manager, "time": time});
        let before = seen(Res::Vmi, &json!([by("virtfold-controller", 1)]));
        let meddled = seen(Res::Vmi, &json!([by("virtfold-controller", 1), by("kubectl", 2)]));
        assert_eq!(author(Some(&before), &meddled), Author::Other);
        let written = seen(Res::Vmi, &json!([by("virtfold-controller", 2), by("kubectl", 2)]));
        assert_eq!(author(Some(&meddled), &written), Author::Controller);
        let agent = seen(Res::Vmi, &json!([by("virtfold-controller", 2), by("virtfold-node-agent", 3)]));
        assert_eq!(author(Some(&written), &agent), Author::Agent);
        // The same fields within one second: nobody else can be told from the owner.
        assert_eq!(author(Some(&written), &written), Author::Controller);
        let vm = |strategy: &str| {
            let fields = json!([by("virtfold-controller", 2), by("virtfold-gateway", 3)]);
            let object = json!({"metadata": {"name": "a", "managedFields": fields}, "spec": {"runStrategy": strategy}});
            Seen::read(Res::Vm, 1, object.to_string().as_bytes()).unwrap()
        };
        assert_eq!(author(Some(&vm("Halted")), &vm("Always")), Author::Other, "a stop and a start within one second");
        assert_eq!(author(Some(&vm("Always")), &vm("Always")), Author::Controller);
        let pod = seen(Res::Pod, &json!([by("virtfold-controller", 1)]));
        assert_eq!(author(Some(&pod), &pod), Author::Other);
    }

    #[test]
    fn what_a_person_deletes_was_not_deleted_by_a_controller() {
        let store = Store { endpoint: String::new(), foreign: false, told: None };
        let vmi = |deleted: Value| {
            let owner = json!({"kind": "VirtualMachine", "name": "web", "uid": "vm", "controller": true});
            let fields = json!([{"manager": "virtfold-controller", "time": 1}]);
            let meta = json!({"name": "web", "namespace": NS, "uid": "u", "deletionTimestamp": deleted,
                "managedFields": fields, "ownerReferences": [owner]});
            Some(json!({"metadata": meta}).to_string().into())
        };
        let unfounded = |meddled: &str| {
            let mut truth = Truth { meddled: meddled.into(), ..Truth::default() };
            for (revision, deleted) in [(1, Value::Null), (2, json!("2026-01-01T00:00:00Z"))] {
                let key = Res::Vmi.resource().key(NS, "web");
                truth.changed(&store, Change { key, value: vmi(deleted), previous: None, revision });
            }
            truth.ghost.unfounded.len()
        };
        assert_eq!((unfounded("web"), unfounded("other")), (0, 1));
    }

    #[test]
    fn a_guest_that_nobody_stopped_and_one_that_runs_twice_are_seen() {
        let store = Store { endpoint: String::new(), foreign: false, told: None };
        let vmi = |uid: &str| json!({"metadata": {"name": uid, "namespace": NS, "uid": uid}}).to_string();
        let guest = |pid: i32, vmi: &str| Running {
            pid,
            launcher: 1,
            vmi: vmi.into(),
            pod: format!("pod-{pid}"),
            machine: vmi.into(),
            node: "n".into(),
        };
        let mut truth = Truth::default();
        for uid in ["hurt", "left-alone"] {
            let key = Res::Vmi.resource().key(NS, uid);
            truth.changed(&store, Change { key, value: Some(vmi(uid).into()), previous: None, revision: 1 });
        }
        truth.excused.insert("hurt".into());
        truth.ended = vec![guest(7, "hurt"), guest(8, "left-alone")];
        truth.stopped_by_nobody();
        let found: Vec<(&str, bool)> =
            truth.violations.iter().map(|v| (v.check, v.text.contains("left-alone"))).collect();
        assert_eq!(found, [("S17", true)]);
        for pid in [9, 10] {
            let running = Executing { node: "n".into(), pod: format!("pod-{pid}"), machine: "default/hurt".into() };
            truth.ghost.executes("hurt", running);
        }
        truth.judge();
        assert!(truth.violations.iter().any(|v| v.check == "S1"), "{:?}", truth.violations);
    }
}
