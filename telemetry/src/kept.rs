//! The newest finished steps of this process, for those who look at one machine and have no collector. Who is not asked to keep them
//! (`Options::keep`) keeps none.

use opentelemetry::trace::{SpanId, Status};
use opentelemetry_sdk::trace::SpanData;
use serde::{Deserialize, Serialize};
use std::{
    collections::VecDeque,
    sync::{Mutex, OnceLock, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

/// Steps that are kept; the oldest go first.
const MANY: usize = 2048;
/// Steps that are told of one machine, the newest.
const TOLD: usize = 256;

/// A finished step.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Kept {
    /// Its trace, in hexadecimal digits, as collectors show it.
    pub trace: String,
    /// Its span.
    pub span: String,
    /// The span that it is a part of; empty for the root.
    pub parent: String,
    /// What was done.
    pub name: String,
    /// Who did it: the name of the service.
    pub service: String,
    /// The node on which, where one is known.
    pub node: String,
    /// Who asked for it.
    pub user: String,
    /// Microseconds since 1970.
    pub start: i64,
    /// Microseconds since 1970.
    pub end: i64,
    /// Why it failed; empty where it did not.
    pub error: String,
    /// Namespace and name of the machine that it is about; only where it is kept.
    #[serde(skip)]
    pub machine: (String, String),
}

struct Ring {
    service: &'static str,
    node: String,
    steps: Mutex<VecDeque<Kept>>,
}

static RING: OnceLock<Ring> = OnceLock::new();

/// From now on steps are kept.
pub(crate) fn begin(service: &'static str, node: Option<&str>) {
    let node = node.unwrap_or_default().to_owned();
    RING.get_or_init(|| Ring { service, node, steps: Mutex::default() });
}

/// Whether any are.
pub(crate) fn are_wanted() -> bool {
    RING.get().is_some()
}

/// One more. What only reads would soon be all that is there: it is left out, unless it fails.
pub(crate) fn keep(span: &SpanData, of: Option<&'static str>) {
    let Some(ring) = RING.get() else { return };
    let kept = Kept::read(span, of.unwrap_or(ring.service), &ring.node);
    let reads = span.attributes.iter().any(|a| a.key.as_str() == "http.request.method" && a.value.as_str() == "GET");
    if reads && kept.error.is_empty() {
        return;
    }
    let mut steps = ring.steps.lock().unwrap_or_else(PoisonError::into_inner);
    if steps.len() >= MANY {
        steps.pop_front();
    }
    steps.push_back(kept);
}

/// The newest steps about a machine, the oldest of them first.
pub fn of(namespace: &str, name: &str) -> Vec<Kept> {
    let Some(ring) = RING.get() else { return Vec::new() };
    let steps = ring.steps.lock().unwrap_or_else(PoisonError::into_inner);
    let its = steps.iter().rev().filter(|k| k.machine.0 == namespace && k.machine.1 == name);
    let mut all: Vec<Kept> = its.take(TOLD).cloned().collect();
    all.reverse();
    all
}

impl Kept {
    fn read(span: &SpanData, service: &str, node: &str) -> Self {
        let attribute = |name: &str| {
            let found = span.attributes.iter().find(|a| a.key.as_str() == name);
            found.map(|a| a.value.as_str().into_owned()).unwrap_or_default()
        };
        let time = |t: SystemTime| {
            let since = t.duration_since(UNIX_EPOCH).unwrap_or_default();
            i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
        };
        let parent = span.parent_span_id;
        Self {
            trace: span.span_context.trace_id().to_string(),
            span: span.span_context.span_id().to_string(),
            parent: if parent == SpanId::INVALID { String::new() } else { parent.to_string() },
            name: span.name.clone().into_owned(),
            service: service.to_owned(),
            node: node.to_owned(),
            user: attribute("enduser.id"),
            start: time(span.start_time),
            end: time(span.end_time),
            error: match &span.status {
                Status::Error { description } => description.clone().into_owned(),
                Status::Unset | Status::Ok => String::new(),
            },
            machine: (attribute("k8s.namespace.name"), attribute("kubevirt.vm.name")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Failure, Step, TraceContext, emit};

    #[test]
    fn the_newest_steps_of_a_machine_are_kept_and_reads_are_none() {
        let about = |name: &str, method: &str| {
            let mut all = vec![("k8s.namespace.name", "default".to_owned()), ("kubevirt.vm.name", name.to_owned())];
            all.push(("http.request.method", method.to_owned()));
            all
        };
        let step = |name: &'static str, vm: &str, method: &str| Step {
            attributes: about(vm, method),
            ..Step::of(TraceContext::random(), "u", name, UNIX_EPOCH)
        };
        emit(step("lost", "a", "PUT"));
        assert!(of("default", "a").is_empty(), "before anybody asked for it");
        begin("virtfold-test", Some("n1"));
        for _ in 0..MANY {
            emit(step("stop", "b", "PUT"));
        }
        emit(step("explain", "a", "GET"));
        emit(Step { error: Some(Failure::new("NotFound")), ..step("console", "a", "GET") });
        emit(Step { service: Some("virtfold-launcher"), ..step("start", "a", "PUT") });
        let told = of("default", "a");
        let names: Vec<_> = told.iter().map(|k| (&*k.name, &*k.service, &*k.node, &*k.error)).collect();
        assert_eq!(names, [("console", "virtfold-test", "n1", "NotFound"), ("start", "virtfold-launcher", "n1", "")]);
        assert_eq!((of("default", "b").len(), of("other", "a").len()), (TOLD, 0));
        assert_eq!(RING.get().map(|r| r.steps.lock().map(|s| s.len()).unwrap_or_default()), Some(MANY));
    }
}
