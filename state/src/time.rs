//! Time as data.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A duration in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Millis(pub u64);

impl Millis {
    /// From whole seconds.
    pub const fn secs(s: u64) -> Self {
        Self(s.saturating_mul(1000))
    }
}

/// Milliseconds since the Unix epoch, as some driver's clock told them. Displayed as Kubernetes does: RFC 3339 in UTC with
/// whole seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// This much later.
    #[must_use]
    pub const fn after(self, d: Millis) -> Self {
        Self(self.0.saturating_add(d.0))
    }

    /// RFC 3339 in UTC with milliseconds.
    pub fn precise(self) -> String {
        let whole = self.to_string();
        format!("{}.{:03}Z", whole.trim_end_matches('Z'), self.0 % 1000)
    }

    /// Time since `earlier`; zero where that is in the future.
    pub const fn since(self, earlier: Timestamp) -> Millis {
        Millis(self.0.saturating_sub(earlier.0))
    }

    /// Reads RFC 3339 (`2026-01-31T10:00:00Z`, fractions and offsets allowed). `None` where it is not that.
    pub fn parse(text: &str) -> Option<Self> {
        let b = text.as_bytes();
        let num = |from: usize, to: usize| -> Option<i64> {
            let s = text.get(from..to)?;
            s.bytes().all(|c| c.is_ascii_digit()).then(|| s.parse().ok()).flatten()
        };
        let sep = |i: usize, c: &[u8]| b.get(i).is_some_and(|x| c.contains(x));
        if !(sep(4, b"-") && sep(7, b"-") && sep(10, b"Tt ") && sep(13, b":") && sep(16, b":")) {
            return None;
        }
        let (y, mo, d) = (num(0, 4)?, num(5, 7)?, num(8, 10)?);
        let (h, mi, s) = (num(11, 13)?, num(14, 16)?, num(17, 19)?);
        if !(1..=12).contains(&mo) || !(1..=31).contains(&d) || h > 23 || mi > 59 || s > 60 {
            return None;
        }
        let mut i = 19;
        let mut ms = 0;
        if sep(i, b".") {
            i += 1;
            let mut scale = 100;
            while let Some(c) = b.get(i).filter(|c| c.is_ascii_digit()) {
                ms += i64::from(c - b'0') * scale;
                scale /= 10;
                i += 1;
            }
        }
        let offset = match b.get(i)? {
            b'Z' | b'z' if i + 1 == b.len() => 0,
            sign @ (b'+' | b'-') if i + 6 == b.len() && sep(i + 3, b":") => {
                let o = num(i + 1, i + 3)? * 60 + num(i + 4, i + 6)?;
                if *sign == b'-' { -o } else { o }
            }
            _ => return None,
        };
        let secs = days_from_civil(y, mo, d) * 86_400 + h * 3600 + mi * 60 + s - offset * 60;
        u64::try_from(secs * 1000 + ms).ok().map(Self)
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let secs = i64::try_from(self.0 / 1000).unwrap_or(i64::MAX);
        let (days, rest) = (secs / 86_400, secs % 86_400);
        let (y, m, d) = civil_from_days(days);
        write!(f, "{y:04}-{m:02}-{d:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
    }
}

/// Days since 1970-01-01 of a date of the proleptic Gregorian calendar. Years start in March, so that the leap day is last.
fn days_from_civil(y: i64, m: i64, d: i64) -> i64 {
    let y = if m <= 2 { y - 1 } else { y };
    let era = y.div_euclid(400);
    let yoe = y.rem_euclid(400);
    let doy = (153 * ((m + 9) % 12) + 2) / 5 + d - 1;
    era * 146_097 + yoe * 365 + yoe / 4 - yoe / 100 + doy - 719_468
}

fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let (era, doe) = (z.div_euclid(146_097), z.rem_euclid(146_097));
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let m = if mp < 10 { mp + 3 } else { mp - 9 };
    (yoe + era * 400 + i64::from(m <= 2), m, doy - (153 * mp + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rfc3339_round_trips() {
        for (text, ms) in [
            ("1970-01-01T00:00:00Z", 0),
            ("2000-02-29T23:59:59Z", 951_868_799_000),
            ("2026-11-30T05:26:00Z", 1_796_016_360_000),
            ("2100-03-01T00:00:00Z", 4_107_542_400_000),
        ] {
            assert_eq!(Timestamp(ms).to_string(), text);
            assert_eq!(Timestamp::parse(text), Some(Timestamp(ms)), "{text}");
        }
        assert_eq!(Timestamp::parse("2026-11-30T05:26:00.123456Z"), Some(Timestamp(1_796_016_360_123)));
        assert_eq!(Timestamp::parse("2026-11-30T07:26:00+02:00"), Some(Timestamp(1_796_016_360_000)));
        for bad in
            ["", "2026", "2026-13-01T00:00:00Z", "2026-11-30T05:26:00", "2026-11-30T05:26:00é", "+026-11-30T05:26:00Z"]
        {
            assert_eq!(Timestamp::parse(bad), None, "{bad}");
        }
    }
}
