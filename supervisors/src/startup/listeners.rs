//! The last stage: the sockets. They are bound before any worker starts, so that a taken port fails at once.

use super::actors::ActorStage;
use super::keys::KeyStage;
use super::listener_certificate::ListenerCertificate;
use super::node_acceptor::NodeAcceptor;
use super::services::ServiceStage;
use super::storage::StorageStage;
use crate::cluster_keys;
use crate::config::{Config, ConfigError, NodeProxies};
use crate::process_roles::ProcessRole;
use arc_swap::ArcSwap;
use axum::http::HeaderValue;
use axum::http::header::InvalidHeaderValue;
use edge::app_state::AppState;
use edge::tls::connections::Connections;
use edge::tls::ingress::Ingress;
use edge::tls::proxies::Proxies;
use edge::tls::serve::{ListenerLimits, TlsServer};
use edge::tls::tickets::SharedTickets;
use edge::tls::{ServerTls, TlsConfigError, server_config};
use edge::trust::node_certificate::TrustDomain;
use rustls::ServerConfig;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::{TcpListener, TcpSocket};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The bound sockets, by what they serve; `None` where this process's roles do not include it.
pub struct ListenerStage {
    pub public_api: Option<Arc<BoundListener>>,
    pub node_api: Option<Arc<BoundListener>>,
    pub webhook: Option<Arc<BoundListener>>,
    pub operations: Arc<OperationsListener>,
    user_tls: UserTls,
    /// Where this process serves nodes.
    pub node_acceptor: Option<Arc<NodeAcceptor>>,
    /// Where nodes connect through proxies.
    pub node_proxies: Option<Arc<Proxies>>,
    pub shared: ListenerParts,
}

/// The parts that all listeners share.
#[derive(Clone)]
pub struct ListenerParts {
    connections: Connections,
    ingress: Arc<Ingress>,
    /// Cancelled when no more connections are accepted.
    pub stop: CancellationToken,
    /// Ends when the last connection of the last listener is closed.
    pub open: TaskTracker,
}

impl ListenerStage {
    /// # Errors
    /// Where a certificate or key cannot be used, or a port is taken.
    pub async fn bind(
        config: &Config,
        storage: &StorageStage,
        keys: &KeyStage,
        actors: &ActorStage,
        services: &ServiceStage,
    ) -> anyhow::Result<Self> {
        let totals = &services.operator_view.metrics.entity_totals;
        let services = &services.services;
        let certificate = ListenerCertificate::read(&config.tls_cert, &config.tls_key).await?;
        totals.set_server_certificate_end(certificate.end);
        let tickets = Arc::new(cluster_keys::tickets(&storage.secrets).await?);
        let tls = Arc::new(ArcSwap::from_pointee(user_tls(&certificate, &tickets)?));
        let shared = ListenerParts {
            connections: actors.effects.connections.clone(),
            ingress: Arc::new(config.ingress.clone()),
            stop: services.stopping.clone(),
            open: TaskTracker::new(),
        };
        let public_api = match public_router(config, services) {
            Some(router) => {
                let at = bind("SVC_PUBLIC_LISTEN", config.public_listen)?;
                let strict_transport = config.hsts_seconds.map(strict_transport).transpose()?;
                let limits = config.listener_limits.clone();
                let listener = BoundListener::new(at, Arc::clone(&tls), router, &shared);
                Some(Arc::new(BoundListener { limits, strict_transport, ..listener }))
            }
            None => None,
        };
        let (mut node_api, mut node_acceptor, mut node_proxies) = (None, None, None);
        if let Some(router) = node_router(config, services) {
            let acceptor = NodeAcceptor::new(certificate, Arc::clone(&tickets), &keys.current.load())?;
            node_proxies = proxies(config, keys)?;
            let at = bind("SVC_NODE_LISTEN", config.node_listen)?;
            node_api = Some(Arc::new(BoundListener {
                trust_domain: Some(keys.domain.clone()),
                proxies: node_proxies.clone(),
                limits: config.listener_limits.clone(),
                ..BoundListener::new(at, acceptor.config(), router, &shared)
            }));
            node_acceptor = Some(Arc::new(acceptor));
        }
        let mut webhook = None;
        if config.roles.contains(&ProcessRole::Webhook) && services.payments.is_some() {
            let at = bind("SVC_WEBHOOK_LISTEN", config.webhook_listen)?;
            let router = edge::payment_webhook::router(services.clone());
            webhook = Some(Arc::new(BoundListener {
                limits: edge::payment_webhook::listener_limits(),
                ..BoundListener::new(at, Arc::clone(&tls), router, &shared)
            }));
        }
        let at = bind("SVC_OPERATIONS_LISTEN", config.operations_listen)?;
        let operations = Arc::new(OperationsListener { at, router: edge::api::operations(services.clone()) });
        let user_tls = UserTls { config: tls, tickets };
        Ok(Self { public_api, node_api, webhook, operations, user_tls, node_acceptor, node_proxies, shared })
    }

    /// Presents this certificate, from the next handshake on. Open connections stay.
    ///
    /// # Errors
    /// Where it cannot be used, or its key is another's; the certificate of before stays.
    pub fn present(&self, certificate: &ListenerCertificate) -> Result<(), TlsConfigError> {
        let config = user_tls(certificate, &self.user_tls.tickets)?;
        if let Some(acceptor) = &self.node_acceptor {
            acceptor.present(certificate.clone())?;
        }
        self.user_tls.config.store(Arc::new(config));
        Ok(())
    }
}

/// The TLS of the listeners that request no client certificate, read at each handshake.
struct UserTls {
    config: Arc<ArcSwap<ServerConfig>>,
    tickets: Arc<SharedTickets>,
}

fn user_tls(certificate: &ListenerCertificate, tickets: &SharedTickets) -> Result<ServerConfig, TlsConfigError> {
    server_config(&ServerTls {
        certificate_chain_pem: &certificate.chain_pem,
        key_pem: &certificate.key_pem,
        client_authorities_pem: None,
        tickets: Some(Arc::new(tickets.under([0; 32]))),
    })
}

/// The value of `Strict-Transport-Security`. Without `includeSubDomains`: other hosts of the domain are not this service's.
fn strict_transport(seconds: u32) -> Result<HeaderValue, InvalidHeaderValue> {
    HeaderValue::try_from(format!("max-age={seconds}"))
}

/// The API, and the login to the web console.
fn public_api(services: &AppState) -> axum::Router {
    edge::console_login::beside(edge::api::router(services.clone()), services.clone())
}

fn public_router(config: &Config, services: &AppState) -> Option<axum::Router> {
    match (config.roles.contains(&ProcessRole::Api), config.roles.contains(&ProcessRole::TerminalGateway)) {
        (true, true) => Some(edge::terminal_gateway::beside(public_api(services), services.clone())),
        (true, false) => Some(public_api(services)),
        (false, true) => Some(edge::terminal_gateway::router(services.clone())),
        (false, false) => None,
    }
}

/// What nodes reach. The two roles share an address, since a collector knows no other one than the node API's.
fn node_router(config: &Config, services: &AppState) -> Option<axum::Router> {
    match (config.roles.contains(&ProcessRole::NodeApi), config.roles.contains(&ProcessRole::NodeLogGateway)) {
        (true, true) => Some(edge::log_gateway::beside(edge::node_api::router(services.clone()), services.clone())),
        (true, false) => Some(edge::node_api::router(services.clone())),
        (false, true) => Some(edge::log_gateway::router(services.clone())),
        (false, false) => None,
    }
}

/// The proxies that may forward a node's certificate; it is verified against the same authorities as on direct connections.
fn proxies(config: &Config, keys: &KeyStage) -> anyhow::Result<Option<Arc<Proxies>>> {
    let Some(NodeProxies { forwarding, networks }) = &config.node_proxies else { return Ok(None) };
    tracing::info!(%forwarding, ?networks, "the node API accepts client certificates that proxies forward");
    let authorities = keys.current.load().node.bundle_pem();
    Ok(Some(Arc::new(Proxies::new(*forwarding, networks.clone(), &authorities)?)))
}

/// A bound socket with its router. A restarted worker serves on the same socket.
pub struct BoundListener {
    at: std::net::TcpListener,
    tls: Arc<ArcSwap<ServerConfig>>,
    router: axum::Router,
    limits: ListenerLimits,
    trust_domain: Option<TrustDomain>,
    proxies: Option<Arc<Proxies>>,
    strict_transport: Option<HeaderValue>,
    shared: ListenerParts,
}

impl BoundListener {
    fn new(
        at: std::net::TcpListener,
        tls: Arc<ArcSwap<ServerConfig>>,
        router: axum::Router,
        shared: &ListenerParts,
    ) -> Self {
        let (limits, shared) = (ListenerLimits::default(), shared.clone());
        Self { at, tls, router, limits, trust_domain: None, proxies: None, strict_transport: None, shared }
    }

    /// Serves until it is stopped, and then until the last connection is closed.
    ///
    /// # Errors
    /// Where the socket fails.
    pub async fn serve(&self) -> anyhow::Result<()> {
        let listener = TcpListener::from_std(self.at.try_clone()?)?;
        let server = TlsServer {
            tls: Arc::clone(&self.tls),
            router: self.router.clone(),
            limits: self.limits.clone(),
            connections: self.shared.connections.clone(),
            trust_domain: self.trust_domain.clone(),
            proxies: self.proxies.clone(),
            ingress: Arc::clone(&self.shared.ingress),
            strict_transport: self.strict_transport.clone(),
        };
        let open = self.shared.open.token();
        server.serve(listener, self.shared.stop.clone()).await?;
        drop(open);
        // The listener was stopped: the supervisor stops this worker next.
        self.shared.stop.cancelled().await;
        std::future::pending().await
    }
}

/// Serves operators in clear, on an address that is for them alone.
pub struct OperationsListener {
    at: std::net::TcpListener,
    router: axum::Router,
}

impl OperationsListener {
    /// Serves. Health reports the shutdown until the last connection is closed.
    ///
    /// # Errors
    /// Where the socket fails.
    pub async fn serve(&self) -> anyhow::Result<()> {
        let listener = TcpListener::from_std(self.at.try_clone()?)?;
        axum::serve(listener, self.router.clone()).await?;
        Ok(())
    }
}

/// Connections that the kernel holds until they are accepted: thousands may come within one moment, and above this bound the kernel drops
/// what a client sends, which the client repeats after one second, three and seven. The kernel's own bound is `net.core.somaxconn`.
const BACKLOG: u32 = 4096;

/// Binds a socket. `variable` names the setting that an operator changes where the address cannot be bound.
fn bind(variable: &str, address: SocketAddr) -> anyhow::Result<std::net::TcpListener> {
    let what = format!("{variable}: cannot listen on {address}");
    let listener = listen(address).map_err(|error| match error.kind() {
        // No time gives the process the right to a port below 1024.
        ErrorKind::PermissionDenied => ConfigError::of(format!("{what}: {error}; take a port from 1024 on")).into(),
        _ => anyhow::Error::from(error).context(what),
    })?;
    Ok(listener.into_std()?)
}

fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A replica that restarts binds its port while connections of the former one are in TIME-WAIT.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;
    use std::time::Duration;

    /// More than the backlog of `TcpListener::bind`, which is 1,024.
    const AT_ONCE: usize = 2000;

    #[tokio::test]
    async fn two_thousand_connections_wait_to_be_accepted_and_none_is_dropped() {
        let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let address = listener.local_addr().unwrap();
        for n in 0..AT_ONCE {
            // It stays in the backlog after its client closed it.
            let connected = tokio::time::timeout(Duration::from_secs(20), tokio::net::TcpStream::connect(address));
            connected.await.unwrap_or_else(|_| panic!("the kernel dropped connection {n}")).unwrap();
        }
    }
}
