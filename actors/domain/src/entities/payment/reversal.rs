//! Reversals: money that was taken back at the processor without a request from here. A reversal is posted in full, whatever the balance
//! is.

use super::{MAX_REFUNDS, OVERDUE_AFTER, Payment, Rejection, Reply, ReversalStep, is_an_amount};
use crate::audit::AuditAction;
use crate::money::{Currency, HIGHEST_BALANCE_MINOR};
use crate::state_machine::{Deadline, Timestamp, Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::json;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reversal {
    pub made: ReversalOrigin,
    pub amount_minor: i64,
    pub heard_at: Timestamp,
    /// It was won, failed, or turned out to be one of the payment's own refunds. That is final, whatever arrives later.
    pub is_undone: bool,
    /// The account was asked to post it, and may have done so.
    pub is_said: bool,
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

impl ReversalStep {
    const fn made(self) -> ReversalOrigin {
        match self {
            Self::Refund | Self::RefundFailed => ReversalOrigin::Refund,
            Self::DisputeOpened | Self::DisputeWon => ReversalOrigin::Dispute,
        }
    }

    const fn undoes(self) -> bool {
        match self {
            Self::Refund | Self::DisputeOpened => false,
            Self::RefundFailed | Self::DisputeWon => true,
        }
    }

    const fn name(self) -> &'static str {
        self.into_str()
    }
}

impl Reversal {
    pub(super) const fn gone_minor(&self) -> i64 {
        if self.is_undone { 0 } else { self.amount_minor }
    }

    /// The account has to post and confirm it; a request that was sent cannot be withdrawn.
    pub(super) const fn is_to_be_posted(&self) -> bool {
        self.is_said && !self.is_posted
    }

    /// The account has to post that it is undone.
    pub(super) const fn is_to_be_posted_back(&self) -> bool {
        self.is_undone && self.is_posted && !self.is_posted_back
    }

    pub(super) fn deadline(&self) -> Option<Deadline> {
        let waits_for = "a reversal is to be posted to the account";
        (self.is_to_be_posted() || self.is_to_be_posted_back())
            .then(|| Deadline::new(self.heard_at + OVERDUE_AFTER, waits_for))
    }
}

impl Payment {
    pub(super) fn reversed(
        &self,
        reversal_id: String,
        what: ReversalStep,
        amount_minor: i64,
        currency: &Currency,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if !is_an_amount(amount_minor) {
            return Err(Rejection::Amount { min: 1, max: HIGHEST_BALANCE_MINOR });
        }
        let ours = |id: &str| {
            let mut refunds = self.refunds.values().filter_map(|refund| refund.at_processor.as_ref());
            refunds.any(|it| it.processor_refund_id == id)
        };
        if ours(&reversal_id) {
            return Ok(Transition::stay(Reply::Done));
        }
        if let Some(step) = self.reviewed_money_reversed(what, amount_minor, currency, ctx)? {
            return Ok(step);
        }
        let known = self.reversals.get(&reversal_id);
        // In another currency it is refused as a contradiction.
        let (amount_minor, currency) = match self.part_minor(amount_minor, currency) {
            Some(part) => (part, &self.currency),
            None => (amount_minor, currency),
        };
        self.check_amount(known.map_or(amount_minor, |known| known.amount_minor), amount_minor, currency)?;
        if known.is_some_and(|known| known.is_undone || !what.undoes()) {
            return Ok(Transition::stay(Reply::Done));
        }
        if known.is_none() && self.reversals.len() >= MAX_REFUNDS {
            return Err(Rejection::TooManyRefunds);
        }
        let audit = self.audit(
            AuditAction::PaymentsReverse,
            json!({ "reversal_id": reversal_id, "what": what.name(), "amount_minor": amount_minor }),
        );
        let mut next = self.clone();
        let reversal = next.reversals.entry(reversal_id).or_insert(Reversal {
            made: what.made(),
            amount_minor,
            heard_at: ctx.now,
            is_undone: false,
            is_said: false,
            is_posted: false,
            is_posted_back: false,
        });
        reversal.is_undone |= what.undoes();
        reversal.heard_at = ctx.now;
        Ok(self.transition(next, "the payment processor reported a reversal", ctx).audit(audit))
    }

    pub(super) fn reversal_posted(
        &self,
        reversal_id: &str,
        is_undone: bool,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let mut next = self.clone();
        let Some(reversal) = next.reversals.get_mut(reversal_id) else { return Transition::stay(Reply::Done) };
        reversal.is_posted = true;
        reversal.is_posted_back |= is_undone;
        if next == *self {
            return Transition::stay(Reply::Done);
        }
        self.transition(next, "the account has posted it", ctx)
    }
}
