//! What a payer saw and paid where the processor has converted a payment's amount into another currency (Stripe's Adaptive Pricing).

use super::Payment;
use crate::money::Currency;
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

impl Payment {
    /// The conversion by which refunds and disputes are at the processor, where there is one.
    fn conversion(&self) -> Option<&Presentment> {
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

    /// What a refund of this part of the payment is at the processor: rounded down, so that parts never exceed the whole.
    pub(super) fn charged_minor(&self, part_minor: i64) -> i64 {
        match self.conversion() {
            Some(it) => scaled(part_minor, it.amount_minor, self.amount_minor, false).max(1),
            None => part_minor,
        }
    }

    /// The part of the payment that this amount at the processor is, rounded up; `None` in a currency that is neither.
    pub(super) fn part_minor(&self, amount_minor: i64, currency: &Currency) -> Option<i64> {
        match self.conversion() {
            Some(it) if it.currency == *currency => {
                Some(scaled(amount_minor, self.amount_minor, it.amount_minor, true).min(self.amount_minor))
            }
            Some(_) | None => (self.currency == *currency).then_some(amount_minor),
        }
    }
}

/// `part * to / from`.
fn scaled(part: i64, to: i64, from: i64, rounds_up: bool) -> i64 {
    let (part, to, from) = (i128::from(part), i128::from(to), i128::from(from.max(1)));
    let more = if rounds_up { from - 1 } else { 0 };
    i64::try_from((part * to + more) / from).unwrap_or(i64::MAX)
}
