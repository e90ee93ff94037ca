//! Traces, logs, journals and the one place that knows how they leave a process.
//!
//! A trace of virtfold is the journey of one operation (start, stop, ...) through several processes, some of which may die
//! on the way. So spans are not opened and closed by whoever happens to run: a **step** is a fact with a beginning and an
//! end, and its span is emitted once, when the step ends, with an id derived from (cell, operation, step). A process that
//! repeats a step after a crash derives the same id, and a child can name its parent before the parent has ended.
//!
//! Without a collector a step costs one counter ([`steps::counts`]), and one that is away costs a bounded queue. Where a page shows this
//! machine, the newest are kept besides ([`kept`]).

pub mod clock;
pub mod context;
mod export;
pub mod journal;
pub mod kept;
pub mod logs;
pub mod metrics;
mod readiness;
pub mod secret;
pub mod steps;

pub use context::TraceContext;
pub use readiness::Readiness;
pub use secret::Secret;
pub use steps::{Cause, Failure, Kind, Step, begin, emit};

/// What a process says of itself and where its telemetry goes.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// `service.name`: `virtfold-controller`, `virtfold-node-agent`, ...
    pub service: &'static str,
    /// OTLP endpoint such as `http://127.0.0.1:4317`; `None` leaves it to the environment (the module `export`), and without one there
    /// either, traces are off.
    pub otlp_endpoint: Option<String>,
    /// Where connections to the endpoint really go, for a process in another network than the collector.
    pub otlp_via: Option<std::net::SocketAddr>,
    /// A part that has no way to the collector, whose steps this process tells in its name.
    pub speaks_for: Option<&'static str>,
    /// The node that the process belongs to.
    pub node: Option<String>,
    /// Whether the newest steps are kept in this process, too, for those who ask it ([`kept`]).
    pub keep: bool,
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
    /// A setting of the environment cannot be followed.
    #[error("{0}")]
    Setting(String),
    /// A file that a setting names cannot be read.
    #[error("{what}: the file cannot be read")]
    SettingFile {
        /// The variable and what it says.
        what: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// [`init`] was not called.
    #[error("logs are not set up")]
    NotSetUp,
    /// A second [`init`] in one process.
    #[error("telemetry is set up already")]
    Twice,
}

/// Sets up logs and traces of this process. Must be called inside a tokio runtime where there is a collector. Keep the guard:
/// [`Guard::shutdown`] sends what is still queued.
pub fn init(options: &Options) -> Result<Guard, Error> {
    logs::init(options)?;
    steps::init(options)?;
    Ok(Guard(()))
}

/// Host and port of the collector that option and environment name, for those who make a way to it.
///
/// # Errors
/// A setting that cannot be followed.
pub fn collector(option: Option<&str>) -> Result<Option<(String, u16)>, Error> {
    let settings = export::Settings::read(option, None, |name| std::env::var(name).ok())?;
    settings.target.map(|target| target.place()).transpose()
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
