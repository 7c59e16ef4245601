//! Entities whose actors failed: they back off, and are parked where they crash too often.

use super::status::{ActivationStatus, HostedEntity};
use super::{Host, HostConfig};
use crate::command_context::AskError;
use crate::sharding::shard_of;
use domain::{EntityRef, Timestamp, retry};
use ractor::ActorId;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::Instant;

/// The recent failures of an entity, and whether it is parked.
#[derive(Debug, Default)]
pub(super) struct Failures {
    /// Crashes of the entity itself: they count against it.
    recent: VecDeque<Instant>,
    /// Store outages in a row. A store outage never parks an entity.
    store_outages: u32,
    last: Option<Instant>,
    total: u64,
    last_error: String,
    last_at: Option<Timestamp>,
    pub(super) parked: Option<String>,
}

/// How an entity's actor ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ActorExit {
    Passivated,
    /// The store could not be read, or a commit's outcome is unknown.
    StoreOutage {
        reason: String,
    },
    Crashed {
        reason: String,
    },
    Parked {
        reason: String,
    },
}

impl Host {
    /// An entity that failed backs off, and one that is parked waits for an operator.
    pub(super) fn may_activate<J>(&self, entity: EntityRef) -> Result<(), AskError<J>> {
        let Some(failures) = self.failures.get(&entity) else { return Ok(()) };
        if let Some(reason) = &failures.parked {
            return Err(AskError::Parked { reason: reason.clone() });
        }
        let pause = failures.pause(&self.config);
        match failures.last {
            Some(last) if last.elapsed() < pause => {
                Err(AskError::Unavailable { reason: format!("the entity failed: {}", failures.last_error) })
            }
            Some(_) | None => Ok(()),
        }
    }

    pub(crate) fn actor_exited(&self, entity: EntityRef, actor: ActorId, exit: ActorExit) {
        // Recorded before it leaves the directory, so that no command activates it in between.
        match exit {
            ActorExit::Passivated => {}
            ActorExit::StoreOutage { reason } => self.record_store_outage(entity, reason),
            ActorExit::Crashed { reason } => self.record_crash(entity, reason),
            ActorExit::Parked { reason } => {
                self.record_failure(entity, reason, |failures, reason| self.set_parked(entity, failures, reason));
            }
        }
        self.handover.remove(entity, &actor);
    }

    fn record_store_outage(&self, entity: EntityRef, reason: String) {
        // No warning: the store's client warns, once, and not for every entity.
        tracing::info!(resource_name = %entity, error_code = "entity_lost", error = %reason, "{entity} waits for the store");
        let window = self.config.window;
        self.record_failure(entity, reason, |failures, _| {
            let in_a_row = failures.last.is_some_and(|last| last.elapsed() < window);
            failures.store_outages = if in_a_row { failures.store_outages.saturating_add(1) } else { 1 };
        });
    }

    fn record_crash(&self, entity: EntityRef, reason: String) {
        let window = self.config.window;
        self.record_failure(entity, reason, |failures, reason| {
            failures.store_outages = 0;
            failures.recent.retain(|at| at.elapsed() < window);
            failures.recent.push_back(Instant::now());
            if failures.recent.len() >= self.config.intensity {
                self.set_parked(entity, failures, reason);
            } else {
                tracing::warn!(resource_name = %entity, error_code = "entity_failed", error = %reason, "{entity} failed");
            }
        });
    }

    fn record_failure(&self, entity: EntityRef, reason: String, how: impl FnOnce(&mut Failures, &str)) {
        self.restarts.fetch_add(1, Ordering::Relaxed);
        let mut failures = self.failures.entry(entity).or_default();
        how(&mut failures, &reason);
        failures.last = Some(Instant::now());
        failures.total += 1;
        failures.last_at = Some(self.environment.now());
        failures.last_error = reason;
    }

    /// Parks the entity, and stops its actor if it has one: what it has in memory is not what the store has.
    pub fn park(&self, entity: EntityRef, reason: String) {
        // Recorded before it leaves the directory, so that no command activates it in between.
        self.record_failure(entity, reason, |failures, reason| self.set_parked(entity, failures, reason));
        if let Some((_, activation)) = self.handover.active.remove(&entity) {
            activation.cell.stop(Some("parked".to_owned()));
        }
    }

    fn set_parked(&self, entity: EntityRef, failures: &mut Failures, reason: &str) {
        tracing::error!(resource_name = %entity, error_code = "entity_parked", error = %reason, "{entity} is parked");
        failures.parked = Some(reason.to_owned());
        let (store, reason) = (Arc::clone(&self.store), reason.to_owned());
        tokio::spawn(async move {
            if let Err(error) = store.park(entity, reason).await {
                tracing::warn!(
                    resource_name = %entity,
                    %error,
                    "the entity is parked, and its mark could not be stored: other members do not know it"
                );
            }
        });
    }

    /// The entity was parked by an earlier owner of its shard, and no operator has restarted it.
    pub fn restore_parked(&self, entity: EntityRef, reason: String) {
        let mut failures = self.failures.entry(entity).or_default();
        failures.last_at = Some(self.environment.now());
        failures.last_error.clone_from(&reason);
        failures.parked = Some(reason);
    }

    /// An operator restarts the entity: its failures are forgotten and its actor, if it has one, is restarted. `false` where the entity
    /// is neither active nor failed here.
    #[must_use]
    pub fn restart(&self, entity: EntityRef) -> bool {
        let forgotten = self.failures.remove(&entity).is_some();
        let stopped = self
            .handover
            .active
            .remove(&entity)
            .map(|(_, activation)| activation.cell.stop(Some("restart".to_owned())));
        forgotten || stopped.is_some()
    }
}

impl Failures {
    fn pause(&self, config: &HostConfig) -> Duration {
        let in_a_row = if self.store_outages > 0 {
            self.store_outages
        } else {
            u32::try_from(self.recent.len()).unwrap_or(u32::MAX)
        };
        retry::pause(config.backoff, in_a_row, config.longest_backoff)
    }

    /// Parked, or failed within `window`.
    pub(super) fn is_relevant(&self, window: Duration) -> bool {
        self.parked.is_some() || self.last.is_some_and(|last| last.elapsed() < window)
    }

    pub(super) fn row(&self, entity: EntityRef) -> HostedEntity {
        HostedEntity {
            kind: entity.kind,
            id: entity.id,
            shard: shard_of(entity.id),
            status: if self.parked.is_some() { ActivationStatus::Parked } else { ActivationStatus::BackingOff },
            state: None,
            since: self.last_at,
            version: 0,
            mailbox_depth: 0,
            restarts: self.total,
            last_error: Some(self.last_error.clone()),
            deadline_at: None,
            waits_for: self.parked.clone().map(|reason| format!("an operator: {reason}")),
        }
    }
}
