//! The sealer: extends the chains of the shards that a member owns.
//!
//! A shard's rows become visible in the order of their positions: its commits run through one lane, and a takeover waits for the
//! statement in flight. So all rows after the head can be sealed as they are found. The shard's row is locked and its owner and epoch
//! are checked as by a commit: a member that lost the shard seals nothing there.

use super::chain::{AuditKey, AuditKeys, COLUMNS, ChainHead, HashedRow, SignedHead, genesis, link};
use crate::error::{OperationContext, StoreError, damaged};
use crate::pool::begin_locking;
use domain::commit::Epoch;
use domain::id::{MemberId, Shard};
use domain::state_machine::Timestamp;
use sqlx::{PgConnection, PgPool, Row};
use std::collections::BTreeMap;

/// Rows of one shard that are sealed in one run; the rest follow in the next. A takeover waits for a run, so it is short.
const ROWS_PER_SHARD: i64 = 64;

/// Seals the audit rows of one member's shards.
pub struct Sealer {
    pool: PgPool,
    me: MemberId,
    key: AuditKey,
    keys: AuditKeys,
    /// The last head of each shard that this process has signed or learned. A chain only grows: the database must not fall behind this.
    known: BTreeMap<Shard, ChainHead>,
}

/// The result of a run.
#[derive(Debug, Default)]
pub struct SealRun {
    /// One for each shard in which something was sealed.
    pub heads: Vec<SignedHead>,
    pub sealed: u64,
    /// Rows that waited when the run began.
    pub waited: u64,
    /// When the oldest of them was written.
    pub oldest: Option<Timestamp>,
    /// True where more rows wait than one run seals.
    pub more: bool,
    pub broken: Vec<BrokenChain>,
}

/// A chain that cannot be extended: its rows, which never change, were changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokenChain {
    pub shard: Shard,
    pub reason: String,
}

impl Sealer {
    #[must_use]
    pub fn new(pool: PgPool, me: MemberId, key: AuditKey) -> Self {
        let keys = AuditKeys::of(&key);
        Self { pool, me, key, keys, known: BTreeMap::new() }
    }

    /// Adds a head that is stored elsewhere: a database that has fallen behind it was truncated or restored. A head that was not signed
    /// by this control plane's key is ignored.
    pub fn learn_head(&mut self, head: &SignedHead) {
        if self.keys.signed(head) {
            self.remember_head(head.head.clone());
        }
    }

    fn remember_head(&mut self, head: ChainHead) {
        let known = self.known.entry(head.shard).or_insert_with(|| head.clone());
        if known.number < head.number {
            *known = head;
        }
    }

    /// Seals the waiting rows of these shards.
    ///
    /// # Errors
    /// [`StoreError`]; whether it was sealed is known in the next run.
    pub async fn run(&mut self, terms: &[(Shard, Epoch)], now: Timestamp) -> Result<SealRun, StoreError> {
        let mut run = SealRun::default();
        let mut transaction = begin_locking(&self.pool).await.doing("sealing the audit log")?;
        let waiting = self.waiting(&mut transaction, terms, &mut run).await?;
        if waiting.is_empty() {
            return Ok(run);
        }
        let heads = self.lock_shards(&mut transaction, &waiting, &mut run).await?;
        let rows = next_rows(&mut transaction, &heads).await?;
        let sealed = self.chain(rows, heads, now, &mut run);
        write(&mut transaction, &sealed).await?;
        transaction.commit().await.doing("sealing the audit log")?;
        for signed in &sealed.heads {
            self.remember_head(signed.head.clone());
        }
        run.sealed = sealed.seals.len() as u64;
        run.heads = sealed.heads;
        Ok(run)
    }

    /// The shards in which rows wait, with their terms.
    async fn waiting(
        &self,
        connection: &mut PgConnection,
        terms: &[(Shard, Epoch)],
        run: &mut SealRun,
    ) -> Result<Vec<(Shard, Epoch)>, StoreError> {
        let rows = sqlx::query(
            "SELECT term.shard, term.epoch, waiting.rows, waiting.oldest
             FROM unnest($1::smallint[], $2::bigint[]) AS term (shard, epoch)
             LEFT JOIN LATERAL (
                 SELECT epoch, seq FROM audit_head WHERE audit_head.shard = term.shard ORDER BY number DESC LIMIT 1
             ) AS head ON true
             CROSS JOIN LATERAL (
                 SELECT count(*) AS rows, min(at) AS oldest
                 FROM (
                     SELECT at FROM audit
                     WHERE audit.shard = term.shard
                       AND (audit.epoch, audit.seq) > (coalesce(head.epoch, -1), coalesce(head.seq, -1))
                     ORDER BY audit.epoch, audit.seq LIMIT $3
                 ) AS few
             ) AS waiting
             WHERE waiting.rows > 0",
        )
        .bind(terms.iter().map(|(shard, _)| i16::from(shard.0)).collect::<Vec<_>>())
        .bind(terms.iter().map(|(_, epoch)| epoch.0).collect::<Vec<_>>())
        .bind(ROWS_PER_SHARD + 1)
        .fetch_all(connection)
        .await
        .doing("looking for audit rows to seal")?;
        let mut waiting = Vec::new();
        for row in &rows {
            let read = || -> Result<_, sqlx::Error> {
                let count: i64 = row.try_get("rows")?;
                let oldest: Option<Timestamp> = row.try_get("oldest")?;
                Ok((shard_of(row)?, Epoch(row.try_get("epoch")?), count, oldest))
            };
            let (shard, epoch, count, oldest) = read().doing("looking for audit rows to seal")?;
            run.waited += count.unsigned_abs();
            run.oldest = run.oldest.into_iter().chain(oldest).min();
            run.more |= count > ROWS_PER_SHARD;
            waiting.push((shard, epoch));
        }
        Ok(waiting)
    }

    /// Locks those of the shards that this member still owns, and returns their chains' heads.
    async fn lock_shards(
        &mut self,
        connection: &mut PgConnection,
        waiting: &[(Shard, Epoch)],
        run: &mut SealRun,
    ) -> Result<BTreeMap<Shard, Option<ChainHead>>, StoreError> {
        const DOING: &str = "locking shards to seal their audit rows";
        let (shards, epochs): (Vec<_>, Vec<_>) =
            waiting.iter().map(|(shard, epoch)| (i16::from(shard.0), epoch.0)).unzip();
        let held: Vec<i16> = sqlx::query_scalar(
            "SELECT shard.id FROM shard
             JOIN unnest($2::smallint[], $3::bigint[]) AS term (id, epoch) ON term.id = shard.id AND term.epoch = shard.epoch
             WHERE shard.owner = $1 ORDER BY shard.id FOR SHARE OF shard",
        )
        .bind(self.me.0)
        .bind(&shards)
        .bind(&epochs)
        .fetch_all(&mut *connection)
        .await
        .doing(DOING)?;
        // Read after the lock: an earlier sealer has committed by now.
        let query = format!(
            "SELECT head.* FROM unnest($1::smallint[]) AS held (shard) CROSS JOIN LATERAL (
                 SELECT {} FROM audit_head WHERE audit_head.shard = held.shard ORDER BY number DESC LIMIT 1
             ) AS head",
            SignedHead::COLUMNS
        );
        let rows = sqlx::query(sqlx::AssertSqlSafe(query)).bind(&held).fetch_all(connection).await.doing(DOING)?;
        let mut found = BTreeMap::new();
        for row in &rows {
            let head = SignedHead::of(row).doing(DOING)?;
            found.insert(head.head.shard, head);
        }
        let mut heads = BTreeMap::new();
        for shard in held {
            let shard = Shard(u8::try_from(shard).map_err(damaged).doing(DOING)?);
            match self.check_head(shard, found.remove(&shard)) {
                Ok(head) => {
                    heads.insert(shard, head);
                }
                Err(reason) => run.broken.push(BrokenChain { shard, reason }),
            }
        }
        Ok(heads)
    }

    /// Whether the chain can be extended from the head in the database.
    fn check_head(&self, shard: Shard, found: Option<SignedHead>) -> Result<Option<ChainHead>, String> {
        if let Some(found) = &found
            && !self.keys.signed(found)
        {
            return Err(format!("the signature of head {} is wrong", found.head.number));
        }
        let found = found.map(|found| found.head);
        let Some(known) = self.known.get(&shard) else { return Ok(found) };
        let at = found.as_ref().map_or(0, |head| head.number);
        if at < known.number {
            return Err(format!("the chain ended at {} and ends at {at} in the database", known.number));
        }
        if at == known.number && found.as_ref().is_some_and(|head| head.hash != known.hash) {
            return Err(format!("head {at} was exchanged for another"));
        }
        Ok(found)
    }

    fn chain(
        &self,
        rows: Vec<HashedRow>,
        mut heads: BTreeMap<Shard, Option<ChainHead>>,
        now: Timestamp,
        run: &mut SealRun,
    ) -> SealBatch {
        let mut sealed = SealBatch::default();
        let mut moved: BTreeMap<Shard, ChainHead> = BTreeMap::new();
        for row in rows {
            let Ok(shard) = u8::try_from(row.shard).map(Shard) else { continue };
            let Some(last) = heads.get_mut(&shard) else { continue };
            if last.as_ref().is_some_and(|head| head.position() >= row.place) {
                // Two rows at one position: the committer uses each position once.
                let reason = format!("there are two audit rows at epoch {}, seq {}", row.place.epoch, row.place.seq);
                run.broken.push(BrokenChain { shard, reason });
                heads.remove(&shard);
                moved.remove(&shard);
                sealed.seals.retain(|seal| seal.shard != shard);
                continue;
            }
            let (number, before) = last.as_ref().map_or((1, genesis(shard)), |head| (head.number + 1, head.hash));
            let hash = link(&before, number, &row.digest());
            let head = ChainHead { shard, number, epoch: row.place.epoch, seq: row.place.seq, hash, sealed_at: now };
            sealed.seals.push(head.clone());
            moved.insert(shard, head.clone());
            *last = Some(head);
        }
        sealed.heads = moved.into_values().map(|head| self.key.sign_head(head)).collect();
        sealed
    }
}

/// The rows that a run writes.
#[derive(Default)]
struct SealBatch {
    seals: Vec<ChainHead>,
    heads: Vec<SignedHead>,
}

fn shard_of(row: &sqlx::postgres::PgRow) -> Result<Shard, sqlx::Error> {
    u8::try_from(row.try_get::<i16, _>("shard")?).map(Shard).map_err(damaged)
}

/// The rows after these heads, in the order of their positions.
async fn next_rows(
    connection: &mut PgConnection,
    heads: &BTreeMap<Shard, Option<ChainHead>>,
) -> Result<Vec<HashedRow>, StoreError> {
    let query = format!(
        "SELECT next.* FROM unnest($1::smallint[], $2::bigint[], $3::bigint[]) AS head (shard, epoch, seq)
         CROSS JOIN LATERAL (
             SELECT {COLUMNS} FROM audit
             WHERE audit.shard = head.shard AND (audit.epoch, audit.seq) > (head.epoch, head.seq)
             ORDER BY audit.epoch, audit.seq LIMIT $4
         ) AS next
         ORDER BY next.shard, next.epoch, next.seq"
    );
    let place = |head: &Option<ChainHead>| head.as_ref().map_or((-1, -1), |head| (head.epoch, head.seq));
    let rows = sqlx::query(sqlx::AssertSqlSafe(query))
        .bind(heads.keys().map(|shard| i16::from(shard.0)).collect::<Vec<_>>())
        .bind(heads.values().map(|head| place(head).0).collect::<Vec<_>>())
        .bind(heads.values().map(|head| place(head).1).collect::<Vec<_>>())
        .bind(ROWS_PER_SHARD)
        .fetch_all(connection)
        .await;
    let rows: Result<Vec<_>, _> = rows.and_then(|rows| rows.iter().map(HashedRow::of).collect());
    rows.doing("reading audit rows to seal")
}

async fn write(connection: &mut PgConnection, sealed: &SealBatch) -> Result<(), StoreError> {
    let seals = &sealed.seals;
    sqlx::query(
        "INSERT INTO audit_seal (shard, number, epoch, seq, hash)
         SELECT * FROM unnest($1::smallint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bytea[])",
    )
    .bind(seals.iter().map(|seal| i16::from(seal.shard.0)).collect::<Vec<_>>())
    .bind(seals.iter().map(|seal| seal.number).collect::<Vec<_>>())
    .bind(seals.iter().map(|seal| seal.epoch).collect::<Vec<_>>())
    .bind(seals.iter().map(|seal| seal.seq).collect::<Vec<_>>())
    .bind(seals.iter().map(|seal| seal.hash.to_vec()).collect::<Vec<_>>())
    .execute(&mut *connection)
    .await
    .doing("writing seals")?;
    let heads = &sealed.heads;
    sqlx::query(
        "INSERT INTO audit_head (shard, number, epoch, seq, hash, sealed_at, key_id, signature)
         SELECT * FROM unnest($1::smallint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bytea[], $6::timestamptz[],
                              $7::text[], $8::bytea[])",
    )
    .bind(heads.iter().map(|signed| i16::from(signed.head.shard.0)).collect::<Vec<_>>())
    .bind(heads.iter().map(|signed| signed.head.number).collect::<Vec<_>>())
    .bind(heads.iter().map(|signed| signed.head.epoch).collect::<Vec<_>>())
    .bind(heads.iter().map(|signed| signed.head.seq).collect::<Vec<_>>())
    .bind(heads.iter().map(|signed| signed.head.hash.to_vec()).collect::<Vec<_>>())
    .bind(heads.iter().map(|signed| signed.head.sealed_at).collect::<Vec<_>>())
    .bind(heads.iter().map(|signed| signed.key_id.clone()).collect::<Vec<_>>())
    .bind(heads.iter().map(|signed| signed.signature.to_vec()).collect::<Vec<_>>())
    .execute(connection)
    .await
    .map(|_| ())
    .doing("writing heads")
}
