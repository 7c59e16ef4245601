//! An answer as it is stored for repetitions: a success with its body, or a refusal without its correlation id, which is each
//! request's own.

use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use domain::redact::redact;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::ReplayedResponse;
use crate::http::error::{ApiError, Code, PendingErrorResponse};

/// The largest answer that is stored, in bytes of its stored form.
const MAX_STORED_BYTES: usize = 256 << 10;
/// The largest body that is buffered for storing. No response of a route with keys comes near it.
const MAX_BODY: usize = 4 << 20;

/// The stored form.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum StoredResponse {
    Given {
        status: u16,
        etag: Option<String>,
        /// The JSON text with its secrets redacted; none where the response has no body.
        body: Option<String>,
    },
    Refused {
        code: String,
        message: String,
        details: Map<String, Value>,
    },
}

/// How a response can be stored.
#[derive(Debug, PartialEq)]
pub(super) enum ResponseKind {
    Json,
    /// It has no body.
    Empty,
    /// Its body is not JSON.
    Other,
    /// Its headers forbid storing it.
    Secret,
    /// It is larger than [`MAX_STORED_BYTES`].
    TooLarge,
}

/// A buffered response: its kind, the text to store, and the response itself, to be sent.
pub(super) struct BufferedResponse {
    pub(super) kind: ResponseKind,
    pub(super) text: Option<String>,
    pub(super) response: Response,
}

/// Whether repetitions get this response too. A refusal that does not depend on the request itself (a rate limit, no valid token, a missing
/// permission, a temporary failure, or the first request still running) is not final.
pub(super) fn is_final(response: &Response) -> bool {
    let status = response.status();
    let passing = matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::TOO_MANY_REQUESTS)
        || status.is_server_error();
    let of_the_key = refusal_code(response)
        .is_some_and(|code| matches!(code, Code::IdempotencyInProgress | Code::IdempotencyKeyReused));
    !passing && !of_the_key
}

fn refusal_code(response: &Response) -> Option<Code> {
    response.extensions().get::<PendingErrorResponse>().map(|PendingErrorResponse(parts)| parts.code)
}

/// Reads an answer.
///
/// # Errors
/// `internal_error` where its body cannot be read.
pub(super) async fn read(response: Response) -> Result<BufferedResponse, ApiError> {
    if let Some(PendingErrorResponse(parts)) = response.extensions().get() {
        let mut details = Value::Object(parts.details.clone());
        redact(&mut details);
        let Value::Object(details) = details else { unreachable!("redacting keeps an object an object") };
        let refused = StoredResponse::Refused {
            code: parts.code.as_str().to_owned(),
            message: parts.message.to_string(),
            details,
        };
        return encoded(ResponseKind::Json, &refused, response);
    }
    if is_secret(response.headers()) {
        return Ok(BufferedResponse { kind: ResponseKind::Secret, text: None, response });
    }
    let (parts, body) = response.into_parts();
    let bytes = to_bytes(body, MAX_BODY).await.map_err(ApiError::internal)?;
    let etag = parts.headers.get(header::ETAG).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let ok_response = |body| StoredResponse::Given { status: parts.status.as_u16(), etag: etag.clone(), body };
    let (kind, answer) = if bytes.is_empty() {
        (ResponseKind::Empty, Some(ok_response(None)))
    } else if is_json(&parts.headers) {
        (ResponseKind::Json, Some(ok_response(Some(sanitized(&bytes)?))))
    } else {
        (ResponseKind::Other, None)
    };
    let response = Response::from_parts(parts, Body::from(bytes));
    match answer {
        Some(answer) => encoded(kind, &answer, response),
        None => Ok(BufferedResponse { kind, text: None, response }),
    }
}

fn encoded(kind: ResponseKind, answer: &StoredResponse, response: Response) -> Result<BufferedResponse, ApiError> {
    let text = serde_json::to_string(answer).map_err(ApiError::internal)?;
    if text.len() > MAX_STORED_BYTES {
        return Ok(BufferedResponse { kind: ResponseKind::TooLarge, text: None, response });
    }
    Ok(BufferedResponse { kind, text: Some(text), response })
}

/// The same bytes where nothing in them is a secret.
fn sanitized(bytes: &[u8]) -> Result<String, ApiError> {
    let value: Value = serde_json::from_slice(bytes).map_err(ApiError::internal)?;
    let mut without_secrets = value.clone();
    redact(&mut without_secrets);
    if without_secrets == value {
        String::from_utf8(bytes.to_vec()).map_err(ApiError::internal)
    } else {
        serde_json::to_string(&without_secrets).map_err(ApiError::internal)
    }
}

/// How a response could be stored, without its body.
pub(super) fn kind_of(response: &Response) -> ResponseKind {
    if is_secret(response.headers()) {
        ResponseKind::Secret
    } else if refusal_code(response).is_some() || is_json(response.headers()) {
        ResponseKind::Json
    } else if response.headers().contains_key(header::CONTENT_TYPE) {
        ResponseKind::Other
    } else {
        ResponseKind::Empty
    }
}

fn is_secret(headers: &HeaderMap) -> bool {
    let no_store = |value: &HeaderValue| value.to_str().is_ok_and(|text| text.contains("no-store"));
    headers.get_all(header::CACHE_CONTROL).iter().any(no_store)
}

fn is_json(headers: &HeaderMap) -> bool {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
}

/// Replays a stored response.
///
/// # Errors
/// `internal_error` where it cannot be read.
pub(super) fn replay(text: &str) -> Result<Response, ApiError> {
    match serde_json::from_str(text).map_err(ApiError::internal)? {
        StoredResponse::Given { status, etag, body } => {
            let status = StatusCode::from_u16(status).map_err(ApiError::internal)?;
            let body = match body {
                Some(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
                None => ().into_response(),
            };
            let mut response = (status, ReplayedResponse(true), body).into_response();
            if let Some(etag) = etag.and_then(|etag| HeaderValue::try_from(etag).ok()) {
                response.headers_mut().insert(header::ETAG, etag);
            }
            Ok(response)
        }
        StoredResponse::Refused { code, message, details } => {
            let code = Code::ALL.iter().copied().find(|known| known.as_str() == code);
            let code = code.ok_or_else(|| ApiError::internal("a stored refusal has an unknown code"))?;
            let refusal = details
                .into_iter()
                .fold(ApiError::new(code, message), |refusal, (name, value)| refusal.detail(&name, value));
            Ok(ReplayedResponse(true).refused(refusal).into_response())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Json;
    use serde_json::json;

    async fn stored(response: impl IntoResponse) -> (ResponseKind, Option<Response>) {
        let read = read(response.into_response()).await.unwrap();
        (read.kind, read.text.map(|text| replay(&text).unwrap()))
    }

    async fn body_of(response: Response) -> String {
        String::from_utf8(to_bytes(response.into_body(), MAX_BODY).await.unwrap().to_vec()).unwrap()
    }

    #[tokio::test]
    async fn stored_response_is_replayed_with_status_etag_and_body() {
        let text = r#"{"b": 1,  "a": [2]}"#;
        let answer = (StatusCode::CREATED, [(header::ETAG, "\"3\""), (header::CONTENT_TYPE, "application/json")], text);
        let (kind, again) = stored(answer).await;
        let again = again.unwrap();
        assert_eq!((kind, again.status()), (ResponseKind::Json, StatusCode::CREATED));
        assert_eq!(again.headers()[header::ETAG], "\"3\"");
        assert_eq!(again.headers()["idempotency-replayed"], "true");
        assert_eq!(body_of(again).await, text);
    }

    #[tokio::test]
    async fn secrets_in_an_answer_are_not_stored() {
        let (_, again) = stored(Json(json!({"id": 1, "client_secret": "hunter2"}))).await;
        let body: Value = serde_json::from_str(&body_of(again.unwrap()).await).unwrap();
        assert_eq!(body, json!({"id": 1, "client_secret": "[redacted]"}));
        let (kind, again) = stored(([(header::CACHE_CONTROL, "no-store")], Json(json!({"url": "x"})))).await;
        assert!(kind == ResponseKind::Secret && again.is_none());
    }

    #[tokio::test]
    async fn an_answer_without_a_body_is_stored_and_one_that_is_not_json_or_too_large_is_not() {
        let (kind, again) = stored(StatusCode::NO_CONTENT).await;
        assert_eq!((kind, again.unwrap().status()), (ResponseKind::Empty, StatusCode::NO_CONTENT));
        let (kind, again) = stored("a script").await;
        assert!(kind == ResponseKind::Other && again.is_none());
        let (kind, again) = stored(Json("x".repeat(MAX_STORED_BYTES))).await;
        assert!(kind == ResponseKind::TooLarge && again.is_none());
    }

    #[tokio::test]
    async fn refusal_of_the_request_is_final_and_a_temporary_one_is_not() {
        let refused = ApiError::new(Code::NodeInUse, "It is in use.").detail("allocation_id", "7");
        let (_, again) = stored(refused).await;
        let again = again.unwrap();
        let PendingErrorResponse(parts) = again.extensions().get::<PendingErrorResponse>().unwrap();
        assert_eq!(
            (parts.code, &*parts.message, &parts.details["allocation_id"]),
            (Code::NodeInUse, "It is in use.", &json!("7"))
        );
        let is_final = |code| is_final(&ApiError::new(code, "").into_response());
        let passing = [
            Code::Unauthenticated,
            Code::Forbidden,
            Code::RateLimited,
            Code::InternalError,
            Code::UpstreamError,
            Code::ServiceUnavailable,
            Code::Overloaded,
            Code::IdempotencyInProgress,
            Code::IdempotencyKeyReused,
        ];
        assert!(passing.into_iter().all(|code| !is_final(code)));
        assert!([Code::InvalidRequest, Code::NotFound, Code::StateConflict].into_iter().all(is_final));
    }
}
