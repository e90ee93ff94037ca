//! From a manifest to a guest that answers, and away again.

use super::{e2e, shared};
use anyhow::{Context, Result, ensure};
use chaos_tests::e2e::{
    cluster::{Cluster, condition},
    manifest::{VmManifest, vm},
    process,
    vm::{START, Vm},
    wait,
};
use serde_json::json;
use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

/// All that the components write about what they do: logs, and the records of journals.
fn written(cluster: &Cluster) -> Result<Vec<(PathBuf, String)>> {
    fn below(folder: &Path, found: &mut Vec<PathBuf>) -> std::io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let (path, kind) = (entry.path(), entry.file_type()?);
            // Folders of pods come and go, and their links lead anywhere.
            if kind.is_dir() {
                below(&path, found).ok();
            } else if kind.is_file() && path.file_name().is_some_and(|n| n.to_string_lossy().contains(".log")) {
                found.push(path);
            }
        }
        Ok(())
    }
    let mut logs = vec![cluster.log()];
    below(&cluster.data, &mut logs)?;
    let read = |path: PathBuf| fs::read(&path).ok().map(|b| (path, String::from_utf8_lossy(&b).into_owned()));
    let mut all: Vec<(PathBuf, String)> = logs.into_iter().filter_map(read).collect();
    for segment in telemetry::journal::segments(&cluster.data)? {
        let bytes = fs::read(&segment)?;
        let blocks = state::journal::pieces(&bytes).filter_map(|p| match p {
            state::journal::Piece::Block(block) => Some(block),
            state::journal::Piece::Damage { .. } => None,
        });
        let lines: Vec<u8> = blocks.flat_map(|b| b.raw().collect::<Vec<_>>().concat()).collect();
        all.push((segment, String::from_utf8_lossy(&lines).into_owned()));
    }
    Ok(all)
}

const SIZE: &str = "two-processors";

/// A machine whose size and habits come after it: its controller says so until then.
fn sized(cluster: &Cluster) -> Result<VmManifest> {
    let mut manifest = vm("start-client");
    manifest.object["spec"]["instancetype"] = json!({"name": SIZE});
    manifest.object["spec"]["preference"] = json!({"name": "plain", "kind": "VirtualMachinePreference"});
    manifest.spec()["domain"]["memory"] = json!(null);
    manifest.spec()["domain"]["devices"]["disks"] = json!([{"name": "system"}]);
    let (code, out, said) = cluster.feed(&["apply"], &manifest.text())?;
    ensure!(code == 0 && said.contains("could not be found"), "{code} {out} {said}");
    wait::until("the controller's word about the missing size", START, || {
        let vm = cluster.json(&["get", "vm", "start-client"])?;
        let seen = condition(&vm, "Failure") == ("True", "FailedFindInstancetype");
        Ok(if seen { Ok(()) } else { Err(vm["status"].to_string()) })
    })?;
    let version = "instancetype.kubevirt.io/v1beta1";
    let size = json!({"apiVersion": version, "kind": "VirtualMachineClusterInstancetype", "metadata": {"name": SIZE},
        "spec": {"cpu": {"guest": 2}, "memory": {"guest": "128Mi"}}});
    let habits = json!({"apiVersion": version, "kind": "VirtualMachinePreference", "metadata": {"name": "plain", "namespace": "default"},
        "spec": {"cpu": {"preferredCPUTopology": "cores"}, "devices": {"preferredDiskBus": "virtio"}}});
    cluster.apply(&size.to_string())?;
    cluster.apply(&habits.to_string())?;
    Ok(manifest)
}

#[test]
fn a_guest_starts_answers_and_leaves_nothing_behind() -> Result<()> {
    e2e!();
    let (_turn, cluster) = shared()?;
    let sized = sized(cluster)?;
    let mut manifest = vm("start-server").user_data("#!/bin/sh\necho by $(hostname) >/run/by-user-data\n");
    manifest.spec()["readinessProbe"] = json!({"httpGet": {"port": 80}, "periodSeconds": 1});
    let server = Vm::running(cluster, &manifest)?;
    eprintln!("running after {:.1} s", server.applied.elapsed().as_secs_f32());

    let ip = server.ip()?;
    let parts = server.parts()?;
    ensure!(parts.ip == ip, "the pod has {}, the VMI shows {ip}", parts.ip);
    server.wait_printable("Running", START)?;
    // Running, and not ready before its web server has answered.
    let booting = server.vmi()?;
    ensure!(condition(&booting, "Ready") == ("False", "ContainersNotReady"), "{}", booting["status"]);

    // The console, the name and the script of cloud-init, the address by DHCP.
    let mut console = server.shell()?;
    eprintln!("logged in after {:.1} s", server.applied.elapsed().as_secs_f32());
    ensure!(console.run("hostname")? == "start-server", "hostname: {}", console.run("hostname")?);
    ensure!(console.run("cat /run/by-user-data")? == "by start-server");
    let addresses = console.run("ifconfig eth0")?;
    ensure!(addresses.contains("inet addr:10.0.2.2 "), "{addresses}");

    // The guest agent's word in the status.
    server.wait_condition("AgentConnected", "True", START)?;
    let vmi = server.wait_vmi("guest OS info", START, |vmi| {
        (vmi["status"]["guestOSInfo"]["id"] == "virtfold-guest").then(|| vmi.clone())
    })?;
    ensure!(vmi["status"]["interfaces"][0]["interfaceName"] == "eth0", "{}", vmi["status"]["interfaces"]);
    ensure!(condition(&vmi, "AgentVersionNotSupported").0.is_empty(), "{}", vmi["status"]["conditions"]);
    ensure!(vmi["status"]["machine"]["type"].as_str().is_some_and(|t| t.contains("q35")), "{}", vmi["status"]);
    let volumes = json!([{"name": "cloudinit", "target": "vdb"}, {"name": "system", "target": "vda"}]);
    ensure!(vmi["status"]["volumeStatus"] == volumes, "{}", vmi["status"]["volumeStatus"]);
    ensure!(console.run("ls /sys/block | grep vd | tr '\\n' ' '")? == "vda vdb", "the guest calls its disks otherwise");
    let overhead = vmi["status"]["memory"]["memoryOverhead"].as_str().unwrap_or_default().parse::<u64>()?;
    ensure!((60 << 20..80 << 20).contains(&overhead), "{overhead}");
    let own = process::resident_kib(parts.qemu).unwrap_or_default() * 1024;
    ensure!(own < (128 << 20) + overhead + (128 << 20), "QEMU uses {own}, and was to use {overhead} beside its guest");
    server.wait_condition("Ready", "True", START)?;
    let trace = vmi["metadata"]["annotations"]["virtfold.io/traceparent"].as_str().unwrap_or_default();
    ensure!(trace.len() == 55, "the VMI carries no trace: {trace:?}");

    // QEMU has no more rights than it needs.
    let status = fs::read_to_string(format!("/proc/{}/status", parts.qemu))?;
    ensure!(status.lines().any(|line| line.starts_with("Uid:\t107\t107")), "{status}");
    ensure!(status.lines().any(|line| line == "CapEff:\t0000000000000000"), "{status}");

    // Another guest reaches it by its pod's address, wherever it runs.
    let client = Vm::running(cluster, &sized)?;
    let mut shell = client.shell()?;
    // Not wget: Debian's static busybox dies in glibc's getaddrinfo.
    let page = shell.run(&format!("printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 10 {ip} 80"))?;
    ensure!(page.contains("hello from start-server"), "{page}");

    // Neither what a user gave the guest nor what opens the API is in a log or in a journal.
    let kubeconfig = fs::read_to_string(cluster.kubeconfig())?;
    let key =
        kubeconfig.split("client-key-data: ").nth(1).and_then(|k| k.get(..60)).context("no key in the kubeconfig")?;
    let files = written(cluster)?;
    ensure!(
        files.iter().filter(|(_, text)| text.contains("start-server")).count() > 2,
        "too little is written to tell"
    );
    let token = regex::Regex::new(r"(?i)bearer [a-z0-9]|eyJ[A-Za-z0-9_-]{20,}\.")?;
    for (file, text) in &files {
        for secret in ["by-user-data", key] {
            ensure!(!text.contains(secret), "{} has {secret:?}", file.display());
        }
        let found = token.find(text);
        ensure!(found.is_none(), "{} has a token: {found:?}", file.display());
    }

    // That one has the size and the habits that it names, and they are recorded.
    ensure!(shell.run("grep -c ^processor /proc/cpuinfo")? == "2", "{}", shell.run("cat /proc/cpuinfo")?);
    let of = client.vmi()?;
    ensure!(of["spec"]["domain"]["cpu"]["cores"] == 2, "{}", of["spec"]["domain"]["cpu"]);
    ensure!(
        of["spec"]["domain"]["devices"]["disks"][0]["disk"]["bus"] == "virtio",
        "{}",
        of["spec"]["domain"]["devices"]
    );
    ensure!(of["metadata"]["annotations"]["kubevirt.io/cluster-instancetype-name"] == SIZE, "{}", of["metadata"]);
    let named = client.vm()?;
    ensure!(condition(&named, "Failure").0.is_empty(), "{}", named["status"]);
    for role in ["instancetypeRef", "preferenceRef"] {
        let record = named["status"][role]["controllerRevisionRef"]["name"].as_str().unwrap_or_default();
        let record = cluster.json(&["get", "controllerrevision", record])?;
        ensure!(record["data"]["spec"].is_object(), "{role}: {record}");
    }
    let raw = "/apis/subresources.kubevirt.io/v1/namespaces/default/virtualmachines/start-client/expand-spec";
    let whole = cluster.ok(&["get", "--raw", raw])?;
    ensure!(whole.contains(r#""guest":"128Mi""#) && !whole.contains(r#""instancetype""#), "{whole}");

    let table = cluster.ok(&["get", "vm,vmi,pod", "-o", "wide"])?;
    ensure!(table.contains("start-server") && table.contains(&ip) && table.contains("Running"), "{table}");

    client.delete()?;
    let took = server.delete()?;
    console.expect("virtfold-guest: poweroff", Duration::from_secs(1))?;
    ensure!(took < Duration::from_secs(25), "a guest that powers off took {took:?}");
    Ok(())
}
