//! Members and shard ownership: who is alive, and who owns which shard under which epoch. Postgres is the one authority (design 6).
//! Ages on its clock are shown and decide nothing: a takeover requires an owner without heartbeats, as observed on a monotonic clock.

use crate::error::{OperationContext, StoreError, damaged};
use crate::outage_log;
use crate::pool::begin_locking;
use domain::commit::Epoch;
use domain::id::{MemberId, Shard};
use domain::state_machine::Timestamp;
use sqlx::postgres::PgRow;
use sqlx::{PgPool, Row};
use std::collections::BTreeMap;
use std::time::Duration;
use uuid::Uuid;

/// The bits of an epoch below its incarnation.
pub(crate) const TERM_BITS: u32 = 32;

/// The incarnation of the cluster in which an epoch began.
#[must_use]
pub const fn incarnation_of(epoch: Epoch) -> i64 {
    epoch.0 >> TERM_BITS
}

/// A running process, as it registers itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    pub id: MemberId,
    /// For people: host and process, or a configured name.
    pub name: String,
    pub started_at: Timestamp,
    /// Version, roles and addresses, for the other members and operators.
    pub details: serde_json::Value,
}

/// A member, with its last heartbeat.
#[derive(Clone, Debug, PartialEq)]
pub struct MemberHeartbeat {
    pub member: Member,
    /// The time of its last heartbeat, which distinguishes heartbeats and nothing else: the database's clock can be set.
    pub heartbeat_at: Timestamp,
    pub silent_for: Duration,
}

/// The owner of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ownership {
    pub shard: Shard,
    pub owner: Option<MemberId>,
    pub epoch: Epoch,
}

/// Members and shards in Postgres.
#[derive(Clone, Debug)]
pub struct Cluster {
    pub(crate) pool: PgPool,
}

impl Cluster {
    #[must_use]
    pub const fn new(pool: PgPool) -> Self {
        Self { pool }
    }

    /// Stores a heartbeat of `member`, to be called every second. Returns the database's time.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn heartbeat(&self, member: &Member) -> Result<Timestamp, StoreError> {
        let stored = sqlx::query_scalar(
            "INSERT INTO member (id, name, started_at, beat_at, details) VALUES ($1, $2, $3, clock_timestamp(), $4)
             ON CONFLICT (id) DO UPDATE SET name = excluded.name, beat_at = excluded.beat_at, details = excluded.details
             RETURNING beat_at",
        )
        .bind(member.id.0)
        .bind(&member.name)
        .bind(member.started_at)
        .bind(&member.details)
        .fetch_one(&self.pool)
        .await
        .doing("storing a heartbeat");
        if stored.is_ok() {
            outage_log::write_succeeded();
        }
        stored
    }

    /// Writes this member's row and rolls that back: whether the server takes writes, without waiting for a standby or for the row.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn check_write(&self, member: MemberId) -> Result<(), StoreError> {
        const DOING: &str = "testing a write";
        let mut transaction = begin_locking(&self.pool).await.doing(DOING)?;
        sqlx::query(
            "UPDATE member SET beat_at = beat_at WHERE id = (SELECT id FROM member WHERE id = $1 FOR UPDATE SKIP LOCKED)",
        )
        .bind(member.0)
        .execute(&mut *transaction)
        .await
        .doing(DOING)?;
        transaction.rollback().await.doing(DOING)
    }

    /// Ends statements of this process that were given up while their commit waits for a synchronous standby: the server notices neither that nor
    /// a timeout, and each would occupy a connection until there is a standby. Whether they committed stays unknown.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn end_abandoned_commits(&self) -> Result<u64, StoreError> {
        sqlx::query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE application_name = current_setting('application_name') AND usename = current_user AND pid <> pg_backend_pid()
               AND wait_event = 'SyncRep' AND query_start < clock_timestamp() - interval '10 seconds'",
        )
        .execute(&self.pool)
        .await
        .map(|done| done.rows_affected())
        .doing("ending abandoned commits")
    }

    /// A process's first heartbeat. Earlier processes of its name that have certainly ended are deleted, so that no member has to wait
    /// for their timeout before it takes over their shards. One that may still run stays: it may be replying from its memory.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn join(&self, member: &Member, has_ended: impl Fn(&Member) -> bool) -> Result<Timestamp, StoreError> {
        for earlier in self.members().await? {
            if earlier.member.name != member.name || earlier.member.id == member.id {
                continue;
            }
            let name = &member.name;
            if !has_ended(&earlier.member) {
                tracing::warn!(member.name = name, earlier = %earlier.member.id, "another process has, or had, this member's name");
                continue;
            }
            let done = sqlx::query("DELETE FROM member WHERE id = $1 AND beat_at = $2")
                .bind(earlier.member.id.0)
                .bind(earlier.heartbeat_at)
                .execute(&self.pool)
                .await
                .doing("deleting an earlier process of this name")?;
            if done.rows_affected() > 0 {
                tracing::info!(member.name = name, "takes the place of an earlier process of its name");
            }
        }
        self.heartbeat(member).await
    }

    /// Every known member, alive or not, by id.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn members(&self) -> Result<Vec<MemberHeartbeat>, StoreError> {
        let rows = sqlx::query(
            "SELECT id, name, started_at, beat_at, details,
                    greatest(extract(epoch FROM clock_timestamp() - beat_at), 0)::float8 AS silent
             FROM member ORDER BY id",
        )
        .fetch_all(&self.pool)
        .await;
        rows.and_then(|rows| rows.iter().map(member_heartbeat).collect()).doing("reading the members")
    }

    /// The same, without one of their details: one that is long and that the caller does not need.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn members_without(&self, detail: &str) -> Result<Vec<MemberHeartbeat>, StoreError> {
        let rows = sqlx::query(
            "SELECT id, name, started_at, beat_at, CASE jsonb_typeof(details) WHEN 'object' THEN details - $1 ELSE details END AS details,
                    greatest(extract(epoch FROM clock_timestamp() - beat_at), 0)::float8 AS silent
             FROM member ORDER BY id",
        )
        .bind(detail)
        .fetch_all(&self.pool)
        .await;
        rows.and_then(|rows| rows.iter().map(member_heartbeat).collect()).doing("reading the members")
    }

    /// The members with a heartbeat within `within` on the database's clock, by id: to be shown, not to be acted on.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn alive(&self, within: Duration) -> Result<Vec<MemberHeartbeat>, StoreError> {
        let rows = sqlx::query(
            "SELECT id, name, started_at, beat_at, details,
                    greatest(extract(epoch FROM clock_timestamp() - beat_at), 0)::float8 AS silent
             FROM member WHERE beat_at > clock_timestamp() - make_interval(secs => $1) ORDER BY id",
        )
        .bind(within.as_secs_f64())
        .fetch_all(&self.pool)
        .await;
        rows.and_then(|rows| rows.iter().map(member_heartbeat).collect()).doing("reading the members")
    }

    /// Removes a member that ended in order. Its shards should have been handed over before.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn remove(&self, member: MemberId) -> Result<(), StoreError> {
        let done = sqlx::query("DELETE FROM member WHERE id = $1").bind(member.0).execute(&self.pool).await;
        done.map(drop).doing("removing a member")
    }

    /// Removes members without a heartbeat for `silent_for` that own nothing. Returns how many.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn remove_silent(&self, silent_for: Duration) -> Result<u64, StoreError> {
        sqlx::query(
            "DELETE FROM member WHERE beat_at < clock_timestamp() - make_interval(secs => $1)
             AND NOT EXISTS (SELECT 1 FROM shard WHERE shard.owner = member.id)",
        )
        .bind(silent_for.as_secs_f64())
        .execute(&self.pool)
        .await
        .map(|done| done.rows_affected())
        .doing("forgetting silent members")
    }

    /// All 256 shards, in order.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn shards(&self) -> Result<Vec<Ownership>, StoreError> {
        let rows = sqlx::query("SELECT id, owner, epoch FROM shard ORDER BY id").fetch_all(&self.pool).await;
        rows.and_then(|rows| rows.iter().map(ownership).collect()).doing("reading the shards")
    }

    /// Makes `me` the owner of those of `seen` that are unchanged, and whose owner is `NULL`, has no row, or has sent no heartbeat
    /// since the one in `watched`: each with an epoch one higher. Waits for batches in flight, which commit under the old epoch. The
    /// result holds what was won; the rest went to another member or its owner is alive. Whether the owner was silent for long enough
    /// since that heartbeat is the caller's decision.
    ///
    /// # Errors
    /// [`StoreError`]; whether the takeover happened is then to be read from [`Cluster::shards`].
    pub async fn take_over(
        &self,
        me: MemberId,
        seen: &[Ownership],
        watched: &BTreeMap<MemberId, Timestamp>,
    ) -> Result<BTreeMap<Shard, Epoch>, StoreError> {
        let beat_of = |seen: &Ownership| seen.owner.and_then(|owner| watched.get(&owner).copied());
        self.change(
            sqlx::query(
                "UPDATE shard SET owner = $1, epoch = shard.epoch + 1
                 FROM (
                     SELECT shard.id FROM shard
                     JOIN unnest($2::smallint[], $3::bigint[], $4::uuid[], $5::timestamptz[]) AS seen (id, epoch, owner, beat_at)
                       ON seen.id = shard.id AND seen.epoch = shard.epoch AND seen.owner IS NOT DISTINCT FROM shard.owner
                     WHERE NOT EXISTS (
                         SELECT 1 FROM member
                         WHERE member.id = seen.owner AND member.beat_at IS DISTINCT FROM seen.beat_at
                     )
                     ORDER BY shard.id FOR UPDATE OF shard
                 ) AS won
                 WHERE shard.id = won.id
                 RETURNING shard.id, shard.owner, shard.epoch",
            )
            .bind(me.0)
            .bind(seen.iter().map(|seen| i16::from(seen.shard.0)).collect::<Vec<_>>())
            .bind(seen.iter().map(|seen| seen.epoch.0).collect::<Vec<_>>())
            .bind(seen.iter().map(|seen| seen.owner.map(|owner| owner.0)).collect::<Vec<_>>())
            .bind(seen.iter().map(beat_of).collect::<Vec<_>>()),
            "taking shards over",
        )
        .await
    }

    /// Hands those of `owned` that this member still owns under these epochs over to `to` (`None`: no owner): each with an epoch one
    /// higher. From then on this member commits nothing there.
    ///
    /// # Errors
    /// [`StoreError`]; whether the handover happened is then to be read from [`Cluster::shards`].
    pub async fn handover(
        &self,
        me: MemberId,
        to: Option<MemberId>,
        owned: &[(Shard, Epoch)],
    ) -> Result<BTreeMap<Shard, Epoch>, StoreError> {
        self.change(
            sqlx::query(
                "UPDATE shard SET owner = $2, epoch = shard.epoch + 1
                 FROM (
                     SELECT shard.id FROM shard
                     JOIN unnest($3::smallint[], $4::bigint[]) AS owned (id, epoch)
                       ON owned.id = shard.id AND owned.epoch = shard.epoch AND shard.owner = $1
                     ORDER BY shard.id FOR UPDATE OF shard
                 ) AS given
                 WHERE shard.id = given.id
                 RETURNING shard.id, shard.owner, shard.epoch",
            )
            .bind(me.0)
            .bind(to.map(|to| to.0))
            .bind(owned.iter().map(|(shard, _)| i16::from(shard.0)).collect::<Vec<_>>())
            .bind(owned.iter().map(|(_, epoch)| epoch.0).collect::<Vec<_>>()),
            "handing shards over",
        )
        .await
    }

    async fn change(
        &self,
        query: sqlx::query::Query<'_, sqlx::Postgres, sqlx::postgres::PgArguments>,
        doing: &'static str,
    ) -> Result<BTreeMap<Shard, Epoch>, StoreError> {
        let rows = query.fetch_all(&self.pool).await.doing(doing)?;
        let won: Result<Vec<Ownership>, _> = rows.iter().map(ownership).collect();
        Ok(won.doing(doing)?.into_iter().map(|won| (won.shard, won.epoch)).collect())
    }

    /// The cluster's incarnation: 0, and after each restored backup the minute (since 1970) of that restoration.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn incarnation(&self) -> Result<i64, StoreError> {
        let incarnation = sqlx::query_scalar("SELECT incarnation FROM cluster").fetch_one(&self.pool).await;
        incarnation.doing("reading the incarnation")
    }
}

fn member_heartbeat(row: &PgRow) -> Result<MemberHeartbeat, sqlx::Error> {
    let member = Member {
        id: MemberId(row.try_get("id")?),
        name: row.try_get("name")?,
        started_at: row.try_get("started_at")?,
        details: row.try_get("details")?,
    };
    let heartbeat_at = row.try_get("beat_at")?;
    Ok(MemberHeartbeat {
        member,
        heartbeat_at,
        silent_for: Duration::try_from_secs_f64(row.try_get("silent")?).map_err(damaged)?,
    })
}

fn ownership(row: &PgRow) -> Result<Ownership, sqlx::Error> {
    let shard = u8::try_from(row.try_get::<i16, _>("id")?).map(Shard).map_err(damaged)?;
    let owner = row.try_get::<Option<Uuid>, _>("owner")?.map(MemberId);
    Ok(Ownership { shard, owner, epoch: Epoch(row.try_get("epoch")?) })
}
