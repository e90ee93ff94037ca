//! A node falls silent: its guest is waited for, until somebody fences the node; and a node that comes back does no harm.

use super::{TURN, e2e};
use anyhow::{Context, Result, ensure};
use chaos_tests::e2e::{
    cluster::{Cluster, Options, condition, items},
    manifest::vm,
    process,
    vm::Vm,
    wait,
};
use nix::sys::signal::Signal;
use std::{
    sync::PoisonError,
    time::{Duration, Instant},
};

/// From an agent that is stopped to a node that is taken for silent, which is a minute, and what follows from a fence.
const SILENCE: Duration = Duration::from_secs(180);
/// How long it is watched that nothing follows from the silence alone.
const WATCHED: Duration = Duration::from_secs(10);
const TAINT: &str = "node.kubernetes.io/out-of-service";

/// A process that was stopped; it goes on at the latest when the test ends, so that it can be ended, too.
struct Stopped(i32);

impl Stopped {
    fn new(pid: i32) -> Result<Self> {
        process::signal(pid, Signal::SIGSTOP)?;
        Ok(Self(pid))
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        process::signal(self.0, Signal::SIGCONT).ok();
    }
}

/// The launchers and the hypervisors of a VM, wherever they are.
fn of_vm(name: &str) -> (Vec<i32>, Vec<i32>) {
    let (mut launchers, mut guests) = (vec![], vec![]);
    for process in process::all() {
        let has = |word: &str| process.arguments.iter().any(|argument| argument == word);
        if process.name.starts_with("qemu-system") && process.arguments.join(" ").contains(&format!("_{name},")) {
            guests.push(process.pid);
        } else if has("launcher") && has(name) && !process.name.starts_with("runc") {
            launchers.push(process.pid);
        }
    }
    (launchers, guests)
}

#[test]
fn a_lost_node_keeps_its_guest_until_it_is_fenced() -> Result<()> {
    e2e!();
    let _turn = TURN.read().unwrap_or_else(PoisonError::into_inner);
    let cluster = Cluster::start(Options { nodes: 2, arguments: vec!["--stop-guests".into()], ..Options::default() })?;
    // Of this program alone: its processes are looked for by this name.
    let name = format!("node-loss-{}", std::process::id());
    let vm = Vm::running(&cluster, &vm(&name))?;
    vm.wait_printable("Running", SILENCE)?;
    let before = vm.parts()?;
    let own = (vec![before.launcher], vec![before.qemu]);
    let alone = || -> Result<()> {
        ensure!(of_vm(&name) == own, "beside {before:?}: {:?}\n{}", of_vm(&name), vm.story());
        let pods = cluster.json(&["get", "pods", "-l", "kubevirt.io=virt-launcher"])?;
        let uids: Vec<_> = items(&pods).iter().map(|pod| &pod["metadata"]["uid"]).collect();
        ensure!(uids == [before.pod_uid.as_str()], "pods {uids:?} instead of {before:?}\n{}", vm.story());
        Ok(())
    };

    // A process that ends is started again by `up`; one that is stopped is what a lost node looks like.
    let agent = Stopped::new(cluster.agent_pid(&before.node)?)?;
    vm.wait_vmi("the silence of its node", SILENCE, |vmi| {
        let (status, reason) = condition(vmi, "Ready");
        (status == "False" && ["NodeUnreachable", "NodeUnresponsive"].contains(&reason)).then_some(())
    })?;
    vm.wait_printable("Unknown", SILENCE)?;
    wait::until("the node to be not ready", SILENCE, || {
        let node = cluster.json(&["get", "node", &before.node])?;
        let ready = condition(&node, "Ready").0.to_owned();
        Ok(if ready == "Unknown" { Ok(()) } else { Err(ready) })
    })?;
    let explained = |what: &str| -> Result<String> {
        let (code, out, said) = cluster.virtfold(&["explain", "node", &before.node])?;
        ensure!(code == 0 && out.contains(what), "no '{what}' in {code}: {out}{said}");
        Ok(out)
    };
    explained(&format!("{} is NotReady and waits for the node to be ready", before.node))?;
    let watched = Instant::now();
    while watched.elapsed() < WATCHED {
        alone()?;
        let vmi = vm.vmi()?;
        let is = (&vmi["metadata"]["uid"], &vmi["status"]["phase"]);
        ensure!(is.0 == before.vmi_uid.as_str() && is.1 == "Running", "{is:?}\n{}", vm.story());
    }
    eprintln!(
        "silence was noticed, and waited for, {:.1} s after the VM was applied",
        vm.applied.elapsed().as_secs_f32()
    );

    // Somebody says that the node is off. (It is not, which is that somebody's fault, and ends as well as it can.)
    let fenced = Instant::now();
    cluster.ok(&["taint", "nodes", &before.node, &format!("{TAINT}=nodeshutdown:NoExecute")])?;
    vm.wait_vmi("another instance on the other node", SILENCE, |vmi| {
        let new =
            vmi["metadata"]["uid"] != before.vmi_uid.as_str() && vmi["status"]["nodeName"] != before.node.as_str();
        (new && vmi["status"]["phase"] == "Running").then_some(())
    })?;
    eprintln!("it runs elsewhere {:.1} s after the fence", fenced.elapsed().as_secs_f32());
    explained(&format!("{} is Fenced and waits for somebody to take the out-of-service taint off", before.node))?;
    let witness = vm.vm()?["metadata"]["annotations"]["virtfold.io/fenced"].as_str().unwrap_or_default().to_owned();
    ensure!(witness.contains(&before.vmi_uid) && witness.contains(&before.node), "{witness:?}\n{}", vm.story());
    vm.wait_printable("Running", SILENCE)?;
    let after = vm.parts()?;
    ensure!(process::alive(before.qemu), "who destroyed the guest of the stopped agent?");

    // The node comes back, and clears away what is nobody's any more.
    let woken = Instant::now();
    drop(agent);
    wait::until("the end of the stray", SILENCE, || {
        let (_, guests) = of_vm(&name);
        Ok(if guests == [after.qemu] { Ok(()) } else { Err(format!("{guests:?} instead of {after:?}")) })
    })
    .with_context(|| vm.story())?;
    eprintln!("the stray was destroyed {:.1} s after its agent woke", woken.elapsed().as_secs_f32());
    vm.nothing_left(&before).with_context(|| vm.story())?;
    cluster.ok(&["taint", "nodes", &before.node, &format!("{TAINT}-")])?;
    cluster.wait_ready()?;
    let now = vm.parts()?;
    ensure!(
        (&now.vmi_uid, now.launcher, now.qemu) == (&after.vmi_uid, after.launcher, after.qemu),
        "{after:?}, {now:?}"
    );
    vm.wait_condition("Ready", "True", SILENCE)?;
    vm.delete()?;
    ensure!(cluster.terminate(Duration::from_secs(60))? == Some(0), "{}", cluster.log_tail());
    Ok(())
}
