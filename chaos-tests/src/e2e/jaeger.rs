//! A real Jaeger beside a test: takes spans over OTLP, and gives traces back by its HTTP API.

use super::{
    cluster::{Janitor, free_port},
    wait,
    web::Web,
};
use crate::{kubernetes::Process, rules::root};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
    process::Command,
    time::Duration,
};

/// Time that it takes to begin to listen.
const READY: Duration = Duration::from_secs(60);

/// The built program, or why there is none.
pub fn program() -> std::result::Result<PathBuf, String> {
    let program = root().join("target/go/bin/jaeger");
    if program.exists() {
        Ok(program)
    } else {
        Err("there is no jaeger in target/go/bin; scripts/go-tools builds it, and needs Go".into())
    }
}

/// One span, as Jaeger tells it.
#[derive(Debug, Clone, Default)]
pub struct Span {
    /// `service.name` of whoever emitted it.
    pub service: String,
    /// 16 hexadecimal digits.
    pub id: String,
    /// The span that it hangs under.
    pub parent: Option<String>,
    /// Trace and span of what it is linked to.
    pub links: Vec<(String, String)>,
    /// Name.
    pub name: String,
    /// Microseconds since 1970.
    pub start: u64,
    /// Microseconds.
    pub duration: u64,
    /// Attributes, as text.
    pub tags: BTreeMap<String, String>,
}

impl Span {
    fn read(span: &Value, processes: &Value) -> Self {
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        let references = span["references"].as_array().cloned().unwrap_or_default();
        let of_type = |kind: &'static str| references.iter().filter(move |r| r["refType"] == kind);
        let tags = span["tags"].as_array().into_iter().flatten();
        Self {
            service: text(&processes[text(&span["processID"])]["serviceName"]),
            id: text(&span["spanID"]),
            parent: of_type("CHILD_OF").next().map(|r| text(&r["spanID"])),
            links: of_type("FOLLOWS_FROM").map(|r| (text(&r["traceID"]), text(&r["spanID"]))).collect(),
            name: text(&span["operationName"]),
            start: span["startTime"].as_u64().unwrap_or_default(),
            duration: span["duration"].as_u64().unwrap_or_default(),
            tags: tags
                .map(|t| (text(&t["key"]), t["value"].as_str().map_or_else(|| t["value"].to_string(), str::to_owned)))
                .collect(),
        }
    }
}

/// What has to be true of every finished trace: one root, nothing that hangs in the air, nothing told twice, no child that begins before
/// its parent.
pub fn whole(trace: &[Span]) -> Result<&Span> {
    let story = story(trace);
    let by_id: BTreeMap<&str, &Span> = trace.iter().map(|s| (s.id.as_str(), s)).collect();
    ensure!(by_id.len() == trace.len(), "a span was emitted twice:\n{story}");
    let roots: Vec<&Span> = trace.iter().filter(|s| s.parent.is_none()).collect();
    ensure!(roots.len() == 1, "{} roots:\n{story}", roots.len());
    for span in trace {
        let Some(id) = &span.parent else { continue };
        let parent = by_id.get(id.as_str()).with_context(|| format!("'{}' hangs in the air:\n{story}", span.name))?;
        // Clocks of one machine; each is read in milliseconds.
        let early = parent.start.saturating_sub(span.start);
        ensure!(early <= 1000, "'{}' begins {early} µs before '{}':\n{story}", span.name, parent.name);
    }
    Ok(roots[0])
}

/// A trace for people: an indented line a span.
pub fn story(trace: &[Span]) -> String {
    fn below(trace: &[Span], parent: Option<&str>, depth: usize, told: &mut BTreeSet<String>, out: &mut String) {
        let mut here: Vec<&Span> = trace.iter().filter(|s| s.parent.as_deref() == parent).collect();
        here.sort_by_key(|s| s.start);
        for span in here {
            let ms = span.duration as f64 / 1000.0;
            out.push_str(&format!("{}{} {ms:.1} ms ({}) {}\n", "  ".repeat(depth), span.name, span.service, span.id));
            if told.insert(span.id.clone()) {
                below(trace, Some(&span.id), depth + 1, told, out);
            }
        }
    }
    let (mut told, mut out) = (BTreeSet::new(), String::new());
    below(trace, None, 0, &mut told, &mut out);
    for span in trace.iter().filter(|s| !told.contains(&s.id)) {
        out.push_str(&format!("in the air: {} ({}) {} <- {:?}\n", span.name, span.service, span.id, span.parent));
    }
    out
}

/// A running Jaeger that keeps its traces in memory. It ends when it is dropped, or when this program dies.
pub struct Jaeger {
    /// Where spans are sent to: OTLP over gRPC.
    pub otlp: String,
    /// Where people and tests look.
    pub url: String,
    web: Web,
    process: Process,
    _janitor: Janitor,
}

impl Jaeger {
    /// Starts it and waits until it listens.
    pub fn start() -> Result<Self> {
        let program = program().map_err(anyhow::Error::msg)?;
        let data = tempfile::Builder::new().prefix("virtfold-jaeger-").tempdir()?.keep();
        let janitor = Janitor::start(&data)?;
        let (grpc, http, query) = (free_port()?, free_port()?, free_port()?);
        let address = |port: u16| format!("127.0.0.1:{port}");
        let config = serde_json::json!({
            "service": {
                "extensions": ["jaeger_storage", "jaeger_query"],
                "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["jaeger_storage_exporter"]}},
                "telemetry": {"metrics": {"level": "none"}},
            },
            "extensions": {
                "jaeger_query": {
                    "storage": {"traces": "memory"},
                    "http": {"endpoint": address(query)},
                    "grpc": {"endpoint": address(free_port()?)},
                },
                "jaeger_storage": {"backends": {"memory": {"memory": {"max_traces": 10_000}}}},
            },
            "receivers": {"otlp": {"protocols": {
                "grpc": {"endpoint": address(grpc)}, "http": {"endpoint": address(http)},
            }}},
            "exporters": {"jaeger_storage_exporter": {"trace_storage": "memory"}},
        });
        // JSON is YAML.
        let file = data.join("jaeger.yaml");
        fs::write(&file, config.to_string()).context("write Jaeger's configuration")?;
        let process = Process::start(&data, "jaeger", Command::new(program).arg("--config").arg(&file))?;
        let url = format!("http://{}", address(query));
        let jaeger =
            Self { otlp: format!("http://{}", address(grpc)), web: Web::new(&url)?, url, process, _janitor: janitor };
        jaeger
            .process
            .ready("Jaeger", READY, || Ok(jaeger.web.get("/api/services").map(|_| ()).map_err(|e| format!("{e:#}"))))?;
        Ok(jaeger)
    }

    /// The spans of a trace so far; none where it is not known.
    pub fn trace(&self, id: &str) -> Result<Vec<Span>> {
        self.process.check()?;
        let answer = self.web.get(&format!("/api/traces/{id}"))?.unwrap_or_default();
        let trace = &answer["data"][0];
        let spans = trace["spans"].as_array().into_iter().flatten();
        Ok(spans.map(|span| Span::read(span, &trace["processes"])).collect())
    }

    /// The ids of the traces that a search finds, as its page's address says it (`/search?...`).
    pub fn found(&self, search: &str) -> Result<Vec<String>> {
        let query = search.strip_prefix("/search?").with_context(|| format!("{search} is no search"))?;
        let answer = self.web.get(&format!("/api/traces?{query}"))?.unwrap_or_default();
        let traces = answer["data"].as_array().with_context(|| format!("{search}: {answer}"))?;
        Ok(traces.iter().filter_map(|t| t["traceID"].as_str()).map(str::to_owned).collect())
    }

    /// Waits until a trace has spans of these names, and is whole.
    pub fn finished(&self, id: &str, names: &[&str], limit: Duration) -> Result<Vec<Span>> {
        self.until(&format!("the end of trace {id}"), names, limit, || self.trace(id))
    }

    /// The same of the only trace in which a service did something.
    pub fn begun_by(&self, service: &str, operation: &str, names: &[&str], limit: Duration) -> Result<Vec<Span>> {
        let path = format!("/api/traces?service={service}&operation={operation}&limit=10&lookback=1h");
        self.until(&format!("the end of the trace of {operation}"), names, limit, || {
            let answer = self.web.get(&path)?.unwrap_or_default();
            let traces = answer["data"].as_array().map(Vec::as_slice).unwrap_or_default();
            ensure!(traces.len() <= 1, "{} traces of {operation}", traces.len());
            let spans = traces.iter().flat_map(|t| t["spans"].as_array().into_iter().flatten().map(move |s| (t, s)));
            Ok(spans.map(|(t, span)| Span::read(span, &t["processes"])).collect())
        })
    }

    fn until(
        &self,
        what: &str,
        names: &[&str],
        limit: Duration,
        look: impl Fn() -> Result<Vec<Span>>,
    ) -> Result<Vec<Span>> {
        wait::until(what, limit, || {
            let trace = look()?;
            let lacks: Vec<_> = names.iter().filter(|name| !trace.iter().any(|s| s.name == **name)).collect();
            Ok(match whole(&trace) {
                Ok(_) if lacks.is_empty() => Ok(trace),
                Ok(_) => Err(format!("without {lacks:?}:\n{}", story(&trace))),
                Err(error) => Err(format!("without {lacks:?}: {error:#}")),
            })
        })
    }

    /// All that it was ever told, as text.
    pub fn everything(&self) -> Result<String> {
        let services = self.web.get("/api/services")?.unwrap_or_default();
        let services = services["data"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let told = |s| {
            anyhow::Ok(self.web.get(&format!("/api/traces?service={s}&limit=10000&lookback=1h"))?.unwrap_or_default())
        };
        services.map(|s| told(s).map(|t| t.to_string())).collect()
    }
}
