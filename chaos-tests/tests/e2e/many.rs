//! Several VMs at once.

use super::{alone, e2e};
use anyhow::{Result, ensure};
use chaos_tests::e2e::{manifest::vm, vm::Vm};
use std::{collections::BTreeSet, time::Duration};

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
