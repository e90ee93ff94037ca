//! `virtfold console`.

use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::time::Duration;

use futures::{SinkExt, StreamExt};
use nix::sys::termios::{self, SetArg, Termios};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_tungstenite::tungstenite::Message;

use super::cluster::{Kind, connect, machine};
use super::stream::{self, Socket};
use crate::args;

/// ctrl-].
const ESCAPE: u8 = 0x1d;
/// After the end of an input that is no terminal: how long to wait for more output.
const QUIET: Duration = Duration::from_secs(1);

/// A terminal in raw mode; as it was when this is dropped.
pub struct Raw(Option<Termios>);

impl Raw {
    /// Makes the terminal of the input raw, where it is one.
    pub fn new() -> Self {
        let input = std::io::stdin();
        if !input.is_terminal() {
            return Self(None);
        }
        let Ok(before) = termios::tcgetattr(input.as_fd()) else { return Self(None) };
        let mut raw = before.clone();
        termios::cfmakeraw(&mut raw);
        if termios::tcsetattr(input.as_fd(), SetArg::TCSANOW, &raw).is_err() {
            return Self(None);
        }
        Self(Some(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = termios::tcsetattr(std::io::stdin().as_fd(), SetArg::TCSANOW, before);
        }
    }
}

/// Attaches the terminal to a machine's serial console.
pub async fn run(options: args::Console) -> anyhow::Result<u8> {
    let machine = machine(&options.machine.machine)?;
    let cluster = connect(&options.target).await?;
    // The console belongs to the instance, which has the name of its machine.
    let path = format!(
        "/apis/subresources.kubevirt.io/v1/namespaces/{}/{}/{}/console",
        cluster.namespace,
        Kind::Vmi.plural(),
        machine.name
    );
    let socket = stream::open(&cluster.client, &path, Duration::from_secs(options.timeout)).await?;
    let terminal = std::io::stdin().is_terminal();
    if terminal {
        eprint!("Connected to {}; the escape sequence is ctrl-]\r\n", machine.name);
    }
    let raw = Raw::new();
    let result = attach(socket, terminal).await;
    drop(raw);
    if terminal {
        eprintln!();
    }
    result.map(|()| 0)
}

async fn attach(socket: Socket, terminal: bool) -> anyhow::Result<()> {
    let (mut to, mut from) = socket.split();
    let (mut input, mut output) = (tokio::io::stdin(), tokio::io::stdout());
    let mut buffer = vec![0; 4096];
    let mut reading = true;
    loop {
        let quiet =
            async { if reading || terminal { std::future::pending().await } else { tokio::time::sleep(QUIET).await } };
        tokio::select! {
            read = input.read(&mut buffer), if reading => {
                let bytes = buffer.get(..read?).unwrap_or_default();
                if bytes.is_empty() {
                    reading = false;
                    if terminal {
                        return Ok(());
                    }
                    continue;
                }
                let escape = bytes.iter().position(|b| *b == ESCAPE);
                let typed = bytes.get(..escape.unwrap_or(bytes.len())).unwrap_or_default();
                if !typed.is_empty() {
                    to.send(Message::Binary(typed.to_vec().into())).await?;
                }
                if escape.is_some() {
                    let _ = to.send(Message::Close(None)).await;
                    return Ok(());
                }
            }
            message = from.next() => {
                match message {
                    Some(Ok(Message::Binary(bytes))) => output.write_all(&bytes).await?,
                    Some(Ok(Message::Text(text))) => output.write_all(text.as_bytes()).await?,
                    Some(Ok(Message::Close(frame))) => return stream::closed(frame),
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return Err(error.into()),
                    None => return stream::closed(None),
                }
                output.flush().await?;
            }
            () = quiet => {
                let _ = to.send(Message::Close(None)).await;
                return Ok(());
            }
        }
    }
}
