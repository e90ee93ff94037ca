//! What really happens in the simulated network, told to the ghost of the model world: by the store at each write, by the
//! launchers' models at each effect. One run is one process and one thread, so there is one truth a thread.

use crate::runs::Options;
use crate::world::{
    Violation,
    dice::Dice,
    ghost::{Author, Begun, Executing, Ghost},
    invariants::SAFETY,
    mutants::Mutant,
    server::{Commit, Res, Seen},
    swarm::{Fault, Swarm},
    told::{LEASE, Office},
    users::NS,
};
use embedded::semantics::value::items;
use node_agent::{PodFacts, simulation::Observe};
use proto::launcher::Order;
use state::{Epoch, NodeName, PodUid, object::ObjectRef};
use std::{cell::RefCell, collections::BTreeMap};

tokio::task_local! {
    /// On whose behalf the API server works.
    pub static ORIGIN: Origin;
}

/// Who calls the API server: the name of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin(pub String);

impl Origin {
    /// A controller.
    pub fn is_controller(&self) -> bool {
        self.0.starts_with("controller")
    }

    /// Controllers and agents: whose calls may not go on for ever.
    pub fn is_ours(&self) -> bool {
        self.is_controller() || self.0.starts_with("node")
    }
}

thread_local! {
    static TRUTH: RefCell<Truth> = RefCell::default();
}

/// What is known of a run.
#[derive(Default)]
pub struct Truth {
    /// What really happened.
    pub ghost: Ghost,
    /// Faults that still strike.
    pub swarm: Option<Swarm>,
    /// A mechanism that is broken.
    pub mutant: Option<Mutant>,
    /// Faults that struck.
    pub struck: BTreeMap<Fault, u64>,
    /// Checks that failed.
    pub violations: Vec<Violation>,
    /// Of everything that was written, when, in which order.
    pub hash: u64,
    /// The newest version of the store.
    revision: u64,
    /// Writes.
    pub writes: u64,
    /// Calls of controllers and agents.
    pub calls: u64,
    /// Hosts whose process ended by itself.
    pub exited: Vec<String>,
    dice: Option<Dice>,
    /// The version of a machine that a controller read last, by host and name.
    reads: BTreeMap<(String, String), u64>,
    /// What was wrong with a deletion when a controller sent it, by UID; `None`: nothing. It is wrong if it is done.
    sent: BTreeMap<String, Option<String>>,
    office: Office,
    log: Option<Vec<String>>,
}

/// Reads or changes the truth.
pub fn with<T>(f: impl FnOnce(&mut Truth) -> T) -> T {
    TRUTH.with_borrow_mut(f)
}

/// Simulated milliseconds since the run began.
pub fn now() -> u64 {
    turmoil::sim_elapsed().map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

/// A line of the log, made only where somebody reads it.
pub fn say(line: impl FnOnce() -> String) {
    let at = now();
    with(|t| {
        if let Some(log) = &mut t.log {
            log.push(format!("{:>9.3} {}", at as f64 / 1000.0, line()));
        }
    });
}

/// The same, of what happens between two steps of the hosts.
pub fn say_at(at: std::time::Duration, line: impl FnOnce() -> String) {
    with(|t| {
        if let Some(log) = &mut t.log {
            log.push(format!("{:>9.3} {}", at.as_secs_f64(), line()));
        }
    });
}

/// Changes the truth where nobody else is at it: for panics, which may come from within.
pub fn note(f: impl FnOnce(&mut Truth)) {
    TRUTH.with(|t| {
        if let Ok(mut t) = t.try_borrow_mut() {
            f(&mut t);
        }
    });
}

/// Whether this fault strikes now.
pub fn hit(fault: Fault) -> bool {
    with(|t| {
        let rate = t.swarm.as_ref().map_or(0, |s| s.rate(fault));
        let hit = t.dice.as_mut().is_some_and(|d| d.chance(rate));
        if hit {
            *t.struck.entry(fault).or_default() += 1;
        }
        hit
    })
}

/// From `low` to `high`, both possible.
pub fn between(low: u64, high: u64) -> u64 {
    with(|t| t.dice.as_mut().map_or(low, |d| d.between(low, high)))
}

impl Truth {
    /// The truth of a new run.
    pub fn begin(seed: u64, swarm: Swarm, options: &Options) {
        with(|t| {
            *t = Self {
                swarm: Some(swarm),
                dice: Some(Dice::new(seed)),
                hash: 0xcbf2_9ce4_8422_2325,
                log: options.record.then(Vec::new),
                mutant: options.mutant,
                ..Self::default()
            };
        });
    }

    /// The lines that were said.
    pub fn log(&mut self) -> Vec<String> {
        self.log.take().unwrap_or_default()
    }

    /// Mixes bytes into the hash of the run.
    pub fn mark(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.hash = (self.hash ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    /// Something is wrong.
    pub fn violated(&mut self, check: &'static str, text: String, at: u64) {
        if self.violations.iter().any(|v| v.check == check) {
            return;
        }
        if let Some(log) = &mut self.log {
            log.push(format!("{:>9.3} VIOLATED {check}: {text}", at as f64 / 1000.0));
        }
        self.violations.push(Violation { check, text, at });
    }

    /// Judges, where something happened.
    pub fn judge(&mut self, at: u64) {
        if !std::mem::take(&mut self.ghost.dirty) {
            return;
        }
        for (id, check) in SAFETY {
            if let Err(text) = check(&self.ghost) {
                self.violated(id, text, at);
            }
        }
    }

    /// Somebody leads: holds the Lease and renewed it within its time.
    pub fn led(&self, at: u64) -> bool {
        self.office.led(at)
    }
}

/// The store wrote something: the value before and after, as they are stored.
pub fn committed(key: &str, before: Option<(i64, &[u8])>, now: Option<&[u8]>, revision: i64) {
    let at = self::now();
    let origin = ORIGIN.try_with(Clone::clone).ok();
    with(|t| {
        t.writes += 1;
        t.mark(&at.to_le_bytes());
        t.mark(&revision.to_le_bytes());
        t.mark(key.as_bytes());
        t.mark(now.unwrap_or_default());
    });
    let Some(res) = Res::of_key(key) else { return };
    let before = before.and_then(|(revision, bytes)| Seen::read(res, revision, bytes));
    let gone = now.is_none();
    let last = now.and_then(|bytes| Seen::read(res, revision, bytes));
    let removed = || before.as_ref().map(|b| b.at(u64::try_from(revision).unwrap_or(0)));
    let Some(now) = last.or_else(removed) else { return };
    say(|| {
        let what = if gone { "is removed" } else { "is written" };
        let by = origin.as_ref().map_or("the cluster", |o| &o.0);
        let (phase, strategy) = (now.text("/status/phase"), now.text("/spec/runStrategy"));
        let waits: Vec<&str> = items(&now.value, "/status/conditions")
            .iter()
            .filter(|c| c["status"] == "False")
            .filter_map(|c| c["message"].as_str().filter(|m| !m.is_empty()))
            .collect();
        format!("{res:?} {} {what} at {revision} by {by} {phase}{strategy} {}", now.name(), waits.join("; "))
    });
    with(|t| {
        let by_controller = origin.as_ref().is_some_and(Origin::is_controller);
        match res {
            Res::Lease if now.name() == LEASE => t.office.written(&mut t.ghost, &now, at),
            Res::Vm => {
                if let (Some(before), true) = (&before, origin.as_ref().is_some_and(|o| o.0 == PEOPLE)) {
                    t.ghost.wished(before, &now);
                }
            }
            Res::Vmi if before.is_none() && by_controller => {
                if let (Some((_, vm, uid)), Some(o)) = (now.owner(), &origin) {
                    let from = t.reads.get(&(o.0.clone(), vm.to_owned())).copied();
                    if let Some(from) = from {
                        t.ghost.creates_from(uid, from);
                    }
                }
            }
            _ => {}
        }
        let begins = !before.as_ref().is_some_and(|b| b.deleting()) && (gone || now.deleting());
        if by_controller
            && begins
            && before.is_some()
            && let Some(Some(wrong)) = t.sent.get(now.uid())
        {
            t.ghost.unfounded.push(wrong.clone());
        }
        t.revision = now.revision;
        // Kubelet and agent of a simulated node are one host.
        let author = if by_controller { Author::Controller } else { Author::Other };
        t.ghost.committed(&Commit { now, before, gone }, at, author);
    });
}

/// A controller sends a request: what it wants to delete is judged by what there is at this moment, and not when the request
/// has arrived.
pub fn sends(method: &http::Method, path: &str) {
    if method != http::Method::DELETE {
        return;
    }
    let words: Vec<&str> = path.split('/').collect();
    let [.., "namespaces", namespace, plural, name] = words.as_slice() else { return };
    let Some(res) = Res::ALL.into_iter().find(|r| r.resource().plural == *plural) else { return };
    with(|t| {
        let (Some(kind), Some(object)) = (res.kind(), t.ghost.find(res, namespace, name).cloned()) else { return };
        let known = t.ghost.unfounded.len();
        let (namespace, name) = ((*namespace).to_owned(), (*name).to_owned());
        t.ghost.deletes(&ObjectRef { kind, namespace, name, uid: object.uid().to_owned().into() });
        let wrong = t.ghost.unfounded.drain(known..).next();
        // One of them that was right is enough.
        let verdict = t.sent.entry(object.uid().to_owned()).or_insert_with(|| wrong.clone());
        if wrong.is_none() {
            *verdict = None;
        }
    });
}

/// The API server is asked for something.
pub fn asked(origin: &Origin, method: &http::Method, uri: &http::Uri) {
    let path = uri.path();
    let watch = uri.query().unwrap_or_default().contains("watch=");
    let at = now();
    let machine = path.strip_prefix("/apis/kubevirt.io/v1/namespaces/default/virtualmachines/");
    with(|t| {
        if origin.is_ours() && !watch && !path.contains("/leases") && !is_list(method, path) {
            t.calls += 1;
            t.ghost.last_call = at;
        }
        let chosen =
            uri.query().unwrap_or_default().contains("labelSelector=") && path.ends_with("/virtualmachineinstances");
        if chosen && !watch && origin.is_controller() && method == http::Method::GET {
            t.ghost.surveyed = t.revision;
        }
        if let Some(name) = machine.filter(|_| origin.is_controller() && method == http::Method::GET)
            && let Some(vm) = t.ghost.find(Res::Vm, NS, name).map(|v| v.revision)
        {
            t.reads.insert((origin.0.clone(), name.to_owned()), vm);
        }
    });
}

/// A write was done.
pub fn done(origin: &Origin, method: &http::Method, path: &str) {
    let of = |res: &Res| path.split('/').any(|part| part == res.resource().plural);
    let Some(res) = Res::ALL.into_iter().find(of).filter(|r| *r != Res::Lease && origin.is_controller()) else {
        return;
    };
    let verb = match *method {
        http::Method::POST => "create",
        http::Method::DELETE => "delete",
        _ => "change",
    };
    with(|t| *t.ghost.writes.entry(format!("{verb} {res:?}")).or_default() += 1);
}

/// Watches that are opened again ask for the newest version by a list.
fn is_list(method: &http::Method, path: &str) -> bool {
    let collections = Res::ALL.map(|r| r.resource().plural.clone());
    method == http::Method::GET && collections.iter().any(|c| path.ends_with(c.as_str()))
}

/// Hears the launchers of one node.
pub struct Ears(pub String);

impl Observe for Ears {
    fn begins(&self, pod: &PodFacts, launcher: &str, order: &Order) {
        let Some(i) = &order.instruct else { return };
        let Some(kind) = proto::convert::instruct_kind(i.kind) else { return };
        say(|| format!("{}: {kind:?} begins in pod {} of {}, epoch {}", self.0, pod.pod_uid, pod.vmi_name, i.epoch));
        with(|t| {
            let version = i.vmi_rv.parse().unwrap_or(0);
            let begun = Begun { id: &i.id, kind, vmi: &i.vmi_uid, version };
            let (node, pod) = (NodeName::from(self.0.as_str()), PodUid(pod.pod_uid.clone()));
            t.ghost.begins(&node, &pod, launcher, &begun);
            t.ghost.admitted(&self.0, Epoch(i.epoch), false);
        });
    }

    fn executes(&self, pod: &PodFacts) {
        say(|| format!("{}: a guest of {} runs in pod {}", self.0, pod.vmi_name, pod.pod_uid));
        let machine = format!("{}/{}", pod.namespace, pod.vmi_name);
        let running = Executing { node: self.0.clone(), pod: pod.pod_uid.clone(), machine };
        with(|t| t.ghost.executes(&pod.vmi_uid, running));
    }

    fn ended(&self, pod: &PodFacts) {
        say(|| format!("{}: nothing of {} runs in pod {} any more", self.0, pod.vmi_name, pod.pod_uid));
        with(|t| t.ghost.ended(&self.0, &pod.pod_uid));
    }
}

/// The host of the people.
pub const PEOPLE: &str = "people";
