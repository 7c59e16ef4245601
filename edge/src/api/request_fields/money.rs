//! Amounts of money in requests.

use serde::{Deserialize, Deserializer, Serialize};
use utoipa::openapi::schema::{ObjectBuilder, SchemaType, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::IntegerVisitor;

/// Amounts with the bounds that the description gives. Any whole number is read, and refused where its currency and the policies are known: the
/// refusal names the bounds as money. The largest here is the most that these policies can be.
macro_rules! amounts {
    ($($(#[doc = $doc:literal])+ $name:ident: $min:literal to $max:literal;)+) => {$(
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
        #[serde(transparent)]
        pub(crate) struct $name(pub(crate) i64);

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let whole = IntegerVisitor { expected: "a whole number", min: i64::MIN, max: i64::MAX };
                deserializer.deserialize_i64(whole).map(Self)
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
    /// Minor units of the currency (cents).
    AmountMinor: 1 to 100000000;
    /// Minor units: given where it is more than zero, taken where it is less. Policy `billing.adjustment_max_minor` may allow less.
    AdjustmentMinor: -100000000 to 100000000;
    /// Minor units of the currency (cents) per GPU and hour.
    PriceMinor: 0 to 10000000;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::request_body::parse_json;

    #[derive(Debug, Deserialize)]
    struct Request<T> {
        amount: T,
    }

    fn read(text: &str) -> Result<i64, String> {
        let request = parse_json::<Request<AmountMinor>>(format!(r#"{{"amount":{text}}}"#).as_bytes());
        request.map(|request| request.amount.0).map_err(|error| error.message().to_owned())
    }

    #[test]
    fn amounts_are_whole_numbers_of_any_size() {
        for (text, amount) in [
            ("1", 1),
            ("0", 0),
            ("-0.0", 0),
            ("-100000001", -100_000_001),
            ("1e3", 1000),
            ("1000.0", 1000),
            ("9223372036854775807", i64::MAX),
        ] {
            assert_eq!(read(text), Ok(amount));
        }
        for text in ["9223372036854775808", "1.5", "1.00000000000000000001", "\"10\"", "null", "true", "[1]"] {
            assert!(read(text).is_err_and(|message| message.contains("a whole number")), "{text}");
        }
    }
}
