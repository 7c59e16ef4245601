//! What the payer asks back: taken from the account first, then paid by the processor.

use super::{MOST, Payment, Phase, REFUND_OVERDUE_AFTER, Rejection, Reply, Reversal};
use crate::audit::AuditAction;
use crate::event::Event;
use crate::id::RefundId;
use crate::machine::{Ctx, Deadline, Machine as _, Step, Timestamp};
use crate::policy::Key;
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use serde_json::json;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refund {
    pub reason: String,
    pub asked_at: Timestamp,
    pub taking: Taking,
    /// What the processor has said of it.
    pub at_processor: Option<AtProcessor>,
}

/// How it stands between the payment and its account.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "taking", rename_all = "snake_case")]
pub enum Taking {
    /// The account is to take so much aside; where it is not exact, less will do.
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
    /// The processor did not pay it, and the account has it again.
    GivenBack {
        amount_minor: i64,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AtProcessor {
    pub processor_refund_id: String,
    pub status: RefundStatus,
}

/// In the order in which it can come about; what was said later and is less is old.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefundStatus {
    Pending,
    Succeeded,
    /// Also after it had succeeded: a bank may send it back.
    Failed,
}

impl Refund {
    /// It was never in an account, and need not be taken from one.
    pub(super) fn of_what_no_account_has(amount_minor: i64, why: &str, ctx: &Ctx<'_>) -> Self {
        let taking = Taking::Taken { amount_minor };
        Self { reason: why.to_owned(), asked_at: ctx.now, taking, at_processor: None }
    }

    pub(super) fn status(&self) -> Option<RefundStatus> {
        self.at_processor.as_ref().map(|it| it.status)
    }

    /// What it takes of the payment, also while that is only asked.
    #[must_use]
    pub const fn gone_minor(&self) -> i64 {
        match self.taking {
            Taking::Asked { most_minor, .. } => most_minor,
            Taking::Taken { amount_minor } => amount_minor,
            Taking::Refused { .. } | Taking::GivenBack { .. } => 0,
        }
    }

    pub(super) fn deadline(&self) -> Option<Deadline> {
        let waits_for = match (&self.taking, self.status()) {
            (Taking::Asked { .. }, _) => "a refund is to be taken from the account",
            (Taking::Taken { .. }, None | Some(RefundStatus::Pending)) => "the processor is to pay a refund",
            (Taking::Taken { .. }, Some(RefundStatus::Failed)) => "a refund that failed is to be given back",
            (Taking::Taken { .. }, Some(RefundStatus::Succeeded))
            | (Taking::Refused { .. } | Taking::GivenBack { .. }, _) => return None,
        };
        Some(Deadline::new(self.asked_at + REFUND_OVERDUE_AFTER, waits_for))
    }
}

impl Payment {
    pub(super) fn refund(
        &self,
        refund_id: RefundId,
        amount_minor: Option<i64>,
        reason: String,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        // It exists for nobody else.
        if !ctx.by.is_user(&self.payer) {
            return Err(Rejection::NotFound);
        }
        if self.refunds.contains_key(&refund_id) {
            return Ok(Step::stay(self.shown()));
        }
        let Phase::Deposited { paid_at, .. } = self.phase else {
            return Err(Rejection::NotPaid { state: self.state().to_owned() });
        };
        let days = ctx.policy.int(Key::AllocationRefundWindow, &self.holder.scopes(), ctx.now);
        if ctx.now - paid_at > TimeDelta::days(days) {
            return Err(Rejection::TooLate { days });
        }
        if self.refunds.len() >= MOST {
            return Err(Rejection::TooManyRefunds);
        }
        let left = self.left_minor();
        let most_minor = amount_minor.unwrap_or(left);
        if most_minor <= 0 || most_minor > left {
            return Err(Rejection::MoreThanLeft { left });
        }
        let audit = self.audit(
            AuditAction::PaymentsRefund,
            json!({ "refund_id": refund_id, "amount_minor": amount_minor, "reason": reason }),
        );
        let taking = Taking::Asked { most_minor, is_exact: amount_minor.is_some() };
        let refund = Refund { reason, asked_at: ctx.now, taking, at_processor: None };
        let mut next = self.clone();
        next.refunds.insert(refund_id, refund);
        Ok(self.to(next, "the payer wants money back", ctx).audit(audit))
    }

    pub(super) fn refund_taken(
        &self,
        refund_id: RefundId,
        amount_minor: i64,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        let Taking::Asked { most_minor, is_exact } = self.known(refund_id)?.taking else {
            return Ok(Step::stay(Reply::Done));
        };
        if amount_minor <= 0 || amount_minor > most_minor || (is_exact && amount_minor != most_minor) {
            self.is_about(most_minor, amount_minor, &self.currency)?;
        }
        Ok(self.taking(refund_id, Taking::Taken { amount_minor }, "taken from the account for the payer", ctx))
    }

    pub(super) fn refund_refused(
        &self,
        refund_id: RefundId,
        why: String,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        match self.known(refund_id)?.taking {
            Taking::Asked { .. } => {
                Ok(self.taking(refund_id, Taking::Refused { why }, "the account does not have it", ctx))
            }
            Taking::Taken { .. } | Taking::Refused { .. } | Taking::GivenBack { .. } => Ok(Step::stay(Reply::Done)),
        }
    }

    pub(super) fn refund_at(
        &self,
        refund_id: RefundId,
        processor_refund_id: String,
        status: RefundStatus,
        amount_minor: i64,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        let refund = self.known(refund_id)?;
        let (Taking::Taken { amount_minor: taken } | Taking::GivenBack { amount_minor: taken }) = refund.taking else {
            return Err(Rejection::RefundUnknown);
        };
        self.is_about(taken, amount_minor, &self.currency)?;
        if let Some(known) = refund.at_processor.as_ref().filter(|it| it.processor_refund_id != processor_refund_id) {
            return Err(Rejection::PaidTwice { as_of: known.processor_refund_id.clone(), again: processor_refund_id });
        }
        if refund.status() >= Some(status) {
            return Ok(Step::stay(Reply::Done));
        }
        let mut next = self.clone();
        // Heard before as somebody else's: it was this one, and was taken already.
        if let Some(reversal) = next.reversals.get_mut(&processor_refund_id) {
            reversal.is_undone = true;
        }
        if let Some(refund) = next.refunds.get_mut(&refund_id) {
            refund.at_processor = Some(AtProcessor { processor_refund_id, status });
        }
        let step = self.to(next, "the processor speaks of a refund", ctx);
        // Nobody has to act on it: it is for those who watch.
        let is_paid = status == RefundStatus::Succeeded;
        Ok(if is_paid { step.event(Event::RefundSucceeded { payment_id: self.id, refund_id }) } else { step })
    }

    pub(super) fn given_back(&self, refund_id: RefundId, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        let refund = self.known(refund_id)?;
        let (Taking::Taken { amount_minor }, Some(RefundStatus::Failed)) = (&refund.taking, refund.status()) else {
            return Ok(Step::stay(Reply::Done));
        };
        let given_back = Taking::GivenBack { amount_minor: *amount_minor };
        Ok(self.taking(refund_id, given_back, "a refund failed, and the account has it again", ctx))
    }

    /// There is one, and nobody asks for it.
    pub(super) const fn id_of_refused(&self) -> RefundId {
        RefundId(self.id.0)
    }

    /// What no account can have lies at the processor until its payer has it. What neither a refund of ours nor anybody there pays back, or
    /// comes back from where it was taken, somebody has to see to.
    pub(super) fn deadline_of_refused(&self, at: Timestamp) -> Option<Deadline> {
        let pending = |refund: &&Refund| matches!(refund.status(), None | Some(RefundStatus::Pending));
        if let Some(pending) = self.refunds.values().find(pending) {
            return pending.deadline();
        }
        let paid_back = self.refunds.values().filter(|refund| refund.status() == Some(RefundStatus::Succeeded));
        let back = paid_back.map(Refund::gone_minor).chain(self.reversals.values().map(Reversal::gone_minor));
        let waits_for = "what no account can have is to be paid back at the processor, by an operator";
        (back.fold(0, i64::saturating_add) < self.amount_minor).then(|| Deadline::new(at, waits_for))
    }

    fn known(&self, refund_id: RefundId) -> Result<&Refund, Rejection> {
        self.refunds.get(&refund_id).ok_or(Rejection::RefundUnknown)
    }

    fn taking(&self, refund_id: RefundId, taking: Taking, why: &str, ctx: &Ctx<'_>) -> Step<Self> {
        let mut next = self.clone();
        if let Some(refund) = next.refunds.get_mut(&refund_id) {
            refund.taking = taking;
        }
        self.to(next, why, ctx)
    }
}
