//! Log lines: text or JSON, to stderr or a file, filtered.

use crate::{Error, Options};
use std::{io::IsTerminal, sync::Mutex, sync::PoisonError};
use tracing_subscriber::{EnvFilter, Layer, Registry, layer::SubscriberExt, reload, util::SubscriberInitExt};

/// The filter of this process and what changes it.
static FILTER: Mutex<Option<(String, reload::Handle<EnvFilter, Registry>)>> = Mutex::new(None);

/// Libraries that talk too much, or that would trace the exporter itself.
const QUIET: &str = "h2=warn,hyper=warn,hyper_util=warn,tower=warn,tonic=warn,kube_client=warn,kube_client::client=error,rustls=warn,opentelemetry=warn,opentelemetry_sdk=warn,opentelemetry-otlp=warn";

/// Installs the subscriber of this process.
pub(crate) fn init(options: &Options) -> Result<(), Error> {
    let wanted = std::env::var("VIRTFOLD_LOG").unwrap_or_else(|_| options.log_filter.clone());
    let wanted = if wanted.is_empty() { "info".to_owned() } else { wanted };
    let (filter, handle) = reload::Layer::new(parsed(&wanted)?);
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
    tracing_subscriber::registry().with(layer.with_filter(filter)).try_init().map_err(|_| Error::Twice)?;
    *FILTER.lock().unwrap_or_else(PoisonError::into_inner) = Some((wanted, handle));
    Ok(())
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
