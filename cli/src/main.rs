//! The `virtfold` binary.
fn main() {}
