//! Guests that count aloud on their serial console, and whether they were ever interrupted.

use crate::e2e::manifest::{VmManifest, vm};
use regex::Regex;
use std::{fs, path::Path, sync::LazyLock};

/// Counts from 1 on, about one number a second.
const COUNT: &str = "#!/bin/sh\n\
    (i=0; while :; do i=$((i+1)); echo \"tick $i.\"; sleep 1; done >/dev/console 2>&1 </dev/null) &\n";

/// A machine whose guest counts.
pub fn machine(name: &str) -> VmManifest {
    vm(name).grace(20).memory("96Mi").user_data(COUNT)
}

/// The numbers that a guest has said on its console, in order: the last, or what is wrong with them. A console's older half may be gone.
pub fn counted(log: &Path) -> Result<u64, String> {
    static TICK: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"tick (\d+)\.").ok());
    let read = |path: &Path| fs::read(path).map(|b| String::from_utf8_lossy(&b).into_owned());
    let older = read(&log.with_extension("log.1")).unwrap_or_default();
    let text = older + &read(log).map_err(|e| format!("{}: {e}", log.display()))?;
    let numbers =
        TICK.iter().flat_map(|t| t.captures_iter(&text)).filter_map(|c| c.get(1)?.as_str().parse::<u64>().ok());
    let mut last = None;
    for n in numbers {
        if last.is_some_and(|l| n != l + 1) {
            return Err(format!("{} was followed by {n}", last.unwrap_or(0)));
        }
        last = Some(n);
    }
    last.ok_or_else(|| "it has not begun to count".into())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_gap_and_a_new_beginning_are_seen() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("console.log");
        fs::write(&log, "boot\r\ntick 1.\r\nlogin: tick 2.\r\ntick 3").unwrap();
        assert_eq!(counted(&log), Ok(2));
        fs::rename(&log, folder.path().join("console.log.1")).unwrap();
        fs::write(&log, ".\r\ntick 4.\r\n").unwrap();
        assert_eq!(counted(&log), Ok(4));
        fs::write(&log, ".\r\ntick 5.\r\n").unwrap();
        assert_eq!(counted(&log), Err("3 was followed by 5".into()));
        fs::write(&log, ".\r\nboot\r\ntick 1.\r\n").unwrap();
        assert_eq!(counted(&log), Err("3 was followed by 1".into()));
        fs::write(folder.path().join("none"), "boot").unwrap();
        assert!(counted(&folder.path().join("none")).is_err());
    }
}
