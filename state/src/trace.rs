//! Steps of a start or a stop as data: where they begin and end. The driver makes spans of them.
//!
//! The trace's id comes with the VM's spec (annotation `virtfold.io/traceparent`), whose write is the root of the trace. Several
//! operations can follow from one write (a start, the stop that a deletion brings, the start after a crash of the guest), so a
//! span's id is derived from (trace, instance, operation, step): a step that is repeated after a crash is the same span again, and
//! that of another instance is another.

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
}

impl Marks {
    /// The operation begins.
    pub fn begin(&mut self, at: Timestamp) {
        // What ended in this very step is still to be told.
        let left = self.fresh();
        *self = Self { began: Some(at), last: Some(at), left, ..Self::default() };
    }

    /// The instance that the running operation is about.
    pub fn concerns(&mut self, instance: &VmiUid) {
        if self.instance != *instance {
            self.instance = instance.clone();
        }
    }

    /// A stop begins, in the name of a request where there is one. A start that was under way has come to nothing.
    pub fn begin_stop(&mut self, at: Timestamp, cause: Option<String>) {
        self.fail("Interrupted", at);
        self.begin(at);
        self.stopping = true;
        self.cause = cause;
    }

    /// An operation was found under way, which another process began at that time: what it has passed was told by that one.
    pub fn resume(&mut self, began: Timestamp, passed: &[Step], now: Timestamp) {
        self.begin(began);
        for step in passed {
            self.reached(*step, now);
        }
        self.last = Some(now);
        self.sent = self.order.len();
        self.resumed = Some(self.sent);
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
            Some(Finished {
                step: *step,
                instance: self.instance.clone(),
                traceparent: self.cause.clone().unwrap_or_default(),
                start,
                end,
                closes: self.began.filter(|_| step.closes() || error.is_some()),
                error,
                resumed: self.resumed == Some(i),
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
        m.resume(Timestamp(5), &[Step::Create, Step::Place], Timestamp(50));
        assert!(m.take("t").is_empty());
        m.reached(Step::Prepare, Timestamp(60));
        m.reached(Step::Publish, Timestamp(70));
        let told: Vec<_> = m.take("t").iter().map(|f| (f.step, f.start, f.resumed, f.closes)).collect();
        let last = (Step::Publish, Timestamp(60), false, Some(Timestamp(5)));
        assert_eq!(told, [(Step::Prepare, Timestamp(50), true, None), last]);
    }
}
