//! The way to one launcher: finds it, asks who it is, follows its level, and begins again when it breaks.
//!
//! The launcher may be slow, stopped, or no launcher at all: every wait has an end, and what is not gRPC is a failure like
//! any other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::StreamExt;
use proto::launcher::{InfoReply, Update};
use tokio::sync::mpsc;

use crate::launchers::{Launcher, Launchers};
use crate::{PodFacts, limits};

/// A launcher that was reached.
pub(crate) type Client = Arc<dyn Launcher>;

/// What a link tells.
pub(crate) enum LinkEvent {
    Connected { client: Client, info: Box<InfoReply> },
    Updated(Box<Update>),
    Lost,
}

/// Follows the launcher of `pod` until the task is aborted, or the container has ended and the launcher is silent.
pub(crate) async fn follow(
    launchers: Arc<dyn Launchers>,
    pod: PodFacts,
    running: Arc<AtomicBool>,
    events: mpsc::Sender<LinkEvent>,
) {
    let mut pause = limits::RETRY_FIRST;
    // Steps of the launcher up to this one were told.
    let mut told = 0;
    loop {
        match session(&*launchers, &pod, &events, &mut told).await {
            Ok(()) => pause = limits::RETRY_FIRST,
            Err(Broken::NobodyListens) => return,
            Err(Broken::Early(error)) => {
                tracing::debug!(%error, pod = pod.pod_uid, "no launcher yet");
            }
            Err(Broken::Late(error)) => {
                tracing::info!(%error, pod = pod.pod_uid, "the launcher stopped answering");
                pause = limits::RETRY_FIRST;
                if events.send(LinkEvent::Lost).await.is_err() {
                    return;
                }
            }
        }
        if !running.load(Ordering::Relaxed) {
            return;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(limits::LAUNCHER_RETRY);
    }
}

enum Broken {
    /// Before it was connected.
    Early(String),
    /// After.
    Late(String),
    /// The hub is gone.
    NobodyListens,
}

async fn session(
    launchers: &dyn Launchers,
    pod: &PodFacts,
    events: &mpsc::Sender<LinkEvent>,
    told: &mut u64,
) -> Result<(), Broken> {
    let early = |e: tonic::Status| Broken::Early(e.to_string());
    let client = launchers.connect(pod).await.map_err(Broken::Early)?;
    let info = bounded(client.info()).await.map_err(early)?;
    let mut watch = bounded(client.watch(telemetry::steps::are_told())).await.map_err(early)?;
    let connected = LinkEvent::Connected { client: client.clone(), info: Box::new(info) };
    events.send(connected).await.map_err(|_| Broken::NobodyListens)?;
    loop {
        match watch.next().await {
            Some(Ok(mut update)) => {
                tell(std::mem::take(&mut update.steps), pod, &client, told);
                events.send(LinkEvent::Updated(Box::new(update))).await.map_err(|_| Broken::NobodyListens)?;
            }
            None => return Err(Broken::Late("the stream ended".into())),
            Some(Err(status)) => return Err(Broken::Late(status.to_string())),
        }
    }
}

/// Tells what the launcher did, in its name, and lets it forget that. An agent that ends in between has told it all the same, and its
/// successor tells it once more: the same spans.
fn tell(steps: Vec<proto::launcher::Step>, pod: &PodFacts, client: &Client, told: &mut u64) {
    let time = |us| std::time::UNIX_EPOCH + Duration::from_micros(us);
    let before = *told;
    for step in steps {
        if step.seq <= *told {
            continue;
        }
        *told = step.seq;
        let Some(context) = telemetry::TraceContext::parse(&step.traceparent) else { continue };
        let mut attributes = identity(pod).to_vec();
        if step.asked {
            let method = if step.operation == VERB { "Verb" } else { "Execute" };
            attributes.extend(rpc("virtfold.launcher.v1.Launcher", method));
        }
        telemetry::emit(telemetry::Step {
            step: Some(&step.name),
            parent: Some(step.parent.as_str()).filter(|p| !p.is_empty()),
            end: time(step.end_unix_us),
            attributes,
            error: (!step.reason.is_empty())
                .then(|| telemetry::Failure { reason: step.reason.clone(), message: step.message.clone() }),
            kind: if step.asked { telemetry::Kind::Server } else { telemetry::Kind::Internal },
            service: Some("virtfold-launcher"),
            ..telemetry::Step::of(context, &step.cell, &step.operation, time(step.start_unix_us))
        });
    }
    if *told > before {
        let told = client.told(*told);
        // One that is ending needs no thanks.
        tokio::spawn(async move { bounded(told).await.ok() });
    }
}

/// A verb, as a part of the request that it belongs to.
pub(crate) const VERB: &str = "agent-verb";

/// Whose a step is, as spans say it.
pub(crate) fn identity(pod: &PodFacts) -> [(&'static str, String); 4] {
    [
        ("k8s.namespace.name", pod.namespace.clone()),
        ("k8s.pod.name", pod.pod_name.clone()),
        ("k8s.pod.uid", pod.pod_uid.clone()),
        ("kubevirt.vm.name", pod.vmi_name.clone()),
    ]
}

/// What a call is, as spans say it.
pub(crate) fn rpc(service: &str, method: &str) -> [(&'static str, String); 3] {
    [("rpc.system", "grpc".into()), ("rpc.service", service.to_owned()), ("rpc.method", method.to_owned())]
}

async fn bounded<T>(call: impl Future<Output = Result<T, tonic::Status>>) -> Result<T, tonic::Status> {
    within(limits::LAUNCHER, call).await
}

/// The answer, or a failure after that time.
pub(crate) async fn within<T>(
    time: Duration,
    call: impl Future<Output = Result<T, tonic::Status>>,
) -> Result<T, tonic::Status> {
    tokio::time::timeout(time, call)
        .await
        .unwrap_or_else(|_| Err(tonic::Status::deadline_exceeded(format!("no answer within {time:?}"))))
}
