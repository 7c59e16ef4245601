//! A log store for a test: it accepts batches over TLS as Loki's push API does, and responds as the test configures.

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::routing::post;
use local_servers::pki::Authority;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use test_host::TlsListener;
use tokio::task::AbortHandle;

/// A batch as it was received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceivedBatch {
    pub content_type: String,
    pub body: Bytes,
}

struct StoreState {
    received: Vec<ReceivedBatch>,
    answer: (StatusCode, String),
    /// A batch with this text is refused with 400.
    refused: Option<String>,
    /// The tenant and the `Authorization` without which a batch is refused with 401.
    required: Option<(String, String)>,
}

/// A running store. Dropping it stops it.
pub struct FakeLogStore {
    port: u16,
    authority: Authority,
    state: Arc<Mutex<StoreState>>,
    serving: AbortHandle,
    _folder: tempfile::TempDir,
}

impl Drop for FakeLogStore {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl FakeLogStore {
    /// # Panics
    /// If it does not start.
    pub async fn start() -> Self {
        let folder = tempfile::Builder::new().prefix("gpuaas-logs-").tempdir().expect("there is room");
        let authority = Authority::create(&folder.path().join("pki")).expect("an authority can be made");
        let certificate = authority.server_certificate("log-store").expect("it signs");
        let listener = TlsListener::bind(&certificate.certificate_path, &certificate.key_path).await;
        let listener = listener.expect("there is a port");
        let port = listener.port().expect("it listens");
        let state = StoreState {
            received: Vec::new(),
            answer: (StatusCode::NO_CONTENT, String::new()),
            refused: None,
            required: None,
        };
        let state = Arc::new(Mutex::new(state));
        let router = Router::new().route("/loki/api/v1/push", post(receive)).with_state(Arc::clone(&state));
        let serving = tokio::spawn(async move { axum::serve(listener, router).await }).abort_handle();
        Self { port, authority, state, serving, _folder: folder }
    }

    /// The value of `SVC_LOG_STORE_URL`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("https://localhost:{}", self.port)
    }

    #[must_use]
    pub fn authorities_path(&self) -> &Path {
        self.authority.certificate_path()
    }

    /// Sets the answer to further batches. A batch is stored with 204 alone.
    ///
    /// # Panics
    /// If it is no status.
    pub fn answer(&self, status: u16, text: &str) {
        self.state().answer = (StatusCode::from_u16(status).expect("it is a status"), text.to_owned());
    }

    /// Refuses batches with this text in their body.
    pub fn refuse_batches_with(&self, text: &str) {
        self.state().refused = Some(text.to_owned());
    }

    /// Refuses further batches without this tenant and this `Authorization`, as Loki with tenants behind a login does.
    pub fn require(&self, tenant: &str, authorization: &str) {
        self.state().required = Some((tenant.to_owned(), authorization.to_owned()));
    }

    /// The stored batches.
    #[must_use]
    pub fn received(&self) -> Vec<ReceivedBatch> {
        self.state().received.clone()
    }

    fn state(&self) -> std::sync::MutexGuard<'_, StoreState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn receive(State(state): State<Arc<Mutex<StoreState>>>, headers: HeaderMap, body: Bytes) -> (StatusCode, String) {
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((tenant, authorization)) = &state.required {
        let is_sent = |name: &str, wanted: &str| headers.get(name).is_some_and(|value| value == wanted);
        if !is_sent("x-scope-orgid", tenant) || !is_sent("authorization", authorization) {
            return (StatusCode::UNAUTHORIZED, "no org id\n".to_owned());
        }
    }
    if let Some(text) = &state.refused
        && String::from_utf8_lossy(&body).contains(text)
    {
        return (StatusCode::BAD_REQUEST, "entry for stream '{}' has timestamp too old".to_owned());
    }
    if state.answer.0 == StatusCode::NO_CONTENT {
        let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        state.received.push(ReceivedBatch { content_type: content_type.unwrap_or_default().to_owned(), body });
    }
    state.answer.clone()
}
