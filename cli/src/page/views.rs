//! The page's views, as HTML. Every value is escaped by the templates; nothing here writes markup of its own.

use maud::{DOCTYPE, Markup, html};
use state::explain::{Explanation, WaitKind};
use telemetry::kept::Kept;

use super::charts::{class, clock, meter, spark, strip, waterfall};
use super::look::{Called, MachineSeen, NodeSeen, Snapshot};
use super::traces;
use crate::machines::{Flow, Load, Machine, Tone, age, bytes, duration, tone};

/// Rows of a list; who has more machines filters.
const ROWS: usize = 250;
/// Minutes that the strips of the list can show; the shortest that tells all of the young ones is taken.
const WINDOWS: [i64; 4] = [2, 5, 10, 30];
/// Between two drawings of the same strip.
const STEP: i64 = 5_000;
/// Statuses that the strip of one machine shows.
const SHOWN: usize = 12;

/// A document around what is shown.
pub fn document(title: &str, live: &str, main: &Markup) -> Markup {
    let here =
        |place: &str| live == place || (place == "/" && (live.starts_with("/?") || live.starts_with("/machines/")));
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) " – virtfold" }
                link rel="icon" href="/icon.svg" type="image/svg+xml";
                link rel="stylesheet" href="/style.css";
                script src="/script.js" defer {}
                @if !live.is_empty() { noscript { meta http-equiv="refresh" content="5"; } }
            }
            body data-live=(live) {
                a.skip href="#main" { "Skip to the content" }
                header {
                    a.mark href="/" { "virtfold" }
                    nav aria-label="Views" {
                        @for (place, name) in [("/", "Machines"), ("/nodes", "Nodes")] {
                            a href=(place) aria-current=[here(place).then_some("page")] { (name) }
                        }
                    }
                    p #link role="status" {}
                }
                main #main tabindex="-1" { (main) }
                p #news .unseen role="status" aria-live="polite" {}
            }
        }
    }
}

fn pill(status: &str) -> Markup {
    html! { span class=(format!("pill {}", class(tone(status)))) { @if status.is_empty() { "Unknown" } @else { (status) } } }
}

fn gaps(all: &[String]) -> Markup {
    html! { @for gap in all { p.gap role="note" { (gap) } } }
}

/// A part of a path, as an address takes it.
fn segment(text: &str) -> String {
    let mut out = String::new();
    for b in text.bytes() {
        match b {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' => out.push(char::from(b)),
            b => out.push_str(&format!("%{b:02X}")),
        }
    }
    out
}

/// Where a machine is shown.
pub fn place(machine: &Machine) -> String {
    format!("/machines/{}/{}", segment(&machine.namespace), segment(&machine.name))
}

fn processors(load: Option<&Load>) -> String {
    match load {
        Some(Load { cpu: Some(cpu), cpus, .. }) => format!("{cpu:.2} of {cpus}"),
        _ => "–".into(),
    }
}

fn memory(load: Option<&Load>) -> String {
    load.map_or("–".into(), crate::machines::memory)
}

fn memory_meter(load: Option<&Load>) -> Markup {
    let used = load.and_then(|l| Some((l.memory_bytes?, l)));
    html! { @if let Some((used, l)) = used { (meter(used as f64, l.memory_total_bytes as f64, &format!("Memory: {}", memory(load)))) } }
}

/// A quantity of memory, as people read it.
fn quantity(text: &str) -> String {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text.strip_prefix(digits) {
        Some("") => 0,
        Some("Ki") => 10,
        Some("Mi") => 20,
        Some("Gi") => 30,
        _ => return text.to_owned(),
    };
    digits.parse::<f64>().map_or(text.to_owned(), |n| bytes(n * f64::from(1 << unit)))
}

fn since(created: Option<i64>, now: i64) -> String {
    created.map(|t| age(now / 1000 - t)).unwrap_or_default()
}

/// How many there are of what.
fn tiles(all: &[MachineSeen]) -> Markup {
    let count = |wanted: Tone| all.iter().filter(|m| tone(&m.machine.status) == wanted).count();
    html! {
        ul.tiles aria-label="Machines by state" {
            @for (wanted, name) in [(Tone::Good, "running"), (Tone::Busy, "on their way"), (Tone::Bad, "need somebody"), (Tone::Off, "at rest")] {
                li class=(class(wanted)) { strong { (count(wanted)) } " " (name) }
            }
        }
    }
}

/// All machines, those first that need somebody.
pub fn machines(seen: &Snapshot, filter: &str) -> Markup {
    let wanted = |m: &&MachineSeen| {
        filter.is_empty()
            || [&m.machine.name, &m.machine.namespace, &m.machine.status, &m.machine.node]
                .iter()
                .any(|t| t.contains(filter))
    };
    let mut all: Vec<&MachineSeen> = seen.machines.iter().filter(wanted).collect();
    all.sort_by_key(|m| tone(&m.machine.status) != Tone::Bad);
    let to = seen.now.div_euclid(STEP) * STEP + STEP;
    let first = all.iter().filter_map(|m| m.called.first()).map(|(since, _)| *since).min().unwrap_or(to);
    let minutes = WINDOWS.into_iter().find(|m| first >= to - m * 60_000).unwrap_or(WINDOWS[WINDOWS.len() - 1]);
    let last = format!("Last {minutes} minutes");
    html! {
        h1 { "Machines" }
        (gaps(&seen.gaps))
        (tiles(&seen.machines))
        form.filter role="search" action="/" {
            label for="q" { "Filter" }
            input #q name="q" type="search" value=(filter) placeholder="name, namespace, status or node" autocomplete="off" spellcheck="false";
            button { "Show" }
        }
        @if all.is_empty() {
            p.empty {
                @if filter.is_empty() { "There are no virtual machines yet: " code { "kubectl apply -f docs/demo/vm.yaml" } " makes one." }
                @else { "None of " (seen.machines.len()) " machines has that in its name, namespace, status or node." }
            }
        } @else {
            table.list role="table" {
                caption.unseen { "Virtual machines, those first that need somebody" }
                thead role="rowgroup" { tr role="row" {
                    @for (name, kind) in [("Name", ""), ("Status", ""), (last.as_str(), "wide"), ("CPU", "number"), ("Memory", "number"), ("Node", ""), ("Age", "number"), ("Waits for", "waits")] {
                        th role="columnheader" scope="col" class=[(!kind.is_empty()).then_some(kind)] { (name) }
                    }
                } }
                tbody role="rowgroup" { @for m in all.iter().take(ROWS) { (row(m, &last, (to - minutes * 60_000, to), seen.now)) } }
            }
            @if all.len() > ROWS { p.gap role="note" { (ROWS) " of " (all.len()) " machines are shown; the filter finds the others." } }
        }
    }
}

fn row(seen: &MachineSeen, last: &str, (from, to): (i64, i64), now: i64) -> Markup {
    let m = &seen.machine;
    let id = format!("m-{}-{}", m.namespace, m.name);
    html! {
        tr id=(id) role="row" data-name=(m.name) data-status=(m.status) {
            th role="rowheader" scope="row" { a id=(format!("a-{id}")) href=(place(m)) { (m.name) } span.soft { (m.namespace) } }
            td role="cell" data-label="Status" { (pill(&m.status)) }
            td.wide role="cell" data-label=(last) { (strip(&seen.called, from, to)) }
            td.number role="cell" data-label="CPU" { (processors(seen.load.as_ref())) }
            td.number role="cell" data-label="Memory" { (memory(seen.load.as_ref())) (memory_meter(seen.load.as_ref())) }
            td.node role="cell" data-label="Node" { @if m.node.is_empty() { "–" } @else { a id=(format!("n-{id}")) href=(format!("/nodes#{}", segment(&m.node))) { (m.node) } } }
            td.number role="cell" data-label="Age" { (since(m.created, now)) }
            td.waits role="cell" data-label="Waits for" { @if m.waits_for.is_empty() { "–" } @else { span { (m.waits_for) } } }
        }
    }
}

fn fact(name: &str, value: &Markup) -> Markup {
    html! { div { dt { (name) } dd { (value) } } }
}

fn flow(flow: Option<Flow>, into: &str, out: &str) -> Markup {
    match flow {
        Some(f) => html! { (bytes(f.bytes_in)) "/s " (into) ", " (bytes(f.bytes_out)) "/s " (out) },
        None => html! { "–" },
    }
}

/// Why a machine is as it is, and what was done with it.
#[derive(Debug, Clone)]
pub struct Explained {
    pub why: Explanation,
    /// The newest finished steps that somebody remembers.
    pub spans: Vec<Kept>,
}

impl Explained {
    /// As the gateway answers.
    pub fn read(mut answer: serde_json::Value) -> Result<Self, serde_json::Error> {
        let spans = match answer["spans"].take() {
            serde_json::Value::Null => Vec::new(),
            spans => serde_json::from_value(spans)?,
        };
        Ok(Self { why: serde_json::from_value(answer)?, spans })
    }
}

/// What could be learnt of why a machine is as it is.
pub type Why = Result<Explained, String>;

/// One machine.
pub fn machine(seen: &MachineSeen, why: &Why, now: i64, troubles: &[String], jaeger: Option<&str>) -> Markup {
    let (m, load) = (&seen.machine, seen.load.as_ref());
    html! {
        div.head data-name=(m.name) data-status=(m.status) id="head" {
            h1 { (m.name) } (pill(&m.status))
            p.actions { a.button #console-link href=(format!("{}/console", place(m))) { "Console" } }
        }
        (gaps(troubles))
        dl.facts {
            (fact("Namespace", &html! { (m.namespace) }))
            (fact("Phase", &html! { @if m.phase.is_empty() { "no instance" } @else { (m.phase) } }))
            (fact("Node", &html! { @if m.node.is_empty() { "–" } @else { a #node-link href=(format!("/nodes#{}", segment(&m.node))) { (m.node) } } }))
            (fact("Address", &html! { @if m.address.is_empty() { "–" } @else { (m.address) } }))
            (fact("System", &html! { @if m.system.is_empty() { "not known" } @else { (m.system) } }))
            (fact("Age", &html! { (since(m.created, now)) }))
            (fact("CPU", &html! { (processors(load)) @if let Some(l) = load { (spark(&seen.cpu, f64::from(l.cpus))) } }))
            (fact("Memory", &html! { (memory(load)) (memory_meter(load)) }))
            (fact("Disks", &flow(load.and_then(|l| l.disk), "read", "written")))
            (fact("Network", &flow(load.and_then(|l| l.network), "in", "out")))
        }
        @match why {
            Ok(why) => (explained(why, &seen.trace, now, jaeger)),
            Err(error) => section aria-labelledby="why" { h2 #why { "Why" } p.gap role="note" { (error) } },
        }
    }
}

fn explained(Explained { why, spans }: &Explained, trace: &str, now: i64, jaeger: Option<&str>) -> Markup {
    let ms = |t: state::Timestamp| i64::try_from(t.0).unwrap_or(i64::MAX);
    let called: Vec<Called> = why.statuses.iter().map(|c| (ms(c.since), c.status.clone())).collect();
    let shown = called.get(called.len().saturating_sub(SHOWN)..).unwrap_or_default();
    let from = shown.first().map_or(now, |(since, _)| *since);
    // Finished steps are shown where they belong; what goes on, or nobody remembers, in the words of the controller.
    let steps = || why.steps.iter().map(|s| (s.step.to_string(), ms(s.start)));
    let remembered = why.steps.iter().all(|s| s.end.is_some()) && traces::has(spans, steps());
    html! {
        section aria-labelledby="why" {
            h2 #why { "Why" }
            p.summary { (why.summary) }
            @for w in &why.waits {
                div class=(match w.kind { WaitKind::Problem => "wait bad", WaitKind::Progress => "wait busy", WaitKind::Person => "wait off" }) {
                    h3 { "Waits for " (w.waits_for) }
                    dl {
                        @if !w.message.is_empty() { (fact("because", &html! { (w.message) })) }
                        @for said in &w.evidence { (fact("says", &html! { (said) })) }
                        @if !w.unblock.is_empty() { (fact("unblock", &html! { (w.unblock) })) }
                        @let name = [w.condition.as_str(), w.reason.as_str()].into_iter().filter(|n| !n.is_empty()).collect::<Vec<_>>().join("/");
                        @if !name.is_empty() { (fact("name", &html! { code { (name) } })) }
                        @if let Some(since) = w.since { (fact("since", &html! { (since.precise()) " (" (duration(why.as_of.since(since).0)) ")" })) }
                        @if let Some(until) = w.until { (fact("until", &html! { (until) })) }
                    }
                }
            }
        }
        @if !shown.is_empty() {
            section aria-labelledby="over-time" {
                h2 #over-time { "Over time" }
                (strip(shown, from, now.max(from + 1)))
                ol.legend {
                    @for (i, (since, status)) in shown.iter().enumerate() {
                        @let end = shown.get(i + 1).map_or(now, |(next, _)| *next);
                        @if !status.is_empty() {
                            li { span class=(format!("dot {}", class(tone(status)))) aria-hidden="true" {} (status) " " span.soft {
                                (clock(*since)) ", " (duration(u64::try_from(end - since).unwrap_or_default())) } }
                        }
                    }
                }
            }
        }
        @if let Some(first) = why.steps.first().filter(|_| !remembered) {
            section aria-labelledby="steps" {
                h2 #steps { "The last " (first.operation) }
                (waterfall(&why.steps, now))
                @if !trace.is_empty() { p.soft { "The same as a trace, where a collector is configured: " (traces::link(trace, jaeger)) } }
            }
        }
        @if !spans.is_empty() { (traces::shown(spans, jaeger)) }
        @if !why.history.is_empty() {
            section aria-labelledby="history" {
                h2 #history { "What happened" }
                p.soft { "Newest first; times are UTC." }
                table.history role="table" {
                    thead role="rowgroup" { tr role="row" { @for name in ["When", "Who", "What"] { th role="columnheader" scope="col" { (name) } } } }
                    tbody role="rowgroup" {
                        @for h in why.history.iter().rev() {
                            tr role="row" class=[h.problem.then_some("problem")] {
                                td role="cell" { time datetime=(h.time.precise()) { (h.time.precise().replace('T', " ").trim_end_matches('Z')) } }
                                td role="cell" { (h.actor.words()) }
                                td role="cell" { (h.message) @if h.count > 1 { span.soft { " (" (h.count) " times, last at " (h.last) ")" } } }
                            }
                        }
                    }
                }
            }
        }
        (gaps(&why.gaps))
    }
}

/// All nodes. What the controller says of one comes with it.
pub fn nodes(seen: &Snapshot, said: &[(String, String)]) -> Markup {
    html! {
        h1 { "Nodes" }
        (gaps(&seen.gaps))
        @if seen.nodes.is_empty() { p.empty { "There is no node." } }
        div.cards { @for n in &seen.nodes { (node(n, seen, said)) } }
    }
}

fn node(seen: &NodeSeen, all: &Snapshot, said: &[(String, String)]) -> Markup {
    let (n, load) = (&seen.node, seen.load.as_ref());
    let here: Vec<&MachineSeen> = all.machines.iter().filter(|m| m.machine.node == n.name).collect();
    let why = said.iter().find(|(name, _)| *name == n.name).map(|(_, summary)| summary);
    html! {
        section.card id=(n.name) aria-labelledby=(format!("h-{}", n.name)) data-name=(n.name) data-status=(n.status) {
            div.head { h2 id=(format!("h-{}", n.name)) { (n.name) } (pill(&n.status)) }
            @if let Some(why) = why { p.summary { (why) } }
            dl.facts {
                (fact("CPU", &html! { (processors(load)) @if let Some(l) = load {
                    (meter(l.cpu.unwrap_or_default(), f64::from(l.cpus), &format!("CPU: {}", processors(load)))) (spark(&seen.cpu, f64::from(l.cpus))) } }))
                (fact("Memory", &html! { (memory(load)) (memory_meter(load)) }))
                (fact("Of machines", &html! { @match load { Some(l) => (bytes(l.resident_bytes as f64)), None => "–" } }))
                (fact("Load", &html! { @match load {
                    Some(l) if !l.load.is_empty() => (l.load.iter().map(|n| format!("{n:.2}")).collect::<Vec<_>>().join(", ")),
                    _ => "–" } }))
                (fact("For pods", &html! { (n.allocatable_cpu) " processors, " (quantity(&n.allocatable_memory)) }))
                (fact("Guests run", &html! { @if n.kvm { "on KVM" } @else { "emulated" } }))
                (fact("New machines", &html! { @if n.schedulable { "are placed here" } @else { "are not placed here" } }))
            }
            @if here.is_empty() { p.soft { "No machine is here." } } @else {
                ul.here aria-label=(format!("Machines on {}", n.name)) {
                    @for m in here { li { a id=(format!("h-{}-{}", m.machine.namespace, m.machine.name)) href=(place(&m.machine)) { (m.machine.name) } " " (pill(&m.machine.status)) } }
                }
            }
        }
    }
}

/// The console of a machine.
pub fn console(machine: &Machine) -> Markup {
    let path = place(machine);
    html! {
        div.head { h1 { "Console of " (machine.name) } p.actions { a.button #back href=(path) { "Back to " (machine.name) } } }
        noscript { p.gap { "A console in the browser needs JavaScript. In a terminal: " code { "virtfold console " (machine.name) " -n " (machine.namespace) } } }
        section #console aria-label="Serial console" data-stream=(format!("{path}/console/stream")) {
            p #console-state .soft role="status" { "Connecting …" }
            pre #screen tabindex="0" role="log" aria-label="Output of the console" aria-live="polite" {}
            form #typing autocomplete="off" {
                label for="line" { "Type" }
                input #line type="text" autocapitalize="off" autocomplete="off" spellcheck="false" disabled;
                button #send disabled { "Send" }
                span.keys role="group" aria-label="Keys" {
                    @for (name, code) in [("Enter", "13"), ("Ctrl-C", "3"), ("Ctrl-D", "4"), ("Tab", "9"), ("Esc", "27")] {
                        button type="button" data-key=(code) disabled { (name) }
                    }
                }
                label.check { input #each type="checkbox"; " Send each key as it is typed (Tab still leaves the field)" }
            }
        }
    }
}

/// Something that is not there, or not for everybody.
pub fn message(title: &str, text: &Markup) -> Markup {
    html! { h1 { (title) } (text) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    const EVIL: &str = "\"><script>alert(1)</script><img src=x onerror='alert(2)'>&amp;\u{202e}";

    fn evil() -> MachineSeen {
        let text = || EVIL.to_owned();
        let machine = Machine {
            namespace: text(),
            name: text(),
            status: text(),
            node: text(),
            address: text(),
            waits_for: text(),
            phase: text(),
            system: text(),
            ..Machine::default()
        };
        MachineSeen { machine, called: vec![(0, text()), (1, text())], trace: text(), ..MachineSeen::default() }
    }

    fn why() -> Explained {
        Explained::read(json!({
            "kind": "Explanation", "apiVersion": "v1", "namespace": EVIL, "name": EVIL, "status": EVIL, "phase": EVIL, "node": EVIL,
            "runStrategy": EVIL, "summary": EVIL,
            "waits": [{"kind": "problem", "waitsFor": EVIL, "condition": EVIL, "reason": EVIL, "message": EVIL, "evidence": [EVIL],
                       "unblock": EVIL, "since": "2026-01-01T10:00:02.000Z"}],
            "steps": [{"operation": EVIL, "step": EVIL, "start": "2026-01-01T10:00:00.000Z", "milliseconds": 1}],
            "statuses": [{"since": "2026-01-01T10:00:00.000Z", "status": EVIL}],
            "history": [{"time": "2026-01-01T10:00:00.000Z", "actor": {"kind": "user", "name": EVIL}, "message": EVIL, "problem": true,
                         "count": 2, "last": "2026-01-01T10:00:00.000Z"}],
            "asOf": "2026-01-01T10:02:12.000Z", "live": true, "gaps": [EVIL],
            "spans": [{"trace": EVIL, "span": "a", "name": EVIL, "service": EVIL, "node": EVIL, "user": EVIL, "error": EVIL}],
        }))
        .unwrap()
    }

    /// Whatever a name, a message or a guest says stays text.
    #[test]
    fn no_value_becomes_markup() {
        let node = NodeSeen {
            node: crate::machines::Node {
                name: EVIL.into(),
                status: EVIL.into(),
                allocatable_cpu: EVIL.into(),
                ..Default::default()
            },
            ..NodeSeen::default()
        };
        let seen = Snapshot { machines: vec![evil()], nodes: vec![node], gaps: vec![EVIL.into()], now: 1_800_000 };
        let views = [
            machines(&seen, EVIL),
            machines(&seen, ""),
            machine(&evil(), &Ok(why()), 2_000_000_000_000, &seen.gaps, None),
            machine(&evil(), &Err(EVIL.into()), 5, &[], None),
            nodes(&seen, &[(EVIL.into(), EVIL.into())]),
            console(&evil().machine),
        ];
        for view in views {
            let text = document(EVIL, &format!("/?q={EVIL}"), &view).into_string();
            let own = text.matches("<script").count();
            assert_eq!(own, 1, "the page's own script alone: {text}");
            assert!(!text.contains("<img") && !text.contains("\"><script>alert"), "{text}");
            for unsafe_there in [" style=", "javascript:", " onclick", "<style", "http://", "https://"] {
                assert!(!text.contains(unsafe_there), "{unsafe_there} in {text}");
            }
        }
        assert_eq!(segment("a/b?c#d\"é"), "a%2Fb%3Fc%23d%22%C3%A9");
    }

    #[test]
    fn the_explanation_has_the_words_of_the_command() {
        let text = machine(&MachineSeen::default(), &Ok(why()), 2_000_000_000_000, &[], None).into_string();
        for word in ["Waits for ", "because", "says", "unblock", "name", "since", "(2 min 10 s)", "2 times, last at"] {
            assert!(text.contains(word), "{word} in {text}");
        }
    }

    #[test]
    fn a_long_list_is_cut_and_filtered_and_who_needs_somebody_comes_first() {
        let machine = |n: usize, status: &str| MachineSeen {
            machine: Machine { name: format!("m{n}"), status: status.into(), ..Machine::default() },
            ..MachineSeen::default()
        };
        let mut all: Vec<_> = (0..400).map(|n| machine(n, "Running")).collect();
        all[399].machine.status = "CrashLoopBackOff".into();
        let seen = Snapshot { machines: all, ..Snapshot::default() };
        let text = machines(&seen, "").into_string();
        assert_eq!(text.matches("<tr id=").count(), ROWS);
        assert!(text.contains("250 of 400 machines are shown"));
        assert!(text.find("m399").unwrap() < text.find("m0").unwrap());
        assert_eq!(machines(&seen, "Crash").into_string().matches("<tr id=").count(), 1);
        assert!(machines(&seen, "nothing").into_string().contains("None of 400 machines"));
    }
}
