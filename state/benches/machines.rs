//! How fast the machines are, what recording them costs, and how fast a recording is replayed:
//! `cargo bench -p state --features model`.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod life;

use criterion::{BatchSize, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use life::lives;
use state::{
    Event, Key, Machine,
    journal::{Block, Encoder, Head, Piece, SCHEMA, begin_line, end_line, pieces},
    replay::Replay,
    vm::{Input, Sight, Vm},
};
use std::{cell::LazyCell, collections::BTreeMap, hint::black_box, time::Duration};

/// VMs of the journal that is replayed.
const VMS: usize = 10_000;

/// The events of it that one cell of one controller steps.
fn life() -> Vec<Event<Input>> {
    let mut cell = Vm::new(Key::new("ns", "web"));
    let mut stepped = vec![];
    let lives = lives();
    let last = lives.iter().rposition(|(fresh, _)| *fresh).unwrap_or(0);
    for (_, event) in &lives[last..] {
        if !cell.knows(&event.input) {
            cell.step(event);
            stepped.push(event.clone());
        }
    }
    stepped
}

/// What kind of event it is, for the cell that gets it.
fn kind(cell: &mut Vm, input: &Input) -> &'static str {
    match input {
        _ if cell.knows(input) => "echo",
        Input::Observed(Sight::Present(_)) => "seen",
        Input::Observed(Sight::Gone(_) | Sight::Vanished(_)) => "gone",
        Input::Reported(_) => "reported",
        Input::Settled { .. } => "settled",
        Input::Elapsed => "elapsed",
        Input::Configured(_) => "configured",
    }
}

/// What a driver does with an event.
fn take(cell: &mut Vm, event: &Event<Input>) {
    if !cell.knows(&event.input) {
        black_box(cell.step(event));
    }
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
    let lives = lives();
    let new = || Vm::new(Key::new("ns", "web"));
    let mut cell = new();
    let mut kinds: BTreeMap<_, (Vec<Vm>, Vec<Event<Input>>)> = BTreeMap::new();
    let mut commands = 0;
    for (fresh, event) in &lives {
        if *fresh {
            cell = new();
        }
        let of = kinds.entry(kind(&mut cell, &event.input)).or_default();
        of.0.push(cell.clone());
        of.1.push(event.clone());
        if !cell.knows(&event.input) {
            commands += cell.step(event).len();
        }
    }
    let mix: Vec<_> = kinds.iter().map(|(kind, (_, events))| format!("{kind} {}", events.len())).collect();
    println!("{} events of a life, {commands} commands: {}", lives.len(), mix.join(", "));
    let mut group = c.benchmark_group("step");
    group.throughput(Throughput::Elements(lives.len() as u64));
    group.bench_function("life", |b| {
        b.iter(|| {
            let mut cell = new();
            for (fresh, event) in &lives {
                if *fresh {
                    cell = new();
                }
                take(&mut cell, event);
            }
        });
    });
    for (kind, (cells, events)) in &kinds {
        group.throughput(Throughput::Elements(events.len() as u64));
        group.bench_function(*kind, |b| {
            b.iter_batched_ref(
                || cells.clone(),
                |cells| cells.iter_mut().zip(events).for_each(|(cell, event)| take(cell, event)),
                BatchSize::SmallInput,
            );
        });
    }
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
    // Made when it is needed, which is not when another bench is asked for.
    let blocks = LazyCell::new(|| {
        let (blocks, bytes) = recorded(&life);
        println!("{} records of {VMS} VMs: {bytes} bytes, {} a VM", life.len() * VMS, bytes / VMS);
        let read = blocks.iter().map(|b| match pieces(b).next() {
            Some(Piece::Block(block)) => block,
            other => panic!("{other:?}"),
        });
        read.collect::<Vec<Block>>()
    });
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
