//! The review of a payment: the processor was paid in its name, in another amount or currency than was ordered. No account is credited with
//! such money; an operator settles it, at the processor or by an adjustment.

use super::{Payment, Phase, Reply, ReversalStep};
use crate::money::{Currency, MicroAmount};
use crate::state_machine::{Transition, TransitionContext};

/// What was paid in place of the order.
struct ReviewedMoney<'a> {
    processor_id: &'a str,
    amount_minor: i64,
    currency: &'a Currency,
}

impl Payment {
    fn under_review(&self) -> Option<ReviewedMoney<'_>> {
        match &self.phase {
            Phase::UnderReview { processor_id, amount_minor, currency, .. } => {
                Some(ReviewedMoney { processor_id, amount_minor: *amount_minor, currency })
            }
            Phase::Created { .. }
            | Phase::Open { .. }
            | Phase::Paid { .. }
            | Phase::Deposited { .. }
            | Phase::Refused { .. }
            | Phase::Canceled { .. }
            | Phase::Expired { .. } => None,
        }
    }

    /// For the payer: what was paid, what was to be paid, and who acts.
    #[must_use]
    pub fn review_reason(&self) -> Option<String> {
        let it = self.under_review()?;
        let shown = |minor: i64, currency: &Currency| match MicroAmount::of_minor(minor) {
            Some(amount) => amount.in_currency(currency),
            None => format!("{minor} minor units of {}", currency.as_str()),
        };
        let (paid, ordered) = (shown(it.amount_minor, it.currency), shown(self.amount_minor, &self.currency));
        Some(format!("{paid} was paid at the payment processor, and {ordered} was to be paid; an operator settles it"))
    }

    /// The first such report counts. What an operator has settled stays settled, however often the processor reports it.
    pub(super) fn paid_otherwise(
        &self,
        processor_id: String,
        amount_minor: i64,
        currency: Currency,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        if self.paid_at().is_some() || self.under_review().is_some() || self.settled.contains(&processor_id) {
            return Transition::stay(Reply::Done);
        }
        let phase = Phase::UnderReview { at: ctx.now, processor_id, amount_minor, currency };
        self.transition(Self { phase, declined: None, ..self.clone() }, "paid otherwise than was ordered", ctx)
    }

    /// An operator has dismissed the processor's event about this money.
    pub(super) fn review_settled(&self, processor_id: &str, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match self.under_review() {
            Some(it) if it.processor_id == processor_id => {
                self.close_review(processor_id, "an operator has settled what was paid in its place", ctx)
            }
            Some(_) | None => Transition::stay(Reply::Done),
        }
    }

    /// Money under review goes back at the processor: no account had it, and nothing is posted. `None` where this is about other money.
    pub(super) fn reviewed_money_reversed(
        &self,
        what: ReversalStep,
        amount_minor: i64,
        currency: &Currency,
        ctx: &TransitionContext<'_>,
    ) -> Option<Transition<Self>> {
        if let Some(it) = self.under_review() {
            let is_whole = it.currency == currency && amount_minor >= it.amount_minor;
            return Some(match what {
                ReversalStep::Refund if is_whole => {
                    self.close_review(it.processor_id, "what was paid in its place was refunded at the processor", ctx)
                }
                ReversalStep::Refund
                | ReversalStep::RefundFailed
                | ReversalStep::DisputeOpened
                | ReversalStep::DisputeWon => Transition::stay(Reply::Done),
            });
        }
        let is_of_settled = !self.settled.is_empty() && self.paid_at().is_none();
        is_of_settled.then(|| Transition::stay(Reply::Done))
    }

    fn close_review(&self, processor_id: &str, why: &str, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut next = Self { phase: Phase::Canceled { at: ctx.now, why: why.to_owned() }, ..self.clone() };
        next.settled.insert(processor_id.to_owned());
        self.transition(next, why, ctx)
    }
}
