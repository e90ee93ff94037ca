//! Tables of good and bad objects.

use gateway::admission::{Context, admit};
use gateway::{AdmissionInput, AdmissionOutput, Operation, Settings, Status, User};
use serde_json::{Value, json};

const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const FRESH: &str = "00-11111111111111111111111111111111-2222222222222222-01";

pub fn input(kind: &str, object: Value) -> AdmissionInput {
    AdmissionInput {
        operation: Operation::Create,
        kind: kind.into(),
        subresource: String::new(),
        namespace: "default".into(),
        name: String::new(),
        user: User { name: "somebody".into(), groups: vec!["system:masters".into()] },
        object,
        old_object: None,
        traceparent: None,
    }
}

pub fn ask(input: AdmissionInput) -> Result<AdmissionOutput, Status> {
    let settings = Settings::default();
    admit(
        input,
        &Context {
            settings: &settings,
            now: "2026-01-02T03:04:05Z",
            uuid: &|| "5d307ca9-b3ef-428c-8861-06e72d69f223".into(),
            trace: &|| FRESH.into(),
        },
    )
}

fn update(kind: &str, old: Value, new: Value) -> AdmissionInput {
    AdmissionInput { operation: Operation::Update, old_object: Some(old), ..input(kind, new) }
}

fn spec() -> Value {
    json!({
        "domain": {"devices": {"disks": [{"name": "root", "disk": {"bus": "virtio"}}]}, "memory": {"guest": "128Mi"}},
        "volumes": [{"name": "root", "containerDisk": {"image": "registry/image:1"}}],
    })
}

fn vmi(spec: Value) -> Value {
    json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "a"}, "spec": spec})
}

fn vm(spec: Value) -> Value {
    json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "a"}, "spec": {"runStrategy": "Always", "template": {"spec": spec}}})
}

fn merge(into: &mut Value, patch: &Value) {
    match (into, patch) {
        (Value::Object(o), Value::Object(p)) => {
            for (k, v) in p {
                if v.is_null() {
                    o.remove(k);
                } else {
                    merge(o.entry(k).or_insert(Value::Null), v);
                }
            }
        }
        (o, p) => *o = p.clone(),
    }
}

fn spec_with(patch: &Value) -> Value {
    let mut s = spec();
    merge(&mut s, patch);
    s
}

#[test]
fn an_instance_gets_its_defaults() {
    let out = ask(input("VirtualMachineInstance", vmi(spec()))).unwrap();
    let o = out.object;
    assert_eq!(o["metadata"]["finalizers"], json!(["kubevirt.io/foregroundDeleteVirtualMachine"]));
    assert_eq!(o["metadata"]["annotations"]["virtfold.io/traceparent"], FRESH);
    assert_eq!(
        o["status"],
        json!({
            "phase": "Pending",
            "phaseTransitionTimestamps": [{"phase": "Pending", "phaseTransitionTimestamp": "2026-01-02T03:04:05Z"}],
            "memory": {"guestAtBoot": "128Mi", "guestCurrent": "128Mi", "guestRequested": "128Mi"},
            "currentCPUTopology": {"cores": 1, "sockets": 1, "threads": 1},
            "runtimeUser": 107,
        })
    );
    assert_eq!(o["spec"]["domain"]["machine"]["type"], "q35");
    assert_eq!(o["spec"]["domain"]["devices"]["interfaces"], json!([{"name": "default", "masquerade": {}}]));
    assert_eq!(o["spec"]["volumes"][0]["containerDisk"]["imagePullPolicy"], "IfNotPresent");
    assert!(out.warnings.is_empty(), "{:?}", out.warnings);
    let again = ask(input("VirtualMachineInstance", o.clone())).unwrap();
    // Who is not of the control plane brings no status along.
    assert_eq!(again.object["spec"], o["spec"]);
    assert_eq!(again.object["metadata"], o["metadata"]);
}

#[test]
fn a_machine_keeps_only_what_must_not_change() {
    let out = ask(AdmissionInput { traceparent: Some(TRACE.into()), ..input("VirtualMachine", vm(spec())) }).unwrap();
    let mut want = vm(spec());
    merge(
        &mut want,
        &json!({
            "metadata": {"annotations": {"virtfold.io/changed-by": "somebody", "virtfold.io/traceparent": TRACE}, "finalizers": ["kubevirt.io/virtualMachineControllerFinalize"]},
            "spec": {"template": {"spec": {"architecture": "amd64", "domain": {"machine": {"type": "q35"},
                "firmware": {"uuid": "5d307ca9-b3ef-428c-8861-06e72d69f223", "serial": "5d307ca9-b3ef-428c-8861-06e72d69f223"}}}}},
        }),
    );
    assert_eq!(out.object, want);
    // A change of a label is no new operation; one of the spec is.
    let old = out.object;
    let mut new = old.clone();
    new["metadata"]["labels"] = json!({"a": "b"});
    assert_eq!(
        ask(update("VirtualMachine", old.clone(), new.clone())).unwrap().object["metadata"]["annotations"]["virtfold.io/traceparent"],
        TRACE
    );
    new["spec"]["runStrategy"] = json!("Halted");
    let stopped = ask(update("VirtualMachine", old.clone(), new.clone())).unwrap().object;
    assert_eq!(stopped["metadata"]["annotations"]["virtfold.io/traceparent"], FRESH);
    assert_eq!(stopped["spec"]["template"], old["spec"]["template"]);
    // One that is being deleted passes as it is: its finalizers have to come off.
    new["metadata"]["deletionTimestamp"] = json!("2026-01-02T03:04:05Z");
    new["metadata"]["finalizers"] = json!([]);
    new["spec"] = json!({});
    assert_eq!(ask(update("VirtualMachine", old, new.clone())).unwrap().object, new);
}

type Row = (&'static str, Value, &'static [(&'static str, &'static str)]);

/// What is wrong with a spec: a patch of the good one, and (cause, field below the base) of each complaint.
#[allow(clippy::too_many_lines)]
fn bad_specs() -> Vec<Row> {
    const INV: &str = "FieldValueInvalid";
    const REQ: &str = "FieldValueRequired";
    const DUP: &str = "FieldValueDuplicate";
    const NS: &str = "FieldValueNotSupported";
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

#[test]
fn the_shell_of_a_machine() {
    for (what, patch, want) in [
        ("both", json!({"running": true}), Err("spec.running")),
        ("neither", json!({"runStrategy": null}), Err("spec.running")),
        ("unknown", json!({"runStrategy": "Sometimes"}), Err("spec.runStrategy")),
        ("receiver", json!({"runStrategy": "WaitAsReceiver"}), Err("spec.runStrategy")),
        ("no template", json!({"template": null}), Err("spec.template")),
        ("instance type", json!({"instancetype": {"name": "x"}}), Err("spec.instancetype")),
        ("DataVolumes", json!({"dataVolumeTemplates": [{"metadata": {"name": "x"}}]}), Err("spec.dataVolumeTemplates")),
        (
            "sidecar",
            json!({"template": {"metadata": {"annotations": {"hooks.kubevirt.io/hookSidecars": "[]"}}}}),
            Err("spec.template.metadata.annotations"),
        ),
        ("running alone", json!({"running": true, "runStrategy": null}), Ok(1)),
        ("once", json!({"runStrategy": "Once"}), Ok(0)),
        ("no memory", json!({"template": {"spec": {"domain": {"memory": null}}}}), Ok(1)),
    ] {
        let mut object = vm(spec());
        merge(&mut object["spec"], &patch);
        match (ask(input("VirtualMachine", object)), want) {
            (Ok(out), Ok(n)) => assert_eq!(out.warnings.len(), n, "{what}: {:?}", out.warnings),
            (Err(s), Err(field)) => {
                assert_eq!(s.causes().first().map(|c| c.1.clone()).as_deref(), Some(field), "{what}")
            }
            (got, want) => panic!("{what}: {got:?}, wanted {want:?}"),
        }
    }
}

#[test]
fn an_instance_without_memory_is_refused() {
    let status =
        ask(input("VirtualMachineInstance", vmi(spec_with(&json!({"domain": {"memory": null}}))))).unwrap_err();
    assert_eq!(status.causes(), [("FieldValueRequired".to_owned(), String::new(), "no memory requested".to_owned())]);
}

#[test]
fn at_most_ten_causes() {
    let disks: Vec<Value> = (0..20).map(|i| json!({"name": format!("d{i}")})).collect();
    let status =
        ask(input("VirtualMachineInstance", vmi(spec_with(&json!({"domain": {"devices": {"disks": disks}}})))))
            .unwrap_err();
    assert_eq!(status.causes().len(), 10);
    assert!(status.message.ends_with("more validation errors"), "{status}");
}

#[test]
fn instances_belong_to_the_control_plane() {
    let old = ask(input("VirtualMachineInstance", vmi(spec()))).unwrap().object;
    let controller = User { name: "system:virtfold:controller".into(), groups: vec![] };
    let changed = |f: fn(&mut Value)| {
        let mut new = old.clone();
        f(&mut new);
        update("VirtualMachineInstance", old.clone(), new)
    };
    // Spec: refused for users.
    let spec_change = changed(|o| o["spec"]["terminationGracePeriodSeconds"] = json!(1));
    let status = ask(spec_change.clone()).unwrap_err();
    assert_eq!(
        (status.code, status.message.as_str(), status.causes()[0].0.as_str()),
        (422, "update of VMI object is restricted", "FieldValueNotSupported")
    );
    assert!(ask(AdmissionInput { user: controller.clone(), ..spec_change }).is_ok());
    // Status: put back without a word.
    let status_change = changed(|o| o["status"]["phase"] = json!("Running"));
    assert_eq!(ask(status_change.clone()).unwrap().object, old);
    assert_eq!(
        ask(AdmissionInput { user: controller.clone(), ..status_change }).unwrap().object["status"]["phase"],
        "Running"
    );
    // Labels: the reserved ones are refused, others are free.
    let label = changed(|o| o["metadata"]["labels"] = json!({"kubevirt.io/nodeName": "n"}));
    assert_eq!(ask(label.clone()).unwrap_err().causes()[0].1, "metadata.labels");
    assert!(ask(AdmissionInput { user: controller.clone(), ..label }).is_ok());
    assert!(ask(changed(|o| o["metadata"]["labels"] = json!({"mine": "n"}))).is_ok());
    let mut forged = vmi(spec());
    forged["metadata"]["labels"] = json!({"kubevirt.io/created-by": "me"});
    assert_eq!(ask(input("VirtualMachineInstance", forged)).unwrap_err().causes()[0].1, "metadata.labels");
    // Nor may anybody say that a machine is of another boot of its node: it would count as over.
    let boot = changed(|o| o["metadata"]["annotations"] = json!({"virtfold.io/boot-id": "another"}));
    assert_eq!(ask(boot.clone()).unwrap_err().causes()[0].1, "metadata.annotations[virtfold.io/boot-id]");
    assert!(ask(AdmissionInput { user: controller.clone(), ..boot }).is_ok());
    // What the controller promised does not change either.
    let max = changed(|o| o["spec"]["domain"]["cpu"]["maxSockets"] = json!(9));
    assert_eq!(
        ask(AdmissionInput { user: controller, ..max }).unwrap_err().causes()[0].1,
        "spec.domain.cpu.maxSockets"
    );
}

#[test]
fn a_running_snapshot_guards_the_machine() {
    let mut old = ask(input("VirtualMachine", vm(spec()))).unwrap().object;
    old["status"] = json!({"snapshotInProgress": "s"});
    let mut new = old.clone();
    new["spec"]["runStrategy"] = json!("Halted");
    let causes = ask(update("VirtualMachine", old.clone(), new)).unwrap_err().causes();
    assert_eq!((causes.len(), causes[0].0.as_str(), causes[0].1.as_str()), (1, "FieldValueNotSupported", "spec"));
    let mut labelled = old.clone();
    labelled["metadata"]["labels"] = json!({"a": "b"});
    assert!(ask(update("VirtualMachine", old, labelled)).is_ok());
}

#[test]
fn a_machine_from_before_a_rule_keeps_its_labels_and_finalizers() {
    let old = vm(json!({"domain": {"devices": {"tpm": {}}}}));
    let mut new = old.clone();
    new["metadata"]["finalizers"] = json!(["a/b"]);
    assert_eq!(ask(update("VirtualMachine", old.clone(), new.clone())).unwrap().object, new);
    new["spec"]["runStrategy"] = json!("Halted");
    assert!(ask(update("VirtualMachine", old, new)).is_err());
}

#[test]
fn requests_that_nobody_carries_out_are_refused() {
    let old = vm(spec());
    let mut new = old.clone();
    new["status"] = json!({"volumeRequests": [{"removeVolumeOptions": {"name": "x"}}]});
    let ask_status =
        |o: Value, n: Value| ask(AdmissionInput { subresource: "status".into(), ..update("VirtualMachine", o, n) });
    assert_eq!(ask_status(old.clone(), new).unwrap_err().causes()[0].1, "status.volumeRequests");
    let mut fine = old.clone();
    fine["status"] = json!({"stateChangeRequests": [{"action": "Start", "data": {"virtfold.io/requested-by": "ann"}}]});
    let taken = ask_status(old, fine.clone()).unwrap().object;
    fine["status"]["stateChangeRequests"][0]["data"]["virtfold.io/requested-by"] = json!("somebody");
    assert_eq!(taken, fine, "a request has the name of whoever makes it, whatever it says");
    for kind in ["VirtualMachineInstanceMigration", "VirtualMachineInstancePreset"] {
        assert_eq!(ask(input(kind, json!({"metadata": {"name": "a"}}))).unwrap_err().code, 422);
    }
}

#[test]
fn a_set_is_held_against_the_rules_of_its_instances() {
    const KIND: &str = "VirtualMachineInstanceReplicaSet";
    let set = |patch: &Value| {
        let mut s = json!({"apiVersion": "kubevirt.io/v1", "kind": KIND, "metadata": {"name": "a"}, "spec": {
            "selector": {"matchLabels": {"app": "a"}},
            "template": {"metadata": {"labels": {"app": "a"}}, "spec": spec()}}});
        merge(&mut s, patch);
        s
    };
    let good = ask(input(KIND, set(&json!({})))).unwrap();
    assert_eq!(good.object["spec"]["replicas"], 1, "a set without a number could not be scaled");
    assert_eq!(good.object["spec"]["template"]["spec"], spec(), "defaults come with each instance");
    assert_eq!(ask(input(KIND, set(&json!({"spec": {"replicas": 0}})))).unwrap().object["spec"]["replicas"], 0);
    for (patch, field, text) in [
        (json!({"spec": {"template": null}}), "spec.template", "missing virtual machine template"),
        (json!({"spec": {"template": {"spec": null}}}), "spec.template.spec", "missing virtual machine instance spec"),
        (json!({"spec": {"selector": null}}), "spec.selector", "there is no selector"),
        (json!({"spec": {"selector": {"matchLabels": null}}}), "spec.selector", "the selector is empty"),
        (
            json!({"spec": {"selector": {"matchLabels": {"app": "b"}}}}),
            "spec.selector",
            "selector does not match labels",
        ),
        (
            json!({"spec": {"selector": {"matchExpressions": [{"key": "app", "operator": "Is"}]}}}),
            "spec.selector",
            "\"Is\" is not an operator",
        ),
        (json!({"spec": {"replicas": -2}}), "spec.replicas", "must not be negative"),
        (
            json!({"spec": {"template": {"spec": {"domain": {"devices": {"tpm": {}}}}}}}),
            "spec.template.spec.domain.devices.tpm",
            "not supported",
        ),
        (
            json!({"spec": {"template": {"spec": {"domain": {"memory": null}}}}}),
            "spec.template.spec.domain.memory.guest",
            "no memory requested",
        ),
        (
            json!({"spec": {"template": {"spec": {"volumes": []}}}}),
            "spec.template.spec.domain.devices.disks[0].name",
            "",
        ),
    ] {
        let refusal = ask(input(KIND, set(&patch))).unwrap_err();
        let causes = refusal.details["causes"].as_array().unwrap().clone();
        let found = causes.iter().find(|c| c["field"] == field);
        let message = found.unwrap_or_else(|| panic!("{field}: {causes:?}"))["message"].as_str().unwrap();
        assert!(message.contains(text), "{field}: {message}");
    }
    // What is stored already may be labelled, and is judged when its spec changes.
    let old = set(&json!({"spec": {"replicas": 1, "selector": {"matchLabels": {"app": "b"}}}}));
    let mut labelled = old.clone();
    labelled["metadata"]["labels"] = json!({"x": "y"});
    assert!(ask(update(KIND, old.clone(), labelled)).is_ok());
    let mut scaled = old.clone();
    scaled["spec"]["replicas"] = json!(2);
    assert_eq!(ask(update(KIND, old, scaled)).unwrap_err().code, 422);
}

#[test]
fn kinds_that_nothing_acts_on_are_refused_by_name_when_made_and_left_alone_afterwards() {
    for kind in ["VirtualMachineSnapshot", "VirtualMachinePool", "MigrationPolicy", "DataVolume", "KubeVirt"] {
        let object = json!({"metadata": {"name": "a"}, "spec": {}});
        let refused = ask(input(kind, object.clone())).unwrap_err();
        assert_eq!(refused.code, 422);
        assert_eq!(refused.causes()[0].1, "kind");
        assert!(refused.message.contains(&format!("{kind} is not supported yet: ")), "{}", refused.message);
        assert_eq!(ask(update(kind, object.clone(), object.clone())).unwrap().object, object);
    }
    for kind in ["VirtualMachineInstancetype", "VirtualMachineClusterPreference"] {
        ask(input(kind, json!({"metadata": {"name": "a"}, "spec": {}}))).unwrap();
    }
}
