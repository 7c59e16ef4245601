//! Structured logs: one JSON object for each event on standard error, the fields of its spans beside its own.
//!
//! Fields as in the specification's section "Observability surface": `timestamp`, `level`, `service`, `node_id`, and where
//! there is one `correlation_id`, `task_id`, `allocation_id`, `error_code`. Values that could be secrets are typed and never
//! become fields.

use std::fmt;
use std::io::Write;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::{SubscriberInitExt as _, TryInitError};
use tracing_subscriber::{EnvFilter, Registry};
use uuid::Uuid;

/// Sends all events of the process to standard error. `filter` is in the syntax of `RUST_LOG`.
///
/// # Errors
/// The process has a subscriber already.
pub fn init(filter: &str, node_id: Option<Uuid>) -> Result<(), TryInitError> {
    let filter = EnvFilter::try_new(filter).unwrap_or_else(|_| EnvFilter::new("info"));
    Registry::default().with(filter).with(JsonLines::new(std::io::stderr, node_id)).try_init()
}

/// A layer that writes JSON lines to what `make` returns.
pub struct JsonLines<M> {
    make: M,
    node_id: Option<Uuid>,
}

impl<M> JsonLines<M> {
    /// Lines about one node; without it before the configuration is read.
    pub fn new(make: M, node_id: Option<Uuid>) -> Self {
        Self { make, node_id }
    }
}

/// Fields of a span, kept with it.
struct SpanFields(Map<String, Value>);

impl<S, M, W> Layer<S> for JsonLines<M>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    M: Fn() -> W + 'static,
    W: Write,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Map::new();
        attributes.record(&mut Collect(&mut fields));
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(SpanFields(fields));
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(fields) = span.extensions_mut().get_mut::<SpanFields>()
        {
            values.record(&mut Collect(&mut fields.0));
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut line = Map::new();
        let now = chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Micros, true);
        line.insert("timestamp".to_owned(), now.into());
        line.insert("level".to_owned(), event.metadata().level().as_str().into());
        line.insert("service".to_owned(), "node-agent".into());
        if let Some(node_id) = self.node_id {
            line.insert("node_id".to_owned(), node_id.to_string().into());
        }
        line.insert("target".to_owned(), event.metadata().target().into());
        for span in context.event_scope(event).into_iter().flatten() {
            if let Some(fields) = span.extensions().get::<SpanFields>() {
                for (name, value) in &fields.0 {
                    // The innermost span comes first, and wins.
                    line.entry(name.clone()).or_insert_with(|| value.clone());
                }
            }
        }
        event.record(&mut Collect(&mut line));
        let mut text = Value::Object(line).to_string();
        text.push('\n');
        // A log that cannot be written has nowhere to say so.
        let _ = (self.make)().write_all(text.as_bytes());
    }
}

struct Collect<'a>(&'a mut Map<String, Value>);

impl Collect<'_> {
    fn insert(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

impl Visit for Collect<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.insert(field, format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.insert(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.insert(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.insert(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.insert(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.insert(field, value);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn an_event_is_one_json_line_with_the_fields_of_its_spans() {
        let sink = Shared::default();
        let written = sink.clone();
        let node = Uuid::from_u128(7);
        let subscriber = Registry::default().with(JsonLines::new(move || sink.clone(), Some(node)));
        tracing::subscriber::with_default(subscriber, || {
            let span = tracing::info_span!("task", task_id = %Uuid::from_u128(8), attempt = 1_u64);
            let _entered = span.enter();
            tracing::info!(attempt = 2_u64, "task \"started\"\n");
        });
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.lines().count(), 1);
        let line: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(line["level"], "INFO");
        assert_eq!(line["service"], "node-agent");
        assert_eq!(line["node_id"], node.to_string());
        assert_eq!(line["task_id"], Uuid::from_u128(8).to_string());
        assert_eq!(line["attempt"], 2);
        assert_eq!(line["message"], "task \"started\"\n");
        assert!(line["timestamp"].as_str().unwrap().ends_with('Z'));
    }
}
