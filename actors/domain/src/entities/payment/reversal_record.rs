//! A reversal, as the processor reports it, and as its payment stores it.

use super::OVERDUE_AFTER;
use crate::money::Currency;
use crate::state_machine::{Deadline, Timestamp};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reversal {
    pub made: ReversalOrigin,
    /// The part of the payment that the account is debited.
    pub amount_minor: i64,
    /// What was taken back at the processor, where it charged another currency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub charged_minor: Option<i64>,
    #[serde(rename = "heard_at")]
    pub reported_at: Timestamp,
    /// It was won, failed, or turned out to be one of the payment's own refunds. That is final, whatever arrives later.
    pub is_undone: bool,
    /// What the account is credited once it is undone, where that is not what it was debited: rounding has moved to another part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub returned_minor: Option<i64>,
    /// The account was asked to post it, and may have done so.
    #[serde(rename = "is_said")]
    pub is_posting_requested: bool,
    /// The account has posted it.
    pub is_posted: bool,
    /// The account has posted that it is undone.
    pub is_posted_back: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReversalOrigin {
    Refund,
    Dispute,
}

/// A step of a reversal at the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum ReversalStep {
    /// It was refunded at the processor.
    Refund,
    /// Such a refund did not reach the payer: the money returned.
    RefundFailed,
    /// The payer's bank took the money back.
    DisputeOpened,
    /// The bank returned it.
    DisputeWon,
}

/// What the processor reports of money that it took back.
pub(super) struct ReportedReversal {
    pub(super) reversal_id: String,
    pub(super) what: ReversalStep,
    pub(super) amount_minor: i64,
    pub(super) currency: Currency,
    /// The processor's id of the money that it is of; `None` from a member of an earlier release.
    pub(super) of: Option<String>,
}

impl ReversalStep {
    pub(super) const fn made(self) -> ReversalOrigin {
        match self {
            Self::Refund | Self::RefundFailed => ReversalOrigin::Refund,
            Self::DisputeOpened | Self::DisputeWon => ReversalOrigin::Dispute,
        }
    }

    pub(super) const fn undoes(self) -> bool {
        match self {
            Self::Refund | Self::DisputeOpened => false,
            Self::RefundFailed | Self::DisputeWon => true,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        self.into_str()
    }
}

impl Reversal {
    pub(super) fn gone_minor(&self) -> i64 {
        if self.is_undone { self.amount_minor - self.credit_minor() } else { self.amount_minor }
    }

    /// What the account is credited once it is undone.
    pub(super) fn credit_minor(&self) -> i64 {
        self.returned_minor.unwrap_or(self.amount_minor)
    }

    /// The account has to post and confirm it; a request that was sent cannot be withdrawn. Of less than a minor unit there is nothing to
    /// post.
    pub(super) const fn is_to_be_posted(&self) -> bool {
        self.is_posting_requested && !self.is_posted && self.amount_minor > 0
    }

    /// The account has to post that it is undone.
    pub(super) fn is_to_be_posted_back(&self) -> bool {
        let is_posted = self.is_posted || (self.is_posting_requested && self.amount_minor == 0);
        self.is_undone && is_posted && !self.is_posted_back && self.credit_minor() > 0
    }

    pub(super) fn deadline(&self) -> Option<Deadline> {
        let waits_for = "a reversal is to be posted to the account";
        (self.is_to_be_posted() || self.is_to_be_posted_back())
            .then(|| Deadline::new(self.reported_at + OVERDUE_AFTER, waits_for))
    }
}
