//! `kubectl`, unchanged.

use super::{e2e, shared};
use anyhow::{Context, Result, ensure};
use chaos_tests::e2e::{manifest::vm, vm::Vm, wait};
use std::{
    io::{BufRead, BufReader},
    process::Stdio,
    sync::mpsc::channel,
    time::Duration,
};

/// A VM that never starts is enough for most.
#[test]
fn kubectl_reads_changes_and_deletes() -> Result<()> {
    e2e!();
    let (_turn, cluster) = shared()?;
    let ok = |arguments: &[&str]| cluster.ok(arguments);
    let halted = Vm::apply(cluster, &vm("kubectl-halted").run("Halted"))?;
    let again = cluster.apply(&vm("kubectl-halted").run("Halted").text())?;
    ensure!(again.contains("unchanged"), "a second apply: {again}");
    halted.wait_printable("Stopped", Duration::from_secs(30))?;

    let wide = ok(&["get", "vm", "kubectl-halted", "-o", "wide"])?;
    ensure!(wide.contains("STATUS") && wide.contains("Stopped"), "{wide}");
    ensure!(ok(&["get", "vm", "kubectl-halted", "-o", "yaml"])?.contains("runStrategy: Halted"));
    ensure!(ok(&["get", "vm", "kubectl-halted", "-o", "jsonpath={.spec.runStrategy}"])? == "Halted");
    ensure!(ok(&["get", "vms", "-o", "name"])?.contains("virtualmachine.kubevirt.io/kubectl-halted"));
    ensure!(ok(&["describe", "vm", "kubectl-halted"])?.contains("Run Strategy:"));
    ensure!(
        ok(&["get", "vm", "-A", "--field-selector", "metadata.name=kubectl-halted", "--no-headers"])?.lines().count()
            == 1
    );

    ok(&["label", "vm", "kubectl-halted", "color=blue"])?;
    ok(&["annotate", "vm", "kubectl-halted", "note=hello"])?;
    ensure!(ok(&["get", "vm", "-l", "color=blue", "-o", "name"])?.lines().count() == 1);
    ok(&[
        "patch",
        "vm",
        "kubectl-halted",
        "--type",
        "merge",
        "-p",
        r#"{"metadata":{"annotations":{"note":"merged"}}}"#,
    ])?;
    ok(&[
        "patch",
        "vm",
        "kubectl-halted",
        "--type",
        "json",
        "-p",
        r#"[{"op":"replace","path":"/spec/template/spec/domain/memory/guest","value":"144Mi"}]"#,
    ])?;
    let object = halted.vm()?;
    ensure!(object["metadata"]["annotations"]["note"] == "merged", "{}", object["metadata"]);
    ensure!(object["spec"]["template"]["spec"]["domain"]["memory"]["guest"] == "144Mi");

    // An editor that changes one word.
    let mut edit = cluster.command(&["edit", "vm", "kubectl-halted"]);
    let done = edit.env("KUBE_EDITOR", "sed -i s/merged/edited/").output()?;
    ensure!(done.status.success(), "kubectl edit: {}", String::from_utf8_lossy(&done.stderr));
    ensure!(halted.vm()?["metadata"]["annotations"]["note"] == "edited");

    ensure!(ok(&["explain", "vm.spec.runStrategy"])?.contains("runStrategy"));
    let resources = ok(&["api-resources"])?;
    for kind in ["VirtualMachine", "VirtualMachineInstance", "Pod", "Node", "PersistentVolumeClaim", "Event"] {
        ensure!(
            resources.lines().any(|line| line.trim_end().ends_with(kind) || line.contains(&format!(" {kind} "))),
            "{kind}: {resources}"
        );
    }
    ensure!(ok(&["auth", "can-i", "create", "vms"])?.trim() == "yes");
    ensure!(ok(&["version"])?.contains("Server Version"));
    ok(&["wait", "vm/kubectl-halted", "--for", "jsonpath={.status.printableStatus}=Stopped", "--timeout", "20s"])?;

    let refused = cluster.refused(&["get", "vm", "not-there"])?;
    ensure!(refused.contains("(NotFound)") && refused.contains("\"not-there\" not found"), "{refused}");
    ok(&["delete", "vm", "kubectl-halted", "--timeout", "30s"])?;
    Ok(())
}

#[test]
fn kubectl_watches_reads_logs_and_leaves_orphans() -> Result<()> {
    e2e!();
    let (_turn, cluster) = shared()?;
    let mut watch = cluster
        .command(&["get", "vm", "-w", "--no-headers"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("start kubectl get -w")?;
    let output = BufReader::new(watch.stdout.take().context("no output")?);
    let (sender, lines) = channel();
    std::thread::spawn(move || output.lines().map_while(Result::ok).all(|line| sender.send(line).is_ok()));

    let vm = Vm::running(cluster, &vm("kubectl-watched"))?;
    let seen = wait::until("the watch", Duration::from_secs(30), || {
        let new: Vec<String> = lines.try_iter().filter(|line| line.starts_with("kubectl-watched")).collect();
        Ok(if new.iter().any(|line| line.contains("Running")) { Ok(new) } else { Err(format!("{new:?}")) })
    });
    watch.kill().ok();
    watch.wait().ok();
    seen?;

    cluster.ok(&["wait", "vmi/kubectl-watched", "--for", "condition=Ready", "--timeout", "60s"])?;
    let parts = vm.parts()?;
    let logs = cluster.ok(&["logs", &parts.pod, "-c", "compute"])?;
    ensure!(!logs.trim().is_empty(), "the launcher's log is empty");
    let events = cluster.ok(&["events", "--for", "vmi/kubectl-watched"])?;
    ensure!(events.contains("Started") || events.contains("Created"), "{events}");

    // The VM goes, the instance stays; then the instance goes by itself, at once.
    cluster.ok(&["delete", "vm", "kubectl-watched", "--cascade=orphan", "--timeout", "30s"])?;
    let vmi = vm.vmi()?;
    ensure!(
        vmi["metadata"]["uid"] == parts.vmi_uid.as_str() && vmi["metadata"]["deletionTimestamp"].is_null(),
        "{vmi}"
    );
    ensure!(vmi["metadata"]["ownerReferences"].as_array().is_none_or(Vec::is_empty), "{}", vmi["metadata"]);
    cluster.ok(&["delete", "vmi", "kubectl-watched", "--grace-period=0", "--timeout", "60s"])?;
    vm.nothing_left(&parts)
}
