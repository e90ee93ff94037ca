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
//! *Why there are never more than were ever wanted:* a set of `n` has `n` places, each with a name derived from the set's UID and
//! the place's number, and what is made is made in a free place. Whoever knows too little collides with what is there, looks, and
//! knows more; so does a creation that a dead controller sent. The price: an instance that is over, or is being deleted, holds its
//! place until it is gone, and what makes up for it waits for that. (A name that somebody else's instance has is made up for by a
//! further place.) Refused: a replacement under another name at once. No API server can be told to make an object only if another
//! one is not there, so two of them would run whenever a write is late.
//!
//! *Why nothing is destroyed by an old view:* running instances are deleted, and strangers adopted, only on a version of the set
//! that a live read (or an own write) has confirmed, and with the UID as precondition; and before one of too many is deleted, all
//! are read live, so that one that ended unheard is not made up for by one that runs.

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
