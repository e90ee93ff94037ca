//! A launcher and its guest as a model: the states and words of the real ones, and delays where those work.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::{BoxFuture, ready};
use futures::{FutureExt, StreamExt};
use proto::agent::{
    Accepted, Ack, Cause, Domain, DomainState, Done, GuestFacts, InstructKind, Interface, OsInfo, Outcome, Refused,
    VerbReply, VerbRequest, ack,
};
use proto::launcher::{InfoReply, Order, StatsReply, Step, Update, update};
use tokio::sync::watch;

use super::{Delays, Ending};
use crate::PodFacts;
use crate::launchers::{Answer, Launcher, Updates};

/// How it stands.
#[derive(Clone, Debug)]
struct Level {
    domain: Domain,
    outcome: Option<Outcome>,
    /// The launch, until it was told.
    launch: Option<Step>,
}

#[derive(Debug, Default)]
struct Table {
    epoch: u64,
    answers: BTreeMap<String, Ack>,
    ip: String,
    /// The trace of the start.
    start: Option<Step>,
}

/// Hears what really happens in modelled launchers, whoever is told of it.
pub trait Observe: Send + Sync {
    /// A launcher begins to carry out an instruction that it was not sent before.
    fn begins(&self, pod: &PodFacts, launcher: &str, order: &Order);
    /// The vCPUs of a domain run.
    fn executes(&self, pod: &PodFacts);
    /// They run no more.
    fn ended(&self, pod: &PodFacts);
}

/// One modelled machine.
#[derive(Clone)]
pub(super) struct Machine {
    level: Arc<watch::Sender<Level>>,
    table: Arc<Mutex<Table>>,
    delays: Delays,
    pod: Arc<PodFacts>,
    observe: Option<Arc<dyn Observe>>,
    /// A launcher lives in its pod: what it does by itself goes on when the agent that told it dies.
    home: tokio::runtime::Handle,
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Machine").field("pod", &self.pod.pod_uid).finish_non_exhaustive()
    }
}

impl Machine {
    pub fn new(pod: &PodFacts, delays: Delays, observe: Option<Arc<dyn Observe>>) -> Self {
        let domain = Domain {
            vmi_uid: pod.vmi_uid.clone(),
            pod_uid: pod.pod_uid.clone(),
            launcher_instance: uuid::Uuid::new_v4().to_string(),
            seq: 1,
            state: DomainState::Absent as i32,
            since_unix_ms: now(),
            accelerator: super::ACCELERATOR.into(),
            namespace: pod.namespace.clone(),
            name: pod.vmi_name.clone(),
            ..Domain::default()
        };
        let level = Arc::new(watch::Sender::new(Level { domain, outcome: None, launch: None }));
        Self {
            level,
            table: Arc::default(),
            delays,
            pod: Arc::new(pod.clone()),
            observe,
            home: tokio::runtime::Handle::current(),
        }
    }

    /// Changes what is known, unless the domain has ended.
    fn change(&self, change: impl FnOnce(&mut Domain)) {
        self.level.send_if_modified(|level| {
            if level.outcome.is_some() {
                return false;
            }
            level.domain.seq += 1;
            change(&mut level.domain);
            true
        });
    }

    fn enter(&self, state: DomainState) {
        self.change(|d| {
            d.state = state as i32;
            d.since_unix_ms = now();
        });
    }

    fn end(&self, cause: Cause, exit: i32) -> bool {
        let ended = self.level.send_if_modified(|level| {
            if level.outcome.is_some() {
                return false;
            }
            let d = &mut level.domain;
            d.seq += 1;
            d.state = DomainState::Stopped as i32;
            d.since_unix_ms = now();
            level.outcome = Some(Outcome {
                vmi_uid: d.vmi_uid.clone(),
                pod_uid: d.pod_uid.clone(),
                cause: cause as i32,
                exit,
                seq: d.seq,
                at_unix_ms: now(),
                namespace: d.namespace.clone(),
                name: d.name.clone(),
                ..Outcome::default()
            });
            true
        });
        if ended && let Some(observe) = &self.observe {
            observe.ended(&self.pod);
        }
        ended
    }

    /// The guest ends by itself. Whether it ran.
    pub fn end_by_itself(&self, ending: Ending) -> bool {
        if !matches!(self.state(), DomainState::Running | DomainState::Paused | DomainState::ShuttingDown) {
            return false;
        }
        match ending {
            Ending::PowerOff => self.end(Cause::GuestShutdown, 0),
            Ending::Crash => self.end(Cause::Crashed, 1),
        }
    }

    /// It is gone with its node.
    pub fn vanish(&self) {
        self.end(Cause::Destroyed, 137);
    }

    fn state(&self) -> DomainState {
        self.level.borrow().domain.state()
    }

    fn boot(&self) {
        let machine = self.clone();
        self.home.spawn(async move {
            tokio::time::sleep(machine.delays.boot).await;
            // Told to stop before it ran.
            if machine.state() != DomainState::Starting {
                return;
            }
            if let Some(observe) = &machine.observe {
                observe.executes(&machine.pod);
            }
            let (ip, start) = {
                let mut table = lock(&machine.table);
                (table.ip.clone(), table.start.take())
            };
            machine.level.send_modify(|level| {
                level.launch = start.map(|s| Step { end_unix_us: now() * 1000, ..s });
            });
            machine.change(|d| {
                d.state = DomainState::Running as i32;
                d.since_unix_ms = now();
                d.guest = Some(GuestFacts {
                    interfaces: vec![Interface {
                        name: "default".into(),
                        mac: "02:00:00:00:00:01".into(),
                        ips: vec![ip.clone()],
                        ip,
                        info_source: "domain".into(),
                        queue_count: 1,
                        pod_interface_name: "eth0".into(),
                        link_state: "up".into(),
                        ..Interface::default()
                    }],
                    machine_type: "pc-q35".into(),
                    ..GuestFacts::default()
                });
            });
            let Some(wait) = machine.delays.guest_agent else { return };
            tokio::time::sleep(wait).await;
            machine.change(|d| {
                if let Some(guest) = &mut d.guest {
                    guest.agent_connected = true;
                    guest.agent_first_unix_ms = now();
                    guest.agent_version = "model".into();
                    guest.os = Some(OsInfo { name: "Model".into(), id: "model".into(), ..OsInfo::default() });
                }
            });
        });
    }

    /// The power button, and the kill where the guest takes longer than it may.
    pub fn shut_down(&self, grace: Duration) {
        if matches!(self.state(), DomainState::Absent) {
            self.end(Cause::Destroyed, 0);
            return;
        }
        self.enter(DomainState::ShuttingDown);
        let machine = self.clone();
        self.home.spawn(async move {
            tokio::time::sleep(machine.delays.shutdown.min(grace)).await;
            if machine.delays.shutdown <= grace {
                machine.end(Cause::GuestShutdown, 0);
            } else {
                machine.end(Cause::KilledAfterGrace, 0);
            }
        });
    }

    /// Waits for the end of the container: exit code and termination message.
    pub async fn ended(&self) -> (i32, String) {
        let mut seen = self.level.subscribe();
        // The sender is our own: it cannot be gone.
        let _ = seen.wait_for(|level| level.outcome.is_some()).await;
        let outcome = seen.borrow().outcome.clone().unwrap_or_default();
        let cause = state::domain::Cause::from(outcome.cause());
        let message = serde_json::json!({"cause": cause.name(), "exit": outcome.exit, "message": outcome.message});
        (outcome.exit, message.to_string())
    }

    fn decide(&self, order: &Order) -> ack::Result {
        let Some(i) = &order.instruct else {
            return ack::Result::Refused(Refused { reason: "unsupported".into(), ..Refused::default() });
        };
        let refuse = |reason: &str| ack::Result::Refused(Refused { reason: reason.into(), ..Refused::default() });
        match (i.kind(), self.state()) {
            (InstructKind::Start, DomainState::Absent) => {
                if let Some(facts) = &order.facts {
                    lock(&self.table).ip = facts.pod_ip.clone();
                }
                lock(&self.table).start = Some(Step {
                    seq: 1,
                    traceparent: i.traceparent.clone(),
                    cell: i.vmi_uid.clone(),
                    operation: "start".into(),
                    name: "launch".into(),
                    parent: "boot".into(),
                    start_unix_us: now() * 1000,
                    asked: true,
                    ..Step::default()
                });
                self.enter(DomainState::Starting);
                self.boot();
                ack::Result::Accepted(Accepted {})
            }
            (InstructKind::Start, _) => refuse("already-started"),
            (InstructKind::Shutdown, _) => {
                self.shut_down(Duration::from_millis(i.deadline_ms));
                ack::Result::Accepted(Accepted {})
            }
            (InstructKind::Kill, _) => {
                self.end(Cause::Destroyed, 0);
                ack::Result::Accepted(Accepted {})
            }
            (InstructKind::Pause, DomainState::Running) => {
                self.enter(DomainState::Paused);
                ack::Result::Done(Done::default())
            }
            (InstructKind::Resume, DomainState::Paused) => {
                self.enter(DomainState::Running);
                ack::Result::Done(Done::default())
            }
            (InstructKind::Pause | InstructKind::Resume, _) => ack::Result::Done(Done::default()),
            (InstructKind::InstructUnspecified, _) => refuse("unsupported"),
        }
    }

    fn carry_out(&self, order: &Order) -> Ack {
        let instruct = order.instruct.clone().unwrap_or_default();
        let answer = |result| Ack { id: instruct.id.clone(), vmi_uid: instruct.vmi_uid.clone(), result: Some(result) };
        {
            let mut table = lock(&self.table);
            if instruct.epoch < table.epoch {
                return answer(ack::Result::Refused(Refused { reason: "lower-epoch".into(), ..Refused::default() }));
            }
            table.epoch = instruct.epoch;
            if let Some(known) = table.answers.get(&instruct.id) {
                return known.clone();
            }
        }
        if let Some(observe) = &self.observe {
            observe.begins(&self.pod, &self.level.borrow().domain.launcher_instance, order);
        }
        let ack = answer(self.decide(order));
        lock(&self.table).answers.insert(instruct.id, ack.clone());
        ack
    }
}

impl Launcher for Machine {
    fn info(&self) -> Answer<InfoReply> {
        let domain = self.level.borrow().domain.clone();
        let reply = InfoReply {
            launcher_instance: domain.launcher_instance.clone(),
            vmi_uid: domain.vmi_uid.clone(),
            pod_uid: domain.pod_uid.clone(),
            namespace: domain.namespace.clone(),
            name: domain.name.clone(),
            epoch: lock(&self.table).epoch,
            domain: Some(domain),
            hypervisor_pid: 0,
        };
        ready(Ok(reply)).boxed()
    }

    /// A model of a machine uses nothing.
    fn stats(&self) -> Answer<StatsReply> {
        ready(Ok(StatsReply::default())).boxed()
    }

    fn execute(&self, order: Order) -> Answer<Ack> {
        ready(Ok(self.carry_out(&order))).boxed()
    }

    fn verb(&self, verb: VerbRequest) -> Answer<VerbReply> {
        let state = match (verb.verb.as_str(), self.state()) {
            ("pause", DomainState::Running) => Ok(Some(DomainState::Paused)),
            ("pause", DomainState::Paused) => Err("already-paused"),
            ("unpause", DomainState::Paused) => Ok(Some(DomainState::Running)),
            ("unpause", DomainState::Running) => Err("not-paused"),
            ("reset" | "softreboot", DomainState::Running) => Ok(None),
            ("pause" | "unpause" | "reset" | "softreboot", _) => Err("not-running"),
            _ => Err("unsupported"),
        };
        let reply = match state {
            Ok(state) => {
                if let Some(state) = state {
                    self.enter(state);
                }
                VerbReply { ok: true, ..VerbReply::default() }
            }
            Err(reason) => VerbReply {
                reason: reason.into(),
                message: format!("{}: the modelled guest does not do that now", verb.verb),
                ..VerbReply::default()
            },
        };
        ready(Ok(reply)).boxed()
    }

    fn told(&self, _seq: u64) -> Answer<()> {
        self.level.send_modify(|level| level.launch = None);
        ready(Ok(())).boxed()
    }

    fn watch(&self, steps: bool) -> Answer<Updates> {
        // What was told: the domain's sequence, and whether the outcome was.
        let from = (self.level.subscribe(), 0, false);
        let stream = futures::stream::unfold(from, move |(mut seen, told, over)| async move {
            loop {
                if over {
                    // As the real one: the connection stands until the container is gone.
                    return std::future::pending().await;
                }
                {
                    let level = seen.borrow_and_update();
                    let steps: Vec<Step> = level.launch.iter().filter(|_| steps).cloned().collect();
                    if level.domain.seq > told {
                        let update = Update { kind: Some(update::Kind::Domain(level.domain.clone())), steps };
                        let seq = level.domain.seq;
                        drop(level);
                        return Some((Ok(update), (seen, seq, over)));
                    }
                    if let Some(outcome) = level.outcome.clone() {
                        drop(level);
                        let update = Update { kind: Some(update::Kind::Outcome(outcome)), steps };
                        return Some((Ok(update), (seen, told, true)));
                    }
                }
                if seen.changed().await.is_err() {
                    return None;
                }
            }
        });
        let updates: BoxFuture<'static, _> = ready(Ok(stream.boxed())).boxed();
        updates
    }
}

fn now() -> u64 {
    u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or(0)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // Nothing inside can panic half-way through a change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proto::agent::Instruct;

    fn machine(shutdown_ms: u64) -> Machine {
        let pod = PodFacts {
            pod_uid: "p".into(),
            vmi_uid: "v".into(),
            namespace: "ns".into(),
            pod_name: "virt-launcher-a".into(),
            vmi_name: "a".into(),
            share_dir: "/".into(),
            netns: "/".into(),
            ips: vec![],
            running: true,
        };
        Machine::new(&pod, Delays { shutdown: Duration::from_millis(shutdown_ms), ..Delays::default() }, None)
    }

    fn order(kind: InstructKind, id: &str, grace_ms: u64) -> Order {
        let instruct =
            Instruct { epoch: 3, id: id.into(), kind: kind as i32, deadline_ms: grace_ms, ..Instruct::default() };
        Order { instruct: Some(instruct), facts: None }
    }

    #[tokio::test]
    async fn it_starts_once_and_says_how_it_ended() {
        let m = machine(20);
        let first = m.execute(order(InstructKind::Start, "1", 0)).await.unwrap();
        assert!(matches!(first.result, Some(ack::Result::Accepted(_))));
        assert_eq!(m.execute(order(InstructKind::Start, "1", 0)).await.unwrap(), first, "the same id: the same answer");
        let again = m.execute(order(InstructKind::Start, "2", 0)).await.unwrap();
        assert!(matches!(again.result, Some(ack::Result::Refused(_))), "a second start: {again:?}");
        let mut updates = m.watch(false).await.unwrap();
        let mut states = vec![];
        while states.last() != Some(&DomainState::Running) {
            if let Some(update::Kind::Domain(d)) = updates.next().await.unwrap().unwrap().kind {
                states.push(d.state());
            }
        }
        m.execute(order(InstructKind::Shutdown, "3", 30_000)).await.unwrap();
        let (exit, message) = m.ended().await;
        assert_eq!((exit, message.contains("GuestShutdown")), (0, true), "{message}");
    }

    #[tokio::test]
    async fn a_guest_that_is_slower_than_its_grace_is_killed() {
        let m = machine(60_000);
        m.execute(order(InstructKind::Start, "1", 0)).await.unwrap();
        m.execute(order(InstructKind::Shutdown, "2", 20)).await.unwrap();
        assert!(m.ended().await.1.contains("KilledAfterGrace"));
        let old = Order {
            instruct: Some(Instruct { epoch: 2, ..order(InstructKind::Kill, "4", 0).instruct.unwrap() }),
            facts: None,
        };
        let refused = m.execute(old).await.unwrap();
        assert!(matches!(refused.result, Some(ack::Result::Refused(r)) if r.reason == "lower-epoch"));
    }
}
