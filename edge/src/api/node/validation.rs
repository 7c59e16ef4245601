//! Validations of a node's machine with load.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use chrono::{DateTime, Utc};
use domain::node::{Node, NodeValidation, Request};
use domain::validation::ValidationLevel;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;
use uuid::Uuid;

use super::tasks::{TaskView, shown};
use crate::api::idempotency::request_layer::Idempotent;
use crate::api::request_context::AdminRequest;
use crate::api::request_fields::Reason;
use crate::app_state::AppState;
use crate::http::error::ApiError;
use crate::http::request_body::{self, Path};

/// A validation with load.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct ValidationOrder {
    level: Level,
    reason: Reason,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize, ToSchema)]
#[schema(as = ValidationLevel)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum Level {
    /// About ten seconds.
    Quick,
    /// As long as policy `node.deep_validation_seconds` says, on all CPUs and half of the free memory.
    Deep,
}

/// The last validation of a node with load, as the minimums of its SKU judged it then.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeValidation)]
pub(super) struct ValidationView {
    task_id: Uuid,
    level: Level,
    ended_at: DateTime<Utc>,
    passed: bool,
    /// By name, which ends in the unit; of several GPUs the lowest.
    measurements: BTreeMap<&'static str, u64>,
    /// Tests that were not made, with the reason.
    not_tested: BTreeMap<String, String>,
    /// Why it was not passed.
    shortfalls: Vec<String>,
}

impl From<Level> for ValidationLevel {
    fn from(level: Level) -> Self {
        match level {
            Level::Quick => Self::Quick,
            Level::Deep => Self::Deep,
        }
    }
}

impl Level {
    pub(super) const fn of(level: ValidationLevel) -> Self {
        match level {
            ValidationLevel::Quick => Self::Quick,
            ValidationLevel::Deep => Self::Deep,
        }
    }
}

impl ValidationView {
    pub(super) fn of(validation: &NodeValidation) -> Self {
        Self {
            task_id: validation.task_id.0,
            level: Level::of(validation.level),
            ended_at: validation.ended_at,
            passed: validation.is_passed(),
            measurements: validation.measurements.iter().map(|(it, value)| (it.name(), *value)).collect(),
            not_tested: validation.not_tested.clone(),
            shortfalls: validation.shortfalls.clone(),
        }
    }
}

/// Tests a node's machine under load.
///
/// For a node without allocations, which gets none before the validation ends. A machine below a minimum of its SKU, or with a failed test, is
/// quarantined until it passes a later one that is at least as strict.
#[utoipa::path(
    post,
    path = "/",
    request_body = ValidationOrder,
    responses((status = 201, description = "The task, to be read where the node's tasks are.", body = TaskView)),
)]
pub(in crate::api) async fn validate(
    AdminRequest(context): AdminRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    Idempotent(request_body::Json(order)): Idempotent<request_body::Json<ValidationOrder>>,
) -> Result<Response, ApiError> {
    let command = Request::Validate { level: order.level.into(), reason: order.reason.to_string() };
    let answered = context.ask::<Node>(id, command).await?;
    shown(&app, StatusCode::CREATED, &answered)
}
