//! The production drivers in a simulated network: some seeds hold, and the same seed is the same run.

use chaos_tests::runs::{self, NETWORK_MUTANTS, Options};
use chaos_tests::world::run::{self, Scenario, lasting};
use std::sync::Mutex;

/// Seeds that are run on every change.
const SEEDS: u64 = 5;
/// Seeds within which every mutant has to be caught.
const MUTANT_SEEDS: u64 = 12;

#[test]
fn seeds_of_the_simulated_network_hold() {
    let all = Mutex::new(vec![]);
    runs::many(0..SEEDS, Options::default(), 2, |outcome| all.lock().unwrap().push(outcome)).unwrap();
    let all = all.into_inner().unwrap();
    let wrong: Vec<_> = all.iter().filter(|o| !o.violations.is_empty()).map(|o| (o.seed, &o.violations)).collect();
    assert!(wrong.is_empty(), "virtfold-chaos repeat --layer 2 SEED shows more: {wrong:#?}");
    // A world in which nothing happens holds, too.
    let (starts, records) = all.iter().fold((0, 0), |(s, r), o| (s + o.starts, r + o.records));
    assert!(starts >= SEEDS * 3 && records >= SEEDS * 100, "{starts} domains, {records} records");
}

#[test]
fn the_same_seed_is_the_same_run_of_the_simulated_network() {
    let options = Options { record: true, ..Options::default() };
    let (a, b) = (runs::one(3, options).unwrap(), runs::one(3, options).unwrap());
    let differs = a.log.iter().zip(&b.log).find(|(x, y)| x != y);
    assert_eq!(differs, None);
    assert_eq!(a, b);
    assert!(!a.log.is_empty() && a.writes > 100);
}

#[test]
fn what_is_bent_between_the_components_is_noticed() {
    for (mutant, check) in NETWORK_MUTANTS {
        let options = Options { mutant: Some(*mutant), ..Options::default() };
        let caught = |seed: &u64| runs::one(*seed, options).unwrap().violations.iter().any(|(id, ..)| id == check);
        let seed = (0..MUTANT_SEEDS).find(caught);
        println!("{mutant:?} is caught by {check} with seed {seed:?}");
        assert!(seed.is_some(), "{mutant:?} is not caught by {check} within {MUTANT_SEEDS} seeds");
    }
}

/// The model world's agents, launchers and hubs are models of what runs here, and the launchers here of what runs there: what
/// both worlds make of the same script has to be the same.
#[test]
fn a_script_is_the_same_life_in_the_model_world_and_in_the_simulated_network() {
    for scenario in Scenario::ALL {
        let (model, _) = run::scenario(scenario, None, false);
        let options = Options { scenario: Some(scenario), ..Options::default() };
        let network = runs::one(7, options).unwrap();
        assert_eq!(network.violations, [], "{scenario:?}");
        // Which instance of a set goes depends on their names, which are random.
        let sorted = |mut lives: Vec<String>| {
            lives.sort();
            lives
        };
        assert_eq!(sorted(network.lives), sorted(model.lives), "{scenario:?}");
        assert_eq!(network.starts, u64::from(model.starts), "{scenario:?}");
        assert_eq!(lasting(&network.controller_writes), lasting(&model.writes), "{scenario:?}");
    }
}
