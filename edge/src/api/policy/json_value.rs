//! A policy value in a request, before it is checked against its key.

use domain::policy::PolicyValue;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::openapi::schema::{ObjectBuilder, OneOfBuilder, SchemaType, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use crate::api::request_fields::{WITHOUT_CONTROL, without_control};
use crate::http::request_body::integers::in_digits;

/// The longest text that is read as a value.
const MAX_TEXT: usize = 255;
/// Beyond what any key allows, and exact in every JSON parser (RFC 8259, section 6).
const MAX_NUMBER: i64 = 9_007_199_254_740_991;

/// Any JSON value; its key decides on the type.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(transparent)]
pub(in crate::api) struct JsonValue(serde_json::Value);

impl JsonValue {
    /// The typed value; `None` where no key takes such a value.
    pub(super) fn read(&self) -> Option<PolicyValue> {
        let fits = |text: &str| text.chars().count() <= MAX_TEXT && without_control(text);
        match &self.0 {
            serde_json::Value::Bool(value) => Some(PolicyValue::Bool(*value)),
            serde_json::Value::Number(number) => {
                let whole = number.as_i64().or_else(|| in_digits(&number.to_string())?.parse().ok());
                whole.filter(|number| (-MAX_NUMBER..=MAX_NUMBER).contains(number)).map(PolicyValue::Int)
            }
            serde_json::Value::String(text) if fits(text) => Some(PolicyValue::Text(text.clone())),
            serde_json::Value::String(_)
            | serde_json::Value::Null
            | serde_json::Value::Array(_)
            | serde_json::Value::Object(_) => None,
        }
    }
}

impl PartialSchema for JsonValue {
    fn schema() -> RefOr<Schema> {
        let one = |of: Type| ObjectBuilder::new().schema_type(SchemaType::new(of));
        let of = OneOfBuilder::new()
            .item(one(Type::Integer).minimum(Some(-MAX_NUMBER)).maximum(Some(MAX_NUMBER)))
            .item(one(Type::Boolean))
            .item(one(Type::String).min_length(Some(1)).max_length(Some(MAX_TEXT)).pattern(Some(WITHOUT_CONTROL)))
            .description(Some("A whole number, a text, true or false, by the type of its key."))
            .build();
        RefOr::T(Schema::OneOf(of))
    }
}

impl ToSchema for JsonValue {
    fn name() -> std::borrow::Cow<'static, str> {
        "PolicyValueOfKey".into()
    }
}

/// Distinguishes a field that is null from one that is absent.
pub(super) fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<JsonValue>>, D::Error> {
    Option::<JsonValue>::deserialize(deserializer).map(Some)
}
