//! Steps of a start or a stop as data: where they begin and end. The driver makes spans of them.
//!
//! The trace's id comes with the VM's spec (annotation `virtfold.io/traceparent`), whose write is the root of the trace. Several
//! operations can follow from one write (a start, the stop that a deletion brings, the start after a crash of the guest), so a
//! span's id is derived from (trace, instance, operation, step): a step that is repeated after a crash is the same span again, and
//! that of another instance is another.
//!
//! A leader tells what ends under its eyes. What ended between its predecessor's last sign of life and its own first look nobody has
//! told: it tells that, too, from the times that the objects carry ([`Reign`]).

use crate::{Timestamp, VmiUid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Steps of an operation, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Step {
    /// The VMI is created.
    Create,
    /// The pod is created and has a node.
    Place,
    /// The pod's volumes and containers are up.
    Prepare,
    /// The VMI says which pod may run the domain.
    Authorise,
    /// The domain's vCPUs run.
    Boot,
    /// Status says so. A start ends with it.
    Publish,
    /// The guest agent answers. It is of the start and may come long after it, or never: a guest need not have one.
    GuestAgent,
    /// The domain ended after the VMI was deleted.
    Shutdown,
    /// Pod and VMI are gone.
    Teardown,
}

impl Step {
    /// All, in order.
    const ALL: [Self; 9] = [
        Self::Create,
        Self::Place,
        Self::Prepare,
        Self::Authorise,
        Self::Boot,
        Self::Publish,
        Self::GuestAgent,
        Self::Shutdown,
        Self::Teardown,
    ];

    /// Whether its operation is over with it.
    fn closes(self) -> bool {
        matches!(self, Self::Publish | Self::Teardown)
    }

    /// Name of the span.
    pub fn name(self) -> &'static str {
        match self {
            Self::Create => "create-vmi",
            Self::Place => "place-pod",
            Self::Prepare => "prepare-pod",
            Self::Authorise => "authorise",
            Self::Boot => "boot",
            Self::Publish => "publish",
            Self::GuestAgent => "guest-agent",
            Self::Shutdown => "shutdown",
            Self::Teardown => "teardown",
        }
    }

    /// Operation that it belongs to.
    pub fn operation(self) -> &'static str {
        match self {
            Self::Create
            | Self::Place
            | Self::Prepare
            | Self::Authorise
            | Self::Boot
            | Self::Publish
            | Self::GuestAgent => "start",
            Self::Shutdown | Self::Teardown => "stop",
        }
    }
}

/// What a step waits for beside its own work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Awaited {
    /// A controller that leads.
    Leader,
    /// A claim, or its volume.
    Volume,
    /// A node for the pod.
    Scheduler,
    /// An image.
    Image,
    /// A node or its agent that does not answer.
    Node,
    /// An API server that takes a write.
    Api,
}

impl Awaited {
    /// Name of the span.
    pub fn name(self) -> &'static str {
        match self {
            Self::Leader => "wait-for-leader",
            Self::Volume => "wait-for-volume",
            Self::Scheduler => "wait-for-scheduler",
            Self::Image => "wait-for-image",
            Self::Node => "wait-for-node",
            Self::Api => "wait-for-api",
        }
    }
}

/// A wait within a step, from its first beginning to its last end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waited {
    /// For what.
    pub what: Awaited,
    /// Began.
    pub from: Timestamp,
    /// Ended.
    pub to: Timestamp,
}

/// What an operation is to the one that caused it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Relation {
    /// The instance before was stopped because somebody asked for a restart.
    Restart,
    /// The instance before failed.
    Failure,
    /// The instance before ended by itself.
    End,
    /// A set made the instance.
    Set,
}

impl Relation {
    /// In the attributes of a link.
    pub fn name(self) -> &'static str {
        match self {
            Self::Restart => "restart-of",
            Self::Failure => "after-failure-of",
            Self::End => "after-end-of",
            Self::Set => "made-by",
        }
    }
}

/// What caused an operation without being part of its trace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cause {
    /// What the operation is to it.
    pub relation: Relation,
    /// Its trace context.
    pub traceparent: String,
    /// The instance whose start it is; empty where it is the span of the context.
    pub instance: VmiUid,
}

/// Since when this process leads, and until when the one before it may have told steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Reign {
    /// It leads since then.
    pub since: Timestamp,
    /// Its predecessor was alive at that time for the last time; `None` where nobody knows of one.
    pub before: Option<Timestamp>,
}

impl Reign {
    /// Nobody led when this happened, so that nobody has told it.
    pub fn missed(self, at: Timestamp) -> bool {
        self.before.is_some_and(|before| at > before && at <= self.since)
    }
}

/// A finished step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finished {
    /// Which.
    pub step: Step,
    /// UID of the VMI.
    pub instance: VmiUid,
    /// Trace context of the operation, in text form.
    pub traceparent: String,
    /// Began.
    pub start: Timestamp,
    /// Ended.
    pub end: Timestamp,
    /// Why it ended badly.
    pub error: Option<String>,
    /// With the last step of the operation: when the whole began.
    pub closes: Option<Timestamp>,
    /// Its beginning was not seen, but by a process that has ended since.
    #[serde(default)]
    pub resumed: bool,
    /// What it waited for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<Waited>,
    /// With the last step: what caused the whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<Cause>,
}

/// Boundaries of the running operation.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Marks {
    began: Option<Timestamp>,
    last: Option<Timestamp>,
    ended: BTreeMap<Step, (Timestamp, Timestamp)>,
    /// What the driver took is no input of a step, so it is not in what is recorded.
    #[serde(skip)]
    sent: usize,
    /// Of the operation before, what nobody has taken.
    #[serde(skip)]
    left: Vec<Finished>,
    order: Vec<Step>,
    stopping: bool,
    /// The instance that it is about: the last step ends when that is gone.
    #[serde(default)]
    instance: VmiUid,
    /// Trace context of the request that it carries out; else it is that of the spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cause: Option<String>,
    /// The last step ended badly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// The first of the steps whose end this process saw, where it came upon an operation that ran already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    resumed: Option<usize>,
    /// The last of them.
    #[serde(default)]
    resumed_to: usize,
    /// What the step under way waits for now, and since when.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    waiting: Option<(Awaited, Timestamp)>,
    /// What steps waited for; that of the step under way comes last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    waited: Vec<(Option<Step>, Waited)>,
    /// The deletion that a stop begins with is on its way since then: others may hear of it before who asked for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    asked: Option<Timestamp>,
    /// What caused the running operation; of a stop, what it will be to the next start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    from: Option<Box<Cause>>,
}

impl Marks {
    /// The operation begins.
    pub fn begin(&mut self, at: Timestamp) {
        // What ended in this very step is still to be told.
        let left = self.fresh();
        let from = self.from.take().filter(|_| self.stopping);
        *self = Self { began: Some(at), last: Some(at), left, from, ..Self::default() };
    }

    /// What caused the running operation.
    pub fn caused(&mut self, by: Cause) {
        self.from = Some(Box::new(by));
    }

    /// The step under way waits for something else than its own work, or for nothing.
    pub fn waits(&mut self, what: Option<Awaited>, now: Timestamp) {
        if self.is_over() {
            // It was told with the step before; what runs for months need not keep what it waited for.
            self.waited = Vec::new();
            return;
        }
        if !self.running() {
            return;
        }
        if self.waiting.map(|(what, _)| what) != what {
            self.wait_ends(now);
            self.waiting = what.map(|what| (what, now));
        }
    }

    /// The step under way waited for something.
    pub fn waited(&mut self, what: Awaited, from: Timestamp, to: Timestamp) {
        let known = self.waited.iter_mut().find(|(step, w)| step.is_none() && w.what == what);
        match known {
            // One span each, or a wait that comes back would need numbers, which a successor does not know.
            Some((_, known)) => known.to = known.to.max(to),
            None => self.waited.push((None, Waited { what, from, to: to.max(from) })),
        }
    }

    fn wait_ends(&mut self, now: Timestamp) {
        if let Some((what, since)) = self.waiting.take() {
            self.waited(what, since, now);
        }
    }

    fn is_over(&self) -> bool {
        self.error.is_some() || self.ended.keys().any(|step| step.closes())
    }

    /// The instance that the running operation is about.
    pub fn concerns(&mut self, instance: &VmiUid) {
        if self.instance != *instance {
            self.instance = instance.clone();
        }
    }

    /// The deletion of the instance is on its way since then, or is not.
    pub fn asks(&mut self, since: Option<Timestamp>) {
        self.asked = since;
    }

    /// A stop begins, in the name of a request where there is one. A start that was under way has come to nothing.
    pub fn begin_stop(&mut self, at: Timestamp, cause: Option<String>) {
        self.fail("Interrupted", at);
        let asked = self.asked.filter(|asked| *asked < at);
        self.begin(asked.unwrap_or(at));
        self.stopping = true;
        self.cause = cause;
    }

    /// An operation was found under way, which another process began at that time. What it had passed at the times that the objects
    /// tell was told by that one, unless nobody led then; nobody tells what was passed at an unknown time.
    pub fn resume(&mut self, passed: &[(Step, Option<Timestamp>)], reign: Reign, now: Timestamp) {
        let mut missed = false;
        for (step, at) in passed {
            if !missed && at.is_some_and(|at| reign.missed(at)) {
                // Whatever came after it was missed, too.
                missed = true;
                self.unseen(reign);
            }
            let last = self.last.unwrap_or_default();
            self.reached(*step, at.unwrap_or(last).min(now).max(last));
        }
        if !missed {
            self.unseen(reign);
        }
        self.resumed_to = self.order.len();
    }

    /// From here on nothing of the operation was told.
    fn unseen(&mut self, reign: Reign) {
        self.sent = self.order.len();
        self.resumed = Some(self.sent);
        // What comes after the end of the whole, the guest's first word, has waited for no leader.
        if let (Some(before), Some(last)) = (reign.before.filter(|_| !self.is_over()), self.last) {
            let from = before.max(last);
            if reign.since > from {
                self.waited(Awaited::Leader, from, reign.since);
            }
        }
    }

    /// The instance is certainly gone: a stop is over, and a start that was under way has come to nothing.
    pub fn gone(&mut self, at: Timestamp) {
        if self.stopping {
            self.reached(Step::Teardown, at);
        } else if !self.instance.as_str().is_empty() {
            self.fail("Gone", at);
        }
    }

    /// The operation has come to nothing: the step that was under way ends with it, for this reason. Nothing where it is over already.
    pub fn fail(&mut self, why: &str, at: Timestamp) {
        if !self.running() || self.stopping || self.ended.keys().any(|step| step.closes()) || self.error.is_some() {
            return;
        }
        let under_way = Step::ALL.into_iter().find(|step| !self.ended.contains_key(step));
        if let Some(step) = under_way {
            self.reached(step, at);
            self.error = Some(why.to_owned());
        }
    }

    /// Trace context of the request that is carried out.
    pub fn cause(&self) -> Option<&str> {
        self.cause.as_deref()
    }

    /// Whether the running operation is a stop.
    pub fn is_stopping(&self) -> bool {
        self.stopping
    }

    /// Whether an operation runs.
    pub fn running(&self) -> bool {
        self.began.is_some()
    }

    /// A step has ended, and the next begins.
    pub fn reached(&mut self, step: Step, at: Timestamp) {
        let Some(last) = self.last.filter(|_| self.error.is_none()) else { return };
        if let std::collections::btree_map::Entry::Vacant(e) = self.ended.entry(step) {
            e.insert((last, at));
            self.order.push(step);
            self.last = Some(at);
            self.wait_ends(at);
            self.waited.iter_mut().filter(|(of, _)| of.is_none()).for_each(|(of, _)| *of = Some(step));
        }
    }

    /// When the running operation began.
    pub fn began(&self) -> Option<Timestamp> {
        self.began
    }

    /// Steps of the running operation that ended, in order: which, from when, until when.
    pub fn ended(&self) -> Vec<(Step, Timestamp, Timestamp)> {
        self.order.iter().filter_map(|s| self.ended.get(s).map(|(from, to)| (*s, *from, *to))).collect()
    }

    /// Steps of the running operation that nobody has taken.
    fn fresh(&self) -> Vec<Finished> {
        let finished = self.order.iter().enumerate().skip(self.sent).filter_map(|(i, step)| {
            let (start, end) = *self.ended.get(step)?;
            let error = self.error.clone().filter(|_| i + 1 == self.order.len());
            let closes = self.began.filter(|_| step.closes() || error.is_some());
            Some(Finished {
                step: *step,
                instance: self.instance.clone(),
                traceparent: self.cause.clone().unwrap_or_default(),
                start,
                end,
                closes,
                error,
                resumed: self.resumed.is_some_and(|first| (first..=self.resumed_to).contains(&i)),
                waits: self.waited.iter().filter(|(of, _)| *of == Some(*step)).map(|(_, w)| *w).collect(),
                cause: self.from.as_deref().filter(|_| closes.is_some() && !self.stopping).cloned(),
            })
        });
        finished.collect()
    }

    /// Steps that ended since the last call.
    pub fn take(&mut self, traceparent: &str) -> Vec<Finished> {
        let mut out = std::mem::take(&mut self.left);
        out.extend(self.fresh());
        self.sent = self.order.len();
        out.iter_mut().filter(|f| f.traceparent.is_empty()).for_each(|f| f.traceparent = traceparent.to_owned());
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_ends_once_and_the_last_closes_the_operation() {
        let mut m = Marks::default();
        m.reached(Step::Create, Timestamp(1));
        assert!(m.take("t").is_empty(), "nothing was begun");
        m.begin(Timestamp(5));
        m.concerns(&"i".into());
        m.reached(Step::Create, Timestamp(7));
        m.reached(Step::Create, Timestamp(9));
        m.reached(Step::Publish, Timestamp(11));
        let f = m.take("t");
        assert_eq!(f.len(), 2);
        assert!(f.iter().all(|s| s.instance.as_str() == "i"));
        assert_eq!((f[0].start, f[0].end, f[0].closes), (Timestamp(5), Timestamp(7), None));
        assert_eq!((f[1].start, f[1].end, f[1].closes), (Timestamp(7), Timestamp(11), Some(Timestamp(5))));
        assert!(m.take("t").is_empty());
        // The end of one operation can be the beginning of the next.
        m.begin_stop(Timestamp(20), Some("r".into()));
        m.reached(Step::Teardown, Timestamp(30));
        m.begin(Timestamp(30));
        m.reached(Step::Create, Timestamp(31));
        let told: Vec<_> = m.take("t").iter().map(|f| (f.step, f.end, f.closes)).collect();
        let stop = (Step::Teardown, Timestamp(30), Some(Timestamp(20)));
        assert_eq!(told, [stop, (Step::Create, Timestamp(31), None)]);
        // It begins when it was asked for, not when that is answered.
        for (asked, begun) in [(Some(Timestamp(40)), 40), (None, 45)] {
            m.asks(Some(Timestamp(39)));
            m.asks(asked);
            m.begin_stop(Timestamp(45), None);
            m.reached(Step::Teardown, Timestamp(50));
            assert_eq!(m.take("t").last().map(|f| f.closes), Some(Some(Timestamp(begun))));
        }
    }

    #[test]
    fn an_operation_that_comes_to_nothing_is_closed_with_the_step_that_was_under_way() {
        let mut m = Marks::default();
        m.fail("Failed", Timestamp(1));
        m.begin(Timestamp(5));
        m.reached(Step::Create, Timestamp(6));
        m.fail("ImagePull", Timestamp(9));
        m.fail("again", Timestamp(10));
        m.reached(Step::Prepare, Timestamp(11));
        let told: Vec<_> = m.take("t").into_iter().map(|f| (f.step, f.end, f.error, f.closes)).collect();
        let failed = (Step::Place, Timestamp(9), Some("ImagePull".to_owned()), Some(Timestamp(5)));
        assert_eq!(told, [(Step::Create, Timestamp(6), None, None), failed]);
        // A request to stop has a trace of its own; what it interrupts has not.
        m.begin(Timestamp(20));
        m.reached(Step::Create, Timestamp(21));
        m.begin_stop(Timestamp(22), Some("r".into()));
        m.reached(Step::Teardown, Timestamp(23));
        let told: Vec<_> = m.take("t").into_iter().map(|f| (f.step, f.traceparent, f.error.is_some())).collect();
        let parent = |of: &str| of.to_owned();
        assert_eq!(
            told,
            [
                (Step::Create, parent("t"), false),
                (Step::Place, parent("t"), true),
                (Step::Teardown, parent("r"), false)
            ]
        );
    }

    #[test]
    fn a_successor_tells_only_what_ends_under_its_eyes() {
        let mut m = Marks::default();
        m.begin(Timestamp(5));
        let passed = [(Step::Create, Some(Timestamp(7))), (Step::Place, None)];
        let reign = Reign { since: Timestamp(45), before: Some(Timestamp(20)) };
        m.resume(&passed, reign, Timestamp(50));
        assert!(m.take("t").is_empty());
        m.reached(Step::Prepare, Timestamp(60));
        m.reached(Step::Publish, Timestamp(70));
        let told = m.take("t");
        let waited = Waited { what: Awaited::Leader, from: Timestamp(20), to: Timestamp(45) };
        assert_eq!((&told[0].waits[..], &told[1].waits[..]), (&[waited][..], &[][..]));
        let told: Vec<_> = told.iter().map(|f| (f.step, f.start, f.resumed, f.closes)).collect();
        let last = (Step::Publish, Timestamp(60), false, Some(Timestamp(5)));
        assert_eq!(told, [(Step::Prepare, Timestamp(7), true, None), last]);
    }

    #[test]
    fn what_ended_while_nobody_led_is_told_by_the_successor_as_interrupted() {
        let mut m = Marks::default();
        m.begin(Timestamp(5));
        let passed = [
            (Step::Create, Some(Timestamp(7))),
            (Step::Place, Some(Timestamp(30))),
            // Of unknown time, but certainly later.
            (Step::Prepare, None),
        ];
        let reign = Reign { since: Timestamp(45), before: Some(Timestamp(20)) };
        m.resume(&passed, reign, Timestamp(50));
        m.reached(Step::Authorise, Timestamp(60));
        m.reached(Step::Boot, Timestamp(61));
        let told: Vec<_> = m.take("t").iter().map(|f| (f.step, f.start, f.end, f.resumed)).collect();
        assert_eq!(
            told,
            [
                (Step::Place, Timestamp(7), Timestamp(30), true),
                (Step::Prepare, Timestamp(30), Timestamp(30), true),
                (Step::Authorise, Timestamp(30), Timestamp(60), true),
                (Step::Boot, Timestamp(60), Timestamp(61), false),
            ]
        );
        assert!(m.take("t").is_empty(), "once");
    }

    #[test]
    fn a_step_has_one_span_for_each_kind_of_wait() {
        let mut m = Marks::default();
        m.waits(Some(Awaited::Image), Timestamp(1));
        m.begin(Timestamp(5));
        for (what, at) in [
            (None, 6),
            (Some(Awaited::Volume), 7),
            (Some(Awaited::Volume), 8),
            (Some(Awaited::Scheduler), 9),
            (Some(Awaited::Volume), 12),
        ] {
            m.waits(what, Timestamp(at));
        }
        m.reached(Step::Place, Timestamp(20));
        m.waits(None, Timestamp(20));
        m.waits(Some(Awaited::Image), Timestamp(21));
        m.fail("ImagePullBackOff", Timestamp(30));
        let told: Vec<_> = m.take("t").into_iter().flat_map(|f| f.waits).map(|w| (w.what, w.from.0, w.to.0)).collect();
        let image = (Awaited::Image, 21, 30);
        assert_eq!(told, [(Awaited::Volume, 7, 20), (Awaited::Scheduler, 9, 12), image]);
        m.waits(Some(Awaited::Image), Timestamp(40));
        assert!(m.take("t").is_empty() && m.waited.is_empty() && m.waiting.is_none());
    }

    #[test]
    fn a_start_names_the_life_before_and_the_set_that_made_it() {
        let mut m = Marks::default();
        let before = Cause { relation: Relation::Failure, traceparent: "t1".into(), instance: "i1".into() };
        m.begin(Timestamp(1));
        m.begin_stop(Timestamp(2), None);
        m.caused(before.clone());
        m.reached(Step::Teardown, Timestamp(3));
        assert!(m.take("t").iter().all(|f| f.cause.is_none()), "it is not the stop's");
        m.begin(Timestamp(4));
        m.reached(Step::Create, Timestamp(5));
        m.reached(Step::Publish, Timestamp(6));
        let told: Vec<_> = m.take("t").into_iter().map(|f| f.cause).collect();
        assert_eq!(told, [None, Some(before)]);
        m.begin_stop(Timestamp(7), None);
        m.reached(Step::Teardown, Timestamp(8));
        m.begin(Timestamp(9));
        m.fail("Gone", Timestamp(10));
        assert!(m.take("t").iter().all(|f| f.cause.is_none()), "that was another one's");
    }
}
