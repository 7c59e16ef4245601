//! What the payer and operators ask of a payment.

use super::{Payment, Rejection, ReviewDecision};
use crate::account_holder::Holder;
use crate::authz::Action;
use crate::id::{BillingAccountId, RefundId, UserId};
use crate::money::Currency;
use crate::state_machine::{self, Transition, TransitionContext};
use serde::{Deserialize, Serialize};

/// What the payer and operators ask of a payment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Request {
    Create {
        account_id: BillingAccountId,
        holder: Holder,
        payer: UserId,
        amount_minor: i64,
        currency: Currency,
        success_url: String,
        cancel_url: String,
    },
    /// The payer does not want to pay. `closed` is the processor's id of the checkout that was closed there before, so that it cannot be
    /// paid any more; `None` where the processor had none.
    Cancel { closed: Option<String> },
    /// The payer requests a refund of an amount, or of all that is left.
    Refund { refund_id: RefundId, amount_minor: Option<i64>, reason: String },
    /// An operator ends the review that they saw, by its name: the worth of the money was credited to an account. A member of an earlier release
    /// names none.
    SettleReview {
        #[serde(default)]
        review: Option<String>,
        reason: String,
    },
    /// The same: nothing of the money is credited.
    DismissReview {
        #[serde(default)]
        review: Option<String>,
        reason: String,
    },
}

impl state_machine::Request for Request {
    fn action(&self) -> Action {
        match self {
            Self::Create { .. } | Self::Cancel { .. } => Action::Pay,
            Self::Refund { .. } => Action::AskMoneyBack,
            Self::SettleReview { .. } | Self::DismissReview { .. } => Action::SettleProcessorEvents,
        }
    }

    fn creates(&self) -> bool {
        matches!(self, Self::Create { .. })
    }
}

impl Payment {
    pub(super) fn execute(&self, request: Request, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match request {
            Request::Create { .. } => Err(Rejection::Exists),
            Request::Cancel { closed } => self.cancel(closed.as_deref(), ctx),
            Request::Refund { refund_id, amount_minor, reason } => self.refund(refund_id, amount_minor, reason, ctx),
            Request::SettleReview { review, reason } => {
                self.decide_review(ReviewDecision::Settled, review.as_deref(), &reason, ctx)
            }
            Request::DismissReview { review, reason } => {
                self.decide_review(ReviewDecision::Dismissed, review.as_deref(), &reason, ctx)
            }
        }
    }
}
