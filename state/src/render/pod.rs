//! The launcher pod of a VMI.

use super::{Error, owner};
use api::{VirtualMachineInstance, Volume, names, names::paths, quantity_milli};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sha1::{Digest, Sha1};

/// Seconds that the pod's grace exceeds the guest's: time for the launcher to report and to end.
const POD_GRACE_EXTRA: i64 = 30;
/// Seconds that the launcher's own grace exceeds the guest's, where it was told to stop by its pod and not by an agent.
const LAUNCHER_GRACE_EXTRA: i64 = 15;
/// vCPUs that share one CPU where the VMI asks for none.
const CPU_ALLOCATION_RATIO: u64 = 10;
/// Added to the delays of probes, for the time that the guest takes to boot.
const PROBE_DELAY: i64 = 10;
/// Added to the limits of probes that are asked inside of the guest: whoever asks is to hear why there was no answer.
const PROBE_TIMEOUT: i64 = 1;
/// The program, in the launcher's image.
const PROGRAM: &str = "/usr/bin/virtfold";

const MIB: u64 = 1 << 20;

/// The launcher process: 7 MiB measured (anonymous memory and its share of the program), and reserve.
const LAUNCHER: u64 = 10 * MIB;
/// QEMU without its guest: 24 MiB measured when it has started, 37 MiB once a guest with two disks, a network card and VNC has
/// booted, and reserve.
const QEMU: u64 = 40 * MIB;
/// A vCPU: its thread's stack and buffers; 0.1 MiB measured while it idles.
const VCPU: u64 = MIB;
/// Video memory of the graphics adapters.
const VIDEO: u64 = 16 * MIB;
/// A process that asks inside of the guest for a probe, with reserve.
const PROBE: u64 = 8 * MIB;
/// Page tables that map the guest's memory: 8 bytes a page of 4 KiB.
const PAGE_TABLE_SHARE: u64 = 512;

/// Bytes beside the guest's own memory that one launcher needs. KubeVirt's sum for the same machine is about 300 MiB, most of it
/// for libvirt's daemons and their monitor, which are not here. Translated code of a guest that is emulated comes on top: who
/// renders a pod does not know which node will run it. The launcher bounds it.
pub fn memory_overhead(guest: u64, vcpus: u32, graphics: bool) -> u64 {
    guest / PAGE_TABLE_SHARE + LAUNCHER + QEMU + VCPU * u64::from(vcpus) + if graphics { VIDEO } else { 0 }
}

pub(super) fn render(raw: &Value, pod_name: &str, image: &str) -> Result<Value, Error> {
    let vmi = VirtualMachineInstance::deserialize(raw)
        .map_err(|_| Error::WrongSource { expected: "a readable VirtualMachineInstance".into() })?;
    let (name, uid, spec) = (&vmi.metadata.name, &vmi.metadata.uid, &vmi.spec);
    let grace = spec.grace_seconds();
    let guest = spec.guest_memory().ok_or_else(|| Error::Unusable {
        field: "spec.domain.memory.guest".into(),
        problem: "there is no size of the guest's memory".into(),
    })?;
    let graphics = spec.domain.devices.autoattach_graphics_device.unwrap_or(true);
    let inner = [&spec.readiness_probe, &spec.liveness_probe];
    let inner = inner.into_iter().flatten().filter(|p| inner_probe(p).is_some()).count();
    let overhead = memory_overhead(guest, spec.vcpus(), graphics) + PROBE * u64::try_from(inner).unwrap_or(0);
    let hostname = spec.hostname.clone().unwrap_or_else(|| first_label(name));
    let (volumes, mounts, pull_secrets) = volumes(&vmi)?;

    let mut compute = json!({
        "name": "compute",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": [PROGRAM, "launcher"],
        "args": [
            "--name", name,
            "--namespace", vmi.metadata.namespace,
            "--vmi-uid", uid,
            "--share-dir", paths::SHARE,
            "--grace-period-seconds", (grace + LAUNCHER_GRACE_EXTRA).to_string(),
        ],
        "env": [{"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}],
        "resources": resources(&vmi, guest, overhead),
        "securityContext": {
            "runAsNonRoot": true,
            "runAsUser": names::LAUNCHER_UID,
            "runAsGroup": names::LAUNCHER_UID,
            "allowPrivilegeEscalation": false,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    });
    for (field, probe) in [("readinessProbe", &spec.readiness_probe), ("livenessProbe", &spec.liveness_probe)] {
        if let Some(p) = probe.as_ref().and_then(pod_probe) {
            compute[field] = p;
        }
    }

    let mut pod_spec = json!({
        "restartPolicy": "Never",
        "enableServiceLinks": false,
        "automountServiceAccountToken": false,
        "terminationGracePeriodSeconds": grace + POD_GRACE_EXTRA,
        "hostname": hostname,
        "nodeSelector": node_selector(&vmi),
        "readinessGates": [{"conditionType": names::GATE_UNPAUSED}],
        "securityContext": {
            "runAsNonRoot": true,
            "runAsUser": names::LAUNCHER_UID,
            "runAsGroup": names::LAUNCHER_UID,
            "fsGroup": names::LAUNCHER_UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [compute],
        "volumes": volumes,
    });
    if !pull_secrets.is_empty() {
        pod_spec["imagePullSecrets"] = json!(pull_secrets);
    }
    let passed_on = [
        "subdomain",
        "tolerations",
        "topologySpreadConstraints",
        "priorityClassName",
        "schedulerName",
        "dnsPolicy",
        "dnsConfig",
    ];
    for field in passed_on {
        if let Some(v) = raw.pointer("/spec").and_then(|s| s.get(field)).filter(|v| !v.is_null()) {
            pod_spec[field] = v.clone();
        }
    }
    if let Some(affinity) = affinity(&vmi, raw.pointer("/spec/affinity")) {
        pod_spec["affinity"] = affinity;
    }
    Ok(json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name,
            "namespace": vmi.metadata.namespace,
            "labels": labels(&vmi, &hostname),
            "annotations": annotations(&vmi, overhead),
            "ownerReferences": [owner("kubevirt.io/v1", "VirtualMachineInstance", name, uid)],
        },
        "spec": pod_spec,
    }))
}

fn first_label(name: &str) -> String {
    let label = name.split('.').next().unwrap_or_default();
    label.chars().take(63).collect::<String>().trim_end_matches('-').to_owned()
}

fn labels(vmi: &VirtualMachineInstance, hostname: &str) -> Value {
    let mut l = vmi.metadata.labels.clone();
    // Says where the VMI runs, and is the VMI's; a pod that is being made runs nowhere.
    l.remove(names::LABEL_NODE_NAME);
    let ours = [
        (names::LABEL_APP, names::APP_LAUNCHER.to_owned()),
        (names::LABEL_CREATED_BY, vmi.metadata.uid.clone()),
        (names::LABEL_VM_NAME, hostname.to_owned()),
        (names::LABEL_VMI_ID, label_value(&vmi.metadata.name)),
    ];
    for (k, v) in ours {
        l.insert(k.to_owned(), v);
    }
    json!(l)
}

/// A name as a label's value: what is too long is cut and made unique by a hash.
fn label_value(name: &str) -> String {
    if name.len() <= 63 {
        return name.to_owned();
    }
    let hash: String = Sha1::digest(name.as_bytes()).iter().take(4).map(|b| format!("{b:02x}")).collect();
    let short: String = name.chars().take(54).collect();
    format!("{short}-{hash}")
}

fn annotations(vmi: &VirtualMachineInstance, overhead: u64) -> Value {
    let mut a = vmi.metadata.annotations.clone();
    // The VMI as somebody applied it (with its user data) is nothing for a pod to carry.
    a.retain(|k, _| {
        !k.starts_with("kubectl.kubernetes.io/")
            && k != "kubevirt.io/latest-observed-api-version"
            && k != "kubevirt.io/storage-observed-api-version"
    });
    a.insert(names::ANN_DOMAIN.into(), vmi.metadata.name.clone());
    a.insert("kubectl.kubernetes.io/default-container".into(), "compute".into());
    a.insert(names::ANN_MEMORY_OVERHEAD.into(), overhead.to_string());
    json!(a)
}

fn node_selector(vmi: &VirtualMachineInstance) -> Value {
    let mut s = vmi.spec.node_selector.clone();
    s.insert(names::LABEL_SCHEDULABLE.into(), "true".into());
    if let Some(a) = vmi.spec.architecture.as_ref().filter(|a| !a.is_empty()) {
        s.insert("kubernetes.io/arch".into(), a.clone());
    }
    let cpu = &vmi.spec.domain.cpu;
    // What `host-model` and `host-passthrough` are is each node's own affair.
    let models = cpu.model.iter().filter(|m| !["", "host-model", "host-passthrough"].contains(&m.as_str()));
    let machines = Some(&vmi.spec.domain.machine.kind).filter(|t| !t.is_empty()).into_iter();
    let labels = models
        .map(|m| (names::node::CPU_MODEL, m.as_str()))
        .chain(features(vmi, &["require", ""]).map(|f| (names::node::CPU_FEATURE, f)))
        .chain(machines.map(|t| (names::node::MACHINE_TYPE, t.as_str())));
    s.extend(labels.map(|(prefix, name)| (format!("{prefix}{name}"), "true".into())));
    json!(s)
}

/// CPU features with one of these policies.
fn features<'a>(vmi: &'a VirtualMachineInstance, policies: &'a [&str]) -> impl Iterator<Item = &'a str> {
    let all = vmi.spec.domain.cpu.features.iter();
    all.filter(move |f| policies.contains(&f.policy.as_deref().unwrap_or_default())).map(|f| f.name.as_str())
}

/// The user's affinity, and no node that has a feature which is forbidden: each of the user's terms is enough by itself, so it is
/// added to each.
fn affinity(vmi: &VirtualMachineInstance, users: Option<&Value>) -> Option<Value> {
    let forbidden: Vec<Value> = features(vmi, &["forbid"])
        .map(|f| json!({"key": format!("{}{f}", names::node::CPU_FEATURE), "operator": "DoesNotExist"}))
        .collect();
    let mut affinity = users.filter(|v| !v.is_null()).cloned();
    if forbidden.is_empty() {
        return affinity;
    }
    let terms = affinity.get_or_insert_with(|| json!({})).as_object_mut().and_then(|a| {
        let node = a.entry("nodeAffinity").or_insert(Value::Null);
        let required = object(node)?.entry("requiredDuringSchedulingIgnoredDuringExecution").or_insert(Value::Null);
        let terms = object(required)?.entry("nodeSelectorTerms").or_insert(Value::Null);
        if terms.as_array().is_none_or(Vec::is_empty) {
            *terms = json!([{}]);
        }
        terms.as_array_mut()
    });
    for term in terms.into_iter().flatten().filter_map(object) {
        match term.get_mut("matchExpressions").and_then(Value::as_array_mut) {
            Some(all) => all.extend(forbidden.iter().cloned()),
            None => drop(term.insert("matchExpressions".into(), json!(forbidden))),
        }
    }
    affinity
}

/// The fields of a value, which is made an object where it is nothing.
fn object(v: &mut Value) -> Option<&mut Map<String, Value>> {
    if v.is_null() {
        *v = json!({});
    }
    v.as_object_mut()
}

fn resources(vmi: &VirtualMachineInstance, guest: u64, overhead: u64) -> Value {
    let r = &vmi.spec.domain.resources;
    let (mut requests, mut limits): (Map<String, Value>, Map<String, Value>) =
        (r.requests.clone().into_iter().collect(), r.limits.clone().into_iter().collect());
    let extra = if r.overcommit_guest_overhead { 0 } else { overhead };
    let plus = |v: Option<&Value>, floor: u64| {
        let asked = v.and_then(api::quantity_bytes).unwrap_or(floor);
        json!(asked.saturating_add(extra).to_string())
    };
    let memory = plus(requests.get("memory"), guest);
    requests.insert("memory".into(), memory);
    if limits.contains_key("memory") {
        let memory = plus(limits.get("memory"), guest.saturating_add(overhead));
        limits.insert("memory".into(), memory);
    }
    if !requests.contains_key("cpu") {
        let asked = limits.get("cpu").and_then(quantity_milli).and_then(|m| u64::try_from(m).ok());
        let milli = asked.unwrap_or(u64::from(vmi.spec.vcpus()) * 1000 / CPU_ALLOCATION_RATIO);
        requests.insert("cpu".into(), json!(format!("{milli}m")));
    }
    if vmi.spec.domain.cpu.dedicated_cpu_placement {
        let cpus = json!(vmi.spec.vcpus().to_string());
        requests.insert("cpu".into(), cpus.clone());
        limits.insert("cpu".into(), cpus);
        let memory = requests.get("memory").cloned().unwrap_or_default();
        limits.insert("memory".into(), memory);
    }
    requests.entry("ephemeral-storage").or_insert_with(|| json!("50M"));
    json!({"requests": requests, "limits": limits})
}

/// The pod's probe for one of the guest. What is asked over the network stays as it is; what is asked inside of the guest becomes a
/// command in the launcher's container, which asks the guest's agent.
fn pod_probe(probe: &Value) -> Option<Value> {
    let mut p = probe.as_object()?.clone();
    let number = |key: &str| probe.get(key).and_then(Value::as_i64).unwrap_or(0);
    if let Some(asked) = inner_probe(probe) {
        let limit = number("timeoutSeconds").max(1);
        let seconds = limit.to_string();
        let mut command = vec![PROGRAM, "guest-probe", "--share-dir", paths::SHARE, "--timeout-seconds", &seconds];
        if !asked.is_empty() {
            command.push("--");
            command.extend(asked);
        }
        p.remove("guestAgentPing");
        p.insert("exec".into(), json!({"command": command}));
        p.insert("timeoutSeconds".into(), json!(limit.saturating_add(PROBE_TIMEOUT)));
    } else if !["httpGet", "tcpSocket", "grpc"].iter().any(|k| p.get(*k).is_some_and(|v| !v.is_null())) {
        return None;
    }
    p.insert("initialDelaySeconds".into(), json!(number("initialDelaySeconds").saturating_add(PROBE_DELAY)));
    Some(Value::Object(p))
}

/// What a probe runs inside of the guest; empty where it asks for the agent's answer alone.
fn inner_probe(probe: &Value) -> Option<Vec<&str>> {
    if let Some(command) = probe.pointer("/exec/command").and_then(Value::as_array) {
        return Some(command.iter().filter_map(Value::as_str).collect());
    }
    probe.get("guestAgentPing").filter(|p| p.is_object()).map(|_| vec![])
}

type Rendered = (Vec<Value>, Vec<Value>, Vec<Value>);

fn volumes(vmi: &VirtualMachineInstance) -> Result<Rendered, Error> {
    let (mut volumes, mut mounts) = (vec![], vec![]);
    let mut secrets: Vec<Value> = vec![];
    let mut add = |volume: Value, path: String, read_only: bool| {
        let mut mount = json!({"name": volume["name"], "mountPath": path});
        if read_only {
            mount["readOnly"] = json!(true);
        }
        volumes.push(volume);
        mounts.push(mount);
    };
    add(json!({"name": "ephemeral-disks", "emptyDir": {}}), paths::EPHEMERAL.into(), false);
    for (i, v) in vmi.spec.volumes.iter().enumerate() {
        let claim = match (&v.persistent_volume_claim, &v.data_volume) {
            (Some(c), _) => Some((c.claim_name.clone(), c.read_only)),
            (None, Some(d)) => Some((d.name.clone(), false)),
            (None, None) => None,
        };
        if let Some((claim, read_only)) = claim {
            let mut source = json!({"claimName": claim});
            if read_only {
                source["readOnly"] = json!(true);
            }
            let volume = json!({"name": v.name, "persistentVolumeClaim": source});
            add(volume, format!("{}/{}", paths::PVC, v.name), read_only);
        } else if let Some(c) = &v.container_disk {
            let policy = c.image_pull_policy.clone().unwrap_or_else(|| pull_policy(&c.image).into());
            let volume = json!({"name": v.name, "image": {"reference": c.image, "pullPolicy": policy}});
            add(volume, format!("{}/disk_{i}", paths::IMAGES), true);
            if let Some(s) = c.image_pull_secret.as_ref().filter(|s| !s.is_empty()) {
                let reference = json!({"name": s});
                if !secrets.contains(&reference) {
                    secrets.push(reference);
                }
            }
        } else if let Some(ci) = v.cloud_init_no_cloud.as_ref().or(v.cloud_init_config_drive.as_ref()) {
            for (reference, suffix) in [(&ci.secret_ref, "udata"), (&ci.network_data_secret_ref, "ndata")] {
                if let Some(s) = reference {
                    let name = format!("{}-{suffix}", v.name);
                    let path = format!("{}/{name}", paths::SECRETS);
                    add(json!({"name": name, "secret": {"secretName": s.name}}), path, true);
                }
            }
        } else if let Some(s) = &v.secret {
            let name = s.get("secretName").cloned().unwrap_or_default();
            let path = format!("{}/{}", paths::SECRETS, v.name);
            add(json!({"name": v.name, "secret": {"secretName": name}}), path, true);
        } else if v.empty_disk.is_none() {
            return Err(unsupported(v, i));
        }
    }
    Ok((volumes, mounts, secrets))
}

fn unsupported(v: &Volume, index: usize) -> Error {
    Error::Unusable {
        field: format!("spec.volumes[{index}]"),
        problem: format!("the kind of volume of `{}` is not supported", v.name),
    }
}

/// `:latest` and no tag at all are pulled each time, everything else once.
fn pull_policy(image: &str) -> &'static str {
    if image.contains('@') {
        return "IfNotPresent";
    }
    let last = image.rsplit('/').next().unwrap_or_default();
    match last.rsplit_once(':') {
        None | Some((_, "latest")) => "Always",
        Some(_) => "IfNotPresent",
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn vmi() -> Value {
        json!({
            "metadata": {"name": "web", "namespace": "ns", "uid": "u1",
                "labels": {"a": "b", "kubevirt.io/nodeName": "x"},
                "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "secret", "k": "v"}},
            "spec": {
                "terminationGracePeriodSeconds": 7,
                "nodeSelector": {"disk": "ssd"},
                "tolerations": [{"key": "t"}],
                "domain": {"cpu": {"cores": 2}, "memory": {"guest": "256Mi"}},
                "volumes": [
                    {"name": "root", "containerDisk": {"image": "reg/a:latest", "imagePullSecret": "creds"}},
                    {"name": "data", "persistentVolumeClaim": {"claimName": "c1"}},
                    {"name": "scratch", "emptyDisk": {"capacity": "1Gi"}},
                    {"name": "ci", "cloudInitNoCloud": {"secretRef": {"name": "s1"}, "networkDataSecretRef": {"name": "s2"}}},
                ],
            },
        })
    }

    #[test]
    fn the_pod_carries_what_the_launcher_needs() {
        let p = render(&vmi(), "virt-launcher-web-1", "img").unwrap();
        let c = &p["spec"]["containers"][0];
        assert_eq!(c["command"], json!(["/usr/bin/virtfold", "launcher"]));
        assert_eq!(
            c["args"],
            json!([
                "--name",
                "web",
                "--namespace",
                "ns",
                "--vmi-uid",
                "u1",
                "--share-dir",
                "/run/virtfold",
                "--grace-period-seconds",
                "22"
            ])
        );
        assert_eq!(p["spec"]["terminationGracePeriodSeconds"], 37);
        assert_eq!(p["spec"]["nodeSelector"], json!({"disk": "ssd", "kubevirt.io/schedulable": "true"}));
        assert_eq!(p["spec"]["tolerations"], json!([{"key": "t"}]));
        assert_eq!(p["metadata"]["labels"]["kubevirt.io/created-by"], "u1");
        assert_eq!(p["metadata"]["labels"].get("kubevirt.io/nodeName"), None);
        assert_eq!(p["metadata"]["annotations"].get("kubectl.kubernetes.io/last-applied-configuration"), None);
        assert_eq!(p["metadata"]["annotations"]["kubevirt.io/domain"], "web");
        assert_eq!(p["spec"]["imagePullSecrets"], json!([{"name": "creds"}]));
        assert_eq!(
            c["volumeMounts"],
            json!([
                {"name": "ephemeral-disks", "mountPath": "/var/run/kubevirt-ephemeral-disks"},
                {"name": "root", "mountPath": "/var/run/kubevirt-image-volume/disk_0", "readOnly": true},
                {"name": "data", "mountPath": "/var/run/kubevirt-private/vmi-disks/data"},
                {"name": "ci-udata", "mountPath": "/var/run/kubevirt-private/secret/ci-udata", "readOnly": true},
                {"name": "ci-ndata", "mountPath": "/var/run/kubevirt-private/secret/ci-ndata", "readOnly": true},
            ])
        );
        assert_eq!(
            p["spec"]["volumes"][1],
            json!({"name": "root", "image": {"reference": "reg/a:latest", "pullPolicy": "Always"}})
        );
        let overhead = memory_overhead(256 * MIB, 2, true);
        assert_eq!(c["resources"]["requests"]["memory"], (256 * MIB + overhead).to_string());
        assert_eq!(c["resources"]["requests"]["cpu"], "200m");
        assert_eq!(p["metadata"]["annotations"]["kubevirt.io/memory-overhead-bytes"], overhead.to_string());
    }

    /// All of it, as other tools see it.
    #[test]
    fn a_whole_pod() {
        let vmi = json!({
            "metadata": {"name": "web.example", "namespace": "ns", "uid": "u1",
                "labels": {"app": "web", "kubevirt.io/nodeName": "old"},
                "annotations": {"note": "kept", "kubevirt.io/latest-observed-api-version": "v1",
                    "kubevirt.io/storage-observed-api-version": "v1"}},
            "spec": {
                "architecture": "amd64",
                "subdomain": "sub",
                "nodeSelector": {"disk": "ssd"},
                "affinity": {"nodeAffinity": {}},
                "tolerations": [{"key": "t", "operator": "Exists"}],
                "topologySpreadConstraints": [{"maxSkew": 1}],
                "priorityClassName": "high",
                "schedulerName": "mine",
                "dnsPolicy": "None",
                "dnsConfig": {"nameservers": ["10.0.0.1"]},
                "terminationGracePeriodSeconds": 60,
                "readinessProbe": {"httpGet": {"port": 80}, "periodSeconds": 2},
                "livenessProbe": {"tcpSocket": {"port": 22}, "initialDelaySeconds": 5},
                "domain": {
                    "cpu": {"sockets": 1, "cores": 2, "threads": 1, "model": "Skylake", "features": [{"name": "vmx"}]},
                    "memory": {"guest": "512Mi"}, "machine": {"type": "q35"},
                    "resources": {"requests": {"memory": "256Mi"}, "limits": {"memory": "1Gi"}},
                    "devices": {"autoattachGraphicsDevice": false}},
            },
        });
        let overhead = 512 * MIB / 512 + (10 + 40 + 2) * MIB;
        assert_eq!(overhead, 53 * MIB);
        let want = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "virt-launcher-web-x",
                "namespace": "ns",
                "labels": {
                    "app": "web",
                    "kubevirt.io": "virt-launcher",
                    "kubevirt.io/created-by": "u1",
                    "vm.kubevirt.io/name": "web",
                    "vmi.kubevirt.io/id": "web.example",
                },
                "annotations": {
                    "note": "kept",
                    "kubevirt.io/domain": "web.example",
                    "kubectl.kubernetes.io/default-container": "compute",
                    "kubevirt.io/memory-overhead-bytes": overhead.to_string(),
                },
                "ownerReferences": [{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
                    "name": "web.example", "uid": "u1", "controller": true, "blockOwnerDeletion": true}],
            },
            "spec": {
                "restartPolicy": "Never",
                "enableServiceLinks": false,
                "automountServiceAccountToken": false,
                "terminationGracePeriodSeconds": 90,
                "hostname": "web",
                "subdomain": "sub",
                "nodeSelector": {"disk": "ssd", "kubevirt.io/schedulable": "true", "kubernetes.io/arch": "amd64",
                    "cpu-model.node.kubevirt.io/Skylake": "true", "cpu-feature.node.kubevirt.io/vmx": "true",
                    "machine-type.node.kubevirt.io/q35": "true"},
                "affinity": {"nodeAffinity": {}},
                "tolerations": [{"key": "t", "operator": "Exists"}],
                "topologySpreadConstraints": [{"maxSkew": 1}],
                "priorityClassName": "high",
                "schedulerName": "mine",
                "dnsPolicy": "None",
                "dnsConfig": {"nameservers": ["10.0.0.1"]},
                "readinessGates": [{"conditionType": "kubevirt.io/virtual-machine-unpaused"}],
                "securityContext": {"runAsNonRoot": true, "runAsUser": 107, "runAsGroup": 107, "fsGroup": 107,
                    "seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [{
                    "name": "compute",
                    "image": "img",
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["/usr/bin/virtfold", "launcher"],
                    "args": ["--name", "web.example", "--namespace", "ns", "--vmi-uid", "u1",
                        "--share-dir", "/run/virtfold", "--grace-period-seconds", "75"],
                    "env": [{"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}],
                    "resources": {
                        "requests": {"cpu": "200m", "memory": (256 * MIB + overhead).to_string(), "ephemeral-storage": "50M"},
                        "limits": {"memory": (1024 * MIB + overhead).to_string()},
                    },
                    "securityContext": {"runAsNonRoot": true, "runAsUser": 107, "runAsGroup": 107,
                        "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
                        "seccompProfile": {"type": "RuntimeDefault"}},
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    "readinessProbe": {"httpGet": {"port": 80}, "periodSeconds": 2, "initialDelaySeconds": 10},
                    "livenessProbe": {"tcpSocket": {"port": 22}, "initialDelaySeconds": 15},
                    "volumeMounts": [{"name": "ephemeral-disks", "mountPath": "/var/run/kubevirt-ephemeral-disks"}],
                }],
                "volumes": [{"name": "ephemeral-disks", "emptyDir": {}}],
            },
        });
        let pod = render(&vmi, "virt-launcher-web-x", "img").unwrap();
        assert_eq!(pod, want, "{pod:#}");
    }

    #[test]
    fn rule_2_6_a_pod_goes_where_its_cpu_and_machine_can_be_had() {
        let placed = |domain: Value, affinity: Value| {
            let mut v = vmi();
            v["spec"]["nodeSelector"] = json!({});
            v["spec"]["affinity"] = affinity;
            v["spec"]["domain"] = domain;
            v["spec"]["domain"]["memory"] = json!({"guest": "64Mi"});
            let spec = render(&v, "p", "i").unwrap()["spec"].clone();
            let mut selector = spec["nodeSelector"].as_object().unwrap().clone();
            assert_eq!(selector.remove("kubevirt.io/schedulable"), Some(json!("true")));
            (selector.into_iter().map(|(k, _)| k).collect::<Vec<_>>(), spec["affinity"].clone())
        };
        // What is each node's own affair asks for no node.
        for model in [Value::Null, json!(""), json!("host-model"), json!("host-passthrough")] {
            assert_eq!(placed(json!({"cpu": {"model": model}}), Value::Null), (vec![], Value::Null), "{model}");
        }
        assert_eq!(placed(json!({"cpu": {"model": "Nehalem"}}), Value::Null).0, ["cpu-model.node.kubevirt.io/Nehalem"]);
        assert_eq!(placed(json!({"machine": {"type": "q35"}}), Value::Null).0, ["machine-type.node.kubevirt.io/q35"]);
        // Features by their policy: what is only wished for, and what is taken away, binds nothing.
        let features = json!([{"name": "a"}, {"name": "b", "policy": "require"}, {"name": "c", "policy": "optional"},
            {"name": "d", "policy": "disable"}, {"name": "e", "policy": "force"}, {"name": "f", "policy": "forbid"}]);
        let without = json!({"key": "cpu-feature.node.kubevirt.io/f", "operator": "DoesNotExist"});
        let (selector, affinity) = placed(json!({"cpu": {"features": features}}), Value::Null);
        assert_eq!(selector, ["cpu-feature.node.kubevirt.io/a", "cpu-feature.node.kubevirt.io/b"]);
        let required = |terms: Value| json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}});
        assert_eq!(affinity, required(json!([{"matchExpressions": [without]}])));
        // Beside what the user wants, in each of the alternatives.
        let ssd = json!({"key": "disk", "operator": "Exists"});
        let mut users = required(json!([{"matchExpressions": [ssd]}, {"matchFields": []}]));
        users["podAffinity"] = json!({"x": 1});
        let mut both =
            required(json!([{"matchExpressions": [ssd, without]}, {"matchFields": [], "matchExpressions": [without]}]));
        both["podAffinity"] = json!({"x": 1});
        let forbid = json!({"cpu": {"features": [{"name": "f", "policy": "forbid"}]}});
        assert_eq!(placed(forbid, users).1, both);
    }

    #[test]
    fn rule_2_6_probes_of_the_guest_become_probes_of_the_pod() {
        let probes = |readiness: Value, liveness: Value| {
            let mut v = vmi();
            v["spec"]["readinessProbe"] = readiness;
            v["spec"]["livenessProbe"] = liveness;
            let pod = render(&v, "p", "i").unwrap();
            let overhead: u64 =
                pod["metadata"]["annotations"]["kubevirt.io/memory-overhead-bytes"].as_str().unwrap().parse().unwrap();
            let more = overhead - memory_overhead(256 * MIB, 2, true);
            let c = pod["spec"]["containers"][0].clone();
            (c["readinessProbe"].clone(), c["livenessProbe"].clone(), more / MIB)
        };
        let ask = |limit: &str, more: &[&str]| {
            let mut c =
                vec!["/usr/bin/virtfold", "guest-probe", "--share-dir", "/run/virtfold", "--timeout-seconds", limit];
            c.extend(more);
            json!({"command": c})
        };
        assert_eq!(
            probes(
                json!({"exec": {"command": ["cat", "/run/-- ok"]}, "timeoutSeconds": 4, "periodSeconds": 2}),
                json!({"guestAgentPing": {}, "initialDelaySeconds": 20, "failureThreshold": 5})
            ),
            (
                json!({"exec": ask("4", &["--", "cat", "/run/-- ok"]), "timeoutSeconds": 5, "periodSeconds": 2, "initialDelaySeconds": 10}),
                json!({"exec": ask("1", &[]), "timeoutSeconds": 2, "initialDelaySeconds": 30, "failureThreshold": 5}),
                16,
            )
        );
        // Over the network nothing changes but the delay.
        assert_eq!(
            probes(json!({"httpGet": {"port": 80}, "timeoutSeconds": 4}), Value::Null),
            (json!({"httpGet": {"port": 80}, "timeoutSeconds": 4, "initialDelaySeconds": 10}), Value::Null, 0)
        );
    }

    #[test]
    fn requests_and_limits_are_the_users_and_what_comes_on_top() {
        let overhead = memory_overhead(64 * MIB, 4, true);
        let plus = |mib: u64| (mib * MIB + overhead).to_string();
        for (asked, cpu, memory, limits) in [
            (json!({}), "400m", plus(64), json!({})),
            (json!({"requests": {"cpu": "2", "memory": "100Mi"}}), "2", plus(100), json!({})),
            (json!({"limits": {"cpu": "3"}}), "3000m", plus(64), json!({"cpu": "3"})),
            (json!({"limits": {"memory": "1Gi"}}), "400m", plus(64), json!({"memory": plus(1024)})),
            (
                json!({"requests": {"memory": "64Mi"}, "overcommitGuestOverhead": true}),
                "400m",
                (64 * MIB).to_string(),
                json!({}),
            ),
        ] {
            let mut v = vmi();
            v["spec"]["domain"] = json!({"cpu": {"cores": 4}, "memory": {"guest": "64Mi"}, "resources": asked});
            let pod = render(&v, "p", "i").unwrap();
            let r = &pod["spec"]["containers"][0]["resources"];
            assert_eq!((&r["requests"]["cpu"], &r["requests"]["memory"]), (&json!(cpu), &json!(memory)), "{asked}");
            assert_eq!(r["limits"], limits, "{asked}");
        }
    }

    #[test]
    fn what_cannot_be_rendered_says_which_field() {
        let mut v = vmi();
        v["spec"]["volumes"][2] = json!({"name": "odd", "sysprep": {}});
        assert!(render(&v, "p", "i").unwrap_err().to_string().contains("spec.volumes[2]"));
        let mut v = vmi();
        v["spec"]["domain"]["memory"] = json!({});
        assert!(render(&v, "p", "i").unwrap_err().to_string().contains("memory"));
    }

    #[test]
    fn names_and_policies() {
        let long = "a".repeat(70);
        assert_eq!(label_value(&long).len(), 63);
        assert_eq!(first_label("web.example"), "web");
        for (image, policy) in
            [("a", "Always"), ("h:5000/a", "Always"), ("h:5000/a:1", "IfNotPresent"), ("a@sha256:0", "IfNotPresent")]
        {
            assert_eq!(pull_policy(image), policy, "{image}");
        }
    }
}
