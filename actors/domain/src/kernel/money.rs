//! Money as integers. A price is in minor units of its currency (cents) per GPU and hour; what is owed is counted in millionths of a
//! minor unit, so that no window of any length at any price loses what it is worth.

use crate::time::Timestamp;
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use std::fmt;

/// An ISO 4217 code in upper case, for example `EUR`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Currency(String);

impl Currency {
    /// # Errors
    /// When `code` is not three upper-case letters.
    pub fn parse(code: &str) -> Result<Self, InvalidPrice> {
        if code.len() == 3 && code.bytes().all(|byte| byte.is_ascii_uppercase()) {
            Ok(Self(code.to_owned()))
        } else {
            Err(InvalidPrice::Currency)
        }
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What an hour of one GPU costs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Price {
    pub currency: Currency,
    /// Minor units per GPU and hour.
    pub amount_minor_per_gpu_hour: i64,
}

/// Above this a typing error is likelier than a price.
pub const HIGHEST_PRICE_MINOR: i64 = 10_000_000;

impl Price {
    /// # Errors
    /// When the amount is negative or beyond [`HIGHEST_PRICE_MINOR`], or the currency is no ISO 4217 code.
    pub fn new(currency: &str, amount_minor_per_gpu_hour: i64) -> Result<Self, InvalidPrice> {
        let currency = Currency::parse(currency)?;
        if !(0..=HIGHEST_PRICE_MINOR).contains(&amount_minor_per_gpu_hour) {
            return Err(InvalidPrice::Amount);
        }
        Ok(Self { currency, amount_minor_per_gpu_hour })
    }
}

/// An amount in millionths of a minor unit; negative where it is owed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MicroAmount(i64);

/// Millionths in one minor unit.
pub const MICRO_PER_MINOR: i64 = 1_000_000;

impl MicroAmount {
    pub const ZERO: Self = Self(0);

    #[must_use]
    pub const fn of(micro: i64) -> Self {
        Self(micro)
    }

    /// `None` where the amount overflows.
    #[must_use]
    pub fn of_minor(minor: i64) -> Option<Self> {
        minor.checked_mul(MICRO_PER_MINOR).map(Self)
    }

    #[must_use]
    pub const fn get(self) -> i64 {
        self.0
    }

    /// For snapshots, which leave zeros out.
    #[must_use]
    #[allow(clippy::trivially_copy_pass_by_ref)] // As serde asks.
    pub const fn is_zero(&self) -> bool {
        self.0 == 0
    }

    /// Whole minor units, rounded down: a shown amount is never more than the real one.
    #[must_use]
    pub const fn minor(self) -> i64 {
        self.0.div_euclid(MICRO_PER_MINOR)
    }

    /// The nearest representable amount. Balances are far from where that differs ([`HIGHEST_BALANCE_MINOR`]).
    fn nearest(micro: i128) -> Self {
        Self(i64::try_from(micro).unwrap_or(if micro < 0 { i64::MIN } else { i64::MAX }))
    }

    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self::nearest(i128::from(self.0) + i128::from(other.0))
    }

    #[must_use]
    pub fn minus(self, other: Self) -> Self {
        Self::nearest(i128::from(self.0) - i128::from(other.0))
    }
}

impl std::iter::Sum for MicroAmount {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        Self::nearest(amounts.map(|amount| i128::from(amount.0)).sum())
    }
}

/// In minor units, with six decimal places.
impl fmt::Display for MicroAmount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (sign, all) = (if self.0 < 0 { "-" } else { "" }, self.0.unsigned_abs());
        let unit = MICRO_PER_MINOR.unsigned_abs();
        write!(f, "{sign}{}.{:06}", all / unit, all % unit)
    }
}

/// The bound of a balance. Ninety times as much is still representable.
pub const HIGHEST_BALANCE_MINOR: i64 = 100_000_000_000;

/// The cost of all GPUs of one allocation: minor units per hour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HourlyRate(i64);

impl HourlyRate {
    #[must_use]
    pub fn of(price: &Price, gpu_count: u32) -> Self {
        Self(price.amount_minor_per_gpu_hour.saturating_mul(i64::from(gpu_count)))
    }

    #[must_use]
    pub const fn minor_per_hour(self) -> i64 {
        self.0
    }

    /// The cost from `from` to `until`, rounded down to the millionth; nothing where `until` is earlier. A caller that charges piece by
    /// piece charges the difference to what was charged before: so the remainder of each piece is carried into the next, and an hour costs
    /// its price however it is divided.
    #[must_use]
    pub fn over(self, from: Timestamp, until: Timestamp) -> MicroAmount {
        let micros = i128::from(until.timestamp_micros()) - i128::from(from.timestamp_micros());
        // Minor units an hour are millionths in 3,600 microseconds.
        MicroAmount::nearest(i128::from(self.0) * micros.max(0) / 3600)
    }

    /// The last instant until which `amount` pays for the time from `from` on, to the microsecond: the inverse of [`HourlyRate::over`].
    /// `None` where it exceeds the range of timestamps.
    #[must_use]
    pub fn paid_until(self, from: Timestamp, amount: MicroAmount) -> Option<Timestamp> {
        let below_the_next_millionth = (i128::from(amount.0.max(0)) + 1) * 3600 - 1;
        let micros = below_the_next_millionth.checked_div(i128::from(self.0.max(0)))?;
        from.checked_add_signed(TimeDelta::microseconds(i64::try_from(micros).ok()?))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPrice {
    #[error("currency must be three upper-case letters (ISO 4217), for example EUR")]
    Currency,
    #[error("amount_minor_per_gpu_hour must be between 0 and {HIGHEST_PRICE_MINOR}")]
    Amount,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_currency_is_three_upper_case_letters() {
        assert_eq!(Currency::parse("EUR").unwrap().as_str(), "EUR");
        for wrong in ["", "EU", "EURO", "eur", "E R", "EU1", "ÄÖÜ", "€"] {
            assert_eq!(Currency::parse(wrong), Err(InvalidPrice::Currency), "{wrong}");
        }
    }

    #[test]
    fn a_price_is_neither_negative_nor_a_typing_error() {
        for amount in [0, 1, HIGHEST_PRICE_MINOR] {
            assert_eq!(Price::new("EUR", amount).unwrap().amount_minor_per_gpu_hour, amount);
        }
        for amount in [-1, HIGHEST_PRICE_MINOR + 1, i64::MIN, i64::MAX] {
            assert_eq!(Price::new("EUR", amount), Err(InvalidPrice::Amount));
        }
    }

    #[test]
    fn amount_is_displayed_with_six_decimals() {
        for (micro, text, minor) in
            [(0, "0.000000", 0), (1_500_000, "1.500000", 1), (-1, "-0.000001", -1), (-2_000_000, "-2.000000", -2)]
        {
            let amount = MicroAmount::of(micro);
            assert_eq!((amount.to_string().as_str(), amount.minor()), (text, minor));
        }
        assert_eq!(MicroAmount::of_minor(i64::MAX), None);
        assert_eq!(MicroAmount::of(i64::MAX).plus(MicroAmount::of(1)), MicroAmount::of(i64::MAX));
    }

    proptest! {
        #[test]
        fn an_hour_costs_its_price_however_it_is_divided(
            amount in 0..=HIGHEST_PRICE_MINOR, gpus in 1_u32..=64, mut cuts in prop::collection::vec(0_i64..=3_600_000_000, 0..40)
        ) {
            let rate = HourlyRate::of(&Price::new("EUR", amount).unwrap(), gpus);
            let begin = Timestamp::from_timestamp(1_800_000_000, 0).unwrap();
            cuts.push(3_600_000_000);
            cuts.sort_unstable();
            let mut charged = MicroAmount::ZERO;
            for cut in cuts {
                let due = rate.over(begin, begin + chrono::TimeDelta::microseconds(cut)).minus(charged);
                prop_assert!(due >= MicroAmount::ZERO);
                charged = charged.plus(due);
            }
            prop_assert_eq!(charged, MicroAmount::of_minor(amount * i64::from(gpus)).unwrap());
        }

        #[test]
        fn paid_until_is_the_last_microsecond_that_the_amount_covers(
            amount in 0..=HIGHEST_PRICE_MINOR, gpus in 1_u32..=64, micro in 0_i64..=2_000_000_000_000
        ) {
            let rate = HourlyRate::of(&Price::new("EUR", amount).unwrap(), gpus);
            let begin = Timestamp::from_timestamp(1_800_000_000, 0).unwrap();
            match rate.paid_until(begin, MicroAmount::of(micro)) {
                None => prop_assert_eq!(amount, 0),
                Some(until) => {
                    prop_assert!(rate.over(begin, until) <= MicroAmount::of(micro));
                    prop_assert!(rate.over(begin, until + TimeDelta::microseconds(1)) > MicroAmount::of(micro));
                }
            }
        }

        #[test]
        fn a_price_decodes_to_itself(code in "[A-Z]{3}", amount in 0..=HIGHEST_PRICE_MINOR) {
            let price = Price::new(&code, amount).unwrap();
            let kept = serde_json::to_string(&price).unwrap();
            prop_assert_eq!(serde_json::from_str::<Price>(&kept).unwrap(), price);
        }
    }
}
