//! Quotas for long-lived connections: a bound per process, and within it a bound per user over the whole cluster, so that one user cannot
//! use up the process's bound. Where the owner of a user's count (`actors::connection_quota`) cannot be reached, the connection is
//! admitted; then each process counts on its own.

use crate::http::error::{ApiError, Code};
use actors::Directory;
use actors::connection_quota::{QuotaRequest, RENEWAL_INTERVAL};
use actors::sharding::command_id;
use domain::policy::PolicyKey;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::task::AbortHandle;
use tokio::time::{MissedTickBehavior, interval};
use uuid::Uuid;

/// Timeout for the owner of a user's shard. It answers within milliseconds unless it hangs, and where no replica owns the shard the bus
/// reports it at once. The bound is far above that, since a connection that is admitted without an answer exceeds the quota for as long as
/// it lives.
const ASK_TIMEOUT: Duration = Duration::from_secs(2);

/// The kind of a long-lived connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ConnectionKind {
    /// An allocation's transitions.
    Events,
    Notifications,
}

impl ConnectionKind {
    /// As a person calls several of it.
    const fn name(self) -> &'static str {
        match self {
            Self::Events => "event streams",
            Self::Notifications => "connections for notifications",
        }
    }

    /// How many one user may have.
    pub(crate) const fn key(self) -> PolicyKey {
        match self {
            Self::Events => PolicyKey::AllocationEventStreams,
            Self::Notifications => PolicyKey::NotificationConnections,
        }
    }

    /// How many connections one process admits.
    const fn process_limit(self) -> usize {
        match self {
            Self::Events => 4096,
            Self::Notifications => 15_000,
        }
    }
}

/// Why a connection is not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QuotaExceeded {
    /// The user has as many as there may be.
    PerUser { what: ConnectionKind, most: u32 },
    /// This process has.
    PerProcess,
}

impl From<QuotaExceeded> for ApiError {
    fn from(full: QuotaExceeded) -> Self {
        match full {
            QuotaExceeded::PerUser { what, most } => {
                let message = format!("You have {most} {} open, which are the most; close one first.", what.name());
                Self::new(Code::Overloaded, message).detail("policy_key", what.key().name()).detail("limit", most)
            }
            QuotaExceeded::PerProcess => Self::overloaded().because("too much is open at once"),
        }
    }
}

/// The connection quotas of this process. Cheap to clone.
#[derive(Clone)]
pub struct ConnectionQuotas {
    directory: Directory,
    local: LocalQuotas,
}

impl ConnectionQuotas {
    #[must_use]
    pub fn new(directory: Directory) -> Self {
        Self { directory, local: LocalQuotas::default() }
    }

    /// Acquires a slot for a connection of `user`, who may have `most`.
    pub(crate) async fn acquire(
        &self,
        what: ConnectionKind,
        user: &str,
        most: i64,
    ) -> Result<QuotaSlot, QuotaExceeded> {
        let most = u32::try_from(most).unwrap_or(1);
        let local = self.local.acquire(what, user, most)?;
        let owner = command_id(&[b"places", what.name().as_bytes(), user.as_bytes()]).0;
        let id = Uuid::new_v4();
        let directory = self.directory.clone();
        match directory.update_connection_quota(owner, id, QuotaRequest::Acquire { most }, ASK_TIMEOUT).await {
            Ok(true) => {}
            Ok(false) => return Err(QuotaExceeded::PerUser { what, most }),
            Err(error) => tracing::debug!(%error, "the owner of the user's connection quota could not be reached"),
        }
        let renewal_task = tokio::spawn({
            let directory = directory.clone();
            async move {
                let mut renewal = interval(RENEWAL_INTERVAL);
                renewal.set_missed_tick_behavior(MissedTickBehavior::Delay);
                renewal.tick().await;
                loop {
                    renewal.tick().await;
                    // A renewal that is lost is repeated at the next interval.
                    let _ = directory.update_connection_quota(owner, id, QuotaRequest::Renew, ASK_TIMEOUT).await;
                }
            }
        });
        Ok(QuotaSlot { owner, id, directory, renewal_task: renewal_task.abort_handle(), _local: local })
    }
}

/// A slot in a user's quota; released on drop.
pub(crate) struct QuotaSlot {
    owner: Uuid,
    id: Uuid,
    directory: Directory,
    renewal_task: AbortHandle,
    _local: LocalSlot,
}

impl Drop for QuotaSlot {
    fn drop(&mut self) {
        self.renewal_task.abort();
        let (directory, owner, id) = (self.directory.clone(), self.owner, self.id);
        // Where the release is lost, the slot expires when it is no longer renewed.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                directory.update_connection_quota(owner, id, QuotaRequest::Release, ASK_TIMEOUT).await
            });
        }
    }
}

/// The open connections of this process.
#[derive(Clone, Default)]
struct LocalQuotas(Arc<Mutex<SlotCounts>>);

#[derive(Default)]
struct SlotCounts {
    all: HashMap<ConnectionKind, usize>,
    by_user: HashMap<(ConnectionKind, String), u32>,
}

impl LocalQuotas {
    fn acquire(&self, what: ConnectionKind, user: &str, most: u32) -> Result<LocalSlot, QuotaExceeded> {
        let mut counts = self.lock();
        if counts.all.get(&what).is_some_and(|all| *all >= what.process_limit()) {
            return Err(QuotaExceeded::PerProcess);
        }
        let key = (what, user.to_owned());
        let own = counts.by_user.get(&key).copied().unwrap_or_default();
        if own >= most {
            return Err(QuotaExceeded::PerUser { what, most });
        }
        counts.by_user.insert(key.clone(), own + 1);
        *counts.all.entry(what).or_default() += 1;
        Ok(LocalSlot { local: self.clone(), key })
    }

    fn lock(&self) -> MutexGuard<'_, SlotCounts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct LocalSlot {
    local: LocalQuotas,
    key: (ConnectionKind, String),
}

impl Drop for LocalSlot {
    fn drop(&mut self) {
        let mut counts = self.local.lock();
        if let Some(all) = counts.all.get_mut(&self.key.0) {
            *all -= 1;
        }
        if let Some(own) = counts.by_user.get_mut(&self.key) {
            *own -= 1;
            if *own == 0 {
                counts.by_user.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_quota_is_enforced_and_a_released_slot_is_reusable() {
        let local = LocalQuotas::default();
        let acquire = |user: &str| local.acquire(ConnectionKind::Events, user, 3);
        let mut anns: Vec<_> = (0..3).map(|_| acquire("ann").unwrap()).collect();
        assert_eq!(acquire("ann").err(), Some(QuotaExceeded::PerUser { what: ConnectionKind::Events, most: 3 }));
        let others = (acquire("bob").unwrap(), local.acquire(ConnectionKind::Notifications, "ann", 3).unwrap());
        anns.pop();
        anns.push(acquire("ann").unwrap());
        drop((anns, others));
        assert!(local.lock().by_user.is_empty(), "nothing is kept of those who left");
        let all: Vec<_> =
            (0..ConnectionKind::Events.process_limit()).map(|n| acquire(&n.to_string()).unwrap()).collect();
        assert_eq!(acquire("late").err(), Some(QuotaExceeded::PerProcess));
        assert!(
            local.acquire(ConnectionKind::Notifications, "late", 3).is_ok(),
            "what is open of one kind takes no place of another"
        );
        drop(all);
        assert!(acquire("late").is_ok());
    }

    #[test]
    fn quota_refusal_names_the_kind_and_the_policy() {
        let refused = ApiError::from(QuotaExceeded::PerUser { what: ConnectionKind::Notifications, most: 32 });
        assert_eq!(refused.code(), Code::Overloaded);
        assert!(refused.message().contains("32 connections for notifications"), "{}", refused.message());
        assert_eq!(refused.details()["policy_key"], "notification.connections_per_user");
    }
}
