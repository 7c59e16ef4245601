//! The ledger's postings (decisions 6). Each moves an amount from one named account of the ledger to another, so that a posting that does
//! not sum to zero cannot be expressed: neither here nor in the table, whose rows are the same.

use crate::id::{AllocationId, PaymentId};
use crate::money::{Currency, MicroAmount};
use crate::time::Timestamp;
use serde::{Deserialize, Serialize};

/// A named account of the ledger. `prepaid` is what the service owes its customers: a customer's balance is theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum LedgerAccount {
    Prepaid,
    Revenue,
    Adjustments,
    WriteOff,
    /// What the payment processor holds, or has taken, for the service.
    ProcessorClearing,
    /// What is refunded to payers.
    Refunds,
}

impl LedgerAccount {
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.into_str()
    }
}

/// The kind of a posting, which determines the two ledger accounts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[derive(strum::IntoStaticStr, strum::EnumString, strum::VariantArray)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum PostingKind {
    /// The usage of an allocation in a period.
    Usage,
    /// A part of an allocation's charge that was not owed: it ended earlier.
    UsageCredit,
    /// The usage of an allocation after its account was depleted and the grace period had ended.
    WriteOff,
    /// A part of a write-off that did not accrue.
    WriteOffReversal,
    /// A credit by an operator.
    Credit,
    /// A debit by an operator.
    Debit,
    /// A payment through the payment processor.
    Deposit,
    /// A refund of a payment, requested by its payer.
    Refund,
    /// A refund that did not reach the payer.
    RefundReturned,
    /// A refund of an allocation's cost, by an operator.
    AllocationRefund,
    /// A refund of a payment that was made at the payment processor.
    Reversal,
    /// A reversal that did not reach the payer, or was none.
    ReversalUndone,
    /// A chargeback of a payment by the payer's bank.
    Dispute,
    /// A chargeback that the bank has returned.
    DisputeWon,
}

impl PostingKind {
    pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

    #[must_use]
    pub const fn name(self) -> &'static str {
        self.into_str()
    }

    /// The kind of that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        name.parse().ok()
    }

    /// The debited and the credited ledger account.
    #[must_use]
    pub const fn books(self) -> (LedgerAccount, LedgerAccount) {
        match self {
            Self::Usage => (LedgerAccount::Prepaid, LedgerAccount::Revenue),
            Self::UsageCredit => (LedgerAccount::Revenue, LedgerAccount::Prepaid),
            Self::WriteOff => (LedgerAccount::WriteOff, LedgerAccount::Revenue),
            Self::WriteOffReversal => (LedgerAccount::Revenue, LedgerAccount::WriteOff),
            Self::Credit => (LedgerAccount::Adjustments, LedgerAccount::Prepaid),
            Self::Debit => (LedgerAccount::Prepaid, LedgerAccount::Adjustments),
            Self::Deposit | Self::DisputeWon => (LedgerAccount::ProcessorClearing, LedgerAccount::Prepaid),
            Self::Refund | Self::Reversal => (LedgerAccount::Prepaid, LedgerAccount::Refunds),
            Self::RefundReturned | Self::ReversalUndone => (LedgerAccount::Refunds, LedgerAccount::Prepaid),
            Self::AllocationRefund => (LedgerAccount::Revenue, LedgerAccount::Prepaid),
            Self::Dispute => (LedgerAccount::Prepaid, LedgerAccount::ProcessorClearing),
        }
    }

    /// True of a posting that charges an allocation for a period: no period is charged twice.
    #[must_use]
    pub const fn charges(self) -> bool {
        match self {
            Self::Usage | Self::WriteOff => true,
            Self::UsageCredit
            | Self::WriteOffReversal
            | Self::Credit
            | Self::Debit
            | Self::Deposit
            | Self::Refund
            | Self::RefundReturned
            | Self::AllocationRefund
            | Self::Reversal
            | Self::ReversalUndone
            | Self::Dispute
            | Self::DisputeWon => false,
        }
    }
}

/// One posting of an account: written in the commit of the transition that decided it, and never changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Posting {
    /// The account's postings are numbered from 1, without a gap.
    pub number: i64,
    pub kind: PostingKind,
    /// More than zero: the kind determines the direction.
    pub amount: MicroAmount,
    pub currency: Currency,
    /// The account's balance after it.
    pub balance: MicroAmount,
    pub usage: Option<UsagePeriod>,
    /// The payment or refund that caused it.
    pub source: Option<PostingSource>,
    /// The reason, where a person gave one.
    pub reason: Option<String>,
}

/// The allocation and the period that a posting charges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsagePeriod {
    pub allocation_id: AllocationId,
    pub from: Timestamp,
    pub until: Timestamp,
    /// The account's total cost of it by then.
    pub cost: MicroAmount,
}

/// The cause of a posting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PostingSource {
    pub payment_id: Option<PaymentId>,
    /// The id of the payment, refund or reversal: there is one posting of each kind for it.
    pub reference: String,
}

impl Posting {
    /// The change of the account's balance.
    #[must_use]
    pub fn effect(&self) -> MicroAmount {
        match self.kind.books() {
            (LedgerAccount::Prepaid, _) => MicroAmount::ZERO.minus(self.amount),
            (_, LedgerAccount::Prepaid) => self.amount,
            (
                LedgerAccount::Revenue
                | LedgerAccount::Adjustments
                | LedgerAccount::WriteOff
                | LedgerAccount::ProcessorClearing
                | LedgerAccount::Refunds,
                LedgerAccount::Revenue
                | LedgerAccount::Adjustments
                | LedgerAccount::WriteOff
                | LedgerAccount::ProcessorClearing
                | LedgerAccount::Refunds,
            ) => MicroAmount::ZERO,
        }
    }

    /// The start of the period that it charges, where it does: no two postings of an allocation have the same.
    #[must_use]
    pub fn charged_from(&self) -> Option<Timestamp> {
        self.usage.filter(|_| self.kind.charges()).map(|usage| usage.from)
    }

    /// Its two entries: the change of each ledger account. They sum to zero.
    #[must_use]
    pub fn entries(&self) -> [(LedgerAccount, MicroAmount); 2] {
        let (from, to) = self.kind.books();
        [(from, MicroAmount::ZERO.minus(self.amount)), (to, self.amount)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write as _;

    #[test]
    fn the_kinds_of_postings_are_as_reviewed() {
        let mut table = String::new();
        for &kind in PostingKind::ALL {
            let (from, to) = kind.books();
            assert_ne!(from, to);
            assert_eq!(PostingKind::parse(kind.name()), Some(kind));
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
            writeln!(table, "{}: {} -> {}", kind.name(), from.name(), to.name()).unwrap();
        }
        insta::assert_snapshot!(table, @r"
        usage: prepaid -> revenue
        usage_credit: revenue -> prepaid
        write_off: write_off -> revenue
        write_off_reversal: revenue -> write_off
        credit: adjustments -> prepaid
        debit: prepaid -> adjustments
        deposit: processor_clearing -> prepaid
        refund: prepaid -> refunds
        refund_returned: refunds -> prepaid
        allocation_refund: revenue -> prepaid
        reversal: prepaid -> refunds
        reversal_undone: refunds -> prepaid
        dispute: prepaid -> processor_clearing
        dispute_won: processor_clearing -> prepaid
        ");
    }
}
