//! Money that is moved.

use super::Whole;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use utoipa::openapi::schema::{ObjectBuilder, SchemaType, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

const MIN: i64 = 1;
/// The most that policy `billing.maximum_deposit_minor` can be.
const MAX: i64 = 100_000_000;

/// Minor units of the currency (cents).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub(crate) struct AmountMinor(pub(crate) i64);

impl<'de> Deserialize<'de> for AmountMinor {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_i64(Digits).map(Self)
    }
}

/// As [`Whole`], but in digits: 1e3 and 10.0 are what a calculation in floating point writes, and nobody counts money so.
struct Digits;

const WHOLE: Whole = Whole { expected: "a whole number from 1 to 100000000, in digits", min: MIN, max: MAX };

impl Visitor<'_> for Digits {
    type Value = i64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        WHOLE.expecting(f)
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<i64, E> {
        WHOLE.visit_i64(number)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<i64, E> {
        WHOLE.visit_u64(number)
    }
}

impl PartialSchema for AmountMinor {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(SchemaType::new(Type::Integer))
            .description(Some("Minor units of the currency (cents), in digits."))
            .minimum(Some(MIN))
            .maximum(Some(MAX))
            .into()
    }
}

impl ToSchema for AmountMinor {}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::body::parse_json;

    #[derive(Debug, Deserialize)]
    struct Request {
        amount: AmountMinor,
    }

    #[test]
    fn money_is_counted_in_digits() {
        for (text, amount) in [("1", 1), ("100000000", 100_000_000)] {
            let request: Request = parse_json(format!(r#"{{"amount":{text}}}"#).as_bytes()).unwrap();
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
            let error = parse_json::<Request>(format!(r#"{{"amount":{text}}}"#).as_bytes()).unwrap_err();
            assert!(error.message().contains("a whole number from 1 to 100000000, in digits"), "{text}: {error}");
        }
    }
}
