//! Administrators: the machines, and what is done to them.

use crate::api::{Api, Query};
use crate::failure::Failure;
use crate::out::Column;
use serde_json::json;
use uuid::Uuid;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// All machines.
    #[command(visible_alias = "ls")]
    List {
        /// Those in this state, such as active, offline or quarantined.
        #[arg(long)]
        state: Option<String>,
        /// Those of this SKU.
        #[arg(long)]
        sku: Option<String>,
        /// At most so many.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
        limit: u16,
    },
    /// One machine.
    Show { node: Uuid },
    /// What it is told to do, and what it did.
    Tasks { node: Uuid },
    /// Takes it out of use.
    Retire {
        #[command(flatten)]
        order: Order,
        /// Let what runs on it end first.
        #[arg(long)]
        drain: bool,
    },
    /// Takes a retired one into use again.
    Reactivate(Order),
    /// Removes a retired one for good.
    Remove(Order),
    /// Lets nothing new onto it until somebody has looked.
    Quarantine(Order),
    /// Somebody has looked.
    ReleaseQuarantine(Order),
}

#[derive(Debug, clap::Args)]
pub(crate) struct Order {
    node: Uuid,
    /// Why; it stands in the audit log.
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

const IN_A_LIST: [Column; 8] = [
    ("ID", "/id"),
    ("HOST", "/host"),
    ("STATE", "/state"),
    ("SKU", "/sku"),
    ("REGION", "/region_code"),
    ("FREE", "/gpus_free"),
    ("GPUS", "/gpus_total"),
    ("TAKES NOBODY BECAUSE", "/unschedulable_reason"),
];

const ALONE: [Column; 18] = [
    ("id", "/id"),
    ("host", "/host"),
    ("port", "/port"),
    ("state", "/state"),
    ("why", "/state_reason/message"),
    ("since", "/state_entered_at"),
    ("state ends by", "/state_deadline_at"),
    ("overdue", "/overdue"),
    ("takes nobody because", "/unschedulable_reason"),
    ("SKU", "/sku"),
    ("region", "/region_code"),
    ("GPUs", "/gpus_total"),
    ("GPUs free", "/gpus_free"),
    ("health", "/health/status"),
    ("agent", "/agent/version"),
    ("last seen", "/agent/last_seen_at"),
    ("certificate ends", "/agent/cert_not_after"),
    ("onboarding", "/onboarding_mode"),
];

const OPEN: [Column; 7] = [
    ("ID", "/task_id"),
    ("TYPE", "/type"),
    ("STATE", "/state"),
    ("ATTEMPT", "/attempt"),
    ("ORDERED", "/ordered_at"),
    ("DUE", "/deadline_at"),
    ("OVERDUE", "/overdue"),
];

const ENDED: [Column; 6] = [
    ("ID", "/task_id"),
    ("TYPE", "/type"),
    ("ATTEMPT", "/attempt"),
    ("ENDED", "/ended_at"),
    ("SUCCEEDED", "/succeeded"),
    ("ERROR", "/error/message"),
];

fn path(node: Uuid) -> String {
    format!("/api/v1/admin/nodes/{node}")
}

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::List { state, sku, limit } => {
            let mut query: Query<'_> = Vec::new();
            query.extend(state.map(|state| ("state", state)));
            query.extend(sku.map(|sku| ("sku", sku)));
            api.out.list(&api.list("/api/v1/admin/nodes", &query, limit.into()).await?, &IN_A_LIST)
        }
        Command::Show { node } => api.out.show(&api.get(&path(node), &[]).await?, &ALONE),
        Command::Tasks { node } => tasks(node, api).await,
        Command::Retire { order, drain } => {
            let body = json!({ "reason": order.reason, "drain": drain });
            api.out.show(&api.post(&format!("{}/retire", path(order.node)), &body).await?, &ALONE)
        }
        Command::Reactivate(order) => ordered(&order, "reactivate", api).await,
        Command::Remove(order) => ordered(&order, "remove", api).await,
        Command::Quarantine(order) => ordered(&order, "quarantine", api).await,
        Command::ReleaseQuarantine(order) => ordered(&order, "release-quarantine", api).await,
    }
}

async fn ordered(order: &Order, verb: &str, api: &Api) -> Result<(), Failure> {
    let body = json!({ "reason": order.reason });
    api.out.show(&api.post(&format!("{}/{verb}", path(order.node)), &body).await?, &ALONE)
}

async fn tasks(node: Uuid, api: &Api) -> Result<(), Failure> {
    let found = api.get(&format!("{}/tasks", path(node)), &[]).await?;
    if api.out.is_json() {
        return api.out.json(&found);
    }
    for (title, name, columns) in [("Open:", "open", &OPEN[..]), ("Ended:", "ended", &ENDED[..])] {
        api.out.line(title)?;
        api.out.list(&json!({ "items": found[name], "next_page": null }), columns)?;
    }
    Ok(())
}
