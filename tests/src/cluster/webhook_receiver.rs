//! A receiver of webhooks for a test: it accepts messages over TLS, and responds as the test configures. Messages are verified with the
//! reference library of Standard Webhooks.

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use local_servers::pki::Authority;
use serde_json::Value;
use standardwebhooks::Webhook;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use test_host::TlsListener;
use tokio::task::AbortHandle;

use super::WAIT_TIMEOUT;

/// A received message.
#[derive(Clone, Debug)]
pub struct ReceivedWebhook {
    pub headers: HeaderMap,
    pub body: Bytes,
    /// The status of the response.
    pub status: StatusCode,
}

#[derive(Default)]
struct ReceiverState {
    received: Vec<ReceivedWebhook>,
    /// The next response statuses; 204 after them.
    answers: VecDeque<StatusCode>,
}

/// A running receiver. Dropping it stops it.
pub struct WebhookReceiver {
    port: u16,
    authority: Authority,
    taken: Arc<Mutex<ReceiverState>>,
    serving: AbortHandle,
    _folder: tempfile::TempDir,
}

impl Drop for WebhookReceiver {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl ReceivedWebhook {
    #[must_use]
    pub fn header(&self, name: &str) -> String {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
    }

    /// The event, verified with this secret.
    ///
    /// # Panics
    /// If the signature is invalid.
    #[must_use]
    pub fn verified(&self, secret: &str) -> Value {
        let webhook = Webhook::new(secret).expect("it is a secret of Standard Webhooks");
        webhook.verify(&self.body, &self.headers).expect("it is signed with this secret");
        serde_json::from_slice(&self.body).expect("it is JSON")
    }
}

impl WebhookReceiver {
    /// # Panics
    /// If it does not start.
    pub async fn start() -> Self {
        let folder = tempfile::Builder::new().prefix("gpuaas-receiver-").tempdir().expect("there is room");
        let authority = Authority::create(&folder.path().join("pki")).expect("an authority can be made");
        let certificate = authority.server_certificate("receiver").expect("it signs");
        let listener = TlsListener::bind(&certificate.certificate_path, &certificate.key_path).await;
        let listener = listener.expect("there is a port");
        let port = listener.port().expect("it listens");
        let taken: Arc<Mutex<ReceiverState>> = Arc::default();
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

    /// Sets the statuses of the next responses.
    pub fn answers(&self, statuses: &[u16]) {
        let statuses = statuses.iter().map(|status| StatusCode::from_u16(*status).expect("it is a status"));
        lock(&self.taken).answers.extend(statuses);
    }

    #[must_use]
    pub fn received(&self) -> Vec<ReceivedWebhook> {
        lock(&self.taken).received.clone()
    }

    /// Waits for this many messages of an event type, and returns them.
    ///
    /// # Panics
    /// If they are not received in time.
    pub async fn expect(&self, event: &str, count: usize) -> Vec<ReceivedWebhook> {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let is_one = |it: &ReceivedWebhook| {
                serde_json::from_slice::<Value>(&it.body).is_ok_and(|body| body["type"] == event)
            };
            let found: Vec<_> = self.received().into_iter().filter(is_one).collect();
            if found.len() >= count {
                return found;
            }
            let others = self.received();
            let others: Vec<_> = others
                .iter()
                .map(|it| (it.status, String::from_utf8_lossy(&it.body).chars().take(80).collect::<String>()))
                .collect();
            assert!(Instant::now() < until, "{} of {count} messages of {event} came: {others:#?}", found.len());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

async fn take(State(taken): State<Arc<Mutex<ReceiverState>>>, headers: HeaderMap, body: Bytes) -> StatusCode {
    let mut taken = lock(&taken);
    let status = taken.answers.pop_front().unwrap_or(StatusCode::NO_CONTENT);
    taken.received.push(ReceivedWebhook { headers, body, status });
    status
}

fn lock(taken: &Mutex<ReceiverState>) -> std::sync::MutexGuard<'_, ReceiverState> {
    taken.lock().unwrap_or_else(PoisonError::into_inner)
}
