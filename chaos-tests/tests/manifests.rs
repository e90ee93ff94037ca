//! Manifests as people write them: each is accepted, or refused with the field that is not supported. What is accepted is
//! followed to the machine that the launcher would start, and held against the manifest read anew: nothing is misread.

use chaos_tests::rules::root;
use gateway::admission::{Context, Objects, Wanted, admit};
use gateway::{AdmissionInput, Operation, Settings, User};
use launcher::machine::{Bus, Firmware, Machine, Source};
use proto::launcher::{NicFacts, NodeFacts};
use serde_json::{Value, json};
use state::object::{Kind, ObjectRef, Pattern};
use state::vm::command::Recipe;
use std::path::PathBuf;

const UID: &str = "6f2c0a51-8a61-4f5c-9f6f-6d3a4f1f3f10";

/// The instancetypes and preferences among the manifests.
fn patterns(all: &[Value]) -> Objects {
    let mut known = Objects::default();
    for p in Pattern::ALL {
        for object in all.iter().filter(|o| o["kind"] == p.name()) {
            let namespace = if p.namespaced() { "default" } else { "" };
            let name = object["metadata"]["name"].as_str().unwrap();
            let wanted = Wanted { kind: p.name(), namespace: namespace.into(), name: name.into() };
            known.insert(wanted, Some(object.clone()));
        }
    }
    known
}

fn ask(kind: &str, object: &Value, user: &str, all: &[Value]) -> Result<(Value, Vec<String>), gateway::Status> {
    let settings = Settings::default();
    let context = Context {
        settings: &settings,
        now: "2026-01-02T03:04:05Z",
        uuid: &|| "5d307ca9-b3ef-428c-8861-06e72d69f223".into(),
        trace: &|| "00-11111111111111111111111111111111-2222222222222222-01".into(),
        objects: &patterns(all),
    };
    let input = AdmissionInput {
        operation: Operation::Create,
        kind: kind.into(),
        subresource: String::new(),
        namespace: "default".into(),
        name: String::new(),
        user: User { name: user.into(), groups: vec![] },
        object: object.clone(),
        old_object: None,
        traceparent: None,
    };
    admit(input, &context).map(|out| (out.object, out.warnings))
}

/// What comes of a manifest.
enum Verdict {
    /// Its kind is none of KubeVirt's.
    Foreign,
    /// There is no such kind here.
    Unknown,
    Refused(Vec<(String, String)>),
    /// With the machine, where there is one.
    Accepted(Option<String>, Vec<String>),
}

fn verdict(object: &Value, all: &[Value]) -> Verdict {
    let (kind, version) = (object["kind"].as_str().unwrap(), object["apiVersion"].as_str().unwrap());
    if !version.contains("kubevirt.io/") {
        return Verdict::Foreign;
    }
    if !api::crd::all().iter().any(|crd| crd["spec"]["names"]["kind"] == kind) {
        return Verdict::Unknown;
    }
    let (admitted, warnings) = match ask(kind, object, "somebody", all) {
        Ok(a) => a,
        Err(status) => {
            assert_eq!(status.code, 422, "{status}");
            return Verdict::Refused(status.causes().into_iter().map(|c| (c.1, c.2)).collect());
        }
    };
    let stored = |mut o: Value| {
        o["metadata"]["uid"] = json!(UID);
        o["metadata"]["namespace"] = json!("default");
        o["metadata"]["generation"] = json!(1);
        o
    };
    let render = |recipe: Recipe, kind: Kind, object: &Value| {
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        let target = ObjectRef { kind, namespace: "default".into(), name, uid: UID.into() };
        state::render::render(&recipe, &target, &target, object, &[]).unwrap()
    };
    let at = state::Timestamp::parse("2026-01-02T03:04:05Z").unwrap();
    let (wish, instance) = match kind {
        "VirtualMachine" if object["spec"]["instancetype"].is_null() && object["spec"]["preference"].is_null() => {
            let recipe = Recipe::Vmi {
                cause: None,
                began: None,
                vm: UID.into(),
                revision: "r".into(),
                paused: false,
                at,
                instancetype: None,
                preference: None,
            };
            (&object["spec"]["template"]["spec"], render(recipe, Kind::VirtualMachineInstance, &stored(admitted)))
        }
        "VirtualMachineInstanceReplicaSet" => {
            let recipe = Recipe::Member { set: UID.into() };
            (&object["spec"]["template"]["spec"], render(recipe, Kind::VirtualMachineInstance, &stored(admitted)))
        }
        "VirtualMachineInstance" => (&object["spec"], admitted),
        _ => return Verdict::Accepted(None, warnings),
    };
    let (instance, _) = ask("VirtualMachineInstance", &instance, "system:virtfold:controller", all).unwrap();
    let instance = stored(instance);
    let pod = render(Recipe::Pod { vmi: UID.into(), image: "launcher".into() }, Kind::Pod, &instance);
    let nics = instance["spec"]["networks"].as_array().map(Vec::as_slice).unwrap_or_default();
    let facts = NodeFacts {
        accelerator: "tcg".into(),
        nics: nics
            .iter()
            .map(|n| NicFacts {
                network: n["name"].as_str().unwrap().into(),
                mac: "02:00:00:00:00:01".into(),
                fd_name: "tap".into(),
                ..NicFacts::default()
            })
            .collect(),
        ..NodeFacts::default()
    };
    let machine = launcher::spec::machine(&instance, &facts, &launcher::Paths::default()).unwrap();
    compare(wish, &machine, &pod);
    Verdict::Accepted(Some(told(&machine)), warnings)
}

fn list<'v>(value: &'v Value, pointer: &str) -> &'v [Value] {
    value.pointer(pointer).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

/// Holds a machine against what somebody wrote, without the help of whatever read it before.
fn compare(wish: &Value, machine: &Machine, pod: &Value) {
    let domain = &wish["domain"];
    let memory = [
        &domain["memory"]["guest"],
        &domain["resources"]["requests"]["memory"],
        &domain["resources"]["limits"]["memory"],
    ];
    let memory = memory.into_iter().find(|m| !m.is_null()).unwrap();
    assert_eq!(i128::from(machine.memory), api::quantity_milli(memory).unwrap() / 1000);
    let cpu = |part: &str| domain["cpu"][part].as_u64().filter(|n| *n > 0);
    let parts = ["sockets", "cores", "threads"].map(cpu);
    let asked = ["limits", "requests"].iter().find_map(|s| api::quantity_milli(&domain["resources"][s]["cpu"]));
    let cpus = if parts.iter().all(Option::is_none) {
        asked.map_or(1, |m| u64::try_from((m + 999) / 1000).unwrap())
    } else {
        parts.iter().map(|p| p.unwrap_or(1)).product()
    };
    assert_eq!(u64::from(machine.cpu.sockets * machine.cpu.cores * machine.cpu.threads), cpus);
    let efi = &domain["firmware"]["bootloader"]["efi"];
    let firmware = match efi.is_object() {
        true => Firmware::Efi { secure_boot: efi["secureBoot"] != false },
        false => Firmware::Bios,
    };
    assert_eq!(machine.firmware, firmware);

    // Every volume is a disk, as it was asked for or as KubeVirt's defaults have it.
    let (disks, volumes) = (list(domain, "/devices/disks"), list(wish, "/volumes"));
    assert_eq!(machine.disks.len(), volumes.len());
    for volume in volumes {
        let name = volume["name"].as_str().unwrap();
        let disk = machine.disks.iter().find(|d| d.name == name).unwrap();
        let wished = disks.iter().find(|d| d["name"] == name).unwrap_or(&Value::Null);
        let target = ["disk", "cdrom", "lun"].into_iter().find(|t| wished[t].is_object()).unwrap_or("disk");
        let bus = match wished[target]["bus"].as_str() {
            Some("virtio") => Bus::Virtio,
            Some("scsi") => Bus::Scsi,
            Some("usb") => Bus::Usb,
            None | Some("sata") => Bus::Sata,
            Some(other) => panic!("{name}: bus {other}"),
        };
        assert_eq!((disk.bus, disk.cdrom), (bus, target == "cdrom"), "{name}");
        assert_eq!(disk.serial.as_deref(), wished["serial"].as_str(), "{name}");
        let source = volume.as_object().unwrap().keys().find(|k| *k != "name").unwrap().as_str();
        let same = match (source, disk.source.as_ref().unwrap()) {
            ("containerDisk", Source::Image { .. })
            | ("persistentVolumeClaim" | "dataVolume", Source::Claim { .. })
            | ("ephemeral", Source::Ephemeral { .. })
            | ("cloudInitNoCloud" | "cloudInitConfigDrive", Source::CloudInit(_)) => true,
            ("emptyDisk", Source::Scratch(bytes)) => {
                i128::from(*bytes) == api::quantity_milli(&volume["emptyDisk"]["capacity"]).unwrap() / 1000
            }
            _ => false,
        };
        assert!(same, "{name}: {source} became {:?}", disk.source);
    }
    let nics = list(domain, "/devices/interfaces");
    let none = nics.is_empty() && domain["devices"]["autoattachPodInterface"] == false;
    assert_eq!(machine.nics.len(), if none { 0 } else { nics.len().max(1) });
    for (nic, wished) in machine.nics.iter().zip(nics) {
        assert_eq!(nic.name, wished["name"].as_str().unwrap());
        let mac = wished["macAddress"].as_str().unwrap_or("02:00:00:00:00:01");
        assert_eq!(nic.mac, mac.replace('-', ":").to_lowercase());
        assert!(nic.device.starts_with(wished["model"].as_str().unwrap_or("virtio")), "{nic:?}");
    }
    for (switch, there) in [
        ("autoattachGraphicsDevice", machine.video.is_some()),
        ("autoattachSerialConsole", machine.serial),
        ("autoattachMemBalloon", machine.balloon),
    ] {
        assert_eq!(there, domain["devices"][switch] != false, "{switch}");
    }
    assert_eq!(machine.paused, wish["startStrategy"] == "Paused");

    let spec = &pod["spec"];
    for field in ["priorityClassName", "tolerations", "affinity", "schedulerName", "topologySpreadConstraints"] {
        assert_eq!(spec[field], wish[field], "{field}");
    }
    for (label, value) in wish["nodeSelector"].as_object().into_iter().flatten() {
        assert_eq!(&spec["nodeSelector"][label], value);
    }
    for probe in ["readinessProbe", "livenessProbe"] {
        assert_eq!(spec["containers"][0][probe].is_object(), wish[probe].is_object(), "{probe}");
    }
}

/// A machine in a few words.
fn told(machine: &Machine) -> String {
    let cpus = machine.cpu.sockets * machine.cpu.cores * machine.cpu.threads;
    let firmware = match machine.firmware {
        Firmware::Bios => "BIOS",
        Firmware::Efi { secure_boot: false } => "EFI",
        Firmware::Efi { secure_boot: true } => "EFI with secure boot",
    };
    let disk = |d: &launcher::machine::Disk| {
        let what = match &d.source {
            None => "nothing",
            Some(Source::Claim { .. }) => "claim",
            Some(Source::Image { .. }) => "container disk",
            Some(Source::Ephemeral { .. }) => "ephemeral claim",
            Some(Source::Scratch(_)) => "empty disk",
            Some(Source::CloudInit(_)) => "cloud-init",
        };
        format!("{what} ({}{:?})", if d.cdrom { "CD-ROM, " } else { "" }, d.bus).to_lowercase()
    };
    let all: Vec<String> = machine.disks.iter().map(disk).chain(machine.nics.iter().map(|n| n.device.into())).collect();
    format!("{cpus} CPU, {} MiB, {firmware}: {}", machine.memory >> 20, all.join(", "))
}

#[test]
fn every_manifest_is_accepted_as_it_is_or_refused_by_field() {
    let shared = std::env::var_os("SHARED").map_or_else(|| root().join("../shared"), PathBuf::from);
    let folder = shared.join("cases/manifests");
    let Ok(entries) = std::fs::read_dir(&folder) else {
        println!("SKIPPED: no {}", folder.display());
        return;
    };
    let mut files: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).collect();
    files.sort();
    let mut table = String::from(
        "# Manifests and what becomes of them\n\nGenerated by `chaos-tests/tests/manifests.rs` from the example manifests of KubeVirt. What a machine gets is what its launcher would \
         start, compared with the manifest field by field.\n\n| manifest | kind | verdict | |\n|---|---|---|---|\n",
    );
    let read = |path: &PathBuf| -> Vec<Value> {
        let objects: Vec<Value> = serde_saphyr::from_multiple(&std::fs::read_to_string(path).unwrap()).unwrap();
        objects.into_iter().filter(Value::is_object).collect()
    };
    let all: Vec<Value> = files.iter().flat_map(read).collect();
    let mut seen = 0;
    for path in files {
        let file = path.file_name().unwrap().to_str().unwrap();
        for object in read(&path) {
            seen += 1;
            println!("{file}");
            let (verdict, remark) = match verdict(&object, &all) {
                Verdict::Foreign => ("not KubeVirt's", String::new()),
                Verdict::Unknown => ("refused", "there is no such kind".into()),
                Verdict::Refused(causes) => {
                    assert!(causes.iter().all(|(field, _)| !field.is_empty()), "{file}: {causes:?}");
                    ("refused", causes.into_iter().map(|c| c.1).collect::<Vec<_>>().join("; "))
                }
                Verdict::Accepted(machine, warnings) => {
                    ("accepted", machine.into_iter().chain(warnings).collect::<Vec<_>>().join("; "))
                }
            };
            let kind = object["kind"].as_str().unwrap();
            table.push_str(&format!("| {file} | {kind} | {verdict} | {remark} |\n"));
        }
    }
    assert!(seen > 40, "only {seen} objects");
    let document = root().join("docs/manifests.md");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&document, &table).unwrap();
    }
    let there = std::fs::read_to_string(&document).unwrap_or_default();
    assert!(there == table, "docs/manifests.md is not what the code does: run the test with UPDATE=1\n{table}");
}
