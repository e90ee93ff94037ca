//! How a controller or gateway reaches a node agent: mutual TLS over whatever [`Dial`] reaches.
//!
//! The server's certificate must name the node, the client's the component. A connection that is silent for five seconds is
//! asked, and given up after five more.

use futures::{StreamExt, future::BoxFuture, stream, stream::BoxStream};
use hyper_util::rt::TokioIo;
use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream, UdpSocket},
};
use tonic::transport::{
    Certificate, Channel, ClientTlsConfig, Endpoint, Identity, Server, ServerTlsConfig,
    server::{Connected, TcpConnectInfo},
};
use x509_parser::prelude::{FromDer, X509Certificate};

/// Bytes both ways.
trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// A connection of whatever network there is: that of the machine, of a namespace, of a simulation.
pub struct Connection(Box<dyn Io>);

impl Connection {
    /// Over this stream.
    pub fn new(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        Self(Box::new(stream))
    }

    /// Over TCP. What goes over it are small messages, each of them awaited.
    pub fn tcp(stream: TcpStream) -> Self {
        // Slower is not broken.
        let _ = stream.set_nodelay(true);
        Self::new(stream)
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, to: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, to)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, slices)
    }
    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }
}

// Who is at the other end is told by its certificate, which tonic keeps beside this.
impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;
    fn connect_info(&self) -> TcpConnectInfo {
        TcpConnectInfo { local_addr: None, remote_addr: None }
    }
}

/// Opens a connection. In the embedded cluster it does so inside the cluster's network namespace.
pub type Dial = Arc<dyn Fn(SocketAddr) -> BoxFuture<'static, io::Result<Connection>> + Send + Sync>;

/// Makes a UDP socket that is connected to an address, from wherever [`Dial`] dials.
pub type Datagrams = Arc<dyn Fn(SocketAddr) -> BoxFuture<'static, io::Result<UdpSocket>> + Send + Sync>;

/// [`Datagrams`] from this process's own network.
pub fn direct_datagrams() -> Datagrams {
    Arc::new(|address| {
        Box::pin(async move {
            let any = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
            let socket = UdpSocket::bind(any).await?;
            socket.connect(address).await?;
            Ok(socket)
        })
    })
}

/// A [`Dial`] from this process's own network.
pub fn direct() -> Dial {
    Arc::new(|address| Box::pin(async move { TcpStream::connect(address).await.map(Connection::tcp) }))
}

/// Connections as they come.
pub type Incoming = BoxStream<'static, io::Result<Connection>>;

/// Those of a listener in this process's own network.
pub fn incoming(listener: TcpListener) -> Incoming {
    let accepted = stream::unfold(listener, |listener| async move {
        let accepted = listener.accept().await.map(|(stream, _)| Connection::tcp(stream));
        Some((accepted, listener))
    });
    accepted.boxed()
}

/// Who a component is, and whom it believes: PEM texts.
#[derive(Clone)]
pub struct Tls {
    /// Certificates of the authority that signs all components.
    pub ca: String,
    /// This component's certificate chain.
    pub cert: String,
    /// Its key.
    pub key: String,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls([redacted])")
    }
}

/// Time allowed for connection and TLS handshake.
const CONNECT: Duration = Duration::from_secs(5);
/// Bytes of a stream that are on their way because its reader has not taken them.
const STREAM_WINDOW: u32 = 64 << 10;
/// Streams of a connection, more than an agent serves: one too many is to be told so, and not to wait. All of them together
/// have room, so that one whose reader is asleep takes nothing from the others.
const STREAMS: u32 = 1024;
/// A silent connection is asked after this, and given up after as much again.
const KEEPALIVE: Duration = Duration::from_secs(5);

/// A channel to the agent of `node` at `address`. Fails where it cannot be reached, or is not who it should be.
pub async fn channel(
    dial: Dial,
    tls: &Tls,
    node: &str,
    address: SocketAddr,
) -> Result<Channel, tonic::transport::Error> {
    let config = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(&tls.ca))
        .identity(Identity::from_pem(&tls.cert, &tls.key))
        .domain_name(node);
    Endpoint::from_shared(format!("https://{address}"))?
        .tls_config(config)?
        .connect_timeout(CONNECT)
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(STREAM_WINDOW * STREAMS)
        .connect_with_connector(tower::service_fn(move |_: http::Uri| {
            let connecting = dial(address);
            async move { tokio::time::timeout(CONNECT, connecting).await?.map(TokioIo::new) }
        }))
        .await
}

/// Fails unless the caller is `wanted`, by the common name of its certificate.
pub fn caller<T>(request: &tonic::Request<T>, wanted: &str) -> Result<(), tonic::Status> {
    let certificates = request.peer_certs().unwrap_or_default();
    let first = certificates.first().ok_or_else(|| tonic::Status::unauthenticated("no client certificate"))?;
    let unreadable = || tonic::Status::unauthenticated("the client certificate cannot be read");
    let (_, certificate) = X509Certificate::from_der(first.as_ref()).map_err(|_| unreadable())?;
    let mut names = certificate.subject().iter_common_name();
    let name = names.next().and_then(|n| n.as_str().ok()).ok_or_else(unreadable)?;
    if name != wanted {
        return Err(tonic::Status::permission_denied(format!("{name} may not do this; {wanted} may")));
    }
    Ok(())
}

/// A component's server: clients must have a certificate of our authority.
///
/// # Errors
/// For certificates that are none.
pub fn server(tls: &Tls) -> Result<Server, tonic::transport::Error> {
    let tls = ServerTlsConfig::new()
        .identity(Identity::from_pem(&tls.cert, &tls.key))
        .client_ca_root(Certificate::from_pem(&tls.ca))
        .client_auth_optional(false);
    Ok(Server::builder()
        .tls_config(tls)?
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(STREAM_WINDOW * STREAMS)
        .max_concurrent_streams(STREAMS))
}
