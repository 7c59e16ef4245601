//! Exports the spans of sampled traces to a collector (OTLP over HTTP), where `OTEL_EXPORTER_OTLP_ENDPOINT` names one.
//!
//! A span's ids are created where its work begins and are propagated (logs, NATS, outbox, agents), so that exported spans match the
//! logs. A span is exported when it has the field `otel.parent`, which only spans of sampled traces have. Spans wait in a
//! bounded queue; those that do not fit, or that no collector accepts, are counted and dropped: the service never waits for a collector.

mod collector_client;

use anyhow::Context as _;
use collector_client::{CollectorClient, DropReason, ExportFailure, FailureNote};
use edge::outbound::http_client::client_builder;
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue, Value};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanExporter as _, SpanLinks};
use persistence::outage_log::RetryLog;
use prometheus::{IntCounter, IntCounterVec, Opts, Registry};
use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime};
use strum::IntoEnumIterator as _;
use telemetry::Sampling;
use tokio::sync::{Mutex, mpsc};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::LookupSpan;
use wire::address::CollectorUrl;

/// Spans that may wait for the collector.
const QUEUE: usize = 8192;
/// Spans in one request.
const BATCH: usize = 512;
/// How long the first span of a batch waits for others.
const LINGER: Duration = Duration::from_millis(500);
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// The timeout of the last export at the shutdown.
const FINAL_EXPORT_TIMEOUT: Duration = Duration::from_secs(2);

const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"];
const RATIO: &str = "OTEL_TRACES_SAMPLER_ARG";

/// The tracing layer that collects the spans of sampled traces as they end.
pub struct SpanCollector {
    to: mpsc::Sender<SpanData>,
    /// For want of room in the queue.
    dropped: IntCounter,
    scope: InstrumentationScope,
}

/// Sends the collected spans.
pub struct TraceExporter {
    from: Mutex<mpsc::Receiver<SpanData>>,
    exporter: SpanExporter,
    /// Of the exporter's client.
    note: FailureNote,
    retries: RetryLog,
    exported: IntCounter,
    dropped: IntCounterVec,
    pub sampling: Sampling,
}

/// The collecting layer and the exporter, where a collector is configured. The exporter reads endpoint, headers and timeout from the
/// `OTEL_EXPORTER_OTLP_*` variables itself.
///
/// # Errors
/// Names the variable that cannot be used.
pub fn configured(
    environment: impl Fn(&str) -> Option<String>,
) -> anyhow::Result<Option<(SpanCollector, TraceExporter)>> {
    let set = |name: &str| environment(name).filter(|value| !value.trim().is_empty());
    if ENDPOINTS.iter().all(|name| set(name).is_none()) {
        return Ok(None);
    }
    check_addresses(&environment)?;
    let ratio = sampling_ratio(&environment)?;
    let client = client_builder(None).map_err(anyhow::Error::msg)?.timeout(EXPORT_TIMEOUT).build()?;
    let note = FailureNote::default();
    let mut exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(CollectorClient { client, note: Arc::clone(&note) })
        .with_protocol(Protocol::HttpBinary)
        .with_timeout(EXPORT_TIMEOUT)
        .build()
        .with_context(|| format!("{} cannot be used", ENDPOINTS[0]))?;
    exporter.set_resource(&resource(set("OTEL_SERVICE_NAME"), set("SVC_MEMBER_NAME")));
    let (to, from) = mpsc::channel(QUEUE);
    let dropped = dropped_spans()?;
    let exported = IntCounter::new("trace_spans_exported_total", "Spans that the collector accepted.")?;
    let scope = InstrumentationScope::builder("gpuaas").with_version(env!("CARGO_PKG_VERSION")).build();
    let of_queue = dropped.with_label_values(&[DropReason::QueueFull.name()]);
    let collecting = SpanCollector { to, dropped: of_queue, scope };
    let (from, sampling) = (Mutex::new(from), Sampling::of_ratio(ratio));
    let retries = RetryLog::new("send spans to the trace collector");
    Ok(Some((collecting, TraceExporter { from, exporter, note, retries, exported, dropped, sampling })))
}

/// With each reason from the start, so that an increase is seen from the first.
fn dropped_spans() -> prometheus::Result<IntCounterVec> {
    let opts = Opts::new(
        "trace_spans_dropped_total",
        "Spans that were not exported, by the reason: credentials and address are to be corrected in this service's settings.",
    );
    let dropped = IntCounterVec::new(opts, &["reason"])?;
    for reason in DropReason::iter() {
        dropped.with_label_values(&[reason.name()]);
    }
    Ok(dropped)
}

/// Checks the variables of the sampler and of the collector's address.
///
/// # Errors
/// Where one of them cannot be used.
pub fn check(environment: impl Fn(&str) -> Option<String>) -> anyhow::Result<()> {
    check_addresses(&environment)?;
    sampling_ratio(&environment).map(drop)
}

/// The library adds `/v1/traces` to the first, and takes a text that is no address as none.
fn check_addresses(environment: &impl Fn(&str) -> Option<String>) -> anyhow::Result<()> {
    for name in ENDPOINTS {
        if let Some(text) = environment(name).filter(|value| !value.trim().is_empty()) {
            CollectorUrl::parse(&text).map_err(|error| anyhow::anyhow!("{name}: {error}"))?;
        }
    }
    Ok(())
}

fn sampling_ratio(environment: &impl Fn(&str) -> Option<String>) -> anyhow::Result<f64> {
    let Some(text) = environment(RATIO).filter(|value| !value.trim().is_empty()) else { return Ok(1.0) };
    let ratio = text.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio));
    ratio.with_context(|| format!("{RATIO} is {text:?}; it must be the share of traces to sample, 0 to 1"))
}

fn resource(service: Option<String>, member: Option<String>) -> Resource {
    let name = service.unwrap_or_else(|| "gpuaas".to_owned());
    let member = member.map(|member| KeyValue::new("service.instance.id", member));
    Resource::builder()
        .with_service_name(name)
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .with_attributes(member)
        .build()
}

impl TraceExporter {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(&self, registry: &Registry) -> Result<(), prometheus::Error> {
        registry.register(Box::new(self.exported.clone()))?;
        registry.register(Box::new(self.dropped.clone()))
    }

    /// Sends spans as they come.
    ///
    /// # Errors
    /// Never: what cannot be sent is dropped.
    pub async fn run(&self) -> anyhow::Result<()> {
        let mut from = self.from.lock().await;
        loop {
            let Some(first) = from.recv().await else { std::future::pending().await };
            tokio::time::sleep(LINGER).await;
            self.send(batch(first, &mut from)).await;
        }
    }

    /// Sends the remaining spans, within a short timeout.
    pub async fn finish(&self) {
        let sending = async {
            let mut from = self.from.lock().await;
            while let Ok(first) = from.try_recv() {
                self.send(batch(first, &mut from)).await;
            }
        };
        if tokio::time::timeout(FINAL_EXPORT_TIMEOUT, sending).await.is_err() {
            tracing::info!("the last spans did not reach the collector in time");
        }
    }

    /// Exports a batch.
    async fn send(&self, spans: Vec<SpanData>) {
        let count = spans.len() as u64;
        match self.exporter.export(spans).await {
            Ok(()) => {
                self.exported.inc_by(count);
                self.retries.succeeded();
            }
            Err(error) => {
                let noted = self.note.lock().unwrap_or_else(PoisonError::into_inner).take();
                // It took longer than it may, or no request could be made.
                let unknown = || ExportFailure { reason: DropReason::Outage, text: error.to_string() };
                let failure = noted.unwrap_or_else(unknown);
                self.dropped.with_label_values(&[failure.reason.name()]).inc_by(count);
                self.retries.failed(&format!("{}: {}", failure.reason.name(), failure.text));
            }
        }
    }
}

fn batch(first: SpanData, from: &mut mpsc::Receiver<SpanData>) -> Vec<SpanData> {
    let mut spans = vec![first];
    while spans.len() < BATCH
        && let Ok(span) = from.try_recv()
    {
        spans.push(span);
    }
    spans
}

/// A span of a sampled trace that has not ended.
struct OpenSpan {
    began: SystemTime,
    fields: SpanFields,
}

/// The fields of a span.
#[derive(Default)]
struct SpanFields {
    trace_id: Option<TraceId>,
    span_id: Option<SpanId>,
    parent: Option<SpanId>,
    is_server: bool,
    failed: bool,
    attributes: Vec<KeyValue>,
}

impl SpanFields {
    fn text(&mut self, name: &'static str, text: String) {
        match name {
            "trace_id" => self.trace_id = TraceId::from_hex(&text).ok(),
            "span_id" => self.span_id = SpanId::from_hex(&text).ok(),
            "otel.parent" => self.parent = SpanId::from_hex(&text).ok(),
            "otel.kind" => self.is_server = text == "server",
            _ => self.attributes.push(KeyValue::new(name, text)),
        }
    }
}

impl Visit for SpanFields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.text(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.text(field.name(), value.to_owned());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "http.response.status_code" {
            self.failed |= value >= 500;
        }
        self.attributes.push(KeyValue::new(field.name(), Value::I64(value.cast_signed())));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.attributes.push(KeyValue::new(field.name(), value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.attributes.push(KeyValue::new(field.name(), value));
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for SpanCollector {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        // A span that is not sampled costs only the lookup of a field name.
        if attributes.fields().field("otel.parent").is_none() {
            return;
        }
        let mut fields = SpanFields::default();
        attributes.record(&mut fields);
        if let (Some(_), Some(span)) = (fields.parent, context.span(id)) {
            span.extensions_mut().insert(OpenSpan { began: SystemTime::now(), fields });
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(open) = span.extensions_mut().get_mut::<OpenSpan>()
        {
            values.record(&mut open.fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        if *event.metadata().level() == Level::ERROR
            && let Some(span) = context.event_span(event)
            && let Some(open) = span.extensions_mut().get_mut::<OpenSpan>()
        {
            open.fields.failed = true;
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        let Some(OpenSpan { began, fields }) = span.extensions_mut().remove::<OpenSpan>() else { return };
        let (Some(trace_id), Some(span_id), Some(parent)) = (fields.trace_id, fields.span_id, fields.parent) else {
            return;
        };
        let ended = SpanData {
            span_context: SpanContext::new(trace_id, span_id, TraceFlags::SAMPLED, false, TraceState::NONE),
            parent_span_id: parent,
            parent_span_is_remote: fields.is_server,
            span_kind: if fields.is_server { SpanKind::Server } else { SpanKind::Internal },
            name: span.name().into(),
            start_time: began,
            end_time: SystemTime::now(),
            attributes: fields.attributes,
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: if fields.failed { Status::error("") } else { Status::Unset },
            instrumentation_scope: self.scope.clone(),
        };
        if self.to.try_send(ended).is_err() {
            self.dropped.inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use telemetry::SpanContext;
    use tracing_subscriber::layer::SubscriberExt as _;

    fn collecting(queue: usize) -> (SpanCollector, mpsc::Receiver<SpanData>) {
        let (to, from) = mpsc::channel(queue);
        let dropped = IntCounter::new("dropped", "dropped").unwrap();
        (SpanCollector { to, dropped, scope: InstrumentationScope::builder("tests").build() }, from)
    }

    fn work(trace: SpanContext) -> tracing::Span {
        tracing::error_span!(
            "work",
            trace_id = %trace.trace_id(),
            span_id = %trace.span_id(),
            otel.parent = trace.parent_to_export(),
            http.response.status_code = tracing::field::Empty,
        )
    }

    #[test]
    fn address_of_a_collector_that_is_nearly_right_is_named() {
        for good in ["http://otel:4318", "https://otel.example/tenant"] {
            check(|name| (name == ENDPOINTS[0]).then(|| good.to_owned())).unwrap();
        }
        for wrong in
            ["otel:4318", "grpc://otel:4317", "\"http://otel:4318\"", "http://otel:4318 ", "http://0.0.0.0:4318"]
        {
            for endpoint in ENDPOINTS {
                let error = check(|name| (name == endpoint).then(|| wrong.to_owned())).unwrap_err().to_string();
                assert!(error.starts_with(&format!("{endpoint}: ")) && error.contains("http://collector"), "{error}");
            }
        }
    }

    #[test]
    fn only_spans_of_sampled_traces_are_collected_and_under_their_own_ids() {
        let (collecting, mut spans) = collecting(8);
        let looked_at = SpanContext::begin(Sampling::of_ratio(1.0)).child();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(collecting), || {
            work(looked_at).record("http.response.status_code", 503_u16);
            drop(work(SpanContext::begin(Sampling::NEVER)));
            drop(tracing::error_span!("nothing of ours", trace_id = "x"));
        });
        let span = spans.try_recv().unwrap();
        assert_eq!(span.span_context.trace_id().to_string(), looked_at.trace_id().to_string());
        assert_eq!(span.span_context.span_id().to_string(), looked_at.span_id().to_string());
        assert_ne!(span.parent_span_id, SpanId::INVALID);
        assert_eq!((span.name.as_ref(), span.status), ("work", Status::error("")));
        assert!(spans.try_recv().is_err());
    }

    #[test]
    fn spans_above_the_queue_bound_are_dropped_and_counted() {
        let (collecting, _spans) = collecting(2);
        let dropped = collecting.dropped.clone();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(collecting), || {
            for _ in 0..5 {
                drop(work(SpanContext::begin(Sampling::of_ratio(1.0))));
            }
        });
        assert_eq!(dropped.get(), 3);
    }

    #[tokio::test]
    async fn spans_that_a_collector_refuses_are_counted_by_the_reason() {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let answers = || async { axum::http::StatusCode::UNAUTHORIZED };
        let router = axum::Router::new().route("/v1/traces", axum::routing::post(answers));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });

        let note = FailureNote::default();
        let client = client_builder(None).unwrap().timeout(EXPORT_TIMEOUT).build().unwrap();
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(CollectorClient { client, note: Arc::clone(&note) })
            .with_endpoint(format!("http://{address}/v1/traces"))
            .with_protocol(Protocol::HttpBinary)
            .build()
            .unwrap();
        let (collecting, mut spans) = collecting(8);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(collecting), || {
            (0..3).for_each(|_| drop(work(SpanContext::begin(Sampling::of_ratio(1.0)))));
        });
        let ended = batch(spans.try_recv().unwrap(), &mut spans);
        let exporting = TraceExporter {
            from: Mutex::new(spans),
            exporter,
            note,
            retries: RetryLog::new("send spans"),
            exported: IntCounter::new("exported", "exported").unwrap(),
            dropped: dropped_spans().unwrap(),
            sampling: Sampling::NEVER,
        };
        exporting.send(ended).await;
        let dropped = DropReason::iter().map(|reason| {
            let count = exporting.dropped.with_label_values(&[reason.name()]).get();
            (reason.name(), count)
        });
        let dropped: Vec<_> = dropped.filter(|(_, count)| *count > 0).collect();
        assert_eq!((dropped, exporting.exported.get()), (vec![("credentials", 3)], 0));
    }

    #[test]
    fn export_is_off_by_default_and_a_ratio_above_one_is_refused() {
        assert!(configured(|_| None).unwrap().is_none());
        let wrong = configured(|name| match name {
            "OTEL_EXPORTER_OTLP_ENDPOINT" => Some("http://127.0.0.1:1".to_owned()),
            RATIO => Some("7".to_owned()),
            _ => None,
        });
        assert!(wrong.err().unwrap().to_string().contains(RATIO));
    }
}
