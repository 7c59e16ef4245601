//! The way to the till: a payment is created here, opened at the processor, and its payer is told where to pay.
//!
//! Where the answer of a step is lost, the request is sent again with its key and meets the same payment. What is open at the processor is
//! looked for then, and the address, in which there may be a secret of the payer's, is asked for again: it is kept nowhere.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use chrono::{DateTime, TimeDelta, Utc};
use domain::authz::{Action, authorize};
use domain::billing_account::{BillingAccount, Holder, Rejection as AccountRejection};
use domain::money::Currency;
use domain::payment::{Command, Payment, Phase, Rejection, Reply};
use domain::policy::Key;
use domain::{BillingAccountId, Machine as _, PaymentId, Principal};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use utoipa::ToSchema;
use uuid::Uuid;

use actors::{Answered, AskError};

use crate::answer::{Explain as _, limited_by, not_answered};
use crate::api::asking::{Asking, ByUser, replayed};
use crate::api::billing::{holder_of, id_of};
use crate::api::field::{AmountMinor, CurrencyCode, ReturnUrl};
use crate::api::notification_endpoint::introduce;
use crate::api::stored::{current, wait_until};
use crate::body;
use crate::correlation::{Scope, no_store};
use crate::error::{ApiError, Code};
use crate::idempotency::keyed::Once;
use crate::processor::{Before, Checkout, Opened, ProcessorError};
use crate::services::{Payments, Services};

/// As whom the route tells payments what the processor said.
const CHECKOUT: &str = "checkout";
/// How long a request waits for another, which may still be at the processor, and for what the processor is about to tell.
const FIRST_WITHIN: Duration = Duration::from_secs(3);
/// How long the processor may take, all in all.
const OPENS_WITHIN: Duration = Duration::from_secs(12);
/// How long a payment's machine may take.
const TELLS_WITHIN: TimeDelta = TimeDelta::seconds(3);
/// How far the processor's clock may be behind ours.
const CLOCKS_APART: TimeDelta = TimeDelta::minutes(10);

/// What somebody wants to pay in.
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
    /// Where the payer is sent once it is paid.
    success_url: ReturnUrl,
    /// And where when they turn back.
    cancel_url: ReturnUrl,
}

/// Where to pay.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = CheckoutSession)]
pub(in crate::api) struct CheckoutView {
    /// The payment's id.
    id: Uuid,
    /// The payer's alone: whoever has it can pay. Of a payment that was made meanwhile, its `success_url`.
    url: String,
    /// Until when it can be paid.
    expires_at: Option<DateTime<Utc>>,
}

/// Begins a payment into your account, or your organisation's: send the payer to `url`.
///
/// The page is the payment processor's, or this service's own where the processor has none. A repetition is answered with the same payment;
/// its address is not stored, but asked for again. Your account has the money when the payment is `deposited`.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewCheckout,
    responses((status = 201, description = "Where to pay.", body = CheckoutView)),
)]
pub(in crate::api) async fn checkout(
    ByUser(asking): ByUser,
    scope: Scope,
    State(services): State<Services>,
    Once(body::Json(new)): Once<body::Json<NewCheckout>>,
) -> Result<impl IntoResponse, ApiError> {
    let payments = services.payments()?;
    asking.answer_changes();
    let answered = match asking.carried_out::<Payment>()? {
        Some(answered) => answered,
        None => {
            introduce(&services, &asking).await;
            created(&services, payments, &asking, &new).await?
        }
    };
    let replayed = replayed(&answered);
    let till = Till { services: &services, payments, scope: &scope };
    let payment = payment_in(answered.reply)?;
    let at_hand = if replayed.0 { till.known(&payment).await } else { till.open(payment, Before::Nothing).await };
    let view = at_hand.map_err(|error| replayed.refused(error))?;
    Ok((StatusCode::CREATED, no_store(), replayed, Json(view)))
}

async fn created(
    services: &Services,
    payments: &Payments,
    asking: &Asking,
    new: &NewCheckout,
) -> Result<Answered<Reply>, ApiError> {
    let holder = holder_of(asking);
    has_room(services, asking, &holder).await?;
    let amount_minor = new.amount_minor.0;
    let command = Command::Create {
        account_id: BillingAccountId(id_of(&holder)),
        currency: currency(services, payments, &holder, new.currency.as_ref()).await?,
        holder,
        payer: asking.caller.user_id.clone(),
        amount_minor,
        success_url: new.success_url.to_string(),
        cancel_url: new.cancel_url.to_string(),
    };
    let answered = asking.try_ask::<Payment>(asking.id_of_new(), command).await?;
    answered.map_err(|error| not_created(error, amount_minor))
}

/// What stands between a payment and the processor.
struct Till<'a> {
    services: &'a Services,
    payments: &'a Payments,
    scope: &'a Scope,
}

impl Till<'_> {
    /// Where to pay what an earlier request has created.
    async fn known(&self, created: &Payment) -> Result<CheckoutView, ApiError> {
        let is_opened = |it: &Payment| !matches!(it.phase, Phase::Created { .. });
        let found = wait_until::<Payment>(self.services, created.id.0, FIRST_WITHIN, is_opened).await?;
        let payment = found.ok_or_else(|| ApiError::not_found("payment"))?.it;
        match (&payment.phase, &payment.processor_id) {
            (Phase::Open { .. }, Some(processor_id)) => {
                let opened = self.ask(&payment, Before::Known(processor_id.clone())).await?;
                self.shown(&payment, &opened).await
            }
            (Phase::Created { .. } | Phase::Open { .. }, _) => {
                let before = Before::Since(payment.created_at - CLOCKS_APART);
                self.open(Payment::clone(&payment), before).await
            }
            (Phase::Paid { .. } | Phase::Deposited { .. }, _) => Ok(paid(&payment)),
            (Phase::Refused { .. } | Phase::Canceled { .. } | Phase::Expired { .. }, _) => Err(over(&payment)),
        }
    }

    /// Opens it at the processor, and says so to the payment.
    async fn open(&self, payment: Payment, before: Before) -> Result<CheckoutView, ApiError> {
        let opened = self.ask(&payment, before).await?;
        let told = self.tell(payment.id, Command::Opened { processor_id: opened.processor_id.clone() }).await;
        let payment = match told {
            Ok(reply) => payment_in(reply)?,
            Err(AskError::Rejected(rejection @ Rejection::Over { .. })) => {
                self.cancel(&opened).await;
                return Err(rejection.explain());
            }
            // It may have been told. A repetition finds out.
            Err(error) => return Err(not_answered(error)),
        };
        match &payment.processor_id {
            Some(first) if *first != opened.processor_id => {
                // Two at once: one of them is paid, and nobody has seen the other.
                self.cancel(&opened).await;
                let first = self.ask(&payment, Before::Known(first.clone())).await?;
                self.shown(&payment, &first).await
            }
            Some(_) | None => self.shown(&payment, &opened).await,
        }
    }

    async fn ask(&self, payment: &Payment, before: Before) -> Result<Opened, ApiError> {
        let wanted = Checkout {
            payment_id: payment.id,
            amount_minor: payment.amount_minor,
            currency: payment.currency.clone(),
            success_url: payment.success_url.clone(),
            cancel_url: payment.cancel_url.clone(),
            before,
        };
        match timeout(OPENS_WITHIN, self.payments.processor.checkout(&wanted)).await {
            Ok(Ok(opened)) => Ok(opened),
            Ok(Err(error)) => Err(upstream(error)),
            Err(_) => Err(upstream(ProcessorError::Unknown(format!("no answer within {} s", OPENS_WITHIN.as_secs())))),
        }
    }

    async fn tell(&self, id: PaymentId, command: Command) -> Result<Reply, AskError<Rejection>> {
        let permit = authorize(&Principal::system(CHECKOUT), Action::Advance).map_err(|_| AskError::Denied)?;
        let asked = self.scope.asked(&permit, self.services.world.now() + TELLS_WITHIN).urgently();
        Ok(self.services.directory.ask::<Payment>(&permit, id.0, command, asked).await?.reply)
    }

    /// What nobody was told of: where it cannot be canceled, nobody can pay it all the same.
    async fn cancel(&self, opened: &Opened) {
        if let Err(error) = self.payments.processor.cancel(&opened.processor_id).await {
            tracing::warn!(
                processor_id = opened.processor_id,
                %error,
                "what was opened at the payment processor beside another could not be canceled"
            );
        }
    }

    async fn shown(&self, payment: &Payment, opened: &Opened) -> Result<CheckoutView, ApiError> {
        let expires_at = match payment.phase {
            Phase::Created { until } | Phase::Open { until } => Some(until),
            Phase::Paid { .. }
            | Phase::Deposited { .. }
            | Phase::Refused { .. }
            | Phase::Canceled { .. }
            | Phase::Expired { .. } => None,
        };
        match opened.url(&self.services.addresses.public_url, payment.id) {
            Some(url) => Ok(CheckoutView { id: payment.id.0, url, expires_at }),
            None => self.closed(payment).await,
        }
    }

    /// What is closed at the processor was paid or canceled a moment ago: the payment is about to be told which.
    async fn closed(&self, payment: &Payment) -> Result<CheckoutView, ApiError> {
        let is_told = |it: &Payment| !matches!(it.phase, Phase::Created { .. } | Phase::Open { .. });
        let found = wait_until::<Payment>(self.services, payment.id.0, FIRST_WITHIN, is_told).await?;
        let payment = found.ok_or_else(|| ApiError::not_found("payment"))?.it;
        match payment.phase {
            Phase::Paid { .. } | Phase::Deposited { .. } => Ok(paid(&payment)),
            Phase::Refused { .. } | Phase::Canceled { .. } | Phase::Expired { .. } => Err(over(&payment)),
            Phase::Created { .. } | Phase::Open { .. } => {
                let message = "The payment is closed at the payment processor: it was paid or canceled a moment ago. \
                               GET /api/v1/billing/payments/{id} shows which, within a minute.";
                Err(ApiError::new(Code::StateConflict, message).detail("payment_id", payment.id.to_string()))
            }
        }
    }
}

fn paid(payment: &Payment) -> CheckoutView {
    CheckoutView { id: payment.id.0, url: payment.success_url.clone(), expires_at: None }
}

fn over(payment: &Payment) -> ApiError {
    Rejection::Over { state: payment.state().to_owned() }.explain()
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
            limited_by(not_answered(error), Key::BillingMinimumDeposit, min)
        }
        error => not_answered(error),
    }
}

/// Each payment that waits is looked after at the processor for a day, so there is a bound. Those that begin at the same moment do not see
/// each other, and may pass it together.
async fn has_room(services: &Services, asking: &Asking, holder: &Holder) -> Result<(), ApiError> {
    let limit = services.world.policy().int(Key::BillingOpenPaymentsPerUser, &asking.scopes(), services.world.now());
    let open = services.reads.open_payments(&holder.to_string(), &asking.caller.user_id).await?;
    if open < limit {
        return Ok(());
    }
    let message =
        format!("{limit} payments wait for you to pay them, which is the most; pay one, or wait until one expires.");
    Err(limited_by(ApiError::new(Code::StateConflict, message), Key::BillingOpenPaymentsPerUser, limit))
}

/// In which it is paid: the account's, and before there is one the service's.
async fn currency(
    services: &Services,
    payments: &Payments,
    holder: &Holder,
    given: Option<&CurrencyCode>,
) -> Result<Currency, ApiError> {
    let account = current::<BillingAccount>(services, id_of(holder)).await?;
    let own = account.map_or_else(|| payments.currency.clone(), |account| account.it.currency.clone());
    match given {
        Some(given) if **given != *own.as_str() => {
            let (account, given) = (own.as_str().to_owned(), given.to_string());
            Err(AccountRejection::CurrencyDiffers { account, given }.explain())
        }
        Some(_) | None => Ok(own),
    }
}

fn upstream(error: ProcessorError) -> ApiError {
    let message = match &error {
        ProcessorError::Refused { .. } => {
            "The payment processor does not take this payment; quote the correlation id to the operator."
        }
        ProcessorError::Later(_) | ProcessorError::Unknown(_) => {
            "The payment processor gives no answer; try again in a moment, with the same Idempotency-Key: it stays one payment."
        }
    };
    ApiError::new(Code::UpstreamError, message).because(error)
}
