//! Structured logs: one JSON object a line on standard error, with the fields of the specification (*Observability surface*); and,
//! where it is configured, the spans of sampled traces for export.

use crate::traces::{self, TraceExporter};
use anyhow::Context;
use telemetry::{HostFields, LogLines};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Registry, reload};

/// ractor's own spans live as long as its actors do.
const DEFAULT: &str = "info,ractor=warn,async_nats=warn,sqlx=warn";

/// The service of a log line outside of requests, workers and entities.
const SERVICE: &str = "control-plane";

/// The NATS client logs an error when a server closes a new connection; it is muted, since `cluster::nats` logs lost connections.
const NOISE: &str = "async_nats::connector=off";

/// The filter of this process's logs, which can be replaced while it runs.
#[derive(Clone)]
pub struct LogFilter(reload::Handle<EnvFilter, Registry>);

impl LogFilter {
    /// Filters by these directives, as those of `RUST_LOG`, from now on; by the default ones where they are blank.
    ///
    /// # Errors
    /// Where they are no filter; the one of before stays.
    pub fn replace(&self, directives: &str) -> anyhow::Result<()> {
        let directives = if directives.trim().is_empty() { DEFAULT } else { directives };
        let filter = EnvFilter::try_new(directives).with_context(|| wrong_filter(directives))?;
        Ok(self.0.reload(filter.add_directive(NOISE.parse()?))?)
    }
}

fn wrong_filter(filter: &str) -> String {
    format!("RUST_LOG is {filter:?}, which is no filter such as info")
}

/// Starts logging for this process. `RUST_LOG` filters it. Returns the filter, and the exporter of spans, where one is configured.
///
/// # Errors
/// Where logging was started before, or a variable cannot be used.
pub fn start() -> anyhow::Result<(LogFilter, Option<TraceExporter>)> {
    let environment = |name: &str| std::env::var(name).ok();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(DEFAULT));
    let (filter, handle) = reload::Layer::new(filter.add_directive(NOISE.parse()?));
    let lines = LogLines::new(std::io::stderr, SERVICE, &host_fields(environment)?);
    let (collecting, traces) = traces::configured(environment)?.unzip();
    tracing_subscriber::registry().with(filter).with(lines).with(collecting).try_init()?;
    Ok((LogFilter(handle), traces))
}

/// Checks the variables of logs and traces, and starts nothing.
///
/// # Errors
/// Names the variable that cannot be used.
pub fn check(environment: impl Fn(&str) -> Option<String>) -> anyhow::Result<()> {
    if let Some(filter) = environment("RUST_LOG").filter(|filter| !filter.trim().is_empty()) {
        EnvFilter::try_new(&filter).with_context(|| wrong_filter(&filter))?;
    }
    host_fields(&environment)?;
    traces::check(environment)
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
