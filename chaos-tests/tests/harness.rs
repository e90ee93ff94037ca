//! The harness itself: a leak checker that finds nothing proves nothing.

use chaos_tests::e2e::{leaks, process, wait};
use std::{
    fs,
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

/// A process with these words in its arguments.
fn sleeper(word: &str) -> std::process::Child {
    Command::new("/bin/sleep").arg0(format!("sleep-{word}")).arg("600").stdin(Stdio::null()).spawn().unwrap()
}

#[test]
fn what_a_vm_leaves_is_found() {
    let data = tempfile::tempdir().unwrap();
    let uid = format!("5eed{:08x}", std::process::id());
    assert_eq!(leaks::holding(data.path(), &[&uid]), Vec::<String>::new());

    let mut child = sleeper(&uid);
    let namespace = format!("vf-harness-{uid}");
    assert!(Command::new("ip").args(["netns", "add", &namespace]).status().unwrap().success());
    let pod = data.path().join("nodes/node-1/pods").join(&uid);
    fs::create_dir_all(&pod).unwrap();
    let socket = std::os::unix::net::UnixListener::bind(pod.join("launcher.sock")).unwrap();
    assert!(Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&pod).status().unwrap().success());

    let found = leaks::holding(data.path(), &[&uid]).join("\n");
    for kind in ["process ", "network namespace ", "file ", "socket ", "mount "] {
        assert!(found.lines().any(|line| line.starts_with(kind)), "no {kind}in:\n{found}");
    }

    assert!(Command::new("umount").arg(&pod).status().unwrap().success());
    drop(socket);
    fs::remove_dir_all(data.path().join("nodes")).unwrap();
    assert!(Command::new("ip").args(["netns", "delete", &namespace]).status().unwrap().success());
    process::destroy(child.id() as i32).unwrap();
    child.wait().unwrap();
    assert_eq!(leaks::holding(data.path(), &[&uid]), Vec::<String>::new());
}

#[test]
fn the_broom_takes_a_cluster_away() {
    let data = tempfile::tempdir().unwrap().keep();
    let id = leaks::id_of(&data);
    let by_path = sleeper(&data.to_string_lossy());
    let namespace = format!("vf-{id}-node-1");
    assert!(Command::new("ip").args(["netns", "add", &namespace]).status().unwrap().success());
    let by_namespace = Command::new("ip").args(["netns", "exec", &namespace, "sleep", "600"]).spawn().unwrap();
    let run = leaks::run_of(&data).join("node-1");
    fs::create_dir_all(&run).unwrap();
    assert!(Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&run).status().unwrap().success());
    let seen = |process: &std::process::Child| process::alive(process.id() as i32);
    wait::until("the process in the namespace", Duration::from_secs(10), || {
        Ok(if leaks::of_cluster(&data).len() >= 4 { Ok(()) } else { Err(leaks::of_cluster(&data).join("\n")) })
    })
    .unwrap();
    assert!(seen(&by_path) && seen(&by_namespace));

    leaks::sweep(&data).unwrap();
    assert_eq!(leaks::of_cluster(&data), Vec::<String>::new());
    for mut child in [by_path, by_namespace] {
        assert!(!seen(&child));
        child.wait().unwrap();
    }
    assert!(!data.exists() && !Path::new("/run/netns").join(namespace).exists());
}

#[test]
fn a_wait_says_what_it_saw_last() {
    let mut looks = 0;
    let error = wait::until::<()>("the end of the world", Duration::from_millis(250), || {
        looks += 1;
        Ok(Err(format!("look {looks}")))
    })
    .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("the end of the world") && text.contains(&format!("look {looks}")), "{text}");
    assert!(looks >= 2);
}
