//! What runs of seeds come to, as a file that Prometheus reads through the node exporter's textfile collector.
//!
//! The metrics are of the tests and not of the product, so they are not in its catalogue. The file is replaced as a whole, at most once a
//! second.

use anyhow::{Context, Result};
use prometheus_client::{
    encoding::prometheus_text,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError, atomic::AtomicU64},
    time::{Duration, Instant, SystemTime},
};

/// The file is not written more often.
const SELDOM: Duration = Duration::from_secs(1);
/// Seconds until nothing moves any more.
const QUIET: [f64; 10] = [0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0];

type Labels = Vec<(&'static str, String)>;

/// What became of one run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Told {
    /// Checks that failed.
    pub violations: Vec<String>,
    /// Faults that struck, by kind.
    pub faults: Vec<(String, u64)>,
    /// Steps of the machines, or records of the journals.
    pub steps: u64,
    /// Domains that began.
    pub domains: u64,
    /// Seconds from the last fault until nothing moved any more, where that is known.
    pub quiet: Option<f64>,
}

/// Counts runs.
#[derive(Debug)]
pub struct Tally {
    file: PathBuf,
    layer: String,
    registry: Registry,
    runs: Family<Labels, Counter>,
    violated: Family<Labels, Counter>,
    violations: Family<Labels, Counter>,
    faults: Family<Labels, Counter>,
    steps: Family<Labels, Counter>,
    domains: Family<Labels, Counter>,
    quiet: Family<Labels, Histogram, fn() -> Histogram>,
    newest: Gauge<f64, AtomicU64>,
    written: Option<Instant>,
}

impl Tally {
    /// Of so many runs of a layer, into this file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn new(file: &Path, layer: u8, wanted: u64) -> Result<Self> {
        let mut registry = Registry::with_prefix("virtfold_chaos");
        let histogram: fn() -> Histogram = || Histogram::new(QUIET);
        let mut tally = Self {
            file: file.to_owned(),
            layer: layer.to_string(),
            runs: Family::default(),
            violated: Family::default(),
            violations: Family::default(),
            faults: Family::default(),
            steps: Family::default(),
            domains: Family::default(),
            quiet: Family::new_with_constructor(histogram),
            newest: Gauge::default(),
            written: None,
            registry: Registry::default(),
        };
        let started: Gauge<f64, AtomicU64> = Gauge::default();
        started.set(now());
        let all: Family<Labels, Gauge> = Family::default();
        all.get_or_create(&tally.labels(&[])).set(i64::try_from(wanted).unwrap_or(i64::MAX));
        registry.register("runs", "Runs that ended", tally.runs.clone());
        registry.register("runs_violated", "Runs in which a check failed", tally.violated.clone());
        registry.register("violations", "Checks that failed, by their id", tally.violations.clone());
        registry.register("faults", "Faults that struck, by kind", tally.faults.clone());
        registry.register("steps", "Steps of the machines", tally.steps.clone());
        registry.register("domains", "Domains that began", tally.domains.clone());
        registry.register(
            "quiet_seconds",
            "From the last fault until nothing moved any more, in simulated seconds",
            tally.quiet.clone(),
        );
        registry.register("runs_wanted", "Runs that were asked for", all);
        registry.register("start_timestamp_seconds", "When these runs began, in seconds since 1970", started);
        registry.register(
            "newest_timestamp_seconds",
            "When the newest run ended, in seconds since 1970",
            tally.newest.clone(),
        );
        // There from the beginning, so that a rate has something to begin with.
        for family in [&tally.runs, &tally.violated, &tally.steps, &tally.domains] {
            drop(family.get_or_create(&tally.labels(&[])));
        }
        tally.registry = registry;
        tally.write()?;
        Ok(tally)
    }

    fn labels(&self, more: &[(&'static str, &str)]) -> Labels {
        let layer = ("layer", self.layer.clone());
        std::iter::once(layer).chain(more.iter().map(|(k, v)| (*k, (*v).to_owned()))).collect()
    }

    /// Counts a run.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn take(&mut self, told: &Told) -> Result<()> {
        let own = self.labels(&[]);
        self.runs.get_or_create(&own).inc();
        self.steps.get_or_create(&own).inc_by(told.steps);
        self.domains.get_or_create(&own).inc_by(told.domains);
        self.violated.get_or_create(&own).inc_by(u64::from(!told.violations.is_empty()));
        for check in &told.violations {
            self.violations.get_or_create(&self.labels(&[("check", check)])).inc();
        }
        for (fault, count) in &told.faults {
            self.faults.get_or_create(&self.labels(&[("fault", fault)])).inc_by(*count);
        }
        if let Some(seconds) = told.quiet {
            self.quiet.get_or_create(&own).observe(seconds);
        }
        self.newest.set(now());
        if self.written.is_some_and(|at| at.elapsed() < SELDOM) { Ok(()) } else { self.write() }
    }

    /// Writes the file.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&mut self) -> Result<()> {
        let mut text = String::new();
        prometheus_text::encode(&mut text, &self.registry).context("write metrics")?;
        // A reader sees the old file or the new one.
        let fresh = self.file.with_extension("new");
        let written = fs::write(&fresh, text).and_then(|()| fs::rename(&fresh, &self.file));
        self.written = Some(Instant::now());
        written.with_context(|| format!("write {}", self.file.display()))
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// A tally that many threads share, or none.
#[derive(Debug, Default)]
pub struct Shared(Option<Mutex<Tally>>);

impl Shared {
    /// For runs of a layer; nothing is counted without a file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn new(file: Option<&Path>, layer: u8, wanted: u64) -> Result<Self> {
        Ok(Self(file.map(|file| Tally::new(file, layer, wanted)).transpose()?.map(Mutex::new)))
    }

    /// Counts a run; a file that cannot be written any more stops no run.
    pub fn take(&self, told: &Told) {
        if let Some(tally) = &self.0
            && let Err(error) = tally.lock().unwrap_or_else(PoisonError::into_inner).take(told)
        {
            eprintln!("{error:#}");
        }
    }

    /// Writes what was counted last.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn end(self) -> Result<()> {
        self.0.map_or(Ok(()), |tally| tally.into_inner().unwrap_or_else(PoisonError::into_inner).write())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_was_counted_is_in_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("chaos.prom");
        let shared = Shared::new(Some(&file), 2, 3).unwrap();
        assert!(fs::read_to_string(&file).unwrap().contains("virtfold_chaos_runs_total{layer=\"2\"} 0\n"));
        let told = Told {
            violations: vec!["S7".into(), "L1".into()],
            faults: vec![("lag \"x\"".into(), 4)],
            steps: 10,
            domains: 2,
            quiet: Some(1.5),
        };
        shared.take(&told);
        shared.take(&Told { steps: 5, ..Told::default() });
        shared.end().unwrap();
        let text = fs::read_to_string(&file).unwrap();
        for line in [
            "virtfold_chaos_runs_total{layer=\"2\"} 2",
            "virtfold_chaos_runs_violated_total{layer=\"2\"} 1",
            "virtfold_chaos_violations_total{layer=\"2\",check=\"S7\"} 1",
            "virtfold_chaos_faults_total{layer=\"2\",fault=\"lag \\\"x\\\"\"} 4",
            "virtfold_chaos_steps_total{layer=\"2\"} 15",
            "virtfold_chaos_quiet_seconds_bucket{layer=\"2\",le=\"2\"} 1",
            "virtfold_chaos_runs_wanted{layer=\"2\"} 3",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in {text}");
        }
        assert!(Shared::new(Some(&folder.path().join("no/such/folder")), 1, 1).is_err());
        Shared::default().take(&told);
    }
}
