//! Rejections of accounts, payments and the processor's events.

use domain::money::HIGHEST_BALANCE_MINOR;
use domain::policy::PolicyKey;
use domain::{billing_account, payment, processor_event};

use super::{Explain, conflict, invalid, limited_by, unexpected};
use crate::error::{ApiError, Code};

impl Explain for billing_account::Rejection {
    fn explain(self) -> ApiError {
        use billing_account::Rejection as R;
        match self {
            R::NotFound => ApiError::not_found("billing account"),
            R::InsufficientBalance { needed, available } => ApiError::new(
                Code::InsufficientBalance,
                format!("{needed} minor units are more than the {available} that are available; take less, or pay in first."),
            )
            .detail("needed_micro", needed.get())
            .detail("available_micro", available.get()),
            R::CurrencyDiffers { account, given } => {
                conflict(format!("The account is in {account}, and not in {given}; an account keeps its currency."))
                    .detail("field", "currency")
                    .detail("currency", account)
            }
            R::Amount { max } => limited_by(
                invalid(
                    format!(
                        "`amount_minor` must be from -{max} to {max}, and not 0; policy `billing.adjustment_max_minor` says so."
                    ),
                    "amount_minor",
                ),
                PolicyKey::BillingAdjustmentMax,
                max,
            ),
            R::Full => conflict(format!("No account holds more than {HIGHEST_BALANCE_MINOR} minor units; give less.")),
            R::MoreThanCost { left } => conflict(format!(
                "Of what the allocation has cost {left} minor units are left that were not given back; leave `amount_minor` out for all \
                 of them."
            ))
            .detail("field", "amount_minor")
            .detail("left_micro", left.get()),
            R::TooLate { days } => too_late("The allocation ended", days),
            R::TooManyRefunds => {
                conflict("Too many pieces of the allocation's cost were given back; give the rest by an adjustment.")
            }
            R::Moved => conflict("The allocation begins or ends at this moment; ask again."),
        }
    }
}

fn too_late(what: &str, days: i64) -> ApiError {
    limited_by(
        conflict(format!(
            "{what} longer than {days} days ago; policy `allocation.refund_window_days` lets nothing be refunded then."
        )),
        PolicyKey::AllocationRefundWindow,
        days,
    )
}

impl Explain for payment::Rejection {
    fn explain(self) -> ApiError {
        use payment::Rejection as R;
        match self {
            R::NotFound => ApiError::not_found("payment"),
            R::Exists => conflict("The payment exists already."),
            // The caller, who knows the amount, reports which of the two applies.
            R::Amount { min, max } => limited_by(
                invalid(
                    format!(
                        "`amount_minor` must be a whole number from {min} to {max}; policies `billing.minimum_deposit_minor` and \
                         `billing.maximum_deposit_minor` say so."
                    ),
                    "amount_minor",
                ),
                PolicyKey::BillingMaximumDeposit,
                max,
            )
            .detail("minimum", min),
            R::Over { state } => {
                conflict(format!("The payment is {state}; begin another one, with a new Idempotency-Key.")).detail("state", state.into_str())
            }
            R::NotPaid { state } => conflict(format!(
                "The payment is {state}: nothing of it is in your account that could be given back. GET \
                 /api/v1/billing/payments/{{id}} shows what becomes of it."
            ))
            .detail("state", state.into_str()),
            R::TooLate { days } => too_late("It was paid", days),
            R::MoreThanLeft { left: ..=0 } => {
                conflict("Nothing is left of the payment: all of it was given back, or is on its way back.")
            }
            R::MoreThanLeft { left } => invalid(
                format!("`amount_minor` must be a whole number from 1 to {left}, which is left of the payment."),
                "amount_minor",
            )
            .detail("left_minor", left),
            R::TooManyRefunds => conflict("So many refunds were asked of this payment already; ask an administrator for more."),
            rejection @ (R::Differs { .. } | R::PaidTwice { .. } | R::RefundUnknown) => unexpected(&rejection),
        }
    }
}

impl Explain for processor_event::Rejection {
    fn explain(self) -> ApiError {
        use processor_event::Rejection as R;
        match self {
            R::NotFound => ApiError::not_found("event of the payment processor"),
            R::Differs => ApiError::invalid_request(
                "Another event came under this id before, and that one is kept; an event's id is never used twice.",
            )
            .detail("field", "id"),
            R::WrongState { state } => conflict(format!(
                "The event is {state}: only one that is dead, or retrying, waits for an operator's word."
            ))
            .detail("state", state.into_str()),
        }
    }
}
