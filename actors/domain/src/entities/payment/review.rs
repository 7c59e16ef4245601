//! The review of a payment: the processor was paid in its name, in another amount or currency than was ordered. No account is credited with
//! such money; an operator settles it, at the processor or by an adjustment.

use super::{Payment, Phase, Rejection, Reply, ReversalStep, differs};
use crate::money::{Currency, MicroAmount};
use crate::state_machine::{Transition, TransitionContext};

/// Money that was paid at the processor in another amount or currency than was ordered.
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
                self.close_review(processor_id, "an operator settled the payment of another amount or currency", ctx)
            }
            Some(_) | None => Transition::stay(Reply::Done),
        }
    }

    /// All of the money under review goes back at the processor: no account had it, and nothing is posted. `None` where this is about other
    /// money.
    ///
    /// # Errors
    /// [`Rejection::Differs`] of a part of it, of a dispute, and of settled money that comes back: the report waits until an operator has settled
    /// the review, since the order may yet be paid, and is settled by an operator, too.
    pub(super) fn reviewed_money_reversed(
        &self,
        what: ReversalStep,
        amount_minor: i64,
        currency: &Currency,
        ctx: &TransitionContext<'_>,
    ) -> Result<Option<Transition<Self>>, Rejection> {
        if let Some(it) = self.under_review() {
            let is_whole = it.currency == currency && amount_minor >= it.amount_minor;
            if what == ReversalStep::Refund && is_whole {
                let why = "the payment of another amount or currency was refunded at the processor";
                return Ok(Some(self.close_review(it.processor_id, why, ctx)));
            }
            return Err(differs(it.amount_minor, it.currency, amount_minor, currency));
        }
        if self.settled.is_empty() || self.paid_at().is_some() {
            return Ok(None);
        }
        match what {
            // The money is at the processor again.
            ReversalStep::RefundFailed => Err(differs(0, currency, amount_minor, currency)),
            ReversalStep::Refund | ReversalStep::DisputeOpened | ReversalStep::DisputeWon => {
                Ok(Some(Transition::stay(Reply::Done)))
            }
        }
    }

    fn close_review(&self, processor_id: &str, why: &str, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut next = Self { phase: Phase::Canceled { at: ctx.now, why: why.to_owned() }, ..self.clone() };
        next.settled.insert(processor_id.to_owned());
        self.transition(next, why, ctx)
    }
}
