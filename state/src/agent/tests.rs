//! Each failure that the protocol's rules prevent on a node, as a story.
#![allow(clippy::unwrap_used, clippy::wildcard_enum_match_arm)]

use super::vmi::Stage;
use super::*;
use crate::domain::{
    AckResult, Cause, Domain, DomainState, GuestFacts, InstructKind, Instruction, Outcome, RefusalReason,
};
use crate::{Epoch, Event, Machine, Millis, ResourceVersion, Timestamp, instruction_id};

const SECOND: u64 = 1000;

/// A cell under test, its clock, and what it asked for last.
struct Story {
    cell: Agent,
    now: Timestamp,
    out: Vec<Command>,
    /// Everything that it ever asked for.
    all: Vec<Command>,
}

fn vmi(rv: u64) -> VmiFacts {
    VmiFacts {
        uid: "v".into(),
        namespace: "ns".into(),
        name: "n".into(),
        rv: ResourceVersion(rv),
        deleting: false,
        grace: Millis::secs(7),
        stage: Stage::Granted,
        active_pods: [("p".into(), "node".into())].into(),
    }
}

fn domain(seq: u64, state: DomainState) -> Domain {
    Domain {
        vmi: "v".into(),
        pod: "p".into(),
        launcher: "l".into(),
        seq,
        state,
        since: Timestamp(1),
        guest: GuestFacts::default(),
        paused_reason: String::new(),
        accelerator: "tcg".into(),
    }
}

fn outcome(seq: u64) -> Outcome {
    Outcome {
        vmi: "v".into(),
        pod: "p".into(),
        cause: Cause::GuestShutdown,
        exit: 0,
        seq,
        message: String::new(),
        at: Timestamp(2),
    }
}

fn instruction(kind: InstructKind, id: &str, rv: u64) -> Instruction {
    Instruction {
        id: id.into(),
        kind,
        vmi: "v".into(),
        pod: "p".into(),
        vmi_rv: ResourceVersion(rv),
        deadline: Millis::secs(7),
    }
}

impl Story {
    fn new() -> Self {
        Self { cell: Agent::new("node".into(), "p".into()), now: Timestamp(1_000_000), out: vec![], all: vec![] }
    }

    /// A pod that runs, with a launcher that answers and has nothing to do.
    fn ready() -> Self {
        let mut s = Self::new();
        s.pod(true);
        s.linked(1, DomainState::Absent);
        s
    }

    /// And a session of epoch 10.
    fn led() -> Self {
        let mut s = Self::ready();
        s.on(Input::SessionOpened { session: 1, epoch: Epoch(10) });
        s
    }

    /// A machine that runs.
    fn running() -> Self {
        let mut s = Self::ready();
        s.on(Input::VmiObserved(vmi(5)));
        s.on(Input::LauncherReported(domain(2, DomainState::Running)));
        s.on(Input::UnpausedWritten { unpaused: true, done: true });
        s
    }

    fn on(&mut self, input: Input) -> &[Command] {
        self.now = self.now.after(Millis(1));
        self.out = self.cell.step(&Event::new(self.now, input));
        self.all.extend(self.out.iter().cloned());
        &self.out
    }

    fn pod(&mut self, running: bool) {
        self.on(Input::PodObserved { vmi: "v".into(), running });
    }

    fn linked(&mut self, seq: u64, state: DomainState) {
        self.on(Input::LauncherConnected { launcher: "l".into(), epoch: Epoch(0) });
        self.on(Input::LauncherReported(domain(seq, state)));
    }

    fn instruct(&mut self, i: Instruction, v: Option<VmiFacts>) -> &[Command] {
        self.on(Input::Instructed { session: 1, epoch: Epoch(10), instruction: i, vmi: v })
    }

    fn start(&mut self, rv: u64) -> &[Command] {
        self.instruct(instruction(InstructKind::Start, "s", rv), Some(vmi(rv)))
    }

    /// Follows the deadlines that the cell asks for, over some time.
    fn wait(&mut self, time: Millis) {
        let end = self.now.after(time);
        let mut wake = self.last_wake();
        while let Some(at) = wake.filter(|w| *w <= end) {
            self.now = at;
            self.on(Input::Elapsed);
            wake = self.out.iter().find_map(|c| match c {
                Command::Wake { at } => Some(*at),
                _ => None,
            });
        }
        self.now = end;
    }

    fn last_wake(&self) -> Option<Timestamp> {
        self.all.iter().rev().find_map(|c| match c {
            Command::Wake { at } => Some(*at),
            _ => None,
        })
    }

    fn executed(&self) -> Vec<InstructKind> {
        self.all
            .iter()
            .filter_map(|c| match c {
                Command::Execute { instruction, .. } => Some(instruction.kind),
                _ => None,
            })
            .collect()
    }

    fn answers(&self) -> Vec<&AckResult> {
        self.all
            .iter()
            .filter_map(|c| match c {
                Command::Answer { result, .. } => Some(result),
                _ => None,
            })
            .collect()
    }

    fn refusals(&self) -> Vec<RefusalReason> {
        self.answers()
            .into_iter()
            .filter_map(|a| match a {
                AckResult::Refused { reason, .. } => Some(*reason),
                AckResult::Accepted | AckResult::Done { .. } => None,
            })
            .collect()
    }

    fn has(&self, wanted: impl Fn(&Command) -> bool) -> bool {
        self.out.iter().any(wanted)
    }
}

fn confirms(c: &Command) -> bool {
    matches!(c, Command::Confirm)
}

// 1. Authority

#[test]
fn a_start_prepares_the_network_then_tells_the_launcher_then_answers() {
    let mut s = Story::led();
    s.start(5);
    assert!(s.has(|c| *c == Command::PrepareNetwork), "{:?}", s.out);
    assert_eq!(s.executed(), []);
    s.on(Input::NetworkPrepared(Ok(())));
    assert_eq!(s.executed(), [InstructKind::Start]);
    s.on(Input::LauncherAcked { id: "s".into(), result: Some(AckResult::Accepted) });
    assert_eq!(s.answers(), [&AckResult::Accepted]);
}

#[test]
fn the_newest_vmi_known_decides_whoever_brought_it() {
    let deleting = VmiFacts { deleting: true, ..vmi(9) };
    let over = VmiFacts { stage: Stage::Final, ..vmi(9) };
    let early = VmiFacts { stage: Stage::Before, ..vmi(9) };
    let other = VmiFacts { active_pods: [("q".into(), "node".into())].into(), ..vmi(9) };
    let elsewhere = VmiFacts { active_pods: [("p".into(), "node-2".into())].into(), ..vmi(9) };
    for newer in [deleting, over, early, other, elsewhere] {
        let mut s = Story::led();
        s.on(Input::VmiObserved(newer.clone()));
        s.start(5);
        let AckResult::Refused { reason, rv_seen, .. } = s.answers()[0] else { panic!("{newer:?}") };
        assert_eq!((*reason, *rv_seen), (RefusalReason::Superseded, ResourceVersion(9)), "{newer:?}");
        assert_eq!(s.executed(), []);
    }
}

#[test]
fn a_lower_version_than_known_is_no_refusal_and_versions_of_other_vmis_do_not_count() {
    // Somebody labels the VMI all the time: the watch is always ahead of the instruction.
    let mut s = Story::led();
    s.on(Input::VmiObserved(vmi(50)));
    // Another VMI under the same key, far ahead.
    s.on(Input::VmiObserved(VmiFacts { uid: "w".into(), deleting: true, ..vmi(900) }));
    s.start(5);
    s.on(Input::NetworkPrepared(Ok(())));
    assert_eq!(s.executed(), [InstructKind::Start]);
    let sent = s.all.iter().find_map(|c| match c {
        Command::Execute { vmi_rv, .. } => Some(*vmi_rv),
        _ => None,
    });
    assert_eq!(sent, Some(ResourceVersion(50)), "the newest goes to the launcher");
}

#[test]
fn nothing_older_than_the_instruction_is_acted_on() {
    let mut s = Story::led();
    s.instruct(instruction(InstructKind::Start, "s", 9), Some(vmi(5)));
    s.instruct(instruction(InstructKind::Start, "t", 9), None);
    assert_eq!(s.refusals(), [RefusalReason::OlderVmi, RefusalReason::OlderVmi]);
    let mut blind = Story::led();
    blind.instruct(instruction(InstructKind::Start, "s", 9), None);
    assert_eq!(blind.refusals(), [RefusalReason::Unsupported]);
}

#[test]
fn another_vmis_instruction_for_this_pod_is_refused() {
    let mut s = Story::led();
    let i = Instruction { vmi: "w".into(), ..instruction(InstructKind::Kill, "k", 5) };
    s.instruct(i, None);
    assert_eq!(s.refusals(), [RefusalReason::Superseded]);
}

#[test]
fn a_machine_that_is_there_already_is_the_launchers_to_answer_for() {
    // The agent lost its memory: it learns from the launcher, and touches no network.
    let mut s = Story::new();
    s.pod(true);
    s.linked(7, DomainState::Running);
    s.on(Input::SessionOpened { session: 1, epoch: Epoch(10) });
    s.start(5);
    assert_eq!(s.executed(), [InstructKind::Start]);
    assert!(!s.all.contains(&Command::PrepareNetwork));
}

#[test]
fn a_stop_overtakes_a_start_that_waits() {
    let mut s = Story::led();
    s.start(5);
    s.instruct(instruction(InstructKind::Kill, "k", 5), None);
    assert_eq!(s.refusals(), [RefusalReason::Superseded]);
    s.on(Input::NetworkPrepared(Ok(())));
    assert_eq!(s.executed(), [InstructKind::Kill]);
}

#[test]
fn a_lost_answer_is_asked_for_again_and_never_turned_into_a_refusal() {
    let mut s = Story::led();
    s.start(5);
    s.on(Input::NetworkPrepared(Ok(())));
    s.on(Input::LauncherAcked { id: "s".into(), result: None });
    assert_eq!(s.executed().len(), 1, "not at once");
    s.on(Input::LauncherLost);
    s.wait(Millis::secs(300));
    assert_eq!(s.answers(), Vec::<&AckResult>::new());
    s.linked(1, DomainState::Absent);
    assert_eq!(s.executed(), [InstructKind::Start, InstructKind::Start]);
    assert_eq!(s.all.iter().filter(|c| **c == Command::PrepareNetwork).count(), 1);
}

#[test]
fn what_waits_has_an_end() {
    let mut s = Story::new();
    s.on(Input::SessionOpened { session: 1, epoch: Epoch(10) });
    s.start(5);
    s.wait(Millis::secs(20));
    assert_eq!(s.refusals(), [RefusalReason::Failed], "the pod is not here");
    assert!(s.has(|c| *c == Command::Forget));

    let mut s = Story::new();
    s.pod(true);
    s.on(Input::SessionOpened { session: 1, epoch: Epoch(10) });
    s.start(5);
    s.wait(Millis::secs(50));
    assert_eq!(s.refusals(), []);
    s.wait(Millis::secs(20));
    assert_eq!(s.refusals(), [RefusalReason::Failed], "the launcher does not answer");

    let mut s = Story::led();
    s.start(5);
    s.on(Input::NetworkPrepared(Err((RefusalReason::Unsupported, "no".into()))));
    assert_eq!(s.refusals(), [RefusalReason::Unsupported]);
    // Who asks again may have asked before that answer came: another answer would make one of the two wrong.
    let tries = |s: &Story| s.out.iter().filter(|c| **c == Command::PrepareNetwork).count();
    let before = tries(&s);
    s.start(5);
    assert!(!s.refusals().is_empty() && s.refusals().iter().all(|r| *r == RefusalReason::Unsupported));
    assert_eq!(tries(&s), before);
}

#[test]
fn waiting_instructions_are_bounded() {
    let mut s = Story::led();
    s.on(Input::LauncherLost);
    for n in 0..40 {
        s.instruct(instruction(InstructKind::Shutdown, &format!("i{n}"), 5), None);
    }
    assert_eq!(s.refusals().len(), 24);
}

// 2. Epochs and sessions

#[test]
fn only_the_session_that_stands_is_heard() {
    let mut s = Story::led();
    s.on(Input::SessionOpened { session: 2, epoch: Epoch(11) });
    s.start(5);
    s.on(Input::Instructed {
        session: 2,
        epoch: Epoch(10),
        instruction: instruction(InstructKind::Start, "s", 5),
        vmi: Some(vmi(5)),
    });
    assert_eq!(s.refusals(), [RefusalReason::LowerEpoch, RefusalReason::LowerEpoch]);
    assert!(!s.all.contains(&Command::PrepareNetwork));
}

#[test]
fn closing_a_session_voids_what_it_has_not_started() {
    for close in [Input::SessionClosed { session: 1 }, Input::SessionOpened { session: 2, epoch: Epoch(11) }] {
        let mut s = Story::led();
        s.start(5);
        s.on(close);
        s.on(Input::NetworkPrepared(Ok(())));
        assert_eq!(s.executed(), []);
        s.wait(Millis::secs(300));
        assert_eq!(s.executed(), []);
    }
}

#[test]
fn a_late_end_of_an_old_session_does_not_end_the_new_one() {
    let mut s = Story::led();
    s.on(Input::SessionOpened { session: 2, epoch: Epoch(11) });
    s.on(Input::SessionClosed { session: 1 });
    s.on(Input::LauncherReported(domain(2, DomainState::Running)));
    assert!(s.has(|c| matches!(c, Command::Report(_))));
}

#[test]
fn a_launcher_that_heard_a_higher_epoch_is_told_with_that() {
    let mut s = Story::ready();
    s.on(Input::LauncherConnected { launcher: "l".into(), epoch: Epoch(99) });
    s.on(Input::SessionOpened { session: 1, epoch: Epoch(10) });
    s.start(5);
    s.on(Input::NetworkPrepared(Ok(())));
    assert!(s.has(|c| matches!(c, Command::Execute { epoch: Epoch(99), .. })), "{:?}", s.out);
}

// 3. Reports

#[test]
fn reports_are_changes_and_older_words_are_ignored() {
    let mut s = Story::led();
    s.on(Input::LauncherReported(domain(5, DomainState::Running)));
    assert!(s.has(|c| matches!(c, Command::Report(d) if d.state == DomainState::Running)));
    s.on(Input::LauncherReported(domain(5, DomainState::Running)));
    s.on(Input::LauncherReported(domain(4, DomainState::Starting)));
    s.on(Input::LauncherReported(Domain { pod: "q".into(), ..domain(9, DomainState::Stopped) }));
    s.on(Input::LauncherReported(Domain { vmi: "w".into(), ..domain(9, DomainState::Stopped) }));
    assert_eq!(s.cell.view().unwrap().state, DomainState::Running);
    assert_eq!(s.all.iter().filter(|c| matches!(c, Command::Report(_))).count(), 1);
}

#[test]
fn silence_is_deafness_after_a_while_and_never_absence() {
    let mut s = Story::new();
    s.pod(true);
    assert!(s.cell.is_unsettled(), "too early to say");
    assert_eq!(s.cell.view(), None);
    s.wait(Millis::secs(11));
    s.on(Input::Elapsed);
    assert_eq!(s.cell.view().unwrap().state, DomainState::Deaf);
    assert!(!s.cell.is_unsettled());
    // A hiccup of one that was heard shows nothing.
    let mut s = Story::running();
    s.on(Input::SessionOpened { session: 1, epoch: Epoch(10) });
    s.on(Input::LauncherLost);
    s.wait(Millis::secs(5));
    s.linked(2, DomainState::Running);
    assert!(!s.all.iter().any(|c| matches!(c, Command::Report(_))));
    s.on(Input::LauncherLost);
    s.wait(Millis::secs(11));
    assert_eq!(s.cell.view().unwrap().state, DomainState::Deaf);
    s.linked(2, DomainState::Running);
    assert!(matches!(s.all.last(), Some(Command::Report(d)) if d.state == DomainState::Running), "{:?}", s.all.last());
}

#[test]
fn absent_is_a_pod_that_was_looked_at_and_whose_launcher_does_not_run() {
    let mut s = Story::running();
    s.pod(false);
    assert_eq!(s.cell.view().unwrap().state, DomainState::Running, "it answers, so it lives");
    s.on(Input::LauncherLost);
    assert_eq!(s.cell.view().unwrap().state, DomainState::Absent);
    let mut fresh = Story::new();
    fresh.pod(false);
    assert_eq!(fresh.cell.view().unwrap().state, DomainState::Absent);
    // How it ended outlives the process.
    let mut s = Story::running();
    s.on(Input::LauncherEnded(outcome(4)));
    s.on(Input::LauncherLost);
    s.pod(false);
    assert_eq!(s.cell.view().unwrap().state, DomainState::Stopped);
}

#[test]
fn an_outcome_is_on_disk_before_it_is_told_and_told_until_it_is_acknowledged() {
    let mut s = Story::running();
    s.on(Input::LauncherEnded(outcome(4)));
    assert_eq!(s.out, [Command::KeepOutcome(outcome(4))]);
    s.on(Input::SessionOpened { session: 1, epoch: Epoch(10) });
    assert_eq!(s.cell.outcome(), Some(&outcome(4)), "in the inventory");
    assert_eq!(s.out, []);
    s.on(Input::OutcomeAcked { seq: 3 });
    assert!(s.cell.outcome().is_some(), "an older one");
    s.on(Input::LauncherEnded(outcome(4)));
    assert_eq!(s.out, [], "known");
    s.on(Input::OutcomeAcked { seq: 4 });
    assert_eq!(s.out, [Command::DropOutcome]);
    s.on(Input::LauncherEnded(outcome(4)));
    assert_eq!(s.out, [], "told again by its launcher");

    let mut s = Story::led();
    s.on(Input::LauncherEnded(outcome(4)));
    assert!(s.out.starts_with(&[Command::KeepOutcome(outcome(4)), Command::TellOutcome(outcome(4))]), "{:?}", s.out);
}

#[test]
fn an_outcome_outlives_agent_and_pod() {
    let mut s = Story::new();
    s.on(Input::OutcomeRestored(outcome(4)));
    s.on(Input::PodGone);
    assert!(!s.has(|c| *c == Command::Forget));
    s.wait(Millis::secs(24 * 3600));
    s.on(Input::SessionOpened { session: 1, epoch: Epoch(10) });
    assert_eq!(s.cell.outcome(), Some(&outcome(4)));
    s.on(Input::OutcomeAcked { seq: 4 });
    assert_eq!(s.out, [Command::DropOutcome, Command::Forget]);
    // Nobody ever comes.
    let mut s = Story::new();
    s.on(Input::OutcomeRestored(outcome(4)));
    s.on(Input::PodGone);
    s.wait(Millis::secs(8 * 24 * 3600));
    assert!(s.all.ends_with(&[Command::DropOutcome, Command::Forget]), "{:?}", s.all);
}

// 4. Without a controller

#[test]
fn a_vmi_seen_being_deleted_is_shut_down_once_and_by_the_controllers_id() {
    let mut s = Story::running();
    s.on(Input::VmiObserved(VmiFacts { deleting: true, ..vmi(6) }));
    let id = instruction_id(&"v".into(), &"p".into(), "shutdown", "7000");
    assert!(
        s.has(|c| matches!(c, Command::Execute { instruction, .. } if instruction.id == id && instruction.deadline == Millis::secs(7))),
        "{:?}",
        s.out
    );
    s.on(Input::VmiObserved(VmiFacts { deleting: true, ..vmi(7) }));
    s.on(Input::LauncherReported(domain(3, DomainState::ShuttingDown)));
    s.wait(Millis::secs(100));
    assert_eq!(s.executed(), [InstructKind::Shutdown]);
    // A shorter grace is another level, none is a kill.
    s.on(Input::VmiObserved(VmiFacts { deleting: true, grace: Millis::secs(1), ..vmi(8) }));
    s.on(Input::VmiObserved(VmiFacts { deleting: true, grace: Millis(0), ..vmi(9) }));
    assert_eq!(s.executed(), [InstructKind::Shutdown, InstructKind::Shutdown, InstructKind::Kill]);
}

#[test]
fn a_stop_of_our_own_is_sent_again_when_its_answer_was_lost() {
    let mut s = Story::running();
    s.on(Input::VmiObserved(VmiFacts { deleting: true, ..vmi(6) }));
    let id = instruction_id(&"v".into(), &"p".into(), "shutdown", "7000");
    s.on(Input::LauncherAcked { id, result: None });
    assert_eq!(s.executed().len(), 1);
    s.wait(Millis::secs(3));
    assert_eq!(s.executed().len(), 2);
}

#[test]
fn nothing_is_started_resumed_or_stopped_without_a_word() {
    // Scheduled here, and nobody instructs.
    let mut s = Story::ready();
    s.on(Input::VmiObserved(vmi(5)));
    s.wait(Millis::secs(3600));
    // Paused for an hour.
    let mut p = Story::running();
    p.on(Input::LauncherReported(domain(3, DomainState::Paused)));
    p.wait(Millis::secs(3600));
    // Being deleted before it was started: the pod's own SIGTERM does it.
    let mut d = Story::ready();
    d.on(Input::VmiObserved(VmiFacts { deleting: true, ..vmi(6) }));
    for s in [s, p, d] {
        assert_eq!(s.executed(), []);
    }
}

#[test]
fn a_vmi_that_is_missing_is_asked_for_once_and_stops_nobody() {
    for answer in [Confirmed::Gone, Confirmed::Found(vmi(6)), Confirmed::Found(VmiFacts { uid: "w".into(), ..vmi(90) })]
    {
        let mut s = Story::running();
        s.on(Input::VmiVanished);
        assert!(s.has(confirms));
        s.on(Input::VmiVanished);
        assert!(!s.has(confirms), "one question at a time");
        s.on(Input::VmiConfirmed(answer));
        s.wait(Millis::secs(3600));
        assert_eq!(s.all.iter().filter(|c| confirms(c)).count(), 1);
        assert_eq!(s.executed(), []);
    }
    // Nor does it help to have seen it end, once it is gone or another has its name: the pod's removal ends the domain.
    for answer in [Confirmed::Gone, Confirmed::Found(VmiFacts { uid: "w".into(), ..vmi(90) })] {
        let mut s = Story::running();
        s.on(Input::VmiObserved(VmiFacts { stage: Stage::Final, ..vmi(9) }));
        s.on(Input::VmiConfirmed(answer));
        s.wait(Millis::secs(3600));
        assert_eq!(s.all.iter().filter(|c| confirms(c)).count(), 1, "the API server is asked without end");
        assert_eq!(s.executed(), []);
    }
}

#[test]
fn an_unanswered_question_is_asked_again_ever_more_slowly() {
    let mut s = Story::running();
    s.on(Input::VmiVanished);
    let mut asked = 1;
    for _ in 0..200 {
        if s.has(confirms) {
            s.on(Input::VmiConfirmed(Confirmed::Unanswered));
        }
        let before = s.all.len();
        s.wait(Millis::secs(5));
        asked += s.all.iter().skip(before).filter(|c| confirms(c)).count();
    }
    assert!((10..40).contains(&asked), "{asked} in 1000 s");
    assert_eq!(s.executed(), []);
}

#[test]
fn a_stray_is_destroyed_but_only_on_a_live_answer() {
    let over = VmiFacts { stage: Stage::Final, ..vmi(9) };
    let other = VmiFacts { active_pods: [("q".into(), "node".into())].into(), ..vmi(9) };
    for disowning in [over, other] {
        let mut s = Story::running();
        s.on(Input::VmiObserved(disowning.clone()));
        assert!(s.has(confirms));
        assert_eq!(s.executed(), [], "a watch may lie");
        s.on(Input::VmiConfirmed(Confirmed::Found(disowning)));
        assert_eq!(s.executed(), [InstructKind::Kill]);
    }
    // Emptied, restored, edited: no stray.
    for innocent in [
        VmiFacts { active_pods: Default::default(), ..vmi(9) },
        VmiFacts { stage: Stage::Before, active_pods: Default::default(), ..vmi(9) },
        VmiFacts { active_pods: [("p".into(), "node-2".into())].into(), ..vmi(9) },
    ] {
        let mut s = Story::running();
        s.on(Input::VmiObserved(innocent.clone()));
        s.on(Input::VmiVanished);
        s.on(Input::VmiConfirmed(Confirmed::Found(innocent)));
        s.wait(Millis::secs(60));
        assert_eq!(s.executed(), []);
    }
}

#[test]
fn after_a_restored_store_versions_begin_again() {
    let mut s = Story::led();
    s.on(Input::VmiObserved(VmiFacts { stage: Stage::Before, ..vmi(900) }));
    s.on(Input::StoreRestored);
    s.start(5);
    assert!(s.has(|c| *c == Command::PrepareNetwork));
}

#[test]
fn the_readiness_gate_is_written_once_for_each_level() {
    let mut s = Story::ready();
    s.on(Input::VmiObserved(VmiFacts { stage: Stage::Before, ..vmi(4) }));
    assert!(!s.has(|c| matches!(c, Command::WriteUnpaused(_))));
    s.on(Input::VmiObserved(vmi(5)));
    assert!(s.has(|c| *c == Command::WriteUnpaused(true)));
    s.on(Input::UnpausedWritten { unpaused: true, done: false });
    s.wait(Millis::secs(2));
    assert_eq!(s.all.iter().filter(|c| matches!(c, Command::WriteUnpaused(true))).count(), 2, "it failed");
    s.on(Input::UnpausedWritten { unpaused: true, done: true });
    for (seq, state) in [(2, DomainState::Starting), (3, DomainState::Running), (4, DomainState::ShuttingDown)] {
        s.on(Input::LauncherReported(domain(seq, state)));
        assert!(!s.has(|c| matches!(c, Command::WriteUnpaused(_))), "{state:?}");
    }
    s.on(Input::LauncherReported(domain(5, DomainState::Paused)));
    assert!(s.has(|c| *c == Command::WriteUnpaused(false)));
}

#[test]
fn tearing_down_what_was_never_set_up_succeeds() {
    let mut s = Story::new();
    s.on(Input::PodGone);
    assert_eq!(s.out, [Command::Forget]);
    let mut s = Story::led();
    s.start(5);
    s.on(Input::PodGone);
    assert_eq!(s.refusals(), [RefusalReason::Failed]);
    assert!(s.has(|c| *c == Command::Forget));
    let mut s = Story::led();
    s.on(Input::LauncherLost);
    s.pod(false);
    s.instruct(instruction(InstructKind::Shutdown, "h", 5), None);
    assert!(matches!(s.answers()[0], AckResult::Done { .. }));
}

#[test]
fn verbs_go_to_the_machine_that_they_name() {
    let s = Story::running();
    assert_eq!(s.cell.admit_verb(&"v".into()), Ok(()));
    assert_eq!(s.cell.admit_verb(&"w".into()).unwrap_err().0, "not-found");
    let mut s = Story::running();
    s.on(Input::LauncherLost);
    assert_eq!(s.cell.admit_verb(&"v".into()).unwrap_err().0, "not-ready");
    s.pod(false);
    assert_eq!(s.cell.admit_verb(&"v".into()).unwrap_err().0, "not-running");
    assert_eq!(Story::new().cell.admit_verb(&"v".into()).unwrap_err().0, "not-ready", "not enumerated yet");
    s.on(Input::PodGone);
    assert_eq!(s.cell.admit_verb(&"v".into()).unwrap_err().0, "not-found");
}

/// Every input in every order of a few, with the clock going on: the cell never starts what was not instructed in the session
/// that stands, never runs out of bounds, and what it asks for is the same each time.
#[test]
fn any_order_of_events_is_survived() {
    let inputs: Vec<Input> = vec![
        Input::PodObserved { vmi: "v".into(), running: true },
        Input::PodObserved { vmi: "v".into(), running: false },
        Input::PodGone,
        Input::LauncherConnected { launcher: "l".into(), epoch: Epoch(3) },
        Input::LauncherLost,
        Input::LauncherReported(domain(1, DomainState::Absent)),
        Input::LauncherReported(domain(2, DomainState::Running)),
        Input::LauncherEnded(outcome(4)),
        Input::VmiObserved(vmi(5)),
        Input::VmiObserved(VmiFacts { deleting: true, ..vmi(6) }),
        Input::VmiVanished,
        Input::VmiConfirmed(Confirmed::Gone),
        Input::StoreRestored,
        Input::SessionOpened { session: 1, epoch: Epoch(10) },
        Input::SessionClosed { session: 1 },
        Input::NetworkPrepared(Ok(())),
        Input::LauncherAcked { id: "s".into(), result: None },
        Input::OutcomeAcked { seq: 4 },
        Input::UnpausedWritten { unpaused: true, done: false },
        Input::Elapsed,
        Input::Instructed {
            session: 1,
            epoch: Epoch(10),
            instruction: instruction(InstructKind::Start, "s", 5),
            vmi: Some(vmi(5)),
        },
    ];
    let n = inputs.len() as u64;
    let mut seed = 1u64;
    for _ in 0..3000 {
        let mut story = Story::new();
        let mut twin = Story::new();
        let mut instructed = false;
        for _ in 0..30 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let input = inputs[usize::try_from((seed >> 33) % n).unwrap()].clone();
            if let Input::Instructed { .. } = input {
                instructed |= story.cell.session() == Some(1);
            }
            let step = story.on(input.clone()).to_vec();
            assert_eq!(twin.on(input), step);
            let starts = |c: &Command| matches!(c, Command::Execute { instruction, .. } if instruction.kind == InstructKind::Start);
            if step.iter().any(starts) {
                assert!(instructed && story.cell.session() == Some(1));
            }
            assert!(story.cell.pending.len() <= 1);
            let again = story.cell.clone().step(&Event::new(story.now, Input::Elapsed));
            let news: Vec<_> = again.iter().filter(|c| !matches!(c, Command::Wake { .. } | Command::Forget)).collect();
            assert!(news.is_empty(), "planned twice: {news:?}");
            story.now = story.now.after(Millis((seed >> 50) % SECOND));
            twin.now = story.now;
        }
    }
}

#[test]
fn any_order_of_the_same_sights_ends_in_the_same_level() {
    let seen = |n: usize| match n {
        0 => Input::PodObserved { vmi: "v".into(), running: true },
        1 => Input::VmiObserved(vmi(5)),
        2 => Input::VmiObserved(vmi(6)),
        3 => Input::LauncherReported(domain(2, DomainState::Starting)),
        4 => Input::LauncherReported(domain(3, DomainState::Running)),
        _ => Input::LauncherReported(domain(4, DomainState::Paused)),
    };
    let mut orders: Vec<Vec<usize>> = vec![vec![]];
    for i in 0..6 {
        let at = |o: Vec<usize>| (0..=o.len()).map(move |at| [&o[..at], &[i], &o[at..]].concat()).collect::<Vec<_>>();
        orders = orders.into_iter().flat_map(at).collect();
    }
    assert_eq!(orders.len(), 720);
    let end = |order: &[usize]| {
        let mut s = Story::new();
        s.on(Input::LauncherConnected { launcher: "l".into(), epoch: Epoch(0) });
        for n in order {
            s.now = Timestamp(1_000_000);
            s.on(seen(*n));
        }
        s.cell.view()
    };
    let first = end(&orders[0]);
    assert_eq!(first.as_ref().map(|d| d.state), Some(DomainState::Paused));
    for order in &orders {
        assert_eq!(end(order), first, "{order:?}");
    }
}
