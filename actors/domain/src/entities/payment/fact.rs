//! What the payments worker and the billing account report to a payment.

use super::reversal_record::ReportedReversal;
use super::{Payment, PaymentFailure, Presentment, RefundStatus, Rejection, ReversalStep};
use crate::id::RefundId;
use crate::money::Currency;
use crate::state_machine::{Transition, TransitionContext};
use serde::{Deserialize, Serialize};

/// What the payments worker and the billing account report to a payment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Fact {
    /// The processor has an object for it.
    Opened {
        processor_id: String,
    },
    /// The processor has no object for it: the payment expires where it may not be opened any more. Its name between
    /// members is that of earlier releases.
    #[serde(rename = "lapse")]
    #[strum(serialize = "lapse")]
    NotOpened {
        why: String,
    },
    /// It was paid in full, under the processor's id for the payment itself.
    Paid {
        processor_id: String,
        amount_minor: i64,
        currency: Currency,
        charge_id: Option<String>,
        /// What the payer saw and paid, where the processor has converted the amount.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        presented: Option<Presentment>,
    },
    /// It was paid in another amount or currency than was ordered.
    PaidOtherwise {
        processor_id: String,
        amount_minor: i64,
        currency: Currency,
    },
    /// An operator has dismissed the processor's event about what was paid otherwise. Members of earlier releases send it under its old name.
    #[serde(rename = "review_settled")]
    #[strum(serialize = "review_settled")]
    EventDismissed {
        processor_id: String,
    },
    NotPaid {
        processor_id: String,
        outcome: PaymentFailure,
        why: String,
    },
    /// The account was credited.
    Deposited,
    /// The account cannot be credited.
    DepositRefused {
        why: String,
    },
    /// The amount that was debited from the account for it.
    RefundTaken {
        refund_id: RefundId,
        amount_minor: i64,
    },
    /// The account does not cover it.
    RefundRefused {
        refund_id: RefundId,
        why: String,
    },
    /// The refund's state at the processor.
    RefundAt {
        refund_id: RefundId,
        processor_refund_id: String,
        status: RefundStatus,
        amount_minor: i64,
    },
    /// A refund that the processor did not pay is credited again.
    GivenBack {
        refund_id: RefundId,
    },
    /// A reversal at the processor. Its opening and its undoing have one id.
    Reversed {
        reversal_id: String,
        what: ReversalStep,
        amount_minor: i64,
        currency: Currency,
        /// The processor's id of the money that it is of.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        of: Option<String>,
    },
    /// The account has posted the reversal, or its undoing.
    ReversalPosted {
        reversal_id: String,
        is_undone: bool,
    },
}

impl Payment {
    pub(super) fn apply(&self, fact: Fact, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match fact {
            Fact::Opened { processor_id } => self.opened(processor_id, ctx),
            Fact::NotOpened { why } => Ok(self.lapse(why, ctx)),
            Fact::Paid { processor_id, amount_minor, currency, charge_id, presented } => {
                self.paid(processor_id, amount_minor, &currency, charge_id, presented, ctx)
            }
            Fact::PaidOtherwise { processor_id, amount_minor, currency } => {
                self.paid_otherwise(processor_id, amount_minor, currency, ctx)
            }
            Fact::EventDismissed { processor_id } => Ok(self.event_dismissed(&processor_id, ctx)),
            Fact::NotPaid { processor_id, outcome, why } => Ok(self.not_paid(&processor_id, outcome, why, ctx)),
            Fact::Deposited => Ok(self.deposited(ctx)),
            Fact::DepositRefused { why } => Ok(self.deposit_refused(why, ctx)),
            Fact::RefundTaken { refund_id, amount_minor } => self.refund_taken(refund_id, amount_minor, ctx),
            Fact::RefundRefused { refund_id, why } => self.refund_refused(refund_id, why, ctx),
            Fact::RefundAt { refund_id, processor_refund_id, status, amount_minor } => {
                self.refund_at(refund_id, processor_refund_id, status, amount_minor, ctx)
            }
            Fact::GivenBack { refund_id } => self.given_back(refund_id, ctx),
            Fact::Reversed { reversal_id, what, amount_minor, currency, of } => {
                self.reversed(ReportedReversal { reversal_id, what, amount_minor, currency, of }, ctx)
            }
            Fact::ReversalPosted { reversal_id, is_undone } => Ok(self.reversal_posted(&reversal_id, is_undone, ctx)),
        }
    }
}
