//! The journal's format: what machines saw and did, one record a step.
//!
//! A record is framed on its own: magic, length, checksum of the compressed bytes, zstd of JSON. A torn tail or a flipped
//! bit costs the record that it hits; the reader looks for the next frame and says how many bytes it skipped. It is a
//! recording for replay and explanation, never an input of a running system.
//!
//! Events and commands are projections and recipes, so values of Secrets, user data and the texts of validation errors are
//! not in them to begin with.

use crate::Event;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Begins a frame.
const MAGIC: [u8; 4] = *b"VFJ1";
/// Magic, length, checksum.
const HEADER: usize = 12;
/// Longest record that is believed. A length beyond it is damage.
const MAX_RECORD: usize = 8 << 20;
/// zstd's own measure; higher costs time on every step.
const LEVEL: i32 = 1;

/// Kind of the cell that a record is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum CellKind {
    /// A VM or bare VMI.
    Vm,
    /// A Node.
    Node,
    /// One VMI on one node.
    Agent,
}

/// One step of one cell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record<I, C> {
    /// Kind.
    pub kind: CellKind,
    /// `namespace/name`, a node's name, or a UID.
    pub cell: String,
    /// Counts the cell's steps from 1 since its process began.
    pub seq: u64,
    /// What happened.
    pub event: Event<I>,
    /// What followed.
    pub commands: Vec<C>,
    /// Trace that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<String>,
}

/// Why a record cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It does not become JSON.
    #[error("cannot encode a journal record")]
    Encode(#[from] serde_json::Error),
    /// It does not compress.
    #[error("cannot compress a journal record")]
    Compress(#[from] std::io::Error),
    /// It is too long.
    #[error("a journal record has {0} bytes, which is too long")]
    TooLong(usize),
}

/// Frames a record.
pub fn encode<T: Serialize>(record: &T) -> Result<Vec<u8>, Error> {
    let body = zstd::bulk::compress(&serde_json::to_vec(record)?, LEVEL)?;
    let len = u32::try_from(body.len()).ok().filter(|_| body.len() <= MAX_RECORD).ok_or(Error::TooLong(body.len()))?;
    let mut out = Vec::with_capacity(HEADER + body.len());
    out.extend(MAGIC);
    out.extend(len.to_le_bytes());
    out.extend(crc32fast::hash(&body).to_le_bytes());
    out.extend(body);
    Ok(out)
}

/// What a journal file held.
#[derive(Debug, Clone, PartialEq)]
pub struct Contents<T> {
    /// Records that are whole.
    pub records: Vec<T>,
    /// Damage: (offset, bytes skipped).
    pub damaged: Vec<(usize, usize)>,
}

/// Reads all frames of a file.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Contents<T> {
    let mut out = Contents { records: vec![], damaged: vec![] };
    let mut at = 0;
    let mut bad_from: Option<usize> = None;
    while at < bytes.len() {
        if let Some((record, next)) = frame(bytes, at) {
            if let Some(from) = bad_from.take() {
                out.damaged.push((from, at - from));
            }
            out.records.push(record);
            at = next;
            continue;
        }
        bad_from.get_or_insert(at);
        // The next place where a frame could begin.
        let rest = bytes.get(at + 1..).unwrap_or_default();
        at = rest.windows(MAGIC.len()).position(|w| w == MAGIC).map_or(bytes.len(), |i| at + 1 + i);
    }
    if let Some(from) = bad_from {
        out.damaged.push((from, bytes.len() - from));
    }
    out
}

fn frame<T: DeserializeOwned>(bytes: &[u8], at: usize) -> Option<(T, usize)> {
    let head = bytes.get(at..at.checked_add(HEADER)?)?;
    let word = |i: usize| head.get(i..i + 4).and_then(|b| <[u8; 4]>::try_from(b).ok()).map(u32::from_le_bytes);
    if head.get(..4)? != MAGIC {
        return None;
    }
    let len = usize::try_from(word(4)?).ok().filter(|l| *l <= MAX_RECORD)?;
    let end = at + HEADER + len;
    let body = bytes.get(at + HEADER..end)?;
    if crc32fast::hash(body) != word(8)? {
        return None;
    }
    let json = zstd::bulk::decompress(body, MAX_RECORD).ok()?;
    Some((serde_json::from_slice(&json).ok()?, end))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::{
        Timestamp,
        vm::{Command, Input},
    };

    type R = Record<Input, Command>;

    fn record(seq: u64) -> R {
        Record {
            kind: CellKind::Vm,
            cell: "ns/web".into(),
            seq,
            event: Event::new(Timestamp(seq), Input::Elapsed),
            commands: vec![Command::Wake { at: Timestamp(9) }],
            trace: None,
        }
    }

    #[test]
    fn damage_costs_the_record_that_it_hits() {
        let frames: Vec<Vec<u8>> = (1..=4).map(|i| encode(&record(i)).unwrap()).collect();
        let whole = frames.concat();
        assert_eq!(decode::<R>(&whole).records.len(), 4);
        for bit in 0..whole.len() * 8 {
            let mut hurt = whole.clone();
            hurt[bit / 8] ^= 1 << (bit % 8);
            let c = decode::<R>(&hurt);
            assert_eq!(c.records.len(), 3, "bit {bit}");
            assert_eq!(c.damaged.len(), 1, "bit {bit}");
        }
        for cut in 0..whole.len() {
            let c = decode::<R>(&whole[..cut]);
            let full = frames
                .iter()
                .scan(0, |n, f| {
                    *n += f.len();
                    Some(*n)
                })
                .filter(|n| *n <= cut)
                .count();
            assert_eq!(c.records.len(), full);
        }
    }

    #[test]
    fn records_of_the_first_version_can_be_read() {
        // Golden: written by the first version. A change of names in events or commands breaks old journals.
        let json = r#"{"kind":"Vm","cell":"ns/web","seq":7,"event":{"at":7,"input":"Elapsed"},"commands":[{"Wake":{"at":9}}]}"#;
        assert_eq!(serde_json::to_string(&record(7)).unwrap(), json);
        let hex = "56464a3163000000768af36828b52ffd2067d502002246141a704bd30118e197c6eab61613cbb6823014ee517c271e80aa2204edd09aa0af9b7544ae30337475f2524a984bfba04a0e0dee6b91e4b16ed65722032f81ae407519810d80ca3b42682e27c2fde481cc02010031c28402";
        let bytes: Vec<u8> =
            (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect();
        assert_eq!(decode::<R>(&bytes).records, [record(7)]);
    }
}
