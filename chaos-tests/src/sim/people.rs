//! Who makes, starts, stops, restarts and deletes machines: a client like any other.

use super::{hosts::Site, net, truth};
use crate::world::{
    dice::Dice,
    run::Scenario,
    server::{Res, Seen},
    sets,
    users::{Deed, NS, STRATEGIES, Wish, machine, restart, start, stop},
};
use embedded::semantics::write::Part;
use kube::{
    Api, Client,
    api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams},
};
use node_agent::simulation::Ending;
use serde_json::json;
use std::{rc::Rc, time::Duration};

/// The set, where there is one.
const SET: &str = "set-0";

/// People at work.
pub struct People {
    client: Client,
    dice: Dice,
    names: Vec<String>,
}

impl People {
    /// Who looks after machines of these names.
    ///
    /// # Errors
    /// The API server's address is no address.
    pub fn new(seed: u64, names: Vec<String>) -> turmoil::Result<Self> {
        Ok(Self { client: net::client(truth::PEOPLE)?, dice: Dice::new(seed), names })
    }

    fn api(&self, res: Res) -> Api<DynamicObject> {
        let kind = res.kind().unwrap_or(state::object::Kind::VirtualMachine);
        Api::namespaced_with(self.client.clone(), NS, &reconcilers::hub::resource(kind))
    }

    async fn see(&self, res: Res, name: &str) -> Option<Rc<Seen>> {
        let object = self.api(res).get_opt(name).await.ok()??;
        let revision = object.metadata.resource_version.as_deref()?.parse().ok()?;
        Seen::read(res, revision, &serde_json::to_vec(&object).ok()?)
    }

    /// Works until simulated time is up.
    pub async fn work(mut self, until: Duration) -> turmoil::Result {
        for name in self.names.clone() {
            self.create(&name).await;
            self.pause(1, 3000).await;
        }
        // Every other seed has a set, too.
        let scales = self.dice.chance(500);
        if scales {
            let replicas = self.dice.between(0, 3);
            self.make_set(replicas).await;
        }
        while turmoil::elapsed() < until {
            self.pause(200, 15_000).await;
            if scales && self.dice.chance(150) {
                let replicas = self.dice.between(0, 4);
                self.scale(replicas).await;
            } else {
                self.deed().await;
            }
        }
        Ok(())
    }

    /// Does what a scenario of the model world says.
    pub async fn script(mut self, scenario: Scenario, site: &Site) -> turmoil::Result {
        self.carry_out(scenario.prepare()).await?;
        tokio::time::sleep(Duration::from_secs(20)).await;
        truth::say(|| format!("somebody: {scenario:?}"));
        if let Some(deed) = scenario.deed() {
            self.carry_out(deed).await?;
        }
        if let Some(off) = scenario.guest_ends() {
            let how = if off { Ending::PowerOff } else { Ending::Crash };
            for place in &site.places {
                for pod in place.pods().into_iter().take(1) {
                    place.end_guest(&pod, how);
                }
            }
        }
        Ok(())
    }

    /// A deed of a scenario.
    async fn carry_out(&mut self, deed: Deed) -> turmoil::Result {
        match deed {
            Deed::Create(name, strategy) => self.make(&name, strategy).await,
            Deed::CreateSet(_, replicas) => self.make_set(replicas).await,
            Deed::Scale(_, replicas) => self.scale(replicas).await,
            Deed::Delete(name, _) => drop(self.api(Res::Vm).delete(&name, &DeleteParams::background()).await?),
            Deed::Stop(ref name, _) | Deed::Restart(ref name) => {
                let (vm, vmi) = (self.see(Res::Vm, name).await, self.see(Res::Vmi, name).await);
                let vm = vm.ok_or_else(|| format!("{name} is not there"))?;
                let wish = match &deed {
                    Deed::Stop(..) => stop(&vm, vmi.as_deref()),
                    _ => vmi.and_then(|v| restart(&vm, &v)),
                };
                self.wish(name, wish).await;
            }
            other => return Err(format!("no scenario has {other:?}").into()),
        }
        Ok(())
    }

    async fn pause(&mut self, low: u64, high: u64) {
        tokio::time::sleep(Duration::from_millis(self.dice.between(low, high))).await;
    }

    async fn create(&mut self, name: &str) {
        let strategy = self.dice.pick(&STRATEGIES).copied().unwrap_or("Always");
        self.make(name, strategy).await;
    }

    async fn make(&mut self, name: &str, strategy: &str) {
        truth::say(|| format!("somebody makes {name}, {strategy}"));
        let object = machine(name, strategy, self.dice.between(0, 8));
        self.post(Res::Vm, object).await;
    }

    async fn make_set(&mut self, replicas: u64) {
        truth::say(|| format!("somebody makes a set of {replicas}"));
        let object = sets::of(SET, replicas, self.dice.between(0, 8));
        self.post(Res::Set, object).await;
    }

    async fn post(&self, res: Res, object: serde_json::Value) {
        if let Ok(object) = serde_json::from_value::<DynamicObject>(object) {
            // Who is refused looks again later, as with everything below.
            let _ = self.api(res).create(&PostParams::default(), &object).await;
        }
    }

    async fn scale(&mut self, replicas: u64) {
        truth::say(|| format!("somebody scales the set to {replicas}"));
        let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
        let _ = self.api(Res::Set).patch(SET, &PatchParams::default(), &patch).await;
    }

    async fn wish(&self, name: &str, wish: Option<Wish>) {
        let Some((part, body)) = wish.map(Wish::patch) else { return };
        let (api, params, patch) = (self.api(Res::Vm), PatchParams::default(), Patch::Merge(body));
        let _ = match part {
            Part::Status => api.patch_status(name, &params, &patch).await,
            _ => api.patch(name, &params, &patch).await,
        };
    }

    /// A random deed about a random machine.
    async fn deed(&mut self) {
        let Some(name) = self.dice.pick(&self.names).cloned() else { return };
        let (what, strategy) = (self.dice.below(20), self.dice.pick(&STRATEGIES).copied().unwrap_or("Always"));
        let cascade = self.dice.chance(800);
        if what >= 14 {
            return self.create(&name).await;
        }
        let (vm, vmi) = (self.see(Res::Vm, &name).await, self.see(Res::Vmi, &name).await);
        let Some(vm) = vm else { return };
        let alive = vmi.as_deref().filter(|v| !matches!(v.text("/status/phase"), "Succeeded" | "Failed"));
        let (word, wish) = match what {
            0..=3 => ("starts", start(&vm, vmi.as_deref())),
            4..=7 => ("stops", stop(&vm, alive)),
            8..=10 => ("restarts", vmi.as_deref().and_then(|v| restart(&vm, v))),
            11..=12 => ("gives another strategy to", Some(Wish::Strategy(strategy.into()))),
            _ => ("deletes", None),
        };
        truth::say(|| format!("somebody {word} {name}: {wish:?}"));
        if word == "deletes" {
            let options = if cascade { DeleteParams::background() } else { orphan() };
            let _ = self.api(Res::Vm).delete(&name, &options).await;
        } else {
            self.wish(&name, wish).await;
        }
    }
}

fn orphan() -> DeleteParams {
    DeleteParams { propagation_policy: Some(kube::api::PropagationPolicy::Orphan), ..DeleteParams::default() }
}
