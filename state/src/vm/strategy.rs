//! Shall the VM run? The table of run strategies, requests of users, and the crash-loop back-off.

use super::cell::Vm;
use crate::{
    Millis, Timestamp, Uid, hash_below,
    observe::{Phase, Request, StartFailure, Strategy, VmView, VmiView},
};
use std::borrow::Cow;

/// Key in the data of a Start that the controller itself appended: the failed VMI that it makes up for.
pub const RERUN_OF: &str = "virtfold.io/rerun-of";

/// Longest pause between failed starts.
const START_BACKOFF_MAX: Millis = Millis::secs(300);

/// What the strategy asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wish {
    /// There shall be a VMI.
    Run {
        /// With stopped vCPUs.
        paused: bool,
    },
    /// As it is.
    Stay,
    /// The VMI shall go.
    Stop,
    /// A start, but not yet.
    NotBefore(Timestamp),
    /// The spec itself has to change to Always first: a halted VM was asked to start.
    Unhalt,
    /// The strategy is not one that can be carried out.
    Bad(&'static str),
}

impl Vm {
    /// What the strategy asks for, given the VM and its VMI.
    pub(super) fn wish(&self, vm: &VmView) -> Wish {
        let requests = self.requests(vm);
        let head = requests.first();
        let start = head.filter(|r| r.action == "Start");
        let run = || match self.not_before(vm) {
            Some(t) if t > self.now && vm.strategy != Strategy::Once => Wish::NotBefore(t),
            _ => Wish::Run { paused: start.is_some_and(Request::asks_for_paused) },
        };
        let Some(vmi) = self.own_vmi() else {
            return match vm.strategy {
                Strategy::Always | Strategy::Once => run(),
                Strategy::RerunOnFailure => {
                    let switched = vm.status.run_strategy.as_deref() != Some(Strategy::RerunOnFailure.name());
                    if start.is_some() || switched { run() } else { Wish::Stay }
                }
                Strategy::Manual if start.is_some() => {
                    Wish::Run { paused: start.is_some_and(Request::asks_for_paused) }
                }
                Strategy::Halted if start.is_some() => Wish::Unhalt,
                Strategy::Manual | Strategy::Halted => Wish::Stay,
                Strategy::WaitAsReceiver => Wish::Bad("run strategy WaitAsReceiver is not supported"),
                Strategy::Invalid => {
                    Wish::Bad("running and runStrategy exclude each other, or the strategy is unknown")
                }
            };
        };
        if vmi.meta.deleting.is_some() {
            return Wish::Stay;
        }
        let stop = head.is_some_and(|r| r.action == "Stop" && r.uid.as_deref() == Some(vmi.meta.uid.as_str()));
        match vm.strategy {
            Strategy::Always | Strategy::RerunOnFailure if stop || vmi.phase.is_final() => Wish::Stop,
            Strategy::Manual if stop => Wish::Stop,
            Strategy::Halted => Wish::Stop,
            Strategy::Always | Strategy::RerunOnFailure | Strategy::Manual | Strategy::Once => Wish::Stay,
            Strategy::WaitAsReceiver => Wish::Bad("run strategy WaitAsReceiver is not supported"),
            Strategy::Invalid => Wish::Bad("running and runStrategy exclude each other, or the strategy is unknown"),
        }
    }

    /// The VMI, where the VM controls it.
    pub(super) fn own_vmi(&self) -> Option<&VmiView> {
        let vm = self.vm.get()?.meta.uid.as_str();
        self.vmi.get().filter(|v| v.owner.as_ref().is_some_and(|o| o.as_str() == vm))
    }

    /// The requests as they should stand: what is done is taken off, a failed run of RerunOnFailure appended.
    pub(super) fn requests<'a>(&self, vm: &'a VmView) -> Cow<'a, [Request]> {
        let asked = &vm.status.state_change_requests;
        if asked.is_empty() && !self.own_vmi().is_some_and(|v| self.reruns(vm, v, None)) {
            return Cow::Borrowed(asked);
        }
        let mut q = asked.clone();
        // RerunOnFailure alone asks for reruns; under another strategy that the machine has now, that one decides what follows.
        if vm.strategy != Strategy::RerunOnFailure {
            q.retain(|r| !r.data.contains_key(RERUN_OF));
        }
        match vm.strategy {
            // Who halts a machine overrides the starts that were asked for before; else the rest of a restart would undo it.
            // A halted machine cannot be asked to restart, so a Start behind a Stop is older than that; and it is asked to
            // start by its spec, so that any other Start than a paused one is of another strategy.
            Strategy::Halted => {
                let before = vm.status.run_strategy.as_deref().is_some_and(|s| !s.is_empty() && s != "Halted");
                let stop = q.iter().position(|r| r.action == "Stop").unwrap_or(q.len());
                let mut newer = if before { 0 } else { stop };
                q.retain(|r| {
                    let older = newer == 0;
                    newer = newer.saturating_sub(1);
                    r.action != "Start" || (!older && r.asks_for_paused())
                });
            }
            // It takes no requests: these are of another strategy that it had.
            Strategy::Once => q.clear(),
            Strategy::Always
            | Strategy::RerunOnFailure
            | Strategy::Manual
            | Strategy::WaitAsReceiver
            | Strategy::Invalid => {}
        }
        let vmi = self.own_vmi();
        while let Some(head) = q.first() {
            let done = match (head.action.as_str(), vmi) {
                // One of another UID may be an old sight of the one before.
                ("Stop", Some(v)) => match &head.uid {
                    None => true,
                    Some(u) => *u != v.meta.uid.0 && self.vmi.is_tombstoned(&Uid(u.clone())),
                },
                // Not having seen a VMI is no proof that the one to be stopped is gone.
                ("Stop", None) => match &head.uid {
                    None => true,
                    Some(u) => self.vmi.is_tombstoned(&Uid(u.clone())) || self.vmi.is_absent(),
                },
                // The start of a VMI that exists has been carried out, however that VMI ended.
                ("Start", Some(v)) => v.meta.deleting.is_none() && head.data.get(RERUN_OF) != Some(&v.meta.uid.0),
                ("Start", None) => false,
                // Nobody knows what that asks for; it would block all others.
                _ => true,
            };
            if !done {
                break;
            }
            q.remove(0);
        }
        if let Some(v) = vmi.filter(|v| self.reruns(vm, v, q.first())) {
            let data = [(RERUN_OF.to_owned(), v.meta.uid.0.clone())].into();
            q.push(Request { action: "Start".into(), uid: None, data });
        }
        Cow::Owned(q)
    }

    fn reruns(&self, vm: &VmView, vmi: &VmiView, head: Option<&Request>) -> bool {
        let stopped = head.is_some_and(|r| r.action == "Stop");
        let appended = vm.status.state_change_requests.iter().any(|r| r.data.get(RERUN_OF) == Some(&vmi.meta.uid.0));
        vm.strategy == Strategy::RerunOnFailure
            && vmi.phase == Phase::Failed
            && vmi.meta.deleting.is_none()
            && !stopped
            && !appended
    }

    /// The crash-loop state as it should stand.
    pub(super) fn start_failure(&self, vm: &VmView) -> Option<StartFailure> {
        if !vm.strategy.backs_off() {
            return None;
        }
        let old = vm.status.start_failure.clone();
        let Some(vmi) = self.own_vmi() else { return old };
        if vmi.was(Phase::Running) {
            return None;
        }
        let counted = old.as_ref().is_some_and(|o| o.last_failed_vmi_uid == vmi.meta.uid.0);
        if !vmi.phase.is_final() || counted || is_stopped(vm, vmi) {
            return old;
        }
        let n = old.map_or(0, |o| o.consecutive_fail_count).saturating_add(1);
        Some(StartFailure {
            consecutive_fail_count: n,
            last_failed_vmi_uid: vmi.meta.uid.0.clone(),
            retry_after_timestamp: Some(self.now.after(start_backoff(&vmi.meta.uid, n)).to_string()),
        })
    }

    /// No start before.
    fn not_before(&self, vm: &VmView) -> Option<Timestamp> {
        self.start_failure(vm)?.retry_after_timestamp.as_deref().and_then(Timestamp::parse)
    }
}

/// The VMI ended because it was to be stopped: that is no failed start. (A failed start is counted before its VMI is deleted.)
fn is_stopped(vm: &VmView, vmi: &VmiView) -> bool {
    let asked = |r: &Request| r.action == "Stop" && r.uid.as_deref() == Some(vmi.meta.uid.as_str());
    vmi.meta.deleting.is_some() || vm.status.state_change_requests.iter().any(asked)
}

/// Pause after the n-th failed start in a row: `min(300, 10 n² + jitter)` seconds, jitter below `5 n²` seconds, derived from
/// the VMI's UID.
pub fn start_backoff(vmi: &Uid, n: u64) -> Millis {
    let base = n.saturating_mul(n).saturating_mul(10_000);
    let jitter = hash_below(&["start-backoff", vmi.as_str()], (base / 2).max(1));
    Millis(base.saturating_add(jitter).min(START_BACKOFF_MAX.0))
}
