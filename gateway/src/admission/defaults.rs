//! Defaults of the spec of an instance, in KubeVirt's order.

use super::{Problems, Settings, at, default, get, text};
use serde_json::{Value, json};

/// Fills in what a user left open in the spec of an instance. Doing it twice is doing it once.
pub fn spec(spec: &mut Value, settings: &Settings, uuid: &dyn Fn() -> String) {
    default(spec, &["architecture"], "amd64");
    default(spec, &["domain", "machine", "type"], settings.machine_type.as_str());
    resources(spec);
    topology(spec);
    for volume in list(spec, &["volumes"]) {
        if volume.get("containerDisk").is_some_and(Value::is_object) {
            let policy = pull_policy(text(volume, &["containerDisk", "image"]));
            default(volume, &["containerDisk", "imagePullPolicy"], policy);
        }
    }
    default(spec, &["evictionStrategy"], settings.eviction_strategy.as_str());
    state::attach::network(spec);
    disks(spec);
    default(spec, &["domain", "firmware", "uuid"], uuid());
    for input in list(spec, &["domain", "devices", "inputs"]) {
        default(input, &["bus"], "usb");
        default(input, &["type"], "tablet");
    }
    for probe in ["readinessProbe", "livenessProbe"] {
        if get(spec, &[probe]).is_object() {
            for (field, value) in
                [("timeoutSeconds", 1), ("periodSeconds", 10), ("successThreshold", 1), ("failureThreshold", 3)]
            {
                if open(get(spec, &[probe, field])) {
                    *at(spec, &[probe, field]) = json!(value);
                }
            }
        }
    }
    switches(spec);
    let watchdog = at(spec, &["domain", "devices"]);
    if let Some(model) = watchdog.get_mut("watchdog").and_then(|w| w.get_mut("i6300esb")) {
        default(model, &["action"], "reset");
    }
    default(spec, &["domain", "cpu", "model"], settings.cpu_model.as_str());
}

/// A number that is left open. A negative one is not: it is wrong, and stays for the rules to say so.
fn open(number: &Value) -> bool {
    number.is_null() || number.as_i64() == Some(0)
}

/// The objects of a list, to be changed.
fn list<'v>(value: &'v mut Value, path: &[&str]) -> impl Iterator<Item = &'v mut Value> {
    let found = path.iter().try_fold(value, |v, key| v.get_mut(key));
    found.and_then(Value::as_array_mut).map(|l| l.iter_mut()).into_iter().flatten()
}

fn resources(spec: &mut Value) {
    let cpu = get(spec, &["domain", "resources", "limits", "cpu"]).clone();
    if !cpu.is_null() {
        default(spec, &["domain", "resources", "requests", "cpu"], cpu);
    }
    let memory = ["requests", "limits"].map(|side| get(spec, &["domain", "resources", side, "memory"]).clone());
    let huge = get(spec, &["domain", "memory", "hugepages", "pageSize"]).clone();
    if let Some(m) = memory.into_iter().chain([huge]).find(|m| !m.is_null()) {
        // Quantities may be numbers; memory.guest is read as text.
        let m = if let Value::Number(n) = &m { json!(n.to_string()) } else { m };
        default(spec, &["domain", "memory", "guest"], m);
    }
}

fn topology(spec: &mut Value) {
    let parts = ["sockets", "cores", "threads"];
    if parts.iter().all(|p| open(get(spec, &["domain", "cpu", p]))) {
        let milli = ["limits", "requests"]
            .iter()
            .find_map(|side| api::quantity_milli(get(spec, &["domain", "resources", side, "cpu"])));
        let sockets = milli.map_or(1, |m| (m + 999) / 1000).clamp(1, i128::from(i32::MAX));
        *at(spec, &["domain", "cpu", "sockets"]) = json!(i64::try_from(sockets).unwrap_or(1));
    }
    for part in parts {
        if open(get(spec, &["domain", "cpu", part])) {
            *at(spec, &["domain", "cpu", part]) = json!(1);
        }
    }
}

/// When an image is fetched: always where its content may change under its name.
fn pull_policy(image: &str) -> &'static str {
    let name = image.rsplit('/').next().unwrap_or_default();
    match name.split_once('@').map_or_else(|| name.split_once(':').map(|(_, tag)| tag), |_| Some("digest")) {
        None | Some("latest") => "Always",
        Some(_) => "IfNotPresent",
    }
}

/// Says which defaults a user may not have meant.
pub(super) fn tell(spec: &Value, base: &str, p: &mut Problems) {
    for (i, name) in state::attach::volumes_without_disk(spec) {
        p.warn(format!("{base}.volumes[{i}]: no disk is named {name:?}; the machine gets one for it"));
    }
}

fn disks(spec: &mut Value) {
    state::attach::disks(spec);
    for disk in list(spec, &["domain", "devices", "disks"]) {
        let Some(target) = ["disk", "cdrom", "lun"].into_iter().find(|t| disk.get(t).is_some_and(Value::is_object))
        else {
            *at(disk, &["disk", "bus"]) = json!("sata");
            continue;
        };
        if target == "cdrom" {
            default(disk, &["cdrom", "readonly"], true);
            default(disk, &["cdrom", "tray"], "closed");
        }
        if disk.get("blockSize").and_then(|b| b.get("matchVolume")).is_some_and(Value::is_object) {
            default(disk, &["blockSize", "matchVolume", "enabled"], true);
        }
        default(disk, &[target, "bus"], "sata");
    }
}

/// Structures that are there are on.
fn switches(spec: &mut Value) {
    for timer in ["hpet", "kvm", "pit", "rtc", "hyperv"] {
        if let Some(t) = at(spec, &["domain"])
            .get_mut("clock")
            .and_then(|c| c.get_mut("timer"))
            .and_then(|t| t.get_mut(timer))
            .filter(|t| t.is_object())
        {
            default(t, &["present"], true);
        }
    }
    let Some(features) = at(spec, &["domain"]).get_mut("features").filter(|f| f.is_object()) else { return };
    for name in ["acpi", "apic", "smm", "pvspinlock"] {
        if let Some(f) = features.get_mut(name).filter(|f| f.is_object()) {
            default(f, &["enabled"], true);
        }
    }
    let Some(hyperv) = features.get_mut("hyperv").and_then(Value::as_object_mut) else { return };
    for (needs, needed) in
        [("evmcs", "vapic"), ("ipi", "vpindex"), ("tlbflush", "vpindex"), ("synictimer", "synic"), ("synic", "vpindex")]
    {
        if hyperv.get(needs).is_some_and(|f| f.is_object() && f.get("enabled") != Some(&json!(false)))
            && !hyperv.contains_key(needed)
        {
            hyperv.insert(needed.into(), json!({}));
        }
    }
    for (name, feature) in hyperv.iter_mut().filter(|(_, f)| f.is_object()) {
        default(feature, &["enabled"], true);
        if name == "spinlocks" {
            default(feature, &["spinlocks"], 4096);
        }
        for part in ["direct", "extended"] {
            if let Some(p) = feature.get_mut(part).filter(|p| p.is_object()) {
                default(p, &["enabled"], true);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(input: Value) -> Value {
        let mut s = input;
        spec(&mut s, &Settings::default(), &|| "u".into());
        let once = s.clone();
        spec(&mut s, &Settings::default(), &|| "other".into());
        assert_eq!(s, once, "idempotent");
        s
    }

    #[test]
    fn empty_spec() {
        assert_eq!(
            done(json!({"domain": {"devices": {}, "memory": {"guest": "1Gi"}}})),
            json!({
                "architecture": "amd64",
                "evictionStrategy": "None",
                "domain": {
                    "machine": {"type": "q35"},
                    "cpu": {"sockets": 1, "cores": 1, "threads": 1, "model": "host-model"},
                    "memory": {"guest": "1Gi"},
                    "firmware": {"uuid": "u"},
                    "devices": {"interfaces": [{"name": "default", "masquerade": {}}]},
                },
                "networks": [{"name": "default", "pod": {}}],
            })
        );
    }

    #[test]
    fn memory_and_topology_come_from_resources() {
        let s = done(
            json!({"domain": {"devices": {"autoattachPodInterface": false}, "resources": {"requests": {"memory": 1024}, "limits": {"cpu": "2500m", "memory": "1Gi"}}}}),
        );
        assert_eq!(s["domain"]["memory"]["guest"], "1024");
        assert_eq!(s["domain"]["cpu"]["sockets"], 3);
        assert_eq!(s["domain"]["resources"]["requests"]["cpu"], "2500m");
        assert!(s.get("networks").is_none());
    }

    #[test]
    fn disks_get_targets_and_buses() {
        let s = done(json!({
            "domain": {"devices": {"disks": [{"name": "a"}, {"name": "b", "cdrom": {}}, {"name": "c", "disk": {"bus": "virtio"}}]}},
            "volumes": [{"name": "a"}, {"name": "b"}, {"name": "c"}, {"name": "d", "containerDisk": {"image": "r:5000/x@sha256:1"}}, {"name": "e", "containerDisk": {"image": "r:5000/x"}}],
        }));
        assert_eq!(
            s["domain"]["devices"]["disks"],
            json!([
                {"name": "a", "disk": {"bus": "sata"}},
                {"name": "b", "cdrom": {"bus": "sata", "readonly": true, "tray": "closed"}},
                {"name": "c", "disk": {"bus": "virtio"}},
                {"name": "d", "disk": {"bus": "sata"}},
                {"name": "e", "disk": {"bus": "sata"}},
            ])
        );
        assert_eq!(s["volumes"][3]["containerDisk"]["imagePullPolicy"], "IfNotPresent");
        assert_eq!(s["volumes"][4]["containerDisk"]["imagePullPolicy"], "Always");
    }

    #[test]
    fn probes_get_the_numbers_of_kubernetes() {
        let s = done(
            json!({"domain": {}, "readinessProbe": {"tcpSocket": {"port": 1}, "periodSeconds": 2, "failureThreshold": 0}}),
        );
        assert_eq!(
            s["readinessProbe"],
            json!({"tcpSocket": {"port": 1}, "timeoutSeconds": 1, "periodSeconds": 2, "successThreshold": 1, "failureThreshold": 3})
        );
        assert!(s.get("livenessProbe").is_none());
    }

    #[test]
    fn pull_policies() {
        for (image, policy) in [
            ("a", "Always"),
            ("a:latest", "Always"),
            ("h:5000/a", "Always"),
            ("h:5000/a:v1", "IfNotPresent"),
            ("a@sha256:0", "IfNotPresent"),
        ] {
            assert_eq!(pull_policy(image), policy, "{image}");
        }
    }

    #[test]
    fn hyperv_brings_what_it_needs() {
        let s = done(
            json!({"domain": {"features": {"hyperv": {"synictimer": {"direct": {}}, "spinlocks": {}, "relaxed": {"enabled": false}}, "smm": {}}, "clock": {"timer": {"hpet": {"present": false}, "rtc": {}}}}}),
        );
        let on = json!({"enabled": true});
        assert_eq!(
            s["domain"]["features"]["hyperv"],
            json!({"synictimer": {"enabled": true, "direct": on}, "synic": on, "vpindex": on, "spinlocks": {"enabled": true, "spinlocks": 4096}, "relaxed": {"enabled": false}})
        );
        assert_eq!(s["domain"]["features"]["smm"], on);
        assert_eq!(s["domain"]["clock"]["timer"], json!({"hpet": {"present": false}, "rtc": {"present": true}}));
    }
}
