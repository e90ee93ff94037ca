//! How fast the machines are, what recording them costs, and how fast a recording is replayed:
//! `cargo bench -p state --features model`.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use serde_json::json;
use state::{
    Event, Key, Machine,
    journal::{Block, Encoder, Head, Piece, SCHEMA, begin_line, end_line, pieces},
    object::Kind,
    replay::Replay,
    vm::{
        Input, Vm,
        model::{World, vm},
    },
};
use std::{hint::black_box, time::Duration};

/// VMs of the journal that is replayed.
const VMS: usize = 10_000;

/// The events of one life: created, runs, is stopped, started again, deleted.
fn life() -> Vec<Event<Input>> {
    let mut w = World::with(vm("Always"));
    w.settle(10_000);
    assert_eq!(w.printable(), "Running");
    w.edit(Kind::VirtualMachine, json!({"metadata": {"generation": 2}, "spec": {"runStrategy": "Halted"}}));
    w.settle(30_000);
    assert_eq!(w.printable(), "Stopped");
    w.edit(Kind::VirtualMachine, json!({"metadata": {"generation": 3}, "spec": {"runStrategy": "Always"}}));
    w.settle(30_000);
    assert_eq!(w.printable(), "Running");
    w.edit(Kind::VirtualMachine, json!({"metadata": {"deletionTimestamp": "1970-01-01T00:20:00Z"}}));
    w.settle(60_000);
    assert!(w.cell.is_empty());
    w.tape.into_iter().map(|(_, event)| event).collect()
}

fn head(block: u64) -> Head {
    let text = |t: &str| t.to_owned();
    let (build, component, process) = (text("bench"), text("controller"), text("p"));
    Head { schema: SCHEMA, build, component, process, epoch: None, segment: 1, block, lost: 0 }
}

/// Records a life of the cell `name`.
fn record(lines: &mut Vec<u8>, name: &str, life: &[Event<Input>]) {
    let mut vm = Vm::new(Key::new("ns", "web"));
    for (seq, event) in (1..).zip(life) {
        let state = (seq == 1).then_some(&vm);
        begin_line(lines, name, seq, state, event).unwrap();
        let commands = vm.step(event);
        end_line::<Vm>(lines, &commands, vm.traceparent()).unwrap();
    }
}

fn step(c: &mut Criterion) {
    let life = life();
    let mut group = c.benchmark_group("step");
    group.throughput(Throughput::Elements(life.len() as u64));
    group.bench_function("life", |b| {
        b.iter(|| {
            let mut vm = Vm::new(Key::new("ns", "web"));
            for event in &life {
                black_box(vm.step(event));
            }
        });
    });
    group.finish();
}

fn journal(c: &mut Criterion) {
    let life = life();
    let mut group = c.benchmark_group("journal");
    group.throughput(Throughput::Elements(life.len() as u64));
    // Beside the step that is in it.
    group.bench_function("record", |b| {
        let (mut lines, mut encoder) = (vec![], Encoder::new().unwrap());
        b.iter(|| {
            record(&mut lines, "ns/web", &life);
            if lines.len() >= 64 << 10 {
                black_box(encoder.block(&head(1), &lines).unwrap());
                lines.clear();
            }
        });
    });
    group.finish();
}

/// The lives of [`VMS`] machines, one after another.
fn recorded(life: &[Event<Input>]) -> (Vec<Vec<u8>>, usize) {
    let (mut encoder, mut blocks, mut lines) = (Encoder::new().unwrap(), vec![], vec![]);
    for i in 0..VMS {
        record(&mut lines, &format!("ns/web-{i}"), life);
        if lines.len() >= 64 << 10 || i + 1 == VMS {
            blocks.push(encoder.block(&head(blocks.len() as u64 + 1), &lines).unwrap());
            lines.clear();
        }
    }
    let bytes = blocks.iter().map(Vec::len).sum();
    (blocks, bytes)
}

fn replay(c: &mut Criterion) {
    let life = life();
    let (blocks, bytes) = recorded(&life);
    println!("{} records of {VMS} VMs: {bytes} bytes, {} a VM", life.len() * VMS, bytes / VMS);
    let blocks: Vec<Block> = blocks
        .iter()
        .map(|b| match pieces(b).next() {
            Some(Piece::Block(block)) => block,
            other => panic!("{other:?}"),
        })
        .collect();
    let mut group = c.benchmark_group("replay");
    group.sampling_mode(SamplingMode::Flat).sample_size(10).measurement_time(Duration::from_secs(20));
    group.throughput(Throughput::Elements((life.len() * VMS) as u64));
    group.bench_function("10000-vms", |b| {
        b.iter(|| {
            let mut replay = Replay::default();
            blocks.iter().for_each(|b| replay.block(b));
            let report = replay.finish();
            assert_eq!((report.compared, report.differing), ((life.len() * VMS) as u64, 0));
        });
    });
    group.finish();
}

criterion_group!(benches, step, journal, replay);
criterion_main!(benches);
