//! Payments through the payment processor, and their outcome (decisions 6; the state machine is in deploy/decisions/0023).

mod checkout;
mod view;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use domain::authz::Action;
use domain::billing_account::{BillingAccount, Holder};
use domain::payment::{Payment, Reply, Request};
use persistence::queries::ListFilter;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

pub(super) use checkout::*;

use super::billing::{holder_of, id_of};
use super::request_context::{Authorized, RequestContext, SeeBilling, SettleProcessorEvents, UserRequest, replayed};
use super::request_fields::{Reason, ReviewName};
use crate::api::idempotency::request_layer::Idempotent;
use crate::app_state::AppState;
use crate::app_state::read_model::{self, current};
use crate::http::error::{ApiError, Code};
use crate::http::pagination::{Items, Listing, Order, Page, PageQuery};
use crate::http::request_body::{self, Path};
use view::{PaymentView, StateName};
pub(super) use view::{RefundState, RefundView};

/// A filter of payments.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct PaymentFilter {
    state: Option<StateName>,
    /// The order of the list; the oldest first where it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(inline)]
    order: Option<Order>,
}

/// The payments into your account, or your organisation's.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, PaymentFilter),
    responses((status = 200, description = "A page of payments.", body = Items<PaymentView>)),
)]
pub(super) async fn list(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    listing: Listing<PaymentFilter>,
) -> Result<Json<Items<PaymentView>>, ApiError> {
    let holder = holder_of(&context);
    let order = listing.filter.order.unwrap_or_default();
    let page = listing.page("billing/payments", &holder.to_string(), order)?;
    payments_of(&app, &holder, &listing.filter, &page).await
}

/// One payment, with what goes back of it.
///
/// It is yours, or your organisation's; administrators and holders of `billing_operations` read those of others.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The payment.", body = PaymentView)),
)]
pub(super) async fn get(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
) -> Result<Json<PaymentView>, ApiError> {
    let found = current::<Payment>(&app, id).await?.ok_or_else(|| ApiError::not_found("payment"))?;
    if !is_visible(&context, &found.it) {
        // For other callers it does not exist.
        let hidden =
            |denied: ApiError| if denied.code() == Code::Forbidden { ApiError::not_found("payment") } else { denied };
        context.permitted(Action::SeeBilling).await.map_err(hidden)?;
    }
    Ok(Json(PaymentView::of(&found.it, id_of(&found.it.holder))))
}

/// The payments into an account.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, PaymentFilter),
    responses((status = 200, description = "A page of payments.", body = Items<PaymentView>)),
)]
pub(super) async fn list_of(
    _: Authorized<SeeBilling>,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    listing: Listing<PaymentFilter>,
) -> Result<Json<Items<PaymentView>>, ApiError> {
    let account = current::<BillingAccount>(&app, id).await?;
    let holder = account.ok_or_else(|| ApiError::not_found("billing account"))?.it.holder.clone();
    let order = listing.filter.order.unwrap_or_default();
    let page = listing.page("admin/billing/payments", &id.to_string(), order)?;
    payments_of(&app, &holder, &listing.filter, &page).await
}

/// Settles a payment that waits for an operator: you have credited its worth, or paid it back outside of the processor.
///
/// It is `under_review`, or `refused` and its refund failed. Credit or pay it first. `review` is the payment's, as you saw it: where another one
/// waits by now, nothing is decided (409). The money itself is never credited, and what goes back of it at the payment processor later waits for an
/// operator. It cannot be undone; repeated it changes nothing.
#[utoipa::path(
    post,
    path = "/",
    request_body = ReviewDecisionBody,
    responses((status = 200, description = "The payment.", body = PaymentView)),
)]
pub(super) async fn settle_review(
    request: Authorized<SettleProcessorEvents>,
    Path(id): Path<Uuid>,
    Idempotent(request_body::Json(body)): Idempotent<request_body::Json<ReviewDecisionBody>>,
) -> Result<Response, ApiError> {
    let (review, reason) = (Some(body.review.to_string()), body.reason.to_string());
    decide_review(request.into(), id, Request::SettleReview { review, reason }).await
}

/// Dismisses a payment that waits for an operator: nothing of it is credited.
///
/// It is `under_review`, or `refused` and its refund failed. `review` is the payment's, as you saw it: where another one waits by now, nothing is
/// decided (409). The money goes back to its payer at the payment processor, or was not paid. It cannot be undone; repeated it changes nothing.
#[utoipa::path(
    post,
    path = "/",
    request_body = ReviewDecisionBody,
    responses((status = 200, description = "The payment.", body = PaymentView)),
)]
pub(super) async fn dismiss_review(
    request: Authorized<SettleProcessorEvents>,
    Path(id): Path<Uuid>,
    Idempotent(request_body::Json(body)): Idempotent<request_body::Json<ReviewDecisionBody>>,
) -> Result<Response, ApiError> {
    let (review, reason) = (Some(body.review.to_string()), body.reason.to_string());
    decide_review(request.into(), id, Request::DismissReview { review, reason }).await
}

/// The decision of an operator about a payment.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = ReviewDecision)]
pub(super) struct ReviewDecisionBody {
    review: ReviewName,
    reason: Reason,
}

async fn decide_review(context: RequestContext, id: Uuid, request: Request) -> Result<Response, ApiError> {
    let answered = context.prioritized().ask::<Payment>(id, request).await?;
    let replayed = replayed(&answered);
    let Reply::Payment { payment } = answered.reply else {
        return Err(ApiError::internal("the machine of payments answered another question"));
    };
    Ok((replayed, Json(PaymentView::of(&payment, id_of(&payment.holder)))).into_response())
}

/// True for the holder of its account and its payer.
fn is_visible(context: &RequestContext, it: &Payment) -> bool {
    it.payer == context.caller.user_id || it.holder == holder_of(context)
}

async fn payments_of(
    app: &AppState,
    holder: &Holder,
    given: &PaymentFilter,
    page: &Page,
) -> Result<Json<Items<PaymentView>>, ApiError> {
    let states = given.state.map(|state| state.name().to_owned()).into_iter().collect();
    let filter = ListFilter { owner: Some(holder.to_string()), states, ..ListFilter::default() };
    let rows = read_model::list::<Payment>(app, &filter, page).await?;
    let account = id_of(holder);
    Ok(Json(read_model::to_page(page, rows, |stored| PaymentView::of(&stored.it, account))))
}
