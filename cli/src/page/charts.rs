//! Drawings: what something was called over time, steps as a waterfall, what a processor did. All are SVG with a text beside them
//! or in them; positions are attributes, since the page's policy forbids styles in elements.

use maud::{Markup, html};
use state::explain::StepTaken;

use super::look::Called;
use crate::machines::{Tone, duration, tone};

/// How far right the parts of parts go.
const DEPTH: usize = 4;

/// The class of a tone in the style sheet.
pub fn class(tone: Tone) -> &'static str {
    match tone {
        Tone::Good => "good",
        Tone::Busy => "busy",
        Tone::Off => "off",
        Tone::Bad => "bad",
    }
}

/// A time of day, in UTC.
pub fn clock(milliseconds: i64) -> String {
    let seconds = milliseconds.div_euclid(1000).rem_euclid(86_400);
    format!("{:02}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// A share of a whole, in percent with two digits.
fn percent(part: i64, whole: i64) -> String {
    format!("{:.2}%", part.clamp(0, whole.max(1)) as f64 * 100.0 / whole.max(1) as f64)
}

fn span(milliseconds: i64) -> String {
    duration(u64::try_from(milliseconds).unwrap_or_default())
}

/// What was called so from when until when.
fn spans(called: &[Called], from: i64, to: i64) -> Vec<(i64, i64, &str)> {
    let ends = called.iter().skip(1).map(|(since, _)| *since).chain([to]);
    let spans =
        called.iter().zip(ends).map(|((since, status), end)| ((*since).max(from), end.min(to), status.as_str()));
    spans.filter(|(since, end, status)| end > since && !status.is_empty()).collect()
}

/// What something was called between two times, as a strip.
pub fn strip(called: &[Called], from: i64, to: i64) -> Markup {
    let spans = spans(called, from, to);
    let words = match called.last() {
        Some((since, status)) if !status.is_empty() => format!("{status} since {} UTC", clock(*since)),
        _ => "nothing is known".to_owned(),
    };
    html! {
        svg.strip role="img" aria-label=(words) preserveAspectRatio="none" {
            rect.nothing x="0" y="0" width="100%" height="100%" {}
            @for (since, end, status) in spans {
                rect class=(class(tone(status))) x=(percent(since - from, to - from)) y="0"
                    width=(percent(end - since, to - from)) height="100%" {
                    title { (status) ": " (clock(since)) " UTC, " (span(end - since)) }
                }
            }
        }
    }
}

/// One line of a waterfall; times are in microseconds.
pub struct Bar<'a> {
    /// What was done.
    pub name: &'a str,
    /// Who did it, and where.
    pub by: String,
    /// Parts are further right than what they are part of.
    pub depth: usize,
    /// Since 1970.
    pub start: i64,
    /// Since 1970.
    pub end: i64,
    /// How it is drawn: `done`, `open` or `failed`.
    pub kind: &'static str,
}

/// Lines of a waterfall below one another, each where it was in time.
pub fn bars(all: &[Bar<'_>]) -> Markup {
    let (Some(first), Some(last)) = (all.iter().map(|b| b.start).min(), all.iter().map(|b| b.end).max()) else {
        return html! {};
    };
    let whole = (last - first).max(1);
    let named = all.iter().any(|b| !b.by.is_empty());
    html! {
        table.waterfall {
            thead { tr {
                th scope="col" { "Step" } @if named { th.by scope="col" { "By" } }
                th scope="col" { span.unseen { "Drawn over time" } }
                th.number.after scope="col" { "After" } th.number scope="col" { "Took" }
            } }
            tbody { @for b in all {
                tr class=(format!("d{}", b.depth.min(DEPTH))) {
                    th scope="row" { (b.name) @if b.kind == "failed" { span.unseen { " (failed)" } } }
                    @if named { td.by { (b.by) } }
                    td.bars {
                        svg.bar aria-hidden="true" preserveAspectRatio="none" {
                            rect class=(b.kind) x=(percent(b.start - first, whole)) y="20%"
                                width=(percent((b.end - b.start).max(whole / 400), whole)) height="60%" rx="2" {}
                        }
                    }
                    td.number.after { (span((b.start - first) / 1000)) }
                    td.number { (span((b.end - b.start) / 1000)) @if b.kind == "open" { " so far" } }
                }
            } }
        }
    }
}

/// The steps of an operation below one another, each where it was in time.
pub fn waterfall(steps: &[StepTaken], now: i64) -> Markup {
    let us = |t: state::Timestamp| i64::try_from(t.0).map_or(i64::MAX, |ms| ms.saturating_mul(1000));
    let (Some(first), Some(operation)) = (steps.iter().map(|s| us(s.start)).min(), steps.first()) else {
        return html! {};
    };
    let now = now.saturating_mul(1000);
    let bar = |name, depth, start, end: Option<i64>| Bar {
        name,
        by: String::new(),
        depth,
        start,
        end: end.unwrap_or(now).max(start),
        kind: if end.is_some() { "done" } else { "open" },
    };
    let last = steps.iter().map(|s| s.end.map(us)).collect::<Option<Vec<_>>>().and_then(|all| all.into_iter().max());
    let mut all = vec![bar(&*operation.operation, 0, first, last)];
    all.extend(steps.iter().map(|s| bar(&*s.step, 1, us(s.start), s.end.map(us))));
    bars(&all)
}

/// A part of a whole, as a bar.
pub fn meter(part: f64, whole: f64, words: &str) -> Markup {
    let share = if whole > 0.0 { (part / whole).clamp(0.0, 1.0) } else { 0.0 };
    let class = if share > 0.9 {
        "bad"
    } else if share > 0.75 {
        "busy"
    } else {
        "use"
    };
    html! {
        svg.meter role="img" aria-label=(words) preserveAspectRatio="none" {
            rect.nothing x="0" y="0" width="100%" height="100%" rx="3" {}
            rect class=(class) x="0" y="0" width=(format!("{:.1}%", share * 100.0)) height="100%" rx="3" {}
        }
    }
}

/// The last looks at a number, newest right.
pub fn spark(values: &[f64], most: f64) -> Markup {
    const WIDTH: f64 = 120.0;
    const HEIGHT: f64 = 24.0;
    let top = values.iter().copied().fold(most, f64::max).max(0.01);
    let step = WIDTH / (values.len().max(2) - 1) as f64;
    let points: Vec<String> = values
        .iter()
        .enumerate()
        .map(|(i, v)| format!("{:.1},{:.1}", i as f64 * step, HEIGHT - 1.0 - v.max(0.0) / top * (HEIGHT - 2.0)))
        .collect();
    html! {
        svg.spark viewBox="0 0 120 24" preserveAspectRatio="none" aria-hidden="true" {
            polyline points=(points.join(" ")) {}
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    #[test]
    fn a_strip_shows_what_was_called_when() {
        let called = [(1_000, "Starting".to_owned()), (3_000, "Running".to_owned()), (9_000, String::new())];
        assert_eq!(spans(&called, 0, 10_000), [(1_000, 3_000, "Starting"), (3_000, 9_000, "Running")]);
        assert_eq!(spans(&called, 2_000, 4_000), [(2_000, 3_000, "Starting"), (3_000, 4_000, "Running")]);
        assert!(spans(&called, 20_000, 30_000).is_empty());
        let text = strip(&called[..2], 0, 10_000).into_string();
        assert!(
            text.contains("x=\"30.00%\"") && text.contains("width=\"70.00%\"") && text.contains("class=\"good\""),
            "{text}"
        );
        assert!(text.contains("Running since 00:00:03 UTC"));
        assert!(!text.contains("style="), "the policy forbids it");
    }

    #[test]
    fn steps_are_drawn_where_they_were() {
        let steps: Vec<StepTaken> = serde_json::from_value(json!([
            {"operation": "start", "step": "create-vmi", "start": "1970-01-01T00:00:01.000Z", "end": "1970-01-01T00:00:02.000Z", "milliseconds": 1000},
            {"operation": "start", "step": "place-pod", "start": "1970-01-01T00:00:02.000Z", "milliseconds": 3000},
        ]))
        .unwrap();
        let text = waterfall(&steps, 5_000).into_string();
        assert!(text.contains("x=\"25.00%\"") && text.contains("width=\"75.00%\""), "{text}");
        assert!(text.contains("3.000 s so far") && text.contains("place-pod"));
        assert_eq!(waterfall(&[], 0).into_string(), "");
    }

    #[test]
    fn numbers_never_leave_their_drawing() {
        for (part, whole) in [(5.0, 0.0), (-1.0, 2.0), (9.0, 3.0)] {
            let text = meter(part, whole, "x").into_string();
            assert!(text.contains("width=\"0.0%\"") || text.contains("width=\"100.0%\""), "{text}");
        }
        assert!(spark(&[], 1.0).into_string().contains("points=\"\""));
        assert!(spark(&[1.0, -3.0], 2.0).into_string().contains("points=\"0.0,12.0 120.0,23.0\""));
        assert_eq!(clock(-1), "23:59:59");
    }
}
