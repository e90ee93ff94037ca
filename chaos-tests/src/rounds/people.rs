//! What people ask for while things break: by the commands that they use, again and again until it is taken.

use super::{
    guests,
    site::Site,
    witness::{Running, Witness},
};
use crate::world::{dice::Dice, server::Res, users::NS};
use anyhow::{Context, Result};
use std::{
    fmt,
    thread::sleep,
    time::{Duration, Instant},
};

/// For so long people try again what was refused.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two tries.
const AGAIN: Duration = Duration::from_millis(500);

/// Something that somebody asks for, of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Deed {
    /// Nothing.
    Nothing,
    /// A restart [C5 O3].
    Restart(String),
    /// A stop, and a start right behind it [O2].
    StopStart(String),
    /// Its deletion, and a new one of its name as soon as that is possible [A16 O4].
    Recreate(String),
    /// The deletion of its instance [O3].
    DeleteInstance(String),
    /// The deletion of its pod [A16].
    DeletePod(String),
    /// Two restarts in one moment [O2 O4].
    Twice(String),
}

/// Ids of the fault catalogue that are deeds.
pub const IDS: &str = "A16 C5 O2 O3 O4";

impl fmt::Display for Deed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("nothing"),
            Self::Restart(vm) => write!(f, "a restart of {vm}"),
            Self::StopStart(vm) => write!(f, "a stop and a start of {vm}"),
            Self::Recreate(vm) => write!(f, "{vm} deleted and made again"),
            Self::DeleteInstance(vm) => write!(f, "the instance of {vm} deleted"),
            Self::DeletePod(vm) => write!(f, "the pod of {vm} deleted"),
            Self::Twice(vm) => write!(f, "two restarts of {vm}"),
        }
    }
}

/// A guest that runs.
pub fn random_guest(witness: &Witness, dice: &mut Dice) -> Result<Running> {
    let guests: Vec<Running> = witness.with(|t| {
        t.look();
        t.running.values().cloned().collect()
    })?;
    dice.pick(&guests).cloned().context("no guest runs")
}

impl Deed {
    /// In a third of all rounds nobody asks for anything.
    pub fn draw(dice: &mut Dice, machines: &[String]) -> Self {
        let Some(vm) = dice.pick(machines).cloned() else { return Self::Nothing };
        match dice.below(9) {
            0 => Self::Restart(vm),
            1 => Self::StopStart(vm),
            2 => Self::Recreate(vm),
            3 => Self::DeleteInstance(vm),
            4 => Self::DeletePod(vm),
            5 => Self::Twice(vm),
            _ => Self::Nothing,
        }
    }

    /// Does it; what became of it, where it was not taken.
    pub fn carry_out(&self, site: &Site, witness: &Witness) -> Result<(), String> {
        match self {
            Self::Nothing => Ok(()),
            Self::Restart(vm) => insist(|| said(site.virtfold(&["restart", vm]))),
            Self::StopStart(vm) => {
                insist(|| said(site.virtfold(&["stop", vm])))?;
                insist(|| said(site.virtfold(&["start", vm])))
            }
            Self::Recreate(vm) => {
                insist(|| said(site.kubectl().kubectl(&["delete", "vm", vm, "--wait=false", "--ignore-not-found"])))?;
                create(site, vm)
            }
            Self::DeleteInstance(vm) => {
                let machine = vm.clone();
                witness.with(move |t| t.meddled = machine).map_err(|e| e.to_string())?;
                insist(|| said(site.kubectl().kubectl(&["delete", "vmi", vm, "--wait=false", "--ignore-not-found"])))
            }
            Self::DeletePod(vm) => {
                let machine = vm.clone();
                let pod = witness.with(move |t| {
                    let vmi = t.ghost.find(Res::Vmi, NS, &machine)?.uid().to_owned();
                    let pods = t.ghost.all(Res::Pod).find(|p| p.owner().is_some_and(|(_, _, uid)| uid == vmi));
                    pods.map(|p| p.name().to_owned())
                });
                let Some(pod) = pod.map_err(|e| e.to_string())? else { return Err("it has no pod".into()) };
                insist(|| said(site.kubectl().kubectl(&["delete", "pod", &pod, "--wait=false", "--ignore-not-found"])))
            }
            Self::Twice(vm) => {
                let (a, b) = std::thread::scope(|scope| {
                    let other = scope.spawn(|| said(site.virtfold(&["restart", vm])));
                    let one = said(site.virtfold(&["restart", vm]));
                    (one, other.join().unwrap_or_else(|_| Err("it was not asked".into())))
                });
                // One of them may be refused, because the other is not carried out yet.
                a.or(b).or_else(|_| insist(|| said(site.virtfold(&["restart", vm]))))
            }
        }
    }
}

/// Makes a machine; one of its name may still be on its way out.
pub fn create(site: &Site, vm: &str) -> Result<(), String> {
    let text = guests::machine(vm).text();
    insist(|| said(site.kubectl().feed(&["create"], &text)))
}

fn said(done: Result<(i32, String, String)>) -> Result<(), String> {
    match done {
        Ok((0, ..)) => Ok(()),
        Ok((_, out, error)) => Err(format!("{out}{error}").trim().to_owned()),
        Err(error) => Err(format!("{error:#}")),
    }
}

/// Again and again, until it is taken or somebody loses patience. What was taken and not answered is refused the second time by
/// its name alone, which is as good.
fn insist(mut ask: impl FnMut() -> Result<(), String>) -> Result<(), String> {
    let end = Instant::now() + PATIENCE;
    loop {
        let Err(why) = ask() else { return Ok(()) };
        if Instant::now() > end {
            return Err(why);
        }
        sleep(AGAIN);
    }
}
