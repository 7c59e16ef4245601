//! How many GPUs are free, by SKU and region.

use axum::extract::State;
use axum::{Extension, Json};
use chrono::{DateTime, Utc};
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::Instant;
use utoipa::ToSchema;
use uuid::Uuid;

use super::request_context::UserRequest;
use crate::http::error::ApiError;
use crate::services::Services;

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
#[derive(Clone, Default)]
pub(super) struct CapacityCache(Arc<Mutex<Option<(Instant, Capacity)>>>);

/// How many GPUs are free, by SKU and region.
///
/// A count is at most 5 s old, and reserves nothing: an allocation may be refused all the same.
#[utoipa::path(get, path = "/", responses((status = 200, description = "The free GPUs.", body = Capacity)))]
pub(super) async fn free(
    _: UserRequest,
    State(services): State<Services>,
    Extension(CapacityCache(last)): Extension<CapacityCache>,
) -> Result<Json<Capacity>, ApiError> {
    // Concurrent requests wait for the same count.
    let mut last = last.lock().await;
    if let Some((counted_at, capacity)) = &*last
        && counted_at.elapsed() < CACHE_TTL
    {
        return Ok(Json(capacity.clone()));
    }
    let capacity = count_free_gpus(&services).await?;
    *last = Some((Instant::now(), capacity.clone()));
    Ok(Json(capacity))
}

async fn count_free_gpus(services: &Services) -> Result<Capacity, ApiError> {
    let at = services.environment.now();
    let gpus = services.reads.gpus().await?;
    let shown = |of: persistence::queries::GpuCount| FreeGpus {
        sku_id: of.sku_id.0,
        sku: of.sku,
        region_code: of.region_code,
        gpus_free: of.free,
        largest_free: of.largest_free,
    };
    Ok(Capacity { at, items: gpus.into_iter().filter(|of| of.is_rentable).map(shown).collect() })
}
