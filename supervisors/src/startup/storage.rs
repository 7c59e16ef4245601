//! The first stage: Postgres, and what reads and writes it.

use crate::cluster_keys;
use crate::config::Config;
use crate::process_roles::ProcessRole;
use anyhow::Context;
use domain::MemberId;
use domain::policy::PolicyBook;
use persistence::committer::CommitterMetrics;
use persistence::envelope_encryption::KeyRing;
use persistence::pool::PoolConfig;
use persistence::{Committer, CommitterConfig, Loader, OutboxRow, Reads, Secrets, migrate};
use prometheus::Registry;
use sqlx::PgPool;
use std::sync::Arc;
use tokio::sync::{Mutex, mpsc};
use uuid::Uuid;

/// Lanes of the committer, each with a worker.
pub const COMMITTER_LANES: usize = 2;

/// Committed events that may wait for the relay; those that do not fit are found by the poll.
const RELAY_QUEUE: usize = 16_384;

/// The database, as the parts of this process use it.
pub struct StorageStage {
    /// The member that this process is: every start is a new one.
    pub member: MemberId,
    pub pool: PgPool,
    pub ring: Arc<KeyRing>,
    pub secrets: Secrets,
    pub reads: Reads,
    pub committer: Committer,
    pub loader: Loader,
    /// The queue of committed events, in front of the relay.
    pub committed: mpsc::Sender<OutboxRow>,
    /// The relay's end of the queue.
    pub committed_rows: Arc<Mutex<mpsc::Receiver<OutboxRow>>>,
    /// The policy values at the start.
    pub policy_book: PolicyBook,
}

impl StorageStage {
    /// # Errors
    /// Where the database cannot be reached, or the key ring does not fit it.
    pub async fn open(config: &Config, registry: &Registry) -> anyhow::Result<Self> {
        let pool = open_database(config).await?;
        let ring = Arc::clone(&config.key_ring);
        let secrets = Secrets::new(pool.clone(), Arc::clone(&ring));
        // Before any secret is opened, so that the error says what to do.
        secrets.rewrap().check().await.context("the key ring does not fit the database")?;
        let seals = cluster_keys::seals(&secrets, config.unsealed_until).await?;
        seals.register(registry)?;
        let reads = Reads::new(pool.clone()).sealed(seals.clone());
        let member = MemberId(Uuid::new_v4());
        let (committed, mut rows) = mpsc::channel(RELAY_QUEUE);
        if !config.roles.contains(&ProcessRole::OutboxRelay) {
            // Without the role, another process's relay reads them from Postgres.
            rows.close();
        }
        let metrics = CommitterMetrics::register(registry)?;
        let settings = CommitterConfig { workers: COMMITTER_LANES, seals: Some(seals), ..CommitterConfig::new(member) };
        let committer = Committer::new(&pool, settings, metrics, committed.clone());
        let loader = Loader::new(&reads);
        let policy_book = reads.policy_book().await.context("the policy values cannot be read")?;
        let committed_rows = Arc::new(Mutex::new(rows));
        Ok(Self { member, pool, ring, secrets, reads, committer, loader, committed, committed_rows, policy_book })
    }
}

/// The settings of a pool for this process.
pub(super) fn database(config: &Config) -> PoolConfig {
    let mut pool = PoolConfig::new(config.database_url.clone(), config.database_ca.clone());
    pool.application_name = format!("gpuaas {}", config.member_name);
    pool
}

/// A pool for the database, which is brought to this release's schema.
///
/// # Errors
/// Where the database cannot be reached or changed.
pub async fn open_database(config: &Config) -> anyhow::Result<PgPool> {
    persistence::pool::check_connection(&database(config)).await?;
    let pool = persistence::pool::open(&database(config))?;
    migrate::run(&pool).await.context("the database cannot be brought to this release's schema")?;
    persistence::table_maintenance::make_partitions(&pool, 2).await?;
    Ok(pool)
}
