//! The page that `virtfold up` shows on the loopback interface: machines, why they are as they are, nodes and consoles.
//!
//! It reads, and types into consoles; it changes nothing else. Who may see it holds the token that `up` prints and writes into a
//! file of root's; the token is exchanged for a cookie once. Three things keep others out who share the machine or the browser: requests must name the
//! loopback address (a name that somebody else makes resolve to it does not help), the cookie goes with no request that another site
//! causes, and a console opens for this page's own origin alone. Cookies do not know ports: whoever serves another port of the same
//! address to the same browser is trusted with it.
//!
//! Everything is made here, on the server; the script puts what is new in place and types. Nothing is loaded from elsewhere.

mod charts;
mod look;
mod traces;
mod views;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::extract::{Path, Query, State};
use axum::middleware::Next;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures::{SinkExt, StreamExt, stream};
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use kube::Client;
use maud::{Markup, html};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_tungstenite::tungstenite;
use tokio_util::sync::CancellationToken;

use crate::machines::{self, Machine, tone};
use crate::user::stream as upstream;
use look::{Look, MachineSeen, Watching};
use views::{Explained, Why};

/// Windows that are live, and consoles, at a time.
const OPEN: usize = 64;
/// What belongs together comes together.
const SOON: Duration = Duration::from_millis(100);
/// What changes by the mere passing of time is shown again after this.
const TIME: Duration = Duration::from_secs(2);
/// An explanation is asked for again after this, or when its machine has changed.
const EXPLAINED: Duration = Duration::from_secs(5);
/// An explanation is not waited for longer.
const PATIENCE: Duration = Duration::from_secs(20);
/// The largest message that is typed.
const TYPED: usize = 64 << 10;

/// What the page needs.
pub struct Config {
    /// Where it is served: a socket on the loopback interface.
    pub listener: TcpListener,
    /// The cluster, with the rights that whoever sees the page has.
    pub client: Client,
    /// Tells the cookies of several clusters apart, which have one host.
    pub name: String,
    /// Where Jaeger shows traces.
    pub traces: Option<String>,
    /// Ends it.
    pub stop: CancellationToken,
}

/// Where the page is, and the way in. It prints itself nowhere but where it is asked to.
#[derive(Clone)]
pub struct Door {
    address: SocketAddr,
    token: String,
}

impl Door {
    /// The address to open, with the token.
    pub fn url(&self) -> String {
        format!("http://{}/?token={}", self.address, self.token)
    }
}

struct Page {
    look: Look,
    client: Client,
    address: SocketAddr,
    token: [u8; 32],
    cookie: String,
    session: String,
    traces: Option<String>,
    open: Arc<Semaphore>,
    stop: CancellationToken,
}

fn random() -> String {
    format!("{}{}", uuid::Uuid::new_v4().simple(), uuid::Uuid::new_v4().simple())
}

/// Of equal length and compared as a whole: how much of a guess was right cannot be measured.
fn digest(text: &str) -> [u8; 32] {
    Sha256::digest(text).into()
}

/// Serves the page until it is stopped; the way in, and what serves.
pub fn serve(config: Config) -> anyhow::Result<(Door, impl Future<Output = ()> + Send)> {
    let address = config.listener.local_addr()?;
    anyhow::ensure!(address.ip().is_loopback(), "the page is for this machine alone: {address} is no loopback address");
    let door = Door { address, token: random() };
    let page = Arc::new(Page {
        look: Look::new(config.client.clone()),
        client: config.client,
        address,
        token: digest(&door.token),
        cookie: format!("virtfold-{}", config.name),
        session: random(),
        traces: config.traces,
        open: Arc::new(Semaphore::new(OPEN)),
        stop: config.stop.clone(),
    });
    let look = page.look.clone();
    let router = router(page);
    let serving = async move {
        let server = axum::serve(config.listener, router).with_graceful_shutdown(config.stop.clone().cancelled_owned());
        let (served, ()) = tokio::join!(server, look.forget(config.stop));
        if let Err(error) = served {
            tracing::error!(%error, "the page is not served any more");
        }
    };
    Ok((door, serving))
}

fn router(page: Arc<Page>) -> axum::Router {
    axum::Router::new()
        .route("/", get(shown))
        .route("/nodes", get(shown))
        .route("/machines/{namespace}/{name}", get(shown))
        .route("/machines/{namespace}/{name}/console", get(shown))
        .route("/machines/{namespace}/{name}/console/stream", get(console))
        .route("/events", get(events))
        .route("/style.css", get(|| async { asset("text/css; charset=utf-8", include_str!("style.css")) }))
        .route("/script.js", get(|| async { asset("text/javascript; charset=utf-8", include_str!("script.js")) }))
        .route("/icon.svg", get(|| async { asset("image/svg+xml", include_str!("icon.svg")) }))
        .fallback(|| async { nothing() })
        .layer(axum::middleware::from_fn_with_state(page.clone(), guard))
        .with_state(page)
}

fn asset(kind: &'static str, text: &'static str) -> Response {
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

fn whole(code: StatusCode, title: &str, live: &str, main: &Markup) -> Response {
    let text = views::document(title, live, main).into_string();
    (code, [(header::CONTENT_TYPE, "text/html; charset=utf-8")], text).into_response()
}

fn said(code: StatusCode, title: &str, text: &Markup) -> Response {
    whole(code, title, "", &views::message(title, text))
}

fn nothing() -> Response {
    let text = html! { p { "There is nothing here. " a href="/" { "All machines" } } };
    said(StatusCode::NOT_FOUND, "Not found", &text)
}

/// Who asks for what, in the words of the browser.
fn named<'a>(headers: &'a HeaderMap, name: &str) -> &'a str {
    headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default()
}

#[derive(Debug, Default, Deserialize)]
struct Token {
    token: Option<String>,
}

impl Page {
    /// The names by which a browser on this machine may call the page.
    fn hosts(&self) -> [String; 2] {
        [self.address.to_string(), format!("localhost:{}", self.address.port())]
    }

    fn knows(&self, headers: &HeaderMap) -> bool {
        let cookies = headers.get_all(header::COOKIE).iter().filter_map(|v| v.to_str().ok()).flat_map(|v| v.split(';'));
        let ours = cookies.filter_map(|c| c.trim().split_once('=')).filter(|(name, _)| *name == self.cookie);
        let wanted = digest(&self.session);
        ours.fold(false, |known, (_, value)| known | (digest(value) == wanted))
    }

    /// Who may, and what everybody else gets.
    fn admitted(&self, request: &Request<Body>) -> Result<(), Box<Response>> {
        let headers = request.headers();
        let refuse = |code, title: &str, text: Markup| Err(Box::new(said(code, title, &text)));
        let host = named(headers, "host");
        if !self.hosts().iter().any(|h| h == host) {
            return refuse(
                StatusCode::MISDIRECTED_REQUEST,
                "Not here",
                html! { p { "This page answers to " (self.address) " alone." } },
            );
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return refuse(
                StatusCode::METHOD_NOT_ALLOWED,
                "Nothing is changed here",
                html! { p { "This page only shows." } },
            );
        }
        if matches!(request.uri().path(), "/style.css" | "/script.js" | "/icon.svg") {
            return Ok(());
        }
        // A window of another site may lead here, and nothing else of it may.
        let (site, purpose) = (named(headers, "sec-fetch-site"), named(headers, "sec-fetch-mode"));
        let foreign = !matches!(site, "" | "same-origin" | "none") && purpose != "navigate";
        let origin = named(headers, "origin");
        if foreign || (!origin.is_empty() && origin.strip_prefix("http://") != Some(host)) {
            return refuse(StatusCode::FORBIDDEN, "Not from there", html! { p { "Another site asks for this." } });
        }
        let given = Query::<Token>::try_from_uri(request.uri()).ok().and_then(|q| q.0.token);
        if let Some(token) = given.filter(|_| request.uri().path() == "/") {
            if digest(&token) == self.token {
                let cookie = format!("{}={}; Path=/; HttpOnly; SameSite=Strict", self.cookie, self.session);
                // So that the token is in no address that is kept or sent on.
                let answer =
                    (StatusCode::SEE_OTHER, [(header::LOCATION, "/".to_owned()), (header::SET_COOKIE, cookie)]);
                return Err(Box::new(answer.into_response()));
            }
            return refuse(
                StatusCode::UNAUTHORIZED,
                "Another token",
                html! { p { "This token is of an earlier start, or mistyped. " (WAY_IN) } },
            );
        }
        if !self.knows(headers) {
            let again = request.uri().path_and_query().map_or("/", |p| p.as_str()).to_owned();
            return refuse(
                StatusCode::UNAUTHORIZED,
                "Who are you?",
                html! {
                    p { (WAY_IN) }
                    p { "If you have done so and came by a link of another page: " a href=(again) { "go on" } "." }
                },
            );
        }
        Ok(())
    }
}

const WAY_IN: &str =
    "Open the address that 'virtfold up' has printed; it is in the file page.url of its data folder, too.";

/// Lets nobody else in, and tells browsers what the page does not do.
async fn guard(State(page): State<Arc<Page>>, request: Request<Body>, next: Next) -> Response {
    let mut response = match page.admitted(&request) {
        Ok(()) => next.run(request).await,
        Err(response) => *response,
    };
    let sockets = page.hosts().map(|h| format!("ws://{h}")).join(" ");
    let policy = format!(
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self' {sockets}; \
         form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    );
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, policy.as_str()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (header::HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (header::HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ] {
        if let Ok(value) = HeaderValue::from_str(value) {
            headers.insert(name, value);
        }
    }
    response
}

/// What can be looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
enum View {
    Machines { filter: String },
    Machine { namespace: String, name: String },
    Console { namespace: String, name: String },
    Nodes,
}

#[derive(Debug, Default, Deserialize)]
struct Filter {
    #[serde(default)]
    q: String,
}

impl View {
    /// At a path of the page, with its query.
    fn at(uri: &http::Uri) -> Option<Self> {
        let decoded = |text: &str| -> Option<String> {
            // The one decoder that there is takes whole queries.
            let uri = format!("/?q={}", text.replace('+', "%2B")).parse().ok()?;
            Query::<Filter>::try_from_uri(&uri).ok().map(|q| q.0.q)
        };
        let parts: Vec<&str> = uri.path().split('/').skip(1).collect();
        Some(match parts[..] {
            [""] => Self::Machines { filter: Query::<Filter>::try_from_uri(uri).ok()?.0.q.trim().to_owned() },
            ["nodes"] => Self::Nodes,
            ["machines", namespace, name] => Self::Machine { namespace: decoded(namespace)?, name: decoded(name)? },
            ["machines", namespace, name, "console"] => {
                Self::Console { namespace: decoded(namespace)?, name: decoded(name)? }
            }
            _ => return None,
        })
    }

    fn title(&self) -> String {
        match self {
            Self::Machines { .. } => "Machines".into(),
            Self::Nodes => "Nodes".into(),
            Self::Machine { name, .. } => name.clone(),
            Self::Console { name, .. } => format!("Console of {name}"),
        }
    }
}

/// One window: what it looks at, and what it was told last.
struct Window {
    page: Arc<Page>,
    view: View,
    watching: Arc<Watching>,
    why: Option<(Machine, Instant, Why)>,
}

impl Window {
    async fn open(page: Arc<Page>, view: View) -> Self {
        let watching = page.look.watching().await;
        Self { page, view, watching, why: None }
    }

    /// What it shows now, and whether that is there.
    async fn draw(&mut self) -> (bool, Markup) {
        let seen = self.watching.snapshot();
        let find = |namespace: &str, name: &str| {
            seen.machines.iter().find(|m| m.machine.namespace == namespace && m.machine.name == name).cloned()
        };
        match self.view.clone() {
            View::Machines { filter } => (true, views::machines(&seen, &filter)),
            View::Nodes => {
                let mut said = Vec::new();
                for node in seen.nodes.iter().filter(|n| tone(&n.node.status) != machines::Tone::Good) {
                    let path = format!("nodes/{}", node.node.name);
                    if let Ok(why) = self.page.explain(&path).await {
                        said.push((node.node.name.clone(), why.why.summary));
                    }
                }
                (true, views::nodes(&seen, &said))
            }
            View::Machine { namespace, name } => match find(&namespace, &name) {
                Some(machine) => {
                    let why = self.why(&machine).await;
                    (true, views::machine(&machine, &why, seen.now, &seen.gaps, self.page.traces.as_deref()))
                }
                None => (false, gone(&namespace, &name)),
            },
            View::Console { namespace, name } => match find(&namespace, &name) {
                Some(machine) => (true, views::console(&machine.machine)),
                None => (false, gone(&namespace, &name)),
            },
        }
    }

    /// Why the machine is as it is: asked anew when it has changed, or after a while.
    async fn why(&mut self, seen: &MachineSeen) -> Why {
        if let Some((machine, at, why)) = &self.why
            && *machine == seen.machine
            && at.elapsed() < EXPLAINED
        {
            return why.clone();
        }
        let m = &seen.machine;
        let resource = if m.bare { "virtualmachineinstances" } else { "virtualmachines" };
        let why = self.page.explain(&format!("namespaces/{}/{resource}/{}", m.namespace, m.name)).await;
        self.why = Some((m.clone(), Instant::now(), why.clone()));
        why
    }
}

fn gone(namespace: &str, name: &str) -> Markup {
    let text = html! { p { "There is no virtual machine " (name) " in namespace " (namespace) ". " a href="/" { "All machines" } } };
    views::message("Not there", &text)
}

impl Page {
    async fn explain(&self, object: &str) -> Why {
        let path = format!("/apis/{}/v1/{object}/explain?spans=true", api::names::SUBRESOURCE_GROUP);
        let asked = machines::get(&self.client, &path);
        let answer =
            tokio::time::timeout(PATIENCE, asked).await.map_err(|_| "the controller gave no answer in time")?;
        let answer = answer.map_err(|e| format!("{e:#}"))?.ok_or("the controller does not know it")?;
        Explained::read(answer).map_err(|e| format!("the explanation cannot be read: {e}"))
    }
}

/// A view as a whole document.
async fn shown(State(page): State<Arc<Page>>, request: Request<Body>) -> Response {
    let Some(view) = View::at(request.uri()) else { return nothing() };
    let here = request.uri().path_and_query().map_or("/", |p| p.as_str()).to_owned();
    // What is typed into a console stays as it is.
    let live = if matches!(view, View::Console { .. }) { "" } else { here.as_str() };
    let title = view.title();
    let (there, main) = Window::open(page, view).await.draw().await;
    whole(if there { StatusCode::OK } else { StatusCode::NOT_FOUND }, &title, live, &main)
}

#[derive(Debug, Deserialize)]
struct Of {
    of: String,
}

/// A view as it changes: each event is the whole of it, and the script changes what is different.
async fn events(State(page): State<Arc<Page>>, Query(Of { of }): Query<Of>) -> Response {
    let Some(view) = of.parse().ok().as_ref().and_then(View::at) else { return nothing() };
    let Ok(permit) = page.open.clone().try_acquire_owned() else { return busy() };
    let stop = page.stop.clone();
    let window = Window::open(page, view).await;
    let changed = window.watching.changes();
    let live = Live { window, changed, last: String::new(), _permit: permit };
    let events = stream::unfold(live, |mut live| async move {
        let event = live.next().await?;
        Some((Ok::<_, Infallible>(event), live))
    });
    let events = events.take_until(stop.cancelled_owned());
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}

fn busy() -> Response {
    said(StatusCode::SERVICE_UNAVAILABLE, "Too many windows", &html! { p { "Close some that show this page." } })
}

struct Live {
    window: Window,
    changed: tokio::sync::watch::Receiver<u64>,
    last: String,
    _permit: OwnedSemaphorePermit,
}

impl Live {
    /// What is different from the last time, as soon as it is.
    async fn next(&mut self) -> Option<Event> {
        loop {
            let text = self.window.draw().await.1.into_string();
            if text != self.last {
                self.last.clone_from(&text);
                return Some(Event::default().data(text));
            }
            tokio::select! {
                changed = self.changed.changed() => {
                    changed.ok()?;
                    tokio::time::sleep(SOON).await;
                    self.changed.mark_unchanged();
                }
                () = tokio::time::sleep(TIME) => {}
            }
        }
    }
}

/// A console, for the page's own script alone.
async fn console(
    State(page): State<Arc<Page>>,
    Path((namespace, name)): Path<(String, String)>,
    headers: HeaderMap,
    upgrade: WebSocketUpgrade,
) -> Response {
    // Others' scripts may open sockets anywhere, and a browser sends cookies along; it does not lie about the origin.
    if named(&headers, "origin").strip_prefix("http://") != Some(named(&headers, "host")) {
        return said(StatusCode::FORBIDDEN, "Not from there", &html! { p { "Another site asks for this." } });
    }
    let Ok(permit) = page.open.clone().try_acquire_owned() else { return busy() };
    // As names of objects they need no escaping; what is none is no object.
    let is_name =
        |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.'));
    if !is_name(&namespace) || !is_name(&name) {
        return nothing();
    }
    let path = format!(
        "/apis/{}/v1/namespaces/{namespace}/virtualmachineinstances/{name}/console",
        api::names::SUBRESOURCE_GROUP
    );
    upgrade.max_message_size(TYPED).on_upgrade(move |socket| async move {
        let _permit = permit;
        let stop = page.stop.clone();
        let _ = stop.run_until_cancelled(bridge(&page.client, &path, socket)).await;
    })
}

/// Carries bytes between a browser and a console.
async fn bridge(client: &Client, path: &str, mut browser: WebSocket) {
    let why = match upstream::open(client, path, Duration::ZERO).await {
        Ok(machine) => match carry(&mut browser, machine).await {
            Ok(why) => why,
            Err(error) => format!("{error:#}"),
        },
        Err(error) => format!("{error:#}"),
    };
    // A reason takes 123 bytes.
    let reason: String = why
        .chars()
        .scan(0, |len, c| {
            *len += c.len_utf8();
            (*len <= 120).then_some(c)
        })
        .collect();
    let frame = axum::extract::ws::CloseFrame { code: 1000, reason: reason.into() };
    let _ = browser.send(Message::Close(Some(frame))).await;
}

async fn carry(browser: &mut WebSocket, mut machine: upstream::Socket) -> anyhow::Result<String> {
    loop {
        tokio::select! {
            typed = browser.recv() => match typed {
                Some(Ok(Message::Text(text))) => machine.send(tungstenite::Message::binary(text.as_bytes().to_vec())).await?,
                Some(Ok(Message::Binary(bytes))) => machine.send(tungstenite::Message::binary(bytes)).await?,
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                Some(Ok(Message::Close(_)) | Err(_)) | None => {
                    let _ = machine.close(None).await;
                    return Ok("left".into());
                }
            },
            shown = machine.next() => match shown.transpose()? {
                Some(tungstenite::Message::Binary(bytes)) => browser.send(Message::Binary(bytes)).await?,
                Some(tungstenite::Message::Text(text)) => browser.send(Message::Binary(text.as_bytes().to_vec().into())).await?,
                Some(tungstenite::Message::Close(frame)) => {
                    let why = frame.map(|f| f.reason.to_string()).filter(|r| !r.is_empty());
                    return Ok(why.unwrap_or_else(|| "the machine has ended, or somebody else took the console".into()));
                }
                Some(_) => {}
                None => return Ok("the machine has ended, or somebody else took the console".into()),
            },
        }
    }
}

#[cfg(test)]
mod tests;
