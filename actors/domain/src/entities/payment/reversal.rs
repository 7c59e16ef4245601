//! Reversals: money that was taken back at the processor without a request from here. A reversal is posted in full, whatever the balance
//! is.

use super::reversal_record::ReportedReversal;
use super::{MAX_REFUNDS, Payment, Rejection, Reply, Reversal, differs, is_an_amount};
use crate::audit::AuditAction;
use crate::money::HIGHEST_BALANCE_MINOR;
use crate::state_machine::{Transition, TransitionContext};
use serde_json::json;

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
