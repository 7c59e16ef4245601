//! The service's API, as a careful caller asks it: what is safe to ask again is asked again, under one `Idempotency-Key`, as long as
//! `Retry-After` makes it worth waiting; nothing is read without a bound; a refusal is quoted.

use crate::failure::{Ended, Failure, chain};
use crate::login::Session;
use crate::out::Out;
use crate::web::{self, Trust, Unread};
use reqwest::{Client, Method, Response, StatusCode, Url, header};
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The longest body of an answer that is read.
const LONGEST: usize = 16 * 1024 * 1024;
/// The server answers within 20 s, or not at all.
const ANSWERS_WITHIN: Duration = Duration::from_secs(25);
/// For how long a call is repeated: longer than a replica's share of the work takes to find another home.
const PATIENCE: Duration = Duration::from_secs(30);
/// The same, where nobody is reached.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_LAST: Duration = Duration::from_secs(2);
/// A shorter wait is not worth a word.
const WORTH_A_WORD: Duration = Duration::from_secs(2);
/// What the server gives at once, at most.
const PAGE: usize = 200;

pub(crate) type Query<'a> = Vec<(&'a str, String)>;

/// The API, as whoever is logged in.
pub(crate) struct Api {
    http: Client,
    /// Over HTTP/1.1 and without an end: for streams and WebSockets.
    pub(crate) streams: Client,
    base: Url,
    session: Session,
    /// The user's own key, for the first request that takes one.
    key: Mutex<Option<String>>,
    pub(crate) out: Out,
}

struct Call<'a> {
    method: Method,
    path: &'a str,
    query: &'a [(&'a str, String)],
    body: Option<&'a Value>,
    key: Option<String>,
}

/// What came of one attempt.
enum Attempt {
    Answer(Value),
    Failed(Failure),
    /// Worth another attempt after that long; what to say if there is none.
    Again {
        after: Option<Duration>,
        patience: Duration,
        failure: Failure,
    },
}

impl Api {
    pub(crate) fn new(
        base: Url,
        ca_bundle: Option<&PathBuf>,
        session: Session,
        key: Option<String>,
        out: Out,
    ) -> Result<Self, Failure> {
        let trust = ca_bundle.map_or(Trust::System, |path| Trust::Only(path));
        Ok(Self {
            // A connection for each request: a balancer can send each to another replica.
            http: web::built(web::client(&base, trust)?.timeout(ANSWERS_WITHIN).pool_max_idle_per_host(0))?,
            streams: web::built(web::client(&base, trust)?.http1_only().pool_max_idle_per_host(0))?,
            base,
            session,
            key: Mutex::new(key),
            out,
        })
    }

    pub(crate) const fn session(&self) -> &Session {
        &self.session
    }

    pub(crate) async fn get(&self, path: &str, query: &[(&str, String)]) -> Result<Value, Failure> {
        self.call(Call { method: Method::GET, path, query, body: None, key: None }).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.call(Call { method: Method::POST, path, query: &[], body: Some(body), key: Some(self.next_key()) }).await
    }

    fn next_key(&self) -> String {
        let own = self.key.lock().unwrap_or_else(PoisonError::into_inner).take();
        own.unwrap_or_else(|| Uuid::new_v4().to_string())
    }

    /// A POST that takes no body.
    pub(crate) async fn post_empty(&self, path: &str) -> Result<Value, Failure> {
        self.call(Call { method: Method::POST, path, query: &[], body: None, key: Some(self.next_key()) }).await
    }

    /// Changes some fields. It is repeated as a PUT is: the same fields twice are the same change.
    pub(crate) async fn patch(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.call(Call { method: Method::PATCH, path, query: &[], body: Some(body), key: None }).await
    }

    /// Says how it is to be: once or twice is the same.
    pub(crate) async fn put(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.call(Call { method: Method::PUT, path, query: &[], body: Some(body), key: None }).await
    }

    pub(crate) async fn delete(&self, path: &str, query: &[(&str, String)]) -> Result<Value, Failure> {
        self.call(Call { method: Method::DELETE, path, query, body: None, key: None }).await
    }

    /// Up to `limit` items, page by page; `next_page` is where the rest begins.
    pub(crate) async fn list(&self, path: &str, query: &[(&str, String)], limit: usize) -> Result<Value, Failure> {
        let mut items: Vec<Value> = Vec::new();
        let mut next = Value::Null;
        while items.len() < limit {
            let mut query = query.to_vec();
            query.push(("limit", (limit - items.len()).min(PAGE).to_string()));
            query.extend(next.as_str().map(|token| ("page_token", token.to_owned())));
            let mut page = self.get(path, &query).await?;
            let Some(more) = page["items"].as_array_mut() else {
                return Err(Failure::new(Ended::Server, "the server's answer is no list"));
            };
            let ends = more.is_empty();
            items.append(more);
            next = page["next_page"].take();
            if next.is_null() || ends {
                break;
            }
        }
        Ok(json!({ "items": items, "next_page": next }))
    }

    /// A stream of events after `last`. One attempt.
    pub(crate) async fn stream(&self, path: &str, last: Option<&str>) -> Result<Response, Failure> {
        self.begun(path, "text/event-stream", last).await
    }

    /// An answer that is too long to be read at once.
    pub(crate) async fn open(&self, path: &str, media_type: &str) -> Result<Response, Failure> {
        match self.begun(path, media_type, None).await {
            // The login was renewed, if it could be.
            Err(failure) if failure.ended == Ended::LoggedOut => self.begun(path, media_type, None).await,
            begun => begun,
        }
    }

    async fn begun(&self, path: &str, media_type: &str, last: Option<&str>) -> Result<Response, Failure> {
        let token = self.session.token().await?;
        let mut request = self.streams.get(self.at(path)).bearer_auth(token.expose_secret());
        request = request.header(header::ACCEPT, media_type);
        if let Some(last) = last {
            request = request.header("Last-Event-ID", last);
        }
        let answer = tokio::time::timeout(ANSWERS_WITHIN, request.send())
            .await
            .map_err(|_| Failure::new(Ended::Network, format!("{} does not answer", self.base)))?
            .map_err(|error| self.unreached(&error))?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        if answer.status() == StatusCode::UNAUTHORIZED {
            self.session.renew(&token).await?;
        }
        let (status, after) = (answer.status(), retry_after(&answer));
        let body = json_of(answer).await.ok().flatten().unwrap_or_default();
        Err(Failure::of_answer(status, &body, after))
    }

    pub(crate) fn at(&self, path: &str) -> String {
        format!("{}{path}", self.base.as_str().trim_end_matches('/'))
    }

    async fn call(&self, call: Call<'_>) -> Result<Value, Failure> {
        let began = Instant::now();
        let mut pause = PAUSE_FIRST;
        let mut renewed = false;
        loop {
            let token = self.session.token().await?;
            match self.attempt(&call, &token).await {
                Attempt::Answer(answer) => return Ok(answer),
                Attempt::Failed(failure) if failure.ended == Ended::LoggedOut && !renewed => {
                    renewed = true;
                    if !self.session.renew(&token).await? {
                        return Err(failure);
                    }
                }
                Attempt::Failed(failure) => return Err(failure),
                Attempt::Again { after, patience, failure } => {
                    // Not all at the same instant: whoever is refused together comes again apart.
                    let after = after.unwrap_or(pause.mul_f64(rand::random_range(0.5..1.5)));
                    if began.elapsed() + after > patience {
                        return Err(failure);
                    }
                    if after >= WORTH_A_WORD {
                        let code = failure.code().to_owned();
                        self.out.say(&format!("The server asks to wait {} s ({code}).", after.as_secs()));
                    }
                    tokio::time::sleep(after).await;
                    pause = (pause * 2).min(PAUSE_LAST);
                }
            }
        }
    }

    async fn attempt(&self, call: &Call<'_>, token: &SecretString) -> Attempt {
        let Call { method, path, query, body, key } = call;
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
            Err(error) => return self.unanswered(call, &error),
        };
        let (status, after) = (answer.status(), retry_after(&answer));
        let body = match json_of(answer).await {
            Ok(Some(body)) => body,
            Ok(None) if status.is_success() => {
                return Attempt::Failed(Failure::new(Ended::Server, "the server's answer is no JSON"));
            }
            Ok(None) => Value::Null,
            Err(Unread::Cut(error)) => return self.unanswered(call, &error),
            Err(error @ Unread::TooLong(_)) => return Attempt::Failed(Failure::new(Ended::Server, error.to_string())),
        };
        if status.is_success() {
            return Attempt::Answer(body);
        }
        let failure = Failure::of_answer(status, &body, after);
        let momentary = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
            || failure.code() == "idempotency_in_progress";
        if !momentary {
            return Attempt::Failed(failure);
        }
        let failure = match after.filter(|_| failure.ended == Ended::RateLimited) {
            Some(after) => failure.next(format!("Ask again in {} s.", after.as_secs())),
            None => once_again(failure, call),
        };
        Attempt::Again { after, patience: PATIENCE, failure }
    }

    /// No answer, or half of one.
    fn unanswered(&self, call: &Call<'_>, error: &reqwest::Error) -> Attempt {
        let failure = self.unreached(error);
        if error.is_connect() {
            // Who cannot be trusted now cannot be in a moment.
            let distrusted = chain(error).contains("certificate");
            return match distrusted {
                true => Attempt::Failed(failure.next("Give the authority of its certificate: --ca-bundle FILE")),
                false => Attempt::Again { after: None, patience: CONNECT_PATIENCE, failure },
            };
        }
        let repeatable = matches!(call.method, Method::GET | Method::PUT | Method::PATCH) || call.key.is_some();
        let failure = once_again(failure, call);
        if repeatable { Attempt::Again { after: None, patience: PATIENCE, failure } } else { Attempt::Failed(failure) }
    }

    fn unreached(&self, error: &reqwest::Error) -> Failure {
        Failure::new(Ended::Network, format!("{} cannot be reached: {}", self.base, chain(error)))
            .next("Check the address (`gpuctl whoami` shows it) and the network, and try again.")
    }
}

/// Whether it was done is not known: how to ask without doing it twice.
fn once_again(failure: Failure, call: &Call<'_>) -> Failure {
    match &call.key {
        Some(key) => {
            failure.next(format!("Repeat the command with --idempotency-key {key}: then it is done once, at most."))
        }
        None => failure,
    }
}

/// `None` for what is no JSON. An answer without a body is null.
async fn json_of(answer: Response) -> Result<Option<Value>, Unread> {
    let body = web::body(answer, LONGEST).await?;
    Ok(if body.is_empty() { Some(Value::Null) } else { serde_json::from_slice(&body).ok() })
}

fn retry_after(answer: &Response) -> Option<Duration> {
    let seconds = answer.headers().get(header::RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests;
