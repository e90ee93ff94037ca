//! What a cell knows of one object, and whether something of ours is on its way to it.

use crate::{
    Millis, ResourceVersion, Timestamp, Uid,
    object::{CommandId, Refusal, Versioned},
};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::{io, sync::Arc};

/// UIDs that are remembered as gone. A name is reused a few times within the life of a cell's memory, not more.
const TOMBSTONES: usize = 16;
/// First pause after a write that failed; it doubles.
const BACKOFF_FIRST: Millis = Millis(500);
/// Longest pause after a write that failed.
const BACKOFF_LAST: Millis = Millis::secs(30);
/// Pause before a write is repeated that was applied and changed nothing (a field that the server drops).
const USELESS_PAUSE: Millis = Millis::secs(30);

/// Of the body of a patch, but for the version that it is of. Two bodies that share one cost a pause, so 64 bits are plenty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Digest(u64);

impl Digest {
    fn of(body: &Value) -> Self {
        let mut digest = Self(0xcbf2_9ce4_8422_2325);
        for (key, value) in body.as_object().into_iter().flatten() {
            match value.as_object().filter(|_| key == "metadata") {
                Some(meta) => meta.iter().filter(|(k, _)| *k != "resourceVersion").for_each(|(k, v)| digest.add(k, v)),
                None => digest.add(key, value),
            }
        }
        if !body.is_object() {
            digest.add("", body);
        }
        digest
    }

    fn add(&mut self, key: &str, value: &Value) {
        // Neither the sink nor a value of JSON can fail.
        let _ = serde_json::to_writer(&mut *self, &(key, value));
    }
}

/// FNV-1a.
impl io::Write for Digest {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 = bytes.iter().fold(self.0, |d, b| (d ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Journals of before have the body itself.
fn digested<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Digest>, D::Error> {
    Ok(Option::<Value>::deserialize(d)?.map(|v| v.as_u64().map_or_else(|| Digest::of(&v), Digest)))
}

/// One object of a cell.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Slot<T> {
    /// Shared with the caches that it came from.
    seen: Option<Arc<T>>,
    tombs: Vec<Uid>,
    absent: bool,
    had: bool,
    flight: Option<CommandId>,
    doubt: bool,
    /// The doubt is younger than the command on its way: its answer does not settle it.
    young: bool,
    /// Something newer was seen while the command was on its way.
    news: bool,
    fails: u32,
    not_before: Timestamp,
    error: Option<Refusal>,
    #[serde(deserialize_with = "digested")]
    last_body: Option<Digest>,
    /// The version that it was for.
    #[serde(default)]
    last_rv: ResourceVersion,
    /// What the server called a conflict, and the version that it was for.
    #[serde(default)]
    contested: Option<(Digest, ResourceVersion)>,
}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self {
            seen: None,
            tombs: vec![],
            absent: false,
            had: false,
            flight: None,
            doubt: false,
            young: false,
            news: false,
            fails: 0,
            not_before: Timestamp::default(),
            error: None,
            last_body: None,
            last_rv: ResourceVersion::default(),
            contested: None,
        }
    }
}

/// Whether the object that was seen took the place of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Folded {
    /// Nothing new.
    Ignored,
    /// A newer version, or the first sight.
    Updated,
    /// Another UID under the same name: the older one is gone.
    Replaced,
}

impl<T: Versioned> Slot<T> {
    /// The object as last seen.
    pub fn get(&self) -> Option<&T> {
        self.seen.as_deref()
    }

    /// The same, to be held while the cell changes.
    pub fn shared(&self) -> Option<Arc<T>> {
        self.seen.clone()
    }

    /// It is at this version of the object, or at a later one, or knows that it is gone: a sight of it would be ignored. Of two copies
    /// of one version it keeps the one that is shown, which the caches keep, too.
    pub fn knows(&mut self, object: &Arc<T>) -> bool {
        if self.tombs.contains(object.uid()) {
            return true;
        }
        let Some(seen) = self.seen.as_mut().filter(|k| k.uid() == object.uid()) else { return false };
        if seen.rv() == object.rv() {
            seen.clone_from(object);
        }
        object.rv() <= seen.rv()
    }

    /// Known not to exist: its deletion was seen, or a live read found nothing. (Not having seen it is not enough.)
    pub fn is_absent(&self) -> bool {
        self.seen.is_none() && self.absent
    }

    /// It was seen since the last [`Slot::reset`].
    pub fn had_one(&self) -> bool {
        self.had
    }

    /// A UID that is known to be gone for ever.
    pub fn is_tombstoned(&self, uid: &Uid) -> bool {
        self.tombs.contains(uid)
    }

    /// Folds a sight. `live` means that the answer was newer than anything that we had asked before (own write, live read).
    pub fn fold(&mut self, object: impl Into<Arc<T>>, live: bool) -> Folded {
        let object = object.into();
        let uid = object.uid();
        if live {
            // What was asked before somebody said that it is otherwise now, does not tell.
            self.doubt = std::mem::take(&mut self.young);
        }
        if self.tombs.contains(uid) {
            return Folded::Ignored;
        }
        let folded = match &self.seen {
            None => Folded::Updated,
            Some(old) if old.uid() == uid => {
                if object.rv() <= old.rv() {
                    return Folded::Ignored;
                }
                Folded::Updated
            }
            // Within one resource, the higher version is the newer object.
            Some(old) if live || object.rv() > old.rv() => {
                let dead = old.uid().clone();
                self.bury(dead);
                Folded::Replaced
            }
            Some(_) => return Folded::Ignored,
        };
        self.news |= self.flight.is_some();
        self.seen = Some(object);
        self.absent = false;
        self.had = true;
        folded
    }

    /// The UID is gone. An empty UID means: nothing has that name. Tells whether the object that we knew went.
    pub fn gone(&mut self, uid: &Uid) -> bool {
        if !uid.is_empty() {
            self.bury(uid.clone());
        }
        let ours = self.seen.as_ref().is_none_or(|o| uid.is_empty() || o.uid() == uid);
        if !ours {
            return false;
        }
        let had = self.seen.take();
        self.absent = true;
        self.doubt = false;
        if let Some(o) = &had {
            let dead = o.uid().clone();
            self.bury(dead);
        }
        had.is_some()
    }

    fn bury(&mut self, uid: Uid) {
        if !self.tombs.contains(&uid) {
            self.tombs.push(uid);
            if self.tombs.len() > TOMBSTONES {
                self.tombs.remove(0);
            }
        }
    }

    /// Forgets all but the tombstones: the next object of this slot is another one.
    pub fn reset(&mut self) {
        let tombs = std::mem::take(&mut self.tombs);
        *self = Self { tombs, ..Self::default() };
    }

    /// Forgets the object, not what is on its way: it is of no use any more.
    pub fn forget(&mut self) {
        self.seen = None;
        self.absent = false;
    }

    /// Somebody says that it may have changed or vanished: ask before the next write.
    pub fn doubt(&mut self) {
        self.doubt = true;
        self.young |= self.flight.is_some();
        self.last_body = None;
    }

    /// The server says that somebody else was faster: look, and try again at once if that is so.
    pub fn conflict(&mut self) {
        self.contested = self.last_body.map(|body| (body, self.last_rv));
        self.doubt();
    }

    /// The next command has to be a live read.
    pub fn is_doubted(&self) -> bool {
        self.doubt
    }

    /// A command of ours is on its way.
    pub fn in_flight(&self) -> bool {
        self.flight.is_some()
    }

    /// A command may be sent now.
    pub fn is_free(&self, now: Timestamp) -> bool {
        self.flight.is_none() && now >= self.not_before
    }

    /// When a command may be sent, where that is later than now and nothing is in flight.
    pub fn free_at(&self, now: Timestamp) -> Option<Timestamp> {
        (self.flight.is_none() && self.not_before > now).then_some(self.not_before)
    }

    /// Takes off.
    pub fn depart(&mut self, id: CommandId) {
        self.flight = Some(id);
        self.young = false;
        self.news = false;
    }

    /// The answer to a live read was: there is none. Not so where one was seen since the question: then ask again. Tells
    /// whether the object that we knew went.
    pub fn not_found(&mut self) -> bool {
        if std::mem::take(&mut self.news) {
            self.doubt = true;
            return false;
        }
        self.gone(&Uid::default())
    }

    /// Remembers what is written. The same body twice in a row has no effect: the second is delayed. So is one that was called a
    /// conflict where a look has shown that nobody was faster.
    pub fn writes(&mut self, body: &Value, now: Timestamp) -> bool {
        let digest = Digest::of(body);
        if self.last_body == Some(digest) {
            self.last_body = None;
            self.not_before = now.after(USELESS_PAUSE);
            return false;
        }
        let rv = self.rv();
        if self.contested.take() == Some((digest, rv)) {
            self.failed(now, None);
            return false;
        }
        (self.last_body, self.last_rv) = (Some(digest), rv);
        true
    }

    /// Lands. False where it was not the command in flight.
    pub fn land(&mut self, id: CommandId) -> bool {
        let ours = self.flight == Some(id);
        if ours {
            self.flight = None;
        }
        ours
    }

    /// The command worked.
    pub fn succeeded(&mut self) {
        self.fails = 0;
        self.not_before = Timestamp::default();
        self.error = None;
    }

    /// The command did not work; wait before the next.
    pub fn failed(&mut self, now: Timestamp, error: Option<Refusal>) {
        let pause = BACKOFF_FIRST.0.saturating_mul(1 << self.fails.min(16)).min(BACKOFF_LAST.0);
        self.fails = self.fails.saturating_add(1);
        self.not_before = now.after(Millis(pause));
        self.last_body = None;
        if error.is_some() {
            self.error = error;
        }
    }

    /// Wait at least until.
    pub fn hold(&mut self, until: Timestamp) {
        self.last_body = None;
        self.not_before = self.not_before.max(until);
    }

    /// Writes are being refused, and why.
    pub fn error(&self) -> Option<&Refusal> {
        self.error.as_ref()
    }

    /// Nothing was said against it, after all; the pause stays.
    pub fn forgive(&mut self) {
        self.error = None;
    }

    /// Commands in a row that did not work.
    pub fn failures(&self) -> u32 {
        self.fails
    }

    /// UID as last seen; empty where there is none.
    pub fn uid(&self) -> Uid {
        self.seen.as_ref().map(|o| o.uid().clone()).unwrap_or_default()
    }

    /// resourceVersion as last seen.
    pub fn rv(&self) -> ResourceVersion {
        self.seen.as_ref().map(|o| o.rv()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[derive(Debug, Clone, PartialEq)]
    struct Object(Uid, u64);
    impl Versioned for Object {
        fn uid(&self) -> &Uid {
            &self.0
        }
        fn rv(&self) -> ResourceVersion {
            ResourceVersion(self.1)
        }
    }
    fn thing(uid: &str, rv: u64) -> Object {
        Object(uid.into(), rv)
    }

    #[test]
    fn older_versions_dead_uids_and_foreign_deletions_are_ignored() {
        let mut s = Slot::default();
        assert!(!s.is_absent(), "not having seen it proves nothing");
        assert_eq!(s.fold(thing("a", 5), false), Folded::Updated);
        assert_eq!(s.fold(thing("a", 5), false), Folded::Ignored);
        assert_eq!(s.fold(thing("a", 4), true), Folded::Ignored);
        assert_eq!(s.fold(thing("b", 3), false), Folded::Ignored, "an older object of the same name");
        assert_eq!(s.fold(thing("b", 9), false), Folded::Replaced);
        assert_eq!(s.fold(thing("a", 99), true), Folded::Ignored, "buried");
        assert!(!s.gone(&"c".into()));
        assert!(s.get().is_some());
        assert!(s.gone(&"b".into()));
        assert!(s.is_absent());
        assert_eq!(s.fold(thing("b", 100), false), Folded::Ignored);
    }

    #[test]
    fn an_answer_does_not_settle_a_doubt_that_is_younger_than_its_question() {
        let mut s = Slot::default();
        s.fold(thing("a", 5), false);
        s.depart(CommandId(1));
        s.doubt();
        s.land(CommandId(1));
        s.fold(thing("a", 6), true);
        assert!(s.is_doubted(), "it was read before a list did not have it");
        s.depart(CommandId(2));
        s.land(CommandId(2));
        s.fold(thing("a", 6), true);
        assert!(!s.is_doubted());
    }

    #[test]
    fn what_was_seen_since_the_question_is_not_gone() {
        let mut s = Slot::default();
        s.depart(CommandId(1));
        s.fold(thing("a", 5), false);
        s.land(CommandId(1));
        assert!(!s.not_found(), "it was made between the read and its answer");
        assert!(s.get().is_some() && s.is_doubted() && !s.is_tombstoned(&"a".into()));
        s.depart(CommandId(2));
        s.land(CommandId(2));
        assert!(s.not_found() && s.is_absent());
    }

    #[test]
    fn failures_back_off_and_a_useless_write_is_not_repeated_at_once() {
        let mut s = Slot::<Object>::default();
        let mut now = Timestamp(1000);
        let mut pauses = vec![];
        for _ in 0..8 {
            s.failed(now, None);
            let next = s.free_at(now).unwrap();
            pauses.push(next.since(now).0);
            now = next;
        }
        assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 16000, 30000, 30000]);
        s.succeeded();
        assert!(s.is_free(now));
        let body = |version, a| serde_json::json!({"metadata": {"uid": "u", "resourceVersion": version}, "a": a});
        assert!(s.writes(&body("1", 1), now));
        assert!(s.writes(&body("2", 2), now));
        let recorded = serde_json::to_value(s.last_body).unwrap();
        assert_eq!(digested(recorded).unwrap(), digested(body("1", 2)).unwrap(), "as journals of before have it");
        assert!(!s.writes(&body("3", 2), now), "of another version, and yet the same");
        assert!(!s.is_free(now));
    }
}
