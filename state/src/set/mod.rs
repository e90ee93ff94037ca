//! The Set cell: one VirtualMachineInstanceReplicaSet keeps a number of equal instances.
//!
//! *What it owns:* the set's status; the existence of the instances that it controls, and their owner reference to it. *Who else
//! writes them:* users (spec, scale, deletion of single instances), the collector (deletion of what has lost its owner), and
//! the Vm cell of each instance, to which it is a bare instance like any other.
//!
//! An instance counts as long as it is neither ended nor being deleted, however long nobody has heard of its node: silence
//! starts no replacement. The number of those that count, and of those that are on their way, is held against
//! `spec.replicas`; ended ones are deleted, and what is missing is made anew.
//!
//! *Why nothing is made twice:* instance number `n` has a name derived from the set's UID and `n`, and what is made next takes the
//! lowest number whose name is free. Whoever sees less than there is collides with it, looks, and knows more. Numbers are
//! used again once their instance is gone.
//!
//! *Why nothing is destroyed by an old view:* running instances are deleted, and strangers adopted, only on a version of the set
//! that a live read (or an own write) has confirmed, and with the UID as precondition.

mod cell;
mod plan;
mod status;
mod view;

#[cfg(test)]
mod model;
#[cfg(test)]
pub(crate) mod tables;
#[cfg(test)]
mod tests;

pub use cell::{BURST, Choice, Input, Set};
pub use view::{Member, RawSet, SetStatus, SetView, Sight, member_name, usable_selector};
