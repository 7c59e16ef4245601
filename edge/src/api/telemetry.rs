//! The load of the nodes, and of an allocation's GPUs.

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use domain::allocation::Phase;
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use super::allocation::visible;
use super::request_context::{AdminRequest, UserRequest};
use crate::app_state::AppState;
use crate::app_state::read_model::CurrentEntity;
use crate::fleet_telemetry::{FleetReport, NodeSample};
use crate::http::error::ApiError;
use crate::http::request_body::Path;

/// The load of an allocation's GPUs.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct AllocationTelemetry {
    allocation_id: Uuid,
    /// When the node reported it; null where there is no report since the allocation is active. Older than some minutes, it says that the
    /// node does not report.
    at: Option<DateTime<Utc>>,
    /// The GPUs of the allocation, and no others of the node; empty unless it is active.
    gpus: Vec<GpuTelemetryView>,
}

/// The load of one GPU; what is not known is null.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = GpuTelemetry)]
pub(super) struct GpuTelemetryView {
    index: u32,
    uuid: String,
    model: Option<String>,
    utilization_percent: Option<u32>,
    memory_total_mib: Option<u64>,
    memory_used_mib: Option<u64>,
    temperature_celsius: Option<u32>,
    power_watts: Option<f64>,
}

/// The load of all nodes by SKU and region, and the nodes that do not report.
///
/// It is of the last heartbeats that the members of the cluster have received, and is not stored.
#[utoipa::path(get, path = "/", responses((status = 200, description = "The load.", body = FleetReport)))]
pub(super) async fn fleet(_: AdminRequest, State(app): State<AppState>) -> Result<Json<FleetReport>, ApiError> {
    Ok(Json(app.fleet_report().await?))
}

/// The load of your allocation's GPUs, as its node reported it last.
#[utoipa::path(get, path = "/", responses((status = 200, description = "The load.", body = AllocationTelemetry)))]
pub(super) async fn of_allocation(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
) -> Result<Json<AllocationTelemetry>, ApiError> {
    let CurrentEntity { it, .. } = visible(&app, &context, id).await?;
    let (node_id, placed) = match &it.phase {
        Phase::Active { node_id, placed } => (*node_id, placed),
        Phase::Requested { .. }
        | Phase::Provisioning { .. }
        | Phase::Releasing { .. }
        | Phase::ReleaseFailed { .. }
        | Phase::Released { .. } => {
            return Ok(Json(AllocationTelemetry { allocation_id: id, at: None, gpus: Vec::new() }));
        }
    };
    let load = app.runtime.node_load(node_id).await;
    // What was measured before is of another tenant.
    let load = load.filter(|load| it.active_at.is_some_and(|active_at| load.received_at >= active_at));
    let gpus = placed.devices.iter().map(|device| gpu_view(device.index, &device.uuid, load.as_ref()));
    Ok(Json(AllocationTelemetry {
        allocation_id: id,
        gpus: gpus.collect(),
        at: load.as_ref().map(|load| load.received_at),
    }))
}

fn gpu_view(index: u32, uuid: &str, load: Option<&NodeSample>) -> GpuTelemetryView {
    let gpu = load.and_then(|load| load.gpus.iter().find(|gpu| gpu.uuid == uuid));
    GpuTelemetryView {
        index,
        uuid: uuid.to_owned(),
        model: gpu.map(|gpu| gpu.model.clone()),
        utilization_percent: gpu.and_then(|gpu| gpu.utilization_percent),
        memory_total_mib: gpu.map(|gpu| gpu.memory_mib),
        memory_used_mib: gpu.and_then(|gpu| gpu.memory_used_mib),
        temperature_celsius: gpu.and_then(|gpu| gpu.temperature_celsius),
        power_watts: gpu.and_then(|gpu| gpu.power_milliwatts).map(|milliwatts| f64::from(milliwatts) / 1000.0),
    }
}
