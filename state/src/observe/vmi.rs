//! What follows from an instance as it was seen.

use super::{Phase, VmiView};
use crate::{Millis, PodUid, Timestamp, VmiUid};
use api::names;

impl VmiView {
    /// UID.
    pub fn vmi_uid(&self) -> VmiUid {
        VmiUid(self.meta.uid.0.clone())
    }

    /// A guest that ends without having been asked, although it was promised to be, has failed.
    pub fn is_promised_a_shutdown(&self) -> bool {
        self.acpi && self.grace > Millis(0)
    }

    /// Whether a phase is recorded.
    pub fn was(&self, phase: Phase) -> bool {
        self.phase == phase || self.status.phase_transition_timestamps.iter().any(|t| t.phase == phase.name())
    }

    /// Whether its node can be drained without asking it: KubeVirt's word for who does not count on a migration, or can be migrated.
    pub fn is_evictable(&self) -> bool {
        let can =
            crate::condition::find(&self.status.conditions, "LiveMigratable").is_some_and(|c| c.status != "False");
        !self.moves || can
    }

    /// Its launcher is of an image that is not the present one.
    pub fn is_outdated(&self) -> bool {
        self.labels.contains_key(names::LABEL_OUTDATED)
    }

    /// When it reached a phase.
    pub fn reached(&self, phase: Phase) -> Option<Timestamp> {
        let all = &self.status.phase_transition_timestamps;
        Timestamp::parse(&all.iter().find(|t| t.phase == phase.name())?.phase_transition_timestamp)
    }

    /// The pod that may run the domain.
    pub fn active_pod(&self) -> Option<PodUid> {
        self.status.active_pods.keys().next().map(|k| PodUid(k.clone()))
    }
}
