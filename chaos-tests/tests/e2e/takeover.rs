//! The control plane dies; the guests do not notice.

use super::{alone, e2e};
use anyhow::{Context, Result, ensure};
use chaos_tests::e2e::{
    manifest::vm,
    process,
    vm::{Parts, START, Vm},
    wait,
};
use std::time::Duration;

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

#[test]
fn a_control_plane_that_is_killed_goes_on_with_running_guests() -> Result<()> {
    e2e!();
    let (_turn, cluster) = alone()?;
    let (vm, parts) = marked(cluster, "takeover-up")?;
    let before = vm.vm()?;
    let agent = cluster.agent_pid(&parts.node)?;
    cluster.kill_up()?;
    ensure!(process::alive(parts.qemu) && process::alive(parts.launcher), "the guest died with the control plane");
    ensure!(process::alive(agent), "the node agent died with the control plane");
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
