//! How many GPUs are free, by SKU and region.

use axum::extract::State;
use axum::{Extension, Json};
use chrono::{DateTime, Utc};
use persistence::StoreError;
use serde::Serialize;
use std::time::Duration;
use utoipa::ToSchema;
use uuid::Uuid;

use super::cached_read::CachedRead;
use super::request_context::UserRequest;
use crate::app_state::AppState;
use crate::http::error::ApiError;

/// How long a count is cached. Counting reads every node, so each replica does it at most this often.
const CACHE_TTL: Duration = Duration::from_secs(5);

/// Free GPUs at one moment.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(super) struct Capacity {
    /// When the nodes were counted.
    at: DateTime<Utc>,
    /// One for each SKU and region with nodes, by name and region. Only SKUs that can be rented.
    items: Vec<FreeGpus>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub(super) struct FreeGpus {
    sku_id: Uuid,
    sku: String,
    region_code: String,
    /// The GPUs that new allocations can get in total.
    gpus_free: u64,
    /// The most that one allocation can get, since its GPUs are on one node.
    largest_free: u64,
}

/// The cached count of this replica.
#[derive(Clone)]
pub(super) struct CapacityCache(CachedRead<Capacity, StoreError>);

impl Default for CapacityCache {
    fn default() -> Self {
        Self(CachedRead::with_ttl(CACHE_TTL))
    }
}

/// How many GPUs are free, by SKU and region.
///
/// A count is at most 5 s old, and reserves nothing: an allocation may be refused all the same.
#[utoipa::path(get, path = "/", responses((status = 200, description = "The free GPUs.", body = Capacity)))]
pub(super) async fn free(
    _: UserRequest,
    State(app): State<AppState>,
    Extension(CapacityCache(counted)): Extension<CapacityCache>,
) -> Result<Json<Capacity>, ApiError> {
    Ok(Json(counted.get(count_free_gpus(&app)).await?))
}

async fn count_free_gpus(app: &AppState) -> Result<Capacity, StoreError> {
    let at = app.environment.now();
    let gpus = app.reads.gpus().await?;
    let shown = |of: persistence::queries::GpuCount| FreeGpus {
        sku_id: of.sku_id.0,
        sku: of.sku,
        region_code: of.region_code,
        gpus_free: of.free,
        largest_free: of.largest_free,
    };
    Ok(Capacity { at, items: gpus.into_iter().filter(|of| of.is_rentable).map(shown).collect() })
}
