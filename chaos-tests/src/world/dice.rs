//! The one generator that makes every choice of a run.

/// splitmix64: small, the same everywhere, and every seed is a good one.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    /// A generator.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 bits.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `bound`; zero where that is zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.draw() % bound }
    }

    /// From `low` to `high`, both possible.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low) + 1)
    }

    /// True in so many of a thousand cases.
    pub fn chance(&mut self, per_mille: u32) -> bool {
        per_mille > 0 && self.below(1000) < u64::from(per_mille)
    }

    /// One of them.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        let n = self.below(of.len() as u64);
        of.get(usize::try_from(n).unwrap_or(0))
    }

    /// Twelve hex digits that look like a UID of its kind.
    pub fn id(&mut self, kind: &str) -> String {
        format!("{kind}-{:012x}", self.draw() & 0xffff_ffff_ffff)
    }
}
