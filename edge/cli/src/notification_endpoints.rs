//! Notification endpoints: webhooks and e-mail addresses, and their dead letters.

use crate::api::{Api, Query};
use crate::completion;
use crate::confirmation::Confirm;
use crate::failure::Failure;
use crate::output::Column;
use crate::resource_ref::{NOTIFICATION_ENDPOINT, Ref};
use clap::builder::PossibleValuesParser;
use serde_json::{Map, Value, json};
use uuid::Uuid;

/// The types of events that endpoints are notified of, in the order of the API's description.
const EVENTS: [&str; 19] = [
    "provisioning.active",
    "provisioning.failed",
    "provisioning.release_failed",
    "provisioning.release_exhausted",
    "provisioning.released",
    "node.state_changed",
    "node.tenant_faulted",
    "node.evacuation_begun",
    "node.evacuation_ended",
    "terminal.opened",
    "terminal.closed",
    "billing.balance_low",
    "billing.balance_depleted",
    "billing.payment_deposited",
    "billing.deposit_refused",
    "billing.refund_succeeded",
    "billing.refund_refused",
    "billing.refund_given_back",
    "billing.reversal_posted",
];

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Lists your endpoints, oldest first.
    #[command(visible_alias = "ls")]
    List {
        /// List those of your organisation.
        #[arg(long, conflicts_with_all = ["all", "state"])]
        org: bool,
        /// Administrators: list those of all users.
        #[arg(long)]
        all: bool,
        /// Administrators: list those in this state.
        #[arg(long, requires = "all", value_parser = ["active", "failing", "disabled"])]
        state: Option<String>,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
        limit: u16,
    },
    /// Makes an endpoint; `secret` shows what signs the messages of a webhook.
    Create(Create),
    /// Shows one endpoint, with its last attempts.
    Show {
        #[arg(value_name = "ENDPOINT", add = completion::of(&NOTIFICATION_ENDPOINT))]
        endpoint: Ref,
    },
    /// Changes an endpoint, or switches it on or off.
    Set(Set),
    /// Deletes an endpoint, with the messages that wait for it.
    #[command(visible_alias = "rm")]
    Delete {
        #[arg(value_name = "ENDPOINT", add = completion::of(&NOTIFICATION_ENDPOINT))]
        endpoint: Ref,
        #[command(flatten)]
        confirm: Confirm,
    },
    /// Prints the secret that signs a webhook's messages.
    Secret {
        #[arg(value_name = "ENDPOINT", add = completion::of(&NOTIFICATION_ENDPOINT))]
        endpoint: Ref,
    },
    /// Gives a webhook another secret. The one before signs for 24 hours beside it.
    RotateSecret {
        #[arg(value_name = "ENDPOINT", add = completion::of(&NOTIFICATION_ENDPOINT))]
        endpoint: Ref,
    },
    /// Sends the endpoint a test message.
    Test {
        #[arg(value_name = "ENDPOINT", add = completion::of(&NOTIFICATION_ENDPOINT))]
        endpoint: Ref,
    },
    /// Lists messages that could not be delivered (dead letters).
    DeadLetters {
        #[arg(value_name = "ENDPOINT", add = completion::of(&NOTIFICATION_ENDPOINT))]
        endpoint: Ref,
    },
    /// Sends dead letters again.
    Resend(Letters),
    /// Discards dead letters.
    Dismiss(Letters),
}

#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("target").required(true))]
pub(crate) struct Create {
    /// A webhook: where messages are posted.
    #[arg(long, group = "target")]
    url: Option<String>,
    /// An e-mail to the address that your identity provider has verified.
    #[arg(long, group = "target")]
    email: bool,
    /// An event type that it is notified of; repeatable; all types by default.
    #[arg(long = "event", value_name = "TYPE", value_parser = PossibleValuesParser::new(EVENTS))]
    events: Vec<String>,
    /// For your organisation's events.
    #[arg(long)]
    org: bool,
}

#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("change").required(true).multiple(true))]
pub(crate) struct Set {
    #[arg(value_name = "ENDPOINT", add = completion::of(&NOTIFICATION_ENDPOINT))]
    endpoint: Ref,
    /// Where a webhook's messages are posted.
    #[arg(long, group = "change")]
    url: Option<String>,
    /// An event type that it is notified of; repeatable.
    #[arg(long = "event", value_name = "TYPE", group = "change", value_parser = PossibleValuesParser::new(EVENTS))]
    events: Vec<String>,
    /// All events.
    #[arg(long, group = "change", conflicts_with = "events")]
    all_events: bool,
    /// What waits is sent at once.
    #[arg(long, group = "change")]
    enable: bool,
    /// Nothing is sent, and nothing is stored to be sent later.
    #[arg(long, group = "change", conflicts_with = "enable")]
    disable: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Letters {
    #[arg(value_name = "ENDPOINT", add = completion::of(&NOTIFICATION_ENDPOINT))]
    endpoint: Ref,
    /// This message alone.
    #[arg(long, value_name = "ID")]
    message: Option<Uuid>,
    /// The reason, for the audit log.
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
}

const IN_A_LIST: [Column; 7] = [
    ("ID", "/id"),
    ("KIND", "/kind"),
    ("URL", "/url"),
    ("ADDRESS", "/address"),
    ("STATE", "/state"),
    ("WAITING", "/waiting"),
    ("DEAD", "/dead_letters"),
];

const ALONE: [Column; 16] = [
    ("id", "/id"),
    ("kind", "/kind"),
    ("url", "/url"),
    ("address", "/address"),
    ("user", "/user_id"),
    ("organisation", "/org_id"),
    ("events", "/events"),
    ("state", "/state"),
    ("disabled because", "/disabled_because"),
    ("failing since", "/failing_since"),
    ("waiting", "/waiting"),
    ("next attempt", "/next_attempt_at"),
    ("dead letters", "/dead_letters"),
    ("forgotten", "/forgotten"),
    ("created", "/created_at"),
    ("by", "/created_by"),
];

const ATTEMPTS: [Column; 4] = [("MESSAGE", "/message_id"), ("EVENT", "/event"), ("AT", "/at"), ("ERROR", "/error")];

const DEAD: [Column; 5] = [
    ("MESSAGE", "/message_id"),
    ("EVENT", "/event"),
    ("QUEUED", "/queued_at"),
    ("ATTEMPTS", "/attempts"),
    ("LAST ERROR", "/last_error"),
];

const SECRET: [Column; 1] = [("secret", "/secret")];

/// The administrators' list of all endpoints.
const EVERYBODYS: &str = "/api/v1/admin/notification-endpoints";

fn path(endpoint: Uuid) -> String {
    format!("{}/{endpoint}", NOTIFICATION_ENDPOINT.path)
}

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::List { org, all, state, limit } => {
            let mut query: Query<'_> = state.map(|state| ("state", state)).into_iter().collect();
            if org {
                query.push(("holder", "org".to_owned()));
            }
            let path = if all { EVERYBODYS } else { NOTIFICATION_ENDPOINT.path };
            api.out.list(&api.list(path, &query, limit.into()).await?, &IN_A_LIST)
        }
        Command::Create(wanted) => create(wanted, api).await,
        Command::Show { endpoint } => {
            let found = api.get(&path(endpoint.id(&NOTIFICATION_ENDPOINT, api).await?), &[]).await?;
            if api.out.is_json() {
                return api.out.json(&found);
            }
            api.out.show(&found, &ALONE)?;
            api.out.rows_below(&found["attempts"], &ATTEMPTS)
        }
        Command::Set(change) => {
            let id = change.endpoint.id(&NOTIFICATION_ENDPOINT, api).await?;
            api.out.show(&api.patch(&path(id), &change.body()).await?, &ALONE)
        }
        Command::Delete { endpoint, confirm } => {
            let id = endpoint.id(&NOTIFICATION_ENDPOINT, api).await?;
            confirm
                .ask(&format!("Delete notification endpoint {endpoint} ({id}) with the messages that wait for it?"))?;
            let deleted = api.delete(&path(id), &[]).await?;
            api.out.done(&deleted, &format!("Notification endpoint {endpoint} is deleted."))
        }
        Command::Secret { endpoint } => {
            let id = endpoint.id(&NOTIFICATION_ENDPOINT, api).await?;
            api.out.show(&api.get(&format!("{}/secret", path(id)), &[]).await?, &SECRET)
        }
        Command::RotateSecret { endpoint } => {
            let id = endpoint.id(&NOTIFICATION_ENDPOINT, api).await?;
            api.out.show(&api.post_empty(&format!("{}/secret", path(id))).await?, &SECRET)?;
            api.out.notice("Messages are signed with the secret before, too, for 24 hours.");
            Ok(())
        }
        Command::Test { endpoint } => {
            let id = endpoint.id(&NOTIFICATION_ENDPOINT, api).await?;
            let asked = api.post_empty(&format!("{}/test", path(id))).await?;
            let next =
                format!("A test message is on its way. What came of it: gpuctl notification-endpoints show {id}");
            api.out.done(&asked, &next)
        }
        Command::DeadLetters { endpoint } => {
            let id = endpoint.id(&NOTIFICATION_ENDPOINT, api).await?;
            api.out.list(&api.get(&format!("{}/dead-letters", path(id)), &[]).await?, &DEAD)
        }
        Command::Resend(letters) => letters.settle("resend", api).await,
        Command::Dismiss(letters) => letters.settle("dismiss", api).await,
    }
}

async fn create(wanted: Create, api: &Api) -> Result<(), Failure> {
    let mut body = json!({ "kind": if wanted.email { "email" } else { "webhook" } });
    if let Some(url) = wanted.url {
        body["url"] = json!(url);
    }
    if !wanted.events.is_empty() {
        body["events"] = json!(wanted.events);
    }
    if wanted.org {
        body["holder"] = json!("org");
    }
    let made = api.post(NOTIFICATION_ENDPOINT.path, &body).await?;
    api.out.show(&made, &ALONE)?;
    if wanted.email {
        return Ok(());
    }
    let id = crate::printable::cell(&made["id"]);
    api.out.notice(&format!("Its receiver needs the secret: gpuctl notification-endpoints secret {id}"));
    Ok(())
}

impl Set {
    fn body(&self) -> Value {
        let mut body = Map::new();
        if let Some(url) = &self.url {
            body.insert("url".to_owned(), json!(url));
        }
        if self.all_events {
            body.insert("events".to_owned(), Value::Null);
        } else if !self.events.is_empty() {
            body.insert("events".to_owned(), json!(self.events));
        }
        if self.enable || self.disable {
            body.insert("enabled".to_owned(), json!(self.enable));
        }
        body.into()
    }
}

impl Letters {
    async fn settle(self, how: &str, api: &Api) -> Result<(), Failure> {
        let id = self.endpoint.id(&NOTIFICATION_ENDPOINT, api).await?;
        let mut body = json!({});
        if let Some(message) = self.message {
            body["message_id"] = json!(message);
        }
        if let Some(reason) = self.reason {
            body["reason"] = json!(reason);
        }
        let settled = api.post(&format!("{}/dead-letters/{how}", path(id)), &body).await?;
        api.out.show(&settled, &ALONE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn events_are_those_of_the_api() {
        let file = "../src/api/tests/snapshots/edge__api__tests__contract__openapi.snap";
        let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
        let description: Value = serde_json::from_str(text.splitn(3, "---\n").nth(2).unwrap()).unwrap();
        let mut groups: Vec<(&str, Vec<&str>)> = Vec::new();
        for (group, event) in EVENTS.iter().map(|event| event.split_once('.').unwrap()) {
            match groups.last_mut() {
                Some((last, events)) if *last == group => events.push(event),
                _ => groups.push((group, vec![event])),
            }
        }
        let groups: Vec<_> = groups.iter().map(|(group, events)| format!(r"{group}\.({})", events.join("|"))).collect();
        let pattern = &description["components"]["schemas"]["EventName"]["pattern"];
        assert_eq!(*pattern, format!("^({})$", groups.join("|")));
    }

    #[test]
    fn unknown_event_is_refused_with_the_list_of_events() {
        let command_line = ["gpuctl", "notification-endpoints", "create", "--email", "--event", "billing.low"];
        let error = <crate::Arguments as clap::Parser>::try_parse_from(command_line).unwrap_err().to_string();
        assert!(EVENTS.iter().all(|event| error.contains(event)), "{error}");
    }
}
