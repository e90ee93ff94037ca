//! Values that a pod takes from itself: the downward API, environment, `$(NAME)` references. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, EnvVarSource, ObjectFieldSelector, Pod, ResourceFieldSelector};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// What only the node knows of the pod.
#[derive(Debug, Clone, Default)]
pub(super) struct Facts {
    /// Address of the pod.
    pub pod_ip: String,
    /// Address of the node.
    pub host_ip: String,
    /// Cores of the node, where no limit is set.
    pub cpus: i64,
    /// Bytes of memory of the node, where no limit is set.
    pub memory: i64,
}

/// Bytes, or thousandths for CPUs, of a quantity.
pub(super) fn milli(quantity: &Quantity) -> Option<i128> {
    let text = quantity.0.trim();
    let split = text.find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '-' | '+'))).unwrap_or(text.len());
    let (number, suffix) = text.split_at_checked(split)?;
    let scale: i128 = match suffix {
        "m" => 1,
        "" => 1000,
        "k" => 1_000_000,
        "M" => 1_000_000_000,
        "G" => 1_000_000_000_000,
        "T" => 1_000_000_000_000_000,
        "P" => 1_000_000_000_000_000_000,
        "Ki" => 1000 << 10,
        "Mi" => 1000 << 20,
        "Gi" => 1000 << 30,
        "Ti" => 1000i128 << 40,
        "Pi" => 1000i128 << 50,
        exponent => {
            let power: u32 = exponent.strip_prefix(['e', 'E'])?.parse().ok()?;
            1000i128.checked_mul(10i128.checked_pow(power)?)?
        }
    };
    match number.split_once('.') {
        None => number.parse::<i128>().ok()?.checked_mul(scale),
        Some((whole, fraction)) => {
            let unit = 10i128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
            let digits: i128 = format!("{whole}{fraction}").parse().ok()?;
            Some(digits.checked_mul(scale)? / unit)
        }
    }
}

/// Bytes of a quantity.
pub(super) fn bytes(quantity: &Quantity) -> Option<i64> {
    milli(quantity).and_then(|m| i64::try_from(m / 1000).ok())
}

fn keyed<'a>(path: &'a str, field: &str) -> Option<&'a str> {
    path.strip_prefix(field)?.strip_prefix("['")?.strip_suffix("']")
}

fn lines(map: Option<&BTreeMap<String, String>>) -> String {
    map.into_iter().flatten().map(|(k, v)| format!("{k}={}\n", serde_json::Value::from(v.as_str()))).collect()
}

/// The value of a field of the pod.
pub(super) fn field(pod: &Pod, selector: &ObjectFieldSelector, facts: &Facts) -> Result<String, String> {
    let meta = &pod.metadata;
    let spec = pod.spec.as_ref();
    let path = selector.field_path.as_str();
    let text = |value: Option<&String>| value.cloned().unwrap_or_default();
    if let Some(key) = keyed(path, "metadata.labels") {
        return Ok(text(meta.labels.as_ref().and_then(|l| l.get(key))));
    }
    if let Some(key) = keyed(path, "metadata.annotations") {
        return Ok(text(meta.annotations.as_ref().and_then(|a| a.get(key))));
    }
    Ok(match path {
        "metadata.name" => text(meta.name.as_ref()),
        "metadata.namespace" => text(meta.namespace.as_ref()),
        "metadata.uid" => text(meta.uid.as_ref()),
        "metadata.labels" => lines(meta.labels.as_ref()),
        "metadata.annotations" => lines(meta.annotations.as_ref()),
        "spec.nodeName" => text(spec.and_then(|s| s.node_name.as_ref())),
        "spec.serviceAccountName" => text(spec.and_then(|s| s.service_account_name.as_ref())),
        "status.hostIP" | "status.hostIPs" => facts.host_ip.clone(),
        "status.podIP" | "status.podIPs" => facts.pod_ip.clone(),
        other => return Err(format!("the field {other} of a pod cannot be referred to")),
    })
}

/// The value of a resource of a container.
pub(super) fn resource(
    container: &Container,
    selector: &ResourceFieldSelector,
    facts: &Facts,
) -> Result<String, String> {
    let (kind, name) = selector
        .resource
        .split_once('.')
        .ok_or_else(|| format!("{} names no resource of a container", selector.resource))?;
    let resources = container.resources.as_ref();
    let map = match kind {
        "limits" => resources.and_then(|r| r.limits.as_ref()),
        "requests" => resources.and_then(|r| r.requests.as_ref()),
        other => return Err(format!("{other} is neither limits nor requests")),
    };
    let value = map.and_then(|m| m.get(name)).and_then(milli).unwrap_or(match (kind, name) {
        ("limits", "cpu") => i128::from(facts.cpus) * 1000,
        ("limits", "memory") => i128::from(facts.memory) * 1000,
        _ => 0,
    });
    let divisor = selector.divisor.as_ref().and_then(milli).filter(|d| *d > 0).unwrap_or(1000);
    Ok((value / divisor + i128::from(value % divisor > 0)).to_string())
}

/// Replaces `$(NAME)` by what is known, `$$` by `$`; an unknown name stays as it is.
pub(super) fn expand(text: &str, known: &BTreeMap<String, String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        let (before, after) = rest.split_at(at);
        out.push_str(before);
        if let Some(tail) = after.strip_prefix("$$") {
            out.push('$');
            rest = tail;
        } else if let Some((name, tail)) = after.strip_prefix("$(").and_then(|t| t.split_once(')')) {
            match known.get(name) {
                Some(value) => out.push_str(value),
                None => {
                    out.push_str("$(");
                    out.push_str(name);
                    out.push(')');
                }
            }
            rest = tail;
        } else {
            out.push('$');
            rest = after.get(1..).unwrap_or_default();
        }
    }
    out.push_str(rest);
    out
}

/// The environment of a container, in order. Values of Secrets are refused: they would be written to disk with the bundle.
pub(super) fn environment(
    pod: &Pod,
    container: &Container,
    facts: &Facts,
    config_maps: &BTreeMap<String, BTreeMap<String, String>>,
) -> Result<BTreeMap<String, String>, String> {
    let mut env = BTreeMap::from([(
        "PATH".to_owned(),
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned(),
    )]);
    env.insert("HOSTNAME".into(), hostname(pod));
    if container.env_from.as_ref().is_some_and(|e| !e.is_empty()) {
        return Err("envFrom is not supported for launcher pods".into());
    }
    for variable in container.env.iter().flatten() {
        let value = match (&variable.value, &variable.value_from) {
            (Some(value), _) => expand(value, &env),
            (None, None) => String::new(),
            (None, Some(EnvVarSource { field_ref: Some(f), .. })) => field(pod, f, facts)?,
            (None, Some(EnvVarSource { resource_field_ref: Some(r), .. })) => resource(container, r, facts)?,
            (None, Some(EnvVarSource { config_map_key_ref: Some(r), .. })) => {
                match config_maps.get(&r.name).and_then(|m| m.get(&r.key)) {
                    Some(value) => value.clone(),
                    None if r.optional == Some(true) => continue,
                    None => return Err(format!("ConfigMap {:?} has no key {:?}", r.name, r.key)),
                }
            }
            (None, Some(_)) => {
                return Err(format!(
                    "environment variable {} takes its value from where launcher pods may not",
                    variable.name
                ));
            }
        };
        env.insert(variable.name.clone(), value);
    }
    Ok(env)
}

/// Host name of a pod.
pub(super) fn hostname(pod: &Pod) -> String {
    let name = pod
        .spec
        .as_ref()
        .and_then(|s| s.hostname.clone())
        .filter(|h| !h.is_empty())
        .or_else(|| pod.metadata.name.clone())
        .unwrap_or_default();
    let short: String = name.chars().take(63).collect();
    short.trim_end_matches(['-', '.']).to_owned()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    #[test]
    fn quantities_are_exact() {
        let q = |s: &str| bytes(&Quantity(s.into()));
        assert_eq!(q("128Mi"), Some(134_217_728));
        assert_eq!(q("1.5Gi"), Some(1_610_612_736));
        assert_eq!(q("2e3"), Some(2000));
        assert_eq!(q("1G"), Some(1_000_000_000));
        assert_eq!(q("1500m"), Some(1));
        assert_eq!(q("many"), None);
        assert_eq!(milli(&Quantity("250m".into())), Some(250));
    }

    #[test]
    fn the_environment_is_the_pods_own() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"a": "b\"c"}},
            "spec": {"nodeName": "node1", "hostname": "h", "containers": [{
                "name": "compute",
                "resources": {"requests": {"memory": "1536Ki"}},
                "env": [
                    {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
                    {"name": "L", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels"}}},
                    {"name": "A", "value": "$(POD_UID)-$(NONE)-$$(x)"},
                    {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                    {"name": "M", "valueFrom": {"resourceFieldRef": {"resource": "requests.memory", "divisor": "1Mi"}}},
                ]}]},
        }))
        .unwrap();
        let container = &pod.spec.as_ref().unwrap().containers[0];
        let facts = Facts { pod_ip: "10.244.1.2".into(), ..Facts::default() };
        let env = environment(&pod, container, &facts, &BTreeMap::new()).unwrap();
        for (name, value) in [
            ("POD_UID", "u"),
            ("L", "a=\"b\\\"c\"\n"),
            ("A", "u-$(NONE)-$(x)"),
            ("IP", "10.244.1.2"),
            ("M", "2"),
            ("HOSTNAME", "h"),
        ] {
            assert_eq!(env[name], value, "{name}");
        }
        let mut secret = container.clone();
        secret.env =
            serde_json::from_value(json!([{"name": "S", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]))
                .unwrap();
        assert!(environment(&pod, &secret, &facts, &BTreeMap::new()).unwrap_err().contains('S'));
    }
}
