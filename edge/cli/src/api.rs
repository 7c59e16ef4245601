//! The client of the service's API. It retries what is safe to retry, under one `Idempotency-Key`, as long as `Retry-After` makes it worth
//! waiting; it reads no unbounded body; it reports the service's errors as they are.

use crate::failure::{ExitStatus, Failure, chain, is_passing};
use crate::http_client::{self, BodyError, Trust};
use crate::login::Session;
use crate::output::Output;
use crate::retry_after;
use crate::text_encoding;
use reqwest::{Client, Method, Response, StatusCode, Url, header};
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The longest response body that is read.
const MAX_BODY_BYTES: usize = 16 * 1024 * 1024;
/// The server's own timeout is 20 s.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(25);
/// How long a call is retried: longer than a takeover of a dead replica's shards takes.
const RETRY_FOR: Duration = Duration::from_secs(30);
/// The same, where no connection can be made.
const CONNECT_RETRY_FOR: Duration = Duration::from_secs(5);
const FIRST_RETRY_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_RETRY_PAUSE: Duration = Duration::from_secs(2);
/// A shorter wait is not reported.
const NOTICE_AFTER: Duration = Duration::from_secs(2);
/// The most pages of a list that are read: a filter may leave nothing of each.
const MAX_PAGES: usize = 2000;
/// The largest page of the API.
const MAX_PAGE_LEN: usize = 200;

pub(crate) type Query<'a> = Vec<(&'a str, String)>;

/// The API client of the logged-in user.
pub(crate) struct Api {
    http: Client,
    /// Over HTTP/1.1 and without a timeout: for streams and WebSockets.
    pub(crate) streams: Client,
    base: Url,
    session: Session,
    /// The user's own idempotency key, for the first request that takes one.
    key: Mutex<Option<String>>,
    pub(crate) out: Output,
}

struct ApiCall<'a> {
    method: Method,
    path: &'a str,
    query: &'a [(&'a str, String)],
    body: Option<&'a Value>,
    key: Option<String>,
}

/// The outcome of one attempt.
enum AttemptOutcome<T> {
    Answer(T),
    Failed(Failure),
    /// Worth a retry after this pause; the failure is reported if there is none.
    Retry {
        after: Option<Duration>,
        retry_for: Duration,
        failure: Failure,
    },
}

impl Api {
    pub(crate) fn new(
        base: Url,
        ca_bundle: Option<&PathBuf>,
        session: Session,
        key: Option<String>,
        out: Output,
    ) -> Result<Self, Failure> {
        let trust = ca_bundle.map_or(Trust::System, |path| Trust::Only(path));
        Ok(Self {
            // A connection for each request: a load balancer can send each to another replica.
            http: http_client::build(
                http_client::client(&base, trust)?.timeout(ANSWER_TIMEOUT).pool_max_idle_per_host(0),
            )?,
            streams: http_client::build(http_client::client(&base, trust)?.http1_only().pool_max_idle_per_host(0))?,
            base,
            session,
            key: Mutex::new(key),
            out,
        })
    }

    /// The same with the stored token, which no request renews: for requests that may be cut off at any moment.
    pub(crate) async fn without_renewal(self) -> Result<Self, Failure> {
        let token = self.session.stored_token().await?;
        Ok(Self { session: Session::AccessToken(token), ..self })
    }

    pub(crate) const fn session(&self) -> &Session {
        &self.session
    }

    pub(crate) async fn get(&self, path: &str, query: &[(&str, String)]) -> Result<Value, Failure> {
        self.call(ApiCall { method: Method::GET, path, query, body: None, key: None }).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.call(ApiCall { method: Method::POST, path, query: &[], body: Some(body), key: Some(self.next_key()) })
            .await
    }

    fn next_key(&self) -> String {
        let own = self.key.lock().unwrap_or_else(PoisonError::into_inner).take();
        own.unwrap_or_else(|| Uuid::new_v4().to_string())
    }

    /// A POST that takes no body.
    pub(crate) async fn post_empty(&self, path: &str) -> Result<Value, Failure> {
        self.call(ApiCall { method: Method::POST, path, query: &[], body: None, key: Some(self.next_key()) }).await
    }

    /// Changes some fields. It is retried as a PUT is: the same change twice is one change.
    pub(crate) async fn patch(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.call(ApiCall { method: Method::PATCH, path, query: &[], body: Some(body), key: None }).await
    }

    /// Sets the whole state of a resource; idempotent by nature.
    pub(crate) async fn put(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.call(ApiCall { method: Method::PUT, path, query: &[], body: Some(body), key: None }).await
    }

    pub(crate) async fn delete(&self, path: &str, query: &[(&str, String)]) -> Result<Value, Failure> {
        self.call(ApiCall { method: Method::DELETE, path, query, body: None, key: None }).await
    }

    /// Up to `limit` items, page by page; `next_page` is the token of the rest.
    pub(crate) async fn list(&self, path: &str, query: &[(&str, String)], limit: usize) -> Result<Value, Failure> {
        self.list_filtered(path, query, limit, |_| true).await
    }

    /// The same, of the items that the filter accepts.
    pub(crate) async fn list_filtered(
        &self,
        path: &str,
        query: &[(&str, String)],
        limit: usize,
        accepts: impl Fn(&Value) -> bool,
    ) -> Result<Value, Failure> {
        let mut items: Vec<Value> = Vec::new();
        let mut next = Value::Null;
        for _ in 0..MAX_PAGES {
            if items.len() >= limit {
                break;
            }
            let mut query = query.to_vec();
            query.push(("limit", (limit - items.len()).min(MAX_PAGE_LEN).to_string()));
            query.extend(next.as_str().map(|token| ("page_token", token.to_owned())));
            let mut page = self.get(path, &query).await?;
            let Some(more) = page["items"].as_array_mut() else {
                return Err(Failure::unusable_answer("the server's answer is no list"));
            };
            let ends = more.is_empty();
            items.extend(std::mem::take(more).into_iter().filter(&accepts));
            let given = std::mem::replace(&mut next, page["next_page"].take());
            if next.is_null() || ends {
                break;
            }
            if next == given {
                return Err(Failure::unusable_answer("the server's list repeats a page without end"));
            }
        }
        Ok(json!({ "items": items, "next_page": next }))
    }

    /// A stream of events after `last`. One attempt.
    pub(crate) async fn stream(&self, path: &str, last: Option<&str>) -> Result<Response, Failure> {
        let token = self.session.token().await?;
        let failure = match self.open_attempt(path, "text/event-stream", last, &token).await {
            AttemptOutcome::Answer(answer) => return Ok(answer),
            AttemptOutcome::Failed(failure) | AttemptOutcome::Retry { failure, .. } => failure,
        };
        if failure.exit_status == ExitStatus::LoggedOut {
            self.session.renew(&token).await?;
        }
        Err(failure)
    }

    /// A response that is too long to be read into memory.
    pub(crate) async fn open(&self, path: &str, media_type: &str) -> Result<Response, Failure> {
        self.retried(async |token: &SecretString| self.open_attempt(path, media_type, None, token).await).await
    }

    async fn open_attempt(
        &self,
        path: &str,
        media_type: &str,
        last: Option<&str>,
        token: &SecretString,
    ) -> AttemptOutcome<Response> {
        let call = ApiCall { method: Method::GET, path, query: &[], body: None, key: None };
        let mut request = self.streams.get(self.at(path)).bearer_auth(token.expose_secret());
        request = request.header(header::ACCEPT, media_type);
        if let Some(last) = last {
            request = request.header("Last-Event-ID", last);
        }
        let answer = match tokio::time::timeout(ANSWER_TIMEOUT, request.send()).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => return self.outcome_without_answer(&call, &error),
            Err(_) => {
                let failure = Failure::new(ExitStatus::Network, format!("{} does not answer", self.base));
                return outcome_of_passing_fault(&call, failure, None);
            }
        };
        let status = answer.status();
        if status.is_success() {
            // A portal or a proxy answers with its own page; the service has none here.
            return match http_client::is_page(answer.headers()) {
                true => AttemptOutcome::Failed(Failure::of_answer(status, &Value::Null, None)),
                false => AttemptOutcome::Answer(answer),
            };
        }
        let after = retry_after::of(answer.headers());
        let body = json_of(answer).await.ok().flatten().unwrap_or_default();
        outcome_of_refusal(&call, status, &body, after)
    }

    pub(crate) fn at(&self, path: &str) -> String {
        format!("{}{path}", self.base.as_str().trim_end_matches('/'))
    }

    async fn call(&self, call: ApiCall<'_>) -> Result<Value, Failure> {
        self.retried(async |token: &SecretString| self.attempt(&call, token).await).await
    }

    /// The last outcome of attempts, as long as they are worth it; after a refused token, with a renewed one.
    async fn retried<T>(&self, attempt: impl AsyncFn(&SecretString) -> AttemptOutcome<T>) -> Result<T, Failure> {
        let began = Instant::now();
        let mut pause = FIRST_RETRY_PAUSE;
        let mut renewed = false;
        loop {
            let token = self.session.token().await?;
            match attempt(&token).await {
                AttemptOutcome::Answer(answer) => return Ok(answer),
                AttemptOutcome::Failed(failure) if failure.exit_status == ExitStatus::LoggedOut && !renewed => {
                    renewed = true;
                    if !self.session.renew(&token).await? {
                        return Err(failure);
                    }
                }
                AttemptOutcome::Failed(failure) => return Err(failure),
                AttemptOutcome::Retry { after, retry_for, failure } => {
                    // With jitter, so that clients that were refused together do not retry together.
                    let after = after.unwrap_or(pause.mul_f64(rand::random_range(0.5..1.5)));
                    if began.elapsed() + after > retry_for {
                        return Err(failure);
                    }
                    if after >= NOTICE_AFTER {
                        let code = Some(failure.code()).filter(|code| !code.is_empty());
                        let why = code.map(|code| format!(" ({code})")).unwrap_or_default();
                        self.out.notice(&format!("Trying again in {} s{why}.", after.as_secs()));
                    }
                    tokio::time::sleep(after).await;
                    pause = (pause * 2).min(LONGEST_RETRY_PAUSE);
                }
            }
        }
    }

    async fn attempt(&self, call: &ApiCall<'_>, token: &SecretString) -> AttemptOutcome<Value> {
        let ApiCall { method, path, query, body, key } = call;
        let mut request = self.http.request(method.clone(), self.at(path)).bearer_auth(token.expose_secret());
        if !query.is_empty() {
            request = request.query(query);
        }
        if let Some(body) = body {
            request = request.json(body);
        }
        if let Some(key) = key {
            request = request.header("Idempotency-Key", key);
        }
        let answer = match request.send().await {
            Ok(answer) => answer,
            Err(error) => return self.outcome_without_answer(call, &error),
        };
        let (status, after) = (answer.status(), retry_after::of(answer.headers()));
        let body = match json_of(answer).await {
            Ok(Some(body)) => body,
            Ok(None) if status.is_success() => {
                return AttemptOutcome::Failed(Failure::of_answer(status, &Value::Null, None));
            }
            Ok(None) => Value::Null,
            Err(BodyError::Cut(error)) => return self.outcome_without_answer(call, &error),
            Err(error @ BodyError::TooLong(_)) => {
                return AttemptOutcome::Failed(Failure::unusable_answer(format!(
                    "the service cannot be read: {error}"
                )));
            }
        };
        if status.is_success() {
            return AttemptOutcome::Answer(body);
        }
        outcome_of_refusal(call, status, &body, after)
    }

    /// The outcome where no response, or half of one, arrived.
    fn outcome_without_answer<T>(&self, call: &ApiCall<'_>, error: &reqwest::Error) -> AttemptOutcome<T> {
        let failure = self.unreached(error);
        if error.is_connect() {
            // A certificate error is permanent.
            let is_untrusted = chain(error).contains("certificate");
            return match is_untrusted {
                true => AttemptOutcome::Failed(failure.next("Give the authority of its certificate: --ca-bundle FILE")),
                false => AttemptOutcome::Retry { after: None, retry_for: CONNECT_RETRY_FOR, failure },
            };
        }
        outcome_of_passing_fault(call, failure, None)
    }

    fn unreached(&self, error: &reqwest::Error) -> Failure {
        // The error's own text names the URL; its sources say what failed.
        let why = std::error::Error::source(error).map_or_else(|| "no answer".to_owned(), chain);
        Failure::new(ExitStatus::Network, format!("{} cannot be reached: {why}", self.base))
            .next("Check the address (`gpuctl whoami` shows it) and the network, and try again.")
    }
}

/// The outcome where the answer is no success.
fn outcome_of_refusal<T>(
    call: &ApiCall<'_>,
    status: StatusCode,
    body: &Value,
    after: Option<Duration>,
) -> AttemptOutcome<T> {
    let failure = Failure::of_answer(status, body, after);
    // A 503 of the service, or with `Retry-After`, is a refusal. A proxy's 503 without it may also follow a request that was lost in transit.
    let is_unprocessed = status == StatusCode::TOO_MANY_REQUESTS
        || (status == StatusCode::SERVICE_UNAVAILABLE && (failure.answer.is_some() || after.is_some()))
        || failure.code() == "idempotency_in_progress";
    if is_unprocessed {
        let failure = match after.filter(|_| failure.exit_status == ExitStatus::RateLimited) {
            Some(after) => failure.next(format!("Ask again in {} s.", after.as_secs())),
            None => with_idempotency_hint(failure, call),
        };
        return AttemptOutcome::Retry { after, retry_for: RETRY_FOR, failure };
    }
    if failure.answer.is_none() && is_passing(status) {
        return outcome_of_passing_fault(call, failure, after);
    }
    // The service may have carried it out before it failed.
    let is_uncertain = failure.answer.is_some() && status.is_server_error();
    AttemptOutcome::Failed(if is_uncertain { with_idempotency_hint(failure, call) } else { failure })
}

/// The outcome where it is unknown whether the request was carried out: it is sent again where that has no second effect.
fn outcome_of_passing_fault<T>(call: &ApiCall<'_>, failure: Failure, after: Option<Duration>) -> AttemptOutcome<T> {
    let is_repeatable = matches!(call.method, Method::GET | Method::PUT | Method::PATCH) || call.key.is_some();
    if is_repeatable {
        let failure = with_idempotency_hint(failure, call);
        AttemptOutcome::Retry { after, retry_for: RETRY_FOR, failure }
    } else {
        AttemptOutcome::Failed(failure.next("The server may have processed the request. Look at the result first, and repeat the command only if it was not processed."))
    }
}

/// It is unknown whether the request was executed: the hint says how to repeat it safely.
fn with_idempotency_hint(failure: Failure, call: &ApiCall<'_>) -> Failure {
    match &call.key {
        Some(key) => {
            failure.next(format!("Repeat the command with --idempotency-key {key}: then it is done once, at most."))
        }
        None => failure,
    }
}

/// The body as JSON; `None` where it is none. An empty body is null.
async fn json_of(answer: Response) -> Result<Option<Value>, BodyError> {
    let body = http_client::body(answer, MAX_BODY_BYTES).await?;
    Ok(if body.is_empty() {
        Some(Value::Null)
    } else {
        serde_json::from_slice(text_encoding::without_mark(&body)).ok()
    })
}

#[cfg(test)]
mod tests;
