//! Waiting for conditions.

use anyhow::{Result, bail};
use std::time::{Duration, Instant};

/// Between two looks. Short against everything that is waited for, long against what a look costs.
const PAUSE: Duration = Duration::from_millis(100);

/// Asks until `look` gives something, at most for `limit`. `look` answers `Ok(Err(seen))` while it is not there yet; what was seen
/// last is in the error.
pub fn until<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Result<Result<T, String>>) -> Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        let last = match look() {
            Ok(Ok(found)) => return Ok(found),
            Ok(Err(seen)) => seen,
            Err(error) => format!("{error:#}"),
        };
        if Instant::now() >= deadline {
            bail!("waited {} s for {what}; last seen: {last}", limit.as_secs());
        }
        std::thread::sleep(PAUSE);
    }
}
