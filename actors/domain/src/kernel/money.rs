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

    /// How many decimals the minor unit has (ISO 4217); two for a code that the standard does not list.
    #[must_use]
    pub fn decimals(&self) -> usize {
        DECIMALS.iter().find(|(code, _)| *code == self.as_str()).map_or(2, |(_, decimals)| *decimals)
    }

    /// Payments and refunds are multiples of so many minor units: of three decimals, card payments carry two (Stripe, *Three-decimal
    /// currencies*).
    #[must_use]
    pub fn payment_step_minor(&self) -> i64 {
        if self.decimals() == 3 { 10 } else { 1 }
    }
}

/// The currencies whose minor unit has other than two decimals (ISO 4217).
const DECIMALS: [(&str, usize); 27] = [
    ("BHD", 3),
    ("BIF", 0),
    ("CLF", 4),
    ("CLP", 0),
    ("DJF", 0),
    ("GNF", 0),
    ("IQD", 3),
    ("ISK", 0),
    ("JOD", 3),
    ("JPY", 0),
    ("KMF", 0),
    ("KRW", 0),
    ("KWD", 3),
    ("LYD", 3),
    ("OMR", 3),
    ("PYG", 0),
    ("RWF", 0),
    ("TND", 3),
    ("UGX", 0),
    ("UYI", 0),
    ("UYW", 4),
    ("VND", 0),
    ("VUV", 0),
    ("XAF", 0),
    ("XOF", 0),
    ("XPF", 0),
    ("XXX", 0),
];

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

/// The decimals of a minor unit in an exact amount.
pub const MICRO_DECIMALS: usize = 6;

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

    /// The amount as people read it, exact: `12.34 EUR`, `0.04166666 EUR`. Decimals beyond those of the currency are left out where they
    /// are zero.
    #[must_use]
    pub fn in_currency(self, currency: &Currency) -> String {
        let fixed = currency.decimals();
        let exact = decimal(self.0, fixed + MICRO_DECIMALS);
        let (number, finer) = exact.split_at(exact.len() - MICRO_DECIMALS);
        // Without decimals of its own, the point stands before the finer ones.
        let number = format!("{number}{}", finer.trim_end_matches('0'));
        format!("{} {}", number.trim_end_matches('.'), currency.as_str())
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

/// Minor units as people read them: in their currency, where that is known.
#[must_use]
pub fn minor_in_currency(minor: i64, currency: Option<&Currency>) -> String {
    match (MicroAmount::of_minor(minor), currency) {
        (Some(amount), Some(currency)) => amount.in_currency(currency),
        (None, Some(currency)) => format!("{minor} minor units of {}", currency.as_str()),
        (_, None) => format!("{minor} minor units"),
    }
}

/// `number` × 10^-`decimals`, with all decimals: `-12.34567890`.
#[must_use]
pub fn decimal(number: i64, decimals: usize) -> String {
    let (sign, digits) = (if number < 0 { "-" } else { "" }, number.unsigned_abs().to_string());
    if decimals == 0 {
        return format!("{sign}{digits}");
    }
    let digits = format!("{digits:0>width$}", width = decimals + 1);
    let (whole, rest) = digits.split_at(digits.len() - decimals);
    format!("{sign}{whole}.{rest}")
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

    #[test]
    fn amount_is_read_exactly_in_its_currency() {
        for (micro, code, text) in [
            (0, "EUR", "0.00 EUR"),
            (4_166_666, "EUR", "0.04166666 EUR"),
            (1_234_000_000, "EUR", "12.34 EUR"),
            (12_500_000, "EUR", "0.125 EUR"),
            (-1, "EUR", "-0.00000001 EUR"),
            (1_500_000, "JPY", "1.5 JPY"),
            (20_000_000, "JPY", "20 JPY"),
            (1_234_000_000, "KWD", "1.234 KWD"),
            (i64::MIN, "EUR", "-92233720368.54775808 EUR"),
        ] {
            assert_eq!(MicroAmount::of(micro).in_currency(&Currency::parse(code).unwrap()), text);
        }
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
            let stored = serde_json::to_string(&price).unwrap();
            prop_assert_eq!(serde_json::from_str::<Price>(&stored).unwrap(), price);
        }
    }
}
