//! What a machine keeps of a VM's template: a digest for each part, never what stands in it.
//!
//! Two templates are compared part by part, so that people can be told *what* changed. A template may hold secrets (user
//! data), and short ones could be guessed from a plain hash in a journal, so the digests are keyed with bytes that the
//! process draws when it starts. Only digests that one process made are comparable, which is enough: a controller that
//! starts anew reads both templates anew.

use crate::instancetype::{Matcher, Role};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::{borrow::Cow, cmp::Ordering, sync::OnceLock};

static KEY: OnceLock<[u8; 32]> = OnceLock::new();

/// Sets the key of all digests; the first one stays. Without one the digests are those of an all-zero key.
pub fn set_key(key: [u8; 32]) {
    // A second caller in one process (two controllers in a test) shares the first one's key.
    let _ = KEY.set(key);
}

/// Parts whose fields are parts of their own.
const SPLIT: [&str; 2] = ["domain", "domain.devices"];

/// Parts in which `1Gi` and `1024Mi` are the same.
const AMOUNTS: [&str; 2] = ["domain.memory", "domain.resources"];

/// Usual parts, so that their names cost nothing.
const USUAL: [&str; 33] = [
    "accessCredentials",
    "affinity",
    "architecture",
    "dnsConfig",
    "dnsPolicy",
    "domain.chassis",
    "domain.clock",
    "domain.cpu",
    "domain.devices.autoattachGraphicsDevice",
    "domain.devices.autoattachSerialConsole",
    "domain.devices.disks",
    "domain.devices.inputs",
    "domain.devices.interfaces",
    "domain.devices.rng",
    "domain.devices.watchdog",
    "domain.features",
    "domain.firmware",
    "domain.machine",
    "domain.memory",
    "domain.resources",
    "evictionStrategy",
    "hostname",
    "networks",
    "nodeSelector",
    "priorityClassName",
    "schedulerName",
    "startStrategy",
    "subdomain",
    "terminationGracePeriodSeconds",
    "tolerations",
    "topologySpreadConstraints",
    "volumes",
    "livenessProbe",
];

/// Digests of a `spec.template`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Template {
    /// Labels and annotations.
    metadata: u64,
    /// The parts of the spec, sorted by path.
    parts: Vec<(Cow<'static, str>, u64)>,
}

impl Template {
    /// The digests of a template as the API has it.
    pub fn of(template: &Value) -> Self {
        let mut parts = vec![];
        if let Some(Value::Object(spec)) = template.get("spec") {
            for (name, value) in spec {
                part(name.clone(), value, &mut parts);
            }
        }
        parts.sort();
        Self { metadata: digest(template.get("metadata").unwrap_or(&Value::Null), false), parts }
    }

    /// With what the machine names beside the template: a part for each.
    pub fn with(mut self, matchers: &[Matcher]) -> Self {
        for m in matchers {
            let named = json!([m.name, m.kind, m.revision]);
            self.parts.push((Cow::Borrowed(m.role.field()), digest(&named, false)));
        }
        self.parts.sort();
        self
    }

    /// The path in a VirtualMachine of a part.
    pub fn path(part: &str) -> String {
        match Role::ALL.into_iter().find(|r| r.field() == part) {
            Some(role) => format!("spec.{}", role.field()),
            None => format!("spec.template.spec.{part}"),
        }
    }

    /// Paths (below the template's `spec`) of the parts that differ.
    pub fn changed<'a>(&'a self, other: &'a Self) -> Vec<&'a str> {
        let (mut a, mut b) = (self.parts.iter().peekable(), other.parts.iter().peekable());
        let mut out = vec![];
        loop {
            let order = match (a.peek(), b.peek()) {
                (None, None) => return out,
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some((x, _)), Some((y, _))) => x.cmp(y),
            };
            let x = if order != Ordering::Greater { a.next() } else { None };
            let y = if order != Ordering::Less { b.next() } else { None };
            if x != y {
                out.extend(x.or(y).map(|(path, _)| path.as_ref()));
            }
        }
    }
}

fn part(path: String, value: &Value, out: &mut Vec<(Cow<'static, str>, u64)>) {
    if is_nothing(value) {
        return;
    }
    match value {
        Value::Object(fields) if SPLIT.contains(&path.as_str()) => {
            for (name, field) in fields {
                part(format!("{path}.{name}"), field, out);
            }
        }
        // Which UUID a firmware has is not for the template to say once the machine exists.
        Value::Object(fields) if path == "domain.firmware" => {
            let rest: serde_json::Map<_, _> =
                fields.iter().filter(|(k, _)| *k != "uuid").map(|(k, v)| (k.clone(), v.clone())).collect();
            if !rest.is_empty() {
                let sum = digest(&Value::Object(rest), false);
                out.push((name_of(path), sum));
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) | Value::Object(_) => {
            let sum = digest(value, AMOUNTS.contains(&path.as_str()));
            out.push((name_of(path), sum));
        }
    }
}

fn name_of(path: String) -> Cow<'static, str> {
    USUAL.into_iter().find(|u| *u == path).map_or(Cow::Owned(path), Cow::Borrowed)
}

/// A field that might as well not be there.
fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(a) => a.is_empty(),
        Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Object(_) => false,
    }
}

/// A digest that does not depend on the order of fields.
fn digest(value: &Value, amounts: bool) -> u64 {
    let mut h = Sha256::new();
    h.update(KEY.get().copied().unwrap_or_default());
    feed(&mut h, value, amounts);
    h.finalize().iter().take(8).fold(0, |n, b| (n << 8) | u64::from(*b))
}

fn feed(h: &mut Sha256, value: &Value, amounts: bool) {
    let mut text = |tag: u8, s: &str| {
        h.update([tag]);
        h.update((s.len() as u64).to_le_bytes());
        h.update(s.as_bytes());
    };
    match value {
        Value::Null => text(0, ""),
        Value::Bool(b) => text(1, if *b { "true" } else { "false" }),
        Value::Number(_) | Value::String(_) if amounts && api::quantity_milli(value).is_some() => {
            text(2, &api::quantity_milli(value).unwrap_or_default().to_string());
        }
        Value::Number(n) => text(3, &n.to_string()),
        Value::String(s) => text(4, s),
        Value::Array(list) => {
            text(5, &list.len().to_string());
            for v in list {
                feed(h, v, amounts);
            }
        }
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().filter(|(_, v)| !is_nothing(v)).collect();
            fields.sort_by_key(|(k, _)| *k);
            text(6, &fields.len().to_string());
            for (k, v) in fields {
                feed(h, &Value::String(k.clone()), false);
                feed(h, v, amounts);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(spec: Value) -> Template {
        Template::of(&json!({"metadata": {"labels": {"a": "b"}}, "spec": spec}))
    }

    #[test]
    fn what_changed_is_named_and_what_means_the_same_is_the_same() {
        let old = spec(json!({
            "domain": {"cpu": {"cores": 1}, "memory": {"guest": "1Gi"}, "firmware": {"uuid": "a"},
                "devices": {"disks": [{"name": "a"}], "rng": {}}},
            "volumes": [{"name": "a", "cloudInitNoCloud": {"userData": "secret"}}], "hostname": "h"}));
        for (new, changed) in [
            // Order of fields, another way to write an amount, a field that says nothing, the firmware's UUID.
            (
                json!({"hostname": "h", "tolerations": [], "nodeSelector": null,
                    "volumes": [{"cloudInitNoCloud": {"userData": "secret"}, "name": "a"}],
                    "domain": {"devices": {"rng": {}, "disks": [{"name": "a", "cache": null}]}, "cpu": {"cores": 1},
                        "memory": {"guest": "1024Mi"}}}),
                &[][..],
            ),
            (
                json!({"hostname": "g", "subdomain": "s",
                    "domain": {"cpu": {"cores": 2}, "memory": {"guest": "1Gi"}, "firmware": {"uuid": "b", "serial": "s"},
                        "devices": {"disks": [{"name": "b"}], "newDevice": true}},
                    "volumes": [{"name": "a", "cloudInitNoCloud": {"userData": "Secret"}}]}),
                &[
                    "domain.cpu",
                    "domain.devices.disks",
                    "domain.devices.newDevice",
                    "domain.devices.rng",
                    "domain.firmware",
                    "hostname",
                    "subdomain",
                    "volumes",
                ],
            ),
        ] {
            let new = spec(new);
            assert_eq!(old.changed(&new), changed);
            assert_eq!(new.changed(&old), changed);
            assert_eq!(old == new, changed.is_empty());
        }
        let labelled = Template::of(&json!({"metadata": {"labels": {"a": "c"}}, "spec": {}}));
        assert_eq!(labelled.changed(&spec(json!({}))), [] as [&str; 0]);
        assert_ne!(labelled, spec(json!({})), "metadata counts for equality");
    }

    #[test]
    fn nothing_of_the_template_can_be_read_from_its_digests() {
        let told = serde_json::to_string(&spec(json!({"volumes": [{"cloudInitNoCloud": {"userData": "hunter2"}}]})));
        assert!(told.is_ok_and(|t| !t.contains("hunter2") && t.contains("volumes")));
    }
}
