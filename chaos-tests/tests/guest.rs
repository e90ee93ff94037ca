//! The guest image keeps its promises in a bare QEMU, without virtfold: a fault that shows here is the image's.

use chaos_tests::rules::root;
use std::process::Command;

#[test]
fn the_guest_boots_in_a_bare_qemu() {
    let root = root();
    assert!(root.join("target/guest/disk.qcow2").exists(), "there is no guest image: run 'make guest'");
    let done = Command::new(root.join("guest/check")).output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    println!("{said}");
    assert!(done.status.success(), "{said}");
}

#[test]
fn the_container_disk_is_what_its_digests_say() {
    use sha2::{Digest, Sha256};
    let layout = root().join("target/guest/oci");
    let read =
        |path: std::path::PathBuf| std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let blob = |descriptor: &serde_json::Value| {
        let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap().to_owned();
        let body = read(layout.join("blobs/sha256").join(&digest));
        let real: String = Sha256::digest(&body).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(real, digest);
        assert_eq!(descriptor["size"], body.len());
        body
    };
    let index: serde_json::Value = serde_json::from_slice(&read(layout.join("index.json"))).unwrap();
    let named = &index["manifests"][0];
    assert_eq!(named["annotations"]["org.opencontainers.image.ref.name"], chaos_tests::e2e::manifest::IMAGE);
    let manifest: serde_json::Value = serde_json::from_slice(&blob(named)).unwrap();
    blob(&manifest["config"]);
    let layers = manifest["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 1);
    let layer = blob(&layers[0]);
    let mut tar = Command::new("tar")
        .args(["-tvz", "--numeric-owner"])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = tar.stdin.take().unwrap();
    let writer = std::thread::spawn(move || std::io::Write::write_all(&mut input, &layer));
    let listed = tar.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(listed.lines().any(|line| line.contains("107/107") && line.ends_with("disk/disk.qcow2")), "{listed}");
}
