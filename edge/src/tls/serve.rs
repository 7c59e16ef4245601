//! The listener: accepts, does handshakes off the accept loop, and serves HTTP/1.1 and HTTP/2 within limits.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use axum::{
    Router,
    extract::{ConnectInfo, Request},
    http::{
        HeaderMap, HeaderValue, StatusCode, Uri, Version,
        header::{HOST, STRICT_TRANSPORT_SECURITY},
    },
};
use futures::{FutureExt, future::BoxFuture};
use hyper::{
    body::Incoming,
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use persistence::outage_log::RetryLog;
use rustls::{HandshakeKind, ServerConfig};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep_until, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt;
use tracing::{debug, info, warn};

use super::{
    Peer,
    admission::{Admission, ConnectionSlot},
    client_network::network_of,
    connections::{ConnectionOwner, Connections, RevocableStream},
    http1::Http1Stream,
    ingress::Ingress,
    proxies::{Proxies, peer_of},
};
use crate::http::malformed_request::MalformedRequest;
use crate::trust::node_certificate::{NodeCertificate, TrustDomain};

/// The bounds of a listener.
#[derive(Clone, Debug)]
pub struct ListenerLimits {
    /// Connections at once; further ones wait in the kernel's backlog.
    pub connections: usize,
    /// Connections at once that have not made a whole request yet, handshakes among them; over it the oldest one is closed.
    pub pending: usize,
    /// Of those, from one address, or from one IPv6 network of 64 bits; over it a new connection is closed.
    pub pending_per_address: u32,
    /// Connections at once from one address, likewise; those of nodes with a certificate do not count.
    pub open_per_address: u32,
    pub handshake_timeout: Duration,
    /// From the connection's begin, or from the last answer, to the end of a request's headers.
    pub header_read_timeout: Duration,
    /// All headers of a request together, in bytes; at least 8,192.
    pub header_bytes: usize,
    /// Headers of a request.
    pub header_count: usize,
    /// Requests at once on one HTTP/2 connection.
    pub streams: u32,
    /// Requests that a client may have begun and reset without their being worked off, on one HTTP/2 connection.
    pub pending_resets: usize,
    /// How long connections may finish their requests when the listener stops.
    pub drain: Duration,
}

impl ListenerLimits {
    /// Of a listener that admits so many connections at once: half of them may be pending, or of one address, and a sixteenth both.
    #[must_use]
    pub fn of_connections(connections: usize) -> Self {
        let share = |of: usize| u32::try_from(connections / of).unwrap_or(u32::MAX);
        Self {
            connections,
            pending: connections / 2,
            pending_per_address: share(16),
            open_per_address: share(2),
            ..Self::default()
        }
    }
}

impl Default for ListenerLimits {
    fn default() -> Self {
        Self {
            connections: 16_384,
            pending: 8_192,
            pending_per_address: 1_024,
            open_per_address: 8_192,
            handshake_timeout: Duration::from_secs(10),
            header_read_timeout: Duration::from_secs(30),
            header_bytes: 32 * 1024,
            header_count: 100,
            streams: 128,
            pending_resets: 20,
            drain: Duration::from_secs(20),
        }
    }
}

/// A TLS listener in front of a router.
pub struct TlsServer {
    /// Read at each handshake, so that certificates and authorities can be replaced while it runs.
    pub tls: Arc<ArcSwap<ServerConfig>>,
    pub router: Router,
    pub limits: ListenerLimits,
    pub connections: Connections,
    /// Identifies the connections of nodes; `None` on a listener that nodes do not use.
    pub trust_domain: Option<TrustDomain>,
    /// Proxies that are trusted to forward client certificates; `None` where only the client's own certificate counts.
    pub proxies: Option<Arc<Proxies>>,
    /// The addresses that many clients share: bounds per address do not apply to them.
    pub ingress: Arc<Ingress>,
    /// The header `Strict-Transport-Security` of every answer (RFC 6797); `None` where there is none.
    pub strict_transport: Option<HeaderValue>,
}

impl TlsServer {
    /// Serves until `stop`, then drains within the drain time. Does not return before the last connection is closed.
    ///
    /// # Errors
    /// Where the socket fails for good.
    pub async fn serve(self, listener: TcpListener, stop: CancellationToken) -> io::Result<()> {
        let slots = Arc::new(Semaphore::new(self.limits.connections));
        let admission = Admission::new(&self.limits);
        let server = Arc::new(self);
        let (running, cut) = (TaskTracker::new(), CancellationToken::new());
        info!(address = ?listener.local_addr().ok(), "listening");
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => break,
                accepted = accept(&listener, &slots, &admission) => accepted?,
            };
            let (stream, address, slot) = accepted;
            let Some(slot) = admission.admit(server.network_of(address), slot) else { continue };
            let accepted = AcceptedConnection { stream, address, slot: Arc::new(slot) };
            // Boxed, and freed once it is done: a task is forever as large as the largest future that it awaits.
            let beginning = Arc::clone(&server).begin(accepted, stop.clone()).boxed();
            let cut = cut.clone();
            running.spawn(async move {
                let to_its_end = async {
                    if let Some(speaking) = beginning.await {
                        speaking.await;
                    }
                };
                tokio::select! {
                    () = cut.cancelled() => {}
                    () = to_its_end => {}
                }
            });
        }
        drop(listener);
        running.close();
        if timeout(server.limits.drain, running.wait()).await.is_err() {
            warn!(connections = running.len(), "connections were cut at the end of the drain time");
            cut.cancel();
            running.wait().await;
        }
        Ok(())
    }

    /// The handshake, and what follows it.
    async fn begin(
        self: Arc<Self>,
        accepted: AcceptedConnection,
        stop: CancellationToken,
    ) -> Option<BoxFuture<'static, ()>> {
        let AcceptedConnection { stream, address, slot } = accepted;
        let _ = stream.set_nodelay(true);
        let acceptor = TlsAcceptor::from(self.tls.load_full());
        let handshake = tokio::select! {
            handshake = timeout(self.limits.handshake_timeout, acceptor.accept(stream)) => handshake,
            () = slot.displaced() => return None,
        };
        let stream = match handshake {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => {
                debug!(%address, %error, "a TLS handshake failed");
                return None;
            }
            Err(_) => {
                debug!(%address, "a TLS handshake took too long");
                return None;
            }
        };
        let session = stream.get_ref().1;
        let resumed = session.handshake_kind() == Some(HandshakeKind::Resumed);
        let speaks_h2 = session.alpn_protocol() == Some(b"h2");
        let leaf = session.peer_certificates().and_then(<[_]>::first);
        let shown = self.trust_domain.as_ref().zip(leaf).map(|(domain, leaf)| NodeCertificate::parse(leaf, domain));
        let node = shown.as_ref().and_then(|shown| shown.as_ref().ok());
        let whose = node.map(|node| ConnectionOwner { node_id: node.node_id, authority: node.authority.clone() });
        if whose.is_some() {
            slot.settle_as_node();
        }
        let peer = Peer::connected(address, shown, resumed, &self.ingress);
        let stream = self.connections.watch(whose, stream, Arc::clone(&slot) as Arc<_>);
        Some(self.serve_connection(stream, peer, slot, speaks_h2, stop))
    }

    /// The network that a connection counts against; `None` where many clients share its address.
    fn network_of(&self, address: SocketAddr) -> Option<IpAddr> {
        let ip = address.ip();
        let forwards = self.proxies.as_ref().is_some_and(|proxies| proxies.trusts(ip));
        let is_shared = forwards || self.ingress.is_proxy(ip) || self.ingress.is_balancer(ip);
        (!is_shared).then(|| network_of(ip))
    }

    /// Serves requests on a connection to its end. No `async fn`: that would store its arguments while it waits.
    fn serve_connection(
        &self,
        stream: RevocableStream<TlsStream<TcpStream>>,
        peer: Peer,
        slot: Arc<ConnectionSlot>,
        speaks_h2: bool,
        stop: CancellationToken,
    ) -> BoxFuture<'static, ()> {
        let address = peer.address;
        let limits = &self.limits;
        let too_many = MalformedRequest::Headers { bytes: limits.header_bytes, count: limits.header_count };
        let switched = Arc::new(AtomicBool::new(false));
        let answering = Http1Stream::new(stream, self.router.clone(), peer.clone(), too_many, Arc::clone(&switched));
        let (router, asking) = (self.router.clone(), Arc::clone(&slot));
        let (proxies, ingress) = (self.proxies.clone(), Arc::clone(&self.ingress));
        let most = (limits.header_bytes, limits.header_count);
        let strict_transport = self.strict_transport.clone();
        let service = service_fn(move |request: Request<Incoming>| {
            asking.settle();
            let mut request = request.map(axum::body::Body::new);
            let too_large = exceed(request.uri(), request.headers(), most);
            let peer = peer_of(proxies.as_deref(), &ingress, &peer, request.headers_mut());
            request.extensions_mut().insert(ConnectInfo(peer));
            if too_large {
                request.extensions_mut().insert(too_many);
            } else if request.version() == Version::HTTP_11 && request.headers().get_all(HOST).iter().count() != 1 {
                // RFC 9112, section 3.2: there is exactly one `Host`.
                request.extensions_mut().insert(MalformedRequest::Malformed);
            }
            let (answer, switched) = (router.clone().oneshot(request), Arc::clone(&switched));
            let strict_transport = strict_transport.clone();
            async move {
                let mut answer = answer.await;
                if let Ok(answer) = &mut answer {
                    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
                        switched.store(true, Ordering::Relaxed);
                    }
                    if let Some(value) = strict_transport {
                        answer.headers_mut().insert(STRICT_TRANSPORT_SECURITY, value);
                    }
                }
                answer
            }
        });
        let io = TokioIo::new(answering);
        let first = FirstRequestDeadline { by: Instant::now() + limits.header_read_timeout, slot };
        if speaks_h2 {
            let mut builder = http2::Builder::new(TokioExecutor::new());
            builder
                .timer(TokioTimer::new())
                .max_concurrent_streams(limits.streams)
                .max_pending_accept_reset_streams(limits.pending_resets)
                .max_local_error_reset_streams(limits.pending_resets * 4)
                // Over it h2 answers by itself; up to it the router does.
                .max_header_list_size(u32::try_from(limits.header_bytes * 4).unwrap_or(u32::MAX))
                // Detects peers that are gone without closing.
                .keep_alive_interval(Duration::from_secs(30))
                .keep_alive_timeout(Duration::from_secs(20));
            if self.trust_domain.is_some() {
                // A header in the table (RFC 7541, section 2.3.2) keeps the buffer that it was decoded from: 12 KiB of each agent that waits.
                // An agent sends a few short headers twice a minute.
                builder.header_table_size(0);
            }
            let connection = Box::pin(builder.serve_connection(io, service));
            drive(connection, http2::Connection::graceful_shutdown, first, stop, address).boxed()
        } else {
            let mut builder = http1::Builder::new();
            builder
                .timer(TokioTimer::new())
                .header_read_timeout(limits.header_read_timeout)
                .max_buf_size(limits.header_bytes.max(8192))
                .max_headers(limits.header_count);
            let connection = Box::pin(builder.serve_connection(io, service).with_upgrades());
            drive(connection, http1::UpgradeableConnection::graceful_shutdown, first, stop, address).boxed()
        }
    }
}

/// By when a connection must have made its first request.
struct FirstRequestDeadline {
    by: Instant,
    slot: Arc<ConnectionSlot>,
}

/// Runs a connection of either protocol to its end; once stopped, it finishes its requests and accepts none.
async fn drive<C: Future<Output = hyper::Result<()>>>(
    mut connection: Pin<Box<C>>,
    wind_down: fn(Pin<&mut C>),
    first: FirstRequestDeadline,
    stop: CancellationToken,
    address: SocketAddr,
) {
    let (mut draining, mut awaiting_first) = (false, true);
    let result = loop {
        tokio::select! {
            // The connection first: a request that has arrived counts, although its deadline was reached before it was read.
            biased;
            result = connection.as_mut() => break result,
            () = stop.cancelled(), if !draining => {
                draining = true;
                wind_down(connection.as_mut());
            }
            () = sleep_until(first.by), if awaiting_first => {
                awaiting_first = false;
                if first.slot.is_unasked() {
                    break Ok(());
                }
            }
            () = first.slot.displaced(), if awaiting_first => break Ok(()),
        }
    };
    if let Err(error) = result {
        debug!(%address, %error, "a connection ended with an error");
    }
}

/// Whether target and headers are more, or longer, than may be; counted as HTTP/2 does (RFC 9113, section 10.5.1).
fn exceed(uri: &Uri, headers: &HeaderMap, (bytes, count): (usize, usize)) -> bool {
    const OF_EACH: usize = 32;
    let target = uri.path_and_query().map_or(0, |target| target.as_str().len());
    let all = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + OF_EACH).sum::<usize>();
    headers.len() > count || target + all > bytes
}

struct AcceptedConnection {
    stream: TcpStream,
    address: SocketAddr,
    slot: Arc<ConnectionSlot>,
}

/// Acquires a slot first, then accepts: connections over the bound stay in the kernel's backlog. Without a free slot, the oldest pending
/// connection is closed.
async fn accept(
    listener: &TcpListener,
    slots: &Arc<Semaphore>,
    admission: &Admission,
) -> io::Result<(TcpStream, SocketAddr, OwnedSemaphorePermit)> {
    static RETRIES: RetryLog = RetryLog::new("accept connections");
    let closed = |_| io::Error::other("the listener's bounds are gone");
    if slots.available_permits() == 0 {
        admission.displace_oldest();
    }
    let slot = Arc::clone(slots).acquire_owned().await.map_err(closed)?;
    loop {
        match listener.accept().await {
            Ok((stream, address)) => {
                RETRIES.succeeded();
                return Ok((stream, address, slot));
            }
            Err(error) if is_the_peers(&error) => {}
            Err(error) if is_passing(&error) => {
                RETRIES.failed(&error.to_string());
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
            Err(error) => return Err(error),
        }
    }
}

fn is_the_peers(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// Out of file descriptors or of memory: other connections will end.
fn is_passing(error: &io::Error) -> bool {
    // ENFILE, EMFILE, ENOBUFS, ENOMEM
    matches!(error.raw_os_error(), Some(23 | 24 | 105 | 12))
}

#[cfg(test)]
mod tests;
