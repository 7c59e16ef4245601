//! Connection quotas: how many event streams and notification connections each owner has open in the whole cluster.
//!
//! Each open connection is an entry in the memory of the owner of its shard, as rate cells are. Its holder renews the entry before it
//! expires, so the connections of a process that died are released by expiry, and the new owner of a shard knows all entries within
//! [`RENEWAL_INTERVAL`]. Until then it admits more connections than the quota, never fewer.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// An entry that is not renewed for so long expires.
pub const EXPIRES_AFTER: Duration = Duration::from_secs(60);
/// The interval at which a holder renews its entries.
pub const RENEWAL_INTERVAL: Duration = Duration::from_secs(20);

/// The most entries, about 10 MB.
const CAPACITY: usize = 131_072;
/// The least time between two sweeps of expired entries.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// A request about one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaRequest {
    /// Open it, where fewer than `most` are open.
    Acquire { most: u32 },
    /// It is still open.
    Renew,
    /// It is closed.
    Release,
}

/// The connections whose shards this process owns.
#[derive(Debug)]
pub struct ConnectionQuota {
    open: Mutex<OpenConnections>,
    most: usize,
}

#[derive(Debug)]
struct OpenConnections {
    /// By owner: each connection with its last renewal.
    by_owner: HashMap<Uuid, HashMap<Uuid, Instant>>,
    all: usize,
    swept_at: Option<Instant>,
}

impl Default for ConnectionQuota {
    fn default() -> Self {
        Self::with_capacity(CAPACITY)
    }
}

impl ConnectionQuota {
    #[must_use]
    pub fn with_capacity(most: usize) -> Self {
        Self { open: Mutex::new(OpenConnections { by_owner: HashMap::new(), all: 0, swept_at: None }), most }
    }

    /// Whether the connection is, or stays, admitted; `None` where there is no room for the entry.
    #[must_use]
    pub fn apply(&self, owner: Uuid, connection: Uuid, request: QuotaRequest, now: Instant) -> Option<bool> {
        let mut open = self.lock();
        open.remove_expired(owner, now);
        let of_owner = open.by_owner.get(&owner);
        let (count, is_open) = of_owner.map_or((0, false), |own| (own.len(), own.contains_key(&connection)));
        match request {
            QuotaRequest::Release => {
                open.release(owner, connection);
                return Some(false);
            }
            QuotaRequest::Acquire { most } if !is_open && count >= usize::try_from(most).unwrap_or(usize::MAX) => {
                return Some(false);
            }
            // An open connection stays admitted, even after the limit was lowered.
            QuotaRequest::Acquire { .. } | QuotaRequest::Renew => {}
        }
        if !is_open && open.all >= self.most {
            open.sweep(now);
            if open.all >= self.most {
                return None;
            }
        }
        open.renew(owner, connection, now);
        Some(true)
    }

    /// Removes the selected owners: another member owns their shards.
    pub fn remove(&self, of: impl Fn(Uuid) -> bool) {
        let mut open = self.lock();
        open.by_owner.retain(|owner, _| !of(*owner));
        open.recount();
    }

    /// The number of open connections.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lock().all
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> MutexGuard<'_, OpenConnections> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenConnections {
    fn renew(&mut self, owner: Uuid, connection: Uuid, now: Instant) {
        if self.by_owner.entry(owner).or_default().insert(connection, now).is_none() {
            self.all += 1;
        }
    }

    fn release(&mut self, owner: Uuid, connection: Uuid) {
        let Some(own) = self.by_owner.get_mut(&owner) else { return };
        if own.remove(&connection).is_some() {
            self.all -= 1;
        }
        if own.is_empty() {
            self.by_owner.remove(&owner);
        }
    }

    fn remove_expired(&mut self, owner: Uuid, now: Instant) {
        let Some(own) = self.by_owner.get_mut(&owner) else { return };
        let before = own.len();
        own.retain(|_, renewed_at| now.saturating_duration_since(*renewed_at) < EXPIRES_AFTER);
        self.all -= before - own.len();
        if own.is_empty() {
            self.by_owner.remove(&owner);
        }
    }

    fn sweep(&mut self, now: Instant) {
        if self.swept_at.is_some_and(|at| now.saturating_duration_since(at) < SWEEP_INTERVAL) {
            return;
        }
        self.swept_at = Some(now);
        self.by_owner.retain(|_, own| {
            own.retain(|_, renewed_at| now.saturating_duration_since(*renewed_at) < EXPIRES_AFTER);
            !own.is_empty()
        });
        self.recount();
    }

    fn recount(&mut self) {
        self.all = self.by_owner.values().map(HashMap::len).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANN: Uuid = Uuid::from_u128(1);
    const BOB: Uuid = Uuid::from_u128(2);

    fn admitted(quota: &ConnectionQuota, owner: Uuid, wanted: std::ops::Range<u128>, most: u32, now: Instant) -> usize {
        wanted.filter(|n| quota.apply(owner, Uuid::from_u128(*n), QuotaRequest::Acquire { most }, now).unwrap()).count()
    }

    #[test]
    fn owner_has_at_most_its_quota_and_a_released_connection_frees_one() {
        let (quota, now) = (ConnectionQuota::default(), Instant::now());
        assert_eq!(admitted(&quota, ANN, 0..10, 3, now), 3);
        assert_eq!(admitted(&quota, BOB, 0..10, 3, now), 3, "owners have separate quotas");
        assert_eq!(admitted(&quota, ANN, 0..3, 1, now), 3, "open connections stay admitted under a lower quota");
        quota.apply(ANN, Uuid::from_u128(0), QuotaRequest::Release, now).unwrap();
        quota.apply(ANN, Uuid::from_u128(0), QuotaRequest::Release, now).unwrap();
        assert_eq!(admitted(&quota, ANN, 5..10, 3, now), 1);
        for owner in [ANN, BOB] {
            for connection in 0..10 {
                quota.apply(owner, Uuid::from_u128(connection), QuotaRequest::Release, now).unwrap();
            }
        }
        assert!(quota.is_empty(), "released connections leave no entry");
    }

    #[test]
    fn connection_that_is_not_renewed_expires() {
        let (quota, now) = (ConnectionQuota::default(), Instant::now());
        assert_eq!(admitted(&quota, ANN, 0..3, 3, now), 3);
        let later = now + EXPIRES_AFTER / 2;
        assert!(quota.apply(ANN, Uuid::from_u128(0), QuotaRequest::Renew, later).unwrap());
        assert_eq!(admitted(&quota, ANN, 5..10, 3, now + EXPIRES_AFTER), 2, "one of them was renewed");
    }

    #[test]
    fn new_owner_of_the_shard_learns_connections_by_renewal_and_admits_none_over_the_quota() {
        let (quota, now) = (ConnectionQuota::default(), Instant::now());
        for n in 0..5 {
            assert!(quota.apply(ANN, Uuid::from_u128(n), QuotaRequest::Renew, now).unwrap());
        }
        assert_eq!(admitted(&quota, ANN, 5..10, 3, now), 0);
        quota.remove(|owner| owner == ANN);
        assert!(quota.is_empty());
    }

    #[test]
    fn entries_are_bounded_by_the_capacity() {
        let (quota, now) = (ConnectionQuota::with_capacity(4), Instant::now());
        for n in 0..10 {
            let outcome = quota.apply(Uuid::from_u128(n), ANN, QuotaRequest::Acquire { most: 1 }, now);
            assert_eq!(outcome, (n < 4).then_some(true));
        }
        let later = now + EXPIRES_AFTER;
        assert_eq!(quota.apply(Uuid::from_u128(99), BOB, QuotaRequest::Acquire { most: 1 }, later), Some(true));
        assert_eq!(quota.len(), 1, "expired entries are removed");
    }
}
