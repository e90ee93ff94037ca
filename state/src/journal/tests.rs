#![allow(clippy::unwrap_used)]
use super::*;
use crate::vm::{Command, Input};
use proptest::prelude::*;

fn head(block: u64) -> Head {
    Head {
        schema: SCHEMA,
        build: "0.1.0-x".into(),
        component: "controller".into(),
        process: "p1".into(),
        epoch: Some(Epoch(7)),
        segment: 3,
        block,
        lost: 0,
    }
}

fn line(seq: u64) -> Vec<u8> {
    let mut line = vec![];
    let vm = Vm::new(crate::Key::new("ns", "web"));
    let state = (seq == 1).then_some(&vm);
    begin_line(&mut line, "ns/web", seq, state, &Event::new(Timestamp(seq), Input::Elapsed)).unwrap();
    let trace = Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    end_line::<Vm>(&mut line, &[Command::Wake { at: Timestamp(9) }], trace).unwrap();
    line
}

fn seqs(bytes: &[u8]) -> (Vec<u64>, usize) {
    let mut damage = 0;
    let mut seqs = vec![];
    for piece in pieces(bytes) {
        match piece {
            Piece::Block(b) => seqs.extend(b.entries().map(|e| e.unwrap().seq())),
            Piece::Damage { bytes, .. } => damage += bytes,
        }
    }
    (seqs, damage)
}

fn blocks() -> Vec<Vec<u8>> {
    let mut encoder = Encoder::new().unwrap();
    (1..=4).map(|i| encoder.block(&head(i), &[line(2 * i - 1), line(2 * i)].concat()).unwrap()).collect()
}

#[test]
fn damage_costs_the_block_that_it_hits() {
    let blocks = blocks();
    let whole = blocks.concat();
    assert_eq!(seqs(&whole), ((1..=8).collect(), 0));
    for bit in 0..whole.len() * 8 {
        let mut hurt = whole.clone();
        hurt[bit / 8] ^= 1 << (bit % 8);
        let (seqs, damage) = seqs(&hurt);
        let mut end = 0;
        let hit = blocks.iter().position(|b| {
            end += b.len();
            bit / 8 < end
        });
        let hit = hit.unwrap() as u64;
        let expected: Vec<u64> = (1..=8).filter(|s| (s - 1) / 2 != hit).collect();
        assert_eq!(seqs, expected, "bit {bit}");
        assert_eq!(damage, blocks[usize::try_from(hit).unwrap()].len(), "bit {bit}");
    }
    for cut in 0..whole.len() {
        let mut end = 0;
        let full = blocks.iter().take_while(|b| {
            end += b.len();
            end <= cut
        });
        let full = full.count();
        let (seqs, damage) = seqs(&whole[..cut]);
        assert_eq!(seqs.len(), 2 * full, "cut at {cut}");
        assert_eq!(damage, cut - blocks[..full].iter().map(Vec::len).sum::<usize>());
    }
}

#[test]
fn a_process_that_goes_on_behind_a_torn_tail_is_read() {
    let blocks = blocks();
    let torn = [&blocks[0][..], &blocks[1][..30], &blocks[2][..]].concat();
    assert_eq!(seqs(&torn), (vec![1, 2, 5, 6], 30));
}

#[test]
fn a_record_of_another_build_is_named_and_passed_over() {
    let mut lines = line(2);
    lines.extend(
        b"{\"Vm\":{\"cell\":\"ns/web\",\"seq\":3,\"event\":{\"at\":1,\"input\":\"Teleported\"},\"commands\":[]}}\n",
    );
    lines.extend(b"{\"Portal\":{\"cell\":\"ns/x\",\"seq\":1}}\n");
    lines.extend(line(4));
    let bytes = Encoder::new().unwrap().block(&head(1), &lines).unwrap();
    let Some(Piece::Block(block)) = pieces(&bytes).next() else { panic!() };
    let read: Vec<_> = block.entries().collect();
    assert_eq!((read[0].as_ref().unwrap().seq(), read[3].as_ref().unwrap().seq()), (2, 4));
    let unknown = read[1].as_ref().unwrap_err();
    assert_eq!((unknown.cell.as_deref(), unknown.seq), (Some("ns/web"), Some(3)));
    assert_eq!(read[2].as_ref().unwrap_err().cell.as_deref(), Some("ns/x"));
}

#[test]
fn blocks_of_the_second_version_can_be_read() {
    // Golden: a change of names in the head or around events and commands breaks old journals.
    let json = r#"{"Vm":{"cell":"ns/web","seq":2,"event":{"at":2,"input":"Elapsed"},"commands":[{"Wake":{"at":9}}],"trace":"0af7651916cd43dd8448eb211c80319c"}}"#;
    assert_eq!(String::from_utf8(line(2)).unwrap().trim_end(), json);
    let hex = "56464a32c5000000f5000000c3069be089099f4628b52ffd20f5e50500428d292240895607d71b63f9e49603805a9284366b7337a411b107aa3dd288e04fc6b0831a17c89ce7062909c308219c669685514a59142b5083128a85414abe6f4e4fbc16ccd9b4230d5c12eca16a89cdab862fad80efe3e3b5464c97098dd0f07aa7150060fb7eade6cb3d13b8446662ef60b79cabc20e1a5e177b06bbd7d7a3f73d84cdee79d73fbd967b6273fc7d6cdddc638eaf5f3024077448be57abf170ae887d62cd6078190600524975985b331bb92a187db852cd564501";
    let bytes: Vec<u8> = (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect();
    let Some(Piece::Block(block)) = pieces(&bytes).next() else { panic!() };
    assert_eq!(block.head, head(5));
    assert_eq!(block.raw().collect::<Vec<_>>(), [json.as_bytes()]);
    let entry = block.entries().next().unwrap().unwrap();
    assert_eq!((entry.kind(), entry.cell(), entry.seq(), entry.at()), (CellKind::Vm, "ns/web", 2, Timestamp(2)));
    assert_eq!(entry.trace(), Some("0af7651916cd43dd8448eb211c80319c"));
}

/// What can happen to a file.
#[derive(Debug, Clone)]
enum Blow {
    Flip(usize, u8),
    Cut(usize),
    Remove(usize, usize),
    Insert(usize, Vec<u8>),
    Repeat(usize, usize),
    Zero(usize, usize),
}

fn blow() -> impl Strategy<Value = Blow> {
    let at = || any::<prop::sample::Index>().prop_map(|i| i.index(1 << 20));
    let garbage = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..40),
        // What looks like the beginning of a block, with lengths of all sizes.
        prop::collection::vec(any::<u8>(), 0..40).prop_map(|tail| [&MAGIC[..], &tail].concat()),
    ];
    prop_oneof![
        (at(), 1..=u8::MAX).prop_map(|(i, b)| Blow::Flip(i, b)),
        at().prop_map(Blow::Cut),
        (at(), 0_usize..400).prop_map(|(i, n)| Blow::Remove(i, n)),
        (at(), garbage).prop_map(|(i, g)| Blow::Insert(i, g)),
        (at(), 0_usize..400).prop_map(|(i, n)| Blow::Repeat(i, n)),
        (at(), 0_usize..400).prop_map(|(i, n)| Blow::Zero(i, n)),
    ]
}

fn strike(bytes: &mut Vec<u8>, blow: &Blow) {
    let len = bytes.len();
    let range = |i: usize, n: usize| {
        let from = i % (len + 1);
        from..(from + n).min(len)
    };
    match blow {
        Blow::Flip(i, b) if len > 0 => bytes[i % len] ^= b,
        Blow::Flip(..) => {}
        Blow::Cut(i) => bytes.truncate(i % (len + 1)),
        Blow::Remove(i, n) => drop(bytes.drain(range(*i, *n))),
        Blow::Insert(i, garbage) => drop(bytes.splice(range(*i, 0), garbage.iter().copied())),
        Blow::Repeat(i, n) => {
            let part = bytes[range(*i, *n)].to_vec();
            bytes.splice(range(*i, 0), part);
        }
        Blow::Zero(i, n) => bytes[range(*i, *n)].fill(0),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_file_that_was_struck_yields_what_is_whole_in_it_and_invents_nothing(blows in prop::collection::vec(blow(), 0..6)) {
        let blocks = blocks();
        let mut bytes = blocks.concat();
        blows.iter().for_each(|b| strike(&mut bytes, b));
        let mut at = 0;
        let mut found = [0; 4];
        for piece in pieces(&bytes) {
            match piece {
                Piece::Block(b) => {
                    let n = usize::try_from(b.head.block).unwrap() - 1;
                    // It is one that was written, and it stands there.
                    prop_assert_eq!(&b.head, &head(b.head.block));
                    prop_assert!(bytes[at..].starts_with(&blocks[n]));
                    prop_assert_eq!(b.entries().filter(Result::is_ok).count(), 2);
                    found[n] += 1;
                    at += blocks[n].len();
                }
                Piece::Damage { offset, bytes } => {
                    prop_assert_eq!(offset, at);
                    at += bytes;
                }
            }
        }
        prop_assert_eq!(at, bytes.len(), "each byte is a block's or told as damage");
        for (n, block) in blocks.iter().enumerate() {
            let there = bytes.windows(block.len()).filter(|w| w == block).count();
            prop_assert_eq!(found[n], there, "block {}", n + 1);
        }
    }
}
