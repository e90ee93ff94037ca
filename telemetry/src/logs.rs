//! Log lines: text or JSON, to stderr or a file, filtered.

use crate::{Error, Options};
use std::io::IsTerminal;
use tracing_subscriber::{EnvFilter, Layer, layer::SubscriberExt, util::SubscriberInitExt};

/// Libraries that talk too much, or that would trace the exporter itself.
const QUIET: &str = "h2=warn,hyper=warn,hyper_util=warn,tower=warn,tonic=warn,kube_client=warn,kube_client::client=error,rustls=warn,opentelemetry=warn,opentelemetry_sdk=warn,opentelemetry-otlp=warn";

/// Installs the subscriber of this process.
pub(crate) fn init(options: &Options) -> Result<(), Error> {
    let wanted = std::env::var("VIRTFOLD_LOG").unwrap_or_else(|_| options.log_filter.clone());
    let wanted = if wanted.is_empty() { "info".to_owned() } else { wanted };
    let filter =
        EnvFilter::builder().parse(format!("{QUIET},{wanted}")).map_err(|e| Error::Filter(wanted.clone(), e))?;
    let fmt = tracing_subscriber::fmt::layer();
    let layer = match &options.log_file {
        Some(path) => {
            let file = std::fs::OpenOptions::new()
                .create(true)
                .append(true)
                .open(path)
                .map_err(|source| Error::LogFile { path: path.clone(), source })?;
            let fmt = fmt.with_ansi(false).with_writer(file);
            if options.json { fmt.json().boxed() } else { fmt.boxed() }
        }
        None => {
            let fmt = fmt.with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr);
            if options.json { fmt.json().boxed() } else { fmt.boxed() }
        }
    };
    tracing_subscriber::registry().with(layer.with_filter(filter)).try_init().map_err(|_| Error::Twice)
}
