//! The production drivers in a simulated network: some seeds hold, and the same seed is the same run.

use chaos_tests::runs;
use std::sync::Mutex;

/// Seeds that are run on every change.
const SEEDS: u64 = 5;

#[test]
fn seeds_of_the_simulated_network_hold() {
    let all = Mutex::new(vec![]);
    runs::many(0..SEEDS, false, 2, |outcome| all.lock().unwrap().push(outcome)).unwrap();
    let all = all.into_inner().unwrap();
    let wrong: Vec<_> = all.iter().filter(|o| !o.violations.is_empty()).map(|o| (o.seed, &o.violations)).collect();
    assert!(wrong.is_empty(), "virtfold-chaos repeat --layer 2 SEED shows more: {wrong:#?}");
    // A world in which nothing happens holds, too.
    let (starts, records) = all.iter().fold((0, 0), |(s, r), o| (s + o.starts, r + o.records));
    assert!(starts >= SEEDS * 3 && records >= SEEDS * 100, "{starts} domains, {records} records");
}

#[test]
fn the_same_seed_is_the_same_run_of_the_simulated_network() {
    let (a, b) = (runs::one(3, true).unwrap(), runs::one(3, true).unwrap());
    let differs = a.log.iter().zip(&b.log).find(|(x, y)| x != y);
    assert_eq!(differs, None);
    assert_eq!(a, b);
    assert!(!a.log.is_empty() && a.writes > 100);
}
