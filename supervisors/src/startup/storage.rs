//! The first stage: Postgres, and what reads and writes it.

use crate::cluster_keys;
use crate::config::Config;
use crate::process_roles::ProcessRole;
use crate::restore_gate;
use anyhow::Context;
use domain::MemberId;
use domain::policy::PolicyBook;
use persistence::committer::CommitterMetrics;
use persistence::envelope_encryption::KeyRing;
use persistence::migrate::{MigrationScope, Migrations, Progress, StartingMember};
use persistence::pool::PoolConfig;
use persistence::{Committer, CommitterConfig, Loader, OutboxRow, Reads, Secrets};
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
        let pool = connect(config).await?;
        // Before anything is written, migrations included.
        restore_gate::pass(config, &pool).await?;
        if config.migrate_on_start {
            expand_schema(&pool).await?;
        }
        let starting = StartingMember::begin(&pool).await.context("the database cannot be used")?;
        prepare(&pool).await?;
        let ring = Arc::clone(&config.key_ring);
        let secrets = Secrets::new(pool.clone(), Arc::clone(&ring));
        // Before any secret is opened, so that the error says what to do.
        secrets.rewrap().check().await.context("SVC_KEK_FILE: the key ring does not fit the database")?;
        let seals = cluster_keys::seals(&secrets, config.unsealed_until).await?;
        seals.register(registry)?;
        let reads = Reads::new(pool.clone()).sealed(seals.clone());
        let member = MemberId(Uuid::new_v4());
        tokio::spawn(starting.hold_until_joined(member));
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
pub(crate) fn database(config: &Config) -> PoolConfig {
    let mut pool = PoolConfig::new(config.database_url.clone(), config.database_ca.clone());
    pool.application_name = format!("gpuaas {}", config.member_name);
    pool
}

/// A pool for a database whose schema suits this release.
///
/// # Errors
/// Where the database cannot be reached, or has to be migrated first.
pub async fn open_database(config: &Config) -> anyhow::Result<PgPool> {
    let pool = connect(config).await?;
    prepare(&pool).await?;
    Ok(pool)
}

async fn connect(config: &Config) -> anyhow::Result<PgPool> {
    Ok(persistence::pool::open_reached(&database(config)).await?)
}

/// Applies what the release before can run on, too; what it cannot is for `gpuaas migrate`, by an operator.
async fn expand_schema(pool: &PgPool) -> anyhow::Result<()> {
    let mut log = |progress: Progress<'_>| match progress {
        Progress::Waits => tracing::info!("another process migrates the database; this one waits for it"),
        Progress::Locked(migration) => {
            tracing::warn!(migration = migration.version, "the migration waits for a lock of another transaction");
        }
        Progress::Applied(migration, took) => {
            let kind = migration.kind.name();
            tracing::info!(migration = migration.version, kind, ?took, "migration {} is applied", migration.name);
        }
    };
    let applied = Migrations::embedded().apply(pool, MigrationScope::Expand, &mut log).await;
    applied.map(drop).context("the database cannot be brought to this release's schema")
}

/// Checks the schema, and makes the partitions of this month and the next.
async fn prepare(pool: &PgPool) -> anyhow::Result<()> {
    let report = Migrations::embedded().check(pool).await.context("the database does not suit this release")?;
    if !report.later.is_empty() {
        let later = &report.later;
        tracing::info!(?later, "the schema was expanded by a later release, and suits this one, too");
    }
    for contract in &report.missing {
        tracing::info!(migration = contract.version, "contract {} waits for `gpuaas migrate`", contract.name);
    }
    persistence::table_maintenance::make_partitions(pool, 2).await?;
    Ok(())
}
