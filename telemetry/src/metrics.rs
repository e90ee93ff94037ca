//! Metrics: what a process counts, and what it tells at the moment when somebody asks.
//!
//! A [`Registry`] belongs to one process and is handed to its parts. What happens is counted by handles ([`Counter`], [`Histogram`],
//! [`Timer`]); what *is* (how many machines, how much memory) is told by sources, which are asked at each scrape and read caches
//! that are there anyway, so that between scrapes nothing is done. Names, types, labels and meanings stand in one place, the
//! [`catalogue`]; what is not in it cannot be told.
//!
//! Nothing grows without a bound: a metric has at most [`SERIES`] series that are counted and [`SAMPLES`] that are told, values of
//! labels are cut; what is over that is dropped and counted (`virtfold_metric_series_dropped_total`).

pub mod catalogue;

pub use catalogue::Def;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet, prometheus_text, text},
    metrics::{MetricType, exemplar::HistogramWithExemplars},
};
use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

/// Series of a metric that is counted.
pub const SERIES: usize = 1_000;
/// Series of a metric that is told at a scrape.
pub const SAMPLES: usize = 50_000;
/// Bytes of a label's value.
pub const VALUE: usize = 253;

/// What a metric is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It only grows.
    Counter,
    /// It goes up and down.
    Gauge,
    /// A distribution.
    Histogram,
    /// A counter whose name does not end in `_total`: OpenMetrics knows no such thing, so its type is not told.
    Untyped,
}

impl Kind {
    /// The word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
            Self::Untyped => "untyped",
        }
    }

    fn told(self) -> MetricType {
        match self {
            Self::Counter => MetricType::Counter,
            Self::Gauge => MetricType::Gauge,
            Self::Histogram => MetricType::Histogram,
            Self::Untyped => MetricType::Unknown,
        }
    }
}

/// How it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Prometheus' own, version 0.0.4.
    Classic,
    /// With exemplars.
    OpenMetrics,
}

impl Format {
    /// What an `Accept` header asks for; the classic format unless the other one is named.
    pub fn negotiate(accept: &str) -> Self {
        let wanted = |media: &str| {
            let mut parts = media.split(';').map(str::trim);
            let refused = media.split(';').any(|p| matches!(p.trim(), "q=0" | "q=0.0"));
            parts.next() == Some("application/openmetrics-text") && !refused
        };
        if accept.split(',').any(wanted) { Self::OpenMetrics } else { Self::Classic }
    }

    /// Its `Content-Type`.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Classic => prometheus_text::CONTENT_TYPE,
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

type Labels = Vec<(&'static str, String)>;

/// A value that is told.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value {
    /// A whole number.
    Whole(u64),
    /// A number.
    Float(f64),
}

impl From<u64> for Value {
    fn from(v: u64) -> Self {
        Self::Whole(v)
    }
}
impl From<usize> for Value {
    fn from(v: usize) -> Self {
        Self::Whole(v as u64)
    }
}
impl From<bool> for Value {
    fn from(v: bool) -> Self {
        Self::Whole(v.into())
    }
}
impl From<f64> for Value {
    fn from(v: f64) -> Self {
        Self::Float(v)
    }
}

struct Sample {
    labels: Vec<(String, String)>,
    value: Value,
}

/// What the sources tell at one scrape.
#[derive(Default)]
pub struct Sheet {
    told: BTreeMap<&'static str, (&'static Def, Vec<Sample>)>,
    dropped: u64,
}

impl fmt::Debug for Sheet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sheet").field("metrics", &self.told.len()).finish_non_exhaustive()
    }
}

impl Sheet {
    /// Tells a value. `labels` are the values of the labels of the definition, in its order.
    pub fn tell(&mut self, def: &'static Def, labels: &[&str], value: impl Into<Value>) {
        self.tell_more(def, labels, &[], value);
    }

    /// The same, with further labels that are not of the definition ([`Def::more`]).
    pub fn tell_more(
        &mut self,
        def: &'static Def,
        labels: &[&str],
        more: &[(String, String)],
        value: impl Into<Value>,
    ) {
        debug_assert_eq!(labels.len(), def.labels.len(), "{}", def.name);
        debug_assert!(more.is_empty() || def.more, "{}", def.name);
        let samples = &mut self.told.entry(def.name).or_insert_with(|| (def, vec![])).1;
        if samples.len() >= SAMPLES {
            self.dropped += 1;
            return;
        }
        let named = def.labels.iter().zip(labels).map(|(name, value)| ((*name).to_owned(), cut(value)));
        let labels = named.chain(more.iter().map(|(name, value)| (name.clone(), cut(value)))).collect();
        samples.push(Sample { labels, value: value.into() });
    }
}

fn cut(value: &str) -> String {
    let mut end = value.len().min(VALUE);
    while !value.is_char_boundary(end) {
        end -= 1;
    }
    value[..end].to_owned()
}

/// Series of one metric by the values of their labels.
struct Series<M> {
    def: &'static Def,
    all: RwLock<BTreeMap<Vec<String>, Arc<M>>>,
    dropped: Arc<AtomicU64>,
}

impl<M> Series<M> {
    /// The series, made if need be; `None` where there are too many.
    fn of(&self, labels: &[&str], make: impl FnOnce() -> M) -> Option<Arc<M>> {
        debug_assert_eq!(labels.len(), self.def.labels.len(), "{}", self.def.name);
        let key: Vec<String> = labels.iter().map(|l| cut(l)).collect();
        if let Some(found) = self.all.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Some(found.clone());
        }
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= SERIES && !all.contains_key(&key) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(all.entry(key).or_insert_with(|| Arc::new(make())).clone())
    }

    fn each(&self, mut tell: impl FnMut(Labels, &M) -> fmt::Result) -> fmt::Result {
        for (values, metric) in self.all.read().unwrap_or_else(PoisonError::into_inner).iter() {
            tell(self.def.labels.iter().copied().zip(values.iter().cloned()).collect(), metric)?;
        }
        Ok(())
    }
}

/// Counts events.
#[derive(Clone)]
pub struct Counter(Arc<Series<AtomicU64>>);

impl Counter {
    /// Counts one.
    pub fn add(&self, labels: &[&str]) {
        self.add_many(labels, 1);
    }

    /// Counts several.
    pub fn add_many(&self, labels: &[&str], count: u64) {
        if let Some(counter) = self.at(labels) {
            counter.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// One series, for those who count so often that they keep it.
    pub fn at(&self, labels: &[&str]) -> Option<Arc<AtomicU64>> {
        self.0.of(labels, AtomicU64::default)
    }
}

/// Goes up while a guard lives.
#[derive(Clone)]
pub struct Gauge(Arc<Series<AtomicU64>>);

impl Gauge {
    /// One more until the guard is dropped; the series goes with the last one.
    pub fn hold(&self, labels: &[&str]) -> Held {
        let series = self.0.of(labels, AtomicU64::default);
        if let Some(series) = &series {
            series.fetch_add(1, Ordering::Relaxed);
        }
        Held { all: self.0.clone(), key: labels.iter().map(|l| cut(l)).collect(), series }
    }

    /// Sets it.
    pub fn set(&self, labels: &[&str], value: u64) {
        if let Some(series) = self.0.of(labels, AtomicU64::default) {
            series.store(value, Ordering::Relaxed);
        }
    }
}

/// One more of something; see [`Gauge::hold`].
pub struct Held {
    all: Arc<Series<AtomicU64>>,
    key: Vec<String>,
    series: Option<Arc<AtomicU64>>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(series) = self.series.take() else { return };
        let mut all = self.all.all.write().unwrap_or_else(PoisonError::into_inner);
        if series.fetch_sub(1, Ordering::Relaxed) == 1 {
            all.remove(&self.key);
        }
    }
}

/// A distribution whose buckets remember a trace each (OpenMetrics only).
#[derive(Clone)]
pub struct Histogram(Arc<Series<HistogramWithExemplars<Labels>>>);

impl Histogram {
    /// Adds a value that was seen, and the trace that it belongs to.
    pub fn observe(&self, labels: &[&str], value: Duration, trace: Option<crate::TraceContext>) {
        let buckets = self.0.def.buckets;
        let Some(series) = self.0.of(labels, || HistogramWithExemplars::new(buckets.iter().copied())) else { return };
        let exemplar = trace.filter(|t| t.sampled).map(|t| vec![("trace_id", t.trace())]);
        series.observe(value.as_secs_f64(), exemplar, Some(SystemTime::now()));
    }
}

/// A distribution for what happens so often that it may cost a few atomic additions and no more.
#[derive(Clone)]
pub struct Timer(Arc<Ticks>);

struct Ticks {
    bounds: &'static [f64],
    counts: Vec<AtomicU64>,
    nanos: AtomicU64,
}

impl Timer {
    /// Adds a value that was seen.
    pub fn observe(&self, value: Duration) {
        let seconds = value.as_secs_f64();
        let bucket = self.0.bounds.partition_point(|bound| *bound < seconds);
        self.0.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.0.nanos.fetch_add(u64::try_from(value.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

impl Ticks {
    fn new(bounds: &'static [f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::default()).collect();
        Self { bounds, counts, nanos: AtomicU64::default() }
    }

    fn encode(&self, encoder: &mut MetricEncoder<'_>) -> fmt::Result {
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> =
            bounds.zip(&self.counts).map(|(bound, count)| (bound, count.load(Ordering::Relaxed))).collect();
        let sum = Duration::from_nanos(self.nanos.load(Ordering::Relaxed)).as_secs_f64();
        let count = buckets.iter().map(|(_, count)| count).sum();
        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }
}

enum Live {
    Counter(Arc<Series<AtomicU64>>),
    Histogram(Arc<Series<HistogramWithExemplars<Labels>>>),
    Timer(Arc<Series<Arc<Ticks>>>),
}

type Source = Arc<dyn Fn(&mut Sheet) + Send + Sync>;

#[derive(Default)]
struct Inner {
    live: Mutex<BTreeMap<&'static str, (&'static Def, Live)>>,
    sources: Mutex<BTreeMap<String, Source>>,
    dropped: Arc<AtomicU64>,
}

/// The metrics of one process. Cheap to clone; a part that starts anew goes on with the same counters.
#[derive(Clone, Default)]
pub struct Registry(Arc<Inner>);

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Registry {
    fn series<M>(&self, def: &'static Def) -> Arc<Series<M>> {
        Arc::new(Series { def, all: RwLock::default(), dropped: self.0.dropped.clone() })
    }

    fn numbers(&self, def: &'static Def) -> Arc<Series<AtomicU64>> {
        let mut live = lock(&self.0.live);
        match live.entry(def.name).or_insert_with(|| (def, Live::Counter(self.series(def)))) {
            (_, Live::Counter(series)) => series.clone(),
            // The kinds of the catalogue are checked below, so that nobody gets here.
            (_, Live::Histogram(_) | Live::Timer(_)) => self.series(def),
        }
    }

    /// A counter of the catalogue.
    pub fn counter(&self, def: &'static Def) -> Counter {
        debug_assert_eq!(def.kind, Kind::Counter, "{}", def.name);
        let counter = Counter(self.numbers(def));
        if def.labels.is_empty() {
            // There from the beginning, so that the first event is a growth.
            counter.add_many(&[], 0);
        }
        counter
    }

    /// A gauge of the catalogue that is held or set. What is known without being counted is told by a source instead.
    pub fn gauge(&self, def: &'static Def) -> Gauge {
        debug_assert_eq!(def.kind, Kind::Gauge, "{}", def.name);
        Gauge(self.numbers(def))
    }

    /// A histogram of the catalogue.
    pub fn histogram(&self, def: &'static Def) -> Histogram {
        debug_assert_eq!(def.kind, Kind::Histogram, "{}", def.name);
        let mut live = lock(&self.0.live);
        match live.entry(def.name).or_insert_with(|| (def, Live::Histogram(self.series(def)))) {
            (_, Live::Histogram(series)) => Histogram(series.clone()),
            (_, Live::Counter(_) | Live::Timer(_)) => Histogram(self.series(def)),
        }
    }

    /// One series of a histogram of the catalogue, without exemplars.
    pub fn timer(&self, def: &'static Def, labels: &[&str]) -> Timer {
        debug_assert_eq!(def.kind, Kind::Histogram, "{}", def.name);
        let mut live = lock(&self.0.live);
        let ticks = || Arc::new(Ticks::new(def.buckets));
        let found = match live.entry(def.name).or_insert_with(|| (def, Live::Timer(self.series(def)))) {
            (_, Live::Timer(series)) => series.of(labels, ticks),
            (_, Live::Counter(_) | Live::Histogram(_)) => None,
        };
        Timer(found.map_or_else(ticks, |found| found.as_ref().clone()))
    }

    /// Somebody who tells what is, at each scrape; the one of that name before is forgotten.
    pub fn source(&self, name: impl Into<String>, source: impl Fn(&mut Sheet) + Send + Sync + 'static) {
        lock(&self.0.sources).insert(name.into(), Arc::new(source));
    }

    /// Somebody has nothing to tell any more.
    pub fn forget(&self, name: &str) {
        lock(&self.0.sources).remove(name);
    }

    /// Asks the sources, and writes all down. `Err` where a value cannot be written.
    pub fn scrape(&self, format: Format) -> Result<String, fmt::Error> {
        let mut sheet = Sheet::default();
        let sources: Vec<Source> = lock(&self.0.sources).values().cloned().collect();
        sources.iter().for_each(|source| source(&mut sheet));
        let dropped = self.0.dropped.fetch_add(sheet.dropped, Ordering::Relaxed) + sheet.dropped;
        sheet.tell(&catalogue::METRIC_SERIES_DROPPED, &[], dropped);
        spans(&mut sheet);
        let mut registry = prometheus_client::registry::Registry::default();
        registry.register_collector(Box::new(Page { inner: self.0.clone(), sheet }));
        let mut page = String::new();
        match format {
            Format::Classic => prometheus_text::encode(&mut page, &registry)?,
            Format::OpenMetrics => text::encode(&mut page, &registry)?,
        }
        Ok(page)
    }
}

/// What became of this process's spans.
fn spans(sheet: &mut Sheet) {
    let c = crate::steps::counts();
    for (outcome, count) in
        [("unsent", c.unsent), ("exported", c.exported), ("failed", c.failed), ("overflown", c.overflown)]
    {
        sheet.tell(&catalogue::SPANS, &[outcome], count);
    }
    sheet.tell(&catalogue::SPANS_WAITING, &[], c.waiting);
    sheet.tell(&catalogue::LOG_LINES_SUPPRESSED, &[], crate::logs::suppressed());
}

struct Page {
    inner: Arc<Inner>,
    sheet: Sheet,
}

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Page")
    }
}

fn head<'e>(encoder: &'e mut DescriptorEncoder<'_>, def: &'e Def) -> Result<MetricEncoder<'e>, fmt::Error> {
    // The writer adds what the names of counters end in.
    let name = if def.kind == Kind::Counter { def.name.trim_end_matches("_total") } else { def.name };
    encoder.encode_descriptor(name, def.help, None, def.kind.told())
}

fn value(encoder: &mut MetricEncoder<'_>, kind: Kind, value: Value) -> fmt::Result {
    match (kind, value) {
        (Kind::Counter, Value::Whole(v)) => encoder.encode_counter::<NoLabelSet, _, u64>(&v, None),
        (Kind::Counter, Value::Float(v)) => encoder.encode_counter::<NoLabelSet, _, f64>(&v, None),
        (_, Value::Whole(v)) => encoder.encode_gauge(&v),
        (_, Value::Float(v)) => encoder.encode_gauge(&v),
    }
}

impl Collector for Page {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (def, samples) in self.sheet.told.values() {
            let mut encoder = head(&mut encoder, def)?;
            for sample in samples {
                let mut encoder = encoder.encode_family(&sample.labels)?;
                value(&mut encoder, def.kind, sample.value)?;
            }
        }
        for (def, live) in lock(&self.inner.live).values() {
            let mut encoder = head(&mut encoder, def)?;
            match live {
                Live::Counter(series) => series.each(|labels, metric| {
                    let mut encoder = encoder.encode_family(&labels)?;
                    value(&mut encoder, def.kind, Value::Whole(metric.load(Ordering::Relaxed)))
                })?,
                Live::Histogram(series) => {
                    series.each(|labels, metric| metric.encode(encoder.encode_family(&labels)?))?;
                }
                Live::Timer(series) => {
                    series.each(|labels, metric| metric.encode(&mut encoder.encode_family(&labels)?))?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use catalogue as c;

    #[test]
    fn both_formats_have_the_names_of_the_catalogue() {
        let registry = Registry::default();
        registry.counter(&c::COMMANDS).add(&["create", "applied"]);
        let trace = crate::TraceContext::parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
        registry.histogram(&c::OPERATION_STEP).observe(&["start", "boot"], Duration::from_millis(700), trace);
        registry.timer(&c::STEP, &["vm"]).observe(Duration::from_micros(3));
        registry.source("vms", |sheet| {
            sheet.tell(&c::VM_RUNNING_SINCE, &["a", "default"], 5_u64);
            sheet.tell(&c::EPOCH, &[], 7_u64);
        });
        let classic = registry.scrape(Format::Classic).unwrap();
        for line in [
            "# TYPE virtfold_commands_total counter",
            r#"virtfold_commands_total{command="create",outcome="applied"} 1"#,
            r#"kubevirt_vm_running_status_last_transition_timestamp_seconds{name="a",namespace="default"} 5"#,
            "virtfold_epoch 7",
            r#"virtfold_operation_step_duration_seconds_bucket{operation="start",step="boot",le="1.0"} 1"#,
            r#"virtfold_step_duration_seconds_count{cell="vm"} 1"#,
            "virtfold_metric_series_dropped_total 0",
        ] {
            let normal = |text: &str| text.replace("le=\"1.0\"", "").replace("le=\"1\"", "");
            assert!(classic.lines().any(|l| l == line || same_labels(&normal(l), &normal(line))), "{line}\n{classic}");
        }
        assert!(!classic.contains("trace_id") && !classic.contains("# EOF"));
        let open = registry.scrape(Format::OpenMetrics).unwrap();
        assert!(open.contains("# TYPE virtfold_commands counter\n"), "{open}");
        assert!(open.contains(r#"# {trace_id="0af7651916cd43dd8448eb211c80319c"} 0.7"#), "{open}");
        assert!(open.ends_with("# EOF\n"));
    }

    /// Whether two lines differ in the order of their labels alone.
    fn same_labels(a: &str, b: &str) -> bool {
        let parts = |l: &str| {
            let mut all: Vec<String> = l.split(['{', ',', '}']).map(str::to_owned).filter(|p| !p.is_empty()).collect();
            all.sort();
            all
        };
        parts(a) == parts(b)
    }

    #[test]
    fn a_million_values_of_a_label_are_bounded_and_counted() {
        let registry = Registry::default();
        let counter = registry.counter(&c::COMMANDS);
        for i in 0..100_000 {
            counter.add(&["create", &i.to_string()]);
        }
        registry.source("guest", |sheet| {
            for i in 0..1_000_000 {
                sheet.tell(&c::VM_CREATED, &[&"ö".repeat(i % 300), "default"], 1_u64);
            }
        });
        let page = registry.scrape(Format::Classic).unwrap();
        let lines = |name: &str| page.lines().filter(|l| l.starts_with(&format!("{name}{{"))).count();
        assert_eq!(lines("virtfold_commands_total"), SERIES);
        assert_eq!(lines(c::VM_CREATED.name), SAMPLES);
        assert!(page.contains("virtfold_metric_series_dropped_total 1049000"), "{}", page.len());
        assert!(page.lines().all(|l| l.len() < 1_000));
    }

    #[test]
    fn the_longest_name_with_every_legal_character_stands_whole_in_metrics_and_spans() {
        let legal: String = ('a'..='z').chain('0'..='9').chain(['-', '.']).cycle().take(252).chain(['z']).collect();
        let registry = Registry::default();
        let told = legal.clone();
        registry.source("vms", move |sheet| sheet.tell(&c::VM_CREATED, &[&told, "default"], 1_u64));
        for format in [Format::Classic, Format::OpenMetrics] {
            assert!(registry.scrape(format).unwrap().contains(&format!("name=\"{legal}\"")), "{format:?}");
        }
        let step = crate::Step {
            attributes: vec![("kubevirt.vm.name", legal.clone())],
            ..crate::Step::of(crate::TraceContext::random(), "u", "start", SystemTime::UNIX_EPOCH)
        };
        let span = crate::steps::span(step);
        assert!(span.attributes.iter().any(|a| a.value.as_str() == legal));
    }

    #[test]
    fn what_a_guest_says_cannot_break_a_page() {
        let registry = Registry::default();
        registry.source("guest", |sheet| {
            let names = ["a\"b", "a\\b", "a\nb", "a{b}", "\u{0}", "\u{202e}x", "a b,c=\"d\""];
            for name in names {
                sheet.tell(&c::FS_USED, &["n", "ns", "vm", name, "/", "ext4"], 1_u64);
            }
        });
        let page = registry.scrape(Format::Classic).unwrap();
        let lines: Vec<&str> = page.lines().filter(|l| l.starts_with(c::FS_USED.name)).collect();
        assert_eq!(lines.len(), 7, "{page}");
        assert!(lines.iter().all(|l| l.ends_with(" 1")), "{lines:?}");
    }

    #[test]
    fn what_is_held_is_gone_with_its_guard() {
        let registry = Registry::default();
        let gauge = registry.gauge(&c::CONSOLES);
        let (a, b) = (gauge.hold(&["default", "vm"]), gauge.hold(&["default", "vm"]));
        let count = || {
            let page = registry.scrape(Format::Classic).unwrap();
            page.lines().find(|l| l.starts_with(&format!("{}{{", c::CONSOLES.name))).map(|l| l.ends_with(" 2"))
        };
        assert_eq!(count(), Some(true));
        drop(a);
        assert_eq!(count(), Some(false));
        drop(b);
        assert_eq!(count(), None);
    }

    #[test]
    fn the_format_is_negotiated() {
        for (accept, format) in [
            ("", Format::Classic),
            ("*/*", Format::Classic),
            ("text/plain;version=0.0.4;q=0.5", Format::Classic),
            ("application/openmetrics-text;version=1.0.0,text/plain;q=0.3", Format::OpenMetrics),
            ("application/openmetrics-text;q=0,text/plain", Format::Classic),
        ] {
            assert_eq!(Format::negotiate(accept), format, "{accept}");
        }
    }
}
