//! Server-side apply.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz::server::apply(bytes));

libfuzzer_sys::fuzz_mutator!(|bytes: &mut [u8], size: usize, max: usize, seed: u32| { fuzz::mutate(bytes, size, max, seed) });
