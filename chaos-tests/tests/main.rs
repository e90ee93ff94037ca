//! The rules of the repository, and end-to-end tests on real processes and guests.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod apiserver;
mod conformance;
mod e2e;
mod edges;
mod guest;
mod harness;
mod kubernetes;
mod manifests;
mod plans;
mod rounds;
mod search;
#[cfg(feature = "sim")]
mod sim;
mod tidy;
mod world;
