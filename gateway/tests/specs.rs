//! Specs of instances: what is wrong with a spec, rule by rule, and what is right.

use crate::admission::{ask, input, merge, spec_with, vm, vmi};
use serde_json::{Value, json};

type Row = (&'static str, Value, &'static [(&'static str, &'static str)]);

/// What is wrong with a spec: a patch of the good one, and (cause, field below the base) of each complaint.
#[allow(clippy::too_many_lines)]
fn bad_specs() -> Vec<Row> {
    const INV: &str = "FieldValueInvalid";
    const REQ: &str = "FieldValueRequired";
    const DUP: &str = "FieldValueDuplicate";
    const NS: &str = "FieldValueNotSupported";
    const NF: &str = "FieldValueNotFound";
    const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
    const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";
    let node = |a: Value| json!({"affinity": {"nodeAffinity": a}});
    let disk = |d: Value| json!({"domain": {"devices": {"disks": [d]}}});
    let volume = |v: Value| json!({"volumes": [v]});
    let net = |interfaces: Value, networks: Value| json!({"domain": {"devices": {"interfaces": interfaces}}, "networks": networks});
    let nic = |i: Value| {
        let mut nic = json!({"name": "n", "masquerade": {}});
        merge(&mut nic, &i);
        net(json!([nic]), json!([{"name": "n", "pod": {}}]))
    };
    vec![
        (
            "disk without volume",
            json!({"domain": {"devices": {"disks": [{"name": "root"}, {"name": "other"}]}}}),
            &[(INV, ".domain.devices.disks[1].name")],
        ),
        (
            "two disks of one name",
            json!({"domain": {"devices": {"disks": [{"name": "root"}, {"name": "root"}]}}}),
            &[(INV, ".domain.devices.disks[1].name")],
        ),
        (
            "two volumes of one name",
            json!({"volumes": [{"name": "root", "emptyDisk": {"capacity": "1Gi"}}, {"name": "root", "emptyDisk": {"capacity": "1Gi"}}]}),
            &[(INV, ".volumes[1].name")],
        ),
        (
            "two targets",
            disk(json!({"name": "root", "disk": {"bus": "sata"}, "cdrom": {"bus": "sata"}})),
            &[(INV, ".domain.devices.disks[0]")],
        ),
        ("ide", disk(json!({"name": "root", "disk": {"bus": "ide"}})), &[(INV, ".domain.devices.disks[0].disk.bus")]),
        (
            "unknown bus",
            disk(json!({"name": "root", "disk": {"bus": "floppy"}})),
            &[(INV, ".domain.devices.disks[0].disk.bus")],
        ),
        (
            "virtio CD-ROM",
            disk(json!({"name": "root", "cdrom": {"bus": "virtio"}})),
            &[(INV, ".domain.devices.disks[0].cdrom.bus")],
        ),
        (
            "read-only sata disk",
            disk(json!({"name": "root", "disk": {"bus": "sata", "readonly": true}})),
            &[(INV, ".domain.devices.disks[0].disk.bus")],
        ),
        (
            "boot order 0",
            disk(json!({"name": "root", "bootOrder": 0, "disk": {}})),
            &[(INV, ".domain.devices.disks[0].bootOrder")],
        ),
        (
            "boot order twice",
            json!({"domain": {"devices": {"disks": [{"name": "root", "bootOrder": 1}], "interfaces": [{"name": "n", "masquerade": {}, "bootOrder": 1}]}}, "networks": [{"name": "n", "pod": {}}]}),
            &[(INV, ".domain.devices.interfaces[0].bootOrder")],
        ),
        (
            "serial",
            disk(json!({"name": "root", "serial": "a b", "disk": {}})),
            &[(INV, ".domain.devices.disks[0].serial")],
        ),
        (
            "cache",
            disk(json!({"name": "root", "cache": "fast", "disk": {}})),
            &[(INV, ".domain.devices.disks[0].cache")],
        ),
        ("io", disk(json!({"name": "root", "io": "magic", "disk": {}})), &[(NS, ".domain.devices.disks[0].io")]),
        (
            "native io with a cache",
            disk(json!({"name": "root", "io": "native", "disk": {}})),
            &[(INV, ".domain.devices.disks[0].io")],
        ),
        (
            "I/O thread on sata",
            disk(json!({"name": "root", "dedicatedIOThread": true, "disk": {"bus": "sata"}})),
            &[(NS, ".domain.devices.disks[0].dedicatedIOThread")],
        ),
        (
            "block size",
            disk(
                json!({"name": "root", "disk": {"bus": "virtio"}, "blockSize": {"custom": {"logical": 1000, "physical": 4096}}}),
            ),
            &[(INV, ".domain.devices.disks[0].blockSize.custom.logical")],
        ),
        (
            "disk name",
            json!({"domain": {"devices": {"disks": [{"name": "Root"}]}}, "volumes": [{"name": "Root", "emptyDisk": {"capacity": 1}}]}),
            &[(INV, ".domain.devices.disks[0].name")],
        ),
        ("lun", disk(json!({"name": "root", "lun": {"bus": "scsi"}})), &[(NS, ".domain.devices.disks[0].lun")]),
        ("no memory", json!({"domain": {"memory": {"guest": "0"}}}), &[(INV, ".domain.memory.guest")]),
        ("negative memory", json!({"domain": {"memory": {"guest": "-1Gi"}}}), &[(INV, ".domain.memory.guest")]),
        ("memory that is none", json!({"domain": {"memory": {"guest": "much"}}}), &[(INV, ".domain.memory.guest")]),
        (
            "memory request above limit",
            json!({"domain": {"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}}}),
            &[(INV, ".domain.resources.requests.memory")],
        ),
        (
            "memory request of a byte",
            json!({"domain": {"resources": {"requests": {"memory": "1"}}}}),
            &[(INV, ".domain.resources.requests.memory")],
        ),
        (
            "cpu request above limit",
            json!({"domain": {"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}}),
            &[(INV, ".domain.resources.requests.cpu")],
        ),
        (
            "too many sockets",
            json!({"domain": {"cpu": {"sockets": 3, "maxSockets": 2}}}),
            &[(INV, ".domain.cpu.sockets")],
        ),
        ("too many vCPUs", json!({"domain": {"cpu": {"sockets": 64, "cores": 8}}}), &[(INV, ".domain.cpu")]),
        (
            "cpu feature policy",
            json!({"domain": {"cpu": {"features": [{"name": "vmx", "policy": "please"}]}}}),
            &[(NS, ".domain.cpu.features[0].policy")],
        ),
        (
            "dedicated CPUs",
            json!({"domain": {"cpu": {"dedicatedCpuPlacement": true}}}),
            &[(NS, ".domain.cpu.dedicatedCpuPlacement")],
        ),
        ("machine type", json!({"domain": {"machine": {"type": "pc"}}}), &[(INV, ".domain.machine.type")]),
        ("secure boot without SMM", json!({"domain": {"firmware": {"bootloader": {"efi": {}}}}}), &[(INV, ".domain")]),
        (
            "EFI and BIOS",
            json!({"domain": {"firmware": {"bootloader": {"efi": {"secureBoot": false}, "bios": {}}}}}),
            &[(INV, ".domain.firmware.bootloader")],
        ),
        (
            "kernel boot",
            json!({"domain": {"firmware": {"kernelBoot": {"kernelArgs": "x"}}}}),
            &[(NS, ".domain.firmware.kernelBoot")],
        ),
        ("TPM", json!({"domain": {"devices": {"tpm": {}}}}), &[(NS, ".domain.devices.tpm")]),
        (
            "GPU",
            json!({"domain": {"devices": {"gpus": [{"name": "g", "deviceName": "d"}]}}}),
            &[(NS, ".domain.devices.gpus")],
        ),
        (
            "video that is not there",
            json!({"domain": {"devices": {"video": {"type": "vga"}, "autoattachGraphicsDevice": false}}}),
            &[(INV, ".domain.devices.video")],
        ),
        (
            "input",
            json!({"domain": {"devices": {"inputs": [{"name": "i", "type": "mouse", "bus": "ps2"}]}}}),
            &[(INV, ".domain.devices.inputs[0].bus"), (INV, ".domain.devices.inputs[0].type")],
        ),
        (
            "memory above its limit",
            json!({"domain": {"memory": {"guest": "2Gi"}, "resources": {"limits": {"memory": "1Gi"}}}}),
            &[(INV, ".domain.memory.guest")],
        ),
        (
            "memory above its maximum",
            json!({"domain": {"memory": {"guest": "2Gi", "maxGuest": "1Gi"}}}),
            &[(INV, ".domain.memory.guest")],
        ),
        (
            "node affinity of no term",
            node(json!({REQUIRED: {"nodeSelectorTerms": []}})),
            &[(REQ, ".affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms")],
        ),
        (
            "node affinity by wrong expressions",
            node(json!({REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [
                {"key": "a", "operator": "In"}, {"key": "a", "operator": "Exists", "values": ["b"]}, {"key": "a", "operator": "Gt", "values": []},
                {"key": "a", "operator": "Near"}, {"key": "a b", "operator": "Exists"}]}]}})),
            &[
                (
                    REQ,
                    ".affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0].values",
                ),
                (
                    INV,
                    ".affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[1].values",
                ),
                (
                    REQ,
                    ".affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[2].values",
                ),
                (
                    INV,
                    ".affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[3].operator",
                ),
                (
                    INV,
                    ".affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[4].key",
                ),
            ],
        ),
        (
            "node affinity by wrong fields",
            node(json!({PREFERRED: [{"weight": 0, "preference": {"matchFields": [
                {"key": "metadata.uid", "operator": "In", "values": ["a"]}, {"key": "metadata.name", "operator": "In", "values": ["a", "b"]},
                {"key": "metadata.name", "operator": "Exists"}]}}]})),
            &[
                (INV, ".affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight"),
                (
                    INV,
                    ".affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].preference.matchFields[0].key",
                ),
                (
                    REQ,
                    ".affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].preference.matchFields[1].values",
                ),
                (
                    INV,
                    ".affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].preference.matchFields[2].operator",
                ),
            ],
        ),
        (
            "pod affinity",
            json!({"affinity": {"podAffinity": {REQUIRED: [{"namespaces": ["A"]}]}, "podAntiAffinity": {PREFERRED: [
                {"weight": 101, "podAffinityTerm": {"topologyKey": "a b", "labelSelector": {"matchExpressions": [{"key": "a", "operator": "Is"}]}}}]}}}),
            &[
                (REQ, ".affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey"),
                (INV, ".affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].namespaces[0]"),
                (INV, ".affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight"),
                (
                    INV,
                    ".affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].podAffinityTerm.topologyKey",
                ),
                (
                    INV,
                    ".affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].podAffinityTerm.labelSelector",
                ),
            ],
        ),
        (
            "topology spread",
            json!({"topologySpreadConstraints": [
                {"maxSkew": 0, "topologyKey": "", "whenUnsatisfiable": "Cry", "minDomains": 0, "nodeTaintsPolicy": "Obey"},
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "minDomains": 2},
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {"matchLabels": {"a b": "c"}}}]}),
            &[
                (INV, ".topologySpreadConstraints[0].maxSkew"),
                (REQ, ".topologySpreadConstraints[0].topologyKey"),
                (NS, ".topologySpreadConstraints[0].whenUnsatisfiable"),
                (INV, ".topologySpreadConstraints[0].minDomains"),
                (NS, ".topologySpreadConstraints[0].nodeTaintsPolicy"),
                (INV, ".topologySpreadConstraints[1].minDomains"),
                (INV, ".topologySpreadConstraints[2].labelSelector"),
                (DUP, ".topologySpreadConstraints[2]"),
            ],
        ),
        (
            "error policy",
            disk(json!({"name": "root", "errorPolicy": "pray", "disk": {}})),
            &[(NS, ".domain.devices.disks[0].errorPolicy")],
        ),
        (
            "serial too long",
            disk(json!({"name": "root", "serial": "a".repeat(257), "disk": {}})),
            &[(INV, ".domain.devices.disks[0].serial")],
        ),
        (
            "CD-ROM that is written",
            disk(json!({"name": "root", "cdrom": {"bus": "sata", "readonly": false}})),
            &[(INV, ".domain.devices.disks[0].cdrom.readonly")],
        ),
        (
            "block sizes in the wrong order, and on sata",
            disk(
                json!({"name": "root", "disk": {"bus": "sata"}, "blockSize": {"custom": {"logical": 4096, "physical": 512}}}),
            ),
            &[
                (INV, ".domain.devices.disks[0].blockSize.custom.logical"),
                (INV, ".domain.devices.disks[0].blockSize.custom.logical"),
            ],
        ),
        (
            "negative requests",
            json!({"domain": {"resources": {"requests": {"cpu": "-1", "memory": "-1Gi"}}}}),
            &[(INV, ".domain.resources.requests.cpu"), (INV, ".domain.resources.requests.memory")],
        ),
        (
            "negative limits",
            json!({"domain": {"resources": {"limits": {"cpu": "-1", "memory": "-1Gi"}}}}),
            &[
                (INV, ".domain.resources.requests.cpu"),
                (INV, ".domain.resources.limits.cpu"),
                (INV, ".domain.resources.limits.memory"),
            ],
        ),
        ("negative sockets", json!({"domain": {"cpu": {"sockets": -1}}}), &[(INV, ".domain.cpu.sockets")]),
        ("CPU model", json!({"domain": {"cpu": {"model": "a,b"}}}), &[(INV, ".domain.cpu.model")]),
        ("firmware UUID", json!({"domain": {"firmware": {"uuid": "me"}}}), &[(INV, ".domain.firmware.uuid")]),
        (
            "Hyper-V's dependencies",
            json!({"domain": {"features": {"hyperv": {"synic": {}, "vpindex": {"enabled": false}}}}}),
            &[(INV, ".domain.features.hyperv.synic")],
        ),
        (
            "watchdog of another architecture",
            json!({"domain": {"devices": {"watchdog": {"name": "w", "diag288": {"action": "reset"}}}}}),
            &[(NS, ".domain.devices.watchdog.diag288"), (NF, ".domain.devices.watchdog")],
        ),
        (
            "watchdog's action",
            json!({"domain": {"devices": {"watchdog": {"name": "w", "i6300esb": {"action": "bark"}}}}}),
            &[(NS, ".domain.devices.watchdog.i6300esb.action")],
        ),
        (
            "panic device",
            json!({"domain": {"devices": {"panicDevices": [{"model": "red-button"}]}}}),
            &[(NS, ".domain.devices.panicDevices[0].model"), (INV, ".domain.devices.panicDevices[0].model")],
        ),
        (
            "video",
            json!({"domain": {"devices": {"video": {"type": "cga"}}}}),
            &[(NS, ".domain.devices.video.type"), (NS, ".domain.devices.video.type")],
        ),
        ("grace period", json!({"terminationGracePeriodSeconds": -1}), &[(INV, ".terminationGracePeriodSeconds")]),
        ("eviction strategy", json!({"evictionStrategy": "Pray"}), &[(INV, ".evictionStrategy")]),
        ("start strategy", json!({"startStrategy": "Running"}), &[(INV, ".startStrategy")]),
        ("host name", json!({"hostname": "a.b"}), &[(INV, ".hostname")]),
        ("subdomain", json!({"subdomain": "a..b"}), &[(INV, ".subdomain")]),
        ("other architecture", json!({"architecture": "arm64"}), &[(NS, ".architecture")]),
        ("probe by no command", json!({"readinessProbe": {"exec": {}}}), &[(REQ, ".readinessProbe.exec.command")]),
        (
            "probe by command and agent",
            json!({"livenessProbe": {"guestAgentPing": {}, "exec": {"command": ["a"]}}}),
            &[(INV, ".livenessProbe")],
        ),
        ("probe of no kind", json!({"livenessProbe": {"periodSeconds": 5}}), &[(REQ, ".livenessProbe")]),
        (
            "probe of two kinds",
            json!({"readinessProbe": {"tcpSocket": {"port": 1}, "httpGet": {"port": 1}}}),
            &[(INV, ".readinessProbe")],
        ),
        (
            "probe over no network",
            json!({"readinessProbe": {"tcpSocket": {"port": 1}}, "domain": {"devices": {"autoattachPodInterface": false}}}),
            &[(INV, ".readinessProbe")],
        ),
        (
            "paused start that would be found dead",
            json!({"startStrategy": "Paused", "livenessProbe": {"tcpSocket": {"port": 1}}}),
            &[(INV, ".startStrategy")],
        ),
        ("access credentials", json!({"accessCredentials": [{"userPassword": {}}]}), &[(NS, ".accessCredentials")]),
        ("volume without source", volume(json!({"name": "root"})), &[(INV, ".volumes[0]")]),
        (
            "volume with two sources",
            volume(
                json!({"name": "root", "emptyDisk": {"capacity": "1Gi"}, "persistentVolumeClaim": {"claimName": "c"}}),
            ),
            &[(INV, ".volumes[0]")],
        ),
        (
            "claim without name",
            volume(json!({"name": "root", "persistentVolumeClaim": {"claimName": ""}})),
            &[(INV, ".volumes[0].persistentVolumeClaim.claimName")],
        ),
        (
            "disk of no size",
            volume(json!({"name": "root", "emptyDisk": {"capacity": "0"}})),
            &[(INV, ".volumes[0].emptyDisk.capacity")],
        ),
        (
            "relative path in an image",
            volume(json!({"name": "root", "containerDisk": {"image": "i", "path": "/../x"}})),
            &[(INV, ".volumes[0].containerDisk.path")],
        ),
        (
            "host disk",
            volume(json!({"name": "root", "hostDisk": {"path": "/x", "type": "Disk"}})),
            &[(NS, ".volumes[0].hostDisk")],
        ),
        (
            "cloud-init with nothing",
            volume(json!({"name": "root", "cloudInitNoCloud": {}})),
            &[(INV, ".volumes[0].cloudInitNoCloud")],
        ),
        (
            "cloud-init with two",
            volume(json!({"name": "root", "cloudInitNoCloud": {"userData": "a", "secretRef": {"name": "s"}}})),
            &[(INV, ".volumes[0].cloudInitNoCloud")],
        ),
        (
            "cloud-init too large",
            volume(json!({"name": "root", "cloudInitNoCloud": {"userData": "a".repeat(2049)}})),
            &[(INV, ".volumes[0].cloudInitNoCloud.userData")],
        ),
        (
            "cloud-init not base64",
            volume(json!({"name": "root", "cloudInitConfigDrive": {"userDataBase64": "***"}})),
            &[(INV, ".volumes[0].cloudInitConfigDrive.userDataBase64")],
        ),
        (
            "interface without network",
            net(json!([{"name": "n", "masquerade": {}}]), json!([])),
            &[(INV, ".domain.devices.interfaces[0].name")],
        ),
        ("network without interface", net(json!([]), json!([{"name": "n", "pod": {}}])), &[(REQ, ".networks[0].name")]),
        (
            "network of two types",
            net(
                json!([{"name": "n", "masquerade": {}}]),
                json!([{"name": "n", "pod": {}, "multus": {"networkName": "m"}}]),
            ),
            &[(NS, ".networks[0].multus"), (REQ, ".networks[0]")],
        ),
        (
            "two networks of one name",
            net(json!([{"name": "n", "masquerade": {}}]), json!([{"name": "n", "pod": {}}, {"name": "n", "pod": {}}])),
            &[(DUP, ".interfaces"), (DUP, ".networks[1].name")],
        ),
        (
            "two interfaces of one network",
            net(
                json!([{"name": "n", "masquerade": {}}, {"name": "n", "masquerade": {}}]),
                json!([{"name": "n", "pod": {}}]),
            ),
            &[(DUP, ".domain.devices.interfaces[1].name")],
        ),
        (
            "interface name",
            net(json!([{"name": "n.0", "masquerade": {}}]), json!([{"name": "n.0", "pod": {}}])),
            &[(INV, ".domain.devices.interfaces[0].name")],
        ),
        (
            "two bindings",
            net(json!([{"name": "n", "masquerade": {}, "bridge": {}}]), json!([{"name": "n", "pod": {}}])),
            &[(NS, ".domain.devices.interfaces[0].bridge"), (INV, ".domain.devices.interfaces[0].name")],
        ),
        (
            "long MAC",
            nic(json!({"macAddress": "02:00:00:00:00:01:02"})),
            &[(INV, ".domain.devices.interfaces[0].macAddress")],
        ),
        (
            "multicast MAC",
            nic(json!({"macAddress": "01:00:00:00:00:01"})),
            &[(INV, ".domain.devices.interfaces[0].macAddress")],
        ),
        (
            "interface state",
            nic(json!({"state": "sideways"})),
            &[(NS, ".domain.devices.interfaces[0].state"), (INV, ".domain.devices.interfaces[0].state")],
        ),
        (
            "network without type",
            net(json!([{"name": "n", "masquerade": {}}]), json!([{"name": "n"}])),
            &[(REQ, ".networks[0]"), (INV, ".domain.devices.interfaces[0].name")],
        ),
        (
            "two pod networks",
            net(
                json!([{"name": "n", "masquerade": {}}, {"name": "m", "masquerade": {}}]),
                json!([{"name": "n", "pod": {}}, {"name": "m", "pod": {}}]),
            ),
            &[(DUP, ".interfaces")],
        ),
        (
            "no binding",
            net(json!([{"name": "n"}]), json!([{"name": "n", "pod": {}}])),
            &[(INV, ".domain.devices.interfaces[0].name")],
        ),
        (
            "bridge",
            net(json!([{"name": "n", "bridge": {}}]), json!([{"name": "n", "pod": {}}])),
            &[(NS, ".domain.devices.interfaces[0].bridge")],
        ),
        (
            "model",
            nic(json!({"model": "ne1000"})),
            &[(NS, ".domain.devices.interfaces[0].model"), (NS, ".domain.devices.interfaces[0].model")],
        ),
        (
            "short MAC",
            nic(json!({"macAddress": "02:00:00:00:01"})),
            &[(INV, ".domain.devices.interfaces[0].macAddress")],
        ),
        (
            "malformed MAC",
            nic(json!({"macAddress": "02:00:00:00:00:zz"})),
            &[(INV, ".domain.devices.interfaces[0].macAddress")],
        ),
        (
            "reserved MAC",
            nic(json!({"macAddress": "02:00:00:00:00:00"})),
            &[(INV, ".domain.devices.interfaces[0].macAddress")],
        ),
        (
            "port out of range",
            nic(json!({"ports": [{"port": 0}, {"port": 70000}]})),
            &[(INV, ".domain.devices.interfaces[0].ports[0]"), (INV, ".domain.devices.interfaces[0].ports[1]")],
        ),
        ("port missing", nic(json!({"ports": [{"name": "a"}]})), &[(REQ, ".domain.devices.interfaces[0].ports[0]")]),
        (
            "port names",
            nic(json!({"ports": [{"name": "a", "port": 1}, {"name": "a", "port": 2}]})),
            &[(DUP, ".domain.devices.interfaces[0].ports[1].name")],
        ),
        (
            "port protocol",
            nic(json!({"ports": [{"port": 1, "protocol": "SCTP"}]})),
            &[(INV, ".domain.devices.interfaces[0].ports[0].protocol")],
        ),
    ]
}

#[test]
fn bad_specs_are_refused_by_field_in_both_kinds() {
    for (kind, base) in [("VirtualMachineInstance", "spec"), ("VirtualMachine", "spec.template.spec")] {
        for (what, patch, want) in bad_specs() {
            let s = spec_with(&patch);
            let object = if kind == "VirtualMachine" { vm(s) } else { vmi(s) };
            let status = ask(input(kind, object)).expect_err(what);
            assert_eq!((status.code, status.reason.as_str()), (422, "Invalid"), "{what}");
            let got: Vec<(String, String)> = status.causes().into_iter().map(|(r, f, _)| (r, f)).collect();
            let want: Vec<(String, String)> =
                want.iter().map(|(r, f)| ((*r).to_owned(), format!("{base}{f}"))).collect();
            assert_eq!(got, want, "{kind}: {what}: {status}");
        }
    }
}

/// Reported without a base, as KubeVirt does.
#[test]
fn name_servers_are_held_against_the_rules_of_pods() {
    const INV: &str = "FieldValueInvalid";
    const REQ: &str = "FieldValueRequired";
    let many: Vec<String> = (0..7).map(|i| format!("{}.example", "a".repeat(40 + i))).collect();
    for (patch, want) in [
        (json!({"dnsPolicy": "Gossip"}), vec![("FieldValueNotSupported", "dnsPolicy")]),
        (json!({"dnsPolicy": "None"}), vec![(REQ, "dnsConfig")]),
        (json!({"dnsPolicy": "None", "dnsConfig": {}}), vec![(REQ, "dnsConfig.nameservers")]),
        (
            json!({"dnsConfig": {"nameservers": ["1.1.1.1", "::1", "a", "2.2.2.2"]}}),
            vec![(INV, "dnsConfig.nameservers"), (INV, "dnsConfig.nameservers[2]")],
        ),
        (json!({"dnsConfig": {"searches": many}}), vec![(INV, "dnsConfig.searches"), (INV, "dnsConfig.searches")]),
        (json!({"dnsConfig": {"searches": ["a..b"]}}), vec![(INV, "dnsConfig.searches[0]")]),
        (json!({"dnsConfig": {"options": [{"value": "5"}]}}), vec![(REQ, "dnsConfig.options[0]")]),
    ] {
        let causes =
            ask(input("VirtualMachineInstance", vmi(spec_with(&patch)))).expect_err(&patch.to_string()).causes();
        let got: Vec<(&str, &str)> = causes.iter().map(|(r, f, _)| (r.as_str(), f.as_str())).collect();
        assert_eq!(got, want, "{patch}");
    }
}

#[test]
fn good_specs_are_accepted() {
    for (what, patch, warnings) in [
        ("volume without a disk gets one", json!({"domain": {"devices": {"disks": null}}}), 1),
        ("more memory than any node has", json!({"domain": {"memory": {"guest": "100Ti"}}}), 0),
        ("memory from requests", json!({"domain": {"memory": null, "resources": {"requests": {"memory": "64M"}}}}), 0),
        (
            "probes over the network",
            json!({"readinessProbe": {"httpGet": {"port": 80}}, "livenessProbe": {"tcpSocket": {"port": 22}, "periodSeconds": 3}}),
            0,
        ),
        (
            "probes in the guest, which need no network",
            json!({"readinessProbe": {"exec": {"command": ["a", "b"]}}, "livenessProbe": {"guestAgentPing": {}},
                   "domain": {"devices": {"autoattachPodInterface": false}}}),
            0,
        ),
        ("no interface at all", json!({"domain": {"devices": {"autoattachPodInterface": false}}}), 0),
        (
            "placement",
            json!({"dnsPolicy": "None", "dnsConfig": {"nameservers": ["1.1.1.1"], "searches": ["a.b.", "."], "options": [{"name": "ndots", "value": "5"}]},
                "affinity": {
                    "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{
                        "matchExpressions": [{"key": "a.b/c", "operator": "In", "values": ["d"]}, {"key": "n", "operator": "Lt", "values": ["5"]}],
                        "matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n"]}]}]}},
                    "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": {
                        "topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}}}]}},
                "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "minDomains": 2,
                    "nodeAffinityPolicy": "Honor", "labelSelector": {"matchLabels": {"a": "b"}}}]}),
            0,
        ),
        (
            "as much memory as its limit",
            json!({"domain": {"memory": {"guest": "1Gi"}, "resources": {"limits": {"memory": "1Gi"}}}}),
            0,
        ),
        (
            "cloud-init of 2048 bytes",
            json!({"volumes": [{"name": "root", "cloudInitNoCloud": {"userData": "a".repeat(2048)}}]}),
            0,
        ),
        ("EFI", json!({"domain": {"firmware": {"bootloader": {"efi": {}}}, "features": {"smm": {}}}}), 0),
        ("hints", json!({"evictionStrategy": "LiveMigrate", "domain": {"cpu": {"sockets": 1, "maxSockets": 4}}}), 2),
        (
            "everything empty",
            json!({"accessCredentials": [], "domain": {"devices": {"gpus": [], "useVirtioTransitional": false}, "features": {}, "resources": {}}}),
            0,
        ),
        (
            "all of a NIC",
            json!({"domain": {"devices": {"interfaces": [{"name": "n_1", "masquerade": {}, "model": "e1000e", "macAddress": "02-aa-bb-cc-dd-ee", "state": "down",
                "ports": [{"name": "http", "port": 80}, {"port": 53, "protocol": "UDP"}]}]}}, "networks": [{"name": "n_1", "pod": {}}]}),
            0,
        ),
    ] {
        for kind in ["VirtualMachine", "VirtualMachineInstance"] {
            let s = spec_with(&patch);
            let object = if kind == "VirtualMachine" { vm(s) } else { vmi(s) };
            let out = ask(input(kind, object)).unwrap_or_else(|e| panic!("{kind}: {what}: {e}: {:?}", e.causes()));
            assert_eq!(out.warnings.len(), warnings, "{kind}: {what}: {:?}", out.warnings);
        }
    }
}
