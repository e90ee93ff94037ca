//! Admission and the aggregated API, against the embedded API server and a node agent made for the purpose.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod admission;
mod cluster;
mod fuzz;
mod patterns;
mod presets;
mod specs;
mod streams;
mod support;
mod verbs;
mod virtctl;
