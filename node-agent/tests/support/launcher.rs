//! A launcher as the wire shows it: a level, a table of instructions, descriptors.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use futures::Stream;
use proto::agent::*;
use proto::launcher::launcher_server::{Launcher as Rpc, LauncherServer};
use proto::launcher::{
    InfoReply, InfoRequest, Order, ProbeReply, ProbeRequest, StatsReply, StatsRequest, ToldReply, ToldRequest, Update,
    WatchRequest, update,
};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Response, Status};

#[derive(Clone, Default)]
struct Level {
    domain: Domain,
    outcome: Option<Outcome>,
}

#[derive(Default)]
struct Table {
    orders: Vec<Order>,
    answers: BTreeMap<String, Ack>,
    verbs: Vec<VerbRequest>,
    epoch: u64,
    fds: BTreeMap<String, OwnedFd>,
    received: Vec<String>,
}

#[derive(Clone)]
struct Model {
    level: Arc<watch::Sender<Level>>,
    table: Arc<Mutex<Table>>,
}

pub struct Launcher {
    model: Model,
    share: PathBuf,
    /// A runtime of its own ends with all its connections, like a process.
    process: Option<tokio::runtime::Runtime>,
    _fds: AbortOnDropHandle<()>,
}

impl Launcher {
    pub async fn start(share: &Path, vmi: &str, pod: &str) -> Self {
        let domain = Domain {
            vmi_uid: vmi.into(),
            pod_uid: pod.into(),
            launcher_instance: "launcher-1".into(),
            seq: 1,
            state: DomainState::Absent as i32,
            since_unix_ms: 1,
            namespace: "ns".into(),
            name: "guest".into(),
            ..Domain::default()
        };
        let level = Arc::new(watch::Sender::new(Level { domain, outcome: None }));
        let model = Model { level, table: Arc::default() };
        let fds = receive(&share.join("fd.sock"), model.table.clone());
        let mut launcher = Self { model, share: share.into(), process: None, _fds: AbortOnDropHandle::new(fds) };
        launcher.listen();
        launcher
    }

    /// Listens again after [`Launcher::deaf`].
    pub fn listen(&mut self) {
        let path = self.share.join("launcher.sock");
        let _ = std::fs::remove_file(&path);
        let process = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = {
            let _inside = process.enter();
            UnixListener::bind(path).unwrap()
        };
        let server = tonic::transport::Server::builder()
            .add_service(LauncherServer::new(self.model.clone()))
            .serve_with_incoming(UnixListenerStream::new(listener));
        process.spawn(server);
        self.process = Some(process);
    }

    /// Answers nobody any more; connections break.
    pub fn deaf(&mut self) {
        if let Some(process) = self.process.take() {
            process.shutdown_background();
        }
        let _ = std::fs::remove_file(self.share.join("launcher.sock"));
    }

    pub fn set(&self, state: DomainState) {
        self.model.set(state);
    }

    pub fn heard_epoch(&self, epoch: u64) {
        self.model.table.lock().unwrap().epoch = epoch;
    }

    pub fn end(&self, cause: Cause) {
        self.model.end(cause);
    }

    pub fn orders(&self) -> Vec<Order> {
        self.model.table.lock().unwrap().orders.clone()
    }

    pub fn order(&self, kind: InstructKind) -> Option<Instruct> {
        self.orders().into_iter().filter_map(|o| o.instruct).find(|i| i.kind() == kind)
    }

    pub fn verbs(&self) -> Vec<VerbRequest> {
        self.model.table.lock().unwrap().verbs.clone()
    }

    /// Names of all descriptors that ever came, in order.
    pub fn received(&self) -> Vec<String> {
        self.model.table.lock().unwrap().received.clone()
    }

    /// A descriptor that is held.
    pub fn fd(&self, name: &str) -> OwnedFd {
        self.model.table.lock().unwrap().fds.get(name).unwrap().try_clone().unwrap()
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        self.deaf();
    }
}

impl Model {
    fn set(&self, state: DomainState) {
        self.level.send_modify(|l| {
            l.domain.seq += 1;
            l.domain.state = state as i32;
        });
    }

    fn end(&self, cause: Cause) {
        self.level.send_modify(|l| {
            l.domain.seq += 1;
            l.domain.state = DomainState::Stopped as i32;
            l.outcome = Some(Outcome {
                vmi_uid: l.domain.vmi_uid.clone(),
                pod_uid: l.domain.pod_uid.clone(),
                cause: cause as i32,
                seq: l.domain.seq + 1,
                message: "over".into(),
                ..Outcome::default()
            });
        });
    }
}

type Updates = Pin<Box<dyn Stream<Item = Result<Update, Status>> + Send>>;

#[tonic::async_trait]
impl Rpc for Model {
    async fn info(&self, _: Request<InfoRequest>) -> Result<Response<InfoReply>, Status> {
        let domain = self.level.borrow().domain.clone();
        Ok(Response::new(InfoReply {
            launcher_instance: domain.launcher_instance.clone(),
            vmi_uid: domain.vmi_uid.clone(),
            pod_uid: domain.pod_uid.clone(),
            namespace: "ns".into(),
            name: "guest".into(),
            epoch: self.table.lock().unwrap().epoch,
            domain: Some(domain),
            hypervisor_pid: 0,
        }))
    }

    async fn stats(&self, _: Request<StatsRequest>) -> Result<Response<StatsReply>, Status> {
        Ok(Response::new(StatsReply::default()))
    }

    async fn execute(&self, request: Request<Order>) -> Result<Response<Ack>, Status> {
        let order = request.into_inner();
        let i = order.instruct.clone().unwrap();
        let mut table = self.table.lock().unwrap();
        let refuse = |reason: &str| ack::Result::Refused(Refused { reason: reason.into(), ..Refused::default() });
        let answer = |result| Ack { id: i.id.clone(), vmi_uid: i.vmi_uid.clone(), result: Some(result) };
        if i.epoch < table.epoch {
            return Ok(Response::new(answer(refuse("lower-epoch"))));
        }
        table.epoch = i.epoch;
        table.orders.push(order);
        if let Some(known) = table.answers.get(&i.id) {
            return Ok(Response::new(known.clone()));
        }
        let state = self.level.borrow().domain.state();
        let result = match (i.kind(), state) {
            (InstructKind::Start, DomainState::Absent) => {
                self.set(DomainState::Starting);
                ack::Result::Accepted(Accepted {})
            }
            (InstructKind::Start, _) => refuse("already-started"),
            (InstructKind::Shutdown, _) => {
                self.set(DomainState::ShuttingDown);
                ack::Result::Accepted(Accepted {})
            }
            (InstructKind::Kill, _) => {
                self.end(Cause::Destroyed);
                ack::Result::Accepted(Accepted {})
            }
            (InstructKind::Pause, _) => {
                self.set(DomainState::Paused);
                ack::Result::Done(Done::default())
            }
            (InstructKind::Resume, _) => {
                self.set(DomainState::Running);
                ack::Result::Done(Done::default())
            }
            (InstructKind::InstructUnspecified, _) => refuse("unsupported"),
        };
        let ack = answer(result);
        table.answers.insert(i.id, ack.clone());
        Ok(Response::new(ack))
    }

    async fn told(&self, _: Request<ToldRequest>) -> Result<Response<ToldReply>, Status> {
        Ok(Response::new(ToldReply {}))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeReply>, Status> {
        Err(Status::unavailable("there is no guest"))
    }

    async fn verb(&self, request: Request<VerbRequest>) -> Result<Response<VerbReply>, Status> {
        self.table.lock().unwrap().verbs.push(request.into_inner());
        Ok(Response::new(VerbReply { ok: true, body: b"{}".to_vec().into(), ..VerbReply::default() }))
    }

    type WatchStream = Updates;

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Updates>, Status> {
        let seen = self.level.subscribe();
        let stream = futures::stream::unfold((seen, 0, false), |(mut seen, mut told, mut over)| async move {
            loop {
                if over {
                    return None;
                }
                {
                    let level = seen.borrow_and_update().clone();
                    if level.domain.seq > told {
                        told = level.domain.seq;
                        let update = Update { kind: Some(update::Kind::Domain(level.domain)), steps: vec![] };
                        return Some((Ok(update), (seen, told, over)));
                    }
                    if let Some(outcome) = level.outcome {
                        over = true;
                        return Some((
                            Ok(Update { kind: Some(update::Kind::Outcome(outcome)), steps: vec![] }),
                            (seen, told, over),
                        ));
                    }
                }
                seen.changed().await.ok()?;
            }
        });
        Ok(Response::new(Box::pin(stream)))
    }
}

fn receive(path: &Path, table: Arc<Mutex<Table>>) -> tokio::task::JoinHandle<()> {
    use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
    use tokio::io::{AsyncWriteExt, Interest};
    let listener = UnixListener::bind(path).unwrap();
    tokio::spawn(async move {
        loop {
            let (mut peer, _) = listener.accept().await.unwrap();
            loop {
                let raw = peer.as_raw_fd();
                let got = peer.async_io(Interest::READABLE, || {
                    let mut name = [0; 64];
                    let mut space = nix::cmsg_space!([i32; 1]);
                    let mut slices = [std::io::IoSliceMut::new(&mut name)];
                    let message = recvmsg::<()>(raw, &mut slices, Some(&mut space), MsgFlags::MSG_DONTWAIT)?;
                    let length = message.bytes;
                    let mut fd = None;
                    for c in message.cmsgs()? {
                        if let ControlMessageOwned::ScmRights(fds) = c {
                            // SAFETY: just installed for us.
                            #[allow(unsafe_code)]
                            let owned = unsafe { OwnedFd::from_raw_fd(fds[0]) };
                            fd = Some(owned);
                        }
                    }
                    Ok((String::from_utf8_lossy(&name[..length]).into_owned(), fd))
                });
                let Ok((name, Some(fd))) = got.await else { break };
                {
                    let mut table = table.lock().unwrap();
                    table.received.push(name.clone());
                    table.fds.insert(name, fd);
                }
                peer.write_all(b"k").await.unwrap();
            }
        }
    })
}
