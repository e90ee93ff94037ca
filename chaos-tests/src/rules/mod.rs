//! Rules that a compiler does not check.

pub mod edges;
pub mod tidy;

use std::path::PathBuf;

/// The root of the repository.
pub fn root() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.parent().map(PathBuf::from).unwrap_or(here)
}
