//! A controller process: watch caches, the Lease, and the driver of the real Vm and Node cells, as `reconcilers/` has them.
//! Nothing is decided here but who leads.

use super::{
    Action, World,
    api::{Proc, Said, Then, Verb},
    driver::{CellId, Driver, absent, present},
    mutants::Mutant,
    server::{Commit, Res, Seen, Wanted},
    users::NS,
};
use embedded::semantics::write::Part;
use serde_json::json;
use state::{Epoch, Key, LeaderInstance, Timestamp, object::CommandId};
use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

/// Kinds that a controller watches, in the order in which its cells are told of them at first; the last one where there may be
/// any, so that a seed without sets is what it was before there were some.
const WATCHED: [Res; 6] = [Res::Node, Res::Claim, Res::Pod, Res::Vmi, Res::Vm, Res::Set];
/// Who has not renewed for so long has lost the Lease.
pub const LEASE: u64 = 15_000;
/// After so long a lost event is made up for.
const WITHHELD: u64 = 20_000;
/// Between two renewals.
const RENEW: u64 = 2_000;
/// Namespace and name of the Lease.
pub const LEASE_NAME: (&str, &str) = ("virtfold", "virtfold-controller");

#[derive(Debug, Clone, Default)]
pub(super) struct Cache {
    pub objects: BTreeMap<String, Rc<Seen>>,
    /// Known by a cell's own write, and not by the watch yet.
    noted: BTreeMap<String, Rc<Seen>>,
    synced: bool,
}

/// A controller process.
#[derive(Debug, Clone)]
pub(super) struct Controller {
    /// Which of its lives.
    pub inc: u32,
    /// The process is there.
    pub alive: bool,
    /// It stands still until then.
    pub paused: u64,
    /// What came meanwhile, in order.
    pub held: Vec<Action>,
    pub instance: LeaderInstance,
    pub caches: BTreeMap<Res, Cache>,
    /// Version and since when it is seen, of the Lease of another.
    seen: Option<(u64, u64)>,
    lease: Option<Rc<Seen>>,
    pub epoch: Option<Epoch>,
    /// It may act as leader until then, by its own clock.
    pub until: u64,
    pub driver: Option<Driver>,
    /// It does not care how long its Lease is.
    pub obstinate: bool,
}

impl Controller {
    pub fn new() -> Self {
        Self {
            inc: 0,
            alive: false,
            paused: 0,
            held: vec![],
            instance: LeaderInstance::default(),
            caches: BTreeMap::new(),
            seen: None,
            lease: None,
            epoch: None,
            until: 0,
            driver: None,
            obstinate: false,
        }
    }

    /// What a write or a live read returned: a list without it has to be noticed.
    pub fn note(&mut self, o: &Rc<Seen>) {
        if let Some(cache) = self.caches.get_mut(&o.res)
            && !cache.objects.contains_key(o.uid())
        {
            cache.noted.insert(o.uid().into(), o.clone());
        }
    }

    pub fn leads(&self, now: u64) -> bool {
        self.alive && self.epoch.is_some() && (self.until > now || self.obstinate)
    }
}

impl World {
    pub(super) fn proc_of(&self, c: usize) -> Proc {
        Proc::Controller(c, self.controllers[c].inc)
    }

    pub(super) fn driver(&mut self, c: usize) -> Option<&mut Driver> {
        self.controllers.get_mut(c).and_then(|x| x.driver.as_mut())
    }

    // --- the process ---

    pub(super) fn start_controller(&mut self, c: usize) {
        let instance = LeaderInstance(self.fresh_id("leader"));
        let x = &mut self.controllers[c];
        if x.alive {
            return;
        }
        let obstinate = self.mutant == Some(Mutant::DeposedActs);
        *x = Controller { inc: x.inc + 1, alive: true, instance, obstinate, ..Controller::new() };
        let me = self.proc_of(c);
        self.say(|| format!("{me:?} starts"));
        let sets = !self.sets.is_empty();
        for res in WATCHED.into_iter().filter(|r| *r != Res::Set || sets) {
            self.controllers[c].caches.insert(res, Cache::default());
            self.watch(me, res);
        }
        self.after(1, Action::LeaseTick(me));
    }

    /// The process ends, at once.
    pub(super) fn crash_controller(&mut self, c: usize, why: &str) {
        let me = self.proc_of(c);
        let x = &mut self.controllers[c];
        if !x.alive {
            return;
        }
        let inc = x.inc;
        *x = Controller { inc, ..Controller::new() };
        self.say(|| format!("{me:?} ends: {why}"));
        self.unwatch(me);
        let open: Vec<u64> = self.sessions.iter().filter(|(_, s)| s.controller == me).map(|(id, _)| *id).collect();
        for id in open {
            self.cut(id);
        }
        let pause = self.dice.between(200, 3000);
        self.after(pause, Action::StartController(c));
    }

    /// It stands still for a while.
    pub(super) fn pause_controller(&mut self, c: usize, how_long: u64) {
        let until = self.now + how_long;
        let x = &mut self.controllers[c];
        x.paused = x.paused.max(until);
        self.after(how_long, Action::Resume(c));
    }

    /// It goes on, with everything that came meanwhile.
    pub(super) fn resume_controller(&mut self, c: usize) {
        if self.controllers[c].paused > self.now {
            return;
        }
        for action in std::mem::take(&mut self.controllers[c].held) {
            self.act(action);
        }
    }

    // --- the Lease ---

    pub(super) fn lease_tick(&mut self, c: usize) {
        let me = self.proc_of(c);
        let asked = self.now;
        if self.is(Mutant::Chatty) && self.controllers[c].driver.is_some() {
            let key = Key::new(NS, "vm-0");
            let read = Verb::Get(Res::Vm, key.namespace.clone(), key.name.clone());
            self.call(me, read, Then::Settle(CellId::Vm(key), CommandId(u64::MAX), false));
        }
        if self.controllers[c].epoch.is_none() {
            let (ns, n) = LEASE_NAME;
            return self.call(me, Verb::Get(Res::Lease, ns.into(), n.into()), Then::LeaseRead(asked));
        }
        self.renew(c, asked);
    }

    pub(super) fn lease_object(&self, c: usize, old: Option<&Rc<Seen>>) -> serde_json::Value {
        let stamp = Timestamp(self.now).to_string().replace('Z', &format!(".{:03}000Z", self.now % 1000));
        let mut lease = old.map_or_else(
            || json!({"metadata": {"name": LEASE_NAME.1, "namespace": LEASE_NAME.0}, "spec": {}}),
            |o| o.value.clone(),
        );
        let holder = self.controllers[c].instance.as_str();
        let transitions = lease["spec"]["leaseTransitions"].as_i64().map_or(0, |t| t + 1);
        if lease["spec"]["holderIdentity"] != holder {
            lease["spec"] = json!({"holderIdentity": holder, "leaseDurationSeconds": LEASE / 1000,
                "acquireTime": stamp, "leaseTransitions": transitions});
        }
        lease["spec"]["renewTime"] = json!(stamp);
        lease
    }

    fn renew(&mut self, c: usize, sent: u64) {
        let me = self.proc_of(c);
        let held = self.controllers[c].lease.clone();
        let lease = self.lease_object(c, held.as_ref());
        self.call(me, lease_write(lease), Then::LeaseRenewed(sent));
    }

    fn try_acquire(&mut self, c: usize, asked: u64, said: &Said) {
        let me = self.proc_of(c);
        let again = Action::LeaseTick(me);
        match said {
            Said::Status(s) if s.code == 404 => {
                let lease = self.lease_object(c, None);
                self.call(me, Verb::Create(Res::Lease, LEASE_NAME.0.into(), lease), Then::LeaseTaken(asked));
            }
            Said::Object(found) => {
                let held = found.text("/spec/holderIdentity");
                if held == self.controllers[c].instance.as_str() {
                    // The reply to our own write was lost; it counts from one that is answered.
                    let lease = self.lease_object(c, Some(found));
                    return self.call(me, lease_write(lease), Then::LeaseTaken(asked));
                }
                let (version, now) = (found.revision, self.now);
                let x = &mut self.controllers[c];
                let since = match x.seen {
                    Some((v, since)) if v == version => since,
                    Some(_) | None => x.seen.insert((version, now)).1,
                };
                if !held.is_empty() && (now - since < LEASE || self.is(Mutant::LeaseForever)) {
                    return self.after(1000, again);
                }
                let mut lease = self.lease_object(c, Some(found));
                if self.is(Mutant::LeaseWithoutVersion)
                    && let Some(m) = lease["metadata"].as_object_mut()
                {
                    m.remove("resourceVersion");
                }
                self.call(me, lease_write(lease), Then::LeaseTaken(asked));
            }
            Said::Status(_) | Said::Silence | Said::Deleted | Said::List(..) => self.after(1000, again),
        }
    }

    pub(super) fn acquired(&mut self, c: usize, asked: u64, lease: Rc<Seen>) {
        let me = self.proc_of(c);
        let epoch = Epoch(lease.revision);
        // One that stood still until its Lease was over does not lead, whatever the answer said.
        if asked + LEASE > self.now {
            self.ghost.acquired(epoch);
        }
        let rival = (0..self.controllers.len()).find(|o| *o != c && self.controllers[*o].leads(self.now));
        if let Some(o) = rival.filter(|_| asked + LEASE > self.now) {
            let text = format!("controller {c} leads with epoch {epoch} while controller {o} believes that it leads");
            self.ghost.rivals.push(text);
        }
        let asked = if self.is(Mutant::LeaseFromAnswer) { self.now } else { asked };
        let x = &mut self.controllers[c];
        x.epoch = Some(epoch);
        x.until = asked + LEASE;
        x.lease = Some(lease);
        self.say(|| format!("{me:?} leads with epoch {epoch}"));
        self.after(RENEW, Action::LeaseTick(me));
        self.lead(c);
    }

    /// Begins to step, once it leads and its caches are filled.
    fn lead(&mut self, c: usize) {
        let x = &mut self.controllers[c];
        if x.epoch.is_none() || x.driver.is_some() || !x.caches.values().all(|k| k.synced) {
            return;
        }
        x.driver = Some(Driver::default());
        // From the leaves up, so that a cell that is told of its VM knows what there is of it already.
        for res in WATCHED {
            let caches = &self.controllers[c].caches;
            let all: Vec<Rc<Seen>> = caches.get(&res).into_iter().flat_map(|k| k.objects.values().cloned()).collect();
            for o in all {
                self.enqueue(c, &o, present(&o));
            }
        }
    }

    /// An answer about the Lease.
    pub(super) fn lease_answer(&mut self, c: usize, then: &Then, said: &Said) {
        let me = self.proc_of(c);
        match then {
            Then::LeaseRead(asked) => self.try_acquire(c, *asked, said),
            Then::LeaseTaken(asked) => match said {
                Said::Object(lease) => self.acquired(c, *asked, lease.clone()),
                // Somebody was quicker, or nobody knows: the next read tells.
                Said::Status(_) | Said::Silence | Said::Deleted | Said::List(..) => {
                    self.after(1000, Action::LeaseTick(me));
                }
            },
            Then::LeaseRenewed(sent) => match said {
                Said::Object(lease) => {
                    let sent = if self.is(Mutant::LeaseFromAnswer) { self.now } else { *sent };
                    let x = &mut self.controllers[c];
                    x.until = sent + LEASE;
                    x.lease = Some(lease.clone());
                    self.after(RENEW, Action::LeaseTick(me));
                }
                Said::Status(s) if s.code == 409 || s.code == 404 => {
                    let (ns, n) = LEASE_NAME;
                    self.call(me, Verb::Get(Res::Lease, ns.into(), n.into()), Then::LeaseReread);
                }
                Said::Status(_) | Said::Silence | Said::Deleted | Said::List(..) => self.renew_later(c),
            },
            Then::LeaseReread => match said {
                // An earlier renewal was written and its reply lost: that one does not count for now.
                Said::Object(o) if o.text("/spec/holderIdentity") == self.controllers[c].instance.as_str() => {
                    self.controllers[c].lease = Some(o.clone());
                    let sent = self.now;
                    self.renew(c, sent);
                }
                Said::Object(_) if self.controllers[c].obstinate => self.after(RENEW, Action::LeaseTick(me)),
                Said::Object(_) | Said::Deleted | Said::List(..) => self.crash_controller(c, "the Lease is another's"),
                Said::Status(s) if s.code == 404 => self.crash_controller(c, "the Lease is gone"),
                Said::Status(_) | Said::Silence => self.renew_later(c),
            },
            Then::Settle(..)
            | Then::Surveyed(..)
            | Then::Render(..)
            | Then::Instruct(..)
            | Then::Judge(_)
            | Then::Confirm(_)
            | Then::Unpaused(..) => {}
        }
    }

    fn renew_later(&mut self, c: usize) {
        if self.now + RENEW >= self.controllers[c].until {
            return self.crash_controller(c, "the Lease was not renewed in time");
        }
        let me = self.proc_of(c);
        self.after(500, Action::LeaseTick(me));
    }

    // --- the caches ---

    pub(super) fn hub_changes(&mut self, c: usize, res: Res, commits: &[Commit]) {
        for commit in commits {
            self.heard += 1;
            if self.heard == self.withheld {
                self.withhold(c, res);
                continue;
            }
            let uid = commit.now.uid().to_owned();
            let Some(cache) = self.controllers[c].caches.get_mut(&res) else { return };
            cache.noted.remove(&uid);
            if commit.gone {
                cache.objects.remove(&uid);
                if !self.is(Mutant::DeletionsUnheard) {
                    self.enqueue(c, &commit.now, absent(&commit.now, true));
                }
            } else if cache.objects.get(&uid).is_none_or(|k| k.revision < commit.now.revision) {
                cache.objects.insert(uid, commit.now.clone());
                self.enqueue(c, &commit.now, present(&commit.now));
            }
        }
    }

    /// An event is lost; nobody notices before the watch begins anew with a list.
    fn withhold(&mut self, c: usize, res: Res) {
        let me = self.proc_of(c);
        self.say(|| format!("{me:?} is not told of a change of {res:?}"));
        if let Some(w) = self.watches.iter().position(|w| w.owner == me && w.res == res) {
            self.after(WITHHELD, Action::Reopen(w, true));
        }
    }

    pub(super) fn hub_list(&mut self, c: usize, res: Res, items: &[Rc<Seen>]) {
        let there: BTreeSet<&str> = items.iter().map(|o| o.uid()).collect();
        let Some(cache) = self.controllers[c].caches.get_mut(&res) else { return };
        let vanished: Vec<Rc<Seen>> =
            cache.objects.values().chain(cache.noted.values()).filter(|o| !there.contains(o.uid())).cloned().collect();
        cache.noted.clear();
        cache.synced = true;
        for o in &vanished {
            cache.objects.remove(o.uid());
        }
        for o in vanished {
            if self.is(Mutant::AbsenceIgnored) || self.forgets(c, &o) {
                continue;
            }
            let evidence = self.is(Mutant::AbsenceIsEvidence);
            self.enqueue(c, &o, absent(&o, evidence));
        }
        for o in items {
            let Some(cache) = self.controllers[c].caches.get_mut(&res) else { return };
            if cache.objects.get(o.uid()).is_none_or(|k| k.revision < o.revision) {
                cache.objects.insert(o.uid().into(), o.clone());
                self.enqueue(c, o, present(o));
            }
        }
        self.lead(c);
    }
}

fn lease_write(lease: serde_json::Value) -> Verb {
    Verb::Change(Res::Lease, LEASE_NAME.0.into(), LEASE_NAME.1.into(), Part::Main, Wanted::Whole(lease))
}
