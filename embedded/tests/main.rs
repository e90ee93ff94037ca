//! The embedded cluster's API server, tested from outside: stores, `kube` clients in the same process, kubectl over HTTPS.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]
#![recursion_limit = "256"]

mod client;
mod crd;
mod eventually;
mod extensions;
mod fuzz;
mod http;
mod kubectl;
mod pods;
mod room;
mod stores;
mod support;
