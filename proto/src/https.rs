//! Serving HTTP/1.1 (with upgrades) and HTTP/2 over a stream that is there already: the API server and the gateway do it alike.
//!
//! A client that never ends a request, that says nothing at all or that is gone without a word holds nothing for ever.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use hyper::{body::Incoming, service::Service};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Sleep,
};
use tokio_util::sync::CancellationToken;

/// How long a client may take for its handshake.
pub const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long open requests may go on after the end was asked for.
pub const DRAIN: Duration = Duration::from_secs(2);
/// How long a client may take for the head of a request, its idle time before it with it.
const HEAD: Duration = Duration::from_secs(90);
/// How often a client is asked whether it is still there, and how long it may take to answer.
const KEEP_ALIVE: Duration = Duration::from_secs(30);
/// What an HTTP/2 client says first.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Serves one connection until it ends, or until `stop` with a moment for what is open.
pub async fn connection<IO, S, B>(io: IO, service: S, stop: &CancellationToken, peer: SocketAddr)
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    S: Service<http::Request<Incoming>, Response = http::Response<B>, Error = std::convert::Infallible>
        + Send
        + 'static,
    S::Future: Send + 'static,
    B: hyper::body::Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD);
    builder.http2().timer(TokioTimer::new()).keep_alive_interval(KEEP_ALIVE).keep_alive_timeout(KEEP_ALIVE);
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(Opening::new(io)), service);
    tokio::pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => {
            if let Err(error) = ended {
                tracing::debug!(%peer, %error, "a connection ended");
            }
        }
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            let _ = tokio::time::timeout(DRAIN, connection).await;
        }
    }
}

/// A stream whose first bytes have to tell in time which version of HTTP is spoken: before that, nobody else has a clock.
struct Opening<IO> {
    io: IO,
    /// Bytes of the preface that came, and until when the rest may come; nothing once it is clear.
    unclear: Option<(usize, Pin<Box<Sleep>>)>,
}

impl<IO> Opening<IO> {
    fn new(io: IO) -> Self {
        Self { io, unclear: Some((0, Box::pin(tokio::time::sleep(HEAD)))) }
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for Opening<IO> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, to: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let Some((known, deadline)) = &mut this.unclear else { return Pin::new(&mut this.io).poll_read(cx, to) };
        let had = to.filled().len();
        match Pin::new(&mut this.io).poll_read(cx, to) {
            Poll::Ready(done) => {
                let new = &to.filled()[had..];
                let rest = &PREFACE[*known..];
                let common = new.len().min(rest.len());
                *known += common;
                if new.is_empty() || *known == PREFACE.len() || new[..common] != rest[..common] {
                    this.unclear = None;
                }
                Poll::Ready(done)
            }
            Poll::Pending => {
                ready!(deadline.as_mut().poll(cx));
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "nothing was said")))
            }
        }
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Opening<IO> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }
    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn answer_to(begun: &[u8]) -> String {
        let (mut client, server) = tokio::io::duplex(1 << 16);
        let service = hyper::service::service_fn(|_: http::Request<Incoming>| async {
            Ok::<_, std::convert::Infallible>(http::Response::new("fine".to_owned()))
        });
        let stop = CancellationToken::new();
        let peer = SocketAddr::from(([127, 0, 0, 1], 1));
        let served = tokio::spawn(async move { connection(server, service, &stop, peer).await });
        client.write_all(begun).await.unwrap();
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).await.unwrap();
        served.await.unwrap();
        String::from_utf8_lossy(&answer).into_owned()
    }

    #[tokio::test(start_paused = true)]
    async fn who_never_ends_what_it_says_is_cut_off() {
        let begun: [&[u8]; 6] =
            [b"", b"P", b"PRI * HT", PREFACE, b"GET /healthz HTT", b"GET /healthz HTTP/1.1\r\nhost: a\r\nx-endless: "];
        for begun in begun {
            let answer = answer_to(begun).await;
            assert!(!answer.contains("200"), "{}", String::from_utf8_lossy(begun));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_may_take_longer_than_a_silence() {
        let answer = answer_to(b"GET / HTTP/1.0\r\n\r\n").await;
        assert!(answer.ends_with("fine"), "{answer}");
        let answer = answer_to(b"PUT / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await;
        assert!(answer.ends_with("fine"), "{answer}");
    }
}
