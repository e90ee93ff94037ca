//! What an instance becomes under an instancetype and a preference.

use super::{at, get, is_open, number, preference};
use serde_json::{Value, json};

/// A field of the machine that its instancetype sets, too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// Path of the field.
    pub field: String,
    /// For people.
    pub message: String,
}

impl Conflict {
    pub(super) fn new(field: String) -> Self {
        let message = format!("VM field(s) {field} conflicts with selected instance type");
        Self { field, message }
    }
}

/// Applies the `spec` of an instancetype and that of a preference (null for none) to the spec and metadata of an instance, whose
/// path is `base`. First comes what the preference and KubeVirt attach, so that it is filled in, too.
///
/// # Errors
/// The fields that the machine sets although its instancetype does.
pub fn apply(
    instancetype: &Value,
    preferred: &Value,
    spec: &mut Value,
    metadata: &mut Value,
    base: &str,
) -> Result<(), Vec<Conflict>> {
    if instancetype.is_null() && preferred.is_null() {
        return Ok(());
    }
    let conflicts = if instancetype.is_null() { vec![] } else { conflicts(instancetype, spec, metadata, base) };
    if !conflicts.is_empty() {
        return Err(conflicts);
    }
    preference::attach(preferred, spec);
    if !instancetype.is_null() {
        set(instancetype, preferred, spec);
        annotate(instancetype, metadata);
    }
    preference::apply(preferred, spec);
    annotate(preferred, metadata);
    Ok(())
}

/// Fields that an instancetype sets where it has them: its path, the path in the instance, and whether a zero (an empty list, 0,
/// false) in the instance counts as set.
const SETS: [(&str, &str, bool); 15] = [
    ("nodeSelector", "nodeSelector", true),
    ("schedulerName", "schedulerName", false),
    ("cpu.model", "domain.cpu.model", false),
    ("cpu.dedicatedCPUPlacement", "domain.cpu.dedicatedCpuPlacement", false),
    ("cpu.isolateEmulatorThread", "domain.cpu.isolateEmulatorThread", false),
    ("cpu.maxSockets", "domain.cpu.maxSockets", false),
    ("cpu.numa", "domain.cpu.numa", true),
    ("cpu.realtime", "domain.cpu.realtime", true),
    ("memory.hugepages", "domain.memory.hugepages", true),
    ("memory.maxGuest", "domain.memory.maxGuest", true),
    ("ioThreads.supplementalPoolThreadCount", "domain.ioThreads.supplementalPoolThreadCount", true),
    ("ioThreadsPolicy", "domain.ioThreadsPolicy", true),
    ("launchSecurity", "domain.launchSecurity", true),
    ("gpus", "domain.devices.gpus", false),
    ("hostDevices", "domain.devices.hostDevices", false),
];

/// Fields that no machine with an instancetype may set.
const TAKEN: [(&str, bool); 8] = [
    ("domain.resources.requests.cpu", true),
    ("domain.resources.limits.cpu", true),
    ("domain.cpu.sockets", false),
    ("domain.cpu.cores", false),
    ("domain.cpu.threads", false),
    ("domain.memory.guest", true),
    ("domain.resources.requests.memory", true),
    ("domain.resources.limits.memory", true),
];

fn conflicts(instancetype: &Value, spec: &Value, metadata: &Value, base: &str) -> Vec<Conflict> {
    let given = |path: &str, zero: bool| {
        let value = get(spec, path);
        !is_open(value) && (zero || !is_zero(value))
    };
    let mut fields: Vec<String> =
        TAKEN
            .into_iter()
            .map(|(path, zero)| (path, zero, true))
            .chain(SETS.into_iter().map(|(of, path, zero)| {
                (path, zero, !is_open(get(instancetype, of)) && !is_empty(get(instancetype, of)))
            }))
            .filter(|(path, zero, wanted)| *wanted && given(path, *zero))
            // KubeVirt's spelling in this one message.
            .map(|(path, ..)| format!("{base}.{}", path.replace("dedicatedCpuPlacement", "dedicatedCPUPlacement")))
            .collect();
    for (key, value) in get(instancetype, "annotations").as_object().into_iter().flatten() {
        if get(metadata, "annotations").get(key).is_some_and(|v| v != value) {
            fields.push(format!("annotations.{key}"));
        }
    }
    fields.into_iter().map(Conflict::new).collect()
}

fn is_zero(value: &Value) -> bool {
    value == false || value == 0 || is_empty(value)
}

fn is_empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty)
}

fn set(instancetype: &Value, preferred: &Value, spec: &mut Value) {
    for (of, path, _) in SETS {
        let value = get(instancetype, of);
        if !is_open(value) && !is_empty(value) {
            *at(spec, path) = value.clone();
        }
    }
    let (sockets, cores, threads) = topology(number(get(instancetype, "cpu.guest")), preferred);
    for (part, count) in [("sockets", sockets), ("cores", cores), ("threads", threads)] {
        *at(spec, &format!("domain.cpu.{part}")) = json!(count);
    }
    let guest = get(instancetype, "memory.guest");
    if !guest.is_null() {
        // Quantities may be numbers; memory.guest is read as text.
        *at(spec, "domain.memory.guest") =
            if let Value::Number(n) = guest { json!(n.to_string()) } else { guest.clone() };
    }
    let percent = u128::from(number(get(instancetype, "memory.overcommitPercent")).min(100));
    if let (1.., Some(bytes)) = (percent, api::quantity_bytes(guest)) {
        let requested = u128::from(bytes) * (100 - percent) / 100;
        let binary = guest.as_str().is_some_and(|g| g.ends_with('i'));
        *at(spec, "domain.resources.requests.memory") = json!(amount(requested, binary));
    }
}

/// Sockets, cores and threads.
fn topology(cpus: u64, preferred: &Value) -> (u64, u64, u64) {
    if cpus == 1 {
        return (1, 1, 1);
    }
    match preference::topology(preferred) {
        preference::Topology::Cores => (1, cpus, 1),
        preference::Topology::Sockets | preference::Topology::Any => (cpus, 1, 1),
        preference::Topology::Threads => (1, 1, cpus),
        preference::Topology::Spread { ratio, across } => match across {
            preference::Across::SocketsCores => (cpus / ratio, ratio, 1),
            preference::Across::CoresThreads => (1, cpus / ratio, ratio),
            preference::Across::SocketsCoresThreads => {
                (cpus / preference::THREADS_A_CORE / ratio, ratio, preference::THREADS_A_CORE)
            }
        },
    }
}

/// Bytes as Kubernetes writes them: in the largest unit in which they are whole.
fn amount(bytes: u128, binary: bool) -> String {
    let (base, units) =
        if binary { (1024, ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]) } else { (1000, ["k", "M", "G", "T", "P", "E"]) };
    let mut whole = (bytes, "");
    for unit in units {
        if whole.0 == 0 || !whole.0.is_multiple_of(base) {
            break;
        }
        whole = (whole.0 / base, unit);
    }
    format!("{}{}", whole.0, whole.1)
}

/// Annotations that are not there yet.
fn annotate(of: &Value, metadata: &mut Value) {
    for (key, value) in get(of, "annotations").as_object().into_iter().flatten() {
        let annotations = at(metadata, "annotations");
        if annotations.get(key).is_none() {
            annotations[key.as_str()] = value.clone();
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const BASE: &str = "spec.template.spec";

    fn small() -> Value {
        json!({"cpu": {"guest": 4}, "memory": {"guest": "1Gi"}})
    }

    fn merged(a: Value, b: Value) -> Value {
        match (a, b) {
            (Value::Object(mut a), Value::Object(b)) => {
                for (k, v) in b {
                    let old = a.remove(&k).unwrap_or_default();
                    a.insert(k, merged(old, v));
                }
                Value::Object(a)
            }
            (_, b) => b,
        }
    }

    /// An instancetype with more than it must have, an instance: the fields that both set.
    fn both(more: Value, spec: Value) -> Vec<String> {
        let (mut spec, mut metadata) = (spec, json!({}));
        let before = spec.clone();
        match apply(&merged(small(), more), &Value::Null, &mut spec, &mut metadata, BASE) {
            Ok(()) => vec![],
            Err(conflicts) => {
                assert_eq!(spec, before, "left alone");
                assert!(conflicts.iter().all(|c| c.message.contains(&c.field)));
                conflicts
                    .into_iter()
                    .map(|c| c.field.strip_prefix("spec.template.spec.").unwrap_or(&c.field).to_owned())
                    .collect()
            }
        }
    }

    #[test]
    fn what_an_instancetype_sets_a_machine_may_not_set() {
        let none = json!({});
        for (more, spec, field) in [
            (
                none.clone(),
                json!({"domain": {"resources": {"requests": {"cpu": "1"}}}}),
                "domain.resources.requests.cpu",
            ),
            (none.clone(), json!({"domain": {"resources": {"limits": {"cpu": "1"}}}}), "domain.resources.limits.cpu"),
            (
                none.clone(),
                json!({"domain": {"resources": {"requests": {"memory": "1Gi"}}}}),
                "domain.resources.requests.memory",
            ),
            (
                none.clone(),
                json!({"domain": {"resources": {"limits": {"memory": "1Gi"}}}}),
                "domain.resources.limits.memory",
            ),
            (none.clone(), json!({"domain": {"cpu": {"sockets": 1}}}), "domain.cpu.sockets"),
            (none.clone(), json!({"domain": {"cpu": {"cores": 1}}}), "domain.cpu.cores"),
            (none.clone(), json!({"domain": {"cpu": {"threads": 1}}}), "domain.cpu.threads"),
            (none.clone(), json!({"domain": {"memory": {"guest": "1Gi"}}}), "domain.memory.guest"),
            (json!({"cpu": {"model": "a"}}), json!({"domain": {"cpu": {"model": "a"}}}), "domain.cpu.model"),
            (
                json!({"cpu": {"dedicatedCPUPlacement": true}}),
                json!({"domain": {"cpu": {"dedicatedCpuPlacement": true}}}),
                "domain.cpu.dedicatedCPUPlacement",
            ),
            (
                json!({"cpu": {"isolateEmulatorThread": false}}),
                json!({"domain": {"cpu": {"isolateEmulatorThread": true}}}),
                "domain.cpu.isolateEmulatorThread",
            ),
            (json!({"cpu": {"maxSockets": 4}}), json!({"domain": {"cpu": {"maxSockets": 8}}}), "domain.cpu.maxSockets"),
            (json!({"cpu": {"numa": {}}}), json!({"domain": {"cpu": {"numa": {}}}}), "domain.cpu.numa"),
            (json!({"cpu": {"realtime": {}}}), json!({"domain": {"cpu": {"realtime": {}}}}), "domain.cpu.realtime"),
            (
                json!({"memory": {"hugepages": {"pageSize": "2Mi"}}}),
                json!({"domain": {"memory": {"hugepages": {"pageSize": "1Gi"}}}}),
                "domain.memory.hugepages",
            ),
            (
                json!({"memory": {"maxGuest": "2Gi"}}),
                json!({"domain": {"memory": {"maxGuest": "4Gi"}}}),
                "domain.memory.maxGuest",
            ),
            (json!({"nodeSelector": {"a": "b"}}), json!({"nodeSelector": {}}), "nodeSelector"),
            (json!({"schedulerName": "a"}), json!({"schedulerName": "b"}), "schedulerName"),
            (
                json!({"ioThreadsPolicy": "auto"}),
                json!({"domain": {"ioThreadsPolicy": "shared"}}),
                "domain.ioThreadsPolicy",
            ),
            (
                json!({"ioThreads": {"supplementalPoolThreadCount": 1}}),
                json!({"domain": {"ioThreads": {"supplementalPoolThreadCount": 2}}}),
                "domain.ioThreads.supplementalPoolThreadCount",
            ),
            (
                json!({"launchSecurity": {"sev": {}}}),
                json!({"domain": {"launchSecurity": {}}}),
                "domain.launchSecurity",
            ),
            (
                json!({"gpus": [{"name": "a"}]}),
                json!({"domain": {"devices": {"gpus": [{"name": "b"}]}}}),
                "domain.devices.gpus",
            ),
            (
                json!({"hostDevices": [{"name": "a"}]}),
                json!({"domain": {"devices": {"hostDevices": [{"name": "b"}]}}}),
                "domain.devices.hostDevices",
            ),
        ] {
            assert_eq!(both(more.clone(), spec.clone()), [field], "{more} {spec}");
            // Without it in the instancetype the machine may have it, and the other way round.
            if more != none {
                assert_eq!(both(none.clone(), spec.clone()), [] as [&str; 0], "{spec}");
            }
            assert_eq!(both(more.clone(), json!({})), [] as [&str; 0], "{more}");
        }
        let all = json!({"domain": {"cpu": {"cores": 2, "model": "m", "sockets": 0}, "memory": {"guest": "1Gi"}}});
        assert_eq!(
            both(json!({"cpu": {"model": "x"}}), all),
            ["domain.cpu.cores", "domain.memory.guest", "domain.cpu.model"]
        );
    }

    #[test]
    fn annotations_conflict_where_they_differ() {
        let it = merged(small(), json!({"annotations": {"a": "1", "b": "2"}}));
        let run = |annotations: Value| {
            let mut metadata = json!({"annotations": annotations});
            apply(&it, &json!({"annotations": {"a": "p", "c": "3"}}), &mut json!({}), &mut metadata, BASE)
                .map(|()| metadata)
        };
        assert_eq!(run(json!({"a": "1"})).unwrap()["annotations"], json!({"a": "1", "b": "2", "c": "3"}));
        assert_eq!(run(json!({"a": "other"})).unwrap_err()[0].field, "annotations.a");
    }

    #[test]
    fn an_instancetype_sets_what_it_has() {
        let it = json!({
            "cpu": {"guest": 2, "model": "m", "dedicatedCPUPlacement": true, "isolateEmulatorThread": true, "maxSockets": 8,
                "numa": {"guestMappingPassthrough": {}}, "realtime": {"mask": "0"}},
            "memory": {"guest": "1Gi", "hugepages": {"pageSize": "2Mi"}, "maxGuest": "4Gi", "overcommitPercent": 25},
            "nodeSelector": {"a": "b"}, "schedulerName": "s", "ioThreadsPolicy": "auto",
            "ioThreads": {"supplementalPoolThreadCount": 3}, "launchSecurity": {"tdx": {}},
            "gpus": [{"name": "g"}], "hostDevices": [{"name": "h"}],
        });
        let mut spec = json!({"domain": {"devices": {"autoattachPodInterface": false}}, "hostname": "h"});
        apply(&it, &Value::Null, &mut spec, &mut json!({}), BASE).unwrap();
        assert_eq!(
            spec,
            json!({
                "hostname": "h", "nodeSelector": {"a": "b"}, "schedulerName": "s",
                "domain": {
                    "cpu": {"sockets": 2, "cores": 1, "threads": 1, "model": "m", "dedicatedCpuPlacement": true,
                        "isolateEmulatorThread": true, "maxSockets": 8, "numa": {"guestMappingPassthrough": {}}, "realtime": {"mask": "0"}},
                    "memory": {"guest": "1Gi", "hugepages": {"pageSize": "2Mi"}, "maxGuest": "4Gi"},
                    "resources": {"requests": {"memory": "768Mi"}},
                    "ioThreadsPolicy": "auto", "ioThreads": {"supplementalPoolThreadCount": 3}, "launchSecurity": {"tdx": {}},
                    "devices": {"autoattachPodInterface": false, "gpus": [{"name": "g"}], "hostDevices": [{"name": "h"}]},
                },
            })
        );
    }

    #[test]
    fn processors_are_laid_out_as_preferred() {
        let spread = |more: Value| merged(json!({"cpu": {"preferredCPUTopology": "spread"}}), more);
        for (cpus, preferred, want) in [
            (1, json!({"cpu": {"preferredCPUTopology": "threads"}}), (1, 1, 1)),
            (4, Value::Null, (4, 1, 1)),
            (4, json!({"cpu": {}}), (4, 1, 1)),
            (4, json!({"cpu": {"preferredCPUTopology": "any"}}), (4, 1, 1)),
            (4, json!({"cpu": {"preferredCPUTopology": "sockets"}}), (4, 1, 1)),
            (4, json!({"cpu": {"preferredCPUTopology": "cores"}}), (1, 4, 1)),
            (4, json!({"cpu": {"preferredCPUTopology": "preferThreads"}}), (1, 1, 4)),
            (8, spread(json!({})), (4, 2, 1)),
            (8, spread(json!({"preferSpreadSocketToCoreRatio": 4})), (2, 4, 1)),
            (8, spread(json!({"preferSpreadSocketToCoreRatio": 4, "cpu": {"spreadOptions": {"ratio": 8}}})), (1, 8, 1)),
            (8, spread(json!({"cpu": {"spreadOptions": {"across": "CoresThreads"}}})), (1, 4, 2)),
            (8, spread(json!({"cpu": {"spreadOptions": {"across": "SocketsCoresThreads"}}})), (2, 2, 2)),
            (8, spread(json!({"cpu": {"spreadOptions": {"ratio": 0}}})), (4, 2, 1)),
        ] {
            assert_eq!(topology(cpus, &preferred), want, "{cpus} {preferred}");
        }
    }

    #[test]
    fn amounts_are_written_in_the_largest_whole_unit() {
        for (bytes, binary, want) in [
            (0, true, "0"),
            (1 << 29, true, "512Mi"),
            (1500, true, "1500"),
            (750_000_000, false, "750M"),
            (1_500_000_000, false, "1500M"),
        ] {
            assert_eq!(amount(bytes, binary), want);
        }
    }
}
