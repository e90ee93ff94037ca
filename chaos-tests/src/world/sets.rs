//! Sets of instances: the driver of the real Set cells, as `reconcilers/` has it, what people do to sets, and what must hold.

use super::{
    Action, World,
    api::{Said, Verb},
    driver::{CellId, brief, settled},
    ghost::Ghost,
    server::{Res, Seen},
    users::{Deed, NS, spec},
};
use serde_json::{Value, json};
use state::{
    Event, Key, Machine, ResourceVersion, Timestamp,
    object::{CommandId, Kind, ObjectRef, Settled},
    observe::{Object, Phase},
    selector::Selector,
    set::{self, Member, Sight},
    vm,
};
use std::rc::Rc;

/// A set as admission lets it through.
pub fn of(name: &str, replicas: u64, grace: u64) -> Value {
    let labels = json!({"set": name});
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstanceReplicaSet",
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec(grace)}},
    })
}

/// One Set cell, and what its driver has told it to look at.
#[derive(Debug, Clone)]
pub(super) struct SetCell {
    pub machine: set::Set,
    choice: Option<set::Choice>,
}

/// What the Set cells keep of an object.
pub(super) fn sight(seen: &Seen) -> Option<Sight> {
    match seen.object() {
        Some(Object::Vmi(v)) => Some(Sight::Member(Box::new(v.as_ref().into()))),
        Some(_) => None,
        None => Sight::read(seen.res.kind()?, &seen.value),
    }
}

fn member(seen: &Seen) -> Option<Member> {
    match sight(seen)? {
        Sight::Member(m) => Some(*m),
        Sight::Set(_) | Sight::All { .. } | Sight::Gone(_) | Sight::Vanished(_) => None,
    }
}

fn replicas(set: &Seen) -> u64 {
    set.value.pointer("/spec/replicas").and_then(serde_json::Value::as_u64).unwrap_or(1)
}

/// Neither ended nor on its way out.
fn counts(m: &Member) -> bool {
    m.meta.deleting.is_none() && !m.phase.is_final() && !m.doomed
}

impl World {
    /// An instance was seen: for the sets that want to know.
    pub(super) fn show_sets(&mut self, c: usize, instance: &Key, sight: &vm::Sight) {
        let shown = match sight {
            vm::Sight::Present(Object::Vmi(v)) => Sight::Member(Box::new(v.as_ref().into())),
            vm::Sight::Gone(r) if r.kind == Kind::VirtualMachineInstance => Sight::Gone(r.clone()),
            vm::Sight::Vanished(r) if r.kind == Kind::VirtualMachineInstance => Sight::Vanished(r.clone()),
            vm::Sight::Present(_) | vm::Sight::Gone(_) | vm::Sight::Vanished(_) => return,
        };
        let Some(d) = self.driver(c) else { return };
        let wants = |cell: &SetCell| match &shown {
            Sight::Member(m) => cell.machine.wants(m),
            Sight::Set(_) | Sight::All { .. } | Sight::Gone(_) | Sight::Vanished(_) => {
                cell.machine.knows(&instance.name)
            }
        };
        let told: Vec<Key> = d.sets.iter().filter(|(_, cell)| wants(cell)).map(|(k, _)| k.clone()).collect();
        for key in told {
            self.set_step(c, key, set::Input::Observed(shown.clone()));
        }
    }

    pub(super) fn set_step(&mut self, c: usize, key: Key, input: set::Input) {
        let at = Timestamp(self.now);
        let Some(d) = self.driver(c) else { return };
        if !d.sets.contains_key(&key) {
            // Only what is there can begin a cell.
            let set::Input::Observed(Sight::Set(_)) = &input else { return };
            d.sets.insert(key.clone(), SetCell { machine: set::Set::new(key.clone()), choice: None });
        }
        let Some(cell) = d.sets.get_mut(&key) else { return };
        let event = Event::new(at, input);
        let commands = cell.machine.step(&event);
        let choice = cell.machine.choice();
        let listed = (choice != cell.choice).then(|| choice.clone()).flatten();
        cell.choice = choice;
        let empty = cell.machine.is_empty();
        self.steps += 1;
        self.mark(&[7, c as u64, commands.len() as u64]);
        self.say(|| {
            let (heard, out) = (format!("{:?}", event.input), commands.iter().map(brief).collect::<Vec<_>>());
            format!("controller {c} set {key}: {} => {}", heard.chars().take(200).collect::<String>(), out.join(" | "))
        });
        let id = CellId::Set(key.clone());
        self.carry_out(c, &id, commands);
        if empty {
            if let Some(d) = self.driver(c) {
                d.sets.remove(&key);
                d.disarm(&id);
            }
        } else if let Some(choice) = listed {
            let all = self.controllers[c].caches.get(&Res::Vmi).into_iter().flat_map(|k| k.objects.values());
            let members = all.filter_map(|o| member(o)).filter(|m| choice.chooses(m)).collect();
            self.set_step(c, key, set::Input::Listed(members));
        }
    }

    pub(super) fn selector_of(&self, c: usize, key: &Key) -> Option<Selector> {
        let cell = self.controllers.get(c)?.driver.as_ref()?.sets.get(key)?;
        cell.machine.choice().map(|choice| choice.selector)
    }

    /// All instances of a set were read, or that failed.
    pub(super) fn surveyed(&mut self, c: usize, key: Key, id: CommandId, selector: &Selector, said: &Said) {
        let result = match said {
            Said::List(all, at) => {
                for o in all {
                    self.controllers[c].note(o);
                }
                let members = all.iter().filter_map(|o| member(o)).filter(|m| selector.matches(&m.labels)).collect();
                Settled::Applied(Some(Sight::All { members, rv: ResourceVersion(*at) }))
            }
            other => settled(other, false, sight),
        };
        self.set_step(c, key, set::Input::Settled { id, result });
        self.drain(c);
    }

    /// An object as the cache has it.
    pub(super) fn cached(&self, c: usize, target: &ObjectRef) -> Option<Rc<Seen>> {
        let of = |o: &&Rc<Seen>| o.name() == target.name && o.namespace() == target.namespace;
        self.controllers.get(c)?.caches.get(&Res::of(target.kind))?.objects.values().find(of).cloned()
    }

    // --- people ---

    pub(super) fn create_set(&mut self, name: &str, replicas: u64) -> bool {
        let grace = self.grace();
        self.serve(Verb::Create(Res::Set, NS.into(), of(name, replicas, grace)), None).is_ok()
    }

    /// Something happens to a set or to one of its instances.
    pub(super) fn user_of_sets(&mut self) {
        let Some(name) = self.fates.pick(&self.sets).cloned() else { return };
        let replicas = self.fates.below(4);
        let uid = self.server.get(Res::Set, NS, &name).map(|s| s.uid().to_owned()).unwrap_or_default();
        let members: Vec<String> = self.ghost.members_of(&uid).into_iter().map(|m| m.meta.name).collect();
        let one = self.fates.pick(&members).cloned().unwrap_or_default();
        let deed = match self.fates.below(10) {
            0..=4 => Deed::Scale(name, replicas),
            5 => Deed::DeleteInstance(one),
            6 => Deed::DeletePod(one, self.fates.chance(300)),
            7 => Deed::DeleteSet(name, self.fates.chance(700)),
            _ => Deed::CreateSet(name, replicas),
        };
        self.person(deed);
        let pause = self.fates.between(200, self.unhurried);
        self.early(pause, Action::User);
    }
}

// --- what really is ---

impl Ghost {
    /// Instances that this set controls.
    fn members_of(&self, set: &str) -> Vec<Member> {
        self.all(Res::Vmi).filter_map(|o| member(o)).filter(|m| m.controller() == Some(set)).collect()
    }

    /// Instances of this set that counted at this version of the store.
    fn members_at(&self, set: &str, revision: u64) -> usize {
        let at = |versions: &Vec<Rc<Seen>>| {
            let version = versions.get(versions.partition_point(|v| v.revision <= revision).checked_sub(1)?)?;
            member(version).filter(|m| m.controller() == Some(set) && counts(m))
        };
        self.history.values().filter_map(at).count()
    }

    /// A controller made an instance: of a set, are there more now than anybody ever wanted? Those that it took on do not count.
    pub(super) fn makes_member(&mut self, vmi: &Seen) {
        let Some((kind, name, set)) = vmi.owner() else { return };
        if kind != Kind::VirtualMachineInstanceReplicaSet.name() {
            return;
        }
        let most = self.history.get(set).into_iter().flatten().map(|s| replicas(s)).max().unwrap_or(0);
        let made = |m: &&Member| {
            let first = self.history.get(m.meta.uid.as_str()).and_then(|h| h.first());
            first.and_then(|v| v.owner()).is_some_and(|(_, _, owner)| owner == set)
        };
        let all = self.members_of(set);
        let there = all.iter().filter(|m| counts(m)).filter(made).count();
        if there as u64 > most {
            self.surplus.push(format!("set {name} has {there} instances, and never were more than {most} wanted"));
        }
    }

    /// A controller is about to delete an instance of a set.
    pub(super) fn deletes_member(&mut self, vmi: &Seen, set: &str) {
        let uid = vmi.uid();
        let over = |v: &Seen| member(v).is_some_and(|m| m.phase.is_final() || m.doomed);
        // Those that there are, or were when it looked.
        let now = self.members_of(set).iter().filter(|m| counts(m)).count();
        let there = now.max(self.members_at(set, self.surveyed)) as u64;
        // Versions of the set that it could know when this instance was there.
        let since = self.history.get(uid).and_then(|h| h.first()).map_or(0, |v| v.revision);
        let wanted = self.was(set, since, |s| replicas(s) < there);
        if !self.was(uid, 0, over) && !wanted {
            self.unfounded.push(format!("instance {uid} of a set is deleted, and all {there} of them are wanted"));
        }
    }

    /// After everything has settled: there are as many instances as are wanted, they run, and the set says so.
    pub(super) fn set_is_right(&self, set: &Seen) -> Result<(), String> {
        if set.deleting() {
            return Err("it is being deleted for ever".into());
        }
        let all = self.members_of(set.uid());
        if let Some(m) = all.iter().find(|m| !counts(m)) {
            return Err(format!("instance {} is over and stays: {:?}", m.meta.name, m.phase));
        }
        if let Some(m) = all.iter().find(|m| m.phase != Phase::Running) {
            return Err(format!("instance {} is {:?}", m.meta.name, m.phase));
        }
        if let Some(m) = all.iter().find(|m| !self.executing.contains_key(m.meta.uid.as_str())) {
            return Err(format!("instance {} is Running and nothing runs", m.meta.name));
        }
        let said = |field: &str| set.value.pointer(&format!("/status/{field}")).and_then(serde_json::Value::as_u64);
        let found = (all.len() as u64, said("replicas").unwrap_or(0), said("readyReplicas").unwrap_or(0));
        let wanted = replicas(set);
        if found != (wanted, wanted, wanted) {
            return Err(format!("{wanted} wanted; there, said to be there and said to be ready are {found:?}"));
        }
        Ok(())
    }
}
