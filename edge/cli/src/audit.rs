//! The audit log, for administrators and auditors.

use crate::api::{Api, Query};
use crate::failure::Failure;
use crate::instant;
use crate::output::Column;
use chrono::{DateTime, Utc};
use uuid::Uuid;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Lists the audit log, newest first.
    #[command(visible_alias = "ls")]
    List(AuditFilter),
}

#[derive(Debug, clap::Args)]
pub(crate) struct AuditFilter {
    /// The actor: user:…, node:…, service-account:… or system:….
    #[arg(long)]
    actor: Option<String>,
    /// The action, such as nodes.retire.
    #[arg(long)]
    action: Option<String>,
    /// The kind of the target, such as node.
    #[arg(long, value_name = "KIND")]
    target_kind: Option<String>,
    /// The target's id.
    #[arg(long, value_name = "ID")]
    target: Option<Uuid>,
    /// The correlation id of the request that led to it.
    #[arg(long, value_name = "ID")]
    correlation_id: Option<String>,
    /// From this instant on (2026-11-22T12:00:00Z).
    #[arg(long, value_name = "INSTANT", value_parser = instant::parse)]
    from: Option<DateTime<Utc>>,
    /// Before this instant.
    #[arg(long, value_name = "INSTANT", value_parser = instant::parse)]
    until: Option<DateTime<Utc>>,
    /// Show at most this many.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..=10000))]
    limit: u16,
}

const ROWS: [Column; 7] = [
    ("AT", "/at"),
    ("ACTOR", "/actor"),
    ("ACTION", "/action"),
    ("TARGET", "/target/kind"),
    ("ID", "/target/id"),
    ("CORRELATION ID", "/correlation_id"),
    ("METADATA", "/metadata"),
];

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    let Command::List(filter) = command;
    let given = [
        ("actor", filter.actor),
        ("action", filter.action),
        ("target_kind", filter.target_kind),
        ("target_id", filter.target.map(|id| id.to_string())),
        ("correlation_id", filter.correlation_id),
        ("from", filter.from.map(|at| at.to_rfc3339())),
        ("until", filter.until.map(|at| at.to_rfc3339())),
    ];
    let query: Query<'_> = given.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
    api.out.list(&api.list("/api/v1/admin/audit-log", &query, filter.limit.into()).await?, &ROWS)
}
