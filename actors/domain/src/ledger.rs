//! The ledger's postings (decisions 6). Each moves an amount from one named book to another, so that one that does not sum to zero
//! has no spelling: neither here nor in the table, whose rows are the same.

use crate::id::{AllocationId, PaymentId};
use crate::machine::Timestamp;
use crate::money::{Currency, Micro};
use serde::{Deserialize, Serialize};

/// A named account of the ledger. `prepaid` is what we owe a customer: its balance is theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Book {
    Prepaid,
    Revenue,
    Adjustments,
    WriteOff,
    /// What the payment processor has, or has taken, for us.
    ProcessorClearing,
    /// What payers get back.
    Refunds,
}

impl Book {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prepaid => "prepaid",
            Self::Revenue => "revenue",
            Self::Adjustments => "adjustments",
            Self::WriteOff => "write_off",
            Self::ProcessorClearing => "processor_clearing",
            Self::Refunds => "refunds",
        }
    }
}

/// Why money moves, and with that between which books.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PostingKind {
    /// An allocation was used for a while.
    Usage,
    /// Of what was charged for an allocation a part was not owed: it ended earlier.
    UsageCredit,
    /// An allocation ran on after its account was depleted and the grace was over: ours to bear.
    WriteOff,
    /// Of what was written off a part did not even accrue.
    WriteOffReversal,
    /// Given by an operator.
    Credit,
    /// Taken by an operator.
    Debit,
    /// Paid in through the payment processor.
    Deposit,
    /// Of a payment, asked back by its payer.
    Refund,
    /// Such a refund did not reach the payer.
    RefundReturned,
    /// Of what an allocation had cost, given by an operator.
    AllocationRefund,
    /// Of a payment, given back by somebody at the payment processor.
    Reversal,
    /// Such a reversal did not reach the payer, or was none.
    ReversalUndone,
    /// Of a payment, taken by the payer's bank.
    Dispute,
    /// The bank has given it back.
    DisputeWon,
}

impl PostingKind {
    pub const ALL: [Self; 14] = [
        Self::Usage,
        Self::UsageCredit,
        Self::WriteOff,
        Self::WriteOffReversal,
        Self::Credit,
        Self::Debit,
        Self::Deposit,
        Self::Refund,
        Self::RefundReturned,
        Self::AllocationRefund,
        Self::Reversal,
        Self::ReversalUndone,
        Self::Dispute,
        Self::DisputeWon,
    ];

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Usage => "usage",
            Self::UsageCredit => "usage_credit",
            Self::WriteOff => "write_off",
            Self::WriteOffReversal => "write_off_reversal",
            Self::Credit => "credit",
            Self::Debit => "debit",
            Self::Deposit => "deposit",
            Self::Refund => "refund",
            Self::RefundReturned => "refund_returned",
            Self::AllocationRefund => "allocation_refund",
            Self::Reversal => "reversal",
            Self::ReversalUndone => "reversal_undone",
            Self::Dispute => "dispute",
            Self::DisputeWon => "dispute_won",
        }
    }

    /// The kind of that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// From which book, to which.
    #[must_use]
    pub const fn books(self) -> (Book, Book) {
        match self {
            Self::Usage => (Book::Prepaid, Book::Revenue),
            Self::UsageCredit => (Book::Revenue, Book::Prepaid),
            Self::WriteOff => (Book::WriteOff, Book::Revenue),
            Self::WriteOffReversal => (Book::Revenue, Book::WriteOff),
            Self::Credit => (Book::Adjustments, Book::Prepaid),
            Self::Debit => (Book::Prepaid, Book::Adjustments),
            Self::Deposit | Self::DisputeWon => (Book::ProcessorClearing, Book::Prepaid),
            Self::Refund | Self::Reversal => (Book::Prepaid, Book::Refunds),
            Self::RefundReturned | Self::ReversalUndone => (Book::Refunds, Book::Prepaid),
            Self::AllocationRefund => (Book::Revenue, Book::Prepaid),
            Self::Dispute => (Book::Prepaid, Book::ProcessorClearing),
        }
    }

    /// True of what charges an allocation for a while: no while is charged twice.
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
    /// More than zero: the kind says which way.
    pub amount: Micro,
    pub currency: Currency,
    /// What is in `prepaid` after it.
    pub balance: Micro,
    pub usage: Option<Usage>,
    /// What of a payment or a refund it is for.
    pub source: Option<Source>,
    /// Why, where a person says so.
    pub reason: Option<String>,
}

/// What a posting is for: an allocation, and the while in which it was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub allocation_id: AllocationId,
    pub from: Timestamp,
    pub until: Timestamp,
    /// What the account has paid for it by then, in all.
    pub cost: Micro,
}

/// What a posting goes back to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    pub payment_id: Option<PaymentId>,
    /// The payment's, the refund's or the reversal's own id: of each kind there is one posting for it.
    pub reference: String,
}

impl Posting {
    /// What it does to the account's balance.
    #[must_use]
    pub fn effect(&self) -> Micro {
        match self.kind.books() {
            (Book::Prepaid, _) => Micro::ZERO.minus(self.amount),
            (_, Book::Prepaid) => self.amount,
            (
                Book::Revenue | Book::Adjustments | Book::WriteOff | Book::ProcessorClearing | Book::Refunds,
                Book::Revenue | Book::Adjustments | Book::WriteOff | Book::ProcessorClearing | Book::Refunds,
            ) => Micro::ZERO,
        }
    }

    /// From when on it charges, where it does: no two postings of an allocation have the same.
    #[must_use]
    pub fn charged_from(&self) -> Option<Timestamp> {
        self.usage.filter(|_| self.kind.charges()).map(|usage| usage.from)
    }

    /// Its two entries: what each book gains. They sum to zero.
    #[must_use]
    pub fn entries(&self) -> [(Book, Micro); 2] {
        let (from, to) = self.kind.books();
        [(from, Micro::ZERO.minus(self.amount)), (to, self.amount)]
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fmt::Write as _;

    #[test]
    fn the_kinds_of_postings_are_as_reviewed() {
        let mut table = String::new();
        for kind in PostingKind::ALL {
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
