//! Refunds: of a payment, to whoever made it; of an allocation's cost, to the account that it was taken from (decisions 6).

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use domain::allocation::Allocation;
use domain::authz::Action;
use domain::billing_account::{self, BillingAccount, Holder};
use domain::money::Micro;
use domain::payment::{self, Payment, Refund, Taking};
use domain::{AllocationId, Kind, PaymentId, RefundId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::asking::{Asking, ByUser, replayed};
use super::billing::id_of;
use super::field::{AmountMinor, Reason};
use super::payment::{RefundState, RefundView};
use super::stored::{current, wait_until};
use crate::body;
use crate::error::{ApiError, Code};
use crate::idempotency::Replayed;
use crate::idempotency::keyed::Once;
use crate::services::Services;

/// How long the account's answer is waited for.
const FIRST_ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// What is to be given back, and of what: a payment or an allocation.
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
/// Of a payment, to whoever made it: at most what is left of it, and what their account has not spent or set aside. It is taken from the
/// account first; the processor is asked then, and the payment shows how far that is. Of an allocation, by `billing_operations` alone: a
/// credit of at most what the allocation has cost. Policy `allocation.refund_window_days` says for how long.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewRefund,
    responses((status = 201, description = "The refund.", body = RefundView)),
)]
pub(super) async fn create(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    Once(body::Json(new)): Once<body::Json<NewRefund>>,
) -> Result<Response, ApiError> {
    match (new.payment_id, new.allocation_id) {
        (Some(payment), None) => of_payment(&services, &asking, PaymentId(payment), &new).await,
        (None, Some(allocation)) => {
            let asking = asking.permitted(Action::AdjustBilling).await?;
            of_allocation(&services, &asking, AllocationId(allocation), &new).await
        }
        (Some(_), Some(_)) | (None, None) => Err(ApiError::invalid_request(
            "A refund is of a payment or of an allocation: give `payment_id` or `allocation_id`, and not both.",
        )
        .detail("field", "payment_id")),
    }
}

async fn of_payment(
    services: &Services,
    asking: &Asking,
    id: PaymentId,
    new: &NewRefund,
) -> Result<Response, ApiError> {
    let command = payment::Command::Refund {
        refund_id: RefundId(asking.id_of_new()),
        amount_minor: new.amount_minor.map(|amount| amount.0),
        reason: new.reason.to_string(),
    };
    let answered = asking.ask::<Payment>(id.0, command).await?;
    let replayed = replayed(&answered);
    let payment::Reply::Payment { payment } = answered.reply else {
        return Err(ApiError::internal("the payment's machine answered another question"));
    };
    let refund_id = made(asking, payment.refunds.keys())?;
    let is_answered = |payment: &Payment| {
        payment.refunds.get(&refund_id).is_some_and(|refund| !matches!(refund.taking, Taking::Asked { .. }))
    };
    let found = wait_until::<Payment>(services, id.0, FIRST_ANSWER_WITHIN, is_answered).await?;
    let payment = found.ok_or_else(|| ApiError::not_found("payment"))?.it;
    let refund = payment.refunds.get(&refund_id).ok_or_else(|| ApiError::not_found("refund"))?;
    match refused(refund) {
        Some(why) => Err(replayed.refused(why.detail("refund_id", refund_id.to_string()))),
        None => Ok(shown(replayed, RefundView::of_payment(&payment, refund_id, refund))),
    }
}

async fn of_allocation(
    services: &Services,
    asking: &Asking,
    id: AllocationId,
    new: &NewRefund,
) -> Result<Response, ApiError> {
    let account_id = account_of(services, id).await?;
    let answered = match asking.carried_out::<BillingAccount>()? {
        Some(answered) => answered,
        None => asking.ask::<BillingAccount>(account_id, of_cost(services, asking, account_id, id, new).await?).await?,
    };
    let replayed = replayed(&answered);
    let requested_at = asking.led_to(account_id, &answered).await?.1;
    let billing_account::Reply::Account { account } = answered.reply else {
        return Err(ApiError::internal("the billing account answered another question"));
    };
    let refunds = account.refunded.get(&id).map(|refunded| &refunded.refunds).cloned().unwrap_or_default();
    let refund_id = made(asking, refunds.keys())?;
    let amount =
        refunds.get(&refund_id).copied().ok_or_else(|| ApiError::internal("a refund that was made has no amount"))?;
    let view = RefundView {
        id: refund_id.0,
        payment_id: None,
        allocation_id: Some(id.0),
        amount_minor: amount.minor(),
        amount_micro: amount.get(),
        currency: account.currency.as_str().to_owned(),
        // A posting is all that it takes.
        state: RefundState::Succeeded,
        reason: new.reason.to_string(),
        refused_because: None,
        requested_at,
    };
    Ok(shown(replayed, view))
}

/// The account that paid for an allocation. Allocations are not forgotten, and their account stays the same.
async fn account_of(services: &Services, id: AllocationId) -> Result<Uuid, ApiError> {
    let allocation = current::<Allocation>(services, id.0).await?.ok_or_else(|| ApiError::not_found("allocation"))?.it;
    Ok(id_of(&Holder::paying_for(&allocation.asked.user_id, allocation.asked.org_id.as_deref())))
}

async fn of_cost(
    services: &Services,
    asking: &Asking,
    account_id: Uuid,
    id: AllocationId,
    new: &NewRefund,
) -> Result<billing_account::Command, ApiError> {
    let account = current::<BillingAccount>(services, account_id).await?;
    let is_metered = account.is_some_and(|account| account.it.meters.contains_key(&id));
    let posted = services.reads.costs(&[id.0]).await?.remove(&id.0);
    Ok(billing_account::Command::RefundAllocation {
        refund_id: RefundId(asking.id_of_new()),
        allocation_id: id,
        // While it is metered the account knows best.
        cost: (!is_metered).then(|| posted.map_or(Micro::ZERO, |posted| posted.cost)),
        ended_at: posted.and_then(|posted| posted.billed_until).filter(|_| !is_metered),
        amount_minor: new.amount_minor.map(|amount| amount.0),
        reason: new.reason.to_string(),
    })
}

fn shown(replayed: Replayed, view: RefundView) -> Response {
    (StatusCode::CREATED, replayed, Json(view)).into_response()
}

/// The refund that this request made: the last one, where its key was used before it was forgotten.
fn made<'a>(asking: &Asking, refunds: impl DoubleEndedIterator<Item = &'a RefundId>) -> Result<RefundId, ApiError> {
    let own = refunds.rev().find(|id| asking.has_made(id.0));
    own.copied().ok_or_else(|| ApiError::internal(format!("a {} does not show its refund", Kind::Payment)))
}

/// The account's no.
fn refused(refund: &Refund) -> Option<ApiError> {
    let Taking::Refused { why } = &refund.taking else { return None };
    let message = format!(
        "Your account cannot give that back: {why}. Ask for less, leave `amount_minor` out for all there is, or release what runs first."
    );
    Some(ApiError::new(Code::InsufficientBalance, message))
}
