//! What is done to a world, as data: operations of people and faults, each with its time. A seed draws them while it runs; what it
//! drew is kept, and a plan that is given instead does the same again, or less, which is what shrinking is.
//!
//! A fault that strikes by the clock is done at its time. One that strikes a call, a message or a guest names what it struck: it
//! strikes that very one where everything before is the same, else the next of its kind from its time on. What else a fault
//! needs (who, how long) is drawn from its own salt, and everything that is no fault from the seed and the time alone, so that what is
//! left out of a plan changes nothing but what follows from it.

use super::{
    Action, BEGIN, World,
    dice::Dice,
    mutants::Mutant,
    run,
    swarm::Fault,
    users::{Deed, STRATEGIES},
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Numbers of what a plan does: before everything else of the same time.
pub(super) const EARLY: u64 = 1 << 20;

/// What a fault was drawn with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Strike {
    /// Which.
    pub fault: Fault,
    /// What it struck; empty where it strikes by the clock.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub on: String,
    /// How many at the same time it let pass.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub nth: u32,
    /// What it draws from.
    pub salt: u64,
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

/// Something that is done, and when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Planned {
    /// Milliseconds since the world began.
    pub at: u64,
    /// What.
    #[serde(flatten)]
    pub what: What,
}

/// What is done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum What {
    /// Somebody does something.
    Deed {
        /// In words, as [`Deed::parse`] reads them.
        #[serde(rename = "do", with = "words")]
        deed: Deed,
    },
    /// Something goes wrong.
    Strike(Strike),
}

mod words {
    use super::Deed;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(deed: &Deed, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&deed.words())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Deed, D::Error> {
        let text = String::deserialize(d)?;
        Deed::parse(&text).ok_or_else(|| D::Error::custom(format!("nobody can do {text:?}")))
    }
}

/// A whole run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// What it is about, for whoever reads it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub about: String,
    /// The mechanism that is broken, where one is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mutant: Option<Mutant>,
    /// The check that it violates with that.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub check: String,
    /// Where everything that is no fault is drawn from.
    pub seed: u64,
    /// Nodes.
    pub nodes: usize,
    /// Controllers.
    pub controllers: usize,
    /// Names of machines.
    pub machines: Vec<String>,
    /// Names of sets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sets: Vec<String>,
    /// When people and faults stop, in milliseconds since the world began.
    pub until: u64,
    /// What is done, in order.
    pub events: Vec<Planned>,
}

impl Plan {
    /// Reads one.
    ///
    /// # Errors
    /// What is not understood.
    pub fn parse(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// As JSON, a line for each thing that is done.
    pub fn text(&self) -> String {
        let head = serde_json::to_value(Self { events: vec![], ..self.clone() }).unwrap_or_default();
        let order = ["about", "mutant", "check", "seed", "nodes", "controllers", "machines", "sets", "until"];
        let mut out = String::from("{\n");
        for key in order {
            if let Some(value) = head.get(key) {
                out += &format!("  \"{key}\": {value},\n");
            }
        }
        let events: Vec<String> =
            self.events.iter().map(|e| format!("    {}", serde_json::to_string(e).unwrap_or_default())).collect();
        out + "  \"events\": [\n" + &events.join(",\n") + "\n  ]\n}\n"
    }

    /// Does all that it says.
    pub fn run(&self, record: bool) -> run::Outcome {
        run::plan(self, &run::Options { mutant: self.mutant, record, ..run::Options::default() })
    }
}

/// Strikes that wait for what they are to strike.
pub(super) type Waiting = BTreeMap<Fault, Vec<Planned>>;

impl World {
    /// Something that a plan does, before everything else of its time.
    pub(super) fn early(&mut self, wait: u64, action: Action) {
        self.early += 1;
        self.agenda.insert((self.now + wait, self.early), action);
    }

    /// Does what is planned, and nothing else.
    pub(super) fn follow(&mut self, plan: &Plan) {
        let mut waiting = Waiting::new();
        for event in &plan.events {
            let wait = (BEGIN + event.at).saturating_sub(self.now);
            match &event.what {
                What::Deed { deed } => self.early(wait, Action::Deed(Box::new(deed.clone()))),
                What::Strike(s) if s.fault.by_the_clock() => self.early(wait, Action::Strike(s.fault, s.salt)),
                What::Strike(s) => waiting.entry(s.fault).or_default().push(event.clone()),
            }
        }
        self.given = Some(waiting);
    }

    /// Somebody does something, which is planned or drawn.
    pub(super) fn person(&mut self, deed: Deed) {
        self.deeds += 1;
        self.planned.push(Planned { at: self.now - BEGIN, what: What::Deed { deed: deed.clone() } });
        self.deed(&deed);
    }

    /// Whether this fault strikes now, and what it draws from.
    pub(super) fn strikes(&mut self, fault: Fault, on: impl Fn() -> String) -> Option<Dice> {
        let (now, at) = (self.now, self.now - BEGIN);
        let slot = self.chances.get_mut(fault as usize)?;
        let nth = if slot.0 == now { slot.1 + 1 } else { 0 };
        *slot = (now, nth);
        let salt = match &mut self.given {
            None => {
                if !self.fates.chance(self.swarm.rate(fault)) {
                    return None;
                }
                self.fates.below(1_000_000)
            }
            Some(waiting) => {
                let all = waiting.get_mut(&fault)?;
                let due = |e: &Planned| match &e.what {
                    What::Strike(s) => (e.at < at || (e.at == at && s.nth == nth)) && s.on == on(),
                    What::Deed { .. } => false,
                };
                let i = all.iter().take_while(|e| e.at <= at).position(due)?;
                match all.remove(i).what {
                    What::Strike(s) => s.salt,
                    What::Deed { .. } => return None,
                }
            }
        };
        let on = on();
        self.struck(Strike { fault, on, nth, salt }, true);
        Some(dice_of(fault, salt))
    }

    fn struck(&mut self, strike: Strike, hurts: bool) {
        if hurts {
            *self.struck.entry(strike.fault).or_default() += 1;
        }
        self.say(|| format!("fault: {} {}", strike.fault, strike.on));
        self.planned.push(Planned { at: self.now - BEGIN, what: What::Strike(strike) });
    }

    /// Faults by the clock, once a second, until the world is healed.
    pub(super) fn chaos(&mut self) {
        let pause = self.fates.between(300, 1500);
        self.early(pause, Action::Chaos);
        for fault in Fault::ALL.iter().copied().filter(|f| f.by_the_clock()) {
            if self.fates.chance(self.swarm.rate(fault)) {
                let salt = self.fates.below(1_000_000);
                self.strike(fault, salt);
            }
        }
    }

    /// A fault strikes by the clock; it counts where there was something to strike.
    pub(super) fn strike(&mut self, fault: Fault, salt: u64) {
        // Also where it hurt nobody: it was tried, which may have moved something.
        let hurts = self.hurt(fault, dice_of(fault, salt));
        self.struck(Strike { fault, on: String::new(), nth: 0, salt }, hurts);
    }
}

fn dice_of(fault: Fault, salt: u64) -> Dice {
    Dice::new(salt ^ ((fault as u64) << 40))
}

impl Deed {
    /// In words.
    pub fn words(&self) -> String {
        match self {
            Self::Create(n, strategy) => format!("create {n} {strategy}"),
            Self::CreateBare(n) => format!("create-bare {n}"),
            Self::Start(n) => format!("start {n}"),
            Self::Stop(n, None) => format!("stop {n}"),
            Self::Stop(n, Some(grace)) => format!("stop {n} {grace}"),
            Self::Restart(n) => format!("restart {n}"),
            Self::Strategy(n, strategy) => format!("set {n} {strategy}"),
            Self::Delete(n, true) => format!("delete {n}"),
            Self::Delete(n, false) => format!("orphan {n}"),
            Self::DeleteInstance(n) => format!("delete-instance {n}"),
            Self::DeletePod(n, false) => format!("delete-pod {n}"),
            Self::DeletePod(n, true) => format!("remove-pod {n}"),
            Self::Label(n, value) => format!("label {n} {value}"),
            Self::Unlabel(n) => format!("unlabel {n}"),
            Self::CreateSet(n, replicas) => format!("create-set {n} {replicas}"),
            Self::Scale(n, replicas) => format!("scale {n} {replicas}"),
            Self::DeleteSet(n, true) => format!("delete-set {n}"),
            Self::DeleteSet(n, false) => format!("orphan-set {n}"),
        }
    }

    /// Reads what [`Deed::words`] writes.
    pub fn parse(text: &str) -> Option<Self> {
        // A name may be empty: whatever somebody meant was not there.
        let words: Vec<&str> = text.split(' ').collect();
        let name = (*words.get(1)?).to_owned();
        let strategy = || STRATEGIES.into_iter().find(|s| Some(s) == words.get(2));
        let number = || words.get(2)?.parse::<u64>().ok();
        Some(match (*words.first()?, words.len()) {
            ("create", 3) => Self::Create(name, strategy()?),
            ("create-bare", 2) => Self::CreateBare(name),
            ("start", 2) => Self::Start(name),
            ("stop", 2) => Self::Stop(name, None),
            ("stop", 3) => Self::Stop(name, Some(number()?)),
            ("restart", 2) => Self::Restart(name),
            ("set", 3) => Self::Strategy(name, strategy()?),
            ("delete", 2) => Self::Delete(name, true),
            ("orphan", 2) => Self::Delete(name, false),
            ("delete-instance", 2) => Self::DeleteInstance(name),
            ("delete-pod", 2) => Self::DeletePod(name, false),
            ("remove-pod", 2) => Self::DeletePod(name, true),
            ("label", 3) => Self::Label(name, number()?),
            ("unlabel", 2) => Self::Unlabel(name),
            ("create-set", 3) => Self::CreateSet(name, number()?),
            ("scale", 3) => Self::Scale(name, number()?),
            ("delete-set", 2) => Self::DeleteSet(name, true),
            ("orphan-set", 2) => Self::DeleteSet(name, false),
            _ => return None,
        })
    }
}
