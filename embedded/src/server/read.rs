//! GET and LIST.

use std::collections::VecDeque;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};

use super::request::{Call, Query};
use super::respond::{self, Form};
use super::{Inner, Response, convert, storage_status, table};
use crate::semantics::selector::Selector;
use crate::semantics::value::resource_version;
use crate::semantics::{FieldError, Resource, Status};
use crate::storage::{Kv, RangeQuery, Revision, StorageError};

/// Items that are read from the store at once when a list is filtered.
const PAGE_ITEMS: usize = 500;

/// The rules of `resourceVersion`, `resourceVersionMatch`, `sendInitialEvents` and `continue` with each other.
pub(super) fn check_options(q: &Query, watch: bool) -> Result<(), Status> {
    let (wanted, version) = (q.text("resourceVersionMatch"), q.text("resourceVersion"));
    let initial = q.get("sendInitialEvents").is_some();
    let mut errors = Vec::new();
    let mut forbid = |field: &str, why: &str| errors.push(FieldError::forbidden(field, why));
    let of = "resourceVersionMatch";
    if watch && initial && wanted != "NotOlderThan" {
        forbid(of, "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan");
    }
    if watch && !initial && !wanted.is_empty() {
        forbid(of, "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided");
    }
    if !watch && !wanted.is_empty() && version.is_empty() {
        forbid(of, "resourceVersionMatch is forbidden unless resourceVersion is provided");
    }
    if !wanted.is_empty() && !q.text("continue").is_empty() {
        forbid(of, "resourceVersionMatch is forbidden when continue is provided");
    }
    if !watch && wanted == "Exact" && version == "0" {
        forbid(of, "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"");
    }
    if !watch && initial {
        forbid("sendInitialEvents", "sendInitialEvents is forbidden for list");
    }
    let known: &[&str] = if watch { &["NotOlderThan"] } else { &["Exact", "NotOlderThan", ""] };
    if !wanted.is_empty() && !known.contains(&wanted) {
        let known: Vec<String> = known.iter().map(|k| (*k).to_owned()).collect();
        errors.push(FieldError::unsupported(of, &wanted.into(), &known));
    }
    if errors.is_empty() { Ok(()) } else { Err(Status::invalid("meta.k8s.io", "ListOptions", "", &errors)) }
}

/// What a list is to contain.
#[derive(Debug, Default)]
pub(super) struct Listing {
    pub objects: Vec<Value>,
    pub revision: Revision,
    pub next: String,
    pub remaining: Option<usize>,
}

/// Reads a resourceVersion.
pub(super) fn revision(text: &str) -> Result<Revision, Status> {
    match text {
        "" => Ok(0),
        t => t.parse::<Revision>().ok().filter(|r| *r >= 0).ok_or_else(|| {
            let why = format!("strconv.ParseUint: parsing {t:?}: invalid syntax");
            Status::new(500, "", FieldError::invalid("resourceVersion", &t.into(), &why).message())
        }),
    }
}

fn token(revision: Revision, after: &str) -> String {
    URL_SAFE_NO_PAD.encode(json!({"v": "meta.k8s.io/v1", "rv": revision, "start": after}).to_string())
}

fn read_token(text: &str) -> Result<(Revision, String), Status> {
    let wrong = || Status::bad_request("invalid continue token: continue key is not valid");
    let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| wrong())?;
    let v: Value = serde_json::from_slice(&bytes).map_err(|_| wrong())?;
    let revision = v.get("rv").and_then(Value::as_i64).filter(|r| *r > 0).ok_or_else(wrong)?;
    let start = v.get("start").and_then(Value::as_str).ok_or_else(wrong)?;
    Ok((revision, start.to_owned()))
}

impl Inner {
    /// Reads one object, quorum.
    pub(super) async fn find(&self, resource: &Resource, namespace: &str, name: &str) -> Result<Kv, Status> {
        let key = resource.key(namespace, name);
        let (kv, _) = self.storage.get(&key, 0).await.map_err(storage_status)?;
        kv.ok_or_else(|| Status::not_found(&resource.group, &resource.plural, name))
    }

    pub(super) async fn get(&self, resource: &Resource, call: &Call) -> Result<Response, Status> {
        let form = respond::form(&call.headers)?;
        respond::check_include(form, call.query.text("includeObject"))?;
        self.not_in_the_future(revision(call.query.text("resourceVersion"))?).await?;
        let kv = self.find(resource, &call.target.namespace, &call.target.name).await?;
        let object = convert::read(resource, &kv.value, kv.revision)?;
        Ok(self.show(resource, call, form, object, 200))
    }

    /// One object in the form that the client wants.
    pub(super) fn show(&self, resource: &Resource, call: &Call, form: Form, object: Value, code: u16) -> Response {
        match form {
            Form::Full => respond::json(code, &object),
            Form::Metadata => respond::json(code, &respond::metadata_only(object)),
            Form::Table => {
                let version = resource_version(&object).to_owned();
                let include = call.query.text("includeObject");
                respond::json(code, &table::table(resource, vec![object], include, json!({"resourceVersion": version})))
            }
        }
    }

    /// A revision that has not happened here yet is refused, after the store was asked.
    async fn not_in_the_future(&self, wanted: Revision) -> Result<(), Status> {
        if wanted > self.hub.head() {
            let newest = self.storage.revision().await.map_err(storage_status)?;
            if wanted > newest {
                return Err(super::too_large(wanted, newest));
            }
        }
        Ok(())
    }

    /// Reads what a selector leaves of a resource.
    pub(super) async fn collect(
        &self,
        resource: &Resource,
        namespace: &str,
        selector: &Selector,
        at: Revision,
        after: Option<String>,
        limit: usize,
    ) -> Result<Listing, Status> {
        let prefix = resource.prefix_in(namespace);
        let mut listing = Listing { revision: at, ..Listing::default() };
        if let Some(name) = selector.single_name()
            && (!resource.namespaced || !namespace.is_empty())
        {
            // One key at most.
            let key = resource.key(namespace, name);
            let (kv, newest) = self.storage.get(&key, at).await.map_err(storage_status)?;
            listing.revision = if at == 0 { newest } else { at };
            if let Some(kv) = kv {
                let object = convert::read(resource, &kv.value, kv.revision)?;
                if selector.matches(&object, resource) {
                    listing.objects.push(object);
                }
            }
            return Ok(listing);
        }
        let mut after = after;
        loop {
            let chunk = match (limit, selector.is_empty()) {
                (0, _) => 0,
                (n, true) => n,
                (n, false) => n.max(PAGE_ITEMS),
            };
            let query =
                RangeQuery { prefix: prefix.clone(), after: after.take(), limit: chunk, revision: listing.revision };
            let page = self.storage.range(query).await.map_err(|e| self.continue_status(e, at))?;
            listing.revision = page.revision;
            let total = page.count;
            let mut seen = 0;
            let mut items: VecDeque<Kv> = page.items.into();
            while let Some(kv) = items.pop_front() {
                seen += 1;
                let object = convert::read(resource, &kv.value, kv.revision)?;
                if selector.is_empty() || selector.matches(&object, resource) {
                    listing.objects.push(object);
                }
                let last = kv.key;
                if limit > 0 && listing.objects.len() >= limit && (page.more || !items.is_empty()) {
                    listing.next = token(listing.revision, &last);
                    listing.remaining = selector.is_empty().then(|| total.saturating_sub(seen));
                    return Ok(listing);
                }
                if items.is_empty() {
                    after = Some(last);
                }
            }
            if !page.more || after.is_none() {
                return Ok(listing);
            }
        }
    }

    fn continue_status(&self, error: StorageError, at: Revision) -> Status {
        match error {
            StorageError::Compacted { .. } if at > 0 => Status::expired(
                "The provided continue parameter is too old to display a consistent list result. You can start a new list without the continue parameter.",
            ),
            other => storage_status(other),
        }
    }

    pub(super) async fn list(self: &Arc<Self>, resource: &Resource, call: &Call) -> Result<Response, Status> {
        let form = respond::form(&call.headers)?;
        respond::check_include(form, call.query.text("includeObject"))?;
        let q = &call.query;
        let selector = Selector::parse(q.text("labelSelector"), q.text("fieldSelector"), resource)?;
        let limit = usize::try_from(q.number("limit")?.unwrap_or(0)).unwrap_or(0);
        check_options(q, false)?;
        let asked = revision(q.text("resourceVersion"))
            .map_err(|s| Status::bad_request(format!("invalid resource version: {}", s.message)))?;
        let (mut at, mut after) = (0, None);
        match (q.text("continue"), q.text("resourceVersionMatch")) {
            // A number without a match means "not older", but a first chunk at a number is exact.
            ("", "Exact") => at = asked,
            ("", "") if limit > 0 => at = asked,
            ("", _) => {}
            (continued, _) => {
                if asked > 0 {
                    return Err(Status::bad_request("specifying resource version is not allowed when using continue"));
                }
                let (revision, start) = read_token(continued)?;
                if !start.starts_with(&resource.prefix()) {
                    return Err(Status::bad_request("continue key is not valid"));
                }
                at = revision;
                after = Some(start);
            }
        }
        self.not_in_the_future(asked).await?;
        let listing = self.collect(resource, &call.target.namespace, &selector, at, after, limit).await?;
        let mut metadata = json!({"resourceVersion": listing.revision.to_string()});
        if !listing.next.is_empty() {
            metadata["continue"] = listing.next.into();
            if let Some(n) = listing.remaining {
                metadata["remainingItemCount"] = n.into();
            }
        }
        Ok(match form {
            Form::Table => {
                respond::json(200, &table::table(resource, listing.objects, q.text("includeObject"), metadata))
            }
            Form::Metadata => respond::json(
                200,
                &json!({
                    "kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": metadata,
                    "items": listing.objects.into_iter().map(respond::metadata_only).collect::<Vec<_>>(),
                }),
            ),
            Form::Full => respond::json(200, &respond::list(resource, metadata, listing.objects)),
        })
    }
}
