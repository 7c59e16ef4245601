//! Keeps the keys with which this process signs, certifies and admits nodes up to date with their rotation.
//!
//! A rotation is published, and every process reads the keys at once. A message can be lost: so they are also read periodically, and
//! after each reconnection to NATS. Acceptors are updated without a restart.

use super::WorkerDependencies;
use crate::cluster::bus::Bus;
use crate::startup::node_acceptor::NodeAcceptor;
use crate::supervisor::{WorkerTask, task};
use chrono::Utc;
use domain::Event;
use edge::http::long_poll::LongPolls;
use edge::tls::TlsConfigError;
use edge::tls::connections::Connections;
use edge::tls::proxies::Proxies;
use edge::trust::current_keys::{CurrentKeys, Keys, KeysError};
use edge::trust::node_certificate::TrustDomain;
use futures::StreamExt;
use persistence::outage_log::RetryLog;
use persistence::{Reads, Secrets};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior, interval};

/// The maximal age of the cached keys, also without a message: shorter than the shortest grace period of a key.
const MAX_AGE: Duration = Duration::from_secs(5);

/// How often the connection to NATS is checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    Ok(task(&parts.key_follower, |follower| async move { follower.run().await }))
}

pub(super) fn start_listener(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    Ok(task(&parts.key_follower, |follower| async move { follower.listen().await }))
}

/// Updates the keys of this process.
pub struct KeyFollower {
    pub reads: Reads,
    pub secrets: Secrets,
    pub domain: TrustDomain,
    pub current: CurrentKeys,
    /// Notified when the keys are to be read at once.
    pub changed: Arc<Notify>,
    pub bus: Bus,
    pub connections: Connections,
    pub polls: LongPolls,
    /// Where this process serves nodes.
    pub acceptor: Option<Arc<NodeAcceptor>>,
    /// Where nodes connect through proxies.
    pub proxies: Option<Arc<Proxies>>,
}

/// Why the keys could not be updated.
#[derive(Debug, thiserror::Error)]
enum KeyUpdateError {
    #[error("they cannot be read")]
    Keys(#[from] KeysError),
    #[error("the acceptor of nodes cannot be set up with them")]
    Acceptor(#[from] TlsConfigError),
}

impl KeyFollower {
    /// Reads the keys when notified, and when they are old.
    ///
    /// # Errors
    /// Never; while Postgres cannot be read the previous keys stay in force.
    pub async fn run(&self) -> anyhow::Result<()> {
        let mut ticker = interval(CHECK_INTERVAL);
        ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut read_at, mut was_connected) = (Instant::now(), false);
        let retries = RetryLog::new("read the service's keys");
        loop {
            tokio::select! {
                () = self.changed.notified() => {}
                _ = ticker.tick() => {
                    let is_connected = self.bus.is_connected();
                    let is_back = is_connected && !was_connected;
                    was_connected = is_connected;
                    if !is_back && read_at.elapsed() < MAX_AGE {
                        continue;
                    }
                }
            }
            if retries.observe(self.update().await).is_some() {
                read_at = Instant::now();
            }
        }
    }

    async fn update(&self) -> Result<(), KeyUpdateError> {
        let (before, keys) = (self.current.load(), Keys::read(&self.secrets, &self.reads, &self.domain).await?);
        let orphaned = keys.orphaned_secrets(Utc::now());
        if before.versions() != keys.versions() {
            // The acceptor first: a member that reports a version must admit the nodes that this version trusts.
            if let Some(acceptor) = &self.acceptor {
                acceptor.update(&keys)?;
            }
            if let Some(proxies) = &self.proxies {
                proxies.trust(&keys.node.bundle_pem())?;
            }
            tracing::info!(versions = ?keys.versions(), "keys were rotated");
            self.current.replace(keys);
            let now = self.current.load();
            let closed = self.connections.close_untrusted(|authority| now.node.trusts(authority));
            if closed > 0 {
                tracing::info!(connections = closed, "connections were cut: their authority is retired");
            }
            if !before.node.key_ids().iter().all(|authority| now.node.trusts(authority)) {
                // Behind a proxy no connection belongs to a node: waiting polls are woken instead.
                self.polls.wake_all();
            }
        }
        for name in orphaned {
            self.secrets.destroy(&name).await.map_err(KeysError::from)?;
            tracing::info!(name, "the private half of a retired key was destroyed");
        }
        Ok(())
    }

    /// Receives the event that keys were rotated, by any member.
    ///
    /// # Errors
    /// Where the subscription ends.
    pub async fn listen(&self) -> anyhow::Result<()> {
        let mut events = self.bus.events(Event::TRUST_CHANGED).await?;
        // Events before the subscription are not received.
        self.changed.notify_one();
        while events.next().await.is_some() {
            self.changed.notify_one();
        }
        anyhow::bail!("the subscription ended")
    }
}
