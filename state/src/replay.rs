//! Replay: runs the events of a journal through today's machines and compares what follows with what followed then.
//!
//! A cell begins with a record that has its state. From there on each command is compared; where a state is recorded again
//! (each segment begins with one), the replayed state is compared with it, which shows what never became a command, and
//! inputs that a machine has beside its events. After a gap (damage, dropped records) and after a difference, a cell is
//! left alone until its state is recorded again: what would follow is no news.

use crate::{
    Event, Machine, Timestamp,
    journal::{Block, CellKind, Head, Recorded, unreadable},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, value::RawValue};
use std::{borrow::Cow, collections::BTreeMap};

/// What of a journal is replayed.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Only this cell.
    pub cell: Option<(CellKind, String)>,
    /// Only events that came until then.
    pub until: Option<Timestamp>,
    /// Only steps up to this number of their cell.
    pub until_seq: Option<u64>,
}

/// What differed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum What {
    /// What followed from an event.
    Commands,
    /// The cell before an event.
    State,
}

/// Where today's machine does something else.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// What.
    pub what: What,
    /// Kind of the cell.
    pub kind: CellKind,
    /// Name of the cell.
    pub cell: String,
    /// Number of the step.
    pub seq: u64,
    /// When the event came.
    pub at: Timestamp,
    /// Who recorded it.
    pub recorded_by: Head,
    /// The event.
    pub event: Value,
    /// What is in the journal.
    pub recorded: Value,
    /// What today's machine makes of it.
    pub replayed: Value,
    /// The same as a list of places.
    pub diff: Vec<String>,
}

/// What a replay came to.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Report {
    /// Records that were read.
    pub records: u64,
    /// Steps that were compared.
    pub compared: u64,
    /// Commands in them.
    pub commands: u64,
    /// Cells: one name in one process.
    pub cells: u64,
    /// Records that could not be compared, because something before them is missing or differed.
    pub passed_over: u64,
    /// Places where records of a cell are missing.
    pub gaps: u64,
    /// Records that were dropped by those who should have written them.
    pub dropped: u64,
    /// Blocks that are missing within a process.
    pub missing_blocks: u64,
    /// Records that this build cannot read.
    pub unreadable: u64,
    /// The first of them, and why.
    pub first_unreadable: Option<String>,
    /// Cells (of records that could be compared) in which something differed.
    pub differing: u64,
    /// The differences: of each cell the first one since its state was recorded.
    pub differences: Vec<Difference>,
    /// Builds that wrote what was read, and how many blocks.
    pub builds: BTreeMap<String, u64>,
}

/// Differences that are kept. The first ones tell the story.
const DIFFERENCES: usize = 100;

/// A record. What followed then stays text: where the same follows, it is written the same, and need not be read.
#[derive(Deserialize)]
#[serde(bound(deserialize = "M: Recorded"))]
struct Read<'a, M: Machine> {
    #[serde(borrow)]
    cell: Cow<'a, str>,
    seq: u64,
    #[serde(default)]
    state: Option<M>,
    event: Event<M::Input>,
    #[serde(borrow)]
    commands: &'a RawValue,
}

/// [`crate::journal::Entry`], read like that.
#[derive(Deserialize)]
// One at a time.
#[allow(clippy::large_enum_variant)]
enum Line<'a> {
    Vm(#[serde(borrow)] Read<'a, crate::vm::Vm>),
    Set(#[serde(borrow)] Read<'a, crate::set::Set>),
    Node(#[serde(borrow)] Read<'a, crate::node::Node>),
    Agent(#[serde(borrow)] Read<'a, crate::agent::Agent>),
}

/// A cell on its way.
struct Cell<M> {
    /// `None` after a gap or a difference.
    machine: Option<M>,
    seq: u64,
    differs: bool,
}

type Cells<M> = BTreeMap<(String, String), Cell<M>>;

/// A replay.
#[derive(Default)]
pub struct Replay {
    filter: Filter,
    report: Report,
    blocks: BTreeMap<String, u64>,
    vms: Cells<crate::vm::Vm>,
    sets: Cells<crate::set::Set>,
    nodes: Cells<crate::node::Node>,
    agents: Cells<crate::agent::Agent>,
}

impl Replay {
    /// Begins one.
    pub fn new(filter: Filter) -> Self {
        Self { filter, ..Self::default() }
    }

    /// Goes on with a block. Those of one process come in order.
    pub fn block(&mut self, block: &Block) {
        let head = &block.head;
        *self.report.builds.entry(head.build.clone()).or_default() += 1;
        self.report.dropped += head.lost;
        let last = self.blocks.insert(head.process.clone(), head.block);
        // What came before the oldest segment went with it.
        self.report.missing_blocks += last.map_or(0, |last| head.block.saturating_sub(last + 1));
        for line in block.raw() {
            self.report.records += 1;
            let step = match serde_json::from_slice(line) {
                Ok(Line::Vm(r)) => self.report.step(&self.filter, &mut self.vms, head, r),
                Ok(Line::Set(r)) => self.report.step(&self.filter, &mut self.sets, head, r),
                Ok(Line::Node(r)) => self.report.step(&self.filter, &mut self.nodes, head, r),
                Ok(Line::Agent(r)) => self.report.step(&self.filter, &mut self.agents, head, r),
                Err(error) => Err(error),
            };
            match step {
                Ok(()) => {}
                Err(error) => {
                    let error = unreadable(line, error);
                    self.report.unreadable += 1;
                    self.report.first_unreadable.get_or_insert_with(|| format!("{error}: {}", error.source));
                }
            }
        }
    }

    /// How far it has come.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// What it came to.
    pub fn finish(self) -> Report {
        self.report
    }
}

impl Report {
    fn step<M: Recorded>(
        &mut self,
        filter: &Filter,
        cells: &mut Cells<M>,
        head: &Head,
        record: Read<'_, M>,
    ) -> serde_json::Result<()> {
        let wanted = filter.cell.as_ref().is_none_or(|(kind, name)| *kind == M::KIND && *name == record.cell)
            && filter.until.is_none_or(|t| record.event.at <= t)
            && filter.until_seq.is_none_or(|s| record.seq <= s);
        if !wanted {
            return Ok(());
        }
        let Read { cell: name, seq, state, event, commands } = record;
        let cell = cells.entry((head.process.clone(), name.clone().into_owned())).or_insert_with(|| {
            self.cells += 1;
            Cell { machine: None, seq: 0, differs: false }
        });
        let next = cell.seq + 1 == seq;
        // A cell that is forgotten and made anew counts from 1 again.
        if !next && cell.seq != 0 && seq != 1 {
            self.gaps += 1;
        }
        cell.seq = seq;
        if let Some(state) = state {
            if let Some(machine) = cell.machine.take().filter(|_| next) {
                let (recorded, replayed) = (value(&state), value(&machine));
                if recorded != replayed {
                    self.differ(What::State, head, (&name, seq), &event, (recorded, replayed), cell);
                }
            }
            cell.machine = Some(state);
        } else if !next {
            cell.machine = None;
        }
        let Some(machine) = &mut cell.machine else {
            self.passed_over += 1;
            return Ok(());
        };
        let replayed = machine.step(&event);
        self.compared += 1;
        self.commands += replayed.len() as u64;
        if serde_json::to_string(&replayed)? == commands.get() {
            return Ok(());
        }
        let commands: Vec<M::Command> = serde_json::from_str(commands.get())?;
        if replayed != commands {
            cell.machine = None;
            self.differ(What::Commands, head, (&name, seq), &event, (value(&commands), value(&replayed)), cell);
        }
        Ok(())
    }

    fn differ<M: Recorded>(
        &mut self,
        what: What,
        head: &Head,
        (name, seq): (&str, u64),
        event: &Event<M::Input>,
        (recorded, replayed): (Value, Value),
        cell: &mut Cell<M>,
    ) {
        if !cell.differs {
            cell.differs = true;
            self.differing += 1;
        }
        if self.differences.len() >= DIFFERENCES {
            return;
        }
        let mut places = vec![];
        diff("", &recorded, &replayed, &mut places);
        self.differences.push(Difference {
            what,
            kind: M::KIND,
            cell: name.into(),
            seq,
            at: event.at,
            recorded_by: head.clone(),
            event: value(event),
            recorded,
            replayed,
            diff: places,
        });
    }
}

fn value<T: Serialize>(of: &T) -> Value {
    serde_json::to_value(of).unwrap_or_else(|e| Value::String(e.to_string()))
}

/// The places where two values differ, each with both sides.
pub fn diff(place: &str, recorded: &Value, replayed: &Value, out: &mut Vec<String>) {
    match (recorded, replayed) {
        (Value::Object(a), Value::Object(b)) => {
            let keys: std::collections::BTreeSet<_> = a.keys().chain(b.keys()).collect();
            for key in keys {
                let at = if place.is_empty() { key.clone() } else { format!("{place}.{key}") };
                side(&at, a.get(key), b.get(key), out);
            }
        }
        (Value::Array(a), Value::Array(b)) => {
            for i in 0..a.len().max(b.len()) {
                side(&format!("{place}[{i}]"), a.get(i), b.get(i), out);
            }
        }
        (a, b) if a == b => {}
        (a, b) => out.push(format!("{place}: recorded {a}, replayed {b}")),
    }
}

fn side(place: &str, recorded: Option<&Value>, replayed: Option<&Value>, out: &mut Vec<String>) {
    match (recorded, replayed) {
        (Some(a), Some(b)) => diff(place, a, b, out),
        (Some(a), None) => out.push(format!("{place}: recorded {a}, replayed nothing")),
        (None, Some(b)) => out.push(format!("{place}: recorded nothing, replayed {b}")),
        (None, None) => {}
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::{
        ResourceVersion,
        journal::{Encoder, Piece, SCHEMA, begin_line, end_line, pieces},
        node::{Input, Node},
        observe::{Meta, NodeView},
    };

    /// Lines of a node that loses its agent over and over, with its state at these steps.
    fn lines(states: &[u64]) -> Vec<String> {
        let mut node = Node::new("n1".into());
        let view = |rv| NodeView {
            meta: Meta { uid: "n".into(), rv: ResourceVersion(rv), name: "n1".into(), ..Meta::default() },
            ready: Some(true),
            out_of_service: false,
            schedulable: Some(true),
            agent_address: None,
        };
        let inputs = (0..).flat_map(|i| {
            [
                Input::Observed { node: view(i + 1), live: false },
                Input::Session(None),
                Input::Elapsed,
                Input::Session(Some(i)),
            ]
        });
        let mut lines = vec![];
        for (seq, input) in (1..=12).zip(inputs) {
            let event = Event::new(Timestamp(seq * 70_000), input);
            let mut line = vec![];
            begin_line(&mut line, "n1", seq, states.contains(&seq).then_some(&node), &event).unwrap();
            let commands = crate::Machine::step(&mut node, &event);
            end_line::<Node>(&mut line, &commands, None).unwrap();
            lines.push(String::from_utf8(line).unwrap());
        }
        lines
    }

    fn head(block: u64, lost: u64) -> Head {
        let (schema, segment) = (SCHEMA, 1);
        let text = |t: &str| t.to_owned();
        let (build, component, process) = (text("b"), text("controller"), text("p"));
        Head { schema, build, component, process, epoch: None, segment, block, lost }
    }

    /// Replays blocks: (number, lost, lines).
    fn replay(filter: Filter, blocks: &[(u64, u64, &[String])]) -> Report {
        let mut replay = Replay::new(filter);
        let mut encoder = Encoder::new().unwrap();
        for (block, lost, lines) in blocks {
            let bytes = encoder.block(&head(*block, *lost), lines.concat().as_bytes()).unwrap();
            let Some(Piece::Block(block)) = pieces(&bytes).next() else { panic!() };
            replay.block(&block);
        }
        replay.finish()
    }

    #[test]
    fn what_was_recorded_is_the_same_also_across_states() {
        let lines = lines(&[1, 5, 9]);
        let report = replay(Filter::default(), &[(1, 0, &lines[..5]), (2, 0, &lines[5..])]);
        assert_eq!((report.compared, report.cells, report.differing, report.gaps), (12, 1, 0, 0), "{report:#?}");
        assert!(report.commands > 3);
    }

    #[test]
    fn a_machine_that_decides_something_else_is_found() {
        let lines = lines(&[1]);
        // As if the machine of then had used another label.
        let hurt: Vec<_> =
            lines.iter().map(|l| l.replace("\"kubevirt.io/schedulable\":\"false\"", "\"x\":\"false\"")).collect();
        assert_ne!(lines, hurt);
        let report = replay(Filter::default(), &[(1, 0, &hurt)]);
        let d = &report.differences[0];
        assert_eq!((report.differing, d.what, d.seq, d.cell.as_str()), (1, What::Commands, 2, "n1"));
        assert_eq!(d.event, serde_json::json!({"at": 140_000, "input": {"Session": null}}));
        assert_eq!(
            d.diff,
            [
                "[0].Patch.patch.body.metadata.labels.kubevirt.io/schedulable: recorded nothing, replayed \"false\"",
                "[0].Patch.patch.body.metadata.labels.x: recorded \"false\", replayed nothing",
            ]
        );
        // What follows a difference is no news.
        assert_eq!((report.differences.len(), report.compared, report.passed_over), (1, 2, 10));
    }

    #[test]
    fn a_state_that_the_events_do_not_explain_is_found() {
        let mut lines = lines(&[1, 5]);
        lines[4] = lines[4].replacen("\"silent_since\":null", "\"silent_since\":1", 1);
        let report = replay(Filter::default(), &[(1, 0, &lines)]);
        let d = &report.differences[0];
        assert_eq!((d.what, d.seq), (What::State, 5), "{report:#?}");
        assert_eq!(d.diff, ["silent_since: recorded 1, replayed null"]);
    }

    #[test]
    fn gaps_are_told_and_passed_over_until_the_state_is_recorded_again() {
        let lines = lines(&[1, 9]);
        // Dropped by the component; the block between damaged.
        for (block, lost) in [(2, 3), (3, 0)] {
            let report = replay(Filter::default(), &[(1, 0, &lines[..4]), (block, lost, &lines[7..])]);
            assert_eq!((report.differing, report.gaps, report.dropped), (0, 1, lost), "{report:#?}");
            assert_eq!((report.compared, report.passed_over, report.missing_blocks), (8, 1, block - 2));
        }
        // The beginning went with an older segment: that is no gap.
        let report = replay(Filter::default(), &[(7, 0, &lines[6..])]);
        assert_eq!((report.gaps, report.missing_blocks, report.passed_over, report.compared), (0, 0, 2, 4));
    }

    #[test]
    fn a_cell_that_ended_and_one_that_took_its_name_are_two() {
        let lines = lines(&[1]);
        let report = replay(Filter::default(), &[(1, 0, &lines[..6]), (2, 0, &lines)]);
        assert_eq!((report.differing, report.gaps, report.compared), (0, 0, 18), "{report:#?}");
    }

    #[test]
    fn one_cell_and_a_part_of_the_time() {
        let lines = lines(&[1]);
        let count = |filter| replay(filter, &[(1, 0, &lines)]).compared;
        assert_eq!(count(Filter { cell: Some((CellKind::Vm, "n1".into())), ..Filter::default() }), 0);
        assert_eq!(count(Filter { cell: Some((CellKind::Node, "n1".into())), ..Filter::default() }), 12);
        assert_eq!(count(Filter { until: Some(Timestamp(140_000)), ..Filter::default() }), 2);
        assert_eq!(count(Filter { until_seq: Some(4), ..Filter::default() }), 4);
    }
}
