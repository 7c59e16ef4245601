//! The outstanding requests of a payment, to its account and to the payment processor.

use super::{Payment, Phase, RefundDebit, RefundStatus, Reply, ReversalOrigin};
use crate::event::Event;
use crate::id::{PaymentId, RefundId};
use crate::money::Currency;
use crate::state_machine::{Timestamp, Transition, TransitionContext};
use serde::{Deserialize, Serialize};

/// A request to the payment processor that is owed until it succeeds. The worker reads the state first: the request may have succeeded,
/// and its answer may be lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(tag = "errand", rename_all = "snake_case")]
pub enum ProcessorCall {
    /// It was created, and it is not known whether it was opened: look for it by our id.
    Open { payment_id: PaymentId },
    /// Read its state. `is_over`: the time to pay has ended, cancel it.
    Check { payment_id: PaymentId, processor_id: String, is_over: bool },
    /// Refund, once, what was debited from the account or could not be credited; or read the refund's state.
    Refund { payment_id: PaymentId, refund_id: RefundId, processor_id: String, amount_minor: i64, currency: Currency },
}

impl ProcessorCall {
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.into_str()
    }
}

impl Payment {
    pub(super) fn tick(&self, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let Some(again) = self.again.filter(|again| again.is_due(ctx.now)) else {
            return Transition::stay(Reply::Done);
        };
        let resent: Vec<_> = self.outstanding_events().into_iter().chain(self.status_checks(ctx.now)).collect();
        let again = (!resent.is_empty()).then(|| again.next(ctx.now));
        Transition::to(Self { again, ..self.clone() }, Reply::Done, "calls without an answer are repeated")
            .with(resent, None)
    }

    /// True where no request of it is outstanding.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let is_paid_back = match self.phase {
            Phase::Refused { at, .. } => self.deadline_of_refused(at).is_none(),
            Phase::Created { .. }
            | Phase::Open { .. }
            | Phase::Paid { .. }
            | Phase::Deposited { .. }
            | Phase::UnderReview { .. }
            | Phase::Canceled { .. }
            | Phase::Expired { .. } => self.refunds.values().all(|refund| refund.deadline().is_none()),
        };
        is_paid_back && self.outstanding_events().is_empty()
    }

    /// The requests that are outstanding.
    pub(super) fn outstanding_events(&self) -> Vec<Event> {
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
                (RefundDebit::Asked { most_minor, is_exact }, _) => owed.push(Event::RefundRequested {
                    payment_id,
                    refund_id,
                    holder: holder.clone(),
                    amount_minor: *most_minor,
                    is_exact: *is_exact,
                }),
                (RefundDebit::Taken { .. }, None) => owed.extend(self.refund_due(refund_id)),
                // Money that was in no account is not credited to one.
                (RefundDebit::Taken { .. }, Some(RefundStatus::Failed))
                    if matches!(self.phase, Phase::Refused { .. }) => {}
                (RefundDebit::Taken { amount_minor }, Some(RefundStatus::Failed)) => owed.push(Event::RefundFailed {
                    payment_id,
                    refund_id,
                    holder: holder.clone(),
                    amount_minor: refund.credit_minor(*amount_minor),
                }),
                (RefundDebit::Taken { .. }, Some(RefundStatus::Pending | RefundStatus::Succeeded))
                | (RefundDebit::Refused { .. } | RefundDebit::GivenBack { .. }, _) => {}
            }
        }
        owed.extend(self.reversals.iter().filter_map(|(id, it)| it.outstanding_events(payment_id, holder, id)));
        owed
    }

    /// The requests that read a state at the processor periodically, since its webhooks may be lost.
    pub(super) fn status_checks(&self, now: Timestamp) -> Vec<Event> {
        let payment_id = self.id;
        let processor_id = || self.processor_id.clone().unwrap_or_default();
        match self.phase {
            Phase::Created { .. } => vec![Event::PaymentOpeningDue { payment_id }],
            Phase::Open { until } => {
                vec![Event::PaymentCheckDue { payment_id, processor_id: processor_id(), is_over: now >= until }]
            }
            Phase::Paid { .. } | Phase::Deposited { .. } | Phase::Refused { .. } => {
                let pending = self.refunds.iter().filter(|(_, refund)| {
                    matches!(refund.taking, RefundDebit::Taken { .. }) && refund.status() == Some(RefundStatus::Pending)
                });
                pending.filter_map(|(refund_id, _)| self.refund_due(*refund_id)).collect()
            }
            Phase::UnderReview { .. } | Phase::Canceled { .. } | Phase::Expired { .. } => Vec::new(),
        }
    }

    pub(super) fn refund_due(&self, refund_id: RefundId) -> Option<Event> {
        let refund = self.refunds.get(&refund_id)?;
        let RefundDebit::Taken { amount_minor } = refund.taking else { return None };
        Some(Event::RefundDue {
            payment_id: self.id,
            refund_id,
            processor_id: self.processor_id.clone()?,
            amount_minor: refund.charged_minor.unwrap_or(amount_minor),
            currency: self.charged_currency().clone(),
        })
    }
}

impl super::Reversal {
    fn outstanding_events(
        &self,
        payment_id: PaymentId,
        holder: &crate::account_holder::Holder,
        id: &str,
    ) -> Option<Event> {
        let (holder, reversal_id) = (holder.clone(), id.to_owned());
        let is_dispute = self.made == ReversalOrigin::Dispute;
        if self.is_to_be_posted() {
            let amount_minor = self.amount_minor;
            Some(Event::PaymentReversed { payment_id, holder, reversal_id, is_dispute, amount_minor })
        } else if self.is_to_be_posted_back() {
            let amount_minor = self.credit_minor();
            Some(Event::ReversalUndone { payment_id, holder, reversal_id, is_dispute, amount_minor })
        } else {
            None
        }
    }
}
