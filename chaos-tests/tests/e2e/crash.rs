//! Guests and launchers that die.

use super::{e2e, shared};
use anyhow::{Result, ensure};
use chaos_tests::e2e::{
    manifest::vm,
    process,
    vm::{START, Vm},
};

#[test]
fn a_guest_whose_qemu_is_killed_has_failed() -> Result<()> {
    e2e!();
    let (_turn, cluster) = shared()?;
    let once = Vm::running(cluster, &vm("crash-once").run("Once"))?;
    process::destroy(once.parts()?.qemu)?;
    once.wait_phase("Failed", START)?;
    once.delete()?;

    let always = Vm::running(cluster, &vm("crash-always"))?;
    let before = always.parts()?;
    process::destroy(before.qemu)?;
    always.wait_vmi("a new instance that runs", START, |vmi| {
        (vmi["metadata"]["uid"] != before.vmi_uid.as_str() && vmi["status"]["phase"] == "Running").then_some(())
    })?;
    always.nothing_left(&before)?;
    always.delete()?;
    Ok(())
}

#[test]
fn a_launcher_that_is_killed_takes_its_guest_along_and_the_vm_starts_again() -> Result<()> {
    e2e!();
    let (_turn, cluster) = shared()?;
    let vm = Vm::running(cluster, &vm("crash-launcher"))?;
    let before = vm.parts()?;
    process::destroy(before.launcher)?;
    vm.wait_vmi("a new instance that runs", START, |vmi| {
        (vmi["metadata"]["uid"] != before.vmi_uid.as_str() && vmi["status"]["phase"] == "Running").then_some(())
    })?;
    ensure!(!process::alive(before.qemu), "the old QEMU lives beside the new one");
    vm.nothing_left(&before)?;
    vm.delete()?;
    Ok(())
}
