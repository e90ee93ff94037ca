//! Every way in which a domain ends.

use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use proto::agent::{Cause, DomainState, InstructKind};

use crate::support::*;

#[test]
fn sigterm_is_a_graceful_shutdown() {
    let _turn = turn();
    let mut l = Launcher::with(Options { grace: Some(LONG), ..Options::default() });
    l.image(0, &guest().join("disk.qcow2"));
    l.start(&usual());
    l.until_console("login:");
    l.terminate();
    l.until_state(DomainState::ShuttingDown);
    l.ends(Cause::GuestShutdown);
}

#[test]
fn sigterm_without_a_domain_ends_at_once() {
    let mut l = Launcher::new();
    l.terminate();
    l.ends(Cause::Destroyed);
}

#[test]
fn the_button_is_pressed_again_for_a_guest_that_boots() {
    let _turn = turn();
    let mut l = usual_launcher();
    l.start(&usual());
    l.until_state(DomainState::Running);
    // The BIOS does not hear this one.
    l.tell(InstructKind::Shutdown, "s", LONG);
    l.ends(Cause::GuestShutdown);
}

#[test]
fn a_guest_that_does_not_hear_is_killed_at_its_grace() {
    let _turn = turn();
    let mut l = usual_launcher();
    l.start(&usual());
    l.until_state(DomainState::Running);
    let began = Instant::now();
    l.tell(InstructKind::Shutdown, "s", LONG);
    l.tell(InstructKind::Shutdown, "sooner", Duration::from_millis(600));
    let outcome = l.outcome();
    assert_eq!(outcome.cause(), Cause::KilledAfterGrace);
    assert!(began.elapsed() >= Duration::from_millis(600) && began.elapsed() < Duration::from_secs(10));
    assert_eq!(l.exit().code(), Some(0));
}

#[test]
fn a_paused_guest_is_woken_to_shut_down() {
    let _turn = turn();
    let mut l = usual_launcher();
    l.start(&usual());
    l.until_console("login:");
    assert!(l.verb("pause", "p", "").ok);
    // What it did so far is kept until somebody says that it is told.
    let named = |all: &[proto::launcher::Step]| {
        all.iter().map(|s| (s.name.clone(), s.operation.clone(), s.parent.clone())).collect::<Vec<_>>()
    };
    let step = |name: &str, operation: &str, parent: &str| (name.to_owned(), operation.to_owned(), parent.to_owned());
    let did = l.steps();
    let mut known = named(&did);
    // The guest's agent comes when it likes.
    known.retain(|(name, ..)| name != "guest-boot");
    let wanted =
        [step("start-hypervisor", "start", "launch"), step("launch", "start", "boot"), step("pause", "agent-verb", "")];
    assert_eq!(known, wanted);
    assert!(did.iter().all(|s| s.traceparent == TRACE && s.reason.is_empty() && s.start_unix_us <= s.end_unix_us));
    assert_eq!(did.iter().find(|s| s.name == "pause").unwrap().cell, "p", "a verb is told under its own id");
    l.told(did.last().unwrap().seq);
    assert!(l.steps().iter().all(|s| s.name == "guest-boot"));
    l.tell(InstructKind::Shutdown, "s", LONG);
    l.ends(Cause::GuestShutdown);
}

#[test]
fn a_killed_hypervisor_is_a_crash() {
    let _turn = turn();
    let mut l = usual_launcher();
    l.start(&usual());
    l.until_state(DomainState::Running);
    let pid = l.hypervisor_pid();
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    let outcome = l.ends(Cause::Crashed);
    assert_eq!(outcome.exit, 137);
}

#[test]
fn a_stopped_hypervisor_still_dies_at_a_kill() {
    let _turn = turn();
    let mut l = usual_launcher();
    l.start(&usual());
    l.until_state(DomainState::Running);
    let pid = l.hypervisor_pid();
    kill(Pid::from_raw(pid), Signal::SIGSTOP).unwrap();
    assert_eq!(l.hypervisor_pid(), pid, "a hypervisor that hangs keeps nobody from asking");
    // It is noticed without anybody's asking, and so is its return.
    l.until_state(DomainState::Deaf);
    kill(Pid::from_raw(pid), Signal::SIGCONT).unwrap();
    l.until_state(DomainState::Running);
    kill(Pid::from_raw(pid), Signal::SIGSTOP).unwrap();
    l.tell(InstructKind::Kill, "k", Duration::ZERO);
    l.ends(Cause::Destroyed);
    assert!(!alive(pid));
}

#[test]
fn the_hypervisor_dies_with_its_launcher() {
    let _turn = turn();
    let mut l = usual_launcher();
    l.start(&usual());
    l.until_state(DomainState::Running);
    let pid = l.hypervisor_pid();
    assert!(alive(pid));
    l.kill();
    wait("qemu is gone", || !alive(pid));
}

#[test]
fn a_panic_of_the_guest_is_told_from_a_crash() {
    let _turn = turn();
    let mut l = usual_launcher();
    let mut manifest = usual();
    manifest["spec"]["domain"]["devices"]["panicDevices"] = serde_json::json!([{"model": "pvpanic"}]);
    l.start(&manifest);
    l.until_console("login:");
    let mut console = std::os::unix::net::UnixStream::connect(l.path("share/console.sock")).unwrap();
    std::io::Write::write_all(&mut console, b"root\n").unwrap();
    l.until_console("# ");
    std::io::Write::write_all(&mut console, b"modprobe pvpanic-pci; echo c >/proc/sysrq-trigger\n").unwrap();
    l.ends(Cause::Panicked);
}

#[test]
fn an_outcome_that_nobody_fetches_does_not_hold_the_pod_for_ever() {
    let mut l = Launcher::new();
    l.terminate();
    assert_eq!(l.exit().code(), Some(0));
    assert!(std::fs::read_to_string(l.path("termination-log")).unwrap().contains("Destroyed"));
}
