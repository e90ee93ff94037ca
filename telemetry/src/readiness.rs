//! Whether a part can do its work, as those say who know: each names what is missing, and takes it back.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// What is missing, by what it is. A part without any of it is ready. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Readiness(Arc<Mutex<BTreeMap<&'static str, String>>>);

impl Readiness {
    /// A part that is not ready before all of these are there.
    pub fn without(missing: &[&'static str]) -> Self {
        let all = missing.iter().map(|what| (*what, "it is not there yet".to_owned())).collect();
        Self(Arc::new(Mutex::new(all)))
    }

    /// Something is there.
    pub fn has(&self, what: &'static str) {
        self.all().remove(what);
    }

    /// Something is missing, in words.
    pub fn lacks(&self, what: &'static str, why: impl ToString) {
        self.all().insert(what, why.to_string());
    }

    /// What is missing, in words.
    ///
    /// # Errors
    /// The first thing that is missing.
    pub fn check(&self) -> Result<(), String> {
        self.all().iter().next().map_or(Ok(()), |(what, why)| Err(format!("{what}: {why}")))
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<&'static str, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_ready_when_nothing_is_missing() {
        let part = Readiness::without(&["caches", "lease"]);
        part.has("caches");
        assert_eq!(part.check(), Err("lease: it is not there yet".to_owned()));
        part.clone().has("lease");
        assert_eq!(part.check(), Ok(()));
        part.lacks("lease", "nobody answers");
        assert_eq!(part.check(), Err("lease: nobody answers".to_owned()));
    }
}
