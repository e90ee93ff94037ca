//! `virtfold explain`: what happened to a machine, what it waits for, and what would help.

use std::io::{IsTerminal, Write};
use std::path::Path;

use anyhow::{Context, bail};
use serde_json::Value;
use state::Key;
use state::explain::{Explanation, WaitKind};

use super::cluster::{Cluster, Kind, Machine, connect, machine, plain};
use super::output::print;
use crate::args::{self, Output};
use crate::machines::duration;

/// `virtfold explain`.
pub async fn run(options: args::Explain) -> anyhow::Result<u8> {
    let explanation = match &options.journal {
        Some(dir) => recorded(&options, dir)?,
        None => live(&options).await?,
    };
    match options.output {
        Some(output @ (Output::Json | Output::Yaml)) => print(&[serde_json::to_value(&explanation)?], output)?,
        Some(Output::Wide) | None => {
            let paint = Paint(std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none());
            std::io::stdout().lock().write_all(text(&explanation, &paint).as_bytes())?;
        }
    }
    Ok(0)
}

/// What is to be explained.
#[derive(Debug, PartialEq, Eq)]
enum Named {
    Machine(Machine),
    /// A launcher pod stands for its machine.
    Pod(String),
    Set(String),
    Node(String),
}

/// What was named; machines are read as everywhere.
fn named(words: &[String]) -> anyhow::Result<Named> {
    let apart = match words {
        [one] => one.split_once('/'),
        [kind, name] => Some((kind.as_str(), name.as_str())),
        _ => None,
    };
    let Some((kind, name)) = apart.filter(|(_, name)| !name.is_empty() && !name.contains('/')) else {
        return machine(words).map(Named::Machine);
    };
    Ok(match kind {
        "po" | "pod" | "pods" => Named::Pod(name.into()),
        "no" | "node" | "nodes" => Named::Node(name.into()),
        "vmirs" | "vmirss" | SET | "virtualmachineinstancereplicasets" => Named::Set(name.into()),
        _ => Named::Machine(machine(words)?),
    })
}

const SET: &str = "virtualmachineinstancereplicaset";

async fn get(cluster: &Cluster, path: &str) -> anyhow::Result<Value> {
    let request = http::Request::get(path).body(Vec::new())?;
    cluster.client.request::<Value>(request).await.map_err(plain)
}

async fn live(options: &args::Explain) -> anyhow::Result<Explanation> {
    let named = named(&options.machine)?;
    let cluster = connect(&options.target).await?;
    let (resource, name) = match named {
        Named::Machine(machine) => (machine.kind.plural(), machine.name),
        Named::Set(name) => ("virtualmachineinstancereplicasets", name),
        Named::Node(name) => ("nodes", name),
        Named::Pod(pod) => {
            let found = get(&cluster, &format!("/api/v1/namespaces/{}/pods/{pod}", cluster.namespace)).await?;
            let owners = found.pointer("/metadata/ownerReferences").and_then(Value::as_array);
            let owner = owners.into_iter().flatten().find(|o| o["kind"] == "VirtualMachineInstance");
            let Some(name) = owner.and_then(|o| o["name"].as_str()) else {
                bail!("pod {pod} is not the launcher of a virtual machine");
            };
            (Kind::Vmi.plural(), name.to_owned())
        }
    };
    let place = if resource == "nodes" { String::new() } else { format!("namespaces/{}/", cluster.namespace) };
    let path = format!("/apis/subresources.kubevirt.io/v1/{place}{resource}/{name}/explain");
    serde_json::from_value(get(&cluster, &path).await?).context("the cluster's explanation is of another version")
}

fn recorded(options: &args::Explain, dir: &Path) -> anyhow::Result<Explanation> {
    let namespace = options.target.namespace.as_deref().unwrap_or("default");
    let read = || format!("cannot read the journal in {}", dir.display());
    let key = match named(&options.machine)? {
        Named::Pod(pod) => match reconcilers::find_in_journal(dir, namespace, &pod).with_context(read)? {
            Some(key) => key,
            None => bail!("pod {pod} is not in the journal in {}", dir.display()),
        },
        Named::Machine(machine) => Key::new(namespace, machine.name),
        Named::Set(_) | Named::Node(_) => bail!("a journal explains machines; sets and nodes are asked for live"),
    };
    let (story, gaps) = reconcilers::read_journal(dir, &key).with_context(read)?;
    if story.is_empty() {
        bail!("virtual machine {key} is not in the journal in {}", dir.display());
    }
    let now = story.latest();
    let mut explanation = Explanation::new(&key, story, None, now);
    explanation.gaps.extend(gaps);
    Ok(explanation)
}

/// Colours, where the output is a terminal.
struct Paint(bool);

impl Paint {
    fn with(&self, code: u8, text: &str) -> String {
        if self.0 && !text.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
    fn bold(&self, text: &str) -> String {
        self.with(1, text)
    }
    fn dim(&self, text: &str) -> String {
        self.with(2, text)
    }
    fn kind(&self, kind: WaitKind, text: &str) -> String {
        self.with(
            match kind {
                WaitKind::Problem => 31,
                WaitKind::Progress => 33,
                WaitKind::Person => 36,
            },
            text,
        )
    }
}

fn text(e: &Explanation, paint: &Paint) -> String {
    let mut lines = vec![paint.bold(&e.summary)];
    if !e.live {
        lines.push(paint.dim(&format!("(from a journal, as of {})", e.as_of.precise())));
    }
    for w in &e.waits {
        lines.push(String::new());
        lines.push(format!("Waits for  {}", paint.kind(w.kind, &w.waits_for)));
        let name = [w.condition.as_str(), w.reason.as_str()];
        let name: Vec<&str> = name.into_iter().filter(|n| !n.is_empty()).collect();
        let mut rows = vec![("because", w.message.clone())];
        rows.extend(w.evidence.iter().map(|e| ("says", e.clone())));
        rows.extend([("unblock", w.unblock.clone()), ("name", name.join("/"))]);
        if let Some(since) = w.since {
            rows.push(("since", format!("{} ({})", since.precise(), duration(e.as_of.since(since).0))));
        }
        if let Some(until) = w.until {
            rows.push(("until", until.to_string()));
        }
        for (label, value) in rows.into_iter().filter(|(_, v)| !v.is_empty()) {
            lines.push(format!("  {label:<8} {value}"));
        }
    }
    if !e.steps.is_empty() {
        lines.push(String::new());
        lines.push(format!("Steps of the last {}", e.steps[0].operation));
        for s in &e.steps {
            let so_far = if s.end.is_none() { " so far" } else { "" };
            lines.push(format!("  {:<12} {:>12}{so_far}", s.step, duration(s.milliseconds)));
        }
    }
    if !e.history.is_empty() {
        lines.push(String::new());
        lines.push("What happened (UTC), newest last".into());
        let wide = e.history.iter().map(|h| h.actor.words().chars().count()).max().unwrap_or(0);
        let mut day = String::new();
        for h in &e.history {
            let time = h.time.precise();
            let (date, clock) = time.split_at_checked(10).unwrap_or((&time, ""));
            if date != day {
                day = date.to_owned();
                lines.push(format!("  {}", paint.dim(date)));
            }
            let clock = clock.trim_start_matches('T').trim_end_matches('Z');
            let again = match h.count {
                1 => String::new(),
                n => paint.dim(&format!(" ({n} times, last at {})", h.last)),
            };
            let said = if h.problem { paint.kind(WaitKind::Problem, &h.message) } else { h.message.clone() };
            lines.push(format!("  {} {:<wide$}  {said}{again}", paint.dim(clock), h.actor.words()));
        }
    }
    for gap in &e.gaps {
        lines.push(String::new());
        lines.push(paint.dim(&format!("Note: {gap}")));
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn what_is_named_is_told_apart() {
        let machine = |kind| Named::Machine(Machine { kind, name: "a".into() });
        for (text, what) in [
            ("pod/a", Named::Pod("a".into())),
            ("pods a", Named::Pod("a".into())),
            ("vmirs/a", Named::Set("a".into())),
            ("node a", Named::Node("a".into())),
            ("vmi/a", machine(Kind::Vmi)),
            ("a", machine(Kind::Vm)),
        ] {
            assert_eq!(named(&words(text)).unwrap(), what, "{text}");
        }
        for wrong in ["pod/", "pod/a/b", "node/", "bus/a", "a b c"] {
            assert!(named(&words(wrong)).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_explanation_is_printed_for_people() {
        let e: Explanation = serde_json::from_value(json!({
            "kind": "Explanation", "apiVersion": "subresources.kubevirt.io/v1", "namespace": "default", "name": "web",
            "status": "ErrorUnschedulable", "phase": "Scheduling", "runStrategy": "Always", "summary": "web waits.",
            "waits": [{"kind": "problem", "waitsFor": "a node for its launcher pod", "condition": "PodScheduled",
                "reason": "Unschedulable", "message": "0/1 nodes", "unblock": "add a node",
                "since": "2026-01-01T10:00:02.000Z"}],
            "steps": [{"operation": "start", "step": "create-vmi", "start": "2026-01-01T10:00:00.000Z",
                       "end": "2026-01-01T10:00:00.012Z", "milliseconds": 12},
                      {"operation": "start", "step": "place-pod", "start": "2026-01-01T10:00:00.012Z", "milliseconds": 130_000}],
            "history": [{"time": "2026-01-01T10:00:00.000Z", "actor": {"kind": "user", "name": "alice"},
                "message": "created it", "problem": false, "count": 1, "last": "2026-01-01T10:00:00.000Z"},
                {"time": "2026-01-01T10:00:02.500Z", "actor": {"kind": "scheduler"},
                "message": "found no node", "problem": true, "count": 3, "last": "2026-01-01T10:00:09.000Z"}],
            "asOf": "2026-01-01T10:02:12.000Z", "live": true,
        }))
        .unwrap();
        assert_eq!(
            text(&e, &Paint(false)),
            "web waits.\n\
             \nWaits for  a node for its launcher pod\n  because  0/1 nodes\n  unblock  add a node\n  \
             name     PodScheduled/Unschedulable\n  since    2026-01-01T10:00:02.000Z (2 min 10 s)\n\
             \nSteps of the last start\n  create-vmi        0.012 s\n  place-pod      2 min 10 s so far\n\
             \nWhat happened (UTC), newest last\n  2026-01-01\n  10:00:00.000 user alice     created it\n  \
             10:00:02.500 the scheduler  found no node (3 times, last at 2026-01-01T10:00:09Z)\n"
        );
        assert!(text(&e, &Paint(true)).contains("\x1b[31ma node for its launcher pod\x1b[0m"));
    }
}
