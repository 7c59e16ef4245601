//! The way of a payment to its money or to its end without any: ordered, opened at the processor, canceled, expired.

use super::{Payment, Phase, PhaseName, Rejection, Reply};
use crate::audit::AuditAction;
use crate::authz::Principal;
use crate::id::BillingAccountId;
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// How an attempt to pay failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PaymentFailure {
    /// The payer may try again.
    Declined,
    Canceled,
    Expired,
}

impl Payment {
    pub(super) fn create(
        self,
        account_id: BillingAccountId,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let scopes = match ctx.by {
            Principal::Caller(caller) => Scopes::from(caller),
            Principal::Node(_) | Principal::System(_) => self.holder.scopes(None),
        };
        let [min, max] = [PolicyKey::BillingMinimumDeposit, PolicyKey::BillingMaximumDeposit]
            .map(|key| ctx.policy.int(key, &scopes, ctx.now));
        if !(min..=max).contains(&self.amount_minor) {
            return Err(Rejection::Amount { min, max, currency: Some(self.currency) });
        }
        let audit = self.audit(
            AuditAction::PaymentsCreate,
            json!({ "amount_minor": self.amount_minor, "currency": self.currency.as_str(), "account_id": account_id }),
        );
        let reply = self.shown();
        Ok(Transition::to(self, reply, "a user wants to pay").audit(audit))
    }

    pub(super) fn opened(
        &self,
        processor_id: String,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match self.phase {
            Phase::Created { until } => {
                let phase = Phase::Open { until };
                let next = Self { phase, processor_id: Some(processor_id), ..self.clone() };
                Ok(self.transition(next, "the payer can pay", ctx))
            }
            // The first one counts; a worker that opened another one sees that here, and cancels it.
            Phase::Open { .. }
            | Phase::Paid { .. }
            | Phase::Deposited { .. }
            | Phase::Refused { .. }
            | Phase::UnderReview { .. } => Ok(Transition::stay(self.shown())),
            Phase::Canceled { .. } | Phase::Expired { .. } => {
                Err(Rejection::Over { state: PhaseName::from(&self.phase) })
            }
        }
    }

    /// A checkout that another request opens after this finds the payment over, and is canceled at the processor. One that was opened
    /// before this and is not `closed` has an address, which its payer may have. Money that arrives all the same counts as after any other
    /// end.
    pub(super) fn cancel(
        &self,
        closed: Option<&str>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        // For other callers it does not exist.
        if !ctx.by.is_user(&self.payer) {
            return Err(Rejection::NotFound);
        }
        let is_still_open = self.processor_id.is_some() && self.processor_id.as_deref() != closed;
        match self.phase {
            Phase::Created { .. } | Phase::Open { .. } if is_still_open => Err(Rejection::StillOpen),
            Phase::Created { .. } | Phase::Open { .. } => {
                let why = "canceled by its payer";
                let phase = Phase::Canceled { at: ctx.now, why: why.to_owned() };
                let audit = self.audit(AuditAction::PaymentsCancel, json!({}));
                Ok(self.transition(Self { phase, ..self.clone() }, why, ctx).audit(audit))
            }
            Phase::Canceled { .. } | Phase::Expired { .. } => Ok(Transition::stay(self.shown())),
            Phase::Paid { .. } | Phase::Deposited { .. } | Phase::Refused { .. } | Phase::UnderReview { .. } => {
                Err(Rejection::AlreadyPaid { state: PhaseName::from(&self.phase) })
            }
        }
    }

    pub(super) fn lapse(&self, why: String, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match self.phase {
            Phase::Created { until } if ctx.now >= until => {
                let next = Self { phase: Phase::Expired { at: ctx.now, why }, ..self.clone() };
                self.transition(next, "it was not opened at the processor", ctx)
            }
            Phase::Created { .. }
            | Phase::Open { .. }
            | Phase::Paid { .. }
            | Phase::Deposited { .. }
            | Phase::Refused { .. }
            | Phase::UnderReview { .. }
            | Phase::Canceled { .. }
            | Phase::Expired { .. } => Transition::stay(Reply::Done),
        }
    }

    pub(super) fn not_paid(
        &self,
        processor_id: &str,
        outcome: PaymentFailure,
        why: String,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        // For an object that was opened for it by mistake this is true, and irrelevant.
        let is_this = self.processor_id.as_deref().is_none_or(|known| known == processor_id);
        let is_open = matches!(self.phase, Phase::Created { .. } | Phase::Open { .. });
        if !is_this || !is_open {
            return Transition::stay(Reply::Done);
        }
        let at = ctx.now;
        let (next, so) = match outcome {
            PaymentFailure::Declined if self.declined.as_ref() == Some(&why) => return Transition::stay(Reply::Done),
            PaymentFailure::Declined => {
                (Self { declined: Some(why), ..self.clone() }, "an attempt to pay was declined")
            }
            PaymentFailure::Canceled => (Self { phase: Phase::Canceled { at, why }, ..self.clone() }, "canceled"),
            PaymentFailure::Expired => (Self { phase: Phase::Expired { at, why }, ..self.clone() }, "not paid in time"),
        };
        self.transition(next, so, ctx)
    }

    /// True while it is unpaid and can still be paid.
    #[must_use]
    pub const fn is_to_be_paid(&self) -> bool {
        matches!(self.phase, Phase::Created { .. } | Phase::Open { .. })
    }
}
