#![allow(clippy::unwrap_used)]
use super::*;
use state::{
    Key, Timestamp,
    journal::Entry,
    vm::{Input, Vm},
};

fn config(dir: &Path) -> Config {
    Config { size: MIN_SIZE, age: Duration::from_secs(3600), ..Config::new(dir.into(), "controller", "test") }
}

/// Steps the cell `name` with nothing new.
fn step(journal: &mut Journal, vms: &mut HashMap<String, Vm>, name: &str, at: u64) {
    let vm = vms.entry(name.to_owned()).or_insert_with(|| Vm::new(Key::new("ns", name)));
    journal.step(name, None, vm, &Event::new(Timestamp(at), Input::Elapsed));
}

/// Records and what they have: (segment, process, cell, seq, has a state), lost, damaged bytes.
type Read = (Vec<(u64, String, String, u64, bool)>, u64, usize);

fn read(dir: &Path) -> Read {
    let (mut records, mut lost, mut damage) = (vec![], 0, 0);
    for path in segments(dir).unwrap() {
        for piece in pieces(&std::fs::read(path).unwrap()) {
            match piece {
                Piece::Block(b) => {
                    lost += b.head.lost;
                    for entry in b.entries() {
                        let Entry::Vm(r) = entry.unwrap() else { panic!() };
                        records.push((b.head.segment, b.head.process.clone(), r.cell, r.seq, r.state.is_some()));
                    }
                }
                Piece::Damage { bytes, .. } => damage += bytes,
            }
        }
    }
    (records, lost, damage)
}

#[test]
fn without_a_thread_whoever_steps_writes() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config { thread: false, ..config(dir.path()) };
    let (mut journal, mut vms) = (Journal::open(Some(config), "p", None), HashMap::new());
    step(&mut journal, &mut vms, "a", 1);
    journal.flusher().flush();
    assert_eq!(read(dir.path()).0.len(), 1, "flushed");
    step(&mut journal, &mut vms, "a", 2);
    drop(journal);
    let (records, lost, damage) = read(dir.path());
    assert_eq!((records.len(), lost, damage), (2, 0, 0), "the end writes the rest");
}

#[test]
fn the_first_record_of_a_cell_in_a_segment_is_its_state_and_old_segments_go() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, mut vms) = (Journal::open(Some(config(dir.path())), "p", None), HashMap::new());
    let mut noise = 1_u64;
    let mut n = 0;
    // Enough for the oldest segments to go, of what does not compress.
    while read(dir.path()).0.first().is_none_or(|r| r.0 < 3) {
        for _ in 0..200 {
            let mut name = String::new();
            for _ in 0..20 {
                noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                name += &format!("{noise:x}");
            }
            step(&mut journal, &mut vms, &name, n);
            step(&mut journal, &mut vms, "kept", n);
            n += 1;
        }
        journal.flusher().flush();
        assert!(n < 100_000, "no segment goes");
    }
    drop(journal);
    let (records, lost, damage) = read(dir.path());
    assert_eq!((lost, damage), (0, 0));
    let mut seen = std::collections::BTreeSet::new();
    let mut last = 0;
    for (segment, _, cell, seq, has_state) in records {
        assert_eq!(has_state, seen.insert((segment, cell.clone())), "{segment} {cell}");
        if cell == "kept" {
            assert!(last == 0 || seq == last + 1, "nothing is missing");
            last = seq;
        }
    }
    let total: u64 = segments(dir.path()).unwrap().iter().map(|p| p.metadata().unwrap().len()).sum();
    assert!(total <= MIN_SIZE + 2 * BLOCK as u64, "{total} bytes");
    assert!(segments(dir.path()).unwrap().len() > 4);
}

#[test]
fn a_restart_goes_on_behind_a_torn_tail_and_a_segment_in_use_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let mut vms = HashMap::new();
    let mut a = Journal::open(Some(config(dir.path())), "a", Some(Epoch(1)));
    step(&mut a, &mut vms, "x", 1);
    step(&mut a, &mut vms, "x", 2);
    a.flusher().flush();
    // Another leader, while this one has not ended.
    let mut b = Journal::open(Some(config(dir.path())), "b", Some(Epoch(2)));
    step(&mut b, &mut vms, "x", 3);
    drop(b);
    drop(a);
    let files = segments(dir.path()).unwrap();
    assert_eq!(files.len(), 2);
    let mut torn = OpenOptions::new().append(true).open(&files[1]).unwrap();
    torn.write_all(b"VFJ2 torn").unwrap();
    let mut c = Journal::open(Some(config(dir.path())), "c", Some(Epoch(3)));
    step(&mut c, &mut vms, "x", 4);
    // Another VM of that name.
    c.forget(CellKind::Vm, "x");
    step(&mut c, &mut vms, "x", 5);
    drop(c);
    let (records, lost, damage) = read(dir.path());
    let short: Vec<_> = records.iter().map(|(s, p, _, seq, st)| (*s, p.as_str(), *seq, *st)).collect();
    let expected = [(1, "a", 1, true), (1, "a", 2, false), (2, "b", 1, true), (2, "c", 1, true), (2, "c", 1, true)];
    assert_eq!((short, lost, damage), (expected.to_vec(), 0, 9));
}

#[test]
fn what_is_too_old_goes_even_when_nothing_happens() {
    let dir = tempfile::tempdir().unwrap();
    let mut vms = HashMap::new();
    let mut journal = Journal::open(Some(Config { age: Duration::from_secs(2), ..config(dir.path()) }), "p", None);
    step(&mut journal, &mut vms, "x", 1);
    journal.flusher().flush();
    assert_eq!(read(dir.path()).0.len(), 1);
    let deadline = Instant::now() + Duration::from_secs(60);
    while !segments(dir.path()).unwrap().is_empty() {
        assert!(Instant::now() < deadline, "it stays");
        std::thread::sleep(Duration::from_millis(50));
    }
    step(&mut journal, &mut vms, "x", 2);
    drop(journal);
    let (records, _, _) = read(dir.path());
    assert_eq!(records.iter().map(|r| (r.3, r.4)).collect::<Vec<_>>(), [(2, true)]);
}

#[test]
fn a_folder_that_cannot_be_written_costs_the_records_alone_and_they_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("journal");
    // Not even root makes a folder of this.
    std::fs::write(&place, "in the way").unwrap();
    let mut vms = HashMap::new();
    let mut journal = Journal::open(Some(config(&place)), "p", None);
    step(&mut journal, &mut vms, "x", 1);
    journal.flusher().flush();
    step(&mut journal, &mut vms, "x", 2);
    assert_eq!(journal.dropped(), 2);
    std::fs::remove_file(&place).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut at = 3;
    while !place.exists() {
        assert!(Instant::now() < deadline, "it is not tried again");
        step(&mut journal, &mut vms, "x", at);
        at += 1;
        std::thread::sleep(Duration::from_millis(50));
    }
    // The thread lets steps in after it has written how many are missing.
    while journal.dropped() == at - 1 {
        step(&mut journal, &mut vms, "x", at);
        at += 1;
        std::thread::yield_now();
    }
    let dropped = journal.dropped();
    drop(journal);
    let (records, lost, damage) = read(&place);
    assert_eq!((lost, damage), (dropped, 0));
    assert_eq!(records.iter().map(|r| (r.3, r.4)).collect::<Vec<_>>(), [(at - 1, true)]);
}

#[test]
fn a_full_disk_tears_nothing_that_was_whole() {
    let dir = tempfile::tempdir().unwrap();
    let mut files = Files::new(config(dir.path()));
    files.open().unwrap();
    files.append(b"whole").unwrap();
    // The same file, on a full disk.
    files.active.as_mut().unwrap().file = OpenOptions::new().append(true).open("/dev/full").unwrap();
    assert!(files.append(b"torn").is_err());
    assert_eq!(files.open().unwrap(), 1);
    files.append(b", and on").unwrap();
    assert_eq!(std::fs::read(files.path(1)).unwrap(), b"whole, and on");
}

#[test]
fn a_journal_that_is_off_steps_and_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for config in [None, Some(Config { size: 0, ..config(dir.path()) })] {
        let mut vms = HashMap::new();
        let mut journal = Journal::open(config, "p", None);
        step(&mut journal, &mut vms, "x", 1);
        assert!(!journal.is_on());
    }
    assert!(segments(dir.path()).unwrap().is_empty());
}
