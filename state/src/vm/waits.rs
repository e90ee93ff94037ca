//! What a cell waits for, in words. Every wait has a name and an end.
//!
//! The words are made here, once: the conditions of VM and VMI, the Events about them and `virtfold explain` say the same.
//! A condition carries [`Wait::message`] under [`Wait::name`]; [`Wait::what`] and [`Wait::unblock`] are for explanations.

use super::{
    cell::{Told, Vm, What},
    strategy::Wish,
};
use crate::{
    NodeName, Timestamp,
    condition::{self, Said},
    domain::DomainState,
    instancetype::Role,
    node::SILENCE,
    observe::{ContainerState, Phase, PodView, Strategy, VmView, VmiView},
    slot::Slot,
    trace::Awaited,
};
use api::names;

/// Finalizers that Kubernetes itself puts and takes.
const COLLECTOR: [&str; 2] = ["foregroundDeletion", "orphan"];

/// Reasons for which a container waits while all is well.
const WELL: [&str; 3] = ["", "ContainerCreating", "PodInitializing"];

/// What has to happen for a wait to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// Nothing out of the ordinary: the next step is under way.
    Progress,
    /// Something is wrong.
    Problem,
    /// It is where somebody wanted it, and stays until somebody asks for something else.
    Person,
}

/// One thing that a cell waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wait {
    /// The instance is being created.
    Instance,
    /// The launcher pod is being created.
    Pod,
    /// The scheduler has not looked at the pod yet. Which one, where it is not Kubernetes' own.
    Placement(Option<Box<str>>),
    /// The node prepares the pod.
    Preparation {
        /// Node.
        node: NodeName,
        /// The container's reason.
        reason: String,
    },
    /// The node's agent is being asked to start the guest.
    Acceptance(NodeName),
    /// No session with the node's agent, for less than what counts as silence.
    Session(NodeName),
    /// The hypervisor starts.
    Hypervisor(NodeName),
    /// The guest runs and is not ready yet: the pod's own word.
    Readiness {
        /// Reason of the pod's condition.
        reason: String,
        /// Its message.
        message: String,
    },
    /// The guest was asked to shut down.
    Shutdown(Timestamp),
    /// The pod of a machine that is to go away is still there.
    PodRemoval(Option<NodeName>),
    /// The instance of a machine that is to go away is still there.
    InstanceRemoval,
    /// A claim does not exist.
    MissingClaim {
        /// Namespace.
        namespace: String,
        /// Name.
        claim: String,
    },
    /// No node takes the pod.
    Unschedulable {
        /// Reason of the pod's condition.
        reason: String,
        /// The scheduler's words.
        message: String,
        /// Claims that have no volume.
        unbound: Vec<String>,
    },
    /// An image cannot be had.
    Image {
        /// `ErrImagePull` or `ImagePullBackOff`.
        reason: String,
        /// The node's words.
        message: String,
    },
    /// The node cannot make the pod's container or its volumes.
    Container {
        /// The container's reason.
        reason: String,
        /// The node's words.
        message: String,
        /// Node.
        node: NodeName,
    },
    /// The API server refused a write.
    Refused {
        /// Of what: `launcher pod`, ...
        what: &'static str,
        /// Reason of the condition that tells it.
        reason: &'static str,
        /// On the VM rather than on the VMI.
        on_vm: bool,
        /// `Reason: message` of the Status.
        message: String,
    },
    /// The API server gave no answer to a write.
    NoAnswer(&'static str),
    /// The node, or the domain on it, cannot be asked.
    Unreachable {
        /// `NodeUnreachable` or `NodeUnresponsive`.
        reason: &'static str,
        /// In words.
        message: String,
        /// The guest was running.
        running: bool,
    },
    /// The node refused to start it.
    StartRefused(String),
    /// An instance of the machine's name belongs to something else.
    ForeignInstance(String),
    /// The run strategy cannot be carried out.
    Unsupported(String),
    /// The instancetype or preference that it names cannot be read.
    MissingPattern {
        /// As what it is named.
        role: Role,
        /// Kind and name.
        what: String,
        /// Why.
        message: String,
    },
    /// Starts failed, and the next has to wait.
    CrashLoop {
        /// Failures in a row.
        count: u64,
        /// Not before.
        until: Option<Timestamp>,
        /// Why the last one failed.
        message: String,
    },
    /// Finalizers that are not ours keep an object.
    Finalizers {
        /// Kind of the object.
        kind: &'static str,
        /// Which.
        names: Vec<String>,
    },
    /// vCPUs are stopped.
    Paused {
        /// `PausedByUser`, `PausedIOError`, ...
        reason: String,
    },
    /// The spec has changes that the running guest does not have.
    RestartRequired(String),
    /// It is off, as its strategy says.
    Off(Strategy),
    /// It ended, and its strategy does not start it again.
    Ended {
        /// It ended badly.
        failed: bool,
        /// A start is refused: it runs once for each instance.
        once: bool,
        /// How.
        message: String,
    },
}

/// Words about a machine that ended badly; the same in the Event and in the condition.
pub(super) fn failure_words(reason: &str, message: &str) -> String {
    match message {
        "" => format!("The virtual machine failed: {reason}"),
        m => format!("The virtual machine failed: {reason}: {m}"),
    }
}

/// Message of the condition Paused.
pub(super) fn paused_words(reason: &str) -> &'static str {
    match reason {
        "PausedByUser" => "VMI was paused by user",
        "PausedIOError" => "VMI was paused, low-level IO error detected",
        _ => "VMI was paused",
    }
}

impl Wait {
    /// Type and reason of the condition that carries it; of progress that no condition tells, a type that is empty.
    pub fn name(&self) -> (&'static str, &str) {
        match self {
            Self::Instance => ("", "CreatingInstance"),
            Self::Pod => ("Ready", "PodNotExists"),
            Self::Placement(_) => ("", "Scheduling"),
            Self::Preparation { reason, .. } => ("", if reason.is_empty() { "PodInitializing" } else { reason }),
            Self::Acceptance(_) => ("", "Instructing"),
            Self::Session(_) => ("", "AgentNotConnected"),
            Self::Hypervisor(_) => ("", "Starting"),
            Self::Readiness { reason, .. } => ("Ready", reason),
            Self::Shutdown(_) => ("", "ShuttingDown"),
            Self::PodRemoval(_) => ("", "RemovingPod"),
            Self::InstanceRemoval => ("", "RemovingInstance"),
            Self::MissingClaim { .. } => ("Synchronized", "FailedPvcNotFound"),
            Self::Unschedulable { reason, .. } => ("PodScheduled", reason),
            Self::Image { reason, .. } | Self::Container { reason, .. } => ("Synchronized", reason),
            Self::Refused { reason, on_vm, .. } => (if *on_vm { "Failure" } else { "Synchronized" }, reason),
            Self::NoAnswer(_) => ("", "NoAnswer"),
            Self::Unreachable { reason, running, .. } => (if *running { "Ready" } else { "Synchronized" }, reason),
            Self::StartRefused(_) => ("Synchronized", "StartRefused"),
            Self::ForeignInstance(_) => ("Failure", "FailedCreate"),
            Self::Unsupported(_) => ("Failure", "UnsupportedSyncError"),
            Self::MissingPattern { role, .. } => ("Failure", role.missing()),
            Self::CrashLoop { .. } => ("Failure", "CrashLoopBackOff"),
            Self::Finalizers { .. } => ("", "WaitingForFinalizers"),
            Self::Paused { reason } => ("Paused", reason),
            Self::RestartRequired(_) => ("RestartRequired", ""),
            Self::Off(strategy) => ("", strategy.name()),
            Self::Ended { .. } => ("Ready", "GuestNotRunning"),
        }
    }

    /// Whether it is the ordinary course of things.
    pub fn weight(&self) -> Weight {
        match self {
            Self::Instance
            | Self::Pod
            | Self::Placement(_)
            | Self::Preparation { .. }
            | Self::Acceptance(_)
            | Self::Session(_)
            | Self::Hypervisor(_)
            | Self::Readiness { .. }
            | Self::Shutdown(_)
            | Self::PodRemoval(_)
            | Self::InstanceRemoval => Weight::Progress,
            Self::MissingClaim { .. }
            | Self::Unschedulable { .. }
            | Self::Image { .. }
            | Self::Container { .. }
            | Self::Refused { .. }
            | Self::NoAnswer(_)
            | Self::Unreachable { .. }
            | Self::StartRefused(_)
            | Self::ForeignInstance(_)
            | Self::Unsupported(_)
            | Self::MissingPattern { .. }
            | Self::CrashLoop { .. }
            | Self::Finalizers { .. }
            | Self::Ended { failed: true, .. } => Weight::Problem,
            Self::Paused { reason } if reason == "PausedIOError" => Weight::Problem,
            Self::Paused { .. } | Self::RestartRequired(_) | Self::Off(_) | Self::Ended { failed: false, .. } => {
                Weight::Person
            }
        }
    }

    /// What has to come, as a noun.
    pub fn what(&self) -> String {
        match self {
            Self::Placement(Some(scheduler)) => format!("scheduler {scheduler} to place its launcher pod"),
            Self::Instance => "its instance to be created".into(),
            Self::Pod => "its launcher pod to be created".into(),
            Self::Placement(None) | Self::Unschedulable { .. } => "a node for its launcher pod".into(),
            Self::Preparation { node, .. } => format!("node {node} to prepare its launcher pod"),
            Self::Container { node, .. } => format!("node {node} to prepare its launcher pod, which it cannot"),
            Self::Acceptance(node) => format!("the agent of node {node} to take on the start"),
            Self::Session(node) => format!("the agent of node {node} to connect"),
            Self::Hypervisor(node) => format!("the hypervisor on node {node} to run the guest"),
            Self::Readiness { .. } => "the guest to be ready".into(),
            Self::Shutdown(_) => "the guest to shut down".into(),
            Self::PodRemoval(_) => "its launcher pod to be removed".into(),
            Self::InstanceRemoval => "its instance to be removed".into(),
            Self::MissingClaim { claim, .. } => format!("PersistentVolumeClaim {claim}"),
            Self::Image { .. } => "an image".into(),
            Self::Refused { what, .. } => format!("the API server to take the write of its {what}"),
            Self::NoAnswer(what) => format!("the API server to answer to the write of its {what}"),
            Self::Unreachable { .. } => "its node to answer".into(),
            Self::StartRefused(_) => "a start that its node refused".into(),
            Self::ForeignInstance(_) => "its name to be free".into(),
            Self::Unsupported(_) => "a run strategy that can be carried out".into(),
            Self::MissingPattern { what, .. } => what.clone(),
            Self::CrashLoop { count: 1, .. } => "the next start, after one that failed".into(),
            Self::CrashLoop { count, .. } => format!("the next start, after {count} that failed in a row"),
            Self::Finalizers { kind, names } => format!("finalizers of its {kind}: {}", names.join(", ")),
            Self::Paused { .. } => "somebody to unpause it".into(),
            Self::RestartRequired(_) => "a restart".into(),
            Self::Off(_) | Self::Ended { .. } => "somebody to start it".into(),
        }
    }

    /// The cause, in the words of the condition that carries it; empty where there is nothing to add.
    pub fn message(&self) -> String {
        match self {
            Self::Instance
            | Self::Pod
            | Self::Placement(_)
            | Self::Acceptance(_)
            | Self::Session(_)
            | Self::Hypervisor(_)
            | Self::InstanceRemoval => String::new(),
            Self::Preparation { reason, .. } => reason.clone(),
            Self::Readiness { message, .. }
            | Self::Image { message, .. }
            | Self::Container { message, .. }
            | Self::Refused { message, .. }
            | Self::Unreachable { message, .. }
            | Self::CrashLoop { message, .. }
            | Self::MissingPattern { message, .. }
            | Self::Ended { message, .. } => message.clone(),
            Self::Unschedulable { message, unbound, .. } if unbound.is_empty() => message.clone(),
            Self::Unschedulable { message, unbound, .. } => {
                format!("{message} (without a volume: PersistentVolumeClaim {})", unbound.join(", "))
            }
            Self::Shutdown(until) => format!("it is killed if it still runs at {until}"),
            Self::PodRemoval(node) => match node {
                Some(node) => format!("node {node} has not confirmed yet that the pod has ended"),
                None => String::new(),
            },
            Self::MissingClaim { namespace, claim } => format!("PVC {namespace}/{claim} does not exist"),
            Self::NoAnswer(what) => format!("the last write of its {what} was not answered, and is repeated"),
            Self::StartRefused(m) => format!("the node refused to start it: {m}"),
            Self::ForeignInstance(m) | Self::Unsupported(m) | Self::RestartRequired(m) => m.clone(),
            Self::Finalizers { kind, names } => {
                format!("the {kind} is being deleted and is kept by finalizers of others: {}", names.join(", "))
            }
            Self::Paused { reason } => paused_words(reason).into(),
            Self::Off(strategy) => format!("its run strategy is {}", strategy.name()),
        }
    }

    /// What a person can do, or what will happen by itself.
    pub fn unblock(&self, name: &str) -> String {
        match self {
            Self::Instance
            | Self::Pod
            | Self::Placement(None)
            | Self::Preparation { .. }
            | Self::Acceptance(_)
            | Self::Hypervisor(_)
            | Self::InstanceRemoval => "nothing has to be done".into(),
            Self::Placement(Some(scheduler)) => {
                format!("comes by itself where a scheduler of the name {scheduler} runs; else take spec.schedulerName out, or run it")
            }
            Self::Session(node) => format!("comes by itself; if not, see why the node agent of {node} does not run"),
            Self::Readiness { .. } => {
                "comes by itself once the readiness probe of the machine, if it has one, succeeds".into()
            }
            Self::Shutdown(_) => {
                "nothing has to be done; to kill it at once: 'virtfold stop NAME --force'".replace("NAME", name)
            }
            Self::PodRemoval(node) => match node {
                Some(node) => format!(
                    "comes by itself when node {node} answers; a node that is gone for good: taint it \
                     {}, or delete the pod by force if you know that it does not run",
                    names::TAINT_OUT_OF_SERVICE
                ),
                None => "nothing has to be done".into(),
            },
            Self::MissingClaim { namespace, claim } => {
                format!("create PersistentVolumeClaim {claim} in namespace {namespace}")
            }
            Self::Unschedulable { message, unbound, .. } => unschedulable(message, unbound),
            Self::Image { .. } => "the node tries again by itself, at longer and longer intervals: push the image, correct \
                                   its name, or make the registry reachable from the node"
                .into(),
            Self::Container { message, .. } => container(message),
            Self::Refused { message, .. } => refused(message),
            Self::NoAnswer(_) => "comes by itself when the API server answers again".into(),
            Self::Unreachable { reason: "NodeUnresponsive", .. } => {
                "comes by itself if the hypervisor answers again; if it hangs for good, delete the launcher pod: that ends \
                 the guest"
                    .into()
            }
            Self::Unreachable { .. } => format!(
                "comes by itself when the node or its agent is back; the guest may still run there, so nothing is started \
                 elsewhere. A node that is gone for good: taint it {}",
                names::TAINT_OUT_OF_SERVICE
            ),
            Self::StartRefused(_) => "it is asked again by itself where that can help".into(),
            Self::ForeignInstance(_) => format!("delete or rename the other VirtualMachineInstance {name}"),
            Self::MissingPattern { what, .. } => format!("create {what}, or name another one; it is looked for again by itself"),
            Self::Unsupported(_) => "set spec.runStrategy to Always, RerunOnFailure, Manual, Once or Halted".into(),
            Self::CrashLoop { until, .. } => match until {
                Some(t) => format!("it is tried again by itself at {t}; remove the cause, or stop it"),
                None => "it is tried again by itself; remove the cause, or stop it".into(),
            },
            Self::Finalizers { names, .. } => {
                format!("whoever put them has to take them off: {}", names.join(", "))
            }
            Self::Paused { reason } if reason == "PausedIOError" => {
                format!("give its disks room (or repair their storage), then 'virtfold unpause {name}'")
            }
            Self::Paused { .. } => format!("'virtfold unpause {name}'"),
            Self::RestartRequired(_) => format!("'virtfold restart {name}'"),
            Self::Off(_) => format!("'virtfold start {name}'"),
            Self::Ended { once: true, .. } => format!("'kubectl delete vmi {name}': then it runs once more"),
            Self::Ended { .. } => format!("'virtfold start {name}'"),
        }
    }

    /// When it ends at the latest, where that is known.
    pub fn until(&self) -> Option<Timestamp> {
        match self {
            Self::Shutdown(t) => Some(*t),
            Self::CrashLoop { until, .. } => *until,
            Self::Instance
            | Self::Pod
            | Self::Placement(_)
            | Self::Preparation { .. }
            | Self::Acceptance(_)
            | Self::Session(_)
            | Self::Hypervisor(_)
            | Self::Readiness { .. }
            | Self::PodRemoval(_)
            | Self::InstanceRemoval
            | Self::MissingClaim { .. }
            | Self::Unschedulable { .. }
            | Self::Image { .. }
            | Self::Container { .. }
            | Self::Refused { .. }
            | Self::NoAnswer(_)
            | Self::Unreachable { .. }
            | Self::StartRefused(_)
            | Self::ForeignInstance(_)
            | Self::Unsupported(_)
            | Self::MissingPattern { .. }
            | Self::Finalizers { .. }
            | Self::Paused { .. }
            | Self::RestartRequired(_)
            | Self::Off(_)
            | Self::Ended { .. } => None,
        }
    }

    /// The condition that carries it.
    pub(super) fn condition<'a>(&'a self, kind: &'a str) -> Option<Said<'a>> {
        let (of, reason) = self.name();
        (of == kind).then(|| Said::new(kind, false, reason, self.message()))
    }
}

/// What helps a pod that no node takes, by the scheduler's words.
fn unschedulable(message: &str, unbound: &[String]) -> String {
    let mut ways: Vec<String> = vec![];
    if message.contains("Insufficient devices.kubevirt.io/kvm") {
        ways.push("no node has a KVM that works: use a node that has one, or let the guest be emulated".into());
    } else if message.contains("Insufficient") || message.contains("Too many pods") {
        ways.push("stop other machines, add a node, or ask for less".into());
    }
    if message.contains("node affinity/selector") {
        ways.push(
            "label a node as the machine's nodeSelector or affinity wants it, or change them (a CPU model, a CPU feature or a \
             machine type that it names needs a node that has it, as the node's labels tell)"
                .into(),
        );
    }
    if message.contains("taint") {
        ways.push("take the taint off a node, or tolerate it".into());
    }
    if message.contains("were unschedulable") {
        ways.push("uncordon a node".into());
    }
    if message.contains("ersistent") || !unbound.is_empty() {
        ways.push(match unbound {
            [] => "give its PersistentVolumeClaims volumes".into(),
            all => format!("see why no volume was made: 'kubectl describe pvc {}'", all.join(" ")),
        });
    }
    if ways.is_empty() {
        ways.push("make a node fit".into());
    }
    format!("{}; it goes on by itself then", ways.join("; "))
}

/// What helps a pod that its node cannot prepare, by the node's words.
pub(crate) fn container(message: &str) -> String {
    let text = message.to_ascii_lowercase();
    let way = if text.contains("secret") {
        "create the Secret that is named, with the key that is named"
    } else if text.contains("configmap") {
        "create the ConfigMap that is named"
    } else if text.contains("no space left") {
        "make room on the node's disk"
    } else {
        "remove the cause on the node"
    };
    format!("{way}; the node tries again by itself")
}

/// What helps a write that was refused, by the server's words.
pub(crate) fn refused(message: &str) -> String {
    let way = if message.contains("exceeded quota") {
        "raise the ResourceQuota of the namespace, or remove what uses it up"
    } else if message.contains("webhook") {
        "repair or remove the admission webhook that is named"
    } else if message.contains("is being terminated") {
        "the namespace is being deleted; nothing can be created in it any more"
    } else if message.contains("cannot ") {
        "give the controller the right that is named"
    } else {
        "remove what the API server names"
    };
    format!("{way}; it is tried again by itself")
}

impl Vm {
    /// What the cell waits for now, most specific first; empty where it is where it should be.
    pub fn waits(&self) -> Vec<Wait> {
        let mut w = vec![];
        if let Some(vm) = self.vm.get() {
            w.extend(self.failure(vm));
        }
        match (self.vmi.get(), self.vm.get()) {
            (Some(vmi), vm) => {
                w.extend(self.vmi_waits(vmi, vmi.phase));
                if let Some(c) = vm.and_then(|v| condition::find(&v.status.conditions, "RestartRequired"))
                    && c.is_true()
                {
                    w.push(Wait::RestartRequired(c.message.to_string()));
                }
            }
            (None, Some(vm)) if vm.meta.deleting.is_none() => match self.wish(vm) {
                Wish::Run { .. } | Wish::Unhalt if w.is_empty() => {
                    w.push(if self.vmi.failures() > 1 { Wait::NoAnswer("instance") } else { Wait::Instance });
                }
                Wish::Stay if w.is_empty() => w.push(Wait::Off(vm.strategy)),
                Wish::Run { .. } | Wish::Unhalt | Wish::Stay | Wish::Stop | Wish::NotBefore(_) | Wish::Bad(_) => {}
            },
            (None, Some(_) | None) => {}
        }
        if let Some(vm) = self.vm.get() {
            if vm.meta.deleting.is_some() && self.own_vmi().is_some() {
                w.push(Wait::InstanceRemoval);
            }
            w.extend(kept("VirtualMachine", &vm.meta));
        }
        w
    }

    /// Why the last thing that was tried for the VM did not work; its condition Failure.
    pub(super) fn failure(&self, vm: &VmView) -> Option<Wait> {
        let wish = self.wish(vm);
        if let Wish::Bad(text) = wish {
            return Some(Wait::Unsupported(text.into()));
        }
        if let Some(v) = self.vmi.get().filter(|_| self.own_vmi().is_none())
            && v.meta.deleting.is_none()
            && vm.strategy != Strategy::Halted
            && !self.is_adoptable(vm, v)
        {
            return Some(Wait::ForeignInstance(format!(
                "a VirtualMachineInstance {} exists that this VirtualMachine does not own",
                self.key
            )));
        }
        if let Some(wait) = self.missing_pattern(vm).filter(|_| vm.meta.deleting.is_none()) {
            return Some(wait);
        }
        let wanted = match wish {
            Wish::Run { .. } => self.own_vmi().is_none() && vm.meta.deleting.is_none(),
            Wish::Stay | Wish::Stop | Wish::NotBefore(_) | Wish::Unhalt | Wish::Bad(_) => false,
        };
        let refused = match &self.vmi_refused {
            Some(What::CreateVmi) if wanted => Some("FailedCreate"),
            // A creation that nobody asks for any more has not failed.
            Some(What::CreateVmi) => None,
            Some(What::Delete) => self.own_vmi().map(|_| "FailedDelete"),
            Some(_) | None => self.own_vmi().map(|_| "FailedUpdateError"),
        };
        refused
            .and_then(|reason| troubled(&self.vmi, "instance", true, reason))
            .or_else(|| {
                troubled(&self.revision, "record of its spec", true, "FailedCreate")
                    .filter(|_| vm.meta.deleting.is_none())
            })
            .or_else(|| troubled(&self.vm, "virtual machine", true, "FailedUpdateError"))
            .or_else(|| self.crash_loop(vm))
    }

    /// Starts that failed in a row. Why the last one did is kept in the VM's condition, because the instance goes away.
    fn crash_loop(&self, vm: &VmView) -> Option<Wait> {
        let failure = self.start_failure(vm).filter(|f| f.consecutive_fail_count > 0 && vm.meta.deleting.is_none())?;
        let ended = self.own_vmi().filter(|v| v.phase == Phase::Failed);
        let why = match ended.and_then(ending) {
            Some(words) => words,
            None => {
                let kept = condition::find(&vm.status.conditions, "Failure").filter(|c| c.reason == "CrashLoopBackOff");
                kept.map_or(String::new(), |c| c.message.to_string())
            }
        };
        Some(Wait::CrashLoop {
            count: failure.consecutive_fail_count,
            until: failure.retry_after_timestamp.as_deref().and_then(Timestamp::parse),
            message: why,
        })
    }

    /// What the instance waits for, were it in this phase.
    pub(super) fn vmi_waits(&self, vmi: &VmiView, phase: Phase) -> Vec<Wait> {
        let mut w = vec![];
        let deleting = vmi.meta.deleting.is_some();
        let what = if deleting { "FailedDelete" } else { "FailedCreate" };
        w.extend(troubled(&self.pod, "launcher pod", false, what));
        if self.own_vmi().is_none() {
            w.extend(troubled(&self.vmi, "instance", false, "FailedUpdateError"));
        }
        let pod = self.current_pod();
        match phase {
            Phase::Unset | Phase::Pending | Phase::Scheduling if deleting => {
                w.extend(pod.map(|p| self.pod_removal(p)));
            }
            Phase::Unset | Phase::Pending | Phase::Scheduling => {
                if let Some(claim) = self.missing_claim(vmi) {
                    w.push(Wait::MissingClaim { namespace: self.key.namespace.clone(), claim });
                }
                match pod {
                    Some(p) => w.push(self.pod_waits(vmi, p)),
                    None if w.is_empty() => w.push(Wait::Pod),
                    None => {}
                }
            }
            Phase::Scheduled => w.extend(self.start_waits()),
            Phase::Running => {
                w.extend(self.unreachable().map(|(reason, message)| Wait::Unreachable {
                    reason,
                    message,
                    running: true,
                }));
                w.extend(self.running_waits(pod));
            }
            Phase::Succeeded | Phase::Failed => {
                if deleting {
                    w.extend(pod.map(|p| self.pod_removal(p)));
                } else if let Some(message) = ending(vmi)
                    && !self.goes_on(vmi)
                {
                    let once = self.vm.get().is_some_and(|v| v.strategy == Strategy::Once);
                    w.push(Wait::Ended { failed: phase == Phase::Failed, once, message });
                }
            }
            Phase::Unknown => {}
        }
        if let (true, Some(since)) = (matches!(phase, Phase::Scheduled | Phase::Running), vmi.meta.deleting) {
            w.push(Wait::Shutdown(since.after(vmi.grace)));
        }
        w.extend(kept("VirtualMachineInstance", &vmi.meta));
        w
    }

    /// The instance that ended is about to be replaced.
    fn goes_on(&self, vmi: &VmiView) -> bool {
        self.vm.get().is_some_and(|vm| match self.wish(vm) {
            Wish::Stop | Wish::Run { .. } | Wish::NotBefore(_) | Wish::Unhalt => true,
            Wish::Stay | Wish::Bad(_) => vmi.meta.deleting.is_some(),
        })
    }

    /// What the step under way waits for beside its own work; the same facts as those of [`Vm::vmi_waits`], without words.
    pub(super) fn awaited(&self, vmi: &VmiView) -> Option<Awaited> {
        let silent = || self.unreachable().map(|_| Awaited::Node);
        if vmi.meta.deleting.is_some() {
            return silent();
        }
        match vmi.phase {
            Phase::Unset | Phase::Pending | Phase::Scheduling => {
                if self.pod.error().is_some() || self.vmi.error().is_some() {
                    return Some(Awaited::Api);
                }
                if self.missing_claim(vmi).is_some() {
                    return Some(Awaited::Volume);
                }
                let pod = self.current_pod()?;
                let bound = |c: &String| matches!(self.claims.get(c), Some(Some(v)) if v.bound);
                if pod.unscheduled.is_some() && !vmi.claims.iter().all(bound) {
                    return Some(Awaited::Volume);
                }
                if pod.node.is_none() {
                    return Some(Awaited::Scheduler);
                }
                if pod.image_error.is_some() {
                    return Some(Awaited::Image);
                }
                silent()
            }
            Phase::Scheduled => match self.node_fact().and_then(|n| n.session) {
                Some(_) => silent(),
                None => Some(Awaited::Node),
            },
            Phase::Running | Phase::Succeeded | Phase::Failed | Phase::Unknown => None,
        }
    }

    /// What a pod waits for before a guest can be started in it.
    fn pod_waits(&self, vmi: &VmiView, p: &PodView) -> Wait {
        if let Some(c) = &p.unscheduled {
            let unbound = vmi.claims.iter().filter(|c| matches!(self.claims.get(*c), Some(Some(v)) if !v.bound));
            return Wait::Unschedulable {
                reason: if c.reason.is_empty() { "Unschedulable".into() } else { c.reason.to_string() },
                message: c.message.to_string(),
                unbound: unbound.cloned().collect(),
            };
        }
        if let Some((reason, message)) = &p.image_error {
            return Wait::Image { reason: reason.clone(), message: message.clone() };
        }
        let Some(node) = p.node.clone() else { return Wait::Placement(p.scheduler.clone()) };
        if let Some((reason, message)) = self.unreachable() {
            return Wait::Unreachable { reason, message, running: false };
        }
        match &p.compute {
            Some(ContainerState::Waiting { reason, message })
                if !WELL.contains(&reason.as_str()) || !message.is_empty() =>
            {
                // What a kubelet calls ContainerCreating is an error where it has a message.
                let reason = if WELL.contains(&reason.as_str()) { "FailedMount".into() } else { reason.clone() };
                Wait::Container { reason, message: message.clone(), node }
            }
            Some(ContainerState::Waiting { reason, .. }) => Wait::Preparation { node, reason: reason.clone() },
            Some(ContainerState::Running | ContainerState::Terminated { .. }) | None => {
                Wait::Preparation { node, reason: String::new() }
            }
        }
    }

    /// What a VMI waits for that may be started.
    fn start_waits(&self) -> Option<Wait> {
        let node = self.node_name()?;
        let session = self.node_fact().and_then(|n| n.session);
        Some(match (session, self.start_told()) {
            (None, _) => match self.unreachable() {
                Some((reason, message)) => Wait::Unreachable { reason, message, running: false },
                None => Wait::Session(node),
            },
            (Some(_), None | Some(Told::Sent | Told::Lost(_))) => Wait::Acceptance(node),
            (Some(_), Some(Told::Taken)) => Wait::Hypervisor(node),
            (Some(_), Some(Told::Refused(r, m, _))) => Wait::StartRefused(format!("{}: {m}", r.name())),
        })
    }

    fn running_waits(&self, pod: Option<&PodView>) -> Option<Wait> {
        if let Some(d) = self.domain()
            && d.state == DomainState::Paused
        {
            let reason = if d.paused_reason.is_empty() { "PausedByUser" } else { &d.paused_reason };
            return Some(Wait::Paused { reason: reason.into() });
        }
        let c = pod?.ready.as_ref().filter(|c| !c.is_true())?;
        Some(Wait::Readiness { reason: c.reason.to_string(), message: c.message.to_string() })
    }

    fn pod_removal(&self, pod: &PodView) -> Wait {
        match kept("launcher pod", &pod.meta) {
            Some(wait) => wait,
            None => Wait::PodRemoval(pod.node.clone().filter(|_| self.unreachable().is_some())),
        }
    }

    /// Why the node that runs the domain cannot be asked.
    pub(super) fn unreachable(&self) -> Option<(&'static str, String)> {
        if self.domain().is_some_and(|d| d.state == DomainState::Deaf) {
            return Some(("NodeUnresponsive", "the hypervisor does not answer".into()));
        }
        let n = self.node_fact()?;
        if !n.ready {
            return Some(("NodeUnreachable", format!("node {} is not ready", n.node)));
        }
        let silent = n.silent_since.is_some_and(|t| self.now >= t.after(SILENCE));
        silent.then(|| ("NodeUnreachable", format!("the agent of node {} does not answer", n.node)))
    }
}

/// How an instance ended, in the words of its condition.
pub(super) fn ending(vmi: &VmiView) -> Option<String> {
    if !vmi.phase.is_final() {
        return None;
    }
    let told =
        condition::find(&vmi.status.conditions, "Ready").map(|c| c.message.to_string()).filter(|m| !m.is_empty());
    told.or_else(|| Some(failure_words(vmi.status.reason.as_deref().unwrap_or("OutcomeUnknown"), "")))
}

/// A slot whose writes do not get through.
fn troubled<T: crate::object::Versioned>(
    slot: &Slot<T>,
    what: &'static str,
    on_vm: bool,
    reason: &'static str,
) -> Option<Wait> {
    match slot.error() {
        Some(e) => Some(Wait::Refused { what, reason, on_vm, message: format!("{}: {}", e.reason, e.message) }),
        None if slot.failures() > 1 && !on_vm => Some(Wait::NoAnswer(what)),
        None => None,
    }
}

/// Finalizers of others on an object that is to go away and has none of ours any more.
pub(super) fn kept(kind: &'static str, meta: &crate::observe::Meta) -> Option<Wait> {
    let ours = [names::FINALIZER_VM, names::FINALIZER_VMI];
    if meta.deleting.is_none() || ours.iter().any(|f| meta.has_finalizer(f)) {
        return None;
    }
    let names: Vec<_> = meta.finalizers.iter().filter(|f| !COLLECTOR.contains(&f.as_str())).cloned().collect();
    (!names.is_empty()).then_some(Wait::Finalizers { kind, names })
}
