//! Verbs: requests without an object, each carried out at most once. Their result comes back in the reply, and what
//! they changed comes as a level like everything else.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use proto::agent::{DomainState, VerbReply, VerbRequest};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::{Back, Core, Life};
use crate::guest::{Agent, AgentError, views};
use crate::hypervisor::{self, Domain};
use crate::limits;
use crate::time::Boottime;

/// A verb that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Pause,
    Unpause,
    Reset,
    SoftReboot,
    Freeze(Option<Duration>),
    Unfreeze,
    Screenshot,
    GuestOsInfo,
    UserList,
    FilesystemList,
}

impl Verb {
    fn read(request: &VerbRequest) -> Result<Self, Problem> {
        Ok(match request.verb.as_str() {
            "pause" => Verb::Pause,
            "unpause" => Verb::Unpause,
            "reset" => Verb::Reset,
            "softreboot" => Verb::SoftReboot,
            "freeze" => Verb::Freeze(unfreeze_after(&request.body)?),
            "unfreeze" => Verb::Unfreeze,
            "screenshot" => Verb::Screenshot,
            "guestosinfo" => Verb::GuestOsInfo,
            "userlist" => Verb::UserList,
            "filesystemlist" => Verb::FilesystemList,
            other => return Err(Problem::new("unsupported", format!("unknown verb {other:?}"))),
        })
    }
}

/// Why a verb was not carried out: reason code and words.
#[derive(Debug)]
pub(super) struct Problem {
    pub(super) reason: &'static str,
    pub(super) message: String,
}

impl Problem {
    fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }
}

impl From<hypervisor::Error> for Problem {
    fn from(e: hypervisor::Error) -> Self {
        Problem::new("failed", e.to_string())
    }
}

impl From<AgentError> for Problem {
    fn from(e: AgentError) -> Self {
        Problem::new("failed", e.to_string())
    }
}

enum Entry {
    Running(Vec<oneshot::Sender<VerbReply>>),
    Done(VerbReply),
}

/// Replies by id, so that a repeated request is answered and not repeated.
#[derive(Default)]
pub(super) struct Table {
    entries: BTreeMap<String, Entry>,
    order: VecDeque<String>,
}

impl Table {
    fn begin(&mut self, id: &str) {
        self.entries.insert(id.into(), Entry::Running(Vec::new()));
        self.order.push_back(id.into());
        if self.order.len() > limits::VERBS
            && let Some(oldest) = self.order.pop_front()
        {
            self.entries.remove(&oldest);
        }
    }

    fn end(&mut self, id: &str, reply: &VerbReply) {
        if let Some(entry) = self.entries.get_mut(id)
            && let Entry::Running(waiting) = std::mem::replace(entry, Entry::Done(reply.clone()))
        {
            for w in waiting {
                let _ = w.send(reply.clone());
            }
        }
    }

    /// The domain is over: who waits is told by the end of their channel.
    pub fn over(&mut self) {
        self.entries.retain(|_, e| matches!(e, Entry::Done(_)));
        self.order.retain(|id| self.entries.contains_key(id));
    }
}

fn reply(result: Result<Vec<u8>, Problem>) -> VerbReply {
    match result {
        Ok(body) => VerbReply { ok: true, body: body.into(), ..VerbReply::default() },
        Err(p) => VerbReply { ok: false, reason: p.reason.into(), message: p.message, ..VerbReply::default() },
    }
}

impl Core {
    pub(super) fn verb(&mut self, request: VerbRequest, answer: oneshot::Sender<VerbReply>) {
        match self.verbs.entries.get_mut(&request.id) {
            Some(Entry::Done(done)) => return drop(answer.send(done.clone())),
            Some(Entry::Running(waiting)) if waiting.len() < limits::ASKS => return waiting.push(answer),
            Some(Entry::Running(_)) | None => {}
        }
        let begun = self.admit(&request);
        let (verb, domain, agent, connected, freeze) = match begun {
            Ok(b) => b,
            // A refusal is no effect: the same id may be asked again.
            Err(problem) => return drop(answer.send(reply(Err(problem)))),
        };
        tracing::info!(id = %request.id, ?verb, traceparent = %request.traceparent, "verb");
        self.verbs.begin(&request.id);
        let ttl = if request.ttl_ms == 0 { limits::VERB_TTL } else { Duration::from_millis(request.ttl_ms) };
        let operation =
            super::steps::Operation { traceparent: request.traceparent, cell: request.id.clone(), name: "agent-verb" };
        let (id, word, back, since) = (request.id, request.verb, self.back.clone(), crate::time::unix_us());
        tokio::spawn(async move {
            let work = carry_out(verb, domain, agent, connected, freeze);
            let result = match tokio::time::timeout(ttl, work).await {
                Ok(r) => r,
                Err(_) => Err(Problem::new("expired", format!("no result within {ttl:?}"))),
            };
            let _ = back.send(Back::Verb { id, verb, word, result, reply_to: answer, operation, since }).await;
        });
    }

    #[allow(clippy::type_complexity)]
    fn admit(&mut self, request: &VerbRequest) -> Result<(Verb, Arc<dyn Domain>, Agent, bool, String), Problem> {
        if request.vmi_uid != self.config.vmi_uid || request.pod_uid != self.config.pod_uid {
            return Err(Problem::new("not-found", "this launcher is of another VMI or pod"));
        }
        let verb = Verb::read(request)?;
        let state = self.state();
        let Life::Alive(alive) = &mut self.life else {
            return Err(Problem::new("not-running", "there is no running domain"));
        };
        match (verb, state) {
            (Verb::Pause, DomainState::Paused) => return Err(Problem::new("already-paused", "the domain is paused")),
            (Verb::Unpause, DomainState::Running) => {
                return Err(Problem::new("not-paused", "the domain is not paused"));
            }
            (_, DomainState::Running | DomainState::Paused) => {}
            (_, DomainState::Deaf) => return Err(Problem::new("no-answer", "the hypervisor does not answer")),
            _ => return Err(Problem::new("not-running", "the domain does not run")),
        }
        let level = alive.agent_level.borrow();
        let connected = level.connected;
        let freeze = level.fs_freeze_status.clone();
        drop(level);
        let needs_agent = matches!(
            verb,
            Verb::Freeze(_) | Verb::Unfreeze | Verb::GuestOsInfo | Verb::UserList | Verb::FilesystemList
        );
        if needs_agent && !connected {
            return Err(AgentError::NotConnected.into());
        }
        if verb == Verb::SoftReboot && !connected {
            alive.rebooting = Some(Boottime::after(limits::SOFT_REBOOT));
        }
        Ok((verb, alive.domain.clone(), alive.agent.clone(), connected, freeze))
    }

    pub(super) fn verb_done(
        &mut self,
        id: &str,
        verb: Verb,
        result: Result<Vec<u8>, Problem>,
        answer: oneshot::Sender<VerbReply>,
    ) {
        if let Life::Alive(alive) = &mut self.life {
            match (verb, result.is_ok()) {
                (Verb::Freeze(after), true) => alive.thaw = after.map(Boottime::after),
                // Whether it froze is not known, and whoever asked will not thaw what they believe not to be frozen. Where
                // an earlier freeze has its time, that stays.
                (Verb::Freeze(_), false) => alive.thaw = alive.thaw.or_else(|| Some(Boottime::now())),
                (Verb::Unfreeze, true) => alive.thaw = None,
                _ => {}
            }
        }
        if result.is_ok() {
            // The event says the same in a moment; whoever asks next should not see the past.
            match verb {
                Verb::Pause if !self.ending.begun() => self.set_state(DomainState::Paused, "PausedByUser"),
                Verb::Unpause if !self.ending.begun() => self.set_state(DomainState::Running, ""),
                _ => {}
            }
        }
        let reply = reply(result);
        self.verbs.end(id, &reply);
        let _ = answer.send(reply);
    }

    /// Nobody thawed the guest in time.
    pub(super) fn thaw(&mut self) {
        let Life::Alive(alive) = &mut self.life else { return };
        // Tried again until the agent says that it is done. What it says of its state is no proof: it may be older than the
        // freeze.
        let again = Boottime::after(limits::AGENT_FREEZE_TIMEOUT);
        alive.thaw = Some(again);
        tracing::info!("nobody thawed the file systems in time: thawing");
        let (agent, back) = (alive.agent.clone(), self.back.clone());
        tokio::spawn(async move {
            match agent.call_within("guest-fsfreeze-thaw", limits::AGENT_FREEZE_TIMEOUT).await {
                Ok(_) => {
                    let _ = back.send(Back::Thawed(again)).await;
                }
                Err(error) => tracing::warn!(%error, "thawing"),
            }
        });
    }

    /// It worked; a freeze that came after it has a time of its own.
    pub(super) fn thawed(&mut self, again: Boottime) {
        if let Life::Alive(alive) = &mut self.life
            && alive.thaw == Some(again)
        {
            alive.thaw = None;
        }
    }
}

async fn carry_out(
    verb: Verb,
    domain: Arc<dyn Domain>,
    agent: Agent,
    connected: bool,
    freeze: String,
) -> Result<Vec<u8>, Problem> {
    let json = |view: Result<Value, AgentError>| Ok(view?.to_string().into_bytes());
    match verb {
        Verb::Pause => domain.pause().await?,
        Verb::Unpause => domain.resume().await?,
        Verb::Reset => domain.reset().await?,
        Verb::SoftReboot if connected => {
            agent.call_silent("guest-shutdown", json!({"mode": "reboot"})).await?;
        }
        Verb::SoftReboot => domain.power_button().await?,
        Verb::Freeze(_) => {
            agent.call_within("guest-fsfreeze-freeze", limits::AGENT_FREEZE_TIMEOUT).await?;
        }
        Verb::Unfreeze => {
            agent.call_within("guest-fsfreeze-thaw", limits::AGENT_FREEZE_TIMEOUT).await?;
        }
        Verb::Screenshot => return Ok(domain.screenshot().await?),
        Verb::GuestOsInfo => return json(views::guest_os_info(&agent, &freeze).await),
        Verb::UserList => return json(views::user_list(&agent).await),
        Verb::FilesystemList => return json(views::filesystem_list(&agent).await),
    }
    Ok(Vec::new())
}

/// `{"unfreezeTimeout": "5m0s"}`; nothing: the default; zero: never.
fn unfreeze_after(body: &[u8]) -> Result<Option<Duration>, Problem> {
    let bad = |what: &str| Problem::new("failed", format!("unfreezeTimeout: {what}"));
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(Some(limits::UNFREEZE_AFTER));
    }
    let value: Value = serde_json::from_slice(body).map_err(|_| bad("the body is no JSON"))?;
    match value.get("unfreezeTimeout") {
        None | Some(Value::Null) => Ok(Some(limits::UNFREEZE_AFTER)),
        Some(Value::String(text)) => {
            let d = go_duration(text).ok_or_else(|| bad("is not a duration"))?;
            Ok((!d.is_zero()).then_some(d))
        }
        Some(_) => Err(bad("is not a duration")),
    }
}

/// Go's text form of a duration, without a sign.
fn go_duration(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut rest = text;
    let mut total = 0f64;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest.get(..digits)?.parse().ok()?;
        rest = rest.get(digits..)?;
        let unit = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        total += number
            * match rest.get(..unit)? {
                "h" => 3600.0,
                "m" => 60.0,
                "s" => 1.0,
                "ms" => 1e-3,
                "us" | "µs" => 1e-6,
                "ns" => 1e-9,
                _ => return None,
            };
        rest = rest.get(unit..)?;
    }
    Duration::try_from_secs_f64(total).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn durations_as_go_writes_them() {
        assert_eq!(go_duration("5m0s"), Some(Duration::from_secs(300)));
        assert_eq!(go_duration("1h2m3.5s"), Some(Duration::from_millis(3_723_500)));
        assert_eq!(go_duration("100ms"), Some(Duration::from_millis(100)));
        for bad in ["", "5", "s", "5x", "-1s", "1.2.3s", "1e9h", "999999999999999999999999h"] {
            assert_eq!(go_duration(bad), None, "{bad}");
        }
        assert_eq!(unfreeze_after(b"").unwrap(), Some(limits::UNFREEZE_AFTER));
        assert_eq!(unfreeze_after(br#"{"unfreezeTimeout":"0s"}"#).unwrap(), None);
        assert!(unfreeze_after(b"{").is_err() && unfreeze_after(br#"{"unfreezeTimeout":5}"#).is_err());
    }
}
