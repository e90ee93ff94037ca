//! The serial console of a guest, through `virtfold console` in a terminal of its own.

use super::cluster::{self, Cluster};
use anyhow::{Context, Result, bail};
use nix::pty::openpty;
use regex::Regex;
use std::{
    fs::File,
    io::{Read, Write},
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::{Duration, Instant},
};

/// For the answer of a guest that is up.
const ANSWER: Duration = Duration::from_secs(30);
/// From the start of a guest to its login prompt; 3 s on an idle machine.
const BOOT: Duration = Duration::from_secs(90);
/// What ends `virtfold console`: ctrl-].
const ESCAPE: &[u8] = b"\x1d";

/// An attached console.
pub struct Console {
    child: Child,
    keyboard: File,
    screen: Receiver<Vec<u8>>,
    seen: String,
    commands: u32,
}

impl Console {
    /// Attaches to a VM's console.
    pub fn attach(cluster: &Cluster, vm: &str) -> Result<Self> {
        let pty = openpty(None, None).context("open a terminal")?;
        let child = Command::new(cluster::virtfold()?)
            .args(["console", vm])
            .env("KUBECONFIG", cluster.kubeconfig())
            .stdin(Stdio::from(pty.slave.try_clone()?))
            .stdout(Stdio::from(pty.slave.try_clone()?))
            .stderr(Stdio::from(pty.slave))
            .spawn()
            .context("start virtfold console")?;
        let keyboard = File::from(pty.master);
        let mut reader = keyboard.try_clone()?;
        let (sender, screen) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count) = reader.read(&mut buffer) {
                if count == 0 || sender.send(buffer[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        Ok(Self { child, keyboard, screen, seen: String::new(), commands: 0 })
    }

    /// Waits until the pattern is on the screen, and forgets all up to its end; returns what the first group matched (or all).
    pub fn expect(&mut self, pattern: &str, limit: Duration) -> Result<String> {
        let regex = Regex::new(pattern).context("compile the pattern")?;
        let deadline = Instant::now() + limit;
        loop {
            if let Some(found) = regex.captures(&self.seen) {
                let text = found.get(1).or(found.get(0)).map(|group| group.as_str().to_owned()).unwrap_or_default();
                let end = found.get(0).map(|all| all.end()).unwrap_or_default();
                self.seen.drain(..end);
                return Ok(text);
            }
            match self.screen.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(bytes) => self.seen += &String::from_utf8_lossy(&bytes),
                Err(RecvTimeoutError::Timeout) => {
                    bail!("no '{pattern}' on the console within {} s. It shows:\n{}", limit.as_secs(), self.seen)
                }
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("the console ended before '{pattern}' appeared. It shows:\n{}", self.seen)
                }
            }
        }
    }

    /// Types.
    pub fn send(&mut self, text: &str) -> Result<()> {
        // A terminal that nobody reads any more blocks whoever types, for ever.
        if let Some(status) = self.child.try_wait()? {
            bail!("virtfold console has ended with {status}. It shows:\n{}", self.seen);
        }
        self.keyboard.write_all(text.as_bytes()).context("type on the console")
    }

    /// Waits for the login prompt, logs in, and waits for the shell.
    pub fn login(&mut self) -> Result<()> {
        let deadline = Instant::now() + BOOT;
        // Whoever attaches late sees nothing until the guest writes again, and what the guest's services write to the console may come
        // right after a prompt: Enter brings a new one, whether it was the login's or the shell's.
        let mut typed = "\r";
        loop {
            self.send(typed)?;
            typed = match self.expect(r"login: $|# (\x1b\[6n)?$", Duration::from_secs(2)) {
                Ok(found) if found.starts_with("login") => "root\r",
                Ok(_) => return self.shell(),
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) => "\r",
            };
        }
    }

    fn shell(&mut self) -> Result<()> {
        self.send("PS1='# '; stty -echo cols 500\r")?;
        self.run("true").map(|_| ())
    }

    /// Runs a command in the guest; returns its output.
    pub fn run(&mut self, command: &str) -> Result<String> {
        self.run_within(command, ANSWER)
    }

    /// Starts a command in the guest that goes on in the background. Not as a job of the login shell: busybox's logs out when one ends.
    pub fn start(&mut self, command: &str) -> Result<()> {
        self.run(&format!("(setsid sh -c '{command}' >/dev/null 2>&1 </dev/null &)")).map(|_| ())
    }

    /// Runs a command in the guest that may take so long.
    pub fn run_within(&mut self, command: &str, limit: Duration) -> Result<String> {
        self.commands += 1;
        let number = self.commands;
        // The marks are put together by the guest, so that an echo of the line is no mark.
        self.send(&format!("echo BEG''IN{number}.; {command}; echo E''ND{number}.$?.\r"))?;
        self.expect(&format!(r"BEGIN{number}\.\r?\n"), limit)?;
        let text = self.expect(&format!(r"(?s)^(.*)END{number}\.\d+\.\r?\n"), limit)?;
        Ok(text.replace('\r', "").trim_end().to_owned())
    }

    /// Leaves by the escape key; the program must end by itself, with exit code 0.
    pub fn leave(mut self) -> Result<()> {
        self.keyboard.write_all(ESCAPE)?;
        let status = super::wait::until("the end of virtfold console", Duration::from_secs(10), || {
            Ok(self.child.try_wait()?.ok_or_else(|| "still running".to_owned()))
        })?;
        if !status.success() {
            bail!("virtfold console ended with {status}");
        }
        Ok(())
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
