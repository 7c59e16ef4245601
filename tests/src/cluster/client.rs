//! A client of the HTTP API. [`Client::get`], [`Client::post`] and their like retry transient errors (under the same `Idempotency-Key`,
//! while replicas restart); [`Client::send_once`] returns the first response, whatever it is.

use super::WAIT_TIMEOUT;
use reqwest::header::HeaderMap;
use reqwest::{Method, StatusCode};
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};
use supervisors::dev::api;
use uuid::Uuid;

/// A client at one address, with or without a bearer token.
#[derive(Clone)]
pub struct Client {
    http: reqwest::Client,
    /// For requests that are sent once: a busy machine delays their responses, and does not fail them.
    patient_http: reqwest::Client,
    base: String,
    token: Option<String>,
    /// The cookie of a login to the console, and the origin of its pages.
    cookie: Option<(String, String)>,
}

/// A response.
#[derive(Clone, Debug)]
pub struct ApiResponse {
    /// Method and path of the request, for messages.
    pub asked: String,
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub text: String,
    /// `null` if the body is no JSON.
    pub body: Value,
}

impl Client {
    /// A client that trusts the authority in `ca_path` alone.
    #[must_use]
    pub fn new(ca_path: &Path, base: &str, token: Option<String>) -> Self {
        let http = api::https_client(ca_path).expect("a client can be made");
        let patient_http = api::https_client_within(ca_path, WAIT_TIMEOUT).expect("a client can be made");
        Self { http, patient_http, base: base.to_owned(), token, cookie: None }
    }

    #[must_use]
    pub fn as_bearer(&self, token: &str) -> Self {
        Self { token: Some(token.to_owned()), ..self.clone() }
    }

    /// As a page of this origin in a browser with this cookie.
    #[must_use]
    pub fn by_cookie(&self, cookie: &str, origin: &str) -> Self {
        Self { token: None, cookie: Some((cookie.to_owned(), origin.to_owned())), ..self.clone() }
    }

    #[must_use]
    pub fn base(&self) -> &str {
        &self.base
    }

    /// The underlying client, without token and base address.
    pub(super) const fn http(&self) -> &reqwest::Client {
        &self.http
    }

    /// A request with the token, which the caller completes.
    pub fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.request_by(&self.http, method, path)
    }

    fn request_by(&self, http: &reqwest::Client, method: Method, path: &str) -> reqwest::RequestBuilder {
        let request = http.request(method, format!("{}{path}", self.base));
        match (&self.token, &self.cookie) {
            (Some(token), _) => request.bearer_auth(token),
            (None, Some((cookie, origin))) => {
                request.header("cookie", cookie).header("origin", origin).header("sec-fetch-site", "same-origin")
            }
            (None, None) => request,
        }
    }

    /// Sends a request once. A connection that is not made, for example since the kernel has dropped its first packet, is made again:
    /// nothing was sent then.
    pub async fn send(&self, mut request: reqwest::RequestBuilder) -> ApiResponse {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let same = request.try_clone();
            match self.try_send(request).await {
                Ok(answer) => return answer,
                Err(error) => match same {
                    Some(same) if error.is_connect() && Instant::now() < until => request = same,
                    _ => panic!("{}: no answer: {:#}", self.base, anyhow::Error::from(error)),
                },
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// # Errors
    /// If no complete response is received.
    pub async fn try_send(&self, request: reqwest::RequestBuilder) -> Result<ApiResponse, reqwest::Error> {
        send_request(request).await
    }

    /// Sends a request once and returns the response, whatever it is.
    pub async fn send_once(&self, method: Method, path: &str, body: Option<&Value>) -> ApiResponse {
        self.send(self.with(&self.patient_http, method, path, body, &Uuid::new_v4().to_string())).await
    }

    fn with(
        &self,
        http: &reqwest::Client,
        method: Method,
        path: &str,
        body: Option<&Value>,
        key: &str,
    ) -> reqwest::RequestBuilder {
        let post = method == Method::POST;
        let request = self.request_by(http, method, path);
        let request = if post { request.header("Idempotency-Key", key) } else { request };
        match body {
            Some(body) => request.json(body),
            None => request,
        }
    }

    pub async fn get(&self, path: &str) -> ApiResponse {
        self.request_until_final(Method::GET, path, None).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> ApiResponse {
        self.request_until_final(Method::POST, path, Some(body)).await
    }

    pub async fn delete(&self, path: &str) -> ApiResponse {
        self.request_until_final(Method::DELETE, path, None).await
    }

    /// Retries until the response is not transient.
    pub async fn request_until_final(&self, method: Method, path: &str, body: Option<&Value>) -> ApiResponse {
        let key = Uuid::new_v4().to_string();
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let answer = self.try_send(self.with(&self.http, method.clone(), path, body, &key)).await;
            let why = match answer {
                Ok(answer) if answer.is_transient() => format!("{answer}"),
                Ok(answer) => return answer,
                Err(error) => format!("{:#}", anyhow::Error::from(error)),
            };
            assert!(Instant::now() < until, "{method} {path}: no answer within {WAIT_TIMEOUT:?}; the last: {why}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Polls `path` until its body is as wanted, and returns it.
    pub async fn wait_until(&self, path: &str, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        self.wait_within(WAIT_TIMEOUT, path, what, wanted).await
    }

    pub async fn wait_within(&self, limit: Duration, path: &str, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let until = Instant::now() + limit;
        let mut pause = Duration::from_millis(10);
        loop {
            let seen = self.get(path).await.ok();
            if wanted(&seen) {
                return seen;
            }
            assert!(Instant::now() < until, "not within {limit:?}: {what}; {path} is {seen:#}");
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(250));
        }
    }
}

/// Sends a request and reads the response.
///
/// # Errors
/// If no complete response is received.
pub async fn send_request(request: reqwest::RequestBuilder) -> Result<ApiResponse, reqwest::Error> {
    let (http, request) = request.build_split();
    let request = request?;
    let asked = format!("{} {}", request.method(), request.url().path());
    let answer = http.execute(request).await?;
    let (status, headers) = (answer.status(), answer.headers().clone());
    let text = answer.text().await?;
    let body = serde_json::from_str(&text).unwrap_or(Value::Null);
    Ok(ApiResponse { asked, status, headers, text, body })
}

impl ApiResponse {
    /// Whether a retry of the same request may be answered otherwise.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
            || self.body["code"] == "idempotency_in_progress"
    }

    /// The body of a successful response.
    pub fn ok(self) -> Value {
        assert!(self.status.is_success(), "{self}");
        self.body
    }

    /// The body of a 201 response.
    pub fn created(self) -> Value {
        assert_eq!(self.status, StatusCode::CREATED, "{self}");
        self.body
    }

    /// Asserts a success that may be asynchronous.
    pub fn accepted(self) {
        assert!(matches!(self.status, StatusCode::OK | StatusCode::ACCEPTED), "{self}");
    }

    /// Asserts an error of this status and code, in the error envelope.
    #[track_caller]
    pub fn expect_error(&self, status: u16, code: &str) -> &Self {
        assert_eq!((self.status.as_u16(), self.code()), (status, code), "{self}");
        self.expect_error_envelope()
    }

    #[must_use]
    pub fn code(&self) -> &str {
        self.body["code"].as_str().unwrap_or("no code")
    }

    /// Asserts the error envelope (decisions 1), with a message and the correlation id of the headers.
    #[track_caller]
    pub fn expect_error_envelope(&self) -> &Self {
        let text = |name: &str| self.body[name].as_str().unwrap_or_else(|| panic!("no {name} in {self}"));
        assert!(!text("code").is_empty() && text("message").len() > 10, "{self}");
        let named = self.headers.get("x-correlation-id").and_then(|value| value.to_str().ok());
        assert_eq!(named, Some(text("correlation_id")), "{self}");
        assert!(self.body["details"]["service"].is_string(), "{self}");
        self
    }
}

impl std::fmt::Display for ApiResponse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text: String = self.text.chars().take(2000).collect();
        write!(f, "{}: {} {text}", self.asked, self.status)
    }
}
