//! Explanations: what happened to a machine, when, who caused it, how long it took, what it waits for and what would help.
//!
//! A history is made from a recording ([`Story`]): each step's event goes through the same machine as it did then, and what
//! a person would want to be told of ([`crate::vm::facts`]) is compared before and after. Levels are compared, not events, so
//! what was doubled or late is told once. What a cell waits for has its words from [`crate::vm::waits`], as conditions and
//! Events have.
//!
//! Where there is no recording, the objects themselves tell the little that they keep: when they were made and when each
//! phase began.

pub mod groups;
mod story;
#[cfg(test)]
mod tests;

pub use story::Story;

use crate::{
    Key, NodeName, Timestamp,
    object::Kind,
    trace::Step,
    vm::{
        Vm,
        facts::Facts,
        waits::{self, Wait, Weight},
    },
};
use serde::{Deserialize, Serialize};

/// Version of the JSON form.
pub const API_VERSION: &str = "subresources.kubevirt.io/v1";

/// Who caused something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "name", rename_all = "camelCase")]
pub enum Actor {
    /// Somebody, through the API; the name where admission saw it.
    User(Option<String>),
    /// The controller.
    Controller,
    /// The API server.
    ApiServer,
    /// The scheduler.
    Scheduler,
    /// What runs the pods of a node.
    Kubelet(NodeName),
    /// The node's agent, with the launchers under it.
    Agent(NodeName),
    /// What runs inside of the machine.
    Guest,
}

impl Actor {
    /// In words.
    pub fn words(&self) -> String {
        match self {
            Self::User(Some(name)) => format!("user {name}"),
            Self::User(None) => "a user".into(),
            Self::Controller => "the controller".into(),
            Self::ApiServer => "the API server".into(),
            Self::Scheduler => "the scheduler".into(),
            Self::Kubelet(node) => format!("kubelet of {node}"),
            Self::Agent(node) => format!("agent of {node}"),
            Self::Guest => "the guest".into(),
        }
    }
}

/// Times in JSON: RFC 3339 with milliseconds.
mod stamp {
    use crate::Timestamp;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(t: &Timestamp, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&t.precise())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Timestamp, D::Error> {
        let text = String::deserialize(d)?;
        Timestamp::parse(&text).ok_or_else(|| D::Error::custom(format!("not a time: {text}")))
    }
}

/// The same for times that may be unknown.
mod stamp_option {
    use crate::Timestamp;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(t: &Option<Timestamp>, s: S) -> Result<S::Ok, S::Error> {
        match t {
            Some(t) => s.serialize_some(&t.precise()),
            None => s.serialize_none(),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Timestamp>, D::Error> {
        let Some(text) = Option::<String>::deserialize(d)? else { return Ok(None) };
        Timestamp::parse(&text).map(Some).ok_or_else(|| D::Error::custom(format!("not a time: {text}")))
    }
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// When, by the controller's clock.
    #[serde(with = "stamp")]
    pub time: Timestamp,
    /// Who.
    pub actor: Actor,
    /// Did what.
    pub message: String,
    /// It was none of the ordinary course of things.
    pub problem: bool,
    /// How often the same was told in a row.
    pub count: u64,
    /// When it was told last.
    #[serde(with = "stamp")]
    pub last: Timestamp,
}

/// A step of the last start or stop.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StepTaken {
    /// `start` or `stop`.
    pub operation: String,
    /// Its name, which is that of its span.
    pub step: String,
    /// Began.
    #[serde(with = "stamp")]
    pub start: Timestamp,
    /// Ended; missing while it lasts.
    #[serde(default, with = "stamp_option", skip_serializing_if = "Option::is_none")]
    pub end: Option<Timestamp>,
    /// How long it took, or has taken.
    pub milliseconds: u64,
}

/// What a machine was called from a time on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Called {
    /// Since when.
    #[serde(with = "stamp")]
    pub since: Timestamp,
    /// The word that people read, where there was one yet, else the phase of the instance; empty where neither existed.
    pub status: String,
}

/// What has to happen for a wait to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WaitKind {
    /// The next step, which is under way.
    Progress,
    /// The end of a problem.
    Problem,
    /// Somebody's wish: it is where it should be.
    Person,
}

/// One thing that a machine waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Waiting {
    /// What has to happen.
    pub kind: WaitKind,
    /// What has to come.
    pub waits_for: String,
    /// Type of the condition that says so; empty where none does.
    pub condition: String,
    /// Reason of that condition.
    pub reason: String,
    /// The cause, in the condition's words.
    pub message: String,
    /// What others said in Events about the objects that it waits for, newest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evidence: Vec<String>,
    /// What would end it.
    pub unblock: String,
    /// Since when.
    #[serde(default, with = "stamp_option", skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// Until when at the latest, where that is known.
    #[serde(default, with = "stamp_option", skip_serializing_if = "Option::is_none")]
    pub until: Option<Timestamp>,
}

/// A Warning that somebody else wrote about an object: an Event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// Kind of the object.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// Reason.
    pub reason: String,
    /// In words.
    pub message: String,
    /// Said last.
    pub last: Timestamp,
}

/// The answer to "why".
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// `Explanation`.
    pub kind: String,
    /// [`API_VERSION`].
    pub api_version: String,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// The word that people read, or the phase of a bare instance; empty where neither exists.
    pub status: String,
    /// Phase of the instance; empty where there is none.
    pub phase: String,
    /// Node of the instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeName>,
    /// Run strategy of the VM; empty for a bare instance.
    pub run_strategy: String,
    /// The answer in one sentence.
    pub summary: String,
    /// What it waits for, most specific first.
    pub waits: Vec<Waiting>,
    /// Steps of the last start or stop, in order.
    pub steps: Vec<StepTaken>,
    /// What it was called in the course of time, newest last.
    #[serde(default)]
    pub statuses: Vec<Called>,
    /// What happened, newest last.
    pub history: Vec<Entry>,
    /// The time that this is true of.
    #[serde(with = "stamp")]
    pub as_of: Timestamp,
    /// Asked of the controller that leads, rather than read from a recording.
    pub live: bool,
    /// What the history may be missing, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gaps: Vec<String>,
    /// Objects whose Events may tell more: kind and name.
    #[serde(skip)]
    pub asks: Vec<(&'static str, String)>,
    /// What these Events warn of is why it does not go on.
    #[serde(skip)]
    graver: bool,
}

impl Explanation {
    /// The explanation of a machine at a time, from the story so far. `live` is the cell as it is now, where there is one.
    pub fn new(key: &Key, mut story: Story, live: Option<&Vm>, now: Timestamp) -> Self {
        if let Some(cell) = live {
            story.look(now, cell.known());
        }
        let as_of = if live.is_some() { now } else { story.latest() };
        let facts = story.facts().clone();
        let (vm, vmi) = (facts.vm.as_ref(), facts.vmi.as_ref());
        let waits: Vec<Waiting> = facts.waits.iter().map(|w| waiting(key, w, story.since(w))).collect();
        let phase = vmi.map_or("", |v| v.phase.name()).to_owned();
        let status = vm.map(|v| v.printable.clone()).filter(|p| !p.is_empty()).unwrap_or_else(|| phase.clone());
        let node = vmi.and_then(|v| v.node.clone());
        Self {
            kind: "Explanation".into(),
            api_version: API_VERSION.into(),
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            summary: match (vm, vmi) {
                (None, None) => format!("{} does not exist any more.", key.name),
                (Some(_), _) | (_, Some(_)) => summary(&key.name, &status, node.as_ref(), &waits),
            },
            status,
            phase,
            node,
            asks: facts.waits.iter().flat_map(|w| asks(w, &facts)).collect(),
            graver: facts.waits.first().is_some_and(|w| matches!(w, Wait::Preparation { .. })),
            run_strategy: vm.map_or("", |v| v.strategy.name()).to_owned(),
            steps: steps(&story, &facts, as_of),
            waits,
            statuses: story.statuses().to_vec(),
            history: story.into_entries(),
            as_of,
            live: live.is_some(),
            gaps: vec![],
        }
    }

    /// Adds what others said about the objects that it waits for ([`Self::asks`]). A step that seemed to go well is a problem
    /// where they warn of it.
    pub fn hear(&mut self, mut warnings: Vec<Warning>) {
        warnings.sort_by_key(|w| std::cmp::Reverse(w.last));
        let Some(wait) = self.waits.first_mut().filter(|_| !warnings.is_empty()) else { return };
        wait.evidence =
            warnings.iter().map(|w| format!("{} {}: {}: {}", w.kind, w.name, w.reason, w.message)).collect();
        if let (true, WaitKind::Progress, Some(newest)) = (self.graver, wait.kind, warnings.first()) {
            wait.kind = WaitKind::Problem;
            wait.unblock = waits::container(&newest.message);
        }
        self.summary = summary(&self.name, &self.status, self.node.as_ref(), &self.waits);
    }
}

/// Objects of others that a wait is about.
fn asks(wait: &Wait, facts: &Facts) -> Vec<(&'static str, String)> {
    let pod = || facts.pod.iter().map(|p| (Kind::Pod.name(), p.name.clone())).collect();
    if let Wait::Unschedulable { unbound, .. } = wait {
        return unbound.iter().map(|c| (Kind::PersistentVolumeClaim.name(), c.clone())).collect();
    }
    if let Wait::Preparation { .. } | Wait::Readiness { .. } = wait { pod() } else { vec![] }
}

fn waiting(key: &Key, wait: &Wait, since: Option<Timestamp>) -> Waiting {
    let (condition, reason) = wait.name();
    Waiting {
        kind: match wait.weight() {
            Weight::Progress => WaitKind::Progress,
            Weight::Problem => WaitKind::Problem,
            Weight::Person => WaitKind::Person,
        },
        waits_for: wait.what(),
        condition: condition.into(),
        reason: reason.into(),
        message: wait.message(),
        evidence: vec![],
        unblock: wait.unblock(&key.name),
        since,
        until: wait.until(),
    }
}

fn summary(name: &str, status: &str, node: Option<&NodeName>, waits: &[Waiting]) -> String {
    let place = node.map_or(String::new(), |n| format!(" on node {n}"));
    match waits.first() {
        None => format!("{name} is {status}{place}, as it should be."),
        Some(w) => {
            let is = if status.is_empty() { String::new() } else { format!(" is {status}{place} and") };
            let why = [w.message.as_str(), w.evidence.first().map_or("", String::as_str)];
            let why: Vec<&str> = why.into_iter().map(|t| t.trim_end_matches('.')).filter(|t| !t.is_empty()).collect();
            match why[..] {
                [] => format!("{name}{is} waits for {}.", w.waits_for),
                _ => format!("{name}{is} waits for {}: {}.", w.waits_for, why.join("; ")),
            }
        }
    }
}

/// Steps of a start, in order.
const START: [Step; 7] =
    [Step::Create, Step::Place, Step::Prepare, Step::Authorise, Step::Boot, Step::Publish, Step::GuestAgent];
/// Steps of a stop, in order.
const STOP: [Step; 2] = [Step::Shutdown, Step::Teardown];

fn steps(story: &Story, facts: &Facts, now: Timestamp) -> Vec<StepTaken> {
    let taken = |step: Step, start: Timestamp, end: Option<Timestamp>| StepTaken {
        operation: step.operation().into(),
        step: step.name().into(),
        start,
        end,
        milliseconds: end.unwrap_or(now).since(start).0,
    };
    // Before there is an instance, the steps that are known are those of the one before.
    let fresh = facts.vmi.is_none() && story.operation().is_some_and(|(_, stopping)| !stopping);
    let done = if fresh { &[] } else { story.steps() };
    let mut all: Vec<_> = done.iter().map(|(s, from, to)| taken(*s, *from, Some(*to))).collect();
    let Some((began, stopping)) = story.operation() else { return all };
    let order = if stopping { &STOP[..] } else { &START[..] };
    let next = order.iter().find(|s| done.iter().all(|(d, ..)| d != *s));
    // Whether a guest has an agent is its own affair, and one that has ended takes no step.
    let goes_on = facts.waits.first().is_some_and(|w| w.weight() != Weight::Person)
        && facts.vmi.as_ref().is_some_and(|v| stopping || !v.phase.is_final());
    if let Some(step) = next.filter(|s| goes_on && **s != Step::GuestAgent) {
        let since = done.iter().map(|(_, _, to)| *to).max().unwrap_or(began);
        all.push(taken(*step, since, None));
    }
    all
}
