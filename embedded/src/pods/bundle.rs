//! The OCI bundle of a launcher's container: `config.json` and the folder that becomes its root.
//!
//! The root is a folder of our own, read-only, in which the machine's system folders (`/usr` and what belongs to it) are
//! mounted read-only. So a launcher finds the hypervisor and its libraries as they are on the machine, and nothing else of
//! it: no home folders, no data of the cluster, no sockets. Mounting all of `/` and masking what is private would show
//! whatever the list forgot.
//!
//! The program itself is mounted at [`BINARY`], because `/usr` is read-only and need not have a file `/usr/bin/virtfold` to mount
//! over; the pod's command `/usr/bin/virtfold` is rewritten to it.

use std::fs::{DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use api::names::LAUNCHER_UID;
use nix::sys::resource::{Resource, getrlimit};
use serde_json::{Value, json};

use super::seccomp;

/// Where the program is in the container.
pub(super) const BINARY: &str = "/opt/virtfold/bin/virtfold";
/// Where the pod's command says that it is.
pub(super) const BINARY_IN_POD: &str = "/usr/bin/virtfold";
/// Share folder with the agent.
const SHARE: &str = api::names::paths::SHARE;
/// Folders of the machine that a launcher sees, where the machine has them.
const SYSTEM: [&str; 8] = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store"];
/// Files and folders of the machine's /etc that libraries and QEMU look for. None holds a secret.
const SETTINGS: [&str; 5] = ["ld.so.cache", "ld.so.conf.d", "alternatives", "nsswitch.conf", "qemu"];
/// Open files: QEMU and its descriptors; less where the machine allows less.
const OPEN_FILES: u64 = 65_536;
/// Processes and threads: QEMU's vCPU and worker threads.
const PIDS: i64 = 4096;
/// Bounds of the container's scratch file systems: what a launcher can use of the machine's memory beside its own.
const RUN_SIZE: &str = "size=64m";
const TMP_SIZE: &str = "size=256m";
const SHM_SIZE: &str = "size=64m";

/// One mount of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VolumeMount {
    /// Where in the container.
    pub destination: String,
    /// What.
    pub source: Source,
    /// Never written.
    pub read_only: bool,
}

/// What a volume is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Source {
    /// A folder or file of the machine.
    Path(PathBuf),
    /// Memory, of that many bytes at most.
    Memory(u64),
    /// Files in memory: secrets and what else the API holds. Written into the container before it starts.
    Files(Vec<MemoryFile>),
}

/// A file that exists in memory alone.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct MemoryFile {
    /// Path below the mount.
    pub path: String,
    /// Content.
    pub bytes: Vec<u8>,
    /// Permission bits.
    pub mode: u32,
}

impl std::fmt::Debug for MemoryFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryFile")
            .field("path", &self.path)
            .field("length", &self.bytes.len())
            .finish_non_exhaustive()
    }
}

/// All that a container is made from.
#[derive(Debug, Clone)]
pub(super) struct Spec {
    /// Command and arguments as the pod has them.
    pub args: Vec<String>,
    /// `NAME=value`.
    pub env: Vec<String>,
    /// Working folder.
    pub cwd: String,
    /// Host name.
    pub hostname: String,
    /// Bytes of memory at most.
    pub memory_limit: Option<i64>,
    /// File of the network namespace.
    pub netns: Option<PathBuf>,
    /// Name of its cgroup, below the runner's own.
    pub cgroup: String,
    /// Volumes.
    pub volumes: Vec<VolumeMount>,
    /// Share folder on the machine.
    pub share: PathBuf,
    /// File for the termination message on the machine, and its path in the container.
    pub message: (PathBuf, String),
    /// The program on the machine.
    pub binary: PathBuf,
    /// Give it `/dev/kvm`.
    pub kvm: bool,
    /// Folders of the machine that nobody may see even where a system folder has them.
    pub private: Vec<PathBuf>,
    /// `/etc/hosts`.
    pub hosts: String,
    /// `/etc/resolv.conf`.
    pub resolv: String,
    /// The kernel can keep a tmpfs out of swap.
    pub noswap: bool,
}

/// `/var/run` is a link to `/run` in the container; the runtime is given the real path.
pub(super) fn real(path: &str) -> String {
    match path.strip_prefix("/var/run") {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => format!("/run{rest}"),
        _ => path.to_owned(),
    }
}

fn tmpfs(destination: &str, options: &[&str]) -> Value {
    json!({"destination": destination, "type": "tmpfs", "source": "tmpfs", "options": options})
}

fn bind(destination: &str, source: &Path, read_only: bool) -> Value {
    let mut options = vec!["bind", "nosuid", "nodev", if read_only { "ro" } else { "rw" }];
    if !read_only {
        options.push("noexec");
    }
    json!({"destination": destination, "type": "bind", "source": source, "options": options})
}

fn device(path: &str, numbers: (u32, u32)) -> Value {
    json!({"path": path, "type": "c", "major": numbers.0, "minor": numbers.1, "fileMode": 0o660, "uid": LAUNCHER_UID, "gid": LAUNCHER_UID})
}

/// `config.json`.
pub(super) fn config(spec: &Spec) -> Value {
    let mut mounts = Vec::new();
    for folder in SYSTEM.iter().map(Path::new).filter(|f| f.is_dir() && !f.is_symlink()) {
        mounts.push(bind(&folder.to_string_lossy(), folder, true));
    }
    for name in SETTINGS {
        let source = Path::new("/etc").join(name);
        if source.exists() && !source.is_symlink() {
            mounts.push(bind(&source.to_string_lossy(), &source, true));
        }
    }
    let owner = format!("uid={LAUNCHER_UID}");
    let group = format!("gid={LAUNCHER_UID}");
    mounts.extend([
        json!({"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]}),
        json!({"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]}),
        tmpfs("/dev", &["nosuid", "noexec", "strictatime", "mode=755", "size=64k"]),
        json!({"destination": "/dev/pts", "type": "devpts", "source": "devpts",
            "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]}),
        tmpfs("/dev/shm", &["nosuid", "noexec", "nodev", "mode=1777", SHM_SIZE]),
        tmpfs("/run", &["nosuid", "nodev", "noexec", "mode=0755", &owner, &group, RUN_SIZE]),
        tmpfs("/tmp", &["nosuid", "nodev", "noexec", "mode=1777", TMP_SIZE]),
        bind(BINARY, &spec.binary, true),
        bind(SHARE, &spec.share, false),
        bind(&real(&spec.message.1), &spec.message.0, false),
    ]);
    let mut volumes: Vec<_> = spec.volumes.iter().collect();
    // A mount below another one comes after it.
    volumes.sort_by_key(|v| real(&v.destination).matches('/').count());
    for volume in volumes {
        let destination = real(&volume.destination);
        mounts.push(match &volume.source {
            Source::Path(path) => bind(&destination, path, volume.read_only),
            Source::Memory(bytes) => tmpfs(
                &destination,
                &["nosuid", "nodev", "noexec", "mode=0770", &owner, &group, &format!("size={bytes}")],
            ),
            Source::Files(files) => {
                let bytes: usize = files.iter().map(|f| f.bytes.len() + 8192).sum::<usize>() + 65_536;
                let size = format!("size={bytes}");
                let mut options = vec!["nosuid", "nodev", "noexec", "mode=0750", "uid=0", &group, &size];
                if spec.noswap {
                    options.push("noswap");
                }
                tmpfs(&destination, &options)
            }
        });
    }
    let mut namespaces: Vec<Value> = ["pid", "mount", "uts", "ipc"].iter().map(|kind| json!({"type": kind})).collect();
    namespaces.push(match &spec.netns {
        Some(path) => json!({"type": "network", "path": path}),
        None => json!({"type": "network"}),
    });
    let mut allowed = vec![json!({"allow": false, "access": "rwm"})];
    let mut devices = Vec::new();
    if spec.kvm {
        let kvm = (10, 232);
        devices.push(device("/dev/kvm", kvm));
        allowed.push(json!({"allow": true, "type": "c", "major": kvm.0, "minor": kvm.1, "access": "rw"}));
    }
    let mut resources = json!({"devices": allowed, "pids": {"limit": PIDS}});
    if let Some(limit) = spec.memory_limit {
        resources["memory"] = json!({"limit": limit});
    }
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(_, hard)| hard).min(OPEN_FILES);
    let args: Vec<&str> = spec.args.iter().map(|a| if a == BINARY_IN_POD { BINARY } else { a.as_str() }).collect();
    let mut masked: Vec<PathBuf> = [
        "/proc/kcore",
        "/proc/keys",
        "/proc/latency_stats",
        "/proc/timer_list",
        "/proc/sched_debug",
        "/proc/scsi",
        "/proc/acpi",
        "/proc/interrupts",
        "/sys/firmware",
        "/sys/devices/virtual/powercap",
    ]
    .map(PathBuf::from)
    .into();
    masked.extend(spec.private.iter().filter(|p| SYSTEM.iter().any(|s| p.starts_with(s))).cloned());
    let no_capabilities: [&str; 0] = [];
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": false,
            "user": {"uid": LAUNCHER_UID, "gid": LAUNCHER_UID, "umask": 0o027},
            "args": args,
            "env": spec.env,
            "cwd": spec.cwd,
            "noNewPrivileges": true,
            "capabilities": {
                "bounding": no_capabilities, "effective": no_capabilities, "inheritable": no_capabilities,
                "permitted": no_capabilities, "ambient": no_capabilities,
            },
            "rlimits": [
                {"type": "RLIMIT_NOFILE", "hard": limit, "soft": limit},
                {"type": "RLIMIT_CORE", "hard": 0, "soft": 0},
            ],
        },
        "root": {"path": "rootfs", "readonly": true},
        "hostname": spec.hostname,
        "mounts": mounts,
        "linux": {
            "cgroupsPath": spec.cgroup,
            "namespaces": namespaces,
            "resources": resources,
            "devices": devices,
            "seccomp": seccomp::profile(),
            "rootfsPropagation": "private",
            "maskedPaths": masked,
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
    })
}

fn folder(path: &Path, mode: u32) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(path)?;
    std::fs::set_permissions(path, Permissions::from_mode(mode))
}

/// Makes the bundle anew at `at`.
pub(super) fn write(at: &Path, spec: &Spec) -> io::Result<()> {
    match std::fs::remove_dir_all(at) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let root = at.join("rootfs");
    folder(&root, 0o755)?;
    for name in ["dev", "etc", "proc", "run", "sys", "var", "var/lib", "var/log", "opt/virtfold/bin"] {
        folder(&root.join(name), 0o755)?;
    }
    // The runtime gives a tmpfs the mode of the folder that it is mounted on.
    folder(&root.join("tmp"), 0o1777)?;
    symlink("/run", root.join("var/run"))?;
    symlink("/tmp", root.join("var/tmp"))?;
    for system in SYSTEM.iter().map(Path::new) {
        let Ok(relative) = system.strip_prefix("/") else { continue };
        let here = root.join(relative);
        if system.is_symlink() {
            symlink(std::fs::read_link(system)?, here)?;
        } else if system.is_dir() {
            folder(&here, 0o755)?;
        }
    }
    std::fs::write(root.join("opt/virtfold/bin/virtfold"), b"")?;
    let etc = root.join("etc");
    for name in SETTINGS {
        let source = Path::new("/etc").join(name);
        if source.is_dir() && !source.is_symlink() {
            folder(&etc.join(name), 0o755)?;
        } else if source.is_file() && !source.is_symlink() {
            std::fs::write(etc.join(name), b"")?;
        }
    }
    let line = format!("qemu:x:{LAUNCHER_UID}:{LAUNCHER_UID}::/:/sbin/nologin\n");
    std::fs::write(etc.join("passwd"), format!("root:x:0:0::/:/sbin/nologin\n{line}"))?;
    std::fs::write(etc.join("group"), format!("root:x:0:\nqemu:x:{LAUNCHER_UID}:\n"))?;
    std::fs::write(etc.join("hostname"), format!("{}\n", spec.hostname))?;
    std::fs::write(etc.join("hosts"), &spec.hosts)?;
    std::fs::write(etc.join("resolv.conf"), &spec.resolv)?;
    // Mount points outside of what is a tmpfs anyway.
    for volume in &spec.volumes {
        let destination = real(&volume.destination);
        if ["/run/", "/tmp/", "/dev/"].iter().any(|p| destination.starts_with(p)) {
            continue;
        }
        let here = root.join(destination.trim_start_matches('/'));
        match &volume.source {
            Source::Path(path) if path.is_file() => {
                if let Some(parent) = here.parent() {
                    folder(parent, 0o755)?;
                }
                std::fs::write(here, b"")?;
            }
            _ => folder(&here, 0o755)?,
        }
    }
    if !spec.message.0.exists() {
        std::fs::write(&spec.message.0, b"")?;
    }
    chown(&spec.message.0, Some(LAUNCHER_UID), Some(LAUNCHER_UID))?;
    std::fs::write(at.join("config.json"), serde_json::to_vec_pretty(&config(spec))?)
}

/// Writes the files of volumes in memory into a container that was created and not started: `root` is
/// `/proc/<pid>/root`. They belong to root, so that the launcher can read and not change them.
pub(super) fn fill(root: &Path, volumes: &[VolumeMount]) -> io::Result<()> {
    for volume in volumes {
        let Source::Files(files) = &volume.source else { continue };
        let base = root.join(real(&volume.destination).trim_start_matches('/'));
        for file in files {
            let path = base.join(&file.path);
            if let Some(parent) = path.parent().filter(|p| *p != base) {
                folder(parent, 0o750)?;
                chown(parent, Some(0), Some(LAUNCHER_UID))?;
            }
            std::fs::write(&path, &file.bytes)?;
            chown(&path, Some(0), Some(LAUNCHER_UID))?;
            // Who may read a file as its owner may read it as the launcher.
            let mode = file.mode & 0o7777;
            std::fs::set_permissions(&path, Permissions::from_mode((mode | (mode & 0o500) >> 3) & 0o755))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    pub(crate) fn spec(dir: &Path) -> Spec {
        Spec {
            args: vec!["/usr/bin/virtfold".into(), "launcher".into()],
            env: vec!["A=b".into()],
            cwd: "/".into(),
            hostname: "guest".into(),
            memory_limit: Some(1 << 20),
            netns: Some("/run/netns/x".into()),
            cgroup: "c".into(),
            volumes: vec![VolumeMount {
                destination: "/var/run/kubevirt-private/secret/s".into(),
                source: Source::Files(vec![MemoryFile {
                    path: "a/userdata".into(),
                    bytes: b"hush".to_vec(),
                    mode: 0o400,
                }]),
                read_only: true,
            }],
            share: dir.join("share"),
            message: (dir.join("message"), "/dev/termination-log".into()),
            binary: "/usr/bin/true".into(),
            kvm: false,
            private: vec!["/usr/secret".into(), dir.to_owned()],
            hosts: String::new(),
            resolv: String::new(),
            noswap: true,
        }
    }

    #[test]
    fn the_bundle_has_no_privilege_and_no_secret() {
        let dir = tempfile::tempdir().unwrap();
        let spec = spec(dir.path());
        let config = config(&spec);
        assert_eq!(config["process"]["args"], json!([BINARY, "launcher"]));
        assert_eq!(config["process"]["user"]["uid"], 107);
        for set in ["bounding", "effective", "inheritable", "permitted", "ambient"] {
            assert_eq!(config["process"]["capabilities"][set], json!([]));
        }
        assert_eq!(config["root"]["readonly"], true);
        assert_eq!(config["linux"]["devices"], json!([]));
        assert_eq!(config["linux"]["resources"]["devices"].as_array().unwrap().len(), 1);
        assert!(config["linux"]["maskedPaths"].as_array().unwrap().contains(&json!("/usr/secret")));
        assert!(!config.to_string().contains("hush"));
        assert!(!format!("{spec:?}").contains("hush"));
        let mounts = config["mounts"].as_array().unwrap();
        assert!(!mounts.iter().any(|m| m["source"] == "/"), "the machine's root is not mounted");
        assert!(mounts.iter().any(|m| m["destination"] == "/run/kubevirt-private/secret/s" && m["type"] == "tmpfs"));
        let kvm = super::config(&Spec { kvm: true, ..spec });
        assert_eq!(kvm["linux"]["devices"][0]["path"], "/dev/kvm");
    }

    #[test]
    fn var_run_is_run() {
        assert_eq!(real("/var/run/a"), "/run/a");
        assert_eq!(real("/var/run"), "/run");
        assert_eq!(real("/var/running"), "/var/running");
    }
}
