//! Structured logs: one JSON object a line on standard error, with the fields of the specification (*Observability surface*).

use telemetry::{HostFields, Lines};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Registry};
use uuid::Uuid;

/// What a node's machine is to a lab.
const HOST_ROLE: &str = "worker_compute";

/// Sends all events of the process to standard error. `filter` is in the syntax of `RUST_LOG`; `node_id` is missing before the
/// configuration is read.
///
/// # Errors
/// `SVC_HOST_ROLE` is none of the lab's, or the process has a subscriber already.
pub fn init(filter: &str, node_id: Option<Uuid>) -> anyhow::Result<()> {
    let host = host_fields(|name| std::env::var(name).ok(), node_id)?;
    let filter = EnvFilter::try_new(filter).unwrap_or_else(|_| EnvFilter::new("info"));
    let lines = Lines::new(std::io::stderr, "node-agent", &host);
    Registry::default().with(filter).with(lines).try_init()?;
    Ok(())
}

/// A node says which it is, on which machine, whether it is told or not.
fn host_fields(environment: impl Fn(&str) -> Option<String>, node_id: Option<Uuid>) -> anyhow::Result<HostFields> {
    let told = HostFields::gather(environment)?;
    let own_name = || nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    Ok(HostFields {
        host_role: told.host_role.or_else(|| Some(HOST_ROLE.to_owned())),
        host_name: told.host_name.or_else(own_name),
        lab_stack: told.lab_stack,
        node_id: node_id.map(|id| id.to_string()).or(told.node_id),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_node_says_which_it_is_and_on_which_machine() {
        let node = Uuid::from_u128(7);
        let fields = host_fields(|_| None, Some(node)).unwrap();
        assert_eq!(fields.host_role.as_deref(), Some("worker_compute"));
        assert_eq!(fields.node_id, Some(node.to_string()));
        assert!(fields.host_name.is_some());
        assert!(host_fields(|_| Some("mainframe".to_owned()), None).is_err());
    }
}
