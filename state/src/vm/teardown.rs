//! Finalizers: how long VM and VMI have to stay.

use super::{
    cell::{At, Vm},
    command::Command,
    plan::{VM_FINALIZER, without},
};
use crate::{
    object::Class,
    observe::{VmView, VmiView},
};
use api::names;
use serde_json::json;

impl Vm {
    /// The finalizers that a VMI can lose now.
    ///
    /// The VMI's own stays until the VMI has ended and no pod of it remains. The VM's stays until the VM's status holds what
    /// follows from this VMI's start and end (requests, crash-loop state, strategy): otherwise a controller that dies
    /// between the two would start it again.
    pub(super) fn loosened(&self, vmi: &VmiView) -> Vec<&'static str> {
        if vmi.meta.deleting.is_none() || !vmi.phase.is_final() || !self.pod_is_gone() {
            return vec![];
        }
        let recorded = match (&vmi.owner, self.vm.get()) {
            (Some(owner), Some(vm)) if *owner == vm.vm_uid() => self.is_recorded(vm),
            // Its VM is another one, so the one that owned it is gone.
            (Some(_), Some(_)) => true,
            (Some(_), None) => self.vm.is_absent(),
            (None, _) => true,
        };
        let both = [(names::FINALIZER_VMI, true), (names::FINALIZER_VM, recorded)];
        both.into_iter().filter(|(f, free)| *free && vmi.meta.has_finalizer(f)).map(|(f, _)| f).collect()
    }

    /// The VM's status holds what the next start depends on.
    fn is_recorded(&self, vm: &VmView) -> bool {
        vm.meta.deleting.is_some()
            || (*self.requests(vm) == vm.status.state_change_requests
                && self.start_failure(vm) == vm.status.start_failure
                && vm.status.run_strategy.as_deref() == Some(vm.strategy.name()))
    }

    /// The VMI names a VM that is not there: ask before its finalizer is taken off.
    pub(super) fn owner_must_be_confirmed(&self, vmi: &VmiView) -> bool {
        vmi.meta.deleting.is_some()
            && vmi.phase.is_final()
            && vmi.owner.is_some()
            && self.vm.get().is_none()
            && !self.vm.is_absent()
    }

    /// Adds the VM's finalizer where admission did not, takes it off where nothing is left. True where a patch was issued.
    pub(super) fn plan_vm_finalizer(&mut self, vm: &VmView, out: &mut Vec<Command>) -> bool {
        let has = vm.meta.has_finalizer(VM_FINALIZER);
        let deleting = vm.meta.deleting.is_some();
        let finalizers = if deleting && has {
            let left = self.own_vmi().is_none() && (self.vmi.is_absent() || self.vmi.get().is_some());
            if !left && !vm.meta.has_finalizer("orphan") {
                return false;
            }
            without(&vm.meta.finalizers, &[VM_FINALIZER])
        } else if !deleting && !has {
            let mut f = vm.meta.finalizers.clone();
            f.push(VM_FINALIZER.to_owned());
            f
        } else {
            return false;
        };
        let body = json!({"metadata": {
            "uid": vm.meta.uid, "resourceVersion": vm.meta.rv.to_string(), "finalizers": finalizers,
        }});
        let why = if deleting { "release" } else { "keep" };
        self.patch(At::Vm, self.vm_ref(), false, Class::Urgent, why, body, out);
        true
    }
}
