//! What a cell knows that a person would want to be told of: levels, from which a history is made by comparing.

use super::{cell::Vm, strategy::Wish, waits::Wait};
use crate::{
    NodeName, PodUid, Timestamp, Uid, VmiUid,
    domain::{Cause, DomainState},
    observe::{ContainerState, Phase, Request, Strategy},
    trace::Step,
};

/// What is known of a cell.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Facts {
    /// The VirtualMachine.
    pub vm: Option<VmFacts>,
    /// There is no VirtualMachine, for certain.
    pub no_vm: bool,
    /// The instance.
    pub vmi: Option<VmiFacts>,
    /// There is no instance, for certain.
    pub no_vmi: bool,
    /// Its launcher pod.
    pub pod: Option<PodFacts>,
    /// There is no pod of the instance any more, or there never was one, for certain.
    pub no_pod: bool,
    /// Its node, where that is known to be out of service.
    pub fenced: Option<NodeName>,
    /// The domain: state, why it is paused, accelerator.
    pub domain: Option<(DomainState, String, String)>,
    /// The guest agent answers.
    pub agent_connected: bool,
    /// How the domain ended, as far as is known.
    pub ended: Option<(Cause, String)>,
    /// When the running operation began.
    pub began: Option<Timestamp>,
    /// Its steps that ended.
    pub steps: Vec<(Step, Timestamp, Timestamp)>,
    /// The operation is a stop.
    pub stopping: bool,
    /// What the cell waits for.
    pub waits: Vec<Wait>,
}

/// What is known of a VirtualMachine.
#[derive(Debug, Clone, PartialEq)]
pub struct VmFacts {
    /// UID.
    pub uid: Uid,
    /// When it was made.
    pub created: Option<Timestamp>,
    /// Strategy.
    pub strategy: Strategy,
    /// Generation of its spec.
    pub generation: i64,
    /// Who changed the spec last.
    pub by: Option<String>,
    /// Since when it is being deleted.
    pub deleting: Option<Timestamp>,
    /// Requests.
    pub requests: Vec<Request>,
    /// The word that people read.
    pub printable: String,
    /// The strategy, a request or the end of the VM makes the controller end the instance.
    pub stops: bool,
}

/// What is known of an instance.
#[derive(Debug, Clone, PartialEq)]
pub struct VmiFacts {
    /// UID.
    pub uid: VmiUid,
    /// When it was made.
    pub created: Option<Timestamp>,
    /// A VirtualMachine controls it.
    pub owned: bool,
    /// Who made it, where that was no VM.
    pub by: Option<String>,
    /// Phase.
    pub phase: Phase,
    /// When each phase began, as written.
    pub phases: Vec<(Phase, Timestamp)>,
    /// Reason of a failure.
    pub reason: Option<String>,
    /// How it ended, in the words of its condition.
    pub words: String,
    /// Since when it is being deleted.
    pub deleting: Option<Timestamp>,
    /// Node.
    pub node: Option<NodeName>,
}

/// What is known of a launcher pod.
#[derive(Debug, Clone, PartialEq)]
pub struct PodFacts {
    /// UID.
    pub uid: PodUid,
    /// Name.
    pub name: String,
    /// Where it was placed.
    pub node: Option<NodeName>,
    /// The launcher runs.
    pub runs: bool,
    /// How it ended: reason and exit code.
    pub ended: Option<(String, i32)>,
    /// It is being deleted.
    pub deleting: bool,
}

impl Vm {
    /// What is known.
    pub fn known(&self) -> Facts {
        let vm = self.vm.get().map(|v| VmFacts {
            uid: v.meta.uid.clone(),
            created: v.meta.created,
            strategy: v.strategy,
            generation: v.generation,
            by: v.changed_by.clone(),
            deleting: v.meta.deleting,
            requests: v.status.state_change_requests.clone(),
            printable: v.status.printable_status.clone(),
            stops: v.meta.deleting.is_some() || self.wish(v) == Wish::Stop,
        });
        let vmi = self.vmi.get().map(|v| VmiFacts {
            uid: v.vmi_uid(),
            created: v.meta.created,
            owned: v.owner.is_some(),
            by: v.created_by.clone(),
            phase: v.phase,
            phases: v
                .status
                .phase_transition_timestamps
                .iter()
                .filter_map(|t| Some((Phase::parse(&t.phase), Timestamp::parse(&t.phase_transition_timestamp)?)))
                .collect(),
            reason: v.status.reason.clone(),
            words: super::waits::ending(v).unwrap_or_default(),
            deleting: v.meta.deleting,
            node: self.node_name(),
        });
        let pod = self.current_pod().map(|p| PodFacts {
            uid: p.pod_uid(),
            name: p.meta.name.clone(),
            node: p.node.clone(),
            runs: p.can_start(),
            ended: match &p.compute {
                Some(ContainerState::Terminated { exit, reason, .. }) => Some((reason.clone(), *exit)),
                Some(ContainerState::Running | ContainerState::Waiting { .. }) | None => {
                    p.ended().then(|| (p.reason.clone(), 0))
                }
            },
            deleting: p.meta.deleting.is_some(),
        });
        let verdict = self.vmi.get().and_then(|v| self.verdict(v));
        Facts {
            fenced: self.node_fact().filter(|n| n.fenced.is_some()).map(|n| n.node.clone()),
            no_vm: self.vm.is_absent(),
            vm,
            no_vmi: self.vmi.is_absent(),
            no_pod: vmi.is_some() && self.pod_is_gone(),
            vmi,
            pod,
            domain: self.domain().map(|d| (d.state, d.paused_reason.clone(), d.accelerator.clone())),
            agent_connected: self.domain().is_some_and(|d| d.guest.agent_connected),
            ended: verdict.map(|v| (v.cause, v.message)),
            began: self.marks.began(),
            steps: self.marks.ended(),
            stopping: self.marks.is_stopping(),
            waits: self.waits(),
        }
    }
}
