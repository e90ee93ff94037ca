//! Until the container runs: whether it may, what it needs, and its one start.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::time::{Instant, sleep_until};
use tracing::info;

use super::super::Shared;
use super::super::bundle::{self, Spec, VolumeMount};
use super::super::exit;
use super::super::fields::{self, Facts};
use super::super::probes;
use super::super::record::Stage;
use super::super::sandbox;
use super::super::status::{self, Waiting};
use super::super::volumes::{VolumeError, Volumes, own_folder};
use super::{Seen, Worker, telling};

/// A pod that starts faster than this never says that it is being created.
const QUIET: Duration = Duration::from_secs(1);
/// Waits between attempts to prepare: first and longest.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// The same for images.
const RETRY_IMAGE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(300));

/// Why an attempt to prepare failed.
enum Trouble {
    Never { reason: &'static str, message: String },
    Later { waiting: Waiting, image: Option<String> },
}

impl From<VolumeError> for Trouble {
    fn from(error: VolumeError) -> Self {
        let message = telling(&error);
        match error {
            VolumeError::Unsupported(message) => Self::Never { reason: "UnsupportedPod", message },
            VolumeError::Image(image) => {
                let reference = image.reference().to_owned();
                Self::Later { waiting: Waiting { reason: image.reason().into(), message }, image: Some(reference) }
            }
            _ => Self::Later { waiting: Waiting { reason: "ContainerCreating".into(), message }, image: None },
        }
    }
}

fn later(reason: &str, error: &dyn std::error::Error) -> Trouble {
    Trouble::Later { waiting: Waiting { reason: reason.into(), message: telling(error) }, image: None }
}

/// Why this runner does not run a pod, if it does not.
fn refusal(pod: &Pod) -> Option<String> {
    let app = pod.metadata.labels.as_ref().and_then(|l| l.get(api::names::LABEL_APP)).map(String::as_str);
    if app != Some(api::names::APP_LAUNCHER) {
        return Some(format!(
            "this node runs launcher pods of virtual machines alone (label {}={})",
            api::names::LABEL_APP,
            api::names::APP_LAUNCHER
        ));
    }
    let spec = pod.spec.as_ref()?;
    if spec.containers.len() != 1 || spec.init_containers.as_ref().is_some_and(|c| !c.is_empty()) {
        return Some("a launcher pod on this node has one container and no init containers".into());
    }
    let host = [spec.host_network, spec.host_pid, spec.host_ipc];
    let privileged =
        spec.containers.iter().any(|c| c.security_context.as_ref().is_some_and(|s| s.privileged == Some(true)));
    if privileged || host.contains(&Some(true)) {
        return Some("a launcher pod has no privileges and no namespace of its node".into());
    }
    spec.containers.first().and_then(probes::refusal)
}

/// Whether the API says that the container ran.
fn ran_before(pod: &Pod) -> bool {
    pod.status
        .iter()
        .flat_map(|s| s.container_statuses.iter().flatten())
        .filter_map(|c| c.state.as_ref())
        .any(|s| s.running.is_some() || s.terminated.is_some())
}

impl Worker {
    /// Until the container runs, or never will.
    pub(super) async fn prepare(&mut self) {
        let mut delay: Option<Duration> = None;
        loop {
            match self.look() {
                Seen::Unknown => {
                    self.news().await;
                    continue;
                }
                Seen::Gone => {
                    return self
                        .refuse("NeverStarted", "the pod was removed before its container started".into())
                        .await;
                }
                Seen::Here(_) => {}
            }
            let Some(pod) = self.pod.clone() else { continue };
            if self.deleting() {
                return self.refuse("NeverStarted", "the pod was deleted before its container started".into()).await;
            }
            if status::is_final(&pod) {
                return self.refuse("NeverStarted", "the pod was over before its container started".into()).await;
            }
            if ran_before(&pod) {
                // Its record was lost: it may not run a second time.
                return self.ended().await;
            }
            if let Some(message) = refusal(&pod) {
                return self.refuse("UnsupportedPod", message).await;
            }
            let trouble = match self.attempt(&pod).await {
                Ok(true) => return,
                Ok(false) => continue,
                Err(trouble) => trouble,
            };
            let (waiting, image) = match trouble {
                Trouble::Never { reason, message } => return self.refuse(reason, message).await,
                Trouble::Later { waiting, image } => (waiting, image),
            };
            let (first, longest) = if image.is_some() { RETRY_IMAGE } else { RETRY };
            let wait = delay.map_or(first, |d| d.saturating_mul(2)).clamp(first, longest);
            delay = Some(wait);
            let reason = if image.is_some() { "Failed" } else { "FailedMount" };
            self.event(reason, &waiting.message.clone());
            self.waiting = Some(waiting);
            self.say().await;
            let end = Instant::now() + wait;
            // First it is said what went wrong, then that nothing is tried for a while.
            let mut backs_off = image.map(|image| (Instant::now() + wait / 2, image));
            loop {
                let at = backs_off.as_ref().map_or(end, |(at, _)| *at);
                tokio::select! {
                    () = sleep_until(at) => match backs_off.take() {
                        Some((_, image)) => self.back_off(&image).await,
                        None => break,
                    },
                    () = self.news() => {
                        if matches!(self.look(), Seen::Gone) || self.deleting() {
                            break;
                        }
                    }
                }
            }
        }
    }

    /// Says that an image is not asked for again for a while.
    async fn back_off(&mut self, image: &str) {
        let Some(waiting) = self.waiting.as_mut().filter(|w| w.reason == "ErrImagePull") else { return };
        let why = std::mem::take(&mut waiting.message);
        waiting.message = format!("Back-off pulling image {image:?}: ErrImagePull: {why}");
        waiting.reason = "ImagePullBackOff".into();
        self.event("BackOff", &format!("Back-off pulling image {image:?}"));
        self.say().await;
    }

    /// One attempt. False: something happened to the pod meanwhile.
    async fn attempt(&mut self, pod: &Arc<Pod>) -> Result<bool, Trouble> {
        let Some(container) = pod.spec.as_ref().and_then(|s| s.containers.first()).cloned() else { return Ok(false) };
        let id = self.id();
        if self.record.address.is_none() {
            let uid = self.record.uid.clone();
            let address = self.shared.ipam.take(&uid).map_err(|e| later("ContainerCreating", &e))?;
            self.record.address = Some(address);
            self.save(Stage::Preparing).await;
        }
        if let (Some(network), Some(address)) = (&self.shared.config.network, self.record.address) {
            sandbox::create(&id, &self.record.uid, address, network)
                .await
                .map_err(|e| later("ContainerCreating", &e))?;
        }
        let facts = self.shared.facts(self.record.address);
        // Whatever takes long is waited for beside what happens to the pod.
        let shared = self.shared.clone();
        let (places, pod_copy, container_copy) = (self.places.clone(), pod.clone(), container.clone());
        let mut work = tokio::spawn(async move {
            let volumes = Volumes {
                client: shared.config.client.clone(),
                images: &shared.config.images,
                root: &shared.config.volumes_root,
                empty: places.volumes(),
            };
            let namespace = pod_copy.metadata.namespace.as_deref().unwrap_or_default();
            let maps = volumes.environment_maps(namespace, &container_copy).await?;
            let mounts = volumes.resolve(&pod_copy, &container_copy, &facts).await?;
            let env =
                fields::environment(&pod_copy, &container_copy, &facts, &maps).map_err(VolumeError::Unsupported)?;
            Ok::<_, VolumeError>((mounts, env))
        });
        let quiet = Instant::now() + QUIET;
        let mut said = false;
        let resolved = loop {
            tokio::select! {
                done = &mut work => break done,
                () = sleep_until(quiet), if !said => {
                    said = true;
                    self.say().await;
                }
                () = self.news() => {
                    if matches!(self.look(), Seen::Gone) || self.deleting() {
                        work.abort();
                        return Ok(false);
                    }
                }
            }
        };
        let (mounts, env) = match resolved {
            Ok(result) => result?,
            Err(e) => return Err(later("ContainerCreating", &e)),
        };
        let spec = self.spec(pod, &container, mounts, env);
        self.create(&spec).await
    }

    fn spec(
        &self,
        pod: &Pod,
        container: &Container,
        volumes: Vec<VolumeMount>,
        env: std::collections::BTreeMap<String, String>,
    ) -> Spec {
        let config = &self.shared.config;
        let mut all = config.environment.clone();
        all.extend(env);
        let env = all;
        let words = container.command.iter().flatten().chain(container.args.iter().flatten());
        let hostname = fields::hostname(pod);
        let address = self.record.address.map(|a| format!("{a} {hostname}\n")).unwrap_or_default();
        let aliases: String = pod
            .spec
            .iter()
            .flat_map(|s| s.host_aliases.iter().flatten())
            .map(|a| format!("{} {}\n", a.ip, a.hostnames.iter().flatten().cloned().collect::<Vec<_>>().join(" ")))
            .collect();
        Spec {
            args: words.map(|w| fields::expand(w, &env)).collect(),
            env: env.into_iter().map(|(k, v)| format!("{k}={v}")).collect(),
            cwd: container.working_dir.clone().filter(|d| d.starts_with('/')).unwrap_or_else(|| "/".into()),
            hosts: format!("127.0.0.1 localhost\n::1 localhost\n{address}{aliases}"),
            resolv: resolv(pod),
            hostname,
            memory_limit: container
                .resources
                .as_ref()
                .and_then(|r| r.limits.as_ref()?.get("memory"))
                .and_then(fields::bytes),
            netns: config.network.as_ref().map(|_| PathBuf::from("/run/netns").join(self.id())),
            cgroup: self.id(),
            volumes,
            share: self.share(),
            message: (
                self.places.message(),
                container
                    .termination_message_path
                    .clone()
                    .filter(|p| !p.is_empty())
                    .unwrap_or_else(|| "/dev/termination-log".into()),
            ),
            binary: config.binary.clone(),
            kvm: config.kvm,
            private: config.private.clone(),
            noswap: self.shared.machine.noswap(),
        }
    }

    /// Makes the container and starts it, once.
    async fn create(&mut self, spec: &Spec) -> Result<bool, Trouble> {
        const REASON: &str = "CreateContainerError";
        let id = self.id();
        let container = self.pod.as_ref().and_then(|p| p.spec.as_ref()?.containers.first().cloned());
        self.record.message_from_log =
            container.and_then(|c| c.termination_message_policy).as_deref() == Some("FallbackToLogsOnError");
        self.record.container = Some(id.clone());
        self.save(Stage::Preparing).await;
        self.shared.runc.delete(&id).await.map_err(|e| later(REASON, &e))?;
        own_folder(&spec.share)
            .and_then(|()| std::fs::set_permissions(&spec.share, std::os::unix::fs::PermissionsExt::from_mode(0o700)))
            .and_then(|()| bundle::write(&self.places.bundle(), spec))
            .map_err(|e| later(REASON, &e))?;
        self.shared.runc.create(&id, &self.places.bundle(), &self.places.log()).await.map_err(|e| later(REASON, &e))?;
        let state = self.shared.runc.state(&id).await.map_err(|e| later(REASON, &e))?;
        let Some(pid) = state.map(|s| s.pid).filter(|p| *p > 0) else {
            return Err(later(REASON, &std::io::Error::other("the container is gone before it started")));
        };
        // Found now: a process that has ended belongs to no group any more.
        self.oom_counter = exit::oom_counter(pid);
        bundle::fill(&PathBuf::from(format!("/proc/{pid}/root")), &spec.volumes).map_err(|e| later(REASON, &e))?;
        if matches!(self.look(), Seen::Gone) || self.deleting() {
            return Ok(false);
        }
        self.save(Stage::Starting).await;
        if let Err(e) = self.shared.runc.start(&id).await {
            match self.shared.runc.state(&id).await {
                Ok(Some(state)) if state.status == "created" => {
                    self.save(Stage::Preparing).await;
                    return Err(later("RunContainerError", &e));
                }
                Ok(Some(state)) if state.status != "stopped" => {}
                _ => {
                    self.event("Failed", &telling(&e));
                    self.ended().await;
                    return Ok(true);
                }
            }
        }
        self.started(pid).await;
        Ok(true)
    }

    async fn started(&mut self, pid: i32) {
        info!(pod = %self.record.name, pid, "a launcher runs");
        self.running(pid).await;
    }
}

/// The pod's resolver configuration: what the pod says, else the machine's.
fn resolv(pod: &Pod) -> String {
    let spec = pod.spec.as_ref();
    let own = spec.and_then(|s| s.dns_config.as_ref());
    let none = spec.and_then(|s| s.dns_policy.as_deref()) == Some("None");
    let mut text = if none { String::new() } else { std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default() };
    for server in own.iter().flat_map(|d| d.nameservers.iter().flatten()) {
        text.push_str(&format!("nameserver {server}\n"));
    }
    if let Some(searches) = own.and_then(|d| d.searches.as_ref()).filter(|s| !s.is_empty()) {
        text.push_str(&format!("search {}\n", searches.join(" ")));
    }
    text
}

/// What the fields of a pod may refer to.
impl Shared {
    fn facts(&self, address: Option<std::net::Ipv4Addr>) -> Facts {
        Facts {
            pod_ip: address.map(|a| a.to_string()).unwrap_or_default(),
            host_ip: self.host_ip(),
            cpus: i64::try_from(self.machine.cpus).unwrap_or(1),
            memory: i64::try_from(self.machine.memory).unwrap_or(i64::MAX),
        }
    }
}
