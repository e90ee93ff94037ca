//! The direction of dependencies, and that a wrong one is noticed.

use chaos_tests::rules::{edges, edges::Edge, root};

/// Edges that somebody will want one day. Each must be refused.
const MUTANTS: &[(&str, &str)] = &[
    ("state", "tokio"),
    ("state", "kube"),
    ("state", "k8s-openapi"),
    ("state", "tonic"),
    ("state", "proto"),
    ("state", "telemetry"),
    ("state", "tracing"),
    ("state", "uuid"),
    ("api", "state"),
    ("api", "k8s-openapi"),
    ("proto", "telemetry"),
    ("telemetry", "api"),
    ("reconcilers", "gateway"),
    ("reconcilers", "node-agent"),
    ("reconcilers", "launcher"),
    ("reconcilers", "embedded"),
    ("gateway", "reconcilers"),
    ("gateway", "embedded"),
    ("node-agent", "launcher"),
    ("node-agent", "reconcilers"),
    ("node-agent", "embedded"),
    ("launcher", "node-agent"),
    ("launcher", "embedded"),
    ("embedded", "gateway"),
    ("embedded", "node-agent"),
    ("embedded", "cli"),
    ("launcher", "openssl-sys"),
    ("embedded", "aws-lc-rs"),
    ("a-new-crate", "api"),
];

#[test]
fn dependencies_point_one_way() {
    let edges = edges::of_workspace().unwrap();
    assert_eq!(edges::violations(&edges), Vec::<String>::new());
}

#[test]
fn every_forbidden_edge_is_noticed() {
    for (from, to) in MUTANTS {
        assert_eq!(edges::violations(&[Edge::normal(from, to)]).len(), 1, "'{from}' -> '{to}' went unnoticed");
    }
}

#[test]
fn tests_may_use_more_than_the_product() {
    let dev = |from: &str, to: &str| Edge { from: from.into(), to: to.into(), kind: edges::Kind::Dev };
    assert!(edges::violations(&[dev("reconcilers", "embedded")]).is_empty());
    assert_eq!(edges::violations(&[dev("reconcilers", "gateway"), dev("state", "embedded")]).len(), 2);
}

#[test]
fn the_machines_are_pure() {
    let tree = edges::tree_of_state().unwrap();
    assert!(tree.contains("api v"), "cargo tree shows no 'api' below 'state':\n{tree}");
    assert_eq!(edges::impurities(&tree), Vec::<String>::new());
    assert_eq!(edges::impurities("state v0\ntokio v1.54.0\nfutures-util v0.3\nserde v1\nkube-core v5").len(), 3);
}

#[test]
fn one_tls_provider_and_no_system_library() {
    let lock = std::fs::read_to_string(root().join("Cargo.lock")).unwrap();
    assert_eq!(edges::forbidden_in_lock(&lock), Vec::<String>::new());
    assert_eq!(edges::forbidden_in_lock("[[package]]\nname = \"openssl-sys\"\n").len(), 1);
}
