//! A real browser without a window: Chromium's headless shell, steered by its DevTools protocol.
//!
//! It reaches the loopback interface and nothing else, and remembers each request that its page made and each error that it reported.

use super::{cluster::Janitor, wait};
use crate::kubernetes::Process;
use anyhow::{Context, Result, bail, ensure};
use base64::{Engine, engine::general_purpose::STANDARD};
use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use std::{
    cell::RefCell,
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};
use tokio::{net::TcpStream, runtime::Runtime};
use tokio_tungstenite::{WebSocketStream, client_async_with_config, tungstenite::Message};

/// What it is called; Debian's package has the same name.
const PROGRAM: &str = "chromium-headless-shell";
/// From its start to a first answer.
const READY: Duration = Duration::from_secs(60);
/// An answer to one command; drawing may take long on a busy machine.
const ANSWER: Duration = Duration::from_secs(60);

/// Why there is none on this machine.
pub fn program() -> std::result::Result<(), String> {
    let there = Command::new(PROGRAM).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    there.map(|_| ()).map_err(|error| format!("there is no {PROGRAM} ({error}); scripts/setup installs it"))
}

struct Link {
    socket: WebSocketStream<TcpStream>,
    last: u64,
    /// What was asked for, and is an answer to nothing: requests and errors of the page.
    requests: Vec<String>,
    errors: Vec<String>,
}

/// A browser with one page. It ends when it is dropped, or when this program dies.
pub struct Browser {
    runtime: Runtime,
    link: RefCell<Link>,
    session: String,
    process: Process,
    _janitor: Janitor,
}

impl Browser {
    /// Starts it.
    pub fn start() -> Result<Self> {
        let data = tempfile::Builder::new().prefix("virtfold-browser-").tempdir()?.keep();
        let janitor = Janitor::start(&data)?;
        let mut command = Command::new(PROGRAM);
        // Whoever runs the tests is root, for whom the sandbox does not work. Nothing but our own page is opened.
        command.args([
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--remote-debugging-port=0",
        ]);
        command.args([
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
        ]);
        command.arg("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost");
        command.arg(format!("--user-data-dir={}", data.join("profile").display())).arg("about:blank");
        let process = Process::start(&data, "browser", &mut command)?;
        let port = data.join("profile/DevToolsActivePort");
        let mut place = None;
        process.ready("the browser", READY, || {
            let text = fs::read_to_string(&port).unwrap_or_default();
            place = text.split_once('\n').map(|(port, path)| (port.to_owned(), path.trim().to_owned()));
            Ok(if place.is_some() { Ok(()) } else { Err("no port yet".into()) })
        })?;
        let (port, path) = place.context("the browser's port")?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let socket = runtime.block_on(async {
            let stream = TcpStream::connect(format!("127.0.0.1:{port}")).await?;
            // Pictures are large.
            let limits = tokio_tungstenite::tungstenite::protocol::WebSocketConfig::default()
                .max_message_size(Some(64 << 20))
                .max_frame_size(Some(64 << 20));
            let (socket, _) =
                client_async_with_config(format!("ws://127.0.0.1:{port}{path}"), stream, Some(limits)).await?;
            anyhow::Ok(socket)
        })?;
        let link = RefCell::new(Link { socket, last: 0, requests: vec![], errors: vec![] });
        let mut browser = Self { runtime, link, session: String::new(), process, _janitor: janitor };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}))?;
        let target = target["targetId"].as_str().context("a target")?.to_owned();
        let attached = browser.call("Target.attachToTarget", json!({"targetId": target, "flatten": true}))?;
        browser.session = attached["sessionId"].as_str().context("a session")?.to_owned();
        for domain in ["Page", "Network", "Runtime", "Log", "Accessibility"] {
            browser.call(&format!("{domain}.enable"), json!({}))?;
        }
        Ok(browser)
    }

    /// One command, and its answer.
    pub fn call(&self, method: &str, parameters: Value) -> Result<Value> {
        self.process.check()?;
        let mut link = self.link.borrow_mut();
        link.last += 1;
        let id = link.last;
        let mut command = json!({"id": id, "method": method, "params": parameters});
        if !self.session.is_empty() {
            command["sessionId"] = self.session.clone().into();
        }
        let answered = async {
            link.socket.send(Message::text(command.to_string())).await?;
            loop {
                let Message::Text(text) = link.socket.next().await.context("the browser is gone")?? else { continue };
                let said: Value = serde_json::from_str(&text)?;
                if said["id"] == id {
                    break anyhow::Ok(said);
                }
                link.hear(&said);
            }
        };
        let limited = async { tokio::time::timeout(ANSWER, answered).await };
        let mut answer = self.runtime.block_on(limited).with_context(|| format!("{method}: no answer"))??;
        ensure!(answer["error"].is_null(), "{method}: {}", answer["error"]);
        Ok(answer["result"].take())
    }

    /// Opens an address and waits until all of it is loaded.
    pub fn open(&self, url: &str) -> Result<()> {
        let answer = self.call("Page.navigate", json!({"url": url}))?;
        if let Some(error) = answer["errorText"].as_str() {
            bail!("{url}: {error}");
        }
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'", READY)
    }

    /// The value of an expression in the page.
    pub fn value(&self, expression: &str) -> Result<Value> {
        let mut answer = self
            .call("Runtime.evaluate", json!({"expression": expression, "returnByValue": true, "awaitPromise": true}))?;
        ensure!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        Ok(answer["result"]["value"].take())
    }

    /// The text that an expression is.
    pub fn text(&self, expression: &str) -> Result<String> {
        Ok(self.value(expression)?.as_str().unwrap_or_default().to_owned())
    }

    /// Waits until an expression is true.
    pub fn wait(&self, expression: &str, limit: Duration) -> Result<()> {
        wait::until(expression, limit, || {
            if self.value(expression)? == true {
                return Ok(Ok(()));
            }
            Ok(Err(format!("{}: {}", self.text("location.href")?, self.text("document.body.innerText")?)))
        })
    }

    /// Presses a key that has a name: `Tab`, `Enter`, ...
    pub fn press(&self, key: &str, shift: bool) -> Result<()> {
        let code = match key {
            "Tab" => 9,
            "Enter" => 13,
            "Escape" => 27,
            " " => 32,
            other => bail!("{other} is not known here"),
        };
        let text = match key {
            "Enter" => "\r",
            " " => " ",
            _ => "",
        };
        let event = |kind: &str| {
            json!({"type": kind, "key": key, "code": if key == " " { "Space" } else { key }, "windowsVirtualKeyCode": code, "text": text,
                   "modifiers": if shift { 8 } else { 0 }})
        };
        self.call("Input.dispatchKeyEvent", event(if text.is_empty() { "rawKeyDown" } else { "keyDown" }))?;
        self.call("Input.dispatchKeyEvent", event("keyUp"))?;
        Ok(())
    }

    /// Types a text where the focus is.
    pub fn write(&self, text: &str) -> Result<()> {
        self.call("Input.insertText", json!({"text": text})).map(|_| ())
    }

    /// The window's size, and whether the machine is set to dark colours.
    pub fn look(&self, width: u32, height: u32, dark: bool) -> Result<()> {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", size)?;
        let scheme = if dark { "dark" } else { "light" };
        let features = json!({"features": [
            {"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"}]});
        self.call("Emulation.setEmulatedMedia", features).map(|_| ())
    }

    /// Whether scripts run in pages that are opened from now on.
    pub fn scripts(&self, run: bool) -> Result<()> {
        self.call("Emulation.setScriptExecutionDisabled", json!({"value": !run})).map(|_| ())
    }

    /// Writes what the window shows into a file.
    pub fn picture(&self, file: &Path) -> Result<()> {
        let picture = self.call("Page.captureScreenshot", json!({"format": "png", "optimizeForSpeed": false}))?;
        let bytes = STANDARD.decode(picture["data"].as_str().context("a picture")?)?;
        fs::write(file, bytes).with_context(|| file.display().to_string())
    }

    /// Role and name of everything in the page that somebody can operate, as a screen reader is told.
    pub fn operable(&self) -> Result<Vec<(String, String)>> {
        let tree = self.call("Accessibility.getFullAXTree", json!({}))?;
        let nodes = tree["nodes"].as_array().context("nodes")?;
        let told = |n: &Value, what: &str| n[what]["value"].as_str().unwrap_or_default().to_owned();
        let operable = |n: &&Value| {
            let role = told(n, "role");
            n["ignored"] != true && matches!(&*role, "link" | "button" | "textbox" | "searchbox" | "checkbox")
        };
        Ok(nodes.iter().filter(operable).map(|n| (told(n, "role"), told(n, "name"))).collect())
    }

    /// The addresses of all requests of the page so far, and the errors that it reported.
    pub fn heard(&self) -> (Vec<String>, Vec<String>) {
        let link = self.link.borrow();
        (link.requests.clone(), link.errors.clone())
    }
}

impl Link {
    fn hear(&mut self, said: &Value) {
        let of = &said["params"];
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        match said["method"].as_str().unwrap_or_default() {
            "Network.requestWillBeSent" => self.requests.push(text(&of["request"]["url"])),
            "Network.webSocketCreated" => self.requests.push(text(&of["url"])),
            "Runtime.exceptionThrown" => self.errors.push(of["exceptionDetails"].to_string()),
            // What breaks the page's policy, or cannot be loaded, is told here.
            "Log.entryAdded" if of["entry"]["level"] == "error" => {
                self.errors.push(format!("{} ({})", text(&of["entry"]["text"]), text(&of["entry"]["url"])));
            }
            _ => {}
        }
    }
}
