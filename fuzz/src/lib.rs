//! The functions of the crates' own fuzz tests, for libFuzzer.
#![allow(clippy::unwrap_used, clippy::expect_used, dead_code)]

#[path = "../../gateway/tests/admission.rs"]
mod admission;
#[path = "../../embedded/tests/fuzz/changes.rs"]
mod changes;
#[path = "../../gateway/tests/fuzz/targets.rs"]
pub mod gate;
#[path = "../../embedded/tests/fuzz/targets.rs"]
pub mod server;
#[path = "../../gateway/tests/support.rs"]
mod support;

use changes::{Dice, change};
use serde_json::Value;
use std::sync::LazyLock;

/// Changes a case: one of JSON stays JSON most of the time, or nearly all would be refused by the parser.
pub fn mutate(bytes: &mut [u8], size: usize, max: usize, seed: u32) -> usize {
    let mut dice = Dice(u64::from(seed) << 20 | 0x9E37_79B9);
    let parsed = serde_json::from_slice::<Value>(&bytes[..size]).ok().filter(|_| dice.below(8) > 0);
    if let Some(mut case) = parsed {
        for _ in 0..=dice.below(3) {
            change(&mut case, &mut dice);
        }
        let text = case.to_string();
        if text.len() <= max {
            bytes[..text.len()].copy_from_slice(text.as_bytes());
            return text.len();
        }
    }
    libfuzzer_sys::fuzzer_mutate(bytes, size, max)
}

/// Sends bytes to the console of an instance, in one cluster for all.
pub fn bridge(bytes: &[u8]) {
    static CLUSTER: LazyLock<(tokio::runtime::Runtime, support::World)> = LazyLock::new(|| {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let world = runtime.block_on(async {
            let world = support::world().await;
            world.make_vmi(serde_json::json!({})).await;
            world
        });
        (runtime, world)
    });
    let (runtime, world) = &*CLUSTER;
    runtime.block_on(gate::say(world, bytes));
}
