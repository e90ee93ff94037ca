//! What the command line says of journals.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde::{Deserialize, Serialize};
use telemetry::journal::{Config, DEFAULT_AGE, DEFAULT_SIZE, MIN_SIZE};

/// How much of a component's journal is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Args)]
pub struct Bounds {
    /// Bytes of journal that each component keeps (`64MiB`); 0 records nothing
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value_t = DEFAULT_SIZE)]
    pub journal_size: u64,
    /// How long journals are kept (`90m`, `36h`, `7d`); 0 for as long as there is room
    #[arg(long, value_name = "TIME", value_parser = seconds, default_value = "7d")]
    pub journal_age: u64,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { journal_size: DEFAULT_SIZE, journal_age: DEFAULT_AGE.as_secs() }
    }
}

impl Bounds {
    /// The journal of a component of this program.
    pub fn config(&self, dir: PathBuf, component: &'static str) -> Config {
        let age = Duration::from_secs(self.journal_age);
        Config { size: self.journal_size, age, ..Config::new(dir, component, build()) }
    }
}

/// Which build of the program runs.
pub fn build() -> String {
    std::env::current_exe().map_or_else(|_| env!("CARGO_PKG_VERSION").into(), |p| crate::up::agents::build(&p))
}

fn number(text: &str, units: &[(&str, u64)], example: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let wrong = || format!("`{text}` is not like {example}");
    let factor = units.iter().find(|(name, _)| *name == unit).map(|(_, f)| *f).ok_or_else(wrong)?;
    number.parse::<u64>().ok().and_then(|n| n.checked_mul(factor)).ok_or_else(wrong)
}

fn bytes(text: &str) -> Result<u64, String> {
    let units = [("", 1), ("k", 1000), ("M", 1000 * 1000), ("G", 1000 * 1000 * 1000)];
    let binary =
        [("Ki", 1 << 10), ("KiB", 1 << 10), ("Mi", 1 << 20), ("MiB", 1 << 20), ("Gi", 1 << 30), ("GiB", 1 << 30)];
    let size = number(text, &[&units[..], &binary[..]].concat(), "64MiB, 1Gi or 500000000")?;
    if size != 0 && size < MIN_SIZE {
        return Err(format!("a journal has at least {} KiB, or 0 for none", MIN_SIZE >> 10));
    }
    Ok(size)
}

/// Reads a time: `90m`, `36h`, `7d`.
pub fn seconds(text: &str) -> Result<u64, String> {
    number(text, &[("", 1), ("s", 1), ("m", 60), ("h", 3600), ("d", 86400)], "90m, 36h or 7d")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_have_units() {
        assert_eq!(bytes("64MiB"), Ok(64 << 20));
        assert_eq!(bytes("2G"), Ok(2_000_000_000));
        assert_eq!(bytes("0"), Ok(0));
        assert_eq!(seconds("7d"), Ok(DEFAULT_AGE.as_secs()));
        assert_eq!(seconds("90"), Ok(90));
        for bad in ["", "MiB", "-1", "1.5Gi", "64 MiB", "99999999999Gi", "1023Ki", "7d"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
        for bad in ["", "d", "1y", "-3h", "99999999999999999999s"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
