//! Faults that strike by the clock, not by the call.

use super::{Action, World, dice::Dice, node::LauncherEvent, server::Res, swarm::Fault, users::Deed};

impl World {
    /// Does a fault to whomever its dice choose. Whether there was something to hurt.
    pub(super) fn hurt(&mut self, fault: Fault, mut dice: Dice) -> bool {
        let some = |dice: &mut Dice, n: usize| usize::try_from(dice.below(n as u64)).unwrap_or(0);
        let n = some(&mut dice, self.nodes.len());
        // The controller that leads is the one that matters.
        let c = some(&mut dice, self.controllers.len());
        let c = self.leader().unwrap_or(c);
        let name = dice.pick(&self.names).cloned().unwrap_or_default();
        match fault {
            Fault::Compaction => {
                let newest = self.server.revision();
                self.server.compact(newest.saturating_sub(dice.below(40)));
            }
            Fault::ControllerCrash => self.crash_controller(c, "killed"),
            Fault::ControllerPause => {
                let how_long = dice.between(100, 40_000);
                self.say(|| format!("controller {c} stands still for {how_long} ms"));
                self.pause_controller(c, how_long);
            }
            Fault::SessionCut => {
                let open: Vec<u64> = self.sessions.keys().copied().collect();
                let Some(id) = dice.pick(&open).copied() else { return false };
                self.cut(id);
            }
            Fault::Partition => {
                let how_long = dice.between(500, 90_000);
                let until = self.now + how_long;
                let which = dice.below(3);
                self.say(|| {
                    let whom = ["controllers", "the API server", "both"][usize::try_from(which).unwrap_or(0)];
                    format!("node {n} is cut off from {whom} for {how_long} ms")
                });
                if which != 1 {
                    self.nodes[n].session_cut = until;
                    self.cut_off(n);
                }
                if which != 0 {
                    self.nodes[n].api_cut = until;
                }
            }
            Fault::AgentCrash => return self.crash_agent(n),
            Fault::AgentWiped => {
                self.crash_agent(n);
                self.say(|| format!("the disk of the agent of node {n} is empty"));
                self.nodes[n].disk = Default::default();
            }
            Fault::LauncherKilled | Fault::LauncherDeaf | Fault::GuestEnds => {
                let pods: Vec<_> = self.nodes[n].launchers.keys().cloned().collect();
                let Some(pod) = dice.pick(&pods).cloned() else { return false };
                if fault == Fault::LauncherKilled {
                    self.kill_launcher(n, &pod);
                } else if fault == Fault::LauncherDeaf {
                    let how_long = dice.between(100, 30_000);
                    self.deafen_launcher(n, &pod, how_long);
                } else {
                    let ways = [LauncherEvent::PoweredOff, LauncherEvent::Crashed, LauncherEvent::Panicked];
                    let way = dice.pick(&ways).copied().unwrap_or(LauncherEvent::Crashed);
                    self.end_guest(n, &pod, way);
                }
            }
            Fault::PowerLoss => self.lose_power(n, &mut dice),
            Fault::PodsDeleted => return self.deed(&Deed::DeletePod(name, dice.chance(300))),
            Fault::InstancesDeleted => return self.deed(&Deed::DeleteInstance(name)),
            Fault::LabelsEdited => {
                let deed = match dice.below(5) {
                    0 => Deed::Unlabel(name),
                    n => Deed::Label(name, n),
                };
                return self.deed(&deed);
            }
            Fault::NodeDeleted => {
                let node = self.nodes[n].name.clone();
                self.say(|| format!("somebody deletes the object of node {n}"));
                let _ = self.serve(super::api::Verb::delete(Res::Node, "", node.as_str(), ""), None);
            }
            Fault::LostRequest
            | Fault::LostReply
            | Fault::LateWrite
            | Fault::Busy
            | Fault::ServerError
            | Fault::Refused
            | Fault::Slow
            | Fault::WatchDropped
            | Fault::StaleServer
            | Fault::GuestDeaf
            | Fault::StartFails
            | Fault::KubeletSlow
            | Fault::OutOfService => return false,
        }
        true
    }

    fn lose_power(&mut self, n: usize, dice: &mut Dice) {
        self.power_off(n);
        self.after(dice.between(1000, 120_000), Action::PowerOn(n));
        if let Some(mut dice) = self.strikes(Fault::OutOfService, || format!("node {n}")) {
            self.after(dice.between(45_000, 60_000), Action::Fence(n));
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
        if let Some(waiting) = &mut self.given {
            waiting.clear();
        }
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
