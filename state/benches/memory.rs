//! What a running machine costs a controller in memory: what its cell keeps, and the watch caches' newest view of each of its objects.
//! `cargo bench -p state --features model --bench memory`.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod life;

use state::{
    Event, Key, Machine,
    observe::Object,
    vm::{Input, Sight, Vm, model::World},
};
use std::collections::BTreeMap;

#[global_allocator]
static HEAP: dhat::Alloc = dhat::Alloc;

const MACHINES: usize = 200;

fn live() -> usize {
    dhat::HeapStats::get().curr_bytes
}

fn name(object: &Object) -> &'static str {
    match object {
        Object::Vm(_) => "VM",
        Object::Vmi(_) => "VMI",
        Object::Pod(_) => "pod",
        Object::Claim(_) => "claim",
        Object::Revision(_) => "revision",
        Object::Pattern(_) => "pattern",
    }
}

fn main() {
    let _profiler = dhat::Profiler::builder().testing().build();
    let mut w = World::with(life::vm());
    life::settle(&mut w, 10_000);
    assert_eq!(w.printable(), "Running");
    life::connect_guest(&mut w);
    life::settle(&mut w, 10_000);
    // As a controller reads them: nothing of one machine is shared with another.
    let tape: Vec<String> = w.tape.iter().map(|(_, event)| serde_json::to_string(event).unwrap()).collect();
    let (mut cells, mut caches) = (Vec::with_capacity(MACHINES), Vec::with_capacity(MACHINES));
    let before = live();
    for _ in 0..MACHINES {
        let mut cell = Vm::new(Key::new("ns", "web"));
        let mut cache: BTreeMap<&str, Object> = BTreeMap::new();
        for line in &tape {
            let event: Event<Input> = serde_json::from_str(line).unwrap();
            if let Input::Observed(Sight::Present(object)) = &event.input {
                cache.insert(name(object), object.clone());
            }
            if !cell.knows(&event.input) {
                cell.step(&event);
            }
        }
        cells.push(cell);
        caches.push(cache.into_values().collect::<Vec<_>>());
    }
    let all = live() - before;
    let shapes = cells.len() * size_of::<Vm>();
    drop(caches);
    let without = live() - before;
    println!(
        "a running machine: {} bytes, of them the cell {} ({} of it itself)",
        (all + shapes) / MACHINES,
        (without + shapes) / MACHINES,
        size_of::<Vm>()
    );
    for wanted in ["VM", "VMI", "pod"] {
        let object =
            tape.iter().rev().map(|l| serde_json::from_str::<Event<Input>>(l).unwrap()).find_map(|e| match e.input {
                Input::Observed(Sight::Present(o)) if name(&o) == wanted => Some(o),
                _ => None,
            });
        let before = live();
        drop(object);
        println!("the view of its {wanted}: {} bytes", before - live());
    }
}
