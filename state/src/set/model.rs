//! A small world for tests: an API server with one set and its instances as plain data, in which events are doubled, held
//! back and overtaken, answers are lost and the controller dies.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use super::*;
use crate::{
    Event, Key, Machine, ResourceVersion, Timestamp,
    object::{CommandId, Kind, ObjectRef, Refusal, Settled},
    vm::{
        Command,
        model::{Dice, merge},
    },
};
use serde_json::{Value, json};
use std::collections::BTreeMap;

const SET: Kind = Kind::VirtualMachineInstanceReplicaSet;
const VMI: Kind = Kind::VirtualMachineInstance;

pub struct World {
    pub now: u64,
    pub rv: u64,
    pub uids: u64,
    pub objects: BTreeMap<(Kind, String), Value>,
    pub sights: Vec<Sight>,
    pub flying: Vec<Command>,
    pub settled: Vec<(CommandId, Settled<Sight>)>,
    pub cell: Set,
    pub choice: Option<Choice>,
    pub wake: Option<u64>,
    pub writes: Vec<String>,
    pub refused: u32,
    pub notes: Vec<String>,
    /// Most creations that were on their way at once.
    pub burst: usize,
    /// What the server says to creations.
    pub refuse: Option<Refusal>,
    /// The server calls every write a conflict.
    pub contest: bool,
    /// Commands that were carried out.
    pub calls: u32,
    /// Instances come up and go down by themselves.
    pub nodes: bool,
}

pub fn set(replicas: u32) -> Value {
    json!({
        "metadata": {"name": "web", "namespace": "ns", "uid": "set-1", "creationTimestamp": "1970-01-01T00:00:00Z"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"domain": {"devices": {}}}},
        },
    })
}

impl World {
    pub fn new(set: Value) -> Self {
        let mut w = Self {
            now: 1000,
            rv: 100,
            uids: 0,
            objects: BTreeMap::new(),
            sights: vec![],
            flying: vec![],
            settled: vec![],
            cell: Set::new(Key::new("ns", "web")),
            choice: None,
            wake: None,
            writes: vec![],
            refused: 0,
            notes: vec![],
            burst: 0,
            refuse: None,
            contest: false,
            calls: 0,
            nodes: true,
        };
        w.put(SET, set);
        w
    }

    pub fn put(&mut self, kind: Kind, mut o: Value) -> Value {
        self.rv += 1;
        o["metadata"]["resourceVersion"] = json!(self.rv.to_string());
        let name = o["metadata"]["name"].as_str().unwrap().to_owned();
        let kept = o["metadata"]["finalizers"].as_array().is_some_and(|f| !f.is_empty());
        if o["metadata"].get("deletionTimestamp").is_some() && !kept {
            self.objects.remove(&(kind, name.clone()));
            let uid = o["metadata"]["uid"].as_str().unwrap().into();
            self.sights.push(Sight::Gone(ObjectRef { kind, namespace: "ns".into(), name, uid }));
        } else {
            self.objects.insert((kind, name), o.clone());
            self.sights.push(Sight::read(kind, &o).unwrap());
        }
        o
    }

    /// An instance that somebody else makes.
    pub fn vmi(&mut self, name: &str, extra: Value) {
        self.uids += 1;
        let mut o = json!({"metadata": {"name": name, "namespace": "ns", "uid": format!("vmi-{}", self.uids),
            "finalizers": ["f"], "labels": {"app": "web"}, "creationTimestamp": "1970-01-01T00:00:00Z"}});
        merge(&mut o, &extra);
        self.put(VMI, o);
    }

    pub fn edit(&mut self, kind: Kind, name: &str, patch: Value) {
        let mut o = self.objects[&(kind, name.to_owned())].clone();
        merge(&mut o, &patch);
        self.put(kind, o);
    }

    pub fn edit_set(&mut self, patch: Value) {
        self.edit(SET, "web", patch);
    }

    pub fn the_set(&self) -> Value {
        self.objects[&(SET, "web".to_owned())].clone()
    }

    pub fn condition(&self, kind: &str) -> Option<String> {
        let conditions = self.the_set()["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().find(|c| c["type"] == kind).map(|c| c["reason"].as_str().unwrap().to_owned())
    }

    pub fn vmis(&self) -> Vec<Value> {
        self.objects.iter().filter(|((k, _), _)| *k == VMI).map(|(_, o)| o.clone()).collect()
    }

    /// Names of instances that the set controls and that neither ended nor are being deleted.
    pub fn alive(&self) -> Vec<String> {
        let owned = |o: &Value| o["metadata"]["ownerReferences"][0]["uid"] == "set-1";
        let over = |o: &Value| ["Succeeded", "Failed"].contains(&o["status"]["phase"].as_str().unwrap_or(""));
        let all = self
            .vmis()
            .into_iter()
            .filter(|o| owned(o) && !over(o) && o["metadata"].get("deletionTimestamp").is_none());
        all.map(|o| o["metadata"]["name"].as_str().unwrap().to_owned()).collect()
    }

    pub fn end(&mut self, name: &str, phase: &str) {
        self.edit(VMI, name, json!({"status": {"phase": phase, "conditions": null}}));
    }

    /// The node of an instance is not heard of any more.
    pub fn silence(&mut self, name: &str) {
        let ready = json!([{"type": "Ready", "status": "False", "reason": "NodeUnreachable"}]);
        self.edit(VMI, name, json!({"status": {"conditions": ready}}));
    }

    pub fn feed(&mut self, input: Input) {
        let wanted = match &input {
            Input::Observed(Sight::Member(m)) => self.cell.wants(m),
            Input::Observed(Sight::Gone(r) | Sight::Vanished(r)) if r.kind == VMI => self.cell.knows(&r.name),
            Input::Observed(_) | Input::Listed(_) | Input::Settled { .. } | Input::Elapsed => true,
        };
        if !wanted {
            return;
        }
        let out = self.cell.step(&Event::new(Timestamp(self.now), input));
        // Planning once more without news plans nothing, in every world.
        let again = self.cell.clone().step(&Event::new(Timestamp(self.now), Input::Elapsed));
        assert!(again.iter().all(|c| matches!(c, Command::Wake { .. })), "planned twice: {again:?}");
        for c in out {
            match c {
                Command::Wake { at } => self.wake = Some(at.0),
                Command::Note(n) => self.notes.push(n.reason),
                c @ (Command::Create { .. }
                | Command::Patch { .. }
                | Command::Delete { .. }
                | Command::Confirm { .. }
                | Command::Survey { .. }
                | Command::Instruct { .. }) => self.flying.push(c),
            }
        }
        let creations = self.flying.iter().filter(|c| matches!(c, Command::Create { .. })).count();
        self.burst = self.burst.max(creations);
        let choice = self.cell.choice();
        if choice != self.choice {
            self.choice.clone_from(&choice);
            self.list();
        }
    }

    fn list(&mut self) {
        let Some(choice) = self.cell.choice() else { return };
        let all = self.members().into_iter().filter(|m| choice.chooses(m)).collect();
        self.feed(Input::Listed(all));
    }

    fn members(&self) -> Vec<Member> {
        let read = |o: &Value| match Sight::read(VMI, o) {
            Some(Sight::Member(m)) => Some(*m),
            _ => None,
        };
        self.vmis().iter().filter_map(read).collect()
    }

    pub fn carry_out(&mut self, c: Command) -> Option<(CommandId, Settled<Sight>)> {
        let id = c.id()?;
        let fits = |o: &Value, meta: &Value| {
            meta["uid"] == o["metadata"]["uid"]
                && meta.get("resourceVersion").is_none_or(|r| *r == o["metadata"]["resourceVersion"])
        };
        self.calls += 1;
        let result = match c {
            Command::Create { .. } | Command::Patch { .. } | Command::Delete { .. } if self.contest => {
                Settled::Conflict
            }
            Command::Create { recipe, source, target, .. } => {
                match self.objects.get(&(source.object.kind, source.object.name.clone())).cloned() {
                    None => Settled::Gone,
                    Some(raw) if raw["metadata"]["resourceVersion"] != source.rv.to_string() => {
                        self.refused += 1;
                        Settled::Conflict
                    }
                    Some(_) if self.refuse.is_some() => Settled::Refused(self.refuse.clone().unwrap()),
                    Some(_) if self.objects.contains_key(&(target.kind, target.name.clone())) => {
                        self.refused += 1;
                        Settled::Conflict
                    }
                    Some(raw) => {
                        let mut o = crate::render::render(&recipe, &source.object, &target, &raw, &[]).unwrap();
                        self.uids += 1;
                        o["metadata"]["uid"] = json!(format!("vmi-{}", self.uids));
                        o["metadata"]["creationTimestamp"] = json!(Timestamp(self.now).to_string());
                        self.writes.push(format!("create {}", target.name));
                        let o = self.put(VMI, o);
                        Settled::Applied(Sight::read(VMI, &o))
                    }
                }
            }
            Command::Patch { patch, .. } => {
                match self.objects.get(&(patch.target.kind, patch.target.name.clone())).cloned() {
                    None => Settled::Gone,
                    Some(o) if !fits(&o, &patch.body["metadata"]) => {
                        self.refused += 1;
                        Settled::Conflict
                    }
                    Some(mut o) => {
                        self.writes.push(format!("{} {}", patch.why, patch.target.name));
                        merge(&mut o, &patch.body);
                        let o = self.put(patch.target.kind, o);
                        Settled::Applied(Sight::read(patch.target.kind, &o))
                    }
                }
            }
            Command::Delete { target, .. } => match self.objects.get(&(target.kind, target.name.clone())).cloned() {
                Some(mut o) if o["metadata"]["uid"] == target.uid.0 => {
                    self.writes.push(format!("delete {}", target.name));
                    o["metadata"]["deletionTimestamp"] = json!("1970-01-01T00:10:00Z");
                    let o = self.put(target.kind, o);
                    Settled::Applied(Sight::read(target.kind, &o))
                }
                Some(_) => Settled::Conflict,
                None => Settled::Gone,
            },
            Command::Confirm { target, .. } => match self.objects.get(&(target.kind, target.name.clone())) {
                Some(o) => Settled::Applied(Sight::read(target.kind, o)),
                None => Settled::Gone,
            },
            Command::Survey { selector, .. } => {
                let choice = self.cell.choice().unwrap();
                assert_eq!(selector, choice.selector.to_string());
                let members = self.members().into_iter().filter(|m| choice.selector.matches(&m.labels)).collect();
                Settled::Applied(Some(Sight::All { members, rv: ResourceVersion(self.rv) }))
            }
            Command::Instruct { .. } | Command::Note(_) | Command::Wake { .. } => return None,
        };
        Some((id, result))
    }

    /// One instance goes one step towards running, or goes.
    pub fn advance(&mut self) -> bool {
        for mut o in self.vmis() {
            if o["metadata"].get("deletionTimestamp").is_some() {
                o["metadata"]["finalizers"] = json!([]);
                self.put(VMI, o);
                return true;
            }
            if o["status"].get("phase").is_none() && self.nodes {
                o["status"] = json!({"phase": "Running", "nodeName": "n1",
                    "phaseTransitionTimestamps": [{"phase": "Running"}],
                    "conditions": [{"type": "Ready", "status": "True"}]});
                self.put(VMI, o);
                return true;
            }
        }
        false
    }

    /// The controller dies and comes back.
    pub fn restart(&mut self) {
        self.cell = Set::new(Key::new("ns", "web"));
        self.settled.clear();
        self.sights.clear();
        self.wake = None;
        self.choice = None;
        if let Some(o) = self.objects.get(&(SET, "web".to_owned())).cloned() {
            self.feed(Input::Observed(Sight::read(SET, &o).unwrap()));
        }
    }

    /// Everything at once, in order, until nothing moves within `horizon` of time.
    pub fn settle(&mut self, horizon: u64) {
        let end = self.now + horizon;
        for _ in 0..20_000 {
            if !self.sights.is_empty() {
                let s = self.sights.remove(0);
                self.feed(Input::Observed(s));
            } else if !self.settled.is_empty() {
                let (id, result) = self.settled.remove(0);
                self.feed(Input::Settled { id, result: result.clone() });
                self.feed(Input::Settled { id, result });
            } else if !self.flying.is_empty() {
                let c = self.flying.remove(0);
                let r = self.carry_out(c);
                self.settled.extend(r);
            } else if self.advance() {
                self.now += 1;
            } else if let Some(t) = self.wake.filter(|t| *t <= end) {
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

    /// One random thing.
    pub fn chaos(&mut self, d: &mut Dice, crashes: bool) {
        self.now += d.roll(30) as u64;
        match d.roll(10) {
            0..=2 if !self.sights.is_empty() => {
                let i = d.roll(self.sights.len());
                let s = if d.chance(15) { self.sights[i].clone() } else { self.sights.remove(i) };
                self.feed(Input::Observed(s));
            }
            3..=5 if !self.flying.is_empty() => {
                let i = d.roll(self.flying.len());
                let c = self.flying.remove(i);
                let id = c.id();
                if d.chance(5) {
                    self.settled.extend(id.map(|id| (id, Settled::Unknown)));
                } else if d.chance(8) {
                    self.carry_out(c);
                    self.settled.extend(id.map(|id| (id, Settled::Unknown)));
                } else {
                    let r = self.carry_out(c);
                    self.settled.extend(r);
                }
            }
            6 if !self.settled.is_empty() => {
                let (id, result) = self.settled.remove(d.roll(self.settled.len()));
                self.feed(Input::Settled { id, result });
            }
            7 => {
                self.advance();
            }
            8 => {
                if let Some(t) = self.wake.take() {
                    self.now = self.now.max(t);
                    self.feed(Input::Elapsed);
                }
            }
            9 if crashes && d.chance(4) => self.restart(),
            9 if d.chance(10) => {
                // A guest ends, whatever it was.
                let alive = self.alive();
                if let Some(name) = alive.get(d.roll(alive.len().max(1))) {
                    let phase = if d.chance(50) { "Failed" } else { "Succeeded" };
                    self.end(&name.clone(), phase);
                }
            }
            _ => {}
        }
    }
}
