//! Amounts of named resources, and what a pod's containers amount to.

use std::collections::BTreeMap;

use serde_json::Value;

use super::quantity::Quantity;

/// Quantities by resource name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Amounts(pub BTreeMap<String, Quantity>);

impl Amounts {
    /// Reads a map of quantities; what is none is left out.
    #[must_use]
    pub fn read(map: Option<&Value>) -> Self {
        let parse = |(name, v): (&String, &Value)| Some((name.clone(), Quantity::of(v)?));
        Self(map.and_then(Value::as_object).into_iter().flatten().filter_map(parse).collect())
    }

    /// The amount of one resource, none where it is not named.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<Quantity> {
        self.0.get(name).copied()
    }

    /// The amount of one resource, 0 where it is not named.
    #[must_use]
    pub fn get(&self, name: &str) -> Quantity {
        self.find(name).unwrap_or_default()
    }

    /// Adds amounts.
    pub fn add(&mut self, other: &Self) {
        for (name, amount) in &other.0 {
            let mine = self.0.entry(name.clone()).or_default();
            *mine = *mine + *amount;
        }
    }

    /// Raises each amount to the other one where that is more.
    pub fn raise_to(&mut self, other: &Self) {
        for (name, amount) in &other.0 {
            let mine = self.0.entry(name.clone()).or_default();
            *mine = (*mine).max(*amount);
        }
    }

    /// The amounts of some names alone.
    #[must_use]
    pub fn only(&self, keep: impl Fn(&str) -> bool) -> Self {
        Self(self.0.iter().filter(|(name, _)| keep(name)).map(|(n, q)| (n.clone(), *q)).collect())
    }

    /// What a pod amounts to: its containers and sidecars together, or its largest step of initialisation. Init
    /// containers come in order, each with whether it is a sidecar.
    #[must_use]
    pub fn of_pod(containers: impl IntoIterator<Item = Self>, init: impl IntoIterator<Item = (Self, bool)>) -> Self {
        let mut sum = Self::default();
        for container in containers {
            sum.add(&container);
        }
        let (mut sidecars, mut first) = (Self::default(), Self::default());
        for (amounts, sidecar) in init {
            if sidecar {
                sidecars.add(&amounts);
                first.raise_to(&sidecars);
            } else {
                let mut with = sidecars.clone();
                with.add(&amounts);
                first.raise_to(&with);
            }
        }
        sum.add(&sidecars);
        sum.raise_to(&first);
        sum
    }

    /// `cpu=1,memory=2Gi`, as refusals list amounts.
    #[must_use]
    pub fn listed(&self) -> String {
        self.0.iter().map(|(name, q)| format!("{name}={}", q.of_resource(name))).collect::<Vec<_>>().join(",")
    }

    /// The amounts as a JSON map.
    #[must_use]
    pub fn to_value(&self) -> Value {
        self.0
            .iter()
            .map(|(name, q)| (name.clone(), Value::from(q.of_resource(name))))
            .collect::<serde_json::Map<_, _>>()
            .into()
    }
}
