//! When two worlds are one state: where they differ only in numbers that nobody looks at but to compare them.
//!
//! What is there is printed, and what is printed is read word by word. UIDs, random ids and names made of hashes become numbers in the
//! order in which they first come; resourceVersions and epochs their rank among those of their kind; a time is over, or it is to
//! come. What only counts (commands, retries) is left out. Everything else stands as it is.

use super::super::{Action, BEGIN, World, api::Proc, server::Res};
use sha2::{Digest, Sha256};
use state::Timestamp;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
};

/// Part of what is printed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// As it is.
    Text(Box<str>),
    /// One of many that are only compared with each other.
    Atom(Box<str>),
    /// A version of the store; of something of this kind where it may be one between two of it.
    Version(u64, Option<Res>),
    /// Milliseconds.
    Time(u64),
    /// A version of an object.
    Object(u64),
}

/// Fields that are left out: counters, and what follows from other fields.
fn is_left_out(field: &str) -> bool {
    matches!(
        field,
        "next_id"
            | "inc"
            | "agent_inc"
            | "retry"
            | "numbers"
            | "deadlines"
            | "interested"
            | "again"
            | "known"
            | "kubelet_due"
            | "held"
            | "beat"
            | "down_at"
            | "up_at"
            | "down_until"
            | "up_until"
            | "link_at"
            | "until"
            | "marks"
            | "noted"
            | "tell"
    )
}

/// Failures in a row: from so many on the pause after them is the longest one.
const MANY: u64 = 8;

/// Whether the number of a field is a version of the store, though its type does not say so; and of what kind, where it says how
/// far a watch has come.
fn version_in(field: &str) -> Option<Option<Res>> {
    match field {
        "reached" | "reflector_rv" => Some(Some(Res::Vmi)),
        "resourceVersion" | "resource_version" | "vmi_rv" | "epoch" => Some(None),
        _ => None,
    }
}

/// Deadlines: whether they have come matters to nobody, because what waits for them may be told at any time.
fn is_deadline(field: &str) -> bool {
    matches!(field, "armed" | "wake" | "next_wake" | "listens")
}

/// What is read out of one version of an object, and says which.
fn is_view(name: &str) -> bool {
    matches!(name, "VmView" | "VmiView" | "PodView" | "VmiFacts")
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
    from: usize,
    out: Vec<Piece>,
}

fn is_word(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b == b'_'
}

fn number(word: &str) -> Option<u64> {
    word.bytes().all(|b| b.is_ascii_digit()).then(|| word.parse().ok()).flatten()
}

fn is_atom(word: &str) -> bool {
    word.len() >= 10
        && word.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
        && word.bytes().any(|b| b.is_ascii_digit())
}

impl<'a> Reader<'a> {
    fn bytes(&self) -> &'a [u8] {
        self.text.as_bytes()
    }

    fn word(&self, from: usize) -> &'a str {
        let end = self.bytes().iter().skip(from).position(|b| !is_word(*b)).map_or(self.text.len(), |n| from + n);
        self.text.get(from..end).unwrap_or_default()
    }

    /// Ends the text before here, and goes on after so many bytes.
    fn put(&mut self, piece: Piece, len: usize) {
        self.cut();
        self.out.push(piece);
        self.at += len;
        self.from = self.at;
    }

    fn cut(&mut self) {
        if let Some(text) = self.text.get(self.from..self.at).filter(|t| !t.is_empty()) {
            self.out.push(Piece::Text(text.into()));
        }
        self.from = self.at;
    }

    /// Goes past a value, with all that is in it.
    fn skip(&mut self) {
        self.cut();
        self.pass();
        self.from = self.at;
    }

    fn pass(&mut self) {
        let mut depth = 0usize;
        let mut quoted = false;
        while let Some(b) = self.bytes().get(self.at) {
            match b {
                b'\\' if quoted => self.at += 1,
                b'"' => quoted = !quoted,
                _ if quoted => {}
                b'(' | b'[' | b'{' => depth += 1,
                b')' | b']' | b'}' | b',' if depth == 0 => break,
                b')' | b']' | b'}' => depth -= 1,
                _ => {}
            }
            self.at += 1;
        }
    }

    /// Takes a view for the version that it is of, which stands in its first field of that type.
    fn view(&mut self, end: usize) -> bool {
        const OPEN: &str = " {";
        const VERSION: &str = "rv: ResourceVersion(";
        let rest = self.text.get(end..).unwrap_or_default();
        let Some(at) = rest.find(VERSION).filter(|_| rest.starts_with(OPEN)) else { return false };
        let Some(version) = number(self.word(end + at + VERSION.len())).filter(|v| *v > 0) else { return false };
        self.at = end;
        self.skip();
        self.out.push(Piece::Object(version));
        true
    }

    /// A number that says nothing more where it is high.
    fn saturate(&mut self) {
        // After the colon and a space.
        let word = self.word(self.at + 2);
        if number(word).is_some_and(|n| n >= MANY) {
            self.at += 2;
            self.put(Piece::Text("many".into()), word.len());
        }
    }

    fn read(mut self) -> Vec<Piece> {
        // The next number is a version of this kind.
        let mut version: Option<Option<Res>> = None;
        while let Some(b) = self.bytes().get(self.at).copied() {
            if !is_word(b) {
                self.at += 1;
                continue;
            }
            let word = self.word(self.at);
            let end = self.at + word.len();
            if word.len() == 4
                && self.bytes().get(end) == Some(&b'-')
                && let Some((time, len)) = stamp(self.text.get(self.at..).unwrap_or_default())
            {
                self.put(Piece::Time(time), len);
                continue;
            }
            if let Some(n) = number(word) {
                match version.take() {
                    Some(of) if n < BEGIN => self.put(Piece::Version(n, of), word.len()),
                    _ if word.len() == 13 => self.put(Piece::Time(n), word.len()),
                    _ if word.len() >= 10 => self.put(Piece::Atom(word.into()), word.len()),
                    _ => self.at = end,
                }
                continue;
            }
            if is_atom(word) {
                self.put(Piece::Atom(word.into()), word.len());
                continue;
            }
            let called = self.bytes().get(end) == Some(&b'(');
            let inner = if called { self.word(end + 1) } else { "" };
            let value = number(inner);
            match (word, value) {
                ("Timestamp", Some(n)) => self.put(Piece::Time(n), word.len() + 1 + inner.len()),
                ("ResourceVersion" | "Epoch", Some(n)) => {
                    self.put(Piece::Version(n, None), word.len() + 1 + inner.len())
                }
                ("Seen", Some(n)) => self.put(Piece::Object(n), word.len() + 1 + inner.len()),
                ("CommandId" | "Digest", Some(_)) => {
                    let text = format!("{word}{inner}");
                    self.put(Piece::Atom(text.into()), word.len() + 1 + inner.len());
                }
                (name, None) if is_view(name) && self.view(end) => {}
                _ => {
                    let field = self.bytes().get(end) == Some(&b':');
                    self.at = end;
                    if field && matches!(word, "fails" | "ask_fails") {
                        self.saturate();
                    } else if field && is_left_out(word) {
                        self.skip();
                        version = None;
                    } else if field && is_deadline(word) {
                        let from = self.at;
                        self.skip();
                        // That there is one, and of what.
                        let text = self.text.get(from..self.at).unwrap_or_default();
                        let bare = |p| if matches!(p, Piece::Time(_)) { Piece::Text("~".into()) } else { p };
                        self.out.extend(pieces(text).into_iter().map(bare));
                    } else if let Some(of) = version_in(word) {
                        version = Some(of);
                    } else if !matches!(word, "String" | "Some" | "Number") {
                        version = None;
                    }
                }
            }
        }
        self.cut();
        self.out
    }
}

/// A time as objects have it, and how many bytes it takes.
fn stamp(text: &str) -> Option<(u64, usize)> {
    let len = text.bytes().take(32).position(|b| b == b'Z')? + 1;
    Timestamp::parse(text.get(..len)?).map(|t| (t.0, len))
}

/// Reads what was printed.
pub(in super::super) fn pieces(text: &str) -> Vec<Piece> {
    Reader { text, at: 0, from: 0, out: vec![] }.read()
}

struct Writer<'a> {
    world: &'a World,
    atoms: BTreeMap<&'a str, usize>,
    ranks: BTreeMap<(Option<Res>, u64), usize>,
    shown: BTreeSet<u64>,
    out: Vec<u8>,
}

impl<'a> Writer<'a> {
    fn kind(&self, version: u64, of: Option<Res>) -> (Option<Res>, u64) {
        let lab = self.world.search.as_deref();
        match of {
            // The last one of that kind up to there.
            Some(res) => (of, lab.map_or(0, |l| l.before(res, version))),
            None => (lab.and_then(|l| l.kind(version)), version),
        }
    }

    /// Notes the versions that there are.
    fn count(&mut self, pieces: &'a [Piece]) {
        for piece in pieces {
            match piece {
                Piece::Version(v, of) => {
                    self.ranks.insert(self.kind(*v, *of), 0);
                }
                Piece::Object(v) => {
                    self.ranks.insert(self.kind(*v, None), 0);
                    if self.shown.insert(*v)
                        && let Some(seen) = self.world.server.version(*v)
                    {
                        self.count(seen.pieces());
                    }
                }
                Piece::Text(_) | Piece::Atom(_) | Piece::Time(_) => {}
            }
        }
    }

    fn rank(&mut self) {
        let mut next: BTreeMap<Option<Res>, usize> = BTreeMap::new();
        for ((res, _), rank) in &mut self.ranks {
            let n = next.entry(*res).or_default();
            *rank = *n;
            *n += 1;
        }
        self.shown.clear();
    }

    fn version(&mut self, sign: u8, key: (Option<Res>, u64)) {
        let rank = self.ranks.get(&key).copied().unwrap_or(0);
        let _ = std::io::Write::write_fmt(&mut self.out, format_args!("{}{:?}{rank}", sign as char, key.0));
    }

    fn write(&mut self, pieces: &'a [Piece]) {
        for piece in pieces {
            match piece {
                Piece::Text(text) => self.out.extend_from_slice(text.as_bytes()),
                Piece::Atom(name) => {
                    let n = self.atoms.len();
                    let n = *self.atoms.entry(name).or_insert(n);
                    let _ = std::io::Write::write_fmt(&mut self.out, format_args!("#{n}"));
                }
                Piece::Version(0, _) => self.out.push(b'0'),
                Piece::Version(v, of) => self.version(b'@', self.kind(*v, *of)),
                Piece::Time(0) => self.out.push(b'-'),
                Piece::Time(t) => self.out.push(if *t > self.world.now { b'>' } else { b'<' }),
                Piece::Object(v) => {
                    self.version(b'=', self.kind(*v, None));
                    if self.shown.insert(*v)
                        && let Some(seen) = self.world.server.version(*v)
                    {
                        self.write(seen.pieces());
                    }
                }
            }
        }
    }
}

impl World {
    /// The bytes of this state.
    pub(super) fn canonical(&self) -> Vec<u8> {
        let text = self.printed();
        let pieces = pieces(&text);
        let mut w = Writer {
            world: self,
            atoms: BTreeMap::new(),
            ranks: BTreeMap::new(),
            shown: BTreeSet::new(),
            out: Vec::with_capacity(text.len()),
        };
        w.count(&pieces);
        w.rank();
        w.write(&pieces);
        w.out
    }

    /// Their hash.
    pub(super) fn fingerprint(&self) -> u128 {
        let hash = Sha256::digest(self.canonical());
        hash.iter().take(16).fold(0, |n, b| (n << 8) | u128::from(*b))
    }

    fn printed(&self) -> String {
        let mut t = String::with_capacity(32 * 1024);
        // A string takes all that it is given.
        let _ = self.print(&mut t);
        t
    }

    fn print(&self, t: &mut String) -> std::fmt::Result {
        if let Some(lab) = &self.search {
            write!(t, "{:?}", lab.left)?;
        }
        for o in self.ghost.present.values() {
            write!(t, "{o:?}")?;
        }
        for (c, x) in self.controllers.iter().enumerate().filter(|(_, x)| x.alive) {
            let text = format!("|c{c}{x:?}");
            // That something was seen since a question is looked at by the answer to a live read alone.
            let asks = text.contains(", Confirm)");
            t.push_str(&if asks { text } else { text.replace("news: true", "news: false") });
        }
        for node in &self.nodes {
            write!(t, "|n{node:?}")?;
        }
        for w in self.watches.iter().filter(|w| self.lives(w.owner)) {
            write!(t, "|w{:?}{}", w.res, w.open)?;
            for v in self.search.iter().flat_map(|lab| lab.after(w.res, w.position)) {
                write!(t, "Seen({v})")?;
            }
        }
        for s in self.sessions.values() {
            write!(t, "|s{s:?}")?;
        }
        self.print_agenda(t)?;
        let g = &self.ghost;
        write!(t, "|g{:?}{:?}{:?}{:?}{:?}", g.executing, g.starts, g.standing, g.authorised, g.told_to_start)?;
        write!(t, "{:?}{:?}{:?}", g.begun, g.declared, g.stopped)?;
        // What is read from now on is younger than any stop.
        for (vm, (_, vmi)) in &g.stops {
            write!(t, "{vm}{vmi}")?;
        }
        Ok(())
    }

    /// What is on its way: in order where it has one.
    fn print_agenda(&self, t: &mut String) -> std::fmt::Result {
        let mut all: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for action in self.agenda.values() {
            let text = format!("{action:?}");
            let lane = match action {
                Action::Down(id, _) => format!("down{id}"),
                Action::Up(_, id, _) => format!("up{id}"),
                Action::Linked(Proc::Controller(n, _) | Proc::Agent(n, _), pod, ..) => format!("link{n}{pod}"),
                _ => text.clone(),
            };
            all.entry(lane).or_default().push(text);
        }
        for text in all.values().flatten() {
            write!(t, "|a{text}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_is_printed_is_read_word_by_word() {
        let read = |text: &str| pieces(text);
        let text = |t: &str| Piece::Text(t.into());
        assert_eq!(read("a: 5, next_id: 17, b"), [text("a: 5, next_id"), text(", b")]);
        assert_eq!(read("held: [Some(\"x, ]\")], b"), [text("held"), text(", b")]);
        assert_eq!(
            read("armed: Some(Timestamp(12)), VmView { meta: Meta { rv: ResourceVersion(7) } }, b"),
            [text("armed"), text(": Some("), text("~"), text("))"), text(", VmView"), Piece::Object(7), text(", b")],
            "that there is a deadline, and which version is seen"
        );
        assert_eq!(
            read("Timestamp(12)) vm-a00000000001"),
            [Piece::Time(12), text(")) vm-"), Piece::Atom("a00000000001".into())]
        );
        assert_eq!(read("fails: 3, a"), [text("fails: 3, a")]);
        assert_eq!(read("fails: 12, a"), [text("fails: "), text("many"), text(", a")]);
        assert_eq!(read("Some(ResourceVersion(7))"), [text("Some("), Piece::Version(7, None), text("))")]);
        assert_eq!(
            read("\"resourceVersion\": String(\"57\"), \"n\": Number(3)"),
            [text("\"resourceVersion\": String(\""), Piece::Version(57, None), text("\"), \"n\": Number(3)")]
        );
        assert_eq!(read("reached: Some(9)"), [text("reached: Some("), Piece::Version(9, Some(Res::Vmi)), text(")")]);
        assert_eq!(
            read("\"2026-01-01T00:00:03Z\""),
            [text("\""), Piece::Time(BEGIN + 3000), text("\"")],
            "as objects have it"
        );
    }
}
