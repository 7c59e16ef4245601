//! Periodic passivation: entities that are idle leave memory.

use super::WorkerDependencies;
use crate::supervisor::{WorkerTask, task};
use actors::Host;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval};

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    Ok(task(&parts.stages.actors.host, run))
}

/// Passivates idle entities.
///
/// # Errors
/// Never.
pub async fn run(host: Arc<Host>) -> anyhow::Result<()> {
    let mut ticker = interval(Duration::from_secs(5));
    ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticker.tick().await;
        host.passivate_idle();
    }
}
