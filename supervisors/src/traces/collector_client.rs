//! The HTTP client of the trace exporter. It notes why the collector took no spans, which the exporter's own error does not say.

use axum::body::Bytes;
use axum::http::{Request, Response, StatusCode};
use edge::outbound::http_client::{error_chain, is_tls_failure, is_web_page};
use opentelemetry_http::{HttpClient, HttpError};
use reqwest::Client;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use strum::{EnumIter, IntoStaticStr};

/// Why spans were dropped. The reason decides who acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(super) enum DropReason {
    /// More spans ended than could be sent.
    QueueFull,
    /// The collector refuses the headers of `OTEL_EXPORTER_OTLP_HEADERS`.
    Credentials,
    /// There is no collector at the address, or its certificate is not by an authority of the system or for that name.
    Address,
    /// The collector takes no more for now.
    RateLimit,
    /// The collector refuses these spans.
    Batch,
    /// The collector, or a proxy in front of it, takes fewer spans at once.
    BatchSize,
    /// The collector does not answer, or fails.
    Outage,
}

impl DropReason {
    /// The value of the metric's label.
    pub(super) fn name(self) -> &'static str {
        self.into()
    }

    /// Of an answer; `None` where the collector took the spans.
    fn of_answer(status: StatusCode, is_page: bool) -> Option<Self> {
        Some(match status {
            // Another service answers with a page for people.
            status if status.is_success() && is_page => Self::Address,
            status if status.is_success() => return None,
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::PROXY_AUTHENTICATION_REQUIRED => {
                Self::Credentials
            }
            StatusCode::TOO_MANY_REQUESTS => Self::RateLimit,
            StatusCode::PAYLOAD_TOO_LARGE => Self::BatchSize,
            StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY if is_page => Self::Address,
            StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY => Self::Batch,
            StatusCode::REQUEST_TIMEOUT => Self::Outage,
            status if status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED => Self::Outage,
            _ => Self::Address,
        })
    }
}

/// Why the last export failed.
#[derive(Clone, Debug)]
pub(super) struct ExportFailure {
    pub(super) reason: DropReason,
    /// For an operator.
    pub(super) text: String,
}

/// Where the client notes the failure of the last export.
pub(super) type FailureNote = Arc<Mutex<Option<ExportFailure>>>;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct CollectorClient {
    pub(super) client: Client,
    pub(super) note: FailureNote,
}

impl CollectorClient {
    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (failure, outcome) = match self.client.send_bytes(request).await {
            Ok(response) => {
                let (status, is_page) = (response.status(), is_web_page(response.headers()));
                let page = if is_page { " with a web page" } else { "" };
                let failure = DropReason::of_answer(status, is_page)
                    .map(|reason| ExportFailure { reason, text: format!("it answered {status}{page}") });
                match &failure {
                    Some(ExportFailure { text, .. }) if status.is_success() => {
                        let error = HttpError::from(text.clone());
                        (failure, Err(error))
                    }
                    Some(_) | None => (failure, Ok(response)),
                }
            }
            Err(error) => {
                let reason = if is_tls_failure(&*error) { DropReason::Address } else { DropReason::Outage };
                let text = match error.downcast::<reqwest::Error>() {
                    Ok(error) => error_chain(*error),
                    Err(error) => error.to_string(),
                };
                (Some(ExportFailure { reason, text: text.clone() }), Err(text.into()))
            }
        };
        *self.note.lock().unwrap_or_else(PoisonError::into_inner) = failure;
        outcome
    }
}

impl HttpClient for CollectorClient {
    fn send_bytes<'a, 'b>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(self.send(request))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Router;
    use axum::http::header::CONTENT_TYPE;
    use axum::routing::post;
    use std::net::SocketAddr;
    use tokio::net::TcpListener;

    /// What an export to this address notes.
    async fn noted(url: String) -> Option<(DropReason, String)> {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let note = FailureNote::default();
        let client = edge::outbound::http_client::client_builder(None).unwrap().build().unwrap();
        let client = CollectorClient { client, note: Arc::clone(&note) };
        let sent = client.send_bytes(Request::post(url).body(Bytes::new()).unwrap()).await;
        let failure = note.lock().unwrap().clone();
        let is_taken = sent.is_ok_and(|response| response.status().is_success());
        assert_eq!(is_taken, failure.is_none());
        failure.map(|failure| (failure.reason, failure.text))
    }

    async fn collector(status: u16, content_type: &'static str) -> SocketAddr {
        let status = StatusCode::from_u16(status).unwrap();
        let answer = move || async move { (status, [(CONTENT_TYPE, content_type)], "") };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, Router::new().route("/v1/traces", post(answer))).await });
        address
    }

    #[tokio::test]
    async fn each_refusal_of_a_collector_has_its_reason() {
        const PROTOBUF: &str = "application/x-protobuf";
        let answers = [
            (200, PROTOBUF, None),
            (200, "text/html; charset=utf-8", Some(DropReason::Address)),
            (401, PROTOBUF, Some(DropReason::Credentials)),
            (403, "text/html", Some(DropReason::Credentials)),
            (404, "text/plain", Some(DropReason::Address)),
            (307, PROTOBUF, Some(DropReason::Address)),
            (501, PROTOBUF, Some(DropReason::Address)),
            (429, PROTOBUF, Some(DropReason::RateLimit)),
            (413, PROTOBUF, Some(DropReason::BatchSize)),
            (400, PROTOBUF, Some(DropReason::Batch)),
            (400, "text/html", Some(DropReason::Address)),
            (503, "text/html", Some(DropReason::Outage)),
            (408, PROTOBUF, Some(DropReason::Outage)),
        ];
        for (status, content_type, wanted) in answers {
            let address = collector(status, content_type).await;
            let noted = noted(format!("http://{address}/v1/traces")).await;
            assert_eq!(noted.as_ref().map(|noted| noted.0), wanted, "{status} {content_type}: {noted:?}");
        }
    }

    #[tokio::test]
    async fn collector_that_does_not_listen_is_an_outage_and_one_without_tls_a_wrong_address() {
        // It has its port and accepts no connection.
        let closed = tokio::net::TcpSocket::new_v4().unwrap();
        closed.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = closed.local_addr().unwrap();
        let (reason, text) = noted(format!("http://user:secret@{address}/v1/traces")).await.unwrap();
        assert_eq!(reason, DropReason::Outage);
        assert!(text.contains("refused") && !text.contains("secret"), "{text}");
        let plain = collector(200, "text/plain").await;
        let (reason, text) = noted(format!("https://{plain}/v1/traces")).await.unwrap();
        assert_eq!(reason, DropReason::Address, "{text}");
    }
}
