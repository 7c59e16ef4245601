//! A registry for tests: over TLS, with requests recorded and answers by a function.

use axum::body::Body;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use local_servers::pki::Authority;
use std::sync::{Arc, Mutex};
use test_host::TlsListener;
use tokio::task::AbortHandle;

/// An answer to a path, with the credential that was sent.
pub(crate) type Answer = dyn Fn(&str, Option<&str>) -> Response + Send + Sync;

/// Paths with the credentials that were sent.
type Requests = Arc<Mutex<Vec<(String, Option<String>)>>>;

/// A running registry. Dropping it stops it.
pub(crate) struct FakeRegistry {
    pub(crate) port: u16,
    requests: Requests,
    serving: AbortHandle,
}

impl Drop for FakeRegistry {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl FakeRegistry {
    pub(crate) async fn start(authority: &Authority, answer: Box<Answer>) -> Self {
        let certificate = authority.server_certificate("registry").unwrap();
        let listener = TlsListener::bind(&certificate.certificate_path, &certificate.key_path).await.unwrap();
        let port = listener.port().unwrap();
        let requests = Requests::default();
        let (recorded, answer) = (Arc::clone(&requests), Arc::<Answer>::from(answer));
        let router = axum::Router::new().fallback(move |request: Request| {
            let path = request.uri().path().to_owned();
            let credential = request.headers().get(header::AUTHORIZATION).map(|it| it.to_str().unwrap().to_owned());
            recorded.lock().unwrap().push((path.clone(), credential.clone()));
            let answer = answer(&path, credential.as_deref());
            async move {
                if answer.extensions().get::<Silence>().is_some() {
                    std::future::pending::<()>().await;
                }
                answer
            }
        });
        let serving = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() }).abort_handle();
        Self { port, requests, serving }
    }

    pub(crate) fn url(&self) -> String {
        format!("https://localhost:{}", self.port)
    }

    /// The requests so far, with their credentials.
    pub(crate) fn requests(&self) -> Vec<(String, Option<String>)> {
        self.requests.lock().unwrap().clone()
    }
}

/// The answer to a request without a credential.
pub(crate) fn challenge(scheme: &str) -> Response {
    (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, scheme.to_owned())]).into_response()
}

pub(crate) fn redirect(to: String) -> Response {
    (StatusCode::TEMPORARY_REDIRECT, [(header::LOCATION, to)]).into_response()
}

#[derive(Clone)]
struct Silence;

/// No answer, on a connection that is open.
pub(crate) fn silence() -> Response {
    axum::Extension(Silence).into_response()
}

/// A body that begins, and never ends.
pub(crate) fn endless() -> Response {
    let begun = futures::stream::iter([Ok::<_, std::io::Error>("{\"begun\":")]);
    Body::from_stream(futures::StreamExt::chain(begun, futures::stream::pending())).into_response()
}
