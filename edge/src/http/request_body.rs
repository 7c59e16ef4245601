//! Extractors that answer with the envelope for everything that can be wrong with a request.
//!
//! Request types are strict (`#[serde(deny_unknown_fields)]`); a refusal names the field and the position, and never repeats the value,
//! which may be a misplaced secret.

use std::{fmt::Write as _, time::Duration};

use axum::{
    body::{Body, Bytes},
    extract::{FromRequest, FromRequestParts, Request, path::ErrorKind, rejection::PathRejection},
    http::{HeaderMap, Uri, header, request},
    middleware::Next,
    response::{IntoResponse, Response},
};
use futures::StreamExt;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use crate::http::error::{ApiError, Code};

pub(crate) mod integers;

/// The largest body read, in bytes; a layer may set another with `axum::Extension(BodyLimit(..))`.
#[derive(Clone, Copy, Debug)]
pub struct BodyLimit(pub usize);

impl Default for BodyLimit {
    fn default() -> Self {
        Self(1 << 20)
    }
}

/// The slowest rate of a body; a layer may set another with `axum::Extension(BodyPace { .. })`. A slower client holds a connection and a
/// request slot for next to nothing.
#[derive(Clone, Copy, Debug)]
pub struct BodyPace {
    /// How long a body may take before its rate counts.
    pub grace: Duration,
    /// The rate that it must have on average after that.
    pub bytes_per_second: u32,
}

impl Default for BodyPace {
    fn default() -> Self {
        Self { grace: Duration::from_secs(5), bytes_per_second: 1024 }
    }
}

impl BodyPace {
    /// The time up to which the next bytes of a body must arrive that began at `begun` and of which `received` bytes have arrived.
    fn due(self, begun: Instant, received: usize) -> Instant {
        let micros = received as u64 * 1_000_000 / u64::from(self.bytes_per_second.max(1));
        begun + self.grace + Duration::from_micros(micros)
    }

    fn too_slow(self) -> ApiError {
        let Self { grace, bytes_per_second } = self;
        let message = format!(
            "The body arrived too slowly: after {} s it must have {bytes_per_second} bytes a second. Send the request again over a \
             faster connection.",
            grace.as_secs()
        );
        ApiError::invalid_request(message).detail("reason", "body_too_slow")
    }
}

/// Room that is reserved for a body before its first byte; a declared length is a promise, and costs its sender nothing.
const RESERVED_BYTES: usize = 16 * 1024;

/// How much of a body that is too large is read and thrown away, so that its sender lives to read the answer.
const DRAIN_BYTES: usize = 32 << 20;
const DRAIN_TIME: Duration = Duration::from_secs(5);

/// A JSON body of type `T`.
#[derive(Debug)]
pub struct Json<T>(pub T);

/// An optional JSON body, for requests all of whose fields are optional.
#[derive(Debug)]
pub struct JsonOrDefault<T>(pub T);

/// For a request that is complete in its path: a body is not read.
#[derive(Debug)]
pub struct NoBody;

/// A form, `application/x-www-form-urlencoded`, of type `T`. Fields that `T` does not have are passed over, as OAuth wants it (RFC 6749,
/// section 3.2).
#[derive(Debug)]
pub struct Form<T>(pub T);

/// The path's parameters, as `axum::extract::Path`.
#[derive(Debug)]
pub struct Path<T>(pub T);

/// The query's parameters, as `axum::extract::Query`.
#[derive(Debug)]
pub struct Query<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        require_json(request.headers())?;
        let bytes = read_body(request).await?;
        parse_json(&bytes).map(Self)
    }
}

impl<S: Send + Sync, T: DeserializeOwned + Default> FromRequest<S> for JsonOrDefault<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let media_type = require_json(request.headers());
        let bytes = read_body(request).await?;
        if bytes.is_empty() {
            return Ok(Self(T::default()));
        }
        media_type?;
        parse_json(&bytes).map(Self)
    }
}

impl<S: Send + Sync> FromRequest<S> for NoBody {
    type Rejection = ApiError;

    async fn from_request(_: Request, _: &S) -> Result<Self, ApiError> {
        Ok(Self)
    }
}

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Form<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        once(request.headers())?;
        let given = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let essence = given.unwrap_or_default().split(';').next().unwrap_or_default().trim();
        if !essence.eq_ignore_ascii_case("application/x-www-form-urlencoded") {
            let message = "Send the body as a form, with Content-Type: application/x-www-form-urlencoded.";
            return Err(ApiError::new(Code::UnsupportedMediaType, message));
        }
        parse_form(read_body(request).await?).await.map(Self)
    }
}

/// The invalid value is not repeated: it may be a misplaced secret.
async fn parse_form<T: DeserializeOwned>(bytes: Bytes) -> Result<T, ApiError> {
    let refuse = || {
        ApiError::invalid_request("The body cannot be read as a form: send each field once, percent-encoded in UTF-8.")
    };
    // A NUL is accepted, as in unknown fields: nothing of a form is stored as received.
    let form = Request::post("/").header(header::CONTENT_TYPE, "application/x-www-form-urlencoded");
    let form = form.body(Body::from(bytes)).map_err(ApiError::internal)?;
    axum::Form::from_request(form, &()).await.map(|axum::Form(value)| value).map_err(|_| refuse())
}

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Path<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, state: &S) -> Result<Self, ApiError> {
        match axum::extract::Path::from_request_parts(parts, state).await {
            Ok(axum::extract::Path(params)) => Ok(Self(params)),
            Err(rejection) => Err(path_error(rejection)),
        }
    }
}

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Query<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, _: &S) -> Result<Self, ApiError> {
        parse_query(parts.uri.query().unwrap_or_default()).map(Self)
    }
}

pub(crate) fn require_json(headers: &HeaderMap) -> Result<(), ApiError> {
    once(headers)?;
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let is_json = essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"));
    let refuse = |message: &'static str| Err(ApiError::new(Code::UnsupportedMediaType, message));
    if !is_json {
        return refuse("Send the body as JSON, with Content-Type: application/json.");
    }
    let charset =
        given.split(';').skip(1).filter_map(|parameter| parameter.split_once('=')).find_map(|(name, value)| {
            name.trim().eq_ignore_ascii_case("charset").then(|| value.trim().trim_matches('"'))
        });
    if charset.is_some_and(|charset| !charset.eq_ignore_ascii_case("utf-8")) {
        return refuse("Send the body in UTF-8, as all JSON between systems is (RFC 8259, section 8.1).");
    }
    // Not unpacked: a small compressed body can be a huge one.
    if headers
        .get_all(header::CONTENT_ENCODING)
        .iter()
        .any(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"identity"))
    {
        return refuse("Send the body as it is, without Content-Encoding.");
    }
    Ok(())
}

/// Two media types are ambiguous.
fn once(headers: &HeaderMap) -> Result<(), ApiError> {
    if headers.get_all(header::CONTENT_TYPE).iter().nth(1).is_none() {
        return Ok(());
    }
    Err(ApiError::new(Code::UnsupportedMediaType, "Header `Content-Type` is given twice; send one.")
        .detail("field", "Content-Type"))
}

/// Reads a body within its [`BodyLimit`] and at its [`BodyPace`].
///
/// # Errors
/// `payload_too_large` over the limit; `invalid_request` where the connection broke within the body or the body is too slow.
pub async fn read_body(request: Request) -> Result<Bytes, ApiError> {
    read_body_claiming(request, |_| Ok(())).await
}

/// As [`read_body`]; before each further part `claim` receives the number of bytes held, and may refuse.
pub(crate) async fn read_body_claiming(
    request: Request,
    mut claim: impl FnMut(usize) -> Result<(), ApiError>,
) -> Result<Bytes, ApiError> {
    let limit = request.extensions().get::<BodyLimit>().copied().unwrap_or_default().0;
    let pace = request.extensions().get::<BodyPace>().copied().unwrap_or_default();
    let too_large = || {
        ApiError::new(Code::PayloadTooLarge, format!("The body is over the limit of {limit} bytes."))
            .detail("limit_bytes", limit)
    };
    let declared = request
        .headers()
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok())
        .and_then(|text| text.parse::<u64>().ok());
    let waits_for_leave = request.headers().contains_key(header::EXPECT);
    if declared.is_some_and(|length| length > limit as u64) {
        if !waits_for_leave {
            drain(request.into_body()).await;
        }
        return Err(too_large());
    }
    let reserved = usize::try_from(declared.unwrap_or(0)).unwrap_or(limit).min(limit).min(RESERVED_BYTES);
    let mut collected = Vec::with_capacity(reserved);
    let mut chunks = request.into_body().into_data_stream();
    let begun = Instant::now();
    while let Some(chunk) =
        timeout_at(pace.due(begun, collected.len()), chunks.next()).await.map_err(|_| pace.too_slow())?
    {
        let chunk = chunk.map_err(|cause| {
            ApiError::invalid_request("The body ended before it was complete; send the request again.").because(cause)
        })?;
        if collected.len() + chunk.len() > limit {
            drain(Body::from_stream(chunks)).await;
            return Err(too_large());
        }
        claim(collected.len() + chunk.len())?;
        collected.extend_from_slice(&chunk);
    }
    Ok(collected.into())
}

/// A sender that is cut off while it writes sees a reset connection, not the answer.
async fn drain(body: Body) {
    let mut chunks = body.into_data_stream();
    let reading = async {
        let mut seen = 0;
        while let Some(Ok(chunk)) = chunks.next().await {
            seen += chunk.len();
            if seen > DRAIN_BYTES {
                return;
            }
        }
    };
    let _ = tokio::time::timeout(DRAIN_TIME, reading).await;
}

/// Reads JSON strictly: one object, no unknown fields, no NUL in any text (Postgres stores none). A whole number may have a point or an
/// exponent ([`integers`]).
///
/// # Errors
/// `invalid_request`, naming the field and the position.
pub fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    // serde reads a struct from a list too, field by field in their order; no client intends that.
    if bytes.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[') {
        return Err(ApiError::invalid_request("The body is a JSON list; send an object with named fields."));
    }
    let value = match read_json(bytes) {
        Err(JsonReadError { error, .. }) if integers::wants_digits(&error) => {
            let in_digits = integers::in_digits_throughout(bytes);
            read_json(in_digits.as_deref().unwrap_or(bytes))
        }
        read => read,
    };
    let value = value.map_err(|JsonReadError { path, error }| json_error(&path, &error))?;
    refuse_nul(bytes)?;
    Ok(value)
}

struct JsonReadError {
    path: String,
    error: serde_json::Error,
}

fn read_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, JsonReadError> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut reader)
        .map_err(|error| JsonReadError { path: error.path().to_string(), error: error.into_inner() })?;
    reader.end().map_err(|error| JsonReadError { path: ".".to_owned(), error })?;
    Ok(value)
}

fn refuse_nul(bytes: &[u8]) -> Result<(), ApiError> {
    const ESCAPED_NUL: &[u8] = b"\\u0000";
    if !bytes.windows(ESCAPED_NUL.len()).any(|window| window == ESCAPED_NUL) {
        return Ok(());
    }
    // The six bytes may also be an escaped backslash before harmless digits; only the parsed texts decide.
    let holds_nul = serde_json::from_slice::<Value>(bytes).is_ok_and(|value| has_nul(&value));
    if holds_nul {
        Err(ApiError::invalid_request("The body has a NUL character in a text; remove it."))
    } else {
        Ok(())
    }
}

fn has_nul(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains('\0'),
        Value::Array(items) => items.iter().any(has_nul),
        Value::Object(fields) => fields.iter().any(|(key, value)| key.contains('\0') || has_nul(value)),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

fn json_error(path: &str, error: &serde_json::Error) -> ApiError {
    let (line, column) = (error.line(), error.column());
    let reason = match error.classify() {
        serde_json::error::Category::Syntax | serde_json::error::Category::Eof => {
            format!("The body is not valid JSON at line {line}, column {column}.")
        }
        serde_json::error::Category::Data | serde_json::error::Category::Io => {
            let what = without_value(&error.to_string());
            let at = if path == "." { "The body".to_owned() } else { format!("Field `{}`", printable(path)) };
            format!("{at} cannot be read: {what} (line {line}, column {column}).")
        }
    };
    let answer = ApiError::invalid_request(reason).detail("line", line).detail("column", column);
    // "?": the text is broken before a field has a name.
    if matches!(path, "." | "?") { answer } else { answer.detail("field", printable(path)) }
}

/// serde's message without the invalid value and without the position.
fn without_value(message: &str) -> String {
    let message = message.rsplit_once(" at line ").map_or(message, |(before, _)| before);
    if message.starts_with("UUID parsing failed") {
        return "expected a UUID".to_owned();
    }
    for kind in ["invalid type", "invalid value", "invalid length", "unknown variant"] {
        if message.starts_with(kind)
            && let Some((_, expected)) = message.rsplit_once(", expected ")
        {
            return format!("{kind}, expected {}", expected_type(expected));
        }
    }
    printable(message)
}

/// The type that serde expects, without the names of our types.
fn expected_type(expected: &str) -> String {
    match expected {
        "a sequence" => "a list".to_owned(),
        other if other.starts_with("struct ") => "an object with named fields".to_owned(),
        other => printable(other),
    }
}

/// Text of the caller's, made safe to show: bounded, without control characters.
fn printable(text: &str) -> String {
    const MAX: usize = 200;
    let mut shown = String::new();
    for character in text.chars().take(MAX) {
        if character.is_control() {
            let _ = write!(shown, "{}", character.escape_default());
        } else {
            shown.push(character);
        }
    }
    if text.chars().nth(MAX).is_some() {
        shown.push('…');
    }
    shown
}

fn path_error(rejection: PathRejection) -> ApiError {
    let PathRejection::FailedToDeserializePathParams(error) = &rejection else {
        return ApiError::internal(rejection);
    };
    match error.kind() {
        ErrorKind::ParseErrorAtKey { key, expected_type, .. } => {
            ApiError::invalid_request(format!("Path parameter `{key}` must be of type {expected_type}."))
                .detail("field", key.clone())
        }
        ErrorKind::ParseErrorAtIndex { index, expected_type, .. } => {
            ApiError::invalid_request(format!("Path parameter {} must be of type {expected_type}.", index + 1))
        }
        ErrorKind::DeserializeError { key, message, .. } => {
            let expected = if message.contains("UUID") { "a UUID".to_owned() } else { printable(message) };
            ApiError::invalid_request(format!("Path parameter `{key}` cannot be read: expected {expected}."))
                .detail("field", key.clone())
        }
        ErrorKind::InvalidUtf8InPathParam { key } => {
            ApiError::invalid_request(format!("Path parameter `{key}` is not UTF-8.")).detail("field", key.clone())
        }
        ErrorKind::Message(message) if message.contains("UUID") => {
            ApiError::invalid_request("The id in the path cannot be read: expected a UUID.")
        }
        ErrorKind::Message(message) => {
            ApiError::invalid_request(format!("The path cannot be read: {}.", printable(message)))
        }
        // The route and its handler disagree.
        ErrorKind::WrongNumberOfParameters { .. }
        | ErrorKind::ParseError { .. }
        | ErrorKind::UnsupportedType { .. }
        | _ => ApiError::internal(error.to_string()),
    }
}

/// Reads a query string (without its `?`) strictly. A whole number may have a point or an exponent ([`integers`]).
///
/// # Errors
/// `invalid_request`, naming the parameter.
pub fn parse_query<T: DeserializeOwned>(query: &str) -> Result<T, ApiError> {
    if query.contains("%00") {
        return Err(ApiError::invalid_request("The query has a NUL character; remove it."));
    }
    let mut query = std::borrow::Cow::Borrowed(query);
    loop {
        let uri: Uri = format!("/?{query}")
            .parse()
            .map_err(|cause| ApiError::invalid_request("The query cannot be read.").because(cause))?;
        let rejection = match axum::extract::Query::try_from_uri(&uri) {
            Ok(axum::extract::Query(params)) => return Ok(params),
            Err(rejection) => rejection,
        };
        let text = std::error::Error::source(&rejection).map_or_else(|| rejection.to_string(), ToString::to_string);
        let in_digits =
            text.strip_suffix(": invalid digit found in string").and_then(|name| integers::in_query(&query, name));
        match in_digits {
            Some(in_digits) => query = in_digits.into(),
            None => return Err(query_error(&text)),
        }
    }
}

/// The refusal of a query, made of serde's message.
fn query_error(text: &str) -> ApiError {
    let (field, reason) = text.split_once(": ").unwrap_or(("", text));
    let looks_like_a_field = !field.is_empty() && !field.contains(' ');
    if let Some(name) = text.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`')) {
        ApiError::invalid_request(format!("Query parameter `{name}` is missing.")).detail("field", name)
    } else if let Some((name, known)) = unknown_parameter(text) {
        let known = printable(known.strip_prefix("expected ").unwrap_or_default());
        let instead = if known.is_empty() { String::new() } else { format!(", or give {known}") };
        let name = printable(name);
        ApiError::invalid_request(format!("Query parameter `{name}` is not known here; leave it out{instead}."))
            .detail("field", name)
    } else if looks_like_a_field {
        ApiError::invalid_request(format!(
            "Query parameter `{}` cannot be read: {}.",
            printable(field),
            without_value(reason)
        ))
        .detail("field", printable(field))
    } else {
        ApiError::invalid_request(format!("The query cannot be read: {}.", without_value(text)))
    }
}

/// Refuses a query on a route without parameters.
///
/// # Errors
/// `invalid_request`, naming the first parameter.
pub(crate) fn refuse_query(uri: &Uri) -> Result<(), ApiError> {
    let Some(first) = uri.query().and_then(|query| query.split('&').find(|pair| !pair.is_empty())) else {
        return Ok(());
    };
    let name = printable(first.split_once('=').map_or(first, |(name, _)| name));
    let message = format!("This route takes no query parameters; leave `{name}` out.");
    Err(ApiError::invalid_request(message).detail("field", name))
}

/// The layer that does so before anything else of the route.
pub(crate) async fn reject_query(request: Request, next: Next) -> Response {
    match refuse_query(request.uri()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

/// The name of an unknown parameter, and serde's list of the known ones.
fn unknown_parameter(text: &str) -> Option<(&str, &str)> {
    let (_, rest) = text.split_once("unknown field `")?;
    rest.split_once("`, ")
}

#[cfg(test)]
mod tests {
    use axum::{
        Router,
        routing::{get, post},
    };
    use serde::Deserialize;
    use serde_json::json;
    use tower::ServiceExt;
    use uuid::Uuid;

    use super::*;
    use crate::http::correlation::{RequestScope, Service};
    use crate::testing::body_json;

    #[derive(Debug, Default, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct NewNode {
        #[serde(default)]
        host: String,
        #[serde(default)]
        port: u16,
        #[serde(default)]
        gpus: Vec<Gpu>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct Gpu {
        index: u32,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct Filter {
        port: Option<u16>,
    }

    fn router() -> Router {
        Router::new()
            .route("/nodes", post(|Json(_): Json<NewNode>| async { "fine" }))
            .route("/maybe", post(|JsonOrDefault(_): JsonOrDefault<NewNode>| async { "fine" }))
            .route("/nodes/{id}", get(|Path(_): Path<Uuid>| async { "fine" }))
            .route("/search", get(|Query(_): Query<Filter>| async { "fine" }))
            .layer(RequestScope(crate::testing::scope_settings(Service { name: "api", shows_route: false })))
    }

    async fn send(request: Request) -> (u16, Value) {
        let response = router().oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        if status == 200 { (200, Value::Null) } else { (status, body_json(response).await) }
    }

    async fn post_json(path: &str, body: impl Into<Body>) -> (u16, Value) {
        send(Request::post(path).header("content-type", "application/json").body(body.into()).unwrap()).await
    }

    async fn fetch(path: &str) -> (u16, Value) {
        send(Request::get(path).body(Body::empty()).unwrap()).await
    }

    #[tokio::test]
    async fn a_wrong_type_names_its_field_and_never_its_value() {
        let (status, body) = post_json("/nodes", r#"{"host":"a","port":"hunter2"}"#).await;
        assert_eq!((status, &body["code"]), (400, &json!("invalid_request")));
        assert_eq!(body["details"]["field"], "port");
        assert_eq!(body["details"]["line"], 1);
        assert!(body["message"].as_str().unwrap().contains("expected u16"), "{body}");
        assert!(!body.to_string().contains("hunter2"));
    }

    #[tokio::test]
    async fn a_nested_field_is_named_by_its_path() {
        let (_, body) = post_json("/nodes", r#"{"gpus":[{"index":0},{"index":-1}]}"#).await;
        assert_eq!(body["details"]["field"], "gpus[1].index");
        assert!(body["message"].as_str().unwrap().contains("expected u32"), "{body}");
    }

    #[tokio::test]
    async fn unknown_fields_broken_json_and_huge_numbers_are_refused() {
        for bad in [
            r#"{"hots":"a"}"#,
            r#"{"host":"a""#,
            r#"{"host":"a"} trailing"#,
            r#"{"host":"a","host":"b"}"#,
            r#"{"port":65536}"#,
            r#"{"port":-1}"#,
            r#"{"port":1e400}"#,
            r#"{"port":99999999999999999999999999999999}"#,
            r#"{"host":"a\u0000b"}"#,
            "[]",
            "null",
            "",
            "\u{feff}{}",
        ] {
            let (status, body) = post_json("/nodes", bad).await;
            assert_eq!((status, &body["code"]), (400, &json!("invalid_request")), "{bad}");
        }
        let deep = "[".repeat(100_000);
        assert_eq!(post_json("/nodes", deep).await.0, 400);
        let (_, unknown) = post_json("/nodes", r#"{"hots":"a"}"#).await;
        assert!(unknown["message"].as_str().unwrap().contains("unknown field `hots`"), "{unknown}");
        assert_eq!(post_json("/nodes", r#"{"host":"a\\u0000b"}"#).await.0, 200);
        assert_eq!(post_json("/nodes", vec![b'{', 0xff, b'}']).await.0, 400);
    }

    #[tokio::test]
    async fn an_unknown_field_of_a_megabyte_is_not_sent_back() {
        let (_, body) = post_json("/nodes", format!(r#"{{"{}":1}}"#, "x".repeat(900_000))).await;
        assert!(body.to_string().len() < 2_000);
    }

    #[tokio::test]
    async fn another_media_type_is_refused_and_a_charset_is_not() {
        for bad in ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""] {
            let request = Request::post("/nodes").header("content-type", bad).body(Body::from("{}")).unwrap();
            let (status, body) = send(request).await;
            assert_eq!((status, &body["code"]), (415, &json!("unsupported_media_type")), "{bad}");
        }
        for good in ["application/json; charset=utf-8", "Application/JSON", "application/merge-patch+json"] {
            let request = Request::post("/nodes").header("content-type", good).body(Body::from("{}")).unwrap();
            assert_eq!(send(request).await.0, 200, "{good}");
        }
    }

    #[tokio::test]
    async fn a_body_over_the_limit_is_refused_with_or_without_its_length() {
        let ten_megabytes = vec![b' '; 10 << 20];
        let (status, body) = post_json("/nodes", ten_megabytes.clone()).await;
        assert_eq!((status, &body["code"]), (413, &json!("payload_too_large")));
        let pieces = futures::stream::iter(
            ten_megabytes.chunks(1 << 16).map(|piece| Ok::<_, std::io::Error>(piece.to_vec())).collect::<Vec<_>>(),
        );
        assert_eq!(post_json("/nodes", Body::from_stream(pieces)).await.0, 413);
        let mut just_fits = b"{}".to_vec();
        just_fits.resize(1 << 20, b' ');
        assert_eq!(post_json("/nodes", just_fits.clone()).await.0, 200);
        just_fits.push(b' ');
        assert_eq!(post_json("/nodes", just_fits).await.0, 413);
    }

    #[tokio::test]
    async fn a_body_slower_than_its_pace_is_refused_and_one_that_pauses_within_it_is_not() {
        let pace = BodyPace { grace: std::time::Duration::from_millis(300), bytes_per_second: 1024 };
        let send_slowly = |first: usize, pause: u64| {
            let rest = futures::stream::once(async move {
                tokio::time::sleep(std::time::Duration::from_millis(pause)).await;
                Ok::<_, std::io::Error>(b"{}".to_vec())
            });
            let first = futures::stream::iter([Ok(vec![b' '; first])]);
            let request = Request::post("/nodes").header("content-type", "application/json").extension(pace);
            send(request.body(Body::from_stream(first.chain(rest))).unwrap())
        };
        let (status, body) = send_slowly(1, 2_000).await;
        assert_eq!((status, &body["details"]["reason"]), (400, &json!("body_too_slow")));
        assert_eq!(send_slowly(4096, 800).await.0, 200, "4,096 bytes make up for four seconds");
    }

    #[tokio::test]
    async fn a_body_that_breaks_off_is_an_invalid_request() {
        let pieces = futures::stream::iter([Ok(b"{".to_vec()), Err(std::io::Error::other("reset"))]);
        assert_eq!(post_json("/nodes", Body::from_stream(pieces)).await.0, 400);
    }

    #[tokio::test]
    async fn an_optional_body_may_be_left_out_but_not_be_something_else() {
        assert_eq!(send(Request::post("/maybe").body(Body::empty()).unwrap()).await.0, 200);
        assert_eq!(post_json("/maybe", "{}").await.0, 200);
        assert_eq!(send(Request::post("/maybe").body(Body::from("{}")).unwrap()).await.0, 415);
        assert_eq!(post_json("/maybe", "{").await.0, 400);
    }

    #[tokio::test]
    async fn a_bad_uuid_says_what_is_expected() {
        for bad in ["/nodes/17", "/nodes/%00", "/nodes/%ff", "/nodes/not-a-uuid"] {
            let (status, body) = fetch(bad).await;
            assert_eq!((status, &body["code"]), (400, &json!("invalid_request")), "{bad}");
        }
        let (_, body) = fetch("/nodes/17").await;
        assert!(body["message"].as_str().unwrap().contains("UUID"), "{body}");
        assert_eq!(fetch("/nodes/0190b3f8-9f4e-7000-8000-000000000000").await.0, 200);
    }

    #[tokio::test]
    async fn a_bad_query_names_its_parameter() {
        let message = async |query: &str| {
            let (_, body) = fetch(&format!("/search?{query}")).await;
            (body["message"].as_str().unwrap().to_owned(), body["details"]["field"].clone())
        };
        let unknown = "Query parameter `nope` is not known here; leave it out, or give `port`.";
        assert_eq!(message("nope=1").await, (unknown.to_owned(), json!("nope")));
        for bad in ["port=x", "port=-1", "port=1&port=2", "nope=1", "port=%00"] {
            let (status, body) = fetch(&format!("/search?{bad}")).await;
            assert_eq!((status, &body["code"]), (400, &json!("invalid_request")), "{bad}");
        }
        assert_eq!(fetch("/search?port=x").await.1["details"]["field"], "port");
        assert_eq!(fetch("/search").await.0, 200);
    }
}
