//! Who owns which fields of an object (`metadata.managedFields`), and server-side apply, which is decided by it.
//!
//! Whoever writes owns what his write has changed; whoever applies owns what he applies, also what others own with the same
//! value. To change what somebody else owns takes `force`. What nobody applies any more, and nobody else owns, goes.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde_json::{Value, json};

use super::fields::{Fields, field};
use super::schema::Schema;
use super::typed::{Difference, Place};
use super::value::{self, meta, name, namespace, text, uid};
use super::write::Part;
use super::{Resource, Status};

/// Entries of writers that are kept; older ones are put together.
const WRITERS_MAX: usize = 10;
/// The entry that older ones are put into.
const ANCIENT: &str = "ancient-changes";
/// Who owns what was there before anything was tracked.
const BEFORE: &str = "before-first-apply";
/// The manager to which objects of client-side apply are handed over.
const KUBECTL: &str = "kubectl";
/// Where client-side apply keeps what it applied last.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// Metadata that nobody owns.
const OWNERLESS: [&str; 9] = [
    "name",
    "namespace",
    "creationTimestamp",
    "selfLink",
    "uid",
    "clusterName",
    "generation",
    "managedFields",
    "resourceVersion",
];

/// One owner and what he owns.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    manager: String,
    applied: bool,
    version: String,
    subresource: String,
    time: Option<String>,
    fields: Fields,
}

/// Who writes now.
#[derive(Debug, Clone)]
pub struct Writer {
    /// Name of the manager.
    pub manager: String,
    /// The subresource that is written, "" for the object itself.
    pub subresource: String,
    /// Paths that such a write cannot change, as field names.
    pub reset: &'static [&'static [&'static str]],
    /// The time.
    pub now: String,
}

/// The paths that a write of a part of an object cannot change.
#[must_use]
pub fn reset(resource: &Resource, part: Part) -> &'static [&'static [&'static str]] {
    match part {
        Part::Main if resource.status => &[&["status"]],
        Part::Main => &[],
        Part::Status if resource.custom => &[&["metadata"], &["spec"]],
        Part::Status if resource.kind == "Pod" => {
            &[&["spec"], &["metadata", "deletionTimestamp"], &["metadata", "ownerReferences"]]
        }
        Part::Status => &[&["spec"]],
    }
}

/// The list of owners of an object as it is written.
#[must_use]
pub fn of(object: &Value) -> Option<&Value> {
    object.pointer("/metadata/managedFields")
}

/// Reads a list of owners; none when it is not understood.
fn decode(list: Option<&Value>) -> Option<Vec<Entry>> {
    list.and_then(Value::as_array)
        .into_iter()
        .flatten()
        .map(|e| {
            let operation = text(e, "/operation");
            let version = text(e, "/apiVersion");
            if !["Apply", "Update"].contains(&operation) || version.is_empty() || text(e, "/fieldsType") != "FieldsV1" {
                return None;
            }
            Some(Entry {
                manager: text(e, "/manager").into(),
                applied: operation == "Apply",
                version: version.into(),
                subresource: text(e, "/subresource").into(),
                time: e.get("time").and_then(Value::as_str).map(str::to_owned),
                fields: match e.get("fieldsV1") {
                    None | Some(Value::Null) => Fields::default(),
                    Some(f) => Fields::decode(f)?,
                },
            })
        })
        .collect()
}

/// Writes the owners into an object.
fn encode(object: &mut Value, mut owners: Vec<Entry>) {
    owners.retain(|e| !e.fields.is_empty());
    owners.sort_by(|a, b| {
        let seconds = |e: &Entry| e.time.as_deref().and_then(super::seconds).unwrap_or(0);
        (!a.applied, seconds(a), &a.manager, &a.version, &a.subresource).cmp(&(
            !b.applied,
            seconds(b),
            &b.manager,
            &b.version,
            &b.subresource,
        ))
    });
    let list: Vec<Value> = owners
        .iter()
        .map(|e| {
            let mut v = json!({
                "manager": e.manager, "operation": if e.applied { "Apply" } else { "Update" }, "apiVersion": e.version,
                "fieldsType": "FieldsV1", "fieldsV1": e.fields.encode(),
            });
            if let Some(time) = &e.time {
                v["time"] = time.clone().into();
            }
            if !e.subresource.is_empty() {
                v["subresource"] = e.subresource.clone().into();
            }
            v
        })
        .collect();
    value::put(meta(object), "managedFields", (!list.is_empty()).then(|| list.into()));
}

/// Takes the owners out of an object, so that they are compared with nothing.
fn bare(object: &Value) -> Value {
    let mut object = object.clone();
    meta(&mut object).remove("managedFields");
    object
}

/// Whether a client says that nobody shall own anything.
fn resets(sent: Option<&Value>) -> bool {
    match sent.and_then(Value::as_array).map(Vec::as_slice) {
        Some([]) => true,
        Some([one]) => one.as_object().is_some_and(serde_json::Map::is_empty),
        _ => false,
    }
}

fn strip(fields: &mut Fields) {
    let mut gone = Fields::default();
    for key in ["apiVersion", "kind", "metadata"] {
        gone.put(field(key), Fields::leaf());
    }
    let mut below = Fields::leaf();
    for key in OWNERLESS {
        below.put(field(key), Fields::leaf());
    }
    gone.below.insert(field("metadata"), below);
    fields.subtract(&gone);
}

impl Writer {
    fn filter(&self, fields: &mut Fields) {
        for path in self.reset {
            let elements: Vec<String> = path.iter().map(|p| field(p)).collect();
            fields.cut(&elements.iter().map(String::as_str).collect::<Vec<_>>());
        }
    }

    fn difference(&self, place: Place<'_>, old: &Value, new: &Value) -> Difference {
        let mut d = place.compare(Some(old), Some(new));
        for set in [&mut d.added, &mut d.modified, &mut d.removed] {
            set.cut(&["f:metadata", "f:managedFields"]);
            self.filter(set);
        }
        d
    }

    fn is(&self, entry: &Entry, applied: bool, version: &str) -> bool {
        entry.manager == self.manager
            && entry.applied == applied
            && entry.subresource == self.subresource
            && (applied || entry.version == version)
    }
}

/// The schema of a resource; where none is known, one that takes everything.
fn schema(resource: &Resource) -> &Schema {
    static UNKNOWN: LazyLock<Schema> = LazyLock::new(|| Schema {
        root: super::schema::Node { preserve: true, ..Default::default() },
        definitions: Default::default(),
    });
    resource.schema.as_deref().unwrap_or(&UNKNOWN)
}

/// Notes who has changed what with a write that is no apply. `live` is what was there (none: it is being created), `sent` the
/// owners that the client named, which count where he may change them.
pub fn track(resource: &Resource, live: Option<&Value>, sent: Option<&Value>, new: &mut Value, writer: &Writer) {
    let theirs = || decode(live.and_then(of)).unwrap_or_default();
    let owners = if !writer.subresource.is_empty() {
        theirs()
    } else if resets(sent) {
        Vec::new()
    } else {
        decode(sent).filter(|o| !o.is_empty()).unwrap_or_else(theirs)
    };
    meta(new).remove("managedFields");
    if owners.is_empty() && live.is_some() {
        return;
    }
    let owners = written(resource, live.unwrap_or(&resource.blank), new, owners, writer);
    encode(new, owners);
}

fn written(resource: &Resource, old: &Value, new: &Value, mut owners: Vec<Entry>, writer: &Writer) -> Vec<Entry> {
    let schema = schema(resource);
    let d = writer.difference(Place::root(schema), old, new);
    let mut mine = d.modified.union(&d.added);
    for e in &mut owners {
        e.fields.subtract(&mine);
        e.fields.subtract(&d.removed);
    }
    strip(&mut mine);
    if !mine.is_empty() {
        let version = resource.api_version();
        let time = Some(writer.now.clone());
        match owners.iter_mut().find(|e| writer.is(e, false, &version)) {
            Some(e) => {
                e.fields.add(&mine);
                e.time = time;
            }
            None => owners.push(Entry {
                manager: writer.manager.clone(),
                applied: false,
                version,
                subresource: writer.subresource.clone(),
                time,
                fields: mine,
            }),
        }
    }
    owners.retain(|e| !e.fields.is_empty());
    cap(&mut owners);
    owners
}

/// Puts the oldest entries of writers together while there are too many.
fn cap(owners: &mut Vec<Entry>) {
    let writers = owners.iter().filter(|e| !e.applied).count();
    let mut over = writers.saturating_sub(WRITERS_MAX);
    if over == 0 {
        return;
    }
    owners.sort_by_key(|e| (e.applied, e.time.as_deref().and_then(super::seconds).unwrap_or(0), e.manager.clone()));
    let mut kept: Vec<Entry> = Vec::new();
    let mut first = BTreeMap::<String, usize>::new();
    for e in std::mem::take(owners) {
        match first.get(&e.version).copied().and_then(|i| kept.get_mut(i)) {
            Some(bucket) if over > 0 && !e.applied => {
                bucket.manager = ANCIENT.into();
                bucket.subresource = String::new();
                bucket.fields.add(&e.fields);
                bucket.time = e.time;
                over -= 1;
            }
            _ => {
                if !e.applied {
                    first.entry(e.version.clone()).or_insert(kept.len());
                }
                kept.push(e);
            }
        }
    }
    *owners = kept;
}

/// Somebody else owns what would be changed.
struct Conflict {
    owner: Entry,
    fields: Fields,
}

impl Conflict {
    fn who(&self) -> String {
        let mut who = format!("{:?}", self.owner.manager);
        if !self.owner.subresource.is_empty() {
            who = format!("{who} with subresource {:?}", self.owner.subresource);
        }
        if self.owner.applied { who } else { format!("{who} using {}", self.owner.version) }
    }
}

fn refusal(conflicts: &[Conflict]) -> Status {
    let mut causes = Vec::new();
    let mut lines = Vec::new();
    for c in conflicts {
        let who = c.who();
        lines.push(format!("conflicts with {who}:"));
        for path in c.fields.paths() {
            causes.push(
                json!({"reason": "FieldManagerConflict", "message": format!("conflict with {who}"), "field": path}),
            );
            lines.push(format!("- {path}"));
        }
    }
    let message = match causes.as_slice() {
        [one] => format!("Apply failed with 1 conflict: {}: {}", text(one, "/message"), text(one, "/field")),
        many => format!("Apply failed with {} conflicts: {}", many.len(), lines.join("\n")),
    };
    Status { details: json!({ "causes": causes }), ..Status::new(409, "Conflict", message) }
}

/// The object with what somebody applies, and its owners. `live` is what is there (none: it is to be created).
///
/// # Errors
/// 400 for what is no such object, 409 when others own what would be changed, 500 (as kube-apiserver) for what does not fit the
/// schema.
pub fn apply(
    resource: &Resource,
    live: Option<&Value>,
    config: &Value,
    writer: &Writer,
    force: bool,
) -> Result<Value, Status> {
    if config.pointer("/metadata/managedFields").is_some_and(|m| !m.is_null()) {
        return Err(Status::bad_request("metadata.managedFields must be nil"));
    }
    let schema = schema(resource);
    let place = Place::root(schema);
    let mut problems = Vec::new();
    place.problems(config, "", &mut problems);
    if !problems.is_empty() {
        let why = match problems.as_slice() {
            [one] => one.clone(),
            many => format!("errors:\n  {}", many.join("\n  ")),
        };
        let (space, group) = (namespace(config), &resource.group);
        let who = format!("{space}/{}; {group}/{}, Kind={}", name(config), resource.version, resource.kind);
        return Err(Status::new(500, "", format!("failed to create typed patch object ({who}): {why}")));
    }
    let old = live.map_or_else(|| Value::clone(&resource.blank), bare);
    let mut owners = match live {
        Some(live) => decode(of(live)).ok_or_else(|| Status::new(500, "", "failed to decode managed fields"))?,
        None => Vec::new(),
    };
    if owners.is_empty() && live.is_some_and(|l| !uid(l).is_empty()) {
        let before = Writer { manager: BEFORE.into(), subresource: String::new(), ..writer.clone() };
        owners = written(resource, &resource.blank, &old, owners, &before);
    }
    let (mut new, owners) = match merged(resource, place, &old, config, owners.clone(), writer, force) {
        Ok(done) => done,
        Err(conflicts) => {
            let allowed = (writer.manager == KUBECTL).then(|| handed_over(resource, place, &old)).flatten();
            let rest: Vec<Conflict> = match allowed {
                None => conflicts,
                Some(allowed) => conflicts
                    .into_iter()
                    .map(|c| Conflict { fields: c.fields.without(&allowed), ..c })
                    .filter(|c| !c.fields.is_empty())
                    .collect(),
            };
            if !rest.is_empty() {
                return Err(refusal(&rest));
            }
            match merged(resource, place, &old, config, owners, writer, true) {
                Ok(done) => done,
                Err(conflicts) => return Err(refusal(&conflicts)),
            }
        }
    };
    let annotation = format!("/metadata/annotations/{}", LAST_APPLIED.replace('/', "~1"));
    if writer.manager == KUBECTL && !text(&new, &annotation).is_empty() {
        let mut last = config.clone();
        if let Some(Value::Object(map)) = last.pointer_mut("/metadata/annotations") {
            map.remove(LAST_APPLIED);
        }
        if let Some(slot) = new.pointer_mut(&annotation) {
            *slot = format!("{last}\n").into();
        }
    }
    encode(&mut new, owners);
    Ok(new)
}

fn merged(
    resource: &Resource,
    place: Place<'_>,
    old: &Value,
    config: &Value,
    mut owners: Vec<Entry>,
    writer: &Writer,
    force: bool,
) -> Result<(Value, Vec<Entry>), Vec<Conflict>> {
    let version = resource.api_version();
    let mut mine = place.fields(config);
    writer.filter(&mut mine);
    let before = owners.iter().position(|e| writer.is(e, true, &version)).map(|i| owners.remove(i));
    let mut new = place.merge(old, config);
    if let Some(last) = before.as_ref().map(|e| &e.fields) {
        let all = owners.iter().fold(mine.clone(), |all, e| all.union(&e.fields));
        new = pruned(place, &new, last, &all);
    }
    let d = writer.difference(place, old, &new);
    let changed = d.modified.clone().union(&d.added);
    let mut conflicts = Vec::new();
    for e in &mut owners {
        let both = e.fields.common(&changed);
        if !both.is_empty() {
            conflicts.push(Conflict { owner: e.clone(), fields: both });
        }
        e.fields.subtract(&changed);
        e.fields.subtract(&d.removed);
    }
    if !force && !conflicts.is_empty() {
        conflicts.sort_by_key(Conflict::who);
        return Err(conflicts);
    }
    strip(&mut mine);
    let time = if new == *old { before.and_then(|e| e.time) } else { Some(writer.now.clone()) };
    owners.push(Entry {
        manager: writer.manager.clone(),
        applied: true,
        version,
        subresource: writer.subresource.clone(),
        time,
        fields: mine,
    });
    Ok((new, owners))
}

/// Takes away what somebody applied last and does not apply now, unless others own it.
fn pruned(place: Place<'_>, merged: &Value, last: &Fields, owned: &Fields) -> Value {
    let last = place.with_named(last);
    let owned = place.with_named(owned);
    let all = place.with_named(&place.fields(merged));
    let without = place.remove(merged, &last);
    let left = place.with_named(&place.fields(&without));
    let without = place.remove(merged, &all.clone().without(&left.union(&owned)));
    let left = place.with_named(&place.fields(&without));
    place.remove(merged, &all.without(&left).common(&last))
}

/// What client-side apply has applied and what is still so: kubectl may take it over without a conflict.
fn handed_over(resource: &Resource, place: Place<'_>, live: &Value) -> Option<Fields> {
    let annotation = format!("/metadata/annotations/{}", LAST_APPLIED.replace('/', "~1"));
    let last: Value = serde_json::from_str(text(live, &annotation)).ok()?;
    if text(&last, "/apiVersion") != resource.api_version() {
        return None;
    }
    let d = place.compare(Some(&last), Some(live));
    Some(place.fields(&last).without(&d.modified).without(&d.added).without(&d.removed))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn maps() -> Resource {
        crate::kinds::builtin().0.into_iter().find(|r| r.plural == "configmaps").unwrap()
    }

    fn by(manager: &str, second: u32) -> Writer {
        Writer {
            manager: manager.into(),
            subresource: String::new(),
            reset: &[],
            now: format!("2026-01-01T00:00:{second:02}Z"),
        }
    }

    fn written(r: &Resource, live: Option<&Value>, new: Value, writer: &Writer) -> Value {
        let mut new = new;
        new["metadata"]["uid"] = "1".into();
        let sent = of(&new).cloned();
        track(r, live, sent.as_ref(), &mut new, writer);
        new
    }

    fn owned(object: &Value, manager: &str) -> Value {
        let entry = value::items(object, "/metadata/managedFields").iter().find(|e| text(e, "/manager") == manager);
        entry.map(|e| e["fieldsV1"].clone()).unwrap_or_default()
    }

    #[test]
    fn what_somebody_else_owns_takes_force_and_what_nobody_applies_goes() {
        let r = maps();
        let config = |data: Value| json!({"metadata": {"name": "a"}, "data": data});
        let one = apply(&r, None, &config(json!({"x": "1", "y": "2"})), &by("one", 1), false).unwrap();
        assert_eq!(owned(&one, "one"), json!({"f:data": {"f:x": {}, "f:y": {}}}));
        let refused = apply(&r, Some(&one), &config(json!({"x": "2"})), &by("two", 2), false).unwrap_err();
        assert_eq!((refused.code, refused.details["causes"][0]["field"].as_str()), (409, Some(".data.x")));
        let two = apply(&r, Some(&one), &config(json!({"x": "2", "y": "2"})), &by("two", 3), true).unwrap();
        assert_eq!((owned(&two, "one"), two["data"]["x"].as_str()), (json!({"f:data": {"f:y": {}}}), Some("2")));
        // Both own y: it stays until neither applies it.
        let three = apply(&r, Some(&two), &config(json!({})), &by("one", 4), false).unwrap();
        assert_eq!(three["data"], json!({"x": "2", "y": "2"}));
        let four = apply(&r, Some(&three), &config(json!({"x": "2"})), &by("two", 5), false).unwrap();
        assert_eq!(four["data"], json!({"x": "2"}));
    }

    #[test]
    fn writers_own_what_they_change_and_the_oldest_are_put_together() {
        let r = maps();
        let mut live = written(&r, None, json!({"metadata": {}, "data": {"k0": "v"}}), &by("w0", 0));
        assert_eq!(owned(&live, "w0"), json!({"f:data": {".": {}, "f:k0": {}}}));
        for n in 1..15 {
            let mut next = live.clone();
            next["data"][format!("k{n}")] = "v".into();
            live = written(&r, Some(&live), next, &by(&format!("w{n}"), n));
        }
        let entries = value::items(&live, "/metadata/managedFields").len();
        assert_eq!((entries, owned(&live, "w14")), (WRITERS_MAX, json!({"f:data": {"f:k14": {}}})));
        assert!(owned(&live, ANCIENT)["f:data"].as_object().unwrap().len() >= 5, "{live}");
        // Nothing changes: nobody writes.
        assert_eq!(written(&r, Some(&live), live.clone(), &by("w15", 20)), live);
        // An empty list gives up all ownership; the next apply finds what was there before.
        let mut reset = live.clone();
        reset["metadata"]["managedFields"] = json!([]);
        let reset = written(&r, Some(&live), reset, &by("w", 21));
        assert_eq!(of(&reset), None);
        let applied = apply(&r, Some(&reset), &json!({"data": {"k0": "v"}}), &by("one", 22), false).unwrap();
        assert!(owned(&applied, BEFORE)["f:data"]["f:k3"].is_object(), "{applied}");
    }

    #[test]
    fn kubectl_takes_over_what_it_applied_from_the_client() {
        let r = maps();
        let last = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"x": "1"}});
        let made = json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"x": "1", "other": "1"},
            "metadata": {"name": "a", "annotations": {LAST_APPLIED: last.to_string()}}});
        let live = written(&r, None, made, &by("kubectl-client-side-apply", 1));
        let config =
            |data: Value| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": data});
        assert_eq!(apply(&r, Some(&live), &config(json!({"x": "2"})), &by("someone", 2), false).unwrap_err().code, 409);
        let taken = apply(&r, Some(&live), &config(json!({"x": "2"})), &by(KUBECTL, 2), false).unwrap();
        assert_eq!(taken["data"]["x"], "2");
        assert!(taken["metadata"]["annotations"][LAST_APPLIED].as_str().unwrap().contains(r#""x":"2""#));
        let both = config(json!({"x": "2", "other": "2"}));
        assert_eq!(apply(&r, Some(&taken), &both, &by(KUBECTL, 3), false).unwrap_err().code, 409);
    }
}
