#![allow(clippy::unwrap_used)]
use super::*;
#[test]
fn placeholder() {
    let _ = Agent::new("n".into(), "p".into());
}
