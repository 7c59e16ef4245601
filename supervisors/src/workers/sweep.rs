//! Periodic maintenance of the database: deletes old command ids, creates partitions ahead, adds up the counts, and once an hour
//! stores the node's term of allocations that a replica of an earlier release has placed.

use super::WorkerDependencies;
use crate::supervisor::{WorkerTask, task};
use persistence::outage_log::RetryLog;
use persistence::{Cluster, StoreError, table_maintenance};
use sqlx::PgPool;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior, interval};

/// Command ids that are deleted in one statement.
const BATCH_SIZE: u32 = 5000;

/// How often the allocations of the last days are read for missing terms, and how many in one statement.
const TERMS_INTERVAL: Duration = Duration::from_secs(3600);
const TERMS_BATCH_SIZE: u32 = 500;

/// Members without a heartbeat for so long that own nothing are deleted.
const MEMBER_RETENTION: Duration = Duration::from_secs(600);

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    Ok(task(&parts.stages.storage.pool, run))
}

/// Sweeps the database.
///
/// # Errors
/// Never; what fails is retried in the next round.
pub async fn run(pool: PgPool) -> anyhow::Result<()> {
    let mut ticker = interval(Duration::from_secs(60));
    ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let cluster = Cluster::new(pool.clone());
    // A process of the previous release that this one replaces appended no counts.
    let mut are_counted = false;
    let mut terms_at = Instant::now();
    let [counts, sums, partitions, commands, members, terms] = [
        "count the entities",
        "add up the sums of entities",
        "make partitions",
        "forget old command ids",
        "forget silent members",
        "store the nodes of allocations",
    ]
    .map(RetryLog::new);
    loop {
        ticker.tick().await;
        let counted = if are_counted {
            table_maintenance::compact_counts(&pool).await
        } else {
            table_maintenance::recount_entities(&pool).await
        };
        are_counted |= counts.observe(counted).is_some();
        let _ = sums.observe(table_maintenance::compact_sums(&pool).await);
        let _ = partitions.observe(table_maintenance::make_partitions(&pool, 2).await);
        loop {
            let retention = table_maintenance::COMMAND_RETENTION;
            match commands.observe(table_maintenance::delete_commands(&pool, retention, BATCH_SIZE).await) {
                // A full batch: there may be more.
                Some(forgotten) if forgotten >= u64::from(BATCH_SIZE) => tokio::task::yield_now().await,
                Some(_) | None => break,
            }
        }
        let _ = members.observe(cluster.remove_silent(MEMBER_RETENTION).await);
        if terms_at <= Instant::now() && terms.observe(store_node_terms(&pool).await).is_some() {
            terms_at = Instant::now() + TERMS_INTERVAL;
        }
    }
}

/// In pages, so that no statement is long.
async fn store_node_terms(pool: &PgPool) -> Result<(), StoreError> {
    let mut after = None;
    loop {
        after = table_maintenance::store_node_terms(pool, after, TERMS_BATCH_SIZE).await?;
        if after.is_none() {
            return Ok(());
        }
    }
}
