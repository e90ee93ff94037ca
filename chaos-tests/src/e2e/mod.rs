//! End-to-end tests: the real binary, real etcd, real guests.
//!
//! One [`cluster::Cluster`] serves many tests; a guest that was booted serves as many assertions as it can. Nothing sleeps for
//! a condition: [`wait::until`] asks again and again until a deadline, and says what it saw last. Processes are hurt by
//! their id alone, and [`leaks`] tells what a VM left behind.

pub mod browser;
pub mod cluster;
pub mod console;
pub mod jaeger;
pub mod kinds;
pub mod kubectl;
pub mod leaks;
pub mod manifest;
pub mod process;
pub mod prometheus;
pub mod vm;
pub mod wait;
pub mod web;
