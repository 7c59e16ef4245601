//! The third stage: this member, its view of the cluster, and its connection to the others.

use super::keys::KeyStage;
use super::storage::{StorageStage, database};
use crate::cluster::authentication::MemberAuthenticator;
use crate::cluster::bus::Bus;
use crate::cluster::{ClusterView, nats, process_identity};
use crate::config::Config;
use crate::restore_gate::RestoreFinding;
use domain::MemberId;
use persistence::Cluster;
use persistence::membership::Member;
use persistence::pool::PoolConfig;
use prometheus::Registry;
use serde_json::json;
use std::sync::Arc;
use tokio::sync::{Notify, watch};

/// This process as a member of the cluster.
pub struct MembershipStage {
    pub view: Arc<ClusterView>,
    pub bus: Bus,
    /// The tables of members and shards, over a pool of its own, so that a busy pool never makes a living member look dead.
    pub cluster: Cluster,
    /// Notified when the ownership table is to be read at once.
    pub read_ownership: Arc<Notify>,
    pub superseded: Supersession,
}

/// Whether another database of this cluster has a later incarnation, so that this member has to end.
#[derive(Clone, Debug, Default)]
pub struct Supersession(Arc<watch::Sender<Option<RestoreFinding>>>);

impl Supersession {
    pub fn report(&self, finding: RestoreFinding) {
        self.0.send_replace(Some(finding));
    }

    /// Waits for the report.
    pub async fn reported(&self) -> RestoreFinding {
        let mut reports = self.0.subscribe();
        loop {
            if let Some(finding) = reports.borrow_and_update().clone() {
                return finding;
            }
            // It cannot fail: the sender lives as long as this.
            if reports.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

impl MembershipStage {
    /// # Errors
    /// Where the settings of NATS or of the database are unusable.
    pub async fn connect(
        config: &Config,
        registry: &Registry,
        storage: &StorageStage,
        keys: &KeyStage,
    ) -> anyhow::Result<Self> {
        let view = Arc::new(ClusterView::new(own_member(storage.member, config)));
        let read_ownership = Arc::new(Notify::new());
        let members = MemberAuthenticator::register(registry, Arc::clone(&view), keys.current.clone())?;
        let client = nats::connect(&config.nats_url, config.nats_ca.as_deref(), &config.member_name).await?;
        let (seen, read) = (Arc::clone(&view), Arc::clone(&read_ownership));
        let inbox = nats::inbox_through(&config.nats_url, &config.member_name);
        let bus = Bus::new(client, inbox, Arc::new(members), seen, read);
        let bus = bus.with_stream_copies(config.nats_stream_copies);
        let cluster = Cluster::new(persistence::pool::open(&PoolConfig { connections: 2, ..database(config) })?);
        Ok(Self { view, bus, cluster, read_ownership, superseded: Supersession::default() })
    }
}

fn own_member(id: MemberId, config: &Config) -> Member {
    let roles: Vec<_> = config.roles.iter().map(|role| role.name()).collect();
    Member {
        id,
        name: config.member_name.clone(),
        started_at: chrono::Utc::now(),
        details: json!({
            "roles": roles,
            "process": process_identity::current(),
            "version": env!("CARGO_PKG_VERSION"),
            // A contract that this release does not know is refused while it lives.
            "schema": persistence::migrate::known(),
            "public_url": config.public_url,
            // The others refuse its messages without a stamp.
            "authenticates": true,
        }),
    }
}
