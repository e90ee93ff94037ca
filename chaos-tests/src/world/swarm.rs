//! Which faults a seed draws, and how often each strikes. Ids in brackets are those of the fault catalogue.

use super::dice::Dice;
use std::fmt;

macro_rules! faults {
    ($($(#[doc = $doc:literal])* $name:ident $most:literal),* $(,)?) => {
        /// A kind of fault.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        pub enum Fault { $($(#[doc = $doc])* $name),* }

        impl Fault {
            /// All of them.
            pub const ALL: &'static [Fault] = &[$(Fault::$name),*];

            /// Highest rate in a thousand: per call, per message or per tick of a second, whatever it strikes.
            fn most(self) -> u32 {
                match self { $(Self::$name => $most),* }
            }
        }
    };
}

faults! {
    /// A request never arrives [A7].
    LostRequest 60,
    /// It is done and the answer is lost [A8].
    LostReply 60,
    /// It is done after the client has given up [A9].
    LateWrite 40,
    /// "Not now" [A7].
    Busy 60,
    /// An internal error that says nothing [A7].
    ServerError 40,
    /// Refused for want of rights or room [A6, A13].
    Refused 30,
    /// The API server takes its time, and so do watches [A4, A11, A14].
    Slow 300,
    /// A watch ends without a word [A1, A15].
    WatchDropped 60,
    /// History is forgotten, so that a watch has to begin with a list [A2].
    Compaction 60,
    /// A list or watch comes from a server that is behind [A3].
    StaleServer 400,
    /// A controller dies [C1].
    ControllerCrash 30,
    /// A controller stands still, also for longer than its lease [C3, C4].
    ControllerPause 30,
    /// A session breaks; what was on its way is lost on one side or on both [G1, G3].
    SessionCut 60,
    /// A node's agent and the controllers cannot talk, or its agent and the API server [G2, G6, N8].
    Partition 20,
    /// An agent dies [N1].
    AgentCrash 40,
    /// An agent dies and its disk is empty when it comes back [N1].
    AgentWiped 15,
    /// A launcher is killed [N2].
    LauncherKilled 15,
    /// A launcher does not answer for a while [N2].
    LauncherDeaf 30,
    /// A guest ends by itself: power-off, crash of the hypervisor, panic [N4].
    GuestEnds 30,
    /// Guests do not listen to the power button [N4].
    GuestDeaf 400,
    /// A domain does not start, or its network cannot be made [N10].
    StartFails 150,
    /// The kubelet takes its time [N6].
    KubeletSlow 300,
    /// A node loses power and comes back [N7].
    PowerLoss 10,
    /// People delete pods, also by force [A16, N11].
    PodsDeleted 25,
    /// People delete instances under their machines [A16].
    InstancesDeleted 20,
    /// People edit labels, also those that agents select by [A16].
    LabelsEdited 40,
    /// A node object is deleted under its node and made again when its kubelet notices [A16].
    NodeDeleted 8,
    /// A switched-off node is taken out of service by hand [N9].
    OutOfService 300,
}

impl Fault {
    /// It is done at its time, whatever is going on; the others strike a call, a message or a guest.
    pub fn by_the_clock(self) -> bool {
        match self {
            Self::Compaction
            | Self::ControllerCrash
            | Self::ControllerPause
            | Self::SessionCut
            | Self::Partition
            | Self::AgentCrash
            | Self::AgentWiped
            | Self::LauncherKilled
            | Self::LauncherDeaf
            | Self::GuestEnds
            | Self::PowerLoss
            | Self::PodsDeleted
            | Self::InstancesDeleted
            | Self::LabelsEdited
            | Self::NodeDeleted => true,
            Self::LostRequest
            | Self::LostReply
            | Self::LateWrite
            | Self::Busy
            | Self::ServerError
            | Self::Refused
            | Self::Slow
            | Self::WatchDropped
            | Self::StaleServer
            | Self::GuestDeaf
            | Self::StartFails
            | Self::KubeletSlow
            | Self::OutOfService => false,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// The faults of one run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Swarm {
    rates: Vec<u32>,
}

impl Swarm {
    /// Nothing goes wrong.
    pub fn none() -> Self {
        Self { rates: vec![0; Fault::ALL.len()] }
    }

    /// One kind of fault, as often as it may be.
    pub fn only(fault: Fault) -> Self {
        Self::none().with(fault, fault.most())
    }

    /// This rate for this fault.
    #[must_use]
    pub fn with(mut self, fault: Fault, per_mille: u32) -> Self {
        if let Some(r) = self.rates.get_mut(fault as usize) {
            *r = per_mille;
        }
        self
    }

    /// Draws: one seed in ten has no fault at all, one in ten has a single kind, the others a random half of all.
    pub fn draw(dice: &mut Dice) -> Self {
        match dice.below(10) {
            0 => Self::none(),
            1 => dice.pick(Fault::ALL).map_or_else(Self::none, |f| Self::only(*f)),
            _ => Fault::ALL.iter().fold(Self::none(), |s, f| {
                let rate = dice.between(1, u64::from(f.most()));
                let on = dice.chance(500);
                s.with(*f, if on { u32::try_from(rate).unwrap_or(1) } else { 0 })
            }),
        }
    }

    /// How often it strikes, in a thousand.
    pub fn rate(&self, fault: Fault) -> u32 {
        self.rates.get(fault as usize).copied().unwrap_or(0)
    }

    /// Nothing goes wrong any more.
    pub fn heal(&mut self) {
        *self = Self::none();
    }
}

impl fmt::Display for Swarm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let on: Vec<String> =
            Fault::ALL.iter().filter(|x| self.rate(**x) > 0).map(|x| format!("{x} {}", self.rate(*x))).collect();
        if on.is_empty() { f.write_str("none") } else { f.write_str(&on.join(", ")) }
    }
}
