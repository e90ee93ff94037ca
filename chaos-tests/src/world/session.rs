//! Sessions between a leader and node agents: messages in order each way, until the session is cut; what was on its way then
//! may have reached one side and not the other.

use super::{Action, World, api::Proc, driver::Link, heard::Inventory, mutants::Mutant, server::Seen};
use state::{
    Epoch, Key, LeaderInstance, NodeName, PodUid,
    domain::{AckResult, Domain, Instruction, Outcome},
};
use std::rc::Rc;

/// Time for an agent to answer Hello.
const HELLO: u64 = 10_000;

/// From a controller.
#[derive(Debug, Clone)]
pub enum Down {
    /// Who comes.
    Hello {
        /// Its epoch.
        epoch: Epoch,
        /// Its process.
        leader: LeaderInstance,
    },
    /// An instruction with the VMI.
    Instruct {
        /// Epoch of the leader.
        epoch: Epoch,
        /// What.
        instruction: Instruction,
        /// The VMI.
        vmi: Rc<Seen>,
    },
    /// An outcome is recorded.
    OutcomeAck {
        /// Launcher pod.
        pod: PodUid,
        /// Its sequence.
        seq: u64,
    },
}

/// From an agent.
// One at a time, never kept in bulk.
#[allow(clippy::large_enum_variant)]
#[derive(Debug, Clone)]
pub enum Up {
    /// The Hello is not accepted; the highest epoch that is known.
    Refused(Epoch),
    /// All that there is.
    Inventory {
        /// It is all.
        complete: bool,
        /// Which boot of the node.
        boot_id: String,
        /// How far the agent's watch has come.
        reflector_rv: u64,
        /// Domains.
        domains: Vec<(Key, Domain)>,
        /// Outcomes.
        outcomes: Vec<(Key, Outcome)>,
    },
    /// A changed level.
    Report(Key, Domain),
    /// How a domain ended.
    Outcome(Key, Outcome),
    /// An answer.
    Ack(String, AckResult),
}

/// One session.
#[derive(Debug, Clone)]
pub struct Session {
    /// The leader's process.
    pub controller: Proc,
    pub(super) node: usize,
    /// The agent's process, once it has heard of it.
    pub agent: Option<Proc>,
    number: Option<u64>,
    down_at: u64,
    up_at: u64,
    down_until: u64,
    up_until: u64,
    pub(super) cut: bool,
}

impl World {
    pub(super) fn node_index(&self, name: &NodeName) -> Option<usize> {
        self.nodes.iter().position(|n| n.name == *name)
    }

    /// A controller dials a node.
    pub(super) fn dial(&mut self, c: usize, name: &NodeName) {
        let me = self.proc_of(c);
        let Some(node) = self.node_index(name) else { return };
        let (epoch, leader) = (self.controllers[c].epoch, self.controllers[c].instance.clone());
        let Some(d) = self.driver(c) else { return };
        if d.links.get(name) != Some(&Link::Idle) {
            return;
        }
        let reachable = self.nodes[node].agent.is_some() && self.nodes[node].hears_controllers(self.now);
        let Some(epoch) = epoch.filter(|_| reachable) else { return self.dial_later(c, name) };
        self.next_session += 1;
        let id = self.next_session;
        let session = Session {
            controller: me,
            node,
            agent: None,
            number: None,
            down_at: 0,
            up_at: 0,
            down_until: u64::MAX,
            up_until: u64::MAX,
            cut: false,
        };
        self.sessions.insert(id, session);
        if let Some(d) = self.driver(c) {
            d.links.insert(name.clone(), Link::Dialing(id));
        }
        self.post_down(id, Down::Hello { epoch, leader });
        self.after(HELLO, Action::HelloTimeout(me, id));
    }

    pub(super) fn hello_timeout(&mut self, c: usize, id: u64) {
        let Some(node) = self.sessions.get(&id).map(|s| s.node) else { return };
        let name = self.nodes[node].name.clone();
        if self.driver(c).is_some_and(|d| d.links.get(&name) == Some(&Link::Dialing(id))) {
            self.cut(id);
        }
    }

    /// Sends by the session that stands with a node; whether there is one.
    pub(super) fn send_down(&mut self, c: usize, node: &NodeName, message: Down) -> bool {
        let Some(Link::Open(id)) = self.driver(c).and_then(|d| d.links.get(node).copied()) else { return false };
        self.post_down(id, message);
        true
    }

    fn post_down(&mut self, id: u64, message: Down) {
        let Some(who) = self.sessions.get(&id).map(|s| s.controller) else { return };
        let lag = self.hiccup(who);
        let now = self.now;
        if let Some(s) = self.sessions.get_mut(&id) {
            s.down_at = s.down_at.max(now + lag);
            let wait = s.down_at - now;
            self.after(wait, Action::Down(id, message));
        }
    }

    pub(super) fn post_up(&mut self, id: u64, message: Up) {
        let Some(node) = self.sessions.get(&id).map(|s| s.node) else { return };
        let lag = self.hiccup(Proc::Agent(node, 0));
        let now = self.now;
        if let Some(s) = self.sessions.get_mut(&id) {
            s.up_at = s.up_at.max(now + lag);
            let (wait, controller) = (s.up_at - now, s.controller);
            self.after(wait, Action::Up(controller, id, message));
        }
    }

    pub(super) fn down(&mut self, id: u64, message: Down) {
        let now = self.now;
        let Some(s) = self.sessions.get_mut(&id) else { return };
        if now > s.down_until {
            return;
        }
        let n = s.node;
        let here = self.nodes[n].agent.as_ref().map(|a| Proc::Agent(n, a.inc));
        if matches!(message, Down::Hello { .. }) {
            s.agent = here;
        }
        if here.is_none() || s.agent != here {
            return;
        }
        match message {
            Down::Hello { epoch, leader } => self.agent_hello(n, id, epoch, leader),
            Down::Instruct { epoch, instruction, vmi } => self.agent_instructed(n, id, epoch, instruction, &vmi),
            Down::OutcomeAck { pod, seq } => {
                self.agent_step(n, &pod, state::agent::Input::OutcomeAcked { seq });
            }
        }
    }

    pub(super) fn up(&mut self, c: usize, id: u64, message: Up) {
        let now = self.now;
        let Some(s) = self.sessions.get(&id) else { return };
        if now > s.up_until {
            return;
        }
        let (node, number) = (s.node, s.number);
        let name = self.nodes[node].name.clone();
        let ours = self.driver(c).and_then(|d| d.links.get(&name).copied());
        if ours != Some(Link::Dialing(id)) && ours != Some(Link::Open(id)) {
            return;
        }
        match message {
            Up::Refused(highest) => {
                self.cut(id);
                if self.controllers[c].epoch.is_some_and(|e| highest > e) {
                    self.crash_controller(c, "an agent knows a newer leader");
                }
            }
            Up::Inventory { complete, boot_id, reflector_rv, domains, outcomes } => {
                let number = match number {
                    Some(n) => Some(n),
                    None => self.session_opened(c, &name, id),
                };
                let Some(number) = number else { return };
                if let Some(s) = self.sessions.get_mut(&id) {
                    s.number = Some(number);
                }
                let heard = domains.into_iter().filter(|_| !self.is(Mutant::LevelsOnce)).collect::<Vec<_>>();
                for (key, d) in heard {
                    self.heard_domain(c, &name, key, d);
                }
                for (key, o) in outcomes {
                    self.heard_outcome(c, &name, key, o);
                }
                let boot_id = if self.is(Mutant::AgentIsBoot) { self.life_of(node) } else { boot_id };
                self.heard_inventory(c, &name, Inventory { session: number, complete, boot_id, reflector_rv });
            }
            Up::Report(key, d) => {
                self.heard_domain(c, &name, key, d);
                self.drain(c);
            }
            Up::Outcome(key, o) => {
                self.heard_outcome(c, &name, key, o);
                self.drain(c);
            }
            Up::Ack(instruction, result) => self.heard_ack(c, &name, &instruction, result),
        }
    }

    /// Breaks a session: each side learns of it in its own time, and some of what was on its way arrives all the same.
    pub(super) fn cut(&mut self, id: u64) {
        let (a, b) = (self.dice.below(60), self.dice.below(60));
        self.cut_within(id, a, b, 50);
    }

    /// Breaks all sessions of a node at once, and neither side is told before its patience is at its end.
    pub(super) fn cut_off(&mut self, node: usize) {
        let open: Vec<u64> = self.sessions.iter().filter(|(_, s)| s.node == node).map(|(id, _)| *id).collect();
        for id in open {
            self.cut_within(id, 0, 0, 10_000);
        }
    }

    fn cut_within(&mut self, id: u64, down: u64, up: u64, patience: u64) {
        let now = self.now;
        let (a, b) = (self.dice.between(1, patience), self.dice.between(1, patience));
        let Some(s) = self.sessions.get_mut(&id).filter(|s| !s.cut) else { return };
        s.cut = true;
        if self.search.is_none() {
            (s.down_until, s.up_until) = (now + down, now + up);
        }
        let controller = s.controller;
        self.after(down + a, Action::SessionEnds(id));
        self.after(up + b, Action::SessionLost(controller, id));
        self.after(120_000, Action::SessionForgotten(id));
    }

    /// The agent's side learns that a session has ended.
    pub(super) fn session_ends(&mut self, id: u64) {
        let Some(s) = self.sessions.get(&id) else { return };
        let n = s.node;
        let here = self.nodes[n].agent.as_ref().map(|a| Proc::Agent(n, a.inc));
        if here.is_some() && s.agent == here {
            self.agent_closed(n, id);
        }
    }

    /// The controller's side learns that a session has ended.
    pub(super) fn session_lost(&mut self, c: usize, id: u64) {
        let Some(s) = self.sessions.get(&id) else { return };
        let (number, name) = (s.number, self.nodes[s.node].name.clone());
        match (self.driver(c).and_then(|d| d.links.get(&name).copied()), number) {
            (Some(Link::Open(open)), Some(number)) if open == id => self.session_closed(c, &name, number),
            (Some(Link::Dialing(open)), _) if open == id => self.dial_later(c, &name),
            // The node's address went: the machine was not told yet.
            (None, Some(number)) => self.session_closed(c, &name, number),
            _ => {}
        }
    }
}
