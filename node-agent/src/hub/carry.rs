//! Carries out what a cell asks for. What takes time runs as a task of its own and comes back as a message.

use std::time::SystemTime;

use proto::agent::agent_message;
use proto::convert;
use proto::launcher::{NodeFacts, Order};
use state::agent::{Command, Confirmed, Input};
use state::domain::{InstructKind, RefusalReason};
use state::journal::CellKind;
use state::{Epoch, PodUid, ResourceVersion, domain::Instruction};
use tracing::Instrument;

use super::{Hub, Msg};
use crate::launchers::Names;
use crate::link::within;
use crate::{api, limits, link};

impl Hub {
    pub(super) async fn carry_out(&mut self, pod: &PodUid, command: Command) {
        // What is logged meanwhile names the cell and its trace.
        let trace = self.slots.get(pod).and_then(|s| s.traceparent.split('-').nth(1));
        let said = tracing::info_span!("cell", cell = %pod, trace);
        self.carry(pod, command).instrument(said).await;
    }

    async fn carry(&mut self, pod: &PodUid, command: Command) {
        match command {
            Command::PrepareNetwork => self.prepare_network(pod),
            Command::Execute { epoch, instruction, vmi_rv } => self.execute(pod, epoch, instruction, vmi_rv),
            Command::Answer { session, id, result } => {
                if self.session.as_ref().is_some_and(|s| s.session == session) {
                    let vmi = self.slots.get(pod).and_then(|s| s.pod.as_ref()).map(|p| p.vmi_uid.clone());
                    tracing::info!(%id, %pod, ?result, "answered");
                    let ack = convert::ack(id.as_str(), &vmi.unwrap_or_default(), result);
                    self.tell(agent_message::Kind::Ack(ack));
                }
            }
            Command::Report(domain) => {
                if let Some(slot) = self.slots.get(pod) {
                    let domain = Some(convert::domain(&domain, &slot.namespace, &slot.name));
                    self.tell(agent_message::Kind::Report(proto::agent::Report { domain }));
                }
            }
            Command::KeepOutcome(outcome) => {
                tracing::info!(%pod, cause = outcome.cause.name(), exit = outcome.exit, message = outcome.message, "the domain ended");
                if let Some(slot) = self.slots.get_mut(pod) {
                    slot.record.outcome = Some(outcome);
                }
                self.save(pod).await;
            }
            Command::TellOutcome(outcome) => {
                if let Some(slot) = self.slots.get(pod) {
                    let outcome = convert::outcome(&outcome, &slot.namespace, &slot.name);
                    self.tell(agent_message::Kind::Outcome(outcome));
                }
            }
            Command::DropOutcome => {
                if let Some(slot) = self.slots.get_mut(pod) {
                    slot.record.outcome = None;
                }
                self.save(pod).await;
            }
            Command::Confirm => self.confirm(pod),
            Command::WriteUnpaused(unpaused) => self.write_unpaused(pod, unpaused),
            Command::Forget => {
                tracing::debug!(%pod, "a cell ends");
                self.slots.remove(pod);
                self.journal.forget(CellKind::Agent, pod.as_str());
                let uid = pod.0.clone();
                if let Err(error) = self.shared.store.put(move |s| s.forget(&uid)).await {
                    tracing::error!(%error, %pod, "forgetting a pod");
                }
            }
            Command::Wake { at } => {
                if let Some(slot) = self.slots.get_mut(pod) {
                    slot.wake = Some(at);
                }
            }
        }
    }

    /// Writes the pod's record; waits until it is on the disk, because something follows that relies on it.
    pub(super) async fn save(&mut self, pod: &PodUid) {
        let Some(slot) = self.slots.get_mut(pod) else { return };
        if slot.record.outcome.is_none() && slot.record.unpaused.is_none() {
            slot.record = Default::default();
        } else {
            slot.record.namespace.clone_from(&slot.namespace);
            slot.record.name.clone_from(&slot.name);
        }
        let (uid, record) = (pod.0.clone(), slot.record.clone());
        // A full disk costs this copy; the termination message and the launcher have theirs.
        if let Err(error) = self.shared.store.put(move |s| s.set_record(&uid, &record)).await {
            tracing::error!(%error, %pod, "writing the memory of a pod");
        }
    }

    fn prepare_network(&self, pod: &PodUid) {
        let Some(slot) = self.slots.get(pod) else { return };
        let (Some(facts), Some((_, raw)), client) = (slot.pod.clone(), slot.raw.clone(), slot.client.clone()) else {
            return self.back_later(Msg::Network(
                pod.clone(),
                Err((RefusalReason::Failed, "the pod or its VMI is gone".into())),
            ));
        };
        let (uid, back) = (pod.clone(), self.back.clone());
        let names = Names { servers: self.shared.dns.clone(), search: self.shared.search_domain(&facts.namespace) };
        let launchers = self.shared.launchers.clone();
        let step = Step::new(slot.traceparent.clone(), &facts, "prepare-network");
        tokio::spawn(
            async move {
                let make = async {
                    // A launcher that has started owns the tap; it must not be taken from it.
                    if let Some(client) = client {
                        let info = within(limits::LAUNCHER, client.info()).await;
                        let info = info.map_err(|s| (RefusalReason::Failed, format!("asking the launcher: {s}")))?;
                        if info.domain.is_some_and(|d| d.state() != proto::agent::DomainState::Absent) {
                            return Ok(None);
                        }
                    }
                    launchers.network(facts, raw, names).await
                };
                let made = make.await;
                step.end(made.as_ref().err().map(|(_, m)| m.as_str()));
                if let Err((_, error)) = &made {
                    tracing::warn!(pod = %uid, error, "preparing the network");
                }
                let _ = back.send(Msg::Network(uid, made)).await;
            }
            .in_current_span(),
        );
    }

    fn back_later(&self, msg: Msg) {
        let back = self.back.clone();
        tokio::spawn(async move { back.send(msg).await });
    }

    fn execute(&self, pod: &PodUid, epoch: Epoch, instruction: Instruction, vmi_rv: ResourceVersion) {
        let lost = |id| Msg::Back(pod.clone(), Input::LauncherAcked { id, result: None });
        let Some(slot) = self.slots.get(pod) else { return };
        let Some(client) = slot.client.clone() else { return self.back_later(lost(instruction.id)) };
        let vmi = slot.raw.as_ref().filter(|(rv, _)| *rv == vmi_rv).map(|(_, raw)| raw.clone()).unwrap_or_default();
        let start = instruction.kind == InstructKind::Start;
        let facts = start.then(|| NodeFacts {
            accelerator: self.shared.accelerator().name,
            cpu_model: self.shared.accelerator().cpu_model,
            pod_ip: slot.pod.iter().flat_map(|p| p.ips.first()).map(ToString::to_string).next().unwrap_or_default(),
            nics: slot.nics.clone(),
        });
        let vmi = if start { vmi } else { Default::default() };
        // The launcher is told the version that was decided upon, which may be newer than the instruction's.
        let told = Instruction { vmi_rv, ..instruction.clone() };
        let instruct = convert::instruct(&told, epoch, vmi, slot.traceparent.clone());
        let (uid, back) = (pod.clone(), self.back.clone());
        tokio::spawn(async move {
            let order = Order { instruct: Some(instruct), facts };
            let result = match within(limits::EXECUTE, client.execute(order)).await {
                Ok(ack) => Some(ack).filter(|a| a.result.is_some()).map(Into::into),
                Err(status) => {
                    tracing::warn!(pod = %uid, id = %instruction.id, %status, "the launcher did not answer an instruction");
                    None
                }
            };
            let _ = back.send(Msg::Back(uid, Input::LauncherAcked { id: instruction.id, result })).await;
        }.in_current_span());
    }

    fn confirm(&self, pod: &PodUid) {
        let Some(slot) = self.slots.get(pod).filter(|s| !s.name.is_empty()) else {
            return self.back_later(Msg::Confirmed(pod.clone(), Confirmed::Unanswered, None));
        };
        let (uid, back, client) = (pod.clone(), self.back.clone(), self.shared.client.clone());
        let (namespace, name) = (slot.namespace.clone(), slot.name.clone());
        tokio::spawn(async move {
            let (confirmed, vmi) = api::confirm(&client, &namespace, &name).await;
            tracing::info!(pod = %uid, namespace, name, answer = ?confirmed, "asked whether the machine is a stray");
            let _ = back.send(Msg::Confirmed(uid, confirmed, vmi)).await;
        }.in_current_span());
    }

    fn write_unpaused(&self, pod: &PodUid, unpaused: bool) {
        let Some(facts) = self.slots.get(pod).and_then(|s| s.pod.clone()) else { return };
        let (uid, back, client) = (pod.clone(), self.back.clone(), self.shared.client.clone());
        tokio::spawn(
            async move {
                let written =
                    api::write_unpaused(&client, &facts.namespace, &facts.pod_name, &facts.pod_uid, unpaused).await;
                if let Err(error) = &written {
                    tracing::warn!(%error, pod = facts.pod_name, "writing the pod's condition");
                }
                let _ = back.send(Msg::Back(uid, Input::UnpausedWritten { unpaused, done: written.is_ok() })).await;
            }
            .in_current_span(),
        );
    }
}

/// A step of the operation that an instruction belongs to.
struct Step {
    traceparent: String,
    cell: String,
    identity: Vec<(&'static str, String)>,
    name: &'static str,
    start: SystemTime,
}

impl Step {
    fn new(traceparent: String, pod: &crate::PodFacts, name: &'static str) -> Self {
        let identity = link::identity(pod).to_vec();
        Self { traceparent, cell: pod.vmi_uid.clone(), identity, name, start: SystemTime::now() }
    }

    fn end(self, error: Option<&str>) {
        let Some(context) = telemetry::TraceContext::parse(&self.traceparent) else { return };
        telemetry::emit(telemetry::Step {
            step: Some(self.name),
            parent: Some("boot"),
            attributes: self.identity,
            error: error
                .map(|message| telemetry::Failure { reason: "NetworkNotPrepared".into(), message: message.to_owned() }),
            ..telemetry::Step::of(context, &self.cell, "start", self.start)
        });
    }
}
