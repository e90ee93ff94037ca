//! Leadership: one Lease, every acquisition a conditional write, the epoch its resourceVersion.
//!
//! *What it owns:* `spec` of the Lease. *Who else writes it:* another process that holds or takes it. *What may be lost:* the
//! reply to our write; then the Lease names us, and is written again, because it counts from a write that is answered. *Why it is still safe if two believe to lead:* it
//! need not be exact; an agent accepts one epoch only, and a start is authorised by the VMI (`ARCHITECTURE.md`).
//!
//! Others' `renewTime` is only compared with itself: a Lease that did not change for its duration, by our own clock, is free.

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use state::{Epoch, LeaderInstance, Millis, Timestamp, trace::Reign};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use telemetry::Readiness;
use tokio::{sync::Mutex, time::Instant};

/// Renewals that may hang one after another within the time of a Lease.
const ATTEMPTS: u32 = 4;

/// How a Lease is taken and kept.
#[derive(Debug, Clone)]
pub struct LeaseConfig {
    /// Namespace of the Lease.
    pub namespace: String,
    /// Name of the Lease.
    pub name: String,
    /// A holder that is silent for this long has lost it.
    pub duration: Duration,
    /// Time between renewals.
    pub renew_every: Duration,
    /// Where this process answers gateways while it leads, `host:port`.
    pub address: Option<String>,
    /// No other holder can be alive (a file lock proves it): take the Lease without waiting.
    pub exclusive: bool,
}

impl Default for LeaseConfig {
    fn default() -> Self {
        Self::lasting(Duration::from_secs(15))
    }
}

impl LeaseConfig {
    /// One that is lost after so long a silence.
    pub fn lasting(duration: Duration) -> Self {
        Self {
            namespace: "virtfold".into(),
            name: "virtfold-controller".into(),
            duration,
            renew_every: Duration::from_secs(2).min(duration / ATTEMPTS),
            address: None,
            exclusive: false,
        }
    }
}

/// Why leadership ended or could not be had.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// Somebody else wrote our Lease.
    #[error("lease {0} is held by another controller")]
    Lost(String),
    /// It could not be renewed in time.
    #[error("lease {name} was not renewed within {after:?}")]
    Expired {
        /// The Lease.
        name: String,
        /// How long was tried.
        after: Duration,
        /// The last answer.
        #[source]
        source: kube::Error,
    },
    /// The API server did not answer in time whether it is renewed.
    #[error("nobody answered within {after:?} whether lease {name} is renewed")]
    Unanswered {
        /// The Lease.
        name: String,
        /// How long was tried.
        after: Duration,
    },
    /// The written Lease has no usable resourceVersion.
    #[error("lease {0} has no decimal resourceVersion")]
    Version(String),
}

/// Leadership that was acquired.
#[derive(Debug)]
pub struct Leadership {
    api: Api<Lease>,
    config: LeaseConfig,
    lease: Arc<Mutex<Lease>>,
    /// Fences instructions.
    pub epoch: Epoch,
    /// Who we are: random per process start.
    pub instance: LeaderInstance,
    /// Until when we lead at most, by our own clock.
    pub until: tokio::sync::watch::Sender<Instant>,
    /// Since when, and who led before: for what is told of the time between.
    pub reign: Reign,
}

fn now() -> MicroTime {
    let millis = i64::try_from(telemetry::clock::now()).unwrap_or(i64::MAX);
    MicroTime(jiff::Timestamp::from_millisecond(millis).unwrap_or(jiff::Timestamp::MAX))
}

fn seconds(d: Duration) -> i32 {
    i32::try_from(d.as_secs().max(1)).unwrap_or(i32::MAX)
}

/// What a controller lacks that cannot learn who leads.
const LEASE: &str = "lease";

/// Waits until the Lease is ours. Never gives up; errors of the API are logged and tried again, and make it unready.
pub async fn acquire(
    client: &Client,
    config: LeaseConfig,
    instance: LeaderInstance,
    readiness: &Readiness,
) -> Result<Leadership, LeaseError> {
    let api: Api<Lease> = Api::namespaced(client.clone(), &config.namespace);
    // (resourceVersion, since when we see it)
    let mut seen: Option<(String, Instant)> = None;
    // When the holder before us was alive for the last time.
    let mut before = None;
    loop {
        let asked = Instant::now();
        match try_acquire(&api, &config, &instance, &mut seen, &mut before).await {
            Ok(Some(lease)) => {
                readiness.has(LEASE);
                let version = lease.metadata.resource_version.as_deref().and_then(|v| v.parse().ok());
                let epoch = Epoch(version.ok_or_else(|| LeaseError::Version(config.name.clone()))?);
                let until = tokio::sync::watch::Sender::new(asked + config.duration);
                tracing::info!(%epoch, %instance, "leading");
                let lease = Arc::new(Mutex::new(lease));
                let reign = Reign { since: crate::driver::wall(), before };
                return Ok(Leadership { api, config, lease, epoch, instance, until, reign });
            }
            Ok(None) => readiness.has(LEASE),
            Err(error) => {
                readiness.lacks(LEASE, &error);
                tracing::warn!(%error, lease = config.name, "cannot take the lease yet");
            }
        }
        tokio::time::sleep(config.renew_every.min(Duration::from_secs(1))).await;
    }
}

async fn try_acquire(
    api: &Api<Lease>,
    config: &LeaseConfig,
    instance: &LeaderInstance,
    seen: &mut Option<(String, Instant)>,
    before: &mut Option<Timestamp>,
) -> kube::Result<Option<Lease>> {
    let mine = |transitions| LeaseSpec {
        holder_identity: Some(instance.to_string()),
        lease_duration_seconds: Some(seconds(config.duration)),
        acquire_time: Some(now()),
        renew_time: Some(now()),
        lease_transitions: Some(transitions),
        ..LeaseSpec::default()
    };
    let placed = |mut annotations: BTreeMap<String, String>| {
        match &config.address {
            Some(address) => annotations.insert(api::names::ANN_CONTROLLER_ADDRESS.into(), address.clone()),
            None => annotations.remove(api::names::ANN_CONTROLLER_ADDRESS),
        };
        (!annotations.is_empty()).then_some(annotations)
    };
    let Some(mut lease) = api.get_opt(&config.name).await? else {
        let lease = Lease {
            metadata: ObjectMeta {
                name: Some(config.name.clone()),
                annotations: placed(BTreeMap::new()),
                ..ObjectMeta::default()
            },
            spec: Some(mine(0)),
        };
        return settle(api, instance, api.create(&PostParams::default(), &lease).await).await;
    };
    let held = lease.spec.as_ref().and_then(|s| s.holder_identity.as_deref()).unwrap_or_default();
    // The reply to a write of ours was lost. Nobody knows when it was done; it counts from one that is answered.
    let ours = held == instance.as_str();
    if !ours {
        let renewed = lease.spec.as_ref().and_then(|s| s.renew_time.as_ref()).map(|t| t.0.as_millisecond());
        // Whoever gave it up did so with its last write; another one may have worked on until its next one was due.
        let more = if held.is_empty() { Millis(0) } else { Millis(config.renew_every.as_millis() as u64) };
        *before = renewed.and_then(|ms| u64::try_from(ms).ok()).map(|ms| Timestamp(ms).after(more));
    }
    let version = lease.metadata.resource_version.clone().unwrap_or_default();
    let since = match seen {
        Some((v, since)) if *v == version => *since,
        Some(_) | None => seen.insert((version, Instant::now())).1,
    };
    let duration = lease.spec.as_ref().and_then(|s| s.lease_duration_seconds).unwrap_or(0);
    let duration = Duration::from_secs(u64::try_from(duration).unwrap_or(0)).max(config.duration);
    if !held.is_empty() && !ours && !config.exclusive && since.elapsed() < duration {
        return Ok(None);
    }
    let transitions = lease.spec.as_ref().and_then(|s| s.lease_transitions).unwrap_or(0);
    lease.spec = Some(mine(transitions.saturating_add(i32::from(!ours))));
    lease.metadata.annotations = placed(lease.metadata.annotations.unwrap_or_default());
    settle(api, instance, api.replace(&config.name, &PostParams::default(), &lease).await).await
}

/// A conflict means that somebody was quicker; an unknown outcome is settled by the next read.
async fn settle(api: &Api<Lease>, instance: &LeaderInstance, r: kube::Result<Lease>) -> kube::Result<Option<Lease>> {
    match r {
        Ok(lease) => Ok(Some(lease)),
        Err(kube::Error::Api(s)) if s.code == 409 || s.code == 404 => Ok(None),
        Err(error) => {
            tracing::debug!(%error, %instance, api = ?api.resource_url(), "outcome of the lease write is unknown");
            Err(error)
        }
    }
}

/// What became of a renewal.
enum Renewal {
    /// It is written.
    Done,
    /// The Lease is ours at another version than we knew.
    Again,
    /// It is somebody else's.
    Lost,
    /// Nobody says.
    Unanswered,
}

impl Leadership {
    /// Renews until it is lost, and says why. The caller must stop deciding when this returns. Dropping the future stops
    /// renewing.
    pub async fn keep(&self) -> LeaseError {
        let name = || self.config.name.clone();
        loop {
            tokio::time::sleep(self.config.renew_every).await;
            let deadline = *self.until.borrow();
            loop {
                let sent = Instant::now();
                // A request that hangs must neither keep a leader in office nor cost it its office: there is time for others.
                let patience = deadline.min(sent + self.config.duration / ATTEMPTS);
                match tokio::time::timeout_at(patience, self.renew()).await.unwrap_or(Ok(Renewal::Unanswered)) {
                    Ok(Renewal::Unanswered) => {
                        tracing::warn!("nobody answers whether the lease is renewed");
                        if Instant::now() >= deadline {
                            return LeaseError::Unanswered { name: name(), after: self.config.duration };
                        }
                    }
                    Ok(Renewal::Done) => {
                        self.until.send_replace(sent + self.config.duration);
                        break;
                    }
                    Ok(Renewal::Again) => continue,
                    Ok(Renewal::Lost) => return LeaseError::Lost(name()),
                    Err(error) => {
                        tracing::warn!(%error, "cannot renew the lease");
                        if Instant::now() + self.config.renew_every >= deadline {
                            return LeaseError::Expired { name: name(), after: self.config.duration, source: error };
                        }
                    }
                }
                tokio::time::sleep(Duration::from_millis(500).min(self.config.renew_every)).await;
            }
        }
    }

    async fn renew(&self) -> kube::Result<Renewal> {
        let mut lease = self.lease.lock().await;
        let mut renewed = lease.clone();
        if let Some(spec) = &mut renewed.spec {
            spec.renew_time = Some(now());
        }
        match self.api.replace(&self.config.name, &PostParams::default(), &renewed).await {
            Ok(written) => {
                *lease = written;
                Ok(Renewal::Done)
            }
            Err(kube::Error::Api(s)) if s.code == 409 || s.code == 404 => {
                // Our own earlier renewal may have been written and its reply lost; labels may have changed. That one counts
                // from when it was sent, which was earlier: nothing is renewed by having read it.
                let found = self.api.get_opt(&self.config.name).await?;
                let ours = found.filter(|l| {
                    l.spec.as_ref().and_then(|s| s.holder_identity.as_deref()) == Some(self.instance.as_str())
                });
                match ours {
                    Some(found) => {
                        *lease = found;
                        Ok(Renewal::Again)
                    }
                    None => Ok(Renewal::Lost),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Gives the Lease up, so that the next controller need not wait. Best effort.
    pub async fn release(&self) {
        let mut lease = self.lease.lock().await.clone();
        if let Some(spec) = &mut lease.spec {
            spec.holder_identity = None;
            spec.renew_time = Some(now());
        }
        if let Err(error) = self.api.replace(&self.config.name, &PostParams::default(), &lease).await {
            tracing::debug!(%error, "lease not released");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use embedded::{
        auth::User,
        server::{ApiServer, Config},
        storage::Memory,
    };
    use std::sync::atomic::{AtomicU32, Ordering};
    use tower::Service;

    #[tokio::test(start_paused = true)]
    async fn what_failed_before_it_was_acquired_does_not_count_against_it() {
        let server = ApiServer::new(Arc::new(Memory::new()), Config::default()).await.unwrap();
        let asked = Arc::new(AtomicU32::new(0));
        let count = asked.clone();
        // For a while nobody answers, and the answer to the write that is done at last is lost, too.
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let (mut server, count) = (server.service(User::system("test")), count.clone());
            async move {
                let away = count.fetch_add(1, Ordering::Relaxed) < 30;
                let lost = request.method() == http::Method::POST;
                if away {
                    return Err("nobody is there".into());
                }
                let answer = server.call(request).await?;
                if lost { Err("the answer is lost".into()) } else { Ok::<_, tower::BoxError>(answer) }
            }
        });
        let config = LeaseConfig { namespace: "default".into(), ..LeaseConfig::default() };
        let client = Client::new(service, "default");
        let leadership = acquire(&client, config, LeaderInstance("a".into()), &Readiness::default()).await.unwrap();
        assert!(asked.load(Ordering::Relaxed) > 31);
        assert!(*leadership.until.borrow() > Instant::now() + Duration::from_secs(14));
        tokio::select! {
            lost = leadership.keep() => panic!("{lost}"),
            () = tokio::time::sleep(Duration::from_secs(60)) => {}
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_renewal_that_nobody_answers_does_not_cost_the_lease() {
        let server = ApiServer::new(Arc::new(Memory::new()), Config::default()).await.unwrap();
        let renewals = Arc::new(AtomicU32::new(0));
        let count = renewals.clone();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let (mut server, count) = (server.service(User::system("test")), count.clone());
            async move {
                if request.method() == http::Method::PUT && count.fetch_add(1, Ordering::Relaxed) == 0 {
                    std::future::pending::<()>().await;
                }
                server.call(request).await
            }
        });
        let config = LeaseConfig { namespace: "default".into(), ..LeaseConfig::default() };
        let client = Client::new(service, "default");
        let leadership = acquire(&client, config, LeaderInstance("a".into()), &Readiness::default()).await.unwrap();
        tokio::select! {
            lost = leadership.keep() => panic!("{lost}"),
            () = tokio::time::sleep(Duration::from_secs(60)) => {}
        }
        assert!(renewals.load(Ordering::Relaxed) > 10);
    }

    #[tokio::test(start_paused = true)]
    async fn who_cannot_learn_who_leads_is_not_ready_and_a_successor_knows_until_when_somebody_led() {
        let server = ApiServer::new(Arc::new(Memory::new()), Config::default()).await.unwrap();
        let there = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let seen = there.clone();
        let service = tower::service_fn(move |mut request: http::Request<kube::client::Body>| {
            let (mut server, there) = (server.service(User::system("test")), seen.load(Ordering::Relaxed));
            async move {
                if !there {
                    // An answer that is no Lease.
                    *request.uri_mut() = http::Uri::from_static("/healthz");
                    *request.method_mut() = http::Method::GET;
                }
                server.call(request).await
            }
        });
        let client = Client::new(service, "default");
        let config = LeaseConfig { namespace: "default".into(), ..LeaseConfig::default() };
        let readiness = Readiness::default();
        let first = acquire(&client, config.clone(), LeaderInstance("a".into()), &readiness);
        let look = async {
            while readiness.check().is_ok() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            there.store(true, Ordering::Relaxed);
        };
        let (first, ()) = tokio::join!(first, look);
        let first = first.unwrap();
        assert_eq!((readiness.check(), first.reign.before), (Ok(()), None));
        // One that gives it up is known to the moment; one that goes silent may have worked on until its next renewal was due.
        first.release().await;
        let second = acquire(&client, config.clone(), LeaderInstance("b".into()), &readiness).await.unwrap();
        let released = second.reign.before.unwrap();
        assert!(released >= first.reign.since && released <= second.reign.since);
        let third = acquire(&client, config.clone(), LeaderInstance("c".into()), &readiness).await.unwrap();
        let silent = third.reign.before.unwrap();
        let due = second.reign.since.after(Millis(2_000));
        assert!(silent.0.abs_diff(due.0) < 1_000, "{silent} {due}");
    }
}
