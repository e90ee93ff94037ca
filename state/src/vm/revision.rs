//! ControllerRevisions: what a VMI was made from, and what follows from it when the VM changes under a running VMI.
//!
//! A revision's content is looked at only where it decides something: when the VM's generation has moved on from the VMI's.
//! Then it is read once, and forgotten when both agree again. A controller that starts anew does the same.

use super::{
    cell::{At, Vm, What},
    command::{Command, Recipe, Source},
};
use crate::{
    object::Kind,
    observe::{Phase, VmView, VmiView},
};

/// How the VM's template stands to the one that its live VMI was made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Drift {
    /// There is no live VMI, or nothing changed since it was made.
    None,
    /// Something of the VM changed; whether it was the template is not known yet (or never will be).
    Unknown,
    /// The template is the same.
    Same,
    /// Only its labels or annotations differ, which the next VMI gets and this one does without.
    Metadata,
    /// These parts of its spec differ.
    Spec(Vec<String>),
}

impl Vm {
    /// Name of the revision whose content decides something now.
    pub(super) fn revision_that_matters(&self) -> Option<String> {
        let (vm, vmi) = (self.vm.get()?, self.own_vmi()?);
        let name = vmi.status.virtual_machine_revision_name.as_deref()?;
        let live = vmi.meta.deleting.is_none() && !vmi.phase.is_final();
        // Generations of two VMs (the VMI may have been another one's) say nothing about each other.
        let same = vmi.vm_generation == Some(vm.generation) && generation_of_revision_of(name, vm).is_some();
        (live && !same).then(|| name.to_owned())
    }

    pub(super) fn drift(&self, vm: &VmView) -> Drift {
        if self.revision_that_matters().is_none() {
            return Drift::None;
        }
        let Some(recorded) = self.revision.get() else { return Drift::Unknown };
        let changed = recorded.template.changed(&vm.template);
        match (changed.is_empty(), recorded.template == vm.template) {
            (true, true) => Drift::Same,
            (true, false) => Drift::Metadata,
            (false, _) => Drift::Spec(changed.into_iter().map(str::to_owned).collect()),
        }
    }

    /// The VM's generation, where the VMI's annotation should follow it because the template is the same.
    pub(super) fn generation_bump(&self, vmi: &VmiView) -> Option<i64> {
        let vm = self.vm.get()?;
        (self.drift(vm) == Drift::Same && vmi.vm_generation != Some(vm.generation)).then_some(vm.generation)
    }

    /// The revision that records the spec from which the VMI is made, the end of older ones, and a look into the one that
    /// matters.
    pub(super) fn plan_revision(&mut self, out: &mut Vec<Command>) {
        let matters = self.revision_that_matters();
        if matters.is_none() {
            self.revision.forget();
        }
        let Some(vm) = self.vm.shared() else { return };
        if vm.meta.deleting.is_some() {
            return;
        }
        if !self.revision.is_free(self.now) {
            if let Some(at) = self.revision.free_at(self.now) {
                self.want_wake(at);
            }
            return;
        }
        let recorded = self.own_vmi().and_then(|v| v.status.virtual_machine_revision_name.clone());
        let of = |g| revision_name(vm.meta.uid.as_str(), g);
        let current = recorded.as_deref().is_some_and(|n| generation_of_revision_of(n, &vm) == Some(vm.generation));
        if current && self.own_vmi().is_some_and(|v| v.phase >= Phase::Scheduled) {
            self.revisions.insert(vm.generation);
        }
        let creating = self.flights.values().any(|(_, w)| *w == What::CreateVmi);
        let wanted = creating || current;
        if wanted && !self.revisions.contains(&vm.generation) {
            let recipe = Recipe::Revision { vm: vm.vm_uid(), generation: vm.generation };
            let source = Source { object: self.vm_ref(), rv: vm.meta.rv };
            let target = self.reference(Kind::ControllerRevision, of(vm.generation), Default::default());
            let id = self.issue(At::Revision, What::CreateRevision(vm.generation));
            out.push(Command::Create { id, recipe, source, target });
            return;
        }
        if let Some(name) = matters
            && self.revision.get().is_none()
            && !self.revision.is_absent()
        {
            let target = self.reference(Kind::ControllerRevision, name.clone(), Default::default());
            let id = self.issue(At::Revision, What::ReadRevision(name));
            out.push(Command::Confirm { id, target });
            return;
        }
        let made_from = recorded.as_deref().and_then(|n| generation_of_revision_of(n, &vm));
        self.revisions.extend(made_from);
        let old = self.revisions.iter().copied().find(|g| *g < vm.generation && made_from != Some(*g));
        if let Some(g) = old.filter(|_| self.own_vmi().is_some_and(|v| v.meta.deleting.is_none())) {
            let target = self.reference(Kind::ControllerRevision, of(g), Default::default());
            let id = self.issue(At::Revision, What::DeleteRevision(g));
            out.push(Command::Delete { id, target });
        }
    }
}

/// Name of the ControllerRevision of a VM's generation.
pub fn revision_name(vm_uid: &str, generation: i64) -> String {
    format!("revision-start-vm-{vm_uid}-{generation}")
}

/// Generation in a revision's name.
pub fn generation_of_revision(name: &str) -> Option<i64> {
    name.strip_prefix("revision-start-vm-")?.rsplit_once('-')?.1.parse().ok()
}

/// The same, where it is a revision of this VM: [`revision_name`] backwards.
pub(super) fn generation_of_revision_of(name: &str, vm: &VmView) -> Option<i64> {
    let digits = name.strip_prefix("revision-start-vm-")?.strip_prefix(vm.meta.uid.as_str())?.strip_prefix('-')?;
    // As it would be written: no plus, no zeros before it.
    let written =
        matches!(digits.as_bytes(), [b'1'..=b'9', rest @ ..] if rest.iter().all(u8::is_ascii_digit)) || digits == "0";
    digits.parse().ok().filter(|_| written)
}
