//! Commands about the model world beyond running it: make a failure small, do a plan again, look for known bugs.

use crate::{mutant, range, tell};
use anyhow::{Context, Result};
use chaos_tests::world::{
    bugs::{self, KNOWN},
    coverage::Coverage,
    mutants::Mutant,
    plan::Plan,
    report::{self, Figures, Size},
    run::{self, Options, Outcome, Scenario, Twist},
    search::{self, Bounds, Found},
    shrink,
    users::STRATEGIES,
};
use clap::Subcommand;
use std::{ops::Range, path::PathBuf, process::ExitCode};

/// What one can do with the model world.
#[derive(Subcommand)]
pub enum Model {
    /// Leaves out of a failing seed what its violation does not need, and prints what is left and what happens then.
    Shrink {
        /// The seed.
        seed: u64,
        /// The mechanism that is broken, where one is.
        #[arg(long, value_parser = mutant)]
        mutant: Option<Mutant>,
        /// The check that it is about; else the first that fails.
        #[arg(long)]
        check: Option<String>,
        /// Not more runs than this.
        #[arg(long, default_value_t = 3000)]
        runs: u32,
        /// Where to write the plan that is left.
        #[arg(long, default_value = "shrunk.json")]
        save: PathBuf,
    },
    /// Does what a plan says, as `shrink` writes them, twice, and says what happened and whether it was the same.
    Replay {
        /// The plan.
        plan: PathBuf,
        /// Without the mechanism broken that the plan names.
        #[arg(long)]
        mended: bool,
        /// Everything that happened, not only what tells the story.
        #[arg(long)]
        journal: bool,
    },
    /// Puts failures that others had into ours, one at a time, and says after how many seeds each is found.
    Bugs {
        /// Seeds for each.
        #[arg(long, default_value_t = 100)]
        seeds: u64,
        /// One of them.
        #[arg(long, value_parser = mutant)]
        only: Option<Mutant>,
    },
    /// Measures, and writes a page with figures and plots.
    Report {
        /// Seeds from A up to, but not including, B.
        #[arg(long, value_name = "A..B", value_parser = range, default_value = "0..300")]
        seeds: Range<u64>,
        /// Seeds with one kind of fault alone, for each kind.
        #[arg(long, default_value_t = 30)]
        each: u64,
        /// Seeds within which a mutant has to be caught.
        #[arg(long, default_value_t = 150)]
        mutants: u64,
        /// The page.
        #[arg(long, default_value = "report.html")]
        output: PathBuf,
    },
    /// Tries everything that can happen to one machine, in every order, within bounds, until there is no new state.
    ///
    /// Exit codes: 0 every state within the bounds was seen and all of them hold, 1 an invariant was violated, 3 given up before
    /// the end.
    Search {
        #[command(flatten)]
        bounds: Bounds,
        /// Break a mechanism on purpose.
        #[arg(long, value_parser = mutant)]
        mutant: Option<Mutant>,
    },
    /// Prints the hashes of the histories of seeds: the same from every build of one commit.
    Hashes {
        /// Seeds from A up to, but not including, B.
        #[arg(long, value_name = "A..B", value_parser = range, default_value = "0..20")]
        seeds: Range<u64>,
    },
}

impl Model {
    /// Does it.
    ///
    /// # Errors
    /// Of files.
    pub fn run(self) -> Result<ExitCode> {
        match self {
            Self::Shrink { seed, mutant, check, runs, save } => {
                let options = Options { mutant, ..Options::default() };
                shrink_seed(seed, &options, check.as_deref(), runs, &save)
            }
            Self::Report { seeds, each, mutants, output } => {
                let size = Size { seeds, each, mutants, scenarios: Scenario::EVERY.to_vec() };
                report(&size, &output)
            }
            Self::Hashes { seeds } => {
                for seed in seeds {
                    let outcome = run::seed(seed, &Options { record: true, ..Options::default() });
                    println!("{seed} {:016x} {} lines, {} steps", outcome.hash, outcome.log.len(), outcome.steps);
                }
                Ok(ExitCode::SUCCESS)
            }
            Self::Search { bounds, mutant } => Ok(search(&Bounds { mutant, ..bounds })),
            Self::Bugs { seeds, only } => Ok(bugs(seeds, only)),
            Self::Replay { plan, mended, journal } => replay(&plan, mended, journal),
        }
    }
}

fn shrink_seed(
    seed: u64,
    options: &Options,
    check: Option<&str>,
    runs: u32,
    save: &std::path::Path,
) -> Result<ExitCode> {
    let failing = run::seed(seed, options);
    if failing.violations.is_empty() {
        println!("seed {seed} violates nothing");
        return Ok(ExitCode::SUCCESS);
    }
    let told = |plan: &Plan, runs: u32| eprintln!("{} things are left after {runs} runs", plan.events.len());
    let shrunk = shrink::shrink(&failing, check, runs, &told)
        .with_context(|| format!("seed {seed} does not fail again, or not in this check: {:?}", failing.violations))?;
    std::fs::write(save, shrunk.plan.text()).with_context(|| format!("writing {}", save.display()))?;
    let again = shrunk.plan.run(true);
    for line in shrink::story(&again.log) {
        println!("{line}");
    }
    for v in again.violations.iter().filter(|v| v.check == shrunk.plan.check) {
        println!("\nviolated: {} at {} ms: {}", v.check, v.at, v.text);
    }
    println!("{}", shrunk.plan.text());
    let enough = if shrunk.minimal { "none of these can be left out" } else { "the runs were used up" };
    println!(
        "{} of {} things are left after {} runs; {enough}\nagain: virtfold-chaos replay {}",
        shrunk.plan.events.len(),
        failing.plan.events.len(),
        shrunk.runs,
        save.display()
    );
    Ok(ExitCode::from(1))
}

fn report(size: &Size, output: &std::path::Path) -> Result<ExitCode> {
    let figures = Figures::measure(size, &|what| eprintln!("measuring: {what}"));
    std::fs::write(output, report::html(&figures)).with_context(|| format!("writing {}", output.display()))?;
    let ((at, kinds), (met, pairs), (caught, mutants, median)) = (figures.effects(), figures.cells(), figures.score());
    println!(
        "{} seeds, {} violations; {at} of {kinds} kinds of effects are crash points; {met} of {pairs} pairs of state and event \
         met; {caught} of {mutants} mutants caught, half of them within {median} seeds; see {}",
        figures.seeds,
        figures.violated.len(),
        output.display()
    );
    for (fault, times) in &figures.converged {
        let of = |p| times.percentile(p) as f64 / 1000.0;
        println!("{fault}: quiet after p50 {:.1} s, p95 {:.1} s, p99 {:.1} s", of(50), of(95), of(99));
    }
    Ok(if figures.violated.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// Dies before and after each effect.
pub fn crash_points(only: Option<Scenario>) -> ExitCode {
    let mut bad = 0;
    let mut all = 0;
    let mut at = Coverage::default();
    for scenario in Scenario::EVERY.into_iter().filter(|s| only.is_none_or(|o| o == *s)) {
        at.add(&run::scenario_with(scenario, &Twist::default()).outcome.coverage);
        let mut points = 0;
        run::crash_points(scenario, |crashed| {
            points += 1;
            for v in &crashed.outcome.violations {
                println!("{scenario:?} {:?}: {} at {} ms: {}", crashed.point, v.check, v.at, v.text);
            }
            bad += u32::from(!crashed.outcome.violations.is_empty());
        });
        println!("{scenario:?}: {points} crash points");
        all += points;
    }
    println!("{all} crash points at {} kinds of effects, {bad} violated", at.effects.len());
    if bad > 0 { ExitCode::from(1) } else { ExitCode::SUCCESS }
}

/// Loses events, shows old views, lets operations meet.
pub fn exhaustive() -> ExitCode {
    let (mut all, mut bad) = (0, 0);
    let mut told = |what: String, outcome: &Outcome| {
        all += 1;
        bad += u32::from(!outcome.violations.is_empty());
        for v in &outcome.violations {
            println!("{what}: {} at {} ms: {}", v.check, v.at, v.text);
        }
        all
    };
    let until = |what: &str, n: u32| println!("{what}: {n} runs so far");
    let mut n = 0;
    for scenario in Scenario::EVERY {
        run::withheld(scenario, |e, outcome| n = told(format!("{scenario:?} without event {e}"), &outcome));
    }
    until("events that are lost", n);
    for scenario in Scenario::EVERY {
        run::stale_views(scenario, |stale, outcome| n = told(format!("{scenario:?} {stale:?}"), &outcome));
    }
    until("old views", n);
    for strategy in STRATEGIES {
        run::pairs(strategy, |a, b, outcome| n = told(format!("{strategy}: {a:?} and {b:?}"), &outcome));
    }
    until("pairs of operations", n);
    println!("{n} runs, {bad} violated");
    if bad > 0 { ExitCode::from(1) } else { ExitCode::SUCCESS }
}

fn search(bounds: &Bounds) -> ExitCode {
    let line = |f: &Found| {
        format!(
            "{} states ({} open, {} at rest), {} steps, depth {}, {} MiB, {:.0} s",
            f.states,
            f.open,
            f.rests,
            f.steps,
            f.depth,
            f.memory >> 20,
            f.seconds
        )
    };
    let found = search::run(bounds, &mut |f| eprintln!("{}", line(f)));
    if let Some(trouble) = &found.trouble {
        for told in &trouble.story {
            println!("{told}");
        }
        let way = if found.deep { "a shorter way may lead there" } else { "no shorter way leads there" };
        println!("\nviolated: {}: {}\n{way}: {} steps", trouble.check, trouble.text, trouble.steps);
    }
    println!("{}", line(&found));
    match (&found.trouble, &found.stopped) {
        (Some(_), _) => ExitCode::from(1),
        (None, Some(why)) => {
            println!("given up: {why}; there may be more");
            ExitCode::from(3)
        }
        (None, None) => {
            println!("fixpoint: these are all states that there are within the bounds, and all hold");
            ExitCode::SUCCESS
        }
    }
}

/// A table as RUNS.md has it.
fn bugs(seeds: u64, only: Option<Mutant>) -> ExitCode {
    println!("| bug | check | first seed | median seeds | seeds that find it | seen in | what is broken |");
    println!("|---|---|---|---|---|---|---|");
    for bug in KNOWN.iter().filter(|b| only.is_none_or(|o| o == b.mutant)) {
        let found = bugs::look(bug, seeds);
        let number = |n: Option<u64>| n.map_or_else(|| "-".into(), |n| n.to_string());
        println!(
            "| {} | {} | {} | {} | {} of {} ({} by any check) | {} | `{:?}` |",
            bug.story,
            found.check,
            number(found.seeds.first().copied()),
            number(found.median()),
            found.seeds.len(),
            found.tried,
            found.any,
            bug.seen,
            bug.mutant
        );
    }
    ExitCode::SUCCESS
}

fn replay(path: &std::path::Path, mended: bool, journal: bool) -> Result<ExitCode> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let mut plan = Plan::parse(&text).with_context(|| format!("{}", path.display()))?;
    if mended {
        plan.mutant = None;
    }
    let (a, b) = (plan.run(true), plan.run(true));
    if journal {
        tell(&a);
    } else {
        for line in shrink::story(&a.log) {
            println!("{line}");
        }
        for v in &a.violations {
            println!("violated: {} at {} ms: {}", v.check, v.at, v.text);
        }
    }
    println!("{}", if a == b { "the same both times" } else { "DIFFERENT the second time" });
    Ok(if a == b && a.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}
