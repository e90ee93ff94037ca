//! Which controller a node believes.
//!
//! The epoch is the resourceVersion of the Lease write that acquired leadership, so no two leaders share one. What was
//! accepted is on disk before anything is done for it.
//!
//! | the Hello's epoch | instance | then |
//! |---|---|---|
//! | higher than remembered | any | accepted |
//! | equal | the same | accepted; the session is replaced |
//! | equal | another | the Lease decides |
//! | lower | any | the Lease decides |
//! | nothing is remembered | any | the Lease decides |
//!
//! The Lease decides by its holder, read live: a process acquires it at most once, so a holder with this instance is the
//! leader, whatever the numbers say (the Lease was deleted, the store restored: the memory is overwritten). No answer: no.

use crate::{Epoch, LeaderInstance};
use serde::{Deserialize, Serialize};

/// What a node remembers of the leader that it last accepted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Epoch.
    pub epoch: Epoch,
    /// Process.
    pub leader: LeaderInstance,
}

/// How a controller presents itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Epoch.
    pub epoch: Epoch,
    /// Process.
    pub leader: LeaderInstance,
    /// Versions of the protocol that it speaks: lowest.
    pub proto_min: u32,
    /// And highest.
    pub proto_max: u32,
}

/// What a live read of the Lease said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum LeaseSeen {
    /// Somebody holds it.
    HeldBy(LeaderInstance),
    /// There is none, or it has no holder.
    Nobody,
    /// No answer.
    Unreadable(String),
}

/// What becomes of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Admission {
    /// It stands and replaces the one before; this version of the protocol is spoken.
    Accept {
        /// Version.
        proto: u32,
    },
    /// A live read of the Lease decides.
    AskLease,
    /// It does not stand.
    Refuse(String),
}

/// Decides as far as it is possible without the Lease. `ours` are the versions of the protocol that this build speaks.
pub fn admit(memory: Option<&Memory>, hello: &Hello, ours: (u32, u32)) -> Admission {
    if hello.epoch == Epoch(0) || hello.leader.is_empty() {
        return Admission::Refuse("a Hello without epoch or instance".into());
    }
    let proto = match speak(hello, ours) {
        Ok(p) => p,
        Err(why) => return Admission::Refuse(why),
    };
    match memory {
        Some(m) if hello.epoch > m.epoch || (hello.epoch == m.epoch && hello.leader == m.leader) => {
            Admission::Accept { proto }
        }
        Some(_) | None => Admission::AskLease,
    }
}

/// Decides by the Lease.
pub fn admit_by_lease(memory: Option<&Memory>, hello: &Hello, lease: &LeaseSeen, ours: (u32, u32)) -> Admission {
    match (admit(memory, hello, ours), lease) {
        (Admission::AskLease, LeaseSeen::HeldBy(holder)) if *holder == hello.leader => match speak(hello, ours) {
            Ok(proto) => Admission::Accept { proto },
            Err(why) => Admission::Refuse(why),
        },
        (Admission::AskLease, LeaseSeen::HeldBy(holder)) => Admission::Refuse(format!(
            "the Lease is held by {holder}, not by {}, which came with epoch {}",
            hello.leader, hello.epoch
        )),
        (Admission::AskLease, LeaseSeen::Nobody) => Admission::Refuse("nobody holds the Lease".into()),
        (Admission::AskLease, LeaseSeen::Unreadable(why)) => {
            Admission::Refuse(format!("the Lease has to decide and cannot be read: {why}"))
        }
        (decided @ (Admission::Accept { .. } | Admission::Refuse(_)), _) => decided,
    }
}

fn speak(hello: &Hello, ours: (u32, u32)) -> Result<u32, String> {
    let best = hello.proto_max.min(ours.1);
    if best < hello.proto_min.max(ours.0) {
        return Err(format!(
            "no common protocol version: {} to {} here, {} to {} there",
            ours.0, ours.1, hello.proto_min, hello.proto_max
        ));
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: (u32, u32) = (1, 2);

    fn hello(epoch: u64, leader: &str) -> Hello {
        Hello { epoch: Epoch(epoch), leader: leader.into(), proto_min: 1, proto_max: 1 }
    }

    fn memory(epoch: u64, leader: &str) -> Option<Memory> {
        Some(Memory { epoch: Epoch(epoch), leader: leader.into() })
    }

    /// With a Lease that A holds.
    fn decide(memory: Option<Memory>, hello: &Hello, lease: &LeaseSeen) -> bool {
        matches!(admit_by_lease(memory.as_ref(), hello, lease, OURS), Admission::Accept { .. })
    }

    #[test]
    fn every_hello() {
        let a = LeaseSeen::HeldBy("A".into());
        let silent = LeaseSeen::Unreadable("timeout".into());
        for (memory, hello, by_a, unread, asks) in [
            (memory(5, "B"), hello(6, "A"), true, true, false),
            (memory(5, "A"), hello(5, "A"), true, true, false),
            // The same epoch from two processes: a restored store, or a lie.
            (memory(5, "B"), hello(5, "A"), true, false, true),
            (memory(5, "A"), hello(5, "B"), false, false, true),
            // A deposed leader; and the real one after the Lease was deleted or the store restored.
            (memory(5, "A"), hello(4, "B"), false, false, true),
            (memory(5, "B"), hello(4, "A"), true, false, true),
            // A wiped disk admits nobody unasked.
            (None, hello(9, "A"), true, false, true),
            (None, hello(9, "B"), false, false, true),
        ] {
            assert_eq!(admit(memory.as_ref(), &hello, OURS) == Admission::AskLease, asks, "{memory:?} {hello:?}");
            assert_eq!(decide(memory.clone(), &hello, &a), by_a, "{memory:?} {hello:?}");
            assert_eq!(decide(memory.clone(), &hello, &silent), unread, "{memory:?} {hello:?}");
            assert_eq!(decide(memory.clone(), &hello, &LeaseSeen::Nobody), unread, "{memory:?} {hello:?}");
        }
    }

    #[test]
    fn a_common_version_is_spoken_or_nothing() {
        let of =
            |min, max| admit(memory(1, "A").as_ref(), &Hello { proto_min: min, proto_max: max, ..hello(2, "A") }, OURS);
        assert_eq!(of(1, 1), Admission::Accept { proto: 1 });
        assert_eq!(of(1, 9), Admission::Accept { proto: 2 });
        assert!(matches!(of(3, 4), Admission::Refuse(_)));
        assert!(matches!(of(2, 1), Admission::Refuse(_)));
        assert!(matches!(admit(None, &hello(0, "A"), OURS), Admission::Refuse(_)));
        assert!(matches!(admit(None, &hello(1, ""), OURS), Admission::Refuse(_)));
    }
}
