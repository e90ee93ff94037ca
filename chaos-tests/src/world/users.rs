//! What people do: as kubectl does it, and as the gateway writes a start, a stop and a restart.

use super::{
    Action, World,
    api::Verb,
    dice::Dice,
    mutants::Mutant,
    search,
    server::{Res, Seen},
};
use api::names;
use embedded::semantics::{
    value::items,
    write::{DeleteOptions, Part, Propagation},
};
use serde_json::{Value, json};
use std::rc::Rc;

/// Namespace of all machines.
pub const NS: &str = "default";

/// Something that a person does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Deed {
    /// A machine with this strategy.
    Create(String, &'static str),
    /// An instance without a machine.
    CreateBare(String),
    /// Start.
    Start(String),
    /// Stop, within this grace where one is named.
    Stop(String, Option<u64>),
    /// Restart.
    Restart(String),
    /// Another strategy.
    Strategy(String, &'static str),
    /// Delete the machine, its instance too or not.
    Delete(String, bool),
    /// Delete the instance.
    DeleteInstance(String),
    /// Delete the pod, also by force.
    DeletePod(String, bool),
    /// Labels of machine, instance and pod.
    Label(String, u64),
    /// Take the label away by which the agent finds the instance.
    Unlabel(String),
    /// A set of so many instances.
    CreateSet(String, u64),
    /// So many instances instead.
    Scale(String, u64),
    /// Delete a set, its instances too or not.
    DeleteSet(String, bool),
}

/// Strategies that are drawn.
pub const STRATEGIES: [&str; 5] = ["Always", "RerunOnFailure", "Manual", "Halted", "Once"];

/// A machine as admission lets it through.
pub fn machine(name: &str, strategy: &str, grace: u64) -> Value {
    let mut spec = spec(grace);
    spec["domain"]["devices"] = json!({"disks": [{"name": "init", "disk": {"bus": "virtio"}}]});
    spec["volumes"] = json!([{"name": "init", "cloudInitNoCloud": {"userData": SECRET}}]);
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": name, "namespace": NS, "finalizers": [names::FINALIZER_VM]},
        "spec": {"runStrategy": strategy, "template": {"metadata": {"labels": {"vm": name}}, "spec": spec}},
    })
}

/// What a machine's user data say: nothing that is recorded may.
pub const SECRET: &str = "#cloud-config that nobody may read";

pub(super) fn spec(grace: u64) -> Value {
    json!({"domain": {"memory": {"guest": "64Mi"}, "devices": {}}, "terminationGracePeriodSeconds": grace})
}

/// What a start, a stop or a restart writes into a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wish {
    /// This strategy.
    Strategy(String),
    /// These requests, into this version of the machine.
    Requests(Value, String, u64),
}

impl Wish {
    /// As a merge patch, and of which part.
    pub fn patch(self) -> (Part, Value) {
        match self {
            Self::Strategy(s) => (Part::Main, json!({"spec": {"runStrategy": s}})),
            Self::Requests(requests, uid, version) => {
                let meta = json!({"uid": uid, "resourceVersion": version.to_string()});
                (Part::Status, json!({"metadata": meta, "status": {"stateChangeRequests": requests}}))
            }
        }
    }

    fn requests(vm: &Seen, requests: &[Value]) -> Self {
        Self::Requests(json!(requests), vm.uid().to_owned(), vm.revision)
    }
}

fn is_over(vmi: &Seen) -> bool {
    matches!(vmi.text("/status/phase"), "Succeeded" | "Failed")
}

fn asked(vm: &Seen) -> bool {
    !items(&vm.value, "/status/stateChangeRequests").is_empty()
}

/// How this machine is started; `None` where it cannot be.
pub fn start(vm: &Seen, vmi: Option<&Seen>) -> Option<Wish> {
    match vm.text("/spec/runStrategy") {
        _ if vmi.is_some_and(|v| !is_over(v)) => None,
        "Halted" => Some(Wish::Strategy("Always".into())),
        "RerunOnFailure" if vmi.is_some_and(|v| v.text("/status/phase") == "Failed") => None,
        "Manual" | "RerunOnFailure" if !asked(vm) => {
            let stop = vmi.map(|v| json!({"action": "Stop", "uid": v.uid()}));
            let requests: Vec<Value> = stop.into_iter().chain([json!({"action": "Start"})]).collect();
            Some(Wish::requests(vm, &requests))
        }
        _ => None,
    }
}

/// How this machine is stopped; `vmi` is its instance that is not over.
pub fn stop(vm: &Seen, vmi: Option<&Seen>) -> Option<Wish> {
    match (vm.text("/spec/runStrategy"), vmi) {
        ("Always" | "Once", _) => Some(Wish::Strategy("Halted".into())),
        ("Manual" | "RerunOnFailure", Some(v)) => {
            Some(Wish::requests(vm, &[json!({"action": "Stop", "uid": v.uid()})]))
        }
        _ => None,
    }
}

/// How this machine is restarted.
pub fn restart(vm: &Seen, vmi: &Seen) -> Option<Wish> {
    let can = !matches!(vm.text("/spec/runStrategy"), "Halted" | "Once") && !asked(vm);
    can.then(|| Wish::requests(vm, &[json!({"action": "Stop", "uid": vmi.uid()}), json!({"action": "Start"})]))
}

impl World {
    pub(super) fn vm(&mut self, name: &str) -> Option<Rc<Seen>> {
        self.server.get(Res::Vm, NS, name)
    }

    pub(super) fn vmi(&mut self, name: &str) -> Option<Rc<Seen>> {
        self.server.get(Res::Vmi, NS, name)
    }

    fn pod_of(&mut self, name: &str) -> Option<Rc<Seen>> {
        let vmi = self.vmi(name)?;
        self.server.all(Res::Pod).into_iter().find(|p| p.owner().is_some_and(|(_, _, uid)| uid == vmi.uid()))
    }

    /// Seconds that a new machine's guests have to end: of its time alone, so that whoever makes it draws nothing.
    pub(super) fn grace(&self) -> u64 {
        if self.search.is_some() { search::GRACE } else { Dice::new(self.now).between(0, 8) }
    }

    /// Somebody does something. Whether it was done.
    pub(super) fn deed(&mut self, deed: &Deed) -> bool {
        self.say(|| format!("somebody: {deed:?}"));
        self.mark(&[6]);
        let done = match deed {
            Deed::Create(name, strategy) => {
                let grace = self.grace();
                self.serve(Verb::Create(Res::Vm, NS.into(), machine(name, strategy, grace)), None).is_ok()
            }
            Deed::CreateBare(name) => {
                let grace = self.grace();
                let object = json!({
                    "apiVersion": "kubevirt.io/v1",
                    "kind": "VirtualMachineInstance",
                    "metadata": {"name": name, "finalizers": [names::FINALIZER_VMI]},
                    "spec": spec(grace),
                });
                self.serve(Verb::Create(Res::Vmi, NS.into(), object), None).is_ok()
            }
            Deed::Start(name) => self.start(name),
            Deed::Stop(name, grace) => self.stop(name, *grace),
            Deed::Restart(name) => self.restart(name),
            Deed::Strategy(name, strategy) => {
                let done = self.set_strategy(name, strategy);
                if done && *strategy != "Halted" {
                    self.observe_start(name);
                }
                done
            }
            Deed::Delete(name, all) => self.delete_owner(Res::Vm, name, *all),
            Deed::CreateSet(name, replicas) => self.create_set(name, *replicas),
            Deed::Scale(name, replicas) => {
                let body = json!({"spec": {"replicas": replicas}});
                self.serve(Verb::merge(Res::Set, NS, name, Part::Main, body), None).is_ok()
            }
            Deed::DeleteSet(name, all) => self.delete_owner(Res::Set, name, *all),
            Deed::DeleteInstance(name) => self.serve(Verb::delete(Res::Vmi, NS, name, ""), None).is_ok(),
            Deed::DeletePod(name, force) => match self.pod_of(name) {
                Some(pod) if *force => {
                    self.remove_by_force(&pod);
                    true
                }
                Some(pod) => self.serve(Verb::delete(Res::Pod, NS, pod.name(), pod.uid()), None).is_ok(),
                None => false,
            },
            Deed::Label(name, n) => {
                let body = json!({"metadata": {"labels": {"somebody": n.to_string()}}});
                let pod = self.pod_of(name).map(|p| p.name().to_owned());
                for (res, name) in [(Res::Vm, Some(name.clone())), (Res::Vmi, Some(name.clone())), (Res::Pod, pod)] {
                    if let Some(name) = name {
                        let _ = self.serve(Verb::merge(res, NS, &name, Part::Main, body.clone()), None);
                    }
                }
                true
            }
            Deed::Unlabel(name) => {
                let body = json!({"metadata": {"labels": {names::LABEL_NODE_NAME: null}}});
                self.serve(Verb::merge(Res::Vmi, NS, name, Part::Main, body), None).is_ok()
            }
        };
        self.publish(None);
        done
    }

    fn delete_owner(&mut self, res: Res, name: &str, all: bool) -> bool {
        let propagation = if all { Propagation::Background } else { Propagation::Orphan };
        let options = DeleteOptions { propagation: Some(propagation), ..DeleteOptions::default() };
        self.serve(Verb::Delete(res, NS.into(), name.into(), options), None).is_ok()
    }

    fn set_strategy(&mut self, name: &str, strategy: &str) -> bool {
        let (part, body) = Wish::Strategy(strategy.into()).patch();
        self.serve(Verb::merge(Res::Vm, NS, name, part, body), None).is_ok()
    }

    fn fulfil(&mut self, name: &str, wish: Option<Wish>) -> bool {
        let Some((part, body)) = wish.map(|w| w.patch()) else { return false };
        self.serve(Verb::merge(Res::Vm, NS, name, part, body), None).is_ok()
    }

    fn start(&mut self, name: &str) -> bool {
        let Some(vm) = self.vm(name) else { return false };
        let vmi = self.vmi(name);
        let done = self.fulfil(name, start(&vm, vmi.as_deref()));
        if done {
            self.observe_start(name);
        }
        done
    }

    fn stop(&mut self, name: &str, grace: Option<u64>) -> bool {
        let Some(vm) = self.vm(name) else { return false };
        let vmi = self.vmi(name).filter(|v| !is_over(v));
        if let (Some(g), Some(v)) = (grace, &vmi) {
            let body = json!({"metadata": {"uid": v.uid()}, "spec": {"terminationGracePeriodSeconds": g}});
            let _ = self.serve(Verb::merge(Res::Vmi, NS, name, Part::Main, body), None);
        }
        let done = match &vmi {
            Some(v) if self.is(Mutant::StopOnlyDeletes) && vm.text("/spec/runStrategy") != "Halted" => {
                self.serve(Verb::delete(Res::Vmi, NS, name, v.uid()), None).is_ok()
            }
            _ => self.fulfil(name, stop(&vm, vmi.as_deref())),
        };
        if done {
            self.observe_stop(name, vmi.as_ref().map(|v| v.uid()));
        }
        done
    }

    fn restart(&mut self, name: &str) -> bool {
        let (Some(vm), Some(vmi)) = (self.vm(name), self.vmi(name)) else { return false };
        let done = self.fulfil(name, restart(&vm, &vmi));
        if done {
            self.observe_start(name);
        }
        done
    }

    /// A random deed about a random machine, and the next one after a while.
    pub(super) fn user(&mut self) {
        if !self.sets.is_empty() && self.fates.chance(400) {
            return self.user_of_sets();
        }
        let Some(name) = self.fates.pick(&self.names).cloned() else { return };
        let grace = self.fates.chance(300).then_some(0);
        let strategy = self.fates.pick(&STRATEGIES).copied().unwrap_or("Always");
        let deed = match self.fates.below(20) {
            0..=3 => Deed::Start(name),
            4..=7 => Deed::Stop(name, grace),
            8..=10 => Deed::Restart(name),
            11..=12 => Deed::Strategy(name, strategy),
            13 => Deed::Delete(name, self.fates.chance(800)),
            _ => Deed::Create(name, strategy),
        };
        self.person(deed);
        let pause = self.fates.between(200, self.unhurried);
        self.early(pause, Action::User);
    }
}
