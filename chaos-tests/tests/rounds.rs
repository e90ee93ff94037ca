//! Layer 3, a short run: real processes are hurt, and the guests count on.

use crate::e2e::{alone, e2e};
use anyhow::{Result, ensure};
use chaos_tests::rounds::{Fault, IDS, LEFT_OUT, Options, run};
use std::{collections::BTreeSet, time::Duration};

#[test]
fn guests_count_on_while_real_processes_are_hurt() -> Result<()> {
    e2e!();
    // Two clusters of guests at once are too much for two cores.
    let (_turn, _shared) = alone()?;
    let faults = vec![Fault::KillLeader, Fault::PauseAgent, Fault::KillPlane];
    let evidence = chaos_tests::rules::root().join("target/chaos-evidence");
    let options = Options {
        faults,
        rounds: 3,
        seed: 3,
        guests: 2,
        limit: Duration::from_secs(120),
        evidence,
        ..Options::default()
    };
    let report = run(&options, |line| println!("{line}"))?;
    ensure!(report.violations.is_empty() && report.rounds > 0, "{}", report.summary());
    // A fault leaves the guests alone; in each round at most one is asked to go.
    ensure!(report.kept >= u64::from(report.rounds), "{}", report.summary());
    ensure!(report.replayed.contains("the same"), "{}", report.summary());
    Ok(())
}

#[test]
fn every_fault_of_the_catalogue_is_done_or_left_out_with_a_reason() {
    let ids = |text: &str| text.split_whitespace().map(str::to_owned).collect::<BTreeSet<_>>();
    let catalogue: BTreeSet<String> = [("A", 16), ("C", 10), ("G", 6), ("N", 13), ("O", 6)]
        .into_iter()
        .flat_map(|(kind, most)| (1..=most).map(move |n| format!("{kind}{n}")))
        .collect();
    let done: BTreeSet<String> = Fault::ALL.iter().flat_map(|f| ids(f.ids())).chain(ids(IDS)).collect();
    let left: BTreeSet<String> = LEFT_OUT.iter().flat_map(|(all, _)| ids(all)).collect();
    let known: BTreeSet<String> = done.union(&left).cloned().collect();
    assert_eq!(known, catalogue, "done or left out, and in the catalogue");
    assert!(done.is_disjoint(&left), "{:?}", done.intersection(&left).collect::<Vec<_>>());
}
