//! Reads of the ledger: an account's postings, the cost of allocations, and the verification of balances.

use super::{Reads, RowPage, one_more};
use crate::error::{OperationContext, StoreError};
use crate::pool::begin;
use domain::id::{AllocationId, BillingAccountId, PaymentId, Shard};
use domain::ledger::PostingKind;
use domain::money::MicroAmount;
use domain::state_machine::Timestamp;
use serde::{Deserialize, Serialize};
use sqlx::postgres::PgRow;
use sqlx::{Postgres, QueryBuilder, Row};
use std::collections::BTreeMap;
use uuid::Uuid;

/// One posting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerRow {
    pub number: i64,
    /// Of any release.
    pub kind: String,
    /// Its effect on the account's balance.
    pub effect: MicroAmount,
    pub amount: MicroAmount,
    pub currency: String,
    /// After it.
    pub balance: MicroAmount,
    pub allocation: Option<AllocationId>,
    pub used_from: Option<Timestamp>,
    pub used_until: Option<Timestamp>,
    /// The payment that it refers to.
    pub payment: Option<PaymentId>,
    /// The payment's, the refund's or the reversal's own id.
    pub reference: Option<String>,
    pub reason: Option<String>,
    pub at: Timestamp,
}

/// A filter of postings. A field that is `None` admits all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LedgerFilter {
    pub kind: Option<PostingKind>,
    pub allocation: Option<AllocationId>,
    /// After this number.
    pub after: Option<i64>,
    /// Up to and including this number.
    pub until: Option<i64>,
}

/// The cost of an allocation, as far as it is posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllocationCost {
    pub cost: MicroAmount,
    pub billed_until: Option<Timestamp>,
}

/// A discrepancy between an account and its postings.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct LedgerDiscrepancy {
    pub account: Uuid,
    /// The account's own balance, in millionths; `None` where there is no such account.
    pub believed: Option<i64>,
    /// The sum of its entries.
    pub entries: i64,
    /// The account's own count of postings; and the count of the ledger.
    pub believed_postings: Option<i64>,
    pub postings: i64,
    /// Postings whose number or balance does not follow from the one before.
    pub out_of_line: i64,
}

/// The result of [`Reads::verify_ledger`].
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct LedgerReport {
    pub accounts: u64,
    pub postings: u64,
    pub disagreements: Vec<LedgerDiscrepancy>,
    /// The sum over all books by currency. Zero, unless the table was manipulated.
    pub books: BTreeMap<String, BTreeMap<String, i64>>,
}

impl LedgerReport {
    /// The total difference between the accounts' own and the recomputed balances.
    #[must_use]
    pub fn difference(&self) -> i64 {
        let apart = |it: &LedgerDiscrepancy| it.entries.abs_diff(it.believed.unwrap_or(0));
        let all = self.disagreements.iter().map(apart).fold(0, u64::saturating_add);
        i64::try_from(all).unwrap_or(i64::MAX)
    }

    /// Whether every account matches its postings and the books are balanced.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.disagreements.is_empty() && self.books.values().all(|books| books.values().sum::<i64>() == 0)
    }
}

impl Reads {
    /// Whether the account has the posting of this kind that has this reference.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn has_posting(
        &self,
        account: BillingAccountId,
        kind: PostingKind,
        reference: &str,
    ) -> Result<bool, StoreError> {
        sqlx::query_scalar(
            "SELECT EXISTS (SELECT 1 FROM ledger WHERE reference = $1 AND ledger.kind = $2 AND account = $3)",
        )
        .bind(reference)
        .bind(kind.name())
        .bind(account.0)
        .fetch_one(&self.pool)
        .await
        .doing("looking for a posting")
    }

    /// An account's postings that the filter admits, newest first; `before` is the number before which the page begins.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn ledger(
        &self,
        account: BillingAccountId,
        filter: &LedgerFilter,
        before: Option<i64>,
        limit: u32,
    ) -> Result<RowPage<LedgerRow, i64>, StoreError> {
        let mut query = LedgerRow::select();
        query.push(" WHERE account = ").push_bind(account.0);
        if let Some(kind) = filter.kind {
            query.push(" AND kind = ").push_bind(kind.name());
            if kind != PostingKind::Usage {
                // The planner does not compare it with a bound value.
                query.push(" AND kind <> 'usage'");
            }
        }
        if let Some(allocation) = filter.allocation {
            query.push(" AND allocation = ").push_bind(allocation.0);
        }
        if let Some(after) = filter.after {
            query.push(" AND number > ").push_bind(after);
        }
        if let Some(until) = filter.until {
            query.push(" AND number <= ").push_bind(until);
        }
        if let Some(before) = before {
            query.push(" AND number < ").push_bind(before);
        }
        query.push(" ORDER BY number DESC LIMIT ").push_bind(one_more(limit));
        let rows = query.build().fetch_all(&self.pool).await;
        let rows: Result<Vec<_>, _> = rows.and_then(|rows| rows.iter().map(LedgerRow::of).collect());
        Ok(RowPage::of(rows.doing("reading the ledger")?, limit, |row: &LedgerRow| row.number))
    }

    /// The cost of these allocations. One without postings is left out.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn allocation_costs(&self, allocations: &[Uuid]) -> Result<BTreeMap<Uuid, AllocationCost>, StoreError> {
        // The last posting has the total; a refund has no beginning and sorts after those that have one. A refund by an operator is not
        // a part of the cost.
        let rows = sqlx::query(
            "SELECT requested.id, last.cost, last.used_until
             FROM unnest($1::uuid[]) AS requested (id) CROSS JOIN LATERAL (
                 SELECT cost, used_until FROM ledger WHERE allocation = requested.id AND kind <> 'allocation_refund'
                 ORDER BY used_from DESC NULLS FIRST LIMIT 1
             ) AS last",
        )
        .bind(allocations)
        .fetch_all(&self.pool)
        .await;
        let cost = |row: &PgRow| {
            let cost = row.try_get::<Option<i64>, _>("cost")?.unwrap_or(0);
            Ok((
                row.try_get("id")?,
                AllocationCost { cost: MicroAmount::of(cost), billed_until: row.try_get("used_until")? },
            ))
        };
        let costs: Result<_, sqlx::Error> = rows.and_then(|rows| rows.iter().map(cost).collect());
        costs.doing("reading what allocations have cost")
    }

    /// Recomputes every balance from its entries, in one snapshot of the database, and compares it with the account's own.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn verify_ledger(&self) -> Result<LedgerReport, StoreError> {
        let begun = begin(&self.pool, "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY").await;
        let mut snapshot = begun.doing("beginning to verify the ledger")?;
        // Without a timeout; nothing waits for a reader.
        let unbounded = sqlx::query("SET LOCAL statement_timeout = 0").execute(&mut *snapshot).await;
        unbounded.doing("beginning to verify the ledger")?;
        let rows = sqlx::query(ACCOUNTS).fetch_all(&mut *snapshot).await.doing("adding up the ledger")?;
        let books = sqlx::query(
            "SELECT currency, book, sum(amount)::bigint AS amount FROM ledger_entry GROUP BY currency, book",
        )
        .fetch_all(&mut *snapshot)
        .await
        .doing("adding up the books")?;
        let mut report = LedgerReport::default();
        for row in &rows {
            report.accounts += 1;
            let found = discrepancy(row).doing("adding up the ledger")?;
            report.postings += found.postings.unsigned_abs();
            let agrees = found.believed == Some(found.entries) && found.believed_postings == Some(found.postings);
            if !agrees || found.out_of_line != 0 {
                report.disagreements.push(found);
            }
        }
        for row in &books {
            let (currency, book): (String, String) = (
                row.try_get("currency").doing("adding up the books")?,
                row.try_get("book").doing("adding up the books")?,
            );
            let amount = row.try_get("amount").doing("adding up the books")?;
            report.books.entry(currency).or_default().insert(book, amount);
        }
        Ok(report)
    }

    /// The total difference between the balances of these shards' accounts and of their last postings: cheap enough for a periodic
    /// metric. A change of an earlier posting does not show here; [`Reads::verify_ledger`] finds it.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn ledger_difference(&self, shards: &[Shard]) -> Result<i64, StoreError> {
        let apart: Result<i64, _> = sqlx::query_scalar(
            "SELECT coalesce(sum(abs((entity.body->>'balance')::bigint - coalesce(last.balance, 0))), 0)::bigint
             FROM entity LEFT JOIN LATERAL (
                 SELECT balance FROM ledger WHERE account = entity.id ORDER BY number DESC LIMIT 1
             ) AS last ON true
             WHERE entity.kind = 'billing_account' AND entity.shard = ANY ($1)",
        )
        .bind(shards.iter().map(|shard| i16::from(shard.0)).collect::<Vec<_>>())
        .fetch_one(&self.pool)
        .await;
        apart.doing("comparing balances with the ledger")
    }
}

/// Each account with its postings, and each account of a posting.
const ACCOUNTS: &str = "
    WITH line AS (
        SELECT account, number, balance,
               CASE WHEN debit = 'prepaid' THEN -amount WHEN credit = 'prepaid' THEN amount ELSE 0 END AS effect
        FROM ledger
    ), run AS (
        SELECT account, effect, number <> row_number() OVER own OR balance <> sum(effect) OVER own AS is_out_of_line
        FROM line WINDOW own AS (PARTITION BY account ORDER BY number)
    ), summed AS (
        SELECT account, sum(effect)::bigint AS entries, count(*) AS postings, count(*) FILTER (WHERE is_out_of_line) AS out_of_line
        FROM run GROUP BY account
    ), believed AS (
        SELECT id, (body->>'balance')::bigint AS balance, (body->>'postings')::bigint AS postings
        FROM entity WHERE kind = 'billing_account'
    )
    SELECT coalesce(believed.id, summed.account) AS account, believed.balance AS believed,
           coalesce(summed.entries, 0) AS entries, believed.postings AS believed_postings,
           coalesce(summed.postings, 0) AS postings, coalesce(summed.out_of_line, 0) AS out_of_line
    FROM believed FULL JOIN summed ON summed.account = believed.id ORDER BY 1";

fn discrepancy(row: &PgRow) -> Result<LedgerDiscrepancy, sqlx::Error> {
    Ok(LedgerDiscrepancy {
        account: row.try_get("account")?,
        believed: row.try_get("believed")?,
        entries: row.try_get("entries")?,
        believed_postings: row.try_get("believed_postings")?,
        postings: row.try_get("postings")?,
        out_of_line: row.try_get("out_of_line")?,
    })
}

/// The effect of a posting on its account's balance.
pub(super) const EFFECT: &str =
    "CASE WHEN debit = 'prepaid' THEN -amount WHEN credit = 'prepaid' THEN amount ELSE 0 END";

impl LedgerRow {
    pub(super) fn select() -> QueryBuilder<Postgres> {
        QueryBuilder::new(format!(
            "SELECT number, kind, amount, currency, balance, allocation, used_from, used_until, payment, reference, reason, at,
                    {EFFECT} AS effect
             FROM ledger"
        ))
    }

    pub(super) fn of(row: &PgRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            number: row.try_get("number")?,
            kind: row.try_get("kind")?,
            effect: MicroAmount::of(row.try_get("effect")?),
            amount: MicroAmount::of(row.try_get("amount")?),
            currency: row.try_get("currency")?,
            balance: MicroAmount::of(row.try_get("balance")?),
            allocation: row.try_get::<Option<Uuid>, _>("allocation")?.map(AllocationId),
            used_from: row.try_get("used_from")?,
            used_until: row.try_get("used_until")?,
            payment: row.try_get::<Option<Uuid>, _>("payment")?.map(PaymentId),
            reference: row.try_get("reference")?,
            reason: row.try_get("reason")?,
            at: row.try_get("at")?,
        })
    }
}
