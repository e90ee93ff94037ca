//! The order of decisions of one step. Each part looks at what is observed and issues at most one command an object; an
//! object with a command on its way is left alone until that has ended.

use super::{
    cell::{At, Vm, What},
    command::{Command, Note, Patch, Recipe, Source},
    revision::{generation_of_revision_of, revision_name},
    strategy::Wish,
    waits::kept,
};
use crate::{
    Millis, Timestamp, VmiUid,
    instancetype::Role,
    object::{Class, CommandId, Kind, ObjectRef},
    observe::{Phase, PodView, Strategy, VmView, VmiView},
    trace::{Awaited, Cause, Relation, Step},
};
use api::names;
use serde::Serialize;
use serde_json::{Map, Value, json};

/// How long a difference that nobody waits for may stand before it is written.
pub const LAZY: Millis = Millis::secs(1);

/// Notes that a cell remembers so as not to repeat them.
const NOTES: usize = 32;

impl Vm {
    pub(super) fn plan(&mut self) -> Vec<Command> {
        let mut out = vec![];
        let before = self.armed.filter(|t| *t > self.now);
        self.armed = None;
        self.mark();
        for (kind, warning, reason, text) in std::mem::take(&mut self.tell) {
            let about =
                if kind == Kind::VirtualMachine && self.vm.get().is_some() { self.vm_ref() } else { self.vmi_ref() };
            // About nothing that is there: nobody would find it.
            if !about.uid.is_empty() {
                self.note(about, warning, &reason, &text, &mut out);
            }
        }
        self.plan_patterns(&mut out);
        self.plan_existence(&mut out);
        self.plan_revision(&mut out);
        self.plan_pod(&mut out);
        self.plan_pod_annotations(&mut out);
        self.plan_vmi(&mut out);
        self.plan_instructions(&mut out);
        self.plan_acknowledgements(&mut out);
        self.plan_vm(&mut out);
        self.note_kept(&mut out);
        if self.armed != before
            && let Some(at) = self.armed
        {
            out.push(Command::Wake { at });
        }
        out
    }

    /// A step is wanted at this time, whatever else happens.
    pub(super) fn want_wake(&mut self, at: Timestamp) {
        self.armed = Some(self.armed.map_or(at, |t| t.min(at)));
    }

    pub(super) fn confirm(&mut self, at: At, out: &mut Vec<Command>) {
        let target = match at {
            At::Vm => self.vm_ref(),
            At::Vmi => self.vmi_ref(),
            At::Pod => self.pod_ref(),
            At::Revision | At::Pattern(_) | At::Agent => return,
        };
        let id = self.issue(at, What::Confirm);
        out.push(Command::Confirm { id, target });
    }

    /// The VMI: shall it be, or go?
    fn plan_existence(&mut self, out: &mut Vec<Command>) {
        if !self.vmi.is_free(self.now) {
            if let Some(at) = self.vmi.free_at(self.now) {
                self.want_wake(at);
            }
            return;
        }
        if self.vmi.is_doubted() {
            return self.confirm(At::Vmi, out);
        }
        let Some(vm) = self.vm.shared() else { return };
        if self.vm.is_doubted() {
            return;
        }
        if vm.meta.deleting.is_some() {
            let orphan = vm.meta.has_finalizer("orphan");
            let stands = self.own_vmi().is_some_and(|v| v.meta.deleting.is_none());
            if stands && !orphan {
                self.delete_vmi(out);
            } else if self.vmi.get().is_none() && !self.vmi.is_absent() && !orphan {
                self.confirm(At::Vmi, out);
            }
            return;
        }
        // A Stop for a VMI that is nowhere to be seen stays at the head of the queue until that is certain.
        let stop = self.requests(&vm).first().filter(|r| r.action == "Stop").map(|r| r.uid.clone().unwrap_or_default());
        if let Some(uid) = stop.filter(|uid| self.vmi.get().is_none_or(|v| v.meta.uid.0 != *uid)) {
            self.looks_for = Some(uid.into());
            return self.confirm(At::Vmi, out);
        }
        match self.wish(&vm) {
            Wish::Run { paused } if self.vmi.get().is_none() && self.may_create(&vm) => {
                let revision = revision_name(vm.meta.uid.as_str(), vm.generation);
                let cause = self
                    .requests(&vm)
                    .first()
                    .and_then(|r| r.data.get(names::ANN_TRACEPARENT))
                    .map(|t| t.as_str().into());
                // Timestamps of objects have whole seconds: never earlier than the machine was made, never later than it was seen.
                let first = !vm.status.created && vm.generation == 1 && cause.is_none() && !self.marks.running();
                let made = vm.meta.created.filter(|_| first);
                let began = made.map_or(self.now, |t| t.after(Millis(999)).min(self.now));
                self.begin_marks(began);
                let recipe = Recipe::Vmi {
                    cause,
                    began: Some(began),
                    vm: vm.vm_uid(),
                    revision,
                    paused,
                    at: self.now,
                    instancetype: Self::pattern_revision(&vm, Role::Instancetype),
                    preference: Self::pattern_revision(&vm, Role::Preference),
                };
                let source = Source { object: self.vm_ref(), rv: vm.meta.rv };
                let target = self.vmi_ref();
                let id = self.issue(At::Vmi, What::CreateVmi);
                out.push(Command::Create { id, recipe, source, target });
            }
            // Made from a newer machine than the one that we see: the wish may be an old one.
            Wish::Stop if self.is_behind(&vm) => self.vm.doubt(),
            Wish::Stop => {
                // What follows from this VMI (a rerun, a failed start) must be in the VM's status before it goes.
                let rerun_pending =
                    vm.strategy == Strategy::RerunOnFailure && *self.requests(&vm) != vm.status.state_change_requests;
                if !rerun_pending && self.start_failure(&vm) == vm.status.start_failure {
                    self.delete_vmi(out);
                }
            }
            Wish::NotBefore(t) => self.want_wake(t),
            Wish::Run { .. } | Wish::Stay | Wish::Unhalt | Wish::Bad(_) => {}
        }
        self.plan_adoption(out);
    }

    /// The VMI was made from a later generation of this very VM. (An adopted one was made from another.)
    fn is_behind(&self, vm: &VmView) -> bool {
        let recorded = self.own_vmi().and_then(|v| v.status.virtual_machine_revision_name.as_deref());
        recorded.and_then(|n| generation_of_revision_of(n, vm)).is_some_and(|g| g > vm.generation)
    }

    /// The VM is as we know it and cannot vanish under its VMI, and what it names is recorded.
    fn may_create(&self, vm: &VmView) -> bool {
        vm.meta.has_finalizer(VM_FINALIZER) && !self.vm.in_flight() && self.patterns_are_known(vm)
    }

    /// A VMI of the VM's name that nobody controls becomes the VM's (as after a deletion that left it as an orphan). The VM
    /// may be on its way out without our knowing, so it is read live before.
    fn plan_adoption(&mut self, out: &mut Vec<Command>) {
        let Some(vm) = self.vm.shared() else { return };
        let Some(vmi) = self.vmi.shared().filter(|v| self.is_adoptable(&vm, v)) else { return };
        if self.vmi.in_flight() || !self.vm.is_free(self.now) {
            return;
        }
        if self.vm_read != Some(vm.meta.rv) {
            return self.confirm(At::Vm, out);
        }
        let mut finalizers = vmi.meta.finalizers.clone();
        if !vmi.meta.has_finalizer(VM_FINALIZER) {
            finalizers.push(VM_FINALIZER.to_owned());
        }
        let owner =
            crate::render::owner("kubevirt.io/v1", Kind::VirtualMachine.name(), &vm.meta.name, vm.meta.uid.as_str());
        let body = json!({"metadata": {
            "uid": vmi.meta.uid, "resourceVersion": vmi.meta.rv.to_string(),
            "ownerReferences": [owner], "finalizers": finalizers,
        }});
        self.patch(At::Vmi, self.vmi_ref(), false, Class::Urgent, "adopt", body, out);
    }

    /// Nobody controls the VMI, and both stay.
    pub(super) fn is_adoptable(&self, vm: &VmView, vmi: &VmiView) -> bool {
        vmi.owner.is_none() && !vmi.foreign && vm.meta.deleting.is_none() && vmi.meta.deleting.is_none()
    }

    pub(super) fn delete_vmi(&mut self, out: &mut Vec<Command>) {
        let target = self.vmi_ref();
        let id = self.issue(At::Vmi, What::Delete);
        self.marks.asks(Some(self.now));
        out.push(Command::Delete { id, target });
    }

    /// Issues a patch unless the very same was just applied without effect.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn patch(
        &mut self,
        at: At,
        target: ObjectRef,
        status: bool,
        class: Class,
        why: &str,
        body: Value,
        out: &mut Vec<Command>,
    ) -> Option<CommandId> {
        let now = self.now;
        let news = match at {
            At::Vm => self.vm.writes(&body, now),
            At::Vmi => self.vmi.writes(&body, now),
            At::Pod => self.pod.writes(&body, now),
            At::Revision | At::Pattern(_) | At::Agent => true,
        };
        if !news {
            let free = match at {
                At::Vm => self.vm.free_at(now),
                At::Vmi => self.vmi.free_at(now),
                At::Pod => self.pod.free_at(now),
                At::Revision | At::Pattern(_) | At::Agent => None,
            };
            if let Some(t) = free {
                self.want_wake(t);
            }
            return None;
        }
        self.lazy.remove(&at);
        let id = self.issue(at, What::Write);
        out.push(Command::Patch { id, patch: Patch { target, status, class, why: why.into(), body } });
        Some(id)
    }

    /// Whether a difference of this class may be written now. A lazy one has to have stood for a second.
    pub(super) fn is_due(&mut self, at: At, class: Class) -> bool {
        if class == Class::Urgent {
            return true;
        }
        let since = *self.lazy.entry(at).or_insert(self.now);
        let due = since.after(LAZY);
        if self.now < due {
            self.want_wake(due);
        }
        self.now >= due
    }

    pub(super) fn note(
        &mut self,
        about: ObjectRef,
        warning: bool,
        reason: &str,
        message: &str,
        out: &mut Vec<Command>,
    ) {
        if self.noted.len() >= NOTES {
            self.noted.clear();
        }
        if self.noted.insert((about.uid.clone(), format!("{reason} {message}"))) {
            out.push(Command::Note(Note { about, warning, reason: reason.into(), message: message.into() }));
        }
    }

    /// Events about objects that finalizers of others keep: no condition tells it.
    fn note_kept(&mut self, out: &mut Vec<Command>) {
        let vm = self.vm.get().and_then(|v| kept(Kind::VirtualMachine.name(), &v.meta)).map(|w| (self.vm_ref(), w));
        let vmi = self.vmi.get().and_then(|v| kept(Kind::VirtualMachineInstance.name(), &v.meta));
        for (about, wait) in vm.into_iter().chain(vmi.map(|w| (self.vmi_ref(), w))) {
            self.note(about, true, wait.name().1, &wait.message(), out);
        }
    }

    fn is_new_and_bare(&self, vmi: &VmiView) -> bool {
        vmi.owner.is_none() && self.vm.get().is_none() && vmi.phase <= Phase::Pending && vmi.meta.deleting.is_none()
    }

    /// Notes which boundaries of the running operation have been passed.
    fn mark(&mut self) {
        let now = self.now;
        // The start of an instance that no machine made begins with its creation, which somebody else has done.
        if let Some(made) =
            self.vmi.get().filter(|v| !self.marks.running() && self.is_new_and_bare(v)).map(|v| v.meta.created)
        {
            self.begin_marks(made.map_or(now, |t| t.after(Millis(999)).min(now)));
            if let Some(set) = self.vmi.get().and_then(|v| v.made_by.as_deref()) {
                let traceparent = set.to_owned();
                self.marks.caused(Cause { relation: Relation::Set, traceparent, instance: VmiUid::default() });
            }
            self.marks.reached(Step::Create, now);
        }
        let Some(vmi) = self.vmi.shared() else {
            if self.vmi.is_absent() {
                self.marks.gone(now);
            }
            return;
        };
        if vmi.meta.deleting.is_none() && !self.vmi.in_flight() {
            self.marks.asks(None);
        }
        let pod = self.shared_pod();
        let facts = [
            (Step::Create, true),
            (Step::Place, pod.as_ref().is_some_and(|p| p.node.is_some())),
            (Step::Prepare, pod.as_ref().is_some_and(|p| p.can_start())),
            (Step::Authorise, !vmi.status.active_pods.is_empty()),
            (Step::Boot, self.domain().is_some_and(|d| d.state == crate::domain::DomainState::Running)),
            (Step::Publish, vmi.phase == Phase::Running),
            (Step::GuestAgent, self.domain().is_some_and(|d| d.guest.agent_connected)),
            (Step::Shutdown, vmi.meta.deleting.is_some() && vmi.phase.is_final()),
        ];
        let reign = self.config.reign;
        if vmi.meta.deleting.is_none() && !self.marks.running() {
            // Somebody else has begun it. Where it is over, that one has told of it, if it lived to see it.
            let published = vmi.reached(Phase::Running);
            let first = self.domain().and_then(|d| d.guest.agent_first);
            // What the guest says is of the start, and may come long after it: to whoever leads then.
            let unheard = || match (self.domain(), first) {
                (Some(_), Some(at)) => reign.missed(at) || at > reign.since,
                (Some(d), None) => !d.guest.agent_connected,
                (None, _) => false,
            };
            if vmi.phase < Phase::Running
                || (vmi.phase == Phase::Running && (published.is_some_and(|at| reign.missed(at)) || unheard()))
            {
                let mut passed: Vec<_> = facts
                    .iter()
                    .filter(|(step, passed)| *passed && *step <= Step::Publish)
                    .map(|(step, _)| (*step, passed_at(*step, &vmi, pod.as_deref())))
                    .collect();
                passed.extend(first.filter(|at| reign.missed(*at)).map(|at| (Step::GuestAgent, Some(at))));
                self.marks.begin(vmi.began.unwrap_or(now).min(now));
                self.marks.resume(&passed, reign, now);
                self.marks.concerns(&vmi.vmi_uid());
                if let Some(at) = first.filter(|at| *at > reign.since) {
                    self.marks.reached(Step::GuestAgent, at.min(now));
                }
            }
            return;
        }
        if let Some(since) = vmi.meta.deleting.filter(|_| !self.marks.is_stopping()) {
            let found = !self.marks.running() && since < reign.since;
            self.marks.begin_stop(if found { since } else { now }, self.asked_to_stop(&vmi));
            self.marks.caused(self.past(&vmi));
            if found {
                let down = vmi.phase.is_final().then(|| (Step::Shutdown, vmi.reached(vmi.phase)));
                self.marks.resume(down.as_slice(), reign, now);
            }
        }
        self.marks.concerns(&vmi.vmi_uid());
        self.marks.waits(self.awaited(&vmi), now);
        for (step, passed) in facts {
            if passed && (step.operation() == "stop") == self.marks.is_stopping() {
                self.marks.reached(step, now);
            }
        }
        if vmi.phase.is_final() {
            let why = vmi.status.reason.as_deref().filter(|r| !r.is_empty()).unwrap_or(vmi.phase.name());
            self.marks.fail(why, now);
        }
    }

    /// An operation begins; while nobody led, it waited for that.
    fn begin_marks(&mut self, at: Timestamp) {
        self.marks.begin(at);
        let since = self.config.reign.since;
        if since > at {
            self.marks.waited(Awaited::Leader, at, since);
        }
    }

    /// What an instance that goes away will be to the next one.
    fn past(&self, vmi: &VmiView) -> Cause {
        let relation = match vmi.phase {
            Phase::Failed => Relation::Failure,
            Phase::Succeeded => Relation::End,
            Phase::Unset | Phase::Pending | Phase::Scheduling | Phase::Scheduled | Phase::Running | Phase::Unknown => {
                Relation::Restart
            }
        };
        let traceparent = vmi.traceparent.clone().unwrap_or_default();
        Cause { relation, traceparent, instance: vmi.vmi_uid() }
    }

    /// Trace context of the request by which this instance is to stop.
    fn asked_to_stop(&self, vmi: &VmiView) -> Option<String> {
        let asked = self.vm.get()?.status.state_change_requests.iter();
        let mut of_it = asked.filter(|r| r.action == "Stop" && r.uid.as_deref() == Some(vmi.meta.uid.as_str()));
        of_it.find_map(|r| r.data.get(names::ANN_TRACEPARENT)).cloned()
    }

    /// Trace context of the operation that runs, in text form.
    pub fn traceparent(&self) -> Option<&str> {
        let of_vm = self.vm.get().and_then(|v| v.traceparent.as_deref());
        let of_vmi = self.vmi.get().and_then(|v| v.traceparent.as_deref());
        // A start belongs to the write that its instance was made from, a stop to its request or the newest write.
        match self.marks.is_stopping() {
            true => self.marks.cause().or(of_vm).or(of_vmi),
            false => of_vmi.or(of_vm),
        }
    }

    /// Steps that ended since the last call, for the driver to make spans of.
    pub fn take_steps(&mut self) -> Vec<crate::trace::Finished> {
        let parent = self.traceparent().map(str::to_owned);
        match parent {
            Some(p) => self.marks.take(&p),
            None => vec![],
        }
    }
}

/// When a step was passed, as far as the objects tell it.
fn passed_at(step: Step, vmi: &VmiView, pod: Option<&PodView>) -> Option<Timestamp> {
    match step {
        Step::Create => vmi.meta.created,
        Step::Place => pod?.placed,
        Step::Prepare => pod?.started,
        Step::Authorise => vmi.reached(Phase::Scheduled),
        Step::Publish => vmi.reached(Phase::Running),
        Step::Boot | Step::GuestAgent | Step::Shutdown | Step::Teardown => None,
    }
}

/// Whether nothing has to be written. (What was never copied has not been changed.)
pub(super) fn is_same<T: PartialEq>(old: &T, new: &T) -> bool {
    std::ptr::eq(old, new) || old == new
}

/// Names a field of a merge patch where it differs.
pub(super) fn changed<T: PartialEq + Serialize>(patch: &mut Map<String, Value>, field: &str, old: &T, new: &T) {
    // What is in a status is data that always serialises.
    if old != new
        && let Ok(value) = serde_json::to_value(new)
    {
        patch.insert(field.into(), value);
    }
}

/// The finalizers of an object without ours.
pub(super) fn without(finalizers: &[String], drop: &[&str]) -> Vec<String> {
    finalizers.iter().filter(|f| !drop.contains(&f.as_str())).cloned().collect()
}

/// The finalizer that keeps a VM until its VMI is gone.
pub(super) const VM_FINALIZER: &str = names::FINALIZER_VM;
