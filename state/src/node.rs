//! The Node cell: is a node alive, can its agent be asked, is it fenced, may launchers be placed there?
//!
//! It owns one thing in the API: it takes the label `kubevirt.io/schedulable` away from a node whose agent cannot be asked,
//! and gives it back to one whose agent answers. The agent sets it at first. What it finds out goes to the Vm cells as a [`NodeFact`].

use crate::{
    Event, Machine, Millis, NodeName, Timestamp, Uid,
    object::{Class, CommandId, Kind, ObjectRef, Settled},
    observe::NodeView,
    slot::Slot,
    vm::{Command, NodeFact, Patch},
};
use api::names;
use serde::{Deserialize, Serialize};
use serde_json::json;

#[cfg(test)]
pub(crate) mod tables;

/// How long an agent may be silent before people are told and no new launchers are placed on its node.
pub const SILENCE: Millis = Millis::secs(60);

/// What can happen to a Node cell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Input {
    /// The Node was seen; `live` by a quorum read.
    Observed {
        /// The Node.
        node: NodeView,
        /// By a quorum read.
        live: bool,
    },
    /// The Node object was deleted. That proves nothing about what runs there.
    Gone(Uid),
    /// A list does not have it, perhaps of a server that is behind: to be asked.
    Vanished(Uid),
    /// The session with its agent began (its number) or ended.
    Session(Option<u64>),
    /// A command of ours ended.
    Settled {
        /// Which.
        id: CommandId,
        /// How.
        result: Settled<NodeView>,
    },
    /// A deadline has come.
    Elapsed,
}

/// One Node.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Node {
    name: NodeName,
    now: Timestamp,
    node: Slot<NodeView>,
    session: Option<u64>,
    silent_since: Option<Timestamp>,
    /// The view by which the taint was confirmed.
    confirmed: Option<NodeView>,
    next_id: u64,
    armed: Option<Timestamp>,
}

impl Node {
    /// A node of which nothing is known yet.
    pub fn new(name: NodeName) -> Self {
        Self {
            name,
            now: Timestamp::default(),
            node: Slot::default(),
            session: None,
            silent_since: None,
            confirmed: None,
            next_id: 0,
            armed: None,
        }
    }

    /// Where its agent listens.
    pub fn agent_address(&self) -> Option<&str> {
        self.node.get()?.agent_address.as_deref()
    }

    /// What the Vm cells need to know.
    pub fn fact(&self) -> NodeFact {
        let view = self.node.get();
        NodeFact {
            node: self.name.clone(),
            // A Node object that is gone, or that nobody reports on, is no evidence against an agent that answers.
            ready: view.and_then(|n| n.ready).unwrap_or(true),
            session: self.session,
            silent_since: self.silent_since,
            fenced: self
                .confirmed
                .as_ref()
                .filter(|c| {
                    c.out_of_service && c.ready == Some(false) && view.is_some_and(|v| v.meta.uid == c.meta.uid)
                })
                .map(|c| c.meta.rv),
            gone: self.node.is_absent(),
        }
    }

    fn fold(&mut self, input: &Input) {
        match input {
            Input::Observed { node, live } => {
                self.node.fold(node.clone(), *live);
                if *live {
                    self.confirmed = Some(node.clone());
                }
                if !node.out_of_service || node.ready != Some(false) {
                    self.confirmed = None;
                }
                if self.session.is_none() {
                    self.silent_since.get_or_insert(self.now);
                }
            }
            Input::Gone(uid) => {
                self.node.gone(uid);
                self.confirmed = None;
            }
            Input::Vanished(uid) if self.node.uid() == *uid => self.node.doubt(),
            Input::Vanished(_) => {}
            Input::Session(s) => {
                self.session = *s;
                self.silent_since = if s.is_some() { None } else { Some(self.silent_since.unwrap_or(self.now)) };
            }
            Input::Settled { id, result } => {
                if !self.node.land(*id) {
                    return;
                }
                match result {
                    Settled::Applied(Some(n)) => {
                        self.node.succeeded();
                        self.fold(&Input::Observed { node: n.clone(), live: true });
                    }
                    Settled::Gone => {
                        if self.node.not_found() {
                            self.confirmed = None;
                        }
                    }
                    Settled::Applied(None) | Settled::Conflict | Settled::Unknown | Settled::Acked(_) => {
                        self.node.failed(self.now, None);
                    }
                    Settled::Refused(r) | Settled::Failed(r) => self.node.failed(self.now, Some(r.clone())),
                    Settled::Busy { after } => self.node.hold(self.now.after(*after)),
                }
            }
            Input::Elapsed => self.armed = None,
        }
    }

    fn plan(&mut self) -> Vec<Command> {
        let before = self.armed.take().filter(|t| *t > self.now);
        let mut out = vec![];
        let mut wake = None;
        if let Some(view) = self.node.get().cloned() {
            let silent = self.silent_since.map(|t| t.after(SILENCE));
            let answers = self.session.is_some();
            // A node that is not ready gets no pods anyway; one whose agent answers keeps its label.
            let dead = !answers && (view.ready == Some(false) || silent.is_some_and(|t| self.now >= t));
            // The label that this cell took away, perhaps by a write that landed late: the agent asserts it but once.
            let back = answers && view.schedulable == Some(false);
            wake = silent.filter(|t| *t > self.now && view.schedulable == Some(true));
            let target = ObjectRef {
                kind: Kind::Node,
                namespace: String::new(),
                name: self.name.0.clone(),
                uid: view.meta.uid.clone(),
            };
            let suspect = view.out_of_service && view.ready == Some(false);
            let confirmed = self.confirmed.as_ref().is_some_and(|c| c.meta.rv >= view.meta.rv);
            if !self.node.is_free(self.now) {
                wake = self.node.free_at(self.now).or(wake);
            } else if self.node.is_doubted() || (suspect && self.fact().fenced.is_none() && !confirmed) {
                let id = self.id();
                out.push(Command::Confirm { id, target });
            } else if back || (dead && view.schedulable == Some(true)) {
                let (value, why) = if back { ("true", "schedulable") } else { ("false", "unschedulable") };
                let body = json!({"metadata": {"uid": view.meta.uid, "labels": {names::LABEL_SCHEDULABLE: value}}});
                let id = self.id();
                let patch = Patch { target, status: false, class: Class::Urgent, why: why.into(), body };
                out.push(Command::Patch { id, patch });
            }
        }
        self.armed = wake;
        if let Some(at) = wake.filter(|_| wake != before) {
            out.push(Command::Wake { at });
        }
        out
    }

    fn id(&mut self) -> CommandId {
        self.next_id += 1;
        let id = CommandId(self.next_id);
        self.node.depart(id);
        id
    }
}

impl Machine for Node {
    type Input = Input;
    type Command = Command;

    fn step(&mut self, event: &Event<Input>) -> Vec<Command> {
        self.now = self.now.max(event.at);
        self.fold(&event.input);
        self.plan()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::{ResourceVersion, observe::Meta};

    fn view(rv: u64, ready: bool, tainted: bool) -> NodeView {
        NodeView {
            meta: Meta { uid: "n".into(), rv: ResourceVersion(rv), name: "n1".into(), ..Meta::default() },
            ready: Some(ready),
            out_of_service: tainted,
            schedulable: Some(true),
            agent_address: None,
        }
    }

    fn see(n: &mut Node, at: u64, v: NodeView, live: bool) -> Vec<Command> {
        n.step(&Event::new(Timestamp(at), Input::Observed { node: v, live }))
    }

    #[test]
    fn a_silent_agent_loses_the_label_after_a_minute() {
        let mut n = Node::new("n1".into());
        let out = see(&mut n, 0, view(1, true, false), false);
        assert_eq!(out, [Command::Wake { at: Timestamp(60_000) }]);
        n.step(&Event::new(Timestamp(10), Input::Session(Some(1))));
        assert_eq!(n.step(&Event::new(Timestamp(90_000), Input::Elapsed)), []);
        n.step(&Event::new(Timestamp(100_000), Input::Session(None)));
        let out = n.step(&Event::new(Timestamp(160_000), Input::Elapsed));
        assert!(matches!(&out[..], [Command::Patch { patch, .. }] if patch.why == "unschedulable"), "{out:?}");
    }

    #[test]
    fn a_node_whose_agent_answers_gets_its_label_back() {
        // A write of ours that took the label away landed after the agent had come back and asserted it.
        let mut n = Node::new("n1".into());
        see(&mut n, 0, view(1, true, false), false);
        n.step(&Event::new(Timestamp(10), Input::Session(Some(1))));
        let without = NodeView { schedulable: Some(false), ..view(2, true, false) };
        let out = see(&mut n, 20, without, false);
        assert!(matches!(&out[..], [Command::Patch { patch, .. }] if patch.why == "schedulable"), "{out:?}");
        // Not ready, but the agent answers: the scheduler knows that by itself.
        let mut n = Node::new("n1".into());
        n.step(&Event::new(Timestamp(10), Input::Session(Some(1))));
        assert_eq!(see(&mut n, 20, view(1, false, false), false), []);
    }

    #[test]
    fn the_taint_fences_only_with_a_live_read_of_a_node_that_is_not_ready() {
        let mut n = Node::new("n1".into());
        see(&mut n, 0, view(1, true, true), true);
        assert_eq!(n.fact().fenced, None, "a node that is ready is not fenced by a taint");
        let out = see(&mut n, 1, view(2, false, true), false);
        let id = match &out[..] {
            [Command::Confirm { id, .. }, ..] => *id,
            other => panic!("{other:?}"),
        };
        assert_eq!(n.fact().fenced, None, "a cache is not enough");
        let result = Settled::Applied(Some(view(2, false, true)));
        n.step(&Event::new(Timestamp(2), Input::Settled { id, result }));
        assert_eq!(n.fact().fenced, Some(ResourceVersion(2)));
        n.step(&Event::new(Timestamp(3), Input::Gone("n".into())));
        assert_eq!(n.fact().fenced, None, "a deleted Node object proves nothing");
        assert!(n.fact().gone, "but people are told of it");
    }

    #[test]
    fn a_list_without_a_node_is_a_reason_to_ask_and_nothing_more() {
        let confirm = |out: &[Command]| match out {
            [Command::Confirm { id, .. }, ..] => *id,
            other => panic!("{other:?}"),
        };
        let mut n = Node::new("n1".into());
        let at = NodeView { agent_address: Some("192.0.2.1:1".into()), ..view(5, true, false) };
        see(&mut n, 0, at.clone(), false);
        n.step(&Event::new(Timestamp(1), Input::Session(Some(1))));
        let id = confirm(&n.step(&Event::new(Timestamp(2), Input::Vanished("n".into()))));
        assert!(!n.fact().gone && n.agent_address().is_some(), "its session stays meanwhile");
        n.step(&Event::new(Timestamp(3), Input::Settled { id, result: Settled::Applied(Some(at)) }));
        assert!(!n.fact().gone, "a server that is behind had answered");
        assert_eq!(n.step(&Event::new(Timestamp(4), Input::Elapsed)), []);
        // Another node of that name is meant.
        assert_eq!(n.step(&Event::new(Timestamp(5), Input::Vanished("older".into()))), []);
        let id = confirm(&n.step(&Event::new(Timestamp(6), Input::Vanished("n".into()))));
        n.step(&Event::new(Timestamp(7), Input::Settled { id, result: Settled::Gone }));
        assert!(n.fact().gone);
        // The node registers again.
        let mut again = view(9, true, false);
        again.meta.uid = "n-2".into();
        see(&mut n, 8, again, false);
        assert!(!n.fact().gone);
    }
}
