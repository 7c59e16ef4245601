//! What the sagas of allocations and payments have a billing account do.

use super::{BillingAccount, Holder, PlanClaim, Rejection, Reply};
use crate::id::{AllocationId, PaymentId, RefundId, UserId};
use crate::ledger::PostingKind;
use crate::money::{Currency, Price};
use crate::state_machine::{Timestamp, Transition, TransitionContext};
use serde::{Deserialize, Serialize};

/// What the sagas of allocations and payments have a billing account do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Instruction {
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
    /// Meters the allocation by all that is known of its usage. With an end and without a start: it never starts. Its name between members is
    /// that of earlier releases.
    #[serde(rename = "usage")]
    #[strum(serialize = "usage")]
    MeterUsage { allocation_id: AllocationId, from: Option<Timestamp>, until: Option<Timestamp> },
    /// Credits a payment, and opens the account where there is none.
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

impl Instruction {
    /// The posting of a payment that follows from it, by the reference that the ledger has once for each kind. `None` where it is no payment's.
    #[must_use]
    pub fn posting(&self) -> Option<(PostingKind, String)> {
        let reversed = |of_dispute, of_refund, is_dispute: &bool| if *is_dispute { of_dispute } else { of_refund };
        Some(match self {
            Self::Hold { .. } | Self::MeterUsage { .. } => return None,
            Self::Deposit { payment_id, .. } => (PostingKind::Deposit, payment_id.to_string()),
            Self::TakeRefund { refund_id, .. } => (PostingKind::Refund, refund_id.to_string()),
            Self::GiveBackRefund { refund_id, .. } => (PostingKind::RefundReturned, refund_id.to_string()),
            Self::Reverse { reversal_id, is_dispute, .. } => {
                (reversed(PostingKind::Dispute, PostingKind::Reversal, is_dispute), reversal_id.clone())
            }
            Self::UndoReversal { reversal_id, is_dispute, .. } => {
                (reversed(PostingKind::DisputeWon, PostingKind::ReversalUndone, is_dispute), reversal_id.clone())
            }
        })
    }
}

impl BillingAccount {
    /// The first instruction, where there is no account.
    pub(super) fn open_by_instruction(
        instruction: Instruction,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match instruction {
            // An allocation without a price needs no money, but it has a meter.
            Instruction::Hold { holder, allocation_id, user_id, price, gpu_count, plan } => {
                let account = Self::opened(holder, price.currency.clone(), ctx);
                account.hold(allocation_id, user_id, &price, gpu_count, plan, ctx)
            }
            Instruction::Deposit { payment_id, holder, currency, amount_minor } => {
                let account = Self::opened(holder, currency.clone(), ctx);
                account.deposit(payment_id, &currency, amount_minor, ctx)
            }
            Instruction::MeterUsage { .. } => Ok(Transition::stay(Reply::Done)),
            Instruction::TakeRefund { .. }
            | Instruction::GiveBackRefund { .. }
            | Instruction::Reverse { .. }
            | Instruction::UndoReversal { .. } => Err(Rejection::NotFound),
        }
    }

    pub(super) fn follow(
        &self,
        instruction: Instruction,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match instruction {
            Instruction::Hold { holder: _, allocation_id, user_id, price, gpu_count, plan } => {
                self.hold(allocation_id, user_id, &price, gpu_count, plan, ctx)
            }
            Instruction::MeterUsage { allocation_id, from, until } => Ok(self.usage(allocation_id, from, until, ctx)),
            Instruction::Deposit { payment_id, holder: _, currency, amount_minor } => {
                self.deposit(payment_id, &currency, amount_minor, ctx)
            }
            Instruction::TakeRefund { refund_id, payment_id, amount_minor, is_exact } => {
                self.take_refund(refund_id, payment_id, amount_minor, is_exact, ctx)
            }
            Instruction::GiveBackRefund { refund_id, payment_id, amount_minor } => {
                self.give_back_refund(refund_id, payment_id, amount_minor, ctx)
            }
            Instruction::Reverse { reversal_id, payment_id, is_dispute, amount_minor } => {
                self.reverse(reversal_id, payment_id, is_dispute, amount_minor, ctx)
            }
            Instruction::UndoReversal { reversal_id, payment_id, is_dispute, amount_minor } => {
                self.undo_reversal(reversal_id, payment_id, is_dispute, amount_minor, ctx)
            }
        }
    }
}
