//! The time of day as the cells are told it. For tests it can be another one than the machine's: a file says by how much, and may change
//! while the program runs, which is a clock that jumps.

use std::{
    path::PathBuf,
    sync::atomic::{AtomicI64, Ordering},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Names the file; it holds milliseconds, with a sign.
pub const VARIABLE: &str = "VIRTFOLD_CLOCK";
/// How often the file is read.
const LOOK: Duration = Duration::from_millis(100);

static OFF: AtomicI64 = AtomicI64::new(0);

/// Milliseconds since 1970.
pub fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX).saturating_add_signed(OFF.load(Ordering::Relaxed))
}

/// Follows the file that the environment names, where it names one, for as long as the process lives. A file that says nothing
/// says zero.
pub fn follow() {
    let Some(file) = std::env::var_os(VARIABLE).map(PathBuf::from) else { return };
    let read = move || std::fs::read_to_string(&file).ok().and_then(|t| t.trim().parse().ok()).unwrap_or(0);
    // Before anybody asks.
    OFF.store(read(), Ordering::Relaxed);
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(LOOK);
            OFF.store(read(), Ordering::Relaxed);
        }
    });
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn time_is_moved_by_the_offset_and_never_before_1970() {
        let real = now();
        OFF.store(-60_000, Ordering::Relaxed);
        assert!(now() < real - 50_000);
        OFF.store(i64::MIN, Ordering::Relaxed);
        assert_eq!(now(), 0);
        OFF.store(0, Ordering::Relaxed);
        assert!(now() >= real);
    }
}
