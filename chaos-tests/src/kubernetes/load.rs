//! Load for `scripts/bench --kubernetes`: creates VMs and sees when they run, or does, with nobody else there, exactly the writes
//! that such a start takes (the floor). It is small and fast, so that on a machine with few cores it takes little from those
//! who are measured, and so that the floor is one.

use anyhow::{Context, Result, bail, ensure};
use futures::{Stream, StreamExt, TryStreamExt, stream};
use http::Request;
use kube::{
    Client, Config,
    api::WatchEvent,
    config::{KubeConfigOptions, Kubeconfig},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    path::Path,
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// How long a watch is kept.
const WATCH: u32 = 3000;

/// One write of a VM's start. Path and body have places for what differs from VM to VM: `@name@`, `@namespace@`, and the UIDs of
/// objects that steps before have made, by what they `keep` them as.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Step {
    method: String,
    path: String,
    #[serde(rename = "type")]
    kind: String,
    body: String,
    #[serde(default)]
    keep: Option<String>,
    /// Whose write it is, where it is not the client's own.
    #[serde(default, rename = "as")]
    user: Option<String>,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum What {
    /// All steps, for nobody.
    Floor,
    /// The first step, which creates the VM; then it is waited for until it runs.
    Run,
    /// The same; it is deleted when it runs, and waited for until it is gone.
    Churn,
}

/// Of how many VMs, and how.
#[derive(Debug, Clone)]
pub struct Load {
    /// What.
    pub what: What,
    /// Where.
    pub namespace: String,
    /// VMs.
    pub count: usize,
    /// Requests at once.
    pub clients: usize,
    /// VMs a second; none: as fast as the server takes them.
    pub rate: Option<f64>,
    /// All has to be over by then.
    pub limit: Duration,
}

/// What came of it.
#[derive(Debug, Default, Serialize)]
pub struct Done {
    /// From the first request to the last event.
    pub seconds: f64,
    /// Writes by this client.
    pub writes: usize,
    /// From the request that created a VM until it ran (or was gone), sorted.
    pub latencies: Vec<f64>,
}

#[derive(Debug, Clone, Deserialize)]
struct Meta {
    #[serde(default)]
    name: String,
    #[serde(default)]
    uid: String,
    #[serde(default, rename = "resourceVersion")]
    version: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Status {
    #[serde(default)]
    phase: String,
}

#[derive(Debug, Clone, Deserialize)]
struct Seen {
    metadata: Meta,
    #[serde(default)]
    status: Status,
}

/// What every answer has.
#[derive(Debug, Deserialize)]
struct Made {
    metadata: Meta,
}

/// An administrator's client.
pub async fn client(kubeconfig: &Path) -> Result<Client> {
    let read = Kubeconfig::read_from(kubeconfig).with_context(|| format!("read {}", kubeconfig.display()))?;
    let mut config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await?;
    config.default_retry = false;
    Ok(Client::try_from(config)?)
}

/// Does one step; what the server answered.
async fn act(client: &Client, step: &Step, known: &BTreeMap<String, String>) -> Result<Made> {
    let fill = |text: &str| known.iter().fold(text.to_owned(), |t, (k, v)| t.replace(&format!("@{k}@"), v));
    let request = Request::builder().method(step.method.as_str()).uri(fill(&step.path));
    let request = step.user.iter().fold(request, |r, user| r.header("impersonate-user", user));
    let request = request.header("content-type", &step.kind).body(fill(&step.body).into_bytes())?;
    client.request(request).await.with_context(|| format!("{} {}", step.method, fill(&step.path)))
}

/// Does the steps for one VM, one after another.
async fn play(client: &Client, steps: &[Step], namespace: &str, name: &str) -> Result<()> {
    let mut known: BTreeMap<String, String> =
        [("namespace".to_owned(), namespace.to_owned()), ("name".to_owned(), name.to_owned())].into();
    for step in steps {
        let made = act(client, step, &known).await?;
        if let Some(keep) = &step.keep {
            known.insert(keep.clone(), made.metadata.uid);
        }
    }
    Ok(())
}

/// Events of a resource of KubeVirt's from now on. The server ends the watches of a kind whose definition changes, as it does for a
/// while after it was made: each is taken up again where it ended.
async fn watch(
    client: &Client,
    namespace: &str,
    plural: &str,
) -> Result<impl Stream<Item = Result<WatchEvent<Seen>>> + use<>> {
    let path = format!("/apis/kubevirt.io/v1/namespaces/{namespace}/{plural}");
    let list: Made = client.request(Request::get(format!("{path}?limit=1")).body(vec![])?).await?;
    let open = async |client: &Client, path: &str, version: &str| {
        let request = format!("{path}?watch=1&resourceVersion={version}&timeoutSeconds={WATCH}");
        anyhow::Ok(client.request_events::<Seen>(Request::get(request).body(vec![])?).await?.boxed())
    };
    let first = open(client, &path, &list.metadata.version).await?;
    let state = (client.clone(), path, list.metadata.version, first);
    Ok(stream::try_unfold(state, move |(client, path, mut version, mut events)| async move {
        loop {
            if let Some(event) = events.try_next().await? {
                if let WatchEvent::Added(seen) | WatchEvent::Modified(seen) | WatchEvent::Deleted(seen) = &event {
                    version.clone_from(&seen.metadata.version);
                }
                return Ok(Some((event, (client, path, version, events))));
            }
            events = open(&client, &path, &version).await?;
        }
    }))
}

/// Puts load on the server.
pub async fn run(client: &Client, load: &Load, steps: &[Step]) -> Result<Done> {
    match tokio::time::timeout(load.limit, begin(client, load, steps)).await {
        Ok(done) => done,
        Err(_) => bail!("{} VMs: not over after {} s", load.count, load.limit.as_secs()),
    }
}

async fn begin(client: &Client, load: &Load, steps: &[Step]) -> Result<Done> {
    ensure!(!steps.is_empty(), "no steps");
    let steps = if load.what == What::Floor { steps } else { &steps[..1] };
    let instances = watch(client, &load.namespace, "virtualmachineinstances").await?;
    let machines = watch(client, &load.namespace, "virtualmachines").await?;
    let created: Arc<Mutex<BTreeMap<String, Instant>>> = Arc::default();
    let began = Instant::now();
    let create = stream::iter(0..load.count)
        .map(|n| {
            let (created, at) = (created.clone(), load.rate.map(|rate| Duration::from_secs_f64(n as f64 / rate)));
            async move {
                if let Some(at) = at {
                    tokio::time::sleep_until((began + at).into()).await;
                }
                let name = format!("vm-{n}");
                created.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone(), Instant::now());
                play(client, steps, &load.namespace, &name).await
            }
        })
        .buffer_unordered(load.clients)
        .try_collect::<()>();
    let since = |name: &str, now: Instant| {
        let began = created.lock().unwrap_or_else(PoisonError::into_inner).get(name).copied();
        began.map(|began| (now - began).as_secs_f64())
    };
    let mut done = Done { writes: load.count * steps.len(), ..Done::default() };
    match load.what {
        What::Floor => create.await?,
        What::Run | What::Churn => {
            let churn = load.what == What::Churn;
            let mut ends: BTreeMap<String, f64> = BTreeMap::new();
            let ended = async {
                let mut events =
                    pin!(stream::select(instances.map_ok(|e| (true, e)), machines.map_ok(|e| (false, e)),));
                let mut deletions = vec![];
                let mut ran = std::collections::BTreeSet::new();
                while let Some(event) = events.next().await {
                    let now = Instant::now();
                    let over = match event? {
                        (true, WatchEvent::Added(v) | WatchEvent::Modified(v)) if v.status.phase == "Running" => {
                            let name = v.metadata.name;
                            let first = ran.insert(name.clone());
                            if churn && first {
                                let path = format!(
                                    "/apis/kubevirt.io/v1/namespaces/{}/virtualmachines/{name}",
                                    load.namespace
                                );
                                let (client, request) = (client.clone(), Request::delete(path).body(vec![])?);
                                deletions.push(tokio::spawn(async move {
                                    client.request::<serde_json::Value>(request).await
                                }));
                            }
                            (!churn && first).then_some(name)
                        }
                        (false, WatchEvent::Deleted(v)) if churn => Some(v.metadata.name),
                        (_, WatchEvent::Error(e)) => bail!("the watch ended: {e}"),
                        _ => None,
                    };
                    if let Some(name) = over {
                        let took = since(&name, now).unwrap_or_default();
                        ends.entry(name).or_insert(took);
                    }
                    if ends.len() == load.count {
                        for deletion in deletions {
                            deletion.await??;
                        }
                        return Ok(());
                    }
                }
                bail!("the watch ended")
            };
            tokio::try_join!(create, ended)?;
            done.latencies = ends.into_values().collect();
            done.latencies.sort_by(f64::total_cmp);
            done.writes *= if churn { 2 } else { 1 };
        }
    }
    done.seconds = began.elapsed().as_secs_f64();
    Ok(done)
}
