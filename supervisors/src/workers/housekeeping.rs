//! What has to be done now and then: idle entities put to sleep, old command ids forgotten, partitions made ahead, counts added up.

use actors::Host;
use persistence::{Cluster, sweep};
use sqlx::PgPool;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval};

/// Command ids that are forgotten in one statement.
const AT_A_TIME: u32 = 5000;

/// Members that were silent for so long and own nothing are forgotten.
const FORGOTTEN: Duration = Duration::from_secs(600);

/// Puts idle entities to sleep.
///
/// # Errors
/// Never.
pub async fn rest(host: Arc<Host>) -> anyhow::Result<()> {
    let mut turn = interval(Duration::from_secs(5));
    turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        turn.tick().await;
        host.rest();
    }
}

/// Sweeps the database.
///
/// # Errors
/// Never; what fails is tried again at the next turn.
pub async fn sweep(pool: PgPool) -> anyhow::Result<()> {
    let mut turn = interval(Duration::from_secs(60));
    turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let cluster = Cluster::new(pool.clone());
    // A process of the release before, in whose place this one starts, appended nothing.
    let mut are_counted = false;
    loop {
        turn.tick().await;
        let counted = if are_counted { sweep::add_up_counts(&pool).await } else { sweep::count_anew(&pool).await };
        match counted {
            Ok(()) => are_counted = true,
            Err(error) => tracing::warn!(error = %error, "could not count the entities"),
        }
        if let Err(error) = sweep::make_partitions(&pool, 2).await {
            tracing::warn!(error = %error, "could not make partitions");
        }
        loop {
            match sweep::forget_commands(&pool, sweep::COMMANDS_KEPT, AT_A_TIME).await {
                // As many as were asked for: there are more.
                Ok(forgotten) if forgotten >= u64::from(AT_A_TIME) => tokio::task::yield_now().await,
                Ok(_) => break,
                Err(error) => {
                    tracing::warn!(error = %error, "could not forget old command ids");
                    break;
                }
            }
        }
        if let Err(error) = cluster.forget_silent(FORGOTTEN).await {
            tracing::warn!(error = %error, "could not forget silent members");
        }
    }
}
