//! State of a Vm cell, and folding.

use super::command::{ClusterConfig, Command, Fact, Input, Interest, NodeFact, Report, Sight};
use super::pattern::Search;
use crate::{
    Event, InstructionId, Key, Machine, NodeName, PodUid, ResourceVersion, Timestamp, Uid, VmiUid,
    domain::{AckResult, Domain, DomainState, Outcome, RefusalReason},
    instancetype::Role,
    launcher_pod_name,
    object::{CommandId, Kind, ObjectRef, Refusal, Settled},
    observe::{ClaimView, Object, Phase, PodView, RevisionView, VmView, VmiView},
    slot::{Folded, Slot},
    trace::Marks,
};
use litemap::LiteMap;
use serde::{Deserialize, Serialize};
use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// Which slot a command is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum At {
    Vm,
    Vmi,
    Pod,
    Revision,
    Pattern(Role),
    Agent,
}

/// What a command was.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum What {
    CreateVmi,
    CreatePod,
    CreateRevision(i64),
    DeleteRevision(i64),
    ReadRevision(String),
    Write,
    Delete,
    Confirm,
    Instruct(InstructionId),
    Acknowledge(PodUid, u64),
}

/// What became of an instruction in the session that carried it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Told {
    Sent,
    Taken,
    Refused(RefusalReason, String, Timestamp),
    Lost(Timestamp),
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Inventory {
    pub session: u64,
    pub complete: bool,
    pub boot_id: String,
}

/// One VirtualMachine or bare VMI.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Vm {
    pub(super) key: Key,
    pub(super) now: Timestamp,
    pub(super) config: ClusterConfig,
    pub(super) vm: Slot<VmView>,
    pub(super) vmi: Slot<VmiView>,
    /// Version of the VM that was last read live.
    pub(super) vm_read: Option<ResourceVersion>,
    /// The VMI that is to be stopped and was not to be seen when the VMI was asked for.
    #[serde(default)]
    pub(super) looks_for: Option<Uid>,
    /// What the API server last refused to do with the VMI.
    pub(super) vmi_refused: Option<What>,
    /// Pods by UID; a pod may be seen before its VMI, and an old VMI's pod may linger.
    pub(super) pods: LiteMap<PodUid, Arc<PodView>>,
    /// The name of the current VMI's pod: flights, confirmed absence, tombstones.
    pub(super) pod: Slot<PodView>,
    /// The revision that the current VMI names, while it matters.
    pub(super) revision: Slot<RevisionView>,
    pub(super) revisions: BTreeSet<i64>,
    /// What the VM names and has no record of yet.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) patterns: BTreeMap<Role, Search>,
    pub(super) claims: LiteMap<String, Option<ClaimView>>,
    pub(super) node: LiteMap<NodeName, NodeFact>,
    /// The newest word about each pod's domain, and the session that brought it.
    pub(super) domains: LiteMap<PodUid, (Option<u64>, Arc<Domain>)>,
    pub(super) outcomes: LiteMap<PodUid, (NodeName, Outcome)>,
    pub(super) acked: BTreeSet<(PodUid, u64)>,
    pub(super) inventory: LiteMap<NodeName, Inventory>,
    /// The boot by which the node of the current VMI was heard last.
    pub(super) boot: Option<String>,
    pub(super) told: LiteMap<InstructionId, (u64, Told)>,
    pub(super) flights: BTreeMap<CommandId, (At, What)>,
    /// Commands that nobody needs any more and that are not answered yet. As long as there is one this cell stays: its answer
    /// would come to the next cell of the name, which counts from one again.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(super) owed: BTreeSet<CommandId>,
    pub(super) next_id: u64,
    pub(super) lazy: BTreeMap<At, Timestamp>,
    pub(super) hold_running: Option<Timestamp>,
    pub(super) unsaid_since: Option<Timestamp>,
    pub(super) noted: BTreeSet<(Uid, String)>,
    /// To be told to people with the next plan.
    pub(super) tell: Vec<(Kind, bool, Cow<'static, str>, String)>,
    pub(super) armed: Option<Timestamp>,
    pub(super) marks: Marks,
}

impl Vm {
    /// An empty cell.
    pub fn new(key: Key) -> Self {
        Self {
            key,
            now: Timestamp::default(),
            config: ClusterConfig::default(),
            vm: Slot::default(),
            vmi: Slot::default(),
            vm_read: None,
            looks_for: None,
            vmi_refused: None,
            pods: LiteMap::new(),
            pod: Slot::default(),
            revision: Slot::default(),
            revisions: BTreeSet::new(),
            patterns: BTreeMap::new(),
            claims: LiteMap::new(),
            node: LiteMap::new(),
            domains: LiteMap::new(),
            outcomes: LiteMap::new(),
            acked: BTreeSet::new(),
            inventory: LiteMap::new(),
            boot: None,
            told: LiteMap::new(),
            flights: BTreeMap::new(),
            owed: BTreeSet::new(),
            next_id: 0,
            lazy: BTreeMap::new(),
            hold_running: None,
            unsaid_since: None,
            noted: BTreeSet::new(),
            tell: vec![],
            armed: None,
            marks: Marks::default(),
        }
    }

    /// Its key.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Sentences that must hold of an instance and do not, as far as agents and the API tell: at most one domain of it lives, and at most one
    /// of its pods has not ended.
    pub fn violated(&self) -> impl Iterator<Item = &'static str> {
        let uid = self.vmi.get().map(|v| &v.meta.uid);
        let lives = |d: &Domain| match d.state {
            DomainState::Starting | DomainState::Running | DomainState::Paused | DomainState::ShuttingDown => true,
            // Whether there is still somebody is not known.
            DomainState::Absent | DomainState::Deaf | DomainState::Stopped => false,
        };
        let domains =
            self.domains.values().filter(|(_, d)| uid.is_some_and(|u| u.as_str() == d.vmi.as_str()) && lives(d));
        let pods = self.pods.values().filter(|p| uid.is_some_and(|u| u.as_str() == p.vmi.as_str()) && !p.ended());
        let (domains, pods) = (domains.count(), pods.count());
        (domains > 1).then_some("one-domain").into_iter().chain((pods > 1).then_some("one-pod"))
    }

    /// Phase of the instance; [`Phase::Unset`] where there is none.
    pub fn phase(&self) -> Phase {
        self.vmi.get().map_or(Phase::Unset, |v| v.phase)
    }

    /// Nothing is left of it: no object, nothing in flight. The driver may drop it.
    pub fn is_empty(&self) -> bool {
        self.vm.get().is_none()
            && self.vmi.get().is_none()
            && self.pods.is_empty()
            && self.flights.is_empty()
            && self.owed.is_empty()
            && self.outcomes.is_empty()
    }

    /// What it wants to be told of.
    pub fn interests(&self) -> BTreeSet<Interest> {
        let mut wants = BTreeSet::new();
        let claims = match (self.vmi.get(), self.vm.get()) {
            (Some(vmi), _) if vmi.phase.is_final() => &[][..],
            (Some(vmi), _) => &vmi.claims[..],
            (None, Some(vm)) => &vm.claims[..],
            (None, None) => &[][..],
        };
        wants.extend(claims.iter().cloned().map(Interest::Claim));
        wants.extend(self.node_name().map(Interest::Node));
        // The node of a domain that is over must still hear that its outcome is recorded.
        wants.extend(self.outcomes.values().map(|(node, _)| Interest::Node(node.clone())));
        wants
    }

    /// The node of the current VMI.
    pub(super) fn node_name(&self) -> Option<NodeName> {
        self.node_called().map(NodeName::from)
    }

    fn node_called(&self) -> Option<&str> {
        let recorded = self.vmi.get()?.status.node_name.as_deref().filter(|n| !n.is_empty());
        recorded.or_else(|| self.current_pod()?.node.as_ref().map(NodeName::as_str))
    }

    /// The fact of the current VMI's node.
    pub(super) fn node_fact(&self) -> Option<&NodeFact> {
        self.node.get(self.node_called()?)
    }

    /// The current VMI's launcher pod, as last seen.
    pub(super) fn current_pod(&self) -> Option<&PodView> {
        let vmi = &self.vmi.get()?.meta.uid;
        self.pods.values().map(Arc::as_ref).find(|p| p.vmi.as_str() == vmi.as_str())
    }

    /// The same, to be held while the cell changes.
    pub(super) fn shared_pod(&self) -> Option<Arc<PodView>> {
        let uid = self.current_pod()?.pod_uid();
        self.pods.get(&uid).cloned()
    }

    /// UID of the launcher that may run, or may have run, the current VMI's domain.
    pub(super) fn launcher(&self) -> Option<&str> {
        let active = self.vmi.get()?.status.active_pods.keys().next();
        active.map(String::as_str).or_else(|| self.current_pod().map(|p| p.meta.uid.as_str()))
    }

    /// The newest report about the current launcher.
    pub(super) fn domain(&self) -> Option<&Domain> {
        self.domains.get(self.launcher()?).map(|(_, d)| d.as_ref())
    }

    /// The inventory of the session that stands with the current VMI's node, and the word about the current launcher that this
    /// session brought.
    pub(super) fn heard_now(&self) -> Option<(&Inventory, Option<&Domain>)> {
        let fact = self.node_fact()?;
        let session = fact.session;
        let inventory = self.inventory.get(&fact.node).filter(|i| Some(i.session) == session)?;
        let word = self.launcher().and_then(|p| self.domains.get(p)).filter(|(s, _)| *s == session);
        Some((inventory, word.map(|(_, d)| d.as_ref())))
    }

    /// The pod of the current VMI is known to be gone, or never to have been.
    pub(super) fn pod_is_gone(&self) -> bool {
        if self.current_pod().is_some() {
            return false;
        }
        let active = self.vmi.get().and_then(VmiView::active_pod);
        self.pod.is_absent() || active.is_some_and(|p| self.pod.is_tombstoned(&Uid(p.0)))
    }

    pub(super) fn vm_ref(&self) -> ObjectRef {
        self.reference(Kind::VirtualMachine, self.key.name.clone(), self.vm.uid())
    }

    pub(super) fn vmi_ref(&self) -> ObjectRef {
        self.reference(Kind::VirtualMachineInstance, self.key.name.clone(), self.vmi.uid())
    }

    pub(super) fn pod_ref(&self) -> ObjectRef {
        let uid = self.current_pod().map(|p| p.meta.uid.clone()).unwrap_or_default();
        let name = match (self.current_pod(), self.vmi.get()) {
            (Some(p), _) => p.meta.name.clone(),
            (None, Some(vmi)) => launcher_pod_name(&self.key.name, &vmi.vmi_uid()),
            (None, None) => String::new(),
        };
        self.reference(Kind::Pod, name, uid)
    }

    pub(super) fn reference(&self, kind: Kind, name: String, uid: Uid) -> ObjectRef {
        ObjectRef { kind, namespace: self.key.namespace.clone(), name, uid }
    }

    // --- folding ---

    fn fold(&mut self, input: &Input) {
        match input {
            Input::Observed(Sight::Present(o)) => self.saw(o, false),
            Input::Observed(Sight::Gone(r)) => self.lost(r),
            Input::Observed(Sight::Vanished(r)) => match r.kind {
                Kind::VirtualMachine if self.vm.uid() == r.uid => self.vm.doubt(),
                Kind::VirtualMachineInstance if self.vmi.uid() == r.uid => self.vmi.doubt(),
                Kind::Pod if self.current_pod().is_some_and(|p| p.meta.uid == r.uid) => self.pod.doubt(),
                Kind::Pod => {
                    // A pod of a VMI that is over: nothing depends on it.
                    self.pods.remove(&PodUid(r.uid.0.clone()));
                }
                Kind::VirtualMachine
                | Kind::VirtualMachineInstance
                | Kind::VirtualMachineInstanceReplicaSet
                | Kind::ControllerRevision
                | Kind::PersistentVolumeClaim
                | Kind::Pattern(_)
                | Kind::Node => {}
            },
            Input::Reported(r) => self.heard(r),
            Input::Settled { id, result } => self.settled(*id, result),
            Input::Elapsed => self.armed = None,
            Input::Configured(Fact::Cluster(c)) => self.config = c.clone(),
            Input::Configured(Fact::Node(n)) => {
                let was = self.node.insert(n.node.clone(), n.clone()).and_then(|o| o.session);
                if was != n.session {
                    self.inventory.remove(&n.node);
                }
            }
        }
    }

    fn saw(&mut self, object: &Object, live: bool) {
        match object {
            Object::Vm(o) => {
                if self.vm.fold(o.clone(), live) == Folded::Replaced {
                    self.new_vm();
                }
            }
            Object::Vmi(o) => {
                let first = self.vmi.get().is_none();
                let folded = self.vmi.fold(o.clone(), live);
                if folded == Folded::Replaced || (first && folded == Folded::Updated) {
                    self.new_vmi();
                }
            }
            Object::Pod(o) => {
                let uid = o.pod_uid();
                if self.pod.is_tombstoned(&o.meta.uid) {
                    return;
                }
                let newer = self.pods.get(&uid).is_none_or(|p| o.meta.rv > p.meta.rv);
                if newer {
                    // Whose name it has is gone, whether or not a watch said so.
                    self.pods.retain(|_, p| p.meta.name != o.meta.name || p.meta.rv > o.meta.rv);
                    self.pods.insert(uid, o.clone());
                }
                if self.vmi.get().is_some_and(|v| v.vmi_uid() == o.vmi) {
                    self.pod.fold(o.clone(), live);
                }
            }
            Object::Claim(o) => {
                let known = self.claims.get(&o.meta.name).and_then(Option::as_ref);
                if known.is_none_or(|k| k.meta.uid != o.meta.uid || k.meta.rv < o.meta.rv) {
                    self.claims.insert(o.meta.name.clone(), Some((**o).clone()));
                }
            }
            Object::Revision(o) => {
                if self.revision_that_matters().as_ref() == Some(&o.meta.name) {
                    self.revision.fold(o.clone(), live);
                }
            }
            // Only read, where its answer is waited for.
            Object::Pattern(_) => {}
        }
    }

    /// The name of our pod is somebody else's. It is a hash, so this is no accident; people have to know.
    fn saw_stranger(&mut self) {
        let message = "a pod of the launcher's name exists and belongs to something else".into();
        let refusal = Refusal { code: 409, reason: "AlreadyExists".into(), message };
        self.pod.failed(self.now, Some(refusal));
    }

    fn lost(&mut self, r: &ObjectRef) {
        match r.kind {
            Kind::VirtualMachine => {
                if self.vm.gone(&r.uid) {
                    self.new_vm();
                }
            }
            Kind::VirtualMachineInstance => {
                if self.vmi.gone(&r.uid) {
                    self.new_vmi();
                }
            }
            Kind::Pod => {
                self.pods.remove(&PodUid(r.uid.0.clone()));
                self.pod.gone(&r.uid);
            }
            Kind::PersistentVolumeClaim => {
                self.claims.insert(r.name.clone(), None);
            }
            Kind::VirtualMachineInstanceReplicaSet | Kind::ControllerRevision | Kind::Node | Kind::Pattern(_) => {}
        }
    }

    /// Another VM (or none): its revisions are others, and what is still to be answered is about the old ones.
    fn new_vm(&mut self) {
        self.revisions.clear();
        self.revision.reset();
        self.flights.retain(|_, (_, what)| !matches!(what, What::CreateRevision(_) | What::DeleteRevision(_)));
    }

    /// Another VMI (or none): what belonged to the old one is of no use.
    fn new_vmi(&mut self) {
        let current = self.vmi.get().map(VmiView::vmi_uid);
        let of = |v: &VmiUid| current.as_ref() == Some(v);
        self.domains.retain(|_, (_, d)| of(&d.vmi));
        // Whoever keeps the outcome of an instance that is over still has to hear that it may forget it.
        let acked = &self.acked;
        self.outcomes.retain(|pod, (_, o)| of(&o.vmi) || !acked.contains(&(pod.clone(), o.seq)));
        self.told.clear();
        self.boot = None;
        self.hold_running = None;
        self.unsaid_since = None;
        self.lazy.clear();
        self.revision.forget();
        self.pod.reset();
        if let Some(pod) = self.shared_pod() {
            self.pod.fold(pod, false);
        }
        let noted_uid = self.vmi.uid();
        self.noted.retain(|(uid, _)| *uid == noted_uid);
        let owed = &mut self.owed;
        self.flights.retain(|id, (at, what)| match at {
            At::Pod => {
                owed.insert(*id);
                false
            }
            // Its answer names no object, and the driver forgets it with this cell.
            At::Agent => matches!(what, What::Acknowledge(..)),
            At::Vm | At::Vmi | At::Revision | At::Pattern(_) => true,
        });
    }

    fn heard(&mut self, r: &Report) {
        match r {
            Report::Domain { node, domain: d } => {
                let newer = self.domains.get(&d.pod).is_none_or(|(_, k)| {
                    // Another launcher process in one pod cannot be: the one that speaks now is the one that is there.
                    k.launcher != d.launcher || d.seq >= k.seq
                });
                if newer && !self.is_elsewhere(&d.pod, node) && !self.vmi.is_tombstoned(&Uid(d.vmi.0.clone())) {
                    let session = self.node.get(node).and_then(|n| n.session);
                    self.domains.insert(d.pod.clone(), (session, d.clone()));
                }
            }
            Report::Outcome { node, outcome: o } => {
                if self.is_elsewhere(&o.pod, node) {
                    return;
                }
                if self.outcomes.get(&o.pod).is_none_or(|(_, k)| o.seq >= k.seq) {
                    self.outcomes.insert(o.pod.clone(), (node.clone(), o.clone()));
                }
                // Told again: our acknowledgement did not arrive.
                self.acked.remove(&(o.pod.clone(), o.seq));
            }
            Report::Inventory { node, session, complete, boot_id, reflector_rv: _ } => {
                if self.inventory.get(node).is_some_and(|i| i.session > *session) {
                    return;
                }
                let here = self.node_called() == Some(node.as_str());
                if here && self.boot.as_ref().is_some_and(|b| b != boot_id) {
                    // What was told before the node was booted again is over.
                    self.domains.retain(|_, (heard, _)| *heard == Some(*session));
                }
                if here {
                    self.boot = Some(boot_id.clone());
                }
                let inventory = Inventory { session: *session, complete: *complete, boot_id: boot_id.clone() };
                self.inventory.insert(node.clone(), inventory);
            }
        }
    }

    /// A word about a pod that is known to be on another node is no word about it.
    fn is_elsewhere(&self, pod: &PodUid, node: &NodeName) -> bool {
        self.pods.get(pod).and_then(|p| p.node.as_ref()).is_some_and(|n| n != node)
    }

    fn settled(&mut self, id: CommandId, result: &Settled<Object>) {
        let Some((at, what)) = self.flights.remove(&id) else {
            // Of a VMI that is over; what was read is still a sight.
            self.owed.remove(&id);
            if let Settled::Applied(Some(o)) = result {
                self.saw(o, true);
            }
            return;
        };
        if let What::Instruct(instruction) = &what {
            self.instruct_settled(instruction, result);
            return;
        }
        if let What::Acknowledge(pod, seq) = &what {
            if !matches!(result, Settled::Applied(_) | Settled::Acked(_)) {
                self.acked.remove(&(pod.clone(), *seq));
            } else if self.launcher() != Some(pod.as_str()) {
                self.outcomes.remove(pod);
            }
            return;
        }
        match at {
            At::Vm => drop(self.vm.land(id)),
            At::Vmi => drop(self.vmi.land(id)),
            At::Pod => drop(self.pod.land(id)),
            At::Revision => drop(self.revision.land(id)),
            At::Pattern(role) => return self.pattern_settled(role, id, &what, result),
            At::Agent => {}
        }
        self.object_settled(at, &what, result);
    }

    fn object_settled(&mut self, at: At, what: &What, result: &Settled<Object>) {
        let now = self.now;
        match result {
            Settled::Applied(object) => {
                // A read of what is as it was does not make up for a write that did not work: the pause before the next one
                // goes on growing.
                if *what != What::Confirm || object.as_ref().is_none_or(|o| !self.is_as_known(at, o)) {
                    self.each(at, Verb::Succeeded);
                }
                if let (What::Confirm, Some(Object::Vm(o))) = (what, object) {
                    self.vm_read = Some(o.meta.rv);
                }
                match object {
                    Some(Object::Pod(o)) if at == At::Pod && self.vmi.get().is_some_and(|v| v.vmi_uid() != o.vmi) => {
                        self.saw_stranger();
                    }
                    // The last finalizer came off by our own hand: that was its end, whether or not a watch shows it.
                    Some(o) if *what == What::Write && o.is_over() => self.lost(&o.reference()),
                    Some(o) => self.saw(o, true),
                    // The answer could not be read; asking at once would not help.
                    None if matches!(what, What::Confirm | What::ReadRevision(_)) => self.each(at, Verb::Failed),
                    // Done, and the server did not show the object: look.
                    None if at != At::Revision => self.each(at, Verb::Doubt),
                    None => {}
                }
                if let (What::Confirm, Some(Object::Vmi(o))) = (what, object)
                    && let Some(uid) = self.looks_for.take().filter(|uid| *uid != o.meta.uid)
                {
                    // Another one has its name now: it is gone.
                    self.vmi.gone(&uid);
                }
                match what {
                    What::CreateRevision(g) => {
                        self.revisions.insert(*g);
                    }
                    What::DeleteRevision(g) => {
                        self.revisions.remove(g);
                    }
                    What::CreateVmi => {
                        self.marks.reached(crate::trace::Step::Create, now);
                        let text = format!(
                            "Started the virtual machine by creating the new virtual machine instance {}",
                            self.key.name
                        );
                        self.tell.push((Kind::VirtualMachine, false, "SuccessfulCreate".into(), text));
                    }
                    What::Delete if at == At::Vmi => {
                        let text = format!(
                            "Stopped the virtual machine by deleting the virtual machine instance {}",
                            self.key.name
                        );
                        self.tell.push((Kind::VirtualMachine, false, "SuccessfulDelete".into(), text));
                    }
                    What::CreatePod
                    | What::Write
                    | What::Delete
                    | What::Confirm
                    | What::ReadRevision(_)
                    | What::Instruct(_)
                    | What::Acknowledge(..) => {}
                }
            }
            Settled::Conflict => match what {
                // Its name is a hash of what it records: it is there.
                What::CreateRevision(g) => {
                    self.each(at, Verb::Succeeded);
                    self.revisions.insert(*g);
                }
                What::DeleteRevision(g) => {
                    self.revisions.remove(g);
                }
                What::CreateVmi
                | What::CreatePod
                | What::Write
                | What::Delete
                | What::Confirm
                | What::ReadRevision(_)
                | What::Instruct(_)
                | What::Acknowledge(..) => {
                    self.each(at, Verb::Conflict);
                    // The name may be taken, or the source may be another than we know.
                    match what {
                        What::CreateVmi => self.vm.doubt(),
                        What::CreatePod => self.vmi.doubt(),
                        What::CreateRevision(_)
                        | What::DeleteRevision(_)
                        | What::Write
                        | What::Delete
                        | What::Confirm
                        | What::ReadRevision(_)
                        | What::Instruct(_)
                        | What::Acknowledge(..) => {}
                    }
                }
            },
            Settled::Gone => match (what, at) {
                (What::Confirm, At::Vm) => {
                    if self.vm.not_found() {
                        self.new_vm();
                    }
                }
                (What::Confirm, At::Vmi) => {
                    if self.vmi.not_found() {
                        self.new_vmi();
                    }
                }
                (What::Confirm, At::Pod) => {
                    let known = self.current_pod().map(PodView::pod_uid);
                    self.pod.not_found();
                    if let Some(uid) = known.filter(|_| self.pod.is_absent()) {
                        self.pods.remove(&uid);
                    }
                }
                (What::ReadRevision(name), _) => {
                    if self.revision_that_matters().as_ref() == Some(name) {
                        self.revision.gone(&Uid::default());
                    }
                }
                (What::DeleteRevision(g), _) => {
                    self.revisions.remove(g);
                }
                // The source vanished, or the namespace is going.
                (What::CreateVmi | What::CreatePod | What::CreateRevision(_), _) => {
                    self.vm.doubt();
                    if at == At::Pod {
                        self.vmi.doubt();
                    }
                    self.each(at, Verb::Failed);
                }
                (What::Write | What::Delete, _) => self.each(at, Verb::Doubt),
                (What::Confirm | What::Instruct(_) | What::Acknowledge(..), _) => {}
            },
            Settled::Refused(r) | Settled::Failed(r) => {
                let about = if at == At::Pod { Kind::VirtualMachineInstance } else { Kind::VirtualMachine };
                let text = format!("{}: {}", r.reason, r.message);
                match what {
                    What::CreateVmi | What::CreatePod | What::CreateRevision(_) => {
                        self.tell.push((about, true, "FailedCreate".into(), text));
                    }
                    What::Delete | What::DeleteRevision(_) => {
                        self.tell.push((about, true, "FailedDelete".into(), text))
                    }
                    What::Write | What::Confirm | What::ReadRevision(_) | What::Instruct(_) | What::Acknowledge(..) => {
                    }
                }
                match at {
                    At::Vm => self.vm.failed(now, Some(r.clone())),
                    At::Vmi => {
                        self.vmi.failed(now, Some(r.clone()));
                        self.vmi_refused = Some(what.clone());
                    }
                    At::Pod => self.pod.failed(now, Some(r.clone())),
                    At::Revision => self.revision.failed(now, Some(r.clone())),
                    At::Pattern(_) | At::Agent => {}
                }
                if matches!(result, Settled::Failed(_)) {
                    self.each(at, Verb::Doubt);
                }
            }
            Settled::Busy { after } => {
                let until = now.after(*after);
                match at {
                    At::Vm => self.vm.hold(until),
                    At::Vmi => self.vmi.hold(until),
                    At::Pod => self.pod.hold(until),
                    At::Revision => self.revision.hold(until),
                    At::Pattern(_) | At::Agent => {}
                }
            }
            Settled::Unknown => {
                self.each(at, Verb::Failed);
                self.each(at, Verb::Doubt);
            }
            Settled::Acked(_) => {}
        }
    }

    /// Whether the object is at the version that is known.
    fn is_as_known(&self, at: At, o: &Object) -> bool {
        let known = match at {
            At::Vm => self.vm.rv(),
            At::Vmi => self.vmi.rv(),
            At::Pod => self.pod.rv(),
            At::Revision | At::Pattern(_) | At::Agent => return false,
        };
        o.rv() == known
    }

    fn each(&mut self, at: At, verb: Verb) {
        macro_rules! apply {
            ($slot:expr) => {
                match verb {
                    Verb::Succeeded => $slot.succeeded(),
                    Verb::Failed => $slot.failed(self.now, None),
                    Verb::Doubt => $slot.doubt(),
                    Verb::Conflict => $slot.conflict(),
                }
            };
        }
        match at {
            At::Vm => apply!(self.vm),
            At::Vmi => apply!(self.vmi),
            At::Pod => apply!(self.pod),
            At::Revision => apply!(self.revision),
            At::Pattern(_) | At::Agent => {}
        }
    }

    fn instruct_settled(&mut self, id: &InstructionId, result: &Settled<Object>) {
        let now = self.now;
        let told = match result {
            Settled::Acked(AckResult::Accepted | AckResult::Done { .. }) | Settled::Applied(_) => Told::Taken,
            Settled::Acked(AckResult::Refused { reason, message, .. }) => {
                match reason {
                    RefusalReason::Superseded | RefusalReason::OlderVmi => self.vmi.doubt(),
                    RefusalReason::LowerEpoch
                    | RefusalReason::AlreadyStarted
                    | RefusalReason::Failed
                    | RefusalReason::Unsupported => {}
                }
                Told::Refused(*reason, message.clone(), now)
            }
            Settled::Refused(_)
            | Settled::Failed(_)
            | Settled::Conflict
            | Settled::Gone
            | Settled::Busy { .. }
            | Settled::Unknown => Told::Lost(now),
        };
        if let Some((_, t)) = self.told.get_mut(id) {
            *t = told;
        }
    }

    /// Whether the START of this launcher was taken on by its agent at any time.
    pub(super) fn start_was_taken(&self) -> bool {
        self.start_told().is_some_and(|t| match t {
            Told::Taken | Told::Refused(RefusalReason::AlreadyStarted, ..) => true,
            Told::Sent | Told::Lost(_) | Told::Refused(..) => false,
        })
    }

    /// The START of this launcher: the session that it was sent by, and what became of it.
    pub(super) fn start_entry(&self) -> Option<&(u64, Told)> {
        if self.told.is_empty() {
            return None;
        }
        let (vmi, pod) = (self.vmi.get()?.meta.uid.as_str(), self.launcher()?);
        self.told.get(&super::pod::start_id(&vmi.into(), &pod.into()))
    }

    /// What became of the START of this launcher.
    pub(super) fn start_told(&self) -> Option<&Told> {
        self.start_entry().map(|(_, t)| t)
    }

    /// Whether the domain is known to have a process that is not known to have ended.
    pub(super) fn domain_lives(&self) -> bool {
        self.domain().is_some_and(Domain::has_process)
    }

    pub(super) fn issue(&mut self, at: At, what: What) -> CommandId {
        self.next_id += 1;
        let id = CommandId(self.next_id);
        self.flights.insert(id, (at, what));
        match at {
            At::Vm => self.vm.depart(id),
            At::Vmi => self.vmi.depart(id),
            At::Pod => self.pod.depart(id),
            At::Revision => self.revision.depart(id),
            At::Pattern(role) => self.patterns.entry(role).or_default().depart(id),
            At::Agent => {}
        }
        id
    }
}

#[derive(Clone, Copy)]
enum Verb {
    Succeeded,
    Failed,
    Doubt,
    Conflict,
}

impl Machine for Vm {
    type Input = Input;
    type Command = Command;

    fn knows(&mut self, input: &Input) -> bool {
        let Input::Observed(Sight::Present(object)) = input else { return false };
        match object {
            Object::Vm(o) => self.vm.knows(o),
            Object::Vmi(o) => self.vmi.knows(o),
            Object::Pod(o) => {
                let ours = self.vmi.get().is_some_and(|v| v.meta.uid.as_str() == o.vmi.as_str());
                if self.pod.is_tombstoned(&o.meta.uid) {
                    return true;
                }
                let Some(known) = self.pods.get_mut(o.meta.uid.as_str()) else { return false };
                if known.meta.rv == o.meta.rv {
                    known.clone_from(o);
                }
                known.meta.rv >= o.meta.rv && (!ours || self.pod.knows(o))
            }
            Object::Claim(_) | Object::Revision(_) | Object::Pattern(_) => false,
        }
    }

    fn step(&mut self, event: &Event<Input>) -> Vec<Command> {
        self.now = self.now.max(event.at);
        self.fold(&event.input);
        self.plan()
    }
}
