//! Answers of OAuth endpoints as providers write them, brought into the form of RFC 6749 (section 5) and RFC 8628 (section 3.2), which is
//! the one that the library reads: what a person has approved is not lost to a number that is written as a string.

use crate::failure::is_passing;
use crate::text_encoding;
use oauth2::HttpResponse;
use reqwest::StatusCode;
use reqwest::header::{CONTENT_TYPE, HeaderValue};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::time::Duration;

/// The longest life that an answer can give to a token or a device code; a longer one is cut.
const LONGEST_LIFE: u64 = 366 * 24 * 3600;
/// The life of a device code that does not say it.
const DEVICE_CODE_LIFE: u64 = 600;
/// The bounds of the pause between two polls of the device grant, in seconds.
const SHORTEST_INTERVAL: u64 = 1;
const LONGEST_INTERVAL: u64 = 60;

/// The errors with which a provider decides on a request (RFC 6749, section 5.2; RFC 8628, section 3.5), whatever the status. Another error
/// with a status of an overloaded server is a gateway's.
const DECISIONS: [&str; 10] = [
    "access_denied",
    "authorization_pending",
    "expired_token",
    "invalid_client",
    "invalid_grant",
    "invalid_request",
    "invalid_scope",
    "slow_down",
    "unauthorized_client",
    "unsupported_grant_type",
];

/// The answer in the form that the library reads. One that is no JSON object stays as it is.
pub(super) fn normalized(answer: HttpResponse) -> HttpResponse {
    let Some(mut fields) = fields_of(answer.body()) else { return answer };
    if fields.contains_key("device_code") {
        normalize_device_code(&mut fields);
    }
    set_seconds(&mut fields, "expires_in", |seconds| (1..).contains(&seconds).then(|| seconds.min(LONGEST_LIFE)));
    // Providers write it as a list or leave it out, and nothing here reads it.
    fields.remove("scope");
    if fields.contains_key("access_token") && !fields.get("token_type").is_some_and(Value::is_string) {
        fields.insert("token_type".to_owned(), "bearer".into());
    }
    for optional in ["refresh_token", "error_description", "error_uri"] {
        if fields.get(optional).and_then(Value::as_str).is_none_or(str::is_empty) {
            fields.remove(optional);
        }
    }
    let is_refusal = fields.get("error").is_some_and(Value::is_string) && !fields.contains_key("access_token");
    let status = match answer.status() {
        success if success.is_success() => {
            if is_refusal {
                StatusCode::BAD_REQUEST
            } else {
                StatusCode::OK
            }
        }
        other => other,
    };
    let (mut head, _) = answer.into_parts();
    head.status = status;
    head.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    HttpResponse::from_parts(head, Value::Object(fields).to_string().into_bytes())
}

/// The fields of an answer; `None` where it is no JSON object.
pub(super) fn fields_of(body: &[u8]) -> Option<Map<String, Value>> {
    object_of(body).ok()
}

/// Reads an object. A list is none: serde alone reads its items as the fields of `T`, in their order.
pub(super) fn object_of<T: DeserializeOwned>(body: &[u8]) -> serde_json::Result<T> {
    let fields: Map<String, Value> = serde_json::from_slice(text_encoding::without_mark(body))?;
    serde_json::from_value(Value::Object(fields))
}

/// Seconds as providers write them: a number, with or without a fraction, or either of them as a string.
pub(super) fn seconds(value: &Value) -> Option<u64> {
    let number = match value {
        Value::Number(number) => number.as_f64()?,
        Value::String(text) => text.trim().parse().ok()?,
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => return None,
    };
    // More than a duration holds is a long life; a negative one is none.
    if number > Duration::MAX.as_secs_f64() {
        return Some(u64::MAX);
    }
    Duration::try_from_secs_f64(number).ok().map(|life| life.as_secs())
}

/// Whether the same request may succeed in a moment: the answer is that of a server that is overloaded or being restarted, or no answer of
/// a token endpoint at all, as a page of maintenance is, or the 404 of a proxy whose server is being replaced.
pub(super) fn is_passing_fault(answer: &HttpResponse) -> bool {
    let fields = fields_of(answer.body());
    let error = fields.as_ref().and_then(|fields| fields.get("error")?.as_str());
    if error.is_some_and(|error| DECISIONS.contains(&error)) {
        return false;
    }
    let status = answer.status();
    let is_temporary = matches!(error, Some("temporarily_unavailable" | "server_error"));
    let is_page = fields.is_none() && (status.is_success() || status == StatusCode::NOT_FOUND);
    is_passing(status) || is_temporary || is_page
}

/// Whether the answer is one of a token endpoint: a grant, or a refusal with its code. Others are pages and documents of proxies, of
/// firewalls, and of servers that are being replaced; some write the name of the status as the error.
pub(super) fn is_of_token_endpoint(answer: &HttpResponse) -> bool {
    let Some(fields) = fields_of(answer.body()) else { return false };
    let status = answer.status();
    let is_code = |error: &str| Some(error) != status.canonical_reason();
    status.is_success() || fields.get("error").and_then(Value::as_str).is_some_and(is_code)
}

/// `verification_url` is the name in the drafts of RFC 8628, which some providers have never changed.
fn normalize_device_code(fields: &mut Map<String, Value>) {
    let mut address = |names: [&str; 2]| {
        // Both are removed: the library takes two names of one field for a repeated field.
        let given = names.map(|name| fields.remove(name));
        given.into_iter().flatten().find(Value::is_string)
    };
    let plain = address(["verification_uri", "verification_url"]);
    let complete = address(["verification_uri_complete", "verification_url_complete"]);
    if let Some(address) = plain.or_else(|| complete.clone()) {
        fields.insert("verification_uri".to_owned(), address);
    }
    if let Some(address) = complete {
        fields.insert("verification_uri_complete".to_owned(), address);
    }
    for code in ["device_code", "user_code"] {
        if let Some(number) = fields.get(code).and_then(Value::as_number).map(ToString::to_string) {
            fields.insert(code.to_owned(), number.into());
        }
    }
    // Without a pause the library polls as fast as it can.
    set_seconds(fields, "interval", |seconds| Some(seconds.clamp(SHORTEST_INTERVAL, LONGEST_INTERVAL)));
    let life = fields.get("expires_in").and_then(seconds).filter(|seconds| *seconds > 0);
    fields.insert("expires_in".to_owned(), life.unwrap_or(DEVICE_CODE_LIFE).into());
}

/// Writes a number of seconds as the library reads it; one that is unreadable or out of bounds is left out.
fn set_seconds(fields: &mut Map<String, Value>, name: &str, bounded: impl Fn(u64) -> Option<u64>) {
    if let Some(given) = fields.remove(name)
        && let Some(number) = seconds(&given).and_then(bounded)
    {
        fields.insert(name.to_owned(), number.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn answer(status: u16, body: impl Into<Vec<u8>>) -> HttpResponse {
        let mut answer = HttpResponse::new(body.into());
        *answer.status_mut() = StatusCode::from_u16(status).unwrap();
        answer
    }

    fn read(given: &Value) -> Value {
        serde_json::from_slice(normalized(answer(200, given.to_string())).body()).unwrap()
    }

    #[test]
    fn token_answers_of_all_forms_are_read() {
        for (given, life) in [
            (json!({ "access_token": "a", "token_type": "Bearer", "expires_in": 3599 }), Some(3599)),
            (json!({ "access_token": "a", "token_type": "Bearer", "expires_in": "3599" }), Some(3599)),
            (json!({ "access_token": "a", "token_type": "Bearer", "expires_in": " 3599.0 " }), Some(3599)),
            (json!({ "access_token": "a", "expires_in": 3599.87 }), Some(3599)),
            (json!({ "access_token": "a", "token_type": null, "expires_in": 1e30 }), Some(LONGEST_LIFE)),
            (json!({ "access_token": "a", "scope": ["openid", "profile"], "refresh_token": "" }), None),
            (json!({ "access_token": "a", "scope": null, "refresh_token": null, "expires_in": null }), None),
            (json!({ "access_token": "a", "expires_in": 0 }), None),
            (json!({ "access_token": "a", "expires_in": -1 }), None),
            (json!({ "access_token": "a", "expires_in": "soon" }), None),
            (json!({ "access_token": "a", "expires_in": "NaN" }), None),
            (json!({ "access_token": "a", "expires_in": [3599] }), None),
        ] {
            let grant: oauth2::basic::BasicTokenResponse = serde_json::from_value(read(&given)).unwrap();
            use oauth2::TokenResponse as _;
            assert_eq!(grant.expires_in(), life.map(Duration::from_secs), "{given}");
            assert!(grant.access_token().secret() == "a" && grant.refresh_token().is_none(), "{given}");
        }
    }

    #[test]
    fn device_answers_of_all_forms_are_read() {
        for (given, interval, life) in [
            (json!({ "verification_uri": "https://id.example/d", "interval": 5, "expires_in": 300 }), 5, 300),
            (json!({ "verification_url": "https://id.example/d", "interval": "5", "expires_in": "300" }), 5, 300),
            (
                json!({ "verification_uri_complete": "https://id.example/d", "interval": 0, "expires_in": 300.5 }),
                1,
                300,
            ),
            (json!({ "verification_uri": "https://id.example/d", "interval": null }), 5, DEVICE_CODE_LIFE),
            (
                json!({ "verification_uri": "https://id.example/d", "interval": 1e9, "expires_in": 0 }),
                60,
                DEVICE_CODE_LIFE,
            ),
        ] {
            let mut given = given;
            (given["device_code"], given["user_code"]) = (json!("d"), json!(12345678));
            let device: oauth2::StandardDeviceAuthorizationResponse = serde_json::from_value(read(&given)).unwrap();
            assert_eq!(device.verification_uri().as_str(), "https://id.example/d", "{given}");
            assert_eq!(device.user_code().secret(), "12345678", "{given}");
            let read = (device.interval(), device.expires_in());
            assert_eq!(read, (Duration::from_secs(interval), Duration::from_secs(life)), "{given}");
        }
    }

    #[test]
    fn answer_with_a_byte_order_mark_or_another_media_type_is_read() {
        let mut given = answer(201, "\u{feff}{\"access_token\": \"a\"}");
        given.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
        let read = normalized(given);
        assert_eq!(
            (read.status(), read.headers()[CONTENT_TYPE].to_str().unwrap()),
            (StatusCode::OK, "application/json")
        );
        assert_eq!(fields_of(read.body()).unwrap()["access_token"], "a");
    }

    #[test]
    fn list_in_place_of_an_object_is_none() {
        #[derive(Debug, serde::Deserialize)]
        struct Metadata {
            issuer: String,
        }
        assert_eq!(object_of::<Metadata>(br#"{"issuer": "https://id.example"}"#).unwrap().issuer, "https://id.example");
        object_of::<Metadata>(br#"["https://id.example"]"#).unwrap_err();
    }

    #[test]
    fn refusal_with_the_status_of_a_success_is_a_refusal() {
        let read = normalized(answer(200, json!({ "error": "authorization_pending" }).to_string()));
        assert_eq!(read.status(), StatusCode::BAD_REQUEST);
    }

    #[test]
    fn faults_of_gateways_pass_and_decisions_of_the_provider_do_not() {
        let html = "<html>Bad Gateway</html>";
        for (status, body, passes) in [
            (502, html, true),
            (503, "", true),
            (429, "{}", true),
            (503, r#"{"status": 503, "error": "Service Unavailable"}"#, true),
            (400, r#"{"error": "temporarily_unavailable"}"#, true),
            (200, html, true),
            (429, r#"{"error": "slow_down"}"#, false),
            (500, r#"{"error": "invalid_grant"}"#, false),
            (400, r#"{"error": "authorization_pending"}"#, false),
            (403, html, false),
            (404, html, true),
            (404, "default backend - 404", true),
            (404, r#"{"error": "Not Found"}"#, false),
            (401, "", false),
            (200, r#"{"access_token": "a"}"#, false),
        ] {
            assert_eq!(is_passing_fault(&answer(status, body)), passes, "{status} {body}");
        }
    }

    #[test]
    fn answers_of_firewalls_and_proxies_are_none_of_a_token_endpoint() {
        for (status, body, is_one) in [
            (400, r#"{"error": "authorization_pending"}"#, true),
            (400, r#"{"error": "authorization_declined", "error_codes": [70016]}"#, true),
            (403, r#"{"error": "invalid_grant"}"#, true),
            (200, r#"{"access_token": "a"}"#, true),
            (403, "<html>Request blocked</html>", false),
            (404, "404 page not found", false),
            (302, "", false),
            (403, r#"{"message": "Forbidden"}"#, false),
            (404, r#"{"status": 404, "error": "Not Found", "path": "/token"}"#, false),
            (403, r#"{"error": {"code": 403, "status": "PERMISSION_DENIED"}}"#, false),
        ] {
            assert_eq!(is_of_token_endpoint(&answer(status, body)), is_one, "{status} {body}");
        }
    }
}
