//! What is written into the VM's status.

use super::{
    cell::{At, Vm, What},
    command::Command,
    strategy::Wish,
};
use crate::{
    condition::{self, Cond},
    object::Class,
    observe::{Phase, Strategy, VmStatus, VmView, VmiView},
};
use serde_json::{Map, Value, json};

/// Conditions of a VM that do not come from its VMI.
const OWN: [&str; 4] = ["Ready", "Failure", "RestartRequired", "ManualRecoveryRequired"];

impl Vm {
    pub(super) fn plan_vm(&mut self, out: &mut Vec<Command>) {
        if !self.vm.is_free(self.now) {
            if let Some(at) = self.vm.free_at(self.now) {
                self.want_wake(at);
            }
            return;
        }
        if self.vm.is_doubted() {
            return self.confirm(At::Vm, out);
        }
        let Some(vm) = self.vm.get().cloned() else { return };
        // What is rendered from the VM is rendered from the version that we know.
        if self.flights.values().any(|(_, w)| matches!(w, What::CreateVmi | What::CreateRevision(_))) {
            return;
        }
        if self.plan_vm_finalizer(&vm, out) {
            return;
        }
        if self.wish(&vm) == Wish::Unhalt && vm.meta.deleting.is_none() {
            let mut spec = Map::new();
            if vm.uses_running {
                spec.insert("running".into(), json!(true));
            } else {
                spec.insert("runStrategy".into(), json!(Strategy::Always.name()));
            }
            let body = json!({
                "metadata": {"uid": vm.meta.uid, "resourceVersion": vm.meta.rv.to_string()},
                "spec": spec,
            });
            self.patch(At::Vm, self.vm_ref(), false, Class::Urgent, "unhalt", body, out);
            return;
        }
        let want = self.desired_vm(&vm);
        let status = diff(&vm.status, &want);
        if status.is_empty() {
            self.lazy.remove(&At::Vm);
            return;
        }
        let class = self.class_of(&vm, &want);
        if !self.is_due(At::Vm, class) {
            return;
        }
        let body = json!({
            "metadata": {"uid": vm.meta.uid, "resourceVersion": vm.meta.rv.to_string()},
            "status": status,
        });
        let why = want.printable_status.clone();
        let sent = self.patch(At::Vm, self.vm_ref(), true, class, &why, body, out).is_some();
        if let (true, Some(wait)) = (sent, self.failure(&vm)) {
            self.note(self.vm_ref(), true, wait.name().1, &wait.message(), out);
        }
    }

    fn desired_vm(&self, vm: &VmView) -> VmStatus {
        let mut s = vm.status.clone();
        let own = self.own_vmi();
        s.created = own.is_some();
        s.ready = own.is_some_and(|v| condition::is_true(&v.status.conditions, "Ready"));
        s.state_change_requests = self.requests(vm);
        s.start_failure = self.start_failure(vm);
        if own.is_some() {
            s.run_strategy = Some(vm.strategy.name().into());
        } else if s.run_strategy.is_some() && vm.strategy != Strategy::RerunOnFailure {
            // Left alone for RerunOnFailure: "was just switched to it" is what starts the machine.
            s.run_strategy = Some(vm.strategy.name().into());
        }
        s.desired_generation = own.map(|_| vm.generation);
        s.observed_generation = own.and_then(|v| {
            let recorded = v.status.virtual_machine_revision_name.as_deref();
            v.vm_generation.or_else(|| recorded.and_then(super::plan::generation_of_revision))
        });
        self.vm_conditions(vm, own, &mut s.conditions);
        s.printable_status = self.printable(vm, &s).into();
        s
    }

    fn vm_conditions(&self, vm: &VmView, own: Option<&VmiView>, conds: &mut Vec<Cond>) {
        let ready = match own {
            None => Cond::new("Ready", false, "VMINotExists", "VMI does not exist"),
            Some(v) => condition::find(&v.status.conditions, "Ready").cloned().unwrap_or_else(|| {
                Cond::new("Ready", false, "VMIConditionMissing", "VMI is missing the Ready condition")
            }),
        };
        condition::set(conds, ready, self.now);
        match self.failure(vm) {
            Some(wait) => condition::set(conds, Cond::new("Failure", true, wait.name().1, wait.message()), self.now),
            None => condition::remove(conds, "Failure"),
        }
        if let Some(v) = own {
            conds
                .retain(|c| OWN.contains(&c.kind.as_str()) || condition::find(&v.status.conditions, &c.kind).is_some());
            for c in v.status.conditions.iter().filter(|c| !OWN.contains(&c.kind.as_str())) {
                condition::set(conds, c.clone(), self.now);
            }
        }
    }

    /// The word that people read: the first rule that matches.
    fn printable(&self, vm: &VmView, s: &VmStatus) -> &'static str {
        if vm.meta.deleting.is_some() {
            return "Terminating";
        }
        let own = self.own_vmi();
        let (creating, deleting) = (
            self.flights.values().any(|(_, w)| *w == What::CreateVmi),
            self.flights.values().any(|(at, w)| (at, w) == (&At::Vmi, &What::Delete)),
        );
        let sync =
            own.and_then(|v| condition::find(&v.status.conditions, "Synchronized")).filter(|c| c.status == "False");
        let sync = sync.map_or("", |c| c.reason.as_str());
        let scheduled = own.and_then(|v| condition::find(&v.status.conditions, "PodScheduled"));
        let unschedulable = scheduled.is_some_and(|c| c.status == "False" && c.reason == "Unschedulable");
        match own.map(|v| (v.phase, v)) {
            Some((p, v)) if !p.is_final() && (v.meta.deleting.is_some() || deleting) => return "Stopping",
            Some((Phase::Running, v)) => {
                let unknown = condition::find(&v.status.conditions, "Ready")
                    .is_some_and(|c| c.reason == "NodeUnreachable" || c.reason == "NodeUnresponsive");
                return match (unknown, condition::is_true(&v.status.conditions, "Paused")) {
                    (true, _) => "Unknown",
                    (false, true) => "Paused",
                    (false, false) => "Running",
                };
            }
            Some(_) | None => {}
        }
        if sync == "FailedPvcNotFound" {
            return "ErrorPvcNotFound";
        }
        if unschedulable {
            return "ErrorUnschedulable";
        }
        if let "ErrImagePull" = sync {
            return "ErrImagePull";
        }
        if let "ImagePullBackOff" = sync {
            return "ImagePullBackOff";
        }
        match own.map(|v| v.phase) {
            Some(Phase::Unset | Phase::Pending | Phase::Scheduling | Phase::Scheduled) => return "Starting",
            Some(Phase::Unknown) => return "Unknown",
            Some(Phase::Running | Phase::Succeeded | Phase::Failed) | None => {}
        }
        if own.is_none() && creating {
            return "Starting";
        }
        if vm.strategy.backs_off() && s.start_failure.as_ref().is_some_and(|f| f.consecutive_fail_count > 0) {
            return "CrashLoopBackOff";
        }
        "Stopped"
    }

    fn class_of(&self, vm: &VmView, want: &VmStatus) -> Class {
        let old = &vm.status;
        // What the next start depends on.
        let essential = old.state_change_requests != want.state_change_requests
            || old.start_failure != want.start_failure
            || (vm.strategy == Strategy::RerunOnFailure && old.run_strategy != want.run_strategy);
        let passing = match want.printable_status.as_str() {
            "Starting" | "Stopping" | "Terminating" => true,
            // Between two lives, or on the way out.
            "Stopped" => self.own_vmi().is_some_and(|v| v.meta.deleting.is_some()) || vm.strategy == Strategy::Always,
            _ => false,
        };
        let news = old.printable_status != want.printable_status && !passing;
        let became_ready = want.ready && !old.ready;
        let failure = condition::is_true(&old.conditions, "Failure") != condition::is_true(&want.conditions, "Failure");
        if essential || news || became_ready || failure { Class::Urgent } else { Class::Lazy }
    }
}

/// The fields of a status that differ, as a merge patch. A field that is gone is named as null.
fn diff(old: &VmStatus, new: &VmStatus) -> Map<String, Value> {
    if old == new {
        return Map::new();
    }
    let (Ok(Value::Object(a)), Ok(Value::Object(b))) = (serde_json::to_value(old), serde_json::to_value(new)) else {
        return Map::new();
    };
    b.into_iter()
        .filter(|(k, v)| a.get(k) != Some(v))
        .map(|(k, v)| if k == "stateChangeRequests" && v == json!([]) { (k, Value::Null) } else { (k, v) })
        .collect()
}
