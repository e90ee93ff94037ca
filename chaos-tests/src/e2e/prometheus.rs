//! A real Prometheus beside a test: scrapes a running system, with our rules, and answers queries.

use super::{
    cluster::{Cluster, Janitor, free_port},
    wait,
    web::Web,
};
use crate::{kubernetes::Process, rules::root};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs,
    process::{Command, Stdio},
    time::Duration,
};

/// Time that it takes to begin to listen.
const READY: Duration = Duration::from_secs(60);
/// For what is missing where a scrape has failed: it is back with one of the next.
const AGAIN: Duration = Duration::from_secs(120);
/// Between two scrapes of a node's agent, and for each of them: it asks launchers, and those their guests, who may be slow.
const AGENT: &str = "5s";

/// Why there is none on this machine.
pub fn program() -> std::result::Result<(), String> {
    let there = Command::new("prometheus").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    there.map(|_| ()).map_err(|error| format!("there is no prometheus ({error}); scripts/setup installs it"))
}

/// One series at the time of the query.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its value.
    pub value: f64,
}

/// A running Prometheus. It ends when it is dropped, or when this program dies.
pub struct Prometheus {
    web: Web,
    process: Process,
    _janitor: Janitor,
}

/// Where the n-th exporter of a cluster listens: the control plane, then the agents of the nodes.
pub fn exporters(cluster: &Cluster, first: u16) -> Result<Vec<(String, u16)>> {
    let nodes = cluster.nodes()?.into_iter();
    let names = std::iter::once("localhost".to_owned()).chain(nodes);
    Ok(names.zip(first..).collect())
}

impl Prometheus {
    /// Starts it: every two seconds it scrapes the control plane of a cluster, every five its agents, with a token that may, and these files of
    /// the port of somebody else.
    pub fn start(cluster: &Cluster, first: u16, token: &str, others: &[(u16, &str)]) -> Result<Self> {
        let data = tempfile::Builder::new().prefix("virtfold-prometheus-").tempdir()?.keep();
        let janitor = Janitor::start(&data)?;
        fs::write(data.join("token"), token)?;
        let port = free_port()?;
        let job = |(name, port): (String, u16)| {
            let (kind, often) = if name == "localhost" { ("control-plane", "2s") } else { ("node-agent", AGENT) };
            json!({
                "job_name": format!("virtfold-{kind}-{name}"),
                "scrape_interval": often,
                "scrape_timeout": often,
                "scheme": "https",
                "honor_labels": true,
                "authorization": {"credentials_file": data.join("token")},
                "tls_config": {"ca_file": cluster.data.join("pki/ca.crt"), "server_name": name},
                "static_configs": [{"targets": [format!("127.0.0.1:{port}")], "labels": {"exporter": name}}],
            })
        };
        let other = |(port, path): &(u16, &str)| json!({"job_name": path, "metrics_path": path, "static_configs": [{"targets": [format!("127.0.0.1:{port}")]}]});
        let jobs: Vec<Value> =
            exporters(cluster, first)?.into_iter().map(job).chain(others.iter().map(other)).collect();
        let config = json!({
            "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "2s"},
            "rule_files": [root().join("monitoring/rules.yaml")],
            "scrape_configs": jobs,
        });
        // JSON is YAML.
        let file = data.join("prometheus.yaml");
        fs::write(&file, config.to_string())?;
        let mut command = Command::new("prometheus");
        command
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", data.join("tsdb").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .arg("--enable-feature=exemplar-storage")
            .arg("--log.level=warn");
        let process = Process::start(&data, "prometheus", &mut command)?;
        let prometheus = Self { web: Web::new(&format!("http://127.0.0.1:{port}"))?, process, _janitor: janitor };
        prometheus.process.ready("Prometheus", READY, || {
            Ok(prometheus.query("vector(1)").map(|_| ()).map_err(|e| format!("{e:#}")))
        })?;
        Ok(prometheus)
    }

    /// The answer to a query, now.
    pub fn query(&self, query: &str) -> Result<Vec<Series>> {
        self.process.check()?;
        let path = format!("/api/v1/query?query={}", encoded(query));
        let answer = self.web.get(&path).with_context(|| format!("ask for {query}"))?.unwrap_or_default();
        if answer["status"] != "success" {
            bail!("{query}: {answer}");
        }
        let number = |v: &Value| v[1].as_str().and_then(|v| v.parse().ok());
        let result = &answer["data"]["result"];
        if answer["data"]["resultType"] == "scalar" {
            let value = number(result).context("a scalar is a number")?;
            return Ok(vec![Series { labels: BTreeMap::new(), value }]);
        }
        let series = |s: &Value| {
            let labels = s["metric"].as_object().into_iter().flatten();
            let labels = labels.map(|(k, v)| (k.clone(), v.as_str().unwrap_or_default().to_owned())).collect();
            Some(Series { labels, value: number(&s["value"])? })
        };
        result.as_array().into_iter().flatten().map(|s| series(s).with_context(|| format!("{query}: {s}"))).collect()
    }

    /// The one value that a query has. One that failed to be scraped is waited for.
    pub fn value(&self, query: &str) -> Result<f64> {
        let all = self.wait(query, AGAIN, |all| all.len() == 1)?;
        Ok(all.first().with_context(|| query.to_owned())?.value)
    }

    /// Waits until a query has an answer that is as wanted.
    pub fn wait(&self, query: &str, limit: Duration, good: impl Fn(&[Series]) -> bool) -> Result<Vec<Series>> {
        wait::until(query, limit, || {
            let all = self.query(query)?;
            Ok(if good(&all) { Ok(all) } else { Err(format!("{all:?}")) })
        })
    }

    /// The targets that it cannot scrape, and why.
    pub fn failing(&self) -> Result<Vec<String>> {
        let answer = self.web.get("/api/v1/targets?state=active")?.unwrap_or_default();
        let all = answer["data"]["activeTargets"].as_array().cloned().unwrap_or_default();
        Ok(all
            .iter()
            .filter(|t| t["health"] != "up")
            .map(|t| format!("{}: {}", t["scrapeUrl"], t["lastError"]))
            .collect())
    }

    /// The exemplars of the last minutes of a query.
    pub fn exemplars(&self, query: &str) -> Result<Vec<Value>> {
        let path = format!("/api/v1/query_exemplars?query={}", encoded(query));
        let answer = self.web.get(&path)?.unwrap_or_default();
        Ok(answer["data"].as_array().cloned().unwrap_or_default())
    }

    /// The rules that cannot be evaluated, and why.
    pub fn broken_rules(&self) -> Result<Vec<String>> {
        let answer = self.web.get("/api/v1/rules")?.unwrap_or_default();
        let groups = answer["data"]["groups"].as_array().cloned().unwrap_or_default();
        let rules = groups.iter().flat_map(|g| g["rules"].as_array().cloned().unwrap_or_default());
        Ok(rules.filter(|r| r["health"] != "ok").map(|r| format!("{}: {}", r["name"], r["lastError"])).collect())
    }
}

/// For a query string.
fn encoded(text: &str) -> String {
    text.bytes()
        .map(|b| if b.is_ascii_alphanumeric() { char::from(b).to_string() } else { format!("%{b:02X}") })
        .collect()
}
