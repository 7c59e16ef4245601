//! Amounts as people and spreadsheets read them: in the currency's major unit, with every digit there is.

use domain::money::{Currency, MicroAmount};

/// How many decimals the minor unit has, where it is not two (ISO 4217).
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

/// The fractions of a minor unit.
const MICRO_DECIMALS: usize = 6;

fn decimals(currency: &Currency) -> usize {
    DECIMALS.iter().find(|(code, _)| *code == currency.as_str()).map_or(2, |(_, decimals)| *decimals)
}

/// All of it: `-12.34567890` of a currency with two decimals.
pub(super) fn exact(amount: MicroAmount, currency: &Currency) -> String {
    decimal(amount.get(), decimals(currency) + MICRO_DECIMALS)
}

/// Whole minor units, rounded down as everywhere: `-12.35` for -12.34567890.
pub(super) fn rounded(amount: MicroAmount, currency: &Currency) -> String {
    decimal(amount.minor(), decimals(currency))
}

fn decimal(number: i64, decimals: usize) -> String {
    let (sign, digits) = (if number < 0 { "-" } else { "" }, number.unsigned_abs().to_string());
    if decimals == 0 {
        return format!("{sign}{digits}");
    }
    let digits = format!("{digits:0>width$}", width = decimals + 1);
    let (whole, rest) = digits.split_at(digits.len() - decimals);
    format!("{sign}{whole}.{rest}")
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
