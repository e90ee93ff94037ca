//! The production drivers in a simulated network (layer 2): real `kube` clients, watch caches, hubs, the driver, the executor,
//! the Lease, node agents with their gRPC sessions over TLS, and journals, against the embedded API server, on the hosts and
//! the clock of turmoil. Launchers and guests are models, and so are kubelets. Where the model world (`world`) checks the
//! machines, this checks the plumbing; faults, people and invariants are the same ([`crate::world`]).
//!
//! One seed is one run of one process with one thread, because the clock and the randomness of the whole program are
//! replaced: by the program `virtfold-sim`, which calls [`run`]. The same seed is the same history of the store and the same
//! journals, byte for byte.
//!
//! | module | what |
//! |---|---|
//! | [`net`] | clients and servers over simulated sockets; what is lost on the way |
//! | [`hosts`] | which host runs what |
//! | [`people`] | what is asked for |
//! | [`truth`] | what really happens, told to the ghost |
//! | [`faults`] | what strikes by the clock |
//!
//! Not simulated: processes that stand still, disks that fail, admission.

mod faults;
mod hosts;
mod identity;
mod net;
mod people;
mod store;
mod truth;

use crate::runs::{Options, Outcome};
use crate::world::{
    Violation,
    dice::Dice,
    invariants::{self, Quiet},
    mutants::Mutant,
    swarm::{Fault, Swarm},
};
use faults::Trouble;
use hosts::Site;
use node_agent::simulation::{Delays, Place};
use std::{cell::Cell, path::Path, rc::Rc, sync::Arc, time::Duration};
use truth::{Ears, PEOPLE, Truth};

/// Simulated time moves in steps of this.
const TICK: Duration = Duration::from_millis(5);
/// How long people and faults are at work.
const TROUBLE: Duration = Duration::from_secs(150);
/// From the end of all faults until everything has to be right: the longest back-off of a machine after a watch that hung for
/// as long as it may, and a generous rest.
const CONVERGE: Duration = Duration::from_secs(900);
/// How often it is looked whether everything is right.
const LOOK: Duration = Duration::from_secs(5);

/// The size of a seed's world.
#[derive(Debug, Clone, Copy)]
struct Size {
    controllers: usize,
    nodes: usize,
    machines: usize,
}

/// Runs a seed in this process, which must have no other thread, and whose files go into the folder.
///
/// # Errors
/// The simulation itself cannot run.
pub fn run(seed: u64, folder: &Path, options: &Options) -> anyhow::Result<Outcome> {
    let mut dice = Dice::new(seed ^ 0x5eed);
    let drawn = Swarm::draw(&mut dice);
    let swarm = match options.scenario {
        Some(_) => Swarm::none(),
        None => options.mutant.and_then(swarm_of).unwrap_or(drawn),
    };
    let drawn =
        Size { controllers: count(&mut dice, 1, 3), nodes: count(&mut dice, 1, 3), machines: count(&mut dice, 1, 4) };
    let size = if options.scenario.is_some() { Size { controllers: 2, nodes: 1, machines: 1 } } else { drawn };
    Truth::begin(seed, swarm.clone(), options);
    truth::say(|| format!("seed {seed}: {size:?}, faults: {swarm}"));
    note_panics();

    let nodes: Vec<String> = (0..size.nodes).map(|n| format!("node-{n}")).collect();
    let slow = swarm.rate(Fault::KubeletSlow) > 0;
    let delays = Delays {
        start: Duration::from_millis(dice.between(50, if slow { 8000 } else { 400 })),
        boot: Duration::from_millis(dice.between(10, 1500)),
        guest_agent: dice.chance(500).then_some(Duration::from_millis(700)),
        shutdown: Duration::from_millis(dice.between(50, if swarm.rate(Fault::GuestDeaf) > 0 { 12_000 } else { 1500 })),
    };
    let place = |n: &String| Arc::new(Place::new(n.clone(), Some(Arc::new(Ears(n.clone())))));
    let site = Rc::new(Site {
        folder: folder.to_owned(),
        identities: identity::Identities::make(&nodes)?,
        store: store::Witnessed::default(),
        places: nodes.iter().map(place).collect(),
        boots: nodes.iter().map(|_| Cell::new(1)).collect(),
        delays,
    });

    let mut sim = turmoil::Builder::new()
        .rng_seed(seed)
        .tick_duration(TICK)
        .min_message_latency(Duration::from_millis(1))
        .max_message_latency(Duration::from_millis(20))
        .tcp_capacity(1 << 16)
        .simulation_duration(Duration::from_secs(100_000))
        .enable_random_order()
        .build();
    let s = site.clone();
    sim.host("api", move || hosts::api(s.clone()));
    for n in 0..size.nodes {
        let s = site.clone();
        sim.host(format!("pods-{n}"), move || hosts::pods(s.clone(), n));
        let s = site.clone();
        sim.host(format!("node-{n}"), move || hosts::agent(s.clone(), n));
    }
    for c in 0..size.controllers {
        let s = site.clone();
        sim.host(format!("controller-{c}"), move || hosts::controller(s.clone(), format!("controller-{c}")));
    }
    let names: Vec<String> = (0..size.machines).map(|i| format!("vm-{i}")).collect();
    let (asked, scenario, s) = (names.clone(), options.scenario, site.clone());
    sim.client(PEOPLE, async move {
        tokio::time::sleep(Duration::from_secs(5)).await;
        let people = people::People::new(seed, asked)?;
        match scenario {
            Some(scenario) => people.script(scenario, &s).await,
            None => people.work(TROUBLE).await,
        }
    });

    let mut trouble = Trouble::new(seed, size.controllers, size.nodes);
    let mut dead = None;
    while sim.elapsed() < TROUBLE && dead.is_none() {
        dead = step(&mut sim, &mut trouble, &site).err();
        if sim.elapsed() > Duration::from_secs(8) && dead.is_none() {
            trouble.strike(&mut sim, &site);
        }
    }
    trouble.heal(&mut sim, &site);
    let healed = ms(sim.elapsed());
    truth::with(|t| t.swarm = Some(Swarm::none()));
    let mut verdict = Err("nothing was looked at".to_owned());
    while sim.elapsed() < TROUBLE + CONVERGE && dead.is_none() && verdict.is_err() {
        let next = sim.elapsed() + LOOK;
        while sim.elapsed() < next && dead.is_none() {
            dead = step(&mut sim, &mut trouble, &site).err();
        }
        verdict = judge(&site, &names, ms(sim.elapsed()));
    }
    let elapsed = ms(sim.elapsed());
    if let Some(error) = dead {
        truth::with(|t| t.violated("P", format!("a host ended: {error}"), elapsed));
    } else if let Err(text) = verdict {
        truth::with(|t| t.violated("L1", text, elapsed));
    }
    // Processes end, and with them their journals.
    drop(sim);
    let records = replay(folder, elapsed)?;
    let journals = hex(&hosts::hash_journals(folder)?);
    Ok(truth::with(|t| Outcome {
        seed,
        violations: t.violations.drain(..).map(|v: Violation| (v.check.to_owned(), v.text, v.at)).collect(),
        hash: format!("{:016x}", t.hash),
        journals,
        writes: t.writes,
        calls: t.calls,
        records,
        starts: t.ghost.starts.values().map(|n| u64::from(*n)).sum(),
        lives: t.ghost.lives(),
        controller_writes: std::mem::take(&mut t.ghost.writes),
        elapsed,
        converged: t.ghost.last_write.saturating_sub(healed),
        struck: t.struck.iter().map(|(f, n)| (f.to_string(), *n)).chain(trouble.struck()).collect(),
        swarm: swarm.to_string(),
        log: t.log(),
    }))
}

/// Faults under which a mutant shows: a Lease that is written without its version, where writes of the dead come late.
fn swarm_of(mutant: Mutant) -> Option<Swarm> {
    match mutant {
        Mutant::LeaseWithoutVersion => Some(Swarm::none().with(Fault::LateWrite, 150).with(Fault::ControllerCrash, 60)),
        other => other.swarm(),
    }
}

fn count(dice: &mut Dice, low: u64, high: u64) -> usize {
    usize::try_from(dice.between(low, high)).unwrap_or(1)
}

fn ms(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// A step of everybody, and what follows from it: processes that ended are started again, and what happened is judged.
fn step(sim: &mut turmoil::Sim<'_>, trouble: &mut Trouble, site: &Site) -> Result<(), String> {
    sim.step().map_err(|e| e.to_string())?;
    for host in truth::with(|t| std::mem::take(&mut t.exited)) {
        trouble.restart_later(sim, &host);
    }
    trouble.tick(sim, site);
    let at = ms(sim.elapsed());
    truth::with(|t| t.judge(at));
    Ok(())
}

/// Whether everything is right, and nothing moves.
fn judge(site: &Site, names: &[String], now: u64) -> Result<(), String> {
    truth::with(|t| {
        let led = t.led(now);
        let quiet = Quiet { ghost: &t.ghost, now, names, led, led_after: None, waits: None, kept: vec![] };
        invariants::unrest(&quiet).into_iter().next().map_or(Ok(()), |(id, text)| Err(format!("{id}: {text}")))
    })?;
    for place in &site.places {
        let folder = site.state_dir(place.name()).join("pods");
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let record: serde_json::Value =
                std::fs::read(entry.path()).ok().and_then(|b| serde_json::from_slice(&b).ok()).unwrap_or_default();
            if !record["outcome"].is_null() {
                return Err(format!("{} keeps an outcome that nobody acknowledged: {record}", place.name()));
            }
        }
    }
    Ok(())
}

/// Runs the journals through the machines again: S9.
fn replay(folder: &Path, at: u64) -> anyhow::Result<u64> {
    let dir = folder.join("journal");
    if !dir.exists() {
        return Ok(0);
    }
    let (report, damaged) = telemetry::journal::replay(&dir)?;
    let wrong = [report.differing, report.gaps, report.missing_blocks, report.dropped, report.unreadable];
    if wrong.iter().any(|n| *n > 0) || damaged > 0 || report.compared != report.records {
        truth::with(|t| {
            t.violated("S9", format!("the journals do not replay: {damaged} bytes damaged, {report:?}"), at)
        });
    }
    Ok(report.records)
}

/// A task that panics ends in silence otherwise.
fn note_panics() {
    std::panic::set_hook(Box::new(|info| {
        eprintln!("{info}");
        let text = info.to_string();
        let at = truth::now();
        truth::note(move |t| t.violated("P", text, at));
    }));
}
