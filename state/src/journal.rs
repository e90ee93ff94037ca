//! The journal's format: what machines saw and did.
//!
//! A file is a sequence of **blocks**. A block is a header (magic, length, length of the contents, checksum of the body,
//! checksum of the header) and a body: zstd of lines of JSON. The first line is the [`Head`]: who wrote it. Each other line
//! is an [`Entry`]: one step of one cell. A torn tail or a flipped bit costs the block that it hits; the reader looks for
//! the next header and says how many bytes it passed over. Blocks name their process and count, records count per cell,
//! so that what is missing is known.
//!
//! The first record of a cell in a file (and after records were dropped) has the cell's whole state before the event, so
//! that a replay can begin there. It is a recording for replay and explanation, never an input of a running system.
//!
//! Events and commands are projections and recipes, so values of Secrets, user data and the texts of validation errors are
//! not in them to begin with.

use crate::{Epoch, Event, Machine, Timestamp, agent::Agent, node::Node, set::Set, vm::Vm};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::collections::BTreeMap;

/// Version of the format: of the frames, and of what a line is. What events and commands are changes with the build.
pub const SCHEMA: u32 = 2;

/// Begins a block.
const MAGIC: [u8; 4] = *b"VFJ2";
/// Magic, length of the body, length of the contents, checksum of the body, checksum of what stands before.
const HEADER: usize = 20;
/// Longest contents of a block that are believed. A length beyond it is damage.
const MAX_CONTENTS: usize = 64 << 20;
/// zstd's own measure; higher costs time on every block.
const LEVEL: i32 = 1;

/// Kind of the cell that a record is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum CellKind {
    /// A VM or bare VMI.
    Vm,
    /// A replica set.
    Set,
    /// A Node.
    Node,
    /// One VMI on one node.
    Agent,
}

impl CellKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Vm, Self::Set, Self::Node, Self::Agent];

    /// The word in lines and on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vm => "Vm",
            Self::Set => "Set",
            Self::Node => "Node",
            Self::Agent => "Agent",
        }
    }
}

/// A machine whose steps are recorded.
pub trait Recorded: Machine + Serialize + DeserializeOwned {
    /// Its kind.
    const KIND: CellKind;

    /// Trace context (in text form) of the operation that runs, where the cell knows it.
    fn traceparent(&self) -> Option<&str> {
        None
    }
}

impl Recorded for Vm {
    const KIND: CellKind = CellKind::Vm;

    fn traceparent(&self) -> Option<&str> {
        self.traceparent()
    }
}

impl Recorded for Set {
    const KIND: CellKind = CellKind::Set;
}

impl Recorded for Node {
    const KIND: CellKind = CellKind::Node;
}

impl Recorded for Agent {
    const KIND: CellKind = CellKind::Agent;
}

/// Who wrote a block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Which build of the program.
    pub build: String,
    /// `controller`, `node-agent`.
    pub component: String,
    /// Random id of the process's life: of a leader, or of an agent.
    pub process: String,
    /// Epoch of a leader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<Epoch>,
    /// Number of the file.
    pub segment: u64,
    /// Counts the blocks of this process from 1.
    pub block: u64,
    /// Records that were dropped since the block before, because the disk or the queue was full.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lost: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// One step of one cell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(bound(serialize = "M: Recorded", deserialize = "M: Recorded"))]
pub struct Record<M: Machine> {
    /// `namespace/name`, a node's name, or a pod's UID.
    pub cell: String,
    /// Counts the steps of this cell in this process from 1.
    pub seq: u64,
    /// The cell before the step: in the first record of a segment, of a cell, and after a gap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<M>,
    /// What happened.
    pub event: Event<M::Input>,
    /// What followed.
    pub commands: Vec<M::Command>,
    /// W3C id of the trace that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<String>,
}

/// A record of any kind: `{"Vm": {...}}`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Entry {
    /// Of a VM or bare VMI.
    Vm(Box<Record<Vm>>),
    /// Of a replica set.
    Set(Box<Record<Set>>),
    /// Of a Node.
    Node(Box<Record<Node>>),
    /// Of one VMI on one node.
    Agent(Box<Record<Agent>>),
}

/// What is asked of all kinds of records.
macro_rules! of_each {
    ($entry:expr, $record:ident => $value:expr) => {
        match $entry {
            Entry::Vm($record) => $value,
            Entry::Set($record) => $value,
            Entry::Node($record) => $value,
            Entry::Agent($record) => $value,
        }
    };
}

impl Entry {
    /// Kind of the cell.
    pub fn kind(&self) -> CellKind {
        match self {
            Self::Vm(_) => CellKind::Vm,
            Self::Set(_) => CellKind::Set,
            Self::Node(_) => CellKind::Node,
            Self::Agent(_) => CellKind::Agent,
        }
    }

    /// Name of the cell.
    pub fn cell(&self) -> &str {
        of_each!(self, r => &r.cell)
    }

    /// Number of the step.
    pub fn seq(&self) -> u64 {
        of_each!(self, r => r.seq)
    }

    /// When the event came.
    pub fn at(&self) -> Timestamp {
        of_each!(self, r => r.event.at)
    }

    /// Id of the trace.
    pub fn trace(&self) -> Option<&str> {
        of_each!(self, r => r.trace.as_deref())
    }
}

/// Why a record or a block cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It does not become JSON.
    #[error("cannot encode a journal record")]
    Encode(#[from] serde_json::Error),
    /// It does not compress.
    #[error("cannot compress a journal block")]
    Compress(#[from] std::io::Error),
    /// It is too long.
    #[error("a journal block has {0} bytes, which is too long")]
    TooLong(usize),
}

/// Begins the line of a step: before the step, because the state is the one before it.
pub fn begin_line<M: Recorded>(
    line: &mut Vec<u8>,
    cell: &str,
    seq: u64,
    state: Option<&M>,
    event: &Event<M::Input>,
) -> Result<(), Error> {
    line.extend(b"{\"");
    line.extend(M::KIND.name().as_bytes());
    line.extend(b"\":{\"cell\":");
    serde_json::to_writer(&mut *line, cell)?;
    line.extend(b",\"seq\":");
    serde_json::to_writer(&mut *line, &seq)?;
    if let Some(state) = state {
        line.extend(b",\"state\":");
        serde_json::to_writer(&mut *line, state)?;
    }
    line.extend(b",\"event\":");
    serde_json::to_writer(&mut *line, event)?;
    Ok(())
}

/// Ends the line that [`begin_line`] began.
pub fn end_line<M: Recorded>(
    line: &mut Vec<u8>,
    commands: &[M::Command],
    traceparent: Option<&str>,
) -> Result<(), Error> {
    line.extend(b",\"commands\":");
    serde_json::to_writer(&mut *line, commands)?;
    // 00-<trace id>-<span id>-<flags>
    if let Some(trace) = traceparent.and_then(|t| t.split('-').nth(1)) {
        line.extend(b",\"trace\":");
        serde_json::to_writer(&mut *line, trace)?;
    }
    line.extend(b"}}\n");
    Ok(())
}

/// Makes blocks; keeps the compressor's memory between them.
pub struct Encoder(zstd::bulk::Compressor<'static>);

impl Encoder {
    /// An encoder.
    pub fn new() -> Result<Self, Error> {
        Ok(Self(zstd::bulk::Compressor::new(LEVEL)?))
    }

    /// A block of these lines (each of them ended by [`end_line`]).
    pub fn block(&mut self, head: &Head, lines: &[u8]) -> Result<Vec<u8>, Error> {
        let mut contents = serde_json::to_vec(head)?;
        contents.push(b'\n');
        contents.extend(lines);
        if contents.len() > MAX_CONTENTS {
            return Err(Error::TooLong(contents.len()));
        }
        let body = self.0.compress(&contents)?;
        let word = |n: usize| u32::try_from(n).map(u32::to_le_bytes).map_err(|_| Error::TooLong(n));
        let mut out = Vec::with_capacity(HEADER + body.len());
        out.extend(MAGIC);
        out.extend(word(body.len())?);
        out.extend(word(contents.len())?);
        out.extend(crc32fast::hash(&body).to_le_bytes());
        out.extend(crc32fast::hash(&out).to_le_bytes());
        out.extend(body);
        Ok(out)
    }
}

/// What a reader finds in a file, in order.
#[derive(Debug, Clone)]
pub enum Piece {
    /// A block that is whole.
    Block(Block),
    /// Bytes that are none.
    Damage {
        /// Where they begin.
        offset: usize,
        /// How many.
        bytes: usize,
    },
}

/// A block that is whole.
#[derive(Debug, Clone)]
pub struct Block {
    /// Who wrote it.
    pub head: Head,
    lines: Vec<u8>,
}

/// A line that this build cannot read. The block's checksum was right, so it was written like that: by another build.
#[derive(Debug, thiserror::Error)]
#[error("record {seq:?} of {cell:?} is not one that this build knows")]
pub struct Unreadable {
    /// Cell, where that much can be read.
    pub cell: Option<String>,
    /// Number of the step.
    pub seq: Option<u64>,
    /// Why.
    #[source]
    pub source: serde_json::Error,
}

/// A line that cannot be read.
pub(crate) fn unreadable(line: &[u8], source: serde_json::Error) -> Unreadable {
    #[derive(Deserialize)]
    struct Name {
        cell: Option<String>,
        seq: Option<u64>,
    }
    let name = serde_json::from_slice::<BTreeMap<String, Name>>(line).ok();
    let name = name.and_then(|m| m.into_values().next());
    let (cell, seq) = name.map_or((None, None), |n| (n.cell, n.seq));
    Unreadable { cell, seq, source }
}

impl Block {
    /// The records.
    pub fn entries(&self) -> impl Iterator<Item = Result<Entry, Unreadable>> {
        self.raw().map(|line| serde_json::from_slice(line).map_err(|source| unreadable(line, source)))
    }

    /// The records as they stand there: a line of JSON each.
    pub fn raw(&self) -> impl Iterator<Item = &[u8]> {
        self.lines.split(|b| *b == b'\n').filter(|l| !l.is_empty())
    }
}

/// Reads a file, or what is left of one.
pub fn pieces(bytes: &[u8]) -> impl Iterator<Item = Piece> {
    let mut at = 0;
    // Found behind damage, and told after it.
    let mut held = None;
    std::iter::from_fn(move || {
        if let Some(block) = held.take() {
            return Some(Piece::Block(block));
        }
        let offset = at;
        while at < bytes.len() {
            if let Some((block, next)) = block(bytes, at) {
                let bytes = at - offset;
                at = next;
                if bytes == 0 {
                    return Some(Piece::Block(block));
                }
                held = Some(block);
                return Some(Piece::Damage { offset, bytes });
            }
            // The next place where a block could begin.
            let rest = bytes.get(at + 1..).unwrap_or_default();
            at = rest.windows(MAGIC.len()).position(|w| w == MAGIC).map_or(bytes.len(), |i| at + 1 + i);
        }
        (at > offset).then_some(Piece::Damage { offset, bytes: at - offset })
    })
}

fn block(bytes: &[u8], at: usize) -> Option<(Block, usize)> {
    let header = bytes.get(at..at.checked_add(HEADER)?)?;
    let word = |i: usize| header.get(i..i + 4).and_then(|b| <[u8; 4]>::try_from(b).ok()).map(u32::from_le_bytes);
    if header.get(..4)? != MAGIC || crc32fast::hash(header.get(..16)?) != word(16)? {
        return None;
    }
    let (len, contents) = (usize::try_from(word(4)?).ok()?, usize::try_from(word(8)?).ok()?);
    let end = (at + HEADER).checked_add(len)?;
    let body = bytes.get(at + HEADER..end)?;
    if contents > MAX_CONTENTS || crc32fast::hash(body) != word(12)? {
        return None;
    }
    let mut lines = zstd::bulk::decompress(body, contents).ok()?;
    let first = lines.iter().position(|b| *b == b'\n')?;
    let head = serde_json::from_slice(lines.get(..first)?).ok()?;
    lines.drain(..=first);
    Some((Block { head, lines }, end))
}

#[cfg(test)]
mod tests;
