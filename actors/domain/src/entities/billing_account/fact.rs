//! What allocations and payments report to a billing account.

use super::{BillingAccount, Holder, PlanClaim, Rejection, Reply};
use crate::id::{AllocationId, PaymentId, RefundId, UserId};
use crate::money::{Currency, Price};
use crate::state_machine::{Timestamp, Transition, TransitionContext};
use serde::{Deserialize, Serialize};

/// What allocations and payments report to a billing account.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Fact {
    /// Holds the cost of a first window of the allocation, if the account covers it.
    Hold {
        holder: Holder,
        allocation_id: AllocationId,
        user_id: UserId,
        price: Price,
        gpu_count: u32,
        /// The plan in the token of the request; `None` from a member of an earlier release.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        plan: Option<PlanClaim>,
    },
    /// All that is known of the allocation's usage. With an end and without a start: it never starts.
    Usage { allocation_id: AllocationId, from: Option<Timestamp>, until: Option<Timestamp> },
    /// A payment is credited. It opens the account, where there is none.
    Deposit { payment_id: PaymentId, holder: Holder, currency: Currency, amount_minor: i64 },
    /// Debits a refund that the payer requests, if the account covers it; where it is not exact, a smaller amount is debited.
    TakeRefund { refund_id: RefundId, payment_id: PaymentId, amount_minor: i64, is_exact: bool },
    /// Credits a refund that the processor did not pay.
    GiveBackRefund { refund_id: RefundId, payment_id: PaymentId, amount_minor: i64 },
    /// Debits a part of a payment that was taken back at the processor.
    Reverse { reversal_id: String, payment_id: PaymentId, is_dispute: bool, amount_minor: i64 },
    /// Credits it again after its undoing.
    UndoReversal { reversal_id: String, payment_id: PaymentId, is_dispute: bool, amount_minor: i64 },
}

impl BillingAccount {
    /// The first fact, where there is no account.
    pub(super) fn open_by_fact(fact: Fact, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match fact {
            // An allocation without a price needs no money, but it has a meter.
            Fact::Hold { holder, allocation_id, user_id, price, gpu_count, plan } => {
                let account = Self::opened(holder, price.currency.clone(), ctx);
                account.hold(allocation_id, user_id, &price, gpu_count, plan, ctx)
            }
            Fact::Deposit { payment_id, holder, currency, amount_minor } => {
                let account = Self::opened(holder, currency.clone(), ctx);
                account.deposit(payment_id, &currency, amount_minor, ctx)
            }
            Fact::Usage { .. } => Ok(Transition::stay(Reply::Done)),
            Fact::TakeRefund { .. }
            | Fact::GiveBackRefund { .. }
            | Fact::Reverse { .. }
            | Fact::UndoReversal { .. } => Err(Rejection::NotFound),
        }
    }

    pub(super) fn apply(&self, fact: Fact, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match fact {
            Fact::Hold { holder: _, allocation_id, user_id, price, gpu_count, plan } => {
                self.hold(allocation_id, user_id, &price, gpu_count, plan, ctx)
            }
            Fact::Usage { allocation_id, from, until } => Ok(self.usage(allocation_id, from, until, ctx)),
            Fact::Deposit { payment_id, holder: _, currency, amount_minor } => {
                self.deposit(payment_id, &currency, amount_minor, ctx)
            }
            Fact::TakeRefund { refund_id, payment_id, amount_minor, is_exact } => {
                self.take_refund(refund_id, payment_id, amount_minor, is_exact, ctx)
            }
            Fact::GiveBackRefund { refund_id, payment_id, amount_minor } => {
                self.give_back_refund(refund_id, payment_id, amount_minor, ctx)
            }
            Fact::Reverse { reversal_id, payment_id, is_dispute, amount_minor } => {
                self.reverse(reversal_id, payment_id, is_dispute, amount_minor, ctx)
            }
            Fact::UndoReversal { reversal_id, payment_id, is_dispute, amount_minor } => {
                self.undo_reversal(reversal_id, payment_id, is_dispute, amount_minor, ctx)
            }
        }
    }
}
