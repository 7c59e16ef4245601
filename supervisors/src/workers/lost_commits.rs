//! Parks the entities whose acknowledged transitions a failover of the database has lost. What they caused outside is done, so that a decision
//! from the older state would contradict it: a node with a tenant that the database does not know, money that was moved twice.

use super::WorkerDependencies;
use crate::supervisor::{WorkerTask, task};
use actors::Host;
use persistence::Committer;
use persistence::committer::LostCommit;
use std::sync::Arc;

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let shared = (parts.stages.storage.committer.clone(), Arc::clone(&parts.stages.actors.host));
    Ok(task(&shared, |(committer, host)| run(committer, host)))
}

/// Runs until it is dropped.
///
/// # Errors
/// Never.
async fn run(committer: Committer, host: Arc<Host>) -> anyhow::Result<()> {
    loop {
        for LostCommit { entity, acknowledged, stored, .. } in committer.wait_lost().await {
            let reason = format!(
                "a failover of the database lost its acknowledged transition to version {acknowledged}; the database has version {stored}"
            );
            host.park(entity, reason);
            committer.resolve_lost(entity.id);
        }
    }
}
