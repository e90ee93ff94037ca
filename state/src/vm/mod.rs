//! The Vm cell: one VirtualMachine, or one bare VirtualMachineInstance, with its VMI, its launcher pod and what the node
//! says about its domain.
//!
//! # What it owns
//! VM status (but for the requests, which the gateway appends and this cell removes), the VMI, the launcher pod, the
//! ControllerRevision. `spec.runStrategy` is touched only to carry out a start of a halted VM.
//!
//! # What may be lost, doubled or late
//! Any event. The plan is made from the whole of what is observed, so that a lost event is made up for by the next one, a
//! doubled one changes nothing, and a late one is older than what is known and ignored ([`crate::slot`]). Commands may be
//! carried out and their answer lost: the next command on that object is a live read.
//!
//! # Why a domain cannot run twice
//! The VMI authorises: `status.activePods` names the one pod (whose name is a hash of the VMI's UID) and its node, and is
//! written before the instruction is sent. The launcher's latch starts one domain in its life. The VMI ends once there is
//! evidence that the domain has stopped ([`verdict`]), and a VMI that ended is never started again.
//!
//! # Files
//! [`cell`] state and folding; [`plan`] the order of decisions; [`strategy`] shall it run; [`revision`] what it
//! was made from; [`phase`] where the VMI stands;
//! [`verdict`] evidence; [`pod`] pod and instructions; [`vmi_status`], [`vm_status`] what is written; [`teardown`] finalizers;
//! `following` annotations that follow the
//! template; [`waits`] what it waits for, in words; [`facts`] what a history is made from.

pub mod cell;
pub mod command;
pub mod facts;
mod following;
pub mod pattern;
pub mod phase;
pub mod plan;
pub mod pod;
pub mod printable;
pub mod revision;
pub mod strategy;
pub mod teardown;
pub mod verdict;
pub mod vm_status;
pub mod vmi_status;
pub mod waits;

// The benchmarks run on it, too.
#[cfg(any(test, feature = "model"))]
#[doc(hidden)]
#[allow(missing_docs)]
pub mod model;
#[cfg(test)]
mod tests;

pub use cell::Vm;
pub use command::{
    ClusterConfig, Command, Fact, Input, Interest, NodeFact, Note, Order, Patch, Recipe, Report, Sight, Source,
};
