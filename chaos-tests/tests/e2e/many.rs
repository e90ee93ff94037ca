//! Several VMs at once.

use super::{alone, e2e};
use anyhow::{Context, Result, bail, ensure};
use chaos_tests::e2e::{
    cluster::{Cluster, condition, items},
    manifest::vm,
    process,
    vm::{Parts, Vm},
    wait,
};
use serde_json::json;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

#[test]
fn five_vms_at_once() -> Result<()> {
    e2e!();
    let (_turn, cluster) = alone()?;
    let mut vms = Vec::new();
    for number in 1..=5 {
        vms.push(Vm::apply(cluster, &vm(&format!("many-{number}")).memory("96Mi"))?);
    }
    let mut addresses = BTreeSet::new();
    let mut nodes = BTreeSet::new();
    for vm in &vms {
        vm.wait_phase("Running", Duration::from_secs(180))?;
        addresses.insert(vm.ip()?);
        nodes.insert(vm.parts()?.node);
    }
    ensure!(addresses.len() == 5, "addresses: {addresses:?}");
    ensure!(nodes.len() == 2, "all are on {nodes:?}");
    for vm in &vms {
        vm.wait_condition("AgentConnected", "True", Duration::from_secs(180))?;
    }
    eprintln!("five guests up after {:.1} s", vms[0].applied.elapsed().as_secs_f32());
    for vm in vms {
        vm.delete()?;
    }
    Ok(())
}

/// What `kubectl get vmirs` shows: desired, current, ready.
fn counts(cluster: &Cluster, name: &str) -> Result<[String; 3]> {
    let table = cluster.ok(&["get", "vmirs", name])?;
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    let [head, row] = &rows[..] else { bail!("no table of one row: {table}") };
    ensure!(head[..] == ["NAME", "DESIRED", "CURRENT", "READY", "AGE"], "{table}");
    ensure!(row.len() == 5 && row[0] == name, "{table}");
    Ok([row[1], row[2], row[3]].map(str::to_owned))
}

/// Waits until the replica set has this many instances, all ready, and no other; they and their parts.
fn replicas<'a>(cluster: &'a Cluster, name: &str, wanted: usize) -> Result<BTreeMap<String, (Vm<'a>, Parts)>> {
    let shown = wanted.to_string();
    let names = wait::until(&format!("{wanted} replicas of {name}"), Duration::from_secs(180), || {
        let counts = counts(cluster, name)?;
        let list = cluster.json(&["get", "vmi", "-l", &format!("test={name}")])?;
        // The numbers are told a moment later than the instances change: both must be as wanted.
        let ready = items(&list).iter().filter(|vmi| condition(vmi, "Ready").0 == "True").count();
        let names: Vec<String> =
            items(&list).iter().map(|vmi| vmi["metadata"]["name"].as_str().unwrap_or_default().to_owned()).collect();
        let there = counts.iter().all(|count| *count == shown) && (names.len(), ready) == (wanted, wanted);
        Ok(if there { Ok(names) } else { Err(format!("{counts:?} {names:?}")) })
    })
    .with_context(|| {
        let (_, objects, _) = cluster.kubectl(&["get", "vmirs,vmi,pod,events"]).unwrap_or_default();
        format!("{objects}\n{}", cluster.log_tail())
    })?;
    let one = |name: String| {
        let vm = Vm { cluster, name, applied: Instant::now() };
        let parts = vm.parts()?;
        Ok((parts.vmi_uid.clone(), (vm, parts)))
    };
    names.into_iter().map(one).collect()
}

/// Waits until nothing is left of those that are not among these.
fn gone(before: &BTreeMap<String, (Vm, Parts)>, now: &BTreeMap<String, (Vm, Parts)>) -> Result<()> {
    before.iter().filter(|(uid, _)| !now.contains_key(*uid)).try_for_each(|(_, (vm, parts))| vm.nothing_left(parts))
}

#[test]
fn a_replica_set_keeps_its_number() -> Result<()> {
    e2e!();
    let (_turn, cluster) = alone()?;
    let name = "flock";
    let mut object = vm(name).memory("96Mi").grace(2).object;
    let template = object["spec"]["template"].take();
    let set = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceReplicaSet",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"replicas": 3, "selector": {"matchLabels": {"test": name}}, "template": template}});
    cluster.apply(&set.to_string())?;
    let three = replicas(cluster, name, 3)?;
    let (code, out, said) = cluster.virtfold(&["explain", "vmirs/flock"])?;
    ensure!(code == 0 && out.starts_with("flock is 3 of 3 ready, as it should be."), "{code} {out}{said}");

    cluster.ok(&["scale", "vmirs", name, "--replicas=2"])?;
    let two = replicas(cluster, name, 2)?;
    ensure!(two.keys().all(|uid| three.contains_key(uid)), "{:?} of {:?}", two.keys(), three.keys());
    gone(&three, &two)?;

    // One that ends is replaced, and the others are left alone.
    let (victim, (_, parts)) = two.first_key_value().context("two")?;
    process::destroy(parts.qemu)?;
    wait::until("another instance", Duration::from_secs(90), || {
        let list = cluster.json(&["get", "vmi", "-l", &format!("test={name}")])?;
        let uids: Vec<_> = items(&list).iter().map(|vmi| vmi["metadata"]["uid"].clone()).collect();
        Ok(if uids.iter().all(|uid| uid != victim.as_str()) { Ok(()) } else { Err(format!("{uids:?}")) })
    })?;
    let healed = replicas(cluster, name, 2)?;
    let kept: Vec<&String> = healed.keys().filter(|uid| two.contains_key(*uid)).collect();
    ensure!(kept.len() == 1 && kept[0] != victim, "{:?} after {:?}", healed.keys(), two.keys());
    gone(&two, &healed)?;
    for (uid, (_, parts)) in &healed {
        let same = two.get(uid).is_none_or(|(_, old)| (old.qemu, old.launcher) == (parts.qemu, parts.launcher));
        ensure!(same, "{uid} has other processes than before: {parts:?}");
    }

    cluster.ok(&["scale", "vmirs", name, "--replicas=0"])?;
    let none = replicas(cluster, name, 0)?;
    gone(&healed, &none)?;

    cluster.ok(&["scale", "vmirs", name, "--replicas=1"])?;
    let last = replicas(cluster, name, 1)?;
    cluster.ok(&["delete", "vmirs", name])?;
    wait::until("the end of what it owned", Duration::from_secs(90), || {
        let left = cluster.ok(&["get", "vmi,pod", "-l", &format!("test={name}"), "-o", "name"])?;
        Ok(if left.is_empty() { Ok(()) } else { Err(left) })
    })?;
    gone(&last, &none)
}
