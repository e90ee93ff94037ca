//! The clocks: BOOTTIME, which goes on while the machine sleeps, for deadlines; the calendar for people.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// A point on CLOCK_BOOTTIME.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Boottime(Duration);

/// How long one sleep towards a deadline lasts at most: tokio's clock stands still while the machine sleeps.
const STEP: Duration = Duration::from_secs(1);

impl Boottime {
    pub fn now() -> Self {
        let t = clock_gettime(ClockId::CLOCK_BOOTTIME).map(Duration::from).unwrap_or_default();
        Self(t)
    }

    pub fn after(duration: Duration) -> Self {
        Self(Self::now().0.saturating_add(duration))
    }

    /// Comes back at this time, a second late at most after a sleep of the machine.
    pub async fn reached(self) {
        loop {
            let left = self.0.saturating_sub(Self::now().0);
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.min(STEP)).await;
        }
    }
}

/// Microseconds since 1970.
pub(crate) fn unix_us() -> u64 {
    u64::try_from(jiff::Timestamp::now().as_microsecond()).unwrap_or_default()
}

/// Milliseconds since 1970.
pub(crate) fn unix_ms() -> u64 {
    u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or_default()
}
