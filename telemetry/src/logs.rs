//! Log lines: text or JSON, to stderr or a file, filtered.

use crate::{Error, Options};
use std::{
    collections::HashMap,
    io::IsTerminal,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tracing::{Event, Level, Metadata, Subscriber, callsite::Identifier};
use tracing_subscriber::{
    EnvFilter, Layer, Registry,
    fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter, format::Writer},
    layer::SubscriberExt,
    registry::LookupSpan,
    reload,
    util::SubscriberInitExt,
};

/// The filter of this process and what changes it.
static FILTER: Mutex<Option<(String, reload::Handle<EnvFilter, Registry>)>> = Mutex::new(None);

/// Libraries that talk too much, or that would trace the exporter itself.
const QUIET: &str = "h2=warn,hyper=warn,hyper_util=warn,tower=warn,tonic=warn,kube_client=warn,kube_client::client=error,rustls=warn,opentelemetry=warn,opentelemetry_sdk=warn,opentelemetry-otlp=warn";

/// `json` in this variable makes every process of virtfold write one JSON object a line.
pub const FORMAT: &str = "VIRTFOLD_LOG_FORMAT";

/// Lines of one message that may come at once.
const BURST: u32 = 200;
/// Time after which one more may come.
const PAUSE: Duration = Duration::from_millis(50);

static SUPPRESSED: AtomicU64 = AtomicU64::new(0);

/// Lines that were left out because the same message had come too often.
pub fn suppressed() -> u64 {
    SUPPRESSED.load(Ordering::Relaxed)
}

/// Installs the subscriber of this process.
pub(crate) fn init(options: &Options) -> Result<(), Error> {
    let wanted = std::env::var("VIRTFOLD_LOG").unwrap_or_else(|_| options.log_filter.clone());
    let wanted = if wanted.is_empty() { "info".to_owned() } else { wanted };
    let json = match std::env::var(FORMAT).as_deref() {
        Ok("json") => true,
        Ok("text") => false,
        Ok("") | Err(_) => options.json,
        Ok(other) => return Err(Error::Setting(format!("{FORMAT}={other}: text and json are there"))),
    };
    let (filter, handle) = reload::Layer::new(parsed(&wanted)?);
    let layer = match &options.log_file {
        Some(path) => {
            let file = std::fs::OpenOptions::new()
                .create(true)
                .append(true)
                .open(path)
                .map_err(|source| Error::LogFile { path: path.clone(), source })?;
            layer(json, false, file)
        }
        None => layer(json, std::io::stderr().is_terminal(), std::io::stderr),
    };
    tracing_subscriber::registry().with(layer.with_filter(filter)).try_init().map_err(|_| Error::Twice)?;
    *FILTER.lock().unwrap_or_else(PoisonError::into_inner) = Some((wanted, handle));
    Ok(())
}

/// What writes lines: text or JSON, each message within its limit.
fn layer<S, W>(json: bool, colours: bool, writer: W) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let plain = tracing_subscriber::fmt::layer().with_ansi(colours && !json).with_writer(writer);
    if json {
        plain.json().map_event_format(|inner| Limited { inner, json, limit: Limit::default() }).boxed()
    } else {
        plain.map_event_format(|inner| Limited { inner, json, limit: Limit::default() }).boxed()
    }
}

/// Lines of one message: how many more may come now, since when that is so, how many were left out.
struct Allowance {
    left: u32,
    at: Instant,
    missing: u64,
}

/// Keeps what is said again and again from filling the disk. A message is a place in the code, so there are only so many.
/// Those that somebody asked for by changing the filter (debug, trace) have no limit.
#[derive(Default)]
struct Limit(Mutex<HashMap<Identifier, Allowance>>);

impl Limit {
    /// Whether a line may come, and how many were left out before it.
    fn pass(&self, message: &Metadata<'_>, now: Instant) -> Option<u64> {
        if *message.level() > Level::INFO {
            return Some(0);
        }
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.entry(message.callsite()).or_insert_with(|| Allowance { left: BURST, at: now, missing: 0 });
        let passed = now.duration_since(known.at);
        let earned = u32::try_from(passed.as_millis() / PAUSE.as_millis()).unwrap_or(u32::MAX);
        if earned > 0 {
            known.left = known.left.saturating_add(earned).min(BURST);
            known.at = now;
        }
        if known.left == 0 {
            known.missing += 1;
            SUPPRESSED.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        known.left -= 1;
        Some(std::mem::take(&mut known.missing))
    }
}

/// A format whose lines have a limit.
struct Limited<F> {
    inner: F,
    json: bool,
    limit: Limit,
}

impl<S, N, F> FormatEvent<S, N> for Limited<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        let message = event.metadata();
        let Some(missing) = self.limit.pass(message, Instant::now()) else { return Ok(()) };
        if missing > 0 {
            let (file, line) = (message.file().unwrap_or_default(), message.line().unwrap_or_default());
            if self.json {
                let level = message.level();
                let fields = r#""message":"lines of this message were left out""#;
                writeln!(
                    writer,
                    r#"{{"level":"{level}","fields":{{{fields},"suppressed":{missing}}},"target":"{}","place":"{file}:{line}"}}"#,
                    message.target()
                )?;
            } else {
                writeln!(writer, "{missing} lines of the message at {file}:{line} were left out")?;
            }
        }
        self.inner.format_event(context, writer, event)
    }
}

fn parsed(wanted: &str) -> Result<EnvFilter, Error> {
    EnvFilter::builder().parse(format!("{QUIET},{wanted}")).map_err(|e| Error::Filter(wanted.to_owned(), e))
}

/// What is logged at the moment; empty where nothing is set up.
pub fn filter() -> String {
    FILTER.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map_or_else(String::new, |(f, _)| f.clone())
}

/// Logs something else from now on (`info`, `reconcilers=debug`, ...), until the process ends.
///
/// # Errors
/// [`Error::Filter`] where it does not parse; nothing changes then.
pub fn set_filter(wanted: &str) -> Result<(), Error> {
    let new = parsed(wanted)?;
    let mut filter = FILTER.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((known, handle)) = filter.as_mut() else { return Err(Error::NotSetUp) };
    handle.reload(new).map_err(|_| Error::NotSetUp)?;
    wanted.clone_into(known);
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::{io::Write, sync::Arc};

    #[derive(Clone, Default)]
    struct Page(Arc<Mutex<Vec<u8>>>);

    impl Write for Page {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Page {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    fn written(json: bool, say: impl FnOnce()) -> String {
        let page = Page::default();
        let own = page.clone();
        let subscriber = tracing_subscriber::registry().with(layer(json, false, move || own.clone()));
        tracing::subscriber::with_default(subscriber, say);
        page.text()
    }

    #[test]
    fn what_is_said_again_and_again_is_limited_and_what_is_left_out_is_told() {
        for json in [false, true] {
            let before = suppressed();
            let text = written(json, || {
                let again = |n: u32| tracing::info!(n, "the same again");
                (0..10 * BURST).for_each(again);
                tracing::info!("something else");
                // A slow machine earns a few lines on the way; after this pause there is one more for certain.
                std::thread::sleep(3 * PAUSE);
                again(7);
            });
            let said = text.lines().filter(|l| l.contains("the same again")).count();
            assert!((BURST as usize..5 * BURST as usize).contains(&said), "{said} lines");
            assert!(text.contains("something else"));
            let told: Vec<&str> = text.lines().filter(|l| l.contains("left out")).collect();
            let count: u64 = told
                .iter()
                .map(|l| match json {
                    false => l.split(' ').next().unwrap().parse::<u64>().unwrap(),
                    true => {
                        serde_json::from_str::<serde_json::Value>(l).unwrap()["fields"]["suppressed"].as_u64().unwrap()
                    }
                })
                .sum();
            assert_eq!(said as u64 + count, 10 * u64::from(BURST) + 1, "{told:?}");
            assert!(suppressed() - before >= count);
        }
    }

    #[test]
    fn a_line_of_json_has_the_ids_of_cell_and_trace() {
        let text = written(true, || {
            let _cell = tracing::info_span!("cell", cell = "default/vm", trace = "0af7").entered();
            tracing::info!(secret = %crate::Secret::new("hunter2"), "decided");
        });
        let line: serde_json::Value = serde_json::from_str(text.trim()).unwrap();
        assert_eq!((&line["span"]["cell"], &line["span"]["trace"]), (&"default/vm".into(), &"0af7".into()));
        assert_eq!((&line["fields"]["message"], &line["fields"]["secret"]), (&"decided".into(), &"[redacted]".into()));
    }

    #[test]
    fn debug_lines_have_no_limit() {
        let text = written(false, || (0..2 * BURST).for_each(|n| tracing::debug!(n, "asked for")));
        assert_eq!(text.lines().count(), 2 * BURST as usize);
    }
}
