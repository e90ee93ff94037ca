//! What a client asked of the API server, from its audit log, and the table of it.

use anyhow::{Context, Result};
use serde_json::Value;
use std::{collections::BTreeMap, fmt::Write as _, fs, path::Path};

/// One call.
#[derive(Clone, Debug)]
pub struct Call {
    /// Who.
    pub user: String,
    /// `create`, `get`, `list`, `watch`, `patch`, `update`, `delete`, ...
    pub verb: String,
    /// `virtualmachines/status` and the like.
    pub resource: String,
    /// Of the object.
    pub namespace: String,
    /// Of the object.
    pub name: String,
    /// The answer.
    pub code: u64,
    /// Microseconds from receipt to answer.
    pub micros: i64,
    /// When it was received.
    pub received: String,
    /// What was sent, where that is written down.
    pub body: Value,
}

impl Call {
    /// A write.
    pub fn is_write(&self) -> bool {
        matches!(self.verb.as_str(), "create" | "update" | "patch" | "delete" | "deletecollection")
    }

    /// Not done as asked: a conflict, a refusal, an error.
    pub fn is_refused(&self) -> bool {
        self.code >= 400
    }

    /// What everybody does who leads, and to watch: nothing that a change costs.
    pub fn is_standing(&self) -> bool {
        self.resource == "leases" || self.verb == "watch"
    }
}

/// Reads an audit log. A line that is not whole yet is left out.
pub fn read(path: &Path) -> Result<Vec<Call>> {
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let calls = text.lines().filter_map(|line| call(&serde_json::from_str(line).ok()?));
    Ok(calls.collect())
}

fn call(event: &Value) -> Option<Call> {
    let text = |pointer: &str| event.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
    let verb = text("/verb");
    // A watch counts when it is answered, everything else when it is over.
    let wanted = if verb == "watch" { "ResponseStarted" } else { "ResponseComplete" };
    if text("/stage") != wanted {
        return None;
    }
    let subresource = text("/objectRef/subresource");
    let resource = match (text("/objectRef/resource"), subresource.is_empty()) {
        (resource, true) => resource,
        (resource, false) => format!("{resource}/{subresource}"),
    };
    let time = |pointer: &str| text(pointer).parse::<jiff::Timestamp>().ok();
    let micros = match (time("/requestReceivedTimestamp"), time("/stageTimestamp")) {
        (Some(from), Some(to)) => to.as_microsecond() - from.as_microsecond(),
        _ => 0,
    };
    Some(Call {
        user: text("/user/username"),
        verb,
        resource,
        namespace: text("/objectRef/namespace"),
        name: text("/objectRef/name"),
        code: event.pointer("/responseStatus/code").and_then(Value::as_u64).unwrap_or(0),
        micros,
        received: text("/requestReceivedTimestamp"),
        body: event.get("requestObject").cloned().unwrap_or_default(),
    })
}

/// Calls by verb and resource.
pub type Counts = BTreeMap<(String, String), u64>;

/// Counts calls.
pub fn counts<'a>(calls: impl IntoIterator<Item = &'a Call>) -> Counts {
    let mut counts = Counts::new();
    for call in calls {
        *counts.entry((call.verb.clone(), call.resource.clone())).or_default() += 1;
    }
    counts
}

/// The table verb x resource x count, for `vms` machines, as Markdown.
pub fn table(counts: &Counts, vms: u64) -> String {
    let mut text = String::from("| verb | resource | a VM |\n|---|---|---|\n");
    for ((verb, resource), count) in counts {
        let each = *count as f64 / vms.max(1) as f64;
        let each = if each.fract() == 0.0 { format!("{each}") } else { format!("{each:.2}") };
        let _ = writeln!(text, "| {verb} | {resource} | {each} |");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn calls_are_read_once_each_and_counted() {
        let event = |verb: &str, stage: &str, code: u64| {
            json!({"verb": verb, "stage": stage, "user": {"username": "u"}, "responseStatus": {"code": code},
                "objectRef": {"resource": "virtualmachines", "subresource": "status", "name": "a", "namespace": "n"},
                "requestReceivedTimestamp": "2026-01-01T00:00:00.000001Z", "stageTimestamp": "2026-01-01T00:00:00.000301Z"})
        };
        let events = [
            event("patch", "ResponseComplete", 200),
            event("patch", "ResponseComplete", 409),
            event("watch", "ResponseStarted", 200),
            event("watch", "ResponseComplete", 200),
        ];
        let calls: Vec<Call> = events.iter().filter_map(call).collect();
        assert_eq!(calls.len(), 3);
        assert_eq!(calls.iter().filter(|c| c.is_refused()).count(), 1);
        assert_eq!(calls.iter().filter(|c| c.is_standing()).count(), 1);
        assert_eq!(calls.first().map(|c| c.micros), Some(300));
        let text = table(&counts(calls.iter().filter(|c| c.is_write())), 4);
        assert!(text.contains("| patch | virtualmachines/status | 0.50 |"), "{text}");
    }
}
