//! The machines: everything that virtfold decides about a VM, its VMI, its launcher pod, a node.
//!
//! A machine is a pure, total function [`Machine::step`] from what it knows and one [`Event`] to what it knows now and the
//! commands that follow. It has no clock, no randomness, no I/O, no async: time, the outcomes of its own commands and the
//! reports of node agents are events like any other. Each step folds the event into what is observed and plans from the
//! *whole* of it (level, not edge), so an event that is lost, doubled, late or out of order changes when something is done,
//! never what.
//!
//! Drivers (`reconcilers/`, `node-agent/`) feed events, write the journal and carry out commands. They decide nothing.
#![deny(clippy::wildcard_enum_match_arm)]

pub mod agent;
pub mod attach;
pub mod condition;
pub mod domain;
pub mod explain;
pub mod ids;
pub mod instancetype;
pub mod journal;
pub mod node;
pub mod object;
pub mod observe;
pub mod render;
pub mod replay;
pub mod selector;
pub mod set;
pub mod slot;
pub mod template;
pub mod time;
pub mod trace;
pub mod vm;

pub use ids::*;
/// For a few entries: a sorted list that takes no more than they do.
pub use litemap::LiteMap;
pub use time::{Millis, Timestamp};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::fmt::Debug;

/// Something that happened, and when. `at` never goes back within one cell: a driver whose clock jumps repeats the last
/// value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event<I> {
    /// When the driver saw it.
    pub at: Timestamp,
    /// What happened.
    pub input: I,
}

impl<I> Event<I> {
    /// An event.
    pub fn new(at: Timestamp, input: I) -> Self {
        Self { at, input }
    }
}

/// What every kind of cell is to its driver.
///
/// `Input` and `Command` are plain data: they go into the journal and come out of it equal, which is what replay compares.
pub trait Machine {
    /// What can happen to it.
    type Input: Clone + Debug + PartialEq + Serialize + DeserializeOwned;
    /// What it can ask for.
    type Command: Clone + Debug + PartialEq + Serialize + DeserializeOwned;

    /// It has nothing to learn from this: a driver may drop it before it is recorded. (A watch shows what a write of the cell
    /// itself has returned already.) A step would fold nothing and plan nothing. It may go over to this copy of what it knows, which the
    /// caches keep in any case.
    fn knows(&mut self, _input: &Self::Input) -> bool {
        false
    }

    /// Folds the event into what is known, then plans from the whole of it.
    fn step(&mut self, event: &Event<Self::Input>) -> Vec<Self::Command>;
}
