//! Figures of the model world on one page: HTML with no other file to it, plots drawn as SVG.

use super::{
    bugs::KNOWN,
    coverage::{Coverage, STATES},
    mutants::Mutant,
    run::{self, Options, Outcome, Scenario},
    swarm::{Fault, Swarm},
};
use std::{collections::BTreeMap, fmt::Write, ops::Range, time::Instant};

/// How much is run for it.
#[derive(Debug, Clone)]
pub struct Size {
    /// Seeds as they are drawn.
    pub seeds: Range<u64>,
    /// Seeds with one kind of fault alone, for each kind.
    pub each: u64,
    /// Seeds within which a mutant has to be caught.
    pub mutants: u64,
    /// Scenarios whose effects are made crash points.
    pub scenarios: Vec<Scenario>,
}

/// Milliseconds from when faults stop until nothing is written any more.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Times(Vec<u64>);

impl Times {
    fn add(&mut self, ms: u64) {
        let at = self.0.partition_point(|t| *t <= ms);
        self.0.insert(at, ms);
    }

    /// The value below which so many of a hundred are.
    pub fn percentile(&self, p: usize) -> u64 {
        self.0.get((self.0.len() * p / 100).min(self.0.len().saturating_sub(1))).copied().unwrap_or(0)
    }
}

/// What was measured.
#[derive(Debug, Clone, Default)]
pub struct Figures {
    /// Seeds.
    pub seeds: u64,
    /// Those that violated something.
    pub violated: Vec<(u64, String)>,
    /// Steps of the machines.
    pub steps: u64,
    /// Domains that began.
    pub starts: u64,
    /// Simulated milliseconds.
    pub simulated: u64,
    /// Real milliseconds, of one core.
    pub real: u64,
    /// Faults that struck, by kind.
    pub struck: BTreeMap<Fault, u64>,
    /// What was passed through.
    pub coverage: Coverage,
    /// Re-convergence by the one kind of fault that there was.
    pub converged: BTreeMap<Fault, Times>,
    /// Crash points of each scenario, and how many of them violated something.
    pub crash_points: Vec<(Scenario, u64, u64)>,
    /// Kinds of effects that were crash points, before and after.
    pub crashed_at: Coverage,
    /// Each mutant, its check (where it has one of its own), and the seed that caught it.
    pub mutants: Vec<(Mutant, Option<&'static str>, Option<u64>)>,
}

impl Figures {
    /// Runs all that is needed.
    pub fn measure(size: &Size, told: &dyn Fn(&str)) -> Self {
        let mut f = Self::default();
        told("seeds");
        for seed in size.seeds.clone() {
            let began = Instant::now();
            let outcome = run::seed(seed, &Options { cover: true, ..Options::default() });
            f.real += u64::try_from(began.elapsed().as_millis()).unwrap_or(0);
            f.take(&outcome);
        }
        told("one kind of fault alone");
        for fault in Fault::ALL {
            // A node is only taken out of service where one has lost power.
            let mut swarm = Swarm::only(*fault);
            if *fault == Fault::OutOfService {
                swarm = swarm.with(Fault::PowerLoss, 10);
            }
            for seed in 0..size.each {
                let options = Options { swarm: Some(swarm.clone()), cover: true, ..Options::default() };
                let outcome = run::seed(seed, &options);
                f.coverage.add(&outcome.coverage);
                f.violations(&outcome);
                if outcome.struck.contains_key(fault) {
                    f.converged.entry(*fault).or_default().add(outcome.converged);
                }
            }
        }
        told("crash points");
        for scenario in &size.scenarios {
            f.crashed_at.add(&run::scenario_with(*scenario, &run::Twist::default()).outcome.coverage);
            let (mut points, mut wrong) = (0, 0);
            run::crash_points(*scenario, |crashed| {
                points += 1;
                wrong += u64::from(!crashed.outcome.violations.is_empty());
            });
            f.crash_points.push((*scenario, points, wrong));
        }
        told("mutants");
        let of_check = |mutant| Mutant::ALL.iter().any(|(m, _)| *m == mutant);
        let known = KNOWN.iter().filter(|bug| !of_check(bug.mutant)).map(|bug| (bug.mutant, None));
        let all = Mutant::ALL.iter().map(|(mutant, check)| (*mutant, Some(*check))).chain(known);
        for (mutant, check) in all {
            f.mutants.push((mutant, check, catch(mutant, check, size.mutants)));
        }
        f
    }

    fn violations(&mut self, outcome: &Outcome) {
        let all = outcome.violations.iter().map(|v| (outcome.seed, format!("{}: {}", v.check, v.text)));
        self.violated.extend(all);
    }

    fn take(&mut self, outcome: &Outcome) {
        self.seeds += 1;
        self.steps += outcome.steps;
        self.starts += u64::from(outcome.starts);
        self.simulated += outcome.elapsed;
        for (fault, n) in &outcome.struck {
            *self.struck.entry(*fault).or_default() += n;
        }
        self.coverage.add(&outcome.coverage);
        self.violations(outcome);
    }

    /// Of all kinds of effects that any run had, those that were crash points.
    pub fn effects(&self) -> (usize, usize) {
        let all = self.coverage.effects.union(&self.crashed_at.effects).count();
        (self.crashed_at.effects.len(), all)
    }

    /// Of all pairs of a state and an event that there were, those that met.
    pub fn cells(&self) -> (usize, usize) {
        (self.coverage.cells.len(), self.coverage.states().len() * self.coverage.events().len())
    }

    /// Mutants that were caught, all of them, and the median of the seeds that it took.
    pub fn score(&self) -> (usize, usize, u64) {
        let mut caught: Vec<u64> = self.mutants.iter().filter_map(|(_, _, seed)| *seed).map(|s| s + 1).collect();
        caught.sort_unstable();
        (caught.len(), self.mutants.len(), caught.get(caught.len() / 2).copied().unwrap_or(0))
    }
}

/// The first seed that catches a mutant, by its check or, where it has none, by any.
fn catch(mutant: Mutant, check: Option<&str>, seeds: u64) -> Option<u64> {
    let caught = |outcome: &Outcome| outcome.violations.iter().any(|v| check.is_none_or(|c| c == v.check));
    if let Some(scenario) = mutant.scenario() {
        let twist = run::Twist { mutant: Some(mutant), ..run::Twist::default() };
        return caught(&run::scenario_with(scenario, &twist).outcome).then_some(0);
    }
    let options = Options { mutant: Some(mutant), ..Options::default() };
    (0..seeds).find(|seed| caught(&run::seed(*seed, &options)))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Bars from left to right, each with its name and what is written behind it.
fn bars(rows: &[(String, f64, String)]) -> String {
    const ROW: usize = 20;
    let most = rows.iter().map(|(_, v, _)| *v).fold(1.0, f64::max);
    let mut out = format!(r#"<svg viewBox="0 0 900 {}" width="900" role="img">"#, rows.len() * ROW + 4);
    for (i, (name, value, text)) in rows.iter().enumerate() {
        let (y, width) = (i * ROW, 460.0 * value / most);
        let _ = write!(
            out,
            r##"<text x="190" y="{}" text-anchor="end">{}</text><rect x="200" y="{}" width="{width:.1}" height="14" fill="#3b6ea5"></rect><text x="{:.1}" y="{}">{}</text>"##,
            y + 14,
            escape(name),
            y + 3,
            206.0 + width,
            y + 14,
            escape(text)
        );
    }
    out + "</svg>"
}

/// Three marks a row: median, 95th and 99th percentile.
fn spreads(rows: &[(String, &Times)]) -> String {
    const ROW: usize = 20;
    let most = rows.iter().map(|(_, t)| t.percentile(99)).max().unwrap_or(1).max(1);
    let x = |ms: u64| 200.0 + 420.0 * ms as f64 / most as f64;
    let mut out = format!(r#"<svg viewBox="0 0 900 {}" width="900" role="img">"#, rows.len() * ROW + 4);
    for (i, (name, times)) in rows.iter().enumerate() {
        let y = i * ROW;
        let (a, b, c) = (times.percentile(50), times.percentile(95), times.percentile(99));
        let _ = write!(
            out,
            r##"<text x="190" y="{}" text-anchor="end">{}</text><line x1="{:.1}" x2="{:.1}" y1="{}" y2="{}" stroke="#9db8d5"></line>"##,
            y + 14,
            escape(name),
            x(a),
            x(c),
            y + 10,
            y + 10
        );
        for (ms, colour) in [(c, "#b5403a"), (b, "#d9a13b"), (a, "#3b6ea5")] {
            let _ = write!(out, r#"<circle cx="{:.1}" cy="{}" r="4" fill="{colour}"></circle>"#, x(ms), y + 10);
        }
        let seconds = |ms: u64| ms as f64 / 1000.0;
        let _ = write!(
            out,
            r#"<text x="640" y="{}">{:.1} / {:.1} / {:.1} s of {}</text>"#,
            y + 14,
            seconds(a),
            seconds(b),
            seconds(c),
            times.0.len()
        );
    }
    out + "</svg>"
}

/// Events down, states across; the more often they met, the darker.
fn heat(coverage: &Coverage) -> String {
    let of = |state: &&str| coverage.states().contains(*state);
    let named: Vec<String> =
        STATES.iter().flat_map(|s| [(*s).to_owned(), format!("{s}, going")]).filter(|s| of(&s.as_str())).collect();
    let mut out = String::from("<table class=\"heat\"><tr><th>event</th>");
    for state in &named {
        let _ = write!(out, "<th>{}</th>", escape(state));
    }
    out += "</tr>";
    for event in coverage.events() {
        let _ = write!(out, "<tr><td>{}</td>", escape(event));
        for state in &named {
            let n = coverage.cells.get(&(state.clone(), event.to_owned())).copied().unwrap_or(0);
            let shade = (n as f64 + 1.0).log10().min(5.0) / 5.0;
            let text = if n == 0 { String::new() } else { n.to_string() };
            let _ = write!(out, r#"<td style="background: rgba(59,110,165,{shade:.2})">{text}</td>"#);
        }
        out += "</tr>";
    }
    out + "</table>"
}

/// The page.
pub fn html(f: &Figures) -> String {
    let hours = f.real as f64 / 3_600_000.0;
    let ((at, kinds), (met, pairs), (caught, mutants, median)) = (f.effects(), f.cells(), f.score());
    let points: u64 = f.crash_points.iter().map(|(_, n, _)| n).sum();
    let struck: Vec<_> = f.struck.iter().map(|(k, n)| (k.to_string(), *n as f64, n.to_string())).collect();
    let crashes: Vec<_> = f
        .crash_points
        .iter()
        .map(|(s, n, wrong)| (format!("{s:?}"), *n as f64, format!("{n} points, {wrong} violated")))
        .collect();
    let times: Vec<_> = f.converged.iter().map(|(k, t)| (k.to_string(), t)).collect();
    let rows: String = f
        .mutants
        .iter()
        .map(|(m, check, seed)| {
            let seed = seed.map_or_else(|| "not caught".to_owned(), |s| s.to_string());
            format!("<tr><td>{m:?}</td><td>{}</td><td>{seed}</td></tr>", check.unwrap_or("any"))
        })
        .collect();
    let violated: String =
        f.violated.iter().map(|(seed, text)| format!("<li>seed {seed}: {}</li>", escape(text))).collect();
    let violated = if violated.is_empty() { "<p>None.</p>".to_owned() } else { format!("<ul>{violated}</ul>") };
    let missing: String =
        f.coverage.effects.difference(&f.crashed_at.effects).map(|e| format!("<li>{}</li>", escape(e))).collect();
    let missing = if missing.is_empty() { "<p>None.</p>".to_owned() } else { format!("<ul>{missing}</ul>") };
    format!(
        r#"<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><title>virtfold: the model world</title><style>
body {{ font: 14px sans-serif; margin: 2em; max-width: 1100px; }}
svg text {{ font: 12px sans-serif; }}
table {{ border-collapse: collapse; }} td, th {{ padding: 2px 6px; text-align: left; }}
.heat td, .heat th {{ font-size: 11px; border: 1px solid #ddd; }}
</style></head><body>
<h1>The model world</h1>
<p>{} seeds, {} violations, {} steps of the machines, {} domains. {:.0} seeds an hour and core, {:.0} simulated seconds a second.</p>
<h2>Violations</h2>{violated}
<h2>Faults that struck</h2>{}
<h2>Until nothing is written any more</h2>
<p>Simulated time from when faults stop, with one kind of fault alone: median, 95th and 99th percentile, of so many seeds in which it struck.</p>{}
<h2>Crash points</h2>
<p>{points} crash points; {at} of {kinds} kinds of effects that any run had are among them, each before and after.</p>{}
<h3>Kinds of effects that are none</h3>{missing}
<h2>State and event</h2>
<p>{met} of {pairs} pairs met. The rest is not all possible: what is gone is not asked about.</p>{}
<h2>Mutants</h2>
<p>{caught} of {mutants} caught; half of them within {median} seeds.</p>
<table><tr><th>mutant</th><th>check</th><th>first seed</th></tr>{rows}</table>
</body></html>
"#,
        f.seeds,
        f.violated.len(),
        f.steps,
        f.starts,
        f.seeds as f64 / hours.max(1e-9),
        f.simulated as f64 / f.real.max(1) as f64,
        bars(&struck),
        spreads(&times),
        bars(&crashes),
        heat(&f.coverage),
    )
}
