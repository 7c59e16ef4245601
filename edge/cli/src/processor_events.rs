//! Events of the payment processor and their outcome, for billing operators.

use crate::api::{Api, Query};
use crate::completion;
use crate::failure::Failure;
use crate::output::Column;
use crate::resource_ref::{PROCESSOR_EVENT, Ref};
use serde_json::json;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Lists the processor's events, oldest first.
    #[command(visible_alias = "ls")]
    List {
        /// List those in this state: received, retrying, dead, processed, dismissed.
        #[arg(long)]
        state: Option<String>,
        /// List the one with this id at the processor (`evt_…`).
        #[arg(long, value_name = "ID")]
        event: Option<String>,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
        limit: u16,
    },
    /// Shows one event.
    Show {
        #[arg(add = completion::of(&PROCESSOR_EVENT))]
        event: Ref,
    },
    /// Processes a dead event again.
    Retry(EventAction),
    /// Ends a dead event without processing it.
    Dismiss(EventAction),
}

#[derive(Debug, clap::Args)]
pub(crate) struct EventAction {
    #[arg(add = completion::of(&PROCESSOR_EVENT))]
    event: Ref,
    /// The reason, for the audit log.
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

const IN_A_LIST: [Column; 7] = [
    ("ID", "/id"),
    ("AT THE PROCESSOR", "/event_id"),
    ("TYPE", "/event_type"),
    ("STATE", "/state"),
    ("RECEIVED", "/received_at"),
    ("ATTEMPTS", "/attempts"),
    ("LAST ERROR", "/last_error"),
];

const ALONE: [Column; 15] = [
    ("id", "/id"),
    ("at the processor", "/event_id"),
    ("type", "/event_type"),
    ("object", "/object_id"),
    ("state", "/state"),
    ("outcome", "/outcome"),
    ("occurred", "/occurred_at"),
    ("received", "/received_at"),
    ("attempts", "/attempts"),
    ("last error", "/last_error"),
    ("next attempt", "/next_attempt_at"),
    ("state ends by", "/deadline_at"),
    ("overdue", "/overdue"),
    ("ended", "/ended_at"),
    ("dismissed because", "/dismissed_because"),
];

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::List { state, event, limit } => {
            let given = [("state", state), ("event_id", event)];
            let query: Query<'_> = given.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
            api.out.list(&api.list(PROCESSOR_EVENT.path, &query, limit.into()).await?, &IN_A_LIST)
        }
        Command::Show { event } => {
            let id = event.id(&PROCESSOR_EVENT, api).await?;
            api.out.show(&api.get(&format!("{}/{id}", PROCESSOR_EVENT.path), &[]).await?, &ALONE)
        }
        Command::Retry(order) => send_action(&order, "retry", api).await,
        Command::Dismiss(order) => send_action(&order, "dismiss", api).await,
    }
}

async fn send_action(order: &EventAction, verb: &str, api: &Api) -> Result<(), Failure> {
    let id = order.event.id(&PROCESSOR_EVENT, api).await?;
    let body = json!({ "reason": order.reason });
    api.out.show(&api.post(&format!("{}/{id}/{verb}", PROCESSOR_EVENT.path), &body).await?, &ALONE)
}
