//! Manifests as people write them: each is accepted, or refused with the field that is not supported yet.

use crate::admission::{ask, input};
use serde_json::Value;
use std::path::PathBuf;

/// Kinds that are not admitted here: Kubernetes' own, and those without rules of ours.
const NOT_OURS: &[&str] = &["PriorityClass", "ResourceClaimTemplate", "ConfigMap", "Namespace"];

/// Refused manifests and the field that is to blame.
const REFUSED: &[(&str, &str)] = &[
    ("example-migration-policy.yaml", "kind"),
    ("migration-job.yaml", "kind"),
    ("vm-alpine-datavolume.yaml", "spec.dataVolumeTemplates"),
    ("vm-cirros-clarge-virtio.yaml", "spec.instancetype"),
    ("vm-cirros-clarge-windows.yaml", "spec.instancetype"),
    ("vm-cirros-clarge.yaml", "spec.instancetype"),
    ("vm-cirros-cluster-csmall.yaml", "spec.instancetype"),
    ("vm-cirros-csmall.yaml", "spec.instancetype"),
    ("vm-cirros-with-sidecar-hook-configmap.yaml", "spec.template.metadata.annotations"),
    ("vm-pool-cirros.yaml", "kind"),
    ("vm-windows-clarge-windows.yaml", "spec.instancetype"),
    ("vmi-dra-pgpu.yaml", "spec.domain.devices.gpus"),
    ("vmi-fedora-isolated.yaml", "spec.domain.cpu.dedicatedCpuPlacement"),
    ("vmi-gpu.yaml", "spec.domain.devices.gpus"),
    ("vmi-host-disk.yaml", "spec.volumes[0].hostDisk"),
    ("vmi-kernel-boot.yaml", "spec.domain.firmware.kernelBoot"),
    ("vmi-multus-multiple-net.yaml", "spec.domain.devices.interfaces[1].bridge"),
    ("vmi-multus-ptp.yaml", "spec.domain.devices.interfaces[0].bridge"),
    ("vmi-preset-small.yaml", "kind"),
    ("vmi-sriov.yaml", "spec.domain.devices.interfaces[1].sriov"),
    ("vmi-usb.yaml", "spec.domain.devices.hostDevices"),
    ("vmi-windows.yaml", "spec.domain.devices.tpm"),
    ("vmi-with-sidecar-hook-configmap.yaml", "metadata.annotations"),
    ("vmi-with-sidecar-hook.yaml", "metadata.annotations"),
];

#[test]
fn every_manifest_is_accepted_or_refused_by_field() {
    let shared = std::env::var_os("SHARED")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared"), PathBuf::from);
    let folder = shared.join("cases/manifests");
    let Ok(entries) = std::fs::read_dir(&folder) else {
        println!("SKIPPED: no {}", folder.display());
        return;
    };
    let mut seen = 0;
    let mut wrong = Vec::new();
    for entry in entries {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap().to_str().unwrap().to_owned();
        let text = std::fs::read_to_string(&path).unwrap();
        let objects: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
        for object in objects.into_iter().filter(Value::is_object) {
            seen += 1;
            let kind = object["kind"].as_str().unwrap().to_owned();
            if NOT_OURS.contains(&kind.as_str()) {
                continue;
            }
            let want = REFUSED.iter().find(|(f, _)| *f == file).map(|(_, field)| *field);
            let got = match ask(input(&kind, object)) {
                Ok(out) => {
                    println!("{file}: accepted, {:?}", out.warnings);
                    None
                }
                Err(status) => {
                    println!("{file}: {}", status.message);
                    let fields: Vec<String> = status.causes().into_iter().map(|c| c.1).collect();
                    assert!(fields.iter().all(|f| !f.is_empty()), "{file}: {status}");
                    Some(fields)
                }
            };
            let fine = match (&got, want) {
                (None, None) => true,
                (Some(fields), Some(field)) => fields.iter().any(|f| f == field),
                _ => false,
            };
            if !fine {
                wrong.push(format!("{file} ({kind}): {got:?}, wanted {want:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(seen > 40, "only {seen} objects");
}
