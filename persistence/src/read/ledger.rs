//! The ledger as it is read: an account's postings, what allocations have cost, and whether it all adds up.

use super::{Page, Reads, one_more};
use crate::error::{Doing, StoreError};
use crate::pool::begin;
use domain::id::{AllocationId, BillingAccountId, PaymentId, Shard};
use domain::ledger::PostingKind;
use domain::machine::Timestamp;
use domain::money::Micro;
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
    /// What it did to the account's balance.
    pub effect: Micro,
    pub amount: Micro,
    pub currency: String,
    /// After it.
    pub balance: Micro,
    pub allocation: Option<AllocationId>,
    pub used_from: Option<Timestamp>,
    pub used_until: Option<Timestamp>,
    /// The payment that it goes back to.
    pub payment: Option<PaymentId>,
    /// The payment's, the refund's or the reversal's own id.
    pub reference: Option<String>,
    pub reason: Option<String>,
    pub at: Timestamp,
}

/// Which postings. What is `None` admits all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LedgerFilter {
    pub kind: Option<PostingKind>,
    pub allocation: Option<AllocationId>,
    /// After this number.
    pub after: Option<i64>,
    /// Up to this number and with it.
    pub until: Option<i64>,
}

/// What an allocation has cost, as far as that is posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    pub cost: Micro,
    pub billed_until: Option<Timestamp>,
}

/// All accounts in one currency.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Money {
    pub currency: String,
    pub accounts: u64,
    /// Whose next window is not covered.
    pub depleted: u64,
    /// What all of them have together.
    pub balance: Micro,
}

/// What of an account's books does not agree.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Disagreement {
    pub account: Uuid,
    /// What the account believes to have, in millionths; none where there is no such account.
    pub believed: Option<i64>,
    /// The sum of its entries.
    pub entries: i64,
    /// How many postings it believes to have, and how many there are.
    pub believed_postings: Option<i64>,
    pub postings: i64,
    /// Postings whose number or balance does not follow from the one before.
    pub out_of_line: i64,
}

/// What [`Reads::verify_ledger`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct LedgerReport {
    pub accounts: u64,
    pub postings: u64,
    pub disagreements: Vec<Disagreement>,
    /// The sum over all books by currency. Zero, or somebody has changed the form of the table.
    pub books: BTreeMap<String, BTreeMap<String, i64>>,
}

impl LedgerReport {
    /// How far believed and recomputed balances are apart, all together.
    #[must_use]
    pub fn difference(&self) -> i64 {
        let apart = |it: &Disagreement| it.entries.abs_diff(it.believed.unwrap_or(0));
        let all = self.disagreements.iter().map(apart).fold(0, u64::saturating_add);
        i64::try_from(all).unwrap_or(i64::MAX)
    }

    /// Every book of every account, and nothing out of line.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.disagreements.is_empty() && self.books.values().all(|books| books.values().sum::<i64>() == 0)
    }
}

impl Reads {
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
    ) -> Result<Page<LedgerRow, i64>, StoreError> {
        let mut query = LedgerRow::select();
        query.push(" WHERE account = ").push_bind(account.0);
        if let Some(kind) = filter.kind {
            query.push(" AND kind = ").push_bind(kind.name());
            if kind != PostingKind::Usage {
                // The planner does not compare it with a value that is bound.
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
        Ok(Page::of(rows.doing("reading the ledger")?, limit, |row: &LedgerRow| row.number))
    }

    /// What these allocations have cost. One of which nothing is posted is left out.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn costs(&self, allocations: &[Uuid]) -> Result<BTreeMap<Uuid, Cost>, StoreError> {
        // The last posting says it all; what was given back has no beginning and comes after all that has. What an operator gives
        // back later is no cost.
        let rows = sqlx::query(
            "SELECT asked.id, last.cost, last.used_until
             FROM unnest($1::uuid[]) AS asked (id) CROSS JOIN LATERAL (
                 SELECT cost, used_until FROM ledger WHERE allocation = asked.id AND kind <> 'allocation_refund'
                 ORDER BY used_from DESC NULLS FIRST LIMIT 1
             ) AS last",
        )
        .bind(allocations)
        .fetch_all(&self.pool)
        .await;
        let cost = |row: &PgRow| {
            let cost = row.try_get::<Option<i64>, _>("cost")?.unwrap_or(0);
            Ok((row.try_get("id")?, Cost { cost: Micro::of(cost), billed_until: row.try_get("used_until")? }))
        };
        let costs: Result<_, sqlx::Error> = rows.and_then(|rows| rows.iter().map(cost).collect());
        costs.doing("reading what allocations have cost")
    }

    /// What is prepaid, by currency.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn money(&self) -> Result<Vec<Money>, StoreError> {
        let rows = sqlx::query(
            "SELECT body->>'currency' AS currency, count(*) AS accounts, count(*) FILTER (WHERE state <> 'open') AS depleted,
                    sum((body->>'balance')::bigint)::bigint AS balance
             FROM entity WHERE kind = 'billing_account' GROUP BY 1 ORDER BY 1",
        )
        .fetch_all(&self.pool)
        .await;
        let money = |row: &PgRow| {
            Ok(Money {
                currency: row.try_get("currency")?,
                accounts: row.try_get::<i64, _>("accounts")?.unsigned_abs(),
                depleted: row.try_get::<i64, _>("depleted")?.unsigned_abs(),
                balance: Micro::of(row.try_get("balance")?),
            })
        };
        let all: Result<_, sqlx::Error> = rows.and_then(|rows| rows.iter().map(money).collect());
        all.doing("adding up what is prepaid")
    }

    /// Recomputes every balance from its entries, in one snapshot of the database, and compares it with what the account believes.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn verify_ledger(&self) -> Result<LedgerReport, StoreError> {
        let begun = begin(&self.pool, "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY").await;
        let mut snapshot = begun.doing("beginning to verify the ledger")?;
        // As long as it takes; nothing waits for a reader.
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
            let found = disagreement(row).doing("adding up the ledger")?;
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

    /// How far what the accounts of these shards believe is apart from the balance at their last posting, all together: cheap enough to
    /// be had at any time. An earlier posting that was changed does not show here; [`Reads::verify_ledger`] finds it.
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

fn disagreement(row: &PgRow) -> Result<Disagreement, sqlx::Error> {
    Ok(Disagreement {
        account: row.try_get("account")?,
        believed: row.try_get("believed")?,
        entries: row.try_get("entries")?,
        believed_postings: row.try_get("believed_postings")?,
        postings: row.try_get("postings")?,
        out_of_line: row.try_get("out_of_line")?,
    })
}

/// What a posting does to its account's balance.
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
            effect: Micro::of(row.try_get("effect")?),
            amount: Micro::of(row.try_get("amount")?),
            currency: row.try_get("currency")?,
            balance: Micro::of(row.try_get("balance")?),
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
