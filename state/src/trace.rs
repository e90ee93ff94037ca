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
    /// Status says so.
    Publish,
    /// The guest agent answers.
    GuestAgent,
    /// The domain ended after the VMI was deleted.
    Shutdown,
    /// Pod and VMI are gone.
    Teardown,
}

impl Step {
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

    /// A stop begins.
    pub fn begin_stop(&mut self, at: Timestamp) {
        self.begin(at);
        self.stopping = true;
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
        let Some(last) = self.last else { return };
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
        let fresh = self.order.get(self.sent..).unwrap_or_default();
        let finished = fresh.iter().filter_map(|step| {
            let (start, end) = *self.ended.get(step)?;
            let last = matches!(step, Step::GuestAgent | Step::Teardown);
            Some(Finished {
                step: *step,
                instance: self.instance.clone(),
                traceparent: String::new(),
                start,
                end,
                error: None,
                closes: self.began.filter(|_| last),
            })
        });
        finished.collect()
    }

    /// Steps that ended since the last call.
    pub fn take(&mut self, traceparent: &str) -> Vec<Finished> {
        let mut out = std::mem::take(&mut self.left);
        out.extend(self.fresh());
        self.sent = self.order.len();
        out.iter_mut().for_each(|f| f.traceparent = traceparent.to_owned());
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
        m.reached(Step::GuestAgent, Timestamp(11));
        let f = m.take("t");
        assert_eq!(f.len(), 2);
        assert!(f.iter().all(|s| s.instance.as_str() == "i"));
        assert_eq!((f[0].start, f[0].end, f[0].closes), (Timestamp(5), Timestamp(7), None));
        assert_eq!((f[1].start, f[1].end, f[1].closes), (Timestamp(7), Timestamp(11), Some(Timestamp(5))));
        assert!(m.take("t").is_empty());
        // The end of one operation can be the beginning of the next.
        m.begin_stop(Timestamp(20));
        m.reached(Step::Teardown, Timestamp(30));
        m.begin(Timestamp(30));
        m.reached(Step::Create, Timestamp(31));
        let told: Vec<_> = m.take("t").iter().map(|f| (f.step, f.end, f.closes)).collect();
        let stop = (Step::Teardown, Timestamp(30), Some(Timestamp(20)));
        assert_eq!(told, [stop, (Step::Create, Timestamp(31), None)]);
    }
}
