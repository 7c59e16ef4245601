//! A client of the public API, as a careful caller writes one: it retries what is safe to retry, under the same
//! `Idempotency-Key`, and reports the server's error when it gives up.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use chrono::Utc;
use reqwest::{Method, StatusCode, header};
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::Value;
use uuid::Uuid;

/// How long a call is retried: longer than the takeover of a replica's shards takes.
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a response may stay away, and each part of its body: a long recording as a whole may take longer.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(15);
/// The first and the longest pause between two polls of a resource.
const FIRST_POLL_PAUSE: Duration = Duration::from_millis(20);
const MAX_POLL_PAUSE: Duration = Duration::from_secs(1);

/// An HTTPS client that trusts the authority in `ca_path` and no other, and opens a connection for every request, so that a
/// balancer can send each to another replica.
pub fn https_client(ca_path: &Path) -> anyhow::Result<reqwest::Client> {
    https_client_within(ca_path, RESPONSE_TIMEOUT)
}

/// As [`https_client`], with this timeout for connections and for responses.
pub fn https_client_within(ca_path: &Path, timeout: Duration) -> anyhow::Result<reqwest::Client> {
    let pem = std::fs::read(ca_path).with_context(|| format!("cannot read {}", ca_path.display()))?;
    let authority = reqwest::Certificate::from_pem_bundle(&pem)?;
    Ok(reqwest::Client::builder()
        .tls_certs_only(authority)
        .pool_max_idle_per_host(0)
        .connect_timeout(timeout)
        .read_timeout(timeout)
        .no_proxy()
        .build()?)
}

/// Logs in with a password at the identity provider (the token path of the specification) and returns the access token.
pub async fn log_in(
    auth_url: &str,
    realm: &str,
    client: (&str, &SecretString),
    person: (&str, &SecretString),
) -> anyhow::Result<SecretString> {
    let url = format!("{auth_url}/realms/{realm}/protocol/openid-connect/token");
    let form = [
        ("grant_type", "password"),
        ("client_id", client.0),
        ("client_secret", client.1.expose_secret()),
        ("username", person.0),
        ("password", person.1.expose_secret()),
    ];
    let http = reqwest::Client::builder().no_proxy().timeout(RESPONSE_TIMEOUT).build()?;
    let answer = http.post(url).form(&form).send().await.context("the identity provider cannot be reached")?;
    let status = answer.status();
    let body: Value = answer.json().await.context("the identity provider did not answer in JSON")?;
    match body["access_token"].as_str() {
        Some(token) if status.is_success() => Ok(token.to_owned().into()),
        _ => bail!("log-in of {} refused ({status}): {}", person.0, body["error_description"]),
    }
}

/// The public API, as one caller.
#[derive(Clone)]
pub struct DevApi {
    http: reqwest::Client,
    base_url: String,
    token: SecretString,
}

/// The answer, or the error with whether to retry.
enum Outcome {
    Answer(Value),
    Refused(anyhow::Error),
    Again { after: Duration, why: anyhow::Error },
}

impl DevApi {
    pub fn new(http: reqwest::Client, base_url: &str, token: SecretString) -> Self {
        Self { http, base_url: base_url.trim_end_matches('/').to_owned(), token }
    }

    pub async fn get(&self, path: &str) -> anyhow::Result<Value> {
        self.call(Method::GET, path, None).await
    }

    /// Posts `body` under a fresh idempotency key.
    pub async fn post(&self, path: &str, body: &Value) -> anyhow::Result<Value> {
        self.call(Method::POST, path, Some(body)).await
    }

    /// Gets `path` until `look` returns a value for the answer. `look` fails where that is no longer possible.
    pub async fn wait_for<T>(
        &self,
        path: &str,
        what: &str,
        limit: Duration,
        mut look: impl FnMut(&Value) -> anyhow::Result<Option<T>>,
    ) -> anyhow::Result<T> {
        let until = Instant::now() + limit;
        let mut pause = FIRST_POLL_PAUSE;
        loop {
            let seen = self.get(path).await?;
            if let Some(found) = look(&seen)? {
                return Ok(found);
            }
            if Instant::now() + pause > until {
                bail!("{what}: not after {} s; it is {}", limit.as_secs(), summary_of(&seen));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_POLL_PAUSE);
        }
    }

    async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        let key = Uuid::new_v4().to_string();
        let until = Instant::now() + RETRY_TIMEOUT;
        loop {
            match self.attempt(&method, path, body, &key).await {
                Outcome::Answer(answer) => return Ok(answer),
                Outcome::Refused(error) => return Err(error),
                Outcome::Again { why, .. } if Instant::now() > until => return Err(why),
                Outcome::Again { after, .. } => tokio::time::sleep(after).await,
            }
        }
    }

    async fn attempt(&self, method: &Method, path: &str, body: Option<&Value>, key: &str) -> Outcome {
        let mut request = self
            .http
            .request(method.clone(), format!("{}{path}", self.base_url))
            .bearer_auth(self.token.expose_secret());
        if let Some(body) = body {
            request = request.json(body).header("Idempotency-Key", key);
        }
        let again = |error: reqwest::Error, what: &str| Outcome::Again {
            after: Duration::from_millis(100),
            why: anyhow::Error::from(error).context(format!("{method} {path}: {what}")),
        };
        let answer = match request.send().await {
            Ok(answer) => answer,
            Err(error) => return again(error, "no answer"),
        };
        let status = answer.status();
        let retry_after = answer
            .headers()
            .get(header::RETRY_AFTER)
            .and_then(|value| failures::retry_after::parse(value.to_str().ok()?, Utc::now()))
            .unwrap_or(Duration::from_millis(200));
        let text = match answer.bytes().await {
            Ok(text) => text,
            Err(error) => return again(error, "the answer was cut off"),
        };
        let body: Value = strict_json::from_slice(&text).unwrap_or(Value::Null);
        if status.is_success() {
            return Outcome::Answer(body);
        }
        let error = refusal(method, path, status, &body);
        let again = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
            || body["code"] == "idempotency_in_progress";
        if again { Outcome::Again { after: retry_after, why: error } } else { Outcome::Refused(error) }
    }
}

/// The server's error, with its correlation id.
fn refusal(method: &Method, path: &str, status: StatusCode, body: &Value) -> anyhow::Error {
    let text = |name: &str| body[name].as_str().unwrap_or("-").to_owned();
    anyhow!(
        "{method} {path}: {} {}: {} (correlation id {})",
        status.as_u16(),
        text("code"),
        text("message"),
        text("correlation_id")
    )
}

/// The state of a resource and its reason, for a message.
fn summary_of(resource: &Value) -> String {
    let reason = &resource["state_reason"];
    let state = resource["state"].as_str().unwrap_or("in no state");
    match (reason["message"].as_str(), resource["failure"]["message"].as_str()) {
        (_, Some(failure)) => format!("{state}: {failure}"),
        (Some(reason), None) if !reason.is_empty() => format!("{state}: {reason}"),
        (_, None) => state.to_owned(),
    }
}

/// The error for a resource that cannot reach the awaited state any more.
pub fn unreachable_state_error(what: &str, resource: &Value) -> anyhow::Error {
    anyhow!("{what} is {}", summary_of(resource))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::http::HeaderMap;
    use axum::response::IntoResponse as _;
    use axum::routing::{get, post};
    use axum::{Json, Router};
    use serde_json::json;

    use super::*;

    async fn api(routes: Router) -> DevApi {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        DevApi::new(reqwest::Client::new(), &url, "token".to_owned().into())
    }

    #[tokio::test]
    async fn unavailable_request_is_retried_under_the_same_idempotency_key() {
        let keys: Arc<Mutex<Vec<String>>> = Arc::default();
        let seen = Arc::clone(&keys);
        let create = move |headers: HeaderMap| async move {
            let mut seen = seen.lock().unwrap();
            seen.push(headers["idempotency-key"].to_str().unwrap().to_owned());
            match seen.len() {
                1 => (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "0")], "").into_response(),
                _ => Json(json!({ "id": "x" })).into_response(),
            }
        };
        let api = api(Router::new().route("/things", post(create))).await;
        assert_eq!(api.post("/things", &json!({})).await.unwrap()["id"], "x");
        let keys = keys.lock().unwrap();
        assert_eq!(keys.len(), 2);
        assert_eq!(keys[0], keys[1]);
    }

    #[tokio::test]
    async fn refusal_shows_the_error_and_the_correlation_id_of_the_server() {
        let refuse = || async {
            let body = json!({ "code": "insufficient_capacity", "message": "all taken", "correlation_id": "c-7" });
            (StatusCode::CONFLICT, Json(body))
        };
        let api = api(Router::new().route("/things", post(refuse))).await;
        let error = api.post("/things", &json!({})).await.unwrap_err().to_string();
        assert_eq!(error, "POST /things: 409 insufficient_capacity: all taken (correlation id c-7)");
    }

    #[tokio::test]
    async fn timed_out_wait_shows_the_state_and_its_reason() {
        let look = || async { Json(json!({ "state": "offline", "state_reason": { "message": "no contact" } })) };
        let api = api(Router::new().route("/node", get(look))).await;
        let waiting = api.wait_for("/node", "the node is active", Duration::from_millis(10), |node| {
            Ok((node["state"] == "active").then_some(()))
        });
        assert_eq!(
            waiting.await.unwrap_err().to_string(),
            "the node is active: not after 0 s; it is offline: no contact"
        );
    }
}
