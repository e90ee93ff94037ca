//! Waiting for what comes by itself. Tests of other crates use it, too.

use std::time::{Duration, Instant};

/// Polls until something holds.
pub async fn eventually<F, Fut>(what: &str, mut holds: F)
where
    F: FnMut() -> Fut,
    Fut: Future<Output = bool>,
{
    let start = Instant::now();
    while !holds().await {
        assert!(start.elapsed() < Duration::from_secs(30), "not within 30 s: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
