//! Removes an old month: a signed checkpoint says where each chain continues, the month is detached with it, and then dropped as a whole.
//!
//! Rows are partitioned by the clock of the member that decided them, and chained by the order of commits: at the edge of a month the
//! two differ by moments. Rows that were sealed before the last one of the month, and are in a later partition, are listed in the
//! checkpoint with their digests.

use super::chain::{AuditKey, AuditKeys, COLUMNS, Hash, HashedRow, RowPosition, array};
use crate::error::{OperationContext, StoreError};
use crate::pool::begin;
use crate::retention::{self, Month, MonthRemoval, MonthlyLog};
use domain::id::Shard;
use domain::state_machine::Timestamp;
use serde::{Deserialize, Serialize};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, PgPool, Row};

/// A dropped month.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DroppedMonth {
    pub month: String,
    /// Shards whose chains begin at a new checkpoint.
    pub shards: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum DropMonthError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{0:?} is no month such as 2026-03")]
    NoMonth(String),
    #[error("{0} is not over yet; a month can go when it is past")]
    NotPast(String),
    #[error("there is no partition for {0}")]
    NoPartition(String),
    #[error("{0} rows of the month are not sealed; they are sealed while a member runs")]
    Unsealed(i64),
    #[error(
        "month {0} is in use by a long transaction (pg_stat_activity has its xact_start); try again when that has ended"
    )]
    InUse(String),
    #[error("the seal of the month's last row in shard {0} is missing: verify the audit log first")]
    NoSeal(Shard),
}

/// A row before a checkpoint that is retained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RetainedRow {
    pub(super) place: RowPosition,
    #[serde(with = "hex::serde")]
    pub(super) digest: Hash,
}

/// Where a chain begins after months were dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Checkpoint {
    pub(super) shard: Shard,
    pub(super) number: i64,
    pub(super) epoch: i64,
    pub(super) seq: i64,
    pub(super) hash: Hash,
    /// The end of the dropped month.
    dropped: Timestamp,
    pub(super) retained: Vec<RetainedRow>,
    signed_at: Timestamp,
    key_id: String,
    signature: [u8; 64],
}

impl Checkpoint {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"gpuaas audit checkpoint v1\0".to_vec();
        bytes.push(self.shard.0);
        let times = [self.dropped.timestamp_micros(), self.signed_at.timestamp_micros()];
        for number in [self.number, self.epoch, self.seq].into_iter().chain(times) {
            bytes.extend_from_slice(&number.to_be_bytes());
        }
        bytes.extend_from_slice(&self.hash);
        for row in &self.retained {
            bytes.extend_from_slice(&row.place.epoch.to_be_bytes());
            bytes.extend_from_slice(&row.place.seq.to_be_bytes());
            bytes.extend_from_slice(&row.digest);
        }
        bytes
    }

    pub(super) fn is_signed(&self, keys: &AuditKeys) -> bool {
        keys.verify(&self.key_id, &self.bytes(), &self.signature)
    }

    /// The newest of a shard.
    pub(super) async fn last(connection: &mut PgConnection, shard: Shard) -> Result<Option<Self>, sqlx::Error> {
        let row = sqlx::query(
            "SELECT number, epoch, seq, hash, dropped, kept::text, signed_at, key_id, signature
             FROM audit_checkpoint WHERE shard = $1 ORDER BY number DESC LIMIT 1",
        )
        .bind(i16::from(shard.0))
        .fetch_optional(connection)
        .await?;
        row.map(|row| Self::of(shard, &row)).transpose()
    }

    fn of(shard: Shard, row: &PgRow) -> Result<Self, sqlx::Error> {
        let kept: String = row.try_get("kept")?;
        Ok(Self {
            shard,
            number: row.try_get("number")?,
            epoch: row.try_get("epoch")?,
            seq: row.try_get("seq")?,
            hash: array(row.try_get("hash")?),
            dropped: row.try_get("dropped")?,
            // An unreadable list is as wrong as another list: the signature fails.
            retained: serde_json::from_str(&kept).unwrap_or_default(),
            signed_at: row.try_get("signed_at")?,
            key_id: row.try_get("key_id")?,
            signature: array(row.try_get("signature")?),
        })
    }
}

/// Removes `month` (`2026-03`) from the audit log, after signing where each chain continues. A month that was detached before, by a process
/// that was killed, is dropped alone.
///
/// # Errors
/// [`DropMonthError`]; the chains are intact then.
pub async fn drop_month(
    pool: &PgPool,
    key: &AuditKey,
    month: &str,
    now: Timestamp,
) -> Result<DroppedMonth, DropMonthError> {
    let no_month = || DropMonthError::NoMonth(month.to_owned());
    let month = Month::parse(month).ok_or_else(no_month)?;
    let end = month.end().ok_or_else(no_month)?;
    if now < end {
        return Err(DropMonthError::NotPast(month.to_string()));
    }
    let partitions = retention::partitions(pool).await?;
    let found = partitions.iter().find(|it| it.log == MonthlyLog::Audit && it.month == month);
    let found = found.ok_or_else(|| DropMonthError::NoPartition(month.to_string()))?;
    let shards = if found.is_attached { detach(pool, key, month, end, now).await? } else { 0 };
    match retention::drop_detached(pool, MonthlyLog::Audit, month).await? {
        MonthRemoval::Removed => Ok(DroppedMonth { month: month.to_string(), shards }),
        MonthRemoval::InUse => Err(DropMonthError::InUse(month.to_string())),
    }
}

/// Signs the checkpoints and detaches the month, all or nothing. Returns the number of checkpoints.
async fn detach(
    pool: &PgPool,
    key: &AuditKey,
    month: Month,
    end: Timestamp,
    now: Timestamp,
) -> Result<u64, DropMonthError> {
    const DOING: &str = "detaching a month of the audit log";
    let partition = MonthlyLog::Audit.partition(month);
    let mut transaction = begin(pool, "BEGIN").await.doing(DOING)?;
    sqlx::query("SET LOCAL statement_timeout = 0").execute(&mut *transaction).await.doing(DOING)?;
    let query = format!(
        "SELECT count(*) FROM {partition} AS month WHERE NOT EXISTS (
             SELECT 1 FROM audit_seal WHERE (audit_seal.shard, audit_seal.epoch, audit_seal.seq)
                                          = (month.shard, month.epoch, month.seq))"
    );
    let unsealed: i64 =
        sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_one(&mut *transaction).await.doing(DOING)?;
    if unsealed > 0 {
        return Err(DropMonthError::Unsealed(unsealed));
    }
    let mut shards = 0;
    for shard in (0..=u8::MAX).map(Shard) {
        if let Some(checkpoint) = checkpoint(&mut transaction, key, shard, &partition, end, now).await? {
            write(&mut transaction, &checkpoint).await.doing(DOING)?;
            shards += 1;
        }
    }
    // Last: from here on writers of the log wait, for as long as a commit takes.
    if !retention::detach_within(&mut transaction, MonthlyLog::Audit, month).await.doing(DOING)? {
        return Err(DropMonthError::InUse(month.to_string()));
    }
    transaction.commit().await.doing(DOING)?;
    Ok(shards)
}

/// The checkpoint of the shard without the month; `None` where it had no row in it.
async fn checkpoint(
    connection: &mut PgConnection,
    key: &AuditKey,
    shard: Shard,
    partition: &str,
    end: Timestamp,
    now: Timestamp,
) -> Result<Option<Checkpoint>, DropMonthError> {
    const DOING: &str = "signing where a chain goes on";
    let query = format!("SELECT epoch, seq FROM {partition} WHERE shard = $1 ORDER BY epoch DESC, seq DESC LIMIT 1");
    let last: Option<(i64, i64)> = sqlx::query_as(sqlx::AssertSqlSafe(query))
        .bind(i16::from(shard.0))
        .fetch_optional(&mut *connection)
        .await
        .doing(DOING)?;
    let Some((epoch, seq)) = last else { return Ok(None) };
    let seal: Option<(i64, Vec<u8>)> =
        sqlx::query_as("SELECT number, hash FROM audit_seal WHERE shard = $1 AND epoch = $2 AND seq = $3")
            .bind(i16::from(shard.0))
            .bind(epoch)
            .bind(seq)
            .fetch_optional(&mut *connection)
            .await
            .doing(DOING)?;
    let (mut number, hash) = seal.ok_or(DropMonthError::NoSeal(shard))?;
    let (mut place, mut hash) = (RowPosition { epoch, seq }, array(hash));
    if let Some(before) = Checkpoint::last(connection, shard).await.doing(DOING)?
        && before.number >= number
    {
        // An older month that is dropped after a later one: the chain begins where it did.
        (number, place, hash) = (before.number, RowPosition { epoch: before.epoch, seq: before.seq }, before.hash);
    }
    let query = format!(
        "SELECT {COLUMNS} FROM audit WHERE shard = $1 AND (epoch, seq) <= ($2, $3) AND tableoid <> $4::text::regclass
         ORDER BY epoch, seq"
    );
    let rows = sqlx::query(sqlx::AssertSqlSafe(query))
        .bind(i16::from(shard.0))
        .bind(place.epoch)
        .bind(place.seq)
        .bind(partition)
        .fetch_all(connection)
        .await
        .doing(DOING)?;
    let retained =
        rows.iter().map(|row| HashedRow::of(row).map(|row| RetainedRow { place: row.place, digest: row.digest() }));
    let retained = retained.collect::<Result<_, _>>().doing(DOING)?;
    let mut checkpoint = Checkpoint {
        shard,
        number,
        epoch: place.epoch,
        seq: place.seq,
        hash,
        dropped: end,
        retained,
        signed_at: now,
        key_id: key.id().to_owned(),
        signature: [0; 64],
    };
    checkpoint.signature = key.sign(&checkpoint.bytes());
    Ok(Some(checkpoint))
}

/// Writes the checkpoint; deletes the seals and heads before it, but those of retained rows, and the newest head.
async fn write(connection: &mut PgConnection, checkpoint: &Checkpoint) -> Result<(), sqlx::Error> {
    let shard = i16::from(checkpoint.shard.0);
    let kept = serde_json::to_string(&checkpoint.retained).map_err(|error| sqlx::Error::Encode(Box::new(error)))?;
    sqlx::query(
        "INSERT INTO audit_checkpoint (shard, number, epoch, seq, hash, dropped, kept, signed_at, key_id, signature)
         VALUES ($1, $2, $3, $4, $5, $6, $7::jsonb, $8, $9, $10)
         ON CONFLICT (shard, number) DO UPDATE
         SET dropped = excluded.dropped, kept = excluded.kept, signed_at = excluded.signed_at, key_id = excluded.key_id,
             signature = excluded.signature",
    )
    .bind(shard)
    .bind(checkpoint.number)
    .bind(checkpoint.epoch)
    .bind(checkpoint.seq)
    .bind(checkpoint.hash.to_vec())
    .bind(checkpoint.dropped)
    .bind(kept)
    .bind(checkpoint.signed_at)
    .bind(&checkpoint.key_id)
    .bind(checkpoint.signature.to_vec())
    .execute(&mut *connection)
    .await?;
    sqlx::query(
        "DELETE FROM audit_seal WHERE shard = $1 AND number <= $2 AND (epoch, seq) NOT IN (
             SELECT * FROM unnest($3::bigint[], $4::bigint[]))",
    )
    .bind(shard)
    .bind(checkpoint.number)
    .bind(checkpoint.retained.iter().map(|row| row.place.epoch).collect::<Vec<_>>())
    .bind(checkpoint.retained.iter().map(|row| row.place.seq).collect::<Vec<_>>())
    .execute(&mut *connection)
    .await?;
    sqlx::query(
        "DELETE FROM audit_head WHERE shard = $1 AND number <= $2
         AND number < (SELECT max(number) FROM audit_head WHERE shard = $1)",
    )
    .bind(shard)
    .bind(checkpoint.number)
    .execute(connection)
    .await
    .map(|_| ())
}
