//! Where a machine may run: Kubernetes' own rules about the parts of a pod that come from the spec. Broken, they would
//! be found out when the pod is made, long after whoever wrote them has gone.

use super::{Problems, get, is_subdomain, items, text};
use crate::status::CauseType::{Duplicate, NotSupported, Required};
use serde_json::Value;
use state::selector::{RawSelector, Selector, is_key};

pub(super) fn check(spec: &Value, base: &str, p: &mut Problems) {
    let affinity = get(spec, &["affinity"]);
    node_affinity(get(affinity, &["nodeAffinity"]), &format!("{base}.affinity.nodeAffinity"), p);
    for kind in ["podAffinity", "podAntiAffinity"] {
        pod_affinity(get(affinity, &[kind]), &format!("{base}.affinity.{kind}"), p);
    }
    spread(items(spec, &["topologySpreadConstraints"]), &format!("{base}.topologySpreadConstraints"), p);
    dns(spec, p);
}

const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";

fn node_affinity(affinity: &Value, base: &str, p: &mut Problems) {
    let required = get(affinity, &[REQUIRED]);
    if required.is_object() {
        let terms = items(required, &["nodeSelectorTerms"]);
        let field = format!("{base}.{REQUIRED}.nodeSelectorTerms");
        if terms.is_empty() {
            p.add(Required, &field, "must have at least one node selector term");
        }
        for (i, term) in terms.iter().enumerate() {
            node_term(term, &format!("{field}[{i}]"), p);
        }
    }
    for (i, preferred) in items(affinity, &[PREFERRED]).iter().enumerate() {
        let field = format!("{base}.{PREFERRED}[{i}]");
        weight(preferred, &field, p);
        node_term(get(preferred, &["preference"]), &format!("{field}.preference"), p);
    }
}

fn node_term(term: &Value, base: &str, p: &mut Problems) {
    for (i, wish) in items(term, &["matchExpressions"]).iter().enumerate() {
        let field = format!("{base}.matchExpressions[{i}]");
        let (key, operator, values) = (text(wish, &["key"]), text(wish, &["operator"]), items(wish, &["values"]));
        match operator {
            "In" | "NotIn" if values.is_empty() => {
                p.add(Required, format!("{field}.values"), "must be specified when `operator` is 'In' or 'NotIn'");
            }
            "Exists" | "DoesNotExist" if !values.is_empty() => {
                p.invalid(
                    format!("{field}.values"),
                    "may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
                );
            }
            "Gt" | "Lt" if values.len() != 1 => {
                p.add(
                    Required,
                    format!("{field}.values"),
                    "must be specified single value when `operator` is 'Lt' or 'Gt'",
                );
            }
            "In" | "NotIn" | "Exists" | "DoesNotExist" | "Gt" | "Lt" => {}
            other => p.invalid(format!("{field}.operator"), format!("not a valid selector operator: {other:?}")),
        }
        if !is_key(key) {
            p.invalid(format!("{field}.key"), format!("{field}.key is not a valid label key: {key:?}"));
        }
    }
    for (i, wish) in items(term, &["matchFields"]).iter().enumerate() {
        let field = format!("{base}.matchFields[{i}]");
        if text(wish, &["key"]) != "metadata.name" {
            p.invalid(format!("{field}.key"), "not a valid field selector key: only metadata.name is");
        }
        match text(wish, &["operator"]) {
            "In" | "NotIn" if items(wish, &["values"]).len() == 1 => {}
            "In" | "NotIn" => {
                p.add(
                    Required,
                    format!("{field}.values"),
                    "must be only one value when `operator` is 'In' or 'NotIn' for node field selector",
                );
            }
            other => p.invalid(format!("{field}.operator"), format!("not a valid selector operator: {other:?}")),
        }
    }
}

fn pod_affinity(affinity: &Value, base: &str, p: &mut Problems) {
    for (i, term) in items(affinity, &[REQUIRED]).iter().enumerate() {
        pod_term(term, &format!("{base}.{REQUIRED}[{i}]"), p);
    }
    for (i, preferred) in items(affinity, &[PREFERRED]).iter().enumerate() {
        let field = format!("{base}.{PREFERRED}[{i}]");
        weight(preferred, &field, p);
        pod_term(get(preferred, &["podAffinityTerm"]), &format!("{field}.podAffinityTerm"), p);
    }
}

fn pod_term(term: &Value, base: &str, p: &mut Problems) {
    topology_key(term, base, p);
    for kind in ["labelSelector", "namespaceSelector"] {
        selector(get(term, &[kind]), &format!("{base}.{kind}"), p);
    }
    for (i, namespace) in items(term, &["namespaces"]).iter().enumerate() {
        let field = format!("{base}.namespaces[{i}]");
        if !super::is_label(namespace.as_str().unwrap_or_default()) {
            p.invalid(&field, format!("{field} is not the name of a namespace: {namespace}"));
        }
    }
}

fn weight(preferred: &Value, field: &str, p: &mut Problems) {
    if !(1..=100).contains(&get(preferred, &["weight"]).as_i64().unwrap_or(0)) {
        p.invalid(format!("{field}.weight"), "must be in the range 1-100");
    }
}

fn topology_key(term: &Value, base: &str, p: &mut Problems) {
    let (key, field) = (text(term, &["topologyKey"]), format!("{base}.topologyKey"));
    if key.is_empty() {
        p.add(Required, &field, "can not be empty");
    } else if !is_key(key) {
        p.invalid(&field, format!("{field} is not a valid label key: {key:?}"));
    }
}

fn selector(raw: &Value, field: &str, p: &mut Problems) {
    if raw.is_null() {
        return;
    }
    let parsed = serde_json::from_value::<RawSelector>(raw.clone()).map_err(|e| e.to_string());
    if let Err(problem) = parsed.and_then(|raw| Selector::parse(&raw).map_err(|e| e.to_string())) {
        p.invalid(field, format!("{field}: {problem}"));
    }
}

fn spread(constraints: &[Value], base: &str, p: &mut Problems) {
    for (i, constraint) in constraints.iter().enumerate() {
        let field = format!("{base}[{i}]");
        if get(constraint, &["maxSkew"]).as_i64().unwrap_or(0) <= 0 {
            p.invalid(format!("{field}.maxSkew"), "must be greater than zero");
        }
        topology_key(constraint, &field, p);
        let action = text(constraint, &["whenUnsatisfiable"]);
        if !["DoNotSchedule", "ScheduleAnyway"].contains(&action) {
            let at = format!("{field}.whenUnsatisfiable");
            p.add(NotSupported, &at, format!("{at}: {action:?} is none of DoNotSchedule, ScheduleAnyway"));
        }
        match get(constraint, &["minDomains"]).as_i64() {
            None => {}
            Some(n) if n <= 0 => p.invalid(format!("{field}.minDomains"), "must be greater than zero"),
            Some(_) if action != "DoNotSchedule" => {
                p.invalid(
                    format!("{field}.minDomains"),
                    "can only use minDomains if whenUnsatisfiable=DoNotSchedule, not ScheduleAnyway",
                );
            }
            Some(_) => {}
        }
        for policy in ["nodeAffinityPolicy", "nodeTaintsPolicy"] {
            p.one_of(NotSupported, &format!("{field}.{policy}"), get(constraint, &[policy]), &["Honor", "Ignore"]);
        }
        selector(get(constraint, &["labelSelector"]), &format!("{field}.labelSelector"), p);
        let same = |other: &&Value| {
            ["topologyKey", "whenUnsatisfiable"].iter().all(|k| get(other, &[k]) == get(constraint, &[k]))
        };
        if constraints.iter().take(i).any(|other| same(&other)) {
            let key = text(constraint, &["topologyKey"]);
            p.add(Duplicate, &field, format!("{field} repeats {{{key}, {action}}}"));
        }
    }
}

/// Reported without a base, as KubeVirt does.
fn dns(spec: &Value, p: &mut Problems) {
    p.one_of(
        NotSupported,
        "dnsPolicy",
        get(spec, &["dnsPolicy"]),
        &["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"],
    );
    let config = get(spec, &["dnsConfig"]);
    let servers = items(config, &["nameservers"]);
    if text(spec, &["dnsPolicy"]) == "None" {
        if !config.is_object() {
            p.add(Required, "dnsConfig", "must provide `dnsConfig` when `dnsPolicy` is None");
        } else if servers.is_empty() {
            p.add(
                Required,
                "dnsConfig.nameservers",
                "must provide at least one DNS nameserver when `dnsPolicy` is None",
            );
        }
    }
    if servers.len() > 3 {
        p.invalid("dnsConfig.nameservers", "must not have more than 3 nameservers");
    }
    for (i, server) in servers.iter().enumerate() {
        if server.as_str().unwrap_or_default().parse::<std::net::IpAddr>().is_err() {
            p.invalid(format!("dnsConfig.nameservers[{i}]"), format!("must be an IP address: {server}"));
        }
    }
    let searches = items(config, &["searches"]);
    let length = searches.iter().filter_map(Value::as_str).map(|s| s.len() + 1).sum::<usize>().saturating_sub(1);
    if searches.len() > 6 {
        p.invalid("dnsConfig.searches", "must not have more than 6 search paths");
    }
    if length > 256 {
        p.invalid("dnsConfig.searches", "must not have more than 256 characters (including spaces) in the search list");
    }
    for (i, search) in searches.iter().enumerate() {
        let name = search.as_str().unwrap_or_default();
        if name != "." && !is_subdomain(name.strip_suffix('.').unwrap_or(name)) {
            p.invalid(format!("dnsConfig.searches[{i}]"), format!("must be a DNS name: {search}"));
        }
    }
    for (i, option) in items(config, &["options"]).iter().enumerate() {
        if text(option, &["name"]).is_empty() {
            p.add(Required, format!("dnsConfig.options[{i}]"), "must not be empty");
        }
    }
}
