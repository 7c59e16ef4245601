//! A refund, as its payment stores it.

use crate::state_machine::{Deadline, Timestamp, TransitionContext};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};

/// Banks take days; after this time an operator should look.
const REFUND_OVERDUE_AFTER: TimeDelta = TimeDelta::days(14);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refund {
    pub reason: String,
    pub asked_at: Timestamp,
    pub taking: RefundDebit,
    /// What the processor refunds for it, where it charged another currency: fixed with the debit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub charged_minor: Option<i64>,
    /// What the account is credited once it has failed, where that is not what it was debited: rounding has moved to another part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub returned_minor: Option<i64>,
    /// Its state at the processor.
    pub at_processor: Option<ProcessorRefund>,
}

/// The state of its debit between the payment and the account.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "taking", rename_all = "snake_case")]
pub enum RefundDebit {
    /// The account is asked to debit at most this amount; where it is not exact, a smaller amount will do.
    Asked {
        most_minor: i64,
        is_exact: bool,
    },
    Taken {
        amount_minor: i64,
    },
    Refused {
        why: String,
    },
    /// The processor did not pay it, and the account was credited again.
    GivenBack {
        amount_minor: i64,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessorRefund {
    pub processor_refund_id: String,
    pub status: RefundStatus,
}

/// In the order of progress; an earlier status that arrives later is stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefundStatus {
    Pending,
    Succeeded,
    /// Also after it had succeeded: a bank may return it.
    Failed,
}

impl Refund {
    /// The refund of a deposit that no account has: it need not be debited.
    pub(super) fn of_refused_deposit(
        amount_minor: i64,
        charged_minor: Option<i64>,
        why: &str,
        ctx: &TransitionContext<'_>,
    ) -> Self {
        let taking = RefundDebit::Taken { amount_minor };
        Self {
            reason: why.to_owned(),
            asked_at: ctx.now,
            taking,
            charged_minor,
            returned_minor: None,
            at_processor: None,
        }
    }

    pub(super) fn status(&self) -> Option<RefundStatus> {
        self.at_processor.as_ref().map(|it| it.status)
    }

    /// The amount that it takes of the payment, also while it is only requested.
    #[must_use]
    pub const fn gone_minor(&self) -> i64 {
        match self.taking {
            RefundDebit::Asked { most_minor, .. } => most_minor,
            RefundDebit::Taken { amount_minor } => amount_minor,
            RefundDebit::GivenBack { amount_minor } => amount_minor - self.credit_minor(amount_minor),
            RefundDebit::Refused { .. } => 0,
        }
    }

    /// What the account is credited once it has failed.
    pub(super) const fn credit_minor(&self, taken_minor: i64) -> i64 {
        match self.returned_minor {
            Some(returned) => returned,
            None => taken_minor,
        }
    }

    pub(super) fn deadline(&self) -> Option<Deadline> {
        let waits_for = match (&self.taking, self.status()) {
            (RefundDebit::Asked { .. }, _) => "a refund is to be taken from the account",
            (RefundDebit::Taken { .. }, None | Some(RefundStatus::Pending)) => "the processor is to pay a refund",
            (RefundDebit::Taken { .. }, Some(RefundStatus::Failed)) => {
                "a failed refund is to be credited to the account"
            }
            (RefundDebit::Taken { .. }, Some(RefundStatus::Succeeded))
            | (RefundDebit::Refused { .. } | RefundDebit::GivenBack { .. }, _) => return None,
        };
        Some(Deadline::new(self.asked_at + REFUND_OVERDUE_AFTER, waits_for))
    }
}
