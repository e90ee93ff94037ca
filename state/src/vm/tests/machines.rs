//! The machines as tables and diagrams, derived by running them over everything that they can observe. The page in `docs/`
//! is compared with what the code does today; `UPDATE=1` writes it anew.

use super::strategies::{PHASES, STRATEGIES, seen, vmi_in};
use crate::{
    Epoch, Event, Key, Machine, Millis, NodeName, PodUid, ResourceVersion, Timestamp,
    agent::{self, Agent},
    domain::{Cause, Domain, DomainState, GuestFacts, InstructKind, Outcome, RefusalReason},
    instruction_id,
    object::{Kind, ObjectRef},
    observe::{self, Phase},
    vm::{
        Input, NodeFact, Sight, Vm,
        cell::{Inventory, Told},
        printable::{Facts, Held, rules},
        strategy::Wish,
    },
};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

const CAUSES: [Cause; 7] = [
    Cause::GuestShutdown,
    Cause::Crashed,
    Cause::Panicked,
    Cause::KilledAfterGrace,
    Cause::Destroyed,
    Cause::StartFailed,
    Cause::OutcomeUnknown,
];

const STATES: [DomainState; 7] = [
    DomainState::Absent,
    DomainState::Deaf,
    DomainState::Starting,
    DomainState::Running,
    DomainState::Paused,
    DomainState::ShuttingDown,
    DomainState::Stopped,
];

/// States that a launcher can tell while it lives.
const SAID: [(&str, DomainState); 5] = [
    ("launcher says Absent", DomainState::Absent),
    ("launcher says Starting", DomainState::Starting),
    ("launcher says Running", DomainState::Running),
    ("launcher says Paused", DomainState::Paused),
    ("launcher says ShuttingDown", DomainState::ShuttingDown),
];

/// Edges of a machine: from, to, and why.
type Edges<T> = BTreeMap<(T, T), BTreeSet<String>>;

fn domain(state: DomainState, seq: u64) -> Domain {
    Domain {
        vmi: "vmi-1".into(),
        pod: "pod-1".into(),
        launcher: "l".into(),
        seq,
        state,
        since: Timestamp(1),
        guest: GuestFacts::default(),
        paused_reason: String::new(),
        accelerator: "tcg".into(),
    }
}

fn outcome(cause: Cause) -> Outcome {
    Outcome {
        vmi: "vmi-1".into(),
        pod: "pod-1".into(),
        cause,
        exit: 0,
        seq: 9,
        message: String::new(),
        at: Timestamp(2),
    }
}

/// Everything that a kubelet can say about the launcher pod; `None` where the pod is known to be gone.
fn pods() -> Vec<Option<Value>> {
    let pod = |phase: &str, node: bool, compute: Option<Value>| {
        let mut o = json!({
            "metadata": {"name": "p", "namespace": "ns", "uid": "pod-1", "resourceVersion": "9",
                "ownerReferences": [{"kind": "VirtualMachineInstance", "name": "web", "uid": "vmi-1", "controller": true}]},
            "spec": {"containers": [{"name": "compute"}]},
            "status": {"phase": phase, "conditions": [{"type": "Ready", "status": "True"}]}});
        if node {
            o["spec"]["nodeName"] = json!("n1");
        }
        if let Some(state) = compute {
            o["status"]["containerStatuses"] = json!([{"name": "compute", "ready": true, "state": state}]);
        }
        o
    };
    let runs = || Some(json!({"running": {}}));
    let mut deleting = pod("Running", true, runs());
    deleting["metadata"]["deletionTimestamp"] = json!("1970-01-01T00:10:00Z");
    let mut all = vec![
        None,
        Some(pod("Pending", false, None)),
        Some(pod("Pending", true, Some(json!({"waiting": {"reason": "ContainerCreating"}})))),
        Some(pod("Running", true, runs())),
        Some(deleting),
        Some(pod("Failed", true, None)),
    ];
    for cause in CAUSES {
        let message = json!({"cause": cause.name()}).to_string();
        let ended = json!({"terminated": {"exitCode": 1, "reason": "Error", "message": message}});
        all.push(Some(pod("Failed", true, Some(ended))));
    }
    all
}

fn nodes() -> Vec<Option<NodeFact>> {
    let fact = |session, fenced: Option<ResourceVersion>| NodeFact {
        node: "n1".into(),
        ready: fenced.is_none(),
        session,
        silent_since: None,
        fenced,
        gone: false,
    };
    vec![None, Some(fact(Some(1), None)), Some(fact(None, None)), Some(fact(None, Some(ResourceVersion(5))))]
}

/// The phases that follow from each phase, over all pods, domains, outcomes, nodes and answers to the start.
fn phases() -> Edges<Phase> {
    let mut edges = Edges::new();
    for from in PHASES {
        for deleting in [false, true] {
            let mut raw = vmi_in(from);
            raw["metadata"]["ownerReferences"] = json!([]);
            raw["spec"]["terminationGracePeriodSeconds"] = json!(5);
            let granted = from == Phase::Scheduled || from == Phase::Running;
            if granted {
                raw["status"]["nodeName"] = json!("n1");
                raw["status"]["activePods"] = json!({"pod-1": "n1"});
            }
            if deleting {
                raw["metadata"]["deletionTimestamp"] = json!("1970-01-01T00:10:00Z");
            }
            for pod in pods() {
                let mut cell = Vm::new(Key::new("ns", "web"));
                let mut see = |sight| drop(cell.step(&Event::new(Timestamp(1_000_000), Input::Observed(sight))));
                see(Sight::Present(observe::object(Kind::VirtualMachineInstance, &raw).unwrap()));
                see(match &pod {
                    Some(p) => Sight::Present(observe::object(Kind::Pod, p).unwrap()),
                    None => Sight::Gone(ObjectRef {
                        kind: Kind::Pod,
                        namespace: "ns".into(),
                        name: "p".into(),
                        uid: if granted { "pod-1".into() } else { Default::default() },
                    }),
                });
                for world in reports(granted) {
                    let mut cell = cell.clone();
                    world.tell(&mut cell);
                    let vmi = cell.vmi.get().cloned().unwrap();
                    for wait in [0, 3_600_000] {
                        cell.now = cell.now.after(Millis(wait));
                        let next = cell.next_phase(&vmi);
                        if next.phase != from {
                            let why = next.reason.unwrap_or_default();
                            edges.entry((from, next.phase)).or_default().insert(why);
                        }
                    }
                }
            }
        }
    }
    edges
}

/// What the node says, in one combination.
struct Reports {
    node: Option<NodeFact>,
    domain: Option<DomainState>,
    outcome: Option<Cause>,
    complete: bool,
    told: Option<Told>,
}

fn reports(granted: bool) -> Vec<Reports> {
    if !granted {
        return vec![Reports { node: None, domain: None, outcome: None, complete: false, told: None }];
    }
    let mut said: Vec<_> = std::iter::once(None).chain(STATES.map(Some)).map(|d| (d, None)).collect();
    said.extend(CAUSES.map(|c| (Some(DomainState::Stopped), Some(c))));
    let refused = |r| Some(Told::Refused(r, String::new(), Timestamp(1)));
    let told = [None, Some(Told::Taken), refused(RefusalReason::Failed), refused(RefusalReason::AlreadyStarted)];
    let mut all = vec![];
    for node in nodes() {
        for (domain, outcome) in &said {
            for complete in [false, true] {
                for told in &told {
                    all.push(Reports {
                        node: node.clone(),
                        domain: *domain,
                        outcome: *outcome,
                        complete,
                        told: told.clone(),
                    });
                }
            }
        }
    }
    all
}

impl Reports {
    fn tell(self, cell: &mut Vm) {
        let (node, pod) = (NodeName::from("n1"), PodUid::from("pod-1"));
        if let Some(fact) = self.node {
            cell.node.insert(node.clone(), fact);
        }
        if let Some(state) = self.domain {
            cell.domains.insert(pod.clone(), (Some(1), std::sync::Arc::new(domain(state, 1))));
        }
        if let Some(cause) = self.outcome {
            cell.outcomes.insert(pod.clone(), (node.clone(), outcome(cause)));
        }
        if self.complete {
            cell.inventory.insert(node, Inventory { session: 1, complete: true, boot_id: String::new() });
        }
        if let Some(told) = self.told {
            let id = instruction_id(&"vmi-1".into(), &pod, InstructKind::Start.name(), "running");
            // By an earlier session, so that an inventory of this one says something about it.
            cell.told.insert(id, (0, told));
        }
    }
}

/// Situations of a VM that can be: what is said about an instance is said while it can be true.
fn situations() -> BTreeSet<Facts> {
    let mut all = BTreeSet::new();
    let helds = [Held::No, Held::Claim, Held::Image, Held::ImageBackOff];
    for vmi in std::iter::once(None).chain(PHASES.map(Some)) {
        for (bits, held) in (0..256_u32).flat_map(|b| helds.map(|h| (b, h))) {
            let bit = |n: u32| bits & (1 << n) != 0;
            let early = matches!(vmi, Some(Phase::Unset | Phase::Pending | Phase::Scheduling));
            let runs = vmi == Some(Phase::Running);
            let f = Facts {
                deleting: bit(0),
                vmi,
                vmi_deleting: bit(1),
                creating: bit(2),
                paused: bit(3),
                unreachable: bit(4),
                held,
                unschedulable: bit(5),
                unbound: bit(6),
                crash_looping: bit(7),
            };
            let fine = (!f.vmi_deleting || vmi.is_some())
                && (!f.creating || vmi.is_none())
                && (!(f.paused || f.unreachable) || runs)
                && (early || (held == Held::No && !f.unschedulable));
            if fine {
                all.insert(f);
            }
        }
    }
    all
}

/// The words that follow from each word when one thing changes: the instance's phase as it can, its coming and going, or one
/// fact about it.
fn words(phases: &Edges<Phase>) -> Edges<String> {
    let all = situations();
    let mut edges = Edges::new();
    for f in &all {
        let mut next: Vec<(Facts, &str)> = vec![
            (Facts { deleting: true, ..*f }, "the VM is deleted"),
            (Facts { vmi_deleting: f.vmi.is_some(), ..*f }, "its VMI is deleted"),
            (Facts { paused: !f.paused, ..*f }, "it is paused or resumed"),
            (Facts { unreachable: !f.unreachable, ..*f }, "its node stops or begins to answer"),
            (Facts { unschedulable: !f.unschedulable, ..*f }, "the scheduler speaks about its pod"),
            (Facts { unbound: !f.unbound, ..*f }, "a claim is bound, or it is set to start"),
            (Facts { crash_looping: !f.crash_looping, ..*f }, "a start fails, or the count is cleared"),
            (Facts { creating: true, ..*f }, "its VMI is being created"),
        ];
        next.extend(
            [Held::No, Held::Claim, Held::Image, Held::ImageBackOff]
                .map(|held| (Facts { held, ..*f }, "a claim or an image")),
        );
        // What was true of the instance in one phase is not said of the next.
        let fresh = Facts { paused: false, unreachable: false, held: Held::No, unschedulable: false, ..*f };
        for (from, to) in phases.keys() {
            if f.vmi == Some(*from) {
                next.push((Facts { vmi: Some(*to), ..fresh }, "its VMI goes on"));
            }
        }
        if f.vmi.is_none() {
            next.push((Facts { vmi: Some(Phase::Pending), creating: false, ..*f }, "its VMI is there"));
        }
        if f.vmi.is_some_and(Phase::is_final) {
            next.push((Facts { vmi: None, vmi_deleting: false, ..fresh }, "its VMI is gone"));
        }
        for (to, why) in next.into_iter().filter(|(to, _)| all.contains(to)) {
            let (a, b) = (f.word().name().to_owned(), to.word().name().to_owned());
            if a != b {
                edges.entry((a, b)).or_default().insert(why.to_owned());
            }
        }
    }
    edges
}

/// What the agent tells about a domain after each thing that can happen, from each state.
fn agent_table() -> BTreeMap<&'static str, BTreeMap<Option<DomainState>, Option<DomainState>>> {
    let silence = Timestamp(1_000_000).after(Millis::secs(3_600));
    let at = |n: u64| Timestamp(2_000_000 + n);
    let step = |cell: &mut Agent, t: Timestamp, input: agent::Input| drop(cell.step(&Event::new(t, input)));
    let connect = || agent::Input::LauncherConnected { launcher: "l".into(), epoch: Epoch(1) };
    let pod = |running| agent::Input::PodObserved { vmi: "vmi-1".into(), running };
    let report = |s| agent::Input::LauncherReported(domain(s, 5));
    let state = |cell: &Agent| cell.view().map(|d| d.state);
    let mut table = BTreeMap::<_, BTreeMap<_, _>>::new();
    for from in std::iter::once(None).chain(STATES.map(Some)) {
        let mut cell = Agent::new("n1".into(), "pod-1".into());
        step(&mut cell, Timestamp(1_000_000), pod(true));
        match from {
            None => {}
            Some(DomainState::Deaf) => {
                step(&mut cell, Timestamp(1_000_000), connect());
                step(&mut cell, Timestamp(1_000_000), agent::Input::LauncherReported(domain(DomainState::Running, 1)));
                step(&mut cell, Timestamp(1_000_000), agent::Input::LauncherLost);
                step(&mut cell, silence, agent::Input::Elapsed);
            }
            Some(s) => {
                step(&mut cell, Timestamp(1_000_000), connect());
                step(&mut cell, Timestamp(1_000_000), agent::Input::LauncherReported(domain(s, 1)));
            }
        }
        assert_eq!(state(&cell), from, "how it is brought about");
        let mut try_it = |name, inputs: Vec<agent::Input>, wait: u64| {
            let mut cell = cell.clone();
            let start = at(0).max(silence);
            for i in inputs {
                step(&mut cell, start, i);
            }
            step(&mut cell, start.after(Millis(wait)), agent::Input::Elapsed);
            table.entry(name).or_default().insert(from, state(&cell));
        };
        for (name, s) in SAID {
            try_it(name, vec![connect(), report(s)], 0);
        }
        try_it("launcher says how it ended", vec![connect(), agent::Input::LauncherEnded(outcome(Cause::Crashed))], 0);
        try_it("launcher lost, at first", vec![agent::Input::LauncherLost], 0);
        try_it("launcher lost, for long", vec![agent::Input::LauncherLost], 60_000);
        try_it("launcher lost and back", vec![agent::Input::LauncherLost, connect()], 0);
        try_it("container ended", vec![agent::Input::LauncherLost, pod(false)], 0);
        try_it("pod gone", vec![agent::Input::PodGone], 0);
    }
    table
}

/// A table of the strategies: what is asked for with and without an instance.
fn strategy_table(out: &mut String) {
    let heads = [
        ("no request", json!([])),
        ("Start", json!([{"action": "Start"}])),
        ("Start, paused", json!([{"action": "Start", "data": {"paused": "true"}}])),
        ("Stop", json!([{"action": "Stop", "uid": "vmi-1"}])),
    ];
    let instances = [
        ("none", None),
        ("live", Some(Phase::Running)),
        ("Succeeded", Some(Phase::Succeeded)),
        ("Failed", Some(Phase::Failed)),
    ];
    let _ = write!(out, "| strategy | instance |");
    for (head, _) in &heads {
        let _ = write!(out, " {head} |");
    }
    let _ = writeln!(out, "\n|---|---|---|---|---|---|");
    for strategy in STRATEGIES.into_iter().chain(["WaitAsReceiver"]) {
        for (name, phase) in instances {
            let _ = write!(out, "| {strategy} | {name} |");
            for (_, requests) in &heads {
                let status = json!({"runStrategy": strategy, "stateChangeRequests": requests});
                let (cell, view) = seen(&json!({"runStrategy": strategy}), &status, phase.map(vmi_in).as_ref());
                let word = match cell.wish(&view) {
                    Wish::Run { .. } => "start",
                    Wish::Stay => "stay",
                    Wish::Stop => "stop",
                    Wish::NotBefore(_) => "start later",
                    Wish::Unhalt => "set to Always",
                    Wish::Bad(_) => "refuse",
                };
                let _ = write!(out, " {word} |");
            }
            out.push('\n');
        }
    }
}

fn name(p: Phase) -> &'static str {
    if p == Phase::Unset { "(none)" } else { p.name() }
}

/// A Mermaid diagram. Edges into `everywhere` are said in one line.
fn diagram(out: &mut String, edges: impl Iterator<Item = (String, String)>, everywhere: Option<&str>) {
    let id = |s: &str| if s == "(none)" { "None".to_owned() } else { s.to_owned() };
    let _ = writeln!(out, "```mermaid\nstateDiagram-v2");
    for (a, b) in edges.filter(|(a, b)| Some(a.as_str()) != everywhere && Some(b.as_str()) != everywhere) {
        let _ = writeln!(out, "    {} --> {}", id(&a), id(&b));
    }
    let _ = writeln!(out, "```");
}

fn page() -> String {
    let phases = phases();
    let mut out = String::from(
        "# The machines\n\nGenerated by running the machines of `state/` over everything that they can observe; a test compares this page with what\nthe code does. Run `UPDATE=1 cargo test -p state --lib machines` after a change that is meant.\n",
    );
    out.push_str("\n## VirtualMachine: shall it run?\n\nWhat the first request in `status.stateChangeRequests` and the strategy ask for. `RerunOnFailure` also starts when it has just been\nswitched to; a `Failed` instance is made up for by a Start of the controller's own. Whoever starts a\nhalted machine changes its spec, unless it shall start paused; another Start in its queue is of an earlier strategy.\n\n");
    strategy_table(&mut out);
    out.push_str("\n## VirtualMachine: the printable status\n\nThe first rule that holds gives the word.\n\n| # | word | when |\n|---|---|---|\n");
    for (n, (word, when)) in rules().enumerate() {
        let _ = writeln!(out, "| {} | `{word}` | {when} |", n + 1);
    }
    let words = words(&phases);
    out.push_str("\nWhich word can follow which when one thing changes. Every word can be followed by `Terminating`, which is left out.\n\n");
    diagram(&mut out, words.keys().cloned(), Some("Terminating"));
    out.push_str("\n| from | to | because |\n|---|---|---|\n");
    for ((a, b), why) in words.iter().filter(|((_, b), _)| b != "Terminating") {
        let _ = writeln!(out, "| {a} | {b} | {} |", why.iter().cloned().collect::<Vec<_>>().join("; "));
    }
    out.push_str("\n## VirtualMachineInstance: the phase\n\n`Succeeded` and `Failed` are final. A phase that this version does not know is left alone.\n\n");
    diagram(&mut out, phases.keys().map(|(a, b)| (name(*a).into(), name(*b).into())), None);
    out.push_str("\n| from | to | `status.reason` |\n|---|---|---|\n");
    for ((a, b), why) in &phases {
        let reasons: Vec<_> = why.iter().filter(|r| !r.is_empty()).cloned().collect();
        let _ = writeln!(out, "| {} | {} | {} |", name(*a), name(*b), reasons.join(", "));
    }
    out.push_str("\n## Node agent: the state of a domain\n\nWhat the agent tells its controller after each thing that happens to a launcher, from each state that it told before. `-`: it tells\nnothing about the domain.\n\n| |");
    let columns: Vec<_> = std::iter::once(None).chain(STATES.map(Some)).collect();
    let show = |s: &Option<DomainState>| s.map_or("-".to_owned(), |s| format!("{s:?}"));
    for c in &columns {
        let _ = write!(out, " {} |", show(c));
    }
    let _ = writeln!(out, "\n|---|{}", "---|".repeat(columns.len()));
    let table = agent_table();
    for (event, row) in &table {
        let cells: Vec<_> = columns.iter().map(|c| show(&row[c])).collect();
        let _ = writeln!(out, "| {event} | {} |", cells.join(" | "));
    }
    out.push('\n');
    out.push_str("What the launcher says is taken over as it is, so the diagram shows the rest: what the agent makes of silence and of endings.\n\n");
    let edges: BTreeSet<_> = table
        .iter()
        .filter(|(event, _)| !SAID.iter().any(|(said, _)| said == *event))
        .flat_map(|(_, row)| row.iter().filter(|(a, b)| a != b).map(|(a, b)| (show(a), show(b))))
        .map(|(a, b)| (if a == "-" { "Unknown".into() } else { a }, if b == "-" { "Unknown".into() } else { b }))
        .collect();
    diagram(&mut out, edges.into_iter(), None);
    crate::node::tables::page(&mut out);
    crate::set::tables::page(&mut out);
    out
}

// The machines do no input or output; the page about them is a file.
#[allow(clippy::disallowed_methods)]
#[test]
fn the_page_about_the_machines_says_what_they_do() {
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/machines.md");
    let now = page();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&file, &now).unwrap();
    }
    let there = std::fs::read_to_string(&file).unwrap_or_default();
    let differs = there.lines().zip(now.lines()).find(|(a, b)| a != b);
    assert!(there == now, "run with UPDATE=1 if that is meant; first difference: {differs:?}");
}

/// Phases that may follow one another, for tests that watch.
pub(super) fn legal_phases() -> BTreeSet<(Phase, Phase)> {
    phases().into_keys().collect()
}

#[test]
fn terminal_phases_and_states_absorb() {
    for ((from, _), _) in phases() {
        assert!(!from.is_final() && from != Phase::Unknown, "{from:?}");
    }
    for (from, to) in legal_phases() {
        assert!(from < to, "{from:?} -> {to:?}: never back");
    }
    // One launcher, one domain: after the end it can only go away.
    for (event, row) in agent_table() {
        let after = row[&Some(DomainState::Stopped)];
        assert!(after.is_none_or(|s| s == DomainState::Stopped), "{event}: {after:?}");
    }
}
