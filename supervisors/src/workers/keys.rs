//! Keeps the keys that this process signs, certifies and lets nodes in by as operators have rotated them.
//!
//! A rotation is said on the bus, and every process reads anew at once. What is said can be lost: so it is looked now and then whether
//! something has changed, and when the bus is back, too. Acceptors follow without a restart.

use crate::cluster::bus::Bus;
use arc_swap::ArcSwap;
use chrono::Utc;
use domain::Event;
use edge::identity::TrustDomain;
use edge::identity::proxies::Proxies;
use edge::keys::{Keys, KeysError, KeysInForce};
use edge::polls::Polls;
use edge::tls::connections::Connections;
use edge::tls::tickets::SharedTickets;
use edge::tls::{ServerTls, TlsConfigError, server_config};
use futures::StreamExt;
use persistence::{Reads, Secrets};
use rustls::ServerConfig;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior, interval};

/// What is remembered is never older, also where nothing was heard: shorter than what a key stays in grace at least.
const KEPT: Duration = Duration::from_secs(5);

/// How often it is looked whether the bus is back.
const TURN: Duration = Duration::from_secs(1);

/// Follows the keys.
pub struct Keeper {
    pub reads: Reads,
    pub secrets: Secrets,
    pub domain: TrustDomain,
    pub in_force: KeysInForce,
    /// Told when the keys should be read now.
    pub changed: Arc<Notify>,
    pub bus: Bus,
    pub connections: Connections,
    pub polls: Polls,
    /// Set once, where this process serves nodes.
    pub acceptor: OnceLock<NodeAcceptor>,
    /// Set with it; none where nodes connect directly.
    pub proxies: OnceLock<Option<Arc<Proxies>>>,
}

/// How nodes are let in: by the certificates of the authorities that are trusted.
pub struct NodeAcceptor {
    certificate_chain_pem: String,
    key_pem: String,
    tickets: SharedTickets,
    config: Arc<ArcSwap<ServerConfig>>,
}

impl NodeAcceptor {
    /// # Errors
    /// Where certificates or keys cannot be used.
    pub fn new(
        certificate_chain_pem: String,
        key_pem: String,
        tickets: SharedTickets,
        keys: &Keys,
    ) -> Result<Self, TlsConfigError> {
        let config = Arc::new(ArcSwap::from_pointee(trusting(&certificate_chain_pem, &key_pem, &tickets, keys)?));
        Ok(Self { certificate_chain_pem, key_pem, tickets, config })
    }

    /// Read by the listener at each handshake.
    #[must_use]
    pub fn config(&self) -> Arc<ArcSwap<ServerConfig>> {
        Arc::clone(&self.config)
    }

    fn follow(&self, keys: &Keys) -> Result<(), TlsConfigError> {
        let config = trusting(&self.certificate_chain_pem, &self.key_pem, &self.tickets, keys)?;
        self.config.store(Arc::new(config));
        Ok(())
    }
}

fn trusting(chain: &str, key: &str, tickets: &SharedTickets, keys: &Keys) -> Result<ServerConfig, TlsConfigError> {
    server_config(&ServerTls {
        certificate_chain_pem: chain,
        key_pem: key,
        client_authorities_pem: Some(&keys.node.bundle_pem()),
        tickets: Some(Arc::new(tickets.under(keys.node.fingerprint()))),
    })
}

/// Why the keys in force are those of before.
#[derive(Debug, thiserror::Error)]
enum NotFollowed {
    #[error("they cannot be read")]
    Keys(#[from] KeysError),
    #[error("the acceptor of nodes cannot be set up with them")]
    Acceptor(#[from] TlsConfigError),
}

impl Keeper {
    /// Reads when told to, and when what is remembered is old.
    ///
    /// # Errors
    /// Never; while Postgres cannot be read the keys of before hold.
    pub async fn keep(&self) -> anyhow::Result<()> {
        let mut turn = interval(TURN);
        turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut read_at, mut was_connected) = (Instant::now(), false);
        loop {
            tokio::select! {
                () = self.changed.notified() => {}
                _ = turn.tick() => {
                    let is_connected = self.bus.is_connected();
                    let is_back = is_connected && !was_connected;
                    was_connected = is_connected;
                    if !is_back && read_at.elapsed() < KEPT {
                        continue;
                    }
                }
            }
            match self.follow().await {
                Ok(()) => read_at = Instant::now(),
                Err(error) => {
                    tracing::warn!(error = format!("{:#}", anyhow::Error::new(error)), "the keys of before hold on")
                }
            }
        }
    }

    async fn follow(&self) -> Result<(), NotFollowed> {
        let (before, keys) = (self.in_force.load(), Keys::read(&self.secrets, &self.reads, &self.domain).await?);
        let forsaken = keys.forsaken(Utc::now());
        if before.versions() != keys.versions() {
            // First the acceptor: who says that it goes by a version lets in whom that version trusts.
            if let Some(acceptor) = self.acceptor.get() {
                acceptor.follow(&keys)?;
            }
            if let Some(Some(proxies)) = self.proxies.get() {
                proxies.trust(&keys.node.bundle_pem())?;
            }
            tracing::info!(versions = ?keys.versions(), "keys were rotated");
            self.in_force.replace(keys);
            let now = self.in_force.load();
            let closed = self.connections.close_untrusted(|authority| now.node.trusts(authority));
            if closed > 0 {
                tracing::info!(connections = closed, "connections were cut: their authority is retired");
            }
            if !before.node.key_ids().iter().all(|authority| now.node.trusts(authority)) {
                // Behind a proxy no connection is a node's: who waits there is told.
                self.polls.wake_all();
            }
        }
        for name in forsaken {
            self.secrets.destroy(&name).await.map_err(KeysError::from)?;
            tracing::info!(name, "a private half that nothing needs any more was destroyed");
        }
        Ok(())
    }

    /// Hears that keys were rotated, by whichever member.
    ///
    /// # Errors
    /// Where the subscription ends.
    pub async fn listen(&self) -> anyhow::Result<()> {
        let mut words = self.bus.events(Event::TRUST_CHANGED).await?;
        // What was said before is not heard any more.
        self.changed.notify_one();
        while words.next().await.is_some() {
            self.changed.notify_one();
        }
        anyhow::bail!("the subscription ended")
    }
}
