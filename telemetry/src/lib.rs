//! Traces, logs, journals and the one place that knows how they leave a process.
//!
//! A trace of virtfold is the journey of one operation (start, stop, ...) through several processes, some of which may die
//! on the way. So spans are not opened and closed by whoever happens to run: a **step** is a fact with a beginning and an
//! end, and its span is emitted once, when the step ends, with an id derived from (cell, operation, step). A process that
//! repeats a step after a crash derives the same id, and a child can name its parent before the parent has ended.
//!
//! Without a collector a step costs one counter ([`steps::counts`]), and one that is away costs a bounded queue.

pub mod clock;
pub mod context;
pub mod journal;
pub mod logs;
pub mod metrics;
pub mod secret;
pub mod steps;

pub use context::TraceContext;
pub use secret::Secret;
pub use steps::{Step, emit};

/// What a process says of itself and where its telemetry goes.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// `service.name`: `virtfold-controller`, `virtfold-node-agent`, ...
    pub service: &'static str,
    /// OTLP/gRPC endpoint such as `http://127.0.0.1:4317`; `None` switches traces off.
    pub otlp_endpoint: Option<String>,
    /// Where log lines go; `None` means stderr.
    pub log_file: Option<std::path::PathBuf>,
    /// Log filter (`info`, `reconcilers=debug`, ...); `VIRTFOLD_LOG` in the environment wins.
    pub log_filter: String,
    /// One JSON object a line instead of text.
    pub json: bool,
}

/// Why telemetry could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The log file cannot be opened.
    #[error("cannot open log file {path}")]
    LogFile {
        /// The file.
        path: std::path::PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The filter does not parse.
    #[error("log filter `{0}` is not valid")]
    Filter(String, #[source] tracing_subscriber::filter::ParseError),
    /// The OTLP exporter cannot be built.
    #[error("cannot export traces to {0}")]
    Exporter(String, #[source] opentelemetry_otlp::ExporterBuildError),
    /// [`init`] was not called.
    #[error("logs are not set up")]
    NotSetUp,
    /// A second [`init`] in one process.
    #[error("telemetry is set up already")]
    Twice,
}

/// Sets up logs and traces of this process. Must be called inside a tokio runtime where `otlp_endpoint` is set. Keep the
/// guard: [`Guard::shutdown`] sends what is still queued.
pub fn init(options: &Options) -> Result<Guard, Error> {
    logs::init(options)?;
    if let Some(endpoint) = &options.otlp_endpoint {
        steps::init(options.service, endpoint)?;
    }
    Ok(Guard(()))
}

/// Owner of the process's telemetry.
#[derive(Debug)]
pub struct Guard(());

impl Guard {
    /// Sends queued spans and stops the exporter; waits for at most two seconds.
    pub async fn shutdown(self) {
        // The exporter's thread needs the runtime that we would block.
        let _ = tokio::task::spawn_blocking(steps::shutdown).await;
    }
}
