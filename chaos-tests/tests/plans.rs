//! Plans of the model world: a seed's does the same again, failures are made small, what was once found stays.

use chaos_tests::world::{
    bugs::KNOWN,
    mutants::Mutant,
    plan::Plan,
    report::{self, Figures, Size},
    run::{self, Options, Scenario},
    shrink,
    users::Deed,
};
use std::path::Path;

#[test]
fn a_plan_does_what_its_seed_did() {
    for seed in 0..40 {
        let drawn = run::seed(seed, &Options::default());
        let text = drawn.plan.text();
        let plan = Plan::parse(&text).unwrap();
        assert_eq!(plan, drawn.plan, "what is written is what is read");
        let again = plan.run(false);
        assert_eq!((again.hash, again.steps, &again.struck), (drawn.hash, drawn.steps, &drawn.struck), "seed {seed}");
        assert_eq!(again.plan.events, drawn.plan.events, "seed {seed}");
    }
}

#[test]
fn what_is_done_is_read_as_it_is_written() {
    let n = || "vm-0".to_owned();
    for deed in [
        Deed::Create(n(), "Manual"),
        Deed::CreateBare(n()),
        Deed::Start(n()),
        Deed::Stop(n(), None),
        Deed::Stop(n(), Some(0)),
        Deed::Restart(n()),
        Deed::Strategy(n(), "Once"),
        Deed::Delete(n(), true),
        Deed::Delete(n(), false),
        Deed::DeleteInstance(String::new()),
        Deed::DeletePod(n(), false),
        Deed::DeletePod(n(), true),
        Deed::Label(n(), 3),
        Deed::Unlabel(n()),
        Deed::CreateSet(n(), 2),
        Deed::Scale(n(), 0),
        Deed::DeleteSet(n(), true),
        Deed::DeleteSet(n(), false),
    ] {
        assert_eq!(Deed::parse(&deed.words()), Some(deed));
    }
    for wrong in ["create vm-0", "create vm-0 Sometimes", "stop vm-0 soon", "fly vm-0", ""] {
        assert_eq!(Deed::parse(wrong), None, "{wrong}");
    }
    let event = |e: &str| {
        Plan::parse(&format!(r#"{{"seed":1,"nodes":1,"controllers":1,"machines":[],"until":1,"events":[{e}]}}"#))
    };
    assert!(event(r#"{"at":1,"fault":"Busy","on":"agent 0 get Vmi","salt":3}"#).is_ok());
    for wrong in [r#"{"at":1,"do":"fly"}"#, r#"{"at":1,"fault":"Rain","salt":3}"#, r#"{"at":1}"#] {
        assert!(event(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn a_failure_is_made_small_and_still_fails() {
    let options = Options { mutant: Some(Mutant::SilenceIsFence), ..Options::default() };
    let failing = (0..50).map(|s| run::seed(s, &options)).find(|o| !o.violations.is_empty()).unwrap();
    let shrunk = shrink::shrink(&failing, None, 600, &|_, _| {}).unwrap();
    let check = failing.violations[0].check;
    let again = shrunk.plan.run(true);
    assert!(shrink::violates(&again, check), "{:?}", again.violations);
    let (few, many) = (shrunk.plan.events.len(), failing.plan.events.len());
    assert!(few <= 12 && few < many, "{few} of {many} are left:\n{}", shrunk.plan.text());
    // Every one that is left matters.
    for i in 0..few {
        let mut less = shrunk.plan.clone();
        less.events.remove(i);
        assert!(!shrunk.minimal || !shrink::violates(&less.run(false), check), "{:?}", shrunk.plan.events[i]);
    }
    let story = shrink::story(&again.log).join("\n");
    assert!(story.contains("VIOLATED") && story.contains("somebody: Create"), "{story}");
    assert!(story.lines().count() * 2 < again.log.len(), "a story is shorter than a journal");
    // Where nothing fails, there is nothing to make small.
    assert!(shrink::shrink(&run::seed(0, &Options::default()), None, 10, &|_, _| {}).is_none());
}

/// What was once found stays found: with the fault put back where that can be done, and mended.
#[test]
fn what_was_once_found_does_not_come_back() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions");
    let mut all = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let plan = Plan::parse(&std::fs::read_to_string(&path).unwrap()).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(!plan.about.is_empty() && !plan.check.is_empty(), "{name} does not say what it is about");
        assert!(!plan.events.is_empty(), "{name}: nothing happens");
        if plan.mutant.is_some() {
            let broken = plan.run(false);
            assert!(shrink::violates(&broken, &plan.check), "{name} does not violate {} any more", plan.check);
        }
        let mended = Plan { mutant: None, ..plan }.run(false);
        assert_eq!(mended.violations, [], "{name}");
        all += 1;
    }
    assert!(all >= 10, "{all} regressions");
}

/// The table in RUNS.md says which bugs are found and by which check, and that is so. (Where none of the seeds that were tried did, it
/// says so, too.) The seeds themselves are others after each change of the rules.
#[test]
fn every_known_bug_is_found_as_the_table_says() {
    const SEEDS: u64 = 120;
    let runs = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("RUNS.md")).unwrap();
    let mut found = 0;
    for bug in KNOWN {
        let of = |line: &&str| line.ends_with(&format!("| `{:?}` |", bug.mutant));
        let row = runs.lines().find(of).unwrap_or_else(|| panic!("{:?} is not in the table", bug.mutant));
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        assert_eq!(cells[1], bug.story);
        if cells[3].parse::<u64>().is_err() {
            continue;
        }
        let options = Options { mutant: Some(bug.mutant), ..Options::default() };
        let seed = (0..SEEDS).find(|seed| shrink::violates(&run::seed(*seed, &options), cells[2]));
        println!("{:?}: {} with seed {seed:?}", bug.mutant, cells[2]);
        assert!(seed.is_some(), "not within {SEEDS} seeds: {row}");
        found += 1;
    }
    assert!(found >= 16 && found + 3 >= KNOWN.len(), "{found} of {} are found", KNOWN.len());
}

/// Whether every element that is opened is closed, in order; what is wrong otherwise.
fn well_formed(page: &str) -> Result<usize, String> {
    let (mut open, mut elements) = (vec![], 0);
    for part in page.split('<').skip(1) {
        let (tag, text) = part.split_once('>').ok_or_else(|| format!("<{part} does not end"))?;
        if text.contains('&') && !["&amp;", "&lt;", "&gt;", "&quot;"].iter().any(|e| text.contains(e)) {
            return Err(format!("a bare & in {text}"));
        }
        if let Some(name) = tag.strip_prefix('/') {
            if open.pop() != Some(name) {
                return Err(format!("</{name}> closes nothing"));
            }
        } else if tag.ends_with('/') {
            elements += 1;
        } else if !tag.starts_with('!') {
            elements += 1;
            open.push(tag.split(' ').next().unwrap_or_default());
        }
    }
    if open.is_empty() { Ok(elements) } else { Err(format!("{open:?} stay open")) }
}

#[test]
fn the_report_is_a_page_of_its_own() {
    let size = Size { seeds: 0..6, each: 1, mutants: 0, scenarios: vec![Scenario::Stop] };
    let figures = Figures::measure(&size, &|_| {});
    assert_eq!((figures.seeds, figures.violated.len()), (6, 0), "{:?}", figures.violated);
    assert!(figures.converged.len() > 10 && figures.coverage.cells.len() > 50 && figures.crash_points[0].1 > 10);
    let (at, kinds) = figures.effects();
    assert!(at > 3 && kinds > at, "one scenario does not do everything: {at} of {kinds}");
    // Nothing was looked for in no seeds, but for what shows in a scenario.
    assert_eq!(figures.score().0, 1);
    let page = report::html(&figures);
    assert!(well_formed(&page).unwrap() > 300, "{page}");
    for wanted in ["<svg", "PowerLoss", "sees VirtualMachineInstance", "Stop", "LatchOff"] {
        assert!(page.contains(wanted), "there is no {wanted}");
    }
    for outside in ["http:", "https:", "src=", "href=", "@import", "url("] {
        assert!(!page.contains(outside), "{outside} is not on the page");
    }
    assert!(well_formed("<a><b></a></b>").is_err() && well_formed("<a>").is_err() && well_formed("</a>").is_err());
}
