//! The telemetry edge of a node (specification, *Endpoints*): a reverse proxy in front of the machine's own telemetry agent, which
//! listens on the loopback alone. It passes on GET requests and nothing that could identify a person or change the agent.

mod proxy;
mod request_rules;
mod settings;

pub use settings::{EdgeConfig, EdgeConfigError};

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use proxy::Proxy;
use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

/// Connections at once, in total and of one address.
const CONNECTIONS_MAX: usize = 256;
const CONNECTIONS_OF_ADDRESS_MAX: usize = 32;
/// How long a handshake, and the head of a request, may take. It is also how long a connection may be idle.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a connection may last, whatever it does: a slow reader is ended too.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(300);
/// The head of a request, in bytes and headers.
const HEAD_BYTES: usize = 16 * 1024;
const HEADERS_MAX: usize = 64;
/// The pause after a failure to accept, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves on `listener` until `stop` is cancelled.
pub async fn serve(listener: TcpListener, config: EdgeConfig, stop: CancellationToken) {
    let acceptor = config.tls.clone().map(TlsAcceptor::from);
    let proxy = Arc::new(Proxy::new(config.upstream, config.requires_client));
    let (free, addresses) = (Arc::new(Semaphore::new(CONNECTIONS_MAX)), Arc::new(Addresses::default()));
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(error_code = "accept", error = %error, "a connection cannot be accepted");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // What is over a bound is closed at once, so that the others are served.
        let (Ok(permit), Some(place)) =
            (Arc::clone(&free).try_acquire_owned(), Addresses::enter(&addresses, peer.ip()))
        else {
            continue;
        };
        let (acceptor, proxy) = (acceptor.clone(), Arc::clone(&proxy));
        tokio::spawn(async move {
            match timeout(CONNECTION_TIMEOUT, serve_connection(stream, acceptor, proxy)).await {
                Ok(Ok(())) | Err(_) => {}
                Ok(Err(error)) => debug!(peer = %peer, error = %error, "a connection ended"),
            }
            drop((permit, place));
        });
    }
}

async fn serve_connection(stream: TcpStream, acceptor: Option<TlsAcceptor>, proxy: Arc<Proxy>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let Some(acceptor) = acceptor else { return serve_http(stream, false, proxy).await };
    let stream = timeout(HEAD_TIMEOUT, acceptor.accept(stream)).await.map_err(|_| io::ErrorKind::TimedOut)??;
    let has_certificate = stream.get_ref().1.peer_certificates().is_some_and(|chain| !chain.is_empty());
    serve_http(stream, has_certificate, proxy).await
}

async fn serve_http(
    stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    has_certificate: bool,
    proxy: Arc<Proxy>,
) -> io::Result<()> {
    let service = service_fn(|request| {
        let proxy = Arc::clone(&proxy);
        async move { Ok::<_, std::convert::Infallible>(proxy.respond(request, has_certificate).await) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEADERS_MAX)
        .half_close(false)
        .serve_connection(TokioIo::new(stream), service)
        .await
        .map_err(io::Error::other)
}

/// The connections of each address.
#[derive(Default)]
struct Addresses(Mutex<HashMap<IpAddr, usize>>);

/// One of them. Dropping it frees its place.
struct Place(Arc<Addresses>, IpAddr);

impl Addresses {
    fn enter(addresses: &Arc<Self>, address: IpAddr) -> Option<Place> {
        let mut counts = addresses.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(address).or_default();
        if *count >= CONNECTIONS_OF_ADDRESS_MAX {
            return None;
        }
        *count += 1;
        Some(Place(Arc::clone(addresses), address))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.1);
            }
        }
    }
}
