//! `Idempotency-Key` (IETF draft-ietf-httpapi-idempotency-key-header-07): what identifies a repeated request.
//!
//! The command id is a hash of principal, method, route and key; with it goes a digest of method, path, body, and of the organization and
//! project of the access token, which what the request creates belongs to. Both are stored with the command's commit, for a day. The response follows from that commit, or is stored beside it before it is sent ([`request_layer`]). A
//! repetition gets the same response on any replica; a different request under the same key is refused.

use actors::sharding::{command_id, digest_of};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method};
use axum::response::{IntoResponseParts, ResponseParts};
use domain::authz::CallerIdentity;
use domain::{CommandId, Principal};
use serde::Serialize;
use std::convert::Infallible;

use crate::http::error::{ApiError, Code};

mod idempotency_metrics;
pub(crate) mod request_layer;
mod stored_response;

pub use idempotency_metrics::{COUNTERS, IdempotencyCounters};

/// The header that brings a key.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// The header of a replayed response.
pub const IDEMPOTENCY_REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
/// The longest key, in characters.
pub const MAX_LEN: usize = 255;
/// The pattern of a key, for the API's description. (Blanks around a header's value are not part of it.)
pub const PATTERN: &str = "^[!-~]([ -~]*[!-~])?$";

/// The client's name of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdempotencyKey(String);

impl IdempotencyKey {
    /// The key of a request; `None` where it has none.
    ///
    /// # Errors
    /// `invalid_request` where the key is empty, longer than [`MAX_LEN`], not printable ASCII, or present twice.
    pub fn of(headers: &HeaderMap) -> Result<Option<Self>, ApiError> {
        let mut given = headers.get_all(IDEMPOTENCY_KEY).iter();
        let Some(value) = given.next() else { return Ok(None) };
        if given.next().is_some() {
            return Err(refuse("is given twice; send one"));
        }
        let text = value.to_str().map_err(|_| refuse("must be printable ASCII characters"))?;
        // The draft writes it as a quoted string (RFC 8941, section 3.3.3); most clients leave the quotes out.
        let text = text.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(text);
        if !(1..=MAX_LEN).contains(&text.len()) || !text.bytes().all(|byte| (0x20..0x7f).contains(&byte)) {
            return Err(refuse("must have 1 to 255 printable ASCII characters; a UUID serves well"));
        }
        Ok(Some(Self(text.to_owned())))
    }

    /// The error where a key is required.
    #[must_use]
    pub fn required() -> ApiError {
        refuse(
            "is required here: send a value of your own, new for every request and the same for its repetitions, such as a UUID",
        )
    }
}

fn refuse(why: &str) -> ApiError {
    ApiError::invalid_request(format!("Header `Idempotency-Key` {why}.")).detail("field", "Idempotency-Key")
}

/// The method and path of a request, independent of its caller.
#[derive(Clone, Debug)]
pub struct RequestLine {
    pub method: Method,
    /// With its parameters' names, as `/api/v1/allocations/{id}/release`.
    pub route: String,
    /// With their values.
    pub path: String,
}

impl RequestLine {
    /// The id of the command that `by` sends here under `key`.
    #[must_use]
    pub fn command_id(&self, by: &Principal, key: &IdempotencyKey) -> CommandId {
        let by = by.to_string();
        let parts = ["idempotency-key", &by, self.method.as_str(), &self.route, &key.0];
        command_id(&parts.map(str::as_bytes))
    }

    /// The digest of this request by `caller`. `body` is the body as it was read, so that white space and the order of fields make no
    /// difference.
    ///
    /// # Errors
    /// `internal_error` where the body cannot be serialized.
    pub fn digest(&self, caller: &CallerIdentity, body: &impl Serialize) -> Result<[u8; 32], ApiError> {
        let body = serde_json::to_vec(body).map_err(ApiError::internal)?;
        let mut parts = vec![self.method.as_str().as_bytes(), self.path.as_bytes(), body.as_slice()];
        // Left out where there is neither: the digest is that of earlier releases then, whose rows are read during an upgrade.
        let (org, project) =
            (caller.org_id.as_ref().map(ToString::to_string), caller.project_id.as_ref().map(ToString::to_string));
        let claims = [("org_id", &org), ("project_id", &project)];
        for (name, value) in claims {
            if let Some(value) = value {
                parts.extend([name.as_bytes(), value.as_bytes()]);
            }
        }
        Ok(digest_of(&parts))
    }
}

/// The refusal of a key that was used with a different request.
#[must_use]
pub fn key_reused() -> ApiError {
    ApiError::new(
        Code::IdempotencyKeyReused,
        "This Idempotency-Key belongs to another request; use a new key for a new request.",
    )
    .detail("field", "Idempotency-Key")
}

/// The refusal of a repetition while the first request has no answer yet.
#[must_use]
pub fn in_progress() -> ApiError {
    ApiError::new(
        Code::IdempotencyInProgress,
        "The first request with this Idempotency-Key is still running; try again in a moment.",
    )
}

/// The refusal of a repetition whose first response was not stored.
#[must_use]
pub fn answer_not_stored() -> ApiError {
    ApiError::new(Code::StateConflict, "This was carried out before, and its answer is not stored; read the resource.")
}

/// Marks a response as replayed in its headers.
#[derive(Clone, Copy, Debug)]
pub struct ReplayedResponse(pub bool);

impl ReplayedResponse {
    /// The same, in the headers of a refusal.
    #[must_use]
    pub fn refused(self, error: ApiError) -> ApiError {
        if self.0 { error.header(IDEMPOTENCY_REPLAYED, HeaderValue::from_static("true")) } else { error }
    }
}

impl IntoResponseParts for ReplayedResponse {
    type Error = Infallible;

    fn into_response_parts(self, mut parts: ResponseParts) -> Result<ResponseParts, Infallible> {
        if self.0 {
            parts.headers_mut().insert(IDEMPOTENCY_REPLAYED, HeaderValue::from_static("true"));
        }
        Ok(parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn headers(keys: &[&[u8]]) -> HeaderMap {
        keys.iter().map(|key| (IDEMPOTENCY_KEY, HeaderValue::from_bytes(key).unwrap())).collect()
    }

    fn key(text: &str) -> IdempotencyKey {
        IdempotencyKey::of(&headers(&[text.as_bytes()])).unwrap().unwrap()
    }

    fn line(path: &str) -> RequestLine {
        RequestLine { method: Method::POST, route: "/api/v1/things/{id}".into(), path: path.into() }
    }

    #[test]
    fn a_key_is_read_with_and_without_its_quotes() {
        assert_eq!(IdempotencyKey::of(&headers(&[])).unwrap(), None);
        assert_eq!(key("\"8e03978e\""), key("8e03978e"));
        assert_eq!(key(&"k".repeat(255)).0.len(), 255);
    }

    #[test]
    fn invalid_idempotency_key_is_refused() {
        let long = "k".repeat(256);
        let wrong: [&[&[u8]]; 5] = [&[b""], &[b"\"\""], &[long.as_bytes()], &["ключ".as_bytes()], &[b"one", b"two"]];
        for wrong in wrong {
            let error = IdempotencyKey::of(&headers(wrong)).unwrap_err();
            assert_eq!(error.details()["field"], "Idempotency-Key");
        }
    }

    #[test]
    fn same_request_has_the_same_command_id_and_another_a_different_one() {
        let by = Principal::system("ann");
        let caller = CallerIdentity::new("ann", []);
        let command = |by: &Principal, path: &str, name: &str, body: serde_json::Value| {
            (line(path).command_id(by, &key(name)), line(path).digest(&caller, &body).unwrap())
        };
        let (id, digest) = command(&by, "/api/v1/things/1", "k", json!({"a": 1}));
        assert_eq!(command(&by, "/api/v1/things/1", "k", json!({"a": 1})), (id, digest));
        for reused in [
            command(&by, "/api/v1/things/2", "k", json!({"a": 1})),
            command(&by, "/api/v1/things/1", "k", json!({"a": 2})),
        ] {
            assert_eq!(reused.0, id);
            assert_ne!(reused.1, digest);
        }
        assert_ne!(command(&by, "/api/v1/things/1", "l", json!({"a": 1})).0, id);
        assert_ne!(command(&Principal::system("bob"), "/api/v1/things/1", "k", json!({"a": 1})).0, id);
    }

    #[test]
    fn request_by_a_token_of_another_organization_or_project_is_another_request() {
        let digest = |org: Option<&str>, project: Option<&str>| {
            let (org_id, project_id) = (org.map(Into::into), project.map(Into::into));
            let caller = CallerIdentity { org_id, project_id, ..CallerIdentity::new("ann", []) };
            line("/api/v1/things/1").digest(&caller, &json!({"a": 1})).unwrap()
        };
        let claims = [(None, None), (Some("a"), None), (Some("b"), None), (None, Some("a")), (Some("a"), Some("a"))];
        let digests: std::collections::BTreeSet<_> = claims.map(|(org, project)| digest(org, project)).into();
        assert_eq!(digests.len(), claims.len());
        assert_eq!(digest(Some("a"), Some("b")), digest(Some("a"), Some("b")));
    }
}
