//! The ordered shutdown: the listeners stop, long polls are answered, shards are handed over, committed events are published.

use crate::startup::Stages;
use crate::supervisor::ShutdownStep;
use crate::workers::{TREE, WorkerDependencies};
use std::time::Duration;

/// How long the ordered shutdown may take; a service manager kills a process that takes longer.
pub const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(25);

/// Stops the workers step by step.
pub async fn shut_down(workers: &WorkerDependencies) {
    tracing::info!("stopping");
    if tokio::time::timeout(SHUTDOWN_TIMEOUT, shut_down_in_order(workers)).await.is_err() {
        tracing::warn!("the shutdown took too long; other members take over what is left");
    }
    tracing::info!("stopped");
}

async fn shut_down_in_order(workers: &WorkerDependencies) {
    let Stages { storage, actors, listeners, traces, .. } = &workers.stages;
    listeners.shared.stop.cancel();
    listeners.shared.open.close();
    listeners.shared.open.wait().await;
    for step in ShutdownStep::ORDER {
        if step == ShutdownStep::Entities {
            // No member relies on this one any more; its shards are closed and handed over, commands in flight first. Where no member takes
            // over, the log is left sealed.
            while workers.audit_seal.seal_pending().await {}
            actors.reconciler.leave().await;
        }
        if step == ShutdownStep::OutboxRelay {
            storage.committer.close().await;
        }
        for row in TREE.iter().filter(|row| row.spec.stop == step) {
            actors.supervisor.stop(row.spec.name).await;
        }
    }
    if let Some(traces) = traces {
        traces.finish().await;
    }
}
