//! What a payer saw and paid where the processor has converted a payment's amount into another currency (Stripe's Adaptive Pricing), and the
//! parts of it that go back.
//!
//! A part is counted from what has gone back before it, in both currencies (deploy/decisions/0098): so rounding moves from one part to the next,
//! and the parts of a whole add up to the whole, in the account and at the processor.

use super::{Payment, Refund, RefundDebit, RefundStatus};
use crate::money::{Currency, HIGHEST_BALANCE_MINOR};
use serde::{Deserialize, Serialize};

/// What the payer saw and paid, in minor units of another currency than the payment's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Presentment {
    pub amount_minor: i64,
    pub currency: Currency,
    /// The processor's own payment is in this currency, and so are its refunds and disputes. Otherwise they are in the payment's own, and this
    /// is what the payer saw of it.
    pub is_charged: bool,
}

/// Money that has gone back: the part of the payment, and what that was at the processor.
#[derive(Clone, Copy, Debug, Default)]
struct GoneBack {
    part: i128,
    charged: i128,
}

impl GoneBack {
    fn sum(parts: impl Iterator<Item = (i64, i64)>) -> Self {
        parts.fold(Self::default(), |sum, (part, charged)| Self {
            part: sum.part + i128::from(part),
            charged: sum.charged + i128::from(charged),
        })
    }
}

impl Payment {
    /// The conversion by which refunds and disputes are at the processor, where there is one.
    pub(super) fn conversion(&self) -> Option<&Presentment> {
        self.presented.as_ref().filter(|it| it.is_charged && it.amount_minor > 0)
    }

    /// Whether this is what was charged for it.
    pub(super) fn was_charged_as(&self, amount_minor: i64, currency: &Currency) -> bool {
        self.conversion().is_some_and(|it| (it.amount_minor, &it.currency) == (amount_minor, currency))
    }

    /// The currency that refunds have at the processor.
    pub(super) fn charged_currency(&self) -> &Currency {
        self.conversion().map_or(&self.currency, |it| &it.currency)
    }

    /// Whether reports about parts of what was charged are in this currency.
    pub(super) fn is_charged_in(&self, currency: &Currency) -> bool {
        self.conversion().is_some_and(|it| it.currency == *currency)
    }

    /// What the next refund, of this part of the payment, is at the processor: whole steps of the currency, and for the last part all that is
    /// left. `None` without a conversion. Zero is a part that is too small to be refunded there.
    pub(super) fn charged_for(&self, part_minor: i64) -> Option<i64> {
        let it = self.conversion()?;
        let (gone, amount) = (self.gone_back(), i128::from(self.amount_minor.max(1)));
        let until = gone.part + i128::from(part_minor);
        let charged = (until * i128::from(it.amount_minor) / amount - gone.charged).max(0);
        let odd = if until == amount { 0 } else { charged % i128::from(it.currency.payment_step_minor()) };
        Some(as_minor(charged - odd))
    }

    /// The smallest part of a converted payment that the processor can refund next.
    pub(super) fn least_refund_minor(&self) -> Option<i64> {
        let it = self.conversion()?;
        let gone = self.gone_back();
        let (charged, amount) = (i128::from(it.amount_minor), i128::from(self.amount_minor));
        let next = gone.charged + i128::from(it.currency.payment_step_minor());
        let least = ((next * amount + charged - 1) / charged).min(amount);
        Some(as_minor(least - gone.part).max(1))
    }

    /// What the account is debited for a reversal of this amount at the processor. It may be nothing, and is counted with the next part then.
    pub(super) fn part_of_reversal(&self, charged_minor: i64) -> i64 {
        let gone = self.gone_back();
        as_minor(self.worth_of(gone.charged + i128::from(charged_minor)) - gone.part)
    }

    /// What the account is credited where this reversal is undone, or this refund fails: all that has gone back where nothing else has. `None`
    /// without a conversion.
    pub(super) fn part_of_undoing(&self, charged_minor: i64) -> Option<i64> {
        self.conversion()?;
        let gone = self.gone_back();
        Some(as_minor(gone.part - self.worth_of(gone.charged - i128::from(charged_minor))))
    }

    /// The part of the payment that reversals of this amount at the processor are together, beside its refunds.
    pub(super) fn part_of_all_reversals(&self, charged_minor: i64) -> i64 {
        let refunded = self.sum_of_refunds();
        as_minor(self.worth_of(refunded.charged + i128::from(charged_minor)) - refunded.part)
    }

    /// The part of the payment that an amount at the processor is, from the beginning of the payment: rounded down, and all for all.
    fn worth_of(&self, charged: i128) -> i128 {
        let Some(it) = self.conversion() else { return charged };
        charged.max(0) * i128::from(self.amount_minor) / i128::from(it.amount_minor)
    }

    fn gone_back(&self) -> GoneBack {
        let (refunded, reversed) = (self.sum_of_refunds(), self.sum_of_reversals());
        GoneBack { part: refunded.part + reversed.part, charged: refunded.charged + reversed.charged }
    }

    /// A refund that is only requested has no amount at the processor yet.
    fn sum_of_refunds(&self) -> GoneBack {
        let taken = |refund: &Refund| match (&refund.taking, refund.status()) {
            (
                RefundDebit::Taken { amount_minor } | RefundDebit::GivenBack { amount_minor },
                Some(RefundStatus::Failed),
            ) => Some((amount_minor - refund.credit_minor(*amount_minor), 0)),
            (RefundDebit::Taken { amount_minor }, _) => {
                Some((*amount_minor, refund.charged_minor.unwrap_or(*amount_minor)))
            }
            (RefundDebit::Asked { .. } | RefundDebit::Refused { .. } | RefundDebit::GivenBack { .. }, _) => None,
        };
        GoneBack::sum(self.refunds.values().filter_map(taken))
    }

    fn sum_of_reversals(&self) -> GoneBack {
        GoneBack::sum(self.reversals.values().map(|it| {
            let charged = if it.is_undone { 0 } else { it.charged_minor.unwrap_or(it.amount_minor) };
            (it.gone_minor(), charged)
        }))
    }
}

/// From zero to the highest amount of an account.
fn as_minor(amount: i128) -> i64 {
    let highest = i128::from(HIGHEST_BALANCE_MINOR);
    i64::try_from(amount.clamp(0, highest)).unwrap_or(HIGHEST_BALANCE_MINOR)
}
