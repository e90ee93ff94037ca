//! The `qemu` driver: QEMU as a child process, spoken to over QMP, without libvirt.
//!
//! The monitor, the serial console and the guest agent's channel are socket pairs that QEMU inherits: there is no
//! moment in which somebody else could take their place, and when the launcher dies they close. A second monitor
//! listens on `qmp.sock` for people.
//!
//! QEMU is told to stay when the guest powers off or panics, so that the reason is known before the process ends.

mod args;
mod images;
pub(crate) mod qmp;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::BoxFuture;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};

use super::{Domain, Driver, Error, Event, Figures, Paused, Start, StartError, Started};
use crate::config::Config;
use crate::machine::{Firmware, Machine};
use crate::time::unix_us;
use crate::{limits, stats};
use qmp::{Qmp, QmpEvent};

/// How often the status is asked for, should an event ever have been lost.
const STATUS_POLL: Duration = Duration::from_secs(10);
/// Where distributions put OVMF: (code, variables) without and with secure boot.
const OVMF: [[(&str, &str); 2]; 2] = [
    [
        ("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"),
        ("/usr/share/OVMF/OVMF_CODE.fd", "/usr/share/OVMF/OVMF_VARS.fd"),
    ],
    [
        ("/usr/share/OVMF/OVMF_CODE_4M.secboot.fd", "/usr/share/OVMF/OVMF_VARS_4M.ms.fd"),
        ("/usr/share/OVMF/OVMF_CODE.secboot.fd", "/usr/share/OVMF/OVMF_VARS.ms.fd"),
    ],
];

/// Starts machines with `qemu-system-x86_64`.
pub struct Qemu {
    config: Config,
}

impl Qemu {
    /// A driver with the paths of `config`.
    pub fn new(config: &Config) -> Self {
        Self { config: config.clone() }
    }

    async fn boot(
        &self,
        machine: Machine,
        fds: BTreeMap<String, OwnedFd>,
        locked: &mut Option<(u64, u64)>,
    ) -> Result<Started, StartError> {
        let mut images = Vec::new();
        for disk in &machine.disks {
            images.push(images::prepare(disk, &self.config.paths.ephemeral, &self.config.qemu_img).await?);
        }
        let mut taps = Vec::new();
        for nic in &machine.nics {
            let fd = fds.get(&nic.fd_name);
            let fd = fd
                .ok_or_else(|| StartError(format!("{}: descriptor {:?} was not handed over", nic.path, nic.fd_name)))?;
            taps.push(fd.as_raw_fd());
        }
        let places = args::Places {
            qmp: self.config.share_dir.join("qmp.sock"),
            vnc: self.config.share_dir.join("vnc.sock"),
            efi: self.efi(machine.firmware)?,
        };
        // A process that did not get its images has run nothing: another one may try again.
        let deadline = tokio::time::Instant::now() + limits::LOCK;
        loop {
            let error = match self.attempt(&machine, &images, &taps, &places).await {
                Ok(started) => return Ok(started),
                Err(Failed::Locked(error)) if tokio::time::Instant::now() < deadline => error,
                Err(Failed::Locked(error) | Failed::Start(error)) => return Err(error),
            };
            tracing::info!(%error, "waiting for a locked image");
            let since = locked.map_or_else(unix_us, |(since, _)| since);
            tokio::time::sleep(limits::LOCK_AGAIN).await;
            *locked = Some((since, unix_us()));
        }
    }

    /// One process, which gets its images or does not.
    async fn attempt(
        &self,
        machine: &Machine,
        images: &[Option<args::Image>],
        taps: &[i32],
        places: &args::Places,
    ) -> Result<Started, Failed> {
        let pair = || UnixStream::pair().map_err(|e| StartError(format!("making a socket pair: {e}")));
        let (monitor, their_monitor) = pair()?;
        let (console, their_console) = pair()?;
        let (agent, their_agent) = pair()?;
        let descriptors = args::Descriptors {
            monitor: their_monitor.as_raw_fd(),
            console: their_console.as_raw_fd(),
            agent: their_agent.as_raw_fd(),
            taps: taps.to_vec(),
        };
        // QEMU expects to block where it wants to.
        let theirs = [their_monitor, their_console, their_agent]
            .map(|s| s.into_std().and_then(|s| s.set_nonblocking(false).map(|()| s)));
        let mut inherited = descriptors.taps.clone();
        for s in &theirs {
            inherited.push(s.as_ref().map_err(|e| StartError(format!("making a socket pair: {e}")))?.as_raw_fd());
        }

        let mut command = tokio::process::Command::new(&self.config.qemu);
        command.args(args::arguments(machine, images, &descriptors, places)).args(&self.config.extra_args);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into()));
        crate::sys::inherit(&mut command, inherited);
        tracing::debug!(command = ?command.as_std(), "starting qemu");
        let child = command.spawn().map_err(|e| StartError(format!("running {}: {e}", self.config.qemu.display())))?;
        drop(theirs);
        let pid = child.id().and_then(|p| i32::try_from(p).ok()).unwrap_or_default();
        let (qmp, monitor_events) = Qmp::connect(monitor);
        let (events, heard) = mpsc::channel(limits::EVENTS);
        let (gone, exited) = watch::channel(false);
        let log = tokio::spawn(wait(child, events.clone(), gone));

        let greeted = tokio::select! {
            r = greet(&qmp) => r.map_err(|e| e.to_string()),
            () = until(exited.clone()) => Err("it ended".into()),
        };
        let machine_type = match greeted {
            Ok(t) => t.unwrap_or_else(|| machine.machine_type.clone()),
            Err(problem) => {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
                let said = log.await.unwrap_or_default();
                return Err(match (in_use(&said, machine, images), said.trim()) {
                    (Some(disk), _) => Failed::Locked(StartError(disk)),
                    (None, "") => Failed::Start(StartError(format!("qemu did not start: {problem}"))),
                    (None, said) => Failed::Start(StartError(format!("qemu did not start: {said}"))),
                });
            }
        };
        let domain = Arc::new(QemuDomain {
            scratch: self.config.paths.ephemeral.clone(),
            pid,
            qmp: qmp.clone(),
            exited,
            machine_type,
            memory: machine.memory,
            balloon: machine.balloon,
        });
        tokio::spawn(translate(qmp, monitor_events, events));
        Ok(Started { domain, events: heard, console: machine.serial.then_some(console), agent })
    }

    fn efi(&self, firmware: Firmware) -> Result<Option<(PathBuf, PathBuf)>, StartError> {
        let Firmware::Efi { secure_boot } = firmware else { return Ok(None) };
        let field = "spec.domain.firmware.bootloader.efi";
        let known = &OVMF[usize::from(secure_boot)];
        let Some((code, vars)) =
            known.iter().find(|(c, v)| std::path::Path::new(c).exists() && std::path::Path::new(v).exists())
        else {
            let what = if secure_boot { " with secure boot" } else { "" };
            return Err(StartError(format!("{field}: OVMF{what} is not installed on the node")));
        };
        let copy = self.config.paths.ephemeral.join("efi-vars.fd");
        let copied = std::fs::create_dir_all(&self.config.paths.ephemeral).and_then(|()| std::fs::copy(vars, &copy));
        copied.map_err(|e| StartError(format!("{field}: copying the variables: {e}")))?;
        Ok(Some((code.into(), copy)))
    }
}

impl Driver for Qemu {
    fn start(&self, machine: Machine, fds: BTreeMap<String, OwnedFd>) -> BoxFuture<'_, Start> {
        Box::pin(async move {
            let mut locked = None;
            let result = self.boot(machine, fds, &mut locked).await;
            Start { result, locked }
        })
    }
}

/// Why one process did not become a domain.
enum Failed {
    /// Somebody else has an image.
    Locked(StartError),
    /// Anything else.
    Start(StartError),
}

impl From<StartError> for Failed {
    fn from(error: StartError) -> Self {
        Self::Start(error)
    }
}

/// QEMU takes a lock on each image: which disk's it was, where somebody else holds it.
fn in_use(said: &str, machine: &Machine, images: &[Option<args::Image>]) -> Option<String> {
    let (_, rest) = said.split_once("Failed to get").filter(|(_, rest)| rest.contains("lock"))?;
    let path = rest.split_once('[').and_then(|(_, p)| p.split_once(']')).map_or("", |(p, _)| p);
    let disk = machine.disks.iter().zip(images).find(|(_, i)| i.as_ref().is_some_and(|i| i.path == Path::new(path)));
    let of = disk.map_or_else(|| format!("an image ({path})"), |(d, _)| format!("the image of disk {}", d.name));
    Some(format!("{of} is in use by another process: as a rule another machine runs on the same volume"))
}

/// Opens the conversation and asks what the wished machine type came out as.
async fn greet(qmp: &Qmp) -> Result<Option<String>, Error> {
    qmp.execute_within("qmp_capabilities", Value::Null, limits::QEMU_START).await?;
    let kind = qmp.execute("qom-get", json!({"path": "/machine", "property": "type"})).await?;
    Ok(kind.as_str().map(|t| t.trim_end_matches("-machine").to_owned()))
}

async fn until(mut flag: watch::Receiver<bool>) {
    let _ = flag.wait_for(|f| *f).await;
}

/// Waits for the process and tells how it ended; gives back the end of its standard error.
async fn wait(mut child: tokio::process::Child, events: mpsc::Sender<Event>, gone: watch::Sender<bool>) -> String {
    let tail: Arc<Mutex<VecDeque<u8>>> = Arc::default();
    let reader = child.stderr.take().map(|mut stderr| {
        let tail = tail.clone();
        tokio::spawn(async move {
            let mut buffer = [0; 1024];
            while let Ok(n @ 1..) = stderr.read(&mut buffer).await {
                let part = buffer.get(..n).unwrap_or_default();
                tracing::info!(target: "qemu", "{}", String::from_utf8_lossy(part).trim_end());
                let mut tail = tail.lock().unwrap_or_else(|p| p.into_inner());
                tail.extend(part);
                let excess = tail.len().saturating_sub(limits::STDERR_TAIL);
                tail.drain(..excess);
            }
        })
    });
    let status = child.wait().await;
    if let Some(reader) = reader {
        // Nothing else holds the pipe, so its end is near; but nothing waits on it for ever.
        let _ = tokio::time::timeout(Duration::from_secs(1), reader).await;
    }
    let bytes: Vec<u8> = tail.lock().unwrap_or_else(|p| p.into_inner()).iter().copied().collect();
    let stderr = String::from_utf8_lossy(&bytes).into_owned();
    let (code, signal) = match status {
        Ok(s) => (s.code(), std::os::unix::process::ExitStatusExt::signal(&s)),
        Err(error) => {
            tracing::error!(%error, "waiting for qemu");
            (Some(-1), None)
        }
    };
    let _ = gone.send(true);
    let _ = events.send(Event::Exited { code, signal, stderr: stderr.clone() }).await;
    stderr
}

/// The monitor's events, in the words of [`Event`]. A change of state is never taken from an event alone: the status
/// is asked for, so that a burst, a loss or an old event in the queue cannot leave a wrong state behind.
async fn translate(qmp: Qmp, mut heard: mpsc::Receiver<QmpEvent>, events: mpsc::Sender<Event>) {
    let mut last = None;
    let mut asked = false;
    loop {
        let event = tokio::select! {
            e = heard.recv() => match e {
                Some(e) => Some(e),
                None => return,
            },
            () = tokio::time::sleep(STATUS_POLL) => None,
            () = async {}, if !asked => None,
        };
        asked = true;
        if let Some(event) = &event {
            let translated = match event.name.as_str() {
                "RESET" => Some(Event::Reset),
                "VSERPORT_CHANGE" => {
                    let open = event.data.get("open").and_then(Value::as_bool).unwrap_or(false);
                    Some(Event::AgentPort(open))
                }
                "GUEST_PANICKED" => Some(Event::Panicked),
                _ => None,
            };
            if let Some(e) = translated
                && events.send(e).await.is_err()
            {
                return;
            }
            if !["STOP", "RESUME", "SHUTDOWN", "RESET", "GUEST_PANICKED"].contains(&event.name.as_str()) {
                continue;
            }
        }
        let answer = qmp.execute("query-status", Value::Null).await;
        let status = answer.as_ref().map(|a| a.get("status").and_then(Value::as_str).unwrap_or_default());
        let state = match status {
            Err(Error::Deaf(_)) => Event::Silent,
            Err(_) => continue,
            Ok("running") => Event::Running,
            Ok("io-error") => Event::Paused(Paused::IoError),
            Ok("shutdown") => Event::PoweredOff,
            Ok("guest-panicked") => Event::Panicked,
            Ok("internal-error") => {
                Event::Broken("the hypervisor cannot emulate what the guest does (internal-error)".into())
            }
            Ok("paused" | "prelaunch" | "suspended" | "watchdog" | "debug" | "save-vm") => {
                Event::Paused(Paused::ByUser)
            }
            Ok(other) => {
                tracing::debug!(status = other, "status without a meaning here");
                continue;
            }
        };
        if last.as_ref() != Some(&state) {
            last = Some(state.clone());
            if events.send(state).await.is_err() {
                return;
            }
        }
    }
}

struct QemuDomain {
    /// Where files may be that are gone in a moment.
    scratch: PathBuf,
    pid: i32,
    qmp: Qmp,
    exited: watch::Receiver<bool>,
    machine_type: String,
    /// Bytes that the guest was given.
    memory: u64,
    /// It has a balloon.
    balloon: bool,
}

/// A file that goes with its name.
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl QemuDomain {
    async fn simply(&self, command: &str) -> Result<(), Error> {
        self.qmp.execute(command, Value::Null).await.map(|_| ())
    }

    fn signal(&self, signal: Signal) {
        // The child is reaped by the task that then sets the flag: before that its number is nobody else's.
        if !*self.exited.borrow() {
            let _ = kill(Pid::from_raw(self.pid), signal);
        }
    }
}

impl Domain for QemuDomain {
    fn pid(&self) -> i32 {
        self.pid
    }

    fn machine_type(&self) -> String {
        self.machine_type.clone()
    }

    fn power_button(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.simply("system_powerdown"))
    }

    fn quit(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            let asked = self.qmp.execute_within("quit", Value::Null, limits::QUIT_GRACE);
            let _ = tokio::join!(asked, tokio::time::timeout(limits::QUIT_GRACE, until(self.exited.clone())));
            self.signal(Signal::SIGKILL);
        })
    }

    fn kill(&self) {
        self.signal(Signal::SIGKILL);
    }

    fn pause(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.simply("stop"))
    }

    fn resume(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.simply("cont"))
    }

    fn figures(&self) -> BoxFuture<'_, Result<Figures, Error>> {
        Box::pin(async {
            let ask = |command, arguments| self.qmp.execute_within(command, arguments, limits::FIGURES);
            let mut figures = Figures { memory: self.memory, ..Figures::default() };
            figures.threads = stats::threads(&ask("query-cpus-fast", Value::Null).await?);
            figures.disks = stats::disks(&ask("query-blockstats", Value::Null).await?);
            if self.balloon {
                // No error where the guest has no driver (yet): there is nothing to tell then.
                let now = ask("query-balloon", Value::Null).await.unwrap_or_default();
                figures.balloon = now.get("actual").and_then(Value::as_u64);
                ask("qom-set", stats::polling()).await?;
                let told = ask("qom-get", json!({"path": stats::BALLOON, "property": "guest-stats"})).await?;
                figures.guest = stats::guest_memory(&told);
            }
            Ok(figures)
        })
    }

    fn screenshot(&self) -> BoxFuture<'_, Result<Vec<u8>, Error>> {
        Box::pin(async {
            let unusable = |e: std::io::Error| Error::Unusable(format!("the picture of the screen: {e}"));
            std::fs::create_dir_all(&self.scratch).map_err(unusable)?;
            let file = Removed(self.scratch.join(format!("screen-{}.png", uuid::Uuid::new_v4())));
            let arguments = json!({"filename": file.0.to_string_lossy(), "format": "png"});
            self.qmp.execute("screendump", arguments).await?;
            let size = std::fs::metadata(&file.0).map_err(unusable)?.len();
            if size > limits::SCREEN {
                let problem = format!("the picture of the screen has {size} bytes, more than {}", limits::SCREEN);
                return Err(Error::Unusable(problem));
            }
            std::fs::read(&file.0).map_err(unusable)
        })
    }

    fn reset(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async {
            self.simply("system_reset").await?;
            // From power-off the vCPUs stand still; cont is no error where they run.
            let status = self.qmp.execute("query-status", Value::Null).await?;
            match status.get("status").and_then(Value::as_str) {
                Some("shutdown" | "prelaunch" | "guest-panicked") => self.simply("cont").await,
                _ => Ok(()),
            }
        })
    }
}

#[cfg(test)]
mod tests;
