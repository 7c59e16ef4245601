//! Refunds: of a payment, to its payer; of an allocation's cost, to the account that was charged (decisions 6).

use std::time::Duration;

use actors::{AskError, CommandReply};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use domain::allocation::Allocation;
use domain::authz::{Action, ResourceOwner};
use domain::billing_account::{self, BillingAccount, Holder};
use domain::money::MicroAmount;
use domain::payment::{self, Payment, Refund, RefundDebit};
use domain::{AllocationId, EntityKind, PaymentId, RefundId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::billing::id_of;
use super::payment::{RefundState, RefundView, check_payment_step};
use super::request_context::{RequestContext, UserRequest, replayed};
use super::request_fields::{AmountMinor, Reason};
use crate::api::idempotency::ReplayedResponse;
use crate::api::idempotency::request_layer::IdempotentCommand;
use crate::api::rejection_response::not_answered;
use crate::app_state::AppState;
use crate::app_state::read_model::{current, wait_until};
use crate::http::error::{ApiError, Code};
use crate::http::request_body;

/// Attempts to credit a part of a cost, of an allocation that begins or ends meanwhile.
const MAX_ATTEMPTS: u32 = 5;

/// The timeout for the account's reply.
const FIRST_REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// A refund of a payment or of an allocation.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "payment_id": "0199e3f4-5c1b-7a00-8000-0c0ffee0c0de", "amount_minor": 2000, "reason": "it was too much" }))]
pub(super) struct NewRefund {
    /// A payment that you made.
    payment_id: Option<Uuid>,
    /// An allocation, for those in the platform role `billing_operations`.
    allocation_id: Option<Uuid>,
    /// All that can be given back where it is left out.
    amount_minor: Option<AmountMinor>,
    reason: Reason,
}

/// Gives money back.
///
/// Of a payment, to its payer: at most what is left of it, and what their account has not spent or set aside. It is taken from the account
/// first; the processor is asked then, and the payment shows how far that is. Of an allocation, by `billing_operations` alone: a credit of
/// at most what the allocation has cost. Policy `allocation.refund_window_days` says for how long.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewRefund,
    responses((status = 201, description = "The refund.", body = RefundView)),
)]
pub(super) async fn create(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    IdempotentCommand(request_body::Json(new)): IdempotentCommand<request_body::Json<NewRefund>>,
) -> Result<Response, ApiError> {
    let refunded = RefundTarget::of(&new)?;
    // The permission depends on the body, and comes before the stored response, which shows what a role allowed.
    let context = match refunded {
        RefundTarget::Payment(_) => context,
        RefundTarget::Allocation(_) => context.permitted(Action::AdjustBilling).await?,
    };
    if let Some(stored) = context.stored_response().await? {
        return Ok(stored);
    }
    match refunded {
        RefundTarget::Payment(id) => refund_payment(&app, &context, id, &new).await,
        RefundTarget::Allocation(id) => refund_allocation(&app, &context, id, &new).await,
    }
}

/// What a refund is of.
enum RefundTarget {
    Payment(PaymentId),
    Allocation(AllocationId),
}

impl RefundTarget {
    fn of(new: &NewRefund) -> Result<Self, ApiError> {
        match (new.payment_id, new.allocation_id) {
            (Some(payment), None) => Ok(Self::Payment(PaymentId(payment))),
            (None, Some(allocation)) => Ok(Self::Allocation(AllocationId(allocation))),
            (Some(_), Some(_)) | (None, None) => Err(ApiError::invalid_request(
                "A refund is of a payment or of an allocation: give `payment_id` or `allocation_id`, and not both.",
            )
            .detail("field", "payment_id")),
        }
    }
}

async fn refund_payment(
    app: &AppState,
    context: &RequestContext,
    id: PaymentId,
    new: &NewRefund,
) -> Result<Response, ApiError> {
    if let Some(amount) = new.amount_minor
        && !context.is_replay()
    {
        // For others than its payer the payment does not exist, whatever the amount.
        let found = current::<Payment>(app, id.0).await?;
        if let Some(own) = found.filter(|found| found.it.payer == context.caller.user_id) {
            check_payment_step(amount.0, &own.it.currency)?;
        }
    }
    let command = payment::Request::Refund {
        refund_id: RefundId(context.new_id()),
        amount_minor: new.amount_minor.map(|amount| amount.0),
        reason: new.reason.to_string(),
    };
    let answered = context.ask::<Payment>(id.0, command).await?;
    let replayed = replayed(&answered);
    let payment::Reply::Payment { payment } = answered.reply else {
        return Err(ApiError::internal("the payment's machine answered another question"));
    };
    let refund_id = refund_id_in(context, payment.refunds.keys())?;
    let is_answered = |payment: &Payment| {
        payment.refunds.get(&refund_id).is_some_and(|refund| !matches!(refund.taking, RefundDebit::Asked { .. }))
    };
    let found = wait_until::<Payment>(app, id.0, FIRST_REPLY_TIMEOUT, is_answered).await?;
    let payment = found.ok_or_else(|| ApiError::not_found("payment"))?.it;
    let refund = payment.refunds.get(&refund_id).ok_or_else(|| ApiError::not_found("refund"))?;
    match refusal_of(refund) {
        Some(why) => Err(replayed.refused(why.detail("refund_id", refund_id.to_string()))),
        None => Ok(response(replayed, RefundView::of_payment(&payment, refund_id, refund))),
    }
}

async fn refund_allocation(
    app: &AppState,
    context: &RequestContext,
    id: AllocationId,
    new: &NewRefund,
) -> Result<Response, ApiError> {
    let renter = renter_of(app, id).await?;
    let account_id = id_of(&Holder::paying_for(&renter.user_id, renter.org_id.as_ref()));
    let answered = match context.committed_reply::<BillingAccount>()? {
        Some(answered) => answered,
        None => credited(app, context, account_id, (id, renter), new).await?,
    };
    let replayed = replayed(&answered);
    let requested_at = context.transition_of(account_id, &answered).await?.1;
    let billing_account::Reply::Account { account } = answered.reply else {
        return Err(ApiError::internal("the billing account answered another question"));
    };
    let refunds = account.refunded.get(&id).map(|refunded| &refunded.refunds).cloned().unwrap_or_default();
    let refund_id = refund_id_in(context, refunds.keys())?;
    let amount =
        refunds.get(&refund_id).copied().ok_or_else(|| ApiError::internal("a refund that was made has no amount"))?;
    let view = RefundView {
        id: refund_id.0,
        payment_id: None,
        allocation_id: Some(id.0),
        amount_minor: amount.minor(),
        amount_micro: amount.get(),
        currency: account.currency.as_str().to_owned(),
        // A posting alone completes it.
        state: RefundState::Succeeded,
        reason: new.reason.to_string(),
        refused_because: None,
        requested_at,
    };
    Ok(response(replayed, view))
}

/// The renter of an allocation, whose account has paid for it. Allocations are never deleted, and their renter does not change.
async fn renter_of(app: &AppState, id: AllocationId) -> Result<ResourceOwner, ApiError> {
    let allocation = current::<Allocation>(app, id.0).await?.ok_or_else(|| ApiError::not_found("allocation"))?.it;
    Ok(allocation.asked.owner.clone())
}

/// Reads what the account cannot know itself and has it credit the refund; where the allocation has begun or ended since the read, it retries.
async fn credited(
    app: &AppState,
    context: &RequestContext,
    account_id: Uuid,
    (id, renter): (AllocationId, ResourceOwner),
    new: &NewRefund,
) -> Result<CommandReply<billing_account::Reply>, ApiError> {
    let mut attempts = 0;
    loop {
        attempts += 1;
        let command = allocation_refund_command(app, context, account_id, (id, renter.clone()), new).await?;
        match context.try_ask::<BillingAccount>(account_id, command).await? {
            Err(AskError::Rejected(billing_account::Rejection::Moved)) if attempts < MAX_ATTEMPTS => {}
            answer => return answer.map_err(not_answered),
        }
    }
}

async fn allocation_refund_command(
    app: &AppState,
    context: &RequestContext,
    account_id: Uuid,
    (id, renter): (AllocationId, ResourceOwner),
    new: &NewRefund,
) -> Result<billing_account::Request, ApiError> {
    let account = current::<BillingAccount>(app, account_id).await?;
    let is_metered = account.is_some_and(|account| account.it.meters.contains_key(&id));
    let posted = app.reads.allocation_costs(&[id.0]).await?.remove(&id.0);
    Ok(billing_account::Request::RefundAllocation {
        refund_id: RefundId(context.new_id()),
        allocation_id: id,
        // While it is metered, the account has the exact cost.
        cost: (!is_metered).then(|| posted.map_or(MicroAmount::ZERO, |posted| posted.cost)),
        ended_at: posted.and_then(|posted| posted.billed_until).filter(|_| !is_metered),
        renter: Some(renter),
        amount_minor: new.amount_minor.map(|amount| amount.0),
        reason: new.reason.to_string(),
    })
}

fn response(replayed: ReplayedResponse, view: RefundView) -> Response {
    (StatusCode::CREATED, replayed, Json(view)).into_response()
}

/// The refund that this request created: the last one with its id, where an expired key was reused.
fn refund_id_in<'a>(
    context: &RequestContext,
    refunds: impl DoubleEndedIterator<Item = &'a RefundId>,
) -> Result<RefundId, ApiError> {
    let own = refunds.rev().find(|id| context.has_created(id.0));
    own.copied().ok_or_else(|| ApiError::internal(format!("a {} does not show its refund", EntityKind::Payment)))
}

/// The error where the account refused the refund.
fn refusal_of(refund: &Refund) -> Option<ApiError> {
    let RefundDebit::Refused { why } = &refund.taking else { return None };
    let message = format!(
        "Your account cannot give that back: {why}. Ask for less, leave `amount_minor` out for all there is, or release what runs first."
    );
    Some(ApiError::new(Code::InsufficientBalance, message))
}
