//! Entities that ended in failure: left alone for a while, and parked where they fail too often by their own doing.

use super::rows::{EntityRow, EntityStatus};
use super::{Host, HostConfig};
use crate::ask::AskError;
use crate::place::shard_of;
use domain::{EntityRef, Timestamp};
use ractor::ActorId;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::Instant;

/// How often an entity failed lately, and whether it is parked for it.
#[derive(Debug, Default)]
pub(super) struct Failures {
    /// Those of its own doing: they count against it.
    recent: VecDeque<Instant>,
    /// How often in a row the store could not say what is true of it. An outage is nobody's poison: this alone never parks.
    losses: u32,
    last: Option<Instant>,
    total: u64,
    last_error: String,
    last_at: Option<Timestamp>,
    pub(super) parked: Option<String>,
}

/// How an entity's actor came to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Asleep,
    /// The store could not say what is true.
    Lost {
        reason: String,
    },
    Died {
        reason: String,
    },
    Parked {
        reason: String,
    },
}

impl Host {
    /// An entity that failed lately is left alone for a while, and one that failed too often until an operator has looked.
    pub(super) fn may_wake<J>(&self, entity: EntityRef) -> Result<(), AskError<J>> {
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

    pub(crate) fn left(&self, entity: EntityRef, actor: ActorId, exit: Exit) {
        // Noted before it is out of the directory, so that nobody wakes it in between.
        match exit {
            Exit::Asleep => {}
            Exit::Lost { reason } => self.lost(entity, reason),
            Exit::Died { reason } => self.died(entity, reason),
            Exit::Parked { reason } => {
                self.fail(entity, reason, |failures, reason| self.park(entity, failures, reason))
            }
        }
        self.awake.remove_if(&entity, |_, awake| awake.actor == actor);
    }

    fn lost(&self, entity: EntityRef, reason: String) {
        // No warning: whoever lost the store warns, once, and not for every entity.
        tracing::info!(resource_name = %entity, error_code = "entity_lost", error = %reason, "{entity} waits for the store");
        let window = self.config.window;
        self.fail(entity, reason, |failures, _| {
            let in_a_row = failures.last.is_some_and(|last| last.elapsed() < window);
            failures.losses = if in_a_row { failures.losses.saturating_add(1) } else { 1 };
        });
    }

    fn died(&self, entity: EntityRef, reason: String) {
        let window = self.config.window;
        self.fail(entity, reason, |failures, reason| {
            failures.losses = 0;
            failures.recent.retain(|at| at.elapsed() < window);
            failures.recent.push_back(Instant::now());
            if failures.recent.len() >= self.config.intensity {
                self.park(entity, failures, reason);
            } else {
                tracing::warn!(resource_name = %entity, error_code = "entity_failed", error = %reason, "{entity} failed");
            }
        });
    }

    fn fail(&self, entity: EntityRef, reason: String, how: impl FnOnce(&mut Failures, &str)) {
        self.restarts.fetch_add(1, Ordering::Relaxed);
        let mut failures = self.failures.entry(entity).or_default();
        how(&mut failures, &reason);
        failures.last = Some(Instant::now());
        failures.total += 1;
        failures.last_at = Some(self.world.now());
        failures.last_error = reason;
    }

    fn park(&self, entity: EntityRef, failures: &mut Failures, reason: &str) {
        tracing::error!(resource_name = %entity, error_code = "entity_parked", error = %reason, "{entity} is parked");
        failures.parked = Some(reason.to_owned());
        let (store, reason) = (Arc::clone(&self.store), reason.to_owned());
        tokio::spawn(async move {
            if let Err(error) = store.park(entity, reason).await {
                tracing::warn!(resource_name = %entity, %error, "that the entity is parked is known here alone");
            }
        });
    }

    /// The entity was parked by an earlier owner of its shard, and nobody has restarted it.
    pub fn keep_parked(&self, entity: EntityRef, reason: String) {
        let mut failures = self.failures.entry(entity).or_default();
        failures.last_at = Some(self.world.now());
        failures.last_error.clone_from(&reason);
        failures.parked = Some(reason);
    }

    /// An operator has looked: the entity's failures are forgotten and its actor, if it has one, is started anew. `false` where
    /// nothing of it is known here.
    #[must_use]
    pub fn restart(&self, entity: EntityRef) -> bool {
        let forgotten = self.failures.remove(&entity).is_some();
        let stopped = self.awake.remove(&entity).map(|(_, awake)| awake.cell.stop(Some("restart".to_owned())));
        forgotten || stopped.is_some()
    }
}

impl Failures {
    fn pause(&self, config: &HostConfig) -> Duration {
        let in_a_row = if self.losses > 0 { self.losses } else { u32::try_from(self.recent.len()).unwrap_or(u32::MAX) };
        let doublings = in_a_row.saturating_sub(1).min(10);
        (config.backoff * 2_u32.pow(doublings)).min(config.longest_backoff)
    }

    /// Worth remembering: parked, or failed within `window`.
    pub(super) fn matters(&self, window: Duration) -> bool {
        self.parked.is_some() || self.last.is_some_and(|last| last.elapsed() < window)
    }

    pub(super) fn row(&self, entity: EntityRef) -> EntityRow {
        EntityRow {
            kind: entity.kind,
            id: entity.id,
            shard: shard_of(entity.id),
            status: if self.parked.is_some() { EntityStatus::Parked } else { EntityStatus::BackingOff },
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
