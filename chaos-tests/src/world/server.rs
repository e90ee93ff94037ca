//! The API server as plain data: the functions of `embedded::semantics`, in the order in which the embedded server calls
//! them, on the embedded server's own store. There is one API server, not two; what is missing here is HTTP, admission and
//! whoever asks at the same time. A conformance test holds the two against each other.

use super::search::{self, Piece};
use bytes::Bytes;
use embedded::{
    kinds,
    semantics::{
        Moment, Resource, Status, patch,
        value::{meta, name, namespace},
        write::{self, DeleteOptions, Deletion, FieldValidation, Part},
    },
    storage::{Expect, Kv, Outcome, RangeQuery, Revision, StorageError, memory::Mvcc},
};
use serde_json::Value;
use state::{
    agent::VmiFacts,
    object::{Kind, Pattern},
    observe::{self, NodeView, Object, Project},
};
use std::{
    cell::{OnceCell, RefCell},
    collections::{BTreeMap, HashMap},
    fmt,
    rc::{Rc, Weak},
    sync::LazyLock,
};

/// Kinds that live in the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Res {
    /// VirtualMachine.
    Vm,
    /// VirtualMachineInstance.
    Vmi,
    /// VirtualMachineInstanceReplicaSet.
    Set,
    /// Pod.
    Pod,
    /// ControllerRevision.
    Revision,
    /// PersistentVolumeClaim.
    Claim,
    /// Node.
    Node,
    /// Lease.
    Lease,
    /// Instancetypes and preferences.
    Pattern(Pattern),
}

impl Res {
    /// All of them.
    pub const ALL: [Res; 12] = [
        Self::Vm,
        Self::Vmi,
        Self::Set,
        Self::Pod,
        Self::Revision,
        Self::Claim,
        Self::Node,
        Self::Lease,
        Self::Pattern(Pattern::Instancetype),
        Self::Pattern(Pattern::ClusterInstancetype),
        Self::Pattern(Pattern::Preference),
        Self::Pattern(Pattern::ClusterPreference),
    ];

    /// Group and plural.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Vm => ("kubevirt.io", "virtualmachines"),
            Self::Vmi => ("kubevirt.io", "virtualmachineinstances"),
            Self::Set => ("kubevirt.io", "virtualmachineinstancereplicasets"),
            Self::Pod => ("", "pods"),
            Self::Revision => ("apps", "controllerrevisions"),
            Self::Claim => ("", "persistentvolumeclaims"),
            Self::Node => ("", "nodes"),
            Self::Lease => ("coordination.k8s.io", "leases"),
            Self::Pattern(p) => (Pattern::GROUP, p.plural()),
        }
    }

    /// The machines' name of it.
    pub fn kind(self) -> Option<Kind> {
        match self {
            Self::Vm => Some(Kind::VirtualMachine),
            Self::Vmi => Some(Kind::VirtualMachineInstance),
            Self::Set => Some(Kind::VirtualMachineInstanceReplicaSet),
            Self::Pod => Some(Kind::Pod),
            Self::Revision => Some(Kind::ControllerRevision),
            Self::Claim => Some(Kind::PersistentVolumeClaim),
            Self::Node => Some(Kind::Node),
            Self::Lease => None,
            Self::Pattern(p) => Some(Kind::Pattern(p)),
        }
    }

    /// What the machines name so.
    pub fn of(kind: Kind) -> Self {
        match kind {
            Kind::VirtualMachine => Self::Vm,
            Kind::VirtualMachineInstance => Self::Vmi,
            Kind::VirtualMachineInstanceReplicaSet => Self::Set,
            Kind::Pod => Self::Pod,
            Kind::ControllerRevision => Self::Revision,
            Kind::PersistentVolumeClaim => Self::Claim,
            Kind::Node => Self::Node,
            Kind::Pattern(p) => Self::Pattern(p),
        }
    }

    /// Of what a key of the store is; `None` where it is of nothing that lives here.
    pub fn of_key(key: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|res| key.starts_with(&res.resource().prefix()))
    }

    /// What the pure functions know of it.
    pub fn resource(self) -> &'static Resource {
        static ALL: LazyLock<BTreeMap<Res, Resource>> = LazyLock::new(|| {
            let (mut all, shared) = kinds::builtin();
            all.extend(api::crd::all().iter().flat_map(|crd| kinds::crd::resources(crd, &shared)));
            let of = |res: Res| {
                let (group, plural) = res.names();
                all.iter().find(|r| {
                    ["v1", Pattern::VERSION].contains(&r.version.as_str())
                        && (r.group.as_str(), r.plural.as_str()) == (group, plural)
                })
            };
            Res::ALL.into_iter().filter_map(|res| Some((res, of(res)?.clone()))).collect()
        });
        // Every name above is one that the server serves: the map is complete.
        &ALL[&self]
    }
}

/// One version of an object, decoded at most once.
pub struct Seen {
    /// Kind.
    pub res: Res,
    /// Version.
    pub revision: u64,
    /// The object.
    pub value: Value,
    object: OnceCell<Option<Object>>,
    node: OnceCell<Option<NodeView>>,
    facts: OnceCell<Option<VmiFacts>>,
    pieces: OnceCell<Vec<Piece>>,
}

impl fmt::Debug for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Seen({})", self.revision)
    }
}

impl Seen {
    /// As the store has it; `None` where that is no object.
    pub fn read(res: Res, revision: Revision, stored: &[u8]) -> Option<Rc<Self>> {
        serde_json::from_slice(stored).ok().map(|value| Self::new(res, revision, value))
    }

    fn new(res: Res, revision: Revision, mut value: Value) -> Rc<Self> {
        meta(&mut value).insert("resourceVersion".into(), revision.to_string().into());
        let revision = u64::try_from(revision).unwrap_or(0);
        Rc::new(Self {
            res,
            revision,
            value,
            object: OnceCell::new(),
            node: OnceCell::new(),
            facts: OnceCell::new(),
            pieces: OnceCell::new(),
        })
    }

    /// The same object as if it were at another version.
    pub fn at(&self, revision: u64) -> Rc<Self> {
        Self::new(self.res, i64::try_from(revision).unwrap_or(0), self.value.clone())
    }

    /// Text at a JSON pointer.
    pub fn text(&self, pointer: &str) -> &str {
        embedded::semantics::value::text(&self.value, pointer)
    }

    /// UID.
    pub fn uid(&self) -> &str {
        self.text("/metadata/uid")
    }

    /// Name.
    pub fn name(&self) -> &str {
        name(&self.value)
    }

    /// Namespace.
    pub fn namespace(&self) -> &str {
        namespace(&self.value)
    }

    /// It is being deleted.
    pub fn deleting(&self) -> bool {
        embedded::semantics::value::deleting(&self.value)
    }

    /// What the Vm cells keep of it.
    pub fn object(&self) -> Option<&Object> {
        self.object.get_or_init(|| observe::object(self.res.kind()?, &self.value)).as_ref()
    }

    /// What the Node cells keep of it.
    pub fn node(&self) -> Option<&NodeView> {
        let read = || serde::Deserialize::deserialize(&self.value).ok().map(NodeView::project);
        self.node.get_or_init(read).as_ref()
    }

    /// What the Agent cells keep of it.
    pub fn facts(&self) -> Option<&VmiFacts> {
        self.facts.get_or_init(|| VmiFacts::read(&serde_json::to_vec(&self.value).ok()?)).as_ref()
    }

    /// As a search compares it.
    pub(super) fn pieces(&self) -> &[Piece] {
        self.pieces.get_or_init(|| search::pieces(&self.value.to_string()))
    }

    /// The controlling owner: kind, name, UID.
    pub fn owner(&self) -> Option<(&str, &str, &str)> {
        let owners = embedded::semantics::value::items(&self.value, "/metadata/ownerReferences");
        let of = |o: &'_ Value, key: &str| o.get(key).and_then(Value::as_str).unwrap_or_default().len();
        let o = owners.iter().find(|o| o.get("controller") == Some(&Value::Bool(true)) && of(o, "uid") > 0)?;
        let text = |key: &str| o.get(key).and_then(Value::as_str).unwrap_or_default();
        Some((text("kind"), text("name"), text("uid")))
    }
}

/// Something that was written.
#[derive(Debug, Clone)]
pub struct Commit {
    /// The object as it is now; of a removal as it was last, at the removal's version.
    pub now: Rc<Seen>,
    /// As it was before.
    pub before: Option<Rc<Seen>>,
    /// It is removed.
    pub gone: bool,
}

/// Where the wanted object comes from.
#[derive(Debug, Clone)]
pub enum Wanted {
    /// The whole object.
    Whole(Value),
    /// A patch.
    Patch(patch::Kind, Value),
}

/// Versions of objects that copies of a world have in common, by version and content: most of what one writes the others write,
/// too.
#[derive(Debug, Clone, Default)]
pub struct Pool(Rc<RefCell<Shared>>);

type Shared = HashMap<(Revision, Bytes), Weak<Seen>>;

impl Pool {
    /// So many before those are dropped that nobody has any more.
    const ROOM: usize = 1 << 16;

    fn share(&self, revision: Revision, stored: Bytes, make: impl FnOnce() -> Rc<Seen>) -> Rc<Seen> {
        let mut all = self.0.borrow_mut();
        if all.len() >= Self::ROOM && all.len().is_power_of_two() {
            all.retain(|_, seen| seen.strong_count() > 0);
        }
        let slot = all.entry((revision, stored)).or_default();
        slot.upgrade().unwrap_or_else(|| {
            let seen = make();
            *slot = Rc::downgrade(&seen);
            seen
        })
    }
}

/// The API server.
#[derive(Debug, Clone, Default)]
pub struct Server {
    /// What is written is shared with others.
    pub pool: Option<Pool>,
    store: Mvcc,
    decoded: BTreeMap<Revision, Rc<Seen>>,
    /// What was written since somebody looked last.
    pub commits: Vec<Commit>,
}

/// As it is kept: its version is that of the store.
fn stored(value: &mut Value) -> Result<Bytes, Status> {
    meta(value).remove("resourceVersion");
    serde_json::to_vec(value).map(Into::into).map_err(Status::internal)
}

fn storage_status(error: StorageError) -> Status {
    match error {
        StorageError::Compacted { .. } => Status::expired("too old resource version"),
        other => Status::internal(other),
    }
}

impl Server {
    /// The newest version.
    pub fn revision(&self) -> u64 {
        u64::try_from(self.store.revision()).unwrap_or(0)
    }

    /// A version of something, where it was looked at.
    pub(super) fn version(&self, revision: u64) -> Option<&Rc<Seen>> {
        self.decoded.get(&i64::try_from(revision).ok()?)
    }

    fn decode(&mut self, res: Res, kv: &Kv) -> Rc<Seen> {
        if let Some(seen) = self.decoded.get(&kv.revision) {
            return seen.clone();
        }
        let value = serde_json::from_slice(&kv.value).unwrap_or(Value::Null);
        let seen = Seen::new(res, kv.revision, value);
        self.decoded.insert(kv.revision, seen.clone());
        seen
    }

    /// A quorum read.
    pub fn get(&mut self, res: Res, ns: &str, n: &str) -> Option<Rc<Seen>> {
        let (kv, _) = self.store.get(&res.resource().key(ns, n), 0).ok()?;
        kv.map(|kv| self.decode(res, &kv))
    }

    fn find(&mut self, res: Res, ns: &str, n: &str) -> Result<Rc<Seen>, Status> {
        let r = res.resource();
        self.get(res, ns, n).ok_or_else(|| Status::not_found(&r.group, &r.plural, n))
    }

    /// A list at a version, 0 for the newest; and the version that it is of.
    ///
    /// # Errors
    /// 410 for a version that is forgotten.
    pub fn list(&mut self, res: Res, at: u64) -> Result<(Vec<Rc<Seen>>, u64), Status> {
        let revision = i64::try_from(at).unwrap_or(0);
        let query = RangeQuery { prefix: res.resource().prefix(), revision, ..RangeQuery::default() };
        let page = self.store.range(&query).map_err(storage_status)?;
        let items = page.items.iter().map(|kv| self.decode(res, kv)).collect();
        Ok((items, u64::try_from(page.revision).unwrap_or(0)))
    }

    /// Everything of a kind now.
    pub fn all(&mut self, res: Res) -> Vec<Rc<Seen>> {
        self.list(res, 0).map(|(items, _)| items).unwrap_or_default()
    }

    /// What changed after a version, in order, and the version up to which nothing is missing.
    ///
    /// # Errors
    /// 410 for a version that is forgotten.
    pub fn changes(&mut self, res: Res, after: u64, upto: u64) -> Result<(Vec<Commit>, u64), Status> {
        let after = i64::try_from(after).unwrap_or(0);
        let upto = i64::try_from(upto).unwrap_or(i64::MAX);
        let (changes, reached) =
            self.store.changes(&res.resource().prefix(), after, usize::MAX).map_err(storage_status)?;
        let commits = changes
            .into_iter()
            .filter(|c| c.revision <= upto)
            .filter_map(|c| {
                let before = c.previous.map(|kv| self.decode(res, &kv));
                let gone = c.value.is_none();
                let now = match c.value {
                    Some(value) => self.decode(res, &Kv { key: c.key, value, revision: c.revision }),
                    // The word of a removal: the object as it was last, at the version of the removal.
                    None => Seen::new(res, c.revision, before.as_ref()?.value.clone()),
                };
                Some(Commit { now, before, gone })
            })
            .collect();
        Ok((commits, u64::try_from(reached.min(upto)).unwrap_or(0)))
    }

    /// Forgets what was before a version.
    pub fn compact(&mut self, before: u64) {
        let revision = i64::try_from(before).unwrap_or(0);
        if self.store.compact(revision).is_ok() {
            let live: Vec<Revision> = Res::ALL
                .into_iter()
                .flat_map(|r| {
                    let query = RangeQuery { prefix: r.resource().prefix(), ..RangeQuery::default() };
                    self.store.range(&query).map(|p| p.items).unwrap_or_default()
                })
                .map(|kv| kv.revision)
                .collect();
            self.decoded.retain(|r, _| *r >= revision || live.contains(r));
        }
    }

    /// POST.
    ///
    /// # Errors
    /// As the API server's.
    pub fn create(&mut self, res: Res, ns: &str, object: Value, moment: &Moment) -> Result<Rc<Seen>, Status> {
        let r = res.resource();
        let shaped = write::shape(r, object, &[])?;
        write::strictness(FieldValidation::Warn, &shaped.strict).map_err(|e| write::cannot_be_handled(r, &e))?;
        let ns = if r.namespaced { ns } else { "" };
        let mut object = write::create(r, ns, "", shaped.object, moment)?;
        write::fill(r, &mut object);
        write::check(r, None, &object)?;
        let key = r.key(namespace(&object), name(&object));
        let bytes = stored(&mut object)?;
        match self.store.write(&key, Expect::Absent, Some(bytes.clone())) {
            Outcome::Done(revision) => {
                let now = self.seen(res, revision, Some(bytes), object);
                Ok(self.committed(now, None, false))
            }
            Outcome::Conflict(_) => Err(Status::already_exists(&r.group, &r.plural, name(&object))),
        }
    }

    /// PUT and PATCH, of the object or of its status.
    ///
    /// # Errors
    /// As the API server's.
    pub fn change(&mut self, res: Res, ns: &str, n: &str, part: Part, wanted: &Wanted) -> Result<Rc<Seen>, Status> {
        let r = res.resource();
        let old = self.find(res, ns, n)?;
        let (new, must) = match wanted {
            Wanted::Whole(object) => (write::shape(r, object.clone(), &[])?.object, r.custom),
            Wanted::Patch(kind, body) => {
                let bytes = serde_json::to_vec(body).map_err(Status::internal)?;
                (write::shape(r, patch::apply(*kind, r, &old.value, &bytes)?, &[])?.object, false)
            }
        };
        let mut new = write::update(r, part, &old.value, new, must)?;
        write::check(r, Some(&old.value), &new)?;
        if part == Part::Main {
            write::settle_generation(r, &old.value, &mut new);
        }
        self.store_over(&old, new)
    }

    /// Changes an object by a function of what is stored, as subresources do.
    ///
    /// # Errors
    /// What the function says; 404.
    pub fn change_by(
        &mut self,
        res: Res,
        ns: &str,
        n: &str,
        make: impl FnOnce(&Value) -> Result<Value, Status>,
    ) -> Result<Rc<Seen>, Status> {
        let old = self.find(res, ns, n)?;
        let new = make(&old.value)?;
        self.store_over(&old, new)
    }

    fn store_over(&mut self, old: &Rc<Seen>, new: Value) -> Result<Rc<Seen>, Status> {
        let r = old.res.resource();
        let goes = write::goes(r, &old.value, &new);
        if !goes && new == old.value {
            return Ok(old.clone());
        }
        self.put(old, new, goes)
    }

    fn put(&mut self, old: &Rc<Seen>, mut new: Value, goes: bool) -> Result<Rc<Seen>, Status> {
        let r = old.res.resource();
        let bytes = if goes { None } else { Some(stored(&mut new)?) };
        let key = r.key(old.namespace(), old.name());
        let at = Expect::At(i64::try_from(old.revision).unwrap_or(0));
        match self.store.write(&key, at, bytes.clone()) {
            Outcome::Done(revision) => {
                let now = self.seen(old.res, revision, bytes, new);
                Ok(self.committed(now, Some(old.clone()), goes))
            }
            Outcome::Conflict(_) => Err(Status::modified(&r.group, &r.plural, old.name())),
        }
    }

    fn seen(&self, res: Res, revision: Revision, stored: Option<Bytes>, value: Value) -> Rc<Seen> {
        match (&self.pool, stored) {
            (Some(pool), Some(stored)) => pool.share(revision, stored, || Seen::new(res, revision, value)),
            _ => Seen::new(res, revision, value),
        }
    }

    fn committed(&mut self, now: Rc<Seen>, before: Option<Rc<Seen>>, gone: bool) -> Rc<Seen> {
        if !gone {
            self.decoded.insert(i64::try_from(now.revision).unwrap_or(0), now.clone());
        }
        self.commits.push(Commit { now: now.clone(), before, gone });
        now
    }

    /// DELETE; whether it is gone.
    ///
    /// # Errors
    /// As the API server's.
    pub fn delete(
        &mut self,
        res: Res,
        ns: &str,
        n: &str,
        options: &DeleteOptions,
        moment: &Moment,
    ) -> Result<(Rc<Seen>, bool), Status> {
        let old = self.find(res, ns, n)?;
        match write::delete(res.resource(), &old.value, options, moment)? {
            Deletion::Pending(_) => Ok((old, false)),
            Deletion::Remove(object) => Ok((self.put(&old, object, true)?, true)),
            Deletion::Mark(object) => Ok((self.put(&old, object, false)?, false)),
        }
    }
}
