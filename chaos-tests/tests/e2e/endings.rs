//! Every run strategy and every way to end: what a VM shows then, and whether another instance runs.
//!
//! One VM per strategy goes through all ways, one after the other; the strategies side by side.

use super::{e2e, shared};
use anyhow::{Context, Result, anyhow, ensure};
use chaos_tests::e2e::{
    cluster::{Cluster, items},
    manifest::{VmManifest, vm},
    process,
    vm::{Parts, START, Vm},
    wait,
};
use serde_json::json;

/// How a guest comes to its end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Way {
    /// By itself.
    PowerOff,
    /// Its kernel panics.
    Panic,
    /// QEMU is killed.
    QemuKilled,
    /// The launcher is killed.
    LauncherKilled,
    /// Asked by a stop, and it obeys.
    Stop,
    /// Asked by a stop, and it does not.
    GraceRunOut,
    /// Not asked.
    ForceStop,
    /// Somebody deletes the launcher pod.
    PodDeleted,
    /// Somebody deletes the instance.
    InstanceDeleted,
}
use Way::*;

/// What follows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Then {
    /// Another instance runs.
    Again,
    /// There is none any more.
    Off,
    /// The instance stays in this phase.
    Stays(&'static str),
}
use Then::*;

/// What the Event about the end says.
fn told(way: Way) -> &'static str {
    match way {
        PowerOff | Stop | PodDeleted | InstanceDeleted | ForceStop => "The virtual machine was shut down",
        Panic => "Panicked: the guest's kernel panicked",
        QemuKilled => "Crashed: the hypervisor was ended by signal 9",
        LauncherKilled => "OutcomeUnknown",
        GraceRunOut => "KilledAfterGrace",
    }
}

const ALWAYS: &[(Way, Then)] = &[
    (QemuKilled, Again),
    (LauncherKilled, Again),
    (PowerOff, Again),
    (Panic, Again),
    (PodDeleted, Again),
    (InstanceDeleted, Again),
    (Stop, Off),
    (GraceRunOut, Off),
    (ForceStop, Off),
];
const RERUN_ON_FAILURE: &[(Way, Then)] = &[
    (QemuKilled, Again),
    (LauncherKilled, Again),
    (Panic, Again),
    (PowerOff, Off),
    (PodDeleted, Off),
    (InstanceDeleted, Off),
    (Stop, Off),
    (ForceStop, Off),
];
const MANUAL: &[(Way, Then)] = &[
    (QemuKilled, Stays("Failed")),
    (LauncherKilled, Stays("Failed")),
    (PowerOff, Stays("Succeeded")),
    (Panic, Stays("Failed")),
    (PodDeleted, Stays("Succeeded")),
    (InstanceDeleted, Off),
    (Stop, Off),
    (GraceRunOut, Off),
    (ForceStop, Off),
];
const ONCE: &[(Way, Then)] = &[
    (QemuKilled, Stays("Failed")),
    (LauncherKilled, Stays("Failed")),
    (PowerOff, Stays("Succeeded")),
    (Panic, Stays("Failed")),
    (PodDeleted, Stays("Succeeded")),
    (InstanceDeleted, Again),
    (Stop, Off),
    (ForceStop, Off),
];

#[test]
fn what_follows_an_end_is_as_the_run_strategy_says() -> Result<()> {
    e2e!();
    let (_turn, cluster) = shared()?;
    let table = [("Always", ALWAYS), ("RerunOnFailure", RERUN_ON_FAILURE), ("Manual", MANUAL), ("Once", ONCE)];
    side_by_side(cluster, &table)
}

/// Each strategy goes through its ways, and an instance without a VM through its life.
pub(crate) fn side_by_side(cluster: &Cluster, table: &[(&str, &[(Way, Then)])]) -> Result<()> {
    std::thread::scope(|scope| {
        let strategies: Vec<_> =
            table.iter().map(|(strategy, ways)| scope.spawn(move || all(cluster, strategy, ways))).collect();
        let bare = scope.spawn(move || a_bare_instance(cluster));
        let mut result = bare.join().map_err(|_| anyhow!("the test of a bare instance panicked"))?;
        for strategy in strategies {
            let one = strategy.join().map_err(|_| anyhow!("the test of a strategy panicked"))?;
            result = result.and(one);
        }
        result
    })
}

fn manifest(name: &str) -> VmManifest {
    let mut manifest = vm(name);
    manifest.spec()["domain"]["devices"]["panicDevices"] = json!([{"model": "pvpanic"}]);
    manifest
}

/// All ways of one strategy.
fn all(cluster: &Cluster, strategy: &str, ways: &[(Way, Then)]) -> Result<()> {
    let name = format!("end-{}", strategy.to_lowercase());
    let vm = Vm::apply(cluster, &manifest(&name).run(strategy))?;
    if strategy == "Manual" {
        say(cluster, &["start", &name])?;
    }
    for (way, then) in ways {
        one(&vm, strategy, *way, *then)
            .with_context(|| format!("{strategy}, {way:?}, which should lead to {then:?}"))?;
    }
    // And the end of the VM itself is the end of all.
    if strategy == "Always" {
        return an_orphan(vm);
    }
    vm.delete().map(drop)
}

fn one(vm: &Vm, strategy: &str, way: Way, then: Then) -> Result<()> {
    vm.wait_phase("Running", START)?;
    vm.wait_printable("Running", START)?;
    let before = vm.parts()?;
    end(vm, way, &before)?;
    match then {
        Again => vm.wait_vmi("a new instance that runs", START, |vmi| {
            (vmi["metadata"]["uid"] != before.vmi_uid.as_str() && vmi["status"]["phase"] == "Running").then_some(())
        })?,
        Off => {
            vm.wait_printable("Stopped", START)?;
            no_instance(vm)?;
        }
        Stays(phase) => {
            vm.wait_phase(phase, START)?;
            vm.wait_printable("Stopped", START)?;
            ensure!(vm.vmi()?["metadata"]["uid"] == before.vmi_uid.as_str(), "another instance took its place");
        }
    }
    event(vm, &before.vmi_uid, told(way))?;
    match then {
        Again | Off => vm.nothing_left(&before)?,
        Stays(_) => ensure!(!process::alive(before.qemu), "QEMU lives"),
    }
    // On with the next way.
    match (strategy, then) {
        (_, Again) => {}
        ("Once", Stays(_)) => vm.cluster.ok(&["delete", "vmi", &vm.name, "--wait=false"]).map(drop)?,
        // A stop of this one is a change of its strategy.
        ("Once", Off) => {
            let patch = r#"{"spec": {"runStrategy": "Once"}}"#;
            vm.cluster.ok(&["patch", "vm", &vm.name, "--type=merge", "-p", patch]).map(drop)?;
        }
        (_, Off | Stays(_)) => say(vm.cluster, &["start", &vm.name])?,
    }
    if then != Again {
        vm.wait_vmi("a new instance", START, |vmi| (vmi["metadata"]["uid"] != before.vmi_uid.as_str()).then_some(()))?;
    }
    Ok(())
}

fn end(vm: &Vm, way: Way, parts: &Parts) -> Result<()> {
    match way {
        QemuKilled => process::destroy(parts.qemu),
        LauncherKilled => process::destroy(parts.launcher),
        PowerOff => type_last(vm, "poweroff -f"),
        Panic => type_last(vm, "modprobe pvpanic-pci; echo c >/proc/sysrq-trigger"),
        GraceRunOut => {
            vm.shell()?.run("touch /run/ignore-power-button /run/ignore-shutdown")?;
            say(vm.cluster, &["stop", &vm.name, "--grace-period", "2"])
        }
        ForceStop => say(vm.cluster, &["stop", &vm.name, "--force", "--grace-period", "0"]),
        Stop | PodDeleted | InstanceDeleted => {
            // A guest that has not booted would not hear the power button.
            vm.wait_condition("AgentConnected", "True", START)?;
            match way {
                PodDeleted => vm.cluster.ok(&["delete", "pod", &parts.pod, "--wait=false"]).map(drop),
                InstanceDeleted => vm.cluster.ok(&["delete", "vmi", &vm.name, "--wait=false"]).map(drop),
                _ => say(vm.cluster, &["stop", &vm.name]),
            }
        }
    }
}

/// Types what the guest does not survive, and stays until it is off: who leaves a console may take unsent bytes along.
fn type_last(vm: &Vm, line: &str) -> Result<()> {
    let qemu = vm.parts()?.qemu;
    let mut console = vm.shell()?;
    console.send(&format!("{line}\r"))?;
    wait::until("the end of QEMU", START, || {
        Ok(if process::alive(qemu) { Err("still there".to_owned()) } else { Ok(()) })
    })
}

fn no_instance(vm: &Vm) -> Result<()> {
    wait::until(&format!("the end of vmi {}", vm.name), START, || {
        let (code, out, error) = vm.cluster.kubectl(&["get", "vmi", &vm.name])?;
        Ok(if code != 0 && error.contains("NotFound") { Ok(()) } else { Err(format!("{out}{error}")) })
    })
    .map_err(|error| error.context(vm.story()))
}

/// The Event about the end of this instance.
fn event(vm: &Vm, uid: &str, says: &str) -> Result<()> {
    wait::until(&format!("an Event that says {says:?}"), START, || {
        let events = vm.cluster.json(&["get", "events"])?;
        let about: Vec<String> = items(&events)
            .iter()
            .filter(|e| e["involvedObject"]["uid"] == uid && e["reason"] == "Stopped")
            .map(|e| e["message"].as_str().unwrap_or_default().to_owned())
            .collect();
        Ok(if about.iter().any(|m| m.contains(says)) { Ok(()) } else { Err(format!("{about:?}")) })
    })
    .map_err(|error| error.context(vm.story()))
}

fn say(cluster: &Cluster, arguments: &[&str]) -> Result<()> {
    let (code, out, error) = cluster.virtfold(arguments)?;
    ensure!(code == 0, "virtfold {} ended with {code}: {out}{error}", arguments.join(" "));
    Ok(())
}

/// A VM is deleted and leaves its instance: that one runs on, belongs to nobody, and ends for good.
fn an_orphan(vm: Vm) -> Result<()> {
    vm.wait_phase("Running", START)?;
    let parts = vm.parts()?;
    vm.cluster.ok(&["delete", "vm", &vm.name, "--cascade=orphan"])?;
    let vmi = vm.vmi()?;
    ensure!(vmi["metadata"]["uid"] == parts.vmi_uid.as_str() && vmi["status"]["phase"] == "Running", "{vmi}");
    ensure!(vmi["metadata"]["ownerReferences"].as_array().is_none_or(Vec::is_empty), "{}", vmi["metadata"]);
    ensure!(process::alive(parts.qemu), "the guest died with its VM");
    vm.cluster.ok(&["delete", "vmi", &vm.name, "--grace-period=0", "--wait=false"])?;
    no_instance(&vm)?;
    vm.nothing_left(&parts)
}

/// An instance without a VM runs once; it stays as it ended until somebody deletes it.
fn a_bare_instance(cluster: &Cluster) -> Result<()> {
    let mut object = manifest("end-bare").object;
    let spec = object["spec"]["template"]["spec"].take();
    let vmi = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "end-bare", "namespace": "default"}, "spec": spec});
    cluster.apply(&vmi.to_string())?;
    let bare = Vm { cluster, name: "end-bare".into(), applied: std::time::Instant::now() };
    bare.wait_phase("Running", START)?;
    let parts = bare.parts()?;
    process::destroy(parts.qemu)?;
    bare.wait_phase("Failed", START)?;
    let ended = bare.vmi()?;
    ensure!(ended["status"]["reason"] == "Crashed", "{}", ended["status"]);
    ensure!(ended["metadata"].get("deletionTimestamp").is_none(), "nobody deleted it");
    cluster.ok(&["get", "pod", &parts.pod]).context("its pod stays with it")?;
    cluster.ok(&["delete", "vmi", "end-bare", "--wait=false"])?;
    no_instance(&bare)?;
    bare.nothing_left(&parts)
}
