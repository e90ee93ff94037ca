//! How single things are shown in cells.

use serde_json::Value;

use crate::semantics::seconds;
use crate::semantics::value::{items, text};

/// A span of seconds as kubectl writes it.
#[must_use]
pub(crate) fn span(s: i64) -> String {
    const MINUTE: i64 = 60;
    const HOUR: i64 = 60 * MINUTE;
    const DAY: i64 = 24 * HOUR;
    const YEAR: i64 = 365 * DAY;
    let two = |n: i64, unit: char, rest: i64, small: char| {
        if rest == 0 { format!("{n}{unit}") } else { format!("{n}{unit}{rest}{small}") }
    };
    match s {
        i64::MIN..=-2 => "<invalid>".into(),
        -1..=0 => "0s".into(),
        s if s < 2 * MINUTE => format!("{s}s"),
        s if s < 10 * MINUTE => two(s / MINUTE, 'm', s % MINUTE, 's'),
        s if s < 3 * HOUR => format!("{}m", s / MINUTE),
        s if s < 8 * HOUR => two(s / HOUR, 'h', s % HOUR / MINUTE, 'm'),
        s if s < 2 * DAY => format!("{}h", s / HOUR),
        s if s < 8 * DAY => two(s / DAY, 'd', s % DAY / HOUR, 'h'),
        s if s < 2 * YEAR => format!("{}d", s / DAY),
        s if s < 8 * YEAR => two(s / YEAR, 'y', s % YEAR / DAY, 'd'),
        s => format!("{}y", s / YEAR),
    }
}

/// How long ago a time was.
#[must_use]
pub(crate) fn age(time: &str, at: i64) -> String {
    seconds(time).map_or_else(|| "<unknown>".into(), |t| span(at - t))
}

/// A text, or `<none>`.
pub(super) fn or_none(t: &str) -> Value {
    if t.is_empty() { "<none>".into() } else { t.into() }
}

/// A text, or `<unset>`.
pub(super) fn or_unset(t: &str) -> Value {
    if t.is_empty() { "<unset>".into() } else { t.into() }
}

/// Access modes in short.
pub(super) fn modes(o: &Value, pointer: &str) -> String {
    let short = |m: &Value| match m.as_str().unwrap_or_default() {
        "ReadWriteOnce" => "RWO",
        "ReadOnlyMany" => "ROX",
        "ReadWriteMany" => "RWX",
        "ReadWriteOncePod" => "RWOP",
        _ => "",
    };
    items(o, pointer).iter().map(short).collect::<Vec<_>>().join(",")
}

/// What a pod is doing, in one word, as kubectl's STATUS column says it.
pub(super) fn pod_reason(pod: &Value) -> String {
    let mut reason = text(pod, "/status/phase").to_owned();
    let own = text(pod, "/status/reason");
    if !own.is_empty() {
        reason = own.to_owned();
    }
    if items(pod, "/status/conditions")
        .iter()
        .any(|c| text(c, "/type") == "PodScheduled" && text(c, "/reason") == "SchedulingGated")
    {
        reason = "SchedulingGated".into();
    }
    let total = items(pod, "/spec/initContainers").len();
    let mut initializing = false;
    for (i, c) in items(pod, "/status/initContainerStatuses").iter().enumerate() {
        let sidecar = items(pod, "/spec/initContainers")
            .iter()
            .any(|s| text(s, "/name") == text(c, "/name") && text(s, "/restartPolicy") == "Always");
        if c.pointer("/state/terminated/exitCode").and_then(Value::as_i64) == Some(0)
            || (sidecar && c.get("started").and_then(Value::as_bool) == Some(true))
        {
            continue;
        }
        initializing = true;
        reason = if let Some(t) = c.pointer("/state/terminated") {
            format!("Init:{}", terminated(t))
        } else {
            match text(c, "/state/waiting/reason") {
                "" | "PodInitializing" => format!("Init:{i}/{total}"),
                other => format!("Init:{other}"),
            }
        };
        break;
    }
    if !initializing {
        let mut running = false;
        for c in items(pod, "/status/containerStatuses").iter().rev() {
            let waiting = text(c, "/state/waiting/reason");
            if !waiting.is_empty() {
                reason = waiting.to_owned();
            } else if let Some(t) = c.pointer("/state/terminated") {
                reason = terminated(t);
            } else if c.get("ready").and_then(Value::as_bool) == Some(true) && c.pointer("/state/running").is_some() {
                running = true;
            }
        }
        if reason == "Completed" && running {
            let ready = items(pod, "/status/conditions")
                .iter()
                .any(|c| text(c, "/type") == "Ready" && text(c, "/status") == "True");
            reason = if ready { "Running" } else { "NotReady" }.into();
        }
    }
    if !text(pod, "/metadata/deletionTimestamp").is_empty() {
        let over = matches!(text(pod, "/status/phase"), "Succeeded" | "Failed");
        if own == "NodeLost" {
            reason = "Unknown".into();
        } else if !over {
            reason = "Terminating".into();
        }
    }
    reason
}

fn terminated(t: &Value) -> String {
    let reason = text(t, "/reason");
    if !reason.is_empty() {
        return reason.to_owned();
    }
    match t.get("signal").and_then(Value::as_i64).unwrap_or(0) {
        0 => format!("ExitCode:{}", t.get("exitCode").and_then(Value::as_i64).unwrap_or(0)),
        signal => format!("Signal:{signal}"),
    }
}

/// What a node is, in the words of kubectl's STATUS column.
pub(super) fn node_status(node: &Value) -> String {
    let ready = items(node, "/status/conditions").iter().find(|c| text(c, "/type") == "Ready");
    let mut out = match ready.map(|c| text(c, "/status")) {
        Some("True") => "Ready".to_owned(),
        Some(_) => "NotReady".to_owned(),
        None => "Unknown".to_owned(),
    };
    if node.pointer("/spec/unschedulable").and_then(Value::as_bool) == Some(true) {
        out.push_str(",SchedulingDisabled");
    }
    out
}

/// The roles of a node, from its labels.
pub(super) fn node_roles(node: &Value) -> Value {
    let mut roles: Vec<&str> = Vec::new();
    for (k, v) in node.pointer("/metadata/labels").and_then(Value::as_object).into_iter().flatten() {
        if let Some(role) = k.strip_prefix("node-role.kubernetes.io/") {
            roles.push(role);
        } else if k == "kubernetes.io/role" {
            roles.extend(v.as_str());
        }
    }
    roles.retain(|r| !r.is_empty());
    or_none(&roles.join(","))
}

/// An address of a node.
pub(super) fn node_address(node: &Value, kind: &str) -> Value {
    let found = items(node, "/status/addresses").iter().find(|a| text(a, "/type") == kind).map(|a| text(a, "/address"));
    or_none(found.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::span;

    #[test]
    fn spans_are_written_as_kubectl_writes_them() {
        for (s, want) in [
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (130, "2m10s"),
            (700, "11m"),
            (3 * 3600, "3h"),
            (3 * 3600 + 61, "3h1m"),
            (9 * 3600, "9h"),
            (49 * 3600, "2d1h"),
            (10 * 86400, "10d"),
        ] {
            assert_eq!(span(s), want, "{s}");
        }
    }
}
