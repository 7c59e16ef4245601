//! What of a balance was paid, and what an operator has given: a refund of a payment is paid from the first alone (`deploy/decisions/0076`).

use super::BillingAccount;
use crate::ledger::PostingKind;
use crate::money::MicroAmount;

impl BillingAccount {
    /// The part of the balance that was paid in. Negative where usage or a reversal has taken more than that.
    #[must_use]
    pub fn paid(&self) -> MicroAmount {
        self.balance.minus(self.credit_left)
    }

    /// Usage spends credit before money that was paid. What is credited of a usage is credit again, as far as credit has paid for usage.
    pub(super) fn track_credit(&mut self, kind: PostingKind, amount: MicroAmount) {
        match kind {
            PostingKind::Credit => self.credit_left = self.credit_left.plus(amount),
            PostingKind::Debit => self.credit_left = self.credit_left.minus(amount.min(self.credit_left)),
            PostingKind::Usage => {
                let spent = amount.min(self.credit_left);
                self.credit_left = self.credit_left.minus(spent);
                self.credit_spent = self.credit_spent.plus(spent);
            }
            PostingKind::UsageCredit | PostingKind::AllocationRefund => {
                let returned = amount.min(self.credit_spent);
                self.credit_spent = self.credit_spent.minus(returned);
                self.credit_left = self.credit_left.plus(returned);
            }
            // Money of payers, and costs that no account bears.
            PostingKind::Deposit
            | PostingKind::Refund
            | PostingKind::RefundReturned
            | PostingKind::Reversal
            | PostingKind::ReversalUndone
            | PostingKind::Dispute
            | PostingKind::DisputeWon
            | PostingKind::WriteOff
            | PostingKind::WriteOffReversal => {}
        }
    }
}
