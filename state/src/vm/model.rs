//! A small world for tests: an API server, a kubelet and a node agent as plain data, in which events are doubled, held back
//! and overtaken, answers are lost and the controller dies. One generator makes every choice.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use super::*;
use crate::{
    Event, Key, Machine, NodeName, PodUid, ResourceVersion, Timestamp, VmiUid,
    domain::{AckResult, Cause, Domain, DomainState, GuestFacts, InstructKind, Outcome, RefusalReason},
    object::{CommandId, Kind, ObjectRef, Settled},
    observe::{self, Object},
};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// xorshift: enough for choices, the same everywhere.
pub struct Dice(pub u64);
impl Dice {
    pub fn roll(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % n.max(1)
    }
    pub fn chance(&mut self, percent: usize) -> bool {
        self.roll(100) < percent
    }
}

#[derive(Debug, Clone, Default)]
pub struct Launcher {
    pub vmi: String,
    pub starts: u32,
    pub state: Option<DomainState>,
    pub seq: u64,
    pub outcome: Option<Outcome>,
    pub acknowledged: bool,
    pub guest: GuestFacts,
    pub paused_reason: String,
    /// Of a boot before: nobody on the node knows of it.
    pub lost: bool,
}

pub struct World {
    pub now: u64,
    pub rv: u64,
    pub objects: BTreeMap<(Kind, String), Value>,
    pub sights: Vec<Sight>,
    pub reports: Vec<Report>,
    pub flying: Vec<Command>,
    pub settled: Vec<(CommandId, Settled<Object>)>,
    pub launchers: BTreeMap<String, Launcher>,
    pub session: u64,
    pub boot_id: String,
    pub cell: Vm,
    pub wake: Option<u64>,
    pub writes: Vec<String>,
    pub refused: u32,
    /// Live reads.
    pub confirms: u32,
    pub notes: Vec<String>,
    /// The words of the notes.
    pub texts: Vec<String>,
    /// The same in full: kind, reason, message.
    pub said: Vec<String>,
    pub told_interests: BTreeSet<Interest>,
    pub pods_ever: BTreeMap<String, BTreeSet<String>>,
    pub kubelet: bool,
    pub guest_obeys: bool,
    pub agent_up: bool,
    /// What the server answers to a write of this kind instead of carrying it out.
    pub answers: BTreeMap<Kind, Settled<Object>>,
    /// All events, and whether a controller's life began with it.
    pub tape: Vec<(bool, Event<Input>)>,
    fresh: bool,
    /// Phases that VMIs went through.
    pub moves: BTreeSet<(observe::Phase, observe::Phase)>,
    /// After each step, plan once more: nothing may come of it.
    pub plan_twice: bool,
}

pub fn merge(into: &mut Value, patch: &Value) {
    let Value::Object(p) = patch else {
        *into = patch.clone();
        return;
    };
    if !into.is_object() {
        *into = json!({});
    }
    for (k, v) in p {
        if v.is_null() {
            into.as_object_mut().unwrap().remove(k);
        } else {
            merge(&mut into[k], v);
        }
    }
}

pub fn vm(strategy: &str) -> Value {
    json!({
        "metadata": {"name": "web", "namespace": "ns", "uid": "vm-1", "generation": 1,
            "creationTimestamp": "1970-01-01T00:00:00Z", "finalizers": [api::names::FINALIZER_VM],
            "annotations": {"virtfold.io/traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}},
        "spec": {"runStrategy": strategy, "template": {"spec": {
            "domain": {"memory": {"guest": "64Mi"}, "devices": {}}, "terminationGracePeriodSeconds": 5}}},
    })
}

/// The legal steps of a VMI's life, whatever happens in whatever order; each phase is recorded once, those that were too short
/// to be written on their own included.
fn check_phases(before: Option<&Value>, after: &Value) {
    let phase = |o: &Value| observe::Phase::parse(o["status"]["phase"].as_str().unwrap_or_default());
    let to = phase(after);
    if let Some(from) = before.map(phase) {
        use observe::Phase::*;
        let legal: &[observe::Phase] = match from {
            Unset => &[Unset, Pending, Scheduling, Scheduled, Failed],
            Pending => &[Pending, Scheduling, Scheduled, Failed],
            Scheduling => &[Scheduling, Scheduled, Failed],
            Scheduled => &[Scheduled, Running, Succeeded, Failed],
            Running => &[Running, Succeeded, Failed],
            Succeeded => &[Succeeded],
            Failed => &[Failed],
            Unknown => &[Unknown],
        };
        assert!(legal.contains(&to), "{from:?} became {to:?}");
    }
    let recorded = after["status"]["phaseTransitionTimestamps"].as_array().cloned().unwrap_or_default();
    let names: Vec<_> = recorded.iter().map(|t| t["phase"].as_str().unwrap()).collect();
    let times: Vec<_> = recorded.iter().map(|t| t["phaseTransitionTimestamp"].as_str().unwrap()).collect();
    let known = ["Pending", "Scheduling", "Scheduled", "Running"];
    let lived = names.iter().take_while(|n| known.contains(n)).count();
    let first = usize::from(names.first().is_some_and(|n| *n != "Pending"));
    assert!(lived == 0 || names[..lived] == known[first..first + lived], "{names:?}");
    assert!(names.len() <= lived + 1 && times.is_sorted(), "{names:?} {times:?}");
    assert!(to == observe::Phase::Unset || names.last() == Some(&to.name()), "{to:?} is not recorded: {names:?}");
    let authorised = after["status"]["activePods"].as_object().is_some_and(|p| p.len() == 1);
    let was = names.contains(&"Scheduled");
    assert_eq!(was, authorised, "authority goes with Scheduled, and stays: {after:#}");
}

/// A VMI of the machine's name that belongs to nobody.
pub fn bare() -> Value {
    json!({
        "metadata": {"name": "web", "namespace": "ns", "uid": "v1", "finalizers": [api::names::FINALIZER_VMI]},
        "spec": {"domain": {"memory": {"guest": "64Mi"}}}, "status": {},
    })
}

impl Default for World {
    fn default() -> Self {
        Self {
            now: 1000,
            rv: 100,
            objects: BTreeMap::new(),
            sights: vec![],
            reports: vec![],
            flying: vec![],
            settled: vec![],
            launchers: BTreeMap::new(),
            session: 1,
            boot_id: "boot-1".into(),
            cell: Vm::new(Key::new("ns", "web")),
            wake: None,
            writes: vec![],
            refused: 0,
            confirms: 0,
            notes: vec![],
            texts: vec![],
            said: vec![],
            told_interests: BTreeSet::new(),
            pods_ever: BTreeMap::new(),
            kubelet: true,
            guest_obeys: true,
            agent_up: true,
            answers: BTreeMap::new(),
            tape: vec![],
            fresh: true,
            moves: BTreeSet::new(),
            plan_twice: false,
        }
    }
}

impl World {
    /// With a bare VMI.
    pub fn with_bare() -> Self {
        let mut w = Self::default();
        w.put(Kind::VirtualMachineInstance, bare());
        w
    }

    pub fn with(object: Value) -> Self {
        let mut w = Self::default();
        w.put(Kind::VirtualMachine, object);
        w
    }

    pub fn put(&mut self, kind: Kind, mut o: Value) -> Value {
        self.rv += 1;
        o["metadata"]["resourceVersion"] = json!(self.rv.to_string());
        let name = o["metadata"]["name"].as_str().unwrap().to_owned();
        let m = &o["metadata"];
        let over = m.get("deletionTimestamp").is_some()
            && m.get("finalizers").and_then(Value::as_array).is_none_or(Vec::is_empty)
            && kind != Kind::Pod;
        let seen = observe::object(kind, &o).unwrap();
        if kind == Kind::VirtualMachineInstance {
            let before =
                self.objects.get(&(kind, name.clone())).filter(|b| b["metadata"]["uid"] == o["metadata"]["uid"]);
            check_phases(before, &o);
        }
        if let (Object::Vmi(new), Some(old)) = (&seen, self.objects.get(&(kind, name.clone())))
            && let Some(Object::Vmi(old)) = observe::object(kind, old)
            && old.meta.uid == new.meta.uid
            && old.phase != new.phase
        {
            self.moves.insert((old.phase, new.phase));
        }
        if over {
            self.objects.remove(&(kind, name));
            self.sights.push(Sight::Gone(seen.reference()));
            self.collect(o["metadata"]["uid"].as_str().unwrap());
        } else {
            self.objects.insert((kind, name), o.clone());
            self.sights.push(Sight::Present(seen));
        }
        o
    }

    /// Garbage collection by owner.
    fn collect(&mut self, owner: &str) {
        let owned: Vec<_> = self
            .objects
            .iter()
            .filter(|(_, o)| o["metadata"]["ownerReferences"][0]["uid"] == owner)
            .map(|(k, o)| (k.clone(), o.clone()))
            .collect();
        for ((kind, _), mut o) in owned {
            if o["metadata"].get("deletionTimestamp").is_none() {
                o["metadata"]["deletionTimestamp"] = json!("1970-01-01T00:10:00Z");
                self.put(kind, o);
            }
        }
    }

    pub fn get(&self, kind: Kind) -> Option<&Value> {
        self.objects.iter().find(|((k, _), _)| *k == kind).map(|(_, o)| o)
    }

    pub fn edit(&mut self, kind: Kind, patch: Value) {
        let mut o = self.get(kind).unwrap().clone();
        merge(&mut o, &patch);
        self.put(kind, o);
    }

    /// A user changes the VM's spec.
    pub fn edit_spec(&mut self, spec: Value) {
        let generation = self.get(Kind::VirtualMachine).unwrap()["metadata"]["generation"].as_i64().unwrap_or(0);
        self.edit(Kind::VirtualMachine, json!({"metadata": {"generation": generation + 1}, "spec": spec}));
    }

    /// The requests of a restart of the VMI that is there.
    pub fn restart_request(&self) -> Value {
        let uid = self.get(Kind::VirtualMachineInstance).unwrap()["metadata"]["uid"].clone();
        json!([{"action": "Stop", "uid": uid}, {"action": "Start"}])
    }

    pub fn phase(&self) -> String {
        self.get(Kind::VirtualMachineInstance)
            .map_or(String::new(), |v| v["status"]["phase"].as_str().unwrap_or("").into())
    }

    pub fn printable(&self) -> String {
        self.get(Kind::VirtualMachine)
            .map_or(String::new(), |v| v["status"]["printableStatus"].as_str().unwrap_or("").into())
    }

    pub fn feed(&mut self, input: Input) {
        let event = Event::new(Timestamp(self.now), input);
        self.tape.push((std::mem::take(&mut self.fresh), event.clone()));
        // With a deadline that has passed, anything may be the reason for which it is noticed.
        let due = self.cell.armed.is_some_and(|t| t.0 <= self.now);
        let known = self.cell.knows(&event.input) && !due;
        let out = self.cell.step(&event);
        assert!(!known || out.is_empty(), "known already, and yet: {out:?}");
        if self.plan_twice {
            let again = self.cell.clone().step(&Event::new(Timestamp(self.now), Input::Elapsed));
            let news: Vec<_> = again.iter().filter(|c| !matches!(c, Command::Wake { .. })).collect();
            assert!(news.is_empty(), "planned twice: {news:?}");
        }
        for c in out {
            match c {
                Command::Wake { at } => self.wake = Some(at.0),
                Command::Note(n) => {
                    self.said.push(format!("{}: {}: {}", n.about.kind.name(), n.reason, n.message));
                    self.notes.push(n.reason);
                    self.texts.push(n.message);
                }
                c @ (Command::Create { .. }
                | Command::Patch { .. }
                | Command::Delete { .. }
                | Command::Confirm { .. }
                | Command::Survey { .. }
                | Command::Instruct { .. }) => self.flying.push(c),
            }
        }
        let wants = self.cell.interests();
        for i in wants.difference(&self.told_interests.clone()).cloned() {
            self.told_interests.insert(i.clone());
            match i {
                Interest::Claim(name) => {
                    let sight = match self.objects.get(&(Kind::PersistentVolumeClaim, name.clone())) {
                        Some(o) => Sight::Present(observe::object(Kind::PersistentVolumeClaim, o).unwrap()),
                        None => Sight::Gone(ObjectRef {
                            kind: Kind::PersistentVolumeClaim,
                            namespace: "ns".into(),
                            name,
                            uid: Default::default(),
                        }),
                    };
                    self.feed(Input::Observed(sight));
                }
                Interest::Node(node) => {
                    self.feed(Input::Configured(Fact::Node(NodeFact {
                        node: node.clone(),
                        ready: true,
                        session: self.agent_up.then_some(self.session),
                        silent_since: (!self.agent_up).then_some(Timestamp(self.now)),
                        fenced: None,
                        gone: false,
                    })));
                    self.inventory(node);
                }
            }
        }
    }

    fn inventory(&mut self, node: NodeName) {
        if !self.agent_up {
            return;
        }
        for (pod, l) in self.launchers.clone() {
            if l.lost {
                continue;
            }
            if let Some(o) = l.outcome.filter(|_| !l.acknowledged) {
                self.reports.push(Report::Outcome { node: node.clone(), outcome: o });
            }
            self.reports.push(self.domain(&pod));
        }
        let session = self.session;
        let (reflector_rv, boot_id) = (ResourceVersion(self.rv), self.boot_id.clone());
        self.reports.push(Report::Inventory { node, session, complete: true, reflector_rv, boot_id });
    }

    fn domain(&self, pod: &str) -> Report {
        let l = &self.launchers[pod];
        Report::Domain {
            node: "n1".into(),
            domain: Arc::new(Domain {
                vmi: VmiUid(l.vmi.clone()),
                pod: pod.into(),
                launcher: "l".into(),
                seq: l.seq,
                state: l.state.unwrap_or(DomainState::Absent),
                since: Timestamp(self.now),
                guest: l.guest.clone(),
                paused_reason: l.paused_reason.clone(),
                accelerator: "tcg".into(),
            }),
        }
    }

    /// The launcher of the pod says something new about its domain.
    pub fn say(&mut self, pod: &str, change: impl FnOnce(&mut Launcher)) {
        let l = self.launchers.get_mut(pod).unwrap();
        l.seq += 1;
        change(l);
        let d = self.domain(pod);
        self.reports.push(d);
    }

    /// The agent of the node connects (anew), in whatever boot the node is.
    pub fn connect(&mut self) {
        self.agent_up = true;
        self.session += 1;
        self.feed(Input::Configured(Fact::Node(NodeFact {
            node: "n1".into(),
            ready: true,
            session: Some(self.session),
            silent_since: None,
            fenced: None,
            gone: false,
        })));
        self.inventory("n1".into());
    }

    /// Carries out one command, as an API server or an agent would.
    pub fn carry_out(&mut self, c: Command) -> Option<(CommandId, Settled<Object>)> {
        let id = c.id()?;
        let written = match &c {
            Command::Create { target, .. } | Command::Delete { target, .. } => Some(target.kind),
            Command::Patch { patch, .. } => Some(patch.target.kind),
            Command::Confirm { .. }
            | Command::Survey { .. }
            | Command::Instruct { .. }
            | Command::Note(_)
            | Command::Wake { .. } => None,
        };
        if let Some(answer) = written.and_then(|k| self.answers.get(&k)) {
            return Some((id, answer.clone()));
        }
        let result = match c {
            Command::Create { recipe, source, target, .. } => {
                let raw = self.objects.get(&(source.object.kind, source.object.name.clone())).cloned();
                match raw {
                    None => Settled::Gone,
                    Some(r) if r["metadata"]["resourceVersion"] != source.rv.to_string() => Settled::Conflict,
                    Some(_) if self.objects.contains_key(&(target.kind, target.name.clone())) => {
                        self.refused += 1;
                        Settled::Conflict
                    }
                    Some(r) => {
                        let record = |name: &str| self.objects[&(Kind::ControllerRevision, name.to_owned())].clone();
                        let inputs: Vec<_> = recipe.inputs().into_iter().map(|(_, name)| record(name)).collect();
                        let mut o = crate::render::render(&recipe, &source.object, &target, &r, &inputs).unwrap();
                        o["metadata"]["uid"] = json!(format!("{}-{}", target.kind.name(), self.rv));
                        self.writes.push(format!("create {}", target.kind.name()));
                        if target.kind == Kind::Pod {
                            let vmi = r["metadata"]["uid"].as_str().unwrap().to_owned();
                            let pod = o["metadata"]["uid"].as_str().unwrap().to_owned();
                            self.pods_ever.entry(vmi).or_default().insert(pod);
                        }
                        if target.kind == Kind::VirtualMachineInstance {
                            o["metadata"]["generation"] = json!(1);
                        }
                        let o = self.put(target.kind, o);
                        Settled::Applied(observe::object(target.kind, &o))
                    }
                }
            }
            Command::Patch { patch, .. } => {
                let key = (patch.target.kind, patch.target.name.clone());
                match self.objects.get(&key).cloned() {
                    None => Settled::Gone,
                    Some(o)
                        if patch.body["metadata"]["uid"] != o["metadata"]["uid"]
                            || patch.body["metadata"]
                                .get("resourceVersion")
                                .is_some_and(|r| *r != o["metadata"]["resourceVersion"]) =>
                    {
                        self.refused += 1;
                        Settled::Conflict
                    }
                    Some(mut o) => {
                        self.writes.push(format!("patch {} {}", patch.target.kind.name(), patch.why));
                        merge(&mut o, &patch.body);
                        let o = self.put(patch.target.kind, o);
                        Settled::Applied(observe::object(patch.target.kind, &o))
                    }
                }
            }
            Command::Delete { target, .. } => match self.objects.get(&(target.kind, target.name.clone())).cloned() {
                Some(mut o) if target.uid.is_empty() || o["metadata"]["uid"] == target.uid.0 => {
                    self.writes.push(format!("delete {}", target.kind.name()));
                    if o["metadata"].get("deletionTimestamp").is_none() {
                        o["metadata"]["deletionTimestamp"] = json!("1970-01-01T00:10:00Z");
                        o = self.put(target.kind, o);
                    }
                    Settled::Applied(observe::object(target.kind, &o))
                }
                Some(_) => Settled::Conflict,
                None => Settled::Gone,
            },
            Command::Confirm { target, .. } => {
                self.confirms += 1;
                match self.objects.get(&(target.kind, target.name.clone())) {
                    Some(o) => Settled::Applied(observe::object(target.kind, o)),
                    None => Settled::Gone,
                }
            }
            Command::Instruct { order: Order::Acknowledge { pod, .. }, .. } => {
                if let Some(l) = self.launchers.get_mut(pod.as_str()) {
                    l.acknowledged = true;
                }
                Settled::Applied(None)
            }
            Command::Instruct { order: Order::Do(i), .. } => self.instruct(&i),
            Command::Survey { .. } | Command::Note(_) | Command::Wake { .. } => return None,
        };
        Some((id, result))
    }

    fn instruct(&mut self, i: &crate::domain::Instruction) -> Settled<Object> {
        if !self.agent_up {
            return Settled::Unknown;
        }
        let refuse = |reason, rv: u64| {
            Settled::Acked(AckResult::Refused { reason, message: String::new(), rv_seen: ResourceVersion(rv) })
        };
        let vmi = self.get(Kind::VirtualMachineInstance).cloned().unwrap_or_default();
        let authorised = vmi["metadata"]["uid"] == i.vmi.0
            && vmi["metadata"].get("deletionTimestamp").is_none()
            && vmi["status"]["activePods"][i.pod.as_str()] == "n1"
            && ["Scheduled", "Running"].contains(&vmi["status"]["phase"].as_str().unwrap_or(""));
        let rv = self.rv;
        let Some(l) = self.launchers.get_mut(i.pod.as_str()).filter(|l| !l.lost) else {
            return refuse(RefusalReason::Failed, rv);
        };
        match i.kind {
            InstructKind::Start if !authorised => refuse(RefusalReason::Superseded, rv),
            InstructKind::Start => {
                if l.starts == 0 {
                    l.starts += 1;
                    l.seq += 1;
                    l.state = Some(DomainState::Starting);
                }
                Settled::Acked(AckResult::Accepted)
            }
            InstructKind::Shutdown | InstructKind::Kill => {
                let cause = if i.kind == InstructKind::Kill {
                    Cause::Destroyed
                } else if self.guest_obeys {
                    Cause::GuestShutdown
                } else {
                    Cause::KilledAfterGrace
                };
                self.end(i.pod.as_str(), cause);
                Settled::Acked(AckResult::Accepted)
            }
            InstructKind::Pause | InstructKind::Resume => refuse(RefusalReason::Unsupported, rv),
        }
    }

    /// The domain of a launcher ends, and the launcher with it.
    pub fn end(&mut self, pod: &str, cause: Cause) {
        self.end_with(pod, cause, "");
    }

    /// The same, with the launcher's words.
    pub fn end_with(&mut self, pod: &str, cause: Cause, message: &str) {
        let now = self.now;
        let Some(l) = self.launchers.get_mut(pod) else { return };
        if l.outcome.is_some() || l.starts == 0 || l.lost {
            return;
        }
        l.seq += 1;
        l.state = Some(DomainState::Stopped);
        let outcome = Outcome {
            vmi: VmiUid(l.vmi.clone()),
            pod: PodUid(pod.into()),
            cause,
            exit: 0,
            seq: l.seq,
            message: message.into(),
            at: Timestamp(now),
        };
        l.outcome = Some(outcome.clone());
        if self.agent_up {
            self.reports.push(Report::Outcome { node: "n1".into(), outcome });
            let d = self.domain(pod);
            self.reports.push(d);
        }
    }

    /// Kubelet and agent do one thing with the pod. Tells whether there was something to do.
    pub fn advance_node(&mut self) -> bool {
        let pods: Vec<Value> =
            self.objects.iter().filter(|((k, _), _)| *k == Kind::Pod).map(|(_, o)| o.clone()).collect();
        for mut pod in pods {
            let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
            let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
            if !self.kubelet {
                return false;
            }
            if pod["spec"].get("nodeName").is_none() && pod["metadata"].get("deletionTimestamp").is_none() {
                pod["spec"]["nodeName"] = json!("n1");
                self.put(Kind::Pod, pod);
                return true;
            }
            let running = pod["status"]["phase"] == "Running";
            if pod["status"].get("phase").is_none() && pod["metadata"].get("deletionTimestamp").is_none() {
                pod["status"] = json!({"phase": "Running",
                    "containerStatuses": [{"name": "compute", "state": {"running": {}}}],
                    "conditions": [{"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady"}]});
                let vmi = pod["metadata"]["ownerReferences"][0]["uid"].as_str().unwrap().to_owned();
                self.launchers.entry(uid).or_insert(Launcher { vmi, ..Launcher::default() });
                self.put(Kind::Pod, pod);
                return true;
            }
            let l = self.launchers.get(&uid).cloned().unwrap_or_default();
            if running && l.lost && pod["metadata"].get("deletionTimestamp").is_none() {
                // What the kubelet says of containers of a boot before.
                pod["status"] = json!({"phase": "Failed", "containerStatuses": [
                    {"name": "compute", "state": {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}}]});
                self.put(Kind::Pod, pod);
                return true;
            }
            if running && l.starts > 0 && pod["status"]["conditions"][0]["status"] == "False" {
                pod["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
                self.put(Kind::Pod, pod);
                return true;
            }
            if running && l.state == Some(DomainState::Starting) {
                let l = self.launchers.get_mut(&uid).unwrap();
                l.seq += 1;
                l.state = Some(DomainState::Running);
                if self.agent_up {
                    let d = self.domain(&uid);
                    self.reports.push(d);
                }
                return true;
            }
            if pod["metadata"].get("deletionTimestamp").is_some() {
                // SIGTERM: the launcher shuts the guest down, then ends, then the kubelet removes the pod.
                let cause = if self.guest_obeys { Cause::GuestShutdown } else { Cause::KilledAfterGrace };
                self.end(&uid, cause);
                let gone = observe::object(Kind::Pod, &pod).unwrap().reference();
                self.objects.remove(&(Kind::Pod, name));
                self.sights.push(Sight::Gone(gone));
                return true;
            }
            if running && let Some(outcome) = l.outcome {
                let message = json!({"cause": outcome.cause.name()}).to_string();
                pod["status"] = json!({"phase": "Succeeded", "containerStatuses": [
                    {"name": "compute", "state": {"terminated": {"exitCode": 0, "reason": "Completed", "message": message}}}]});
                self.put(Kind::Pod, pod);
                return true;
            }
        }
        false
    }

    /// The node is booted again: whatever ran there is over, and nobody is left to say how it ended. Its kubelet may have said so
    /// of the pods before the agent is heard.
    pub fn reboot(&mut self, kubelet_first: bool) {
        self.boot_id.push('\'');
        for l in self.launchers.values_mut() {
            l.lost = true;
        }
        self.reports.clear();
        if kubelet_first {
            while self.advance_node() {}
        }
        self.connect();
    }

    /// The controller dies and comes back: it is told what lists say, from the leaves up, as its driver does.
    pub fn restart(&mut self) {
        let all: Vec<_> = self.objects.clone().into_iter().rev().collect();
        self.restart_with(all);
    }

    pub fn restart_with(&mut self, all: Vec<((Kind, String), Value)>) {
        self.cell = Vm::new(Key::new("ns", "web"));
        self.fresh = true;
        self.settled.clear();
        self.sights.clear();
        self.reports.clear();
        self.wake = None;
        self.session += 1;
        self.told_interests.clear();
        for ((kind, _), o) in all {
            if !matches!(kind, Kind::ControllerRevision | Kind::PersistentVolumeClaim | Kind::Pattern(_)) {
                self.feed(Input::Observed(Sight::Present(observe::object(kind, &o).unwrap())));
            }
        }
    }

    /// The next thing in order, but for the clock. Tells whether there was one.
    pub fn settle_one(&mut self) -> bool {
        if !self.sights.is_empty() {
            let s = self.sights.remove(0);
            self.feed(Input::Observed(s));
        } else if !self.settled.is_empty() {
            let (id, result) = self.settled.remove(0);
            self.feed(Input::Settled { id, result });
        } else if !self.flying.is_empty() {
            let c = self.flying.remove(0);
            let r = self.carry_out(c);
            self.settled.extend(r);
        } else if !self.reports.is_empty() {
            let r = self.reports.remove(0);
            self.feed(Input::Reported(r));
        } else if self.advance_node() {
            self.now += 1;
        } else {
            return false;
        }
        true
    }

    /// Everything at once, in order, until nothing moves within `horizon` of time.
    pub fn settle(&mut self, horizon: u64) {
        let end = self.now + horizon;
        for _ in 0..10_000 {
            if self.settle_one() {
                continue;
            }
            if let Some(t) = self.wake.filter(|t| *t <= end) {
                self.now = self.now.max(t);
                self.wake = None;
                self.feed(Input::Elapsed);
            } else {
                self.now = end;
                return;
            }
        }
        panic!("it does not come to rest: {:?}", self.writes.iter().rev().take(20).collect::<Vec<_>>());
    }

    /// One random thing. The order of the watch is kept for one object only.
    pub fn chaos(&mut self, d: &mut Dice, crashes: bool) {
        self.now += d.roll(30) as u64;
        match d.roll(10) {
            0..=2 if !self.sights.is_empty() => {
                let i = d.roll(self.sights.len());
                let s = if d.chance(15) { self.sights[i].clone() } else { self.sights.remove(i) };
                self.feed(Input::Observed(s));
            }
            3 | 4 if !self.flying.is_empty() => {
                let i = d.roll(self.flying.len());
                let c = self.flying.remove(i);
                let id = c.id();
                if d.chance(5) {
                    // Never arrived.
                    self.settled.extend(id.map(|id| (id, Settled::Unknown)));
                } else if d.chance(8) {
                    // Carried out, and the answer was lost.
                    self.carry_out(c);
                    self.settled.extend(id.map(|id| (id, Settled::Unknown)));
                } else {
                    let r = self.carry_out(c);
                    self.settled.extend(r);
                }
            }
            5 if !self.settled.is_empty() => {
                let (id, result) = self.settled.remove(d.roll(self.settled.len()));
                self.feed(Input::Settled { id, result });
            }
            6 if !self.reports.is_empty() => {
                let i = d.roll(self.reports.len());
                let r = if d.chance(15) { self.reports[i].clone() } else { self.reports.remove(i) };
                self.feed(Input::Reported(r));
            }
            7 => {
                self.advance_node();
            }
            8 => {
                if let Some(t) = self.wake.take() {
                    self.now = self.now.max(t);
                    self.feed(Input::Elapsed);
                }
            }
            // In any order: the lists of two kinds are not of one moment.
            9 if crashes && d.chance(4) => {
                let all = self.objects.clone().into_iter().collect();
                self.restart_with(all);
            }
            _ => {}
        }
        self.check();
    }

    /// What must hold at any time.
    pub fn check(&self) {
        let mut starts: BTreeMap<&str, u32> = BTreeMap::new();
        for l in self.launchers.values() {
            *starts.entry(&l.vmi).or_default() += l.starts;
        }
        for (vmi, n) in starts {
            assert!(n <= 1, "{vmi} was started {n} times");
        }
        for (vmi, pods) in &self.pods_ever {
            assert!(pods.len() <= 1, "{vmi} had pods {pods:?}");
        }
    }
}

#[test]
fn a_node_that_is_booted_again_at_any_time_leads_to_one_running_guest() {
    for seed in 0..300_u64 {
        let mut w = World::with(vm("Always"));
        let mut d = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        for _ in 0..3 {
            for _ in 0..d.roll(150) {
                w.chaos(&mut d, true);
            }
            let kubelet_first = d.chance(50);
            w.reboot(kubelet_first);
        }
        let w = converge(seed, w, true, |w| w.phase() == "Running" && w.printable() == "Running");
        let alive = w.launchers.values().filter(|l| l.state == Some(DomainState::Running) && !l.lost).count();
        assert_eq!(alive, 1, "seed {seed}");
    }
}

/// Runs a seed until the condition holds, or says which seed did not get there.
#[cfg(test)]
fn converge(seed: u64, mut w: World, crashes: bool, done: impl Fn(&World) -> bool) -> World {
    let mut d = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    for _ in 0..400 {
        w.chaos(&mut d, crashes);
    }
    w.settle(120_000);
    assert!(done(&w), "seed {seed}: VMI {:?}, VM {:?}, writes {:?}", w.phase(), w.printable(), w.writes);
    w
}

#[test]
fn any_interleaving_leads_to_one_running_guest() {
    for seed in 0..1000 {
        let w =
            converge(seed, World::with(vm("Always")), false, |w| w.phase() == "Running" && w.printable() == "Running");
        w.check();
    }
}

#[test]
fn a_controller_that_dies_at_any_time_leads_to_one_running_guest() {
    for seed in 0..1000 {
        let w =
            converge(seed, World::with(vm("Always")), true, |w| w.phase() == "Running" && w.printable() == "Running");
        w.check();
    }
}

#[test]
fn a_vm_that_is_deleted_at_any_time_leaves_nothing() {
    for seed in 0..1000 {
        let mut w = World::with(vm("Always"));
        let mut d = Dice(seed * 2 + 1);
        for _ in 0..d.roll(200) {
            w.chaos(&mut d, true);
        }
        w.edit(Kind::VirtualMachine, json!({"metadata": {"deletionTimestamp": "1970-01-01T00:20:00Z"}}));
        let w = converge(seed, w, true, |w| w.objects.keys().all(|(k, _)| *k == Kind::ControllerRevision));
        assert!(w.cell.is_empty(), "seed {seed}");
    }
}

#[test]
fn a_restart_of_the_controller_at_every_step_changes_nothing() {
    // One run in order, with a crash after each n-th thing that happens.
    for n in 0..80 {
        let mut w = World::with(vm("Always"));
        let mut d = Dice(7);
        for _ in 0..n {
            w.chaos(&mut d, false);
        }
        w.restart();
        w.settle(120_000);
        assert_eq!((w.phase().as_str(), w.printable().as_str()), ("Running", "Running"), "after {n}");
    }
}

#[test]
fn a_guest_that_ends_is_restarted_as_often_as_its_strategy_says_whatever_dies() {
    for seed in 0..400_u64 {
        for (cause, lives) in [(Cause::Crashed, 2), (Cause::GuestShutdown, 1)] {
            let mut w = World::with(vm("RerunOnFailure"));
            w.settle(10_000);
            let mut d = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
            for _ in 0..d.roll(20) {
                w.chaos(&mut d, true);
            }
            let pod = w.launchers.keys().next().unwrap().clone();
            w.end(&pod, cause);
            let w = converge(seed, w, true, |_| true);
            assert_eq!(w.pods_ever.len(), lives, "seed {seed} {cause:?}: {:?}", w.writes);
            let want = if lives == 2 { ("Running", "Running") } else { ("", "Stopped") };
            assert_eq!((w.phase().as_str(), w.printable().as_str()), want, "seed {seed} {cause:?}: {:?}", w.writes);
        }
    }
}

#[test]
fn a_request_is_carried_out_once_whatever_dies() {
    for seed in 0..400_u64 {
        let mut w = World::with(vm("Manual"));
        w.settle(3_000);
        let mut d = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": [{"action": "Start"}]}}));
        let mut w = converge(seed, w, true, |w| w.phase() == "Running");
        assert_eq!(w.pods_ever.len(), 1, "seed {seed}");
        let uid = w.get(Kind::VirtualMachineInstance).unwrap()["metadata"]["uid"].clone();
        let restart = json!([{"action": "Stop", "uid": uid}, {"action": "Start"}]);
        w.edit(Kind::VirtualMachine, json!({"status": {"stateChangeRequests": restart}}));
        for _ in 0..d.roll(100) {
            w.chaos(&mut d, true);
        }
        let w = converge(seed, w, true, |w| w.phase() == "Running" && w.printable() == "Running");
        assert_eq!(w.pods_ever.len(), 2, "seed {seed}: {:?}", w.writes);
        assert!(w.get(Kind::VirtualMachine).unwrap()["status"].get("stateChangeRequests").is_none(), "seed {seed}");
    }
}
