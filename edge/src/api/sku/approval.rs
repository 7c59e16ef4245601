//! Approvals of a SKU's status by two people; each request is one approval (decisions 7).

use actors::{AskError, CommandReply};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use domain::SkuId;
use domain::authz::PlatformRole;
use domain::sku::{
    Approval, ApprovalContext, ApprovalRequest, Command, PendingChange, Rejection, Sku, SkuUsage, StatusChange,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::{SkuView, sku_response};
use crate::api::idempotency::request_layer::Idempotent;
use crate::api::platform_role::PlatformRoleName;
use crate::api::rejection_response::not_answered;
use crate::api::request_context::{ApproveSkus, Authorized, RequestContext, grant_of};
use crate::api::request_fields::{Reason, Statement};
use crate::app_state::AppState;
use crate::app_state::read_model::find;
use crate::http::error::ApiError;
use crate::http::request_body::{self, Path};

/// How often an approval is retried where a concurrent one changes the SKU.
const MAX_ATTEMPTS: u32 = 5;

/// One person's approval of a SKU's change of status.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct SkuDecision {
    reason: Reason,
    /// The platform role in which it is given. Left out: the one that the caller holds; of both, the one that is missing.
    role: Option<ApprovalRole>,
    /// For the deactivation of a SKU in use, from one of the two: who is affected.
    impact_review: Option<Statement>,
    /// For the deactivation of a SKU in use, from one of the two: the way back.
    rollback_plan: Option<Statement>,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum ApprovalRole {
    PlatformOperations,
    InventoryOwner,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Approval)]
pub(in crate::api) struct ApprovalView {
    change: SkuStatusChange,
    role: PlatformRoleName,
    /// `user:…`
    actor: String,
    at: DateTime<Utc>,
    reason: String,
    impact_review: Option<String>,
    rollback_plan: Option<String>,
    /// Until when it waits for the second approval; null where both exist.
    expires_at: Option<DateTime<Utc>>,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum SkuStatusChange {
    Activate,
    Deprecate,
    Deactivate,
}

/// A route for each change of a SKU's status: its name, the change, the description of status 200, and its own description.
macro_rules! approvals {
    ($($(#[doc = $doc:tt])+ $name:ident: $change:ident, $done:tt;)+) => {$(
        $(#[doc = $doc])+
        #[utoipa::path(
            post,
            path = "/",
            request_body = SkuDecision,
            responses(
                (status = 200, description = $done, body = SkuView),
                (status = 202, description = "The SKU; the second approval is missing.", body = SkuView),
            ),
        )]
        pub(in crate::api) async fn $name(
            authorized: Authorized<ApproveSkus>,
            app: State<AppState>,
            id: Path<Uuid>,
            decision: Idempotent<request_body::Json<SkuDecision>>,
        ) -> Result<impl IntoResponse, ApiError> {
            approve(StatusChange::$change, authorized, app, id, decision).await
        }
    )+};
}

approvals! {
    /// Approves that nodes and allocations may refer to a SKU.
    ///
    /// It takes two people, one in role `platform_operations` and one in role `inventory_owner`: 202 until both have approved, then 200. A
    /// pending approval of the opposite (to deactivate an active SKU) is withdrawn.
    activate: Activate, "The SKU, active.";

    /// Approves that a SKU is on its way out.
    ///
    /// As for its activation, two people have to approve. No node is registered for it any more, and it is not listed; users who know its
    /// name can rent it while its nodes last.
    deprecate: Deprecate, "The SKU, deprecated.";

    /// Approves that a SKU is taken out of the offer.
    ///
    /// As for its activation, two people have to approve. Running allocations go on; where nodes or allocations refer to the SKU, one of
    /// the two says in `impact_review` and `rollback_plan` what that means.
    deactivate: Deactivate, "The SKU, inactive.";
}

/// Reads what the SKU entity cannot know itself and sends the approval; where the SKU has changed since the read, it retries.
async fn approve(
    change: StatusChange,
    Authorized { context, .. }: Authorized<ApproveSkus>,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    Idempotent(request_body::Json(decision)): Idempotent<request_body::Json<SkuDecision>>,
) -> Result<Response, ApiError> {
    if let Some(answered) = context.committed_reply::<Sku>()? {
        return approval_response(&context, change, &answered).await;
    }
    let mut attempts = 0;
    loop {
        attempts += 1;
        let given = ApprovalRequest {
            change,
            reason: decision.reason.to_string(),
            role: decision.role.map(PlatformRole::from),
            impact_review: decision.impact_review.as_ref().map(|text| text.to_string()),
            rollback_plan: decision.rollback_plan.as_ref().map(|text| text.to_string()),
            seen: observe(&app, id).await?,
        };
        match context.try_ask::<Sku>(id, Command::Approve(Box::new(given))).await? {
            Err(AskError::Rejected(Rejection::Moved)) if attempts < MAX_ATTEMPTS => {}
            answer => return approval_response(&context, change, &answer.map_err(not_answered)?).await,
        }
    }
}

async fn observe(app: &AppState, id: Uuid) -> Result<ApprovalContext, ApiError> {
    let sku = find::<Sku>(app, id).await?.ok_or_else(|| ApiError::not_found("SKU"))?;
    let first = match &sku.it.pending {
        Some(pending) => grant_of(app, &pending.first.user_id).await?,
        None => None,
    };
    let in_use = app.reads.sku_references(SkuId(id)).await?;
    Ok(ApprovalContext {
        version: sku.version,
        in_use: SkuUsage { nodes: in_use.nodes, allocations: in_use.allocations },
        first,
    })
}

async fn approval_response(
    context: &RequestContext,
    change: StatusChange,
    answered: &CommandReply<Box<Sku>>,
) -> Result<Response, ApiError> {
    let waits = answered.reply.pending.as_ref().is_some_and(|pending| pending.first.change == change);
    let status = if waits { StatusCode::ACCEPTED } else { StatusCode::OK };
    sku_response(context, status, answered).await
}

/// A SKU's approvals: those of its status, and the pending one.
pub(super) fn approvals(sku: &Sku) -> Vec<ApprovalView> {
    let given = sku.approvals.iter().map(|given| approval(given, None));
    let waits = |pending: &PendingChange| approval(&pending.first, Some(pending.until));
    given.chain(sku.pending.iter().map(waits)).collect()
}

fn approval(given: &Approval, expires_at: Option<DateTime<Utc>>) -> ApprovalView {
    ApprovalView {
        change: given.change.into(),
        role: given.role.into(),
        actor: format!("user:{}", given.user_id),
        at: given.at,
        reason: given.reason.clone(),
        impact_review: given.impact_review.clone(),
        rollback_plan: given.rollback_plan.clone(),
        expires_at,
    }
}

impl From<ApprovalRole> for PlatformRole {
    fn from(role: ApprovalRole) -> Self {
        match role {
            ApprovalRole::PlatformOperations => Self::PlatformOperations,
            ApprovalRole::InventoryOwner => Self::InventoryOwner,
        }
    }
}

impl From<StatusChange> for SkuStatusChange {
    fn from(change: StatusChange) -> Self {
        match change {
            StatusChange::Activate => Self::Activate,
            StatusChange::Deprecate => Self::Deprecate,
            StatusChange::Deactivate => Self::Deactivate,
        }
    }
}
