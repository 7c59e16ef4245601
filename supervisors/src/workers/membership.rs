//! The workers of [`crate::cluster`]: this member's heartbeat, its shards, and its messages with the others.

use super::WorkerDependencies;
use crate::supervisor::{WorkerTask, task};

pub(super) fn heartbeat(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    Ok(task(&parts.stages.actors.reconciler, |reconciler| async move { reconciler.run_heartbeat().await }))
}

pub(super) fn peer_listener(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    Ok(task(&parts.stages.actors.reconciler, |reconciler| async move { reconciler.run_listener().await }))
}

pub(super) fn ownership(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    Ok(task(&parts.stages.actors.reconciler, |reconciler| async move { reconciler.run().await }))
}

pub(super) fn command_answers(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    Ok(task(&parts.stages.membership.bus, |bus| async move { bus.receive_answers().await }))
}

pub(super) fn peer_rpc(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    Ok(task(&parts.stages.services.operator_view, |view| async move { view.serve_peers().await }))
}
