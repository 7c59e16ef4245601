//! Amounts as people and spreadsheets read them: in the currency's major unit, with every digit there is.

use domain::money::{Currency, MICRO_DECIMALS, MicroAmount, decimal};

/// All of it: `-12.34567890` of a currency with two decimals.
pub(super) fn exact(amount: MicroAmount, currency: &Currency) -> String {
    decimal(amount.get(), currency.decimals() + MICRO_DECIMALS)
}

/// Whole minor units, rounded down as everywhere: `-12.35` for -12.34567890.
pub(super) fn rounded(amount: MicroAmount, currency: &Currency) -> String {
    decimal(amount.minor(), currency.decimals())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_have_the_decimals_of_their_currency() {
        for (code, micro, all, whole) in [
            ("EUR", 1_234_567_890, "12.34567890", "12.34"),
            ("EUR", -1, "-0.00000001", "-0.01"),
            ("EUR", 0, "0.00000000", "0.00"),
            ("JPY", 1_500_000, "1.500000", "1"),
            ("JPY", -1_500_000, "-1.500000", "-2"),
            ("KWD", 1_234_500_001, "1.234500001", "1.234"),
            ("EUR", i64::MAX, "92233720368.54775807", "92233720368.54"),
            ("EUR", i64::MIN, "-92233720368.54775808", "-92233720368.55"),
        ] {
            let currency = Currency::parse(code).unwrap();
            let amount = MicroAmount::of(micro);
            assert_eq!((exact(amount, &currency).as_str(), rounded(amount, &currency).as_str()), (all, whole));
        }
    }
}
