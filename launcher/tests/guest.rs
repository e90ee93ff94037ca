//! One guest from start to power-off, with everything that can be asked of it on the way.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use proto::agent::{Cause, DomainState, InstructKind};
use serde_json::{Value, json};

use crate::support::*;

fn read_until(stream: &mut UnixStream, text: &str) -> String {
    stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let (mut seen, deadline) = (Vec::new(), Instant::now() + LONG);
    loop {
        let mut buffer = [0; 4096];
        match stream.read(&mut buffer) {
            Ok(0) => panic!("closed before {text:?}: {}", String::from_utf8_lossy(&seen)),
            Ok(n) => seen.extend_from_slice(&buffer[..n]),
            Err(_) => assert!(Instant::now() < deadline, "no {text:?} in {}", String::from_utf8_lossy(&seen)),
        }
        let all = String::from_utf8_lossy(&seen).into_owned();
        if all.contains(text) {
            return all;
        }
    }
}

#[test]
fn a_guest_from_start_to_power_off() {
    let _turn = turn();
    let mut l = Launcher::with(Options { unprivileged: true, ..Options::default() });
    l.image(0, &guest().join("disk.qcow2"));
    let began = Instant::now();
    let mut manifest = vmi(
        json!({"disks": [
            {"name": "root", "disk": {"bus": "virtio"}},
            {"name": "scratch", "disk": {"bus": "scsi"}, "serial": "scratch1"},
            {"name": "init", "disk": {"bus": "virtio"}}]}),
        json!([
            {"name": "root", "containerDisk": {"image": "guest"}},
            {"name": "scratch", "emptyDisk": {"capacity": "48Mi"}},
            {"name": "init", "cloudInitNoCloud": {"userData": "#!/bin/sh\necho user-data says hello\n"}}]),
    );
    manifest["spec"]["hostname"] = json!("web-1");
    assert_eq!(l.domain().state(), DomainState::Absent);
    assert_eq!(refusal(&l.start(&manifest)), "accepted");
    let running = l.until_state(DomainState::Running);
    println!("running after {:.2?}", began.elapsed());
    assert!(running.guest.as_ref().unwrap().machine_type.starts_with("pc-q35-"), "{running:?}");
    assert_eq!(running.accelerator, "tcg");

    // The latch holds.
    assert_eq!(refusal(&l.start(&manifest)), "done", "a repeated id gets its result");
    let mut again = instruct(InstructKind::Start, "start-again", &manifest);
    assert_eq!(refusal(&l.execute(again.clone(), facts())), "already-started");
    again.pod_uid = "another".into();
    assert_eq!(refusal(&l.execute(again.clone(), facts())), "superseded");
    again.pod_uid = POD.into();
    again.epoch = 4;
    assert_eq!(refusal(&l.execute(again, facts())), "lower-epoch");

    l.until_console("login:");
    println!("login prompt after {:.2?}", began.elapsed());
    let told = l.until("the agent and its facts", |d| {
        d.guest.as_ref().is_some_and(|g| {
            g.agent_connected && g.os.is_some() && !g.hostname.is_empty() && g.fs_freeze_status == "thawed"
        })
    });
    println!("agent after {:.2?}", began.elapsed());
    let facts_told = told.guest.unwrap();
    assert_eq!(facts_told.hostname, "web-1", "the cloud-init disk was read: {}", l.console());
    l.until_console("user-data says hello");
    println!("launcher: {}", rss(l.pid()));
    println!("RSS: launcher {} MiB, qemu {} MiB", rss_mib(l.pid()), {
        let p = l.hypervisor_pid();
        rss_mib(p)
    });

    // The console: a login in both directions, and the newest client wins.
    let mut first = UnixStream::connect(l.path("share/console.sock")).unwrap();
    read_until(&mut first, "login:");
    first.write_all(b"root\n").unwrap();
    read_until(&mut first, "# ");
    let mut second = UnixStream::connect(l.path("share/console.sock")).unwrap();
    read_until(&mut second, "login:");
    second.write_all(b"echo sum=$((40+2)); cat /sys/block/sd?/size\n").unwrap();
    let said = read_until(&mut second, "98304");
    assert!(said.contains("sum=42"));
    wait("the first client is displaced", || matches!(first.read(&mut [0; 4096]), Ok(0)));

    // VNC speaks.
    let mut vnc = UnixStream::connect(l.path("share/vnc.sock")).unwrap();
    let mut hello = [0; 12];
    vnc.read_exact(&mut hello).unwrap();
    assert_eq!(&hello, b"RFB 003.008\n");

    // Probes of the inside, for the pod's.
    assert_eq!(l.probe(&[], LONG), Ok((0, String::new())), "the agent answers");
    assert_eq!(l.probe(&["/bin/sh", "-c", "echo it is well"], LONG), Ok((0, "it is well".into())));
    assert_eq!(l.probe(&["/bin/sh", "-c", "echo so so; echo sick >&2; exit 3"], LONG), Ok((3, "sick".into())));
    let none = l.probe(&["/bin/nothing"], LONG).unwrap_err();
    assert!(none.contains("guest-exec"), "{none}");
    let endless = l.probe(&["/bin/sleep", "60"], Duration::from_secs(2)).unwrap_err();
    assert!(endless.contains("within 2s"), "{endless}");

    // Verbs, each at most once.
    assert!(l.verb("pause", "v1", "").ok);
    let paused = l.until_state(DomainState::Paused);
    assert_eq!(paused.paused_reason, "PausedByUser");
    // Who cannot answer because somebody stopped it is not ill.
    assert_eq!(l.probe(&[], LONG), Ok((0, String::new())));
    assert_eq!(l.probe(&["/bin/false"], LONG), Ok((0, String::new())));
    assert_eq!(l.verb("pause", "v2", "").reason, "already-paused");
    assert!(l.verb("unpause", "v3", "").ok);
    l.until_state(DomainState::Running);
    assert!(l.verb("pause", "v1", "").ok, "a repeated id gets its reply");
    assert_eq!(l.domain().state(), DomainState::Running, "and has no second effect");
    assert_eq!(l.verb("unpause", "v4", "").reason, "not-paused");
    assert_eq!(l.verb("fly", "v5", "").reason, "unsupported");
    assert_eq!(refusal(&l.tell(InstructKind::Pause, "pause", Duration::ZERO)), "done");
    l.until_state(DomainState::Paused);
    assert_eq!(refusal(&l.tell(InstructKind::Resume, "resume", Duration::ZERO)), "done");
    l.until_state(DomainState::Running);

    let info = l.verb("guestosinfo", "v6", "");
    assert!(info.ok, "{info:?}");
    let info: Value = serde_json::from_slice(&info.body).unwrap();
    assert_eq!(
        (info["hostname"].as_str(), info["kind"].as_str()),
        (Some("web-1"), Some("VirtualMachineInstanceGuestAgentInfo"))
    );
    assert!(!info["os"]["kernelRelease"].as_str().unwrap().is_empty());
    for verb in ["userlist", "filesystemlist"] {
        let reply = l.verb(verb, verb, "");
        assert!(reply.ok, "{verb}: {reply:?}");
        assert!(serde_json::from_slice::<Value>(&reply.body).unwrap()["items"].is_array());
    }

    // The screen.
    let shot = l.verb("screenshot", "v11", "");
    assert!(shot.ok && shot.body.starts_with(b"\x89PNG\r\n\x1a\n"), "{} {}", shot.reason, shot.message);
    let left: Vec<_> = std::fs::read_dir(l.path("ephemeral")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(!left.iter().any(|n| n.to_string_lossy().starts_with("screen-")), "{left:?}");

    // Frozen by us, thawed by itself: what writes to a disk stands still meanwhile.
    assert_eq!(l.verb("freeze", "v7", r#"{"unfreezeTimeout":"x"}"#).reason, "failed");
    second
        .write_all(b"(while :; do echo x >/persist/beat; echo be''at >/dev/console; usleep 50000; done) &\n")
        .unwrap();
    let beats = |l: &Launcher| l.console().matches("beat\r").count();
    wait("the guest writes", || beats(&l) > 2);
    let frozen = l.verb("freeze", "v8", r#"{"unfreezeTimeout":"6s"}"#);
    assert!(frozen.ok, "{frozen:?}");
    let (began, last) = (Instant::now(), beats(&l));
    let freeze = |d: &proto::agent::Domain| d.guest.as_ref().map(|g| g.fs_freeze_status.clone()).unwrap_or_default();
    l.until("frozen", |d| freeze(d) == "frozen");
    // The last sign may have been on its way.
    while began.elapsed() < Duration::from_secs(4) {
        assert!(beats(&l) <= last + 1, "it writes on a frozen file system");
        std::thread::sleep(Duration::from_millis(100));
    }
    l.until("thawed by itself", |d| freeze(d) == "thawed");
    assert!((Duration::from_secs(5)..Duration::from_secs(30)).contains(&began.elapsed()), "{:?}", began.elapsed());
    wait("the guest writes again", || beats(&l) > last + 3);
    assert!(l.verb("freeze", "v9", "").ok && l.verb("unfreeze", "v10", "").ok);

    let before = l.domain().seq;
    let began = Instant::now();
    assert_eq!(refusal(&l.tell(InstructKind::Shutdown, "stop", Duration::from_secs(60))), "accepted");
    let outcome = l.ends(Cause::GuestShutdown);
    println!("powered off after {:.2?}", began.elapsed());
    assert!(outcome.seq > before);
}

#[test]
fn a_reboot_by_button_agent_or_reset_keeps_the_process() {
    let _turn = turn();
    let mut l = usual_launcher();
    l.start(&usual());
    let boots = |l: &Launcher, n: usize| {
        wait_long(&format!("boot {n}"), || l.console().matches("virtfold-guest: booted").count() >= n);
    };
    let connected = |d: &proto::agent::Domain| d.guest.as_ref().is_some_and(|g| g.agent_connected);
    boots(&l, 1);
    let pid = l.hypervisor_pid();
    l.until("the agent", connected);
    assert!(l.verb("reset", "r1", "").ok);
    boots(&l, 2);
    l.until("the agent is gone and back", connected);
    assert!(l.verb("softreboot", "r2", "").ok);
    boots(&l, 3);
    // Without the agent the reboot is a power-off that is not the end.
    l.until("the agent again", connected);
    wait_long("a prompt of the third boot", || {
        l.console().rfind("login:") > l.console().rfind("virtfold-guest: booted")
    });
    let mut console = UnixStream::connect(l.path("share/console.sock")).unwrap();
    console.write_all(b"root\n").unwrap();
    read_until(&mut console, "# ");
    console.write_all(b"/sbin/guest-agent stop\n").unwrap();
    l.until("the agent is gone", |d| !connected(d));
    assert!(l.verb("softreboot", "r3", "").ok);
    boots(&l, 4);
    assert_eq!((l.hypervisor_pid(), l.domain().state()), (pid, DomainState::Running));
    l.tell(InstructKind::Kill, "kill", Duration::ZERO);
    l.ends(Cause::Destroyed);
}

fn wait_long(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not within {LONG:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
