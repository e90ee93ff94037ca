//! `virtfold up` itself: how it begins, how it ends, and what it says when it cannot.

use super::{alone, e2e};
use anyhow::{Context, Result, ensure};
use chaos_tests::e2e::{
    cluster::{self, Cluster, Options},
    leaks,
    manifest::vm,
    process,
    vm::Vm,
    wait,
};
use std::{
    fs,
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

/// Runs `virtfold up`, which must end by itself with an error; returns its exit code and what it said.
fn fails(data: &Path, port: u16, change: impl FnOnce(&mut Command)) -> Result<(i32, String)> {
    let mut command = Command::new(cluster::virtfold()?);
    command.arg("up").arg("--data-dir").arg(data).args(["--listen", &format!("127.0.0.1:{port}")]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    change(&mut command);
    let mut child = command.spawn().context("start virtfold up")?;
    let ended = wait::until("an error of virtfold up", Duration::from_secs(60), || {
        Ok(child.try_wait()?.ok_or_else(|| "still running".to_owned()))
    });
    if ended.is_err() {
        child.kill()?;
    }
    let done = child.wait_with_output()?;
    let said = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    leaks::sweep(data)?;
    ended.with_context(|| said.clone())?;
    let code = done.status.code().unwrap_or(-1);
    ensure!(code > 0, "ended with {code}: {said}");
    ensure!(!said.contains("panicked"), "{said}");
    Ok((code, said))
}

fn folder() -> Result<std::path::PathBuf> {
    Ok(tempfile::Builder::new().prefix("virtfold-e2e-").tempdir()?.keep())
}

#[test]
fn up_says_why_it_cannot_start() -> Result<()> {
    e2e!();
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let port = taken.local_addr()?.port();
    let (_, said) = fails(&folder()?, port, |_| {})?;
    ensure!(said.contains(&port.to_string()) && said.to_lowercase().contains("in use"), "port taken: {said}");

    let empty = tempfile::tempdir()?;
    for tool in ["ip", "nft", "runc", "qemu-system-x86_64", "qemu-img"] {
        if let Some(path) = ["/usr/bin", "/usr/sbin", "/sbin", "/bin"]
            .iter()
            .map(|dir| Path::new(dir).join(tool))
            .find(|path| path.exists())
        {
            std::os::unix::fs::symlink(path, empty.path().join(tool))?;
        }
    }
    let (_, said) = fails(&folder()?, cluster::free_port()?, |command| {
        command.env("PATH", empty.path());
    })?;
    ensure!(said.contains("etcd") && (said.contains("not found") || said.contains("No such file")), "no etcd: {said}");
    Ok(())
}

#[test]
fn a_second_up_on_one_data_folder_is_refused() -> Result<()> {
    e2e!();
    let (_turn, cluster) = alone()?;
    let mut second = Command::new(cluster::virtfold()?)
        .args(["up", "--listen", &format!("127.0.0.1:{}", cluster::free_port()?)])
        .arg("--data-dir")
        .arg(&cluster.data)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let ended = wait::until("the refusal", Duration::from_secs(30), || {
        Ok(second.try_wait()?.ok_or_else(|| "still running".to_owned()))
    });
    if ended.is_err() {
        second.kill()?;
    }
    let done = second.wait_with_output()?;
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    ensure!(!ended?.success(), "{said}");
    ensure!(said.contains(&*cluster.data.to_string_lossy()), "{said}");
    cluster.ok(&["get", "nodes"])?;
    Ok(())
}

#[test]
fn up_keeps_its_data_and_leaves_the_machine_clean() -> Result<()> {
    e2e!();
    let cluster = Cluster::start(Options { arguments: vec!["--stop-guests".into()], ..Options::default() })?;
    let mode = fs::metadata(cluster.kubeconfig())?.permissions().mode() & 0o777;
    ensure!(mode == 0o600, "the kubeconfig has mode {mode:o}");
    let mode = fs::metadata(&cluster.data)?.permissions().mode() & 0o777;
    ensure!(mode == 0o700, "the data folder has mode {mode:o}");

    cluster.ok(&["create", "configmap", "kept", "--from-literal=key=value"])?;
    let vm = Vm::running(&cluster, &vm("up-guest"))?;
    let parts = vm.parts()?;
    let code = cluster.terminate(Duration::from_secs(90))?;
    ensure!(code == Some(0), "virtfold up ended with {code:?}:\n{}", cluster.log_tail());
    ensure!(!process::alive(parts.qemu), "the guest was not stopped");
    wait::until("a clean machine", Duration::from_secs(30), || {
        let left = cluster::leftovers(&cluster.data);
        Ok(if left.is_empty() { Ok(()) } else { Err(left.join("\n")) })
    })?;

    cluster.up()?;
    ensure!(cluster.ok(&["get", "configmap", "kept", "-o", "jsonpath={.data.key}"])? == "value");
    drop(vm);
    ensure!(cluster.terminate(Duration::from_secs(90))? == Some(0));

    // Data that cannot be read is said, not overwritten.
    let database = cluster.data.join("etcd/member/snap/db");
    fs::write(&database, b"this is no database")?;
    for entry in fs::read_dir(cluster.data.join("etcd/member/wal"))?.flatten() {
        fs::write(entry.path(), b"nor is this a log")?;
    }
    let mut child = cluster.spawn()?;
    let ended = wait::until("an error of virtfold up", Duration::from_secs(90), || {
        Ok(child.try_wait()?.ok_or_else(|| "still running".to_owned()))
    });
    child.kill().ok();
    child.wait()?;
    ensure!(!ended?.success());
    let said = cluster.log_tail();
    ensure!(said.contains("etcd"), "{said}");
    ensure!(fs::read(&database)? == b"this is no database", "the damaged data was written over");
    Ok(())
}

#[test]
fn down_takes_away_what_up_and_its_guests_made() -> Result<()> {
    e2e!();
    let cluster = Cluster::start(Options { nodes: 2, ..Options::default() })?;
    let vm = Vm::running(&cluster, &vm("up-down"))?;
    let parts = vm.parts()?;
    // Without being asked, the end of the control plane is not the end of the guests.
    ensure!(cluster.terminate(Duration::from_secs(60))? == Some(0), "{}", cluster.log_tail());
    ensure!(process::alive(parts.qemu) && process::alive(parts.launcher), "the guest was stopped");
    let (code, out, said) = cluster.virtfold(&["down", "--data-dir", &cluster.data.to_string_lossy()])?;
    ensure!(code == 0, "virtfold down ended with {code}: {out}{said}");
    ensure!(!process::alive(parts.qemu), "the guest lives on");
    let left = cluster::leftovers(&cluster.data);
    ensure!(left.is_empty(), "left behind:\n{}", left.join("\n"));
    Ok(())
}
