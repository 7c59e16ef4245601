//! Requests to the API under test, and its responses.

use super::ApiHarness;
use axum::body::Body;
use axum::http::{HeaderMap, Method, Request};
use serde_json::Value;
use tower::ServiceExt;
use uuid::Uuid;

/// A response of the API.
#[derive(Clone, Debug)]
pub(in crate::api::tests) struct TestResponse {
    pub(in crate::api::tests) status: u16,
    pub(in crate::api::tests) headers: HeaderMap,
    /// The body as JSON; null where there was none.
    pub(in crate::api::tests) body: Value,
}

impl TestResponse {
    #[track_caller]
    pub(in crate::api::tests) fn is(&self, status: u16) -> &Value {
        assert_eq!(self.status, status, "{}", self.body);
        &self.body
    }

    #[track_caller]
    pub(in crate::api::tests) fn refused(&self, status: u16, code: &str) -> &Value {
        assert_eq!((self.status, self.body["code"].as_str()), (status, Some(code)), "{}", self.body);
        assert_eq!(self.body["details"]["service"], "api");
        &self.body["details"]
    }

    pub(in crate::api::tests) fn is_replayed(&self) -> bool {
        self.headers.get("idempotency-replayed").is_some_and(|value| value == "true")
    }

    /// Status, code and message on one line, ids left out.
    pub(in crate::api::tests) fn line(&self) -> String {
        let details = &self.body["details"];
        let field = details["field"].as_str().map(|field| format!(" [{field}]")).unwrap_or_default();
        let text = |name: &str| self.body[name].as_str().unwrap_or("-").to_owned();
        without_ids(&format!("{} {}{field}: {}", self.status, text("code"), text("message")))
    }
}

/// UUIDs differ in each run.
pub(in crate::api::tests) fn without_ids(text: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    for word in text.split(' ') {
        let bare = word.trim_matches(|c: char| !c.is_ascii_hexdigit());
        words.push(if Uuid::parse_str(bare).is_ok() { word.replace(bare, "<id>") } else { word.to_owned() });
    }
    words.join(" ")
}

/// A request that is being built.
pub(in crate::api::tests) struct TestRequest<'a> {
    harness: &'a ApiHarness,
    request: axum::http::request::Builder,
    body: Body,
}

impl<'a> TestRequest<'a> {
    pub(super) fn new(harness: &'a ApiHarness, method: Method, path: &str) -> Self {
        let request = Request::builder().method(method).uri(path).header("x-correlation-id", "test");
        Self { harness, request, body: Body::empty() }
    }

    pub(in crate::api::tests) fn by(self, token: &str) -> Self {
        self.header("authorization", &format!("Bearer {token}"))
    }

    pub(in crate::api::tests) fn admin(self) -> Self {
        let token = self.harness.token("root", &["admin"]);
        self.by(&token)
    }

    pub(in crate::api::tests) fn user(self, name: &str) -> Self {
        let token = self.harness.token(name, &["user"]);
        self.by(&token)
    }

    pub(in crate::api::tests) fn header(mut self, name: &str, value: &str) -> Self {
        self.request = self.request.header(name, value);
        self
    }

    /// Over a connection from this address; without one there is no rate limit by address.
    pub(in crate::api::tests) fn from(mut self, address: [u8; 4]) -> Self {
        let peer = crate::tls::Peer::new((address, 4711).into(), None, false);
        self.request = self.request.extension(axum::extract::ConnectInfo(peer));
        self
    }

    pub(in crate::api::tests) fn key(self, key: &str) -> Self {
        self.header("idempotency-key", key)
    }

    pub(in crate::api::tests) fn json(self, body: &Value) -> Self {
        self.text(body.to_string())
    }

    pub(in crate::api::tests) fn text(self, body: impl Into<Body>) -> Self {
        let mut call = self.header("content-type", "application/json");
        call.body = body.into();
        call
    }

    pub(in crate::api::tests) fn raw(mut self, body: impl Into<Body>) -> Self {
        self.body = body.into();
        self
    }

    pub(in crate::api::tests) async fn response(self) -> axum::response::Response {
        self.harness.router.clone().oneshot(self.request.body(self.body).unwrap()).await.unwrap()
    }

    pub(in crate::api::tests) async fn send(self) -> TestResponse {
        let response = self.response().await;
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let bytes = axum::body::to_bytes(response.into_body(), 16 << 20).await.unwrap();
        let body = if bytes.is_empty() { Value::Null } else { serde_json::from_slice(&bytes).unwrap_or(Value::Null) };
        assert!(!String::from_utf8_lossy(&bytes).contains("_enc\""), "a sealed field is served");
        TestResponse { status, headers, body }
    }
}
