//! `virtfold-chaos rounds`.

use super::{Fault, IDS, LEFT_OUT, Options, run};
use anyhow::Result;
use clap::Args;
use std::{path::PathBuf, process::ExitCode, time::Duration};

/// What can be said on the command line.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
    It starts a cluster of its own (API server, etcd, controllers with a Lease of two seconds, node agents, guests under QEMU), so it \
    needs root and what `virtfold up` needs, and takes it away at the end. One round takes 5 to 40 seconds. The same seed draws the same \
    faults; real processes do not repeat themselves.")]
pub struct Rounds {
    /// How many rounds
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    /// What faults and deeds are drawn by
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only these faults (may be given again, or with commas; see --list)
    #[arg(long = "fault", value_name = "NAME", value_delimiter = ',', value_parser = fault)]
    faults: Vec<Fault>,
    /// Guests, each of 96 MiB
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=50))]
    guests: u32,
    /// Nodes
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=10))]
    nodes: u32,
    /// Controllers, of which one leads
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=5))]
    controllers: u8,
    /// MiB of a small disk in memory that holds the cluster's data; 0: an ordinary folder
    #[arg(long, default_value_t = 0, value_name = "MIB")]
    disk: u64,
    /// On a real kube-apiserver (target/go) with modelled nodes and guests
    #[arg(long, conflicts_with = "disk")]
    kubernetes: bool,
    /// Minutes after which no round begins
    #[arg(long, default_value_t = 120, value_name = "MINUTES")]
    minutes: u64,
    /// Where logs, journals and objects go if something is violated
    #[arg(long, default_value = "chaos-evidence", value_name = "DIR")]
    evidence: PathBuf,
    /// Say which faults there are, and which of the catalogue are left out and why
    #[arg(long)]
    list: bool,
}

fn fault(text: &str) -> Result<Fault, String> {
    let all = Fault::ALL.iter().map(|f| f.word()).collect::<Vec<_>>().join(", ");
    Fault::ALL.iter().find(|f| f.word() == text).copied().ok_or_else(|| format!("unknown; there are {all}"))
}

impl Rounds {
    /// Does the rounds, or lists the faults.
    ///
    /// # Errors
    /// The cluster cannot be started.
    pub fn execute(self) -> Result<ExitCode> {
        if self.list {
            for fault in Fault::ALL {
                println!("{:<20} {:<10} {}", fault.word(), fault.ids(), fault.about());
            }
            println!("\nwhat somebody asks for at the same time: {IDS}\n\nleft out:");
            for (ids, why) in LEFT_OUT {
                println!("{ids:<16} {why}");
            }
            return Ok(ExitCode::SUCCESS);
        }
        // Only a small disk is filled.
        let fits = |f: &Fault| {
            if self.kubernetes { f.foreign() } else { f.own() && (*f != Fault::FillDisk || self.disk > 0) }
        };
        let default = Fault::ALL.iter().copied().filter(fits).collect();
        let options = Options {
            rounds: self.rounds,
            seed: self.seed,
            faults: if self.faults.is_empty() { default } else { self.faults },
            guests: self.guests,
            nodes: self.nodes,
            controllers: self.controllers.into(),
            disk: self.disk,
            kubernetes: self.kubernetes,
            limit: Duration::from_secs(self.minutes * 60),
            evidence: std::path::absolute(self.evidence)?,
        };
        let report = run(&options, |line| println!("{line}"))?;
        print!("{}", report.summary());
        Ok(if report.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) })
    }
}
