//! Faults that strike by the clock, not by the call.

use super::{Action, World, node::LauncherEvent, server::Res, swarm::Fault, users::Deed};

impl World {
    /// Once a second, until the world is healed.
    pub(super) fn chaos(&mut self) {
        let pause = self.dice.between(300, 1500);
        self.after(pause, Action::Chaos);
        let (c, n) = (self.dice.below(self.controllers.len() as u64), self.dice.below(self.nodes.len() as u64));
        let (c, n) = (usize::try_from(c).unwrap_or(0), usize::try_from(n).unwrap_or(0));
        let name = self.dice.pick(&self.names.clone()).cloned().unwrap_or_default();
        if self.hit(Fault::Compaction) {
            let newest = self.server.revision();
            let keep = self.dice.below(40);
            self.server.compact(newest.saturating_sub(keep));
        }
        if self.hit(Fault::ControllerCrash) {
            // The one that leads is the one that matters.
            let victim = self.leader().unwrap_or(c);
            self.crash_controller(victim, "killed");
        }
        if self.hit(Fault::ControllerPause) {
            let victim = self.leader().unwrap_or(c);
            let how_long = self.dice.between(100, 40_000);
            self.say(|| format!("controller {victim} stands still for {how_long} ms"));
            self.pause_controller(victim, how_long);
        }
        if self.hit(Fault::SessionCut) {
            let open: Vec<u64> = self.sessions.keys().copied().collect();
            if let Some(id) = self.dice.pick(&open).copied() {
                self.cut(id);
            }
        }
        if self.hit(Fault::Partition) {
            let until = self.now + self.dice.between(500, 90_000);
            let which = self.dice.below(3);
            self.say(|| format!("node {n} is cut off until {until}: {which}"));
            if which != 1 {
                self.nodes[n].session_cut = until;
                self.cut_off(n);
            }
            if which != 0 {
                self.nodes[n].api_cut = until;
            }
        }
        if self.hit(Fault::AgentCrash) {
            self.crash_agent(n);
        }
        if self.hit(Fault::AgentWiped) {
            self.crash_agent(n);
            self.say(|| format!("the disk of the agent of node {n} is empty"));
            self.nodes[n].disk = Default::default();
        }
        self.hurt_guests(n);
        if self.hit(Fault::PowerLoss) {
            self.lose_power(n);
        }
        if self.hit(Fault::PodsDeleted) {
            let force = self.dice.chance(300);
            self.deed(&Deed::DeletePod(name.clone(), force));
        }
        if self.hit(Fault::InstancesDeleted) {
            self.deed(&Deed::DeleteInstance(name.clone()));
        }
        if self.hit(Fault::LabelsEdited) {
            let deed = match self.dice.below(5) {
                0 => Deed::Unlabel(name),
                n => Deed::Label(name, n),
            };
            self.deed(&deed);
        }
        if self.hit(Fault::NodeDeleted) {
            let node = self.nodes[n].name.clone();
            self.say(|| format!("somebody deletes the object of node {n}"));
            let _ = self.serve(super::api::Verb::delete(Res::Node, "", node.as_str(), ""), None);
        }
    }

    fn hurt_guests(&mut self, n: usize) {
        let pods: Vec<_> = self.nodes[n].launchers.keys().cloned().collect();
        let Some(pod) = self.dice.pick(&pods).cloned() else { return };
        if self.hit(Fault::LauncherKilled) {
            self.kill_launcher(n, &pod);
        }
        if self.hit(Fault::LauncherDeaf) {
            let how_long = self.dice.between(100, 30_000);
            self.deafen_launcher(n, &pod, how_long);
        }
        if self.hit(Fault::GuestEnds) {
            let ways = [LauncherEvent::PoweredOff, LauncherEvent::Crashed, LauncherEvent::Panicked];
            let way = self.dice.pick(&ways).copied().unwrap_or(LauncherEvent::Crashed);
            self.end_guest(n, &pod, way);
        }
    }

    fn lose_power(&mut self, n: usize) {
        self.power_off(n);
        let back = self.dice.between(1000, 120_000);
        self.after(back, Action::PowerOn(n));
        if self.hit(Fault::OutOfService) {
            let wait = self.dice.between(45_000, 60_000);
            self.after(wait, Action::Fence(n));
        }
    }

    /// Somebody takes a node out of service, having seen that it is off.
    pub(super) fn fence(&mut self, n: usize) {
        if !self.nodes[n].powered {
            self.taint(n, true);
            // And gives it back once it is known to be alive and empty.
            self.after(20_000, Action::Unfence(n));
        }
    }

    pub(super) fn unfence(&mut self, n: usize) {
        if self.nodes[n].powered {
            self.taint(n, false);
        } else {
            self.after(5000, Action::Unfence(n));
        }
    }

    /// Faults stop: everything that was hurt comes back.
    pub(super) fn heal(&mut self) {
        self.say(|| "faults stop".into());
        self.swarm.heal();
        for c in 0..self.controllers.len() {
            self.controllers[c].paused = self.controllers[c].paused.min(self.now);
            self.resume_controller(c);
        }
        for n in 0..self.nodes.len() {
            self.nodes[n].api_cut = 0;
            self.nodes[n].session_cut = 0;
            self.power_on(n);
        }
    }
}
