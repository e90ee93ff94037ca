//! What really happened: told by the world that it happens in (the model world, or the simulated network), never read from
//! the control plane, and read by the invariants alone.

use super::{
    World,
    api::Proc,
    node::Order,
    server::{Commit, Res, Seen},
    users::NS,
};
use embedded::semantics::value::{at, finalizers, items};
use serde_json::Value;
use state::{
    Epoch, NodeName, PodUid,
    agent::{Hello, vmi::Stage},
    domain::InstructKind,
    object::{Kind, ObjectRef},
    observe::Phase,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

/// A domain whose vCPUs run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Executing {
    /// Node.
    pub node: String,
    /// Pod.
    pub pod: String,
    /// Machine, by namespace and name.
    pub machine: String,
}

/// On whose behalf something is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Author {
    /// A controller.
    Controller,
    /// A node's agent.
    Agent,
    /// The cluster, or people.
    Other,
}

/// What really happened.
#[derive(Debug, Clone, Default)]
pub struct Ghost {
    /// Domains that run, by the VMI's UID.
    pub executing: BTreeMap<String, Vec<Executing>>,
    /// Domains that ever began, by the VMI's UID.
    pub starts: BTreeMap<String, u32>,
    /// Launcher pods that are there, by the VMI's UID.
    pub standing: BTreeMap<String, BTreeSet<String>>,
    /// Pods that a VMI ever authorised, by its UID.
    pub authorised: BTreeMap<String, BTreeSet<String>>,
    /// Launcher pods that ever were, by the VMI's UID.
    pub pods: BTreeMap<String, BTreeSet<String>>,
    /// Pods whose object was removed while their domain was there, or whose node is out of service: declared dead by somebody.
    pub declared: BTreeSet<String>,
    /// How often a launcher began an instruction, by process and id.
    pub begun: BTreeMap<(String, String), u32>,
    /// Pods whose launcher was told to start a domain.
    pub told_to_start: BTreeSet<String>,
    /// Epochs in the order in which they were acquired.
    pub epochs: Vec<Epoch>,
    /// Highest epoch that a node accepted.
    pub accepted: BTreeMap<String, Epoch>,
    /// Two that believed to lead at once.
    pub rivals: Vec<String>,
    /// Instructions of a leader that was none any more.
    pub disobeyed: Vec<String>,
    /// Phases of a VMI in order.
    pub phases: BTreeMap<String, Vec<Phase>>,
    /// Machines that were stopped and not started again: version of the stop and the instance that it was for.
    pub stops: BTreeMap<String, (u64, String)>,
    /// Instances that were stopped by their users.
    pub stopped: BTreeSet<String>,
    /// Starts after a stop, and stops counted as failures.
    pub overridden: Vec<String>,
    /// Destructive acts without a reason.
    pub unfounded: Vec<String>,
    /// Domains that began without authority.
    pub unauthorised: Vec<String>,
    /// Sets that made more than anybody ever wanted.
    pub surplus: Vec<String>,
    /// Instances that are called ended and run.
    pub alive: Vec<String>,
    /// Guests that were stopped by nobody's wish.
    pub killed: Vec<String>,
    /// Fields that were written by one that does not own them.
    pub trespasses: Vec<String>,
    /// Numbers that went back.
    pub backwards: Vec<String>,
    /// Specs that a controller changed.
    pub respecified: Vec<String>,
    /// When an instance or a pod was first seen to be on its way out, by UID, in milliseconds.
    pub leaving: BTreeMap<String, u64>,
    /// Guests that were killed before their time.
    pub hurried: Vec<String>,
    /// Calls of controllers about one object in the present minute.
    pub asked: BTreeMap<String, (u64, u32)>,
    /// When instances of a machine ended that never ran, by the machine's UID, in milliseconds.
    pub failed_starts: BTreeMap<String, Vec<u64>>,
    /// Objects that a controller asked for, or started, again and again.
    pub pestered: Vec<String>,
    /// Steps that a replay of what was recorded takes otherwise.
    pub unrepeatable: Vec<String>,
    /// What was recorded and must not be.
    pub leaked: Vec<String>,
    /// Bytes that were recorded.
    pub recorded: u64,
    /// The version at which a controller last read all instances live, zero where none did.
    pub surveyed: u64,
    /// All objects that are there, by UID.
    pub present: BTreeMap<String, Rc<Seen>>,
    /// All versions of machines and instances, by UID.
    pub history: BTreeMap<String, Vec<Rc<Seen>>>,
    /// Writes of controllers by verb and kind.
    pub writes: BTreeMap<String, u32>,
    /// Patches by kind and reason.
    pub whys: BTreeMap<String, u32>,
    /// Events for people by reason.
    pub notes: BTreeMap<String, u32>,
    /// Writes of controllers that were conflicts, or invalid; of no Lease.
    pub conflicts: u64,
    /// Calls that were refused.
    pub refused: u64,
    /// When something that is no Lease was last written.
    pub last_write: u64,
    /// When something that is no Lease was last asked or written by a call.
    pub last_call: u64,
    /// Something changed that an invariant reads.
    pub dirty: bool,
}

impl Ghost {
    /// A controller acquired the Lease.
    pub fn acquired(&mut self, epoch: Epoch) {
        self.epochs.push(epoch);
        self.dirty = true;
    }

    /// Domains of a machine that run.
    pub fn of_machine<'a>(&'a self, machine: &'a str) -> impl Iterator<Item = (&'a String, &'a Executing)> {
        self.executing
            .iter()
            .flat_map(|(v, all)| all.iter().map(move |e| (v, e)))
            .filter(move |(_, e)| e.machine == machine)
    }

    /// Whether a version of this object was like that.
    pub(super) fn was(&self, uid: &str, since: u64, like: impl Fn(&Seen) -> bool) -> bool {
        let versions = self.history.get(uid).map(Vec::as_slice).unwrap_or_default();
        // The version that was current at `since` counts too.
        let from = versions.partition_point(|v| v.revision <= since).saturating_sub(1);
        versions.get(from..).unwrap_or_default().iter().any(|v| like(v))
    }
}

/// Failed starts of one machine within a minute that are too many: with its back-off there are three, and people start it, too.
const FAILED_STARTS: usize = 12;

fn is_final(vmi: &Seen) -> bool {
    Phase::parse(vmi.text("/status/phase")).is_final()
}

impl Ghost {
    /// The object of that name that is there.
    pub fn find(&self, res: Res, namespace: &str, name: &str) -> Option<&Rc<Seen>> {
        self.all(res).find(|o| o.namespace() == namespace && o.name() == name)
    }

    /// All objects of a kind that are there.
    pub fn all(&self, res: Res) -> impl Iterator<Item = &Rc<Seen>> {
        self.present.values().filter(move |o| o.res == res)
    }

    /// The phases of each instance in words, in the order in which they were made.
    pub fn lives(&self) -> Vec<String> {
        let mut all: Vec<(u64, String)> = self
            .phases
            .iter()
            .map(|(uid, phases)| {
                let made = self.history.get(uid).and_then(|h| h.first()).map_or(0, |v| v.revision);
                (made, phases.iter().map(|p| format!("{p:?}")).collect::<Vec<_>>().join(" "))
            })
            .collect();
        all.sort();
        all.into_iter().map(|(_, life)| life).collect()
    }

    fn exists(&self, uid: &str) -> bool {
        self.present.contains_key(uid)
    }

    /// Something was written, at this time (milliseconds), by a controller or by somebody else.
    pub fn committed(&mut self, commit: &Commit, at: u64, by: Author) {
        let now = &commit.now;
        let by_controller = by == Author::Controller;
        self.judge_write(commit, by);
        if now.deleting() && matches!(now.res, Res::Vmi | Res::Pod) {
            self.leaving.entry(now.uid().to_owned()).or_insert(at);
        }
        let uid = now.uid().to_owned();
        self.dirty = true;
        if commit.gone {
            self.present.remove(&uid);
        } else {
            self.present.insert(uid.clone(), now.clone());
        }
        if now.res != Res::Lease {
            self.last_write = at;
        }
        match now.res {
            Res::Vm | Res::Vmi | Res::Set => self.history.entry(uid.clone()).or_default().push(now.clone()),
            Res::Pod | Res::Revision | Res::Claim | Res::Node | Res::Lease | Res::Pattern(_) => {}
        }
        match now.res {
            Res::Vmi if !commit.gone => {
                if commit.before.is_none() && by_controller {
                    self.makes_member(now);
                }
                let active = now.value.pointer("/status/activePods").and_then(Value::as_object);
                if let Some(pods) = active {
                    self.authorised.entry(uid.clone()).or_default().extend(pods.keys().cloned());
                }
                let phase = Phase::parse(now.text("/status/phase"));
                let phases = self.phases.entry(uid.clone()).or_default();
                let was = phases.last().copied();
                if was != Some(phase) {
                    phases.push(phase);
                }
                let failed = !phases.contains(&Phase::Running) && !now.deleting();
                if phase.is_final() && was.is_none_or(|w| !w.is_final()) && by_controller {
                    self.said_to_end(now);
                    if failed {
                        self.fails_to_start(now, at);
                    }
                }
                let kept = |o: &Seen| finalizers(&o.value).iter().any(|f| f == api::names::FINALIZER_VMI);
                if by_controller && now.deleting() && commit.before.as_ref().is_some_and(|b| !b.deleting()) {
                    self.hits(now);
                }
                if by_controller && commit.before.as_ref().is_some_and(|b| kept(b)) && !kept(now) {
                    self.let_go(&uid);
                }
            }
            Res::Vmi => self.let_go(&uid),
            Res::Pod => {
                let vmi = now.owner().map(|(_, _, u)| u.to_owned()).unwrap_or_default();
                self.pods.entry(vmi.clone()).or_default().insert(uid.clone());
                let standing = self.standing.entry(vmi).or_default();
                if commit.gone {
                    standing.remove(&uid);
                } else {
                    standing.insert(uid.clone());
                }
                // Also one that is just about to run its vCPUs.
                if commit.gone && self.told_to_start.contains(&uid) {
                    self.declared.insert(uid);
                }
            }
            Res::Node => {
                let fenced = now.node().is_some_and(|v| v.out_of_service && v.ready != Some(true));
                if fenced {
                    let runs = self.executing.values().flatten().filter(|e| e.node == now.name());
                    self.declared.extend(runs.map(|e| e.pod.clone()).collect::<Vec<_>>());
                }
            }
            Res::Vm => {
                let counted = now.text("/status/startFailure/lastFailedVMIUID");
                let before = commit.before.as_ref().map_or("", |b| b.text("/status/startFailure/lastFailedVMIUID"));
                // One that failed by itself before its deletion began has failed, stopped or not.
                let recalled = self.history.get(counted).into_iter().flatten();
                let recalled = recalled.skip_while(|v| !is_final(v)).map(|v| v.deleting()).next().unwrap_or(false);
                if counted != before && recalled && self.stopped.contains(counted) {
                    let text = format!("the stop of instance {counted} is counted as a failed start of {}", now.name());
                    self.overridden.push(text);
                }
            }
            Res::Set | Res::Revision | Res::Claim | Res::Lease | Res::Pattern(_) => {}
        }
    }

    /// Who wrote what, and whether a number went back.
    fn judge_write(&mut self, commit: &Commit, by: Author) {
        let (Some(before), now) = (&commit.before, &commit.now) else { return };
        if commit.gone {
            return;
        }
        let differs = |pointer: &str, without: &[&str]| {
            // The first write of a status brings defaults along.
            let Some(a) = at(&before.value, pointer).filter(|a| !a.is_null()) else { return false };
            match (a, at(&now.value, pointer)) {
                (Value::Object(a), Some(Value::Object(b))) => {
                    let kept = |(k, _): &(&String, &Value)| !without.contains(&k.as_str());
                    !a.iter().filter(kept).eq(b.iter().filter(kept))
                }
                (a, b) => Some(a) != b,
            }
        };
        let wrong = match (now.res, by) {
            (Res::Vm, Author::Other) => differs("/status", &["stateChangeRequests", "startFailure"]),
            (Res::Vmi | Res::Set, Author::Other) => differs("/status", &["evacuationNodeName"]),
            (Res::Pod | Res::Node, Author::Controller) => differs("/status", &[]),
            (Res::Pod, Author::Agent) => differs("/status", &["conditions"]) || differs("/spec", &[]),
            (Res::Vm | Res::Vmi | Res::Set | Res::Revision | Res::Claim, Author::Agent) => true,
            _ => false,
        };
        if wrong {
            self.trespasses.push(format!("{by:?} changed what others own of {:?} {}", now.res, now.name()));
        }
        let started = !items(&before.value, "/status/stateChangeRequests").is_empty();
        if now.res == Res::Vm && by == Author::Controller && !started && differs("/spec", &[]) {
            self.respecified.push(format!("a controller changed the spec of machine {}", now.name()));
        }
        let number = |o: &Seen, pointer: &str| o.value.pointer(pointer).and_then(Value::as_u64);
        // (The observed generation is that of the instance that is seen, which may be an orphan's.)
        for pointer in ["/metadata/generation", "/status/desiredGeneration"] {
            if let (Some(a), Some(b)) = (number(before, pointer), number(now, pointer))
                && b < a
            {
                self.backwards.push(format!("{pointer} of {:?} {} went from {a} to {b}", now.res, now.name()));
            }
        }
        let stamps = |o: &Seen| items(&o.value, "/status/phaseTransitionTimestamps").len();
        if now.res == Res::Vmi && stamps(now) < stamps(before) {
            self.backwards.push(format!("instance {} forgot phases that it had", now.uid()));
        }
    }

    /// A guest is killed because its grace is over, at this time.
    pub fn grace_is_over(&mut self, vmi: &str, pod: &str, at: u64) {
        let grace = |uid: &str| {
            let seconds = |v: &Rc<Seen>| v.value.pointer("/spec/terminationGracePeriodSeconds").and_then(Value::as_u64);
            let versions = self.history.get(uid).cloned().or_else(|| self.present.get(uid).map(|p| vec![p.clone()]));
            versions.into_iter().flatten().filter_map(|v| seconds(&v)).min().map(|s| s * 1000)
        };
        let due = |uid: &str| Some(self.leaving.get(uid)? + grace(uid)?);
        let pod_is_gone = !self.present.contains_key(pod);
        let due = due(vmi).into_iter().chain(due(pod)).min();
        if !pod_is_gone && due.is_none_or(|due| at < due) {
            self.hurried.push(format!("the guest of {vmi} is killed at {at}, and has until {due:?}"));
        }
        self.dirty = true;
    }

    /// A controller asks the API server about one object.
    pub fn asks(&mut self, object: &str, at: u64, most: u32) {
        let minute = at / 60_000;
        let entry = self.asked.entry(object.to_owned()).or_insert((minute, 0));
        *entry = if entry.0 == minute { (minute, entry.1 + 1) } else { (minute, 1) };
        if entry.1 == most {
            self.pestered.push(format!("{object} was asked for {most} times within a minute"));
            self.dirty = true;
        }
    }

    /// An instance of a machine ended and had never run; its machine is to be started ever less often.
    fn fails_to_start(&mut self, vmi: &Rc<Seen>, at: u64) {
        let Some((kind, name, machine)) = vmi.owner() else { return };
        if kind != Kind::VirtualMachine.name() {
            return;
        }
        let all = self.failed_starts.entry(machine.to_owned()).or_default();
        all.push(at);
        let lately = all.iter().filter(|t| **t + 60_000 > at).count();
        if lately > FAILED_STARTS {
            self.pestered.push(format!("machine {name} failed to start {lately} times within a minute"));
        }
    }

    /// A controller says that an instance has ended.
    fn said_to_end(&mut self, vmi: &Rc<Seen>) {
        let runs = self.executing.get(vmi.uid()).into_iter().flatten();
        let undeclared: Vec<String> = runs.filter(|e| !self.declared.contains(&e.pod)).map(|e| e.pod.clone()).collect();
        for pod in undeclared {
            let reason = vmi.text("/status/reason");
            let text =
                format!("instance {} is {} ({reason}), and pod {pod} runs it", vmi.uid(), vmi.text("/status/phase"));
            self.alive.push(text);
        }
        if vmi.text("/status/reason") == "PodRemoved" {
            let active: Vec<String> = vmi
                .value
                .pointer("/status/activePods")
                .and_then(Value::as_object)
                .into_iter()
                .flat_map(|m| m.keys().cloned())
                .collect();
            for pod in active {
                if self.exists(&pod) {
                    self.unfounded.push(format!("instance {} failed as if its pod {pod} were gone", vmi.uid()));
                }
            }
        }
    }

    /// The finalizer of an instance came off.
    fn let_go(&mut self, vmi: &str) {
        let runs: Vec<String> = self.executing.get(vmi).into_iter().flatten().map(|e| e.pod.clone()).collect();
        for pod in runs {
            if !self.declared.contains(&pod) && self.exists(&pod) {
                self.unfounded.push(format!("instance {vmi} was let go while pod {pod} runs it"));
            }
        }
    }

    /// A controller's deletion has hit this instance, whichever it was meant for. (Those of sets are judged when they are sent: by
    /// now there may be fewer.)
    fn hits(&mut self, vmi: &Rc<Seen>) {
        if vmi.owner().is_some_and(|(kind, ..)| kind == Kind::VirtualMachine.name()) {
            self.deletes(&ObjectRef {
                kind: Kind::VirtualMachineInstance,
                namespace: vmi.namespace().into(),
                name: vmi.name().into(),
                uid: vmi.uid().into(),
            });
        }
    }

    /// A controller is about to delete something.
    pub fn deletes(&mut self, target: &ObjectRef) {
        self.dirty = true;
        match target.kind {
            Kind::VirtualMachineInstance => {
                let uid = target.uid.as_str();
                let Some(vmi) = self.history.get(uid).and_then(|h| h.last()).cloned() else { return };
                let Some((kind, _, vm)) = vmi.owner() else { return };
                if kind == Kind::VirtualMachineInstanceReplicaSet.name() {
                    return self.deletes_member(&vmi, vm);
                }
                let own = self.was(uid, 0, is_final);
                let wish = |vm: &Seen| {
                    vm.deleting()
                        || vm.text("/spec/runStrategy") == "Halted"
                        || items(&vm.value, "/status/stateChangeRequests")
                            .iter()
                            .any(|r| r["action"] == "Stop" && r["uid"] == uid)
                };
                // A machine that knew of this instance: older wishes were about older ones.
                let since = self.history.get(uid).and_then(|h| h.first()).map_or(0, |v| v.revision);
                if !own && !self.was(vm, since, wish) {
                    self.unfounded.push(format!("instance {uid} is deleted for no reason that anybody can see"));
                }
            }
            Kind::Pod => {
                let uid = target.uid.0.clone();
                let owner = self.pods.iter().find(|(_, p)| p.contains(&uid)).map(|(v, _)| v.clone());
                let Some(vmi) = owner else { return };
                if !self.was(&vmi, 0, Seen::deleting) && self.exists(&vmi) {
                    self.unfounded.push(format!("pod {uid} is deleted for no reason that anybody can see"));
                }
            }
            Kind::VirtualMachine
            | Kind::VirtualMachineInstanceReplicaSet
            | Kind::ControllerRevision
            | Kind::PersistentVolumeClaim
            | Kind::Pattern(_)
            | Kind::Node => {}
        }
    }

    /// A controller is about to make an instance from this version of its machine.
    pub fn creates_from(&mut self, vm: &str, from: u64) {
        if let Some((at, _)) = self.stops.get(vm)
            && *at < from
        {
            let text = format!("machine {vm} was stopped at {at} and is started by itself from version {from}");
            self.overridden.push(text);
            self.dirty = true;
        }
    }

    /// Somebody starts this machine.
    pub fn started(&mut self, vm: &str) {
        self.stops.remove(vm);
    }

    /// Somebody stops this machine, at this version of the store; the instance that it had.
    pub fn stopped(&mut self, vm: &str, revision: u64, vmi: Option<&str>) {
        // An instance that an older machine of that name left behind is not this machine's.
        let own = |uid: &str| {
            let seen = self.history.get(uid).and_then(|h| h.last());
            seen.and_then(|v| v.owner()).is_some_and(|(_, _, owner)| owner == vm)
        };
        if vmi.is_some_and(|uid| !own(uid)) {
            return;
        }
        let vmi = vmi.unwrap_or_default().to_owned();
        if !vmi.is_empty() {
            self.stopped.insert(vmi.clone());
        }
        self.stops.insert(vm.to_owned(), (revision, vmi));
    }

    /// An agent accepted this epoch, of one that holds the Lease or does not.
    pub fn admitted(&mut self, node: &str, epoch: Epoch, holds: bool) {
        let highest = self.accepted.get(node).copied().unwrap_or_default();
        if epoch < highest && !holds {
            let text =
                format!("node {node} accepted epoch {epoch} after {highest}, of one that does not hold the Lease");
            self.disobeyed.push(text);
        }
        self.accepted.insert(node.to_owned(), highest.max(epoch));
        self.dirty = true;
    }

    /// A launcher begins to carry out an instruction.
    pub fn begins(&mut self, node: &NodeName, pod: &PodUid, launcher: &str, i: &Begun<'_>) {
        *self.begun.entry((launcher.to_owned(), i.id.to_owned())).or_default() += 1;
        self.dirty = true;
        let uid = i.vmi;
        match i.kind {
            InstructKind::Start => {
                self.told_to_start.insert(pod.0.clone());
                let versions = self.history.get(uid).map(Vec::as_slice).unwrap_or_default();
                let with = versions.iter().find(|v| v.revision == i.version);
                let granted = with.and_then(|v| v.facts()).is_some_and(|f| f.authorises(pod, node).is_ok());
                if !granted {
                    let text = format!("pod {pod} begins to run {uid}, whose version {} does not say so", i.version);
                    self.unauthorised.push(text);
                }
            }
            InstructKind::Shutdown | InstructKind::Kill => {
                let disowned = |v: &Seen| v.facts().is_some_and(|f| f.stage == Stage::Final || f.disowns(pod));
                let wanted = self.was(uid, 0, |v| v.deleting() || disowned(v)) || !self.exists(uid);
                if !wanted {
                    self.killed.push(format!("the guest of {uid} is told to stop, and nobody wants that"));
                }
            }
            InstructKind::Pause | InstructKind::Resume => {}
        }
    }

    /// The vCPUs of a domain run.
    pub fn executes(&mut self, vmi: &str, running: Executing) {
        *self.starts.entry(vmi.to_owned()).or_default() += 1;
        self.executing.entry(vmi.to_owned()).or_default().push(running);
        self.dirty = true;
    }

    /// A domain runs no more.
    pub fn ended(&mut self, node: &str, pod: &str) {
        for all in self.executing.values_mut() {
            all.retain(|e| !(e.node == node && e.pod == pod));
        }
        self.executing.retain(|_, all| !all.is_empty());
        self.dirty = true;
    }

    /// The runtime tells a launcher with a guest to end.
    pub fn terminated(&mut self, pod: &str) {
        if self.present.get(pod).is_some_and(|p| !p.deleting()) {
            self.killed.push(format!("pod {pod} is ended, and nobody deleted it"));
        }
        self.dirty = true;
    }
}

/// An instruction that a launcher begins to carry out.
#[derive(Debug, Clone, Copy)]
pub struct Begun<'a> {
    /// Its id.
    pub id: &'a str,
    /// What for.
    pub kind: InstructKind,
    /// The instance.
    pub vmi: &'a str,
    /// The version of the instance that came with it.
    pub version: u64,
}

/// How the model world tells.
impl World {
    pub(super) fn observe_commit(&mut self, commit: &Commit, by: Option<Proc>) {
        let author = match by {
            Some(Proc::Controller(..)) => Author::Controller,
            Some(Proc::Agent(..)) => Author::Agent,
            None => Author::Other,
        };
        self.ghost.committed(commit, self.now, author);
    }

    pub(super) fn observe_delete(&mut self, target: &ObjectRef) {
        self.ghost.deletes(target);
    }

    pub(super) fn observe_creation(&mut self, vm: &str, from: u64) {
        self.ghost.creates_from(vm, from);
    }

    pub(super) fn observe_start(&mut self, name: &str) {
        if let Some(vm) = self.server.get(Res::Vm, NS, name) {
            self.ghost.started(vm.uid());
        }
    }

    pub(super) fn observe_stop(&mut self, name: &str, vmi: Option<&str>) {
        if let Some(vm) = self.server.get(Res::Vm, NS, name) {
            self.ghost.stopped(vm.uid(), self.server.revision(), vmi);
        }
    }

    pub(super) fn observe_admission(&mut self, n: usize, hello: &Hello) {
        let (ns, name) = super::controller::LEASE_NAME;
        let lease = self.server.get(Res::Lease, ns, name);
        let holds = lease.is_some_and(|l| l.text("/spec/holderIdentity") == hello.leader.as_str());
        self.ghost.admitted(self.nodes[n].name.as_str(), hello.epoch, holds);
    }

    pub(super) fn observe_begin(&mut self, n: usize, pod: &PodUid, instance: &str, order: &Order) {
        let i = &order.instruction;
        let begun = Begun { id: &i.id.0, kind: i.kind, vmi: i.vmi.as_str(), version: order.vmi_rv.0 };
        self.ghost.begins(&self.nodes[n].name, pod, instance, &begun);
    }

    pub(super) fn observe_executing(&mut self, n: usize, pod: &PodUid) {
        let Some(local) = self.nodes[n].pods.get(pod) else { return };
        let machine = format!("{}/{}", local.namespace, local.vmi_name);
        let vmi = local.vmi.clone();
        self.say(|| format!("a guest of {machine} runs: instance {vmi}, pod {pod}, node {n}"));
        let node = self.nodes[n].name.to_string();
        self.ghost.executes(&vmi, Executing { node, pod: pod.0.clone(), machine });
    }

    pub(super) fn observe_ended(&mut self, n: usize, pod: &PodUid) {
        self.ghost.ended(self.nodes[n].name.as_str(), pod.as_str());
    }

    pub(super) fn observe_terminated(&mut self, pod: &PodUid) {
        self.ghost.terminated(pod.as_str());
    }
}
