//! What has to be done now and then: idle entities put to sleep, old command ids forgotten, partitions made ahead.

use actors::Host;
use persistence::{Cluster, Outbox, sweep};
use prometheus::{Gauge, IntGauge, Registry};
use sqlx::PgPool;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval};

/// Command ids that are forgotten in one statement.
const AT_A_TIME: u32 = 5000;

/// Members that were silent for so long and own nothing are forgotten.
const FORGOTTEN: Duration = Duration::from_secs(600);

/// Figures that are looked up now and then.
#[derive(Clone)]
pub struct Figures {
    failures: IntGauge,
    outbox_rows: IntGauge,
    outbox_oldest: Gauge,
}

impl Figures {
    /// # Errors
    /// Where the metrics are registered already.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let figures = Self {
            failures: IntGauge::new("entity_failures", "Failures of entities since this process began.")?,
            outbox_rows: IntGauge::new("outbox_rows", "Events of the whole cluster that are not settled.")?,
            outbox_oldest: Gauge::new("outbox_oldest_seconds", "Age of the oldest unsettled event of the cluster.")?,
        };
        registry.register(Box::new(figures.failures.clone()))?;
        registry.register(Box::new(figures.outbox_rows.clone()))?;
        registry.register(Box::new(figures.outbox_oldest.clone()))?;
        Ok(figures)
    }
}

/// Puts idle entities to sleep, and looks at the figures.
///
/// # Errors
/// Never.
pub async fn rest(host: Arc<Host>, outbox: Outbox, figures: Figures) -> anyhow::Result<()> {
    let mut turn = interval(Duration::from_secs(5));
    turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        turn.tick().await;
        host.rest();
        figures.failures.set(i64::try_from(host.failures_total()).unwrap_or(i64::MAX));
        match outbox.backlog().await {
            Ok(backlog) => {
                figures.outbox_rows.set(i64::try_from(backlog.rows).unwrap_or(i64::MAX));
                figures.outbox_oldest.set(backlog.oldest.as_secs_f64());
            }
            Err(error) => tracing::warn!(error = %error, "could not measure the outbox"),
        }
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
    loop {
        turn.tick().await;
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
