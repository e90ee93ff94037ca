//! Deliberate mistakes, one a mechanism. A check that does not catch its mutant checks nothing.

use super::{
    Action, World,
    api::{Said, TIMEOUT, Then, Verb},
    driver::CellId,
    run::Scenario,
    server::Res,
    swarm::{Fault, Swarm},
};
use embedded::semantics::write::Part;
use serde_json::json;
use state::{
    ResourceVersion, Timestamp,
    object::{CommandId, Kind, Settled},
    observe::Object,
    vm::{Fact, Input, Patch, Sight},
};

/// A mechanism that is broken on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum Mutant {
    /// A launcher starts as often as it is told [S1].
    LatchOff,
    /// Pods get random names [S4].
    RandomPodName,
    /// Instances have no finalizer: they are gone before their guests are [S5].
    NoFinalizer,
    /// A launcher forgets what it has answered [S6].
    LauncherForgets,
    /// An agent believes every Hello [S7].
    EveryHello,
    /// The Lease is taken without saying which version was read [S7].
    LeaseWithoutVersion,
    /// Agent and launcher do not look whether the VMI authorises the pod [S8].
    NoAuthority,
    /// That a new list does not have an object counts as its deletion [S10].
    AbsenceIsEvidence,
    /// Patches do not say which version they replace [S11].
    NoPreconditions,
    /// A silent node counts as fenced [S12].
    SilenceIsFence,
    /// A stop deletes the instance and does not say that the machine shall be down [S15].
    StopOnlyDeletes,
    /// An agent destroys what its watch does not show [S17].
    AbsenceIsStray,
    /// Deadlines never come [L1].
    WakesLost,
    /// Caches do not tell of deletions [L1].
    DeletionsUnheard,
    /// A live read of a set is answered from the cache [S10].
    SetsFromTheCache,
    /// A live list of a set's instances is answered from the cache [S10].
    SurveyFromTheCache,
    /// Instances of sets get random names [S23].
    RandomMemberName,
    /// An agent writes the phase of an instance [S13].
    AgentWritesPhase,
    /// What agents say is not recorded [S9].
    ReportsUnrecorded,
    /// Letting an instance go also changes the strategy of its machine [S16].
    StopWritesStrategy,
    /// A launcher kills when half of the grace is over [S19].
    GraceHalved,
    /// Nobody collects what has lost its owner [S22].
    CollectorSleeps,
    /// Whole objects are recorded [S25].
    ObjectsRecorded,
    /// Finalizers are never taken off [L3].
    FinalizersKept,
    /// A Lease is never over [L6].
    LeaseForever,
    /// Every patch is sent twice [Q1].
    WritesTwice,
    /// The leader asks for a machine with each renewal of its Lease [Q2].
    Chatty,
    /// "Not now" is answered by asking again at once [Q3].
    NoPause,
    /// Cells of what is gone are kept [Q4].
    CellsKept,
    /// What a new list does not have is forgotten, and pods get random names: it is made again.
    LauncherAfterTombstone,
    /// Who was deposed goes on.
    DeposedActs,
    /// Who was deposed goes on to write status, over whatever is there.
    DeposedWritesStatus,
    /// What an agent has said of a domain it does not say again in the next session.
    LevelsOnce,
    /// That a new list does not have an object is not told.
    AbsenceIgnored,
    /// Pods belong to the machine, and instances are gone at once.
    PodsOfTheMachine,
    /// An instance is made from a machine as the cache has it.
    CreatesFromTheCache,
    /// A live read of machine, instance or pod is answered from the cache.
    ConfirmsFromTheCache,
    /// Deletions name no UID.
    DeletesByName,
    /// Failed starts are not remembered.
    FailuresForgotten,
    /// An instance is let go when its pod is told to end.
    ReleasedEarly,
    /// Another process of an agent is taken for another boot of its node.
    AgentIsBoot,
    /// A watch that ended begins with what happens next.
    WatchFromNow,
    /// A Lease is counted from its answer.
    LeaseFromAnswer,
    /// What a controller writes of an instance is not shown to its set.
    OwnWritesUnshown,
}

impl Mutant {
    /// All of them, and the id of the check that catches each.
    pub const ALL: &'static [(Mutant, &'static str)] = &[
        (Self::LatchOff, "S1"),
        (Self::RandomPodName, "S4"),
        (Self::NoFinalizer, "S5"),
        (Self::LauncherForgets, "S6"),
        (Self::EveryHello, "S7"),
        (Self::LeaseWithoutVersion, "S7"),
        (Self::NoAuthority, "S8"),
        (Self::AbsenceIsEvidence, "S10"),
        (Self::NoPreconditions, "S11"),
        (Self::SilenceIsFence, "S12"),
        (Self::StopOnlyDeletes, "S15"),
        (Self::AbsenceIsStray, "S17"),
        (Self::WakesLost, "L1"),
        (Self::DeletionsUnheard, "L1"),
        (Self::SetsFromTheCache, "S10"),
        (Self::SurveyFromTheCache, "S10"),
        (Self::RandomMemberName, "S23"),
        (Self::NoPreconditions, "S14"),
        (Self::WakesLost, "L2"),
        (Self::AgentWritesPhase, "S13"),
        (Self::ReportsUnrecorded, "S9"),
        (Self::StopWritesStrategy, "S16"),
        (Self::GraceHalved, "S19"),
        (Self::CollectorSleeps, "S22"),
        (Self::ObjectsRecorded, "S25"),
        (Self::FinalizersKept, "L3"),
        (Self::LeaseForever, "L6"),
        (Self::WritesTwice, "Q1"),
        (Self::Chatty, "Q2"),
        (Self::NoPause, "Q3"),
        (Self::CellsKept, "Q4"),
    ];

    /// It shows where there are sets.
    pub fn needs_sets(self) -> bool {
        matches!(
            self,
            Self::SetsFromTheCache | Self::SurveyFromTheCache | Self::RandomMemberName | Self::OwnWritesUnshown
        )
    }

    /// It shows where steps are taken again.
    pub fn needs_replay(self) -> bool {
        matches!(self, Self::ReportsUnrecorded | Self::ObjectsRecorded)
    }

    /// It shows in a start without faults.
    pub fn scenario(self) -> Option<Scenario> {
        (self == Self::WritesTwice).then_some(Scenario::Start)
    }

    /// Faults under which it shows, where those that seeds draw are seldom the ones.
    pub fn swarm(self) -> Option<Swarm> {
        match self {
            Self::RandomPodName | Self::RandomMemberName => {
                Some(Swarm::none().with(Fault::LostReply, 400).with(Fault::WatchDropped, 500))
            }
            Self::AbsenceIsEvidence => Some(Swarm::none().with(Fault::StaleServer, 800).with(Fault::WatchDropped, 300)),
            Self::SetsFromTheCache | Self::SurveyFromTheCache => {
                let swarm = Swarm::none().with(Fault::StaleServer, 900).with(Fault::WatchDropped, 300);
                Some(swarm.with(Fault::ControllerCrash, 10))
            }
            Self::GraceHalved => Some(Swarm::none().with(Fault::GuestDeaf, 1000)),
            Self::LeaseForever => Some(Swarm::none().with(Fault::ControllerCrash, 30)),
            Self::LauncherAfterTombstone | Self::ConfirmsFromTheCache => {
                Some(Swarm::none().with(Fault::StaleServer, 800).with(Fault::WatchDropped, 300))
            }
            Self::DeposedActs | Self::DeposedWritesStatus => Some(Swarm::none().with(Fault::ControllerPause, 60)),
            Self::LevelsOnce => Some(Swarm::none().with(Fault::SessionCut, 600).with(Fault::Slow, 300)),
            Self::AgentIsBoot => Some(Swarm::none().with(Fault::AgentCrash, 100).with(Fault::LauncherDeaf, 300)),
            Self::CreatesFromTheCache => Some(Swarm::none().with(Fault::Slow, 600).with(Fault::WatchDropped, 60)),
            Self::OwnWritesUnshown => {
                let swarm = Swarm::none().with(Fault::WatchDropped, 300).with(Fault::GuestEnds, 300);
                Some(swarm.with(Fault::InstancesDeleted, 60))
            }
            Self::FailuresForgotten => Some(Swarm::none().with(Fault::StartFails, 1000)),
            Self::LeaseFromAnswer => Some(Swarm::none().with(Fault::Slow, 300).with(Fault::ControllerPause, 60)),
            Self::NoPause => Some(Swarm::none().with(Fault::Busy, 990)),
            Self::LatchOff
            | Self::NoFinalizer
            | Self::LauncherForgets
            | Self::EveryHello
            | Self::LeaseWithoutVersion
            | Self::NoAuthority
            | Self::NoPreconditions
            | Self::SilenceIsFence
            | Self::StopOnlyDeletes
            | Self::AbsenceIsStray
            | Self::WakesLost
            | Self::DeletionsUnheard
            | Self::AgentWritesPhase
            | Self::ReportsUnrecorded
            | Self::StopWritesStrategy
            | Self::CollectorSleeps
            | Self::ObjectsRecorded
            | Self::FinalizersKept
            | Self::WritesTwice
            | Self::Chatty
            | Self::CellsKept
            | Self::AbsenceIgnored
            | Self::PodsOfTheMachine
            | Self::DeletesByName
            | Self::ReleasedEarly
            | Self::WatchFromNow => None,
        }
    }
}

impl World {
    /// A machine as somebody sees it who does not know when it may be started again.
    fn forgive(&self, object: Object) -> Object {
        match object {
            Object::Vm(vm) if self.is(Mutant::FailuresForgotten) && vm.status.start_failure.is_some() => {
                let mut vm = (*vm).clone();
                if let Some(f) = &mut vm.status.start_failure {
                    f.retry_after_timestamp = Some(Timestamp(0).to_string());
                }
                Object::Vm(vm.into())
            }
            other => other,
        }
    }

    /// Whether this mechanism is broken.
    pub(super) fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    /// What a mutant makes of what a Vm cell hears.
    pub(super) fn bend(&mut self, input: Input) -> Input {
        match input {
            Input::Configured(Fact::Node(mut fact)) => {
                if self.is(Mutant::SilenceIsFence) && fact.session.is_none() {
                    fact.fenced = Some(ResourceVersion(1));
                }
                Input::Configured(Fact::Node(fact))
            }
            Input::Observed(Sight::Present(o)) => Input::Observed(Sight::Present(self.forgive(o))),
            Input::Settled { id, result: Settled::Applied(Some(o)) } => {
                Input::Settled { id, result: Settled::Applied(Some(self.forgive(o))) }
            }
            other => other,
        }
    }

    /// What a mutant makes of a controller's patch; whether that is not sent.
    pub(super) fn bend_patch(&mut self, c: usize, cell: &CellId, id: CommandId, patch: &Patch) -> bool {
        let t = &patch.target;
        let nobody = || Then::Settle(cell.clone(), CommandId(u64::MAX), true);
        if self.is(Mutant::StopWritesStrategy)
            && t.kind == Kind::VirtualMachineInstance
            && patch.body.pointer("/metadata/finalizers").is_some()
        {
            let body = json!({"spec": {"runStrategy": "Manual"}});
            self.write(c, "a mutant's", Verb::merge(Res::Vm, &t.namespace, &t.name, Part::Main, body), nobody());
        }
        if self.is(Mutant::WritesTwice) {
            let mut body = patch.body.clone();
            if let Some(m) = body.get_mut("metadata").and_then(serde_json::Value::as_object_mut) {
                m.remove("resourceVersion");
            }
            let part = if patch.status { Part::Status } else { Part::Main };
            self.write(c, "a mutant's", Verb::merge(Res::of(t.kind), &t.namespace, &t.name, part, body), nobody());
        }
        let kept = self.is(Mutant::FinalizersKept) && patch.body.pointer("/metadata/finalizers").is_some();
        if kept {
            let me = self.proc_of(c);
            self.after(TIMEOUT, Action::Answer(me, Then::Settle(cell.clone(), id, true), Said::Silence));
        }
        kept
    }
}
