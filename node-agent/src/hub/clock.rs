//! Time for the cells: the wall clock as it was at the start, moved on by one that never goes back.

use std::time::{Duration, Instant};

use state::Timestamp;

#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    wall: u64,
    began: Instant,
}

impl Clock {
    pub fn start() -> Self {
        Self { wall: telemetry::clock::now(), began: Instant::now() }
    }

    pub fn now(&self) -> Timestamp {
        let since = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        Timestamp(self.wall.saturating_add(since))
    }

    /// At least a millisecond, so that a deadline is past when it is said to be.
    pub fn until(&self, at: Timestamp) -> Duration {
        Duration::from_millis(at.since(self.now()).0 + 1)
    }
}
