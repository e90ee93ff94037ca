//! One pod's life, in a task of its own: prepare, run, watch, report, take down.
//!
//! What must survive the runner is in the [`Record`]. Everything else can be found again: what the pod should be from the API,
//! what it is from the runtime and the kernel. Each step can be done twice.

mod prepare;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Pod};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use nix::sys::signal::Signal;
use nix::time::{ClockId, clock_gettime};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use super::exit;
use super::logs;
use super::probes;
use super::record::{Places, Record, Stage, Stopping, now};
use super::sandbox;
use super::status::{self, View, Waiting};
use super::{PodInfo, Shared};

/// How long one request to the API server may take.
const REQUEST: Duration = Duration::from_secs(10);
/// A status that could not be written is tried again after this.
const SAY_AGAIN: Duration = Duration::from_secs(2);
/// Grace of a pod whose object somebody removed by force.
const FORCED_GRACE: i64 = 2;
/// How often the log's size is looked at.
const LOG_LOOK: Duration = Duration::from_secs(15);
/// A pod that was deleted and is still there is deleted again after this.
const DELETE_AGAIN: Duration = Duration::from_secs(30);

/// What is known of the pod's object.
#[derive(Debug, Clone)]
pub(super) enum Seen {
    /// Nothing yet.
    Unknown,
    /// It is there.
    Here(Arc<Pod>),
    /// A live read says that it is gone.
    Gone,
}

/// An error with its causes.
pub(crate) fn telling(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        let words = source.to_string();
        if !text.contains(&words) {
            text.push_str(": ");
            text.push_str(&words);
        }
        cause = source.source();
    }
    text
}

fn boottime() -> i64 {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(0, |t| t.tv_sec())
}

fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

fn revision(pod: &Pod) -> u64 {
    pod.metadata.resource_version.as_deref().and_then(|v| v.parse().ok()).unwrap_or(0)
}

pub(super) struct Worker {
    pub shared: Arc<Shared>,
    pub places: Places,
    pub record: Record,
    pub seen: watch::Receiver<Seen>,
    /// The newest form of the pod, from the watch or as an answer to our own writes.
    pub pod: Option<Arc<Pod>>,
    waiting: Option<Waiting>,
    /// What the readiness probe says.
    ready: bool,
    oom_counter: Option<PathBuf>,
    last_event: Option<(String, String)>,
}

impl Worker {
    pub fn new(shared: Arc<Shared>, record: Record, seen: watch::Receiver<Seen>) -> Self {
        let places = Places::of(&shared.config.data_dir, &record.uid);
        Self {
            shared,
            places,
            record,
            seen,
            pod: None,
            waiting: None,
            ready: false,
            oom_counter: None,
            last_event: None,
        }
    }

    fn id(&self) -> String {
        self.shared.container_id(&self.record.uid)
    }

    fn share(&self) -> PathBuf {
        self.shared.config.run_dir.join(&self.record.uid)
    }

    /// Writes the record; without it nothing may happen, so this goes on until it is written.
    async fn save(&mut self, stage: Stage) {
        self.record.stage = stage;
        while let Err(e) = self.record.save(&self.places) {
            warn!(pod = %self.record.name, error = %e, "cannot write the record of a pod");
            sleep(SAY_AGAIN).await;
        }
        self.publish();
    }

    pub fn publish(&self) {
        let process = self.record.process().filter(|p| p.alive());
        self.shared.publish(PodInfo {
            pod_uid: self.record.uid.clone(),
            vmi_uid: self.record.vmi_uid.clone(),
            vmi_name: self.record.vmi_name.clone(),
            namespace: self.record.namespace.clone(),
            name: self.record.name.clone(),
            share_dir: self.share(),
            netns: PathBuf::from("/run/netns").join(self.id()),
            ips: self.record.address.map(Into::into).into_iter().collect(),
            running: process.is_some(),
            main_pid: process.map(|p| p.pid),
        });
    }

    /// Takes what the watch says, unless our own write is newer.
    fn look(&mut self) -> Seen {
        let seen = self.seen.borrow_and_update().clone();
        if let Seen::Here(pod) = &seen
            && self.pod.as_ref().is_none_or(|mine| revision(mine) <= revision(pod))
        {
            self.pod = Some(pod.clone());
        }
        seen
    }

    /// Waits for something new; when the runner stops, for ever.
    async fn news(&mut self) {
        if self.seen.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    fn deleting(&self) -> bool {
        self.pod.as_ref().is_some_and(|p| p.metadata.deletion_timestamp.is_some())
    }

    fn api(&self) -> Api<Pod> {
        Api::namespaced(self.shared.config.client.clone(), &self.record.namespace)
    }

    /// Writes the status if it says something new. False: try again.
    async fn say(&mut self) -> bool {
        let Some(pod) = self.pod.clone() else { return true };
        let host_ip = self.shared.host_ip();
        let view = View {
            record: &self.record,
            waiting: self.waiting.as_ref(),
            ready: self.ready,
            host_ip: &host_ip,
            now: &now(),
        };
        let Some(patch) = status::patch(&pod, view) else { return true };
        let (api, parameters, patch) = (self.api(), PatchParams::default(), Patch::Strategic(patch));
        match timeout(REQUEST, api.patch_status(&self.record.name, &parameters, &patch)).await {
            Ok(Ok(pod)) => {
                self.pod = Some(Arc::new(pod));
                true
            }
            // Gone or another one: the watch will say so.
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => true,
            Ok(Err(e)) => {
                warn!(pod = %self.record.name, error = %e, "cannot write the status of a pod");
                false
            }
            Err(_) => false,
        }
    }

    /// Tells people about trouble, once for each trouble. Never waited for.
    fn event(&mut self, reason: &str, message: &str) {
        let this = (reason.to_owned(), message.to_owned());
        if self.last_event.as_ref() == Some(&this) {
            return;
        }
        self.last_event = Some(this);
        let time = now();
        let event = json!({
            "metadata": {"generateName": format!("{}.", self.record.name), "namespace": self.record.namespace},
            "involvedObject": {"apiVersion": "v1", "kind": "Pod", "name": self.record.name, "namespace": self.record.namespace,
                "uid": self.record.uid},
            "reason": reason, "message": message, "type": "Warning", "count": 1,
            "firstTimestamp": time, "lastTimestamp": time,
            "source": {"component": "kubelet", "host": self.shared.config.node_name},
            "reportingComponent": "kubelet", "reportingInstance": self.shared.config.node_name,
        });
        let Ok(event) = serde_json::from_value::<Event>(event) else { return };
        let api: Api<Event> = Api::namespaced(self.shared.config.client.clone(), &self.record.namespace);
        tokio::spawn(async move {
            let _ = timeout(REQUEST, api.create(&PostParams::default(), &event)).await;
        });
    }

    /// The pod's life to its end. Returns when nothing of it is left.
    pub async fn run(mut self) {
        self.adopt().await;
        loop {
            match self.record.stage {
                Stage::Preparing | Stage::Starting => self.prepare().await,
                Stage::Running { .. } => self.watch().await,
                Stage::Exited(_) | Stage::Refused { .. } => {
                    let _ = self.look();
                    self.say().await;
                    self.clear().await;
                    self.finish().await;
                    self.shared.forget(&self.record.uid);
                    return;
                }
            }
        }
    }

    /// After a restart of the runner: what became of the container.
    async fn adopt(&mut self) {
        let id = self.id();
        match &self.record.stage {
            Stage::Preparing => {
                // It may have been created; it was never started.
                if self.record.container.is_some()
                    && let Err(e) = self.shared.runc.delete(&id).await
                {
                    warn!(container = %id, error = %e, "cannot remove a container that never ran");
                }
            }
            Stage::Starting => {
                let state = loop {
                    match self.shared.runc.state(&id).await {
                        Ok(state) => break state,
                        Err(e) => {
                            warn!(container = %id, error = %e, "the runtime does not say whether a container runs")
                        }
                    }
                    sleep(SAY_AGAIN).await;
                };
                match state {
                    Some(state) if state.status == "created" => {
                        let _ = self.shared.runc.delete(&id).await;
                        self.save(Stage::Preparing).await;
                    }
                    Some(state) if state.status != "stopped" => self.running(state.pid).await,
                    _ => self.ended().await,
                }
            }
            Stage::Running { process, .. } => {
                self.oom_counter = exit::oom_counter(process.pid);
                info!(pod = %self.record.name, alive = process.alive(), "found a launcher of an earlier runner");
            }
            Stage::Exited(_) | Stage::Refused { .. } => {}
        }
        self.publish();
    }

    async fn running(&mut self, pid: i32) {
        match crate::procs::ProcessId::of(pid) {
            Some(process) => {
                self.oom_counter = self.oom_counter.take().or_else(|| exit::oom_counter(process.pid));
                self.waiting = None;
                self.save(Stage::Running { process, started_at: now() }).await;
            }
            None => self.ended().await,
        }
    }

    /// The container is over.
    async fn ended(&mut self) {
        let started = match &self.record.stage {
            Stage::Running { started_at, .. } => Some(started_at.clone()),
            _ => None,
        };
        let process = self.record.process().cloned();
        let end = exit::collect(
            process.as_ref(),
            &self.places,
            started,
            self.record.message_from_log,
            self.oom_counter.as_deref(),
        );
        info!(pod = %self.record.name, code = end.code, reason = %end.reason, "a launcher ended");
        self.save(Stage::Exited(end)).await;
    }

    async fn refuse(&mut self, reason: &str, message: String) {
        warn!(pod = %self.record.name, reason, message, "a pod will not run here");
        self.event(reason, &message);
        self.save(Stage::Refused { reason: reason.into(), message }).await;
    }

    /// While the container runs.
    async fn watch(&mut self) {
        let Some(process) = self.record.process().cloned() else { return };
        let gone = exit::gone(&process);
        tokio::pin!(gone);
        let mut log_look = tokio::time::interval(LOG_LOOK);
        log_look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut killed = false;
        // A runner that starts again waits for the pod to know its probes.
        while matches!(self.look(), Seen::Unknown) {
            tokio::select! {
                () = &mut gone => return self.ended().await,
                () = self.news() => {}
            }
        }
        let mut probes = self.probes();
        // What was last said of each probe.
        let mut told = [String::new(), String::new()];
        if self.record.stopping.is_some() {
            // An earlier runner may have died before the signal.
            process.signal(Signal::SIGTERM);
        }
        loop {
            let seen = self.look();
            if matches!(seen, Seen::Gone) || self.deleting() {
                self.stop(&process).await;
            }
            let deadline = self.deadline(&seen);
            if !killed && deadline.is_some_and(|d| d.is_zero()) {
                // Process 1 takes the whole pid namespace with it.
                process.signal(Signal::SIGKILL);
                killed = true;
            }
            for ((probe, health), told) in
                [("Readiness", &probes.ready), ("Liveness", &probes.alive)].iter().zip(&mut told)
            {
                let trouble = health.borrow().trouble.clone();
                if trouble != *told && self.record.stopping.is_none() {
                    if !trouble.is_empty() {
                        self.event("Unhealthy", &format!("{probe} probe failed: {trouble}"));
                    }
                    *told = trouble;
                }
            }
            self.ready = probes.ready.borrow().holds;
            let alive = probes.alive.borrow().holds;
            if !alive && self.record.stopping.is_none() {
                self.event("Killing", "the liveness probe failed, the container is ended");
                self.stop(&process).await;
                continue;
            }
            let said = self.say().await;
            tokio::select! {
                () = &mut gone => return self.ended().await,
                () = self.news() => {}
                Ok(()) = probes.ready.changed() => {}
                Ok(()) = probes.alive.changed() => {}
                () = sleep(SAY_AGAIN), if !said => {}
                () = sleep(deadline.unwrap_or_default()), if !killed && deadline.is_some() => {}
                _ = log_look.tick() => {
                    if let Err(e) = logs::turn_over(&self.places) {
                        warn!(pod = %self.record.name, error = %e, "cannot turn over a log");
                    }
                }
            }
        }
    }

    fn probes(&self) -> probes::Probes {
        let from = probes::From {
            pod: self.record.address.map(Into::into),
            netns: self.shared.config.network.as_ref().map(|n| crate::netns::Netns::named(&n.node_netns).path()),
            container: (self.shared.runc.clone(), self.id()),
        };
        let was_ready = self
            .pod
            .iter()
            .filter_map(|p| p.status.as_ref()?.container_statuses.as_ref()?.first())
            .any(|c| c.ready && c.state.as_ref().is_some_and(|s| s.running.is_some()));
        probes::start(self.pod.as_deref(), &from, was_ready)
    }

    /// SIGTERM, once.
    async fn stop(&mut self, process: &crate::procs::ProcessId) {
        if self.record.stopping.is_some() {
            return;
        }
        self.record.stopping = Some(Stopping { boot: boot_id(), since: boottime() });
        self.save(self.record.stage.clone()).await;
        process.signal(Signal::SIGTERM);
    }

    /// How long the container has left, once it was told to end.
    fn deadline(&self, seen: &Seen) -> Option<Duration> {
        let stopping = self.record.stopping.as_ref()?;
        let grace = match seen {
            Seen::Gone => FORCED_GRACE,
            _ => {
                let pod = self.pod.as_ref()?;
                let own = pod.spec.as_ref().and_then(|s| s.termination_grace_period_seconds);
                pod.metadata.deletion_grace_period_seconds.or(own).unwrap_or(api::names::DEFAULT_GRACE_SECONDS)
            }
        };
        let spent = boottime() - stopping.since;
        Some(Duration::from_secs(u64::try_from(grace - spent).unwrap_or(0)))
    }

    /// Takes down what the pod had but for its log and record. Goes on until it is done.
    async fn clear(&mut self) {
        let id = self.id();
        loop {
            match self.try_clear(&id).await {
                Ok(()) => break,
                Err(e) => warn!(pod = %self.record.name, error = %e, "cannot take down all of a pod, trying again"),
            }
            sleep(SAY_AGAIN).await;
        }
        self.record.address = None;
        self.save(self.record.stage.clone()).await;
    }

    async fn try_clear(&self, id: &str) -> Result<(), String> {
        let told = |e: &dyn std::error::Error| telling(e);
        self.shared.runc.delete(id).await.map_err(|e| told(&e))?;
        if let Some(network) = &self.shared.config.network {
            sandbox::remove(id, &self.record.uid, network).await.map_err(|e| told(&e))?;
        }
        self.shared.ipam.free(&self.record.uid).map_err(|e| told(&e))?;
        for folder in [self.share(), self.places.bundle(), self.places.volumes()] {
            match std::fs::remove_dir_all(&folder) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(format!("{}: {e}", folder.display())),
                _ => {}
            }
        }
        Ok(())
    }

    /// The pod is over and taken down: say so, and when it is deleted let its object go.
    async fn finish(&mut self) {
        let mut sent: Option<Instant> = None;
        loop {
            if matches!(self.look(), Seen::Gone) {
                break;
            }
            let mut again = !self.say().await;
            let due = sent.is_none_or(|s| s.elapsed() >= DELETE_AGAIN);
            if !again && self.deleting() && due {
                match self.delete().await {
                    Ok(true) => break,
                    Ok(false) => sent = Some(Instant::now()),
                    Err(e) => {
                        warn!(pod = %self.record.name, error = %e, "cannot remove the object of a pod that is over");
                        again = true;
                    }
                }
            }
            let wait = if again { SAY_AGAIN } else { DELETE_AGAIN };
            tokio::select! {
                () = self.news() => {}
                () = sleep(wait), if again || self.deleting() => {}
            }
        }
        if let Err(e) = std::fs::remove_dir_all(&self.places.folder)
            && e.kind() != std::io::ErrorKind::NotFound
        {
            warn!(pod = %self.record.name, error = %e, "cannot remove the folder of a pod");
        }
    }

    /// True: there is no such object any more.
    async fn delete(&self) -> Result<bool, String> {
        let parameters = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(Preconditions { uid: Some(self.record.uid.clone()), resource_version: None }),
            ..DeleteParams::default()
        };
        match timeout(REQUEST, self.api().delete(&self.record.name, &parameters)).await {
            Ok(Ok(_)) => Ok(false),
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => Ok(true),
            // Another pod of that name: ours is gone.
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => Ok(true),
            Ok(Err(e)) => Err(telling(&e)),
            Err(_) => Err("no answer".into()),
        }
    }
}
