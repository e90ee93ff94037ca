//! Carries out commands of cells: writes and live reads at the API server.
//!
//! It decides nothing. How a command ended is classified once, here; the machines see classes, not HTTP codes. A cell has
//! at most one command in flight per object, so commands may run side by side: urgent ones in one pool, lazy ones in a
//! smaller one that cannot hold them up.

use crate::hub::resource;
use kube::{
    Client, Resource,
    api::{
        DeleteParams, DynamicObject, GetParams, ListParams, Patch as KubePatch, PatchParams, PostParams, Preconditions,
    },
    core::request::{Error as Unsendable, Request},
};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use state::{
    Millis, ResourceVersion,
    object::{Class, Kind, ObjectRef, Refusal, Settled},
    observe::{self, NodeView, Object, Project, VmiView},
    set,
    vm::{Patch, Recipe, Source},
};
use std::sync::Arc;
use tokio::{
    sync::{Semaphore, watch},
    time::Instant,
};

/// Urgent commands at once.
const URGENT: usize = 64;
/// Lazy commands at once.
const LAZY: usize = 4;
/// Where the server says "not now" and does not say when.
const BUSY: Millis = Millis(1000);

/// What a server's answer is read as.
pub trait Answer: Sized {
    /// Reads it; `None` where it does not parse.
    fn read<'de>(kind: Kind, raw: impl Deserializer<'de>) -> Option<Self>;
}

impl Answer for Object {
    fn read<'de>(kind: Kind, raw: impl Deserializer<'de>) -> Option<Self> {
        observe::object(kind, raw)
    }
}

/// What a set is told, and the instances in it, which the caches have to know of.
pub struct Told {
    /// For the set.
    pub sight: set::Sight,
    /// For the caches.
    pub instances: Vec<Object>,
}

impl Answer for Told {
    fn read<'de>(kind: Kind, raw: impl Deserializer<'de>) -> Option<Self> {
        if kind != Kind::VirtualMachineInstance {
            return set::Sight::read(kind, raw).map(|sight| Self { sight, instances: vec![] });
        }
        let instance = observe::object(kind, raw)?;
        let Object::Vmi(view) = &instance else { return None };
        let sight = set::Sight::Member(Box::new(view.as_ref().into()));
        Some(Self { sight, instances: vec![instance] })
    }
}

impl Answer for NodeView {
    fn read<'de>(_: Kind, raw: impl Deserializer<'de>) -> Option<Self> {
        <NodeView as Project>::Raw::deserialize(raw).ok().map(NodeView::project)
    }
}

/// Writes and reads on behalf of the leader.
#[derive(Clone)]
pub struct Executor {
    client: Client,
    until: watch::Receiver<Instant>,
    urgent: Arc<Semaphore>,
    lazy: Arc<Semaphore>,
}

impl Executor {
    /// An executor that stops writing when `until` has passed.
    pub fn new(client: Client, until: watch::Receiver<Instant>) -> Self {
        Self { client, until, urgent: Arc::new(Semaphore::new(URGENT)), lazy: Arc::new(Semaphore::new(LAZY)) }
    }

    /// Whether this process may still act as leader.
    pub fn leads(&self) -> bool {
        *self.until.borrow() > Instant::now()
    }

    /// Sends a request; the server's answer as it came. (What answers are read into is the projections alone: on the way through
    /// a general object, each would be read three times.)
    async fn ask(&self, request: Result<http::Request<Vec<u8>>, Unsendable>) -> kube::Result<String> {
        self.client.request_text(request.map_err(kube::Error::BuildRequest)?).await
    }

    async fn turn(&self, class: Class) -> Option<tokio::sync::OwnedSemaphorePermit> {
        let pool = match class {
            Class::Urgent => &self.urgent,
            Class::Lazy => &self.lazy,
        };
        let permit = pool.clone().acquire_owned().await.ok()?;
        // Checked as late as possible: a write of a leader that is none any more is harmless, but noise.
        self.leads().then_some(permit)
    }

    /// Creates what the recipe makes of the source.
    pub async fn create<O: Answer>(&self, recipe: &Recipe, source: &Source, target: &ObjectRef) -> Settled<O> {
        let Some(_turn) = self.turn(Class::Urgent).await else { return Settled::Busy { after: BUSY } };
        let raw = match self.ask(at(&source.object).get(&source.object.name, &GetParams::default())).await {
            Ok(raw) => raw,
            Err(e) => return failed(target.kind, e, false),
        };
        // The error may quote a value.
        let Ok(raw) = serde_json::from_str::<Value>(&raw) else {
            return unreadable(&source.object, &"the server's answer is no object");
        };
        let text = |pointer| raw.pointer(pointer).and_then(Value::as_str);
        let version = text("/metadata/resourceVersion").map(state::ResourceVersion::parse);
        if text("/metadata/uid") != Some(source.object.uid.as_str()) || version != Some(source.rv) {
            return Settled::Conflict;
        }
        let mut inputs = vec![];
        for (_, name) in recipe.inputs() {
            match self.record(target, name).await {
                Ok(record) => inputs.push(record),
                Err(settled) => return settled,
            }
        }
        let body = match state::render::render(recipe, &source.object, target, &raw, &inputs) {
            Ok(body) => body,
            Err(e) => return unreadable(&source.object, &e),
        };
        match self.ask(at(target).create(&PostParams::default(), body.to_string().into_bytes())).await {
            Ok(answer) => applied(target, &answer),
            Err(e) => failed(target.kind, e, true),
        }
    }

    /// A ControllerRevision in the namespace of what is made.
    async fn record<O>(&self, target: &ObjectRef, name: &str) -> Result<Value, Settled<O>> {
        let record = ObjectRef {
            kind: Kind::ControllerRevision,
            name: name.to_owned(),
            uid: Default::default(),
            ..target.clone()
        };
        if !is_name(name) {
            return Err(unreadable(&record, &"no object can have such a name"));
        }
        let raw = match self.ask(at(&record).get(name, &GetParams::default())).await {
            Ok(raw) => raw,
            // The source is there: what is missing is told by its name.
            Err(kube::Error::Api(s)) if s.code == 404 => {
                let message = format!("{record} does not exist");
                return Err(Settled::Refused(Refusal { code: 404, reason: s.reason.clone(), message }));
            }
            Err(e) => return Err(failed(record.kind, e, false)),
        };
        serde_json::from_str(&raw).map_err(|_| unreadable(&record, &"the server's answer is no object"))
    }

    /// Patches.
    pub async fn patch<O: Answer>(&self, patch: &Patch) -> Settled<O> {
        let Some(_turn) = self.turn(patch.class).await else { return Settled::Busy { after: BUSY } };
        let (api, name) = (at(&patch.target), &patch.target.name);
        let (params, body) = (PatchParams::default(), KubePatch::Merge(&patch.body));
        let request = if patch.status {
            api.patch_subresource("status", name, &params, &body)
        } else {
            api.patch(name, &params, &body)
        };
        match self.ask(request).await {
            Ok(answer) => applied(&patch.target, &answer),
            Err(e) => failed(patch.target.kind, e, true),
        }
    }

    /// Deletes; the UID, where there is one, is a precondition.
    pub async fn delete<O: Answer>(&self, target: &ObjectRef) -> Settled<O> {
        let Some(_turn) = self.turn(Class::Urgent).await else { return Settled::Busy { after: BUSY } };
        let uid = Some(target.uid.0.clone()).filter(|u| !u.is_empty());
        let params = DeleteParams {
            preconditions: uid.map(|uid| Preconditions { uid: Some(uid), resource_version: None }),
            ..DeleteParams::background()
        };
        #[derive(Deserialize)]
        struct Answered {
            kind: String,
        }
        match self.ask(at(target).delete(&target.name, &params)).await {
            Ok(answer) => match serde_json::from_str::<Answered>(&answer) {
                Ok(answered) if answered.kind == "Status" => Settled::Gone,
                // Still there, with finalizers or a grace period.
                Ok(_) => applied(target, &answer),
                Err(e) => failed(target.kind, kube::Error::SerdeError(e), true),
            },
            Err(e) => failed(target.kind, e, true),
        }
    }

    /// Reads live.
    pub async fn confirm<O: Answer>(&self, target: &ObjectRef) -> Settled<O> {
        if !is_name(&target.name) {
            return Settled::Gone;
        }
        let Some(_turn) = self.turn(Class::Urgent).await else { return Settled::Busy { after: BUSY } };
        match self.ask(at(target).get(&target.name, &GetParams::default())).await {
            Ok(answer) => applied(target, &answer),
            Err(e) => failed(target.kind, e, false),
        }
    }

    /// Reads live all instances that a selector chooses.
    pub async fn survey(&self, kind: Kind, namespace: String, selector: &str) -> Settled<Told> {
        let target = ObjectRef { kind, namespace, name: String::new(), uid: Default::default() };
        let Some(_turn) = self.turn(Class::Urgent).await else { return Settled::Busy { after: BUSY } };
        #[derive(Deserialize)]
        struct List {
            metadata: api::ObjectMeta,
            items: Vec<<VmiView as Project>::Raw>,
        }
        let answer = match self.ask(at(&target).list(&ListParams::default().labels(selector))).await {
            Ok(answer) => answer,
            Err(e) => return failed(kind, e, false),
        };
        let list: List = match serde_json::from_str(&answer) {
            Ok(list) => list,
            Err(e) => return failed(kind, kube::Error::SerdeError(e), false),
        };
        let views: Vec<VmiView> = list.items.into_iter().map(VmiView::project).collect();
        let members = views.iter().map(set::Member::from).collect();
        let rv = ResourceVersion::parse(&list.metadata.resource_version);
        let instances = views.into_iter().map(|v| Object::Vmi(Arc::new(v))).collect();
        Settled::Applied(Some(Told { sight: set::Sight::All { members, rv }, instances }))
    }

    /// The whole VMI, for an instruction. `Err` says how the instruction settles.
    pub async fn vmi_bytes(&self, key: &state::Key, uid: &state::VmiUid) -> Result<bytes::Bytes, Settled<Object>> {
        let target = ObjectRef {
            kind: Kind::VirtualMachineInstance,
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            uid: uid.as_str().into(),
        };
        #[derive(Deserialize)]
        struct Seen {
            metadata: api::ObjectMeta,
        }
        let answer = self.ask(at(&target).get(&key.name, &GetParams::default())).await;
        let answer = answer.map_err(|e| failed(target.kind, e, false))?;
        let seen: Seen =
            serde_json::from_str(&answer).map_err(|e| failed(target.kind, kube::Error::SerdeError(e), false))?;
        if seen.metadata.uid != uid.as_str() {
            return Err(Settled::Gone);
        }
        Ok(answer.into())
    }
}

/// Requests about objects of this kind, in the namespace of this one.
fn at(target: &ObjectRef) -> Request {
    let namespace = Some(target.namespace.as_str()).filter(|n| !n.is_empty());
    Request::new(DynamicObject::url_path(&resource(target.kind), namespace))
}

/// Whether an object can have this name. What people write in a spec might be another path.
fn is_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._:".contains(&b);
    !["", ".", ".."].contains(&name) && name.bytes().all(plain)
}

fn applied<O: Answer>(target: &ObjectRef, answer: &str) -> Settled<O> {
    let object = O::read(target.kind, &mut serde_json::Deserializer::from_str(answer));
    if object.is_none() {
        tracing::warn!(%target, "the server's answer does not parse");
    }
    Settled::Applied(object)
}

fn unreadable<O>(target: &ObjectRef, error: &impl std::fmt::Display) -> Settled<O> {
    Settled::Refused(Refusal { code: 500, reason: "Unreadable".into(), message: format!("{target}: {error}") })
}

/// Classifies an error. `write`: whether it may have been done all the same.
fn failed<O>(kind: Kind, error: kube::Error, write: bool) -> Settled<O> {
    match error {
        kube::Error::Api(s) => match s.code {
            404 => Settled::Gone,
            409 => Settled::Conflict,
            410 => Settled::Unknown,
            429 | 503 => {
                let after = s.details.as_ref().map_or(0, |d| d.retry_after_seconds);
                Settled::Busy { after: if after > 0 { Millis::secs(u64::from(after)) } else { BUSY } }
            }
            code => {
                // A 422 quotes the object, which may hold secrets; a launcher pod is our own writing and holds none.
                let quotes = code == 422 && kind != Kind::Pod;
                let message = if quotes { invalid(kind, s.details.as_ref()) } else { s.message };
                let refusal = Refusal { code, reason: s.reason, message };
                // A server that failed may have done it all the same.
                if (400..=499).contains(&code) || !write { Settled::Refused(refusal) } else { Settled::Failed(refusal) }
            }
        },
        // The error may quote what it could not read.
        kube::Error::SerdeError(_) => {
            tracing::warn!(kind = kind.name(), write, "the API server's answer is no object");
            Settled::Unknown
        }
        other => {
            tracing::warn!(kind = kind.name(), error = %other, write, "no answer from the API server");
            Settled::Unknown
        }
    }
}

/// Which fields are invalid, without what stands in them.
fn invalid(kind: Kind, details: Option<&kube::core::response::StatusDetails>) -> String {
    let fields: Vec<&str> = details.iter().flat_map(|d| &d.causes).map(|c| c.field.as_str()).collect();
    if fields.is_empty() {
        format!("{} is invalid", kind.name())
    } else {
        format!("{} is invalid: {}", kind.name(), fields.join(", "))
    }
}
