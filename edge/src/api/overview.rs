//! The whole service at a glance (decisions 7, *Overview*).

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::Serialize;
use std::collections::BTreeMap;
use utoipa::ToSchema;
use uuid::Uuid;

use super::request_context::AdminRequest;
use crate::app_state::AppState;
use crate::app_state::runtime_interface::TreeFilter;
use crate::http::error::ApiError;

/// Counts of all resources, and what needs an operator.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Overview {
    at: DateTime<Utc>,
    /// The number of entities by kind and state.
    entities_by_kind: BTreeMap<String, BTreeMap<String, u64>>,
    gpus: Vec<GpuOverview>,
    /// Prepaid balances by currency.
    money: Vec<MoneyOverview>,
    /// Entities past their deadline.
    overdue: u64,
    /// Parked entities, on the members that answered.
    parked: u64,
    /// Live members that did not answer in time.
    silent_members: Vec<Uuid>,
}

/// The GPUs of one SKU in one region.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct GpuOverview {
    sku_id: Uuid,
    sku: String,
    region_code: String,
    /// Nodes that are not removed, nor about to be.
    nodes: u64,
    gpus_total: u64,
    /// Held by an allocation, or without a clean-up proof after one.
    gpus_held: u64,
    /// The GPUs that new allocations could get in total.
    gpus_free: u64,
}

/// The billing accounts in one currency.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct MoneyOverview {
    currency: String,
    accounts: u64,
    /// Accounts whose next window is not covered.
    depleted: u64,
    /// The sum of all balances, in minor units.
    balance_minor: i64,
}

/// The whole service at a glance.
#[utoipa::path(get, path = "/", responses((status = 200, description = "The overview.", body = Overview)))]
pub(super) async fn overview(_: AdminRequest, State(app): State<AppState>) -> Result<Json<Overview>, ApiError> {
    let summary = app.runtime.tree(TreeFilter { parked: Some(true), limit: Some(1), ..TreeFilter::default() });
    let gpus = async { app.reads.gpus().await.map_err(ApiError::from) };
    let money = async { app.reads.prepaid_totals().await.map_err(ApiError::from) };
    let (summary, gpus, money) = tokio::try_join!(async { summary.await.map_err(ApiError::from) }, gpus, money)?;
    let in_one = |of: persistence::queries::PrepaidTotal| MoneyOverview {
        currency: of.currency,
        accounts: of.accounts,
        depleted: of.depleted,
        balance_minor: of.balance.minor(),
    };
    let shown = |of: persistence::queries::GpuCount| GpuOverview {
        sku_id: of.sku_id.0,
        sku: of.sku,
        region_code: of.region_code,
        nodes: of.nodes,
        gpus_total: of.total,
        gpus_held: of.held,
        gpus_free: of.free,
    };
    Ok(Json(Overview {
        at: app.environment.now(),
        entities_by_kind: summary.entities_by_kind,
        gpus: gpus.into_iter().map(shown).collect(),
        money: money.into_iter().map(in_one).collect(),
        overdue: summary.overdue,
        parked: summary.parked,
        silent_members: summary.silent,
    }))
}
