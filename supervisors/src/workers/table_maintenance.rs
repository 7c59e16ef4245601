//! Periodic maintenance of the database: deletes old command ids, creates partitions ahead, adds up the counts.

use super::WorkerDependencies;
use crate::supervisor::{WorkerTask, task};
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
    loop {
        ticker.tick().await;
        let counted = if are_counted {
            table_maintenance::compact_counts(&pool).await
        } else {
            table_maintenance::recount_entities(&pool).await
        };
        match counted {
            Ok(()) => are_counted = true,
            Err(error) => tracing::warn!(error = %error, "could not count the entities"),
        }
        if let Err(error) = table_maintenance::make_partitions(&pool, 2).await {
            tracing::warn!(error = %error, "could not make partitions");
        }
        loop {
            match table_maintenance::delete_commands(&pool, table_maintenance::COMMAND_RETENTION, BATCH_SIZE).await {
                // A full batch: there may be more.
                Ok(forgotten) if forgotten >= u64::from(BATCH_SIZE) => tokio::task::yield_now().await,
                Ok(_) => break,
                Err(error) => {
                    tracing::warn!(error = %error, "could not forget old command ids");
                    break;
                }
            }
        }
        if let Err(error) = cluster.remove_silent(MEMBER_RETENTION).await {
            tracing::warn!(error = %error, "could not forget silent members");
        }
    }
}
