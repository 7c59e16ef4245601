//! Periodic maintenance of the database: deletes old command ids, creates partitions ahead, adds up the counts.

use super::WorkerDependencies;
use crate::supervisor::{WorkerTask, task};
use persistence::outage_log::RetryLog;
use persistence::{Cluster, table_maintenance};
use sqlx::PgPool;
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval};

/// Command ids that are deleted in one statement.
const BATCH_SIZE: u32 = 5000;

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
    let [counts, sums, partitions, commands, members] = [
        "count the entities",
        "add up the sums of entities",
        "make partitions",
        "forget old command ids",
        "forget silent members",
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
    }
}
