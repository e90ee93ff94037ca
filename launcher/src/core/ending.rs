//! How a domain comes to its end, whoever wants it.

use std::time::Duration;

use proto::agent::{Cause, DomainState, Outcome};

use super::{Back, Core, Life};
use crate::latch::{Answer, Reason};
use crate::limits;
use crate::outcome::bounded;
use crate::time::{Boottime, unix_ms};

/// A wish that the domain should end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// Power button, then kill after this time.
    Shutdown(Duration),
    /// At once.
    Destroy,
}

/// What is known about the end.
#[derive(Default)]
pub(super) struct Ending {
    /// Why it ends or will have ended; the first reason stands.
    cause: Option<(Cause, String)>,
    /// A graceful shutdown is under way.
    stopping: bool,
    /// When it becomes a kill.
    pub deadline: Option<Boottime>,
    /// When the power button is pressed again.
    pub next_press: Option<Boottime>,
    /// Came while the driver was still starting.
    pub postponed: Option<Wish>,
}

impl Ending {
    pub fn begun(&self) -> bool {
        self.stopping || self.cause.is_some()
    }
}

/// Why a domain ended whose process is gone: the reason that was noted before, or else what the exit itself says.
pub(super) fn verdict(
    noted: Option<(Cause, String)>,
    code: Option<i32>,
    signal: Option<i32>,
    stderr: &str,
) -> (Cause, i32, String) {
    let exit = code.or(signal.map(|s| 128 + s)).unwrap_or(-1);
    if let Some((cause, message)) = noted {
        return (cause, exit, message);
    }
    let said = stderr.trim();
    let said = if said.is_empty() { String::new() } else { format!(": {said}") };
    match (code, signal) {
        (Some(0), _) => (Cause::Destroyed, exit, "the hypervisor was told to quit".into()),
        (_, Some(signal)) => (Cause::Crashed, exit, format!("the hypervisor was ended by signal {signal}{said}")),
        (Some(code), None) => (Cause::Crashed, exit, format!("the hypervisor exited with code {code}{said}")),
        (None, None) => (Cause::Crashed, exit, format!("the hypervisor is gone{said}")),
    }
}

impl Core {
    pub(super) fn wish(&mut self, wish: Wish) {
        match &self.life {
            Life::Empty | Life::Over => return,
            Life::Starting { .. } => {
                // A kill outweighs a shutdown; a shutdown's time counts from when the guest is there to hear it.
                if self.ending.postponed != Some(Wish::Destroy) {
                    self.ending.postponed = Some(wish);
                }
                return;
            }
            Life::Alive(_) => {}
        }
        match wish {
            Wish::Destroy => self.finish_now(Cause::Destroyed, "destroyed on request"),
            Wish::Shutdown(grace) => {
                let deadline = Boottime::after(grace);
                self.ending.deadline = Some(self.ending.deadline.map_or(deadline, |d| d.min(deadline)));
                if !self.ending.stopping {
                    self.ending.stopping = true;
                    self.set_state(DomainState::ShuttingDown, "");
                    self.press();
                }
            }
        }
    }

    /// Presses the power button, and again after a while: a guest that boots does not hear it, a paused one neither.
    pub(super) fn press(&mut self) {
        self.ending.next_press = Some(Boottime::after(limits::POWER_BUTTON_AGAIN));
        let Life::Alive(alive) = &self.life else { return };
        let (domain, back) = (alive.domain.clone(), self.back.clone());
        tokio::spawn(async move {
            let pressed = match domain.resume().await {
                Ok(()) => domain.power_button().await,
                Err(e) => Err(e),
            };
            let _ = back.send(Back::PowerPressed(pressed)).await;
        });
    }

    pub(super) fn deadline(&mut self) {
        self.ending.deadline = None;
        self.finish_now(Cause::KilledAfterGrace, "killed: the guest did not shut down within its grace period");
    }

    /// Notes why, and ends the process in order.
    pub(super) fn finish(&mut self, cause: Cause, message: &str) {
        if self.ending.cause.is_some() {
            return;
        }
        self.finish_now(cause, message);
    }

    fn finish_now(&mut self, cause: Cause, message: &str) {
        let Life::Alive(alive) = &self.life else { return };
        self.ending.cause.get_or_insert((cause, message.into()));
        self.ending.next_press = None;
        self.ending.deadline = None;
        self.set_state(DomainState::ShuttingDown, "");
        let domain = alive.domain.clone();
        tokio::spawn(async move { domain.quit().await });
    }

    pub(super) fn exited(&mut self, code: Option<i32>, signal: Option<i32>, stderr: &str) {
        let (cause, exit, message) = verdict(self.ending.cause.take(), code, signal, stderr);
        self.over(cause, exit, &message);
    }

    pub(super) fn start_failed(&mut self, reason: Reason, message: String) {
        if let Life::Starting { start_id } = &self.life {
            let id = start_id.clone();
            self.latch.settled(&id, Answer::Refused(reason, message.clone()));
        }
        self.over(Cause::StartFailed, 0, &message);
    }

    pub(super) fn never_started(&mut self) {
        self.over(Cause::Destroyed, 0, "stopped before it was started");
    }

    /// The end: the level, the outcome and the termination message.
    fn over(&mut self, cause: Cause, exit: i32, message: &str) {
        self.life = Life::Over;
        self.latch.ended();
        // A guest that was asked to end has not failed.
        let asked = matches!(cause, Cause::GuestShutdown | Cause::Destroyed);
        self.step_ends("power-down", (!asked).then_some((crate::outcome::cause_word(cause), message)));
        self.step_ends("kill", None);
        // A guest need not have an agent.
        self.steps.forget("guest-boot");
        self.steps_end(Some((crate::outcome::cause_word(cause), message)));
        self.ending = Ending::default();
        self.verbs.over();
        self.publish(|d| {
            d.state = DomainState::Stopped as i32;
            d.paused_reason.clear();
            if let Some(guest) = &mut d.guest {
                guest.agent_connected = false;
            }
        });
        let outcome = Outcome {
            vmi_uid: self.config.vmi_uid.clone(),
            pod_uid: self.config.pod_uid.clone(),
            cause: cause as i32,
            exit,
            seq: self.level.borrow().domain.seq + 1,
            message: bounded(message),
            at_unix_ms: unix_ms(),
            namespace: self.config.namespace.clone(),
            name: self.config.name.clone(),
        };
        tracing::info!(?cause, exit, message, "the domain is over");
        if let Some(path) = &self.config.termination_log
            && let Err(error) = crate::outcome::write(path, &outcome)
        {
            tracing::error!(%error, path = %path.display(), "writing the termination message");
        }
        self.level.send_modify(|l| {
            l.domain.seq = outcome.seq;
            l.outcome = Some(outcome);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_noted_reason_stands_and_else_the_exit_speaks() {
        let noted = |c| Some((c, "why".to_owned()));
        let cases = [
            (noted(Cause::GuestShutdown), Some(0), None, Cause::GuestShutdown, 0),
            (noted(Cause::KilledAfterGrace), None, Some(9), Cause::KilledAfterGrace, 137),
            (noted(Cause::Panicked), Some(0), None, Cause::Panicked, 0),
            (None, None, Some(9), Cause::Crashed, 137),
            (None, None, Some(11), Cause::Crashed, 139),
            (None, Some(1), None, Cause::Crashed, 1),
            (None, Some(0), None, Cause::Destroyed, 0),
            (None, None, None, Cause::Crashed, -1),
        ];
        for (noted, code, signal, cause, exit) in cases {
            let (c, e, message) = verdict(noted, code, signal, "boom\n");
            assert_eq!((c, e), (cause, exit), "{code:?} {signal:?}");
            assert!(!message.is_empty());
        }
    }
}
