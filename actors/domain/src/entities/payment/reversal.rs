//! Reversals: money that was taken back at the processor without a request from here. A reversal is posted in full, whatever the balance
//! is.

use super::{MAX_REFUNDS, OVERDUE_AFTER, Payment, Rejection, Reply, ReversalStep, differs, is_an_amount};
use crate::audit::AuditAction;
use crate::money::{Currency, HIGHEST_BALANCE_MINOR};
use crate::state_machine::{Deadline, Timestamp, Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::json;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reversal {
    pub made: ReversalOrigin,
    /// The part of the payment that the account is debited.
    pub amount_minor: i64,
    /// What was taken back at the processor, where it charged another currency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub charged_minor: Option<i64>,
    #[serde(rename = "heard_at")]
    pub reported_at: Timestamp,
    /// It was won, failed, or turned out to be one of the payment's own refunds. That is final, whatever arrives later.
    pub is_undone: bool,
    /// What the account is credited once it is undone, where that is not what it was debited: rounding has moved to another part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub returned_minor: Option<i64>,
    /// The account was asked to post it, and may have done so.
    #[serde(rename = "is_said")]
    pub is_posting_requested: bool,
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

/// What the processor reports of money that it took back.
pub(super) struct ReportedReversal {
    pub(super) reversal_id: String,
    pub(super) what: ReversalStep,
    pub(super) amount_minor: i64,
    pub(super) currency: Currency,
    /// The processor's id of the money that it is of; `None` from a member of an earlier release.
    pub(super) of: Option<String>,
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
    pub(super) fn gone_minor(&self) -> i64 {
        if self.is_undone { self.amount_minor - self.credit_minor() } else { self.amount_minor }
    }

    /// What the account is credited once it is undone.
    pub(super) fn credit_minor(&self) -> i64 {
        self.returned_minor.unwrap_or(self.amount_minor)
    }

    /// The account has to post and confirm it; a request that was sent cannot be withdrawn. Of less than a minor unit there is nothing to
    /// post.
    pub(super) const fn is_to_be_posted(&self) -> bool {
        self.is_posting_requested && !self.is_posted && self.amount_minor > 0
    }

    /// The account has to post that it is undone.
    pub(super) fn is_to_be_posted_back(&self) -> bool {
        let is_posted = self.is_posted || (self.is_posting_requested && self.amount_minor == 0);
        self.is_undone && is_posted && !self.is_posted_back && self.credit_minor() > 0
    }

    pub(super) fn deadline(&self) -> Option<Deadline> {
        let waits_for = "a reversal is to be posted to the account";
        (self.is_to_be_posted() || self.is_to_be_posted_back())
            .then(|| Deadline::new(self.reported_at + OVERDUE_AFTER, waits_for))
    }
}

impl Payment {
    pub(super) fn reversed(
        &self,
        reported: ReportedReversal,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if !is_an_amount(reported.amount_minor) {
            return Err(Rejection::Amount {
                min: 1,
                max: HIGHEST_BALANCE_MINOR,
                currency: Some(self.currency.clone()),
            });
        }
        let ours = |id: &str| {
            let mut refunds = self.refunds.values().filter_map(|refund| refund.at_processor.as_ref());
            refunds.any(|it| it.processor_refund_id == id)
        };
        if ours(&reported.reversal_id) {
            return Ok(Transition::stay(Reply::Done));
        }
        if let Some(step) = self.other_money_reversed(&reported, ctx)? {
            return Ok(step);
        }
        let ReportedReversal { reversal_id, what, amount_minor, currency, .. } = reported;
        let known = self.reversals.get(&reversal_id);
        let (expected_in, charged_minor) = match self.is_charged_in(&currency) {
            true => (&currency, Some(amount_minor)),
            // In a third currency it is refused as a contradiction.
            false => (&self.currency, None),
        };
        let expected = known.map_or(amount_minor, |known| known.charged_minor.unwrap_or(known.amount_minor));
        if (expected, expected_in) != (amount_minor, &currency) {
            return Err(differs(expected, expected_in, amount_minor, &currency));
        }
        if known.is_some_and(|known| known.is_undone || !what.undoes()) {
            return Ok(Transition::stay(Reply::Done));
        }
        if known.is_none() && self.reversals.len() >= MAX_REFUNDS {
            return Err(Rejection::TooManyRefunds);
        }
        let amount_minor = match (known, charged_minor) {
            (Some(known), _) => known.amount_minor,
            (None, Some(charged)) => self.part_of_reversal(charged),
            (None, None) => amount_minor,
        };
        let audit = self.audit(
            AuditAction::PaymentsReverse,
            json!({ "reversal_id": reversal_id, "what": what.name(), "amount_minor": amount_minor }),
        );
        let mut next = self.clone();
        let reversal = next.reversals.entry(reversal_id.clone()).or_insert(Reversal {
            made: what.made(),
            amount_minor,
            charged_minor,
            reported_at: ctx.now,
            is_undone: false,
            returned_minor: None,
            is_posting_requested: false,
            is_posted: false,
            is_posted_back: false,
        });
        reversal.reported_at = ctx.now;
        if what.undoes() {
            next.undo_reversal(&reversal_id);
        }
        Ok(self.transition(next, "the payment processor reported a reversal", ctx).audit(audit))
    }

    /// The money of a reversal is there again. What no account was asked to post leaves nothing to be posted.
    pub(super) fn undo_reversal(&mut self, reversal_id: &str) {
        let Some(reversal) = self.reversals.get(reversal_id).filter(|it| !it.is_undone) else { return };
        let charged = reversal.charged_minor.filter(|_| reversal.is_posting_requested);
        let returned_minor = charged.and_then(|charged| self.part_of_undoing(charged));
        if let Some(reversal) = self.reversals.get_mut(reversal_id) {
            reversal.is_undone = true;
            reversal.returned_minor = returned_minor;
        }
        if !self.reversals.values().any(|it| it.is_posting_requested) {
            self.count_reversals_again();
        }
    }

    /// Of reversals that no account was asked to post, those that are left are what they would be without the others.
    fn count_reversals_again(&mut self) {
        let (mut charged, mut parts) = (0_i64, Vec::new());
        for (id, it) in self.reversals.iter().filter(|(_, it)| !it.is_undone) {
            let Some(amount) = it.charged_minor else { continue };
            charged = charged.saturating_add(amount);
            parts.push((id.clone(), self.part_of_all_reversals(charged)));
        }
        let mut before = 0;
        for (id, until) in parts {
            if let Some(reversal) = self.reversals.get_mut(&id) {
                reversal.amount_minor = until - before;
            }
            before = until;
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_reversal_has_the_names_of_earlier_releases() {
        let stored = r#"{"made":"dispute","amount_minor":7,"heard_at":"2027-01-15T08:00:00Z","is_undone":false,"is_said":true,"is_posted":false,"is_posted_back":false}"#;
        let reversal: Reversal = serde_json::from_str(stored).unwrap();
        assert_eq!(serde_json::to_string(&reversal).unwrap(), stored);
    }
}
