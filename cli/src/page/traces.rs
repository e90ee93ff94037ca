//! Traces of the last operations as this machine's processes remember them: each one as a waterfall, from the request to the guest's agent.

use std::collections::{BTreeMap, BTreeSet};

use maud::{Markup, html};
use telemetry::kept::Kept;

use super::charts::{Bar, bars, clock};

/// Operations that are shown, the newest.
const SHOWN: usize = 4;

/// One trace: its steps with how deep they are, in the order in which they are shown.
struct Trace<'a> {
    id: &'a str,
    steps: Vec<(&'a Kept, usize)>,
}

/// The newest first.
fn traces(spans: &[Kept]) -> Vec<Trace<'_>> {
    let mut all: BTreeMap<&str, Vec<&Kept>> = BTreeMap::new();
    for span in spans {
        all.entry(&span.trace).or_default().push(span);
    }
    let mut all: Vec<Trace<'_>> = all.into_iter().map(|(id, spans)| Trace { id, steps: ordered(&spans) }).collect();
    let begun = |t: &Trace<'_>| t.steps.iter().map(|(s, _)| s.start).max();
    all.sort_by_key(|t| std::cmp::Reverse(begun(t)));
    all.truncate(SHOWN);
    all
}

/// Each part after what it is part of. What has lost that, since it is older than what is remembered, stands at the top.
fn ordered<'a>(spans: &[&'a Kept]) -> Vec<(&'a Kept, usize)> {
    let known: BTreeSet<&str> = spans.iter().map(|s| &*s.span).collect();
    let below = |parent: &str| {
        let is_below = |s: &&&Kept| match parent {
            "" => !known.contains(&*s.parent),
            parent => s.parent == parent,
        };
        let mut all: Vec<&'a Kept> = spans.iter().filter(is_below).copied().collect();
        // The last one is taken first.
        all.sort_by_key(|s| std::cmp::Reverse((s.start, s.end, &s.span)));
        all
    };
    let mut left: Vec<(&Kept, usize)> = below("").into_iter().map(|s| (s, 0)).collect();
    let (mut out, mut told) = (Vec::new(), BTreeSet::new());
    while let Some((span, depth)) = left.pop() {
        if told.insert(&*span.span) {
            out.push((span, depth));
            left.extend(below(&span.span).into_iter().map(|s| (s, depth + 1)));
        }
    }
    out
}

/// A trace's id, and the way to it where there is one.
pub fn link(id: &str, jaeger: Option<&str>) -> Markup {
    html! { @match jaeger {
        Some(jaeger) => a id=(format!("t-{id}")) href=(format!("{jaeger}/trace/{id}")) rel="noreferrer" { "Trace " code { (id) } },
        None => code { (id) },
    } }
}

/// Whether all of these steps, each with the time when it began in milliseconds, are among the spans.
pub fn has(spans: &[Kept], mut steps: impl Iterator<Item = (String, i64)>) -> bool {
    steps.all(|(name, start)| spans.iter().any(|s| s.name == name && s.start / 1000 == start))
}

/// The last operations.
pub fn shown(spans: &[Kept], jaeger: Option<&str>) -> Markup {
    let by = |s: &Kept| {
        let service = s.service.trim_start_matches("virtfold-");
        // A process of many parts has the name of one.
        if s.node.is_empty() || service == "controller" { service.to_owned() } else { format!("{service}, {}", s.node) }
    };
    html! {
        section.trace aria-labelledby="traces" {
            h2 #traces { "The last operations" }
            p.soft { "As the processes of this machine remember them; the newest first." }
            @for trace in traces(spans) {
                @if let Some((root, _)) = trace.steps.first() {
                    h3 { (root.name) @if !root.user.is_empty() { " by " (root.user) } " "
                        span.soft { (clock(root.start / 1000)) " UTC, " (link(trace.id, jaeger)) } }
                }
                (bars(&trace.steps.iter().map(|(s, depth)| Bar {
                    name: &s.name, by: by(s), depth: *depth, start: s.start, end: s.end.max(s.start),
                    kind: if s.error.is_empty() { "done" } else { "failed" },
                }).collect::<Vec<_>>()))
                @for (s, _) in trace.steps.iter().filter(|(s, _)| !s.error.is_empty()) { p.gap { (s.name) ": " (s.error) } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(trace: &str, name: &str, parent: &str, start: i64) -> Kept {
        let text = |t: &str| t.to_owned();
        Kept {
            trace: text(trace),
            span: format!("{trace}{name}"),
            parent: if parent.is_empty() { String::new() } else { format!("{trace}{parent}") },
            name: text(name),
            start,
            end: start + 2_000_000,
            ..Kept::default()
        }
    }

    #[test]
    fn each_trace_is_in_order_the_newest_first_and_what_lost_its_whole_is_at_the_top() {
        let all = [
            span("old", "lost", "forgotten", 9),
            span("new", "boot", "start", 30),
            span("new", "launch", "boot", 31),
            span("new", "create", "start", 20),
            span("new", "start", "write", 20),
            span("new", "write", "", 20),
        ];
        let told: Vec<_> = traces(&all)
            .iter()
            .map(|t| (t.id.to_owned(), t.steps.iter().map(|(s, depth)| (s.name.clone(), *depth)).collect::<Vec<_>>()))
            .collect();
        let steps = [("write", 0), ("start", 1), ("create", 2), ("boot", 2), ("launch", 3)];
        let steps = steps.map(|(name, depth)| (name.to_owned(), depth)).to_vec();
        assert_eq!(told, [("new".to_owned(), steps), ("old".to_owned(), vec![("lost".to_owned(), 0)])]);
        let many: Vec<_> = (0..9).map(|n| span(&n.to_string(), "stop", "", n)).collect();
        assert_eq!(traces(&many).len(), SHOWN);
        assert!(has(&all, [("boot".to_owned(), 0)].into_iter()) && !has(&all, [("boot".to_owned(), 1)].into_iter()));
        // Of what turns in a circle, nothing is shown; it ends all the same.
        assert!(ordered(&[&span("x", "a", "b", 1), &span("x", "b", "a", 1)]).is_empty());
    }

    #[test]
    fn what_failed_says_why_and_the_way_to_jaeger_is_there() {
        let mut failed = span("0af7", "start", "", 5_000_000);
        failed.error = "ErrImagePull: <b>".into();
        failed.user = "eve".into();
        failed.service = "virtfold-node-agent".into();
        failed.node = "node-1".into();
        let text = shown(&[failed.clone()], Some("http://127.0.0.1:16686")).into_string();
        for words in [
            "start by eve",
            "00:00:05 UTC",
            "href=\"http://127.0.0.1:16686/trace/0af7\"",
            "start: ErrImagePull: &lt;b&gt;",
            "node-agent, node-1",
            "class=\"failed\"",
        ] {
            assert!(text.contains(words), "{words} in {text}");
        }
        assert!(!shown(&[failed], None).into_string().contains("href"));
    }
}
