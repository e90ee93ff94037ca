//! Real processes, real guests. Two guests boot on one core each; so the tests share one cluster, and few run at a time.

mod bad;
mod disks;
pub(crate) mod endings;
mod explain;
mod kubectl;
mod many;
mod metrics;
mod nodes;
mod page;
mod start;
mod stop;
mod takeover;
mod trace;
mod up;

use anyhow::{Result, anyhow};
use chaos_tests::e2e::cluster::{Cluster, Options};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

/// Nodes of the shared cluster.
const NODES: u32 = 2;
/// An image whose disk was cut off; the shared cluster knows it.
pub const BROKEN_IMAGE: &str = "localhost/virtfold/broken:latest";

static TURN: RwLock<()> = RwLock::new(());

/// Whether end-to-end tests run; without, each says that it was skipped.
pub fn enabled() -> bool {
    std::env::var("VIRTFOLD_E2E").map_or(true, |value| value != "0")
}

/// Begins a test: it ends here, as skipped, where end-to-end tests do not run.
macro_rules! e2e {
    () => {
        if !crate::e2e::enabled() {
            println!("SKIPPED: VIRTFOLD_E2E=0");
            return Ok(());
        }
    };
}
pub(crate) use e2e;

/// The shared cluster, for a test that harms nothing but its own VMs.
pub fn shared() -> Result<(RwLockReadGuard<'static, ()>, &'static Cluster)> {
    let turn = TURN.read().unwrap_or_else(|poisoned| poisoned.into_inner());
    Ok((turn, cluster()?))
}

/// The shared cluster, for a test that hurts its processes.
pub fn alone() -> Result<(RwLockWriteGuard<'static, ()>, &'static Cluster)> {
    let turn = TURN.write().unwrap_or_else(|poisoned| poisoned.into_inner());
    Ok((turn, cluster()?))
}

fn cluster() -> Result<&'static Cluster> {
    static CLUSTER: OnceLock<std::result::Result<Cluster, String>> = OnceLock::new();
    let started = CLUSTER.get_or_init(|| {
        let start = || {
            let broken = broken_layout()?;
            Cluster::start(Options {
                nodes: NODES,
                arguments: vec!["--image".into(), format!("{BROKEN_IMAGE}={}", broken.display())],
                ..Options::default()
            })
        };
        start().map_err(|error: anyhow::Error| format!("{error:#}"))
    });
    started.as_ref().map_err(|error| anyhow!("the shared cluster did not start: {error}"))
}

/// An OCI layout that is right in all its digests, with a qcow2 that was cut off.
fn broken_layout() -> Result<PathBuf> {
    let folder = std::env::temp_dir().join(format!("virtfold-broken-{}", std::process::id()));
    let disk = fs::read(chaos_tests::e2e::cluster::guest()?.join("disk.qcow2"))?;
    layout(&folder, super::e2e::BROKEN_IMAGE, &disk[..disk.len() / 3])?;
    Ok(folder)
}

/// Writes an OCI layout with one disk.
pub fn layout(folder: &Path, name: &str, disk: &[u8]) -> Result<()> {
    use sha2::{Digest, Sha256};
    let blobs = folder.join("blobs/sha256");
    fs::create_dir_all(&blobs)?;
    fs::create_dir_all(folder.join("build/disk"))?;
    fs::write(folder.join("build/disk/disk.qcow2"), disk)?;
    let tar = Command::new("tar").arg("-C").arg(folder.join("build")).args(["-c", "disk"]).output()?.stdout;
    let blob = |body: &[u8], media: &str| -> Result<serde_json::Value> {
        let digest: String = Sha256::digest(body).iter().map(|byte| format!("{byte:02x}")).collect();
        fs::write(blobs.join(&digest), body)?;
        Ok(serde_json::json!({"mediaType": media, "digest": format!("sha256:{digest}"), "size": body.len()}))
    };
    let layer = blob(&tar, "application/vnd.oci.image.layer.v1.tar")?;
    let config = serde_json::json!({"architecture": "amd64", "os": "linux", "config": {},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]}});
    let config = blob(config.to_string().as_bytes(), "application/vnd.oci.image.config.v1+json")?;
    let media = "application/vnd.oci.image.manifest.v1+json";
    let manifest = serde_json::json!({"schemaVersion": 2, "mediaType": media, "config": config, "layers": [layer]});
    let mut manifest = blob(manifest.to_string().as_bytes(), media)?;
    manifest["annotations"] = serde_json::json!({"org.opencontainers.image.ref.name": name});
    fs::write(folder.join("index.json"), serde_json::json!({"schemaVersion": 2, "manifests": [manifest]}).to_string())?;
    fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
    fs::remove_dir_all(folder.join("build"))?;
    Ok(())
}
