//! Makes a failing run small: of all that people and faults did, only what the violation needs stays.
//!
//! Delta debugging over the plan: what is left out is left out for good where the same check still fails. First what comes after the
//! violation, then whole kinds of faults and whole machines, then ever smaller pieces, down to single ones; at last the size of
//! the world. Every try is a whole run, so their number is bounded.

use super::{
    invariants,
    plan::{Plan, Planned, What},
    run::Outcome,
    swarm::Fault,
};

/// What came of it.
#[derive(Debug, Clone)]
pub struct Shrunk {
    /// The plan that is left.
    pub plan: Plan,
    /// Runs that it took.
    pub runs: u32,
    /// Nothing more could be left out; else the runs were used up.
    pub minimal: bool,
}

struct Shrinker<'a> {
    best: Plan,
    runs: u32,
    most: u32,
    told: &'a dyn Fn(&Plan, u32),
}

impl Shrinker<'_> {
    /// Takes a smaller plan where it still fails.
    fn take(&mut self, smaller: Plan) -> bool {
        if self.runs >= self.most {
            return false;
        }
        self.runs += 1;
        let fails = violates(&smaller.run(false), &smaller.check);
        if fails {
            self.best = smaller;
            (self.told)(&self.best, self.runs);
        }
        fails
    }

    fn without(&mut self, drop: impl Fn(usize, &Planned) -> bool) -> bool {
        let mut i = 0;
        let mut smaller = self.best.clone();
        smaller.events.retain(|e| {
            i += 1;
            !drop(i - 1, e)
        });
        smaller.events.len() < self.best.events.len() && self.take(smaller)
    }

    /// Pieces of half, a quarter and so on, each left out where that is possible. Whether anything was.
    fn pieces(&mut self) -> bool {
        let before = self.best.events.len();
        let mut size = (before / 2).max(1);
        loop {
            let mut from = 0;
            while from < self.best.events.len() {
                // What is left out makes room for the next piece.
                if !self.without(|i, _| (from..from + size).contains(&i)) {
                    from += size;
                }
            }
            if size == 1 {
                return self.best.events.len() < before;
            }
            size /= 2;
        }
    }

    fn sizes(&mut self) {
        while self.best.nodes > 1 && self.take(Plan { nodes: self.best.nodes - 1, ..self.best.clone() }) {}
        while self.best.controllers > 1
            && self.take(Plan { controllers: self.best.controllers - 1, ..self.best.clone() })
        {}
        let named = |plan: &Plan, name: &str| plan.events.iter().any(|e| words(e).any(|w| w == name));
        let (machines, sets) = (self.best.machines.clone(), self.best.sets.clone());
        let machines = machines.into_iter().filter(|m| named(&self.best, m)).collect();
        let sets = sets.into_iter().filter(|s| named(&self.best, s)).collect();
        let smaller = Plan { machines, sets, ..self.best.clone() };
        if smaller != self.best {
            self.take(smaller);
        }
        let last = self.best.events.last().map_or(3000, |e| e.at + 1000);
        if last < self.best.until {
            self.take(Plan { until: last, ..self.best.clone() });
        }
    }
}

fn words(e: &Planned) -> impl Iterator<Item = String> {
    let text = match &e.what {
        What::Deed { deed } => deed.words(),
        What::Strike(_) => String::new(),
    };
    text.split(' ').map(str::to_owned).collect::<Vec<_>>().into_iter()
}

/// Whether this check failed.
pub fn violates(outcome: &Outcome, check: &str) -> bool {
    outcome.violations.iter().any(|v| v.check == check)
}

/// Makes the plan of a failing run small, in at most so many runs; `None` where that run violated nothing, or where its plan does
/// not do the same again, which would be a bug here. Without a check it is about the first one that failed.
pub fn shrink(failing: &Outcome, check: Option<&str>, most: u32, told: &dyn Fn(&Plan, u32)) -> Option<Shrunk> {
    let of = |v: &&super::Violation| check.is_none_or(|c| c == v.check);
    let violation = failing.violations.iter().find(of)?;
    let mut plan = failing.plan.clone();
    plan.check = violation.check.into();
    let mut s = Shrinker { best: plan.clone(), runs: 0, most, told };
    if !s.take(plan) {
        return None;
    }
    if invariants::SAFETY.iter().any(|(id, _)| *id == violation.check) {
        let mut smaller = s.best.clone();
        smaller.events.retain(|e| e.at <= violation.at);
        smaller.until = violation.at + 1;
        s.take(smaller);
    }
    for fault in Fault::ALL {
        s.without(|_, e| matches!(&e.what, What::Strike(x) if x.fault == *fault));
    }
    for name in s.best.machines.clone() {
        s.without(|_, e| words(e).any(|w| w == name));
    }
    while s.pieces() && s.runs < most {}
    s.sizes();
    while s.pieces() && s.runs < most {}
    Some(Shrunk { minimal: s.runs < most, plan: s.best, runs: s.runs })
}

/// The lines of a log that tell what happened; those that only say that time went by are left out.
pub fn story(log: &[String]) -> Vec<String> {
    log.iter().filter(|line| tells(line.get(10..).unwrap_or_default())).map(|l| short(l)).collect()
}

fn tells(line: &str) -> bool {
    let told = ["somebody", "fault", "a guest", "VIOLATED", "seed", "the disk", "node ", "launcher of"];
    let objects = ["  Vm ", "  Vmi ", "  Pod ", "  Set "];
    if told.iter().chain(&objects).any(|t| line.starts_with(t)) {
        return true;
    }
    if line.starts_with("controller ") {
        return line.contains("stands still") || (line.contains(" => ") && !line.ends_with("=> "));
    }
    let process = line.starts_with("Controller(") || line.starts_with("Agent(");
    process && [" starts", " ends", " leads with", "is not told"].iter().any(|w| line.contains(w))
}

fn short(line: &str) -> String {
    const WIDE: usize = 200;
    let mut text: String = line.chars().take(WIDE).collect();
    if text.len() < line.len() {
        text.push('…');
    }
    text
}
