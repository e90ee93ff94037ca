//! What a cell waits for, in words. Every wait has a name and an end.

use super::cell::{Told, Vm};
use crate::observe::{ContainerState, Phase};

impl Vm {
    /// What the cell waits for now, most specific first; empty where it is where it should be.
    pub fn waits(&self) -> Vec<String> {
        let mut w = vec![];
        let Some(vmi) = self.vmi.get() else {
            if let Some(vm) = self.vm.get() {
                if let Some((reason, message)) = self.failure(vm) {
                    w.push(format!("the VirtualMachineInstance cannot be created: {reason}: {message}"));
                }
                if let Some(t) = self.start_failure(vm).and_then(|f| f.retry_after_timestamp) {
                    w.push(format!("the next start after failed ones, not before {t}"));
                }
            }
            return w;
        };
        if let Some(c) = self.missing_claim(vmi) {
            w.push(format!("PersistentVolumeClaim {c}, which does not exist"));
        }
        match (vmi.phase, self.current_pod()) {
            (Phase::Unset | Phase::Pending, None) => w.push("its launcher pod to be created".into()),
            (Phase::Unset | Phase::Pending | Phase::Scheduling, Some(p)) => {
                if let Some(c) = &p.unscheduled {
                    w.push(format!("a node for its pod: {}", c.message));
                } else if let Some((reason, message)) = &p.image_error {
                    w.push(format!("an image: {reason}: {message}"));
                } else if p.node.is_none() {
                    w.push("a node for its pod".into());
                } else {
                    match &p.compute {
                        Some(ContainerState::Waiting { reason, .. }) => w.push(format!("its launcher: {reason}")),
                        Some(ContainerState::Running | ContainerState::Terminated { .. }) | None => {
                            w.push("its launcher to run".into());
                        }
                    }
                }
            }
            (Phase::Scheduled, _) => match (self.node_fact().and_then(|n| n.session), self.start_told()) {
                (None, _) => w.push("a session with the agent of its node".into()),
                (Some(_), None | Some(Told::Sent | Told::Lost(_))) => {
                    w.push("the node agent to take on the start".into())
                }
                (Some(_), Some(Told::Taken)) => w.push("the hypervisor to run the guest".into()),
                (Some(_), Some(Told::Refused(r, m, _))) => {
                    w.push(format!("a start that was refused: {}: {m}", r.name()))
                }
            },
            (Phase::Running, _) => {
                if let Some((reason, message)) = self.unreachable() {
                    w.push(format!("its node: {reason}: {message}"));
                } else if vmi.meta.deleting.is_some() {
                    w.push(format!("the guest to shut down, at most {} s", vmi.grace.0 / 1000));
                }
            }
            (Phase::Succeeded | Phase::Failed, Some(_)) if vmi.meta.deleting.is_some() => {
                w.push("its launcher pod to be removed".into());
            }
            (Phase::Scheduling | Phase::Succeeded | Phase::Failed | Phase::Unknown, None | Some(_)) => {}
        }
        w
    }
}
