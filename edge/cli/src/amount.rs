//! Amounts of money as text: `20.00 USD`, exact in both directions. The API has minor units and millionths of them.

use serde_json::{Map, Value};
use std::str::FromStr;

/// The micro units in a minor unit.
pub(crate) const MICRO: i128 = 1_000_000;
const MICRO_DIGITS: usize = 6;

/// How many digits the minor unit of a currency has (ISO 4217). The service takes codes that the standard does not list; they have two.
fn digits(currency: &str) -> usize {
    let exponent = iso_currency::Currency::from_code(currency).map(|known| known.exponent().unwrap_or(0));
    usize::from(exponent.unwrap_or(2))
}

/// An amount on the command line: `20.00`, `20.00 USD`, `20USD`, `-5.50 EUR`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Amount {
    negative: bool,
    whole: String,
    rest: Option<String>,
    currency: Option<String>,
}

impl FromStr for Amount {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const WRONG: &str = "an amount is written as 20.00 or \"20.00 USD\"";
        let text = text.trim();
        let at = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
        let (number, currency) = (text[..at].trim_end(), &text[at..]);
        let currency = match currency {
            "" => None,
            code if code.len() == 3 && code.bytes().all(|byte| byte.is_ascii_alphabetic()) => {
                Some(code.to_ascii_uppercase())
            }
            _ => return Err(WRONG),
        };
        let (negative, number) = number.strip_prefix('-').map_or((false, number), |number| (true, number));
        let (whole, rest) = number.split_once('.').map_or((number, None), |(whole, rest)| (whole, Some(rest)));
        let is_number = |digits: &str| (1..=18).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
        if !is_number(whole) || rest.is_some_and(|rest| !is_number(rest)) {
            return Err(WRONG);
        }
        Ok(Self { negative, whole: whole.to_owned(), rest: rest.map(str::to_owned), currency })
    }
}

impl Amount {
    /// The currency beside the number.
    pub(crate) fn currency(&self) -> Option<&str> {
        self.currency.as_deref()
    }

    /// In minor units of `currency`. Without a currency of its own the amount must have all decimals, so that cents are never mistaken for
    /// dollars.
    pub(crate) fn minor(&self, currency: &str) -> Result<i64, String> {
        if let Some(own) = self.currency().filter(|own| *own != currency) {
            return Err(format!("the amount is in {own}, and {currency} is meant"));
        }
        let (digits, rest) = (digits(currency), self.rest.as_deref().unwrap_or_default());
        let example = shown(2_000, 0, currency);
        if rest.len() > digits {
            return Err(format!("{currency} has {digits} decimals; write an amount as {example}"));
        }
        if rest.len() < digits && self.currency.is_none() {
            return Err(format!("write all {digits} decimals of {currency}, or the currency: {example}"));
        }
        let number = format!("{}{rest:0<digits$}", self.whole);
        let minor: i64 = number.parse().map_err(|_| format!("{number} is more than an amount can be"))?;
        Ok(if self.negative { -minor } else { minor })
    }
}

/// `20.00 USD`. The number counts `10^-(the currency's digits + finer)` of the major unit; finer digits are left out where they are zero.
fn shown(number: i64, finer: usize, currency: &str) -> String {
    let (fixed, all) = (digits(currency), digits(currency) + finer);
    let (sign, digits) = (if number < 0 { "-" } else { "" }, number.unsigned_abs());
    let digits = format!("{digits:0>width$}", width = all + 1);
    let (whole, rest) = digits.split_at(digits.len() - all);
    let (fixed, finer) = rest.split_at(fixed);
    let rest = format!("{fixed}{}", finer.trim_end_matches('0'));
    if rest.is_empty() { format!("{sign}{whole} {currency}") } else { format!("{sign}{whole}.{rest} {currency}") }
}

/// The unit after an amount in a message of the service.
pub(crate) const MINOR_UNITS: &str = " minor units";

/// The message with its amounts in minor units as text: `2000 minor units` and `2000.000000` are `20.00 USD`.
pub(crate) fn amounts_in_message(message: &str, currency: &str) -> String {
    let message = message.replace(MINOR_UNITS, "").replace("a whole number from ", "from ");
    let mut words = message.split(' ').peekable();
    let mut shown_words = Vec::new();
    while let Some(word) = words.next() {
        let number = word.trim_end_matches([',', ';', '.', ':']);
        // An amount with its currency is one already.
        let has_currency = words.peek().is_some_and(|next| next.trim_end_matches([',', ';', '.', ':']) == currency);
        shown_words.push(match micro(number).filter(|_| !has_currency) {
            Some(micro) => format!("{}{}", shown(micro, MICRO_DIGITS, currency), &word[number.len()..]),
            None => word.to_owned(),
        });
    }
    shown_words.join(" ")
}

/// Minor units with up to six decimals, in millionths.
fn micro(number: &str) -> Option<i64> {
    let (sign, digits) = number.strip_prefix('-').map_or((1, number), |digits| (-1, digits));
    let (whole, rest) = digits.split_once('.').unwrap_or((digits, "0"));
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(whole) || !is_number(rest) || rest.len() > MICRO_DIGITS {
        return None;
    }
    let micro: i64 = format!("{whole}{rest:0<MICRO_DIGITS$}").parse().ok()?;
    Some(sign * micro)
}

/// The answer with every amount as text, under its name without the unit: `balance_micro` is `balance`, `burn_minor_per_hour` is
/// `burn_per_hour`. Where both units are there, the finer one is shown. An amount without a currency stays as it is.
pub(crate) fn with_amounts(answer: &Value) -> Value {
    in_currency(answer, None)
}

fn in_currency(value: &Value, outer: Option<&str>) -> Value {
    match value {
        Value::Array(items) => items.iter().map(|item| in_currency(item, outer)).collect(),
        Value::Object(fields) => {
            let currency = own_currency(value).or(outer);
            let mut shown: Map<String, Value> = Map::new();
            for (name, field) in fields {
                shown.insert(name.clone(), in_currency(field, currency));
            }
            let Some(currency) = currency else { return Value::Object(shown) };
            // `…_micro` comes after `…_minor` of the same amount, and replaces it.
            for (unit, finer) in [("minor", 0), ("micro", MICRO_DIGITS)] {
                for (name, field) in fields {
                    if let (Some(short), Some(number)) = (without_unit(name, unit), field.as_i64()) {
                        shown.remove(name);
                        shown.insert(short, Value::String(self::shown(number, finer, currency)));
                    }
                }
            }
            Value::Object(shown)
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value.clone(),
    }
}

/// The currency of an object's amounts: its own, or that of its price or account.
fn own_currency(value: &Value) -> Option<&str> {
    ["/currency", "/price/currency", "/account/currency"].iter().find_map(|path| value.pointer(path)?.as_str())
}

fn without_unit(name: &str, unit: &str) -> Option<String> {
    let parts: Vec<&str> = name.split('_').filter(|part| *part != unit).collect();
    let had_it = parts.len() < name.split('_').count();
    (had_it && !parts.is_empty()).then(|| parts.join("_"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn minor(text: &str, currency: &str) -> Result<i64, String> {
        text.parse::<Amount>().map_err(str::to_owned)?.minor(currency)
    }

    #[test]
    fn amount_is_parsed_exactly() {
        for (text, currency, expected) in [
            ("20.00", "USD", 2000),
            ("20.00 USD", "USD", 2000),
            ("20 USD", "USD", 2000),
            ("20USD", "USD", 2000),
            ("20.5 usd", "USD", 2050),
            ("-0.01", "EUR", -1),
            ("2000", "JPY", 2000),
            ("1.234", "KWD", 1234),
            ("90071992547409.93", "USD", 9_007_199_254_740_993),
        ] {
            assert_eq!(minor(text, currency), Ok(expected), "{text}");
        }
    }

    #[test]
    fn ambiguous_amount_is_refused() {
        for (text, currency) in [
            ("2000", "USD"),
            ("20.0", "USD"),
            ("20.001", "USD"),
            ("20.00 EUR", "USD"),
            ("1.5", "JPY"),
            ("1e3", "USD"),
            ("20,00", "USD"),
            ("", "USD"),
            (".50", "USD"),
            ("20.", "USD"),
            ("20.00 DOLLARS", "USD"),
            ("20.00 US$", "USD"),
            ("999999999999999999.99", "USD"),
            ("--1.00", "USD"),
        ] {
            assert!(minor(text, currency).is_err(), "{text}");
        }
        let cents = minor("2000", "USD").unwrap_err();
        assert!(cents.contains("20.00 USD"), "{cents}");
    }

    #[test]
    fn answer_shows_every_amount_in_its_currency() {
        let answer = json!({
            "currency": "USD", "balance_minor": 1, "balance_micro": -16_666_667, "burn_minor_per_hour": 250, "n_minor": null,
            "refunds": [{ "amount_minor": 500 }],
            "yen": { "price": { "currency": "JPY", "amount_minor_per_gpu_hour": 300 }, "cost_to_date_minor": 0 },
        });
        assert_eq!(
            with_amounts(&answer),
            json!({
                "currency": "USD", "balance": "-0.16666667 USD", "burn_per_hour": "2.50 USD", "n_minor": null,
                "refunds": [{ "amount": "5.00 USD" }],
                "yen": { "price": { "currency": "JPY", "amount_per_gpu_hour": "300 JPY" }, "cost_to_date": "0 JPY" },
            })
        );
        let unknown = json!({ "balance_minor": 5 });
        assert_eq!(with_amounts(&unknown), unknown, "an amount of no currency keeps its number");
        assert_eq!(shown(i64::MIN, MICRO_DIGITS, "USD"), "-92233720368.54775808 USD");
    }

    #[test]
    fn amounts_of_a_message_are_shown_in_the_currency() {
        for (message, shown) in [
            (
                "2000 minor units are more than the 500.000000 that are available; take less, or pay in first.",
                "20.00 USD are more than the 5.00 USD that are available; take less, or pay in first.",
            ),
            (
                "No account holds more than 100000000000 minor units; give less.",
                "No account holds more than 1000000000.00 USD; give less.",
            ),
            (
                "`amount_minor` must be from -100000 to 100000, and not 0; policy `x` says so.",
                "`amount_minor` must be from -1000.00 USD to 1000.00 USD, and not 0.00 USD; policy `x` says so.",
            ),
            (
                "`amount_minor` must be a whole number from 1 to 500, which is left.",
                "`amount_minor` must be from 0.01 USD to 5.00 USD, which is left.",
            ),
            ("Of the cost 12.500000 minor units are left.", "Of the cost 0.125 USD are left."),
            (
                "20.00 USD are more than the 5.00 USD, which are there.",
                "20.00 USD are more than the 5.00 USD, which are there.",
            ),
        ] {
            assert_eq!(amounts_in_message(message, "USD"), shown);
        }
    }

    proptest! {
        #[test]
        fn displayed_amount_is_parsed_as_the_same_number(number in -999_999_999_999_999_i64..=999_999_999_999_999, code in "(USD|EUR|JPY|KWD|CLF|QQQ)") {
            prop_assert_eq!(minor(&shown(number, 0, &code), &code), Ok(number));
        }
    }
}
