//! What a launcher may do with an instruction: the whole of its authority, without any effect.
//!
//! A launcher starts at most one domain in its life, for one (VMI UID, pod UID). The latch remembers that, the
//! highest epoch that it was spoken to with, the highest resourceVersion of its VMI, and what it answered to each
//! instruction. All of it lives exactly as long as the domain, because it lives in the same process: an agent that
//! lost its own memory learns from here.
//!
//! | asked | no domain yet | domain | domain over |
//! |---|---|---|---|
//! | other VMI or pod | `superseded` | `superseded` | `superseded` |
//! | lower epoch | `lower-epoch` | `lower-epoch` | `lower-epoch` |
//! | known id | its answer | its answer | its answer |
//! | START | start, if the VMI that comes with it says so | `already-started` | `already-started` |
//! | SHUTDOWN, KILL | close: nothing will ever start | stop | done |
//! | PAUSE, RESUME | `failed` | do it | `failed` |
//!
//! Instructions may be lost (the sender repeats the level), come twice (the id is known) or late (the epoch or the
//! VMI that they carry is old); in none of these cases a second domain starts.

use std::collections::{BTreeMap, VecDeque};

use crate::limits;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Start the domain.
    Start,
    /// Power button, then kill at the deadline.
    Shutdown,
    /// End it at once.
    Kill,
    /// Halt the vCPUs.
    Pause,
    /// Let them go on.
    Resume,
}

/// What a VMI says about the authority to start it; see `protocol`: the VMI at this resourceVersion, not a number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmiFacts {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.resourceVersion`.
    pub resource_version: String,
    /// `metadata.deletionTimestamp` is set.
    pub deleting: bool,
    /// `status.phase`.
    pub phase: String,
    /// `status.activePods` has this launcher's pod.
    pub names_this_pod: bool,
}

impl VmiFacts {
    /// Reads them from the object; `pod_uid` is the launcher's own.
    pub fn read(vmi: &serde_json::Value, pod_uid: &str) -> Self {
        let text = |pointer: &str| vmi.pointer(pointer).and_then(|v| v.as_str()).unwrap_or_default().to_owned();
        Self {
            uid: text("/metadata/uid"),
            resource_version: text("/metadata/resourceVersion"),
            deleting: vmi.pointer("/metadata/deletionTimestamp").is_some_and(|v| !v.is_null()),
            phase: text("/status/phase"),
            names_this_pod: vmi.pointer("/status/activePods").and_then(|p| p.get(pod_uid)).is_some(),
        }
    }
}

/// An instruction as the latch sees it.
#[derive(Clone, Debug)]
pub struct Asked<'a> {
    /// The leader's epoch.
    pub epoch: u64,
    /// The instruction's id.
    pub id: &'a str,
    /// What is asked for.
    pub kind: Kind,
    /// For which VMI.
    pub vmi_uid: &'a str,
    /// For which pod.
    pub pod_uid: &'a str,
    /// Do not act on anything older.
    pub vmi_rv: &'a str,
    /// The VMI that came with it, where one is needed and could be read.
    pub vmi: Option<&'a VmiFacts>,
}

/// Why an instruction was refused: the reason codes of the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Another VMI or pod, or the VMI says that this pod is not (or no longer) to run it.
    Superseded,
    /// A deposed leader.
    LowerEpoch,
    /// The VMI that came with it is older than the one that authorises it.
    OlderVmi,
    /// The one start of this launcher was used.
    AlreadyStarted,
    /// Tried, or not possible in this state.
    Failed,
    /// The hypervisor driver cannot do it.
    Unsupported,
}

impl Reason {
    /// The code on the wire.
    pub fn code(self) -> &'static str {
        match self {
            Reason::Superseded => "superseded",
            Reason::LowerEpoch => "lower-epoch",
            Reason::OlderVmi => "older-vmi",
            Reason::AlreadyStarted => "already-started",
            Reason::Failed => "failed",
            Reason::Unsupported => "unsupported",
        }
    }
}

/// The answer to an instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Taken; the result comes as a level.
    Accepted,
    /// Carried out.
    Done(String),
    /// Not carried out.
    Refused(Reason, String),
}

/// What is to be done about an instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nothing but to answer.
    Answer(Answer),
    /// Carry it out; the id is on record as accepted until [`Latch::settled`].
    Begin(Kind),
    /// There is no domain and there will be none: the launcher is over.
    Close,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Empty,
    Started,
    Over,
}

/// The memory of one launcher.
#[derive(Debug, Clone)]
pub struct Latch {
    vmi_uid: String,
    pod_uid: String,
    phase: Phase,
    epoch: u64,
    vmi_rv: String,
    answers: BTreeMap<String, Answer>,
    order: VecDeque<String>,
}

impl Latch {
    /// An empty latch of the launcher of `pod_uid`.
    pub fn new(vmi_uid: &str, pod_uid: &str) -> Self {
        Self {
            vmi_uid: vmi_uid.into(),
            pod_uid: pod_uid.into(),
            phase: Phase::Empty,
            epoch: 0,
            vmi_rv: String::new(),
            answers: BTreeMap::new(),
            order: VecDeque::new(),
        }
    }

    /// The highest epoch that was heard.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The highest resourceVersion of the VMI that was heard.
    pub fn vmi_rv(&self) -> &str {
        &self.vmi_rv
    }

    /// A domain is or was there.
    pub fn used(&self) -> bool {
        self.phase != Phase::Empty
    }

    /// Decides about an instruction and remembers what has to be remembered about it.
    pub fn decide(&mut self, asked: &Asked<'_>) -> Decision {
        if asked.vmi_uid != self.vmi_uid || asked.pod_uid != self.pod_uid {
            let message = format!("this launcher is of VMI {} and pod {}", self.vmi_uid, self.pod_uid);
            return refuse(Reason::Superseded, message);
        }
        if asked.epoch < self.epoch {
            return refuse(Reason::LowerEpoch, format!("epoch {} is below {}", asked.epoch, self.epoch));
        }
        self.epoch = asked.epoch;
        if older(&self.vmi_rv, asked.vmi_rv) {
            self.vmi_rv = asked.vmi_rv.into();
        }
        if let Some(answer) = self.answers.get(asked.id) {
            return Decision::Answer(answer.clone());
        }
        match (asked.kind, self.phase) {
            (Kind::Start, Phase::Empty) => {
                if let Err((reason, message)) = self.authorised(asked) {
                    return refuse(reason, message);
                }
                self.phase = Phase::Started;
                self.remember(asked.id, Answer::Accepted);
                Decision::Begin(Kind::Start)
            }
            (Kind::Start, Phase::Started | Phase::Over) => {
                refuse(Reason::AlreadyStarted, "this launcher has started its one domain".into())
            }
            (Kind::Shutdown | Kind::Kill, Phase::Empty) => {
                self.phase = Phase::Over;
                self.remember(asked.id, Answer::Done("nothing was started".into()));
                Decision::Close
            }
            (Kind::Shutdown | Kind::Kill | Kind::Pause | Kind::Resume, Phase::Started) => {
                self.remember(asked.id, Answer::Accepted);
                Decision::Begin(asked.kind)
            }
            (Kind::Shutdown | Kind::Kill, Phase::Over) => Decision::Answer(Answer::Done("the domain is over".into())),
            (Kind::Pause | Kind::Resume, Phase::Empty | Phase::Over) => {
                refuse(Reason::Failed, "there is no domain".into())
            }
        }
    }

    /// The pod is being ended from outside: whether there is a domain to stop. Nothing starts from now on.
    pub fn close(&mut self) -> bool {
        let domain = self.phase == Phase::Started;
        if self.phase == Phase::Empty {
            self.phase = Phase::Over;
        }
        domain
    }

    /// The domain is over.
    pub fn ended(&mut self) {
        self.phase = Phase::Over;
    }

    /// An instruction that was begun has its result.
    pub fn settled(&mut self, id: &str, answer: Answer) {
        self.remember(id, answer);
    }

    fn authorised(&self, asked: &Asked<'_>) -> Result<(), (Reason, String)> {
        let Some(vmi) = asked.vmi else {
            return Err((Reason::Unsupported, "the instruction carries no VMI that can be read".into()));
        };
        if vmi.uid != self.vmi_uid {
            return Err((Reason::Superseded, format!("the VMI that came with it has UID {}", vmi.uid)));
        }
        if older(&vmi.resource_version, &self.vmi_rv) {
            let message = format!("the VMI is at {}, and {} is known", vmi.resource_version, self.vmi_rv);
            return Err((Reason::OlderVmi, message));
        }
        if vmi.deleting {
            return Err((Reason::Superseded, "the VMI is being deleted".into()));
        }
        if vmi.phase != "Scheduled" && vmi.phase != "Running" {
            return Err((Reason::Superseded, format!("the VMI's phase is {:?}", vmi.phase)));
        }
        if !vmi.names_this_pod {
            return Err((Reason::Superseded, "the VMI's activePods does not have this pod".into()));
        }
        Ok(())
    }

    fn remember(&mut self, id: &str, answer: Answer) {
        if self.answers.insert(id.into(), answer).is_none() {
            self.order.push_back(id.into());
        }
        if self.order.len() > limits::INSTRUCTIONS
            && let Some(oldest) = self.order.pop_front()
        {
            self.answers.remove(&oldest);
        }
    }
}

fn refuse(reason: Reason, message: String) -> Decision {
    Decision::Answer(Answer::Refused(reason, message))
}

/// Whether resourceVersion `a` is older than `b`: decimal numbers of any length. What is no number is older than nothing.
fn older(a: &str, b: &str) -> bool {
    let number = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    if !number(a) || !number(b) {
        return false;
    }
    let (a, b) = (a.trim_start_matches('0'), b.trim_start_matches('0'));
    (a.len(), a) < (b.len(), b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vmi(rv: &str) -> VmiFacts {
        VmiFacts {
            uid: "v".into(),
            resource_version: rv.into(),
            deleting: false,
            phase: "Scheduled".into(),
            names_this_pod: true,
        }
    }

    fn asked<'a>(kind: Kind, id: &'a str, vmi: &'a VmiFacts) -> Asked<'a> {
        Asked { epoch: 5, id, kind, vmi_uid: "v", pod_uid: "p", vmi_rv: "10", vmi: Some(vmi) }
    }

    fn reason(d: Decision) -> &'static str {
        match d {
            Decision::Answer(Answer::Refused(r, _)) => r.code(),
            Decision::Answer(Answer::Accepted) => "accepted",
            Decision::Answer(Answer::Done(_)) => "done",
            Decision::Begin(_) => "begin",
            Decision::Close => "close",
        }
    }

    fn latch(phase: &str) -> Latch {
        let mut l = Latch::new("v", "p");
        match phase {
            "empty" => {}
            "started" => {
                l.decide(&asked(Kind::Start, "start", &vmi("10")));
            }
            "over" => {
                l.decide(&asked(Kind::Start, "start", &vmi("10")));
                l.ended();
            }
            other => panic!("{other}"),
        }
        l
    }

    #[test]
    fn every_kind_in_every_phase() {
        let table = [
            (Kind::Start, ["begin", "already-started", "already-started"]),
            (Kind::Shutdown, ["close", "begin", "done"]),
            (Kind::Kill, ["close", "begin", "done"]),
            (Kind::Pause, ["failed", "begin", "failed"]),
            (Kind::Resume, ["failed", "begin", "failed"]),
        ];
        for (kind, expected) in table {
            for (phase, expected) in ["empty", "started", "over"].into_iter().zip(expected) {
                let got = reason(latch(phase).decide(&asked(kind, "x", &vmi("10"))));
                assert_eq!(got, expected, "{kind:?} when {phase}");
            }
        }
    }

    #[test]
    fn a_start_needs_the_vmi_to_say_so() {
        let cases: [(&str, VmiFacts); 6] = [
            ("begin", VmiFacts { phase: "Running".into(), ..vmi("10") }),
            ("superseded", VmiFacts { uid: "w".into(), ..vmi("10") }),
            ("superseded", VmiFacts { deleting: true, ..vmi("10") }),
            ("superseded", VmiFacts { phase: "Failed".into(), ..vmi("10") }),
            ("superseded", VmiFacts { names_this_pod: false, ..vmi("10") }),
            ("older-vmi", vmi("9")),
        ];
        for (expected, facts) in cases {
            let mut l = latch("empty");
            assert_eq!(reason(l.decide(&asked(Kind::Start, "x", &facts))), expected, "{facts:?}");
            assert_eq!(l.used(), expected == "begin");
        }
        let mut l = latch("empty");
        let f = vmi("10");
        let mut without = asked(Kind::Start, "x", &f);
        without.vmi = None;
        assert_eq!(reason(l.decide(&without)), "unsupported");
    }

    #[test]
    fn identity_comes_before_everything_and_leaves_no_trace() {
        let f = vmi("10");
        for (v, p) in [("w", "p"), ("v", "q")] {
            let mut l = latch("started");
            let a = Asked { epoch: 99, vmi_uid: v, pod_uid: p, ..asked(Kind::Kill, "start", &f) };
            assert_eq!(reason(l.decide(&a)), "superseded");
            assert_eq!(l.epoch(), 5, "a stranger's epoch is not ours");
        }
    }

    #[test]
    fn a_lower_epoch_is_refused_even_for_a_known_id() {
        let f = vmi("10");
        let mut l = latch("started");
        l.decide(&Asked { epoch: 7, ..asked(Kind::Pause, "p1", &f) });
        assert_eq!(reason(l.decide(&Asked { epoch: 6, ..asked(Kind::Kill, "k", &f) })), "lower-epoch");
        assert_eq!(reason(l.decide(&asked(Kind::Start, "start", &f))), "lower-epoch");
        assert_eq!(reason(l.decide(&Asked { epoch: 7, ..asked(Kind::Kill, "k", &f) })), "begin");
    }

    #[test]
    fn a_repeated_id_gets_its_answer_and_no_second_effect() {
        let f = vmi("10");
        let mut l = latch("empty");
        assert_eq!(reason(l.decide(&asked(Kind::Start, "s", &f))), "begin");
        assert_eq!(reason(l.decide(&asked(Kind::Start, "s", &f))), "accepted");
        l.settled("s", Answer::Done("running".into()));
        assert_eq!(l.decide(&asked(Kind::Start, "s", &f)), Decision::Answer(Answer::Done("running".into())));
        assert_eq!(reason(l.decide(&asked(Kind::Start, "s2", &f))), "already-started");
        l.ended();
        assert_eq!(l.decide(&asked(Kind::Start, "s", &f)), Decision::Answer(Answer::Done("running".into())));
    }

    #[test]
    fn a_lower_resource_version_alone_is_no_refusal() {
        let f = vmi("10");
        let mut l = latch("started");
        l.decide(&Asked { vmi_rv: "20", ..asked(Kind::Pause, "a", &f) });
        assert_eq!(reason(l.decide(&Asked { vmi_rv: "15", ..asked(Kind::Resume, "b", &f) })), "begin");
        assert_eq!(l.vmi_rv(), "20");
    }

    #[test]
    fn closed_from_outside_nothing_starts() {
        let f = vmi("10");
        let mut l = latch("empty");
        assert!(!l.close());
        assert_eq!(reason(l.decide(&asked(Kind::Start, "s", &f))), "already-started");
        assert!(latch("started").close());
        assert!(!latch("over").close());
    }

    #[test]
    fn the_table_is_bounded() {
        let f = vmi("10");
        let mut l = latch("started");
        for i in 0..2 * limits::INSTRUCTIONS {
            l.decide(&asked(Kind::Pause, &format!("i{i}"), &f));
        }
        assert!(l.answers.len() <= limits::INSTRUCTIONS);
        assert_eq!(l.order.len(), l.answers.len());
    }

    #[test]
    fn resource_versions_compare_as_numbers_of_any_length() {
        assert!(older("9", "10") && older("009", "10") && older("99999999999999999999", "100000000000000000000"));
        assert!(older("", "1"));
        assert!(!older("10", "10") && !older("11", "10") && !older("x", "10") && !older("1", "x"));
    }
}
