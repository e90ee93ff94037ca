//! Disks of every kind, and what stays on them.

use super::{e2e, shared};
use anyhow::{Result, ensure};
use chaos_tests::e2e::{
    manifest::{IMAGE, vm},
    vm::{START, Vm},
};
use serde_json::json;

fn claim(name: &str, size: &str) -> String {
    json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": "default"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}})
    .to_string()
}

#[test]
fn what_is_on_a_claim_survives_a_restart_and_a_new_vm() -> Result<()> {
    e2e!();
    let (_turn, cluster) = shared()?;
    cluster.apply(&claim("disks-data", "64Mi"))?;
    let with_data = |name: &str| {
        vm(name)
            .disk(
                "data",
                json!({"disk": {"bus": "virtio"}}),
                json!({"persistentVolumeClaim": {"claimName": "disks-data"}}),
            )
            .disk("scratch", json!({"disk": {"bus": "scsi"}}), json!({"emptyDisk": {"capacity": "32Mi"}}))
    };
    let first = Vm::running(cluster, &with_data("disks-first"))?;
    let mut console = first.shell()?;
    ensure!(console.run("cat /sys/block/vdb/size")? == "131072", "{}", console.run("cat /proc/partitions")?);
    ensure!(console.run("cat /sys/block/sda/size")? == "65536", "{}", console.run("cat /proc/partitions")?);
    let done = console
        .run("mke2fs -q /dev/vdb 2>&1 && mount /dev/vdb /mnt && echo kept >/mnt/file && umount /mnt && echo done")?;
    ensure!(done.ends_with("done"), "{done}");
    drop(console);
    first.delete()?;

    let second = Vm::running(cluster, &with_data("disks-second"))?;
    let kept = second.shell()?.run("cat /mnt/vdb/file")?;
    ensure!(kept == "kept", "{kept}");
    second.delete()?;
    cluster.ok(&["delete", "pvc", "disks-data"])?;
    Ok(())
}

#[test]
fn a_guest_boots_from_every_bus_and_sees_its_drives() -> Result<()> {
    e2e!();
    let (_turn, cluster) = shared()?;
    for bus in ["sata", "scsi"] {
        let mut manifest = vm(&format!("disks-{bus}")).disk(
            "cloudinit",
            json!({"cdrom": {"bus": "scsi"}}),
            json!({"cloudInitConfigDrive": {"userData": "#!/bin/sh\necho yes >/run/drive\n"}}),
        );
        manifest.spec()["domain"]["devices"]["disks"][0]["disk"]["bus"] = bus.into();
        let vm = Vm::running(cluster, &manifest)?;
        let mut console = vm.shell()?;
        console.run("until [ -e /run/drive ]; do usleep 100000; done")?;
        let drives = console.run("ls /sys/block")?;
        ensure!(drives.contains("sr0"), "{drives}");
        ensure!(console.run("hostname")? == format!("disks-{bus}"));
        vm.delete()?;
    }
    Ok(())
}

#[test]
fn two_guests_share_one_image_and_write_apart() -> Result<()> {
    e2e!();
    let (_turn, cluster) = shared()?;
    let one = Vm::running(cluster, &vm("disks-one").image(IMAGE))?;
    let two = Vm::running(cluster, &vm("disks-two").image(IMAGE))?;
    one.shell()?.run("echo one >/persist/mine; sync")?;
    ensure!(two.shell()?.run("ls /persist")?.find("mine").is_none(), "the guests write to one disk");
    one.wait_condition("Ready", "True", START)?;
    one.delete()?;
    two.delete()?;
    Ok(())
}
