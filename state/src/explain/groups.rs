//! What sets and nodes wait for. Their cells keep no history in words: what they did is told of the instances.

use super::{API_VERSION, Explanation, WaitKind, Waiting, summary};
use crate::{
    Key, NodeName, Timestamp,
    node::{Node, SILENCE},
    set::Set,
};

/// An answer without a history.
fn now_only(key: &Key, status: String, node: Option<NodeName>, waits: Vec<Waiting>, now: Timestamp) -> Explanation {
    Explanation {
        kind: "Explanation".into(),
        api_version: API_VERSION.into(),
        namespace: key.namespace.clone(),
        name: key.name.clone(),
        summary: summary(&key.name, &status, None, &waits),
        status,
        phase: String::new(),
        node,
        run_strategy: String::new(),
        waits,
        steps: vec![],
        statuses: vec![],
        history: vec![],
        as_of: now,
        live: true,
        gaps: vec![],
        asks: vec![],
        graver: false,
    }
}

/// The explanation of a set.
pub fn set(cell: &Set, now: Timestamp) -> Explanation {
    now_only(cell.key(), cell.word(), None, cell.waits(), now)
}

/// The explanation of a node.
pub fn node(cell: &Node, now: Timestamp) -> Explanation {
    let fact = cell.fact();
    let wait = |kind, waits_for: &str, condition: &str, reason: &str, message: String, unblock: &str| Waiting {
        kind,
        waits_for: waits_for.into(),
        condition: condition.into(),
        reason: reason.into(),
        message,
        evidence: vec![],
        unblock: unblock.into(),
        since: None,
        until: None,
    };
    let name = &fact.node;
    let mut waits = vec![];
    if let Some(rv) = fact.fenced {
        waits.push(wait(
            WaitKind::Person,
            "somebody to take the out-of-service taint off",
            "Ready",
            "",
            format!("it is not ready and tainted out-of-service (version {rv}): its machines run elsewhere"),
            "when it is repaired: 'kubectl taint nodes NAME node.kubernetes.io/out-of-service-'",
        ));
    } else if fact.gone {
        waits.push(wait(
            WaitKind::Person,
            "its Node object",
            "",
            "",
            "its Node object was deleted, which says nothing about what still runs there".into(),
            "if it is off for good, delete the launcher pods by force: that declares their machines stopped",
        ));
    } else if !fact.ready {
        waits.push(wait(
            WaitKind::Problem,
            "the node to be ready",
            "Ready",
            "NodeUnreachable",
            format!("node {name} is not ready"),
            "comes by itself when the node is back; one that is off for good: taint it node.kubernetes.io/out-of-service, \
             and its machines run elsewhere",
        ));
    }
    if let Some(since) = fact.silent_since.filter(|_| !fact.gone) {
        let long = now >= since.after(SILENCE);
        let silent = wait(
            if long { WaitKind::Problem } else { WaitKind::Progress },
            "its agent to connect",
            "",
            "NodeUnreachable",
            format!("the agent of node {name} does not answer"),
            "comes by itself when the agent is back; guests go on meanwhile, and no new ones are placed there",
        );
        waits.push(Waiting { since: Some(since), ..silent });
    }
    let status = match (fact.fenced.is_some(), fact.gone, fact.ready) {
        (true, ..) => "Fenced",
        (_, true, _) => "Gone",
        (.., false) => "NotReady",
        (.., true) => "Ready",
    };
    now_only(&Key::new("", name.as_str()), status.into(), Some(name.clone()), waits, now)
}
