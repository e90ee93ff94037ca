//! Steps: finished pieces of an operation, each emitted once as a span with a derived id.

use crate::{
    Error, Options, TraceContext, context,
    export::{Sampler, Settings, Target},
    kept,
};
use opentelemetry::{
    InstrumentationScope, KeyValue,
    trace::{Link, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState},
};
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    trace::{BatchConfigBuilder, BatchSpanProcessor, SpanData, SpanExporter, SpanLinks, SpanProcessor},
};
use std::{
    collections::VecDeque,
    sync::{
        Mutex, OnceLock, PoisonError,
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
/// Spans of traces that are not told, which go along if something of the same trace fails.
const HELD: usize = 1024;
/// Whose spans they are, where it is the process itself.
const OWN: &str = "virtfold";

/// Attributes that are numbers to those who made their names.
const NUMBERS: [&str; 2] = ["http.response.status_code", "rpc.grpc.status_code"];

static PROCESSOR: OnceLock<BatchSpanProcessor> = OnceLock::new();
static SAMPLER: OnceLock<Sampler> = OnceLock::new();
static UNTOLD: Mutex<VecDeque<SpanData>> = Mutex::new(VecDeque::new());
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
    /// Why it failed, where it did.
    pub error: Option<Failure>,
    /// Who asked whom.
    pub kind: Kind,
    /// What it follows from without being part of it.
    pub links: Vec<Cause>,
    /// Which part took it, where that one has no way to the collector ([`Options::speaks_for`]).
    pub service: Option<&'static str>,
}

impl Step<'_> {
    /// An operation that has just ended and failed at nothing: what differs is filled in by struct update.
    pub fn of<'a>(context: TraceContext, cell: &'a str, operation: &'a str, start: SystemTime) -> Step<'a> {
        Step {
            context,
            cell,
            operation,
            step: None,
            parent: None,
            begins: false,
            start,
            end: SystemTime::now(),
            attributes: Vec::new(),
            error: None,
            kind: Kind::Internal,
            links: Vec::new(),
            service: None,
        }
    }
}

/// Why a step failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// A code that people can look up, such as `ErrImagePull`.
    pub reason: String,
    /// More about it; may be empty.
    pub message: String,
}

impl Failure {
    /// Without further words.
    pub fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), message: String::new() }
    }
}

/// Who asked whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Kind {
    /// Nobody: it happened here.
    #[default]
    Internal,
    /// Somebody else asked us.
    Server,
    /// We asked somebody else.
    Client,
}

/// What caused an operation: a span that may be of another trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cause {
    /// That span.
    pub context: TraceContext,
    /// What it is to the operation: `restart-after`, `made-by`, ...
    pub relation: &'static str,
}

/// Whether there is a collector, or steps are kept, so that it is worth while to tell for somebody else.
pub fn are_told() -> bool {
    PROCESSOR.get().is_some() || kept::are_wanted()
}

/// A trace that begins here; whether it is told is decided now.
pub fn begin() -> TraceContext {
    let context = TraceContext::random();
    let sampled = SAMPLER.get().copied().unwrap_or_default().begins(&context.trace_id);
    TraceContext { sampled, ..context }
}

/// Emits the span of a finished step. Never blocks; where no collector is configured, or the trace is not sampled, or too many
/// spans wait, it counts and returns. What fails is told in any case, with what this process did in its trace before.
pub fn emit(step: Step<'_>) {
    let sampler = SAMPLER.get().copied().unwrap_or_default();
    let taken = sampler.takes(&step.context);
    let processor = PROCESSOR.get().filter(|_| taken || sampler.tells_failures());
    if processor.is_none() {
        UNSENT.fetch_add(1, Ordering::Relaxed);
        if !kept::are_wanted() {
            return;
        }
    }
    let (failed, of) = (step.error.is_some(), step.service);
    let span = span(step);
    kept::keep(&span, of);
    let Some(processor) = processor else { return };
    if taken {
        return send(processor, span);
    }
    let mut untold = UNTOLD.lock().unwrap_or_else(PoisonError::into_inner);
    if failed {
        let trace = span.span_context.trace_id();
        let (along, others) = untold.drain(..).partition(|s| s.span_context.trace_id() == trace);
        *untold = others;
        drop(untold);
        let along: VecDeque<SpanData> = along;
        along.into_iter().chain([span]).for_each(|span| send(processor, span));
        return;
    }
    UNSENT.fetch_add(1, Ordering::Relaxed);
    if untold.len() >= HELD {
        untold.pop_front();
    }
    untold.push_back(span);
}

fn send(processor: &BatchSpanProcessor, span: SpanData) {
    if WAITING.fetch_add(1, Ordering::Relaxed) >= QUEUE {
        WAITING.fetch_sub(1, Ordering::Relaxed);
        OVERFLOWN.fetch_add(1, Ordering::Relaxed);
        return;
    }
    processor.on_end(span);
}

/// Sends, and counts what became of it. (The processor neither tells how many wait nor what failed.) Spans of another part, for which
/// this process speaks, go as that part's.
#[derive(Debug)]
struct Counting<E> {
    own: E,
    other: Option<(&'static str, E)>,
}

impl<E: SpanExporter> Counting<E> {
    async fn send(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let Some((name, other)) = &self.other else { return self.own.export(batch).await };
        let (theirs, ours): (Vec<_>, Vec<_>) = batch.into_iter().partition(|s| s.instrumentation_scope.name() == *name);
        let sent = if ours.is_empty() { Ok(()) } else { self.own.export(ours).await };
        let theirs = if theirs.is_empty() { Ok(()) } else { other.export(theirs).await };
        sent.and(theirs)
    }
}

impl<E: SpanExporter> SpanExporter for Counting<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let count = u64::try_from(batch.len()).unwrap_or(u64::MAX);
        let result = self.send(batch).await;
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
        if let Some((_, other)) = &self.other {
            other.shutdown_with_timeout(timeout)?;
        }
        self.own.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.own.set_resource(resource);
        if let Some((name, other)) = &mut self.other {
            let all = resource.iter().map(|(k, v)| KeyValue::new(k.clone(), v.clone()));
            other.set_resource(&Resource::builder_empty().with_attributes(all).with_service_name(*name).build());
        }
    }
}

pub(crate) fn span(step: Step<'_>) -> SpanData {
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
    attributes.extend(step.attributes.into_iter().map(|(k, v)| match v.parse::<i64>() {
        Ok(number) if NUMBERS.contains(&k) => KeyValue::new(k, number),
        _ => KeyValue::new(k, v),
    }));
    attributes.extend(step.error.iter().map(|e| KeyValue::new("error.type", e.reason.clone())));
    let context = |context: TraceContext, id, remote| {
        let trace = TraceId::from_bytes(context.trace_id);
        SpanContext::new(trace, id, TraceFlags::SAMPLED, remote, TraceState::default())
    };
    let mut links = SpanLinks::default();
    links.links = step
        .links
        .into_iter()
        .map(|cause| {
            let span = context(cause.context, SpanId::from_bytes(cause.context.span_id), true);
            Link::new(span, vec![KeyValue::new("virtfold.relation", cause.relation)], 0)
        })
        .collect();
    SpanData {
        span_context: context(c, id, false),
        parent_span_id: parent,
        parent_span_is_remote: step.step.is_none() && !step.begins,
        span_kind: match step.kind {
            Kind::Internal => SpanKind::Internal,
            Kind::Server => SpanKind::Server,
            Kind::Client => SpanKind::Client,
        },
        name: name.into(),
        start_time: step.start,
        end_time: step.end.max(step.start),
        attributes,
        dropped_attributes_count: 0,
        events: Default::default(),
        links,
        status: step.error.map_or(Status::Unset, |e| match e.message.as_str() {
            "" => Status::error(e.reason),
            more => Status::error(format!("{}: {more}", e.reason)),
        }),
        instrumentation_scope: InstrumentationScope::builder(step.service.unwrap_or(OWN))
            .with_version(env!("CARGO_PKG_VERSION"))
            .build(),
    }
}

pub(crate) fn init(options: &Options) -> Result<(), Error> {
    let settings = Settings::read(options.otlp_endpoint.as_deref(), options.otlp_via, |name| std::env::var(name).ok())?;
    SAMPLER.set(settings.sampler).map_err(|_| Error::Twice)?;
    if options.keep {
        kept::begin(options.service, options.node.as_deref());
    }
    match &settings.target {
        Some(target) => start(options, target),
        None => Ok(()),
    }
}

fn start(options: &Options, target: &Target) -> Result<(), Error> {
    let other = options.speaks_for.map(|name| Ok::<_, Error>((name, target.exporter()?))).transpose()?;
    let exporter = Counting { own: target.exporter()?, other };
    let config = BatchConfigBuilder::default()
        .with_max_queue_size(QUEUE as usize + BATCH)
        .with_max_export_batch_size(BATCH)
        .with_scheduled_delay(LINGER)
        .build();
    let mut processor = BatchSpanProcessor::builder(exporter).with_batch_config(config).build();
    let own = [
        KeyValue::new("service.namespace", "virtfold"),
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        KeyValue::new("service.instance.id", uuid::Uuid::new_v4().to_string()),
    ];
    let node = options.node.as_ref().map(|node| KeyValue::new("k8s.node.name", node.clone()));
    let resource = Resource::builder().with_attributes(own.into_iter().chain(node)).with_service_name(options.service);
    processor.set_resource(&resource.build());
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
            ..Step::of(c, "u1", "start", at)
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
    fn codes_are_numbers() {
        let attributes = vec![("http.response.status_code", "404".into()), ("kubevirt.vm.name", "7".into())];
        let told = span(Step { attributes, ..step(TraceContext::random(), None, None) });
        let of = |key: &str| told.attributes.iter().find(|a| a.key.as_str() == key).map(|a| a.value.clone());
        assert_eq!(of("http.response.status_code"), Some(opentelemetry::Value::I64(404)));
        assert_eq!(of("kubevirt.vm.name"), Some(opentelemetry::Value::String("7".into())));
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
