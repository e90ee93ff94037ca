//! The Node cells of a controller, the ways to its agents, and what agents say: kept by node, and told to the machines that
//! are interested.

use super::{
    Action, World,
    api::{Said, Then, Verb},
    driver::{CellId, Driver, Link},
    server::Res,
};
use embedded::semantics::Status;
use state::{
    Event, Key, Machine, NodeName, PodUid, ResourceVersion, Timestamp,
    domain::{AckResult, Domain, Outcome},
    node,
    object::Settled,
    vm::{Command, Fact, Input, Interest, NodeFact, Report},
};
use std::{collections::BTreeMap, sync::Arc};

/// What an agent said about its inventory last.
#[derive(Debug, Clone)]
pub(super) struct Inventory {
    pub session: u64,
    pub complete: bool,
    pub boot_id: String,
    pub reflector_rv: u64,
}

impl Inventory {
    pub(super) fn report(&self, node: &NodeName) -> Report {
        Report::Inventory {
            node: node.clone(),
            session: self.session,
            complete: self.complete,
            reflector_rv: ResourceVersion(self.reflector_rv),
            boot_id: self.boot_id.clone(),
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct NodeCell {
    machine: Box<node::Node>,
    told: Option<NodeFact>,
    inventory: Option<Inventory>,
    domains: BTreeMap<PodUid, (Key, Arc<Domain>)>,
    pub(super) outcomes: BTreeMap<PodUid, (Key, Outcome)>,
}

impl World {
    pub(super) fn node_step(&mut self, c: usize, name: &NodeName, input: node::Input) {
        let at = Timestamp(self.now);
        let Some(d) = self.driver(c) else { return };
        let cell = d.nodes.entry(name.clone()).or_insert_with(|| NodeCell {
            machine: Box::new(node::Node::new(name.clone())),
            told: None,
            inventory: None,
            domains: BTreeMap::new(),
            outcomes: BTreeMap::new(),
        });
        let commands = cell.machine.step(&Event::new(at, input));
        let fact = cell.machine.fact();
        let changed = cell.told.as_ref() != Some(&fact);
        cell.told = Some(fact.clone());
        let reachable = cell.machine.agent_address().is_some();
        self.steps += 1;
        self.mark(&[4, c as u64, commands.len() as u64]);
        self.follow_address(c, name, reachable);
        if changed {
            self.say(|| format!("controller {c} node {name}: {fact:?}"));
            self.tell(c, &(String::new(), Interest::Node(name.clone())), &Input::Configured(Fact::Node(fact)));
        }
        let me = self.proc_of(c);
        for command in commands {
            let cell = CellId::Node(name.clone());
            match command {
                Command::Wake { at } => self.arm(c, cell, at.0),
                Command::Patch { id, patch } => {
                    if self.controllers[c].leads(self.now) {
                        self.patch(c, cell, id, patch);
                    } else {
                        let busy = Said::Status(Status::too_many_requests("", 1));
                        self.after(1, Action::Answer(me, Then::Settle(cell, id, true), busy));
                    }
                }
                Command::Confirm { id, target } => {
                    let get = Verb::Get(Res::Node, String::new(), target.name);
                    self.call(me, get, Then::Settle(cell, id, false));
                }
                Command::Note(_)
                | Command::Create { .. }
                | Command::Delete { .. }
                | Command::Survey { .. }
                | Command::Instruct { .. } => {}
            }
        }
    }

    /// A node says where its agent listens, or that there is none any more.
    fn follow_address(&mut self, c: usize, name: &NodeName, reachable: bool) {
        let me = self.proc_of(c);
        let Some(d) = self.driver(c) else { return };
        match (reachable, d.links.get(name).copied()) {
            (true, None) => {
                d.links.insert(name.clone(), Link::Idle);
                self.after(1, Action::Dial(me, name.clone()));
            }
            (false, Some(link)) => {
                d.links.remove(name);
                if let Link::Open(id) | Link::Dialing(id) = link {
                    self.cut(id);
                }
            }
            (true, Some(_)) | (false, None) => {}
        }
    }

    /// Dials again after a pause that doubles.
    pub(super) fn dial_later(&mut self, c: usize, node: &NodeName) {
        let me = self.proc_of(c);
        let Some(d) = self.driver(c) else { return };
        let Some(link) = d.links.get_mut(node) else { return };
        *link = Link::Idle;
        let wait = *d.retry.get(node).unwrap_or(&200);
        d.retry.insert(node.clone(), (wait * 2).min(5000));
        self.after(wait, Action::Dial(me, node.clone()));
    }

    /// A session has opened: its number, unique in this life.
    pub(super) fn session_opened(&mut self, c: usize, node: &NodeName, id: u64) -> Option<u64> {
        let d = self.driver(c)?;
        d.numbers += 1;
        let number = d.numbers;
        d.links.insert(node.clone(), Link::Open(id));
        d.retry.remove(node);
        self.node_step(c, node, node::Input::Session(Some(number)));
        if let Some(cell) = self.driver(c)?.nodes.get_mut(node) {
            cell.domains.clear();
        }
        Some(number)
    }

    /// A session has ended.
    pub(super) fn session_closed(&mut self, c: usize, node: &NodeName, number: u64) {
        let Some(d) = self.driver(c) else { return };
        let ours = d.nodes.get(node).is_some_and(|n| n.machine.fact().session == Some(number));
        let broken: Vec<_> = d.waiting.keys().filter(|(n, _)| n == node).cloned().collect();
        for slot in broken {
            if let Some((key, id)) = d.waiting.remove(&slot) {
                d.inputs.push_back((key, Input::Settled { id, result: Settled::Unknown }));
            }
        }
        if ours {
            self.node_step(c, node, node::Input::Session(None));
        }
        self.dial_later(c, node);
        self.drain(c);
    }

    pub(super) fn heard_inventory(&mut self, c: usize, node: &NodeName, inventory: Inventory) {
        let report = inventory.report(node);
        if let Some(cell) = self.driver(c).and_then(|d| d.nodes.get_mut(node)) {
            cell.inventory = Some(inventory);
        }
        self.tell(c, &(String::new(), Interest::Node(node.clone())), &Input::Reported(report));
        self.drain(c);
    }

    pub(super) fn heard_domain(&mut self, c: usize, node: &NodeName, key: Key, domain: Domain) {
        let domain = Arc::new(domain);
        if let Some(cell) = self.driver(c).and_then(|d| d.nodes.get_mut(node)) {
            cell.domains.insert(domain.pod.clone(), (key.clone(), domain.clone()));
        }
        self.input(c, key, Input::Reported(Report::Domain { node: node.clone(), domain }));
    }

    pub(super) fn heard_outcome(&mut self, c: usize, node: &NodeName, key: Key, outcome: Outcome) {
        if let Some(cell) = self.driver(c).and_then(|d| d.nodes.get_mut(node)) {
            cell.outcomes.insert(outcome.pod.clone(), (key.clone(), outcome.clone()));
        }
        self.input(c, key, Input::Reported(Report::Outcome { node: node.clone(), outcome }));
    }

    pub(super) fn heard_ack(&mut self, c: usize, node: &NodeName, id: &str, result: AckResult) {
        let slot = (node.clone(), id.to_owned());
        if let Some((key, id)) = self.driver(c).and_then(|d| d.waiting.remove(&slot)) {
            self.input(c, key, Input::Settled { id, result: Settled::Acked(result) });
        }
        self.drain(c);
    }
}

impl Driver {
    /// The present levels of a node, for a cell that has just become interested.
    pub(super) fn node_levels(&mut self, key: &Key, name: &NodeName) {
        let Some(cell) = self.nodes.get(name) else { return };
        let mut inputs = vec![Input::Configured(Fact::Node(cell.machine.fact()))];
        let node = || name.clone();
        inputs.extend(
            cell.domains
                .values()
                .filter(|(k, _)| k == key)
                .map(|(_, d)| Input::Reported(Report::Domain { node: node(), domain: d.clone() })),
        );
        inputs.extend(
            cell.outcomes
                .values()
                .filter(|(k, _)| k == key)
                .map(|(_, o)| Input::Reported(Report::Outcome { node: node(), outcome: o.clone() })),
        );
        inputs.extend(cell.inventory.iter().map(|i| Input::Reported(i.report(name))));
        self.inputs.extend(inputs.into_iter().map(|i| (key.clone(), i)));
    }
}
