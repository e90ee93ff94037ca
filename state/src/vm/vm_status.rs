//! What is written into the VM's status.

use super::{
    cell::{At, Vm, What},
    command::Command,
    plan::{changed, is_same},
    printable::Printable,
    revision::Drift,
    strategy::Wish,
};
use crate::{
    condition::{self, Cond, Said},
    instancetype::Role,
    object::Class,
    observe::{Strategy, VmStatus, VmView, VmiView},
    template::Template,
};
use api::names;
use serde_json::{Map, Value, json};
use std::borrow::Cow;

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
        let Some(vm) = self.vm.shared() else { return };
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
        if is_same(&vm.status, &want) {
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
            "status": diff(&vm.status, &want),
        });
        let why = want.printable_status.clone();
        let sent = self.patch(At::Vm, self.vm_ref(), true, class, &why, body, out).is_some();
        if let (true, Some(wait)) = (sent, self.failure(&vm)) {
            self.note(self.vm_ref(), true, wait.name().1, &wait.message(), out);
        }
    }

    /// As it is, and copied as soon as something of it has to change.
    pub(super) fn desired_vm<'v>(&self, vm: &'v VmView) -> Cow<'v, VmStatus> {
        let mut status = Cow::Borrowed(&vm.status);
        let s = &mut status;
        let own = self.own_vmi();
        if s.created != own.is_some() {
            s.to_mut().created = own.is_some();
        }
        let ready = own.is_some_and(|v| condition::is_true(&v.status.conditions, "Ready"));
        if s.ready != ready {
            s.to_mut().ready = ready;
        }
        let requests = self.requests(vm);
        if *s.state_change_requests != *requests {
            s.to_mut().state_change_requests = requests.into_owned();
        }
        let start_failure = self.start_failure(vm);
        if s.start_failure != start_failure {
            s.to_mut().start_failure = start_failure;
        }
        // Left alone for RerunOnFailure: "was just switched to it" is what starts the machine.
        let told = own.is_some() || (s.run_strategy.is_some() && vm.strategy != Strategy::RerunOnFailure);
        if told && s.run_strategy.as_deref() != Some(vm.strategy.name()) {
            s.to_mut().run_strategy = Some(vm.strategy.name().into());
        }
        let desired_generation = own.map(|_| vm.generation);
        let observed_generation = own.and_then(|v| {
            let recorded = v.status.virtual_machine_revision_name.as_deref();
            v.vm_generation.or_else(|| recorded.and_then(super::revision::generation_of_revision))
        });
        if (s.desired_generation, s.observed_generation) != (desired_generation, observed_generation) {
            let s = s.to_mut();
            (s.desired_generation, s.observed_generation) = (desired_generation, observed_generation);
        }
        let patterns = (
            self.pattern_status(vm, Role::Instancetype, s.instancetype_ref.as_ref()),
            self.pattern_status(vm, Role::Preference, s.preference_ref.as_ref()),
        );
        if (&s.instancetype_ref, &s.preference_ref) != (&patterns.0, &patterns.1) {
            let s = s.to_mut();
            (s.instancetype_ref, s.preference_ref) = patterns;
        }
        self.vm_conditions(vm, own, s);
        let word = self.printable_facts(vm, s).word().name();
        if s.printable_status != word {
            s.to_mut().printable_status = word.into();
        }
        status
    }

    fn vm_conditions(&self, vm: &VmView, own: Option<&VmiView>, s: &mut Cow<'_, VmStatus>) {
        match own.map(|v| condition::find(&v.status.conditions, "Ready")) {
            None => self.say(s, Said::new("Ready", false, "VMINotExists", "VMI does not exist")),
            Some(None) => {
                self.say(s, Said::new("Ready", false, "VMIConditionMissing", "VMI is missing the Ready condition"))
            }
            Some(Some(c)) => self.mirror(s, c),
        }
        match self.failure(vm) {
            Some(wait) => self.say(s, Said::new("Failure", true, wait.name().1, wait.message())),
            None => unsay(s, "Failure"),
        }
        match self.drift(vm) {
            Drift::Spec(changed) => {
                let paths: Vec<_> = changed.iter().map(|p| Template::path(p)).collect();
                let text = format!("{RESTART_TEXT}: {}", paths.join(", "));
                self.say(s, Said::new("RestartRequired", true, "", text));
            }
            Drift::None | Drift::Same | Drift::Metadata => unsay(s, "RestartRequired"),
            Drift::Unknown => {}
        }
        let mirrored: &[Cond] = own.map_or(&[], |v| &v.status.conditions);
        let stays = |c: &Cond| OWN.contains(&&*c.kind) || condition::find(mirrored, &c.kind).is_some();
        if !s.conditions.iter().all(stays) {
            s.to_mut().conditions.retain(stays);
        }
        for c in mirrored.iter().filter(|c| !OWN.contains(&&*c.kind)) {
            self.mirror(s, c);
        }
    }

    fn mirror(&self, s: &mut Cow<'_, VmStatus>, c: &Cond) {
        if !condition::find(&s.conditions, &c.kind).is_some_and(|old| old.says_the_same(c)) {
            condition::set(&mut s.to_mut().conditions, c.clone(), self.now);
        }
    }

    fn say(&self, s: &mut Cow<'_, VmStatus>, said: Said<'_>) {
        if !said.is_in(&s.conditions) {
            condition::set(&mut s.to_mut().conditions, said.into(), self.now);
        }
    }

    fn class_of(&self, vm: &VmView, want: &VmStatus) -> Class {
        let old = &vm.status;
        // What the next start depends on.
        let essential = old.state_change_requests != want.state_change_requests
            || old.start_failure != want.start_failure
            || (&old.instancetype_ref, &old.preference_ref) != (&want.instancetype_ref, &want.preference_ref)
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

fn unsay(s: &mut Cow<'_, VmStatus>, kind: &str) {
    if condition::find(&s.conditions, kind).is_some() {
        condition::remove(&mut s.to_mut().conditions, kind);
    }
}

/// The fields of a status that differ, as a merge patch. A field that is gone is named as null.
fn diff(old: &VmStatus, new: &VmStatus) -> Map<String, Value> {
    // All of them, so that none is forgotten.
    let VmStatus {
        created,
        ready,
        printable_status,
        run_strategy,
        conditions,
        state_change_requests,
        start_failure,
        observed_generation,
        desired_generation,
        instancetype_ref,
        preference_ref,
    } = new;
    let mut out = Map::new();
    changed(&mut out, "created", &old.created, created);
    changed(&mut out, "ready", &old.ready, ready);
    changed(&mut out, "printableStatus", &old.printable_status, printable_status);
    changed(&mut out, "runStrategy", &old.run_strategy, run_strategy);
    changed(&mut out, "conditions", &old.conditions, conditions);
    // Nothing asked for is no field at all.
    let requests = |r: &[_]| (!r.is_empty()).then(|| r.to_vec());
    let (were, are) = (requests(&old.state_change_requests), requests(state_change_requests));
    changed(&mut out, "stateChangeRequests", &were, &are);
    changed(&mut out, "startFailure", &old.start_failure, start_failure);
    changed(&mut out, "observedGeneration", &old.observed_generation, observed_generation);
    changed(&mut out, "desiredGeneration", &old.desired_generation, desired_generation);
    changed(&mut out, "instancetypeRef", &old.instancetype_ref, instancetype_ref);
    changed(&mut out, "preferenceRef", &old.preference_ref, preference_ref);
    out
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_field_of_a_status_that_changes_is_named_as_the_api_names_it() {
        let new = VmStatus {
            created: true,
            ready: true,
            printable_status: "x".into(),
            run_strategy: Some("x".into()),
            conditions: vec![Cond::new("x", true, "", "")],
            state_change_requests: vec![Default::default()],
            start_failure: Some(Default::default()),
            observed_generation: Some(1),
            desired_generation: Some(1),
            instancetype_ref: Some(Default::default()),
            preference_ref: Some(Default::default()),
        };
        let whole = serde_json::to_value(&new).unwrap();
        assert_eq!(Value::Object(diff(&VmStatus::default(), &new)), whole);
        assert!(diff(&new, &new).is_empty());
        let none = diff(&new, &VmStatus::default());
        assert_eq!(none.len(), whole.as_object().unwrap().len());
        assert_eq!((&none["stateChangeRequests"], &none["startFailure"]), (&Value::Null, &Value::Null));
    }
}
