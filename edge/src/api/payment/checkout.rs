//! The checkout: a payment is created, opened at the payment processor, and its payer gets the address to pay at.
//!
//! Where the response of a step is lost, the request is repeated with its key and finds the same payment. The checkout that is open at the
//! processor is looked up then, and the address, which may contain a secret of the payer's, is requested again: it is not stored.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use chrono::{DateTime, TimeDelta, Utc};
use domain::authz::{Action, authorize};
use domain::billing_account::{BillingAccount, Holder, Rejection as AccountRejection};
use domain::money::{Currency, minor_in_currency};
use domain::payment::{Fact, Payment, Phase, PhaseName, Rejection, Reply, Request};
use domain::policy::PolicyKey;
use domain::{BillingAccountId, PaymentId, Principal};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use utoipa::ToSchema;
use uuid::Uuid;

use actors::{AskError, CommandReply};

use super::view::PaymentView;
use crate::api::billing::{holder_of, id_of};
use crate::api::idempotency::request_layer::Idempotent;
use crate::api::notification_endpoint::introduce;
use crate::api::rejection_response::{Explain as _, limited_by, not_answered};
use crate::api::request_context::{RequestContext, UserRequest, replayed};
use crate::api::request_fields::{AmountMinor, CurrencyCode, ReturnUrl};
use crate::app_state::read_model::{CurrentEntity, current, wait_until};
use crate::app_state::{AppState, Payments};
use crate::http::correlation::{Scope, no_store};
use crate::http::error::{ApiError, Code};
use crate::http::request_body::{self, NoBody, Path};
use crate::payment_processor::{Checkout, OpenedCheckout, PriorCheckout, ProcessorError, ProcessorPaymentStatus};

/// The principal under which the route records the processor's replies at payments.
const CHECKOUT: &str = "checkout";
/// How long a request waits for a concurrent one with the same key, and for a webhook of the processor.
const OTHER_REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// The timeout of the whole call to the processor.
const PROCESSOR_TIMEOUT: Duration = Duration::from_secs(12);
/// The timeout of recording the result at the payment entity.
const RECORD_TIMEOUT: TimeDelta = TimeDelta::seconds(3);
/// The largest assumed lag of the processor's clock.
const MAX_CLOCK_SKEW: TimeDelta = TimeDelta::minutes(10);

/// A payment to be started.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({
    "amount_minor": 5000, "success_url": "https://console.gpu.example/paid", "cancel_url": "https://console.gpu.example/billing",
}))]
pub(in crate::api) struct NewCheckout {
    /// Between policies `billing.minimum_deposit_minor` and `billing.maximum_deposit_minor`.
    amount_minor: AmountMinor,
    /// The account's own, which is taken where it is left out.
    currency: Option<CurrencyCode>,
    /// Where the payer is redirected after paying.
    success_url: ReturnUrl,
    /// Where the payer is redirected after canceling.
    cancel_url: ReturnUrl,
}

/// Where to pay.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = CheckoutSession)]
pub(in crate::api) struct CheckoutView {
    /// The payment's id.
    id: Uuid,
    /// For the payer alone: anyone who has it can pay. For a payment that was made in the meantime, its `success_url`.
    url: String,
    /// Until when it can be paid.
    expires_at: Option<DateTime<Utc>>,
}

/// Begins a payment into your account, or your organisation's: send the payer to `url`.
///
/// The page is the payment processor's, or this service's own where the processor has none. A repetition is answered with the same
/// payment; its address is not stored, but requested again. Your account has the money when the payment is `deposited`.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewCheckout,
    responses((status = 201, description = "Where to pay.", body = CheckoutView)),
)]
pub(in crate::api) async fn checkout(
    UserRequest(context): UserRequest,
    scope: Scope,
    State(app): State<AppState>,
    Idempotent(request_body::Json(new)): Idempotent<request_body::Json<NewCheckout>>,
) -> Result<impl IntoResponse, ApiError> {
    let payments = app.payments()?;
    context.never_store_response();
    let answered = match context.committed_reply::<Payment>()? {
        Some(answered) => answered,
        None => {
            let created = create_payment(&app, payments, &context, &new).await?;
            introduce(&app, &context).await;
            created
        }
    };
    let replayed = replayed(&answered);
    let flow = CheckoutFlow { app: &app, payments, scope: &scope };
    let payment = payment_in(answered.reply)?;
    let view_or_error =
        if replayed.0 { flow.existing(&payment).await } else { flow.open(payment, PriorCheckout::Nothing).await };
    let view = view_or_error.map_err(|error| replayed.refused(error))?;
    Ok((StatusCode::CREATED, no_store(), replayed, Json(view)))
}

/// Where to pay a payment that you began, as long as it can be paid.
///
/// The address is requested from the payment processor again: it is not stored. For a payment that was made in the meantime it is its
/// `success_url`.
#[utoipa::path(
    post,
    path = "/",
    responses((status = 200, description = "Where to pay. `Cache-Control: no-store`.", body = CheckoutView)),
)]
pub(in crate::api) async fn resume(
    UserRequest(context): UserRequest,
    scope: Scope,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    _: NoBody,
) -> Result<impl IntoResponse, ApiError> {
    let found = own_payment(&app, &context, id).await?;
    let flow = CheckoutFlow { app: &app, payments: app.payments()?, scope: &scope };
    let view = flow.existing(&found.it).await?;
    Ok((no_store(), Json(view)))
}

/// Cancels a payment of yours that is not paid.
///
/// It is canceled at the payment processor first: from the answer on it cannot be paid. One that is canceled or expired stays as it is.
/// What was paid is given back by a refund.
#[utoipa::path(
    post,
    path = "/",
    responses((status = 200, description = "The payment, which cannot be paid.", body = PaymentView)),
)]
pub(in crate::api) async fn cancel(
    UserRequest(context): UserRequest,
    scope: Scope,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    _: Idempotent<NoBody>,
) -> Result<impl IntoResponse, ApiError> {
    let mut closed = None;
    if !context.is_replay() {
        let found = own_payment(&app, &context, id).await?;
        if found.it.is_to_be_paid() {
            let flow = CheckoutFlow { app: &app, payments: app.payments()?, scope: &scope };
            closed = flow.close(&found.it).await?;
        }
    }
    let answered = context.ask::<Payment>(id, Request::Cancel { closed }).await?;
    let replayed = replayed(&answered);
    let payment = payment_in(answered.reply)?;
    Ok((replayed, Json(PaymentView::of(&payment, id_of(&payment.holder)))))
}

/// The payment, where the caller is its payer.
async fn own_payment(app: &AppState, context: &RequestContext, id: Uuid) -> Result<CurrentEntity<Payment>, ApiError> {
    let found = current::<Payment>(app, id).await?;
    let found = found.filter(|found| found.it.payer == context.caller.user_id);
    found.ok_or_else(|| ApiError::not_found("payment"))
}

async fn create_payment(
    app: &AppState,
    payments: &Payments,
    context: &RequestContext,
    new: &NewCheckout,
) -> Result<CommandReply<Reply>, ApiError> {
    let holder = holder_of(context);
    check_open_payments(app, context, &holder).await?;
    let amount_minor = new.amount_minor.0;
    let currency = currency(app, payments, &holder, new.currency.as_ref()).await?;
    check_payment_step(amount_minor, &currency)?;
    let command = Request::Create {
        account_id: BillingAccountId(id_of(&holder)),
        currency,
        holder,
        payer: context.caller.user_id.clone(),
        amount_minor,
        success_url: new.success_url.to_string(),
        cancel_url: new.cancel_url.to_string(),
    };
    let answered = context.try_ask::<Payment>(context.new_id(), command).await?;
    answered.map_err(|error| not_created(error, amount_minor))
}

/// The calls to the processor for one payment.
struct CheckoutFlow<'a> {
    app: &'a AppState,
    payments: &'a Payments,
    scope: &'a Scope,
}

impl CheckoutFlow<'_> {
    /// The address to pay at for a payment that an earlier request created.
    async fn existing(&self, created: &Payment) -> Result<CheckoutView, ApiError> {
        let is_opened = |it: &Payment| !matches!(it.phase, Phase::Created { .. });
        let found = wait_until::<Payment>(self.app, created.id.0, OTHER_REQUEST_TIMEOUT, is_opened).await?;
        let payment = found.ok_or_else(|| ApiError::not_found("payment"))?.it;
        match (&payment.phase, &payment.processor_id) {
            (Phase::Open { .. }, Some(processor_id)) => {
                let opened = self.ask(&payment, PriorCheckout::Known(processor_id.clone())).await?;
                self.view(&payment, &opened).await
            }
            (Phase::Created { .. } | Phase::Open { .. }, _) => {
                let before = PriorCheckout::Since(payment.created_at - MAX_CLOCK_SKEW);
                self.open(Payment::clone(&payment), before).await
            }
            (Phase::Paid { .. } | Phase::Deposited { .. }, _) => Ok(paid_view(&payment)),
            (Phase::Refused { .. } | Phase::UnderReview { .. } | Phase::Canceled { .. } | Phase::Expired { .. }, _) => {
                Err(closed_error(&payment))
            }
        }
    }

    /// Opens it at the processor, and records that at the payment.
    async fn open(&self, payment: Payment, before: PriorCheckout) -> Result<CheckoutView, ApiError> {
        let opened = self.ask(&payment, before).await?;
        let recorded = self.record(payment.id, Fact::Opened { processor_id: opened.processor_id.clone() }).await;
        let payment = match recorded {
            Ok(reply) => payment_in(reply)?,
            Err(AskError::Rejected(rejection @ Rejection::Over { .. })) => {
                self.cancel(&opened).await;
                return Err(rejection.explain());
            }
            // It may have been recorded. A repetition finds out.
            Err(error) => return Err(not_answered(error)),
        };
        match &payment.processor_id {
            Some(first) if *first != opened.processor_id => {
                // Two concurrent requests opened it twice: the recorded one is paid, and no client has seen the other.
                self.cancel(&opened).await;
                let first = self.ask(&payment, PriorCheckout::Known(first.clone())).await?;
                self.view(&payment, &first).await
            }
            Some(_) | None => self.view(&payment, &opened).await,
        }
    }

    async fn ask(&self, payment: &Payment, before: PriorCheckout) -> Result<OpenedCheckout, ApiError> {
        let wanted = Checkout {
            payment_id: payment.id,
            amount_minor: payment.amount_minor,
            currency: payment.currency.clone(),
            success_url: payment.success_url.clone(),
            cancel_url: payment.cancel_url.clone(),
            before,
        };
        let opened = timeout(PROCESSOR_TIMEOUT, self.payments.processor.checkout(&wanted)).await;
        opened.unwrap_or_else(|_| Err(no_answer())).map_err(upstream)
    }

    /// Closes an unpaid payment at the processor, so that it cannot be paid any more. Returns the processor's id of what was closed.
    async fn close(&self, payment: &Payment) -> Result<Option<String>, ApiError> {
        let processor = &self.payments.processor;
        let closing = async {
            let processor_id = match &payment.processor_id {
                Some(processor_id) => Some(processor_id.clone()),
                // It may be open there, and the response lost.
                None => {
                    let since = payment.created_at - MAX_CLOCK_SKEW;
                    processor.find_payment(payment.id, since).await?.map(|opened| opened.processor_id)
                }
            };
            let record = match &processor_id {
                Some(processor_id) => processor.cancel(processor_id).await?,
                None => None,
            };
            Ok::<_, ProcessorError>((processor_id, record))
        };
        let closed = timeout(PROCESSOR_TIMEOUT, closing).await.unwrap_or_else(|_| Err(no_answer()));
        let (processor_id, record) = closed.map_err(upstream)?;
        match record.map(|record| record.status) {
            Some(ProcessorPaymentStatus::Canceled | ProcessorPaymentStatus::Expired) | None => Ok(processor_id),
            Some(ProcessorPaymentStatus::Paid { .. } | ProcessorPaymentStatus::Processing) => {
                Err(paid_just_now(payment))
            }
            Some(ProcessorPaymentStatus::Open | ProcessorPaymentStatus::Declined { .. }) => {
                Err(upstream(ProcessorError::Later("the payment is open although it was canceled".to_owned())))
            }
        }
    }

    async fn record(&self, id: PaymentId, fact: Fact) -> Result<Reply, AskError<Rejection>> {
        let permit = authorize(&Principal::system(CHECKOUT), Action::Advance).map_err(|_| AskError::Denied)?;
        let asked = self.scope.command_context(&permit, self.app.environment.now() + RECORD_TIMEOUT).urgent();
        Ok(self.app.directory.ask::<Payment>(&permit, id.0, fact.into(), asked).await?.reply)
    }

    /// Cancels a checkout that no client has seen. Where that fails, it still cannot be paid.
    async fn cancel(&self, opened: &OpenedCheckout) {
        if let Err(error) = self.payments.processor.cancel(&opened.processor_id).await {
            tracing::warn!(
                processor_id = opened.processor_id,
                %error,
                "a surplus session at the payment processor could not be canceled"
            );
        }
    }

    async fn view(&self, payment: &Payment, opened: &OpenedCheckout) -> Result<CheckoutView, ApiError> {
        let expires_at = match payment.phase {
            Phase::Created { until } | Phase::Open { until } => Some(until),
            Phase::Paid { .. }
            | Phase::Deposited { .. }
            | Phase::Refused { .. }
            | Phase::UnderReview { .. }
            | Phase::Canceled { .. }
            | Phase::Expired { .. } => None,
        };
        match opened.url(&self.app.addresses.public_url, payment.id) {
            Some(url) => Ok(CheckoutView { id: payment.id.0, url, expires_at }),
            None => self.view_of_closed(payment).await,
        }
    }

    /// A checkout that is closed at the processor was paid or canceled a moment ago: the webhook that says which is about to arrive.
    async fn view_of_closed(&self, payment: &Payment) -> Result<CheckoutView, ApiError> {
        let is_settled = |it: &Payment| !matches!(it.phase, Phase::Created { .. } | Phase::Open { .. });
        let found = wait_until::<Payment>(self.app, payment.id.0, OTHER_REQUEST_TIMEOUT, is_settled).await?;
        let payment = found.ok_or_else(|| ApiError::not_found("payment"))?.it;
        match payment.phase {
            Phase::Paid { .. } | Phase::Deposited { .. } => Ok(paid_view(&payment)),
            Phase::Refused { .. } | Phase::UnderReview { .. } | Phase::Canceled { .. } | Phase::Expired { .. } => {
                Err(closed_error(&payment))
            }
            Phase::Created { .. } | Phase::Open { .. } => {
                let message = "The payment is closed at the payment processor: it was paid or canceled a moment ago. \
                               GET /api/v1/billing/payments/{id} shows which, within a minute.";
                Err(ApiError::new(Code::StateConflict, message).detail("payment_id", payment.id.to_string()))
            }
        }
    }
}

fn no_answer() -> ProcessorError {
    ProcessorError::Unknown(format!("no answer within {} s", PROCESSOR_TIMEOUT.as_secs()))
}

fn paid_just_now(payment: &Payment) -> ApiError {
    let message = "The payment was paid a moment ago and cannot be canceled. GET /api/v1/billing/payments/{id} shows when your account has \
                   it; POST /api/v1/billing/refunds gives it back then.";
    ApiError::new(Code::StateConflict, message).detail("payment_id", payment.id.to_string())
}

fn paid_view(payment: &Payment) -> CheckoutView {
    CheckoutView { id: payment.id.0, url: payment.success_url.clone(), expires_at: None }
}

fn closed_error(payment: &Payment) -> ApiError {
    Rejection::Over { state: PhaseName::from(&payment.phase) }.explain()
}

fn payment_in(reply: Reply) -> Result<Payment, ApiError> {
    match reply {
        Reply::Payment { payment } => Ok(*payment),
        Reply::Done => Err(ApiError::internal("the payment's machine answered another question")),
    }
}

/// Names the policy that an amount is outside of.
fn not_created(error: AskError<Rejection>, amount_minor: i64) -> ApiError {
    match error {
        AskError::Rejected(Rejection::Amount { min, .. }) if amount_minor < min => {
            limited_by(not_answered(error), PolicyKey::BillingMinimumDeposit, min)
        }
        error => not_answered(error),
    }
}

/// Each payment that waits is looked after at the processor for a day, so there is a bound. Those that begin at the same moment do not see
/// each other, and may pass it together.
async fn check_open_payments(app: &AppState, context: &RequestContext, holder: &Holder) -> Result<(), ApiError> {
    let limit =
        app.environment.policy().int(PolicyKey::BillingOpenPaymentsPerUser, &context.scopes(), app.environment.now());
    let open = app.reads.open_payments(&holder.to_string(), &context.caller.user_id).await?;
    if open < limit {
        return Ok(());
    }
    let message = format!(
        "{limit} payments wait for you to pay them, which is the most. GET /api/v1/billing/payments shows them: pay or cancel one, or wait \
         until one expires."
    );
    Err(limited_by(ApiError::new(Code::StateConflict, message), PolicyKey::BillingOpenPaymentsPerUser, limit))
}

/// The currency of the payment: the account's, or the service's where there is no account yet.
async fn currency(
    app: &AppState,
    payments: &Payments,
    holder: &Holder,
    given: Option<&CurrencyCode>,
) -> Result<Currency, ApiError> {
    let account = current::<BillingAccount>(app, id_of(holder)).await?;
    let own = account.map_or_else(|| payments.currency.clone(), |account| account.it.currency.clone());
    match given {
        Some(given) if **given != *own.as_str() => {
            let (account, given) = (own.as_str().to_owned(), given.to_string());
            Err(AccountRejection::CurrencyDiffers { account, given }.explain())
        }
        Some(_) | None => Ok(own),
    }
}

/// Refuses an amount that no card payment carries.
pub(in crate::api) fn check_payment_step(amount_minor: i64, currency: &Currency) -> Result<(), ApiError> {
    let step = currency.payment_step_minor();
    let beyond = amount_minor % step;
    if beyond == 0 {
        return Ok(());
    }
    let possible = (amount_minor - beyond).saturating_add(step);
    let message = format!(
        "Field `amount_minor` must be a multiple of {step}: payments in {} have two decimals, of the three that the currency has. Send \
         `{possible}`, which is {}, for example.",
        currency.as_str(),
        minor_in_currency(possible, Some(currency))
    );
    Err(ApiError::invalid_request(message).detail("field", "amount_minor"))
}

fn upstream(error: ProcessorError) -> ApiError {
    let message = match &error {
        ProcessorError::Refused { .. } => {
            "The payment processor refuses this payment; quote the correlation id to the operator."
        }
        ProcessorError::Later(_) | ProcessorError::Unknown(_) => {
            "The payment processor gives no answer; try again in a moment, with the same Idempotency-Key: it stays one payment."
        }
    };
    ApiError::new(Code::UpstreamError, message).because(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amount_that_no_card_payment_carries_is_refused_as_money() {
        let of = |amount: i64, code: &str| check_payment_step(amount, &Currency::parse(code).unwrap());
        assert!(of(1_239, "EUR").is_ok() && of(1_239, "JPY").is_ok() && of(1_240, "KWD").is_ok());
        let refused = of(1_239, "KWD").unwrap_err();
        assert!(refused.message().contains("`1240`, which is 1.240 KWD"), "{}", refused.message());
        // Bounds are the entity's to check.
        for extreme in [i64::MIN, i64::MAX] {
            assert!(of(extreme, "KWD").is_err() && of(extreme, "EUR").is_ok());
        }
    }
}
