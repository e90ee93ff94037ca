//! The Agent cell: one launcher pod, and the one domain that it may run, on one node; and who may command the node
//! ([`session`]).
//!
//! # What it owns
//! Nothing in the API but the pod's condition `kubevirt.io/virtual-machine-unpaused`. It decides what a launcher is told, what
//! the controller is told, and how long an outcome is kept. Guests belong to their launchers: the cell can be thrown away and
//! made anew at any time, and learns from the launcher what there is.
//!
//! # Who may do what
//! | | may | never |
//! |---|---|---|
//! | with a controller | what it instructs, if the newest VMI known says so | start on an older VMI |
//! | without one | shut down what it *sees* being deleted; destroy a stray; keep outcomes | start, resume, act on absence |
//!
//! That a VMI is missing from the watch means nothing: a label was edited, a server was stale, a store was restored. It is a
//! reason for one live read, and only a VMI that is read to be final, or to name other pods and not this one, makes a stray.
//!
//! # What may be lost, doubled or late
//! Any event. Instructions of a session that closed are void unless they have been sent to the launcher, whose latch makes
//! twice once. A launcher's word is taken by its sequence, a VMI by its resourceVersion.
//!
//! # Files
//! [`vmi`] what a VMI authorises; [`session`] which controller is believed; [`event`] events and commands; [`cell`] what is known;
//! [`plan`] what follows from it.

pub mod cell;
pub mod event;
pub mod plan;
pub mod session;
pub mod vmi;

#[cfg(test)]
mod tests;

pub use cell::Agent;
pub use event::{Command, Confirmed, Input};
pub use session::{Admission, Hello, LeaseSeen, Memory};
pub use vmi::VmiFacts;
