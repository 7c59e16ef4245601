//! The workers of the edge: its listeners, and what other members' messages change for its requests.

use super::WorkerDependencies;
use crate::startup::listeners::BoundListener;
use crate::supervisor::{WorkerTask, task};
use edge::auth::jwks::Jwks;
use std::sync::Arc;

pub(super) fn operations(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    Ok(task(&parts.stages.listeners.operations, |listener| async move { listener.serve().await }))
}

pub(super) fn public_api(parts: &WorkerDependencies) -> anyhow::Result<Option<WorkerTask>> {
    Ok(serve(parts.stages.listeners.public_api.as_ref()))
}

pub(super) fn node_api(parts: &WorkerDependencies) -> anyhow::Result<Option<WorkerTask>> {
    Ok(serve(parts.stages.listeners.node_api.as_ref()))
}

/// `None` too where no payment processor is configured.
pub(super) fn webhook(parts: &WorkerDependencies) -> anyhow::Result<Option<WorkerTask>> {
    Ok(serve(parts.stages.listeners.webhook.as_ref()))
}

fn serve(listener: Option<&Arc<BoundListener>>) -> Option<WorkerTask> {
    listener.map(|listener| task(listener, |listener| async move { listener.serve().await }))
}

pub(super) fn provider_keys(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let keys = (parts.stages.membership.bus.clone(), parts.stages.services.services.authenticator.jwks().clone());
    Ok(task(&keys, |(bus, jwks)| async move { bus.on_provider_keys_changed(|| refresh_keys(&jwks)).await }))
}

/// A failure is logged where it happens; the caller gets the result from the member that it asked.
fn refresh_keys(jwks: &Jwks) {
    let jwks = jwks.clone();
    tokio::spawn(async move { jwks.refresh().await });
}

pub(super) fn wake_listener(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let peers = (parts.stages.membership.bus.clone(), parts.stages.actors.effects.clone());
    Ok(task(&peers, |(bus, effects)| async move { bus.on_signals(|signal| effects.apply(signal)).await }))
}
