//! Rules about instancetypes and preferences, and about how they go together. The words are KubeVirt's.

use super::{
    apply::Conflict,
    get, number,
    preference::{self, Across, THREADS_A_CORE, Topology},
};
use serde_json::Value;

/// Topologies by their names; those of the second column are deprecated.
const TOPOLOGIES: [(&str, &str); 5] = [
    ("sockets", "preferSockets"),
    ("cores", "preferCores"),
    ("threads", "preferThreads"),
    ("spread", "preferSpread"),
    ("any", "preferAny"),
];

fn conflict(field: impl Into<String>, message: impl Into<String>) -> Conflict {
    Conflict { field: field.into(), message: message.into() }
}

/// What is wrong with the `spec` of an instancetype.
pub fn instancetype(spec: &Value) -> Vec<Conflict> {
    let percent = number(get(spec, "memory.overcommitPercent"));
    let mut wrong = vec![];
    if percent > 100 {
        let field = "spec.memory.overcommitPercent";
        wrong.push(conflict(field, format!("{field} '{percent}': must be in range between 0 and 100.")));
    }
    if percent > 0 && !get(spec, "memory.hugepages").is_null() {
        let (a, b) = ("spec.memory.overcommitPercent", "spec.memory.hugepages");
        wrong.push(conflict(a, format!("{a} and {b} should not be requested together.")));
    }
    wrong
}

/// What is wrong with the `spec` of a preference, and what deserves a warning.
pub fn preference(spec: &Value) -> (Vec<Conflict>, Vec<String>) {
    let (mut wrong, mut warnings) = (vec![], vec![]);
    let word = get(spec, "cpu.preferredCPUTopology").as_str();
    if let Some(word) = word {
        match TOPOLOGIES.into_iter().find(|(name, old)| *name == word || *old == word) {
            None => {
                wrong.push(conflict("spec.cpu.preferredCPUTopology", format!("unknown preferredCPUTopology {word}")))
            }
            Some((name, old)) if old == word => warnings.push(format!(
                "PreferredCPUTopology {old} is deprecated for removal in a future release, please use {name} instead"
            )),
            Some(_) => {}
        }
    }
    if let Topology::Spread { ratio, across } = preference::topology(spec) {
        let written = get(spec, "cpu.spreadOptions.across").as_str();
        if let Some(word) = written.filter(|w| Across::parse(w).is_none()) {
            wrong.push(conflict("spec.cpu.spreadOptions.across", format!("across {word} is not supported")));
        } else if across == Across::CoresThreads && ratio != THREADS_A_CORE {
            let text = "only a ratio of 2 (1 core 2 threads) is allowed when spreading vCPUs over cores and threads";
            wrong.push(conflict("spec.cpu.spreadOptions.ratio", text));
        }
    }
    (wrong, warnings)
}

/// Whether the CPUs of an instancetype can be spread as a preference asks (either may be null).
pub fn spread(instancetype: &Value, preferred: &Value) -> Option<Conflict> {
    let Topology::Spread { ratio, across } = preference::topology(preferred) else { return None };
    if instancetype.is_null() {
        return None;
    }
    let cpus = number(get(instancetype, "cpu.guest"));
    let begin = format!("{cpus} vCPUs provided by the instance type are not divisible by the");
    let message = match across {
        Across::SocketsCores if !cpus.is_multiple_of(ratio) => format!(
            "{begin} Spec.PreferSpreadSocketToCoreRatio or Spec.CPU.PreferSpreadOptions.Ratio of {ratio} provided by the preference"
        ),
        Across::CoresThreads if !cpus.is_multiple_of(ratio) => format!("{begin} number of threads per core {ratio}"),
        Across::SocketsCoresThreads if !cpus.is_multiple_of(THREADS_A_CORE * ratio) => format!(
            "{begin} number of threads per core {THREADS_A_CORE} and Spec.PreferSpreadSocketToCoreRatio or \
             Spec.CPU.PreferSpreadOptions.Ratio of {ratio}"
        ),
        Across::SocketsCores | Across::CoresThreads | Across::SocketsCoresThreads => return None,
    };
    Some(conflict("instancetype.spec.cpu.guest", message))
}

/// What a machine lacks that its preference requires. `spec` is that of the instance, with everything applied.
pub fn requirements(instancetype: &Value, preferred: &Value, spec: &Value) -> Vec<Conflict> {
    let found = cpus(instancetype, preferred, spec);
    let found = if found.is_empty() { memory(instancetype, preferred, spec) } else { found };
    if found.is_empty() { architecture(preferred, spec) } else { found }
}

fn cpus(instancetype: &Value, preferred: &Value, spec: &Value) -> Vec<Conflict> {
    let required = get(preferred, "requirements.cpu.guest");
    if required.is_null() {
        return vec![];
    }
    let required = number(required);
    if !instancetype.is_null() {
        let provided = number(get(instancetype, "cpu.guest"));
        let text = format!(
            "insufficient CPU resources of {provided} vCPU provided by instance type, preference requires {required} vCPU"
        );
        return if provided < required { vec![conflict("spec.instancetype", text)] } else { vec![] };
    }
    const BASE: &str = "spec.template.spec.domain.cpu";
    let cpu = get(spec, "domain.cpu");
    if cpu.is_null() {
        return vec![conflict(
            BASE,
            format!("no CPU resources provided by VirtualMachine, preference requires {required} vCPU"),
        )];
    }
    let (parts, named): (&[&str], &str) = match preference::topology(preferred) {
        Topology::Threads => (&["threads"], "threads"),
        Topology::Cores => (&["cores"], "cores"),
        Topology::Sockets => (&["sockets"], "sockets"),
        Topology::Any => (&["cores", "sockets", "threads"], "cores, sockets and threads"),
        Topology::Spread { across, .. } => match across {
            Across::SocketsCores => (&["sockets", "cores"], across.name()),
            Across::CoresThreads => (&["cores", "threads"], across.name()),
            Across::SocketsCoresThreads => (&["sockets", "cores", "threads"], across.name()),
        },
    };
    let provided: u64 = parts.iter().map(|p| number(get(cpu, p))).product();
    if provided >= required {
        return vec![];
    }
    let text = format!(
        "insufficient CPU resources of {provided} vCPU provided by VirtualMachine, preference requires {required} vCPU \
         provided as {named}"
    );
    parts.iter().map(|p| conflict(format!("{BASE}.{p}"), text.clone())).collect()
}

fn memory(instancetype: &Value, preferred: &Value, spec: &Value) -> Vec<Conflict> {
    let required = get(preferred, "requirements.memory.guest");
    if required.is_null() {
        return vec![];
    }
    let (field, by, of_type) = if instancetype.is_null() {
        ("spec.template.spec.domain.memory", "VirtualMachine", &Value::Null)
    } else {
        ("spec.instancetype", "instance type", get(instancetype, "memory.guest"))
    };
    let own = get(spec, "domain.memory.guest");
    let provided = if own.is_null() { of_type } else { own };
    let amount = |v: &Value| api::quantity_milli(v).unwrap_or_default();
    if amount(provided) >= amount(required) {
        return vec![];
    }
    let word = |v: &Value| match v {
        Value::String(s) => s.clone(),
        Value::Null => "0".into(),
        Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => v.to_string(),
    };
    vec![conflict(
        field,
        format!(
            "insufficient Memory resources of {} provided by {by}, preference requires {}",
            word(provided),
            word(required)
        ),
    )]
}

fn architecture(preferred: &Value, spec: &Value) -> Vec<Conflict> {
    let (required, own) = (get(preferred, "requirements.architecture"), get(spec, "architecture"));
    if required.is_null() || required == own {
        return vec![];
    }
    let word = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    vec![conflict(
        "spec.template.spec.architecture",
        format!("preference requires architecture {} but {} is being requested", word(required), word(own)),
    )]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(found: &[Conflict]) -> Vec<&str> {
        found.iter().map(|c| c.field.as_str()).collect()
    }

    #[test]
    fn objects() {
        assert_eq!(
            fields(&instancetype(&json!({"memory": {"guest": "1Gi", "overcommitPercent": 50}}))),
            [] as [&str; 0]
        );
        assert_eq!(
            fields(&instancetype(&json!({"memory": {"overcommitPercent": 101}}))),
            ["spec.memory.overcommitPercent"]
        );
        let huge = json!({"memory": {"overcommitPercent": 1, "hugepages": {"pageSize": "2Mi"}}});
        assert_eq!(fields(&instancetype(&huge)), ["spec.memory.overcommitPercent"]);
        let topology = |word: &str, options: Value| {
            preference(&json!({"cpu": {"preferredCPUTopology": word, "spreadOptions": options}}))
        };
        for (word, options, field) in [
            ("round", json!({}), "spec.cpu.preferredCPUTopology"),
            ("spread", json!({"across": "Nodes"}), "spec.cpu.spreadOptions.across"),
            ("spread", json!({"across": "CoresThreads", "ratio": 4}), "spec.cpu.spreadOptions.ratio"),
        ] {
            assert_eq!(fields(&topology(word, options).0), [field], "{word}");
        }
        assert_eq!(topology("cores", json!({})), (vec![], vec![]));
        assert_eq!(topology("cores", json!({"across": "Nodes"})).0, vec![], "means nothing there");
        let (wrong, warnings) = topology("preferSpread", json!({}));
        assert!(wrong.is_empty() && warnings[0].contains("use spread instead"), "{warnings:?}");
    }

    #[test]
    fn processors_that_cannot_be_spread() {
        let check = |cpus: u64, options: Value| {
            spread(
                &json!({"cpu": {"guest": cpus}}),
                &json!({"cpu": {"preferredCPUTopology": "spread", "spreadOptions": options}}),
            )
            .is_some()
        };
        for (cpus, options, bad) in [
            (4, json!({}), false),
            (3, json!({}), true),
            (4, json!({"ratio": 3}), true),
            (3, json!({"across": "CoresThreads"}), true),
            (8, json!({"across": "SocketsCoresThreads"}), false),
            (6, json!({"across": "SocketsCoresThreads"}), true),
        ] {
            assert_eq!(check(cpus, options.clone()), bad, "{cpus} {options}");
        }
        assert_eq!(spread(&Value::Null, &json!({"cpu": {"preferredCPUTopology": "spread"}})), None);
        assert_eq!(spread(&json!({"cpu": {"guest": 3}}), &Value::Null), None);
    }

    #[test]
    fn what_a_preference_requires() {
        let none = Value::Null;
        let cpu =
            |topology: &str| json!({"cpu": {"preferredCPUTopology": topology}, "requirements": {"cpu": {"guest": 4}}});
        let base = "spec.template.spec.domain.cpu";
        let spec = json!({"domain": {"cpu": {"sockets": 2, "cores": 1, "threads": 1}, "memory": {"guest": "1Gi"}}, "architecture": "amd64"});
        for (instancetype, preferred, want) in [
            (none.clone(), none.clone(), vec![]),
            (none.clone(), json!({}), vec![]),
            (json!({"cpu": {"guest": 2}}), cpu("sockets"), vec!["spec.instancetype".to_owned()]),
            (json!({"cpu": {"guest": 4}}), cpu("sockets"), vec![]),
            (none.clone(), cpu("sockets"), vec![format!("{base}.sockets")]),
            (none.clone(), cpu("cores"), vec![format!("{base}.cores")]),
            (none.clone(), cpu("threads"), vec![format!("{base}.threads")]),
            (
                none.clone(),
                cpu("any"),
                vec![format!("{base}.cores"), format!("{base}.sockets"), format!("{base}.threads")],
            ),
            (none.clone(), cpu("spread"), vec![format!("{base}.sockets"), format!("{base}.cores")]),
            (none.clone(), json!({"requirements": {"cpu": {"guest": 2}}}), vec![]),
            (none.clone(), json!({"requirements": {"memory": {"guest": "1Gi"}}}), vec![]),
            (
                none.clone(),
                json!({"requirements": {"memory": {"guest": "1025Mi"}}}),
                vec!["spec.template.spec.domain.memory".to_owned()],
            ),
            (
                json!({"memory": {"guest": "1Gi"}}),
                json!({"requirements": {"memory": {"guest": "2Gi"}}}),
                vec!["spec.instancetype".to_owned()],
            ),
            (none.clone(), json!({"requirements": {"architecture": "amd64"}}), vec![]),
            (
                none.clone(),
                json!({"requirements": {"architecture": "arm64"}}),
                vec!["spec.template.spec.architecture".to_owned()],
            ),
        ] {
            let found = requirements(&instancetype, &preferred, &spec);
            assert_eq!(found.iter().map(|c| c.field.clone()).collect::<Vec<_>>(), want, "{instancetype} {preferred}");
        }
        let found = requirements(&none, &cpu("sockets"), &json!({"domain": {}}));
        assert_eq!(fields(&found), [base]);
    }
}
