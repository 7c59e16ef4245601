//! The last stage: the sockets. They are bound before any worker starts, so that a taken port fails at once.

use super::actors::ActorStage;
use super::keys::KeyStage;
use super::node_acceptor::NodeAcceptor;
use super::services::{ServiceStage, read_text};
use super::storage::StorageStage;
use crate::cluster_keys;
use crate::config::{Config, NodeProxies};
use crate::process_roles::ProcessRole;
use anyhow::Context;
use arc_swap::ArcSwap;
use edge::services::Services;
use edge::tls::connections::Connections;
use edge::tls::ingress::Ingress;
use edge::tls::proxies::Proxies;
use edge::tls::serve::{ListenerLimits, TlsServer};
use edge::tls::{ServerTls, server_config};
use edge::trust::node_certificate::TrustDomain;
use rustls::ServerConfig;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The bound sockets, by what they serve; `None` where this process's roles do not include it.
pub struct ListenerStage {
    pub public_api: Option<Arc<BoundListener>>,
    pub node_api: Option<Arc<BoundListener>>,
    pub webhook: Option<Arc<BoundListener>>,
    pub operations: Arc<OperationsListener>,
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
        let services = &services.services;
        let certificate_chain_pem = read_text(&config.tls_cert).await?;
        let key_pem = read_text(&config.tls_key).await?;
        let tickets = cluster_keys::tickets(&storage.secrets).await?;
        let tls = server_config(&ServerTls {
            certificate_chain_pem: &certificate_chain_pem,
            key_pem: &key_pem,
            client_authorities_pem: None,
            tickets: Some(Arc::new(tickets.under([0; 32]))),
        })?;
        let tls = Arc::new(ArcSwap::from_pointee(tls));
        let shared = ListenerParts {
            connections: actors.effects.connections.clone(),
            ingress: Arc::new(config.ingress.clone()),
            stop: services.stopping.clone(),
            open: TaskTracker::new(),
        };
        let public_api = match public_router(config, services) {
            Some(router) => {
                let at = bind("SVC_PUBLIC_LISTEN", config.public_listen).await?;
                Some(Arc::new(BoundListener::new(at, Arc::clone(&tls), router, &shared)))
            }
            None => None,
        };
        let (mut node_api, mut node_acceptor, mut node_proxies) = (None, None, None);
        if let Some(router) = node_router(config, services) {
            let acceptor = NodeAcceptor::new(certificate_chain_pem, key_pem, tickets, &keys.in_force.load())?;
            node_proxies = proxies(config, keys)?;
            let at = bind("SVC_NODE_LISTEN", config.node_listen).await?;
            node_api = Some(Arc::new(BoundListener {
                trust_domain: Some(keys.domain.clone()),
                proxies: node_proxies.clone(),
                ..BoundListener::new(at, acceptor.config(), router, &shared)
            }));
            node_acceptor = Some(Arc::new(acceptor));
        }
        let mut webhook = None;
        if config.roles.contains(&ProcessRole::Webhook) && services.payments.is_some() {
            let at = bind("SVC_WEBHOOK_LISTEN", config.webhook_listen).await?;
            let router = edge::payment_webhook::router(services.clone());
            webhook = Some(Arc::new(BoundListener {
                limits: edge::payment_webhook::listener_limits(),
                ..BoundListener::new(at, tls, router, &shared)
            }));
        }
        let at = bind("SVC_OPERATIONS_LISTEN", config.operations_listen).await?;
        let operations = Arc::new(OperationsListener { at, router: edge::api::operations(services.clone()) });
        Ok(Self { public_api, node_api, webhook, operations, node_acceptor, node_proxies, shared })
    }
}

fn public_router(config: &Config, services: &Services) -> Option<axum::Router> {
    match (config.roles.contains(&ProcessRole::Api), config.roles.contains(&ProcessRole::TerminalGateway)) {
        (true, true) => Some(edge::terminal_gateway::beside(edge::api::router(services.clone()), services.clone())),
        (true, false) => Some(edge::api::router(services.clone())),
        (false, true) => Some(edge::terminal_gateway::router(services.clone())),
        (false, false) => None,
    }
}

/// What nodes reach. The two roles share an address, since a collector knows no other one than the node API's.
fn node_router(config: &Config, services: &Services) -> Option<axum::Router> {
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
    tracing::info!(%forwarding, ?networks, "the node API takes the word of proxies for client certificates");
    let authorities = keys.in_force.load().node.bundle_pem();
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
        Self { at, tls, router, limits, trust_domain: None, proxies: None, shared }
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

/// Binds a socket. `variable` names the setting that an operator changes where the address cannot be bound.
async fn bind(variable: &str, address: SocketAddr) -> anyhow::Result<std::net::TcpListener> {
    let listener =
        TcpListener::bind(address).await.with_context(|| format!("{variable}: cannot listen on {address}"))?;
    Ok(listener.into_std()?)
}
