//! What a payment still has to say, to its account and to the processor.

use super::{Made, Payment, Phase, RefundStatus, Reply, Taking};
use crate::again::Again;
use crate::event::Event;
use crate::id::{PaymentId, RefundId};
use crate::machine::{Ctx, Step, Timestamp};
use crate::money::Currency;
use serde::{Deserialize, Serialize};

/// What is to be done at the processor. Whoever does it looks first: it may have been done, and the answer lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "errand", rename_all = "snake_case")]
pub enum Errand {
    /// It was created, and nobody said that it was opened: look for it by our id.
    Open { payment_id: PaymentId },
    /// How does it stand? `is_over`: nobody waits for it any more, cancel it.
    Check { payment_id: PaymentId, processor_id: String, is_over: bool },
    /// Pay back, once, what was taken from the account or could not be in it; or see how that stands.
    Refund { payment_id: PaymentId, refund_id: RefundId, processor_id: String, amount_minor: i64, currency: Currency },
}

impl Errand {
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Open { .. } => "open",
            Self::Check { .. } => "check",
            Self::Refund { .. } => "refund",
        }
    }
}

impl Payment {
    /// On to `next`: what it owes and did not owe before is said at once, and all of it again until it is answered.
    pub(super) fn to(&self, mut next: Self, why: &str, ctx: &Ctx<'_>) -> Step<Self> {
        // An account that does not have the money cannot lose it.
        if matches!(next.phase, Phase::Deposited { .. }) {
            next.reversals.values_mut().for_each(|it| it.is_said |= !it.is_undone);
        }
        let (before, owed) = (self.owed(), next.owed());
        let news: Vec<_> = owed.iter().filter(|event| !before.contains(event)).cloned().collect();
        let waits = !owed.is_empty() || !next.watched(ctx.now).is_empty();
        // A new wait begins with short pauses.
        let begins = !news.is_empty() || self.phase != next.phase;
        let again = match self.again {
            Some(again) if waits && !begins => Some(again),
            Some(_) | None => waits.then(|| Again::first(ctx.now)),
        };
        let next = Self { again, ..next };
        let reply = next.shown();
        news.into_iter().fold(Step::to(next, reply, why), Step::event)
    }

    pub(super) fn tick(&self, ctx: &Ctx<'_>) -> Step<Self> {
        let Some(again) = self.again.filter(|again| again.is_due(ctx.now)) else { return Step::stay(Reply::Done) };
        let said: Vec<_> = self.owed().into_iter().chain(self.watched(ctx.now)).collect();
        let again = (!said.is_empty()).then(|| again.next(ctx.now));
        let step = Step::to(Self { again, ..self.clone() }, Reply::Done, "what is not answered is said again");
        said.into_iter().fold(step, Step::event)
    }

    /// True where nobody owes anybody anything of it.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let is_paid_back = match self.phase {
            Phase::Refused { at, .. } => self.deadline_of_refused(at).is_none(),
            Phase::Created { .. }
            | Phase::Open { .. }
            | Phase::Paid { .. }
            | Phase::Deposited { .. }
            | Phase::Canceled { .. }
            | Phase::Expired { .. } => self.refunds.values().all(|refund| refund.deadline().is_none()),
        };
        is_paid_back && self.owed().is_empty()
    }

    /// What somebody has to do.
    pub(super) fn owed(&self) -> Vec<Event> {
        let (payment_id, holder) = (self.id, &self.holder);
        let mut owed = Vec::new();
        if let Phase::Paid { .. } = self.phase {
            owed.push(Event::PaymentPaid {
                payment_id,
                holder: holder.clone(),
                currency: self.currency.clone(),
                amount_minor: self.amount_minor,
            });
        }
        for (refund_id, refund) in &self.refunds {
            let refund_id = *refund_id;
            match (&refund.taking, refund.status()) {
                (Taking::Asked { most_minor, is_exact }, _) => owed.push(Event::RefundRequested {
                    payment_id,
                    refund_id,
                    holder: holder.clone(),
                    amount_minor: *most_minor,
                    is_exact: *is_exact,
                }),
                (Taking::Taken { .. }, None) => owed.extend(self.refund_due(refund_id)),
                // What no account had goes back to none.
                (Taking::Taken { .. }, Some(RefundStatus::Failed)) if matches!(self.phase, Phase::Refused { .. }) => {}
                (Taking::Taken { amount_minor }, Some(RefundStatus::Failed)) => owed.push(Event::RefundFailed {
                    payment_id,
                    refund_id,
                    holder: holder.clone(),
                    amount_minor: *amount_minor,
                }),
                (Taking::Taken { .. }, Some(RefundStatus::Pending | RefundStatus::Succeeded))
                | (Taking::Refused { .. } | Taking::GivenBack { .. }, _) => {}
            }
        }
        owed.extend(self.reversals.iter().filter_map(|(id, it)| it.owed(payment_id, holder, id)));
        owed
    }

    /// What goes on elsewhere and is looked after from time to time, since its word may be lost.
    fn watched(&self, now: Timestamp) -> Vec<Event> {
        let payment_id = self.id;
        let processor_id = || self.processor_id.clone().unwrap_or_default();
        match self.phase {
            Phase::Created { .. } => vec![Event::PaymentOpeningDue { payment_id }],
            Phase::Open { until } => {
                vec![Event::PaymentCheckDue { payment_id, processor_id: processor_id(), is_over: now >= until }]
            }
            Phase::Paid { .. } | Phase::Deposited { .. } | Phase::Refused { .. } => {
                let pending = self.refunds.iter().filter(|(_, refund)| {
                    matches!(refund.taking, Taking::Taken { .. }) && refund.status() == Some(RefundStatus::Pending)
                });
                pending.filter_map(|(refund_id, _)| self.refund_due(*refund_id)).collect()
            }
            Phase::Canceled { .. } | Phase::Expired { .. } => Vec::new(),
        }
    }

    fn refund_due(&self, refund_id: RefundId) -> Option<Event> {
        let Taking::Taken { amount_minor } = self.refunds.get(&refund_id)?.taking else { return None };
        Some(Event::RefundDue {
            payment_id: self.id,
            refund_id,
            processor_id: self.processor_id.clone()?,
            amount_minor,
            currency: self.currency.clone(),
        })
    }
}

impl super::Reversal {
    fn owed(&self, payment_id: PaymentId, holder: &crate::billing_account::Holder, id: &str) -> Option<Event> {
        let (holder, reversal_id, amount_minor) = (holder.clone(), id.to_owned(), self.amount_minor);
        let is_dispute = self.made == Made::Dispute;
        if self.is_to_be_posted() {
            Some(Event::PaymentReversed { payment_id, holder, reversal_id, is_dispute, amount_minor })
        } else if self.is_to_be_posted_back() {
            Some(Event::ReversalUndone { payment_id, holder, reversal_id, is_dispute, amount_minor })
        } else {
            None
        }
    }
}
