//! A body as an agent sends it: of a protocol that is understood here, and strictly of its type.
//!
//! The types of `wire` ignore unknown fields, since an agent must understand a response of a newer control plane. In the other direction
//! nothing is ignored: a client of a supported protocol sends no field that is unknown here.

use crate::http::error::{ApiError, Code};
use crate::http::request_body::integers::from_json;
use crate::http::request_body::{list_for_object, parse_json, read_body, require_json};
use axum::extract::{FromRequest, Request};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A request body of type `T`.
pub(super) struct StrictJson<T>(pub(super) T);

/// The part of a body that is read first: a body of another protocol may differ in every other respect.
#[derive(Deserialize)]
struct ProtocolHeader {
    protocol: Option<u64>,
}

impl<S: Send + Sync, T: DeserializeOwned + Serialize> FromRequest<S> for StrictJson<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        require_json(request.headers())?;
        let bytes = read_body(request).await?;
        parse(&bytes).map(Self)
    }
}

fn parse<T: DeserializeOwned + Serialize>(bytes: &[u8]) -> Result<T, ApiError> {
    if let Ok(ProtocolHeader { protocol: Some(protocol) }) = from_json(bytes) {
        check_protocol(protocol)?;
    }
    let value: T = parse_json(bytes)?;
    let sent: Value = strict_json::from_slice(bytes).map_err(ApiError::internal)?;
    let understood = serde_json::to_value(&value).map_err(ApiError::internal)?;
    // The buffers of tagged types give a struct a list as readily as an object.
    if let Some(field) = strict_json::tagged::list_for_object(&sent, &understood) {
        return Err(list_for_object(&field));
    }
    match unknown_field(&sent, &understood) {
        None => Ok(value),
        Some(field) => {
            let field: String = field.chars().filter(|character| !character.is_control()).take(200).collect();
            Err(ApiError::invalid_request(format!(
                "The body has a field that is unknown here: `{field}`; leave it out."
            ))
            .detail("field", field))
        }
    }
}

fn check_protocol(protocol: u64) -> Result<(), ApiError> {
    let (oldest, newest) = (wire::OLDEST_PROTOCOL, wire::PROTOCOL);
    if (u64::from(oldest)..=u64::from(newest)).contains(&protocol) {
        return Ok(());
    }
    let what = if protocol < u64::from(oldest) { "agent" } else { "control plane" };
    Err(ApiError::new(
        Code::UpgradeRequired,
        format!("Protocol {protocol} is not supported, {oldest} to {newest} are; upgrade the {what}."),
    )
    .detail("oldest_protocol", oldest)
    .detail("newest_protocol", newest))
}

/// The path of the first field in `sent` that its type did not read. A null field holds no value and may be one that the type leaves out.
fn unknown_field(sent: &Value, understood: &Value) -> Option<String> {
    match (sent, understood) {
        (Value::Object(sent), Value::Object(understood)) => {
            sent.iter().filter(|(_, value)| !value.is_null()).find_map(|(key, value)| match understood.get(key) {
                None => Some(key.clone()),
                Some(taken) => unknown_field(value, taken).map(|below| format!("{key}.{below}")),
            })
        }
        (Value::Array(sent), Value::Array(understood)) => sent
            .iter()
            .zip(understood)
            .enumerate()
            .find_map(|(index, (sent, taken))| unknown_field(sent, taken).map(|below| format!("[{index}].{below}"))),
        // A scalar, or something that is written down otherwise than it was read.
        (
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) | Value::Object(_),
            _,
        ) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use wire::task::TaskResult;

    fn result() -> Value {
        json!({
            "attempt": 1, "status": "succeeded", "output": {"anything": {"goes": 1}}, "error": null,
            "proof": {"payload_type": "t", "payload": "e30=", "signatures": [{"key_id": "k", "signature": "AA=="}]},
            "started_at": "2026-11-21T08:00:00Z", "finished_at": "2026-11-21T08:00:01.5+01:00",
        })
    }

    fn read(body: &Value) -> Result<TaskResult, ApiError> {
        parse(body.to_string().as_bytes())
    }

    #[test]
    fn free_form_fields_are_accepted_and_optional_fields_may_be_null() {
        let read = read(&result()).unwrap();
        assert_eq!(read.output["anything"]["goes"], 1);
    }

    #[test]
    fn unknown_field_at_any_depth_is_refused_with_its_path() {
        let mut top = result();
        top["bogus"] = 1.into();
        let mut nested = result();
        nested["proof"]["signatures"][0]["bogus"] = "x".into();
        for (body, path) in [(top, "bogus"), (nested, "proof.signatures.[0].bogus")] {
            let error = read(&body).unwrap_err();
            assert_eq!(error.code(), Code::InvalidRequest);
            assert_eq!(error.details()["field"], path);
        }
    }

    #[test]
    fn list_in_place_of_an_object_is_refused_with_its_path() {
        let mut whole = result();
        whole["proof"] = json!(["t", "e30=", []]);
        let mut nested = result();
        nested["proof"]["signatures"][0] = json!(["k", "AA=="]);
        let mut error = result();
        error["error"] = json!(["code", "message"]);
        for (body, path) in [(whole, "proof"), (nested, "proof.signatures[0]"), (error, "error")] {
            serde_json::from_value::<TaskResult>(body.clone()).expect("serde alone reads the list");
            let refused = read(&body).unwrap_err();
            assert_eq!(refused.message(), format!("`{path}` is a list; it must be an object."));
            assert_eq!(refused.details()["field"], path);
        }
    }

    #[test]
    fn unsupported_protocol_is_reported_before_other_faults() {
        let range = wire::OLDEST_PROTOCOL..=wire::PROTOCOL;
        for protocol in [0, u64::from(range.start() - 1), u64::from(range.end() + 1), u64::MAX] {
            let error = read(&json!({"protocol": protocol, "everything": "else"})).unwrap_err();
            assert_eq!(error.code(), Code::UpgradeRequired);
            assert_eq!(error.details()["oldest_protocol"], *range.start());
            assert_eq!(error.details()["newest_protocol"], *range.end());
        }
        assert_eq!(read(&json!({"protocol": -1})).unwrap_err().code(), Code::InvalidRequest);
    }
}
