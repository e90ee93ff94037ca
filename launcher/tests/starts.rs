//! Starts that must fail, with words that help; and disks of every kind.

use std::io::Write;
use std::process::Command;
use std::time::Duration;

use proto::agent::{Cause, DomainState, InstructKind};
use serde_json::{Value, json};

use crate::support::*;

fn fails(l: &mut Launcher, manifest: &Value, words: &[&str]) {
    assert_eq!(refusal(&l.start(manifest)), "accepted");
    let outcome = l.ends(Cause::StartFailed);
    for word in words {
        assert!(outcome.message.contains(word), "{word:?} is not in {:?}", outcome.message);
    }
}

fn one_disk(volume: Value) -> Value {
    vmi(json!({"disks": [{"name": "root", "disk": {"bus": "virtio"}}]}), json!([volume]))
}

#[test]
fn what_the_driver_cannot_do_is_named_by_its_field() {
    let mut l = Launcher::new();
    let mut manifest = vmi(json!({}), json!([]));
    manifest["spec"]["domain"]["devices"]["tpm"] = json!({});
    fails(&mut l, &manifest, &["spec.domain.devices.tpm"]);
}

#[test]
fn a_truncated_qcow2_is_told_from_a_sound_one() {
    let whole = std::fs::read(guest().join("disk.qcow2")).unwrap();
    for (cut, container) in [(whole.len() / 2, true), (60, true), (whole.len() / 2, false)] {
        let mut l = Launcher::new();
        let image = l.path("cut.qcow2");
        std::fs::File::create(&image).unwrap().write_all(&whole[..cut]).unwrap();
        let manifest = if container {
            l.image(0, &image);
            one_disk(json!({"name": "root", "containerDisk": {"image": "x"}}))
        } else {
            l.claim("root", &image);
            one_disk(json!({"name": "root", "persistentVolumeClaim": {"claimName": "x"}}))
        };
        fails(&mut l, &manifest, &["spec.domain.devices.disks[0]", "qcow2", "cut off"]);
    }
}

#[test]
fn an_image_that_names_a_file_of_the_host_is_refused() {
    let mut l = Launcher::new();
    let image = l.path("evil.qcow2");
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-u", "-F", "raw", "-b", "/etc/shadow"])
        .arg(&image)
        .arg("1M")
        .status();
    assert!(made.unwrap().success());
    l.image(0, &image);
    fails(&mut l, &one_disk(json!({"name": "root", "containerDisk": {"image": "x"}})), &["backing file"]);
}

#[test]
fn what_is_missing_is_named() {
    let mut l = Launcher::new();
    fails(&mut l, &one_disk(json!({"name": "root", "persistentVolumeClaim": {"claimName": "x"}})), &["disk.img"]);
    let mut l = Launcher::new();
    fails(&mut l, &one_disk(json!({"name": "root", "containerDisk": {"image": "x"}})), &["no folder disk/"]);
    let mut l = Launcher::new();
    let manifest = one_disk(json!({"name": "root", "cloudInitNoCloud": {"secretRef": {"name": "s"}}}));
    fails(&mut l, &manifest, &["secret", "userdata"]);
    let mut l = Launcher::new();
    let mut manifest = vmi(json!({}), json!([]));
    manifest["spec"]["domain"]["cpu"] = json!({"model": "NoSuchModel"});
    fails(&mut l, &manifest, &["NoSuchModel"]);
    let mut l = Launcher::new();
    let mut manifest = vmi(json!({}), json!([]));
    manifest["spec"]["domain"]["memory"]["guest"] = json!("4Pi");
    fails(&mut l, &manifest, &["qemu did not start", "memory"]);
}

#[test]
fn a_disk_in_use_is_not_started_from_twice() {
    let _turn = turn();
    let mut first = Launcher::new();
    first.claim("root", &guest().join("disk.raw"));
    let manifest = one_disk(json!({"name": "root", "persistentVolumeClaim": {"claimName": "x"}}));
    first.start(&manifest);
    first.until_state(DomainState::Running);
    let mut second = Launcher::new();
    std::fs::create_dir_all(second.path("private/vmi-disks")).unwrap();
    std::os::unix::fs::symlink(first.path("private/vmi-disks/root"), second.path("private/vmi-disks/root")).unwrap();
    fails(&mut second, &manifest, &["the image of disk root is in use by another process"]);
    // Who comes while the other one ends waits for that, and then runs; the wait is a step of its own.
    let mut third = Launcher::new();
    std::fs::create_dir_all(third.path("private/vmi-disks")).unwrap();
    std::os::unix::fs::symlink(first.path("private/vmi-disks/root"), third.path("private/vmi-disks/root")).unwrap();
    third.start(&manifest);
    third.until_tried(2);
    first.tell(InstructKind::Kill, "k", Duration::ZERO);
    first.ends(Cause::Destroyed);
    third.until_state(DomainState::Running);
    let steps = third.steps();
    let waits: Vec<_> = steps.iter().filter(|s| s.name == "wait-for-lock").map(|s| (&*s.parent, &*s.reason)).collect();
    assert_eq!(waits, [("start-hypervisor", "")], "{steps:?}");
    third.tell(InstructKind::Kill, "k", Duration::ZERO);
    third.ends(Cause::Destroyed);
}

#[test]
fn disks_on_every_bus() {
    let _turn = turn();
    let mut l = Launcher::new();
    l.claim("root", &guest().join("disk.raw"));
    l.claim("qcow", &guest().join("disk.qcow2"));
    std::fs::create_dir_all(l.path("private/secret/init-udata")).unwrap();
    std::fs::write(l.path("private/secret/init-udata/userdata"), "#!/bin/sh\necho from the secret\n").unwrap();
    let manifest = vmi(
        json!({"disks": [
            {"name": "root", "disk": {"bus": "sata"}, "bootOrder": 1},
            {"name": "qcow", "disk": {"bus": "virtio", "readonly": true}, "cache": "writethrough"},
            {"name": "usb", "disk": {"bus": "usb"}},
            {"name": "init", "cdrom": {"bus": "scsi"}},
            {"name": "none", "cdrom": {"bus": "sata"}}],
            "inputs": [{"name": "t", "type": "tablet", "bus": "usb"}],
            "watchdog": {"name": "w", "i6300esb": {"action": "reset"}},
            "rng": {}, "blockMultiQueue": false}),
        json!([
            {"name": "root", "persistentVolumeClaim": {"claimName": "a"}},
            {"name": "qcow", "dataVolume": {"name": "b"}},
            {"name": "usb", "emptyDisk": {"capacity": "1Mi"}},
            {"name": "init", "cloudInitConfigDrive": {"secretRef": {"name": "s"}}}]),
    );
    l.start(&manifest);
    l.until_console("from the secret");
    let note = |v: &str| std::fs::read_to_string(l.path("private/vmi-disks").join(v).join("disk.img.format")).unwrap();
    assert_eq!((note("root").trim(), note("qcow").trim()), ("raw", "qcow2"));
    l.tell(InstructKind::Shutdown, "s", LONG);
    l.ends(Cause::GuestShutdown);
}

#[test]
fn start_strategy_paused_waits_for_resume() {
    let _turn = turn();
    let mut l = usual_launcher();
    let mut manifest = usual();
    manifest["spec"]["startStrategy"] = json!("Paused");
    l.start(&manifest);
    l.until_state(DomainState::Paused);
    assert!(l.verb("unpause", "u", "").ok);
    l.until_console("virtfold-guest: booted");
    l.tell(InstructKind::Kill, "k", Duration::ZERO);
    l.ends(Cause::Destroyed);
}

#[test]
fn an_unauthorised_start_leaves_the_launcher_as_it_was() {
    let mut l = Launcher::new();
    let mut manifest = usual();
    manifest["status"]["activePods"] = json!({});
    assert_eq!(refusal(&l.start(&manifest)), "superseded");
    assert_eq!(l.domain().state(), DomainState::Absent);
    assert_eq!(refusal(&l.tell(InstructKind::Pause, "p", Duration::ZERO)), "failed");
    assert_eq!(refusal(&l.tell(InstructKind::Shutdown, "s", Duration::ZERO)), "done");
    let outcome = l.ends(Cause::Destroyed);
    assert!(outcome.message.contains("before it was started"));
}

/// What the test binary does when it is started as somebody who asks a launcher: prints what came of it.
#[test]
fn caller_process() {
    let Some(share) = std::env::var_os("VIRTFOLD_TEST_CALLER").map(std::path::PathBuf::from) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (info, probe) = runtime.block_on(async {
        let Ok(mut client) = connect(share.join("launcher.sock")).await else {
            return ("closed".into(), "closed".into());
        };
        let code = |status: tonic::Status| format!("{:?}", status.code());
        let info = client.info(proto::launcher::InfoRequest::default()).await.map_or_else(code, |_| "Ok".into());
        let probe = client.probe(proto::launcher::ProbeRequest::default()).await.map_or_else(code, |_| "Ok".into());
        (info, probe)
    });
    // A descriptor that is taken is acknowledged.
    let mut socket = std::os::unix::net::UnixStream::connect(share.join("fd.sock")).unwrap();
    let sent = launcher::send_descriptor(&socket, "x", &std::fs::File::open("/dev/null").unwrap());
    let mut answer = [0];
    let taken = sent.is_ok() && std::io::Read::read(&mut socket, &mut answer).is_ok_and(|n| n == 1);
    println!("info {info}, probe {probe}, descriptor {taken}.");
}

#[test]
fn a_launcher_listens_to_the_node_agent_alone() {
    let l = Launcher::with(Options { unprivileged: true, ..Options::default() });
    // However open the folder is: who is at the other end decides.
    for path in [l.dir.path().to_owned(), l.path("share"), l.path("share/launcher.sock"), l.path("share/fd.sock")] {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    }
    let call = |user: &str| {
        let mut command = Command::new("setpriv");
        command.args([&format!("--reuid={user}"), &format!("--regid={user}"), "--clear-groups"]);
        command.arg(std::env::current_exe().unwrap()).args(["--exact", "starts::caller_process", "--nocapture"]);
        let done = command.env("VIRTFOLD_TEST_CALLER", l.path("share")).output().unwrap();
        let said = String::from_utf8_lossy(&done.stdout).into_owned();
        let at = said.find("info ").unwrap_or_else(|| panic!("{said}{}", String::from_utf8_lossy(&done.stderr)));
        said[at..].split('.').next().unwrap().to_owned()
    };
    assert!(call("0").starts_with("info Ok, ") && call("0").ends_with("descriptor true"), "{}", call("0"));
    // As QEMU of this pod: the probes of the pod come as that user, and may do nothing else.
    let own = call("107");
    assert!(own.starts_with("info PermissionDenied, ") && own.ends_with("descriptor false"), "{own}");
    assert!(!own.contains("probe PermissionDenied") && !own.contains("probe closed"), "{own}");
    // As anybody else.
    let other = call("65534");
    assert!(
        !other.contains("Ok") && !other.contains("PermissionDenied") && other.ends_with("descriptor false"),
        "{other}"
    );
}
