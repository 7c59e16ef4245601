//! The review of a payment: the processor was paid in its name, in another amount or currency than was ordered. No account is credited with
//! such money. An operator settles it, where they have credited its worth by an adjustment, or dismisses it, where the money goes back or was
//! not paid; a whole refund at the processor ends it, too (deploy/decisions/0098). In the same way an operator ends the wait of money that no
//! account can have, and that cannot be refunded.

use super::reversal_record::ReportedReversal;
use super::{Payment, Phase, PhaseName, Refund, RefundStatus, Rejection, Reply, Reversal, ReversalStep, differs};
use crate::audit::{AuditAction, AuditRecord};
use crate::money::{Currency, minor_in_currency};
use crate::state_machine::{Timestamp, Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fmt;

/// The bound of reviews of one payment.
pub(super) const MAX_REVIEWS: usize = 100;

/// A review that has ended. Its money is never credited by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndedReview {
    /// The processor's id of what was paid.
    pub processor_id: String,
    pub amount_minor: i64,
    pub currency: Currency,
    pub decision: ReviewDecision,
    pub at: Timestamp,
}

impl EndedReview {
    fn review(&self) -> ReviewId {
        let Self { processor_id, amount_minor, currency, .. } = self;
        ReviewId { processor_id: processor_id.clone(), amount_minor: *amount_minor, currency: currency.clone() }
    }
}

/// How a review has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::Display)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum ReviewDecision {
    /// An operator has credited its worth to an account, or paid it back outside of the processor.
    Settled,
    /// An operator has decided that nothing is credited: the money goes back at the processor, or was not paid.
    Dismissed,
    /// All of it was refunded at the processor.
    Refunded,
}

impl ReviewDecision {
    /// As an operator and the payer read it.
    const fn described(self) -> &'static str {
        match self {
            Self::Settled => "an operator settled what was paid in another amount or currency",
            Self::Dismissed => "an operator dismissed what was paid in another amount or currency",
            Self::Refunded => "the payment of another amount or currency was refunded at the processor",
        }
    }

    /// True where no account has the worth of the money.
    const fn credits_nothing(self) -> bool {
        match self {
            Self::Settled => false,
            Self::Dismissed | Self::Refunded => true,
        }
    }
}

/// What one review is about, which is its identity: no payment is reviewed twice in the same terms. Its name is `pi_1:4200:GBP`, with the amount
/// in minor units.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReviewId {
    /// The processor's id of what was paid.
    pub processor_id: String,
    pub amount_minor: i64,
    pub currency: Currency,
}

impl ReviewId {
    fn ended(self, decision: ReviewDecision, at: Timestamp) -> EndedReview {
        let Self { processor_id, amount_minor, currency } = self;
        EndedReview { processor_id, amount_minor, currency, decision, at }
    }

    /// Whether an operator's request names it.
    fn is_named(&self, name: &str) -> bool {
        self.to_string() == name
    }
}

impl fmt::Display for ReviewId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.processor_id, self.amount_minor, self.currency.as_str())
    }
}

impl Payment {
    fn under_review(&self) -> Option<ReviewId> {
        match &self.phase {
            Phase::UnderReview { processor_id, amount_minor, currency, .. } => Some(ReviewId {
                processor_id: processor_id.clone(),
                amount_minor: *amount_minor,
                currency: currency.clone(),
            }),
            Phase::Created { .. }
            | Phase::Open { .. }
            | Phase::Paid { .. }
            | Phase::Deposited { .. }
            | Phase::Refused { .. }
            | Phase::Canceled { .. }
            | Phase::Expired { .. } => None,
        }
    }

    /// What waits for an operator's decision: money that was paid otherwise than was ordered, or that no account can have and no refund brings
    /// back to its payer.
    #[must_use]
    pub fn review(&self) -> Option<ReviewId> {
        self.under_review().or_else(|| {
            let processor_id = self.processor_id.clone().filter(|_| self.is_not_paid_back())?;
            Some(ReviewId { processor_id, amount_minor: self.amount_minor, currency: self.currency.clone() })
        })
    }

    /// For the payer: what was paid, what was to be paid, and who acts.
    #[must_use]
    pub fn review_reason(&self) -> Option<String> {
        let it = self.under_review()?;
        let shown = |minor: i64, currency: &Currency| minor_in_currency(minor, Some(currency));
        let paid = shown(it.amount_minor, &it.currency);
        if let Some(ended) = self.ended_review(&it.processor_id) {
            return Some(format!(
                "{paid} was reported by the payment processor after {}; an operator decides about it",
                ended.decision.described()
            ));
        }
        let ordered = shown(self.amount_minor, &self.currency);
        Some(format!(
            "{paid} was paid at the payment processor, and {ordered} was to be paid; an operator decides about it"
        ))
    }

    /// The last review of this money that has ended.
    pub(super) fn ended_review(&self, processor_id: &str) -> Option<&EndedReview> {
        self.reviews.iter().rev().find(|review| review.processor_id == processor_id)
    }

    /// True where a review has ended of this money, in these terms.
    pub(super) fn is_reviewed_as(&self, processor_id: &str, amount_minor: i64, currency: &Currency) -> bool {
        let terms = (processor_id, amount_minor, currency);
        self.reviews.iter().any(|it| (it.processor_id.as_str(), it.amount_minor, &it.currency) == terms)
    }

    /// The first such report counts. What was decided about stays decided, however often the processor reports it in the same terms.
    pub(super) fn paid_otherwise(
        &self,
        processor_id: String,
        amount_minor: i64,
        currency: Currency,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let is_known = self.is_reviewed_as(&processor_id, amount_minor, &currency);
        if self.paid_at().is_some() || is_known {
            return Ok(Transition::stay(Reply::Done));
        }
        self.check_no_other_review(&processor_id)?;
        if self.under_review().is_some() {
            return Ok(Transition::stay(Reply::Done));
        }
        if self.reviews.len() >= MAX_REVIEWS {
            return Err(Rejection::TooManyReviews);
        }
        let phase = Phase::UnderReview { at: ctx.now, processor_id, amount_minor, currency };
        Ok(self.transition(Self { phase, declined: None, ..self.clone() }, "paid otherwise than was ordered", ctx))
    }

    /// Refuses other money than what is under review: its event waits for an operator, who has it processed again when the review has ended.
    pub(super) fn check_no_other_review(&self, processor_id: &str) -> Result<(), Rejection> {
        match self.under_review() {
            Some(it) if it.processor_id != processor_id => {
                Err(Rejection::PaidTwice { as_of: it.processor_id, again: processor_id.to_owned() })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// An operator has dismissed the processor's event about this money.
    pub(super) fn event_dismissed(&self, processor_id: &str, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match self.under_review() {
            Some(it) if it.processor_id == processor_id => self.end_review(it, ReviewDecision::Dismissed, ctx),
            Some(_) | None => Transition::stay(Reply::Done),
        }
    }

    /// An operator's decision about the review that they saw. Repeated it changes nothing, whatever came under review since; another one than was
    /// made is refused, and so is one about another review than the present one.
    ///
    /// A member of an earlier release names no review: its request decides about none.
    pub(super) fn decide_review(
        &self,
        decision: ReviewDecision,
        name: Option<&str>,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let current = self.review();
        if let Some(it) = current.clone().filter(|it| name.is_some_and(|name| it.is_named(name))) {
            let audit = self.decision_audit(&it, decision, reason);
            if self.under_review().is_some() {
                return Ok(self.end_review(it, decision, ctx).audit(audit));
            }
            let mut next = self.clone();
            next.reviews.push(it.ended(decision, ctx.now));
            let why = "an operator decided about what no account can have";
            return Ok(self.transition(next, why, ctx).audit(audit));
        }
        let made = match name {
            Some(name) => self.reviews.iter().rev().find(|ended| ended.review().is_named(name)),
            None => self.reviews.last().filter(|_| current.is_none()),
        };
        match (made.map(|ended| ended.decision), current) {
            (Some(made), _) if made.credits_nothing() == decision.credits_nothing() => {
                Ok(Transition::stay(self.shown()))
            }
            (Some(made), _) => Err(Rejection::ReviewEnded { decision: made }),
            (None, Some(current)) => Err(Rejection::OtherReview { current }),
            (None, None) => Err(Rejection::NotUnderReview { state: PhaseName::from(&self.phase) }),
        }
    }

    fn decision_audit(&self, it: &ReviewId, decision: ReviewDecision, reason: &str) -> AuditRecord {
        let action = match decision {
            ReviewDecision::Settled => AuditAction::PaymentsSettleReview,
            ReviewDecision::Dismissed | ReviewDecision::Refunded => AuditAction::PaymentsDismissReview,
        };
        self.audit(
            action,
            json!({
                "processor_id": it.processor_id, "amount_minor": it.amount_minor, "currency": it.currency.as_str(),
                "reason": reason,
            }),
        )
    }

    /// True of a refused payment that no refund under way pays back, and that no operator has ended.
    pub(super) fn is_not_paid_back(&self) -> bool {
        let pending = |refund: &Refund| matches!(refund.status(), None | Some(RefundStatus::Pending));
        if !matches!(self.phase, Phase::Refused { .. }) || self.refunds.values().any(pending) {
            return false;
        }
        let paid_back = self.refunds.values().filter(|refund| refund.status() == Some(RefundStatus::Succeeded));
        let back = paid_back.map(Refund::gone_minor).chain(self.reversals.values().map(Reversal::gone_minor));
        let is_ended = self.processor_id.as_deref().is_some_and(|own| self.ended_review(own).is_some());
        !is_ended && back.fold(0, i64::saturating_add) < self.amount_minor
    }

    /// A reversal of money that is under review, or that was decided about: no account had it, and nothing is posted. `None` where the
    /// reversal is of the payment's own money.
    ///
    /// # Errors
    /// What an operator has to settle: a part or a dispute of money under review, money that comes back after it was dismissed, money that goes
    /// back after an operator has credited its worth, and money beside that of a payment.
    pub(super) fn other_money_reversed(
        &self,
        reported: &ReportedReversal,
        ctx: &TransitionContext<'_>,
    ) -> Result<Option<Transition<Self>>, Rejection> {
        let ReportedReversal { what, amount_minor, currency, of, .. } = reported;
        if let Some(it) = self.under_review().filter(|it| of.as_ref().is_none_or(|of| *of == it.processor_id)) {
            let is_whole = it.currency == *currency && *amount_minor >= it.amount_minor;
            if *what == ReversalStep::Refund && is_whole {
                return Ok(Some(self.end_review(it, ReviewDecision::Refunded, ctx)));
            }
            return Err(differs(it.amount_minor, &it.currency, *amount_minor, currency));
        }
        let is_own = |of: &String| self.paid_as().is_some_and(|own| own == of) || self.charge_id.as_ref() == Some(of);
        // No account has the money of a refused payment: an operator may have decided about it.
        let has_own = self.paid_at().is_some() && !matches!(self.phase, Phase::Refused { .. });
        let ended = match of {
            Some(of) if is_own(of) && has_own => None,
            Some(of) if is_own(of) => self.processor_id.as_deref().and_then(|own| self.ended_review(own)),
            Some(of) => self.ended_review(of),
            None if !has_own => self.reviews.last(),
            None => None,
        };
        match (ended, of, self.paid_as()) {
            (Some(EndedReview { decision, processor_id, .. }), _, _) => match (decision.credits_nothing(), what) {
                (true, ReversalStep::Refund | ReversalStep::DisputeOpened) => Ok(Some(Transition::stay(Reply::Done))),
                (false, _) | (true, ReversalStep::RefundFailed | ReversalStep::DisputeWon) => {
                    Err(Rejection::Reviewed { processor_id: processor_id.clone(), decision: *decision })
                }
            },
            (None, Some(of), Some(own)) if !is_own(of) => {
                Err(Rejection::PaidTwice { as_of: own.clone(), again: of.clone() })
            }
            (None, _, _) => Ok(None),
        }
    }

    /// The processor's id of the money that was credited, or is to be.
    pub(super) fn paid_as(&self) -> Option<&String> {
        self.paid_at().and(self.processor_id.as_ref())
    }

    fn end_review(&self, it: ReviewId, decision: ReviewDecision, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let (why, at) = (decision.described(), ctx.now);
        let mut next = Self { phase: Phase::Canceled { at, why: why.to_owned() }, ..self.clone() };
        next.reviews.push(it.ended(decision, at));
        self.transition(next, why, ctx)
    }
}
