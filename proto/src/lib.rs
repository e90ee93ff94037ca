//! gRPC messages and services: controller to node agent (`agent`), node agent to launcher (`launcher`), gateway to controller
//! (`controller`).
//!
//! Generated from `proto/*.proto` by protox and tonic; the rules that go with the messages are in `state/` and in
//! `ARCHITECTURE.md`.

pub mod convert;
pub mod https;
pub mod transport;

#[allow(missing_docs, clippy::all, clippy::unwrap_used, clippy::large_futures)]
mod generated {
    pub mod agent {
        pub mod v1 {
            tonic::include_proto!("virtfold.agent.v1");
        }
    }
    pub mod controller {
        pub mod v1 {
            tonic::include_proto!("virtfold.controller.v1");
        }
    }
    pub mod launcher {
        pub mod v1 {
            tonic::include_proto!("virtfold.launcher.v1");
        }
    }
}

/// The session between controller and node agent, and the verbs and streams of the gateway.
pub use generated::agent::v1 as agent;
/// What a controller that leads answers.
pub use generated::controller::v1 as controller;
/// The command server of one launcher.
pub use generated::launcher::v1 as launcher;

/// The range of protocol versions that this build speaks, as (lowest, highest).
pub const PROTOCOL: (u32, u32) = (1, 1);
