//! Which accelerator really runs a guest.
//!
//! That `/dev/kvm` opens, that a VM can be created, even that a BIOS runs says little: there are hosts whose KVM falls
//! back to an instruction emulator and stops at the first `fninit` of a kernel. So a payload that does what every
//! kernel does early is run on the guests' own machine type and CPU model, and has three seconds to say that it
//! got through. Whatever else happens means emulation.

mod payload;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::machine::Accelerator;
use payload::Passed;

/// How long the payload may take. It needs milliseconds.
const LIMIT: Duration = Duration::from_secs(3);

/// What a node runs guests with, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The accelerator.
    pub accelerator: Accelerator,
    /// For people: why not KVM, or how it was shown to work.
    pub reason: String,
}

/// Finds the accelerator for guests with `cpu_model` under the QEMU binary `qemu`. Takes up to six seconds; the
/// answer holds for as long as the machine is up.
pub async fn probe(qemu: &Path, cpu_model: &str) -> Verdict {
    let emulation = |reason: String| Verdict { accelerator: Accelerator::Tcg, reason };
    if let Err(error) = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        return emulation(format!("/dev/kvm cannot be opened: {error}"));
    }
    match run_payload(qemu, Accelerator::Kvm, cpu_model).await {
        Ok(()) => {
            Verdict { accelerator: Accelerator::Kvm, reason: "the probe's payload ran to its end under KVM".into() }
        }
        Err(problem) => emulation(format!("/dev/kvm is there but does not run a guest: {problem}")),
    }
}

/// Runs the payload on q35 under this accelerator. The error says how far it came.
///
/// A CPU model without XSAVE proves nothing about `xsave`, which newer models' guests will use: then the payload runs
/// a second time, on everything that the accelerator offers.
pub async fn run_payload(qemu: &Path, accelerator: Accelerator, cpu_model: &str) -> Result<(), String> {
    match once(qemu, accelerator, cpu_model).await? {
        Passed::WithXsave => Ok(()),
        Passed::WithoutXsave => match once(qemu, accelerator, "max").await {
            Ok(_) => Ok(()),
            Err(problem) => Err(format!("with every CPU feature: {problem}")),
        },
    }
}

async fn once(qemu: &Path, accelerator: Accelerator, cpu_model: &str) -> Result<Passed, String> {
    let image = Image::write().map_err(|e| format!("writing the payload: {e}"))?;
    let cpu = if cpu_model.is_empty() { "Nehalem" } else { cpu_model };
    let mut command = tokio::process::Command::new(qemu);
    command
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35", "-m", "16", "-no-reboot"])
        .args(["-accel", accelerator.word(), "-cpu"])
        .arg(cpu)
        .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4", "-bios"])
        .arg(&image.0)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command.spawn().map_err(|e| format!("running {}: {e}", qemu.display()))?;
    let mut stderr = child.stderr.take();
    let mut said = Vec::new();
    let ended = {
        let read = async {
            use tokio::io::AsyncReadExt;
            if let Some(stderr) = &mut stderr {
                let _ = stderr.take(4096).read_to_end(&mut said).await;
            }
        };
        let wait = async { tokio::join!(child.wait(), read).0 };
        tokio::time::timeout(LIMIT, wait).await
    };
    let said = String::from_utf8_lossy(&said);
    let words = said
        .lines()
        .map(str::trim)
        .find(|l| !l.is_empty() && !l.contains("warning:"))
        .map(|l| format!(" ({l})"))
        .unwrap_or_default();
    match ended {
        Err(_) => {
            let _ = child.kill().await;
            Err(format!("the payload did not end within {LIMIT:?}{words}"))
        }
        Ok(Err(e)) => Err(format!("waiting for {}: {e}", qemu.display())),
        Ok(Ok(status)) => match status.code() {
            Some(code) => payload::verdict(code).map_err(|problem| format!("{problem}{words}")),
            None => Err(format!("qemu was ended by a signal{words}")),
        },
    }
}

/// The payload as a file that goes away with this value.
struct Image(PathBuf);

impl Image {
    fn write() -> std::io::Result<Self> {
        use std::io::Write;
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!(
            "virtfold-probe-{}-{number}-{}",
            std::process::id(),
            uuid::Uuid::new_v4()
        ));
        let mut file = std::fs::OpenOptions::new().write(true).create_new(true).open(&path)?;
        let image = Self(path);
        file.write_all(&payload::rom())?;
        Ok(image)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
