//! The chaos harness.
fn main() {}
