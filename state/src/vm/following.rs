//! Metadata that is kept right while an instance runs: annotations that follow its template, and the label of a launcher that is
//! not of today's image.

use super::{
    cell::{At, Vm},
    command::Command,
};
use crate::{
    object::Class,
    observe::{Phase, VmiView},
};
use api::names;
use litemap::LiteMap;
use serde_json::{Map, Value, json};

/// What makes one set of annotations of another.
fn changes(have: &LiteMap<String, String>, want: &LiteMap<String, String>) -> Map<String, Value> {
    let all = have.keys().chain(want.keys().filter(|k| !have.contains_key(*k)));
    all.filter(|k| have.get(*k) != want.get(*k)).map(|k| (k.clone(), json!(want.get(k)))).collect()
}

impl Vm {
    /// What the annotations of a live instance lack beside the template of its VM.
    pub(super) fn following(&self, vmi: &VmiView) -> Map<String, Value> {
        match self.vm.get().filter(|_| self.own_vmi().is_some() && !vmi.phase.is_final()) {
            Some(vm) if vm.meta.deleting.is_none() && vmi.meta.deleting.is_none() => {
                changes(&vmi.following, &vm.following)
            }
            Some(_) | None => Map::new(),
        }
    }

    /// Value of the label that says whether the launcher is of another image than it would be today, where that changes.
    pub(super) fn outdated(&self, vmi: &VmiView) -> Option<Value> {
        let live = matches!(vmi.phase, Phase::Scheduled | Phase::Running) && vmi.meta.deleting.is_none();
        let image = vmi.status.launcher_container_image_version.as_ref().filter(|i| live && !i.is_empty())?;
        let (is, was) = (*image != self.config.launcher_image, vmi.labels.contains_key(names::LABEL_OUTDATED));
        (is != was).then(|| if is { json!("") } else { Value::Null })
    }

    /// What follows into the pod of a live instance, and that it is asked to leave its node.
    pub(super) fn plan_pod_annotations(&mut self, out: &mut Vec<Command>) {
        let Some(vmi) = self.vmi.get().filter(|v| !v.phase.is_final() && v.meta.deleting.is_none()) else { return };
        let Some(pod) = self.current_pod().filter(|p| p.meta.deleting.is_none() && !p.ended()) else { return };
        let mut want = vmi.following.clone();
        if vmi.status.evicting() {
            want.insert(names::ANN_EVICTING.to_owned(), "true".to_owned());
        }
        let changes = changes(&pod.following, &want);
        if changes.is_empty() || !self.pod.is_free(self.now) || !self.is_due(At::Pod, Class::Lazy) {
            return;
        }
        let Some(uid) = self.current_pod().map(|p| p.meta.uid.clone()) else { return };
        let body = json!({"metadata": {"uid": uid, "annotations": changes}});
        self.patch(At::Pod, self.pod_ref(), false, Class::Lazy, "annotations", body, out);
    }
}
