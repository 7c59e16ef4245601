//! Amounts of money in requests.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::openapi::schema::{ObjectBuilder, SchemaType, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::IntegerVisitor;

// The largest is the most that policies `billing.maximum_deposit_minor` and `billing.adjustment_max_minor` can be.
numbers! {
    /// Minor units of the currency (cents).
    AmountMinor: i64, 1 to 100000000;
    /// Minor units: given where it is more than zero, taken where it is less. Policy `billing.adjustment_max_minor` may allow less.
    AdjustmentMinor: i64, -100000000 to 100000000;
}

/// Minor units of the currency (cents). Policies `billing.minimum_deposit_minor` and `billing.maximum_deposit_minor` bound it.
// Any whole number is read, so that the refusal names the bounds of the policies alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(crate) struct DepositMinor(pub(crate) i64);

impl<'de> Deserialize<'de> for DepositMinor {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let whole = IntegerVisitor { expected: "a whole number", min: i64::MIN, max: i64::MAX };
        deserializer.deserialize_i64(whole).map(Self)
    }
}

impl PartialSchema for DepositMinor {
    fn schema() -> RefOr<Schema> {
        AmountMinor::schema()
    }
}

impl ToSchema for DepositMinor {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::request_body::parse_json;

    #[derive(Debug, Deserialize)]
    struct Request<T> {
        amount: T,
    }

    #[test]
    fn amounts_are_whole_numbers_within_their_bounds() {
        for (text, amount) in [("1", 1), ("100000000", 100_000_000), ("1e3", 1000), ("1000.0", 1000)] {
            let request: Request<AmountMinor> = parse_json(format!(r#"{{"amount":{text}}}"#).as_bytes()).unwrap();
            assert_eq!(request.amount.0, amount);
        }
        for text in [
            "0",
            "-1",
            "100000001",
            "9223372036854775808",
            "1e9",
            "1.5",
            "1.00000000000000000001",
            "-0.0",
            "\"10\"",
            "null",
            "true",
            "[1]",
        ] {
            let error = parse_json::<Request<AmountMinor>>(format!(r#"{{"amount":{text}}}"#).as_bytes()).unwrap_err();
            assert!(error.message().contains("a whole number from 1 to 100000000"), "{text}: {error}");
        }
    }

    #[test]
    fn adjustments_are_whole_numbers_within_their_bounds() {
        for (text, amount) in [("-100000000", -100_000_000), ("0", 0), ("-0.0", 0), ("-1e3", -1000)] {
            let request: Request<AdjustmentMinor> = parse_json(format!(r#"{{"amount":{text}}}"#).as_bytes()).unwrap();
            assert_eq!(request.amount.0, amount);
        }
        for text in ["1e9", "1.5", "100000001", "\"10\""] {
            let error =
                parse_json::<Request<AdjustmentMinor>>(format!(r#"{{"amount":{text}}}"#).as_bytes()).unwrap_err();
            let expected = "a whole number from -100000000 to 100000000";
            assert!(error.message().contains(expected), "{text}: {error}");
        }
    }
}
