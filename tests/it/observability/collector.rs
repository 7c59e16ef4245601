//! A minimal OpenTelemetry collector: OTLP over HTTP with protobuf bodies, decoded with the definitions that the
//! OpenTelemetry project generates.

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue, any_value};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use prost::Message as _;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tests::cluster::WAIT_TIMEOUT;
use tokio::net::TcpListener;

/// A collector in this process.
pub(super) struct Collector {
    address: SocketAddr,
    spans: Arc<Mutex<Vec<Span>>>,
}

/// A received span; ids in hexadecimal.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub(super) trace: String,
    pub(super) id: String,
    pub(super) parent: String,
    pub(super) name: String,
    pub(super) is_server: bool,
    /// The process that sent it.
    pub(super) member: String,
    pub(super) began: u64,
    pub(super) ended: u64,
    attributes: Vec<KeyValue>,
}

impl Span {
    pub(super) fn attribute(&self, name: &str) -> Option<String> {
        attribute(&self.attributes, name)
    }
}

impl Collector {
    pub(super) async fn start() -> Self {
        let spans = Arc::new(Mutex::new(Vec::new()));
        let router = Router::new().route("/v1/traces", post(take)).with_state(Arc::clone(&spans));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { address, spans }
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The spans of a trace, once spans with these names are among them.
    pub(super) async fn spans_of(&self, trace: &str, names: &[&str]) -> Vec<Span> {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let found: Vec<Span> =
                self.spans.lock().unwrap().iter().filter(|span| span.trace == trace).cloned().collect();
            let there: BTreeSet<_> = found.iter().map(|span| span.name.as_str()).collect();
            if names.iter().all(|name| there.contains(name)) {
                return found;
            }
            assert!(Instant::now() < until, "of {names:?} only {there:?} came");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

async fn take(State(spans): State<Arc<Mutex<Vec<Span>>>>, headers: HeaderMap, body: Bytes) -> StatusCode {
    assert_eq!(headers[header::CONTENT_TYPE], "application/x-protobuf");
    let request = ExportTraceServiceRequest::decode(body).expect("OTLP");
    for of_resource in request.resource_spans {
        let resource = of_resource.resource.expect("spans have a resource").attributes;
        assert_eq!(attribute(&resource, "service.name").as_deref(), Some("gpuaas"));
        let member = attribute(&resource, "service.instance.id").expect("a member says its name");
        let found = of_resource.scope_spans.into_iter().flat_map(|scope| scope.spans).map(|span| Span {
            trace: hex::encode(&span.trace_id),
            id: hex::encode(&span.span_id),
            parent: hex::encode(&span.parent_span_id),
            is_server: span.kind() == SpanKind::Server,
            name: span.name,
            member: member.clone(),
            began: span.start_time_unix_nano,
            ended: span.end_time_unix_nano,
            attributes: span.attributes,
        });
        spans.lock().unwrap().extend(found);
    }
    StatusCode::OK
}

fn attribute(attributes: &[KeyValue], name: &str) -> Option<String> {
    let value = attributes.iter().find(|pair| pair.key == name)?.value.clone()?;
    match value {
        AnyValue { value: Some(any_value::Value::StringValue(text)) } => Some(text),
        AnyValue { value: Some(any_value::Value::IntValue(number)) } => Some(number.to_string()),
        AnyValue { .. } => None,
    }
}
