//! Money that is moved.

use super::Whole;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use utoipa::openapi::schema::{ObjectBuilder, SchemaType, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// Amounts between two others; the largest is the most that policies `billing.maximum_deposit_minor` and `billing.adjustment_max_minor`
/// can be.
macro_rules! amounts {
    ($($(#[doc = $doc:literal])+ $name:ident: $min:literal to $max:literal;)+) => {$(
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
        #[serde(transparent)]
        pub(crate) struct $name(pub(crate) i64);

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                const EXPECTED: &str = concat!("a whole number from ", $min, " to ", $max, ", in digits");
                deserializer.deserialize_i64(Digits(Whole { expected: EXPECTED, min: $min, max: $max })).map(Self)
            }
        }

        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                ObjectBuilder::new()
                    .schema_type(SchemaType::new(Type::Integer))
                    .description(Some(concat!($($doc),+).trim()))
                    .minimum(Some($min as i64))
                    .maximum(Some($max as i64))
                    .into()
            }
        }

        impl ToSchema for $name {}
    )+};
}

amounts! {
    /// Minor units of the currency (cents), in digits.
    AmountMinor: 1 to 100000000;
    /// Minor units, in digits: given where it is more than zero, taken where it is less. Policy `billing.adjustment_max_minor` may allow less.
    AdjustmentMinor: -100000000 to 100000000;
}

/// As [`Whole`], but in digits: 1e3 and 10.0 are what a calculation in floating point writes, and nobody counts money so.
struct Digits(Whole);

impl Visitor<'_> for Digits {
    type Value = i64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.expecting(f)
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<i64, E> {
        self.0.visit_i64(number)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<i64, E> {
        self.0.visit_u64(number)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::body::parse_json;

    #[derive(Debug, Deserialize)]
    struct Request<T> {
        amount: T,
    }

    #[test]
    fn money_is_counted_in_digits() {
        for (text, amount) in [("1", 1), ("100000000", 100_000_000)] {
            let request: Request<AmountMinor> = parse_json(format!(r#"{{"amount":{text}}}"#).as_bytes()).unwrap();
            assert_eq!(request.amount.0, amount);
        }
        for text in [
            "0",
            "-1",
            "100000001",
            "9223372036854775808",
            "1e3",
            "1000.0",
            "1.5",
            "-0.0",
            "\"10\"",
            "null",
            "true",
            "[1]",
        ] {
            let error = parse_json::<Request<AmountMinor>>(format!(r#"{{"amount":{text}}}"#).as_bytes()).unwrap_err();
            assert!(error.message().contains("a whole number from 1 to 100000000, in digits"), "{text}: {error}");
        }
    }
    #[test]
    fn so_is_what_an_operator_gives_and_takes() {
        for (text, amount) in [("-100000000", -100_000_000), ("0", 0), ("100000000", 100_000_000)] {
            let request: Request<AdjustmentMinor> = parse_json(format!(r#"{{"amount":{text}}}"#).as_bytes()).unwrap();
            assert_eq!(request.amount.0, amount);
        }
        for text in ["1e3", "-1e3", "1000.0", "1.5", "100000001", "\"10\""] {
            let error =
                parse_json::<Request<AdjustmentMinor>>(format!(r#"{{"amount":{text}}}"#).as_bytes()).unwrap_err();
            let expected = "a whole number from -100000000 to 100000000, in digits";
            assert!(error.message().contains(expected), "{text}: {error}");
        }
    }
}
