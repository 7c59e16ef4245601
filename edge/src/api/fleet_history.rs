//! The fleet hour by hour: GPUs, rentals and revenue over time (deploy/decisions/0106).

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, TimeDelta, Utc};
use persistence::fleet_history::{HourlyGpus, hour_of};
use persistence::queries::{CurrencyRevenue, FleetFilter, FleetHour, TooManyRows};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::request_context::AdminRequest;
use super::request_fields::{RegionCode, SkuRef, instant_or_none};
use super::sku;
use crate::app_state::AppState;
use crate::http::error::ApiError;
use crate::http::request_body::Query;

/// The hours of one answer: a month.
const MAX_HOURS: i64 = 31 * 24;
/// The hours of an answer to a request without `from`: a week.
const DEFAULT_HOURS: i64 = 7 * 24;
/// The rows of GPUs in one answer: one for each hour, SKU and region.
const MAX_GPU_ROWS: u32 = 10_000;

/// Which hours, of which part of the fleet.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct FleetHistoryQuery {
    /// From the hour of this instant on; a week before `until` where it is left out.
    #[serde(default, deserialize_with = "instant_or_none")]
    from: Option<DateTime<Utc>>,
    /// Up to this instant, at most 31 days after `from`; now where it is left out.
    #[serde(default, deserialize_with = "instant_or_none")]
    until: Option<DateTime<Utc>>,
    /// Of this SKU alone: its name or id.
    sku: Option<SkuRef>,
    /// In this region alone.
    region: Option<RegionCode>,
}

/// The fleet hour by hour.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct FleetHistory {
    /// The beginning of the first hour.
    from: DateTime<Utc>,
    /// The end of the last hour.
    until: DateTime<Utc>,
    /// Every hour of the range, oldest first, also those that were not measured.
    hours: Vec<FleetHourView>,
}

/// One hour. What was not measured is null, which is not zero.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = FleetHour)]
pub(super) struct FleetHourView {
    /// Its beginning.
    hour: DateTime<Utc>,
    /// The GPUs by SKU and region, as they were counted once in the hour; null where they were not.
    gpus: Option<Vec<FleetHourGpus>>,
    /// What began in the hour; null until it is added up, some minutes after its end.
    rentals: Option<FleetHourRentals>,
    /// By currency, null as `rentals`; a currency without a posting is left out.
    revenue: Option<Vec<FleetHourRevenue>>,
}

/// The GPUs of one SKU in one region.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct FleetHourGpus {
    sku_id: Uuid,
    /// Its name at that time.
    sku: String,
    region_code: String,
    gpus_total: u64,
    /// Held by an allocation, or without a clean-up proof after one.
    gpus_held: u64,
    /// The GPUs that new allocations could get in total.
    gpus_free: u64,
    /// Neither held nor free: of nodes that are offline, quarantined or not active yet, or withheld.
    gpus_unavailable: u64,
}

/// The rentals that became active in one hour.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct FleetHourRentals {
    begun: u64,
    /// The median of the seconds from the request until the allocation was active, with the wait for capacity; null where none began.
    active_after_seconds_p50: Option<f64>,
    active_after_seconds_p95: Option<f64>,
}

/// The revenue of one hour in one currency.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct FleetHourRevenue {
    currency: String,
    /// The sum of the hour's postings, in millionths of a minor unit; negative where more was given back than charged.
    revenue_micro: i64,
}

/// The fleet hour by hour: GPUs, rentals and revenue.
///
/// GPUs are counted once in each hour. Rentals and revenue are added up some minutes after the hour's end, also later for an hour in which the
/// service did not run. With `sku` or `region`, revenue is that of allocations of this part; postings without an allocation count in the
/// whole alone. Hours are kept as long as policy `retention.fleet_history_months` says.
#[utoipa::path(
    get,
    path = "/",
    params(FleetHistoryQuery),
    responses((status = 200, description = "The hours.", body = FleetHistory)),
)]
pub(super) async fn fleet_history(
    _: AdminRequest,
    State(app): State<AppState>,
    Query(query): Query<FleetHistoryQuery>,
) -> Result<Json<FleetHistory>, ApiError> {
    let (from, until) = range(query.from, query.until, app.environment.now())?;
    let sku = match &query.sku {
        Some(sku) => Some(sku::id_in_filter(&app, sku).await?),
        None => None,
    };
    let filter = FleetFilter { sku, region: query.region.map(|region| region.to_string()) };
    let stored = app.reads.fleet_hours(from, until, &filter, MAX_GPU_ROWS).await?;
    let stored = stored.map_err(|TooManyRows| {
        ApiError::invalid_request(format!(
            "These hours have more than {MAX_GPU_ROWS} rows of GPUs; ask for fewer hours, or name a `sku` or a `region`."
        ))
        .detail("field", "from")
    })?;
    Ok(Json(FleetHistory { from, until, hours: views(from, until, stored) }))
}

/// Whole hours, at least one.
fn range(
    from: Option<DateTime<Utc>>,
    until: Option<DateTime<Utc>>,
    now: DateTime<Utc>,
) -> Result<(DateTime<Utc>, DateTime<Utc>), ApiError> {
    let refuse =
        |field: &'static str, message: &'static str| Err(ApiError::invalid_request(message).detail("field", field));
    let until = until.unwrap_or(now);
    if from.is_some_and(|from| from >= until) {
        return refuse("from", "Query parameter `from` must be before `until`, which is now where it is left out.");
    }
    let last = hour_of(until);
    let until = if last < until { last.checked_add_signed(TimeDelta::hours(1)) } else { Some(until) };
    let default = || last.checked_sub_signed(TimeDelta::hours(DEFAULT_HOURS));
    let from = from.map_or_else(default, |from| Some(hour_of(from)));
    let Some((from, until)) = from.zip(until) else {
        return refuse(
            "until",
            "Query parameter `until` is at the end of the calendar; name an instant of this service's time.",
        );
    };
    if until - from > TimeDelta::hours(MAX_HOURS) {
        return refuse(
            "from",
            "Query parameter `from` must be at most 31 days before `until`; ask for the rest in further requests.",
        );
    }
    Ok((from, until))
}

/// Every hour of the range, with what is stored of it.
fn views(from: DateTime<Utc>, until: DateTime<Utc>, stored: Vec<FleetHour>) -> Vec<FleetHourView> {
    let mut stored: BTreeMap<_, _> = stored.into_iter().map(|hour| (hour.hour, hour)).collect();
    let hours = std::iter::successors(Some(from), |hour| hour.checked_add_signed(TimeDelta::hours(1)));
    let view = |hour| match stored.remove(&hour) {
        Some(stored) => FleetHourView {
            hour,
            gpus: stored.gpus.map(|gpus| gpus.into_iter().map(FleetHourGpus::from).collect()),
            rentals: stored.rentals.map(|counts| FleetHourRentals {
                begun: counts.map_or(0, |counts| counts.begun),
                active_after_seconds_p50: counts.map(|counts| counts.p50_seconds),
                active_after_seconds_p95: counts.map(|counts| counts.p95_seconds),
            }),
            revenue: stored.revenue.map(|gained| gained.into_iter().map(FleetHourRevenue::from).collect()),
        },
        None => FleetHourView { hour, gpus: None, rentals: None, revenue: None },
    };
    hours.take_while(|hour| *hour < until).map(view).collect()
}

impl From<HourlyGpus> for FleetHourGpus {
    fn from(of: HourlyGpus) -> Self {
        Self {
            sku_id: of.sku_id.0,
            sku: of.sku,
            region_code: of.region_code,
            gpus_total: of.total,
            gpus_held: of.held,
            gpus_free: of.free,
            gpus_unavailable: of.total.saturating_sub(of.held).saturating_sub(of.free),
        }
    }
}

impl From<CurrencyRevenue> for FleetHourRevenue {
    fn from(of: CurrencyRevenue) -> Self {
        Self { currency: of.currency, revenue_micro: of.amount.get() }
    }
}
