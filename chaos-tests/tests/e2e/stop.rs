//! How guests end: asked, forced, by themselves; and the user's commands for it.

use super::{e2e, shared};
use anyhow::{Result, ensure};
use chaos_tests::e2e::{
    manifest::vm,
    process,
    vm::{START, Vm},
    wait,
};
use std::time::{Duration, Instant};

#[test]
fn a_guest_that_will_not_stop_is_killed_after_its_grace() -> Result<()> {
    e2e!();
    let (_turn, cluster) = shared()?;
    let stubborn = Vm::running(cluster, &vm("stop-stubborn").grace(6))?;
    let parts = stubborn.parts()?;
    stubborn.shell()?.run("touch /run/ignore-power-button /run/ignore-shutdown")?;
    let began = Instant::now();
    cluster.ok(&["delete", "vm", "stop-stubborn", "--wait=false"])?;
    let gone = wait::until("the end of QEMU", START, || {
        Ok(if process::alive(parts.qemu) { Err("still there".to_owned()) } else { Ok(began.elapsed()) })
    })?;
    ensure!(gone > Duration::from_secs(5), "killed after {gone:?}, before its grace of 6 s was over");
    ensure!(gone < Duration::from_secs(20), "killed only after {gone:?}");
    stubborn.nothing_left(&parts)
}

#[test]
fn a_guest_that_powers_itself_off_has_succeeded() -> Result<()> {
    e2e!();
    let (_turn, cluster) = shared()?;
    let once = Vm::running(cluster, &vm("stop-once").run("Once"))?;
    // Held until the guest is off: who leaves a console may take unsent bytes along.
    let mut console = once.shell()?;
    console.send("poweroff -f\r")?;
    once.wait_phase("Succeeded", START)?;
    once.wait_printable("Stopped", START)?;
    once.delete()?;

    let always = Vm::running(cluster, &vm("stop-always"))?;
    let before = always.parts()?;
    let mut console = always.shell()?;
    console.send("poweroff -f\r")?;
    always.wait_vmi("a new instance that runs", START, |vmi| {
        (vmi["metadata"]["uid"] != before.vmi_uid.as_str() && vmi["status"]["phase"] == "Running").then_some(())
    })?;
    always.nothing_left(&before)?;
    always.delete()?;
    Ok(())
}

#[test]
fn the_users_commands_stop_start_restart_and_pause() -> Result<()> {
    e2e!();
    let (_turn, cluster) = shared()?;
    let vm = Vm::running(cluster, &vm("stop-commands"))?;
    let say = |arguments: &[&str]| -> Result<()> {
        let (code, out, error) = cluster.virtfold(arguments)?;
        ensure!(code == 0, "virtfold {} ended with {code}: {out}{error}", arguments.join(" "));
        Ok(())
    };
    let mut console = vm.shell()?;
    say(&["pause", "vm", "stop-commands"])?;
    vm.wait_condition("Paused", "True", START)?;
    vm.wait_printable("Paused", START)?;
    say(&["unpause", "vmi/stop-commands"])?;
    vm.wait_condition("Paused", "", START)?;
    ensure!(console.run("echo awake")? == "awake");

    let first = vm.parts()?;
    say(&["restart", "stop-commands"])?;
    vm.wait_vmi("a new instance that runs", START, |vmi| {
        (vmi["metadata"]["uid"] != first.vmi_uid.as_str() && vmi["status"]["phase"] == "Running").then_some(())
    })?;
    vm.nothing_left(&first)?;

    let second = vm.parts()?;
    say(&["stop", "stop-commands"])?;
    vm.wait_printable("Stopped", START)?;
    vm.nothing_left(&second)?;
    ensure!(vm.vm()?["spec"]["runStrategy"] == "Halted");
    let (code, _, error) = cluster.virtfold(&["stop", "stop-commands"])?;
    ensure!(code != 0 && error.contains("not running"), "a second stop: {code} {error}");

    say(&["start", "stop-commands"])?;
    vm.wait_phase("Running", START)?;
    vm.delete()?;
    Ok(())
}
