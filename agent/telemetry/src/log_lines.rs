//! Structured logs: one JSON object a line (specification, *Observability surface*).
//!
//! A line holds the event's own fields, then those of the enclosing spans, the innermost first; no name occurs twice. Inside a scope (a
//! span with a `correlation_id`: a request, an event, a command, a task) all required fields are present, `null` if they have no value: a
//! field is left out only outside of a scope.
//!
//! Spans that set a scope are of level ERROR: whatever the log filter, the remaining lines keep their ids.

use crate::HostFields;
use serde_json::{Value, to_string};
use std::fmt::{self, Write as _};
use std::io::Write;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::LookupSpan;

/// The fields of every line inside a scope, in addition to its correlation id.
const IN_SCOPE: [&str; 6] = ["trace_id", "span_id", "org_id", "project_id", "error_code", "resource_name"];

/// The prefix of fields for the export of spans only.
const NOT_LOGGED: &str = "otel.";

/// A layer that writes each line to what `make` returns, in one write.
pub struct LogLines<M> {
    make: M,
    service: &'static str,
    /// `"name":"value",` for each.
    host: String,
}

impl<M> LogLines<M> {
    /// `service`: the name if no span has another.
    pub fn new(make: M, service: &'static str, fields: &HostFields) -> Self {
        let mut host = String::new();
        for (name, value) in fields.fields() {
            push(&mut host, name, &json(value));
        }
        Self { make, service, host }
    }
}

/// Fields of a span or an event, written as JSON once.
#[derive(Default)]
struct Fields(Vec<(&'static str, String)>);

impl Fields {
    fn set(&mut self, field: &Field, json: String) {
        let name = field.name();
        if name.starts_with(NOT_LOGGED) {
            return;
        }
        match self.0.iter_mut().find(|(known, _)| *known == name) {
            Some((_, value)) => *value = json,
            None => self.0.push((name, json)),
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.set(field, json(&format!("{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.set(field, json(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.set(field, value.to_string());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field, value.to_string());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field, value.to_string());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        // A number that JSON cannot represent is null.
        self.set(field, Value::from(value).to_string());
    }
}

impl<S, M, W> Layer<S> for LogLines<M>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    M: Fn() -> W + 'static,
    W: Write,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields(Vec::with_capacity(attributes.fields().len()));
        attributes.record(&mut fields);
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(fields);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(fields) = span.extensions_mut().get_mut::<Fields>()
        {
            values.record(fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        for span in context.event_scope(event).into_iter().flatten() {
            if let Some(around) = span.extensions().get::<Fields>() {
                for (name, value) in &around.0 {
                    if fields.0.iter().all(|(known, _)| known != name) {
                        fields.0.push((name, value.clone()));
                    }
                }
            }
        }
        let line = self.line(event, &fields);
        // A failure to write the log cannot be logged.
        let _ = (self.make)().write_all(line.as_bytes());
    }
}

impl<M> LogLines<M> {
    fn line(&self, event: &Event<'_>, fields: &Fields) -> String {
        let has = |name: &str| fields.0.iter().any(|(known, _)| *known == name);
        let now = chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Micros, true);
        let mut line = String::with_capacity(512);
        let _ = write!(line, r#"{{"timestamp":"{now}","level":"{}","#, event.metadata().level());
        if !has("service") {
            push(&mut line, "service", &json(self.service));
        }
        line.push_str(&self.host);
        push(&mut line, "target", &json(event.metadata().target()));
        for (name, value) in &fields.0 {
            push(&mut line, name, value);
        }
        if has("correlation_id") {
            for name in IN_SCOPE.into_iter().filter(|name| !has(name)) {
                push(&mut line, name, "null");
            }
        }
        // The comma after the last field.
        line.pop();
        line.push_str("}\n");
        line
    }
}

/// Names are constants, and need no escaping.
fn push(line: &mut String, name: &str, json: &str) {
    let _ = write!(line, r#""{name}":{json},"#);
}

fn json(text: &str) -> String {
    to_string(text).unwrap_or_else(|_| "null".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::sync::{Arc, Mutex};
    use tracing::field::Empty;
    use tracing_subscriber::Registry;
    use tracing_subscriber::layer::SubscriberExt as _;

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

    /// The lines that `story` writes.
    fn lines_of(story: impl FnOnce()) -> Vec<Value> {
        let sink = Shared::default();
        let written = sink.clone();
        let host = HostFields { node_id: Some("n-1".to_owned()), ..HostFields::default() };
        let subscriber = Registry::default().with(LogLines::new(move || sink.clone(), "tests", &host));
        tracing::subscriber::with_default(subscriber, story);
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn log_line_has_event_and_span_fields_once() {
        let lines = lines_of(|| {
            let outer = tracing::error_span!("request", service = "api", attempt = 1_u64, org_id = Empty);
            let _outer = outer.enter();
            outer.record("org_id", "acme");
            let _inner = tracing::error_span!("command", attempt = 2_u64, otel.parent = "0000000000000000").entered();
            tracing::info!(attempt = 3_u64, ok = true, load = f64::NAN, "task \"started\"\n");
            tracing::info!("on");
        });
        let [first, second] = lines.as_slice() else { panic!("{lines:?}") };
        assert_eq!(first["message"], "task \"started\"\n");
        assert_eq!((&first["attempt"], &second["attempt"]), (&3.into(), &2.into()));
        assert_eq!(
            (&first["service"], &first["org_id"], &first["node_id"]),
            (&"api".into(), &"acme".into(), &"n-1".into())
        );
        assert_eq!((&first["level"], &first["ok"], &first["load"]), (&"INFO".into(), &true.into(), &Value::Null));
        assert!(first["timestamp"].as_str().unwrap().ends_with('Z'));
        assert!(first.get("otel.parent").is_none());
    }

    #[test]
    fn required_fields_are_present_in_a_scope_and_absent_outside() {
        let lines = lines_of(|| {
            tracing::info!("before any scope");
            let _scope = tracing::error_span!("request", correlation_id = "c-1", trace_id = Empty).entered();
            tracing::warn!(error_code = "unauthenticated", "who is there?");
        });
        let [outside, inside] = lines.as_slice() else { panic!("{lines:?}") };
        assert_eq!(outside["service"], "tests");
        assert!(outside.get("correlation_id").is_none() && outside.get("trace_id").is_none());
        for name in IN_SCOPE {
            assert!(inside.get(name).is_some(), "{name}");
        }
        assert_eq!((&inside["correlation_id"], &inside["error_code"]), (&"c-1".into(), &"unauthenticated".into()));
        assert!(inside["project_id"].is_null());
    }

    #[test]
    fn no_text_breaks_the_json_line() {
        let hostile = "a\"},{\n\r\u{0}\u{2028}\u{7f}😀";
        let lines = lines_of(|| tracing::info!(resource_name = hostile, what = ?hostile, "{hostile}"));
        let [line] = lines.as_slice() else { panic!("{lines:?}") };
        assert_eq!((&line["resource_name"], &line["message"]), (&hostile.into(), &hostile.into()));
    }
}
