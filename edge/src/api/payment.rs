//! Payments through the payment processor, and their outcome (decisions 6; the state machine is in deploy/decisions/0023).

mod checkout;
mod view;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use domain::billing_account::{BillingAccount, Holder};
use domain::payment::{Payment, Reply, Request};
use persistence::queries::ListFilter;
use serde::{Deserialize, Serialize};
use utoipa::IntoParams;
use uuid::Uuid;

pub(super) use checkout::*;

use super::billing::{holder_of, id_of};
use super::commands_with_reason::reason_commands;
use super::request_context::{Authorized, RequestContext, SeeBilling, SettleProcessorEvents, UserRequest, replayed};
use super::request_fields::ReasonBody;
use crate::api::idempotency::request_layer::Idempotent;
use crate::app_state::AppState;
use crate::app_state::read_model::{self, CurrentEntity, current};
use crate::http::error::ApiError;
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
}

/// The payments into your account, or your organisation's, oldest first.
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
    let page = listing.page("billing/payments", &holder.to_string(), Order::OldestFirst)?;
    payments_of(&app, &holder, &listing.filter, &page).await
}

/// One payment, with what goes back of it.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The payment.", body = PaymentView)),
    extensions(("x-without-console" = json!("the list has the same fields; the document of the payment reads it"))),
)]
pub(super) async fn get(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
) -> Result<Json<PaymentView>, ApiError> {
    let found = visible(&app, &context, id).await?;
    Ok(Json(PaymentView::of(&found.it, id_of(&found.it.holder))))
}

/// The payments into an account, oldest first.
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
    let page = listing.page("admin/billing/payments", &id.to_string(), Order::OldestFirst)?;
    payments_of(&app, &holder, &listing.filter, &page).await
}

reason_commands! {
    Authorized<SettleProcessorEvents>, decide_review => 200 "The payment." PaymentView;

    /// Settles a payment that waits for an operator: you have credited its worth, or paid it back outside of the processor.
    ///
    /// It is `under_review`, or `refused` and its refund failed. Credit or pay it first. The money itself is never credited, and what goes back of
    /// it at the payment processor later waits for an operator. It cannot be undone; repeated it changes nothing.
    settle_review: SettleReview;

    /// Dismisses a payment that waits for an operator: nothing of it is credited.
    ///
    /// It is `under_review`, or `refused` and its refund failed. The money goes back to its payer at the payment processor, or was not paid. It
    /// cannot be undone; repeated it changes nothing.
    dismiss_review: DismissReview;
}

async fn decide_review(
    _: &AppState,
    context: RequestContext,
    id: Uuid,
    request: Request,
) -> Result<Response, ApiError> {
    let answered = context.prioritized().ask::<Payment>(id, request).await?;
    let replayed = replayed(&answered);
    let Reply::Payment { payment } = answered.reply else {
        return Err(ApiError::internal("the machine of payments answered another question"));
    };
    Ok((replayed, Json(PaymentView::of(&payment, id_of(&payment.holder)))).into_response())
}

/// The payment, where the caller may see it: the holder of its account, its payer, or an administrator.
async fn visible(app: &AppState, context: &RequestContext, id: Uuid) -> Result<CurrentEntity<Payment>, ApiError> {
    let found = current::<Payment>(app, id).await?;
    let may_see = |found: &CurrentEntity<Payment>| {
        context.is_admin() || found.it.payer == context.caller.user_id || found.it.holder == holder_of(context)
    };
    found.filter(may_see).ok_or_else(|| ApiError::not_found("payment"))
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
