//! `virtfold explain` on a real cluster: its words, `kubectl describe`'s words, and what else the command promises.

use super::{bad::complains, e2e, shared};
use anyhow::{Context, Result, ensure};
use chaos_tests::e2e::{
    cluster::virtfold,
    manifest::vm,
    vm::{START, Vm},
    wait,
};
use serde_json::{Value, json};
use std::process::Command;

fn lines(explanation: &Value) -> Vec<String> {
    let history = explanation["history"].as_array().cloned().unwrap_or_default();
    history
        .iter()
        .map(|h| format!("{} {}: {}", h["actor"]["kind"], h["actor"]["name"], h["message"]).replace('"', ""))
        .collect()
}

#[test]
fn a_person_can_ask_why() -> Result<()> {
    e2e!();
    let (_turn, cluster) = shared()?;
    let vm = Vm::running(cluster, &vm("why"))?;
    vm.wait_printable("Running", START)?;
    vm.wait_condition("AgentConnected", "True", START)?;
    let parts = vm.parts()?;
    let ask = |arguments: &[&str]| -> Result<Value> {
        let (code, out, said) = cluster.virtfold(arguments)?;
        ensure!(code == 0, "{arguments:?}: {code} {said}");
        serde_json::from_str(&out).with_context(|| format!("{arguments:?}: {out}"))
    };
    let e = ask(&["explain", "vm/why", "-o", "json"])?;
    let (node, told) = (&parts.node, lines(&e));
    let mut at = 0;
    for line in [
        "user admin: created the virtual machine (run strategy Always)".to_owned(),
        "controller null: created the instance".into(),
        format!("controller null: created the launcher pod {}", parts.pod),
        format!("scheduler null: placed the launcher pod on node {node}"),
        format!("kubelet {node}: started the launcher"),
        format!("controller null: allowed node {node} to start the guest"),
        format!("agent {node}: runs the guest"),
        "guest null: its guest agent answers".into(),
    ] {
        let found = told[at..].iter().position(|l| l.starts_with(&line));
        at += found.with_context(|| format!("no '{line}' after the {at}th of {told:#?}"))?;
    }
    ensure!(e["waits"] == json!([]) && e["live"] == true, "{e}");
    let steps: Vec<_> = e["steps"].as_array().into_iter().flatten().map(|s| s["step"].as_str().unwrap_or("")).collect();
    ensure!(
        steps == ["create-vmi", "place-pod", "prepare-pod", "authorise", "boot", "publish", "guest-agent"],
        "{steps:?}"
    );
    // The pod and the instance lead to the same machine, and so does the journal without a cluster.
    for name in [format!("pod/{}", parts.pod), "vmi/why".into()] {
        ensure!(lines(&ask(&["explain", &name, "-o", "json"])?) == told, "{name}");
    }
    let journal = cluster.data.join("journal").display().to_string();
    let (name, recorded) = (format!("pod/{}", parts.pod), ["explain", "vm/why", "-o", "json", "--journal", &journal]);
    for arguments in [recorded, ["explain", &name, "-o", "json", "--journal", &journal]] {
        let e = ask(&arguments)?;
        ensure!(lines(&e) == told && e["live"] == false, "{e}");
    }
    // For people, without colours where nobody looks.
    let (code, out, _) = cluster.virtfold(&["explain", "vm", "why"])?;
    ensure!(code == 0 && out.starts_with("why is Running on node ") && !out.contains('\x1b'), "{out}");
    ensure!(out.contains("Steps of the last start") && out.contains("user admin"), "{out}");
    for (name, message) in
        [("vm/nobody", "virtualmachine.kubevirt.io \"nobody\" not found"), ("pod/nobody", "pods \"nobody\" not found")]
    {
        let (code, out, said) = cluster.virtfold(&["explain", name])?;
        ensure!(code == 1 && out.is_empty() && said.contains(message), "{name}: {code} {out} {said}");
    }
    // As kubectl's plugin.
    let plugins = tempfile::tempdir()?;
    std::os::unix::fs::symlink(virtfold()?, plugins.path().join("kubectl-virtfold"))?;
    let path = format!("{}:{}", plugins.path().display(), std::env::var("PATH").unwrap_or_default());
    let run = |command: &mut Command| -> Result<String> {
        let done = command.env("PATH", &path).output()?;
        ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        Ok(String::from_utf8_lossy(&done.stdout).into_owned())
    };
    let said = run(&mut cluster.command(&["virtfold", "explain", "vm/why"]))?;
    ensure!(said.starts_with("why is Running on node "), "{said}");
    let help = run(&mut cluster.command(&["virtfold", "explain", "--help"]))?;
    ensure!(help.contains("Usage: kubectl virtfold explain"), "{help}");

    // Somebody stops it, and that is the answer then.
    let (code, _, said) = cluster.virtfold(&["stop", "why"])?;
    ensure!(code == 0, "{said}");
    vm.wait_printable("Stopped", START)?;
    let e = ask(&["explain", "vm/why", "-o", "json"])?;
    let told = lines(&e);
    for line in
        ["user admin: changed the run strategy from Always to Halted", "guest null: shut down, as it was asked to"]
    {
        ensure!(told.iter().any(|l| l == line), "no '{line}' in {told:#?}");
    }
    ensure!(e["waits"][0]["kind"] == "person" && e["waits"][0]["unblock"] == "'virtfold start why'", "{e}");
    vm.delete()?;
    Ok(())
}

#[test]
fn what_keeps_a_pod_from_starting_is_named() -> Result<()> {
    e2e!();
    let (_turn, cluster) = shared()?;
    let mut choosy = vm("why-choosy");
    choosy.spec()["nodeSelector"] = json!({"example.com/disk": "fast"});
    let choosy = Vm::apply(cluster, &choosy)?;
    complains(&choosy, &["ErrorUnschedulable"], &["node affinity/selector"], "label a node")?;
    choosy.delete()?;
    // A CPU that no node here has; one that the nodes have is found by the labels that they were given.
    let node = cluster.json(&["get", "nodes"])?["items"][0].clone();
    let models: Vec<String> = node["metadata"]["labels"]
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(label, _)| label.strip_prefix("cpu-model.node.kubevirt.io/").map(str::to_owned))
        .collect();
    ensure!(models.iter().any(|m| m == "Nehalem"), "{models:?}");
    let mut old = vm("why-cpu");
    old.spec()["domain"]["cpu"] = json!({"model": "Zilog-Z80"});
    let old = Vm::apply(cluster, &old)?;
    complains(&old, &["ErrorUnschedulable"], &["node affinity/selector"], "a CPU model")?;
    old.delete()?;

    let secret = json!({"cloudInitNoCloud": {"secretRef": {"name": "why-no-secret"}}});
    let keyless = Vm::apply(cluster, &vm("why-secret").disk("init", json!({"disk": {"bus": "virtio"}}), secret))?;
    complains(&keyless, &["Starting"], &["why-no-secret"], "create the Secret")?;
    keyless.delete()?;

    // Why a claim has no volume, its own Events tell.
    let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "why-unbound", "namespace": "default"},
        "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "why-no-class",
                 "resources": {"requests": {"storage": "8Mi"}}}});
    cluster.apply(&claim.to_string())?;
    let volume = json!({"persistentVolumeClaim": {"claimName": "why-unbound"}});
    let unbound = Vm::apply(cluster, &vm("why-volume").disk("data", json!({"disk": {"bus": "virtio"}}), volume))?;
    complains(&unbound, &["ErrorUnschedulable"], &["unbound", "why-unbound"], "kubectl describe pvc why-unbound")?;
    let (_, out, said) = cluster.virtfold(&["explain", "why-volume"])?;
    ensure!(out.contains("why-no-class") && out.contains("not found"), "{out}{said}");
    unbound.delete()?;
    cluster.ok(&["delete", "pvc", "why-unbound"])?;

    // A quota that is used up, in a namespace of its own.
    cluster.apply(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "why-small"}}).to_string())?;
    let quota = json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small", "namespace": "why-small"},
        "spec": {"hard": {"pods": "0"}}});
    cluster.apply(&quota.to_string())?;
    wait::until("the quota's usage", START, || {
        let quota = cluster.json(&["get", "quota", "small", "-n", "why-small"])?;
        Ok(if quota["status"]["hard"]["pods"] == "0" { Ok(()) } else { Err(quota["status"].to_string()) })
    })?;
    let mut limited = vm("why-limited");
    limited.object["metadata"]["namespace"] = "why-small".into();
    cluster.apply(&limited.text())?;
    wait::until("an explanation", START, || {
        let (_, out, said) = cluster.virtfold(&["explain", "vm/why-limited", "-n", "why-small", "-o", "json"])?;
        let e: Value = serde_json::from_str(&out).unwrap_or_default();
        let (message, remedy) = (e["waits"][0]["message"].as_str(), e["waits"][0]["unblock"].as_str());
        let named = message.is_some_and(|m| m.contains("exceeded quota: small"))
            && remedy.is_some_and(|r| r.contains("raise the ResourceQuota"));
        let (_, described, _) = cluster.kubectl(&["describe", "vmi", "why-limited", "-n", "why-small"])?;
        let same = message.is_some_and(|m| described.matches(m).count() >= 2);
        Ok(if named && same { Ok(()) } else { Err(format!("{out}{said}\n{described}")) })
    })?;
    cluster.ok(&["delete", "namespace", "why-small"])?;
    Ok(())
}
