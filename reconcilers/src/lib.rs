//! The controller process.

pub mod lease;
pub mod session;
