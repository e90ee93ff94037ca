//! Steps: finished pieces of an operation, each emitted once as a span with a derived id.

use crate::{Error, TraceContext, context};
use opentelemetry::{
    InstrumentationScope, KeyValue,
    trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState},
};
use opentelemetry_otlp::WithExportConfig;
use opentelemetry_sdk::{
    Resource,
    trace::{BatchSpanProcessor, SpanData, SpanProcessor},
};
use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

static PROCESSOR: OnceLock<BatchSpanProcessor> = OnceLock::new();
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// A finished step of an operation on one cell.
#[derive(Debug, Clone)]
pub struct Step<'a> {
    /// The context that the operation began with: its own root, or the span of a caller under which it hangs.
    pub context: TraceContext,
    /// UID of the VMI, or an id of the request.
    pub cell: &'a str,
    /// `start`, `stop`, ...
    pub operation: &'a str,
    /// Name of the step; also the span's name. `None` is the operation itself.
    pub step: Option<&'a str>,
    /// The step that this one belongs to; `None` hangs it under the operation itself.
    pub parent: Option<&'a str>,
    /// The trace was begun for this very operation, whose span is its root. Otherwise the operation hangs under the span of
    /// the context, as what else follows from one write does.
    pub begins: bool,
    /// When it began.
    pub start: SystemTime,
    /// When it ended.
    pub end: SystemTime,
    /// Attributes such as (`k8s.namespace.name`, `default`).
    pub attributes: Vec<(&'static str, String)>,
    /// Reason code where it failed.
    pub error: Option<String>,
}

/// Emits the span of a finished step. Never blocks; where no collector is configured, or the trace is not sampled, it
/// counts and returns.
pub fn emit(step: Step<'_>) {
    let Some(processor) = PROCESSOR.get().filter(|_| step.context.sampled) else {
        DROPPED.fetch_add(1, Ordering::Relaxed);
        return;
    };
    processor.on_end(span(step));
}

/// Steps that were not exported because no collector is configured or their trace is not sampled.
pub fn steps_dropped() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

fn span(step: Step<'_>) -> SpanData {
    let c = step.context;
    let derived = |name: &str| SpanId::from_bytes(context::span_id(&c.trace_id, step.cell, step.operation, name));
    let operation = match step.begins {
        true => SpanId::from_bytes(c.span_id),
        false => SpanId::from_bytes(c.operation(step.cell, step.operation).span_id),
    };
    let (id, parent) = match step.step {
        None if step.begins => (operation, SpanId::INVALID),
        None => (operation, SpanId::from_bytes(c.span_id)),
        Some(name) => (derived(name), step.parent.map_or(operation, derived)),
    };
    let name = step.step.unwrap_or(step.operation).to_owned();
    let mut attributes = vec![
        KeyValue::new("virtfold.cell", step.cell.to_owned()),
        KeyValue::new("virtfold.operation", step.operation.to_owned()),
    ];
    attributes.extend(step.attributes.into_iter().map(|(k, v)| KeyValue::new(k, v)));
    SpanData {
        span_context: SpanContext::new(
            TraceId::from_bytes(c.trace_id),
            id,
            TraceFlags::SAMPLED,
            false,
            TraceState::default(),
        ),
        parent_span_id: parent,
        parent_span_is_remote: step.step.is_none() && !step.begins,
        span_kind: SpanKind::Internal,
        name: name.into(),
        start_time: step.start,
        end_time: step.end.max(step.start),
        attributes,
        dropped_attributes_count: 0,
        events: Default::default(),
        links: Default::default(),
        status: step.error.map_or(Status::Unset, Status::error),
        instrumentation_scope: InstrumentationScope::builder("virtfold")
            .with_version(env!("CARGO_PKG_VERSION"))
            .build(),
    }
}

pub(crate) fn init(service: &'static str, endpoint: &str) -> Result<(), Error> {
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_tonic()
        .with_endpoint(endpoint)
        .with_timeout(Duration::from_secs(5))
        .build()
        .map_err(|e| Error::Exporter(endpoint.to_owned(), e))?;
    let mut processor = BatchSpanProcessor::builder(exporter).build();
    processor.set_resource(
        &Resource::builder()
            .with_service_name(service)
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .build(),
    );
    PROCESSOR.set(processor).map_err(|_| Error::Twice)
}

pub(crate) fn shutdown() {
    if let Some(p) = PROCESSOR.get()
        && let Err(error) = p.shutdown_with_timeout(Duration::from_secs(2))
    {
        tracing::warn!(%error, "spans were not all exported");
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn step<'a>(c: TraceContext, step: Option<&'a str>, parent: Option<&'a str>) -> Step<'a> {
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(5);
        Step {
            context: c,
            cell: "u1",
            operation: "start",
            step,
            parent,
            begins: true,
            start: at,
            end: at,
            attributes: vec![("k8s.namespace.name", "default".into())],
            error: None,
        }
    }

    #[test]
    fn a_step_hangs_under_its_parent_and_is_the_same_span_when_repeated() {
        let c = TraceContext::random();
        let root = span(step(c, None, None));
        let a = span(step(c, Some("schedule"), None));
        let b = span(step(c, Some("pull"), Some("schedule")));
        assert_eq!(root.parent_span_id, SpanId::INVALID);
        assert_eq!(a.parent_span_id, root.span_context.span_id());
        assert_eq!(b.parent_span_id, a.span_context.span_id());
        assert_eq!(a.span_context, span(step(c, Some("schedule"), None)).span_context);
    }

    #[test]
    fn an_operation_of_a_caller_hangs_under_the_callers_span() {
        let caller = TraceContext::random().child([7; 8]);
        let below = |name| Step { begins: false, ..step(caller, name, None) };
        let own = span(below(None));
        assert_eq!(own.parent_span_id, SpanId::from_bytes([7; 8]));
        assert_ne!(own.span_context.span_id(), SpanId::from_bytes([7; 8]));
        let a = span(below(Some("schedule")));
        assert_eq!(a.parent_span_id, own.span_context.span_id());
        assert_eq!(a.span_context.trace_id(), TraceId::from_bytes(caller.trace_id));
    }

    #[test]
    fn operations_that_follow_from_one_write_are_spans_of_their_own_below_it() {
        let c = TraceContext::random();
        let write = span(Step { cell: "", operation: "write", ..step(c, None, None) });
        let mut seen = std::collections::HashSet::from([write.span_context.span_id()]);
        for (cell, operation) in [("u1", "start"), ("u1", "stop"), ("u2", "start"), ("u2", "stop")] {
            let s = span(Step { cell, operation, begins: false, ..step(c, None, None) });
            assert_eq!(s.parent_span_id, write.span_context.span_id());
            assert!(seen.insert(s.span_context.span_id()), "{cell} {operation}");
        }
    }
}
