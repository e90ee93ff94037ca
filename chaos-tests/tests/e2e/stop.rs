//! How guests end: asked, forced, by themselves; and the user's commands for it.

use super::{e2e, shared};
use anyhow::{Result, ensure};
use chaos_tests::e2e::{
    cluster::condition,
    manifest::vm,
    process,
    vm::{START, Vm},
    wait,
};
use serde_json::json;
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
fn the_users_commands_pause_reset_reboot_restart_stop_and_start() -> Result<()> {
    e2e!();
    let (_turn, cluster) = shared()?;
    let mut manifest = vm("stop-commands");
    manifest.spec()["readinessProbe"] =
        json!({"exec": {"command": ["/bin/cat", "/run/well"]}, "periodSeconds": 1, "timeoutSeconds": 10});
    // From when on it answers, and for how long it may not, leaves the reboots below alone.
    manifest.spec()["livenessProbe"] =
        json!({"guestAgentPing": {}, "periodSeconds": 2, "timeoutSeconds": 10, "failureThreshold": 300});
    let vm = Vm::running(cluster, &manifest)?;
    let say = |arguments: &[&str]| -> Result<()> {
        let (code, out, error) = cluster.virtfold(arguments)?;
        ensure!(code == 0, "virtfold {} ended with {code}: {out}{error}", arguments.join(" "));
        Ok(())
    };
    let mut console = vm.shell()?;
    // The probe runs in the guest, by its agent; what it lacks is told.
    vm.wait_condition("AgentConnected", "True", START)?;
    wait::until("why it is not ready", START, || {
        let (_, out, said) = cluster.virtfold(&["explain", "stop-commands"])?;
        let named = out.contains("Readiness probe failed: ") && out.contains("/run/well");
        Ok(if named { Ok(()) } else { Err(format!("{out}{said}")) })
    })?;
    ensure!(condition(&vm.vmi()?, "Ready").0 == "False");
    console.run("touch /run/well")?;
    vm.wait_condition("Ready", "True", START)?;
    say(&["pause", "vm", "stop-commands"])?;
    vm.wait_condition("Paused", "True", START)?;
    vm.wait_printable("Paused", START)?;
    say(&["unpause", "vmi/stop-commands"])?;
    vm.wait_condition("Paused", "", START)?;
    ensure!(console.run("echo awake")? == "awake");
    vm.wait_condition("Ready", "True", START)?;

    // The same guest, which has lost what it had in memory.
    let first = vm.parts()?;
    for (command, sign) in [("reset", "booted"), ("soft-reboot", "reboot")] {
        vm.wait_condition("AgentConnected", "True", START)?;
        console.run("echo mark >/run/mark")?;
        say(&[command, "stop-commands"])?;
        console.expect(&format!("virtfold-guest: {sign}"), START)?;
        console.login()?;
        ensure!(console.run("cat /run/mark 2>&1")? != "mark", "{command} did not start the guest anew");
        let now = vm.parts()?;
        ensure!(now.vmi_uid == first.vmi_uid && now.qemu == first.qemu, "{command} made {now:?} of {first:?}");
    }
    say(&["pause", "stop-commands"])?;
    let (code, _, error) = cluster.virtfold(&["soft-reboot", "stop-commands"])?;
    ensure!(code != 0 && error.contains("paused"), "a soft reboot of a paused guest: {code} {error}");
    say(&["unpause", "stop-commands"])?;

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
