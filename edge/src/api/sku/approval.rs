//! Two people decide on a SKU's status; each call is one approval (decisions 7).

use actors::{Answered, AskError};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use chrono::{DateTime, Utc};
use domain::SkuId;
use domain::authz::PlatformRole;
use domain::sku::{Approval, Approve, Change, Command, InUse, Pending, Rejection, Seen, Sku};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::{SkuView, view};
use crate::answer::not_answered;
use crate::api::asking::{ApproveSkus, May, granted, replayed};
use crate::api::field::{Reason, Statement};
use crate::api::platform_role::PlatformRoleName;
use crate::api::stored::find;
use crate::body::{self, Path};
use crate::error::ApiError;
use crate::idempotency::keyed::Once;
use crate::services::Services;

/// How often an approval looks at a SKU that others decide on at the same moment.
const LOOKS: u32 = 5;

/// One person's yes to a SKU's change of status.
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
    /// Until when it waits for the second; null where both are there.
    expires_at: Option<DateTime<Utc>>,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum SkuStatusChange {
    Activate,
    Deprecate,
    Deactivate,
}

/// A route for each change of a SKU's status: its name, what is asked for, what it is then, and its description.
macro_rules! approvals {
    ($($(#[doc = $doc:tt])+ $name:ident: $change:ident, $done:tt;)+) => {$(
        $(#[doc = $doc])+
        #[utoipa::path(
            post,
            path = "/",
            params(("id" = Uuid, Path, description = "The SKU's id")),
            request_body = SkuDecision,
            responses(
                (status = 200, description = $done, body = SkuView),
                (status = 202, description = "The SKU; the second approval is missing.", body = SkuView),
            ),
        )]
        pub(in crate::api) async fn $name(
            may: May<ApproveSkus>,
            services: State<Services>,
            id: Path<Uuid>,
            decision: Once<body::Json<SkuDecision>>,
        ) -> Result<impl IntoResponse, ApiError> {
            approve(Change::$change, may, services, id, decision).await
        }
    )+};
}

approvals! {
    /// Approves that nodes and allocations may refer to a SKU.
    ///
    /// It takes two people, one in role `platform_operations` and one in role `inventory_owner`: 202 until both have approved, then 200.
    /// What waits against it (a first approval to deactivate an active SKU) is withdrawn.
    activate: Activate, "The SKU, active.";

    /// Approves that a SKU is on its way out.
    ///
    /// As for its activation, two people have to. No node is registered for it any more, and it is not offered; who knows its name can
    /// rent it while its nodes last.
    deprecate: Deprecate, "The SKU, deprecated.";

    /// Approves that a SKU is taken out of the offer.
    ///
    /// As for its activation, two people have to. What runs goes on; where nodes or allocations refer to the SKU, one of the two says in
    /// `impact_review` and `rollback_plan` what that means.
    deactivate: Deactivate, "The SKU, inactive.";
}

/// Looks at what the SKU cannot know of itself and asks it; where it has changed meanwhile, looks again.
async fn approve(
    change: Change,
    May { asking, .. }: May<ApproveSkus>,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    Once(body::Json(decision)): Once<body::Json<SkuDecision>>,
) -> Result<impl IntoResponse, ApiError> {
    if let Some(answered) = asking.carried_out::<Sku>()? {
        return Ok(approved(change, &answered));
    }
    let mut looks = 0;
    loop {
        looks += 1;
        let given = Approve {
            change,
            reason: decision.reason.to_string(),
            role: decision.role.map(PlatformRole::from),
            impact_review: decision.impact_review.as_ref().map(|text| text.to_string()),
            rollback_plan: decision.rollback_plan.as_ref().map(|text| text.to_string()),
            seen: look(&services, id).await?,
        };
        match asking.try_ask::<Sku>(id, Command::Approve(Box::new(given))).await? {
            Err(AskError::Rejected(Rejection::Moved)) if looks < LOOKS => {}
            answer => return Ok(approved(change, &answer.map_err(not_answered)?)),
        }
    }
}

async fn look(services: &Services, id: Uuid) -> Result<Seen, ApiError> {
    let sku = find::<Sku>(services, id).await?.ok_or_else(|| ApiError::not_found("SKU"))?;
    let first = match &sku.it.pending {
        Some(pending) => granted(services, &pending.first.user_id).await?,
        None => None,
    };
    let in_use = services.reads.in_use(SkuId(id)).await?;
    Ok(Seen { version: sku.version, in_use: InUse { nodes: in_use.nodes, allocations: in_use.allocations }, first })
}

fn approved(change: Change, answered: &Answered<Box<Sku>>) -> impl IntoResponse + use<> {
    let waits = answered.reply.pending.as_ref().is_some_and(|pending| pending.first.change == change);
    let status = if waits { StatusCode::ACCEPTED } else { StatusCode::OK };
    (status, replayed(answered), Json(view(&answered.reply)))
}

/// What a SKU shows of its approvals: those that led to its status, and the one that waits.
pub(super) fn approvals(sku: &Sku) -> Vec<ApprovalView> {
    let given = sku.approvals.iter().map(|given| approval(given, None));
    let waits = |pending: &Pending| approval(&pending.first, Some(pending.until));
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

impl From<Change> for SkuStatusChange {
    fn from(change: Change) -> Self {
        match change {
            Change::Activate => Self::Activate,
            Change::Deprecate => Self::Deprecate,
            Change::Deactivate => Self::Deactivate,
        }
    }
}
