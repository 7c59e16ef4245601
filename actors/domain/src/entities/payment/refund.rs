//! Refunds that the payer requests: debited from the account first, then paid by the processor.

use super::{
    MAX_REFUNDS, Payment, Phase, PhaseName, ProcessorRefund, Refund, RefundDebit, RefundStatus, Rejection, Reply,
    differs,
};
use crate::audit::AuditAction;
use crate::event::Event;
use crate::id::RefundId;
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Deadline, Timestamp, Transition, TransitionContext};
use chrono::TimeDelta;
use serde_json::json;

/// The placeholder for the processor's id of a refund that it refused, or that is too small for it.
pub const NEVER_MADE: &str = "never_made";

impl Payment {
    pub(super) fn refund(
        &self,
        refund_id: RefundId,
        amount_minor: Option<i64>,
        reason: String,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        // For other callers it does not exist.
        if !ctx.by.is_user(&self.payer) {
            return Err(Rejection::NotFound);
        }
        if self.refunds.contains_key(&refund_id) {
            return Ok(Transition::stay(self.shown()));
        }
        let Phase::Deposited { paid_at, .. } = self.phase else {
            return Err(Rejection::NotPaid { state: PhaseName::from(&self.phase) });
        };
        // The payer's window, also where an organization holds the account.
        let days = ctx.policy.int(PolicyKey::AllocationRefundWindow, &Scopes::from(ctx.by), ctx.now);
        if ctx.now - paid_at > TimeDelta::days(days) {
            return Err(Rejection::TooLate { days });
        }
        // One that the account has refused moved no money: the oldest of them makes room.
        let oldest_refused = self
            .refunds
            .iter()
            .filter(|(_, refund)| matches!(refund.taking, RefundDebit::Refused { .. }))
            .min_by_key(|(_, it)| it.asked_at);
        let replaced = oldest_refused.map(|(id, _)| *id).filter(|_| self.refunds.len() >= MAX_REFUNDS);
        if self.refunds.len() >= MAX_REFUNDS && replaced.is_none() {
            return Err(Rejection::TooManyRefunds);
        }
        let left = self.left_minor();
        let most_minor = amount_minor.unwrap_or(left);
        if most_minor <= 0 || most_minor > left {
            return Err(Rejection::MoreThanLeft { left, currency: Some(self.currency.clone()) });
        }
        if let Some(least) = self.least_refund_minor().filter(|least| most_minor < left.min(*least)) {
            let paid = Some(self.currency.clone());
            return Err(Rejection::LessThanCharged { least, currency: self.charged_currency().clone(), paid });
        }
        let audit = self.audit(
            AuditAction::PaymentsRefund,
            json!({ "refund_id": refund_id, "amount_minor": amount_minor, "reason": reason }),
        );
        let taking = RefundDebit::Asked { most_minor, is_exact: amount_minor.is_some() };
        let refund =
            Refund { reason, asked_at: ctx.now, taking, charged_minor: None, returned_minor: None, at_processor: None };
        let mut next = self.clone();
        if let Some(replaced) = replaced {
            next.refunds.remove(&replaced);
        }
        next.refunds.insert(refund_id, refund);
        Ok(self.transition(next, "the payer requested a refund", ctx).audit(audit))
    }

    pub(super) fn refund_taken(
        &self,
        refund_id: RefundId,
        amount_minor: i64,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let RefundDebit::Asked { most_minor, is_exact } = self.known(refund_id)?.taking else {
            return Ok(Transition::stay(Reply::Done));
        };
        if amount_minor <= 0 || amount_minor > most_minor || (is_exact && amount_minor != most_minor) {
            self.check_amount(most_minor, amount_minor, &self.currency)?;
        }
        let charged_minor = self.charged_for(amount_minor);
        let mut next = self.clone();
        if let Some(refund) = next.refunds.get_mut(&refund_id) {
            refund.taking = RefundDebit::Taken { amount_minor };
            refund.charged_minor = charged_minor;
            // Less than the processor can refund: the account gets it back.
            if charged_minor == Some(0) {
                let (processor_refund_id, status) = (NEVER_MADE.to_owned(), RefundStatus::Failed);
                refund.at_processor = Some(ProcessorRefund { processor_refund_id, status });
            }
        }
        Ok(self.transition(next, "taken from the account for the payer", ctx))
    }

    pub(super) fn refund_refused(
        &self,
        refund_id: RefundId,
        why: String,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match self.known(refund_id)?.taking {
            RefundDebit::Asked { .. } => {
                Ok(self.taking(refund_id, RefundDebit::Refused { why }, "the account does not have it", ctx))
            }
            RefundDebit::Taken { .. } | RefundDebit::Refused { .. } | RefundDebit::GivenBack { .. } => {
                Ok(Transition::stay(Reply::Done))
            }
        }
    }

    pub(super) fn refund_at(
        &self,
        refund_id: RefundId,
        processor_refund_id: String,
        status: RefundStatus,
        amount_minor: i64,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let refund = self.known(refund_id)?;
        let (RefundDebit::Taken { amount_minor: taken } | RefundDebit::GivenBack { amount_minor: taken }) =
            refund.taking
        else {
            return Err(Rejection::RefundUnknown);
        };
        let charged = refund.charged_minor.unwrap_or(taken);
        if charged != amount_minor {
            return Err(differs(charged, self.charged_currency(), amount_minor, self.charged_currency()));
        }
        if let Some(known) = refund.at_processor.as_ref().filter(|it| it.processor_refund_id != processor_refund_id) {
            return Err(Rejection::PaidTwice { as_of: known.processor_refund_id.clone(), again: processor_refund_id });
        }
        if refund.status() >= Some(status) {
            return Ok(Transition::stay(Reply::Done));
        }
        let mut next = self.clone();
        // Received before as a reversal: it was this refund, and was debited already.
        next.undo_reversal(&processor_refund_id);
        let charged = refund.charged_minor.filter(|_| status == RefundStatus::Failed);
        let returned_minor = charged.and_then(|charged| next.part_of_undoing(charged));
        if let Some(refund) = next.refunds.get_mut(&refund_id) {
            refund.at_processor = Some(ProcessorRefund { processor_refund_id, status });
            refund.returned_minor = returned_minor;
            // Nothing is to be posted.
            if returned_minor == Some(0) {
                refund.taking = RefundDebit::GivenBack { amount_minor: taken };
            }
        }
        let step = self.transition(next, "the payment processor reports a refund", ctx);
        // The event has no reaction: it is for notifications.
        let is_paid = status == RefundStatus::Succeeded;
        Ok(if is_paid { step.event(Event::RefundSucceeded { payment_id: self.id, refund_id }) } else { step })
    }

    pub(super) fn given_back(
        &self,
        refund_id: RefundId,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let refund = self.known(refund_id)?;
        let (RefundDebit::Taken { amount_minor }, Some(RefundStatus::Failed)) = (&refund.taking, refund.status())
        else {
            return Ok(Transition::stay(Reply::Done));
        };
        let given_back = RefundDebit::GivenBack { amount_minor: *amount_minor };
        Ok(self.taking(refund_id, given_back, "a refund failed, and the account has it again", ctx))
    }

    /// There is one such refund, without a request.
    pub(super) const fn refused_deposit_refund_id(&self) -> RefundId {
        RefundId(self.id.0)
    }

    /// Money that no account can have stays at the processor until its payer has it. Where neither an own refund nor one at the processor
    /// returns it, or a refund comes back, an operator has to act.
    pub(super) fn deadline_of_refused(&self, at: Timestamp) -> Option<Deadline> {
        let pending = |refund: &&Refund| matches!(refund.status(), None | Some(RefundStatus::Pending));
        if let Some(pending) = self.refunds.values().find(pending) {
            return pending.deadline();
        }
        let waits_for = "no account can take the payment: an operator has to refund it at the payment processor";
        self.is_not_paid_back().then(|| Deadline::new(at, waits_for))
    }

    fn known(&self, refund_id: RefundId) -> Result<&Refund, Rejection> {
        self.refunds.get(&refund_id).ok_or(Rejection::RefundUnknown)
    }

    fn taking(
        &self,
        refund_id: RefundId,
        taking: RefundDebit,
        why: &str,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let mut next = self.clone();
        if let Some(refund) = next.refunds.get_mut(&refund_id) {
            refund.taking = taking;
        }
        self.transition(next, why, ctx)
    }
}
