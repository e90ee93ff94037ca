//! What the controller counts, and what its caches tell when somebody asks.
//!
//! The driver, which steps every cell, pays a few atomic additions; what there is (machines, instances, sessions) is read from the
//! caches at each scrape and costs nothing in between.

use crate::{
    hub::{Hub, Queue},
    sessions::Sessions,
};
use state::{
    Epoch, Timestamp, Uid,
    object::Settled,
    observe::{Phase, Told, VmView, VmiView},
    trace::Finished,
    vm::Command,
};
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use telemetry::{
    TraceContext,
    journal::Flusher,
    metrics::{Counter, Histogram, Registry, Sheet, Timer, catalogue as c},
};

/// The queue's name in the metrics.
const QUEUE: &str = "cells";
/// What KubeVirt says where there is nothing to say.
const NONE: &str = "<none>";
/// What it says of instance types that are not its own.
const OTHER: &str = "<other>";
/// Whose instance types are named.
const VENDORS: [&str; 2] = ["kubevirt.io", "redhat.com"];

/// What a running controller can see broken ([`state::vm::Vm::violated`]).
const INVARIANTS: [&str; 2] = ["one-domain", "one-pod"];

/// Kinds of cells, in the order of [`Metrics::step`].
#[derive(Debug, Clone, Copy)]
pub(crate) enum Cell {
    Vm,
    Set,
    Node,
}

impl Cell {
    const ALL: [(Self, &'static str); 3] = [(Self::Vm, "vm"), (Self::Set, "set"), (Self::Node, "node")];
}

/// What the driver counts.
pub(crate) struct Metrics {
    steps: [Timer; 3],
    cells: Arc<[AtomicU64; 3]>,
    commands: Counter,
    operation: Histogram,
    failures: Counter,
    violations: Counter,
    waited: Timer,
    worked: Timer,
    phases: Phases,
}

impl Metrics {
    pub(crate) fn new(registry: &Registry, now: Timestamp) -> Self {
        let cells: Arc<[AtomicU64; 3]> = Arc::default();
        let told = cells.clone();
        registry.source("cells", move |sheet| {
            for (cell, name) in Cell::ALL {
                sheet.tell(&c::CELLS, &[name], told[cell as usize].load(Ordering::Relaxed));
            }
        });
        let violations = registry.counter(&c::VIOLATIONS);
        // There from the beginning, so that the first one is a growth.
        INVARIANTS.iter().for_each(|invariant| violations.add_many(&[invariant], 0));
        Self {
            violations,
            steps: Cell::ALL.map(|(_, name)| registry.timer(&c::STEP, &[name])),
            cells,
            commands: registry.counter(&c::COMMANDS),
            operation: registry.histogram(&c::OPERATION_STEP),
            failures: registry.counter(&c::OPERATION_FAILURES),
            waited: registry.timer(&c::QUEUE_WAIT, &[QUEUE]),
            worked: registry.timer(&c::QUEUE_WORK, &[QUEUE]),
            phases: Phases::new(registry, now),
        }
    }

    /// A cell was stepped.
    pub(crate) fn step(&self, cell: Cell, took: Duration) {
        self.steps[cell as usize].observe(took);
    }

    /// How many cells there are.
    pub(crate) fn cells(&self, cell: Cell, count: usize) {
        self.cells[cell as usize].store(count as u64, Ordering::Relaxed);
    }

    /// An entry of the queue was taken, and folded.
    pub(crate) fn entry(&self, waited: Duration, worked: Duration) {
        self.waited.observe(waited);
        self.worked.observe(worked);
    }

    /// Something is so that must not be.
    pub(crate) fn violated(&self, invariant: &'static str) {
        self.violations.add(&[invariant]);
    }

    /// A command settled.
    pub(crate) fn settled(&self, command: &'static str, outcome: &'static str) {
        self.commands.add(&[command, outcome]);
    }

    /// For those who carry commands out beside the driver.
    pub(crate) fn commands(&self) -> Counter {
        self.commands.clone()
    }

    /// A step of an operation is over.
    pub(crate) fn finished(&self, f: &Finished) {
        let labels = [f.step.operation(), f.step.name()];
        let took = Duration::from_millis(f.end.since(f.start).0);
        self.operation.observe(&labels, took, TraceContext::parse(&f.traceparent));
        if f.error.is_some() {
            self.failures.add(&labels);
        }
    }

    /// An instance was seen.
    pub(crate) fn saw(&mut self, vmi: &VmiView) {
        self.phases.saw(vmi);
    }

    /// An instance is gone.
    pub(crate) fn gone(&mut self, uid: &Uid) {
        self.phases.known.remove(uid);
    }
}

/// The word for a command.
pub(crate) fn command(command: &Command) -> &'static str {
    match command {
        Command::Create { .. } => "create",
        Command::Patch { .. } => "patch",
        Command::Delete { .. } => "delete",
        Command::Confirm { .. } => "confirm",
        Command::Survey { .. } => "survey",
        Command::Instruct { .. } => "instruct",
        Command::Note(_) => "note",
        Command::Wake { .. } => "wake",
    }
}

/// The word for how a command settled.
pub(crate) fn outcome<O>(settled: &Settled<O>) -> &'static str {
    match settled {
        Settled::Applied(_) => "applied",
        Settled::Conflict => "conflict",
        Settled::Gone => "gone",
        Settled::Refused(_) => "refused",
        Settled::Busy { .. } => "busy",
        Settled::Unknown => "unknown",
        Settled::Failed(_) => "failed",
        Settled::Acked(_) => "acked",
    }
}

/// Times between phases, from what the status says: neither a late look nor another leader changes them.
struct Phases {
    between: Histogram,
    creation: Histogram,
    deletion: Histogram,
    /// What came before was counted by somebody else.
    since: Timestamp,
    /// How many transitions of each instance were counted.
    known: HashMap<Uid, usize>,
}

impl Phases {
    fn new(registry: &Registry, since: Timestamp) -> Self {
        Self {
            between: registry.histogram(&c::VMI_PHASE_TIME),
            creation: registry.histogram(&c::VMI_FROM_CREATION),
            deletion: registry.histogram(&c::VMI_FROM_DELETION),
            since,
            known: HashMap::new(),
        }
    }

    fn saw(&mut self, vmi: &VmiView) {
        let all = &vmi.status.phase_transition_timestamps;
        let known = self.known.entry(vmi.meta.uid.clone()).or_default();
        let trace = vmi.traceparent.as_deref().and_then(TraceContext::parse);
        let when = |i: usize| all.get(i).and_then(|t| Timestamp::parse(&t.phase_transition_timestamp));
        let took = |from: Timestamp, to: Timestamp| Duration::from_millis(to.since(from).0);
        for i in *known..all.len() {
            // Timestamps of objects have whole seconds.
            let Some(at) = when(i).filter(|at| at.0 + 1000 > self.since.0) else { continue };
            let phase = all[i].phase.as_str();
            if let Some(before) = i.checked_sub(1).and_then(when) {
                self.between.observe(&[phase, &all[i - 1].phase], took(before, at), trace);
            }
            if let Some(created) = vmi.meta.created {
                self.creation.observe(&[phase], took(created, at), trace);
            }
            if let Some(deleted) = vmi.meta.deleting.filter(|_| Phase::parse(phase).is_final()) {
                self.deletion.observe(&[phase], took(deleted, at), trace);
            }
        }
        *known = all.len();
    }
}

/// What a leader's caches tell.
pub(crate) struct Caches {
    pub vms: Arc<Hub<VmView>>,
    pub vmis: Arc<Hub<VmiView>>,
    pub sessions: Arc<Sessions>,
    pub queue: Arc<Queue>,
    pub journal: Flusher,
    pub epoch: Epoch,
}

/// The name under which the caches are told.
const SOURCE: &str = "controller";

/// A controller that waits for its turn.
pub(crate) fn stands_by(registry: &Registry) {
    registry.source(SOURCE, |sheet| status(sheet, false));
}

/// A controller that leads.
pub(crate) fn leads(registry: &Registry, caches: Caches) {
    registry.source(SOURCE, move |sheet| {
        status(sheet, true);
        caches.tell(sheet);
    });
}

fn status(sheet: &mut Sheet, leads: bool) {
    sheet.tell(&c::CONTROLLER_LEADS, &[], leads);
}

impl Caches {
    fn tell(&self, sheet: &mut Sheet) {
        sheet.tell(&c::EPOCH, &[], self.epoch.0);
        let (bytes, dropped) = self.journal.counts();
        sheet.tell(&c::JOURNAL_BYTES, &[], bytes);
        sheet.tell(&c::JOURNAL_DROPPED, &[], dropped);
        let (adds, depth) = self.queue.counts();
        sheet.tell(&c::QUEUE_ADDS, &[QUEUE], adds);
        sheet.tell(&c::QUEUE_DEPTH, &[QUEUE], depth);
        let (open, opened, lost) = self.sessions.counts();
        sheet.tell(&c::SESSIONS, &[], open);
        sheet.tell(&c::SESSIONS_OPENED, &[], opened);
        sheet.tell(&c::SESSIONS_LOST, &[], lost);
        let vmis = self.vmis.all();
        let instances: HashMap<_, _> = vmis.iter().map(|v| (v.key(), v.view.clone())).collect();
        for vm in self.vms.all() {
            let key = vm.key();
            machine(sheet, &key.namespace, &key.name, &vm.view, instances.get(&key).map(AsRef::as_ref));
        }
        let outdated = vmis.iter().filter(|v| v.view.is_outdated()).count();
        sheet.tell(&c::VMI_OUTDATED, &[], outdated);
        for vmi in &vmis {
            let key = vmi.key();
            instance(sheet, &key.namespace, &key.name, &vmi.view);
        }
    }
}

/// KubeVirt's groups of the words that people read.
fn group(status: &str) -> &'static str {
    match status {
        "provisioning" | "starting" | "waitingforvolumebinding" => "starting",
        "running" => "running",
        "migrating" | "waitingforreceiver" => "migrating",
        "stopped" | "paused" | "stopping" | "terminating" | "halted" => "non_running",
        _ => "error",
    }
}

fn instance_type(name: Option<&str>) -> &str {
    match name {
        None | Some("") => NONE,
        Some(name) if VENDORS.iter().any(|v| name.contains(v)) => name,
        Some(_) => OTHER,
    }
}

/// What is said of a guest, in the order of the names.
fn described(all: &state::LiteMap<String, String>) -> [&str; 7] {
    api::names::ANN_DESCRIBING.map(|key| all.get(key).map_or(NONE, String::as_str))
}

fn machine(sheet: &mut Sheet, namespace: &str, name: &str, vm: &VmView, vmi: Option<&VmiView>) {
    let status = vm.status.printable_status.to_lowercase();
    let group = group(&status);
    let [os, workload, flavor, ..] = described(&vm.described);
    let found = |reference: &Option<state::instancetype::MatcherRef>| reference.as_ref()?.name.clone();
    let machine_type = vmi.and_then(|v| v.status.machine.get("type")).and_then(|t| t.as_str()).unwrap_or(NONE);
    let (of_type, preference) = (found(&vm.status.instancetype_ref), found(&vm.status.preference_ref));
    let told = [
        name,
        namespace,
        os,
        workload,
        flavor,
        machine_type,
        instance_type(of_type.as_deref()),
        instance_type(preference.as_deref()),
        &status,
        group,
    ];
    sheet.tell(&c::VM_INFO, &told, 1_u64);
    let seconds = |t: Timestamp| t.0 / 1000;
    let since = last_transition(vm, vmi).map_or(0, seconds);
    for (def, of) in [
        (&c::VM_STARTING_SINCE, "starting"),
        (&c::VM_RUNNING_SINCE, "running"),
        (&c::VM_MIGRATING_SINCE, "migrating"),
        (&c::VM_NOT_RUNNING_SINCE, "non_running"),
        (&c::VM_ERROR_SINCE, "error"),
    ] {
        sheet.tell(def, &[name, namespace], if of == group { since } else { 0 });
    }
    if let Some(created) = vm.meta.created {
        sheet.tell(&c::VM_CREATED, &[name, namespace], seconds(created));
    }
}

/// The newest of the times at which something changed about a machine, as KubeVirt finds it.
fn last_transition(vm: &VmView, vmi: Option<&VmiView>) -> Option<Timestamp> {
    let of_vm = vm.status.conditions.iter();
    let conditions = of_vm.chain(vmi.into_iter().flat_map(|v| &v.status.conditions));
    let conditions = conditions.filter_map(|c| Timestamp::parse(c.last_transition_time.as_deref()?));
    let phases = vmi.into_iter().flat_map(|v| &v.status.phase_transition_timestamps);
    let phases = phases.filter_map(|t| Timestamp::parse(&t.phase_transition_timestamp));
    conditions.chain(phases).chain(vm.meta.deleting).chain(vm.meta.created).max()
}

fn instance(sheet: &mut Sheet, namespace: &str, name: &str, vmi: &VmiView) {
    let node = vmi.status.node_name.as_deref().unwrap_or_default();
    let os = vmi.status.guest_os_info.value();
    let guest = |key: &str| os.get(key).and_then(|v| v.as_str()).unwrap_or_default();
    let [os, workload, flavor, of_type, of_all, preference, preference_of_all] = described(&vmi.described);
    let one = |own, of_all| if own == NONE { Some(of_all).filter(|n| *n != NONE) } else { Some(own) };
    let phase = vmi.status.phase.to_lowercase();
    let pod = vmi.status.active_pods.keys().next().map(|_| state::launcher_pod_name(name, &vmi.vmi_uid()));
    sheet.tell(
        &c::VMI_INFO,
        &[
            node,
            namespace,
            name,
            &phase,
            os,
            workload,
            flavor,
            instance_type(one(of_type, of_all)),
            instance_type(one(preference, preference_of_all)),
            guest("kernelRelease"),
            guest("machine"),
            guest("machine"),
            guest("name"),
            guest("versionId"),
            &vmi.is_evictable().to_string(),
            &vmi.is_outdated().to_string(),
            pod.as_deref().unwrap_or_default(),
        ],
        1_u64,
    );
    sheet.tell(&c::VMI_NOT_EVICTABLE, &[node, namespace, name], !vmi.is_evictable());
    for interface in vmi.status.interfaces.iter().map(Told::value) {
        let text = |key: &str| interface.get(key).and_then(|v| v.as_str()).unwrap_or_default();
        let (nic, inside) = (text("name"), text("interfaceName"));
        let kind = if nic.is_empty() { "SystemInterface" } else { "ExternalInterface" };
        let all = interface.get("ipAddresses").and_then(|v| v.as_array()).into_iter().flatten();
        for address in all.filter_map(|a| a.as_str()) {
            sheet.tell(&c::VMI_ADDRESSES, &[node, namespace, name, nic, inside, address, kind], 1_u64);
        }
    }
}
