//! Who is let in, and what is shown to them, with a cluster in this process that serves what the page asks for.
#![allow(clippy::unwrap_used)]

use super::*;
use serde_json::json;
use std::sync::Mutex;
use tower::ServiceExt;

const NAME: &str = "web";

/// An API server that has one machine and one node, and tells no news.
fn api(asked: Arc<Mutex<Vec<String>>>) -> Client {
    let vm = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
        "metadata": {"name": NAME, "namespace": "default", "uid": "u", "resourceVersion": "1",
            "annotations": {"virtfold.io/traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}},
        "status": {"printableStatus": "Stopped<b>"}});
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-1", "uid": "n", "resourceVersion": "1"},
        "status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    let explained = json!({"kind": "Explanation", "apiVersion": "v1", "namespace": "default", "name": NAME, "status": "Stopped", "phase": "",
        "runStrategy": "Halted", "summary": "web is Stopped, as it should be.", "waits": [], "steps": [], "history": [],
        "asOf": "2026-01-01T10:02:12.000Z", "live": true});
    let service = tower::service_fn(move |request: Request<kube::client::Body>| {
        let path = request.uri().path().to_owned();
        let watched = request.uri().query().is_some_and(|q| q.contains("watch=true"));
        asked.lock().unwrap().push(path.clone());
        let list = |kind: &str, items: Vec<serde_json::Value>| json!({"kind": format!("{kind}List"), "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items});
        let answer = match path.rsplit('/').next().unwrap_or_default() {
            "virtualmachines" => list("VirtualMachine", vec![vm.clone()]),
            "virtualmachineinstances" => list("VirtualMachineInstance", vec![]),
            "nodes" => list("Node", vec![node.clone()]),
            "usage" => json!({"nodes": [], "machines": [], "gaps": ["node node-1: no answer in time"]}),
            "explain" => explained.clone(),
            _ => json!({}),
        };
        async move {
            if watched {
                std::future::pending::<()>().await;
            }
            let body = answer.to_string().into_bytes();
            Ok::<_, std::io::Error>(http::Response::new(http_body_util::Full::new(bytes::Bytes::from(body))))
        }
    });
    Client::new(service, "default")
}

struct Served {
    router: axum::Router,
    door: Door,
    page: Arc<Page>,
    asked: Arc<Mutex<Vec<String>>>,
}

fn page() -> Served {
    let address: SocketAddr = "127.0.0.1:9430".parse().unwrap();
    let asked = Arc::<Mutex<Vec<String>>>::default();
    let client = api(asked.clone());
    let door = Door { address, token: random() };
    let page = Arc::new(Page {
        look: Look::new(client.clone()),
        client,
        address,
        token: digest(&door.token),
        cookie: "virtfold-0a1b".into(),
        session: random(),
        traces: None,
        open: Arc::new(Semaphore::new(1)),
        stop: CancellationToken::new(),
    });
    Served { router: router(page.clone()), door, page, asked }
}

impl Served {
    async fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> (u16, HeaderMap, String) {
        let mut request = Request::builder().method(method).uri(path);
        if headers.iter().all(|(name, _)| *name != "host") {
            request = request.header("host", "127.0.0.1:9430");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let answer = self.router.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        let (parts, body) = answer.into_parts();
        let text = axum::body::to_bytes(body, 1 << 20).await.unwrap();
        (parts.status.as_u16(), parts.headers, String::from_utf8_lossy(&text).into_owned())
    }

    fn cookie(&self) -> String {
        format!("other=1; {}={}", self.page.cookie, self.page.session)
    }
}

#[tokio::test]
async fn the_token_is_exchanged_for_a_cookie_and_nothing_else_opens() {
    let p = page();
    let way = p.door.url().replace("http://127.0.0.1:9430", "");
    let (code, headers, text) = p.ask("GET", &way, &[]).await;
    assert_eq!((code, headers["location"].to_str().unwrap()), (303, "/"));
    let cookie = headers["set-cookie"].to_str().unwrap();
    assert!(cookie.ends_with("; Path=/; HttpOnly; SameSite=Strict"), "{cookie}");
    assert!(!cookie.contains(&p.door.token) && !text.contains(&p.door.token), "the token is not handed on");
    let cookie = cookie.split(';').next().unwrap();
    assert_eq!(p.ask("GET", "/", &[("cookie", cookie)]).await.0, 200);
    let wrong = format!("{}=nonsense", p.page.cookie);
    let other = cookie.replace("0a1b", "ffff");
    for path in
        ["/", "/nodes", "/machines/default/web", "/events?of=/", "/machines/default/web/console/stream", "/nowhere"]
    {
        for cookie in ["", wrong.as_str(), other.as_str(), "virtfold-0a1b"] {
            assert_eq!(p.ask("GET", path, &[("cookie", cookie)]).await.0, 401, "{path} {cookie}");
        }
    }
    for wrong in ["/?token=", "/?token=nonsense", "/?token=a&token=b"] {
        assert_eq!(p.ask("GET", wrong, &[]).await.0, 401, "{wrong}");
    }
    // A token opens the door, not a window in the wall.
    assert_eq!(p.ask("GET", &way.replace("/?", "/nodes?"), &[]).await.0, 401);
    assert_eq!(p.ask("GET", "/style.css", &[]).await.0, 200);
}

#[tokio::test]
async fn other_names_and_other_sites_get_nothing() {
    let p = page();
    let cookie = p.cookie();
    for (host, code) in
        [("localhost:9430", 200), ("127.0.0.1:9430", 200), ("evil.example:9430", 421), ("127.0.0.1", 421), ("", 421)]
    {
        assert_eq!(p.ask("GET", "/nodes", &[("host", host), ("cookie", &cookie)]).await.0, code, "{host}");
        if code == 421 {
            assert_eq!(p.ask("GET", "/style.css", &[("host", host)]).await.0, 421, "{host}");
        }
    }
    for (headers, code) in [
        (&[("sec-fetch-site", "same-origin")][..], 200),
        (&[("sec-fetch-site", "none")], 200),
        (&[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")], 200),
        (&[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors")], 403),
        (&[("sec-fetch-site", "same-site"), ("sec-fetch-mode", "cors")], 403),
        (&[("origin", "http://127.0.0.1:9430")], 200),
        (&[("origin", "http://127.0.0.1:9431")], 403),
        (&[("origin", "null")], 403),
    ] {
        let headers = [headers, &[("cookie", cookie.as_str())]].concat();
        assert_eq!(p.ask("GET", "/nodes", &headers).await.0, code, "{headers:?}");
    }
    for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"] {
        assert_eq!(p.ask(method, "/", &[("cookie", &cookie)]).await.0, 405, "{method}");
    }
    // A console needs the page's own origin; a socket that says nothing of it is none of a browser.
    let socket = [
        ("cookie", cookie.as_str()),
        ("connection", "upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ];
    let (code, ..) = p.ask("GET", "/machines/default/web/console/stream", &socket).await;
    assert!(matches!(code, 403 | 426), "{code}");
}

#[tokio::test]
async fn every_answer_says_what_browsers_may_not_do() {
    let p = page();
    let cookie = p.cookie();
    for (path, cookie) in
        [("/", cookie.as_str()), ("/", ""), ("/style.css", ""), ("/nowhere", &cookie), ("/events?of=/nowhere", &cookie)]
    {
        let (_, headers, _) = p.ask("GET", path, &[("cookie", cookie)]).await;
        let policy = headers["content-security-policy"].to_str().unwrap();
        assert!(
            policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "),
            "{policy}"
        );
        assert!(
            !policy.contains("unsafe")
                && policy.contains("frame-ancestors 'none'")
                && policy.contains("base-uri 'none'")
        );
        for (name, value) in
            [("x-content-type-options", "nosniff"), ("referrer-policy", "no-referrer"), ("cache-control", "no-store")]
        {
            assert_eq!(headers[name], value, "{path}");
        }
    }
}

#[tokio::test]
async fn views_are_drawn_by_the_server_and_escaped() {
    let p = page();
    let cookie = p.cookie();
    let ask = async |path: &str| p.ask("GET", path, &[("cookie", &cookie)]).await;
    let (code, _, text) = ask("/").await;
    assert_eq!(code, 200);
    assert!(text.contains("href=\"/machines/default/web\"") && text.contains("Stopped&lt;b&gt;"), "{text}");
    let text = ask("/nodes").await.2;
    assert!(text.contains("NotReady") && text.contains("as it should be"), "what the controller says of it: {text}");
    let (code, _, text) = ask("/machines/default/web").await;
    assert!(code == 200 && text.contains("web is Stopped, as it should be."), "{text}");
    let (code, _, text) = ask("/machines/default/web/console").await;
    assert!(
        code == 200
            && text.contains("data-stream=\"/machines/default/web/console/stream\"")
            && text.contains("data-live=\"\"")
    );
    for (path, code) in [
        ("/machines/default/other", 404),
        ("/machines/default/%3Cscript%3E", 404),
        ("/machines/default/%FF", 404),
        ("/machines/default", 404),
        ("/events", 400),
        ("/events?of=/nowhere", 404),
        ("/events?of=%20", 404),
        ("/?q=%3Cscript%3Ealert(1)%3C/script%3E", 200),
    ] {
        let (got, _, text) = ask(path).await;
        assert_eq!(got, code, "{path}: {text}");
        assert!(!text.contains("<script>"), "{path}: {text}");
    }
    // Ten requests, one list of each kind: they share what is watched.
    let lists = p.asked.lock().unwrap().iter().filter(|path| path.ends_with("/virtualmachines")).count();
    assert!(lists <= 2, "a list and a watch: {lists}");
}

#[tokio::test]
async fn windows_are_bounded_and_end_with_the_page() {
    let p = page();
    let cookie = p.cookie();
    let request = || {
        let request = Request::get("/events?of=/").header("host", "localhost:9430").header("cookie", &cookie);
        request.body(Body::empty()).unwrap()
    };
    let first = p.router.clone().oneshot(request()).await.unwrap();
    assert_eq!(first.headers()["content-type"], "text/event-stream");
    let second = p.router.clone().oneshot(request()).await.unwrap();
    assert_eq!(second.status(), 503);
    let mut events = first.into_body().into_data_stream();
    let event = events.next().await.unwrap().unwrap();
    assert!(
        event.starts_with(b"data: ") && String::from_utf8_lossy(&event).contains("/machines/default/web"),
        "{event:?}"
    );
    p.page.stop.cancel();
    let rest = tokio::time::timeout(Duration::from_secs(20), events.collect::<Vec<_>>()).await;
    assert!(rest.is_ok(), "the stream ends");
    drop(rest);
    let third = p.router.clone().oneshot(request()).await.unwrap();
    assert_eq!(third.status(), 200, "what has ended makes room");
}

#[tokio::test]
async fn what_nobody_looks_at_is_forgotten() {
    let p = page();
    let watching = p.page.look.watching().await;
    let weak = Arc::downgrade(&watching);
    p.page.look.forget_idle(Duration::ZERO);
    assert!(weak.upgrade().is_some(), "somebody looks");
    drop(watching);
    p.page.look.forget_idle(Duration::from_secs(3600));
    assert!(weak.upgrade().is_some(), "somebody may come back");
    p.page.look.forget_idle(Duration::ZERO);
    assert!(weak.upgrade().is_none());
}

/// What is written in a colour can be read on every ground, in light and in dark (WCAG's 4.5).
#[test]
fn colours_can_be_told_from_their_ground() {
    let css = include_str!("style.css");
    let (light, dark) = css.split_once("prefers-color-scheme: dark").unwrap();
    let colour = |part: &str, name: &str| -> [f64; 3] {
        let text = part.split(&format!("--{name}: #")).nth(1).unwrap();
        [0, 2, 4].map(|at| f64::from(u8::from_str_radix(&text[at..at + 2], 16).unwrap()) / 255.0)
    };
    let luminance = |c: [f64; 3]| {
        let linear = c.map(|v| if v <= 0.04045 { v / 12.92 } else { ((v + 0.055) / 1.055_f64).powf(2.4) });
        0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    };
    let contrast = |a: [f64; 3], b: [f64; 3]| {
        let (a, b) = (luminance(a), luminance(b));
        (a.max(b) + 0.05) / (a.min(b) + 0.05)
    };
    for (scheme, part) in [("light", light), ("dark", dark)] {
        for name in ["ink", "soft", "accent", "good", "busy", "bad", "off"] {
            let text = colour(part, name);
            for ground in ["ground", "card"] {
                let ground = colour(part, ground);
                // A pill's ground is an eighth of its own colour.
                let tinted = [0, 1, 2].map(|i| ground[i] * 0.88 + text[i] * 0.12);
                let grounds =
                    if matches!(name, "ink" | "soft" | "accent") { vec![ground] } else { vec![ground, tinted] };
                for ground in grounds {
                    let ratio = contrast(text, ground);
                    assert!(ratio >= 4.5, "{scheme}: --{name} has {ratio:.2}");
                }
            }
        }
    }
}
