//! Structured logs: one JSON object a line on standard error, with the fields of the specification (*Observability surface*).

use json_subscriber::JsonLayer;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::time::SystemTime;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// ractor's own spans live as long as its actors do.
const DEFAULT: &str = "info,ractor=warn,async_nats=warn,sqlx=warn";

/// Calls it an error when a server closes a connection that was just begun. The bus says what there is to say of a lost connection.
const NOISE: &str = "async_nats::connector=off";

/// Starts logging for this process. `RUST_LOG` narrows or widens it.
///
/// # Errors
/// Where logging was started before.
pub fn start() -> anyhow::Result<()> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(DEFAULT));
    let filter = filter.add_directive(NOISE.parse()?);
    let mut lines = JsonLayer::stderr();
    lines.with_timer("timestamp", SystemTime);
    lines.with_level("level");
    lines.with_target("target");
    // A request's or worker's fields stand beside the event's own: `service`, `correlation_id`, `org_id`, `resource_name`, ….
    lines.with_flattened_event();
    lines.with_top_level_flattened_span_list();
    tracing_subscriber::registry().with(filter).with(lines).try_init()?;
    Ok(())
}

/// A panic is one line, without a backtrace: symbolising it would hold up the thread that runs the actors (and its message is in the
/// entity's last error anyway).
pub fn short_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let text = crate::supervisor::panic_text(panic.payload());
        let at = panic.location().map(ToString::to_string).unwrap_or_default();
        tracing::error!(panic.at = at, "panicked: {text}");
    }));
}
