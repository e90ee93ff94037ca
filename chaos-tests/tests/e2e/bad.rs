//! Bad input: a clear message in the right place, and nothing else harmed.

use super::{BROKEN_IMAGE, e2e, shared};
use anyhow::{Result, ensure};
use chaos_tests::e2e::{
    cluster::{Cluster, Options, condition},
    kinds,
    manifest::{VmManifest, vm},
    vm::{START, Vm},
    wait,
};
use serde_json::{Value, json};
use std::{
    fs,
    io::{Read, Write},
    net::TcpListener,
    process::Command,
};

/// What admission refuses: a change to a good manifest, and words that the answer must hold.
fn change(name: &str, change: &dyn Fn(&mut Value)) -> VmManifest {
    let mut manifest = vm(name);
    change(&mut manifest.object);
    manifest
}

fn refused() -> Vec<(&'static str, VmManifest, Vec<&'static str>)> {
    let twin = json!({"containerDisk": {"image": "localhost/x:1"}});
    vec![
        (
            "a wrong type",
            change("bad-type", &|object| {
                object["spec"]["template"]["spec"]["domain"]["devices"]["disks"] = "none".into()
            }),
            vec!["disks"],
        ),
        (
            "an unknown field",
            change("bad-field", &|object| {
                object["spec"]["template"]["spec"]["domain"]["memry"] = json!({"guest": "1Gi"})
            }),
            vec!["memry", "unknown field"],
        ),
        (
            "two disks of one name",
            vm("bad-twins").disk("twin", json!({"disk": {"bus": "virtio"}}), twin).disk(
                "twin",
                json!({"disk": {"bus": "virtio"}}),
                json!({"emptyDisk": {"capacity": "1Mi"}}),
            ),
            vec!["twin"],
        ),
        (
            "a disk without a volume",
            change("bad-disk", &|object| {
                let disks = &mut object["spec"]["template"]["spec"]["domain"]["devices"]["disks"];
                disks.as_array_mut().unwrap().push(json!({"name": "empty-handed", "disk": {"bus": "virtio"}}));
            }),
            vec!["empty-handed"],
        ),
        ("no memory", vm("bad-memory").memory("0"), vec!["memory"]),
        ("a quantity that is none", vm("bad-quantity").memory("lots"), vec!["memory"]),
        ("an unknown run strategy", vm("bad-strategy").run("Sometimes"), vec!["Sometimes"]),
    ]
}

#[test]
fn admission_says_what_is_wrong() -> Result<()> {
    e2e!();
    let (_turn, cluster) = shared()?;
    let mut wrong = Vec::new();
    for (what, manifest, words) in refused() {
        let name = manifest.object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let (code, out, said) = cluster.feed(&["apply"], &manifest.text())?;
        if code == 0 {
            wrong.push(format!("{what} was taken: {out}"));
            cluster.kubectl(&["delete", "vm", &name, "--wait=false"])?;
        } else if let Some(word) = words.iter().find(|word| !said.contains(**word)) {
            wrong.push(format!("{what}: no '{word}' in: {said}"));
        } else if cluster.kubectl(&["get", "vm", &name])?.0 == 0 {
            wrong.push(format!("{what} was refused, and is there all the same"));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    // As in KubeVirt a volume without a disk gets one; it is said, and nothing is lost.
    let lonely = change("bad-volume", &|object| {
        let volume = json!({"name": "lonely", "emptyDisk": {"capacity": "1Mi"}});
        object["spec"]["template"]["spec"]["volumes"].as_array_mut().unwrap().push(volume);
    });
    let (code, out, said) = cluster.feed(&["apply"], &lonely.text())?;
    ensure!(code == 0 && said.contains("volumes[") && said.contains("lonely"), "{code} {out} {said}");
    cluster.ok(&["delete", "vm", "bad-volume"])?;
    let (code, _, said) =
        cluster.feed(&["apply"], "apiVersion: kubevirt.io/v1\nkind: VirtualMachine\nmetadata: [\n")?;
    ensure!(code != 0 && !said.is_empty());
    // Whole kinds that nothing would act on are refused by name; all are known.
    kinds::explained(cluster)?;
    kinds::shown(cluster, |kind| kind.ends_with("type") || kind.ends_with("Preference"))?;
    let samples = kinds::samples(|kind| api::crd::missing(kind).is_some());
    for mut sample in samples {
        if sample["metadata"].get("namespace").is_some() {
            sample["metadata"]["namespace"] = "default".into();
        }
        let (code, out, said) = cluster.feed(&["create"], &sample.to_string())?;
        let kind = sample["kind"].as_str().unwrap_or_default();
        ensure!(code != 0 && said.contains(&format!("{kind} is not supported yet: ")), "{kind}: {code} {out} {said}");
    }
    Ok(())
}

/// Waits for a status of the VM and for words in its conditions, its instance's, or its events; and until `virtfold explain`
/// gives the cause in words that `kubectl describe` shows, too, with what would help.
pub(super) fn complains(vm: &Vm, statuses: &[&str], words: &[&str], remedy: &str) -> Result<()> {
    wait::until(&format!("a complaint about {}", vm.name), START, || {
        let object = vm.vm()?;
        let status = object["status"]["printableStatus"].as_str().unwrap_or_default();
        let vmi = vm.vmi().unwrap_or_default();
        let (_, events, _) = vm.cluster.kubectl(&["get", "events", "-o", "wide"])?;
        let events: Vec<&str> = events.lines().filter(|line| line.contains(&vm.name)).collect();
        let said = format!("{} {} {}", object["status"]["conditions"], vmi["status"]["conditions"], events.join("\n"));
        let all = statuses.contains(&status) && words.iter().all(|word| said.contains(word));
        Ok(if all { Ok(()) } else { Err(format!("status {status}, said: {said}")) })
    })
    .and_then(|()| explains(vm, words, remedy))
    .map_err(|error| error.context(vm.story()))
}

/// The explanation names the cause and the remedy, in words that `kubectl describe` shows in a condition or an Event.
fn explains(vm: &Vm, words: &[&str], remedy: &str) -> Result<()> {
    wait::until(&format!("an explanation of {}", vm.name), START, || {
        let (_, out, said) = vm.cluster.virtfold(&["explain", &format!("vm/{}", vm.name), "-o", "json"])?;
        let explanation: Value = serde_json::from_str(&out).unwrap_or_default();
        let described: String = ["vm", "vmi"]
            .iter()
            .filter_map(|kind| vm.cluster.kubectl(&["describe", kind, &vm.name]).ok())
            .map(|(_, out, _)| out)
            .collect();
        let named = explanation["waits"].as_array().into_iter().flatten().any(|wait| {
            let text = |key: &str| wait[key].as_str().unwrap_or_default();
            words.iter().all(|word| text("message").contains(word))
                && text("unblock").contains(remedy)
                && described.contains(text("message"))
        });
        Ok(if named { Ok(()) } else { Err(format!("{out}{said}\n{described}")) })
    })
}

#[test]
fn a_missing_claim_is_named_and_may_come_later() -> Result<()> {
    e2e!();
    let (_turn, cluster) = shared()?;
    let claim = json!({"persistentVolumeClaim": {"claimName": "bad-later"}});
    let vm = Vm::apply(cluster, &vm("bad-claim").disk("data", json!({"disk": {"bus": "virtio"}}), claim))?;
    complains(&vm, &["ErrorPvcNotFound"], &["bad-later"], "create PersistentVolumeClaim bad-later")?;
    cluster.apply(
        &json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "bad-later", "namespace": "default"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "8Mi"}}}})
        .to_string(),
    )?;
    vm.wait_phase("Running", START)?;
    vm.delete()?;
    cluster.ok(&["delete", "pvc", "bad-later"])?;
    Ok(())
}

#[test]
fn more_memory_than_the_machine_has_is_unschedulable() -> Result<()> {
    e2e!();
    let (_turn, cluster) = shared()?;
    let vm = Vm::apply(cluster, &vm("bad-huge").memory("9000Gi"))?;
    complains(&vm, &["ErrorUnschedulable"], &["nsufficient memory"], "ask for less")?;
    vm.delete()?;
    Ok(())
}

#[test]
fn an_image_that_is_not_there_or_breaks_off_is_named() -> Result<()> {
    e2e!();
    let (_turn, cluster) = shared()?;
    let pulls = &["ErrImagePull", "ImagePullBackOff"];
    let missing = Vm::apply(cluster, &vm("bad-image").image("localhost/virtfold/nowhere:1"))?;
    complains(&missing, pulls, &["localhost/virtfold/nowhere:1"], "push the image")?;
    missing.delete()?;

    let port = registry_that_breaks_off()?;
    let image = format!("127.0.0.1:{port}/cut/off:1");
    let cut = Vm::apply(cluster, &vm("bad-registry").image(&image))?;
    complains(&cut, pulls, &[&image], "make the registry reachable")?;
    cut.delete()?;

    let truncated = Vm::apply(cluster, &vm("bad-qcow2").image(BROKEN_IMAGE))?;
    complains(
        &truncated,
        &["CrashLoopBackOff", "Stopped", "Stopping", "Starting"],
        &["qcow2", "damaged"],
        "remove the cause",
    )?;
    truncated.delete()?;

    // Nothing else was harmed.
    let good = Vm::running(cluster, &vm("bad-good"))?;
    good.delete()?;
    Ok(())
}

#[test]
fn a_full_disk_pauses_the_guest_that_writes_and_nobody_else() -> Result<()> {
    e2e!();
    let (_turn, other) = shared()?;
    let cluster = Cluster::prepare(Options { arguments: vec!["--stop-guests".into()], ..Options::default() })?;
    let volumes = cluster.data.join("volumes");
    fs::create_dir(&volumes)?;
    let mount = |option: &str| -> Result<()> {
        let done = Command::new("mount").args(["-t", "tmpfs", "-o", option, "none"]).arg(&volumes).status()?;
        ensure!(done.success(), "mount {option}");
        Ok(())
    };
    mount("size=24m,mode=755")?;
    cluster.up()?;
    cluster.apply(
        &json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "bad-full", "namespace": "default"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "256Mi"}}}})
        .to_string(),
    )?;
    let claim = json!({"persistentVolumeClaim": {"claimName": "bad-full"}});
    let full = Vm::running(&cluster, &vm("bad-writer").disk("data", json!({"disk": {"bus": "virtio"}}), claim))?;
    let mut console = full.shell()?;
    console.start("dd if=/dev/zero of=/dev/vdb bs=1M count=64; sync; echo $? >/run/written")?;
    full.wait_vmi("a pause", START, |vmi| (condition(vmi, "Paused") == ("True", "PausedIOError")).then_some(()))?;
    full.wait_printable("Paused", START)?;
    explains(&full, &["low-level IO error"], "virtfold unpause bad-writer")?;
    cluster.ok(&["get", "nodes"])?;
    other.ok(&["get", "nodes"])?;

    // With room again, the guest goes on where it was, without anybody's help.
    mount("remount,size=200m,mode=755")?;
    full.wait_condition("Paused", "", START)?;
    console.run_within("until [ -e /run/written ]; do usleep 100000; done", START)?;
    ensure!(console.run("cat /run/written")? == "0");
    full.delete()?;
    Ok(())
}

/// A registry whose blobs end before their length is reached.
fn registry_that_breaks_off() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    let digest = format!("sha256:{}", "ab".repeat(32));
    let media = "application/vnd.oci.image.manifest.v1+json";
    let manifest = json!({"schemaVersion": 2, "mediaType": media,
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest, "size": 1000},
        "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": digest, "size": 100_000}]})
    .to_string();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut request = [0; 4096];
            let count = stream.read(&mut request).unwrap_or(0);
            let request = String::from_utf8_lossy(&request[..count]).into_owned();
            let answer = if request.contains("/blobs/") {
                "HTTP/1.1 200 OK\r\ncontent-length: 100000\r\ncontent-type: application/octet-stream\r\n\r\npart"
                    .to_owned()
            } else if request.contains("/manifests/") {
                format!(
                    "HTTP/1.1 200 OK\r\ncontent-type: {media}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{manifest}",
                    manifest.len()
                )
            } else {
                "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".to_owned()
            };
            stream.write_all(answer.as_bytes()).ok();
        }
    });
    Ok(port)
}
