//! The direction of dependencies: `api` <- `state` <- everything else; components do not know each other.
//!
//! What is allowed is written down here, so that a new edge is a decision somebody made, and not an accident.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::BTreeSet;
use std::process::Command;

/// How a crate depends on another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// In the product.
    Normal,
    /// In tests and benches alone.
    Dev,
    /// In a build script.
    Build,
}

/// One crate of the workspace depends on another crate, of the workspace or from outside.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Edge {
    /// Who depends.
    pub from: String,
    /// On whom.
    pub to: String,
    /// How.
    pub kind: Kind,
}

impl Edge {
    /// An edge in the product.
    pub fn normal(from: &str, to: &str) -> Self {
        Self { from: from.into(), to: to.into(), kind: Kind::Normal }
    }
}

/// Crates of the workspace and those of the workspace that they may use in the product.
const INSIDE: &[(&str, &[&str])] = &[
    ("api", &[]),
    ("proto", &["api", "state"]),
    ("telemetry", &["state"]),
    ("state", &["api"]),
    ("launcher", &["api", "state", "proto", "telemetry"]),
    ("node-agent", &["api", "state", "proto", "telemetry"]),
    ("reconcilers", &["api", "state", "proto", "telemetry"]),
    ("gateway", &["api", "state", "proto", "telemetry"]),
    ("embedded", &["api", "state", "proto", "telemetry"]),
    ("cli", &["api", "state", "proto", "telemetry", "launcher", "node-agent", "reconcilers", "gateway", "embedded"]),
    (
        "chaos-tests",
        &["api", "state", "proto", "telemetry", "embedded", "gateway", "launcher", "reconcilers", "node-agent"],
    ),
];

/// Tests may use the embedded API server and the vocabulary, whoever's tests they are.
const INSIDE_TESTS: &[&str] = &["api", "state", "proto", "telemetry", "embedded"];

/// The pure crates may use these crates from outside, and no others.
const OUTSIDE: &[(&str, &[&str])] = &[
    ("api", &["serde", "serde_json"]),
    ("state", &["serde", "serde_json", "sha1", "sha2", "crc32fast", "litemap", "zstd", "thiserror"]),
];

/// What must not be anywhere below `state`, by the beginning of the name.
const IMPURE: &[&str] = &[
    "tokio",
    "futures",
    "async-",
    "smol",
    "mio",
    "kube",
    "k8s-openapi",
    "tonic",
    "prost",
    "hyper",
    "axum",
    "tower",
    "http",
    "reqwest",
    "rustls",
    "opentelemetry",
    "tracing",
    "rand",
    "getrandom",
    "chrono",
    "jiff",
    "nix",
    "socket2",
];

/// Nothing of the workspace links these: one TLS provider, and no system library for it.
const NOWHERE: &[&str] = &["aws-lc-rs", "aws-lc-sys", "openssl", "openssl-sys", "native-tls"];

/// All that is wrong about the edges, one sentence each.
pub fn violations(edges: &[Edge]) -> Vec<String> {
    let members: BTreeSet<&str> = INSIDE.iter().map(|(name, _)| *name).collect();
    let allowed = |table: &[(&str, &'static [&'static str])], name: &str| -> Option<&'static [&'static str]> {
        table.iter().find(|(from, _)| *from == name).map(|(_, to)| *to)
    };
    let mut wrong = Vec::new();
    for edge in edges {
        let (from, to) = (edge.from.as_str(), edge.to.as_str());
        let Some(inside) = allowed(INSIDE, from) else {
            wrong.push(format!("crate '{from}' is new: say in chaos-tests/src/rules/edges.rs what it may depend on"));
            continue;
        };
        let fine = if members.contains(to) {
            inside.contains(&to)
                || (edge.kind == Kind::Dev && INSIDE_TESTS.contains(&to) && from != "api" && from != "state")
        } else if edge.kind == Kind::Normal {
            allowed(OUTSIDE, from).is_none_or(|outside| outside.contains(&to))
        } else {
            true
        };
        if !fine || NOWHERE.contains(&to) {
            wrong.push(format!("'{from}' may not depend on '{to}' ({:?})", edge.kind));
        }
    }
    wrong.dedup();
    wrong
}

/// What is wrong about the crates below `state`, as `cargo tree` names them.
pub fn impurities(tree: &str) -> Vec<String> {
    tree.lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| {
            IMPURE.iter().any(|bad| name == bad || (name.starts_with(bad) && !name.starts_with("futures-core")))
        })
        .map(|name| format!("'state' reaches '{name}'"))
        .collect()
}

/// Crates of a `Cargo.lock` that may be nowhere.
pub fn forbidden_in_lock(lock: &str) -> Vec<String> {
    lock.lines()
        .filter_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'))
        .filter(|name| NOWHERE.contains(name))
        .map(|name| format!("Cargo.lock has '{name}'"))
        .collect()
}

/// The edges of the workspace as cargo sees them.
pub fn of_workspace() -> Result<Vec<Edge>> {
    let text = cargo(&["metadata", "--format-version", "1", "--no-deps", "--offline"])?;
    let metadata: Value = serde_json::from_str(&text).context("read cargo metadata")?;
    let mut edges = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let from = package["name"].as_str().unwrap_or_default();
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let kind = match dependency["kind"].as_str() {
                Some("dev") => Kind::Dev,
                Some("build") => Kind::Build,
                _ => Kind::Normal,
            };
            let to = dependency["name"].as_str().unwrap_or_default();
            edges.push(Edge { from: from.into(), to: to.into(), kind });
        }
    }
    if edges.is_empty() {
        bail!("cargo metadata shows no dependency at all");
    }
    edges.sort();
    Ok(edges)
}

/// Everything below `state` on its own, not in the feature union of the workspace.
pub fn tree_of_state() -> Result<String> {
    cargo(&["tree", "--package", "state", "--edges", "normal", "--prefix", "none", "--offline"])
}

fn cargo(arguments: &[&str]) -> Result<String> {
    let program = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let done = Command::new(program).args(arguments).current_dir(super::root()).output().context("start cargo")?;
    if !done.status.success() {
        bail!("cargo {} failed: {}", arguments.join(" "), String::from_utf8_lossy(&done.stderr));
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}
