//! The Node machine as a table, made by running it, and what holds for all its histories.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use super::*;
use crate::{ResourceVersion, observe::Meta};
use proptest::prelude::*;
use std::fmt::Write;

fn view(rv: u64, ready: Option<bool>, tainted: bool, label: bool) -> NodeView {
    NodeView {
        meta: Meta { uid: "n".into(), rv: ResourceVersion(rv), name: "n1".into(), ..Meta::default() },
        ready,
        out_of_service: tainted,
        schedulable: Some(label),
        agent_address: None,
    }
}

/// What is said about the agent.
const AGENTS: [&str; 3] = ["answers", "is silent", "is silent for a minute"];

/// Runs a node from the beginning: what it writes, whether it asks, and what it tells the VMs in the end. The server has what
/// the node has seen.
fn run(seen: &NodeView, agent: &str) -> (Vec<String>, bool, NodeFact) {
    let mut n = Node::new("n1".into());
    let mut server = seen.clone();
    let (mut writes, mut asks, mut at) = (vec![], false, 1_000);
    let mut inputs = if agent == AGENTS[0] { vec![Input::Session(Some(1))] } else { vec![] };
    inputs.extend([Input::Observed { node: seen.clone(), live: false }, Input::Elapsed]);
    let last = inputs.len();
    for (i, input) in inputs.into_iter().enumerate() {
        if i + 1 == last && agent == AGENTS[2] {
            at += SILENCE.0;
        }
        let mut out = n.step(&Event::new(Timestamp(at), input));
        while let Some(command) = out.pop() {
            let Some(id) = command.id() else { continue };
            match command {
                Command::Patch { patch, .. } => {
                    writes.push(patch.why);
                    server.meta.rv = ResourceVersion(server.meta.rv.0 + 1);
                    server.schedulable = Some(patch.body["metadata"]["labels"][names::LABEL_SCHEDULABLE] == "true");
                }
                Command::Confirm { .. } => asks = true,
                other @ (Command::Create { .. }
                | Command::Delete { .. }
                | Command::Survey { .. }
                | Command::Instruct { .. }
                | Command::Note(_)
                | Command::Wake { .. }) => panic!("{other:?}"),
            }
            let result = Settled::Applied(Some(server.clone()));
            out.extend(n.step(&Event::new(Timestamp(at), Input::Settled { id, result })));
        }
    }
    (writes, asks, n.fact())
}

/// The part of the page.
pub(crate) fn page(out: &mut String) {
    out.push_str("\n## Node: what is made of it\n\nThe label `kubevirt.io/schedulable` is the agent's; the controller takes it away and gives it back. What the machines on the node\nhear decides whether they are shown as `Unknown`, and whether they may run elsewhere.\n\n| Ready | out-of-service taint | agent | label there | label becomes | asks the API server | machines hear |\n|---|---|---|---|---|---|---|\n");
    for ready in [Some(true), Some(false), None] {
        for tainted in [false, true] {
            for agent in AGENTS {
                for label in [true, false] {
                    let (writes, asks, fact) = run(&view(1, ready, tainted, label), agent);
                    let becomes = match &writes[..] {
                        [] => "-",
                        [why] if why == "schedulable" => "true",
                        [why] if why == "unschedulable" => "false",
                        more => panic!("{more:?}"),
                    };
                    let mut heard = vec![];
                    if fact.fenced.is_some() {
                        heard.push("fenced");
                    }
                    if !fact.ready {
                        heard.push("not ready");
                    }
                    heard.push(if fact.session.is_some() { "its agent answers" } else { "its agent is silent" });
                    let word = |b: bool| if b { "yes" } else { "no" };
                    let _ = writeln!(
                        out,
                        "| {} | {} | {agent} | {label} | {becomes} | {} | {} |",
                        ready.map_or("unknown", |r| if r { "True" } else { "False" }),
                        word(tainted),
                        word(asks),
                        heard.join(", "),
                    );
                }
            }
        }
    }
}

fn inputs() -> impl Strategy<Value = Input> {
    // One version says one thing.
    let ready = |rv: u64| [None, Some(true), Some(false)].into_iter().cycle().nth(rv as usize).flatten();
    prop_oneof![
        (1..9_u64).prop_map(move |rv| Input::Observed { node: view(rv, ready(rv), rv % 2 == 0, rv > 4), live: false }),
        Just(Input::Gone("n".into())),
        (1..3_u64).prop_map(|s| Input::Session(Some(s))),
        Just(Input::Session(None)),
        Just(Input::Elapsed),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever is seen in whatever order: the same news twice plans nothing, a taint without a live read fences nobody, a node
    /// whose agent answers is never called silent, and a deleted Node proves nothing.
    #[test]
    fn whatever_is_seen_of_a_node(all in prop::collection::vec(inputs(), 0..20)) {
        let mut n = Node::new("n1".into());
        for (i, input) in all.iter().enumerate() {
            let at = Timestamp(1_000 * i as u64);
            n.step(&Event::new(at, input.clone()));
            let again = n.clone().step(&Event::new(at, input.clone()));
            let news: Vec<_> = again.iter().filter(|c| !matches!(c, Command::Wake { .. })).collect();
            prop_assert!(news.is_empty(), "{input:?} again: {news:?}");
            let fact = n.fact();
            prop_assert!(fact.fenced.is_none(), "nobody has asked");
            prop_assert!(fact.session.is_none() || fact.silent_since.is_none());
            if let Input::Session(s) = input {
                prop_assert_eq!(fact.session, *s);
            }
        }
    }

    /// The same versions of a Node in any order end in the same fact.
    #[test]
    fn any_order_of_the_same_sights_of_a_node(order in Just(vec![1_u64, 2, 3, 4, 5]).prop_shuffle(), tainted in any::<bool>()) {
        let mut n = Node::new("n1".into());
        for rv in order {
            let node = view(rv, Some(rv % 2 == 0), tainted, true);
            n.step(&Event::new(Timestamp(5), Input::Observed { node, live: false }));
        }
        prop_assert!(!n.fact().ready, "the newest version counts");
        prop_assert_eq!(n.node.rv(), ResourceVersion(5));
    }
}
