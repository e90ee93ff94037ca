//! The agent as a process sees it: a real API server, real TLS, real network namespaces; launchers are modelled.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod authority;
mod network;
mod outcomes;
mod sessions;
mod starts;
mod support;
mod verbs;
