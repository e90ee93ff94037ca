//! Real guests on a real kube-apiserver: `virtfold up --kubeconfig` makes this machine a node of it. The same functions as on the
//! embedded cluster look at them.

use crate::e2e::{
    e2e,
    endings::{Then::*, Way::*, side_by_side},
};
use anyhow::{Result, ensure};
use chaos_tests::{
    e2e::{
        cluster::{Cluster, Options, leftovers},
        manifest::vm,
        vm::{START, Vm},
    },
    kubernetes::{self, FOR_NODES, Kubernetes},
};
use std::time::Duration;

/// A Kubernetes whose virtual machines run here. In the order in which they end.
fn joined() -> Result<(Cluster, Kubernetes)> {
    let k = Kubernetes::start_with(FOR_NODES)?;
    let arguments = ["--scheduler", "--stop-guests"].map(str::to_owned).to_vec();
    Ok((Cluster::join(&k, Options { arguments, ..Options::default() })?, k))
}

#[test]
fn guests_of_somebody_elses_kubernetes_live_and_end_as_their_run_strategies_say() -> Result<()> {
    e2e!();
    kubernetes!();
    let (cluster, _k) = joined()?;
    // Each way to end, each strategy; the whole table is gone through on the embedded cluster.
    side_by_side(
        &cluster,
        &[
            ("Always", &[(QemuKilled, Again), (PodDeleted, Again), (Stop, Off)]),
            ("RerunOnFailure", &[(LauncherKilled, Again), (PowerOff, Off)]),
            ("Manual", &[(GraceRunOut, Off), (Panic, Stays("Failed"))]),
            ("Once", &[(PowerOff, Stays("Succeeded")), (InstanceDeleted, Again)]),
        ],
    )?;
    a_halted_one_waits_and_answers(&cluster)?;
    ensure!(cluster.terminate(Duration::from_secs(90))? == Some(0), "{}", cluster.log_tail());
    let left = leftovers(&cluster.data);
    ensure!(left.is_empty(), "{}", left.join("\n"));
    Ok(())
}

/// Nothing runs before somebody starts it; then console, verbs and explanation, all through the aggregation layer.
fn a_halted_one_waits_and_answers(cluster: &Cluster) -> Result<()> {
    let say = |arguments: &[&str]| -> Result<String> {
        let (code, out, error) = cluster.virtfold(arguments)?;
        ensure!(code == 0, "virtfold {} ended with {code}: {out}{error}", arguments.join(" "));
        Ok(out)
    };
    let vm = Vm::apply(cluster, &vm("halted").run("Halted"))?;
    vm.wait_printable("Stopped", START)?;
    ensure!(vm.vmi().is_err(), "it has an instance");
    say(&["start", "halted"])?;
    vm.wait_phase("Running", START)?;
    ensure!(vm.vm()?["spec"]["runStrategy"] == "Always", "{}", vm.vm()?["spec"]);
    let mut console = vm.shell()?;
    ensure!(console.run("hostname")? == "halted");
    say(&["pause", "halted"])?;
    vm.wait_condition("Paused", "True", START)?;
    say(&["unpause", "halted"])?;
    vm.wait_condition("Paused", "", START)?;
    ensure!(console.run("echo on")? == "on");
    let told = say(&["explain", "vm/halted"])?;
    for words in ["halted is Running on node ", "user admin", "changed the run strategy from Halted to Always"] {
        ensure!(told.contains(words), "no '{words}' in {told}");
    }
    // Nobody but the control plane says what an instance is.
    let said = cluster.refused(&[
        "patch",
        "vmi",
        "halted",
        "--type=merge",
        "-p",
        r#"{"metadata":{"labels":{"kubevirt.io/nodeName":"x"}}}"#,
    ])?;
    ensure!(said.contains("reserved kubevirt.io/ labels"), "{said}");
    // The control plane dies and comes back: another leader, the same guest.
    let parts = vm.parts()?;
    drop(console);
    cluster.kill_up()?;
    cluster.up()?;
    say(&["pause", "halted"])?;
    vm.wait_condition("Paused", "True", START)?;
    say(&["unpause", "halted"])?;
    ensure!(vm.parts()?.qemu == parts.qemu && vm.shell()?.run("echo on")? == "on");
    say(&["stop", "halted", "--force", "--grace-period", "0"])?;
    vm.wait_printable("Stopped", START)?;
    ensure!(vm.vm()?["spec"]["runStrategy"] == "Halted", "{}", vm.vm()?["spec"]);
    vm.nothing_left(&parts)?;
    vm.delete().map(drop)
}
