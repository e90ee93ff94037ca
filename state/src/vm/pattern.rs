//! The instancetype and the preference that a VM names: found by a live read, recorded in a ControllerRevision of the VM's own,
//! and only then named in the VM's status. An instance is made when the status names what it is made with, so a controller that
//! dies on the way makes it of the same, whatever became of the instancetype meanwhile.

use super::{
    cell::{At, Vm, What},
    command::{Command, Recipe, Source},
    waits::Wait,
};
use crate::{
    instancetype::{Matcher, MatcherRef, Role},
    object::{CommandId, Kind, ObjectRef, Pattern, Refusal, Settled},
    observe::{Object, PatternView, VmView},
    slot::Slot,
};
use serde::{Deserialize, Serialize};

/// How far a cell has come with what its VM names.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Search {
    slot: Slot<PatternView>,
    stage: Stage,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
enum Stage {
    /// It has to be read, or recorded once it is.
    #[default]
    Open,
    /// The record's name is taken, or the object changed meanwhile: look which.
    Taken,
    /// The record is there.
    Recorded,
}

impl Search {
    pub(super) fn depart(&mut self, id: CommandId) {
        self.slot.depart(id);
    }

    /// The object that the matcher means, as last read.
    fn found(&self, matcher: &Matcher, pattern: Pattern) -> Option<&PatternView> {
        self.slot.get().filter(|p| p.pattern == pattern && p.meta.name == matcher.name)
    }
}

impl Vm {
    /// All that the VM names is known and recorded.
    pub(super) fn patterns_are_known(&self, vm: &VmView) -> bool {
        vm.matchers.iter().all(|m| m.revision.is_some())
    }

    /// The name of the record that an instance is made with.
    pub(super) fn pattern_revision(vm: &VmView, role: Role) -> Option<String> {
        vm.matchers.iter().find(|m| m.role == role)?.revision.clone()
    }

    fn pattern_ref(&self, matcher: &Matcher, pattern: Pattern) -> ObjectRef {
        let namespace = if pattern.namespaced() { self.key.namespace.clone() } else { String::new() };
        ObjectRef { kind: Kind::Pattern(pattern), namespace, name: matcher.name.clone(), uid: Default::default() }
    }

    /// Looks for what the VM names and has no record of, and records it.
    pub(super) fn plan_patterns(&mut self, out: &mut Vec<Command>) {
        let named = self.vm.get().filter(|vm| !vm.matchers.is_empty() || !self.patterns.is_empty());
        let Some(vm) = named.cloned() else { return };
        let open = |m: &&Matcher| m.revision.is_none() && vm.meta.deleting.is_none();
        self.patterns.retain(|role, s| s.slot.in_flight() || vm.matchers.iter().filter(open).any(|m| m.role == *role));
        for matcher in vm.matchers.iter().filter(open) {
            let Some(pattern) = matcher.pattern() else { continue };
            let search = self.patterns.entry(matcher.role).or_default();
            if !search.slot.is_free(self.now) {
                if let Some(at) = search.slot.free_at(self.now) {
                    self.want_wake(at);
                }
                continue;
            }
            let Some(found) = search.found(matcher, pattern).cloned() else {
                search.slot.forget();
                search.stage = Stage::Open;
                let target = self.pattern_ref(matcher, pattern);
                let id = self.issue(At::Pattern(matcher.role), What::Confirm);
                out.push(Command::Confirm { id, target });
                continue;
            };
            let name = revision_name(&vm.meta.name, &found);
            let record = self.reference(Kind::ControllerRevision, name, Default::default());
            match self.patterns.get(&matcher.role).map(|s| s.stage).unwrap_or_default() {
                Stage::Open => {
                    let recipe = Recipe::Pattern { vm: vm.vm_uid(), name: vm.meta.name.clone() };
                    let object = ObjectRef { uid: found.meta.uid.clone(), ..self.pattern_ref(matcher, pattern) };
                    let source = Source { object, rv: found.meta.rv };
                    let id = self.issue(At::Pattern(matcher.role), What::Write);
                    out.push(Command::Create { id, recipe, source, target: record });
                }
                Stage::Taken => {
                    let id = self.issue(At::Pattern(matcher.role), What::Confirm);
                    out.push(Command::Confirm { id, target: record });
                }
                // The VM's status is written with all else that stands there.
                Stage::Recorded => {}
            }
        }
    }

    pub(super) fn pattern_settled(&mut self, role: Role, id: CommandId, what: &What, result: &Settled<Object>) {
        let now = self.now;
        let Some(search) = self.patterns.get_mut(&role) else { return };
        search.slot.land(id);
        match (what, result) {
            (_, Settled::Applied(Some(Object::Pattern(o)))) => {
                search.slot.succeeded();
                search.slot.fold(o.clone(), true);
            }
            (_, Settled::Applied(Some(Object::Revision(_)))) => {
                search.slot.succeeded();
                search.stage = Stage::Recorded;
            }
            (What::Write, Settled::Conflict) => search.stage = Stage::Taken,
            // It changed between the read and the record, or went.
            (What::Write, Settled::Gone) => search.slot.forget(),
            (What::Confirm, Settled::Gone) if search.stage == Stage::Taken => {
                search.slot.forget();
                search.stage = Stage::Open;
            }
            (What::Confirm, Settled::Gone) => {
                let message = "it does not exist".into();
                search.slot.failed(now, Some(Refusal { code: 404, reason: "NotFound".into(), message }));
            }
            (_, Settled::Refused(r) | Settled::Failed(r)) => search.slot.failed(now, Some(r.clone())),
            (_, Settled::Busy { after }) => search.slot.hold(now.after(*after)),
            (_, Settled::Applied(_) | Settled::Conflict | Settled::Gone | Settled::Unknown | Settled::Acked(_)) => {
                search.slot.failed(now, None);
            }
        }
    }

    /// The entry of the VM's status about what it names.
    pub(super) fn pattern_status(&self, vm: &VmView, role: Role, old: Option<&MatcherRef>) -> Option<MatcherRef> {
        let matcher = vm.matchers.iter().find(|m| m.role == role)?;
        if let Some(revision) = &matcher.revision {
            return Some(matcher.recorded(revision.clone()));
        }
        let search = self.patterns.get(&role).filter(|s| s.stage == Stage::Recorded);
        let found = search.and_then(|s| s.found(matcher, matcher.pattern()?));
        found.map(|f| matcher.recorded(revision_name(&vm.meta.name, f))).or_else(|| old.cloned())
    }

    /// What the VM names and is not to be found.
    pub(super) fn missing_pattern(&self, vm: &VmView) -> Option<Wait> {
        vm.matchers.iter().filter(|m| m.revision.is_none()).find_map(|m| {
            let Some(pattern) = m.pattern() else {
                let message = format!("got unexpected kind in {} matcher: {}", m.role.field(), m.kind);
                return Some(Wait::MissingPattern { role: m.role, what: m.role.field().into(), message });
            };
            let error = self.patterns.get(&m.role)?.slot.error()?;
            let target = self.pattern_ref(m, pattern);
            let place = if target.namespace.is_empty() { String::new() } else { format!("{}/", target.namespace) };
            let what = format!("{} {place}{}", pattern.name(), target.name);
            let message = match error.code {
                404 => format!("{what} does not exist"),
                _ => format!("{what}: {}: {}", error.reason, error.message),
            };
            Some(Wait::MissingPattern { role: m.role, what, message })
        })
    }
}

/// Name of the record of an instancetype or preference for a VM.
fn revision_name(vm: &str, found: &PatternView) -> String {
    let PatternView { meta, generation, .. } = found;
    format!("{vm}-{}-{}-{}-{generation}", meta.name, Pattern::VERSION, meta.uid)
}
