//! WATCH: from a revision on, every change that concerns the selector, as lines of JSON.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use http::{HeaderValue, header};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use super::hub::{Event, Taken};
use super::request::Call;
use super::respond::{self, Form};
use super::{Inner, Response, convert, read, storage_status, table};
use crate::semantics::selector::Selector;
use crate::semantics::{Resource, Status};
use crate::storage::{Revision, StorageError, StorageResult, WatchItem};

/// How often a quiet watch says how far it is.
const BOOKMARK_EVERY: Duration = Duration::from_secs(50);
/// How long a watch lasts when nothing is asked for: up to twice this.
const DURATION_SECONDS: u64 = 1800;
/// The annotation of the bookmark that ends the initial events.
const INITIAL_END: &str = "k8s.io/initial-events-end";

struct Seat {
    inner: Arc<Inner>,
    resource: Arc<Resource>,
    prefix: String,
    selector: Selector,
    form: Form,
    include: String,
    bookmarks: bool,
    signal: watch::Receiver<Revision>,
    /// Everything up to here has been sent.
    after: Revision,
    /// The last revision that the client was told.
    told: Revision,
    queue: VecDeque<Bytes>,
    /// The store's own history, when the ring does not reach back far enough.
    history: Option<BoxStream<'static, StorageResult<WatchItem>>>,
    end: Instant,
    next_bookmark: Instant,
    over: bool,
    /// The columns of a table were sent.
    headed: std::sync::atomic::AtomicBool,
}

fn line(kind: &str, object: &Value) -> Bytes {
    let mut out = Vec::with_capacity(1024);
    out.extend_from_slice(b"{\"type\":\"");
    out.extend_from_slice(kind.as_bytes());
    out.extend_from_slice(b"\",\"object\":");
    let _ = serde_json::to_writer(&mut out, object);
    out.extend_from_slice(b"}\n");
    out.into()
}

impl Seat {
    fn dress(&self, object: Value) -> Value {
        let object = convert::present(&self.resource, object);
        match self.form {
            Form::Full => object,
            Form::Metadata => respond::metadata_only(object),
            Form::Table => {
                let version = crate::semantics::value::resource_version(&object).to_owned();
                let mut table =
                    table::table(&self.resource, vec![object], &self.include, json!({"resourceVersion": version}));
                if self.headed.swap(true, std::sync::atomic::Ordering::Relaxed) {
                    table["columnDefinitions"] = Value::Null;
                }
                table
            }
        }
    }

    /// The line of a change, if it concerns this watch.
    fn render(&self, event: &Event) -> Option<Bytes> {
        if !event.key.starts_with(&self.prefix) {
            return None;
        }
        let grouped = self.resource.kind == "Event" && !convert::is_stored_form(&self.resource);
        let matches = |o: &Arc<Value>| {
            if self.selector.is_empty() {
                true
            } else if grouped {
                self.selector.matches(&convert::present(&self.resource, Value::clone(o)), &self.resource)
            } else {
                self.selector.matches(o, &self.resource)
            }
        };
        let now = event.now.as_ref().filter(|o| matches(o));
        let before = match (now.is_some(), self.selector.is_empty()) {
            // Whether there was one decides ADDED or MODIFIED; what it was matters only for selectors and deletions.
            (true, true) => None,
            _ => event.before().filter(|o| matches(o)),
        };
        let existed = if self.selector.is_empty() { event.had_previous() } else { before.is_some() };
        let (index, kind, object) = match (now, existed) {
            (Some(o), false) => (0, "ADDED", o.clone()),
            (Some(o), true) => (1, "MODIFIED", o.clone()),
            (None, true) => {
                let mut last = Value::clone(before?);
                if event.now.is_some() {
                    // It left the selection; the client is told at which revision.
                    crate::semantics::value::meta(&mut last)
                        .insert("resourceVersion".into(), event.revision.to_string().into());
                }
                (2, "DELETED", Arc::new(last))
            }
            (None, false) => return None,
        };
        let shared = self.form == Form::Full && convert::is_stored_form(&self.resource);
        if shared && (index < 2 || event.now.is_none()) {
            let cached = event.lines.get(index)?;
            return Some(cached.get_or_init(|| line(kind, &object)).clone());
        }
        Some(line(kind, &self.dress(Value::clone(&object))))
    }

    fn bookmark(&mut self, initial_end: bool) -> Bytes {
        self.told = self.after;
        self.next_bookmark = Instant::now() + BOOKMARK_EVERY;
        let mut metadata = json!({"resourceVersion": self.after.to_string(), "creationTimestamp": null});
        if initial_end {
            metadata["annotations"] = json!({INITIAL_END: "true"});
        }
        let object = match self.form {
            Form::Full => json!({
                "kind": self.resource.kind, "apiVersion": self.resource.api_version(), "metadata": metadata,
            }),
            Form::Metadata => json!({
                "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata,
            }),
            Form::Table => json!({
                "kind": "Table", "apiVersion": "meta.k8s.io/v1", "columnDefinitions": null, "rows": [],
                "metadata": metadata,
            }),
        };
        line("BOOKMARK", &object)
    }

    fn absorb(&mut self, events: &[Arc<Event>], upto: Revision) {
        for event in events {
            if let Some(line) = self.render(event) {
                self.queue.push_back(line);
                self.told = event.revision;
            }
        }
        self.after = upto;
    }

    fn fail(&mut self, status: &Status) -> Bytes {
        self.over = true;
        line("ERROR", &status.to_value())
    }

    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(line) = self.queue.pop_front() {
                return Some(line);
            }
            if self.over || self.inner.stop.is_cancelled() {
                return None;
            }
            self.signal.mark_unchanged();
            if self.history.is_none() {
                match self.inner.hub.take(&self.resource.prefix(), self.after) {
                    Taken::Events(events, upto) => {
                        self.absorb(&events, upto);
                        if !self.queue.is_empty() {
                            continue;
                        }
                    }
                    Taken::TooOld => {
                        self.history = Some(self.inner.storage.watch(&self.prefix, self.after));
                    }
                }
            }
            if Instant::now() >= self.end {
                return None;
            }
            if self.bookmarks && Instant::now() >= self.next_bookmark {
                if self.after > self.told {
                    return Some(self.bookmark(false));
                }
                self.next_bookmark = Instant::now() + BOOKMARK_EVERY;
            }
            let wake = if self.bookmarks { self.next_bookmark.min(self.end) } else { self.end };
            if let Some(history) = &mut self.history {
                let item = tokio::select! {
                    item = history.next() => Some(item),
                    () = tokio::time::sleep_until(wake) => None,
                };
                match item {
                    Some(Some(Ok(WatchItem::Changes(changes)))) => {
                        let events: Vec<Arc<Event>> = changes.into_iter().map(|c| Arc::new(Event::of(c))).collect();
                        let upto = events.last().map_or(self.after, |e| e.revision);
                        self.absorb(&events, upto);
                        continue;
                    }
                    Some(Some(Ok(WatchItem::Progress(upto)))) => {
                        self.after = upto;
                        continue;
                    }
                    Some(Some(Err(StorageError::Compacted { .. }))) => {
                        let why = format!("too old resource version: {} ({})", self.after, self.inner.hub.head());
                        return Some(self.fail(&Status::expired(why)));
                    }
                    Some(Some(Err(_)) | None) => return None,
                    None => {}
                }
            } else {
                tokio::select! {
                    changed = self.signal.changed() => {
                        if changed.is_err() {
                            return None;
                        }
                        continue;
                    }
                    () = self.inner.stop.cancelled() => return None,
                    () = tokio::time::sleep_until(wake) => {}
                }
            }
        }
    }
}

impl Inner {
    pub(super) async fn watch(self: &Arc<Self>, resource: &Arc<Resource>, call: &Call) -> Result<Response, Status> {
        let form = respond::form(&call.headers)?;
        let q = &call.query;
        let mut selector = Selector::parse(q.text("labelSelector"), q.text("fieldSelector"), resource)?;
        if !call.target.name.is_empty() {
            selector =
                Selector::parse(q.text("labelSelector"), &format!("metadata.name={}", call.target.name), resource)?;
        }
        read::check_options(q, true)?;
        let asked = read::revision(q.text("resourceVersion"))?;
        let seconds = match q.number("timeoutSeconds")? {
            Some(n) if n > 0 => u64::try_from(n).unwrap_or(DURATION_SECONDS),
            _ => DURATION_SECONDS + u64::from(uuid::Uuid::new_v4().as_bytes()[0]) * DURATION_SECONDS / 256,
        };
        let streaming = q.flag("sendInitialEvents");
        let initial = streaming || (asked == 0 && q.get("sendInitialEvents").is_none());
        let prefix = resource.prefix_in(&call.target.namespace);
        let mut seat = Seat {
            signal: self.hub.subscribe(&resource.prefix()),
            inner: self.clone(),
            resource: resource.clone(),
            form,
            include: q.text("includeObject").to_owned(),
            bookmarks: q.flag("allowWatchBookmarks"),
            after: asked,
            told: asked,
            queue: VecDeque::new(),
            history: None,
            end: Instant::now() + Duration::from_secs(seconds),
            next_bookmark: Instant::now() + BOOKMARK_EVERY,
            over: false,
            headed: std::sync::atomic::AtomicBool::new(false),
            prefix,
            selector,
        };
        if initial {
            let listing = self.collect(resource, &call.target.namespace, &seat.selector, 0, None, 0).await?;
            if asked > listing.revision {
                return Err(super::too_large(asked, listing.revision));
            }
            for object in listing.objects {
                let object = match form {
                    Form::Full => object,
                    _ => seat.dress(object),
                };
                seat.queue.push_back(line("ADDED", &object));
            }
            seat.after = listing.revision;
            seat.told = listing.revision;
            if streaming && seat.bookmarks {
                let end = seat.bookmark(true);
                seat.queue.push_back(end);
            }
        } else if asked == 0 {
            seat.after = self.storage.revision().await.map_err(storage_status)?;
            seat.told = seat.after;
        } else if asked > self.hub.head() {
            let newest = self.storage.revision().await.map_err(storage_status)?;
            if asked > newest {
                return Err(super::too_large(asked, newest));
            }
        } else if matches!(self.hub.take(&resource.prefix(), asked), Taken::TooOld) {
            // A snapshot of nothing tells whether the history still reaches back that far.
            if let Err(StorageError::Compacted { .. }) = self.storage.get(&seat.prefix, asked).await {
                let gone = Status::expired(format!("too old resource version: {asked} ({})", self.hub.head()));
                let last = seat.fail(&gone);
                seat.queue.push_back(last);
            }
        }
        let stream = futures::stream::unfold(seat, |mut seat| async move {
            let line = seat.next().await?;
            Some((Ok::<_, std::convert::Infallible>(line), seat))
        });
        let mut response = http::Response::new(Body::from_stream(stream));
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Ok(response)
    }
}
