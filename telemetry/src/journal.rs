//! Writes the journal of a component's cells: a recording for replay and explanation, never an input.
//!
//! [`Journal::step`] is the only way by which a driver steps a cell, so that whatever goes into a machine is recorded. Lines
//! are collected and written by a thread in blocks, when 64 KiB are together or a second has passed. Nobody waits for the
//! disk: where it is full or cannot be written, records are dropped and counted, the log and the next block say so, and
//! each cell's next record is its full state, so that a replay finds in again.
//!
//! A journal is a folder of segments (`controller-00000012.journal`), bounded together by size and age; the oldest goes first.
//! A process that starts goes on in the newest segment, unless somebody else is still writing it.

use state::{
    Epoch, Event,
    journal::{CellKind, Encoder, Head, Piece, Recorded, SCHEMA, begin_line, end_line, pieces},
};
use std::{
    collections::{HashMap, VecDeque},
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime},
};

/// Bytes of lines that make a block.
const BLOCK: usize = 64 << 10;
/// How long a line waits for others.
const LINGER: Duration = Duration::from_secs(1);
/// Bytes of lines that may wait for the disk.
const QUEUE: usize = 8 << 20;
/// A journal has about so many segments: when the oldest goes, little goes.
const SEGMENTS: u64 = 8;
/// Pause before a disk that could not be written is tried again.
const RETRY: Duration = Duration::from_secs(5);
/// Age is looked at so often, and at least eight times within the bound.
const SWEEP: Duration = Duration::from_secs(3600);
/// How long the end of a process waits for the disk.
const CLOSE: Duration = Duration::from_secs(5);

/// Least size of a journal.
pub const MIN_SIZE: u64 = 1 << 20;
/// Size of a journal unless told otherwise.
pub const DEFAULT_SIZE: u64 = 64 << 20;
/// Age of a journal unless told otherwise.
pub const DEFAULT_AGE: Duration = Duration::from_secs(7 * 86400);

/// Where a journal is kept and how much of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The folder; made if need be. Each component of a node has one of its own.
    pub dir: PathBuf,
    /// `controller`, `node-agent`; also the beginning of the files' names.
    pub component: &'static str,
    /// Which build of the program writes.
    pub build: String,
    /// Bytes kept, all segments together; at least [`MIN_SIZE`].
    pub size: u64,
    /// How long segments are kept; zero for no bound.
    pub age: Duration,
    /// Whether a thread writes. Without one whoever steps a cell does, and waits for the disk: for simulations, which have one
    /// thread.
    pub thread: bool,
}

impl Config {
    /// With the usual bounds.
    pub fn new(dir: PathBuf, component: &'static str, build: impl Into<String>) -> Self {
        Self { dir, component, build: build.into(), size: DEFAULT_SIZE, age: DEFAULT_AGE, thread: true }
    }
}

/// The journal of one process, and the numbers of its cells. Of whoever owns the cells.
pub struct Journal {
    shared: Option<Arc<Shared>>,
    thread: Option<JoinHandle<()>>,
    /// Who writes where there is no thread.
    inline: Option<Arc<Mutex<Writer>>>,
    cells: HashMap<CellKind, HashMap<String, Mark>>,
    line: Vec<u8>,
}

/// What was recorded of a cell.
#[derive(Default)]
struct Mark {
    seq: u64,
    /// In which its state was recorded last.
    generation: u64,
}

struct Shared {
    queue: Mutex<Queue>,
    news: Condvar,
    /// The thread has written all that it was asked to, or is gone.
    done: Condvar,
    /// A number that changes whenever cells have to record their states anew.
    generation: AtomicU64,
    /// The disk cannot be written: nothing is encoded, only counted.
    down: AtomicBool,
    dropped: AtomicU64,
    written: AtomicU64,
}

#[derive(Default)]
struct Queue {
    chunks: VecDeque<Chunk>,
    bytes: usize,
    since: Option<Instant>,
    /// Dropped and not told in a block yet.
    lost: u64,
    flushes: u64,
    flushed: u64,
    closing: bool,
    closed: bool,
}

/// Lines of one generation.
struct Chunk {
    generation: u64,
    lines: Vec<u8>,
    records: u64,
    /// Dropped before.
    lost: u64,
}

impl Shared {
    /// Nothing is left half-done by a panic while it is held.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts dropped records. At 1, 2, 4, 8, ...: a full disk must not fill the log, too.
    fn drop_records(&self, queue: &mut Queue, n: u64, why: &dyn std::fmt::Display) {
        queue.lost += n;
        let before = self.dropped.fetch_add(n, Ordering::Relaxed);
        let after = before + n;
        if before == 0 || before.ilog2() != after.max(1).ilog2() {
            tracing::warn!(error = %why, dropped = after, "journal records dropped");
        }
    }
}

impl Journal {
    /// Records nothing.
    pub fn off() -> Self {
        Self { shared: None, thread: None, inline: None, cells: HashMap::new(), line: vec![] }
    }

    /// Appends to a journal as `process` (a random id), which leads with `epoch` if it is a leader; `None` records nothing.
    /// Never fails: a folder that cannot be written costs the recording, not the process.
    pub fn open(config: Option<Config>, process: &str, epoch: Option<Epoch>) -> Self {
        let Some(config) = config.filter(|c| c.size > 0) else { return Self::off() };
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            news: Condvar::new(),
            done: Condvar::new(),
            generation: AtomicU64::new(1),
            down: AtomicBool::new(false),
            dropped: AtomicU64::new(0),
            written: AtomicU64::new(0),
        });
        let head = Head {
            schema: SCHEMA,
            build: config.build.clone(),
            component: config.component.into(),
            process: process.into(),
            epoch,
            segment: 0,
            block: 0,
            lost: 0,
        };
        let thread = config.thread;
        let writer = Writer {
            shared: shared.clone(),
            files: Files::new(config),
            head,
            rotate: None,
            retry: None,
            encoder: Encoder::new(),
        };
        let mut journal = Self::off();
        if !thread {
            (journal.shared, journal.inline) = (Some(shared), Some(Arc::new(Mutex::new(writer))));
            return journal;
        }
        let thread = std::thread::Builder::new().name("journal".into()).spawn(move || writer.run());
        match thread {
            Ok(thread) => (journal.shared, journal.thread) = (Some(shared), Some(thread)),
            Err(error) => tracing::warn!(%error, "no journal is written"),
        }
        journal
    }

    /// Steps a cell and records it; what the cell knows already is dropped. `traceparent` is for cells that do not know theirs.
    pub fn step<M: Recorded>(
        &mut self,
        cell: &str,
        traceparent: Option<&str>,
        machine: &mut M,
        event: &Event<M::Input>,
    ) -> Vec<M::Command> {
        if machine.knows(&event.input) {
            return vec![];
        }
        let Some(shared) = &self.shared else { return machine.step(event) };
        let marks = self.cells.entry(M::KIND).or_default();
        let mark = match marks.get_mut(cell) {
            Some(mark) => mark,
            None => marks.entry(cell.to_owned()).or_default(),
        };
        mark.seq += 1;
        if shared.down.load(Ordering::Relaxed) {
            mark.generation = 0;
            shared.drop_records(&mut shared.lock(), 1, &"the journal cannot be written");
            return machine.step(event);
        }
        let generation = shared.generation.load(Ordering::Acquire);
        self.line.clear();
        let state = (mark.generation != generation).then_some(&*machine);
        let begun = begin_line(&mut self.line, cell, mark.seq, state, event);
        let commands = machine.step(event);
        let line = begun.and_then(|()| end_line::<M>(&mut self.line, &commands, machine.traceparent().or(traceparent)));
        let mut queue = shared.lock();
        let due = match line {
            Ok(()) if queue.bytes + self.line.len() <= QUEUE => {
                mark.generation = generation;
                queue.push(&self.line, generation, shared);
                self.inline.is_some() && queue.idle(SWEEP).is_none()
            }
            Ok(()) => {
                mark.generation = 0;
                shared.drop_records(&mut queue, 1, &"the disk is slower than the cells");
                true
            }
            Err(error) => {
                mark.generation = 0;
                shared.drop_records(&mut queue, 1, &error);
                false
            }
        };
        drop(queue);
        if due && let Some(writer) = &self.inline {
            lock(writer).turn();
        }
        commands
    }

    /// A cell is over: another one of its name begins anew.
    pub fn forget(&mut self, kind: CellKind, cell: &str) {
        if let Some(marks) = self.cells.get_mut(&kind) {
            marks.remove(cell);
        }
    }

    /// Whether anything is recorded.
    pub fn is_on(&self) -> bool {
        self.shared.is_some()
    }

    /// Records that were dropped.
    pub fn dropped(&self) -> u64 {
        self.shared.as_ref().map_or(0, |s| s.dropped.load(Ordering::Relaxed))
    }

    /// A handle by which others make the thread write what waits.
    pub fn flusher(&self) -> Flusher {
        Flusher { shared: self.shared.clone(), inline: self.inline.clone() }
    }
}

/// Makes a journal's thread write what waits, and knows what became of what was recorded.
#[derive(Clone)]
pub struct Flusher {
    shared: Option<Arc<Shared>>,
    inline: Option<Arc<Mutex<Writer>>>,
}

impl Flusher {
    /// Bytes that were written so far, and records that were dropped.
    pub fn counts(&self) -> (u64, u64) {
        let of = |s: &Arc<Shared>| (s.written.load(Ordering::Relaxed), s.dropped.load(Ordering::Relaxed));
        self.shared.as_ref().map_or((0, 0), of)
    }

    /// Returns when all that was recorded before the call is in the files, or dropped; after five seconds at the latest.
    /// Blocks.
    pub fn flush(&self) {
        let Some(shared) = &self.shared else { return };
        let mut queue = shared.lock();
        queue.flushes += 1;
        if let Some(writer) = &self.inline {
            drop(queue);
            return lock(writer).turn();
        }
        let mine = queue.flushes;
        shared.news.notify_one();
        let _ = shared.done.wait_timeout_while(queue, CLOSE, |q| q.flushed < mine && !q.closed);
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        let Some(shared) = &self.shared else { return };
        let mut queue = shared.lock();
        queue.closing = true;
        if let Some(writer) = &self.inline {
            drop(queue);
            return lock(writer).turn();
        }
        shared.news.notify_one();
        let queue = shared.done.wait_timeout_while(queue, CLOSE, |q| !q.closed);
        let closed = queue.unwrap_or_else(PoisonError::into_inner).0.closed;
        if let Some(thread) = self.thread.take().filter(|_| closed) {
            let _ = thread.join();
        }
    }
}

impl Queue {
    fn push(&mut self, line: &[u8], generation: u64, shared: &Shared) {
        self.bytes += line.len();
        match self.chunks.back_mut().filter(|c| c.generation == generation && c.lines.len() < BLOCK && self.lost == 0) {
            Some(chunk) => {
                chunk.lines.extend(line);
                chunk.records += 1;
                if chunk.lines.len() >= BLOCK {
                    shared.news.notify_one();
                }
            }
            None => {
                let mut lines = Vec::with_capacity(BLOCK + line.len());
                lines.extend(line);
                self.chunks.push_back(Chunk { generation, lines, records: 1, lost: std::mem::take(&mut self.lost) });
                if self.since.is_none() {
                    self.since = Some(Instant::now());
                    shared.news.notify_one();
                }
            }
        }
    }

    /// How long the thread has nothing to do; `None` where it has.
    fn idle(&self, sweep: Duration) -> Option<Duration> {
        let full = self.chunks.front().is_some_and(|c| c.lines.len() >= BLOCK) || self.chunks.len() > 1;
        if full || self.closing || self.flushed < self.flushes {
            return None;
        }
        match self.since {
            Some(since) => LINGER.checked_sub(since.elapsed()).filter(|d| !d.is_zero()),
            None => Some(sweep),
        }
    }
}

fn lock(writer: &Mutex<Writer>) -> MutexGuard<'_, Writer> {
    // What a panic left half-done is a torn block, which readers pass over.
    writer.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes what waits: a thread, or whoever steps.
struct Writer {
    shared: Arc<Shared>,
    files: Files,
    head: Head,
    /// The first generation that belongs into another segment.
    rotate: Option<u64>,
    /// The disk could not be written; when it is tried again.
    retry: Option<Instant>,
    encoder: Result<Encoder, state::journal::Error>,
}

impl Writer {
    fn run(mut self) {
        self.files.sweep();
        while !self.shared.lock().closed {
            self.wait();
            self.turn();
        }
    }

    /// Writes what waits, and looks after the files.
    fn turn(&mut self) {
        let (chunks, asked, closing) = {
            let mut queue = self.shared.lock();
            queue.bytes = 0;
            queue.since = None;
            (std::mem::take(&mut queue.chunks), queue.flushes, queue.closing)
        };
        for chunk in chunks {
            if let Err(error) = self.write(&chunk) {
                self.fail(&chunk, &error.to_string());
            }
        }
        if self.retry.is_some_and(|at| at <= Instant::now()) || (closing && self.retry.is_some()) {
            self.try_again();
        }
        self.age();
        let mut queue = self.shared.lock();
        queue.flushed = queue.flushed.max(asked);
        queue.closed = closing;
        self.shared.done.notify_all();
    }

    /// Waits for something to write, or for the time to look at the files' age.
    fn wait(&self) {
        let shared = self.shared.clone();
        let mut queue = shared.lock();
        let retry = self.retry.map(|at| at.saturating_duration_since(Instant::now()));
        while let Some(idle) = queue.idle(retry.unwrap_or(self.files.sweep_every())) {
            let waiting = queue.since.is_some();
            let (again, timeout) = shared.news.wait_timeout(queue, idle).unwrap_or_else(PoisonError::into_inner);
            queue = again;
            if timeout.timed_out() && !waiting {
                break;
            }
        }
    }

    fn write(&mut self, chunk: &Chunk) -> Result<(), Box<dyn std::error::Error>> {
        if self.rotate.is_some_and(|from| chunk.generation >= from) {
            self.rotate = None;
            self.files.close();
        }
        self.head.segment = self.files.open()?;
        self.head.lost = chunk.lost;
        self.head.block += 1;
        let encoder = self.encoder.as_mut().map_err(|e| e.to_string())?;
        let block = encoder.block(&self.head, &chunk.lines)?;
        self.files.append(&block)?;
        self.shared.written.fetch_add(block.len() as u64, Ordering::Relaxed);
        if self.files.is_full() {
            self.rotate_soon();
        }
        Ok(())
    }

    /// The next record of each cell is its state and goes into another segment.
    fn rotate_soon(&mut self) {
        if self.rotate.is_none() {
            self.rotate = Some(self.shared.generation.fetch_add(1, Ordering::AcqRel) + 1);
        }
    }

    /// Old segments go; one that has become old is closed, so that it can go when its time has come.
    fn age(&mut self) {
        if self.files.is_older_than(self.files.config.age) && self.rotate.is_some() {
            // Asked for long ago, and nothing came that would have begun another one.
            self.files.close();
        }
        if self.files.is_older_than(self.files.config.age / 8) {
            self.rotate_soon();
        }
        if self.files.sweep_due() {
            self.files.sweep();
        }
    }

    fn fail(&mut self, chunk: &Chunk, error: &str) {
        self.shared.down.store(true, Ordering::Relaxed);
        self.retry = Some(Instant::now() + RETRY);
        let mut queue = self.shared.lock();
        self.shared.drop_records(&mut queue, chunk.records, &format!("{}: {error}", self.files.config.dir.display()));
        queue.lost += chunk.lost;
    }

    /// A block without records tells how many are missing; if it is written, the others are, too.
    fn try_again(&mut self) {
        let lost = self.shared.lock().lost;
        let probe = Chunk { generation: 0, lines: vec![], records: 0, lost };
        match self.write(&probe) {
            Ok(()) => {
                self.shared.lock().lost -= lost;
                self.retry = None;
                self.shared.generation.fetch_add(1, Ordering::AcqRel);
                self.shared.down.store(false, Ordering::Relaxed);
                tracing::info!(dropped = lost, "the journal is written again");
            }
            Err(_) => self.retry = Some(Instant::now() + RETRY),
        }
    }
}

/// The segments of a journal.
struct Files {
    config: Config,
    active: Option<Active>,
    /// The newest segment is not gone on with.
    fresh: bool,
    swept: Instant,
}

struct Active {
    file: File,
    number: u64,
    bytes: u64,
    since: SystemTime,
}

impl Files {
    fn new(config: Config) -> Self {
        let config = Config { size: config.size.max(MIN_SIZE), ..config };
        Self { config, active: None, fresh: false, swept: Instant::now() }
    }

    fn path(&self, number: u64) -> PathBuf {
        self.config.dir.join(format!("{}-{number:08}.{EXTENSION}", self.config.component))
    }

    /// Segments, oldest first.
    fn segments(&self) -> Vec<(u64, PathBuf)> {
        let named = |path: &Path| -> Option<u64> {
            let stem = path.file_name()?.to_str()?.strip_suffix(EXTENSION)?.strip_suffix('.')?;
            stem.strip_prefix(self.config.component)?.strip_prefix('-')?.parse().ok()
        };
        let entries = std::fs::read_dir(&self.config.dir).into_iter().flatten().flatten();
        let mut found: Vec<_> = entries.filter_map(|e| Some((named(&e.path())?, e.path()))).collect();
        found.sort();
        found
    }

    /// The segment that is written: the newest one, or another.
    fn open(&mut self) -> io::Result<u64> {
        if let Some(active) = &self.active {
            return Ok(active.number);
        }
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.config.dir)?;
        let newest = self.segments().pop();
        if let Some((number, path)) = newest.as_ref().filter(|_| !self.fresh) {
            let file = OpenOptions::new().append(true).open(path)?;
            let meta = file.metadata()?;
            // One that somebody writes (a leader that has not noticed yet that it is none) is not ours.
            if meta.is_file() && meta.len() < self.limit() && file.try_lock().is_ok() {
                let since = meta.created().or_else(|_| meta.modified())?;
                self.active = Some(Active { file, number: *number, bytes: meta.len(), since });
                return Ok(*number);
            }
        }
        let mut number = newest.map_or(1, |(n, _)| n + 1);
        loop {
            let opened = OpenOptions::new().create_new(true).append(true).mode(0o600).open(self.path(number));
            match opened {
                Ok(file) => {
                    let _ = file.try_lock();
                    self.active = Some(Active { file, number, bytes: 0, since: SystemTime::now() });
                    self.fresh = false;
                    self.sweep();
                    return Ok(number);
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => number += 1,
                Err(e) => return Err(e),
            }
        }
    }

    /// The next block goes into another segment.
    fn close(&mut self) {
        self.active = None;
        self.fresh = true;
    }

    fn append(&mut self, block: &[u8]) -> io::Result<()> {
        let Some(active) = &mut self.active else { return Err(io::ErrorKind::NotFound.into()) };
        if let Err(error) = active.file.write_all(block) {
            // What was torn is passed over by readers, too; this saves the room.
            let _ = active.file.set_len(active.bytes);
            self.active = None;
            return Err(error);
        }
        active.bytes += block.len() as u64;
        Ok(())
    }

    /// Size of a segment.
    fn limit(&self) -> u64 {
        self.config.size / SEGMENTS
    }

    fn is_full(&self) -> bool {
        self.active.as_ref().is_some_and(|a| a.bytes >= self.limit())
    }

    fn is_older_than(&self, age: Duration) -> bool {
        let old = |a: &Active| a.bytes > 0 && a.since.elapsed().is_ok_and(|past| past >= age);
        !self.config.age.is_zero() && self.active.as_ref().is_some_and(old)
    }

    fn sweep_every(&self) -> Duration {
        if self.config.age.is_zero() { SWEEP } else { (self.config.age / 8).clamp(Duration::from_secs(1), SWEEP) }
    }

    fn sweep_due(&self) -> bool {
        self.swept.elapsed() >= self.sweep_every()
    }

    /// Removes what is too old or too much, but never the segment that is written.
    fn sweep(&mut self) {
        self.swept = Instant::now();
        // The one that is written may grow to its limit.
        let mut room = self.config.size - self.limit();
        let mut full = false;
        for (number, path) in self.segments().into_iter().rev() {
            if self.active.as_ref().is_some_and(|a| a.number == number) {
                continue;
            }
            let Ok(meta) = std::fs::metadata(&path) else { continue };
            full = full || meta.len() > room;
            room = room.saturating_sub(meta.len());
            let old = meta.modified().ok().and_then(|t| t.elapsed().ok()).is_some_and(|age| age >= self.config.age);
            let old = old && !self.config.age.is_zero();
            if (full || old)
                && let Err(error) = std::fs::remove_file(&path)
            {
                tracing::warn!(%error, path = %path.display(), "an old journal segment stays");
            }
        }
    }
}

/// How the names of segments end.
pub const EXTENSION: &str = "journal";

/// The segments below a folder (of any component), each component's oldest first; a file stands for itself.
pub fn segments(path: &Path) -> io::Result<Vec<PathBuf>> {
    if !std::fs::metadata(path)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut found = vec![];
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.extend(segments(&entry.path())?);
        } else if entry.path().extension().is_some_and(|e| e == EXTENSION) {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

/// Runs all segments below a folder through the machines of this build; also tells how many bytes are damaged.
pub fn replay(dir: &Path) -> io::Result<(state::replay::Report, usize)> {
    let (mut replay, mut damaged) = (state::replay::Replay::default(), 0);
    for path in segments(dir)? {
        for piece in pieces(&std::fs::read(path)?) {
            match piece {
                Piece::Block(block) => replay.block(&block),
                Piece::Damage { bytes, .. } => damaged += bytes,
            }
        }
    }
    Ok((replay.finish(), damaged))
}

#[cfg(test)]
mod tests;
