//! `virtfold-chaos`: the second binary of the workspace, for tests alone. `virtfold-chaos --help` says what it does.

mod commands;

use anyhow::{Context, Result};
use chaos_tests::kubernetes::{CONTROLLER, Kubernetes, NODES, load};
use chaos_tests::runs;
use chaos_tests::tally;
use chaos_tests::world::{
    CrashPoint, Role,
    bugs::KNOWN,
    mutants::Mutant,
    run::{self, Options, Outcome, Scenario},
};
use clap::{Parser, Subcommand};
use std::{
    collections::{BTreeMap, BTreeSet},
    io::{Read, Write},
    ops::Range,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Hurts virtfold on purpose and looks whether it holds.
///
/// Exit codes: 0 nothing was found, 1 an invariant was violated, 2 wrong use, 3 a search was given up before its end.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs seeds: of the model world (layer 1: the real machines, everything around them as data) or of the simulated network
    /// (layer 2: the production drivers, a process a seed).
    Run {
        /// Which world.
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
        layer: u8,
        /// One seed.
        #[arg(long, conflicts_with = "seeds", required_unless_present = "seeds")]
        seed: Option<u64>,
        /// Seeds from A up to, but not including, B.
        #[arg(long, value_name = "A..B", value_parser = range)]
        seeds: Option<Range<u64>>,
        /// End the trouble of a seed after so many steps of the machines; 0 for no bound.
        #[arg(long, default_value_t = 0)]
        steps: u64,
        /// So many nodes, machines and deeds of people, as in `3x20x200`; else as each seed draws it.
        #[arg(long, value_name = "NxMxD", value_parser = size)]
        world: Option<run::Size>,
        /// Print what happened in each run.
        #[arg(long)]
        journal: bool,
        /// Break a mechanism on purpose: what the checks are worth.
        #[arg(long, value_parser = mutant)]
        mutant: Option<Mutant>,
        /// Runs at the same time.
        #[arg(long, default_value_t = 2)]
        jobs: u64,
        /// Write what the runs come to into this file, again and again, for the textfile collector of a node exporter.
        #[arg(long, value_name = "FILE")]
        metrics: Option<PathBuf>,
    },
    /// Runs one seed twice, says what happened in it, and whether it was the same.
    Repeat {
        /// The seed.
        seed: u64,
        /// Which world.
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
        layer: u8,
    },
    /// Lets controller and agent die before and after each of their effects in each canonical scenario.
    CrashPoints {
        /// One scenario (start, stop, restart, delete, recreate, poweroff, crash, scaleup, scaledown, membercrash, nodeloss,
        /// leaderchange, takeover); all without it.
        #[arg(long, value_parser = scenario)]
        scenario: Option<Scenario>,
        /// One point of that scenario, as in `agent:4:before`, and what happened there.
        #[arg(long, value_parser = point, requires = "scenario")]
        point: Option<CrashPoint>,
    },
    /// In each canonical scenario loses each event of the controllers' watches once, and makes the view old at each decision; and does
    /// all pairs of operations at once.
    Exhaustive,
    /// Hurts real processes (layer 3): rounds of one fault each on a cluster of real binaries, etcd and guests that count aloud.
    Rounds(chaos_tests::rounds::command::Rounds),
    /// Hurts a cluster that you have, by its API alone, in a namespace of its own.
    Cluster(chaos_tests::storm::Storm),
    /// Stands between the parts of a cluster (see `rounds`), and does what its standard input says.
    #[command(hide = true)]
    Proxy {
        /// Data folder of the cluster.
        data: PathBuf,
    },
    #[command(flatten)]
    Model(commands::Model),
    /// Waits until its standard input ends, which happens when the test program that started it is gone in whatever way, and
    /// then takes down the cluster with this data folder.
    #[command(hide = true)]
    Janitor {
        /// Data folder.
        data: PathBuf,
    },
    /// Starts a real control plane of Kubernetes with our definitions and roles, prints one line of JSON about it, and takes it
    /// down when its standard input ends.
    #[command(hide = true)]
    Kubernetes {
        /// Write down calls without their bodies: what is written down costs the server time.
        #[arg(long)]
        lean: bool,
    },
    /// Puts load on such a control plane, and prints one line of JSON about what came of it.
    #[command(hide = true)]
    Load {
        /// What to do.
        what: load::What,
        /// Of an administrator.
        #[arg(long)]
        kubeconfig: PathBuf,
        /// The writes of a VM's start, as JSON.
        #[arg(long)]
        steps: PathBuf,
        /// Namespace; it is there.
        #[arg(long)]
        namespace: String,
        /// VMs.
        #[arg(long)]
        count: usize,
        /// Requests at once.
        #[arg(long, default_value_t = 16)]
        clients: usize,
        /// VMs a second.
        #[arg(long)]
        rate: Option<f64>,
        /// Seconds after which it is given up.
        #[arg(long, default_value_t = 240)]
        limit: u64,
    },
}

fn range(text: &str) -> Result<Range<u64>, String> {
    let (a, b) = text.split_once("..").ok_or("wanted: A..B")?;
    let number = |t: &str| t.parse::<u64>().map_err(|e| format!("{t:?}: {e}"));
    let (a, b) = (number(a)?, number(b)?);
    if a < b { Ok(a..b) } else { Err(format!("{a}..{b} has no seeds")) }
}

fn size(text: &str) -> Result<run::Size, String> {
    let words: Vec<&str> = text.split('x').collect();
    let [nodes, machines, deeds] = words.as_slice() else { return Err("wanted: NODESxMACHINESxDEEDS".into()) };
    let number = |t: &str| t.parse::<u32>().map_err(|e| format!("{t:?}: {e}"));
    let (nodes, machines, deeds) = (number(nodes)?, number(machines)?, number(deeds)?);
    if !(1..=5).contains(&nodes) || !(1..=200).contains(&machines) {
        return Err(format!("{text:?}: 1 to 5 nodes and 1 to 200 machines are allowed"));
    }
    Ok(run::Size { nodes: nodes as usize, machines: machines.into(), deeds: deeds.into() })
}

fn by_name<T: Copy + std::fmt::Debug>(all: impl Iterator<Item = T>, text: &str) -> Result<T, String> {
    let all: Vec<T> = all.collect();
    let same = |x: &&T| format!("{x:?}").eq_ignore_ascii_case(text);
    all.iter().find(same).copied().ok_or_else(|| format!("unknown; there are {all:?}"))
}

fn mutant(text: &str) -> Result<Mutant, String> {
    let all = Mutant::ALL.iter().map(|(m, _)| *m).chain(KNOWN.iter().map(|bug| bug.mutant));
    by_name(all.collect::<BTreeSet<_>>().into_iter(), text)
}

fn scenario(text: &str) -> Result<Scenario, String> {
    by_name(Scenario::EVERY.into_iter(), text)
}

fn point(text: &str) -> Result<CrashPoint, String> {
    let words: Vec<&str> = text.split(':').collect();
    let [role, effect, when] = words.as_slice() else { return Err("wanted: ROLE:EFFECT:before or :after".into()) };
    let role = by_name([Role::Controller, Role::Agent].into_iter(), role)?;
    let effect = effect.parse().map_err(|e| format!("{effect:?}: {e}"))?;
    match *when {
        "before" => Ok(CrashPoint { role, effect, after: false }),
        "after" => Ok(CrashPoint { role, effect, after: true }),
        other => Err(format!("{other:?} is neither before nor after")),
    }
}

fn main() -> Result<ExitCode> {
    match Arguments::parse().command {
        Command::Run { layer, seed, seeds, steps, world, journal, mutant, jobs, metrics } => {
            let seeds = seeds.unwrap_or_else(|| seed.map_or(0..0, |s| s..s + 1));
            let tally = tally::Shared::new(metrics.as_deref(), layer, seeds.end - seeds.start)?;
            let code = if layer == 2 {
                anyhow::ensure!(steps == 0 && world.is_none(), "--steps and --world are of layer 1");
                network(seeds, runs::Options { record: journal, mutant, scenario: None }, jobs.max(1), &tally)?
            } else {
                let options = Options { mutant, record: journal, steps, size: world, ..Options::default() };
                run_seeds(seeds, &options, jobs.max(1), &tally)
            };
            tally.end()?;
            Ok(code)
        }
        Command::Repeat { seed, layer } => {
            let (same, right) = if layer == 2 {
                let options = runs::Options { record: true, ..runs::Options::default() };
                let (a, b) = (runs::one(seed, options)?, runs::one(seed, options)?);
                tell_network(&a);
                (a == b, a.violations.is_empty())
            } else {
                let options = Options { record: true, ..Options::default() };
                let (a, b) = (run::seed(seed, &options), run::seed(seed, &options));
                tell(&a);
                (a == b, a.violations.is_empty())
            };
            println!("{}", if same { "the same both times" } else { "DIFFERENT the second time" });
            Ok(if same && right { ExitCode::SUCCESS } else { ExitCode::from(1) })
        }
        Command::CrashPoints { scenario: Some(scenario), point: Some(point) } => {
            let (outcome, _) = run::scenario(scenario, Some(point), true);
            tell(&outcome);
            Ok(if outcome.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) })
        }
        Command::CrashPoints { scenario, point: _ } => Ok(commands::crash_points(scenario)),
        Command::Exhaustive => Ok(commands::exhaustive()),
        Command::Model(command) => command.run(),
        Command::Rounds(rounds) => rounds.execute(),
        Command::Cluster(storm) => Ok(storm.execute()),
        Command::Proxy { data: _ } => chaos_tests::rounds::proxy::run().map(|()| ExitCode::SUCCESS),
        Command::Janitor { data } => {
            let mut sink = Vec::new();
            std::io::stdin().read_to_end(&mut sink).context("reading standard input")?;
            chaos_tests::e2e::leaks::sweep(&data)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Kubernetes { lean } => kubernetes(lean),
        Command::Load { what, kubeconfig, steps, namespace, count, clients, rate, limit } => {
            let limit = Duration::from_secs(limit);
            put_load(&kubeconfig, &steps, &load::Load { what, namespace, count, clients, rate, limit })
        }
    }
}

#[derive(Default)]
struct Sum {
    done: u64,
    steps: u64,
    starts: u64,
    elapsed: u64,
    bad: u64,
    checks: BTreeMap<&'static str, u64>,
    struck: BTreeMap<String, u64>,
}

fn run_seeds(seeds: Range<u64>, options: &Options, jobs: u64, tally: &tally::Shared) -> ExitCode {
    let began = Instant::now();
    let total = seeds.end - seeds.start;
    let next = AtomicU64::new(seeds.start);
    let sum = Mutex::new(Sum::default());
    std::thread::scope(|scope| {
        for _ in 0..jobs.min(total) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    let outcome = run::seed(seed, options);
                    tell(&outcome);
                    tally.take(&tally::Told {
                        violations: outcome.violations.iter().map(|v| v.check.to_string()).collect(),
                        faults: outcome.struck.iter().map(|(fault, n)| (fault.to_string(), *n)).collect(),
                        steps: outcome.steps,
                        domains: outcome.starts.into(),
                        quiet: None,
                    });
                    let mut sum = sum.lock().unwrap_or_else(PoisonError::into_inner);
                    add(&mut sum, &outcome);
                    if sum.done.is_multiple_of(200) {
                        eprintln!("{} of {total} seeds, {} violated", sum.done, sum.bad);
                    }
                }
            });
        }
    });
    let sum = sum.into_inner().unwrap_or_else(PoisonError::into_inner);
    let seconds = began.elapsed().as_secs_f64();
    println!(
        "{} seeds, {} violated, {} steps, {} domains, {:.0} simulated s in {seconds:.1} s: {:.0} seeds an hour, {:.0} steps/s",
        sum.done,
        sum.bad,
        sum.steps,
        sum.starts,
        sum.elapsed as f64 / 1000.0,
        sum.done as f64 * 3600.0 / seconds,
        sum.steps as f64 / seconds
    );
    println!("faults that struck: {:?}", sum.struck);
    if sum.bad > 0 {
        println!("violated: {:?}", sum.checks);
        return ExitCode::from(1);
    }
    ExitCode::SUCCESS
}

/// Seeds of the simulated network.
fn network(seeds: Range<u64>, options: runs::Options, jobs: u64, tally: &tally::Shared) -> Result<ExitCode> {
    let began = Instant::now();
    let total = seeds.end - seeds.start;
    let sum = Mutex::new((runs::Outcome::default(), vec![], BTreeMap::<String, u64>::new(), 0u64));
    runs::many(seeds, options, jobs, |outcome| {
        tell_network(&outcome);
        tally.take(&tally::Told {
            violations: outcome.violations.iter().map(|(check, ..)| check.clone()).collect(),
            faults: outcome.struck.iter().map(|(fault, n)| (fault.clone(), *n)).collect(),
            steps: outcome.records,
            domains: outcome.starts,
            quiet: Some(outcome.converged as f64 / 1000.0),
        });
        let mut sum = sum.lock().unwrap_or_else(PoisonError::into_inner);
        let (all, converged, checks, done) = &mut *sum;
        *done += 1;
        all.writes += outcome.writes;
        all.starts += outcome.starts;
        all.records += outcome.records;
        all.elapsed += outcome.elapsed;
        converged.push(outcome.converged);
        for (fault, n) in outcome.struck {
            *all.struck.entry(fault).or_default() += n;
        }
        for (check, text, at) in outcome.violations {
            *checks.entry(check.clone()).or_default() += 1;
            all.violations.push((check, format!("seed {}: {text}", outcome.seed), at));
        }
        if done.is_multiple_of(20) {
            eprintln!("{done} of {total} seeds, {} violations", all.violations.len());
        }
    })?;
    let (all, mut converged, checks, done) = sum.into_inner().unwrap_or_else(PoisonError::into_inner);
    converged.sort_unstable();
    let at = |p: usize| {
        converged.get((converged.len() * p / 100).min(converged.len().saturating_sub(1))).copied().unwrap_or(0)
    };
    let seconds = began.elapsed().as_secs_f64();
    println!(
        "{done} seeds, {} violations, {} domains, {} writes, {} records replayed, {:.0} simulated s in {seconds:.0} s; \
         quiet after the last fault: p50 {} ms, p95 {} ms, p99 {} ms",
        all.violations.len(),
        all.starts,
        all.writes,
        all.records,
        all.elapsed as f64 / 1000.0,
        at(50),
        at(95),
        at(99)
    );
    println!("faults that struck: {:?}", all.struck);
    if checks.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    println!("violated: {checks:?}");
    Ok(ExitCode::from(1))
}

fn tell_network(o: &runs::Outcome) {
    for line in &o.log {
        println!("{line}");
    }
    for (check, text, at) in &o.violations {
        println!(
            "seed {}: {check} at {at} ms: {text} (faults: {}); virtfold-chaos repeat --layer 2 {}",
            o.seed, o.swarm, o.seed
        );
    }
    if !o.log.is_empty() {
        println!("seed {}: hash {}, journals {}, {} writes", o.seed, o.hash, o.journals, o.writes);
    }
}

fn tell(outcome: &Outcome) {
    let mut text = String::new();
    for line in &outcome.log {
        text += line;
        text.push('\n');
    }
    for v in &outcome.violations {
        text += &format!("seed {}: {} at {} ms: {} (faults: {})\n", outcome.seed, v.check, v.at, v.text, outcome.swarm);
    }
    if !outcome.log.is_empty() {
        text += &format!("seed {}: hash {:016x}, {} steps\n", outcome.seed, outcome.hash, outcome.steps);
    }
    print!("{text}");
}

fn add(sum: &mut Sum, outcome: &Outcome) {
    sum.done += 1;
    sum.steps += outcome.steps;
    sum.starts += u64::from(outcome.starts);
    sum.elapsed += outcome.elapsed;
    sum.bad += u64::from(!outcome.violations.is_empty());
    for v in &outcome.violations {
        *sum.checks.entry(v.check).or_default() += 1;
    }
    for (fault, n) in &outcome.struck {
        *sum.struck.entry(fault.to_string()).or_default() += n;
    }
}

/// A control plane for whoever reads our standard output.
fn kubernetes(lean: bool) -> Result<ExitCode> {
    let k = if lean { Kubernetes::start_lean() } else { Kubernetes::start() }?;
    k.install()?;
    let controller = k.kubeconfig_of(CONTROLLER, None)?;
    let nodes = k.kubeconfig_of(NODES, Some("system:masters"))?;
    let about =
        serde_json::json!({"data": k.data, "port": k.port, "token": k.token, "controller": controller, "nodes": nodes});
    println!("{about}");
    std::io::stdout().flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(ExitCode::SUCCESS)
}

/// Puts load on a control plane.
fn put_load(kubeconfig: &Path, steps: &Path, load: &load::Load) -> Result<ExitCode> {
    let steps: Vec<load::Step> = serde_json::from_slice(&std::fs::read(steps).context("read the steps")?)?;
    // One thread: on a machine with few cores, they belong to those who are measured.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let done = runtime.block_on(async { load::run(&load::client(kubeconfig).await?, load, &steps).await })?;
    println!("{}", serde_json::to_string(&done)?);
    Ok(ExitCode::SUCCESS)
}
