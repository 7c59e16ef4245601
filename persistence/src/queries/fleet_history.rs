//! The fleet hour by hour, as the worker `fleet-history` has stored it.

use super::Reads;
use crate::error::{OperationContext, StoreError};
use crate::fleet_history::{HourlyGpus, RentalCounts};
use domain::id::SkuId;
use domain::money::MicroAmount;
use domain::state_machine::Timestamp;
use sqlx::Row;
use sqlx::postgres::PgRow;
use std::collections::BTreeMap;
use uuid::Uuid;

/// What a currency's revenue account gained in one hour.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CurrencyRevenue {
    pub currency: String,
    pub amount: MicroAmount,
}

/// One hour.
#[derive(Clone, Debug, PartialEq)]
pub struct FleetHour {
    /// Its beginning.
    pub hour: Timestamp,
    /// `None` where the GPUs were not counted.
    pub gpus: Option<Vec<HourlyGpus>>,
    /// `None` where they are not added up; `Some(None)` where none began.
    pub rentals: Option<Option<RentalCounts>>,
    /// `None` where it is not added up; currencies without a posting are left out.
    pub revenue: Option<Vec<CurrencyRevenue>>,
}

/// Which part of the fleet; `None` admits all.
#[derive(Clone, Debug, Default)]
pub struct FleetFilter {
    pub sku: Option<Uuid>,
    pub region: Option<String>,
}

/// Too many rows were asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyRows;

/// The hours of a request, by their beginning.
type FleetHours = BTreeMap<Timestamp, FleetHour>;

const DOING: &str = "reading the history of the fleet";

impl Reads {
    /// The hours that are stored, from one up to another, oldest first. An hour that is not stored is left out.
    ///
    /// # Errors
    /// [`StoreError`]. `Ok(Err(TooManyRows))` where there are more rows of GPUs than `max_rows`.
    pub async fn fleet_hours(
        &self,
        from: Timestamp,
        until: Timestamp,
        filter: &FleetFilter,
        max_rows: u32,
    ) -> Result<Result<Vec<FleetHour>, TooManyRows>, StoreError> {
        // First, since an hour has its rows from the moment on at which it says so.
        let mut hours = self.stored_hours(from, until).await?;
        if self.read_gpus(&mut hours, (from, until), filter, max_rows).await?.is_err() {
            return Ok(Err(TooManyRows));
        }
        self.read_rentals(&mut hours, (from, until), filter).await?;
        self.read_revenue(&mut hours, (from, until), filter).await?;
        Ok(Ok(hours.into_values().collect()))
    }

    async fn stored_hours(&self, from: Timestamp, until: Timestamp) -> Result<FleetHours, StoreError> {
        let rows = sqlx::query(
            "SELECT hour, gpus_at IS NOT NULL AS has_gpus, added_up_at IS NOT NULL AS is_added_up
             FROM fleet_hour WHERE hour >= $1 AND hour < $2 ORDER BY hour",
        )
        .bind(from)
        .bind(until)
        .fetch_all(&self.pool);
        let hours: Result<FleetHours, _> = rows.await.and_then(|rows| rows.iter().map(stored_hour).collect());
        hours.doing(DOING)
    }

    async fn read_gpus(
        &self,
        hours: &mut FleetHours,
        (from, until): (Timestamp, Timestamp),
        filter: &FleetFilter,
        max_rows: u32,
    ) -> Result<Result<(), TooManyRows>, StoreError> {
        let rows = sqlx::query(
            "SELECT hour, sku, sku_name, region, gpus_total, gpus_held, gpus_free FROM fleet_hour_gpus
             WHERE hour >= $1 AND hour < $2 AND ($3::uuid IS NULL OR sku = $3) AND ($4::text IS NULL OR region = $4)
             ORDER BY hour, sku, region LIMIT $5",
        )
        .bind(from)
        .bind(until)
        .bind(filter.sku)
        .bind(filter.region.as_deref())
        .bind(i64::from(max_rows) + 1)
        .fetch_all(&self.pool)
        .await
        .doing(DOING)?;
        if rows.len() > max_rows as usize {
            return Ok(Err(TooManyRows));
        }
        for row in &rows {
            let (hour, sample) = gpu_sample(row).doing(DOING)?;
            if let Some(gpus) = hours.get_mut(&hour).and_then(|stored| stored.gpus.as_mut()) {
                gpus.push(sample);
            }
        }
        Ok(Ok(()))
    }

    async fn read_rentals(
        &self,
        hours: &mut FleetHours,
        (from, until): (Timestamp, Timestamp),
        filter: &FleetFilter,
    ) -> Result<(), StoreError> {
        let rows = sqlx::query(
            "SELECT hour, begun, p50_seconds, p95_seconds FROM fleet_hour_rentals
             WHERE hour >= $1 AND hour < $2 AND sku = $3 AND region = $4",
        )
        .bind(from)
        .bind(until)
        .bind(filter.sku.unwrap_or_default())
        .bind(filter.region.as_deref().unwrap_or_default())
        .fetch_all(&self.pool)
        .await
        .doing(DOING)?;
        for row in &rows {
            let (hour, counts) = rental_counts(row).doing(DOING)?;
            if let Some(rentals) = hours.get_mut(&hour).and_then(|stored| stored.rentals.as_mut()) {
                *rentals = Some(counts);
            }
        }
        Ok(())
    }

    async fn read_revenue(
        &self,
        hours: &mut FleetHours,
        (from, until): (Timestamp, Timestamp),
        filter: &FleetFilter,
    ) -> Result<(), StoreError> {
        let rows = sqlx::query(
            "SELECT hour, currency, sum(amount)::bigint AS amount FROM fleet_hour_revenue
             WHERE hour >= $1 AND hour < $2 AND ($3::uuid IS NULL OR sku = $3) AND ($4::text IS NULL OR region = $4)
             GROUP BY hour, currency ORDER BY hour, currency",
        )
        .bind(from)
        .bind(until)
        .bind(filter.sku)
        .bind(filter.region.as_deref())
        .fetch_all(&self.pool)
        .await
        .doing(DOING)?;
        for row in &rows {
            let (hour, gained) = currency_revenue(row).doing(DOING)?;
            if let Some(revenue) = hours.get_mut(&hour).and_then(|stored| stored.revenue.as_mut()) {
                revenue.push(gained);
            }
        }
        Ok(())
    }
}

fn stored_hour(row: &PgRow) -> Result<(Timestamp, FleetHour), sqlx::Error> {
    let hour: Timestamp = row.try_get("hour")?;
    let (has_gpus, is_added_up): (bool, bool) = (row.try_get("has_gpus")?, row.try_get("is_added_up")?);
    let stored = FleetHour {
        hour,
        gpus: has_gpus.then(Vec::new),
        rentals: is_added_up.then_some(None),
        revenue: is_added_up.then(Vec::new),
    };
    Ok((hour, stored))
}

fn gpu_sample(row: &PgRow) -> Result<(Timestamp, HourlyGpus), sqlx::Error> {
    let number = |name: &str| row.try_get::<i64, _>(name).map(i64::unsigned_abs);
    let sample = HourlyGpus {
        sku_id: SkuId(row.try_get("sku")?),
        sku: row.try_get("sku_name")?,
        region_code: row.try_get("region")?,
        total: number("gpus_total")?,
        held: number("gpus_held")?,
        free: number("gpus_free")?,
    };
    Ok((row.try_get("hour")?, sample))
}

fn rental_counts(row: &PgRow) -> Result<(Timestamp, RentalCounts), sqlx::Error> {
    let counts = RentalCounts {
        begun: row.try_get::<i64, _>("begun")?.unsigned_abs(),
        p50_seconds: row.try_get("p50_seconds")?,
        p95_seconds: row.try_get("p95_seconds")?,
    };
    Ok((row.try_get("hour")?, counts))
}

fn currency_revenue(row: &PgRow) -> Result<(Timestamp, CurrencyRevenue), sqlx::Error> {
    let gained =
        CurrencyRevenue { currency: row.try_get("currency")?, amount: MicroAmount::of(row.try_get("amount")?) };
    Ok((row.try_get("hour")?, gained))
}
