//! Containers' logs, read from the node's data folder: the control plane is on the same machine, so no connection can be in
//! the way.
//!
//! The file holds what the container wrote, as it wrote it. A time before each line (`--timestamps`, `--since`) is the one that
//! the line begins with, as virtfold's own log lines do, else the one of the line before, else the container's start.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures::future::BoxFuture;
use serde_json::Value;

use super::record::{Places, Record, Stage};
use crate::semantics::Status;
use crate::server::{LogOptions, PodLogs};

/// A log is turned over at this size; the one before is kept.
const TURN_OVER: u64 = 10 << 20;
/// How often a followed log is looked at.
const LOOK: Duration = Duration::from_millis(200);
/// The most that is read at once.
const CHUNK: usize = 64 << 10;

/// The logs of all nodes below `DATA/nodes`.
#[derive(Debug, Clone)]
pub struct NodeLogs {
    nodes: PathBuf,
}

impl NodeLogs {
    /// `nodes` is `DATA/nodes`.
    #[must_use]
    pub fn new(nodes: &Path) -> Self {
        Self { nodes: nodes.to_owned() }
    }
}

impl PodLogs for NodeLogs {
    fn logs(&self, pod: Value, options: LogOptions) -> BoxFuture<'static, Result<Body, Status>> {
        let nodes = self.nodes.clone();
        Box::pin(async move { open(&nodes, &pod, options) })
    }
}

fn plain(name: &str) -> bool {
    !name.is_empty() && !name.contains('/') && !name.starts_with('.')
}

fn open(nodes: &Path, pod: &Value, options: LogOptions) -> Result<Body, Status> {
    let text = |pointer: &str| pod.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
    let (node, uid, name) = (text("/spec/nodeName"), text("/metadata/uid"), text("/metadata/name"));
    let containers: Vec<&str> = pod
        .pointer("/spec/containers")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(|c| c.get("name")?.as_str())
        .collect();
    let container =
        if options.container.is_empty() { containers.first().copied().unwrap_or_default() } else { &options.container };
    if !containers.contains(&container) {
        return Err(Status::bad_request(format!("container {container} is not valid for pod {name}")));
    }
    if options.previous {
        let words = format!("previous terminated container {container:?} in pod {name:?} not found");
        return Err(Status::bad_request(words));
    }
    let waiting = || {
        Status::bad_request(format!("container {container:?} in pod {name:?} is waiting to start: ContainerCreating"))
    };
    if !plain(&node) || !plain(&uid) {
        return Err(waiting());
    }
    let places = Places::of(&nodes.join(node), &uid);
    let record = Record::load(&places).ok_or_else(waiting)?;
    let since = match &record.stage {
        Stage::Running { started_at, .. } => started_at.clone(),
        Stage::Exited(exit) => exit.started_at.clone().unwrap_or_else(|| record.seen_at.clone()),
        Stage::Refused { .. } => return Ok(Body::empty()),
        Stage::Preparing | Stage::Starting => return Err(waiting()),
    };
    let follow = options.follow;
    let mut reader = Reader::new(places, since, options);
    let first = reader.backlog().map_err(|e| Status::internal(format!("the log of {name:?} cannot be read: {e}")))?;
    if !follow {
        return Ok(Body::from(first));
    }
    let stream = futures::stream::unfold((Some(first), reader), |(first, mut reader)| async move {
        if let Some(first) = first {
            return Some((Ok::<_, std::io::Error>(Bytes::from(first)), (None, reader)));
        }
        loop {
            if reader.left == Some(0) {
                return None;
            }
            // Asked before reading: what was written before the end is read after it.
            let over = !reader.alive();
            match reader.more() {
                Ok(bytes) if !bytes.is_empty() => return Some((Ok(Bytes::from(bytes)), (None, reader))),
                Ok(_) if over => return None,
                Ok(_) => tokio::time::sleep(LOOK).await,
                Err(e) => return Some((Err(e), (None, reader))),
            }
        }
    });
    Ok(Body::from_stream(stream))
}

struct Reader {
    places: Places,
    options: LogOptions,
    time: String,
    /// Where the next line begins in the present file.
    position: u64,
    /// The file that `position` belongs to, to see it turned over.
    left: Option<u64>,
}

impl Reader {
    fn new(places: Places, since: String, options: LogOptions) -> Self {
        let left = options.limit_bytes.and_then(|l| u64::try_from(l).ok());
        Self { places, options, time: since, position: 0, left }
    }

    fn alive(&self) -> bool {
        Record::load(&self.places).is_some_and(|r| r.process().is_some_and(crate::procs::ProcessId::alive))
    }

    /// What is there already, as the options want it.
    fn backlog(&mut self) -> std::io::Result<Vec<u8>> {
        let mut lines: std::collections::VecDeque<Vec<u8>> = std::collections::VecDeque::new();
        let keep = self.options.tail_lines.and_then(|n| usize::try_from(n).ok());
        let after = self.options.since_seconds.map(|s| jiff::Timestamp::now() - jiff::SignedDuration::from_secs(s));
        for (path, present) in [(self.places.old_log(), false), (self.places.log(), true)] {
            let file = match File::open(&path) {
                Ok(file) => file,
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
                Err(e) => return Err(e),
            };
            let mut reader = BufReader::new(file);
            loop {
                let mut line = Vec::new();
                let read = reader.read_until(b'\n', &mut line)?;
                if read == 0 {
                    break;
                }
                // Half a line of a followed log is read when it is whole.
                if present && self.options.follow && line.last() != Some(&b'\n') && self.alive() {
                    break;
                }
                if present {
                    self.position += read as u64;
                }
                self.clock(&line);
                if after.is_some_and(|a| self.time.parse::<jiff::Timestamp>().is_ok_and(|t| t < a)) {
                    continue;
                }
                let line = self.dress(&line);
                lines.push_back(line);
                if keep.is_some_and(|k| lines.len() > k) {
                    lines.pop_front();
                }
            }
        }
        let mut all: Vec<u8> = lines.into_iter().flatten().collect();
        self.cut(&mut all);
        Ok(all)
    }

    /// The whole lines that came since.
    fn more(&mut self) -> std::io::Result<Vec<u8>> {
        let mut file = match File::open(self.places.log()) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(e),
        };
        if file.metadata()?.len() < self.position {
            self.position = 0;
        }
        file.seek(SeekFrom::Start(self.position))?;
        let mut chunk = Vec::new();
        file.take(CHUNK as u64).read_to_end(&mut chunk)?;
        let whole = match chunk.iter().rposition(|b| *b == b'\n') {
            Some(end) => end + 1,
            None if chunk.len() == CHUNK || !self.alive() => chunk.len(),
            None => 0,
        };
        chunk.truncate(whole);
        self.position += whole as u64;
        let mut out = Vec::with_capacity(chunk.len());
        for line in chunk.split_inclusive(|b| *b == b'\n') {
            self.clock(line);
            out.extend(self.dress(line));
        }
        self.cut(&mut out);
        Ok(out)
    }

    fn clock(&mut self, line: &[u8]) {
        let text = String::from_utf8_lossy(line.get(..40).unwrap_or(line));
        let first = text.split_whitespace().next().unwrap_or_default();
        if first.parse::<jiff::Timestamp>().is_ok() {
            first.clone_into(&mut self.time);
        }
    }

    fn dress(&self, line: &[u8]) -> Vec<u8> {
        if self.options.timestamps { [self.time.as_bytes(), b" ", line].concat() } else { line.to_vec() }
    }

    fn cut(&mut self, bytes: &mut Vec<u8>) {
        if let Some(left) = &mut self.left {
            bytes.truncate(usize::try_from(*left).unwrap_or(usize::MAX));
            *left -= bytes.len() as u64;
        }
    }
}

/// Keeps the log bounded: its content goes to the old log, and the file, which the container has open for appending,
/// begins anew. Lines that are written in between may be lost, as with any log that is copied and cut.
pub(super) fn turn_over(places: &Places) -> std::io::Result<bool> {
    let log = places.log();
    if std::fs::metadata(&log).map_or(0, |m| m.len()) < TURN_OVER {
        return Ok(false);
    }
    let tmp = places.old_log().with_extension("tmp");
    std::fs::copy(&log, &tmp)?;
    File::options().write(true).open(&log)?.set_len(0)?;
    std::fs::rename(tmp, places.old_log())?;
    Ok(true)
}

/// The end of the log, for a termination message: so many lines and bytes at most.
pub(super) fn tail(places: &Places, lines: usize, bytes: u64) -> String {
    let Ok(mut file) = File::open(places.log()) else { return String::new() };
    let length = file.metadata().map_or(0, |m| m.len());
    let mut text = Vec::new();
    if file.seek(SeekFrom::Start(length.saturating_sub(bytes))).is_err()
        || file.take(bytes).read_to_end(&mut text).is_err()
    {
        return String::new();
    }
    let text = String::from_utf8_lossy(&text).into_owned();
    let skip = text.lines().count().saturating_sub(lines);
    text.lines().skip(skip).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn reader(dir: &Path, options: LogOptions) -> Reader {
        Reader::new(Places { folder: dir.to_owned() }, "2026-01-01T00:00:00Z".into(), options)
    }

    #[test]
    fn logs_are_tailed_dressed_cut_and_turned_over() {
        let dir = tempfile::tempdir().unwrap();
        let places = Places { folder: dir.path().to_owned() };
        std::fs::write(places.old_log(), "zero\n").unwrap();
        std::fs::write(places.log(), "one\n2026-02-02T00:00:00Z two\nthree").unwrap();
        let text = |options| String::from_utf8(reader(dir.path(), options).backlog().unwrap()).unwrap();
        assert_eq!(text(LogOptions::default()), "zero\none\n2026-02-02T00:00:00Z two\nthree");
        assert_eq!(text(LogOptions { tail_lines: Some(1), ..LogOptions::default() }), "three");
        assert_eq!(text(LogOptions { limit_bytes: Some(6), ..LogOptions::default() }), "zero\no");
        assert_eq!(
            text(LogOptions { tail_lines: Some(3), timestamps: true, ..LogOptions::default() }),
            "2026-01-01T00:00:00Z one\n2026-02-02T00:00:00Z 2026-02-02T00:00:00Z two\n2026-02-02T00:00:00Z three"
        );
        assert_eq!(tail(&places, 2, 2000), "2026-02-02T00:00:00Z two\nthree");
        assert!(!turn_over(&places).unwrap());
        let big = vec![b'x'; usize::try_from(TURN_OVER).unwrap()];
        std::fs::write(places.log(), &big).unwrap();
        let mut following =
            reader(dir.path(), LogOptions { follow: true, tail_lines: Some(0), ..LogOptions::default() });
        following.backlog().unwrap();
        assert!(turn_over(&places).unwrap());
        assert_eq!(std::fs::metadata(places.old_log()).unwrap().len(), TURN_OVER);
        std::fs::write(places.log(), "new\n").unwrap();
        assert_eq!(following.more().unwrap(), b"new\n");
    }
}
