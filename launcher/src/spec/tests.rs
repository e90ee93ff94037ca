#![allow(clippy::unwrap_used)]

use super::*;
use crate::machine::{Bus, Source};
use proto::launcher::NicFacts;
use serde_json::json;

fn facts() -> NodeFacts {
    NodeFacts {
        accelerator: "tcg".into(),
        cpu_model: "Nehalem".into(),
        pod_ip: "10.244.1.2".into(),
        nics: vec![NicFacts {
            network: "default".into(),
            mac: "02:00:00:00:00:01".into(),
            fd_name: "tap0".into(),
            ..NicFacts::default()
        }],
    }
}

fn vmi(domain: Value, volumes: Value) -> Value {
    json!({"metadata": {"name": "a.b", "namespace": "ns", "uid": "6f2c0a51-8a61-4f5c-9f6f-6d3a4f1f3f10"},
           "spec": {"domain": domain, "volumes": volumes, "terminationGracePeriodSeconds": 5}})
}

fn read(domain: Value, volumes: Value) -> Result<Machine, SpecError> {
    machine(&vmi(domain, volumes), &facts(), &Paths::default())
}

#[test]
fn a_manifest_as_people_write_it() {
    let m = read(
        json!({
            "cpu": {"cores": 2, "threads": 1, "sockets": 1, "maxSockets": 4},
            "memory": {"guest": "256Mi"},
            "machine": {"type": "q35"},
            "resources": {"requests": {"memory": "128Mi"}},
            "features": {"acpi": {}},
            "devices": {
                "disks": [
                    {"name": "root", "disk": {"bus": "virtio"}},
                    {"name": "cd", "cdrom": {"bus": "sata"}},
                    {"name": "init", "disk": {"bus": "virtio"}}],
                "interfaces": [{"name": "default", "masquerade": {}, "ports": [{"port": 80}]}],
                "rng": {}}
        }),
        json!([{"name": "init", "cloudInitNoCloud": {"userData": "#!/bin/sh"}},
               {"name": "cd", "persistentVolumeClaim": {"claimName": "iso"}},
               {"name": "root", "containerDisk": {"image": "x"}}]),
    )
    .unwrap();
    assert_eq!((m.cpu.sockets, m.cpu.cores, m.cpu.threads), (1, 2, 1));
    assert_eq!(m.memory, 256 << 20);
    assert_eq!(m.name, "ns_a.b");
    assert_eq!(m.uuid, "6f2c0a51-8a61-4f5c-9f6f-6d3a4f1f3f10");
    let order: Vec<_> = m.disks.iter().map(|d| (d.name.as_str(), d.boot_index)).collect();
    assert_eq!(order, [("root", Some(1)), ("cd", Some(2)), ("init", None)]);
    assert_eq!(
        m.disks[0].source,
        Some(Source::Image { folder: "/var/run/kubevirt-image-volume/disk_2".into(), file: None })
    );
    assert!(matches!(&m.disks[2].source, Some(Source::CloudInit(c)) if c.hostname == "a" && c.instance_id == "a.b.ns"));
    assert_eq!(m.nics[0].mac, "02:00:00:00:00:01");
    assert!(m.serial && m.balloon && m.video.is_some() && !m.paused);
}

#[test]
fn cpus_and_memory_come_from_resources_where_the_domain_is_silent() {
    let m = read(json!({"resources": {"requests": {"cpu": "1500m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}}, "devices": {}}), json!([])).unwrap();
    assert_eq!((m.cpu.sockets, m.cpu.cores), (2, 1));
    assert_eq!(m.memory, 128 << 20);
}

#[test]
fn what_cannot_be_served_is_named_by_its_path() {
    let ok = json!({"guest": "64Mi"});
    let disk = |d: Value| json!({"memory": {"guest": "64Mi"}, "devices": {"disks": [d]}});
    let empty = json!([{"name": "e", "emptyDisk": {"capacity": "1Mi"}}]);
    let cases = [
        (json!({"devices": {}}), json!([]), "spec.domain.memory.guest"),
        (json!({"memory": {"guest": "0"}, "devices": {}}), json!([]), "spec.domain.memory.guest"),
        (json!({"memory": {"guest": true}, "devices": {}}), json!([]), "spec.domain.memory.guest"),
        (json!({"memory": ok, "devices": {"tpm": {}}}), json!([]), "spec.domain.devices.tpm"),
        (json!({"memory": ok, "devices": {"gpus": [{"name": "g"}]}}), json!([]), "spec.domain.devices.gpus"),
        (json!({"memory": ok, "ioThreadsPolicy": "auto", "devices": {}}), json!([]), "spec.domain.ioThreadsPolicy"),
        (
            json!({"memory": {"guest": "64Mi", "hugepages": {"pageSize": "2Mi"}}, "devices": {}}),
            json!([]),
            "spec.domain.memory.hugepages",
        ),
        (
            json!({"memory": ok, "cpu": {"dedicatedCpuPlacement": true}, "devices": {}}),
            json!([]),
            "spec.domain.cpu.dedicatedCpuPlacement",
        ),
        (json!({"memory": ok, "cpu": {"cores": 300}, "devices": {}}), json!([]), "spec.domain.cpu"),
        (json!({"memory": ok, "cpu": {"model": "x,accel=kvm"}, "devices": {}}), json!([]), "spec.domain.cpu.model"),
        (json!({"memory": ok, "machine": {"type": "microvm"}, "devices": {}}), json!([]), "spec.domain.machine.type"),
        (
            json!({"memory": ok, "firmware": {"kernelBoot": {"container": {}}}, "devices": {}}),
            json!([]),
            "spec.domain.firmware.kernelBoot",
        ),
        (
            json!({"memory": ok, "devices": {"interfaces": [{"name": "other", "bridge": {}}]}}),
            json!([]),
            "spec.domain.devices.interfaces[0]",
        ),
        (
            json!({"memory": ok, "devices": {"interfaces": [{"name": "default", "macAddress": "02:00"}]}}),
            json!([]),
            "spec.domain.devices.interfaces[0].macAddress",
        ),
        (disk(json!({"name": "e", "disk": {"bus": "ide"}})), empty.clone(), "spec.domain.devices.disks[0].disk.bus"),
        (disk(json!({"name": "e", "lun": {"bus": "scsi"}})), empty.clone(), "spec.domain.devices.disks[0].lun"),
        (disk(json!({"name": "f", "disk": {}})), json!([]), "spec.domain.devices.disks[0].name"),
        (disk(json!({"name": "../x", "disk": {}})), json!([]), "spec.domain.devices.disks[0].name"),
        (json!({"memory": ok, "devices": {}}), empty, "spec.volumes[0]"),
        (disk(json!({"name": "e"})), json!([{"name": "e", "emptyDisk": {}}]), "spec.volumes[0].emptyDisk.capacity"),
        (disk(json!({"name": "e"})), json!([{"name": "e", "hostDisk": {"path": "/x"}}]), "spec.volumes[0].hostDisk"),
        (
            disk(json!({"name": "e"})),
            json!([{"name": "e", "cloudInitNoCloud": {}}]),
            "spec.volumes[0].cloudInitNoCloud",
        ),
        (
            disk(json!({"name": "e"})),
            json!([{"name": "e", "cloudInitNoCloud": {"userDataBase64": "%"}}]),
            "spec.volumes[0].cloudInitNoCloud.userDataBase64",
        ),
        (
            disk(json!({"name": "e"})),
            json!([{"name": "e", "containerDisk": {"image": "i", "path": "/disk/../../etc/shadow"}}]),
            "spec.volumes[0].containerDisk.path",
        ),
    ];
    for (domain, volumes, path) in cases {
        let e = read(domain.clone(), volumes).unwrap_err();
        assert_eq!(e.path, path, "{domain}: {e}");
    }
}

#[test]
fn what_asks_for_nothing_is_no_obstacle() {
    let m = read(json!({"memory": {"guest": "64Mi"}, "devices": {"tpm": null, "blockMultiQueue": false, "gpus": [], "disks": [{"name": "c", "cdrom": {}}]}}), json!([])).unwrap();
    assert_eq!(m.disks[0].bus, Bus::Sata);
    assert!(m.disks[0].source.is_none());
}

#[test]
fn user_data_never_shows_in_debug_output() {
    let m = read(
        json!({"memory": {"guest": "64Mi"}, "devices": {"disks": [{"name": "c"}]}}),
        json!([{"name": "c", "cloudInitConfigDrive": {"userData": "password: hunter2"}}]),
    )
    .unwrap();
    assert!(!format!("{m:?}").contains("hunter2"));
}
