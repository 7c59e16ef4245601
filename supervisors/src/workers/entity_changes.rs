//! Publishes which entities of this member changed, for the operators who show many of them (decision 0074). A message that is lost costs no
//! more than a view that is read again later.

use super::WorkerDependencies;
use crate::cluster::bus::Bus;
use crate::startup::Stages;
use crate::supervisor::{WorkerTask, task};
use actors::Host;
use async_nats::HeaderMap;
use chrono::Utc;
use domain::notification::OPERATIONS_SUBJECT;
use edge::notifications::changes_message;
use std::sync::Arc;
use std::time::Duration;

/// At most one message in this time, however much changes: its receivers read again at most so often.
const INTERVAL: Duration = Duration::from_millis(250);

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let Stages { membership, actors, .. } = &parts.stages;
    let publisher = ChangePublisher { host: Arc::clone(&actors.host), bus: membership.bus.clone() };
    Ok(task(&Arc::new(publisher), |publisher| async move { publisher.run().await }))
}

struct ChangePublisher {
    host: Arc<Host>,
    bus: Bus,
}

impl ChangePublisher {
    async fn run(&self) -> anyhow::Result<()> {
        loop {
            let changed = self.host.recent_changes().next().await;
            let message = changes_message(&changed, Utc::now());
            self.bus.notify(OPERATIONS_SUBJECT, None, HeaderMap::new(), message.into_bytes()).await;
            tokio::time::sleep(INTERVAL).await;
        }
    }
}
