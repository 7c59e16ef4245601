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
use strict_json::StrictObjects;
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
    // ASCII is a part of UTF-8; the spelling without a hyphen is that of MySQL, PHP and others.
    let is_utf8 = |charset: &str| ["utf-8", "utf8", "us-ascii"].iter().any(|name| charset.eq_ignore_ascii_case(name));
    if let Some(charset) = charset.filter(|charset| !is_utf8(charset)) {
        let shown: String = charset.chars().take(40).collect();
        let message = format!(
            "Content-Type names the charset {shown:?}; send the body in UTF-8, as all JSON between systems is (RFC 8259, section 8.1)."
        );
        return Err(ApiError::new(Code::UnsupportedMediaType, message));
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

/// Reads JSON strictly: objects where objects belong and lists nowhere else, no unknown fields, no NUL in any text (Postgres stores none). A
/// whole number may have a point or an exponent ([`integers`]); a byte-order mark is passed over.
///
/// # Errors
/// `invalid_request`, naming the field and the position.
pub fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let bytes = text_of(bytes)?;
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
    let value = serde_path_to_error::deserialize(StrictObjects::new(&mut reader))
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

/// The text of a body that may be JSON: in UTF-8, without a byte-order mark.
fn text_of(bytes: &[u8]) -> Result<&[u8], ApiError> {
    let encoding = match bytes {
        // The marks of the other encodings (Unicode standard, section 23.8). That of UTF-32 begins with that of UTF-16.
        [0xff, 0xfe, 0, 0, ..] | [0, 0, 0xfe, 0xff, ..] | [b'{' | b'[', 0, 0, 0, ..] | [0, 0, 0, b'{' | b'[', ..] => {
            "UTF-32"
        }
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] | [b'{' | b'[', 0, ..] | [0, b'{' | b'[', ..] => "UTF-16",
        _ => return Ok(strict_json::without_byte_order_mark(bytes)),
    };
    let message =
        format!("The body is in {encoding}; send it in UTF-8, as all JSON between systems is (RFC 8259, section 8.1).");
    Err(ApiError::invalid_request(message).detail("encoding", encoding))
}

/// The refusal of a list in place of an object.
pub(crate) fn list_for_object(path: &str) -> ApiError {
    let field = printable(path);
    ApiError::invalid_request(format!("`{field}` is a list; it must be an object.")).detail("field", field)
}

fn json_error(path: &str, error: &serde_json::Error) -> ApiError {
    let (line, column) = (error.line(), error.column());
    if error.to_string().starts_with(strict_json::LIST_FOR_OBJECT) && path != "." {
        return list_for_object(path).detail("line", line).detail("column", column);
    }
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
mod tests;
