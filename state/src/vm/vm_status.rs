//! What is written into the VM's status.

use super::{
    cell::{At, Vm, What},
    command::Command,
    printable::Printable,
    revision::Drift,
    strategy::Wish,
};
use crate::{
    condition::{self, Cond},
    object::Class,
    observe::{Strategy, VmStatus, VmView, VmiView},
};
use api::names;
use serde_json::{Map, Value, json};

/// Conditions of a VM that do not come from its VMI.
const OWN: [&str; 4] = ["Ready", "Failure", "RestartRequired", "ManualRecoveryRequired"];

/// KubeVirt's words, which ours begin with.
const RESTART_TEXT: &str = "a non-live-updatable field was changed in the template spec";

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
        if let Some(witness) = self.missing_witness() {
            let body = json!({"metadata": {
                "uid": vm.meta.uid, "resourceVersion": vm.meta.rv.to_string(),
                "annotations": {api::names::ANN_FENCED: super::verdict::text(&witness)},
            }});
            self.patch(At::Vm, self.vm_ref(), false, Class::Urgent, "witness", body, out);
            return;
        }
        if self.wish(&vm) == Wish::Unhalt && vm.meta.deleting.is_none() {
            let mut spec = Map::new();
            if vm.uses_running {
                spec.insert("running".into(), json!(true));
            } else {
                spec.insert("runStrategy".into(), json!(Strategy::Always.name()));
            }
            let mut body = json!({
                "metadata": {"uid": vm.meta.uid, "resourceVersion": vm.meta.rv.to_string()},
                "spec": spec,
            });
            // It is done for whoever asked for the start.
            if let Some(by) = self.requests(&vm).first().and_then(|r| r.data.get(names::REQUESTED_BY)) {
                body["metadata"]["annotations"] = json!({names::ANN_CHANGED_BY: by});
            }
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
        // That there is no VMI is said when it is certain (or a creation was refused), not when nobody has told of one yet.
        if self.vmi.get().is_none() && !self.vmi.is_absent() && self.vmi.error().is_none() {
            if self.vmi.is_free(self.now) {
                self.confirm(At::Vmi, out);
            } else if let Some(at) = self.vmi.free_at(self.now) {
                self.want_wake(at);
            }
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

    pub(super) fn desired_vm(&self, vm: &VmView) -> VmStatus {
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
            v.vm_generation.or_else(|| recorded.and_then(super::revision::generation_of_revision))
        });
        self.vm_conditions(vm, own, &mut s.conditions);
        s.printable_status = self.printable_facts(vm, &s).word().name().into();
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
        match self.drift(vm) {
            Drift::Spec(changed) => {
                let paths: Vec<_> = changed.iter().map(|p| format!("spec.template.spec.{p}")).collect();
                let text = format!("{RESTART_TEXT}: {}", paths.join(", "));
                condition::set(conds, Cond::new("RestartRequired", true, "", text), self.now);
            }
            Drift::None | Drift::Same | Drift::Metadata => condition::remove(conds, "RestartRequired"),
            Drift::Unknown => {}
        }
        let mirrored: &[Cond] = own.map_or(&[], |v| &v.status.conditions);
        conds.retain(|c| OWN.contains(&c.kind.as_str()) || condition::find(mirrored, &c.kind).is_some());
        for c in mirrored.iter().filter(|c| !OWN.contains(&c.kind.as_str())) {
            condition::set(conds, c.clone(), self.now);
        }
    }

    fn class_of(&self, vm: &VmView, want: &VmStatus) -> Class {
        let old = &vm.status;
        // What the next start depends on.
        let essential = old.state_change_requests != want.state_change_requests
            || old.start_failure != want.start_failure
            || (vm.strategy == Strategy::RerunOnFailure && old.run_strategy != want.run_strategy);
        let passing = match self.printable_facts(vm, want).word() {
            Printable::Starting | Printable::Stopping | Printable::Terminating | Printable::WaitingForVolumeBinding => {
                true
            }
            // Between two lives, or on the way out.
            Printable::Stopped => {
                self.own_vmi().is_some_and(|v| v.meta.deleting.is_some()) || vm.strategy == Strategy::Always
            }
            Printable::Unknown
            | Printable::Paused
            | Printable::Running
            | Printable::ErrorPvcNotFound
            | Printable::ErrorUnschedulable
            | Printable::ErrImagePull
            | Printable::ImagePullBackOff
            | Printable::CrashLoopBackOff => false,
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
