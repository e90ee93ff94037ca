//! The agent's words with the API server: the VMIs of its own node, and single reads and writes.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use k8s_openapi::api::coordination::v1::Lease;
use kube::Client;
use kube::api::{Api, ListParams, Patch, PatchParams, WatchEvent, WatchParams};
use kube::core::Request;
use serde_json::{Value, json};
use state::agent::{Confirmed, LeaseSeen, VmiFacts};
use state::{ResourceVersion, VmiUid};
use tokio::sync::mpsc;

use crate::limits;

const VMIS: &str = "/apis/kubevirt.io/v1/virtualmachineinstances";

/// A VMI and its JSON.
#[derive(Clone, Debug)]
pub(crate) struct Vmi {
    pub facts: VmiFacts,
    pub raw: Bytes,
}

impl Vmi {
    pub fn read(raw: Bytes) -> Option<Self> {
        Some(Self { facts: VmiFacts::read(&raw)?, raw })
    }

    fn of(value: &Value) -> Option<Self> {
        Self::read(serde_json::to_vec(value).ok()?.into())
    }
}

/// What the watch tells.
#[derive(Debug)]
pub(crate) enum WatchNews {
    Seen(Vmi),
    /// Not there any more, as far as the watch knows.
    Vanished(VmiUid),
    /// A whole list was told before; the watch has come this far.
    Reached(ResourceVersion),
    /// The store went back.
    Restored,
}

/// No answer in time, or an answer that is an error.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("no answer within {0:?}")]
    Slow(Duration),
    #[error(transparent)]
    Kube(#[from] kube::Error),
    #[error("an answer that cannot be read")]
    Unreadable(#[source] serde_json::Error),
    #[error("the watch asks for a new list")]
    Expired,
}

async fn within<T>(call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, Error> {
    match tokio::time::timeout(limits::API, call).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(Error::Slow(limits::API)),
    }
}

/// Follows the VMIs that carry this node's label, for ever.
pub(crate) async fn follow(client: Client, node: String, news: mpsc::Sender<WatchNews>) {
    let mut reflector = Reflector { client, node, known: BTreeMap::new(), reached: ResourceVersion(0), news };
    let mut pause = limits::RETRY_FIRST;
    loop {
        match reflector.run().await {
            Ok(()) => return,
            Err((progress, error)) => {
                if progress {
                    pause = limits::RETRY_FIRST;
                }
                tracing::debug!(%error, "watching VMIs");
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(limits::API_RETRY);
    }
}

struct Reflector {
    client: Client,
    node: String,
    known: BTreeMap<VmiUid, ResourceVersion>,
    reached: ResourceVersion,
    news: mpsc::Sender<WatchNews>,
}

/// The hub is gone.
struct Done;

impl Reflector {
    fn selector(&self) -> String {
        format!("{}={}", api::names::LABEL_NODE_NAME, self.node)
    }

    /// One list and the watches after it. `Ok` where nobody listens any more.
    async fn run(&mut self) -> Result<(), (bool, Error)> {
        let from = match self.list().await {
            Ok(Ok(rv)) => rv,
            Ok(Err(Done)) => return Ok(()),
            Err(e) => return Err((false, e)),
        };
        let mut from = from;
        loop {
            match self.watch(&mut from).await {
                Ok(Ok(())) => {}
                Ok(Err(Done)) => return Ok(()),
                Err(e) => return Err((true, e)),
            }
        }
    }

    async fn tell(&self, news: WatchNews) -> Result<(), Done> {
        self.news.send(news).await.map_err(|_| Done)
    }

    /// A quorum read: below what was seen, the store was restored.
    async fn list(&mut self) -> Result<Result<ResourceVersion, Done>, Error> {
        let params = ListParams::default().labels(&self.selector());
        let request = Request::new(VMIS).list(&params).map_err(kube::Error::BuildRequest)?;
        let text = within(self.client.request_text(request)).await?;
        let list: Value = serde_json::from_str(&text).map_err(Error::Unreadable)?;
        let rv = version(&list);
        let told = self.list_told(&list, rv).await;
        Ok(told.map(|()| rv))
    }

    async fn list_told(&mut self, list: &Value, rv: ResourceVersion) -> Result<(), Done> {
        if rv < self.reached {
            tracing::warn!(%rv, reached = %self.reached, "the API server's store went back in time");
            self.known.clear();
            self.tell(WatchNews::Restored).await?;
        }
        self.reached = rv;
        let items = list.get("items").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let mut there = BTreeMap::new();
        for vmi in items.iter().filter_map(Vmi::of) {
            there.insert(vmi.facts.uid.clone(), vmi.facts.rv);
            self.tell(WatchNews::Seen(vmi)).await?;
        }
        let missing = std::mem::replace(&mut self.known, there);
        for (uid, seen) in missing {
            // Newer than the list: the list cannot know.
            if !self.known.contains_key(&uid) && seen <= rv {
                self.tell(WatchNews::Vanished(uid)).await?;
            }
        }
        self.tell(WatchNews::Reached(rv)).await
    }

    /// One watch, to its regular end.
    async fn watch(&mut self, from: &mut ResourceVersion) -> Result<Result<(), Done>, Error> {
        let params = WatchParams::default().labels(&self.selector()).timeout(limits::WATCH_SECONDS);
        let request = Request::new(VMIS).watch(&params, &from.to_string()).map_err(kube::Error::BuildRequest)?;
        let stream = within(self.client.request_events::<Value>(request)).await?;
        let mut stream = std::pin::pin!(stream);
        let end = tokio::time::Instant::now() + limits::WATCH;
        loop {
            let event = match tokio::time::timeout_at(end, stream.next()).await {
                Ok(Some(event)) => event?,
                Ok(None) | Err(_) => return Ok(Ok(())),
            };
            let event: WatchEvent<Value> = event;
            let told = match event {
                WatchEvent::Added(v) | WatchEvent::Modified(v) => self.seen(&v, false, from).await,
                WatchEvent::Deleted(v) => self.seen(&v, true, from).await,
                WatchEvent::Bookmark(b) => {
                    *from = ResourceVersion::parse(&b.metadata.resource_version);
                    self.reached = self.reached.max(*from);
                    self.tell(WatchNews::Reached(*from)).await
                }
                WatchEvent::Error(status) if status.code == 410 => return Err(Error::Expired),
                WatchEvent::Error(status) => return Err(kube::Error::Api(status).into()),
            };
            if let Err(done) = told {
                return Ok(Err(done));
            }
        }
    }

    async fn seen(&mut self, value: &Value, gone: bool, from: &mut ResourceVersion) -> Result<(), Done> {
        let Some(vmi) = Vmi::of(value) else { return Ok(()) };
        *from = vmi.facts.rv.max(*from);
        self.reached = self.reached.max(*from);
        let uid = vmi.facts.uid.clone();
        if gone {
            self.known.remove(&uid);
        } else {
            self.known.insert(uid.clone(), vmi.facts.rv);
        }
        // The last state of one that vanished tells whether it was being deleted.
        self.tell(WatchNews::Seen(vmi)).await?;
        if gone {
            self.tell(WatchNews::Vanished(uid)).await?;
        }
        self.tell(WatchNews::Reached(*from)).await
    }
}

fn version(value: &Value) -> ResourceVersion {
    value.pointer("/metadata/resourceVersion").and_then(Value::as_str).map(ResourceVersion::parse).unwrap_or_default()
}

fn is_404(e: &Error) -> bool {
    matches!(e, Error::Kube(kube::Error::Api(s)) if s.code == 404)
}

/// A live read of one VMI.
pub(crate) async fn confirm(client: &Client, namespace: &str, name: &str) -> (Confirmed, Option<Vmi>) {
    let path = format!("/apis/kubevirt.io/v1/namespaces/{namespace}/virtualmachineinstances");
    let read = async {
        let request = Request::new(path).get(name, &Default::default()).map_err(kube::Error::BuildRequest)?;
        within(client.request_text(request)).await
    };
    match read.await {
        Ok(text) => match Vmi::read(text.into()) {
            Some(vmi) => (Confirmed::Found(vmi.facts.clone()), Some(vmi)),
            None => (Confirmed::Unanswered, None),
        },
        Err(e) if is_404(&e) => (Confirmed::Gone, None),
        Err(error) => {
            tracing::debug!(%error, namespace, name, "reading a VMI");
            (Confirmed::Unanswered, None)
        }
    }
}

/// A live read of the controller's Lease.
pub(crate) async fn lease(client: &Client, namespace: &str, name: &str) -> LeaseSeen {
    let api: Api<Lease> = Api::namespaced(client.clone(), namespace);
    match within(api.get(name)).await {
        Ok(lease) => match lease.spec.and_then(|s| s.holder_identity).filter(|h| !h.is_empty()) {
            Some(holder) => LeaseSeen::HeldBy(holder.into()),
            None => LeaseSeen::Nobody,
        },
        Err(e) if is_404(&e) => LeaseSeen::Nobody,
        Err(e) => LeaseSeen::Unreadable(e.to_string()),
    }
}

/// Writes the readiness gate of a launcher pod.
pub(crate) async fn write_unpaused(
    client: &Client,
    namespace: &str,
    pod: &str,
    uid: &str,
    unpaused: bool,
) -> Result<(), Error> {
    use k8s_openapi::api::core::v1::Pod;
    let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let (status, reason, message) = if unpaused {
        ("True", "NotPaused", "the virtual machine is not paused")
    } else {
        ("False", "Paused", "the virtual machine is paused")
    };
    // Strategic merge: the list is keyed by type, so nobody else's condition is touched. The UID is a precondition.
    let patch = json!({
        "metadata": {"uid": uid},
        "status": {"conditions": [{
            "type": api::names::GATE_UNPAUSED, "status": status, "reason": reason, "message": message,
            "lastTransitionTime": now,
        }]},
    });
    within(api.patch_status(pod, &PatchParams::default(), &Patch::Strategic(patch))).await.map(drop)
}
