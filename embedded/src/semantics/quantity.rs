//! Resource quantities (`100m`, `1Gi`, `1e3`).

use std::cmp::Ordering;

use serde_json::Value;

/// A quantity as a count of thousandths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Quantity(pub i128);

impl Quantity {
    /// Reads a quantity; none when it is spelled wrongly.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (negative, digits) = match text.as_bytes().first()? {
            b'-' => (true, &text[1..]),
            b'+' => (false, &text[1..]),
            _ => (false, text),
        };
        let end = digits.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(digits.len());
        let (number, suffix) = digits.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return None;
        }
        let (binary, exponent): (u32, i32) = match suffix {
            "" => (0, 0),
            "n" => (0, -9),
            "u" => (0, -6),
            "m" => (0, -3),
            "k" => (0, 3),
            "M" => (0, 6),
            "G" => (0, 9),
            "T" => (0, 12),
            "P" => (0, 15),
            "E" => (0, 18),
            "Ki" => (10, 0),
            "Mi" => (20, 0),
            "Gi" => (30, 0),
            "Ti" => (40, 0),
            "Pi" => (50, 0),
            "Ei" => (60, 0),
            other => {
                let exp = other.strip_prefix(['e', 'E'])?;
                (0, exp.parse().ok().filter(|e: &i32| e.abs() <= 18)?)
            }
        };
        let fraction: String = fraction.chars().take(9).collect();
        let mut milli: i128 = format!("0{whole}{fraction}").parse().ok()?;
        milli = milli.checked_mul(1_i128 << binary)?;
        let scale = exponent + 3 - i32::try_from(fraction.len()).ok()?;
        let milli = match scale.cmp(&0) {
            Ordering::Less => {
                let by = 10_i128.checked_pow(scale.unsigned_abs())?;
                // Rounded away from zero, as Kubernetes does.
                (milli + by - 1) / by
            }
            _ => milli.checked_mul(10_i128.checked_pow(scale.unsigned_abs())?)?,
        };
        Some(Self(if negative { -milli } else { milli }))
    }

    /// Reads a quantity as JSON has it, a text or a number.
    #[must_use]
    pub fn of(v: &Value) -> Option<Self> {
        match v {
            Value::String(s) => Self::parse(s),
            Value::Number(n) => Self::parse(&n.to_string()),
            _ => None,
        }
    }

    /// The text for an amount of a resource: bytes in powers of two where they are such, all else in powers of ten.
    #[must_use]
    pub fn of_resource(self, name: &str) -> String {
        let bytes = ["memory", "storage"].iter().any(|b| name.ends_with(b)) || name.contains("hugepages-");
        if self.0 % 1000 != 0 || (bytes && (self.0 / 1000) % 1024 == 0) {
            return self.to_string();
        }
        let whole = self.0 / 1000;
        for (digits, suffix) in [(18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")] {
            let unit = 10_i128.pow(digits);
            if whole != 0 && whole % unit == 0 {
                return format!("{}{suffix}", whole / unit);
            }
        }
        whole.to_string()
    }

    /// The whole number, rounded up.
    #[must_use]
    pub fn whole(self) -> i128 {
        self.0.div_euclid(1000) + i128::from(self.0.rem_euclid(1000) != 0)
    }
}

impl std::ops::Add for Quantity {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl std::ops::Sub for Quantity {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}

impl std::fmt::Display for Quantity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0 % 1000 != 0 {
            return write!(f, "{}m", self.0);
        }
        let whole = self.0 / 1000;
        for (shift, suffix) in [(40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")] {
            if whole != 0 && whole % (1 << shift) == 0 {
                return write!(f, "{}{suffix}", whole >> shift);
            }
        }
        write!(f, "{whole}")
    }
}

#[cfg(test)]
mod tests {
    use super::Quantity;

    #[test]
    fn quantities_are_read_and_written() {
        for (text, milli) in [
            ("1", 1000),
            ("100m", 100),
            ("1.5", 1500),
            ("1Ki", 1_024_000),
            ("1.5Gi", 1_610_612_736_000),
            ("1e3", 1_000_000),
            ("-2", -2000),
            ("1n", 1),
            (".5", 500),
        ] {
            assert_eq!(Quantity::parse(text), Some(Quantity(milli)), "{text}");
        }
        for text in ["", "x", "1x", "1.2.3", "Gi", "1e", "--1", "1 Gi"] {
            assert_eq!(Quantity::parse(text), None, "{text}");
        }
        assert_eq!(Quantity(2_147_483_648_000).to_string(), "2Gi");
        assert_eq!(Quantity(250).to_string(), "250m");
        for (name, text) in [
            ("memory", "1536Mi"),
            ("memory", "1G"),
            ("pods", "2k"),
            ("cpu", "1024"),
            ("pods", "2"),
            ("requests.memory", "3Gi"),
            ("limits.cpu", "1500m"),
            ("a.storageclass.storage.k8s.io/requests.storage", "1Ti"),
        ] {
            assert_eq!(Quantity::parse(text).map(|q| q.of_resource(name)).as_deref(), Some(text), "{name}");
        }
    }
}
