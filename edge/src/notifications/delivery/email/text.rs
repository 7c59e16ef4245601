//! The text of a mail: a subject and a plain text for people, made of a notification.

use std::fmt::Write as _;

use chrono::{DateTime, Utc};
use serde::Deserialize;
use uuid::Uuid;

use crate::outbound::http_client::one_line;

/// Columns of a line of prose.
const COLUMNS: usize = 78;
/// Characters of a value that a notification brings.
const MAX_VALUE: usize = 2_000;
/// Characters of a type in a subject.
const MAX_KIND: usize = 60;

/// A notification as [`crate::notifications::message`] writes it: the fields that a text is made of.
#[derive(Debug, Deserialize)]
pub(super) struct Notification {
    id: Value,
    #[serde(rename = "type")]
    kind: Value,
    pub(super) time: DateTime<Utc>,
    #[serde(default)]
    data: Data,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Data {
    allocation_id: Option<Uuid>,
    node_id: Option<Uuid>,
    session_id: Option<Uuid>,
    account_id: Option<Uuid>,
    payment_id: Option<Uuid>,
    refund_id: Option<Uuid>,
    rollout_id: Option<Uuid>,
    announcement_id: Option<Uuid>,
    from_state: Option<Value>,
    state: Option<Value>,
    reason: Option<Value>,
    attempt: Option<u32>,
    release_at: Option<DateTime<Utc>>,
    severity: Option<Value>,
    message: Option<Value>,
}

/// A text of a notification, on one line: it can begin no header and no line of the mail.
#[derive(Debug, Deserialize)]
#[serde(from = "String")]
struct Value(String);

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self(one_line(&text, MAX_VALUE))
    }
}

/// Subject and text of a mail.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Letter {
    pub(super) subject: String,
    pub(super) text: String,
}

/// The mail about a notification, for the owner of an endpoint of the service at `public_url`.
pub(super) fn letter(notification: &Notification, endpoint_id: &str, public_url: &str) -> Letter {
    let content = content(notification).unwrap_or_else(|| unknown(&notification.kind.0));
    let mut text = wrapped(&content.text);
    for (purpose, command) in &content.steps {
        let _ = write!(text, "\n{purpose}:\n    {command}\n");
    }
    text.push('\n');
    for (name, value) in facts(notification, public_url) {
        let _ = writeln!(text, "{name}: {value}");
    }
    let endpoint_id = one_line(endpoint_id, MAX_VALUE);
    let _ = write!(
        text,
        "\nTo see where you are notified: gpuctl notification-endpoints list\n\
         To end these messages: gpuctl notification-endpoints set {endpoint_id} --disable\n"
    );
    Letter { subject: content.subject, text }
}

/// The subject and text of an event type.
struct Content {
    subject: String,
    /// What happened and its consequences; paragraphs are separated by an empty line.
    text: String,
    /// The reader's options: a purpose and the command for it.
    steps: Vec<(&'static str, String)>,
}

impl Content {
    fn new(subject: impl Into<String>, text: impl Into<String>) -> Self {
        Self { subject: subject.into(), text: text.into(), steps: Vec::new() }
    }

    fn step(mut self, purpose: &'static str, command: impl Into<String>) -> Self {
        self.steps.push((purpose, command.into()));
        self
    }
}

/// The row to write when an event is added with a [`domain::event::NotificationScope`] to users.
fn content(notification: &Notification) -> Option<Content> {
    let data = &notification.data;
    let allocation = id_or(data.allocation_id, "ALLOCATION");
    let node = id_or(data.node_id, "NODE");
    let payment = id_or(data.payment_id, "PAYMENT");
    Some(match notification.kind.0.as_str() {
        "provisioning.requested" => Content::new(
            format!("Allocation {allocation} is requested"),
            "Your request for GPUs is accepted, and the service looks for a machine. It costs nothing before it is active.",
        )
        .step("To see how it goes on", format!("gpuctl allocations events {allocation}")),
        "provisioning.started" => Content::new(
            format!("Allocation {allocation} is being set up"),
            "A machine has been found for your allocation, and sets it up. It costs nothing before it is active.",
        )
        .step("To see how it goes on", format!("gpuctl allocations events {allocation}")),
        "provisioning.release_requested" => Content::new(
            format!("Allocation {allocation} is being released"),
            "Your allocation is being released: what runs on it is ended, and what you stored there is removed. It is billed no longer.",
        )
        .step("To see how it goes on", format!("gpuctl allocations events {allocation}")),
        "provisioning.active" => Content::new(
            format!("Allocation {allocation} is active"),
            "Your allocation is active: its GPUs are yours, and you can log in. It is billed from now until you release it.",
        )
        .step("To open a shell on it", format!("gpuctl ssh {allocation}"))
        .step("To release it", format!("gpuctl allocations release {allocation}")),
        "provisioning.failed" => Content::new(
            format!("Allocation {allocation} failed"),
            "Your request for GPUs failed before it became active. It costs nothing.",
        )
        .step("To see what happened", format!("gpuctl allocations events {allocation}"))
        .step("To see which GPUs are free", "gpuctl capacity"),
        "provisioning.release_failed" => Content::new(
            format!("The release of allocation {allocation} is delayed"),
            "Your allocation is being released, and the machine has not confirmed that everything of yours is removed. The \
             service or its operators repeat the clean-up, and no other tenant gets the GPUs before it has succeeded. Billing ended \
             when the release began. You do not have to do anything.",
        )
        .step("To see how it goes on", format!("gpuctl allocations events {allocation}")),
        "provisioning.release_exhausted" => Content::new(
            format!("Operators: the release of allocation {allocation} needs you"),
            "All attempts to clean up after an allocation have failed, and the service makes no further one by itself. The \
             node gets no new tenants until an operator has repeated or forced the release.",
        )
        .step("To see what the node reported", format!("gpuctl nodes tasks {node}"))
        .step(
            "To repeat the clean-up when the machine is repaired",
            format!("gpuctl allocations retry-release {allocation} --reason TEXT"),
        )
        .step(
            "To end the allocation without the machine's confirmation",
            format!("gpuctl allocations force-release {allocation} --reason TEXT"),
        ),
        "provisioning.released" => Content::new(
            format!("Allocation {allocation} is released"),
            "Your allocation has ended. Its machine is not yours any more, and what you stored there cannot be reached.",
        )
        .step("To see what it cost", format!("gpuctl billing ledger --allocation {allocation}")),
        "node.state_changed" => node_state(data, &node),
        "node.agent_update_failed" => {
            let why = value_or(&data.reason, "not reported").to_owned();
            Content::new(
                format!("Operators: the agent of node {node} was not updated"),
                format!(
                    "The agent of before is in use, and the node serves its tenants. The version that was ordered is not tried again there by \
                     itself. The reason is {why}."
                ),
            )
            .step("To see it", format!("gpuctl nodes show {node}"))
        }
        "node.rollout_stopped" => {
            let (rollout, why) = (id_or(data.rollout_id, "ROLLOUT"), value_or(&data.reason, "not reported").to_owned());
            Content::new(
                format!("Operators: rollout {rollout} has stopped"),
                format!(
                    "Node {node} failed: {why}. Its update failed, or it has a fault after it. Updates that were in flight go on; no other \
                     one begins."
                ),
            )
            .step("To see it", format!("gpuctl rollouts show {rollout}"))
            .step("To go on with the other nodes", format!("gpuctl rollouts resume {rollout} --reason TEXT"))
            .step("To end it", format!("gpuctl rollouts abort {rollout} --reason TEXT"))
        }
        "node.rollout_completed" => {
            let rollout = id_or(data.rollout_id, "ROLLOUT");
            Content::new(
                format!("Operators: rollout {rollout} is complete"),
                "Every node of the rollout was updated, has failed or was skipped.",
            )
            .step("To see them", format!("gpuctl rollouts show {rollout}"))
        }
        "node.tenant_faulted" => Content::new(
            format!("The machine of allocation {allocation} has a fault"),
            "The machine of your allocation has a critical fault. The allocation costs nothing from the fault on. It stays \
             yours until you release it: save what you can, release it, and rent another one.",
        )
        .step("To save your data", format!("gpuctl ssh {allocation}"))
        .step("To release it", format!("gpuctl allocations release {allocation}")),
        "node.evacuation_begun" => {
            let when = data.release_at.map_or_else(|| "soon".to_owned(), |at| format!("at {}", in_utc(at)));
            Content::new(
                format!("Allocation {allocation} has to be left"),
                format!(
                    "A GPU of your allocation, or its machine, needs maintenance. It works on: save your data, release the \
                     allocation and rent another one. What is still there {when} is released by the service, and cannot be \
                     reached any more.",
                ),
            )
            .step("To save your data", format!("gpuctl ssh {allocation}"))
            .step("To see what is wrong", format!("gpuctl allocations show {allocation}"))
            .step("To release it", format!("gpuctl allocations release {allocation}"))
        }
        "node.evacuation_ended" => Content::new(
            format!("Allocation {allocation} can stay"),
            "What was wrong with your allocation's GPU or machine is over. You do not have to leave it any more.",
        )
        .step("To see its state", format!("gpuctl allocations show {allocation}")),
        "terminal.opened" => Content::new(
            format!("A terminal was opened on allocation {allocation}"),
            "A terminal was opened on your allocation, in your name. If that was not you, end it, and end your logins at \
             your identity provider.",
        )
        .step("To see your terminals", format!("gpuctl terminal sessions list {allocation}"))
        .step("To end this one", format!("gpuctl terminal sessions end {allocation} {}", session(data))),
        "terminal.closed" => Content::new(
            format!("A terminal on allocation {allocation} was closed"),
            "A terminal on your allocation has ended, with the programs that ran in it. The allocation goes on.",
        )
        .step("To open another one", format!("gpuctl terminal {allocation}")),
        "terminal.browser_session_ended" => Content::new(
            "A login to the web console has ended",
            "Your login to the web console has ended, and its terminals with it.",
        )
        .step("To see what runs", "gpuctl allocations list"),
        "billing.balance_low" => Content::new(
            "Your balance is low",
            "The balance of your billing account has fallen below the threshold. When it is used up, what runs on it is \
             released.",
        )
        .step("To see how long it lasts", "gpuctl billing balance")
        .step("To pay in", "gpuctl billing top-up --amount AMOUNT"),
        "billing.balance_depleted" => {
            let when = data.release_at.map_or_else(|| "soon".to_owned(), |at| format!("at {}", in_utc(at)));
            Content::new(
                format!("Your balance is used up: allocations are released {when}"),
                format!(
                    "Your billing account cannot pay for what runs on it any longer. Unless money comes in, the service \
                     releases these allocations {when}, and what is stored on their machines is lost."
                ),
            )
            .step("To pay in", "gpuctl billing top-up --amount AMOUNT")
            .step("To see what runs", "gpuctl allocations list")
        }
        "billing.payment_deposited" => Content::new(
            "Your payment has arrived",
            "Your payment has arrived in the billing account, and you can spend it.",
        )
        .step("To see the payment", format!("gpuctl billing payment {payment}"))
        .step("To see the balance", "gpuctl billing balance"),
        "billing.deposit_refused" => Content::new(
            "Your payment goes back to you",
            "The billing account could not take your payment. The service has asked the payment processor to pay all of it \
             back to you.",
        )
        .step("To see what becomes of it", format!("gpuctl billing payment {payment}")),
        "billing.refund_succeeded" => Content::new(
            "Your refund is paid",
            "The payment processor has paid your refund. It can take your bank some days to show it.",
        )
        .step("To see the payment and its refunds", format!("gpuctl billing payment {payment}")),
        "billing.refund_refused" => Content::new(
            "Your refund is refused",
            "The billing account does not have the money for your refund any longer. Nothing was taken from it.",
        )
        .step("To see the balance", "gpuctl billing balance")
        .step("To see the payment and its refunds", format!("gpuctl billing payment {payment}")),
        "billing.refund_given_back" => Content::new(
            "Your refund could not be paid",
            "The payment processor could not pay your refund. The billing account has the money again, and you can spend it \
             or ask for the refund once more.",
        )
        .step("To see the payment and its refunds", format!("gpuctl billing payment {payment}")),
        "billing.reversal_posted" => reversal(data, &payment),
        "notification.announced" => announcement(data),
        "notification.test" => Content::new(
            "Test of your notifications",
            "This is the test that you asked for. E-mail from the service reaches you, and nothing else has happened.",
        ),
        _ => return None,
    })
}

/// Operators read the reason; tenants of the node read its consequences for them.
fn node_state(data: &Data, node: &str) -> Content {
    let state = value_or(&data.state, "in another state");
    if data.reason.is_some() {
        let before = data.from_state.as_ref().map(|from| format!(" It was {} before.", from.0)).unwrap_or_default();
        return Content::new(format!("Operators: node {node} is {state}"), format!("The node is {state} now.{before}"))
            .step("To see it", format!("gpuctl nodes show {node}"));
    }
    let meaning = match state {
        "active" => "It is in service: you can work on it.",
        "offline" => {
            "The service cannot reach it. Your programs may still run; until it is back, you may not be able to log in, and a \
             release has to wait."
        }
        "draining" => {
            "It leaves the service when the last allocation on it has ended. Yours goes on until you release it."
        }
        "quarantined" => {
            "The operators examine it, and it takes no new allocations. Yours goes on until you release it."
        }
        _ => "Your allocation shows what that means for you.",
    };
    Content::new(
        format!("A machine that you rent on is {state}"),
        format!("A machine on which you have an allocation is {state} now. {meaning}"),
    )
    .step("To see your allocations", "gpuctl allocations list")
}

fn reversal(data: &Data, payment: &str) -> Content {
    let content = if value_or(&data.state, "") == "reversal_undone" {
        Content::new(
            "A payment that was taken back is in your account again",
            "The payment processor had taken back a payment of yours, and has undone that. The billing account has the money \
             again.",
        )
    } else {
        Content::new(
            "A payment of yours was taken back",
            "The payment processor or your bank has taken back a payment. The service has deducted it from the billing \
             account in full. If the balance is below zero, what runs on the account is released, and you can rent again when \
             you have paid in.",
        )
    };
    content
        .step("To see the payment", format!("gpuctl billing payment {payment}"))
        .step("To see the balance", "gpuctl billing balance")
}

fn announcement(data: &Data) -> Content {
    let subject = match value_or(&data.severity, "info") {
        "critical" => "Critical: an announcement of the operators",
        "warning" => "Warning: an announcement of the operators",
        _ => "An announcement of the operators",
    };
    let message = value_or(&data.message, "(The announcement has no text.)");
    Content::new(subject, format!("The operators of the service announce:\n\n{message}"))
}

/// For an event that this version does not know: another member of the cluster may be newer.
fn unknown(kind: &str) -> Content {
    let subject = if kind.is_empty() {
        "A notification".to_owned()
    } else {
        format!("Notification {}", one_line(kind, MAX_KIND))
    };
    Content::new(subject, "Something happened that concerns you. These are its details.")
        .step("To see what runs", "gpuctl allocations list")
        .step("To see the balance", "gpuctl billing balance")
}

/// The facts of the notification, under names for people.
fn facts(notification: &Notification, public_url: &str) -> Vec<(&'static str, String)> {
    let data = &notification.data;
    let ids = [
        ("Allocation", data.allocation_id),
        ("Node", data.node_id),
        ("Terminal session", data.session_id),
        ("Billing account", data.account_id),
        ("Payment", data.payment_id),
        ("Refund", data.refund_id),
        ("Rollout", data.rollout_id),
        ("Announcement", data.announcement_id),
    ];
    let ids = ids.into_iter().filter_map(|(name, id)| Some((name, id?.to_string())));
    let values = [("State", &data.state), ("State before", &data.from_state), ("Reason", &data.reason)];
    let values = values.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?.0.clone())));
    let attempt = data.attempt.map(|attempt| ("Attempt", attempt.to_string()));
    let release_at = data.release_at.map(|at| ("Release", in_utc(at)));
    let event = [
        ("Event", format!("{}, {}", notification.kind.0, notification.id.0)),
        ("Time", in_utc(notification.time)),
        ("Service", one_line(public_url, MAX_VALUE)),
    ];
    ids.chain(values).chain(attempt).chain(release_at).chain(event).collect()
}

fn id_or(id: Option<Uuid>, otherwise: &str) -> String {
    id.map_or_else(|| otherwise.to_owned(), |id| id.to_string())
}

fn session(data: &Data) -> String {
    id_or(data.session_id, "SESSION")
}

fn value_or<'a>(value: &'a Option<Value>, otherwise: &'a str) -> &'a str {
    value.as_ref().map_or(otherwise, |value| value.0.as_str())
}

fn in_utc(at: DateTime<Utc>) -> String {
    at.format("%Y-%m-%d %H:%M:%S UTC").to_string()
}

/// The paragraphs of a text in lines of bounded length; a longer word has a line of its own.
fn wrapped(text: &str) -> String {
    let mut lines = String::new();
    for paragraph in text.split("\n\n") {
        let mut column = 0;
        if !lines.is_empty() {
            lines.push('\n');
        }
        for word in paragraph.split_whitespace() {
            let length = word.chars().count();
            if column > 0 && column + 1 + length > COLUMNS {
                lines.push('\n');
                column = 0;
            } else if column > 0 {
                lines.push(' ');
                column += 1;
            }
            lines.push_str(word);
            column += length;
        }
        lines.push('\n');
    }
    lines
}

#[cfg(test)]
mod tests;
