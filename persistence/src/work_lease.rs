//! Leases of work that two members must not do at once, where the second could not know of the first; and reconciliation watermarks, so
//! that the next member continues at the last one.
//!
//! No member trusts a clock that can be set, its own or the database's. A lease of another member has lapsed once this process has
//! watched it unchanged for its duration, on a monotonic clock. So a step of the database's clock ends no lease, and a holder that died
//! costs its successor one lease duration at most.

use crate::error::{OperationContext, StoreError};
use domain::id::MemberId;
use domain::state_machine::Timestamp;
use sqlx::{PgPool, Row};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Leases that lapsed so long ago are deleted. No step of a clock is as long.
const RETENTION: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Leases of other members that are watched at once. One beyond that is watched from the beginning when it is next wanted.
const WATCHED_MAX: usize = 4096;

/// See the module; clones share what they watch.
#[derive(Clone, Debug)]
pub struct Leases {
    pool: PgPool,
    member: MemberId,
    watched: Arc<Mutex<HashMap<String, WatchedLease>>>,
}

/// A lease that this process holds. It is not released on drop: a request in flight outside may still need it.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a lease that is not released stays until it lapses"]
pub struct Lease {
    name: String,
    epoch: i64,
}

/// A lease of another holder, as it was first observed.
#[derive(Clone, Copy, Debug)]
struct WatchedLease {
    seen: LeaseVersion,
    since: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LeaseVersion {
    epoch: i64,
    /// A member of the release before renews only `until`.
    until: Timestamp,
}

impl Leases {
    #[must_use]
    pub fn new(pool: PgPool, member: MemberId) -> Self {
        Self { pool, member, watched: Arc::default() }
    }

    /// Acquires the lease of that name for so long. `None` while another holder has it, or may have it.
    ///
    /// # Errors
    /// [`StoreError`]; it may be acquired then, until it lapses.
    pub async fn acquire(&self, name: &str, lasts: Duration) -> Result<Option<Lease>, StoreError> {
        let held = self.current(name).await?;
        if held.is_some_and(|held| !self.has_lapsed(name, held)) {
            return Ok(None);
        }
        self.try_acquire(name, lasts, held.map(|(seen, _)| seen)).await
    }

    /// Releases it, where it is still this process's own.
    ///
    /// # Errors
    /// [`StoreError`]; then it stays until it lapses.
    pub async fn release(&self, lease: Lease) -> Result<(), StoreError> {
        self.watched().remove(&lease.name);
        sqlx::query("DELETE FROM turn WHERE name = $1 AND holder = $2 AND epoch = $3")
            .bind(&lease.name)
            .bind(self.member.0)
            .bind(lease.epoch)
            .execute(&self.pool)
            .await
            .doing("releasing a lease")?;
        Ok(())
    }

    /// Deletes leases whose holders never released them.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn delete_expired(&self) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM turn WHERE until < clock_timestamp() - make_interval(secs => $1)")
            .bind(RETENTION.as_secs_f64())
            .execute(&self.pool)
            .await
            .doing("deleting old leases")?;
        Ok(())
    }

    /// The stored lease, and its duration; `None` where it is free.
    async fn current(&self, name: &str) -> Result<Option<(LeaseVersion, Duration)>, StoreError> {
        let row = sqlx::query(
            "SELECT epoch, until, coalesce(lasts_ms, ceil(greatest(0, extract(epoch FROM until - clock_timestamp()) * 1000)))::bigint AS lasts
             FROM turn WHERE name = $1",
        )
        .bind(name)
        .fetch_optional(&self.pool)
        .await
        .doing("reading a lease")?;
        let Some(row) = row else { return Ok(None) };
        let read = || -> Result<_, sqlx::Error> {
            let lasts: i64 = row.try_get("lasts")?;
            let seen = LeaseVersion { epoch: row.try_get("epoch")?, until: row.try_get("until")? };
            Ok((seen, Duration::from_millis(u64::try_from(lasts).unwrap_or(0))))
        };
        read().map(Some).doing("reading a lease")
    }

    /// Whether this process has watched the lease unchanged for its duration.
    fn has_lapsed(&self, name: &str, (seen, lasts): (LeaseVersion, Duration)) -> bool {
        let now = Instant::now();
        let mut all = self.watched();
        if all.len() >= WATCHED_MAX && !all.contains_key(name) {
            all.clear();
        }
        let watched = all.entry(name.to_owned()).or_insert(WatchedLease { seen, since: now });
        if watched.seen != seen {
            *watched = WatchedLease { seen, since: now };
        }
        now.duration_since(watched.since) >= lasts
    }

    fn watched(&self) -> MutexGuard<'_, HashMap<String, WatchedLease>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Acquires a lease that is free, or that is unchanged since `lapsed` was observed.
    async fn try_acquire(
        &self,
        name: &str,
        lasts: Duration,
        lapsed: Option<LeaseVersion>,
    ) -> Result<Option<Lease>, StoreError> {
        let began = Instant::now();
        let taken = sqlx::query(
            "INSERT INTO turn (name, until, holder, lasts_ms)
             VALUES ($1, clock_timestamp() + make_interval(secs => $2::float8 / 1000), $3, $2)
             ON CONFLICT (name) DO UPDATE
             SET until = EXCLUDED.until, holder = EXCLUDED.holder, epoch = EXCLUDED.epoch, lasts_ms = EXCLUDED.lasts_ms
             WHERE turn.epoch = $4 AND turn.until = $5
             RETURNING epoch, until",
        )
        .bind(name)
        .bind(i64::try_from(lasts.as_millis()).unwrap_or(i64::MAX))
        .bind(self.member.0)
        .bind(lapsed.map(|seen| seen.epoch))
        .bind(lapsed.map(|seen| seen.until))
        .fetch_optional(&self.pool)
        .await
        .doing("acquiring a lease")?;
        let Some(row) = taken else { return Ok(None) };
        let read = || -> Result<_, sqlx::Error> {
            Ok(LeaseVersion { epoch: row.try_get("epoch")?, until: row.try_get("until")? })
        };
        let seen = read().doing("acquiring a lease")?;
        // Its holder knows when it began, and need not wait for another duration.
        self.watched().insert(name.to_owned(), WatchedLease { seen, since: began });
        Ok(Some(Lease { name: name.to_owned(), epoch: seen.epoch }))
    }

    /// The reconciliation watermark of these accounts; `None` before the first reconciliation.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn reconciled_until(&self, books: &str) -> Result<Option<Timestamp>, StoreError> {
        let until = sqlx::query_scalar("SELECT until FROM compared WHERE books = $1").bind(books);
        until.fetch_optional(&self.pool).await.doing("reading up to when books were compared")
    }

    /// Stores the watermark. An earlier time never replaces a later one.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn store_reconciled_until(&self, books: &str, until: Timestamp) -> Result<(), StoreError> {
        sqlx::query(
            "INSERT INTO compared (books, until) VALUES ($1, $2)
             ON CONFLICT (books) DO UPDATE SET until = greatest(compared.until, EXCLUDED.until)",
        )
        .bind(books)
        .bind(until)
        .execute(&self.pool)
        .await
        .doing("storing up to when books were compared")?;
        Ok(())
    }
}
