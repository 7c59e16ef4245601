//! The fleet hour by hour (deploy/decisions/0106): GPUs as they were counted once in each hour, and the rentals and the revenue of each hour,
//! added up after its end from what is stored.
//!
//! Each hour is written once, by the member that comes first: the row of `fleet_hour` decides, in the statement that writes the rest. What
//! is added up follows from stored rows alone, so an hour in which no member ran is added up later. GPUs cannot be counted later: such
//! an hour has none, and shows as a gap.

use crate::error::{OperationContext, StoreError};
use chrono::{DateTime, DurationRound as _, TimeDelta};
use domain::id::SkuId;
use domain::state_machine::Timestamp;
use sqlx::postgres::PgRow;
use sqlx::{PgPool, Row};
use std::collections::BTreeMap;
use uuid::Uuid;

/// How long before its hour a rental that begins in it may have been requested: longer than one may wait for capacity (policy
/// `allocation.queue_max_seconds`, a week at most), and be provisioned.
const REQUESTED_WITHIN: TimeDelta = TimeDelta::days(8);

/// Hours whose rows are deleted in one statement.
const DELETED_AT_ONCE: i64 = 500;

/// The GPUs of one SKU in one region, as they were counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HourlyGpus {
    pub sku_id: SkuId,
    pub sku: String,
    pub region_code: String,
    pub total: u64,
    /// Held by an allocation, or without a clean-up proof after one.
    pub held: u64,
    /// What new allocations could get in total.
    pub free: u64,
}

/// The rentals that became active in one hour.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RentalCounts {
    pub begun: u64,
    /// From the request until the allocation was active.
    pub p50_seconds: f64,
    pub p95_seconds: f64,
}

/// A part of the fleet that has a row of its own: a SKU, a region, both, or neither.
type Part = (Uuid, String);

/// The beginning of the hour of an instant.
#[must_use]
pub fn hour_of(at: Timestamp) -> Timestamp {
    // Only instants at the ends of the calendar cannot be truncated.
    at.duration_trunc(TimeDelta::hours(1)).unwrap_or(at)
}

/// See the module.
#[derive(Clone, Debug)]
pub struct FleetHistory {
    pool: PgPool,
}

impl FleetHistory {
    #[must_use]
    pub const fn new(pool: PgPool) -> Self {
        Self { pool }
    }

    /// Whether the GPUs were counted in this hour.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn has_gpus(&self, hour: Timestamp) -> Result<bool, StoreError> {
        sqlx::query_scalar("SELECT EXISTS (SELECT FROM fleet_hour WHERE hour = $1 AND gpus_at IS NOT NULL)")
            .bind(hour)
            .fetch_one(&self.pool)
            .await
            .doing("looking whether the GPUs of an hour are counted")
    }

    /// Stores the GPUs of an hour. Returns false where another member has stored them: its count stays.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn store_gpus(
        &self,
        hour: Timestamp,
        counted_at: Timestamp,
        gpus: &[HourlyGpus],
    ) -> Result<bool, StoreError> {
        let number = |of: fn(&HourlyGpus) -> u64| -> Vec<i64> {
            gpus.iter().map(|sample| i64::try_from(of(sample)).unwrap_or(i64::MAX)).collect()
        };
        let stored: i64 = sqlx::query_scalar(
            "WITH claimed_hour AS (
                 INSERT INTO fleet_hour (hour, gpus_at) VALUES ($1, $2)
                 ON CONFLICT (hour) DO UPDATE SET gpus_at = excluded.gpus_at WHERE fleet_hour.gpus_at IS NULL
                 RETURNING hour),
             gpus AS (
                 INSERT INTO fleet_hour_gpus (hour, sku, sku_name, region, gpus_total, gpus_held, gpus_free)
                 SELECT claimed_hour.hour, counted.* FROM claimed_hour
                 CROSS JOIN unnest($3::uuid[], $4::text[], $5::text[], $6::bigint[], $7::bigint[], $8::bigint[]) AS counted)
             SELECT count(*) FROM claimed_hour",
        )
        .bind(hour)
        .bind(counted_at)
        .bind(gpus.iter().map(|sample| sample.sku_id.0).collect::<Vec<_>>())
        .bind(gpus.iter().map(|sample| sample.sku.as_str()).collect::<Vec<_>>())
        .bind(gpus.iter().map(|sample| sample.region_code.as_str()).collect::<Vec<_>>())
        .bind(number(|sample| sample.total))
        .bind(number(|sample| sample.held))
        .bind(number(|sample| sample.free))
        .fetch_one(&self.pool)
        .await
        .doing("storing the GPUs of an hour")?;
        Ok(stored > 0)
    }

    /// The hours from one up to another that are not added up and not postponed, oldest first, at most `most`.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn hours_to_add_up(
        &self,
        from: Timestamp,
        until: Timestamp,
        postponed: &[Timestamp],
        most: u32,
    ) -> Result<Vec<Timestamp>, StoreError> {
        sqlx::query_scalar(
            "SELECT hour FROM generate_series($1::timestamptz, $2::timestamptz - interval '1 hour', interval '1 hour') AS wanted (hour)
             WHERE hour <> ALL ($4)
             EXCEPT SELECT hour FROM fleet_hour WHERE hour >= $1 AND hour < $2 AND added_up_at IS NOT NULL
             ORDER BY hour LIMIT $3",
        )
        .bind(from)
        .bind(until)
        .bind(i64::from(most))
        .bind(postponed)
        .fetch_all(&self.pool)
        .await
        .doing("looking for hours that are not added up")
    }

    /// Adds up the rentals and the revenue of an hour that has ended. Returns false where another member has done it.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn add_up(&self, hour: Timestamp, now: Timestamp) -> Result<bool, StoreError> {
        let rentals: Vec<_> = self.rentals_of(hour).await?.into_iter().collect();
        let column = |of: fn(&RentalCounts) -> f64| -> Vec<f64> { rentals.iter().map(|(_, row)| of(row)).collect() };
        let begun: Vec<_> = rentals.iter().map(|(_, row)| i64::try_from(row.begun).unwrap_or(i64::MAX)).collect();
        let added: i64 = sqlx::query_scalar(
            "WITH claimed_hour AS (
                 INSERT INTO fleet_hour (hour, added_up_at) VALUES ($1, $2)
                 ON CONFLICT (hour) DO UPDATE SET added_up_at = excluded.added_up_at WHERE fleet_hour.added_up_at IS NULL
                 RETURNING hour),
             rentals AS (
                 INSERT INTO fleet_hour_rentals (hour, sku, region, begun, p50_seconds, p95_seconds)
                 SELECT claimed_hour.hour, counted.* FROM claimed_hour
                 CROSS JOIN unnest($3::uuid[], $4::text[], $5::bigint[], $6::float8[], $7::float8[]) AS counted),
             posted AS (
                 SELECT allocation, currency, sum(CASE WHEN credit = 'revenue' THEN amount ELSE -amount END) AS amount
                 FROM ledger
                 WHERE at >= $1 AND at < $1 + interval '1 hour' AND 'revenue' IN (debit, credit)
                 GROUP BY allocation, currency),
             placed AS (
                 SELECT posted.*, allocation.sku,
                        CASE WHEN node.kind = 'node' THEN node.body #>> '{registration,region_code}' END AS region
                 FROM posted
                 LEFT JOIN entity AS allocation ON allocation.id = posted.allocation AND allocation.kind = 'allocation'
                 LEFT JOIN entity AS node ON node.id = CASE
                     WHEN coalesce(allocation.body #>> '{phase,node_id}', allocation.body #>> '{phase,last,0}') ~ $8
                     THEN coalesce(allocation.body #>> '{phase,node_id}', allocation.body #>> '{phase,last,0}')::uuid
                 END),
             revenue AS (
                 INSERT INTO fleet_hour_revenue (hour, currency, sku, region, amount)
                 SELECT claimed_hour.hour, currency, coalesce(sku, $9), coalesce(region, ''), sum(amount)::bigint
                 FROM claimed_hour CROSS JOIN placed GROUP BY claimed_hour.hour, currency, coalesce(sku, $9), coalesce(region, ''))
             SELECT count(*) FROM claimed_hour",
        )
        .bind(hour)
        .bind(now)
        .bind(rentals.iter().map(|((sku, _), _)| *sku).collect::<Vec<_>>())
        .bind(rentals.iter().map(|((_, region), _)| region.as_str()).collect::<Vec<_>>())
        .bind(begun)
        .bind(column(|row| row.p50_seconds))
        .bind(column(|row| row.p95_seconds))
        .bind(UUID_PATTERN)
        .bind(Uuid::nil())
        .fetch_one(&self.pool)
        .await
        .doing("adding up the revenue of an hour")?;
        Ok(added > 0)
    }

    /// The rentals that became active in an hour, for each part of the fleet. A row that cannot be read is left out and logged: one
    /// altered snapshot keeps no hour from being added up.
    async fn rentals_of(&self, hour: Timestamp) -> Result<BTreeMap<Part, RentalCounts>, StoreError> {
        const DOING: &str = "reading the rentals of an hour";
        // Snapshots have their instants as RFC 3339 in UTC, so that its first 13 characters are the hour.
        let rows = sqlx::query(
            "SELECT allocation.id, allocation.sku, allocation.body ->> 'requested_at' AS requested_at,
                    allocation.body ->> 'active_at' AS active_at,
                    CASE WHEN node.kind = 'node' THEN node.body #>> '{registration,region_code}' END AS region
             FROM entity AS allocation
             LEFT JOIN entity AS node ON node.id = CASE
                 WHEN coalesce(allocation.body #>> '{phase,node_id}', allocation.body #>> '{phase,last,0}') ~ $4
                 THEN coalesce(allocation.body #>> '{phase,node_id}', allocation.body #>> '{phase,last,0}')::uuid
             END
             WHERE allocation.kind = 'allocation' AND allocation.created_at >= $1 AND allocation.created_at < $2
               AND left(allocation.body ->> 'active_at', 13) = $3",
        )
        .bind(hour - REQUESTED_WITHIN)
        .bind(hour + TimeDelta::hours(1))
        .bind(hour.format("%Y-%m-%dT%H").to_string())
        .bind(UUID_PATTERN)
        .fetch_all(&self.pool)
        .await
        .doing(DOING)?;
        let mut waits: BTreeMap<Part, Vec<f64>> = BTreeMap::new();
        for row in &rows {
            let Some((sku, region, seconds)) = rental(row).doing(DOING)? else {
                let allocation: Uuid = row.try_get("id").doing(DOING)?;
                tracing::warn!(
                    allocation.id = %allocation,
                    "allocation {allocation} cannot be read; the rentals of the hour are counted without it"
                );
                continue;
            };
            for part in parts(sku, region) {
                waits.entry(part).or_default().push(seconds);
            }
        }
        Ok(waits.into_iter().map(|(part, seconds)| (part, counts(seconds))).collect())
    }

    /// Deletes a batch of hours that began before an instant. Returns how many; 0 where none is left.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn delete_before(&self, before: Timestamp) -> Result<u64, StoreError> {
        let deleted: i64 = sqlx::query_scalar(
            "WITH old AS MATERIALIZED (SELECT hour FROM fleet_hour WHERE hour < $1 ORDER BY hour LIMIT $2),
             gpus AS (DELETE FROM fleet_hour_gpus WHERE hour IN (SELECT hour FROM old)),
             rentals AS (DELETE FROM fleet_hour_rentals WHERE hour IN (SELECT hour FROM old)),
             revenue AS (DELETE FROM fleet_hour_revenue WHERE hour IN (SELECT hour FROM old)),
             gone AS (DELETE FROM fleet_hour WHERE hour IN (SELECT hour FROM old) RETURNING hour)
             SELECT count(*) FROM gone",
        )
        .bind(before)
        .bind(DELETED_AT_ONCE)
        .fetch_one(&self.pool)
        .await
        .doing("deleting old hours of the fleet")?;
        Ok(deleted.unsigned_abs())
    }
}

/// What a UUID looks like: text of another form, in an altered snapshot, is not cast.
const UUID_PATTERN: &str = "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$";

/// The SKU, the region and the seconds until it was active of a rental; `None` where the snapshot cannot be read.
fn rental(row: &PgRow) -> Result<Option<(Uuid, Option<String>, f64)>, sqlx::Error> {
    let (sku, region): (Option<Uuid>, Option<String>) = (row.try_get("sku")?, row.try_get("region")?);
    let instant = |name: &str| -> Result<Option<Timestamp>, sqlx::Error> {
        let text: Option<String> = row.try_get(name)?;
        Ok(text.and_then(|text| DateTime::parse_from_rfc3339(&text).ok()).map(|at| at.to_utc()))
    };
    let (requested_at, active_at) = (instant("requested_at")?, instant("active_at")?);
    let seconds = requested_at.zip(active_at).map(|(from, to)| (to - from).num_milliseconds().max(0) as f64 / 1000.0);
    Ok(sku.zip(seconds).map(|(sku, seconds)| (sku, region, seconds)))
}

/// The parts of the fleet that a rental counts in.
fn parts(sku: Uuid, region: Option<String>) -> Vec<Part> {
    let of_all = [(Uuid::nil(), String::new()), (sku, String::new())];
    let of_region = region.map(|region| [(Uuid::nil(), region.clone()), (sku, region)]);
    of_all.into_iter().chain(of_region.into_iter().flatten()).collect()
}

fn counts(mut seconds: Vec<f64>) -> RentalCounts {
    seconds.sort_by(f64::total_cmp);
    RentalCounts {
        begun: seconds.len() as u64,
        p50_seconds: percentile(&seconds, 50),
        p95_seconds: percentile(&seconds, 95),
    }
}

/// The nearest rank: the smallest value that at least so many percent do not exceed.
fn percentile(ascending: &[f64], percent: usize) -> f64 {
    let rank = (ascending.len() * percent).div_ceil(100).max(1);
    ascending.get(rank - 1).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentile_is_a_measured_value_of_the_nearest_rank() {
        let of = |seconds: &[f64]| (percentile(seconds, 50), percentile(seconds, 95));
        assert_eq!(of(&[7.0]), (7.0, 7.0));
        assert_eq!(of(&[1.0, 9.0]), (1.0, 9.0));
        let hundred: Vec<_> = (1..=100).map(f64::from).collect();
        assert_eq!(of(&hundred), (50.0, 95.0));
        assert_eq!(of(&hundred[..20]), (10.0, 19.0));
    }

    #[test]
    fn rental_counts_in_its_sku_its_region_both_and_the_whole() {
        let (sku, all) = (Uuid::from_u128(1), Uuid::nil());
        let expected = [(all, ""), (sku, ""), (all, "eu"), (sku, "eu")].map(|(sku, region)| (sku, region.to_owned()));
        assert_eq!(parts(sku, Some("eu".to_owned())), expected);
        assert_eq!(parts(sku, None), expected[..2]);
    }

    #[test]
    fn hour_of_an_instant_is_its_beginning() {
        let at = DateTime::parse_from_rfc3339("2026-11-29T23:59:59.999999Z").unwrap().to_utc();
        assert_eq!(hour_of(at).to_rfc3339(), "2026-11-29T23:00:00+00:00");
    }
}
