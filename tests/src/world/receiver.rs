//! A receiver of webhooks for a test: it takes messages over TLS, and answers as it is told to. What it takes is verified by the reference
//! library of Standard Webhooks.

use crate::bench::encrypted::Encrypted;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use serde_json::Value;
use standardwebhooks::Webhook;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use supervisors::dev::pki::Authority;
use tokio::task::AbortHandle;

use super::PATIENCE;

/// A message as it came.
#[derive(Clone, Debug)]
pub struct Received {
    pub headers: HeaderMap,
    pub body: Bytes,
    /// What was answered.
    pub status: StatusCode,
}

#[derive(Default)]
struct Taken {
    received: Vec<Received>,
    /// The next answers; 204 after them.
    answers: VecDeque<StatusCode>,
}

/// A running receiver. Dropping it stops it.
pub struct Receiver {
    port: u16,
    authority: Authority,
    taken: Arc<Mutex<Taken>>,
    serving: AbortHandle,
    _folder: tempfile::TempDir,
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Received {
    #[must_use]
    pub fn header(&self, name: &str) -> String {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
    }

    /// The event, as one who knows this secret believes it.
    ///
    /// # Panics
    /// Where the signature does not hold.
    #[must_use]
    pub fn verified(&self, secret: &str) -> Value {
        let webhook = Webhook::new(secret).expect("it is a secret of Standard Webhooks");
        webhook.verify(&self.body, &self.headers).expect("it is signed with this secret");
        serde_json::from_slice(&self.body).expect("it is JSON")
    }
}

impl Receiver {
    /// # Panics
    /// Where it does not start.
    pub async fn start() -> Self {
        let folder = tempfile::Builder::new().prefix("gpuaas-receiver-").tempdir().expect("there is room");
        let authority = Authority::create(&folder.path().join("pki")).expect("an authority can be made");
        let certificate = authority.server_certificate("receiver").expect("it signs");
        let listener = Encrypted::bind(&certificate.certificate_path, &certificate.key_path).await;
        let listener = listener.expect("there is a port");
        let port = listener.port().expect("it listens");
        let taken: Arc<Mutex<Taken>> = Arc::default();
        let router = Router::new().route("/hooks", post(take)).with_state(Arc::clone(&taken));
        let serving = tokio::spawn(async move { axum::serve(listener, router).await }).abort_handle();
        Self { port, authority, taken, serving, _folder: folder }
    }

    #[must_use]
    pub fn url(&self) -> String {
        format!("https://localhost:{}/hooks", self.port)
    }

    #[must_use]
    pub fn authorities_path(&self) -> &Path {
        self.authority.certificate_path()
    }

    /// Answers so to the next ones.
    pub fn answers(&self, statuses: &[u16]) {
        let statuses = statuses.iter().map(|status| StatusCode::from_u16(*status).expect("it is a status"));
        lock(&self.taken).answers.extend(statuses);
    }

    #[must_use]
    pub fn received(&self) -> Vec<Received> {
        lock(&self.taken).received.clone()
    }

    /// Waits for so many of an event's messages, and answers them.
    ///
    /// # Panics
    /// Where they do not come.
    pub async fn expect(&self, event: &str, count: usize) -> Vec<Received> {
        let until = Instant::now() + PATIENCE;
        loop {
            let is_one =
                |it: &Received| serde_json::from_slice::<Value>(&it.body).is_ok_and(|body| body["type"] == event);
            let found: Vec<_> = self.received().into_iter().filter(is_one).collect();
            if found.len() >= count {
                return found;
            }
            assert!(Instant::now() < until, "{} of {count} messages of {event} came", found.len());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

async fn take(State(taken): State<Arc<Mutex<Taken>>>, headers: HeaderMap, body: Bytes) -> StatusCode {
    let mut taken = lock(&taken);
    let status = taken.answers.pop_front().unwrap_or(StatusCode::NO_CONTENT);
    taken.received.push(Received { headers, body, status });
    status
}

fn lock(taken: &Mutex<Taken>) -> std::sync::MutexGuard<'_, Taken> {
    taken.lock().unwrap_or_else(PoisonError::into_inner)
}
