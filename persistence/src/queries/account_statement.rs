//! Reads for account statements: the account's position in the ledger at an instant, and the sums of a range of postings.

use super::billing_reads::EFFECT;
use super::{LedgerRow, Reads};
use crate::error::{OperationContext, StoreError};
use crate::pool::begin;
use domain::id::{AllocationId, BillingAccountId};
use domain::money::MicroAmount;
use domain::state_machine::Timestamp;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Row};
use std::time::Duration;
use uuid::Uuid;

/// The timeout for the sums of a month: an account with thousands of allocations has millions of postings in one.
pub const SUM_TIMEOUT: Duration = Duration::from_secs(60);

/// A position in an account's ledger, between two postings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LedgerPosition {
    /// The number of the posting before; 0 at the beginning.
    pub number: i64,
    /// After that posting.
    pub balance: MicroAmount,
}

/// The sum of the postings of one kind for one allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerSum {
    /// A kind's name; of any release.
    pub kind: String,
    /// `None` also where many allocations are summed.
    pub allocation: Option<AllocationId>,
    /// The number of allocations that are summed, beyond the requested number; 0 where it is the sum of one.
    pub together: u64,
    pub postings: u64,
    /// Their effect on the balance.
    pub effect: MicroAmount,
    pub amount: MicroAmount,
    pub used_from: Option<Timestamp>,
    pub used_until: Option<Timestamp>,
}

/// Doubling steps back from the largest number that an account will have to one. At each, the position moves on while the posting there
/// was made before the instant; so later postings cannot move it, as long as clocks do not go back past the instant.
const POSITIONS: &str = "
    WITH RECURSIVE search (ord, instant, place, step) AS (
        SELECT ord, instant, 0::bigint, 1::bigint << 40 FROM unnest($2::timestamptz[]) WITH ORDINALITY AS requested (instant, ord)
        UNION ALL
        SELECT ord, instant,
               CASE WHEN EXISTS (
                   SELECT FROM ledger WHERE account = $1 AND number = place + step AND at < instant
               ) THEN place + step ELSE place END,
               step / 2
        FROM search WHERE step > 0
    )
    SELECT place, coalesce(balance, 0) AS balance
    FROM search LEFT JOIN ledger ON ledger.account = $1 AND ledger.number = place
    WHERE step = 0 ORDER BY ord";

impl Reads {
    /// The account's position at each of these instants. The range between two of them has no gap: a posting by a clock that went back
    /// belongs where it is in the ledger.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn ledger_positions(
        &self,
        account: BillingAccountId,
        instants: &[Timestamp],
    ) -> Result<Vec<LedgerPosition>, StoreError> {
        let rows = sqlx::query(POSITIONS).bind(account.0).bind(instants).fetch_all(&self.pool).await;
        let place = |row: &PgRow| {
            Ok(LedgerPosition { number: row.try_get("place")?, balance: MicroAmount::of(row.try_get("balance")?) })
        };
        let places: Result<Vec<_>, sqlx::Error> = rows.and_then(|rows| rows.iter().map(place).collect());
        places.doing("finding instants in the ledger")
    }

    /// The sums of the postings after one number up to another, by allocation and kind: the `most` largest in the order in which they
    /// began, then the rest by kind. It may take [`SUM_TIMEOUT`], whatever the timeout of other reads.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn ledger_sums(
        &self,
        account: BillingAccountId,
        after: i64,
        until: i64,
        most: u32,
    ) -> Result<Vec<LedgerSum>, StoreError> {
        const DOING: &str = "adding up a stretch of the ledger";
        let statement = format!(
            "WITH summed AS (
                 SELECT allocation, kind, count(*) AS postings, sum({EFFECT})::bigint AS effect, sum(amount)::bigint AS amount,
                        min(used_from) AS used_from, max(used_until) AS used_until, min(number) AS first
                 FROM ledger WHERE account = $1 AND number > $2 AND number <= $3 GROUP BY allocation, kind
             ), ranked AS (
                 SELECT *, row_number() OVER (ORDER BY amount DESC, first) > $4 AS is_rest FROM summed
             )
             SELECT CASE WHEN is_rest THEN NULL ELSE allocation END AS allocation, kind,
                    CASE WHEN is_rest THEN count(*) ELSE 0 END AS together, sum(postings)::bigint AS postings,
                    sum(effect)::bigint AS effect, sum(amount)::bigint AS amount, min(used_from) AS used_from,
                    max(used_until) AS used_until
             FROM ranked GROUP BY is_rest, kind, CASE WHEN is_rest THEN NULL ELSE first END,
                      CASE WHEN is_rest THEN NULL ELSE allocation END
             ORDER BY is_rest, min(first)"
        );
        let mut read = begin(&self.pool, "BEGIN READ ONLY").await.doing(DOING)?;
        let within = format!("SET LOCAL statement_timeout = {}", SUM_TIMEOUT.as_millis());
        sqlx::query(AssertSqlSafe(within)).execute(&mut *read).await.doing(DOING)?;
        let rows = sqlx::query(AssertSqlSafe(statement))
            .bind(account.0)
            .bind(after)
            .bind(until)
            .bind(i64::from(most))
            .fetch_all(&mut *read)
            .await;
        let sums: Result<Vec<_>, _> = rows.and_then(|rows| rows.iter().map(sum).collect());
        sums.doing(DOING)
    }

    /// The postings after one number up to another, oldest first, at most `limit`.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn ledger_stretch(
        &self,
        account: BillingAccountId,
        after: i64,
        until: i64,
        limit: u32,
    ) -> Result<Vec<LedgerRow>, StoreError> {
        let mut query = LedgerRow::select();
        query.push(" WHERE account = ").push_bind(account.0);
        query.push(" AND number > ").push_bind(after).push(" AND number <= ").push_bind(until);
        query.push(" ORDER BY number LIMIT ").push_bind(i64::from(limit));
        let rows = query.build().fetch_all(&self.pool).await;
        let rows: Result<Vec<_>, _> = rows.and_then(|rows| rows.iter().map(LedgerRow::of).collect());
        rows.doing("reading a stretch of the ledger")
    }
}

fn sum(row: &PgRow) -> Result<LedgerSum, sqlx::Error> {
    Ok(LedgerSum {
        kind: row.try_get("kind")?,
        allocation: row.try_get::<Option<Uuid>, _>("allocation")?.map(AllocationId),
        together: row.try_get::<i64, _>("together")?.unsigned_abs(),
        postings: row.try_get::<i64, _>("postings")?.unsigned_abs(),
        effect: MicroAmount::of(row.try_get("effect")?),
        amount: MicroAmount::of(row.try_get("amount")?),
        used_from: row.try_get("used_from")?,
        used_until: row.try_get("used_until")?,
    })
}
