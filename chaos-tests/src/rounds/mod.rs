//! Real processes (layer 3): rounds of one fault each on the real binaries, real etcd and guests that count aloud, judged by the
//! invariants of the model world ([`crate::world::invariants`]).
//!
//! A round: a fault is drawn, and something that somebody asks for at the same time; it strikes; then everybody is left alone until
//! all is as it was asked for and nothing is written any more, within a bound. What must never happen is judged all the time by a
//! [`witness`] who reads the store's changes and the machine's processes; what must be so at the end, then. A guest whose own
//! hypervisor was not hurt and that nobody wished away has to be the same process and to have counted on without a gap. At
//! the end all journals are put through the machines again.

pub mod command;
mod eyes;
mod faults;
mod guests;
mod net;
mod people;
pub mod proxy;
mod site;
mod witness;

pub use faults::{Fault, LEFT_OUT};
pub use people::IDS;

use crate::e2e::wait;
use crate::world::{dice::Dice, server::Res, users::NS};
use anyhow::{Context, Result, ensure};
use eyes::Eyes;
use faults::Scene;
use people::Deed;
use site::{Plane, Site, Size};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};
use witness::{Running, Witness};

/// After a fault all has to be quiet within this.
const QUIET: Duration = Duration::from_secs(180);
/// Nothing is written for so long: it is quiet.
const STILL: Duration = Duration::from_millis(1500);
/// Where nothing changes, nothing is written for so long.
const IDLE: Duration = Duration::from_secs(60);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(200);
/// A guest says its next number within this.
const COUNTS: Duration = Duration::from_secs(90);

/// What is asked of a run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Rounds.
    pub rounds: u32,
    /// What they are drawn by.
    pub seed: u64,
    /// Faults that are drawn.
    pub faults: Vec<Fault>,
    /// Machines.
    pub guests: u32,
    /// Nodes.
    pub nodes: u32,
    /// Controllers.
    pub controllers: usize,
    /// MiB of the small disk in memory that holds the data folder; 0: an ordinary folder.
    pub disk: u64,
    /// On a real kube-apiserver with modelled nodes and guests, instead of an API server of our own and guests under QEMU.
    pub kubernetes: bool,
    /// No round begins after this.
    pub limit: Duration,
    /// Where the evidence goes if something is violated.
    pub evidence: PathBuf,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            rounds: 20,
            seed: 1,
            faults: Fault::ALL.iter().copied().filter(|f| f.own() && *f != Fault::FillDisk).collect(),
            guests: 3,
            nodes: 2,
            controllers: 2,
            disk: 0,
            kubernetes: false,
            limit: Duration::from_secs(7200),
            evidence: "chaos-evidence".into(),
        }
    }
}

/// What became of a run.
#[derive(Debug, Default)]
pub struct Report {
    /// Rounds that were done.
    pub rounds: u32,
    /// Seconds from the end of a fault until all was quiet, by fault.
    pub quiet: BTreeMap<Fault, Vec<f64>>,
    /// Guests that were the same after a round, counted over all rounds.
    pub kept: u64,
    /// Deeds that were not taken in time, by what was said.
    pub refused: Vec<String>,
    /// Checks that failed: id and words.
    pub violations: Vec<(String, String)>,
    /// Where the evidence is.
    pub evidence: Option<PathBuf>,
    /// What replaying the journals said.
    pub replayed: String,
}

struct Run {
    site: Site,
    witness: Witness,
    eyes: Eyes,
    machines: Vec<String>,
    /// The last number of each guest, by pod.
    counts: BTreeMap<String, u64>,
}

/// Does the rounds; each line is told as it comes.
///
/// # Errors
/// The cluster cannot be started, or a fault cannot be brought about.
pub fn run(options: &Options, mut told: impl FnMut(&str)) -> Result<Report> {
    ensure!(!options.faults.is_empty(), "no fault is left to draw");
    let began = Instant::now();
    let proxy = options.faults.iter().any(|f| f.through_proxy().is_some());
    let (nodes, controllers, disk) = (options.nodes, options.controllers, options.disk);
    ensure!(disk > 0 || !options.faults.contains(&Fault::FillDisk), "fill-disk fills a small disk: --disk");
    let kubernetes = options.kubernetes;
    if let Some(fault) = options.faults.iter().find(|f| kubernetes && !f.foreign()) {
        anyhow::bail!("{} needs an API server and guests of our own", fault.word());
    }
    let site = Site::start(&Size { nodes, controllers, disk, proxy, kubernetes })?;
    let witness = Witness::start(site.store())?;
    let machines: Vec<String> = (1..=options.guests).map(|n| format!("guest-{n}")).collect();
    let eyes = Eyes::open(&site.kubectl().config)?;
    let mut run = Run { site, witness, eyes, machines, counts: BTreeMap::new() };
    let mut report = Report::default();
    let result = run.all(options, began, &mut report, &mut told);
    if let Err(error) = result {
        report.violations.push(("run".into(), format!("{error:#}")));
    }
    report.violations.extend(run.violations()?);
    if !report.violations.is_empty() {
        report.evidence = Some(run.keep_evidence(options)?);
    }
    Ok(report)
}

impl Run {
    fn all(
        &mut self,
        options: &Options,
        began: Instant,
        report: &mut Report,
        told: &mut dyn FnMut(&str),
    ) -> Result<()> {
        for vm in self.machines.clone() {
            people::create(&self.site, &vm).map_err(anyhow::Error::msg)?;
        }
        self.quiet(Instant::now()).context("before the first round")?;
        self.counted().context("before the first round")?;
        told(&format!(
            "{} guests count on {} nodes after {:.0} s",
            self.machines.len(),
            options.nodes,
            began.elapsed().as_secs_f64()
        ));
        let mut left: Vec<Fault> = vec![];
        for round in 1..=options.rounds {
            if began.elapsed() > options.limit {
                told("the time is over");
                break;
            }
            let mut dice = Dice::new(options.seed.wrapping_mul(1_000_003).wrapping_add(u64::from(round)));
            // Each of them once before one comes again.
            if left.is_empty() {
                left.clone_from(&options.faults);
            }
            let drawn = usize::try_from(dice.below(left.len() as u64)).unwrap_or(0);
            let fault = left.swap_remove(drawn);
            let line =
                self.round(fault, &mut dice, report).with_context(|| format!("round {round}, {}", fault.word()))?;
            report.rounds += 1;
            told(&format!("round {round}: {line}"));
            if !self.violations()?.is_empty() {
                return Ok(());
            }
        }
        if options.rounds > 20 {
            // Where nothing changes, nothing is written.
            wait::until("a minute without a write (Q2)", QUIET, || {
                let still = self.witness.with(|t| t.still_for())?;
                Ok(if still >= IDLE { Ok(()) } else { Err(format!("the last was {still:?} ago")) })
            })?;
        }
        self.site.end()?;
        report.replayed = self.replayed()?;
        self.machines.iter().try_for_each(|vm| self.history(vm))?;
        Ok(())
    }

    fn violations(&self) -> Result<Vec<(String, String)>> {
        self.witness.with(|t| t.violations.iter().map(|v| (v.check.to_owned(), v.text.clone())).collect())
    }

    fn round(&mut self, fault: Fault, dice: &mut Dice, report: &mut Report) -> Result<String> {
        let deed = Deed::draw(dice, &self.machines);
        let before = self.running()?;
        let text = format!("{} while {deed}", fault.word());
        self.witness.with(move |t| {
            t.meddled.clear();
            t.say(|| format!("=== {text}"));
        })?;
        let (early, late) = (Duration::from_millis(dice.below(1500)), Duration::from_millis(dice.below(1500)));
        let (struck, taken) = std::thread::scope(|scope| {
            let (site, witness, wish) = (&self.site, &self.witness, &deed);
            let person = scope.spawn(move || {
                std::thread::sleep(early);
                wish.carry_out(site, witness)
            });
            std::thread::sleep(late);
            let struck = Scene { site: &self.site, witness: &self.witness, dice }.strike(fault);
            let healed = Instant::now();
            let taken = person.join().unwrap_or_else(|_| Err("nobody asked".into()));
            (struck.map(|s| (s, healed)), taken)
        });
        let (what, healed) = struck?;
        if let Err(why) = &taken {
            report.refused.push(format!("{deed} during {}: {why}", fault.word()));
        }
        let seconds = self.quiet(healed)?.as_secs_f64();
        let count = self.counted()?;
        let after = self.running()?;
        let kept = before.iter().filter(|g| after.iter().any(|a| a.pid == g.pid && a.pod == g.pod)).count();
        report.kept += kept as u64;
        report.quiet.entry(fault).or_default().push(seconds);
        self.all_run()?;
        let refused = taken.err().map(|_| " (not taken)").unwrap_or_default();
        let what = if what.is_empty() { String::new() } else { format!(" ({what})") };
        let (ids, word) = (fault.ids(), fault.word());
        Ok(format!(
            "{ids} {word}{what}, meanwhile {deed}{refused}: quiet after {seconds:.1} s, {kept} of {count} guests count on"
        ))
    }

    fn running(&self) -> Result<Vec<Running>> {
        self.witness.with(|t| {
            t.look();
            t.running.values().cloned().collect()
        })
    }

    /// Waits until all is quiet; the time from the end of the fault until the last thing happened.
    fn quiet(&self, healed: Instant) -> Result<Duration> {
        let end = Instant::now() + QUIET;
        let (mut restless, mut last) = (healed, Vec::new());
        loop {
            let (mut wrong, still) = self.witness.with(|t| (t.unrest(), t.still_for()))?;
            if let Err(why) = self.eyes.served() {
                wrong.push(("L1", format!("the API server does not serve: {why}")));
            }
            if wrong.is_empty() && still >= STILL && restless.elapsed() >= STILL {
                wrong.extend(self.discontent().map(|why| ("L2", why)));
                if wrong.is_empty() {
                    let last = Instant::now().checked_sub(still).unwrap_or(healed).max(restless);
                    return Ok(last.saturating_duration_since(healed));
                }
            }
            if !self.violations()?.is_empty() {
                return Ok(healed.elapsed());
            }
            if !wrong.is_empty() {
                (restless, last) = (Instant::now(), wrong);
            }
            if Instant::now() > end {
                let words: Vec<String> = last.into_iter().map(|(id, text)| format!("{id}: {text}")).collect();
                anyhow::bail!("not quiet within {} s: {}", QUIET.as_secs(), words.join("; "));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// What somebody waits for, as the leading controller says.
    fn discontent(&self) -> Option<String> {
        let nodes = self.site.nodes().into_iter().map(|n| format!("nodes/{n}"));
        let machines = self.machines.iter().map(|m| format!("namespaces/{NS}/virtualmachines/{m}"));
        nodes.chain(machines).find_map(|place| self.eyes.content(&place).err())
    }

    /// Every guest says its next number, and no number was left out or said again. How many guests there are.
    fn counted(&mut self) -> Result<usize> {
        let guests = self.running()?;
        if matches!(self.site.plane, Plane::Foreign(_)) {
            // Modelled guests do not count; that none was interrupted is S17's.
            return Ok(guests.len());
        }
        let pods: BTreeSet<String> = guests.iter().map(|g| g.pod.clone()).collect();
        for guest in &guests {
            let log = self.site.console(&guest.node, &guest.pod);
            let mut first = None;
            let count =
                wait::until(&format!("the next number of {}", guest.machine), COUNTS, || {
                    match guests::counted(&log) {
                        Ok(n) if *first.get_or_insert(n) < n => Ok(Ok(Ok(n))),
                        Ok(n) => Ok(Err(format!("{n}"))),
                        Err(why) if why.contains("followed") => Ok(Ok(Err(why))),
                        Err(why) => Ok(Err(why)),
                    }
                })?;
            let count =
                count.map_err(|why| anyhow::anyhow!("S17: the guest of {} was interrupted: {why}", guest.machine))?;
            let last = self.counts.insert(guest.pod.clone(), count).unwrap_or(0);
            ensure!(count > last, "S17: the guest of {} counts from the beginning: {last}, {count}", guest.machine);
        }
        self.counts.retain(|pod, _| pods.contains(pod));
        Ok(guests.len())
    }

    /// What somebody stopped or lost for good is there again for the next round.
    fn all_run(&self) -> Result<()> {
        let mut changed = false;
        for vm in &self.machines {
            let name = vm.clone();
            let strategy = self.witness.with(move |t| {
                t.excused.clear();
                t.ghost.find(Res::Vm, NS, &name).map(|v| v.text("/spec/runStrategy").to_owned())
            })?;
            match strategy.as_deref() {
                Some("Halted") => {
                    self.site.virtfold(&["start", vm])?;
                }
                None => people::create(&self.site, vm).map_err(anyhow::Error::msg)?,
                Some(_) => continue,
            }
            changed = true;
        }
        if changed {
            self.quiet(Instant::now())?;
        }
        Ok(())
    }

    /// What `virtfold replay` says to all journals.
    fn replayed(&self) -> Result<String> {
        let journals = self.site.data().join("journal").display().to_string();
        let (code, said, errors) = self.site.virtfold(&["replay", &journals])?;
        ensure!(code == 0, "S9: virtfold replay ended with {code}: {said}{errors}");
        Ok(said.trim().to_owned())
    }

    /// What the journals tell of a machine is in order, and ends with what is the case.
    fn history(&self, vm: &str) -> Result<()> {
        let journals = self.site.data().join("journal").display().to_string();
        let (code, said, errors) = self.site.virtfold(&["explain", vm, "--journal", &journals, "-o", "json"])?;
        ensure!(code == 0, "the history of {vm} cannot be told: {code} {said}{errors}");
        let told: serde_json::Value = serde_json::from_str(&said)?;
        let times = told["history"].as_array().map(|h| h.iter().filter_map(|e| e["time"].as_str()).collect::<Vec<_>>());
        let times = times.unwrap_or_default();
        ensure!(!times.is_empty() && times.is_sorted(), "the history of {vm} is not in order: {times:?}");
        let name = vm.to_owned();
        let status = self.witness.with(move |t| {
            let vm = t.ghost.find(Res::Vm, NS, &name);
            vm.map(|v| v.text("/status/printableStatus").to_owned())
        })?;
        let status = status.unwrap_or_default();
        ensure!(
            told["status"] == status.as_str(),
            "the journals say that {vm} is {}, and it is {status}",
            told["status"]
        );
        Ok(())
    }

    /// Puts aside what tells what happened.
    fn keep_evidence(&self, options: &Options) -> Result<PathBuf> {
        let folder = options.evidence.join(format!("rounds-{}-{}", options.seed, jiff::Timestamp::now().as_second()));
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        fs::write(folder.join("story.txt"), self.witness.with(|t| t.story())?)?;
        for kind in ["vm,vmi,pods,nodes", "events", "lease -n virtfold"] {
            let mut arguments = vec!["get"];
            arguments.extend(kind.split(' '));
            arguments.extend(["-o", "yaml"]);
            let (_, out, error) = self.site.kubectl().kubectl(&arguments)?;
            fs::write(folder.join(format!("{}.yaml", kind.replace([' ', ','], "-"))), out + &error)?;
        }
        for path in self.site.evidence() {
            copy(&path, &folder)?;
        }
        Ok(folder)
    }
}

/// Copies a file or a folder, under a name that says where it was.
fn copy(from: &Path, to: &Path) -> Result<()> {
    if !from.exists() {
        return Ok(());
    }
    let name = from.iter().rev().take(2).map(|p| p.to_string_lossy()).collect::<Vec<_>>();
    let name = name.into_iter().rev().collect::<Vec<_>>().join("-");
    let done = Command::new("cp").arg("-r").arg(from).arg(to.join(name)).output().context("start cp")?;
    ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Ok(())
}

/// The value below which so many of a hundred are.
pub fn percentile(values: &[f64], percent: usize) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let n = (values.len() * percent).div_ceil(100).max(1) - 1;
    values.get(n).copied().unwrap_or(0.0)
}

impl Report {
    /// For people.
    pub fn summary(&self) -> String {
        let mut text = format!(
            "{} rounds, {} violated, guests that counted on: {}\n",
            self.rounds,
            self.violations.len(),
            self.kept
        );
        text += "seconds from the end of the fault until all was quiet:\n";
        text += &format!("{:<20} {:<10} {:>6} {:>7} {:>7} {:>7}\n", "fault", "ids", "rounds", "p50", "p95", "p99");
        let mut line = |name: &str, ids: &str, all: &[f64]| {
            let [a, b, c] = [50, 95, 99].map(|p| percentile(all, p));
            text += &format!("{name:<20} {ids:<10} {:>6} {a:>7.1} {b:>7.1} {c:>7.1}\n", all.len());
        };
        for (fault, all) in &self.quiet {
            line(fault.word(), fault.ids(), all);
        }
        line("all", "", &self.quiet.values().flatten().copied().collect::<Vec<_>>());
        for refused in &self.refused {
            text += &format!("not taken: {refused}\n");
        }
        if !self.replayed.is_empty() {
            text += &format!("{}\n", self.replayed);
        }
        for (check, words) in &self.violations {
            text += &format!("VIOLATED {check}: {words}\n");
        }
        if let Some(folder) = &self.evidence {
            text += &format!("the evidence is in {}\n", folder.display());
        }
        text
    }
}
