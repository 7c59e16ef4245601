//! What statements are made of: where an account stood at an instant, and what a stretch of its ledger comes to.

use super::ledger::EFFECT;
use super::{LedgerRow, Reads};
use crate::error::{Doing, StoreError};
use crate::pool::begin;
use domain::id::{AllocationId, BillingAccountId};
use domain::machine::Timestamp;
use domain::money::Micro;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Row};
use std::time::Duration;
use uuid::Uuid;

/// How long a month may take to be added up: an account with thousands of allocations has millions of postings in one.
pub const ADDED_UP_WITHIN: Duration = Duration::from_secs(60);

/// Where an account stands between two of its postings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LedgerPlace {
    /// The number of the posting before; 0 where there is none.
    pub number: i64,
    /// After that posting.
    pub balance: Micro,
}

/// What the postings of one kind for one allocation come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerSum {
    /// A kind's name; of any release.
    pub kind: String,
    /// `None` also where those of many allocations were put together.
    pub allocation: Option<AllocationId>,
    /// How many allocations were put together, since there are more than were asked for; 0 where it is one sum of its own.
    pub together: u64,
    pub postings: u64,
    /// What they did to the balance.
    pub effect: Micro,
    pub amount: Micro,
    pub used_from: Option<Timestamp>,
    pub used_until: Option<Timestamp>,
}

/// Doubling steps back from the largest number that an account will have to one. At each, the place moves on while the posting there was
/// made before the instant; so that what is posted later cannot move it, as long as clocks do not go back past the instant.
const PLACES: &str = "
    WITH RECURSIVE search (ord, instant, place, step) AS (
        SELECT ord, instant, 0::bigint, 1::bigint << 40 FROM unnest($2::timestamptz[]) WITH ORDINALITY AS asked (instant, ord)
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
    /// Where the account stood at each of these instants. Between two of them lies a stretch of its ledger without a gap: what was posted
    /// by a clock that went back belongs where it stands in the ledger.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn ledger_places(
        &self,
        account: BillingAccountId,
        instants: &[Timestamp],
    ) -> Result<Vec<LedgerPlace>, StoreError> {
        let rows = sqlx::query(PLACES).bind(account.0).bind(instants).fetch_all(&self.pool).await;
        let place = |row: &PgRow| {
            Ok(LedgerPlace { number: row.try_get("place")?, balance: Micro::of(row.try_get("balance")?) })
        };
        let places: Result<Vec<_>, sqlx::Error> = rows.and_then(|rows| rows.iter().map(place).collect());
        places.doing("finding instants in the ledger")
    }

    /// What the postings after one number up to another come to, by allocation and kind: the `most` that moved most in the order in which
    /// they began, then the rest by kind. It may take [`ADDED_UP_WITHIN`], however short other reads have to be.
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
        let within = format!("SET LOCAL statement_timeout = {}", ADDED_UP_WITHIN.as_millis());
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
        effect: Micro::of(row.try_get("effect")?),
        amount: Micro::of(row.try_get("amount")?),
        used_from: row.try_get("used_from")?,
        used_until: row.try_get("used_until")?,
    })
}
