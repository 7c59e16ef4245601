//! Keeps this process's cache of the policy values up to date (specification, *Events*).
//!
//! A written value is published on `policy.invalidate.<key>`, and every process reads all values at once. A message can be lost: so they
//! are also read periodically, and after each reconnection to NATS. Values for a later time are read with the others and need no message
//! when they take effect.

use super::WorkerDependencies;
use crate::cluster::bus::Bus;
use crate::entity_environment::EntityEnvironment;
use crate::startup::Stages;
use crate::supervisor::{WorkerTask, task};
use futures::StreamExt;
use persistence::Reads;
use persistence::outage_log::RetryLog;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior, interval};

/// The maximal age of the cache: the specification allows 60 s.
const MAX_AGE: Duration = Duration::from_secs(20);

/// How often the connection to NATS is checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Writes within this time are read together.
const COALESCE_FOR: Duration = Duration::from_millis(20);

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let Stages { storage, membership, actors, .. } = &parts.stages;
    let shared = (Arc::clone(&actors.environment), storage.reads.clone(), membership.bus.clone());
    Ok(task(&shared, |(environment, reads, bus)| run(environment, reads, bus)))
}

pub(super) fn start_listener(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let Stages { membership, actors, .. } = &parts.stages;
    let shared = (Arc::clone(&actors.environment), membership.bus.clone());
    Ok(task(&shared, |(environment, bus)| listen(environment, bus)))
}

/// Reads the values when notified, and when the cache is old.
///
/// # Errors
/// Never; while Postgres cannot be read the previous values stay in force.
pub async fn run(environment: Arc<EntityEnvironment>, reads: Reads, bus: Bus) -> anyhow::Result<()> {
    let mut ticker = interval(CHECK_INTERVAL);
    ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut read_at, mut was_connected) = (Instant::now(), false);
    let retries = RetryLog::new("read the policy values");
    loop {
        tokio::select! {
            () = environment.policy_written.notified() => {}
            _ = ticker.tick() => {
                let is_connected = bus.is_connected();
                let is_back = is_connected && !was_connected;
                was_connected = is_connected;
                if !is_back && read_at.elapsed() < MAX_AGE {
                    continue;
                }
            }
        }
        if let Some(book) = retries.observe(reads.policy_book().await) {
            environment.set_policy_book(book);
            read_at = Instant::now();
        }
        tokio::time::sleep(COALESCE_FOR).await;
    }
}

/// Receives the event that a value was written, by any member.
///
/// # Errors
/// Where the subscription ends.
pub async fn listen(environment: Arc<EntityEnvironment>, bus: Bus) -> anyhow::Result<()> {
    let mut events = bus.events("policy.invalidate.>").await?;
    // Events before the subscription are not received.
    environment.policy_written.notify_one();
    while events.next().await.is_some() {
        environment.policy_written.notify_one();
    }
    anyhow::bail!("the subscription ended")
}
