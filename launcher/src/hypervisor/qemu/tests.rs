#![allow(clippy::unwrap_used)]

use super::args::{Descriptors, Format, Image, Places, arguments};
use crate::config::Paths;
use proto::launcher::{NicFacts, NodeFacts};
use serde_json::json;

#[test]
fn a_command_line_that_can_be_read() {
    let vmi = json!({"metadata": {"name": "web", "namespace": "ns", "uid": "6f2c0a51-8a61-4f5c-9f6f-6d3a4f1f3f10"},
        "spec": {"domain": {"memory": {"guest": "128Mi"}, "cpu": {"cores": 2, "features": [{"name": "x2apic", "policy": "disable"}]},
            "firmware": {"serial": "a,b"},
            "devices": {"disks": [
                {"name": "root", "disk": {"bus": "virtio"}, "serial": "s,1"},
                {"name": "cd", "cdrom": {"bus": "sata"}},
                {"name": "data", "disk": {"bus": "scsi"}, "cache": "none", "io": "native"}],
              "interfaces": [{"name": "default", "masquerade": {}}]}},
        "volumes": [{"name": "root", "containerDisk": {"image": "i"}}, {"name": "cd", "persistentVolumeClaim": {"claimName": "c"}},
                    {"name": "data", "emptyDisk": {"capacity": "1Gi"}}]}});
    let facts = NodeFacts {
        accelerator: "tcg".into(),
        nics: vec![NicFacts {
            network: "default".into(),
            mac: "02:00:00:00:00:01".into(),
            fd_name: "tap0".into(),
            mtu: 1450,
            ..NicFacts::default()
        }],
        ..NodeFacts::default()
    };
    let machine = crate::spec::machine(&vmi, &facts, &Paths::default()).unwrap();
    let image = |path: &str, format, base| Some(Image { path: path.into(), format, device: false, base });
    let images = [
        image("/e/disk.qcow2", Format::Qcow2, image("/i/base,1.img", Format::Raw, None).map(Box::new)),
        image("/c/disk.img", Format::Raw, None),
        image("/e/data.img", Format::Raw, None),
    ];
    let places = Places { qmp: "/run/virtfold/qmp.sock".into(), vnc: "/run/virtfold/vnc.sock".into(), efi: None };
    let line =
        arguments(&machine, &images, &Descriptors { monitor: 10, console: 11, agent: 12, taps: vec![13] }, &places);
    let has = |text: &str| assert!(line.iter().any(|a| a == text), "{text} is not in {line:#?}");
    has("q35,usb=off,vmport=off,hpet=off,acpi=on,smm=off,dump-guest-core=off");
    has("tcg,thread=multi,tb-size=128");
    has("Nehalem,x2apic=off");
    has("2,sockets=1,cores=2,threads=1,maxcpus=2");
    has("size=131072k");
    has("tap,id=net0,fd=13");
    has("virtio-net-pci,netdev=net0,id=nic0,mac=02:00:00:00:00:01,bus=port0,romfile=,host_mtu=1450");
    has("pcie-root-port,id=port0,bus=pcie.0,chassis=1,port=0,addr=0x2.0,multifunction=on");
    has("ide-cd,bus=ide.0,id=ua-cd,drive=disk1,bootindex=2");
    let root = line.iter().find(|a| a.starts_with("virtio-blk-pci")).unwrap();
    assert!(root.contains(",serial=s,,1") && root.contains("bootindex=1") && root.contains("werror=stop"), "{root}");
    assert!(line.iter().any(|a| a.contains("serial=a,,b,uuid=")));
    let nodes: Vec<serde_json::Value> =
        line.iter().filter(|a| a.starts_with('{')).map(|a| serde_json::from_str(a).unwrap()).collect();
    assert_eq!(nodes[0]["backing"]["file"]["filename"], "/i/base,1.img");
    assert_eq!(nodes[0]["backing"]["driver"], "raw");
    assert_eq!(nodes[0]["backing"]["read-only"], true);
    assert_eq!(nodes[1]["read-only"], true);
    assert_eq!(nodes[2]["file"]["aio"], "native");
    assert!(nodes.iter().all(|n| n["file"]["locking"] == "on"), "image locks stay on");
    assert!(!line.iter().any(|a| a.starts_with("pvpanic")), "a panic device that nobody asked for");

    let mut asked = vmi.clone();
    asked["spec"]["domain"]["devices"]["panicDevices"] = json!([{}, {"model": "pvpanic"}, {"model": "isa"}]);
    let machine = crate::spec::machine(&asked, &facts, &Paths::default()).unwrap();
    let line =
        arguments(&machine, &images, &Descriptors { monitor: 10, console: 11, agent: 12, taps: vec![13] }, &places);
    let panic: Vec<_> = line.iter().filter(|a| a.starts_with("pvpanic")).collect();
    assert_eq!(panic, ["pvpanic,id=panic0", "pvpanic-pci,id=panic1,bus=pcie.0"]);
}
