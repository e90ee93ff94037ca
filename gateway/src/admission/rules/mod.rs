//! KubeVirt's rules about the spec of an instance, the same for every object that carries one; `base` is where it stands
//! (`spec`, `spec.template.spec`). They look at a spec whose defaults are filled in.

mod compute;
mod disks;
mod network;
mod scheduling;
mod volumes;

use super::{get, items, text};
use crate::status::{Cause, CauseType};
use serde_json::Value;

/// What was found wrong, and what deserves a warning.
#[derive(Debug, Default)]
pub(crate) struct Problems {
    pub causes: Vec<Cause>,
    pub warnings: Vec<String>,
}

impl Problems {
    pub fn add(&mut self, kind: CauseType, field: impl Into<String>, message: impl Into<String>) {
        self.causes.push(Cause { kind, field: field.into(), message: message.into() });
    }

    pub fn invalid(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.add(CauseType::Invalid, field, message);
    }

    pub fn warn(&mut self, message: impl Into<String>) {
        self.warnings.push(message.into());
    }

    /// A value outside a set; empty is as good as not there.
    pub fn one_of(&mut self, kind: CauseType, field: &str, value: &Value, allowed: &[&str]) {
        let given = value.as_str().unwrap_or_default();
        if !value.is_null() && !given.is_empty() && !allowed.contains(&given) {
            self.add(kind, field, format!("{field} is set with an unrecognized option: {given}"));
        }
    }
}

/// All rules about a spec.
pub(crate) fn spec(spec: &Value, base: &str, problems: &mut Problems) {
    compute::check(spec, base, problems);
    scheduling::check(spec, base, problems);
    network::check(spec, base, problems);
    disks::check(spec, base, problems);
    volumes::check(spec, base, problems);
    boot_order(spec, base, problems);
    probes(spec, base, problems);
}

/// A probe has one way of asking, and asks over a network that is there.
fn probes(spec: &Value, base: &str, problems: &mut Problems) {
    let reachable = items(spec, &["networks"]).iter().any(|n| n.get("pod").is_some_and(Value::is_object));
    for name in ["readinessProbe", "livenessProbe"] {
        let (probe, field) = (get(spec, &[name]), format!("{base}.{name}"));
        if probe.is_null() {
            continue;
        }
        let ways = set(probe, &["exec", "guestAgentPing", "httpGet", "tcpSocket"]);
        match ways[..] {
            [] => problems.add(
                CauseType::Required,
                &field,
                format!(
                    "either {field}.tcpSocket, {field}.exec or {field}.httpGet must be set if a {field} is specified"
                ),
            ),
            ["httpGet" | "tcpSocket"] if !reachable => {
                problems.invalid(&field, format!("{field} is only allowed if the Pod Network is attached"));
            }
            ["exec"] if items(probe, &["exec", "command"]).is_empty() => {
                problems.add(CauseType::Required, format!("{field}.exec.command"), "a command to run in the guest");
            }
            [_] => {}
            _ => problems.invalid(&field, format!("{field} must have exactly one probe type set")),
        }
    }
    if text(spec, &["startStrategy"]) == "Paused" && !get(spec, &["livenessProbe"]).is_null() {
        let field = format!("{base}.startStrategy");
        problems.invalid(&field, format!("either {field} or {base}.livenessProbe should be provided.Pausing VMIs with LivenessProbe is not supported"));
    }
}

/// Boot orders are positive, and unique over disks and interfaces.
fn boot_order(spec: &Value, base: &str, problems: &mut Problems) {
    let mut taken = Vec::new();
    for kind in ["disks", "interfaces"] {
        for (i, device) in items(spec, &["domain", "devices", kind]).iter().enumerate() {
            let order = get(device, &["bootOrder"]);
            let field = format!("{base}.domain.devices.{kind}[{i}].bootOrder");
            match order.as_i64() {
                None => {}
                Some(n) if n < 1 => {
                    problems.invalid(&field, format!("{field} must have a boot order > 0, if supplied"))
                }
                Some(n) if taken.contains(&n) => {
                    problems.invalid(&field, format!("Boot order for {field} already set for a different device."));
                }
                Some(n) => taken.push(n),
            }
        }
    }
}

/// A DNS label of at most 63 characters.
pub(super) fn is_label(s: &str) -> bool {
    s.len() <= 63 && is_part(s)
}

/// What a DNS label is made of.
fn is_part(s: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    !s.is_empty() && s.bytes().all(inner) && !s.starts_with('-') && !s.ends_with('-')
}

/// What DNS labels are made of with dots between, at most 253 characters. As in Kubernetes, a part alone has no bound.
pub(super) fn is_subdomain(s: &str) -> bool {
    s.len() <= 253 && s.split('.').all(is_part)
}

/// Names that occur twice, as (index, name) of the later one.
fn duplicates(list: &[Value]) -> Vec<(usize, &str, usize)> {
    let names: Vec<&str> = list.iter().map(|v| text(v, &["name"])).collect();
    let first = |n: &&str| names.iter().position(|m| m == n);
    names.iter().enumerate().filter_map(|(i, n)| first(n).filter(|f| *f < i).map(|f| (i, *n, f))).collect()
}

/// The keys of an object that are set (not null) out of a list of keys.
fn set<'k>(value: &Value, keys: &[&'k str]) -> Vec<&'k str> {
    keys.iter().copied().filter(|k| value.get(k).is_some_and(|v| !v.is_null())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_what_they_are_in_kubernetes() {
        let long = "a".repeat(253);
        for name in ["a", "a-1.b", &long] {
            assert!(is_subdomain(name), "{name}");
        }
        for name in ["", ".", "a.", "-a", "a..b", "A", "a_b", "\u{fc}", &format!("{long}a")] {
            assert!(!is_subdomain(name), "{name}");
        }
        assert!(is_label(&long[..63]) && !is_label(&long[..64]) && !is_label("a.b"));
    }
}
