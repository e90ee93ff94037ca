//! The patches and server-side apply under what nobody would send: the cases of `fuzz/corpus/`, and what comes of them by changing them
//! at random. `FUZZ_ROUNDS` says how many changes of each; what fails is printed, and becomes a file of the corpus.
//! `fuzz/` asks the same with the coverage as its guide.

mod changes;
mod targets;

use changes::{Dice, change};
use serde_json::Value;

/// Runs the corpus of a target, and what comes of the cases that somebody wrote; those that were found have no names.
fn each(target: &str, run: fn(&[u8])) {
    let folder = format!("{}/../fuzz/corpus/{target}", env!("CARGO_MANIFEST_DIR"));
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    let rounds = std::env::var("FUZZ_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(200);
    let mut dice = Dice(0x9E37_79B9_7F4A_7C15);
    let mut cases = 0;
    for file in files {
        let checked = |bytes: &[u8]| {
            if let Err(panic) = std::panic::catch_unwind(|| run(bytes)) {
                println!("{}: {}", file.display(), String::from_utf8_lossy(bytes));
                std::panic::resume_unwind(panic);
            }
        };
        let bytes = std::fs::read(&file).unwrap();
        checked(&bytes);
        if file.extension().is_none_or(|e| e != "json") {
            continue;
        }
        cases += 1;
        let seed: Value = serde_json::from_slice(&bytes).unwrap();
        for _ in 0..rounds {
            let mut case = seed.clone();
            for _ in 0..=dice.below(6) {
                change(&mut case, &mut dice);
            }
            checked(case.to_string().as_bytes());
        }
    }
    assert!(cases >= 3, "{folder}");
}

#[test]
fn patches_hold_whatever_is_sent() {
    each("patch", targets::patch);
}

#[test]
fn applies_hold_whatever_is_sent() {
    each("apply", targets::apply);
}
