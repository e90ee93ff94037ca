//! The websocket bridge: what a client sends to a console.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz::bridge(bytes));
