//! Launchers as processes of their own, with a real QEMU and a real guest (emulated, so that every machine can run
//! them). The guest is the one that `guest/build` makes.

#![allow(clippy::unwrap_used, clippy::expect_used, unsafe_code, missing_docs)]

mod support;

mod accelerator;
mod endings;
mod guest;
mod network;
mod starts;
