//! Structured logs: one JSON object a line on standard error, with the fields of the specification (*Observability surface*).

use std::convert::Infallible;
use std::sync::OnceLock;
use std::time::Duration;

use telemetry::{HostFields, LogLines};
use tracing::warn;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Registry};
use uuid::Uuid;

mod bounded_lines;

use bounded_lines::BoundedLines;

/// Of this process.
static LOG: OnceLock<BoundedLines> = OnceLock::new();

/// How often a process without heartbeats reports the lines that were dropped.
const DROPPED_LINES_INTERVAL: Duration = Duration::from_secs(10);

/// The role of a node's machine in a lab.
const HOST_ROLE: &str = "worker_compute";

/// Sends all events of the process to standard error. `filter` is in the syntax of `RUST_LOG`; `node_id` is `None` until the
/// configuration is read.
///
/// # Errors
/// `SVC_HOST_ROLE` is not a role of the lab, the process has a subscriber already, or no thread can be started.
pub fn init(filter: &str, node_id: Option<Uuid>) -> anyhow::Result<()> {
    let host = host_fields(|name| std::env::var(name).ok(), node_id)?;
    let filter = EnvFilter::try_new(filter).unwrap_or_else(|_| EnvFilter::new("info"));
    let log = BoundedLines::to(std::io::stderr())?;
    let lines = log.clone();
    Registry::default().with(filter).with(LogLines::new(move || lines.clone(), "node-agent", &host)).try_init()?;
    let _ = LOG.set(log);
    Ok(())
}

/// Logs how many lines were dropped, since the reader of the log did not take them.
pub fn report_dropped_lines() {
    let dropped = LOG.get().map_or(0, BoundedLines::take_dropped);
    if dropped > 0 {
        warn!(error_code = "log_blocked", dropped, "lines of the log were dropped: standard error did not take them");
    }
}

/// Reports dropped lines without an end, in a process without heartbeats.
pub async fn keep_reporting_dropped_lines() -> Infallible {
    loop {
        tokio::time::sleep(DROPPED_LINES_INTERVAL).await;
        report_dropped_lines();
    }
}

/// The host fields of a node always name its node id and role, configured or not.
fn host_fields(environment: impl Fn(&str) -> Option<String>, node_id: Option<Uuid>) -> anyhow::Result<HostFields> {
    let configured_fields = HostFields::gather(environment)?;
    let own_name = || nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    Ok(HostFields {
        host_role: configured_fields.host_role.or_else(|| Some(HOST_ROLE.to_owned())),
        host_name: configured_fields.host_name.or_else(own_name),
        lab_stack: configured_fields.lab_stack,
        node_id: node_id.map(|id| id.to_string()).or(configured_fields.node_id),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    /// What a process writes that logs one event.
    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_of_the_finalizer_have_the_fields_of_the_agents() {
        let lab = |name: &str| match name {
            "SVC_LAB_STACK" => Some("three-host".to_owned()),
            "SVC_NODE_ID" => Some(Uuid::from_u128(7).to_string()),
            _ => None,
        };
        let written = Written::default();
        let sink = written.clone();
        let host = host_fields(lab, None).unwrap();
        let subscriber = Registry::default().with(LogLines::new(move || sink.clone(), "node-agent", &host));
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(target: "gpuaas_finalizer", error_code = "c", error = "e", "m");
        });
        let finalizer = agent_package::log_lines::JsonLogLines::new("gpuaas_finalizer", lab, None);
        let finalizer =
            finalizer.line(agent_package::log_lines::Level::Warn, "m", &[("error_code", "c"), ("error", "e")]);
        let parsed = |text: &[u8]| {
            let mut line: serde_json::Value = serde_json::from_slice(text).unwrap();
            let timestamp = line["timestamp"].take();
            (line, timestamp.as_str().unwrap().len())
        };
        assert_eq!(parsed(finalizer.as_bytes()), parsed(&written.0.lock().unwrap()));
    }

    #[test]
    fn log_lines_name_the_node_and_its_host_role() {
        let node = Uuid::from_u128(7);
        let fields = host_fields(|_| None, Some(node)).unwrap();
        assert_eq!(fields.host_role.as_deref(), Some("worker_compute"));
        assert_eq!(fields.node_id, Some(node.to_string()));
        assert!(fields.host_name.is_some());
        assert!(host_fields(|_| Some("mainframe".to_owned()), None).is_err());
    }
}
