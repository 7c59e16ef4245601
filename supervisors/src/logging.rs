//! Structured logs: one JSON object a line on standard error, with the fields of the specification (*Observability surface*); and,
//! where it is configured, the spans of sampled traces for export.

use crate::traces::{self, TraceExporter};
use anyhow::Context;
use telemetry::{HostFields, LogLines};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// ractor's own spans live as long as its actors do.
const DEFAULT: &str = "info,ractor=warn,async_nats=warn,sqlx=warn";

/// The service of a log line outside of requests, workers and entities.
const SERVICE: &str = "control-plane";

/// The NATS client logs an error when a server closes a new connection; it is muted, since `cluster::nats` logs lost connections.
const NOISE: &str = "async_nats::connector=off";

/// Starts logging for this process. `RUST_LOG` filters it. Returns the exporter of spans, where one is configured.
///
/// # Errors
/// Where logging was started before, or a variable cannot be used.
pub fn start() -> anyhow::Result<Option<TraceExporter>> {
    let environment = |name: &str| std::env::var(name).ok();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(DEFAULT));
    let filter = filter.add_directive(NOISE.parse()?);
    let lines = LogLines::new(std::io::stderr, SERVICE, &host_fields(environment)?);
    let (collecting, traces) = traces::configured(environment)?.unzip();
    tracing_subscriber::registry().with(filter).with(lines).with(collecting).try_init()?;
    Ok(traces)
}

/// The host fields of every line. A host with a role must have a name.
fn host_fields(environment: impl Fn(&str) -> Option<String>) -> anyhow::Result<HostFields> {
    let mut fields = HostFields::gather(environment)?;
    if fields.host_role.is_some() && fields.host_name.is_none() {
        let name = nix::unistd::gethostname().context("SVC_HOST_NAME is not set, and the host has no name")?;
        fields.host_name = name.into_string().ok();
    }
    Ok(fields)
}

/// Logs a panic as one line, without a backtrace: symbolising it would block the thread that runs the actors (and its message is in the
/// entity's last error anyway).
pub fn short_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let text = crate::supervisor::panic_text(panic.payload());
        let at = panic.location().map(ToString::to_string).unwrap_or_default();
        tracing::error!(panic.at = at, "panicked: {text}");
    }));
}
