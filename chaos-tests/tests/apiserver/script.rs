//! Lines of a script, and how one is asked of a server.

use super::compare::Answer;
use futures::{AsyncBufReadExt, StreamExt, TryStreamExt};
use http_body_util::BodyExt;
use kube::client::Body;
use serde_json::Value;
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// What is waited for happens within this.
const LONG: Duration = Duration::from_secs(60);
/// So long a watch that says less than was expected is listened to.
const WATCH: Duration = Duration::from_secs(5);

/// One call.
#[derive(Debug, Clone)]
pub struct Step {
    /// Number of its line.
    pub line: usize,
    /// The line.
    pub text: String,
    /// Name of its answer, "" for none.
    pub name: String,
    word: String,
    count: usize,
    path: String,
    options: Vec<(String, String)>,
    body: String,
}

/// All steps of a script. A line that begins with a blank goes on with the one before.
pub fn parse(text: &str) -> Result<Vec<Step>, String> {
    let mut lines: Vec<(usize, String)> = Vec::new();
    for (i, line) in text.lines().enumerate() {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        match lines.last_mut() {
            Some((_, last)) if line.starts_with(' ') => {
                last.push(' ');
                last.push_str(line.trim());
            }
            _ => lines.push((i + 1, line.to_owned())),
        }
    }
    lines.into_iter().map(|(n, l)| Step::parse(&l).map(|s| Step { line: n, ..s })).collect()
}

impl Step {
    /// Reads one line.
    pub fn parse(line: &str) -> Result<Self, String> {
        let text = line.to_owned();
        let (name, rest) = match line.split_once(": ") {
            Some((name, rest)) if name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-') => (name, rest),
            _ => ("", line),
        };
        let mut rest = rest.trim();
        let mut next = || {
            let (word, more) = rest.split_once(' ').unwrap_or((rest, ""));
            rest = more.trim_start();
            word.to_owned()
        };
        let (word, path) = (next(), next());
        let (word, count) =
            word.split_once(':').map_or((word.clone(), 0), |(w, n)| (w.to_owned(), n.parse().unwrap_or(0)));
        if !path.starts_with('/') {
            return Err(format!("{line:?} has no path"));
        }
        let mut options = Vec::new();
        while rest.starts_with('@') {
            let (option, more) = rest.split_once(' ').unwrap_or((rest, ""));
            let (key, value) = option.split_once('=').ok_or_else(|| format!("{line:?}: {option}"))?;
            options.push((key.to_owned(), value.to_owned()));
            rest = more.trim_start();
        }
        Ok(Self { line: 0, text, name: name.into(), word, count, path, options, body: rest.to_owned() })
    }

    /// Whether the answer is only waited for.
    pub fn waits(&self) -> bool {
        self.word == "AWAIT"
    }

    fn option(&self, key: &str) -> Option<&str> {
        self.options.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
    }

    fn filled(&self, text: &str, namespace: &str, known: &BTreeMap<String, Value>) -> String {
        let mut text = text.replace("$ns", namespace);
        while let Some(start) = text.find("${") {
            let end = text[start..].find('}').unwrap_or_else(|| panic!("{}: no end of ${{", self.text)) + start;
            let (name, pointer) = text[start + 2..end].split_once('/').unwrap();
            let answer = known.get(name).unwrap_or_else(|| panic!("{}: no answer {name}", self.text));
            let value = match answer.pointer(&format!("/{pointer}")) {
                Some(Value::String(s)) => s.clone(),
                Some(other) => other.to_string(),
                None => format!("no-{name}"),
            };
            text.replace_range(start..=end, &value);
        }
        text
    }

    fn request(&self, namespace: &str, known: &BTreeMap<String, Value>) -> http::Request<Body> {
        let path = self.filled(&self.path, namespace, known);
        let (method, kind) = match self.word.as_str() {
            "JSON" => ("PATCH", "application/json-patch+json"),
            "MERGE" => ("PATCH", "application/merge-patch+json"),
            "STRATEGIC" => ("PATCH", "application/strategic-merge-patch+json"),
            "APPLY" => ("PATCH", "application/apply-patch+yaml"),
            "TABLE" | "META" | "METALIST" | "AGG" | "WATCH" | "AWAIT" => ("GET", "application/json"),
            method => (method, "application/json"),
        };
        let accept = match self.word.as_str() {
            "TABLE" => "application/json;as=Table;v=v1;g=meta.k8s.io",
            "METALIST" => "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io",
            "META" => "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io",
            "AGG" => "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList",
            _ => "application/json",
        };
        let text = self.filled(&self.body, namespace, known);
        let body = if let Some(raw) = text.strip_prefix('\'') {
            raw.trim_end_matches('\'').to_owned()
        } else if text.is_empty() {
            String::new()
        } else {
            let value: Value = serde_saphyr::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", self.text));
            value.to_string()
        };
        let accept = self.option("@accept").unwrap_or(accept);
        let mut request = http::Request::builder().method(method).uri(path).header("accept", accept);
        request = request.header("user-agent", self.option("@agent").unwrap_or("script/v1"));
        if method != "GET" {
            request = request.header("content-type", self.option("@type").unwrap_or(kind));
        }
        if let Some(user) = self.option("@user") {
            request = request.header("impersonate-user", user.replace("$ns", namespace));
        }
        if let Some(group) = self.option("@group") {
            request = request.header("impersonate-group", group);
        }
        request.body(Body::from(body.into_bytes())).unwrap()
    }

    /// Asks.
    pub async fn ask(&self, client: &kube::Client, namespace: &str, known: &BTreeMap<String, Value>) -> Answer {
        let begun = Instant::now();
        loop {
            let response =
                client.send(self.request(namespace, known)).await.unwrap_or_else(|e| panic!("{}: {e}", self.text));
            let answer = if self.word == "WATCH" && response.status().is_success() {
                self.events(response).await
            } else {
                let code = response.status().as_u16();
                let header = |name| response.headers().get_all(name).iter().map(|v| v.to_str().unwrap().to_owned());
                let warnings = header("warning").collect();
                let kind = header("content-type").next().unwrap_or_default();
                let bytes = response.into_body().collect().await.unwrap().to_bytes();
                let body = serde_json::from_slice(&bytes)
                    .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&bytes).into_owned()));
                let body = match self.option("@pick") {
                    Some(name) => picked(&body, &name.replace("$ns", namespace)),
                    None => body,
                };
                Answer { code, warnings, kind, body }
            };
            if !self.waits() || usize::from(answer.code) == self.count {
                return answer;
            }
            assert!(begun.elapsed() < LONG, "{}: {} {}", self.text, answer.code, answer.body);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn events(&self, response: http::Response<Body>) -> Answer {
        let code = response.status().as_u16();
        let stream = response.into_body().into_data_stream().map_err(std::io::Error::other);
        let mut lines = Box::pin(stream.into_async_read().lines());
        let mut events = Vec::new();
        while events.len() < self.count {
            match tokio::time::timeout(WATCH, lines.next()).await {
                Ok(Some(Ok(line))) => events.push(serde_json::from_str(&line).unwrap()),
                _ => break,
            }
        }
        Answer { code, warnings: Vec::new(), kind: String::new(), body: Value::Array(events) }
    }
}

/// The entry of a list that has a name.
fn picked(body: &Value, name: &str) -> Value {
    let lists = ["items", "groups", "resources"].into_iter().filter_map(|key| body[key].as_array());
    let mut all = lists.flatten().filter(|e| e["name"] == name || e["metadata"]["name"] == name);
    all.next().cloned().unwrap_or_else(|| format!("there is no {name}").into())
}
