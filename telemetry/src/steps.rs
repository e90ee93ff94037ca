//! Steps: finished pieces of an operation, each emitted once as a span with a derived id.

use crate::{Error, TraceContext, context};
use opentelemetry::{
    InstrumentationScope, KeyValue,
    trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState},
};
use opentelemetry_otlp::WithExportConfig;
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    trace::{BatchConfigBuilder, BatchSpanProcessor, SpanData, SpanExporter, SpanProcessor},
};
use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

/// Spans that may wait for a collector that is away or slow; more are dropped.
const QUEUE: u64 = 2048;
/// Spans of one export.
const BATCH: usize = 512;
/// How long a span waits for others. A process that is killed takes what waits along, so it is short.
const LINGER: Duration = Duration::from_millis(250);
/// An export that takes longer has failed.
const PATIENCE: Duration = Duration::from_secs(5);

static PROCESSOR: OnceLock<BatchSpanProcessor> = OnceLock::new();
static UNSENT: AtomicU64 = AtomicU64::new(0);
static WAITING: AtomicU64 = AtomicU64::new(0);
static EXPORTED: AtomicU64 = AtomicU64::new(0);
static FAILED: AtomicU64 = AtomicU64::new(0);
static OVERFLOWN: AtomicU64 = AtomicU64::new(0);

/// What became of the steps of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// No collector is configured, or the trace is not sampled.
    pub unsent: u64,
    /// They wait for the collector, or are on their way.
    pub waiting: u64,
    /// The collector has them.
    pub exported: u64,
    /// Lost: the collector was away, too slow, or refused them.
    pub failed: u64,
    /// Lost: too many waited for the collector.
    pub overflown: u64,
}

/// What became of the steps so far.
pub fn counts() -> Counts {
    let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    Counts {
        unsent: of(&UNSENT),
        waiting: of(&WAITING),
        exported: of(&EXPORTED),
        failed: of(&FAILED),
        overflown: of(&OVERFLOWN),
    }
}

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

/// Emits the span of a finished step. Never blocks; where no collector is configured, or the trace is not sampled, or too many
/// spans wait, it counts and returns.
pub fn emit(step: Step<'_>) {
    let Some(processor) = PROCESSOR.get().filter(|_| step.context.sampled) else {
        UNSENT.fetch_add(1, Ordering::Relaxed);
        return;
    };
    if WAITING.fetch_add(1, Ordering::Relaxed) >= QUEUE {
        WAITING.fetch_sub(1, Ordering::Relaxed);
        OVERFLOWN.fetch_add(1, Ordering::Relaxed);
        return;
    }
    processor.on_end(span(step));
}

/// Sends, and counts what became of it. (The processor neither tells how many wait nor what failed.)
#[derive(Debug)]
struct Counting<E>(E);

impl<E: SpanExporter> SpanExporter for Counting<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let count = u64::try_from(batch.len()).unwrap_or(u64::MAX);
        let result = self.0.export(batch).await;
        WAITING.fetch_sub(count, Ordering::Relaxed);
        let counter = if result.is_ok() { &EXPORTED } else { &FAILED };
        let before = counter.fetch_add(count, Ordering::Relaxed);
        if let Err(error) = &result
            && (before == 0 || before.ilog2() != (before + count).ilog2())
        {
            // At 1, 2, 4, 8, ...: a collector that is away must not fill the log.
            tracing::warn!(%error, lost = before + count, "spans are lost: the collector does not take them");
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.0.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.0.set_resource(resource);
    }
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
        .with_timeout(PATIENCE)
        .build()
        .map_err(|e| Error::Exporter(endpoint.to_owned(), e))?;
    let config = BatchConfigBuilder::default()
        .with_max_queue_size(QUEUE as usize + BATCH)
        .with_max_export_batch_size(BATCH)
        .with_scheduled_delay(LINGER)
        .build();
    let mut processor = BatchSpanProcessor::builder(Counting(exporter)).with_batch_config(config).build();
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
