//! Seeds of the simulated network: a process each, because each simulates the clock and the randomness of its whole program.

use crate::world::{mutants::Mutant, run::Scenario};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    io::Read,
    ops::Range,
    path::PathBuf,
    process::{Command, Stdio},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// A run that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(1200);

/// How to run a seed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// Keep a log.
    pub record: bool,
    /// This scenario on one node, without faults, instead of what the seed draws.
    pub scenario: Option<Scenario>,
    /// A mechanism that is broken, of those that the network can break ([`NETWORK_MUTANTS`]).
    pub mutant: Option<Mutant>,
}

/// Mutants of the simulated network, each with the check that has to catch it: what passes between the components is bent.
pub const NETWORK_MUTANTS: &[(Mutant, &str)] = &[(Mutant::LeaseWithoutVersion, "S7"), (Mutant::DeletionsUnheard, "L1")];

/// What became of a run.
#[derive(Debug, Clone, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
    /// Checks that failed: id, words, simulated milliseconds.
    pub violations: Vec<(String, String, u64)>,
    /// Of all that was written to the store, and when.
    pub hash: String,
    /// Of the journals of all processes.
    pub journals: String,
    /// Writes to the store.
    pub writes: u64,
    /// Calls of controllers and agents.
    pub calls: u64,
    /// Records in the journals.
    pub records: u64,
    /// Domains that began.
    pub starts: u64,
    /// Phases of each instance.
    pub lives: Vec<String>,
    /// Writes of controllers that took effect, by verb and kind.
    pub controller_writes: BTreeMap<String, u32>,
    /// Simulated milliseconds.
    pub elapsed: u64,
    /// Simulated milliseconds from the last fault until nothing moved any more.
    pub converged: u64,
    /// Faults that struck.
    pub struck: BTreeMap<String, u64>,
    /// The faults that the seed drew.
    pub swarm: String,
    /// The log, where it was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub log: Vec<String>,
}

/// The program that runs one seed: beside this one, or where `VIRTFOLD_SIM` says.
///
/// # Errors
/// It is not there.
pub fn program() -> Result<PathBuf> {
    let named = std::env::var_os("VIRTFOLD_SIM").map(PathBuf::from);
    let me = std::env::current_exe()?;
    // A test program is one folder below the binaries.
    let beside = me.ancestors().skip(1).take(2).map(|folder| folder.join("virtfold-sim"));
    let mut all = named.into_iter().chain(beside);
    all.find(|p| p.is_file()).context("there is no virtfold-sim: cargo build -p chaos-tests --features sim --bins")
}

/// Runs one seed.
///
/// # Errors
/// The process cannot be started, dies, hangs, or says nothing that can be read.
pub fn one(seed: u64, options: Options) -> Result<Outcome> {
    let mut command = Command::new(program()?);
    command.arg(seed.to_string()).args(options.record.then_some("--journal"));
    if let Some(mutant) = options.mutant {
        command.args(["--mutant", &format!("{mutant:?}")]);
    }
    if let Some(scenario) = options.scenario {
        command.args(["--scenario", &format!("{scenario:?}")]);
    }
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("starting virtfold-sim")?;
    let mut stdout = child.stdout.take().context("virtfold-sim has no output")?;
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        stdout.read_to_string(&mut text).map(|_| text)
    });
    let end = Instant::now() + PATIENCE;
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status,
            None if Instant::now() > end => {
                child.kill()?;
                child.wait()?;
                bail!("seed {seed} hangs: no end within {PATIENCE:?}");
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let text = match reader.join() {
        Ok(text) => text?,
        Err(_) => bail!("the output of seed {seed} was not read"),
    };
    if !status.success() {
        bail!("seed {seed}: virtfold-sim ended with {status}");
    }
    serde_json::from_str(&text).with_context(|| format!("seed {seed}: what virtfold-sim says cannot be read"))
}

/// Runs seeds, so many at the same time; each outcome is told as it comes.
///
/// # Errors
/// Of the first run that could not be done.
pub fn many(seeds: Range<u64>, options: Options, jobs: u64, told: impl Fn(Outcome) + Sync) -> Result<()> {
    let next = AtomicU64::new(seeds.start);
    let failed = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..jobs.min(seeds.end.saturating_sub(seeds.start)) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    match one(seed, options) {
                        Ok(outcome) => told(outcome),
                        Err(error) => {
                            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                            return;
                        }
                    }
                }
            });
        }
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}
