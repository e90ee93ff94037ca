//! The control plane dies; the guests do not notice.

use super::{alone, e2e};
use anyhow::{Context, Result, ensure};
use chaos_tests::e2e::{
    leaks,
    manifest::vm,
    process,
    vm::{Parts, START, Vm},
    wait,
};
use std::time::{Duration, Instant};

/// The guest is the same, has never been booted again, and its parts are the same processes.
fn same(vm: &Vm, before: &Parts) -> Result<()> {
    let now = vm.parts()?;
    ensure!(now.vmi_uid == before.vmi_uid && now.pod_uid == before.pod_uid, "{before:?} became {now:?}");
    ensure!(now.qemu == before.qemu && now.launcher == before.launcher, "{before:?} became {now:?}");
    // At once: who asks for an agent that has just been started, and has not found its guests yet, is made to wait for it.
    let mut console = vm.shell()?;
    ensure!(console.run("cat /run/mark")? == "mark", "the guest was booted again");
    Ok(())
}

fn marked<'a>(cluster: &'a chaos_tests::e2e::cluster::Cluster, name: &str) -> Result<(Vm<'a>, Parts)> {
    let vm = Vm::running(cluster, &vm(name))?;
    vm.shell()?.run("echo mark >/run/mark")?;
    let parts = vm.parts()?;
    Ok((vm, parts))
}

#[test]
fn a_node_agent_that_is_killed_finds_its_guests_again() -> Result<()> {
    e2e!();
    let (_turn, cluster) = alone()?;
    let (vm, parts) = marked(cluster, "takeover-agent")?;
    let agent = cluster.agent_pid(&parts.node)?;
    process::destroy(agent)?;
    // Asked in that very moment, it is done once the agent is back.
    for (command, paused) in [("pause", "True"), ("unpause", "")] {
        let (code, out, error) = cluster.virtfold(&[command, "takeover-agent"])?;
        ensure!(code == 0, "{command} right after the end of the agent: {code} {out}{error}\n{}", vm.story());
        vm.wait_condition("Paused", paused, START)?;
    }
    wait::until("a new node agent", Duration::from_secs(60), || {
        let now = cluster.agent_pid(&parts.node)?;
        Ok(if now != agent && process::alive(now) { Ok(()) } else { Err(format!("process {now}")) })
    })
    .with_context(|| vm.story())?;
    vm.wait_condition("Ready", "True", START)?;
    same(&vm, &parts)?;
    // It is really in charge again: it can end what it did not start.
    vm.delete()?;
    Ok(())
}

/// Has a guest write all the time, and freezes it for a while; returns what counts the writes, on the console alone.
fn frozen(vm: &Vm, parts: &Parts) -> Result<impl Fn() -> Result<usize> + use<>> {
    vm.wait_condition("AgentConnected", "True", START)?;
    vm.shell()?.start("while :; do echo x >/persist/beat; echo beat >/dev/console; usleep 100000; done")?;
    let log = leaks::run_of(&vm.cluster.data).join(&parts.node).join(&parts.pod_uid).join("console.log");
    let beats = move || -> Result<usize> {
        let text = std::fs::read(&log).with_context(|| format!("read {}", log.display()))?;
        Ok(String::from_utf8_lossy(&text).matches("beat\r").count())
    };
    wait::until("a guest that writes", START, || {
        let now = beats()?;
        Ok(if now > 3 { Ok(()) } else { Err(format!("{now} writes")) })
    })?;
    let path =
        format!("/apis/subresources.kubevirt.io/v1/namespaces/default/virtualmachineinstances/{}/freeze", vm.name);
    let (code, out, error) = vm.cluster.feed(&["replace", "--raw", &path], r#"{"unfreezeTimeout": "15s"}"#)?;
    ensure!(code == 0, "freeze: {out}{error}");
    let (began, last) = (Instant::now(), beats()?);
    // The last sign may have been on its way.
    while began.elapsed() < Duration::from_secs(2) {
        let now = beats()?;
        ensure!(now <= last + 1, "it writes on a frozen file system: {last}, {now}");
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(beats)
}

#[test]
fn a_control_plane_that_is_killed_goes_on_with_running_guests() -> Result<()> {
    e2e!();
    let (_turn, cluster) = alone()?;
    let (vm, parts) = marked(cluster, "takeover-up")?;
    let before = vm.vm()?;
    let agent = cluster.agent_pid(&parts.node)?;
    let beats = frozen(&vm, &parts)?;
    cluster.kill_up()?;
    ensure!(process::alive(parts.qemu) && process::alive(parts.launcher), "the guest died with the control plane");
    ensure!(process::alive(agent), "the node agent died with the control plane");
    process::destroy(agent)?;
    // Nobody but the launcher is left to thaw the guest.
    let last = beats()?;
    wait::until("a guest that writes again", Duration::from_secs(60), || {
        let now = beats()?;
        Ok(if now > last + 3 { Ok(()) } else { Err(format!("{now} writes, {last} when everything was dead")) })
    })?;
    ensure!(!process::alive(agent), "somebody has started the node agent meanwhile");
    cluster.up()?;
    let after = vm.vm()?;
    ensure!(before["metadata"]["uid"] == after["metadata"]["uid"], "the object is another one");
    vm.wait_condition("Ready", "True", START)?;
    same(&vm, &parts)?;
    vm.delete()?;
    Ok(())
}

#[test]
fn what_ended_while_the_control_plane_was_away_is_known_afterwards() -> Result<()> {
    e2e!();
    let (_turn, cluster) = alone()?;
    let vm = Vm::running(cluster, &vm("takeover-away").run("Once"))?;
    let parts = vm.parts()?;
    cluster.kill_up()?;
    process::destroy(parts.qemu)?;
    cluster.up()?;
    vm.wait_phase("Failed", START)?;
    vm.delete()?;
    Ok(())
}
