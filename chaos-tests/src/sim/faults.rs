//! Faults that strike by the clock: hosts that die, links that are held or cut, guests that end, nodes that lose power.
//!
//! A link that is *held* delivers late, as TCP does when a network comes back; one that is *cut* loses what was under way, so that its
//! connections hang until somebody loses patience.

use super::{hosts::Site, truth};
use crate::world::{dice::Dice, swarm::Fault};
use node_agent::simulation::Ending;
use std::{collections::BTreeMap, time::Duration};

/// What a link does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    Held,
    Cut,
}

/// What is broken, and when it is whole again.
pub struct Trouble {
    dice: Dice,
    controllers: usize,
    nodes: usize,
    next: Duration,
    /// Hosts that are down, and when they come back.
    down: BTreeMap<String, Duration>,
    links: Vec<(String, String, Link, Duration)>,
    struck: BTreeMap<&'static str, u64>,
}

impl Trouble {
    /// None yet.
    pub fn new(seed: u64, controllers: usize, nodes: usize) -> Self {
        let dice = Dice::new(seed ^ 0xbad);
        Self {
            dice,
            controllers,
            nodes,
            next: Duration::ZERO,
            down: BTreeMap::new(),
            links: vec![],
            struck: BTreeMap::new(),
        }
    }

    /// What struck beyond the faults of the model world.
    pub fn struck(&self) -> impl Iterator<Item = (String, u64)> {
        self.struck.iter().map(|(f, n)| ((*f).to_owned(), *n))
    }

    fn seconds(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_millis(self.dice.between(low, high))
    }

    /// A process that ended by itself is started again after a moment.
    pub fn restart_later(&mut self, sim: &mut turmoil::Sim<'_>, host: &str) {
        if !self.down.contains_key(host) {
            let pause = self.seconds(500, 2000);
            self.crash(sim, host, pause);
        }
    }

    fn crash(&mut self, sim: &mut turmoil::Sim<'_>, host: &str, pause: Duration) {
        truth::say_at(sim.elapsed(), || format!("{host} is gone for {pause:?}"));
        let back = sim.elapsed() + pause;
        if self.down.insert(host.to_owned(), back).is_none() {
            sim.crash(host);
        }
    }

    fn link(&mut self, sim: &mut turmoil::Sim<'_>, a: &str, b: &str, how: Link, pause: Duration) {
        if self.links.iter().any(|(x, y, ..)| (x, y) == (&a.to_owned(), &b.to_owned())) {
            return;
        }
        truth::say_at(sim.elapsed(), || format!("{a} and {b}: {how:?} for {pause:?}"));
        match how {
            Link::Held => sim.hold(a, b),
            Link::Cut => sim.partition(a, b),
        }
        self.links.push((a.to_owned(), b.to_owned(), how, sim.elapsed() + pause));
    }

    /// What comes back comes back.
    pub fn tick(&mut self, sim: &mut turmoil::Sim<'_>, _: &Site) {
        let now = sim.elapsed();
        let back: Vec<String> = self.down.iter().filter(|(_, at)| **at <= now).map(|(h, _)| h.clone()).collect();
        for host in back {
            self.down.remove(&host);
            truth::say_at(now, || format!("{host} is back"));
            sim.bounce(host.as_str());
        }
        let (whole, broken) = std::mem::take(&mut self.links).into_iter().partition(|(.., at)| *at <= now);
        self.links = broken;
        for (a, b, how, _) in whole {
            mend(sim, &a, &b, how);
        }
    }

    /// Nothing is broken any more.
    pub fn heal(&mut self, sim: &mut turmoil::Sim<'_>, site: &Site) {
        truth::say_at(sim.elapsed(), || "no more faults".into());
        for at in self.down.values_mut() {
            *at = Duration::ZERO;
        }
        for (.., at) in &mut self.links {
            *at = Duration::ZERO;
        }
        self.tick(sim, site);
    }

    /// About once a second.
    pub fn strike(&mut self, sim: &mut turmoil::Sim<'_>, site: &Site) {
        if sim.elapsed() < self.next {
            return;
        }
        self.next = sim.elapsed() + self.seconds(300, 1500);
        let controller = self.a_controller();
        let n = usize::try_from(self.dice.below(self.nodes as u64)).unwrap_or(0);
        let (agent, kubelet) = (format!("node-{n}"), format!("pods-{n}"));
        if truth::hit(Fault::ControllerCrash) {
            let pause = self.seconds(100, 10_000);
            self.crash(sim, &controller, pause);
        }
        if truth::hit(Fault::AgentCrash) {
            let pause = self.seconds(100, 20_000);
            self.crash(sim, &agent, pause);
        }
        if truth::hit(Fault::AgentWiped) {
            let pause = self.seconds(100, 20_000);
            self.crash(sim, &agent, pause);
            // One that is not there is empty already.
            let _ = std::fs::remove_dir_all(site.state_dir(&agent));
        }
        if truth::hit(Fault::SessionCut) {
            let pause = self.seconds(100, 15_000);
            self.link(sim, &controller, &agent, Link::Cut, pause);
        }
        if truth::hit(Fault::Partition) {
            let pause = self.seconds(500, 60_000);
            let how = if self.dice.chance(500) { Link::Held } else { Link::Cut };
            match self.dice.below(4) {
                0 => self.link(sim, &controller, &agent, how, pause),
                1 => self.link(sim, &agent, "api", how, pause),
                2 => self.link(sim, &controller, "api", how, pause),
                _ => {
                    self.link(sim, &kubelet, "api", how, pause);
                    self.link(sim, &agent, "api", how, pause);
                }
            }
        }
        if truth::hit(Fault::PowerLoss) {
            let pause = self.seconds(1000, 90_000);
            self.crash(sim, &kubelet, pause);
            self.crash(sim, &agent, pause);
            if let (Some(place), Some(boot)) = (site.places.get(n), site.boots.get(n)) {
                place.power_off();
                boot.set(boot.get() + 1);
            }
        }
        if truth::hit(Fault::GuestEnds)
            && let Some(place) = site.places.get(n)
            && let Some(pod) = self.dice.pick(&place.pods())
        {
            let how = if self.dice.chance(500) { Ending::PowerOff } else { Ending::Crash };
            truth::say_at(sim.elapsed(), || format!("the guest in pod {pod} ends: {how:?}"));
            place.end_guest(pod, how);
        }
        // The API server dies as often as controllers do.
        if truth::hit(Fault::ControllerCrash) {
            *self.struck.entry("ApiCrash").or_default() += 1;
            let pause = self.seconds(100, 20_000);
            self.crash(sim, "api", pause);
        }
        if truth::hit(Fault::Compaction) {
            let keep = i64::try_from(self.dice.below(40)).unwrap_or(0);
            site.store.forget(keep);
        }
    }

    fn a_controller(&mut self) -> String {
        format!("controller-{}", self.dice.below(self.controllers as u64))
    }
}

fn mend(sim: &turmoil::Sim<'_>, a: &str, b: &str, how: Link) {
    match how {
        Link::Held => sim.release(a, b),
        Link::Cut => sim.repair(a, b),
    }
    truth::say_at(sim.elapsed(), || format!("{a} and {b} hear each other again"));
}
