//! Everything that can happen to one machine, in every order, within bounds that a test has time for.

use chaos_tests::world::{
    mutants::Mutant,
    search::{self, Bounds, Found},
    users::Deed,
};

/// Not one of these searches has to come near it.
const MOST: usize = 100_000;

fn search(bounds: Bounds) -> Found {
    search::run(&Bounds { states: MOST, ..bounds }, &mut |_| {})
}

fn name() -> String {
    search::MACHINE.into()
}

/// Nothing but the machine's start.
fn alone() -> Bounds {
    Bounds { deeds: 0, ..Bounds::default() }
}

#[test]
fn every_state_within_small_bounds_is_seen_and_holds() {
    let deleted = Bounds {
        strategy: "Halted",
        alphabet: vec![Deed::Delete(name(), true)],
        deeds: 1,
        handovers: 1,
        stale: 2,
        lost: 1,
        ..Bounds::default()
    };
    let mut all = vec![
        ("a start", alone(), 300),
        ("a deletion at any time, one loss and another leader whose caches are behind", deleted, 10_000),
    ];
    // There is no time for it otherwise.
    if !cfg!(debug_assertions) {
        all.push(("a start in which one request or order comes twice", Bounds { twice: 1, ..alone() }, 10_000));
    }
    for (what, bounds, least) in all {
        let found = search(bounds);
        let told = found.trouble.map(|t| format!("{}: {}\n{}", t.check, t.text, t.story.join("\n")));
        assert_eq!(told, None, "{what}");
        assert_eq!(found.stopped, None, "{what}");
        println!("{what}: {} states, {} at rest, {:.1} s", found.states, found.rests, found.seconds);
        assert!(found.states > least && found.rests > 0 && found.open == 0, "{what}: {} states", found.states);
    }
}

#[test]
fn a_search_says_when_it_has_not_seen_all() {
    let found = search::run(&Bounds { states: 100, ..alone() }, &mut |_| {});
    assert!(found.stopped.is_some() && !found.is_fixpoint() && found.open > 0);
}

#[test]
fn mutants_are_found_by_the_shortest_way() {
    let stop = || vec![Deed::Stop(name(), None)];
    let halted = || Bounds { strategy: "Halted", alphabet: vec![Deed::Delete(name(), true)], ..Bounds::default() };
    let mut all = vec![
        (Mutant::StopOnlyDeletes, "S15", Bounds { deeds: 1, alphabet: stop(), ..alone() }),
        (Mutant::LauncherForgets, "S6", Bounds { twice: 1, ..alone() }),
        (Mutant::CellsKept, "Q4", halted()),
        // Nothing is violated, and nothing ever comes to its end.
        (Mutant::FinalizersKept, "L1", halted()),
    ];
    if !cfg!(debug_assertions) {
        all.push((Mutant::NoPreconditions, "S11", Bounds { handovers: 1, ..alone() }));
    }
    for (mutant, check, bounds) in all {
        let found = search(Bounds { mutant: Some(mutant), ..bounds });
        let trouble = found.trouble.unwrap_or_else(|| panic!("{mutant:?} is not found in {} states", found.states));
        println!("{mutant:?}, {}: {}\n{}", trouble.check, trouble.text, trouble.story.join("\n"));
        assert_eq!(trouble.check, check, "{mutant:?}");
        assert!(!found.deep && trouble.steps > 0, "{mutant:?}");
        // A person can read it: each step has a line of its own.
        assert!(
            (1..=trouble.steps).all(|n| trouble.story.iter().any(|l| l.trim_start().starts_with(&format!("{n}. "))))
        );
    }
}
